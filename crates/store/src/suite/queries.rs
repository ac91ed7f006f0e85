//! What operators ask for: lists by filter, counts by principal, the audit trail, owed deletes.

use mainstay_core::audit::{Action, Actor, AuditEntry};

use super::*;
use crate::{AuditPage, Filter, Label, Legibility, Listed, Page, Stored};

fn named(number: u32) -> SessionRecord {
    let servers = ["files", "tickets"];
    let principals = [Principal::Anonymous, Principal::Agent("scout".into()), Principal::Token("alice".into())];
    let agents = [None, Some("scout"), Some("builder"), Some("scout")];
    let [server, principal, agent] = [2, 3, 4].map(|kinds| number as usize % kinds);
    SessionRecord {
        server: ServerName::parse(servers[server]).unwrap(),
        principal: principals[principal].clone(),
        agent: agents[agent].map(Into::into),
        ..record(number)
    }
}

fn stone_of(record: &SessionRecord, state: State) -> Tombstone {
    Tombstone {
        key: record.key,
        server: record.server.clone(),
        principal: record.principal.clone(),
        agent: record.agent.clone(),
        state,
        ..stone(0, 2)
    }
}

/// Sessions of every kind: ready, draining, and ended in each way.
async fn populate(store: &Store) {
    for number in 0..SESSIONS {
        let record = named(number);
        store.commit(vec![Write::Session(Change::Insert(record.clone()))]).await.unwrap();
        let draining = SessionRecord { state: State::Draining, generation: 2, ..record.clone() };
        let change = match number % 5 {
            0 => Change::Update(draining),
            1 => Change::End(stone_of(&record, State::Deleted)),
            2 => Change::End(stone_of(&record, State::Closed)),
            _ => continue,
        };
        store.commit(vec![Write::Session(change)]).await.unwrap();
    }
}

async fn listed(store: &Store, filter: &Filter, limit: usize) -> Vec<Listed> {
    let (mut after, mut all) = (None, Vec::new());
    loop {
        let page = store.list(&Page { after, limit, filter: filter.clone() }).await.unwrap();
        assert!(page.len() <= limit);
        let short = page.len() < limit;
        after = page.last().map(|row| row.key).or(after);
        all.extend(page);
        if short {
            return all;
        }
    }
}

fn every_filter() -> Vec<Filter> {
    let states = [None, Some(State::Ready), Some(State::Draining), Some(State::Deleted), Some(State::Expired)];
    let servers = [None, Some("files"), Some("nowhere")];
    let principals = [None, Some("anonymous"), Some("token:alice"), Some("token:' OR 1=1")];
    let agents = [None, Some("scout"), Some("nobody")];
    let mut filters = Vec::new();
    for (state, server) in states.into_iter().flat_map(|state| servers.map(|server| (state, server))) {
        for (principal, agent) in principals.into_iter().flat_map(|principal| agents.map(|agent| (principal, agent))) {
            filters.push(Filter {
                state,
                server: server.and_then(ServerName::parse),
                principal: principal.map(Into::into),
                agent: agent.map(Into::into),
                legibility: Legibility::Any,
            });
        }
    }
    filters
}

#[tokio::test]
async fn o1_a_filter_gives_exactly_what_it_names_whatever_the_page() {
    on_each(async |store| {
        populate(&store).await;
        let all = listed(&store, &Filter::default(), 1000).await;
        assert_eq!(all.len(), SESSIONS as usize);
        for filter in every_filter() {
            let expected: Vec<_> = all.iter().filter(|row| filter.wants(&row.stored)).cloned().collect();
            for limit in [1, 7, 1000] {
                assert_eq!(listed(&store, &filter, limit).await, expected, "{filter:?}");
            }
            let readable = Filter { legibility: Legibility::Readable, ..filter.clone() };
            assert_eq!(listed(&store, &readable, 1000).await, expected);
            let unreadable = Filter { legibility: Legibility::Unreadable, ..filter };
            assert_eq!(listed(&store, &unreadable, 1000).await, []);
        }
        let draining = Filter { state: Some(State::Draining), ..Filter::default() };
        assert_eq!(listed(&store, &draining, 1000).await.len(), SESSIONS as usize / 5);
    })
    .await;
}

#[tokio::test]
async fn o3_sessions_are_counted_by_state() {
    on_each(async |store| {
        assert!(store.count_by_state().await.unwrap().into_iter().all(|(_, count)| count == 0));
        populate(&store).await;
        let counted = store.count_by_state().await.unwrap();
        let states = [State::Ready, State::Draining, State::Deleted, State::Expired, State::Closed];
        assert_eq!(counted.iter().map(|(state, _)| *state).collect::<Vec<_>>(), states);
        for (state, count) in counted {
            let filter = Filter { state: Some(state), ..Filter::default() };
            assert_eq!(count, listed(&store, &filter, 1000).await.len() as u64, "{state:?}");
        }
    })
    .await;
}

