//! The promise itself: one id outlives the worker, the gateway and the server behind it (U3, AC-01, C8, S13).

use anyhow::{Context as _, Result};
use mainstay_tests::{Gateway, RawClient, UpH, UpS, wait_until};
use serde_json::{Value, json};
use std::time::Duration;

const VERSION: &str = "2025-11-25";
const BOUND: Duration = Duration::from_secs(20);

/// A gateway in front of both kinds of server.
struct Stand {
    up_h: UpH,
    up_s: UpS,
    gateway: Gateway,
}

impl Stand {
    async fn start() -> Result<Stand> {
        let up_h = UpH::start().await?;
        let up_s = UpS::new(&[])?;
        let config = format!("{}{}", up_h.toml("h"), up_s.toml("s")?);
        let gateway = Gateway::start(&config, &[]).await?;
        Ok(Stand { up_h, up_s, gateway })
    }

    async fn open(&self, server: &str) -> Result<RawClient> {
        RawClient::open(&self.gateway.url(server)?, VERSION).await
    }
}

async fn whoami(client: &RawClient) -> Result<Value> {
    client.call_through("whoami", json!({})).await?.json()
}

/// How the gateway goes down.
#[derive(Clone, Copy, Debug)]
enum Fall {
    Worker,
    Everything,
    Stop,
}

async fn fall(gateway: &mut Gateway, fall: Fall) -> Result<()> {
    match fall {
        Fall::Worker => gateway.kill_worker().await.map(drop),
        Fall::Everything => {
            gateway.kill_all().await?;
            gateway.start_again().await
        }
        Fall::Stop => {
            gateway.stop().await?;
            gateway.start_again().await
        }
    }
}

#[tokio::test]
async fn u3_an_http_session_goes_on_under_the_same_id_and_the_same_upstream_id() -> Result<()> {
    for way in [Fall::Worker, Fall::Everything, Fall::Stop] {
        let mut stand = Stand::start().await?;
        let client = stand.open("h").await?;
        let before = whoami(&client).await?;
        fall(&mut stand.gateway, way).await?;
        let after = whoami(&client).await?;
        assert_eq!(after["session"], before["session"], "{way:?}: the request carried the original upstream id");
        assert_eq!(after["calls"], 2, "{way:?}: the server's own state is still there");
        assert_eq!(stand.up_h.count("/initializes").await?, 1, "{way:?}");
        assert_eq!(stand.up_h.count("/initialized").await?, 1, "{way:?}");
        assert_eq!(stand.up_h.count("/deletes").await?, 0, "{way:?}");
    }
    Ok(())
}

#[tokio::test]
async fn u3_c8_a_stdio_session_keeps_its_very_child_over_the_workers_death() -> Result<()> {
    let mut stand = Stand::start().await?;
    let client = stand.open("s").await?;
    let before = whoami(&client).await?;
    for round in 2..=4 {
        stand.gateway.kill_worker().await?;
        let after = whoami(&client).await?;
        assert_eq!(after["pid"], before["pid"], "round {round}");
        assert_eq!(after["calls"], round);
    }
    assert_eq!(stand.up_s.starts()?.len(), 1, "the child was started once");
    let pid = u32::try_from(before["pid"].as_u64().context("a pid")?)?;
    let methods = stand.up_s.methods(pid)?;
    assert_eq!(methods.iter().filter(|method| *method == "initialize").count(), 1);
    Ok(())
}

#[tokio::test]
async fn c5_after_everything_died_a_stdio_session_gets_a_new_child_with_its_handshake_and_is_told() -> Result<()> {
    let mut stand = Stand::start().await?;
    let client = stand.open("s").await?;
    let level = client.request("logging/setLevel", json!({"level": "warning"})).await?;
    level.result()?;
    let before = whoami(&client).await?;
    stand.gateway.kill_all().await?;
    stand.gateway.start_again().await?;
    let outcome = client.call_through("whoami", json!({})).await?;
    let after = outcome.json()?;
    assert_ne!(after["pid"], before["pid"]);
    assert_eq!(after["level"], "warning", "the log level was replayed: {after}");
    let notice = &outcome.result()?["_meta"]["mainstay/notice"];
    assert_eq!(notice["event"], "remade", "U6: {outcome:?}");
    let pid = u32::try_from(after["pid"].as_u64().context("a pid")?)?;
    let methods = stand.up_s.methods(pid)?;
    let place = |name: &str| methods.iter().position(|method| method == name);
    assert!(place("initialize") < place("notifications/initialized"), "{methods:?}");
    assert!(place("notifications/initialized") < place("tools/call"), "{methods:?}");
    let again = client.call_through("whoami", json!({})).await?;
    assert!(again.result()?["_meta"]["mainstay/notice"].is_null(), "said once");
    Ok(())
}

