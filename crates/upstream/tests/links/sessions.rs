//! Beginning, taking up and ending upstream sessions.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mainstay_core::resume::Continuity;
use mainstay_upstream::{Ending, Failure, Notice, Outcome, Server, Settled, settle};
use serde_json::json;

use crate::fake::Fake;
use crate::support::{Bench, eventually, handshake, stretched, text, tool};

#[tokio::test]
async fn u1_opening_forwards_the_clients_own_params_and_yields_a_record() {
    let (mut bench, fake) = (Bench::new(), Fake::start().await);
    let (link, opened) = bench.open(&fake.server()).await.unwrap();
    assert_eq!(&*opened.version, "2025-11-25");
    let result: serde_json::Value = serde_json::from_slice(&opened.result).unwrap();
    assert_eq!(result["serverInfo"]["name"], "fake");
    let sent = &fake.seen("initialize")[0];
    let own: serde_json::Value = serde_json::from_slice(&handshake().params).unwrap();
    assert_eq!(sent.body["params"], own);
    assert!(sent.session.is_none() && sent.headers.get("mcp-protocol-version").is_none());
    assert_eq!(sent.headers["accept"], "application/json, text/event-stream");

    let told = bench.notice(|notice| match notice {
        Notice::Record(record) => Some(record),
        _ => None,
    });
    let record = told.await;
    assert_eq!(Some(&*record), link.record().as_ref());
    assert_eq!(record.upstream_id.as_ref().unwrap().reveal(), "upstream-1");
    assert_eq!((record.continuity, record.fingerprint), (Continuity::Fresh, fake.server().fingerprint()));
    assert!(!format!("{record:?} {link:?}").contains("upstream-1"));

    assert_eq!(fake.count("notifications/initialized"), 0);
    link.confirm().await;
    link.confirm().await;
    assert_eq!(text(&link, tool(1, "incr", json!({}))).await.unwrap(), "ok");
    assert_eq!(fake.count("notifications/initialized"), 1);
}

#[tokio::test]
async fn u3_a_restored_link_goes_on_under_the_same_upstream_id() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    let record = bench.ready(&fake.server()).await.record();
    let mut later = Bench::new();
    let link = later.restore(&fake.server(), record);
    assert!(link.opened());
    let before = fake.look(|state| state.log.len());
    assert_eq!(text(&link, tool(1, "incr", json!({}))).await.unwrap(), "ok");
    let call = fake.seen("tools/call").pop().unwrap();
    assert_eq!(call.session.as_deref(), Some("upstream-1"));
    assert_eq!(call.headers["mcp-protocol-version"], "2025-11-25");
    assert_eq!((fake.look(|state| state.log.len()), fake.count("initialize")), (before + 1, 1));
    assert_eq!(link.record().unwrap().continuity, Continuity::Resumed);
    assert!(later.waiting().is_empty());
}

#[tokio::test]
async fn u8_a_server_that_was_down_is_opened_at_the_first_use() {
    let (mut bench, fake) = (Bench::new(), Fake::start().await);
    fake.close().await;
    let impatient = Arc::new(Server { patience: Duration::from_millis(200), ..Server::clone(&fake.server()) });
    let failure = bench.open(&impatient).await.unwrap_err();
    assert!(failure.is_unreachable(), "{failure}");
    let link = bench.lazy(&fake.server());
    link.confirm().await;
    assert!(!link.opened() && link.record().is_none());
    fake.reopen().await;
    assert_eq!(text(&link, tool(1, "incr", json!({}))).await.unwrap(), "ok");
    assert_eq!(fake.methods(), ["initialize", "notifications/initialized", "tools/call"]);
    let opened = bench.notice(|notice| match notice {
        Notice::Opened(opened) => Some(opened),
        Notice::Remade { .. } => panic!("nothing was lost"),
        _ => None,
    });
    assert_eq!(&*opened.await.version, "2025-11-25");
}

#[tokio::test]
async fn u8_the_way_that_is_being_opened_is_the_one_that_a_call_takes() {
    let (mut bench, fake) = (Bench::new(), Fake::start().await);
    fake.close().await;
    let link = bench.lazy(&fake.server());
    let reaching = Arc::clone(&link);
    let reached = tokio::spawn(async move { reaching.reach().await });
    // The client has been answered meanwhile, and says so.
    link.confirm().await;
    let (called, ()) = tokio::join!(text(&link, tool(1, "incr", json!({}))), fake.reopen());
    assert_eq!(called.unwrap(), "ok");
    let reached = reached.await.unwrap().unwrap();
    assert_eq!(reached, link.reach().await.unwrap());
    assert_eq!(fake.methods(), ["initialize", "notifications/initialized", "tools/call"]);
    let openings = bench.waiting().into_iter().filter(|notice| matches!(notice, Notice::Opened(_))).count();
    assert_eq!(openings, 1);
}

