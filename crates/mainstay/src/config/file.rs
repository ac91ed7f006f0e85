//! The spelling of the configuration file: every key, optional, as serde reads and writes it.
//!
//! Nothing here knows a default or a rule; `check` turns a [`File`] into the domain type, `convert` goes back.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use super::period::Period;
use super::tokens::TokenValues;

/// Configuration of the Mainstay gateway.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(rename = "MainstayConfiguration")]
pub(super) struct File {
    /// Where MCP clients connect: `ADDRESS:PORT`. Port 0 takes a free one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listen: Option<Listen>,
    /// The directory of everything durable. A relative one starts at this file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state_dir: Option<PathBuf>,
    /// Where sessions are remembered: "sqlite" or "memory".
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store: Option<String>,
    /// Whether a changed file is put in force by itself, as `mainstay reload` does it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub watch: Option<bool>,
    /// The admin listener.
    pub admin: AdminTable,
    /// How sessions live and end.
    pub session: SessionTable,
    /// Bounds on what clients may take.
    pub limits: LimitsTable,
    /// Who clients are.
    pub auth: AuthTable,
    /// Origins and hosts that may speak to the MCP port.
    pub serve: ServeTable,
    /// The servers, by name.
    pub servers: BTreeMap<String, ServerTable>,
}

/// The admin listener: health, readiness, API.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(super) struct AdminTable {
    /// Where it listens. Port 0 takes a free one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listen: Option<Listen>,
    /// The file with the bearer token. None: `admin.token` in the state directory, made at the first start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_file: Option<PathBuf>,
}

/// How sessions live and end.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(super) struct SessionTable {
    /// Idle time after which a session expires: no call in flight and no open stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_expiry: Option<Period>,
    /// After how long the instance of an unused session is let go, the session kept; "never" allowed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub suspend_after: Option<Period>,
    /// How long an answer may take and still go out as plain JSON; "0" makes every answer a resumable stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answer_json_within: Option<Period>,
    /// How long a drained session's calls in flight may go on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drain_grace: Option<Period>,
    /// How long the tombstone of an ended session is kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tombstone_retention: Option<Period>,
    /// The HTTP status of an id that is not live: "spec" is always 404, "distinct" tells the cases apart.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub terminal_status: Option<TerminalStatus>,
    /// Live sessions of one principal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_per_principal: Option<usize>,
    /// Calls in flight in one session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calls_in_flight_max: Option<usize>,
    /// Streams of one session that are open or can still be resumed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub streams_max: Option<usize>,
}

/// Bounds over all sessions.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(super) struct LimitsTable {
    /// The longest request body, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub body_bytes_max: Option<usize>,
    /// The longest head of a request, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub header_bytes_max: Option<usize>,
    /// Live sessions in all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sessions_max: Option<usize>,
    /// Sessions that one peer (an IPv4 address, an IPv6 /64) may open within a minute, all at once or one after the
    /// other; 0 does not limit them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initialize_per_minute: Option<u32>,
    /// Requests without a session (2026-07-28) that one principal may have in flight.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stateless_requests_per_principal: Option<usize>,
    /// Streams that one principal may listen to without a session (`subscriptions/listen`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listens_per_principal: Option<usize>,
}

/// Who clients are.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(super) struct AuthTable {
    /// How a client proves itself. "none" serves loopback only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<AuthMode>,
    /// Whether every request must name its agent in `X-Agent-Name`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub require_agent: Option<bool>,
    /// Clients' tokens by their holder's name, for mode "token"; `${VAR}` and `${file:PATH}` are resolved at the start.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub tokens: BTreeMap<String, TokenValues>,
}

/// Origins and hosts that may speak to the MCP port, besides loopback ones.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(super) struct ServeTable {
    /// Origins of browsers: `scheme://host[:port]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allowed_origins: Option<Vec<String>>,
    /// Host names, without port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allowed_hosts: Option<Vec<String>>,
}

/// One server: a program (`command`) or an endpoint (`url`).
///
/// `Debug` is not derived: values of `env` and `headers` may be secrets.
#[derive(Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(super) struct ServerTable {
    /// The program of a stdio server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// Its arguments.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// Its environment; `${VAR}` and `${file:PATH}` are resolved when it is started.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Its working directory. A relative one starts at this file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<PathBuf>,
    /// Who shares one running copy of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sharing: Option<Sharing>,
    /// Whether it holds state that must not be let go while its session lives.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stateful: Option<bool>,
    /// The endpoint of an HTTP server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// Headers of every request to it; `${VAR}` and `${file:PATH}` are resolved when they are sent.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, String>,
    /// How MCP is spoken at the `url`: "auto" finds out, "sse" is the old HTTP+SSE, with the `url` of its event stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transport: Option<Transport>,
    /// How long a call waits for a server that is down.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub patience: Option<Period>,
    /// Tools that may be called again when nobody knows whether they ran.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub safe_tools: Vec<String>,
    /// As `suspend_after` of `[session]`, for this server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub suspend_after: Option<Period>,
    /// Whether clients get a listening GET stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listen_stream: Option<ListenStream>,
    /// Which era of the protocol it speaks: "modern" is 2026-07-28, stateless; "legacy" is whatever has sessions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub era: Option<Era>,
    /// Which era of the protocol its endpoint offers: "auto" that of its server, and sessions in any case; "both" that of
    /// 2026-07-28 in any case, too, in conversations with a server that needs sessions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offer: Option<Offer>,
}

