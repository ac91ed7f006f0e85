//! The bytes of a body before it is sealed: a kind, a version, and the fields one after the other. Integers are
//! big-endian; texts and bytes follow their length in four bytes. The layout of a version is frozen by golden bytes.

use bytes::Bytes;
use mainstay_core::call::StreamId;
use mainstay_core::id::SessionKey;
use mainstay_core::time::Timestamp;

/// What a body holds. Frozen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    Call = 1,
    Event = 2,
    Question = 3,
    Source = 4,
}

/// What the bodies of a stream are bound to.
pub(super) fn stream_key(session: SessionKey, stream: StreamId) -> [u8; 48] {
    let mut key = [0; 48];
    key[..32].copy_from_slice(session.as_bytes());
    key[32..40].copy_from_slice(&stream.epoch.to_be_bytes());
    key[40..].copy_from_slice(&stream.number.to_be_bytes());
    key
}

/// What the body of an event is bound to.
pub(super) fn event_key(session: SessionKey, stream: StreamId, sequence: u64) -> [u8; 56] {
    let mut key = [0; 56];
    key[..48].copy_from_slice(&stream_key(session, stream));
    key[48..].copy_from_slice(&sequence.to_be_bytes());
    key
}

/// A body being written.
pub(super) struct Writer(Vec<u8>);

impl Writer {
    /// With room for `payload_bytes` beside the small fields.
    pub(super) fn new(kind: Kind, payload_bytes: usize) -> Self {
        let mut bytes = Vec::with_capacity(payload_bytes + SMALL_FIELDS_BYTES);
        bytes.extend_from_slice(&[kind as u8, VERSION]);
        Self(bytes)
    }

    pub(super) fn byte(&mut self, byte: u8) {
        self.0.push(byte);
    }

    pub(super) fn number(&mut self, number: u64) {
        self.0.extend_from_slice(&number.to_be_bytes());
    }

    pub(super) fn time(&mut self, at: Timestamp) {
        self.number(at.unix_millis());
    }

    pub(super) fn stream(&mut self, stream: StreamId) {
        self.number(stream.epoch);
        self.number(stream.number);
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.length(bytes);
        self.0.extend_from_slice(bytes);
    }

    /// The length of bytes that are to follow by themselves.
    pub(super) fn length(&mut self, bytes: &[u8]) {
        let length = u32::try_from(bytes.len()).expect("messages, and so their parts, are far below 4 GiB");
        self.0.extend_from_slice(&length.to_be_bytes());
    }

    pub(super) fn option(&mut self, text: Option<&str>) {
        self.byte(u8::from(text.is_some()));
        text.into_iter().for_each(|text| self.bytes(text.as_bytes()));
    }

    pub(super) fn done(self) -> Vec<u8> {
        self.0
    }
}

/// The rest of a body being read. Every read checks the length first, so a length that lies allocates nothing.
pub(super) struct Reader {
    rest: Bytes,
}

impl Reader {
    /// What `read` makes of `body`, if it is one of this kind, of a version that is known, and that is all of it.
    pub(super) fn whole<T>(kind: Kind, body: Vec<u8>, read: impl FnOnce(&mut Self) -> Option<T>) -> Option<T> {
        let mut reader = Self { rest: Bytes::from(body) };
        let known = reader.byte()? == kind as u8 && reader.byte()? == VERSION;
        if !known {
            return None;
        }
        read(&mut reader).filter(|_| reader.rest.is_empty())
    }

    /// A slice of the body; nothing is copied.
    fn take(&mut self, length: usize) -> Option<Bytes> {
        (length <= self.rest.len()).then(|| self.rest.split_to(length))
    }

    pub(super) fn byte(&mut self) -> Option<u8> {
        self.take(1).map(|byte| byte[0])
    }

    pub(super) fn number(&mut self) -> Option<u64> {
        let bytes = self.take(8)?;
        bytes.as_ref().try_into().ok().map(u64::from_be_bytes)
    }

    pub(super) fn time(&mut self) -> Option<Timestamp> {
        self.number().map(Timestamp::from_unix_millis)
    }

    pub(super) fn stream(&mut self) -> Option<StreamId> {
        Some(StreamId { epoch: self.number()?, number: self.number()? })
    }

    pub(super) fn bytes(&mut self) -> Option<Bytes> {
        let length = self.take(4)?;
        let length = length.as_ref().try_into().ok().map(u32::from_be_bytes)?;
        self.take(usize::try_from(length).ok()?)
    }

    pub(super) fn text(&mut self) -> Option<Box<str>> {
        std::str::from_utf8(&self.bytes()?).ok().map(Into::into)
    }

    pub(super) fn option(&mut self) -> Option<Option<Box<str>>> {
        match self.byte()? {
            0 => Some(None),
            1 => self.text().map(Some),
            _ => None,
        }
    }
}

const VERSION: u8 = 1;
/// Room for everything but a message.
const SMALL_FIELDS_BYTES: usize = 128;
