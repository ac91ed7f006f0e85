//! What a modern server hands out to be brought back, the state of a round and the ids of its tasks: it comes back only from
//! whom it was given to, and for what (E2; 2026-07-28, Multi Round-Trip Requests; SEP-2663).

use anyhow::{Context as _, Result, ensure};
use mainstay_tests::{Gateway, StatelessClient, UpV, within};
use serde_json::{Value, json};
use std::time::Duration;

const BOUND: Duration = Duration::from_secs(30);
const VERSION: &str = "2026-07-28";
/// The server's state as it writes it.
const OWN: &str = r#""r\u00e9\/1""#;

/// One request of a client: who it says it is, what it asks for, and the state that it brings.
#[derive(Clone, Copy)]
struct Ask<'a> {
    agent: &'a str,
    method: &'a str,
    name: &'a str,
    arguments: u32,
    state: Option<&'a str>,
}

const FIRST: Ask<'_> = Ask { agent: "amy", method: "tools/call", name: "ask", arguments: 1, state: None };

impl Ask<'_> {
    fn message(&self) -> Value {
        let mut params = json!({"name": self.name, "arguments": {"n": self.arguments},
            "_meta": {"io.modelcontextprotocol/protocolVersion": VERSION,
                "io.modelcontextprotocol/clientCapabilities": {"roots": {}}}});
        if let Some(state) = self.state {
            params["requestState"] = json!(state);
            params["inputResponses"] = json!({"k": {"roots": []}});
        }
        json!({"jsonrpc": "2.0", "id": 7, "method": self.method, "params": params})
    }

    /// The status and the last message of the answer, as they came.
    async fn send(&self, url: &str) -> Result<(u16, String)> {
        let http = reqwest::Client::builder().no_proxy().build()?;
        let request = http
            .post(url)
            .header("accept", "application/json, text/event-stream")
            .header("content-type", "application/json")
            .header("x-agent-name", self.agent)
            .header("mcp-protocol-version", VERSION)
            .header("mcp-method", self.method)
            .header("mcp-name", self.name)
            .body(self.message().to_string());
        within("an answer", BOUND, async {
            let response = request.send().await?;
            let (status, body) = (response.status().as_u16(), response.text().await?);
            let last = body.trim_end().rsplit("\n\n").next().unwrap_or_default();
            let lines: Vec<_> = last.lines().map(|line| line.strip_prefix("data: ").unwrap_or(line)).collect();
            Ok((status, lines.join("\n")))
        })
        .await
    }

    /// The state that this request is given.
    async fn state(&self, url: &str) -> Result<String> {
        let (status, answer) = self.send(url).await?;
        ensure!(status == 200, "{answer}");
        let answer: Value = serde_json::from_str(&answer)?;
        Ok(answer["result"]["requestState"].as_str().with_context(|| format!("no state: {answer}"))?.to_owned())
    }
}

async fn stand() -> Result<(UpV, Gateway, String)> {
    let server = UpV::start().await?;
    let gateway = Gateway::start(&format!("{}{}", server.toml("m"), server.toml("other")), &[]).await?;
    let url = gateway.url("m")?;
    Ok((server, gateway, url))
}

/// How many calls and prompts the server has seen.
fn seen(server: &UpV) -> usize {
    server.seen("tools/call").len() + server.seen("prompts/get").len()
}

#[tokio::test]
async fn e2_a_state_is_sealed_for_its_client_and_comes_back_to_the_server_as_it_was() -> Result<()> {
    let (server, _gateway, url) = stand().await?;
    for (method, name) in [("tools/call", "ask"), ("prompts/get", "ask"), ("tools/call", "ask_late")] {
        let first = Ask { method, name, ..FIRST };
        let (status, answer) = first.send(&url).await?;
        assert_eq!(status, 200, "{answer}");
        let parsed: Value = serde_json::from_str(&answer)?;
        let state = parsed["result"]["requestState"].as_str().context("a state")?;
        assert!(!answer.contains("r\\u00e9") && answer.contains("{\"n\":1.0}"), "only the state is changed: {answer}");
        let retry = Ask { state: Some(state), ..first };
        let (status, answer) = retry.send(&url).await?;
        assert!(status == 200 && answer.contains("12345678901234567890123"), "{status} {answer}");
        let came = server.seen(method).pop().context("the retry")?.body;
        let expected = retry.message().to_string().replace(&format!("\"{state}\""), OWN);
        assert_eq!(std::str::from_utf8(&came)?, expected, "{name}");
    }
    Ok(())
}

