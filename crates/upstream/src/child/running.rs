//! One child process: who waits for what it writes.
//!
//! A task per child reads its events in order and gives each frame to the call that it belongs to. The task never waits
//! for a slow reader: frames wait in the slots of their calls, and the keeper bounds them all, since it stops reading a
//! child that has too many frames which are not acknowledged.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::call::{RoutedId, StreamId};
use mainstay_core::time::Timestamp;
use mainstay_core::wire::envelope::{self, Envelope, Kind};
use mainstay_keeper::client::{ChildEvent, Custody, WriteError};
use mainstay_keeper::{CallTag, ChildId, Exit};
use tokio::sync::{Notify, mpsc};
use tokio::time::{MissedTickBehavior, timeout};

use super::acks::Release;
use super::end::{End, Why};
use super::mask::Mask;
use super::oversize::{self, Lost};
use super::receipt::Receipt;
use super::slot::Delivery;
use super::supervision::Lease;
use super::table::{Owner, Place, Rejoined, Relief, Table, answer_tag_of, tag_of};
use crate::notice::{Frame, Notice, Notices};
use crate::server::Server;
use crate::task::spawn;
use crate::upstreams::{Destination, Upstreams};
use crate::wire::{self, Sort, lock};

/// A child and the calls that wait for it.
pub(super) struct Running {
    pub(super) id: ChildId,
    pub(super) custody: Custody,
    /// Whether it was told `initialized`; of one that many share, whether it has said that it is modern.
    pub(super) initialized: AtomicBool,
    /// Why the gateway has ordered its end, once it has.
    stopping: OnceLock<Why>,
    /// For how long its calls may go on, once another one is wanted in its place.
    retired: OnceLock<Duration>,
    /// Its place among the children of its server.
    pub(super) lease: Lease,
    /// What it was given in confidence; `None` if another worker has started it.
    mask: Option<Mask>,
    /// When it was started, by the wall clock.
    pub(super) since: Timestamp,
    upstreams: Arc<Upstreams>,
    destination: Arc<Destination>,
    audience: Audience,
    table: Mutex<Table>,
    exited: Notify,
    /// Told when there is something to let go of in a while.
    due: Notify,
}

/// Who hears what belongs to no call.
pub(super) enum Audience {
    /// The session that it is the process of.
    Session(Arc<Notices>),
    /// Nobody: many share the process, and each message must name the request that it is for.
    Callers,
}

/// What a call asks of the table.
pub(super) struct Registration {
    /// The raw id under which the answer comes.
    pub(super) id: Bytes,
    /// Whether messages that name no call may go to this one.
    pub(super) may_stream: bool,
}

/// What goes on behind a frame, outside the table's lock.
enum Aftermath {
    Nothing,
    /// For the session's listening stream: from the frame of that number.
    Tell(Bytes, u64),
    /// The same, and the client is to answer. The frame is not dealt with before that is durable.
    Ask(Bytes, u64),
    /// For the child.
    Reply(Bytes),
}

impl Running {
    pub(super) fn start(
        (upstreams, destination): (&Arc<Upstreams>, &Arc<Destination>),
        audience: Audience,
        custody: Custody,
        (id, open, events): (ChildId, &[CallTag], mpsc::Receiver<ChildEvent>),
        (lease, mask): (Lease, Option<Mask>),
    ) -> (Arc<Self>, tokio::task::AbortHandle) {
        let running = Arc::new(Self {
            id,
            custody,
            initialized: AtomicBool::new(false),
            since: lease.since(),
            stopping: OnceLock::new(),
            retired: OnceLock::new(),
            lease,
            mask,
            upstreams: Arc::clone(upstreams),
            destination: Arc::clone(destination),
            audience,
            table: Mutex::new(Table::of(open)),
            exited: Notify::new(),
            due: Notify::new(),
        });
        let pump = spawn(Arc::clone(&running).pump(events)).abort_handle();
        (running, pump)
    }

    pub(super) fn server(&self) -> &Server {
        &self.destination.server
    }

    /// Waits for the answer to `registration`. `None` if the child has ended or the id is taken.
    pub(super) fn register(self: &Arc<Self>, registration: Registration) -> Option<Waiting> {
        let place = lock(&self.table).register(registration.id, registration.may_stream)?;
        Some(self.waiting(place))
    }

