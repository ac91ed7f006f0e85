//! One exchange with the server: a request out, and the beginning of what comes back.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{ACCEPT, CONTENT_TYPE, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Body as _, Incoming};
use mainstay_core::resume::UpstreamId;
use mainstay_core::wire::envelope::{self, Kind};
use mainstay_core::wire::sse::{Event, SseDecoder};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

use super::{Dispatched, Executed, Http, Session, Step};
use crate::call::Call;
use crate::dialect::{self, Seen, Verdict};
use crate::failure::Failure;
use crate::task::spawn;
use crate::upstreams::{SendError, describe, unusable};
use crate::wire::{self, Sort, same_id};

pub(crate) const SESSION_ID: HeaderName = HeaderName::from_static("mcp-session-id");
pub(crate) const PROTOCOL_VERSION: HeaderName = HeaderName::from_static("mcp-protocol-version");
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// The beginning of a response.
pub(crate) struct Reply {
    pub(crate) response: Response<Incoming>,
    /// Held until the body is read: it is a place among the calls to that host.
    permit: Option<OwnedSemaphorePermit>,
}

/// Why there is no response.
pub(crate) enum Fault {
    NeverSent(Box<str>),
    Lost(Box<str>),
    Failed(Failure),
}

/// Why a body could not be read.
enum Unread {
    Broken(Box<str>),
    Oversize,
}

/// What kind of body a response has.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Content {
    Json,
    Events,
    Other,
}

/// What a `ping` shows of a session.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Probe {
    Known,
    Forgotten,
    /// Nothing: the server is not there.
    Away,
}

/// Why a request of the link's own has no result.
pub(crate) enum Unanswered {
    /// The server is not there for now.
    Away(Box<str>),
    /// The server does not know the session.
    SessionLost,
    Failed(Failure),
}

/// A request of the link's own, answered.
pub(super) struct Own {
    /// The id under which it went.
    pub(super) id: Bytes,
    pub(super) response: Bytes,
    /// The session id that the server gave with it.
    pub(super) session_id: Option<UpstreamId>,
}

impl Reply {
    fn status(&self) -> StatusCode {
        self.response.status()
    }

    fn content(&self) -> Content {
        content_type(self.response.headers())
    }

    /// The session id that the server gave.
    pub(crate) fn session_id(&self) -> Option<UpstreamId> {
        self.response.headers().get(SESSION_ID).and_then(|value| value.to_str().ok()).and_then(UpstreamId::parse)
    }

    /// Its events, as they come.
    pub(crate) fn events(self, event_bytes_max: usize) -> Box<Events> {
        Box::new(Events {
            body: self.response.into_body(),
            decoder: SseDecoder::new(event_bytes_max + EVENT_FIELDS_BYTES),
            _permit: self.permit,
        })
    }

    /// The whole body, if it is not above `bytes_max`.
    async fn collect(self, bytes_max: usize) -> Result<Bytes, Unread> {
        let mut body = self.response.into_body();
        let Some(first) = next_data(&mut body).await.map_err(Unread::Broken)? else { return Ok(Bytes::new()) };
        if first.len() > bytes_max || body.size_hint().lower() > bytes_max as u64 {
            return Err(Unread::Oversize);
        }
        if body.is_end_stream() {
            return Ok(first);
        }
        let expected = usize::try_from(body.size_hint().lower()).unwrap_or_default();
        let mut whole = BytesMut::with_capacity(first.len() + expected.min(bytes_max));
        whole.extend_from_slice(&first);
        while let Some(chunk) = next_data(&mut body).await.map_err(Unread::Broken)? {
            if whole.len() + chunk.len() > bytes_max {
                return Err(Unread::Oversize);
            }
            whole.extend_from_slice(&chunk);
        }
        Ok(whole.freeze())
    }

