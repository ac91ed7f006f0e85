//! The client's side: streamable HTTP on the MCP listener (2025-03-26, 2025-06-18, 2025-11-25), and HTTP+SSE
//! (2024-11-05).
//!
//! `serve` reads requests and writes replies. What a request means is the engine's; which status a refusal has is
//! `reply`'s alone.

mod connection;
mod conversation;
pub mod guard;
pub mod legacy;
pub mod mcp;
mod modern;
pub mod rate;
pub mod reply;
mod turn;

use std::convert::Infallible;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use mainstay_core::code::{Code, TerminalStatus};
use mainstay_keeper::client::Connection as Passed;
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::auth::Auth;
use crate::engine::tally::Tally;
use crate::engine::{Engine, Refused};
use crate::runtime::spawn;
use crate::serve::connection::Wire;
use crate::serve::guard::Guard;
use crate::serve::legacy::Lobby;
use crate::serve::rate::Rate;
use crate::serve::reply::Answer;

/// What the MCP listener is told.
pub struct Front {
    /// The engine.
    pub engine: Arc<Engine>,
    /// Which hosts and origins may speak to us.
    pub guard: Guard,
    /// How clients prove who they are.
    pub auth: Auth,
    /// How often one peer may open sessions.
    pub rate: Rate,
    /// How refusals are told.
    pub terminal: TerminalStatus,
    /// The largest body, in bytes.
    pub body_bytes_max: usize,
    /// The largest head of a request, in bytes.
    pub header_bytes_max: usize,
    /// Whether a request must name its agent (I2).
    pub require_agent: bool,
    /// The open event streams of clients of 2024-11-05.
    pub lobby: Arc<Lobby>,
    /// Requests that have no response yet.
    pub exchanges: Tally,
    /// Connections of which it is not settled what a stop means for them.
    pub undecided: Tally,
    /// Connections.
    pub open: Tally,
}

impl Front {
    /// Serves connections of `listener` until the engine stops, and those that the worker before has passed on. Open
    /// connections then finish what they do, or go to the next worker.
    pub fn accept(self: Arc<Self>, listener: TcpListener, passed: Vec<Passed>) -> impl Future<Output = ()> + Send {
        // While it runs another connection may come, of which nothing is settled either.
        let undecided = self.undecided.enter();
        async move {
            self.accept_until_stopped(listener, passed).await;
            drop(undecided);
        }
    }

    async fn accept_until_stopped(self: Arc<Self>, listener: TcpListener, passed: Vec<Passed>) {
        let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        for passed in passed {
            match Wire::taken_over(passed) {
                Ok(wire) => self.attend(wire, Arc::clone(&places).try_acquire_owned().ok()),
                Err(error) => tracing::warn!(error = %error, "a connection could not be taken over"),
            }
        }
        loop {
            let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = self.engine.stopped() => return,
            };
            match accepted {
                Ok((stream, _peer)) => self.attend(Wire::new(stream), Some(place)),
                Err(error) => {
                    tracing::warn!(error = %error, "a connection could not be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn attend(self: &Arc<Self>, wire: Wire, place: Option<OwnedSemaphorePermit>) {
        let front = Arc::clone(self);
        // Counted from here on, not only once the task runs: a handover may look at the counts before that.
        let (open, undecided) = (self.open.enter(), self.undecided.enter());
        spawn(async move {
            connection::serve(&front, wire, undecided).await;
            drop((open, place));
        });
    }

    /// Waits until nothing is left that only this worker could answer but calls on HTTP servers, for `patience` at most:
    /// every idle connection has gone over, and every other request has its answer or a stream to come back to.
    pub async fn settle(&self, patience: Duration) -> bool {
        let settled = || self.undecided.count() == 0 && self.exchanges.count() <= self.engine.outstaying();
        self.engine.until(patience, settled).await
    }

    /// Waits until every connection is closed, for `patience` at most.
    pub async fn finish(&self, patience: Duration) -> bool {
        self.engine.until(patience, || self.open.count() == 0).await
    }
}

/// What answers a request. A session's end is begun at once: its client may hang up in the same moment, and what it asked
/// for would be dropped with the connection before it is looked at (S6).
fn answer(front: &Arc<Front>, peer: IpAddr, request: http::Request<Incoming>) -> Responding {
    let (exchange, ends) = (front.exchanges.enter(), *request.method() == http::Method::DELETE);
    let (front, terminal) = (Arc::clone(front), front.terminal);
    let routed = async move {
        let response = route(front, peer, request).await;
        drop(exchange);
        response
    };
    if !ends {
        return Box::pin(async move { Ok(routed.await) });
    }
    let ending = spawn(routed);
    Box::pin(async move {
        let failed = |_| Refused::new(Code::Internal, "the ending failed in the gateway");
        Ok(ending.await.map_err(failed).unwrap_or_else(|refused| reply::unaddressed(&refused, terminal)))
    })
}

async fn route(front: Arc<Front>, peer: IpAddr, request: http::Request<Incoming>) -> http::Response<Answer> {
    match request.uri().path() {
        "/healthz" => reply::health(true),
        "/readyz" => reply::health(front.engine.is_ready()),
        path => match path.strip_prefix("/mcp/").map(str::to_owned) {
            Some(path) => match path.strip_suffix("/sse") {
                Some(server) => Box::pin(legacy::serve(&front, peer, server, request)).await,
                None => mcp::serve(&front, peer, &path, request).await,
            },
            None => Box::pin(mcp::nowhere(&front, request.headers())).await,
        },
    }
}

/// A response on its way.
type Responding = Pin<Box<dyn Future<Output = Result<http::Response<Answer>, Infallible>> + Send>>;

/// The most connections at a time; more wait in the listener's backlog.
const CONNECTIONS_MAX: usize = 100_000;
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// The name under which the keeper holds the clients' listener.
pub const LISTENER: &str = "mcp";
