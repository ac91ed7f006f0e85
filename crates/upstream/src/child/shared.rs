//! The one process of a modern program, which all its clients share (2026-07-28, Transports, stdio).
//!
//! A modern server keeps nothing of its callers, so one process is enough for all of them, stateless clients and bridged
//! sessions alike. It belongs to no session: the keeper has it under a name of its own, which is the same for every worker,
//! so the next one takes it over. Nobody can come back for the requests that the last one had sent: they are taken back.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::call::StreamId;
use mainstay_core::time::Timestamp;
use mainstay_keeper::client::{Held, WriteError};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout};

use super::end::Why;
use super::label;
use super::launch::launch;
use super::running::{Audience, Registration, Running, Waiting};
use super::table::stream_of;
use crate::bridge::Dressed;
use crate::era::{Evidence, read_answer};
use crate::failure::{Blame, Failure};
use crate::flight::Flight;
use crate::server::Server;
use crate::task::spawn;
use crate::upstreams::{Destination, Upstreams};
use crate::wire::lock;

pub(crate) use exchange::Exchange;
pub(crate) use sent::Manner;

use sent::Sent;

mod exchange;
mod sent;

/// The process of one server that everybody shares, if there is one.
pub(crate) struct Shared {
    /// Dead or alive.
    current: Mutex<Option<Arc<Running>>>,
    flight: Flight,
    calls: Arc<Semaphore>,
    listeners: Arc<Semaphore>,
    /// One process at a time that is asked for its era.
    pub(super) siblings: Arc<Semaphore>,
    /// Rung when that is in the way of one that is to serve somebody.
    pub(super) wanted: Notify,
    used_at: Mutex<Instant>,
}

impl Default for Shared {
    fn default() -> Self {
        Self {
            current: Mutex::default(),
            flight: Flight::default(),
            calls: Arc::new(Semaphore::new(CALLS_MAX)),
            listeners: Arc::new(Semaphore::new(LISTENERS_MAX)),
            siblings: Arc::new(Semaphore::new(1)),
            wanted: Notify::new(),
            used_at: Mutex::new(Instant::now()),
        }
    }
}

impl Shared {
    /// How many calls are in flight.
    pub(crate) fn calls(&self) -> usize {
        CALLS_MAX.saturating_sub(self.calls.available_permits())
    }

    /// Whether there is a process that has said to this worker that it is modern.
    pub(crate) fn is_proven(&self) -> bool {
        self.alive().is_some_and(|running| running.is_initialized())
    }

    /// Keeps processes from being started to be asked for their era, until dropped. One that is being asked is ended first:
    /// what it holds locked must be free. `None` if it does not end in time.
    pub(super) async fn without_sibling(&self) -> Option<SemaphorePermit<'_>> {
        let deadline = Instant::now() + SIBLING_END_BOUND;
        while Instant::now() < deadline {
            self.wanted.notify_waiters();
            // It may not have listened yet.
            if let Ok(Ok(alone)) = timeout(SIBLING_LOOK, self.siblings.acquire()).await {
                return Some(alone);
            }
        }
        None
    }

    fn alive(&self) -> Option<Arc<Running>> {
        lock(&self.current).clone().filter(|running| !running.is_over())
    }

    /// The process that takes new requests.
    fn ready(&self) -> Option<Arc<Running>> {
        self.alive().filter(|running| !running.is_retired())
    }
}

/// The way to the process that everybody shares of one server. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Sharing {
    pub(super) upstreams: Arc<Upstreams>,
    pub(super) destination: Arc<Destination>,
}

impl Sharing {
    pub(crate) fn new(upstreams: &Arc<Upstreams>, destination: &Arc<Destination>) -> Self {
        Self { upstreams: Arc::clone(upstreams), destination: Arc::clone(destination) }
    }

