//! Programs of 2026-07-28 over their standard streams: one process for stateless clients and for sessions alike (E1, E5).

use anyhow::{Context as _, Result, ensure};
use mainstay_tests::{Gateway, RawClient, SdkClient, SdkKind, UpP, UpS, repository, suite, wait_until, within};
use reqwest::Response;
use serde_json::{Value, json};
use std::time::Duration;

const BOUND: Duration = Duration::from_secs(40);
const VERSION: &str = "2026-07-28";

/// A stateless client's request, under the id that all of them use here.
async fn send(url: &str, method: &str, params: Value) -> Result<Response> {
    let mut params = params;
    params["_meta"]["io.modelcontextprotocol/protocolVersion"] = json!(VERSION);
    params["_meta"]["io.modelcontextprotocol/clientCapabilities"] = json!({});
    let http = reqwest::Client::builder().no_proxy().build()?;
    let mut request = http
        .post(url)
        .header("accept", "application/json, text/event-stream")
        .header("content-type", "application/json")
        .header("mcp-protocol-version", VERSION)
        .header("mcp-method", method);
    if let Some(name) = params["name"].as_str() {
        request = request.header("mcp-name", name);
    }
    let request = request.body(json!({"jsonrpc": "2.0", "id": "same", "method": method, "params": params}).to_string());
    within("an answer's head", BOUND, async { Ok(request.send().await?) }).await
}

async fn call(url: &str, tool: &str, arguments: Value) -> Result<Response> {
    send(url, "tools/call", json!({"name": tool, "arguments": arguments})).await
}

