//! One session in memory: its machine, its way to the server, its streams and the calls in flight.

mod calls;
mod gate;
mod heard;
mod latch;
mod questions;
mod streams;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use bytes::Bytes;
use mainstay_core::call::StreamId;
use mainstay_core::id::SessionKey;
use mainstay_core::session::{Activity, Session};
use mainstay_core::wire::method::Version;
use mainstay_upstream::{Link, Server};
use parking_lot::Mutex;
use tokio::sync::Notify;

pub use crate::engine::live::calls::{CALL_NAME_CHARS_MAX, Flight, InFlight};
use crate::engine::live::gate::Gate;
pub use crate::engine::live::gate::{Barred, Entry};
pub use crate::engine::live::heard::Heard;
pub use crate::engine::live::latch::Latch;
pub use crate::engine::live::questions::{AskedEarlier, Open};
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
    heard: Mutex<Option<Box<Heard>>>,
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

#[derive(Default)]
struct Traffic {
    calls: Vec<InFlight>,
    /// Streams of calls that a client may come back to.
    streams: BTreeMap<StreamId, Arc<Stream>>,
    /// Questions of the server that await the client's answer, by the number that they were dressed with.
    asked: BTreeMap<StreamId, Open>,
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
    /// What of its child earlier workers have put on its streams.
    pub heard: Option<Heard>,
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
            heard: Mutex::new(parts.heard.map(Box::new)),
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

    /// What keeps the session from being idle: requests being served and calls in flight, and streams that are read.
    pub fn activity(&self) -> Activity {
        let calls = self.calls.load(Ordering::Acquire).saturating_add(self.entries.load(Ordering::Acquire));
        Activity { calls, streams: self.streams.load(Ordering::Acquire) }
    }

    /// Whether the client is there: a request of it waits for its answer, or a connection reads a stream.
    pub fn is_connected(&self) -> bool {
        self.entries.load(Ordering::Acquire) > 0 || self.streams.load(Ordering::Acquire) > 0
    }

    /// Whether a connection reads a stream of this session.
    pub fn is_read(&self) -> bool {
        self.streams.load(Ordering::Acquire) > 0
    }

    /// Notes that `initialize` was answered in the name of a server that was down.
    pub fn note_answered_for(&self) {
        self.answered_for.store(true, Ordering::Release);
    }

    /// Whether `initialize` was answered in the name of a server that was down.
    pub fn was_answered_for(&self) -> bool {
        self.answered_for.load(Ordering::Acquire)
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

/// Room for the events of one life of a listening stream.
const LISTEN_LIFE_BITS: u32 = 24;
