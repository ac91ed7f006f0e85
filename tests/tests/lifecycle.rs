//! Suspension, drain and caps on the wire (S8, S10–S12, AC-05).

use anyhow::{Context as _, Result, ensure};
use futures_util::StreamExt as _;
use mainstay_tests::{Gateway, Proc, RawClient, UpH, UpS, wait_until};
use serde_json::{Value, json};
use std::time::Duration;
use tokio::io::AsyncWriteExt as _;

const VERSION: &str = "2025-11-25";
const BOUND: Duration = Duration::from_secs(30);
/// Clients at a time.
const CLIENTS: usize = 16;
/// Sessions of children that are lived in one test.
const CHILDREN: usize = 120;

async fn live_in_memory(gateway: &Gateway) -> Result<u64> {
    gateway.status().await?["sessions"]["live"].as_u64().context("a count")
}

#[tokio::test]
async fn s11_an_unused_http_session_is_suspended_and_comes_back_under_its_upstream_id() -> Result<()> {
    let up = UpH::start().await?;
    let gateway = Gateway::start(&format!("[session]\nsuspend_after = \"1s\"\n{}", up.toml("h")), &[]).await?;
    let client = RawClient::open(&gateway.url("h")?, VERSION).await?;
    let before = client.call("whoami", json!({})).await?.json()?;
    wait_until("it is suspended", BOUND, async || live_in_memory(&gateway).await.is_ok_and(|live| live == 0)).await?;
    let after = client.call("whoami", json!({})).await?.json()?;
    assert_eq!(after["session"], before["session"]);
    assert_eq!(after["calls"], 2);
    assert_eq!(up.count("/initializes").await?, 1);
    assert_eq!(up.count("/deletes").await?, 0);
    Ok(())
}

#[tokio::test]
async fn s11_a_child_is_let_go_unless_it_is_stateful_or_a_stream_is_open() -> Result<()> {
    let (plain, stateful, watched) = (UpS::new(&[])?, UpS::new(&[])?, UpS::new(&[])?);
    let config = format!(
        "[session]\nsuspend_after = \"1s\"\n{}{}stateful = true\n{}listen_stream = \"always\"\n",
        plain.toml("plain")?,
        stateful.toml("stateful")?,
        watched.toml("watched")?,
    );
    let gateway = Gateway::start(&config, &[]).await?;
    let mut clients = Vec::new();
    for server in ["plain", "stateful", "watched"] {
        let client = RawClient::open(&gateway.url(server)?, VERSION).await?;
        client.call_through("whoami", json!({})).await?.result()?;
        clients.push(client);
    }
    let stream = clients[2].get_stream(None).await?;
    assert_eq!(stream.status, 200);
    let child = plain.starts()?.pop().context("a child")?;
    wait_until("the plain child is let go", BOUND, async || !child.is_alive()).await?;
    assert_eq!(live_in_memory(&gateway).await?, 2, "the other two stay");
    let outcome = clients[0].call_through("whoami", json!({})).await?;
    assert_eq!(outcome.json()?["calls"], 1, "a new child");
    assert_eq!(outcome.result()?["_meta"]["mainstay/notice"]["event"], "remade", "and that is said");
    assert_eq!(stateful.starts()?.len(), 1);
    assert_eq!(watched.starts()?.len(), 1);
    Ok(())
}

/// A client keeps its listening stream's cursor over the suspension, and misses nothing that comes after it.
#[tokio::test]
async fn r2_s11_a_listening_stream_goes_on_behind_its_cursor_after_a_suspension() -> Result<()> {
    let up = UpH::start().await?;
    let gateway = Gateway::start(&format!("[session]\nsuspend_after = \"1s\"\n{}", up.toml("h")), &[]).await?;
    let client = RawClient::open(&gateway.url("h")?, VERSION).await?;
    let mut listening = client.get_stream(None).await?;
    listening.next_event(BOUND).await?.context("primed")?;
    wait_until("the server is listened to", BOUND, async || up.count("/gets").await.is_ok_and(|gets| gets > 0)).await?;
    let mut cursor = String::new();
    for _ in 0..3 {
        up.order("/list_changed", json!({})).await?;
        cursor = listening.next_event(BOUND).await?.context("a notification")?.id.context("with an id")?;
    }
    drop(listening);
    wait_until("it is suspended", BOUND, async || live_in_memory(&gateway).await.is_ok_and(|live| live == 0)).await?;
    let gets = up.count("/gets").await?;
    let mut resumed = client.get_stream(Some(&cursor)).await?;
    let primed = resumed.next_event(BOUND).await?.context("primed")?;
    assert_eq!(primed.id.as_deref(), Some(cursor.as_str()));
    wait_until("the server is listened to again", BOUND, async || up.count("/gets").await.is_ok_and(|now| now > gets))
        .await?;
    for _ in 0..3 {
        up.order("/list_changed", json!({})).await?;
        let message = resumed.next_message(BOUND).await?.context("a notification")?;
        assert_eq!(message["method"], "notifications/tools/list_changed");
    }
    Ok(())
}

