//! A call whose response is a stream, and how a stream ends.

use std::fmt;

use bytes::Bytes;
use mainstay_core::call::StreamId;
use mainstay_core::id::{Epoch, ServerName};
use mainstay_core::time::Timestamp;

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

/// How a stream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Ending {
    /// With the response.
    Answered,
    /// With word that the outcome of its call is unknown (R4).
    Unknown,
    /// Without a response: it was cancelled, or had nothing to answer.
    Silent,
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
}
