//! UP-S without a gateway: each switch does what it says.

use anyhow::{Context as _, Result};
use mainstay_tests::{Proc, StdioPeer, UpS, descendants, wait_until};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const BOUND: Duration = Duration::from_secs(10);

fn initialize() -> Value {
    json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {
        "protocolVersion": "2025-11-25", "capabilities": {"elicitation": {}}, "clientInfo": {"name": "t", "version": "1"}}})
}

fn call(id: u64, tool: &str, arguments: Value) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "method": "tools/call",
           "params": {"name": tool, "arguments": arguments, "_meta": {"progressToken": id}}})
}

async fn opened(up: &UpS) -> Result<StdioPeer> {
    let mut peer = up.spawn()?;
    peer.request(&initialize(), BOUND).await?;
    peer.send(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"})).await?;
    Ok(peer)
}

fn text(answer: &Value) -> &str {
    answer["result"]["content"][0]["text"].as_str().unwrap_or_default()
}

#[tokio::test]
async fn a_well_behaved_server_answers_and_ends_with_its_input() -> Result<()> {
    let up = UpS::new(&[])?;
    let mut peer = opened(&up).await?;
    assert_eq!(text(&peer.request(&call(1, "echo", json!({"text": "a\nb"})), BOUND).await?), "a\nb");
    let facts: Value = serde_json::from_str(text(&peer.request(&call(2, "whoami", json!({})), BOUND).await?))?;
    let pid = u32::try_from(facts["pid"].as_u64().context("no pid")?)?;
    assert_eq!(Some(pid), peer.child.id());
    assert_eq!(facts["calls"], 2);
    peer.request(&call(3, "incr", json!({})), BOUND).await?;
    assert_eq!(up.incr_lines()?.len(), 1);
    let big = peer.request(&call(4, "big", json!({"bytes": 2_000_000, "multibyte": true})), BOUND).await?;
    assert_eq!(text(&big), mainstay_tests::server::big_text(2_000_000, true));
    peer.close();
    assert_eq!(peer.exit_code(BOUND).await?, Some(0));
    assert_eq!(up.methods(pid)?[..3], ["initialize", "notifications/initialized", "tools/call"]);
    assert_eq!(up.starts()?.len(), 1);
    Ok(())
}

#[tokio::test]
async fn progress_questions_and_cancellation_work_over_pipes() -> Result<()> {
    let up = UpS::new(&["--late", "1"])?;
    let mut peer = opened(&up).await?;
    peer.send(&call(1, "prog", json!({"n": 2}))).await?;
    let mut seen = Vec::new();
    for _ in 0..4 {
        let message = peer.message(BOUND).await?;
        seen.push(message["params"]["progress"].as_u64());
    }
    assert_eq!(seen, [Some(1), Some(2), None, Some(3)], "the last one is late");
    peer.send(&call(2, "ask", json!({"message": "?"}))).await?;
    let question = peer.message(BOUND).await?;
    peer.send(&json!({"jsonrpc": "2.0", "id": question["id"], "result": {"action": "decline"}})).await?;
    assert!(text(&peer.message(BOUND).await?).contains("decline"));
    peer.send(&call(3, "slow", json!({"ms": 60_000}))).await?;
    peer.send(&call(4, "slow", json!({"ms": 10}))).await?;
    assert_eq!(peer.message(BOUND).await?["id"], 4, "calls run beside each other");
    peer.send(&json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 3}})).await?;
    assert_eq!(peer.request(&call(5, "read", json!({})), BOUND).await?["id"], 5);
    Ok(())
}

#[tokio::test]
async fn ac06_a_deaf_server_outlives_term_and_eof() -> Result<()> {
    let up = UpS::new(&["--ignore-term", "--ignore-eof"])?;
    let mut peer = opened(&up).await?;
    let server = up.starts()?[0];
    assert!(server.signal(rustix::process::Signal::TERM));
    peer.close();
    let both = async || {
        let trace = up.trace().unwrap_or_default();
        ["term", "eof"].iter().all(|event| trace.iter().any(|entry| entry["event"] == *event))
    };
    wait_until("both to be heard", BOUND, both).await?;
    assert!(server.is_alive());
    assert!(server.kill());
    assert_eq!(peer.exit_code(BOUND).await?, None);
    Ok(())
}

