//! What is handed to the journal, and what becomes of it.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mainstay_core::call::StreamId;
use mainstay_core::id::{Epoch, SessionKey};
use mainstay_core::time::Timestamp;
use thiserror::Error;

use super::call::{Call, Ending};
use super::event::{Event, Source};
use super::question::Question;

/// Something to be kept of a stream, and by which right.
#[derive(Clone, PartialEq, Eq)]
pub struct Entry {
    /// Whose stream.
    pub session: SessionKey,
    /// Which stream.
    pub stream: StreamId,
    /// The epoch of the worker that appends. The first entry of a stream claims it; later ones are refused unless they
    /// come from whoever has claimed it last.
    pub claim: Epoch,
    /// The present.
    pub at: Timestamp,
    /// What is to be kept.
    pub content: Content,
}

/// What is to be kept of a stream.
#[derive(Clone, PartialEq, Eq)]
pub enum Content {
    /// The call that the stream answers. Before its first event, so that nothing is kept that leads nowhere.
    Call(Call),
    /// An event. Its sequence is above every one before; one that has an ending is the last.
    Event(Event),
    /// How far the server's own stream was read, where that brought nothing for the client.
    Reached(Source),
    /// The client's connection has taken everything up to this sequence. A stream that has ended and was delivered is the
    /// first to go when room is needed; so it is worth saying for the last event, and hardly for every one.
    Delivered(u64),
    /// The stream ends without a last event.
    Ended(Ending),
    /// A question of the server, and the event by which it goes out. Both are kept, or neither: what was asked leads back,
    /// and what leads back was asked.
    Question(Box<Question>, Event),
}

impl Content {
    /// The word for it in logs.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Call(_) => "call",
            Self::Event(_) => "event",
            Self::Reached(_) => "reached",
            Self::Delivered(_) => "delivered",
            Self::Ended(_) => "ended",
            Self::Question(..) => "question",
        }
    }

    /// The event that it brings, if it brings one.
    pub(super) fn event(&self) -> Option<&Event> {
        match self {
            Self::Event(event) | Self::Question(_, event) => Some(event),
            Self::Call(_) | Self::Reached(_) | Self::Delivered(_) | Self::Ended(_) => None,
        }
    }

    /// The length of its message, if it is an event.
    pub(super) fn message_bytes(&self) -> usize {
        self.event().map_or(0, |event| event.message.len())
    }

    /// How many bytes of the queue it takes.
    pub(super) fn weight_bytes(&self) -> usize {
        let own = match self {
            Self::Call(call) => call.request.len() + call.method.len() + call.name.as_deref().map_or(0, str::len),
            Self::Event(event) => event.weight_bytes(),
            Self::Question(question, event) => question.original.len() + event.weight_bytes(),
            Self::Reached(source) => source.text_bytes(),
            Self::Delivered(_) | Self::Ended(_) => 0,
        };
        own + ENTRY_BYTES_MIN
    }
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Entry");
        shown.field("session", &self.session).field("stream", &self.stream).field("claim", &self.claim);
        shown.field("content", &self.content.as_str()).finish_non_exhaustive()
    }
}

/// Who hears what becomes of the events of a stream. It is called on the journal's writing thread, so it must be brief and
/// must not panic; it is never called from within [`append`](super::Journal::append).
pub trait Witness: Send + Sync {
    /// Every event up to the sequence `through` that was handed over and not reported as lost is process-durable.
    fn durable(&self, through: u64);

    /// The event `sequence` is not kept. It may be sent all the same: a client that comes back after a crash may miss it.
    fn lost(&self, sequence: u64, why: Lost);
}

/// An entry that was accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accepted {
    /// It waits for the writer; the witness will hear of it.
    Queued,
    /// It is kept already, as well as memory keeps it. The witness hears nothing.
    Kept,
}

/// Why something is not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Lost {
    /// Too much waits for the writer already.
    #[error("the journal's queue is full")]
    Crowded,
    /// The message is larger than any that is kept.
    #[error("the message is too large for the journal")]
    TooLarge,
    /// Another worker has claimed the stream: this one must not go on with it.
    #[error("another worker has claimed the stream")]
    Claimed,
    /// Its sequence is not above those that are kept, or the stream has ended.
    #[error("its place in the stream is taken, or after the end")]
    Misplaced,
    /// The session has as much as is kept of one that does not read.
    #[error("the session keeps too much that it has not read")]
    Overdrawn,
    /// The disk, or the journal's share of it, is full.
    #[error("the journal's disk is full")]
    Full,
    /// The journal can't be written for another reason, which is in the log.
    #[error("the journal can't be written")]
    Unavailable,
}

/// An entry and who hears of it.
pub(super) struct Handed {
    pub(super) entry: Entry,
    pub(super) witness: Option<Arc<dyn Witness>>,
    at: Instant,
}

impl Handed {
    /// Now.
    #[expect(clippy::disallowed_methods, reason = "how long an entry waits is no decision: it is only counted")]
    pub(super) fn new(entry: Entry, witness: Option<Arc<dyn Witness>>) -> Self {
        Self { entry, witness, at: Instant::now() }
    }

    /// How long ago it was handed over.
    pub(super) fn elapsed(&self) -> Duration {
        self.at.elapsed()
    }
}

/// What an entry takes of the queue apart from its message.
const ENTRY_BYTES_MIN: usize = 256;
