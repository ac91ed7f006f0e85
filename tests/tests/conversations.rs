//! Stateless clients (2026-07-28) of servers that keep sessions, through conversations of the gateway's own (E3).

use anyhow::{Context as _, Result, ensure};
use mainstay_tests::{Gateway, Locked, StatelessClient, UpH, UpS, age_streams, wait_until};
use serde_json::{Value, json};
use std::time::Duration;

const BOUND: Duration = Duration::from_secs(30);

struct Stand {
    up_h: UpH,
    up_s: UpS,
    gateway: Gateway,
}

impl Stand {
    async fn new() -> Result<Stand> {
        let up_h = UpH::start().await?;
        up_h.answer("sse-with-ids").await?;
        let up_s = UpS::new(&[])?;
        let offer = "offer = \"both\"\n";
        let config = format!("{}{offer}{}{offer}", up_h.toml("h"), up_s.toml("s")?);
        let gateway = Gateway::start(&config, &[]).await?;
        Ok(Stand { up_h, up_s, gateway })
    }

    fn client(&self, server: &str) -> Result<StatelessClient> {
        StatelessClient::new(&self.gateway.url(server)?)
    }
}

async fn whoami(client: &StatelessClient) -> Result<Value> {
    Ok(serde_json::from_str(&client.call("whoami", json!({})).await?)?)
}

/// How many sessions a program was asked to open.
fn openings(program: &UpS) -> Result<usize> {
    let trace = program.trace()?;
    Ok(trace.iter().filter(|entry| entry["line"]["method"] == "initialize").count())
}

/// The sessions that the gateway lists.
async fn sessions(gateway: &Gateway) -> Result<Vec<Value>> {
    let (status, listed) = gateway.admin_get("/api/v1/sessions").await?;
    ensure!(status == 200, "{status}: {listed}");
    listed["sessions"].as_array().cloned().context("a list")
}

#[tokio::test]
async fn e3_a_modern_client_lists_and_calls_at_servers_that_keep_sessions() -> Result<()> {
    let stand = Stand::new().await?;
    for server in ["h", "s"] {
        let client = stand.client(server)?;
        let found = client.result("server/discover", json!({})).await?;
        assert_eq!(found["supportedVersions"], json!(["2026-07-28"]));
        assert_eq!((&found["resultType"], &found["cacheScope"]), (&json!("complete"), &json!("private")));
        assert!(found["capabilities"]["tools"].is_object() && found["ttlMs"].is_u64(), "{found}");
        assert!(found["_meta"]["io.modelcontextprotocol/serverInfo"]["name"].is_string(), "{found}");

        let listed = client.result("tools/list", json!({})).await?;
        assert!(listed["tools"].as_array().is_some_and(|tools| !tools.is_empty()));
        assert_eq!((&listed["ttlMs"], &listed["cacheScope"]), (&json!(0), &json!("private")));
        let called = client.result("tools/call", json!({"name": "echo", "arguments": {"text": "a\u{fc}"}})).await?;
        assert_eq!(called["content"][0]["text"], "a\u{fc}");
        assert_eq!(called["resultType"], "complete");

        let params =
            json!({"name": "prog", "arguments": {"n": 3, "delay_ms": 40}, "_meta": {"progressToken": "t\u{f6}"}});
        let mut calling = client.begin("tools/call", params).await?;
        let mut seen = Vec::new();
        let last = loop {
            let message = calling.next_message().await?.context("a response")?;
            match message["method"] == "notifications/progress" {
                true => seen.push((message["params"]["progress"].clone(), message["params"]["progressToken"].clone())),
                false => break message,
            }
        };
        assert_eq!(seen, (1..=3).map(|step| (json!(step), json!("t\u{f6}"))).collect::<Vec<_>>());
        assert_eq!(last["result"]["resultType"], "complete");

        for method in ["ping", "initialize", "logging/setLevel", "resources/subscribe", "tasks/list", "no/such"] {
            let (status, refused) = client.request(method, json!({"taskId": "x"})).await?;
            assert_eq!((status, &refused["error"]["code"]), (404, &json!(-32601)), "{method}: {refused}");
        }
        let (status, refused) = client.request("tools/call", json!({"name": "none"})).await?;
        assert_eq!((status, &refused["error"]["code"]), (200, &json!(-32602)), "{refused}");
        let me = whoami(&client).await?;
        assert_eq!((&me["initialized"], &me["client"]["name"]), (&json!(true), &json!("stateless")));
    }
    // One session each, opened once.
    assert_eq!(sessions(&stand.gateway).await?.len(), 2);
    assert_eq!(stand.up_h.requests("initialize").await?.len(), 1);
    assert_eq!(openings(&stand.up_s)?, 1);
    Ok(())
}

