//! The keeper's process from its start to its end.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rustix::process::{getpid, set_child_subreaper};
use tokio::runtime::{LocalOptions, LocalRuntime};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep_until};

use crate::identity::ProcessIdentity;
use crate::keeper::Keeper;
use crate::leaving::Leaving;
use crate::lock::Lock;
use crate::orphans;
use crate::protocol::{FRAME_BYTES_MAX, LISTENERS_MAX, Passing};
use crate::renewal::state::RespawnState;
use crate::renewal::{self, HeldSignals, RenewalError, Renewed};
use crate::respawn::Respawn;
use crate::state::{StateError, ensure_private_dir};
use crate::stderr::logs_dir;
use crate::sweep::sweep;
use crate::worker::Start;

use dispatch::Dispatcher;
use handover::{Carried, Step};
use renew::see_off;
use signals::{Signals, Wish};

mod dispatch;
mod handover;
mod rehearsal;
mod renew;
mod signals;
mod succession;

/// What the keeper is to hold and to run.
pub struct Plan {
    /// The worker's executable: the program that the keeper itself runs, which must not be what has taken its name since
    /// (requirement C9). Where there is one, `/proc/self/exe`.
    pub worker: PathBuf,
    /// Its arguments.
    pub worker_args: Vec<OsString>,
    /// The program that an upgrade takes: an absolute path.
    pub program: PathBuf,
    /// The arguments with which a program is asked whether it could take over. It answers on standard output with its
    /// settings and exits with 0, or says `error:` and why on standard error; it changes nothing. `--renewal-format N`,
    /// the form in which a keeper is taken over ([`RENEWAL_FORMAT`](crate::RENEWAL_FORMAT)), is put behind the first.
    pub rehearse_args: Vec<OsString>,
    /// The arguments with which this process was started, for the program that takes its place.
    pub serve_args: Vec<OsString>,
    /// The version of the program, for people.
    pub version: String,
    /// Named sockets, bound and listening. They are never closed while the keeper lives (requirement T1). Not looked at
    /// if there is `renewed`.
    pub listeners: Vec<(String, TcpListener)>,
    /// Opaque bytes for every worker. Not looked at if there is `renewed`.
    pub settings: Vec<u8>,
    /// The state directory.
    pub state_dir: PathBuf,
    /// The lock on it, which goes along when the keeper is renewed.
    pub lock: Arc<Lock>,
    /// How long a worker may take to drain before it is killed.
    pub drain_bound: Duration,
    /// How long a worker that was told to hand over may take to say that it has, before it is killed.
    pub handover_bound: Duration,
    /// How long it may live on after that.
    pub leave_bound: Duration,
    /// What the program before this one left, if this one took its place.
    pub renewed: Option<Renewed>,
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
    /// What the program before this one left can't be gone on from.
    #[error("could not go on from the program before")]
    Renewal(#[from] RenewalError),
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

/// Runs the keeper: ends what an earlier one left behind, or goes on from what the program before left, then keeps a
/// worker running until it is told to stop.
///
/// SIGTERM and SIGINT drain the worker and end all children; a second one kills them. SIGHUP is the wish for an upgrade.
/// The calling process belongs to the keeper: it becomes the reaper of all its descendants, and whatever ends among them
/// is reaped. SIGPIPE must be ignored, as it is in a Rust program unless it asks for it. Within an upgrade the process
/// may execute another program and never come back.
///
/// # Errors
/// Only what keeps the keeper from starting, its first worker included; later trouble is logged and lived with.
pub fn run(mut plan: Plan) -> Result<Ended, KeeperError> {
    if plan.listeners.len() > LISTENERS_MAX {
        return Err(KeeperError::Plan("too many listening sockets"));
    }
    if plan.settings.len() > FRAME_BYTES_MAX {
        return Err(KeeperError::Plan("the settings are too long"));
    }
    // Before anything is started, the sweep included.
    let strangers = if plan.renewed.is_none() { orphans::strangers() } else { BTreeSet::new() };
    if plan.renewed.is_none() {
        let swept = sweep(&plan.state_dir)?;
        tracing::debug!(?swept, "looked for what an earlier keeper left behind");
    }
    ensure_private_dir(&logs_dir(&plan.state_dir))?;
    if let Err(error) = set_child_subreaper(Some(getpid())) {
        tracing::warn!(%error, "orphans of children go to the system's first process, not to the keeper");
    }
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime: LocalRuntime = builder
        .enable_all()
        .build_local(LocalOptions::default())
        .map_err(KeeperError::system("start the keeper's runtime"))?;
    runtime.block_on(async {
        let start = match plan.renewed.take() {
            Some(renewed) => Begin::renewed(renewed, &plan)?,
            None => Begin::fresh(&mut plan, strangers)?,
        };
        let mut dispatcher = start.dispatcher(plan)?;
        let ended = dispatcher.run().await?;
        let ended = end_children(&dispatcher.keeper, &mut dispatcher.signals, ended).await;
        orphans::end_rest(&dispatcher.keeper, &dispatcher.strangers).await;
        Ok(ended)
    })
}

/// How workers and other programs are started.
struct Programs {
    worker: Start,
    program: PathBuf,
    rehearse_args: Vec<OsString>,
    serve_args: Vec<OsString>,
    /// The program before this one, while there may be a way back to it.
    previous: Option<OwnedFd>,
}

impl Programs {
    /// How the program that is to take over is asked whether it could.
    fn rehearsal(&self, upgrade: bool) -> Start {
        let program = if upgrade { &self.program } else { &self.worker.program };
        let form = ["--renewal-format".into(), renewal::FORMAT.to_string().into()];
        let mut args = self.rehearse_args.clone();
        let at = args.len().min(1);
        args.splice(at..at, form);
        Start { program: program.clone(), name: self.program.clone().into(), args }
    }

    fn forget_previous(&mut self) {
        self.previous = None;
    }
}

/// How long things may take that a worker does.
struct Bounds {
    drain: Duration,
    handover: Duration,
    leave: Duration,
}

/// Whom to tell what happens.
#[derive(Clone)]
struct Tell(Rc<dyn Fn(Stage)>);

impl Tell {
    fn tell(&self, stage: Stage) {
        (self.0)(stage);
    }

    /// Tells again and again that this thread does its work. Never returns.
    async fn tell_alive(self, interval: Duration) {
        loop {
            self.tell(Stage::Alive);
            tokio::time::sleep(interval).await;
        }
    }
}

/// What the loop begins with.
struct Begin {
    keeper: Rc<Keeper>,
    last_worker: u64,
    respawn: Respawn,
    leaving: Rc<Leaving>,
    /// Signals to stop that were counted already.
    stops: u32,
    /// Signals that wait until there is somebody to take them.
    held: Option<HeldSignals>,
    /// Workers that were leaving.
    leavers: Vec<renewal::Leaving<OwnedFd>>,
    previous_program: Option<OwnedFd>,
    previous_settings: Bytes,
    carried: Carried,
    came_back: Option<String>,
}

impl Begin {
    fn fresh(plan: &mut Plan, strangers: BTreeSet<ProcessIdentity>) -> Result<Self, KeeperError> {
        let identity = ProcessIdentity::of_self().map_err(KeeperError::system("read the keeper's own identity"))?;
        let (listeners, settings) = (std::mem::take(&mut plan.listeners), std::mem::take(&mut plan.settings));
        let keeper = Rc::new(Keeper::new(identity, listeners, settings, &plan.state_dir));
        Ok(Self {
            leaving: Leaving::new(Rc::clone(&keeper)),
            keeper,
            last_worker: 0,
            respawn: Respawn::default(),
            stops: 0,
            held: None,
            leavers: Vec::new(),
            previous_program: None,
            previous_settings: Bytes::new(),
            carried: Carried { terms: None, last: None, strangers },
            came_back: None,
        })
    }

    fn renewed(renewed: Renewed, plan: &Plan) -> Result<Self, KeeperError> {
        let restored = renewed.restore(&plan.state_dir)?;
        let (keeper, course) = (restored.keeper, restored.course);
        let carried = Carried::decode(course.handover).unwrap_or_else(|error| {
            tracing::error!(%error, "nothing is known of the handover within which the keeper was renewed");
            Carried { terms: None, last: None, strangers: BTreeSet::new() }
        });
        for passed in course.connections {
            let passing = Passing { listener: passed.listener, read: passed.read };
            keeper.passed().hold(passing, Some(passed.socket));
        }
        let RespawnState { starts_ago, delayed } = course.respawn;
        Ok(Self {
            leaving: Leaving::new(Rc::clone(&keeper)),
            keeper,
            last_worker: course.last_worker,
            respawn: Respawn::from_parts(&starts_ago, delayed, Instant::now()),
            stops: course.signals,
            held: Some(restored.signals),
            leavers: course.leaving,
            previous_program: Some(restored.program),
            previous_settings: course.previous_settings,
            carried,
            came_back: restored.came_back,
        })
    }

    fn dispatcher(self, plan: Plan) -> Result<Dispatcher, KeeperError> {
        let keeper = self.keeper;
        keeper.set_version(plan.version);
        keeper.set_handover(self.carried.last);
        let child_signals = signal(SignalKind::child()).map_err(KeeperError::system("watch for ended processes"))?;
        let signals = Signals::new(Rc::clone(&keeper), self.stops).map_err(KeeperError::system("watch for signals"))?;
        // What waited is taken from here on, and nothing was started yet that would have it wait.
        drop(self.held);
        spawn_local(orphans::reap(Rc::clone(&keeper), child_signals));
        let tell = Tell(plan.notify.into());
        if let Some(interval) = plan.alive_every {
            spawn_local(tell.clone().tell_alive(interval));
        }
        for leaver in self.leavers {
            see_off(&keeper, &self.leaving, leaver);
        }
        let name = plan.program.clone().into();
        let mut dispatcher = Dispatcher {
            keeper,
            programs: Programs {
                worker: Start { program: plan.worker, name, args: plan.worker_args },
                program: plan.program,
                rehearse_args: plan.rehearse_args,
                serve_args: plan.serve_args,
                previous: self.previous_program,
            },
            bounds: Bounds { drain: plan.drain_bound, handover: plan.handover_bound, leave: plan.leave_bound },
            tell,
            signals,
            respawn: self.respawn,
            lock: plan.lock,
            strangers: self.carried.strangers,
            last_worker: self.last_worker,
            leaving: self.leaving,
            step: Step::None,
            worker: None,
            start_at: Some(Instant::now()),
            ended: None,
        };
        match (self.carried.terms, self.came_back) {
            (Some(terms), None) => dispatcher.await_successor(self.previous_settings, terms),
            (Some(terms), Some(reason)) => {
                dispatcher.keeper.replace_settings(self.previous_settings);
                dispatcher.not_succeeded(&terms, String::new(), reason);
            }
            // Back from a program whose worker did not get ready, which has said so.
            (None, _) if self.last_worker > 0 => dispatcher.tell.tell(Stage::HandoverEnded),
            (None, _) => {}
        }
        Ok(dispatcher)
    }
}

/// Ends all children side by side and waits until they are gone, within a bound.
async fn end_children(keeper: &Keeper, signals: &mut Signals, mut ended: Ended) -> Ended {
    for child in keeper.children() {
        if ended.was_forced && signals.stops > 1 { child.order_kill() } else { child.order_end(STOP_GRACE) }
    }
    let give_up_at = Instant::now() + STOP_BOUND;
    while keeper.children().iter().any(|child| !child.is_gone()) {
        tokio::select! {
            () = keeper.child_is_gone.notified() => {}
            wish = signals.next() => {
                if wish == Wish::StopAtOnce {
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

/// The grace of children when the keeper stops.
const STOP_GRACE: Duration = Duration::from_secs(2);

/// How long the end of all children may take: twice the grace, and the killing.
const STOP_BOUND: Duration = Duration::from_secs(8);