    /// Takes over the process that an earlier worker has left, and takes back what that had asked of it. One that was never
    /// told a word, or is defined otherwise now, is ended.
    pub(crate) fn adopt(&self, held: Held) {
        let Some(custody) = self.upstreams.parts.custody.clone() else { return };
        let own = super::parse_label(&held.label).is_some_and(|label| label.definition == self.server().definition());
        if !own || held.frames_accepted == 0 {
            let why = if own { Why::NeverUp } else { Why::Redefined };
            spawn(super::dismiss_of(Arc::clone(&self.upstreams), Arc::clone(&self.destination), held, why));
            return;
        }
        let lease = self.destination.supervision.adopt(Timestamp::from_unix_millis(held.spawned_at_unix_ms));
        let open = held.open;
        let parts = (&self.upstreams, &self.destination);
        let handed_over = (held.child, &open[..], held.events);
        let (running, _pump) = Running::start(parts, Audience::Callers, custody, handed_over, (lease, None));
        running.lease.attach(running.id, Arc::downgrade(&running), None);
        *lock(&self.shared().current) = Some(Arc::clone(&running));
        self.note_use();
        tracing::info!(server = %self.server().name, child = %running.id, open = open.len(), "shared child taken over");
        spawn(async move {
            for stream in open.into_iter().map(stream_of) {
                if !take_back(&running, stream).await {
                    // It stays open, for the next worker to take back.
                    return;
                }
                running.settle(stream);
            }
        });
    }

    /// Lets the process go if nobody has used it for `after` (S11). Nothing is lost with it.
    pub(crate) fn suspend(&self, after: Duration) {
        let shared = self.shared();
        // With all places taken nobody is on the way to it.
        let Ok(calls) = u32::try_from(CALLS_MAX).map(|all| shared.calls.try_acquire_many(all)) else { return };
        let Ok(listeners) = u32::try_from(LISTENERS_MAX).map(|all| shared.listeners.try_acquire_many(all)) else {
            return;
        };
        let (Ok(_calls), Ok(_listeners), Some(running)) = (calls, listeners, shared.ready()) else { return };
        if lock(&shared.used_at).elapsed() >= after {
            tracing::info!(server = %self.server().name, child = %running.id, "shared child suspended");
            running.mark_retired(Duration::ZERO);
            spawn(running.retire(Why::Suspended));
        }
    }

    /// Somebody uses the process just now.
    fn note_use(&self) {
        *lock(&self.shared().used_at) = Instant::now();
    }

    /// A place among those that use the process at the same time. Waits for one as long as patience lasts.
    async fn place(&self, listens: bool) -> Result<OwnedSemaphorePermit, Failure> {
        let places = if listens { &self.shared().listeners } else { &self.shared().calls };
        let waited = timeout(self.server().patience, Arc::clone(places).acquire_owned()).await;
        self.note_use();
        waited.ok().and_then(Result::ok).ok_or_else(|| self.unreachable("too many requests to it are in flight".into()))
    }

    /// Hands a request to the process, a new one if need be. Sent at most once: a frame is taken whole or not at all.
    async fn send(self, sent: Arc<Sent>) -> Result<Waiting, Failure> {
        for _ in 0..SEND_TRIES_MAX {
            let running = self.running().await?;
            let registration = Registration { id: sent.id.clone(), may_stream: sent.wants_log };
            let Some(mut waiting) = running.register(registration) else {
                if running.is_over() {
                    continue;
                }
                return Err(self.protocol("two requests have the same id"));
            };
            // Whoever ends it waits for the calls that were registered before it was known to be ended.
            if running.is_retired() {
                continue;
            }
            match running.write_call(&mut waiting, sent.message.clone()).await {
                Ok(()) => return Ok(waiting),
                Err(WriteError::Gone) => {
                    let end = timeout(super::END_KNOWN_BOUND, running.ended()).await;
                    end.map_err(|_| self.unreachable("the keeper does not hold its process any more".into()))?;
                }
                Err(error @ (WriteError::TooLong | WriteError::LineEnd)) => {
                    return Err(self.protocol(&format!("the request can't be written: {error}")));
                }
            }
        }
        Err(self.unreachable("its process ends as soon as it is started".into()))
    }

