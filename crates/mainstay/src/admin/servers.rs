//! Servers: listed, shown, restarted, and what their children write.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use mainstay_core::code;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::problem::{Code, Problem};
use super::request::{Asked, carried_out};
use crate::engine::servers::log::{Cursor, LINES_DEFAULT, LINES_MAX, LogView, Part};
use crate::engine::servers::{RestartView, ServerDetail, ServerSummary};
use crate::engine::{Engine, Refused};

/// The configured servers.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct Servers {
    servers: Vec<ServerSummary>,
}

/// Everything known of one.
pub(super) type Detail = ServerDetail;
/// What a restart has done.
pub(super) type Restarted = RestartView;
/// A part of a log.
pub(super) type Log = LogView;

/// Which part of a log is asked for.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct LogQuery {
    /// The last lines, so many; 100 if absent, 10,000 at most. Means nothing with `after`.
    lines: Option<usize>,
    /// What comes behind this place: the `next` of an earlier answer.
    after: Option<String>,
}

pub(super) async fn list(State(engine): State<Arc<Engine>>) -> Json<Servers> {
    Json(Servers { servers: engine.server_summaries().await })
}

pub(super) async fn show(
    State(engine): State<Arc<Engine>>,
    Path(name): Path<String>,
) -> Result<Json<ServerDetail>, Problem> {
    Ok(Json(engine.server_detail(&name).await.map_err(told)?))
}

pub(super) async fn restart(
    State(engine): State<Arc<Engine>>,
    Path(name): Path<String>,
) -> Result<Json<RestartView>, Problem> {
    carried_out(async move { Ok(Json(engine.restart_server(&name).await.map_err(told)?)) }).await
}

pub(super) async fn logs(
    State(engine): State<Arc<Engine>>,
    Path(name): Path<String>,
    Asked(query): Asked<LogQuery>,
) -> Result<Json<LogView>, Problem> {
    let malformed = || Problem::new(Code::RequestInvalid, "`after` is the `next` of an earlier answer");
    let part = match &query.after {
        Some(after) => Part::After(Cursor::parse(after).ok_or_else(malformed)?),
        None => Part::Last(query.lines.unwrap_or(LINES_DEFAULT).min(LINES_MAX)),
    };
    Ok(Json(engine.server_log(&name, part).await.map_err(told)?))
}

/// A name in a path that is nobody's is a path that leads nowhere.
fn told(refused: Refused) -> Problem {
    if refused.code == code::Code::ServerUnknown {
        return Problem::new(Code::NotFound, refused.text);
    }
    refused.into()
}
