//! What can go wrong, by operation.

use std::path::PathBuf;
use std::sync::Arc;

use mainstay_core::id::{Epoch, SessionKey};
use thiserror::Error;

/// Why a ledger is not opened. The file stays as it is.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The file or its content is damaged.
    #[error(
        "ledger `{path}` is damaged ({detail}); it was kept: restore it from a backup, or move it away to begin anew"
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What SQLite says.
        detail: String,
    },
    /// A newer binary wrote it.
    #[error("ledger `{path}` has schema version {found}, this mainstay knows {known} at most: run the newer one again")]
    Newer {
        /// The file.
        path: PathBuf,
        /// The version in the file.
        found: u32,
        /// The newest that is known here.
        known: u32,
    },
    /// An older binary wrote it, and nothing is to be changed now.
    #[error(
        "ledger `{path}` has schema version {found}; this mainstay would bring it to {known}, which it does at a start"
    )]
    Older {
        /// The file.
        path: PathBuf,
        /// The version in the file.
        found: u32,
        /// The version that is written here.
        known: u32,
    },
    /// It is some other program's database.
    #[error("`{path}` is a database of another program")]
    Alien {
        /// The file.
        path: PathBuf,
    },
    /// The keyring is not the one that the ledger was written with.
    #[error(
        "ledger `{path}` was written with other keys than those found: restore the key files from a backup, \
         or move the ledger away to begin anew"
    )]
    OtherKeys {
        /// The file.
        path: PathBuf,
    },
    /// It belongs to another user, who could read and change it.
    #[error("ledger `{path}` belongs to user {owner}: it must belong to the user that runs the gateway")]
    Foreign {
        /// The file.
        path: PathBuf,
        /// Its owner's number.
        owner: u32,
    },
    /// The operating system refused.
    #[error("can't {attempt} ledger `{path}`")]
    Io {
        /// What was attempted.
        attempt: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// SQLite refused.
    #[error("can't {attempt} ledger `{path}`")]
    Sqlite {
        /// What was attempted.
        attempt: &'static str,
        /// The file.
        path: PathBuf,
        /// What SQLite said.
        source: rusqlite::Error,
    },
}

/// What is behind a failed read or write.
#[derive(Clone, Debug, Error)]
pub enum Cause {
    /// SQLite refused.
    #[error("sqlite refused")]
    Sqlite(#[source] Arc<rusqlite::Error>),
    /// The thread that owns the connection is gone.
    #[error("the ledger's thread is gone")]
    Stopped,
}

/// Why a read, or the beginning of an epoch, failed. It says nothing about any session.
#[derive(Clone, Debug, Error)]
pub enum StoreError {
    /// The disk is full.
    #[error("the ledger's disk is full")]
    Full(#[source] Cause),
    /// Anything else; it may be over soon.
    #[error("the ledger is unavailable")]
    Unavailable(#[source] Cause),
    /// The keys were rotated since they were loaded: this process can't read what is written now, and has to load them
    /// again before it begins an epoch.
    #[error("the ledger's keys were rotated since they were loaded")]
    OtherKeys,
}

impl From<StoreError> for CommitError {
    /// A commit that could not be made for want of what it had to read first.
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Full(cause) => Self::Full(cause),
            StoreError::Unavailable(cause) => Self::Unavailable(cause),
            StoreError::OtherKeys => Self::Fenced { own: None, current: None },
        }
    }
}

/// Why a commit failed. Nothing of it has changed.
#[derive(Clone, Debug, Error)]
pub enum CommitError {
    /// A later epoch has begun, or this writer never began one: it may not write any more.
    #[error("epoch {} may not write, the ledger's is {}", shown(.own), shown(.current))]
    Fenced {
        /// This writer's epoch.
        own: Option<Epoch>,
        /// The ledger's.
        current: Option<Epoch>,
    },
    /// The session is not what the change was decided on.
    #[error("session {} is not what the change was decided on: {found}", key.session_ref())]
    Conflict {
        /// The session.
        key: SessionKey,
        /// What was found instead.
        found: Found,
    },
    /// The disk is full. The next commit may succeed.
    #[error("the ledger's disk is full")]
    Full(#[source] Cause),
    /// Anything else. The next commit may succeed.
    #[error("the ledger is unavailable")]
    Unavailable(#[source] Cause),
}

/// Why the keyring was not replaced.
#[derive(Clone, Debug, Error)]
pub enum RotateError {
    /// The new keyring lacks a key, or has another in its place: rows that are signed with it could not be read.
    #[error("the new keyring has not the key {key_id} that the present one has")]
    KeyLost {
        /// The key's number.
        key_id: u32,
    },
    /// The ledger could not be told, or this writer may not write.
    #[error("the ledger was not told of the new key")]
    Refused(#[source] CommitError),
}

/// What stands in the way of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Found {
    /// A tombstone: the session has ended, and its id is blocked.
    #[error("it has ended")]
    Ended,
    /// A row of this generation.
    #[error("its row has generation {0}")]
    Generation(u64),
    /// No row.
    #[error("it has no row")]
    Absent,
}

fn shown(epoch: &Option<Epoch>) -> String {
    epoch.map_or_else(|| "none".into(), |epoch| epoch.to_string())
}
