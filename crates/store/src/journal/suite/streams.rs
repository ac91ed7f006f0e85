//! R1, R2, R4: what is kept of streams, in which order, and who may append.

use super::*;
use crate::journal::{Ending, Failure, Head, StreamRecord};

#[tokio::test]
async fn r1_what_is_durable_is_replayed_in_order_after_any_event() {
    on_each(async |journal| {
        let notes = Arc::new(Notes::default());
        let witness = || Some(Arc::clone(&notes) as Arc<dyn Witness>);
        journal.append(entry(Content::Call(call())), None).unwrap();
        let accepted = journal.append(entry(Content::Event(event(1))), witness()).unwrap();
        for sequence in 2..=9 {
            journal.append(entry(Content::Event(event(sequence))), witness()).unwrap();
        }
        journal.append(entry(Content::Event(last(10))), witness()).unwrap();
        journal.flush().await.unwrap();
        if accepted == Accepted::Queued {
            assert_eq!(notes.taken().last(), Some(&Heard::Durable(10)));
        } else {
            assert_eq!(notes.taken(), [], "nobody is told of what was done before the call returned");
        }
        for after in 0..=10 {
            let events = journal.replay(key(1), stream(1), after, 100).await.unwrap();
            let expected: Vec<_> = (after + 1..=9).map(event).chain((after < 10).then(|| last(10))).collect();
            assert_eq!(events, expected);
        }
        assert_eq!(journal.replay(key(1), stream(1), 3, 2).await.unwrap(), [event(4), event(5)]);
        assert_eq!(journal.replay(key(1), stream(1), 0, 0).await.unwrap(), []);
        assert_eq!(journal.replay(key(1), stream(1), u64::MAX, 9).await.unwrap(), []);
        check_sums(&journal).await;
    })
    .await;
}

#[tokio::test]
async fn r4_where_many_streams_stand_is_told_at_once_and_in_their_order() {
    on_each(async |journal| {
        put(&journal, [entry(Content::Event(event(7)))]).await.unwrap();
        put(&journal, [Entry { stream: stream(2), ..entry(Content::Call(call())) }]).await.unwrap();
        put(&journal, [Entry { stream: stream(2), ..entry(Content::Ended(Ending::Silent)) }]).await.unwrap();
        journal.claim(key(1), stream(2), worker(4), at(1)).await.unwrap();
        let asked = [(1, 2), (2, 1), (1, 1), (1, 3)].map(|(session, number)| (key(session), stream(number)));
        let open = Head { claim: worker(3), last_sequence: 7, ending: None };
        let ended = Head { claim: worker(4), last_sequence: 0, ending: Some(Ending::Silent) };
        assert_eq!(journal.heads(asked.into()).await.unwrap(), [Some(ended), None, Some(open), None]);
        assert_eq!(journal.heads(Vec::new()).await.unwrap(), []);
    })
    .await;
}

#[tokio::test]
async fn r2_no_stream_shows_anything_of_another() {
    on_each(async |journal| {
        put(&journal, [entry(Content::Event(event(1)))]).await.unwrap();
        put(&journal, [Entry { stream: stream(2), ..entry(Content::Event(event(2))) }]).await.unwrap();
        put(&journal, [Entry { session: key(2), ..entry(Content::Event(event(3))) }]).await.unwrap();
        assert_eq!(kept(&journal, 1).await, [1]);
        assert_eq!(kept(&journal, 2).await, [2]);
        assert_eq!(kept(&journal, 3).await, []);
        assert_eq!(journal.replay(key(2), stream(1), 0, 9).await.unwrap(), [event(3)]);
        assert_eq!(journal.find(key(2), stream(2)).await.unwrap(), None);
        assert_eq!(journal.streams(key(1), 9).await.unwrap().len(), 2);
        assert_eq!(journal.streams(key(1), 1).await.unwrap().len(), 1);
    })
    .await;
}

