//! What the contract promises, whatever the backend.

use mainstay_core::id::SessionRef;

use super::*;
use crate::{CommitError, Filter, Found, Page, Stored};

fn live(record: SessionRecord) -> Stored {
    Stored::Live(Box::new(record))
}

/// The conflict of `outcome`, or none.
#[track_caller]
fn conflict(outcome: Result<(), CommitError>) -> Option<Found> {
    match outcome {
        Ok(()) => None,
        Err(CommitError::Conflict { found, .. }) => Some(found),
        Err(error) => panic!("not a conflict: {error:?}"),
    }
}

#[tokio::test]
async fn s2_a_row_is_found_as_it_was_written() {
    on_each(async |store| {
        assert_eq!(store.find(key(1)).await.unwrap(), Stored::Absent);
        store.commit(vec![insert(1)]).await.unwrap();
        assert_eq!(store.find(key(1)).await.unwrap(), live(record(1)));
        assert_eq!(store.find(key(2)).await.unwrap(), Stored::Absent);
        assert_eq!(store.count().await.unwrap(), 1);
    })
    .await;
}

#[tokio::test]
async fn s1_a_row_is_replaced_by_its_direct_successor_only() {
    on_each(async |store| {
        let update = |generation| {
            Write::Session(Change::Update(SessionRecord { generation, state: State::Draining, ..record(1) }))
        };
        assert_eq!(conflict(store.commit(vec![update(2)]).await), Some(Found::Absent));
        assert_eq!(conflict(store.commit(vec![update(0)]).await), Some(Found::Absent));
        store.commit(vec![insert(1)]).await.unwrap();
        assert_eq!(conflict(store.commit(vec![insert(1)]).await), Some(Found::Generation(1)));
        for generation in [0, 1, 3] {
            assert_eq!(conflict(store.commit(vec![update(generation)]).await), Some(Found::Generation(1)));
            assert_eq!(conflict(store.commit(vec![end(1, generation)]).await), Some(Found::Generation(1)));
        }
        store.commit(vec![update(2)]).await.unwrap();
        assert_eq!(conflict(store.commit(vec![update(2)]).await), Some(Found::Generation(2)));
        let expected = SessionRecord { generation: 2, state: State::Draining, ..record(1) };
        assert_eq!(store.find(key(1)).await.unwrap(), live(expected));
    })
    .await;
}

#[tokio::test]
async fn s6_s7_an_end_is_one_transaction_and_blocks_the_id() {
    on_each(async |store| {
        assert_eq!(conflict(store.commit(vec![end(1, 2)]).await), Some(Found::Absent));
        store.commit(vec![insert(1)]).await.unwrap();
        store.commit(vec![end(1, 2)]).await.unwrap();
        assert_eq!(store.find(key(1)).await.unwrap(), Stored::Ended(stone(1, 2)));
        assert_eq!(store.count().await.unwrap(), 0);
        let update = Write::Session(Change::Update(SessionRecord { generation: 2, ..record(1) }));
        for late in [insert(1), update, end(1, 2), end(1, 3)] {
            assert_eq!(conflict(store.commit(vec![late]).await), Some(Found::Ended));
        }
        store.commit(vec![touch(1, at(5), at(500))]).await.unwrap();
        assert_eq!(store.find(key(1)).await.unwrap(), Stored::Ended(stone(1, 2)));
        assert_eq!(store.next_deadline().await.unwrap(), None);
    })
    .await;
}

