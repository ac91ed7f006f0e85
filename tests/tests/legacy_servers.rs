//! Servers that speak HTTP+SSE of 2024-11-05 only, behind clients that know nothing of that (AC-02, U4, U5, U6, U8, R6, R7).

use anyhow::{Context as _, Result};
use mainstay_tests::{Gateway, RawClient, UpL, stretched, wait_until};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const VERSION: &str = "2025-11-25";
const BOUND: Duration = Duration::from_secs(20);

async fn stand() -> Result<(UpL, Gateway, RawClient)> {
    let up = UpL::start().await?;
    let gateway = Gateway::start(&up.toml("l"), &[]).await?;
    let client = RawClient::open(&gateway.url("l")?, VERSION).await?;
    Ok((up, gateway, client))
}

/// A gateway in front of a server that is known to speak HTTP+SSE, with little patience.
async fn impatient(up: &UpL) -> Result<Gateway> {
    Gateway::start(&format!("{}transport = \"sse\"\npatience = \"1s\"\n", up.toml("l")), &[]).await
}

fn prog(n: u64, delay_ms: u64) -> Value {
    json!({"name": "prog", "arguments": {"n": n, "delay_ms": delay_ms}, "_meta": {"progressToken": 7}})
}

/// Whether the next result tells that the session was made again.
async fn says_remade(client: &RawClient) -> Result<bool> {
    let outcome = client.call_through("read", json!({})).await?;
    Ok(outcome.result()?["_meta"]["mainstay/notice"]["event"] == "remade")
}

#[tokio::test]
async fn a_server_of_2024_11_05_is_found_out_and_serves_streamable_clients() -> Result<()> {
    let (up, gateway, client) = stand().await?;
    assert_eq!(client.version.as_deref(), Some("2024-11-05"), "what the server negotiated");
    let tools = client.request("tools/list", Value::Null).await?;
    assert!(tools.result()?["tools"].as_array().is_some_and(|tools| tools.len() >= 10));
    assert_eq!(client.call_through("echo", json!({"text": "Grüße"})).await?.text()?, "Grüße");
    assert_eq!(client.call_through("whoami", json!({})).await?.json()?["initialized"], true);
    assert_eq!(client.call_through("nothing", json!({})).await?.error()?["code"], -32602);
    let big = client.call_through("big", json!({"bytes": 2_000_000, "multibyte": true})).await?;
    assert_eq!(big.text()?, mainstay_tests::server::big_text(2_000_000, true));
    assert_eq!((up.count("/gets").await?, up.count("/initialized").await?), (1, 1));
    let posts = up.requests("POST").await?;
    let paths: Vec<&str> = posts.iter().filter_map(|post| post["path"].as_str()).collect();
    assert_eq!(paths.iter().filter(|path| **path == "/sse").count(), 1, "one try at streamable HTTP");
    // The next session does not ask again.
    let other = RawClient::open(&gateway.url("l")?, VERSION).await?;
    other.call_through("echo", json!({"text": "x"})).await?.text()?;
    let posts = up.requests("POST").await?;
    assert_eq!(posts.iter().filter(|post| post["path"] == "/sse").count(), 1, "it is remembered");
    assert_eq!(up.count("/sessions").await?, 2, "a session for each client");
    gateway.assert_clean_log(&[])
}

#[tokio::test]
async fn headers_go_along_with_the_stream_and_with_every_message() -> Result<()> {
    let up = UpL::start().await?;
    up.order("/auth", json!({"bearer": "one"})).await?;
    let config = format!("{}headers = {{ Authorization = \"Bearer ${{L_TOKEN}}\" }}\n", up.toml("l"));
    let gateway = mainstay_tests::Setup::new(&config).env("L_TOKEN", "one").start().await?;
    let client = RawClient::open(&gateway.url("l")?, VERSION).await?;
    assert_eq!(client.call_through("read", json!({})).await?.text()?, "read");
    let log = up.log().await?;
    assert!(log.iter().all(|entry| entry["headers"]["authorization"] == "Bearer one"), "{log:?}");
    Ok(())
}

