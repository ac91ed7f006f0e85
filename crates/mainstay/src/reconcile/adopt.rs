//! Looks after children that an earlier worker left in custody: those whose session lives wait for its return, but for
//! conversations with calls that nobody may come back for; those without a session, and those of a server that is defined otherwise now, are ended (S9, C1, T4). A session that ends later takes its child with it by itself.

use std::sync::Arc;
use std::time::Duration;

use mainstay_store::Stored;
use mainstay_upstream::Why;

use crate::engine::Engine;
use crate::engine::conversation::is_conversation;

/// Goes through the held children once, holding on while the ledger cannot be read.
pub async fn run(engine: Arc<Engine>) {
    engine.dismiss_redefined();
    for key in engine.held_keys() {
        loop {
            match engine.store.find(key).await {
                Ok(Stored::Live(record)) => {
                    if is_conversation(&record) && engine.has_open_calls(&key) {
                        engine.wake_for_left(key).await;
                    }
                    break;
                }
                Ok(Stored::Ended(_) | Stored::Absent | Stored::Unreadable(_)) => {
                    engine.dismiss_held(key, Why::SessionEnded);
                    break;
                }
                Err(error) => tracing::warn!(error = %error, "a child's session cannot be read"),
            }
            tokio::select! {
                () = tokio::time::sleep(PAUSE_ON_FAILURE) => {}
                () = engine.stopped() => return,
            }
        }
    }
}

const PAUSE_ON_FAILURE: Duration = Duration::from_secs(5);
