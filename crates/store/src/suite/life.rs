//! S1, S6: whatever cuts an act short, the session lives on unchanged or has ended for ever; never both, and an owed delete
//! is there iff the ending is. Every step of every act, on the real ledger: the process killed, the disk full, nothing
//! to be written.

use std::path::Path;
use std::process::{Command, Stdio};

use mainstay_core::audit::{Action, Actor, AuditEntry};

use super::*;
use crate::mishap::{self, Mishap};
use crate::{AuditPage, CommitError, Found, Stored};

/// What is done to a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Delete,
    Close,
    Expire,
    BeginDrain,
    FinishDrain,
    Suspend,
}

const ACTS: [Act; 6] = [Act::Delete, Act::Close, Act::Expire, Act::BeginDrain, Act::FinishDrain, Act::Suspend];

impl Act {
    /// The state that it ends the session in.
    fn ending(self) -> Option<State> {
        match self {
            Self::Delete | Self::FinishDrain => Some(State::Deleted),
            Self::Close => Some(State::Closed),
            Self::Expire => Some(State::Expired),
            Self::BeginDrain | Self::Suspend => None,
        }
    }

    fn action(self) -> Action {
        match self {
            Self::Delete => Action::Deleted,
            Self::Close => Action::Closed,
            Self::Expire => Action::Expired,
            Self::BeginDrain => Action::DrainBegun,
            Self::FinishDrain => Action::Drained,
            Self::Suspend => Action::Suspended,
        }
    }

    /// The row before.
    fn row(self) -> SessionRecord {
        if self == Self::FinishDrain { draining() } else { record(1) }
    }

    fn stone(self) -> Option<Tombstone> {
        let reason = "reason ".repeat(30).into();
        Some(Tombstone { state: self.ending()?, reason, ..stone(1, self.row().generation + 1) })
    }

    /// The commit that makes it durable, as the engine makes it.
    fn writes(self) -> Vec<Write> {
        let entry = AuditEntry::new(at(10), Actor::Gateway, self.action()).of_session(key(1));
        let mut writes = match (self.stone(), self) {
            (Some(stone), _) => {
                vec![Write::Session(Change::End(stone)), Write::Owe(big_owed()), Write::ForgetResume(key(1))]
            }
            (None, Self::BeginDrain) => vec![Write::Session(Change::Update(draining()))],
            (None, _) => vec![Write::Resume(suspended())],
        };
        writes.push(Write::Audit(entry));
        writes
    }
}

fn draining() -> SessionRecord {
    SessionRecord { state: State::Draining, generation: 2, deadline: at(15), ..record(1) }
}

fn suspended() -> ResumeRecord {
    ResumeRecord { saved_at: at(10), last_event_id: Some("x".repeat(9000).into()), ..resume(1) }
}

/// So long that the file has to grow for it.
fn big_owed() -> OwedDelete {
    OwedDelete { url: format!("http://127.0.0.1:1/{}", "x".repeat(9000)).into(), ..owed() }
}

/// What the one who acted was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    Done,
    Refused,
    /// It did not live to hear.
    Nothing,
}

/// A ledger in `home` with the session that `act` is done to.
async fn prepared(home: &Path, act: Act) -> Store {
    let store = Store::open(Place::Sqlite(home.join("ledger.db")), ring()).unwrap();
    store.begin_epoch(at(0), 1).await.unwrap();
    store.commit(vec![insert(1), Write::Resume(resume(1))]).await.unwrap();
    if act == Act::FinishDrain {
        store.commit(vec![Write::Session(Change::Update(draining()))]).await.unwrap();
    }
    store
}

async fn on_writer<T: Send + 'static>(
    store: &Store,
    act: impl FnOnce(&rusqlite::Connection) -> T + Send + 'static,
) -> T {
    let Store::Sqlite(sqlite) = store else { panic!("only SQLite") };
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    sqlite.tamper(move |connection| sender.send(act(connection)).unwrap()).await;
    receiver.recv().unwrap()
}

