//! An answer that comes as events: read, resumed where the server allows it, repeated only where that is safe.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::call::RoutedId;
use mainstay_core::wire::envelope::{self, Envelope, Kind};
use mainstay_core::wire::sse::Event;
use tokio::time::{Instant, timeout};

use super::legacy::{Heard, Waiting};
use super::reply::{Events, EventsEnd, NoStream, message_of};
use super::{Dispatched, Executed, Fault, Http, Session, Tries};
use crate::call::{Call, Incoming};
use crate::dialect::{self, Seen, Verdict};
use crate::failure::{Blame, Failure};
use crate::task::spawn;
use crate::wire::{self, Sort, same_id};

/// The messages of one call, whatever becomes of the connection that they come over.
pub(crate) struct HttpStream {
    http: Arc<Http>,
    call: Arc<Call>,
    tries: Tries,
    session: Arc<Session>,
    phase: Phase,
    cursor: Cursor,
    ready: VecDeque<Incoming>,
    /// Whether the server has said anything for the call.
    begun: bool,
}

enum Phase {
    Reading(Box<Events>),
    /// At the one event stream of the session (2024-11-05).
    Waiting(Box<Waiting>),
    /// Getting the next body. Kept here, so that a caller that looks away does not start it anew.
    Working(Work),
    Over,
}

type Work = Pin<Box<dyn Future<Output = Result<Got, Failure>> + Send>>;

/// What the work came to.
struct Got {
    dispatched: Dispatched,
    tries: Tries,
}

/// Where the stream stands, as the server counts.
#[derive(Clone, Default)]
struct Cursor {
    last_event_id: Option<Arc<str>>,
    retry: Option<Duration>,
    /// Reconnections since the cursor last moved.
    idle: u32,
}

impl HttpStream {
    pub(super) fn reading(
        http: Arc<Http>,
        call: Call,
        tries: Tries,
        events: Box<Events>,
        session: Arc<Session>,
    ) -> Self {
        Self::of((http, call, tries), Phase::Reading(events), session)
    }

    pub(super) fn waiting(
        http: Arc<Http>,
        call: Call,
        tries: Tries,
        waiting: Box<Waiting>,
        session: Arc<Session>,
    ) -> Self {
        Self::of((http, call, tries), Phase::Waiting(waiting), session)
    }

    fn of((http, call, tries): (Arc<Http>, Call, Tries), phase: Phase, session: Arc<Session>) -> Self {
        let (cursor, ready) = (Cursor::default(), VecDeque::new());
        Self { http, call: Arc::new(call), tries, session, phase, cursor, ready, begun: false }
    }

    pub(super) fn resuming(http: Arc<Http>, call: Call, session: Arc<Session>, last_event_id: &str) -> Self {
        let cursor =
            Cursor { last_event_id: Some(last_event_id.into()), retry: Some(Duration::ZERO), ..Cursor::default() };
        let (call, tries, ready) = (Arc::new(call), Tries::default(), VecDeque::new());
        let mut stream = Self { http, call, tries, session, phase: Phase::Over, cursor, ready, begun: true };
        stream.reconnect("the worker that sent it has ended".into());
        stream
    }

    pub(super) fn put_back(&mut self, incoming: Incoming) {
        self.ready.push_front(incoming);
    }

    pub(crate) fn last_event_id(&self) -> Option<&str> {
        self.cursor.last_event_id.as_deref()
    }

    /// See [`AnswerStream::next`](crate::AnswerStream::next).
    pub(crate) async fn next(&mut self) -> Result<Incoming, Failure> {
        loop {
            if let Some(incoming) = self.ready.pop_front() {
                return Ok(incoming);
            }
            match &mut self.phase {
                Phase::Over => return Err(self.http.over()),
                Phase::Working(work) => {
                    let got = work.await;
                    self.phase = Phase::Over;
                    self.take_up(got?);
                }
                Phase::Reading(events) => match events.next().await {
                    Ok(event) => self.take_in(event),
                    Err(EventsEnd::Oversize) => {
                        self.phase = Phase::Over;
                        return Err(self.http.oversize());
                    }
                    Err(EventsEnd::Broken(cause)) => {
                        self.phase = Phase::Over;
                        self.broken(cause)?;
                    }
                },
                Phase::Waiting(waiting) => match waiting.next().await {
                    Some(Heard::Message(message)) => {
                        self.begun = true;
                        return Ok(Incoming::Message(message));
                    }
                    Some(Heard::Response(response)) => {
                        let kind = envelope::scan(&response).map_or(Kind::Error, |scanned| scanned.kind);
                        self.take_response(kind, response);
                    }
                    Some(Heard::Oversize) => {
                        self.phase = Phase::Over;
                        return Err(self.http.oversize());
                    }
                    None => {
                        let cause = waiting.cause();
                        self.phase = Phase::Over;
                        self.broken(cause)?;
                    }
                },
            }
        }
    }

