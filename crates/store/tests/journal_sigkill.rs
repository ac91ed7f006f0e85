//! What the journal confirmed survives `kill -9` of the process that wrote it, and nothing of it is torn.
//!
//! The program starts itself as a worker, which says on its standard output what was confirmed; kills it in the middle; and
//! looks at the journal. Round after round, on one journal: each worker takes up the streams of the one before it.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test without the harness that makes it look like one")]

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write as _};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;

use bytes::Bytes;
use mainstay_core::call::StreamId;
use mainstay_core::id::{Epoch, ServerName, SessionKey};
use mainstay_core::time::Timestamp;
use mainstay_store::Place;
use mainstay_store::journal::{
    Accepted, Answer, Answered, Call, Content, Entry, Event, Journal, Lost, Question, Source, Weight, Witness,
};
use mainstay_store::keys::Keyring;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    if let [_, word, home, round] = arguments.as_slice()
        && word == WORKER
    {
        runtime.block_on(work(Path::new(home), round.parse().unwrap()));
        return ExitCode::FAILURE;
    }
    let home = tempfile::tempdir().unwrap();
    let mut confirmed = Confirmed::default();
    for round in 1..=ROUNDS {
        kill_in_the_middle(home.path(), round, &mut confirmed);
        runtime.block_on(check(home.path(), round, &confirmed));
    }
    ExitCode::SUCCESS
}

/// What workers said over all rounds.
#[derive(Default)]
struct Confirmed {
    /// How far each stream is durable.
    through: BTreeMap<u64, u64>,
    /// Which questions were answered.
    answered: BTreeSet<u64>,
}

/// Starts a worker, reads what it says, kills it after a while, and reads what else it had said.
fn kill_in_the_middle(home: &Path, round: u64, confirmed: &mut Confirmed) {
    let mut worker = Command::new(std::env::current_exe().unwrap())
        .args([WORKER, home.to_str().unwrap(), &round.to_string()])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let patience = 20 + round * 97 % 400;
    let mut lines = BufReader::new(worker.stdout.take().unwrap()).lines();
    let mut heard = 0;
    for count in 0.. {
        if count == patience {
            worker.kill().unwrap();
        }
        let Some(line) = lines.next() else { break };
        // The kill may have cut the last line short.
        let line = line.unwrap();
        let Some((word, rest)) = line.strip_suffix('.').and_then(|line| line.split_once(' ')) else { continue };
        heard += 1;
        match word {
            "durable" => {
                let (stream, through) = rest.split_once(' ').unwrap();
                let last = confirmed.through.entry(stream.parse().unwrap()).or_default();
                *last = (*last).max(through.parse().unwrap());
            }
            "answered" => assert!(confirmed.answered.insert(rest.parse().unwrap()), "R6: {rest} is answered once"),
            other => panic!("{other} {rest}"),
        }
    }
    assert_eq!(worker.wait().unwrap().signal(), Some(9), "it was killed, and had not failed before");
    assert!(heard > 10, "it had come somewhere: {heard}");
}

/// The next life finds everything that was confirmed, each event whole and in its place.
async fn check(home: &Path, round: u64, confirmed: &Confirmed) {
    let journal = open(home);
    assert_eq!(journal.counters().set_aside, 0, "a death damages nothing");
    for (&number, &through) in &confirmed.through {
        let record = journal.find(session(), stream(number)).await.unwrap().unwrap();
        assert_eq!(record.call, Some(call()));
        assert!(record.last_sequence >= through, "stream {number}: {record:?}, {through} was confirmed");
        assert_eq!(record.source, Some(Source::Frame(record.last_sequence)));
        assert!(record.claim.counter <= round);
        let events = events_of(&journal, number).await;
        let expected: Vec<_> = (1..=record.last_sequence).map(|sequence| event(number, sequence)).collect();
        assert!(events == expected, "stream {number}: what is kept is not what was appended");
    }
    for &number in &confirmed.answered {
        let answered = journal.answered(session(), stream(number), answer(9)).await.unwrap();
        assert_eq!(answered, Answered::Again, "question {number}");
    }
    assert_eq!(journal.counters().rows_refused, 0);
    let connection = rusqlite::Connection::open(file(home)).unwrap();
    let verdict: String = connection.query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
    assert_eq!(verdict, "ok");
}

fn answer(seconds: u64) -> Answer {
    Answer { message: Bytes::from_static(b"{}"), by: 1, at: at(seconds) }
}

async fn events_of(journal: &Journal, number: u64) -> Vec<Event> {
    let mut events: Vec<Event> = Vec::new();
    loop {
        let after = events.last().map_or(0, |event| event.sequence);
        let part = journal.replay(session(), stream(number), after, 1000).await.unwrap();
        if part.is_empty() {
            return events;
        }
        events.extend(part);
    }
}