#[tokio::test]
async fn s11_a_call_that_still_runs_for_an_earlier_worker_keeps_its_child() -> Result<()> {
    let up = UpS::new(&[])?;
    let mut gateway = Gateway::start(&format!("[session]\nsuspend_after = \"1s\"\n{}", up.toml("s")?), &[]).await?;
    let client = RawClient::open(&gateway.url("s")?, VERSION).await?;
    let message = client.message("tools/call", json!({"name": "slow", "arguments": {"ms": 6000}}));
    let mut exchange = client.post(&message).await?;
    let cursor = exchange.next_event(BOUND).await?.context("primed")?.id.context("with an id")?;
    gateway.kill_worker().await?;
    client.request("tools/list", Value::Null).await?.result()?;
    // Unused for longer than it takes to be suspended, but for the call.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let outcome = client.get_stream(Some(&cursor)).await?.finish(BOUND).await?;
    assert!(outcome.response().context("the answer")?["result"].is_object(), "{outcome:?}");
    assert_eq!(up.starts()?.len(), 1);
    Ok(())
}

#[tokio::test]
async fn s11_a_child_that_no_worker_has_taken_up_is_let_go_in_its_time() -> Result<()> {
    let up = UpS::new(&[])?;
    let mut gateway = Gateway::start(&format!("[session]\nsuspend_after = \"1s\"\n{}", up.toml("s")?), &[]).await?;
    let client = RawClient::open(&gateway.url("s")?, VERSION).await?;
    client.call_through("echo", json!({"text": "a"})).await?.result()?;
    let child = up.starts()?.pop().context("a child")?;
    gateway.kill_worker().await?;
    wait_until("it is let go", BOUND, async || !child.is_alive()).await?;
    client.call_through("echo", json!({"text": "b"})).await?.result()?;
    Ok(())
}

#[tokio::test]
async fn s12_a_principals_cap_refuses_the_next_session_and_evicts_none() -> Result<()> {
    let up = UpH::start().await?;
    let mut gateway = Gateway::start(&format!("[session]\nmax_per_principal = 3\n{}", up.toml("h")), &[]).await?;
    let url = gateway.url("h")?;
    let agent = |name: &str| RawClient::new(&url)?.with_header("x-agent-name", name);
    let mut open = Vec::new();
    for _ in 0..3 {
        let mut client = agent("alice")?;
        client.establish(VERSION).await?;
        open.push(client);
    }
    for _ in 0..2 {
        let outcome = agent("alice")?.initialize(VERSION).await?;
        assert_eq!((outcome.status, outcome.named_outcome()), (429, Some("limit_reached")));
        assert!(outcome.header("retry-after").is_some());
        let mut other = agent("bob")?;
        other.establish(VERSION).await?;
        for client in &open {
            client.call("echo", json!({"text": "still served"})).await?.result()?;
        }
        // The count is the ledger's, not the worker's.
        gateway.kill_worker().await?;
    }
    open.pop().context("one")?.delete().await?;
    agent("alice")?.establish(VERSION).await?;
    Ok(())
}

