//! The worker's heart: look a session up, let its machine decide, make that durable, apply it, perform it.
//!
//! The engine owns the table of live sessions and every change to one. It knows no HTTP; `serve` speaks to clients
//! in its name, `reconcile` repairs in its name, `admin` reads it.

mod arriving;
pub mod call;
pub mod census;
pub mod conversation;
pub mod eras;
pub mod find;
pub mod finish;
pub mod handover;
pub mod leavers;
pub mod listen;
pub mod live;
pub mod modern;
pub mod open;
pub mod operate;
pub mod questions;
pub mod retire;
pub mod rewrite;
pub mod seal;
pub mod servers;
pub mod stream;
pub mod suspend;
pub mod tally;
pub mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use dashmap::DashMap;
use mainstay_core::audit::{Action, Actor, AuditEntry};
use mainstay_core::call::StreamId;
use mainstay_core::code::Code;
use mainstay_core::id::{Epoch, ServerName, SessionKey};
use mainstay_core::limit::Limit;
use mainstay_core::principal::Principal;
use mainstay_core::session::{Contract, Refusal, State, Terms};
use mainstay_core::time::Timestamp;
use mainstay_keeper::ChildId;
use mainstay_keeper::client::{Custody, Held};
use mainstay_store::journal::Journal;
use mainstay_store::keys::Keyring;
use mainstay_store::{Store, Write};
use mainstay_upstream::{Failure, Notice, Server, Upstreams};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};

use crate::engine::arriving::Waiting;
use crate::engine::census::Census;
use crate::engine::conversation::Register;
use crate::engine::leavers::Leavers;
use crate::engine::live::{Latch, Live};
use crate::engine::modern::attendance::Attendance;
use crate::engine::questions::Forwarding;
use crate::engine::stream::Journaled;
use crate::engine::tally::Tally;
use crate::runtime::Clock;
use crate::runtime::beat::Beat;
use crate::telemetry::metrics::Metrics;

/// What the operator's configuration says about sessions.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The times of the session machine.
    pub terms: Terms,
    /// A call answered within this is answered as plain JSON (R3).
    pub answer_json_within: Duration,
    /// How long calls in flight may go on once a drain began.
    pub drain_grace: Duration,
    /// Calls in flight of one session.
    pub calls_in_flight_max: usize,
    /// Streams kept for one session.
    pub streams_max: usize,
    /// Fingerprint of the way that clients authenticate (S15).
    pub contract: Contract,
}

/// When a client's GET is answered with a stream (`listen_stream`, R5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ListenStream {
    /// Where the server or client declared anything that could be sent on it.
    #[default]
    Auto,
    /// Always.
    Always,
    /// Never: 405.
    Never,
}

/// A configured server, as the engine serves it.
pub struct Served {
    /// How it is reached.
    pub server: Arc<Server>,
    /// When its sessions have a listening stream.
    pub listen_stream: ListenStream,
    /// After how long an unused session's instance is let go; `None` for never (S11).
    pub suspend_after: Option<Duration>,
    /// Whether its child holds state that must not be let go.
    pub stateful: bool,
    /// Which era of the protocol its endpoint offers.
    pub offer: modern::Offer,
    /// Stateless requests in flight.
    pub stateless: Tally,
    /// When its failures were last told to the operator, in milliseconds of Unix time.
    pub warned_at: AtomicU64,
}

