//! A question of a server to a client: sampling, elicitation, roots (R6).

use std::fmt;

use bytes::Bytes;
use mainstay_core::call::StreamId;
use mainstay_core::id::SessionKey;
use mainstay_core::time::Timestamp;

/// A question and where its answer leads.
#[derive(Clone, PartialEq, Eq)]
pub struct Question {
    /// The id under which the client was asked.
    pub asked: StreamId,
    /// The server's own id, raw JSON.
    pub original: Bytes,
    /// When it was asked.
    pub asked_at: Timestamp,
    /// When the server gets an error in the client's place.
    pub deadline: Timestamp,
}

impl fmt::Debug for Question {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Question").field("asked", &self.asked).field("deadline", &self.deadline).finish_non_exhaustive()
    }
}

/// A question as it is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// Who was asked.
    pub session: SessionKey,
    /// The stream that it went out on.
    pub on: StreamId,
    /// What was asked.
    pub question: Question,
    /// When it was answered, by the client or in its place; none while it is open.
    pub answered_at: Option<Timestamp>,
}

/// What becomes of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answered {
    /// It is the first: it goes to the server.
    First,
    /// The question was answered before.
    Again,
    /// No such question is kept: it was never asked, or could not be kept, or is long past.
    Unasked,
}