#[tokio::test]
async fn u8_an_initialized_that_was_said_during_the_opening_is_passed_on_behind_it() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    fake.close().await;
    let link = bench.lazy(&fake.server());
    let (reached, ()) = tokio::join!(link.reach(), async {
        link.confirm().await;
        fake.reopen().await;
    });
    reached.unwrap();
    assert_eq!(fake.methods(), ["initialize", "notifications/initialized"]);
    assert!(link.record().unwrap().told);
}

#[tokio::test]
async fn u8_a_definitive_failure_is_told_from_a_server_that_is_away() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    fake.set(|state| state.authorization = Some("Bearer x".to_owned()));
    let link = bench.lazy(&fake.server());
    let failure = link.reach().await.unwrap_err();
    assert!(matches!(failure, Failure::Unauthorized { .. }), "{failure}");
    assert!(!link.opened());
    // A later try may find it in order.
    fake.set(|state| state.authorization = None);
    assert_eq!(&*link.reach().await.unwrap().version, "2025-11-25");
}

#[tokio::test]
async fn u6_a_used_session_of_which_nothing_is_left_is_told_as_lost() {
    let fake = Fake::start().await;
    let mut bench = Bench::new();
    let link = bench.restore(&fake.server(), None);
    assert_eq!(text(&link, tool(1, "incr", json!({}))).await.unwrap(), "ok");
    let notices = bench.waiting();
    assert!(!notices.iter().any(|notice| matches!(notice, Notice::Opened(_))), "{notices:?}");
    let reasons: Vec<_> = notices
        .iter()
        .filter_map(|notice| match notice {
            Notice::Remade { reason, .. } => Some(&**reason),
            _ => None,
        })
        .collect();
    assert_eq!(reasons, ["what was known of its session is lost"]);
    let record = link.record().unwrap();
    assert_eq!((record.continuity, record.remade_count), (Continuity::Remade, 1));
}

#[tokio::test]
async fn u3_what_the_last_worker_did_not_pass_on_of_initialized_the_next_one_does() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    // The worker dies after the client's `initialized` is known and before it is passed on.
    let (link, _) = bench.open(&fake.server()).await.unwrap();
    let record = link.record();
    assert!(!record.as_ref().unwrap().told);
    let mut later = Bench::new();
    let link = later.restore(&fake.server(), record);
    assert_eq!(text(&link, tool(1, "incr", json!({}))).await.unwrap(), "ok");
    assert_eq!(fake.methods(), ["initialize", "notifications/initialized", "tools/call"]);
    let told = later.notice(|notice| match notice {
        Notice::Record(record) => Some(record),
        _ => None,
    });
    let record = told.await;
    assert!(record.told);
    // Who knows that it is told does not tell it again.
    let link = Bench::new().restore(&fake.server(), Some(*record));
    assert_eq!(text(&link, tool(2, "incr", json!({}))).await.unwrap(), "ok");
    assert_eq!((fake.count("notifications/initialized"), fake.count("initialize")), (1, 1));
}

#[tokio::test]
async fn u5_a_message_that_a_server_hangs_on_is_given_up_as_unknown() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    let link = bench.ready(&fake.server()).await;
    fake.set(|state| state.hang_news = true);
    let message = json!({"jsonrpc": "2.0", "method": "notifications/roots/list_changed"}).to_string();
    tokio::time::pause();
    let sent = tokio::time::timeout(Duration::from_secs(60), link.send(message.clone().into())).await;
    tokio::time::resume();
    let failure = sent.unwrap().unwrap_err();
    assert_eq!(failure.outcome(), Outcome::Unknown, "{failure}");
    fake.set(|state| state.hang_news = false);
    link.send(message.into()).await.unwrap();
}

#[tokio::test]
async fn u2_the_record_of_another_definition_is_dropped_with_an_owed_delete() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    let record = bench.ready(&fake.server()).await.record();
    let mut later = Bench::new();
    later.variables.set("T", "t");
    let link = later.restore(&fake.server_with(&[("x-team", "${T}")]), record);
    let owed = later.notice(|notice| match notice {
        Notice::Owed(owed) => Some(owed),
        _ => None,
    });
    let owed = owed.await;
    assert_eq!(owed.upstream_id.reveal(), "upstream-1");
    assert_eq!(text(&link, tool(1, "incr", json!({}))).await.unwrap(), "ok");
    let (reason, _) = later.remade().await;
    assert!(reason.contains("definition"), "{reason}");
    assert_eq!(fake.seen("tools/call").pop().unwrap().session.as_deref(), Some("upstream-2"));
    assert_eq!(settle(&later.upstreams, Some(&fake.server()), &owed).await, Settled::Paid);
    assert_eq!(fake.seen("DELETE").pop().unwrap().session.as_deref(), Some("upstream-1"));
}