/// Every step of `act`, in order.
async fn steps(act: Act) -> Vec<String> {
    let home = scratch();
    let store = prepared(home.path(), act).await;
    on_writer(&store, |_| mishap::arm(None)).await;
    store.commit(act.writes()).await.unwrap();
    let steps = on_writer(&store, |_| mishap::disarm()).await;
    assert!(steps.len() >= 8, "{steps:?}");
    steps
}

/// What must hold after `act`, whatever happened.
async fn check(store: &Store, act: Act, told: Told, context: &str) {
    let found = store.find(key(1)).await.unwrap();
    let trail = store.audit(&AuditPage { before: None, limit: 10, session: Some(key(1)), action: None }).await.unwrap();
    let actions: Vec<_> = trail.iter().map(|(_, entry)| entry.action).collect();
    let done = actions == [act.action()];
    assert!(done || actions.is_empty(), "{context}: {actions:?}");
    match told {
        Told::Done => assert!(done, "{context}: what was acknowledged is there"),
        Told::Refused => assert!(!done, "{context}: what was refused is not there"),
        Told::Nothing => {}
    }
    let ended: Vec<_> = matches!(found, Stored::Ended(_)).then(|| key(1)).into_iter().collect();
    assert_eq!(store.ended_of(vec![key(2), key(1)]).await.unwrap(), ended, "{context}");
    let owed = store.owed_all(10).await.unwrap();
    let resumable = store.resume_record(key(1)).await.unwrap();
    let expected = match (done, act.stone()) {
        (true, Some(stone)) => (Stored::Ended(stone), 1, None),
        (true, None) if act == Act::BeginDrain => (Stored::Live(Box::new(draining())), 0, Some(resume(1))),
        (true, None) => (Stored::Live(Box::new(record(1))), 0, Some(suspended())),
        (false, _) => (Stored::Live(Box::new(act.row())), 0, Some(resume(1))),
    };
    assert_eq!((found, owed.len(), resumable), expected, "{context}");
    let rows: i64 = on_writer(store, |connection| {
        let sql = "SELECT (SELECT count(*) FROM sessions) + (SELECT count(*) FROM tombstones)";
        connection.query_row(sql, [], |row| row.get(0)).unwrap()
    })
    .await;
    assert_eq!(rows, 1, "{context}: it is live or ended, never both and never neither");
    if done && act.ending().is_some() {
        never_again(store, context).await;
    }
}

/// An id that has ended is blocked against every write.
async fn never_again(store: &Store, context: &str) {
    for generation in 1..5 {
        let row = SessionRecord { generation, ..record(1) };
        for change in [Change::Insert(row.clone()), Change::Update(row), Change::End(stone(1, generation))] {
            let outcome = store.commit(vec![Write::Session(change)]).await;
            let ended = matches!(outcome, Err(CommitError::Conflict { found: Found::Ended, .. }));
            assert!(ended, "{context}: {outcome:?}");
        }
    }
}

/// The ledger as the next life finds it, and that the act can still be done, once.
async fn check_in_the_next_life(home: &Path, act: Act, told: Told, context: &str) {
    let store = Store::open(Place::Sqlite(home.join("ledger.db")), ring()).unwrap();
    store.begin_epoch(at(20), 2).await.unwrap();
    check(&store, act, told, context).await;
    let trail = store.audit(&AuditPage { before: None, limit: 1, session: None, action: None }).await.unwrap();
    if trail.is_empty() {
        store.commit(act.writes()).await.unwrap();
        check(&store, act, Told::Done, context).await;
    }
    let verdict: String =
        on_writer(&store, |connection| connection.query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap())
            .await;
    assert_eq!(verdict, "ok", "{context}");
}

