//! Requests that say for themselves what they are (2026-07-28): told by their body, checked against their headers, passed on
//! as they are.
//!
//! There is no session here, so a status tells nothing about one, and nothing can be resumed: a client that closes its
//! response cancels its request (2026-07-28, Streamable HTTP, Cancellation).

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::Stream;
use http::header::{HeaderMap, HeaderValue, RETRY_AFTER};
use http::{Response, StatusCode};
use mainstay_core::code::{Code, TerminalStatus};
use mainstay_core::wire::envelope::{Kind, error_message, result_message};
use mainstay_core::wire::method::Method;
use mainstay_core::wire::modern::header::{self, Field, Received};
use mainstay_core::wire::modern::{self, Meta};
use mainstay_core::wire::sse;
use mainstay_upstream::{Forwarded, Relay, Relayed, Stateless};
use tokio::time::Instant;

use crate::engine::call::{Request, refusal_data};
use crate::engine::modern::attendance::{Attending, Stay};
use crate::engine::modern::handed::Handed;
use crate::engine::modern::{GATEWAY_ERROR, cut_off};
use crate::engine::stream::{KEEP_ALIVE, STILL_HERE};
use crate::engine::tally::Counted;
use crate::engine::{Caller, Refused, Served};
use crate::serve::Front;
use crate::serve::mcp::Posted;
use crate::serve::reply::{self, Answer, RETRY_AFTER_DEFAULT, SESSION_ID};

/// Whether the headers say that a request is modern. Only its body decides.
pub(super) fn is_announced(headers: &HeaderMap) -> bool {
    headers.get(header::PROTOCOL_VERSION).is_some_and(|value| value.as_bytes() == modern::VERSION.as_bytes())
}

/// The one message of `posted` and its `_meta`, if it is a modern one: its body says so, or its headers do and no session
/// and no `initialize` contradicts them.
pub(super) fn recognise<'a>(posted: &'a Posted, headers: &HeaderMap) -> Option<(&'a Request, Meta)> {
    let [only] = posted.messages.as_slice() else { return None };
    if posted.batched || !matches!(only.envelope.kind, Kind::Request | Kind::Notification) {
        return None;
    }
    let meta = Meta::read(&only.message, &only.envelope);
    let announced = is_announced(headers) && !headers.contains_key(SESSION_ID) && only.method != Method::Initialize;
    (meta.is_modern() || announced).then_some((only, meta))
}

/// As what a modern `request` is counted.
pub(super) fn stay(request: &Request) -> Stay {
    if is_listen(request) { Stay::Listen } else { Stay::Request }
}

pub(super) fn is_listen(request: &Request) -> bool {
    request.envelope.method_name(&request.message).is_some_and(|method| method == LISTEN)
}

/// Answers a modern `request` to the server of `served`. Whatever is wrong with it is an answer, too.
pub(super) async fn answer(
    front: &Arc<Front>,
    (caller, served): (&Caller, &Served),
    headers: &HeaderMap,
    (request, meta): (&Request, &Meta),
    attending: Attending,
) -> Response<Answer> {
    let began = Instant::now();
    let mut handed = Handed::of(caller, served, request);
    let checked = checked(headers, request, meta).and_then(|stateless| opened(front, &mut handed, stateless));
    let (response, outcome) = match checked {
        Err(fault) => (fault.response(&request.id()), Some(Code::RequestInvalid)),
        Ok(stateless) => match passed_on(front, served, (request, handed), &stateless, attending).await {
            Ok(response) => (response, None),
            Err(refused) => (refuse(front, served, &refused, &request.id()), Some(refused.code)),
        },
    };
    front.engine.metrics.call(&served.server.name, request.method, began.elapsed(), outcome);
    response
}

/// The request with what its server had handed out.
fn opened(front: &Front, handed: &mut Handed, stateless: Stateless) -> Result<Stateless, Fault> {
    let opened = handed.opened(&front.engine.keyring, front.engine.now(), &stateless.message);
    let message = opened.map_err(|fault| Fault::bad(modern::INVALID_PARAMS, fault.to_string()))?;
    Ok(Stateless { message, ..stateless })
}

