//! Pays the deletes that are owed to upstream servers (U7): with bounded retries, then listed as left to expire.

use std::sync::Arc;
use std::time::Duration;

use mainstay_core::audit::Actor;
use mainstay_core::resume::OwedDelete;

use crate::engine::Engine;

/// Runs until the worker ends.
pub async fn run(engine: Arc<Engine>) {
    loop {
        pass(&engine).await;
        tokio::select! {
            () = tokio::time::sleep(PAUSE) => {}
            () = engine.owed.notified() => {}
            () = engine.stopped() => return,
        }
    }
}

/// One try at each delete that is due.
async fn pass(engine: &Arc<Engine>) {
    let due = match engine.store.owed(engine.now(), PASS_DELETES_MAX).await {
        Ok(due) => due,
        Err(error) => {
            tracing::warn!(error = %error, "owed deletes cannot be read");
            return;
        }
    };
    let payments = due.into_iter().map(|owed| pay(engine, owed));
    futures_util::future::join_all(payments).await;
}

async fn pay(engine: &Arc<Engine>, owed: OwedDelete) {
    let (_, writes) = engine.try_owed(&owed, Actor::Gateway).await;
    if let Err(error) = engine.store.commit(writes).await {
        tracing::warn!(error = %error, "the state of an owed delete cannot be stored; it is tried again");
    }
}

const PASS_DELETES_MAX: usize = 64;
const PAUSE: Duration = Duration::from_secs(5);
