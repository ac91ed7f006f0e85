//! The configuration: what an operator wants, checked as a whole before any port is bound.
//!
//! A [`Config`] comes from a file, the environment and the command line ([`load`]), in this order of growing weight. It
//! is plain data without serde: the spelling of files is `file`'s, that of client files `clients`'. It travels to the
//! workers as a snapshot. Values that may be secret (`env`, `headers`) stay the templates that were written, here
//! and in the snapshot; they are resolved where they are used, and never shown.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mainstay_core::id::ServerName;
use mainstay_core::wire::modern::Era;
use mainstay_upstream::Transport;

pub use changes::{Changes, ServerChange, SettingChange, flattened};
pub use diagnostic::{Diagnostic, Location};
pub use file::Listen as ListenAddress;
pub use load::{Faults, Loaded, Overrides, Single, Source, Surroundings, load};
pub use snapshot::SnapshotError;
pub use tokens::{DIGEST_PREFIX, TokenUnfit, TokenValue};

mod changes;
mod check;
mod clients;
mod convert;
mod diagnostic;
pub mod environment;
mod expand;
mod fault;
mod file;
mod load;
mod nearest;
mod period;
pub mod schema;
mod show;
mod snapshot;
mod survey;
mod tokens;

/// Everything an operator can set, with defaults filled in and checked.
///
/// `Debug` is safe to log: templates hide themselves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Where MCP clients connect. Port 0 takes a free one.
    pub listen: SocketAddr,
    /// Where everything durable lives.
    pub state_dir: PathBuf,
    /// Which ledger is used.
    pub store: StoreKind,
    /// Whether a changed file is put in force by itself.
    pub watch: bool,
    /// The admin listener.
    pub admin: Admin,
    /// How sessions live and end.
    pub session: Session,
    /// Bounds on what clients may take.
    pub limits: Limits,
    /// Who clients are.
    pub auth: Auth,
    /// Which browsers and host names may speak to the MCP port.
    pub serve: Serve,
    /// The servers, by name.
    pub servers: BTreeMap<ServerName, Server>,
}

/// Where sessions are remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreKind {
    /// `ledger.db` in the state directory.
    Sqlite,
    /// Nothing outlives the worker; for trials.
    Memory,
}

/// The admin listener (health, readiness, API).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admin {
    /// Where it listens. Port 0 takes a free one.
    pub listen: SocketAddr,
    /// The file with the bearer token, if it is not `admin.token` in the state directory.
    pub token_file: Option<PathBuf>,
}

/// The life of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    /// Idle time (no call in flight, no open stream) after which a session expires; `None` is never.
    pub idle_expiry: Option<Duration>,
    /// After how long the instance of an unused session is let go, the session kept; `None` is never (S11).
    pub suspend_after: Option<Duration>,
    /// How long an answer may take and still go out as plain JSON; zero makes every answer a stream (R3).
    pub answer_json_within: Duration,
    /// How long a drained session's calls in flight may go on (S8).
    pub drain_grace: Duration,
    /// How long an ended session's tombstone is kept at least; `None` is for ever (S7).
    pub tombstone_retention: Option<Duration>,
    /// How ids that are not live are answered.
    pub terminal_status: TerminalStatus,
    /// Live sessions of one principal.
    pub max_per_principal: usize,
    /// Calls in flight in one session.
    pub calls_in_flight_max: usize,
    /// Streams of one session that are open or can still be resumed.
    pub streams_max: usize,
}

/// The HTTP status of an id that is not live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TerminalStatus {
    /// 404, as the specification wants it.
    Spec,
    /// 409, 410 and 403 tell the cases apart.
    Distinct,
}

/// Bounds over all sessions (S12).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The longest request body.
    pub body_bytes_max: usize,
    /// The longest head of a request (request line and headers).
    pub header_bytes_max: usize,
    /// Live sessions in all.
    pub sessions_max: usize,
    /// Sessions that one peer opens within a minute; 0 is any number.
    pub initialize_per_minute: u32,
    /// Requests without a session that one principal has in flight.
    pub stateless_requests_per_principal: usize,
    /// Streams that one principal listens to without a session.
    pub listens_per_principal: usize,
}

