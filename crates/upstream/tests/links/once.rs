//! AC-03: nothing is executed twice in silence.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mainstay_upstream::{Failure, Outcome, Server};
use serde_json::json;

use crate::fake::{Fake, Gap};
use crate::support::{Bench, request, routed, stretched, text, tool, whole};

#[tokio::test]
async fn ac_03_1_a_cut_after_execution_is_an_unknown_outcome_at_once() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    let link = bench.ready(&fake.server()).await;
    fake.set(|state| state.gaps.push(Gap::CutAfter));
    let began = Instant::now();
    let failure = text(&link, tool(1, "incr", json!({}))).await.unwrap_err();
    assert!(matches!(failure, Failure::OutcomeUnknown { .. }), "{failure}");
    assert_eq!(failure.outcome(), Outcome::Unknown);
    assert!(began.elapsed() < stretched(Duration::from_secs(2)));
    assert_eq!(fake.executed("incr"), 1);
    assert_eq!(text(&link, tool(2, "incr", json!({}))).await.unwrap(), "ok");
    assert_eq!((fake.count("initialize"), bench.upstreams.counts().unknown), (1, 1));
}

#[tokio::test]
async fn ac_03_2_a_read_is_repeated_once() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    let link = bench.ready(&fake.server()).await;
    // Nobody has said yet that it is safe.
    fake.set(|state| state.gaps.push(Gap::CutAfter));
    assert!(matches!(text(&link, tool(1, "read", json!({}))).await, Err(Failure::OutcomeUnknown { .. })));
    whole(link.call(request(&routed(2), "tools/list", &json!({}))).await).await.unwrap();
    fake.set(|state| state.gaps.push(Gap::CutAfter));
    assert_eq!(text(&link, tool(3, "read", json!({}))).await.unwrap(), "ok");
    assert_eq!(fake.executed("read"), 3);
    fake.set(|state| state.gaps.extend([Gap::CutAfter, Gap::CutAfter]));
    assert!(matches!(text(&link, tool(4, "read", json!({}))).await, Err(Failure::OutcomeUnknown { .. })));
    assert_eq!(fake.executed("read"), 5);
}

#[tokio::test]
async fn u5_the_operators_list_makes_a_tool_safe() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    let server = Server { safe_tools: vec!["incr".into()], ..Server::clone(&fake.server()) };
    let link = bench.ready(&Arc::new(server)).await;
    fake.set(|state| state.gaps.push(Gap::CutBefore));
    assert_eq!(text(&link, tool(1, "incr", json!({}))).await.unwrap(), "ok");
}

#[tokio::test]
async fn ac_03_3_a_refused_connection_is_tried_again_and_executed_once() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    let record = bench.ready(&fake.server()).await.record();
    fake.close().await;
    // A worker without connections: there is no race with the close of an old one.
    let later = Bench::new();
    let link = later.restore(&fake.server(), record);
    let (began, call) = (Instant::now(), tool(1, "incr", json!({})));
    let (answer, ()) = tokio::join!(text(&link, call), async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        fake.reopen().await;
    });
    assert_eq!(answer.unwrap(), "ok");
    assert!(began.elapsed() >= Duration::from_secs(1));
    assert_eq!((fake.executed("incr"), fake.count("initialize")), (1, 1));
}

#[tokio::test]
async fn u8_patience_has_an_end_that_names_the_server() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    let server = Server { patience: Duration::from_millis(300), ..Server::clone(&fake.server()) };
    let server = Arc::new(server);
    let record = bench.ready(&server).await.record();
    fake.close().await;
    let later = Bench::new();
    let link = later.restore(&server, record);
    let failure = text(&link, tool(1, "incr", json!({}))).await.unwrap_err();
    assert!(failure.is_unreachable(), "{failure}");
    assert_eq!((failure.outcome(), failure.server().as_str()), (Outcome::NotDispatched, "srv"));
    assert!(failure.to_string().contains("server `srv`"), "{failure}");
}

