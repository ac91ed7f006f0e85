//! Reload and upgrade.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use schemars::JsonSchema;
use serde::Serialize;

use super::problem::{Code, Problem};
use crate::engine::Engine;
use crate::engine::handover::Begun;
use crate::engine::handover::changes::ChangesView;

/// What became of the order.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct Ordered {
    /// The number of the worker that gives way; the next one has a higher number.
    worker: u64,
    /// False if nothing has changed that there would be to put in force.
    begun: bool,
    /// What changes; null if nothing does, or if the settings of another program are not understood.
    changes: Option<ChangesView>,
}

/// What a reload would do.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct Rehearsed {
    /// What would change; null if nothing would.
    changes: Option<ChangesView>,
}

pub(super) async fn reload(state: State<Arc<Engine>>) -> Result<(StatusCode, Json<Ordered>), Problem> {
    succeed(state, false).await
}

pub(super) async fn upgrade(state: State<Arc<Engine>>) -> Result<(StatusCode, Json<Ordered>), Problem> {
    succeed(state, true).await
}

pub(super) async fn rehearse(State(engine): State<Arc<Engine>>) -> Result<Json<Rehearsed>, Problem> {
    let changes = match engine.rehearse().await.map_err(refused)? {
        Begun::Yes(changes) => changes,
        Begun::Unchanged => None,
    };
    Ok(Json(Rehearsed { changes }))
}

async fn succeed(State(engine): State<Arc<Engine>>, upgrade: bool) -> Result<(StatusCode, Json<Ordered>), Problem> {
    let worker = engine.facts.worker_number;
    Ok(match engine.succeed(upgrade).await.map_err(refused)? {
        Begun::Yes(changes) => (StatusCode::ACCEPTED, Json(Ordered { worker, begun: true, changes })),
        Begun::Unchanged => (StatusCode::OK, Json(Ordered { worker, begun: false, changes: None })),
    })
}

fn refused(reason: String) -> Problem {
    Problem::new(Code::HandoverRefused, reason)
}
