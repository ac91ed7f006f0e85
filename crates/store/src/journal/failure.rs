//! What can go wrong, apart from an entry that is not kept.

use std::path::PathBuf;
use std::sync::Arc;

use mainstay_core::id::Epoch;
use rusqlite::ErrorCode;
use thiserror::Error;

use super::entry::Lost;

/// Why there is no journal. A damaged file is no reason: it is set aside.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The file belongs to another user, who could read and change it.
    #[error("journal `{path}` belongs to user {owner}: it must belong to the user that runs the gateway")]
    Foreign {
        /// The file.
        path: PathBuf,
        /// Its owner's number.
        owner: u32,
    },
    /// Its schema is not the one that is written here.
    #[error("journal `{path}` has schema version {found}, and version {known} is written here")]
    OtherSchema {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// The version that is written here.
        known: u32,
    },
    /// The operating system refused.
    #[error("can't {attempt} journal `{path}`")]
    Io {
        /// What was attempted.
        attempt: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// SQLite refused.
    #[error("can't {attempt} journal `{path}`")]
    Sqlite {
        /// What was attempted.
        attempt: &'static str,
        /// The file.
        path: PathBuf,
        /// What SQLite said.
        source: rusqlite::Error,
    },
}

/// Why something was not read, claimed or noted. It says nothing about any stream.
#[derive(Clone, Debug, Error)]
pub enum Failure {
    /// The disk, or the journal's share of it, is full.
    #[error("the journal's disk is full")]
    Full(#[source] Arc<rusqlite::Error>),
    /// SQLite refused; it may be over soon.
    #[error("the journal is unavailable")]
    Unavailable(#[source] Arc<rusqlite::Error>),
    /// A later worker has claimed the stream.
    #[error("the stream is claimed by epoch {by}")]
    Claimed {
        /// Its epoch.
        by: Epoch,
    },
    /// The thread that owns the connection is gone.
    #[error("the journal's thread is gone")]
    Stopped,
}

impl Failure {
    /// What it is to an entry.
    pub(super) const fn lost(&self) -> Lost {
        match self {
            Self::Full(_) => Lost::Full,
            Self::Claimed { .. } => Lost::Claimed,
            Self::Unavailable(_) | Self::Stopped => Lost::Unavailable,
        }
    }
}

impl From<rusqlite::Error> for Failure {
    fn from(error: rusqlite::Error) -> Self {
        let full = error.sqlite_error_code() == Some(ErrorCode::DiskFull);
        let source = Arc::new(error);
        if full { Self::Full(source) } else { Self::Unavailable(source) }
    }
}

/// Whether `error` says that the file itself is damaged.
pub(super) fn is_damage(error: &rusqlite::Error) -> bool {
    matches!(error.sqlite_error_code(), Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase))
}
