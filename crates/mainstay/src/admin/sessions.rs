//! Sessions: listed, shown, drained, closed.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use http::StatusCode;
use mainstay_core::id::{SessionId, SessionKey, SessionRef};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::problem::{Code, Problem};
use super::request::{Asked, Confided, Order, carried_out, grace, session_ref};
use crate::engine::Engine;
use crate::engine::view::sessions::{SessionView, SessionsFilter};

/// A page of sessions.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct SessionsPage {
    sessions: Vec<SessionView>,
    /// The `after` of the next page; null on the last one.
    next: Option<String>,
    /// What the filter names that there is not; null if there is all of it.
    note: Option<String>,
}

/// Which sessions are asked for. What is absent does not matter.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ListQuery {
    /// Only sessions in this state: `ready`, `draining`, `deleted`, `expired`, `closed`.
    state: Option<String>,
    /// Only sessions with this server: one that is configured, or was.
    server: Option<String>,
    /// Only sessions of this principal, as lists show it.
    principal: Option<String>,
    /// Only sessions opened by this agent.
    agent: Option<String>,
    /// Where the page begins: the `next` of the one before.
    after: Option<String>,
    /// How many at most; 100 if absent, 1000 at most.
    limit: Option<usize>,
}

/// How a session is to be drained.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct DrainOrder {
    /// How long calls in flight may go on: `500ms`, `5s`, `2m`, `1h`, `0`. Absent: the setting `session.drain_grace`.
    grace: Option<String>,
}

/// Why a session is closed.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct CloseOrder {
    /// For whoever asks later; never a secret. At most 200 characters.
    reason: Option<String>,
}

/// Which session is looked for. It holds a secret, and so has no `Debug`.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct FindOrder {
    /// The session's id: what its client sends as `Mcp-Session-Id`.
    id: String,
}

pub(super) async fn list(
    State(engine): State<Arc<Engine>>,
    Asked(query): Asked<ListQuery>,
) -> Result<Json<SessionsPage>, Problem> {
    let after = query.after.as_deref().map(session_ref).transpose()?.map(behind);
    let limit = query.limit.unwrap_or(PAGE_SESSIONS_DEFAULT).clamp(1, PAGE_SESSIONS_MAX);
    let ListQuery { state, server, principal, agent, .. } = query;
    let filter = SessionsFilter { state, server, principal, agent };
    // One more than asked for tells whether there is another page.
    let found = engine.sessions(&filter, after, limit + 1).await?;
    let note = if found.is_empty() && after.is_none() { engine.remark(&filter).await? } else { None };
    let (sessions, next) = page(found, limit, |view| &view.r#ref);
    Ok(Json(SessionsPage { sessions, next, note }))
}

pub(super) async fn show(
    State(engine): State<Arc<Engine>>,
    Path(text): Path<String>,
) -> Result<Json<SessionView>, Problem> {
    Ok(Json(one(&engine, session_ref(&text)?).await?))
}

/// A session by its id, which travels in the body: addresses are kept in many places.
pub(super) async fn find(
    State(engine): State<Arc<Engine>>,
    Confided(order): Confided<FindOrder>,
) -> Result<Json<SessionView>, Problem> {
    let malformed = || Problem::new(Code::RequestInvalid, "`id` is 1 to 128 characters of visible ASCII");
    let id = SessionId::parse(&order.id).ok_or_else(malformed)?;
    let found = engine.session_of(&id).await.map_err(|error| Problem::unreadable(&error))?;
    found.map(Json).ok_or_else(|| Problem::new(Code::NotFound, "no session has this id"))
}

pub(super) async fn drain(
    State(engine): State<Arc<Engine>>,
    Path(text): Path<String>,
    Order(order): Order<DrainOrder>,
) -> Result<(StatusCode, Json<SessionView>), Problem> {
    let session_ref = session_ref(&text)?;
    let grace = order.grace.as_deref().map(grace).transpose()?;
    one(&engine, session_ref).await?;
    let view = carried_out(async move { Ok(engine.drain(session_ref, grace).await?) }).await?;
    Ok((StatusCode::ACCEPTED, Json(view)))
}

pub(super) async fn close(
    State(engine): State<Arc<Engine>>,
    Path(text): Path<String>,
    Order(order): Order<CloseOrder>,
) -> Result<Json<SessionView>, Problem> {
    let session_ref = session_ref(&text)?;
    let reason = order.reason.unwrap_or_else(|| REASON_DEFAULT.to_owned());
    if reason.chars().count() > REASON_CHARS_MAX || reason.chars().any(char::is_control) {
        let detail = format!("`reason` is one line of at most {REASON_CHARS_MAX} characters");
        return Err(Problem::new(Code::RequestInvalid, detail));
    }
    one(&engine, session_ref).await?;
    let view = carried_out(async move { Ok(engine.close_session(session_ref, &reason).await?) }).await?;
    Ok(Json(view))
}

/// The one session that `session_ref` means.
async fn one(engine: &Engine, session_ref: SessionRef) -> Result<SessionView, Problem> {
    let mut found = engine.session(session_ref).await.map_err(|error| Problem::unreadable(&error))?;
    match found.len() {
        0 => Err(Problem::new(Code::NotFound, format!("no session is called {session_ref}"))),
        1 => Ok(found.swap_remove(0)),
        count => Err(Problem::ambiguous(format!("{count} sessions are called {session_ref}"), &found)),
    }
}

/// Cuts what was found down to a page, and says where the next one begins. A page ends behind a ref; the rare session
/// that shares its ref with the last one of the page stays on it.
fn page<T>(mut found: Vec<T>, limit: usize, ref_of: impl Fn(&T) -> &String) -> (Vec<T>, Option<String>) {
    if found.len() <= limit {
        return (found, None);
    }
    let last = found.get(limit.saturating_sub(1)).map(|view| ref_of(view).clone());
    let end = found.iter().skip(limit).position(|view| Some(ref_of(view)) != last.as_ref());
    found.truncate(limit + end.unwrap_or(1));
    (found, last)
}

/// The last key that has this ref: a page begins behind it. The key itself is not told to anybody.
fn behind(session_ref: SessionRef) -> SessionKey {
    let mut key = [0xff; 32];
    let head = session_ref.as_bytes();
    key[..head.len()].copy_from_slice(head);
    SessionKey::from_bytes(key)
}

const PAGE_SESSIONS_DEFAULT: usize = 100;
// One row more is asked for, to know whether there is a next page; the ledger gives 1000 at most.
const PAGE_SESSIONS_MAX: usize = 999;
const REASON_DEFAULT: &str = "closed by an operator";
const REASON_CHARS_MAX: usize = 200;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_begins_behind_every_session_of_its_ref() {
        let key = SessionKey::from_bytes([7; 32]);
        let after = behind(key.session_ref());
        assert!(after > key && after.session_ref() == key.session_ref());
    }

    #[test]
    fn no_session_falls_between_two_pages() {
        let cut = |refs: &[&str], limit| {
            let found = refs.iter().map(|name| (*name).to_owned()).collect();
            let (page, next) = page(found, limit, |name: &String| name);
            (page.join(" "), next.unwrap_or_default())
        };
        assert_eq!(cut(&[], 2), (String::new(), String::new()));
        assert_eq!(cut(&["a", "b"], 2), ("a b".into(), String::new()));
        assert_eq!(cut(&["a", "b", "c"], 2), ("a b".into(), "b".into()));
        assert_eq!(cut(&["a", "b", "b"], 2), ("a b b".into(), "b".into()), "the next page begins behind both");
    }
}
