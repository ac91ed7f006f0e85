//! The keeper's loop: one event after another, and what is done about each.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::task::JoinError;
use tokio::time::{Instant, sleep_until};

use super::handover::Step;
use super::signals::{Signals, Wish};
use super::{Bounds, Ended, KeeperError, Programs, Stage, Tell};
use crate::identity::ProcessIdentity;
use crate::keeper::Keeper;
use crate::leaving::Leaving;
use crate::lock::Lock;
use crate::respawn::Respawn;
use crate::worker::Worker;

/// Everything that the loop knows.
pub(super) struct Dispatcher {
    pub(super) keeper: Rc<Keeper>,
    pub(super) programs: Programs,
    pub(super) bounds: Bounds,
    pub(super) tell: Tell,
    pub(super) signals: Signals,
    pub(super) respawn: Respawn,
    pub(super) lock: Arc<Lock>,
    /// Processes below the keeper that it did not start.
    pub(super) strangers: BTreeSet<ProcessIdentity>,
    /// The number of the worker that was started last.
    pub(super) last_worker: u64,
    pub(super) leaving: Rc<Leaving>,
    pub(super) step: Step,
    /// The worker in charge, or the one that is to be.
    pub(super) worker: Option<Attended>,
    /// When the next one is to be started.
    pub(super) start_at: Option<Instant>,
    /// A stop is wanted.
    pub(super) ended: Option<Ended>,
}

/// A worker that is watched.
pub(super) struct Attended {
    pub(super) worker: Worker,
    pub(super) kill_at: Option<Instant>,
    pub(super) ping_at: Option<Instant>,
    was_overdue: bool,
}

/// What happens next.
enum Event {
    Wish(Wish),
    Asked,
    Rehearsed(Result<Bytes, String>),
    StartDue,
    LeaverGone,
    Worker(WorkerEvent),
}

/// What the watched worker does.
enum WorkerEvent {
    Dead,
    Ready,
    Waiting,
    HandedOver,
    LinkOver { may_linger: bool },
    Overdue,
    PingDue,
}

impl Dispatcher {
    /// Keeps a worker running until a stop is wanted and the last one is gone.
    pub(super) async fn run(&mut self) -> Result<Ended, KeeperError> {
        loop {
            if let Some(ended) = self.ended
                && self.worker.is_none()
                && self.leaving.is_empty()
            {
                return Ok(ended);
            }
            match self.next().await {
                Event::Wish(Wish::Upgrade) => self.begin_handover(None),
                Event::Wish(wish) => self.stop(wish),
                Event::Asked => {
                    if let Some(asked) = self.keeper.take_succession() {
                        self.begin_handover(Some(asked));
                    }
                }
                Event::Rehearsed(result) => self.rehearsed(result).await,
                Event::StartDue => self.start_worker().await?,
                Event::LeaverGone => {}
                Event::Worker(WorkerEvent::Dead) => self.bury().await?,
                Event::Worker(WorkerEvent::HandedOver) => self.handed_over().await,
                Event::Worker(event) => self.attend(event),
            }
        }
    }

    async fn next(&mut self) -> Event {
        tokio::select! {
            // In this order, so that a worker that has become ready, and then asked, is ready when it asks.
            biased;
            wish = self.signals.next() => Event::Wish(wish),
            event = next_of(&mut self.worker) => Event::Worker(event),
            () = self.keeper.succession_asked.notified() => Event::Asked,
            result = next_step(&mut self.step) => Event::Rehearsed(result),
            () = sleep_until_some(self.start_at) => Event::StartDue,
            () = self.leaving.one_is_gone.notified() => Event::LeaverGone,
        }
    }

    // Workers.

    /// Starts the next worker.
    async fn start_worker(&mut self) -> Result<(), KeeperError> {
        self.start_at = None;
        self.last_worker += 1;
        let number = self.last_worker;
        if !self.is_succeeding() {
            self.respawn.started(Instant::now());
        }
        match Worker::start(&self.keeper, &self.programs.worker, number) {
            Ok(worker) => {
                let bound = if self.is_succeeding() { SUCCESSOR_BOUND } else { READY_BOUND };
                let kill_at = Some(worker.started_at + bound);
                self.worker = Some(Attended { worker, kill_at, ping_at: None, was_overdue: false });
            }
            Err(source) if self.is_succeeding() => {
                self.close_passed();
                self.roll_back(format!("its worker could not be started: {source}")).await;
            }
            Err(source) if number == 1 => {
                return Err(KeeperError::Worker { path: self.programs.worker.program.clone(), source });
            }
            Err(error) => {
                tracing::error!(worker = number, %error, "could not start a worker");
                self.close_passed();
                self.start_again();
            }
        }
        Ok(())
    }

    /// A worker may lack the very descriptors that clients' connections hold, and those clients can connect again.
    fn close_passed(&self) {
        let passed = self.keeper.passed().take();
        if !passed.is_empty() {
            tracing::warn!(connections = passed.len(), "closing idle connections, so that a worker can be started");
        }
    }

    /// Plans the next start.
    fn start_again(&mut self) {
        let now = Instant::now();
        let delay = self.respawn.delay_after_death(now);
        if !delay.is_zero() {
            tracing::error!(delay_s = delay.as_secs(), "workers keep dying; waiting before the next");
        }
        self.start_at = Some(now + delay);
    }

