//! Messages in and out of the Unix stream between keeper and worker: length prefixes and coalescing.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::Duration;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use rustix::io::Errno;

use crate::protocol::{MESSAGE_BYTES_MAX, ProtocolError};
use crate::socket::{Arrived, FDS_PER_SEND_MAX, Socket};

/// Encoded messages on their way out. Small ones are put together, large payloads are passed by reference.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    chunks: VecDeque<Bytes>,
    tail: BytesMut,
    len: usize,
    /// Bytes written so far.
    written: u64,
    /// Descriptors and the byte that each of them travels with, counted as `written` is.
    fds: VecDeque<(u64, OwnedFd)>,
    /// The kernel lets no more descriptors be on their way; that ends as the other side reads.
    is_crowded: bool,
}

impl Outbox {
    /// Bytes not yet written.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Has `fd` travel with the message that is put next.
    pub(crate) fn attach(&mut self, fd: OwnedFd) {
        self.fds.push_back((self.written + self.len as u64, fd));
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
        self.is_crowded = false;
        while !self.is_empty() {
            self.seal();
            let written = if self.fds.is_empty() {
                let slices: Vec<_> = self.chunks.iter().take(SLICES_MAX).map(|chunk| IoSlice::new(chunk)).collect();
                socket.try_send(&slices)
            } else {
                self.try_write_with_fd(socket)
            };
            match written {
                Ok(Some(written)) => self.consume(written),
                Ok(None) => return Ok(false),
                Err(error) if error.raw_os_error() == Some(Errno::TOOMANYREFS.raw_os_error()) => {
                    self.is_crowded = true;
                    return Ok(false);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Writes up to the byte that the next descriptor travels with, or from that byte on.
    fn try_write_with_fd(&mut self, socket: &Socket) -> io::Result<Option<usize>> {
        let mut marks = self.fds.iter();
        let Some((first, fd)) = marks.next() else {
            return Ok(None);
        };
        let is_due = *first == self.written;
        // One descriptor at a time: if the other side has no room for it, it knows which one is missing.
        let until = if is_due { marks.next().map(|(at, _)| *at) } else { Some(*first) };
        let limit = until.map_or(usize::MAX, |at| usize::try_from(at - self.written).unwrap_or(usize::MAX));
        let slices = slices_within(&self.chunks, limit);
        if !is_due {
            return socket.try_send(&slices);
        }
        let written = socket.try_send_with_fds(&slices, &[fd.as_fd()])?;
        if written.is_some() {
            self.fds.pop_front();
        }
        Ok(written)
    }

    /// Waits until it is worth trying to write again. Cancel-safe.
    pub(crate) async fn writable(&self, socket: &Socket) -> io::Result<()> {
        if self.is_crowded {
            tokio::time::sleep(CROWDED_PAUSE).await;
        }
        socket.writable().await
    }

    /// Writes everything, waiting as long as it takes. Cancel-safe: what was not written stays.
    pub(crate) async fn write_all(&mut self, socket: &Socket) -> io::Result<()> {
        while !self.try_write(socket)? {
            self.writable(socket).await?;
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
            match socket.try_send_with_fds(&[IoSlice::new(&first)], fds)? {
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
        self.written += written as u64;
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

/// The first `limit` bytes of `chunks`, or less.
fn slices_within(chunks: &VecDeque<Bytes>, limit: usize) -> Vec<IoSlice<'_>> {
    let mut room = limit;
    let mut slices = Vec::new();
    for chunk in chunks.iter().take(SLICES_MAX) {
        let part = &chunk[..chunk.len().min(room)];
        room -= part.len();
        slices.push(IoSlice::new(part));
        if room == 0 {
            break;
        }
    }
    slices
}

/// Received bytes, cut into messages, and the descriptors that came with them.
pub(crate) struct Inbox {
    buffer: BytesMut,
    /// A descriptor is here before the last byte of its message is, and in the order of messages.
    fds: VecDeque<Arrived>,
    /// Where the kernel puts bytes. One more copy of them is cheaper than preparing room for more than came.
    landing: Box<[u8]>,
}

impl Default for Inbox {
    fn default() -> Self {
        Self { buffer: BytesMut::new(), fds: VecDeque::new(), landing: vec![0; READ_BYTES].into() }
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

    /// The descriptor that came with the message taken out last; `None` if this process had no room for it.
    pub(crate) fn take_fd(&mut self) -> Result<Arrived, ProtocolError> {
        self.fds.pop_front().ok_or(ProtocolError::Field("descriptor"))
    }

    /// Waits for bytes; 0 at the end of the stream. Cancel-safe.
    pub(crate) async fn fill(&mut self, socket: &Socket) -> io::Result<usize> {
        if self.fds.len() > FDS_WAITING_MAX {
            // A descriptor without a message, again and again.
            return Err(io::ErrorKind::InvalidData.into());
        }
        let count = socket.receive(&mut self.landing, &mut self.fds).await?;
        self.buffer.extend_from_slice(&self.landing[..count]);
        Ok(count)
    }

    /// Waits for bytes and drops them, and descriptors with them; 0 at the end of the stream. Cancel-safe.
    pub(crate) async fn skip(&mut self, socket: &Socket) -> io::Result<usize> {
        let count = socket.receive(&mut self.landing, &mut self.fds).await?;
        self.fds.clear();
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

/// How many descriptors may wait for the end of their message: those of one send, and a few sent after it.
const FDS_WAITING_MAX: usize = 4 * FDS_PER_SEND_MAX;

/// How long to wait while too many descriptors are on their way.
const CROWDED_PAUSE: Duration = Duration::from_millis(5);

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

        let (left, right) = Socket::pair().unwrap();
        let (mut near, far) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut outbox = Outbox::default();
        outbox.put_with_payload(7, &Bytes::from(vec![1; 300_000]), |_| ());
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
                assert!(inbox.fill(&right).await.unwrap() > 0);
            }
        };
        let ((), message) = tokio::join!(send, receive);
        assert_eq!(message.len(), 300_001);
        let passed = inbox.take_fd().unwrap().unwrap();
        assert!(inbox.take_fd().is_err());
        std::os::unix::net::UnixStream::from(passed).write_all(b"hi").unwrap();
        let mut two = [0; 2];
        near.read_exact(&mut two).unwrap();
        assert_eq!(&two, b"hi");
    }

    #[tokio::test(flavor = "current_thread")]
    async fn t1_many_descriptors_arrive_each_with_its_message_however_the_socket_cuts() {
        const MESSAGES: usize = 2000;
        let (left, right) = Socket::pair().unwrap();
        // A small socket cuts everywhere: within a message, between a message and its descriptor's byte, at each send.
        rustix::net::sockopt::set_socket_send_buffer_size(left.as_fd(), 4608).unwrap();
        let sizes = [0, 1, 700, COPIED_BYTES_MAX + 1, 30_000];
        let (mut near, mut outbox) = (Vec::new(), Outbox::default());
        let send = async {
            for number in 0..MESSAGES {
                if number % 3 != 0 {
                    let (kept, passed) = std::os::unix::net::UnixStream::pair().unwrap();
                    near.push((number, kept));
                    outbox.attach(passed.into());
                }
                let payload = Bytes::from(vec![b'x'; sizes[number % sizes.len()]]);
                outbox.put_with_payload(7, &payload, |body| body.put_u64_le(number as u64));
                if number % 50 == 49 {
                    outbox.write_all(&left).await.unwrap();
                }
            }
            drop(left);
        };
        let receive = async {
            let (mut inbox, mut far) = (Inbox::default(), Vec::new());
            loop {
                while let Some(message) = inbox.next_message().unwrap() {
                    let number = usize::try_from(u64::from_le_bytes(message[1..9].try_into().unwrap())).unwrap();
                    assert_eq!(message.len(), 9 + sizes[number % sizes.len()]);
                    if number % 3 != 0 {
                        far.push((number, std::os::unix::net::UnixStream::from(inbox.take_fd().unwrap().unwrap())));
                    }
                }
                if inbox.fill(&right).await.unwrap() == 0 {
                    assert!(inbox.take_fd().is_err());
                    return far;
                }
            }
        };
        let ((), far) = tokio::join!(send, receive);
        assert_eq!(near.len(), far.len());
        for ((number, mut kept), (of, mut passed)) in near.into_iter().zip(far) {
            use std::io::{Read as _, Write as _};
            passed.write_all(&number.to_le_bytes()).unwrap();
            let mut heard = [0; size_of::<usize>()];
            kept.read_exact(&mut heard).unwrap();
            assert_eq!((usize::from_le_bytes(heard), of), (number, number));
        }
    }

    #[tokio::test(flavor = "current_thread")]
    async fn descriptors_without_messages_end_the_connection() {
        let (left, right) = Socket::pair().unwrap();
        let (mut inbox, end) = (Inbox::default(), std::fs::File::open("/dev/null").unwrap());
        let sent = async {
            // Bytes of one message that never ends, and a descriptor with each of them.
            left.try_send(&[IoSlice::new(&[255, 255, 0, 0])]).unwrap();
            for _ in 0..2 * FDS_WAITING_MAX {
                while left.try_send_with_fds(&[IoSlice::new(&[7])], &[end.as_fd()]).unwrap().is_none() {
                    left.writable().await.unwrap();
                }
            }
        };
        let received = async {
            loop {
                assert_eq!(inbox.next_message(), Ok(None));
                if let Err(error) = inbox.fill(&right).await {
                    return error.kind();
                }
            }
        };
        let ((), kind) = tokio::join!(sent, received);
        assert_eq!(kind, io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_length_out_of_bounds_is_refused() {
        for prefix in [[0, 0, 0, 0], [255, 255, 255, 255]] {
            let mut inbox = Inbox { buffer: BytesMut::from(&prefix[..]), ..Inbox::default() };
            assert!(matches!(inbox.next_message(), Err(ProtocolError::Length(_))));
        }
    }
}