    /// The beginning of the body of a refusal; what can't be read in time does not matter.
    async fn read_refusal(self) -> (u16, bool, Bytes) {
        let status = self.status().as_u16();
        let challenge = self.response.headers().contains_key(WWW_AUTHENTICATE);
        let collected = timeout(REFUSAL_BOUND, self.collect(REFUSAL_BYTES_MAX)).await;
        let body = collected.ok().and_then(Result::ok).unwrap_or_default();
        (status, challenge, body)
    }
}

/// The events of a response body.
pub(crate) struct Events {
    body: Incoming,
    decoder: SseDecoder,
    _permit: Option<OwnedSemaphorePermit>,
}

/// Why there are no more events.
pub(crate) enum EventsEnd {
    /// The body ended or broke.
    Broken(Box<str>),
    /// An event was larger than allowed.
    Oversize,
}

impl Events {
    /// The next event. Cancel-safe.
    pub(crate) async fn next(&mut self) -> Result<Event, EventsEnd> {
        loop {
            if let Some(event) = self.decoder.next_event().map_err(|_| EventsEnd::Oversize)? {
                return Ok(event);
            }
            match next_data(&mut self.body).await.map_err(EventsEnd::Broken)? {
                Some(chunk) => self.decoder.push(&chunk),
                None => return Err(EventsEnd::Broken("its answer's stream ended without the answer".into())),
            }
        }
    }

    /// Reads on to the end, so that the connection can be used again. Bounded.
    pub(crate) fn finish(mut self: Box<Self>) {
        if self.body.is_end_stream() {
            return;
        }
        spawn(timeout(FINISH_BOUND, async move { while let Ok(Some(_)) = next_data(&mut self.body).await {} }));
    }
}

impl Http {
    /// One attempt at a call in `session`.
    pub(super) async fn attempt(self: &Arc<Self>, session: &Arc<Session>, call: &Call) -> Step {
        let reply = match self.post(Some(session), call.message.clone()).await {
            Ok(reply) => reply,
            Err(fault) => return fault.into(),
        };
        if !reply.status().is_success() {
            return self.refused(session, reply, Some(&call.id)).await;
        }
        match reply.content() {
            Content::Json => self.read_answer(session, reply, call).await,
            Content::Events => {
                Step::Done(Dispatched::Events(reply.events(self.server().message_bytes_max), Arc::clone(session)))
            }
            Content::Other => {
                Step::Failed(self.protocol("it answered a request with neither JSON nor an event stream"))
            }
        }
    }

    /// Sends a message that has no answer.
    pub(super) async fn deliver(self: &Arc<Self>, session: &Arc<Session>, message: Bytes) -> Result<(), Step> {
        let reply = self.post(Some(session), message).await.map_err(Step::from)?;
        if reply.status().is_success() {
            return Ok(());
        }
        Err(self.refused(session, reply, None).await)
    }

    async fn read_answer(&self, session: &Session, reply: Reply, call: &Call) -> Step {
        let body = match reply.collect(self.server().message_bytes_max).await {
            Ok(body) => body,
            Err(Unread::Oversize) => return Step::Failed(self.oversize()),
            Err(Unread::Broken(cause)) => return Step::Ambiguous(cause),
        };
        let Ok(envelope) = envelope::scan(&body) else {
            return Step::Failed(self.protocol("its answer is no JSON-RPC message"));
        };
        if let Kind::Error = envelope.kind {
            let seen = Seen { status: 200, challenge: false, body: &body };
            if let Verdict::SessionLost(reason) = dialect::classify(&seen, session.has_id(), Some(&call.id)) {
                return Step::SessionLost { reason, executed: Executed::No };
            }
        }
        let answers = wire::id_of(&envelope, &body).map(|id| same_id(id, &call.id));
        match (envelope.kind, answers) {
            (Kind::Result | Kind::Error, Some(true)) => {
                self.observe(call, &body);
                Step::Done(Dispatched::Whole(body))
            }
            (Kind::Error, Some(false) | None) => match dialect::answer_with_id(&body, &call.id) {
                Some(answer) => Step::Done(Dispatched::Whole(answer.into())),
                None => Step::Failed(self.protocol("its answer is no JSON-RPC message")),
            },
            (Kind::Result | Kind::Request | Kind::Notification, _) => {
                Step::Failed(self.protocol("its answer is to another request"))
            }
        }
    }