/// The engine of one worker.
pub struct Engine {
    pub(crate) store: Store,
    pub(crate) journal: Journal,
    pub(crate) keyring: Arc<Keyring>,
    pub(crate) custody: Custody,
    pub(crate) upstreams: Arc<Upstreams>,
    pub(crate) servers: BTreeMap<ServerName, Served>,
    pub(crate) census: Census,
    pub(crate) attendance: Attendance,
    /// Sessions of the gateway's own, by whom they are for.
    pub(crate) conversations: Register,
    /// Sessions that are being opened: a drain waits for them, since half an opening leaves something at the server.
    pub(crate) openings: Tally,
    /// Requests that wait for the answer of an HTTP server.
    pub(crate) outstaying: Tally,
    /// Kept while there are calls.
    pub(crate) beat: Beat,
    /// Earlier workers that stay for calls.
    pub(crate) leavers: Leavers,
    /// Calls to whose change of a setting the server has agreed while this worker gives way.
    pub(crate) agreed: Mutex<BTreeSet<(SessionKey, StreamId)>>,
    /// Clients' answers on their way to servers.
    pub(crate) forwarding: Forwarding,
    pub(crate) metrics: Metrics,
    key_folder: Option<PathBuf>,
    state_dir: PathBuf,
    /// When an unproven credential was last put on record, in milliseconds of Unix time.
    unproven_at: AtomicU64,
    /// One rotation of the keys at a time.
    rotating: tokio::sync::Mutex<()>,
    /// When a stranger at a session was last put on record.
    strangers: Mutex<BTreeMap<SessionKey, Timestamp>>,
    pub(crate) settings: Settings,
    pub(crate) clock: Clock,
    pub(crate) epoch: Epoch,
    pub(crate) live: DashMap<SessionKey, Arc<Live>>,
    arriving: Waiting,
    pub(crate) stopping: Latch,
    closing: Latch,
    handing: Latch,
    left: Latch,
    /// Rung when the deadlines that the reaper knows may have become too late.
    pub(crate) deadlines: Notify,
    /// Rung when there is a delete to pay.
    pub(crate) owed: Notify,
    pub(crate) facts: view::Facts,
    held: Mutex<BTreeMap<SessionKey, Held>>,
    lanes: Vec<tokio::sync::Mutex<()>>,
    next_number: AtomicU64,
    pub(crate) notices: mpsc::Sender<(SessionKey, Notice)>,
}

/// What an engine is made of.
pub struct Parts {
    /// The ledger, its epoch begun.
    pub store: Store,
    /// What of streams outlives a worker.
    pub journal: Journal,
    /// Its keys.
    pub keyring: Arc<Keyring>,
    /// The way to the keeper.
    pub custody: Custody,
    /// The way to the servers.
    pub upstreams: Arc<Upstreams>,
    /// The configured servers.
    pub servers: Vec<Served>,
    /// The count of live sessions.
    pub census: Census,
    /// The count of what needs no session.
    pub attendance: Attendance,
    /// Earlier workers that have handed over and still live.
    pub leavers: Leavers,
    /// The metrics.
    pub metrics: Metrics,
    /// Where the key files are; `None` for a ledger in memory.
    pub key_folder: Option<PathBuf>,
    /// Where the logs of children are.
    pub state_dir: PathBuf,
    /// The operator's settings.
    pub settings: Settings,
    /// The clock.
    pub clock: Clock,
    /// This worker's life.
    pub epoch: Epoch,
    /// What `status` tells of the processes.
    pub facts: view::Facts,
}

/// Who sends a request: whose sessions it may use, and the name of the agent that it says it is (I1, I2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Fixed at `initialize`, compared ever after.
    pub principal: Principal,
    /// `X-Agent-Name`. One that disagrees with its session's is refused.
    pub agent: Option<Box<str>>,
}

/// A connection that reads a stream.
pub struct Reading {
    engine: Arc<Engine>,
    live: Arc<Live>,
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.live.end_reading();
        self.engine.hint(self.live.touch(self.engine.now(), &self.engine.settings.terms));
    }
}

/// Why a request is not served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The reason.
    pub code: Code,
    /// A sentence for people: what was wrong, and what to do.
    pub text: String,
    /// The server concerned, where there is one.
    pub server: Option<ServerName>,
    /// The limit that is reached, if that is why.
    pub limit: Option<Limit>,
    /// When to try again, if that is known.
    pub retry_after: Option<Duration>,
}

impl Refused {
    /// A refusal that concerns no server.
    pub fn new(code: Code, text: impl Into<String>) -> Self {
        Self { code, text: text.into(), server: None, limit: None, retry_after: None }
    }

    /// A refusal because `limit` is reached (S12); the text names it, too, for people.
    pub fn at_limit(code: Code, limit: Limit, text: impl Into<String>) -> Self {
        Self { limit: Some(limit), ..Self::new(code, text) }
    }
}

