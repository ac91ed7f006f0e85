//! Durable creations of sessions, in turn with what the same disk gives to grouped commits of SQLite, and with what the
//! handshakes alone take.

use crate::plan::Plan;
use crate::report::{Row, Target};
use crate::roles::Role;
use crate::spread::Spread;
use crate::stand::{place, start_gateway};
use crate::wire::{Place, Wire};
use anyhow::{Context as _, Result, anyhow};
use rusqlite::Connection;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Takes turns.
pub(crate) async fn run(plan: &Plan) -> Result<(Vec<Row>, Value)> {
    let upstream = Role::upstream()?;
    let hop = Role::proxy(upstream.address)?;
    let mut gateway = start_gateway(&upstream, "").await?;
    let (endpoint, plain) = (place(&gateway, "json")?, Place::new(hop.address, "/json"));
    let dir = TempDir::with_prefix("bench-sqlite-")?;
    let (mut opened, mut written, mut passed) = (Vec::new(), Vec::new(), Vec::new());
    tokio::task::block_in_place(|| open(&endpoint, plan.turn))?;
    let before = status_of(&gateway).await?;
    for round in 0..plan.rounds {
        let file = dir.path().join(format!("{round}.db"));
        for turn in 0..TURNS {
            tokio::task::block_in_place(|| {
                match (round + turn) % TURNS {
                    0 => opened.push(open(&endpoint, plan.turn)?),
                    1 => written.push(write(&file, plan.turn)?),
                    _ => passed.push(open(&plain, plan.turn)?),
                }
                anyhow::Ok(())
            })?;
        }
    }
    let after = status_of(&gateway).await?;
    gateway.stop().await?;
    let (own, sqlite, plainly) = (Spread::of(&opened), Spread::of(&written), Spread::of(&passed));
    let commits = (after.1 - before.1).max(1);
    let grouped = (after.0 - before.0) as f64 / commits as f64;
    let rows = vec![
        Row::new("creation", "durable session creations, of grouped SQLite writes of that size", Target::AtLeast(0.5))
            .ratio(Spread::of_ratios(&opened, &written))
            .note(format!(
                "{:.0} sessions/s from {CLIENTS} clients, each with its upstream handshake, {grouped:.1} a commit; SQLite {:.0} rows/s of {ROW_BYTES} bytes",
                own.median, sqlite.median
            )),
        Row::new("creation_handshakes", "the same, of these handshakes alone through the pass-through", Target::None)
            .ratio(Spread::of_ratios(&opened, &passed))
            .note(format!("{:.0} handshakes/s, with nothing written anywhere", plainly.median)),
    ];
    Ok((
        rows,
        json!({"sessions_per_second": own.json(), "sqlite_rows_per_second": sqlite.json(),
        "handshakes_per_second_through_the_hop": plainly.json(), "clients": CLIENTS, "row_bytes": ROW_BYTES,
        "sessions_per_commit": grouped}),
    ))
}

/// Sessions stored, and commits for authority.
async fn status_of(gateway: &mainstay_tests::Gateway) -> Result<(u64, u64)> {
    let status = gateway.status().await?;
    let count = |pointer: &str| status.pointer(pointer).and_then(Value::as_u64).context("the status counts it");
    Ok((count("/sessions/stored")?, count("/ledger/commits_authority")?))
}

/// Sessions that were opened in a second, each by both messages of the handshake.
fn open(endpoint: &Place, lasting: Duration) -> Result<f64> {
    let started = Instant::now();
    let opened = at_once(|| {
        let mut wire = Wire::new(endpoint.address);
        let mut opened = 0_u32;
        while started.elapsed() < lasting {
            wire.open(endpoint)?;
            opened += 1;
        }
        Ok(opened)
    })?;
    Ok(f64::from(opened) / started.elapsed().as_secs_f64())
}

/// Rows that were durable in a second: as many clients as above, each waiting for its row; one writer, which commits all
/// that wait together.
fn write(file: &Path, lasting: Duration) -> Result<f64> {
    let connection = Connection::open(file)?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.execute_batch("CREATE TABLE rows (key INTEGER PRIMARY KEY, body BLOB NOT NULL) STRICT")?;
    let (jobs, queue) = sync_channel(CLIENTS);
    let started = Instant::now();
    std::thread::scope(|scope| {
        let writer = scope.spawn(move || commit_all(connection, &queue));
        let written = at_once(|| {
            let jobs = jobs.clone();
            let (done, durable) = sync_channel(1);
            let mut written = 0_u32;
            while started.elapsed() < lasting {
                jobs.send(done.clone()).context("the writer is gone")?;
                durable.recv_timeout(DURABLE_BOUND).context("the writer is gone, or stuck")?;
                written += 1;
            }
            Ok(written)
        });
        let took = started.elapsed();
        // Without a client the writer ends.
        drop(jobs);
        writer.join().map_err(|_| anyhow!("the writer has failed"))??;
        Ok(f64::from(written?) / took.as_secs_f64())
    })
}

fn commit_all(mut connection: Connection, queue: &Receiver<SyncSender<()>>) -> Result<()> {
    let body = vec![b'x'; ROW_BYTES];
    while let Ok(first) = queue.recv() {
        let group: Vec<_> = std::iter::once(first).chain(queue.try_iter().take(CLIENTS)).collect();
        let transaction = connection.transaction()?;
        {
            let mut insert = transaction.prepare_cached("INSERT INTO rows (body) VALUES (?1)")?;
            for _ in &group {
                insert.execute([&body])?;
            }
        }
        transaction.commit()?;
        for done in group {
            done.send(()).context("a client is gone")?;
        }
    }
    Ok(())
}

/// Runs [`CLIENTS`] of them and adds up what they return.
fn at_once(client: impl Fn() -> Result<u32> + Sync) -> Result<u32> {
    std::thread::scope(|scope| {
        let client = &client;
        let running: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(client)).collect();
        let mut sum = 0;
        for running in running {
            sum += running.join().map_err(|_| anyhow!("a client has failed"))??;
        }
        Ok(sum)
    })
}

const CLIENTS: usize = 64;
/// Who takes turns: the gateway, SQLite, the pass-through.
const TURNS: usize = 3;
const DURABLE_BOUND: Duration = Duration::from_secs(30);
/// What the ledger grows by for a session, its entry in the audit trail and its resume record included.
const ROW_BYTES: usize = 1380;
