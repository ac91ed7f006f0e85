//! The children of one server, all sessions together: when another one may be started (C4), and what became of the last.
//!
//! [`mainstay_core::supervise`] decides; here is its clock, its waiting callers and what people are shown of it. What is
//! to outlive this worker is a [`ServerMemory`]; whoever keeps it is told of each change.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use mainstay_core::supervise::{Counted, Memory, Phase, Start, Supervisor, Verdict};
use mainstay_core::supervise::{End as Ended, Standing};
use mainstay_core::time::Timestamp;
use mainstay_keeper::ChildId;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use super::end::{End, Why};
use super::program::{self, OnDisk, Stamp};
use super::running::Running;
use crate::failure::{ExitStatus, Failure};
use crate::server::Server;
use crate::task::spawn;
use crate::upstreams::Parts;
use crate::wire::lock;

/// The policy of one server, and the memory of it.
pub(crate) struct Supervision {
    /// The machine's clock never goes back, unlike the wall's: it is the wall's at this instant, and then the monotonic one.
    began: (Timestamp, Instant),
    now: Arc<dyn Fn() -> Timestamp + Send + Sync>,
    state: Mutex<State>,
    /// Starts may be free now that were not.
    lifted: Notify,
    /// Something has changed that is to outlive this worker.
    changed: Arc<Notify>,
}

struct State {
    machine: Supervisor,
    children: BTreeMap<Start, Alive>,
    ends: VecDeque<ChildEnd>,
    last_failure: Option<LastFailure>,
    counts: ChildCounts,
    /// What earlier workers have counted.
    before: ChildCounts,
}

/// What is remembered of the children of a server beyond the worker that has seen them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerMemory {
    /// [`Server::definition`] of the server then.
    pub definition: [u8; 32],
    /// Where its machine stands.
    pub machine: Memory,
    /// The last ends, the oldest first.
    pub ends: Vec<ChildEnd>,
    /// The last failure.
    pub last_failure: Option<LastFailure>,
    /// Totals of all workers so far.
    pub totals: ChildCounts,
}

/// A child that runs, as far as this worker knows.
struct Alive {
    child: Option<ChildId>,
    since: Timestamp,
    program: Option<Stamp>,
    running: Weak<Running>,
}

/// What a server failed with last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastFailure {
    /// When.
    pub at: Timestamp,
    /// What was seen. Without any word of the server's own.
    pub cause: Box<str>,
    /// The child's last words, what it was given in confidence masked.
    pub words: Box<str>,
}

/// How a child ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChildEnd {
    /// The keeper's number for it; 0 if that is not known.
    pub child: u64,
    /// When.
    pub at: Timestamp,
    /// Its exit status.
    pub status: ExitStatus,
    /// How long it had lived.
    pub lived: Duration,
    /// Why the gateway ended it; `None` if it did not.
    pub why: Option<Why>,
    /// Its last words, what it was given in confidence masked.
    pub words: Box<str>,
}

/// A child that runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChildSeen {
    /// The keeper's number for it.
    pub child: u64,
    /// Since when.
    pub since: Timestamp,
    /// How its program compares with the one on disk (C9).
    pub on_disk: OnDisk,
}

/// Running totals since the worker began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChildCounts {
    /// Children that were started and finished their handshake.
    pub up: u64,
    /// Children that were started and did not.
    pub never_up: u64,
    /// Starts that failed: no such program, a configuration that can't be used.
    pub not_started: u64,
    /// Starts that the gateway itself was not able to.
    pub gateway: u64,
    /// Children in the place of one that had ended.
    pub restarts: u64,
    /// Ends by themselves, with status 0.
    pub exited: u64,
    /// Ends by themselves, with another status.
    pub failed: u64,
    /// Ends with the status that asks for a restart.
    pub upgraded: u64,
    /// Ends by a signal that was not the gateway's.
    pub killed: u64,
    /// Ends that the gateway brought about.
    pub stopped: u64,
}

/// What is known of the children of a server.
#[derive(Clone, Debug)]
pub struct Supervised {
    /// Whether starts are free.
    pub phase: Phase,
    /// When the next start may be, by the wall clock, if not now.
    pub next_at: Option<Timestamp>,
    /// Failures in a row.
    pub failures: u32,
    /// The children that run, the oldest first.
    pub children: Vec<ChildSeen>,
    /// The last ends, the newest first.
    pub ends: Vec<ChildEnd>,
    /// The last failure.
    pub last_failure: Option<LastFailure>,
    /// Totals of this worker.
    pub counts: ChildCounts,
    /// Totals of this worker and those before it.
    pub totals: ChildCounts,
}

impl ChildCounts {
    fn plus(self, other: Self) -> Self {
        Self {
            up: self.up + other.up,
            never_up: self.never_up + other.never_up,
            not_started: self.not_started + other.not_started,
            gateway: self.gateway + other.gateway,
            restarts: self.restarts + other.restarts,
            exited: self.exited + other.exited,
            failed: self.failed + other.failed,
            upgraded: self.upgraded + other.upgraded,
            killed: self.killed + other.killed,
            stopped: self.stopped + other.stopped,
        }
    }
}

