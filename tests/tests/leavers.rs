//! A worker that has handed over and stays for its calls on HTTP servers, and its successor: clients come back to the
//! successor, operators see the calls there, and whoever of the two is killed, nothing runs twice (T2, R4, R8).

use anyhow::{Context as _, Result, ensure};
use mainstay_tests::{Exchange, Gateway, Proc, RawClient, UpH, UpL, wait_until};
use serde_json::{Value, json};
use std::time::Duration;

const VERSION: &str = "2025-11-25";
const BOUND: Duration = Duration::from_secs(60);

/// A gateway in front of one HTTP server.
struct Stand {
    up: UpH,
    config: String,
    gateway: Gateway,
    reloads: u32,
}

impl Stand {
    async fn start() -> Result<Stand> {
        let up = UpH::start().await?;
        let config = up.toml("h");
        let gateway = Gateway::start(&config, &[]).await?;
        Ok(Stand { up, config, gateway, reloads: 0 })
    }

    async fn open(&self) -> Result<RawClient> {
        let client = RawClient::new(&self.gateway.url("h")?)?.with_capabilities(json!({"elicitation": {}}));
        let mut client = client.with_fresh_connections()?;
        client.establish(VERSION).await?;
        Ok(client)
    }

    /// Puts another configuration in force. The worker that was in charge until then.
    async fn reload(&mut self) -> Result<Proc> {
        let leaver = Proc::of(self.gateway.worker().await?.pid).context("the worker in charge")?;
        self.reloads += 1;
        let config = format!("{}[session]\ndrain_grace = \"{}s\"\n", self.config, 10 + self.reloads);
        self.gateway.rewrite_config(&config)?;
        let output = self.gateway.cli(&["reload"]).await?;
        ensure!(output.status.success(), "{output:?}\n{}", self.gateway.log());
        Ok(leaver)
    }

    /// Waits until the only session has so many calls in flight.
    async fn has_calls(&self, calls: u64) -> Result<()> {
        wait_until("the session's calls to be counted", BOUND, async || {
            self.session().await.is_ok_and(|session| session["calls"] == calls)
        })
        .await
    }

    /// The only session of the gateway, as its operator sees it.
    async fn session(&self) -> Result<Value> {
        let (status, listed) = self.gateway.admin_get("/api/v1/sessions").await?;
        let [only] = listed["sessions"].as_array().context("sessions")?.as_slice() else {
            anyhow::bail!("{status}: {listed}");
        };
        Ok(only.clone())
    }
}

/// A call that is in flight until its client answers the server's question.
struct Asked {
    exchange: Exchange,
    /// The cursor of the priming event.
    primed: String,
    question: Value,
}

impl Asked {
    async fn of(client: &RawClient) -> Result<Asked> {
        let arguments = json!({"message": "go on?", "timeout_ms": 600_000});
        let call = client.message("tools/call", json!({"name": "ask", "arguments": arguments}));
        let mut exchange = client.post(&call).await?;
        let primed = exchange.next_event(BOUND).await?.context("primed")?.id.context("an id")?;
        let question = exchange.next_message(BOUND).await?.context("the question")?;
        ensure!(question["method"] == "elicitation/create", "{question}");
        Ok(Asked { exchange, primed, question })
    }
}

/// A call that was left with the former worker, and its client, which has come back for it at the successor.
struct Left {
    client: RawClient,
    /// The cursor of the priming event.
    primed: String,
    question: Value,
    back: Exchange,
    leaver: Proc,
}

impl Left {
    /// The client has hung up before the handover.
    async fn at(stand: &mut Stand) -> Result<Left> {
        let client = stand.open().await?;
        let Asked { exchange, primed, question } = Asked::of(&client).await?;
        drop(exchange);
        let leaver = stand.reload().await?;
        let mut back = client.get_stream(Some(&primed)).await?;
        ensure!(back.next_message(BOUND).await? == Some(question.clone()), "R2: what came after it");
        Ok(Left { client, primed, question, back, leaver })
    }
}

