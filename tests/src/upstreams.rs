//! Handles by which tests start and steer the scriptable servers.

use crate::ports::lasting_port;
use crate::wait::within;
use crate::{binaries, wait};
use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

/// A running UP-H. It is killed when the handle goes, and ends with the test's process in any case.
#[derive(Debug)]
pub struct UpH {
    port: u16,
    control: u16,
    flags: Vec<String>,
    child: Child,
    http: reqwest::Client,
    dir: TempDir,
}

impl UpH {
    /// Starts a well-behaved server on free ports.
    ///
    /// # Errors
    /// If it does not start.
    pub async fn start() -> Result<UpH> {
        UpH::start_with(&[]).await
    }

    /// Starts a server with more flags.
    ///
    /// # Errors
    /// If it does not start.
    pub async fn start_with(flags: &[&str]) -> Result<UpH> {
        let dir = TempDir::with_prefix("up-h-")?;
        let flags: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
        // While it refuses connections or is down, nobody else is to be given its port.
        let ports = (lasting_port()?.port(), lasting_port()?.port());
        let (child, port, control) = spawn_up_h(&dir, &flags, ports).await?;
        let http = reqwest::Client::builder().no_proxy().build()?;
        Ok(UpH { port, control, flags, child, http, dir })
    }

    /// Kills the process. The handle stays, for [`UpH::start_again`].
    ///
    /// # Errors
    /// If the system refuses.
    pub async fn kill(&mut self) -> Result<()> {
        Ok(self.child.kill().await?)
    }

    /// Starts a new process on the same ports after [`UpH::kill`]: all sessions and orders are gone.
    ///
    /// # Errors
    /// If it does not start.
    pub async fn start_again(&mut self) -> Result<()> {
        let (child, ..) = spawn_up_h(&self.dir, &self.flags, (self.port, self.control)).await?;
        self.child = child;
        Ok(())
    }

    /// The server's endpoint.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}/mcp", self.port)
    }

    /// A table of the gateway's configuration that names this server.
    #[must_use]
    pub fn toml(&self, name: &str) -> String {
        format!("[servers.{name}]\nurl = \"{}\"\n", self.url())
    }

    /// Gives an order; it is in force when this returns.
    ///
    /// # Errors
    /// If the order is refused.
    pub async fn order(&self, path: &str, order: Value) -> Result<Value> {
        let url = format!("http://127.0.0.1:{}{path}", self.control);
        let request = self.http.post(url).body(order.to_string());
        let response = tokio::time::timeout(ORDER_BOUND, request.send()).await??;
        let status = response.status();
        let answer: Value = serde_json::from_slice(&response.bytes().await?)?;
        ensure!(status == 200, "order `{path}` {order} was refused: {answer}");
        Ok(answer)
    }

    /// Drops all sessions.
    ///
    /// # Errors
    /// If the order is refused.
    pub async fn forget(&self) -> Result<()> {
        self.order("/forget", json!({})).await.map(drop)
    }

    /// Answers unknown ids in one of the dialects of AC-02.
    ///
    /// # Errors
    /// If there is no such preset.
    pub async fn dialect(&self, preset: &str) -> Result<()> {
        self.order("/dialect", json!({"preset": preset})).await.map(drop)
    }

    /// Orders a fault.
    ///
    /// # Errors
    /// If it is refused.
    pub async fn gap(&self, gap: Value) -> Result<()> {
        self.order("/gap", gap).await.map(drop)
    }

    /// Answers as `json`, `sse` or `sse-with-ids`.
    ///
    /// # Errors
    /// If there is no such mode.
    pub async fn answer(&self, mode: &str) -> Result<()> {
        self.order("/answer", json!({"mode": mode})).await.map(drop)
    }

    /// The counters.
    ///
    /// # Errors
    /// If the server does not answer.
    pub async fn counters(&self) -> Result<Value> {
        self.show("/counters").await
    }

    /// One counter by its path, such as `/initializes` or `/executions/incr`; 0 if nothing was counted.
    ///
    /// # Errors
    /// If the server does not answer.
    pub async fn count(&self, pointer: &str) -> Result<u64> {
        Ok(self.counters().await?.pointer(pointer).and_then(Value::as_u64).unwrap_or(0))
    }

    /// How often a tool began to run.
    ///
    /// # Errors
    /// If the server does not answer.
    pub async fn executions(&self, tool: &str) -> Result<u64> {
        self.count(&format!("/executions/{tool}")).await
    }

    /// The journal: one entry per HTTP request.
    ///
    /// # Errors
    /// If the server does not answer.
    pub async fn log(&self) -> Result<Vec<Value>> {
        let log = self.show("/log").await?;
        log["entries"].as_array().cloned().context("no entries")
    }

    /// The entries of one JSON-RPC method, or of `GET` or `DELETE`.
    ///
    /// # Errors
    /// If the server does not answer.
    pub async fn requests(&self, method: &str) -> Result<Vec<Value>> {
        let mut entries = self.log().await?;
        entries.retain(|entry| entry["body"]["method"] == method || entry["method"] == method);
        Ok(entries)
    }

    /// The lines that `incr` wrote.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn incr_lines(&self) -> Result<Vec<String>> {
        lines(&self.dir.path().join(INCR_FILE))
    }

    async fn show(&self, path: &str) -> Result<Value> {
        let url = format!("http://127.0.0.1:{}{path}", self.control);
        let response = tokio::time::timeout(ORDER_BOUND, self.http.get(url).send()).await??;
        Ok(serde_json::from_slice(&response.bytes().await?)?)
    }
}

