//! What goes on a stream.

use bytes::Bytes;
use mainstay_store::journal::{Question, Source, Weight};

/// A message on its way to the client.
pub struct Message {
    /// The message as the client gets it.
    pub bytes: Bytes,
    /// Whether it may go when its stream is full.
    pub weight: Weight,
    /// What of the server it came from.
    pub source: Option<Source>,
    /// What it asks the client, if it is a question of the server.
    pub question: Option<Question>,
}

impl Message {
    /// One that tells how things stand.
    pub fn passing(bytes: impl Into<Bytes>) -> Self {
        Self { bytes: bytes.into(), weight: Weight::Passing, source: None, question: None }
    }

    /// One that somebody waits for.
    pub fn essential(bytes: impl Into<Bytes>) -> Self {
        Self { weight: Weight::Essential, ..Self::passing(bytes) }
    }

    /// The same with what of the server it came from.
    #[must_use]
    pub fn from_source(self, source: Option<Source>) -> Self {
        Self { source, ..self }
    }
}
