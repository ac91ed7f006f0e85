//! The keeper's process from its start to its end.

use std::ffi::OsString;
use std::io;
use std::net::TcpListener;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use rustix::process::{getpid, set_child_subreaper};
use tokio::runtime::{LocalOptions, LocalRuntime};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Instant, sleep_until};

use crate::identity::ProcessIdentity;
use crate::keeper::Keeper;
use crate::orphans;
use crate::protocol::{FRAME_BYTES_MAX, LISTENERS_MAX};
use crate::respawn::Respawn;
use crate::state::{StateError, ensure_private_dir};
use crate::stderr::logs_dir;
use crate::sweep::sweep;
use crate::worker::Worker;

/// What the keeper is to hold and to run.
pub struct Plan {
    /// The worker's executable, normally the keeper's own.
    pub worker: PathBuf,
    /// Its arguments.
    pub worker_args: Vec<OsString>,
    /// Named sockets, bound and listening. They are never closed while the keeper lives (requirement T1).
    pub listeners: Vec<(String, TcpListener)>,
    /// Opaque bytes for every worker.
    pub settings: Vec<u8>,
    /// The state directory, whose lock the caller holds.
    pub state_dir: PathBuf,
    /// How long a worker may take to drain before it is killed.
    pub drain_bound: Duration,
    /// Whom to tell what happens, on the keeper's thread: it must not block.
    pub notify: Box<dyn Fn(Stage)>,
    /// How often [`Stage::Alive`] is told; never without it.
    pub alive_every: Option<Duration>,
}

/// What happens to the gateway, for whoever supervises it from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// A worker is ready. Told of each.
    Ready,
    /// A handover to another worker begins.
    HandoverBegun,
    /// It is over, well or not.
    HandoverEnded,
    /// The way out begins.
    Stopping,
    /// The keeper's loop runs.
    Alive,
}

/// How the keeper came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Whether the gateway was to go for good, rather than to be started again.
    pub retire: bool,
    /// Whether it was hurried, so that something was killed instead of drained.
    pub was_forced: bool,
}