/// Lets the call of `question` come to its end.
async fn release(client: &RawClient, question: &Value) -> Result<()> {
    let status = client.respond(&question["id"], json!({"action": "accept", "content": {}})).await?;
    ensure!(status == 202, "the answer was taken with {status}");
    Ok(())
}

async fn is_gone(leaver: Proc) -> Result<()> {
    wait_until("the former worker to be gone", BOUND, async || !leaver.is_alive()).await
}

#[tokio::test]
async fn r4_a_client_that_comes_back_to_a_call_of_the_former_worker_gets_its_answer() -> Result<()> {
    let mut stand = Stand::start().await?;
    let (client, other) = (stand.open().await?, stand.open().await?);
    let kept = Asked::of(&other).await?;
    let Asked { exchange, primed, question } = Asked::of(&client).await?;
    drop(exchange);
    let leaver = stand.reload().await?;
    let mut back = client.get_stream(Some(&primed)).await?;
    assert_eq!(back.status, 200);
    let again = back.next_event(BOUND).await?.context("primed anew")?;
    assert_eq!(again.id.as_deref(), Some(&*primed), "R2: with the very same id");
    assert_eq!(back.next_message(BOUND).await?, Some(question.clone()), "R2: what came after it");
    // A second one takes over, at the same stream.
    let mut taken = client.get_stream(Some(&primed)).await?;
    assert!(back.next_event(BOUND).await?.is_none(), "R5");
    assert_eq!(taken.next_message(BOUND).await?, Some(question.clone()));
    release(&client, &question).await?;
    let outcome = taken.finish(BOUND).await?;
    assert!(outcome.result().is_ok(), "{outcome:?}");
    assert!(leaver.is_alive(), "it stays for the other call");
    let last = outcome.last_event_id().context("an id")?;
    assert_eq!(client.get_stream(Some(last)).await?.status, 204, "R2: it is finished");
    let whole = client.get_stream(Some(&primed)).await?.finish(BOUND).await?;
    assert_eq!(whole.messages.len(), 2, "R2: the question and the answer, {whole:?}");
    release(&other, &kept.question).await?;
    assert!(kept.exchange.finish(BOUND).await?.result().is_ok(), "the former worker's own client");
    is_gone(leaver).await?;
    assert_eq!(stand.up.executions("ask").await?, 2, "each ran once");
    assert_eq!(std::fs::read_dir(stand.gateway.state_dir().join("leaving"))?.count(), 0, "nothing is left behind");
    stand.gateway.stop().await?;
    stand.gateway.assert_no_orphans().await
}

#[tokio::test]
async fn r4_if_the_former_worker_is_killed_its_call_is_told_as_unknown_and_never_runs_again() -> Result<()> {
    let mut stand = Stand::start().await?;
    let Left { client, back, leaver, .. } = Left::at(&mut stand).await?;
    assert!(leaver.kill());
    let outcome = back.finish(BOUND).await?;
    assert_eq!(outcome.named_outcome(), Some("outcome_unknown"), "{outcome:?}");
    is_gone(leaver).await?;
    stand.has_calls(0).await?;
    assert_eq!(stand.up.executions("ask").await?, 1);
    let text = client.call_through("echo", json!({"text": "on"})).await?;
    assert!(text.text()?.contains("on"), "the session goes on");
    Ok(())
}

#[tokio::test]
async fn r4_a_stream_with_event_ids_is_resumed_once_the_former_worker_is_gone_and_not_before() -> Result<()> {
    let mut stand = Stand::start().await?;
    stand.up.answer("sse-with-ids").await?;
    let Left { client, question, back, leaver, .. } = Left::at(&mut stand).await?;
    let resumptions = async || -> Result<usize> {
        let gets = stand.up.requests("GET").await?;
        Ok(gets.iter().filter(|get| get["headers"]["last-event-id"].is_string()).count())
    };
    assert_eq!(resumptions().await?, 0, "one worker at a time reads the server's stream");
    assert!(leaver.kill());
    wait_until("the successor to resume it", BOUND, async || resumptions().await.is_ok_and(|count| count == 1)).await?;
    release(&client, &question).await?;
    let outcome = back.finish(BOUND).await?;
    assert!(outcome.result().is_ok(), "the real answer, from the server's own stream: {outcome:?}");
    assert_eq!(stand.up.executions("ask").await?, 1);
    Ok(())
}