/// Who clients are (I1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Auth {
    /// How a client proves itself.
    pub mode: AuthMode,
    /// Whether every request must name its agent in `X-Agent-Name` (I2).
    pub require_agent: bool,
    /// The tokens of mode `token` by their holder's name; each value of a holder is valid.
    pub tokens: BTreeMap<Box<str>, Vec<Template>>,
}

/// How a client proves itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuthMode {
    /// Not at all; then the MCP port is loopback only.
    None,
    /// By a bearer token of the configuration.
    Token,
}

/// Origin and Host checks of the MCP port (S17). Loopback names are always accepted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Serve {
    /// More origins that browsers may come from, as `scheme://host[:port]`.
    pub allowed_origins: Vec<String>,
    /// More values of `Host` without port.
    pub allowed_hosts: Vec<String>,
}

/// One server that sessions can be opened to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// How it is reached.
    pub reach: Reach,
    /// How long a call waits for a server that is down (U8).
    pub patience: Duration,
    /// Tools that may be called again when nobody knows whether they ran (U5).
    pub safe_tools: Vec<String>,
    /// After how long the instance of an unused session is let go, if not as for all: `Some(None)` is never.
    pub suspend_after: Option<Option<Duration>>,
    /// Whether clients get a listening GET stream (R5).
    pub listen_stream: ListenStream,
    /// Which era of the protocol it speaks, if that is not to be found out (E5).
    pub era: Option<Era>,
    /// Which era of the protocol its endpoint offers (E0).
    pub offer: Offer,
}

/// How a server is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reach {
    /// A program that speaks MCP over its standard input and output.
    Child {
        /// The program.
        command: String,
        /// Its arguments.
        args: Vec<String>,
        /// Its environment, besides the short allow-list (C7).
        env: BTreeMap<String, Template>,
        /// Its working directory, if it is not the gateway's.
        cwd: Option<PathBuf>,
        /// Who shares a child.
        sharing: Sharing,
        /// Whether the child holds state that must not be let go (S11).
        stateful: bool,
    },
    /// A server that speaks HTTP.
    Http {
        /// Its endpoint.
        url: http::Uri,
        /// Which of the two transports over HTTP it speaks.
        transport: Transport,
        /// Headers that every request to it carries; names are lower case.
        headers: BTreeMap<String, Template>,
    },
}

/// Who shares an instance of a server (C10).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// Nobody: each session has its own.
    Session,
}

/// Whether clients get a listening GET stream (R5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListenStream {
    /// If something could ever be sent on it.
    Auto,
    /// Yes.
    Always,
    /// No: GET is answered 405.
    Never,
}

/// Which era of the protocol an endpoint offers (E0).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offer {
    /// What follows from its server.
    Auto,
    /// Sessions only (2024-11-05 to 2025-11-25).
    Legacy,
    /// Sessions, and stateless requests (2026-07-28).
    Both,
}

/// A value as it was written: text with `${VAR}` and `${file:PATH}` in it, or a secret in plain text.
///
/// Neither `Debug` nor `Display` shows it.
#[derive(Clone, PartialEq, Eq)]
pub struct Template(Box<str>);

impl Template {
    /// The template that is written as `text`. Whether it is well formed is checked with the whole configuration.
    pub fn new(text: &str) -> Self {
        Self(text.into())
    }

    /// The text. It may be a secret: for the upstream's parser and the workers' snapshot only.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Template(…)")
    }
}

impl Config {
    /// The configuration without file, environment and flags: no servers, and everything durable in `state_dir`.
    pub fn with_defaults(state_dir: PathBuf) -> Self {
        Self {
            listen: LISTEN_DEFAULT,
            state_dir,
            store: StoreKind::Sqlite,
            watch: false,
            admin: Admin { listen: ADMIN_LISTEN_DEFAULT, token_file: None },
            session: Session::default(),
            limits: Limits::default(),
            auth: Auth { mode: AuthMode::None, require_agent: false, tokens: BTreeMap::new() },
            serve: Serve::default(),
            servers: BTreeMap::new(),
        }
    }

    /// The file that holds the admin token.
    pub fn admin_token_file(&self) -> PathBuf {
        self.admin.token_file.clone().unwrap_or_else(|| self.state_dir.join(ADMIN_TOKEN_FILE))
    }
}

