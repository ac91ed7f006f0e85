//! The worker killed and the program replaced, both under load.

use super::storm::{Fate, Storm, Told, more_answers};
use crate::histogram::Histogram;
use crate::plan::Plan;
use crate::report::{Row, Target};
use crate::roles::Role;
use crate::spread::{Spread, round};
use crate::stand::{place, start_program};
use anyhow::{Context as _, Result, ensure};
use mainstay_tests::{Gateway, Proc, wait_until, write_program};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// From the signal until the process was seen to be gone.
#[derive(Debug, Clone, Copy)]
struct Kill {
    at: Instant,
    gone: Instant,
}

/// Runs both, each in a storm of its own.
pub(crate) async fn run(plan: &Plan) -> Result<(Vec<Row>, Value)> {
    let upstream = Role::upstream()?;
    let dir = TempDir::with_prefix("bench-program-")?;
    let program = dir.path().join("mainstay");
    let contents = std::fs::read(mainstay_tests::mainstay()?)?;
    write_program(&program, &contents)?;
    let mut gateway = start_program(&program, &upstream).await?;
    let (mut rows, killed) = kills(plan, &mut gateway).await?;
    let endpoint = place(&gateway, "json")?;
    let storm = tokio::task::block_in_place(|| Storm::begin(&endpoint, plan.clients))?;
    for _ in 0..plan.upgrades {
        more_answers(&storm, CALLS_BETWEEN).await?;
        let before = gateway.worker().await?;
        // Another file under the same name, as a package manager does it.
        write_program(&program, &contents)?;
        let output = gateway.cli(&["upgrade"]).await?;
        ensure!(output.status.success(), "`upgrade`: {}", String::from_utf8_lossy(&output.stderr));
        gateway.next_worker(before).await?;
        more_answers(&storm, CALLS_BETWEEN).await?;
        tokio::time::sleep(plan.apart).await;
    }
    let odd = std::sync::Arc::clone(&storm.odd);
    let told: Vec<Told> = tokio::task::block_in_place(|| storm.end())?.concat();
    gateway.stop().await?;
    let failed = told.iter().filter(|call| call.fate != Fate::Answered).count();
    let odd = odd.lock().ok().and_then(|odd| odd.clone());
    let note = format!("{} upgrades, {} calls", plan.upgrades, told.len());
    rows.push(
        Row::new("upgrade", "upgrade under load: failed calls", Target::AtMost(0.0))
            .plain(failed as f64, "")
            .note(odd.as_ref().map_or(note.clone(), |odd| format!("{note}; the first: {odd}"))),
    );
    let upgraded = json!({"upgrades": plan.upgrades, "calls": told.len(), "failed": failed, "first_failure": odd});
    Ok((rows, json!({"kills": killed, "upgrades": upgraded})))
}

async fn kills(plan: &Plan, gateway: &mut Gateway) -> Result<(Vec<Row>, Value)> {
    let endpoint = place(gateway, "json")?;
    let storm = tokio::task::block_in_place(|| Storm::begin(&endpoint, plan.clients))?;
    let mut kills = Vec::new();
    // The start of the gateway was one, too.
    tokio::time::sleep(plan.apart).await;
    for _ in 0..plan.kills {
        more_answers(&storm, CALLS_BETWEEN).await?;
        let worker = gateway.worker().await?;
        let process = Proc::of(worker.pid).context("the worker lives")?;
        let at = Instant::now();
        ensure!(process.kill(), "the worker could not be killed");
        wait_until("the worker to be gone", GONE_BOUND, async || !process.is_alive()).await?;
        kills.push(Kill { at, gone: Instant::now() });
        gateway.next_worker(worker).await?;
        more_answers(&storm, CALLS_BETWEEN).await?;
        tokio::time::sleep(plan.apart).await;
    }
    let clients = tokio::task::block_in_place(|| storm.end())?;
    let told = clients.concat();
    let refused = told.iter().filter(|call| call.fate == Fate::Refused).count();
    let in_flight = |call: &Told| kills.iter().any(|kill| call.sent <= kill.gone && kill.at <= call.ended);
    let failed: Vec<&Told> = told.iter().filter(|call| call.fate == Fate::Failed).collect();
    let others = failed.iter().filter(|call| !in_flight(call)).count();
    let mut blackouts = Histogram::default();
    for kill in &kills {
        clients.iter().filter_map(|calls| blackout(calls, *kill)).for_each(|dark| blackouts.record(dark));
    }
    let at = |per_mille| Spread::once(blackouts.micros_at(per_mille) / 1000.0);
    let (count, calls) = (kills.len(), told.len());
    let rows = vec![
        Row::new("kill_refused", "`kill -9` of the worker under load: refused connections", Target::AtMost(0.0))
            .plain(refused as f64, "")
            .note(format!("{count} kills, {calls} calls")),
        Row::new("kill_failed", "the same: failed calls that were not in flight", Target::AtMost(0.0))
            .plain(others as f64, "")
            .note(format!("{} were in flight and have no answer", failed.len() - others)),
        Row::new("blackout_p50", "blackout after `kill -9` of the worker, p50", Target::AtMost(50.0))
            .figure(at(500), "ms")
            .note(format!("{} clients each time, each until its next answer", plan.clients)),
        Row::new("blackout_p99", "the same, p99", Target::AtMost(200.0)).figure(at(990), "ms"),
    ];
    let shown = json!({"kills": count, "calls": calls, "refused": refused, "failed_in_flight": failed.len() - others,
        "failed_otherwise": others, "blackouts": blackouts.total(),
        "blackout_p50_ms": round(at(500).median), "blackout_p99_ms": round(at(990).median)});
    Ok((rows, shown))
}

/// From the signal to the first answer that only another worker can have given.
fn blackout(calls: &[Told], kill: Kill) -> Option<Duration> {
    let next =
        calls.iter().find(|call| call.fate == Fate::Answered && call.sent >= kill.at && call.ended >= kill.gone)?;
    Some(next.ended - kill.at)
}

const CALLS_BETWEEN: u64 = 100;
const GONE_BOUND: Duration = Duration::from_secs(10);
