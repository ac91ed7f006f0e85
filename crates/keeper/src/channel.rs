//! Messages in and out of the Unix stream between keeper and worker: length prefixes, coalescing, descriptors.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use tokio::io::Interest;
use tokio::net::UnixStream;

use crate::protocol::{LISTENERS_MAX, MESSAGE_BYTES_MAX, ProtocolError};

/// Encoded messages on their way out. Small ones are put together, large payloads are passed by reference.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    chunks: VecDeque<Bytes>,
    tail: BytesMut,
    len: usize,
}

impl Outbox {
    /// Bytes not yet written.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Appends a message whose fields `fill` writes.
    pub(crate) fn put(&mut self, kind: u8, fill: impl FnOnce(&mut BytesMut)) {
        self.put_with_payload(kind, &Bytes::new(), fill);
    }

    /// Appends a message whose last field is `payload`.
    pub(crate) fn put_with_payload(&mut self, kind: u8, payload: &Bytes, fill: impl FnOnce(&mut BytesMut)) {
        let start = self.tail.len();
        self.tail.put_u32_le(0);
        self.tail.put_u8(kind);
        fill(&mut self.tail);
        let message_bytes = self.tail.len() - start - LENGTH_BYTES + payload.len();
        // A message above the bound can't be built: its parts are bounded where they enter. Should one be, its length
        // stays above the receiver's bound and is refused there.
        let length = u32::try_from(message_bytes).unwrap_or(u32::MAX);
        self.tail[start..start + LENGTH_BYTES].copy_from_slice(&length.to_le_bytes());
        self.len += LENGTH_BYTES + message_bytes;
        if payload.len() <= COPIED_BYTES_MAX {
            self.tail.put_slice(payload);
        } else {
            self.seal();
            self.chunks.push_back(payload.clone());
        }
    }

    /// Writes as much as the socket takes now; `true` once everything is out. Never waits.
    pub(crate) fn try_write(&mut self, stream: &UnixStream) -> io::Result<bool> {
        while !self.is_empty() {
            self.seal();
            let slices: Vec<IoSlice<'_>> =
                self.chunks.iter().take(SLICES_MAX).map(|chunk| IoSlice::new(chunk)).collect();
            match stream.try_write_vectored(&slices) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => self.consume(written),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Writes everything, waiting as long as it takes. Cancel-safe: what was not written stays.
    pub(crate) async fn write_all(&mut self, stream: &UnixStream) -> io::Result<()> {
        while !self.try_write(stream)? {
            stream.writable().await?;
        }
        Ok(())
    }

    /// Writes the first bytes together with `fds`; the descriptors are sent once this returns.
    pub(crate) async fn write_with_fds(&mut self, stream: &UnixStream, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.seal();
        let Some(first) = self.chunks.front().cloned() else {
            return Ok(());
        };
        let written = loop {
            stream.writable().await?;
            match stream.try_io(Interest::WRITABLE, || send_with_fds(stream, &first, fds)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                other => break other?,
            }
        };
        self.consume(written);
        Ok(())
    }

    /// Everything that would be written, in one piece.
    #[cfg(test)]
    pub(crate) fn into_bytes(mut self) -> Bytes {
        self.seal();
        self.chunks.iter().flat_map(|chunk| chunk.iter().copied()).collect()
    }

    fn seal(&mut self) {
        if !self.tail.is_empty() {
            self.chunks.push_back(self.tail.split().freeze());
        }
    }

    fn consume(&mut self, mut written: usize) {
        self.len -= written;
        while let Some(front) = self.chunks.front_mut() {
            if written < front.len() {
                front.advance(written);
                return;
            }
            written -= front.len();
            self.chunks.pop_front();
        }
    }
}

/// Received bytes, cut into messages.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    buffer: BytesMut,
}

impl Inbox {
    /// The next complete message, without its length.
    pub(crate) fn next_message(&mut self) -> Result<Option<Bytes>, ProtocolError> {
        let Some(prefix) = self.buffer.first_chunk::<LENGTH_BYTES>() else {
            return Ok(None);
        };
        let len = usize::try_from(u32::from_le_bytes(*prefix)).unwrap_or(usize::MAX);
        if len == 0 || len > MESSAGE_BYTES_MAX {
            return Err(ProtocolError::Length(len));
        }
        let whole = LENGTH_BYTES + len;
        if self.buffer.len() < whole {
            self.buffer.reserve(whole - self.buffer.len());
            return Ok(None);
        }
        let mut message = self.buffer.split_to(whole);
        message.advance(LENGTH_BYTES);
        Ok(Some(message.freeze()))
    }

