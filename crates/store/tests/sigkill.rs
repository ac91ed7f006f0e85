//! What was acknowledged survives `kill -9` of the process that wrote it.
//!
//! The program starts itself as a writer, which says on its standard output what was acknowledged; kills it in the
//! middle; and looks at the ledger. Round after round, on one ledger.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test without the harness that makes it look like one")]

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;

use bytes::Bytes;
use mainstay_core::id::{Epoch, ServerName, SessionKey};
use mainstay_core::principal::Principal;
use mainstay_core::session::{Change, ClientName, Contract, SessionRecord, State, Tombstone};
use mainstay_core::time::Timestamp;
use mainstay_core::wire::method::Version;
use mainstay_store::keys::Keyring;
use mainstay_store::{Place, Store, Stored, Write};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    if let [_, word, home, round] = arguments.as_slice()
        && word == WRITER
    {
        runtime.block_on(write(Path::new(home), round.parse().unwrap()));
        return ExitCode::FAILURE;
    }
    let home = tempfile::tempdir().unwrap();
    let mut acknowledged = BTreeMap::new();
    for round in 0..ROUNDS {
        acknowledged.extend(kill_in_the_middle(home.path(), round));
        runtime.block_on(check(home.path(), round, &acknowledged));
    }
    ExitCode::SUCCESS
}

/// What was acknowledged of a session, the last word wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Word {
    Inserted,
    Touched,
    Drained,
    Ended,
}

/// Starts a writer, reads what it says, kills it after a while, and reads what else it had said.
fn kill_in_the_middle(home: &Path, round: u32) -> BTreeMap<u32, Word> {
    let mut writer = Command::new(std::env::current_exe().unwrap())
        .args([WRITER, home.to_str().unwrap(), &round.to_string()])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut words = BTreeMap::new();
    let patience = 10 + round * 97 % 400;
    let mut lines = BufReader::new(writer.stdout.take().unwrap()).lines();
    for count in 0.. {
        if count == patience {
            writer.kill().unwrap();
        }
        let Some(line) = lines.next() else { break };
        // The kill may have cut the last line short.
        if let Some((number, word)) = parse(&line.unwrap()) {
            let last = words.entry(number).or_insert(word);
            *last = word.max(*last);
        }
    }
    assert!(!writer.wait().unwrap().success(), "it was killed");
    assert!(words.len() > 2, "it had come somewhere: {words:?}");
    words
}

fn parse(line: &str) -> Option<(u32, Word)> {
    let (number, word) = line.strip_suffix('.')?.split_once(' ')?;
    let word = match word {
        "inserted" => Word::Inserted,
        "touched" => Word::Touched,
        "drained" => Word::Drained,
        "ended" => Word::Ended,
        _ => return None,
    };
    Some((number.parse().ok()?, word))
}

/// The next life finds everything that was acknowledged, and each session whole.
async fn check(home: &Path, round: u32, acknowledged: &BTreeMap<u32, Word>) {
    let store = open(home);
    let epoch = store.begin_epoch(at(0), 0).await.unwrap();
    assert_eq!(epoch.counter, u64::from(round + 1) * 2, "one epoch a writer, one a check");
    let mut ended = BTreeSet::new();
    for (&number, &word) in acknowledged {
        let found = match store.find(key(number)).await.unwrap() {
            Stored::Live(row) if *row == draining(number) => Word::Drained,
            Stored::Live(row) if *row == touched(number) => Word::Touched,
            Stored::Live(row) if *row == record(number) => Word::Inserted,
            Stored::Ended(found) if found == stone(number) => Word::Ended,
            found @ (Stored::Live(_) | Stored::Ended(_) | Stored::Unreadable(_) | Stored::Absent) => {
                panic!("session {number} was {word:?}, and is {found:?}")
            }
        };
        assert!(found >= word, "session {number} was {word:?}, and is {found:?}");
        ended.extend((found == Word::Ended).then_some(number));
    }
    for number in ended {
        assert!(store.commit(vec![Write::Session(Change::Insert(record(number)))]).await.is_err(), "S1");
    }
    let connection = rusqlite::Connection::open(ledger(home)).unwrap();
    let verdict: String = connection.query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
    assert_eq!(verdict, "ok");
}