impl Engine {
    /// An engine, and the queue of notices that [`listen::attend`] must read.
    pub fn new(parts: Parts) -> (Arc<Self>, mpsc::Receiver<(SessionKey, Notice)>) {
        let (notices, queue) = mpsc::channel(NOTICES_MAX);
        let servers = parts.servers.into_iter().map(|served| (served.server.name.clone(), served)).collect();
        let engine = Self {
            store: parts.store,
            journal: parts.journal,
            keyring: parts.keyring,
            custody: parts.custody,
            upstreams: parts.upstreams,
            servers,
            census: parts.census,
            attendance: parts.attendance,
            conversations: Register::default(),
            openings: Tally::default(),
            outstaying: Tally::default(),
            beat: Beat::default(),
            leavers: parts.leavers,
            agreed: Mutex::default(),
            forwarding: Forwarding::default(),
            metrics: parts.metrics,
            key_folder: parts.key_folder,
            state_dir: parts.state_dir,
            unproven_at: AtomicU64::new(0),
            rotating: tokio::sync::Mutex::default(),
            strangers: Mutex::default(),
            settings: parts.settings,
            clock: parts.clock,
            epoch: parts.epoch,
            live: DashMap::new(),
            arriving: Waiting::default(),
            stopping: Latch::default(),
            closing: Latch::default(),
            handing: Latch::default(),
            left: Latch::default(),
            deadlines: Notify::new(),
            owed: Notify::new(),
            facts: parts.facts,
            held: Mutex::default(),
            lanes: (0..RESTORE_LANES).map(|_| tokio::sync::Mutex::new(())).collect(),
            next_number: AtomicU64::new(1),
            notices,
        };
        (Arc::new(engine), queue)
    }

    /// The present instant.
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// A configured server.
    ///
    /// # Errors
    /// [`Code::ServerUnknown`], naming those that there are.
    pub fn served(&self, name: &str) -> Result<&Served, Refused> {
        let found = ServerName::parse(name).and_then(|name| self.servers.get(&name));
        found.ok_or_else(|| {
            let known: Vec<_> = self.servers.keys().map(ServerName::as_str).collect();
            let text = format!("no server of that name is configured; there are: {}", known.join(", "));
            Refused::new(Code::ServerUnknown, text)
        })
    }

    /// The settings in force.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Whether the worker takes new work: false first thing on a drain.
    pub fn is_ready(&self) -> bool {
        !self.stopping.is_set()
    }

    /// Drains this worker: no new connections, listening streams end with their `retry` hint, calls in flight may end
    /// within the grace, then their streams end too, and their clients come back to the next worker.
    pub async fn drain_worker(&self) {
        self.stopping.set();
        self.quiet(self.settings.drain_grace).await;
        self.closing.set();
        self.remember_servers();
        self.flush().await;
    }

    /// Makes what waits to be written durable.
    pub(crate) async fn flush(&self) {
        if let Err(error) = self.store.flush().await {
            tracing::warn!(error = %error, "the last hints could not be written");
        }
        if let Err(error) = self.journal.flush().await {
            tracing::warn!(error = %error, "the last events of streams could not be written");
        }
    }

    /// Resolves once what is still open is to be closed.
    pub async fn closing(&self) {
        self.closing.wait().await;
    }

    /// Resolves once the drain of this worker has begun.
    pub async fn stopped(&self) {
        self.stopping.wait().await;
    }

    /// Resolves once no call is in flight and who waits for an answer on a stream has it, or `bound` has passed. Listening
    /// streams have ended by then.
    async fn quiet(&self, bound: Duration) {
        let quiet = || {
            self.stateless_calls() == 0
                && self.openings.count() == 0
                && self.live.iter().all(|live| live.activity().is_idle())
        };
        self.until(bound, quiet).await;
    }

    /// Takes in the children that an earlier worker left in the keeper's custody; sessions fetch theirs when they
    /// are restored, and [`adopt`](crate::reconcile::adopt) ends those that no session wants.
    pub fn hold(&self, children: BTreeMap<SessionKey, Held>) {
        *self.held.lock() = children;
    }