    /// What a response with another status than 2xx comes to.
    async fn refused(self: &Arc<Self>, session: &Arc<Session>, reply: Reply, call_id: Option<&Bytes>) -> Step {
        let (status, challenge, body) = reply.read_refusal().await;
        let seen = Seen { status, challenge, body: &body };
        let rejected = || Step::Failed(self.rejected(status));
        let answered = || {
            let answer = call_id.and_then(|id| dialect::answer_with_id(&body, id));
            answer.map_or_else(rejected, |answer| Step::Done(Dispatched::Whole(answer.into())))
        };
        match dialect::classify(&seen, session.has_id(), call_id.map(|id| &**id)) {
            Verdict::Answer => answered(),
            Verdict::SessionLost(reason) => Step::SessionLost { reason, executed: Executed::No },
            Verdict::Suspect => match self.probe(session).await {
                Probe::Forgotten => Step::SessionLost { reason: "500", executed: Executed::Perhaps },
                Probe::Known | Probe::Away => answered(),
            },
            Verdict::Unauthorized => Step::Unauthorized,
            Verdict::NoEndpoint => Step::Failed(unusable(self.server(), &NO_ENDPOINT)),
            Verdict::Unavailable => {
                let cause = format!("HTTP status {status}").into();
                // Whoever limits rates, or has no session and says 503, has not begun with the request. Anything else may
                // come from a proxy that lost its server in the middle.
                let untouched = status == 429 || (status == 503 && !session.has_id());
                if untouched { Step::NotExecuted(cause) } else { Step::Unavailable(cause) }
            }
            Verdict::Refused => rejected(),
        }
    }

    /// What the server answers to one `ping` in `session`.
    pub(super) async fn probe(&self, session: &Session) -> Probe {
        if !session.has_id() {
            return Probe::Known;
        }
        let ping = Bytes::from(envelope::request_message(&self.upstreams.own_id(), "ping", None));
        let probed = timeout(PROBE_BOUND, async {
            let Ok(reply) = self.post(Some(session), ping).await else { return Probe::Away };
            if reply.status().is_success() && reply.content() == Content::Events {
                return Probe::Known;
            }
            let (status, challenge, body) = reply.read_refusal().await;
            match dialect::probe_lost(&Seen { status, challenge, body: &body }) {
                true => Probe::Forgotten,
                false => Probe::Known,
            }
        });
        probed.await.unwrap_or(Probe::Away)
    }

    /// A request of the link's own, and its whole response. Waits for nothing that the server sends before it.
    pub(super) async fn ask(
        self: &Arc<Self>,
        session: Option<&Arc<Session>>,
        method: &str,
        params: Option<&[u8]>,
    ) -> Result<Own, Unanswered> {
        let id = self.upstreams.own_id();
        let message = Bytes::from(envelope::request_message(&id, method, params));
        let reply = self.post(session.map(|session| &**session), message).await.map_err(|fault| match fault {
            Fault::NeverSent(cause) | Fault::Lost(cause) => Unanswered::Away(cause),
            Fault::Failed(failure) => Unanswered::Failed(failure),
        })?;
        let sent_id = session.is_some_and(|session| session.has_id());
        if !reply.status().is_success() {
            let (status, challenge, body) = reply.read_refusal().await;
            let response = self.unanswered(&Seen { status, challenge, body: &body }, sent_id, &id)?;
            return Ok(Own { id, response, session_id: None });
        }
        let session_id = reply.session_id();
        let response = match reply.content() {
            Content::Json => reply.collect(self.server().message_bytes_max).await.map_err(|unread| match unread {
                Unread::Broken(cause) => Unanswered::Away(cause),
                Unread::Oversize => Unanswered::Failed(self.oversize()),
            })?,
            Content::Events => self.response_among(reply.events(self.server().message_bytes_max)).await?,
            Content::Other => {
                return Err(Unanswered::Failed(
                    self.protocol("it answered a request with neither JSON nor an event stream"),
                ));
            }
        };
        Ok(Own { id, response, session_id })
    }

