//! What is read of events and questions.

use std::collections::BTreeSet;

use mainstay_core::call::StreamId;
use mainstay_core::id::SessionKey;
use mainstay_core::time::Timestamp;
use rusqlite::{Row, params};

use super::body::{event_key, stream_key};
use super::call::Ending;
use super::database::Database;
use super::event::Event;
use super::question::{Answered, Asked, Question};
use super::streams::{narrow, wide};
use crate::keys::Purpose;
use crate::rows::{column, time, time_column};

impl Database {
    /// See [`Journal::replay`](super::Journal::replay).
    pub(super) fn replay(
        &self,
        session: SessionKey,
        stream: StreamId,
        after: u64,
        limit: usize,
    ) -> rusqlite::Result<Vec<Event>> {
        let mut events: Vec<Event> = Vec::new();
        if limit == 0 {
            return Ok(events);
        }
        let mut bytes = 0;
        let values = params![session.as_bytes(), wide(stream.epoch), wide(stream.number), column(after)];
        self.each(REPLAY, values, |row| {
            let Some(event) = self.event(session, stream, row)? else { return Ok(true) };
            bytes += event.message.len();
            events.push(event);
            Ok(events.len() < limit && bytes < REPLAY_BYTES_MAX)
        })?;
        Ok(events)
    }

    /// The event in a row, as far as its columns agree with what is sealed.
    fn event(&self, session: SessionKey, stream: StreamId, row: &Row<'_>) -> rusqlite::Result<Option<Event>> {
        let sequence = narrow(row.get(0)?);
        let columns: (i64, i64, i64) = (row.get(1)?, row.get(2)?, row.get(3)?);
        let agrees = |event: &Event| {
            let (ending, weight) = (Ending::number(event.ending), event.weight.number());
            columns == (i64::from(ending), i64::from(weight), time_column(event.at))
        };
        let opened = self.opened(row, 4, Purpose::Event, &event_key(session, stream, sequence));
        let event = opened.and_then(|body| Event::decode(sequence, body)).filter(agrees);
        if event.is_none() {
            self.refused("event");
        }
        Ok(event)
    }

    /// Open questions of everybody whose deadline is not after `due`.
    pub(super) fn open_questions(&self, due: Timestamp, limit: usize) -> rusqlite::Result<Vec<Asked>> {
        self.asked(OPEN, params![time_column(due)], limit)
    }

    /// Questions of `session`, answered or not, the newest first.
    pub(super) fn questions(&self, session: SessionKey, limit: usize) -> rusqlite::Result<Vec<Asked>> {
        self.asked(OF_SESSION, params![session.as_bytes()], limit)
    }

    fn asked(&self, sql: &str, values: impl rusqlite::Params, limit: usize) -> rusqlite::Result<Vec<Asked>> {
        let mut found = Vec::new();
        if limit == 0 {
            return Ok(found);
        }
        self.each(sql, values, |row| {
            let asked = self.asked_row(row);
            if asked.is_none() {
                self.refused("question");
            }
            found.extend(asked);
            Ok(found.len() < limit)
        })?;
        Ok(found)
    }

    fn asked_row(&self, row: &Row<'_>) -> Option<Asked> {
        let session = SessionKey::from_bytes(row.get(0).ok()?);
        let asked = StreamId { epoch: narrow(row.get(1).ok()?), number: narrow(row.get(2).ok()?) };
        let deadline: i64 = row.get(3).ok()?;
        let body = self.opened(row, 5, Purpose::Question, &stream_key(session, asked))?;
        let (on, question) = Question::decode(asked, body)?;
        let answered_at = row.get::<_, Option<i64>>(4).ok()?.and_then(time);
        (time_column(question.deadline) == deadline).then_some(Asked { session, on, question, answered_at })
    }

    /// See [`Journal::answered`](super::Journal::answered).
    pub(super) fn answered(&self, session: SessionKey, asked: StreamId, now: Timestamp) -> rusqlite::Result<Answered> {
        let key = params![session.as_bytes(), wide(asked.epoch), wide(asked.number), time_column(now)];
        if self.execute(ANSWER, key)? > 0 {
            return Ok(Answered::First);
        }
        let key = params![session.as_bytes(), wide(asked.epoch), wide(asked.number)];
        let known = self.first(IS_KNOWN, key, |_| Ok(()))?;
        Ok(if known.is_some() { Answered::Again } else { Answered::Unasked })
    }

    /// The numbers of the keys that some row is sealed with.
    pub(super) fn keys_in_use(&self) -> rusqlite::Result<BTreeSet<u32>> {
        let mut ids = BTreeSet::new();
        self.each(KEYS_IN_USE, [], |row| {
            // A number that is none belongs to no key, and so keeps none.
            ids.extend(row.get::<_, u32>(0).ok());
            Ok(true)
        })?;
        Ok(ids)
    }
}

pub(super) const REPLAY: &str = "SELECT e.sequence, e.ending, e.weight, e.at, e.key_id, e.sealed
    FROM sessions n JOIN streams s ON s.session = n.id JOIN events e ON e.stream = s.id
    WHERE n.session = ?1 AND s.epoch = ?2 AND s.number = ?3 AND e.sequence > ?4 ORDER BY e.sequence";
pub(super) const OPEN: &str = "SELECT n.session, q.epoch, q.number, q.deadline, q.answered_at, q.key_id, q.sealed
    FROM questions q JOIN sessions n ON n.id = q.session
    WHERE q.answered_at IS NULL AND q.deadline <= ?1 ORDER BY q.deadline";
const OF_SESSION: &str = "SELECT n.session, q.epoch, q.number, q.deadline, q.answered_at, q.key_id, q.sealed
    FROM sessions n JOIN questions q ON q.session = n.id
    WHERE n.session = ?1 ORDER BY q.deadline DESC";
pub(super) const ANSWER: &str = "UPDATE questions SET answered_at = ?4
    WHERE session = (SELECT id FROM sessions WHERE session = ?1) AND epoch = ?2 AND number = ?3
    AND answered_at IS NULL";
const IS_KNOWN: &str = "SELECT 1 FROM questions
    WHERE session = (SELECT id FROM sessions WHERE session = ?1) AND epoch = ?2 AND number = ?3";
const KEYS_IN_USE: &str = "SELECT key_id FROM events UNION SELECT key_id FROM calls UNION SELECT key_id FROM questions
    UNION SELECT source_key_id FROM streams WHERE source_key_id IS NOT NULL";
/// How much one replay reads before other readers get their turn: 4 MiB, and one message more.
const REPLAY_BYTES_MAX: usize = 4 << 20;