#[tokio::test]
async fn c8_an_answer_in_flight_on_a_child_reaches_the_client_that_resumes_its_stream() -> Result<()> {
    let mut stand = Stand::start().await?;
    let client = stand.open("s").await?;
    let message = client.message("tools/call", json!({"name": "slow", "arguments": {"ms": 2500}}));
    let mut exchange = client.post(&message).await?;
    assert!(exchange.is_sse());
    let primed = exchange.next_event(BOUND).await?.context("primed")?;
    let cursor = primed.id.clone().context("with an id")?;
    stand.gateway.kill_worker().await?;
    let resumed = client.get_stream(Some(&cursor)).await?;
    assert_eq!(resumed.status, 200);
    let outcome = resumed.finish(BOUND).await?;
    let response = outcome.response().context("the answer")?;
    assert_eq!(response["id"], message["id"]);
    assert!(response["result"].is_object(), "{response}");
    let traced = stand.up_s.trace()?;
    let calls = traced.iter().filter(|line| line.to_string().contains("tools/call")).count();
    assert_eq!(calls, 1, "the tool ran once");
    Ok(())
}

#[tokio::test]
async fn c8_an_answer_given_while_no_worker_lived_is_delivered() -> Result<()> {
    let mut stand = Stand::start().await?;
    let client = stand.open("s").await?;
    let message = client.message("tools/call", json!({"name": "slow", "arguments": {"ms": 300}}));
    let mut exchange = client.post(&message).await?;
    let cursor = exchange.next_event(BOUND).await?.context("primed")?.id.context("with an id")?;
    stand.gateway.kill_worker().await?;
    // Long after the child has answered, and before anybody asked for the session again.
    tokio::time::sleep(Duration::from_millis(600)).await;
    stand.gateway.kill_worker().await?;
    let outcome = client.get_stream(Some(&cursor)).await?.finish(BOUND).await?;
    assert!(outcome.response().context("the answer")?["result"].is_object(), "{outcome:?}");
    Ok(())
}

#[tokio::test]
async fn r4_a_call_in_flight_on_an_http_server_is_told_to_be_unknown_after_the_workers_death() -> Result<()> {
    let mut stand = Stand::start().await?;
    let client = stand.open("h").await?;
    let message = client.message("tools/call", json!({"name": "slow", "arguments": {"ms": 3000}}));
    let mut exchange = client.post(&message).await?;
    let cursor = exchange.next_event(BOUND).await?.context("primed")?.id.context("with an id")?;
    stand.gateway.kill_worker().await?;
    let outcome = client.get_stream(Some(&cursor)).await?.finish(BOUND).await?;
    assert_eq!(outcome.response().context("an answer")?["id"], message["id"]);
    assert_eq!(outcome.named_outcome(), Some("outcome_unknown"));
    let last = outcome.last_event_id().context("an id")?.to_owned();
    assert_eq!(client.get_stream(Some(&last)).await?.status, 204, "the stream is finished");
    assert_eq!(stand.up_h.executions("slow").await?, 1, "never a second execution");
    Ok(())
}

#[tokio::test]
async fn u4_ac01_5_the_server_restarts_and_forgets_everything() -> Result<()> {
    let mut stand = Stand::start().await?;
    let client = stand.open("h").await?;
    client.request("logging/setLevel", json!({"level": "error"})).await?.result()?;
    client.request("resources/subscribe", json!({"uri": first_resource(&client).await?})).await?.result()?;
    whoami(&client).await?;
    stand.up_h.kill().await?;
    stand.up_h.start_again().await?;
    let outcome = client.call_through("whoami", json!({})).await?;
    let after = outcome.json()?;
    assert_eq!(after["calls"], 1, "a new session at the server");
    assert_eq!(after["level"], "error", "U4: the level was replayed: {after}");
    assert_eq!(after["subscriptions"].as_array().map(Vec::len), Some(1), "U4: {after}");
    assert_eq!(outcome.result()?["_meta"]["mainstay/notice"]["event"], "remade", "U6");
    assert_eq!(stand.up_h.count("/initializes").await?, 1, "one re-initialize in the server's new life");
    Ok(())
}

async fn first_resource(client: &RawClient) -> Result<String> {
    let listed = client.request("resources/list", Value::Null).await?;
    Ok(listed.result()?["resources"][0]["uri"].as_str().context("a resource")?.to_owned())
}