/// The writer: sessions that are opened, used, drained and ended, as fast as can be.
async fn write(home: &Path, round: u32) {
    let store = open(home);
    store.begin_epoch(at(0), 1).await.unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for lane in 0..LANES {
        let store = store.clone();
        tasks.spawn(async move {
            for step in 0..STEPS_MAX {
                let number = (round * LANES + lane) * STEPS_MAX + step;
                live_through(&store, number).await;
            }
        });
    }
    tasks.join_all().await;
}

async fn live_through(store: &Store, number: u32) {
    store.commit(vec![Write::Session(Change::Insert(record(number)))]).await.unwrap();
    say(number, "inserted");
    let row = touched(number);
    store.hint(Write::Session(Change::Touch { key: row.key, seen_at: row.seen_at, deadline: row.deadline }));
    store.flush().await.unwrap();
    say(number, "touched");
    if number.is_multiple_of(3) {
        return;
    }
    store.commit(vec![Write::Session(Change::Update(draining(number)))]).await.unwrap();
    say(number, "drained");
    store.commit(vec![Write::Session(Change::End(stone(number)))]).await.unwrap();
    say(number, "ended");
}

/// One line in one write: it comes whole, or not at all.
fn say(number: u32, word: &str) {
    let _ = std::io::stdout().lock().write_all(format!("{number} {word}.\n").as_bytes());
}

fn open(home: &Path) -> Store {
    let ring = Keyring::load_or_create(&home.join("keys"), &mut |bytes| bytes.fill(7)).unwrap();
    Store::open(Place::Sqlite(ledger(home)), Arc::new(ring)).unwrap()
}

fn ledger(home: &Path) -> PathBuf {
    home.join("ledger.db")
}

fn at(seconds: u64) -> Timestamp {
    Timestamp::from_unix_millis(1_700_000_000_000 + seconds * 1000)
}

fn key(number: u32) -> SessionKey {
    let mut bytes = [0; 32];
    bytes[..4].copy_from_slice(&number.to_be_bytes());
    SessionKey::from_bytes(bytes)
}

fn record(number: u32) -> SessionRecord {
    SessionRecord {
        key: key(number),
        server: ServerName::parse("files").unwrap(),
        principal: Principal::Anonymous,
        state: State::Ready,
        generation: 1,
        epoch: Epoch { counter: 1, nonce: 1 },
        opened_at: at(0),
        seen_at: at(0),
        deadline: at(60),
        version: Version::V2025_11_25,
        client: ClientName::new("client", "1.0"),
        agent: Some("scout".into()),
        initialize_params: Bytes::from_static(b"{}"),
        confirmed: false,
        contract: Contract::from_bytes([3; 32]),
    }
}

fn touched(number: u32) -> SessionRecord {
    SessionRecord { seen_at: at(1), deadline: at(601), confirmed: true, ..record(number) }
}

fn draining(number: u32) -> SessionRecord {
    SessionRecord { generation: 2, state: State::Draining, deadline: at(10), ..touched(number) }
}

fn stone(number: u32) -> Tombstone {
    let record = record(number);
    Tombstone {
        key: record.key,
        server: record.server,
        principal: record.principal,
        client: record.client,
        agent: record.agent,
        state: State::Deleted,
        reason: "drained".into(),
        opened_at: at(0),
        ended_at: at(5),
        keep_until: at(500),
        version: record.version,
        generation: 3,
        epoch: record.epoch,
    }
}

const WRITER: &str = "write-until-killed";
const ROUNDS: u32 = 12;
const LANES: u32 = 8;
const STEPS_MAX: u32 = 100_000;
