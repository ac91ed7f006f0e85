//! The bounds on what clients may take, on the wire (S12): past one the request is refused under its own id, the setting
//! is named, and nobody else's session is touched.

use anyhow::{Context as _, Result};
use mainstay_tests::{Gateway, Outcome, RawClient, StatelessClient, UpH, wait_until, within};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const VERSION: &str = "2025-11-25";
const BATCHES: &str = "2025-03-26";
const BOUND: Duration = Duration::from_secs(30);
const LONG: u64 = 600_000;

async fn stand(config: &str) -> Result<(UpH, Gateway)> {
    let up = UpH::start().await?;
    let gateway = Gateway::start(&format!("{config}{}", up.toml("h")), &[]).await?;
    Ok((up, gateway))
}

/// Status, the setting that is named, and after how many seconds to come again.
fn refusal(outcome: &Outcome) -> Result<(u16, String, Option<u64>)> {
    let error = &outcome.response().with_context(|| outcome.body_text())?["error"];
    let limit = error["data"]["limit"].as_str().with_context(|| outcome.body_text())?.to_owned();
    assert!(error["message"].as_str().is_some_and(|text| text.contains(&limit)), "people are told it, too: {error}");
    let after = outcome.header("retry-after").map(str::parse).transpose()?;
    Ok((outcome.status, limit, after))
}

async fn refused_total(gateway: &Gateway, limit: &str) -> Result<u64> {
    let http = reqwest::Client::builder().no_proxy().build()?;
    let asked = http.get(gateway.admin_url("/metrics")?).bearer_auth(gateway.admin_token()?).send().await?;
    let text = asked.text().await?;
    let line = format!("mainstay_refused_total{{limit=\"{limit}\"}} ");
    text.lines().find_map(|found| found.strip_prefix(&line)).context("a count")?.parse().context("a number")
}

#[tokio::test]
async fn s12_a_peer_opens_so_many_sessions_within_a_minute_and_then_one_after_the_other() -> Result<()> {
    const LIMIT: &str = "limits.initialize_per_minute";
    let (up, gateway) = stand("[limits]\ninitialize_per_minute = 5\n").await?;
    let url = gateway.url("h")?;
    let (kept, started) = (RawClient::open(&url, VERSION).await?, Instant::now());
    let mut fresh = RawClient::new(&url)?.with_fresh_connections()?;
    let mut opened = 1;
    let refused = loop {
        // On one connection and on many, under names of one's own and under an old session: it is all one peer.
        let mut client = match opened % 4 {
            0 => RawClient::new(&url)?.with_header("x-agent-name", &format!("agent-{opened}"))?,
            1 => fresh.clone(),
            2 => kept.clone().with_session("an-old-session", VERSION),
            _ => kept.clone(),
        };
        let outcome = client.initialize(VERSION).await?;
        if outcome.status != 200 {
            break outcome;
        }
        opened += 1;
        assert!(opened < 100, "there is no limit");
    };
    // Every twelve seconds there is one more, should this machine be that slow.
    let more = started.elapsed().as_secs() / 12;
    assert!((5..=5 + more).contains(&opened), "{opened}");
    let (status, limit, after) = refusal(&refused)?;
    let after = after.context("told when to come again")?;
    assert_eq!((status, limit.as_str(), refused.named_outcome()), (429, LIMIT, Some("limit_reached")));
    assert!((1..=12).contains(&after), "{after}");
    assert_eq!(refused_total(&gateway, LIMIT).await?, 1);
    assert_eq!(up.count("/initializes").await?, opened, "the server hears nothing of it");

    kept.request("tools/list", Value::Null).await?.result().context("a session that lives is served on")?;
    kept.call("echo", json!({"text": "a"})).await?.result()?;
    tokio::time::sleep(Duration::from_secs(after)).await;
    fresh.initialize(VERSION).await?.result().context("the pause was as long as was told")?;
    Ok(())
}

#[tokio::test]
async fn s12_openings_of_who_proves_nothing_count_as_well_and_are_refused_before_it_is_asked() -> Result<()> {
    let auth = "[auth]\nmode = \"token\"\n[auth.tokens]\nalice = \"a-token-of-sufficient-length-0123456789\"\n";
    let (up, gateway) = stand(&format!("[limits]\ninitialize_per_minute = 3\n{auth}")).await?;
    let junk = RawClient::new(&gateway.url("h")?)?.with_header("authorization", "Bearer junk")?;
    let mut statuses = Vec::new();
    for _ in 0..10 {
        statuses.push(junk.clone().initialize(VERSION).await?.status);
    }
    assert!(statuses.starts_with(&[401, 401, 401]) && statuses.contains(&429), "{statuses:?}");
    assert_eq!(up.count("/initializes").await?, 0);
    Ok(())
}

#[tokio::test]
async fn s12_sessions_in_all_have_a_cap_and_none_is_evicted_for_it() -> Result<()> {
    let (_up, gateway) = stand("[limits]\nsessions_max = 2\n").await?;
    let url = gateway.url("h")?;
    let agent = |name: &str| RawClient::new(&url)?.with_header("x-agent-name", name);
    let (mut alice, mut bob, mut carol) = (agent("alice")?, agent("bob")?, agent("carol")?);
    alice.establish(VERSION).await?;
    bob.establish(VERSION).await?;
    let refused = carol.initialize(VERSION).await?;
    assert_eq!(refusal(&refused)?, (429, "limits.sessions_max".into(), Some(1)));
    assert_eq!(refused_total(&gateway, "limits.sessions_max").await?, 1);
    for client in [&alice, &bob] {
        client.call("echo", json!({"text": "still served"})).await?.result()?;
    }
    bob.delete().await?;
    carol.establish(VERSION).await?;
    Ok(())
}

