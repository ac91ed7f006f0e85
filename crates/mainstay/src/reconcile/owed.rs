//! Pays the deletes that are owed to upstream servers (U7): with bounded retries, then listed as left to expire.

use std::sync::Arc;
use std::time::Duration;

use mainstay_core::audit::Actor;
use mainstay_core::resume::OwedDelete;

use crate::engine::Engine;

/// Runs until the worker ends.
pub async fn run(engine: Arc<Engine>) {
    loop {
        let pause = if pass(&engine).await { Duration::ZERO } else { PAUSE };
        tokio::select! {
            () = engine.stopped() => return,
            () = tokio::time::sleep(pause) => {}
            () = engine.owed.notified() => {}
        }
    }
}

/// One try at each delete that is due, as far as they fit into a pass. Returns whether more of them may be due: those that
/// were tried are not, unless that could not be stored.
async fn pass(engine: &Arc<Engine>) -> bool {
    let due = match engine.store.owed(engine.now(), PASS_DELETES_MAX).await {
        Ok(due) => due,
        Err(error) => {
            tracing::warn!(error = %error, "owed deletes cannot be read");
            return false;
        }
    };
    let is_full = due.len() == PASS_DELETES_MAX;
    let payments = due.into_iter().map(|owed| pay(engine, owed));
    let stored = futures_util::future::join_all(payments).await;
    is_full && stored.into_iter().all(|stored| stored)
}

/// Returns whether what came of it is stored.
async fn pay(engine: &Arc<Engine>, owed: OwedDelete) -> bool {
    let (_, writes) = engine.try_owed(&owed, Actor::Gateway).await;
    let stored = engine.store.commit(writes).await;
    if let Err(error) = &stored {
        tracing::warn!(error = %error, "the state of an owed delete cannot be stored; it is tried again");
    }
    stored.is_ok()
}

const PASS_DELETES_MAX: usize = 64;
const PAUSE: Duration = Duration::from_secs(5);
