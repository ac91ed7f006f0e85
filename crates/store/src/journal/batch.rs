//! Entries of many streams in one transaction.

use std::collections::BTreeMap;

use mainstay_core::call::StreamId;
use mainstay_core::id::SessionKey;
use mainstay_core::time::Timestamp;
use rusqlite::params;

use super::body::{event_key, stream_key};
use super::call::{Call, Ending};
use super::database::Database;
use super::entry::{Content, Entry, Lost};
use super::event::{Event, Source};
use super::question::Question;
use super::streams::{Standing, wide};
use crate::keys::Purpose;
use crate::rows::{column, time_column};

/// What becomes of each entry.
pub(super) type Outcomes = Vec<Result<(), Lost>>;

/// Keeps `entries`, each as far as its stream allows. An error means that nothing of them was kept.
pub(super) fn keep<'a>(database: &Database, entries: impl Iterator<Item = &'a Entry>) -> rusqlite::Result<Outcomes> {
    let mut batch = Batch { database, streams: BTreeMap::new(), sessions: BTreeMap::new() };
    let mut outcomes = Vec::new();
    for entry in entries {
        outcomes.push(batch.entry(entry)?);
    }
    batch.conclude()?;
    Ok(outcomes)
}

struct Batch<'a> {
    database: &'a Database,
    streams: BTreeMap<(SessionKey, StreamId), Changed<'a>>,
    /// What is added to each session, by its row.
    sessions: BTreeMap<i64, Added>,
}

/// A stream that a batch changes.
struct Changed<'a> {
    standing: Standing,
    source: Option<&'a Source>,
    added: Added,
    changed_at: Timestamp,
    dirty: bool,
}

#[derive(Clone, Copy, Default)]
struct Added {
    events: u64,
    bytes: u64,
}

impl<'a> Changed<'a> {
    /// Keeps an event, if it has a place.
    fn put_event(
        &mut self,
        database: &Database,
        place: Place,
        event: &'a Event,
        session: &mut Added,
    ) -> rusqlite::Result<Result<(), Lost>> {
        if let Err(lost) = fits(&self.standing, event, session.bytes) {
            return Ok(Err(lost));
        }
        let bytes = database.put_event(place, self.standing.row, event)?;
        (self.standing.last_sequence, self.standing.ending) = (event.sequence, event.ending);
        self.source = event.source.as_ref().or(self.source);
        for added in [&mut self.added, session] {
            added.events += 1;
            added.bytes += bytes;
        }
        Ok(Ok(()))
    }
}

impl<'a> Batch<'a> {
    fn entry(&mut self, entry: &'a Entry) -> rusqlite::Result<Result<(), Lost>> {
        if !self.look_up(entry)? {
            // What is noted of a stream that is gone needs no row of its own.
            return Ok(Ok(()));
        }
        let place = (entry.session, entry.stream);
        let Some(changed) = self.streams.get_mut(&place) else { return Ok(Err(Lost::Unavailable)) };
        if changed.standing.claim != entry.claim {
            return Ok(Err(Lost::Claimed));
        }
        let database = self.database;
        let standing = &mut changed.standing;
        match &entry.content {
            Content::Call(call) => database.put_call(place, standing.row, call)?,
            Content::Reached(source) => changed.source = Some(source),
            Content::Delivered(through) => {
                standing.delivered = standing.delivered.max(*through).min(standing.last_sequence);
            }
            Content::Ended(ending) => standing.ending = standing.ending.or(Some(*ending)),
            Content::Event(event) => {
                let session = self.sessions.entry(standing.session_row).or_default();
                if let Err(lost) = changed.put_event(database, place, event, session)? {
                    return Ok(Err(lost));
                }
            }
            Content::Question(question, event) => {
                let session = self.sessions.entry(standing.session_row).or_default();
                let session_row = standing.session_row;
                if let Err(lost) = changed.put_event(database, place, event, session)? {
                    return Ok(Err(lost));
                }
                database.put_question(place, session_row, question)?;
            }
        }
        changed.changed_at = changed.changed_at.max(entry.at);
        changed.dirty = true;
        Ok(Ok(()))
    }

    /// Whether the stream of `entry` has a row; one that begins with it gets one.
    fn look_up(&mut self, entry: &Entry) -> rusqlite::Result<bool> {
        let place = (entry.session, entry.stream);
        if self.streams.contains_key(&place) {
            return Ok(true);
        }
        let begins = match entry.content {
            Content::Call(_) | Content::Event(_) | Content::Question(..) => true,
            Content::Reached(_) | Content::Delivered(_) | Content::Ended(_) => false,
        };
        let standing = match self.database.standing(entry.session, entry.stream)? {
            Some(standing) => standing,
            None if begins => self.database.add_stream(entry.session, entry.stream, entry.claim, entry.at)?,
            None => return Ok(false),
        };
        let changed = Changed { standing, source: None, added: Added::default(), changed_at: entry.at, dirty: false };
        self.streams.insert(place, changed);
        Ok(true)
    }

