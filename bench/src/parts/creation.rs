//! Durable creations of sessions, in turn with what the same disk gives to grouped commits of SQLite.

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
    let mut gateway = start_gateway(&upstream, "").await?;
    let endpoint = place(&gateway, "json")?;
    let dir = TempDir::with_prefix("bench-sqlite-")?;
    let (mut opened, mut written) = (Vec::new(), Vec::new());
    tokio::task::block_in_place(|| open(&endpoint, plan.turn))?;
    let before = status_of(&gateway).await?;
    for round in 0..plan.rounds {
        let file = dir.path().join(format!("{round}.db"));
        let sqlite = || tokio::task::block_in_place(|| write(&file, plan.turn));
        let sessions = || tokio::task::block_in_place(|| open(&endpoint, plan.turn));
        if round % 2 == 0 {
            written.push(sqlite()?);
            opened.push(sessions()?);
        } else {
            opened.push(sessions()?);
            written.push(sqlite()?);
        }
    }
    let after = status_of(&gateway).await?;
    gateway.stop().await?;
    let (own, sqlite) = (Spread::of(&opened), Spread::of(&written));
    let commits = (after.1 - before.1).max(1);
    let grouped = (after.0 - before.0) as f64 / commits as f64;
    let row = Row::new("creation", "durable session creations, of grouped SQLite writes of that size", Target::AtLeast(0.5))
        .ratio(Spread::of_ratios(&opened, &written))
        .note(format!(
            "{:.0} sessions/s from {CLIENTS} clients, each with its upstream handshake, {grouped:.1} a commit; SQLite {:.0} rows/s of {ROW_BYTES} bytes",
            own.median, sqlite.median
        ));
    Ok((
        vec![row],
        json!({"sessions_per_second": own.json(), "sqlite_rows_per_second": sqlite.json(),
        "clients": CLIENTS, "row_bytes": ROW_BYTES, "sessions_per_commit": grouped}),
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
const DURABLE_BOUND: Duration = Duration::from_secs(30);
/// What the ledger grows by for a session, its entry in the audit trail and its resume record included.
const ROW_BYTES: usize = 1380;