#[tokio::test]
async fn ac06_below_a_shell_the_server_is_a_grandchild() -> Result<()> {
    for (flag, own_group) in [("--grandchild", false), ("--setsid", true)] {
        let up = UpS::new(&[flag])?;
        let mut peer = opened(&up).await?;
        let launcher = peer.child.id().context("the launcher is there")?;
        let server = up.starts()?[0];
        assert_ne!(server.pid, launcher);
        assert!(descendants(launcher).contains(&server));
        assert!(descendants(launcher).len() >= 2, "a shell lies between them");
        let start = up.trace()?[0].clone();
        assert_eq!(start["pgid"] == start["pid"], own_group, "{flag}");
        peer.close();
        assert_eq!(peer.exit_code(BOUND).await?, Some(0));
        wait_until("the server to be gone", BOUND, async || !server.is_alive()).await?;
    }
    Ok(())
}

#[tokio::test]
async fn ac07_exits_come_when_they_were_ordered() -> Result<()> {
    let up = UpS::new(&["--exit-after", "100", "--exit-code", "75"])?;
    let began = Instant::now();
    assert_eq!(opened(&up).await?.exit_code(BOUND).await?, Some(75));
    assert!(began.elapsed() >= Duration::from_millis(100));

    let up = UpS::new(&["--exit-after-answer", "tools/list"])?;
    let mut peer = opened(&up).await?;
    let answer = peer.request(&json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list"}), BOUND).await?;
    assert!(answer["result"]["tools"].is_array(), "the answer comes first");
    assert_eq!(peer.exit_code(BOUND).await?, Some(0));

    let up = UpS::new(&["--exit-before-output", "9"])?;
    assert_eq!(up.spawn()?.exit_code(BOUND).await?, Some(9));

    let up = UpS::new(&["--exit-on-first-noninit"])?;
    opened(&up).await?.request(&call(1, "read", json!({})), BOUND).await?;
    let mut peer = up.spawn()?;
    peer.send(&call(1, "read", json!({}))).await?;
    assert_eq!(peer.exit_code(BOUND).await?, Some(3));
    Ok(())
}

#[tokio::test]
async fn ac07_a_handshake_can_go_on_for_ever() -> Result<()> {
    let up = UpS::new(&["--progress-forever-on-init"])?;
    let mut peer = up.spawn()?;
    peer.send(&initialize()).await?;
    for done in 1..=3 {
        assert_eq!(peer.message(BOUND).await?["params"]["progress"], done);
    }
    let up = UpS::new(&["--mute-on-init"])?;
    let mut peer = up.spawn()?;
    peer.send(&initialize()).await?;
    assert!(peer.line(Duration::from_millis(200)).await.is_err(), "no answer");
    Ok(())
}

#[tokio::test]
async fn ac08_noise_and_chatter_come_where_they_were_ordered() -> Result<()> {
    let up = UpS::new(&["--noise"])?;
    let mut peer = up.spawn()?;
    peer.send(&initialize()).await?;
    let noise = peer.line(BOUND).await?.context("no line")?;
    assert!(serde_json::from_str::<Value>(&noise).is_err());
    assert_eq!(peer.message(BOUND).await?["id"], 0);

    // More than any pipe holds: unread standard error stops the answer, as it does with real servers.
    let up = UpS::new(&["--stderr-bytes", "4194304"])?;
    let mut peer = up.spawn()?;
    peer.send(&initialize()).await?;
    assert!(peer.line(Duration::from_millis(200)).await.is_err(), "blocked");
    let mut stderr = peer.child.stderr.take().context("no standard error")?;
    let drained = tokio::spawn(async move { tokio::io::copy(&mut stderr, &mut tokio::io::sink()).await });
    assert_eq!(peer.message(BOUND).await?["id"], 0);
    peer.close();
    assert_eq!(drained.await??, 4_194_304);
    Ok(())
}

#[tokio::test]
async fn ac06_the_lock_has_one_holder() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let lock = dir.path().join("lock").display().to_string();
    let up = UpS::new(&["--lock", &lock])?;
    let first = opened(&up).await?;
    assert_eq!(up.spawn()?.exit_code(BOUND).await?, Some(4));
    let pid = first.child.id().context("it runs")?;
    assert!(Proc::of(pid).is_some_and(Proc::kill));
    wait_until("the lock to be free", BOUND, async || Proc::of(pid).is_none_or(|process| !process.is_alive())).await?;
    opened(&up).await?;
    Ok(())
}

#[tokio::test]
async fn a_version_can_be_forced() -> Result<()> {
    let up = UpS::new(&["--protocol", "2024-11-05", "--name", "old"])?;
    let mut peer = up.spawn()?;
    let answer = peer.request(&initialize(), BOUND).await?;
    assert_eq!(answer["result"]["protocolVersion"], "2024-11-05");
    assert_eq!(answer["result"]["serverInfo"]["name"], "old");
    Ok(())
}
