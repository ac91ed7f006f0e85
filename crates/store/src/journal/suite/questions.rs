//! R6: a question of a server is answered once, over all crashes, and none is forgotten at its deadline.

use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::journal::{Answered, Asked, Unforwarded};

/// The question of that number, in the next event of its stream.
fn asked(number: u64) -> Entry {
    static SEQUENCE: AtomicU64 = AtomicU64::new(1);
    entry(Content::Question(Box::new(question(number)), event(SEQUENCE.fetch_add(1, Ordering::Relaxed))))
}

#[tokio::test]
async fn r6_of_all_who_answer_one_is_the_first() {
    on_each(async |journal| {
        put(&journal, [asked(7), asked(8)]).await.unwrap();
        assert_eq!(journal.answered(key(1), stream(7), answer(5)).await.unwrap(), Answered::First);
        assert_eq!(journal.answered(key(1), stream(7), answer(6)).await.unwrap(), Answered::Again);
        assert_eq!(journal.answered(key(1), stream(9), answer(6)).await.unwrap(), Answered::Unasked);
        assert_eq!(
            journal.answered(key(2), stream(8), answer(6)).await.unwrap(),
            Answered::Unasked,
            "another session's"
        );
        put(&journal, [asked(7)]).await.unwrap();
        assert_eq!(
            journal.answered(key(1), stream(7), answer(6)).await.unwrap(),
            Answered::Again,
            "asked again or not"
        );
        assert_eq!(journal.answered(key(1), stream(8), answer(6)).await.unwrap(), Answered::First);
    })
    .await;
}

#[tokio::test]
async fn r6_a_question_leads_back_and_is_open_until_it_is_answered() {
    on_each(async |journal| {
        put(&journal, [asked(9), asked(7), asked(8)]).await.unwrap();
        let expected = |number| Asked { session: key(1), on: stream(1), question: question(number), answered_at: None };
        assert_eq!(journal.questions(key(1), 9).await.unwrap(), [9, 8, 7].map(expected));
        assert_eq!(journal.open_questions(at(8), 9).await.unwrap(), [7, 8].map(expected));
        assert_eq!(journal.open_questions(at(8), 1).await.unwrap(), [expected(7)]);
        assert_eq!(journal.open_questions(at(6), 9).await.unwrap(), []);
        journal.answered(key(1), stream(7), answer(5)).await.unwrap();
        assert_eq!(journal.open_questions(at(8), 9).await.unwrap(), [expected(8)]);
        let answered = Asked { answered_at: Some(at(5)), ..expected(7) };
        assert_eq!(journal.questions(key(1), 9).await.unwrap(), [expected(9), expected(8), answered]);
        assert_eq!(journal.questions(key(1), 1).await.unwrap(), [expected(9)]);
        assert_eq!(journal.questions(key(2), 9).await.unwrap(), []);
    })
    .await;
}

#[tokio::test]
async fn r6_two_workers_that_answer_at_once_are_told_apart() {
    let (_home, path, journal) = in_a_file();
    let numbers = 1..=50;
    put(&journal, numbers.clone().map(asked)).await.unwrap();
    let other = open(&path);
    for number in numbers {
        let (left, right) = tokio::join!(
            journal.answered(key(1), stream(number), answer(1)),
            other.answered(key(1), stream(number), answer(1))
        );
        let firsts = [left.unwrap(), right.unwrap()].into_iter().filter(|answered| *answered == Answered::First);
        assert_eq!(firsts.count(), 1);
    }
}

#[tokio::test]
async fn r6_an_answer_is_known_as_such_after_a_restart() {
    let (_home, path, journal) = in_a_file();
    put(&journal, [asked(7)]).await.unwrap();
    assert_eq!(journal.answered(key(1), stream(7), answer(5)).await.unwrap(), Answered::First);
    drop(journal);
    assert_eq!(open(&path).answered(key(1), stream(7), answer(5)).await.unwrap(), Answered::Again);
}

#[tokio::test]
async fn r6_a_question_is_kept_with_its_event_or_not_at_all() {
    on_each(async |journal| {
        put(&journal, [entry(Content::Event(event(7)))]).await.unwrap();
        assert_eq!(put(&journal, [entry(asking(5))]).await, Err(Lost::Misplaced));
        assert_eq!(journal.questions(key(1), 9).await.unwrap(), []);
        let elsewhere = Entry { claim: worker(2), ..entry(asking(8)) };
        assert_eq!(put(&journal, [elsewhere]).await, Err(Lost::Claimed));
        assert_eq!(journal.questions(key(1), 9).await.unwrap(), []);
        put(&journal, [entry(asking(8))]).await.unwrap();
        assert_eq!(journal.questions(key(1), 9).await.unwrap().len(), 1);
        assert_eq!(kept(&journal, 1).await, [7, 8]);
        check_sums(&journal).await;
    })
    .await;
}

