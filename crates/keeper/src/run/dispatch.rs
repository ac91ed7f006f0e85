//! The keeper's loop: one event after another, and what is done about each.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::task::{JoinError, spawn_local};
use tokio::time::{Instant, sleep_until};

use super::handover::{Step, Terms};
use super::rehearsal::rehearse;
use super::renew::NotRenewed;
use super::signals::{Signals, Wish};
use super::{Bounds, Ended, KeeperError, Programs, Stage, Tell};
use crate::identity::ProcessIdentity;
use crate::keeper::{Asked, Keeper, UNDER_WAY};
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
    kill_at: Option<Instant>,
    ping_at: Option<Instant>,
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

    // Handovers.

    fn is_succeeding(&self) -> bool {
        matches!(self.step, Step::Succeeding { .. })
    }

    /// Takes the handover out of the step in which a successor was started, if it is there.
    fn take_succession(&mut self) -> Option<(Bytes, Terms)> {
        match std::mem::replace(&mut self.step, Step::None) {
            Step::Succeeding { previous_settings, terms } => Some((previous_settings, terms)),
            other @ (Step::None | Step::Rehearsing { .. } | Step::Ordered { .. }) => {
                self.step = other;
                None
            }
        }
    }

    /// Takes it out of the step in which the worker in charge was told, if it is there.
    fn take_order(&mut self) -> Option<(Bytes, Terms)> {
        match std::mem::replace(&mut self.step, Step::None) {
            Step::Ordered { settings, terms } => Some((settings, terms)),
            other @ (Step::None | Step::Rehearsing { .. } | Step::Succeeding { .. }) => {
                self.step = other;
                None
            }
        }
    }

    /// Somebody wants another program, or a worker other settings: first it is asked whether they would do.
    fn begin_handover(&mut self, asked: Option<Asked>) {
        let upgrade = asked.as_ref().is_none_or(|asked| asked.upgrade);
        let refusal = match (&self.ended, &self.step) {
            (Some(_), _) => Some("the gateway is about to stop"),
            (None, Step::None) => None,
            (None, _) => Some(UNDER_WAY),
        };
        if let Some(reason) = refusal {
            tracing::warn!(upgrade, reason, "a handover is refused");
            if let Some(asked) = asked {
                asked.refuse(reason);
            }
            return;
        }
        tracing::info!(upgrade, "a handover is rehearsed");
        let start = self.programs.rehearsal(upgrade);
        let rehearsal = spawn_local(rehearse(Rc::clone(&self.keeper), start));
        self.step = Step::Rehearsing { rehearsal, asked, upgrade };
    }

    /// The rehearsal is over. Nothing has changed until here.
    async fn rehearsed(&mut self, result: Result<Bytes, String>) {
        let Step::Rehearsing { asked, upgrade, .. } = std::mem::replace(&mut self.step, Step::None) else {
            return;
        };
        let terms = Terms::begin(upgrade, self.keeper.version());
        let settings = match result {
            Ok(settings) => settings,
            Err(reason) => {
                tracing::warn!(upgrade, reason, "a handover is refused; everything stays as it is");
                if let Some(asked) = asked {
                    asked.refuse(&reason);
                }
                self.keeper.set_handover(Some(terms.not_succeeded(String::new(), reason)));
                return;
            }
        };
        if let Some(asked) = asked {
            asked.grant();
        }
        self.tell.tell(Stage::HandoverBegun);
        let Some(attended) = &mut self.worker else {
            return self.succeed(settings, terms).await;
        };
        attended.ping_at = None;
        if attended.worker.link.is_ready() {
            attended.worker.link.order_handover();
            attended.kill_at = Some(Instant::now() + self.bounds.handover);
        } else {
            // There is nothing to hand over.
            attended.kill();
        }
        self.step = Step::Ordered { settings, terms };
    }

    /// The worker that was in charge has said its last word on children.
    async fn handed_over(&mut self) {
        if self.ended.is_some() {
            // It is to exit anyway.
            return;
        }
        let Some((settings, terms)) = self.take_order() else {
            return;
        };
        if let Some(attended) = self.worker.take() {
            let (connections, closed) = self.keeper.passed().count();
            tracing::info!(worker = attended.worker.number(), connections, closed, "worker has handed over");
            self.leaving.add(attended.worker, self.bounds.leave);
        }
        self.succeed(settings, terms).await;
    }

    /// Nobody is in charge: now the successor is.
    async fn succeed(&mut self, settings: Bytes, terms: Terms) {
        if terms.upgrade {
            let not_renewed = self.renew(settings, &terms).await;
            self.not_succeeded(&terms, String::new(), reason_of(&not_renewed));
            self.start_at = self.ended.is_none().then(Instant::now);
            return;
        }
        let previous_settings = self.keeper.replace_settings(settings);
        self.await_successor(previous_settings, terms);
    }

    /// The next worker is the successor.
    pub(super) fn await_successor(&mut self, previous_settings: Bytes, terms: Terms) {
        // What it is told comes true by its getting ready.
        self.keeper.set_handover(Some(terms.succeeded(self.keeper.version())));
        self.step = Step::Succeeding { previous_settings, terms };
        self.start_at = Some(Instant::now());
    }

    /// The successor serves.
    fn succeeded(&mut self) {
        let Some((_, terms)) = self.take_succession() else {
            return;
        };
        self.programs.forget_previous();
        let (from, to) = (&terms.from_version, self.keeper.version());
        let ms = terms.lasted().as_millis();
        tracing::info!(upgrade = terms.upgrade, from, to, nobody_accepted_ms = ms, "the handover succeeded");
        self.tell.tell(Stage::HandoverEnded);
    }

    /// The successor does not get ready: everything is put back, once. Should that fail too, workers are tried again
    /// and again, as after a crash.
    async fn roll_back(&mut self, reason: String) {
        let Some((previous_settings, terms)) = self.take_succession() else {
            return;
        };
        self.not_succeeded(&terms, self.keeper.version(), reason);
        let settings = self.keeper.replace_settings(previous_settings);
        if terms.upgrade {
            match self.go_back().await {
                NotRenewed::Stopping => {}
                NotRenewed::Failed(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::error!(error, "the program before can't be brought back; workers of this one are tried");
                    self.keeper.replace_settings(settings);
                }
            }
        }
        self.start_at = self.ended.is_none().then(Instant::now);
    }

    pub(super) fn not_succeeded(&mut self, terms: &Terms, to_version: String, reason: String) {
        let upgrade = terms.upgrade;
        tracing::warn!(upgrade, reason, "the handover did not succeed; what was before is put back");
        self.keeper.set_handover(Some(terms.not_succeeded(to_version, reason)));
        self.tell.tell(Stage::HandoverEnded);
    }

    fn give_up_handover(&mut self, reason: &str) {
        match std::mem::replace(&mut self.step, Step::None) {
            Step::None => {}
            Step::Rehearsing { rehearsal, asked, .. } => {
                rehearsal.abort();
                if let Some(asked) = asked {
                    asked.refuse(reason);
                }
            }
            Step::Ordered { terms, .. } | Step::Succeeding { terms, .. } => {
                self.not_succeeded(&terms, String::new(), reason.to_owned());
            }
        }
    }
}

impl Attended {
    fn kill(&mut self) {
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

/// The whole chain in one line.
fn reason_of(error: &NotRenewed) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
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
