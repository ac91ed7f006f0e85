//! Questions of servers to clients over deaths of workers and handovers: each reaches its client, is answered once, and its answer
//! gets to the server (R6).

use anyhow::{Context as _, Result, ensure};
use mainstay_tests::{Exchange, Gateway, Locked, Proc, RawClient, UpH, UpL, UpM, UpS, wait_until};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::time::Duration;

const VERSION: &str = "2025-11-25";
const BOUND: Duration = Duration::from_secs(30);

struct Stand {
    up_h: UpH,
    up_s: UpS,
    gateway: Gateway,
    client: RawClient,
}

impl Stand {
    /// With a client of that server that can be asked.
    async fn new(server: &str) -> Result<Stand> {
        let up_h = UpH::start().await?;
        up_h.answer("sse-with-ids").await?;
        let up_s = UpS::new(&[])?;
        let gateway = Gateway::start(&format!("{}{}", up_h.toml("h"), up_s.toml("s")?), &[]).await?;
        let mut client = RawClient::new(&gateway.url(server)?)?.with_capabilities(json!({"elicitation": {}}));
        client.establish(VERSION).await?;
        Ok(Stand { up_h, up_s, gateway, client })
    }

    async fn ask(&self) -> Result<Exchange> {
        ask(&self.client).await
    }
}

/// A call in which the server asks its client for a form.
async fn ask(client: &RawClient) -> Result<Exchange> {
    let params = json!({"name": "ask", "arguments": {"message": "sure?", "timeout_ms": 600_000}});
    client.post(&client.message("tools/call", params)).await
}

/// A client that can be asked, and whose requests find whichever worker is in charge.
async fn asked(gateway: &Gateway, server: &str) -> Result<RawClient> {
    let client = RawClient::new(&gateway.url(server)?)?.with_capabilities(json!({"elicitation": {}}));
    let mut client = client.with_fresh_connections()?;
    client.establish(VERSION).await?;
    Ok(client)
}

/// Gives way to another worker. The one that was in charge until then.
async fn hand_over(gateway: &mut Gateway, config: &str) -> Result<Proc> {
    let leaver = Proc::of(gateway.worker().await?.pid).context("the worker in charge")?;
    gateway.rewrite_config(config)?;
    let output = gateway.cli(&["reload"]).await?;
    ensure!(output.status.success(), "{output:?}\n{}", gateway.log());
    Ok(leaver)
}

/// `config` with another grace.
fn changed(config: &str, seconds: usize) -> String {
    format!("{config}[session]\ndrain_grace = \"{}s\"\n", 10 + seconds)
}

async fn is_gone(leaver: Proc) -> Result<()> {
    wait_until("the former worker to be gone", BOUND, async || !leaver.is_alive()).await
}

/// How often an HTTP server was sent an answer.
async fn answers(up: &UpH) -> Result<usize> {
    let posts = up.requests("POST").await?;
    Ok(posts.iter().filter(|post| post["body"]["result"]["action"] == "accept").count())
}

fn yes() -> Value {
    json!({"action": "accept", "content": {"answer": "forty-two"}})
}

/// The next message of that kind.
async fn next(exchange: &mut Exchange, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
    loop {
        let message = exchange.next_message(BOUND).await?.context("the stream goes on")?;
        if wanted(&message) {
            return Ok(message);
        }
    }
}

fn is_question(message: &Value) -> bool {
    message["method"] == "elicitation/create"
}

#[tokio::test]
async fn r6_an_answer_that_a_worker_took_and_could_not_forward_is_forwarded_by_the_next() -> Result<()> {
    let mut stand = Stand::new("h").await?;
    let mut asking = stand.ask().await?;
    let question = next(&mut asking, is_question).await?;
    // What has no method is an answer.
    stand.up_h.gap(json!({"kind": "hang", "method": ""})).await?;
    assert_eq!(stand.client.respond(&question["id"], yes()).await?, 202);
    stand.gateway.kill_worker().await?;
    let outcome = stand.client.follow(asking).await?;
    assert!(outcome.result()?.to_string().contains("forty-two"), "{outcome:?}\n{}", stand.gateway.log());
    assert_eq!(stand.up_h.executions("ask").await?, 1);
    Ok(())
}

