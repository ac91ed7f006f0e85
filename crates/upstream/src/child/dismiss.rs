//! Ending a child that no session wants.

use std::time::Duration;

use mainstay_keeper::client::{ChildEvent, Custody, Held};
use tokio::time::timeout;

use crate::server::Server;

/// Ends a child in custody that no session wants any more, and has the keeper forget it. It gets as long as any other to
/// end by itself ([`Server::STOP_GRACE`], C1). What it still writes is thrown away.
///
/// Returns once it has ended, which takes a bounded time: one that does not even end when it is killed is forgotten all
/// the same. If the future is dropped, the child is still ended but not forgotten.
pub async fn dismiss(custody: &Custody, held: Held) {
    end_held(custody, held, Server::STOP_GRACE).await;
}

/// [`dismiss`] with another grace.
pub(crate) async fn end_held(custody: &Custody, mut held: Held, grace: Duration) {
    custody.stop(held.child, grace).await;
    let ended = timeout(DISMISS_BOUND + 2 * grace, async {
        while let Some(event) = held.events.recv().await {
            if let ChildEvent::Exited(_) = event {
                return;
            }
        }
    });
    if ended.await.is_err() {
        tracing::warn!(child = %held.child, "a child that no session wants did not end in time");
    }
    custody.forget(held.child).await;
}

/// How long a child that is not wanted may take to end, beyond its grace.
const DISMISS_BOUND: Duration = Duration::from_secs(10);
