//! Remembers what becomes of servers' children for the workers after this one (C4).

use std::sync::Arc;
use std::time::Duration;

use crate::engine::Engine;

/// Runs until the worker ends; what is left to be written then, the engine writes as it leaves the ledger.
pub async fn run(engine: Arc<Engine>) {
    loop {
        tokio::select! {
            () = engine.memory_changed() => engine.remember_servers(),
            () = engine.stopped() => return,
        }
        // Children that end side by side are one write.
        tokio::select! {
            () = tokio::time::sleep(PAUSE) => {}
            () = engine.stopped() => return,
        }
    }
}

const PAUSE: Duration = Duration::from_millis(100);