#[tokio::test]
async fn r4_a_successor_that_is_killed_takes_nothing_along() -> Result<()> {
    let mut stand = Stand::start().await?;
    let Left { client, primed, question, back: _cut, leaver } = Left::at(&mut stand).await?;
    stand.gateway.kill_worker().await?;
    // The next one knows of the call as well.
    stand.has_calls(1).await?;
    let mut back = client.get_stream(Some(&primed)).await?;
    assert_eq!(back.next_message(BOUND).await?, Some(question.clone()));
    assert!(leaver.is_alive());
    release(&client, &question).await?;
    let outcome = back.finish(BOUND).await?;
    assert!(outcome.result().is_ok(), "{outcome:?}");
    is_gone(leaver).await?;
    assert_eq!(stand.up.executions("ask").await?, 1);
    Ok(())
}

#[tokio::test]
async fn t2_two_handovers_in_a_row_leave_each_call_to_its_worker() -> Result<()> {
    let mut stand = Stand::start().await?;
    let second = stand.open().await?;
    let Left { client: first, question, back, leaver: oldest, .. } = Left::at(&mut stand).await?;
    let two = Asked::of(&second).await?;
    let older = stand.reload().await?;
    assert!(oldest.is_alive() && older.is_alive());
    // One reads on at the worker that follows another, the other comes back to the last one.
    drop(two.exchange);
    let mut again = second.get_stream(Some(&two.primed)).await?;
    assert_eq!(again.next_message(BOUND).await?, Some(two.question.clone()));
    release(&first, &question).await?;
    let outcome = back.finish(BOUND).await?;
    assert!(outcome.result().is_ok(), "{outcome:?}");
    is_gone(oldest).await?;
    release(&second, &two.question).await?;
    let outcome = again.finish(BOUND).await?;
    assert!(outcome.result().is_ok(), "{outcome:?}");
    is_gone(older).await?;
    assert_eq!(stand.up.executions("ask").await?, 2);
    Ok(())
}

#[tokio::test]
async fn o1_the_calls_of_the_former_worker_are_shown_and_count() -> Result<()> {
    let mut stand = Stand::start().await?;
    let client = stand.open().await?;
    let asked = Asked::of(&client).await?;
    let leaver = stand.reload().await?;
    stand.has_calls(1).await?;
    let session = stand.session().await?;
    let shown = &session["calls_in_flight"][0];
    assert_eq!((&shown["method"], &shown["name"]), (&json!("tools/call"), &json!("ask")), "{session}");
    let (_, servers) = stand.gateway.admin_get("/api/v1/servers").await?;
    assert_eq!(servers["servers"][0]["calls"], 1, "{servers}");
    release(&client, &asked.question).await?;
    assert!(asked.exchange.finish(BOUND).await?.result().is_ok());
    // It is over for the successor, too.
    stand.has_calls(0).await?;
    is_gone(leaver).await
}

#[tokio::test]
async fn s8_a_drain_waits_for_the_calls_of_the_former_worker() -> Result<()> {
    let mut stand = Stand::start().await?;
    let client = stand.open().await?;
    let call = client.message("tools/call", json!({"name": "slow", "arguments": {"ms": 8000}}));
    let exchange = client.post(&call).await?;
    wait_until("the call runs", BOUND, async || stand.up.executions("slow").await.is_ok_and(|count| count == 1))
        .await?;
    stand.reload().await?;
    let drained = stand.session().await?;
    let path = format!("/api/v1/sessions/{}/drain", drained["ref"].as_str().context("a ref")?);
    let (status, answer) = stand.gateway.admin_post(&path, &json!({"grace": "60s"})).await?;
    assert_eq!(status, 202, "{answer}");
    wait_until("the session to be drained", BOUND, async || {
        stand.session().await.is_ok_and(|session| session["state"] == "deleted")
    })
    .await?;
    assert_eq!(stand.up.count("/completions/slow").await?, 1, "not before the call was over");
    let outcome = exchange.finish(BOUND).await?;
    assert!(outcome.result().is_ok(), "{outcome:?}");
    Ok(())
}

