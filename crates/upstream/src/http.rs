//! The way to a server over Streamable HTTP (2025-03-26 to 2025-11-25, Transports), or over the HTTP+SSE before it
//! ([`legacy`]).
//!
//! One [`Http`] is one client session's upstream session. It owns the session's id, notices its loss and makes it
//! again once for all calls that wait (U4); it repeats nothing that could be executed twice (U5).

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::HeaderValue;
use mainstay_core::id::SessionKey;
use mainstay_core::resume::{OwedDelete, ResumeRecord, UpstreamId};
use mainstay_keeper::client::Held;
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, timeout_at};

use crate::call::{Answer, AnswerStream, Call, Incoming, Way};
use crate::ears::Ears;
use crate::failure::{Blame, Failure};
use crate::flight::Flight;
use crate::handshake::{Handshake, Opened, has_version_header};
use crate::kept::{self, Kept, Past, Setting};
use crate::notice::{Notice, Notices};
use crate::server::Server;
use crate::settle;
use crate::upstreams::{Destination, Upstreams};
use crate::wire::{self, lock};

pub(crate) use answer::HttpStream;
pub(crate) use legacy::Detected;
pub(crate) use post::{PROTOCOL_VERSION, SESSION_ID};
pub(crate) use reply::{Content, Events, EventsEnd, Reply, Unread, message_of};

use legacy::{Connection, Feed, Waiting};
use listen::NoStreamIn;
use post::Fault;

mod answer;
mod legacy;
mod listen;
mod own;
mod post;
mod renew;
mod reply;

/// One client session's way to an HTTP server.
pub(crate) struct Http {
    upstreams: Arc<Upstreams>,
    destination: Arc<Destination>,
    notices: Notices,
    state: Mutex<State>,
    flight: Flight,
    /// Told when the upstream session is another one, or the link has ended.
    renewed: Notify,
    ears: Mutex<Ears>,
    no_stream: Mutex<NoStreamIn>,
    /// Whether the server answered the last `initialize` with a refusal.
    refused: AtomicBool,
}

struct State {
    kept: Kept,
    session: Option<Arc<Session>>,
}

/// An upstream session. Immutable but for the note that `initialized` was sent.
pub(crate) struct Session {
    id: Option<UpstreamId>,
    id_header: Option<HeaderValue>,
    version_header: Option<HeaderValue>,
    version: Box<str>,
    initialized: AtomicBool,
    /// The connection that it is, over HTTP+SSE.
    connection: Option<Connection>,
}

impl Session {
    fn new(id: Option<UpstreamId>, version: &str, initialized: bool) -> Self {
        let header = |text: &str| HeaderValue::from_str(text).ok();
        let mut id_header = id.as_ref().and_then(|id| header(id.reveal()));
        if let Some(value) = &mut id_header {
            value.set_sensitive(true);
        }
        Self {
            id_header,
            version_header: has_version_header(version).then(|| header(version)).flatten(),
            version: version.into(),
            initialized: AtomicBool::new(initialized),
            id,
            connection: None,
        }
    }

    fn over(self, connection: Option<Connection>) -> Self {
        Self { connection, ..self }
    }

    /// Whether its requests name it: by a header, or by the URL that its event stream said.
    fn has_id(&self) -> bool {
        self.id.is_some() || self.connection.is_some()
    }

    /// Its event stream, if that is what it is.
    fn feed(&self) -> Option<&Arc<Feed>> {
        self.connection.as_ref().map(Connection::feed)
    }

    /// Whether it was a connection that has ended.
    fn is_cut(&self) -> bool {
        self.feed().is_some_and(|feed| feed.is_over())
    }

    /// What it was lost by, if the server answered `reason` to it.
    fn loss(&self, reason: &str) -> String {
        match self.is_cut() {
            true => "its event stream ended".to_owned(),
            false => format!("the server answered {reason} to its session"),
        }
    }

    /// Ends it, if it is a connection, whoever still waits for answers.
    fn close(&self) {
        if let Some(feed) = self.feed() {
            feed.close();
        }
    }
}

/// What is left of a call's second chances.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tries {
    /// The session was made again for it.
    lost: bool,
    /// It was sent twice although it may have been executed.
    repeated: bool,
    /// The credentials were resolved anew for it.
    refreshed: bool,
    /// Until when it waits for a server that is down; set at the first failure.
    deadline: Option<Instant>,
    waits: u32,
}

