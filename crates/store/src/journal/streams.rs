//! The row of a stream, and the right to append to it.

use mainstay_core::call::StreamId;
use mainstay_core::id::{Epoch, SessionKey};
use mainstay_core::time::Timestamp;
use rusqlite::{Row, params};

use super::body::stream_key;
use super::call::{Call, Ending, Head, StreamRecord};
use super::database::Database;
use super::event::Source;
use crate::keys::Purpose;
use crate::rows::{column, time_column};

/// What a row says of a stream, as far as appending goes.
pub(super) struct Standing {
    pub(super) row: i64,
    pub(super) session_row: i64,
    pub(super) claim: Epoch,
    pub(super) last_sequence: u64,
    pub(super) delivered: u64,
    pub(super) ending: Option<Ending>,
    /// Bytes kept of all streams of the session.
    pub(super) session_bytes: u64,
}

impl Database {
    /// The row of `stream`, if there is one.
    pub(super) fn standing(&self, session: SessionKey, stream: StreamId) -> rusqlite::Result<Option<Standing>> {
        let key = params![session.as_bytes(), wide(stream.epoch), wide(stream.number)];
        self.first(STANDING, key, |row| {
            Ok(Standing {
                row: row.get(0)?,
                session_row: row.get(1)?,
                claim: Epoch { counter: narrow(row.get(2)?), nonce: narrow(row.get(3)?) },
                last_sequence: narrow(row.get(4)?),
                delivered: narrow(row.get(5)?),
                ending: Ending::of(row.get(6)?).flatten(),
                session_bytes: narrow(row.get(7)?),
            })
        })
    }

    /// See [`Journal::heads`](super::Journal::heads).
    pub(super) fn heads(&self, streams: &[(SessionKey, StreamId)]) -> rusqlite::Result<Vec<Option<Head>>> {
        let head = |Standing { claim, last_sequence, ending, .. }| Head { claim, last_sequence, ending };
        streams.iter().map(|(session, stream)| Ok(self.standing(*session, *stream)?.map(head))).collect()
    }

    /// A new row for `stream`, claimed.
    pub(super) fn add_stream(
        &self,
        session: SessionKey,
        stream: StreamId,
        claim: Epoch,
        now: Timestamp,
    ) -> rusqlite::Result<Standing> {
        let (session_row, bytes): (i64, i64) = self
            .first(ADD_SESSION, [session.as_bytes()], |row| Ok((row.get(0)?, row.get(1)?)))?
            .ok_or(rusqlite::Error::QueryReturnedNoRows)?;
        let (counter, nonce) = (wide(claim.counter), wide(claim.nonce));
        let values = params![session_row, wide(stream.epoch), wide(stream.number), counter, nonce, time_column(now)];
        self.execute(ADD_STREAM, values)?;
        let row = self.connection.last_insert_rowid();
        let session_bytes = narrow(bytes);
        Ok(Standing { row, session_row, claim, last_sequence: 0, delivered: 0, ending: None, session_bytes })
    }

    /// See [`Journal::claim`](super::Journal::claim). The inner error is the claim of a later worker.
    pub(super) fn claim(
        &self,
        session: SessionKey,
        stream: StreamId,
        claim: Epoch,
        now: Timestamp,
    ) -> rusqlite::Result<Result<Option<StreamRecord>, Epoch>> {
        let Some(standing) = self.standing(session, stream)? else {
            self.add_stream(session, stream, claim, now)?;
            return Ok(Ok(None));
        };
        if standing.claim > claim {
            return Ok(Err(standing.claim));
        }
        let values = params![standing.row, wide(claim.counter), wide(claim.nonce), time_column(now)];
        self.execute(CLAIM, values)?;
        self.stream_record(session, stream).map(Ok)
    }

    /// What is known of `stream`.
    pub(super) fn stream_record(
        &self,
        session: SessionKey,
        stream: StreamId,
    ) -> rusqlite::Result<Option<StreamRecord>> {
        let key = params![session.as_bytes(), wide(stream.epoch), wide(stream.number)];
        self.first(RECORD, key, |row| self.record(session, row))
    }

    /// Every stream of `session`, the oldest first.
    pub(super) fn stream_records(&self, session: SessionKey, limit: usize) -> rusqlite::Result<Vec<StreamRecord>> {
        let mut records = Vec::new();
        self.each(RECORDS, params![session.as_bytes(), column(limit as u64)], |row| {
            records.push(self.record(session, row)?);
            Ok(true)
        })?;
        Ok(records)
    }

