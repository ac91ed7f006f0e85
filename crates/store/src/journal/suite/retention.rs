//! R1: retention by age, count and bytes. Nothing that somebody still waits for goes before its time.

use super::super::Trimmed;
use super::super::trim::{AGE_MAX, FILE_BYTES_WANTED, SESSION_BYTES_MAX, SESSION_EVENTS_MAX};
use super::*;

/// An entry for the stream `number` of session 1.
fn of(number: u64, content: Content) -> Entry {
    Entry { stream: stream(number), ..entry(content) }
}

/// A stream of one response, delivered or not, that changed at `seconds`.
async fn answered(journal: &Journal, number: u64, seconds: u64, delivered: bool) {
    let response = of(number, Content::Event(Event { at: at(seconds), ..last(1) }));
    put(journal, [response]).await.unwrap();
    if delivered {
        put(journal, [Entry { at: at(seconds), ..of(number, Content::Delivered(1)) }]).await.unwrap();
    }
}

/// Which streams of session 1 are kept.
async fn streams(journal: &Journal) -> Vec<u64> {
    journal.streams(key(1), usize::MAX).await.unwrap().iter().map(|record| record.stream.number).collect()
}

#[tokio::test]
async fn r1_everything_goes_with_its_age_and_nothing_before() {
    on_each(async |journal| {
        answered(&journal, 1, 0, false).await;
        answered(&journal, 2, 100, false).await;
        put(&journal, [of(3, Content::Call(call())), of(3, Content::Event(event(1)))]).await.unwrap();
        put(&journal, [of(3, Content::Event(Event { at: at(100), ..event(2) }))]).await.unwrap();
        let day = AGE_MAX.as_secs();
        assert_eq!(journal.trim(at(day)).await.unwrap(), Trimmed::default());
        let trimmed = journal.trim(at(day + 50)).await.unwrap();
        assert_eq!(trimmed, Trimmed { streams: 1, events: 2, questions: 0 });
        assert_eq!(streams(&journal).await, [2, 3]);
        assert_eq!(kept(&journal, 3).await, [2], "a stream that goes on loses what is too old");
        check_sums(&journal).await;
        journal.trim(at(2 * day)).await.unwrap();
        assert_eq!(number(&journal, "SELECT count(*) FROM sessions").await, 0);
        check_sums(&journal).await;
    })
    .await;
}

#[tokio::test]
async fn r1_a_session_with_too_many_events_loses_what_is_worth_the_least() {
    on_each(async |journal| {
        answered(&journal, 1, 5, true).await;
        answered(&journal, 2, 3, true).await;
        answered(&journal, 3, 1, false).await;
        // A stream that goes on: a delivered question, and progress.
        let essential = Event { weight: Weight::Essential, at: at(6), ..event(1) };
        put(&journal, [of(4, Content::Event(essential))]).await.unwrap();
        let passing = |sequence| of(4, Content::Event(Event { at: at(6), ..event(sequence) }));
        put(&journal, (2..=SESSION_EVENTS_MAX - 2).map(passing)).await.unwrap();
        assert_eq!(journal.trim(at(7)).await.unwrap().events, 1, "one was too much");
        assert_eq!(streams(&journal).await, [1, 3, 4], "of those delivered the oldest");
        put(&journal, (SESSION_EVENTS_MAX - 1..=SESSION_EVENTS_MAX + 300).map(passing)).await.unwrap();
        journal.trim(at(7)).await.unwrap();
        assert_eq!(streams(&journal).await, [3, 4]);
        let left = kept(&journal, 4).await;
        assert_eq!((left.len() as u64, left[0]), (SESSION_EVENTS_MAX - 1, 1), "passing events, the oldest first");
        assert_eq!(left[1], left.last().unwrap() - SESSION_EVENTS_MAX + 3);
        check_sums(&journal).await;
    })
    .await;
}

