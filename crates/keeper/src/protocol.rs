//! The messages between the keeper and a worker, as bytes. `PROTOCOL.md` is the description for people.
//!
//! A message is a little-endian `u32` length, a kind byte and the kind's fields. The payload, where there is one, is the
//! last field and is neither copied when it is large nor looked at.

use std::time::Duration;

use bytes::{BufMut as _, Bytes};

use crate::channel::Outbox;
use crate::identity::ProcessIdentity;
use crate::types::{CallTag, ChildId, Exit, Handover, Spawn, SpawnFailure};

use fields::{Fields, put_blob, put_handover, put_identity, put_list, put_number, put_spawn, put_tag};

pub(crate) mod fields;

/// The version that both ends must have in common. Raised whenever a message changes.
pub const PROTOCOL_VERSION: u32 = 4;

/// The longest frame in either direction, in bytes.
pub const FRAME_BYTES_MAX: usize = 64 * 1024 * 1024;

/// The longest message: a frame and its fields, in bytes.
pub(crate) const MESSAGE_BYTES_MAX: usize = FRAME_BYTES_MAX + 64 * 1024;

/// The most items of one list in a message.
pub(crate) const LIST_LEN_MAX: usize = 64 * 1024;

/// The longest list of named listening sockets; far below what one message may carry in descriptors (253).
pub(crate) const LISTENERS_MAX: usize = 16;

/// How much of a connection's next request may have been read when the connection is passed on, in bytes.
pub const CONNECTION_READ_BYTES_MAX: usize = 64 * 1024;

/// Why bytes are no message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// The length is zero or above the bound.
    #[error("message length {0} is out of bounds")]
    Length(usize),
    /// No such kind.
    #[error("unknown message kind {0}")]
    Kind(u8),
    /// A field is missing, too long or not of its type.
    #[error("field `{0}` is malformed")]
    Field(&'static str),
    /// The message goes on behind its last field.
    #[error("{0} bytes behind the last field")]
    Trailing(usize),
    /// A message that is not allowed at this point.
    #[error("message out of order")]
    Order,
}

/// What a worker says to the keeper.
#[derive(Clone, PartialEq, Eq)]
#[cfg_attr(test, derive(Debug))]
pub(crate) enum ToKeeper {
    Hello {
        version: u32,
        pid: u32,
    },
    Ready,
    Spawn {
        request: u64,
        spawn: Spawn,
    },
    Write {
        child: ChildId,
        tag: Option<CallTag>,
        frame: Bytes,
    },
    Acknowledge {
        child: ChildId,
        from: u64,
        through: u64,
    },
    Settle {
        child: ChildId,
        tags: Vec<CallTag>,
    },
    Stop {
        child: ChildId,
        grace: Duration,
    },
    Forget {
        child: ChildId,
    },
    StderrTail {
        request: u64,
        child: ChildId,
    },
    Shutdown {
        retire: bool,
    },
    Succeed {
        request: u64,
        upgrade: bool,
        /// Whether only the rehearsal is wanted, and no successor.
        rehearse_only: bool,
    },
    /// The connection's socket travels with the first byte.
    Connection(Passing),
    HandedOver,
    Pong,
    Waiting,
}

/// What the keeper says to a worker.
#[derive(Clone, PartialEq, Eq)]
#[cfg_attr(test, derive(Debug))]
pub(crate) enum ToWorker {
    Refused {
        version: u32,
    },
    Welcome(Welcoming),
    Held(Holding),
    Begin,
    Spawned {
        request: u64,
        child: ChildId,
        identity: ProcessIdentity,
    },
    SpawnFailed {
        request: u64,
        failure: SpawnFailure,
        detail: String,
    },
    Frame {
        child: ChildId,
        number: u64,
        bytes: Bytes,
    },
    Oversize {
        child: ChildId,
        number: u64,
        bytes: u64,
        head: Bytes,
        tail: Bytes,
    },
    Written {
        child: ChildId,
        through: u64,
    },
    Exited {
        child: ChildId,
        exit: Exit,
    },
    StderrTail {
        request: u64,
        bytes: Bytes,
    },
    Drain {
        retire: bool,
    },
    HandOver,
    Succeeding {
        request: u64,
        /// What the rehearsal has answered with.
        settings: Bytes,
    },
    NotSucceeding {
        request: u64,
        reason: String,
    },
    /// The connection's socket travels with the first byte.
    Connection(Passing),
    Ping,
}

