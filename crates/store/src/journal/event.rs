//! An event of a stream.

use std::fmt;

use bytes::Bytes;
use mainstay_core::time::Timestamp;

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

/// What of a server something came from. What comes again, because nobody had said that it arrived, is known by it.
#[derive(Clone, PartialEq, Eq)]
pub enum Source {
    /// The frame of this number, which a child wrote. Numbers rise.
    Frame(u64),
    /// The event of this id, on a stream of an HTTP server.
    EventId(Box<str>),
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
