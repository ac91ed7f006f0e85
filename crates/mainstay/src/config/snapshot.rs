//! The configuration as bytes, for the way from the keeper to its workers.
//!
//! It is the file's own form with every key set, as JSON. Templates travel unresolved.

use std::path::PathBuf;

use super::check;
use super::file::File;
use super::{Config, convert};

/// Why bytes are no snapshot.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// They are no JSON of the expected form: another version wrote them.
    #[error("read the configuration snapshot")]
    Malformed(#[source] serde_json::Error),
    /// They break a rule that this version has.
    #[error("check the configuration snapshot: {0}")]
    Refused(String),
}

impl Config {
    /// The configuration as bytes. May hold secrets that were written in plain text: for the workers' socket only.
    pub fn to_snapshot(&self) -> Vec<u8> {
        serde_json::to_vec(&convert::file(self)).expect("a file of strings, numbers and maps is always JSON")
    }

    /// The configuration that [`to_snapshot`](Self::to_snapshot) wrote.
    ///
    /// # Errors
    /// If the bytes come from something else.
    pub fn from_snapshot(bytes: &[u8]) -> Result<Self, SnapshotError> {
        let file: File = serde_json::from_slice(bytes).map_err(SnapshotError::Malformed)?;
        let no_default = || None::<PathBuf>;
        check::config(file, &no_default).map_err(|faults| {
            let messages: Vec<String> = faults.into_iter().map(|fault| fault.message).collect();
            SnapshotError::Refused(messages.join("; "))
        })
    }
}
