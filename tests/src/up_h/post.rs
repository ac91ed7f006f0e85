//! POST to `/mcp`.

use super::dialect::{refusal, text_response};
use super::events::{EventLog, Follow};
use super::gap::Fate;
use super::mcp::{self, Call, SESSION_HEADER};
use super::sessions::Session;
use super::{Cut, Mode, Response, UpH};
use crate::server::{self, Kind, Outlet};
use http::HeaderValue;
use serde_json::Value;
use std::sync::Arc;

/// Answers a POST; the error cuts the connection.
pub(super) async fn answer(up: &Arc<UpH>, call: &Call) -> Result<Response, Cut> {
    if let Some(refused) = refuse(call) {
        return Ok(refused);
    }
    if server::kind(&call.body) == Kind::Request && server::method(&call.body) == "initialize" {
        return initialize(up, call).await;
    }
    let session = match mcp::session(up, call) {
        Ok(session) => session,
        Err(refused) => return Ok(*refused),
    };
    let batch = match call.body.as_array() {
        Some(_) if session.conversation.facts().protocol != "2025-03-26" => {
            return Ok(refusal(400, -32600, "Invalid Request: batches are not supported", &Value::Null));
        }
        Some(messages) => messages.clone(),
        None => vec![call.body.clone()],
    };
    take(up, call, &session, batch).await
}

fn refuse(call: &Call) -> Option<Response> {
    let accept = call.header("accept");
    if !accept.contains("application/json") || !accept.contains("text/event-stream") {
        let message = "Not Acceptable: Client must accept both application/json and text/event-stream";
        return Some(refusal(406, -32000, message, &Value::Null));
    }
    if !call.header("content-type").starts_with("application/json") {
        let message = "Unsupported Media Type: Content-Type must be application/json";
        return Some(refusal(415, -32000, message, &Value::Null));
    }
    if !call.parsed {
        return Some(refusal(400, -32700, "Parse error", &Value::Null));
    }
    let junk = |message: &Value| server::kind(message) == Kind::Junk;
    let invalid = match call.body.as_array() {
        Some(messages) => messages.is_empty() || messages.iter().any(junk),
        None => junk(&call.body),
    };
    invalid.then(|| refusal(400, -32600, "Invalid Request", &Value::Null))
}

async fn initialize(up: &Arc<UpH>, call: &Call) -> Result<Response, Cut> {
    if !call.header(SESSION_HEADER).is_empty() {
        return Ok(match mcp::session(up, call) {
            Ok(_) => refusal(400, -32600, "Invalid Request: Server already initialized", call.id()),
            Err(refused) => *refused,
        });
    }
    let issue_ids = up.orders().issue_ids;
    let opened = up.sessions.open(&up.world, (!issue_ids).then_some(Session::STATELESS));
    let session = match opened {
        Ok(session) => session,
        Err(error) => return Ok(text_response(500, "text/plain", error.to_string())),
    };
    let mut response = serve(up, call, &session, vec![call.body.clone()]).await?;
    if issue_ids && let Ok(id) = HeaderValue::try_from(&session.id) {
        response.headers_mut().insert(SESSION_HEADER, id);
    }
    Ok(response)
}

/// Takes notifications and responses at once, and serves what requests there are.
async fn take(up: &Arc<UpH>, call: &Call, session: &Arc<Session>, batch: Vec<Value>) -> Result<Response, Cut> {
    let mut requests = Vec::new();
    for message in batch {
        match server::kind(&message) {
            Kind::Request => requests.push(message),
            Kind::Notification => {
                session.conversation.note(&message);
                if server::method(&message) == "notifications/initialized" {
                    forget_if_ordered(up);
                }
            }
            Kind::Response | Kind::Junk => {
                session.conversation.answered(message);
            }
        }
    }
    if requests.is_empty() {
        return match call.fate {
            Fate::CutAfter | Fate::CutSse(_) => Err(Cut),
            Fate::Serve | Fate::AnswerLate(_) | Fate::Hang | Fate::CutBefore | Fate::RpcError(_) | Fate::Answer(_) => {
                Ok(text_response(202, "", ""))
            }
        };
    }
    serve(up, call, session, requests).await
}

/// The second loss of AC-02: sessions go as soon as they are complete, before anything can be called in them.
pub(super) fn forget_if_ordered(up: &UpH) {
    let ordered = {
        let mut orders = up.orders();
        let ordered = orders.forget_after_initialized > 0;
        orders.forget_after_initialized = orders.forget_after_initialized.saturating_sub(1);
        ordered
    };
    if ordered {
        up.sessions.forget();
    }
}

/// Runs the requests, apart from this connection: whatever becomes of it, they are executed to their end.
async fn serve(up: &Arc<UpH>, call: &Call, session: &Arc<Session>, requests: Vec<Value>) -> Result<Response, Cut> {
    let log = session.open_stream();
    let array = call.body.is_array();
    let (runner, running) = (Arc::clone(&log), Arc::clone(session));
    tokio::spawn(async move {
        let out = Outlet::Log(Arc::clone(&runner));
        for request in &requests {
            running.conversation.serve(request, &out).await;
        }
        runner.end();
    });
    let (mode, retry_ms) = {
        let orders = up.orders();
        (orders.mode, orders.retry_ms)
    };
    let cut_after = mcp::cut_after(call);
    match call.fate {
        Fate::CutAfter => {
            log.all().await;
            return Err(Cut);
        }
        Fate::RpcError(code) => {
            log.all().await;
            return Ok(refusal(200, code, "as ordered", call.id()));
        }
        Fate::Serve | Fate::AnswerLate(_) if mode == Mode::Json => return Ok(as_json(call, &log, array).await),
        Fate::Serve | Fate::AnswerLate(_) | Fate::Hang | Fate::CutBefore | Fate::CutSse(_) | Fate::Answer(_) => {}
    }
    let ids = mode == Mode::SseWithIds;
    Ok(mcp::sse(log.body(Follow { after: 0, ids, retry_ms, cut_after })))
}

/// One JSON document, or SSE if something comes before the answer.
async fn as_json(call: &Call, log: &Arc<EventLog>, array: bool) -> Response {
    if array {
        let all = log.all().await;
        return text_response(200, "application/json", format!("[{}]", all.join(",")));
    }
    match log.first().await {
        None => refusal(200, 0, "Request cancelled", call.id()),
        Some(first) if first.response => text_response(200, "application/json", first.text.as_bytes().to_vec()),
        Some(_) => mcp::sse(log.body(Follow::default())),
    }
}
