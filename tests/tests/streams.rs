//! Streams, questions, progress and cancellation find their owner (R1–R3, R5–R9, C10).

use anyhow::{Context as _, Result};
use mainstay_tests::{Gateway, RawClient, UpH, UpS, wait_until};
use serde_json::{Value, json};
use std::time::Duration;

const VERSION: &str = "2025-11-25";
const BOUND: Duration = Duration::from_secs(20);

struct Stand {
    up_h: UpH,
    // Its directory lives as long as the handle.
    _up_s: UpS,
    gateway: Gateway,
}

async fn stand() -> Result<Stand> {
    let (up_h, up_s) = (UpH::start().await?, UpS::new(&[])?);
    let gateway = Gateway::start(&format!("{}{}", up_h.toml("h"), up_s.toml("s")?), &[]).await?;
    Ok(Stand { up_h, _up_s: up_s, gateway })
}

#[tokio::test]
async fn r1_r3_slow_answers_are_primed_streams_fast_ones_and_lists_are_json() -> Result<()> {
    let stand = stand().await?;
    for server in ["h", "s"] {
        let url = stand.gateway.url(server)?;
        let mut client = RawClient::new(&url)?;
        let hello = client.initialize(VERSION).await?;
        assert!(hello.events.is_empty(), "{server}: `initialize` is plain");
        client.notify("notifications/initialized", Value::Null).await?;
        for list in ["tools/list", "resources/list", "prompts/list"] {
            assert!(client.request(list, Value::Null).await?.events.is_empty(), "{server}: {list} is plain");
        }
        let outcome = client.call("slow", json!({"ms": 400})).await?;
        let primed = outcome.events.first().context("a stream")?;
        assert!(primed.id.is_some() && primed.data.is_empty(), "{server}: primed");
        assert_eq!(primed.retry_ms, Some(4000), "{server}");
        assert_eq!(outcome.header("x-accel-buffering"), Some("no"));
        assert_eq!(outcome.header("connection"), Some("close"), "T2: nothing else is written on what may be closed");
        let ids = outcome.event_ids();
        assert_eq!(ids.len(), 2, "{server}: {ids:?}");
        assert_ne!(ids[0], ids[1], "{server}");
    }
    Ok(())
}

#[tokio::test]
async fn r1_event_ids_are_unique_over_restarts() -> Result<()> {
    let mut stand = stand().await?;
    let client = RawClient::open(&stand.gateway.url("h")?, VERSION).await?;
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..3 {
        for _ in 0..2 {
            let outcome = client.call("slow", json!({"ms": 100})).await?;
            for id in outcome.event_ids() {
                assert!(seen.insert(id.to_owned()), "{id} twice");
            }
        }
        stand.gateway.kill_worker().await?;
    }
    Ok(())
}

#[tokio::test]
async fn r2_a_cursor_continues_its_own_stream_and_a_foreign_one_is_an_error() -> Result<()> {
    let stand = stand().await?;
    let url = stand.gateway.url("h")?;
    let (one, two) = (RawClient::open(&url, VERSION).await?, RawClient::open(&url, VERSION).await?);
    let message = json!({"jsonrpc": "2.0", "id": 77, "method": "tools/call",
        "params": {"name": "prog", "arguments": {"n": 5, "delay_ms": 100}, "_meta": {"progressToken": 7}}});
    let mut exchange = one.post(&message).await?;
    let first = exchange.next_event(BOUND).await?.context("primed")?;
    let cursor = first.id.context("an id")?;
    drop(exchange);
    assert_eq!(two.get_stream(Some(&cursor)).await?.status, 400, "another session's cursor");
    for bad in ["", "0", "nonsense", "ffffffff-1-1-1"] {
        assert_eq!(one.get_stream(Some(bad)).await?.status, 400, "{bad:?}");
    }
    let outcome = one.get_stream(Some(&cursor)).await?.finish(BOUND).await?;
    assert_eq!(outcome.events.first().and_then(|event| event.id.as_deref()), Some(cursor.as_str()), "primed with it");
    let progress: Vec<_> = outcome.notifications().filter_map(|n| n["params"]["progress"].as_f64()).collect();
    assert_eq!(progress.len(), 5, "{progress:?}");
    assert!(progress.is_sorted(), "in order");
    assert!(outcome.notifications().all(|n| n["params"]["progressToken"] == 7), "R7: the client's own token");
    assert_eq!(outcome.response().context("the answer")?["id"], 77);
    let last = outcome.last_event_id().context("an id")?.to_owned();
    assert_eq!(one.get_stream(Some(&last)).await?.status, 204, "a finished stream");
    assert_eq!(stand.up_h.executions("prog").await?, 1);
    Ok(())
}