impl Supervision {
    pub(crate) fn new(parts: &Parts, changed: &Arc<Notify>) -> Arc<Self> {
        let mut seed = [0; 8];
        seed.copy_from_slice(&(parts.entropy)()[..8]);
        Arc::new(Self {
            began: ((parts.now)(), Instant::now()),
            now: Arc::clone(&parts.now),
            state: Mutex::new(State {
                machine: Supervisor::new(u64::from_le_bytes(seed)),
                children: BTreeMap::new(),
                ends: VecDeque::new(),
                last_failure: None,
                counts: ChildCounts::default(),
                before: ChildCounts::default(),
            }),
            lifted: Notify::new(),
            changed: Arc::clone(changed),
        })
    }

    /// Goes on from what earlier workers have seen. Of another definition than `server`'s only what has happened counts,
    /// and nothing is held against this one. To be called before any child is known.
    pub(crate) fn recall(&self, server: &Server, memory: ServerMemory) {
        let mut state = lock(&self.state);
        if memory.definition == server.definition() {
            state.machine = state.machine.recalled_from(&memory.machine, self.instant());
        }
        state.ends = memory.ends.into_iter().take(ENDS_KEPT_MAX).collect();
        (state.last_failure, state.before) = (memory.last_failure, memory.totals);
    }

    /// What a later worker goes on from.
    pub(crate) fn memory(&self, server: &Server) -> ServerMemory {
        let state = lock(&self.state);
        ServerMemory {
            definition: server.definition(),
            machine: state.machine.memory(),
            ends: state.ends.iter().cloned().collect(),
            last_failure: state.last_failure.clone(),
            totals: state.before.plus(state.counts),
        }
    }

    fn instant(&self) -> Timestamp {
        self.began.0.plus(self.began.1.elapsed())
    }

    /// Waits until another child may be started, if that is within `patience`.
    pub(super) async fn permit(self: &Arc<Self>, server: &Server, patience: Duration) -> Result<Lease, Failure> {
        let deadline = Instant::now() + patience;
        loop {
            let lifted = self.lifted.notified();
            tokio::pin!(lifted);
            lifted.as_mut().enable();
            let until = match self.ask() {
                Ok(lease) => return Ok(lease),
                Err(until) => until,
            };
            let pause = until.since(self.instant());
            if Instant::now() + pause > deadline {
                return Err(self.parked(server, pause));
            }
            tokio::select! {
                () = sleep(pause) => {}
                () = lifted => {}
            }
        }
    }

    fn ask(self: &Arc<Self>) -> Result<Lease, Timestamp> {
        let mut state = lock(&self.state);
        match state.machine.start(self.instant()) {
            Verdict::Go(start) => Ok(self.lease(&mut state, start, (self.now)())),
            Verdict::Wait { until } => Err(until),
        }
    }

    fn parked(&self, server: &Server, retry_after: Duration) -> Failure {
        let last = lock(&self.state).last_failure.clone();
        let (cause, words) = last.map(|last| (last.cause, last.words)).unwrap_or_default();
        Failure::Parked { server: server.name.clone(), cause, words, retry_after }
    }

    /// Takes in a child of an earlier worker, which was started at `since` by the wall clock.
    pub(super) fn adopt(self: &Arc<Self>, since: Timestamp) -> Lease {
        let mut state = lock(&self.state);
        let start = state.machine.adopt(self.instant().minus((self.now)().since(since)));
        self.lease(&mut state, start, since)
    }

    fn lease(self: &Arc<Self>, state: &mut State, start: Start, since: Timestamp) -> Lease {
        let alive = Alive { child: None, since, program: None, running: Weak::new() };
        state.children.insert(start, alive);
        Lease { supervision: Arc::clone(self), start }
    }

    /// Starts are free from now on, whatever was (C4).
    pub(crate) fn lift(&self) {
        lock(&self.state).machine.lift(self.instant());
        self.lifted.notify_waiters();
        self.changed.notify_one();
    }

    /// Ends the children that run, because an operator wants others, and returns how many have ended. They are ended all
    /// the same if nobody waits for it.
    pub(crate) async fn retire(&self) -> usize {
        let running: Vec<_> = lock(&self.state).children.values().filter_map(|alive| alive.running.upgrade()).collect();
        let retiring = running.into_iter().map(|running| {
            running.mark_retired(RESTARTED_CALLS_GRACE);
            spawn(running.retire(Why::Restart))
        });
        let retiring: Vec<_> = retiring.collect();
        let mut ended = 0;
        for retired in retiring {
            ended += usize::from(retired.await.unwrap_or(false));
        }
        ended
    }