    fn take_up(&mut self, got: Got) {
        self.tries = got.tries;
        match got.dispatched {
            Dispatched::Whole(response) => self.ready.push_back(Incoming::Response(response)),
            Dispatched::Events(events, session) => {
                self.turn_to(session);
                self.phase = Phase::Reading(events);
            }
            Dispatched::Waiting(waiting, session) => {
                self.turn_to(session);
                self.phase = Phase::Waiting(waiting);
            }
        }
    }

    fn turn_to(&mut self, session: Arc<Session>) {
        if !Arc::ptr_eq(&session, &self.session) {
            self.cursor = Cursor::default();
            self.session = session;
        }
    }

    fn take_in(&mut self, event: Event) {
        if let Some(retry) = event.retry_ms {
            self.cursor.retry = Some(Duration::from_millis(retry).min(RETRY_MAX));
        }
        let mut moved = false;
        if let Some(id) = event.id.as_deref().filter(|id| self.cursor.last_event_id.as_deref() != Some(*id)) {
            self.cursor.last_event_id = (!id.is_empty() && id.len() <= CURSOR_BYTES_MAX).then(|| id.into());
            self.cursor.idle = 0;
            moved = self.cursor.last_event_id.is_some();
        }
        let Some(data) = message_of(event) else {
            if moved {
                self.ready.push_back(Incoming::Reached);
            }
            return;
        };
        // A revision of 2025-03-26 may put several into one event.
        match envelope::batch(&data) {
            Ok(Some(spans)) => spans.into_iter().for_each(|span| self.take_message(data.slice(span))),
            Ok(None) => self.take_message(data),
            Err(_) => tracing::debug!(server = %self.http.server().name, "an event is no JSON-RPC message; skipped"),
        }
    }

    fn take_message(&mut self, message: Bytes) {
        let Ok(scanned) = envelope::scan(&message) else {
            tracing::debug!(server = %self.http.server().name, "an event is no JSON-RPC message; skipped");
            return;
        };
        match wire::sort(&scanned, &message) {
            Sort::Ping => self.http.answer_ping(&self.session, wire::id_of(&scanned, &message).unwrap_or_default()),
            Sort::Message => {
                self.begun = true;
                self.ready.push_back(Incoming::Message(message));
            }
            Sort::Response if self.is_foreign(&scanned, &message) => {
                tracing::debug!(server = %self.http.server().name, "a response to another request; skipped");
            }
            Sort::Response => self.take_response(scanned.kind, message),
        }
    }

    /// Whether the response answers something else. An error under an id that is nobody's answers this call: servers
    /// that could not read a request say so under ids of their own.
    fn is_foreign(&self, scanned: &Envelope, message: &[u8]) -> bool {
        wire::id_of(scanned, message).is_some_and(|id| {
            !same_id(id, &self.call.id) && (scanned.kind == Kind::Result || RoutedId::decode(id).is_some())
        })
    }

    fn take_response(&mut self, kind: Kind, message: Bytes) {
        // A server may have forgotten the session and say so in an event. Only as the first word is that a refusal.
        if !self.begun && self.is_loss(kind, &message) {
            self.make_again();
            return;
        }
        let owned = message.clone();
        let response = match kind {
            Kind::Error => dialect::answer_with_id(&message, &self.call.id).map_or(owned, Bytes::from),
            Kind::Result | Kind::Request | Kind::Notification => owned,
        };
        self.http.observe(&self.call, &response);
        self.ready.push_back(Incoming::Response(response));
        if let Phase::Reading(events) = std::mem::replace(&mut self.phase, Phase::Over) {
            events.finish();
        }
    }

    fn is_loss(&self, kind: Kind, message: &[u8]) -> bool {
        let seen = Seen { status: 200, challenge: false, body: message };
        kind == Kind::Error
            && matches!(dialect::classify(&seen, self.session.has_id(), Some(&self.call.id)), Verdict::SessionLost(_))
    }

    /// Makes the session again and sends the refused call once more.
    fn make_again(&mut self) {
        let (http, call, session) = (Arc::clone(&self.http), Arc::clone(&self.call), Arc::clone(&self.session));
        let mut tries = self.tries.clone();
        self.phase = Phase::Working(Box::pin(async move {
            http.lost(&session, "200 with an error", Executed::No, &call, &mut tries).await?;
            Ok(Got { dispatched: http.dispatch(&call, &mut tries).await?, tries })
        }));
    }