#[tokio::test]
async fn r5_a_second_listening_stream_takes_over_and_gets_what_comes() -> Result<()> {
    let stand = stand().await?;
    let client = RawClient::open(&stand.gateway.url("h")?, VERSION).await?;
    let mut first = client.get_stream(None).await?;
    first.next_event(BOUND).await?.context("primed")?;
    wait_until("the server is listened to", BOUND, async || stand.up_h.count("/gets").await.is_ok_and(|gets| gets > 0))
        .await?;
    let mut second = client.get_stream(None).await?;
    assert_eq!(second.status, 200, "never 409");
    second.next_event(BOUND).await?.context("primed")?;
    stand.up_h.order("/list_changed", json!({})).await?;
    let message = second.next_message(BOUND).await?.context("the notification")?;
    assert_eq!(message["method"], "notifications/tools/list_changed");
    assert!(first.next_message(BOUND).await?.is_none(), "the older one ended, and got nothing");
    Ok(())
}

#[tokio::test]
async fn r6_a_question_reaches_its_client_and_the_answer_its_server_on_both_transports() -> Result<()> {
    let stand = stand().await?;
    stand.up_h.answer("sse").await?;
    for server in ["h", "s"] {
        let mut client = RawClient::new(&stand.gateway.url(server)?)?.with_capabilities(json!({"elicitation": {}}));
        client.establish(VERSION).await?;
        let mut exchange = client
            .post(&client.message("tools/call", json!({"name": "ask", "arguments": {"message": "sure?"}})))
            .await?;
        let question = exchange.next_message(BOUND).await?.context("a question")?;
        assert_eq!(question["method"], "elicitation/create", "{server}");
        let answer = json!({"action": "accept", "content": {"answer": "forty-two"}});
        assert_eq!(client.respond(&question["id"], answer.clone()).await?, 202);
        assert_eq!(client.respond(&question["id"], answer).await?, 202, "a second answer changes nothing");
        let response = exchange.next_message(BOUND).await?.context("the result")?;
        assert!(response["result"].to_string().contains("forty-two"), "{server}: {response}");
    }
    Ok(())
}

#[tokio::test]
async fn r7_ping_is_answered_by_the_gateway_itself() -> Result<()> {
    let stand = stand().await?;
    let client = RawClient::open(&stand.gateway.url("h")?, VERSION).await?;
    let pings = stand.up_h.requests("ping").await?.len();
    assert_eq!(*client.request("ping", Value::Null).await?.result()?, json!({}));
    assert_eq!(stand.up_h.requests("ping").await?.len(), pings);
    Ok(())
}

#[tokio::test]
async fn r8_a_disconnect_cancels_nothing_and_a_cancellation_reaches_its_call_only() -> Result<()> {
    let stand = stand().await?;
    for server in ["h", "s"] {
        let client = RawClient::open(&stand.gateway.url(server)?, VERSION).await?;
        let gone =
            client.post(&client.message("tools/call", json!({"name": "slow", "arguments": {"ms": 300}}))).await?;
        drop(gone);
        let call = |ms: u64| client.message("tools/call", json!({"name": "slow", "arguments": {"ms": ms}}));
        let (doomed, kept) = (call(60_000), call(700));
        let doomed_exchange = client.post(&doomed).await?;
        let kept_exchange = client.post(&kept).await?;
        client.notify("notifications/cancelled", json!({"requestId": doomed["id"], "reason": "enough"})).await?;
        kept_exchange.finish(BOUND).await?.result().context("the other call completes")?;
        drop(doomed_exchange);
    }
    let cancelled = stand.up_h.requests("notifications/cancelled").await?;
    assert_eq!(cancelled.len(), 1, "one, and not for the client that went away: {cancelled:?}");
    let calls = stand.up_h.requests("tools/call").await?;
    let named = &cancelled[0]["body"]["params"]["requestId"];
    assert!(calls.iter().any(|call| call["body"]["id"] == *named), "under the id that the server knows");
    Ok(())
}

