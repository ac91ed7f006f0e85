//! The Unix stream socket between keeper and worker.
//!
//! It is watched for reading only. A socket that is watched for writing too wakes its owner each time the other end has
//! read something, which would be once more per message; so it is watched for writing only while it is full.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
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

    /// Sends some of `bytes`, and all of `fds` with the first of them: `None` if the socket takes nothing now.
    pub(crate) fn try_send_with_fds(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<Option<usize>> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(LISTENERS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors for one message"));
        }
        self.send(&[IoSlice::new(bytes)], &mut control)
    }

    /// Waits until the socket may take something. Cancel-safe.
    pub(crate) async fn writable(&self) -> io::Result<()> {
        let watched = watch(self.fd.get_ref().try_clone()?, Interest::WRITABLE)?;
        drop(watched.writable().await?);
        Ok(())
    }

    /// Waits for bytes; 0 at the end of the stream. Cancel-safe.
    pub(crate) async fn receive(&self, landing: &mut [u8]) -> io::Result<usize> {
        // Less than there was room for: the socket is empty, and whatever comes next is announced anew.
        self.receive_by(landing, true, |fd, landing| Ok(rustix::net::recv(fd, landing, RecvFlags::empty())?.0)).await
    }

    /// Waits for bytes and descriptors; 0 at the end of the stream. Cancel-safe.
    pub(crate) async fn receive_with_fds(&self, landing: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<usize> {
        // The kernel also stops short behind bytes that descriptors came with.
        self.receive_by(landing, false, |fd, landing| receive_with_fds(fd, landing, fds)).await
    }

    async fn receive_by(
        &self,
        landing: &mut [u8],
        short_means_empty: bool,
        mut receive: impl FnMut(BorrowedFd<'_>, &mut [u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        loop {
            let mut ready = self.fd.readable().await?;
            match receive(self.fd.get_ref().as_fd(), landing) {
                Ok(count) => {
                    if count < landing.len() && short_means_empty {
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

    /// Two connected ends.
    #[cfg(test)]
    pub(crate) fn pair() -> io::Result<(Self, Self)> {
        let (left, right) = UnixStream::pair()?;
        Ok((Self::new(left)?, Self::new(right)?))
    }
}

fn receive_with_fds(fd: BorrowedFd<'_>, landing: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(LISTENERS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(fd, &mut [IoSliceMut::new(landing)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = message {
            fds.extend(passed);
        }
    }
    Ok(received.bytes)
}