    /// What is known; `program` is the one on disk now.
    pub(crate) fn view(&self, program: Option<Stamp>) -> Supervised {
        let state = lock(&self.state);
        let Standing { phase, next_at, failures } = state.machine.standing(self.instant());
        let seen = |alive: &Alive| {
            let on_disk = program::compare(alive.program, alive.since, program);
            Some(ChildSeen { child: alive.child?.get(), since: alive.since, on_disk })
        };
        Supervised {
            phase,
            next_at: next_at.map(|at| (self.now)().plus(at.since(self.instant()))),
            failures,
            children: state.children.values().filter_map(seen).collect(),
            ends: state.ends.iter().rev().cloned().collect(),
            last_failure: state.last_failure.clone(),
            counts: state.counts,
            totals: state.before.plus(state.counts),
        }
    }
}

/// A start that was allowed, and the child that comes of it. Dropped, it is nothing that the server has to answer for.
pub(super) struct Lease {
    supervision: Arc<Supervision>,
    start: Start,
}

impl Lease {
    /// When the child was started, by the wall clock; for a start that was just allowed, now.
    pub(super) fn since(&self) -> Timestamp {
        let state = lock(&self.supervision.state);
        state.children.get(&self.start).map_or_else(|| (self.supervision.now)(), |alive| alive.since)
    }

    /// There is a child now; its program was `program` when it was started.
    pub(super) fn attach(&self, child: ChildId, running: Weak<Running>, program: Option<Stamp>) {
        if let Some(alive) = lock(&self.supervision.state).children.get_mut(&self.start) {
            *alive = Alive { child: Some(child), since: alive.since, program, running };
        }
    }

    /// The child has finished its handshake; with `again`, in the place of one that had ended.
    pub(super) fn up(&self, again: bool) {
        let mut state = lock(&self.supervision.state);
        state.counts.up += 1;
        state.counts.restarts += u64::from(again);
        state.machine.up(self.supervision.instant(), self.start);
        self.supervision.changed.notify_one();
    }

    /// The child has not finished its handshake. `cause` says why, if its end does not.
    pub(super) fn never_up(&self, cause: Option<&str>) {
        lock(&self.supervision.state).counts.never_up += 1;
        self.supervision.changed.notify_one();
        if let Some(cause) = cause {
            self.fail(Ended::NeverUp, cause, "");
        }
    }

    /// The program could not be started.
    pub(super) fn not_started(&self, failure: &Failure) {
        let at_gateway = matches!(failure, Failure::Gateway { .. });
        {
            let counts = &mut lock(&self.supervision.state).counts;
            *(if at_gateway { &mut counts.gateway } else { &mut counts.not_started }) += 1;
        }
        self.supervision.changed.notify_one();
        if !at_gateway {
            self.fail(Ended::NeverUp, &failure.cause(), "");
        }
    }

    /// The child has ended.
    pub(super) fn ended(&self, end: &End) {
        let mut state = lock(&self.supervision.state);
        let Some(alive) = state.children.remove(&self.start) else { return };
        let child = alive.child.map_or(0, ChildId::get);
        // An earlier worker has seen this very end, and had no time to let the keeper forget the child.
        if child > 0 && state.ends.iter().any(|seen| seen.child == child && seen.at >= alive.since) {
            state.machine.end(self.supervision.instant(), self.start, Ended::Ours);
            return;
        }
        let (status, words) = (end.status(), end.stderr_tail());
        let (is_lost, ordered) = (end.exit.is_none(), end.why.is_some());
        let counts = &mut state.counts;
        *(match status.code {
            _ if ordered || is_lost => &mut counts.stopped,
            Some(mainstay_core::supervise::UPGRADE_CODE) => &mut counts.upgraded,
            Some(0) => &mut counts.exited,
            Some(_) => &mut counts.failed,
            None => &mut counts.killed,
        }) += 1;
        let at = (self.supervision.now)();
        if state.ends.len() >= ENDS_KEPT_MAX {
            state.ends.pop_front();
        }
        let lived = at.since(alive.since);
        state.ends.push_back(ChildEnd { child, at, status, lived, why: end.why, words: words.clone() });
        drop(state);
        let how = if ordered || is_lost { Ended::Ours } else { Ended::ByItself(status.code) };
        self.fail(how, &format!("its process {status}"), &words);
    }

    /// Tells the machine of an end, and people if it counts.
    fn fail(&self, how: Ended, cause: &str, words: &str) {
        let mut state = lock(&self.supervision.state);
        match state.machine.end(self.supervision.instant(), self.start, how) {
            Counted::Failure | Counted::Again => {
                let at = (self.supervision.now)();
                state.last_failure = Some(LastFailure { at, cause: cause.into(), words: words.into() });
            }
            Counted::Upgrade | Counted::Nothing => {}
        }
        self.supervision.changed.notify_one();
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut state = lock(&self.supervision.state);
        state.children.remove(&self.start);
        state.machine.end(self.supervision.instant(), self.start, Ended::Ours);
    }
}

/// How long the calls of processes that an operator restarts may go on.
const RESTARTED_CALLS_GRACE: Duration = Duration::from_secs(5);

/// How many ends of children are kept for people.
const ENDS_KEPT_MAX: usize = 8;
