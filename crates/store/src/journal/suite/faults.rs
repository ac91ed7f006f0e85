//! What only a file can show: modes, secrets at rest, full disks, queues that are full, rows that were changed.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::sync::Barrier;

use super::super::queue::{JOBS_QUEUED_MAX, QUEUED_BYTES_MAX};
use super::*;
use crate::journal::{Failure, OpenError};
use crate::mishap::{self, Mishap};

/// The journal and what SQLite keeps beside it.
fn files(path: &Path) -> Vec<PathBuf> {
    let companions = ["", "-wal", "-shm"].map(|suffix| PathBuf::from(format!("{}{suffix}", path.display())));
    companions.into_iter().filter(|path| path.exists()).collect()
}

#[tokio::test]
async fn i6_every_file_is_private_and_a_wider_one_is_repaired() {
    let (_home, path, journal) = in_a_file();
    put(&journal, [entry(Content::Event(event(1)))]).await.unwrap();
    let mode = |path: &PathBuf| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(files(&path).iter().map(mode).collect::<Vec<_>>(), [0o600; 3]);
    for file in files(&path) {
        fs::set_permissions(file, fs::Permissions::from_mode(0o666)).unwrap();
    }
    open(&path);
    assert_eq!(files(&path).iter().map(mode).collect::<Vec<_>>(), [0o600; 3]);
}

#[tokio::test]
async fn i6_what_belongs_to_another_user_is_refused() {
    let (_home, path, journal) = in_a_file();
    drop(journal);
    let somebody = rustix::process::geteuid().as_raw() + 1;
    if std::os::unix::fs::chown(&path, Some(somebody), None).is_err() {
        // Only the superuser gives files away, so only its files can be given to it.
        return;
    }
    let refused = Journal::open(Place::Sqlite(path), ring());
    assert!(matches!(refused, Err(OpenError::Foreign { owner, .. }) if owner == somebody), "{refused:?}");
}

#[tokio::test]
async fn i6_no_payload_and_no_upstream_event_id_is_at_rest_in_the_clear() {
    let (_home, path, journal) = in_a_file();
    let canary = "canary-0123456789";
    let message = Bytes::from(format!("{{\"token\":\"{canary}\"}}"));
    let source = Some(Source::EventId(canary.into()));
    let call = Call { name: Some(canary.into()), request: Bytes::from(canary), ..call() };
    let question = Question { original: Bytes::from(canary), ..question(7) };
    let event = Event { message, source, ..event(1) };
    put(&journal, [Content::Call(call), Content::Question(Box::new(question), event)].map(entry)).await.unwrap();
    let answer = Answer { message: Bytes::from(canary), ..answer(1) };
    journal.answered(key(1), stream(7), answer).await.unwrap();
    put(&journal, [entry(Content::Reached(Source::EventId(canary.into())))]).await.unwrap();
    let holds = |needle: &[u8]| {
        let content: Vec<u8> = files(&path).iter().flat_map(|file| fs::read(file).unwrap()).collect();
        content.windows(needle.len()).any(|window| window == needle)
    };
    assert!(!holds(canary.as_bytes()));
    assert!(holds(key(1).as_bytes()), "the search finds what is there");
}

#[tokio::test]
async fn a_full_disk_loses_the_batch_and_is_over_when_it_is_over() {
    let (_home, _path, journal) = in_a_file();
    put(&journal, [entry(Content::Event(event(1)))]).await.unwrap();
    tamper(&journal, "PRAGMA max_page_count = 1").await;
    let large = Event { message: vec![b'x'; 100_000].into(), ..last(2) };
    // Passing events make room, and here they are all that there is.
    assert_eq!(put(&journal, [entry(Content::Event(large.clone()))]).await, Err(Lost::Full));
    let claimed = journal.claim(key(9), stream(9), worker(4), at(0)).await;
    assert!(matches!(claimed, Ok(None) | Err(Failure::Full(_))), "{claimed:?}");
    assert!(journal.counters().lost_full >= 1);
    tamper(&journal, "PRAGMA max_page_count = 1000000").await;
    put(&journal, [entry(Content::Event(large.clone()))]).await.unwrap();
    assert_eq!(journal.replay(key(1), stream(1), 1, 9).await.unwrap(), [large]);
    check_sums(&journal).await;
}

