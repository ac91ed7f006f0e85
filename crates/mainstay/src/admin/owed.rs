//! Deletes that are owed to servers: listed, paid, given up.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use http::StatusCode;
use schemars::JsonSchema;
use serde::Serialize;

use super::problem::Problem;
use super::request::{carried_out, number};
use crate::engine::Engine;
use crate::engine::view::OwedView;

/// Deletes that are owed.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct OwedDeletes {
    owed: Vec<OwedView>,
}

pub(super) async fn list(State(engine): State<Arc<Engine>>) -> Result<Json<OwedDeletes>, Problem> {
    let owed = engine.owed().await.map_err(|error| Problem::unreadable(&error))?;
    Ok(Json(OwedDeletes { owed }))
}

pub(super) async fn pay(State(engine): State<Arc<Engine>>, Path(id): Path<String>) -> Result<StatusCode, Problem> {
    let id = number(&id)?;
    carried_out(async move { Ok(engine.pay_owed(id).await?) }).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn give_up(State(engine): State<Arc<Engine>>, Path(id): Path<String>) -> Result<StatusCode, Problem> {
    let id = number(&id)?;
    carried_out(async move { Ok(engine.give_up_owed(id).await?) }).await?;
    Ok(StatusCode::NO_CONTENT)
}
