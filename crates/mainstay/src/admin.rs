//! The admin port: health and readiness for anybody, everything else for who holds the token.
//!
//! The API is below `/api/v1/`, the numbers at `/metrics`. All paths but two demand the bearer token, also those that
//! don't exist. Errors are problem documents (RFC 9457) with a `code`. What there is stands in one table
//! ([`routes`](self)), from which the router and the OpenAPI document are made. It asks the engine and decides nothing.

use std::future::Future;
use std::io;
use std::sync::Arc;

use tokio::net::TcpListener;

pub use openapi::document as openapi;
pub use problem::Document;
pub use token::Token;

use crate::engine::Engine;

mod audit;
mod gateway;
mod handover;
mod metrics;
mod openapi;
mod owed;
mod problem;
mod request;
mod routes;
mod servers;
mod sessions;
mod token;

/// Serves the admin port until `shutdown` resolves; answers that have begun are finished.
///
/// # Errors
/// If the listener fails for good.
pub async fn serve(
    listener: TcpListener,
    engine: Arc<Engine>,
    token: Token,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let router = routes::router(engine, token);
    axum::serve(listener, router).with_graceful_shutdown(shutdown).await
}