#[tokio::test]
async fn a_commit_is_all_or_nothing() {
    on_each(async |store| {
        store.commit(vec![insert(1), Write::Owe(owed()), Write::Resume(resume(1)), Write::Card(card())]).await.unwrap();
        let other_card = ServerCard { saved_at: at(9), ..card() };
        let doomed = vec![
            insert(2),
            end(1, 2),
            Write::ForgetResume(key(1)),
            Write::Resume(resume(3)),
            Write::Settle(1),
            Write::Owe(owed()),
            Write::Card(other_card),
            touch(2, at(5), at(50)),
            insert(1),
        ];
        assert_eq!(conflict(store.commit(doomed).await), Some(Found::Ended));
        assert_eq!(store.find(key(1)).await.unwrap(), live(record(1)));
        assert_eq!(store.find(key(2)).await.unwrap(), Stored::Absent);
        assert_eq!(store.resume_record(key(1)).await.unwrap(), Some(resume(1)));
        assert_eq!(store.resume_record(key(3)).await.unwrap(), None);
        assert_eq!(store.owed(OwedDelete::NEVER, 10).await.unwrap(), [OwedDelete { id: 1, ..owed() }]);
        assert_eq!(store.card(&server(), [5; 32]).await, Some(card()));
        assert_eq!(store.next_deadline().await.unwrap(), Some(at(60)));
        assert_eq!(store.overdue(at(1000), 10).await.unwrap(), [key(1)]);
        store.commit(Vec::new()).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn s5_a_touch_moves_the_deadline_of_a_ready_session_and_confirms_it() {
    on_each(async |store| {
        store.commit(vec![insert(1), insert(2)]).await.unwrap();
        store.hint(touch(1, at(7), at(107)));
        store.hint(touch(3, at(7), at(107)));
        store.flush().await.unwrap();
        let touched = SessionRecord { seen_at: at(7), deadline: at(107), confirmed: true, ..record(1) };
        assert_eq!(store.find(key(1)).await.unwrap(), live(touched.clone()));
        assert_eq!(store.find(key(3)).await.unwrap(), Stored::Absent);
        assert_eq!(store.next_deadline().await.unwrap(), Some(at(60)));
        assert_eq!(store.overdue(at(60), 10).await.unwrap(), [key(2)]);
        // A touch that comes after the drain's row moves nothing.
        let drained = SessionRecord { generation: 2, state: State::Draining, deadline: at(12), ..touched };
        store.commit(vec![Write::Session(Change::Update(drained.clone()))]).await.unwrap();
        store.commit(vec![touch(1, at(8), at(108))]).await.unwrap();
        assert_eq!(store.find(key(1)).await.unwrap(), live(drained));
        assert_eq!(store.unfinished().await.unwrap(), [key(1)]);
        assert_eq!(store.counters().hint_failures, 0);
    })
    .await;
}

#[tokio::test]
async fn s9_the_overdue_come_in_the_order_of_their_deadlines() {
    on_each(async |store| {
        for (number, deadline) in [(1, 30), (2, 10), (3, 20), (4, 40)] {
            let row = SessionRecord { deadline: at(deadline), ..record(number) };
            store.commit(vec![Write::Session(Change::Insert(row))]).await.unwrap();
        }
        assert_eq!(store.next_deadline().await.unwrap(), Some(at(10)));
        assert_eq!(store.overdue(at(9), 10).await.unwrap(), []);
        assert_eq!(store.overdue(at(30), 10).await.unwrap(), [key(2), key(3), key(1)]);
        assert_eq!(store.overdue(at(30), 2).await.unwrap(), [key(2), key(3)]);
        store.commit(vec![end(2, 2)]).await.unwrap();
        assert_eq!(store.overdue(at(30), 10).await.unwrap(), [key(3), key(1)]);
    })
    .await;
}

#[tokio::test]
async fn nobody_writes_without_the_newest_epoch() {
    let (_home, stores) = ledgers();
    for old in stores {
        let fenced = |outcome: &Result<(), CommitError>| matches!(outcome, Err(CommitError::Fenced { .. }));
        assert!(fenced(&old.commit(vec![insert(1)]).await), "no epoch yet");
        let first = old.begin_epoch(at(0), 11).await.unwrap();
        assert_eq!(first, Epoch { counter: 1, nonce: 11 });
        old.commit(vec![insert(1)]).await.unwrap();

        let new = old.reopen().unwrap();
        assert!(fenced(&new.commit(vec![insert(2)]).await), "not begun");
        old.commit(vec![insert(3)]).await.unwrap();
        let second = new.begin_epoch(at(1), 22).await.unwrap();
        assert_eq!(second, Epoch { counter: 2, nonce: 22 });
        let outcome = old.commit(vec![insert(4)]).await;
        assert!(
            matches!(&outcome, Err(CommitError::Fenced { own, current }) if *own == Some(first) && *current == Some(second)),
            "{outcome:?}"
        );
        old.hint(touch(1, at(7), at(107)));
        old.flush().await.unwrap();
        assert_eq!(old.counters().hint_failures, 1);
        new.commit(vec![end(1, 2)]).await.unwrap();
        assert_eq!(new.find(key(3)).await.unwrap(), live(record(3)));
        assert_eq!(new.find(key(4)).await.unwrap(), Stored::Absent);
        // Reading is not fenced.
        assert_eq!(old.find(key(1)).await.unwrap(), Stored::Ended(stone(1, 2)));
        assert_eq!(old.begin_epoch(at(2), 33).await.unwrap().counter, 3);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn s6_of_two_writers_racing_on_one_session_one_wins() {
    let (_home, stores) = ledgers();
    for store in stores {
        store.begin_epoch(at(0), 1).await.unwrap();
        for number in 0..50 {
            store.commit(vec![insert(number)]).await.unwrap();
            let race = |state, reason: &str| {
                let stone = Tombstone { state, reason: reason.into(), ..stone(number, 2) };
                let store = store.clone();
                async move { (stone.clone(), store.commit(vec![Write::Session(Change::End(stone))]).await) }
            };
            let racers =
                [race(State::Deleted, "client"), race(State::Expired, "idle"), race(State::Closed, "operator")];
            let mut tasks = tokio::task::JoinSet::new();
            racers.into_iter().for_each(|racer| {
                tasks.spawn(racer);
            });
            let outcomes = tasks.join_all().await;
            let (won, lost): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(|(_, outcome)| outcome.is_ok());
            assert_eq!((won.len(), lost.len()), (1, 2));
            assert!(lost.into_iter().all(|(_, outcome)| conflict(outcome) == Some(Found::Ended)));
            assert_eq!(store.find(key(number)).await.unwrap(), Stored::Ended(won[0].0.clone()));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn two_epochs_racing_never_both_write() {
    let (_home, stores) = ledgers();
    for old in stores {
        old.begin_epoch(at(0), 1).await.unwrap();
        let new = old.reopen().unwrap();
        let writer = {
            let old = old.clone();
            async move {
                let mut written = Vec::new();
                for number in 0..10_000 {
                    match old.commit(vec![insert(number)]).await {
                        Ok(()) => written.push(number),
                        Err(CommitError::Fenced { .. }) => return written,
                        Err(error) => panic!("{error:?}"),
                    }
                }
                panic!("never fenced")
            }
        };
        let mut tasks = tokio::task::JoinSet::new();
        tasks.spawn(writer);
        while old.count().await.unwrap() < 5 {
            tokio::task::yield_now().await;
        }
        new.begin_epoch(at(1), 2).await.unwrap();
        let count_at_takeover = new.count().await.unwrap();
        let written = tasks.join_next().await.unwrap().unwrap();
        assert_eq!(written.len() as u64, count_at_takeover, "nothing was written after the takeover");
        assert_eq!(new.count().await.unwrap(), count_at_takeover);
    }
}

#[tokio::test]
async fn u1_a_resume_record_is_kept_replaced_and_forgotten() {
    on_each(async |store| {
        assert_eq!(store.resume_record(key(1)).await.unwrap(), None);
        store.hint(Write::Resume(resume(1)));
        store.flush().await.unwrap();
        assert_eq!(store.resume_record(key(1)).await.unwrap(), Some(resume(1)));
        let remade = ResumeRecord { remade_count: 1, continuity: Continuity::Remade, ..resume(1) };
        store.commit(vec![Write::Resume(remade.clone())]).await.unwrap();
        assert_eq!(store.resume_record(key(1)).await.unwrap(), Some(remade));
        store.commit(vec![Write::ForgetResume(key(1)), Write::ForgetResume(key(9))]).await.unwrap();
        assert_eq!(store.resume_record(key(1)).await.unwrap(), None);
    })
    .await;
}

#[tokio::test]
async fn u7_a_record_that_comes_after_the_end_becomes_an_owed_delete() {
    on_each(async |store| {
        store.commit(vec![insert(1), end(1, 2), insert(2), end(2, 2)]).await.unwrap();
        store.hint(Write::Resume(resume(1)));
        store.hint(Write::Resume(ResumeRecord { upstream_id: None, ..resume(2) }));
        store.flush().await.unwrap();
        assert_eq!(store.resume_record(key(1)).await.unwrap(), None);
        let owed = store.owed(OwedDelete::NEVER, 10).await.unwrap();
        assert_eq!(owed.len(), 1);
        assert_eq!(owed[0].upstream_id.reveal(), SECRET);
    })
    .await;
}

#[tokio::test]
async fn u7_what_is_owed_is_kept_until_it_is_settled() {
    on_each(async |store| {
        let later = OwedDelete { next_at: at(50), ..owed() };
        store.commit(vec![Write::Owe(later.clone()), Write::Owe(owed())]).await.unwrap();
        let (first, second) = (OwedDelete { id: 1, ..later }, OwedDelete { id: 2, ..owed() });
        assert_eq!(store.owed(at(0), 10).await.unwrap(), std::slice::from_ref(&second));
        assert_eq!(store.owed(at(50), 10).await.unwrap(), [second.clone(), first.clone()]);
        assert_eq!(store.owed(at(50), 1).await.unwrap(), std::slice::from_ref(&second));
        let postponed = second.postponed(at(60), "HTTP status 503");
        store.commit(vec![Write::Postpone(postponed.clone()), Write::Settle(1)]).await.unwrap();
        assert_eq!(store.owed(at(69), 10).await.unwrap(), []);
        assert_eq!(store.owed(at(70), 10).await.unwrap(), std::slice::from_ref(&postponed));
        // What is settled is not brought back by a late failure, and its number not given again.
        store.commit(vec![Write::Settle(2), Write::Postpone(postponed), Write::Owe(owed())]).await.unwrap();
        assert_eq!(store.owed(OwedDelete::NEVER, 10).await.unwrap(), [OwedDelete { id: 3, ..owed() }]);
    })
    .await;
}

#[tokio::test]
async fn u8_a_card_is_known_for_one_definition_of_its_server() {
    on_each(async |store| {
        assert_eq!(store.card(&server(), [5; 32]).await, None);
        store.hint(Write::Card(card()));
        store.flush().await.unwrap();
        assert_eq!(store.card(&server(), [5; 32]).await, Some(card()));
        assert_eq!(store.card(&server(), [6; 32]).await, None);
        let newer = ServerCard { fingerprint: [6; 32], ..card() };
        store.commit(vec![Write::Card(newer.clone())]).await.unwrap();
        assert_eq!(store.card(&server(), [5; 32]).await, None);
        assert_eq!(store.card(&server(), [6; 32]).await, Some(newer));
    })
    .await;
}

#[tokio::test]
async fn t4_the_servers_that_were_configured_are_known_as_last_noted() {
    on_each(async |store| {
        let names = |names: &[&str]| names.iter().filter_map(|name| ServerName::parse(name)).collect::<Vec<_>>();
        assert_eq!(store.configured().await.unwrap(), None);
        for noted in [names(&["files", "tickets"]), names(&[]), names(&["files"])] {
            store.commit(vec![Write::Configured(noted.clone())]).await.unwrap();
            assert_eq!(store.configured().await.unwrap(), Some(noted));
        }
        store.commit(vec![Write::Configured(names(&["x"])), end(9, 2)]).await.unwrap_err();
        assert_eq!(store.configured().await.unwrap(), Some(names(&["files"])), "all of a commit or nothing");
    })
    .await;
}

#[tokio::test]
async fn c4_what_is_remembered_of_servers_is_what_was_said_last_and_sealed() {
    on_each(async |store| {
        assert_eq!(store.server_memory().await.unwrap(), None);
        for said in [&b"one"[..], b"", b"three"] {
            store.commit(vec![Write::Memory(said.into())]).await.unwrap();
            assert_eq!(store.server_memory().await.unwrap().as_deref(), Some(said));
        }
        store.commit(vec![Write::Memory((*b"four").into()), end(9, 2)]).await.unwrap_err();
        assert_eq!(store.server_memory().await.unwrap().as_deref(), Some(&b"three"[..]), "all of a commit or nothing");
    })
    .await;
}

#[tokio::test]
async fn s7_a_purge_takes_what_has_outlived_its_use() {
    on_each(async |store| {
        store.commit(vec![insert(1), end(1, 2), insert(2), insert(3), Write::Resume(resume(2))]).await.unwrap();
        store.commit(vec![Write::Resume(resume(4))]).await.unwrap();
        store.commit(vec![Write::Purge { now: at(99) }]).await.unwrap();
        assert_eq!(store.find(key(1)).await.unwrap(), Stored::Ended(stone(1, 2)));
        store.commit(vec![Write::Purge { now: at(100) }]).await.unwrap();
        assert_eq!(store.find(key(1)).await.unwrap(), Stored::Absent);
        assert_eq!(store.find(key(3)).await.unwrap(), live(record(3)));

        let stale = at(1).plus(ResumeRecord::TTL);
        store.commit(vec![Write::Purge { now: stale.minus(Duration::from_secs(1)) }]).await.unwrap();
        assert!(store.resume_record(key(4)).await.unwrap().is_some());
        store.commit(vec![Write::Purge { now: stale }]).await.unwrap();
        assert_eq!(store.resume_record(key(4)).await.unwrap(), None, "nobody has used it for the TTL");
        assert!(store.resume_record(key(2)).await.unwrap().is_some(), "its session lives");
        assert_eq!(
            store.owed(OwedDelete::NEVER, 10).await.unwrap(),
            [OwedDelete { id: 1, session: Some(key(4)), owed_at: stale, next_at: stale, ..owed() }]
        );
    })
    .await;
}

#[tokio::test]
async fn u7_what_is_left_to_expire_stays_listed_for_a_week() {
    on_each(async |store| {
        let mut left = OwedDelete { id: 1, ..owed() };
        store.commit(vec![Write::Owe(owed())]).await.unwrap();
        while !left.is_left_to_expire() {
            left = left.postponed(at(0), "HTTP status 503");
        }
        store.commit(vec![Write::Postpone(left.clone())]).await.unwrap();
        store.commit(vec![Write::Purge { now: at(0).plus(6 * DAY) }]).await.unwrap();
        assert_eq!(store.owed(at(0).plus(6 * DAY), 10).await.unwrap(), [], "it is not tried");
        assert_eq!(store.owed(OwedDelete::NEVER, 10).await.unwrap(), [left], "and it is listed");
        store.commit(vec![Write::Purge { now: at(0).plus(7 * DAY) }]).await.unwrap();
        assert_eq!(store.owed(OwedDelete::NEVER, 10).await.unwrap(), []);
    })
    .await;
}

#[tokio::test]
async fn o1_every_id_is_listed_once_whatever_the_page() {
    on_each(async |store| {
        let numbers = [5, 1, 4, 2, 3];
        for number in numbers {
            store.commit(vec![insert(number)]).await.unwrap();
        }
        store.commit(vec![end(2, 2), end(5, 2), Write::Resume(resume(3))]).await.unwrap();
        for limit in 1..7 {
            let (mut after, mut listed) = (None, Vec::new());
            for _ in 0..numbers.len() + 1 {
                let page = store.list(&Page { after, limit, filter: Filter::default() }).await.unwrap();
                assert!(page.len() <= limit);
                after = page.last().map(|row| row.key).or(after);
                listed.extend(page);
            }
            let keys: Vec<_> = listed.iter().map(|row| row.key).collect();
            assert_eq!(keys, [1, 2, 3, 4, 5].map(key));
            let ended: Vec<_> = listed.iter().map(|row| matches!(row.stored, Stored::Ended(_))).collect();
            assert_eq!(ended, [false, true, false, false, true]);
            let resumed: Vec<_> = listed.iter().map(|row| row.resume.is_some()).collect();
            assert_eq!(resumed, [false, false, true, false, false]);
        }
        assert_eq!(store.list(&Page { after: None, limit: 0, filter: Filter::default() }).await.unwrap(), []);
    })
    .await;
}

#[tokio::test]
async fn s3_a_ref_finds_every_session_that_it_may_mean() {
    on_each(async |store| {
        let twin = SessionKey::from_bytes({
            let mut bytes = *key(1).as_bytes();
            bytes[30] = 9;
            bytes
        });
        let twin_row = SessionRecord { key: twin, ..record(1) };
        store.commit(vec![insert(0), insert(1), insert(2), Write::Session(Change::Insert(twin_row))]).await.unwrap();
        store.commit(vec![end(1, 2)]).await.unwrap();
        let found = store.find_ref(key(1).session_ref()).await.unwrap();
        let keys: Vec<_> = found.iter().map(|(key, _)| *key).collect();
        assert_eq!(keys, [key(1), twin]);
        assert!(matches!((&found[0].1, &found[1].1), (Stored::Ended(_), Stored::Live(_))));
        let nobody = SessionRef::parse("s-ffffffffff").unwrap();
        assert_eq!(store.find_ref(nobody).await.unwrap(), []);
    })
    .await;
}

#[tokio::test]
async fn what_is_done_is_counted() {
    on_each(async |store| {
        let before = store.counters();
        store.commit(vec![insert(1)]).await.unwrap();
        store.commit(vec![Write::Owe(owed())]).await.unwrap();
        store.commit(vec![Write::Card(card())]).await.unwrap();
        store.commit(vec![Write::Card(card()), Write::Owe(owed()), insert(2)]).await.unwrap();
        assert!(store.commit(vec![insert(2)]).await.is_err(), "refused, and so not counted");
        store.find(key(1)).await.unwrap();
        let after = store.counters();
        let commits = [after.commits_authority, after.commits_obligation, after.commits_hint];
        assert_eq!(commits, [2, 1, 1]);
        assert_eq!((after.reads - before.reads, after.queue_depth), (1, 0));
    })
    .await;
}
