//! A question of a server to a client: sampling, elicitation, roots (R6).

use std::fmt;

use bytes::Bytes;
use mainstay_core::call::StreamId;
use mainstay_core::id::SessionKey;
use mainstay_core::time::Timestamp;

use super::body::{Kind, Reader, Writer};

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

impl Question {
    /// The body of its row but for the id under which it was asked, which it is bound to. To be sealed.
    pub(super) fn encode(&self, on: StreamId) -> Vec<u8> {
        let mut body = Writer::new(Kind::Question, self.original.len());
        body.stream(on);
        body.bytes(&self.original);
        body.time(self.asked_at);
        body.time(self.deadline);
        body.done()
    }

    /// The question `asked` whose row has this body, and the stream that it went out on.
    pub(super) fn decode(asked: StreamId, body: Vec<u8>) -> Option<(StreamId, Self)> {
        Reader::whole(Kind::Question, body, |body| {
            let on = body.stream()?;
            let question = Self { asked, original: body.bytes()?, asked_at: body.time()?, deadline: body.time()? };
            Some((on, question))
        })
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

/// An answer to a question.
#[derive(Clone, PartialEq, Eq)]
pub struct Answer {
    /// What the server is sent: under its own id. One that is too large for the journal is not kept.
    pub message: Bytes,
    /// The epoch of the worker that takes it, and forwards it.
    pub by: u64,
    /// When it came.
    pub at: Timestamp,
}

/// An answer that may not have been forwarded.
#[derive(Clone, PartialEq, Eq)]
pub struct Unforwarded {
    /// Whose it is.
    pub session: SessionKey,
    /// What was asked.
    pub question: Question,
    /// The epoch of the worker that is to forward it, or was; 0 if that is anybody.
    pub by: u64,
    /// What the server is to be sent.
    pub message: Bytes,
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

#[cfg(test)]
mod tests {
    use super::super::suite::{at, hex, stream};
    use super::*;

    #[test]
    fn the_bytes_of_a_question_are_frozen_and_read_back() {
        let original = Bytes::from_static(b"7");
        let question = Question { asked: stream(5), original, asked_at: at(0), deadline: at(1) };
        let body = question.encode(stream(4));
        assert_eq!(
            hex(&body),
            "0301000000000000000300000000000000040000000137\
             0000018bcfe568000000018bcfe56be8"
        );
        assert_eq!(Question::decode(stream(5), body.clone()), Some((stream(4), question)));
        (0..body.len()).for_each(|length| assert_eq!(Question::decode(stream(5), body[..length].to_vec()), None));
        assert_eq!(Question::decode(stream(5), [body, vec![0]].concat()), None);
    }
}