/// Why the keeper could not do its work.
#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    /// The plan can't be carried out.
    #[error("the plan is unusable: {0}")]
    Plan(&'static str),
    /// The state directory can't be used.
    #[error(transparent)]
    State(#[from] StateError),
    /// The first worker could not be started; later ones are tried again.
    #[error("could not start the worker `{path}`")]
    Worker {
        /// Its executable.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// The first worker gave up before it was ready. It has said why; another would fare no better.
    #[error("the worker could not serve and gave up with exit code {code}")]
    FirstWorker {
        /// Its exit code.
        code: i32,
    },
    /// The operating system refused what the keeper can't do without.
    #[error("could not {act}")]
    System {
        /// What was attempted.
        act: &'static str,
        /// The reason.
        #[source]
        source: io::Error,
    },
}

impl KeeperError {
    fn system(act: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { act, source }
    }
}

/// Runs the keeper: ends what an earlier one left behind, then keeps a worker running until it is told to stop.
///
/// SIGTERM and SIGINT drain the worker and end all children; a second one kills them. The calling process belongs to
/// the keeper: it becomes the reaper of all its descendants, and whatever ends among them is reaped. SIGPIPE must be
/// ignored, as it is in a Rust program unless it asks for it.
///
/// # Errors
/// Only what keeps the keeper from starting, its first worker included; later trouble is logged and lived with.
pub fn run(plan: Plan) -> Result<Ended, KeeperError> {
    if plan.listeners.len() > LISTENERS_MAX {
        return Err(KeeperError::Plan("too many listening sockets"));
    }
    if plan.settings.len() > FRAME_BYTES_MAX {
        return Err(KeeperError::Plan("the settings are too long"));
    }
    let strangers = orphans::strangers();
    let swept = sweep(&plan.state_dir)?;
    tracing::debug!(?swept, "looked for what an earlier keeper left behind");
    ensure_private_dir(&logs_dir(&plan.state_dir))?;
    if let Err(error) = set_child_subreaper(Some(getpid())) {
        tracing::warn!(%error, "orphans of children go to the system's first process, not to the keeper");
    }
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime: LocalRuntime = builder
        .enable_all()
        .build_local(LocalOptions::default())
        .map_err(KeeperError::system("start the keeper's runtime"))?;
    let identity = ProcessIdentity::of_self().map_err(KeeperError::system("read the keeper's own identity"))?;
    runtime.block_on(async {
        let keeper = Rc::new(Keeper::new(identity, plan.listeners, plan.settings, &plan.state_dir));
        let child_signals = signal(SignalKind::child()).map_err(KeeperError::system("watch for ended processes"))?;
        tokio::task::spawn_local(orphans::reap(Rc::clone(&keeper), child_signals));
        let notify: Rc<dyn Fn(Stage)> = plan.notify.into();
        if let Some(interval) = plan.alive_every {
            tokio::task::spawn_local(tell_alive(Rc::clone(&notify), interval));
        }
        let start = Start { program: plan.worker, args: plan.worker_args, drain_bound: plan.drain_bound, notify };
        let mut stops = Stops::new(Rc::clone(&keeper)).map_err(KeeperError::system("watch for signals"))?;
        let ended = keep_worker(&keeper, &start, &mut stops).await?;
        let ended = end_children(&keeper, &mut stops, ended).await;
        orphans::end_rest(&keeper, &strangers).await;
        Ok(ended)
    })
}

/// How workers are started and ended.
struct Start {
    program: PathBuf,
    args: Vec<OsString>,
    drain_bound: Duration,
    notify: Rc<dyn Fn(Stage)>,
}

/// Tells again and again that this thread does its work. Never returns.
async fn tell_alive(notify: Rc<dyn Fn(Stage)>, interval: Duration) {
    loop {
        notify(Stage::Alive);
        tokio::time::sleep(interval).await;
    }
}

/// Where the wish to stop comes from.
struct Stops {
    keeper: Rc<Keeper>,
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
    signals: u32,
}

/// A wish to stop.
#[derive(Clone, Copy, Debug)]
enum Stop {
    /// Drain, then end. The first signal, or a worker's wish.
    Orderly { retire: bool },
    /// Nobody wants to wait any more.
    AtOnce,
}

impl Stops {
    fn new(keeper: Rc<Keeper>) -> io::Result<Self> {
        Ok(Self {
            keeper,
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
            signals: 0,
        })
    }

    /// Waits for the next wish to stop. Cancel-safe.
    async fn next(&mut self) -> Stop {
        loop {
            tokio::select! {
                Some(()) = self.terminate.recv() => return self.signalled(),
                Some(()) = self.interrupt.recv() => return self.signalled(),
                Some(()) = self.hang_up.recv() => tracing::info!("SIGHUP is ignored"),
                () = self.keeper.shutdown_asked.notified() => {
                    if let Some(retire) = self.keeper.take_shutdown() {
                        tracing::info!(retire, "the worker asks to stop");
                        return Stop::Orderly { retire };
                    }
                }
            }
        }
    }

    fn signalled(&mut self) -> Stop {
        self.signals += 1;
        tracing::info!(count = self.signals, "told to stop by a signal");
        if self.signals == 1 { Stop::Orderly { retire: false } } else { Stop::AtOnce }
    }
}

/// Keeps a worker running until a stop is wanted and the last one is gone.
async fn keep_worker(keeper: &Rc<Keeper>, start: &Start, stops: &mut Stops) -> Result<Ended, KeeperError> {
    let mut respawn = Respawn::default();
    let mut number = 0;
    loop {
        number += 1;
        respawn.started(Instant::now());
        match Worker::start(keeper, &start.program, &start.args, number) {
            Ok(worker) => match attend(keeper, worker, start, stops).await {
                Attended::Stopped(ended) => return Ok(ended),
                Attended::GaveUp { code } if number == 1 => return Err(KeeperError::FirstWorker { code }),
                Attended::GaveUp { .. } | Attended::Died => {}
            },
            Err(source) if number == 1 => {
                return Err(KeeperError::Worker { path: start.program.clone(), source });
            }
            Err(error) => tracing::error!(worker = number, %error, "could not start a worker"),
        }
        let delay = respawn.delay_after_death(Instant::now());
        if delay.is_zero() {
            continue;
        }
        tracing::error!(delay_s = delay.as_secs(), "workers keep dying; waiting before the next");
        tokio::select! {
            () = tokio::time::sleep(delay) => {}
            stop = stops.next() => {
                (start.notify)(Stage::Stopping);
                return Ok(ended_by(stop));
            }
        }
    }
}

fn ended_by(stop: Stop) -> Ended {
    match stop {
        Stop::Orderly { retire } => Ended { retire, was_forced: false },
        Stop::AtOnce => Ended { retire: false, was_forced: true },
    }
}

/// How a worker came to its end.
enum Attended {
    /// A stop was wanted.
    Stopped(Ended),
    /// It gave up by itself before it was ever ready.
    GaveUp { code: i32 },
    /// It died; another is needed.
    Died,
}

/// Sees the worker to its end.
async fn attend(keeper: &Keeper, mut worker: Worker, start: &Start, stops: &mut Stops) -> Attended {
    let mut ended = None;
    let mut kill_at = Some(worker.started_at + READY_BOUND);
    let (link, pidfd) = (Rc::clone(&worker.link), Rc::clone(&worker.pidfd));
    loop {
        tokio::select! {
            () = pidfd.ended() => {
                let code = worker.bury(keeper).await;
                return match (ended, code) {
                    (Some(ended), _) => Attended::Stopped(ended),
                    (None, Some(code)) if !link.is_ready() => Attended::GaveUp { code },
                    (None, _) => Attended::Died,
                };
            }
            () = link.ready_said.notified() => {
                tracing::info!(worker = worker.number(), after_ms = ms_since(worker.started_at), "worker is ready");
                // What a drain allows is not changed by a late word of readiness.
                kill_at = kill_at.filter(|_| ended.is_some());
                (start.notify)(Stage::Ready);
            }
            may_linger = worker.link_over() => {
                let grace = if may_linger { LINGER_BOUND } else { Duration::ZERO };
                kill_at = Some(Instant::now() + grace);
            }
            stop = stops.next() => {
                (start.notify)(Stage::Stopping);
                let (known, now) = (ended.unwrap_or(Ended { retire: false, was_forced: false }), ended_by(stop));
                ended = Some(Ended { retire: known.retire || now.retire, was_forced: known.was_forced || now.was_forced });
                match stop {
                    Stop::Orderly { retire } => {
                        link.drain(retire);
                        kill_at = Some(Instant::now() + start.drain_bound);
                    }
                    Stop::AtOnce => worker.kill(),
                }
            }
            () = sleep_until(kill_at.unwrap_or_else(Instant::now)), if kill_at.is_some() => {
                tracing::warn!(worker = worker.number(), is_ready = link.is_ready(), "killing a worker that is overdue");
                if let Some(ended) = &mut ended {
                    ended.was_forced = true;
                }
                worker.kill();
                kill_at = None;
            }
        }
    }
}

fn ms_since(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// Ends all children side by side and waits until they are gone, within a bound.
async fn end_children(keeper: &Keeper, stops: &mut Stops, mut ended: Ended) -> Ended {
    for child in keeper.children() {
        if ended.was_forced && stops.signals > 1 { child.order_kill() } else { child.order_end(STOP_GRACE) }
    }
    let give_up_at = Instant::now() + STOP_BOUND;
    while keeper.children().iter().any(|child| !child.is_gone()) {
        tokio::select! {
            () = keeper.child_is_gone.notified() => {}
            stop = stops.next() => {
                if matches!(stop, Stop::AtOnce) {
                    ended.was_forced = true;
                    keeper.children().iter().for_each(|child| child.order_kill());
                }
            }
            () = sleep_until(give_up_at) => {
                let left = keeper.children().iter().filter(|child| !child.is_gone()).count();
                tracing::error!(left, "children can't be ended; the next keeper will try again");
                break;
            }
        }
    }
    ended
}

/// How long a worker may take until it says that it serves.
const READY_BOUND: Duration = Duration::from_secs(30);

/// How long a worker may live on after it closed its socket.
const LINGER_BOUND: Duration = Duration::from_secs(1);

/// The grace of children when the keeper stops.
const STOP_GRACE: Duration = Duration::from_secs(2);

/// How long the end of all children may take: twice the grace, and the killing.
const STOP_BOUND: Duration = Duration::from_secs(8);