/// The keeper's first message to a worker of its version. The listening sockets travel beside it, in the order of names.
#[derive(Clone, PartialEq, Eq)]
#[cfg_attr(test, derive(Debug))]
pub(crate) struct Welcoming {
    pub(crate) keeper: ProcessIdentity,
    pub(crate) worker_number: u64,
    pub(crate) listeners: Vec<String>,
    pub(crate) keeper_version: String,
    /// How the last handover went; for its successor, how it goes if that becomes ready.
    pub(crate) handover: Option<Handover>,
    pub(crate) settings: Bytes,
}

/// A client's connection on its way from one worker to the next, without its socket.
#[derive(Clone, PartialEq, Eq)]
#[cfg_attr(test, derive(Debug))]
pub(crate) struct Passing {
    /// The listener that it came in by.
    pub(crate) listener: String,
    /// What was read of its next request.
    pub(crate) read: Bytes,
}

/// One child that the keeper holds while a worker attaches.
#[derive(Clone, PartialEq, Eq)]
#[cfg_attr(test, derive(Debug))]
pub(crate) struct Holding {
    pub(crate) child: ChildId,
    pub(crate) identity: ProcessIdentity,
    pub(crate) spawned_at_unix_ms: u64,
    /// Whole frames taken from workers so far.
    pub(crate) frames_accepted: u64,
    /// Whole frames handed to the pipe so far.
    pub(crate) frames_written: u64,
    /// Bytes accepted and not yet written.
    pub(crate) queued_bytes: u64,
    /// Calls whose frame was taken and that no worker has settled, oldest first.
    pub(crate) open: Vec<CallTag>,
    pub(crate) label: Bytes,
}

mod kind {
    pub(super) const HELLO: u8 = 1;
    pub(super) const READY: u8 = 2;
    pub(super) const SPAWN: u8 = 3;
    pub(super) const WRITE: u8 = 4;
    pub(super) const ACKNOWLEDGE: u8 = 5;
    pub(super) const STOP: u8 = 6;
    pub(super) const FORGET: u8 = 7;
    pub(super) const STDERR_TAIL_WANTED: u8 = 8;
    pub(super) const SHUTDOWN: u8 = 9;
    pub(super) const SETTLE: u8 = 10;
    pub(super) const SUCCEED: u8 = 11;
    pub(super) const CONNECTION_FROM: u8 = 12;
    pub(super) const HANDED_OVER: u8 = 13;
    pub(super) const PONG: u8 = 14;
    pub(super) const WAITING: u8 = 15;

    pub(super) const REFUSED: u8 = 65;
    pub(super) const WELCOME: u8 = 66;
    pub(super) const HELD: u8 = 67;
    pub(super) const BEGIN: u8 = 68;
    pub(super) const SPAWNED: u8 = 69;
    pub(super) const SPAWN_FAILED: u8 = 70;
    pub(super) const FRAME: u8 = 71;
    pub(super) const OVERSIZE: u8 = 72;
    pub(super) const WRITTEN: u8 = 73;
    pub(super) const EXITED: u8 = 74;
    pub(super) const STDERR_TAIL: u8 = 75;
    pub(super) const DRAIN: u8 = 76;
    pub(super) const HAND_OVER: u8 = 77;
    pub(super) const SUCCEEDING: u8 = 78;
    pub(super) const NOT_SUCCEEDING: u8 = 79;
    pub(super) const CONNECTION_TO: u8 = 80;
    pub(super) const PING: u8 = 81;
}

impl ToKeeper {
    /// Puts the message behind what `out` already holds.
    pub(crate) fn encode(&self, out: &mut Outbox) {
        match self {
            Self::Hello { version, pid } => {
                out.put(kind::HELLO, |body| {
                    body.put_u32_le(*version);
                    body.put_u32_le(*pid);
                });
            }
            Self::Ready => out.put(kind::READY, |_| ()),
            Self::Spawn { request, spawn } => out.put(kind::SPAWN, |body| {
                body.put_u64_le(*request);
                put_spawn(body, spawn);
            }),
            Self::Write { child, tag, frame } => out.put_with_payload(kind::WRITE, frame, |body| {
                body.put_u64_le(child.get());
                body.put_u8(u8::from(tag.is_some()));
                if let Some(tag) = tag {
                    put_tag(body, tag);
                }
            }),
            Self::Acknowledge { child, from, through } => out.put(kind::ACKNOWLEDGE, |body| {
                body.put_u64_le(child.get());
                body.put_u64_le(*from);
                body.put_u64_le(*through);
            }),
            Self::Settle { child, tags } => out.put(kind::SETTLE, |body| {
                body.put_u64_le(child.get());
                put_list(body, tags, put_tag);
            }),
            Self::Stop { child, grace } => out.put(kind::STOP, |body| {
                body.put_u64_le(child.get());
                body.put_u64_le(u64::try_from(grace.as_millis()).unwrap_or(u64::MAX));
            }),
            Self::Forget { child } => out.put(kind::FORGET, |body| body.put_u64_le(child.get())),
            Self::StderrTail { request, child } => out.put(kind::STDERR_TAIL_WANTED, |body| {
                body.put_u64_le(*request);
                body.put_u64_le(child.get());
            }),
            Self::Shutdown { retire } => out.put(kind::SHUTDOWN, |body| body.put_u8(u8::from(*retire))),
            Self::Succeed { request, upgrade, rehearse_only } => out.put(kind::SUCCEED, |body| {
                body.put_u64_le(*request);
                body.put_u8(u8::from(*upgrade));
                body.put_u8(u8::from(*rehearse_only));
            }),
            Self::Connection(passing) => passing.encode(kind::CONNECTION_FROM, out),
            Self::HandedOver => out.put(kind::HANDED_OVER, |_| ()),
            Self::Pong => out.put(kind::PONG, |_| ()),
            Self::Waiting => out.put(kind::WAITING, |_| ()),
        }
    }

