//! Streams outlive workers: what was sent is in the journal, what was asked is answered once, and nothing runs twice
//! (R1, R2, R4, R6, C8, AC-03, AC-12).

use anyhow::{Context as _, Result, ensure};
use mainstay_tests::{Gateway, Outcome, RawClient, SdkClient, SdkKind, UpH, UpS, wait_until, within};
use serde_json::{Value, json};
use std::time::Duration;

const VERSION: &str = "2025-11-25";
const BOUND: Duration = Duration::from_secs(30);

struct Stand {
    up_h: UpH,
    up_s: UpS,
    gateway: Gateway,
}

async fn stand() -> Result<Stand> {
    let up_h = UpH::start().await?;
    let up_s = UpS::new(&[])?;
    let gateway = Gateway::start(&format!("{}{}", up_h.toml("h"), up_s.toml("s")?), &[]).await?;
    Ok(Stand { up_h, up_s, gateway })
}

impl Stand {
    async fn open(&self, server: &str) -> Result<RawClient> {
        RawClient::open(&self.gateway.url(server)?, VERSION).await
    }

    async fn fall(&mut self, everything: bool) -> Result<()> {
        if everything {
            self.gateway.kill_all().await?;
            return self.gateway.start_again().await;
        }
        self.gateway.kill_worker().await.map(drop)
    }
}

fn prog(client: &RawClient, n: u64, delay_ms: u64) -> Value {
    let params = json!({"name": "prog", "arguments": {"n": n, "delay_ms": delay_ms}, "_meta": {"progressToken": "p"}});
    client.message("tools/call", params)
}

fn progress_of(outcome: &Outcome) -> Vec<u64> {
    let seen = outcome.notifications().filter(|message| message["method"] == "notifications/progress");
    seen.filter_map(|message| message["params"]["progress"].as_u64()).collect()
}

#[tokio::test]
async fn r2_ac12_what_was_missed_comes_once_and_in_order_over_the_death_of_everything() -> Result<()> {
    for (server, everything) in [("h", false), ("h", true), ("s", false), ("s", true)] {
        let mut stand = stand().await?;
        stand.up_h.answer("sse").await?;
        let client = stand.open(server).await?;
        let other = stand.open(server).await?;
        let mut exchange = client.post(&prog(&client, 5, 100)).await?;
        exchange.next_event(BOUND).await?.context("primed")?;
        let first = exchange.next_event(BOUND).await?.context("the first progress")?;
        let cursor = first.id.clone().context("it has an id")?;
        drop(exchange);
        wait_until("the call is over", BOUND, async || {
            let (status, shown) = stand.gateway.admin_get("/api/v1/servers").await.unwrap_or_default();
            status == 200 && shown["servers"].as_array().is_some_and(|all| all.iter().all(|one| one["calls"] == 0))
        })
        .await?;
        // What is durable is so in order: an answer that has come on another stream leaves nothing behind it.
        other.call_through("slow", json!({"ms": 60})).await?.result()?;
        stand.fall(everything).await?;
        let stolen = other.get_stream(Some(&cursor)).await?;
        assert!(stolen.status >= 400, "AC-12 (4): nobody else's, {}", stolen.status);
        let resumed = client.get_stream(Some(&cursor)).await?.finish(BOUND).await?;
        let (at, label) = (progress_of(&resumed), format!("{server}, everything: {everything}: {resumed:?}"));
        assert_eq!(at, [2, 3, 4, 5], "{label}");
        assert!(resumed.result().is_ok(), "{label}");
        let ids = resumed.event_ids();
        assert_eq!(ids.first().copied(), Some(cursor.as_str()), "primed with what was asked for: {label}");
        let again = client.get_stream(Some(&cursor)).await?.finish(BOUND).await?;
        assert_eq!(again.event_ids(), ids, "the same ids every time");
        let last = ids.last().copied().context("a last id")?.to_owned();
        assert_eq!(client.get_stream(Some(&last)).await?.status, 204, "AC-12 (5): nothing twice");
        if server == "h" {
            assert_eq!(stand.up_h.executions("prog").await?, 1);
        }
    }
    Ok(())
}

