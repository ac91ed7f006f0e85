//! S14: rows that were changed, moved, or written by somebody else are refused, kept, and reported. SQLite only: in
//! memory nobody gets at them.

use super::*;
use crate::codec;
use crate::keys::Purpose;
use crate::{Fault, Filter, Page, RowKind, Stored};

/// A ledger with sessions 1 and 2 live, 3 and 4 ended, and a resume record of 1.
async fn ledger() -> (tempfile::TempDir, Store) {
    let home = tempfile::tempdir().unwrap();
    let store = Store::open(Place::Sqlite(home.path().join("ledger.db")), ring()).unwrap();
    store.begin_epoch(at(0), 1).await.unwrap();
    for number in 1..=4 {
        store.commit(vec![insert(number)]).await.unwrap();
    }
    store
        .commit(vec![end(3, 2), end(4, 2), Write::Resume(resume(1)), Write::Owe(owed()), Write::Card(card())])
        .await
        .unwrap();
    (home, store)
}

/// Executes `sql` on the ledger behind the store's back.
async fn tamper(store: &Store, sql: &str) {
    let Store::Sqlite(sqlite) = store else { panic!("only SQLite") };
    let sql = sql.to_owned();
    sqlite.tamper(move |connection| connection.execute_batch(&sql).unwrap()).await;
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// How session `number` is unreadable, if it is.
async fn fault(store: &Store, number: u32) -> Option<(RowKind, Fault)> {
    match store.find(key(number)).await.unwrap() {
        Stored::Unreadable(found) => {
            assert_eq!(found.key, key(number));
            Some((found.kind, found.fault))
        }
        Stored::Live(_) | Stored::Ended(_) | Stored::Absent => None,
    }
}

async fn rows(store: &Store, table: &str) -> i64 {
    let Store::Sqlite(sqlite) = store else { panic!("only SQLite") };
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    let sql = format!("SELECT count(*) FROM {table}");
    sqlite
        .tamper(move |connection| sender.send(connection.query_row(&sql, [], |row| row.get(0)).unwrap()).unwrap())
        .await;
    receiver.recv().unwrap()
}

#[tokio::test]
async fn s14_every_flipped_byte_of_a_body_or_a_code_is_noticed() {
    let body = codec::encode_session(&record(1));
    let signed = crate::rows::sign_session(&ring(), &record(1));
    for (column, bytes) in [("body", body), ("mac", signed.signature.mac.to_vec())] {
        let (_home, store) = ledger().await;
        for index in 0..bytes.len() {
            let mut flipped = bytes.clone();
            flipped[index] ^= 0x20;
            tamper(
                &store,
                &format!(
                    "UPDATE sessions SET {column} = x'{}' WHERE key = x'{}'",
                    hex(&flipped),
                    hex(key(1).as_bytes())
                ),
            )
            .await;
            assert_eq!(fault(&store, 1).await, Some((RowKind::Session, Fault::Tampered)), "{column} {index}");
        }
        assert_eq!(store.counters().rows_refused, bytes.len() as u64);
        assert_eq!(rows(&store, "sessions").await, 2, "it is kept");
        tamper(
            &store,
            &format!("UPDATE sessions SET {column} = x'{}' WHERE key = x'{}'", hex(&bytes), hex(key(1).as_bytes())),
        )
        .await;
        assert_eq!(fault(&store, 1).await, None, "and served again once it is right again");
    }
}

#[tokio::test]
async fn s14_columns_that_disagree_with_what_is_signed_are_noticed() {
    for column in [
        "state = 2",
        "server = 'other'",
        "principal = 'token:bob'",
        "agent = 'other'",
        "agent = NULL",
        "generation = 7",
        "deadline = -1",
        "seen_at = -1",
    ] {
        let (_home, store) = ledger().await;
        tamper(&store, &format!("UPDATE sessions SET {column} WHERE key = x'{}'", hex(key(1).as_bytes()))).await;
        assert_eq!(fault(&store, 1).await, Some((RowKind::Session, Fault::Tampered)), "{column}");
    }
    for column in ["state = 4", "state = 1", "server = 'other'", "principal = 'token:bob'", "agent = NULL"] {
        let (_home, store) = ledger().await;
        tamper(&store, &format!("UPDATE tombstones SET {column} WHERE key = x'{}'", hex(key(3).as_bytes()))).await;
        assert_eq!(fault(&store, 3).await, Some((RowKind::Tombstone, Fault::Tampered)), "{column}");
        assert!(store.commit(vec![insert(3)]).await.is_err(), "S7: it blocks its id all the same");
    }
    let (_home, store) = ledger().await;
    tamper(&store, "UPDATE sessions SET key_id = 9").await;
    assert_eq!(fault(&store, 1).await, Some((RowKind::Session, Fault::UnknownKey { key_id: 9 })));
    tamper(&store, "UPDATE sessions SET key_id = -1").await;
    assert_eq!(fault(&store, 1).await, Some((RowKind::Session, Fault::Tampered)));
}

#[tokio::test]
async fn s14_rows_that_changed_places_are_misfiled() {
    for (table, kind, pair) in [("sessions", RowKind::Session, [1, 2]), ("tombstones", RowKind::Tombstone, [3, 4])] {
        let (_home, store) = ledger().await;
        let [a, b] = pair.map(|number| hex(key(number).as_bytes()));
        tamper(
            &store,
            &format!(
                "CREATE TEMP TABLE was AS SELECT * FROM {table};
                 UPDATE {table} SET (key_id, mac, body) = (SELECT key_id, mac, body FROM was WHERE was.key = x'{b}') WHERE key = x'{a}';
                 UPDATE {table} SET (key_id, mac, body) = (SELECT key_id, mac, body FROM was WHERE was.key = x'{a}') WHERE key = x'{b}'"
            ),
        )
        .await;
        for number in pair {
            assert_eq!(fault(&store, number).await, Some((kind, Fault::Misfiled)));
        }
        tamper(&store, &format!("UPDATE {table} SET mac = (SELECT mac FROM was WHERE was.key = {table}.key)")).await;
        for number in pair {
            assert_eq!(fault(&store, number).await, Some((kind, Fault::Tampered)), "a body alone is no row");
        }
        assert_eq!(rows(&store, table).await, 2);
    }
}

#[tokio::test]
async fn s14_a_row_of_a_newer_version_is_kept_for_it() {
    let (_home, store) = ledger().await;
    let mut body = codec::encode_session(&record(1));
    body[1] = 9;
    let mac = ring().sign(Purpose::Session, key(1).as_bytes(), &body).mac;
    tamper(
        &store,
        &format!(
            "UPDATE sessions SET body = x'{}', mac = x'{}' WHERE key = x'{}'",
            hex(&body),
            hex(&mac),
            hex(key(1).as_bytes())
        ),
    )
    .await;
    assert_eq!(fault(&store, 1).await, Some((RowKind::Session, Fault::Future { version: 9 })));
    body[1] = 1;
    body.truncate(40);
    let mac = ring().sign(Purpose::Session, key(1).as_bytes(), &body).mac;
    tamper(
        &store,
        &format!(
            "UPDATE sessions SET body = x'{}', mac = x'{}' WHERE key = x'{}'",
            hex(&body),
            hex(&mac),
            hex(key(1).as_bytes())
        ),
    )
    .await;
    assert_eq!(fault(&store, 1).await, Some((RowKind::Session, Fault::Unparsable)));
}

#[tokio::test]
async fn s14_a_tombstone_can_not_be_turned_into_a_session() {
    let (_home, store) = ledger().await;
    let key_3 = hex(key(3).as_bytes());
    // The old row put back: the tombstone wins, and nothing can be written upon it.
    let (old, columns) = (crate::rows::sign_session(&ring(), &record(3)), crate::rows::SessionColumns::of(&record(3)));
    tamper(
        &store,
        &format!(
            "INSERT INTO sessions VALUES (x'{key_3}', {}, 'files', 'token:alice', 'scout', 1, {}, {}, 0, 1, x'{}', x'{}')",
            columns.state,
            columns.deadline,
            columns.seen_at,
            hex(&old.signature.mac),
            hex(&old.body)
        ),
    )
    .await;
    assert_eq!(store.find(key(3)).await.unwrap(), Stored::Ended(stone(3, 2)));
    let update = Write::Session(Change::Update(SessionRecord { generation: 2, ..record(3) }));
    assert!(store.commit(vec![update]).await.is_err());
    assert_eq!(store.overdue(at(1000), 10).await.unwrap(), [key(1), key(2)]);
    store.commit(vec![Write::Purge { now: at(1000) }]).await.unwrap();
    assert_eq!(store.find(key(3)).await.unwrap(), Stored::Ended(stone(3, 2)), "S7: not purged while a row exists");
    assert_eq!(store.find(key(4)).await.unwrap(), Stored::Absent, "while others are");
}

#[tokio::test]
async fn s7_an_unreadable_tombstone_blocks_its_id_and_outlives_the_purge() {
    let (_home, store) = ledger().await;
    tamper(&store, &format!("UPDATE tombstones SET mac = zeroblob(32) WHERE key = x'{}'", hex(key(3).as_bytes())))
        .await;
    let expected = Some((RowKind::Tombstone, Fault::Tampered));
    assert_eq!(fault(&store, 3).await, expected);
    assert!(store.commit(vec![insert(3)]).await.is_err(), "the id is blocked");
    // A column that promises an early purge counts for nothing either.
    tamper(&store, "UPDATE tombstones SET keep_until = 0").await;
    store.commit(vec![Write::Purge { now: at(50) }]).await.unwrap();
    assert_eq!(fault(&store, 3).await, expected);
    assert_eq!(store.find(key(4)).await.unwrap(), Stored::Ended(stone(4, 2)));
    store.commit(vec![Write::Purge { now: at(100) }]).await.unwrap();
    assert_eq!(fault(&store, 3).await, expected);
    assert_eq!(store.find(key(4)).await.unwrap(), Stored::Absent);
}

#[tokio::test]
async fn s9_a_bad_row_stops_nobody() {
    let (_home, store) = ledger().await;
    tamper(
        &store,
        &format!("UPDATE sessions SET body = x'00', deadline = 0 WHERE key = x'{}'", hex(key(1).as_bytes())),
    )
    .await;
    tamper(
        &store,
        "UPDATE resumes SET sealed = x'00'; UPDATE owed SET sealed = x'00'; UPDATE cards SET sealed = x'00'",
    )
    .await;
    assert_eq!(store.next_deadline().await.unwrap(), Some(at(60)), "the reaper is not called for it again and again");
    assert_eq!(store.overdue(at(60), 1).await.unwrap(), [key(2)]);
    assert_eq!(store.resume_record(key(1)).await.unwrap(), None);
    assert_eq!(store.owed(OwedDelete::NEVER, 10).await.unwrap(), []);
    assert_eq!(store.card(&server(), [5; 32]).await, None);
    let listed = store.list(&Page { after: None, limit: 10, filter: Filter::default() }).await.unwrap();
    assert_eq!(listed.len(), 4);
    assert!(matches!(listed[0].stored, Stored::Unreadable(_)));
    assert!(store.counters().rows_refused >= 6);
    let again = store.reopen().unwrap();
    again.begin_epoch(at(1), 2).await.unwrap();
    assert_eq!(again.count().await.unwrap(), 2);
}