impl Tries {
    /// Whether the one repetition of a safe request is still free; it is spent.
    pub(crate) fn spend_repetition(&mut self) -> bool {
        !std::mem::replace(&mut self.repeated, true)
    }

    /// Whether the one look at other credentials is still free; it is spent.
    pub(crate) fn spend_refresh(&mut self) -> bool {
        !std::mem::replace(&mut self.refreshed, true)
    }

    /// Waits a moment before a server that is down is tried again. False if patience is over.
    pub(crate) async fn wait(&mut self, patience: Duration) -> bool {
        let now = Instant::now();
        let deadline = *self.deadline.get_or_insert(now + patience);
        let pause = (BACKOFF_MIN * (1 << self.waits.min(BACKOFF_DOUBLINGS))).min(BACKOFF_MAX);
        self.waits = self.waits.saturating_add(1);
        if now + pause > deadline {
            return false;
        }
        tokio::time::sleep(pause).await;
        true
    }
}

/// A call that got as far as an answer.
pub(crate) enum Dispatched {
    Whole(Bytes),
    Events(Box<Events>, Arc<Session>),
    /// Taken by the server; the answer comes over the session's event stream.
    Waiting(Box<Waiting>, Arc<Session>),
}

/// What one attempt at a call came to.
enum Step {
    Done(Dispatched),
    /// The server does not know the session; whether the call may have been executed all the same.
    SessionLost {
        reason: &'static str,
        executed: Executed,
    },
    /// The server is not there, and has not seen the call.
    NotExecuted(Box<str>),
    /// The server is not there, and may have seen the call.
    Unavailable(Box<str>),
    /// The connection ended after the call may have gone out.
    Ambiguous(Box<str>),
    Unauthorized,
    Failed(Failure),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Executed {
    No,
    Perhaps,
}

impl Http {
    pub(crate) fn new(
        upstreams: &Arc<Upstreams>,
        server: &Arc<Server>,
        handshake: Handshake,
        past: Option<(Option<ResumeRecord>, Option<Held>)>,
        notices: mpsc::Sender<(SessionKey, Notice)>,
    ) -> Arc<Self> {
        let destination = upstreams.destination(server);
        let notices = Notices::new(handshake.key, notices);
        let past = past.map(|left| Past::of((upstreams, &destination), &notices, handshake.confirmed, left));
        let past = past.unwrap_or_default();
        let kept = Kept::new(upstreams, handshake, &past);
        let resumed = |record: ResumeRecord| Arc::new(Session::new(record.upstream_id, &record.version, record.told));
        let session = past.record.filter(|record| !kept::was_connection(record)).map(resumed);
        Arc::new(Self {
            upstreams: Arc::clone(upstreams),
            destination,
            notices,
            state: Mutex::new(State { kept, session }),
            flight: Flight::default(),
            renewed: Notify::new(),
            ears: Mutex::default(),
            no_stream: Mutex::default(),
            refused: AtomicBool::new(false),
        })
    }

    /// `outcome`, noted as word of whether the server can be reached.
    pub(crate) fn noted<T>(&self, outcome: Result<T, Failure>) -> Result<T, Failure> {
        self.destination.contacts.note(self.upstreams.now(), &outcome);
        outcome
    }

    /// See [`Link::reach`](crate::Link::reach).
    pub(crate) async fn reach(self: &Arc<Self>) -> Result<Opened, Failure> {
        self.session().await?;
        self.catch_up().await;
        lock(&self.state).kept.opened.clone().ok_or_else(|| self.over())
    }

    pub(crate) async fn call(self: &Arc<Self>, call: Call) -> Result<Answer, Failure> {
        let mut tries = Tries::default();
        let mut stream = match self.dispatch(&call, &mut tries).await? {
            Dispatched::Whole(response) => return Ok(Answer::Whole(response)),
            Dispatched::Events(events, session) => HttpStream::reading(Arc::clone(self), call, tries, events, session),
            Dispatched::Waiting(waiting, session) => {
                HttpStream::waiting(Arc::clone(self), call, tries, waiting, session)
            }
        };
        match Box::pin(stream.next()).await? {
            Incoming::Response(response) => Ok(Answer::Whole(response)),
            incoming @ (Incoming::Message(_) | Incoming::Reached) => {
                stream.put_back(incoming);
                Ok(Answer::Stream(AnswerStream(Way::Http(Box::new(stream)))))
            }
        }
    }

