//! The end of a child and of everything it started: end of input, TERM, KILL (requirement C1).
//!
//! The leader is not reaped before its tree is gone. Until then its pid, and with it the number of its group, can't
//! become anybody else's, so the group can be signalled as one.

use std::rc::Rc;
use std::time::Duration;

use rustix::process::{Signal, kill_process_group};
use tokio::time::Instant;

use super::Child;
use super::stdio::Streams;
use crate::identity::{ProcessIdentity, raw_pid};
use crate::keeper::Keeper;
use crate::pidfd::{PidFd, Status, reap};
use crate::record::RecordFile;
use crate::tree::{Seen, signal_all};

/// What is needed to see a child's processes to their end.
pub(crate) struct Leader {
    pub(crate) pidfd: PidFd,
    pub(crate) record: RecordFile,
}

/// Waits for the child's end or the order to end it, and sees it through. Of a child whose processes are gone, `leader`
/// is `None`: only what its pipes still hold is waited for.
pub(crate) async fn supervise(keeper: Rc<Keeper>, child: Rc<Child>, leader: Option<Leader>, streams: Streams) {
    if let Some(leader) = leader {
        end_tree(&keeper, &child, &leader.pidfd).await;
        // From here to the child's being gone nothing awaits: either all of it has happened, or nothing.
        let status = reap(child.identity.pid()).ok().flatten();
        keeper.disown(child.identity.pid());
        leader.record.remove();
        keeper.child_gone(&child);
        child.set_gone(status);
    }
    streams.finish(&child).await;
    match child.set_exit() {
        Some(Status { code, signal }) => {
            tracing::info!(child = child.id.get(), name = child.name, ?code, ?signal, "child ended");
        }
        None => tracing::error!(child = child.id.get(), name = child.name, "child ended, nobody knows how"),
    }
    keeper.child_ended(&child);
}

/// Returns once the leader has ended and nothing of its tree lives, however long that takes.
async fn end_tree(keeper: &Keeper, child: &Child, pidfd: &PidFd) {
    let mut progress = Progress::default();
    loop {
        if child.end_plan().is_some() {
            // Looked at before anything is done, because a tree that falls apart loses its ties.
            let members = look(keeper, child).await;
            if progress.is_leader_dead && members.is_empty() {
                return;
            }
            child.end_stdin();
        }
        let look_again_at = press(keeper, child, &mut progress).await;
        tokio::select! {
            () = pidfd.ended(), if !progress.is_leader_dead => {
                progress.is_leader_dead = true;
                child.order_end_of_rest();
            }
            () = child.end_ordered.notified() => {}
            () = sleep_until(look_again_at) => {}
        }
    }
}

/// How far the end of a child is, as far as that is found out again after a renewal of the keeper.
#[derive(Default)]
struct Progress {
    is_leader_dead: bool,
    was_reported: bool,
}

/// Signals the tree as far as its time has come. Returns when to look at it again.
async fn press(keeper: &Keeper, child: &Child, progress: &mut Progress) -> Option<Instant> {
    let (plan, now) = (child.end_plan()?, Instant::now());
    if now >= plan.kill_at {
        signal_tree(keeper, child, Signal::KILL).await;
        let is_late = now >= plan.kill_at + KILL_BOUND;
        if is_late && !progress.was_reported {
            tracing::error!(child = child.id.get(), pid = child.identity.pid(), "child can't be killed");
            progress.was_reported = true;
        }
        return Some(now + if is_late { LATE_POLL } else { POLL });
    }
    if now < plan.term_at {
        return Some(plan.term_at);
    }
    if !child.was_terminated() {
        signal_tree(keeper, child, Signal::TERM).await;
    }
    // A dead leader tells nothing about the rest, which has to be looked at.
    Some(if progress.is_leader_dead { plan.kill_at.min(now + POLL) } else { plan.kill_at })
}

async fn signal_tree(keeper: &Keeper, child: &Child, signal: Signal) {
    let members = look(keeper, child).await;
    // From here nothing awaits: TERM reaches everybody and is remembered, or it reaches nobody.
    if signal == Signal::TERM {
        child.set_terminated();
    }
    // The leader is not reaped yet, so this is its group and nobody else's.
    if let Some(group) = raw_pid(child.identity.pid()) {
        let sent = kill_process_group(group, signal);
        if let Err(error) = sent
            && error != rustix::io::Errno::SRCH
        {
            tracing::warn!(child = child.id.get(), %error, "the child's process group can't be signalled");
        }
    }
    // Those who left the group are signalled one by one.
    let outside: Vec<ProcessIdentity> =
        members.into_iter().filter(|seen| seen.group != child.identity.pid()).map(|seen| seen.identity).collect();
    signal_all(&outside, signal);
}

/// Who of the tree lives now.
async fn look(keeper: &Keeper, child: &Child) -> Vec<Seen> {
    let members = keeper.census().await.members(&child.tree());
    child.know(members.iter().map(|seen| seen.identity));
    members
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// How often the rest of a tree is looked at.
const POLL: Duration = Duration::from_millis(50);

/// How often once that takes long.
const LATE_POLL: Duration = Duration::from_secs(1);

/// After this time a killed tree that is still there is reported.
const KILL_BOUND: Duration = Duration::from_secs(5);
