//! Measures what `docs/performance.md` reports: sessions by the hundred thousand, what a stream costs, and the blackout after
//! a worker's death.
//!
//! `cargo run --release -p mainstay-tests --bin measure -- SESSIONS KILLS` (build `mainstay` and `up-h` with `--release`
//! first). Everything runs on 127.0.0.1 and ends by itself. Times are of this machine and its load; compare ratios.

use anyhow::{Context as _, Result};
use mainstay_tests::{Gateway, RawClient, UpH};
use serde_json::{Value, json};
use std::io::Write as _;
use std::time::{Duration, Instant};

const VERSION: &str = "2025-11-25";
const OPENERS: usize = 64;
const CALLS: usize = 500;
const SLOW_MS: u64 = 30;

#[tokio::main]
async fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let sessions: usize = arguments.next().as_deref().unwrap_or("100000").parse()?;
    let kills: usize = arguments.next().as_deref().unwrap_or("50").parse()?;
    let up = UpH::start().await?;
    up.order("/log", json!({"pause": true})).await?;
    let limits = "[limits]\ninitialize_per_minute = 0\n";
    let session = "[session]\nmax_per_principal = 1000000\nsuspend_after = \"never\"\n";
    let config = format!("{limits}{session}{}", up.toml("h"));
    let mut gateway = Gateway::start(&config, &[]).await?;
    many(&mut gateway, sessions).await?;
    for (name, within) in [("plain JSON", "1s"), ("a stream with its events in the journal", "20ms")] {
        one_way_to_answer(&up, name, within).await?;
    }
    blackout(&mut gateway, kills).await
}

/// Opens `sessions`, restarts, and looks at the costs.
async fn many(gateway: &mut Gateway, sessions: usize) -> Result<()> {
    let url = gateway.url("h")?;
    let empty = resident_kib(gateway.worker().await?.pid)?;
    let started = Instant::now();
    let openers = (0..OPENERS).map(|_| {
        let (url, share) = (url.clone(), sessions / OPENERS);
        tokio::spawn(async move {
            let mut client = RawClient::new(&url)?;
            for _ in 0..share {
                client.session = None;
                client.establish(VERSION).await?;
            }
            anyhow::Ok(client)
        })
    });
    let mut last = None;
    for opener in openers.collect::<Vec<_>>() {
        last = Some(opener.await??);
    }
    let client = last.context("a client")?;
    let took = started.elapsed();
    let opened = gateway.status().await?["sessions"]["stored"].as_u64().context("a count")?;
    let full = resident_kib(gateway.worker().await?.pid)?;
    say(&format!(
        "opened {opened} sessions in {took:.1?}: {:.0} durable creations/s",
        opened as f64 / took.as_secs_f64()
    ));
    say(&format!(
        "worker: {empty} KiB empty, {full} KiB with all in memory: {:.2} KiB a session",
        (full - empty) as f64 / opened as f64
    ));
    let ledger = std::fs::metadata(gateway.state_dir().join("ledger.db"))?.len();
    say(&format!("ledger: {} MiB, {} bytes a session", ledger >> 20, ledger / opened));

    gateway.kill_all().await?;
    let started = Instant::now();
    gateway.launch()?;
    gateway.ready().await?;
    let ready = started.elapsed();
    client.call("echo", json!({"text": "first"})).await?.result()?;
    say(&format!(
        "kill -9 of everything, start to ready {ready:.0?}, to the first served call {:.0?}",
        started.elapsed()
    ));
    say(&format!(
        "worker after the restart: {} KiB, {} sessions in memory",
        resident_kib(gateway.worker().await?.pid)?,
        gateway.status().await?["sessions"]["live"]
    ));
    let ticks = cpu_ticks(gateway.worker().await?.pid)?;
    tokio::time::sleep(Duration::from_secs(10)).await;
    say(&format!("idle for 10 s: {} ticks of CPU (reaper and all)", cpu_ticks(gateway.worker().await?.pid)? - ticks));
    Ok(())
}

/// What calls of [`SLOW_MS`] take and write that are answered on one way or the other, and fast ones beside them.
async fn one_way_to_answer(up: &UpH, name: &str, answer_json_within: &str) -> Result<()> {
    let session = format!("[session]\nanswer_json_within = \"{answer_json_within}\"\n");
    let gateway = Gateway::start(&format!("{session}{}", up.toml("h")), &[]).await?;
    let client = RawClient::open(&gateway.url("h")?, VERSION).await?;
    let worker = gateway.worker().await?.pid;
    for (tool, arguments) in [("echo", json!({"text": "fast"})), ("slow", json!({"ms": SLOW_MS}))] {
        client.call(tool, arguments.clone()).await?.result()?;
        // The notes of the handshake are hints, and written by now.
        tokio::time::sleep(Duration::from_secs(6)).await;
        let (mut times, mut streams, before) = (Vec::new(), 0, written_bytes(worker)?);
        for _ in 0..CALLS {
            let started = Instant::now();
            let outcome = client.call(tool, arguments.clone()).await?;
            outcome.result()?;
            streams += usize::from(!outcome.events.is_empty());
            times.push(started.elapsed());
        }
        times.sort_unstable();
        let at = |percent: usize| times[(times.len() - 1) * percent / 100];
        say(&format!(
            "{CALLS} calls of `{tool}`, slow ones as {name}: {streams} on streams, p50 {:.2?}, p99 {:.2?}, {} KiB to disk",
            at(50),
            at(99),
            (written_bytes(worker)? - before) >> 10
        ));
    }
    Ok(())
}

/// The time from SIGKILL of the worker until the next call is answered.
async fn blackout(gateway: &mut Gateway, kills: usize) -> Result<()> {
    let client = RawClient::open(&gateway.url("h")?, VERSION).await?.with_fresh_connections()?;
    client.call("echo", json!({"text": "warm"})).await?.result()?;
    let mut times = Vec::new();
    for _ in 0..kills {
        let killed = gateway.kill_worker_at_once().await?;
        let started = Instant::now();
        client.call_through("echo", json!({"text": "after"})).await?.result()?;
        times.push(started.elapsed());
        gateway.next_worker(killed).await?;
        // Out of the keeper's burst: a worker that dies too often is started with a delay.
        tokio::time::sleep(Duration::from_millis(6100)).await;
    }
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100];
    say(&format!(
        "blackout over {kills} kills: p50 {:.0?}, p90 {:.0?}, p99 {:.0?}, max {:.0?}",
        at(50),
        at(90),
        at(99),
        at(100)
    ));
    let _: Value = gateway.status().await?;
    Ok(())
}

fn resident_kib(pid: u32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("the kernel says")?;
    Ok(line.trim().trim_end_matches(" kB").trim().parse()?)
}

/// What a process has caused to be written to disk.
fn written_bytes(pid: u32) -> Result<u64> {
    let io = std::fs::read_to_string(format!("/proc/{pid}/io"))?;
    let line = io.lines().find_map(|line| line.strip_prefix("write_bytes:")).context("the kernel says")?;
    Ok(line.trim().parse()?)
}

/// User and system time in clock ticks.
fn cpu_ticks(pid: u32) -> Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<_> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    Ok(fields[11].parse::<u64>()? + fields[12].parse::<u64>()?)
}

fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}
