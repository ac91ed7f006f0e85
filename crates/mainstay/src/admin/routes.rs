//! The paths of the admin port.

use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use http::header::CACHE_CONTROL;
use http::{HeaderMap, HeaderValue};
use mainstay_core::id::{SessionKey, SessionRef};
use serde::{Deserialize, Serialize};

use super::problem::{Code, Problem};
use super::token::Token;
use crate::engine::Engine;
use crate::engine::view::{ServerView, SessionView, StatusView};

/// Every path, the guard before those of the API.
pub(super) fn router(engine: Arc<Engine>, token: Token) -> Router {
    let api = Router::new()
        .route("/status", get(status))
        .route("/servers", get(servers))
        .route("/sessions", get(sessions))
        .route("/sessions/{ref}", get(session))
        .method_not_allowed_fallback(method_not_allowed)
        .fallback(nothing)
        .layer(middleware::from_fn_with_state(token, guard));
    Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readiness))
        .nest("/api/v1", api)
        .method_not_allowed_fallback(method_not_allowed)
        .fallback(nothing)
        .with_state(engine)
}

/// A page of sessions.
#[derive(Debug, Serialize)]
struct SessionsPage {
    sessions: Vec<SessionView>,
    /// The `after` of the next page; none on the last one.
    next: Option<String>,
}

#[derive(Debug, Deserialize)]
struct PageQuery {
    after: Option<String>,
    limit: Option<usize>,
}

async fn guard(State(token): State<Token>, headers: HeaderMap, request: Request, next: Next) -> Response {
    if !token.admits(&headers) {
        let detail = "send `Authorization: Bearer TOKEN` with the token of the state directory's admin.token";
        return Problem::new(Code::Unauthorized, detail).into_response();
    }
    let mut response = next.run(request).await;
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

async fn readiness(State(engine): State<Arc<Engine>>) -> Result<&'static str, Problem> {
    if engine.is_ready() { Ok("ready\n") } else { Err(Problem::new(Code::NotReady, "this worker is draining")) }
}

async fn status(State(engine): State<Arc<Engine>>) -> Json<StatusView> {
    Json(engine.status().await)
}

#[derive(Debug, Serialize)]
struct Servers {
    servers: Vec<ServerView>,
}

async fn servers(State(engine): State<Arc<Engine>>) -> Json<Servers> {
    Json(Servers { servers: engine.servers() })
}

async fn sessions(
    State(engine): State<Arc<Engine>>,
    query: Result<Query<PageQuery>, QueryRejection>,
) -> Result<Json<SessionsPage>, Problem> {
    let Query(query) = query.map_err(|error| Problem::new(Code::RequestInvalid, error.body_text()))?;
    let after = match &query.after {
        Some(text) => Some(behind(parsed(text)?)),
        None => None,
    };
    let limit = query.limit.unwrap_or(PAGE_SESSIONS_DEFAULT).clamp(1, PAGE_SESSIONS_MAX);
    let sessions = engine.sessions(after, limit).await.map_err(|error| unreadable(&error))?;
    let full = sessions.len() == limit;
    let next = sessions.last().filter(|_| full).map(|last| last.r#ref.clone());
    Ok(Json(SessionsPage { sessions, next }))
}

async fn session(State(engine): State<Arc<Engine>>, Path(text): Path<String>) -> Result<Json<SessionView>, Problem> {
    let session_ref = parsed(&text)?;
    let mut found = engine.session(session_ref).await.map_err(|error| unreadable(&error))?;
    match found.len() {
        0 => Err(Problem::new(Code::NotFound, format!("no session is called {session_ref}"))),
        _ => Ok(Json(found.swap_remove(0))),
    }
}

async fn nothing() -> Problem {
    Problem::new(Code::NotFound, "the paths are /healthz, /readyz and those below /api/v1/")
}

async fn method_not_allowed() -> Problem {
    Problem::new(Code::MethodNotAllowed, "every path is read by GET")
}

fn parsed(text: &str) -> Result<SessionRef, Problem> {
    let malformed = || Problem::new(Code::RequestInvalid, "a session's ref is `s-` and ten hexadecimal digits");
    SessionRef::parse(text).ok_or_else(malformed)
}

/// The last key that has this ref: a page begins behind it. The key itself is not told to anybody.
fn behind(session_ref: SessionRef) -> SessionKey {
    let mut key = [0xff; 32];
    let head = session_ref.as_bytes();
    key[..head.len()].copy_from_slice(head);
    SessionKey::from_bytes(key)
}

/// What failed is the log's; the client learns that it may ask again.
fn unreadable(error: &(dyn std::error::Error + 'static)) -> Problem {
    tracing::warn!(error, "the ledger can't be read for the admin API");
    Problem::new(Code::Unavailable, "the ledger can't be read now")
}

const PAGE_SESSIONS_DEFAULT: usize = 100;
const PAGE_SESSIONS_MAX: usize = 1000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_begins_behind_every_session_of_its_ref() {
        let key = SessionKey::from_bytes([7; 32]);
        let after = behind(key.session_ref());
        assert!(after > key && after.session_ref() == key.session_ref());
    }
}
