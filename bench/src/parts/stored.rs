//! Many sessions: what one of them costs in memory, and what all of them cost a start.

use crate::machine::cpu_micros;
use crate::plan::Plan;
use crate::report::{Row, Target};
use crate::roles::Role;
use crate::spread::{Spread, round};
use crate::stand::{place, start_gateway};
use crate::wire::{Call, Place, Wire};
use anyhow::{Context as _, Result, anyhow};
use mainstay_tests::Proc;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Opens the sessions, looks at the memory, and kills and starts everything a few times.
pub(crate) async fn run(plan: &Plan) -> Result<(Vec<Row>, Value)> {
    let upstream = Role::upstream()?;
    let mut gateway = start_gateway(&upstream, "suspend_after = \"never\"\n").await?;
    let endpoint = place(&gateway, "json")?;
    let worker = gateway.worker().await?.pid;
    let resident = || Proc::of(worker).map(Proc::resident_bytes).context("the worker lives");
    // What only the first session costs is no session's.
    tokio::task::block_in_place(|| open_many(&endpoint, OPENERS))?;
    let empty = resident()?;
    let opened_at = Instant::now();
    let session = tokio::task::block_in_place(|| open_many(&endpoint, plan.sessions))?;
    let opening = opened_at.elapsed();
    let memory = resident()?.saturating_sub(empty) as f64 / 1024.0 / plan.sessions as f64;
    let status = gateway.status().await?;
    let stored = status["sessions"]["stored"].as_u64().context("a count")?;
    let mut starts = Vec::new();
    let mut alive = 0;
    for _ in 0..plan.starts {
        gateway.kill_all().await?;
        let started = Instant::now();
        gateway.launch()?;
        tokio::task::block_in_place(|| first_call(&endpoint, &session))?;
        starts.push(started.elapsed().as_secs_f64() * 1000.0);
        gateway.ready().await?;
        alive = gateway.status().await?["sessions"]["live"].as_u64().context("a count")?;
    }
    let worker = gateway.worker().await?.pid;
    let restored = Proc::of(worker).map(Proc::resident_bytes).context("the worker lives")?;
    let ledger = std::fs::metadata(gateway.state_dir().join("ledger.db"))?.len();
    let before = cpu_micros(&[worker]);
    tokio::time::sleep(plan.turn * IDLE_TURNS).await;
    let idle = cpu_micros(&[worker]).zip(before).map(|(after, before)| round((after - before) / 1000.0));
    gateway.stop().await?;
    let start = Spread::of(&starts);
    let rows = vec![
        Row::new("memory", "memory per idle session, HTTP server, no open stream", Target::AtMost(4.0))
            .plain(memory, "KiB")
            .note(format!("{} sessions, all in memory", plan.sessions)),
        Row::new("start", "start to first served call, after SIGKILL of everything", Target::AtMost(500.0))
            .figure(start, "ms")
            .note(format!("{stored} sessions stored, {alive} in memory after that call")),
    ];
    let shown = json!({"sessions": stored, "opened_in_s": opening.as_secs_f64(), "memory_kib_per_session": memory,
        "start_to_first_call_ms": start.json(), "in_memory_after_first_call": alive,
        "worker_mib_empty": empty >> 20, "worker_mib_with_none_in_memory": restored >> 20,
        "ledger_bytes_per_session": ledger / stored.max(1),
        "idle_cpu_ms": idle, "idle_for_s": (plan.turn * IDLE_TURNS).as_secs_f64()});
    Ok((rows, shown))
}

/// Opens so many sessions from [`OPENERS`] clients. Returns the last one.
fn open_many(endpoint: &Place, sessions: usize) -> Result<String> {
    std::thread::scope(|scope| {
        let openers: Vec<_> = (0..OPENERS)
            .map(|opener| {
                scope.spawn(move || {
                    let mut wire = Wire::new(endpoint.address);
                    let mut last = None;
                    for _ in (opener..sessions).step_by(OPENERS) {
                        last = Some(wire.open(endpoint)?);
                    }
                    anyhow::Ok(last)
                })
            })
            .collect();
        let mut last = None;
        for opener in openers {
            last = opener.join().map_err(|_| anyhow!("an opener has failed"))??.or(last);
        }
        last.context("no session was opened")
    })
}

/// Calls until the gateway answers: nobody listens yet.
fn first_call(endpoint: &Place, session: &str) -> Result<()> {
    let mut call = Call::new(endpoint, session, TEXT_BYTES, 0)?;
    let deadline = Instant::now() + START_BOUND;
    loop {
        match Wire::new(endpoint.address).call(call.next()) {
            Ok(_) => return Ok(()),
            Err(error) if Instant::now() >= deadline => return Err(error).context("the first call after a start"),
            Err(_) => std::thread::sleep(ASK_AGAIN),
        }
    }
}

const OPENERS: usize = 64;
/// A full run is idle for ten seconds.
const IDLE_TURNS: u32 = 7;
const TEXT_BYTES: usize = 1024;
const START_BOUND: Duration = Duration::from_secs(60);
/// As fine as what is measured needs it.
const ASK_AGAIN: Duration = Duration::from_millis(1);
