//! Lets the instances of long unused sessions go and keeps the sessions (S11). The next request brings them back by
//! the one restore path.

use std::sync::Arc;
use std::time::Duration;

use crate::engine::Engine;

/// Runs until the worker ends.
pub async fn run(engine: Arc<Engine>) {
    let Some(shortest) = engine.shortest_suspension() else { return };
    let period = (shortest / 4).clamp(PERIOD_MIN, PERIOD_MAX);
    loop {
        tokio::select! {
            () = tokio::time::sleep(period) => engine.suspend_unused().await,
            () = engine.stopped() => return,
        }
    }
}

const PERIOD_MIN: Duration = Duration::from_millis(250);
const PERIOD_MAX: Duration = Duration::from_mins(1);