#[tokio::test]
async fn r6_c8_a_child_that_did_not_read_gets_its_answer_once_over_the_death_of_the_worker() -> Result<()> {
    let mut stand = Stand::new("s").await?;
    let mut asking = stand.ask().await?;
    let question = next(&mut asking, is_question).await?;
    let child = stand.up_s.starts()?.pop().context("a child")?;
    assert!(child.signal(Signal::STOP));
    // More than may wait for its input: nothing more gets as far as the keeper.
    let text = "x".repeat(STUFFING_BYTES);
    for _ in 0..STUFFINGS {
        let stuffing = json!({"jsonrpc": "2.0", "method": "notifications/stuffing", "params": {"text": text}});
        assert_eq!(stand.client.post(&stuffing).await?.status, 202);
    }
    assert_eq!(stand.client.respond(&question["id"], yes()).await?, 202);
    stand.gateway.kill_worker().await?;
    assert!(child.signal(Signal::CONT));
    let outcome = stand.client.follow(asking).await?;
    assert!(outcome.result()?.to_string().contains("forty-two"), "{outcome:?}\n{}", stand.gateway.log());
    // And whoever comes after that does not forward it again.
    stand.gateway.kill_worker().await?;
    stand.client.call_through("read", json!({})).await?.result()?;
    let answers = stand.up_s.trace()?.iter().filter(|entry| entry["line"]["result"]["action"] == "accept").count();
    assert_eq!(answers, 1);
    Ok(())
}

/// Resolves once the only session has a question that its client has not answered.
async fn is_asked(gateway: &Gateway) -> Result<()> {
    wait_until("the gateway has the question", BOUND, async || {
        let (status, shown) = gateway.admin_get("/api/v1/sessions").await.unwrap_or_default();
        status == 200 && shown["sessions"][0]["questions"] == 1
    })
    .await
}

#[tokio::test]
async fn r6_c8_a_question_that_was_not_durable_is_asked_on_the_stream_of_its_call_however_late_the_kill_and_how_many()
-> Result<()> {
    for (late, kills) in [(Duration::ZERO, 1), (LATE, 1), (LATE, 3)] {
        let mut stand = Stand::new("s").await?;
        stand.client.call_through("read", json!({})).await?.result()?;
        let locked = Locked::new(&stand.gateway.state_dir().join("streams.db"))?;
        let mut asking = stand.ask().await?;
        let primed = asking.next_event(BOUND).await?.context("primed")?.id.context("an id")?;
        is_asked(&stand.gateway).await?;
        tokio::time::sleep(late).await;
        stand.gateway.kill_worker_at_once().await?;
        drop(locked);
        for _ in 1..kills {
            // The session is there again before anybody has come back to the call: the question waits for its client.
            stand.client.request("ping", json!({})).await?.result()?;
            is_asked(&stand.gateway).await?;
            tokio::time::sleep(late).await;
            stand.gateway.kill_worker().await?;
        }
        if kills > 1 {
            stand.client.request("ping", json!({})).await?.result()?;
            is_asked(&stand.gateway).await?;
        }
        let mut again = stand.client.get_stream(Some(&primed)).await?;
        let question = next(&mut again, is_question).await?;
        assert_eq!(stand.client.respond(&question["id"], yes()).await?, 202);
        let answer = next(&mut again, |message| message.get("result").is_some()).await?;
        assert!(answer.to_string().contains("forty-two"), "{late:?}, {kills}: {answer}");
        let trace = stand.up_s.trace()?;
        let answers = trace.iter().filter(|entry| entry["line"]["result"]["action"] == "accept").count();
        assert_eq!(answers, 1, "{late:?}, {kills}");
    }
    Ok(())
}

#[tokio::test]
async fn r6_an_answer_counts_although_its_client_hangs_up_before_it_is_confirmed() -> Result<()> {
    let stand = Stand::new("s").await?;
    let params = json!({"name": "ask", "arguments": {"message": "sure?", "timeout_ms": 600_000}});
    let mut asking = stand.client.post(&stand.client.message("tools/call", params)).await?;
    let question = next(&mut asking, is_question).await?;
    // Nothing gets on record meanwhile.
    let locked = Locked::new(&stand.gateway.state_dir().join("streams.db"))?;
    let taken = wait_until("the gateway has the answer", BOUND, async || {
        let (status, shown) = stand.gateway.admin_get("/api/v1/sessions").await.unwrap_or_default();
        status == 200 && shown["sessions"][0]["questions"] == 0
    });
    tokio::select! {
        _ = stand.client.respond(&question["id"], yes()) => {}
        taken = taken => taken?,
    }
    // Whoever is answered now was heard behind the end of that connection.
    stand.client.request("ping", json!({})).await?.result()?;
    drop(locked);
    let answer = next(&mut asking, |message| message.get("result").is_some()).await?;
    assert!(answer.to_string().contains("forty-two"), "{answer}");
    Ok(())
}

