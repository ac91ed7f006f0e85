//! The listening stream: what a server says unasked (U9).

use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::wire::envelope::{self, Kind};
use mainstay_core::wire::sse::Event;
use tokio::time::Instant;

use super::own::Probe;
use super::reply::{Events, EventsEnd, NoStream, message_of};
use super::{Fault, Http, Session};
use crate::ears::{Pace, REPROBE};
use crate::failure::Failure;
use crate::notice::Notice;
use crate::task::spawn;
use crate::upstreams::Upstreams;
use crate::wire::{self, Sort, lock};

/// The session in which the server has said that it has no such stream, and when it is asked again. Kept by the link, not
/// in the task: clients come and go, and each would ask anew.
pub(super) type NoStreamIn = Option<(Weak<Session>, Instant)>;

/// How one try at the listening stream ended.
enum Ended {
    /// The stream was there, and ended or broke.
    Cut,
    /// The server is not there for now.
    Away,
    /// The server has no such stream.
    None,
    /// The server does not know the session.
    SessionLost,
    /// The session is another one now, or over.
    Renewed,
}

impl Http {
    /// One more listener. The stream is kept open while there is one.
    pub(crate) fn listen(self: &Arc<Self>) {
        lock(&self.ears).listen(|| spawn(Box::pin(Arc::clone(self).keep_listening())).abort_handle());
    }

    /// One listener less.
    pub(crate) fn unlisten(&self) {
        lock(&self.ears).unlisten();
    }

    async fn keep_listening(self: Arc<Self>) {
        let mut pace = Pace::from(PAUSE_FIRST);
        loop {
            let mut session = match self.session().await {
                Ok(session) => session,
                Err(Failure::Ended { .. }) => return,
                Err(_) => {
                    tokio::time::sleep(self.spread(pace.pause().min(OPENING_PAUSE_MAX))).await;
                    continue;
                }
            };
            if let Some(until) = self.refused_until(&session) {
                tokio::select! {
                    () = tokio::time::sleep_until(until) => {}
                    () = self.replaced(&session) => {}
                }
                pace = Pace::from(PAUSE_FIRST);
                continue;
            }
            let pause = match self.listen_in(&session, &mut pace).await {
                Ended::Renewed => {
                    pace = Pace::from(PAUSE_FIRST);
                    continue;
                }
                Ended::None => {
                    let until = Instant::now() + self.spread(REPROBE);
                    *lock(&self.no_stream) = Some((Arc::downgrade(&session), until));
                    continue;
                }
                Ended::Cut | Ended::Away => pace.pause(),
                // With a pause as after a failure: a server that forgets each session at once must not be flooded.
                Ended::SessionLost => match self.renew(&session, "404 to its listener").await {
                    Ok(renewed) => {
                        session = renewed;
                        pace.pause()
                    }
                    Err(Failure::Ended { .. }) => return,
                    Err(_) => pace.pause(),
                },
            };
            tokio::select! {
                () = tokio::time::sleep(self.spread(pause)) => {}
                () = self.replaced(&session) => pace = Pace::from(PAUSE_FIRST),
            }
        }
    }

    /// Until when the server is not asked for a stream in `session`, since it has said that there is none.
    fn refused_until(&self, session: &Arc<Session>) -> Option<Instant> {
        let mut refused = lock(&self.no_stream);
        let (refused_in, until) = refused.as_ref()?;
        if refused_in.as_ptr() == Arc::as_ptr(session) && *until > Instant::now() {
            return Some(*until);
        }
        *refused = None;
        None
    }

    /// Opens the stream of `session` and hands on what comes until it ends.
    async fn listen_in(self: &Arc<Self>, session: &Arc<Session>, pace: &mut Pace) -> Ended {
        if let Some(feed) = session.feed() {
            // The session is its stream already: there is nothing to open, only to see it end.
            let opened_at = Instant::now();
            tokio::select! {
                () = feed.ended() => {}
                () = self.replaced(session) => return Ended::Renewed,
            }
            pace.lasted(opened_at.elapsed());
            return Ended::SessionLost;
        }
        let cursor = lock(&self.state).kept.last_event_id.clone();
        // A server may send the response's head with the first event only, so there is no bound on it.
        let reply = tokio::select! {
            reply = self.get(Some(session), cursor.as_deref()) => reply,
            () = self.replaced(session) => return Ended::Renewed,
        };
        let opened = match reply {
            Ok(reply) => reply.into_stream(self.server().message_bytes_max, session.has_id()).await,
            Err(Fault::NeverSent(_) | Fault::Lost(_)) => return Ended::Away,
            Err(Fault::Failed(_)) => return Ended::None,
        };
        match opened {
            Ok(events) => self.hear(session, events, pace).await,
            Err(NoStream::Later(_)) => Ended::Away,
            Err(NoStream::Never(_)) => Ended::None,
            // Many servers have no GET at all and answer it as if the session were unknown. Only a request that they
            // do know tells.
            Err(NoStream::Unclear(_)) => match self.probe(session).await {
                Probe::Forgotten => Ended::SessionLost,
                Probe::Known => Ended::None,
                Probe::Away => Ended::Away,
            },
        }
    }

