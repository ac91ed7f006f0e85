//! Ending a child that no session wants.

use std::sync::{Arc, Weak};
use std::time::Duration;

use mainstay_core::time::Timestamp;
use mainstay_keeper::client::{ChildEvent, Custody, Held};
use mainstay_keeper::{ChildId, Exit};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::Mask;
use super::end::{End, Why};
use crate::server::Server;
use crate::upstreams::{Destination, Upstreams};

/// Ends a child in custody that no session wants any more, and has the keeper forget it. It gets as long as any other to
/// end by itself ([`Server::STOP_GRACE`], C1). What it still writes is thrown away. Where its server is still known,
/// [`Upstreams::dismiss`] also remembers its end.
///
/// Returns once it has ended, which takes a bounded time: one that does not even end when it is killed is forgotten all
/// the same. If the future is dropped, the child is still ended but not forgotten.
pub async fn dismiss(custody: &Custody, held: Held) {
    end_held(custody, held, Server::STOP_GRACE).await;
}

/// The same with a child of a server that is known: it gets its grace, and its end is remembered.
pub(crate) async fn dismiss_of(upstreams: Arc<Upstreams>, destination: Arc<Destination>, held: Held, why: Why) {
    let Some(custody) = upstreams.parts.custody.clone() else { return };
    let lease = destination.supervision.adopt(Timestamp::from_unix_millis(held.spawned_at_unix_ms));
    lease.attach(held.child, Weak::new(), None);
    let exit = end_held(&custody, held, destination.server.stop_grace).await;
    let mask = match why {
        // It was given other things in confidence than its server is now.
        Why::Redefined => Mask::of_everything(),
        Why::Restart | Why::Removed | Why::SessionEnded | Why::Suspended | Why::NeverUp | Why::Unwanted => {
            Mask::of(&destination.server, &*upstreams.parts.environment)
        }
    };
    lease.ended(&End { exit: exit.map(|exit| mask.apply_to_exit(exit)), why: Some(why) });
}

/// Ends a child and waits for it; how it has ended, if it has in time.
async fn end_held(custody: &Custody, held: Held, grace: Duration) -> Option<Exit> {
    end(custody, (held.child, held.events), grace).await
}

/// The same with a child of this worker's.
pub(super) async fn end(
    custody: &Custody,
    (child, mut events): (ChildId, mpsc::Receiver<ChildEvent>),
    grace: Duration,
) -> Option<Exit> {
    custody.stop(child, grace).await;
    let ended = timeout(DISMISS_BOUND + 2 * grace, async {
        while let Some(event) = events.recv().await {
            if let ChildEvent::Exited(exit) = event {
                return Some(exit);
            }
        }
        None
    });
    let ended = ended.await;
    if ended.is_err() {
        tracing::warn!(%child, "a child that no session wants did not end in time");
    }
    custody.forget(child).await;
    ended.ok().flatten()
}

/// How long a child that is not wanted may take to end, beyond its grace.
const DISMISS_BOUND: Duration = Duration::from_secs(10);
