//! The faults that UP-H is told: each does what it says, to the request that it names, and to no other.

use anyhow::{Context as _, Result};
use mainstay_tests::{Ended, RawClient, UpH, wait_until};
use serde_json::json;
use std::time::{Duration, Instant};

const VERSION: &str = "2025-11-25";
const BOUND: Duration = Duration::from_secs(10);

async fn opened() -> Result<(UpH, RawClient)> {
    let up = UpH::start().await?;
    let client = RawClient::open(&up.url(), VERSION).await?;
    Ok((up, client))
}

#[tokio::test]
async fn ac02_each_dialect_is_spoken_for_an_unknown_id_only() -> Result<()> {
    let up = UpH::start().await?;
    let dialects = [
        ("404-32001-null", 404, Some(-32001)),
        ("404-32600-string", 404, Some(-32600)),
        ("404-text", 404, None),
        ("410", 410, None),
        ("400-32000-json", 400, Some(-32000)),
        ("400-32000-sse", 400, Some(-32000)),
        ("401-session", 401, None),
        ("503-32001", 503, Some(-32001)),
        ("500", 500, Some(-32603)),
        ("500-text", 500, None),
        ("200-32600", 200, Some(-32600)),
        ("200-32004", 200, Some(-32004)),
    ];
    for (preset, status, code) in dialects {
        let client = RawClient::open(&up.url(), VERSION).await?;
        up.dialect(preset).await?;
        assert_eq!(client.call("read", json!({})).await?.text()?, "read", "{preset}");
        up.forget().await?;
        let outcome = client.call("read", json!({})).await?;
        assert_eq!(outcome.status, status, "{preset}");
        let said = outcome.response().and_then(|response| response["error"]["code"].as_i64());
        assert_eq!(said, code, "{preset}: {}", outcome.body_text());
        assert_eq!(outcome.header("www-authenticate"), None, "{preset}");
        if status == 200 {
            let id = &outcome.response().context("no response")?["id"];
            assert!(id.is_u64(), "{preset}: the request's own id");
        }
    }
    Ok(())
}

#[tokio::test]
async fn ac02_a_challenge_meets_every_request_and_adoption_meets_none() -> Result<()> {
    let (up, client) = opened().await?;
    up.dialect("401-challenge").await?;
    let outcome = client.call("read", json!({})).await?;
    assert_eq!(outcome.status, 401);
    assert_eq!(outcome.header("www-authenticate"), Some("Bearer error=\"invalid_token\""));
    up.dialect("adopt").await?;
    up.forget().await?;
    let facts = client.call("whoami", json!({})).await?.json()?;
    assert_eq!(facts["session"].as_str(), client.session.as_deref());
    assert_eq!(facts["calls"], 1, "a new session under the old id");
    let order =
        json!({"status": 418, "content_type": "text/html", "headers": {"x-proxy": "edge"}, "body": "<p>no</p>"});
    up.order("/dialect", order).await?;
    up.forget().await?;
    let outcome = client.call("read", json!({})).await?;
    assert_eq!((outcome.status, outcome.header("x-proxy")), (418, Some("edge")));
    assert_eq!(outcome.body_text(), "<p>no</p>");
    Ok(())
}

#[tokio::test]
async fn a_server_without_ids_issues_none_and_can_forget_too() -> Result<()> {
    let up = UpH::start().await?;
    up.order("/ids", json!({"issue": false})).await?;
    let client = RawClient::open(&up.url(), VERSION).await?;
    assert_eq!(client.session, None);
    assert_eq!(client.call("read", json!({})).await?.text()?, "read");
    up.forget().await?;
    assert_eq!(client.call("read", json!({})).await?.status, 404);
    Ok(())
}

#[tokio::test]
async fn ac03_a_cut_after_executing_executes_and_one_before_does_not() -> Result<()> {
    let (up, client) = opened().await?;
    up.gap(json!({"kind": "cut_after", "tool": "incr"})).await?;
    assert_eq!(client.call("read", json!({})).await?.text()?, "read");
    assert!(client.call("incr", json!({})).await.is_err(), "cut");
    assert_eq!(up.incr_lines()?.len(), 1);
    up.gap(json!({"kind": "cut_before", "tool": "incr"})).await?;
    assert!(client.call("incr", json!({})).await.is_err(), "cut");
    assert_eq!(up.incr_lines()?.len(), 1);
    up.gap(json!({"kind": "rpc_error", "code": -32602, "tool": "incr"})).await?;
    assert_eq!(client.call("incr", json!({})).await?.error()?["code"], -32602);
    assert_eq!(up.incr_lines()?.len(), 2);
    assert_eq!(client.call("incr", json!({})).await?.text()?, "3");
    assert_eq!(up.requests("tools/call").await?.len(), 5, "each arrived once");
    assert_eq!(up.count("/gaps_left").await?, 0);
    Ok(())
}

