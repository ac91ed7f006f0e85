//! What comes of a request to a modern server, message by message, whichever way it went: the events of a response, or
//! lines of a process that many share.

use bytes::Bytes;

use crate::child::Exchange;
use crate::failure::Failure;
use crate::http::{Events, EventsEnd, message_of};

/// The messages of one request, the answer last. Dropping it closes the request at the server.
pub(crate) enum Feed {
    Http(Box<Events>),
    Child(Box<Exchange>),
}

/// Why there are no more messages.
pub(crate) enum FeedEnd {
    /// The request was lost on the way, or with the server, before the answer. It may have been carried out.
    Broken(Box<str>),
    /// A message was larger than allowed.
    Oversize,
    /// It was not carried out.
    Failed(Failure),
}

impl Feed {
    /// The next message. Cancel-safe.
    pub(crate) async fn next(&mut self) -> Result<Bytes, FeedEnd> {
        match self {
            Self::Http(events) => loop {
                let event = events.next().await.map_err(|end| match end {
                    EventsEnd::Broken(cause) => FeedEnd::Broken(cause),
                    EventsEnd::Oversize => FeedEnd::Oversize,
                })?;
                if let Some(message) = message_of(event) {
                    return Ok(message);
                }
            },
            Self::Child(exchange) => exchange.next().await,
        }
    }

    /// The answer is there: nothing else is waited for.
    pub(crate) fn finish(self) {
        if let Self::Http(events) = self {
            events.finish();
        }
    }
}
