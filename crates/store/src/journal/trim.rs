//! Retention: what is too old or too much goes, in slices that are brief enough for whoever waits to append.
//!
//! By age everything goes. For want of room only what is worth the least: streams that have ended and were delivered, then
//! passing events, then what else was delivered; the oldest first. A response that nobody has taken stays until it is too
//! old; when nothing else is left, new entries are refused instead.

use mainstay_core::id::SessionKey;
use mainstay_core::time::Timestamp;
use rusqlite::{Params, params};

use super::Trimmed;
use super::counters::add;
use super::database::Database;
use super::place::FILE_BYTES_MAX;
use crate::rows::{column, time_column};

/// What is looked for, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Streams that did not change for too long.
    AgedStreams,
    /// Events that are too old, of streams that go on.
    AgedEvents,
    /// Questions that were answered, or overdue, long ago.
    Questions,
    /// Sessions that have too much.
    Sessions,
    /// Everything, if the file has too much.
    File,
}

impl Phase {
    pub(super) const ALL: [Self; 5] =
        [Self::AgedStreams, Self::AgedEvents, Self::Questions, Self::Sessions, Self::File];
}

/// What one slice did.
pub(super) struct Slice {
    pub(super) trimmed: Trimmed,
    /// Where the phase goes on; none if it is through.
    pub(super) next: Option<i64>,
}

/// How much a slice may still remove.
struct Budget {
    events: u64,
    bytes: u64,
    streams: u64,
    done: Trimmed,
}

impl Budget {
    fn new() -> Self {
        Self { events: SLICE_EVENTS_MAX, bytes: SLICE_BYTES_MAX, streams: SLICE_STREAMS_MAX, done: Trimmed::default() }
    }

    fn is_spent(&self) -> bool {
        self.events == 0 || self.bytes == 0 || self.streams == 0
    }

    fn did_something(&self) -> bool {
        self.done != Trimmed::default()
    }
}

/// What is still to go; as much as there is, if that is `u64::MAX`.
#[derive(Clone, Copy)]
struct Excess {
    events: u64,
    bytes: u64,
}

impl Excess {
    const EVERYTHING: Self = Self { events: u64::MAX, bytes: u64::MAX };

    fn is_gone(self) -> bool {
        self.events == 0 && self.bytes == 0
    }
}

struct Victim {
    id: i64,
    stream: i64,
    bytes: u64,
}

impl Database {
    /// One slice of `phase`, from `after` on.
    pub(super) fn trim_slice(&self, phase: Phase, after: i64, now: Timestamp) -> rusqlite::Result<Slice> {
        let mut budget = Budget::new();
        let cutoff = time_column(now.minus(AGE_MAX));
        let next = match phase {
            Phase::AgedStreams => {
                self.remove_streams(AGED_STREAMS, [cutoff], Excess::EVERYTHING, &mut budget)?;
                budget.did_something().then_some(0)
            }
            Phase::AgedEvents => {
                self.remove_events(AGED_EVENTS, [cutoff], Excess::EVERYTHING, &mut budget)?;
                budget.did_something().then_some(0)
            }
            Phase::Questions => {
                self.remove_questions(now, &mut budget)?;
                budget.did_something().then_some(0)
            }
            Phase::Sessions => self.trim_session(after, &mut budget)?,
            Phase::File => {
                let excess = self.file_bytes()?.saturating_sub(FILE_BYTES_WANTED);
                self.trim_file(excess, &mut budget)?;
                (excess > 0 && budget.did_something()).then_some(0)
            }
        };
        add(&self.meters.events_trimmed, budget.done.events);
        Ok(Slice { trimmed: budget.done, next })
    }