#[tokio::test]
async fn r7_progress_goes_to_who_asked_and_parallel_calls_do_not_mix() -> Result<()> {
    let (_up, _gateway, client) = stand().await?;
    let calls = (0..8).map(|_| {
        let client = client.clone();
        tokio::spawn(async move { client.request("tools/call", prog(3, 30)).await })
    });
    for call in calls.collect::<Vec<_>>() {
        let outcome = call.await??;
        let progress: Vec<&Value> = outcome.notifications().map(|event| &event["params"]["progress"]).collect();
        assert_eq!(progress, [&json!(1), &json!(2), &json!(3)]);
        assert!(outcome.notifications().all(|event| event["params"]["progressToken"] == 7));
        assert_eq!(outcome.text()?, "3 steps done");
    }
    let echoes = (0..40).map(|n| {
        let client = client.clone();
        tokio::spawn(async move { client.call_through("echo", json!({"text": format!("e{n}")})).await })
    });
    for (n, echo) in echoes.collect::<Vec<_>>().into_iter().enumerate() {
        assert_eq!(echo.await??.text()?, format!("e{n}"));
    }
    Ok(())
}

#[tokio::test]
async fn r6_a_question_of_the_server_is_answered_by_the_client() -> Result<()> {
    let up = UpL::start().await?;
    let gateway = Gateway::start(&up.toml("l"), &[]).await?;
    let mut client = RawClient::new(&gateway.url("l")?)?.with_capabilities(json!({"elicitation": {}}));
    client.establish(VERSION).await?;
    let call = client.message("tools/call", json!({"name": "ask", "arguments": {"message": "?"}}));
    let mut exchange = client.post(&call).await?;
    let question = exchange.next_message(BOUND).await?.context("no question")?;
    assert_eq!(question["method"], "elicitation/create");
    client.respond(&question["id"], json!({"action": "accept", "content": {"answer": "yes"}})).await?;
    assert_eq!(exchange.finish(BOUND).await?.json()?["content"]["answer"], "yes");
    Ok(())
}

#[tokio::test]
async fn r7_what_belongs_to_no_call_is_heard_and_a_ping_is_answered() -> Result<()> {
    let (up, _gateway, client) = stand().await?;
    let mut stream = client.get_stream(None).await?;
    up.order("/list_changed", json!({})).await?;
    let heard = stream.next_message(BOUND).await?.context("nothing")?;
    assert_eq!(heard["method"], "notifications/tools/list_changed");
    up.order("/send", json!({"message": {"jsonrpc": "2.0", "id": "p-1", "method": "ping"}})).await?;
    wait_until("the pong", BOUND, async || {
        let log = up.log().await.unwrap_or_default();
        log.iter().any(|entry| entry["body"]["id"] == "p-1" && entry["body"]["result"] == json!({}))
    })
    .await?;
    client.request("ping", Value::Null).await?.result()?;
    Ok(())
}

#[tokio::test]
async fn u4_ac02_a_restarted_server_gets_a_new_stream_and_the_client_notices_nothing() -> Result<()> {
    let (mut up, _gateway, client) = stand().await?;
    client.request("logging/setLevel", json!({"level": "warning"})).await?.result()?;
    client.request("resources/subscribe", json!({"uri": "test://static"})).await?.result()?;
    client.request("tools/list", Value::Null).await?.result()?;
    let session = client.session.clone();
    let first = client.call_through("whoami", json!({})).await?.json()?;
    up.kill().await?;
    up.start_again().await?;
    let started = Instant::now();
    let outcome = client.call_through("read", json!({})).await?;
    assert!(started.elapsed() < stretched(Duration::from_secs(2)), "{:?}", started.elapsed());
    assert_eq!(outcome.status, 200);
    let told = outcome.result()?["_meta"]["mainstay/notice"]["event"] == "remade";
    assert!(told, "U6: {outcome:?}");
    assert_eq!((up.count("/gets").await?, up.count("/initializes").await?), (1, 1), "one stream, one initialize");
    assert_eq!(up.count("/initialized").await?, 1);
    let facts = client.call_through("whoami", json!({})).await?.json()?;
    assert_ne!(facts["session"], first["session"], "a new endpoint");
    assert_eq!((&facts["level"], &facts["subscriptions"]), (&json!("warning"), &json!(["test://static"])), "U4");
    assert_eq!(facts["client"], first["client"], "with the client's own parameters");
    assert_eq!(client.session, session);
    Ok(())
}