#[tokio::test]
async fn r1_a_response_that_nobody_took_outlives_any_number_of_others() {
    on_each(async |journal| {
        let count = SESSION_EVENTS_MAX + 50;
        put(&journal, (1..=count).map(|number| of(number, Content::Event(last(1))))).await.unwrap();
        assert_eq!(journal.trim(at(7)).await.unwrap(), Trimmed::default());
        assert_eq!(streams(&journal).await.len() as u64, count);
        // Another session's excess is found beyond it.
        let more = (1..=count).map(|sequence| Entry { session: key(2), ..of(1, Content::Event(event(sequence))) });
        put(&journal, more).await.unwrap();
        assert_eq!(journal.trim(at(7)).await.unwrap().events, 50);
        put(&journal, (1..=60).map(|number| of(number, Content::Delivered(1)))).await.unwrap();
        assert_eq!(journal.trim(at(7)).await.unwrap().streams, 50);
        check_sums(&journal).await;
    })
    .await;
}

#[tokio::test]
async fn r1_a_session_with_too_many_bytes_loses_what_is_worth_the_least() {
    on_each(async |journal| {
        let large = |sequence| Event { message: vec![b'x'; 1 << 20].into(), at: at(1), ..event(sequence) };
        put(&journal, (1..=12).map(|sequence| of(1, Content::Event(large(sequence))))).await.unwrap();
        put(&journal, [of(1, Content::Event(Event { weight: Weight::Essential, ..large(13) }))]).await.unwrap();
        journal.trim(at(2)).await.unwrap();
        assert_eq!(kept(&journal, 1).await, (7..=13).collect::<Vec<_>>());
        assert!(number(&journal, "SELECT bytes FROM sessions").await <= i64::try_from(SESSION_BYTES_MAX).unwrap());
        check_sums(&journal).await;
    })
    .await;
}

#[tokio::test]
async fn a_session_that_does_not_read_is_refused_more_at_last() {
    on_each(async |journal| {
        let large = |number| {
            let message = vec![b'x'; 15 << 20].into();
            of(number, Content::Event(Event { message, ..last(1) }))
        };
        for number in 1..=4 {
            put(&journal, [large(number)]).await.unwrap();
        }
        assert_eq!(put(&journal, [large(5)]).await, Err(Lost::Overdrawn));
        put(&journal, [Entry { session: key(2), ..large(5) }]).await.unwrap();
        check_sums(&journal).await;
    })
    .await;
}

#[tokio::test]
async fn questions_are_known_for_a_while_after_they_were_answered() {
    on_each(async |journal| {
        put(&journal, [7, 8].map(|number| entry(asking(number)))).await.unwrap();
        journal.answered(key(1), stream(7), answer(10)).await.unwrap();
        assert_eq!(journal.trim(at(3600)).await.unwrap().questions, 0);
        assert_eq!(journal.trim(at(3611)).await.unwrap().questions, 1);
        assert_eq!(journal.open_questions(at(9), 9).await.unwrap().len(), 1, "an open one waits to be settled");
        assert_eq!(journal.trim(at(AGE_MAX.as_secs() + 9)).await.unwrap().questions, 1);
        check_sums(&journal).await;
    })
    .await;
}

#[tokio::test]
async fn the_bounds_in_the_schema_are_those_in_the_code() {
    on_each(async |journal| {
        let bounds = format!("events > {SESSION_EVENTS_MAX} OR bytes > {SESSION_BYTES_MAX}");
        let sql = format!("SELECT count(*) FROM sqlite_schema WHERE name = 'sessions_over' AND sql LIKE '%{bounds}%'");
        assert_eq!(number(&journal, &sql).await, 1);
    })
    .await;
}

/// The bound of the file is moved, not the file.
#[tokio::test]
async fn a_journal_at_its_bound_makes_room_by_itself() {
    on_each(async |journal| {
        let large = |number, delivered: bool| {
            let message = vec![b'x'; 1 << 20].into();
            let response = of(number, Content::Event(Event { message, ..last(1) }));
            [Some(response), delivered.then(|| of(number, Content::Delivered(1)))].into_iter().flatten()
        };
        put(&journal, large(1, false)).await.unwrap();
        for number in 2..=10 {
            put(&journal, large(number, true)).await.unwrap();
        }
        tamper(&journal, "PRAGMA max_page_count = 1").await;
        put(&journal, large(11, true)).await.unwrap();
        let left = streams(&journal).await;
        assert!(left.contains(&1) && left.contains(&11) && left.len() < 11, "{left:?}");
        check_sums(&journal).await;
        assert!(journal.counters().file_bytes < FILE_BYTES_WANTED);
    })
    .await;
}
