//! Mainstay's ledger: what must outlive a process.
//!
//! The [`Store`] keeps sessions, tombstones, resume records, owed deletes and server cards, on SQLite or in memory, with
//! the same meaning. Writes go through one door, in transactions of [`Write`]s; each write is of a [`Class`] that says
//! how durable it is before [`Store::commit`] returns. Every authority row is signed, everything of an upstream is
//! sealed (see [`keys`]), and only an epoch that is the newest may write.
//!
//! Beside the ledger stands the [`journal`]: what of streams and calls in flight must outlive a worker.
//!
//! Not here: any decision. What is written was decided by `mainstay-core`, and what is read is handed to it.

mod codec;
mod counters;
mod error;
mod file;
pub mod journal;
pub mod keys;
mod memory;
mod migrate;
#[cfg(test)]
mod mishap;
mod private;
mod rows;
mod sqlite;
mod stored;
mod write;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mainstay_core::audit::AuditEntry;
use mainstay_core::id::{Epoch, ServerName, SessionKey, SessionRef};
use mainstay_core::principal::Principal;
use mainstay_core::resume::{OwedDelete, ResumeRecord, ServerCard};
use mainstay_core::session::State;
use mainstay_core::time::Timestamp;

pub use self::counters::Counters;
pub use self::error::{Cause, CommitError, Found, OpenError, RotateError, StoreError};
use self::keys::Keyring;
pub use self::memory::MemoryStore;
pub use self::sqlite::SqliteStore;
pub use self::stored::{
    AuditPage, Fault, Filter, Label, Legibility, Listed, Page, ResumeSummary, RowFault, RowKind, Stored,
};
pub use self::write::{Class, Write};

/// Where a ledger lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In this SQLite file; made if there is none. Its directory must exist.
    Sqlite(PathBuf),
    /// In this process, as long as a handle exists.
    Memory,
}

/// A handle on a ledger. Clones are handles of the same writer, and cheap.
///
/// Reads and writes never block the caller's thread; [`open`](Self::open) does.
#[derive(Clone, Debug)]
pub enum Store {
    /// On a SQLite file.
    Sqlite(SqliteStore),
    /// In memory.
    Memory(MemoryStore),
}

impl Store {
    /// Opens the ledger at `place`, and brings its schema up to date. Nothing can be written before
    /// [`begin_epoch`](Self::begin_epoch).
    ///
    /// The file is made with mode 0600; a wider one is repaired with a warning. It is checked for damage once after
    /// each boot of the machine. This blocks the calling thread.
    ///
    /// # Errors
    ///
    /// An [`OpenError`] that names the file, which is left as it is.
    pub fn open(place: Place, keyring: Arc<Keyring>) -> Result<Self, OpenError> {
        match place {
            Place::Sqlite(path) => SqliteStore::open(path, keyring).map(Self::Sqlite),
            Place::Memory => Ok(Self::Memory(MemoryStore::new())),
        }
    }

    /// Looks whether this program could go on with the ledger at `path` just as it is: of the schema that is written here,
    /// and under these keys. Changes nothing, and blocks the calling thread.
    ///
    /// # Errors
    ///
    /// An [`OpenError`]: [`OpenError::Newer`] and [`OpenError::Older`] for another schema.
    pub fn rehearse(path: &Path, keyring: &Keyring) -> Result<(), OpenError> {
        sqlite::rehearse(path, keyring)
    }

