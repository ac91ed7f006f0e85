//! What is read of events.

use std::collections::BTreeSet;

use mainstay_core::call::StreamId;
use mainstay_core::id::SessionKey;
use mainstay_core::time::Timestamp;
use rusqlite::{Row, params};

use super::body::event_key;
use super::call::Ending;
use super::database::Database;
use super::event::{Event, Source};
use super::streams::{narrow, wide};
use crate::keys::Purpose;
use crate::rows::{column, time_column};

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

    /// See [`Journal::child_events`](super::Journal::child_events).
    pub(super) fn child_events(
        &self,
        session: SessionKey,
        since: Timestamp,
        limit: usize,
    ) -> rusqlite::Result<Vec<Event>> {
        let mut found: Vec<Event> = Vec::new();
        if limit == 0 {
            return Ok(found);
        }
        self.each(NEWEST, params![session.as_bytes(), time_column(since)], |row| {
            let stream = StreamId { epoch: narrow(row.get(6)?), number: narrow(row.get(7)?) };
            let event = self.event(session, stream, row)?;
            found.extend(event.filter(|event| matches!(event.source, Some(Source::Frame(_)))));
            Ok(found.len() < limit)
        })?;
        Ok(found)
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
pub(super) const NEWEST: &str = "SELECT e.sequence, e.ending, e.weight, e.at, e.key_id, e.sealed, s.epoch, s.number
    FROM sessions n JOIN streams s ON s.session = n.id JOIN events e ON e.stream = s.id
    WHERE n.session = ?1 AND e.at >= ?2 ORDER BY s.epoch DESC, s.number DESC, e.sequence DESC";
const KEYS_IN_USE: &str = "SELECT key_id FROM events UNION SELECT key_id FROM calls UNION SELECT key_id FROM questions
    UNION SELECT source_key_id FROM streams WHERE source_key_id IS NOT NULL
    UNION SELECT answer_key_id FROM questions WHERE answer_key_id IS NOT NULL";
/// How much one replay reads before other readers get their turn: 4 MiB, and one message more.
const REPLAY_BYTES_MAX: usize = 4 << 20;
