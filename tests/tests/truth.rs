//! Recovery in every dialect, and nothing executed twice in silence (AC-02, AC-03, AC-04; U4, U5, U8).

use anyhow::{Context as _, Result};
use mainstay_tests::{Gateway, RawClient, UpH, UpS, stretched, wait_until};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const VERSION: &str = "2025-11-25";
const BOUND: Duration = Duration::from_secs(20);

async fn stand() -> Result<(UpH, Gateway, RawClient)> {
    let up = UpH::start().await?;
    let gateway = Gateway::start(&up.toml("h"), &[]).await?;
    let client = RawClient::open(&gateway.url("h")?, VERSION).await?;
    Ok((up, gateway, client))
}

#[tokio::test]
async fn u4_ac02_the_server_forgets_us_in_every_dialect() -> Result<()> {
    let (up, _gateway, client) = stand().await?;
    let session = client.session.clone();
    // A 500 may come after execution: only a tool known to be read-only is then called again.
    client.request("tools/list", Value::Null).await?.result()?;
    for dialect in [
        "404-32001-null",
        "404-32600-string",
        "404-text",
        "410",
        "400-32000-json",
        "400-32000-sse",
        "401-session",
        "503-32001",
        "500",
        "500-text",
        "200-32600",
        "200-32004",
    ] {
        up.dialect(dialect).await?;
        client.call_through("read", json!({})).await?.result().context(dialect)?;
        let (initializes, initialized) = (up.count("/initializes").await?, up.count("/initialized").await?);
        up.forget().await?;
        let outcome = client.call_through("read", json!({})).await?;
        assert_eq!(outcome.status, 200, "{dialect}");
        outcome.result().context(dialect)?;
        assert_eq!(up.count("/initializes").await? - initializes, 1, "{dialect}: exactly one initialize");
        assert_eq!(up.count("/initialized").await? - initialized, 1, "{dialect}: exactly one initialized");
    }
    let requests = up.requests("initialize").await?;
    assert!(requests.iter().all(|request| request["headers"]["mcp-session-id"].is_null()), "without an old id");
    assert_eq!(client.session, session);
    Ok(())
}

#[tokio::test]
async fn u4_ac02_a_challenge_is_authentication_and_not_loss() -> Result<()> {
    let (up, _gateway, client) = stand().await?;
    client.call("read", json!({})).await?.result()?;
    let before = up.count("/initializes").await?;
    up.dialect("401-challenge").await?;
    let outcome = client.call_through("read", json!({})).await?;
    assert_eq!(outcome.status, 200);
    assert_eq!(outcome.named_outcome(), Some("authentication_needed"));
    assert_eq!(up.count("/initializes").await?, before, "no initialize");
    Ok(())
}

#[tokio::test]
async fn u4_ac02_a_404_to_a_server_that_never_gave_an_id_is_no_loss() -> Result<()> {
    let up = UpH::start().await?;
    up.order("/ids", json!({"issue": false})).await?;
    let gateway = Gateway::start(&up.toml("h"), &[]).await?;
    let client = RawClient::open(&gateway.url("h")?, VERSION).await?;
    client.call("read", json!({})).await?.result()?;
    let before = up.count("/initializes").await?;
    up.order("/dialect", json!({"status": 404, "body": "not here", "content_type": "text/plain", "when": "always"}))
        .await?;
    let outcome = client.call_through("read", json!({})).await?;
    assert_eq!(outcome.status, 200);
    outcome.error()?;
    assert_eq!(up.count("/initializes").await?, before, "no initialize");
    Ok(())
}

#[tokio::test]
async fn u4_ac02_lost_twice_is_a_clear_error_and_the_next_call_works() -> Result<()> {
    let (up, _gateway, client) = stand().await?;
    client.call("read", json!({})).await?.result()?;
    let before = up.count("/initializes").await?;
    up.order(
        "/dialect",
        json!({"status": 404, "body": "Session not found", "content_type": "text/plain", "when": "always"}),
    )
    .await?;
    let outcome = client.call_through("read", json!({})).await?;
    assert_eq!(outcome.status, 200);
    outcome.error()?;
    assert!(up.count("/initializes").await? - before <= 2, "never a loop");
    up.dialect("404-32001-null").await?;
    client.call_through("read", json!({})).await?.result()?;
    Ok(())
}

