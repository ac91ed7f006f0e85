//! The gateway as a black box: its binary, its ports, its log, and every process that it started.

mod log;
mod setup;

pub use setup::Setup;

use crate::ports::lasting_port;
use crate::procs::{Proc, children, descendants};
use crate::wait::{wait_blocking, wait_until};
use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::time::Duration;
use tempfile::TempDir;

/// One worker of the gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Worker {
    /// Its process id.
    pub pid: u32,
    /// Its number, which rises with every worker of one keeper.
    pub number: u64,
}

/// A gateway with its state directory. It may be running or not; the state stays until the handle goes.
///
/// Dropping it stops a running gateway, kills what is left of all its processes, and fails the test if a gateway that was
/// stopped in order left any.
#[derive(Debug)]
pub struct Gateway {
    setup: Setup,
    dir: TempDir,
    http: reqwest::Client,
    keeper: Option<Child>,
    ports: Option<Ports>,
    /// Every process below the keeper that was ever seen.
    seen: BTreeSet<Proc>,
    /// Whether the last end was one that must leave nothing behind.
    tidy: bool,
}

/// Where the gateway listens. Known after the first start and kept over all later ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ports {
    mcp: SocketAddr,
    admin: SocketAddr,
}

impl Gateway {
    /// Starts a gateway with this configuration, TOML in which `{{NAME}}` stands for a value. `{{DIR}}` is a directory of
    /// its own that lives as long as the handle, `{{UP_S}}` the program UP-S.
    ///
    /// # Errors
    /// If it is not ready within the bound; the error holds the end of its log.
    pub async fn start(config: &str, values: &[(&str, &str)]) -> Result<Gateway> {
        let setup = values.iter().fold(Setup::new(config), |setup, (name, value)| setup.fill(name, value));
        setup.start().await
    }

    async fn start_from(setup: Setup) -> Result<Gateway> {
        let dir = TempDir::with_prefix("mainstay-")?;
        let http = reqwest::Client::builder().no_proxy().pool_max_idle_per_host(0).timeout(ADMIN_BOUND).build()?;
        let mut gateway = Gateway { setup, dir, http, keeper: None, ports: None, seen: BTreeSet::new(), tidy: false };
        gateway.setup.write_config(gateway.dir.path())?;
        gateway.start_again().await?;
        Ok(gateway)
    }

    /// Starts a gateway that was stopped or killed, with the same state and on the same ports.
    ///
    /// # Errors
    /// If it is not ready within the bound; the error holds the end of its log.
    pub async fn start_again(&mut self) -> Result<()> {
        self.launch()?;
        self.ready().await
    }

    /// Starts the process and does not wait for anything; [`Gateway::ready`] does.
    ///
    /// # Errors
    /// If it runs already, or does not start.
    pub fn launch(&mut self) -> Result<()> {
        ensure!(self.keeper.is_none(), "the gateway runs already");
        let ports = match self.ports {
            Some(ports) => ports,
            None => Ports { mcp: lasting_port()?, admin: lasting_port()? },
        };
        self.keeper = Some(self.setup.spawn(self.dir.path(), ports.mcp, ports.admin)?);
        self.tidy = false;
        Ok(())
    }

    /// Waits until the gateway has said where it listens and that it is ready.
    ///
    /// # Errors
    /// If it is not ready within the bound; the error holds the end of its log.
    pub async fn ready(&mut self) -> Result<()> {
        let keeper = self.keeper_pid()?;
        let mut ports = None;
        let announced = wait_until("the gateway's ports", READY_BOUND, async || {
            ports = self.announced(keeper);
            ports.is_some() || self.has_ended()
        });
        announced.await.with_context(|| self.log_tail())?;
        self.ports = Some(ports.with_context(|| format!("the gateway has ended: {}", self.log_tail()))?);
        let readyz = self.admin_url("/readyz")?;
        let http = self.http.clone();
        let ready = wait_until("`/readyz` to answer 200", READY_BOUND, async || {
            http.get(&readyz).send().await.is_ok_and(|answer| answer.status() == 200)
        });
        ready.await.with_context(|| self.log_tail())?;
        self.look_around();
        Ok(())
    }

