//! UP-H without a gateway: the instrument is known to be right before anything is measured with it.

use anyhow::{Context as _, Result};
use mainstay_tests::{Ended, RawClient, UpH, wait_until};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const VERSION: &str = "2025-11-25";
const BOUND: Duration = Duration::from_secs(10);

async fn opened() -> Result<(UpH, RawClient)> {
    let up = UpH::start().await?;
    let client = RawClient::open(&up.url(), VERSION).await?;
    Ok((up, client))
}

#[tokio::test]
async fn initialize_negotiates_and_opens_a_session_of_its_own() -> Result<()> {
    let up = UpH::start().await?;
    let mut sessions = std::collections::BTreeSet::new();
    for version in ["2025-11-25", "2025-06-18", "2025-03-26"] {
        let client = RawClient::open(&up.url(), version).await?;
        assert_eq!(client.version.as_deref(), Some(version));
        assert_eq!(client.call("whoami", json!({})).await?.json()?["calls"], 1);
        sessions.insert(client.session.context("no session id")?);
    }
    assert_eq!(sessions.len(), 3);
    assert_eq!(up.count("/initializes").await?, 3);
    assert_eq!(up.count("/initialized").await?, 3);
    assert_eq!(up.count("/before_initialized").await?, 0);
    Ok(())
}

#[tokio::test]
async fn requests_are_checked_as_common_servers_check_them() -> Result<()> {
    let (_up, client) = opened().await?;
    let list = client.message("tools/list", Value::Null);
    let mut without = client.clone();
    without.session = None;
    assert_eq!(without.post(&list).await?.status, 400, "no id");
    let stranger = client.clone().with_session("up-0", VERSION);
    assert_eq!(stranger.post(&list).await?.status, 404, "unknown id");
    let picky = client.clone().with_header("accept", "application/json")?;
    assert_eq!(picky.post(&list).await?.status, 406);
    assert_eq!(picky.get_stream(None).await?.status, 406);
    let form = client.clone().with_header("content-type", "text/plain")?;
    assert_eq!(form.post(&list).await?.status, 415);
    let ahead = client.clone().with_header("mcp-protocol-version", "2099-01-01")?;
    assert_eq!(ahead.post(&list).await?.status, 400);
    assert_eq!(client.post_bytes("{").await?.status, 400);
    assert_eq!(client.post(&json!([list])).await?.status, 400, "no batches in {VERSION}");
    let outcome = client.request("no/such", Value::Null).await?;
    assert_eq!(outcome.error()?["code"], -32601);
    Ok(())
}

#[tokio::test]
async fn a_batch_of_2025_03_26_is_answered_as_one() -> Result<()> {
    let up = UpH::start().await?;
    let client = RawClient::open(&up.url(), "2025-03-26").await?;
    let batch = json!([
        {"jsonrpc": "2.0", "id": "a", "method": "ping"},
        {"jsonrpc": "2.0", "method": "notifications/roots/list_changed"},
        {"jsonrpc": "2.0", "id": 2, "method": "tools/list"},
    ]);
    let outcome = client.post(&batch).await?.finish(BOUND).await?;
    let ids: Vec<&Value> = outcome.messages.iter().map(|message| &message["id"]).collect();
    assert_eq!(ids, [&json!("a"), &json!(2)]);
    Ok(())
}

#[tokio::test]
async fn every_tool_does_what_it_says() -> Result<()> {
    let (up, client) = opened().await?;
    assert_eq!(client.call("echo", json!({"text": "Grüße"})).await?.text()?, "Grüße");
    assert_eq!(client.call("echo", json!({})).await?.error()?["code"], -32602);
    assert_eq!(client.call("read", json!({})).await?.text()?, "read");
    assert_eq!(client.call("incr", json!({})).await?.text()?, "1");
    assert_eq!(client.call("incr", json!({})).await?.text()?, "2");
    assert_eq!(up.incr_lines()?.len(), 2);
    let began = Instant::now();
    client.call("slow", json!({"ms": 50})).await?.text()?;
    assert!(began.elapsed() >= Duration::from_millis(50));
    let big = client.call("big", json!({"bytes": 300_000, "multibyte": true})).await?;
    assert_eq!(big.text()?, mainstay_tests::server::big_text(300_000, true));
    assert_eq!(client.call("nothing", json!({})).await?.error()?["code"], -32602);
    let tools = client.request("tools/list", Value::Null).await?;
    let tools = tools.result()?["tools"].as_array().context("no tools")?;
    let annotated: Vec<&Value> = tools.iter().filter(|tool| !tool["annotations"].is_null()).collect();
    assert_eq!(annotated.len(), 1);
    assert_eq!(annotated[0]["name"], "read");
    assert_eq!(up.executions("incr").await?, 2);
    assert_eq!(up.executions("nothing").await?, 0);
    Ok(())
}

