//! A call whose response is a stream, and how a stream ends.

use std::fmt;

use bytes::Bytes;
use mainstay_core::call::StreamId;
use mainstay_core::id::{Epoch, ServerName};
use mainstay_core::time::Timestamp;

use super::body::{Kind, Reader, Writer};
use super::event::Source;

/// A call that is answered on a stream. The stream's id is the one under which it went to its server.
#[derive(Clone, PartialEq, Eq)]
pub struct Call {
    /// The server that it went to.
    pub server: ServerName,
    /// Its method.
    pub method: Box<str>,
    /// The tool's or prompt's name, or the resource's URI, where it has one.
    pub name: Option<Box<str>>,
    /// The client's own id, raw JSON; of a batch the array of them.
    pub request: Bytes,
    /// When it was made.
    pub started_at: Timestamp,
}

impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Call").field("server", &self.server).field("method", &self.method).finish_non_exhaustive()
    }
}

impl Call {
    /// The body of its row, to be sealed.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut body = Writer::new(Kind::Call, self.request.len());
        body.bytes(self.server.as_str().as_bytes());
        body.bytes(self.method.as_bytes());
        body.option(self.name.as_deref());
        body.bytes(&self.request);
        body.time(self.started_at);
        body.done()
    }

    /// The call whose row has this body.
    pub(super) fn decode(body: Vec<u8>) -> Option<Self> {
        Reader::whole(Kind::Call, body, |body| {
            Some(Self {
                server: ServerName::parse(&body.text()?)?,
                method: body.text()?,
                name: body.option()?,
                request: body.bytes()?,
                started_at: body.time()?,
            })
        })
    }
}

/// How a stream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Ending {
    /// With the response.
    Answered,
    /// Without a response: it was cancelled, had nothing to answer, or is answered elsewhere.
    Silent,
}

impl Ending {
    /// Its number in bodies and columns; 0 is none. Frozen.
    pub(super) const fn number(ending: Option<Self>) -> u8 {
        match ending {
            None => 0,
            Some(Self::Answered) => 1,
            Some(Self::Silent) => 3,
        }
    }

    /// The ending of this number, or none.
    pub(super) fn of(number: u8) -> Option<Option<Self>> {
        // An earlier version told calls of unknown outcome apart, of which nobody ever asked.
        let number = if number == UNKNOWN { Self::number(Some(Self::Silent)) } else { number };
        let all = [None, Some(Self::Answered), Some(Self::Silent)];
        all.into_iter().find(|ending| Self::number(*ending) == number)
    }
}

/// Where a stream stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Who may append.
    pub claim: Epoch,
    /// The highest sequence that was ever kept; 0 before the first event.
    pub last_sequence: u64,
    /// How it ended; none while it is open.
    pub ending: Option<Ending>,
}

/// What is known of a stream, apart from its events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamRecord {
    /// Which stream.
    pub stream: StreamId,
    /// The call that it answers; none of a listening stream, and none if it can't be read.
    pub call: Option<Call>,
    /// Who may append.
    pub claim: Epoch,
    /// The highest sequence that was ever kept; 0 before the first event. A client may have seen a higher one, which was
    /// sent though it could not be kept: go on after whichever is higher.
    pub last_sequence: u64,
    /// Up to where a connection has taken it.
    pub delivered: u64,
    /// How it ended; none while it is open.
    pub ending: Option<Ending>,
    /// How far the server's own stream was read: what comes up to here is known already.
    pub source: Option<Source>,
    /// When something of it was last kept, or taken by a client, or its owner changed.
    pub changed_at: Timestamp,
}

/// A number that is not written any more.
const UNKNOWN: u8 = 2;

#[cfg(test)]
mod tests {
    use super::super::suite::{at, hex};
    use super::*;

    fn call() -> Call {
        Call {
            server: ServerName::parse("files").unwrap(),
            method: "tools/call".into(),
            name: Some("read".into()),
            request: Bytes::from_static(b"\"a\""),
            started_at: at(0),
        }
    }

    #[test]
    fn the_bytes_of_a_call_are_frozen() {
        assert_eq!(
            hex(&call().encode()),
            "01010000000566696c65730000000a746f6f6c732f63616c6c01000000047265616400000003226122\
             0000018bcfe56800"
        );
    }

    #[test]
    fn the_numbers_of_endings_are_frozen() {
        let numbers =
            [None, Some(Ending::Answered), Some(Ending::Silent)].map(|ending| (Ending::number(ending), ending));
        assert_eq!(numbers.map(|(number, _)| number), [0, 1, 3]);
        assert!(numbers.into_iter().all(|(number, ending)| Ending::of(number) == Some(ending)));
        assert_eq!((Ending::of(2), Ending::of(4)), (Some(Some(Ending::Silent)), None));
    }

    #[test]
    fn a_call_reads_back_and_nothing_else_does() {
        for call in [call(), Call { name: None, request: Bytes::new(), ..call() }] {
            let body = call.encode();
            assert_eq!(Call::decode(body.clone()), Some(call));
            (0..body.len()).for_each(|length| assert_eq!(Call::decode(body[..length].to_vec()), None));
            assert_eq!(Call::decode([body, vec![0]].concat()), None);
        }
    }
}