    /// The endpoint of one server.
    ///
    /// # Errors
    /// If the gateway was never ready.
    pub fn url(&self, server: &str) -> Result<String> {
        Ok(format!("http://{}/mcp/{server}", self.ports()?.mcp))
    }

    /// The endpoint of all servers as one.
    ///
    /// # Errors
    /// If the gateway was never ready.
    pub fn federated_url(&self) -> Result<String> {
        Ok(format!("http://{}/mcp", self.ports()?.mcp))
    }

    /// The address of the MCP port.
    ///
    /// # Errors
    /// If the gateway was never ready.
    pub fn mcp_address(&self) -> Result<SocketAddr> {
        Ok(self.ports()?.mcp)
    }

    /// A path on the admin port.
    ///
    /// # Errors
    /// If the gateway was never ready.
    pub fn admin_url(&self, path: &str) -> Result<String> {
        Ok(format!("http://{}{path}", self.ports()?.admin))
    }

    /// The state directory.
    #[must_use]
    pub fn state_dir(&self) -> PathBuf {
        setup::state_dir(self.dir.path())
    }

    /// The directory that `{{DIR}}` stands for.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Replaces the configuration file. The gateway does not know of it yet.
    ///
    /// # Errors
    /// If a placeholder has no value, or the file cannot be written.
    pub fn rewrite_config(&mut self, config: &str) -> Result<()> {
        config.clone_into(&mut self.setup.config);
        self.setup.write_config(self.dir.path())
    }

    /// Runs the gateway's binary with these arguments against this gateway's state directory, as an operator would.
    ///
    /// # Errors
    /// If it does not start or does not end within the bound.
    pub async fn cli(&self, args: &[&str]) -> Result<std::process::Output> {
        self.cli_with(args, "").await
    }

    /// As [`Gateway::cli`], with `input` on its standard input.
    ///
    /// # Errors
    /// If it does not start or does not end within the bound.
    pub async fn cli_with(&self, args: &[&str], input: &str) -> Result<std::process::Output> {
        self.setup.cli(self.dir.path(), args, input).await
    }

    /// A GET on the admin port with the admin token: status and JSON, `null` if the body is none.
    ///
    /// # Errors
    /// If there was no answer.
    pub async fn admin_get(&self, path: &str) -> Result<(u16, Value)> {
        let request = self.http.get(self.admin_url(path)?).bearer_auth(self.admin_token()?);
        answer_of(request).await
    }

    /// A POST of JSON on the admin port with the admin token.
    ///
    /// # Errors
    /// If there was no answer.
    pub async fn admin_post(&self, path: &str, body: &Value) -> Result<(u16, Value)> {
        let request = self.http.post(self.admin_url(path)?).bearer_auth(self.admin_token()?);
        answer_of(request.header("content-type", "application/json").body(body.to_string())).await
    }

    /// The token that the gateway made at its first start.
    ///
    /// # Errors
    /// If there is none.
    pub fn admin_token(&self) -> Result<String> {
        let path = self.state_dir().join("admin.token");
        let token = std::fs::read_to_string(&path).with_context(|| format!("no `{}`", path.display()))?;
        Ok(token.trim().to_owned())
    }

    /// What `/api/v1/status` says.
    ///
    /// # Errors
    /// If it does not answer 200.
    pub async fn status(&self) -> Result<Value> {
        let (status, body) = self.admin_get("/api/v1/status").await?;
        ensure!(status == 200, "`/api/v1/status` answered {status}: {body}");
        Ok(body)
    }