#[tokio::test]
async fn u4_fifty_calls_at_once_make_one_new_session() -> Result<()> {
    let (up, _gateway, client) = stand().await?;
    client.call("read", json!({})).await?.result()?;
    let before = up.count("/initializes").await?;
    up.forget().await?;
    let calls = (0..50).map(|_| {
        let client = client.clone();
        tokio::spawn(async move { client.call_through("read", json!({})).await?.result().cloned() })
    });
    for call in calls.collect::<Vec<_>>() {
        call.await??;
    }
    assert_eq!(up.count("/initializes").await? - before, 1, "single flight");
    Ok(())
}

#[tokio::test]
async fn u5_ac03_1_an_unsafe_call_that_was_cut_after_execution_is_unknown_within_two_seconds() -> Result<()> {
    let (up, _gateway, client) = stand().await?;
    up.gap(json!({"kind": "cut_after", "tool": "incr", "times": 1})).await?;
    let started = Instant::now();
    let outcome = client.call_through("incr", json!({})).await?;
    assert!(started.elapsed() < stretched(Duration::from_secs(2)));
    assert_eq!(outcome.status, 200);
    assert_eq!(outcome.named_outcome(), Some("outcome_unknown"));
    assert_eq!(outcome.error()?["data"]["server"], "h", "it names the server");
    assert_eq!(up.incr_lines()?.len(), 1, "exactly one execution");
    Ok(())
}

#[tokio::test]
async fn u5_ac03_2_a_safe_call_may_be_repeated_once() -> Result<()> {
    let (up, _gateway, client) = stand().await?;
    client.request("tools/list", Value::Null).await?.result()?;
    up.gap(json!({"kind": "cut_after", "tool": "read", "times": 1})).await?;
    client.call_through("read", json!({})).await?.result()?;
    assert_eq!(up.executions("read").await?, 2);
    Ok(())
}

#[tokio::test]
async fn u5_ac03_3_a_call_that_was_never_sent_waits_for_the_server() -> Result<()> {
    let (up, _gateway, client) = stand().await?;
    client.call("read", json!({})).await?.result()?;
    up.gap(json!({"kind": "refuse", "ms": 1000})).await?;
    client.call_through("incr", json!({})).await?.result()?;
    assert_eq!(up.incr_lines()?.len(), 1, "one execution");
    Ok(())
}

#[tokio::test]
async fn u5_ac03_4_a_json_rpc_error_is_an_answer() -> Result<()> {
    let (up, _gateway, client) = stand().await?;
    let before = up.count("/initializes").await?;
    up.gap(json!({"kind": "rpc_error", "code": -32602, "tool": "incr", "times": 1})).await?;
    let outcome = client.call_through("incr", json!({})).await?;
    assert_eq!(outcome.error()?["code"], -32602, "passed through");
    assert_eq!(up.count("/initializes").await?, before, "no reconnect");
    Ok(())
}

#[tokio::test]
async fn u5_ac03_5_the_gateway_adds_no_execution_of_its_own_over_a_crash() -> Result<()> {
    let (up, mut gateway, client) = stand().await?;
    up.gap(json!({"kind": "answer_late", "ms": 3000, "tool": "incr", "times": 1})).await?;
    let message = client.message("tools/call", json!({"name": "incr", "arguments": {}}));
    let running = client.post(&message).await?;
    wait_until("the server has executed it", BOUND, async || up.incr_lines().is_ok_and(|lines| lines.len() == 1))
        .await?;
    gateway.kill_all().await?;
    drop(running);
    gateway.start_again().await?;
    let exchange = client.post(&message).await?;
    client.follow(exchange).await?.result()?;
    assert_eq!(up.incr_lines()?.len(), 2, "as many as the client's explicit sends");
    Ok(())
}

#[tokio::test]
async fn u4_ac03_6_a_call_refused_for_a_lost_session_runs_once() -> Result<()> {
    let (up, _gateway, client) = stand().await?;
    client.call("read", json!({})).await?.result()?;
    up.forget().await?;
    client.call_through("incr", json!({})).await?.result()?;
    assert_eq!(up.incr_lines()?.len(), 1);
    Ok(())
}

