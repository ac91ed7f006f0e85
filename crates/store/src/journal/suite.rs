//! What every journal must do: one suite, run in memory and on a file.

mod damage;
mod faults;
mod plans;
mod questions;
mod retention;
mod streams;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use mainstay_core::call::StreamId;
use mainstay_core::id::{Epoch, ServerName, SessionKey};
use mainstay_core::time::Timestamp;
use rusqlite::Connection;

use super::writer::Writer;
use super::{Accepted, Answer, Call, Content, Ending, Entry, Event, Journal, Lost, Question, Source, Weight, Witness};
use crate::Place;
use crate::keys::Keyring;

pub(super) fn at(seconds: u64) -> Timestamp {
    Timestamp::from_unix_millis(1_700_000_000_000 + seconds * 1000)
}

/// The stream of that number, of the third epoch.
pub(super) fn stream(number: u64) -> StreamId {
    StreamId { epoch: 3, number }
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn key(number: u32) -> SessionKey {
    let mut bytes = [0; 32];
    bytes[..4].copy_from_slice(&number.to_be_bytes());
    SessionKey::from_bytes(bytes)
}

/// The worker of that epoch.
fn worker(counter: u64) -> Epoch {
    Epoch { counter, nonce: 7 }
}

fn call() -> Call {
    Call {
        server: ServerName::parse("files").unwrap(),
        method: "tools/call".into(),
        name: Some("read".into()),
        request: Bytes::from_static(b"42"),
        started_at: at(0),
    }
}

fn event(sequence: u64) -> Event {
    Event {
        sequence,
        ending: None,
        weight: Weight::Passing,
        message: Bytes::from(format!("message {sequence}")),
        source: Some(Source::Frame(sequence.wrapping_mul(10))),
        at: at(sequence % 1000),
    }
}

/// A response.
fn last(sequence: u64) -> Event {
    Event { ending: Some(Ending::Answered), weight: Weight::Essential, ..event(sequence) }
}

/// A question, and its event: the sequence is the number.
fn asking(number: u64) -> Content {
    Content::Question(Box::new(question(number)), event(number))
}

fn answer(seconds: u64) -> Answer {
    Answer { message: Bytes::from_static(b"{\"result\":1}"), by: 3, at: at(seconds) }
}

fn question(asked: u64) -> Question {
    Question { asked: stream(asked), original: Bytes::from_static(b"\"q\""), asked_at: at(0), deadline: at(asked) }
}

/// An entry of the third worker for stream 1 of session 1.
fn entry(content: Content) -> Entry {
    let at = content.event().map_or(at(0), |event| event.at);
    Entry { session: key(1), stream: stream(1), claim: worker(3), at, content }
}

fn ring() -> Arc<Keyring> {
    Arc::new(Keyring::ephemeral(&mut |bytes| bytes.fill(42)))
}

/// What a witness heard, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Heard {
    Durable(u64),
    Lost(u64, Lost),
}

#[derive(Default)]
struct Notes(Mutex<Vec<Heard>>);

impl Notes {
    fn taken(&self) -> Vec<Heard> {
        self.0.lock().unwrap().clone()
    }
}

impl Witness for Notes {
    fn durable(&self, through: u64) {
        self.0.lock().unwrap().push(Heard::Durable(through));
    }

    fn lost(&self, sequence: u64, why: Lost) {
        self.0.lock().unwrap().push(Heard::Lost(sequence, why));
    }
}

/// Hands `entries` over and waits for what becomes of them: the first loss, if there is one.
async fn put(journal: &Journal, entries: impl IntoIterator<Item = Entry>) -> Result<(), Lost> {
    let notes = Arc::new(Notes::default());
    for entry in entries {
        journal.append(entry, Some(Arc::clone(&notes) as Arc<dyn Witness>))?;
    }
    journal.flush().await.unwrap();
    let lost = notes.taken().into_iter().find_map(|heard| match heard {
        Heard::Durable(_) => None,
        Heard::Lost(_, why) => Some(why),
    });
    lost.map_or(Ok(()), Err)
}

/// The sequences of what is kept of a stream of session 1.
async fn kept(journal: &Journal, number: u64) -> Vec<u64> {
    let mut sequences = Vec::new();
    loop {
        let after = sequences.last().copied().unwrap_or(0);
        let part = journal.replay(key(1), stream(number), after, usize::MAX).await.unwrap();
        if part.is_empty() {
            return sequences;
        }
        sequences.extend(part.iter().map(|event| event.sequence));
    }
}

/// A directory in memory, where the machine has such a place: what is shown is of processes, not of power.
fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// A journal in a file of its own.
fn in_a_file() -> (tempfile::TempDir, PathBuf, Journal) {
    let home = scratch();
    let path = home.path().join("streams.db");
    let journal = open(&path);
    (home, path, journal)
}

fn open(path: &Path) -> Journal {
    Journal::open(Place::Sqlite(path.to_owned()), ring()).unwrap()
}

/// Does something to the writing connection that only a fault, or a look behind, would do.
async fn on_writer<T: Send + 'static>(journal: &Journal, act: impl FnOnce(&Connection) -> T + Send + 'static) -> T {
    journal.act(move |writer: &mut Writer| act(&writer.database.connection)).await.unwrap()
}

async fn tamper(journal: &Journal, sql: &str) {
    let sql = sql.to_owned();
    on_writer(journal, move |connection| connection.execute_batch(&sql).unwrap()).await;
}

async fn number(journal: &Journal, sql: &str) -> i64 {
    let sql = sql.to_owned();
    on_writer(journal, move |connection| connection.query_row(&sql, [], |row| row.get(0)).unwrap()).await
}

/// Sums and counts agree with what is there, and the file is whole.
async fn check_sums(journal: &Journal) {
    let wrong_streams = "SELECT count(*) FROM streams s WHERE
        events <> (SELECT count(*) FROM events e WHERE e.stream = s.id)
        OR bytes <> (SELECT coalesce(sum(length(sealed)), 0) FROM events e WHERE e.stream = s.id)";
    let wrong_sessions = "SELECT count(*) FROM sessions n WHERE
        events <> (SELECT coalesce(sum(events), 0) FROM streams s WHERE s.session = n.id)
        OR bytes <> (SELECT coalesce(sum(bytes), 0) FROM streams s WHERE s.session = n.id)";
    let orphans = "SELECT (SELECT count(*) FROM events WHERE stream NOT IN (SELECT id FROM streams))
        + (SELECT count(*) FROM calls WHERE stream NOT IN (SELECT id FROM streams))
        + (SELECT count(*) FROM streams WHERE session NOT IN (SELECT id FROM sessions))
        + (SELECT count(*) FROM questions WHERE session NOT IN (SELECT id FROM sessions))";
    for sql in [wrong_streams, wrong_sessions, orphans] {
        assert_eq!(number(journal, sql).await, 0, "{sql}");
    }
    let verdict: String =
        on_writer(journal, |connection| connection.query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap())
            .await;
    assert_eq!(verdict, "ok");
}

/// Runs `test` on each kind of journal.
async fn on_each(test: impl AsyncFn(Journal)) {
    test(Journal::open(Place::Memory, ring()).unwrap()).await;
    let (_home, _path, journal) = in_a_file();
    test(journal).await;
}