/// A call that waits at the program, and has said so by its progress.
async fn slow(url: &str, key: &str) -> Result<Response> {
    let meta = json!({"progressToken": key});
    let mut response =
        send(url, "tools/call", json!({"name": "slow", "arguments": {"key": key}, "_meta": meta})).await?;
    let said = read_until(&mut response, "notifications/progress").await?;
    ensure!(said.contains(&format!("\"progressToken\":\"{key}\"")), "not its own progress: {said}");
    Ok(response)
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

async fn body(response: Response) -> Result<Value> {
    Ok(serde_json::from_slice(&response.bytes().await?)?)
}

/// The text that a tool answers to a stateless client.
async fn text(url: &str, tool: &str, arguments: Value) -> Result<String> {
    let answer = body(call(url, tool, arguments).await?).await?;
    Ok(answer["result"]["content"][0]["text"].as_str().with_context(|| format!("no text: {answer}"))?.to_owned())
}

async fn stand(flags: &[&str], more: &str) -> Result<(UpP, Gateway, String)> {
    let program = UpP::new(flags)?;
    let gateway = Gateway::start(&format!("{}{more}", program.toml("p")?), &[]).await?;
    let url = gateway.url("p")?;
    Ok((program, gateway, url))
}

async fn session(gateway: &Gateway) -> Result<RawClient> {
    let mut client = RawClient::new(&gateway.url("p")?)?.with_capabilities(json!({"elicitation": {}}));
    client.establish("2025-11-25").await?;
    Ok(client)
}

async fn session_text(client: &RawClient, tool: &str) -> Result<String> {
    Ok(client.call_through(tool, json!({})).await?.text()?.to_owned())
}

#[tokio::test]
async fn e1_clients_of_both_eras_share_one_process_and_hear_what_is_theirs_only() -> Result<()> {
    let (program, gateway, url) = stand(&[], MODERN).await?;
    let (mut one, mut other) = (slow(&url, "one").await?, slow(&url, "other").await?);
    let client = session(&gateway).await?;
    let pid = session_text(&client, "whoami").await?;
    assert_eq!(text(&url, "whoami", json!({})).await?, pid);
    assert_eq!(program.starts()?.len(), 1, "one process for all");
    program.release("other")?;
    let said = read_until(&mut other, "released").await?;
    assert!(said.contains("\\\"other\\\"") && said.contains("\"id\":\"same\""), "{said}");
    program.release("one")?;
    let said = read_until(&mut one, "released").await?;
    assert!(said.contains("\\\"one\\\"") && said.contains("\"id\":\"same\""), "{said}");

    let params = json!({"name": "steps", "arguments": {}, "_meta": {"progressToken": "p"}});
    let outcome = client.request("tools/call", params).await?;
    let steps: Vec<_> = outcome.notifications().map(|heard| heard["params"]["progress"].clone()).collect();
    assert_eq!((steps, outcome.text()?), (vec![json!(1), json!(2), json!(3)], "3 steps"));
    assert_eq!(client.version.as_deref(), Some("2025-11-25"));

    let ids: Vec<_> = program.heard("tools/call")?.iter().map(|heard| heard.message["id"].clone()).collect();
    let different: std::collections::BTreeSet<_> = ids.iter().map(Value::to_string).collect();
    assert_eq!(different.len(), ids.len(), "each request has an id of its own: {ids:?}");
    assert_eq!(program.count("initialize")?, 0);
    Ok(())
}

#[tokio::test]
async fn e1_a_server_says_nothing_where_nobody_has_asked_for_it() -> Result<()> {
    let (_program, _gateway, url) = stand(&[], MODERN).await?;
    let meta = json!({"io.modelcontextprotocol/logLevel": "info"});
    let params = json!({"name": "log", "arguments": {"text": "hello"}, "_meta": meta});
    let mut logged = send(&url, "tools/call", params).await?;
    assert!(read_until(&mut logged, "logged").await?.contains("\"data\":\"hello\""));
    assert_eq!(text(&url, "log", json!({"text": "unasked"})).await?, "logged");
    assert_eq!(text(&url, "demand", json!({})).await?, "demanded", "its question is dropped");
    let unknown = send(&url, "tasks/list", json!({})).await?;
    assert_eq!(unknown.status(), 404);
    assert_eq!(body(unknown).await?["error"]["code"], -32601);
    Ok(())
}

#[tokio::test]
async fn e2_who_closes_the_response_takes_the_request_back_at_the_program() -> Result<()> {
    let (program, gateway, url) = stand(&[], MODERN).await?;
    let (gone, mut stays) = (slow(&url, "gone").await?, slow(&url, "stays").await?);
    let sent = program.heard("tools/call")?;
    drop(gone);
    program.wait_heard("notifications/cancelled", 1, BOUND).await?;
    let cancelled = program.heard("notifications/cancelled")?;
    assert_eq!(cancelled[0].message["params"]["requestId"], sent[0].message["id"]);
    program.release("stays")?;
    read_until(&mut stays, "released").await?;

    let client = session(&gateway).await?;
    let slow = json!({"name": "slow", "arguments": {"key": "never"}, "_meta": {"progressToken": 1}});
    let slow = client.message("tools/call", slow);
    let mut exchange = client.post(&slow).await?;
    exchange.next_message(BOUND).await?.context("no progress")?;
    assert_eq!(client.notify("notifications/cancelled", json!({"requestId": slow["id"]})).await?, 202);
    program.wait_heard("notifications/cancelled", 2, BOUND).await?;
    assert_eq!(program.starts()?.len(), 1);
    Ok(())
}

#[tokio::test]
async fn e1_a_question_of_a_program_reaches_the_client_of_a_session() -> Result<()> {
    let (_program, gateway, _url) = stand(&[], MODERN).await?;
    let client = session(&gateway).await?;
    let ask = client.message("tools/call", json!({"name": "ask", "arguments": {}}));
    let mut exchange = client.post(&ask).await?;
    let question = exchange.next_message(BOUND).await?.context("no question")?;
    assert_eq!(question["method"], "elicitation/create");
    let answer = json!({"action": "accept", "content": {"answer": "yes"}});
    assert_eq!(client.respond(&question["id"], answer).await?, 202);
    assert_eq!(client.follow(exchange).await?.text()?, "yes in s-1");
    Ok(())
}

#[tokio::test]
async fn c3_a_killed_process_costs_what_may_not_run_twice_and_the_rest_goes_to_the_next() -> Result<()> {
    for (safe, outcome) in [("", "outcome_unknown"), ("safe_tools = [\"slow\"]\n", "released")] {
        let (program, gateway, url) = stand(&[], &format!("{MODERN}{safe}")).await?;
        let client = session(&gateway).await?;
        let mut calling = slow(&url, "key").await?;
        let first = program.starts()?[0];
        assert_eq!(session_text(&client, "whoami").await?, first.pid.to_string());
        assert!(first.kill());
        if !safe.is_empty() {
            program.wait_heard("tools/call", 3, BOUND).await?;
        }
        program.release("key")?;
        let said = read_until(&mut calling, outcome).await?;
        assert!(said.contains("\"id\":\"same\""), "{said}");
        let next = session_text(&client, "whoami").await?;
        assert_ne!(next, first.pid.to_string());
        assert_eq!(text(&url, "whoami", json!({})).await?, next);
        let slow: Vec<_> = program.heard("tools/call")?;
        let slow = slow.iter().filter(|heard| heard.message["params"]["name"] == "slow").count();
        assert_eq!(slow, if safe.is_empty() { 1 } else { 2 });
    }
    Ok(())
}

#[tokio::test]
async fn s9_the_next_worker_takes_the_process_over_and_takes_back_what_nobody_waits_for() -> Result<()> {
    let (program, mut gateway, url) = stand(&[], MODERN).await?;
    let client = session(&gateway).await?;
    let mut listening = send(&url, "subscriptions/listen", LISTEN.clone()).await?;
    read_until(&mut listening, "acknowledged").await?;
    let _calling = slow(&url, "never").await?;
    let pid = session_text(&client, "whoami").await?;
    let sent = [&program.heard("subscriptions/listen")?[0], &program.heard("tools/call")?[0]]
        .map(|heard| heard.message["id"].clone());
    for kill in 1..=2 {
        gateway.kill_worker().await?;
        assert_eq!(session_text(&client, "whoami").await?, pid, "kill {kill}");
        assert_eq!(text(&url, "whoami", json!({})).await?, pid, "kill {kill}");
    }
    program.wait_heard("notifications/cancelled", 2, BOUND).await?;
    let taken_back = program.heard("notifications/cancelled")?;
    let taken_back: Vec<_> = taken_back.iter().map(|heard| &heard.message["params"]["requestId"]).collect();
    assert!(sent.iter().all(|id| taken_back.contains(&id)), "{taken_back:?}");
    let slow: Vec<_> = program.heard("tools/call")?;
    assert_eq!(slow.iter().filter(|heard| heard.message["params"]["name"] == "slow").count(), 1, "nothing runs twice");
    assert_eq!(program.starts()?.len(), 1);
    let listed: Value = serde_json::from_slice(&gateway.cli(&["--json", "servers", "list"]).await?.stdout)?;
    assert!(listed.to_string().contains("\"children\":1"), "{listed}");
    Ok(())
}

#[tokio::test]
async fn t2_a_handover_keeps_the_process_and_lets_calls_end_in_their_grace() -> Result<()> {
    let (program, mut gateway, url) = stand(&[], MODERN).await?;
    let client = session(&gateway).await?;
    let pid = session_text(&client, "whoami").await?;
    let mut listening = send(&url, "subscriptions/listen", LISTEN.clone()).await?;
    read_until(&mut listening, "acknowledged").await?;
    let (mut ends, mut stays) = (slow(&url, "ends").await?, slow(&url, "stays").await?);
    gateway.rewrite_config(&format!("{}{MODERN}patience = \"9s\"\n", program.toml("p")?))?;
    let ((), reloaded) = tokio::join!(
        async {
            let _released = program.release("ends");
        },
        gateway.cli(&["reload"])
    );
    ensure!(reloaded.as_ref().is_ok_and(|output| output.status.success()), "{reloaded:?}");
    read_until(&mut ends, "released").await?;
    read_until(&mut listening, "\"resultType\":\"complete\"").await?;
    // That one is nobody's: the process is the next worker's, and its client can't come back.
    read_until(&mut stays, "outcome_unknown").await?;
    assert_eq!(session_text(&client, "whoami").await?, pid);
    assert_eq!(text(&url, "whoami", json!({})).await?, pid);
    wait_until("the call that was cut to be taken back", BOUND, async || {
        let sent = program.heard("tools/call").unwrap_or_default();
        let sent = sent.iter().find(|heard| heard.message["params"]["arguments"]["key"] == "stays");
        let taken_back = program.heard("notifications/cancelled").unwrap_or_default();
        sent.is_some_and(|sent| {
            taken_back.iter().any(|heard| heard.message["params"]["requestId"] == sent.message["id"])
        })
    })
    .await
}

#[tokio::test]
async fn t4_c9_another_definition_and_an_operator_get_another_process() -> Result<()> {
    let (program, mut gateway, url) = stand(&[], MODERN).await?;
    let first = text(&url, "whoami", json!({})).await?;
    let output = gateway.cli(&["servers", "restart", "p"]).await?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let second = text(&url, "whoami", json!({})).await?;
    assert_ne!(first, second);
    gateway.rewrite_config(&format!("{}{MODERN}env = {{ LEVEL = \"2\" }}\n", program.toml("p")?))?;
    let output = gateway.cli(&["reload"]).await?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let third = text(&url, "whoami", json!({})).await?;
    assert_ne!(third, second);
    wait_until("the former processes to end", BOUND, async || program.alive().is_ok_and(|alive| alive.len() == 1))
        .await?;
    gateway.rewrite_config("[servers.other]\nurl = \"http://127.0.0.1:9/mcp\"\n")?;
    let output = gateway.cli(&["reload"]).await?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    wait_until("the last process to end", BOUND, async || program.alive().is_ok_and(|alive| alive.is_empty())).await
}

#[tokio::test]
async fn s11_an_unused_process_is_let_go_and_comes_back() -> Result<()> {
    let (program, gateway, url) = stand(&[], &format!("{MODERN}suspend_after = \"1s\"\n")).await?;
    let client = session(&gateway).await?;
    let mut listening = send(&url, "subscriptions/listen", LISTEN.clone()).await?;
    read_until(&mut listening, "acknowledged").await?;
    let first = text(&url, "whoami", json!({})).await?;
    drop(listening);
    wait_until("the process to end", BOUND, async || program.alive().is_ok_and(|alive| alive.is_empty())).await?;
    assert_ne!(session_text(&client, "whoami").await?, first);
    assert_eq!(program.starts()?.len(), 2);
    Ok(())
}

#[tokio::test]
async fn e4_who_listens_goes_on_listening_at_the_next_process_and_is_told_to_look() -> Result<()> {
    let (program, gateway, url) = stand(&[], MODERN).await?;
    let mut listening = send(&url, "subscriptions/listen", LISTEN.clone()).await?;
    let said = read_until(&mut listening, "acknowledged").await?;
    assert!(said.contains("\"io.modelcontextprotocol/subscriptionId\":\"same\""), "{said}");
    let client = session(&gateway).await?;
    let mut stream = client.get_stream(None).await?;
    program.wait_heard("subscriptions/listen", 2, BOUND).await?;
    assert_eq!(text(&url, "change", json!({})).await?, "changed");
    let said = read_until(&mut listening, "list_changed").await?;
    assert!(said.contains("\"io.modelcontextprotocol/subscriptionId\":\"same\""), "{said}");
    let heard = stream.next_message(BOUND).await?.context("nothing heard")?;
    assert_eq!(heard["method"], "notifications/tools/list_changed");

    assert!(program.starts()?[0].kill());
    let said = read_until(&mut listening, "list_changed").await?;
    assert!(said.contains("\"io.modelcontextprotocol/subscriptionId\":\"same\""), "{said}");
    assert!(!said.contains("acknowledged"), "that was said before: {said}");
    let heard = stream.next_message(BOUND).await?.context("nothing heard")?;
    assert_eq!(heard["method"], "notifications/tools/list_changed");
    program.wait_heard("subscriptions/listen", 4, BOUND).await?;
    assert_eq!(text(&url, "change", json!({})).await?, "changed");
    read_until(&mut listening, "list_changed").await?;
    assert_eq!(program.starts()?.len(), 2);
    Ok(())
}

async fn era(gateway: &Gateway) -> Result<Value> {
    Ok(gateway.admin_get("/api/v1/servers/p").await?.1["summary"]["era"].clone())
}

#[tokio::test]
async fn e5_a_program_that_refuses_sessions_is_asked_for_its_era_once_and_bridged_ever_after() -> Result<()> {
    let (program, mut gateway, url) = stand(&[], "").await?;
    let client = session(&gateway).await?;
    let pid = session_text(&client, "whoami").await?;
    assert_eq!((era(&gateway).await?, text(&url, "whoami", json!({})).await?), (json!("modern"), pid));
    // One that was refused, one that was asked, and the one that serves.
    assert_eq!((program.starts()?.len(), program.count("initialize")?), (3, 1));
    let asked = program.heard("server/discover")?;
    assert_ne!(asked[0].pid, program.heard("initialize")?[0].pid, "no process that serves somebody is asked");
    wait_until("the others to end", BOUND, async || program.alive().is_ok_and(|alive| alive.len() == 1)).await?;
    // What was found out outlives the gateway.
    gateway.kill_all().await?;
    gateway.start_again().await?;
    let other = session(&gateway).await?;
    assert_eq!(session_text(&other, "whoami").await?, session_text(&client, "whoami").await?);
    assert_eq!((program.starts()?.len(), program.count("initialize")?), (4, 1));
    Ok(())
}

#[tokio::test]
async fn e5_a_stateless_client_has_a_program_asked_in_a_process_of_its_own() -> Result<()> {
    let (program, gateway, url) = stand(&["dual"], "").await?;
    let pid = text(&url, "whoami", json!({})).await?;
    let asked = program.heard("server/discover")?;
    assert_ne!(asked[0].pid.to_string(), pid);
    wait_until("the one that was asked to end", BOUND, async || program.alive().is_ok_and(|alive| alive.len() == 1))
        .await?;
    let client = session(&gateway).await?;
    assert_eq!(session_text(&client, "whoami").await?, pid, "known to be modern, it is not tried with `initialize`");
    assert_eq!((program.count("initialize")?, era(&gateway).await?), (0, json!("modern")));
    Ok(())
}

#[tokio::test]
async fn e5_a_program_that_takes_sessions_is_asked_nothing() -> Result<()> {
    let (program, gateway, url) = stand(&["dual"], "").await?;
    let client = session(&gateway).await?;
    session_text(&client, "whoami").await?;
    let refused = send(&url, "tools/list", json!({})).await?;
    assert_eq!(
        (refused.status(), body(refused).await?["error"]["data"]["mainstay"].clone()),
        (reqwest::StatusCode::BAD_REQUEST, json!("session_missing"))
    );
    assert_eq!((program.count("server/discover")?, program.starts()?.len()), (0, 1));
    assert_eq!(era(&gateway).await?, "legacy");
    Ok(())
}

#[tokio::test]
async fn e5_a_program_that_exits_when_it_is_asked_is_legacy_and_serves_sessions() -> Result<()> {
    let (program, mut gateway, url) = stand(&["legacy"], "").await?;
    let refused = async || {
        let refused = send(&url, "tools/list", json!({})).await?;
        let status = refused.status().as_u16();
        anyhow::Ok((status, body(refused).await?["error"]["data"]["mainstay"].clone()))
    };
    for _ in 0..2 {
        assert_eq!(refused().await?, (400, json!("session_missing")));
        assert_eq!((program.count("server/discover")?, program.alive()?.len()), (1, 0), "asked once, in vain");
    }
    let client = session(&gateway).await?;
    session_text(&client, "whoami").await?;
    gateway.kill_all().await?;
    gateway.start_again().await?;
    assert_eq!(refused().await?, (400, json!("session_missing")));
    session_text(&client, "whoami").await?;
    assert_eq!((program.count("server/discover")?, program.starts()?.len()), (1, 3));
    Ok(())
}

#[tokio::test]
async fn e5_a_process_that_is_only_asked_is_in_nobodys_way() -> Result<()> {
    // What it holds is free when one is started that serves somebody, and it need not have answered.
    let folder = tempfile::tempdir()?;
    let lock = folder.path().join("lock").display().to_string();
    let locking = UpS::new(&["--lock", &lock])?;
    let gateway = Gateway::start(&locking.toml("p")?, &[]).await?;
    let url = gateway.url("p")?;
    assert_eq!(send(&url, "tools/list", json!({})).await?.status(), 400);
    session_text(&session(&gateway).await?, "whoami").await?;
    assert_eq!(locking.starts()?.len(), 2);

    let (program, gateway, url) = stand(&["silent"], "").await?;
    let asking = tokio::spawn(async move { send(&url, "tools/list", json!({})).await.map(drop) });
    program.wait_heard("server/discover", 1, BOUND).await?;
    session_text(&session(&gateway).await?, "whoami").await?;
    assert_eq!(program.alive()?.len(), 1, "the one that was asked has given way");
    asking.await??;
    Ok(())
}

#[tokio::test]
async fn c1_a_process_that_was_only_asked_does_not_outlive_the_worker_that_did() -> Result<()> {
    let (program, mut gateway, url) = stand(&["mute"], "").await?;
    let asking = tokio::spawn(async move { send(&url, "tools/list", json!({})).await.map(drop) });
    program.wait_heard("server/discover", 1, BOUND).await?;
    gateway.kill_worker().await?;
    wait_until("it to end", BOUND, async || program.alive().is_ok_and(|alive| alive.is_empty())).await?;
    asking.abort();
    Ok(())
}

#[tokio::test]
async fn e1_a_program_on_the_official_sdk_serves_sdk_clients_and_stateless_ones_in_one_process() -> Result<()> {
    let (node, modules) = suite::node()?;
    let environment = modules.ancestors().nth(2).context("no test environment")?;
    let program = repository().join("tests/fixtures/modern-program.mjs");
    let (node, program, environment) = (json!(node), json!([program]), json!(environment));
    let config =
        format!("[servers.p]\ncommand = {node}\nargs = {program}\nenv = {{ MAINSTAY_TEST_ENV = {environment} }}\n");
    let mut gateway = Gateway::start(&config, &[]).await?;
    let url = gateway.url("p")?;
    let mut client = SdkClient::open(SdkKind::Ts2, &url).await?;
    let pid = client.text("whoami", json!({})).await?;
    assert_eq!(text(&url, "whoami", json!({})).await?, pid);
    let meta = json!({"progressToken": "own"});
    let mut steps = send(&url, "tools/call", json!({"name": "steps", "arguments": {}, "_meta": meta})).await?;
    assert!(read_until(&mut steps, "done").await?.contains("\"progressToken\":\"own\""));
    let mut listening = send(&url, "subscriptions/listen", LISTEN.clone()).await?;
    read_until(&mut listening, "acknowledged").await?;
    assert_eq!(client.text("change", json!({})).await?, "done");
    let said = read_until(&mut listening, "list_changed").await?;
    assert!(said.contains("\"io.modelcontextprotocol/subscriptionId\":\"same\""), "{said}");
    gateway.kill_worker().await?;
    assert_eq!((client.text("whoami", json!({})).await?, text(&url, "whoami", json!({})).await?), (pid.clone(), pid));
    client.close().await?;
    Ok(())
}

const MODERN: &str = "era = \"modern\"\n";
static LISTEN: std::sync::LazyLock<Value> =
    std::sync::LazyLock::new(|| json!({"notifications": {"toolsListChanged": true}}));