impl fmt::Debug for ServerTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerTable").field("command", &self.command).field("url", &self.url).finish_non_exhaustive()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum TerminalStatus {
    Spec,
    Distinct,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum AuthMode {
    None,
    Token,
    #[schemars(skip)]
    Jwt,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum Sharing {
    Session,
    #[schemars(skip)]
    Principal,
    #[schemars(skip)]
    All,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum Transport {
    Auto,
    Streamable,
    Sse,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum ListenStream {
    Auto,
    Always,
    Never,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum Offer {
    Auto,
    Legacy,
    Both,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum Era {
    Auto,
    Legacy,
    Modern,
}

/// An address to listen on: `ADDRESS:PORT` or `localhost:PORT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Listen(
    /// What it says.
    pub SocketAddr,
);

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(port) = text.strip_prefix("localhost:").and_then(|port| port.parse().ok()) {
            return Ok(Self(SocketAddr::from((Ipv4Addr::LOCALHOST, port))));
        }
        text.parse().map(Self).map_err(|_| format!("`{text}` is no address to listen on, such as \"127.0.0.1:7717\""))
    }
}

impl TryFrom<String> for Listen {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Listen> for String {
    fn from(listen: Listen) -> Self {
        listen.0.to_string()
    }
}

impl JsonSchema for Listen {
    fn schema_name() -> Cow<'static, str> {
        "Listen".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "description": "`ADDRESS:PORT`.", "examples": ["127.0.0.1:7717"] })
    }
}

impl File {
    /// This layer over `lower`: what it does not set is taken from there. Servers come from one layer, as a whole.
    #[must_use]
    pub(super) fn over(self, lower: Self) -> Self {
        let (session, limits) = (self.session, self.limits);
        Self {
            listen: self.listen.or(lower.listen),
            state_dir: self.state_dir.or(lower.state_dir),
            store: self.store.or(lower.store),
            watch: self.watch.or(lower.watch),
            admin: AdminTable {
                listen: self.admin.listen.or(lower.admin.listen),
                token_file: self.admin.token_file.or(lower.admin.token_file),
            },
            session: SessionTable {
                idle_expiry: session.idle_expiry.or(lower.session.idle_expiry),
                suspend_after: session.suspend_after.or(lower.session.suspend_after),
                answer_json_within: session.answer_json_within.or(lower.session.answer_json_within),
                drain_grace: session.drain_grace.or(lower.session.drain_grace),
                tombstone_retention: session.tombstone_retention.or(lower.session.tombstone_retention),
                terminal_status: session.terminal_status.or(lower.session.terminal_status),
                max_per_principal: session.max_per_principal.or(lower.session.max_per_principal),
                calls_in_flight_max: session.calls_in_flight_max.or(lower.session.calls_in_flight_max),
                streams_max: session.streams_max.or(lower.session.streams_max),
            },
            limits: LimitsTable {
                body_bytes_max: limits.body_bytes_max.or(lower.limits.body_bytes_max),
                header_bytes_max: limits.header_bytes_max.or(lower.limits.header_bytes_max),
                sessions_max: limits.sessions_max.or(lower.limits.sessions_max),
                initialize_per_minute: limits.initialize_per_minute.or(lower.limits.initialize_per_minute),
                stateless_requests_per_principal: limits
                    .stateless_requests_per_principal
                    .or(lower.limits.stateless_requests_per_principal),
                listens_per_principal: limits.listens_per_principal.or(lower.limits.listens_per_principal),
            },
            auth: AuthTable {
                mode: self.auth.mode.or(lower.auth.mode),
                require_agent: self.auth.require_agent.or(lower.auth.require_agent),
                tokens: if self.auth.tokens.is_empty() { lower.auth.tokens } else { self.auth.tokens },
            },
            serve: ServeTable {
                allowed_origins: self.serve.allowed_origins.or(lower.serve.allowed_origins),
                allowed_hosts: self.serve.allowed_hosts.or(lower.serve.allowed_hosts),
            },
            servers: if self.servers.is_empty() { lower.servers } else { self.servers },
        }
    }
}
