//! What the ledger is asked for often, or at the start, goes through an index and not through all rows.

use super::*;
use crate::Filter;
use crate::sqlite::statements;

/// How SQLite goes about `sql`.
fn plan(connection: &rusqlite::Connection, sql: &str) -> String {
    let mut statement = connection.prepare(&format!("EXPLAIN QUERY PLAN {sql}")).unwrap();
    let parameters = statement.parameter_count();
    let values = vec![rusqlite::types::Value::Null; parameters];
    let rows = statement.query_map(rusqlite::params_from_iter(values), |row| row.get::<_, String>(3)).unwrap();
    rows.map(Result::unwrap).collect::<Vec<_>>().join("; ")
}

#[tokio::test]
async fn s10_deadlines_drains_and_counts_are_read_from_an_index() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("ledger.db");
    drop(Store::open(Place::Sqlite(path.clone()), ring()).unwrap());
    let connection = rusqlite::Connection::open(&path).unwrap();
    let draining = Filter { state: Some(State::Draining), ..Filter::default() };
    let of_one = Filter { principal: Some("token:alice".into()), ..Filter::default() };
    for (sql, index) in [
        (statements::BY_DEADLINE.to_owned(), "SEARCH sessions USING INDEX sessions_by_deadline (deadline<?)"),
        (statements::BY_PRINCIPAL.to_owned(), "SCAN sessions USING COVERING INDEX sessions_by_principal"),
        (statements::BY_STATE.to_owned(), "SCAN tombstones USING COVERING INDEX tombstones_by_state"),
        (statements::DRAINING.to_owned(), "sessions USING COVERING INDEX sessions_draining"),
        (statements::candidates_sql(&draining), "SEARCH sessions USING COVERING INDEX sessions_draining (key>?)"),
        (
            statements::candidates_sql(&of_one),
            "SEARCH sessions USING COVERING INDEX sessions_by_principal (principal=? AND key>?)",
        ),
        (
            statements::candidates_sql(&Filter::default()),
            "sessions USING COVERING INDEX sqlite_autoindex_sessions_1 (key>?)",
        ),
        (statements::AUDIT.to_owned(), "SEARCH audit USING INTEGER PRIMARY KEY (rowid<?)"),
        (statements::OWED.to_owned(), "SEARCH owed USING INDEX owed_by_next_at (next_at<?)"),
        (statements::OWED_OF.to_owned(), "SEARCH owed USING INDEX owed_by_session (session=?)"),
        (statements::PURGE_AUDIT.to_owned(), "SCAN audit"),
    ] {
        let plan = plan(&connection, &sql);
        assert!(plan.contains(index), "{sql}: {plan}");
        assert!(!plan.contains("TEMP B-TREE"), "{sql}: {plan}");
    }
}

/// Neither the reaper nor a start looks at more rows than it has to do with.
#[tokio::test]
async fn s10_the_next_deadline_is_one_statement_and_one_row() {
    let (_home, [_, store]) = ledgers();
    store.begin_epoch(at(0), 1).await.unwrap();
    store.commit((0..500).map(insert).collect()).await.unwrap();
    let before = store.counters();
    assert_eq!(store.next_deadline().await.unwrap(), Some(at(60)));
    assert_eq!(store.overdue(at(59), 256).await.unwrap(), []);
    assert_eq!(store.count_by_principal().await.unwrap(), [(Principal::Token("alice".into()), 500)]);
    let after = store.counters();
    assert_eq!((after.statements - before.statements, after.reads - before.reads), (3, 3));
}
