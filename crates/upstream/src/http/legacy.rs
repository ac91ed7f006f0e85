//! Servers that speak HTTP+SSE, the transport of 2024-11-05 that later revisions deprecate (2024-11-05, Transports,
//! HTTP with SSE).
//!
//! One GET opens an event stream, and the connection is the session: its first event, `endpoint`, says where messages
//! go, each POST there is answered 202, and all answers come on the stream. There is nothing that a later worker could
//! resume. Everything else is as with streamable HTTP: the handshake, its repetition, what may be sent twice.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use mainstay_core::wire::envelope::{Envelope, Kind};
use tokio::time::{Instant, timeout};

use super::own::Unanswered;
use super::post::Fault;
use super::reply::{Content, EventsEnd, Reply};
use super::{Dispatched, Executed, Http, Session, Step, listen};
use crate::call::Call;
use crate::dialect::Seen;
use crate::failure::Blame;
use crate::notice::Notice;
use crate::task::spawn;
use crate::upstreams::{Upstreams, unusable};
use crate::wire::{self, lock};

pub(crate) use feed::{Feed, Heard, Waiting};

mod endpoint;
mod feed;

/// The connection that is a session. Dropping it ends the session.
pub(crate) struct Connection(Arc<Feed>);

impl Connection {
    /// Its event stream.
    pub(crate) fn feed(&self) -> &Arc<Feed> {
        &self.0
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Whether a server was found to speak HTTP+SSE, for a while: it may have been upgraded since.
#[derive(Debug, Default)]
pub(crate) struct Detected(Mutex<Option<Instant>>);

impl Detected {
    pub(super) fn is_legacy(&self) -> bool {
        lock(&self.0).is_some_and(|at| at.elapsed() < DETECTED_FOR)
    }

    pub(super) fn note(&self) {
        *lock(&self.0) = Some(Instant::now());
    }

    pub(super) fn forget(&self) {
        *lock(&self.0) = None;
    }
}

impl Http {
    /// Opens the event stream and waits until it says where messages go.
    pub(super) async fn connect(self: &Arc<Self>) -> Result<Connection, Unanswered> {
        let reply = self.get(None, None).await.map_err(Unanswered::from)?;
        if !reply.status().is_success() {
            let (status, challenge, body) = reply.read_refusal().await;
            // Nothing was asked that the body could answer.
            return Err(match self.unanswered(&Seen { status, challenge, body: &body }, false, b"") {
                Ok(_) => Unanswered::Refused { status, failure: self.rejected_with(status) },
                Err(unanswered) => unanswered,
            });
        }
        if reply.status() != StatusCode::OK || reply.content() != Content::Events {
            return Err(Unanswered::Failed(unusable(self.server(), &NO_STREAM)));
        }
        let mut events = reply.events(ENDPOINT_BYTES_MAX);
        let mut endpoint = None;
        for _ in 0..EVENTS_BEFORE_MAX {
            let event = events.next().await.map_err(|end| match end {
                EventsEnd::Broken(_) => Unanswered::Away("its event stream ended at once".into()),
                EventsEnd::Oversize => Unanswered::Failed(unusable(self.server(), &ENDPOINT_TOO_LONG)),
            })?;
            let Some(data) = event.data.filter(|data| !data.is_empty()) else { continue };
            endpoint = (event.name.as_deref() == Some("endpoint")).then_some(data);
            break;
        }
        let unfit = |problem: &dyn std::fmt::Display| Unanswered::Failed(unusable(self.server(), problem));
        let endpoint = endpoint.ok_or_else(|| unfit(&NO_STREAM))?;
        let base = self.server().url().ok_or_else(|| unfit(&NO_STREAM))?;
        let reference = String::from_utf8_lossy(&endpoint);
        let endpoint = endpoint::resolve(base, &reference).map_err(|error| unfit(&error))?;
        events.widen(self.server().message_bytes_max);
        let feed = Feed::new(endpoint);
        feed.read(self, events);
        Ok(Connection(feed))
    }

    /// A request of the link's own over an event stream, and its whole response.
    pub(super) async fn ask_over(
        self: &Arc<Self>,
        feed: &Arc<Feed>,
        id: &Bytes,
        message: Bytes,
    ) -> Result<Bytes, Unanswered> {
        let Some(mut waiting) = feed.register(id.clone(), false) else { return Err(Unanswered::SessionLost) };
        if let Some(reply) = self.submit(&mut waiting, message).await? {
            let (status, challenge, body) = reply.read_refusal().await;
            return self.unanswered(&Seen { status, challenge, body: &body }, true, id);
        }
        loop {
            match waiting.next().await {
                Some(Heard::Response(response)) => return Ok(response),
                // Nothing that comes before it matters here.
                Some(Heard::Message(_)) => {}
                Some(Heard::Oversize) => return Err(Unanswered::Failed(self.oversize())),
                None => return Err(Unanswered::Away(waiting.cause())),
            }
        }
    }

    /// One attempt at a call in a session over `feed`.
    pub(super) async fn attempt_over(self: &Arc<Self>, feed: &Arc<Feed>, session: &Arc<Session>, call: &Call) -> Step {
        let Some(mut waiting) = feed.register(call.id.clone(), !call.method.answered_plain()) else {
            if feed.is_over() {
                return Step::SessionLost { reason: "nothing more", executed: Executed::No };
            }
            return Step::Failed(self.protocol("two calls have the same id"));
        };
        match self.submit(&mut waiting, call.message.clone()).await {
            Ok(None) => Step::Done(Dispatched::Waiting(Box::new(waiting), Arc::clone(session))),
            Ok(Some(reply)) => {
                drop(waiting);
                self.refused(session, reply, Some(&call.id)).await
            }
            Err(fault) => fault.into(),
        }
    }

    /// POSTs `message` until the server has taken it, or something has come for it: some servers answer the POST only
    /// after what it asked for. Returns the response if it is a refusal.
    async fn submit(self: &Arc<Self>, waiting: &mut Waiting, message: Bytes) -> Result<Option<Reply>, Fault> {
        let (http, feed) = (Arc::clone(self), Arc::clone(waiting.feed()));
        let mut post = Box::pin(async move { http.post_over(&feed, message).await });
        let posted = tokio::select! {
            biased;
            posted = &mut post => posted,
            begun = waiting.begin() => {
                if begun {
                    spawn(timeout(POST_BOUND, post));
                    return Ok(None);
                }
                // The stream is over. If the message never went out it may go to the next one.
                let over = || Fault::Lost(waiting.cause());
                timeout(SENT_KNOWN_BOUND, post).await.unwrap_or_else(|_| Err(over()))
            }
        };
        match posted {
            Ok(reply) if reply.status().is_success() => Ok(None),
            Ok(reply) => Ok(Some(reply)),
            // The answer does not come over the connection that was lost.
            Err(Fault::Lost(_)) if timeout(LATE_ANSWER_BOUND, waiting.begin()).await.unwrap_or(false) => Ok(None),
            Err(fault) => Err(fault),
        }
    }

    /// Sends what answers a message of the server, beside whatever else goes on.
    pub(super) fn reply_over(self: &Arc<Self>, feed: &Arc<Feed>, reply: Bytes) {
        let (http, feed) = (Arc::clone(self), Arc::clone(feed));
        spawn(async move {
            if timeout(POST_BOUND, http.post_over(&feed, reply)).await.is_err() {
                tracing::debug!(server = %http.server().name, "a request of the server could not be answered in time");
            }
        });
    }

    /// Hands on a message that belongs to no call. Only a request waits for room: answers come over the same stream.
    pub(super) async fn tell_unasked(self: &Arc<Self>, feed: &Arc<Feed>, scanned: &Envelope, message: Bytes) {
        let told = match scanned.kind {
            Kind::Request => self.notices.tell(Notice::message(message.clone())).await,
            Kind::Notification | Kind::Result | Kind::Error => self.notices.offer(Notice::message(message.clone())),
        };
        if told {
            return;
        }
        Upstreams::count(&self.upstreams.counters.notices_dropped);
        if scanned.kind == Kind::Request
            && let Some(id) = wire::id_of(scanned, &message)
        {
            self.reply_over(feed, listen::refusal(id));
        }
    }
}

impl From<Fault> for Unanswered {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::NeverSent(cause) | Fault::Lost(cause) => Self::Away(cause),
            Fault::Failed(failure) => Self::Failed(failure),
        }
    }
}

const NO_STREAM: &str = "there is no event stream of HTTP+SSE (2024-11-05) at its url";
const ENDPOINT_TOO_LONG: &str = "its `endpoint` event is too long";

/// How long it is remembered that a server speaks HTTP+SSE.
const DETECTED_FOR: Duration = Duration::from_hours(1);

/// The longest event in which a server may say where messages go, give or take its other fields.
const ENDPOINT_BYTES_MAX: usize = 8 * 1024;

/// Events without data that may come before it.
const EVENTS_BEFORE_MAX: usize = 16;

/// How long a POST may go on for whose answer nobody waits any more.
const POST_BOUND: Duration = Duration::from_secs(10);

/// After the end of the stream: how long it may take to learn whether a message went out at all.
const SENT_KNOWN_BOUND: Duration = Duration::from_millis(500);

/// After a POST was lost: how long to look out for what would show that the server has it.
const LATE_ANSWER_BOUND: Duration = Duration::from_secs(1);
