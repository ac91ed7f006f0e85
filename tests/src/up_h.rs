//! UP-H: a streamable HTTP MCP server (2025-11-25, 2025-06-18, 2025-03-26) that misbehaves exactly as it is told.
//!
//! It is written on HTTP and JSON alone: a kit would be too well-behaved. Two ports: `/mcp` on the first is the server, the
//! second takes orders (the table of routes is in `control.rs`) and shows the journal of every request. A control
//! request is answered when its order is in force.

mod control;
mod dialect;
mod events;
mod gap;
mod journal;
mod legacy;
mod mcp;
mod port;
mod post;
mod sessions;

pub use events::EventLog;

use crate::server::{World, WorldSettings};
use bytes::Bytes;
use dialect::Dialect;
use gap::Gap;
use http_body_util::combinators::BoxBody;
use journal::Journal;
use legacy::First;
use port::Port;
use serde_json::json;
use sessions::Sessions;
use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How UP-H is started.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// The port of `/mcp`; 0 takes any.
    pub port: u16,
    /// The port of the orders; 0 takes any.
    pub control: u16,
    /// Whether it speaks HTTP+SSE, as UP-L, instead of streamable HTTP.
    pub legacy: bool,
    /// What the tools need.
    pub world: WorldSettings,
}

type Body = BoxBody<Bytes, std::io::Error>;
type Response = http::Response<Body>;

/// The connection is to be cut without another byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cut;

impl std::fmt::Display for Cut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("cut as ordered")
    }
}

impl std::error::Error for Cut {}

/// How requests are answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// As one JSON document, unless something comes before the answer.
    Json,
    /// As an SSE stream without event ids.
    Sse,
    /// As an SSE stream that is primed, numbered and resumable.
    SseWithIds,
}

/// What a second listening stream does to the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SecondStream {
    /// The first one ends.
    TakesOver,
    /// The second one is refused with 409, as common servers do.
    Conflicts,
}

/// All orders in force.
#[derive(Debug)]
struct Orders {
    mode: Mode,
    retry_ms: u64,
    issue_ids: bool,
    dialect: Dialect,
    get_status: u16,
    /// How UP-L answers a POST to its event stream.
    post_status: u16,
    /// How UP-L's event streams begin.
    first: First,
    second_stream: SecondStream,
    delete_status: u16,
    forget_after_initialized: u64,
    bearer: Option<String>,
    gaps: Vec<Gap>,
}

impl Default for Orders {
    fn default() -> Orders {
        Orders {
            mode: Mode::Json,
            retry_ms: 100,
            issue_ids: true,
            dialect: Dialect::default(),
            get_status: 200,
            post_status: 405,
            first: First::default(),
            second_stream: SecondStream::TakesOver,
            delete_status: 200,
            forget_after_initialized: 0,
            bearer: None,
            gaps: Vec::new(),
        }
    }
}

/// One running UP-H.
#[derive(Debug)]
struct UpH {
    legacy: bool,
    world: Arc<World>,
    sessions: Sessions,
    journal: Journal,
    orders: Mutex<Orders>,
    port: Port,
}

impl UpH {
    fn orders(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Serves until the process is ended. Prints one line `{"port":N,"control":M}` to standard output when both ports answer.
///
/// # Errors
/// If a port cannot be bound, or the line cannot be printed.
pub async fn run(settings: Settings) -> std::io::Result<()> {
    let mcp = port::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, settings.port))).await?;
    let control = port::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, settings.control))).await?;
    let ports = json!({"port": mcp.local_addr()?.port(), "control": control.local_addr()?.port()});
    let (port, commands) = Port::new(mcp.local_addr()?);
    let up = Arc::new(UpH {
        legacy: settings.legacy,
        world: World::new(settings.world),
        sessions: Sessions::default(),
        journal: Journal::default(),
        orders: Mutex::default(),
        port,
    });
    let serving = tokio::spawn(port::serve(Arc::clone(&up), mcp, commands));
    let mut stdout = std::io::stdout();
    writeln!(stdout, "{ports}")?;
    stdout.flush()?;
    tokio::select! {
        result = control::serve(up, control) => result,
        ended = serving => ended.map_err(std::io::Error::other),
    }
}
