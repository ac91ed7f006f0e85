//! The listening stream (U9).

use std::time::Duration;

use mainstay_upstream::Notice;
use serde_json::json;

use crate::fake::Fake;
use crate::support::{Bench, eventually, text, tool};

#[tokio::test]
async fn u9_what_the_server_says_unasked_is_heard_while_somebody_listens() {
    let (mut bench, fake) = (Bench::new(), Fake::start().await);
    fake.set(|state| state.get_status = 200);
    let link = bench.ready(&fake.server()).await;
    let (one, other) = (link.listen(), link.listen());
    eventually("the stream", || (fake.listeners() == 1).then_some(())).await;
    let get = &fake.seen("GET")[0];
    assert_eq!(
        (get.headers["accept"].to_str().unwrap(), get.session.as_deref()),
        ("text/event-stream", Some("upstream-1"))
    );
    assert!(get.headers.get("content-type").is_none());
    let changed = json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"});
    fake.say(Some("e-1"), &changed);
    assert_eq!(bench.message().await, changed);
    drop(one);
    let question = json!({"jsonrpc": "2.0", "id": 5, "method": "roots/list"});
    fake.say(Some("e-2"), &question);
    assert_eq!(bench.message().await, question);
    eventually("the cursor", || link.record().unwrap().last_event_id.filter(|id| &**id == "e-2")).await;
    drop(other);
    eventually("the stream's end", || {
        fake.set(|state| state.get_status = 200);
        (fake.listeners() == 0).then_some(())
    })
    .await;
}

#[tokio::test]
async fn u9_a_cut_stream_goes_on_behind_the_last_event() {
    let (mut bench, fake) = (Bench::new(), Fake::start().await);
    fake.set(|state| state.get_status = 200);
    let link = bench.ready(&fake.server()).await;
    let _listening = link.listen();
    eventually("the stream", || (fake.listeners() == 1).then_some(())).await;
    fake.say(Some("e-9"), &json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}));
    bench.message().await;
    eventually("the cursor", || link.record().unwrap().last_event_id).await;
    fake.cut();
    eventually("the next stream", || (fake.count("GET") == 2).then_some(())).await;
    assert_eq!(fake.seen("GET")[1].headers["last-event-id"], "e-9");
    assert_eq!(fake.count("initialize"), 1);
}

#[tokio::test]
async fn u9_a_server_without_the_stream_is_left_alone() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    for status in [405, 404, 500] {
        fake.set(|state| state.get_status = status);
        let gets = fake.count("GET");
        let link = bench.ready(&fake.server()).await;
        let listening = link.listen();
        eventually("the first look", || (fake.count("GET") == gets + 1).then_some(())).await;
        // Longer than any wait after a mere failure.
        tokio::time::sleep(Duration::from_millis(1600)).await;
        assert_eq!(fake.count("GET"), gets + 1, "{status}");
        assert_eq!(text(&link, tool(1, "incr", json!({}))).await.unwrap(), "ok");
        drop(listening);
    }
    assert_eq!(fake.count("initialize"), 3);
}

#[tokio::test]
async fn u9_a_404_that_speaks_of_the_session_starts_the_recovery() {
    let (mut bench, fake) = (Bench::new(), Fake::start().await);
    fake.set(|state| state.get_status = 200);
    let link = bench.ready(&fake.server()).await;
    let _listening = link.listen();
    eventually("the stream", || (fake.listeners() == 1).then_some(())).await;
    fake.say(Some("old"), &json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}));
    bench.message().await;
    fake.forget();
    fake.cut();
    eventually("another session", || (fake.count("initialize") == 2).then_some(())).await;
    bench.remade().await;
    eventually("its stream", || (fake.listeners() == 1).then_some(())).await;
    let last = fake.seen("GET").pop().unwrap();
    assert_eq!(last.session.as_deref(), Some("upstream-2"));
    assert!(last.headers.get("last-event-id").is_none());
    assert_eq!(text(&link, tool(1, "incr", json!({}))).await.unwrap(), "ok");
    assert_eq!(fake.count("initialize"), 2);
}

#[tokio::test]
async fn u9_the_stream_follows_a_session_that_a_call_has_made_again() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    fake.set(|state| state.get_status = 200);
    let link = bench.ready(&fake.server()).await;
    let _listening = link.listen();
    eventually("the stream", || (fake.listeners() == 1).then_some(())).await;
    fake.forget();
    assert_eq!(text(&link, tool(1, "incr", json!({}))).await.unwrap(), "ok");
    let of_new = |fake: &Fake| fake.seen("GET").iter().any(|seen| seen.session.as_deref() == Some("upstream-2"));
    eventually("the new session's stream", || of_new(&fake).then_some(())).await;
}

#[tokio::test]
async fn u9_a_listener_opens_a_server_that_comes_up() {
    let (mut bench, fake) = (Bench::new(), Fake::start().await);
    fake.close().await;
    let link = bench.lazy(&fake.server());
    let _listening = link.listen();
    tokio::time::sleep(Duration::from_millis(100)).await;
    fake.reopen().await;
    let opened = bench.notice(|notice| match notice {
        Notice::Opened(opened) => Some(opened),
        _ => None,
    });
    assert_eq!(&*opened.await.version, "2025-11-25");
    assert!(link.opened());
}

#[tokio::test]
async fn r7_a_ping_on_the_listening_stream_is_answered_by_the_link() {
    let (mut bench, fake) = (Bench::new(), Fake::start().await);
    fake.set(|state| state.get_status = 200);
    let link = bench.ready(&fake.server()).await;
    let _listening = link.listen();
    eventually("the stream", || (fake.listeners() == 1).then_some(())).await;
    fake.say(None, &json!({"jsonrpc": "2.0", "id": "srv-1", "method": "ping"}));
    let pong = json!({"jsonrpc": "2.0", "id": "srv-1", "result": {}});
    eventually("the pong", || fake.look(|state| state.log.iter().any(|seen| seen.body == pong)).then_some(())).await;
    assert!(bench.waiting().iter().all(|notice| !matches!(notice, Notice::Message { .. })));
}

#[tokio::test]
async fn u4_a_server_that_forgets_every_session_is_not_flooded_by_its_listener() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    fake.set(|state| {
        state.get_status = 200;
        state.forget_after_initialized = u32::MAX;
    });
    let link = bench.ready(&fake.server()).await;
    let _listening = link.listen();
    eventually("another session", || (fake.count("initialize") == 2).then_some(())).await;
    tokio::time::sleep(Duration::from_millis(700)).await;
    assert_eq!(fake.count("initialize"), 2);
}
