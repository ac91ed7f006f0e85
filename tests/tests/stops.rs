//! Ways out (T5): what a stop keeps, what it ends, and that no moment is a bad one for it.

use anyhow::{Context as _, Result};
use mainstay_tests::{Gateway, RawClient, Setup, UpH, UpS, wait_until, write_program};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const VERSION: &str = "2025-11-25";
const BOUND: Duration = Duration::from_secs(20);
/// Longer than any test waits: what ends sooner was not waited for.
const LONG_DRAIN: &str = "[session]\ndrain_grace = \"5m\"\n";
const SHORT_DRAIN: &str = "[session]\ndrain_grace = \"1s\"\n";

struct Stand {
    up_h: UpH,
    up_s: UpS,
    gateway: Gateway,
}

impl Stand {
    async fn start(session: &str) -> Result<Stand> {
        let (up_h, up_s) = (UpH::start().await?, UpS::new(&[])?);
        let gateway = Gateway::start(&format!("{session}{}{}", up_h.toml("h"), up_s.toml("s")?), &[]).await?;
        Ok(Stand { up_h, up_s, gateway })
    }

    async fn open(&self, server: &str) -> Result<RawClient> {
        let client = RawClient::open(&self.gateway.url(server)?, VERSION).await?;
        client.call_through("whoami", json!({})).await?.result()?;
        Ok(client)
    }

    async fn stored(&self) -> Result<u64> {
        self.gateway.status().await?["sessions"]["stored"].as_u64().context("a count")
    }

    /// Resolves once the drain has begun.
    async fn not_ready(&self) -> Result<()> {
        let (url, http) = (self.gateway.admin_url("/readyz")?, reqwest::Client::builder().no_proxy().build()?);
        wait_until("not ready", BOUND, async || http.get(&url).send().await.is_ok_and(|answer| answer.status() == 503))
            .await
    }
}

async fn whoami(client: &RawClient) -> Result<Value> {
    client.call_through("whoami", json!({})).await?.json()
}

#[tokio::test]
async fn t5_a_stop_by_command_keeps_every_session_and_deletes_nothing() -> Result<()> {
    let mut stand = Stand::start("").await?;
    let (h, s) = (stand.open("h").await?, stand.open("s").await?);
    let before = whoami(&h).await?;
    let server = stand.up_s.starts()?[0];
    let stopped = stand.gateway.cli(&["stop", "--json"]).await?;
    assert!(stopped.status.success(), "{stopped:?}");
    let said: Value = serde_json::from_slice(&stopped.stdout)?;
    assert_eq!((&said["sessions_kept"], &said["retired"]), (&json!(true), &Value::Null));
    assert!(stand.gateway.wait_for_end(BOUND).await?.success());
    assert!(!server.is_alive(), "its children have ended");
    assert_eq!(stand.up_h.count("/deletes").await?, 0);
    let again = stand.gateway.cli(&["stop"]).await?;
    assert_eq!(again.status.code(), Some(3), "nobody is there any more");

    stand.gateway.start_again().await?;
    assert_eq!(stand.stored().await?, 2);
    assert_eq!(whoami(&h).await?["session"], before["session"], "the server's session goes on");
    whoami(&s).await?;
    Ok(())
}

#[tokio::test]
async fn t5_to_retire_closes_every_session_and_deletes_what_servers_hold() -> Result<()> {
    let mut stand = Stand::start("").await?;
    let clients = [stand.open("h").await?, stand.open("s").await?, stand.open("h").await?];
    // Some of them are asleep: nobody has asked for them since the start.
    stand.gateway.stop().await?;
    stand.gateway.start_again().await?;
    whoami(&clients[1]).await?;
    let servers = stand.up_s.starts()?;
    let retired = stand.gateway.cli(&["stop", "--retire", "--json"]).await?;
    assert!(retired.status.success(), "{retired:?}");
    let said: Value = serde_json::from_slice(&retired.stdout)?;
    let counts = json!({"sessions_closed": 3, "sessions_left": 0, "deletes_owed": 0, "deletes_left": 0});
    assert_eq!((&said["sessions_kept"], &said["retired"]), (&json!(false), &counts));
    assert!(stand.gateway.wait_for_end(BOUND).await?.success());
    assert!(servers.iter().all(|server| !server.is_alive()));
    assert_eq!(stand.up_h.count("/deletes").await?, 2);

    stand.gateway.start_again().await?;
    assert_eq!(stand.stored().await?, 0);
    for client in &clients {
        let outcome = client.call("whoami", json!({})).await?;
        assert_eq!(outcome.status, 404, "its id never lives again");
        assert_eq!(outcome.named_outcome(), Some("session_closed"));
    }
    let (_, audit) = stand.gateway.admin_get("/api/v1/audit?action=closed").await?;
    assert_eq!(audit["entries"].as_array().map(Vec::len), Some(3), "{audit}");
    Ok(())
}