#[tokio::test]
async fn s14_what_can_not_be_read_is_found_by_that() {
    let home = tempfile::tempdir().unwrap();
    let store = Store::open(Place::Sqlite(home.path().join("ledger.db")), ring()).unwrap();
    store.begin_epoch(at(0), 1).await.unwrap();
    populate(&store).await;
    let Store::Sqlite(sqlite) = &store else { panic!("only SQLite") };
    sqlite
        .tamper(|connection| {
            connection.execute("UPDATE sessions SET mac = zeroblob(32) WHERE key = ?1", [key(3).as_bytes()]).unwrap();
            connection.execute("UPDATE tombstones SET state = 5 WHERE key = ?1", [key(6).as_bytes()]).unwrap();
        })
        .await;
    let of = |state, legibility| Filter { state, legibility, ..Filter::default() };
    let keys = |rows: Vec<Listed>| rows.into_iter().map(|row| row.key).collect::<Vec<_>>();
    for limit in [1, 1000] {
        let unreadable = listed(&store, &of(None, Legibility::Unreadable), limit).await;
        assert!(unreadable.iter().all(|row| matches!(row.stored, Stored::Unreadable(_))));
        assert_eq!(keys(unreadable), [key(3), key(6)]);
        assert_eq!(listed(&store, &of(None, Legibility::Readable), limit).await.len(), SESSIONS as usize - 2);
    }
    // It is asked for by what its columns say.
    let closed = keys(listed(&store, &of(Some(State::Closed), Legibility::Unreadable), 10).await);
    assert_eq!(closed, [key(6)]);
    let deleted = keys(listed(&store, &of(Some(State::Deleted), Legibility::Any), 1000).await);
    assert!(!deleted.contains(&key(6)) && deleted.contains(&key(1)));
}