#[tokio::test]
async fn e2_a_state_that_was_changed_or_is_not_for_this_request_never_reaches_the_server() -> Result<()> {
    let (server, gateway, url) = stand().await?;
    let state = FIRST.state(&url).await?;
    let other = gateway.url("other")?;
    let tampered = format!("{state}-TAMPERED");
    let retry = Ask { state: Some(&state), ..FIRST };
    let before = seen(&server);
    for (what, url, ask) in [
        ("changed", &url, Ask { state: Some(&tampered), ..FIRST }),
        ("the server's own", &url, Ask { state: Some("r\u{e9}/1"), ..FIRST }),
        ("another principal", &url, Ask { agent: "bob", ..retry }),
        ("another server", &other, retry),
        ("another tool", &url, Ask { name: "ask_elsewhere", ..retry }),
        ("another method", &url, Ask { method: "prompts/get", ..retry }),
        ("other arguments", &url, Ask { arguments: 2, ..retry }),
    ] {
        let (status, answer) = ask.send(url).await?;
        let answer: Value = serde_json::from_str(&answer)?;
        assert_eq!((status, &answer["error"]["code"], &answer["id"]), (400, &json!(-32602), &json!(7)), "{what}");
        let text = answer["error"]["message"].as_str().unwrap_or_default();
        assert!(text.contains("requestState") && !text.contains(&state), "{what}: {text}");
    }
    assert_eq!(seen(&server), before, "the server has seen none of them");
    assert_eq!(retry.send(&url).await?.0, 200, "and the rightful one goes through");
    gateway.assert_clean_log(&[])
}

#[tokio::test]
async fn e2_a_state_outlives_the_worker_the_gateway_and_a_rotation_of_the_keys() -> Result<()> {
    let (_server, mut gateway, url) = stand().await?;
    let state = FIRST.state(&url).await?;
    let retry = Ask { state: Some(&state), ..FIRST };
    gateway.kill_worker().await?;
    assert_eq!(retry.send(&url).await?.0, 200, "after the worker's death");
    let output = gateway.cli(&["keys", "rotate"]).await?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(retry.send(&url).await?.0, 200, "after a rotation");
    gateway.kill_all().await?;
    gateway.start_again().await?;
    let url = gateway.url("m")?;
    assert_eq!(retry.send(&url).await?.0, 200, "after the death of everything");
    // Sealed with the new key, by a worker that began with both.
    let later = Ask { state: Some(&FIRST.state(&url).await?), ..FIRST }.send(&url).await?.0;
    assert_eq!(later, 200, "one that was given out after the rotation");
    Ok(())
}

#[tokio::test]
async fn e2_i_the_id_of_a_servers_task_is_good_for_the_principal_that_it_was_given_to_alone() -> Result<()> {
    let (server, mut gateway, url) = stand().await?;
    let elsewhere = gateway.url("other")?;
    let client = |agent: &str, url: &str| {
        let able = json!({"extensions": {"io.modelcontextprotocol/tasks": {}}});
        anyhow::Ok(StatelessClient::new(url)?.with_agent(agent).with_capabilities(able))
    };
    let amy = client("amy", &url)?;
    let made = amy.result("tools/call", json!({"name": "job", "arguments": {}})).await?;
    let id = made["taskId"].as_str().context("an id")?.to_owned();
    assert!(made["status"] == "working" && id != "t\u{e9}/1", "{made}");
    gateway.kill_worker().await?;
    for (asked, method) in (1..).zip(["tasks/get", "tasks/update", "tasks/cancel"]) {
        let params = json!({"taskId": id, "inputResponses": {}});
        let answer = amy.result(method, params.clone()).await?;
        assert_eq!(answer["taskId"], id, "the client's own id: {answer}");
        let came = server.seen(method).pop().context("the request")?;
        assert_eq!(serde_json::from_slice::<Value>(&came.body)?["params"]["taskId"], "t\u{e9}/1");
        assert!(came.headers.contains_key("mcp-name") && came.headers["mcp-name"] != *id, "made of what the body says");
        for (what, client, id) in [
            ("another principal", client("bob", &url)?, &*id),
            ("another server", client("amy", &elsewhere)?, &*id),
            ("one that was never given out", client("amy", &url)?, "t-1"),
        ] {
            let (status, answer) = client.request(method, json!({"taskId": id, "inputResponses": {}})).await?;
            assert_eq!((status, &answer["error"]["code"]), (400, &json!(-32602)), "{what}: {answer}");
        }
        assert_eq!(server.seen(method).len(), 1, "{asked}: the server has seen none of them");
    }
    gateway.assert_clean_log(&["worker died"])
}
