//! Clients with sessions in front of a server of 2026-07-28, which has none (E1, E5).

use anyhow::{Context as _, Result};
use mainstay_tests::{Gateway, RawClient, SdkClient, SdkKind, UpH, UpM, wait_until};
use serde_json::{Value, json};
use std::time::Duration;

const VERSION: &str = "2025-11-25";
const BOUND: Duration = Duration::from_secs(20);

async fn stand() -> Result<(UpM, Gateway)> {
    let up = UpM::start().await?;
    let gateway = Gateway::start(&up.toml("m"), &[]).await?;
    Ok((up, gateway))
}

/// A client of a session that takes forms.
async fn client(gateway: &Gateway) -> Result<RawClient> {
    let mut client = RawClient::new(&gateway.url("m")?)?.with_capabilities(json!({"elicitation": {}}));
    client.establish(VERSION).await?;
    Ok(client)
}

async fn echo(client: &RawClient) -> Result<String> {
    Ok(client.call_through("echo", json!({"text": "Grüße"})).await?.text()?.to_owned())
}

async fn era(gateway: &Gateway) -> Result<Value> {
    Ok(gateway.admin_get("/api/v1/servers/m").await?.1["summary"]["era"].clone())
}

#[tokio::test]
async fn e1_sdk_clients_with_sessions_use_a_server_without_and_survive_the_workers_death() -> Result<()> {
    let (up, mut gateway) = stand().await?;
    for kind in [SdkKind::Ts2, SdkKind::Ts1, SdkKind::Py1] {
        let mut client = SdkClient::open(kind, &gateway.url("m")?).await.with_context(|| kind.name())?;
        assert_eq!(client.list().await?, ["echo", "ask", "slow", "steps", "route"], "{}", kind.name());
        assert_eq!(client.text("echo", json!({"text": "a"})).await?, "a");
        client.elicit(json!({"action": "accept", "content": {"answer": "yes"}})).await?;
        assert_eq!(client.text("ask", json!({})).await?, "yes in s-1", "{}", kind.name());
        assert_eq!(client.text("route", json!({"region": "eu"})).await?, "routed");
        gateway.kill_worker().await?;
        assert_eq!(client.text("echo", json!({"text": "b"})).await?, "b", "{}", kind.name());
        let session = client.session().await?;
        assert_eq!((session.initializes, session.sessions), (1, 1), "{}", kind.name());
        client.close().await?;
    }
    assert_eq!(up.count("initialize"), 1, "what the server refuses is asked of it once");
    let unheard = ["notifications/initialized", "notifications/cancelled", "logging/setLevel"];
    assert_eq!(unheard.map(|method| up.count(method)), [0; 3]);
    Ok(())
}

