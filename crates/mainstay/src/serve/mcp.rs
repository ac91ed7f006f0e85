//! One server's endpoint, `/mcp/{server}`: POST, GET, DELETE.
//!
//! Checks come in the order of S4: host and origin, then who it is, then the session and its state, then the protocol
//! version. The body is read before all but the first two, since a refusal must carry the request's id.
//!
//! What is not on the way of a call has a box of its own: the future of every request is as large as its largest part.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, CONTENT_TYPE, HeaderMap};
use http::{Method as Verb, Request as HttpRequest, Response, StatusCode};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;
use mainstay_core::audit::Actor;
use mainstay_core::code::Code;
use mainstay_core::id::SessionId;
use mainstay_core::limit::Limit;
use mainstay_core::session::Input;
use mainstay_core::wire::envelope::{Kind, batch, member, result_message, scan};
use mainstay_core::wire::method::{Method, Version};

use crate::auth::Denied;
use crate::engine::call::{Reply, Request};
use crate::engine::listen::Followed;
use crate::engine::live::{Entry, Live};
use crate::engine::modern::Service;
use crate::engine::{Caller, Refused, SESSION_UNKNOWN, Served};
use crate::serve::reply::{self, Answer, SESSION_ID};
use crate::serve::{Front, conversation, guard, modern};

/// Answers a request of `peer` to the endpoint of `server`.
pub async fn serve(front: &Arc<Front>, peer: IpAddr, server: &str, request: HttpRequest<Incoming>) -> Response<Answer> {
    let mut id = Bytes::new();
    let is_call = *request.method() == Verb::POST;
    match answer(front, (peer, server), request, &mut id).await {
        Ok(response) => response,
        Err(Unserved::Denied(denied)) => {
            if denied == Denied::Invalid {
                front.engine.note_unproven(server);
            }
            tracing::debug!(server, reason = ?denied, "request not authenticated");
            reply::denied(denied, (!is_call || !id.is_empty()).then_some(&id))
        }
        Err(Unserved::Refused(refused)) => {
            tracing::debug!(server, code = refused.code.name(), "request refused");
            if let Some(limit) = refused.limit {
                front.engine.metrics.refused(limit);
            }
            if is_call && id.is_empty() {
                reply::unaddressed(&refused, front.terminal)
            } else {
                reply::refusal(&refused, &id, front.terminal)
            }
        }
    }
}

/// `id` becomes the request's own raw id as soon as it is known, so that any refusal can carry it (S13a).
async fn answer(
    front: &Arc<Front>,
    (peer, server): (IpAddr, &str),
    request: HttpRequest<Incoming>,
    id: &mut Bytes,
) -> Result<Response<Answer>, Unserved> {
    let admitted = guard::head_fits(&request, front.header_bytes_max)
        .and_then(|()| front.guard.check(request.headers()))
        .and_then(|()| if opens(request.method(), request.headers()) { take_opening(front, peer) } else { Ok(()) });
    if let Err(refused) = admitted {
        if *request.method() == Verb::POST {
            *id = Box::pin(strangers_id(request.into_body())).await;
        }
        return Err(refused.into());
    }
    let proven = match front.auth.identify(request.headers()).await {
        Ok(proven) => proven,
        Err(denied) => {
            if *request.method() == Verb::POST {
                *id = Box::pin(strangers_id(request.into_body())).await;
            }
            return Err(Unserved::Denied(denied));
        }
    };
    let caller = guard::caller(proven, request.headers(), front.require_agent);
    let served = front.engine.served(server);
    let response = match *request.method() {
        Verb::POST => post(front, peer, served, caller, request, id).await,
        Verb::GET => Box::pin(get(front, served?, &caller?, request.headers())).await,
        Verb::DELETE => Box::pin(delete(front, served?, &caller?, request.headers())).await,
        _ => Err(Refused::new(Code::MethodNotAllowed, "this endpoint takes POST, GET and DELETE")),
    };
    Ok(response?)
}