#[tokio::test]
async fn s8_a_drain_lets_the_call_in_flight_finish_refuses_new_ones_and_survives_kill_9() -> Result<()> {
    let up = UpH::start().await?;
    let mut gateway = Gateway::start(&up.toml("h"), &[]).await?;
    let client = RawClient::open(&gateway.url("h")?, VERSION).await?;
    let (_, listed) = gateway.admin_get("/api/v1/sessions").await?;
    let session_ref = listed["sessions"][0]["ref"].as_str().context("a ref")?.to_owned();
    let running =
        client.post(&client.message("tools/call", json!({"name": "slow", "arguments": {"ms": 1500}}))).await?;
    let (status, drained) =
        gateway.admin_post(&format!("/api/v1/sessions/{session_ref}/drain"), &json!({"grace": "10s"})).await?;
    assert_eq!(status, 202, "{drained}");
    assert_eq!(client.request("tools/list", Value::Null).await?.status, 404, "no new calls");
    running.finish(BOUND).await?.result().context("the call in flight finishes")?;
    wait_until("its server is told", BOUND, async || up.count("/deletes").await.is_ok_and(|count| count == 1)).await?;

    let second = RawClient::open(&gateway.url("h")?, VERSION).await?;
    let (_, listed) = gateway.admin_get("/api/v1/sessions?state=ready").await?;
    let session_ref = listed["sessions"][0]["ref"].as_str().context("a ref")?.to_owned();
    let stuck =
        second.post(&second.message("tools/call", json!({"name": "slow", "arguments": {"ms": 60_000}}))).await?;
    gateway.admin_post(&format!("/api/v1/sessions/{session_ref}/drain"), &json!({"grace": "60s"})).await?;
    gateway.kill_all().await?;
    drop(stuck);
    gateway.start_again().await?;
    assert_eq!(second.request("tools/list", Value::Null).await?.status, 404, "a crash resurrects nothing");
    let (_, listed) = gateway.admin_get("/api/v1/sessions?state=deleted").await?;
    assert_eq!(listed["sessions"].as_array().map(Vec::len), Some(2), "{listed}");
    Ok(())
}

/// What a client does with a session before it is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// Uses it and hangs up.
    Abandoned,
    /// Ends it.
    Ended,
    /// Hangs up before `initialized`, or even before the answer.
    Unconfirmed,
}

/// Lives one session for each fate, so many at a time. Who hangs up has a connection of its own for every request.
async fn live_and_leave(url: &str, fates: impl Iterator<Item = Fate>) -> Result<()> {
    let tidy = RawClient::new(url)?;
    let untidy = tidy.clone().with_fresh_connections()?;
    let lives = fates.enumerate().map(|(number, fate)| {
        let mut client = if fate == Fate::Ended { tidy.clone() } else { untidy.clone() };
        async move {
            if fate == Fate::Unconfirmed && number % 2 == 0 {
                return hang_up(url).await;
            }
            client.initialize(VERSION).await?.result()?;
            match fate {
                Fate::Abandoned => {
                    client.notify("notifications/initialized", Value::Null).await?;
                    client.request("tools/list", Value::Null).await?.result()?;
                }
                Fate::Ended => ensure!(client.delete().await? == 204, "DELETE is answered"),
                Fate::Unconfirmed => {}
            }
            Ok(())
        }
    });
    let mut lives = futures_util::stream::iter(lives).buffer_unordered(CLIENTS);
    while let Some(lived) = lives.next().await {
        lived?;
    }
    Ok(())
}

/// Sends `initialize` and hangs up without a look at the answer.
async fn hang_up(url: &str) -> Result<()> {
    let (host, path) = url.strip_prefix("http://").and_then(|rest| rest.split_once('/')).context("a URL")?;
    let params = json!({"protocolVersion": VERSION, "capabilities": {}, "clientInfo": {"name": "a", "version": "1"}});
    let body = json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}).to_string();
    let accept = "application/json, text/event-stream";
    let head = format!(
        "POST /{path} HTTP/1.1\r\nhost: {host}\r\naccept: {accept}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    let mut socket = tokio::net::TcpStream::connect(host).await?;
    socket.write_all(format!("{head}{body}").as_bytes()).await?;
    Ok(socket.shutdown().await?)
}

async fn nothing_lives(gateway: &Gateway) -> bool {
    gateway.status().await.is_ok_and(|status| status["sessions"] == json!({"live": 0, "stored": 0}))
}