#[tokio::test]
async fn e3_clients_are_told_apart_by_handle_name_and_capabilities() -> Result<()> {
    let stand = Stand::new().await?;
    let plain = |name: &str| Ok::<_, anyhow::Error>(stand.client("s")?.named(name));
    let clients = [
        plain("a")?,
        plain("b")?,
        plain("a")?.with_handle("one"),
        plain("b")?.with_handle("two"),
        plain("a")?.with_capabilities(json!({"roots": {}, "elicitation": {}})),
    ];
    let mut pids = Vec::new();
    for client in &clients {
        pids.push(whoami(client).await?["pid"].clone());
    }
    let distinct: std::collections::BTreeSet<_> = pids.iter().map(ToString::to_string).collect();
    assert_eq!(distinct.len(), clients.len(), "{pids:?}");
    // The same again, however it is written, and whoever else uses a handle.
    let again = [
        (plain("a")?, 0),
        (plain("other")?.with_handle("one"), 2),
        (plain("a")?.with_capabilities(json!({"elicitation": {}, "extensions": {"x": {}}, "roots": {}})), 4),
    ];
    for (client, place) in again {
        assert_eq!(whoami(&client).await?["pid"], pids[place], "{place}");
    }
    Ok(())
}

#[tokio::test]
async fn e3_a_conversation_outlives_the_worker_and_restarts() -> Result<()> {
    let mut stand = Stand::new().await?;
    let clients = [stand.client("s")?.with_handle("w"), stand.client("h")?.with_handle("w")];
    let mut before = Vec::new();
    for client in &clients {
        before.push(whoami(client).await?);
    }
    for restart in [false, true] {
        match restart {
            false => drop(stand.gateway.kill_worker().await?),
            true => {
                stand.gateway.kill_all().await?;
                stand.gateway.start_again().await?;
            }
        }
        for (client, before) in clients.iter().zip(&before) {
            let after = whoami(client).await?;
            // The program ends with its keeper, which is said; an HTTP server's session is gone on with.
            let is_program = before["session"].as_str().is_some_and(|session| session.starts_with("stdio"));
            match restart && is_program {
                true => assert_ne!(after["pid"], before["pid"]),
                false => assert_eq!((&after["pid"], &after["session"]), (&before["pid"], &before["session"])),
            }
        }
        assert_eq!(sessions(&stand.gateway).await?.len(), 2);
    }
    Ok(())
}

#[tokio::test]
async fn e3_an_ended_conversation_is_opened_anew_and_a_lost_server_session_made_again() -> Result<()> {
    let stand = Stand::new().await?;
    let client = stand.client("h")?;
    let first = whoami(&client).await?;
    stand.up_h.forget().await?;
    let second = whoami(&client).await?;
    assert_ne!(first["session"], second["session"]);
    assert_eq!(sessions(&stand.gateway).await?.len(), 1, "the same conversation");
    let shown = sessions(&stand.gateway).await?;
    let reference = shown[0]["ref"].as_str().with_context(|| shown[0].to_string())?;
    let output = stand.gateway.cli(&["sessions", "close", reference]).await?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let third = whoami(&client).await?;
    assert_ne!(second["session"], third["session"]);
    Ok(())
}

async fn is_cancelled(stand: &Stand, server: &str) -> Result<()> {
    wait_until("the call to be cancelled at the server", BOUND, async || match server {
        "h" => stand.up_h.count("/cancelled").await.is_ok_and(|cancelled| cancelled == 1),
        _ => stand
            .up_s
            .trace()
            .is_ok_and(|trace| trace.iter().any(|entry| entry["line"]["method"] == "notifications/cancelled")),
    })
    .await
}

#[tokio::test]
async fn e3_who_closes_the_response_cancels_at_the_server() -> Result<()> {
    let stand = Stand::new().await?;
    for server in ["h", "s"] {
        let client = stand.client(server)?;
        let params = json!({"name": "prog", "arguments": {"n": 1000, "delay_ms": 50}, "_meta": {"progressToken": 1}});
        let mut calling = client.begin("tools/call", params).await?;
        calling.until(|message| message["method"] == "notifications/progress").await?;
        drop(calling);
        is_cancelled(&stand, server).await?;
        wait_until("no call to be in flight", BOUND, async || {
            sessions(&stand.gateway).await.is_ok_and(|shown| shown.iter().all(|shown| shown["calls"] == 0))
        })
        .await?;
    }
    Ok(())
}

