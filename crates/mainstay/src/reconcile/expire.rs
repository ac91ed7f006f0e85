//! The reaper: ends sessions that are overdue and purges tombstones whose time is up. It is driven by the next
//! deadline, not by polling, and costs a request nothing (S5, S7, S10).

use std::sync::Arc;
use std::time::Duration;

use mainstay_store::Write;

use crate::engine::{Engine, REAPER_PAUSE_MAX};

/// Runs until the worker ends.
pub async fn run(engine: Arc<Engine>) {
    let mut purged_at = None;
    loop {
        let progress = pass(&engine).await;
        if purged_at.is_none_or(|at| engine.now().since(at) >= PURGE_EVERY) {
            engine.store.hint(Write::Purge { now: engine.now() });
            purged_at = Some(engine.now());
        }
        let pause = match engine.store.next_deadline().await {
            _ if progress == Progress::Stuck => PAUSE_ON_FAILURE,
            Ok(Some(deadline)) => deadline.since(engine.now()).clamp(PAUSE_MIN, REAPER_PAUSE_MAX),
            Ok(None) => REAPER_PAUSE_MAX,
            Err(error) => {
                tracing::warn!(error = %error, "the next deadline cannot be read");
                PAUSE_ON_FAILURE
            }
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = engine.deadlines.notified() => tokio::time::sleep(PAUSE_MIN).await,
            () = engine.stopped() => return,
        }
    }
}

/// Finishes what an earlier worker had begun: drains of which the ledger knows, and sessions that came overdue
/// meanwhile. Nothing is launched for it (S8, S9). What is more than a start has time for is left to the reaper; no
/// request is served by an overdue session either way.
pub async fn recover(engine: &Arc<Engine>) {
    let begun = async {
        match engine.store.unfinished().await {
            Ok(keys) => {
                futures_util::future::join_all(keys.into_iter().map(|key| engine.expire(key))).await;
            }
            Err(error) => tracing::warn!(error = %error, "unfinished drains cannot be read"),
        }
        pass(engine).await;
    };
    if tokio::time::timeout(RECOVER_MAX, begun).await.is_err() {
        tracing::info!("more sessions are overdue than a start has time for; the reaper goes on with them");
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// Nothing that is overdue is left.
    Done,
    /// The ledger does not let overdue sessions be ended.
    Stuck,
}

/// One pass over everything that is overdue now, a page at a time: the endings of a page share their fsyncs.
async fn pass(engine: &Arc<Engine>) -> Progress {
    loop {
        let overdue = match engine.store.overdue(engine.now(), PAGE_SESSIONS).await {
            Ok(overdue) => overdue,
            Err(error) => {
                tracing::warn!(error = %error, "overdue sessions cannot be read");
                return Progress::Stuck;
            }
        };
        let full = overdue.len() == PAGE_SESSIONS;
        let ended = futures_util::future::join_all(overdue.into_iter().map(|key| engine.expire(key))).await;
        if !ended.iter().all(|ended| *ended) {
            return Progress::Stuck;
        }
        if !full {
            return Progress::Done;
        }
        // Deadlines that moved were handed over as hints; they must be in the ledger before it is asked again.
        if engine.store.flush().await.is_err() {
            return Progress::Stuck;
        }
    }
}

const PAGE_SESSIONS: usize = 256;
/// How often tombstones and audit entries whose time is up are looked for at the most.
const PURGE_EVERY: Duration = Duration::from_secs(5);
const PAUSE_MIN: Duration = Duration::from_millis(200);
const PAUSE_ON_FAILURE: Duration = Duration::from_secs(5);
/// How long a start may take for what is overdue.
const RECOVER_MAX: Duration = Duration::from_millis(300);
