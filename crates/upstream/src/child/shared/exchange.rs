//! One request at a process that many share, and what comes of it.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use mainstay_core::wire::envelope::{self, Kind};
use tokio::sync::OwnedSemaphorePermit;

use super::sent::{Manner, Sent};
use super::{Sharing, take_back};
use crate::child::end::End;
use crate::child::running::Waiting;
use crate::child::slot::Delivery;
use crate::failure::{Blame, Failure};
use crate::feed::FeedEnd;
use crate::task::spawn;
use crate::upstreams::Upstreams;

/// One request on its way, and the messages that come of it. Dropping it takes the request back at the process.
///
/// A process that ends takes its requests with it. One that it never had goes to the next one, and so does, once, one that
/// may be carried out twice. Who listens goes on listening at the next one, and is told that everything may have changed.
pub(crate) struct Exchange {
    sharing: Sharing,
    sent: Arc<Sent>,
    phase: Phase,
    /// Sent to the next process because this one never had it.
    resent: bool,
    /// Sent twice although it may have been carried out.
    repeated: bool,
    /// Of a request that is listened by: how often the process has said that it listens.
    acknowledged: u32,
    ready: VecDeque<Bytes>,
    place: Option<OwnedSemaphorePermit>,
}

enum Phase {
    /// On its way. Kept here, so that a caller that looks away does not send it anew.
    Sending(Pin<Box<dyn Future<Output = Result<Waiting, Failure>> + Send>>),
    Waiting(Waiting),
    Over,
}

impl Exchange {
    /// Sends `message`, a request.
    pub(crate) async fn begin(sharing: Sharing, message: &Bytes, manner: Manner) -> Result<Self, Failure> {
        let name = sharing.upstreams.own_name();
        let sent = Sent::new(message, name, manner).ok_or_else(|| sharing.protocol("the message is no request"))?;
        let (sent, place) = (Arc::new(sent), sharing.place(manner.listens).await?);
        let phase = Phase::Sending(Box::pin(sharing.clone().send(Arc::clone(&sent))));
        Ok(Self {
            sharing,
            sent,
            phase,
            resent: false,
            repeated: false,
            acknowledged: 0,
            ready: VecDeque::new(),
            place: Some(place),
        })
    }

    /// The next message; the answer is the last one. Cancel-safe.
    pub(crate) async fn next(&mut self) -> Result<Bytes, FeedEnd> {
        loop {
            if let Some(message) = self.ready.pop_front() {
                return Ok(message);
            }
            match &mut self.phase {
                Phase::Over => return Err(FeedEnd::Failed(self.sharing.over())),
                Phase::Sending(work) => {
                    let sent = work.await;
                    self.phase = Phase::Over;
                    self.phase = Phase::Waiting(sent.map_err(FeedEnd::Failed)?);
                }
                Phase::Waiting(waiting) => {
                    let delivery = waiting.next().await;
                    if self.sent.listens && waiting.is_lossy() {
                        self.give_up();
                        return Err(FeedEnd::Broken("its client does not read what it listens to".into()));
                    }
                    self.take_in(delivery)?;
                }
            }
        }
    }

    fn take_in(&mut self, delivery: Delivery) -> Result<(), FeedEnd> {
        match delivery {
            Delivery::Message { bytes, .. } => {
                self.hear(&bytes);
                Ok(())
            }
            // Nothing of the kind is handed out here.
            Delivery::Question { .. } => Ok(()),
            Delivery::Response { bytes, .. } => {
                self.finish();
                let restored = envelope::scan(&bytes).ok().and_then(|scanned| self.sent.restored(&bytes, &scanned));
                self.ready.extend(restored);
                Ok(())
            }
            Delivery::Oversize => {
                self.finish();
                Err(FeedEnd::Oversize)
            }
            Delivery::Gone => {
                let Phase::Waiting(waiting) = std::mem::replace(&mut self.phase, Phase::Over) else { return Ok(()) };
                // It is known before anybody is told.
                let end = waiting.running.end().unwrap_or(End { exit: None, why: None });
                self.go_on(&end, waiting.frame)
            }
        }
    }

    fn hear(&mut self, message: &Bytes) {
        let Ok(scanned) = envelope::scan(message) else { return };
        if scanned.kind != Kind::Notification {
            return;
        }
        match scanned.method_name(message).as_deref() {
            Some("notifications/cancelled") if self.sent.listens => {
                self.finish();
                self.ready.push_back(self.sent.complete());
            }
            Some("notifications/cancelled") => {}
            Some("notifications/subscriptions/acknowledged") => {
                self.acknowledged += 1;
                match self.acknowledged {
                    1 => self.ready.extend(self.sent.restored(message, &scanned)),
                    _ => self.ready.extend(self.sent.changes(message, &scanned)),
                }
            }
            Some(_) | None => self.ready.extend(self.sent.restored(message, &scanned)),
        }
    }

    /// After the end of the process: sends the request to the next one, or says what is known of it.
    fn go_on(&mut self, end: &End, frame: Option<u64>) -> Result<(), FeedEnd> {
        if self.sent.listens {
            // As often as processes may be started.
        } else if !end.has_frame(frame) && !self.resent {
            self.resent = true;
        } else if self.sent.may_repeat && !self.repeated {
            self.repeated = true;
            Upstreams::count(&self.sharing.upstreams.counters.repeated);
        } else {
            // Not its last words: they may be about somebody else's request.
            return Err(FeedEnd::Broken(end.reason().into()));
        }
        self.phase = Phase::Sending(Box::pin(self.sharing.clone().send(Arc::clone(&self.sent))));
        Ok(())
    }

    /// Nothing more comes, and nobody can come back for it.
    fn finish(&mut self) {
        if let Phase::Waiting(waiting) = std::mem::replace(&mut self.phase, Phase::Over) {
            waiting.running.settle_for_good(self.sent.stream);
        }
    }

    /// Nobody wants the rest. What the process has of the request is taken back, and only then need the keeper not know of
    /// it any more: if this worker is killed before, the next one does it.
    fn give_up(&mut self) {
        let Phase::Waiting(waiting) = std::mem::replace(&mut self.phase, Phase::Over) else { return };
        if waiting.running.is_over() || tokio::runtime::Handle::try_current().is_err() {
            return;
        }
        let (stream, place) = (self.sent.stream, self.place.take());
        spawn(async move {
            let _in_flight = place;
            take_back(&waiting.running, stream).await;
            waiting.running.settle_for_good(stream);
        });
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.sharing.note_use();
        self.give_up();
    }
}
