//! What messages are made of: numbers, blobs, lists and the parts that several messages share.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::PathBuf;

use bytes::{BufMut as _, Bytes, BytesMut};

use super::{CONNECTION_READ_BYTES_MAX, Holding, LIST_LEN_MAX, LISTENERS_MAX, ProtocolError, Welcoming};
use crate::identity::{BootId, ProcessIdentity};
use crate::types::{CallTag, ChildId, Exit, Handover, HandoverOutcome, Spawn};

pub(crate) fn put_identity(body: &mut BytesMut, identity: ProcessIdentity) {
    body.put_u32_le(identity.pid());
    body.put_u64_le(identity.started_ticks());
    body.put_slice(&identity.boot().to_bytes());
}

pub(crate) fn put_spawn(body: &mut BytesMut, spawn: &Spawn) {
    put_blob(body, &spawn.label);
    put_blob(body, spawn.name.as_bytes());
    put_blob(body, spawn.program.as_bytes());
    put_list(body, &spawn.args, |body, argument| put_blob(body, argument.as_bytes()));
    put_list(body, &spawn.env, |body, (name, value)| {
        put_blob(body, name.as_bytes());
        put_blob(body, value.as_bytes());
    });
    body.put_u8(u8::from(spawn.cwd.is_some()));
    if let Some(cwd) = &spawn.cwd {
        put_blob(body, cwd.as_os_str().as_bytes());
    }
    put_blob(body, spawn.marker.as_bytes());
}

pub(crate) fn put_number(body: &mut BytesMut, number: Option<i32>) {
    body.put_u8(u8::from(number.is_some()));
    body.put_i32_le(number.unwrap_or_default());
}

pub(crate) fn put_tag(body: &mut BytesMut, tag: &CallTag) {
    body.put_slice(&tag.to_bytes());
}

