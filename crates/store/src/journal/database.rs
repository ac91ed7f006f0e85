//! A connection whose statements are cached and counted, and the keys for what is in its rows.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, RwLock};

use rusqlite::{Connection, Params, Row};
use tracing::warn;

use super::counters::{Meters, add};
use crate::file;
use crate::keys::{Keyring, Purpose, Sealed};

/// What a thread works on.
pub(super) struct Database {
    pub(super) connection: Connection,
    pub(super) ring: Ring,
    pub(super) meters: Arc<Meters>,
}

/// The keyring in force, which all threads of a journal share. Held for moments only.
#[derive(Clone)]
pub(super) struct Ring(Arc<RwLock<Arc<Keyring>>>);

impl Ring {
    pub(super) fn new(ring: Arc<Keyring>) -> Self {
        Self(Arc::new(RwLock::new(ring)))
    }

    pub(super) fn current(&self) -> Arc<Keyring> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn replace(&self, ring: Arc<Keyring>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = ring;
    }
}

impl Database {
    /// Executes `sql`. How many rows it changed.
    pub(super) fn execute(&self, sql: &str, params: impl Params) -> rusqlite::Result<usize> {
        add(&self.meters.statements, 1);
        file::execute(&self.connection, sql, params)
    }

    /// The first row that `sql` gives.
    pub(super) fn first<T>(
        &self,
        sql: &str,
        params: impl Params,
        read: impl FnOnce(&Row<'_>) -> rusqlite::Result<T>,
    ) -> rusqlite::Result<Option<T>> {
        add(&self.meters.statements, 1);
        file::first(&self.connection, sql, params, read)
    }

    /// Every row that `sql` gives, until `read` says that it has enough with `false`.
    pub(super) fn each(
        &self,
        sql: &str,
        params: impl Params,
        mut read: impl FnMut(&Row<'_>) -> rusqlite::Result<bool>,
    ) -> rusqlite::Result<()> {
        add(&self.meters.statements, 1);
        let mut statement = self.connection.prepare_cached(sql)?;
        let mut rows = statement.query(params)?;
        while let Some(row) = rows.next()? {
            if !read(row)? {
                break;
            }
        }
        Ok(())
    }

    /// What is sealed in the columns from `index` on, opened. None if it was not sealed for `purpose` and `key`.
    pub(super) fn opened(&self, row: &Row<'_>, index: usize, purpose: Purpose, key: &[u8]) -> Option<Vec<u8>> {
        let sealed = Sealed { key_id: row.get(index).ok()?, bytes: row.get(index + 1).ok()? };
        self.ring.current().open(purpose, key, &sealed).ok()
    }

    /// A row could not be read: it is passed over. The log hears of the first, the second, the fourth, and so on.
    pub(super) fn refused(&self, what: &'static str) {
        let total = self.meters.rows_refused.fetch_add(1, Ordering::Relaxed) + 1;
        if total.is_power_of_two() {
            warn!(
                row = what,
                total, "a row of the journal can't be read: it was changed, or sealed with an unknown key"
            );
        }
    }
}