#[tokio::test]
async fn r6_an_answer_that_the_successor_is_given_reaches_a_server_that_only_the_former_worker_can_reach() -> Result<()>
{
    let (up_l, up_m) = (UpL::start().await?, UpM::start().await?);
    let config = format!("{}{}", up_l.toml("l"), up_m.toml("m"));
    let mut gateway = Gateway::start(&config, &[]).await?;
    for (round, comes_back) in [false, true].into_iter().enumerate() {
        for (place, server) in ["l", "m"].into_iter().enumerate() {
            let client = asked(&gateway, server).await?;
            let mut asking = ask(&client).await?;
            let primed = asking.next_event(BOUND).await?.context("primed")?.id.context("an id")?;
            let question = next(&mut asking, is_question).await?;
            let leaver = hand_over(&mut gateway, &changed(&config, 2 * round + place)).await?;
            if comes_back {
                asking = client.get_stream(Some(&primed)).await?;
                assert_eq!(next(&mut asking, is_question).await?, question, "R2: what came after it");
            }
            for _ in 0..2 {
                assert_eq!(client.respond(&question["id"], yes()).await?, 202);
            }
            let answer = next(&mut asking, |message| message.get("result").is_some()).await?;
            assert!(answer.to_string().contains("forty-two"), "{server}, {comes_back}: {answer}");
            drop(asking);
            is_gone(leaver).await?;
        }
    }
    assert_eq!((answers(&up_l).await?, up_l.executions("ask").await?), (2, 2), "each once");
    assert_eq!(up_m.count("tools/call"), 4, "each asks in one round and answers in another");
    Ok(())
}

#[tokio::test]
async fn r6_the_former_worker_forwards_an_answer_although_the_successor_that_took_it_is_killed() -> Result<()> {
    let up_l = UpL::start().await?;
    let config = up_l.toml("l");
    let mut gateway = Gateway::start(&config, &[]).await?;
    let client = asked(&gateway, "l").await?;
    let mut asking = ask(&client).await?;
    let question = next(&mut asking, is_question).await?;
    let leaver = hand_over(&mut gateway, &changed(&config, 0)).await?;
    // It sees nothing of what the successor takes before that is dead.
    assert!(leaver.signal(Signal::STOP));
    assert_eq!(client.respond(&question["id"], yes()).await?, 202);
    gateway.kill_worker().await?;
    assert!(leaver.signal(Signal::CONT));
    let answer = next(&mut asking, |message| message.get("result").is_some()).await?;
    assert!(answer.to_string().contains("forty-two"), "{answer}");
    drop(asking);
    is_gone(leaver).await?;
    assert_eq!((answers(&up_l).await?, up_l.executions("ask").await?), (1, 1));
    Ok(())
}

#[tokio::test]
async fn r6_the_successor_forwards_what_it_has_left_to_the_former_worker_once_that_is_killed() -> Result<()> {
    let up = UpH::start().await?;
    up.answer("sse-with-ids").await?;
    let config = up.toml("h");
    let mut gateway = Gateway::start(&config, &[]).await?;
    let client = asked(&gateway, "h").await?;
    let mut asking = ask(&client).await?;
    let question = next(&mut asking, is_question).await?;
    let leaver = hand_over(&mut gateway, &changed(&config, 0)).await?;
    assert!(leaver.signal(Signal::STOP));
    assert_eq!(client.respond(&question["id"], yes()).await?, 202);
    assert!(leaver.kill());
    let outcome = client.follow(asking).await?;
    assert!(outcome.result()?.to_string().contains("forty-two"), "{outcome:?}\n{}", gateway.log());
    assert_eq!((answers(&up).await?, up.executions("ask").await?), (1, 1));
    Ok(())
}

#[tokio::test]
async fn r6_an_answer_that_the_former_worker_is_about_to_deliver_is_not_sent_by_its_successor() -> Result<()> {
    let up = UpH::start().await?;
    let config = up.toml("h");
    let mut gateway = Gateway::start(&config, &[]).await?;
    let client = asked(&gateway, "h").await?;
    let mut asking = ask(&client).await?;
    let question = next(&mut asking, is_question).await?;
    // What has no method is an answer: the server takes its time for the first one.
    up.gap(json!({"kind": "delay", "method": "", "ms": 6000})).await?;
    assert_eq!(client.respond(&question["id"], yes()).await?, 202);
    let leaver = hand_over(&mut gateway, &changed(&config, 0)).await?;
    let outcome = asking.finish(BOUND).await?;
    assert!(outcome.result()?.to_string().contains("forty-two"), "{outcome:?}");
    is_gone(leaver).await?;
    assert_eq!((answers(&up).await?, up.executions("ask").await?), (1, 1));
    Ok(())
}

/// So late after a message of a child nothing of it would be in custody any more, if it had been dealt with.
const LATE: Duration = Duration::from_secs(3);
/// Together they are more than the keeper lets wait for one child.
const STUFFINGS: usize = 10;
const STUFFING_BYTES: usize = 2 << 20;
