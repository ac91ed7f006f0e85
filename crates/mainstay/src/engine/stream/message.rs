//! What goes on a stream.

use std::sync::Arc;

use bytes::Bytes;
use mainstay_store::journal::{Question, Source, Weight};
use mainstay_upstream::Receipt;
use parking_lot::Mutex;

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
    /// Holds the question where it came from until it is durable.
    pub custody: Option<Custody>,
}

/// Leaves a question of a child with the keeper, which gives it to the next worker if this one dies, until it is
/// [let go](Self::let_go) or nobody holds this any more. Whoever asks holds it until the question is answered, the stream
/// that it is on until it is durable.
#[derive(Clone)]
pub struct Custody(Arc<Mutex<Option<Receipt>>>);

impl Custody {
    /// Of the question whose receipt it is.
    pub fn of(receipt: Receipt) -> Self {
        Self(Arc::new(Mutex::new(Some(receipt))))
    }

    /// The question is durable: nobody need be given it again.
    pub fn let_go(&self) {
        let receipt = self.0.lock().take();
        // Outside of the lock.
        drop(receipt);
    }
}

impl Message {
    /// One that tells how things stand.
    pub fn passing(bytes: impl Into<Bytes>) -> Self {
        Self { bytes: bytes.into(), weight: Weight::Passing, source: None, question: None, custody: None }
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
