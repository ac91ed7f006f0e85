//! AC-02: the server forgets the session, in every dialect.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mainstay_upstream::{Failure, ListsChanged, Outcome};
use serde_json::json;

use crate::fake::{Fake, Refusal};
use crate::support::{Bench, request, routed, stretched, text, tool, whole};

fn refusals() -> Vec<Refusal> {
    let json = |status, body: &str| (status, "application/json", body.to_owned());
    let error = |code: i32, message: &str, id: &str| {
        format!(r#"{{"jsonrpc":"2.0","error":{{"code":{code},"message":"{message}"}},"id":{id}}}"#)
    };
    let frame =
        format!("event: message\ndata: {}\n\n", error(-32000, "Bad Request: No valid session ID provided", "null"));
    let all = [
        json(404, &error(-32001, "Session not found", "null")),
        json(404, &error(-32600, "Session not found", "\"server-error\"")),
        (404, "text/plain", "Not Found: Session not found".to_owned()),
        (410, "text/plain", String::new()),
        json(400, &error(-32000, "Bad Request: No valid session ID provided", "null")),
        (400, "text/event-stream", frame),
        (401, "text/plain", "Unauthorized: Session not found".to_owned()),
        json(503, &error(-32001, "Session not found", "null")),
        (500, "text/plain", "Internal Server Error".to_owned()),
        json(200, &error(-32600, "Session terminated", "\"x\"")),
        json(200, &error(-32004, "Unknown session", "null")),
        (200, "text/event-stream", format!("data: {}\n\n", error(-32600, "Session not found", "\"server-error\""))),
    ];
    let refusal = |(status, content_type, body)| Refusal { status, content_type, challenge: false, body };
    all.into_iter().map(refusal).collect()
}

#[tokio::test]
async fn ac_02_each_dialect_leads_to_one_new_session_and_the_answer() {
    let (mut bench, fake) = (Bench::new(), Fake::start().await);
    let link = bench.ready(&fake.server()).await;
    let list = request(&routed(1), "tools/list", &json!({}));
    whole(link.call(list).await).await.unwrap();
    for (round, refusal) in refusals().into_iter().enumerate() {
        let number = 10 + round as u64;
        assert_eq!(text(&link, tool(number, "read", json!({"text": "before"}))).await.unwrap(), "before");
        fake.set(|state| state.refusal = refusal.clone());
        fake.forget();
        let (began, initializes, confirmed) =
            (Instant::now(), fake.count("initialize"), fake.count("notifications/initialized"));
        let read = text(&link, tool(100 + number, "read", json!({"text": "after"}))).await;
        assert_eq!(read.unwrap(), "after", "{refusal:?}");
        assert!(began.elapsed() < stretched(Duration::from_secs(2)), "{refusal:?} took {:?}", began.elapsed());
        assert_eq!(fake.count("initialize"), initializes + 1, "{refusal:?}");
        assert_eq!(fake.count("notifications/initialized"), confirmed + 1, "{refusal:?}");
        let (reason, lists) = bench.remade().await;
        assert!(reason.contains(&refusal.status.to_string()), "{reason}");
        assert_eq!(lists, ListsChanged::Same);
    }
    let initializes = fake.seen("initialize");
    assert!(initializes.iter().all(|seen| seen.session.is_none()));
    assert!(initializes.iter().all(|seen| seen.body["params"] == initializes[0].body["params"]));
    let record = link.record().unwrap();
    assert_eq!((record.remade_count, record.continuity.as_str()), (12, "remade"));
    assert_eq!(bench.upstreams.counts().remade, 12);
}

#[tokio::test]
async fn ac_02_a_new_version_is_negotiated_and_sent() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    let link = bench.ready(&fake.server()).await;
    text(&link, tool(1, "read", json!({}))).await.unwrap();
    fake.set(|state| state.version = "2025-06-18");
    fake.forget();
    text(&link, tool(2, "read", json!({}))).await.unwrap();
    fake.set(|state| state.version = "2025-03-26");
    fake.forget();
    text(&link, tool(3, "read", json!({}))).await.unwrap();
    let calls = fake.seen("tools/call");
    let version =
        |index: usize| calls[index].headers.get("mcp-protocol-version").map(|value| value.to_str().unwrap().to_owned());
    // The second of each pair is the repetition in the new session.
    assert_eq!(version(0).as_deref(), Some("2025-11-25"));
    assert_eq!((version(1).as_deref(), version(2).as_deref()), (Some("2025-11-25"), Some("2025-06-18")));
    assert_eq!((version(3).as_deref(), version(4).as_deref()), (Some("2025-06-18"), None));
    let sessions: Vec<_> = calls.iter().map(|seen| seen.session.clone().unwrap()).collect();
    assert_eq!(sessions, ["upstream-1", "upstream-1", "upstream-2", "upstream-2", "upstream-3"]);
}

