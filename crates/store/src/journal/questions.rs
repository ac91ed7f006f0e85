//! The rows of questions: open, answered, and with their answers on the way (R6).

use std::collections::BTreeSet;
use std::ops::Range;

use mainstay_core::call::StreamId;
use mainstay_core::id::SessionKey;
use mainstay_core::time::Timestamp;
use rusqlite::{Row, params};

use super::MESSAGE_BYTES_MAX;
use super::body::stream_key;
use super::database::Database;
use super::question::{Answer, Answered, Asked, Question, Unforwarded};
use super::streams::{narrow, wide};
use crate::keys::Purpose;
use crate::rows::{time, time_column};

impl Database {
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
    pub(super) fn answered(&self, session: SessionKey, asked: StreamId, answer: &Answer) -> rusqlite::Result<Answered> {
        let (epoch, number, at) = (wide(asked.epoch), wide(asked.number), time_column(answer.at));
        let kept = (answer.message.len() <= MESSAGE_BYTES_MAX)
            .then(|| self.ring.current().seal(Purpose::Answer, &stream_key(session, asked), &answer.message));
        let (key_id, sealed) = kept.map(|sealed| (sealed.key_id, sealed.bytes)).unzip();
        let values = params![session.as_bytes(), epoch, number, at, wide(answer.by), key_id, sealed];
        if self.execute(ANSWER, values)? > 0 {
            return Ok(Answered::First);
        }
        let known = self.first(IS_KNOWN, params![session.as_bytes(), epoch, number], |_| Ok(()))?;
        Ok(if known.is_some() { Answered::Again } else { Answered::Unasked })
    }

    /// See [`Journal::forwarded`](super::Journal::forwarded).
    pub(super) fn forwarded(&self, session: SessionKey, asked: StreamId) -> rusqlite::Result<()> {
        let values = params![session.as_bytes(), wide(asked.epoch), wide(asked.number)];
        self.execute(FORWARDED, values).map(|_| ())
    }

    /// See [`Journal::forward`](super::Journal::forward).
    pub(super) fn forward(&self, session: SessionKey, asked: StreamId, by: u64) -> rusqlite::Result<bool> {
        let values = params![session.as_bytes(), wide(asked.epoch), wide(asked.number), wide(by)];
        Ok(self.execute(FORWARD, values)? > 0)
    }

    /// See [`Journal::give_back`](super::Journal::give_back).
    pub(super) fn give_back(&self, session: SessionKey, asked: StreamId, by: u64) -> rusqlite::Result<()> {
        let values = params![session.as_bytes(), wide(asked.epoch), wide(asked.number), wide(by)];
        self.execute(GIVE_BACK, values).map(|_| ())
    }

    /// See [`Journal::unforwarded`](super::Journal::unforwarded).
    pub(super) fn unforwarded(&self, by: Range<u64>, limit: usize) -> rusqlite::Result<Vec<Unforwarded>> {
        let mut found = Vec::new();
        if limit == 0 {
            return Ok(found);
        }
        self.each(UNFORWARDED, [wide(by.start), wide(by.end)], |row| {
            let answer = self.asked_row(row).and_then(|Asked { session, question, .. }| {
                let message = self.opened(row, 7, Purpose::Answer, &stream_key(session, question.asked))?;
                let by = narrow(row.get(9).ok()?);
                Some(Unforwarded { session, question, by, message: message.into() })
            });
            if answer.is_none() {
                self.refused("answer");
            }
            found.extend(answer);
            Ok(found.len() < limit)
        })?;
        Ok(found)
    }

    /// See [`Journal::owed_answers`](super::Journal::owed_answers).
    pub(super) fn owed_answers(&self, session: SessionKey) -> rusqlite::Result<BTreeSet<StreamId>> {
        let mut owed = BTreeSet::new();
        self.each(OWED, [session.as_bytes()], |row| {
            owed.insert(StreamId { epoch: narrow(row.get(0)?), number: narrow(row.get(1)?) });
            Ok(true)
        })?;
        Ok(owed)
    }
}

pub(super) const OPEN: &str = "SELECT n.session, q.epoch, q.number, q.deadline, q.answered_at, q.key_id, q.sealed
    FROM questions q JOIN sessions n ON n.id = q.session
    WHERE q.answered_at IS NULL AND q.deadline <= ?1 ORDER BY q.deadline";
const OF_SESSION: &str = "SELECT n.session, q.epoch, q.number, q.deadline, q.answered_at, q.key_id, q.sealed
    FROM sessions n JOIN questions q ON q.session = n.id
    WHERE n.session = ?1 ORDER BY q.deadline DESC";
pub(super) const UNFORWARDED: &str =
    "SELECT n.session, q.epoch, q.number, q.deadline, q.answered_at, q.key_id, q.sealed, q.answer_key_id, q.answer,
        q.answered_by
    FROM questions q JOIN sessions n ON n.id = q.session
    WHERE q.answer IS NOT NULL AND q.answered_by >= ?1 AND q.answered_by < ?2 ORDER BY q.answered_by";
pub(super) const OWED: &str = "SELECT q.epoch, q.number
    FROM sessions n JOIN questions q ON q.session = n.id WHERE n.session = ?1 AND q.answer IS NOT NULL";
pub(super) const ANSWER: &str =
    "UPDATE questions SET answered_at = ?4, answered_by = ?5, answer_key_id = ?6, answer = ?7
    WHERE session = (SELECT id FROM sessions WHERE session = ?1) AND epoch = ?2 AND number = ?3
    AND answered_at IS NULL";
const FORWARD: &str = "UPDATE questions SET answered_by = ?4
    WHERE session = (SELECT id FROM sessions WHERE session = ?1) AND epoch = ?2 AND number = ?3
    AND answer IS NOT NULL AND answered_by <= ?4";
const GIVE_BACK: &str = "UPDATE questions SET answered_by = 0
    WHERE session = (SELECT id FROM sessions WHERE session = ?1) AND epoch = ?2 AND number = ?3
    AND answer IS NOT NULL AND answered_by = ?4";
const FORWARDED: &str = "UPDATE questions SET answer_key_id = NULL, answer = NULL
    WHERE session = (SELECT id FROM sessions WHERE session = ?1) AND epoch = ?2 AND number = ?3
    AND answer IS NOT NULL";
const IS_KNOWN: &str = "SELECT 1 FROM questions
    WHERE session = (SELECT id FROM sessions WHERE session = ?1) AND epoch = ?2 AND number = ?3";