#[tokio::test]
async fn a_journal_that_can_not_be_written_loses_and_recovers() {
    let (_home, _path, journal) = in_a_file();
    put(&journal, [entry(Content::Event(event(1))), entry(asking(7))]).await.unwrap();
    tamper(&journal, "PRAGMA query_only = 1").await;
    assert_eq!(put(&journal, [entry(Content::Event(event(8)))]).await, Err(Lost::Unavailable));
    let failures = [
        journal.claim(key(1), stream(1), worker(4), at(0)).await.map(|_| ()),
        journal.answered(key(1), stream(7), answer(0)).await.map(|_| ()),
        journal.forward(key(1), stream(7), 4).await.map(|_| ()),
        journal.forwarded(key(1), stream(7)).await,
        journal.forget(key(1)).await,
        journal.trim(at(1_000_000)).await.map(|_| ()),
    ];
    for failure in failures {
        assert!(matches!(failure, Err(Failure::Unavailable(_))), "{failure:?}");
    }
    assert_eq!(kept(&journal, 1).await, [1, 7], "what is there is read");
    tamper(&journal, "PRAGMA query_only = 0").await;
    put(&journal, [entry(Content::Event(event(8)))]).await.unwrap();
    assert_eq!(kept(&journal, 1).await, [1, 7, 8]);
}

/// A batch of three streams, each with something else.
fn mixed() -> Vec<super::super::entry::Handed> {
    let of = |number, content| Entry { stream: stream(number), ..entry(content) };
    let entries = [
        of(1, Content::Event(event(2))),
        of(2, Content::Call(call())),
        of(2, Content::Event(last(1))),
        Entry { session: key(2), ..of(3, Content::Event(event(1))) },
        Entry { session: key(2), ..of(3, asking(7)) },
    ];
    entries.into_iter().map(|entry| super::super::entry::Handed::new(entry, None)).collect()
}

async fn rows(journal: &Journal) -> Vec<i64> {
    let mut rows = Vec::new();
    for table in ["sessions", "streams", "calls", "events", "questions"] {
        rows.push(number(journal, &format!("SELECT count(*) FROM {table}")).await);
    }
    rows
}

#[tokio::test]
async fn a_failure_at_any_statement_of_a_batch_keeps_all_of_it_or_nothing() {
    let count = {
        let (_home, _path, journal) = in_a_file();
        put(&journal, [entry(Content::Event(event(1)))]).await.unwrap();
        on_writer(&journal, |_| mishap::arm(None)).await;
        journal.act(|writer: &mut Writer| writer.keep(&mixed())).await.unwrap();
        on_writer(&journal, |_| mishap::disarm()).await.len()
    };
    assert!(count > 20, "{count}");
    for mishap in [Mishap::Full, Mishap::FullRolledBack, Mishap::ReadOnly] {
        for step in 0..count {
            let (_home, _path, journal) = in_a_file();
            put(&journal, [entry(Content::Event(Event { weight: Weight::Essential, ..event(1) }))]).await.unwrap();
            on_writer(&journal, move |_| mishap::arm(Some((step, mishap)))).await;
            let outcomes = journal.act(|writer: &mut Writer| writer.outcomes(&mixed())).await.unwrap();
            on_writer(&journal, |connection| {
                mishap::disarm();
                connection.pragma_update(None, "query_only", false).unwrap();
            })
            .await;
            let context = format!("{mishap:?} at {step}");
            let kept = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
            let expected = if kept == 0 { vec![1, 1, 0, 1, 0] } else { vec![2, 3, 1, 5, 1] };
            assert!(kept == 0 || kept == 5, "{context}: {outcomes:?}");
            assert_eq!(rows(&journal).await, expected, "{context}");
            check_sums(&journal).await;
            let again = journal.act(|writer: &mut Writer| writer.outcomes(&mixed())).await.unwrap();
            assert!(kept == 5 || again.iter().all(Result::is_ok), "{context}: {again:?}");
            assert_eq!(rows(&journal).await, [2, 3, 1, 5, 1], "{context}");
        }
    }
}