    async fn hear(self: &Arc<Self>, session: &Arc<Session>, mut events: Box<Events>, pace: &mut Pace) -> Ended {
        let opened_at = Instant::now();
        let mut saved = None;
        let ended = loop {
            let event = tokio::select! {
                event = events.next() => event,
                () = self.replaced(session) => break Ended::Renewed,
            };
            match event {
                Ok(event) => {
                    if let Some(retry) = event.retry_ms {
                        pace.ask(Duration::from_millis(retry));
                    }
                    self.take_event(session, event).await;
                    if saved.is_none_or(|at: Instant| at.elapsed() > RECORD_INTERVAL) && self.moved() {
                        saved = Some(Instant::now());
                        self.offer_record();
                    }
                }
                Err(EventsEnd::Broken(_)) => break Ended::Cut,
                Err(EventsEnd::Oversize) => {
                    tracing::warn!(server = %self.server().name, "an event on the listening stream was too large; skipped");
                    // Behind the cursor the same event would come again.
                    lock(&self.state).kept.last_event_id = None;
                    break Ended::Cut;
                }
            }
        };
        pace.lasted(opened_at.elapsed());
        if self.moved() {
            self.offer_record();
        }
        ended
    }

    /// Whether the stream has a cursor that is worth keeping.
    fn moved(&self) -> bool {
        lock(&self.state).kept.last_event_id.is_some()
    }

    async fn take_event(self: &Arc<Self>, session: &Arc<Session>, event: Event) {
        let id = event.id.as_deref().filter(|id| id.len() <= CURSOR_BYTES_MAX).map(Box::<str>::from);
        if let Some(data) = message_of(event) {
            match envelope::batch(&data) {
                Ok(Some(spans)) => {
                    for span in spans {
                        self.take_unasked(session, data.slice(span)).await;
                    }
                }
                Ok(None) => self.take_unasked(session, data).await,
                Err(_) => tracing::debug!(server = %self.server().name, "an event is no JSON-RPC message; skipped"),
            }
        }
        // The cursor moves after the message was handed on: one that is lost on the way comes again.
        if let Some(id) = id {
            lock(&self.state).kept.last_event_id = (!id.is_empty()).then_some(id);
        }
    }

    async fn take_unasked(self: &Arc<Self>, session: &Arc<Session>, message: Bytes) {
        let Ok(scanned) = envelope::scan(&message) else {
            tracing::debug!(server = %self.server().name, "an event is no JSON-RPC message; skipped");
            return;
        };
        match wire::sort(&scanned, &message) {
            Sort::Ping => self.answer_ping(session, wire::id_of(&scanned, &message).unwrap_or_default()),
            Sort::Response => {
                tracing::debug!(server = %self.server().name, "a response on the listening stream; skipped")
            }
            Sort::Message => {
                if self.notices.tell(Notice::message(message.clone())).await {
                    return;
                }
                Upstreams::count(&self.upstreams.counters.notices_dropped);
                if scanned.kind == Kind::Request
                    && let Some(id) = wire::id_of(&scanned, &message)
                {
                    self.refuse_request(session, id);
                }
            }
        }
    }

    /// Tells the server that its request reached nobody, so that it does not wait.
    fn refuse_request(self: &Arc<Self>, session: &Arc<Session>, id: &[u8]) {
        let (http, session) = (Arc::clone(self), Arc::clone(session));
        let refusal = refusal(id);
        spawn(async move {
            if tokio::time::timeout(REFUSAL_BOUND, http.post(Some(&session), refusal)).await.is_err() {
                tracing::debug!(server = %http.server().name, "a request of the server could not be refused in time");
            }
        });
    }

    /// Resolves once `session` is not the link's session any more.
    async fn replaced(&self, session: &Arc<Session>) {
        loop {
            let renewed = self.renewed.notified();
            tokio::pin!(renewed);
            renewed.as_mut().enable();
            if !lock(&self.state).session.as_ref().is_some_and(|current| Arc::ptr_eq(current, session)) {
                return;
            }
            renewed.await;
        }
    }

    /// `pause`, up to a quarter longer: sessions that lost a server together should not come back together.
    fn spread(&self, pause: Duration) -> Duration {
        let [random, ..] = (self.upstreams.parts.entropy)();
        pause + pause / 4 * u32::from(random) / 255
    }
}

/// What a server is told whose request `id` reached nobody.
pub(super) fn refusal(id: &[u8]) -> Bytes {
    envelope::error_message(Some(id), wire::INTERNAL_ERROR, "the client can't be reached", None).into()
}

/// The first wait before a stream that was cut, or a server that is away, is tried again.
const PAUSE_FIRST: Duration = Duration::from_secs(1);

/// The longest wait before a server that was down from the start is tried again for a listener.
const OPENING_PAUSE_MAX: Duration = Duration::from_secs(4);

/// How often a moved cursor is worth a record.
const RECORD_INTERVAL: Duration = Duration::from_secs(5);

const REFUSAL_BOUND: Duration = Duration::from_secs(5);
const CURSOR_BYTES_MAX: usize = 1024;
