//! The gateway as a whole: status, servers, instances, settings, keys.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use super::problem::{Code, Problem};
use super::request::carried_out;
use crate::engine::Engine;
use crate::engine::retire::RetiredView;
use crate::engine::view::{InstanceView, KeysView, KnobView, StatusView};

/// Live connections to servers.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct Instances {
    instances: Vec<InstanceView>,
}

/// The settings in force.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct Knobs {
    knobs: Vec<KnobView>,
}

pub(super) async fn readiness(State(engine): State<Arc<Engine>>) -> Result<&'static str, Problem> {
    if engine.is_ready() { Ok("ready\n") } else { Err(Problem::new(Code::NotReady, "this worker is draining")) }
}

pub(super) async fn status(State(engine): State<Arc<Engine>>) -> Json<StatusView> {
    Json(engine.status().await)
}

pub(super) async fn instances(State(engine): State<Arc<Engine>>) -> Json<Instances> {
    Json(Instances { instances: engine.instances() })
}

pub(super) async fn config(State(engine): State<Arc<Engine>>) -> Json<Knobs> {
    Json(Knobs { knobs: engine.knobs().to_vec() })
}

pub(super) async fn openapi() -> Json<Value> {
    Json(super::openapi::document())
}

pub(super) async fn rotate_keys(State(engine): State<Arc<Engine>>) -> Result<Json<KeysView>, Problem> {
    carried_out(async move { Ok(Json(engine.rotate_keys().await?)) }).await
}

pub(super) async fn retire(State(engine): State<Arc<Engine>>) -> Result<Json<RetiredView>, Problem> {
    carried_out(async move { Ok(Json(engine.retire().await)) }).await
}
