//! Processes that lose their parent become the keeper's. They are reaped, and ended if they belong to an ended child.

use std::rc::Rc;

use rustix::process::{Signal, WaitOptions, waitpid};
use tokio::signal::unix::Signal as Incoming;

use crate::identity::raw_pid;
use crate::keeper::Keeper;
use crate::tree::signal_all;

/// Reaps orphans whenever `child_signals` says that a process has ended. Never returns.
pub(crate) async fn reap(keeper: Rc<Keeper>, mut child_signals: Incoming) {
    while child_signals.recv().await.is_some() {
        reap_once(&keeper).await;
    }
}

async fn reap_once(keeper: &Keeper) {
    let (own_pid, census) = (std::process::id(), keeper.census().await);
    let adopted = census.seen().iter().filter(|seen| seen.parent == own_pid && !keeper.is_own(seen.identity.pid()));
    for orphan in adopted {
        let pid = orphan.identity.pid();
        if orphan.is_zombie {
            // A zombie keeps its pid until it is reaped, and only this thread reaps: it is still the one that was seen.
            if let Some(raw) = raw_pid(pid) {
                let reaped = waitpid(Some(raw), WaitOptions::NOHANG);
                tracing::debug!(pid, is_reaped = reaped.is_ok(), "reaped an orphan");
            }
        } else if orphan.marker.as_deref().is_some_and(|marker| keeper.has_ended(marker)) {
            tracing::warn!(pid, "ending a process that its child left behind");
            signal_all(&[orphan.identity], Signal::KILL);
        }
    }
}