async fn spawn_up_h(dir: &TempDir, flags: &[String], ports: (u16, u16)) -> Result<(Child, u16, u16)> {
    let mut child = Command::new(binaries::up_h()?)
        .arg("--until-stdin-closes")
        .args(["--port", &ports.0.to_string(), "--control", &ports.1.to_string()])
        .arg("--incr-file")
        .arg(dir.path().join(INCR_FILE))
        .args(flags)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut line = String::new();
    let mut stdout = BufReader::new(child.stdout.take().context("no standard output")?);
    within("UP-H's ports", START_BOUND, async { Ok(stdout.read_line(&mut line).await?) }).await?;
    let ports: Value = serde_json::from_str(&line).with_context(|| format!("UP-H said `{line}`"))?;
    let port = |name: &str| ports[name].as_u64().and_then(|port| u16::try_from(port).ok()).context("no port");
    Ok((child, port("port")?, port("control")?))
}

/// How a UP-S is to be started, by the gateway or by a test; its trace and its files.
#[derive(Debug)]
pub struct UpS {
    flags: Vec<String>,
    dir: TempDir,
}

impl UpS {
    /// A UP-S with these flags. Trace and `incr` file are always given.
    ///
    /// # Errors
    /// If no directory for them can be made.
    pub fn new(flags: &[&str]) -> Result<UpS> {
        let dir = TempDir::with_prefix("up-s-")?;
        Ok(UpS { flags: flags.iter().map(|flag| (*flag).to_owned()).collect(), dir })
    }

    /// Program and arguments.
    ///
    /// # Errors
    /// If the binary is not there.
    pub fn command(&self) -> Result<(PathBuf, Vec<String>)> {
        let file = |name: &str| self.dir.path().join(name).display().to_string();
        let mut args = vec!["--trace".to_owned(), file(TRACE_FILE), "--incr-file".to_owned(), file(INCR_FILE)];
        args.extend(self.flags.clone());
        Ok((binaries::up_s()?, args))
    }

    /// A table of the gateway's configuration that names this server.
    ///
    /// # Errors
    /// If the binary is not there.
    pub fn toml(&self, name: &str) -> Result<String> {
        let (program, args) = self.command()?;
        let command = json!(program.display().to_string());
        // Strings and lists of strings are spelled alike in JSON and TOML.
        Ok(format!("[servers.{name}]\ncommand = {command}\nargs = {}\n", json!(args)))
    }

