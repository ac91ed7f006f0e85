//! The official conformance suite, through the gateway and directly: what passes against a fixture server passes through
//! the gateway, in pairs of one era (S17, E6). Clients with sessions find nothing wanting in a server without; what is
//! wanting the other way round is listed, and each line has its reason.

use anyhow::{Context as _, Result, ensure};
use mainstay_tests::suite::{ClientRun, Fixture, Forwarder, node, run_suite};
use mainstay_tests::{Gateway, repository};
use serde_json::Value;
use std::process::Stdio;
use std::time::Duration;
use tokio::process::Command;

const BOUND: Duration = Duration::from_secs(120);

/// A gateway in front of `fixture`, with `more` said of it, and its endpoint.
async fn in_front_of(fixture: &Fixture, more: &str) -> Result<(Gateway, String)> {
    let gateway = Gateway::start(&format!("[servers.fixture]\nurl = \"{}\"\n{more}", fixture.url), &[]).await?;
    // The suite refuses to test the defence against DNS rebinding by an address.
    let url = gateway.url("fixture")?.replace("127.0.0.1", "localhost");
    Ok((gateway, url))
}

/// Holds that each scenario comes to through the gateway what it comes to without it, or to more.
async fn passes_through(fixture: &Fixture, revision: &str) -> Result<()> {
    let (_gateway, url) = in_front_of(fixture, "").await?;
    let direct = run_suite(&fixture.url, revision, None).await?;
    ensure!(direct.passed, "the fixture itself: {}", direct.summary);
    let through = run_suite(&url, revision, None).await?;
    ensure!(through.passed, "through the gateway: {}", through.summary);
    for (scenario, alone) in &direct.scenarios {
        let behind = through.scenarios.get(scenario).with_context(|| format!("`{scenario}` did not run"))?;
        ensure!(behind.failed <= alone.failed, "`{scenario}`: {alone:?} alone, {behind:?} behind the gateway");
    }
    Ok(())
}

#[tokio::test]
async fn s17_the_scored_set_of_2025_11_25_passes_through_the_gateway() -> Result<()> {
    passes_through(&Fixture::legacy().await?, "2025-11-25").await
}

#[tokio::test]
async fn e6_the_scored_set_of_2026_07_28_passes_through_the_gateway() -> Result<()> {
    passes_through(&Fixture::modern().await?, "2026-07-28").await
}

#[tokio::test]
async fn e6_all_of_2025_11_25_passes_in_front_of_a_server_without_sessions() -> Result<()> {
    let fixture = Fixture::modern().await?;
    let (_gateway, url) = in_front_of(&fixture, "").await?;
    let verdict = run_suite(&url, "2025-11-25", None).await?;
    ensure!(verdict.passed, "{}", verdict.summary);
    ensure!(verdict.scenarios.values().all(|checks| checks.failed == 0), "{}", verdict.summary);
    Ok(())
}

#[tokio::test]
async fn e6_of_2026_07_28_only_that_fails_in_front_of_a_server_with_sessions_for_which_a_reason_is_given() -> Result<()>
{
    let expected = repository().join("tests/fixtures/expected-failures/2026-07-28-of-legacy-server.yaml");
    let listed = std::fs::read_to_string(&expected)?;
    for line in listed.lines().filter(|line| line.trim_start().starts_with("- ")) {
        ensure!(line.contains(" # "), "no reason is given for `{line}`");
    }
    let fixture = Fixture::legacy().await?;
    let (_gateway, url) = in_front_of(&fixture, "offer = \"both\"\n").await?;
    let verdict = run_suite(&url, "2026-07-28", Some(&expected)).await?;
    ensure!(verdict.passed, "it is not as `{}` says: {}", expected.display(), verdict.summary);
    Ok(())
}

/// Lets a client of an era go through a gateway to the suite's servers, one for each scenario, which judge what comes.
async fn clients_pass(revision: &str, era: &str, scenarios: &[&str]) -> Result<()> {
    // The suite's servers speak one era each, and answer what they don't know as if they did.
    let of_server = if revision == "2026-07-28" { "modern" } else { "legacy" };
    let notes = tempfile::tempdir()?;
    let mut config = String::new();
    let mut forwarders = Vec::new();
    for index in 0..scenarios.len() {
        let forwarder = Forwarder::start(&notes.path().join(index.to_string())).await?;
        let address = forwarder.address;
        config += &format!("[servers.s{index}]\nurl = \"http://{address}/mcp\"\nera = \"{of_server}\"\n");
        forwarders.push(forwarder);
    }
    let gateway = Gateway::start(&config, &[]).await?;
    for (index, (scenario, forwarder)) in scenarios.iter().zip(&forwarders).enumerate() {
        let url = gateway.url(&format!("s{index}"))?;
        ClientRun { revision, scenario, era, url: &url, forwarder }.pass().await?;
    }
    Ok(())
}

const LEGACY_SCENARIOS: [&str; 4] = ["initialize", "tools_call", "elicitation-sep1034-client-defaults", "sse-retry"];
const MODERN_SCENARIOS: [&str; 7] = [
    "tools_call",
    "request-metadata",
    "sep-2322-client-request-state",
    "http-standard-headers",
    "http-custom-headers",
    "http-invalid-tool-headers",
    "json-schema-ref-no-deref",
];

#[tokio::test]
async fn e6_servers_of_2025_11_25_find_nothing_wrong_with_the_gateway_as_a_client() -> Result<()> {
    clients_pass("2025-11-25", "legacy", &LEGACY_SCENARIOS).await
}

#[tokio::test]
async fn e6_servers_of_2026_07_28_find_nothing_wrong_with_clients_that_are_passed_through() -> Result<()> {
    clients_pass("2026-07-28", "modern", &MODERN_SCENARIOS).await
}

#[tokio::test]
async fn e6_servers_of_2026_07_28_find_nothing_wrong_with_the_gateway_in_front_of_sessions() -> Result<()> {
    clients_pass("2026-07-28", "legacy", &MODERN_SCENARIOS).await
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
