//! R6: a question of a server is answered once, over all crashes, and none is forgotten at its deadline.

use super::*;
use crate::journal::{Answered, Asked};

fn asked(number: u64) -> Entry {
    entry(Content::Question(question(number)))
}

#[tokio::test]
async fn r6_of_all_who_answer_one_is_the_first() {
    on_each(async |journal| {
        put(&journal, [asked(7), asked(8)]).await.unwrap();
        assert_eq!(journal.answered(key(1), stream(7), at(5)).await.unwrap(), Answered::First);
        assert_eq!(journal.answered(key(1), stream(7), at(6)).await.unwrap(), Answered::Again);
        assert_eq!(journal.answered(key(1), stream(9), at(6)).await.unwrap(), Answered::Unasked);
        assert_eq!(journal.answered(key(2), stream(8), at(6)).await.unwrap(), Answered::Unasked, "another session's");
        put(&journal, [asked(7)]).await.unwrap();
        assert_eq!(journal.answered(key(1), stream(7), at(6)).await.unwrap(), Answered::Again, "asked again or not");
        assert_eq!(journal.answered(key(1), stream(8), at(6)).await.unwrap(), Answered::First);
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
        journal.answered(key(1), stream(7), at(5)).await.unwrap();
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
            journal.answered(key(1), stream(number), at(1)),
            other.answered(key(1), stream(number), at(1))
        );
        let firsts = [left.unwrap(), right.unwrap()].into_iter().filter(|answered| *answered == Answered::First);
        assert_eq!(firsts.count(), 1);
    }
}

#[tokio::test]
async fn r6_an_answer_is_known_as_such_after_a_restart() {
    let (_home, path, journal) = in_a_file();
    put(&journal, [asked(7)]).await.unwrap();
    assert_eq!(journal.answered(key(1), stream(7), at(5)).await.unwrap(), Answered::First);
    drop(journal);
    assert_eq!(open(&path).answered(key(1), stream(7), at(5)).await.unwrap(), Answered::Again);
}