#[tokio::test]
async fn ac01_a_crash_loop_loses_no_session_whose_id_reached_its_client() -> Result<()> {
    let mut stand = Stand::start().await?;
    let url = stand.gateway.url("h")?;
    let mut kept: Vec<RawClient> = Vec::new();
    for _ in 0..5 {
        let mut opening = Vec::new();
        for _ in 0..20 {
            let url = url.clone();
            opening.push(tokio::spawn(async move {
                let mut client = RawClient::new(&url)?;
                let outcome = client.initialize(VERSION).await?;
                outcome.result()?;
                anyhow::Ok(client)
            }));
        }
        tokio::time::sleep(Duration::from_millis(15)).await;
        stand.gateway.kill_all().await?;
        for task in opening {
            // A connection that was cut is the client's to retry; an answer that arrived is ours to honour.
            if let Ok(client) = task.await? {
                kept.push(client);
            }
        }
        stand.gateway.start_again().await?;
        for client in &kept {
            let outcome = client.call_through("echo", json!({"text": "here"})).await?;
            assert_eq!(outcome.text()?, "here");
        }
    }
    let stored = stand.gateway.status().await?["sessions"]["stored"].as_u64().context("a count")?;
    assert!(stored >= kept.len() as u64, "{stored} stored, {} known", kept.len());
    Ok(())
}

#[tokio::test]
async fn ac01_2_a_stop_and_a_kill_keep_count_and_ids_and_no_client_sees_an_error() -> Result<()> {
    let mut stand = Stand::start().await?;
    let (h, s) = (stand.open("h").await?, stand.open("s").await?);
    whoami(&h).await?;
    whoami(&s).await?;
    for way in [Fall::Stop, Fall::Everything] {
        let before = stand.gateway.status().await?["sessions"]["stored"].clone();
        fall(&mut stand.gateway, way).await?;
        assert_eq!(stand.gateway.status().await?["sessions"]["stored"], before, "{way:?}");
        for client in [&h, &s] {
            let outcome = client.call("whoami", json!({})).await?;
            assert_eq!(outcome.status, 200, "{way:?}");
            outcome.result()?;
        }
    }
    assert_eq!(stand.up_h.count("/initializes").await?, 1);
    Ok(())
}

#[tokio::test]
async fn s13_ac01_6_unknown_missing_and_foreign_ids() -> Result<()> {
    let stand = Stand::start().await?;
    let url = stand.gateway.url("h")?;
    let known = stand.open("h").await?;
    let stranger = RawClient::new(&url)?.with_session("c2VjcmV0LWJ1dC11bmtub3duLXRvLXRoaXMtZ2F0ZXdheQ", VERSION);
    let outcome = stranger.request("tools/list", Value::Null).await?;
    assert_eq!(outcome.status, 404);
    assert_eq!(outcome.named_outcome(), Some("session_unknown"));
    assert!(outcome.response().context("a body")?["id"].is_number(), "S13a: with the request's own id");

    let nobody = RawClient::new(&url)?;
    assert_eq!(nobody.request("tools/list", Value::Null).await?.status, 400);

    let mut again = RawClient::new(&url)?.with_session("a-made-up-id", VERSION);
    let outcome = again.initialize(VERSION).await?;
    assert_eq!(outcome.status, 200, "`initialize` is never answered 404");
    assert_ne!(again.session.as_deref(), Some("a-made-up-id"), "the id supplied is not the id given");

    let mut third = known.clone();
    let first = known.session.clone();
    third.initialize(VERSION).await?;
    assert_ne!(third.session, first, "S13: an old id gets a new session");
    assert_eq!(whoami(&known).await?["calls"], 1, "and stays what it was");
    Ok(())
}

#[tokio::test]
async fn t1_no_connection_is_refused_while_the_worker_is_away() -> Result<()> {
    let mut stand = Stand::start().await?;
    let client = stand.open("h").await?.with_fresh_connections()?;
    whoami(&client).await?;
    let killed = stand.gateway.kill_worker_at_once().await?;
    // Sent while nobody accepts: the connection waits in the backlog for the next worker.
    let outcome = client.call("echo", json!({"text": "queued"})).await?;
    assert_eq!(outcome.text()?, "queued");
    stand.gateway.next_worker(killed).await?;
    Ok(())
}

#[tokio::test]
async fn s9_a_child_whose_session_is_gone_is_ended_by_the_next_worker() -> Result<()> {
    let mut stand = Stand::start().await?;
    let client = stand.open("s").await?;
    whoami(&client).await?;
    let child = stand.up_s.starts()?.pop().context("a child")?;
    assert_eq!(client.delete().await?, 204);
    stand.gateway.kill_worker().await?;
    wait_until("the child is gone", BOUND, async || !child.is_alive()).await?;
    assert_eq!(client.request("tools/list", Value::Null).await?.status, 404);
    Ok(())
}