    /// The call of an earlier worker: its answer, or a wait for it. `None` if no answer can come.
    pub(super) fn rejoin(self: &Arc<Self>, id: &RoutedId) -> Option<Result<Bytes, Waiting>> {
        let rejoined = lock(&self.table).rejoin(id)?;
        Some(match rejoined {
            Rejoined::Answered(bytes) => Ok(bytes),
            Rejoined::Waiting(place) => Err(self.waiting(place)),
        })
    }

    fn waiting(self: &Arc<Self>, place: Place) -> Waiting {
        Waiting { running: Arc::clone(self), frame: None, place, done: false }
    }

    /// Nobody will ask for the call any more.
    pub(super) fn settle(&self, call: StreamId) {
        self.change(|table| table.settle(call));
    }

    /// The same for a call whose client has nothing to come back with.
    pub(super) fn settle_for_good(&self, call: StreamId) {
        self.change(|table| table.settle_for_good(call));
    }

    pub(super) fn answered_earlier(&self) -> Vec<StreamId> {
        lock(&self.table).answered_earlier()
    }

    pub(super) fn has_running_calls(&self) -> bool {
        lock(&self.table).has_running_calls()
    }

    pub(super) fn runs_earlier_calls(&self) -> bool {
        lock(&self.table).runs_calls_before(self.upstreams.parts.epoch)
    }