    /// The process, started first if need be: once for all who ask. The work is a task of its own, which goes on if the
    /// caller goes away.
    async fn running(&self) -> Result<Arc<Running>, Failure> {
        if let Some(running) = self.shared().ready() {
            return Ok(running);
        }
        let this = self.clone();
        let task = spawn(async move {
            let ready = || this.shared().ready();
            this.shared().flight.join(ready, Box::pin(this.start())).await
        });
        task.await.unwrap_or_else(|_| Err(self.unreachable("the gateway stops".into())))
    }

    async fn start(&self) -> Result<Arc<Running>, Failure> {
        let server = self.server();
        // Never beside one that is to end: what that holds locked must be free.
        if let Some(retired) = self.shared().alive()
            && !retired.is_gone().await
        {
            return Err(self.unreachable("its process is about to be replaced and has not ended yet".into()));
        }
        if self.upstreams.has_left() {
            return Err(self.unreachable("the worker that the request was left with starts no process any more".into()));
        }
        let Some(custody) = self.upstreams.parts.custody.clone() else {
            return Err(self.unreachable("there is no keeper".into()));
        };
        let again = lock(&self.shared().current).is_some();
        let lease = self.destination.supervision.permit(server, server.patience).await?;
        let (parts, key) = ((&self.upstreams, &self.destination), label::shared_key(&server.name));
        let (running, _pump) = launch(parts, (custody, key), Audience::Callers, lease).await?;
        let asked = timeout(server.handshake_bound, self.discover(&running)).await;
        match asked.map_err(|_| self.unreachable("it did not answer `server/discover` in time".into())) {
            Ok(Ok(())) => {
                running.lease.up(again);
                running.mark_initialized();
                *lock(&self.shared().current) = Some(Arc::clone(&running));
                Ok(running)
            }
            Ok(Err(failure)) | Err(failure) => {
                // An answer, though the wrong one, is no fault of the process; nor does its end need another word.
                let says_enough = matches!(failure, Failure::Rejected { .. }) || running.is_over();
                running.lease.never_up((!says_enough).then(|| failure.cause()).as_deref());
                running.stop(Why::NeverUp).await;
                Err(failure)
            }
        }
    }

    /// Asks a process that was just started what it is: it takes the place of a handshake, and proves the era.
    async fn discover(&self, running: &Arc<Running>) -> Result<(), Failure> {
        let id = self.upstreams.own_id();
        let message = Dressed::own(&id, "server/discover", None).message;
        let eras = &self.destination.eras;
        match read_answer(&running.ask(id, message).await?) {
            Evidence::Discovered(result) => eras.note_discovered(&result),
            Evidence::Modern => eras.note_modern(true),
            Evidence::NotModern | Evidence::None => {
                eras.forget();
                eras.note_modern(false);
                return Err(self.rejected(200, "it does not say that it speaks 2026-07-28"));
            }
        }
        Ok(())
    }

    fn shared(&self) -> &Shared {
        &self.destination.shared
    }

    fn server(&self) -> &Server {
        &self.destination.server
    }
}

impl Blame for Sharing {
    fn blamed(&self) -> &Server {
        self.server()
    }
}

/// Tells the process that nobody wants the answer of that request any more. False if it does not read that.
async fn take_back(running: &Running, stream: StreamId) -> bool {
    let message: Bytes = sent::cancellation(stream).into();
    matches!(timeout(TAKE_BACK_BOUND, running.write(message)).await, Ok(Ok(_) | Err(WriteError::Gone)))
}

/// Requests in flight to one process, and requests that somebody listens by. Together they are fewer than the keeper knows
/// open calls of a child.
const CALLS_MAX: usize = 2048;
const LISTENERS_MAX: usize = 1024;

/// How many processes one request may be offered to.
const SEND_TRIES_MAX: u32 = 3;

/// How long a process may take to read that a request is taken back.
const TAKE_BACK_BOUND: Duration = Duration::from_secs(10);

/// How long the end of a process that was only asked for its era is waited for, and how often it is told.
const SIBLING_END_BOUND: Duration = Duration::from_secs(10);
const SIBLING_LOOK: Duration = Duration::from_millis(100);
