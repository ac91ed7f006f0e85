//! One write as SQL, inside of a transaction that somebody else began.

use mainstay_core::audit::AuditEntry;
use mainstay_core::id::{Epoch, ServerName, SessionKey};
use mainstay_core::resume::{OwedDelete, ResumeRecord, ServerCard};
use mainstay_core::session::{Change, SessionRecord, Tombstone};
use mainstay_core::time::Timestamp;
use rusqlite::params;

use super::connect;
use super::database::{Bounds, Database};
use super::reader::{key_column, sealed_columns, tombstone_columns};
use crate::error::Found;
use crate::keys::{Keyring, Purpose, Sealed};
use crate::rows::{self, AuditColumns, OwedColumns, SessionColumns, StoneColumns, column, time_column};
use crate::write::{PURGED_ROWS_MAX, Write};

/// Why a write was not made.
pub(super) enum Refused {
    Conflict { key: SessionKey, found: Found },
    Sqlite(rusqlite::Error),
}

impl From<rusqlite::Error> for Refused {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sqlite(error)
    }
}

impl Database {
    pub(super) fn apply(&self, write: &Write) -> Result<(), Refused> {
        match write {
            Write::Session(Change::Insert(record)) => self.insert(record),
            Write::Session(Change::Update(record)) => self.update(record),
            Write::Session(Change::Touch { key, seen_at, deadline }) => {
                let values = params![key.as_bytes(), time_column(*seen_at), time_column(*deadline)];
                Ok(self.execute(TOUCH, values).map(|_| ())?)
            }
            Write::Session(Change::End(stone)) => self.end(stone),
            Write::Resume(record) => Ok(self.resume(record)?),
            Write::ForgetResume(key) => Ok(self.execute(FORGET_RESUME, [key.as_bytes()]).map(|_| ())?),
            Write::Owe(owed) => Ok(self.owe(owed)?),
            Write::Settle(id) | Write::GiveUp(id) => Ok(self.execute(SETTLE, [column(*id)]).map(|_| ())?),
            Write::Postpone(owed) => Ok(self.postpone(owed)?),
            Write::Card(card) => Ok(self.card(card)?),
            Write::Configured(servers) => Ok(self.set_configured(servers)?),
            Write::Memory(bytes) => Ok(self.set_memory(bytes)?),
            Write::Audit(entry) => Ok(self.audit(entry)?),
            Write::Purge { now } => Ok(self.purge(*now)?),
        }
    }

    /// The ledger's epoch.
    pub(super) fn epoch(&self) -> rusqlite::Result<Option<Epoch>> {
        let bytes = self.first(META, ["epoch"], |row| row.get::<_, [u8; 16]>(0))?;
        Ok(bytes.map(|bytes| {
            let (counter, nonce) = bytes.split_at(8);
            let number = |half: &[u8]| half.iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
            Epoch { counter: number(counter), nonce: number(nonce) }
        }))
    }

    pub(super) fn set_epoch(&self, epoch: Epoch) -> rusqlite::Result<()> {
        let bytes = [epoch.counter.to_be_bytes(), epoch.nonce.to_be_bytes()].concat();
        self.execute(SET_META, params!["epoch", bytes]).map(|_| ())
    }

    /// The latest time that the ledger has heard of.
    pub(super) fn clock(&self) -> rusqlite::Result<Timestamp> {
        let column = self.first(META, ["clock"], |row| row.get(0))?;
        Ok(column.and_then(rows::time).unwrap_or_default())
    }

    pub(super) fn set_clock(&self, clock: Timestamp) -> rusqlite::Result<()> {
        self.execute(SET_META, params!["clock", time_column(clock)]).map(|_| ())
    }

    /// The servers that were configured when that was last noted.
    pub(super) fn configured(&self) -> rusqlite::Result<Option<Vec<ServerName>>> {
        let text = self.first(META, ["servers"], |row| row.get::<_, String>(0))?;
        Ok(text.map(|text| text.lines().filter_map(ServerName::parse).collect()))
    }

    fn set_configured(&self, servers: &[ServerName]) -> rusqlite::Result<()> {
        let names: Vec<_> = servers.iter().map(ServerName::as_str).collect();
        self.execute(SET_META, params!["servers", names.join("\n")]).map(|_| ())
    }

