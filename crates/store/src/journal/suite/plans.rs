//! What is done for every batch, and what looks for a few rows among many, goes through an index.

use super::*;
use crate::journal::statements;

#[tokio::test]
async fn what_is_asked_often_is_read_from_an_index() {
    let journal = Journal::open(Place::Memory, ring()).unwrap();
    for (sql, scans) in [
        (statements::STANDING, false),
        (statements::RECORD, false),
        (statements::REPLAY, false),
        (statements::OPEN, false),
        (statements::UNFORWARDED, false),
        (statements::OWED, false),
        (statements::NEWEST, false),
        (statements::ANSWER, false),
        (statements::AGED_STREAMS, false),
        (statements::OVER, true),
        (statements::DONE, true),
        (statements::PASSING, true),
        (statements::ANSWERED_QUESTIONS, false),
        (statements::OVERDUE_QUESTIONS, false),
    ] {
        let plan = on_writer(&journal, move |connection| {
            let mut statement = connection.prepare(&format!("EXPLAIN QUERY PLAN {sql}")).unwrap();
            let values = vec![rusqlite::types::Value::Null; statement.parameter_count()];
            let rows = statement.query_map(rusqlite::params_from_iter(values), |row| row.get::<_, String>(3)).unwrap();
            rows.map(Result::unwrap).collect::<Vec<_>>().join("; ")
        })
        .await;
        assert!(!plan.contains("TEMP B-TREE"), "{sql}: {plan}");
        // A scan is of a partial index, which has those rows only that are looked for.
        let whole = plan.split("; ").filter(|step| step.starts_with("SCAN") && !(scans && step.contains("USING")));
        assert_eq!(whole.count(), 0, "{sql}: {plan}");
    }
}

#[tokio::test]
async fn a_batch_looks_each_stream_up_once() {
    let journal = Journal::open(Place::Memory, ring()).unwrap();
    put(&journal, [entry(Content::Event(event(1)))]).await.unwrap();
    let entries: Vec<_> = (2..=101)
        .map(|sequence| super::super::entry::Handed::new(entry(Content::Event(event(sequence))), None))
        .collect();
    let before = journal.counters().statements;
    journal.act(move |writer: &mut Writer| writer.keep(&entries)).await.unwrap();
    // BEGIN, the look-up, a hundred events, the stream, its source, the session, COMMIT.
    assert_eq!(journal.counters().statements - before, 106);
}