#[tokio::test]
async fn t5_u7_what_a_server_does_not_take_when_the_gateway_retires_is_said() -> Result<()> {
    let mut stand = Stand::start("").await?;
    stand.open("h").await?;
    stand.up_h.kill().await?;
    let retired = stand.gateway.cli(&["stop", "--retire"]).await?;
    let said = String::from_utf8_lossy(&retired.stdout).into_owned();
    assert!(retired.status.success() && said.contains("1 sessions are closed"), "{retired:?}");
    assert!(said.contains("1 servers' sessions could not be deleted; those deletes stay owed"), "{said}");
    assert!(stand.gateway.wait_for_end(BOUND).await?.success());
    // As it says: the next start has it, and pays it.
    stand.up_h.start_again().await?;
    stand.gateway.start_again().await?;
    let (_, listed) = stand.gateway.admin_get("/api/v1/owed").await?;
    let id = listed["owed"][0]["id"].to_string();
    let paid = stand.gateway.cli(&["owed", "pay", &id]).await?;
    assert!(paid.status.success(), "{listed} {paid:?}");
    assert_eq!(stand.up_h.count("/deletes").await?, 1);
    Ok(())
}

#[tokio::test]
async fn t5_a_retirement_that_is_killed_closes_whole_sessions_or_none() -> Result<()> {
    let mut stand = Stand::start(SHORT_DRAIN).await?;
    let mut clients = Vec::new();
    for _ in 0..20 {
        clients.push(stand.open("h").await?);
    }
    let slow = clients[0].message("tools/call", json!({"name": "slow", "arguments": {"ms": 60_000}}));
    let exchange = clients[0].post(&slow).await?;
    let url = stand.gateway.admin_url("/api/v1/retire")?;
    let order = reqwest::Client::new().post(url).bearer_auth(stand.gateway.admin_token()?).send();
    let ordered = tokio::spawn(order);
    stand.not_ready().await?;
    stand.gateway.kill_all().await?;
    drop((ordered.await?, exchange));
    stand.gateway.start_again().await?;
    let stored = stand.stored().await?;
    let mut alive = 0;
    for client in &clients {
        let outcome = client.call_through("whoami", json!({})).await?;
        match outcome.status {
            200 => alive += 1,
            404 => assert_eq!(outcome.named_outcome(), Some("session_closed")),
            status => anyhow::bail!("{status}: {outcome:?}"),
        }
    }
    assert_eq!(alive, stored, "each session is the one or the other");
    Ok(())
}