    fn unanswered(&self, seen: &Seen<'_>, sent_id: bool, id: &[u8]) -> Result<Bytes, Unanswered> {
        let status = seen.status;
        Err(match dialect::classify(seen, sent_id, Some(id)) {
            Verdict::Answer => match dialect::answer_with_id(seen.body, id) {
                Some(answer) => return Ok(answer.into()),
                None => Unanswered::Failed(self.rejected(status)),
            },
            Verdict::SessionLost(_) => Unanswered::SessionLost,
            Verdict::Suspect | Verdict::Unavailable => Unanswered::Away(format!("HTTP status {status}").into()),
            Verdict::Unauthorized => Unanswered::Failed(Failure::Unauthorized { server: self.server().name.clone() }),
            Verdict::NoEndpoint => Unanswered::Failed(unusable(self.server(), &NO_ENDPOINT)),
            Verdict::Refused if status >= 500 => Unanswered::Away(format!("HTTP status {status}").into()),
            Verdict::Refused => Unanswered::Failed(self.rejected(status)),
        })
    }

    fn rejected(&self, status: u16) -> Failure {
        let problem = format!("HTTP status {status}").into();
        Failure::Rejected { server: self.server().name.clone(), status, problem }
    }

    async fn response_among(&self, mut events: Box<Events>) -> Result<Bytes, Unanswered> {
        loop {
            let event = events.next().await.map_err(|end| match end {
                EventsEnd::Broken(cause) => Unanswered::Away(cause),
                EventsEnd::Oversize => Unanswered::Failed(self.oversize()),
            })?;
            let Some(data) = message_of(event) else { continue };
            if let Ok(envelope) = envelope::scan(&data)
                && let Sort::Response = wire::sort(&envelope, &data)
            {
                events.finish();
                return Ok(data);
            }
        }
    }

    /// POSTs `message`. Connection refusals are not retried here.
    pub(super) async fn post(&self, session: Option<&Session>, message: Bytes) -> Result<Reply, Fault> {
        let permit = self.permit().await?;
        let mut request = self.request(Method::POST, session, message)?;
        *request.version_mut() = http::Version::HTTP_11;
        let response = self.upstreams.send(request).await?;
        Ok(Reply { response, permit: Some(permit) })
    }

    /// Opens an event stream, behind `last_event_id` if there is one. It takes no place among the calls.
    pub(super) async fn get(&self, session: &Session, last_event_id: Option<&str>) -> Result<Reply, Fault> {
        let mut request = self.request(Method::GET, Some(session), Bytes::new())?;
        let headers = request.headers_mut();
        headers.remove(CONTENT_TYPE);
        headers.insert(ACCEPT, HeaderValue::from_static("text/event-stream"));
        if let Some(value) = last_event_id.and_then(|id| HeaderValue::from_str(id).ok()) {
            headers.insert(LAST_EVENT_ID, value);
        }
        let response = self.upstreams.send(request).await?;
        Ok(Reply { response, permit: None })
    }

    fn request(&self, method: Method, session: Option<&Session>, body: Bytes) -> Result<Request<Full<Bytes>>, Fault> {
        let server = self.server();
        let Some(url) = server.url() else {
            return Err(Fault::Failed(unusable(server, &"it has no url")));
        };
        let mut headers = self.destination.headers(&*self.upstreams.parts.environment).map_err(Fault::Failed)?;
        if let Some(session) = session {
            session.add_to(&mut headers);
        }
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        *request.uri_mut() = url.clone();
        *request.headers_mut() = headers;
        Ok(request)
    }

    async fn permit(&self) -> Result<OwnedSemaphorePermit, Fault> {
        if let Ok(permit) = Arc::clone(&self.destination.calls).try_acquire_owned() {
            return Ok(permit);
        }
        let waited = timeout(self.server().patience, Arc::clone(&self.destination.calls).acquire_owned()).await;
        let busy = || Fault::Failed(self.unreachable("too many calls to its host are in flight".into()));
        waited.ok().and_then(Result::ok).ok_or_else(busy)
    }
}

