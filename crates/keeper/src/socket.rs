//! The Unix stream socket between keeper and worker.
//!
//! It is watched for reading only. A socket that is watched for writing too wakes its owner each time the other end has
//! read something, which would be once more per message; so it is watched for writing only while it is full.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::pidfd::watch;
use crate::protocol::LISTENERS_MAX;

/// One end of the socket.
pub(crate) struct Socket {
    fd: AsyncFd<OwnedFd>,
}

impl Socket {
    pub(crate) fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self { fd: watch(stream.into(), Interest::READABLE)? })
    }

    /// Sends what the socket takes now: `None` if that is nothing.
    pub(crate) fn try_send(&self, slices: &[IoSlice<'_>]) -> io::Result<Option<usize>> {
        self.send(slices, &mut SendAncillaryBuffer::default())
    }

    /// Sends some of `slices`, and all of `fds` with the first byte of them: `None` if the socket takes nothing now.
    pub(crate) fn try_send_with_fds(
        &self,
        slices: &[IoSlice<'_>],
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<Option<usize>> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_PER_SEND_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors for one message"));
        }
        self.send(slices, &mut control)
    }

    /// Waits until the socket may take something. Cancel-safe.
    pub(crate) async fn writable(&self) -> io::Result<()> {
        let watched = watch(self.fd.get_ref().try_clone()?, Interest::WRITABLE)?;
        drop(watched.writable().await?);
        Ok(())
    }

    /// Waits for bytes, and for descriptors that come with them; 0 at the end of the stream. Cancel-safe.
    pub(crate) async fn receive(&self, landing: &mut [u8], fds: &mut VecDeque<Arrived>) -> io::Result<usize> {
        loop {
            let mut ready = self.fd.readable().await?;
            let known = fds.len();
            match receive_once(self.fd.get_ref().as_fd(), landing, fds) {
                Ok(count) => {
                    // Less than there was room for: the socket is empty, and whatever comes next is announced anew. But
                    // the kernel also stops short behind bytes that descriptors came with.
                    if count < landing.len() && fds.len() == known {
                        ready.clear_ready();
                    }
                    return Ok(count);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => ready.clear_ready(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn send(&self, slices: &[IoSlice<'_>], control: &mut SendAncillaryBuffer<'_, '_, '_>) -> io::Result<Option<usize>> {
        loop {
            match rustix::net::sendmsg(self.fd.get_ref(), slices, control, SendFlags::NOSIGNAL) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => return Ok(Some(written)),
                Err(rustix::io::Errno::AGAIN) => return Ok(None),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.get_ref().as_fd()
    }

    /// Two connected ends.
    #[cfg(test)]
    pub(crate) fn pair() -> io::Result<(Self, Self)> {
        let (left, right) = UnixStream::pair()?;
        Ok((Self::new(left)?, Self::new(right)?))
    }
}

/// A descriptor that has arrived; `None` if this process had no room for it.
pub(crate) type Arrived = Option<OwnedFd>;

fn receive_once(fd: BorrowedFd<'_>, landing: &mut [u8], fds: &mut VecDeque<Arrived>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_PER_SEND_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(fd, &mut [IoSliceMut::new(landing)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = message {
            fds.extend(passed.map(Some));
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        // Some could not be taken, which are the last of those that were sent together.
        fds.push_back(None);
    }
    Ok(received.bytes)
}

/// The most descriptors that travel with one byte; the kernel's own bound is 253.
pub(crate) const FDS_PER_SEND_MAX: usize = LISTENERS_MAX;
