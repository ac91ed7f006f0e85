//! What only a file can show: modes, secrets at rest, fsyncs saved, a full disk, damage.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use mainstay_core::audit::{Action, Actor, AuditEntry};

use super::*;
use crate::codec::owed_of_version_1;
use crate::keys::{KeyError, Purpose};
use crate::migrate::{STEPS, migrate};
use crate::{AuditPage, CommitError, OpenError, SqliteStore, StoreError, Stored};

fn open(path: &Path) -> Result<SqliteStore, OpenError> {
    SqliteStore::open(path.to_owned(), ring())
}

async fn begun(path: &Path) -> SqliteStore {
    let store = open(path).unwrap();
    store.begin_epoch(at(0), 1).await.unwrap();
    store
}

fn home() -> (tempfile::TempDir, PathBuf) {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("ledger.db");
    (home, path)
}

/// The ledger and what SQLite keeps beside it.
fn files(path: &Path) -> Vec<PathBuf> {
    let companions = ["", "-wal", "-shm"].map(|suffix| PathBuf::from(format!("{}{suffix}", path.display())));
    companions.into_iter().filter(|path| path.exists()).collect()
}

#[tokio::test]
async fn i6_every_file_is_private_and_a_wider_one_is_repaired() {
    let (_home, path) = home();
    let store = begun(&path).await;
    store.commit(vec![insert(1)]).await.unwrap();
    let mode = |path: &PathBuf| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(files(&path).iter().map(mode).collect::<Vec<_>>(), [0o600; 3]);
    for file in files(&path) {
        fs::set_permissions(file, fs::Permissions::from_mode(0o666)).unwrap();
    }
    open(&path).unwrap();
    assert_eq!(files(&path).iter().map(mode).collect::<Vec<_>>(), [0o600; 3]);
}

#[tokio::test]
async fn i6_what_belongs_to_another_user_is_refused() {
    let (home, path) = home();
    let keys = home.path().join("keys");
    drop(open(&path).unwrap());
    Keyring::load_or_create(&keys, &mut |bytes| bytes.fill(1)).unwrap();
    let somebody = rustix::process::geteuid().as_raw() + 1;
    for file in [path.clone(), keys.join("0001.key")] {
        if std::os::unix::fs::chown(&file, Some(somebody), None).is_err() {
            // Only the superuser gives files away, so only its files can be given to it.
            return;
        }
    }
    assert!(matches!(open(&path), Err(OpenError::Foreign { owner, .. }) if owner == somebody));
    assert!(matches!(Keyring::load(&keys), Err(KeyError::Foreign { owner, .. }) if owner == somebody));
}

