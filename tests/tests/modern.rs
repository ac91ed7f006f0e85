//! Stateless clients (2026-07-28) of a stateless server, through the gateway (E0, E2).

use anyhow::{Context as _, Result, ensure};
use mainstay_tests::{Gateway, UpH, UpM, UpV, wait_until, within};
use reqwest::{RequestBuilder, Response};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::time::Duration;

const BOUND: Duration = Duration::from_secs(30);
const VERSION: &str = "2026-07-28";

/// A message as a client of that revision writes it.
fn message(method: &str, params: Value) -> String {
    let mut params = params;
    params["_meta"] = json!({"io.modelcontextprotocol/protocolVersion": VERSION,
        "io.modelcontextprotocol/clientCapabilities": {}});
    json!({"jsonrpc": "2.0", "id": "a\u{fc}", "method": method, "params": params}).to_string()
}

/// The request of that message, with the headers that it needs.
fn request(url: &str, method: &str, params: &Value) -> Result<RequestBuilder> {
    let http = reqwest::Client::builder().no_proxy().build()?;
    let request = http
        .post(url)
        .header("accept", "application/json, text/event-stream")
        .header("content-type", "application/json")
        .header("mcp-protocol-version", VERSION)
        .header("mcp-method", method);
    let request = match params["name"].as_str() {
        Some(name) => request.header("mcp-name", name),
        None => request,
    };
    Ok(request.body(message(method, params.clone())))
}

async fn send(url: &str, method: &str, params: Value) -> Result<Response> {
    let request = request(url, method, &params)?;
    within("an answer's head", BOUND, async { Ok(request.send().await?) }).await
}

/// Sends it until there is room for it: what has been closed may be counted for a moment still.
async fn admitted(url: &str, method: &str, params: &Value) -> Result<Response> {
    within("room", BOUND, async {
        loop {
            let response = send(url, method, params.clone()).await?;
            if response.status() != 429 {
                return Ok(response);
            }
        }
    })
    .await
}

async fn refused(response: Response) -> Result<(u16, Value)> {
    let status = response.status().as_u16();
    let body: Value = serde_json::from_slice(&response.bytes().await?)?;
    Ok((status, body["error"].clone()))
}

/// Reads a stream until it has said `text`, and returns all that it said.
async fn read_until(response: &mut Response, text: &str) -> Result<String> {
    let mut said = String::new();
    within("the rest of a stream", BOUND, async {
        while !said.contains(text) {
            let chunk = response.chunk().await?.with_context(|| format!("the stream has ended: {said}"))?;
            said.push_str(&String::from_utf8_lossy(&chunk));
        }
        Ok(())
    })
    .await?;
    Ok(said)
}

async fn stand(more: &str) -> Result<(UpV, Gateway, String)> {
    let server = UpV::start().await?;
    let gateway = Gateway::start(&format!("{}{more}", server.toml("m")), &[]).await?;
    let url = gateway.url("m")?;
    Ok((server, gateway, url))
}

#[tokio::test]
async fn e2_a_request_and_its_answer_are_passed_on_as_they_are() -> Result<()> {
    let (server, _gateway, url) = stand("headers = { x-team = \"red\" }\n").await?;
    let params = json!({"name": "echo", "arguments": {"n": 1}});
    let sent = request(&url, "tools/call", &params)?;
    let sent = sent.header("mcp-session-id", "stray").header("last-event-id", "1").header("x-own", "secret");
    let response = sent.header("mcp-param-n", "1").send().await?;
    ensure!(response.status() == 200, "{response:?}");
    let answer = response.text().await?;
    assert_eq!(
        answer,
        "{ \"result\":{\"resultType\":\"complete\",\"content\":[ ],\"n\":1.0,\"n2\":12345678901234567890123}, \
         \"id\":\"a\u{fc}\",\"jsonrpc\":\"2.0\"}"
    );
    let seen = server.seen("tools/call");
    assert_eq!(seen.len(), 1);
    assert_eq!(seen[0].body, message("tools/call", params));
    let header = |name: &str| seen[0].headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    assert_eq!(header("mcp-protocol-version"), Some(VERSION));
    assert_eq!((header("mcp-method"), header("mcp-name")), (Some("tools/call"), Some("echo")));
    assert_eq!((header("mcp-param-n"), header("x-team")), (Some("1"), Some("red")));
    assert_eq!((header("mcp-session-id"), header("last-event-id"), header("x-own")), (None, None, None));

    let response = send(&url, "server/discover", json!({})).await?;
    let found: Value = serde_json::from_slice(&response.bytes().await?)?;
    assert_eq!((&found["result"]["ttlMs"], &found["result"]["cacheScope"]), (&json!(7), &json!("private")));
    let (status, error) = refused(send(&url, "tasks/list", json!({})).await?).await?;
    assert_eq!((status, &error["code"]), (404, &json!(-32601)));

    let mut response = send(&url, "tools/call", json!({"name": "steps"})).await?;
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    assert_eq!(response.headers()["x-accel-buffering"], "no");
    let said = read_until(&mut response, "12345678901234567890123").await?;
    assert!(said.contains("notifications/progress"), "{said}");
    Ok(())
}