#[tokio::test]
async fn r8_a_cancellation_at_the_successor_reaches_the_call_of_the_former_worker() -> Result<()> {
    let mut stand = Stand::start().await?;
    let client = stand.open().await?;
    let call = client.message("tools/call", json!({"name": "slow", "arguments": {"ms": 600_000}}));
    let mut exchange = client.post(&call).await?;
    let primed = exchange.next_event(BOUND).await?.context("primed")?.id.context("an id")?;
    let leaver = stand.reload().await?;
    stand.has_calls(1).await?;
    let status = client.notify("notifications/cancelled", json!({"requestId": call["id"], "reason": "enough"})).await?;
    assert_eq!(status, 202);
    wait_until("the server to hear of it", BOUND, async || {
        stand.up.count("/cancelled").await.is_ok_and(|count| count == 1)
    })
    .await?;
    assert_eq!(stand.up.requests("notifications/cancelled").await?.len(), 1, "once");
    let outcome = exchange.finish(BOUND).await?;
    assert!(outcome.result().is_err(), "{outcome:?}");
    is_gone(leaver).await?;
    // It is over for the successor, too.
    stand.has_calls(0).await?;
    let again = client.get_stream(Some(&primed)).await?.finish(BOUND).await?;
    assert!(again.result().is_err(), "{again:?}");
    assert_eq!(stand.up.executions("slow").await?, 1);
    Ok(())
}

#[tokio::test]
async fn r8_a_server_whose_session_is_a_connection_hears_of_a_cancellation_over_that() -> Result<()> {
    let up = UpL::start().await?;
    let config = up.toml("h");
    let mut gateway = Gateway::start(&config, &[]).await?;
    let client = RawClient::open(&gateway.url("h")?, VERSION).await?;
    let call = client.message("tools/call", json!({"name": "slow", "arguments": {"ms": 600_000}}));
    let exchange = client.post(&call).await?;
    wait_until("the call runs", BOUND, async || up.executions("slow").await.is_ok_and(|count| count == 1)).await?;
    let leaver = Proc::of(gateway.worker().await?.pid).context("the worker in charge")?;
    gateway.rewrite_config(&format!("{config}[session]\ndrain_grace = \"11s\"\n"))?;
    ensure!(gateway.cli(&["reload"]).await?.status.success(), "{}", gateway.log());
    assert_eq!(client.notify("notifications/cancelled", json!({"requestId": call["id"]})).await?, 202);
    wait_until("the server to hear of it", BOUND, async || up.count("/cancelled").await.is_ok_and(|count| count == 1))
        .await?;
    assert!(exchange.finish(BOUND).await?.result().is_err());
    is_gone(leaver).await?;
    assert_eq!(up.executions("slow").await?, 1);
    Ok(())
}

#[tokio::test]
async fn r4_a_batch_of_the_former_worker_is_come_back_to_as_well() -> Result<()> {
    let mut stand = Stand::start().await?;
    let client = RawClient::new(&stand.gateway.url("h")?)?.with_capabilities(json!({"elicitation": {}}));
    let mut client = client.with_fresh_connections()?;
    client.establish("2025-03-26").await?;
    let call = |tool: &str, arguments| client.message("tools/call", json!({"name": tool, "arguments": arguments}));
    let batch = json!([call("ask", json!({"timeout_ms": 600_000})), call("echo", json!({"text": "at once"}))]);
    let mut exchange = client.post(&batch).await?;
    let primed = exchange.next_event(BOUND).await?.context("primed")?.id.context("an id")?;
    let said = [exchange.next_message(BOUND).await?, exchange.next_message(BOUND).await?];
    drop(exchange);
    let leaver = stand.reload().await?;
    // One of them is answered.
    stand.has_calls(1).await?;
    let mut back = client.get_stream(Some(&primed)).await?;
    assert_eq!([back.next_message(BOUND).await?, back.next_message(BOUND).await?], said, "R2: in the same order");
    let question = said.into_iter().flatten().find(|message| message["method"].is_string()).context("a question")?;
    release(&client, &question).await?;
    let outcome = back.finish(BOUND).await?;
    assert_eq!(outcome.response().context("the other answer")?["id"], batch[0]["id"], "{outcome:?}");
    is_gone(leaver).await?;
    assert_eq!((stand.up.executions("ask").await?, stand.up.executions("echo").await?), (1, 1));
    Ok(())
}