#[tokio::test]
async fn u4_ac02_a_message_endpoint_that_is_not_known_any_more_is_left_for_a_new_one() -> Result<()> {
    let (up, _gateway, client) = stand().await?;
    for dialect in ["404-text", "404-32001-null", "400-32000-json", "410"] {
        up.dialect(dialect).await?;
        client.call_through("read", json!({})).await?.result().context(dialect)?;
        let before = (up.count("/gets").await?, up.count("/initializes").await?);
        // The stream stays open, and only the messages are refused.
        up.order("/forget", json!({"keep_streams": true})).await?;
        assert!(says_remade(&client).await.context(dialect)?, "{dialect}: U6");
        let after = (up.count("/gets").await?, up.count("/initializes").await?);
        assert_eq!((after.0 - before.0, after.1 - before.1), (1, 1), "{dialect}: one stream, one initialize");
    }
    // What is no word of a session is asked after with a `ping`.
    up.order("/dialect", json!({"status": 400, "body": "bad request", "content_type": "text/plain"})).await?;
    up.order("/forget", json!({"keep_streams": true})).await?;
    assert!(says_remade(&client).await?, "a plain 400");
    let executed = up.executions("incr").await?;
    up.order("/forget", json!({"keep_streams": true})).await?;
    client.call_through("incr", json!({})).await?.result()?;
    assert_eq!(up.executions("incr").await? - executed, 1, "refused before execution, and sent once more");
    Ok(())
}

#[tokio::test]
async fn u4_ac02_lost_again_and_again_is_a_clear_error_and_no_loop() -> Result<()> {
    let (up, _gateway, client) = stand().await?;
    client.call_through("read", json!({})).await?.result()?;
    let before = up.count("/initializes").await?;
    up.order("/gap", json!({"kind": "status", "status": 404, "body": "no", "tool": "read", "times": "forever"}))
        .await?;
    let outcome = client.call_through("read", json!({})).await?;
    assert_eq!((outcome.status, outcome.named_outcome()), (200, Some("upstream_lost_again")));
    assert!(up.count("/initializes").await? - before <= 2, "never a loop");
    up.gap(json!({"kind": "clear"})).await?;
    client.call_through("read", json!({})).await?.result()?;
    Ok(())
}

#[tokio::test]
async fn u5_ac03_a_call_whose_stream_broke_is_unknown_and_a_safe_one_is_repeated() -> Result<()> {
    let (up, _gateway, client) = stand().await?;
    client.request("tools/list", Value::Null).await?.result()?;
    up.gap(json!({"kind": "cut_after", "tool": "incr", "times": 1})).await?;
    let started = Instant::now();
    let outcome = client.call_through("incr", json!({})).await?;
    assert!(started.elapsed() < stretched(Duration::from_secs(2)), "{:?}", started.elapsed());
    assert_eq!((outcome.status, outcome.named_outcome()), (200, Some("outcome_unknown")));
    assert_eq!(outcome.error()?["data"]["server"], "l");
    assert_eq!(up.incr_lines()?.len(), 1, "exactly one execution");
    up.gap(json!({"kind": "cut_after", "tool": "read", "times": 1})).await?;
    client.call_through("read", json!({})).await?.result()?;
    assert_eq!(up.executions("read").await?, 2, "repeated once");
    // Two calls in flight when the server dies.
    let slow = |client: RawClient| async move { client.call_through("slow", json!({"ms": 60_000})).await };
    let calls = [tokio::spawn(slow(client.clone())), tokio::spawn(slow(client.clone()))];
    wait_until("both to run", BOUND, async || up.executions("slow").await.is_ok_and(|count| count == 2)).await?;
    up.gap(json!({"kind": "cut_all"})).await?;
    for call in calls {
        assert_eq!(call.await??.named_outcome(), Some("outcome_unknown"));
    }
    assert_eq!(up.executions("slow").await?, 2);
    Ok(())
}

#[tokio::test]
async fn u5_ac03_a_call_that_was_never_sent_waits_for_the_server() -> Result<()> {
    let (up, _gateway, client) = stand().await?;
    up.gap(json!({"kind": "refuse", "ms": 1000})).await?;
    client.call_through("incr", json!({})).await?.result()?;
    assert_eq!(up.incr_lines()?.len(), 1);
    Ok(())
}