    /// A second writer on the same ledger, as another process would be: it has no epoch yet, and once it begins one
    /// this handle and its clones are fenced. This blocks the calling thread.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn reopen(&self) -> Result<Self, OpenError> {
        match self {
            Self::Sqlite(store) => store.reopen().map(Self::Sqlite),
            Self::Memory(store) => Ok(Self::Memory(store.reopen())),
        }
    }

    /// Begins this writer's epoch: one above the last, power-durable on return. Every writer of an older epoch is
    /// fenced from now on. A clock that went back since the last epoch is reported in the log (S5).
    ///
    /// # Errors
    ///
    /// A [`StoreError`]; the former epoch stays in force then.
    pub async fn begin_epoch(&self, now: Timestamp, nonce: u64) -> Result<Epoch, StoreError> {
        match self {
            Self::Sqlite(store) => store.begin_epoch(now, nonce).await,
            Self::Memory(store) => store.begin_epoch(now, nonce),
        }
    }

    /// Makes all of `writes` durable, or none of them, in the given order. Returns once they are as durable as the
    /// strongest [`Class`] among them demands. Commits of several callers share one transaction and one fsync.
    ///
    /// Waits while the queue is full. If the caller stops waiting, the writes may still be made.
    ///
    /// # Errors
    ///
    /// A [`CommitError`]; nothing has changed then, and a later commit may succeed.
    pub async fn commit(&self, writes: Vec<Write>) -> Result<(), CommitError> {
        if writes.is_empty() {
            return Ok(());
        }
        match self {
            Self::Sqlite(store) => store.commit(writes).await,
            Self::Memory(store) => store.commit(writes),
        }
    }

    /// Writes `write` some time soon. Never waits: if the queue is full it is dropped. What fails or is dropped is counted
    /// and logged. The write's class is what it is, so a hint is not made less durable than a commit would make it.
    pub fn hint(&self, write: Write) {
        match self {
            Self::Sqlite(store) => store.hint(write),
            Self::Memory(store) => store.hint(write),
        }
    }

    /// Returns once everything handed over before is written or has failed.
    ///
    /// # Errors
    ///
    /// A [`StoreError`] if the writer is gone.
    pub async fn flush(&self) -> Result<(), StoreError> {
        match self {
            Self::Sqlite(store) => store.flush().await,
            Self::Memory(_) => Ok(()),
        }
    }

    /// What is known of the id whose hash is `key`. A tombstone, readable or not, wins over a row (S7).
    ///
    /// # Errors
    ///
    /// A [`StoreError`] if nothing could be found out; it says nothing about the session.
    pub async fn find(&self, key: SessionKey) -> Result<Stored, StoreError> {
        match self {
            Self::Sqlite(store) => store.find(key).await,
            Self::Memory(store) => Ok(store.find(key)),
        }
    }

    /// Those of `keys` whose sessions have ended, as far as that is still kept.
    ///
    /// # Errors
    ///
    /// As [`find`](Self::find).
    pub async fn ended_of(&self, keys: Vec<SessionKey>) -> Result<Vec<SessionKey>, StoreError> {
        match self {
            Self::Sqlite(store) => store.ended_of(keys).await,
            Self::Memory(store) => Ok(store.ended_of(keys)),
        }
    }

    /// What is known of every id whose ref is `session_ref`; at most 16 of them.
    ///
    /// # Errors
    ///
    /// As [`find`](Self::find).
    pub async fn find_ref(&self, session_ref: SessionRef) -> Result<Vec<(SessionKey, Stored)>, StoreError> {
        match self {
            Self::Sqlite(store) => store.find_ref(session_ref).await,
            Self::Memory(store) => Ok(store.find_ref(session_ref)),
        }
    }

    /// The resume record under `key`. One that can't be read is none: it is counted and reported in the log.
    ///
    /// # Errors
    ///
    /// As [`find`](Self::find).
    pub async fn resume_record(&self, key: SessionKey) -> Result<Option<ResumeRecord>, StoreError> {
        match self {
            Self::Sqlite(store) => store.resume_record(key).await,
            Self::Memory(store) => Ok(store.resume_record(key)),
        }
    }

    /// Live sessions whose stored deadline is not after `now`, the longest overdue first. Rows that can't be read are
    /// not among them: they are kept.
    ///
    /// # Errors
    ///
    /// As [`find`](Self::find).
    pub async fn overdue(&self, now: Timestamp, limit: usize) -> Result<Vec<SessionKey>, StoreError> {
        match self {
            Self::Sqlite(store) => store.overdue(now, limit).await,
            Self::Memory(store) => Ok(store.overdue(now, limit)),
        }
    }

    /// The next stored deadline of a live session that can be read.
    ///
    /// # Errors
    ///
    /// As [`find`](Self::find).
    pub async fn next_deadline(&self) -> Result<Option<Timestamp>, StoreError> {
        match self {
            Self::Sqlite(store) => store.next_deadline().await,
            Self::Memory(store) => Ok(store.next_deadline()),
        }
    }

    /// Sessions whose row says that they are being drained. At a start nobody drains them any more (S8).
    ///
    /// # Errors
    ///
    /// As [`find`](Self::find).
    pub async fn unfinished(&self) -> Result<Vec<SessionKey>, StoreError> {
        match self {
            Self::Sqlite(store) => store.unfinished().await,
            Self::Memory(store) => Ok(store.unfinished()),
        }
    }

    /// A page of the ids that its filter wants, live, ended and unreadable, in the order of their keys.
    ///
    /// # Errors
    ///
    /// As [`find`](Self::find).
    pub async fn list(&self, page: &Page) -> Result<Vec<Listed>, StoreError> {
        match self {
            Self::Sqlite(store) => store.list(page).await,
            Self::Memory(store) => Ok(store.list(page)),
        }
    }

    /// The different labels of sessions, ended ones included, at most `limit` of them in alphabetical order. What the rows'
    /// columns say counts. It goes through all rows until it has enough, so it is for operators.
    ///
    /// # Errors
    ///
    /// As [`find`](Self::find).
    pub async fn labels(&self, label: Label, limit: usize) -> Result<Vec<Box<str>>, StoreError> {
        match self {
            Self::Sqlite(store) => store.labels(label, limit).await,
            Self::Memory(store) => Ok(store.labels(label, limit)),
        }
    }

    /// How many rows of live sessions there are, readable or not.
    ///
    /// # Errors
    ///
    /// As [`find`](Self::find).
    pub async fn count(&self) -> Result<u64, StoreError> {
        match self {
            Self::Sqlite(store) => store.count().await,
            Self::Memory(store) => Ok(store.count()),
        }
    }

    /// Owed deletes whose next try is not after `now`, the longest due first. With `now` at
    /// [`OwedDelete::NEVER`] those left to expire are among them, too.
    ///
    /// # Errors
    ///
    /// As [`find`](Self::find).
    pub async fn owed(&self, now: Timestamp, limit: usize) -> Result<Vec<OwedDelete>, StoreError> {
        match self {
            Self::Sqlite(store) => store.owed(now, limit).await,
            Self::Memory(store) => Ok(store.owed(now, limit)),
        }
    }

    /// All owed deletes, the next due first, and those left to expire last.
    ///
    /// # Errors
    ///
    /// As [`find`](Self::find).
    pub async fn owed_all(&self, limit: usize) -> Result<Vec<OwedDelete>, StoreError> {
        self.owed(OwedDelete::NEVER, limit).await
    }

    /// The owed delete of number `id`, if it is owed and can be read.
    ///
    /// # Errors
    ///
    /// As [`find`](Self::find).
    pub async fn owed_one(&self, id: u64) -> Result<Option<OwedDelete>, StoreError> {
        match self {
            Self::Sqlite(store) => store.owed_one(id).await,
            Self::Memory(store) => Ok(store.owed_one(id)),
        }
    }

    /// What is owed for the session `key`, the oldest first; at most `limit`. What an early version has stored names no
    /// session, and so is not among it.
    ///
    /// # Errors
    ///
    /// As [`find`](Self::find).
    pub async fn owed_of(&self, key: SessionKey, limit: usize) -> Result<Vec<OwedDelete>, StoreError> {
        match self {
            Self::Sqlite(store) => store.owed_of(key, limit).await,
            Self::Memory(store) => Ok(store.owed_of(key, limit)),
        }
    }

    /// How many rows of live sessions each principal has, readable or not; only those that have any.
    ///
    /// # Errors
    ///
    /// As [`find`](Self::find).
    pub async fn count_by_principal(&self) -> Result<Vec<(Principal, u64)>, StoreError> {
        match self {
            Self::Sqlite(store) => store.count_by_principal().await,
            Self::Memory(store) => Ok(store.count_by_principal()),
        }
    }

    /// How many rows of live sessions each server has, readable or not, by the names in their columns; only those that have
    /// any. It looks at every row, so it is for operators.
    ///
    /// # Errors
    ///
    /// As [`find`](Self::find).
    pub async fn count_by_server(&self) -> Result<Vec<(ServerName, u64)>, StoreError> {
        match self {
            Self::Sqlite(store) => store.count_by_server().await,
            Self::Memory(store) => Ok(store.count_by_server()),
        }
    }

    /// How many sessions the ledger holds in each state, ended ones as long as their tombstones are kept. Rows that can't be
    /// read count by what their columns say. It goes through indices alone, and looks at each of their entries.
    ///
    /// # Errors
    ///
    /// As [`find`](Self::find).
    pub async fn count_by_state(&self) -> Result<Vec<(State, u64)>, StoreError> {
        match self {
            Self::Sqlite(store) => store.count_by_state().await,
            Self::Memory(store) => Ok(store.count_by_state()),
        }
    }

    /// A page of the audit trail with the numbers of its entries, the newest first. An entry that can't be read is left
    /// out: it is counted and reported in the log.
    ///
    /// # Errors
    ///
    /// As [`find`](Self::find).
    pub async fn audit(&self, page: &AuditPage) -> Result<Vec<(u64, AuditEntry)>, StoreError> {
        match self {
            Self::Sqlite(store) => store.audit(page).await,
            Self::Memory(store) => Ok(store.audit(page)),
        }
    }

    /// Signs and seals with the newest key of `ring` from now on, while everything written before stays readable: no
    /// session ends (S14). The keys must be durable before, as [`Keyring::rotate`] leaves them.
    ///
    /// In memory nothing is signed, and only the epoch is checked.
    ///
    /// # Errors
    ///
    /// A [`RotateError`]; the former newest key goes on signing then.
    pub async fn rotate(&self, ring: Arc<Keyring>) -> Result<(), RotateError> {
        match self {
            Self::Sqlite(store) => store.rotate(ring).await,
            Self::Memory(store) => store.rotate(),
        }
    }

    /// The numbers of the keys that some row is signed or sealed with. It looks at every row, so it is for operators. None
    /// in memory, where nothing is signed.
    ///
    /// # Errors
    ///
    /// As [`find`](Self::find).
    pub async fn keys_in_use(&self) -> Result<BTreeSet<u32>, StoreError> {
        match self {
            Self::Sqlite(store) => store.keys_in_use().await,
            Self::Memory(_) => Ok(BTreeSet::new()),
        }
    }

    /// The servers that were configured when [`Write::Configured`] last said so; `None` if it never did.
    ///
    /// # Errors
    ///
    /// A [`StoreError`].
    pub async fn configured(&self) -> Result<Option<Vec<ServerName>>, StoreError> {
        match self {
            Self::Sqlite(store) => store.configured().await,
            Self::Memory(store) => Ok(store.configured()),
        }
    }

    /// What [`Write::Memory`] last said; `None` if it never did, or if that can't be read: then a key is gone, or somebody
    /// has been at it, which is reported in the log. The key that sealed it is not among [`keys_in_use`](Self::keys_in_use).
    ///
    /// # Errors
    ///
    /// A [`StoreError`].
    pub async fn server_memory(&self) -> Result<Option<Box<[u8]>>, StoreError> {
        match self {
            Self::Sqlite(store) => store.server_memory().await,
            Self::Memory(store) => Ok(store.server_memory()),
        }
    }

    /// What is known of `server` as the definition with that fingerprint. Nothing if the definition changed, if
    /// there is none, or if it can't be read.
    pub async fn card(&self, server: &ServerName, fingerprint: [u8; 32]) -> Option<ServerCard> {
        match self {
            Self::Sqlite(store) => store.card(server, fingerprint).await,
            Self::Memory(store) => store.card(server, fingerprint),
        }
    }

    /// What this handle and its clones did so far.
    pub fn counters(&self) -> Counters {
        match self {
            Self::Sqlite(store) => store.counters(),
            Self::Memory(store) => store.counters(),
        }
    }
}

#[cfg(test)]
mod suite;