    /// Takes a session's child out of what is held.
    pub(crate) fn take_held(&self, key: &SessionKey) -> Option<Held> {
        self.held.lock().remove(key)
    }

    /// The child that is held for a session, and when it was spawned.
    pub(crate) fn held_child(&self, key: &SessionKey) -> Option<(ChildId, Timestamp)> {
        self.held.lock().get(key).map(|held| (held.child, Timestamp::from_unix_millis(held.spawned_at_unix_ms)))
    }

    /// The sessions whose children are held, and how many calls those still have open.
    pub(crate) fn held_idle(&self) -> Vec<(SessionKey, usize)> {
        self.held.lock().iter().map(|(key, held)| (*key, held.open.len())).collect()
    }

    /// The sessions whose children are held, with the children's labels, and how many calls those have open.
    pub(crate) fn held_labels(&self) -> Vec<(SessionKey, Vec<u8>, usize)> {
        self.held.lock().iter().map(|(key, held)| (*key, held.label.clone(), held.open.len())).collect()
    }

    /// Whether the child that is held for a session has calls open.
    pub(crate) fn has_open_calls(&self, key: &SessionKey) -> bool {
        self.held.lock().get(key).is_some_and(|held| !held.open.is_empty())
    }

    /// The sessions whose children are held.
    pub(crate) fn held_keys(&self) -> Vec<SessionKey> {
        self.held.lock().keys().copied().collect()
    }

    /// The first of `count` consecutive stream ids that no session has had.
    pub(crate) fn next_streams(&self, count: u64) -> StreamId {
        StreamId { epoch: self.epoch.counter, number: self.next_number.fetch_add(count, Ordering::Relaxed) }
    }

    /// The id of listening streams in this epoch.
    pub(crate) fn listen_stream(&self) -> StreamId {
        StreamId { epoch: self.epoch.counter, number: StreamId::LISTEN }
    }

    /// Where the events of `key`'s streams are made durable.
    pub(crate) fn journaled(&self, key: SessionKey) -> Journaled {
        Journaled { journal: self.journal.clone(), session: key, claim: self.epoch, clock: self.clock }
    }

    /// The lane in which `key` is restored: one restore at a time for each session, many for all.
    pub(crate) fn lane(&self, key: &SessionKey) -> &tokio::sync::Mutex<()> {
        &self.lanes[usize::from(key.as_bytes()[0]) % RESTORE_LANES]
    }

    /// Tells the reaper that a session was opened, if that could be overdue before the reaper looks again.
    pub(crate) fn expect_deadline(&self) {
        if self.settings.terms.idle_expiry < crate::engine::REAPER_PAUSE_MAX {
            self.deadlines.notify_one();
        }
    }

    /// Counts a connection that reads a stream of `live`, until dropped; its end counts as use of the session.
    pub fn reading(self: &Arc<Self>, live: &Arc<Live>) -> Reading {
        live.begin_reading();
        Reading { engine: Arc::clone(self), live: Arc::clone(live) }
    }

    /// Notes what goes on in sessions without any request, streams and long calls, as use of them (S5).
    pub(crate) fn note_use(&self) {
        let now = self.now();
        for live in &self.live {
            if !live.activity().is_idle() {
                self.hint(live.touch(now, &self.settings.terms));
            }
        }
    }