    /// What was remembered of servers, with the number of the key that sealed it before it.
    pub(super) fn memory(&self) -> rusqlite::Result<Option<Sealed>> {
        let row = self.first(META, ["memory"], |row| row.get::<_, Vec<u8>>(0))?;
        Ok(row.and_then(|row| {
            let (key_id, bytes) = row.split_first_chunk()?;
            Some(Sealed { key_id: u32::from_be_bytes(*key_id), bytes: bytes.to_vec() })
        }))
    }

    fn set_memory(&self, bytes: &[u8]) -> rusqlite::Result<()> {
        let sealed = self.ring.seal(Purpose::Memory, b"", bytes);
        let row = [&sealed.key_id.to_be_bytes()[..], &sealed.bytes].concat();
        self.execute(SET_META, params!["memory", row]).map(|_| ())
    }

    /// Notes that the ledger belongs to `ring`, by its newest key.
    pub(super) fn prove(&self, ring: &Keyring) -> rusqlite::Result<()> {
        self.execute(SET_META, params![connect::KEYS, connect::proof(ring)]).map(|_| ())
    }

    fn insert(&self, record: &SessionRecord) -> Result<(), Refused> {
        let changed = self.write_session(INSERT, record)?;
        self.expect_one(changed, record.key)
    }

    fn update(&self, record: &SessionRecord) -> Result<(), Refused> {
        let changed = self.write_session(UPDATE, record)?;
        self.expect_one(changed, record.key)
    }

    fn write_session(&self, sql: &str, record: &SessionRecord) -> rusqlite::Result<usize> {
        let signed = rows::sign_session(&self.ring, record);
        let columns = SessionColumns::of(record);
        let values = params![
            record.key.as_bytes(),
            columns.state,
            columns.server,
            columns.principal,
            columns.agent,
            columns.generation,
            columns.deadline,
            columns.seen_at,
            columns.confirmed,
            signed.signature.key_id,
            signed.signature.mac,
            signed.body
        ];
        self.execute(sql, values)
    }

    fn end(&self, stone: &Tombstone) -> Result<(), Refused> {
        let removed = self.execute(REMOVE, params![stone.key.as_bytes(), column(stone.generation)])?;
        self.expect_one(removed, stone.key)?;
        let signed = rows::sign_tombstone(&self.ring, stone);
        let columns = StoneColumns::of(stone);
        let values = params![
            stone.key.as_bytes(),
            columns.state,
            columns.server,
            columns.principal,
            columns.agent,
            time_column(stone.keep_until),
            signed.signature.key_id,
            signed.signature.mac,
            signed.body
        ];
        self.execute(BURY, values)?;
        Ok(())
    }

    /// A statement that changed nothing met something else than it was meant for.
    fn expect_one(&self, changed: usize, key: SessionKey) -> Result<(), Refused> {
        if changed == 1 {
            return Ok(());
        }
        let found = if self.is_buried(key)? {
            Found::Ended
        } else {
            let generation = self.first(GENERATION, [key.as_bytes()], |row| row.get::<_, i64>(0))?;
            generation.map_or(Found::Absent, |column| Found::Generation(u64::try_from(column).unwrap_or(0)))
        };
        Err(Refused::Conflict { key, found })
    }

    fn is_buried(&self, key: SessionKey) -> rusqlite::Result<bool> {
        Ok(self.first(BURIED, [key.as_bytes()], |_| Ok(()))?.is_some())
    }

    fn resume(&self, record: &ResumeRecord) -> rusqlite::Result<()> {
        if self.is_buried(record.key)? {
            return record.owed_delete(record.saved_at).map_or(Ok(()), |owed| self.owe(&owed));
        }
        let sealed = rows::seal_resume(&self.ring, record);
        let used_at = time_column(record.used_at.max(record.saved_at));
        let values = params![record.key.as_bytes(), record.server.as_str(), used_at, sealed.key_id, sealed.bytes];
        self.execute(RESUME, values).map(|_| ())
    }

