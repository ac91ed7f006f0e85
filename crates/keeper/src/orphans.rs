//! Processes that lose their parent become the keeper's. They are reaped, and ended if they belong to an ended child;
//! at the keeper's own end none that came from it is left.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use rustix::process::{Signal, WaitOptions, waitpid};
use tokio::signal::unix::Signal as Incoming;
use tokio::time::Instant;

use crate::identity::{ProcessIdentity, raw_pid};
use crate::keeper::Keeper;
use crate::tree::{Census, signal_all};

/// Reaps orphans: those that have ended already, and then others a moment after `child_signals` says so. Never returns.
///
/// The moment is for whoever is more urgent: a look at all processes costs milliseconds on a machine with many, and the
/// death of a worker gives the signal, too.
pub(crate) async fn reap(keeper: Rc<Keeper>, mut child_signals: Incoming) {
    loop {
        reap_once(&keeper).await;
        if child_signals.recv().await.is_none() {
            return;
        }
        tokio::time::sleep(REAP_AFTER).await;
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

/// The processes that were below the keeper before it started any: of a shell, say, that became the keeper. They are
/// nobody's children in custody, and are left alone.
pub(crate) fn strangers() -> BTreeSet<ProcessIdentity> {
    let census = Census::of_descendants().unwrap_or_else(|_| Census::empty());
    census.seen().iter().map(|seen| seen.identity).collect()
}

/// Ends what is still below the keeper once its worker and its children are gone: processes that left their group, cleaned
/// their environment and lost their parent, by which nobody could tell whose they were. They have a moment after TERM.
pub(crate) async fn end_rest(keeper: &Keeper, strangers: &BTreeSet<ProcessIdentity>) {
    let (kill_at, give_up_at) = (Instant::now() + REST_GRACE, Instant::now() + REST_BOUND);
    let mut terminated = BTreeSet::new();
    loop {
        let rest = rest(&*keeper.census().await, strangers);
        if rest.is_empty() {
            return;
        }
        let now = Instant::now();
        if now >= give_up_at {
            tracing::error!(left = rest.len(), "processes that children left behind can't be ended");
            return;
        }
        if now >= kill_at {
            signal_all(&rest, Signal::KILL);
        } else {
            let new: Vec<_> = rest.into_iter().filter(|process| terminated.insert(*process)).collect();
            new.iter()
                .for_each(|process| tracing::warn!(pid = process.pid(), "ending a process that a child left behind"));
            signal_all(&new, Signal::TERM);
        }
        tokio::time::sleep(REST_POLL).await;
    }
}

/// The living descendants of the keeper, without `strangers` and what is below those.
fn rest(census: &Census, strangers: &BTreeSet<ProcessIdentity>) -> Vec<ProcessIdentity> {
    let spared = census.with_descendants(|seen| strangers.contains(&seen.identity));
    let is_rest = |identity: &ProcessIdentity| !spared.contains(&identity.pid());
    census.seen().iter().filter(|seen| !seen.is_zombie).map(|seen| seen.identity).filter(is_rest).collect()
}

/// How long an orphan that has ended is left alone.
const REAP_AFTER: Duration = Duration::from_millis(100);

/// How long what children left behind has to end by itself.
const REST_GRACE: Duration = Duration::from_millis(500);

/// How long it is waited for in all.
const REST_BOUND: Duration = Duration::from_secs(2);

/// How often it is looked at.
const REST_POLL: Duration = Duration::from_millis(50);