#[tokio::test]
async fn s6_a_session_that_ends_at_the_successor_ends_for_the_former_worker() -> Result<()> {
    let mut stand = Stand::start().await?;
    let client = stand.open().await?;
    let Asked { exchange, primed, question } = Asked::of(&client).await?;
    let leaver = stand.reload().await?;
    let second = stand.open().await?;
    let at_second = Asked::of(&second).await?;
    let mut back = client.get_stream(Some(&primed)).await?;
    assert_eq!(back.next_message(BOUND).await?, Some(question));
    assert_eq!(client.delete().await?, 204);
    for (name, told) in [("here", back), ("at the former worker", exchange)] {
        let outcome = told.finish(BOUND).await?;
        assert!(outcome.error().is_ok(), "R4: never silence; {name}: {outcome:?}");
    }
    is_gone(leaver).await?;
    assert_eq!(client.get_stream(Some(&primed)).await?.status, 404);
    wait_until("the server's session is deleted", BOUND, async || {
        stand.up.count("/deletes").await.is_ok_and(|count| count == 1)
    })
    .await?;
    assert!(!at_second.question.is_null(), "another session goes on");
    assert_eq!(stand.up.executions("ask").await?, 2);
    Ok(())
}

#[tokio::test]
async fn u4_the_former_worker_makes_no_session_that_nobody_would_know_of() -> Result<()> {
    let up = UpH::start().await?;
    let config = format!("{}patience = \"50s\"\n", up.toml("h"));
    let gateway = Gateway::start(&config, &[]).await?;
    let mut stand = Stand { up, config, gateway, reloads: 0 };
    let client = stand.open().await?;
    // The server is not there: the call waits for it, and is not sent yet when the worker hands over.
    stand.up.order("/gap", json!({"kind": "refuse"})).await?;
    stand.up.order("/gap", json!({"kind": "cut_all"})).await?;
    let call = client.message("tools/call", json!({"name": "incr", "arguments": {}}));
    let mut exchange = client.post(&call).await?;
    let primed = exchange.next_event(BOUND).await?;
    assert!(primed.is_some_and(|primed| primed.id.is_some()), "it waits on a stream");
    let leaver = stand.reload().await?;
    stand.up.forget().await?;
    stand.up.order("/gap", json!({"kind": "accept"})).await?;
    let outcome = exchange.finish(BOUND).await?;
    assert_eq!(outcome.named_outcome(), Some("upstream_lost_again"), "{outcome:?}");
    is_gone(leaver).await?;
    assert_eq!((stand.up.count("/initializes").await?, stand.up.executions("incr").await?), (1, 0));
    let text = client.call_through("incr", json!({})).await?;
    assert!(text.text().is_ok(), "{text:?}");
    assert_eq!((stand.up.count("/initializes").await?, stand.up.executions("incr").await?), (2, 1), "here it is made");
    Ok(())
}

/// Has the server take so long for the next request of `method` that its worker has given way by then.
async fn linger(up: &UpH, method: &str, how: &str) -> Result<()> {
    up.gap(json!({"kind": how, "method": method, "ms": 8000})).await
}

/// What the server's session knows of itself.
async fn facts(client: &RawClient) -> Result<Value> {
    client.call_through("whoami", json!({})).await?.json()
}