    fn owe(&self, owed: &OwedDelete) -> rusqlite::Result<()> {
        let sealed = rows::seal_owed(&self.ring, owed);
        let (next_at, owed_at) = (time_column(owed.next_at), time_column(owed.owed_at));
        let columns = OwedColumns::of(owed);
        let values = params![columns.server, next_at, owed_at, sealed.key_id, sealed.bytes, columns.session];
        self.execute(OWE, values).map(|_| ())
    }

    fn postpone(&self, owed: &OwedDelete) -> rusqlite::Result<()> {
        let sealed = rows::seal_owed(&self.ring, owed);
        let next_at = time_column(owed.next_at);
        let columns = OwedColumns::of(owed);
        let values = params![column(owed.id), columns.server, next_at, sealed.key_id, sealed.bytes, columns.session];
        self.execute(POSTPONE, values).map(|_| ())
    }

    fn card(&self, card: &ServerCard) -> rusqlite::Result<()> {
        let sealed = rows::seal_card(&self.ring, card);
        self.execute(CARD, params![card.server.as_str(), sealed.key_id, sealed.bytes]).map(|_| ())
    }

    /// The number is part of what is signed, so it is drawn before the row is written.
    fn audit(&self, entry: &AuditEntry) -> rusqlite::Result<()> {
        let last: Option<i64> = self.first(AUDIT_LAST, [], |row| row.get(0))?;
        let id = last.unwrap_or(0) + 1;
        let (signed, columns) = (rows::sign_audit(&self.ring, id, entry), AuditColumns::of(entry));
        let values = params![
            id,
            columns.at,
            columns.action,
            columns.session,
            signed.signature.key_id,
            signed.signature.mac,
            signed.body
        ];
        self.execute(AUDIT, values).map(|_| ())
    }

    fn purge(&self, now: Timestamp) -> rusqlite::Result<()> {
        self.purge_tombstones(now)?;
        self.purge_resumes(now)?;
        let left_since = time_column(now.minus(OwedDelete::LISTED));
        let rows_max = column(PURGED_ROWS_MAX as u64);
        self.execute(PURGE_OWED, params![time_column(OwedDelete::NEVER), left_since, rows_max])?;
        let audited_since = time_column(now.minus(AuditEntry::RETENTION));
        self.execute(PURGE_AUDIT, params![audited_since, column(AuditEntry::ENTRIES_MAX), rows_max]).map(|_| ())
    }

    /// What the column says of a tombstone's time counts for nothing if its body says otherwise, or can't be read: it
    /// blocks its id then, and stays, out of the purge's way (S7).
    fn purge_tombstones(&self, now: Timestamp) -> rusqlite::Result<()> {
        let bounds = Bounds { limit: PURGED_ROWS_MAX, scanned: PURGED_ROWS_MAX };
        let due = self.some(OVER, [time_column(now)], bounds, |row| {
            let Some(key) = key_column(row, 0) else { return Ok(None) };
            let stone = tombstone_columns(row, 1)
                .and_then(|(columns, signed)| rows::read_tombstone(&self.ring, key, &columns, &signed));
            let keep_until = stone.ok().map_or(OwedDelete::NEVER, |stone| stone.keep_until);
            Ok(Some((key, keep_until)))
        })?;
        for (key, keep_until) in due {
            if keep_until <= now {
                self.execute(UNBURY, [key.as_bytes()])?;
            } else {
                self.execute(KEEP, params![key.as_bytes(), time_column(keep_until)])?;
            }
        }
        Ok(())
    }

    fn purge_resumes(&self, now: Timestamp) -> rusqlite::Result<()> {
        let bounds = Bounds { limit: PURGED_ROWS_MAX, scanned: PURGED_ROWS_MAX };
        let stale = self.some(STALE, [time_column(now.minus(ResumeRecord::TTL))], bounds, |row| {
            let Some(key) = key_column(row, 0) else { return Ok(None) };
            let record = sealed_columns(row, 1).map(|sealed| rows::read_resume(&self.ring, key, &sealed));
            Ok(Some((key, record.and_then(Result::ok))))
        })?;
        for (key, record) in stale {
            self.execute(FORGET_RESUME, [key.as_bytes()])?;
            if let Some(owed) = record.and_then(|record| record.owed_delete(now)) {
                self.owe(&owed)?;
            }
        }
        Ok(())
    }
}

