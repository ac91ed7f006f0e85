//! The end of a child and of everything it started: end of input, TERM, KILL (requirement C1).
//!
//! The leader is not reaped before its tree is gone. Until then its pid, and with it the number of its group, can't
//! become anybody else's, so the group can be signalled as one.

use std::os::unix::process::ExitStatusExt as _;
use std::rc::Rc;
use std::time::Duration;

use rustix::process::{Signal, kill_process_group};
use tokio::time::Instant;

use super::Child;
use super::stdio::Streams;
use crate::identity::{ProcessIdentity, raw_pid};
use crate::keeper::Keeper;
use crate::pidfd::PidFd;
use crate::record::RecordFile;
use crate::tree::signal_all;

/// What is needed to see a child to its end.
pub(crate) struct Ending {
    pub(crate) process: std::process::Child,
    pub(crate) pidfd: PidFd,
    pub(crate) record: RecordFile,
    pub(crate) streams: Streams,
}

/// Waits for the child's end or the order to end it, and sees it through.
pub(crate) async fn supervise(keeper: Rc<Keeper>, child: Rc<Child>, mut ending: Ending) {
    end_tree(&keeper, &child, &ending.pidfd).await;
    let status = ending.process.try_wait();
    keeper.disown(child.identity.pid());
    ending.record.remove();
    keeper.child_gone(&child);
    child.set_gone();
    ending.streams.finish().await;
    match status {
        Ok(Some(status)) => {
            child.set_exit(status.code(), status.signal());
            let (code, signal) = (status.code(), status.signal());
            tracing::info!(child = child.id.get(), name = child.name, ?code, ?signal, "child ended");
        }
        Ok(None) | Err(_) => {
            child.set_exit(None, None);
            tracing::error!(child = child.id.get(), name = child.name, "child ended, nobody knows how");
        }
    }
    keeper.child_ended(&child);
}

/// Returns once the leader has ended and nothing of its tree lives, however long that takes.
async fn end_tree(keeper: &Keeper, child: &Child, pidfd: &PidFd) {
    let tree = child.tree();
    let mut was_terminated = false;
    let mut is_leader_dead = false;
    let mut was_reported = false;
    loop {
        if is_leader_dead && keeper.census().await.members(&tree).is_empty() {
            return;
        }
        let now = Instant::now();
        let plan = child.end_plan();
        let mut look_again_at = plan.map(|plan| plan.term_at);
        if let Some(plan) = plan.filter(|plan| now >= plan.kill_at) {
            signal_tree(keeper, child, Signal::KILL).await;
            let is_late = now >= plan.kill_at + KILL_BOUND;
            if is_late && !was_reported {
                tracing::error!(child = child.id.get(), pid = child.identity.pid(), "child can't be killed");
                was_reported = true;
            }
            look_again_at = Some(now + if is_late { LATE_POLL } else { POLL });
        } else if let Some(plan) = plan.filter(|plan| now >= plan.term_at) {
            if !was_terminated {
                signal_tree(keeper, child, Signal::TERM).await;
                was_terminated = true;
            }
            // A dead leader tells nothing about the rest, which has to be looked at.
            look_again_at = Some(if is_leader_dead { plan.kill_at.min(now + POLL) } else { plan.kill_at });
        }
        tokio::select! {
            () = pidfd.ended(), if !is_leader_dead => {
                is_leader_dead = true;
                child.order_end_of_rest();
            }
            () = child.end_ordered.notified() => {}
            () = sleep_until(look_again_at) => {}
        }
    }
}

async fn signal_tree(keeper: &Keeper, child: &Child, signal: Signal) {
    // The leader is not reaped yet, so this is its group and nobody else's.
    if let Some(group) = raw_pid(child.identity.pid()) {
        let sent = kill_process_group(group, signal);
        if let Err(error) = sent
            && error != rustix::io::Errno::SRCH
        {
            tracing::warn!(child = child.id.get(), %error, "the child's process group can't be signalled");
        }
    }
    // Those who left the group. Members of it are signalled twice, which matters to nobody: TERM stays pending once.
    let census = keeper.census().await;
    let outside: Vec<ProcessIdentity> = census
        .members(&child.tree())
        .into_iter()
        .filter(|member| !census.is_in_group(*member, child.identity.pid()))
        .collect();
    signal_all(&outside, signal);
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