/// Holds the writer until the returned barrier is met, so that what is handed over meanwhile waits.
async fn hold(journal: &Journal) -> (Arc<Barrier>, tokio::task::JoinHandle<()>) {
    let (held, release) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
    let holder = {
        let (journal, held, release) = (journal.clone(), Arc::clone(&held), Arc::clone(&release));
        #[expect(clippy::disallowed_methods, reason = "a test without the runtime's task helper")]
        tokio::spawn(async move {
            on_writer(&journal, move |_| {
                held.wait();
                release.wait();
            })
            .await;
        })
    };
    tokio::task::spawn_blocking(move || held.wait()).await.unwrap();
    (release, holder)
}

#[tokio::test]
async fn what_finds_the_queue_full_is_lost_at_once_and_counted() {
    let (_home, _path, journal) = in_a_file();
    let (release, holder) = hold(&journal).await;
    let count = JOBS_QUEUED_MAX as u64 + 5;
    let outcomes = (1..=count).map(|sequence| journal.append(entry(Content::Event(event(sequence))), None));
    let lost = outcomes.filter(|outcome| *outcome == Err(Lost::Crowded)).count();
    assert_eq!((lost, journal.counters().lost_crowded), (5, 5));
    assert_eq!(journal.counters().queue_entries, JOBS_QUEUED_MAX as u64);
    tokio::task::spawn_blocking(move || release.wait()).await.unwrap();
    holder.await.unwrap();
    journal.flush().await.unwrap();
    let counters = journal.counters();
    assert_eq!((counters.queue_entries, counters.queue_bytes), (0, 0));
    assert_eq!(counters.entries_kept, JOBS_QUEUED_MAX as u64);
    put(&journal, [entry(Content::Event(event(count + 1)))]).await.unwrap();
}

#[tokio::test]
async fn the_queue_is_bounded_in_bytes() {
    let (_home, _path, journal) = in_a_file();
    let (release, holder) = hold(&journal).await;
    let message = Bytes::from(vec![b'x'; 4 << 20]);
    let large = |number| {
        let content = Content::Event(Event { message: message.clone(), ..last(1) });
        journal.append(Entry { session: key(number), ..entry(content) }, None)
    };
    let taken = (1..=40).map(large).take_while(Result::is_ok).count() as u64;
    assert_eq!(taken, QUEUED_BYTES_MAX / (4 << 20) - 1);
    assert!(journal.counters().queue_bytes <= QUEUED_BYTES_MAX);
    tokio::task::spawn_blocking(move || release.wait()).await.unwrap();
    holder.await.unwrap();
    journal.flush().await.unwrap();
    assert_eq!(journal.counters().queue_bytes, 0);
    assert_eq!(large(50), Ok(Accepted::Queued));
}

#[tokio::test]
async fn whatever_waits_shares_a_transaction_and_each_stream_hears_once() {
    let (_home, _path, journal) = in_a_file();
    let (release, holder) = hold(&journal).await;
    let notes: Vec<_> = (0..10).map(|_| Arc::new(Notes::default())).collect();
    for sequence in 1..=20 {
        for (number, notes) in (1..).zip(&notes) {
            let of = Entry { stream: stream(number), ..entry(Content::Event(event(sequence))) };
            journal.append(of, Some(Arc::clone(notes) as Arc<dyn Witness>)).unwrap();
        }
    }
    assert!(notes.iter().all(|notes| notes.taken().is_empty()), "nothing is durable yet");
    tokio::task::spawn_blocking(move || release.wait()).await.unwrap();
    holder.await.unwrap();
    journal.flush().await.unwrap();
    assert_eq!(journal.counters().commits, 1);
    notes.iter().for_each(|notes| assert_eq!(notes.taken(), [Heard::Durable(20)]));
}

