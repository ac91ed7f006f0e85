//! A call to a server, and its answer.

use std::fmt;

use bytes::Bytes;
use mainstay_core::wire::method::Method;

use crate::child::ChildStream;
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
    /// The response: the last one.
    Response(Bytes),
}

impl fmt::Debug for Incoming {
    /// Without what it says.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Message(bytes) => write!(f, "Message({} bytes)", bytes.len()),
            Self::Response(bytes) => write!(f, "Response({} bytes)", bytes.len()),
        }
    }
}

/// The rest of an answer. Dropping it abandons the call: what still comes for it is thrown away.
pub struct AnswerStream(pub(crate) Way);

pub(crate) enum Way {
    Http(Box<HttpStream>),
    Child(Box<ChildStream>),
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
        }
    }

    /// The server's own cursor of this stream, if it gave one: by it, [`Link::resume`](crate::Link::resume) goes on
    /// with the call in a later worker (R4). A secret of the session; may change with every message.
    pub fn last_event_id(&self) -> Option<&str> {
        match &self.0 {
            Way::Http(stream) => stream.last_event_id(),
            Way::Child(_) => None,
        }
    }
}

impl fmt::Debug for AnswerStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AnswerStream(…)")
    }
}
