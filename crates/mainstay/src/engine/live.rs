//! One session in memory: its machine, its way to the server, its streams and the calls in flight.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use bytes::Bytes;
use mainstay_core::call::StreamId;
use mainstay_core::id::SessionKey;
use mainstay_core::principal::Principal;
use mainstay_core::session::{Activity, Change, Refusal, Session, Terms};
use mainstay_core::time::Timestamp;
use mainstay_core::wire::method::Version;
use mainstay_upstream::{Link, Server};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::engine::stream::Stream;

/// A live session. Shared by the requests that it serves; owned by the engine's table.
pub struct Live {
    /// Its key in the ledger.
    pub key: SessionKey,
    /// The server that it talks to.
    pub server: Arc<Server>,
    /// The negotiated protocol version.
    pub version: Version,
    /// The way to the server.
    pub link: Arc<Link>,
    /// The listening stream: what belongs to no call.
    pub listen: Arc<Stream>,
    /// The end of the session, once it has come.
    pub ended: Latch,
    session: Mutex<Session>,
    traffic: Mutex<Traffic>,
    calls: AtomicU32,
    streams: AtomicU32,
    notice: Mutex<Option<Bytes>>,
    has_notice: AtomicBool,
}

#[derive(Default)]
struct Traffic {
    /// Calls in flight by the client's own raw id, and the stream number under which each runs. One id may be in
    /// flight more than once (R9).
    calls: Vec<(Bytes, StreamId)>,
    /// Streams of calls that a client may come back to.
    streams: BTreeMap<StreamId, Arc<Stream>>,
    /// Questions of the server that await the client's answer, by the number that they were dressed with.
    asked: BTreeMap<StreamId, Bytes>,
}

/// What a [`Live`] is made of.
pub struct Parts {
    /// The machine.
    pub session: Session,
    /// The server that it talks to.
    pub server: Arc<Server>,
    /// The way to it.
    pub link: Arc<Link>,
    /// The listening stream's id.
    pub listen: StreamId,
}

impl Live {
    /// A session as it goes into the table.
    pub fn new(parts: Parts) -> Arc<Self> {
        let record = parts.session.record();
        Arc::new(Self {
            key: record.key,
            version: record.version,
            server: parts.server,
            link: parts.link,
            listen: Stream::new(record.key.tag(), parts.listen, None),
            ended: Latch::default(),
            session: Mutex::new(parts.session),
            traffic: Mutex::default(),
            calls: AtomicU32::new(0),
            streams: AtomicU32::new(0),
            notice: Mutex::new(None),
            has_notice: AtomicBool::new(false),
        })
    }

    /// Reads the machine.
    pub fn with_session<T>(&self, read: impl FnOnce(&Session) -> T) -> T {
        read(&self.session.lock())
    }

    /// Applies changes that are durable.
    pub fn apply(&self, changes: &[Change]) {
        let mut session = self.session.lock();
        for change in changes {
            session.apply(change);
        }
    }

    /// Lets a request of `principal` in and moves the idle deadline. What comes back is a hint for the store, at most
    /// one every few seconds (S5).
    ///
    /// # Errors
    /// The machine's refusal: another principal, ended, draining, overdue (S4).
    pub fn admit(&self, now: Timestamp, principal: &Principal, terms: &Terms) -> Result<Option<Change>, Refusal> {
        let mut session = self.session.lock();
        match session.admit(now, principal) {
            // A call in flight or an open stream is use: the session is not idle, only long unasked.
            Err(Refusal::Overdue) if !self.activity().is_idle() => {}
            admitted => admitted?,
        }
        Ok(session.touch(now, terms))
    }

    /// Moves the idle deadline on behalf of the end of a call or stream.
    pub fn touch(&self, now: Timestamp, terms: &Terms) -> Option<Change> {
        self.session.lock().touch(now, terms)
    }

    /// What keeps the session from being idle.
    pub fn activity(&self) -> Activity {
        Activity { calls: self.calls.load(Ordering::Acquire), streams: self.streams.load(Ordering::Acquire) }
    }

    /// Registers a call in flight under `stream`; it counts until the flight is dropped.
    ///
    /// # Errors
    /// The session's bound of calls in flight is reached.
    pub fn take_off(self: &Arc<Self>, client_id: Bytes, stream: StreamId, calls_max: usize) -> Result<Flight, Crowded> {
        let mut traffic = self.traffic.lock();
        if traffic.calls.len() >= calls_max {
            return Err(Crowded);
        }
        traffic.calls.push((client_id, stream));
        self.calls.fetch_add(1, Ordering::AcqRel);
        Ok(Flight { live: Arc::clone(self), stream })
    }