#[tokio::test]
async fn e2_what_breaks_the_rules_is_refused_by_its_number_and_not_sent() -> Result<()> {
    let (server, _gateway, url) = stand("era = \"modern\"\n").await?;
    let call = json!({"name": "echo"});
    let http = reqwest::Client::builder().no_proxy().build()?;
    let raw = |version: &str, method: &str, body: String| {
        let request = http.post(&url).header("accept", "application/json, text/event-stream");
        let request = request.header("content-type", "application/json").header("mcp-name", "echo");
        request.header("mcp-protocol-version", version).header("mcp-method", method).body(body)
    };
    let other = message("tools/call", call.clone()).replace(VERSION, "1900-01-01");
    let bare = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}).to_string();
    for (request, code) in [
        (raw(VERSION, "tools/list", message("tools/call", call.clone())), -32020),
        (raw("2025-11-25", "tools/call", message("tools/call", call.clone())), -32020),
        (raw("1900-01-01", "tools/call", other), -32022),
        (raw(VERSION, "tools/call", bare), -32602),
    ] {
        let (status, error) = refused(request.send().await?).await?;
        assert_eq!((status, &error["code"]), (400, &json!(code)), "{error}");
        if code == -32022 {
            assert_eq!(error["data"], json!({"supported": [VERSION], "requested": "1900-01-01"}));
        }
    }
    assert_eq!(server.seen("tools/call").len() + server.seen("tools/list").len(), 0);
    for verb in [reqwest::Method::GET, reqwest::Method::DELETE] {
        let request = http.request(verb, &url).header("accept", "text/event-stream");
        let status = request.header("mcp-protocol-version", VERSION).send().await?.status();
        assert!(status.is_client_error(), "{status}");
    }
    Ok(())
}

#[tokio::test]
async fn e2_who_closes_the_response_cancels_at_the_server() -> Result<()> {
    let (server, _gateway, url) = stand("era = \"modern\"\n").await?;
    let mut streaming = send(&url, "tools/call", json!({"name": "slow"})).await?;
    read_until(&mut streaming, "notifications/progress").await?;
    assert_eq!(server.open(), 1);
    drop(streaming);
    wait_until("the stream to be closed at the server", BOUND, async || server.open() == 0).await?;

    let waiting = tokio::spawn(request(&url, "tools/call", &json!({"name": "silent"}))?.send());
    wait_until("the request to be at the server", BOUND, async || server.open() == 1).await?;
    waiting.abort();
    wait_until("the request to be closed at the server", BOUND, async || server.open() == 0).await
}

#[tokio::test]
async fn e2_a_killed_worker_costs_what_was_in_flight_and_nothing_else() -> Result<()> {
    let (server, mut gateway, url) = stand("").await?;
    let mut streaming = send(&url, "tools/call", json!({"name": "slow"})).await?;
    read_until(&mut streaming, "notifications/progress").await?;
    gateway.kill_worker().await?;
    wait_until("the request to be closed at the server", BOUND, async || server.open() == 0).await?;
    let response = send(&url, "tools/call", json!({"name": "echo"})).await?;
    assert_eq!(response.status(), 200);
    assert_eq!(server.seen("tools/call").len(), 2, "nothing is sent twice");
    Ok(())
}

#[tokio::test]
async fn e2_a_stop_ends_what_is_listened_to_in_order_and_lets_calls_end() -> Result<()> {
    let (server, mut gateway, url) = stand("[session]\ndrain_grace = \"1s\"\n").await?;
    let mut listening = send(&url, "subscriptions/listen", json!({"notifications": {}})).await?;
    read_until(&mut listening, "acknowledged").await?;
    let mut calling = send(&url, "tools/call", json!({"name": "slow"})).await?;
    read_until(&mut calling, "notifications/progress").await?;
    gateway.signal(Signal::TERM)?;
    let said = read_until(&mut listening, "complete").await?;
    assert!(said.contains("\"io.modelcontextprotocol/subscriptionId\":\"a\u{fc}\""), "{said}");
    let said = read_until(&mut calling, "outcome_unknown").await?;
    assert!(said.contains("-31000"), "{said}");
    gateway.wait_for_end(BOUND).await?;
    wait_until("all requests to be closed at the server", BOUND, async || server.open() == 0).await
}

