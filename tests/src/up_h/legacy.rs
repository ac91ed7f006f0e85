//! UP-L: the same server over HTTP+SSE, the transport of 2024-11-05, with `--legacy`.
//!
//! `GET /sse` opens a session, which is the connection: it goes when the stream does. The stream's first event says where
//! messages go, `/message?sessionId=…`; they are answered 202 there, and on the stream. Gaps, dialects, the port and the
//! journal are those of UP-H; a stream that is to be cut after a call is the one stream that there is.

use super::dialect::text_response;
use super::events::{EventLog, Follow, SyncStream};
use super::gap::Fate;
use super::mcp::{self, Call};
use super::post::forget_if_ordered;
use super::sessions::Session;
use super::{Body, Cut, Response, UpH};
use crate::server::{self, Kind, Outlet, Reply};
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;

/// What the first event of a stream is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum First {
    /// `endpoint` with this data, in which `$id` stands for the session's id.
    Endpoint(String),
    /// `endpoint` with so many bytes.
    Giant(usize),
    /// `endpoint` with data that never ends, a few bytes at a time.
    Endless,
    /// An ordinary message.
    Message,
    /// None.
    Nothing,
}

impl Default for First {
    fn default() -> First {
        First::Endpoint("/message?sessionId=$id".to_owned())
    }
}

impl First {
    /// Reads `{"data": TEXT}`, `{"bytes": N}` or `{"kind": endless|message|nothing}`; the default if there is none of them.
    pub(super) fn read(order: &Value) -> Result<First, String> {
        if let Some(data) = order["data"].as_str() {
            return Ok(First::Endpoint(data.to_owned()));
        }
        if let Some(bytes) = order["bytes"].as_u64() {
            return usize::try_from(bytes).map(First::Giant).map_err(|_| "too many bytes".to_owned());
        }
        match order["kind"].as_str() {
            None => Ok(First::default()),
            Some("endless") => Ok(First::Endless),
            Some("message") => Ok(First::Message),
            Some("nothing") => Ok(First::Nothing),
            Some(other) => Err(format!("no such `kind`: `{other}`")),
        }
    }
}

/// Answers one request; the error cuts the connection.
pub(super) async fn answer(up: &Arc<UpH>, call: &Call) -> Result<Response, Cut> {
    if let Some(refused) = mcp::refuse(up, call) {
        return Ok(refused);
    }
    match (call.parts.method.as_str(), call.parts.uri.path()) {
        ("GET", STREAM_PATH) => Ok(open(up)),
        ("POST", STREAM_PATH) => Ok(text_response(up.orders().post_status, "text/plain", "Method Not Allowed")),
        ("POST", "/message") => take(up, call).await,
        _ => Ok(text_response(404, "text/plain", "Not Found")),
    }
}

fn open(up: &Arc<UpH>) -> Response {
    let (status, first) = {
        let orders = up.orders();
        (orders.get_status, orders.first.clone())
    };
    if status != 200 {
        return text_response(status, "text/plain", "as ordered");
    }
    match up.sessions.open(&up.world, None) {
        Ok(session) => mcp::sse(body(up, &session, &first)),
        Err(error) => text_response(500, "text/plain", error.to_string()),
    }
}

/// The session ends with its stream.
struct Tied {
    up: Arc<UpH>,
    session: String,
}

impl Drop for Tied {
    fn drop(&mut self) {
        self.up.sessions.close(&self.session);
    }
}

fn body(up: &Arc<UpH>, session: &Arc<Session>, first: &First) -> Body {
    let tied = Tied { up: Arc::clone(up), session: session.id.clone() };
    // A comment first, as from servers that prove early that they are there.
    let beginning = match first {
        First::Endpoint(data) => format!(": here\n\nevent: endpoint\ndata: {}\n\n", data.replace("$id", &session.id)),
        First::Giant(bytes) => format!("event: endpoint\ndata: {}\n\n", "x".repeat(*bytes)),
        First::Endless => "event: endpoint\ndata: ".to_owned(),
        First::Message => {
            "data: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/message\",\"params\":{}}\n\n".to_owned()
        }
        First::Nothing => ": here\n\n".to_owned(),
    };
    let rest = match first {
        First::Endless => BodyExt::boxed(StreamBody::new(SyncStream::new(stream::unfold((), async |()| {
            tokio::time::sleep(TRICKLE).await;
            Some((Ok(Frame::data(Bytes::from_static(b"x"))), ()))
        })))),
        First::Endpoint(_) | First::Giant(_) | First::Message | First::Nothing => {
            session.listening.body(Follow::default())
        }
    };
    let opened = stream::once(async move { Ok(Frame::data(Bytes::from(beginning))) });
    let rest = stream::unfold((rest, tied), |(mut rest, tied)| async move {
        let frame = rest.frame().await?;
        Some((frame, (rest, tied)))
    });
    BodyExt::boxed(StreamBody::new(SyncStream::new(opened.chain(rest))))
}

async fn take(up: &Arc<UpH>, call: &Call) -> Result<Response, Cut> {
    let id = call.parts.uri.query().and_then(|query| query.strip_prefix("sessionId=")).unwrap_or_default();
    let Some(session) = up.sessions.find(id) else {
        let dialect = up.orders().dialect.clone();
        return Ok(dialect.response(call.id()));
    };
    match server::kind(&call.body) {
        Kind::Request => return serve(call, &session).await,
        Kind::Notification => {
            session.conversation.note(&call.body);
            if server::method(&call.body) == "notifications/initialized" {
                forget_if_ordered(up);
            }
        }
        Kind::Response => {
            session.conversation.answered(call.body.clone());
        }
        Kind::Junk => return Ok(text_response(400, "text/plain", "Invalid message")),
    }
    Ok(accepted())
}

/// Runs the request apart from this connection: whatever becomes of it, it is executed to its end.
async fn serve(call: &Call, session: &Arc<Session>) -> Result<Response, Cut> {
    let aside = EventLog::new(0);
    let unheard = matches!(call.fate, Fate::CutAfter | Fate::RpcError(_));
    let out = Outlet::Log(if unheard { Arc::clone(&aside) } else { Arc::clone(&session.listening) });
    let (running, request) = (Arc::clone(session), call.body.clone());
    let run = tokio::spawn(async move { running.conversation.serve(&request, &out).await });
    if unheard {
        // It fails only if the server itself is at fault, which the missing answer shows.
        let _ended = run.await;
    }
    match call.fate {
        Fate::CutAfter => {
            session.listening.end();
            return Err(Cut);
        }
        Fate::RpcError(code) => session.listening.push(&Reply::error(code, "as ordered").into_message(call.id())),
        Fate::Serve | Fate::AnswerLate(_) | Fate::Hang | Fate::CutBefore | Fate::CutSse(_) | Fate::Answer(_) => {}
    }
    Ok(accepted())
}

fn accepted() -> Response {
    text_response(202, "text/plain", "Accepted")
}

/// The path of the event stream.
const STREAM_PATH: &str = "/sse";
const TRICKLE: Duration = Duration::from_millis(20);