#[tokio::test]
async fn ac_03_4_a_json_rpc_error_is_passed_through() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    let link = bench.ready(&fake.server()).await;
    let (_, response) = whole(link.call(tool(1, "fail", json!({}))).await).await.unwrap();
    assert_eq!(response["error"]["code"], -32602);
    assert_eq!((fake.executed("fail"), fake.count("initialize")), (1, 1));
    let refused = r#"{"jsonrpc":"2.0","error":{"code":-32602,"message":"no"},"id":null}"#;
    fake.set(|state| state.gaps.push(Gap::Status(400, refused)));
    let call = tool(2, "incr", json!({}));
    let id: serde_json::Value = serde_json::from_slice(&call.id).unwrap();
    let (_, response) = whole(link.call(call).await).await.unwrap();
    assert_eq!((&response["error"]["message"], &response["id"]), (&json!("no"), &id));
}

#[tokio::test]
async fn ac_03_6_a_call_that_was_refused_before_execution_is_executed_once() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    let link = bench.ready(&fake.server()).await;
    fake.forget();
    assert_eq!(text(&link, tool(1, "incr", json!({}))).await.unwrap(), "ok");
    assert_eq!((fake.executed("incr"), fake.count("initialize")), (1, 2));
}

#[tokio::test]
async fn ac_03_a_gateways_502_is_ambiguous() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    let link = bench.ready(&fake.server()).await;
    for status in [502, 503, 504] {
        fake.set(|state| state.gaps.push(Gap::Status(status, "<html>")));
        let failure = text(&link, tool(u64::from(status), "incr", json!({}))).await.unwrap_err();
        assert!(matches!(failure, Failure::OutcomeUnknown { .. }), "{status}: {failure}");
    }
    whole(link.call(request(&routed(1), "tools/list", &json!({}))).await).await.unwrap();
    fake.set(|state| state.gaps.extend([Gap::Status(503, ""), Gap::Status(502, "")]));
    assert_eq!(text(&link, tool(2, "read", json!({}))).await.unwrap(), "ok");
    assert_eq!(fake.count("initialize"), 1);
}

#[tokio::test]
async fn ac_03_a_server_without_sessions_that_says_503_has_executed_nothing() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    fake.set(|state| state.issue_ids = false);
    let link = bench.ready(&fake.server()).await;
    fake.set(|state| state.gaps.extend([Gap::Status(503, ""), Gap::Status(503, "")]));
    assert_eq!(text(&link, tool(1, "incr", json!({}))).await.unwrap(), "ok");
    assert_eq!(fake.executed("incr"), 1);
}

#[tokio::test]
async fn u11_credentials_are_the_configured_ones_and_are_resolved_anew_when_refused() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    bench.variables.set("TOKEN", "one");
    fake.set(|state| state.authorization = Some("Bearer one".to_owned()));
    let link = bench.ready(&fake.server_with(&[("authorization", "Bearer ${TOKEN}")])).await;
    assert_eq!(text(&link, tool(1, "incr", json!({}))).await.unwrap(), "ok");
    fake.set(|state| state.authorization = Some("Bearer two".to_owned()));
    let failure = text(&link, tool(2, "incr", json!({}))).await.unwrap_err();
    assert!(matches!(failure, Failure::Unauthorized { .. }), "{failure}");
    bench.variables.set("TOKEN", "two");
    assert_eq!(text(&link, tool(3, "incr", json!({}))).await.unwrap(), "ok");
    assert_eq!((fake.executed("incr"), fake.count("initialize")), (2, 1));
    let shown = format!("{failure} {failure:?} {link:?}");
    assert!(!shown.contains("one") && !shown.contains("upstream-1"), "{shown}");
}

#[tokio::test]
async fn u11_a_variable_that_is_not_set_is_named() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    let failure = bench.open(&fake.server_with(&[("authorization", "Bearer ${NOT_SET_AT_ALL}")])).await.unwrap_err();
    assert!(matches!(failure, Failure::Configuration { .. }), "{failure}");
    assert!(failure.to_string().contains("NOT_SET_AT_ALL"), "{failure}");
    assert_eq!(fake.count("POST"), 0);
}