#[tokio::test]
async fn t2_a_handover_lets_stateless_calls_end_and_the_next_worker_takes_what_comes() -> Result<()> {
    let server = UpM::start().await?;
    let mut gateway = Gateway::start(&server.toml("m"), &[]).await?;
    let url = gateway.url("m")?;
    let mut listening = send(&url, "subscriptions/listen", json!({"notifications": {}})).await?;
    read_until(&mut listening, "acknowledged").await?;
    let mut calling = send(&url, "tools/call", json!({"name": "slow"})).await?;
    read_until(&mut calling, "notifications/progress").await?;
    let listed: Value = serde_json::from_slice(&gateway.cli(&["--json", "servers", "list"]).await?.stdout)?;
    assert!(listed.to_string().contains("\"calls\":1"), "{listed}");
    let before = gateway.worker().await?;
    gateway.rewrite_config(&format!("{}patience = \"9s\"\n", server.toml("m")))?;
    let output = gateway.cli(&["reload"]).await?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    read_until(&mut listening, "\"resultType\":\"complete\"").await?;
    assert!(gateway.worker().await?.number > before.number);
    let response = send(&url, "tools/call", json!({"name": "echo", "arguments": {"text": "a"}})).await?;
    assert_eq!(response.status(), 200);
    server.release();
    read_until(&mut calling, "released").await?;
    assert_eq!(server.count("tools/call"), 2, "nothing is sent twice");
    Ok(())
}

#[tokio::test]
async fn e2_a_server_that_is_down_is_told_as_503_in_the_words_of_the_gateway() -> Result<()> {
    let (mut server, _gateway, url) = stand("era = \"modern\"\npatience = \"200ms\"\n").await?;
    server.stop().await;
    let response = send(&url, "tools/call", json!({"name": "echo"})).await?;
    assert!(response.headers().contains_key("retry-after"), "{response:?}");
    let (status, error) = refused(response).await?;
    assert_eq!((status, &error["code"]), (503, &json!(-31000)));
    assert_eq!((&error["data"]["mainstay"], &error["data"]["server"]), (&json!("server_unreachable"), &json!("m")));
    Ok(())
}

#[tokio::test]
async fn s12_requests_and_streams_of_a_principal_have_caps_that_free_up_when_the_client_hangs_up() -> Result<()> {
    let limits = "[limits]\nstateless_requests_per_principal = 2\nlistens_per_principal = 1\n";
    let (server, _gateway, url) = stand(&format!("era = \"modern\"\n{limits}")).await?;
    let (call, listen) = (json!({"name": "slow"}), json!({"notifications": {}}));
    let streaming = send(&url, "tools/call", call.clone()).await?;
    let waiting = tokio::spawn(request(&url, "tools/call", &json!({"name": "silent"}))?.send());
    let listening = send(&url, "subscriptions/listen", listen.clone()).await?;
    wait_until("all to be at the server", BOUND, async || server.open() == 3).await?;
    for (method, params, limit) in [
        ("tools/call", &call, "limits.stateless_requests_per_principal"),
        ("subscriptions/listen", &listen, "limits.listens_per_principal"),
    ] {
        let response = send(&url, method, params.clone()).await?;
        assert!(response.headers().contains_key("retry-after"), "{response:?}");
        let (status, error) = refused(response).await?;
        assert_eq!((status, &error["code"], &error["data"]["limit"]), (429, &json!(-31000), &json!(limit)));
        assert_eq!(error["data"]["mainstay"], "limit_reached");
    }
    let other = request(&url, "tools/call", &json!({"name": "echo"}))?.header("x-agent-name", "another").send().await?;
    assert_eq!(other.status(), 200, "another principal has its own");
    assert_eq!(server.open(), 3, "the server has heard nothing of those that were refused");

    drop((streaming, listening));
    waiting.abort();
    wait_until("all to be closed at the server", BOUND, async || server.open() == 0).await?;
    let _again = admitted(&url, "subscriptions/listen", &listen).await?;
    let (_one, _two) = (admitted(&url, "tools/call", &call).await?, admitted(&url, "tools/call", &call).await?);
    wait_until("as many as before to be there", BOUND, async || server.open() == 3).await
}

#[tokio::test]
async fn e0_what_is_offered_follows_the_server_unless_the_operator_says_otherwise() -> Result<()> {
    let (legacy, modern) = (UpH::start().await?, UpV::start().await?);
    let config = format!("{}{}{}offer = \"legacy\"\n", legacy.toml("old"), modern.toml("new"), modern.toml("sessions"));
    let mut gateway = Gateway::start(&config, &[]).await?;
    for again in [false, true] {
        for (server, stateless) in [("old", false), ("new", true), ("sessions", false)] {
            let response = send(&gateway.url(server)?, "server/discover", json!({})).await?;
            match stateless {
                true => assert_eq!(response.status(), 200, "{server} {again}"),
                false => {
                    let (status, error) = refused(response).await?;
                    assert_eq!((status, &error["code"]), (400, &json!(-32000)), "{server} {again}");
                    assert_eq!(error["data"]["mainstay"], "session_missing");
                }
            }
        }
        gateway.kill_worker().await?;
    }
    Ok(())
}
