//! Calls of stateless clients that outlive their clients and the worker as tasks (SEP-2663, E4).

use anyhow::{Context as _, Result, bail, ensure};
use mainstay_tests::{Gateway, StatelessClient, UpH, UpS, age_streams, wait_until};
use serde_json::{Value, json};
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::Command;

const BOUND: Duration = Duration::from_secs(60);
const TASKS: &str = "io.modelcontextprotocol/tasks";

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

    /// A client that can be answered by tasks, and be asked.
    fn client(&self, server: &str) -> Result<StatelessClient> {
        Ok(StatelessClient::new(&self.gateway.url(server)?)?.with_capabilities(able()))
    }

    /// What the server knows of its session, told to a client that no task is made for.
    async fn whoami(&self, server: &str) -> Result<Value> {
        let client = StatelessClient::new(&self.gateway.url(server)?)?.with_capabilities(json!({"elicitation": {}}));
        Ok(serde_json::from_str(&client.call("whoami", json!({})).await?)?)
    }

    /// How often the server was called `tool`.
    async fn calls(&self, server: &str, tool: &str) -> Result<u64> {
        if server == "h" {
            return self.up_h.executions(tool).await;
        }
        let calls = self.up_s.trace()?.iter().filter(|entry| entry["line"]["params"]["name"] == tool).count();
        Ok(u64::try_from(calls)?)
    }

    /// How often the server was told that a call is cancelled.
    async fn cancelled(&self, server: &str) -> u64 {
        if server == "h" {
            return self.up_h.count("/cancelled").await.unwrap_or_default();
        }
        let trace = self.up_s.trace().unwrap_or_default();
        trace.iter().filter(|entry| entry["line"]["method"] == "notifications/cancelled").count() as u64
    }
}

fn able() -> Value {
    json!({"elicitation": {}, "extensions": {TASKS: {}}})
}

fn slow() -> Value {
    json!({"name": "slow", "arguments": {"ms": 600_000}})
}

fn asking() -> Value {
    json!({"name": "ask", "arguments": {"message": "sure?", "timeout_ms": 600_000}})
}

fn id_of(task: &Value) -> Result<Value> {
    ensure!(task["resultType"] == "task" && task["status"] == "working", "no task: {task}");
    Ok(json!({"taskId": task["taskId"]}))
}

/// The task once it stands like that.
async fn reached(client: &StatelessClient, task: &Value, status: &str) -> Result<Value> {
    let mut seen = Value::Null;
    wait_until(&format!("the task to be {status}"), BOUND, async || {
        match client.result("tasks/get", task.clone()).await {
            Ok(state) => seen = state,
            Err(error) => seen = json!(error.to_string()),
        }
        seen["status"] == status
    })
    .await
    .with_context(|| seen.to_string())?;
    Ok(seen)
}

#[tokio::test]
async fn e4_a_long_call_declared_as_a_task_survives_the_death_of_the_worker_and_of_its_client() -> Result<()> {
    let mut stand = Stand::new().await?;
    let mut running = Vec::new();
    for server in ["h", "s"] {
        let before = stand.whoami(server).await?;
        let client = stand.client(server)?;
        let params = json!({"name": "prog", "arguments": {"n": 200, "delay_ms": 50}, "_meta": {"progressToken": 1}});
        let mut calling = client.begin("tools/call", params).await?;
        let made = calling.response_message().await?["result"].clone();
        assert!(made["ttlMs"].is_u64() && made["pollIntervalMs"].is_u64() && made.get("result").is_none(), "{made}");
        let task = id_of(&made)?;
        wait_until("word of how far it is", BOUND, async || {
            let state = client.result("tasks/get", task.clone()).await.unwrap_or_default();
            state["status"] == "completed"
                || state["statusMessage"].as_str().is_some_and(|said| said.starts_with("step "))
        })
        .await?;
        drop((calling, client));
        running.push((server, before, made, task));
    }
    stand.gateway.kill_worker().await?;
    for again in [false, true] {
        for (server, before, made, task) in &running {
            let client = stand.client(server)?;
            let done = reached(&client, task, "completed").await?;
            assert_eq!(done["result"]["content"][0]["text"], "200 steps done", "{done}");
            assert_eq!((&done["createdAt"], &done["taskId"]), (&made["createdAt"], &made["taskId"]));
            let after = stand.whoami(server).await?;
            assert_eq!((&after["pid"], &after["session"]), (&before["pid"], &before["session"]), "{server}");
            assert_eq!(stand.calls(server, "prog").await?, 1, "{server}: called once");
            assert_eq!(stand.cancelled(server).await, 0, "{server}: nobody's going away cancels a task");
        }
        if !again {
            // What was fetched once is kept.
            stand.gateway.kill_worker().await?;
        }
    }
    Ok(())
}

