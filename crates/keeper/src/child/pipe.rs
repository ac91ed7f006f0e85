//! The keeper's end of one of a child's pipes. It can be lent to whoever carries it elsewhere while tasks use it.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::task::{Context, Poll, ready};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::pidfd::watch;

/// One end of a pipe, watched by the runtime.
#[derive(Debug)]
pub(crate) struct Pipe(AsyncFd<OwnedFd>);

impl Pipe {
    /// The end that is read.
    pub(crate) fn of_reader(fd: OwnedFd) -> io::Result<Self> {
        Self::new(fd, Interest::READABLE)
    }

    /// The end that is written.
    pub(crate) fn of_writer(fd: OwnedFd) -> io::Result<Self> {
        Self::new(fd, Interest::WRITABLE)
    }

    fn new(fd: OwnedFd, interest: Interest) -> io::Result<Self> {
        let flags = fcntl_getfl(&fd)?;
        fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
        watch(fd, interest).map(Self)
    }

    /// Reads once into `buffer`; 0 at the end of the stream.
    pub(crate) fn poll_read(&self, context: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        loop {
            let mut ready = ready!(self.0.poll_read_ready(context))?;
            match rustix::io::read(self.0.get_ref(), &mut *buffer) {
                Ok(count) => {
                    // Less than there was room for: the pipe is empty, and whatever comes next is announced anew.
                    if (1..buffer.len()).contains(&count) {
                        ready.clear_ready();
                    }
                    return Poll::Ready(Ok(count));
                }
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(Errno::INTR) => {}
                Err(errno) => return Poll::Ready(Err(errno.into())),
            }
        }
    }

    /// Writes some of `slices`, as soon as the pipe takes anything. Cancel-safe: what was written is always told.
    pub(crate) async fn write(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        loop {
            let mut ready = self.0.writable().await?;
            match rustix::io::writev(self.0.get_ref(), slices) {
                Ok(written) => return Ok(written),
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

impl AsFd for Pipe {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.get_ref().as_fd()
    }
}
