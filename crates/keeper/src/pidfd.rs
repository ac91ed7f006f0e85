//! Waiting for the end of a process without reaping it.

use std::io;
use std::os::fd::OwnedFd;

use rustix::process::{PidfdFlags, pidfd_open};
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

/// Has the runtime watch a descriptor.
#[expect(deprecated, reason = "its successor is unsafe and wants the promise that an owned descriptor keeps anyway")]
pub(crate) fn watch(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(fd, interest)
}
