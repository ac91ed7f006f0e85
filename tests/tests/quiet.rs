//! Quiet streams live, reopened streams win, and a client that does not read costs its own stream only (AC-11, R3, R5, U9).

use anyhow::{Context as _, Result, ensure};
use futures_util::future::join_all;
use mainstay_tests::{Exchange, Gateway, Proc, Proxy, RawClient, UpH, UpS, wait_until};
use serde_json::json;
use std::time::Duration;

const VERSION: &str = "2025-11-25";
const BOUND: Duration = Duration::from_secs(60);

struct Stand {
    up_h: UpH,
    up_s: UpS,
    gateway: Gateway,
}

async fn stand() -> Result<Stand> {
    let (up_h, up_s) = (UpH::start().await?, UpS::new(&[])?);
    let gateway = Gateway::start(&format!("{}{}", up_h.toml("h"), up_s.toml("s")?), &[]).await?;
    Ok(Stand { up_h, up_s, gateway })
}

impl Stand {
    /// A client that keeps no idle connection, so that each connection is one request's.
    async fn open(&self, url: &str) -> Result<RawClient> {
        let mut client = RawClient::new(url)?.with_fresh_connections()?;
        client.establish(VERSION).await?;
        Ok(client)
    }

    async fn heard_upstream(&self, streams: u64) -> Result<()> {
        wait_until("the server is listened to", BOUND, async || {
            self.up_h.count("/listening_streams").await.is_ok_and(|open| open == streams)
        })
        .await
    }

    /// Lets the HTTP server change its list, and say something else afterwards.
    async fn change_list(&self) -> Result<()> {
        self.up_h.order("/list_changed", json!({})).await?;
        let fence = json!({"method": FENCE, "params": {"level": "info", "data": "fence"}});
        self.up_h.order("/notify", fence).await.map(drop)
    }

    async fn streams_open(&self) -> Result<u64> {
        let (status, shown) = self.gateway.admin_get("/api/v1/sessions").await?;
        ensure!(status == 200, "{status}: {shown}");
        let sessions = shown["sessions"].as_array().context("sessions")?;
        Ok(sessions.iter().filter_map(|session| session["streams"].as_u64()).sum())
    }
}

/// The methods of what comes up to the fence.
async fn up_to_fence(stream: &mut Exchange) -> Result<Vec<String>> {
    let mut seen = Vec::new();
    loop {
        let message = stream.next_message(BOUND).await?.context("the stream goes on")?;
        let method = message["method"].as_str().context("a notification")?.to_owned();
        if method == FENCE {
            return Ok(seen);
        }
        seen.push(method);
    }
}

const FENCE: &str = "notifications/message";
const CHANGED: &str = "notifications/tools/list_changed";

#[tokio::test]
async fn ac11_1_2_quiet_streams_outlive_a_proxy_that_cuts_what_is_silent() -> Result<()> {
    let stand = stand().await?;
    // Longer than the 15 s after which a stream says that it lives, shorter than the calls.
    let proxy = Proxy::start(stand.gateway.mcp_address()?, Duration::from_secs(24)).await?;
    let client = stand.open(&proxy.url("h")).await?;
    let mut listening = client.get_stream(None).await?;
    listening.next_event(BOUND).await?.context("primed")?;
    assert_eq!(listening.comments, 0, "R3: the first byte comes at once, not with the first sign of life");
    stand.heard_upstream(1).await?;
    let slow = async |server: &str| {
        let client = stand.open(&proxy.url(server)).await?;
        let call = client.message("tools/call", json!({"name": "slow", "arguments": {"ms": 31_000}}));
        let mut exchange = client.post(&call).await?;
        exchange.next_event(BOUND).await?.context("primed")?;
        ensure!(exchange.comments == 0, "{server}: the first byte comes at once");
        let answer = exchange.next_message(BOUND).await?.with_context(|| format!("{server}: it is not cut"))?;
        ensure!(answer["id"] == call["id"] && answer["result"].is_object(), "{server}: {answer}");
        ensure!(exchange.comments >= 1, "{server}: there were signs of life");
        Ok(())
    };
    let (on_h, on_s) = tokio::join!(slow("h"), slow("s"));
    on_h?;
    on_s?;
    stand.change_list().await?;
    assert_eq!(up_to_fence(&mut listening).await?, [CHANGED], "the listening stream was never cut");
    assert!(listening.comments >= 1);
    assert_eq!(proxy.cuts(), 0);
    assert_eq!(stand.up_h.executions("slow").await?, 1);
    Ok(())
}

