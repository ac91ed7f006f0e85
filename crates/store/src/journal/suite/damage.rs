//! A damaged journal never keeps the gateway from starting, nor from going on: it is set aside, and begun anew.

use std::fs;

use rusqlite::Connection;

use super::*;
use crate::journal::Answered;
use crate::journal::place::STEPS;
use crate::migrate::migrate;

fn beside(path: &Path, suffix: &str) -> PathBuf {
    PathBuf::from(format!("{}{suffix}", path.display()))
}

/// The journal at `path` was set aside once, and serves.
async fn begun_anew(path: &Path, context: &str) -> Journal {
    let journal = open(path);
    assert_eq!(journal.counters().set_aside, 1, "{context}");
    assert_eq!(kept(&journal, 1).await, [], "{context}");
    put(&journal, [entry(Content::Event(event(1)))]).await.unwrap();
    assert_eq!(kept(&journal, 1).await, [1], "{context}");
    journal
}

/// A journal with something in it that was closed.
async fn closed() -> (tempfile::TempDir, PathBuf) {
    let (home, path, journal) = in_a_file();
    put(&journal, (1..=200).map(|sequence| entry(Content::Event(event(sequence))))).await.unwrap();
    on_writer(&journal, |connection| {
        connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap();
    })
    .await;
    (home, path)
}

#[tokio::test]
async fn a_file_that_is_no_journal_is_set_aside() {
    let (_home, path) = closed().await;
    let whole = fs::read(&path).unwrap();
    let mut header = whole.clone();
    header[..100].fill(0xff);
    let mut schema = whole.clone();
    schema[100..4096].fill(0xff);
    for (content, context) in [
        (b"not a database at all, but long enough to be looked at".repeat(100), "text"),
        (header, "its header is overwritten"),
        (schema, "its schema is overwritten"),
        (whole[..5000].to_vec(), "it was cut short"),
    ] {
        let home = scratch();
        let path = home.path().join("streams.db");
        fs::write(&path, &content).unwrap();
        begun_anew(&path, context).await;
        assert_eq!(fs::read(beside(&path, ".damaged")).unwrap(), content, "{context}: it is kept as it was");
    }
}

#[tokio::test]
async fn a_file_of_a_newer_version_or_another_program_is_set_aside() {
    for steps in [[STEPS, &["CREATE TABLE later (id)"]].concat(), vec![]] {
        let home = scratch();
        let path = home.path().join("streams.db");
        let mut connection = Connection::open(&path).unwrap();
        if steps.is_empty() {
            connection.execute_batch("CREATE TABLE theirs (id)").unwrap();
        } else {
            migrate(&mut connection, &steps).unwrap();
        }
        drop(connection);
        begun_anew(&path, &format!("{steps:?}")).await;
    }
}