#[tokio::test]
async fn e5_the_era_is_shown_and_remembered_over_a_restart_of_everything() -> Result<()> {
    let (up, mut gateway) = stand().await?;
    assert_eq!(era(&gateway).await?, Value::Null);
    let client = client(&gateway).await?;
    assert_eq!((echo(&client).await?, era(&gateway).await?), ("Grüße".to_owned(), json!("modern")));
    let listed = gateway.cli(&["servers", "list"]).await?;
    assert!(String::from_utf8_lossy(&listed.stdout).contains("modern"), "{listed:?}");
    let metrics = metrics(&gateway).await?;
    assert!(metrics.contains(r#"mainstay_server_era{server="m",era="modern"} 1"#), "{metrics}");
    // A hint, but one that was handed to the ledger before the row of the session, which is durable by now.
    gateway.kill_all().await?;
    gateway.start_again().await?;
    assert_eq!(echo(&client).await?, "Grüße");
    let other = RawClient::open(&gateway.url("m")?, "2025-06-18").await?;
    assert_eq!((echo(&other).await?, other.version.as_deref()), ("Grüße".to_owned(), Some("2025-06-18")));
    assert_eq!(up.count("initialize"), 1, "only the very first session had to try");
    Ok(())
}

async fn metrics(gateway: &Gateway) -> Result<String> {
    let http = reqwest::Client::builder().no_proxy().build()?;
    let asked = http.get(gateway.admin_url("/metrics")?).bearer_auth(gateway.admin_token()?).send();
    Ok(asked.await?.text().await?)
}

#[tokio::test]
async fn e5_a_legacy_server_is_asked_nothing_by_clients_with_sessions() -> Result<()> {
    let up = UpH::start().await?;
    let gateway = Gateway::start(&up.toml("m"), &[]).await?;
    let client = RawClient::open(&gateway.url("m")?, VERSION).await?;
    assert_eq!((echo(&client).await?, era(&gateway).await?), ("Grüße".to_owned(), json!("legacy")));
    let posts = up.requests("POST").await?;
    assert!(posts.iter().all(|post| post["body"]["method"] != "server/discover"), "{posts:?}");
    Ok(())
}

#[tokio::test]
async fn e1_r7_progress_and_the_servers_news_reach_the_session_also_after_a_kill() -> Result<()> {
    let (up, mut gateway) = stand().await?;
    let client = client(&gateway).await?;
    let params = json!({"name": "steps", "arguments": {}, "_meta": {"progressToken": "p"}});
    let outcome = client.request("tools/call", params).await?;
    let steps: Vec<_> = outcome.notifications().map(|heard| heard["params"]["progress"].clone()).collect();
    assert_eq!((steps, outcome.text()?), (vec![json!(1), json!(2), json!(3)], "3 steps"));
    client.request("resources/subscribe", json!({"uri": "test://a"})).await?.result()?;
    let mut stream = client.get_stream(None).await?;
    wait_until("the server to be listened to", BOUND, async || up.listeners() == 1).await?;
    let wanted = up.requests("subscriptions/listen").pop().context("no listen")?;
    let wanted = &wanted.body["params"]["notifications"];
    assert_eq!(*wanted, json!({"toolsListChanged": true, "resourceSubscriptions": ["test://a"]}));
    up.say("notifications/resources/updated", &json!({"uri": "test://a"}));
    let heard = stream.next_message(BOUND).await?.context("nothing heard")?;
    assert_eq!((&heard["params"]["uri"], &heard["params"]["_meta"]), (&json!("test://a"), &json!({})));

    gateway.kill_worker().await?;
    let mut stream = client.get_stream(None).await?;
    wait_until("the server to be listened to again", BOUND, async || up.listeners() == 1).await?;
    up.say("notifications/tools/list_changed", &json!({}));
    let heard = stream.next_message(BOUND).await?.context("nothing heard")?;
    assert_eq!(heard["method"], "notifications/tools/list_changed");
    let wanted = up.requests("subscriptions/listen").pop().context("no listen")?;
    assert_eq!(wanted.body["params"]["notifications"]["resourceSubscriptions"], json!(["test://a"]));
    Ok(())
}

#[tokio::test]
async fn e1_r4_a_call_that_a_kill_cuts_is_told_as_unknown_and_not_run_again() -> Result<()> {
    let (up, mut gateway) = stand().await?;
    let client = client(&gateway).await?;
    let call = client.message("tools/call", json!({"name": "slow", "arguments": {}, "_meta": {"progressToken": 1}}));
    let mut exchange = client.post(&call).await?;
    exchange.next_message(BOUND).await?.context("no progress")?;
    gateway.kill_worker().await?;
    // A modern server takes the end of the connection for a cancellation; there is nothing to ask it for.
    wait_until("the request to be closed", BOUND, async || up.waiting() == 0).await?;
    let outcome = client.follow(exchange).await?;
    assert_eq!(outcome.named_outcome(), Some("outcome_unknown"), "{}", outcome.body_text());
    assert_eq!((up.count("tools/call"), echo(&client).await?), (1, "Grüße".to_owned()));
    Ok(())
}

#[tokio::test]
async fn e1_r8_a_cancellation_closes_the_request_and_a_disconnect_does_not() -> Result<()> {
    let (up, gateway) = stand().await?;
    let client = client(&gateway).await?;
    let call = client.message("tools/call", json!({"name": "slow", "arguments": {}, "_meta": {"progressToken": 1}}));
    let mut exchange = client.post(&call).await?;
    exchange.next_message(BOUND).await?.context("no progress")?;
    assert_eq!(client.notify("notifications/cancelled", json!({"requestId": call["id"]})).await?, 202);
    wait_until("the request to be closed", BOUND, async || up.waiting() == 0).await?;

    let call = client.message("tools/call", json!({"name": "slow", "arguments": {}, "_meta": {"progressToken": 2}}));
    let mut exchange = client.post(&call).await?;
    let event = exchange.next_message(BOUND).await?.context("no progress")?;
    assert_eq!(event["params"]["progressToken"], 2);
    drop(exchange);
    assert_eq!(echo(&client).await?, "Grüße");
    assert_eq!(up.waiting(), 1, "its client may come back");
    up.release();
    Ok(())
}

#[tokio::test]
async fn e1_r6_a_question_that_a_kill_orphans_hangs_nobody() -> Result<()> {
    let (up, mut gateway) = stand().await?;
    let client = client(&gateway).await?;
    let call = client.message("tools/call", json!({"name": "ask", "arguments": {}}));
    let mut exchange = client.post(&call).await?;
    let question = exchange.next_message(BOUND).await?.context("no question")?;
    assert_eq!(question["method"], "elicitation/create");
    gateway.kill_worker().await?;
    let answer = json!({"action": "accept", "content": {"answer": "late"}});
    assert_eq!(client.respond(&question["id"], answer).await?, 202);
    let outcome = client.follow(exchange).await?;
    assert_eq!(outcome.named_outcome(), Some("outcome_unknown"), "{}", outcome.body_text());
    assert_eq!((up.count("tools/call"), echo(&client).await?), (1, "Grüße".to_owned()));
    Ok(())
}

#[tokio::test]
async fn e1_what_a_modern_server_does_not_know_is_a_200_with_its_error() -> Result<()> {
    let (up, gateway) = stand().await?;
    let client = client(&gateway).await?;
    let unknown = client.request("prompts/list", Value::Null).await?;
    assert_eq!((unknown.status, &unknown.error()?["code"]), (200, &json!(-32601)));
    let level = client.request("logging/setLevel", json!({"level": "warning"})).await?;
    assert_eq!(*level.result()?, json!({}));
    echo(&client).await?;
    let call = up.requests("tools/call").pop().context("no call")?;
    assert_eq!(call.body["params"]["_meta"]["io.modelcontextprotocol/logLevel"], "warning");
    let list = client.request("tools/list", Value::Null).await?;
    assert_eq!(list.result()?.as_object().map(serde_json::Map::len), Some(1), "only the tools are left");
    Ok(())
}
