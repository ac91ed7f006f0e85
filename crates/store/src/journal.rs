//! The journal: what must outlive a worker of the streams on which calls are answered (R1, R4, R6).
//!
//! A SQLite file of its own beside the ledger, with a writing thread of its own, so that neither waits for the other.
//! What is kept here is a hint: process-durable, without an fsync per commit, and its loss never fails a call. A damaged
//! file is set aside and begun anew. Messages are sealed by the keyring, for they may hold secrets.
//!
//! No epoch fences a row. A stream belongs to whoever has claimed it last, so a worker that leaves may still append to
//! its own streams while its successor serves, and two workers never interleave in one.
//!
//! Not here: what is done about a stream. Ids, order and deadlines are the engine's.

mod call;
mod counters;
mod entry;
mod event;
mod failure;
mod question;

use std::sync::Arc;

use mainstay_core::call::StreamId;
use mainstay_core::id::{Epoch, SessionKey};
use mainstay_core::time::Timestamp;

pub use self::call::{Call, Ending, StreamRecord};
pub use self::counters::Counters;
pub use self::entry::{Accepted, Content, Entry, Lost, Witness};
pub use self::event::{Event, Source, Weight};
pub use self::failure::{Failure, OpenError};
pub use self::question::{Answered, Asked, Question};
use crate::Place;
use crate::error::RotateError;
use crate::keys::Keyring;

/// A handle on a journal. Clones are handles of the same writer, and cheap.
#[derive(Clone)]
pub struct Journal {
    meters: Arc<counters::Meters>,
}

/// What retention removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Trimmed {
    /// Streams, with everything of them.
    pub streams: u64,
    /// Events, those of these streams among them.
    pub events: u64,
    /// Questions.
    pub questions: u64,
}

impl Journal {
    /// Opens the journal at `place`. The file is made with mode 0600; a wider one is repaired with a warning. A damaged
    /// one, or one of a newer version, is set aside as `….damaged` with an error in the log, and begun anew.
    /// This blocks the calling thread.
    ///
    /// # Errors
    ///
    /// An [`OpenError`] that names the file.
    pub fn open(place: Place, keyring: Arc<Keyring>) -> Result<Self, OpenError> {
        let _ = (place, keyring);
        Ok(Self { meters: Arc::default() })
    }

    /// Keeps `entry`, as soon as the writer comes to it: entries of all streams that wait share a transaction. Entries
    /// of one stream are kept in the order in which they were handed over. Never waits. Once the outcome of an event is
    /// known, `witness` hears of it.
    ///
    /// # Errors
    ///
    /// [`Lost`] if it is clear at once that the entry is not kept; the witness is not called then.
    pub fn append(&self, entry: Entry, witness: Option<Arc<dyn Witness>>) -> Result<Accepted, Lost> {
        let _ = (entry, witness);
        Ok(Accepted::Kept)
    }

    /// The events of `stream` after the sequence `after`, in order; at most `limit`, and fewer if they are large: ask on
    /// until there are none. Some may be missing in between: those that were lost or trimmed, and those that can't be
    /// read, which are counted. What still waits for the writer is not among them.
    ///
    /// # Errors
    ///
    /// A [`Failure`]; it says nothing about the stream.
    pub async fn replay(
        &self,
        session: SessionKey,
        stream: StreamId,
        after: u64,
        limit: usize,
    ) -> Result<Vec<Event>, Failure> {
        let _ = (session, stream, after, limit);
        Err(Failure::Stopped)
    }

    /// What is known of `stream`.
    ///
    /// # Errors
    ///
    /// As [`replay`](Self::replay).
    pub async fn find(&self, session: SessionKey, stream: StreamId) -> Result<Option<StreamRecord>, Failure> {
        let _ = (session, stream);
        Err(Failure::Stopped)
    }

    /// Every stream of `session` that is kept, the oldest first.
    ///
    /// # Errors
    ///
    /// As [`replay`](Self::replay).
    pub async fn streams(&self, session: SessionKey, limit: usize) -> Result<Vec<StreamRecord>, Failure> {
        let _ = (session, limit);
        Err(Failure::Stopped)
    }

    /// Takes `stream` over for the worker whose epoch is `claim`: from now on only its entries are kept, whether the stream
    /// was known or not. What is known of it, with the new claim. After everything that this handle was given before.
    ///
    /// # Errors
    ///
    /// A [`Failure`]; the stream is claimed as it was then. `Ok(None)` if nothing was known of it.
    pub async fn claim(
        &self,
        session: SessionKey,
        stream: StreamId,
        claim: Epoch,
        now: Timestamp,
    ) -> Result<Option<StreamRecord>, Failure> {
        let _ = (session, stream, claim, now);
        Err(Failure::Stopped)
    }

    /// Open questions whose deadline is not after `due`, the longest due first.
    ///
    /// # Errors
    ///
    /// As [`replay`](Self::replay).
    pub async fn open_questions(&self, due: Timestamp, limit: usize) -> Result<Vec<Asked>, Failure> {
        let _ = (due, limit);
        Err(Failure::Stopped)
    }

    /// Every question of `session` that is open, the next due first.
    ///
    /// # Errors
    ///
    /// As [`replay`](Self::replay).
    pub async fn questions(&self, session: SessionKey, limit: usize) -> Result<Vec<Asked>, Failure> {
        let _ = (session, limit);
        Err(Failure::Stopped)
    }

    /// Notes that the question `asked` of `session` is answered, by the client or in its place. Of all who say so, over all
    /// crashes, one hears that it was the first. After everything that this handle was given before.
    ///
    /// # Errors
    ///
    /// A [`Failure`]; the question is as open as it was then.
    pub async fn answered(&self, session: SessionKey, asked: StreamId, now: Timestamp) -> Result<Answered, Failure> {
        let _ = (session, asked, now);
        Err(Failure::Stopped)
    }

    /// Removes everything of `session`, in slices, so that no other session waits for long. For one that has ended.
    ///
    /// # Errors
    ///
    /// A [`Failure`]; some of it may be left, and goes with its age.
    pub async fn forget(&self, session: SessionKey) -> Result<(), Failure> {
        let _ = session;
        Err(Failure::Stopped)
    }

    /// Removes what is too old or too much, in slices. To be called from time to time, by one worker at a time.
    ///
    /// # Errors
    ///
    /// A [`Failure`]; some of it may be removed.
    pub async fn trim(&self, now: Timestamp) -> Result<Trimmed, Failure> {
        let _ = now;
        Err(Failure::Stopped)
    }

    /// Returns once everything handed over before is kept or lost.
    ///
    /// # Errors
    ///
    /// A [`Failure`] if the writer is gone.
    pub async fn flush(&self) -> Result<(), Failure> {
        Err(Failure::Stopped)
    }

    /// Seals with the newest key of `ring` from now on, while everything sealed before stays readable.
    ///
    /// # Errors
    ///
    /// [`RotateError::KeyLost`]; the former newest key goes on sealing then.
    pub fn rotate(&self, ring: Arc<Keyring>) -> Result<(), RotateError> {
        let _ = ring;
        Ok(())
    }

    /// The numbers of the keys that some row is sealed with. It looks at every row, so it is for operators.
    ///
    /// # Errors
    ///
    /// As [`replay`](Self::replay).
    pub async fn keys_in_use(&self) -> Result<std::collections::BTreeSet<u32>, Failure> {
        Err(Failure::Stopped)
    }

    /// What this handle and its clones did so far.
    pub fn counters(&self) -> Counters {
        self.meters.snapshot()
    }
}
