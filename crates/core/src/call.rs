//! The ids by which calls and events find their owner, even after the process that knew them is gone.
//!
//! A client's request goes to its server under a [`RoutedId`], which says both the stream that its answer belongs to
//! and the client's own id. An event goes to the client under an [`EventId`], which says the stream, the place in
//! it and, again, the client's own id. So nothing has to be recorded when a call is dispatched (R1a).

use std::fmt::{self, Write as _};

use bytes::Bytes;

use crate::id::{base64url, from_base64url};
use crate::wire::envelope::unescape;

/// One stream of a session. Numbers are never used twice in an epoch, and epochs never return,
/// so an id is unique over all restarts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId {
    /// The counter of the epoch that opened the stream.
    pub epoch: u64,
    /// Counts up from 1 within the epoch; 0 is the session's listening stream.
    pub number: u64,
}

impl StreamId {
    /// The number of a session's listening (GET) stream.
    pub const LISTEN: u64 = 0;

    /// Whether this is a listening stream.
    pub const fn is_listen(self) -> bool {
        self.number == Self::LISTEN
    }
}

impl fmt::Display for StreamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.epoch, self.number)
    }
}

/// A JSON-RPC id or progress token of one side, dressed so that it is unique on the other side and leads back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutedId {
    /// The stream that what comes back belongs to.
    pub stream: StreamId,
    /// The id or token as its own side spelled it: raw JSON.
    pub original: Bytes,
}

impl RoutedId {
    /// The raw JSON string that stands for this id on the other side.
    pub fn encode(&self) -> Vec<u8> {
        let mut json = Vec::with_capacity(self.original.len() + 24);
        json.extend_from_slice(format!("\"{}.", self.stream).as_bytes());
        for &byte in &self.original {
            if matches!(byte, b'"' | b'\\') {
                json.push(b'\\');
            }
            json.push(byte);
        }
        json.push(b'"');
        json
    }

    /// Reads the raw JSON value `json` back, however its string escapes are spelled by now.
    /// `None` if it was not made by [`encode`](Self::encode).
    pub fn decode(json: &[u8]) -> Option<Self> {
        let text = unescape(json)?;
        let (epoch, rest) = text.split_once('.')?;
        let (number, original) = rest.split_once('.')?;
        let stream = StreamId { epoch: decimal(epoch)?, number: decimal(number)? };
        (!original.is_empty()).then(|| Self { stream, original: Bytes::copy_from_slice(original.as_bytes()) })
    }
}

/// The `id:` of a server-sent event: session tag, stream, place in the stream.
///
/// It also carries the id of the request that the stream answers, if that is short enough, and whether the event was
/// the stream's last. A cursor from an earlier life is thereby enough to tell the client precisely what became of its call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventId {
    /// [`SessionKey::tag`](crate::id::SessionKey::tag) of the session.
    pub tag: u32,
    /// The stream.
    pub stream: StreamId,
    /// Counts up from 0, which is the priming event.
    pub sequence: u64,
    /// Whether the stream ended with this event.
    pub last: bool,
    /// The request that the stream answers: raw JSON, absent on listening streams and for ids above 192 bytes.
    pub request: Option<Bytes>,
}

impl EventId {
    /// The largest request id that is carried, in bytes.
    pub const REQUEST_BYTES_MAX: usize = 192;

    /// The event id written as `text`, if it is one; whose it is remains to be checked.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.splitn(5, '-');
        let tag = parts.next().filter(|tag| tag.len() == 8)?;
        let tag = u32::from_str_radix(tag, 16).ok()?;
        let stream = StreamId { epoch: decimal(parts.next()?)?, number: decimal(parts.next()?)? };
        let place = parts.next()?;
        let (sequence, last) = place.strip_suffix('f').map_or((place, false), |digits| (digits, true));
        let sequence = decimal(sequence)?;
        let request = match parts.next() {
            None => None,
            Some(text) => Some(Bytes::from(from_base64url(text)?)),
        };
        Some(Self { tag, stream, sequence, last, request })
    }
}

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}-{}-{}-{}", self.tag, self.stream.epoch, self.stream.number, self.sequence)?;
        if self.last {
            f.write_char('f')?;
        }
        match &self.request {
            Some(request) if request.len() <= Self::REQUEST_BYTES_MAX => write!(f, "-{}", base64url(request)),
            Some(_) | None => Ok(()),
        }
    }
}

/// A decimal number without sign, leading zero or anything else.
fn decimal(text: &str) -> Option<u64> {
    let canonical = text == "0" || !text.starts_with('0');
    (canonical && text.bytes().all(|byte| byte.is_ascii_digit())).then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stream() -> impl Strategy<Value = StreamId> {
        (any::<u64>(), any::<u64>()).prop_map(|(epoch, number)| StreamId { epoch, number })
    }

    /// Raw JSON of ids: integers of any size, fractions, exponents, strings with every escape.
    fn id_json() -> impl Strategy<Value = Bytes> {
        prop_oneof![
            "-?(0|[1-9][0-9]{0,40})(\\.[0-9]{1,5})?([eE][+-]?[0-9]{1,3})?".prop_map(Bytes::from),
            any::<String>().prop_map(|text| Bytes::from(serde_json::to_vec(&text).expect("strings serialise"))),
            Just(Bytes::from_static(br#""\u00e9\/\ud83d\ude00""#)),
        ]
    }

    proptest! {
        #[test]
        fn r1a_a_routed_id_leads_back(stream in stream(), original in id_json()) {
            let id = RoutedId { stream, original };
            prop_assert_eq!(RoutedId::decode(&id.encode()), Some(id));
        }

        #[test]
        fn r1a_a_routed_id_survives_a_peer_that_escapes_otherwise(stream in stream(), original in id_json()) {
            let id = RoutedId { stream, original };
            let text: String = serde_json::from_slice(&id.encode()).expect("it is a JSON string");
            let escaped: String = text.encode_utf16().map(|unit| format!("\\u{unit:04X}")).collect();
            prop_assert_eq!(RoutedId::decode(format!("\"{escaped}\"").as_bytes()), Some(id));
        }

        #[test]
        fn r1_an_event_id_reads_back(tag: u32, stream in stream(), sequence: u64, last: bool, request in proptest::option::of(id_json())) {
            let request = request.filter(|request| request.len() <= EventId::REQUEST_BYTES_MAX);
            let id = EventId { tag, stream, sequence, last, request };
            let text = id.to_string();
            prop_assert!(text.bytes().all(|byte| (0x21..=0x7e).contains(&byte)));
            prop_assert_eq!(EventId::parse(&text), Some(id));
        }

        #[test]
        fn r2_reading_junk_never_panics(text: String) {
            let _ = EventId::parse(&text);
            let _ = RoutedId::decode(text.as_bytes());
        }
    }

    #[test]
    fn r2_malformed_event_ids_are_none() {
        for bad in ["", "0", "00000000-1-1", "00000000-01-1-1", "00000000-1-1-x", "0000000-1-1-1", "00000000-1-1-1-*"] {
            assert_eq!(EventId::parse(bad), None, "{bad:?}");
        }
    }
}
