//! A call of a conversation, and who sees to it that it ends: its client, or, if that goes away, nobody else.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;
use mainstay_core::call::StreamId;
use mainstay_core::wire::envelope::{Envelope, Kind, error_message, notification_message, scan};
use mainstay_core::wire::modern as era;

use super::rounds::{self, Parked, Pending};
use crate::engine::Engine;
use crate::engine::live::Live;
use crate::engine::stream::Reader;
use crate::runtime::spawn;

/// A call of the conversation, and who sees to it that it ends.
pub(super) struct Passage {
    pub(super) engine: Arc<Engine>,
    pub(super) live: Arc<Live>,
    /// The raw id under which the call runs.
    id: Bytes,
    pub(super) reader: Option<Reader>,
    /// Up to which event its stream was read.
    pub(super) after: u64,
    /// Questions on its stream that have their answers.
    pub(super) answered: BTreeSet<StreamId>,
    /// Whether the response is still to come.
    pub(super) is_open: bool,
}

impl Passage {
    pub(super) fn new(engine: &Arc<Engine>, live: &Arc<Live>, id: Bytes) -> Self {
        let (engine, live, answered) = (Arc::clone(engine), Arc::clone(live), BTreeSet::new());
        Self { engine, live, id, reader: None, after: 0, answered, is_open: true }
    }

    /// The same call, whose stream is read on behind the event `after`; `answered` are the questions there that need no
    /// answer any more.
    pub(super) fn reading(self, reader: Reader, after: u64, answered: BTreeSet<StreamId>) -> Self {
        let mut passage = self;
        passage.reader = Some(reader);
        passage.after = after;
        passage.answered = answered;
        passage
    }

    /// Leaves the call waiting for its client, who is asked `questions`.
    pub(super) fn park(&mut self, questions: &[Pending]) -> Parked {
        self.is_open = false;
        let stream = self.reader.as_ref().map_or(self.engine.listen_stream(), Reader::stream_id);
        let parked = Parked::new(self.live.key, (stream, &self.id), self.after, questions);
        if let Some(reader) = self.reader.take() {
            rounds::park(&self.engine, &self.live, self.id.clone(), reader);
        }
        parked
    }

    /// Leaves the call to go on by itself: nobody reads it, and nobody's going away cancels it.
    pub(super) fn leave_to_itself(&mut self) {
        self.is_open = false;
        if let Some(reader) = self.reader.take() {
            reader.into_stream().untake();
        }
    }

    /// The raw id under which the call runs.
    pub(super) fn id(&self) -> &Bytes {
        &self.id
    }

    /// Answers a question of the server that nobody can be asked.
    pub(super) fn decline(&self, message: &Bytes, envelope: &Envelope) {
        decline(&self.engine, &self.live, message, envelope);
    }
}

impl Drop for Passage {
    fn drop(&mut self) {
        if self.is_open {
            let (engine, live) = (Arc::clone(&self.engine), Arc::clone(&self.live));
            let (id, reader) = (std::mem::take(&mut self.id), self.reader.take());
            spawn(async move { abandon(&engine, &live, &id, reader).await });
        }
    }
}

/// Answers a question of the server that nobody can be asked: at once, so that the server does not wait.
pub(super) fn decline(engine: &Arc<Engine>, live: &Arc<Live>, message: &Bytes, envelope: &Envelope) {
    let Some(span) = envelope.id.clone() else { return };
    let text = "the client can't be asked this";
    let answer = Bytes::from(error_message(Some(&message[span]), era::METHOD_NOT_FOUND, text, None));
    let (engine, live) = (Arc::clone(engine), Arc::clone(live));
    spawn(async move {
        if let Ok(envelope) = scan(&answer) {
            engine.answer(&live, &answer, &envelope).await;
        }
    });
}

/// Cancels a call at the server, and reads what still comes of it for nobody.
pub(super) async fn abandon(engine: &Arc<Engine>, live: &Arc<Live>, id: &[u8], reader: Option<Reader>) {
    // A program, and what becomes of its calls, is the next worker's.
    if engine.has_left() && !live.server.is_http() {
        return;
    }
    let params = [b"{\"requestId\":".as_slice(), id, b"}"].concat();
    let message = Bytes::from(notification_message("notifications/cancelled", Some(&params)));
    if let Ok(envelope) = scan(&message) {
        engine.notification(live, &message, &envelope).await;
    }
    let Some(mut reader) = reader else { return };
    // It ends: with the response, or once the call is given up.
    while let Some((_, message)) = reader.next_message().await {
        if let Ok(envelope) = scan(&message)
            && envelope.kind == Kind::Request
        {
            decline(engine, live, &message, &envelope);
        }
    }
}