impl Session {
    pub(super) fn add_to(&self, headers: &mut HeaderMap) {
        if let Some(id) = &self.id_header {
            headers.insert(SESSION_ID, id.clone());
        }
        if let Some(version) = &self.version_header {
            headers.insert(PROTOCOL_VERSION, version.clone());
        }
    }
}

impl From<SendError> for Fault {
    fn from(error: SendError) -> Self {
        match error {
            SendError::NeverSent(cause) => Self::NeverSent(cause),
            SendError::Lost(cause) => Self::Lost(cause),
        }
    }
}

impl From<Fault> for Step {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::NeverSent(cause) => Self::NotExecuted(cause),
            Fault::Lost(cause) => Self::Ambiguous(cause),
            Fault::Failed(failure) => Self::Failed(failure),
        }
    }
}

/// Why a GET gave no event stream.
pub(super) enum NoStream {
    /// 405, or whatever else says that there is none.
    Never(u16),
    /// Perhaps there is none, perhaps the server does not know the session: many servers say 404 to both.
    Unclear(u16),
    /// Not for now.
    Later(u16),
}

impl Reply {
    /// The events, if that is what it is; else why not.
    pub(super) async fn into_stream(self, event_bytes_max: usize, sent_id: bool) -> Result<Box<Events>, NoStream> {
        if self.status() == StatusCode::OK && self.content() == Content::Events {
            return Ok(self.events(event_bytes_max));
        }
        let (status, challenge, body) = self.read_refusal().await;
        Err(match dialect::classify(&Seen { status, challenge, body: &body }, sent_id, None) {
            Verdict::SessionLost(_) | Verdict::Suspect => NoStream::Unclear(status),
            Verdict::Unavailable => NoStream::Later(status),
            // Somebody else's stream, or the rest of an earlier one of ours.
            Verdict::Refused if status == 409 => NoStream::Later(status),
            Verdict::Answer | Verdict::Unauthorized | Verdict::NoEndpoint | Verdict::Refused => NoStream::Never(status),
        })
    }
}

/// The JSON-RPC message of an event, if it has one.
pub(super) fn message_of(event: Event) -> Option<Bytes> {
    let named = event.name.as_deref().is_none_or(|name| name == "message");
    event.data.filter(|data| named && !data.is_empty())
}

async fn next_data(body: &mut Incoming) -> Result<Option<Bytes>, Box<str>> {
    while let Some(frame) = body.frame().await {
        match frame {
            Ok(frame) => {
                // Trailers say nothing here.
                if let Ok(data) = frame.into_data() {
                    return Ok(Some(data));
                }
            }
            Err(error) => return Err(describe(&error)),
        }
    }
    Ok(None)
}

fn content_type(headers: &HeaderMap) -> Content {
    // A body without a type can only be the one that needs no more to be read.
    let value = headers.get(CONTENT_TYPE).map_or(&b"application/json"[..], HeaderValue::as_bytes);
    let media = value.split(|&byte| byte == b';').next().unwrap_or_default().trim_ascii();
    if media.eq_ignore_ascii_case(b"application/json") {
        Content::Json
    } else if media.eq_ignore_ascii_case(b"text/event-stream") {
        Content::Events
    } else {
        Content::Other
    }
}

const NO_ENDPOINT: &str = "there is nothing at its url: HTTP status 404";

/// How much of a refusal is read, and for how long.
const REFUSAL_BYTES_MAX: usize = 64 * 1024;
const REFUSAL_BOUND: Duration = Duration::from_secs(2);

/// How long a probing `ping` may take.
const PROBE_BOUND: Duration = Duration::from_secs(2);

/// How long the rest of an answered stream is read.
const FINISH_BOUND: Duration = Duration::from_secs(1);

/// What an event may have besides its message.
const EVENT_FIELDS_BYTES: usize = 4096;
