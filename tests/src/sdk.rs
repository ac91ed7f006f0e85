//! Programs on real SDKs, in processes of their own, steered by lines of JSON (`tests/clients/README.md`).

mod rust;

pub use rust::RustClient;

use crate::binaries::repository;
use crate::wait::within;
use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

/// Which SDK.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SdkKind {
    /// TypeScript, `@modelcontextprotocol/sdk` of the 1.x line.
    Ts1,
    /// TypeScript, `@modelcontextprotocol/client` of the 2.x line.
    Ts2,
    /// Python, `mcp` of the 1.x line.
    Py1,
    /// Python, `mcp` of the 2.x line, in its sessionful mode.
    Py2,
    /// As [`SdkKind::Ts2`], in the mode that prefers 2026-07-28.
    Ts2Modern,
    /// As [`SdkKind::Py2`], in the mode that prefers 2026-07-28.
    Py2Modern,
}

impl SdkKind {
    /// All that have sessions.
    pub const ALL: [SdkKind; 4] = [SdkKind::Ts1, SdkKind::Ts2, SdkKind::Py1, SdkKind::Py2];

    /// The name of its driver.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            SdkKind::Ts1 => "ts1",
            SdkKind::Ts2 | SdkKind::Ts2Modern => "ts2",
            SdkKind::Py1 => "py1",
            SdkKind::Py2 | SdkKind::Py2Modern => "py2",
        }
    }

    fn interpreter(self) -> PathBuf {
        let environment = std::env::var_os("MAINSTAY_TEST_ENV");
        let environment = environment.map_or_else(|| repository().join("target/test-env"), PathBuf::from);
        match self {
            SdkKind::Ts1 | SdkKind::Ts2 | SdkKind::Ts2Modern => environment.join("node/node_modules/.bin/node"),
            SdkKind::Py1 | SdkKind::Py2 | SdkKind::Py2Modern => environment.join(self.name()).join("bin/python"),
        }
    }

    /// What its driver is told besides the URL.
    fn mode(self) -> Option<&'static str> {
        matches!(self, SdkKind::Ts2Modern | SdkKind::Py2Modern).then_some("auto")
    }

    fn driver(self) -> PathBuf {
        let suffix = match self {
            SdkKind::Ts1 | SdkKind::Ts2 | SdkKind::Ts2Modern => "mjs",
            SdkKind::Py1 | SdkKind::Py2 | SdkKind::Py2Modern => "py",
        };
        repository().join("tests/clients").join(format!("{}.{suffix}", self.name()))
    }
}

/// What a client knows of its session, counted on the wire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SdkSession {
    /// The session id that the client holds.
    pub id: Option<String>,
    /// How many `initialize` requests it has sent.
    pub initializes: u64,
    /// How many different session ids it has seen.
    pub sessions: u64,
}

/// A client in its own process. It is killed when the handle goes: to the server that is a client that went away.
#[derive(Debug)]
pub struct SdkClient {
    kind: SdkKind,
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    /// A line that was begun, kept over a wait that was given up.
    line: Vec<u8>,
    done: HashMap<String, Value>,
}

impl SdkClient {
    /// Starts a client for this URL. It does not connect yet.
    ///
    /// # Errors
    /// If the test environment is not installed.
    pub fn start(kind: SdkKind, url: &str) -> Result<SdkClient> {
        let interpreter = kind.interpreter();
        ensure!(interpreter.is_file(), "no `{}`: run `scripts/test-env` first", interpreter.display());
        let mut child = Command::new(interpreter)
            .arg(kind.driver())
            .arg(url)
            .args(kind.mode())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()?;
        let stdin = child.stdin.take().context("no standard input")?;
        let stdout = BufReader::new(child.stdout.take().context("no standard output")?);
        Ok(SdkClient { kind, child, stdin, stdout, line: Vec::new(), done: HashMap::new() })
    }

