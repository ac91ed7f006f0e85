//! Real SDK clients over a dying worker, a reload and a forgetful server: one session, one `initialize`, no second
//! execution. What each of them sees is written down in `docs/clients.md`.

use anyhow::{Context as _, Result, bail, ensure};
use futures_util::future::try_join_all;
use mainstay_tests::{Gateway, RustClient, SdkClient, SdkKind, UpH, UpS, wait_until};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const BOUND: Duration = Duration::from_secs(60);

/// A client, whatever it is made of.
enum Client {
    Program(SdkKind, Box<SdkClient>),
    Rust(Box<RustClient>),
}

impl Client {
    async fn open(kind: Option<SdkKind>, url: &str) -> Result<Client> {
        let Some(kind) = kind else {
            return Ok(Client::Rust(Box::new(RustClient::open(url).await?)));
        };
        let mut client = SdkClient::open(kind, url).await?;
        client.elicit(Value::Null).await?;
        client.sample(Value::Null).await?;
        Ok(Client::Program(kind, Box::new(client)))
    }

    fn name(&self) -> &'static str {
        match self {
            Client::Program(kind, _) => kind.name(),
            Client::Rust(_) => "rmcp",
        }
    }

    async fn start(&mut self, tool: &str, args: Value, tag: &str) -> Result<()> {
        match self {
            Client::Program(_, client) => client.call_start(tool, args, tag).await?,
            Client::Rust(client) => client.call_start(tool, args, tag),
        }
        Ok(())
    }

    async fn text(&mut self, tool: &str, args: Value) -> Result<String> {
        match self {
            Client::Program(_, client) => client.text(tool, args).await,
            Client::Rust(client) => client.text(tool, args).await,
        }
    }

    async fn asked(&mut self) -> Result<usize> {
        Ok(match self {
            Client::Program(_, client) => client.asked().await?.len(),
            Client::Rust(client) => usize::try_from(client.asked())?,
        })
    }

    async fn answer(&mut self) -> Result<()> {
        let form = json!({"action": "accept", "content": {"answer": FORM}});
        let sample = json!({"role": "assistant", "model": "m", "content": {"type": "text", "text": SAMPLE}});
        match self {
            Client::Program(_, client) => {
                client.elicit(form).await?;
                client.sample(sample).await?;
            }
            Client::Rust(client) => client.answer(form, sample),
        }
        Ok(())
    }

    async fn done(&mut self, tag: &str) -> Result<Value> {
        match self {
            Client::Program(_, client) => client.done(tag, BOUND).await,
            Client::Rust(client) => client.done(tag, BOUND).await,
        }
    }

    /// How often it has initialized, where that is counted on the wire.
    async fn initializes(&mut self) -> Result<u64> {
        match self {
            Client::Program(_, client) => Ok(client.session().await?.initializes),
            Client::Rust(_) => Ok(1),
        }
    }
}

const FORM: &str = "forty-two";
const SAMPLE: &str = "forty-three";
const CALLS: [&str; 3] = ["slow", "elicitation", "sampling"];
const CLIENTS: usize = 5;

/// What stands behind the gateway.
enum Server {
    Stdio(UpS),
    Http(Box<UpH>),
}

impl Server {
    async fn start(name: &str) -> Result<Server> {
        if name == "stdio" {
            return Ok(Server::Stdio(UpS::new(&[])?));
        }
        let up = UpH::start().await?;
        up.answer(if name == "http" { "json" } else { "sse-with-ids" }).await?;
        Ok(Server::Http(Box::new(up)))
    }

    fn toml(&self) -> Result<String> {
        match self {
            Server::Stdio(up) => up.toml("x"),
            Server::Http(up) => Ok(up.toml("x")),
        }
    }

    /// The messages that the server got.
    async fn heard(&self) -> Result<Vec<Value>> {
        Ok(match self {
            Server::Stdio(up) => up.trace()?.iter().map(|entry| entry["line"].clone()).collect(),
            Server::Http(up) => up.log().await?.iter().map(|entry| entry["body"].clone()).collect(),
        })
    }

    async fn calls(&self, tool: &str) -> Result<usize> {
        let heard = self.heard().await?;
        Ok(heard
            .iter()
            .filter(|message| message["method"] == "tools/call" && message["params"]["name"] == tool)
            .count())
    }

