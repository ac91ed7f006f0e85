//! One session in memory: its machine, its way to the server, its streams and the calls in flight.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use bytes::Bytes;
use mainstay_core::call::StreamId;
use mainstay_core::id::SessionKey;
use mainstay_core::principal::Principal;
use mainstay_core::session::{Activity, Change, Refusal, Session, Terms};
use mainstay_core::time::Timestamp;
use mainstay_core::wire::method::{Method, Version};
use mainstay_store::journal::Question;
use mainstay_upstream::{Link, Server};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::engine::stream::{Journaled, Stream};

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
    gate: Mutex<Gate>,
    traffic: Mutex<Traffic>,
    asked_earlier: AskedEarlier,
    /// Requests that were admitted and are not answered yet.
    entries: AtomicU32,
    calls: AtomicU32,
    streams: AtomicU32,
    /// Rung when the last entry or call is over.
    idle: Notify,
    /// Rung when calls are given up.
    given_up: Notify,
    /// Whether `initialize` was answered in the name of a server that was down.
    answered_for: AtomicBool,
    notice: Mutex<Option<Bytes>>,
    has_notice: AtomicBool,
    /// Whether answers, too, go on the listening stream (2024-11-05).
    relays: AtomicBool,
    /// Whether what earlier lives of the session left for its one stream is on it.
    pub recalled: tokio::sync::Mutex<bool>,
}

/// The machine, and whether its session is on its way out of memory. Whoever finds it leaving waits in the session's
/// lane and looks again.
struct Gate {
    session: Session,
    leaving: bool,
}

/// A call in flight.
#[derive(Clone)]
pub struct InFlight {
    /// The client's own raw id. One id may be in flight more than once (R9).
    pub client_id: Bytes,
    /// The number under which the call runs.
    pub stream: StreamId,
    /// What it calls.
    pub method: Method,
    /// The tool or prompt that it names, for people: at most [`CALL_NAME_CHARS_MAX`] characters of it.
    pub name: Option<Box<str>>,
    /// When it began.
    pub since: Timestamp,
    /// Whether an earlier worker runs it, which has handed over and still lives.
    pub is_elsewhere: bool,
}

#[derive(Default)]
struct Traffic {
    calls: Vec<InFlight>,
    /// Streams of calls that a client may come back to.
    streams: BTreeMap<StreamId, Arc<Stream>>,
    /// Questions of the server that await the client's answer, by the number that they were dressed with.
    asked: BTreeMap<StreamId, Question>,
    /// Questions of earlier workers that were answered to this one: no second answer goes out (R6).
    answered_before: BTreeSet<StreamId>,
    /// Calls that the client cancelled and the server did not answer in time.
    given_up: BTreeSet<StreamId>,
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
    /// Tells this life of the session in memory from every other one in this epoch.
    pub life: u64,
    /// Where its streams are made durable.
    pub journaled: Journaled,
    /// What its child has asked through earlier workers.
    pub asked_earlier: AskedEarlier,
}

/// What a child has asked its client through earlier workers, by the numbers that it was dressed with; `None` if that is
/// not known.
pub type AskedEarlier = Option<BTreeMap<StreamId, Question>>;