/// Whether a request can only be `initialize`, or nothing that is served: a POST without a session's id that does not say
/// that it needs none. That is seen before anything is spent on it.
fn opens(verb: &Verb, headers: &HeaderMap) -> bool {
    *verb == Verb::POST && !headers.contains_key(SESSION_ID) && !modern::is_announced(headers)
}

/// Takes an opening out of what `peer` may open (S12).
pub(super) fn take_opening(front: &Front, peer: IpAddr) -> Result<(), Refused> {
    front.rate.take(peer, front.engine.now()).map_err(|wait| {
        let name = Limit::Openings.name();
        let text = format!("the limit `{name}` is reached: too many sessions were opened from this address; wait");
        Refused { retry_after: Some(wait), ..Refused::at_limit(Code::LimitReached, Limit::Openings, text) }
    })
}

/// Why a request is not served: nobody knows whose it is, or something is wrong with it.
pub(super) enum Unserved {
    Denied(Denied),
    Refused(Refused),
}

impl From<Refused> for Unserved {
    fn from(refused: Refused) -> Self {
        Self::Refused(refused)
    }
}

/// A path that leads nowhere. Only who may use the servers learns their names.
pub async fn nowhere(front: &Arc<Front>, headers: &HeaderMap) -> Response<Answer> {
    let known = front.guard.check(headers).is_ok() && front.auth.identify(headers).await.is_ok();
    reply::no_such_path(known.then_some(&front.engine))
}

/// The id of a request that is to be refused whatever it says: it is read within narrow bounds of size and time, since
/// an error with another id hangs some clients (S13a), and is empty if it can't be had within them.
pub(super) async fn strangers_id(body: Incoming) -> Bytes {
    let mut id = Bytes::new();
    let read = tokio::time::timeout(STRANGER_READ_MAX, read_body(body, STRANGER_BODY_BYTES_MAX)).await;
    if let Ok(Ok(body)) = read {
        // What else is wrong with it does not matter.
        let _ = parse(&body, &mut id);
    }
    id
}

async fn post(
    front: &Arc<Front>,
    peer: IpAddr,
    served: Result<&Served, Refused>,
    caller: Result<Caller, Refused>,
    request: HttpRequest<Incoming>,
    id: &mut Bytes,
) -> Result<Response<Answer>, Refused> {
    let (head, body) = request.into_parts();
    let body = read_body(body, front.body_bytes_max).await?;
    // Read before anything is refused, so that the refusal can carry the request's id.
    let posted = parse(&body, id);
    let caller = caller?;
    accepts_both(&head.headers)?;
    is_json(&head.headers)?;
    let posted = posted?;
    let served = served?;
    if let Some((only, meta)) = modern::recognise(&posted, &head.headers) {
        let parts = (only, &meta);
        // Counted before anything is waited for: what is held here is not without a bound.
        let attending = match front.engine.attendance.enter(&caller.principal, modern::stay(only)) {
            Ok(attending) => attending,
            Err(refused) => return Ok(modern::refuse(front, served, &refused, &only.id())),
        };
        match Box::pin(front.engine.modern_service(served)).await {
            Service::Not => {}
            Service::PassedOn => {
                here(front)?;
                let answer = modern::answer(front, (&caller, served), &head.headers, parts, attending);
                return Ok(Box::pin(answer).await);
            }
            Service::InConversation => {
                here(front)?;
                let who = (&caller, served);
                let answer = conversation::answer(front, peer, who, &head.headers, parts, attending);
                return Ok(Box::pin(answer).await);
            }
        }
    }
    let Posted { messages, batched } = posted;
    if let [only] = messages.as_slice()
        && only.envelope.kind == Kind::Request
        && !batched
    {
        if only.method == Method::Initialize {
            // One under an old id (S13) was not seen to be one before.
            if !opens(&head.method, &head.headers) {
                take_opening(front, peer)?;
            }
            return Box::pin(initialize(front, served, &caller, only)).await;
        }
        if only.method == Method::Discover {
            return Err(sessions_only());
        }
    }
    let live = session(front, served, &caller, &head.headers).await?;
    version_fits(&live, &head.headers)?;
    if batched {
        return Box::pin(many(front, &live, messages)).await;
    }
    for message in messages {
        if message.envelope.kind == Kind::Request {
            let reply = front.engine.request(&live, message).await?;
            return Ok(respond(front, &live, reply));
        }
        Box::pin(one_way(front, &live, &message)).await;
    }
    Ok(reply::empty(StatusCode::ACCEPTED))
}