    /// Starts a client and connects it.
    ///
    /// # Errors
    /// If it cannot connect.
    pub async fn open(kind: SdkKind, url: &str) -> Result<SdkClient> {
        let mut client = SdkClient::start(kind, url)?;
        let connected = client.connect().await?;
        ensure!(connected["ok"] == true, "{} could not connect: {connected}", kind.name());
        Ok(client)
    }

    /// Connects: `{"ok", "session", "protocol", "server"}`.
    ///
    /// # Errors
    /// If the client does not answer.
    pub async fn connect(&mut self) -> Result<Value> {
        self.command(json!({"op": "connect"})).await
    }

    /// Calls a tool: `{"ok": true, "text", "isError", "meta"}` or `{"ok": false, "error", "code", "data"}`.
    ///
    /// # Errors
    /// If the client does not answer.
    pub async fn call(&mut self, tool: &str, args: Value) -> Result<Value> {
        self.command(json!({"op": "call", "tool": tool, "args": args})).await
    }

    /// Calls a tool that must succeed, and returns its text.
    ///
    /// # Errors
    /// If it does not succeed.
    pub async fn text(&mut self, tool: &str, args: Value) -> Result<String> {
        let answer = self.call(tool, args).await?;
        match answer["text"].as_str() {
            Some(text) if answer["ok"] == true && answer["isError"] != true => Ok(text.to_owned()),
            _ => bail!("{}: `{tool}` failed: {answer}", self.kind.name()),
        }
    }

    /// Begins a call and does not wait for its end; [`SdkClient::done`] does.
    ///
    /// # Errors
    /// If the client does not answer.
    pub async fn call_start(&mut self, tool: &str, args: Value, tag: &str) -> Result<()> {
        let answer =
            self.command(json!({"op": "call_start", "tool": tool, "args": args, "tag": tag, "progress": true})).await?;
        ensure!(answer["ok"] == true, "{}: `{tool}` was not begun: {answer}", self.kind.name());
        Ok(())
    }

    /// Waits for the end of a call that was begun, and returns what [`SdkClient::call`] would.
    ///
    /// # Errors
    /// If it does not end within the bound.
    pub async fn done(&mut self, tag: &str, bound: Duration) -> Result<Value> {
        let what = format!("the end of the call `{tag}`");
        within(&what, bound, async {
            loop {
                if let Some(answer) = self.done.remove(tag) {
                    return Ok(answer);
                }
                if let Some(answer) = self.read().await? {
                    bail!("an answer that nobody asked for: {answer}");
                }
            }
        })
        .await
    }

    /// The names of the tools.
    ///
    /// # Errors
    /// If they cannot be listed.
    pub async fn list(&mut self) -> Result<Vec<String>> {
        let answer = self.command(json!({"op": "list"})).await?;
        let tools = answer["tools"].as_array().with_context(|| format!("no list: {answer}"))?;
        Ok(tools.iter().filter_map(Value::as_str).map(str::to_owned).collect())
    }

    /// What the client knows of its session.
    ///
    /// # Errors
    /// If the client does not answer.
    pub async fn session(&mut self) -> Result<SdkSession> {
        let answer = self.command(json!({"op": "session"})).await?;
        let count = |name: &str| answer[name].as_u64().with_context(|| format!("no `{name}`: {answer}"));
        Ok(SdkSession {
            id: answer["session"].as_str().map(str::to_owned),
            initializes: count("initializes")?,
            sessions: count("sessions")?,
        })
    }

    /// The notifications received so far.
    ///
    /// # Errors
    /// If the client does not answer.
    pub async fn notifications(&mut self) -> Result<Vec<Value>> {
        let answer = self.command(json!({"op": "notifications"})).await?;
        answer["notifications"].as_array().cloned().with_context(|| format!("no notifications: {answer}"))
    }

    /// Asks for the changes of a resource, and of the tools, in the way of the era that the client speaks. Those of the
    /// 2.x lines can.
    ///
    /// # Errors
    /// If it is refused.
    pub async fn listen(&mut self, uri: &str) -> Result<()> {
        let answer = self.command(json!({"op": "listen", "uri": uri})).await?;
        ensure!(answer["ok"] == true, "{}: it can't listen: {answer}", self.kind.name());
        Ok(())
    }

