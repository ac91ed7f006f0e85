//! Forwards what an earlier worker had taken of clients' answers, and answers in a client's place what it has not answered
//! in time (R6).

use std::sync::Arc;
use std::time::Duration;

use crate::engine::Engine;

/// Runs until the worker ends.
pub async fn run(engine: Arc<Engine>) {
    loop {
        engine.forward_left().await;
        engine.decline_overdue().await;
        tokio::select! {
            () = tokio::time::sleep(PAUSE) => {}
            () = engine.stopped() => return,
        }
    }
}

const PAUSE: Duration = Duration::from_secs(30);