    /// The next session after the row `after` that has too much.
    fn trim_session(&self, after: i64, budget: &mut Budget) -> rusqlite::Result<Option<i64>> {
        let over = self.first(OVER, [after], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?;
        let Some((session, events, bytes)) = over else { return Ok(None) };
        let (session, events, bytes): (i64, i64, i64) = (session, events, bytes);
        let above = |amount: i64, bound: u64| u64::try_from(amount).unwrap_or(0).saturating_sub(bound);
        let excess = Excess { events: above(events, SESSION_EVENTS_MAX), bytes: above(bytes, SESSION_BYTES_MAX) };
        let excess = self.remove_streams(DONE_OF_SESSION, [session], excess, budget)?;
        let excess = self.remove_events(PASSING_OF_SESSION, [session], excess, budget)?;
        let excess = self.remove_events(DELIVERED_OF_SESSION, [session], excess, budget)?;
        // The same once more, if only the slice was too small for it.
        let again = !excess.is_gone() && budget.did_something();
        Ok(Some(if again { after } else { session }))
    }

    /// Removes what is worth the least, whosever it is, until `bytes` are gone.
    pub(super) fn make_room(&self) -> rusqlite::Result<bool> {
        let mut budget = Budget::new();
        self.trim_file(SLICE_BYTES_MAX, &mut budget)?;
        add(&self.meters.events_trimmed, budget.done.events);
        Ok(budget.did_something())
    }

    fn trim_file(&self, bytes: u64, budget: &mut Budget) -> rusqlite::Result<()> {
        let excess = self.remove_streams(DONE, [], Excess { events: 0, bytes }, budget)?;
        self.remove_events(PASSING, [], excess, budget)?;
        Ok(())
    }

    /// How much of the file is in use.
    pub(super) fn file_bytes(&self) -> rusqlite::Result<u64> {
        let pages = |name| self.connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
        let used = (pages("page_count")? - pages("freelist_count")?) * pages("page_size")?;
        Ok(u64::try_from(used).unwrap_or(0))
    }

    /// Removes the streams that `sql` gives, with everything of them. What is in excess still.
    fn remove_streams(
        &self,
        sql: &str,
        params: impl Params,
        mut excess: Excess,
        budget: &mut Budget,
    ) -> rusqlite::Result<Excess> {
        if excess.is_gone() {
            return Ok(excess);
        }
        let mut rows: Vec<i64> = Vec::new();
        self.each(sql, params, |row| {
            rows.push(row.get(0)?);
            Ok((rows.len() as u64) < SLICE_STREAMS_MAX)
        })?;
        for row in rows {
            if budget.is_spent() || excess.is_gone() {
                break;
            }
            // A stream goes whole, whatever it takes: half of one is of no use to anybody.
            let left = self.remove_events(OF_STREAM, [row], Excess::EVERYTHING, budget)?;
            excess.events = excess.events.saturating_sub(u64::MAX - left.events);
            excess.bytes = excess.bytes.saturating_sub(u64::MAX - left.bytes);
            if self.first(HAS_EVENTS, [row], |_| Ok(()))?.is_none() {
                self.remove_stream_row(row)?;
                budget.done.streams += 1;
                budget.streams -= 1;
            }
        }
        Ok(excess)
    }

    fn remove_stream_row(&self, row: i64) -> rusqlite::Result<()> {
        self.execute(REMOVE_CALL, [row])?;
        let session: Option<i64> = self.first(REMOVE_STREAM, [row], |row| row.get(0))?;
        session.map_or(Ok(()), |session| self.remove_empty_session(session))
    }

    fn remove_empty_session(&self, row: i64) -> rusqlite::Result<()> {
        self.execute(REMOVE_SESSION, [row]).map(|_| ())
    }

    /// Removes the events that `sql` gives. What is in excess still.
    fn remove_events(
        &self,
        sql: &str,
        params: impl Params,
        mut excess: Excess,
        budget: &mut Budget,
    ) -> rusqlite::Result<Excess> {
        let mut victims: Vec<Victim> = Vec::new();
        if excess.is_gone() || budget.is_spent() {
            return Ok(excess);
        }
        self.each(sql, params, |row| {
            let bytes = u64::try_from(row.get::<_, i64>(2)?).unwrap_or(0);
            victims.push(Victim { id: row.get(0)?, stream: row.get(1)?, bytes });
            budget.events -= 1;
            budget.bytes = budget.bytes.saturating_sub(bytes);
            excess.events = excess.events.saturating_sub(1);
            excess.bytes = excess.bytes.saturating_sub(bytes);
            Ok(!budget.is_spent() && !excess.is_gone())
        })?;
        for victim in &victims {
            self.execute(REMOVE_EVENT, [victim.id])?;
            let bytes = column(victim.bytes);
            self.execute(DISCHARGE_STREAM, [victim.stream, bytes])?;
            self.execute(DISCHARGE_SESSION, [victim.stream, bytes])?;
        }
        budget.done.events += victims.len() as u64;
        Ok(excess)
    }

    fn remove_questions(&self, now: Timestamp, budget: &mut Budget) -> rusqlite::Result<()> {
        let (answered, overdue) = (now.minus(ANSWERED_KEPT), now.minus(AGE_MAX));
        for (sql, before) in [(ANSWERED_QUESTIONS, answered), (OVERDUE_QUESTIONS, overdue)] {
            self.remove_questions_of(sql, params![time_column(before), column(SLICE_EVENTS_MAX)], budget)?;
        }
        Ok(())
    }

    fn remove_questions_of(&self, sql: &str, params: impl Params, budget: &mut Budget) -> rusqlite::Result<()> {
        let mut found: Vec<(i64, i64)> = Vec::new();
        self.each(sql, params, |row| {
            found.push((row.get(0)?, row.get(1)?));
            Ok(true)
        })?;
        for (question, session) in &found {
            self.execute(REMOVE_QUESTION, [question])?;
            self.remove_empty_session(*session)?;
        }
        budget.done.questions += found.len() as u64;
        Ok(())
    }

    /// Removes a slice of everything of `session`. Whether there is more.
    pub(super) fn forget_slice(&self, session: SessionKey) -> rusqlite::Result<bool> {
        let Some(row) = self.first(SESSION_ROW, [session.as_bytes()], |row| row.get::<_, i64>(0))? else {
            return Ok(false);
        };
        let mut budget = Budget::new();
        self.remove_questions_of(QUESTIONS_OF_SESSION, params![row, column(SLICE_EVENTS_MAX)], &mut budget)?;
        self.remove_streams(OF_SESSION, [row], Excess::EVERYTHING, &mut budget)?;
        self.remove_empty_session(row)?;
        Ok(self.first(SESSION_ROW, [session.as_bytes()], |_| Ok(()))?.is_some())
    }
}

pub(super) const AGED_STREAMS: &str = "SELECT id FROM streams WHERE changed_at < ?1 ORDER BY changed_at";
/// Events are kept in the order of their time, unless the clock was set: those that are too old are among the first.
const AGED_EVENTS: &str = "SELECT e.id, e.stream, e.bytes FROM (SELECT id, stream, bytes, at FROM events ORDER BY id
    LIMIT 256) e WHERE e.at < ?1 ORDER BY e.id";
