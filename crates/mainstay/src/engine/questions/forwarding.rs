//! Answers on their way to the instance that asked (R6).
//!
//! An answer is forwarded by the worker that the journal names, and in that by one task. That is the worker which asked,
//! for as long as it lives, since the server's session may be a connection of its own; and whoever is in charge once it
//! is gone.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;
use mainstay_core::call::StreamId;
use mainstay_core::id::{Epoch, SessionKey};
use mainstay_core::time::Timestamp;
use mainstay_store::journal::{Answer, Answered, MESSAGE_BYTES_MAX, Unforwarded};
use parking_lot::Mutex;

use super::QUESTIONS_PASS_MAX;
use crate::engine::Engine;
use crate::engine::listen::{SHORTLY, shortly};
use crate::engine::live::Live;
use crate::engine::stream::Custody;
use crate::engine::tally::{Counted, Tally};
use crate::runtime::spawn;

/// The answers that this worker is at.
#[derive(Default)]
pub(crate) struct Forwarding {
    in_hand: Mutex<BTreeSet<(SessionKey, StreamId)>>,
    /// Those for HTTP servers: a worker that leaves stays for them.
    to_http: Tally,
}

impl Forwarding {
    /// How many answers for HTTP servers are taken and not forwarded yet.
    pub(crate) fn to_http(&self) -> usize {
        self.to_http.count()
    }
}

/// One answer is seen to. Dropped, others may look what has become of it.
pub(super) struct InHand {
    engine: Arc<Engine>,
    place: (SessionKey, StreamId),
    _counted: Option<Counted>,
    /// Holds the question with who asked until the answer is there, if the journal does not know it.
    custody: Option<Custody>,
}

impl Drop for InHand {
    fn drop(&mut self) {
        self.engine.forwarding.in_hand.lock().remove(&self.place);
    }
}

impl Engine {
    /// Takes the answer to `asked` in hand; `None` if another task of this worker has it there.
    pub(super) fn take_in_hand(self: &Arc<Self>, live: &Live, asked: StreamId) -> Option<InHand> {
        let place = (live.key, asked);
        if !self.forwarding.in_hand.lock().insert(place) {
            return None;
        }
        let counted = live.server.is_http().then(|| self.forwarding.to_http.enter());
        Some(InHand { engine: Arc::clone(self), place, _counted: counted, custody: None })
    }

    /// The worker that has put the question `asked` to the client of `live`, if that has handed over and still lives: it
    /// alone is sure to reach who asked.
    pub(super) fn asker_that_leaves(&self, live: &Live, asked: StreamId) -> Option<Epoch> {
        let leaver = self.leavers.of(asked.epoch).filter(|_| live.server.is_http())?;
        self.leavers.is_present(leaver).then_some(leaver)
    }

    /// Puts an answer on record. If it is the first it goes to the server: by this worker, or by the one that asked, which
    /// looks for it there.
    pub(super) async fn take_answer(
        self: &Arc<Self>,
        live: &Arc<Live>,
        asked: (StreamId, Timestamp),
        answer: Bytes,
        custody: Option<Custody>,
    ) {
        let Some(mut in_hand) = self.take_in_hand(live, asked.0) else { return };
        in_hand.custody = custody;
        let leaver = self.asker_that_leaves(live, asked.0).filter(|_| answer.len() <= MESSAGE_BYTES_MAX);
        let by = leaver.map_or(self.epoch.counter, |leaver| leaver.counter);
        let noting = self.journal.answered(live.key, asked.0, Answer { message: answer.clone(), by, at: self.now() });
        let noted = match leaver {
            // What the leaver may find there later must not go out from here as well.
            Some(_) => noting.await.ok(),
            None => tokio::time::timeout(SHORTLY, noting).await.ok().and_then(Result::ok),
        };
        let is_first = match noted {
            Some(Answered::First) => leaver.is_none(),
            Some(Answered::Again) => false,
            // Where the journal does not know, this worker's memory decides.
            Some(Answered::Unasked) | None => live.answered_before(asked.0),
        };
        if is_first {
            self.forward_answer(in_hand, live, asked, answer).await;
        }
    }

    /// Passes an answer on to the instance that asked, and notes that it did.
    pub(super) async fn forward_answer(
        self: &Arc<Self>,
        in_hand: InHand,
        live: &Arc<Live>,
        asked: (StreamId, Timestamp),
        answer: Bytes,
    ) {
        let (engine, live) = (Arc::clone(self), Arc::clone(live));
        shortly(async move {
            let _in_hand = in_hand;
            if let Err(failure) = live.link.answer(asked, answer).await {
                tracing::debug!(session = %live.key.session_ref(), failure = %failure, "an answer did not reach the server");
                // A child is the next worker's once this one has left, and so is the answer.
                if engine.has_left() && !live.server.is_http() {
                    return;
                }
            }
            match engine.journal.forwarded(live.key, asked.0).await {
                Ok(()) => live.link.settle_answer(asked.0),
                Err(error) => {
                    tracing::debug!(session = %live.key.session_ref(), error = %error, "it can't be noted that an answer was forwarded");
                }
            }
        })
        .await;
    }

    /// Forwards what workers before this one had taken of answers and may not have forwarded, but for those that are there
    /// to do it.
    pub(crate) async fn forward_left(self: &Arc<Self>) {
        let left = match self.journal.unforwarded(0..self.epoch.counter, QUESTIONS_PASS_MAX).await {
            Ok(left) => left,
            Err(error) => return tracing::warn!(error = %error, "answers that are to be forwarded can't be read"),
        };
        for left in left {
            let Ok(live) = self.load(left.session).await else { continue };
            let other = self.leavers.of(left.by).filter(|_| live.server.is_http());
            if !other.is_some_and(|other| self.leavers.is_present(other)) {
                self.forward_noted(&live, left);
            }
        }
    }

    /// Forwards what a successor has taken of answers to questions of this worker, which has handed over.
    pub(crate) async fn forward_own(self: &Arc<Self>) {
        let own = self.epoch.counter;
        let left = match self.journal.unforwarded(own..own + 1, QUESTIONS_PASS_MAX).await {
            Ok(left) => left,
            Err(error) => return tracing::debug!(error = %error, "answers that are to be forwarded can't be read yet"),
        };
        for left in left {
            let live = self.live.get(&left.session).map(|live| Arc::clone(&live));
            match live.filter(|live| live.server.is_http()) {
                Some(live) => {
                    // Nobody need answer it in the client's place any more.
                    let _question = live.answered(left.question.asked);
                    self.forward_noted(&live, left);
                }
                None => {
                    if let Err(error) = self.journal.give_back(left.session, left.question.asked, own).await {
                        tracing::debug!(session = %left.session.session_ref(), error = %error, "an answer can't be given back yet");
                    }
                }
            }
        }
    }

    /// Forwards an answer that is on record, unless somebody else does or has. Beside the others: a server that hangs must
    /// not hold them up.
    fn forward_noted(self: &Arc<Self>, live: &Arc<Live>, Unforwarded { session, question, message, .. }: Unforwarded) {
        let Some(in_hand) = self.take_in_hand(live, question.asked) else { return };
        let (engine, live) = (Arc::clone(self), Arc::clone(live));
        spawn(async move {
            // Only now: it may have been forwarded since it was read.
            if matches!(engine.journal.forward(session, question.asked, engine.epoch.counter).await, Ok(true)) {
                engine.forward_answer(in_hand, &live, (question.asked, question.asked_at), message).await;
            }
        });
    }
}
