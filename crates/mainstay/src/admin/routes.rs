//! The paths of the admin port: one table, from which the router and the OpenAPI document are made.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use http::HeaderValue;
use http::header::CACHE_CONTROL;
use schemars::{JsonSchema, Schema, SchemaGenerator};

use super::problem::{Code, Document, Problem};
use super::request::BODY_BYTES_MAX;
use super::token::Token;
use super::{audit, gateway, handover, metrics, owed, servers, sessions};
use crate::engine::Engine;
use crate::engine::retire::RetiredView;
use crate::engine::view::sessions::SessionView;
use crate::engine::view::{KeysView, StatusView};
use crate::telemetry;

/// A path with its method: who serves it, and what the document says of it.
pub(super) struct Route {
    /// `get` or `post`.
    pub(super) method: &'static str,
    /// The whole path, parameters in braces.
    pub(super) path: &'static str,
    /// One line.
    pub(super) summary: &'static str,
    /// The schema of the query, if it has one.
    pub(super) query: Option<SchemaOf>,
    /// The schema of the body, if it has one.
    pub(super) body: Option<SchemaOf>,
    /// Whether the body must be there.
    pub(super) body_needed: bool,
    /// What it answers if all goes well.
    pub(super) answer: Answer,
    handler: fn() -> MethodRouter<Arc<Engine>>,
}

/// Makes a schema.
pub(super) type SchemaOf = fn(&mut SchemaGenerator) -> Schema;

/// A successful answer.
pub(super) enum Answer {
    /// A JSON document with this status.
    Json(u16, SchemaOf),
    /// Nothing, with status 204.
    Nothing,
    /// Text of this media type.
    Text(&'static str),
}

/// Every path, the guard before all but health and readiness.
pub(super) fn router(engine: Arc<Engine>, token: Token) -> Router {
    let mut router = Router::new().route(HEALTH, get(async || "ok\n")).route(READINESS, get(gateway::readiness));
    for route in ROUTES {
        router = router.route(route.path, (route.handler)());
    }
    router
        .method_not_allowed_fallback(method_not_allowed)
        .fallback(nothing)
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(middleware::from_fn_with_state(token, guard))
        .with_state(engine)
}

/// Everything is behind the token unless it stands here.
async fn guard(State(token): State<Token>, request: Request, next: Next) -> Response {
    let open = matches!(request.uri().path(), HEALTH | READINESS);
    if !open && !token.admits(request.headers()) {
        let detail = "send `Authorization: Bearer TOKEN` with the token of the state directory's admin.token";
        return Problem::new(Code::Unauthorized, detail).into_response();
    }
    let answered = tokio::time::timeout(ANSWER_WITHIN, next.run(request)).await;
    let mut response = answered.unwrap_or_else(|_| {
        Problem::new(Code::Unavailable, "this takes too long; an order that was given goes on").into_response()
    });
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

async fn nothing() -> Problem {
    Problem::new(Code::NotFound, "the paths are /healthz, /readyz, /metrics and those in /api/v1/openapi.json")
}

async fn method_not_allowed() -> Problem {
    Problem::new(Code::MethodNotAllowed, "what is there is read by GET, orders are given by POST")
}

fn schema<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    generator.subschema_for::<T>()
}

/// The schema itself, for what is not named in the document.
fn inline<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    T::json_schema(generator)
}

fn anything(_: &mut SchemaGenerator) -> Schema {
    schemars::json_schema!({ "type": "object" })
}

/// The schema of errors.
pub(super) const PROBLEM: SchemaOf = schema::<Document>;

const fn read(path: &'static str, summary: &'static str, answer: Answer, handler: Handler) -> Route {
    Route { method: "get", path, summary, query: None, body: None, body_needed: false, answer, handler }
}

const fn order(path: &'static str, summary: &'static str, answer: Answer, handler: Handler) -> Route {
    Route { method: "post", path, summary, query: None, body: None, body_needed: false, answer, handler }
}

impl Route {
    const fn asking(self, query: SchemaOf) -> Self {
        Self { query: Some(query), ..self }
    }

    const fn taking(self, body: SchemaOf) -> Self {
        Self { body: Some(body), ..self }
    }

    const fn demanding(self, body: SchemaOf) -> Self {
        Self { body: Some(body), body_needed: true, ..self }
    }
}

type Handler = fn() -> MethodRouter<Arc<Engine>>;

