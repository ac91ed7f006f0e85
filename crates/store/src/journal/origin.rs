//! Since when the journal knows what it is asked for.
//!
//! A damaged journal is set aside and begun anew, by a worker at its start or in the middle of its life. From then on it
//! does not know of streams and questions that there are. Whoever takes its silence for an answer must ask since when it
//! speaks: since the beginning of the first worker that found it as it is.

use rusqlite::params;

use super::database::Database;
use super::streams::{narrow, wide};

impl Database {
    /// See [`Journal::attach`](super::Journal::attach).
    pub(super) fn attach(&self, epoch: u64) -> rusqlite::Result<()> {
        self.execute(ATTACH, params![wide(epoch)]).map(|_| ())
    }

    /// See [`Journal::known_from`](super::Journal::known_from).
    pub(super) fn known_from(&self) -> rusqlite::Result<Option<u64>> {
        self.first(KNOWN_FROM, [], |row| row.get(0).map(narrow))
    }
}

const ATTACH: &str = "INSERT INTO origin (id, known_from) VALUES (1, ?1) ON CONFLICT (id) DO NOTHING";
const KNOWN_FROM: &str = "SELECT known_from FROM origin WHERE id = 1";