#[tokio::test]
async fn ac11_3_a_stream_that_died_without_a_word_is_taken_over_and_a_change_comes_once() -> Result<()> {
    let stand = stand().await?;
    let proxy = Proxy::start(stand.gateway.mcp_address()?, Duration::from_secs(600)).await?;
    let client = stand.open(&proxy.url("h")).await?;
    let mut dead = client.get_stream(None).await?;
    dead.next_event(BOUND).await?.context("primed")?;
    stand.heard_upstream(1).await?;
    proxy.drop_silently();
    let mut second = client.get_stream(None).await?;
    assert_eq!(second.status, 200, "never 400 or 409");
    let primed = second.next_event(BOUND).await?.context("primed")?;
    stand.change_list().await?;
    assert_eq!(up_to_fence(&mut second).await?, [CHANGED], "exactly once");
    // What goes to a connection that is dead already is not lost for a client that names where it stands.
    proxy.drop_silently();
    stand.change_list().await?;
    let mut third = client.get_stream(primed.id.as_deref()).await?;
    assert_eq!(third.status, 200);
    assert_eq!(up_to_fence(&mut third).await?, [CHANGED], "R2: what came after the event that it named");
    assert_eq!(up_to_fence(&mut third).await?, [CHANGED], "and what went to the dead connection, once");
    wait_until("one stream is left", BOUND, async || stand.streams_open().await.is_ok_and(|open| open == 1)).await?;
    assert_eq!(stand.up_h.count("/initializes").await?, 1);
    Ok(())
}

#[tokio::test]
async fn ac11_4_of_ten_streams_at_once_one_lives_and_calls_in_flight_go_on() -> Result<()> {
    let stand = stand().await?;
    let client = stand.open(&stand.gateway.url("h")?).await?;
    let call = client.message("tools/call", json!({"name": "slow", "arguments": {"ms": 3000}}));
    let in_flight = client.post(&call).await?;
    let mut streams = Vec::new();
    for stream in join_all((0..10).map(|_| client.get_stream(None))).await {
        let mut stream = stream?;
        assert_eq!(stream.status, 200, "never 409");
        stream.next_event(BOUND).await?.context("primed")?;
        streams.push(stream);
    }
    stand.heard_upstream(1).await?;
    stand.change_list().await?;
    let told = join_all(streams.iter_mut().map(|stream| stream.next_message(BOUND))).await;
    let told = told.into_iter().collect::<Result<Vec<_>>>()?;
    assert_eq!(told.iter().flatten().count(), 1, "the others have ended: {told:?}");
    let answer = in_flight.finish(BOUND).await?;
    assert!(answer.result().is_ok(), "{answer:?}");
    assert_eq!(stand.up_h.count("/gets").await?, 1, "one stream upstream for all of them");
    Ok(())
}