    /// Starts one for a test that speaks to it directly.
    ///
    /// # Errors
    /// If it does not start.
    pub fn spawn(&self) -> Result<StdioPeer> {
        let (program, args) = self.command()?;
        let mut child = Command::new(program)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let stdin = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take().context("no standard output")?);
        Ok(StdioPeer { child, stdin, stdout })
    }

    /// The trace so far, over all processes.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn trace(&self) -> Result<Vec<Value>> {
        let lines = lines(&self.dir.path().join(TRACE_FILE))?;
        lines.iter().map(|line| Ok(serde_json::from_str(line)?)).collect()
    }

    /// The processes that were started, in order. With a shell above it, it is the server below that counts.
    ///
    /// # Errors
    /// If the trace cannot be read.
    pub fn starts(&self) -> Result<Vec<crate::procs::Proc>> {
        self.processes("start")
    }

    /// The daemons that were left behind, in order.
    ///
    /// # Errors
    /// If the trace cannot be read.
    pub fn daemons(&self) -> Result<Vec<crate::procs::Proc>> {
        self.processes("daemon")
    }

    fn processes(&self, event: &str) -> Result<Vec<crate::procs::Proc>> {
        let trace = self.trace()?;
        let starts = trace.iter().filter(|entry| entry["event"] == event);
        Ok(starts
            .filter_map(|entry| {
                let pid = u32::try_from(entry["pid"].as_u64()?).ok()?;
                Some(crate::procs::Proc { pid, start: entry["start"].as_u64()? })
            })
            .collect())
    }

    /// The methods of the lines that one process received, in order.
    ///
    /// # Errors
    /// If the trace cannot be read.
    pub fn methods(&self, pid: u32) -> Result<Vec<String>> {
        let trace = self.trace()?;
        let lines = trace.iter().filter(|entry| entry["event"] == "line" && entry["pid"] == pid);
        Ok(lines.filter_map(|entry| entry["line"]["method"].as_str().map(str::to_owned)).collect())
    }

    /// The lines that `incr` wrote, over all processes.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn incr_lines(&self) -> Result<Vec<String>> {
        lines(&self.dir.path().join(INCR_FILE))
    }
}

/// A UP-S to which a test speaks directly. It is killed when the handle goes.
#[derive(Debug)]
pub struct StdioPeer {
    /// The process that was started; with a shell above the server it is the launcher.
    pub child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl StdioPeer {
    /// Sends one line.
    ///
    /// # Errors
    /// If the pipe is closed.
    pub async fn send(&mut self, message: &Value) -> Result<()> {
        let stdin = self.stdin.as_mut().context("standard input is closed")?;
        Ok(stdin.write_all(format!("{message}\n").as_bytes()).await?)
    }

    /// The next line, whatever it is; none at the end of the output.
    ///
    /// # Errors
    /// If there was none within the bound.
    pub async fn line(&mut self, bound: Duration) -> Result<Option<String>> {
        let mut line = String::new();
        let read = within("a line", bound, async { Ok(self.stdout.read_line(&mut line).await?) }).await?;
        Ok((read > 0).then(|| line.trim_end().to_owned()))
    }

    /// The next line, as JSON.
    ///
    /// # Errors
    /// If there was none within the bound, or it is no JSON.
    pub async fn message(&mut self, bound: Duration) -> Result<Value> {
        let Some(line) = self.line(bound).await? else {
            bail!("the output has ended");
        };
        serde_json::from_str(&line).with_context(|| format!("no JSON: `{line}`"))
    }

    /// Sends a request and returns the response, past everything that comes before it.
    ///
    /// # Errors
    /// If there was none within the bound.
    pub async fn request(&mut self, message: &Value, bound: Duration) -> Result<Value> {
        self.send(message).await?;
        loop {
            let answer = self.message(bound).await?;
            if answer.get("method").is_none() && answer["id"] == message["id"] {
                return Ok(answer);
            }
        }
    }

    /// Closes standard input.
    pub fn close(&mut self) {
        self.stdin = None;
    }

    /// Waits for the end and returns the exit code; none if a signal ended it.
    ///
    /// # Errors
    /// If it does not end within the bound.
    pub async fn exit_code(&mut self, bound: Duration) -> Result<Option<i32>> {
        let status = wait::within("the end of UP-S", bound, async { Ok(self.child.wait().await?) }).await?;
        Ok(status.code())
    }
}

fn lines(path: &std::path::Path) -> Result<Vec<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(text.lines().map(str::to_owned).collect()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("`{}` cannot be read", path.display())),
    }
}

const INCR_FILE: &str = "incr";
const TRACE_FILE: &str = "trace";
const START_BOUND: Duration = Duration::from_secs(20);
const ORDER_BOUND: Duration = Duration::from_secs(20);
