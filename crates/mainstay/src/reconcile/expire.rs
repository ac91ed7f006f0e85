//! The reaper: ends sessions that are overdue and purges tombstones whose time is up. It is driven by the next
//! deadline, not by polling, and costs a request nothing (S5, S7, S10).

use std::sync::Arc;
use std::time::Duration;

use mainstay_store::Write;

use crate::engine::Engine;

/// Runs until the worker ends.
pub async fn run(engine: Arc<Engine>) {
    loop {
        pass(&engine).await;
        let pause = match engine.store.next_deadline().await {
            Ok(Some(deadline)) => deadline.since(engine.now()).clamp(PAUSE_MIN, PAUSE_MAX),
            Ok(None) => PAUSE_MAX,
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
/// meanwhile. Nothing is launched for it (S8, S9).
pub async fn recover(engine: &Arc<Engine>) {
    match engine.store.unfinished().await {
        Ok(keys) => {
            for key in keys {
                engine.expire(key).await;
            }
        }
        Err(error) => tracing::warn!(error = %error, "unfinished drains cannot be read"),
    }
    pass(engine).await;
}

/// One pass over everything that is overdue now.
async fn pass(engine: &Arc<Engine>) {
    loop {
        let overdue = match engine.store.overdue(engine.now(), PASS_SESSIONS_MAX).await {
            Ok(overdue) => overdue,
            Err(error) => {
                tracing::warn!(error = %error, "overdue sessions cannot be read");
                return;
            }
        };
        let full = overdue.len() == PASS_SESSIONS_MAX;
        for key in overdue {
            engine.expire(key).await;
        }
        if !full {
            break;
        }
        tokio::task::yield_now().await;
    }
    engine.store.hint(Write::Purge { now: engine.now() });
}

const PASS_SESSIONS_MAX: usize = 256;
const PAUSE_MIN: Duration = Duration::from_millis(200);
const PAUSE_MAX: Duration = Duration::from_mins(1);
const PAUSE_ON_FAILURE: Duration = Duration::from_secs(5);
