//! The client's side: streamable HTTP on the MCP listener (2025-03-26, 2025-06-18, 2025-11-25).
//!
//! `serve` reads requests and writes replies. What a request means is the engine's; which status a refusal has is
//! `reply`'s alone.

pub mod guard;
pub mod mcp;
pub mod reply;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use mainstay_core::code::TerminalStatus;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use crate::auth::Auth;
use crate::engine::Engine;
use crate::runtime::spawn;
use crate::serve::guard::Guard;
use crate::serve::reply::Answer;

/// What the MCP listener is told.
pub struct Front {
    /// The engine.
    pub engine: Arc<Engine>,
    /// Which hosts and origins may speak to us.
    pub guard: Guard,
    /// How clients prove who they are.
    pub auth: Auth,
    /// How refusals are told.
    pub terminal: TerminalStatus,
    /// The largest body, in bytes.
    pub body_bytes_max: usize,
    /// The largest head of a request, in bytes.
    pub header_bytes_max: usize,
    /// Whether a request must name its agent (I2).
    pub require_agent: bool,
}

/// Serves connections of `listener` until the engine stops. Open connections then finish what they do.
pub async fn accept(front: Arc<Front>, listener: TcpListener) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = front.engine.stopped() => return,
        };
        match accepted {
            Ok((stream, _peer)) => {
                let front = Arc::clone(&front);
                spawn(async move {
                    connection(front, stream).await;
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(error = %error, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn connection(front: Arc<Front>, stream: TcpStream) {
    // Small answers must not wait for an acknowledgement; a socket that refuses the option still works.
    let _ = stream.set_nodelay(true);
    let serving = Arc::clone(&front);
    let service = service_fn(move |request: http::Request<Incoming>| {
        let front = Arc::clone(&serving);
        async move { Ok::<_, Infallible>(route(front, request).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_READ_MAX)
        .max_buf_size(front.header_bytes_max.max(HEADER_BYTES_MIN))
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    tokio::select! {
        ended = connection.as_mut() => {
            if let Err(error) = ended {
                tracing::debug!(error = %error, "connection ended");
            }
        }
        () = front.engine.stopped() => {
            connection.as_mut().graceful_shutdown();
            let _ = connection.await;
        }
    }
}

async fn route(front: Arc<Front>, request: http::Request<Incoming>) -> http::Response<Answer> {
    match request.uri().path() {
        "/healthz" => reply::health(true),
        "/readyz" => reply::health(front.engine.is_ready()),
        path => match path.strip_prefix("/mcp/").map(str::to_owned) {
            Some(server) => mcp::serve(&front, &server, request).await,
            None => mcp::nowhere(&front, request.headers()).await,
        },
    }
}

/// The most connections at a time; more wait in the listener's backlog.
const CONNECTIONS_MAX: usize = 100_000;
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// How long a client may take to send the head of a request.
const HEADER_READ_MAX: Duration = Duration::from_mins(5);
/// The smallest buffer that hyper takes.
const HEADER_BYTES_MIN: usize = 8192;
