//! One child process: who waits for what it writes.
//!
//! A task per child reads its events in order and gives each frame to the call that it belongs to. The task never waits
//! for a slow reader: frames wait in the slots of their calls, and the keeper bounds them all, since it stops reading a
//! child that has too many frames which are not acknowledged.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::call::RoutedId;
use mainstay_core::wire::envelope::{self, Envelope, Kind};
use mainstay_keeper::client::{ChildEvent, Custody, WriteError};
use mainstay_keeper::{ChildId, Exit};
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, MissedTickBehavior};

use super::end::End;
use super::oversize::{self, Lost};
use super::slot::{Delivery, Slot};
use super::table::{Entry, Owner, Table};
use crate::notice::{Notice, Notices};
use crate::task::spawn;
use crate::upstreams::{Destination, Upstreams};
use crate::wire::{self, Sort, lock};

/// A child and the calls that wait for it.
pub(super) struct Running {
    pub(super) id: ChildId,
    pub(super) custody: Custody,
    pub(super) started_at: Instant,
    /// Whether it was told `initialized`.
    pub(super) initialized: AtomicBool,
    /// Whether an earlier worker started it.
    pub(super) adopted: bool,
    /// Whether its end was counted as one of those that delay the next start.
    pub(super) counted: AtomicBool,
    upstreams: Arc<Upstreams>,
    destination: Arc<Destination>,
    notices: Arc<Notices>,
    table: Mutex<Table>,
    exited: Notify,
    /// Told when there is something to acknowledge in a while.
    due: Notify,
}

/// What a call asks of the table.
pub(super) struct Registration {
    /// The raw id under which the answer comes.
    pub(super) id: Bytes,
    pub(super) may_stream: bool,
}

/// What goes on behind a frame, outside the table's lock.
enum Aftermath {
    Nothing,
    /// For the session's listening stream.
    Tell(Bytes, Kind),
    /// For the child.
    Reply(Bytes),
}

impl Running {
    pub(super) fn start(
        (upstreams, destination): (&Arc<Upstreams>, &Arc<Destination>),
        notices: &Arc<Notices>,
        custody: Custody,
        (id, events): (ChildId, mpsc::Receiver<ChildEvent>),
        adopted: bool,
    ) -> (Arc<Self>, tokio::task::AbortHandle) {
        let running = Arc::new(Self {
            id,
            custody,
            started_at: Instant::now(),
            initialized: AtomicBool::new(false),
            adopted,
            counted: AtomicBool::new(false),
            upstreams: Arc::clone(upstreams),
            destination: Arc::clone(destination),
            notices: Arc::clone(notices),
            table: Mutex::default(),
            exited: Notify::new(),
            due: Notify::new(),
        });
        let pump = spawn(Arc::clone(&running).pump(events)).abort_handle();
        (running, pump)
    }

    /// Waits for the answer to `registration`. `None` if the child has ended or the id is taken.
    pub(super) fn register(self: &Arc<Self>, registration: Registration) -> Option<Waiting> {
        let key: Box<str> = wire::id_text(&registration.id).into();
        let stream = RoutedId::decode(&registration.id).map(|routed| routed.stream);
        let mut table = lock(&self.table);
        if table.end.is_some() || table.pending.contains_key(&key) {
            return None;
        }
        table.registered += 1;
        let slot = Arc::new(Slot::default());
        let Registration { id, may_stream } = registration;
        let entry = Entry { slot: Arc::clone(&slot), order: table.registered, may_stream, stream, id };
        table.pending.insert(key.clone(), entry);
        Some(Waiting { running: Arc::clone(self), slot, key, frame: None })
    }

    /// The parked answer to a call of an earlier worker.
    pub(super) fn take_parked(&self, id: &[u8]) -> Option<Bytes> {
        let mut table = lock(&self.table);
        let (number, bytes) = table.parked.take(&wire::id_text(id))?;
        let through = table.acks.delivered(number);
        drop(table);
        self.acknowledge(through);
        Some(bytes)
    }

    /// Nothing of the call need be kept any more.
    pub(super) fn settle(&self, id: &RoutedId) {
        let mut table = lock(&self.table);
        let parked = table.parked.take(&wire::id_text(&id.encode()));
        let through = parked.and_then(|(number, _)| table.acks.delivered(number));
        drop(table);
        self.acknowledge(through);
        self.due.notify_one();
    }

    pub(super) fn end(&self) -> Option<End> {
        lock(&self.table).end.clone()
    }

    pub(super) fn is_over(&self) -> bool {
        lock(&self.table).end.is_some()
    }

    /// Resolves once the child has ended.
    pub(super) async fn ended(&self) -> End {
        loop {
            let exited = self.exited.notified();
            if let Some(end) = self.end() {
                return end;
            }
            exited.await;
        }
    }

    /// Writes one message. It must hold no line end that matters.
    pub(super) async fn write(&self, message: Bytes) -> Result<u64, WriteError> {
        self.custody.write(self.id, envelope::one_line(message)).await
    }