/// Calls a tool once, tells what it is answered with, and stays.
const CALLER: &str = "
import sys, time, urllib.request
headers = dict(pair.split('=', 1) for pair in sys.argv[2:])
answer = urllib.request.urlopen(urllib.request.Request(sys.argv[1], sys.stdin.buffer.read(), headers))
for line in answer:
    print(line.decode().strip().removeprefix('data:').strip(), flush=True)
time.sleep(600)
";

#[tokio::test]
async fn e4_a_task_survives_sigkill_of_its_clients_process_and_of_the_worker() -> Result<()> {
    let mut stand = Stand::new().await?;
    for server in ["h", "s"] {
        let client = stand.client(server)?;
        let params = json!({"name": "prog", "arguments": {"n": 60, "delay_ms": 50}});
        let mut process = Command::new("python3")
            .args(["-c", CALLER, &stand.gateway.url(server)?])
            .args(["Accept=application/json, text/event-stream", "Content-Type=application/json"])
            .args(["MCP-Protocol-Version=2026-07-28", "Mcp-Method=tools/call", "Mcp-Name=prog"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let message = client.message("tools/call", params).to_string();
        process.stdin.take().context("its input")?.write_all(message.as_bytes()).await?;
        let mut said = BufReader::new(process.stdout.take().context("its output")?).lines();
        let answer = tokio::time::timeout(BOUND, async {
            while let Some(line) = said.next_line().await? {
                if let Ok(answer) = serde_json::from_str::<Value>(&line) {
                    return Ok(answer);
                }
            }
            bail!("the client said nothing")
        })
        .await??;
        let task = id_of(&answer["result"])?;
        // SIGKILL, as the worker below.
        process.kill().await?;
        stand.gateway.kill_worker().await?;
        let done = reached(&stand.client(server)?, &task, "completed").await?;
        assert_eq!(done["result"]["content"][0]["text"], "60 steps done", "{done}");
        assert_eq!(stand.calls(server, "prog").await?, 1, "{server}: called once");
    }
    Ok(())
}

#[tokio::test]
async fn e4_a_task_is_made_only_of_a_slow_call_of_a_client_that_knows_what_that_is() -> Result<()> {
    let stand = Stand::new().await?;
    for server in ["h", "s"] {
        let client = stand.client(server)?;
        let found = client.result("server/discover", json!({})).await?;
        assert_eq!(found["capabilities"]["extensions"], json!({TASKS: {}}));
        assert!(found["capabilities"].get("tasks").is_none());
        // Early is what comes within half a second, which a busy machine takes now and then.
        wait_until("an early answer", BOUND, async || {
            let early = client.result("tools/call", json!({"name": "echo", "arguments": {"text": "e"}})).await;
            early.is_ok_and(|early| early["resultType"] == "complete" && early.get("taskId").is_none())
        })
        .await?;

        let plain = StatelessClient::new(&stand.gateway.url(server)?)?;
        let late = plain.result("tools/call", json!({"name": "slow", "arguments": {"ms": 1500}})).await?;
        assert_eq!((&late["resultType"], &late["content"][0]["text"]), (&json!("complete"), &json!("waited 1500 ms")));
        let task = id_of(&client.result("tools/call", slow()).await?)?;
        for method in ["tasks/get", "tasks/update", "tasks/cancel"] {
            let (status, refused) = plain.request(method, task.clone()).await?;
            assert_eq!((status, &refused["error"]["code"]), (400, &json!(-32021)), "{method}: {refused}");
            let required = &refused["error"]["data"]["requiredCapabilities"];
            assert_eq!(required, &json!({"extensions": {TASKS: {}}}));
        }
        for method in ["tasks/list", "tasks/result"] {
            let (status, refused) = client.request(method, task.clone()).await?;
            assert_eq!((status, &refused["error"]["code"]), (404, &json!(-32601)), "{method}: {refused}");
        }
        assert_eq!(client.result("tasks/get", task).await?["status"], "working");
    }
    Ok(())
}

#[tokio::test]
async fn e4_a_task_is_its_own_principals_alone_and_only_at_its_server() -> Result<()> {
    let (one, other) = (UpS::new(&[])?, UpS::new(&[])?);
    let auth =
        "[auth]\nmode = \"token\"\n[auth.tokens]\namy = \"amy-token-0123456789\"\nbob = \"bob-token-0123456789\"\n";
    let offer = "offer = \"both\"\n";
    let config = format!("{}{offer}{}{offer}{auth}", one.toml("s")?, other.toml("t")?);
    let gateway = Gateway::start(&config, &[]).await?;
    let of = |server: &str, token: &str| -> Result<StatelessClient> {
        Ok(StatelessClient::new(&gateway.url(server)?)?.with_bearer(token).with_capabilities(able()))
    };
    let (amy, bob) = (of("s", "amy-token-0123456789")?, of("s", "bob-token-0123456789")?);
    let elsewhere = of("t", "amy-token-0123456789")?;
    let task = id_of(&amy.result("tools/call", slow()).await?)?;
    let forged = json!({"taskId": format!("{}A", task["taskId"].as_str().context("a text")?)});
    for (client, named) in [(&bob, &task), (&elsewhere, &task), (&amy, &forged), (&amy, &json!({"taskId": "none"}))] {
        for method in ["tasks/get", "tasks/update", "tasks/cancel"] {
            let (status, refused) = client.request(method, named.clone()).await?;
            assert_eq!((status, &refused["error"]["code"]), (200, &json!(-32602)), "{method}: {refused}");
        }
    }
    assert_eq!(amy.result("tasks/get", task.clone()).await?["status"], "working");
    Ok(())
}

#[tokio::test]
async fn e4_a_cancelled_task_stays_cancelled_and_its_server_hears_of_it() -> Result<()> {
    let mut stand = Stand::new().await?;
    for server in ["h", "s"] {
        let client = stand.client(server)?;
        for (told, kill_first) in [(1, false), (2, true)] {
            let task = id_of(&client.result("tools/call", slow()).await?)?;
            if kill_first {
                stand.gateway.kill_worker().await?;
            }
            let acknowledged = client.result("tasks/cancel", task.clone()).await?;
            assert_eq!(acknowledged["resultType"], "complete");
            assert!(acknowledged.get("status").is_none(), "{acknowledged}");
            wait_until("the server to hear of it", BOUND, async || stand.cancelled(server).await == told).await?;
            stand.gateway.kill_worker().await?;
            assert_eq!(client.result("tasks/get", task.clone()).await?["status"], "cancelled", "{server} {kill_first}");
            assert_eq!(client.result("tasks/cancel", task.clone()).await?["resultType"], "complete");
            assert_eq!(client.result("tasks/get", task).await?["status"], "cancelled", "{server} {kill_first}");
        }
        assert_eq!(stand.calls(server, "slow").await?, 2);
    }
    Ok(())
}

#[tokio::test]
async fn e4_what_a_task_asks_is_answered_once_even_over_the_death_of_the_worker() -> Result<()> {
    let mut stand = Stand::new().await?;
    for server in ["h", "s"] {
        let client = stand.client(server)?;
        let task = id_of(&client.result("tools/call", asking()).await?)?;
        let before = reached(&client, &task, "input_required").await?;
        stand.gateway.kill_worker().await?;
        let asked = reached(&client, &task, "input_required").await?;
        assert_eq!(asked["inputRequests"], before["inputRequests"], "{server}");
        let requests = asked["inputRequests"].as_object().context("questions")?;
        let (key, question) = requests.iter().next().context("a question")?;
        assert_eq!(
            (&question["method"], &question["params"]["message"]),
            (&json!("elicitation/create"), &json!("sure?"))
        );
        let mut answer = task.clone();
        answer["inputResponses"] = json!({key: {"action": "accept", "content": {"answer": "forty-two"}}, "q": {}});
        for _ in 0..2 {
            assert_eq!(client.result("tasks/update", answer.clone()).await?["resultType"], "complete");
        }
        let done = reached(&client, &task, "completed").await?;
        assert!(done["result"].to_string().contains("forty-two"), "{done}");
        assert_eq!(stand.calls(server, "ask").await?, 1);
    }
    let answers = stand.up_s.trace()?.iter().filter(|entry| entry["line"]["result"]["action"] == "accept").count();
    assert_eq!(answers, 1);
    Ok(())
}

#[tokio::test]
async fn e4_a_task_is_no_call_that_somebody_had_to_come_back_for() -> Result<()> {
    let mut stand = Stand::new().await?;
    for server in ["h", "s"] {
        let client = stand.client(server)?;
        let task = id_of(&client.result("tools/call", slow()).await?)?;
        let other = stand.client(server)?.with_capabilities(json!({"elicitation": {}}));
        let asked = other.result("tools/call", asking()).await?;
        ensure!(asked["resultType"] == "input_required", "{asked}");
        age_streams(&stand.gateway.state_dir())?;
        stand.gateway.kill_worker().await?;
        stand.whoami(server).await?;
        wait_until("the other call to be cancelled", BOUND, async || stand.cancelled(server).await == 1).await?;
        reached(&client, &task, "working").await?;
        assert_eq!(stand.cancelled(server).await, 1, "{server}");
    }
    Ok(())
}

#[tokio::test]
async fn e4_a_task_whose_server_is_gone_has_failed_with_an_unknown_outcome() -> Result<()> {
    let mut stand = Stand::new().await?;
    let client = stand.client("s")?;
    let task = id_of(&client.result("tools/call", slow()).await?)?;
    stand.gateway.kill_all().await?;
    stand.gateway.start_again().await?;
    let failed = reached(&stand.client("s")?, &task, "failed").await?;
    assert_eq!(failed["error"]["data"]["mainstay"], "outcome_unknown", "{failed}");
    assert!(failed.get("result").is_none());
    assert_eq!(stand.calls("s", "slow").await?, 1, "it is not called again");
    Ok(())
}

#[tokio::test]
async fn t2_a_task_outlives_a_handover_and_its_answer_finds_who_asked() -> Result<()> {
    let mut stand = Stand::new().await?;
    let mut tasks = Vec::new();
    for server in ["h", "s"] {
        let client = stand.client(server)?;
        let task = id_of(&client.result("tools/call", asking()).await?)?;
        tasks.push((server, reached(&client, &task, "input_required").await?, task));
    }
    let before = stand.gateway.worker().await?;
    let offer = "offer = \"both\"\n";
    let config = format!("{}{offer}{}{offer}patience = \"9s\"\n", stand.up_h.toml("h"), stand.up_s.toml("s")?);
    stand.gateway.rewrite_config(&config)?;
    let output = stand.gateway.cli(&["reload"]).await?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(stand.gateway.next_worker(before).await?.number > before.number);
    for (server, asked, task) in &tasks {
        let client = stand.client(server)?;
        let again = reached(&client, task, "input_required").await?;
        assert_eq!(again["inputRequests"], asked["inputRequests"], "{server}");
        let key = asked["inputRequests"].as_object().and_then(|asked| asked.keys().next()).context("a question")?;
        let mut answer = task.clone();
        answer["inputResponses"] = json!({key: {"action": "accept", "content": {"answer": "forty-two"}}});
        client.result("tasks/update", answer).await?;
        let done = reached(&client, task, "completed").await?;
        assert!(done["result"].to_string().contains("forty-two"), "{server}: {done}");
        assert_eq!(stand.calls(server, "ask").await?, 1);
    }
    Ok(())
}