#[tokio::test]
async fn a_post_that_is_answered_after_what_it_asked_for_or_never_holds_nothing_up() -> Result<()> {
    let (up, _gateway, client) = stand().await?;
    up.gap(json!({"kind": "answer_late", "ms": 30_000, "tool": "echo"})).await?;
    assert_eq!(client.call_through("echo", json!({"text": "x"})).await?.text()?, "x");
    up.gap(json!({"kind": "hang", "tool": "slow"})).await?;
    let hung = tokio::spawn({
        let client = client.clone();
        async move { client.call_through("slow", json!({"ms": 1})).await }
    });
    wait_until("the gap to be used", BOUND, async || up.count("/gaps_left").await.is_ok_and(|left| left == 0)).await?;
    assert_eq!(client.call_through("echo", json!({"text": "y"})).await?.text()?, "y");
    up.gap(json!({"kind": "cut_all"})).await?;
    assert_eq!(hung.await??.named_outcome(), Some("outcome_unknown"));
    Ok(())
}

#[tokio::test]
async fn r4_after_a_killed_worker_the_session_is_made_again_and_that_is_told() -> Result<()> {
    let (up, mut gateway, client) = stand().await?;
    client.request("logging/setLevel", json!({"level": "error"})).await?.result()?;
    client.call_through("read", json!({})).await?.result()?;
    let running = tokio::spawn({
        let client = client.clone();
        async move { client.call_through("slow", json!({"ms": 60_000})).await }
    });
    wait_until("the call to run", BOUND, async || up.executions("slow").await.is_ok_and(|count| count == 1)).await?;
    // Its client must have a stream to come back to.
    gateway.kill_worker().await?;
    let outcome = running.await?;
    if let Ok(outcome) = outcome {
        assert_eq!(outcome.named_outcome(), Some("outcome_unknown"));
    }
    assert!(says_remade(&client).await?, "U6");
    assert!(!says_remade(&client).await?, "said once");
    assert_eq!(client.call_through("whoami", json!({})).await?.json()?["level"], "error");
    assert_eq!(up.executions("slow").await?, 1, "nothing is executed twice");
    gateway.kill_all().await?;
    gateway.start_again().await?;
    assert!(says_remade(&client).await?, "after everything was killed, too");
    assert_eq!(up.count("/deletes").await?, 0, "there is nothing to delete");
    wait_until("one session to be left", BOUND, async || up.count("/sessions").await.is_ok_and(|left| left == 1))
        .await?;
    assert_eq!(client.delete().await?, 204);
    wait_until("none to be left", BOUND, async || up.count("/sessions").await.is_ok_and(|left| left == 0)).await?;
    let (status, owed) = gateway.admin_get("/api/v1/owed").await?;
    assert!(status == 200 && owed["owed"].as_array().is_some_and(Vec::is_empty), "{owed}");
    Ok(())
}

#[tokio::test]
async fn u8_a_server_that_is_down_ends_no_session() -> Result<()> {
    let up = UpL::start().await?;
    let gateway = impatient(&up).await?;
    let client = RawClient::open(&gateway.url("l")?, VERSION).await?;
    up.gap(json!({"kind": "refuse"})).await?;
    let outcome = client.call_through("read", json!({})).await?;
    assert_eq!((outcome.status, outcome.named_outcome()), (200, Some("server_unreachable")));
    let late = RawClient::open(&gateway.url("l")?, VERSION).await?;
    up.gap(json!({"kind": "accept"})).await?;
    assert_eq!(late.call_through("read", json!({})).await?.text()?, "read", "answered for, and opened late");
    assert_eq!(client.call_through("read", json!({})).await?.text()?, "read");
    Ok(())
}

#[tokio::test]
async fn u9_a_listener_hears_again_after_the_stream_broke() -> Result<()> {
    let (up, _gateway, client) = stand().await?;
    let mut stream = client.get_stream(None).await?;
    up.forget().await?;
    let reopened = async || up.count("/initialized").await.is_ok_and(|count| count == 2);
    wait_until("the session to be made again for its listener", BOUND, reopened).await?;
    wait_until("the list to be heard of", BOUND, async || {
        up.order("/list_changed", json!({})).await.is_ok()
            && matches!(stream.next_message(Duration::from_secs(1)).await, Ok(Some(heard))
                if heard["method"] == "notifications/tools/list_changed")
    })
    .await
}