    /// Nobody will ask for any call any more.
    pub(super) fn settle_all(&self) {
        self.change(Table::settle_all);
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

    /// Writes the message of a call, which stays in custody until it is settled.
    pub(super) async fn write_call(&self, waiting: &mut Waiting, message: Bytes) -> Result<(), WriteError> {
        let number = match waiting.place.call {
            Some(call) => self.custody.write_call(self.id, tag_of(call), envelope::one_line(message)).await?,
            None => self.write(message).await?,
        };
        waiting.frame = Some(number);
        Ok(())
    }

    /// Writes the answer to a question of the child's, which stays known to the keeper until it is settled. Does nothing if
    /// the keeper has it already.
    pub(super) async fn write_answer(&self, asked: StreamId, message: Bytes) -> Result<(), WriteError> {
        if lock(&self.table).has_answer(asked) {
            return Ok(());
        }
        self.custody.write_call(self.id, answer_tag_of(asked), envelope::one_line(message)).await?;
        lock(&self.table).note_answer(asked);
        Ok(())
    }

    /// It is on record that the answer to `asked` was forwarded: nobody will ask for it any more.
    pub(super) fn settle_answer(&self, asked: StreamId) {
        self.change(|table| table.settle_answer(asked));
    }

    /// The questions of earlier workers of which the keeper still knows the answers.
    pub(super) fn answers_earlier(&self) -> Vec<StreamId> {
        lock(&self.table).answers_before(self.upstreams.parts.epoch)
    }

    pub(super) fn is_initialized(&self) -> bool {
        self.initialized.load(Ordering::Acquire)
    }

    pub(super) fn mark_initialized(&self) {
        self.initialized.store(true, Ordering::Release);
    }

    /// Lets the keeper drop what was handed on already.
    pub(super) fn flush(&self) {
        let release = lock(&self.table).acks.flush();
        self.let_go(release);
    }

    /// Changes what is kept, and sees to it that not too much is.
    fn change<T>(&self, change: impl FnOnce(&mut Table) -> T) -> T {
        let mut table = lock(&self.table);
        let changed = change(&mut table);
        let (release, is_due) = (table.acks.overflow(), table.is_due());
        drop(table);
        self.let_go(release);
        if is_due {
            self.due.notify_one();
        }
        changed
    }

    fn let_go(&self, release: Release) {
        if !release.calls.is_empty() {
            self.custody.settle(self.id, &release.calls);
        }
        for frames in release.frames() {
            self.custody.acknowledge(self.id, frames);
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
                    self.arrived(number, head.len() + tail.len());
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
        let release = lock(&self.table).tick();
        self.let_go(release);
    }

    fn finish(&self, exit: Option<Exit>) {
        let server = &self.destination.server.name;
        tracing::info!(%server, child = %self.id, exit = ?exit, "child ended");
        let end = End { exit: exit.map(|exit| self.masked(exit)), why: self.stopping.get().copied() };
        // First of all: whoever hears of the end may ask for another child.
        self.lease.ended(&end);
        lock(&self.table).finish(end);
        self.exited.notify_waiters();
    }

    /// The exit without what the child was given in confidence: its words go to clients and operators (I6).
    fn masked(&self, exit: Exit) -> Exit {
        let now = || Mask::of(&self.destination.server, &*self.upstreams.parts.environment);
        self.mask.clone().unwrap_or_else(now).apply_to_exit(exit)
    }

    /// Ends the process, which is then nothing that its server has to answer for.
    pub(super) async fn stop(&self, why: Why) {
        // The first reason is what it is ended for.
        let _known = self.stopping.set(why);
        self.custody.stop(self.id, self.destination.server.stop_grace).await;
    }

    /// Whether another process is wanted in its place: no new call goes to this one.
    pub(super) fn is_retired(&self) -> bool {
        self.retired.get().is_some()
    }

    /// From now on no new call goes to it; those that run get `grace`.
    pub(super) fn mark_retired(&self, grace: Duration) {
        let _known = self.retired.set(grace);
    }

    /// Ends the process because another one is wanted, but lets its calls be answered first, within its grace. Returns
    /// whether it has ended within its bound.
    pub(super) async fn retire(self: Arc<Self>, why: Why) -> bool {
        let quiet = timeout(self.calls_grace(), async {
            while self.has_running_calls() && !self.is_over() {
                tokio::time::sleep(QUIET_POLL).await;
            }
        });
        if quiet.await.is_err() {
            let server = &self.destination.server.name;
            let why = why.as_str();
            tracing::info!(%server, child = %self.id, why, "its end does not wait any longer for the calls in flight");
        }
        self.stop(why).await;
        timeout(self.end_bound(), self.ended()).await.is_ok()
    }

    fn calls_grace(&self) -> Duration {
        self.retired.get().copied().unwrap_or_default()
    }

    /// How long its end may take once it is ordered.
    fn end_bound(&self) -> Duration {
        2 * self.destination.server.stop_grace + KILL_BOUND
    }

    /// Waits for the end of a process that is retired. False if that takes too long.
    pub(super) async fn is_gone(&self) -> bool {
        timeout(self.calls_grace() + self.end_bound(), self.ended()).await.is_ok()
    }

    /// Takes a frame into account. The child must never wait for answers that nobody takes.
    fn arrived(&self, number: u64, bytes: usize) {
        let relief = self.change(|table| {
            table.acks.arrived(number, bytes);
            table.relieve()
        });
        if relief != Relief::default() {
            let (server, Relief { answers, messages }) = (&self.destination.server.name, relief);
            tracing::warn!(%server, child = %self.id, answers, messages, "too much waits for clients to come back; the oldest is let go");
        }
    }

    async fn take_frame(self: &Arc<Self>, number: u64, bytes: Bytes) {
        let bytes_max = self.destination.server.message_bytes_max;
        self.arrived(number, bytes.len());
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
                    lock(&self.table).acks.split(number, spans.len());
                    for span in spans {
                        let part = bytes.slice(span);
                        match envelope::scan(&part) {
                            Ok(scanned) => self.after(self.route(number, &scanned, part)).await,
                            Err(_) => self.delivered(number),
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

    /// A message of the frame is dealt with.
    pub(super) fn delivered(&self, number: u64) {
        self.change(|table| table.acks.delivered(number));
    }

    /// Finds the owner of a message. Frames that go to a slot are delivered when they are taken out of it, but answers
    /// that later workers can be asked for.
    fn route(&self, number: u64, scanned: &Envelope, bytes: Bytes) -> Aftermath {
        let mut table = lock(&self.table);
        let aftermath = match wire::sort(scanned, &bytes) {
            Sort::Ping | Sort::Message if self.is_shared() => {
                self.hand_out(&table, number, scanned, bytes);
                Aftermath::Nothing
            }
            Sort::Ping => Aftermath::Reply(wire::pong(wire::id_of(scanned, &bytes).unwrap_or_default())),
            Sort::Response => {
                if table.place_response(number, scanned, &bytes, self.upstreams.parts.epoch) {
                    return Aftermath::Nothing;
                }
                tracing::debug!(server = %self.destination.server.name, "an answer to nobody; dropped");
                Aftermath::Nothing
            }
            Sort::Message => match table.owner_of(scanned, &bytes) {
                Owner::Call(slot) => {
                    slot.push(match scanned.kind {
                        Kind::Request => Delivery::Question { bytes, number },
                        Kind::Notification | Kind::Result | Kind::Error => Delivery::Message { bytes, number },
                    });
                    return Aftermath::Nothing;
                }
                Owner::Session if scanned.kind == Kind::Request => return Aftermath::Ask(bytes, number),
                Owner::Session => Aftermath::Tell(bytes, number),
                Owner::Nobody if table.keep_progress(number, scanned, &bytes) => return Aftermath::Nothing,
                Owner::Nobody => Aftermath::Nothing,
            },
        };
        drop(table);
        self.delivered(number);
        aftermath
    }

    fn is_shared(&self) -> bool {
        matches!(self.audience, Audience::Callers)
    }

    /// Gives a message of a process that many share to the request that it names. It is of no use to a later worker, and
    /// who does not read must not hold up the others: so the keeper need not keep it, and there is room for so much only.
    fn hand_out(&self, table: &Table, number: u64, scanned: &Envelope, bytes: Bytes) {
        let server = &self.destination.server.name;
        if scanned.kind == Kind::Request {
            let method = scanned.method_name(&bytes).unwrap_or_default();
            tracing::debug!(%server, child = %self.id, %method, "a modern server must not ask anything; dropped");
        } else if let Some(slot) = table.named_by(scanned, &bytes) {
            slot.push_within(Delivery::Message { bytes, number });
        }
    }

    async fn after(self: &Arc<Self>, aftermath: Aftermath) {
        let Audience::Session(notices) = &self.audience else { return };
        match aftermath {
            Aftermath::Nothing => {}
            Aftermath::Reply(message) => self.reply(message),
            Aftermath::Ask(message, frame) => {
                let receipt = Receipt::new(Arc::clone(self), frame);
                if !notices.tell(Notice::Question { message: message.clone(), receipt }).await
                    && let Ok(scanned) = envelope::scan(&message)
                    && let Some(id) = wire::id_of(&scanned, &message)
                {
                    // The server must not wait for somebody who is not there.
                    Upstreams::count(&self.upstreams.counters.notices_dropped);
                    let text = "the client can't be reached";
                    self.reply(envelope::error_message(Some(id), wire::INTERNAL_ERROR, text, None).into());
                }
            }
            Aftermath::Tell(message, number) => {
                let frame = Some(Frame { child: self.id, number });
                if !notices.offer(Notice::Message { message, frame }) {
                    Upstreams::count(&self.upstreams.counters.notices_dropped);
                }
            }
        }
    }

    /// Writes beside whatever else goes on: the task that reads must not wait for a full stdin.
    fn reply(self: &Arc<Self>, message: Bytes) {
        let running = Arc::clone(self);
        spawn(tokio::time::timeout(REPLY_BOUND, async move { running.write(message).await.is_ok() }));
    }

    fn take_oversize(&self, number: u64, (head, tail): (&[u8], &[u8]), bytes: u64) {
        let server = &self.destination.server.name;
        self.change(|table| {
            let lost = oversize::identify(head, tail, |id| table.awaits(id));
            match lost {
                Lost::AnswerTo(_) => {}
                Lost::Unasked => tracing::warn!(%server, child = %self.id, bytes, "a message was too large; dropped"),
                Lost::Unknown => {
                    tracing::warn!(%server, child = %self.id, bytes, "an answer was too large to find its call; all fail");
                }
            }
            table.place_lost(&lost);
            table.acks.delivered(number);
        });
    }
}

/// A call's place in the table. Dropping it gives up whatever still comes; if the answer was not taken until then, the call
/// is settled.
pub(super) struct Waiting {
    pub(super) running: Arc<Running>,
    pub(super) frame: Option<u64>,
    place: Place,
    /// Whether nothing more can come.
    done: bool,
}

impl Waiting {
    /// Whether something that came for the call was let go of for want of room.
    pub(super) fn is_lossy(&self) -> bool {
        self.place.slot.is_lossy()
    }

    /// What comes next for the call. Cancel-safe; what is taken counts as delivered, but for the answer to a call that
    /// later workers can be asked for: that call must be settled; and for a question, of which a [receipt](Self::receipt)
    /// must be made.
    pub(super) async fn next(&mut self) -> Delivery {
        let delivery = self.place.slot.next().await;
        self.done |= matches!(delivery, Delivery::Response { .. } | Delivery::Oversize);
        if let Some(number) = delivery.number().filter(|_| !matches!(delivery, Delivery::Question { .. })) {
            self.running.delivered(number);
        }
        delivery
    }

    /// For the question of that frame, which was taken.
    pub(super) fn receipt(&self, frame: u64) -> Receipt {
        Receipt::new(Arc::clone(&self.running), frame)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.running.change(|table| table.leave(&self.place, self.done));
    }
}

/// How often is looked whether they are over.
const QUIET_POLL: Duration = Duration::from_millis(20);

/// How long the end of a killed process may take.
const KILL_BOUND: Duration = Duration::from_secs(5);

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
