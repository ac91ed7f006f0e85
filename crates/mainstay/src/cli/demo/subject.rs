//! The gateway that the demo kills: processes and a directory of its own, cleaned up whatever happens.

use std::fs::{self, DirBuilder, File};
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use bytes::Bytes;
use http::header::HOST;
use http::{Request, StatusCode};
use http_body_util::Empty;
use mainstay_core::id::base64url;
use mainstay_keeper::{ProcessIdentity, Signal, SignalError, signal};
use serde_json::Value;

use crate::cli::api::{Api, send};
use crate::cli::failure::Failure;
use crate::cli::gateway::{self, Gateway};
use crate::config::Config;
use crate::runtime::{Clock, entropy};

/// The gateway.
pub(super) struct Subject {
    dir: PathBuf,
    keeper: Option<Child>,
    /// Where it listens, once it has been started: the same ports again later.
    gateway: Option<Gateway>,
}

impl Subject {
    /// A directory, and no process yet.
    pub(super) fn prepare() -> anyhow::Result<Self> {
        let name = format!("mainstay-demo-{}", base64url(&entropy::<9>()?));
        let dir = std::env::temp_dir().join(name);
        DirBuilder::new().mode(0o700).create(&dir).with_context(|| format!("make `{}`", dir.display()))?;
        Ok(Self { dir, keeper: None, gateway: None })
    }

    /// Starts it: `mainstay serve -- mainstay demo-server`. Returns when it is ready.
    pub(super) async fn start(&mut self) -> anyhow::Result<()> {
        let program = std::env::current_exe().context("find the program's own file")?;
        let (mcp, admin) = self.gateway.as_ref().map_or((ANY_PORT, ANY_PORT), |known| (known.mcp, known.admin));
        let log = File::options().create(true).append(true).open(self.log_file()).context("open the log")?;
        let keeper = Command::new(&program)
            .args(["serve", "--listen", &mcp.to_string(), "--admin", &admin.to_string()])
            .arg("--state-dir")
            .arg(self.state_dir())
            .arg("--")
            .arg(&program)
            .arg("demo-server")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .context("start the gateway")?;
        let pid = keeper.id();
        self.keeper = Some(keeper);
        let clock = Clock::system();
        while !self.is_ready(pid).await? {
            if clock.now().since(clock.started_at()) > READY_BOUND {
                bail!("the gateway was not ready within {} s", READY_BOUND.as_secs());
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        Ok(())
    }

    /// Where clients connect.
    pub(super) fn mcp(&self) -> anyhow::Result<SocketAddr> {
        Ok(self.gateway.as_ref().context("the gateway has not been started")?.mcp)
    }

    /// The pids, for people.
    pub(super) async fn processes(&self) -> Result<String, Failure> {
        let status: Value = self.api()?.read("/status").await?;
        Ok(format!("keeper pid {}, worker pid {}", status["keeper"]["pid"], status["worker"]["pid"]))
    }

    /// The ref of the one session.
    pub(super) async fn session_ref(&self) -> Result<String, Failure> {
        let page: Value = self.api()?.read("/sessions?limit=1").await?;
        let session_ref = page.pointer("/sessions/0/ref").and_then(Value::as_str);
        Ok(session_ref.context("the session is not listed")?.to_owned())
    }

    /// Kills the worker with SIGKILL; its pid.
    pub(super) async fn kill_worker(&self) -> Result<u32, Failure> {
        let status: Value = self.api()?.read("/status").await?;
        let worker = worker_of(&status)?;
        signal(worker, Signal::KILL).context("kill the worker")?;
        Ok(worker.pid())
    }

    /// Kills the keeper and the worker with SIGKILL, in this order, so that no new worker is started.
    pub(super) async fn kill_everything(&mut self) -> Result<(), Failure> {
        let status: Value = self.api()?.read("/status").await?;
        let worker = worker_of(&status)?;
        if let Some(mut keeper) = self.keeper.take() {
            keeper.kill().context("kill the keeper")?;
            keeper.wait().context("wait for the keeper")?;
        }
        // A worker that has noticed and ended by itself is as dead.
        match signal(worker, Signal::KILL) {
            Ok(()) | Err(SignalError::NotRunning { .. }) => Ok(()),
            Err(error) => Err(anyhow::Error::new(error).context("kill the worker").into()),
        }
    }

    /// Stops the gateway and removes its directory.
    pub(super) fn clean_up(&mut self) -> anyhow::Result<()> {
        self.stop();
        fs::remove_dir_all(&self.dir).with_context(|| format!("remove `{}`", self.dir.display()))
    }

    /// What the gateway logged.
    pub(super) fn log_file(&self) -> PathBuf {
        self.dir.join("gateway.log")
    }

    fn state_dir(&self) -> PathBuf {
        self.dir.join("state")
    }

    fn api(&self) -> Result<Api, Failure> {
        let gateway = self.gateway.clone().context("the gateway has not been started")?;
        Ok(Api::of(gateway, gateway::read_token(&Config::with_defaults(self.state_dir()))?))
    }

    /// Whether the gateway whose keeper is `pid` has published itself and serves.
    async fn is_ready(&mut self, pid: u32) -> anyhow::Result<bool> {
        if let Some(ended) = self.keeper.as_mut().and_then(|keeper| keeper.try_wait().transpose()) {
            bail!("the gateway ended at its start: {}", ended?);
        }
        let Some(gateway) = Gateway::read(&self.state_dir())?.filter(|gateway| gateway.keeper == pid) else {
            return Ok(false);
        };
        let admin = gateway.admin;
        self.gateway = Some(gateway);
        let request = Request::get("/readyz").header(HOST, admin.to_string()).body(Empty::<Bytes>::new())?;
        let answered = tokio::time::timeout(READY_BOUND, send(admin, request)).await;
        Ok(matches!(answered, Ok(Ok(response)) if response.status() == StatusCode::OK))
    }

    /// SIGTERM, a bounded wait, SIGKILL.
    fn stop(&mut self) {
        let Some(mut keeper) = self.keeper.take() else {
            return;
        };
        if let Ok(Some(identity)) = ProcessIdentity::of(keeper.id()) {
            let _ = signal(identity, Signal::TERM);
        }
        let clock = Clock::system();
        while matches!(keeper.try_wait(), Ok(None)) && clock.now().since(clock.started_at()) < STOP_BOUND {
            std::thread::sleep(LOOK_EVERY);
        }
        let _ = keeper.kill();
        let _ = keeper.wait();
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Which process the worker is: pinned by more than its pid, which may be somebody else's when the signal is sent.
fn worker_of(status: &Value) -> anyhow::Result<ProcessIdentity> {
    let pid = status.pointer("/worker/pid").and_then(Value::as_u64).and_then(|pid| u32::try_from(pid).ok());
    let pid = pid.context("the status names no worker")?;
    ProcessIdentity::of(pid).context("look at the worker")?.context("the worker has just ended")
}

const ANY_PORT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);
const READY_BOUND: Duration = Duration::from_secs(30);
const STOP_BOUND: Duration = Duration::from_secs(20);
const LOOK_EVERY: Duration = Duration::from_millis(20);