/// Opens a session. One that carries an old id gets a new session all the same (S13).
async fn initialize(
    front: &Arc<Front>,
    served: &Served,
    caller: &Caller,
    request: &Request,
) -> Result<Response<Answer>, Refused> {
    here(front)?;
    let params = request.envelope.params.clone().map(|span| request.message.slice(span));
    let params = params.ok_or_else(|| Refused::new(Code::RequestInvalid, "`initialize` needs `params`"))?;
    let (engine, caller) = (Arc::clone(&front.engine), caller.clone());
    // The opening goes on if the client hangs up: half an opening would leave something behind.
    let served_name = served.server.name.as_str().to_owned();
    let opening = crate::runtime::spawn(async move {
        let served = engine.served(&served_name)?;
        engine.open(&caller, served, params).await
    });
    let welcome = opening
        .await
        .map_err(|_| Refused::new(Code::Internal, "the opening of the session failed in the gateway"))??;
    Ok(reply::welcome(&welcome.id, result_message(&request.id(), &welcome.result).into()))
}

/// A batch (2025-03-26 only): every request in it is answered on one stream.
async fn many(front: &Arc<Front>, live: &Arc<Live>, messages: Vec<Request>) -> Result<Response<Answer>, Refused> {
    if !live.version.allows_batches() {
        let text = format!("batches exist in protocol version 2025-03-26 only; this session speaks {}", live.version);
        return Err(Refused::new(Code::BatchUnsupported, text));
    }
    let (requests, others): (Vec<_>, Vec<_>) =
        messages.into_iter().partition(|message| message.envelope.kind == Kind::Request);
    for message in &others {
        one_way(front, live, message).await;
    }
    if requests.is_empty() {
        return Ok(reply::empty(StatusCode::ACCEPTED));
    }
    let reply = front.engine.batch(live, requests)?;
    Ok(respond(front, live, reply))
}

/// A notification, or an answer to a question of the server.
pub(super) async fn one_way(front: &Arc<Front>, live: &Arc<Live>, message: &Request) {
    match message.envelope.kind {
        Kind::Notification => front.engine.notification(live, &message.message, &message.envelope).await,
        Kind::Result | Kind::Error => front.engine.answer(live, &message.message, &message.envelope).await,
        Kind::Request => {}
    }
}

async fn get(
    front: &Arc<Front>,
    served: &Served,
    caller: &Caller,
    headers: &HeaderMap,
) -> Result<Response<Answer>, Refused> {
    if !accepts(headers, "text/event-stream") {
        return Err(Refused::new(Code::NotAcceptable, "a GET must accept `text/event-stream`"));
    }
    let live = session(front, served, caller, headers).await?;
    version_fits(&live, headers)?;
    let cursor = headers.get("last-event-id").map(|value| value.to_str().unwrap_or("?"));
    match front.engine.follow(&live, cursor).await? {
        Followed::Listening(reader) => {
            let kept = (front.engine.reading(&live), live.link.listen());
            let (front, live) = (Arc::clone(front), Arc::clone(&live));
            let until = async move {
                tokio::select! {
                    () = front.engine.stopped() => {}
                    () = live.ended.wait() => {}
                }
            };
            Ok(reply::events(reader, kept, until))
        }
        Followed::Resumed(reader) => Ok(respond(front, &live, Reply::Stream(reader))),
        Followed::Finished => Ok(reply::empty(StatusCode::NO_CONTENT)),
        Followed::NoStream => {
            Err(Refused::new(Code::MethodNotAllowed, "this server has nothing to say outside its answers"))
        }
    }
}