    /// Goes on with a call that an earlier worker sent, behind the event `last_event_id`.
    pub(crate) async fn resume(self: &Arc<Self>, call: Call, last_event_id: &str) -> Result<AnswerStream, Failure> {
        let session = self.session().await?;
        if session.feed().is_some() {
            return Err(self.unknown("its answers can't be asked for again".into()));
        }
        let stream = HttpStream::resuming(Arc::clone(self), call, session, last_event_id);
        Ok(AnswerStream(Way::Http(Box::new(stream))))
    }

    /// Sends the call until there is an answer, as often as is safe.
    pub(crate) async fn dispatch(self: &Arc<Self>, call: &Call, tries: &mut Tries) -> Result<Dispatched, Failure> {
        let patience = self.server().patience;
        loop {
            let session = self.session().await?;
            match self.attempt(&session, call).await {
                Step::Done(dispatched) => return Ok(dispatched),
                Step::SessionLost { reason, executed } => {
                    Box::pin(self.lost(&session, reason, executed, call, tries)).await?;
                }
                Step::NotExecuted(cause) => {
                    if !tries.wait(patience).await {
                        return Err(self.unreachable(cause));
                    }
                }
                Step::Unavailable(cause) => {
                    if !self.is_safe(call) {
                        return Err(self.unknown(cause));
                    }
                    if !tries.wait(patience).await {
                        return Err(self.unreachable(cause));
                    }
                }
                Step::Ambiguous(cause) => self.spend_repetition(call, tries, cause)?,
                Step::Unauthorized => {
                    if tries.refreshed || !self.destination.refresh(&*self.upstreams.parts.environment)? {
                        return Err(self.unauthorized());
                    }
                    tries.refreshed = true;
                }
                Step::Failed(failure) => return Err(failure),
            }
        }
    }

    /// After an answer was lost: allows the one repetition of a safe call, or says that the outcome is unknown (U5).
    fn spend_repetition(&self, call: &Call, tries: &mut Tries, cause: Box<str>) -> Result<(), Failure> {
        if tries.repeated || !self.is_safe(call) {
            return Err(self.unknown(cause));
        }
        tries.repeated = true;
        Upstreams::count(&self.upstreams.counters.repeated);
        Ok(())
    }

    /// After a call met a forgotten session: makes the session again, and lets the call be sent once more (U4).
    async fn lost(
        self: &Arc<Self>,
        session: &Arc<Session>,
        reason: &'static str,
        executed: Executed,
        call: &Call,
        tries: &mut Tries,
    ) -> Result<(), Failure> {
        if tries.lost {
            return Err(self.lost_again());
        }
        tries.lost = true;
        let renewed = self.renew(session, reason).await;
        if executed == Executed::Perhaps && !self.is_safe(call) {
            return Err(self.unknown("it failed inside the server, which then did not know the session".into()));
        }
        renewed?;
        Upstreams::count(&self.upstreams.counters.repeated);
        Ok(())
    }

    /// Sends a notification, or the answer to a request of the server. A server that hangs must not keep its connection
    /// and its place among the calls for ever, since nobody waits for it: there is a bound on all of it.
    pub(crate) async fn send(self: &Arc<Self>, message: Bytes) -> Result<(), Failure> {
        if wire::is_response(&message) && lock(&self.state).session.as_ref().is_some_and(|session| session.is_cut()) {
            return Err(self.lost_again());
        }
        let mut tries = Tries::default();
        let deadline = Instant::now() + self.server().patience + kept::SEND_BEYOND_PATIENCE;
        let not_open = |_| self.unreachable("its session was not opened in time".into());
        loop {
            let session = timeout_at(deadline, self.session()).await.map_err(not_open)??;
            let delivered = timeout_at(deadline, self.deliver(&session, message.clone())).await;
            match delivered.unwrap_or_else(|_| Err(Step::Ambiguous("it did not take the message in time".into()))) {
                Ok(()) => return Ok(()),
                Err(Step::SessionLost { reason, .. }) => {
                    // An answer to a question of the lost session is of no use in another one.
                    if tries.lost || wire::is_response(&message) {
                        return Err(self.lost_again());
                    }
                    tries.lost = true;
                    timeout_at(deadline, self.renew(&session, reason)).await.map_err(not_open)??;
                }
                Err(Step::NotExecuted(cause)) => {
                    if !tries.wait(self.server().patience).await {
                        return Err(self.unreachable(cause));
                    }
                }
                Err(Step::Unavailable(cause) | Step::Ambiguous(cause)) => return Err(self.unknown(cause)),
                Err(Step::Unauthorized) => {
                    return Err(self.unauthorized());
                }
                Err(Step::Failed(failure)) => return Err(failure),
                // `deliver` makes no answer of a message that has none.
                Err(Step::Done(_)) => return Ok(()),
            }
        }
    }