    fn attend(&mut self, event: WorkerEvent) {
        let Some(attended) = &mut self.worker else {
            return;
        };
        let (number, now) = (attended.worker.number(), Instant::now());
        match event {
            WorkerEvent::Ready => {
                tracing::info!(worker = number, after_ms = ms_since(attended.worker.started_at), "worker is ready");
                if self.ended.is_some() || matches!(self.step, Step::Ordered { .. }) {
                    // What a drain allows is not changed by a late word of readiness.
                    return;
                }
                attended.kill_at = None;
                attended.ping_at = Some(now + PING_INTERVAL);
                self.tell.tell(Stage::Ready);
                self.succeeded();
            }
            WorkerEvent::Waiting => {
                let is_starting = !attended.worker.link.is_ready() && self.ended.is_none();
                if is_starting && matches!(self.step, Step::None | Step::Rehearsing { .. }) {
                    attended.kill_at = Some(now + READY_BOUND);
                }
            }
            WorkerEvent::LinkOver { may_linger } => {
                attended.ping_at = None;
                attended.kill_at = Some(now + if may_linger { LINGER_BOUND } else { Duration::ZERO });
            }
            WorkerEvent::Overdue => {
                let is_ready = attended.worker.link.is_ready();
                tracing::warn!(worker = number, is_ready, "killing a worker that is overdue");
                if let Some(ended) = &mut self.ended {
                    ended.was_forced = true;
                }
                attended.was_overdue = true;
                attended.kill();
            }
            WorkerEvent::PingDue => {
                attended.ping_at = Some(now + PING_INTERVAL);
                if !attended.worker.link.ping() {
                    tracing::warn!(worker = number, "killing a worker that gives no sign of life");
                    attended.kill();
                }
            }
            WorkerEvent::Dead | WorkerEvent::HandedOver => {}
        }
    }

    /// The worker is dead: whatever it was doing is the next one's.
    async fn bury(&mut self) -> Result<(), KeeperError> {
        let Some(attended) = self.worker.take() else {
            return Ok(());
        };
        let (link, number) = (Rc::clone(&attended.worker.link), attended.worker.number());
        let was_overdue = attended.was_overdue;
        let code = attended.worker.bury(&self.keeper).await;
        if self.ended.is_some() {
            return Ok(());
        }
        if let Some((settings, terms)) = self.take_order() {
            self.succeed(settings, terms).await;
            return Ok(());
        }
        match self.step {
            Step::Succeeding { .. } => {
                self.roll_back(match code {
                    _ if was_overdue => format!("its worker was not ready within {} s", SUCCESSOR_BOUND.as_secs()),
                    Some(code) => format!("its worker gave up with exit code {code} before it was ready"),
                    None => "its worker ended before it was ready".to_owned(),
                })
                .await;
            }
            Step::None | Step::Rehearsing { .. } | Step::Ordered { .. } => {
                if let Some(code) = code.filter(|_| number == 1 && !link.is_ready()) {
                    return Err(KeeperError::FirstWorker { code });
                }
                self.start_again();
            }
        }
        Ok(())
    }

    // The way out.

    pub(super) fn stop(&mut self, wish: Wish) {
        self.tell.tell(Stage::Stopping);
        self.give_up_handover("the gateway is about to stop");
        self.start_at = None;
        let retire = wish == Wish::Stop { retire: true };
        let is_forced = wish == Wish::StopAtOnce;
        let known = self.ended.unwrap_or(Ended { retire: false, was_forced: false });
        self.ended = Some(Ended { retire: known.retire || retire, was_forced: known.was_forced || is_forced });
        if is_forced {
            self.leaving.kill();
        } else {
            self.leaving.drain(retire, self.bounds.drain);
        }
        if let Some(attended) = &mut self.worker {
            attended.ping_at = None;
            if is_forced {
                attended.kill();
            } else {
                attended.worker.link.drain(retire);
                attended.kill_at = Some(Instant::now() + self.bounds.drain);
            }
        }
    }
}

impl Attended {
    pub(super) fn kill(&mut self) {
        self.worker.kill();
        (self.kill_at, self.ping_at) = (None, None);
    }
}

async fn next_of(attended: &mut Option<Attended>) -> WorkerEvent {
    let Some(Attended { worker, kill_at, ping_at, .. }) = attended else {
        return std::future::pending().await;
    };
    let (link, pidfd) = (Rc::clone(&worker.link), worker.pidfd());
    tokio::select! {
        biased;
        () = link.handed_over_said.notified() => WorkerEvent::HandedOver,
        () = pidfd.ended() => WorkerEvent::Dead,
        () = link.ready_said.notified() => WorkerEvent::Ready,
        () = link.waiting_said.notified() => WorkerEvent::Waiting,
        may_linger = worker.link_over() => WorkerEvent::LinkOver { may_linger },
        () = sleep_until_some(*kill_at) => WorkerEvent::Overdue,
        () = sleep_until_some(*ping_at) => WorkerEvent::PingDue,
    }
}

/// How the rehearsal ended, once it has.
async fn next_step(step: &mut Step) -> Result<Bytes, String> {
    let Step::Rehearsing { rehearsal, .. } = step else {
        return std::future::pending().await;
    };
    rehearsal.await.unwrap_or_else(|error: JoinError| Err(format!("the rehearsal failed: {error}")))
}

async fn sleep_until_some(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

fn ms_since(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// How long a worker may take until it says that it serves.
const READY_BOUND: Duration = Duration::from_secs(30);

/// How long a successor may take until then: meanwhile nobody serves, and there is a way back.
const SUCCESSOR_BOUND: Duration = Duration::from_secs(10);

/// How long a worker may live on after it closed its socket.
const LINGER_BOUND: Duration = Duration::from_secs(1);

/// How often a worker is asked for a sign of life.
const PING_INTERVAL: Duration = Duration::from_secs(5);