    /// Puts on record that somebody gave a credential that proves nothing: once a minute at the most, since a flood of
    /// them must not push other entries out of the trail (I5).
    pub fn note_unproven(&self, server: &str) {
        let now = self.now();
        let last = self.unproven_at.load(Ordering::Relaxed);
        let due = now.since(Timestamp::from_unix_millis(last)) >= STRANGER_EVERY;
        let ours = due
            && self.unproven_at.compare_exchange(last, now.unix_millis(), Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if !ours {
            return;
        }
        let entry = AuditEntry::new(now, Actor::Gateway, Action::AuthenticationRefused);
        let entry = match self.served(server) {
            Ok(served) => entry.at_server(served.server.name.clone()),
            Err(_) => entry,
        };
        self.store.hint(Write::Audit(entry.with_detail("a bearer that is none of the named tokens")));
    }

    /// Tells the operator of a server that fails, each server at most every few seconds.
    pub(crate) fn note_failure(&self, server: &ServerName, failure: &Failure) {
        let Some(served) = self.servers.get(server).filter(|_| !self.left.is_set()) else { return };
        let now = self.now().unix_millis();
        let last = served.warned_at.load(Ordering::Relaxed);
        let due = now.saturating_sub(last) >= WARN_EVERY_MS;
        // The words of a child may hold what it was given in confidence; they are in its own log.
        let failure: &dyn std::fmt::Display = if let Failure::ChildExited { exit, .. } = failure {
            exit
        } else if let Failure::Parked { cause, .. } = failure {
            cause
        } else {
            failure
        };
        if due && served.warned_at.compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            tracing::warn!(server = %server, failure = %failure, "server fails");
        } else {
            tracing::debug!(server = %server, failure = %failure, "server fails");
        }
    }

    /// Whether strangers at `key` should be put on record now: not each try of somebody who tries all day.
    pub(crate) fn is_news(&self, key: SessionKey) -> bool {
        let now = self.now();
        let mut strangers = self.strangers.lock();
        if strangers.get(&key).is_some_and(|at| now.since(*at) < STRANGER_EVERY) {
            return false;
        }
        if strangers.len() >= STRANGERS_MAX {
            strangers.retain(|_, at| now.since(*at) < STRANGER_EVERY);
        }
        if strangers.len() >= STRANGERS_MAX {
            return false;
        }
        strangers.insert(key, now);
        true
    }

    /// Hands a hint to the ledger; it never waits.
    pub(crate) fn hint(&self, change: Option<mainstay_core::session::Change>) {
        if let Some(change) = change
            && !self.left.is_set()
        {
            self.store.hint(Write::Session(change));
        }
    }
}

/// What a machine's refusal is to the outside.
pub(crate) fn refused(refusal: &Refusal) -> Refused {
    match refusal {
        Refusal::OtherPrincipal => Refused::new(Code::OtherPrincipal, SESSION_UNKNOWN),
        Refusal::NotReady(state) | Refusal::Ended(state) => match state {
            State::Draining => Refused::new(Code::SessionDraining, "the session is being drained; open a new one"),
            State::Deleted => Refused::new(
                Code::SessionDeleted,
                "the session was ended, by its client or an operator's drain; a new one can be opened",
            ),
            State::Expired => Refused::new(Code::SessionExpired, "the session was idle for too long; open a new one"),
            State::Closed => Refused::new(Code::SessionClosed, "the session was closed; open a new one"),
            State::Initializing | State::Ready => {
                Refused::new(Code::Unavailable, "the session is being opened; try again")
            }
        },
        Refusal::Overdue => Refused::new(Code::SessionExpired, "the session was idle for too long; open a new one"),
        Refusal::Busy => Refused::new(Code::Internal, "the session is busy"),
        Refusal::Illegal { state, input } => {
            Refused::new(Code::Internal, format!("a session that is {} takes no `{input}`", state.as_str()))
        }
    }
}

/// The text of an unknown session, the same whether it never was or is somebody else's (S4).
pub(crate) const SESSION_UNKNOWN: &str = "no such session; send `initialize` without a session id to open one";
/// How long a request is held before it is refused: under the 60 s after which real clients give up (S13a).
pub(crate) const HOLD: Duration = Duration::from_secs(50);
/// How often strangers at one session are put on record, and for how many sessions that is remembered.
pub(crate) const STRANGER_EVERY: Duration = Duration::from_mins(1);
pub(crate) const STRANGERS_MAX: usize = 1024;
/// The longest time between two looks of the reaper.
pub(crate) const REAPER_PAUSE_MAX: Duration = Duration::from_mins(1);
/// How often a failing server is told of at the most.
const WARN_EVERY_MS: u64 = 10_000;
const NOTICES_MAX: usize = 4096;
const RESTORE_LANES: usize = 64;
const QUIET_POLL: Duration = Duration::from_millis(10);

/// An empty JSON object.
pub(crate) const EMPTY_OBJECT: Bytes = Bytes::from_static(b"{}");