/// One good server, one that accepts and never answers, one that refuses, one without a listening stream.
#[tokio::test]
async fn u8_ac04_bad_servers_do_not_spoil_the_rest() -> Result<()> {
    let (good, mut away, quiet) = (UpH::start().await?, UpH::start().await?, UpH::start().await?);
    quiet.order("/get", json!({"status": 405})).await?;
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let hung = format!("[servers.hung]\nurl = \"http://{}/mcp\"\npatience = \"1s\"\n", silent.local_addr()?);
    away.kill().await?;
    let config = format!("{}{}{hung}{}patience = \"1s\"\n", good.toml("good"), quiet.toml("quiet"), away.toml("away"),);
    let gateway = Gateway::start(&config, &[]).await?;

    let mut clients = Vec::new();
    for server in ["good", "quiet", "hung", "away"] {
        let started = Instant::now();
        let mut client = RawClient::new(&gateway.url(server)?)?;
        client.initialize(VERSION).await?.result().context(server)?;
        assert!(
            started.elapsed() < stretched(Duration::from_secs(2)),
            "{server}: `initialize` waits for no bad server"
        );
        client.notify("notifications/initialized", Value::Null).await?;
        clients.push(client);
    }
    let [good_client, quiet_client, hung_client, away_client] = clients.as_slice() else { unreachable!("four") };
    for _ in 0..50 {
        good_client.call("echo", json!({"text": "a"})).await?.result()?;
        quiet_client.call("echo", json!({"text": "b"})).await?.result()?;
    }
    assert!(quiet.count("/gets").await? <= 1, "no traffic to a server without a listening stream");

    for (client, server) in [(hung_client, "hung"), (away_client, "away")] {
        let outcome = client.call_through("echo", json!({"text": "?"})).await?;
        assert_eq!(outcome.status, 200, "{server}: an error inside 200");
        assert_eq!(outcome.error()?["data"]["server"], server, "it names the server");
    }
    let mut listening = away_client.get_stream(None).await?;
    assert_eq!(listening.status, 200);
    away.start_again().await?;
    wait_until("the server is back", BOUND, async || {
        away_client.call_through("echo", json!({"text": "back"})).await.is_ok_and(|outcome| outcome.result().is_ok())
    })
    .await?;
    let mut changed = false;
    while let Some(message) = listening.next_message(BOUND).await? {
        if message["method"] == "notifications/tools/list_changed" {
            changed = true;
            break;
        }
    }
    assert!(changed, "the client is told to list again");

    good.forget().await?;
    good_client.call_through("echo", json!({"text": "a"})).await?.result()?;
    quiet_client.call_through("echo", json!({"text": "b"})).await?.result()?;
    Ok(())
}

#[tokio::test]
async fn c3_ac07_a_dying_child_is_noticed_and_its_successor_initialized_before_any_call() -> Result<()> {
    let up = UpS::new(&[])?;
    let gateway = Gateway::start(&up.toml("s")?, &[]).await?;
    let client = RawClient::open(&gateway.url("s")?, VERSION).await?;
    client.call("echo", json!({"text": "a"})).await?.result()?;
    let message = client.message("tools/call", json!({"name": "slow", "arguments": {"ms": 60_000}}));
    let running = client.post(&message).await?;
    let child = up.starts()?.pop().context("a child")?;
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(i32::try_from(child.pid)?).context("a pid")?,
        rustix::process::Signal::KILL,
    )?;
    let started = Instant::now();
    let outcome = client.follow(running).await?;
    assert!(started.elapsed() < stretched(Duration::from_secs(2)));
    assert_eq!(outcome.named_outcome(), Some("outcome_unknown"));
    client.call_through("echo", json!({"text": "b"})).await?.result()?;
    let successor = up.starts()?.pop().context("a successor")?;
    let methods = up.methods(successor.pid)?;
    assert_eq!(methods[..3], ["initialize", "notifications/initialized", "tools/call"], "{methods:?}");
    Ok(())
}

#[tokio::test]
async fn c3_ac07_4_a_child_that_ends_before_any_output_is_told_with_its_last_words() -> Result<()> {
    let up = UpS::new(&["--exit-before-output", "3"])?;
    let gateway = Gateway::start(&up.toml("s")?, &[]).await?;
    let mut client = RawClient::new(&gateway.url("s")?)?;
    let started = Instant::now();
    let outcome = client.initialize(VERSION).await?;
    assert!(started.elapsed() < stretched(Duration::from_secs(5)));
    assert_eq!(outcome.named_outcome(), Some("child_exited"));
    assert!(outcome.error()?["message"].as_str().is_some_and(|text| text.contains('3')), "{outcome:?}");
    assert_eq!(gateway.status().await?["sessions"]["stored"], 0, "S2: no row");
    Ok(())
}

