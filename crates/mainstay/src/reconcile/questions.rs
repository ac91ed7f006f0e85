//! Forwards what an earlier worker had taken of clients' answers, and answers in a client's place what it has not answered
//! in time (R6).

use std::sync::Arc;
use std::time::Duration;

use crate::engine::Engine;

/// Runs until the worker ends.
pub async fn run(engine: Arc<Engine>) {
    loop {
        // What a worker that leaves was to do is done for it soon after it is gone.
        let pause = if engine.leavers.are_gone() { PAUSE } else { PAUSE_BESIDE_OTHERS };
        engine.forward_left().await;
        engine.decline_overdue().await;
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = engine.stopped() => return,
        }
    }
}

const PAUSE: Duration = Duration::from_secs(30);
const PAUSE_BESIDE_OTHERS: Duration = Duration::from_secs(1);
