//! S14: keys rotate in a running worker and end nothing, whatever cuts the rotation short.

use std::path::Path;
use std::process::Command;

use super::*;
use crate::mishap::{self, Mishap};
use crate::{CommitError, RotateError, SqliteStore, StoreError, Stored};

/// Entropy that differs from key to key.
fn entropy(seed: u8) -> impl FnMut(&mut [u8]) {
    let mut next = seed;
    move |bytes| {
        next += 1;
        bytes.fill(next);
    }
}

fn open(home: &Path) -> SqliteStore {
    let ring = Keyring::load_or_create(&home.join("keys"), &mut entropy(0)).unwrap();
    SqliteStore::open(home.join("ledger.db"), Arc::new(ring)).unwrap()
}

fn rotated(home: &Path) -> Arc<Keyring> {
    Arc::new(Keyring::rotate(&home.join("keys"), &mut entropy(100)).unwrap())
}

/// With which keys the rows of sessions are signed, in the order of their ids.
async fn key_ids(store: &SqliteStore) -> Vec<u32> {
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    let ask = move |connection: &rusqlite::Connection| {
        let mut statement = connection.prepare("SELECT key_id FROM sessions ORDER BY key").unwrap();
        let ids = statement.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect();
        sender.send(ids).unwrap();
    };
    store.tamper(ask).await;
    receiver.recv().unwrap()
}

async fn is_live(store: &SqliteStore, number: u32) -> bool {
    store.find(key(number)).await.unwrap() == Stored::Live(Box::new(record(number)))
}

#[tokio::test]
async fn s14_a_running_ledger_signs_with_the_new_key_and_reads_the_old() {
    let home = scratch();
    let store = open(home.path());
    store.begin_epoch(at(0), 1).await.unwrap();
    store.commit(vec![insert(1), insert(2), Write::Resume(resume(1)), Write::Owe(owed())]).await.unwrap();
    store.rotate(rotated(home.path())).await.unwrap();
    store.commit(vec![insert(3), end(2, 2)]).await.unwrap();
    assert_eq!(key_ids(&store).await, [1, 2]);
    assert!(is_live(&store, 1).await && is_live(&store, 3).await);
    assert_eq!(store.find(key(2)).await.unwrap(), Stored::Ended(stone(2, 2)));
    assert_eq!(store.resume_record(key(1)).await.unwrap(), Some(resume(1)));
    assert_eq!(store.owed(at(0), 10).await.unwrap().len(), 1);
    assert_eq!(store.counters().rows_refused, 0);
    // A row that is written again is signed with the newest key, and a second handle knows it, too.
    store.rotate(rotated(home.path())).await.unwrap();
    let row = SessionRecord { generation: 2, ..record(1) };
    store.commit(vec![Write::Session(Change::Update(row))]).await.unwrap();
    assert_eq!(key_ids(&store).await, [3, 2]);
    assert!(is_live(&store.reopen().unwrap(), 3).await);
}

/// Readers never meet a row that they can't read, however often keys rotate while rows are written.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s14_rotating_under_load_loses_no_row() {
    let home = scratch();
    let store = open(home.path());
    store.begin_epoch(at(0), 1).await.unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for lane in 0..4 {
        let store = store.clone();
        tasks.spawn(async move {
            for number in lane * 100..lane * 100 + 50 {
                store.commit(vec![insert(number)]).await.unwrap();
                assert!(is_live(&store, number).await);
            }
        });
    }
    for _ in 0..5 {
        store.rotate(rotated(home.path())).await.unwrap();
        tokio::task::yield_now().await;
    }
    tasks.join_all().await;
    assert_eq!(store.counters().rows_refused, 0);
    assert_eq!(store.count().await.unwrap(), 200);
}

