//! The admin port: health and readiness for anybody, the API for who holds the token.
//!
//! Everything below `/api/v1/` demands the bearer token, also paths that don't exist; errors are problem documents
//! (RFC 9457) with a `code`. It reads the engine and changes nothing.

use std::future::Future;
use std::io;
use std::sync::Arc;

use tokio::net::TcpListener;

pub use problem::Document;
pub use token::Token;

use crate::engine::Engine;

mod problem;
mod routes;
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