async fn delete(
    front: &Arc<Front>,
    served: &Served,
    caller: &Caller,
    headers: &HeaderMap,
) -> Result<Response<Answer>, Refused> {
    let live = session(front, served, caller, headers).await?;
    front.engine.end(&live, Input::Delete, Actor::Client(caller.principal.clone())).await?;
    Ok(reply::empty(StatusCode::NO_CONTENT))
}

/// A request that only now is complete, on a connection that could not go over: sessions are the next worker's.
fn here(front: &Front) -> Result<(), Refused> {
    match front.engine.has_left() {
        true => Err(Refused::new(Code::Unavailable, "this worker has handed over to the next one; send it again")),
        false => Ok(()),
    }
}

/// The live session that the request names.
async fn session(front: &Arc<Front>, served: &Served, caller: &Caller, headers: &HeaderMap) -> Result<Entry, Refused> {
    here(front)?;
    let value = headers.get(SESSION_ID).ok_or_else(|| {
        Refused::new(Code::SessionMissing, "the `Mcp-Session-Id` header is missing; send `initialize` first")
    })?;
    let id = value.to_str().ok().and_then(SessionId::parse);
    let id = id.ok_or_else(|| Refused::new(Code::SessionUnknown, SESSION_UNKNOWN))?;
    front.engine.find(&id, caller, served).await
}

fn respond(front: &Arc<Front>, live: &Arc<Live>, reply: Reply) -> Response<Answer> {
    match reply {
        Reply::Json(message) => reply::json(StatusCode::OK, message),
        Reply::Stream(reader) => {
            // A session that ends finishes its streams with a last message; only a drain and a handover cut them.
            let reading = front.engine.reading(live);
            reply::events(reader, reading, Arc::clone(&front.engine).cut(Arc::clone(live)))
        }
    }
}

/// What a POST carried.
pub(super) struct Posted {
    pub(super) messages: Vec<Request>,
    pub(super) batched: bool,
}

pub(super) fn parse(body: &Bytes, id: &mut Bytes) -> Result<Posted, Refused> {
    let invalid = |text: String| Refused::new(Code::RequestInvalid, text);
    let elements = batch(body).map_err(|error| invalid(format!("the body is not JSON: {error}")))?;
    let batched = elements.is_some();
    let parts =
        elements.map_or_else(|| vec![body.clone()], |spans| spans.into_iter().map(|span| body.slice(span)).collect());
    if parts.is_empty() {
        return Err(invalid("an empty batch asks for nothing".to_owned()));
    }
    let mut messages = Vec::with_capacity(parts.len());
    for message in parts {
        let envelope = scan(&message).map_err(|error| {
            *id = legible_id(&message);
            invalid(format!("not a JSON-RPC message: {error}"))
        })?;
        let method = envelope.method_name(&message).map_or(Method::Other, |name| Method::of(&name));
        if batched && method == Method::Initialize {
            return Err(invalid("`initialize` must not be part of a batch".to_owned()));
        }
        let request = Request { message, envelope, method };
        if !batched && request.envelope.kind == Kind::Request {
            *id = request.id();
        }
        messages.push(request);
    }
    Ok(Posted { messages, batched })
}

/// The id of something that is no valid message, if it has one that can be read.
fn legible_id(message: &Bytes) -> Bytes {
    let Some(span) = member(message, &(0..message.len()), "id") else { return Bytes::new() };
    let id = message.slice(span);
    let alone = [b"[", id.as_ref(), b"]"].concat();
    let scalar = id.first().is_some_and(|byte| matches!(byte, b'"' | b'-' | b'0'..=b'9'));
    let valid = scalar && matches!(batch(&alone), Ok(Some(spans)) if spans.len() == 1);
    if valid { id } else { Bytes::new() }
}