#[tokio::test]
async fn s14_a_keyring_that_lacks_a_key_is_not_taken() {
    let home = scratch();
    let store = open(home.path());
    let two = rotated(home.path());
    let none = store.rotate(Arc::clone(&two)).await;
    assert!(matches!(none, Err(RotateError::Refused(CommitError::Fenced { .. }))), "no epoch yet: {none:?}");
    store.begin_epoch(at(0), 1).await.unwrap();
    store.rotate(two).await.unwrap();
    store.commit(vec![insert(1)]).await.unwrap();
    for lacking in [ring(), Arc::new(Keyring::ephemeral(&mut entropy(0)))] {
        let refused = store.rotate(lacking).await;
        assert!(matches!(refused, Err(RotateError::KeyLost { .. })), "{refused:?}");
    }
    store.commit(vec![insert(2)]).await.unwrap();
    assert_eq!(key_ids(&store).await, [2, 2]);
}

#[tokio::test]
async fn s14_a_worker_that_was_replaced_rotates_nothing_and_its_successor_notices_what_it_did() {
    let home = scratch();
    let old = open(home.path());
    old.begin_epoch(at(0), 1).await.unwrap();
    let new = open(home.path());
    // The successor has loaded its keys, and then its predecessor rotates.
    old.rotate(rotated(home.path())).await.unwrap();
    let unaware = new.begin_epoch(at(1), 2).await;
    assert!(matches!(unaware, Err(StoreError::OtherKeys)), "{unaware:?}");
    old.commit(vec![insert(1)]).await.unwrap();
    let aware = open(home.path());
    aware.begin_epoch(at(1), 2).await.unwrap();
    assert!(is_live(&aware, 1).await);
    let fenced = old.rotate(rotated(home.path())).await;
    assert!(matches!(fenced, Err(RotateError::Refused(CommitError::Fenced { .. }))), "{fenced:?}");
}

#[tokio::test]
async fn s14_an_old_key_is_retired_once_no_row_needs_it() {
    let home = scratch();
    let dir = home.path().join("keys");
    let sqlite = open(home.path());
    let store = Store::Sqlite(sqlite.clone());
    store.begin_epoch(at(0), 1).await.unwrap();
    store.commit(vec![insert(1)]).await.unwrap();
    store.rotate(rotated(home.path())).await.unwrap();
    store.commit(vec![insert(2), Write::Owe(owed())]).await.unwrap();
    store.rotate(rotated(home.path())).await.unwrap();
    store.commit(vec![Write::Card(card())]).await.unwrap();
    assert_eq!(store.keys_in_use().await.unwrap(), [1, 2, 3].into());
    assert_eq!(Keyring::retire_unused(&dir, &store.keys_in_use().await.unwrap()).unwrap(), []);
    store.commit(vec![end(2, 2), Write::Settle(1)]).await.unwrap();
    assert_eq!(Keyring::retire_unused(&dir, &store.keys_in_use().await.unwrap()).unwrap(), [2]);
    assert_eq!(Keyring::retire_unused(&dir, &[1].into()).unwrap(), [], "the newest stays, whoever uses it");
    let again = open(home.path());
    again.begin_epoch(at(1), 2).await.unwrap();
    assert!(is_live(&again, 1).await);
    assert_eq!(again.find(key(2)).await.unwrap(), Stored::Ended(stone(2, 2)));
    assert_eq!(Keyring::rotate(&dir, &mut entropy(9)).unwrap().key_count(), 3, "numbers go on");
    assert!(dir.join("0004.key").exists());
}

/// What is rotated in one life: the files, then the running ledger, then a row with the new key.
async fn rotate_all(home: &Path, store: &SqliteStore) {
    let ring = rotated(home);
    store.rotate(ring).await.unwrap();
    store.commit(vec![insert(2)]).await.unwrap();
}

async fn arm(store: &SqliteStore, at: Option<(usize, Mishap)>) {
    store.tamper(move |_| mishap::arm(at)).await;
}

