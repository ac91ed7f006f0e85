//! The one event stream of a session, and who waits for what comes on it.
//!
//! A task reads the stream in order and gives each message to the call that it belongs to. What waits to be taken is
//! bounded in number and bytes: beyond that the stream is not read on, and the server has to wait.

use std::sync::{Arc, Mutex, OnceLock, Weak};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Uri};
use mainstay_core::wire::envelope::{self, Envelope};
use mainstay_core::wire::sse::Event;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::AbortHandle;

use super::super::post::PROTOCOL_VERSION;
use super::super::reply::{Events, EventsEnd, message_of};
use super::Http;
use crate::dialect;
use crate::handshake::has_version_header;
use crate::pending::{Owner, Pending, Ticket};
use crate::task::spawn;
use crate::wire::{self, Sort, lock};

/// The event stream, alive or over, and where messages to the server go.
pub(crate) struct Feed {
    endpoint: Uri,
    /// The header of the negotiated revision, if that is one which has it.
    version: OnceLock<HeaderValue>,
    calls: Mutex<Calls>,
    ended: Notify,
    reader: OnceLock<AbortHandle>,
    /// Room for what waits to be taken, in KiB.
    room: Arc<Semaphore>,
}

#[derive(Default)]
struct Calls {
    pending: Pending<mpsc::Sender<Delivery>>,
    end: Option<End>,
}

/// Why nothing more comes.
enum End {
    /// The stream ended or broke.
    Broken(Box<str>),
    /// An event was larger than allowed, so that the stream can't be read on.
    Oversize,
    /// The link has no more use for it.
    Closed,
}

/// What comes for a call.
pub(crate) enum Heard {
    Message(Bytes),
    Response(Bytes),
    /// The answer was too large.
    Oversize,
}

struct Delivery {
    heard: Heard,
    /// Given back when it is taken.
    _room: Option<OwnedSemaphorePermit>,
}

impl Feed {
    pub(super) fn new(endpoint: Uri) -> Arc<Self> {
        Arc::new(Self {
            endpoint,
            version: OnceLock::new(),
            calls: Mutex::default(),
            ended: Notify::new(),
            reader: OnceLock::new(),
            room: Arc::new(Semaphore::new(ROOM_KIB)),
        })
    }

    /// Begins to read. Does not keep the link alive.
    pub(super) fn read(self: &Arc<Self>, http: &Arc<Http>, events: Box<Events>) {
        let reader = spawn(Arc::clone(self).pump(Arc::downgrade(http), events)).abort_handle();
        // Set once: a feed is read by one task, from its beginning.
        self.reader.get_or_init(|| reader);
    }

    /// Where messages go.
    pub(crate) fn endpoint(&self) -> &Uri {
        &self.endpoint
    }

    /// Notes the revision that the server chose.
    pub(crate) fn speak(&self, version: &str) {
        if has_version_header(version)
            && let Ok(header) = HeaderValue::from_str(version)
        {
            self.version.get_or_init(|| header);
        }
    }

    pub(crate) fn add_to(&self, headers: &mut HeaderMap) {
        if let Some(version) = self.version.get() {
            headers.insert(PROTOCOL_VERSION, version.clone());
        }
    }

    /// Whether nothing more can come.
    pub(crate) fn is_over(&self) -> bool {
        lock(&self.calls).end.is_some()
    }

    /// Resolves once nothing more can come.
    pub(crate) async fn ended(&self) {
        loop {
            let ended = self.ended.notified();
            tokio::pin!(ended);
            ended.as_mut().enable();
            if self.is_over() {
                return;
            }
            ended.await;
        }
    }

    /// Gives it up: whoever waits for an answer hears that none will come.
    pub(crate) fn close(&self) {
        if let Some(reader) = self.reader.get() {
            reader.abort();
        }
        self.finish(End::Closed);
    }

    /// Waits for the answer with the raw id `id`. `None` if nothing more can come or the id is taken.
    pub(super) fn register(self: &Arc<Self>, id: Bytes, may_stream: bool) -> Option<Waiting> {
        let (slot, deliveries) = mpsc::channel(SLOT_MESSAGES_MAX);
        let mut calls = lock(&self.calls);
        if calls.end.is_some() {
            return None;
        }
        let ticket = calls.pending.register(id, may_stream, slot)?;
        drop(calls);
        Some(Waiting { feed: Arc::clone(self), ticket, deliveries, first: None })
    }

    async fn pump(self: Arc<Self>, http: Weak<Http>, mut events: Box<Events>) {
        let end = loop {
            match events.next().await {
                Ok(event) => match http.upgrade() {
                    Some(http) => self.take_event(&http, event).await,
                    None => break End::Closed,
                },
                Err(EventsEnd::Broken(_)) => break End::Broken("its event stream ended".into()),
                Err(EventsEnd::Oversize) => break End::Oversize,
            }
        };
        if let Some(http) = http.upgrade() {
            tracing::debug!(server = %http.server().name, "event stream ended");
        }
        self.finish(end);
    }