#[tokio::test]
async fn o1_the_labels_of_sessions_are_told_once_each_however_many_they_are() {
    on_each(async |store| {
        assert_eq!(store.labels(Label::Agent, 10).await.unwrap(), []);
        populate(&store).await;
        let told = async |label, limit| {
            let labels = store.labels(label, limit).await.unwrap();
            labels.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(told(Label::Agent, 10).await, ["builder", "scout"]);
        assert_eq!(told(Label::Principal, 10).await, ["agent:scout", "anonymous", "token:alice"]);
        assert_eq!(told(Label::Principal, 2).await.len(), 2);
        // Behind more ids than are looked at in one go.
        let last = SessionRecord { agent: Some("late".into()), ..record(u32::MAX) };
        store.commit((1000..2500).map(insert).collect()).await.unwrap();
        store.commit(vec![Write::Session(Change::Insert(last))]).await.unwrap();
        assert_eq!(told(Label::Agent, 10).await, ["builder", "late", "scout"]);
    })
    .await;
}

/// More ids than are given at once, live and ended: page by page each comes once, as when all of them are to end.
#[tokio::test]
async fn o1_more_than_a_thousand_sessions_are_listed_page_by_page_each_once() {
    on_each(async |store| {
        let all = 2 * u32::try_from(Page::ROWS_MAX).unwrap() + 345;
        store.commit((0..all).map(insert).collect()).await.unwrap();
        store.commit((0..all).step_by(3).map(|number| end(number, 2)).collect()).await.unwrap();
        for limit in [999, Page::ROWS_MAX, usize::MAX] {
            let (mut after, mut keys) = (None, Vec::new());
            for _ in 0..4 {
                let page = store.list(&Page { after, limit, filter: Filter::default() }).await.unwrap();
                assert!(page.len() <= Page::ROWS_MAX, "a page is bounded");
                after = page.last().map(|row| row.key).or(after);
                keys.extend(page.into_iter().map(|row| row.key));
            }
            assert_eq!(keys, (0..all).map(key).collect::<Vec<_>>(), "{limit}");
        }
        let ready = Filter { state: Some(State::Ready), ..Filter::default() };
        assert_eq!(listed(&store, &ready, 999).await.len(), (0..all).filter(|number| number % 3 != 0).count());
    })
    .await;
}

/// More ids than are looked at in one go, most of which nobody wants.
#[tokio::test]
async fn o1_a_rare_row_is_found_far_behind_others() {
    on_each(async |store| {
        for first in (0..2500).step_by(500) {
            store.commit((first..first + 500).map(insert).collect()).await.unwrap();
        }
        let rare = SessionRecord { agent: Some("rare".into()), ..record(9999) };
        store.commit(vec![Write::Session(Change::Insert(rare))]).await.unwrap();
        let filter = Filter { agent: Some("rare".into()), ..Filter::default() };
        let keys: Vec<_> = listed(&store, &filter, 10).await.into_iter().map(|row| row.key).collect();
        assert_eq!(keys, [key(9999)]);
        assert_eq!(listed(&store, &Filter::default(), 1000).await.len(), 2501);
    })
    .await;
}

#[tokio::test]
async fn s12_sessions_are_counted_by_principal() {
    on_each(async |store| {
        assert_eq!(store.count_by_principal().await.unwrap(), []);
        assert_eq!(store.count_by_server().await.unwrap(), []);
        let bob = Principal::Subject { issuer: "https://issuer/a".into(), subject: "bob#2".into() };
        for number in 0..7 {
            let principal = if number < 3 { bob.clone() } else { Principal::Token("alice".into()) };
            let row = SessionRecord { principal, ..record(number) };
            store.commit(vec![Write::Session(Change::Insert(row))]).await.unwrap();
        }
        store.commit(vec![end(6, 2)]).await.unwrap();
        let mut counts = store.count_by_principal().await.unwrap();
        counts.sort();
        assert_eq!(counts, [(Principal::Token("alice".into()), 3), (bob, 3)]);
    })
    .await;
}

fn entry(seconds: u64, action: Action) -> AuditEntry {
    AuditEntry::new(at(seconds), Actor::Client(Principal::Token("alice".into())), action).with_detail("detail")
}

async fn trail(store: &Store, page: AuditPage) -> Vec<(u64, AuditEntry)> {
    store.audit(&page).await.unwrap()
}

const NEWEST: AuditPage = AuditPage { before: None, limit: 1000, session: None, action: None };

#[tokio::test]
async fn i5_the_trail_is_read_from_its_newest_entry() {
    on_each(async |store| {
        let first = entry(1, Action::Opened).of_session(key(1)).at_server(server());
        let second = entry(2, Action::Opened).of_session(key(2));
        let third = AuditEntry { actor: Actor::Operator, ..entry(3, Action::Closed).of_session(key(1)) };
        let fourth = AuditEntry { actor: Actor::Gateway, ..entry(4, Action::KeysRotated) };
        store.commit(vec![insert(1), Write::Audit(first.clone())]).await.unwrap();
        let doomed = store.commit(vec![Write::Audit(second.clone()), insert(1)]).await;
        assert!(doomed.is_err());
        store.commit(vec![Write::Audit(second.clone())]).await.unwrap();
        store.commit(vec![Write::Audit(third.clone())]).await.unwrap();
        store.hint(Write::Audit(fourth.clone()));
        store.flush().await.unwrap();
        let all = [(4, fourth), (3, third), (2, second), (1, first)];
        assert_eq!(trail(&store, NEWEST).await, all);
        assert_eq!(trail(&store, AuditPage { limit: 2, ..NEWEST }).await, all[..2]);
        assert_eq!(trail(&store, AuditPage { before: Some(3), limit: 1, ..NEWEST }).await, all[2..3]);
        assert_eq!(trail(&store, AuditPage { before: Some(1), ..NEWEST }).await, []);
        let of_one = AuditPage { session: Some(key(1)), ..NEWEST };
        assert_eq!(trail(&store, of_one).await, [all[1].clone(), all[3].clone()]);
        assert_eq!(trail(&store, AuditPage { action: Some(Action::Opened), ..of_one }).await, all[3..]);
    })
    .await;
}

#[tokio::test]
async fn i5_old_entries_and_surplus_ones_go() {
    on_each(async |store| {
        store
            .commit(vec![Write::Audit(entry(0, Action::Opened)), Write::Audit(entry(9, Action::Deleted))])
            .await
            .unwrap();
        let old = at(0).plus(AuditEntry::RETENTION);
        store.commit(vec![Write::Purge { now: old.minus(Duration::from_millis(1)) }]).await.unwrap();
        assert_eq!(trail(&store, NEWEST).await.len(), 2);
        store.commit(vec![Write::Purge { now: old }]).await.unwrap();
        assert_eq!(trail(&store, NEWEST).await, [(2, entry(9, Action::Deleted))]);
        store.commit(vec![Write::Purge { now: old.plus(DAY) }]).await.unwrap();
        assert_eq!(trail(&store, NEWEST).await, []);
        // A number is not given twice.
        store.commit(vec![Write::Audit(entry(0, Action::Opened))]).await.unwrap();
        assert_eq!(trail(&store, NEWEST).await[0].0, 3);
    })
    .await;
}

#[tokio::test]
async fn i5_one_purge_is_bounded_and_the_trail_is_kept_at_its_length() {
    let (_home, stores) = ledgers();
    for store in stores {
        store.begin_epoch(at(0), 1).await.unwrap();
        let surplus = 1500;
        let total = AuditEntry::ENTRIES_MAX + surplus;
        let entries = (0..total).map(|_| Write::Audit(entry(0, Action::Opened))).collect();
        store.commit(entries).await.unwrap();
        let oldest = async || trail(&store, AuditPage { before: Some(1501), ..NEWEST }).await.last().map(|last| last.0);
        for first in [1001, 1501, 1501] {
            store.commit(vec![Write::Purge { now: at(1) }]).await.unwrap();
            let expected = (first < 1501).then_some(first);
            assert_eq!(oldest().await, expected);
        }
        assert_eq!(trail(&store, AuditPage { before: Some(1502), ..NEWEST }).await.len(), 1);
    }
}

#[tokio::test]
async fn s14_an_entry_that_was_changed_or_moved_is_left_out() {
    for tampering in [
        "UPDATE audit SET mac = zeroblob(32) WHERE id = 2",
        "UPDATE audit SET at = at + 1 WHERE id = 2",
        "UPDATE audit SET action = 2 WHERE id = 2",
        "UPDATE audit SET session = NULL WHERE id = 2",
        "UPDATE audit SET body = (SELECT body FROM audit WHERE id = 1) WHERE id = 2",
        "UPDATE audit SET (at, action, session, key_id, mac, body) =
            (SELECT at, action, session, key_id, mac, body FROM audit WHERE id = 1) WHERE id = 2",
    ] {
        let home = tempfile::tempdir().unwrap();
        let store = Store::open(Place::Sqlite(home.path().join("ledger.db")), ring()).unwrap();
        store.begin_epoch(at(0), 1).await.unwrap();
        let entries = [entry(1, Action::Opened), entry(2, Action::Closed)].map(|entry| entry.of_session(key(1)));
        store.commit(entries.clone().map(Write::Audit).into()).await.unwrap();
        let Store::Sqlite(sqlite) = &store else { panic!("only SQLite") };
        sqlite.tamper(move |connection| connection.execute_batch(tampering).unwrap()).await;
        assert_eq!(trail(&store, NEWEST).await, [(1, entries[0].clone())], "{tampering}");
        assert_eq!(store.counters().rows_refused, 1);
    }
}

#[tokio::test]
async fn u7_what_is_owed_is_listed_whole_and_can_be_given_up() {
    on_each(async |store| {
        let left = OwedDelete { attempts: OwedDelete::ATTEMPTS_MAX, next_at: OwedDelete::NEVER, ..owed() };
        store.commit(vec![Write::Owe(left.clone()), Write::Owe(owed()), Write::Owe(owed())]).await.unwrap();
        let number = |id, owed: OwedDelete| OwedDelete { id, ..owed };
        let all = [number(2, owed()), number(3, owed()), number(1, left.clone())];
        assert_eq!(store.owed_all(10).await.unwrap(), all);
        assert_eq!(store.owed_all(1).await.unwrap(), all[..1]);
        assert_eq!(store.owed_one(1).await.unwrap(), Some(all[2].clone()));
        let before = store.counters().commits_obligation;
        store.commit(vec![Write::GiveUp(1), Write::GiveUp(9)]).await.unwrap();
        assert_eq!(store.counters().commits_obligation, before + 1);
        assert_eq!(store.owed_all(10).await.unwrap(), all[..2]);
        assert_eq!(store.owed_one(1).await.unwrap(), None);
        // What is given up is not brought back by a try that fails late.
        store.commit(vec![Write::Postpone(number(1, left))]).await.unwrap();
        assert_eq!(store.owed_one(1).await.unwrap(), None);
    })
    .await;
}

#[tokio::test]
async fn u7_what_is_owed_for_a_session_is_found_by_it() {
    on_each(async |store| {
        let of = |number: u32, seconds| resume(number).owed_delete(at(seconds)).unwrap();
        store.commit(vec![Write::Owe(of(1, 0)), Write::Owe(of(2, 1)), Write::Owe(of(1, 2))]).await.unwrap();
        store.commit(vec![Write::Owe(OwedDelete { session: None, ..of(1, 3) })]).await.unwrap();
        let ids = async |number, limit| {
            let owed = store.owed_of(key(number), limit).await.unwrap();
            owed.into_iter().map(|owed| owed.id).collect::<Vec<_>>()
        };
        assert_eq!(
            (ids(1, 10).await, ids(1, 1).await, ids(2, 10).await, ids(3, 10).await),
            (vec![1, 3], vec![1], vec![2], vec![])
        );
        let failed = OwedDelete { id: 1, ..of(1, 0) }.postponed(at(5), "HTTP status 503");
        store.commit(vec![Write::Postpone(failed.clone()), Write::Settle(3)]).await.unwrap();
        assert_eq!(store.owed_of(key(1), 10).await.unwrap(), [failed]);
    })
    .await;
}

const SESSIONS: u32 = 60;