    /// The connection ended before the response: goes on behind the last event, else repeats the call if that is safe.
    fn broken(&mut self, cause: Box<str>) -> Result<(), Failure> {
        if self.cursor.last_event_id.is_some() && self.cursor.idle < RESUME_TRIES_MAX {
            self.cursor.idle += 1;
            self.reconnect(cause);
            return Ok(());
        }
        self.http.spend_repetition(&self.call, &mut self.tries, cause)?;
        let (http, call, mut tries) = (Arc::clone(&self.http), Arc::clone(&self.call), self.tries.clone());
        self.cursor = Cursor::default();
        self.phase =
            Phase::Working(Box::pin(
                async move { Ok(Got { dispatched: http.dispatch(&call, &mut tries).await?, tries }) },
            ));
        Ok(())
    }

    /// Gets the rest of the stream by GET and `Last-Event-ID` (2025-11-25, Transports, Resumability and Redelivery).
    fn reconnect(&mut self, cause: Box<str>) {
        let (http, call, session) = (Arc::clone(&self.http), Arc::clone(&self.call), Arc::clone(&self.session));
        let (cursor, mut tries) = (self.cursor.clone(), self.tries.clone());
        self.phase = Phase::Working(Box::pin(async move {
            let cause = match http.rejoin_stream(&session, &cursor).await {
                Ok(events) => return Ok(Got { dispatched: Dispatched::Events(events, session), tries }),
                Err(seen) => seen.unwrap_or(cause),
            };
            http.spend_repetition(&call, &mut tries, cause)?;
            Ok(Got { dispatched: http.dispatch(&call, &mut tries).await?, tries })
        }));
    }
}

impl Http {
    /// The stream behind `cursor`, or why there is none. Bounded by tries and by patience.
    async fn rejoin_stream(&self, session: &Session, cursor: &Cursor) -> Result<Box<Events>, Option<Box<str>>> {
        let asked = cursor.retry.unwrap_or(RETRY_DEFAULT).max(RETRY_FLOOR);
        let mut pause = asked.max(RETRY_MIN * cursor.idle.saturating_sub(1));
        let deadline = Instant::now() + pause + self.server().patience;
        let mut cause = None;
        for _ in 0..RESUME_TRIES_MAX {
            tokio::time::sleep(pause).await;
            match timeout(RESUME_HEAD_BOUND, self.get(Some(session), cursor.last_event_id.as_deref())).await {
                Ok(Ok(reply)) => match reply.into_stream(self.server().message_bytes_max, session.has_id()).await {
                    Ok(events) => return Ok(events),
                    Err(NoStream::Later(status)) => cause = Some(format!("HTTP status {status}").into()),
                    Err(NoStream::Never(status) | NoStream::Unclear(status)) => {
                        return Err(Some(format!("it does not go on with the answer: HTTP status {status}").into()));
                    }
                },
                Ok(Err(Fault::NeverSent(seen) | Fault::Lost(seen))) => cause = Some(seen),
                Ok(Err(Fault::Failed(_))) => return Err(cause),
                Err(_) => cause = Some("it did not answer in time".into()),
            }
            pause = (pause * 2).clamp(RETRY_MIN, RETRY_DOUBLED_MAX);
            if Instant::now() + pause > deadline {
                break;
            }
        }
        Err(cause)
    }

    /// Answers a `ping` of the server, beside whatever else goes on.
    pub(super) fn answer_ping(self: &Arc<Self>, session: &Arc<Session>, id: &[u8]) {
        let (http, session, pong) = (Arc::clone(self), Arc::clone(session), wire::pong(id));
        spawn(async move {
            if timeout(PONG_BOUND, http.post(Some(&session), pong)).await.is_err() {
                tracing::debug!(server = %http.server().name, "a ping could not be answered in time");
            }
        });
    }
}

/// How long to wait before a cut stream is taken up again, if the server does not say.
const RETRY_DEFAULT: Duration = Duration::from_millis(500);
const RETRY_MIN: Duration = Duration::from_millis(100);
/// The shortest wait that a server may ask for.
const RETRY_FLOOR: Duration = Duration::from_millis(10);
/// The longest wait that a server may ask for.
const RETRY_MAX: Duration = Duration::from_secs(60);
/// The longest wait that failures alone lead to.
const RETRY_DOUBLED_MAX: Duration = Duration::from_secs(2);

/// How often a stream is taken up again without getting any further.
const RESUME_TRIES_MAX: u32 = 12;

/// How long a server may take to begin a resumed stream.
const RESUME_HEAD_BOUND: Duration = Duration::from_secs(10);

/// How long answering a `ping` may take.
const PONG_BOUND: Duration = Duration::from_secs(5);

/// The longest event id that is kept.
const CURSOR_BYTES_MAX: usize = 1024;