    /// Takes what the socket has now: `Some(0)` at its end, `None` if nothing is there.
    pub(crate) fn try_fill(&mut self, stream: &UnixStream) -> io::Result<Option<usize>> {
        if self.buffer.capacity() - self.buffer.len() < READ_BYTES_MIN {
            self.buffer.reserve(READ_BYTES);
        }
        match stream.try_read_buf(&mut self.buffer) {
            Ok(count) => Ok(Some(count)),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Waits for bytes; 0 at the end of the stream. Cancel-safe.
    pub(crate) async fn fill(&mut self, stream: &UnixStream) -> io::Result<usize> {
        loop {
            if let Some(count) = self.try_fill(stream)? {
                return Ok(count);
            }
            stream.readable().await?;
        }
    }

    /// Waits for bytes and descriptors; 0 at the end of the stream.
    pub(crate) async fn fill_with_fds(&mut self, stream: &UnixStream, fds: &mut Vec<OwnedFd>) -> io::Result<usize> {
        let mut chunk = vec![0; READ_BYTES];
        loop {
            stream.readable().await?;
            match stream.try_io(Interest::READABLE, || receive_with_fds(stream, &mut chunk, fds)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                other => {
                    let count = other?;
                    self.buffer.extend_from_slice(&chunk[..count]);
                    return Ok(count);
                }
            }
        }
    }
}

fn send_with_fds(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(LISTENERS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors for one message"));
    }
    Ok(rustix::net::sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?)
}

fn receive_with_fds(stream: &UnixStream, chunk: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(LISTENERS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(stream, &mut [IoSliceMut::new(chunk)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = message {
            fds.extend(passed);
        }
    }
    Ok(received.bytes)
}

/// The length prefix of a message, in bytes.
const LENGTH_BYTES: usize = 4;

/// Payloads up to this size are copied behind their fields, which is cheaper than one more slice, in bytes.
const COPIED_BYTES_MAX: usize = 8 * 1024;

/// The most slices handed to one write.
const SLICES_MAX: usize = 32;

/// How much room a read is given, in bytes.
const READ_BYTES: usize = 64 * 1024;

/// Below this room a fresh buffer is taken, in bytes.
const READ_BYTES_MIN: usize = 4 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "current_thread")]
    async fn messages_of_all_sizes_arrive_whole_and_in_order() {
        let (left, right) = UnixStream::pair().unwrap();
        let sizes = [0, 1, COPIED_BYTES_MAX, COPIED_BYTES_MAX + 1, 3_000_000, 5, 70_000];
        let payloads: Vec<Bytes> = sizes.iter().map(|size| Bytes::from(vec![b'x'; *size])).collect();
        let mut outbox = Outbox::default();
        for (number, payload) in payloads.iter().enumerate() {
            outbox.put_with_payload(7, payload, |body| body.put_u64_le(number as u64));
        }
        let total: usize = sizes.iter().map(|size| size + LENGTH_BYTES + 1 + 8).sum();
        assert_eq!(outbox.len(), total);
        let (mut inbox, mut received) = (Inbox::default(), Vec::new());
        let receive = async {
            while received.len() < sizes.len() {
                match inbox.next_message().unwrap() {
                    Some(message) => received.push(message.slice(9..)),
                    None => assert!(inbox.fill(&right).await.unwrap() > 0),
                }
            }
        };
        let (sent, ()) = tokio::join!(outbox.write_all(&left), receive);
        sent.unwrap();
        assert!(outbox.is_empty());
        assert_eq!(received, payloads);
    }

    #[tokio::test(flavor = "current_thread")]
    async fn descriptors_arrive_with_the_message_they_belong_to() {
        use std::io::{Read as _, Write as _};
        use std::os::fd::AsFd as _;

        let (left, right) = UnixStream::pair().unwrap();
        let (mut near, far) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut outbox = Outbox::default();
        outbox.put_with_payload(7, &Bytes::from(vec![1; 300_000]), |_| ());
        let mut fds = Vec::new();
        let mut inbox = Inbox::default();
        let send = async {
            outbox.write_with_fds(&left, &[far.as_fd()]).await.unwrap();
            outbox.write_all(&left).await.unwrap();
        };
        let receive = async {
            loop {
                if let Some(message) = inbox.next_message().unwrap() {
                    return message;
                }
                assert!(inbox.fill_with_fds(&right, &mut fds).await.unwrap() > 0);
            }
        };
        let ((), message) = tokio::join!(send, receive);
        assert_eq!(message.len(), 300_001);
        let passed = fds.pop().unwrap();
        assert!(fds.is_empty());
        std::os::unix::net::UnixStream::from(passed).write_all(b"hi").unwrap();
        let mut two = [0; 2];
        near.read_exact(&mut two).unwrap();
        assert_eq!(&two, b"hi");
    }

    #[test]
    fn a_length_out_of_bounds_is_refused() {
        for prefix in [[0, 0, 0, 0], [255, 255, 255, 255]] {
            let mut inbox = Inbox { buffer: BytesMut::from(&prefix[..]) };
            assert!(matches!(inbox.next_message(), Err(ProtocolError::Length(_))));
        }
    }
}