pub(super) const OVER: &str =
    "SELECT id, events, bytes FROM sessions WHERE (events > 1024 OR bytes > 8388608) AND id > ?1
    ORDER BY id LIMIT 1";
const DONE_OF_SESSION: &str = "SELECT id FROM streams WHERE session = ?1 AND ending > 0 AND delivered >= last_sequence
    ORDER BY changed_at, id";
const PASSING_OF_SESSION: &str = "SELECT e.id, e.stream, e.bytes FROM streams s JOIN events e ON e.stream = s.id
    WHERE s.session = ?1 AND e.weight = 0 ORDER BY e.id";
const DELIVERED_OF_SESSION: &str = "SELECT e.id, e.stream, e.bytes FROM streams s JOIN events e ON e.stream = s.id
    WHERE s.session = ?1 AND e.sequence <= s.delivered ORDER BY e.id";
pub(super) const DONE: &str =
    "SELECT id FROM streams WHERE ending > 0 AND delivered >= last_sequence ORDER BY changed_at";
pub(super) const PASSING: &str = "SELECT id, stream, bytes FROM events WHERE weight = 0 ORDER BY id";
const OF_STREAM: &str = "SELECT id, stream, bytes FROM events WHERE stream = ?1 ORDER BY sequence";
const OF_SESSION: &str = "SELECT id FROM streams WHERE session = ?1 ORDER BY id";
const HAS_EVENTS: &str = "SELECT 1 FROM events WHERE stream = ?1 LIMIT 1";
const REMOVE_EVENT: &str = "DELETE FROM events WHERE id = ?1";
const DISCHARGE_STREAM: &str = "UPDATE streams SET events = events - 1, bytes = bytes - ?2 WHERE id = ?1";
const DISCHARGE_SESSION: &str = "UPDATE sessions SET events = events - 1, bytes = bytes - ?2
    WHERE id = (SELECT session FROM streams WHERE id = ?1)";
const REMOVE_CALL: &str = "DELETE FROM calls WHERE stream = ?1";
const REMOVE_STREAM: &str = "DELETE FROM streams WHERE id = ?1 RETURNING session";
const REMOVE_SESSION: &str = "DELETE FROM sessions WHERE id = ?1
    AND NOT EXISTS (SELECT 1 FROM streams WHERE streams.session = ?1)
    AND NOT EXISTS (SELECT 1 FROM questions WHERE questions.session = ?1)";
const SESSION_ROW: &str = "SELECT id FROM sessions WHERE session = ?1";
pub(super) const ANSWERED_QUESTIONS: &str =
    "SELECT id, session FROM questions WHERE answered_at < ?1 ORDER BY answered_at LIMIT ?2";
pub(super) const OVERDUE_QUESTIONS: &str =
    "SELECT id, session FROM questions WHERE deadline < ?1 ORDER BY deadline LIMIT ?2";
const QUESTIONS_OF_SESSION: &str = "SELECT id, session FROM questions WHERE session = ?1 LIMIT ?2";
const REMOVE_QUESTION: &str = "DELETE FROM questions WHERE id = ?1";

/// How old something may grow: as long as an answer waits for a machine that sleeps over night, and as a call may take.
pub(super) const AGE_MAX: std::time::Duration = std::time::Duration::from_hours(24);
/// How long an answer given twice is known as such.
const ANSWERED_KEPT: std::time::Duration = std::time::Duration::from_hours(1);
/// Events of one session. It stands in the schema, too.
pub(super) const SESSION_EVENTS_MAX: u64 = 1024;
/// Bytes of events of one session: 8 MiB. They stand in the schema, too.
pub(super) const SESSION_BYTES_MAX: u64 = 8 << 20;
/// Above this the file is trimmed, so that it hardly ever reaches its bound.
pub(super) const FILE_BYTES_WANTED: u64 = FILE_BYTES_MAX / 8 * 7;
/// What one transaction removes at most, before whoever waits to append gets its turn; 8 MiB, and one message more.
const SLICE_BYTES_MAX: u64 = 8 << 20;
const SLICE_EVENTS_MAX: u64 = 256;
const SLICE_STREAMS_MAX: u64 = 64;