#[tokio::test]
async fn r6_an_answer_is_kept_until_it_is_forwarded_and_forwarded_by_one_worker() {
    on_each(async |journal| {
        put(&journal, [asked(7), asked(8), asked(9)]).await.unwrap();
        for number in [7, 8] {
            journal.answered(key(1), stream(number), answer(5)).await.unwrap();
            let later = Answer { message: Bytes::from_static(b"another"), ..answer(6) };
            journal.answered(key(1), stream(number), later).await.unwrap();
        }
        assert!(journal.unforwarded(0..3, 9).await.unwrap().is_empty(), "the worker that took them is at it");
        let expected =
            |number, by| Unforwarded { session: key(1), question: question(number), by, message: answer(5).message };
        assert!(journal.unforwarded(0..4, 9).await.unwrap() == [7, 8].map(|number| expected(number, 3)));
        assert!(journal.unforwarded(3..4, 1).await.unwrap() == [expected(7, 3)]);
        assert!(journal.forward(key(1), stream(7), 3).await.unwrap(), "its own");
        assert!(journal.forward(key(1), stream(7), 4).await.unwrap());
        assert!(!journal.forward(key(1), stream(7), 3).await.unwrap(), "a later worker does it");
        assert!(!journal.forward(key(1), stream(9), 4).await.unwrap(), "it is not answered");
        assert!(journal.unforwarded(0..4, 9).await.unwrap() == [expected(8, 3)]);
        assert!(journal.unforwarded(4..5, 9).await.unwrap() == [expected(7, 4)]);
        journal.forwarded(key(1), stream(7)).await.unwrap();
        journal.forwarded(key(1), stream(7)).await.unwrap();
        assert!(!journal.forward(key(1), stream(7), 5).await.unwrap());
        assert!(journal.unforwarded(0..9, 9).await.unwrap() == [expected(8, 3)]);
        journal.give_back(key(1), stream(8), 4).await.unwrap();
        assert!(journal.unforwarded(3..4, 9).await.unwrap() == [expected(8, 3)], "it was not that worker's");
        journal.give_back(key(1), stream(8), 3).await.unwrap();
        assert!(journal.unforwarded(0..1, 9).await.unwrap() == [expected(8, 0)], "it is anybody's");
        assert_eq!(journal.answered(key(1), stream(7), answer(9)).await.unwrap(), Answered::Again);
        tamper(&journal, "UPDATE questions SET answer = zeroblob(length(answer)) WHERE number = 8").await;
        assert!(journal.unforwarded(0..9, 9).await.unwrap().is_empty());
        assert_eq!(journal.counters().rows_refused, 1);
    })
    .await;
}

#[tokio::test]
async fn r6_an_answer_that_is_too_large_is_noted_and_not_kept() {
    on_each(async |journal| {
        put(&journal, [asked(7)]).await.unwrap();
        let large = Answer { message: vec![b'x'; crate::journal::MESSAGE_BYTES_MAX + 1].into(), ..answer(5) };
        assert_eq!(journal.answered(key(1), stream(7), large).await.unwrap(), Answered::First);
        assert_eq!(journal.answered(key(1), stream(7), answer(6)).await.unwrap(), Answered::Again);
        assert!(journal.unforwarded(0..9, 9).await.unwrap().is_empty());
    })
    .await;
}

#[tokio::test]
async fn c8_whose_answers_are_owed_is_told_by_session_whoever_is_to_forward_them() {
    on_each(async |journal| {
        put(&journal, [asked(7), asked(8), asked(9)]).await.unwrap();
        assert_eq!(journal.owed_answers(key(1)).await.unwrap(), [].into());
        for number in [7, 8] {
            journal.answered(key(1), stream(number), answer(5)).await.unwrap();
        }
        assert_eq!(journal.owed_answers(key(1)).await.unwrap(), [stream(7), stream(8)].into());
        assert_eq!(journal.owed_answers(key(2)).await.unwrap(), [].into(), "another session's");
        journal.forward(key(1), stream(8), 9).await.unwrap();
        journal.forwarded(key(1), stream(7)).await.unwrap();
        assert_eq!(journal.owed_answers(key(1)).await.unwrap(), [stream(8)].into());
    })
    .await;
}