#[tokio::test]
async fn ac_02_a_challenge_is_authentication_and_no_loss() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    let link = bench.ready(&fake.server()).await;
    let body = "Session not found".to_owned();
    fake.set(|state| state.refusal = Refusal { status: 401, content_type: "text/plain", challenge: true, body });
    fake.forget();
    let failure = text(&link, tool(1, "read", json!({}))).await.unwrap_err();
    assert!(matches!(failure, Failure::Unauthorized { .. }), "{failure}");
    assert_eq!((failure.outcome(), fake.count("initialize")), (Outcome::Refused, 1));
}

#[tokio::test]
async fn ac_02_without_an_id_a_404_is_a_wrong_url() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    fake.set(|state| state.issue_ids = false);
    let link = bench.ready(&fake.server()).await;
    assert_eq!(text(&link, tool(1, "read", json!({}))).await.unwrap(), "ok");
    fake.set(|state| {
        state.issue_ids = true;
        state.refusal = Refusal { status: 404, content_type: "text/plain", challenge: false, body: "no".to_owned() };
    });
    let failure = text(&link, tool(2, "read", json!({}))).await.unwrap_err();
    assert!(matches!(failure, Failure::Configuration { .. }), "{failure}");
    assert_eq!(fake.count("initialize"), 1);
}

#[tokio::test]
async fn ac_02_lost_twice_is_an_error_and_the_next_call_works() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    let link = bench.ready(&fake.server()).await;
    fake.set(|state| state.forget_after_initialized = 1);
    fake.forget();
    let failure = text(&link, tool(1, "incr", json!({}))).await.unwrap_err();
    assert!(matches!(failure, Failure::LostAgain { .. }), "{failure}");
    assert_eq!((fake.count("initialize"), fake.executed("incr")), (2, 0));
    assert_eq!(text(&link, tool(2, "incr", json!({}))).await.unwrap(), "ok");
    assert_eq!((fake.count("initialize"), fake.executed("incr")), (3, 1));
}

#[tokio::test]
async fn u4_fifty_calls_that_meet_the_loss_together_make_one_session() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    let link = bench.ready(&fake.server()).await;
    fake.forget();
    let calls = (0..50).map(|number| {
        let link = Arc::clone(&link);
        tokio::spawn(async move { text(&link, tool(number, "incr", json!({}))).await })
    });
    for call in calls.collect::<Vec<_>>() {
        assert_eq!(call.await.unwrap().unwrap(), "ok");
    }
    assert_eq!((fake.count("initialize"), fake.count("notifications/initialized"), fake.executed("incr")), (2, 2, 50));
}

#[tokio::test]
async fn u4_level_subscriptions_and_changed_lists_follow_the_new_session() {
    let (mut bench, fake) = (Bench::new(), Fake::start().await);
    let link = bench.ready(&fake.server()).await;
    whole(link.call(request(&routed(1), "tools/list", &json!({}))).await).await.unwrap();
    link.remember_level("warning".into());
    link.remember_subscription("file:///a".into());
    link.remember_subscription("file:///b".into());
    link.forget_subscription("file:///a");
    fake.set(|state| state.tools.push(json!({"name": "new"})));
    fake.forget();
    text(&link, tool(2, "read", json!({}))).await.unwrap();
    let (_, lists) = bench.remade().await;
    assert_eq!(lists, ListsChanged::Changed);
    let methods = fake.methods();
    let replay = [
        "tools/call",
        "initialize",
        "notifications/initialized",
        "logging/setLevel",
        "resources/subscribe",
        "tools/list",
        "tools/call",
    ];
    assert_eq!(methods[methods.len() - replay.len()..], replay);
    assert_eq!(fake.seen("logging/setLevel")[0].body["params"], json!({"level": "warning"}));
    assert_eq!(fake.seen("resources/subscribe")[0].body["params"], json!({"uri": "file:///b"}));
    let record = link.record().unwrap();
    assert_eq!(record.log_level.as_deref(), Some("warning"));
    assert_eq!(record.upstream_id.unwrap().reveal(), "upstream-2");
}

#[tokio::test]
async fn ac_03_a_500_that_may_have_executed_is_not_repeated() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    let link = bench.ready(&fake.server()).await;
    let body = "Internal Server Error".to_owned();
    fake.set(|state| state.refusal = Refusal { status: 500, content_type: "text/plain", challenge: false, body });
    fake.forget();
    let failure = text(&link, tool(1, "incr", json!({}))).await.unwrap_err();
    assert_eq!(failure.outcome(), Outcome::Unknown, "{failure}");
    // The session is new all the same.
    assert_eq!(text(&link, tool(2, "incr", json!({}))).await.unwrap(), "ok");
    assert_eq!((fake.count("initialize"), fake.executed("incr")), (2, 1));
}