    /// The client said `initialized`: so does the link, once per upstream session.
    pub(crate) async fn confirm(self: &Arc<Self>) {
        lock(&self.state).kept.handshake.confirmed = true;
        self.catch_up().await;
    }

    /// Passes on an `initialized` that the client said while the session was being opened. Whichever of the two is
    /// through last finds what the other has left.
    async fn catch_up(self: &Arc<Self>) {
        if self.opened()
            && let Err(error) = self.session().await
        {
            // The next call tries again before it is sent.
            tracing::debug!(server = %self.server().name, %error, "`initialized` could not be sent yet");
        }
    }

    /// Ends the link. With `delete`, the upstream session is deleted too; what could not be is returned.
    pub(crate) async fn end(self: &Arc<Self>, delete: bool) -> Option<OwedDelete> {
        let session = {
            let mut state = lock(&self.state);
            if state.kept.ended {
                return None;
            }
            state.kept.ended = true;
            if let Some(session) = &state.session {
                session.close();
            }
            state.session.take_if(|_| delete)
        };
        lock(&self.ears).close();
        self.renewed.notify_waiters();
        self.delete(session.as_deref()?).await
    }

    /// Deletes the upstream session, or returns what is owed.
    async fn delete(&self, session: &Session) -> Option<OwedDelete> {
        let owed = self.owed(session)?;
        settle::settle(&self.upstreams, Some(&self.destination.server), &owed).await.is_owed().then_some(owed)
    }

    fn owed(&self, session: &Session) -> Option<OwedDelete> {
        let now = self.upstreams.now();
        Some(OwedDelete {
            id: 0,
            session: Some(self.notices.key()),
            server: self.server().name.clone(),
            url: self.server().url()?.to_string().into(),
            upstream_id: session.id.clone()?,
            version: session.version.clone(),
            owed_at: now,
            attempts: 0,
            next_at: now,
            last_error: None,
        })
    }

    pub(crate) fn record(&self) -> Option<ResumeRecord> {
        let state = lock(&self.state);
        let session = state.session.as_ref()?;
        let told = is_initialized(session);
        let mut record = state.kept.record(&self.upstreams, &self.destination, session.id.as_ref(), told)?;
        if session.feed().is_some() {
            kept::mark_connection(&mut record);
        }
        Some(record)
    }

    pub(crate) fn opened(&self) -> bool {
        lock(&self.state).session.is_some()
    }

    pub(crate) fn is_connection(&self) -> bool {
        lock(&self.state).session.as_ref().is_some_and(|session| session.feed().is_some())
    }

    pub(crate) fn remember(&self, setting: Setting) {
        lock(&self.state).kept.remember(self.server(), setting);
        self.offer_record();
    }

    fn offer_record(&self) {
        kept::offer(&self.upstreams, &self.notices, self.record());
    }

    /// What the session's client said, and has set since.
    pub(crate) fn handshake(&self) -> Handshake {
        lock(&self.state).kept.handshake.clone()
    }

    /// Whether the server answered the last `initialize` with a refusal, as one of the modern era does.
    pub(crate) fn was_refused(&self) -> bool {
        self.refused.load(Ordering::Acquire)
    }

    fn server(&self) -> &Server {
        &self.destination.server
    }

    fn is_safe(&self, call: &Call) -> bool {
        lock(&self.state).kept.is_safe(self.server(), call)
    }

    fn unknown(&self, cause: Box<str>) -> Failure {
        self.unknown_in(&self.upstreams, cause)
    }

    /// Notes what the answer to `call` says of the server's tools.
    fn observe(&self, call: &Call, response: &Bytes) {
        if let Some((page, first)) = kept::page_of(&self.upstreams, call, response) {
            lock(&self.state).kept.catalogue.observe(page, first);
        }
    }
}

impl Blame for Http {
    fn blamed(&self) -> &Server {
        self.server()
    }
}

impl Drop for Http {
    fn drop(&mut self) {
        lock(&self.ears).close();
    }
}

impl fmt::Debug for Http {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Http").field("server", &self.server().name).finish_non_exhaustive()
    }
}

/// Whether `initialized` has been sent in this session.
fn is_initialized(session: &Session) -> bool {
    session.initialized.load(Ordering::Acquire)
}

/// Waits between two tries at a server that is down.
const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(1);
const BACKOFF_DOUBLINGS: u32 = 5;
