//! What is read, on a thread and a connection of its own: readers see what is committed and wait for no writer.

use std::collections::BTreeSet;

use mainstay_core::id::{ServerName, SessionKey, SessionRef};
use mainstay_core::resume::{OwedDelete, ResumeRecord, ServerCard};
use mainstay_core::session::SessionRecord;
use mainstay_core::time::Timestamp;
use rusqlite::{Row, params};
use tokio::sync::mpsc;
use tracing::warn;

use super::database::{Bounds, Database};
use crate::counters::count;
use crate::keys::{Sealed, Signature};
use crate::rows::{self, SessionColumns, Signed, column, time_column};
use crate::stored::{Fault, Listed, Page, REF_MATCHES_MAX, RowFault, RowKind, Stored, first_key};

/// Something to read. It answers by itself.
pub(super) type Read = Box<dyn FnOnce(&mut Reader) + Send>;

/// The reading thread's state.
pub(super) struct Reader {
    database: Database,
    /// The faults that the log has heard of.
    reported: BTreeSet<(SessionKey, RowKind)>,
}

impl Reader {
    pub(super) fn new(database: Database) -> Self {
        Self { database, reported: BTreeSet::new() }
    }

    /// Reads until every handle is gone.
    pub(super) fn run(mut self, mut reads: mpsc::Receiver<Read>) {
        while let Some(read) = reads.blocking_recv() {
            count(&self.database.meters.reads);
            read(&mut self);
        }
    }

    /// The row is looked up before the tombstone: between the two a session can only end, and that is seen.
    pub(super) fn find(&mut self, key: SessionKey) -> rusqlite::Result<Stored> {
        let row = self.database.first(SESSION, [key.as_bytes()], |row| Ok(self.session(key, row)))?;
        let stone = self.database.first(TOMBSTONE, [key.as_bytes()], |row| {
            let signed = signed_columns(row, 0).ok_or(Fault::Tampered);
            Ok(signed.and_then(|signed| rows::read_tombstone(&self.database.ring, key, &signed)))
        })?;
        Ok(match (stone, row) {
            (Some(Ok(stone)), _) => Stored::Ended(stone),
            (Some(Err(fault)), _) => self.unreadable(key, RowKind::Tombstone, fault),
            (None, Some(Ok(record))) => Stored::Live(Box::new(record)),
            (None, Some(Err(fault))) => self.unreadable(key, RowKind::Session, fault),
            (None, None) => Stored::Absent,
        })
    }

    pub(super) fn find_ref(&mut self, session_ref: SessionRef) -> rusqlite::Result<Vec<(SessionKey, Stored)>> {
        let keys = self.keys_from(first_key(session_ref), REF_MATCHES_MAX)?;
        let matching = keys.into_iter().filter(|key| key.session_ref() == session_ref);
        matching.map(|key| Ok((key, self.find(key)?))).collect()
    }

    pub(super) fn resume_record(&mut self, key: SessionKey) -> rusqlite::Result<Option<ResumeRecord>> {
        let found = self.database.first(RESUME, [key.as_bytes()], |row| {
            let sealed = sealed_columns(row, 0).ok_or(Fault::Tampered);
            Ok(sealed.and_then(|sealed| rows::read_resume(&self.database.ring, key, &sealed)))
        })?;
        Ok(found.and_then(|found| found.map_err(|fault| self.report(key, RowKind::Resume, fault)).ok()))
    }

    pub(super) fn overdue(&mut self, now: Timestamp, limit: usize) -> rusqlite::Result<Vec<SessionKey>> {
        let due = self.by_deadline(now, limit)?;
        Ok(due.into_iter().map(|record| record.key).collect())
    }

    pub(super) fn next_deadline(&mut self) -> rusqlite::Result<Option<Timestamp>> {
        let next = self.by_deadline(OwedDelete::NEVER, 1)?;
        Ok(next.first().map(|record| record.deadline))
    }

    pub(super) fn unfinished(&mut self) -> rusqlite::Result<Vec<SessionKey>> {
        self.database.some(DRAINING, [], UNFINISHED, |row| Ok(key_column(row, 0)))
    }

    pub(super) fn list(&mut self, page: &Page) -> rusqlite::Result<Vec<Listed>> {
        let first = page.after.unwrap_or(SessionKey::from_bytes([0; 32]));
        let mut keys = self.keys_from(first, page.rows() + 1)?;
        keys.retain(|key| Some(*key) != page.after);
        keys.truncate(page.rows());
        let mut listed = Vec::with_capacity(keys.len());
        for key in keys {
            let stored = self.find(key)?;
            // It may have been purged since.
            if stored != Stored::Absent {
                listed.push(Listed { key, stored, resume: self.resume_record(key)?.map(Into::into) });
            }
        }
        Ok(listed)
    }

    pub(super) fn count(&mut self) -> rusqlite::Result<u64> {
        let rows = self.database.first(COUNT, [], |row| row.get::<_, i64>(0))?;
        Ok(rows.and_then(|rows| u64::try_from(rows).ok()).unwrap_or(0))
    }

    pub(super) fn owed(&mut self, now: Timestamp, limit: usize) -> rusqlite::Result<Vec<OwedDelete>> {
        let Database { ring, meters, .. } = &self.database;
        self.database.some(OWED, [time_column(now)], Bounds::readable(limit), |row| {
            let (id, server): (i64, String) = (row.get(0)?, row.get(1)?);
            let sealed = sealed_columns(row, 2).ok_or(Fault::Tampered);
            let owed = sealed.and_then(|sealed| rows::read_owed(ring, id, &server, &sealed));
            Ok(owed
                .inspect_err(|fault| {
                    count(&meters.rows_refused);
                    warn!(id, server, %fault, "owed delete can't be read");
                })
                .ok())
        })
    }