/// Does `act` in a process of its own that `mishap` befalls. What it was told.
fn in_a_child(home: &Path, act: Act, mishap: &str) -> Told {
    // A write beyond the limit on file sizes is an error, and no signal, to whoever ignores the signal.
    let mut child = Command::new("sh");
    child.args(["-c", "trap '' 25; exec \"$0\" \"$@\""]).arg(std::env::current_exe().unwrap());
    child.args(["--exact", "suite::life::the_process_that_meets_with_a_mishap", "--nocapture", "--test-threads=1"]);
    child.env(HOME, home).env(ACT, format!("{act:?}")).env(MISHAP, mishap);
    let output = child.stdin(Stdio::null()).output().unwrap();
    let (said, complaint) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(!output.status.success(), "{act:?}, {mishap}: it was killed: {said} {complaint}");
    assert!(!complaint.contains("panicked"), "{act:?}, {mishap}: {complaint}");
    match (said.contains("told: done"), said.contains("told: refused")) {
        (true, _) => Told::Done,
        (_, true) => Told::Refused,
        _ => Told::Nothing,
    }
}

#[expect(clippy::disallowed_methods, reason = "a test that starts itself, and tells itself what to do")]
fn told_by_the_parent(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// No test of its own: what [`in_a_child`] starts.
#[tokio::test]
async fn the_process_that_meets_with_a_mishap() {
    let Some(mishap) = told_by_the_parent(MISHAP) else { return };
    let (home, act) = (told_by_the_parent(HOME).unwrap(), told_by_the_parent(ACT).unwrap());
    let act = ACTS.into_iter().find(|known| format!("{known:?}") == act).unwrap();
    let store = prepared(Path::new(&home), act).await;
    if let Some(extra) = mishap.strip_prefix("file limit ") {
        let log = std::fs::metadata(Path::new(&home).join("ledger.db-wal")).unwrap().len();
        limit_files(Some(log + extra.parse::<u64>().unwrap()));
    } else {
        let (number, _) = mishap.split_once(' ').unwrap();
        let number: usize = number.parse().unwrap();
        on_writer(&store, move |_| mishap::arm(Some((number, Mishap::Death)))).await;
    }
    match store.commit(act.writes()).await {
        Ok(()) => println!("told: done"),
        Err(_) => {
            limit_files(None);
            check(&store, act, Told::Refused, "in the same life").await;
            println!("told: refused");
        }
    }
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
}

/// How large the files of this process may become.
fn limit_files(current: Option<u64>) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Fsize).maximum;
    setrlimit(Resource::Fsize, Rlimit { current: current.or(maximum), maximum }).unwrap();
}

async fn kill_at_every_step(act: Act) {
    for (number, step) in steps(act).await.into_iter().enumerate() {
        let home = scratch();
        let context = format!("{number} {step}");
        let told = in_a_child(home.path(), act, &context);
        assert_eq!(told, Told::Nothing, "{act:?} {context}");
        check_in_the_next_life(home.path(), act, told, &format!("{act:?}, killed at {context}")).await;
    }
}

#[tokio::test]
async fn s1_killed_at_any_step_of_a_delete() {
    kill_at_every_step(Act::Delete).await;
}

#[tokio::test]
async fn s1_killed_at_any_step_of_a_close() {
    kill_at_every_step(Act::Close).await;
}

#[tokio::test]
async fn s1_killed_at_any_step_of_an_expiry() {
    kill_at_every_step(Act::Expire).await;
}

#[tokio::test]
async fn s8_killed_at_any_step_of_the_beginning_of_a_drain() {
    kill_at_every_step(Act::BeginDrain).await;
}

#[tokio::test]
async fn s8_killed_at_any_step_of_the_end_of_a_drain() {
    kill_at_every_step(Act::FinishDrain).await;
}

#[tokio::test]
async fn s11_killed_at_any_step_of_a_suspension() {
    kill_at_every_step(Act::Suspend).await;
}

/// The log of the ledger can't be written beyond some byte, each time a later one: also in the middle of a page, and of
/// the page that would have made the transaction whole.
#[tokio::test]
async fn s6_a_log_that_ends_at_any_length_holds_all_of_an_ending_or_nothing() {
    let (mut refused, mut done) = (0, 0);
    for extra in (0..LOG_GROWTH_BYTES_MAX).step_by(LOG_STEP_BYTES) {
        let home = scratch();
        let told = in_a_child(home.path(), Act::Delete, &format!("file limit {extra}"));
        match told {
            Told::Done => done += 1,
            // Nothing was ever heard of it, so the next life may find either.
            Told::Refused | Told::Nothing => refused += 1,
        }
        let told = if told == Told::Done { told } else { Told::Nothing };
        check_in_the_next_life(home.path(), Act::Delete, told, &format!("log may grow by {extra}")).await;
    }
    assert!(refused > 5 && done > 1, "the limits were around what is needed: {refused} {done}");
}

