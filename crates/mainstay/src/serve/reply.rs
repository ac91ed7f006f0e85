//! The only place where a refusal becomes an HTTP response.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::Stream;
use http::header::{ALLOW, CACHE_CONTROL, CONNECTION, CONTENT_TYPE, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use mainstay_core::code::{Code, TerminalStatus};
use mainstay_core::id::SessionId;

use crate::auth::Denied;
use crate::engine::call::refusal_message;
use crate::engine::stream::Reader;
use crate::engine::{Engine, Refused};

/// The body of an answer.
pub enum Answer {
    /// All of it at once; empty once it is taken.
    Whole(Option<Bytes>),
    /// Events as they come.
    Events(Pin<Box<dyn Stream<Item = Bytes> + Send>>),
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.get_mut() {
            Self::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Events(events) => {
                events.as_mut().poll_next(context).map(|chunk| chunk.map(|chunk| Ok(Frame::data(chunk))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Whole(None))
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
            Self::Events(_) => SizeHint::default(),
        }
    }
}

/// A JSON-RPC message as `application/json`.
pub fn json(status: StatusCode, message: Bytes) -> Response<Answer> {
    let mut response = Response::new(Answer::Whole(Some(message)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, JSON);
    response
}

/// The answer to `initialize`, with the new session's id. Always plain JSON (R1).
pub fn welcome(id: &SessionId, message: Bytes) -> Response<Answer> {
    let mut response = json(StatusCode::OK, message);
    if let Ok(mut value) = HeaderValue::from_str(id.reveal()) {
        value.set_sensitive(true);
        response.headers_mut().insert(SESSION_ID, value);
    }
    response
}

/// A stream as `text/event-stream`. It ends when `until` resolves: the client comes back by its last event id.
pub fn events<T: Send + 'static>(
    reader: Reader,
    kept: T,
    until: impl Future<Output = ()> + Send + 'static,
) -> Response<Answer> {
    let until = Box::pin(until);
    let chunks = futures_util::stream::unfold((reader, kept, until), |(mut reader, kept, mut until)| async move {
        let chunk = tokio::select! {
            biased;
            chunk = reader.next() => chunk?,
            () = until.as_mut() => return None,
        };
        Some((chunk, (reader, kept, until)))
    });
    streaming(chunks)
}

/// Events as `text/event-stream`, as they come. The connection ends with them, and its client is told so: streams end when
/// a worker gives way, and a client that took the connection for idle then would write its next request on one that is
/// being closed (T2).
pub fn streaming(chunks: impl Stream<Item = Bytes> + Send + 'static) -> Response<Answer> {
    let mut response = Response::new(Answer::Events(Box::pin(chunks)));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache, no-transform"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    headers.insert(CONNECTION, HeaderValue::from_static("close"));
    response
}

/// An answer without a body.
pub fn empty(status: StatusCode) -> Response<Answer> {
    let mut response = Response::new(Answer::Whole(None));
    *response.status_mut() = status;
    response
}

/// A refusal, under the id of the request that it answers; `id` is empty if there is none (S13a).
pub fn refusal(refused: &Refused, id: &[u8], terminal: TerminalStatus) -> Response<Answer> {
    let told = tell(refused, terminal);
    let status = StatusCode::from_u16(told.code.http_status(terminal)).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = json(status, refusal_message(id, &told));
    if matches!(told.code, Code::Unavailable | Code::LimitReached) {
        let seconds = told.retry_after.unwrap_or(RETRY_AFTER_DEFAULT).as_millis().div_ceil(1000);
        let value = HeaderValue::from(u64::try_from(seconds).unwrap_or(u64::MAX));
        response.headers_mut().insert(RETRY_AFTER, value);
    }
    if told.code == Code::MethodNotAllowed {
        response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, POST, DELETE"));
    }
    response
}

/// A refusal of something whose request id is not known. Not a JSON-RPC message: some clients wait for ever for the id
/// that it would lack, and report a plain text at once (S13a).
pub fn unaddressed(refused: &Refused, terminal: TerminalStatus) -> Response<Answer> {
    let mut response = refusal(refused, b"", terminal);
    let told = tell(refused, terminal);
    *response.body_mut() = Answer::Whole(Some(format!("{}: {}\n", told.code.name(), told.text).into()));
    response.headers_mut().insert(CONTENT_TYPE, TEXT);
    response
}

/// A request that does not prove whose it is (RFC 6750, section 3; 2025-11-25, Authorization); `id` is none if it
/// should have one and that is not known.
pub fn denied(denied: Denied, id: Option<&Bytes>) -> Response<Answer> {
    let (code, text, challenge) = match denied {
        Denied::Missing => (Code::AuthenticationRequired, BEARER_MISSING, Some(CHALLENGE)),
        Denied::Invalid => (Code::AuthenticationRequired, BEARER_INVALID, Some(CHALLENGE_INVALID)),
        Denied::Undecided => (Code::Unavailable, BEARER_UNDECIDED, None),
    };
    let refused = Refused::new(code, text);
    let mut response = id
        .map_or_else(|| unaddressed(&refused, TerminalStatus::Spec), |id| refusal(&refused, id, TerminalStatus::Spec));
    if let Some(challenge) = challenge {
        response.headers_mut().insert(WWW_AUTHENTICATE, challenge);
    }
    response
}

/// What may be told: a stranger learns nothing of another's session (S4).
fn tell(refused: &Refused, terminal: TerminalStatus) -> Refused {
    if refused.code == Code::OtherPrincipal && terminal == TerminalStatus::Spec {
        return Refused { code: Code::SessionUnknown, ..refused.clone() };
    }
    refused.clone()
}

/// A path that leads nowhere. Not 404 alone: a client takes that for a lost session, so it is told where to go, if it
/// may know that.
pub fn no_such_path(engine: Option<&Arc<Engine>>) -> Response<Answer> {
    let text = engine.map_or_else(
        || "nothing is here; the servers are at `/mcp/NAME`".to_owned(),
        |engine| {
            let paths: Vec<_> = engine.servers(&BTreeMap::new()).into_iter().map(|server| server.path).collect();
            format!("nothing is here; the servers are at: {}", paths.join(", "))
        },
    );
    let mut response = refusal(&Refused::new(Code::ServerUnknown, text), b"", TerminalStatus::Spec);
    *response.status_mut() = StatusCode::NOT_FOUND;
    response
}

/// `/healthz` and `/readyz`.
pub fn health(well: bool) -> Response<Answer> {
    let status = if well { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let text = if well { "ok\n" } else { "draining\n" };
    let mut response = Response::new(Answer::Whole(Some(Bytes::from_static(text.as_bytes()))));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, TEXT);
    response
}

/// The header that carries a session's id (2025-11-25, Transports, Session Management).
pub const SESSION_ID: &str = "mcp-session-id";
/// When to try again where nobody knows.
pub(super) const RETRY_AFTER_DEFAULT: Duration = Duration::from_secs(1);
const CHALLENGE: HeaderValue = HeaderValue::from_static("Bearer realm=\"mainstay\"");
const CHALLENGE_INVALID: HeaderValue = HeaderValue::from_static("Bearer realm=\"mainstay\", error=\"invalid_token\"");
const BEARER_MISSING: &str = "send `Authorization: Bearer TOKEN`; a token in the query string is not looked at";
const BEARER_INVALID: &str = "the bearer token is not known here";
const BEARER_UNDECIDED: &str = "whose the bearer token is can't be told now; try again later";
const TEXT: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");
const JSON: HeaderValue = HeaderValue::from_static("application/json");
