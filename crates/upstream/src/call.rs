//! A call to a server, and its answer.

use std::fmt;

use bytes::Bytes;
use mainstay_core::wire::method::Method;

use crate::bridge::BridgeStream;
use crate::child::{ChildStream, Receipt};
use crate::failure::Failure;
use crate::http::HttpStream;

/// One request for a server.
#[derive(Clone)]
pub struct Call {
    /// The raw JSON of the id in `message`: a [`RoutedId`](mainstay_core::call::RoutedId), encoded.
    pub id: Bytes,
    /// The complete request; id and progress token are those of this side already.
    pub message: Bytes,
    /// Its method.
    pub method: Method,
    /// The tool's name, for `tools/call`.
    pub name: Option<Box<str>>,
}

impl fmt::Debug for Call {
    /// Without what it says.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Call").field("method", &self.method).field("name", &self.name).finish_non_exhaustive()
    }
}

/// What came back, as far as it has come.
#[derive(Debug)]
pub enum Answer {
    /// The JSON-RPC response, and nothing came before it.
    Whole(Bytes),
    /// Messages that belong to the call, and then its response.
    Stream(AnswerStream),
}

/// A message that belongs to a call.
#[derive(Clone, PartialEq, Eq)]
pub enum Incoming {
    /// A notification or a request of the server.
    Message(Bytes),
    /// Nothing for the client, but the server's own stream has got on: see [`AnswerStream::position`].
    Reached,
    /// The response: the last one.
    Response(Bytes),
}

/// Where the server's own stream of an answer stands.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Position<'a> {
    /// At the frame of this number, of those that the child has written.
    Frame(u64),
    /// At the event of this id. A secret of the session: by it, [`Link::resume`](crate::Link::resume) goes on with the
    /// call in a later worker (R4).
    EventId(&'a str),
}

impl fmt::Debug for Position<'_> {
    /// Without the id.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Frame(number) => write!(f, "Frame({number})"),
            Self::EventId(_) => f.write_str("EventId(…)"),
        }
    }
}

impl fmt::Debug for Incoming {
    /// Without what it says.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Message(bytes) => write!(f, "Message({} bytes)", bytes.len()),
            Self::Reached => f.write_str("Reached"),
            Self::Response(bytes) => write!(f, "Response({} bytes)", bytes.len()),
        }
    }
}

/// The rest of an answer. Dropping it abandons the call: what still comes for it is thrown away.
pub struct AnswerStream(pub(crate) Way);

pub(crate) enum Way {
    Http(Box<HttpStream>),
    Child(Box<ChildStream>),
    Bridge(Box<BridgeStream>),
}

impl AnswerStream {
    /// The next message. After the response, and after a failure, every further one is [`Failure::Ended`].
    ///
    /// Cancel-safe: nothing is lost and nothing is sent twice if the future is dropped.
    ///
    /// # Errors
    /// What became of the call; see [`Failure::outcome`].
    pub async fn next(&mut self) -> Result<Incoming, Failure> {
        match &mut self.0 {
            Way::Http(stream) => stream.next().await,
            Way::Child(stream) => stream.next().await,
            Way::Bridge(stream) => stream.next().await,
        }
    }

    /// The receipt of the message that came last, if that is a question of a child. Dropped, or left here until the next
    /// message comes, it says that the question is dealt with.
    pub fn take_receipt(&mut self) -> Option<Receipt> {
        match &mut self.0 {
            Way::Http(_) | Way::Bridge(_) => None,
            Way::Child(stream) => stream.take_receipt(),
        }
    }

    /// Where the server's own stream stands with the message that came last, if that can be told. May change with each.
    pub fn position(&self) -> Option<Position<'_>> {
        match &self.0 {
            Way::Http(stream) => stream.last_event_id().map(Position::EventId),
            Way::Child(stream) => stream.frame().map(Position::Frame),
            Way::Bridge(_) => None,
        }
    }
}

impl fmt::Debug for AnswerStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AnswerStream(…)")
    }
}