    /// Writes the rows of the streams and sessions that changed.
    fn conclude(self) -> rusqlite::Result<()> {
        for (place, changed) in self.streams.into_iter().filter(|(_, changed)| changed.dirty) {
            self.database.put_standing(place, &changed)?;
        }
        for (row, added) in self.sessions.into_iter().filter(|(_, added)| added.events > 0) {
            self.database.execute(CHARGE, params![row, column(added.events), column(added.bytes)])?;
        }
        Ok(())
    }
}

/// Whether `event` has a place in the stream, and its session has room.
fn fits(standing: &Standing, event: &Event, added_bytes: u64) -> Result<(), Lost> {
    let rises = event.sequence > standing.last_sequence && event.sequence <= SEQUENCE_MAX;
    if !rises || standing.ending.is_some() {
        return Err(Lost::Misplaced);
    }
    let bytes = standing.session_bytes.saturating_add(added_bytes).saturating_add(event.message.len() as u64);
    if bytes > SESSION_BYTES_ACCEPTED_MAX { Err(Lost::Overdrawn) } else { Ok(()) }
}

type Place = (SessionKey, StreamId);

impl Database {
    fn put_call(&self, (session, stream): Place, row: i64, call: &Call) -> rusqlite::Result<()> {
        let sealed = self.ring.current().seal(Purpose::Call, &stream_key(session, stream), &call.encode());
        self.execute(PUT_CALL, params![row, sealed.key_id, sealed.bytes]).map(|_| ())
    }

    /// How many bytes it takes.
    fn put_event(&self, (session, stream): Place, row: i64, event: &Event) -> rusqlite::Result<u64> {
        let key = event_key(session, stream, event.sequence);
        let (head, message) = event.parts();
        let sealed = self.ring.current().seal_joined(Purpose::Event, &key, &[&head, message]);
        let bytes = sealed.bytes.len() as u64;
        let (ending, weight) = (Ending::number(event.ending), event.weight.number());
        let (sequence, at) = (column(event.sequence), time_column(event.at));
        let values = params![row, sequence, ending, weight, at, column(bytes), sealed.key_id, sealed.bytes];
        self.execute(PUT_EVENT, values)?;
        Ok(bytes)
    }

    fn put_question(&self, (session, on): Place, row: i64, question: &Question) -> rusqlite::Result<()> {
        let key = stream_key(session, question.asked);
        let sealed = self.ring.current().seal(Purpose::Question, &key, &question.encode(on));
        let (epoch, number) = (wide(question.asked.epoch), wide(question.asked.number));
        let values = params![row, epoch, number, time_column(question.deadline), sealed.key_id, sealed.bytes];
        self.execute(PUT_QUESTION, values).map(|_| ())
    }

    fn put_standing(&self, (session, stream): Place, changed: &Changed<'_>) -> rusqlite::Result<()> {
        let Changed { standing, added, .. } = changed;
        let (last, delivered) = (column(standing.last_sequence), column(standing.delivered));
        let (ending, at) = (Ending::number(standing.ending), time_column(changed.changed_at));
        let (events, bytes) = (column(added.events), column(added.bytes));
        self.execute(PUT_STANDING, params![standing.row, last, delivered, ending, events, bytes, at])?;
        let Some(source) = changed.source else { return Ok(()) };
        let sealed = self.ring.current().seal(Purpose::Source, &stream_key(session, stream), &source.encode());
        self.execute(PUT_SOURCE, params![standing.row, sealed.key_id, sealed.bytes]).map(|_| ())
    }
}

const PUT_CALL: &str = "INSERT INTO calls (stream, key_id, sealed) VALUES (?1, ?2, ?3)
    ON CONFLICT (stream) DO UPDATE SET key_id = excluded.key_id, sealed = excluded.sealed";
const PUT_EVENT: &str = "INSERT INTO events (stream, sequence, ending, weight, at, bytes, key_id, sealed)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)";
/// A question is asked once; what is known of it already stays.
const PUT_QUESTION: &str = "INSERT INTO questions (session, epoch, number, deadline, key_id, sealed)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6) ON CONFLICT (session, epoch, number) DO NOTHING";
const PUT_STANDING: &str = "UPDATE streams SET last_sequence = ?2, delivered = ?3, ending = ?4, events = events + ?5,
        bytes = bytes + ?6, changed_at = max(changed_at, ?7) WHERE id = ?1";
const PUT_SOURCE: &str = "UPDATE streams SET source_key_id = ?2, source = ?3 WHERE id = ?1";
const CHARGE: &str = "UPDATE sessions SET events = events + ?2, bytes = bytes + ?3 WHERE id = ?1";
/// What a session may have in the file before retention has come to it: 64 MiB. Nothing more is accepted above.
const SESSION_BYTES_ACCEPTED_MAX: u64 = 64 << 20;
const SEQUENCE_MAX: u64 = i64::MAX as u64;