#[tokio::test]
async fn r4_progress_goes_on_where_it_was_when_the_worker_dies_in_the_middle() -> Result<()> {
    let mut stand = stand().await?;
    let client = stand.open("s").await?;
    let mut exchange = client.post(&prog(&client, 12, 250)).await?;
    exchange.next_event(BOUND).await?.context("primed")?;
    for at in 1..=3 {
        let message = exchange.next_message(BOUND).await?.context("progress")?;
        assert_eq!(message["params"]["progress"].as_f64(), Some(f64::from(at)));
    }
    stand.gateway.kill_worker().await?;
    let outcome = client.follow(exchange).await?;
    assert!(outcome.result().is_ok(), "{outcome:?}");
    let seen = [vec![1, 2, 3], progress_of(&outcome)].concat();
    let rising = seen.windows(2).all(|pair| pair[0] < pair[1]);
    assert!(rising && seen.last() == Some(&12), "R7: it rises, nothing comes twice: {seen:?}");
    Ok(())
}

#[tokio::test]
async fn o1_o3_a_call_that_is_taken_up_is_shown_by_its_name_and_the_resumption_is_counted() -> Result<()> {
    let mut stand = stand().await?;
    let client = stand.open("s").await?;
    // It still runs when the next worker is asked, however long that takes to come.
    let mut exchange = client.post(&prog(&client, 100, 200)).await?;
    exchange.next_event(BOUND).await?.context("primed")?;
    let seen = exchange.next_event(BOUND).await?.context("progress")?.id.context("an id")?;
    stand.gateway.kill_worker().await?;
    let mut again = client.get_stream(Some(&seen)).await?;
    again.next_event(BOUND).await?.context("primed")?;
    let (_, list) = stand.gateway.admin_get("/api/v1/sessions").await?;
    let call = &list["sessions"][0]["calls_in_flight"][0];
    assert_eq!((&call["method"], &call["name"]), (&json!("tools/call"), &json!("prog")), "{list}");
    let outcome = again.finish(BOUND).await?;
    assert!(outcome.result().is_ok(), "{outcome:?}");
    let http = reqwest::Client::builder().no_proxy().build()?;
    let asked = http.get(stand.gateway.admin_url("/metrics")?).bearer_auth(stand.gateway.admin_token()?).send();
    let metrics = asked.await?.text().await?;
    let value = |name: &str| -> Option<f64> {
        metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
    };
    assert_eq!(value("mainstay_stream_resumes_total{result=\"journal\"}"), Some(1.0), "{metrics}");
    let many = ["events_total", "message_bytes_total", "batches_total", "append_seconds_count", "file_bytes"];
    for name in many.map(|name| format!("mainstay_journal_{name}")) {
        assert!(value(&name).is_some_and(|value| value > 0.0), "{name}: {metrics}");
    }
    assert!(stand.gateway.status().await?["journal"]["file_bytes"].as_u64() > Some(0));
    Ok(())
}

#[tokio::test]
async fn r4_a_server_that_gives_event_ids_is_asked_for_the_rest_and_runs_the_call_once() -> Result<()> {
    for everything in [false, true] {
        let mut stand = stand().await?;
        stand.up_h.answer("sse-with-ids").await?;
        let client = stand.open("h").await?;
        let mut exchange = client.post(&prog(&client, 12, 300)).await?;
        // Once this is here, it is on record how far the server's own stream was read.
        exchange.next_message(BOUND).await?.context("progress")?;
        stand.fall(everything).await?;
        let outcome = client.follow(exchange).await?;
        assert!(outcome.result().is_ok(), "everything: {everything}: {outcome:?}");
        assert_eq!(stand.up_h.executions("prog").await?, 1);
        assert_eq!(stand.up_h.count("/initializes").await?, 1);
    }
    Ok(())
}