#[tokio::test]
async fn c5_u4_a_server_that_was_not_told_initialized_before_a_crash_is_told_after_it() -> Result<()> {
    let mut stand = Stand::start().await?;
    let mut client = RawClient::new(&stand.gateway.url("h")?)?;
    client.initialize(VERSION).await?.result()?;
    // Used, and thereby confirmed, before `initialized` is sent: opencode opens its stream first.
    client.request("ping", Value::Null).await?.result()?;
    tokio::time::sleep(Duration::from_millis(300)).await;
    stand.gateway.kill_worker().await?;
    client.notify("notifications/initialized", Value::Null).await?;
    whoami(&client).await?;
    assert_eq!(stand.up_h.count("/initialized").await?, 1);
    assert_eq!(stand.up_h.count("/initializes").await?, 1);
    Ok(())
}

#[tokio::test]
async fn u6_word_of_a_loss_waits_for_an_answer_that_can_carry_it() -> Result<()> {
    let mut stand = Stand::start().await?;
    let client = stand.open("s").await?;
    whoami(&client).await?;
    stand.gateway.kill_all().await?;
    stand.gateway.start_again().await?;
    client.request("no/such/method", Value::Null).await?.error()?;
    let outcome = client.call_through("whoami", json!({})).await?;
    assert_eq!(outcome.result()?["_meta"]["mainstay/notice"]["event"], "remade", "{outcome:?}");
    Ok(())
}

#[tokio::test]
async fn r4_a_batch_in_flight_is_answered_call_by_call_after_the_workers_death() -> Result<()> {
    let mut stand = Stand::start().await?;
    for (server, known) in [("h", false), ("s", true)] {
        let client = RawClient::open(&stand.gateway.url(server)?, "2025-03-26").await?;
        let slow = |id: u64| {
            json!({"jsonrpc": "2.0", "id": id, "method": "tools/call",
                   "params": {"name": "slow", "arguments": {"ms": 1500}}})
        };
        let mut exchange = client.post(&json!([slow(1), slow(2)])).await?;
        let cursor = exchange.next_event(BOUND).await?.context("primed")?.id.context("with an id")?;
        if known {
            // On a child the answers come if the calls have reached it.
            wait_until("both are at the child", BOUND, async || {
                stand
                    .up_s
                    .trace()
                    .is_ok_and(|trace| trace.iter().filter(|line| line.to_string().contains("tools/call")).count() == 2)
            })
            .await?;
        }
        stand.gateway.kill_worker().await?;
        let outcome = client.get_stream(Some(&cursor)).await?.finish(BOUND).await?;
        for id in [1, 2] {
            let answer = outcome.messages.iter().find(|message| message["id"] == id);
            let answer = answer.with_context(|| format!("{server}: call {id} is answered: {outcome:?}"))?;
            assert_eq!(answer["result"].is_object(), known, "{server}: {answer}");
            if !known {
                assert_eq!(answer["error"]["data"]["mainstay"], "outcome_unknown", "{answer}");
            }
        }
    }
    Ok(())
}

#[tokio::test]
async fn r4_c8_an_answer_that_its_client_never_took_waits_for_it_over_the_workers_death() -> Result<()> {
    let mut stand = Stand::start().await?;
    let client = stand.open("s").await?;
    let message = client.message("tools/call", json!({"name": "slow", "arguments": {"ms": 300}}));
    let mut exchange = client.post(&message).await?;
    let cursor = exchange.next_event(BOUND).await?.context("primed")?.id.context("with an id")?;
    drop(exchange);
    // The answer is with the worker, and any lazy acknowledgement has long gone out, when the worker dies.
    tokio::time::sleep(Duration::from_secs(4)).await;
    stand.gateway.kill_worker().await?;
    let outcome = client.get_stream(Some(&cursor)).await?.finish(BOUND).await?;
    assert!(outcome.response().context("the answer")?["result"].is_object(), "{outcome:?}");
    Ok(())
}

#[tokio::test]
async fn r4_a_call_that_may_not_have_reached_its_child_is_answered_and_never_hangs() -> Result<()> {
    let (up_h, up_s) = (UpH::start().await?, UpS::new(&[])?);
    let config = format!("[session]\nanswer_json_within = \"0\"\n{}{}", up_h.toml("h"), up_s.toml("s")?);
    let mut gateway = Gateway::start(&config, &[]).await?;
    let client = RawClient::open(&gateway.url("s")?, VERSION).await?;
    client.call_through("echo", json!({"text": "warm"})).await?.result()?;
    for _ in 0..4 {
        let message = client.message("tools/call", json!({"name": "slow", "arguments": {"ms": 500}}));
        let mut exchange = client.post(&message).await?;
        let cursor = exchange.next_event(BOUND).await?.context("primed")?.id.context("with an id")?;
        gateway.kill_worker().await?;
        let outcome = client.get_stream(Some(&cursor)).await?.finish(BOUND).await?;
        let answer = outcome.response().context("an answer, or the truth")?;
        assert!(answer["result"].is_object() || outcome.named_outcome() == Some("outcome_unknown"), "{answer}");
    }
    Ok(())
}
