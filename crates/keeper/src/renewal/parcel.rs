//! How descriptors pass from a program to the one that is executed in its place: through a socket to oneself.
//!
//! The sender puts them into sockets of its own (`SCM_RIGHTS`) and makes the first of these its standard input. Nothing
//! else is inherited, so nothing can leak, be mistaken or be forgotten; should the execution fail, the sockets are closed
//! and nothing has happened. The first message is the envelope, whose form never changes: a program finds in it what it
//! needs to go back to the one before, even if it understands nothing else.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use bytes::{BufMut as _, Bytes, BytesMut};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType, recv, recvmsg, sendmsg, socketpair, sockopt,
};
use rustix::stdio::dup2_stdin;

use crate::identity::ProcessIdentity;
use crate::protocol::ProtocolError;
use crate::protocol::fields::{Fields, put_blob, put_identity};

/// What stands on the envelope.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Envelope {
    /// The form of the state.
    pub(super) format: u32,
    /// Whom it is for: the sender itself.
    pub(super) keeper: ProcessIdentity,
    /// How many descriptors belong to the state.
    pub(super) fds: u32,
    /// In how many sockets more they travel.
    lanes: u32,
    /// Why it was sent back, if it was.
    pub(super) came_back: Option<String>,
}

/// A state and its descriptors, packed or unpacked.
#[derive(Debug)]
pub(super) struct Parcel {
    pub(super) envelope: Envelope,
    /// The state, written.
    pub(super) state: OwnedFd,
    /// The program that sent it first.
    pub(super) program: OwnedFd,
    /// What standard input was.
    pub(super) stdin: OwnedFd,
}

/// Standard input as the parcel's socket, for as long as it lives; then it is again what it was.
pub(super) struct Posted<'a> {
    stdin: BorrowedFd<'a>,
}

impl Envelope {
    pub(super) fn new(format: u32, keeper: ProcessIdentity, fds: usize, came_back: Option<&str>) -> Self {
        let lanes = fds.div_ceil(LANE_FDS);
        Self {
            format,
            keeper,
            fds: u32::try_from(fds).unwrap_or(u32::MAX),
            lanes: u32::try_from(lanes).unwrap_or(u32::MAX),
            came_back: came_back.map(|reason| reason.chars().take(REASON_CHARS_MAX).collect()),
        }
    }

    fn encode(&self) -> Bytes {
        let mut body = BytesMut::from(&MAGIC[..]);
        body.put_u32_le(self.format);
        put_identity(&mut body, self.keeper);
        body.put_u32_le(self.fds);
        body.put_u32_le(self.lanes);
        body.put_u8(u8::from(self.came_back.is_some()));
        put_blob(&mut body, self.came_back.as_deref().unwrap_or_default().as_bytes());
        body.freeze()
    }

    fn decode(bytes: Bytes) -> Result<Self, ProtocolError> {
        let mut fields = Fields(bytes);
        if &fields.array::<{ MAGIC.len() }>("magic")? != MAGIC {
            return Err(ProtocolError::Field("magic"));
        }
        let (format, keeper) = (fields.u32("format")?, fields.identity()?);
        let (fds, lanes) = (fields.u32("fds")?, fields.u32("lanes")?);
        let (did_come_back, reason) = (fields.flag("came_back")?, fields.text("came_back")?);
        // Later programs may say more.
        Ok(Self { format, keeper, fds, lanes, came_back: did_come_back.then_some(reason) })
    }
}