    /// See [`Journal::open_calls`](super::Journal::open_calls).
    pub(super) fn open_calls(&self, claim: Epoch, limit: usize) -> rusqlite::Result<Vec<(SessionKey, StreamRecord)>> {
        let mut records = Vec::new();
        let values = params![wide(claim.counter), wide(claim.nonce), wide(StreamId::LISTEN), column(limit as u64)];
        self.each(OPEN_CALLS, values, |row| {
            let session = SessionKey::from_bytes(row.get(12)?);
            records.push((session, self.record(session, row)?));
            Ok(true)
        })?;
        Ok(records)
    }

    fn record(&self, session: SessionKey, row: &Row<'_>) -> rusqlite::Result<StreamRecord> {
        let stream = StreamId { epoch: narrow(row.get(0)?), number: narrow(row.get(1)?) };
        let key = stream_key(session, stream);
        let sealed = |index: usize, purpose, what| -> rusqlite::Result<Option<Vec<u8>>> {
            if row.get_ref(index + 1)? == rusqlite::types::ValueRef::Null {
                return Ok(None);
            }
            let opened = self.opened(row, index, purpose, &key);
            if opened.is_none() {
                self.refused(what);
            }
            Ok(opened)
        };
        let (source, call) = (sealed(7, Purpose::Source, "source")?, sealed(9, Purpose::Call, "call")?);
        Ok(StreamRecord {
            stream,
            claim: Epoch { counter: narrow(row.get(2)?), nonce: narrow(row.get(3)?) },
            last_sequence: narrow(row.get(4)?),
            delivered: narrow(row.get(5)?),
            ending: Ending::of(row.get(6)?).flatten(),
            source: source.and_then(Source::decode),
            call: call.and_then(Call::decode),
            changed_at: Timestamp::from_unix_millis(narrow(row.get(11)?)),
        })
    }
}

/// A number that may be anything, as SQLite keeps it: the same 64 bits. Unlike [`column`] no two become one; their
/// order is kept below 2^63 only.
pub(super) const fn wide(number: u64) -> i64 {
    number.cast_signed()
}

/// The number in a column.
pub(super) const fn narrow(column: i64) -> u64 {
    column.cast_unsigned()
}

pub(super) const STANDING: &str =
    "SELECT s.id, s.session, s.claim_counter, s.claim_nonce, s.last_sequence, s.delivered, s.ending,
        n.bytes
    FROM sessions n JOIN streams s ON s.session = n.id WHERE n.session = ?1 AND s.epoch = ?2 AND s.number = ?3";
/// Adds what is not there, and gives the row in any case.
const ADD_SESSION: &str = "INSERT INTO sessions (session) VALUES (?1)
    ON CONFLICT (session) DO UPDATE SET events = events RETURNING id, bytes";
const ADD_STREAM: &str = "INSERT INTO streams (session, epoch, number, claim_counter, claim_nonce, changed_at)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6)";
const CLAIM: &str = "UPDATE streams SET claim_counter = ?2, claim_nonce = ?3, changed_at = max(changed_at, ?4)
    WHERE id = ?1";
pub(super) const RECORD: &str =
    "SELECT s.epoch, s.number, s.claim_counter, s.claim_nonce, s.last_sequence, s.delivered, s.ending,
        s.source_key_id, s.source, c.key_id, c.sealed, s.changed_at
    FROM sessions n JOIN streams s ON s.session = n.id LEFT JOIN calls c ON c.stream = s.id
    WHERE n.session = ?1 AND s.epoch = ?2 AND s.number = ?3";
const RECORDS: &str =
    "SELECT s.epoch, s.number, s.claim_counter, s.claim_nonce, s.last_sequence, s.delivered, s.ending,
        s.source_key_id, s.source, c.key_id, c.sealed, s.changed_at
    FROM sessions n JOIN streams s ON s.session = n.id LEFT JOIN calls c ON c.stream = s.id
    WHERE n.session = ?1 ORDER BY s.epoch, s.number LIMIT ?2";
/// Looks at every stream: it is asked once, by a worker that starts beside another.
const OPEN_CALLS: &str =
    "SELECT s.epoch, s.number, s.claim_counter, s.claim_nonce, s.last_sequence, s.delivered, s.ending,
        s.source_key_id, s.source, c.key_id, c.sealed, s.changed_at, n.session
    FROM streams s JOIN calls c ON c.stream = s.id JOIN sessions n ON n.id = s.session
    WHERE s.ending = 0 AND s.claim_counter = ?1 AND s.claim_nonce = ?2 AND s.number <> ?3
    ORDER BY s.epoch, s.number LIMIT ?4";