    /// What the program was told of the progress of its calls.
    ///
    /// # Errors
    /// If the client does not answer, or does not tell.
    pub async fn progress(&mut self) -> Result<Vec<f64>> {
        let answer = self.command(json!({"op": "notifications"})).await?;
        let told = answer["progress"].as_array().with_context(|| format!("no progress: {answer}"))?;
        Ok(told.iter().filter_map(Value::as_f64).collect())
    }

    /// How many events with an id the client has got on the streams of calls that were begun; that a stream was opened
    /// and each time that it was resumed is one. The TypeScript client of the first generation tells.
    ///
    /// # Errors
    /// If the client does not answer, or does not tell.
    pub async fn cursors(&mut self) -> Result<u64> {
        let answer = self.command(json!({"op": "notifications"})).await?;
        answer["cursors"].as_u64().with_context(|| format!("no count: {answer}"))
    }

    /// The methods of the server's questions so far, in order.
    ///
    /// # Errors
    /// If the client does not answer.
    pub async fn asked(&mut self) -> Result<Vec<String>> {
        let answer = self.command(json!({"op": "notifications"})).await?;
        let asked = answer["requests"].as_array().with_context(|| format!("no requests: {answer}"))?;
        Ok(asked.iter().filter_map(Value::as_str).map(str::to_owned).collect())
    }

    /// Sets how the server's requests for samples are answered; `null` leaves them open.
    ///
    /// # Errors
    /// If the client does not answer.
    pub async fn sample(&mut self, answer: Value) -> Result<()> {
        self.command(json!({"op": "sample", "answer": answer})).await.map(drop)
    }

    /// Sets how forms of the server are answered; `null` leaves them open.
    ///
    /// # Errors
    /// If the client does not answer.
    pub async fn elicit(&mut self, answer: Value) -> Result<()> {
        self.command(json!({"op": "elicit", "answer": answer})).await.map(drop)
    }

    /// Closes as the SDK does, with a DELETE where it sends one, and waits for the end of the process.
    ///
    /// # Errors
    /// If the client does not end.
    pub async fn close(mut self) -> Result<Value> {
        let answer = self.command(json!({"op": "close"})).await?;
        within("the end of an SDK client", COMMAND_BOUND, async { Ok(self.child.wait().await?) }).await?;
        Ok(answer)
    }

    /// Sends any command and returns its answer.
    ///
    /// # Errors
    /// If the client does not answer within its bound.
    pub async fn command(&mut self, command: Value) -> Result<Value> {
        let what = format!("{}: {command}", self.kind.name());
        within(&what, COMMAND_BOUND, async {
            self.stdin.write_all(format!("{command}\n").as_bytes()).await?;
            self.answer().await
        })
        .await
    }

    /// The answer to a command. Ends of calls that come before it are put aside.
    async fn answer(&mut self) -> Result<Value> {
        loop {
            if let Some(answer) = self.read().await? {
                return Ok(answer);
            }
        }
    }

    /// Reads one line; none if it was the end of a call, which is put aside.
    async fn read(&mut self) -> Result<Option<Value>> {
        let line = self.next_line().await?;
        let answer: Value = serde_json::from_slice(&line).context("a client said no JSON")?;
        let Some(tag) = answer["done"].as_str() else {
            return Ok(Some(answer));
        };
        self.done.insert(tag.to_owned(), answer.clone());
        Ok(None)
    }

    /// Safe to be given up: what was read stays.
    async fn next_line(&mut self) -> Result<Vec<u8>> {
        let read = self.stdout.read_until(b'\n', &mut self.line).await?;
        ensure!(read > 0, "{} has ended", self.kind.name());
        Ok(std::mem::take(&mut self.line))
    }
}

/// Longer than the longest time limit of the SDKs themselves.
const COMMAND_BOUND: Duration = Duration::from_secs(90);