#[tokio::test]
async fn a_delay_delays_and_a_hang_hangs_for_ever() -> Result<()> {
    let (up, mut client) = opened().await?;
    up.gap(json!({"kind": "delay", "ms": 120})).await?;
    let began = Instant::now();
    client.call("read", json!({})).await?.text()?;
    assert!(began.elapsed() >= Duration::from_millis(120));
    up.gap(json!({"kind": "hang", "times": "forever"})).await?;
    client.bound = Duration::from_millis(150);
    assert!(client.call("read", json!({})).await.is_err());
    assert!(client.request("ping", json!({})).await.is_err());
    assert_eq!(up.executions("read").await?, 1);
    up.gap(json!({"kind": "clear"})).await?;
    up.gap(json!({"kind": "delay", "ms": 300, "tool": "incr"})).await?;
    assert!(client.call("incr", json!({})).await.is_err(), "the client gives up first");
    let executed = async || up.executions("incr").await.is_ok_and(|calls| calls == 1);
    wait_until("the call to be executed all the same", BOUND, executed).await?;
    client.bound = BOUND;
    client.call("read", json!({})).await?.text()?;
    up.gap(json!({"kind": "status", "status": 503, "headers": {"retry-after": "1"}, "body": "busy", "method": "GET"}))
        .await?;
    let busy = client.get_stream(None).await?;
    assert_eq!((busy.status, busy.header("retry-after")), (503, Some("1")));
    Ok(())
}

#[tokio::test]
async fn ac03_refusing_closes_the_port_and_opens_the_same_one_again() -> Result<()> {
    let (up, client) = opened().await?;
    let mut stream = client.get_stream(None).await?;
    up.gap(json!({"kind": "refuse", "ms": 300})).await?;
    let refused = client.call("read", json!({})).await;
    assert!(refused.is_err_and(|error| format!("{error:?}").contains("refused")), "a connect is refused");
    assert_eq!(stream.next_event(BOUND).await?, None);
    assert_eq!(stream.ended(), Some(Ended::Cut));
    wait_until("the port to open again", BOUND, async || client.call("read", json!({})).await.is_ok()).await?;
    up.gap(json!({"kind": "refuse"})).await?;
    assert_eq!(up.counters().await?["listening"], false);
    up.gap(json!({"kind": "accept"})).await?;
    assert_eq!(client.call("read", json!({})).await?.text()?, "read", "sessions outlive a closed port");
    Ok(())
}

#[tokio::test]
async fn a_plain_stream_cut_in_the_middle_is_executed_to_its_end() -> Result<()> {
    let (up, client) = opened().await?;
    up.answer("sse").await?;
    up.gap(json!({"kind": "cut_sse", "events": 2, "tool": "prog"})).await?;
    let call = json!({"name": "prog", "arguments": {"n": 4, "delay_ms": 5}, "_meta": {"progressToken": 1}});
    let outcome = client.post(&client.message("tools/call", call)).await?.finish(BOUND).await?;
    assert_eq!((outcome.ended, outcome.messages.len()), (Ended::Cut, 2));
    assert_eq!(outcome.last_event_id(), None);
    let done = async || up.count("/completions/prog").await.is_ok_and(|calls| calls == 1);
    wait_until("the call to complete", BOUND, done).await?;
    up.gap(json!({"kind": "cut_all"})).await?;
    assert_eq!(client.call("read", json!({})).await?.text()?, "read");
    Ok(())
}

#[tokio::test]
async fn a_killed_server_comes_back_on_its_ports_without_its_sessions() -> Result<()> {
    let (mut up, client) = opened().await?;
    let url = up.url();
    up.kill().await?;
    assert!(client.call("read", json!({})).await.is_err());
    up.start_again().await?;
    assert_eq!(up.url(), url);
    assert_eq!(client.call("read", json!({})).await?.status, 404);
    Ok(())
}

#[tokio::test]
async fn ac13_a_demanded_token_is_demanded() -> Result<()> {
    let (up, client) = opened().await?;
    up.order("/auth", json!({"bearer": "one"})).await?;
    assert_eq!(client.call("read", json!({})).await?.status, 401);
    let known = client.clone().with_header("authorization", "Bearer one")?;
    assert_eq!(known.call("read", json!({})).await?.status, 200);
    let log = up.log().await?;
    let last = log.last().context("an empty journal")?;
    assert_eq!(last["headers"]["authorization"], "Bearer one");
    up.order("/auth", json!({"bearer": "two", "forget": true})).await?;
    let renewed = client.clone().with_header("authorization", "Bearer two")?;
    assert_eq!(renewed.call("read", json!({})).await?.status, 404);
    Ok(())
}

#[tokio::test]
async fn many_sessions_work_beside_each_other() -> Result<()> {
    let up = UpH::start().await?;
    let began = Instant::now();
    let clients = (0..200).map(async |_| {
        let client = RawClient::open(&up.url(), VERSION).await?;
        for call in 1..=5 {
            assert_eq!(client.call("whoami", json!({})).await?.json()?["calls"], call);
        }
        anyhow::Ok(())
    });
    futures_util::future::try_join_all(clients).await?;
    assert_eq!(up.count("/sessions").await?, 200);
    assert_eq!(up.executions("whoami").await?, 1000);
    assert!(began.elapsed() < BOUND, "took {:?}", began.elapsed());
    Ok(())
}