impl Traffic {
    fn keep(&mut self, stream: &Arc<Stream>, streams_max: usize) -> Result<(), Crowded> {
        if self.streams.len() >= streams_max {
            let stale = self.streams.iter().find(|(_, kept)| kept.is_finished()).map(|(id, _)| *id);
            self.streams.remove(&stale.ok_or(Crowded)?);
        }
        self.streams.insert(stream.id(), Arc::clone(stream));
        Ok(())
    }
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
            // A later life of the session in this epoch must not repeat the event ids of an earlier one: the number that it
            // starts from was never used.
            listen: Stream::continued(
                record.key.tag(),
                parts.listen,
                None,
                parts.life << LISTEN_LIFE_BITS,
                Some(parts.journaled),
            ),
            ended: Latch::default(),
            gate: Mutex::new(Gate { session: parts.session, leaving: false }),
            traffic: Mutex::default(),
            asked_earlier: parts.asked_earlier,
            entries: AtomicU32::new(0),
            calls: AtomicU32::new(0),
            streams: AtomicU32::new(0),
            idle: Notify::new(),
            given_up: Notify::new(),
            answered_for: AtomicBool::new(false),
            notice: Mutex::new(None),
            has_notice: AtomicBool::new(false),
            relays: AtomicBool::new(false),
            recalled: tokio::sync::Mutex::new(false),
        })
    }

    /// Reads the machine.
    pub fn with_session<T>(&self, read: impl FnOnce(&Session) -> T) -> T {
        read(&self.gate.lock().session)
    }

    /// Applies changes that are durable.
    pub fn apply(&self, changes: &[Change]) {
        let mut gate = self.gate.lock();
        for change in changes {
            gate.session.apply(change);
        }
    }

    /// Lets a request of `principal` in and moves the idle deadline. With the entry comes a hint for the store, at most
    /// one every few seconds (S5).
    ///
    /// # Errors
    /// [`Barred`]: the machine's refusal (S4), or the session is leaving memory.
    pub fn admit(
        self: &Arc<Self>,
        now: Timestamp,
        principal: &Principal,
        terms: &Terms,
    ) -> Result<(Entry, Option<Change>), Barred> {
        let mut gate = self.gate.lock();
        match gate.session.admit(now, principal) {
            // A call in flight or an open stream is use: the session is not idle, only long unasked.
            Err(Refusal::Overdue) if !self.activity().is_idle() => {}
            admitted => admitted.map_err(Barred::Refused)?,
        }
        if gate.leaving {
            return Err(Barred::Leaving);
        }
        self.entries.fetch_add(1, Ordering::AcqRel);
        Ok((Entry(Arc::clone(self)), gate.session.touch(now, terms)))
    }

    /// Lets an operator's order in: it counts as use until the entry is dropped, so that the session stays in memory.
    /// `None` if it is leaving.
    pub fn enter(self: &Arc<Self>) -> Option<Entry> {
        let gate = self.gate.lock();
        if gate.leaving {
            return None;
        }
        self.entries.fetch_add(1, Ordering::AcqRel);
        Some(Entry(Arc::clone(self)))
    }

    /// Moves the idle deadline on behalf of the end of a call or stream.
    pub fn touch(&self, now: Timestamp, terms: &Terms) -> Option<Change> {
        self.gate.lock().session.touch(now, terms)
    }

    /// Notes what goes on in the session as use of it, and what the ledger should learn: `None` if it knows.
    pub fn note_use(&self, now: Timestamp, terms: &Terms) -> Option<Change> {
        let mut gate = self.gate.lock();
        if !self.activity().is_idle() {
            return gate.session.touch(now, terms);
        }
        let record = gate.session.record();
        Some(Change::Touch { key: record.key, seen_at: record.seen_at, deadline: record.deadline })
    }

    /// Bars the way in if `may` agrees, under the gate's lock; from then on nobody is admitted. The caller holds the
    /// session's lane, and either takes the session out of the table or [opens](Self::stay) the gate again.
    pub fn leave<T>(&self, may: impl FnOnce(&Session, Activity) -> Option<T>) -> Option<T> {
        let mut gate = self.gate.lock();
        let agreed = may(&gate.session, self.activity())?;
        gate.leaving = true;
        Some(agreed)
    }

    /// Opens the gate again: the session stays.
    pub fn stay(&self) {
        self.gate.lock().leaving = false;
    }

    /// What keeps the session from being idle: requests being served and calls in flight, and streams that are read.
    pub fn activity(&self) -> Activity {
        let calls = self.calls.load(Ordering::Acquire).saturating_add(self.entries.load(Ordering::Acquire));
        Activity { calls, streams: self.streams.load(Ordering::Acquire) }
    }

    /// Whether the client is there: a request of it waits for its answer, or a connection reads a stream.
    pub fn is_connected(&self) -> bool {
        self.entries.load(Ordering::Acquire) > 0 || self.streams.load(Ordering::Acquire) > 0
    }

    /// The calls in flight.
    pub fn calls(&self) -> Vec<InFlight> {
        self.traffic.lock().calls.clone()
    }

    /// How many questions of the server are open.
    pub fn questions(&self) -> usize {
        self.traffic.lock().asked.len()
    }

    /// Resolves once no request is being served and no call is in flight.
    pub async fn idle(&self) {
        loop {
            let rung = self.idle.notified();
            tokio::pin!(rung);
            rung.as_mut().enable();
            if self.activity().calls == 0 {
                return;
            }
            rung.await;
        }
    }

    /// Registers a call in flight; it counts until the flight is dropped.
    ///
    /// # Errors
    /// The session's bound of calls in flight is reached.
    pub fn take_off(self: &Arc<Self>, call: InFlight, calls_max: usize) -> Result<Flight, Crowded> {
        let mut traffic = self.traffic.lock();
        if traffic.calls.len() >= calls_max {
            return Err(Crowded);
        }
        let stream = call.stream;
        traffic.calls.push(call);
        self.calls.fetch_add(1, Ordering::AcqRel);
        Ok(Flight { live: Arc::clone(self), stream })
    }

    /// The newest call in flight whose client-side id is `client_id`.
    pub fn in_flight(&self, client_id: &[u8]) -> Option<StreamId> {
        let traffic = self.traffic.lock();
        traffic.calls.iter().rev().find(|call| call.client_id == client_id).map(|call| call.stream)
    }

    /// Keeps the stream of a call so that its client can come back to it.
    ///
    /// # Errors
    /// The session's bound of streams is reached.
    pub fn keep(&self, stream: &Arc<Stream>, streams_max: usize) -> Result<(), Crowded> {
        self.traffic.lock().keep(stream, streams_max)
    }

    /// A kept stream.
    pub fn stream(&self, id: StreamId) -> Option<Arc<Stream>> {
        self.traffic.lock().streams.get(&id).cloned()
    }

    /// The newest kept stream from before `epoch` that is not finished.
    pub fn unfinished_before(&self, epoch: u64) -> Option<Arc<Stream>> {
        let traffic = self.traffic.lock();
        let newest = traffic.streams.values().rev().find(|kept| kept.id().epoch < epoch && !kept.is_finished());
        newest.cloned()
    }

    /// The kept streams.
    pub fn streams(&self) -> Vec<Arc<Stream>> {
        self.traffic.lock().streams.values().cloned().collect()
    }

    /// How many streams of calls are kept.
    pub fn streams_held(&self) -> usize {
        self.traffic.lock().streams.len()
    }

    /// Keeps what finished streams hold within its bound: what was delivered goes first, then the oldest.
    pub fn trim(&self) {
        let mut traffic = self.traffic.lock();
        loop {
            let finished = traffic.streams.values().filter(|stream| stream.is_finished());
            let bytes: usize = finished.clone().map(|stream| stream.bytes()).sum();
            if bytes <= KEPT_BYTES_MAX {
                return;
            }
            let delivered = finished.clone().find(|stream| stream.is_delivered());
            let Some(goes) = delivered.or_else(|| finished.clone().next()).map(|stream| stream.id()) else { return };
            if traffic.streams.len() == 1 {
                return;
            }
            traffic.streams.remove(&goes);
        }
    }

    /// Whether an answer is kept that its client has not taken.
    pub fn owes_answers(&self) -> bool {
        self.traffic.lock().streams.values().any(|stream| !stream.is_delivered())
            || self.relays() && self.listen.unread().0 > 0
    }

    /// Notes that answers, too, go on the listening stream, and has everything on that kept from now on.
    pub fn relay(&self) {
        if !self.relays.swap(true, Ordering::AcqRel) {
            self.listen.keep_all();
        }
    }

    /// Whether answers, too, go on the listening stream.
    pub fn relays(&self) -> bool {
        self.relays.load(Ordering::Acquire)
    }

    /// Whether a connection reads a stream of this session.
    pub fn is_read(&self) -> bool {
        self.streams.load(Ordering::Acquire) > 0
    }

    /// Gives a call up that the client cancelled and the server does not answer.
    pub fn give_up(&self, stream: StreamId) {
        let mut traffic = self.traffic.lock();
        if traffic.calls.iter().any(|call| call.stream == stream) {
            traffic.given_up.insert(stream);
        }
        drop(traffic);
        self.given_up.notify_waiters();
    }

    /// Whether the call `stream` is given up.
    pub fn is_given_up(&self, stream: StreamId) -> bool {
        self.traffic.lock().given_up.contains(&stream)
    }

    /// Resolves once the call `stream` is given up. Cancel-safe.
    pub async fn given_up(&self, stream: StreamId) {
        loop {
            let rung = self.given_up.notified();
            tokio::pin!(rung);
            rung.as_mut().enable();
            if self.traffic.lock().given_up.contains(&stream) {
                return;
            }
            rung.await;
        }
    }

    /// Notes that `initialize` was answered in the name of a server that was down.
    pub fn note_answered_for(&self) {
        self.answered_for.store(true, Ordering::Release);
    }

    /// Whether `initialize` was answered in the name of a server that was down.
    pub fn was_answered_for(&self) -> bool {
        self.answered_for.load(Ordering::Acquire)
    }

    /// Keeps `stream` unless one with its id is kept already, which comes back then: two resumptions of one call at a
    /// time must meet on one stream.
    ///
    /// # Errors
    /// The session's bound of streams is reached.
    pub fn keep_once(&self, stream: &Arc<Stream>, streams_max: usize) -> Result<Option<Arc<Stream>>, Crowded> {
        let mut traffic = self.traffic.lock();
        if let Some(known) = traffic.streams.get(&stream.id()) {
            return Ok(Some(Arc::clone(known)));
        }
        traffic.keep(stream, streams_max)?;
        Ok(None)
    }

    /// Lets a kept stream go.
    pub fn let_go(&self, id: StreamId) {
        self.traffic.lock().streams.remove(&id);
    }

    /// Notes that the server asks the client something.
    ///
    /// # Errors
    /// Too many questions are open.
    pub fn ask(&self, question: Question) -> Result<(), Crowded> {
        let mut traffic = self.traffic.lock();
        if traffic.asked.len() >= ASKED_MAX {
            return Err(Crowded);
        }
        traffic.asked.insert(question.asked, question);
        Ok(())
    }

    /// Takes an open question back: `Some` for the first answer only (R6).
    pub fn answered(&self, asked: StreamId) -> Option<Question> {
        self.traffic.lock().asked.remove(&asked)
    }

    /// Notes the answer to a question of an earlier worker: `true` for the first one only (R6).
    pub fn answered_before(&self, asked: StreamId) -> bool {
        let mut traffic = self.traffic.lock();
        if traffic.answered_before.len() >= ASKED_MAX {
            traffic.answered_before.pop_first();
        }
        traffic.answered_before.insert(asked)
    }

    /// Whether the server's question `original` was put to the client by an earlier worker: the keeper gives again what a
    /// child said shortly before that worker's death.
    pub fn was_asked_earlier(&self, original: &Bytes) -> bool {
        self.asked_earlier.iter().flat_map(BTreeMap::values).any(|question| question.original == *original)
    }

    /// When an earlier worker put the question `asked` to the client. The epoch of all time if none did so for the child
    /// that is there, `None` if that is not known.
    pub fn asked_earlier_at(&self, asked: StreamId) -> Option<Timestamp> {
        let known = self.asked_earlier.as_ref()?;
        Some(known.get(&asked).map_or(Timestamp::from_unix_millis(0), |question| question.asked_at))
    }

    /// The dressed id of the open question that the server knows as `original`.
    pub fn asked_as(&self, original: &[u8]) -> Option<StreamId> {
        self.traffic.lock().asked.values().find(|question| question.original == original).map(|question| question.asked)
    }

    /// Counts one more connection that reads a stream of this session.
    pub fn begin_reading(&self) {
        self.streams.fetch_add(1, Ordering::AcqRel);
    }

    /// Counts one connection less.
    pub fn end_reading(&self) {
        self.streams.fetch_sub(1, Ordering::AcqRel);
    }

    /// Leaves word for the client, to go with the next result (U6). A later word replaces an unread one.
    pub fn leave_notice(&self, notice: Bytes) {
        let mut place = self.notice.lock();
        *place = Some(notice);
        self.has_notice.store(true, Ordering::Release);
    }

    /// Lets `place` put the word for the client into an answer, if there is one; it is gone only if that succeeds. Costs
    /// a load when there is none.
    pub fn with_notice<T>(&self, place: impl FnOnce(&[u8]) -> Option<T>) -> Option<T> {
        if !self.has_notice.load(Ordering::Acquire) {
            return None;
        }
        let mut notice = self.notice.lock();
        let placed = place(notice.as_deref()?)?;
        *notice = None;
        self.has_notice.store(false, Ordering::Release);
        Some(placed)
    }

    /// Ends everything that runs in this session's name in memory; the ledger knows already. A stream that carries
    /// answers, too, is left to its reader, who waits for what the calls in flight are told.
    pub fn shut(&self) {
        self.listen.keep_no_more();
        self.traffic.lock().streams.values().for_each(|stream| stream.keep_no_more());
        self.ended.set();
        if !self.relays() {
            self.listen.close();
        }
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
        if let Some(place) = traffic.calls.iter().rposition(|call| call.stream == self.stream) {
            traffic.calls.remove(place);
        }
        traffic.given_up.remove(&self.stream);
        drop(traffic);
        self.live.calls.fetch_sub(1, Ordering::AcqRel);
        self.live.idle.notify_waiters();
    }
}

/// A request that was let in. Dropping it ends its claim on the session's attention.
pub struct Entry(Arc<Live>);

impl Deref for Entry {
    type Target = Arc<Live>;

    fn deref(&self) -> &Arc<Live> {
        &self.0
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.0.entries.fetch_sub(1, Ordering::AcqRel);
        self.0.idle.notify_waiters();
    }
}

/// Why a request is not let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Barred {
    /// The machine refuses it.
    Refused(Refusal),
    /// The session is on its way out of memory: look again.
    Leaving,
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

/// The most characters that are kept of what a call names.
pub const CALL_NAME_CHARS_MAX: usize = 128;
const ASKED_MAX: usize = 64;
/// Room for the events of one life of a listening stream.
const LISTEN_LIFE_BITS: u32 = 24;
/// The most bytes of finished streams that are kept for one session; the newest answer is kept whatever its size.
const KEPT_BYTES_MAX: usize = 32 << 20;
