//! What is read, on a thread and a connection of its own: readers see what is committed and wait for no writer.

use std::collections::BTreeSet;
use std::sync::Arc;

use mainstay_core::audit::AuditEntry;
use mainstay_core::id::{ServerName, SessionKey, SessionRef};
use mainstay_core::principal::Principal;
use mainstay_core::resume::{OwedDelete, ResumeRecord, ServerCard};
use mainstay_core::session::{SessionRecord, State};
use mainstay_core::time::Timestamp;
use rusqlite::{Row, ToSql, params};
use tokio::sync::mpsc;
use tracing::warn;

use super::database::{Bounds, Database};
use crate::codec::STORED_STATES;
use crate::codec::{action_number, state_number};
use crate::counters::count;
use crate::keys::{Keyring, Purpose, Sealed, Signature};
use crate::rows::{self, AuditColumns, OwedColumns, SessionColumns, Signed, StoneColumns, column, time_column};
use crate::stored::{
    AuditPage, Fault, Filter, Label, Listed, Page, REF_MATCHES_MAX, RowFault, RowKind, Stored, first_key,
};

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
            let ring = &self.database.ring;
            Ok(tombstone_columns(row, 0)
                .and_then(|(columns, signed)| rows::read_tombstone(ring, key, &columns, &signed)))
        })?;
        Ok(match (stone, row) {
            (Some(Ok(stone)), _) => Stored::Ended(stone),
            (Some(Err(fault)), _) => self.unreadable(key, RowKind::Tombstone, fault),
            (None, Some(Ok(record))) => Stored::Live(Box::new(record)),
            (None, Some(Err(fault))) => self.unreadable(key, RowKind::Session, fault),
            (None, None) => Stored::Absent,
        })
    }

    pub(super) fn ended_of(&mut self, keys: &[SessionKey]) -> rusqlite::Result<Vec<SessionKey>> {
        let mut ended = Vec::new();
        for key in keys {
            ended.extend(self.database.first(IS_ENDED, [key.as_bytes()], |_| Ok(*key))?);
        }
        Ok(ended)
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

    /// The next rows of `page` among at most [`CHUNK_ROWS_MAX`] ids, so that other readers get their turn in between.
    pub(super) fn list(&mut self, page: &Page) -> rusqlite::Result<Chunk> {
        let candidates = self.candidates(page)?;
        let mut chunk = Chunk { rows: Vec::new(), reached: None };
        if candidates.len() == CHUNK_ROWS_MAX {
            chunk.reached = candidates.last().map(|(key, _)| *key);
        }
        for (key, _) in candidates.into_iter().filter(|(_, wanted)| *wanted) {
            // An id with a row in both tables comes twice.
            let again = chunk.rows.last().is_some_and(|listed: &Listed| listed.key == key);
            let stored = if again { Stored::Absent } else { self.find(key)? };
            if page.filter.wants(&stored) {
                chunk.rows.push(Listed { key, stored, resume: self.resume_record(key)?.map(Into::into) });
            }
            if chunk.rows.len() == page.rows() {
                chunk.reached = None;
                break;
            }
        }
        Ok(chunk)
    }

    /// The labels of the next [`CHUNK_ROWS_MAX`] ids after `after`, and the last of those if there may be more.
    pub(super) fn labels(
        &self,
        label: Label,
        after: Option<SessionKey>,
    ) -> rusqlite::Result<(BTreeSet<Box<str>>, Option<SessionKey>)> {
        let after = after.map_or(Vec::new(), |key| key.as_bytes().to_vec());
        let sql = match label {
            Label::Principal => PRINCIPALS_OF,
            Label::Agent => AGENTS_OF,
        };
        let bounds = Bounds { limit: CHUNK_ROWS_MAX, scanned: CHUNK_ROWS_MAX };
        let rows = self.database.some(sql, params![after, column(CHUNK_ROWS_MAX as u64)], bounds, |row| {
            let text: Option<String> = row.get(1)?;
            Ok(key_column(row, 0).map(|key| (key, text)))
        })?;
        let reached = rows.last().map(|(key, _)| *key).filter(|_| rows.len() == CHUNK_ROWS_MAX);
        Ok((rows.into_iter().filter_map(|(_, text)| text.map(Into::into)).collect(), reached))
    }

    /// Reads with the keys of `ring` from now on.
    pub(super) fn accept(&mut self, ring: Arc<Keyring>) -> rusqlite::Result<()> {
        self.database.ring = ring;
        Ok(())
    }

    pub(super) fn keys_in_use(&mut self) -> rusqlite::Result<BTreeSet<u32>> {
        // A number that is none belongs to no key, and so keeps none.
        let ids = self.database.some(KEYS_IN_USE, [], KEY_IDS, |row| Ok(row.get(0).ok()))?;
        Ok(ids.into_iter().collect())
    }

    pub(super) fn count_by_principal(&mut self) -> rusqlite::Result<Vec<(Principal, u64)>> {
        let meters = &self.database.meters;
        self.database.some(BY_PRINCIPAL, [], PRINCIPALS, |row| {
            let (text, rows): (String, i64) = (row.get(0)?, row.get(1)?);
            let principal = rows::principal_of(&text);
            if principal.is_none() {
                count(&meters.rows_refused);
                warn!(rows, "the principal of some sessions can't be read; they count for nobody");
            }
            Ok(principal.zip(u64::try_from(rows).ok()))
        })
    }

    pub(super) fn count_by_server(&mut self) -> rusqlite::Result<Vec<(ServerName, u64)>> {
        self.database.some(BY_SERVER, [], SERVERS, |row| {
            let (name, rows): (String, i64) = (row.get(0)?, row.get(1)?);
            Ok(ServerName::parse(&name).zip(u64::try_from(rows).ok()))
        })
    }

    pub(super) fn count_by_state(&mut self) -> rusqlite::Result<Vec<(State, u64)>> {
        let columns = |row: &Row<'_>| -> rusqlite::Result<(i64, i64)> { Ok((row.get(0)?, row.get(1)?)) };
        let bounds = Bounds { limit: NUMBERS_MAX, scanned: NUMBERS_MAX };
        let counted = self.database.some(BY_STATE, [], bounds, |row| columns(row).map(Some))?;
        let count = |state| {
            let number = i64::from(state_number(state));
            let rows = counted.iter().filter(|(found, _)| *found == number).map(|(_, rows)| rows).sum::<i64>();
            (state, u64::try_from(rows).unwrap_or(0))
        };
        Ok(STORED_STATES.map(count).into())
    }

    pub(super) fn audit(&mut self, page: &AuditPage) -> rusqlite::Result<Vec<(u64, AuditEntry)>> {
        let Database { ring, meters, .. } = &self.database;
        let before = column(page.before.unwrap_or(u64::MAX));
        let session = page.session.map(|key| *key.as_bytes());
        let values = params![before, session, page.action.map(action_number)];
        self.database.some(AUDIT, values, Bounds::readable(page.rows()), |row| {
            let id: i64 = row.get(0)?;
            let columns = || -> rusqlite::Result<AuditColumns> {
                Ok(AuditColumns { at: row.get(1)?, action: row.get(2)?, session: row.get(3)? })
            };
            let both = columns().ok().zip(signed_columns(row, 4)).ok_or(Fault::Tampered);
            let entry = both.and_then(|(columns, signed)| rows::read_audit(ring, id, &columns, &signed));
            Ok(entry
                .inspect_err(|fault| {
                    count(&meters.rows_refused);
                    warn!(id, %fault, "audit entry can't be read");
                })
                .ok())
        })
    }

    pub(super) fn count(&mut self) -> rusqlite::Result<u64> {
        let rows = self.database.first(COUNT, [], |row| row.get::<_, i64>(0))?;
        Ok(rows.and_then(|rows| u64::try_from(rows).ok()).unwrap_or(0))
    }

    pub(super) fn owed(&mut self, now: Timestamp, limit: usize) -> rusqlite::Result<Vec<OwedDelete>> {
        self.database.some(OWED, [time_column(now)], Bounds::readable(limit), |row| self.owed_row(row))
    }

    pub(super) fn owed_one(&mut self, id: u64) -> rusqlite::Result<Option<OwedDelete>> {
        Ok(self.database.first(OWED_ONE, [column(id)], |row| self.owed_row(row))?.flatten())
    }

    pub(super) fn owed_of(&mut self, key: SessionKey, limit: usize) -> rusqlite::Result<Vec<OwedDelete>> {
        self.database.some(OWED_OF, [key.as_bytes()], Bounds::readable(limit), |row| self.owed_row(row))
    }

    /// The owed delete in a row with the columns of [`OWED`].
    fn owed_row(&self, row: &Row<'_>) -> rusqlite::Result<Option<OwedDelete>> {
        let id: i64 = row.get(0)?;
        let columns =
            || -> rusqlite::Result<OwedColumns> { Ok(OwedColumns { server: row.get(1)?, session: row.get(2)? }) };
        let both = columns().ok().zip(sealed_columns(row, 3)).ok_or(Fault::Tampered);
        let owed = both.and_then(|(columns, sealed)| rows::read_owed(&self.database.ring, id, &columns, &sealed));
        Ok(owed
            .inspect_err(|fault| {
                count(&self.database.meters.rows_refused);
                warn!(id, %fault, "owed delete can't be read");
            })
            .ok())
    }

    pub(super) fn configured(&mut self) -> rusqlite::Result<Option<Vec<ServerName>>> {
        self.database.configured()
    }

    pub(super) fn server_memory(&mut self) -> rusqlite::Result<Option<Box<[u8]>>> {
        let Some(sealed) = self.database.memory()? else { return Ok(None) };
        match self.database.ring.open(Purpose::Memory, b"", &sealed) {
            Ok(bytes) => Ok(Some(bytes.into())),
            Err(rejection) => {
                count(&self.database.meters.rows_refused);
                warn!(%rejection, "what was remembered of servers can't be read, and is forgotten");
                Ok(None)
            }
        }
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
            let Some(key) = key_column(row, 11) else { return Ok(None) };
            Ok(self.session(key, row).map_err(|fault| faults.push((key, fault))).ok())
        })?;
        faults.into_iter().for_each(|(key, fault)| self.report(key, RowKind::Session, fault));
        Ok(found)
    }

    /// The keys after those of the page before, and whether their columns say what the page asks for.
    fn candidates(&self, page: &Page) -> rusqlite::Result<Vec<(SessionKey, bool)>> {
        let Filter { server, principal, agent, .. } = &page.filter;
        let after = page.after.map_or(Vec::new(), |key| key.as_bytes().to_vec());
        let limit = column(CHUNK_ROWS_MAX as u64);
        let mut values: Vec<&dyn ToSql> = vec![&after, &limit];
        let server = server.as_ref().map(ServerName::as_str);
        server.iter().for_each(|server| values.push(server));
        principal.iter().for_each(|principal| values.push(principal));
        agent.iter().for_each(|agent| values.push(agent));
        let bounds = Bounds { limit: CHUNK_ROWS_MAX, scanned: CHUNK_ROWS_MAX };
        self.database.some(&candidates_sql(&page.filter), values.as_slice(), bounds, |row| {
            Ok(key_column(row, 0).zip(row.get(1).ok()))
        })
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
                principal: row.get(2)?,
                agent: row.get(3)?,
                generation: row.get(4)?,
                deadline: row.get(5)?,
                seen_at: row.get(6)?,
                confirmed: row.get(7)?,
            })
        };
        let columns = columns().map_err(|_| Fault::Tampered)?;
        let signed = signed_columns(row, 8).ok_or(Fault::Tampered)?;
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