    /// A frame was handed on.
    pub(super) fn delivered(&self, number: u64) {
        let through = lock(&self.table).acks.delivered(number);
        self.acknowledge(through);
        self.due.notify_one();
    }

    pub(super) fn is_initialized(&self) -> bool {
        self.initialized.load(Ordering::Acquire)
    }

    pub(super) fn mark_initialized(&self) {
        self.initialized.store(true, Ordering::Release);
    }

    /// Lets the keeper drop what was handed on already.
    pub(super) fn flush(&self) {
        let through = lock(&self.table).acks.flush();
        self.acknowledge(through);
    }

    fn acknowledge(&self, through: Option<u64>) {
        if let Some(through) = through {
            self.custody.acknowledge(self.id, 0..=through);
        }
    }

    async fn pump(self: Arc<Self>, mut events: mpsc::Receiver<ChildEvent>) {
        let mut ticks = tokio::time::interval(ACKNOWLEDGE_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let due = lock(&self.table).is_due();
            let event = tokio::select! {
                event = events.recv() => event,
                _ = ticks.tick(), if due => {
                    self.tick();
                    continue;
                }
                () = self.due.notified(), if !due => {
                    // The pause before the first tick is a whole one.
                    ticks.reset();
                    continue;
                }
            };
            match event {
                Some(ChildEvent::Frame { number, bytes }) => self.take_frame(number, bytes).await,
                Some(ChildEvent::Oversize { number, head, tail, bytes }) => {
                    lock(&self.table).acks.arrived(number, head.len() + tail.len());
                    self.take_oversize(number, (&head, &tail), bytes);
                }
                // A frame that is taken is sent, as far as anybody here can say; the exit tells more.
                Some(ChildEvent::Written { .. }) => {}
                Some(ChildEvent::Exited(exit)) => break self.finish(Some(exit)),
                None => break self.finish(None),
            }
        }
        self.wind_down().await;
    }

    /// After the end: keeps answers of earlier workers' calls for a while, then lets the keeper forget the child.
    async fn wind_down(&self) {
        let mut ticks = tokio::time::interval(ACKNOWLEDGE_INTERVAL);
        for _ in 0..WIND_DOWN_TICKS_MAX {
            ticks.tick().await;
            self.tick();
            let table = lock(&self.table);
            if table.acks.is_settled() && !table.is_due() {
                break;
            }
        }
        self.custody.forget(self.id).await;
    }

    fn tick(&self) {
        let mut table = lock(&self.table);
        table.drop_parked(Instant::now());
        let through = table.acks.tick();
        drop(table);
        self.acknowledge(through);
    }

    fn finish(&self, exit: Option<Exit>) {
        let server = &self.destination.server.name;
        tracing::info!(%server, child = %self.id, exit = ?exit, "child ended");
        let mut table = lock(&self.table);
        table.end = Some(End { exit, at: Instant::now() });
        for (_, entry) in table.pending.drain() {
            entry.slot.push(Delivery::Gone);
        }
        drop(table);
        self.exited.notify_waiters();
    }

    async fn take_frame(self: &Arc<Self>, number: u64, bytes: Bytes) {
        let bytes_max = self.destination.server.message_bytes_max;
        lock(&self.table).acks.arrived(number, bytes.len());
        if bytes.len() > bytes_max {
            let edge = bytes.len().min(EDGE_BYTES);
            let (head, tail) = (&bytes[..edge], &bytes[bytes.len() - edge..]);
            return self.take_oversize(number, (head, tail), bytes.len() as u64);
        }
        let aftermath = match envelope::scan(&bytes) {
            Ok(scanned) => self.route(number, &scanned, bytes),
            // A batch is of 2025-03-26 only; its members share one frame.
            Err(_) => match envelope::batch(&bytes) {
                Ok(Some(spans)) => {
                    for span in spans {
                        let part = bytes.slice(span);
                        if let Ok(scanned) = envelope::scan(&part) {
                            let aftermath = self.route(number, &scanned, part);
                            self.after(aftermath).await;
                        }
                    }
                    Aftermath::Nothing
                }
                Ok(None) | Err(_) => {
                    let server = &self.destination.server.name;
                    let beginning = String::from_utf8_lossy(&bytes[..bytes.len().min(LOGGED_BYTES_MAX)]);
                    tracing::debug!(%server, child = %self.id, %beginning, "a line is no JSON-RPC message; skipped");
                    self.delivered(number);
                    Aftermath::Nothing
                }
            },
        };
        self.after(aftermath).await;
    }