#[tokio::test]
async fn r4_a_call_is_known_with_how_far_it_came() {
    on_each(async |journal| {
        assert_eq!(journal.find(key(1), stream(1)).await.unwrap(), None);
        put(&journal, [entry(Content::Call(call()))]).await.unwrap();
        let mut expected = StreamRecord {
            stream: stream(1),
            call: Some(call()),
            claim: worker(3),
            last_sequence: 0,
            delivered: 0,
            ending: None,
            source: None,
            changed_at: at(0),
        };
        assert_eq!(journal.find(key(1), stream(1)).await.unwrap().as_ref(), Some(&expected));
        put(&journal, [entry(Content::Event(event(1))), entry(Content::Event(event(2)))]).await.unwrap();
        (expected.last_sequence, expected.source, expected.changed_at) = (2, Some(Source::Frame(20)), at(2));
        assert_eq!(journal.find(key(1), stream(1)).await.unwrap().as_ref(), Some(&expected));
        let reached = Source::EventId("upstream-7".into());
        put(&journal, [entry(Content::Reached(reached.clone())), entry(Content::Delivered(99))]).await.unwrap();
        (expected.delivered, expected.source) = (2, Some(reached));
        assert_eq!(journal.find(key(1), stream(1)).await.unwrap().as_ref(), Some(&expected));
        put(&journal, [Entry { at: at(4), ..entry(Content::Delivered(0)) }]).await.unwrap();
        expected.changed_at = at(4);
        assert_eq!(journal.find(key(1), stream(1)).await.unwrap().as_ref(), Some(&expected));
        put(&journal, [entry(Content::Event(Event { source: None, ..last(5) }))]).await.unwrap();
        (expected.last_sequence, expected.ending, expected.changed_at) = (5, Some(Ending::Answered), at(5));
        assert_eq!(journal.find(key(1), stream(1)).await.unwrap().as_ref(), Some(&expected));
        assert_eq!(journal.streams(key(1), 9).await.unwrap(), [expected]);
    })
    .await;
}

#[tokio::test]
async fn r1_a_place_is_taken_once_and_nothing_follows_the_last_event() {
    on_each(async |journal| {
        put(&journal, [entry(Content::Event(event(4)))]).await.unwrap();
        for sequence in [0, 3, 4, u64::MAX] {
            let outcome = put(&journal, [entry(Content::Event(event(sequence)))]).await;
            assert_eq!(outcome, Err(Lost::Misplaced), "{sequence}");
        }
        put(&journal, [entry(Content::Ended(Ending::Silent)), entry(Content::Ended(Ending::Answered))]).await.unwrap();
        assert_eq!(put(&journal, [entry(Content::Event(event(5)))]).await, Err(Lost::Misplaced));
        let record = journal.find(key(1), stream(1)).await.unwrap().unwrap();
        assert_eq!((record.ending, record.last_sequence), (Some(Ending::Silent), 4));
        assert_eq!(kept(&journal, 1).await, [4]);
        assert_eq!(journal.counters().lost_otherwise, 5);
    })
    .await;
}

#[tokio::test]
async fn two_workers_never_interleave_in_one_stream() {
    on_each(async |journal| {
        let of = |counter, sequence| Entry { claim: worker(counter), ..entry(Content::Event(event(sequence))) };
        put(&journal, [of(3, 1)]).await.unwrap();
        assert_eq!(put(&journal, [of(4, 2)]).await, Err(Lost::Claimed), "it has not claimed it yet");
        let record = journal.claim(key(1), stream(1), worker(4), at(9)).await.unwrap().unwrap();
        assert_eq!((record.claim, record.last_sequence), (worker(4), 1));
        assert_eq!(put(&journal, [of(3, 2)]).await, Err(Lost::Claimed), "the one before it may not go on");
        put(&journal, [of(4, 2)]).await.unwrap();
        let refused = journal.claim(key(1), stream(1), worker(3), at(9)).await;
        assert!(matches!(refused, Err(Failure::Claimed { by }) if by == worker(4)), "{refused:?}");
        let twin = Entry { claim: Epoch { nonce: 8, ..worker(4) }, ..entry(Content::Event(event(3))) };
        assert_eq!(put(&journal, [twin]).await, Err(Lost::Claimed), "the number alone is no right");
        let again = journal.claim(key(1), stream(1), worker(4), at(9)).await.unwrap().unwrap();
        assert_eq!(again.last_sequence, 2);
        // Its other streams are its own still.
        put(&journal, [Entry { stream: stream(2), ..of(3, 1) }]).await.unwrap();
        assert_eq!(journal.counters().lost_claimed, 3);
    })
    .await;
}

#[tokio::test]
async fn a_worker_that_leaves_goes_on_with_its_own_streams_beside_its_successor() {
    let (_home, path, leaving) = in_a_file();
    let next = open(&path);
    let of = |counter, number, sequence| {
        let content = Content::Event(event(sequence));
        Entry { claim: worker(counter), stream: stream(number), ..entry(content) }
    };
    put(&leaving, [of(3, 1, 1), of(3, 2, 1)]).await.unwrap();
    next.claim(key(1), stream(1), worker(4), at(9)).await.unwrap().unwrap();
    for sequence in 2..=20 {
        let mine = put(&leaving, [of(3, 2, sequence)]);
        let (mine, taken, theirs) = tokio::join!(
            mine,
            put(&leaving, [of(3, 1, sequence)]),
            put(&next, [of(4, 1, sequence), of(4, 3, sequence)])
        );
        assert_eq!((mine, taken, theirs), (Ok(()), Err(Lost::Claimed), Ok(())));
    }
    for number in 1..=3 {
        let first = if number == 3 { 2 } else { 1 };
        assert_eq!(kept(&next, number).await, (first..=20).collect::<Vec<_>>());
    }
    check_sums(&next).await;
}