impl Parcel {
    /// Makes the parcel with `fds` standard input. Nothing has happened if that fails.
    pub(super) fn post(&self, fds: &[BorrowedFd<'_>]) -> io::Result<Posted<'_>> {
        let mut lanes = Vec::new();
        for fds in fds.chunks(LANE_FDS) {
            let (near, far) = lane()?;
            for fds in fds.chunks(MESSAGE_FDS) {
                send(&near, MORE, fds)?;
            }
            lanes.push(far);
        }
        let (near, first) = lane()?;
        let fixed = [self.state.as_fd(), self.program.as_fd(), self.stdin.as_fd()];
        let sent: Vec<BorrowedFd<'_>> = fixed.into_iter().chain(lanes.iter().map(|lane| lane.as_fd())).collect();
        send(&near, &self.envelope.encode(), &sent)?;
        let posted = Posted { stdin: self.stdin.as_fd() };
        dup2_stdin(&first)?;
        Ok(posted)
    }

    /// Takes the parcel from standard input, which is again what it was, and the descriptors of its state.
    /// `None` if there is none.
    pub(super) fn receive() -> io::Result<Option<(Self, Vec<OwnedFd>)>> {
        let stdin = io::stdin();
        if !is_parcel(stdin.as_fd()) {
            return Ok(None);
        }
        let mut fixed = Vec::new();
        let envelope = receive(stdin.as_fd(), &mut fixed)?;
        let envelope = Envelope::decode(envelope).map_err(io::Error::other)?;
        let mut fixed = fixed.into_iter();
        let (Some(state), Some(program), Some(old_stdin)) = (fixed.next(), fixed.next(), fixed.next()) else {
            return Err(io::Error::other("the envelope came without its descriptors"));
        };
        let lanes: Vec<OwnedFd> = fixed.collect();
        // What was first before the lanes is not needed any more, and whoever is started must not inherit it.
        dup2_stdin(&old_stdin)?;
        let mut fds = Vec::new();
        for lane in &lanes {
            while !receive(lane.as_fd(), &mut fds)?.is_empty() {}
        }
        Ok(Some((Self { envelope, state, program, stdin: old_stdin }, fds)))
    }
}

impl Drop for Posted<'_> {
    fn drop(&mut self) {
        if let Err(error) = dup2_stdin(self.stdin) {
            tracing::error!(%error, "standard input is not what it was before the failed renewal");
        }
    }
}

/// A socket's two ends, the first to put in, the second to take out.
fn lane() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

fn send(lane: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MESSAGE_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors for one message"));
    }
    loop {
        match sendmsg(lane, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Takes the next message out; an empty one once there is no more.
fn receive(lane: BorrowedFd<'_>, fds: &mut Vec<OwnedFd>) -> io::Result<Bytes> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MESSAGE_FDS))];
    let mut landing = [0; ENVELOPE_BYTES_MAX];
    loop {
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        match recvmsg(lane, &mut [IoSliceMut::new(&mut landing)], &mut control, flags) {
            Ok(received) => {
                for message in control.drain() {
                    if let RecvAncillaryMessage::ScmRights(passed) = message {
                        fds.extend(passed);
                    }
                }
                return Ok(Bytes::copy_from_slice(&landing[..received.bytes]));
            }
            // The other end was closed, so that would be the end; a first socket that is still held ends here too.
            Err(Errno::AGAIN) => return Ok(Bytes::new()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Whether `fd` is a socket whose first message is an envelope.
fn is_parcel(fd: BorrowedFd<'_>) -> bool {
    if sockopt::socket_type(fd) != Ok(SocketType::SEQPACKET) || sockopt::socket_domain(fd) != Ok(AddressFamily::UNIX) {
        return false;
    }
    let mut start = [0; MAGIC.len()];
    let peeked = recv(fd, &mut start[..], RecvFlags::PEEK | RecvFlags::DONTWAIT);
    peeked.is_ok_and(|(count, _)| count == start.len()) && start == *MAGIC
}

/// How an envelope begins.
const MAGIC: &[u8; 16] = b"mainstay renewal";

/// What a message says that is there for its descriptors only.
const MORE: &[u8] = b"+";

/// How many descriptors travel in one message; the kernel takes 253.
const MESSAGE_FDS: usize = 250;

/// How many descriptors travel in one socket. Its buffer holds far more than that many messages by default.
const LANE_FDS: usize = 100 * MESSAGE_FDS;

/// The longest reason for a parcel's coming back, in characters.
const REASON_CHARS_MAX: usize = 1000;

/// The longest envelope, in bytes.
const ENVELOPE_BYTES_MAX: usize = 8 * 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::BootId;

    fn identity() -> ProcessIdentity {
        ProcessIdentity::from_parts(0x0102, 0x0304, BootId::from_bytes([7; 16])).unwrap()
    }

    #[test]
    fn the_envelope_never_changes_its_form() {
        let envelope = Envelope::new(1, identity(), 5, Some("no"));
        let expected = [
            &b"mainstay renewal"[..],
            &[1, 0, 0, 0],
            &[2, 1, 0, 0, 4, 3, 0, 0, 0, 0, 0, 0],
            &[7; 16],
            &[5, 0, 0, 0, 1, 0, 0, 0],
            &[1, 2, 0, 0, 0, b'n', b'o'],
        ];
        assert_eq!(envelope.encode(), expected.concat());
        assert_eq!(Envelope::decode(envelope.encode()), Ok(envelope));
    }

    #[test]
    fn an_envelope_of_a_later_program_that_says_more_is_understood() {
        let envelope = Envelope::new(u32::MAX, identity(), 0, None);
        let longer = [&envelope.encode()[..], b"more"].concat();
        assert_eq!(Envelope::decode(longer.into()), Ok(envelope));
    }

    #[test]
    fn junk_and_halves_are_no_envelopes() {
        let whole = Envelope::new(1, identity(), 5, Some("no")).encode();
        for end in 0..whole.len() {
            assert!(Envelope::decode(whole.slice(..end)).is_err(), "{end} bytes");
        }
    }

    #[test]
    fn the_longest_reason_fits_into_an_envelope() {
        let reason = "\u{1F980}".repeat(2 * REASON_CHARS_MAX);
        let envelope = Envelope::new(1, identity(), 0, Some(&reason));
        assert!(envelope.encode().len() <= ENVELOPE_BYTES_MAX);
    }

    #[test]
    fn what_is_no_socket_or_holds_no_envelope_is_no_parcel() {
        let (near, far) = lane().unwrap();
        assert!(!is_parcel(far.as_fd()));
        send(&near, b"mainstay, of course", &[near.as_fd()]).unwrap();
        assert!(!is_parcel(far.as_fd()));
        let file = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        assert!(!is_parcel(file.as_fd()));
    }

    #[test]
    fn a_socket_holds_as_many_descriptors_as_are_put_into_it() {
        let (near, far) = lane().unwrap();
        let one = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let messages = LANE_FDS / MESSAGE_FDS;
        for _ in 0..messages {
            send(&near, MORE, &[one.as_fd()]).unwrap();
        }
        drop(near);
        let mut fds = Vec::new();
        while !receive(far.as_fd(), &mut fds).unwrap().is_empty() {}
        assert_eq!(fds.len(), messages);
    }
}
