//! The official conformance suite, through the gateway and directly: what passes against the fixture server passes
//! through the gateway (S17, E6).

use anyhow::{Context as _, Result, ensure};
use mainstay_tests::{Gateway, repository};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

const BOUND: Duration = Duration::from_secs(120);

fn node() -> Result<(PathBuf, PathBuf)> {
    let environment =
        std::env::var_os("MAINSTAY_TEST_ENV").map_or_else(|| repository().join("target/test-env"), PathBuf::from);
    let modules = environment.join("node/node_modules");
    let node = modules.join(".bin/node");
    ensure!(node.exists(), "no `{}`: run `scripts/test-env` first", node.display());
    Ok((node, modules))
}

/// The fixture server with the suite's tool names. It ends with its standard input.
async fn fixture() -> Result<(Child, u16)> {
    let (node, _) = node()?;
    let mut child = Command::new(node)
        .arg(repository().join("tests/fixtures/conformance-server.mjs"))
        .env("PORT", "0")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut lines = BufReader::new(child.stdout.take().context("its output")?).lines();
    let line = tokio::time::timeout(BOUND, lines.next_line()).await??.context("it says its port")?;
    let port = serde_json::from_str::<Value>(&line)?["port"].as_u64().context("a port")?;
    Ok((child, u16::try_from(port)?))
}

/// Runs the scored set of a revision and returns the exit code and each scenario's failed checks.
async fn suite(url: &str, revision: &str, out: &Path) -> Result<(i32, BTreeMap<String, usize>)> {
    let (node, modules) = node()?;
    let output = Command::new(node)
        .arg(modules.join("@modelcontextprotocol/conformance/dist/index.js"))
        .args(["server", "--url", url, "--requirements", revision, "-o"])
        .arg(out)
        .stdin(Stdio::null())
        .output();
    let output = tokio::time::timeout(BOUND, output).await??;
    let mut failed = BTreeMap::new();
    for entry in std::fs::read_dir(out)? {
        let entry = entry?;
        let checks: Value = serde_json::from_slice(&std::fs::read(entry.path().join("checks.json"))?)?;
        let checks = checks.as_array().context("a list of checks")?;
        let failures = checks.iter().filter(|check| check["status"] == "FAILURE").count();
        let folder = entry.file_name().to_string_lossy().into_owned();
        failed.insert(scenario(&folder).to_owned(), failures);
    }
    ensure!(!failed.is_empty(), "no scenario ran: {}", String::from_utf8_lossy(&output.stdout));
    Ok((output.status.code().context("an exit code")?, failed))
}

/// The scenario of a result folder, whose name ends with a stamp of fixed length.
fn scenario(folder: &str) -> &str {
    const STAMP: &str = "-2026-11-30T19-46-57-204Z";
    folder.len().checked_sub(STAMP.len()).map_or(folder, |end| &folder[..end])
}

#[test]
fn a_result_folder_names_its_scenario_whatever_the_time() {
    for stamp in ["-2026-11-30T19-46-57-204Z", "-2026-11-30T20-20-20-020Z"] {
        assert_eq!(scenario(&format!("server-resources-list{stamp}")), "server-resources-list");
    }
}

#[tokio::test]
async fn s17_the_scored_set_of_2025_11_25_passes_through_the_gateway() -> Result<()> {
    let (_fixture, port) = fixture().await?;
    let direct_url = format!("http://localhost:{port}/mcp");
    let gateway = Gateway::start(&format!("[servers.fixture]\nurl = \"{direct_url}\"\n"), &[]).await?;
    let through_url = gateway.url("fixture")?.replace("127.0.0.1", "localhost");
    let out = tempfile::tempdir()?;
    let (direct, through) = (out.path().join("direct"), out.path().join("through"));
    let (direct_code, direct_failed) = suite(&direct_url, "2025-11-25", &direct).await?;
    let (through_code, through_failed) = suite(&through_url, "2025-11-25", &through).await?;
    assert_eq!(direct_code, 0, "the fixture itself: {direct_failed:?}");
    for (scenario, failures) in &direct_failed {
        let behind = through_failed.get(scenario).with_context(|| format!("`{scenario}` did not run"))?;
        assert!(behind <= failures, "`{scenario}` fails {behind} checks behind the gateway, {failures} without it");
    }
    assert_eq!(through_code, 0, "every scored scenario: {through_failed:?}");
    println!("{} scenarios through the gateway, none worse than directly", through_failed.len());
    Ok(())
}

#[tokio::test]
async fn server_everything_works_behind_the_gateway_over_http_and_over_stdio() -> Result<()> {
    let (node, modules) = node()?;
    let program = modules.join("@modelcontextprotocol/server-everything/dist/index.js");
    let port = mainstay_tests::lasting_port()?.port();
    let _http = Command::new(&node)
        .arg(&program)
        .arg("streamableHttp")
        .env("PORT", port.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    mainstay_tests::wait_until("server-everything listens", BOUND, async || {
        tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_ok()
    })
    .await?;
    let config = format!(
        "[servers.http]\nurl = \"http://127.0.0.1:{port}/mcp\"\n[servers.stdio]\ncommand = {:?}\nargs = [{:?}, \"stdio\"]\n",
        node.display().to_string(),
        program.display().to_string(),
    );
    let mut gateway = Gateway::start(&config, &[]).await?;
    for server in ["http", "stdio"] {
        let client = mainstay_tests::RawClient::open(&gateway.url(server)?, "2025-11-25").await?;
        let listed = client.request("tools/list", Value::Null).await?;
        let tools = listed.result()?["tools"].as_array().map_or(0, Vec::len);
        ensure!(tools > 3, "{server}: {tools} tools");
        let echo = async |text: &str| -> Result<()> {
            let outcome = client.call_through("echo", serde_json::json!({"message": text})).await?;
            ensure!(outcome.text()?.contains(text), "{server}: {outcome:?}");
            Ok(())
        };
        echo("before").await?;
        gateway.kill_worker().await?;
        echo("after").await?;
    }
    Ok(())
}
