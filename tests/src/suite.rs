//! The official conformance suite and the fixture servers that it is run against (`tests/fixtures`).

use crate::binaries::repository;
mod client;

pub use client::{ClientRun, Forwarder};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

/// Where the test environment has Node, and its packages.
///
/// # Errors
/// If it is not installed.
pub fn node() -> Result<(PathBuf, PathBuf)> {
    let environment =
        std::env::var_os("MAINSTAY_TEST_ENV").map_or_else(|| repository().join("target/test-env"), PathBuf::from);
    let modules = environment.join("node/node_modules");
    let node = modules.join(".bin/node");
    ensure!(node.exists(), "no `{}`: run `scripts/test-env` first", node.display());
    Ok((node, modules))
}

/// A server that has all that the suite's scenarios ask for. It ends with this handle.
#[derive(Debug)]
pub struct Fixture {
    /// It ends with its standard input, too.
    _child: Child,
    /// Its endpoint, by the name that the suite wants to see.
    pub url: String,
}

impl Fixture {
    /// One with sessions: 2025-11-25.
    ///
    /// # Errors
    /// If it does not start.
    pub async fn legacy() -> Result<Fixture> {
        Self::start("conformance-server.mjs").await
    }

    /// One without sessions: 2026-07-28, and nothing else.
    ///
    /// # Errors
    /// If it does not start.
    pub async fn modern() -> Result<Fixture> {
        Self::start("conformance-modern-server.mjs").await
    }

    async fn start(program: &str) -> Result<Fixture> {
        let mut child = Command::new(node()?.0)
            .arg(repository().join("tests/fixtures").join(program))
            .env("PORT", "0")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // It logs what it refuses, and the suite sends much that is to be refused.
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()?;
        let mut lines = BufReader::new(child.stdout.take().context("its output")?).lines();
        let line = tokio::time::timeout(BOUND, lines.next_line()).await??.context("it says its port")?;
        let port = serde_json::from_str::<Value>(&line)?["port"].as_u64().context("a port")?;
        Ok(Fixture { _child: child, url: format!("http://localhost:{port}/mcp") })
    }
}

/// What a run of the suite came to.
#[derive(Debug)]
pub struct Verdict {
    /// Whether each scenario that is scored passes, except those that are expected to fail, and these do fail.
    pub passed: bool,
    /// What each scenario's checks came to, those of scenarios that are not scored among them.
    pub scenarios: BTreeMap<String, Checks>,
    /// The end of what it printed.
    pub summary: String,
}

/// The checks of a scenario.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Checks {
    /// How many passed.
    pub passed: usize,
    /// How many failed.
    pub failed: usize,
    /// How many were found wanting in what a server only should do.
    pub warned: usize,
}

/// Runs the scored set of `revision` against the server at `url`, where `expected` lists the failures that are known.
///
/// The suite has deadlines of its own of half a second, which a machine that is busy with something else can miss; so what
/// fails is run again, and is a failure if it fails each time.
///
/// # Errors
/// If it does not run.
pub async fn run_suite(url: &str, revision: &str, expected: Option<&Path>) -> Result<Verdict> {
    for _ in 1..RUNS_MAX {
        let verdict = run_once(url, revision, expected).await?;
        if verdict.passed {
            return Ok(verdict);
        }
    }
    run_once(url, revision, expected).await
}

async fn run_once(url: &str, revision: &str, expected: Option<&Path>) -> Result<Verdict> {
    let (node, modules) = node()?;
    let out = tempfile::tempdir()?;
    let mut command = Command::new(node);
    command
        .arg(modules.join("@modelcontextprotocol/conformance/dist/index.js"))
        .args(["server", "--url", url, "--requirements", revision, "-o"])
        .arg(out.path())
        .stdin(Stdio::null())
        .kill_on_drop(true);
    if let Some(expected) = expected {
        command.arg("--expected-failures").arg(expected);
    }
    let output = tokio::time::timeout(BOUND, command.output()).await??;
    let mut scenarios = BTreeMap::new();
    for entry in std::fs::read_dir(out.path())? {
        let entry = entry?;
        let checks: Value = serde_json::from_slice(&std::fs::read(entry.path().join("checks.json"))?)?;
        let folder = entry.file_name().to_string_lossy().into_owned();
        scenarios.insert(scenario(&folder).to_owned(), Checks::of(&checks).context("a list of checks")?);
    }
    let printed = String::from_utf8_lossy(&output.stdout);
    ensure!(!scenarios.is_empty(), "no scenario ran: {printed} {}", String::from_utf8_lossy(&output.stderr));
    let summary = printed.find("=== SUMMARY").map_or(&*printed, |start| &printed[start..]).to_owned();
    Ok(Verdict { passed: output.status.success(), scenarios, summary })
}

impl Checks {
    fn of(checks: &Value) -> Option<Checks> {
        let mut counted = Checks::default();
        for check in checks.as_array()? {
            match check["status"].as_str()? {
                "SUCCESS" => counted.passed += 1,
                "FAILURE" => counted.failed += 1,
                "WARNING" => counted.warned += 1,
                _ => {}
            }
        }
        Some(counted)
    }
}

/// The scenario of a result folder, whose name ends with a stamp of fixed length.
fn scenario(folder: &str) -> &str {
    const STAMP: &str = "-2026-11-30T19-46-57-204Z";
    folder.len().checked_sub(STAMP.len()).map_or(folder, |end| &folder[..end])
}

const BOUND: Duration = Duration::from_secs(120);
const RUNS_MAX: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_folder_names_its_scenario_whatever_the_time() {
        for stamp in ["-2026-11-30T19-46-57-204Z", "-2026-11-30T20-20-20-020Z"] {
            assert_eq!(scenario(&format!("server-resources-list{stamp}")), "server-resources-list");
        }
    }
}