#[tokio::test]
async fn c8_the_typescript_client_gets_the_answer_of_a_long_call_through_three_kills() -> Result<()> {
    let mut stand = stand().await?;
    stand.up_h.answer("sse-with-ids").await?;
    for server in ["s", "h"] {
        let mut client = SdkClient::open(SdkKind::Ts1, &stand.gateway.url(server)?).await?;
        client.call_start("slow", json!({"ms": 20_000}), "long").await?;
        for kill in 0..3_u64 {
            // Every stream begins with an id: the first, and each that the client came back for, is there by its count.
            let mut seen = 0;
            let opened = async {
                while seen <= kill {
                    tokio::time::sleep(STEP).await;
                    seen = client.cursors().await?;
                }
                anyhow::Ok(())
            };
            within("the client has the call's stream", BOUND, opened).await?;
            stand.gateway.kill_worker().await?;
        }
        let done = client.done("long", 2 * BOUND).await?;
        ensure!(!done.to_string().contains("error"), "{server}: {done}\n{}", stand.gateway.log());
        client.close().await?;
    }
    assert_eq!(stand.up_h.executions("slow").await?, 1, "it ran once");
    assert_eq!(stand.up_s.starts()?.len(), 1, "on the very child");
    Ok(())
}

#[tokio::test]
async fn r6_a_question_asked_before_the_kill_is_answered_after_it_once() -> Result<()> {
    for server in ["h", "s"] {
        let mut stand = stand().await?;
        stand.up_h.answer("sse-with-ids").await?;
        let mut client = RawClient::new(&stand.gateway.url(server)?)?.with_capabilities(json!({"elicitation": {}}));
        client.establish(VERSION).await?;
        let ask = client.message("tools/call", json!({"name": "ask", "arguments": {"message": "sure?"}}));
        let mut exchange = client.post(&ask).await?;
        let question = exchange.next_message(BOUND).await?.context("a question")?;
        stand.gateway.kill_worker().await?;
        let answer = json!({"action": "accept", "content": {"answer": "forty-two"}});
        assert_eq!(client.respond(&question["id"], answer.clone()).await?, 202);
        stand.gateway.kill_worker().await?;
        assert_eq!(client.respond(&question["id"], answer).await?, 202, "a second answer changes nothing");
        let outcome = client.follow(exchange).await?;
        let result = outcome.result()?.to_string();
        assert!(result.contains("forty-two"), "{server}: {outcome:?}");
        let asked = outcome.messages.iter().filter(|message| message["method"] == "elicitation/create").count();
        assert!(asked <= 1, "{server}: it is not asked again");
    }
    Ok(())
}

#[tokio::test]
async fn r6_what_a_child_asked_just_before_the_kill_is_not_asked_again() -> Result<()> {
    for answered_before in [false, true] {
        let mut stand = stand().await?;
        let mut client = RawClient::new(&stand.gateway.url("s")?)?.with_capabilities(json!({"elicitation": {}}));
        client.establish(VERSION).await?;
        let mut listening = client.get_stream(None).await?;
        let primed = listening.next_event(BOUND).await?.context("primed")?.id.context("an id")?;
        let ask = client.message("tools/call", json!({"name": "ask", "arguments": {"message": "sure?"}}));
        let mut asking = client.post(&ask).await?;
        let question = asking.next_message(BOUND).await?.context("a question")?;
        assert_eq!(question["method"], "elicitation/create", "{question}");
        let slow = client.message("tools/call", json!({"name": "slow", "arguments": {"ms": 3000}}));
        let other = client.post(&slow).await?;
        assert!(other.is_sse());
        let answer = json!({"action": "accept", "content": {"answer": "forty-two"}});
        if answered_before {
            assert_eq!(client.respond(&question["id"], answer.clone()).await?, 202);
        }
        stand.gateway.kill_worker().await?;
        // Who comes back first must not get it, although the child's words are given again to whoever is there.
        let mut again = client.get_stream(Some(&primed)).await?;
        let other = client.follow(other).await?;
        assert_eq!(other.notifications().count(), 0, "{other:?}");
        if !answered_before {
            assert_eq!(client.respond(&question["id"], answer).await?, 202);
        }
        let outcome = client.follow(asking).await?;
        assert!(outcome.result()?.to_string().contains("forty-two"), "{outcome:?}");
        assert_eq!(outcome.notifications().count(), 0, "seen before, not sent again: {outcome:?}");
        // What the server says next shows that nothing came before it.
        client.request("resources/subscribe", json!({"uri": "test://static"})).await?.result()?;
        client.call_through("touch_resource", json!({})).await?.result()?;
        let next = again.next_message(BOUND).await?.context("a notification")?;
        assert_eq!(next["method"], "notifications/resources/updated", "{answered_before}: {next}");
        let trace = stand.up_s.trace()?;
        let answers = trace.iter().filter(|entry| entry["line"]["result"]["action"] == "accept").count();
        assert_eq!(answers, 1, "R6: answered once");
    }
    Ok(())
}

