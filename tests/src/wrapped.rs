//! A gateway that is started by way of another program: a shell, a namespace, a service manager.

use crate::binaries;
use crate::ports::lasting_port;
use crate::procs::{Proc, descendants};
use crate::wait::{wait_blocking, wait_until};
use anyhow::{Context as _, Result};
use rustix::process::Signal;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::File;
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// A gateway below or behind another program, with its state directory, which stays over all its starts. Whatever is left
/// of it is killed when the handle goes.
#[derive(Debug)]
pub struct Wrapped {
    dir: TempDir,
    ports: [SocketAddr; 2],
    child: Option<Child>,
    seen: BTreeSet<Proc>,
}

impl Wrapped {
    /// A gateway that is not started yet.
    ///
    /// # Errors
    /// If its files cannot be written.
    pub fn new(config: &str) -> Result<Wrapped> {
        let dir = TempDir::with_prefix("mainstay-")?;
        std::fs::DirBuilder::new().mode(0o700).create(dir.path().join("state"))?;
        std::fs::write(dir.path().join("mainstay.toml"), config)?;
        Ok(Wrapped { dir, ports: [lasting_port()?, lasting_port()?], child: None, seen: BTreeSet::new() })
    }

    /// Starts `wrapper` (a program and its first arguments), followed by the gateway's whole command line. `change` has the
    /// last word on how.
    ///
    /// # Errors
    /// If it does not start.
    pub fn start(&mut self, wrapper: &[&str], change: impl FnOnce(&mut Command)) -> Result<()> {
        let program = binaries::mainstay()?;
        let mut words: Vec<PathBuf> = wrapper.iter().map(PathBuf::from).collect();
        words.push(program);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).arg("serve");
        command.arg("--config").arg(self.dir.path().join("mainstay.toml"));
        command.arg("--state-dir").arg(self.state_dir());
        command.args(["--listen", &self.ports[0].to_string(), "--admin", &self.ports[1].to_string()]);
        let output = |name: &str| File::options().create(true).append(true).open(self.dir.path().join(name));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(output("stderr.log")?);
        change(&mut command);
        self.child = Some(command.spawn().context("the program before the gateway did not start")?);
        Ok(())
    }

    /// The process that was started.
    ///
    /// # Errors
    /// If none runs.
    pub fn pid(&self) -> Result<u32> {
        Ok(self.child.as_ref().context("it does not run")?.id())
    }

    /// The state directory.
    #[must_use]
    pub fn state_dir(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    /// A directory that lives as long as the handle.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// What `gateway.json` says.
    #[must_use]
    pub fn published(&self) -> Option<Value> {
        serde_json::from_slice(&std::fs::read(self.state_dir().join("gateway.json")).ok()?).ok()
    }

    /// Waits until it is ready, and returns the endpoint of the server named `server`.
    ///
    /// # Errors
    /// If it is not within the bound; the error holds its log.
    pub async fn ready(&mut self, server: &str) -> Result<String> {
        let http = reqwest::Client::builder().no_proxy().pool_max_idle_per_host(0).build()?;
        let ready = wait_until("the gateway to be ready", BOUND, async || {
            let Some(said) = self.published() else {
                return false;
            };
            let url = format!("http://{}/readyz", said["admin"].as_str().unwrap_or_default());
            http.get(url).send().await.is_ok_and(|answer| answer.status() == 200)
        });
        ready.await.with_context(|| self.log())?;
        self.look_around();
        let said = self.published().context("no `gateway.json`")?;
        Ok(format!("http://{}/mcp/{server}", said["mcp"].as_str().context("no address")?))
    }

    /// Notes the processes below the one that was started.
    pub fn look_around(&mut self) {
        if let Some(child) = &self.child {
            self.seen.extend(descendants(child.id()));
        }
    }

    /// Those of all the processes that were noted which still live.
    #[must_use]
    pub fn left(&self) -> Vec<Proc> {
        self.seen.iter().copied().filter(|process| process.is_alive()).collect()
    }

    /// Waits for the end of the process that was started.
    ///
    /// # Errors
    /// If it does not end within the bound; the error holds the log.
    pub async fn wait_for_end(&mut self) -> Result<ExitStatus> {
        let mut status = None;
        let child = self.child.as_mut().context("it does not run")?;
        let ended = wait_until("its end", BOUND, async || {
            status = child.try_wait().ok().flatten();
            status.is_some()
        })
        .await;
        ended.with_context(|| self.log())?;
        self.child = None;
        status.context("no status")
    }

    /// All that was written to standard error.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("stderr.log")).unwrap_or_default()
    }
}

impl Drop for Wrapped {
    fn drop(&mut self) {
        self.look_around();
        if let Some(mut child) = self.child.take() {
            if let Some(process) = Proc::of(child.id()) {
                process.signal(Signal::TERM);
            }
            wait_blocking(Duration::from_secs(5), || !matches!(child.try_wait(), Ok(None)));
            let _already_gone = child.kill();
            let _reaped = child.wait();
        }
        for process in self.left() {
            process.kill();
        }
    }
}

const BOUND: Duration = Duration::from_secs(30);