    /// Reads one message without its length.
    pub(crate) fn decode(message: Bytes) -> Result<Self, ProtocolError> {
        let mut fields = Fields(message);
        let decoded = match fields.byte("kind")? {
            kind::HELLO => Self::Hello { version: fields.u32("version")?, pid: fields.u32("pid")? },
            kind::READY => Self::Ready,
            kind::SPAWN => Self::Spawn { request: fields.u64("request")?, spawn: fields.spawn()? },
            kind::WRITE => Self::Write { child: fields.child()?, tag: fields.optional_tag()?, frame: fields.rest() },
            kind::ACKNOWLEDGE => {
                Self::Acknowledge { child: fields.child()?, from: fields.u64("from")?, through: fields.u64("through")? }
            }
            kind::SETTLE => Self::Settle { child: fields.child()?, tags: fields.list("tags", Fields::tag)? },
            kind::STOP => Self::Stop { child: fields.child()?, grace: Duration::from_millis(fields.u64("grace_ms")?) },
            kind::FORGET => Self::Forget { child: fields.child()? },
            kind::STDERR_TAIL_WANTED => Self::StderrTail { request: fields.u64("request")?, child: fields.child()? },
            kind::SHUTDOWN => Self::Shutdown { retire: fields.flag("retire")? },
            kind::SUCCEED => Self::Succeed {
                request: fields.u64("request")?,
                upgrade: fields.flag("upgrade")?,
                rehearse_only: fields.flag("rehearse_only")?,
            },
            kind::CONNECTION_FROM => Self::Connection(Passing::decode(&mut fields)?),
            kind::HANDED_OVER => Self::HandedOver,
            kind::PONG => Self::Pong,
            kind::WAITING => Self::Waiting,
            other => return Err(ProtocolError::Kind(other)),
        };
        fields.end()?;
        Ok(decoded)
    }
}