#[tokio::test]
async fn a_stream_is_claimed_before_anything_is_known_of_it() {
    on_each(async |journal| {
        assert_eq!(journal.claim(key(1), stream(1), worker(4), at(0)).await.unwrap(), None);
        let late = entry(Content::Event(event(1)));
        assert_eq!(
            put(&journal, [late]).await,
            Err(Lost::Claimed),
            "what an earlier worker had in hand comes too late"
        );
        let record = journal.find(key(1), stream(1)).await.unwrap().unwrap();
        assert_eq!((record.claim, record.call), (worker(4), None));
    })
    .await;
}

#[tokio::test]
async fn what_is_noted_of_a_stream_that_is_gone_makes_no_row() {
    on_each(async |journal| {
        let notes = [Content::Reached(Source::Frame(1)), Content::Delivered(1), Content::Ended(Ending::Silent)];
        put(&journal, notes.map(entry)).await.unwrap();
        assert_eq!(journal.find(key(1), stream(1)).await.unwrap(), None);
        assert_eq!(number(&journal, "SELECT count(*) FROM sessions").await, 0);
    })
    .await;
}

#[tokio::test]
async fn ids_of_any_size_are_told_apart() {
    on_each(async |journal| {
        for (number, sequence) in [(u64::MAX, 1), (u64::MAX - 1, 2), (i64::MAX as u64, 3), (1 << 63, 4)] {
            let id = StreamId { epoch: number, number };
            put(&journal, [Entry { stream: id, ..entry(Content::Event(event(sequence))) }]).await.unwrap();
            assert_eq!(journal.find(key(1), id).await.unwrap().unwrap().stream, id);
            assert_eq!(journal.replay(key(1), id, 0, 9).await.unwrap(), [event(sequence)]);
        }
    })
    .await;
}

#[tokio::test]
async fn large_messages_are_kept_up_to_a_bound_and_replayed_in_parts() {
    on_each(async |journal| {
        let large = |sequence, bytes| Event { message: vec![b'x'; bytes].into(), ..event(sequence) };
        let sizes = [3 << 20, 3 << 20, 100];
        for (sequence, bytes) in (1..).zip(sizes) {
            put(&journal, [entry(Content::Event(large(sequence, bytes)))]).await.unwrap();
        }
        let outcome = put(&journal, [entry(Content::Event(large(4, super::super::MESSAGE_BYTES_MAX + 1)))]).await;
        assert_eq!(outcome, Err(Lost::TooLarge));
        let (mut after, mut found) = (0, Vec::new());
        loop {
            let part = journal.replay(key(1), stream(1), after, 100).await.unwrap();
            let Some(newest) = part.last() else { break };
            after = newest.sequence;
            found.push(part.iter().map(|event| event.message.len()).collect::<Vec<_>>());
        }
        assert_eq!(found, [vec![3 << 20, 3 << 20], vec![100]]);
    })
    .await;
}

#[tokio::test]
async fn forgetting_a_session_leaves_nothing_of_it_and_everything_of_others() {
    on_each(async |journal| {
        let of = |session, number, content| Entry { session: key(session), stream: stream(number), ..entry(content) };
        for number in 1..=200 {
            let entries = (1..=5).map(|sequence| of(1, number, Content::Event(event(sequence))));
            put(&journal, entries).await.unwrap();
        }
        put(&journal, [of(1, 1, Content::Call(call())), of(1, 1, asking(7))]).await.unwrap();
        put(&journal, [of(2, 1, asking(7))]).await.unwrap();
        check_sums(&journal).await;
        journal.forget(key(1)).await.unwrap();
        journal.forget(key(1)).await.unwrap();
        check_sums(&journal).await;
        assert_eq!(journal.streams(key(1), 9).await.unwrap(), []);
        assert_eq!(journal.questions(key(1), 9).await.unwrap(), []);
        for table in ["sessions", "streams", "events", "questions"] {
            assert_eq!(number(&journal, &format!("SELECT count(*) FROM {table}")).await, 1, "{table}");
        }
    })
    .await;
}