#[tokio::test]
async fn r6_c5_another_child_may_ask_under_the_ids_of_the_one_before() -> Result<()> {
    let mut stand = stand().await?;
    let mut client = RawClient::new(&stand.gateway.url("s")?)?.with_capabilities(json!({"elicitation": {}}));
    client.establish(VERSION).await?;
    let answer = json!({"action": "accept", "content": {"answer": "forty-two"}});
    for child in 1..=2 {
        let ask = client.message("tools/call", json!({"name": "ask", "arguments": {"message": "sure?"}}));
        let mut asking = client.post(&ask).await?;
        let question = asking.next_message(BOUND).await?.with_context(|| format!("child {child} asks"))?;
        assert!(question["id"].to_string().contains("ask-1"), "every child counts from one: {question}");
        assert_eq!(client.respond(&question["id"], answer.clone()).await?, 202);
        let outcome = client.follow(asking).await?;
        assert!(outcome.result()?.to_string().contains("forty-two"), "child {child}: {outcome:?}");
        if child == 1 {
            let before = stand.up_s.starts()?.pop().context("a child")?;
            assert!(before.kill());
            wait_until("it is gone", BOUND, async || !before.is_alive()).await?;
            client.call_through("read", json!({})).await?.result()?;
            // The next worker finds a child of which it did not see the start.
            stand.gateway.kill_worker().await?;
        }
    }
    assert_eq!(stand.up_s.starts()?.len(), 2);
    Ok(())
}

#[tokio::test]
async fn r1_r2_what_a_listener_missed_over_the_death_of_everything_is_there_when_it_comes_back() -> Result<()> {
    for everything in [false, true] {
        let mut stand = stand().await?;
        let client = stand.open("h").await?;
        let mut listening = client.get_stream(None).await?;
        let primed = listening.next_event(BOUND).await?.context("primed")?;
        wait_until("the server's own stream is open", BOUND, async || {
            stand.up_h.count("/listening_streams").await.is_ok_and(|open| open == 1)
        })
        .await?;
        stand.up_h.order("/list_changed", json!({})).await?;
        listening.next_message(BOUND).await?.context("a notification")?;
        stand.fall(everything).await?;
        let mut again = client.get_stream(primed.id.as_deref()).await?;
        let message = again.next_message(BOUND).await?.context("what came after the priming event")?;
        assert_eq!(message["method"], "notifications/tools/list_changed", "everything: {everything}");
    }
    Ok(())
}

#[tokio::test]
async fn c8_what_a_child_said_just_before_the_kill_comes_once() -> Result<()> {
    for listens_before in [true, false] {
        let mut stand = stand().await?;
        let client = stand.open("s").await?;
        client.request("resources/subscribe", json!({"uri": "test://static"})).await?.result()?;
        let touch = async || client.call_through("touch_resource", json!({})).await?.result().map(drop);
        let mut listening = None;
        if listens_before {
            listening = Some(client.get_stream(None).await?);
        }
        touch().await?;
        let mut listening = match listening {
            Some(listening) => listening,
            // It waits for its first reader: on record is what that finds.
            None => client.get_stream(None).await?,
        };
        listening.next_event(BOUND).await?.context("primed")?;
        let event = listening.next_event(BOUND).await?.context("the notification")?;
        let cursor = event.id.clone().context("an id")?;
        assert!(event.data.contains("notifications/resources/updated"), "{event:?}");
        // The keeper gives the child's words again: they are acknowledged a second later at the earliest.
        stand.gateway.kill_worker().await?;
        let mut again = client.get_stream(Some(&cursor)).await?;
        touch().await?;
        let next = again.next_message(BOUND).await?.context("the second notification")?;
        assert_eq!(next["method"], "notifications/resources/updated", "{next}");
        assert_eq!(client.delete().await?, 204);
        let rest = again.finish(BOUND).await?;
        assert_eq!(rest.messages.len(), 0, "listening before: {listens_before}; it came again: {rest:?}");
    }
    Ok(())
}

/// How often a client is asked what it has got.
const STEP: Duration = Duration::from_millis(20);