#[tokio::test]
async fn s12_calls_in_flight_have_a_cap_and_those_that_run_go_on() -> Result<()> {
    let (_up, gateway) = stand("[session]\ncalls_in_flight_max = 2\nstreams_max = 2\n").await?;
    let client = RawClient::open(&gateway.url("h")?, VERSION).await?;
    let slow = |ms: u64| client.message("tools/call", json!({"name": "slow", "arguments": {"ms": ms}}));
    let (short, _long) = (client.post(&slow(3000)).await?, client.post(&slow(LONG)).await?);
    let refused = client.call("echo", json!({"text": "one too many"})).await?;
    assert_eq!(refusal(&refused)?, (429, "session.calls_in_flight_max".into(), Some(1)));
    assert_eq!(refused_total(&gateway, "session.calls_in_flight_max").await?, 1);
    let other = RawClient::open(&gateway.url("h")?, VERSION).await?;
    other.call("echo", json!({"text": "a session of its own"})).await?.result()?;
    short.finish(BOUND).await?.result()?;
    client.call("echo", json!({"text": "there is room again"})).await?.result()?;
    Ok(())
}

#[tokio::test]
async fn s12_streams_have_a_cap_and_what_is_refused_was_not_sent() -> Result<()> {
    let (up, gateway) = stand("[session]\ncalls_in_flight_max = 1\nstreams_max = 1\n").await?;
    let client = RawClient::open(&gateway.url("h")?, BATCHES).await?;
    let slow = client.message("tools/call", json!({"name": "slow", "arguments": {"ms": LONG}}));
    let _running = client.post(&slow).await?;
    let echo = client.message("tools/call", json!({"name": "echo", "arguments": {"text": "a"}}));
    let refused = client.post(&json!([echo])).await?.finish(BOUND).await?;
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")));
    assert!(refused.body_text().contains("session.streams_max"), "{}", refused.body_text());
    assert_eq!(refused_total(&gateway, "session.streams_max").await?, 1);
    assert_eq!(up.executions("echo").await?, 0);
    Ok(())
}

/// No pause makes them fit, so none is told.
#[tokio::test]
async fn s12_head_and_body_have_a_cap_that_is_named() -> Result<()> {
    let (_up, gateway) = stand("[limits]\nbody_bytes_max = 10000\nheader_bytes_max = 8192\n").await?;
    let client = RawClient::open(&gateway.url("h")?, VERSION).await?;
    let refused = client.call("echo", json!({"text": "x".repeat(10_000)})).await?;
    assert_eq!((refused.status, refused.header("retry-after")), (413, None));
    let text = refused.body_text();
    assert!(text.starts_with("body_too_large") && text.contains("`limits.body_bytes_max`"), "{text}");
    let refused = client.clone().with_header("x-long", &"x".repeat(8192))?.call("echo", json!({"text": "a"})).await?;
    assert_eq!(refusal(&refused)?, (431, "limits.header_bytes_max".into(), None));
    assert_eq!(refused.named_outcome(), Some("head_too_large"));
    for limit in ["limits.body_bytes_max", "limits.header_bytes_max"] {
        assert_eq!(refused_total(&gateway, limit).await?, 1);
    }
    client.clone().with_header("x-long", &"x".repeat(7000))?.call("echo", json!({"text": "a"})).await?.result()?;
    Ok(())
}

/// What is held while the server opens a session is counted, whatever is asked and whose conversation it is.
#[tokio::test]
async fn s12_stateless_requests_are_counted_before_anything_is_waited_for() -> Result<()> {
    const REQUESTS: &str = "limits.stateless_requests_per_principal";
    const LISTENS: &str = "limits.listens_per_principal";
    let up = UpH::start().await?;
    let limits = "[limits]\nstateless_requests_per_principal = 1\nlistens_per_principal = 1\n";
    let gateway = Gateway::start(&format!("{limits}{}offer = \"both\"\nera = \"legacy\"\n", up.toml("h")), &[]).await?;
    let url = gateway.url("h")?;
    let (listen, named) = (json!({"notifications": {}}), json!({"name": "echo", "taskId": "x"}));
    up.gap(json!({"kind": "hang", "method": "initialize", "times": "forever"})).await?;
    for (limit, held, others) in [
        (REQUESTS, "tools/call", ["tools/call", "server/discover", "tasks/get"].as_slice()),
        (LISTENS, "subscriptions/listen", ["subscriptions/listen"].as_slice()),
    ] {
        let before = up.requests("initialize").await?.len();
        let params = |method: &str| if method == "subscriptions/listen" { listen.clone() } else { named.clone() };
        let client = StatelessClient::new(&url)?.with_handle(held);
        let (method, asked) = (held.to_owned(), params(held));
        let waiting = tokio::spawn(async move { client.request(&method, asked).await });
        wait_until("the server to be asked for a session", BOUND, async || {
            up.requests("initialize").await.is_ok_and(|asked| asked.len() > before)
        })
        .await?;
        for method in others {
            let other = StatelessClient::new(&url)?.with_handle("another");
            let (status, refused) = within(method, BOUND, other.request(method, params(method))).await?;
            assert_eq!((status, &refused["error"]["data"]["limit"]), (429, &json!(limit)), "{method}: {refused}");
        }
        assert_eq!(refused_total(&gateway, limit).await?, others.len() as u64);
        waiting.abort();
    }
    Ok(())
}
