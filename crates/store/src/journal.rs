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

mod batch;
mod body;
mod call;

mod counters;
mod database;
mod entry;
mod event;
mod failure;
mod origin;
mod place;
mod question;
mod questions;
mod queue;
mod read;
mod streams;
mod trim;
mod writer;

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use mainstay_core::call::StreamId;
use mainstay_core::id::{Epoch, SessionKey};
use mainstay_core::time::Timestamp;

pub use self::call::{Call, Ending, Head, StreamRecord};
use self::counters::Meters;
pub use self::counters::{APPEND_SECONDS, Counters};
use self::database::{Database, Ring};
use self::entry::Handed;
pub use self::entry::{Accepted, Content, Entry, Lost, Witness};
pub use self::event::{Event, Source, Weight};
pub use self::failure::{Failure, OpenError};
pub use self::place::FILE_BYTES_MAX;
pub use self::question::{Answer, Answered, Asked, Question, Unforwarded};
use self::queue::Queue;
use self::trim::Phase;
use self::writer::Writer;
use crate::Place;
use crate::error::RotateError;
use crate::keys::Keyring;

/// A handle on a journal. Clones are handles of the same writer, and cheap.
#[derive(Clone)]
pub struct Journal {
    shared: Arc<Shared>,
}

struct Shared {
    backend: Backend,
    ring: Ring,
    meters: Arc<Meters>,
}

