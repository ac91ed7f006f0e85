//! The life of a session on the wire: what is durable, who may use it, how it ends, which status says what
//! (S2, S4–S7, S9, S12–S14, S17).

use anyhow::{Context as _, Result};
use mainstay_tests::{Gateway, RawClient, UpH, UpS, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

const VERSION: &str = "2025-11-25";
const BOUND: Duration = Duration::from_secs(20);

async fn stand(extra: &str) -> Result<(UpH, Gateway)> {
    let up = UpH::start().await?;
    let gateway = Gateway::start(&format!("{extra}{}", up.toml("h")), &[]).await?;
    Ok((up, gateway))
}

#[tokio::test]
async fn s2_an_initialize_that_fails_leaves_no_row_and_no_child() -> Result<()> {
    let up = UpS::new(&["--exit-before-output", "1"])?;
    let gateway = Gateway::start(&up.toml("s")?, &[]).await?;
    let mut client = RawClient::new(&gateway.url("s")?)?;
    client.initialize(VERSION).await?.error()?;
    assert!(client.session.is_none(), "no id was given");
    assert_eq!(gateway.status().await?["sessions"]["stored"], 0);
    for child in up.starts()? {
        wait_until("the child is gone", BOUND, async || !child.is_alive()).await?;
    }
    Ok(())
}

#[tokio::test]
async fn s2_the_row_is_there_when_the_answer_is() -> Result<()> {
    let (_up, mut gateway) = stand("").await?;
    let url = gateway.url("h")?;
    let mut client = RawClient::new(&url)?;
    client.initialize(VERSION).await?.result()?;
    gateway.kill_all().await?;
    gateway.start_again().await?;
    client.notify("notifications/initialized", Value::Null).await?;
    client.call_through("echo", json!({"text": "still here"})).await?.result()?;
    Ok(())
}

#[tokio::test]
async fn s4_another_principal_learns_nothing_on_any_path_live_restored_or_ended() -> Result<()> {
    let (up, mut gateway) = stand("").await?;
    let url = gateway.url("h")?;
    let mut alice = RawClient::new(&url)?.with_header("x-agent-name", "alice")?;
    alice.establish(VERSION).await?;
    let session = alice.session.clone().context("an id")?;
    let bob = RawClient::new(&url)?.with_header("x-agent-name", "bob")?.with_session(&session, VERSION);
    let nobody = RawClient::new(&url)?.with_session(&session, VERSION);
    let unknown = RawClient::new(&url)?.with_session("an-id-that-never-was", VERSION);
    let told = async |client: &RawClient| -> Result<(u16, Value)> {
        let outcome = client.request("tools/list", Value::Null).await?;
        let mut body = outcome.response().context("a body")?.clone();
        body["id"] = Value::Null;
        Ok((outcome.status, body))
    };
    let expected = told(&unknown).await?;
    assert_eq!(expected.0, 404);
    let traffic = up.log().await?.len();
    for stage in ["live", "restored", "ended"] {
        match stage {
            "restored" => {
                gateway.kill_worker().await?;
            }
            "ended" => assert_eq!(alice.delete().await?, 204),
            _ => {}
        }
        for stranger in [&bob, &nobody] {
            assert_eq!(told(stranger).await?, expected, "{stage}: POST is answered like an unknown id");
            assert_eq!(stranger.get_stream(None).await?.status, 404, "{stage}: GET");
            assert_eq!(stranger.delete().await?, 404, "{stage}: DELETE");
        }
        if stage == "live" {
            assert_eq!(up.log().await?.len(), traffic, "no upstream traffic for a stranger");
        }
        if stage != "ended" {
            alice.call_through("echo", json!({"text": stage})).await?.result()?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn s5_idle_sessions_expire_busy_ones_do_not() -> Result<()> {
    let (_up, gateway) = stand("[session]\nidle_expiry = \"4s\"\n").await?;
    let url = gateway.url("h")?;
    let idle = RawClient::open(&url, VERSION).await?;
    let calling = RawClient::open(&url, VERSION).await?;
    let listening = RawClient::open(&url, VERSION).await?;
    let stream = listening.get_stream(None).await?;
    assert_eq!(stream.status, 200);
    let slow = calling.call_through("slow", json!({"ms": 8000})).await?;
    slow.result().context("a call in flight keeps its session")?;
    assert_eq!(idle.request("tools/list", Value::Null).await?.status, 404, "expired");
    listening.request("tools/list", Value::Null).await?.result().context("an open stream keeps its session")?;
    calling.request("tools/list", Value::Null).await?.result()?;
    Ok(())
}

#[tokio::test]
async fn s5_s9_a_session_that_came_overdue_while_nothing_ran_is_expired_at_the_start() -> Result<()> {
    let (up, mut gateway) = stand("[session]\nidle_expiry = \"3s\"\n").await?;
    let client = RawClient::open(&gateway.url("h")?, VERSION).await?;
    gateway.kill_all().await?;
    tokio::time::sleep(Duration::from_millis(3200)).await;
    gateway.start_again().await?;
    assert_eq!(gateway.status().await?["sessions"]["stored"], 0, "expired durably, before anybody asked");
    assert_eq!(client.request("tools/list", Value::Null).await?.status, 404);
    wait_until("its server is told", BOUND, async || up.count("/deletes").await.is_ok_and(|count| count == 1)).await
}

#[tokio::test]
async fn s6_s7_a_deleted_id_stays_dead_over_every_restart_and_its_server_is_told() -> Result<()> {
    let (up, mut gateway) = stand("").await?;
    let client = RawClient::open(&gateway.url("h")?, VERSION).await?;
    assert_eq!(client.delete().await?, 204);
    wait_until("its server is told", BOUND, async || up.count("/deletes").await.is_ok_and(|count| count == 1)).await?;
    for _ in 0..2 {
        assert_eq!(client.request("tools/list", Value::Null).await?.status, 404);
        assert_eq!(client.get_stream(None).await?.status, 404);
        assert_eq!(client.delete().await?, 404, "the first ending stands");
        gateway.kill_all().await?;
        gateway.start_again().await?;
    }
    Ok(())
}

#[tokio::test]
async fn s7_distinct_statuses_tell_ended_from_unknown() -> Result<()> {
    let (_up, mut gateway) = stand("[session]\nterminal_status = \"distinct\"\n").await?;
    let client = RawClient::open(&gateway.url("h")?, VERSION).await?;
    client.delete().await?;
    for _ in 0..2 {
        let outcome = client.request("tools/list", Value::Null).await?;
        assert_eq!((outcome.status, outcome.named_outcome()), (410, Some("session_deleted")));
        gateway.kill_all().await?;
        gateway.start_again().await?;
    }
    let unknown = RawClient::new(&gateway.url("h")?)?.with_session("an-id-that-never-was", VERSION);
    assert_eq!(unknown.request("tools/list", Value::Null).await?.status, 404);
    Ok(())
}

#[tokio::test]
async fn u7_a_delete_that_cannot_be_paid_is_paid_later() -> Result<()> {
    let (mut up, gateway) = stand("").await?;
    let client = RawClient::open(&gateway.url("h")?, VERSION).await?;
    up.order("/delete", json!({"status": 503})).await?;
    assert_eq!(client.delete().await?, 204, "the client does not wait for its server");
    wait_until("it was tried", BOUND, async || up.count("/deletes").await.is_ok_and(|count| count >= 1)).await?;
    up.kill().await?;
    up.start_again().await?;
    wait_until("it is paid", Duration::from_secs(40), async || up.count("/deletes").await.is_ok_and(|count| count >= 1))
        .await
}

#[tokio::test]
async fn s14_a_tampered_row_is_refused_kept_and_reported() -> Result<()> {
    let (_up, mut gateway) = stand("").await?;
    let client = RawClient::open(&gateway.url("h")?, VERSION).await?;
    let intact = RawClient::open(&gateway.url("h")?, VERSION).await?;
    gateway.stop().await?;
    let ledger = gateway.state_dir().join("ledger.db");
    let script = "import sqlite3,sys,hashlib\n\
        db=sqlite3.connect(sys.argv[1]); key=hashlib.sha256(sys.argv[2].encode()).digest()\n\
        body=bytearray(db.execute('select body from sessions where key=?',(key,)).fetchone()[0]); body[len(body)//2]^=1\n\
        db.execute('update sessions set body=? where key=?',(bytes(body),key)); db.commit()";
    let session = client.session.clone().context("an id")?;
    let tampered = std::process::Command::new("python3").arg("-c").arg(script).arg(&ledger).arg(&session).status()?;
    assert!(tampered.success());
    gateway.start_again().await?;
    assert_eq!(client.request("tools/list", Value::Null).await?.status, 404, "refused");
    intact.call_through("echo", json!({"text": "others go on"})).await?.result()?;
    let (_, listed) = gateway.admin_get("/api/v1/sessions").await?;
    assert!(listed.to_string().contains("can't be read"), "reported and kept: {listed}");
    Ok(())
}

#[tokio::test]
async fn s17_requests_are_checked_as_the_transport_demands() -> Result<()> {
    let (_up, gateway) = stand("").await?;
    let client = RawClient::open(&gateway.url("h")?, VERSION).await?;
    let list = client.message("tools/list", Value::Null);
    let status = async |client: RawClient| anyhow::Ok(client.post(&list).await?.status);
    assert_eq!(status(client.clone().with_header("accept", "application/json")?).await?, 406);
    assert_eq!(status(client.clone().with_header("content-type", "text/plain")?).await?, 415);
    assert_eq!(status(client.clone().with_header("mcp-protocol-version", "2099-01-01")?).await?, 400);
    assert_eq!(status(client.clone().with_header("mcp-protocol-version", "2025-06-18")?).await?, 200);
    assert_eq!(status(client.clone().with_header("origin", "http://evil.example.com")?).await?, 403);
    assert_eq!(status(client.clone().with_header("host", "evil.example.com")?).await?, 403);
    assert_eq!(status(client.clone().with_header("accept", "*/*")?).await?, 200);
    assert_eq!(client.clone().with_header("accept", "application/json")?.get_stream(None).await?.status, 406);
    for (body, status) in [("{", 400), ("[]", 400), ("7", 400), (r#"{"jsonrpc":"1.0","id":1,"method":"ping"}"#, 400)] {
        assert_eq!(client.post_bytes(body).await?.status, status, "{body}");
    }
    let twice = r#"{"jsonrpc":"2.0","id":1,"method":"ping","meth\u006fd":"tools/list"}"#;
    assert_eq!(client.post_bytes(twice).await?.status, 400, "a name given twice is nobody's guess");
    let batch = client.post(&json!([list])).await?.finish(BOUND).await?;
    assert_eq!(batch.status, 400, "no batches in {VERSION}");
    let unknown = RawClient::new(&gateway.url("nowhere")?)?;
    assert_eq!(unknown.clone().initialize(VERSION).await?.named_outcome(), Some("server_unknown"));
    let probe = json!({"jsonrpc": "2.0", "id": "server-discover-probe-1", "method": "server/discover", "params": {}});
    let answer = RawClient::new(&gateway.url("h")?)?.post(&probe).await?.finish(BOUND).await?;
    assert_eq!(answer.status, 400, "E0: a probe is sent on to `initialize`");
    assert_eq!(answer.response().context("a body")?["id"], "server-discover-probe-1");
    Ok(())
}

#[tokio::test]
async fn s17_batches_belong_to_2025_03_26() -> Result<()> {
    let (_up, gateway) = stand("").await?;
    let client = RawClient::open(&gateway.url("h")?, "2025-03-26").await?;
    let calls = json!([
        {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "echo", "arguments": {"text": "one"}}},
        {"jsonrpc": "2.0", "method": "notifications/roots/list_changed"},
        {"jsonrpc": "2.0", "id": "1", "method": "tools/call", "params": {"name": "echo", "arguments": {"text": "two"}}},
        {"jsonrpc": "2.0", "id": 3, "method": "ping"},
    ]);
    let outcome = client.post(&calls).await?.finish(BOUND).await?;
    assert_eq!(outcome.status, 200);
    let text = |id: Value| {
        let answer = outcome.messages.iter().find(|message| message["id"] == id);
        answer.map(|answer| answer["result"]["content"][0]["text"].clone())
    };
    assert_eq!(text(json!(1)), Some(json!("one")));
    assert_eq!(text(json!("1")), Some(json!("two")));
    assert!(text(json!(3)).is_some());
    let only = json!([{"jsonrpc": "2.0", "method": "notifications/roots/list_changed"}]);
    assert_eq!(client.post(&only).await?.status, 202);
    let hello = json!([{"jsonrpc": "2.0", "id": 9, "method": "initialize", "params": {}}]);
    assert_eq!(client.post(&hello).await?.status, 400, "`initialize` is never part of a batch");
    Ok(())
}

#[tokio::test]
async fn s12_a_body_above_the_limit_is_refused_and_the_session_goes_on() -> Result<()> {
    let (_up, gateway) = stand("[limits]\nbody_bytes_max = 100000\n").await?;
    let client = RawClient::open(&gateway.url("h")?, VERSION).await?;
    let outcome = client.call("echo", json!({"text": "x".repeat(200_000)})).await?;
    assert_eq!(outcome.status, 413);
    assert!(outcome.body_text().starts_with("body_too_large"), "S13a: the id was not read, so it is plain text");
    client.call_through("echo", json!({"text": "small"})).await?.result()?;
    Ok(())
}

#[tokio::test]
async fn t6_one_gateway_owns_a_state_directory_and_files_are_private() -> Result<()> {
    let (_up, gateway) = stand("").await?;
    RawClient::open(&gateway.url("h")?, VERSION).await?;
    let config = gateway.dir().join("second.toml");
    std::fs::write(&config, "[servers.x]\ncommand = \"true\"\n")?;
    let config = config.to_str().context("a path")?;
    let second =
        gateway.cli(&["serve", "--config", config, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]).await?;
    assert!(!second.status.success());
    let text = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(text.contains(&gateway.keeper_pid()?.to_string()), "it names the owner: {text}");

    let mut folders = vec![gateway.state_dir()];
    while let Some(folder) = folders.pop() {
        assert_eq!(std::fs::metadata(&folder)?.permissions().mode() & 0o777, 0o700, "{}", folder.display());
        for entry in std::fs::read_dir(&folder)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                folders.push(entry.path());
            } else {
                assert_eq!(entry.metadata()?.permissions().mode() & 0o077, 0, "{}", entry.path().display());
            }
        }
    }
    Ok(())
}

/// A fast call costs no disk write and no database statement: the ledger's own counters, and the kernel's.
#[tokio::test]
async fn a_fast_call_writes_nothing() -> Result<()> {
    let (_up, gateway) = stand("[session]\nanswer_json_within = \"5s\"\n").await?;
    let client = RawClient::open(&gateway.url("h")?, VERSION).await?;
    client.call("echo", json!({"text": "warm"})).await?.result()?;
    let worker = gateway.worker().await?;
    let before = (gateway.status().await?["ledger"].clone(), written(worker.pid)?);
    let started = std::time::Instant::now();
    const CALLS: u64 = 500;
    for _ in 0..CALLS {
        let outcome = client.call("echo", json!({"text": "fast"})).await?;
        assert!(outcome.header("content-type").is_some_and(|media| media.starts_with("application/json")));
    }
    let after = (gateway.status().await?["ledger"].clone(), written(worker.pid)?);
    let grown = |name: &str| after.0[name].as_u64().zip(before.0[name].as_u64()).map(|(after, before)| after - before);
    // The status itself reads the ledger, and the store learns of the session's use every 5 s, whatever the calls.
    let rounds = started.elapsed().as_secs() / 5 + 1;
    assert_eq!(grown("commits_authority"), Some(0));
    assert_eq!(grown("commits_obligation"), Some(0));
    assert!(
        grown("commits_hint").context("counted")? <= rounds,
        "{grown:?} in {rounds} rounds",
        grown = grown("commits_hint")
    );
    assert!(grown("reads").context("counted")? <= 4 + rounds * 3, "{:?} reads", grown("reads"));
    assert!(after.1 - before.1 <= rounds * 65_536, "{} bytes written for {CALLS} calls", after.1 - before.1);
    Ok(())
}

/// Bytes that a process has caused to be written to storage.
fn written(pid: u32) -> Result<u64> {
    let io = std::fs::read_to_string(format!("/proc/{pid}/io"))?;
    let line = io.lines().find_map(|line| line.strip_prefix("write_bytes: ")).context("the kernel counts it")?;
    Ok(line.parse()?)
}

/// A client that sends DELETE and hangs up at once, as Python's does. In every other round both is there when the gateway
/// looks.
#[tokio::test]
async fn s1_s6_a_delete_whose_client_hangs_up_ends_the_session_all_the_same() -> Result<()> {
    use tokio::io::AsyncWriteExt as _;
    let (up, gateway) = stand("").await?;
    let url = gateway.url("h")?;
    const ROUNDS: u64 = 20;
    for round in 0..ROUNDS {
        let client = RawClient::open(&url, VERSION).await?;
        let session = client.session.clone().context("an id")?;
        let worker = Pid::from_raw(i32::try_from(gateway.worker().await?.pid)?).context("a worker")?;
        if round % 2 == 0 {
            kill_process(worker, Signal::STOP)?;
        }
        let mut socket = tokio::net::TcpStream::connect(gateway.mcp_address()?).await?;
        let head = format!("DELETE /mcp/h HTTP/1.1\r\nhost: localhost\r\nmcp-session-id: {session}\r\n\r\n");
        socket.write_all(head.as_bytes()).await?;
        tokio::time::sleep(Duration::from_micros(200 * round)).await;
        drop(socket);
        kill_process(worker, Signal::CONT)?;
        let ended = async || client.request("tools/list", Value::Null).await.is_ok_and(|outcome| outcome.status == 404);
        wait_until("the id is dead", BOUND, ended).await?;
        assert_eq!(client.delete().await?, 404, "and stays so");
    }
    wait_until("every server's session was deleted", BOUND, async || {
        up.count("/deletes").await.is_ok_and(|count| count == ROUNDS)
    })
    .await
}

#[tokio::test]
async fn s6_of_many_deletes_at_once_the_first_ends_the_session_and_none_fails() -> Result<()> {
    let (_up, gateway) = stand("").await?;
    let client = RawClient::open(&gateway.url("h")?, VERSION).await?;
    let deletes = (0..6).map(|_| {
        let client = client.clone();
        tokio::spawn(async move { client.delete().await })
    });
    let mut statuses = Vec::new();
    for delete in deletes.collect::<Vec<_>>() {
        statuses.push(delete.await??);
    }
    statuses.sort_unstable();
    assert_eq!(statuses, [204, 404, 404, 404, 404, 404]);
    Ok(())
}

#[tokio::test]
async fn s9_a_child_that_no_worker_has_taken_up_ends_with_its_session() -> Result<()> {
    let up = UpS::new(&[])?;
    let mut gateway = Gateway::start(&format!("[session]\nidle_expiry = \"6s\"\n{}", up.toml("s")?), &[]).await?;
    let client = RawClient::open(&gateway.url("s")?, VERSION).await?;
    client.call_through("echo", json!({"text": "a"})).await?.result()?;
    let child = up.starts()?.pop().context("a child")?;
    gateway.kill_worker().await?;
    assert!(child.is_alive(), "it waits for its session");
    wait_until("it ends with its session", BOUND, async || !child.is_alive()).await
}

#[tokio::test]
async fn s13a_every_refusal_of_a_request_carries_its_id_or_is_no_json_rpc_message() -> Result<()> {
    let (_up, gateway) = stand("").await?;
    let client = RawClient::open(&gateway.url("h")?, VERSION).await?;
    let list = json!({"jsonrpc": "2.0", "id": "mine", "method": "tools/list"});
    for (name, value) in [
        ("host", "evil.example.com"),
        ("origin", "http://evil.example.com"),
        ("accept", "text/html"),
        ("content-type", "text/plain"),
        ("mcp-protocol-version", "1999-01-01"),
    ] {
        let outcome = client.clone().with_header(name, value)?.post(&list).await?.finish(BOUND).await?;
        assert!(outcome.status >= 400);
        assert_eq!(outcome.response().context(name)?["id"], "mine", "{name}");
    }
    let invalid = r#"{"jsonrpc":"2.0","id":"mine","method":"tools/list","params":3}"#;
    let outcome = client.post_bytes(invalid).await?.finish(BOUND).await?;
    assert_eq!(outcome.response().context("a body")?["id"], "mine");
    let outcome = client.post_bytes("{{{").await?.finish(BOUND).await?;
    assert_eq!(outcome.status, 400);
    assert!(outcome.header("content-type").is_some_and(|media| media.starts_with("text/plain")));
    Ok(())
}

#[tokio::test]
async fn s9_a_start_that_can_never_work_ends_and_names_the_file() -> Result<()> {
    let (_up, mut gateway) = stand("").await?;
    RawClient::open(&gateway.url("h")?, VERSION).await?;
    gateway.stop().await?;
    // The log beside the ledger holds its newest pages: both go, or SQLite mends the one from the other.
    let files = ["ledger.db", "ledger.db-wal"].map(|name| gateway.state_dir().join(name));
    let intact = files.each_ref().map(|file| std::fs::read(file).unwrap_or_default());
    for (file, bytes) in files.iter().zip(&intact) {
        std::fs::write(file, vec![b'x'; bytes.len()])?;
    }
    gateway.launch()?;
    let status = gateway.wait_for_end(BOUND).await?;
    assert!(!status.success());
    assert!(gateway.log().contains("ledger.db"), "it names the file: {}", gateway.log());
    assert!(std::fs::read(&files[0])?.iter().all(|byte| *byte == b'x'), "and leaves it as it is");
    for (file, bytes) in files.iter().zip(&intact) {
        std::fs::write(file, bytes)?;
    }
    gateway.start_again().await?;
    assert_eq!(gateway.status().await?["sessions"]["stored"], 1);
    Ok(())
}