#[tokio::test]
async fn r6_a_file_of_the_oldest_version_is_brought_up_to_date_with_all_that_is_in_it() {
    let (home, now_path, journal) = in_a_file();
    put(&journal, [entry(Content::Call(call())), entry(asking(7)), entry(asking(8))]).await.unwrap();
    journal.answered(key(1), stream(7), answer(1)).await.unwrap();
    journal.flush().await.unwrap();
    drop(journal);
    // The same rows as the first version had them.
    let path = home.path().join("oldest.db");
    let mut oldest = Connection::open(&path).unwrap();
    migrate(&mut oldest, &STEPS[..1]).unwrap();
    oldest.execute("ATTACH ?1 AS now", [now_path.to_str().unwrap()]).unwrap();
    for table in ["sessions", "streams", "calls", "events"] {
        oldest.execute(&format!("INSERT INTO {table} SELECT * FROM now.{table}"), []).unwrap();
    }
    let columns = "id, session, epoch, number, deadline, answered_at, key_id, sealed";
    oldest.execute(&format!("INSERT INTO questions SELECT {columns} FROM now.questions"), []).unwrap();
    drop(oldest);
    let journal = open(&path);
    assert_eq!(journal.counters().set_aside, 0);
    assert_eq!(kept(&journal, 1).await, [7, 8]);
    assert_eq!(journal.answered(key(1), stream(7), answer(2)).await.unwrap(), Answered::Again);
    assert!(journal.unforwarded(0..9, 9).await.unwrap().is_empty(), "what was answered then was forwarded then");
    assert_eq!(journal.answered(key(1), stream(8), answer(2)).await.unwrap(), Answered::First);
    assert_eq!(journal.unforwarded(0..9, 9).await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_second_damage_takes_the_place_of_the_first() {
    let home = scratch();
    let path = home.path().join("streams.db");
    let mut journals = Vec::new();
    for round in 0..3_u8 {
        fs::write(&path, vec![round + 1; 8192]).unwrap();
        fs::write(beside(&path, "-wal"), vec![round + 1; 64]).unwrap();
        journals.push(begun_anew(&path, &round.to_string()).await);
        assert_eq!(fs::read(beside(&path, ".damaged")).unwrap(), vec![round + 1; 8192]);
        for suffix in ["", "-wal", "-shm"] {
            let _ = fs::remove_file(beside(&path, suffix));
        }
    }
    let kept = fs::read_dir(home.path()).unwrap().count();
    assert!(kept <= 2, "no more than one is kept");
}

/// Every state that a death in the middle of setting aside can leave.
#[tokio::test]
async fn a_death_while_a_file_is_set_aside_is_harmless() {
    for step in 0..4 {
        let home = scratch();
        let path = home.path().join("streams.db");
        fs::write(&path, vec![7; 8192]).unwrap();
        for suffix in ["-wal", "-shm", ".damaged", ".damaged-wal"] {
            fs::write(beside(&path, suffix), vec![7; 64]).unwrap();
        }
        let steps: [&dyn Fn(); 4] = [
            &|| fs::remove_file(beside(&path, ".damaged-wal")).unwrap(),
            &|| fs::rename(beside(&path, "-wal"), beside(&path, ".damaged-wal")).unwrap(),
            &|| fs::remove_file(beside(&path, "-shm")).unwrap(),
            &|| fs::rename(&path, beside(&path, ".damaged")).unwrap(),
        ];
        steps.iter().take(step + 1).for_each(|done| done());
        let journal = open(&path);
        put(&journal, [entry(Content::Event(event(1)))]).await.unwrap();
        assert_eq!(kept(&journal, 1).await, [1], "{step}");
        check_sums(&journal).await;
    }
}

/// Overwrites everything but the first page, as a bad disk would.
async fn ruin(journal: &Journal, path: &Path) {
    on_writer(journal, |connection| {
        connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap();
        connection.execute_batch("PRAGMA cache_size = 0; PRAGMA shrink_memory").unwrap();
    })
    .await;
    let mut content = fs::read(path).unwrap();
    content[4096..].fill(0xa5);
    fs::write(path, content).unwrap();
}

#[tokio::test]
async fn damage_that_is_met_while_writing_is_mended_at_once() {
    let (_home, path, journal) = in_a_file();
    put(&journal, (1..=200).map(|sequence| entry(Content::Event(event(sequence))))).await.unwrap();
    ruin(&journal, &path).await;
    let lost = put(&journal, [entry(Content::Event(event(201)))]).await;
    assert_eq!(lost, Err(Lost::Unavailable));
    assert_eq!(journal.counters().set_aside, 1);
    put(&journal, [entry(Content::Event(event(202)))]).await.unwrap();
    assert_eq!(kept(&journal, 1).await, [202], "readers are on the new file, too");
    check_sums(&journal).await;
}

#[tokio::test]
async fn damage_that_is_met_while_reading_is_mended_at_once() {
    let (_home, path, journal) = in_a_file();
    put(&journal, (1..=200).map(|sequence| entry(Content::Event(event(sequence))))).await.unwrap();
    ruin(&journal, &path).await;
    assert!(journal.replay(key(1), stream(1), 0, 9).await.is_err());
    journal.flush().await.unwrap();
    assert_eq!(journal.counters().set_aside, 1);
    assert_eq!(kept(&journal, 1).await, []);
    put(&journal, [entry(Content::Event(event(202)))]).await.unwrap();
}

#[tokio::test]
async fn of_two_workers_that_meet_damage_one_begins_anew_and_the_other_follows() {
    let (_home, path, journal) = in_a_file();
    let other = open(&path);
    put(&journal, (1..=200).map(|sequence| entry(Content::Event(event(sequence))))).await.unwrap();
    assert_eq!(kept(&other, 1).await.len(), 200);
    ruin(&journal, &path).await;
    let _ = put(&journal, [entry(Content::Event(event(201)))]).await;
    put(&journal, [entry(Content::Event(event(202)))]).await.unwrap();
    // The other one has the old file still, and finds out.
    let _ = put(&other, [Entry { stream: stream(2), ..entry(Content::Event(event(1))) }]).await;
    put(&other, [Entry { stream: stream(2), ..entry(Content::Event(event(2))) }]).await.unwrap();
    assert_eq!((journal.counters().set_aside, other.counters().set_aside), (1, 0));
    assert_eq!((kept(&journal, 1).await, kept(&other, 1).await), (vec![202], vec![202]));
    assert_eq!(kept(&journal, 2).await, [2]);
}

#[tokio::test]
async fn c8_a_journal_that_was_begun_anew_is_silent_on_what_was_before() {
    let (_home, path, journal) = in_a_file();
    assert_eq!(journal.known_from().await.unwrap(), None, "no worker has begun with it");
    journal.attach(3).await.unwrap();
    journal.attach(4).await.unwrap();
    assert_eq!(journal.known_from().await.unwrap(), Some(3), "the next worker knows what the one before it was told");
    put(&journal, (1..=200).map(|sequence| entry(Content::Event(event(sequence))))).await.unwrap();
    ruin(&journal, &path).await;
    let _ = put(&journal, [entry(Content::Event(event(201)))]).await;
    assert_eq!(journal.counters().set_aside, 1);
    assert_eq!(journal.known_from().await.unwrap(), None, "in the middle of a life: of that nobody knows all");
    drop(journal);
    let journal = open(&path);
    journal.attach(5).await.unwrap();
    assert_eq!(journal.known_from().await.unwrap(), Some(5));
    let other = beside(&path, ".other");
    fs::write(&other, vec![7; 8192]).unwrap();
    let journal = begun_anew(&other, "between two lives").await;
    journal.attach(6).await.unwrap();
    assert_eq!(journal.known_from().await.unwrap(), Some(6));
    let in_memory = Journal::open(Place::Memory, ring()).unwrap();
    in_memory.attach(7).await.unwrap();
    assert_eq!(in_memory.known_from().await.unwrap(), Some(7));
}