impl ToWorker {
    /// Puts the message behind what `out` already holds.
    pub(crate) fn encode(&self, out: &mut Outbox) {
        match self {
            Self::Refused { version } => out.put(kind::REFUSED, |body| body.put_u32_le(*version)),
            Self::Welcome(welcome) => out.put_with_payload(kind::WELCOME, &welcome.settings, |body| {
                put_identity(body, welcome.keeper);
                body.put_u64_le(welcome.worker_number);
                put_list(body, &welcome.listeners, |body, name| put_blob(body, name.as_bytes()));
                put_blob(body, welcome.keeper_version.as_bytes());
                put_handover(body, welcome.handover.as_ref());
            }),
            Self::Held(held) => out.put_with_payload(kind::HELD, &held.label, |body| {
                body.put_u64_le(held.child.get());
                put_identity(body, held.identity);
                body.put_u64_le(held.spawned_at_unix_ms);
                body.put_u64_le(held.frames_accepted);
                body.put_u64_le(held.frames_written);
                body.put_u64_le(held.queued_bytes);
                put_list(body, &held.open, put_tag);
            }),
            Self::Begin => out.put(kind::BEGIN, |_| ()),
            Self::Spawned { request, child, identity } => out.put(kind::SPAWNED, |body| {
                body.put_u64_le(*request);
                body.put_u64_le(child.get());
                put_identity(body, *identity);
            }),
            Self::SpawnFailed { request, failure, detail } => out.put(kind::SPAWN_FAILED, |body| {
                body.put_u64_le(*request);
                body.put_u8(failure.code());
                put_blob(body, detail.as_bytes());
            }),
            Self::Frame { child, number, bytes } => out.put_with_payload(kind::FRAME, bytes, |body| {
                body.put_u64_le(child.get());
                body.put_u64_le(*number);
            }),
            Self::Oversize { child, number, bytes, head, tail } => {
                out.put_with_payload(kind::OVERSIZE, tail, |body| {
                    body.put_u64_le(child.get());
                    body.put_u64_le(*number);
                    body.put_u64_le(*bytes);
                    put_blob(body, head);
                });
            }
            Self::Written { child, through } => out.put(kind::WRITTEN, |body| {
                body.put_u64_le(child.get());
                body.put_u64_le(*through);
            }),
            Self::Exited { child, exit } => out.put_with_payload(kind::EXITED, &exit.stderr_tail, |body| {
                body.put_u64_le(child.get());
                put_number(body, exit.code);
                put_number(body, exit.signal);
                body.put_u64_le(exit.frames_written);
                body.put_u8(u8::from(exit.frame_partly_written));
            }),
            Self::StderrTail { request, bytes } => {
                out.put_with_payload(kind::STDERR_TAIL, bytes, |body| body.put_u64_le(*request));
            }
            Self::Drain { retire } => out.put(kind::DRAIN, |body| body.put_u8(u8::from(*retire))),
            Self::HandOver => out.put(kind::HAND_OVER, |_| ()),
            Self::Succeeding { request, settings } => {
                out.put_with_payload(kind::SUCCEEDING, settings, |body| body.put_u64_le(*request));
            }
            Self::NotSucceeding { request, reason } => out.put(kind::NOT_SUCCEEDING, |body| {
                body.put_u64_le(*request);
                put_blob(body, reason.as_bytes());
            }),
            Self::Connection(passing) => passing.encode(kind::CONNECTION_TO, out),
            Self::Ping => out.put(kind::PING, |_| ()),
        }
    }

    /// Reads one message without its length.
    pub(crate) fn decode(message: Bytes) -> Result<Self, ProtocolError> {
        let mut fields = Fields(message);
        let decoded = match fields.byte("kind")? {
            kind::REFUSED => Self::Refused { version: fields.u32("version")? },
            kind::WELCOME => Self::Welcome(fields.welcoming()?),
            kind::HELD => Self::Held(fields.holding()?),
            kind::BEGIN => Self::Begin,
            kind::SPAWNED => {
                Self::Spawned { request: fields.u64("request")?, child: fields.child()?, identity: fields.identity()? }
            }
            kind::SPAWN_FAILED => Self::SpawnFailed {
                request: fields.u64("request")?,
                failure: SpawnFailure::from_code(fields.byte("failure")?).ok_or(ProtocolError::Field("failure"))?,
                detail: fields.text("detail")?,
            },
            kind::FRAME => Self::Frame { child: fields.child()?, number: fields.u64("number")?, bytes: fields.rest() },
            kind::OVERSIZE => Self::Oversize {
                child: fields.child()?,
                number: fields.u64("number")?,
                bytes: fields.u64("bytes")?,
                head: fields.blob("head")?,
                tail: fields.rest(),
            },
            kind::WRITTEN => Self::Written { child: fields.child()?, through: fields.u64("through")? },
            kind::EXITED => Self::Exited { child: fields.child()?, exit: fields.exit()? },
            kind::STDERR_TAIL => Self::StderrTail { request: fields.u64("request")?, bytes: fields.rest() },
            kind::DRAIN => Self::Drain { retire: fields.flag("retire")? },
            kind::HAND_OVER => Self::HandOver,
            kind::SUCCEEDING => Self::Succeeding { request: fields.u64("request")?, settings: fields.rest() },
            kind::NOT_SUCCEEDING => {
                Self::NotSucceeding { request: fields.u64("request")?, reason: fields.text("reason")? }
            }
            kind::CONNECTION_TO => Self::Connection(Passing::decode(&mut fields)?),
            kind::PING => Self::Ping,
            other => return Err(ProtocolError::Kind(other)),
        };
        fields.end()?;
        Ok(decoded)
    }
}

impl Passing {
    fn encode(&self, kind: u8, out: &mut Outbox) {
        out.put_with_payload(kind, &self.read, |body| put_blob(body, self.listener.as_bytes()));
    }

    fn decode(fields: &mut Fields) -> Result<Self, ProtocolError> {
        Ok(Self { listener: fields.text("listener")?, read: fields.connection_read()? })
    }
}

#[cfg(test)]
mod tests;
