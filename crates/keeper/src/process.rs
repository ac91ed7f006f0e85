//! A process that the keeper has started for itself, and reaps itself: a worker, or a rehearsal.

use std::io;
use std::rc::Rc;

use rustix::process::{Signal, kill_process};

use crate::identity::{ProcessIdentity, raw_pid};
use crate::keeper::Keeper;
use crate::pidfd::{PidFd, Status, reap};
use crate::record::{RecordFile, Subject};

/// Such a process, running or ended, until it is reaped.
pub(crate) struct Process {
    pub(crate) identity: ProcessIdentity,
    /// For whoever waits for its end.
    pub(crate) pidfd: Rc<PidFd>,
    record: Option<RecordFile>,
}

impl Process {
    /// Takes hold of a process that was just started. If that fails, it is killed.
    pub(crate) fn hold(keeper: &Keeper, mut started: std::process::Child) -> io::Result<Self> {
        let pid = started.id();
        keeper.own(pid);
        let held = PidFd::open(pid).and_then(|pidfd| Ok((pidfd, ProcessIdentity::of(pid)?)));
        let (pidfd, identity) = match held {
            Ok((pidfd, Some(identity))) => (Rc::new(pidfd), identity),
            other => {
                started.kill()?;
                started.wait()?;
                keeper.disown(pid);
                return Err(other.err().unwrap_or_else(|| io::Error::other("it has no entry in `/proc`")));
            }
        };
        // Without a record a process that outlives its keeper is not ended by the next one; it ends by itself then.
        let record = RecordFile::record(keeper.records_dir(), Subject::Worker, identity, "")
            .inspect_err(|error| {
                tracing::warn!(error = error as &dyn std::error::Error, pid, "a process is not recorded")
            })
            .ok();
        Ok(Self { identity, pidfd, record })
    }

    /// Takes hold of a process that was started before the keeper was renewed.
    pub(crate) fn existing(keeper: &Keeper, identity: ProcessIdentity) -> io::Result<Self> {
        keeper.own(identity.pid());
        let pidfd = Rc::new(PidFd::open(identity.pid())?);
        let record = Some(RecordFile::existing(keeper.records_dir(), identity));
        Ok(Self { identity, pidfd, record })
    }

    /// Has it killed. It is not reaped, so its pid is still its own.
    pub(crate) fn kill(&self) {
        let killed = raw_pid(self.identity.pid()).map(|pid| kill_process(pid, Signal::KILL));
        if let Some(Err(error)) = killed {
            tracing::error!(pid = self.identity.pid(), %error, "a process can't be killed");
        }
    }

    /// Reaps it, which must have ended.
    pub(crate) fn reap(mut self, keeper: &Keeper) -> io::Result<Status> {
        let status = reap(self.identity.pid());
        keeper.disown(self.identity.pid());
        if let Some(record) = self.record.take() {
            record.remove();
        }
        status?.ok_or_else(|| io::Error::other("it has not ended"))
    }

    /// Leaves it to whoever reaps orphans.
    pub(crate) fn abandon(mut self, keeper: &Keeper) {
        keeper.disown(self.identity.pid());
        if let Some(record) = self.record.take() {
            record.remove();
        }
    }
}