#[tokio::test]
async fn everything_is_there_after_the_journal_is_opened_again() {
    let (_home, path, journal) = in_a_file();
    put(&journal, [entry(Content::Call(call())), entry(Content::Event(event(1)))]).await.unwrap();
    put(&journal, [entry(asking(7))]).await.unwrap();
    let before = journal.find(key(1), stream(1)).await.unwrap();
    drop(journal);
    let journal = open(&path);
    assert_eq!(journal.find(key(1), stream(1)).await.unwrap(), before);
    assert_eq!(kept(&journal, 1).await, [1, 7]);
    assert_eq!(journal.questions(key(1), 9).await.unwrap()[0].question, question(7));
}

#[tokio::test]
async fn s14_keys_rotate_and_what_was_sealed_before_stays_readable() {
    let home = tempfile::tempdir().unwrap();
    let (keys, path) = (home.path().join("keys"), home.path().join("streams.db"));
    let mut next = 0_u8;
    let mut entropy = move |bytes: &mut [u8]| {
        next += 1;
        bytes.fill(next);
    };
    let first = Arc::new(Keyring::load_or_create(&keys, &mut entropy).unwrap());
    let journal = Journal::open(Place::Sqlite(path), first).unwrap();
    put(&journal, [entry(Content::Event(event(1)))]).await.unwrap();
    assert_eq!(journal.keys_in_use().await.unwrap(), [1].into());
    journal.rotate(Arc::new(Keyring::rotate(&keys, &mut entropy).unwrap())).unwrap();
    put(&journal, [entry(Content::Event(event(2)))]).await.unwrap();
    assert_eq!(journal.keys_in_use().await.unwrap(), [1, 2].into());
    assert_eq!(kept(&journal, 1).await, [1, 2]);
    let other = journal.rotate(ring());
    assert!(matches!(other, Err(crate::RotateError::KeyLost { .. })), "{other:?}");
}

#[tokio::test]
async fn t2_the_calls_that_a_worker_stays_for_are_found_and_no_others() {
    on_each(async |journal| {
        let noted = |session, number, claim, content| Entry {
            session: key(session),
            stream: stream(number),
            claim: worker(claim),
            ..entry(content)
        };
        put(&journal, [noted(1, 1, 3, Content::Call(call())), noted(2, 2, 3, Content::Call(call()))]).await.unwrap();
        put(&journal, [noted(2, 2, 3, Content::Event(event(1)))]).await.unwrap();
        // Ended, another's, a listening stream, without a call: none of them is a call in flight of this worker.
        put(&journal, [noted(1, 3, 3, Content::Call(call())), noted(1, 3, 3, Content::Event(last(1)))]).await.unwrap();
        put(&journal, [noted(1, 4, 4, Content::Call(call()))]).await.unwrap();
        put(&journal, [noted(1, StreamId::LISTEN, 3, Content::Call(call()))]).await.unwrap();
        put(&journal, [noted(1, 5, 3, Content::Event(event(1)))]).await.unwrap();
        put(&journal, [noted(1, 6, 3, Content::Call(call()))]).await.unwrap();
        journal.claim(key(1), stream(6), worker(4), at(1)).await.unwrap();
        let found = journal.open_calls(worker(3), 9).await.unwrap();
        let found: Vec<_> = found.into_iter().map(|(session, record)| (session, record.stream, record.call)).collect();
        assert_eq!(found, [(key(1), stream(1), Some(call())), (key(2), stream(2), Some(call()))]);
        assert_eq!(journal.open_calls(worker(3), 1).await.unwrap().len(), 1);
        assert_eq!(journal.open_calls(Epoch { nonce: 8, ..worker(3) }, 9).await.unwrap(), []);
    })
    .await;
}

#[tokio::test]
async fn c8_what_came_of_a_child_is_found_by_its_frames_on_every_stream_of_a_session() {
    on_each(async |journal| {
        let of = |number: u64, content| Entry { stream: stream(number), ..entry(content) };
        let unsourced = Event { source: None, ..event(3) };
        put(
            &journal,
            [of(1, Content::Event(event(1))), of(1, Content::Event(event(2))), of(1, Content::Event(unsourced))],
        )
        .await
        .unwrap();
        put(&journal, [of(2, Content::Event(event(5)))]).await.unwrap();
        let other = Entry { session: key(2), ..of(1, Content::Event(event(7))) };
        put(&journal, [other]).await.unwrap();
        let found = async |since: u64, limit: usize| {
            let events = journal.child_events(key(1), at(since), limit).await.unwrap();
            events.into_iter().map(|event| event.sequence).collect::<Vec<_>>()
        };
        assert_eq!(found(0, 9).await, [5, 2, 1]);
        assert_eq!(found(2, 9).await, [5, 2], "an earlier child's frames have the same numbers");
        assert_eq!(found(0, 2).await, [5, 2], "the newest streams first");
        assert_eq!(found(0, 0).await, [0_u64; 0]);
    })
    .await;
}