pub(super) async fn read_body(body: Incoming, bytes_max: usize) -> Result<Bytes, Refused> {
    let mut body = body;
    let reading = tokio::time::timeout(BODY_READ_MAX, Limited::new(&mut body, bytes_max).collect());
    match reading.await {
        Ok(Ok(collected)) => Ok(collected.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            drain(body).await;
            let text = format!("the body is larger than `{}`, {bytes_max} bytes", Limit::Body.name());
            Err(Refused::at_limit(Code::BodyTooLarge, Limit::Body, text))
        }
        Ok(Err(_)) => Err(Refused::new(Code::RequestInvalid, "the body ended early")),
        Err(_elapsed) => Err(Refused::new(Code::RequestInvalid, "the body took too long to arrive")),
    }
}

/// Reads on for a moment, for nothing: a client that is still sending when the connection closes sees a reset, and
/// never the answer.
async fn drain(mut body: Incoming) {
    let _ = tokio::time::timeout(DRAIN_MAX, async {
        let mut drained = 0;
        while let Some(Ok(frame)) = body.frame().await {
            drained += frame.data_ref().map_or(0, Bytes::len);
            if drained > DRAIN_BYTES_MAX {
                return;
            }
        }
    })
    .await;
}

/// What a stateless client's probe is told. A plain error sends it on to `initialize` and keeps it sessionful (E0).
fn sessions_only() -> Refused {
    Refused::new(Code::SessionMissing, "this endpoint keeps sessions; send `initialize`")
}

/// Checks `MCP-Protocol-Version`. Without it the session's own version stands (2025-06-18, Transports).
fn version_fits(live: &Live, headers: &HeaderMap) -> Result<(), Refused> {
    let Some(value) = headers.get("mcp-protocol-version") else { return Ok(()) };
    if value.to_str().ok().and_then(Version::parse).is_some() {
        return Ok(());
    }
    let text =
        format!("the `MCP-Protocol-Version` header names no version of this session, which speaks {}", live.version);
    Err(Refused::new(Code::VersionUnsupported, text))
}

fn accepts_both(headers: &HeaderMap) -> Result<(), Refused> {
    if accepts(headers, "application/json") && accepts(headers, "text/event-stream") {
        return Ok(());
    }
    Err(Refused::new(Code::NotAcceptable, "a POST must accept both `application/json` and `text/event-stream`"))
}

/// Whether some `Accept` header has `media` or a wildcard that covers it.
pub(super) fn accepts(headers: &HeaderMap, media: &str) -> bool {
    let group = media.split('/').next().unwrap_or_default();
    headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(',')).any(
        |entry| {
            let range = entry.split(';').next().unwrap_or_default().trim();
            range.eq_ignore_ascii_case(media)
                || range == "*/*"
                || range.strip_suffix("/*").is_some_and(|prefix| prefix.eq_ignore_ascii_case(group))
        },
    )
}

pub(super) fn is_json(headers: &HeaderMap) -> Result<(), Refused> {
    let value = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let media = value.split(';').next().unwrap_or_default().trim();
    if media.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    Err(Refused::new(Code::MediaTypeUnsupported, "the body must be `application/json`"))
}

/// How much of the body of an unauthenticated request is read.
const STRANGER_BODY_BYTES_MAX: usize = 64 * 1024;
/// How long it may take to come.
const STRANGER_READ_MAX: Duration = Duration::from_secs(5);

/// How long a body may take to arrive.
const BODY_READ_MAX: Duration = Duration::from_mins(1);
/// How much of a body that is too large is read for nothing, and for how long.
const DRAIN_BYTES_MAX: usize = 64 << 20;
const DRAIN_MAX: Duration = Duration::from_secs(2);
