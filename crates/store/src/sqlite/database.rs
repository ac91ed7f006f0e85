//! A connection whose statements are cached and counted.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rusqlite::{Connection, Params, Row};

use crate::counters::Meters;
use crate::file;
use crate::keys::Keyring;

/// What a thread works on.
pub(super) struct Database {
    pub(super) connection: Connection,
    pub(super) ring: Arc<Keyring>,
    pub(super) meters: Arc<Meters>,
}

impl Database {
    /// Executes `sql`. How many rows it changed.
    pub(super) fn execute(&self, sql: &str, params: impl Params) -> rusqlite::Result<usize> {
        self.counted();
        file::execute(&self.connection, sql, params)
    }

    /// The first row that `sql` gives.
    pub(super) fn first<T>(
        &self,
        sql: &str,
        params: impl Params,
        read: impl FnOnce(&Row<'_>) -> rusqlite::Result<T>,
    ) -> rusqlite::Result<Option<T>> {
        self.counted();
        file::first(&self.connection, sql, params, read)
    }

    /// What `read` makes of the rows that `sql` gives, of which it leaves out those it makes nothing of. At most
    /// `limit`, and at most `scanned` rows are looked at.
    pub(super) fn some<T>(
        &self,
        sql: &str,
        params: impl Params,
        bounds: Bounds,
        mut read: impl FnMut(&Row<'_>) -> rusqlite::Result<Option<T>>,
    ) -> rusqlite::Result<Vec<T>> {
        self.counted();
        let mut statement = self.connection.prepare_cached(sql)?;
        let mut rows = statement.query(params)?;
        let mut found = Vec::new();
        for _ in 0..bounds.scanned {
            if found.len() >= bounds.limit {
                break;
            }
            let Some(row) = rows.next()? else { break };
            found.extend(read(row)?);
        }
        Ok(found)
    }

    fn counted(&self) {
        self.meters.statements.fetch_add(1, Ordering::Relaxed);
    }
}

/// How far a query goes.
#[derive(Clone, Copy)]
pub(super) struct Bounds {
    pub(super) limit: usize,
    pub(super) scanned: usize,
}

impl Bounds {
    /// `limit` rows, though some that can't be read are in between.
    pub(super) fn readable(limit: usize) -> Self {
        Self { limit, scanned: limit.saturating_add(UNREADABLE_ROWS_MAX) }
    }
}

/// How many unreadable rows a query passes over at most.
const UNREADABLE_ROWS_MAX: usize = 10_000;