#[tokio::test]
async fn whoami_shows_what_a_session_was_told() -> Result<()> {
    let (_up, client) = opened().await?;
    client.request("logging/setLevel", json!({"level": "warning"})).await?.result()?;
    client.request("resources/subscribe", json!({"uri": "test://static"})).await?.result()?;
    let facts = client.call("whoami", json!({})).await?.json()?;
    assert_eq!(facts["session"].as_str(), client.session.as_deref());
    assert_eq!(facts["level"], "warning");
    assert_eq!(facts["subscriptions"], json!(["test://static"]));
    assert_eq!(facts["client"]["name"], "raw");
    assert_eq!(facts["initialized"], true);
    Ok(())
}

#[tokio::test]
async fn resources_prompts_and_completion_are_there() -> Result<()> {
    let (_up, client) = opened().await?;
    let read = client.request("resources/read", json!({"uri": "test://static"})).await?;
    assert_eq!(read.result()?["contents"][0]["uri"], "test://static");
    assert_eq!(client.request("resources/read", json!({"uri": "no://such"})).await?.error()?["code"], -32002);
    let prompt = client.request("prompts/get", json!({"name": "greet", "arguments": {"name": "Ada"}})).await?;
    assert_eq!(prompt.result()?["messages"][0]["content"]["text"], "Greet Ada.");
    let argument = json!({"ref": {"type": "ref/prompt", "name": "greet"}, "argument": {"name": "name", "value": "al"}});
    let completion = client.request("completion/complete", argument).await?;
    assert_eq!(completion.result()?["completion"]["values"], json!(["alice", "albert"]));
    client.request("ping", Value::Null).await?.result()?;
    Ok(())
}

#[tokio::test]
async fn progress_goes_to_who_asked_and_late_events_come_on_order() -> Result<()> {
    let (up, client) = opened().await?;
    let call = json!({"name": "prog", "arguments": {"n": 3, "delay_ms": 1}, "_meta": {"progressToken": 7}});
    let outcome = client.request("tools/call", call.clone()).await?;
    let progress: Vec<&Value> = outcome.notifications().map(|event| &event["params"]["progress"]).collect();
    assert_eq!(progress, [&json!(1), &json!(2), &json!(3)]);
    let silent = client.call("prog", json!({"n": 3})).await?;
    assert_eq!(silent.notifications().count(), 0);
    assert_eq!(silent.header("content-type"), Some("application/json"));
    up.order("/late", json!({"events": 2})).await?;
    let outcome = client.request("tools/call", call).await?;
    let methods: Vec<bool> = outcome.messages.iter().map(|message| message.get("method").is_some()).collect();
    assert_eq!(methods, [true, true, true, false, true, true]);
    Ok(())
}

#[tokio::test]
async fn a_question_is_answered_by_the_client() -> Result<()> {
    let up = UpH::start().await?;
    let mut client = RawClient::new(&up.url())?.with_capabilities(json!({"elicitation": {}}));
    client.establish(VERSION).await?;
    let mut exchange =
        client.post(&client.message("tools/call", json!({"name": "ask", "arguments": {"message": "?"}}))).await?;
    let question = exchange.next_message(BOUND).await?.context("no question")?;
    assert_eq!(question["method"], "elicitation/create");
    let status = client.respond(&question["id"], json!({"action": "accept", "content": {"answer": "yes"}})).await?;
    assert_eq!(status, 202);
    let outcome = exchange.finish(BOUND).await?;
    assert_eq!(outcome.json()?["content"]["answer"], "yes");
    let silent = client.call("ask", json!({"timeout_ms": 20})).await?;
    assert_eq!(silent.result()?["isError"], true, "nobody answered");
    assert_eq!(client.call("ask", json!({"kind": "sampling"})).await?.result()?["isError"], true, "not declared");
    Ok(())
}

#[tokio::test]
async fn a_cancelled_call_is_not_answered_and_the_other_goes_on() -> Result<()> {
    let (up, client) = opened().await?;
    up.answer("sse").await?;
    let call = |id: Value| json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {"name": "slow", "arguments": {"ms": 300}}});
    let cancelled = client.post(&call(json!(1))).await?;
    let other = client.post(&call(json!("1"))).await?;
    wait_until("both calls to run", BOUND, async || up.executions("slow").await.is_ok_and(|calls| calls == 2)).await?;
    client.notify("notifications/cancelled", json!({"requestId": 1})).await?;
    let outcome = cancelled.finish(BOUND).await?;
    assert!(outcome.messages.is_empty());
    assert_eq!(outcome.ended, Ended::Clean);
    assert_eq!(other.finish(BOUND).await?.text()?, "waited 300 ms");
    assert_eq!(up.count("/cancelled").await?, 1);
    assert_eq!(up.count("/completions/slow").await?, 1);
    Ok(())
}