impl Default for Session {
    fn default() -> Self {
        Self {
            idle_expiry: Some(IDLE_EXPIRY_DEFAULT),
            suspend_after: Some(SUSPEND_AFTER_DEFAULT),
            answer_json_within: ANSWER_JSON_WITHIN_DEFAULT,
            drain_grace: DRAIN_GRACE_DEFAULT,
            tombstone_retention: Some(TOMBSTONE_RETENTION_DEFAULT),
            terminal_status: TerminalStatus::Spec,
            max_per_principal: SESSIONS_PER_PRINCIPAL_DEFAULT,
            calls_in_flight_max: CALLS_IN_FLIGHT_DEFAULT,
            streams_max: STREAMS_DEFAULT,
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes_max: BODY_BYTES_DEFAULT,
            header_bytes_max: HEADER_BYTES_DEFAULT,
            sessions_max: SESSIONS_DEFAULT,
            initialize_per_minute: INITIALIZE_PER_MINUTE_DEFAULT,
            stateless_requests_per_principal: STATELESS_REQUESTS_PER_PRINCIPAL_DEFAULT,
            listens_per_principal: LISTENS_PER_PRINCIPAL_DEFAULT,
        }
    }
}

impl Server {
    /// The server reached as `reach`, everything else by default.
    pub fn new(reach: Reach) -> Self {
        Self {
            reach,
            patience: PATIENCE_DEFAULT,
            safe_tools: Vec::new(),
            suspend_after: None,
            listen_stream: ListenStream::Auto,
            era: None,
            offer: Offer::Auto,
        }
    }

    /// Whether it is a child that holds state which must not be let go.
    pub fn is_stateful(&self) -> bool {
        matches!(self.reach, Reach::Child { stateful: true, .. })
    }
}

/// The state directory of who sets none: `/var/lib/mainstay` for root, else `mainstay` in `$XDG_STATE_HOME` or
/// `~/.local/state`. `None` if the environment names no absolute home.
pub fn default_state_dir(root: bool, var: &dyn Fn(&str) -> Option<String>) -> Option<PathBuf> {
    if root {
        return Some(PathBuf::from(STATE_DIR_ROOT));
    }
    let absolute = |name: &str| var(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute("XDG_STATE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".local/state")))?;
    Some(base.join("mainstay"))
}

/// The path relative to `base` unless it is absolute; files name others relative to themselves.
fn anchored(base: &Path, path: &Path) -> PathBuf {
    base.join(path)
}

/// The admin token's file in the state directory.
pub const ADMIN_TOKEN_FILE: &str = "admin.token";

const LISTEN_DEFAULT: SocketAddr = loopback(7717);
const ADMIN_LISTEN_DEFAULT: SocketAddr = loopback(7718);
const STATE_DIR_ROOT: &str = "/var/lib/mainstay";
const SUSPEND_AFTER_DEFAULT: Duration = Duration::from_mins(30);
const IDLE_EXPIRY_DEFAULT: Duration = Duration::from_secs(7 * 24 * 60 * 60);
const ANSWER_JSON_WITHIN_DEFAULT: Duration = Duration::from_millis(20);
const DRAIN_GRACE_DEFAULT: Duration = Duration::from_secs(5);
const TOMBSTONE_RETENTION_DEFAULT: Duration = Duration::from_secs(24 * 60 * 60);
const SESSIONS_PER_PRINCIPAL_DEFAULT: usize = 1000;
const CALLS_IN_FLIGHT_DEFAULT: usize = 256;
const STREAMS_DEFAULT: usize = 256;
const BODY_BYTES_DEFAULT: usize = 16 * 1024 * 1024;
const HEADER_BYTES_DEFAULT: usize = 64 * 1024;
const SESSIONS_DEFAULT: usize = 200_000;
/// A thousand a second: more than a fleet behind one address needs, less than what a flood could.
const INITIALIZE_PER_MINUTE_DEFAULT: u32 = 60_000;
/// Without `auth`, all clients on a machine that name no agent are one principal.
const STATELESS_REQUESTS_PER_PRINCIPAL_DEFAULT: usize = 1000;
const LISTENS_PER_PRINCIPAL_DEFAULT: usize = 1000;
const PATIENCE_DEFAULT: Duration = Duration::from_secs(10);

const fn loopback(port: u16) -> SocketAddr {
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), port)
}