#[tokio::test]
async fn c2_ac08_chatty_and_large() -> Result<()> {
    let chatty = UpS::new(&["--stderr-bytes", "4194304", "--noise"])?;
    let http = UpH::start().await?;
    let gateway = Gateway::start(&format!("{}{}", chatty.toml("s")?, http.toml("h")), &[]).await?;
    let mut s = RawClient::open(&gateway.url("s")?, VERSION).await?;
    s.bound = Duration::from_secs(60);
    s.call_through("echo", json!({"text": "after four mebibytes of noise"})).await?.result()?;
    let pid = s.call_through("whoami", json!({})).await?.json()?["pid"].clone();
    let h = RawClient::open(&gateway.url("h")?, VERSION).await?;
    for mode in ["json", "sse"] {
        http.answer(mode).await?;
        let direct = RawClient::open(&http.url(), VERSION).await?;
        let wanted = direct.call("big", json!({"bytes": 8 << 20, "multibyte": true})).await?.text()?.to_owned();
        let got = h.call_through("big", json!({"bytes": 8 << 20, "multibyte": true})).await?;
        assert!(got.text()? == wanted, "{mode}: byte-identical");
        let through_child = s.call_through("big", json!({"bytes": 8 << 20, "multibyte": true})).await?;
        assert!(through_child.text()? == wanted, "stdio: byte-identical");
    }
    let beyond = s.call_through("big", json!({"bytes": 17 << 20})).await?;
    assert_eq!(beyond.named_outcome(), Some("answer_too_large"));
    let after = s.call_through("whoami", json!({})).await?.json()?;
    assert_eq!(after["pid"], pid, "the same child goes on");
    Ok(())
}

#[tokio::test]
async fn u5_an_unsafe_call_that_failed_inside_the_server_is_unknown_and_not_rejected() -> Result<()> {
    let (up, _gateway, client) = stand().await?;
    client.call("read", json!({})).await?.result()?;
    up.gap(json!({"kind": "status", "status": 500, "content_type": "text/plain", "body": "crashed", "tool": "incr"}))
        .await?;
    let outcome = client.call_through("incr", json!({})).await?;
    assert_eq!(outcome.named_outcome(), Some("outcome_unknown"));
    Ok(())
}

#[tokio::test]
async fn r8_a_cancelled_call_that_is_never_answered_frees_its_place() -> Result<()> {
    let up = UpS::new(&[])?;
    let gateway = Gateway::start(&up.toml("s")?, &[]).await?;
    let client = RawClient::open(&gateway.url("s")?, VERSION).await?;
    for _ in 0..5 {
        let call = client.message("tools/call", json!({"name": "slow", "arguments": {"ms": 600_000}}));
        let exchange = client.post(&call).await?;
        client.notify("notifications/cancelled", json!({"requestId": call["id"]})).await?;
        drop(exchange);
    }
    wait_until("no call is in flight", BOUND, async || {
        let instances = gateway.admin_get("/api/v1/sessions").await;
        instances.is_ok_and(|(_, listed)| listed["sessions"][0]["calls"] == 0)
    })
    .await
}

#[tokio::test]
async fn u8_a_slow_server_is_known_once_it_has_answered() -> Result<()> {
    let up = UpH::start().await?;
    let gateway = Gateway::start(&up.toml("h"), &[]).await?;
    up.gap(json!({"kind": "delay", "ms": 1500, "method": "initialize", "times": 1})).await?;
    let mut first = RawClient::new(&gateway.url("h")?)?;
    let hello = first.initialize(VERSION).await?;
    assert_eq!(hello.result()?["serverInfo"]["version"], "unknown", "answered in its name");
    first.notify("notifications/initialized", Value::Null).await?;
    first.call_through("echo", json!({"text": "a"})).await?.result()?;
    assert_eq!(up.count("/initializes").await?, 1, "one session at the server, not two");
    up.gap(json!({"kind": "delay", "ms": 1500, "method": "initialize", "times": 1})).await?;
    let mut second = RawClient::new(&gateway.url("h")?)?;
    let hello = second.initialize(VERSION).await?;
    assert_ne!(hello.result()?["serverInfo"]["version"], "unknown", "answered from what is known of it");
    Ok(())
}

#[tokio::test]
async fn u4_ac02_forgotten_again_between_the_new_session_and_the_repeated_call() -> Result<()> {
    let (up, _gateway, client) = stand().await?;
    client.call("read", json!({})).await?.result()?;
    let before = up.count("/initializes").await?;
    up.order("/forget", json!({"after_initialized": 2})).await?;
    up.forget().await?;
    let outcome = client.call_through("read", json!({})).await?;
    assert_eq!(outcome.status, 200);
    assert_eq!(outcome.named_outcome(), Some("upstream_lost_again"));
    assert!(up.count("/initializes").await? - before <= 2, "at most two, never a loop");
    up.order("/forget", json!({"after_initialized": 0})).await?;
    client.call_through("read", json!({})).await?.result().context("the next call works")?;
    Ok(())
}
