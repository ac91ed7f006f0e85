//! Lets go of answers in custody that no client can come back for. A worker that dies leaves some with every child: those
//! that it had just handed on. They would stay as long as the child does.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use crate::engine::Engine;

/// Runs until the worker ends.
pub async fn run(engine: Arc<Engine>) {
    let mut found = BTreeSet::new();
    loop {
        tokio::select! {
            () = tokio::time::sleep(PERIOD) => found = engine.let_go_unclaimed(&found).await,
            () = engine.stopped() => return,
        }
    }
}

/// A client whose stream the journal has not come to know comes back sooner than this: it was told when (`retry:`).
const PERIOD: Duration = Duration::from_secs(10);