/// The counts of AC-05: 2,000 sessions abandoned, 2,000 ended, 200 hung up.
#[tokio::test]
async fn ac05_thousands_of_sessions_end_and_nothing_is_left() -> Result<()> {
    let up = UpH::start().await?;
    up.order("/log", json!({"pause": true})).await?;
    let config = format!("[session]\nidle_expiry = \"5s\"\nmax_per_principal = 10000\n{}", up.toml("h"));
    let gateway = Gateway::start(&config, &[]).await?;
    let worker = Proc::of(gateway.worker().await?.pid).context("a worker")?;
    let before = worker.open_files();
    let url = gateway.url("h")?;
    let half = || {
        let rounds = [Fate::Abandoned, Fate::Ended].into_iter().cycle().take(2000);
        rounds.chain(std::iter::repeat_n(Fate::Unconfirmed, 100))
    };
    live_and_leave(&url, half()).await?;
    let after_half = worker.resident_bytes();
    live_and_leave(&url, half()).await?;
    let grown = worker.resident_bytes().saturating_sub(after_half);
    wait_until("all have ended", 2 * BOUND, async || nothing_lives(&gateway).await).await?;
    let counts = async || {
        let counters = up.counters().await?;
        anyhow::Ok(["/initializes", "/deletes", "/sessions"].map(|path| counters.pointer(path).and_then(Value::as_u64)))
    };
    // A delete is repeated where this machine took too long to answer the first.
    let all_deleted = wait_until("every session of the server was deleted", 2 * BOUND, async || {
        let counted = counts().await;
        counted.is_ok_and(|[opened, deleted, left]| opened >= Some(4000) && deleted >= opened && left == Some(0))
    });
    if let Err(error) = all_deleted.await {
        let (_, owed) = gateway.admin_get("/api/v1/owed").await?;
        return Err(error.context(format!("opened, deleted, left: {:?}; owed: {owed}", counts().await?)));
    }
    let nothing_owed =
        async || gateway.admin_get("/api/v1/owed").await.is_ok_and(|(_, told)| told["owed"] == json!([]));
    wait_until("nothing is owed", BOUND, nothing_owed).await?;
    wait_until("descriptors are back", BOUND, async || worker.open_files() <= before + 10).await?;
    let left = worker.resident_bytes().saturating_sub(after_half);
    assert!(grown.max(left) < 20 << 20, "grown by {grown} and then {left} bytes in the second half");
    assert_eq!(gateway.worker().await?.pid, worker.pid, "it is the same worker");
    Ok(())
}

/// The same over children. Each session needs a process, so the counts are smaller.
#[tokio::test]
async fn ac05_sessions_of_children_end_and_no_process_is_left() -> Result<()> {
    let up = UpS::new(&[])?;
    let config = format!("[session]\nidle_expiry = \"5s\"\nmax_per_principal = 10000\n{}", up.toml("s")?);
    let gateway = Gateway::start(&config, &[]).await?;
    let processes = [gateway.keeper_pid()?, gateway.worker().await?.pid].map(Proc::of);
    let open_files = || processes.map(|process| process.map_or(0, Proc::open_files));
    let before = open_files();

    let client = RawClient::open(&gateway.url("s")?, VERSION).await?;
    client.call_through("echo", json!({"text": "a"})).await?.result()?;
    let child = up.starts()?.pop().context("a child")?;
    assert_eq!(client.delete().await?, 204);
    wait_until("the child of the ended session is gone", BOUND, async || !child.is_alive()).await?;
    assert_eq!(client.request("tools/list", Value::Null).await?.status, 404);

    let fates = [Fate::Abandoned, Fate::Ended, Fate::Unconfirmed].into_iter().cycle().take(CHILDREN);
    live_and_leave(&gateway.url("s")?, fates).await?;
    wait_until("all have ended", BOUND, async || nothing_lives(&gateway).await).await?;
    assert!(up.starts()?.len() > CHILDREN / 2, "each had a child");
    wait_until("no child is left", BOUND, async || {
        up.starts().is_ok_and(|starts| !starts.into_iter().any(Proc::is_alive))
    })
    .await?;
    wait_until("descriptors are back", BOUND, async || {
        open_files().into_iter().zip(before).all(|(now, before)| now <= before + 10)
    })
    .await?;
    Ok(())
}

#[tokio::test]
async fn ac05_the_51st_session_of_a_principal_is_refused_and_no_busy_one_evicted() -> Result<()> {
    let up = UpH::start().await?;
    let gateway = Gateway::start(&format!("[session]\nmax_per_principal = 50\n{}", up.toml("h")), &[]).await?;
    let url = gateway.url("h")?;
    let busy = RawClient::open(&url, VERSION).await?;
    let call = busy.post(&busy.message("tools/call", json!({"name": "slow", "arguments": {"ms": 3000}}))).await?;
    let mut statuses = Vec::new();
    for _ in 0..59 {
        statuses.push(busy.clone().initialize(VERSION).await?.status);
    }
    assert_eq!(statuses, [vec![200; 49], vec![429; 10]].concat());
    call.finish(BOUND).await?.result()?;
    Ok(())
}
