//! An event of a stream.

use std::fmt;

use bytes::Bytes;
use mainstay_core::time::Timestamp;

use super::body::{Kind, Reader, Writer};
use super::call::Ending;

/// A message on its way to a client.
#[derive(Clone, PartialEq, Eq)]
pub struct Event {
    /// Its place in the stream, from 1 on.
    pub sequence: u64,
    /// How the stream ends with it, if it does.
    pub ending: Option<Ending>,
    /// Whether it may go when there is no room.
    pub weight: Weight,
    /// The message as the client gets it.
    pub message: Bytes,
    /// What of the server it came from.
    pub source: Option<Source>,
    /// When it was appended.
    pub at: Timestamp,
}

impl Event {
    /// How many bytes of the queue its message and its source take.
    pub(super) fn weight_bytes(&self) -> usize {
        self.message.len() + self.source.as_ref().map_or(0, Source::text_bytes)
    }

    /// The body of its row but for the sequence, which it is bound to, as parts that follow each other: a large message is
    /// not copied. To be sealed.
    pub(super) fn parts(&self) -> (Vec<u8>, &[u8]) {
        let mut body = Writer::new(Kind::Event, 0);
        body.byte(Ending::number(self.ending));
        body.byte(self.weight.number());
        body.time(self.at);
        Source::write(self.source.as_ref(), &mut body);
        body.length(&self.message);
        (body.done(), &self.message)
    }

    /// The event of `sequence` whose row has this body.
    pub(super) fn decode(sequence: u64, body: Vec<u8>) -> Option<Self> {
        Reader::whole(Kind::Event, body, |body| {
            Some(Self {
                sequence,
                ending: Ending::of(body.byte()?)?,
                weight: Weight::of(body.byte()?)?,
                at: body.time()?,
                source: Source::read(body)?,
                message: body.bytes()?,
            })
        })
    }
}

/// Payloads stay out of logs.
impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Event");
        shown.field("sequence", &self.sequence).field("ending", &self.ending).field("weight", &self.weight);
        shown.field("bytes", &self.message.len()).field("source", &self.source).finish_non_exhaustive()
    }
}

/// Whether an event may go when its stream has no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Weight {
    /// It tells how things stand; a later one tells more.
    Passing,
    /// Somebody waits for it: a response, or a question of the server.
    Essential,
}

impl Weight {
    /// Its number in bodies and columns. Frozen.
    pub(super) const fn number(self) -> u8 {
        match self {
            Self::Passing => 0,
            Self::Essential => 1,
        }
    }

    fn of(number: u8) -> Option<Self> {
        [Self::Passing, Self::Essential].into_iter().find(|weight| weight.number() == number)
    }
}

/// What of a server something came from. What comes again, because nobody had said that it arrived, is known by it.
#[derive(Clone, PartialEq, Eq)]
pub enum Source {
    /// The frame of this number, which a child wrote. Numbers rise.
    Frame(u64),
    /// The event of this id, on a stream of an HTTP server.
    EventId(Box<str>),
}

impl Source {
    /// How long its text is, if it has one.
    pub(super) fn text_bytes(&self) -> usize {
        match self {
            Self::Frame(_) => 0,
            Self::EventId(id) => id.len(),
        }
    }

    /// The body of a stream's source alone, to be sealed.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut body = Writer::new(Kind::Source, 0);
        Self::write(Some(self), &mut body);
        body.done()
    }

    /// The source whose body this is.
    pub(super) fn decode(body: Vec<u8>) -> Option<Self> {
        Reader::whole(Kind::Source, body, Self::read)?
    }

    fn write(source: Option<&Self>, body: &mut Writer) {
        match source {
            None => body.byte(0),
            Some(Self::Frame(number)) => {
                body.byte(1);
                body.number(*number);
            }
            Some(Self::EventId(id)) => {
                body.byte(2);
                body.bytes(id.as_bytes());
            }
        }
    }

    fn read(body: &mut Reader) -> Option<Option<Self>> {
        match body.byte()? {
            0 => Some(None),
            1 => Some(Some(Self::Frame(body.number()?))),
            2 => Some(Some(Self::EventId(body.text()?))),
            _ => None,
        }
    }
}

/// A server's event ids are its own affair: they may hold what nobody else should see.
impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Frame(number) => f.debug_tuple("Frame").field(number).finish(),
            Self::EventId(_) => f.write_str("EventId(…)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::suite::{at, hex};
    use super::*;

    fn body(event: &Event) -> Vec<u8> {
        let (head, message) = event.parts();
        [&head, message].concat()
    }

    fn event(source: Option<Source>) -> Event {
        let message = Bytes::from_static(b"{}");
        Event { sequence: 7, ending: Some(Ending::Answered), weight: Weight::Essential, message, source, at: at(0) }
    }

    #[test]
    fn the_bytes_of_an_event_are_frozen() {
        for (source, bytes) in [
            (None, "020101010000018bcfe5680000000000027b7d"),
            (Some(Source::Frame(9)), "020101010000018bcfe56800010000000000000009000000027b7d"),
            (
                Some(Source::EventId("e1".into())),
                "020101010000018bcfe568000200000002653100000002\
                                                  7b7d",
            ),
        ] {
            assert_eq!(hex(&body(&event(source))), bytes);
        }
        assert_eq!(hex(&Source::Frame(9).encode()), "0401010000000000000009");
    }

    #[test]
    fn an_event_reads_back_and_nothing_else_does() {
        for source in [None, Some(Source::Frame(u64::MAX)), Some(Source::EventId("é".into()))] {
            for (ending, weight) in [
                (None, Weight::Passing),
                (Some(Ending::Answered), Weight::Essential),
                (Some(Ending::Silent), Weight::Passing),
            ] {
                let event = Event { ending, weight, ..event(source.clone()) };
                let body = body(&event);
                assert_eq!(Event::decode(7, body.clone()), Some(event));
                (0..body.len()).for_each(|length| assert_eq!(Event::decode(7, body[..length].to_vec()), None));
                assert_eq!(Event::decode(7, [body.clone(), vec![0]].concat()), None);
                assert_eq!(Event::decode(7, [vec![2, 9], body[2..].to_vec()].concat()), None, "a later version");
            }
            let Some(source) = source else { continue };
            assert_eq!(Source::decode(source.encode()), Some(source));
        }
    }

    #[test]
    fn i6_neither_messages_nor_a_servers_event_ids_are_shown() {
        let event = event(Some(Source::EventId("canary-1".into())));
        let shown = format!("{event:?} {:?}", Event { message: Bytes::from_static(b"canary-2"), ..event.clone() });
        assert!(!shown.contains("canary"), "{shown}");
    }
}
