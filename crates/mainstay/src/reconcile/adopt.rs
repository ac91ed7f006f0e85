//! Looks after children that an earlier worker left in custody: those whose session lives wait for its return, those
//! without a session are ended (S9, C1).

use std::sync::Arc;
use std::time::Duration;

use mainstay_store::Stored;

use crate::engine::Engine;

/// Goes through the held children once, holding on while the ledger cannot be read.
pub async fn run(engine: Arc<Engine>) {
    for key in engine.held_keys() {
        loop {
            match engine.store.find(key).await {
                Ok(Stored::Live(_)) => break,
                Ok(Stored::Ended(_) | Stored::Absent | Stored::Unreadable(_)) => {
                    if let Some(held) = engine.take_held(&key) {
                        tracing::info!(session = %key.session_ref(), pid = held.identity.pid(), "ending a child without a session");
                        engine.custody.stop(held.child, GRACE).await;
                        engine.custody.forget(held.child).await;
                    }
                    break;
                }
                Err(error) => {
                    tracing::warn!(error = %error, "a child's session cannot be read");
                    tokio::select! {
                        () = tokio::time::sleep(PAUSE_ON_FAILURE) => {}
                        () = engine.stopped() => return,
                    }
                }
            }
        }
    }
}

const GRACE: Duration = Duration::from_secs(2);
const PAUSE_ON_FAILURE: Duration = Duration::from_secs(5);