#[tokio::test]
async fn u11_an_endpoint_at_another_origin_gets_nothing() -> Result<()> {
    let up = UpL::start().await?;
    let gateway = impatient(&up).await?;
    for data in ["http://127.0.0.2:9/message?sessionId=$id", "//localhost/message", "mailto:nobody", " "] {
        up.order("/endpoint", json!({"data": data})).await?;
        let mut client = RawClient::new(&gateway.url("l")?)?;
        let outcome = client.initialize(VERSION).await?;
        assert_eq!(outcome.named_outcome(), Some("server_rejected"), "{data}: {}", outcome.body_text());
        assert!(!outcome.body_text().contains("sessionId"), "what names the session is not shown");
    }
    assert_eq!(up.count("/posts").await?, 0);
    let own = up.url().replace("/sse", "/message?sessionId=$id");
    up.order("/endpoint", json!({"data": own})).await?;
    RawClient::open(&gateway.url("l")?, VERSION).await?.call_through("read", json!({})).await?.text()?;
    wait_until("the refused to be gone", BOUND, async || up.count("/sessions").await.is_ok_and(|left| left == 1)).await
}

#[tokio::test]
async fn an_endpoint_event_without_end_or_measure_is_refused() -> Result<()> {
    let up = UpL::start().await?;
    let gateway = impatient(&up).await?;
    let url = gateway.url("l")?;
    for order in [json!({"bytes": 64 * 1024 * 1024}), json!({"bytes": 20_000}), json!({"kind": "message"})] {
        up.order("/endpoint", order.clone()).await?;
        let mut client = RawClient::new(&url)?;
        let mut outcome = client.initialize(VERSION).await?;
        if outcome.result().is_ok() {
            // It took so long that it was answered for; a call shows it.
            client.notify("notifications/initialized", Value::Null).await?;
            outcome = client.call_through("read", json!({})).await?;
        }
        assert_eq!(outcome.named_outcome(), Some("server_rejected"), "{order}: {}", outcome.body_text());
    }
    for kind in ["endless", "nothing"] {
        up.order("/endpoint", json!({"kind": kind})).await?;
        let client = RawClient::open(&url, VERSION).await?;
        let outcome = client.call_through("read", json!({})).await?;
        assert_eq!(outcome.named_outcome(), Some("server_unreachable"), "{kind}: {}", outcome.body_text());
    }
    up.order("/endpoint", json!({})).await?;
    RawClient::open(&url, VERSION).await?.call_through("read", json!({})).await?.text()?;
    Ok(())
}

#[tokio::test]
async fn the_transport_is_found_out_by_each_refusal_that_old_servers_give_and_no_other() -> Result<()> {
    for (status, legacy) in [(400, true), (404, true), (405, true), (403, false), (422, false)] {
        let up = UpL::start().await?;
        up.order("/post", json!({"status": status})).await?;
        let gateway = Gateway::start(&up.toml("l"), &[]).await?;
        let outcome = RawClient::new(&gateway.url("l")?)?.initialize(VERSION).await?;
        assert_eq!(outcome.result().is_ok(), legacy, "{status}: {}", outcome.body_text());
        assert_eq!(up.count("/gets").await?, u64::from(legacy), "{status}");
    }
    let up = UpL::start().await?;
    let gateway = Gateway::start(&format!("{}transport = \"streamable\"\n", up.toml("l")), &[]).await?;
    let outcome = RawClient::new(&gateway.url("l")?)?.initialize(VERSION).await?;
    assert_eq!(outcome.named_outcome(), Some("server_rejected"));
    assert_eq!(up.count("/gets").await?, 0, "not even asked");
    // A wrong URL stays what it is.
    let config = format!("[servers.l]\nurl = \"{}\"\n", up.url().replace("/sse", "/nowhere"));
    let gateway = Gateway::start(&config, &[]).await?;
    let outcome = RawClient::new(&gateway.url("l")?)?.initialize(VERSION).await?;
    assert!(outcome.error()?["message"].as_str().is_some_and(|text| text.contains("404")), "{}", outcome.body_text());
    Ok(())
}

#[tokio::test]
async fn u4_a_server_that_was_upgraded_is_found_out_again() -> Result<()> {
    let (mut up, _gateway, client) = stand().await?;
    client.call_through("read", json!({})).await?.result()?;
    // From now on its stream's URL has no stream any more.
    up.kill().await?;
    up.start_again().await?;
    up.order("/get", json!({"status": 405})).await?;
    let outcome = client.call_through("read", json!({})).await?;
    assert_eq!(outcome.named_outcome(), Some("server_rejected"), "{}", outcome.body_text());
    let posts = up.requests("initialize").await?;
    assert!(posts.iter().any(|post| post["path"] == "/sse"), "streamable HTTP is tried again");
    up.order("/get", json!({"status": 200})).await?;
    client.call_through("read", json!({})).await?.result()?;
    Ok(())
}