    fn finish(&self, end: End) {
        let mut calls = lock(&self.calls);
        if calls.end.is_some() {
            return;
        }
        // Whose the event was can be told only if there is one that it can have been for.
        let alone = calls.pending.count() == 1;
        for entry in calls.pending.drain() {
            if alone && matches!(end, End::Oversize) {
                // A full queue says the same by its end.
                let _told = entry.slot.try_send(Delivery { heard: Heard::Oversize, _room: None });
            }
        }
        calls.end = Some(end);
        drop(calls);
        self.ended.notify_waiters();
    }

    async fn take_event(self: &Arc<Self>, http: &Arc<Http>, event: Event) {
        let Some(data) = message_of(event) else { return };
        // A revision of 2025-03-26 may put several into one event.
        match envelope::batch(&data) {
            Ok(Some(spans)) => {
                for span in spans {
                    self.take_message(http, data.slice(span)).await;
                }
            }
            Ok(None) => self.take_message(http, data).await,
            Err(_) => tracing::debug!(server = %http.server().name, "an event is no JSON-RPC message; skipped"),
        }
    }

    async fn take_message(self: &Arc<Self>, http: &Arc<Http>, message: Bytes) {
        let Ok(scanned) = envelope::scan(&message) else {
            tracing::debug!(server = %http.server().name, "an event is no JSON-RPC message; skipped");
            return;
        };
        match wire::sort(&scanned, &message) {
            Sort::Ping => http.reply_over(self, wire::pong(wire::id_of(&scanned, &message).unwrap_or_default())),
            Sort::Response => match self.claim(&scanned, &message) {
                Some((slot, answer)) => self.deliver(&slot, Heard::Response, answer).await,
                None => tracing::debug!(server = %http.server().name, "an answer to nobody; dropped"),
            },
            Sort::Message => {
                let owner = lock(&self.calls).pending.owner_of(&scanned, &message);
                match owner {
                    Owner::Call(slot) => self.deliver(&slot, Heard::Message, message).await,
                    Owner::Session => http.tell_unasked(self, &scanned, message).await,
                    Owner::Nobody => {}
                }
            }
        }
    }

    /// Whose answer it is, and the answer under that one's id: an error without an id answers the only call there is.
    fn claim(&self, scanned: &Envelope, message: &Bytes) -> Option<(mpsc::Sender<Delivery>, Bytes)> {
        let pending = &mut lock(&self.calls).pending;
        match wire::id_of(scanned, message) {
            Some(id) => Some((pending.take(&wire::id_text(id))?.slot, message.clone())),
            None => {
                let (entry, answer) = pending.take_only(|id| dialect::answer_with_id(message, id))?;
                Some((entry.slot, answer.into()))
            }
        }
    }

    async fn deliver(&self, slot: &mpsc::Sender<Delivery>, heard: fn(Bytes) -> Heard, bytes: Bytes) {
        let kib = u32::try_from(bytes.len().div_ceil(1024).min(ROOM_KIB)).unwrap_or(u32::MAX);
        // The semaphore is never closed.
        let room = Arc::clone(&self.room).acquire_many_owned(kib).await.ok();
        // Whoever waited may be gone by now.
        let _taken = slot.send(Delivery { heard: heard(bytes), _room: room }).await;
    }
}

/// A call's place. Dropping it gives up whatever still comes.
pub(crate) struct Waiting {
    feed: Arc<Feed>,
    ticket: Ticket,
    deliveries: mpsc::Receiver<Delivery>,
    first: Option<Heard>,
}

impl Waiting {
    /// Waits until something has come, which is kept for [`next`](Self::next). False if nothing can come any more.
    /// Cancel-safe.
    pub(super) async fn begin(&mut self) -> bool {
        if self.first.is_none() {
            self.first = self.deliveries.recv().await.map(|delivery| delivery.heard);
        }
        self.first.is_some()
    }

    /// What comes next for the call; `None` once nothing can come any more. Cancel-safe.
    pub(crate) async fn next(&mut self) -> Option<Heard> {
        match self.first.take() {
            Some(heard) => Some(heard),
            None => self.deliveries.recv().await.map(|delivery| delivery.heard),
        }
    }

    /// The stream that it waits at.
    pub(super) fn feed(&self) -> &Arc<Feed> {
        &self.feed
    }

    /// Why nothing can come any more.
    pub(crate) fn cause(&self) -> Box<str> {
        match &lock(&self.feed.calls).end {
            Some(End::Broken(cause)) => cause.clone(),
            Some(End::Oversize) => "a message above the limit made its event stream unreadable".into(),
            Some(End::Closed) | None => "its session was given up".into(),
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        lock(&self.feed.calls).pending.leave(&self.ticket);
    }
}

/// Messages that may wait for one call.
const SLOT_MESSAGES_MAX: usize = 64;

/// What may wait for all calls together; a larger message waits alone.
const ROOM_KIB: usize = 32 * 1024;
