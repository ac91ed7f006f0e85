//! Waiting for the end of a process, with and without reaping it.

use std::io;
use std::os::fd::OwnedFd;

use rustix::process::{PidfdFlags, WaitOptions, pidfd_open, waitpid};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::identity::raw_pid;

/// A process that the caller started and has not reaped.
pub(crate) struct PidFd(AsyncFd<OwnedFd>);

impl PidFd {
    pub(crate) fn open(pid: u32) -> io::Result<Self> {
        let pid = raw_pid(pid).ok_or(io::ErrorKind::InvalidInput)?;
        watch(pidfd_open(pid, PidfdFlags::empty())?, Interest::READABLE).map(Self)
    }

    /// Returns once the process has ended; at once if it has. Cancel-safe.
    pub(crate) async fn ended(&self) {
        // The guard is dropped as it is: a process that has ended stays ended. An error can only come from a runtime
        // that is shutting down.
        if self.0.readable().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// How a process ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Status {
    /// The exit code, if it ended by itself.
    pub(crate) code: Option<i32>,
    /// The signal that ended it, if one did.
    pub(crate) signal: Option<i32>,
}

/// Reaps the process if it has ended; `None` if it has not.
///
/// It must be a child of the calling process that nobody else reaps. Who started it makes no difference, so that one
/// that was started before a renewal is reaped like any other.
pub(crate) fn reap(pid: u32) -> io::Result<Option<Status>> {
    let pid = raw_pid(pid).ok_or(io::ErrorKind::InvalidInput)?;
    loop {
        match waitpid(Some(pid), WaitOptions::NOHANG) {
            Ok(ended) => {
                return Ok(ended.map(|(_, how)| Status { code: how.exit_status(), signal: how.terminating_signal() }));
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Has the runtime watch a descriptor.
#[expect(deprecated, reason = "its successor is unsafe and wants the promise that an owned descriptor keeps anyway")]
pub(crate) fn watch(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(fd, interest)
}