    /// The newest call in flight whose client-side id is `client_id`.
    pub fn in_flight(&self, client_id: &[u8]) -> Option<StreamId> {
        let traffic = self.traffic.lock();
        traffic.calls.iter().rev().find(|(id, _)| id == client_id).map(|(_, stream)| *stream)
    }

    /// Keeps the stream of a call so that its client can come back to it.
    ///
    /// # Errors
    /// The session's bound of streams is reached.
    pub fn keep(&self, stream: &Arc<Stream>, streams_max: usize) -> Result<(), Crowded> {
        let mut traffic = self.traffic.lock();
        if traffic.streams.len() >= streams_max {
            let stale = traffic.streams.iter().find(|(_, kept)| kept.is_finished()).map(|(id, _)| *id);
            traffic.streams.remove(&stale.ok_or(Crowded)?);
        }
        traffic.streams.insert(stream.id(), Arc::clone(stream));
        Ok(())
    }

    /// A kept stream.
    pub fn stream(&self, id: StreamId) -> Option<Arc<Stream>> {
        self.traffic.lock().streams.get(&id).cloned()
    }

    /// Lets a kept stream go.
    pub fn let_go(&self, id: StreamId) {
        self.traffic.lock().streams.remove(&id);
    }

    /// Notes that the server asks the client something, under the dressed id `asked`; `original` is the server's id.
    ///
    /// # Errors
    /// Too many questions are open.
    pub fn ask(&self, asked: StreamId, original: Bytes) -> Result<(), Crowded> {
        let mut traffic = self.traffic.lock();
        if traffic.asked.len() >= ASKED_MAX {
            return Err(Crowded);
        }
        traffic.asked.insert(asked, original);
        Ok(())
    }

    /// Takes an open question back: `Some` for the first answer only (R6).
    pub fn answered(&self, asked: StreamId) -> Option<Bytes> {
        self.traffic.lock().asked.remove(&asked)
    }

    /// The dressed id of the open question that the server knows as `original`.
    pub fn asked_as(&self, original: &[u8]) -> Option<StreamId> {
        self.traffic.lock().asked.iter().find(|(_, id)| *id == original).map(|(asked, _)| *asked)
    }

    /// Counts a connection that reads a stream of this session, until dropped.
    pub fn reading(self: &Arc<Self>) -> Reading {
        self.streams.fetch_add(1, Ordering::AcqRel);
        Reading(Arc::clone(self))
    }

    /// Leaves word for the client, to go with the next result (U6). A later word replaces an unread one.
    pub fn leave_notice(&self, notice: Bytes) {
        *self.notice.lock() = Some(notice);
        self.has_notice.store(true, Ordering::Release);
    }

    /// Takes the word for the client, if there is one. Costs a load when there is none.
    pub fn take_notice(&self) -> Option<Bytes> {
        if !self.has_notice.load(Ordering::Acquire) {
            return None;
        }
        self.has_notice.store(false, Ordering::Release);
        self.notice.lock().take()
    }

    /// Ends everything that runs in this session's name in memory; the ledger knows already.
    pub fn shut(&self) {
        self.ended.set();
        self.listen.close();
    }
}

/// A named bound of the session is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Crowded;

/// A call in flight. Dropping it lands it.
pub struct Flight {
    live: Arc<Live>,
    stream: StreamId,
}

impl Flight {
    /// The number under which the call runs.
    pub fn stream(&self) -> StreamId {
        self.stream
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        let mut traffic = self.live.traffic.lock();
        if let Some(place) = traffic.calls.iter().rposition(|(_, stream)| *stream == self.stream) {
            traffic.calls.remove(place);
        }
        self.live.calls.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A connection that reads a stream. Dropping it stops counting.
pub struct Reading(Arc<Live>);

impl Drop for Reading {
    fn drop(&mut self) {
        self.0.streams.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Something that happens once, and that any number of tasks can wait for.
#[derive(Default)]
pub struct Latch {
    set: AtomicBool,
    changed: Notify,
}

impl Latch {
    /// Makes it happen.
    pub fn set(&self) {
        self.set.store(true, Ordering::Release);
        self.changed.notify_waiters();
    }

    /// Whether it has happened.
    pub fn is_set(&self) -> bool {
        self.set.load(Ordering::Acquire)
    }

    /// Returns once it has happened. Cancel-safe.
    pub async fn wait(&self) {
        let changed = self.changed.notified();
        tokio::pin!(changed);
        changed.as_mut().enable();
        if !self.is_set() {
            changed.await;
        }
    }
}

const ASKED_MAX: usize = 64;