    pub(super) fn card(&mut self, server: &ServerName, fingerprint: [u8; 32]) -> rusqlite::Result<Option<ServerCard>> {
        let found = self.database.first(CARD, [server.as_str()], |row| {
            let sealed = sealed_columns(row, 0).ok_or(Fault::Tampered);
            Ok(sealed.and_then(|sealed| rows::read_card(&self.database.ring, server, &sealed)))
        })?;
        let card = found.and_then(|found| {
            found
                .inspect_err(|fault| {
                    count(&self.database.meters.rows_refused);
                    warn!(%server, %fault, "server card can't be read");
                })
                .ok()
        });
        Ok(card.filter(|card| card.fingerprint == fingerprint))
    }

    /// Readable live sessions whose deadline is not after `until`, the earliest first.
    fn by_deadline(&mut self, until: Timestamp, limit: usize) -> rusqlite::Result<Vec<SessionRecord>> {
        let mut faults = Vec::new();
        let found = self.database.some(BY_DEADLINE, [time_column(until)], Bounds::readable(limit), |row| {
            let Some(key) = key_column(row, 9) else { return Ok(None) };
            Ok(self.session(key, row).map_err(|fault| faults.push((key, fault))).ok())
        })?;
        faults.into_iter().for_each(|(key, fault)| self.report(key, RowKind::Session, fault));
        Ok(found)
    }

    /// The keys from `first` on, of live and ended sessions.
    fn keys_from(&mut self, first: SessionKey, limit: usize) -> rusqlite::Result<Vec<SessionKey>> {
        let values = params![first.as_bytes(), column(limit as u64)];
        self.database.some(KEYS, values, Bounds { limit, scanned: limit }, |row| Ok(key_column(row, 0)))
    }

    /// The session in a row that starts with the columns of [`SESSION`].
    fn session(&self, key: SessionKey, row: &Row<'_>) -> Result<SessionRecord, Fault> {
        let columns = || -> rusqlite::Result<SessionColumns> {
            Ok(SessionColumns {
                state: row.get(0)?,
                server: row.get(1)?,
                generation: row.get(2)?,
                deadline: row.get(3)?,
                seen_at: row.get(4)?,
                confirmed: row.get(5)?,
            })
        };
        let columns = columns().map_err(|_| Fault::Tampered)?;
        let signed = signed_columns(row, 6).ok_or(Fault::Tampered)?;
        rows::read_session(&self.database.ring, key, &columns, &signed)
    }

    fn unreadable(&mut self, key: SessionKey, kind: RowKind, fault: Fault) -> Stored {
        self.report(key, kind, fault);
        Stored::Unreadable(RowFault { key, kind, fault })
    }

    /// Counts a fault every time, and logs it once.
    fn report(&mut self, key: SessionKey, kind: RowKind, fault: Fault) {
        count(&self.database.meters.rows_refused);
        if self.reported.len() < FAULTS_REMEMBERED_MAX && self.reported.insert((key, kind)) {
            warn!(session = %key.session_ref(), %kind, %fault, "row can't be read; it is kept and not served");
        }
    }
}

/// The key in column `index`; none if it is no key.
pub(super) fn key_column(row: &Row<'_>, index: usize) -> Option<SessionKey> {
    row.get(index).ok().map(SessionKey::from_bytes)
}

/// Key number, code and body in the columns from `index` on.
pub(super) fn signed_columns(row: &Row<'_>, index: usize) -> Option<Signed> {
    let signature = Signature { key_id: row.get(index).ok()?, mac: row.get(index + 1).ok()? };
    Some(Signed { signature, body: row.get(index + 2).ok()? })
}

/// Key number and sealed bytes in the columns from `index` on.
pub(super) fn sealed_columns(row: &Row<'_>, index: usize) -> Option<Sealed> {
    Some(Sealed { key_id: row.get(index).ok()?, bytes: row.get(index + 1).ok()? })
}

const SESSION: &str = "SELECT state, server, generation, deadline, seen_at, confirmed, key_id, mac, body
    FROM sessions WHERE key = ?1";
const TOMBSTONE: &str = "SELECT key_id, mac, body FROM tombstones WHERE key = ?1";
const RESUME: &str = "SELECT key_id, sealed FROM resumes WHERE key = ?1";
const BY_DEADLINE: &str = "SELECT state, server, generation, deadline, seen_at, confirmed, key_id, mac, body, key
    FROM sessions WHERE deadline <= ?1 AND NOT EXISTS (SELECT 1 FROM tombstones WHERE tombstones.key = sessions.key)
    ORDER BY deadline";
const DRAINING: &str = "SELECT key FROM sessions WHERE state = 2";
const KEYS: &str = "SELECT key FROM sessions WHERE key >= ?1 UNION SELECT key FROM tombstones WHERE key >= ?1
    ORDER BY key LIMIT ?2";
const COUNT: &str = "SELECT count(*) FROM sessions";
const OWED: &str = "SELECT id, server, key_id, sealed FROM owed WHERE next_at <= ?1 ORDER BY next_at, id";
const CARD: &str = "SELECT key_id, sealed FROM cards WHERE server = ?1";
/// More drains than that are not under way at once.
const UNFINISHED: Bounds = Bounds { limit: 100_000, scanned: 100_000 };
const FAULTS_REMEMBERED_MAX: usize = 1024;
