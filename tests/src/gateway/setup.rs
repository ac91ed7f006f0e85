//! What a gateway is started with.

use super::Gateway;
use crate::binaries;
use anyhow::{Context as _, Result, ensure};
use std::collections::BTreeMap;
use std::fs::File;
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;
use tokio::io::AsyncWriteExt as _;

/// What a gateway is started with, every time.
#[derive(Debug, Clone)]
pub struct Setup {
    pub(super) config: String,
    pub(super) tree_bound: Duration,
    pub(super) quiet: bool,
    values: BTreeMap<String, String>,
    env: Vec<(String, String)>,
    args: Vec<String>,
    binary: Option<PathBuf>,
}

impl Setup {
    /// A gateway with this configuration, TOML in which `{{NAME}}` stands for a value.
    #[must_use]
    pub fn new(config: &str) -> Setup {
        Setup {
            config: config.to_owned(),
            tree_bound: TREE_BOUND,
            quiet: false,
            values: BTreeMap::new(),
            env: Vec::new(),
            args: Vec::new(),
            binary: None,
        }
    }

    /// Gives `{{name}}` its value.
    #[must_use]
    pub fn fill(mut self, name: &str, value: &str) -> Setup {
        self.values.insert(name.to_owned(), value.to_owned());
        self
    }

    /// Sets a variable of the gateway's environment.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Setup {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Adds an argument after `mainstay serve` and those of the harness.
    #[must_use]
    pub fn arg(mut self, arg: &str) -> Setup {
        self.args.push(arg.to_owned());
        self
    }

    /// Takes another program for the gateway, as an upgrade does.
    #[must_use]
    pub fn binary(mut self, path: &Path) -> Setup {
        self.binary = Some(path.to_owned());
        self
    }

    /// Changes how long processes of a gateway that was stopped may outlive it; 10 s are what AC-06 allows.
    #[must_use]
    pub fn gone_within(mut self, bound: Duration) -> Setup {
        self.tree_bound = bound;
        self
    }

    /// Lets the handle go without showing the end of the log: for programs, which have other things to say.
    #[must_use]
    pub fn quiet(mut self) -> Setup {
        self.quiet = true;
        self
    }

    /// Starts it and waits until it is ready.
    ///
    /// # Errors
    /// If it is not ready within the bound; the error holds the end of its log.
    pub async fn start(self) -> Result<Gateway> {
        Gateway::start_from(self).await
    }

    pub(super) fn write_config(&self, dir: &Path) -> Result<()> {
        let mut text = self.config.clone();
        let given = self.values.iter().map(|(name, value)| (name.as_str(), value.clone()));
        for (name, value) in given.chain([("DIR", dir.display().to_string())]) {
            text = text.replace(&format!("{{{{{name}}}}}"), &value);
        }
        // Who does not ask for the program need not have built it.
        if text.contains(UP_S) {
            text = text.replace(UP_S, &binaries::up_s()?.display().to_string());
        }
        ensure!(!text.contains("{{"), "a placeholder has no value: {text}");
        std::fs::write(dir.join(CONFIG_FILE), text).context("the configuration could not be written")
    }

    pub(super) fn spawn(&self, dir: &Path, mcp: SocketAddr, admin: SocketAddr) -> Result<Child> {
        let state = state_dir(dir);
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&state)?;
        let output = |name: &str| File::options().create(true).append(true).open(dir.join(name));
        let mut command = Command::new(self.program()?);
        command.arg("serve").arg("--config").arg(dir.join(CONFIG_FILE)).arg("--state-dir").arg(state);
        command.args(["--listen", &mcp.to_string(), "--admin", &admin.to_string()]).args(&self.args);
        command.envs(self.env.iter().cloned()).stdin(Stdio::null());
        command.stdout(output(STDOUT_FILE)?).stderr(output(STDERR_FILE)?);
        command.spawn().context("the gateway did not start")
    }

    fn program(&self) -> Result<PathBuf> {
        self.binary.clone().map_or_else(binaries::mainstay, Ok)
    }

    pub(super) async fn cli(&self, dir: &Path, args: &[&str], input: &str) -> Result<Output> {
        let mut command = tokio::process::Command::new(self.program()?);
        command.args(args).arg("--state-dir").arg(state_dir(dir)).envs(self.env.iter().cloned());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            // A command that reads nothing may have ended already.
            let _unread = stdin.write_all(input.as_bytes()).await;
        }
        let ended = tokio::time::timeout(CLI_BOUND, child.wait_with_output()).await;
        Ok(ended.with_context(|| format!("`mainstay {}` did not end", args.join(" ")))??)
    }
}

pub(super) fn state_dir(dir: &Path) -> PathBuf {
    dir.join("state")
}

pub(super) const STDERR_FILE: &str = "stderr.log";
const STDOUT_FILE: &str = "stdout.log";
const UP_S: &str = "{{UP_S}}";
const CONFIG_FILE: &str = "mainstay.toml";
/// AC-06: the tree is gone within 10 s.
const TREE_BOUND: Duration = Duration::from_secs(10);
const CLI_BOUND: Duration = Duration::from_secs(120);
