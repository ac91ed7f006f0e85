//! The server's questions to the client: sampling, elicitation, roots (R6).
//!
//! A question is durable with the event by which it goes out, and is answered once over all workers: by the client, or by
//! an error in its place at the deadline. An answer is on record before it is forwarded, and until then: whoever comes
//! after a worker that died in between forwards it, to the instance that asked and no other.

mod forwarding;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::call::RoutedId;
use mainstay_core::code::Code;
use mainstay_core::wire::envelope::{Envelope, error_message, splice};
use mainstay_store::journal::{Answer, Answered, Asked, Question};
use mainstay_upstream::Receipt;

pub(crate) use self::forwarding::Forwarding;
use crate::engine::Engine;
use crate::engine::listen::{forward, shortly};
use crate::engine::live::{Live, Open};
use crate::engine::stream::{Custody, Message, RETRY_MS};
use crate::runtime::spawn;

impl Engine {
    /// A question of the server: noted, dressed, and answered with an error if the client stays silent. `None` for one
    /// that the client was asked already, or can't be asked. What `receipt` is of stays with its child until it is durable
    /// or answered.
    pub(super) fn question(
        self: &Arc<Self>,
        live: &Arc<Live>,
        message: &Bytes,
        envelope: &Envelope,
        receipt: Option<Receipt>,
    ) -> Option<Message> {
        let span = envelope.id.clone()?;
        let original = message.slice(span.clone());
        if live.was_asked_earlier(&original) {
            return None;
        }
        let (asked, asked_at) = (self.next_streams(1), self.now());
        let question = Question { asked, original: original.clone(), asked_at, deadline: asked_at.plus(QUESTION_MAX) };
        let custody = receipt.map(Custody::of);
        if live.ask(question.clone(), custody.clone()).is_err() {
            let declined = declined(&original, "too many questions to this client are open");
            let live = Arc::clone(live);
            spawn(async move { forward(&live, declined).await });
            return None;
        }
        let dressed = RoutedId { stream: asked, original }.encode();
        let (engine, waiting) = (Arc::clone(self), Arc::clone(live));
        spawn(async move {
            tokio::select! {
                () = tokio::time::sleep(QUESTION_MAX) => {}
                () = waiting.ended.wait() => return,
            }
            if let Some(Open { question, custody }) = waiting.answered(asked) {
                let answer = declined(&question.original, UNANSWERED);
                engine.take_answer(&waiting, (asked, question.asked_at), answer, custody).await;
            }
        });
        Some(Message { question: Some(question), custody, ..Message::essential(splice(message, &[(span, &dressed)])) })
    }

    /// Puts a question of a child that still runs calls of an earlier worker on the stream of the newest of these, to which
    /// its client comes back; on the listening stream only if nothing leads to such a stream. Until then it stays with the
    /// child.
    pub(super) async fn ask_apart(self: &Arc<Self>, live: &Arc<Live>, message: Message) {
        let known = || live.unfinished_before(self.epoch.counter);
        let mut open = known();
        if open.is_none() {
            open = self.newest_open(live).await.filter(|stream| !stream.is_finished());
        }
        if open.is_none() {
            let is_clear = || known().is_some() || !live.link.runs_earlier_calls() || live.ended.is_set();
            if !self.until(COME_BACK_MAX, is_clear).await {
                // Where nobody reads it would only be further from its client.
                self.until(QUESTION_MAX, || is_clear() || live.is_read()).await;
            }
            open = known();
        }
        open.as_ref().unwrap_or(&live.listen).push(message);
    }

    /// A client's answer to a question of the server. One that nobody asked, or that was answered before, is dropped.
    pub async fn answer(self: &Arc<Self>, live: &Arc<Live>, message: &Bytes, envelope: &Envelope) {
        let Some(span) = envelope.id.clone() else { return };
        let Some(id) = RoutedId::decode(&message[span.clone()]) else { return };
        // A question of an earlier worker is not in memory.
        let earlier = id.stream.epoch < self.epoch.counter;
        let (original, asked_at, custody) = if earlier {
            (id.original, live.asked_earlier_at(id.stream).unwrap_or_else(|| self.now()), None)
        } else {
            let Some(Open { question, custody }) = live.answered(id.stream) else { return };
            (question.original, question.asked_at, custody)
        };
        let answer = splice(message, &[(span, &original)]).into();
        let (engine, live) = (Arc::clone(self), Arc::clone(live));
        // From here on nobody else has it: it must not go with the connection that it came by.
        shortly(async move { engine.take_answer(&live, (id.stream, asked_at), answer, custody).await }).await;
    }

    /// Answers the questions of earlier workers whose time is over with an error in the client's place. A child's question
    /// is nobody's any more unless the call that it belongs to still runs.
    pub(crate) async fn decline_overdue(self: &Arc<Self>) {
        let due = match self.journal.open_questions(self.now(), QUESTIONS_PASS_MAX).await {
            Ok(due) => due,
            Err(error) => return tracing::warn!(error = %error, "open questions can't be read"),
        };
        for Asked { session, question, .. } in due {
            if question.asked.epoch >= self.epoch.counter {
                continue;
            }
            let Ok(live) = self.load(session).await else { continue };
            self.decline(&live, &question).await;
        }
    }

    async fn decline(self: &Arc<Self>, live: &Arc<Live>, question: &Question) {
        // A worker that asked and lives knows itself when that is due.
        if self.asker_that_leaves(live, question.asked).is_some() {
            return;
        }
        let Some(in_hand) = self.take_in_hand(live, question.asked) else { return };
        let message = declined(&question.original, UNANSWERED);
        let answer = Answer { message: message.clone(), by: self.epoch.counter, at: self.now() };
        let Ok(Answered::First) = self.journal.answered(live.key, question.asked, answer).await else { return };
        if live.server.is_http() || live.link.has_running_calls() {
            self.forward_answer(in_hand, live, (question.asked, question.asked_at), message).await;
        } else if let Err(error) = self.journal.forwarded(live.key, question.asked).await {
            tracing::debug!(session = %live.key.session_ref(), error = %error, "a question can't be closed");
        }
    }
}

/// An error in the client's place.
fn declined(original: &[u8], why: &str) -> Bytes {
    error_message(Some(original), Code::Unavailable.json_rpc(), why, None).into()
}

/// What a server is told whose question was not answered.
const UNANSWERED: &str = "the client did not answer in time";
/// How many questions, and answers, are dealt with at a time.
const QUESTIONS_PASS_MAX: usize = 256;
/// How long a client is waited for whose stream nobody but itself knows: twice as long as it was told (`retry:`).
const COME_BACK_MAX: Duration = Duration::from_millis(2 * RETRY_MS);
/// How long a server's question may stay open: long enough for a person, not for ever.
const QUESTION_MAX: Duration = Duration::from_mins(10);