    /// The worker that serves now.
    ///
    /// # Errors
    /// If the status does not name one.
    pub async fn worker(&self) -> Result<Worker> {
        let status = self.status().await?;
        let worker = &status["worker"];
        let pid = worker["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
        let number = worker["number"].as_u64();
        let (Some(pid), Some(number)) = (pid, number) else {
            anyhow::bail!("the status names no worker: {status}");
        };
        Ok(Worker { pid, number })
    }

    /// The keeper's process id.
    ///
    /// # Errors
    /// If the gateway does not run.
    pub fn keeper_pid(&self) -> Result<u32> {
        Ok(self.keeper.as_ref().context("the gateway does not run")?.id())
    }

    /// Kills the worker with SIGKILL and waits until another one is ready. Returns that one.
    ///
    /// # Errors
    /// If none gets ready within the bound.
    pub async fn kill_worker(&mut self) -> Result<Worker> {
        let killed = self.kill_worker_at_once().await?;
        self.next_worker(killed).await
    }

    /// Kills the worker with SIGKILL and does not wait for the next one. Returns the one that was killed.
    ///
    /// # Errors
    /// If the status names no worker, or that one is gone.
    pub async fn kill_worker_at_once(&mut self) -> Result<Worker> {
        let worker = self.worker().await?;
        self.look_around();
        let killed = Proc::of(worker.pid).is_some_and(Proc::kill);
        ensure!(killed, "worker {} could not be killed", worker.pid);
        Ok(worker)
    }

    /// Waits until a later worker than this one is ready, and returns it.
    ///
    /// # Errors
    /// If none gets ready within the bound.
    pub async fn next_worker(&mut self, before: Worker) -> Result<Worker> {
        let mut next = None;
        let found = wait_until("another worker", READY_BOUND, async || {
            next = self.worker().await.ok().filter(|worker| worker.number > before.number);
            next.is_some()
        });
        found.await.with_context(|| self.log_tail())?;
        self.ready().await?;
        next.context("no worker")
    }

    /// Kills keeper and workers with SIGKILL, as a lost machine would, and waits until they are gone. Children of the
    /// keeper are left to whatever becomes of them.
    ///
    /// # Errors
    /// If the gateway does not run, or a process outlives SIGKILL.
    pub async fn kill_all(&mut self) -> Result<()> {
        self.look_around();
        let mut keeper = self.keeper.take().context("the gateway does not run")?;
        let workers: Vec<Proc> =
            children(keeper.id()).into_iter().filter(|child| is_worker(&child.arguments())).collect();
        // The keeper first, or it would start another worker.
        keeper.kill()?;
        keeper.wait()?;
        for worker in &workers {
            worker.kill();
        }
        self.tidy = false;
        wait_until("the workers to be gone", STOP_BOUND, async || !workers.iter().any(|worker| worker.is_alive())).await
    }

    /// Stops the gateway with SIGTERM and waits for its end.
    ///
    /// # Errors
    /// If it does not end within the bound.
    pub async fn stop(&mut self) -> Result<ExitStatus> {
        self.signal(Signal::TERM)?;
        self.wait_for_end(STOP_BOUND).await
    }

    /// Sends the keeper a signal.
    ///
    /// # Errors
    /// If the gateway does not run.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        self.look_around();
        let keeper = Proc::of(self.keeper_pid()?).context("the keeper is gone")?;
        ensure!(keeper.signal(signal), "the keeper could not be signalled");
        Ok(())
    }

    /// Waits for the end of the keeper, whatever brings it about.
    ///
    /// # Errors
    /// If it does not end within the bound.
    pub async fn wait_for_end(&mut self, bound: Duration) -> Result<ExitStatus> {
        let tail = self.log_path();
        let keeper = self.keeper.as_mut().context("the gateway does not run")?;
        let mut status = None;
        let ended = wait_until("the gateway to end", bound, async || {
            status = keeper.try_wait().ok().flatten();
            status.is_some()
        });
        ended.await.with_context(|| log::tail(&tail))?;
        self.keeper = None;
        self.tidy = true;
        status.context("no status")
    }

    /// Waits until none of the processes that the gateway ever had below it is left. For after [`Gateway::stop`].
    ///
    /// # Errors
    /// If some are; the error names them.
    pub async fn assert_no_orphans(&mut self) -> Result<()> {
        let bound = self.setup.tree_bound;
        let gone = wait_until("the gateway's processes to be gone", bound, async || self.left().is_empty());
        gone.await.with_context(|| describe(&self.left()))
    }