const META: &str = "SELECT value FROM meta WHERE name = ?1";
const SET_META: &str =
    "INSERT INTO meta (name, value) VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET value = excluded.value";
const INSERT: &str = "INSERT INTO sessions
        (key, state, server, principal, agent, generation, deadline, seen_at, confirmed, key_id, mac, body)
    SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12 WHERE NOT EXISTS (SELECT 1 FROM tombstones WHERE key = ?1)
    ON CONFLICT (key) DO NOTHING";
const UPDATE: &str = "UPDATE sessions SET state = ?2, server = ?3, principal = ?4, agent = ?5, generation = ?6,
        deadline = ?7, seen_at = ?8, confirmed = ?9, key_id = ?10, mac = ?11, body = ?12
    WHERE key = ?1 AND generation = ?6 - 1 AND NOT EXISTS (SELECT 1 FROM tombstones WHERE key = ?1)";
// Only a ready session has an idle deadline to move; a drain's stays.
const TOUCH: &str = "UPDATE sessions SET seen_at = ?2, deadline = ?3, confirmed = 1 WHERE key = ?1 AND state = 1";
const REMOVE: &str = "DELETE FROM sessions
    WHERE key = ?1 AND generation = ?2 - 1 AND NOT EXISTS (SELECT 1 FROM tombstones WHERE key = ?1)";
const BURY: &str = "INSERT INTO tombstones (key, state, server, principal, agent, keep_until, key_id, mac, body)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)";
const BURIED: &str = "SELECT 1 FROM tombstones WHERE key = ?1";
const GENERATION: &str = "SELECT generation FROM sessions WHERE key = ?1";
const RESUME: &str = "INSERT INTO resumes (key, server, used_at, key_id, sealed) VALUES (?1, ?2, ?3, ?4, ?5)
    ON CONFLICT (key) DO UPDATE SET server = excluded.server, used_at = excluded.used_at, key_id = excluded.key_id,
        sealed = excluded.sealed";
const FORGET_RESUME: &str = "DELETE FROM resumes WHERE key = ?1";
const OWE: &str = "INSERT INTO owed (server, next_at, owed_at, key_id, sealed, session)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6)";
const SETTLE: &str = "DELETE FROM owed WHERE id = ?1";
const POSTPONE: &str =
    "UPDATE owed SET server = ?2, next_at = ?3, key_id = ?4, sealed = ?5, session = ?6 WHERE id = ?1";
const CARD: &str = "INSERT INTO cards (server, key_id, sealed) VALUES (?1, ?2, ?3)
    ON CONFLICT (server) DO UPDATE SET key_id = excluded.key_id, sealed = excluded.sealed";
const AUDIT_LAST: &str = "SELECT seq FROM sqlite_sequence WHERE name = 'audit'";
const AUDIT: &str =
    "INSERT INTO audit (id, at, action, session, key_id, mac, body) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)";
const OVER: &str = "SELECT key, state, server, principal, agent, key_id, mac, body FROM tombstones
    WHERE keep_until <= ?1 AND NOT EXISTS (SELECT 1 FROM sessions WHERE sessions.key = tombstones.key)
    ORDER BY keep_until";
const UNBURY: &str = "DELETE FROM tombstones WHERE key = ?1";
const KEEP: &str = "UPDATE tombstones SET keep_until = ?2 WHERE key = ?1";
const STALE: &str = "SELECT key, key_id, sealed FROM resumes
    WHERE used_at <= ?1 AND NOT EXISTS (SELECT 1 FROM sessions WHERE sessions.key = resumes.key)
    ORDER BY used_at";
const PURGE_OWED: &str = "DELETE FROM owed WHERE id IN
    (SELECT id FROM owed WHERE next_at = ?1 AND owed_at <= ?2 LIMIT ?3)";
// Entries come in the order of their numbers, without gaps, so the oldest and surplus ones are at the beginning.
pub(crate) const PURGE_AUDIT: &str = "DELETE FROM audit WHERE id IN
    (SELECT id FROM (SELECT id, at FROM audit ORDER BY id LIMIT ?3)
     WHERE at <= ?1 OR id <= (SELECT max(id) FROM audit) - ?2)";