    /// The answers to its questions.
    async fn answers(&self) -> Result<usize> {
        let heard = self.heard().await?;
        Ok(heard.iter().filter(|message| message["id"].as_str().is_some() && message["result"].is_object()).count())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Kill,
    Reload,
}

async fn happen(gateway: &mut Gateway, event: Event, config: &str) -> Result<()> {
    if event == Event::Kill {
        return gateway.kill_worker().await.map(drop);
    }
    gateway.rewrite_config(&format!("{config}suspend_after = \"29m\"\n"))?;
    let output = gateway.cli(&["reload"]).await?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Five clients with three calls each in flight, one slow and two that ask the user, who answers only after the event.
/// Everything is to be carried through, or, where `known` is false, told to be unknown.
async fn carried(name: &str, event: Event, known: bool) -> Result<()> {
    let server = Server::start(name).await?;
    // The grace is for what only the worker that gives way can bring to an end.
    let config = format!("{}[session]\ndrain_grace = \"15s\"\n", server.toml()?);
    let mut gateway = Gateway::start(&config, &[]).await?;
    let url = gateway.url("x")?;
    let kinds = SdkKind::ALL.into_iter().map(Some).chain([None]);
    let mut clients = try_join_all(kinds.map(|kind| Client::open(kind, &url))).await?;
    for client in &mut clients {
        for kind in &CALLS[1..] {
            let args = json!({"kind": kind, "message": "sure?", "timeout_ms": 120_000});
            client.start("ask", args, kind).await?;
        }
    }
    wait_until("all of them ask", BOUND, async || server.calls("ask").await.is_ok_and(|calls| calls == CLIENTS * 2))
        .await?;
    for client in &mut clients {
        // One of them puts one question at a time before its user.
        wait_until("a question is there", BOUND, async || client.asked().await.is_ok_and(|asked| asked > 0))
            .await
            .context(client.name())?;
    }
    for client in &mut clients {
        client.start("slow", json!({"ms": 4000}), "slow").await?;
    }
    wait_until("all calls run", BOUND, async || server.calls("slow").await.is_ok_and(|calls| calls == CLIENTS)).await?;
    // A client whose response has not begun has nothing to come back with.
    let streams = 1 + CALLS.len() as u64;
    wait_until("each client reads its listening stream and those of its calls", BOUND, async || {
        let (_, shown) = gateway.admin_get("/api/v1/sessions").await.unwrap_or_default();
        let sessions = shown["sessions"].as_array().map_or(&[][..], Vec::as_slice);
        sessions.len() == CLIENTS && sessions.iter().all(|session| session["streams"] == streams)
    })
    .await?;
    let stored = gateway.status().await?["sessions"]["stored"].clone();
    let since = Instant::now();
    happen(&mut gateway, event, &config).await?;
    for client in &mut clients {
        client.answer().await?;
    }
    for client in &mut clients {
        for call in CALLS {
            let done = client.done(call).await.with_context(|| format!("{} {call}", client.name()))?;
            note(&format!(
                "{} | {name} | {event:?} | {call} | {} | {:.1?}",
                client.name(),
                seen(&done),
                since.elapsed()
            ));
            expect(call, known, &done).with_context(|| format!("{} on {name}: {call}", client.name()))?;
        }
        ensure!(client.text("echo", json!({"text": "afterwards"})).await? == "afterwards", "{}", client.name());
        ensure!(client.asked().await? == 2, "{}: no question comes twice", client.name());
        ensure!(client.initializes().await? == 1, "{}: one `initialize`", client.name());
    }
    ensure!(gateway.status().await?["sessions"]["stored"] == stored, "no other session was opened");
    ensure!(server.calls("slow").await? == CLIENTS, "each call ran once");
    ensure!(server.calls("ask").await? == 2 * CLIENTS, "each call ran once");
    ensure!(server.answers().await? == 2 * CLIENTS, "each question was answered once");
    Ok(())
}

/// What a client was told, in a word.
fn seen(done: &Value) -> String {
    match (done["ok"] == true, done["isError"] == true) {
        (true, false) => "answer".to_owned(),
        (true, true) => format!("failed: {}", done["text"]),
        (false, _) => format!("error {} {}: {}", done["code"], done["data"]["mainstay"], done["error"]),
    }
}

fn expect(call: &str, known: bool, done: &Value) -> Result<()> {
    if !known {
        ensure!(done["ok"] == false, "it can't be known: {done}");
        ensure!(done["data"]["mainstay"] == "outcome_unknown", "{done}");
        return Ok(());
    }
    let text = match call {
        "slow" => "waited 4000 ms",
        "elicitation" => FORM,
        "sampling" => SAMPLE,
        other => bail!("no call `{other}`"),
    };
    ensure!(done["ok"] == true && done["isError"] != true, "{done}");
    ensure!(done["text"].as_str().is_some_and(|seen| seen.contains(text)), "{done}");
    Ok(())
}

/// One row of the table in `docs/clients.md`, for `--nocapture`.
#[expect(clippy::print_stderr, reason = "the test runner shows it to who asks for it")]
fn note(row: &str) {
    eprintln!("row | {row}");
}

#[tokio::test]
async fn c8_r6_stdio_five_clients_are_carried_through_a_kill() -> Result<()> {
    carried("stdio", Event::Kill, true).await
}

#[tokio::test]
async fn r4_http_five_clients_are_told_what_a_kill_made_unknown() -> Result<()> {
    carried("http", Event::Kill, false).await
}

#[tokio::test]
async fn r4_r6_http_with_event_ids_five_clients_are_carried_through_a_kill() -> Result<()> {
    carried("http-ids", Event::Kill, true).await
}

#[tokio::test]
async fn t3_r6_stdio_five_clients_are_carried_through_a_reload() -> Result<()> {
    carried("stdio", Event::Reload, true).await
}

#[tokio::test]
async fn t3_r6_http_five_clients_are_carried_through_a_reload() -> Result<()> {
    carried("http", Event::Reload, true).await
}

#[tokio::test]
async fn t3_r6_http_with_event_ids_five_clients_are_carried_through_a_reload() -> Result<()> {
    carried("http-ids", Event::Reload, true).await
}

/// Call, kill the worker, three more calls; the same with the server behind it restarted.
async fn outlives(kind: Option<SdkKind>) -> Result<()> {
    let (mut up_h, up_s) = (UpH::start().await?, UpS::new(&[])?);
    let mut gateway = Gateway::start(&format!("{}{}", up_h.toml("h"), up_s.toml("s")?), &[]).await?;
    for server in ["h", "s"] {
        let mut client = Client::open(kind, &gateway.url(server)?).await?;
        let opened = gateway.status().await?["sessions"]["stored"].clone();
        ensure!(client.text("echo", json!({"text": "before"})).await? == "before");
        gateway.kill_worker().await?;
        for round in ["one", "two", "three"] {
            ensure!(client.text("echo", json!({"text": round})).await? == round, "{server}: {round}");
        }
        if server == "h" {
            up_h.kill().await?;
            up_h.start_again().await?;
            for round in ["four", "five", "six"] {
                ensure!(client.text("echo", json!({"text": round})).await? == round, "{server}: {round}");
            }
        }
        ensure!(client.initializes().await? == 1, "{server}");
        // A client that had initialized again would have left a second session.
        ensure!(gateway.status().await?["sessions"]["stored"] == opened, "{server}: no other session was opened");
        match client {
            Client::Program(_, mut client) => {
                ensure!(client.session().await?.sessions == 1, "{server}: one id");
                client.close().await?;
            }
            Client::Rust(client) => client.close().await?,
        }
    }
    Ok(())
}

#[tokio::test]
async fn typescript_1_notices_nothing() -> Result<()> {
    outlives(Some(SdkKind::Ts1)).await
}

#[tokio::test]
async fn typescript_2_notices_nothing() -> Result<()> {
    outlives(Some(SdkKind::Ts2)).await
}

#[tokio::test]
async fn python_1_notices_nothing() -> Result<()> {
    outlives(Some(SdkKind::Py1)).await
}

#[tokio::test]
async fn python_2_notices_nothing() -> Result<()> {
    outlives(Some(SdkKind::Py2)).await
}

#[tokio::test]
async fn rmcp_notices_nothing() -> Result<()> {
    outlives(None).await
}
