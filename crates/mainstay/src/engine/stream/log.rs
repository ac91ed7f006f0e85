//! The events of one stream in memory, within bounds, and how far they are settled and sent.

use std::collections::VecDeque;

use bytes::Bytes;
use mainstay_core::time::Timestamp;
use mainstay_store::journal::{Ending, Question, Source, Weight};

use crate::engine::stream::message::Custody;

/// What a stream has in memory.
pub(super) struct Log {
    pub(super) events: VecDeque<Logged>,
    pub(super) bytes: usize,
    pub(super) next_sequence: u64,
    /// Everything up to here may be sent: it is durable, or can't be.
    pub(super) settled_through: u64,
    /// What can't be durable, behind events of which that is not known yet.
    pub(super) refused: VecDeque<u64>,
    pub(super) sent_through: u64,
    /// Whether what a connection was sent counts as taken only once that has lived on for a moment: the client of this
    /// stream has no cursor to ask for it again.
    pub(super) is_held: bool,
    /// Up to where it counts as taken, if it is held.
    pub(super) held_through: u64,
    pub(super) finished: bool,
    pub(super) reader: u64,
    pub(super) dropped: u64,
    /// Whether events go to the journal: those of a listening stream do not before somebody listens.
    pub(super) is_kept: bool,
    /// Whether the journal knows that everything is delivered.
    pub(super) delivery_told: bool,
    /// Whether another worker goes on with the stream.
    pub(super) is_taken: bool,
    /// How the stream has ended, if that is known.
    pub(super) ending: Option<Ending>,
    /// Whether another worker appends to the stream, and what it appends is copied here: nothing goes to the journal.
    pub(super) is_foreign: bool,
    /// Questions that are not known to be durable, by their places.
    pub(super) in_custody: VecDeque<(u64, Custody)>,
}

/// One event.
pub(super) struct Logged {
    pub(super) sequence: u64,
    pub(super) last: bool,
    pub(super) weight: Weight,
    /// When it came.
    pub(super) at: Timestamp,
    pub(super) message: Bytes,
    /// What the journal is to know besides, of an event that it has not been handed.
    pub(super) unkept: Option<Box<Unkept>>,
}

/// What of an event only the journal needs.
pub(super) struct Unkept {
    pub(super) source: Option<Source>,
    pub(super) question: Option<Question>,
    pub(super) custody: Option<Custody>,
}

impl Log {
    /// An empty log of which everything up to `seen` has been sent.
    pub(super) fn after(seen: u64, is_kept: bool) -> Self {
        Self {
            events: VecDeque::new(),
            bytes: 0,
            next_sequence: seen + 1,
            settled_through: seen,
            refused: VecDeque::new(),
            sent_through: seen,
            is_held: false,
            held_through: seen,
            finished: false,
            reader: 0,
            dropped: 0,
            is_kept,
            delivery_told: false,
            is_taken: false,
            ending: None,
            is_foreign: false,
            in_custody: VecDeque::new(),
        }
    }

    /// Keeps the log within its bounds, as far as passing messages and those already read allow.
    pub(super) fn shrink(&mut self) {
        while self.events.len() > LOG_EVENTS_MAX || self.bytes > LOG_BYTES_MAX {
            let sent = self.sent_through;
            let goes = |event: &Logged| event.weight == Weight::Passing || event.sequence <= sent && !event.last;
            let Some(place) = self.events.iter().position(goes) else { return };
            let Some(gone) = self.events.remove(place) else { return };
            self.bytes -= gone.message.len();
            self.dropped += u64::from(gone.sequence > sent);
        }
    }

    /// Everything up to `sequence` may be sent, and what was refused right behind it.
    pub(super) fn settle(&mut self, sequence: u64) {
        self.settled_through = self.settled_through.max(sequence);
        while self.refused.front().is_some_and(|refused| *refused <= self.settled_through + 1) {
            let refused = self.refused.pop_front().unwrap_or_default();
            self.settled_through = self.settled_through.max(refused);
        }
    }

    /// The questions up to the event `through`, which are durable now.
    pub(super) fn durable(&mut self, through: u64) -> Vec<Custody> {
        let count = self.in_custody.iter().take_while(|(sequence, _)| *sequence <= through).count();
        self.in_custody.drain(..count).map(|(_, custody)| custody).collect()
    }

    /// Up to where a reader has taken what was appended, as far as that can be known.
    pub(super) fn taken_through(&self) -> u64 {
        if self.is_held { self.held_through } else { self.sent_through }
    }

    /// Whether everything that was appended was sent to a reader.
    pub(super) fn is_delivered(&self) -> bool {
        self.events.back().is_none_or(|newest| newest.sequence <= self.sent_through)
    }
}

/// `bytes` in memory of their own if they are few: a slice keeps the whole buffer alive that it was read into, which no bound
/// of a log would know of.
pub(super) fn own(bytes: Bytes) -> Bytes {
    if bytes.len() < OWN_BYTES_MAX { Bytes::copy_from_slice(&bytes) } else { bytes }
}

/// Beyond this a message is most of the buffer that it came in.
const OWN_BYTES_MAX: usize = 16 << 10;
pub(super) const LOG_EVENTS_MAX: usize = 1024;
pub(super) const LOG_BYTES_MAX: usize = 4 << 20;