/// The next life: every key is there, nothing was lost, and a rotation goes well.
async fn check(home: &Path, context: &str) {
    let store = open(home);
    store.begin_epoch(at(9), 9).await.unwrap();
    assert!(is_live(&store, 1).await, "{context}");
    assert_eq!(store.resume_record(key(1)).await.unwrap(), Some(resume(1)), "{context}");
    assert!(is_live(&store, 2).await || store.find(key(2)).await.unwrap() == Stored::Absent, "{context}");
    let keys = Keyring::load(&home.join("keys")).unwrap().key_count();
    assert!((1..=2).contains(&keys), "{context}: {keys}");
    let again = rotated(home);
    assert_eq!(again.key_count(), keys + 1, "{context}");
    store.rotate(again).await.unwrap();
    store.commit(vec![insert(3)]).await.unwrap();
    assert!(is_live(&store, 1).await && is_live(&store, 3).await, "{context}");
    assert_eq!(store.counters().rows_refused, 0, "{context}");
}

/// No test of its own: what the next one starts, and kills.
#[tokio::test]
async fn the_process_that_dies_rotating() {
    let (Some(home), Some(number)) = (told_by_the_parent(HOME), told_by_the_parent(STEP)) else { return };
    let (home, number): (&Path, usize) = (Path::new(&home), number.parse().unwrap());
    let store = prepared(home).await;
    match number.checked_sub(FILE_STEPS) {
        None => mishap::arm(Some((number, Mishap::Death))),
        Some(number) => arm(&store, Some((number, Mishap::Death))).await,
    }
    rotate_all(home, &store).await;
}

async fn prepared(home: &Path) -> SqliteStore {
    let store = open(home);
    store.begin_epoch(at(0), 1).await.unwrap();
    store.commit(vec![insert(1), Write::Resume(resume(1))]).await.unwrap();
    store
}

#[tokio::test]
async fn s14_killed_between_any_two_steps_a_rotation_leaves_a_keyring_that_loads() {
    let home = scratch();
    let store = prepared(home.path()).await;
    mishap::arm(None);
    arm(&store, None).await;
    rotate_all(home.path(), &store).await;
    let mut steps = mishap::disarm();
    assert_eq!(steps.len(), FILE_STEPS, "{steps:?}");
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    store.tamper(move |_| sender.send(mishap::disarm()).unwrap()).await;
    steps.extend(receiver.recv().unwrap());
    assert!(steps.len() > FILE_STEPS + 8, "{steps:?}");
    for (number, step) in steps.iter().enumerate() {
        let home = scratch();
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "suite::keys::the_process_that_dies_rotating", "--nocapture", "--test-threads=1"])
            .env(HOME, home.path())
            .env(STEP, number.to_string())
            .output()
            .unwrap();
        assert!(!output.status.success(), "killed at {number} {step}");
        assert!(!String::from_utf8_lossy(&output.stderr).contains("panicked"), "{output:?}");
        check(home.path(), &format!("killed at {number} {step}")).await;
    }
}

#[tokio::test]
async fn s14_a_rotation_that_the_disk_refuses_changes_nothing() {
    for mishap in [Mishap::Full, Mishap::FullRolledBack, Mishap::ReadOnly] {
        for number in 0..4 {
            let home = scratch();
            let store = prepared(home.path()).await;
            let ring = rotated(home.path());
            arm(&store, Some((number, mishap))).await;
            let outcome = store.rotate(Arc::clone(&ring)).await;
            store
                .tamper(|connection| {
                    mishap::disarm();
                    connection.execute_batch("PRAGMA query_only = 0").unwrap();
                })
                .await;
            store.commit(vec![insert(2)]).await.unwrap();
            let signer = if outcome.is_ok() { 2 } else { 1 };
            assert_eq!(key_ids(&store).await, [1, signer], "{mishap:?} at {number}: {outcome:?}");
            store.rotate(ring).await.unwrap();
            drop(store);
            check(home.path(), &format!("{mishap:?} at {number}")).await;
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "a test that starts itself, and tells itself what to do")]
fn told_by_the_parent(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

const HOME: &str = "MAINSTAY_STORE_TEST_KEYS_HOME";
const STEP: &str = "MAINSTAY_STORE_TEST_KEYS_STEP";
/// How many steps there are from the beginning of a key's file to its end.
const FILE_STEPS: usize = 7;