/// What the server of `served` says to the request that `stateless` was made of.
async fn passed_on(
    front: &Arc<Front>,
    served: &Served,
    (request, handed): (&Request, Handed),
    stateless: &Stateless,
    attending: Attending,
) -> Result<Response<Answer>, Refused> {
    let counted = (served.stateless.enter(), attending);
    Ok(match front.engine.forward(served, stateless).await? {
        Forwarded::Accepted => reply::empty(StatusCode::ACCEPTED),
        Forwarded::Whole(status, message) => whole(status, front.engine.sealed(served, &handed, message)?),
        Forwarded::Events(relay) => {
            reply::streaming(Relaying::new(front, served, (request, handed, relay), counted).chunks())
        }
    })
}

/// What is wrong with a request, in the words of the revision.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Fault {
    status: StatusCode,
    code: i64,
    text: String,
    data: Option<Vec<u8>>,
}

impl Fault {
    pub(super) fn bad(code: i64, text: String) -> Self {
        Self { status: StatusCode::BAD_REQUEST, code, text, data: None }
    }

    /// There is no such method (2026-07-28, Streamable HTTP: 404).
    pub(super) fn no_method(text: String) -> Self {
        Self { status: StatusCode::NOT_FOUND, ..Self::bad(modern::METHOD_NOT_FOUND, text) }
    }

    /// The request needs something that its client does not declare.
    pub(super) fn missing_capability(text: String, data: Vec<u8>) -> Self {
        Self { data: Some(data), ..Self::bad(modern::MISSING_CAPABILITY, text) }
    }

    pub(super) fn response(&self, id: &[u8]) -> Response<Answer> {
        let id = (!id.is_empty()).then_some(id);
        reply::json(self.status, error_message(id, self.code, &self.text, self.data.as_deref()).into())
    }
}

/// What goes to the server for a request that keeps the rules (2026-07-28, Streamable HTTP, Server Validation).
pub(super) fn checked(headers: &HeaderMap, request: &Request, meta: &Meta) -> Result<Stateless, Fault> {
    let (message, envelope) = (&request.message, &request.envelope);
    if envelope.kind == Kind::Request || meta.is_modern() {
        let version = meta.require(message).map_err(|error| Fault::bad(modern::INVALID_PARAMS, error.to_string()))?;
        let received = Received {
            version: field(headers, header::PROTOCOL_VERSION),
            method: field(headers, header::METHOD),
            name: field(headers, header::NAME),
        };
        let mismatch = |error: header::HeaderError| Fault::bad(modern::HEADER_MISMATCH, error.to_string());
        header::check(message, envelope, meta, &received).map_err(mismatch)?;
        if version != modern::VERSION {
            let data = modern::unsupported_version_data(&version, &[modern::VERSION]);
            let text = format!("requests that say for themselves what they are can be of {} only", modern::VERSION);
            return Err(Fault { data: Some(data), ..Fault::bad(modern::UNSUPPORTED_VERSION, text) });
        }
    }
    if request.method == Method::Initialize {
        let text = format!("`initialize` does not exist in {}", modern::VERSION);
        return Err(Fault::no_method(text));
    }
    let (message, listens) = (message.clone(), is_listen(request));
    Ok(Stateless { message, method: request.method, params: params(headers)?, listens })
}

fn field<'a>(headers: &'a HeaderMap, name: &str) -> Field<'a> {
    Field::of(headers.get_all(name).iter().map(|value| value.as_bytes().trim_ascii()))
}

/// The headers of annotated parameters.
fn params(headers: &HeaderMap) -> Result<HeaderMap, Fault> {
    let mut params = HeaderMap::new();
    for (name, value) in headers {
        if name.as_str().starts_with(header::PARAM_PREFIX) && params.insert(name, value.clone()).is_some() {
            let text = format!("the header `{name}` is there more than once");
            return Err(Fault::bad(modern::HEADER_MISMATCH, text));
        }
    }
    Ok(params)
}

pub(super) fn whole(status: u16, message: Bytes) -> Response<Answer> {
    reply::json(StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_GATEWAY), message)
}

/// What became of a request that has no answer. No session depends on the status here, so it says what it means to any HTTP
/// client.
pub(super) fn failure(refused: &Refused, id: &[u8]) -> Response<Answer> {
    failed(refused.code, refused.retry_after, failure_message(refused, id))
}