#[tokio::test]
async fn t5_a_second_sigterm_exits_at_once_and_loses_no_session() -> Result<()> {
    for signals in [[Signal::TERM, Signal::TERM], [Signal::INT, Signal::TERM], [Signal::TERM, Signal::INT]] {
        let mut stand = Stand::start(LONG_DRAIN).await?;
        let (h, s) = (stand.open("h").await?, stand.open("s").await?);
        let slow = s.message("tools/call", json!({"name": "slow", "arguments": {"ms": 600_000}}));
        let in_flight = s.post(&slow).await?;
        stand.gateway.signal(signals[0])?;
        stand.not_ready().await?;
        assert!(stand.gateway.keeper_pid().is_ok(), "it waits for the call");
        let hurried = Instant::now();
        stand.gateway.signal(signals[1])?;
        stand.gateway.wait_for_end(BOUND).await?;
        assert!(hurried.elapsed() < Duration::from_secs(60), "not after the grace of five minutes");
        stand.gateway.assert_no_orphans().await?;
        drop(in_flight);
        assert_eq!(stand.up_h.count("/deletes").await?, 0);
        stand.gateway.start_again().await?;
        for client in [&h, &s] {
            whoami(client).await?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn t5_a_stop_lets_a_call_in_flight_end() -> Result<()> {
    let mut stand = Stand::start("").await?;
    let client = stand.open("h").await?;
    let slow = client.message("tools/call", json!({"name": "slow", "arguments": {"ms": 1000}}));
    let exchange = client.post(&slow).await?;
    stand.gateway.signal(Signal::TERM)?;
    let outcome = exchange.finish(BOUND).await?;
    assert_eq!(outcome.text()?, "waited 1000 ms");
    assert!(stand.gateway.wait_for_end(BOUND).await?.success());
    assert_eq!(stand.up_h.executions("slow").await?, 1);
    Ok(())
}

#[tokio::test]
async fn t5_a_signal_at_any_moment_of_the_start_ends_it_and_spoils_nothing() -> Result<()> {
    let mut stand = Stand::start("").await?;
    let client = stand.open("s").await?;
    stand.gateway.stop().await?;
    for round in 0..12 {
        stand.gateway.launch()?;
        // Moments of the start, from its first instruction to a worker that serves.
        tokio::time::sleep(Duration::from_millis(round * round * 4)).await;
        stand.gateway.signal(Signal::TERM)?;
        stand.gateway.wait_for_end(BOUND).await?;
        stand.gateway.assert_no_orphans().await?;
    }
    stand.gateway.start_again().await?;
    assert_eq!(stand.stored().await?, 1);
    whoami(&client).await?;
    Ok(())
}

#[tokio::test]
async fn t5_s8_a_stop_during_the_drain_of_a_session_brings_it_not_back() -> Result<()> {
    let mut stand = Stand::start(SHORT_DRAIN).await?;
    let (drained, other) = (stand.open("h").await?, stand.open("h").await?);
    let slow = drained.message("tools/call", json!({"name": "slow", "arguments": {"ms": 60_000}}));
    let in_flight = drained.post(&slow).await?;
    wait_until("the call to run", BOUND, async || stand.up_h.executions("slow").await.is_ok_and(|runs| runs == 1))
        .await?;
    let (_, listed) = stand.gateway.admin_get("/api/v1/sessions").await?;
    let busy = listed["sessions"].as_array().context("sessions")?.iter().find(|session| session["calls"] == 1);
    let busy = busy.and_then(|session| session["ref"].as_str()).context("the busy one")?.to_owned();
    let begun = stand.gateway.cli(&["sessions", "drain", &busy, "--grace", "10m", "--no-wait"]).await?;
    assert!(begun.status.success(), "{begun:?}");
    assert!(stand.gateway.stop().await?.success());
    drop(in_flight);
    stand.gateway.start_again().await?;
    let outcome = drained.call("whoami", json!({})).await?;
    assert_eq!(outcome.status, 404, "{outcome:?}");
    whoami(&other).await?;
    Ok(())
}

/// Becomes the gateway as the leader of a process group, as the foreground job of a terminal is.
const IN_THE_FOREGROUND: &str = "#!/bin/sh\nexec setsid MAINSTAY \"$@\"\n";

#[tokio::test]
async fn t5_an_interrupt_from_a_terminal_which_the_whole_group_gets_is_one_orderly_stop() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let wrapper = dir.path().join("mainstay");
    let program = mainstay_tests::mainstay()?.display().to_string();
    write_program(&wrapper, IN_THE_FOREGROUND.replace("MAINSTAY", &program).as_bytes())?;
    let up = UpS::new(&[])?;
    let mut gateway = Setup::new(&up.toml("s")?).binary(&wrapper).start().await?;
    let client = RawClient::open(&gateway.url("s")?, VERSION).await?;
    let slow = client.message("tools/call", json!({"name": "slow", "arguments": {"ms": 1000}}));
    let exchange = client.post(&slow).await?;
    gateway.look_around();
    let group = Pid::from_raw(i32::try_from(gateway.keeper_pid()?)?).context("a group")?;
    kill_process_group(group, Signal::INT)?;
    let outcome = client.follow(exchange).await?;
    assert_eq!(outcome.text()?, "waited 1000 ms", "neither worker nor server were struck");
    assert!(gateway.wait_for_end(BOUND).await?.success());
    let trace = up.trace()?;
    assert!(!trace.iter().any(|entry| entry["event"] == "term"), "the end of its input was enough");
    gateway.assert_no_orphans().await
}
