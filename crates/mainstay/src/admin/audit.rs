//! The audit trail (I5).

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::problem::Problem;
use super::request::{Asked, session_ref};
use crate::engine::Engine;
use crate::engine::view::{AuditQuery, AuditView};

/// A page of the audit trail, newest first.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct AuditPage {
    entries: Vec<AuditView>,
    /// The `before` of the next page; null on the last one.
    next: Option<u64>,
}

/// Which entries are asked for.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ListQuery {
    /// Only entries before this number: the `next` of the page before.
    before: Option<u64>,
    /// How many at most; 100 if absent, 1000 at most.
    limit: Option<usize>,
    /// Only entries about the session of this ref.
    session: Option<String>,
    /// Only entries of this action.
    action: Option<String>,
}

pub(super) async fn list(
    State(engine): State<Arc<Engine>>,
    Asked(query): Asked<ListQuery>,
) -> Result<Json<AuditPage>, Problem> {
    let limit = query.limit.unwrap_or(PAGE_ENTRIES_DEFAULT).clamp(1, PAGE_ENTRIES_MAX);
    let session = query.session.as_deref().map(session_ref).transpose()?;
    let asked = AuditQuery { before: query.before, limit: limit + 1, session, action: query.action };
    let mut entries = engine.audit(&asked).await?;
    let more = entries.len() > limit;
    entries.truncate(limit);
    let next = entries.last().filter(|_| more).map(|entry| entry.id);
    Ok(Json(AuditPage { entries, next }))
}

const PAGE_ENTRIES_DEFAULT: usize = 100;
// One row more is asked for, to know whether there is a next page; the ledger gives 1000 at most.
const PAGE_ENTRIES_MAX: usize = 999;