/// As [`failure`], noted for the operator.
pub(super) fn refuse(front: &Front, served: &Served, refused: &Refused, id: &[u8]) -> Response<Answer> {
    tracing::debug!(server = %served.server.name, code = refused.code.name(), "stateless request refused");
    if let Some(limit) = refused.limit {
        front.engine.metrics.refused(limit);
    }
    failure(refused, id)
}

/// As [`failure`], of a message that is there already.
pub(super) fn failed(code: Code, retry_after: Option<Duration>, message: Bytes) -> Response<Answer> {
    let is_away = matches!(code, Code::ServerUnreachable | Code::Unavailable);
    let status = match code.http_status(TerminalStatus::Spec) {
        _ if is_away => StatusCode::SERVICE_UNAVAILABLE,
        // What a session's client is told within 200.
        200 => StatusCode::BAD_GATEWAY,
        status => StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_GATEWAY),
    };
    let mut response = reply::json(status, message);
    if matches!(status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS) {
        let seconds = retry_after.unwrap_or(RETRY_AFTER_DEFAULT).as_millis().div_ceil(1000);
        let value = HeaderValue::from(u64::try_from(seconds).unwrap_or(u64::MAX));
        response.headers_mut().insert(RETRY_AFTER, value);
    }
    response
}

fn failure_message(refused: &Refused, id: &[u8]) -> Bytes {
    let id = (!id.is_empty()).then_some(id);
    error_message(id, GATEWAY_ERROR, &refused.text, Some(&refusal_data(refused))).into()
}

/// A stream of the server on its way to the client. Dropped with the response, and the server's request with it.
struct Relaying {
    front: Arc<Front>,
    server: String,
    id: Bytes,
    listens: bool,
    handed: Handed,
    relay: Relay,
    end: Pin<Box<dyn Future<Output = ()> + Send>>,
    /// None for a stream that a client listens to: nobody waits for that.
    _counted: Option<Counted>,
    _attending: Attending,
}

impl Relaying {
    fn new(
        front: &Arc<Front>,
        served: &Served,
        (request, handed, relay): (&Request, Handed, Relay),
        (counted, attending): (Counted, Attending),
    ) -> Self {
        let listens = is_listen(request);
        let engine = Arc::clone(&front.engine);
        let end = Box::pin(async move { if listens { engine.stopped().await } else { engine.closing().await } });
        Self {
            front: Arc::clone(front),
            server: served.server.name.as_str().to_owned(),
            id: request.id(),
            listens,
            handed,
            relay,
            end,
            _counted: (!listens).then_some(counted),
            _attending: attending,
        }
    }

    fn chunks(self) -> impl Stream<Item = Bytes> + Send {
        futures_util::stream::unfold(Some(self), |relaying| async move {
            let mut relaying = relaying?;
            let (chunk, goes_on) = relaying.next().await?;
            Some((chunk, goes_on.then_some(relaying)))
        })
    }

    /// The next part of the response, and whether more may come.
    async fn next(&mut self) -> Option<(Bytes, bool)> {
        let relayed = tokio::select! {
            biased;
            relayed = self.relay.next() => relayed,
            () = self.end.as_mut() => return Some((event(&self.last_word()), false)),
            () = tokio::time::sleep(KEEP_ALIVE) => return Some((STILL_HERE, true)),
        };
        match relayed {
            Ok(Relayed::Notification(message)) => Some((event(&self.sealed(message)), true)),
            Ok(Relayed::Answer(message)) => Some((event(&self.sealed(message)), false)),
            // Who listens comes back by itself, and is told of nothing that it could do otherwise.
            Err(_) if self.listens => None,
            Err(failure) => {
                let engine = &self.front.engine;
                let refused = engine.served(&self.server).map(|served| engine.not_forwarded(served, &failure));
                let refused = refused.unwrap_or_else(|refused| refused);
                Some((event(&failure_message(&refused, &self.id)), false))
            }
        }
    }

    /// A message for the client, or why it must not have it.
    fn sealed(&self, message: Bytes) -> Bytes {
        let engine = &self.front.engine;
        let sealed = engine.served(&self.server).and_then(|served| engine.sealed(served, &self.handed, message));
        sealed.unwrap_or_else(|refused| failure_message(&refused, &self.id))
    }