#[tokio::test]
async fn s12_requests_of_a_principal_have_a_cap_over_all_its_conversations() -> Result<()> {
    let up_h = UpH::start().await?;
    let limits = "[limits]\nstateless_requests_per_principal = 1\n";
    let gateway = Gateway::start(&format!("{}offer = \"both\"\n{limits}", up_h.toml("h")), &[]).await?;
    let client = |handle: &str| Ok::<_, anyhow::Error>(StatelessClient::new(&gateway.url("h")?)?.with_handle(handle));
    let (one, two) = (client("one")?, client("two")?);
    let params = json!({"name": "prog", "arguments": {"n": 1000, "delay_ms": 50}, "_meta": {"progressToken": 1}});
    let mut calling = one.begin("tools/call", params).await?;
    calling.until(|message| message["method"] == "notifications/progress").await?;
    let echo = json!({"name": "echo", "arguments": {"text": "a"}});
    let (status, refused) = two.request("tools/call", echo.clone()).await?;
    let limit = &refused["error"]["data"]["limit"];
    assert_eq!((status, limit), (429, &json!("limits.stateless_requests_per_principal")), "{refused}");
    assert_eq!(up_h.executions("echo").await?, 0, "it was not sent");
    drop(calling);
    wait_until("room for another", BOUND, async || {
        two.request("tools/call", echo.clone()).await.is_ok_and(|(status, _)| status == 200)
    })
    .await
}

#[tokio::test]
async fn e3_log_messages_come_to_who_asks_for_them() -> Result<()> {
    let stand = Stand::new().await?;
    for server in ["h", "s"] {
        let client = stand.client(server)?;
        for (wanted, said, heard) in
            [(None, "error", false), (Some("warning"), "info", false), (Some("info"), "info", true)]
        {
            let mut params = json!({"name": "log", "arguments": {"level": said, "message": "m"}});
            if let Some(wanted) = wanted {
                params["_meta"]["io.modelcontextprotocol/logLevel"] = json!(wanted);
            }
            let mut calling = client.begin("tools/call", params).await?;
            if !calling.is_stream() {
                ensure!(!heard, "{server}: a message was to come");
                continue;
            }
            let mut messages = Vec::new();
            while let Some(message) = calling.next_message().await? {
                messages.push(message);
            }
            let logged = messages.iter().filter(|message| message["method"] == "notifications/message").count();
            assert_eq!(logged, usize::from(heard), "{server} {wanted:?}: {messages:?}");
        }
        assert_eq!(whoami(&client).await?["level"], "info", "the lowest that was wanted");
    }
    Ok(())
}

#[tokio::test]
async fn e0_a_server_with_sessions_is_offered_to_modern_clients_only_if_the_operator_says_so() -> Result<()> {
    let (up_h, up_s) = (UpH::start().await?, UpS::new(&[])?);
    let gateway = Gateway::start(&format!("{}{}", up_h.toml("h"), up_s.toml("s")?), &[]).await?;
    for server in ["h", "s"] {
        let client = StatelessClient::new(&gateway.url(server)?)?;
        let (status, refused) = client.request("server/discover", json!({})).await?;
        assert_eq!((status, &refused["error"]["code"]), (400, &json!(-32000)), "{refused}");
    }
    assert_eq!(openings(&up_s)?, 0, "a program is asked for its era, and no more");
    Ok(())
}

/// A client that can be asked, and the call of a tool that asks it.
fn able(stand: &Stand, server: &str) -> Result<StatelessClient> {
    Ok(stand.client(server)?.with_capabilities(json!({"elicitation": {}, "roots": {}, "sampling": {}})))
}

fn asking() -> Value {
    json!({"name": "ask", "arguments": {"message": "sure?", "timeout_ms": 600_000}})
}

fn answered(mut params: Value, asked: &Value, answer: &Value) -> Result<Value> {
    let requests = asked["inputRequests"].as_object().with_context(|| format!("nothing asked: {asked}"))?;
    params["inputResponses"] = requests.keys().map(|key| (key.clone(), answer.clone())).collect();
    params["requestState"] = asked["requestState"].clone();
    Ok(params)
}

fn yes() -> Value {
    json!({"action": "accept", "content": {"answer": "forty-two"}})
}