/// What a chunk of a list came to.
pub(super) struct Chunk {
    pub(super) rows: Vec<Listed>,
    /// The last id that was looked at, if there may be more after it and they are still wanted.
    pub(super) reached: Option<SessionKey>,
}

/// The statement that goes through the keys and says of each whether `filter` wants it. What an index serves narrows the
/// keys; everything else is looked at in their rows, so that no statement looks at more than a chunk of them. Its
/// parameters are the key to go on after, how many, and the texts in the order of their fields.
pub(crate) fn candidates_sql(filter: &Filter) -> String {
    let (mut narrowed, mut wanted) = (String::from("key > ?1 AND length(key) = 32"), String::from("1"));
    let texts = [
        ("server", filter.server.is_some()),
        ("principal", filter.principal.is_some()),
        ("agent", filter.agent.is_some()),
    ];
    let asked = texts.into_iter().filter(|(_, asked)| *asked).map(|(column, _)| column);
    for (column, number) in asked.zip(3..) {
        let clause = if column == "principal" { &mut narrowed } else { &mut wanted };
        *clause += &format!(" AND {column} IS ?{number}");
    }
    if let Some(state) = filter.state {
        // A number in the text lets the planner see that a partial index covers it.
        let clause = if state == State::Draining { &mut narrowed } else { &mut wanted };
        *clause += &format!(" AND state = {}", state_number(state));
    }
    let tables: &[&str] = match filter.state.map(State::is_ended) {
        None => &["sessions", "tombstones"],
        Some(false) => &["sessions"],
        Some(true) => &["tombstones"],
    };
    let part = |table| format!("SELECT key, {wanted} AS wanted FROM {table} WHERE {narrowed}");
    let parts: Vec<_> = tables.iter().map(part).collect();
    format!("{} ORDER BY key LIMIT ?2", parts.join(" UNION ALL "))
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

/// A tombstone's row in the columns from `index` on.
pub(super) fn tombstone_columns(row: &Row<'_>, index: usize) -> Result<(StoneColumns, Signed), Fault> {
    let columns = || -> rusqlite::Result<StoneColumns> {
        Ok(StoneColumns {
            state: row.get(index)?,
            server: row.get(index + 1)?,
            principal: row.get(index + 2)?,
            agent: row.get(index + 3)?,
        })
    };
    columns().ok().zip(signed_columns(row, index + 4)).ok_or(Fault::Tampered)
}

/// Key number and sealed bytes in the columns from `index` on.
pub(super) fn sealed_columns(row: &Row<'_>, index: usize) -> Option<Sealed> {
    Some(Sealed { key_id: row.get(index).ok()?, bytes: row.get(index + 1).ok()? })
}

const SESSION: &str =
    "SELECT state, server, principal, agent, generation, deadline, seen_at, confirmed, key_id, mac, body
    FROM sessions WHERE key = ?1";
const TOMBSTONE: &str = "SELECT state, server, principal, agent, key_id, mac, body FROM tombstones WHERE key = ?1";
const IS_ENDED: &str = "SELECT 1 FROM tombstones WHERE key = ?1";
const RESUME: &str = "SELECT key_id, sealed FROM resumes WHERE key = ?1";
pub(crate) const BY_DEADLINE: &str =
    "SELECT state, server, principal, agent, generation, deadline, seen_at, confirmed, key_id, mac,
        body, key
    FROM sessions WHERE deadline <= ?1 AND NOT EXISTS (SELECT 1 FROM tombstones WHERE tombstones.key = sessions.key)
    ORDER BY deadline";
pub(crate) const DRAINING: &str = "SELECT key FROM sessions WHERE state = 2";
const KEYS: &str = "SELECT key FROM sessions WHERE key >= ?1 UNION SELECT key FROM tombstones WHERE key >= ?1
    ORDER BY key LIMIT ?2";
pub(crate) const BY_PRINCIPAL: &str = "SELECT principal, count(*) FROM sessions GROUP BY principal";
// Operators ask for it now and then; an index would cost each session that is opened.
const BY_SERVER: &str = "SELECT server, count(*) FROM sessions GROUP BY server";
pub(crate) const AUDIT: &str = "SELECT id, at, action, session, key_id, mac, body FROM audit
    WHERE id < ?1 AND (?2 IS NULL OR session = ?2) AND (?3 IS NULL OR action = ?3) ORDER BY id DESC";
const PRINCIPALS_OF: &str = "SELECT key, principal FROM sessions WHERE key > ?1 AND length(key) = 32
    UNION ALL SELECT key, principal FROM tombstones WHERE key > ?1 AND length(key) = 32 ORDER BY key LIMIT ?2";
const AGENTS_OF: &str = "SELECT key, agent FROM sessions WHERE key > ?1 AND length(key) = 32
    UNION ALL SELECT key, agent FROM tombstones WHERE key > ?1 AND length(key) = 32 ORDER BY key LIMIT ?2";
/// Sessions of the ledger are ready unless they are being drained; few are, and those have an index of their own.
pub(crate) const BY_STATE: &str = "SELECT 2, count(*) FROM sessions WHERE state = 2
    UNION ALL SELECT 1, count(*) FROM sessions
    UNION ALL SELECT 1, -count(*) FROM sessions WHERE state = 2
    UNION ALL SELECT state, count(*) FROM tombstones GROUP BY state";
/// More numbers than that no column of states holds.
const NUMBERS_MAX: usize = 1000;
const COUNT: &str = "SELECT count(*) FROM sessions";
pub(crate) const OWED: &str =
    "SELECT id, server, session, key_id, sealed FROM owed WHERE next_at <= ?1 ORDER BY next_at, id";
const OWED_ONE: &str = "SELECT id, server, session, key_id, sealed FROM owed WHERE id = ?1";
pub(crate) const OWED_OF: &str = "SELECT id, server, session, key_id, sealed FROM owed WHERE session = ?1 ORDER BY id";
const CARD: &str = "SELECT key_id, sealed FROM cards WHERE server = ?1";
/// More drains than that are not under way at once.
const UNFINISHED: Bounds = Bounds { limit: 100_000, scanned: 100_000 };
const KEYS_IN_USE: &str = "SELECT key_id FROM sessions UNION SELECT key_id FROM tombstones
    UNION SELECT key_id FROM resumes UNION SELECT key_id FROM owed UNION SELECT key_id FROM cards
    UNION SELECT key_id FROM audit";
/// More keys than that are in no directory.
const KEY_IDS: Bounds = Bounds { limit: 10_000, scanned: 10_000 };
/// More principals than that have no sessions at once.
const PRINCIPALS: Bounds = Bounds { limit: 10_000_000, scanned: 10_000_000 };
/// More than any configuration has had.
const SERVERS: Bounds = Bounds { limit: 100_000, scanned: 100_000 };
/// How many ids of a list are looked at before other readers get their turn.
const CHUNK_ROWS_MAX: usize = 1000;
const FAULTS_REMEMBERED_MAX: usize = 1024;
