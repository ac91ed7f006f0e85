//! Notes streams and long calls as use of their sessions (S5): without it a crash would find sessions idle since their
//! last request that were in use all along.

use std::sync::Arc;
use std::time::Duration;

use crate::engine::Engine;

/// Runs until the worker ends.
pub async fn run(engine: Arc<Engine>) {
    let terms = engine.settings().terms;
    // As often as the ledger learns of use at all; for long expiries as often as a thousandth of them, which spares
    // the ledger the rest.
    let period = terms.touch_interval.max(terms.idle_expiry / 1000).min(PERIOD_MAX);
    loop {
        tokio::select! {
            () = tokio::time::sleep(period) => engine.note_use(),
            () = engine.stopped() => return,
        }
    }
}

const PERIOD_MAX: Duration = Duration::from_mins(10);