#[tokio::test]
async fn e3_a_question_of_the_server_is_asked_and_answered_over_rounds() -> Result<()> {
    let stand = Stand::new().await?;
    for server in ["h", "s"] {
        let client = able(&stand, server)?;
        let asked = client.result("tools/call", asking()).await?;
        assert_eq!(asked["resultType"], "input_required", "{asked}");
        let question =
            asked["inputRequests"].as_object().and_then(|asked| asked.values().next()).context("a question")?;
        assert_eq!(
            (&question["method"], &question["params"]["message"]),
            (&json!("elicitation/create"), &json!("sure?"))
        );

        // Whoever comes back without the answer is asked again, with the same question.
        let mut empty = asking();
        empty["requestState"] = asked["requestState"].clone();
        let again = client.result("tools/call", empty).await?;
        assert_eq!(
            (&again["resultType"], &again["inputRequests"]),
            (&json!("input_required"), &asked["inputRequests"])
        );

        let result = client.result("tools/call", answered(asking(), &again, &yes())?).await?;
        assert_eq!(result["resultType"], "complete", "{result}");
        assert!(result.to_string().contains("forty-two"), "{result}");
    }
    assert_eq!(stand.up_h.executions("ask").await?, 1);
    let answers = stand.up_s.trace()?.iter().filter(|entry| entry["line"]["result"]["action"] == "accept").count();
    assert_eq!(answers, 1);
    Ok(())
}

#[tokio::test]
async fn e3_a_call_that_waits_for_its_client_outlives_the_worker() -> Result<()> {
    let mut stand = Stand::new().await?;
    for server in ["h", "s"] {
        let client = able(&stand, server)?;
        let before = whoami(&client).await?;
        let asked = client.result("tools/call", asking()).await?;
        stand.gateway.kill_worker().await?;
        let result = client.result("tools/call", answered(asking(), &asked, &yes())?).await?;
        assert!(result.to_string().contains("forty-two"), "{server}: {result}");
        let after = whoami(&client).await?;
        assert_eq!((&after["pid"], &after["session"]), (&before["pid"], &before["session"]), "{server}");
        assert_eq!(after["calls"], 3, "{server}: nothing was called twice");
    }
    let answers = stand.up_s.trace()?.iter().filter(|entry| entry["line"]["result"]["action"] == "accept").count();
    assert_eq!(answers, 1);
    Ok(())
}

#[tokio::test]
async fn e3_a_call_is_cancelled_whose_client_hangs_up_while_it_is_looked_for() -> Result<()> {
    let mut stand = Stand::new().await?;
    for server in ["h", "s"] {
        let client = able(&stand, server)?;
        let asked = client.result("tools/call", asking()).await?;
        stand.gateway.kill_worker().await?;
        whoami(&client).await?;
        let locked = Locked::new(&stand.gateway.state_dir().join("streams.db"))?;
        let told = stand.gateway.log().matches(NOT_YET).count();
        let mut back = asking();
        back["requestState"] = asked["requestState"].clone();
        let coming = tokio::spawn(async move { client.request("tools/call", back).await });
        wait_until("the call to be looked for", BOUND, async || stand.gateway.log().matches(NOT_YET).count() > told)
            .await?;
        coming.abort();
        drop(locked);
        is_cancelled(&stand, server).await?;
    }
    Ok(())
}

#[tokio::test]
async fn e3_a_call_that_nobody_comes_back_for_in_time_is_cancelled_by_whichever_worker_comes_next() -> Result<()> {
    let mut stand = Stand::new().await?;
    let client = able(&stand, "s")?;
    client.result("tools/call", asking()).await?;
    age_streams(&stand.gateway.state_dir())?;
    stand.gateway.kill_worker().await?;
    is_cancelled(&stand, "s").await
}

#[tokio::test]
async fn t2_a_call_is_waited_for_from_when_its_client_was_sent_back() -> Result<()> {
    let mut stand = Stand::new().await?;
    let client = stand.client("s")?;
    let params = json!({"name": "slow", "arguments": {"ms": 600_000}});
    let mut calling = client.begin("tools/call", params.clone()).await?;
    age_streams(&stand.gateway.state_dir())?;
    let before = stand.gateway.worker().await?;
    let config = format!("{}offer = \"both\"\npatience = \"9s\"\n", stand.up_s.toml("s")?);
    stand.gateway.rewrite_config(&config)?;
    let output = stand.gateway.cli(&["reload"]).await?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let sent_back = calling.until(|message| message.get("method").is_none()).await?;
    let before = stand.gateway.next_worker(before).await?;
    whoami(&client).await?;
    let is_told = |entry: &Value| entry["line"]["method"] == "notifications/cancelled";
    assert!(!stand.up_s.trace()?.iter().any(is_told), "it is early");
    let mut back = params;
    back["requestState"] = sent_back["result"]["requestState"].clone();
    let calling = client.begin("tools/call", back.clone()).await?;
    assert!(calling.is_stream(), "it goes on");
    // It is sent back once more, and does not come.
    stand.gateway.rewrite_config(&config.replace("9s", "8s"))?;
    let output = stand.gateway.cli(&["reload"]).await?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    stand.gateway.next_worker(before).await?;
    age_streams(&stand.gateway.state_dir())?;
    stand.gateway.kill_worker().await?;
    is_cancelled(&stand, "s").await
}