enum Backend {
    /// On a file, which threads of its own work on.
    File(Queue),
    /// In memory. Whoever calls does the work, at once: what is built on it is as deterministic as its caller.
    Memory(Mutex<Writer>),
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
        let (ring, meters) = (Ring::new(keyring), Arc::<Meters>::default());
        let backend = match place {
            Place::Sqlite(path) => Backend::File(Queue::open(path, ring.clone(), Arc::clone(&meters))?),
            Place::Memory => {
                let (ring, meters) = (ring.clone(), Arc::clone(&meters));
                let database = Database { connection: place::in_memory()?, ring, meters };
                Backend::Memory(Mutex::new(Writer::new(database, None)))
            }
        };
        Ok(Self { shared: Arc::new(Shared { backend, ring, meters }) })
    }

    /// Looks whether this program could go on with the journal at `path` just as it is: another worker, of the program
    /// that runs now, may be needed again. One that is not there will be made. Changes nothing, and blocks the calling
    /// thread.
    ///
    /// # Errors
    ///
    /// [`OpenError::OtherSchema`], or that it can't be looked at.
    pub fn rehearse(path: &Path) -> Result<(), OpenError> {
        place::rehearse(path)
    }

    /// The worker of `epoch` begins, and has handed nothing over yet. If it is the first that finds the journal as it is,
    /// that is known from its epoch on.
    ///
    /// # Errors
    ///
    /// A [`Failure`]; what this worker hands over may count as not known.
    pub async fn attach(&self, epoch: u64) -> Result<(), Failure> {
        self.act(move |writer| writer.transact(|database| database.attach(epoch))).await?
    }

    /// From which epoch on the journal's silence says something: what it does not know of workers since then was never
    /// handed over, was lost or is removed. `None` if it was begun anew since the last worker [attached](Self::attach).
    /// To be asked behind what is concluded from.
    ///
    /// # Errors
    ///
    /// As [`replay`](Self::replay).
    pub async fn known_from(&self) -> Result<Option<u64>, Failure> {
        self.read(|database| database.known_from()).await
    }

    /// Keeps `entry`, as soon as the writer comes to it: entries of all streams that wait share a transaction. Entries
    /// of one stream are kept in the order in which they were handed over. Never waits. Once the outcome of an event is
    /// known, `witness` hears of it.
    ///
    /// # Errors
    ///
    /// [`Lost`] if it is clear at once that the entry is not kept; the witness is not called then.
    pub fn append(&self, entry: Entry, witness: Option<Arc<dyn Witness>>) -> Result<Accepted, Lost> {
        let handed = Handed::new(entry, witness);
        if let Some(event) = handed.entry.content.event()
            && event.message.len() > MESSAGE_BYTES_MAX
        {
            self.shared.meters.lost(Lost::TooLarge);
            return Err(Lost::TooLarge);
        }
        match &self.shared.backend {
            Backend::File(queue) => queue.keep(handed),
            Backend::Memory(writer) => {
                let outcomes = lock(writer).outcomes(&[handed]);
                let outcome = outcomes.into_iter().next().unwrap_or(Err(Lost::Unavailable));
                outcome.map(|()| Accepted::Kept)
            }
        }
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
        counters::add(&self.shared.meters.replays, 1);
        self.read(move |database| database.replay(session, stream, after, limit)).await
    }

    /// What is known of `stream`.
    ///
    /// # Errors
    ///
    /// As [`replay`](Self::replay).
    pub async fn find(&self, session: SessionKey, stream: StreamId) -> Result<Option<StreamRecord>, Failure> {
        self.read(move |database| database.stream_record(session, stream)).await
    }

    /// Where each of these streams stands, in their order; `None` for one that is not known. Opens nothing that is sealed, so
    /// it may be asked often.
    ///
    /// # Errors
    ///
    /// As [`replay`](Self::replay).
    pub async fn heads(&self, streams: Vec<(SessionKey, StreamId)>) -> Result<Vec<Option<Head>>, Failure> {
        self.read(move |database| database.heads(&streams)).await
    }

    /// Every stream of `session` that is kept, the oldest first.
    ///
    /// # Errors
    ///
    /// As [`replay`](Self::replay).
    pub async fn streams(&self, session: SessionKey, limit: usize) -> Result<Vec<StreamRecord>, Failure> {
        self.read(move |database| database.stream_records(session, limit)).await
    }

    /// The calls whose streams the worker of epoch `claim` has claimed and not ended, of all sessions, the oldest first.
    /// It looks at every stream that is kept, so it is for the start of a worker.
    ///
    /// # Errors
    ///
    /// As [`replay`](Self::replay).
    pub async fn open_calls(&self, claim: Epoch, limit: usize) -> Result<Vec<(SessionKey, StreamRecord)>, Failure> {
        self.read(move |database| database.open_calls(claim, limit)).await
    }

    /// Takes `stream` over for the worker whose epoch is `claim`: from now on only its entries are kept, whether the stream
    /// was known or not. What is known of it, with the new claim; `None` if nothing was. After everything that this handle was given before.
    ///
    /// # Errors
    ///
    /// A [`Failure`]; the stream is claimed as it was then. [`Failure::Claimed`] if a later worker has it.
    pub async fn claim(
        &self,
        session: SessionKey,
        stream: StreamId,
        claim: Epoch,
        now: Timestamp,
    ) -> Result<Option<StreamRecord>, Failure> {
        let claimed =
            self.act(move |writer| writer.transact(|database| database.claim(session, stream, claim, now))).await??;
        claimed.map_err(|by| Failure::Claimed { by })
    }

    /// Open questions whose deadline is not after `due`, the longest due first.
    ///
    /// # Errors
    ///
    /// As [`replay`](Self::replay).
    pub async fn open_questions(&self, due: Timestamp, limit: usize) -> Result<Vec<Asked>, Failure> {
        self.read(move |database| database.open_questions(due, limit)).await
    }

    /// Every question of `session` that is kept, answered or not, the newest first.
    ///
    /// # Errors
    ///
    /// As [`replay`](Self::replay).
    pub async fn questions(&self, session: SessionKey, limit: usize) -> Result<Vec<Asked>, Failure> {
        self.read(move |database| database.questions(session, limit)).await
    }

    /// Notes that the question `asked` of `session` is answered, by the client or in its place. Of all who say so, over all
    /// crashes, one hears that it was the first; the answer is that one's, and is kept until it is
    /// [forwarded](Self::forwarded). After everything that this handle was given before.
    ///
    /// # Errors
    ///
    /// A [`Failure`]; the question is as open as it was then.
    pub async fn answered(&self, session: SessionKey, asked: StreamId, answer: Answer) -> Result<Answered, Failure> {
        self.act(move |writer| writer.transact(|database| database.answered(session, asked, &answer))).await?
    }

    /// Notes that the server has the answer to `asked`, or never will: nobody forwards it any more.
    ///
    /// # Errors
    ///
    /// A [`Failure`]; a later worker may forward it once more then.
    pub async fn forwarded(&self, session: SessionKey, asked: StreamId) -> Result<(), Failure> {
        self.act(move |writer| writer.transact(|database| database.forwarded(session, asked))).await?
    }

    /// The answers that workers of these epochs are to forward, or were, and may not have forwarded; at most `limit`.
    ///
    /// # Errors
    ///
    /// As [`replay`](Self::replay).
    pub async fn unforwarded(&self, by: Range<u64>, limit: usize) -> Result<Vec<Unforwarded>, Failure> {
        self.read(move |database| database.unforwarded(by, limit)).await
    }

    /// The questions of `session` whose answers are here and may not have been forwarded, whoever is to do it.
    ///
    /// # Errors
    ///
    /// As [`replay`](Self::replay).
    pub async fn owed_answers(&self, session: SessionKey) -> Result<BTreeSet<StreamId>, Failure> {
        self.read(move |database| database.owed_answers(session)).await
    }

    /// What is kept of what `session` was sent since `since` and came in frames of a child; at most `limit` events, those
    /// of the newest streams first. As much is read at once as is kept of a session.
    ///
    /// # Errors
    ///
    /// As [`replay`](Self::replay).
    pub async fn child_events(
        &self,
        session: SessionKey,
        since: Timestamp,
        limit: usize,
    ) -> Result<Vec<Event>, Failure> {
        self.read(move |database| database.child_events(session, since, limit)).await
    }

    /// Takes over, for the worker whose epoch is `by`, to forward the answer to `asked`, unless that is its own to do
    /// already. `false` if there is nothing to forward any more, or a later worker does it.
    ///
    /// # Errors
    ///
    /// A [`Failure`]; it is whose it was then.
    pub async fn forward(&self, session: SessionKey, asked: StreamId, by: u64) -> Result<bool, Failure> {
        self.act(move |writer| writer.transact(|database| database.forward(session, asked, by))).await?
    }

    /// Gives back the answer to `asked`, which the worker whose epoch is `by` was to forward and can't: it is anybody's
    /// then. Does nothing if it is not that worker's any more.
    ///
    /// # Errors
    ///
    /// A [`Failure`]; it is whose it was then.
    pub async fn give_back(&self, session: SessionKey, asked: StreamId, by: u64) -> Result<(), Failure> {
        self.act(move |writer| writer.transact(|database| database.give_back(session, asked, by))).await?
    }

    /// Removes everything of `session`, in slices, so that no other session waits for long. For one that has ended.
    ///
    /// # Errors
    ///
    /// A [`Failure`]; some of it may be left, and goes with its age.
    pub async fn forget(&self, session: SessionKey) -> Result<(), Failure> {
        while self.act(move |writer| writer.transact(|database| database.forget_slice(session))).await?? {}
        Ok(())
    }

    /// Removes what is too old or too much, in slices. To be called from time to time, by one worker at a time.
    ///
    /// # Errors
    ///
    /// A [`Failure`]; some of it may be removed.
    pub async fn trim(&self, now: Timestamp) -> Result<Trimmed, Failure> {
        let mut trimmed = Trimmed::default();
        for phase in Phase::ALL {
            let mut next = Some(0);
            while let Some(after) = next {
                let slice =
                    move |writer: &mut Writer| writer.transact(|database| database.trim_slice(phase, after, now));
                let slice = self.act(slice).await??;
                trimmed.streams += slice.trimmed.streams;
                trimmed.events += slice.trimmed.events;
                trimmed.questions += slice.trimmed.questions;
                next = slice.next;
            }
        }
        Ok(trimmed)
    }

    /// Returns once everything handed over before is kept or lost.
    ///
    /// # Errors
    ///
    /// A [`Failure`] if the writer is gone.
    pub async fn flush(&self) -> Result<(), Failure> {
        self.act(|_| ()).await
    }

    /// Seals with the newest key of `ring` from now on, while everything sealed before stays readable.
    ///
    /// # Errors
    ///
    /// [`RotateError::KeyLost`]; the former newest key goes on sealing then.
    pub fn rotate(&self, ring: Arc<Keyring>) -> Result<(), RotateError> {
        if let Some(key_id) = ring.lost_of(&self.shared.ring.current()) {
            return Err(RotateError::KeyLost { key_id });
        }
        self.shared.ring.replace(ring);
        Ok(())
    }

    /// The numbers of the keys that some row is sealed with. It looks at every row, so it is for operators.
    ///
    /// # Errors
    ///
    /// As [`replay`](Self::replay).
    pub async fn keys_in_use(&self) -> Result<BTreeSet<u32>, Failure> {
        self.read(|database| database.keys_in_use()).await
    }

    /// What this handle and its clones did so far.
    pub fn counters(&self) -> Counters {
        self.shared.meters.snapshot()
    }

    async fn act<T: Send + 'static>(&self, act: impl FnOnce(&mut Writer) -> T + Send + 'static) -> Result<T, Failure> {
        match &self.shared.backend {
            Backend::File(queue) => queue.act(act).await,
            Backend::Memory(writer) => Ok(act(&mut lock(writer))),
        }
    }

    async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Database) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, Failure> {
        match &self.shared.backend {
            Backend::File(queue) => queue.read(read).await,
            Backend::Memory(writer) => Ok(read(&lock(writer).database)?),
        }
    }
}

impl fmt::Debug for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match &self.shared.backend {
            Backend::File(_) => "file",
            Backend::Memory(_) => "memory",
        };
        f.debug_struct("Journal").field("on", &kind).finish_non_exhaustive()
    }
}

/// A panic elsewhere leaves the journal whole: a transaction that was not committed is rolled back before the next.
fn lock(writer: &Mutex<Writer>) -> std::sync::MutexGuard<'_, Writer> {
    writer.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The largest message that is kept: 16 MiB.
pub const MESSAGE_BYTES_MAX: usize = 16 << 20;

/// The statements whose plans a test looks at.
#[cfg(test)]
mod statements {
    pub(super) use super::questions::{ANSWER, OPEN, OWED, UNFORWARDED};
    pub(super) use super::read::{NEWEST, REPLAY};
    pub(super) use super::streams::{RECORD, STANDING};
    pub(super) use super::trim::{AGED_STREAMS, ANSWERED_QUESTIONS, DONE, OVER, OVERDUE_QUESTIONS, PASSING};
}

#[cfg(test)]
mod suite;