#[tokio::test]
async fn ac11_5_a_get_that_accepts_no_stream_is_told_so_and_ends_nothing() -> Result<()> {
    let stand = stand().await?;
    let client = stand.open(&stand.gateway.url("h")?).await?;
    let mut listening = client.get_stream(None).await?;
    listening.next_event(BOUND).await?.context("primed")?;
    stand.heard_upstream(1).await?;
    for accept in ["application/json", "text/html", ""] {
        let refused = client.clone().with_header("accept", accept)?.get_stream(None).await?;
        assert_eq!(refused.status, 406, "not 401 or 404, which mean something else: `{accept}`");
        assert_eq!(refused.finish(BOUND).await?.named_outcome(), Some("not_acceptable"));
    }
    let wild = client.clone().with_header("accept", "text/*")?.get_stream(Some("x")).await?;
    assert_eq!(wild.status, 400, "a range that covers it is enough to be looked at");
    stand.change_list().await?;
    assert_eq!(up_to_fence(&mut listening).await?, [CHANGED], "the stream was not taken over by them");
    Ok(())
}

#[tokio::test]
async fn ac11_6_u9_a_server_without_a_stream_is_asked_once_however_often_clients_come() -> Result<()> {
    for status in [405, 404, 500] {
        let stand = stand().await?;
        stand.up_h.order("/get", json!({"status": status})).await?;
        let client = stand.open(&stand.gateway.url("h")?).await?;
        for round in 0..5 {
            let mut listening = client.get_stream(None).await?;
            assert_eq!(listening.status, 200, "{status}, round {round}");
            listening.next_event(BOUND).await?.context("primed")?;
            if round == 0 {
                wait_until("the server was asked", BOUND, async || {
                    stand.up_h.count("/gets").await.is_ok_and(|gets| gets > 0)
                })
                .await?;
            }
            client.call("echo", json!({"text": "unaffected"})).await?.result()?;
            drop(listening);
            wait_until("nobody listens", BOUND, async || stand.streams_open().await.is_ok_and(|open| open == 0))
                .await?;
        }
        assert_eq!(stand.up_h.count("/gets").await?, 1, "{status}: asked once");
        assert_eq!(stand.up_h.count("/initializes").await?, 1, "{status}: no reason to begin anew");
    }
    Ok(())
}

#[tokio::test]
async fn u9_a_failing_server_is_asked_again_with_growing_pauses_and_calls_go_on() -> Result<()> {
    let stand = stand().await?;
    stand.up_h.order("/get", json!({"status": 503})).await?;
    let client = stand.open(&stand.gateway.url("h")?).await?;
    let mut listening = client.get_stream(None).await?;
    listening.next_event(BOUND).await?.context("primed")?;
    wait_until("it was asked twice", BOUND, async || stand.up_h.count("/gets").await.is_ok_and(|gets| gets == 2))
        .await?;
    client.call("echo", json!({"text": "unaffected"})).await?.result()?;
    stand.up_h.order("/get", json!({"status": 200})).await?;
    stand.heard_upstream(1).await?;
    stand.change_list().await?;
    assert_eq!(up_to_fence(&mut listening).await?, [CHANGED]);
    Ok(())
}

/// Memory of the gateway's processes.
async fn resident(gateway: &Gateway) -> Result<u64> {
    let pids = [gateway.keeper_pid()?, gateway.worker().await?.pid];
    Ok(pids.into_iter().filter_map(Proc::of).map(Proc::resident_bytes).sum())
}

/// Lets a client's call say a lot that nobody reads, and as much on the listening stream of another session, while a third
/// client is served. Returns the call's unread stream.
async fn chatter(stand: &Stand, stuck: &RawClient, other: &RawClient) -> Result<Exchange> {
    let params = json!({"name": "prog", "arguments": {"n": EVENTS, "bytes": EVENT_BYTES, "delay_ms": 1},
        "_meta": {"progressToken": "t"}});
    let mut unread = stuck.post(&stuck.message("tools/call", params)).await?;
    unread.next_event(BOUND).await?.context("primed")?;
    let noise = json!({"method": FENCE, "params": {"level": "info", "data": "x".repeat(NOISE_BYTES)}});
    for _ in 0..EVENTS * EVENT_BYTES / NOISE_BYTES as u64 {
        stand.up_h.order("/notify", noise.clone()).await?;
    }
    let mut calls = 0;
    wait_until("the chatty call is over", 2 * BOUND, async || {
        let answered = other.call("echo", json!({"text": "here"})).await.is_ok_and(|outcome| outcome.result().is_ok());
        calls += u64::from(answered);
        let (_, shown) = stand.gateway.admin_get("/api/v1/servers").await.unwrap_or_default();
        answered && shown["servers"].as_array().is_some_and(|all| all.iter().all(|one| one["calls"] == 0))
    })
    .await?;
    ensure!(calls > 0, "the other client is served");
    Ok(unread)
}