#[tokio::test]
async fn e3_a_round_is_taken_up_only_by_whose_it_is_and_for_the_same_request() -> Result<()> {
    let up_s = UpS::new(&[])?;
    let auth =
        "[auth]\nmode = \"token\"\n[auth.tokens]\namy = \"amy-token-0123456789\"\nbob = \"bob-token-0123456789\"\n";
    let gateway = Gateway::start(&format!("{}offer = \"both\"\n{auth}", up_s.toml("s")?), &[]).await?;
    let of = |token: &str| -> Result<StatelessClient> {
        let client = StatelessClient::new(&gateway.url("s")?)?.with_handle("same").with_bearer(token);
        Ok(client.with_capabilities(json!({"elicitation": {}})))
    };
    let (amy, bob) = (of("amy-token-0123456789")?, of("bob-token-0123456789")?);
    assert_ne!(
        whoami(&amy).await?["pid"],
        whoami(&bob).await?["pid"],
        "a handle does not lead to another's conversation"
    );
    let asked = amy.result("tools/call", asking()).await?;
    let back = answered(asking(), &asked, &yes())?;
    let mut other = back.clone();
    other["arguments"]["message"] = json!("really?");
    let mut forged = back.clone();
    forged["requestState"] = json!("AAAA");
    for (client, params) in [(&bob, back.clone()), (&amy, other), (&amy, forged)] {
        let (status, refused) = client.request("tools/call", params).await?;
        assert_eq!((status, &refused["error"]["code"]), (400, &json!(-32602)), "{refused}");
    }
    let result = amy.result("tools/call", back).await?;
    assert!(result.to_string().contains("forty-two"), "{result}");
    Ok(())
}

#[tokio::test]
async fn e3_who_can_not_be_asked_is_not_and_the_server_hears_it_at_once() -> Result<()> {
    let stand = Stand::new().await?;
    for server in ["h", "s"] {
        // A server that asks although it was told otherwise finds nobody; this one asks nobody who can't be asked.
        let text = stand.client(server)?.call("ask", json!({"message": "sure?"})).await?;
        assert!(text.contains("does not support"), "{text}");
        let client = able(&stand, server)?;
        for kind in ["sampling", "roots"] {
            let params = json!({"name": "ask", "arguments": {"message": "m", "kind": kind, "timeout_ms": 600_000}});
            let asked = client.result("tools/call", params.clone()).await?;
            let result = client.result("tools/call", answered(params, &asked, &json!({"kind": kind}))?).await?;
            assert!(result.to_string().contains(kind), "{result}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn t2_a_handover_sends_clients_back_for_calls_on_programs_to_the_next_worker() -> Result<()> {
    let mut stand = Stand::new().await?;
    let client = stand.client("s")?;
    let params = json!({"name": "prog", "arguments": {"n": 2400, "delay_ms": 250}, "_meta": {"progressToken": 1}});
    let mut calling = client.begin("tools/call", params.clone()).await?;
    let seen = calling.until(|message| message["method"] == "notifications/progress").await?;
    let before = stand.gateway.worker().await?;
    let config = format!(
        "{}offer = \"both\"\n{}offer = \"both\"\npatience = \"9s\"\n",
        stand.up_h.toml("h"),
        stand.up_s.toml("s")?
    );
    stand.gateway.rewrite_config(&config)?;
    let output = stand.gateway.cli(&["reload"]).await?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let sent_back = calling.until(|message| message.get("method").is_none()).await?;
    assert_eq!(sent_back["result"]["resultType"], "input_required", "{sent_back}");
    assert!(sent_back["result"].get("inputRequests").is_none(), "{sent_back}");
    assert!(stand.gateway.next_worker(before).await?.number > before.number);
    let mut back = params;
    back["requestState"] = sent_back["result"]["requestState"].clone();
    let mut calling = client.begin("tools/call", back).await?;
    let progress = calling.until(|message| message["method"] == "notifications/progress").await?;
    assert!(progress["params"]["progress"].as_u64() > seen["params"]["progress"].as_u64(), "{progress}");
    let calls = stand.up_s.trace()?.iter().filter(|entry| entry["line"]["params"]["name"] == "prog").count();
    assert_eq!(calls, 1);
    Ok(())
}

/// What the log says of a journal that does not answer.
const NOT_YET: &str = "can't be looked up yet";
