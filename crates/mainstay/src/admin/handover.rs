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

/// What became of the order.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct Ordered {
    /// The number of the worker that gives way; the next one has a higher number.
    worker: u64,
    /// False if nothing has changed that there would be to put in force.
    begun: bool,
}

pub(super) async fn reload(state: State<Arc<Engine>>) -> Result<(StatusCode, Json<Ordered>), Problem> {
    succeed(state, false).await
}

pub(super) async fn upgrade(state: State<Arc<Engine>>) -> Result<(StatusCode, Json<Ordered>), Problem> {
    succeed(state, true).await
}

async fn succeed(State(engine): State<Arc<Engine>>, upgrade: bool) -> Result<(StatusCode, Json<Ordered>), Problem> {
    let begun = engine.succeed(upgrade).await.map_err(|reason| Problem::new(Code::HandoverRefused, reason))?;
    let status = if begun == Begun::Yes { StatusCode::ACCEPTED } else { StatusCode::OK };
    Ok((status, Json(Ordered { worker: engine.facts.worker_number, begun: begun == Begun::Yes })))
}