#[tokio::test]
async fn r1_a_client_that_does_not_read_costs_its_own_stream_only() -> Result<()> {
    let stand = stand().await?;
    let (stuck, other) = (stand.open(&stand.gateway.url("s")?).await?, stand.open(&stand.gateway.url("s")?).await?);
    let deaf = stand.open(&stand.gateway.url("h")?).await?;
    let mut listening = deaf.get_stream(None).await?;
    let heard = listening.next_event(BOUND).await?.context("primed")?.id.context("an id")?;
    stand.heard_upstream(1).await?;
    // What buffers and caches hold is there after the first round; the second shows what grows.
    let first = chatter(&stand, &stuck, &other).await?;
    let before = resident(&stand.gateway).await?;
    let second = chatter(&stand, &stuck, &other).await?;
    let grown = resident(&stand.gateway).await?.saturating_sub(before);
    assert!(grown < GROWTH_BYTES_MAX, "{grown} bytes for {} of noise", 2 * EVENTS * EVENT_BYTES);
    for unread in [first, second] {
        let rest = unread.finish(BOUND).await?;
        assert!(rest.result().is_ok(), "the answer is not lost for what was dropped before it");
        let progress: Vec<_> = rest.notifications().filter_map(|n| n["params"]["progress"].as_f64()).collect();
        assert!(progress.windows(2).all(|pair| pair[0] < pair[1]), "in order: {progress:?}");
        assert!((progress.len() as u64) < EVENTS, "bounded: {}", progress.len());
    }
    drop(listening);
    stand.change_list().await?;
    let mut again = deaf.get_stream(Some(&heard)).await?;
    assert_eq!(again.status, 200, "and the listening stream can be taken up");
    again.next_message(BOUND).await?.context("what is left of it")?;
    assert_eq!(stand.up_s.starts()?.len(), 2, "the child of each lives");
    Ok(())
}

const EVENTS: u64 = 1000;
const EVENT_BYTES: u64 = 48 * 1024;
const NOISE_BYTES: usize = 500_000;
/// One more stream of 4 MiB that nobody reads, what is on its way, and what an allocator keeps: less than a third of the
/// noise.
const GROWTH_BYTES_MAX: u64 = 30 << 20;

#[tokio::test]
async fn s12_a_session_keeps_nothing_of_the_requests_that_opened_it() -> Result<()> {
    const SESSIONS: u64 = 200;
    const WARM: u64 = 50;
    const PADDING_BYTES: usize = 64 << 10;
    let stand = stand().await?;
    let client = RawClient::new(&stand.gateway.url("h")?)?;
    let mut opening = client.message(
        "initialize",
        json!({"protocolVersion": VERSION, "capabilities": {},
        "clientInfo": {"name": "padded", "version": "1"}}),
    );
    opening["padding"] = json!("x".repeat(PADDING_BYTES));
    let mut before = 0;
    for opened in 0..SESSIONS + WARM {
        if opened == WARM {
            before = resident(&stand.gateway).await?;
        }
        assert_eq!(client.post(&opening).await?.status, 200);
    }
    let grown = resident(&stand.gateway).await?.saturating_sub(before);
    assert!(grown < SESSIONS * PADDING_BYTES as u64 / 2, "{grown} bytes for {SESSIONS} sessions");
    Ok(())
}
