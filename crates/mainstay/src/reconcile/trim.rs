//! Keeps the journal within its bounds of count, bytes and age (R1).

use std::sync::Arc;
use std::time::Duration;

use crate::engine::Engine;

/// Runs until the worker ends.
pub async fn run(engine: Arc<Engine>) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(PAUSE) => {}
            () = engine.stopped() => return,
        }
        if let Err(error) = engine.journal.trim(engine.now()).await {
            tracing::warn!(error = %error, "the journal can't be trimmed; it is tried again");
        }
    }
}

const PAUSE: Duration = Duration::from_mins(1);