#[tokio::test]
async fn i6_no_upstream_id_is_at_rest_in_the_clear() {
    let (_home, path) = home();
    let store = begun(&path).await;
    store.commit(vec![insert(1), Write::Resume(resume(1)), Write::Owe(owed())]).await.unwrap();
    let holds = |needle: &[u8]| {
        let content: Vec<u8> = files(&path).iter().flat_map(|file| fs::read(file).unwrap()).collect();
        content.windows(needle.len()).any(|window| window == needle)
    };
    assert!(!holds(SECRET.as_bytes()));
    assert!(holds(b"alice"), "the search finds what is there");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_commits_share_fsyncs() {
    const COMMITS: u32 = 400;
    let (_home, path) = home();
    let store = begun(&path).await;
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..COMMITS {
        let store = store.clone();
        tasks.spawn(async move { store.commit(vec![insert(number)]).await });
    }
    assert!(tasks.join_all().await.into_iter().all(|outcome| outcome.is_ok()));
    let counters = store.counters();
    assert!(counters.commits_authority < u64::from(COMMITS) / 4, "{counters:?}");
    assert_eq!(store.count().await.unwrap(), u64::from(COMMITS));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_callers_conflict_does_not_undo_the_others_of_its_batch() {
    let (_home, path) = home();
    let store = begun(&path).await;
    // While the writer is held, everything else queues up for one batch.
    let (held, release) = (Arc::new(std::sync::Barrier::new(2)), Arc::new(std::sync::Barrier::new(2)));
    let holder = {
        let (store, held, release) = (store.clone(), Arc::clone(&held), Arc::clone(&release));
        async move {
            store
                .tamper(move |_| {
                    held.wait();
                    release.wait();
                })
                .await;
            Ok(())
        }
    };
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(holder);
    tokio::task::spawn_blocking(move || held.wait()).await.unwrap();
    for number in 0..20 {
        let store = store.clone();
        // Every session twice, and one of each pair loses.
        tasks.spawn(async move { store.commit(vec![Write::Owe(owed()), insert(number / 2)]).await });
    }
    while store.counters().queue_depth < 20 {
        tokio::task::yield_now().await;
    }
    tokio::task::spawn_blocking(move || release.wait()).await.unwrap();
    let outcomes = tasks.join_all().await;
    assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 11);
    assert_eq!(store.counters().commits_authority, 1, "it was one batch");
    assert_eq!(store.count().await.unwrap(), 10);
    assert_eq!(store.owed(OwedDelete::NEVER, 100).await.unwrap().len(), 10);
}

#[tokio::test]
async fn s6_a_full_disk_changes_nothing_and_is_over_when_it_is_over() {
    let (_home, path) = home();
    let store = begun(&path).await;
    store.commit(vec![insert(1)]).await.unwrap();
    let limit = |sql: &'static str| store.tamper(move |connection| connection.execute_batch(sql).unwrap());
    limit("PRAGMA max_page_count = 1").await;
    let big = SessionRecord { initialize_params: vec![b' '; 100_000].into(), ..record(2) };
    let outcome = store.commit(vec![end(1, 2), Write::Session(Change::Insert(big.clone()))]).await;
    assert!(matches!(outcome, Err(CommitError::Full(_))), "{outcome:?}");
    assert_eq!(store.find(key(1)).await.unwrap(), Stored::Live(Box::new(record(1))), "the session keeps serving");
    assert_eq!(store.find(key(2)).await.unwrap(), Stored::Absent);
    limit("PRAGMA max_page_count = 1000000").await;
    store.commit(vec![end(1, 2), Write::Session(Change::Insert(big))]).await.unwrap();
    assert_eq!(store.find(key(1)).await.unwrap(), Stored::Ended(stone(1, 2)));
}

#[tokio::test]
async fn s6_a_ledger_that_can_not_be_written_refuses_and_recovers() {
    let (_home, path) = home();
    let store = begun(&path).await;
    store.tamper(|connection| connection.pragma_update(None, "query_only", true).unwrap()).await;
    let outcome = store.commit(vec![insert(1)]).await;
    assert!(matches!(outcome, Err(CommitError::Unavailable(_))), "{outcome:?}");
    let epoch = store.begin_epoch(at(1), 2).await;
    assert!(matches!(epoch, Err(StoreError::Unavailable(_))), "{epoch:?}");
    store.hint(touch(1, at(1), at(2)));
    store.flush().await.unwrap();
    assert_eq!(store.counters().hint_failures, 1);
    store.tamper(|connection| connection.pragma_update(None, "query_only", false).unwrap()).await;
    store.commit(vec![insert(1)]).await.unwrap();
}

#[tokio::test]
async fn a_batch_of_hints_costs_no_fsync() {
    let (_home, path) = home();
    let store = begun(&path).await;
    let synchronous = async || {
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        let ask = move |connection: &rusqlite::Connection| {
            let level: i64 = connection.pragma_query_value(None, "synchronous", |row| row.get(0)).unwrap();
            sender.send(level).unwrap();
        };
        store.tamper(ask).await;
        receiver.recv().unwrap()
    };
    let (normal, full) = (1, 2);
    for (write, expected) in [
        (insert(1), full),
        (touch(1, at(1), at(2)), normal),
        (Write::Owe(owed()), full),
        (Write::Resume(resume(1)), normal),
        (end(1, 2), full),
    ] {
        store.commit(vec![write.clone()]).await.unwrap();
        assert_eq!(synchronous().await, expected, "{write:?}");
    }
}

#[tokio::test]
async fn hints_that_find_the_queue_full_are_dropped_and_counted() {
    let (_home, path) = home();
    let store = begun(&path).await;
    store.commit(vec![insert(1)]).await.unwrap();
    let (held, release) = (Arc::new(std::sync::Barrier::new(2)), Arc::new(std::sync::Barrier::new(2)));
    let mut tasks = tokio::task::JoinSet::new();
    {
        let (store, held, release) = (store.clone(), Arc::clone(&held), Arc::clone(&release));
        tasks.spawn(async move {
            store
                .tamper(move |_| {
                    held.wait();
                    release.wait();
                })
                .await;
        });
    }
    tokio::task::spawn_blocking(move || held.wait()).await.unwrap();
    for _ in 0..crate::sqlite::JOBS_QUEUED_MAX + 5 {
        store.hint(touch(1, at(1), at(2)));
    }
    assert_eq!(store.counters().hints_dropped, 5);
    tokio::task::spawn_blocking(move || release.wait()).await.unwrap();
    tasks.join_all().await;
    store.flush().await.unwrap();
    assert_eq!((store.counters().hint_failures, store.counters().queue_depth), (0, 0));
}

#[tokio::test]
async fn everything_is_there_after_the_ledger_is_opened_again() {
    let (_home, path) = home();
    {
        let store = begun(&path).await;
        store.commit(vec![insert(1), insert(2), end(2, 2), Write::Owe(owed()), Write::Card(card())]).await.unwrap();
        store.hint(touch(1, at(5), at(105)));
        store.hint(Write::Resume(resume(1)));
        store.flush().await.unwrap();
    }
    let store = open(&path).unwrap();
    let touched = SessionRecord { seen_at: at(5), deadline: at(105), confirmed: true, ..record(1) };
    assert_eq!(store.find(key(1)).await.unwrap(), Stored::Live(Box::new(touched)));
    assert_eq!(store.find(key(2)).await.unwrap(), Stored::Ended(stone(2, 2)));
    assert_eq!(store.resume_record(key(1)).await.unwrap(), Some(resume(1)));
    assert_eq!(store.owed(at(0), 10).await.unwrap(), [OwedDelete { id: 1, ..owed() }]);
    assert_eq!(store.card(&server(), [5; 32]).await, Some(card()));
    assert_eq!(store.begin_epoch(at(6), 2).await.unwrap(), Epoch { counter: 2, nonce: 2 });
}

#[tokio::test]
async fn s5_a_clock_that_went_back_keeps_everything() {
    let (_home, path) = home();
    let store = begun(&path).await;
    store.commit(vec![Write::Session(Change::Insert(SessionRecord { seen_at: at(9000), ..record(1) }))]).await.unwrap();
    let again = store.reopen().unwrap();
    assert_eq!(again.begin_epoch(at(5), 2).await.unwrap().counter, 2);
    assert_eq!(again.count().await.unwrap(), 1);
}

#[tokio::test]
async fn s14_other_keys_are_refused_and_rotated_ones_are_not() {
    let (home, path) = home();
    let keys = home.path().join("keys");
    let mut byte = 0;
    let mut entropy = |bytes: &mut [u8]| {
        byte += 1;
        bytes.fill(byte);
    };
    let first = Arc::new(Keyring::load_or_create(&keys, &mut entropy).unwrap());
    let store = SqliteStore::open(path.clone(), first).unwrap();
    store.begin_epoch(at(0), 1).await.unwrap();
    store.commit(vec![insert(1), Write::Resume(resume(1))]).await.unwrap();

    let rotated = Arc::new(Keyring::rotate(&keys, &mut entropy).unwrap());
    let store = SqliteStore::open(path.clone(), rotated).unwrap();
    assert_eq!(store.find(key(1)).await.unwrap(), Stored::Live(Box::new(record(1))));
    assert_eq!(store.resume_record(key(1)).await.unwrap(), Some(resume(1)));

    // The newest key is lost, then all of them, and then others are made in their place.
    fs::remove_file(keys.join("0002.key")).unwrap();
    let older = Arc::new(Keyring::load(&keys).unwrap());
    assert!(matches!(SqliteStore::open(path.clone(), older), Err(OpenError::OtherKeys { .. })));
    fs::remove_file(keys.join("0001.key")).unwrap();
    let others = Arc::new(Keyring::load_or_create(&keys, &mut entropy).unwrap());
    let refused = SqliteStore::open(path.clone(), others).unwrap_err();
    assert!(matches!(refused, OpenError::OtherKeys { .. }), "{refused:?}");
    assert!(refused.to_string().contains("ledger.db"), "{refused}");
}

#[tokio::test]
async fn a_damaged_ledger_is_refused_named_and_kept() {
    let (_home, path) = home();
    begun(&path).await.commit((0..200).map(insert).collect()).await.unwrap();
    let checkpoint = rusqlite::Connection::open(&path).unwrap();
    checkpoint.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap();
    // A boot later it is looked at again.
    checkpoint.execute("UPDATE meta SET value = 'earlier' WHERE name = 'boot'", []).unwrap();
    checkpoint.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap();
    drop(checkpoint);
    let whole = fs::read(&path).unwrap();

    let mut holed = whole.clone();
    let page_bytes = 4096;
    holed.chunks_mut(page_bytes).skip(5).take(20).for_each(|page| page.fill(0xee));
    let mut headless = whole.clone();
    headless[..100].fill(0xee);
    for damaged in [holed, headless, b"not a database, but long enough to be taken for one: ".repeat(200)] {
        files(&path).into_iter().for_each(|file| fs::remove_file(file).unwrap());
        fs::write(&path, &damaged).unwrap();
        let refused = open(&path).unwrap_err();
        assert!(matches!(refused, OpenError::Damaged { .. }), "{refused:?}");
        assert!(refused.to_string().contains("ledger.db"), "{refused}");
        assert_eq!(fs::read(&path).unwrap(), damaged, "it is kept as it was");
    }
    files(&path).into_iter().for_each(|file| fs::remove_file(file).unwrap());
    fs::write(&path, &whole).unwrap();
    assert_eq!(open(&path).unwrap().count().await.unwrap(), 200);
}

/// A ledger of the first schema at `path`, with the rows of the one at `newest` and an owed delete as it was kept then.
fn of_the_first_schema(path: &Path, newest: &Path) -> rusqlite::Connection {
    let mut connection = rusqlite::Connection::open(path).unwrap();
    migrate(&mut connection, &STEPS[..1]).unwrap();
    connection.execute("ATTACH ?1 AS newest", [newest.to_str()]).unwrap();
    for table in ["meta", "sessions", "tombstones", "resumes", "audit", "cards"] {
        connection.execute_batch(&format!("INSERT INTO main.{table} SELECT * FROM newest.{table}")).unwrap();
    }
    let sealed = ring().seal(Purpose::Owed, b"files", &owed_of_version_1(&owed()));
    let (now, sql) = (
        at(0).unix_millis(),
        "INSERT INTO owed (server, next_at, owed_at, key_id, sealed) VALUES (?1, ?2, ?2, ?3, ?4)",
    );
    connection.execute(sql, rusqlite::params!["files", now.cast_signed(), sealed.key_id, sealed.bytes]).unwrap();
    connection.execute_batch("DETACH newest").unwrap();
    connection
}

#[tokio::test]
async fn u7_a_ledger_of_the_first_schema_is_taken_over_whole_also_when_that_was_cut_short() {
    let (home, newest) = home();
    let entry = AuditEntry::new(at(0), Actor::Operator, Action::Closed).of_session(key(2)).with_detail("stuck");
    let writes = vec![
        insert(1),
        insert(2),
        end(2, 2),
        Write::Resume(resume(1)),
        Write::Card(card()),
        Write::Audit(entry.clone()),
    ];
    begun(&newest).await.commit(writes).await.unwrap();
    let path = home.path().join("first.db");
    let first = of_the_first_schema(&path, &newest);
    // As if it had been killed within: what is not committed is not there.
    first.execute_batch(&format!("BEGIN IMMEDIATE; {}; PRAGMA user_version = 2", STEPS[1])).unwrap();
    drop(first);
    let early = OwedDelete { id: 1, session: None, ..owed() };
    for epoch in 2..4 {
        let store = open(&path).unwrap();
        assert_eq!(store.begin_epoch(at(1), epoch).await.unwrap().counter, epoch);
        assert_eq!(store.find(key(1)).await.unwrap(), Stored::Live(Box::new(record(1))));
        assert_eq!(store.find(key(2)).await.unwrap(), Stored::Ended(stone(2, 2)));
        assert_eq!(store.resume_record(key(1)).await.unwrap(), Some(resume(1)));
        assert_eq!(store.card(&server(), [5; 32]).await, Some(card()));
        let page = AuditPage { before: None, limit: 10, session: None, action: None };
        assert_eq!(store.audit(&page).await.unwrap(), [(1, entry.clone())]);
        assert_eq!(store.owed(OwedDelete::NEVER, 10).await.unwrap(), std::slice::from_ref(&early));
        assert_eq!(store.counters().rows_refused, 0);
    }
    let store = open(&path).unwrap();
    store.begin_epoch(at(1), 4).await.unwrap();
    let failed = early.postponed(at(1), "down");
    store
        .commit(vec![Write::Postpone(failed.clone()), Write::Owe(resume(1).owed_delete(at(2)).unwrap())])
        .await
        .unwrap();
    assert_eq!(store.owed_one(1).await.unwrap(), Some(failed));
    let of_one = store.owed_of(key(1), 10).await.unwrap();
    assert_eq!(of_one.iter().map(|owed| (owed.id, owed.session)).collect::<Vec<_>>(), [(2, Some(key(1)))]);
}

#[tokio::test]
async fn s14_an_owed_delete_that_was_put_to_another_session_is_left_out() {
    let (_home, path) = home();
    let store = begun(&path).await;
    store.commit(vec![Write::Owe(owed())]).await.unwrap();
    for session in [Some(*key(1).as_bytes()), None] {
        store
            .tamper(move |connection| {
                connection.execute("UPDATE owed SET session = ?1", [session]).unwrap();
            })
            .await;
        assert_eq!(store.owed(OwedDelete::NEVER, 10).await.unwrap(), []);
        assert_eq!(store.owed_of(key(1), 10).await.unwrap(), []);
    }
    assert_eq!(store.counters().rows_refused, 3);
}

#[tokio::test]
async fn what_is_no_ledger_of_ours_is_refused() {
    let (home, path) = home();
    drop(open(&path).unwrap());
    let connection = rusqlite::Connection::open(&path).unwrap();
    connection.pragma_update(None, "user_version", 99).unwrap();
    drop(connection);
    let refused = open(&path).unwrap_err();
    assert!(
        matches!(refused, OpenError::Newer { found: 99, known, .. } if known as usize == STEPS.len()),
        "{refused:?}"
    );

    let alien = home.path().join("alien.db");
    rusqlite::Connection::open(&alien).unwrap().execute_batch("CREATE TABLE theirs (id)").unwrap();
    assert!(matches!(open(&alien), Err(OpenError::Alien { .. })));
    let nowhere = home.path().join("none").join("ledger.db");
    assert!(matches!(open(&nowhere), Err(OpenError::Io { attempt: "create", .. })));
}