    /// Finds the owner of a message. Frames that go to a slot are delivered when they are taken out of it.
    fn route(&self, number: u64, scanned: &Envelope, bytes: Bytes) -> Aftermath {
        let mut table = lock(&self.table);
        let aftermath = match wire::sort(scanned, &bytes) {
            Sort::Ping => Aftermath::Reply(wire::pong(wire::id_of(scanned, &bytes).unwrap_or_default())),
            Sort::Response => {
                let placed = table.place_response(number, scanned, &bytes, self.upstreams.parts.epoch);
                if placed {
                    return Aftermath::Nothing;
                }
                tracing::debug!(server = %self.destination.server.name, "an answer to nobody; dropped");
                Aftermath::Nothing
            }
            Sort::Message => match table.owner_of(scanned, &bytes) {
                Owner::Call(slot) => {
                    slot.push(Delivery::Message { bytes, number });
                    return Aftermath::Nothing;
                }
                Owner::Session => Aftermath::Tell(bytes, scanned.kind),
                Owner::Nobody => Aftermath::Nothing,
            },
        };
        let through = table.acks.delivered(number);
        drop(table);
        self.acknowledge(through);
        aftermath
    }

    async fn after(self: &Arc<Self>, aftermath: Aftermath) {
        match aftermath {
            Aftermath::Nothing => {}
            Aftermath::Reply(message) => self.reply(message),
            Aftermath::Tell(message, Kind::Request) => {
                if !self.notices.tell(Notice::Message(message.clone())).await
                    && let Ok(scanned) = envelope::scan(&message)
                    && let Some(id) = wire::id_of(&scanned, &message)
                {
                    // The server must not wait for somebody who is not there.
                    Upstreams::count(&self.upstreams.counters.notices_dropped);
                    let text = "the client can't be reached";
                    self.reply(envelope::error_message(Some(id), wire::INTERNAL_ERROR, text, None).into());
                }
            }
            Aftermath::Tell(message, Kind::Notification | Kind::Result | Kind::Error) => {
                if !self.notices.offer(Notice::Message(message)) {
                    Upstreams::count(&self.upstreams.counters.notices_dropped);
                }
            }
        }
    }

    /// Asks the child for a sign of life, of which the place waits for the answer. `None` if the child has ended.
    pub(super) fn ping(self: &Arc<Self>) -> Option<Waiting> {
        let id = self.upstreams.own_id();
        let waiting = self.register(Registration { id: id.clone(), may_stream: false })?;
        self.reply(envelope::request_message(&id, "ping", None).into());
        Some(waiting)
    }

    /// Writes beside whatever else goes on: the task that reads must not wait for a full stdin.
    fn reply(self: &Arc<Self>, message: Bytes) {
        let running = Arc::clone(self);
        spawn(tokio::time::timeout(REPLY_BOUND, async move { running.write(message).await.is_ok() }));
    }

    fn take_oversize(&self, number: u64, (head, tail): (&[u8], &[u8]), bytes: u64) {
        let server = &self.destination.server.name;
        let mut table = lock(&self.table);
        match oversize::identify(head, tail, |id| table.pending.contains_key(id)) {
            Lost::AnswerTo(id) => {
                if let Some(entry) = table.pending.remove(&id) {
                    entry.slot.push(Delivery::Oversize);
                }
            }
            Lost::Unasked => tracing::warn!(%server, child = %self.id, bytes, "a message was too large; dropped"),
            // Whose answer it was can't be told, and nobody may wait for it for ever.
            Lost::Unknown => {
                tracing::warn!(%server, child = %self.id, bytes, "an answer was too large to find its call; all fail");
                table.pending.drain().for_each(|(_, entry)| entry.slot.push(Delivery::Oversize));
            }
        }
        let through = table.acks.delivered(number);
        drop(table);
        self.acknowledge(through);
    }
}

/// A call's place in the table. Dropping it gives up whatever still comes.
pub(super) struct Waiting {
    pub(super) running: Arc<Running>,
    pub(super) frame: Option<u64>,
    slot: Arc<Slot>,
    key: Box<str>,
}

impl Waiting {
    /// What comes next for the call. Cancel-safe; what is taken counts as delivered.
    pub(super) async fn next(&mut self) -> Delivery {
        let delivery = self.slot.next().await;
        if let Some(number) = delivery.number() {
            self.running.delivered(number);
        }
        delivery
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut table = lock(&self.running.table);
        // The key may be another call's by now, in theory.
        if table.pending.get(&self.key).is_some_and(|entry| Arc::ptr_eq(&entry.slot, &self.slot)) {
            table.pending.remove(&self.key);
        }
        let mut through = None;
        for number in self.slot.close() {
            through = table.acks.delivered(number).or(through);
        }
        drop(table);
        self.running.acknowledge(through);
        self.running.due.notify_one();
    }
}

/// Between two rounds of acknowledgements.
const ACKNOWLEDGE_INTERVAL: Duration = Duration::from_secs(1);

/// How long an ended child's answers are kept for calls of earlier workers.
const WIND_DOWN_TICKS_MAX: u32 = 300;

/// How much of either end of a large message is looked at.
const EDGE_BYTES: usize = 4096;

/// How much of a stray line is logged.
const LOGGED_BYTES_MAX: usize = 200;

/// How long a reply to the child may wait for its stdin.
const REPLY_BOUND: Duration = Duration::from_secs(10);