    /// What is said when the gateway ends the stream: one that is listened to ends in order.
    fn last_word(&self) -> Bytes {
        if self.listens {
            let result =
                [br#"{"resultType":"complete","_meta":{"#, &*subscription_key(), b":", &*self.id, b"}}"].concat();
            return result_message(&self.id, &result).into();
        }
        let refused = self.front.engine.served(&self.server).map(|served| cut_off(&served.server));
        failure_message(&refused.unwrap_or_else(|refused| refused), &self.id)
    }
}

fn subscription_key() -> Vec<u8> {
    format!("\"{}\"", modern::SUBSCRIPTION_ID).into_bytes()
}

pub(super) fn event(message: &[u8]) -> Bytes {
    let mut chunk = Vec::with_capacity(message.len() + EVENT_FIELDS_BYTES);
    sse::encode(&mut chunk, None, None, message);
    chunk.into()
}

/// The method whose answer is a stream that stays open.
const LISTEN: &str = "subscriptions/listen";
/// What an event has besides its message.
const EVENT_FIELDS_BYTES: usize = 16;

#[cfg(test)]
mod tests {
    use mainstay_core::wire::envelope::scan;

    use super::*;

    fn request(body: &str) -> (Request, Meta) {
        let message = Bytes::copy_from_slice(body.as_bytes());
        let envelope = scan(&message).expect("a message");
        let method = envelope.method_name(&message).map_or(Method::Other, |name| Method::of(&name));
        let meta = Meta::read(&message, &envelope);
        (Request { message, envelope, method }, meta)
    }

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    fn body(method: &str, version: &str) -> String {
        format!(
            r#"{{"jsonrpc":"2.0","id":1,"method":"{method}","params":{{"name":"t","_meta":{{
            "io.modelcontextprotocol/protocolVersion":"{version}","io.modelcontextprotocol/clientCapabilities":{{}}}}}}}}"#
        )
    }

    #[test]
    fn e2_what_is_wrong_with_a_request_has_the_number_of_the_revision() {
        let call = [("mcp-protocol-version", "2026-07-28"), ("mcp-method", "tools/call"), ("mcp-name", "t")];
        let twice = [call[0], call[1], call[2], ("mcp-param-a", "1"), ("mcp-param-a", "2")];
        let opening = [call[0], ("mcp-method", "initialize")];
        let unsupported = [("mcp-protocol-version", "1900-01-01"), call[1], call[2]];
        let bare = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"t"}}"#.to_owned();
        for (pairs, body, code, status) in [
            (&call[..], bare, modern::INVALID_PARAMS, 400),
            (&call[..2], body("tools/call", "2026-07-28"), modern::HEADER_MISMATCH, 400),
            (&twice[..], body("tools/call", "2026-07-28"), modern::HEADER_MISMATCH, 400),
            (&unsupported[..], body("tools/call", "1900-01-01"), modern::UNSUPPORTED_VERSION, 400),
            (&opening[..], body("initialize", "2026-07-28"), modern::METHOD_NOT_FOUND, 404),
        ] {
            let (request, meta) = request(&body);
            let fault = checked(&headers(pairs), &request, &meta).err().expect("something is wrong");
            assert_eq!((fault.code, fault.status.as_u16()), (code, status), "{body}");
        }
        let (good, meta) = request(&body("tools/call", "2026-07-28"));
        let stateless = checked(&headers(&call), &good, &meta).expect("nothing is wrong");
        assert_eq!((stateless.message, stateless.listens), (good.message, false));
    }

    #[test]
    fn e2_the_body_decides_which_era_a_request_is_of() {
        let posted = |body: &str| Posted { messages: vec![request(body).0], batched: false };
        let (announced, nothing) = (headers(&[("mcp-protocol-version", "2026-07-28")]), HeaderMap::new());
        let in_session = headers(&[("mcp-protocol-version", "2026-07-28"), ("mcp-session-id", "x")]);
        let bare = r#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#;
        let opening = r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{}}"#;
        for (body, headers, modern) in [
            (body("tools/list", "2026-07-28"), &nothing, true),
            (body("tools/list", "2026-07-28"), &in_session, true),
            (bare.to_owned(), &nothing, false),
            (bare.to_owned(), &in_session, false),
            (bare.to_owned(), &announced, true),
            (opening.to_owned(), &announced, false),
        ] {
            assert_eq!(recognise(&posted(&body), headers).is_some(), modern, "{body}");
        }
    }
}
