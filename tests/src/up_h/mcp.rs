//! `/mcp`: the checks that every request meets, GET and DELETE.

use super::dialect::{self, Dialect, When, refusal, text_response};
use super::events::{Follow, parse_event_id};
use super::gap::{self, Fate};
use super::sessions::Session;
use super::{Body, Cut, Mode, Response, SecondStream, UpH, legacy, post};
use crate::server::VERSIONS;
use http::request::Parts;
use http::{HeaderValue, Request, header};
use http_body_util::{BodyExt as _, Limited};
use hyper::body::Incoming;
use serde_json::Value;
use std::sync::Arc;

/// One request, read and not yet judged.
#[derive(Debug)]
pub(super) struct Call {
    /// Method, path and headers.
    pub parts: Parts,
    /// The body as JSON; `null` if it is empty or no JSON.
    pub body: Value,
    /// Whether the body was JSON.
    pub parsed: bool,
    /// What was ordered for it.
    pub fate: Fate,
}

impl Call {
    /// A header's value, or the empty string.
    pub(super) fn header(&self, name: &str) -> &str {
        self.parts.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    /// The JSON-RPC id of the request, or `null`.
    pub(super) fn id(&self) -> &Value {
        &self.body["id"]
    }
}

/// Answers one request to the port of `/mcp`; the error cuts the connection.
pub(super) async fn handle(up: Arc<UpH>, request: Request<Incoming>) -> Result<Response, Cut> {
    let (parts, body) = request.into_parts();
    let raw = Limited::new(body, BODY_BYTES_MAX).collect().await.map_err(|_| Cut)?.to_bytes();
    let parsed = serde_json::from_slice::<Value>(&raw);
    let json = parsed.is_ok();
    let body = parsed.unwrap_or(Value::Null);
    up.journal.note(&parts, &raw, &body);
    let (delay, fate) = gap::take(&mut up.orders().gaps, parts.method.as_str(), &body);
    if !delay.is_zero() {
        tokio::time::sleep(delay).await;
    }
    let call = Call { parts, body, parsed: json, fate };
    match &call.fate {
        Fate::Hang => std::future::pending().await,
        Fate::CutBefore => Err(Cut),
        Fate::Answer(answer) => Ok(answer.response(call.id())),
        Fate::AnswerLate(pause) => {
            let answer = judge(&up, &call).await;
            tokio::time::sleep(*pause).await;
            answer
        }
        Fate::Serve | Fate::CutAfter | Fate::CutSse(_) | Fate::RpcError(_) => judge(&up, &call).await,
    }
}

/// Finds the session that a request names.
///
/// # Errors
/// The refusal, if it names none or one that is not known.
pub(super) fn session(up: &UpH, call: &Call) -> Result<Arc<Session>, Box<Response>> {
    let (issue_ids, dialect) = {
        let orders = up.orders();
        (orders.issue_ids, orders.dialect.clone())
    };
    let id = call.header(SESSION_HEADER);
    if id.is_empty() && issue_ids {
        return Err(Box::new(refusal(400, -32000, "Bad Request: Mcp-Session-Id header is required", call.id())));
    }
    let key = if issue_ids { id } else { Session::STATELESS };
    match up.sessions.find(key) {
        Some(session) => Ok(session),
        None if dialect.adopt => up
            .sessions
            .open(&up.world, Some(key))
            .map_err(|error| Box::new(text_response(500, "text/plain", error.to_string()))),
        None => Err(Box::new(dialect.response(call.id()))),
    }
}

/// An SSE answer.
pub(super) fn sse(body: Body) -> Response {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache, no-transform"));
    response
}

async fn judge(up: &Arc<UpH>, call: &Call) -> Result<Response, Cut> {
    if up.legacy {
        return legacy::answer(up, call).await;
    }
    if call.parts.uri.path() != "/mcp" {
        return Ok(text_response(404, "text/plain", "Not Found"));
    }
    if let Some(refused) = refuse(up, call) {
        return Ok(refused);
    }
    match call.parts.method.as_str() {
        "POST" => post::answer(up, call).await,
        "GET" => Ok(listen(up, call).unwrap_or_else(|refused| *refused)),
        "DELETE" => Ok(delete(up, call).unwrap_or_else(|refused| *refused)),
        _ => Ok(not_allowed("GET, POST, DELETE")),
    }
}

/// The checks that come before the session: credentials, the dialect for all, the protocol version.
pub(super) fn refuse(up: &UpH, call: &Call) -> Option<Response> {
    let (bearer, dialect) = {
        let orders = up.orders();
        (orders.bearer.clone(), orders.dialect.clone())
    };
    if let Some(bearer) = bearer
        && call.header("authorization") != format!("Bearer {bearer}")
    {
        return Some(challenge(call.id()));
    }
    if dialect.when == When::Always {
        return Some(dialect.response(call.id()));
    }
    let version = call.header("mcp-protocol-version");
    if !version.is_empty() && !VERSIONS.contains(&version) {
        let message =
            format!("Bad Request: Unsupported protocol version (supported versions: {})", VERSIONS.join(", "));
        return Some(refusal(400, -32000, &message, call.id()));
    }
    None
}

fn challenge(id: &Value) -> Response {
    let order = serde_json::json!({"preset": "401-challenge"});
    Dialect::read(&order).map_or_else(|_| text_response(401, "", ""), |dialect| dialect.response(id))
}

fn listen(up: &UpH, call: &Call) -> Result<Response, Box<Response>> {
    let (status, second, mode, retry_ms) = {
        let orders = up.orders();
        (orders.get_status, orders.second_stream, orders.mode, orders.retry_ms)
    };
    match status {
        200 => {}
        405 => return Err(Box::new(not_allowed("POST, DELETE"))),
        other => return Err(Box::new(refusal(other, -32000, "as ordered", &Value::Null))),
    }
    if !call.header("accept").contains("text/event-stream") {
        let message = "Not Acceptable: Client must accept text/event-stream";
        return Err(Box::new(refusal(406, -32000, message, &Value::Null)));
    }
    let session = session(up, call)?;
    let ids = mode == Mode::SseWithIds;
    let cut_after = cut_after(call);
    let cursor = call.header("last-event-id");
    if cursor.is_empty() {
        if second == SecondStream::Conflicts && session.listening.followers() > 0 {
            let message = "Conflict: Only one SSE stream is allowed per session";
            return Err(Box::new(refusal(409, -32000, message, &Value::Null)));
        }
        let after = session.listening.last();
        return Ok(sse(session.listening.body(Follow { after, ids, retry_ms, cut_after })));
    }
    let found = parse_event_id(cursor)
        .filter(|_| ids)
        .and_then(|(stream, number)| Some((session.stream(stream)?, number)))
        .filter(|(log, number)| *number <= log.last());
    match found {
        Some((log, after)) => Ok(sse(log.body(Follow { after, ids, retry_ms, cut_after }))),
        None => Err(Box::new(refusal(400, -32000, "Bad Request: Invalid event ID", &Value::Null))),
    }
}

fn delete(up: &UpH, call: &Call) -> Result<Response, Box<Response>> {
    let status = up.orders().delete_status;
    let session = session(up, call)?;
    if status >= 400 {
        return Ok(if status == 405 { not_allowed("GET, POST") } else { text_response(status, "", "") });
    }
    up.sessions.close(&session.id);
    Ok(text_response(status, "", ""))
}

/// After how many events the fate of this request cuts a stream.
pub(super) fn cut_after(call: &Call) -> Option<u64> {
    match call.fate {
        Fate::CutSse(events) => Some(events),
        Fate::CutAfter => Some(0),
        Fate::Serve | Fate::AnswerLate(_) | Fate::Hang | Fate::CutBefore | Fate::RpcError(_) | Fate::Answer(_) => None,
    }
}

fn not_allowed(allowed: &'static str) -> Response {
    let mut response = dialect::refusal(405, -32000, "Method not allowed.", &Value::Null);
    response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allowed));
    response
}

/// The name of the session header.
pub(super) const SESSION_HEADER: &str = "mcp-session-id";
const BODY_BYTES_MAX: usize = 512 * 1024 * 1024;
