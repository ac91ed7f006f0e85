//! The receiving task: it never waits for anybody but the socket.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::coop::consume_budget;

use super::shared::{Reply, Shared, Stdin};
use super::{ChildEvent, Held, Order, Spawned};
use crate::channel::Inbox;
use crate::identity::ProcessIdentity;
use crate::protocol::{Holding, ProtocolError, ToKeeper, ToWorker};
use crate::types::{CUSTODY_FRAMES_MAX, ChildId};

/// Why receiving ended.
#[derive(Debug, thiserror::Error)]
enum ReceiveError {
    #[error("the socket failed")]
    Socket(#[from] io::Error),
    #[error("the keeper's message is malformed")]
    Protocol(#[from] ProtocolError),
}

/// Reads what the keeper says and gives it to whom it concerns.
pub(super) struct Receiver {
    shared: Arc<Shared>,
    inbox: Inbox,
    orders: mpsc::Sender<Order>,
    children: HashMap<ChildId, Child>,
    /// Children are the successor's.
    is_leaving: bool,
}

/// Where a child's events go.
struct Child {
    events: mpsc::Sender<ChildEvent>,
    stdin: Arc<Stdin>,
    /// Progress that found the channel nearly full and goes with a later event.
    owed_written: Option<u64>,
    /// Nobody waits for it: it was started for a caller that has gone away.
    is_abandoned: bool,
}

impl Receiver {
    pub(super) fn new(shared: Arc<Shared>, inbox: Inbox, orders: mpsc::Sender<Order>) -> Self {
        Self { shared, inbox, orders, children: HashMap::new(), is_leaving: false }
    }

    /// Registers a child of an earlier worker.
    pub(super) fn take_over(&mut self, held: Holding) -> Held {
        let stdin = Stdin::new(held.frames_accepted, held.queued_bytes);
        Held {
            child: held.child,
            label: held.label.into(),
            identity: held.identity,
            spawned_at_unix_ms: held.spawned_at_unix_ms,
            frames_written: held.frames_written,
            frames_accepted: held.frames_accepted,
            open: held.open,
            events: self.add(held.child, stdin),
        }
    }

    pub(super) async fn run(mut self) {
        match self.receive().await {
            Ok(()) => tracing::info!("the keeper ended the connection"),
            Err(error) => tracing::warn!(error = &error as &dyn std::error::Error, "lost the keeper"),
        }
        self.shared.detach();
        // If there is no room for the order, the end of the channel says the same.
        let _ = self.orders.try_send(Order::Detached);
    }

    async fn receive(&mut self) -> Result<(), ReceiveError> {
        loop {
            while let Some(message) = self.inbox.next_message()? {
                self.take(ToWorker::decode(message)?)?;
            }
            tokio::select! {
                biased;
                filled = self.inbox.fill(self.shared.socket()) => if filled? == 0 {
                    return Ok(());
                },
                () = self.shared.left(), if !self.is_leaving => {
                    // Whoever listens to a child hears the end of it.
                    self.children.clear();
                    self.is_leaving = true;
                }
            }
            consume_budget().await;
        }
    }

    fn take(&mut self, message: ToWorker) -> Result<(), ProtocolError> {
        match message {
            ToWorker::Drain { retire } => self.order(Order::Drain { retire }),
            // What was on its way is its successor's.
            _ if self.shared.is_leaving() => {}
            ToWorker::Frame { child, number, bytes } => self.tell(child, ChildEvent::Frame { number, bytes }),
            ToWorker::Oversize { child, number, bytes, head, tail } => {
                self.tell(child, ChildEvent::Oversize { number, head, tail, bytes });
            }
            ToWorker::Written { child, through } => self.tell_written(child, through),
            ToWorker::Exited { child, exit } => {
                self.tell(child, ChildEvent::Exited(exit));
                self.shared.remove(child);
                if self.children.remove(&child).is_some_and(|ended| ended.is_abandoned) {
                    self.shared.send_now(&ToKeeper::Forget { child });
                }
            }
            ToWorker::Spawned { request, child, identity } => self.spawned(request, child, identity),
            ToWorker::SpawnFailed { request, failure, detail } => {
                self.reply(request, Reply::SpawnFailed(failure, detail));
            }
            ToWorker::StderrTail { request, bytes } => self.reply(request, Reply::StderrTail(bytes)),
            ToWorker::Ping => self.shared.send_now(&ToKeeper::Pong),
            ToWorker::HandOver => self.order(Order::HandOver),
            ToWorker::Succeeding { request, settings } => self.reply(request, Reply::Succeeding(settings)),
            ToWorker::NotSucceeding { request, reason } => self.reply(request, Reply::NotSucceeding(reason)),
            ToWorker::Refused { .. }
            | ToWorker::Welcome(_)
            | ToWorker::Held(_)
            | ToWorker::Connection(_)
            | ToWorker::Begin => return Err(ProtocolError::Order),
        }
        Ok(())
    }

    fn order(&self, order: Order) {
        if self.orders.try_send(order).is_err() {
            tracing::warn!(?order, "an order found nobody to take it");
        }
    }

    fn add(&mut self, child: ChildId, stdin: Stdin) -> mpsc::Receiver<ChildEvent> {
        let (events, receiver) = mpsc::channel(EVENTS_MAX);
        let stdin = Arc::new(stdin);
        self.shared.add(child, Arc::clone(&stdin));
        self.children.insert(child, Child { events, stdin, owed_written: None, is_abandoned: false });
        receiver
    }

    fn spawned(&mut self, request: u64, child: ChildId, identity: ProcessIdentity) {
        let events = self.add(child, Stdin::new(0, 0));
        let waiting = self.shared.take_reply(request);
        let is_taken = waiting.is_some_and(|waiting| {
            let spawned = Spawned { child, identity, events };
            waiting.send(Reply::Spawned(spawned)).is_ok()
        });
        if !is_taken {
            self.shared.remove(child);
            self.shared.send_now(&ToKeeper::Stop { child, grace: ABANDONED_GRACE });
            if let Some(abandoned) = self.children.get_mut(&child) {
                abandoned.is_abandoned = true;
            }
        }
    }

    /// Passes an event on. A dropped receiver discards it; it stays unacknowledged and is the next worker's.
    fn tell(&mut self, child: ChildId, event: ChildEvent) {
        let Some(known) = self.children.get_mut(&child) else {
            return;
        };
        if let Some(through) = known.owed_written.take() {
            // Its own room is kept free by `tell_written`.
            let _ = known.events.try_send(ChildEvent::Written { through });
        }
        if let Err(mpsc::error::TrySendError::Full(_)) = known.events.try_send(event) {
            // The keeper's bound on unacknowledged frames keeps this from happening, unless frames are acknowledged
            // that were never received.
            tracing::error!(child = child.get(), "a child's events overflow; one is lost until the next worker");
        }
    }

    fn tell_written(&mut self, child: ChildId, through: u64) {
        let Some(known) = self.children.get_mut(&child) else {
            return;
        };
        known.stdin.written(through);
        if known.events.capacity() > EVENTS_RESERVE / 2 {
            known.owed_written = None;
            let _ = known.events.try_send(ChildEvent::Written { through });
        } else {
            known.owed_written = Some(through);
        }
    }

    fn reply(&self, request: u64, reply: Reply) {
        if let Some(waiting) = self.shared.take_reply(request) {
            // Whoever asked may have gone away.
            let _ = waiting.send(reply);
        }
    }
}

/// Room for events other than unacknowledged frames.
const EVENTS_RESERVE: usize = 64;

/// Room for a child's events: all frames that the keeper lets stand unacknowledged, and a reserve.
const EVENTS_MAX: usize = CUSTODY_FRAMES_MAX + EVENTS_RESERVE;

/// The grace of a child that nobody waits for.
const ABANDONED_GRACE: Duration = Duration::from_secs(2);
