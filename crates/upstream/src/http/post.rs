//! One exchange with the server: a request out, and the beginning of what comes back.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{ACCEPT, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request};
use http_body_util::Full;
use mainstay_core::wire::envelope::{self, Kind};
use tokio::sync::OwnedSemaphorePermit;

use super::legacy::Feed;
use super::own::Probe;
use super::reply::{Content, Reply, Unread};
use super::{Dispatched, Executed, Http, Session, Step};
use crate::call::Call;
use crate::dialect::{self, Seen, Verdict};
use crate::failure::{Blame, Failure};
use crate::pool::SendError;
use crate::upstreams::unusable;
use crate::wire::{self, same_id};

pub(crate) const SESSION_ID: HeaderName = HeaderName::from_static("mcp-session-id");
pub(crate) const PROTOCOL_VERSION: HeaderName = HeaderName::from_static("mcp-protocol-version");
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// Why there is no response.
pub(crate) enum Fault {
    NeverSent(Box<str>),
    Lost(Box<str>),
    Failed(Failure),
}

impl Http {
    /// One attempt at a call in `session`.
    pub(super) async fn attempt(self: &Arc<Self>, session: &Arc<Session>, call: &Call) -> Step {
        if let Some(feed) = session.feed() {
            return Box::pin(self.attempt_over(feed, session, call)).await;
        }
        let reply = match self.post(Some(session), call.message.clone()).await {
            Ok(reply) => reply,
            Err(fault) => return fault.into(),
        };
        if !reply.status().is_success() {
            return Box::pin(self.refused(session, reply, Some(&call.id))).await;
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
        Err(Box::pin(self.refused(session, reply, None)).await)
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
    pub(super) async fn refused(
        self: &Arc<Self>,
        session: &Arc<Session>,
        reply: Reply,
        call_id: Option<&Bytes>,
    ) -> Step {
        let (status, challenge, body) = reply.read_refusal().await;
        let seen = Seen { status, challenge, body: &body };
        let rejected = || Step::Failed(self.rejected_with(status));
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
            // The id is in the URL, and a server that has forgotten it may call that a bad request.
            Verdict::Refused if status == 400 && session.feed().is_some() => match self.probe(session).await {
                Probe::Forgotten => Step::SessionLost { reason: "400", executed: Executed::No },
                Probe::Known | Probe::Away => rejected(),
            },
            Verdict::Refused => rejected(),
        }
    }

    /// POSTs `message`. Connection refusals are not retried here.
    pub(super) async fn post(&self, session: Option<&Session>, message: Bytes) -> Result<Reply, Fault> {
        if let Some(feed) = session.and_then(Session::feed) {
            return Box::pin(self.post_over(feed, message)).await;
        }
        let permit = self.permit().await?;
        let request = self.request(Method::POST, session, message)?;
        let response = self.upstreams.send(&self.destination.host, request).await?;
        Ok(Reply { response, permit: Some(permit) })
    }

    /// POSTs `message` to where the event stream said.
    pub(super) async fn post_over(&self, feed: &Feed, message: Bytes) -> Result<Reply, Fault> {
        let permit = self.permit().await?;
        let mut request = self.request(Method::POST, None, message)?;
        *request.uri_mut() = feed.endpoint().clone();
        feed.add_to(request.headers_mut());
        let response = self.upstreams.send(&self.destination.host, request).await?;
        Ok(Reply { response, permit: Some(permit) })
    }

    /// Opens an event stream, behind `last_event_id` if there is one. It takes no place among the calls.
    pub(super) async fn get(&self, session: Option<&Session>, last_event_id: Option<&str>) -> Result<Reply, Fault> {
        let mut request = self.request(Method::GET, session, Bytes::new())?;
        let headers = request.headers_mut();
        headers.remove(CONTENT_TYPE);
        headers.insert(ACCEPT, HeaderValue::from_static("text/event-stream"));
        if let Some(value) = last_event_id.and_then(|id| HeaderValue::from_str(id).ok()) {
            headers.insert(LAST_EVENT_ID, value);
        }
        let response = self.upstreams.send(&self.destination.host, request).await?;
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
        self.destination.place().await.map_err(Fault::Failed)
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

pub(super) const NO_ENDPOINT: &str = "there is nothing at its url: HTTP status 404";