#[tokio::test]
async fn one_streams_refusal_touches_no_other_of_its_batch() {
    let (_home, _path, journal) = in_a_file();
    let (release, holder) = hold(&journal).await;
    let (good, bad) = (Arc::new(Notes::default()), Arc::new(Notes::default()));
    let append = |number, sequence, counter, notes: &Arc<Notes>| {
        let content = Content::Event(event(sequence));
        let of = Entry { stream: stream(number), claim: worker(counter), ..entry(content) };
        journal.append(of, Some(Arc::clone(notes) as Arc<dyn Witness>)).unwrap();
    };
    append(1, 1, 3, &good);
    append(2, 5, 3, &bad);
    append(2, 6, 4, &bad);
    append(2, 5, 3, &bad);
    append(1, 2, 3, &good);
    tokio::task::spawn_blocking(move || release.wait()).await.unwrap();
    holder.await.unwrap();
    journal.flush().await.unwrap();
    assert_eq!(good.taken(), [Heard::Durable(2)]);
    assert_eq!(bad.taken(), [Heard::Lost(6, Lost::Claimed), Heard::Lost(5, Lost::Misplaced), Heard::Durable(5)]);
}

#[tokio::test]
async fn what_was_changed_or_moved_is_refused_and_counted() {
    let sealed = "UPDATE events SET sealed = (SELECT sealed FROM events WHERE sequence = 1) WHERE sequence = 2";
    for sql in [
        sealed,
        "UPDATE events SET sealed = zeroblob(length(sealed)) WHERE sequence = 2",
        "UPDATE events SET sealed = x'' WHERE sequence = 2",
        "UPDATE events SET key_id = 9 WHERE sequence = 2",
        "UPDATE events SET key_id = -1 WHERE sequence = 2",
        "UPDATE events SET sequence = 7 WHERE sequence = 2",
        "UPDATE events SET weight = 1 WHERE sequence = 2",
        "UPDATE events SET ending = 1 WHERE sequence = 2",
        "UPDATE events SET at = 1 WHERE sequence = 2",
        "UPDATE events SET stream = (SELECT id FROM streams WHERE number = 2) WHERE sequence = 2",
    ] {
        let (_home, _path, journal) = in_a_file();
        put(&journal, (1..=3).map(|sequence| entry(Content::Event(event(sequence))))).await.unwrap();
        put(&journal, [Entry { stream: stream(2), ..entry(Content::Event(event(9))) }]).await.unwrap();
        tamper(&journal, sql).await;
        assert_eq!(kept(&journal, 1).await, [1, 3], "{sql}");
        assert_eq!(kept(&journal, 2).await, [9], "{sql}");
        assert!(journal.counters().rows_refused > 0, "{sql}");
    }
}

#[tokio::test]
async fn calls_sources_and_questions_that_were_changed_are_refused_and_counted() {
    let (_home, _path, journal) = in_a_file();
    put(&journal, [Content::Call(call()), Content::Event(event(1))].map(entry)).await.unwrap();
    put(&journal, [7, 8].map(|number| entry(asking(number)))).await.unwrap();
    tamper(&journal, "UPDATE calls SET sealed = x'00'; UPDATE streams SET source = x'00'").await;
    tamper(&journal, "UPDATE questions SET deadline = 1 WHERE number = 7").await;
    let record = journal.find(key(1), stream(1)).await.unwrap().unwrap();
    assert_eq!((record.call, record.source, record.last_sequence), (None, None, 8));
    assert_eq!(journal.open_questions(at(100), 9).await.unwrap().len(), 1);
    assert_eq!(journal.counters().rows_refused, 3);
}