pub(crate) fn put_blob(body: &mut BytesMut, bytes: &[u8]) {
    body.put_u32_le(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
    body.put_slice(bytes);
}

pub(crate) fn put_list<T>(body: &mut BytesMut, items: &[T], mut put: impl FnMut(&mut BytesMut, &T)) {
    body.put_u32_le(u32::try_from(items.len()).unwrap_or(u32::MAX));
    for item in items {
        put(body, item);
    }
}

pub(crate) fn put_handover(body: &mut BytesMut, handover: Option<&Handover>) {
    body.put_u8(u8::from(handover.is_some()));
    if let Some(handover) = handover {
        body.put_u8(handover.outcome.code());
        body.put_u8(u8::from(handover.upgrade));
        body.put_u64_le(handover.at_unix_ms);
        for text in [&handover.from_version, &handover.to_version, &handover.reason] {
            put_blob(body, text.as_bytes());
        }
    }
}

/// The part of a message that was not read yet.
pub(crate) struct Fields(pub(crate) Bytes);

impl Fields {
    pub(crate) fn take(&mut self, len: usize, field: &'static str) -> Result<Bytes, ProtocolError> {
        if self.0.len() < len {
            return Err(ProtocolError::Field(field));
        }
        Ok(self.0.split_to(len))
    }

    pub(crate) fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], ProtocolError> {
        <[u8; N]>::try_from(&self.take(N, field)?[..]).map_err(|_| ProtocolError::Field(field))
    }

    pub(crate) fn byte(&mut self, field: &'static str) -> Result<u8, ProtocolError> {
        Ok(u8::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn u32(&mut self, field: &'static str) -> Result<u32, ProtocolError> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn u64(&mut self, field: &'static str) -> Result<u64, ProtocolError> {
        Ok(u64::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn flag(&mut self, field: &'static str) -> Result<bool, ProtocolError> {
        match self.byte(field)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(ProtocolError::Field(field)),
        }
    }

    pub(crate) fn number(&mut self, field: &'static str) -> Result<Option<i32>, ProtocolError> {
        let is_there = self.flag(field)?;
        let number = i32::from_le_bytes(self.array(field)?);
        Ok(is_there.then_some(number))
    }

    pub(crate) fn blob(&mut self, field: &'static str) -> Result<Bytes, ProtocolError> {
        let len = self.u32(field)?;
        self.take(usize::try_from(len).unwrap_or(usize::MAX), field)
    }

    pub(crate) fn text(&mut self, field: &'static str) -> Result<String, ProtocolError> {
        String::from_utf8(self.blob(field)?.into()).map_err(|_| ProtocolError::Field(field))
    }

    pub(crate) fn os_text(&mut self, field: &'static str) -> Result<OsString, ProtocolError> {
        Ok(OsString::from_vec(self.blob(field)?.into()))
    }

    pub(crate) fn list<T>(
        &mut self,
        field: &'static str,
        mut item: impl FnMut(&mut Self) -> Result<T, ProtocolError>,
    ) -> Result<Vec<T>, ProtocolError> {
        let len = usize::try_from(self.u32(field)?).unwrap_or(usize::MAX);
        if len > LIST_LEN_MAX {
            return Err(ProtocolError::Field(field));
        }
        // No capacity is taken on the sender's word: a list longer than its message fails at its first missing item.
        (0..len).map(|_| item(self)).collect()
    }

    pub(crate) fn child(&mut self) -> Result<ChildId, ProtocolError> {
        Ok(ChildId::new(self.u64("child")?))
    }

    pub(crate) fn tag(&mut self) -> Result<CallTag, ProtocolError> {
        Ok(CallTag::from_bytes(self.array("tag")?))
    }

    pub(crate) fn optional_tag(&mut self) -> Result<Option<CallTag>, ProtocolError> {
        if self.flag("tag")? { self.tag().map(Some) } else { Ok(None) }
    }

    pub(crate) fn identity(&mut self) -> Result<ProcessIdentity, ProtocolError> {
        let (pid, started_ticks) = (self.u32("pid")?, self.u64("started_ticks")?);
        let boot = BootId::from_bytes(self.array("boot")?);
        ProcessIdentity::from_parts(pid, started_ticks, boot).ok_or(ProtocolError::Field("pid"))
    }

    pub(crate) fn spawn(&mut self) -> Result<Spawn, ProtocolError> {
        Ok(Spawn {
            label: self.blob("label")?.into(),
            name: self.text("name")?,
            program: self.os_text("program")?,
            args: self.list("args", |fields| fields.os_text("args"))?,
            env: self.list("env", |fields| Ok((fields.os_text("env")?, fields.os_text("env")?)))?,
            cwd: match self.flag("cwd")? {
                true => Some(PathBuf::from(self.os_text("cwd")?)),
                false => None,
            },
            marker: self.text("marker")?,
        })
    }

    pub(crate) fn welcoming(&mut self) -> Result<Welcoming, ProtocolError> {
        let keeper = self.identity()?;
        let worker_number = self.u64("worker_number")?;
        let listeners = self.list("listeners", |fields| fields.text("listeners"))?;
        if listeners.len() > LISTENERS_MAX {
            return Err(ProtocolError::Field("listeners"));
        }
        let keeper_version = self.text("keeper_version")?;
        let handover = self.handover()?;
        Ok(Welcoming { keeper, worker_number, listeners, keeper_version, handover, settings: self.rest() })
    }

    pub(crate) fn handover(&mut self) -> Result<Option<Handover>, ProtocolError> {
        if !self.flag("handover")? {
            return Ok(None);
        }
        Ok(Some(Handover {
            outcome: HandoverOutcome::from_code(self.byte("outcome")?).ok_or(ProtocolError::Field("outcome"))?,
            upgrade: self.flag("upgrade")?,
            at_unix_ms: self.u64("at")?,
            from_version: self.text("from_version")?,
            to_version: self.text("to_version")?,
            reason: self.text("reason")?,
        }))
    }

    /// What was read of a connection's next request: all that is left, within its bound.
    pub(crate) fn connection_read(&mut self) -> Result<Bytes, ProtocolError> {
        match self.rest() {
            read if read.len() <= CONNECTION_READ_BYTES_MAX => Ok(read),
            _ => Err(ProtocolError::Field("read")),
        }
    }

    pub(crate) fn holding(&mut self) -> Result<Holding, ProtocolError> {
        Ok(Holding {
            child: self.child()?,
            identity: self.identity()?,
            spawned_at_unix_ms: self.u64("spawned_at")?,
            frames_accepted: self.u64("frames_accepted")?,
            frames_written: self.u64("frames_written")?,
            queued_bytes: self.u64("queued_bytes")?,
            open: self.list("open", Self::tag)?,
            label: self.rest(),
        })
    }

    pub(crate) fn exit(&mut self) -> Result<Exit, ProtocolError> {
        Ok(Exit {
            code: self.number("code")?,
            signal: self.number("signal")?,
            frames_written: self.u64("frames_written")?,
            frame_partly_written: self.flag("frame_partly_written")?,
            stderr_tail: self.rest(),
        })
    }

    pub(crate) fn rest(&mut self) -> Bytes {
        std::mem::take(&mut self.0)
    }

    pub(crate) fn end(self) -> Result<(), ProtocolError> {
        match self.0.len() {
            0 => Ok(()),
            left => Err(ProtocolError::Trailing(left)),
        }
    }
}