#[tokio::test]
async fn listening_streams_hear_changes_and_the_newest_one_wins() -> Result<()> {
    let (up, client) = opened().await?;
    let mut older = client.get_stream(None).await?;
    up.order("/notify", json!({"method": "notifications/message", "params": {"level": "info", "data": 1}})).await?;
    assert_eq!(older.next_message(BOUND).await?.context("no message")?["params"]["data"], 1);
    let mut newer = client.get_stream(None).await?;
    assert_eq!(older.next_event(BOUND).await?, None);
    assert_eq!(older.ended(), Some(Ended::Clean));
    let added = up.order("/list_changed", json!({})).await?;
    let method = newer.next_message(BOUND).await?.context("no message")?["method"].clone();
    assert_eq!(method, "notifications/tools/list_changed");
    let tool = added["tool"].as_str().context("no tool")?;
    assert_eq!(client.call(tool, json!({})).await?.text()?, tool);
    client.request("resources/subscribe", json!({"uri": "test://static"})).await?;
    client.call("touch_resource", json!({})).await?.text()?;
    let method = newer.next_message(BOUND).await?.context("no message")?["method"].clone();
    assert_eq!(method, "notifications/resources/updated");
    up.order("/get", json!({"second": "conflict"})).await?;
    assert_eq!(client.get_stream(None).await?.status, 409);
    for status in [404, 405, 500] {
        up.order("/get", json!({"status": status})).await?;
        assert_eq!(client.get_stream(None).await?.status, status);
    }
    Ok(())
}

#[tokio::test]
async fn ac12_a_numbered_stream_is_primed_and_can_be_resumed_once_cut() -> Result<()> {
    let (up, client) = opened().await?;
    up.answer("sse-with-ids").await?;
    up.gap(json!({"kind": "cut_sse", "events": 1, "tool": "prog"})).await?;
    let call = json!({"name": "prog", "arguments": {"n": 3, "delay_ms": 5}, "_meta": {"progressToken": "t"}});
    let cut = client.post(&client.message("tools/call", call)).await?.finish(BOUND).await?;
    assert_eq!(cut.ended, Ended::Cut);
    assert_eq!(cut.events.len(), 2, "a priming event and one message");
    assert!(cut.events[0].data.is_empty() && cut.events[0].retry_ms.is_some());
    let resumed = client.get_stream(cut.last_event_id()).await?.finish(BOUND).await?;
    assert_eq!(resumed.event_ids().first().copied(), cut.last_event_id(), "primed with the same id");
    let progress: Vec<&Value> = resumed.notifications().map(|event| &event["params"]["progress"]).collect();
    assert_eq!(progress, [&json!(2), &json!(3)]);
    assert_eq!(resumed.text()?, "3 steps done");
    assert_eq!(up.executions("prog").await?, 1);
    for junk in ["nonsense", "999-1", "1-999"] {
        assert_eq!(client.get_stream(Some(junk)).await?.status, 400, "{junk}");
    }
    up.gap(json!({"kind": "cut_sse", "events": 0, "tool": "slow"})).await?;
    let outcome = client.call_through("slow", json!({"ms": 50})).await?;
    assert_eq!(outcome.text()?, "waited 50 ms");
    Ok(())
}

#[tokio::test]
async fn forgetting_and_deleting_end_sessions() -> Result<()> {
    let (up, client) = opened().await?;
    let other = RawClient::open(&up.url(), VERSION).await?;
    let mut stream = other.get_stream(None).await?;
    assert_eq!(client.delete().await?, 200);
    assert_eq!(client.call("read", json!({})).await?.status, 404);
    assert_eq!(other.call("read", json!({})).await?.status, 200);
    up.order("/delete", json!({"status": 405})).await?;
    assert_eq!(other.delete().await?, 405);
    assert_eq!(other.call("read", json!({})).await?.status, 200);
    up.forget().await?;
    assert_eq!(stream.next_event(BOUND).await?, None);
    assert_eq!(other.call("read", json!({})).await?.status, 404);
    up.order("/forget", json!({"after_initialized": 1})).await?;
    let lost = RawClient::open(&up.url(), VERSION).await?;
    assert_eq!(lost.call("read", json!({})).await?.status, 404, "lost again before the first call");
    let kept = RawClient::open(&up.url(), VERSION).await?;
    assert_eq!(kept.call("read", json!({})).await?.status, 200);
    assert_eq!(up.count("/deletes").await?, 2);
    Ok(())
}
