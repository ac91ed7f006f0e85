//! Messages in and out of the Unix stream between keeper and worker: length prefixes and coalescing.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::{BorrowedFd, OwnedFd};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};

use crate::protocol::{MESSAGE_BYTES_MAX, ProtocolError};
use crate::socket::Socket;

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
    pub(crate) fn try_write(&mut self, socket: &Socket) -> io::Result<bool> {
        while !self.is_empty() {
            self.seal();
            let slices: Vec<IoSlice<'_>> =
                self.chunks.iter().take(SLICES_MAX).map(|chunk| IoSlice::new(chunk)).collect();
            match socket.try_send(&slices)? {
                Some(written) => self.consume(written),
                None => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Writes everything, waiting as long as it takes. Cancel-safe: what was not written stays.
    pub(crate) async fn write_all(&mut self, socket: &Socket) -> io::Result<()> {
        while !self.try_write(socket)? {
            socket.writable().await?;
        }
        Ok(())
    }

    /// Writes the first bytes together with `fds`; the descriptors are sent once this returns.
    pub(crate) async fn write_with_fds(&mut self, socket: &Socket, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.seal();
        let Some(first) = self.chunks.front().cloned() else {
            return Ok(());
        };
        let written = loop {
            match socket.try_send_with_fds(&first, fds)? {
                Some(written) => break written,
                None => socket.writable().await?,
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
pub(crate) struct Inbox {
    buffer: BytesMut,
    /// Where the kernel puts bytes. One more copy of them is cheaper than preparing room for more than came.
    landing: Box<[u8]>,
}

impl Default for Inbox {
    fn default() -> Self {
        Self { buffer: BytesMut::new(), landing: vec![0; READ_BYTES].into() }
    }
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

    /// Waits for bytes; 0 at the end of the stream. Cancel-safe.
    pub(crate) async fn fill(&mut self, socket: &Socket) -> io::Result<usize> {
        let count = socket.receive(&mut self.landing).await?;
        self.buffer.extend_from_slice(&self.landing[..count]);
        Ok(count)
    }

    /// Waits for bytes and descriptors; 0 at the end of the stream. Cancel-safe.
    pub(crate) async fn fill_with_fds(&mut self, socket: &Socket, fds: &mut Vec<OwnedFd>) -> io::Result<usize> {
        let count = socket.receive_with_fds(&mut self.landing, fds).await?;
        self.buffer.extend_from_slice(&self.landing[..count]);
        Ok(count)
    }
}

/// The length prefix of a message, in bytes.
const LENGTH_BYTES: usize = 4;

/// Payloads up to this size are copied behind their fields, which is cheaper than one more slice, in bytes.
const COPIED_BYTES_MAX: usize = 8 * 1024;

/// The most slices handed to one write.
const SLICES_MAX: usize = 32;

/// How much is read at once, in bytes.
const READ_BYTES: usize = 64 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "current_thread")]
    async fn messages_of_all_sizes_arrive_whole_and_in_order() {
        let (left, right) = Socket::pair().unwrap();
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

        let (left, right) = Socket::pair().unwrap();
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
            let mut inbox = Inbox { buffer: BytesMut::from(&prefix[..]), ..Inbox::default() };
            assert!(matches!(inbox.next_message(), Err(ProtocolError::Length(_))));
        }
    }
}