    /// Notes the processes that are below the keeper now, so that they are looked for later.
    pub fn look_around(&mut self) {
        if let Some(keeper) = &self.keeper {
            self.seen.extend(descendants(keeper.id()));
        }
    }

    /// All that the gateway has written to standard error, over all its lives.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// Fails on every line of level WARN or ERROR, and on every panic, that holds none of the allowed texts.
    ///
    /// # Errors
    /// With the lines.
    pub fn assert_clean_log(&self, allowed: &[&str]) -> Result<()> {
        let unlisted = log::complaints(&self.log(), allowed);
        ensure!(unlisted.is_empty(), "unlisted lines in the gateway's log:\n{}", unlisted.join("\n"));
        Ok(())
    }

    fn ports(&self) -> Result<Ports> {
        self.ports.context("the gateway was never ready")
    }

    /// What `gateway.json` says, if it is of this keeper and not of an earlier one.
    fn announced(&self, keeper: u32) -> Option<Ports> {
        let text = std::fs::read_to_string(self.state_dir().join("gateway.json")).ok()?;
        let said: Value = serde_json::from_str(&text).ok()?;
        if said["keeper"] != json!(keeper) {
            return None;
        }
        let address = |name: &str| said[name].as_str()?.parse().ok();
        Some(Ports { mcp: address("mcp")?, admin: address("admin")? })
    }

    fn has_ended(&mut self) -> bool {
        self.keeper.as_mut().is_none_or(|keeper| !matches!(keeper.try_wait(), Ok(None)))
    }

    fn left(&self) -> Vec<Proc> {
        self.seen.iter().copied().filter(|process| process.is_alive()).collect()
    }

    fn log_path(&self) -> PathBuf {
        self.dir.path().join(setup::STDERR_FILE)
    }

    #[expect(clippy::print_stderr, reason = "the test runner shows what a test printed only if the test fails")]
    fn show_log(&self) {
        eprintln!("{}", self.log_tail());
    }

    fn log_tail(&self) -> String {
        log::tail(&self.log_path())
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.look_around();
        let mut stuck = false;
        if let Some(mut keeper) = self.keeper.take() {
            if let Some(process) = Proc::of(keeper.id()) {
                process.signal(Signal::TERM);
            }
            stuck = !wait_blocking(STOP_BOUND, || !matches!(keeper.try_wait(), Ok(None)));
            let _already_gone = keeper.kill();
            let _reaped = keeper.wait();
            self.tidy = !stuck;
        }
        if self.tidy {
            wait_blocking(self.setup.tree_bound, || self.left().is_empty());
        }
        let left = self.left();
        let described = describe(&left);
        for process in &left {
            process.kill();
        }
        if !self.setup.quiet {
            self.show_log();
        }
        if std::thread::panicking() {
            return;
        }
        assert!(!stuck, "the gateway did not stop within {STOP_BOUND:?}\n{}", self.log_tail());
        assert!(!self.tidy || left.is_empty(), "{described}");
    }
}

async fn answer_of(request: reqwest::RequestBuilder) -> Result<(u16, Value)> {
    let answer = request.send().await?;
    let status = answer.status().as_u16();
    Ok((status, serde_json::from_slice(&answer.bytes().await?).unwrap_or(Value::Null)))
}

fn is_worker(arguments: &[String]) -> bool {
    arguments.get(1).is_some_and(|argument| argument == "worker")
}

fn describe(left: &[Proc]) -> String {
    let lines = left.iter().map(|process| format!("\n  {} {}", process.pid, process.arguments().join(" ")));
    format!("processes left behind: {}{}", left.len(), lines.collect::<String>())
}

const READY_BOUND: Duration = Duration::from_secs(30);
const STOP_BOUND: Duration = Duration::from_secs(20);
const ADMIN_BOUND: Duration = Duration::from_secs(20);