/// The worker: streams that go on, questions that are answered, and sessions that come and go, as fast as can be.
async fn work(home: &Path, round: u64) {
    let journal = open(home);
    let mut tasks = tokio::task::JoinSet::new();
    for number in 1..=STREAMS {
        tasks.spawn(go_on(journal.clone(), round, number));
    }
    tasks.spawn(ask_and_answer(journal.clone(), round));
    tasks.spawn(come_and_go(journal, round));
    tasks.join_all().await;
}

/// Says what becomes durable of one stream.
struct Teller(u64);

impl Witness for Teller {
    fn durable(&self, through: u64) {
        say(&format!("durable {} {through}", self.0));
    }

    fn lost(&self, sequence: u64, why: Lost) {
        say(&format!("lost {} {sequence}: {why}", self.0));
    }
}

async fn go_on(journal: Journal, round: u64, number: u64) {
    let claim = Epoch { counter: round, nonce: round };
    let entry = |content| Entry { session: session(), stream: stream(number), claim, at: at(0), content };
    let known = journal.claim(session(), stream(number), claim, at(0)).await.unwrap();
    let teller: Arc<dyn Witness> = Arc::new(Teller(number));
    if known.as_ref().is_none_or(|record| record.call.is_none()) {
        journal.append(entry(Content::Call(call())), None).unwrap();
    }
    let first = known.map_or(0, |record| record.last_sequence) + 1;
    for sequence in first..first + EVENTS_MAX {
        let event = entry(Content::Event(event(number, sequence)));
        assert_eq!(journal.append(event, Some(Arc::clone(&teller))), Ok(Accepted::Queued));
        if sequence.is_multiple_of(number) {
            journal.flush().await.unwrap();
        }
    }
}

async fn ask_and_answer(journal: Journal, round: u64) {
    let claim = Epoch { counter: round, nonce: round };
    for number in round * EVENTS_MAX..(round + 1) * EVENTS_MAX {
        let original = Bytes::from(number.to_string());
        let question = Question { asked: stream(number), original, asked_at: at(0), deadline: at(60) };
        let content = Content::Question(Box::new(question), event(STREAMS + round, number + 1));
        let entry = Entry { session: session(), stream: stream(STREAMS + round), claim, at: at(0), content };
        journal.append(entry, None).unwrap();
        assert_eq!(journal.answered(session(), stream(number), answer(1)).await.unwrap(), Answered::First);
        say(&format!("answered {number}"));
    }
}

/// Another session, so that the kill may fall into the middle of forgetting and trimming, too.
async fn come_and_go(journal: Journal, round: u64) {
    let claim = Epoch { counter: round, nonce: round };
    let other = SessionKey::from_bytes([9; 32]);
    for number in 0..EVENTS_MAX {
        for sequence in 1..=20 {
            let content = Content::Event(event(number, sequence));
            let id = StreamId { epoch: round, number };
            let entry = Entry { session: other, stream: id, claim, at: at(0), content };
            journal.append(entry, None).unwrap();
        }
        if number.is_multiple_of(5) {
            journal.forget(other).await.unwrap();
        } else {
            journal.trim(at(2)).await.unwrap();
        }
    }
}

/// One line in one write: it comes whole, or not at all.
fn say(line: &str) {
    let _ = std::io::stdout().lock().write_all(format!("{line}.\n").as_bytes());
}

fn open(home: &Path) -> Journal {
    let ring = Keyring::load_or_create(&home.join("keys"), &mut |bytes| bytes.fill(7)).unwrap();
    Journal::open(Place::Sqlite(file(home)), Arc::new(ring)).unwrap()
}

fn file(home: &Path) -> PathBuf {
    home.join("streams.db")
}

fn at(seconds: u64) -> Timestamp {
    Timestamp::from_unix_millis(1_700_000_000_000 + seconds * 1000)
}

fn session() -> SessionKey {
    SessionKey::from_bytes([1; 32])
}

fn stream(number: u64) -> StreamId {
    StreamId { epoch: 1, number }
}

fn call() -> Call {
    Call {
        server: ServerName::parse("files").unwrap(),
        method: "tools/call".into(),
        name: None,
        request: Bytes::from_static(b"1"),
        started_at: at(0),
    }
}

/// An event that is known by its content, some of them larger than a page. Essential: retention leaves it alone.
fn event(number: u64, sequence: u64) -> Event {
    let length = usize::try_from(sequence * 37 % 50 * 40 + sequence.is_multiple_of(50) as u64 * 9000).unwrap();
    let message = format!("{number}/{sequence} {}", "x".repeat(length));
    Event {
        sequence,
        ending: None,
        weight: Weight::Essential,
        message: message.into(),
        source: Some(Source::Frame(sequence)),
        at: at(1),
    }
}

const WORKER: &str = "work-until-killed";
const ROUNDS: u64 = 12;
const STREAMS: u64 = 8;
const EVENTS_MAX: u64 = 100_000;