#[tokio::test]
async fn ac_05_ending_deletes_upstream_or_says_what_is_owed() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    let link = bench.ready(&fake.server()).await;
    assert_eq!(link.end(Ending::Delete).await, None);
    assert_eq!(fake.seen("DELETE")[0].session.as_deref(), Some("upstream-1"));
    assert!(matches!(text(&link, tool(1, "incr", json!({}))).await, Err(Failure::Ended { .. })));

    // A server that keeps its sessions as long as it likes settles it too.
    let link = bench.ready(&fake.server()).await;
    fake.set(|state| state.delete_status = 405);
    assert_eq!(link.end(Ending::Delete).await, None);

    let link = bench.ready(&fake.server()).await;
    fake.set(|state| state.delete_status = 500);
    let owed = link.end(Ending::Delete).await.unwrap();
    assert_eq!(owed.upstream_id.reveal(), "upstream-3");
    assert_eq!(link.end(Ending::Delete).await, None);
    fake.close().await;
    assert!(settle(&bench.upstreams, Some(&fake.server()), &owed).await.is_owed());
    fake.reopen().await;
    fake.set(|state| state.delete_status = 200);
    assert_eq!(settle(&bench.upstreams, None, &owed).await, Settled::Paid);
    // A session that the server does not know any more is paid for.
    assert_eq!(settle(&bench.upstreams, None, &owed).await, Settled::Paid);
}

#[tokio::test]
async fn t5_ending_for_a_later_worker_sends_nothing() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    let link = bench.ready(&fake.server()).await;
    let before = fake.look(|state| state.log.len());
    assert_eq!(link.end(Ending::KeepForResume).await, None);
    assert!(link.record().is_some());
    drop(link);
    assert_eq!(fake.look(|state| state.log.len()), before);
}

#[tokio::test]
async fn u7_an_initialize_that_nobody_waits_for_leaves_no_session_behind() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    // The connection is there, so that only the handshake is cut short.
    bench.ready(&fake.server()).await.end(Ending::Delete).await;
    let link = bench.lazy(&fake.server());
    let mut opening = Box::pin(link.reach());
    tokio::select! {
        biased;
        _ = &mut opening => panic!("it can't be through at its first step"),
        () = std::future::ready(()) => {}
    }
    drop(opening);
    eventually("the second handshake", || (fake.count("initialize") == 2).then_some(())).await;
    assert_eq!(link.end(Ending::Delete).await, None);
    eventually("the second delete", || (fake.count("DELETE") == 2).then_some(())).await;
    assert_eq!(fake.look(|state| state.sessions.len()), 0);
}

#[tokio::test]
async fn ac_07_5_the_handshakes_bound_is_absolute() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    fake.set(|state| state.hang_initialize = true);
    let server = Server { handshake_bound: Duration::from_millis(300), ..Server::clone(&fake.server()) };
    let began = Instant::now();
    let failure = bench.open(&Arc::new(server)).await.unwrap_err();
    assert!(failure.is_unreachable(), "{failure}");
    assert!(began.elapsed() < stretched(Duration::from_secs(2)));
}

#[tokio::test]
async fn u4_a_notification_follows_the_session_and_a_lost_one_is_told() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    let link = bench.ready(&fake.server()).await;
    let message = json!({"jsonrpc": "2.0", "method": "notifications/roots/list_changed"}).to_string();
    link.send(message.clone().into()).await.unwrap();
    fake.forget();
    link.send(message.into()).await.unwrap();
    let sessions: Vec<_> =
        fake.seen("notifications/roots/list_changed").iter().map(|seen| seen.session.clone().unwrap()).collect();
    assert_eq!(sessions, ["upstream-1", "upstream-1", "upstream-2"]);
}

#[tokio::test]
async fn t2_a_worker_that_has_left_goes_on_in_its_sessions_and_opens_no_other() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    let (link, unopened) = (bench.ready(&fake.server()).await, bench.lazy(&fake.server()));
    bench.upstreams.leave();
    assert_eq!(text(&link, tool(1, "incr", json!({}))).await.unwrap(), "ok");
    fake.forget();
    for link in [link, unopened] {
        let failure = text(&link, tool(2, "incr", json!({}))).await.unwrap_err();
        assert!(matches!(failure, Failure::Left { .. }), "{failure}");
        assert_eq!(failure.outcome(), Outcome::Refused);
    }
    assert_eq!((fake.count("initialize"), fake.executed("incr")), (1, 1), "the next worker opens the next session");
}