#[tokio::test]
async fn u4_settings_that_the_former_worker_is_granted_are_set_again_by_its_successor_after_a_loss() -> Result<()> {
    let mut stand = Stand::start().await?;
    let client = stand.open().await?;
    client.request("resources/subscribe", json!({"uri": "test://kept"})).await?.result()?;
    for (method, how) in [
        ("resources/subscribe", "delay"),
        ("logging/setLevel", "delay"),
        // Refused, whatever the server has made of it.
        ("resources/unsubscribe", "rpc_error"),
    ] {
        linger(&stand.up, method, how).await?;
    }
    let asking = |method: &'static str, params: Value| {
        let client = client.clone();
        tokio::spawn(async move { client.request(method, params).await })
    };
    let subscribing = asking("resources/subscribe", json!({"uri": "test://late"}));
    let levelling = asking("logging/setLevel", json!({"level": "warning"}));
    let leaving = asking("resources/unsubscribe", json!({"uri": "test://kept"}));
    wait_until("the server has all of them", BOUND, async || {
        let posts = stand.up.requests("POST").await.unwrap_or_default();
        let methods = ["resources/subscribe", "logging/setLevel", "resources/unsubscribe"];
        let count = |method: &str| posts.iter().filter(|post| post["body"]["method"] == method).count();
        methods.map(count) == [2, 1, 1]
    })
    .await?;
    let leaver = stand.reload().await?;
    assert!(subscribing.await??.result().is_ok() && levelling.await??.result().is_ok());
    assert!(leaving.await??.result().is_err());
    is_gone(leaver).await?;
    stand.has_calls(0).await?;
    stand.up.forget().await?;
    let facts = facts(&client).await?;
    assert_eq!(facts["subscriptions"], json!(["test://kept", "test://late"]), "{facts}");
    assert_eq!(facts["level"], "warning", "{facts}");
    Ok(())
}

#[tokio::test]
async fn u4_a_setting_that_the_former_worker_is_granted_holds_at_its_successors_own_connection() -> Result<()> {
    let up = UpL::start().await?;
    let config = up.toml("h");
    let mut gateway = Gateway::start(&config, &[]).await?;
    let client = RawClient::open(&gateway.url("h")?, VERSION).await?.with_fresh_connections()?;
    linger(&up, "resources/subscribe", "delay").await?;
    let subscribing = {
        let client = client.clone();
        tokio::spawn(async move { client.request("resources/subscribe", json!({"uri": "test://late"})).await })
    };
    wait_until("the server has it", BOUND, async || {
        up.requests("resources/subscribe").await.is_ok_and(|seen| seen.len() == 1)
    })
    .await?;
    let leaver = Proc::of(gateway.worker().await?.pid).context("the worker in charge")?;
    gateway.rewrite_config(&format!("{config}[session]\ndrain_grace = \"11s\"\n"))?;
    ensure!(gateway.cli(&["reload"]).await?.status.success(), "{}", gateway.log());
    // The successor has a connection of its own by the time that the former worker is answered.
    facts(&client).await?;
    assert!(subscribing.await??.result().is_ok());
    is_gone(leaver).await?;
    wait_until("the subscription to hold", BOUND, async || {
        facts(&client).await.is_ok_and(|facts| facts["subscriptions"] == json!(["test://late"]))
    })
    .await
}

#[tokio::test]
async fn r4_a_cursor_of_a_living_former_worker_that_leads_to_nothing_is_told_soon() -> Result<()> {
    let mut stand = Stand::start().await?;
    let client = stand.open().await?;
    let kept = Asked::of(&client).await?;
    let leaver = stand.reload().await?;
    let mut parts: Vec<&str> = kept.primed.split('-').collect();
    parts[2] = "999999";
    let outcome = client.get_stream(Some(&parts.join("-"))).await?.finish(BOUND).await?;
    assert_eq!(outcome.named_outcome(), Some("outcome_unknown"), "{outcome:?}");
    assert!(leaver.is_alive());
    release(&client, &kept.question).await?;
    assert!(kept.exchange.finish(BOUND).await?.result().is_ok(), "the call that is there goes on");
    is_gone(leaver).await
}