/// Everything that the admin port serves to who holds the token.
pub(super) const ROUTES: &[Route] = &[
    read("/metrics", "The numbers, for Prometheus", Answer::Text(telemetry::metrics::CONTENT_TYPE), || {
        get(metrics::read)
    }),
    read("/api/v1/openapi.json", "This document", Answer::Json(200, anything), || get(gateway::openapi)),
    read("/api/v1/status", "The gateway as a whole", Answer::Json(200, schema::<StatusView>), || get(gateway::status)),
    read("/api/v1/servers", "The configured servers", Answer::Json(200, schema::<servers::Servers>), || {
        get(servers::list)
    }),
    read("/api/v1/servers/{name}", "One server", Answer::Json(200, schema::<servers::Detail>), || get(servers::show)),
    order(
        "/api/v1/servers/{name}/restart",
        "End a server's processes and lift its quarantine; sessions go on with new ones",
        Answer::Json(200, schema::<servers::Restarted>),
        || post(servers::restart),
    ),
    read(
        "/api/v1/servers/{name}/logs",
        "What a server's processes wrote to standard error",
        Answer::Json(200, schema::<servers::Log>),
        || get(servers::logs),
    )
    .asking(inline::<servers::LogQuery>),
    read(
        "/api/v1/instances",
        "Live connections to servers, as far as they are in memory",
        Answer::Json(200, schema::<gateway::Instances>),
        || get(gateway::instances),
    ),
    read("/api/v1/config", "Every setting as in force", Answer::Json(200, schema::<gateway::Knobs>), || {
        get(gateway::config)
    }),
    read(
        "/api/v1/sessions",
        "A page of sessions, ended ones included as long as they are kept",
        Answer::Json(200, schema::<sessions::SessionsPage>),
        || get(sessions::list),
    )
    .asking(inline::<sessions::ListQuery>),
    read("/api/v1/sessions/{ref}", "One session", Answer::Json(200, schema::<SessionView>), || get(sessions::show)),
    order("/api/v1/sessions/find", "The session that has an id", Answer::Json(200, schema::<SessionView>), || {
        post(sessions::find)
    })
    .demanding(schema::<sessions::FindOrder>),
    order(
        "/api/v1/sessions/{ref}/drain",
        "End a session once its calls in flight are over, or the grace is",
        Answer::Json(202, schema::<SessionView>),
        || post(sessions::drain),
    )
    .taking(schema::<sessions::DrainOrder>),
    order("/api/v1/sessions/{ref}/close", "End a session now", Answer::Json(200, schema::<SessionView>), || {
        post(sessions::close)
    })
    .taking(schema::<sessions::CloseOrder>),
    read("/api/v1/owed", "Deletes that are owed to servers", Answer::Json(200, schema::<owed::OwedDeletes>), || {
        get(owed::list)
    }),
    order("/api/v1/owed/{id}/pay", "Try to pay an owed delete now", Answer::Nothing, || post(owed::pay)),
    order("/api/v1/owed/{id}/give-up", "Leave the server's session to expire there", Answer::Nothing, || {
        post(owed::give_up)
    }),
    read(
        "/api/v1/audit",
        "A page of the audit trail, newest first",
        Answer::Json(200, schema::<audit::AuditPage>),
        || get(audit::list),
    )
    .asking(inline::<audit::ListQuery>),
    order(
        "/api/v1/reload",
        "Put the changed configuration in force",
        Answer::Json(202, schema::<handover::Ordered>),
        || post(handover::reload),
    ),
    order(
        "/api/v1/reload/rehearse",
        "Say what a reload would do; nothing changes",
        Answer::Json(200, schema::<handover::Rehearsed>),
        || post(handover::rehearse),
    ),
    order(
        "/api/v1/upgrade",
        "Go on with the program that is installed now",
        Answer::Json(202, schema::<handover::Ordered>),
        || post(handover::upgrade),
    ),
    order(
        "/api/v1/retire",
        "Close every session, delete the servers' sessions, and end the gateway for good",
        Answer::Json(200, schema::<RetiredView>),
        || post(gateway::retire),
    ),
    order(
        "/api/v1/keys/rotate",
        "Sign and seal with a new key from now on; no session ends",
        Answer::Json(200, schema::<KeysView>),
        || post(gateway::rotate_keys),
    ),
];

const HEALTH: &str = "/healthz";
const READINESS: &str = "/readyz";
/// How long a client waits at most. What an order began goes on.
const ANSWER_WITHIN: Duration = Duration::from_mins(1);

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn o1_each_path_stands_in_the_table_once_and_none_of_the_open_ones_does() {
        let paths: BTreeSet<_> = ROUTES.iter().map(|route| (route.path, route.method)).collect();
        assert_eq!(paths.len(), ROUTES.len());
        assert!(ROUTES.iter().all(|route| !matches!(route.path, HEALTH | READINESS)));
        assert!(ROUTES.iter().all(|route| route.path == "/metrics" || route.path.starts_with("/api/v1/")));
    }
}