#[tokio::test]
async fn r9_ac10_equal_ids_never_cross_answers_and_keep_their_type() -> Result<()> {
    let stand = stand().await?;
    for server in ["h", "s"] {
        let url = stand.gateway.url(server)?;
        let clients = [RawClient::open(&url, VERSION).await?, RawClient::open(&url, VERSION).await?];
        let ids = [json!(1), json!("1"), json!(1), json!(-7.5), json!("a\"b\\c\u{e9}")];
        let calls = (0..40).map(|number: usize| {
            let (client, id) = (clients[number % 2].clone(), ids[number % ids.len()].clone());
            tokio::spawn(async move {
                let text = format!("payload {number}");
                let message = json!({"jsonrpc": "2.0", "id": id, "method": "tools/call",
                    "params": {"name": "echo", "arguments": {"text": text}}});
                let exchange = client.post(&message).await?;
                let outcome = client.follow(exchange).await?;
                anyhow::ensure!(outcome.text()? == text, "its own payload: {outcome:?}");
                anyhow::ensure!(outcome.response().context("an answer")?["id"] == id, "its own id: {outcome:?}");
                Ok(())
            })
        });
        for call in calls.collect::<Vec<_>>() {
            call.await?.context(server)?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn ac10_2_progress_comes_under_the_clients_token_on_the_calls_own_stream() -> Result<()> {
    let stand = stand().await?;
    stand.up_h.answer("sse").await?;
    for server in ["h", "s"] {
        let client = RawClient::open(&stand.gateway.url(server)?, VERSION).await?;
        let calls = (0..10).map(|number: u64| {
            let client = client.clone();
            tokio::spawn(async move {
                let mut params = json!({"name": "prog", "arguments": {"n": 5, "delay_ms": 30}});
                if number < 5 {
                    params["_meta"] = json!({"progressToken": 7});
                }
                let outcome = client.request("tools/call", params).await?;
                outcome.result()?;
                let seen: Vec<_> =
                    outcome.notifications().filter(|n| n["method"] == "notifications/progress").collect();
                anyhow::ensure!(seen.iter().all(|n| n["params"]["progressToken"] == 7), "{seen:?}");
                anyhow::ensure!(seen.len() == if number < 5 { 5 } else { 0 }, "call {number}: {seen:?}");
                Ok(())
            })
        });
        for call in calls.collect::<Vec<_>>() {
            call.await?.context(server)?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn ac10_3_of_two_calls_that_share_an_id_only_the_one_in_the_cancelling_session_is_cancelled() -> Result<()> {
    let stand = stand().await?;
    for server in ["h", "s"] {
        let url = stand.gateway.url(server)?;
        let (cancelling, other) = (RawClient::open(&url, VERSION).await?, RawClient::open(&url, VERSION).await?);
        let call = |ms: u64| {
            json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call",
                "params": {"name": "slow", "arguments": {"ms": ms}}})
        };
        let (doomed, kept) = (cancelling.post(&call(60_000)).await?, other.post(&call(1500)).await?);
        assert!(doomed.is_sse() && kept.is_sse(), "{server}: both are on their way");
        cancelling.notify("notifications/cancelled", json!({"requestId": 1})).await?;
        let answer = kept.finish(BOUND).await?;
        assert!(answer.result().is_ok(), "{server}: {answer:?}");
        let doomed = doomed.finish(BOUND).await?;
        assert!(doomed.result().is_err(), "{server}: it has ended without a result: {doomed:?}");
    }
    let cancelled = stand.up_h.requests("notifications/cancelled").await?;
    assert_eq!(cancelled.len(), 1, "{cancelled:?}");
    let calls = stand.up_h.requests("tools/call").await?;
    let named = calls.iter().find(|call| call["body"]["id"] == cancelled[0]["body"]["params"]["requestId"]);
    let named = named.context("under an id that the server knows")?;
    assert_eq!(named["body"]["params"]["arguments"]["ms"], 60_000, "and it is the right one");
    assert_eq!(stand.up_h.count("/cancelled").await?, 1);
    Ok(())
}

#[tokio::test]
async fn ac10_4_r7_what_comes_after_the_response_is_dropped_and_harms_nothing() -> Result<()> {
    let (up_h, up_s) = (UpH::start().await?, UpS::new(&["--late", "2"])?);
    let gateway = Gateway::start(&format!("{}{}", up_h.toml("h"), up_s.toml("s")?), &[]).await?;
    up_h.answer("sse").await?;
    up_h.order("/late", json!({"events": 2})).await?;
    for server in ["h", "s"] {
        let client = RawClient::open(&gateway.url(server)?, VERSION).await?;
        let mut listening = client.get_stream(None).await?;
        listening.next_event(BOUND).await?.context("primed")?;
        client.request("resources/subscribe", json!({"uri": "test://static"})).await?.result()?;
        if server == "h" {
            wait_until("the server is listened to", BOUND, async || {
                up_h.count("/gets").await.is_ok_and(|gets| gets > 0)
            })
            .await?;
        }
        for delay_ms in [0, 40] {
            let params = json!({"name": "prog", "arguments": {"n": 5, "delay_ms": delay_ms},
                "_meta": {"progressToken": 7}});
            let outcome = client.request("tools/call", params).await?;
            outcome.result()?;
            let seen: Vec<_> = outcome.notifications().filter_map(|n| n["params"]["progress"].as_f64()).collect();
            assert!(seen.iter().all(|progress| *progress <= 5.0), "{server}: {seen:?}");
            assert_eq!(outcome.messages.last().context("an end")?["id"], outcome.response().context("it")?["id"]);
        }
        // Whatever could still come comes before what the next call makes the server say.
        client.call("touch_resource", json!({})).await?.result()?;
        let message = listening.next_message(BOUND).await?.context("a notification")?;
        assert_eq!(message["method"], "notifications/resources/updated", "{server}: nothing late before it");
    }
    Ok(())
}

#[tokio::test]
async fn ac12_3_of_two_streams_that_were_cut_a_cursor_brings_its_own_only() -> Result<()> {
    let stand = stand().await?;
    stand.up_h.answer("sse").await?;
    for server in ["h", "s"] {
        let client = RawClient::open(&stand.gateway.url(server)?, VERSION).await?;
        let mut cursors = Vec::new();
        for token in ["one", "two"] {
            let params = json!({"name": "prog", "arguments": {"n": 5, "delay_ms": 150},
                "_meta": {"progressToken": token}});
            let message = client.message("tools/call", params);
            let mut exchange = client.post(&message).await?;
            let primed = exchange.next_event(BOUND).await?.context("primed")?;
            cursors.push((token, message["id"].clone(), primed.id.context("an id")?));
        }
        for (token, id, cursor) in cursors.iter().rev() {
            let outcome = client.get_stream(Some(cursor)).await?.finish(BOUND).await?;
            let tokens: Vec<_> = outcome.notifications().map(|n| n["params"]["progressToken"].clone()).collect();
            assert_eq!(tokens, vec![json!(token); 5], "{server}");
            assert_eq!(outcome.response().context("an answer")?["id"], *id, "{server}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn ac12_r3_a_call_never_ends_without_a_response_an_error_or_a_retry() -> Result<()> {
    let mut stand = stand().await?;
    for server in ["h", "s"] {
        let client = RawClient::open(&stand.gateway.url(server)?, VERSION).await?;
        client.call("echo", json!({"text": "warm"})).await?.result()?;
        // Some are answered before the kill, some during it, some were only just sent.
        let calls = (0..12).map(|number: u64| {
            let client = client.clone();
            tokio::spawn(async move {
                let call = client.message("tools/call", json!({"name": "slow", "arguments": {"ms": 60 * number}}));
                // A connection that breaks before any head is the one case in which a client knows that it knows nothing.
                let Ok(exchange) = client.post(&call).await else { return Ok(()) };
                let is_stream = exchange.is_sse();
                let outcome = exchange.finish(BOUND).await?;
                let promised = outcome.response().is_some() || outcome.retry_ms().is_some_and(|retry| retry > 0);
                anyhow::ensure!(promised || !is_stream, "call {number}: {outcome:?}");
                let cut = outcome.response().is_none() && is_stream;
                if cut {
                    let cursor = outcome.last_event_id().context("and something to come back with")?;
                    // When it was told to: at once it may meet a connection that dies with the worker.
                    tokio::time::sleep(Duration::from_millis(outcome.retry_ms().unwrap_or_default())).await;
                    let resumed = client.get_stream(Some(cursor)).await?.finish(BOUND).await?;
                    anyhow::ensure!(resumed.response().is_some(), "call {number}: {resumed:?}");
                }
                Ok(())
            })
        });
        let calls: Vec<_> = calls.collect();
        tokio::time::sleep(Duration::from_millis(250)).await;
        stand.gateway.kill_worker().await?;
        for call in calls {
            call.await?.context(server)?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn payloads_pass_byte_for_byte() -> Result<()> {
    let stand = stand().await?;
    let client = RawClient::open(&stand.gateway.url("h")?, VERSION).await?;
    let sent = r#"{"jsonrpc":"2.0","id":5,"method":"tools/call","params":{"name":"echo","arguments":{"text":"x","big":123456789012345678901234567890,"one":1.0,"e":1e5},"unknown":{"z":[1.50]}},"extra":true}"#;
    client.post_bytes(sent).await?.finish(BOUND).await?.result()?;
    let raw = stand.up_h.requests("tools/call").await?.pop().context("the request")?;
    let seen = raw["raw"].as_str().map_or_else(|| raw["body"].to_string(), str::to_owned);
    for part in ["123456789012345678901234567890", "1.50", "\"extra\""] {
        assert!(seen.contains(part), "{part} in {seen}");
    }
    Ok(())
}