/// How `act` ends if `mishap` happens at step `number`. The same life goes on afterwards.
async fn befallen(act: Act, number: usize, mishap: Mishap) -> Told {
    let home = scratch();
    let context = format!("{act:?}, {mishap:?} at {number}");
    let store = prepared(home.path(), act).await;
    on_writer(&store, move |_| mishap::arm(Some((number, mishap)))).await;
    let told = match store.commit(act.writes()).await {
        Ok(()) => Told::Done,
        Err(CommitError::Full(_) | CommitError::Unavailable(_)) => Told::Refused,
        Err(error) => panic!("{context}: {error:?}"),
    };
    on_writer(&store, |connection| {
        mishap::disarm();
        connection.execute_batch("PRAGMA query_only = 0; PRAGMA max_page_count = 1000000").unwrap();
    })
    .await;
    check(&store, act, told, &context).await;
    // It is over when it is over.
    if told == Told::Refused {
        store.commit(act.writes()).await.unwrap();
    }
    check(&store, act, Told::Done, &context).await;
    drop(store);
    check_in_the_next_life(home.path(), act, Told::Done, &context).await;
    told
}

#[tokio::test]
async fn s6_a_disk_that_is_full_or_read_only_at_any_write_refuses_the_act_and_changes_nothing() {
    for act in ACTS {
        let steps = steps(act).await;
        for mishap in [Mishap::Full, Mishap::FullRolledBack, Mishap::NoGrowth, Mishap::ReadOnly] {
            let mut refused = 0;
            for (number, step) in steps.iter().enumerate().filter(|(_, step)| step.starts_with("before")) {
                let told = befallen(act, number, mishap).await;
                refused += u32::from(told == Told::Refused);
                let certain = matches!(mishap, Mishap::Full | Mishap::FullRolledBack);
                assert!(!certain || told == Told::Refused, "{act:?}, {mishap:?} at {step}");
            }
            // A drain's row has the room of the row before, and so needs no growth.
            let grows = mishap != Mishap::NoGrowth || act != Act::BeginDrain;
            assert!(refused > 0 || !grows, "{act:?}, {mishap:?}: it happened");
        }
    }
}

#[tokio::test]
async fn s6_a_hint_that_meets_a_full_disk_costs_nothing_but_itself() {
    let steps = steps(Act::Suspend).await;
    for number in 0..steps.len() {
        let home = scratch();
        let store = prepared(home.path(), Act::Suspend).await;
        on_writer(&store, move |_| mishap::arm(Some((number, Mishap::Full)))).await;
        store.hint(Write::Resume(suspended()));
        store.flush().await.unwrap();
        let reached = on_writer(&store, |_| mishap::disarm()).await;
        let failed = store.counters().hint_failures;
        let expected = reached.get(number).is_some_and(|step| step.starts_with("before"));
        assert_eq!(failed, u64::from(expected), "{number} of {reached:?}");
        let kept = if expected { resume(1) } else { suspended() };
        assert_eq!(store.resume_record(key(1)).await.unwrap(), Some(kept), "{number} of {reached:?}");
        assert_eq!(store.find(key(1)).await.unwrap(), Stored::Live(Box::new(record(1))));
    }
}

const HOME: &str = "MAINSTAY_STORE_TEST_HOME";
const ACT: &str = "MAINSTAY_STORE_TEST_ACT";
const MISHAP: &str = "MAINSTAY_STORE_TEST_MISHAP";
const LOG_GROWTH_BYTES_MAX: usize = 100_000;
const LOG_STEP_BYTES: usize = 2060;
