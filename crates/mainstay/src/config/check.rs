//! The rules of the configuration: from a [`File`] of options to a [`Config`] that holds.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use mainstay_core::id::ServerName;
use mainstay_core::wire::modern::Era;
use mainstay_upstream::Transport;

use super::file::{self, File, Listen, ServerTable};
use super::period::Period;
use super::{
    Admin, Config, Limits, ListenStream, Offer, Reach, Serve, Server, Session, Sharing, StoreKind, Template,
    TerminalStatus,
};

mod auth;

/// One broken rule and the key that it is about.
#[derive(Debug)]
pub(super) struct Fault {
    pub path: Vec<String>,
    pub message: String,
    pub hint: Option<String>,
}

impl Fault {
    pub(super) fn new(path: &[&str], message: impl Into<String>, hint: Option<&str>) -> Self {
        let path = path.iter().map(|name| (*name).to_owned()).collect();
        Self { path, message: message.into(), hint: hint.map(str::to_owned) }
    }
}

/// The configuration that `file` and the defaults make.
///
/// # Errors
/// Every broken rule.
pub(super) fn config(file: File, default_dir: &dyn Fn() -> Option<PathBuf>) -> Result<Config, Vec<Fault>> {
    let mut faults = Faults(Vec::new());
    let Some(state_dir) = file.state_dir.clone().or_else(default_dir) else {
        let message = "no state directory: neither `state_dir` nor an absolute HOME is set";
        faults.add(&["state_dir"], message, "set `state_dir`, `--state-dir` or MAINSTAY_STATE_DIR");
        return Err(faults.0);
    };
    let mut config = Config::with_defaults(state_dir);
    config.listen = file.listen.map_or(config.listen, |Listen(address)| address);
    config.store = store(file.store.as_deref(), &mut faults);
    config.watch = file.watch.unwrap_or(config.watch);
    config.admin = Admin {
        listen: file.admin.listen.map_or(config.admin.listen, |Listen(address)| address),
        token_file: file.admin.token_file,
    };
    config.session = session(&file.session, &mut faults);
    config.limits = limits(&file.limits, &mut faults);
    config.auth = auth::auth(&file.auth, config.listen, &mut faults);
    if config.listen == config.admin.listen && config.listen.port() != 0 {
        let message = format!("`listen` and `admin.listen` are both {}", config.listen);
        faults.add(&["admin", "listen"], &message, "give the admin port a number of its own");
    }
    config.serve = serve(file.serve, &mut faults);
    for (name, table) in file.servers {
        let built = server(&name, table, &mut faults);
        config.servers.extend(built);
    }
    itself(&config, &mut faults);
    if faults.0.is_empty() { Ok(config) } else { Err(faults.0) }
}

/// A server that is this gateway would send every call round in circles: that happens to who starts it with the file
/// that the client reads after it was changed to connect here.
fn itself(config: &Config, faults: &mut Faults) {
    for (name, server) in &config.servers {
        let Reach::Http { url, .. } = &server.reach else { continue };
        let port = url.port_u16().unwrap_or(if url.scheme_str() == Some("https") { 443 } else { 80 });
        let path = url.path().trim_end_matches('/');
        let served = path == "/mcp" || path.starts_with("/mcp/");
        if port == config.listen.port() && served && url.host().is_some_and(|host| is_own(config, host)) {
            let message = format!("server `{name}` is this gateway itself");
            let hint =
                "give the server's own command or url, as it was before the client was told to connect to Mainstay";
            faults.add(&["servers", name.as_str(), "url"], &message, hint);
        }
    }
}

/// Whether the gateway listens at this host, as far as its configuration tells.
fn is_own(config: &Config, host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']').to_ascii_lowercase();
    let named = host == "localhost" || host.ends_with(".localhost") || config.serve.allowed_hosts.contains(&host);
    named
        || host
            .parse::<std::net::IpAddr>()
            .is_ok_and(|address| address.is_loopback() || address.is_unspecified() || address == config.listen.ip())
}

struct Faults(Vec<Fault>);

impl Faults {
    fn add(&mut self, path: &[&str], message: &str, hint: &str) {
        self.0.push(Fault::new(path, message, (!hint.is_empty()).then_some(hint)));
    }
}

fn store(written: Option<&str>, faults: &mut Faults) -> StoreKind {
    match written {
        None | Some("sqlite") => StoreKind::Sqlite,
        Some("memory") => StoreKind::Memory,
        // The URL may hold a password: it is not repeated.
        Some(url) if url.starts_with("postgres://") || url.starts_with("postgresql://") => {
            faults.add(&["store"], "a PostgreSQL store is not in this version", "use \"sqlite\"");
            StoreKind::Sqlite
        }
        Some(_) => {
            faults.add(&["store"], "unknown store", "use \"sqlite\" or \"memory\"");
            StoreKind::Sqlite
        }
    }
}

fn session(table: &file::SessionTable, faults: &mut Faults) -> Session {
    let default = Session::default();
    let mut finite = |name: &str, written: Option<Period>, default: Duration| match written {
        None => default,
        Some(Period::Of(duration)) => duration,
        Some(Period::Never) => {
            faults.add(&["session", name], &format!("`{name}` can't be \"never\""), "give a duration such as \"5s\"");
            default
        }
    };
    let answer_json_within = finite("answer_json_within", table.answer_json_within, default.answer_json_within);
    let drain_grace = finite("drain_grace", table.drain_grace, default.drain_grace);
    let idle_expiry = table.idle_expiry.map_or(default.idle_expiry, Period::finite);
    if idle_expiry.is_some_and(|expiry| expiry < IDLE_EXPIRY_MIN) {
        let hint = "the shortest is \"1s\"; for no expiry write \"never\"";
        faults.add(&["session", "idle_expiry"], "`idle_expiry` is too short for any session", hint);
    }
    let count = |name: &str, written: Option<usize>, default: usize, faults: &mut Faults| {
        at_least_one(&["session", name], written, default, faults)
    };
    let calls_in_flight_max =
        count("calls_in_flight_max", table.calls_in_flight_max, default.calls_in_flight_max, faults);
    let streams_max = count("streams_max", table.streams_max, default.streams_max, faults);
    if streams_max < calls_in_flight_max {
        let hint = "raise it, or lower `calls_in_flight_max`";
        faults.add(
            &["session", "streams_max"],
            "`streams_max` is below `calls_in_flight_max`: each call may need one",
            hint,
        );
    }
    Session {
        idle_expiry,
        suspend_after: table.suspend_after.map_or(default.suspend_after, Period::finite),
        answer_json_within,
        drain_grace,
        tombstone_retention: table.tombstone_retention.map_or(default.tombstone_retention, Period::finite),
        terminal_status: match table.terminal_status {
            None | Some(file::TerminalStatus::Spec) => TerminalStatus::Spec,
            Some(file::TerminalStatus::Distinct) => TerminalStatus::Distinct,
        },
        max_per_principal: count("max_per_principal", table.max_per_principal, default.max_per_principal, faults),
        calls_in_flight_max,
        streams_max,
    }
}

fn at_least_one(path: &[&str], written: Option<usize>, default: usize, faults: &mut Faults) -> usize {
    let count = written.unwrap_or(default);
    if count == 0 {
        faults.add(path, "0 would let nothing through", &format!("the default is {default}"));
    }
    count
}

fn limits(table: &file::LimitsTable, faults: &mut Faults) -> Limits {
    let default = Limits::default();
    let initialize_per_minute = table.initialize_per_minute.unwrap_or(default.initialize_per_minute);
    if initialize_per_minute > INITIALIZE_PER_MINUTE_MAX {
        let message = format!("{initialize_per_minute} is out of range");
        let hint = format!("at most {INITIALIZE_PER_MINUTE_MAX}; 0 does not limit them");
        faults.add(&["limits", "initialize_per_minute"], &message, &hint);
    }
    let mut bounded = |name: &str, written: Option<usize>, default: usize, range: (usize, usize)| {
        let value = written.unwrap_or(default);
        if value < range.0 || value > range.1 {
            let message = format!("{value} is out of range");
            let hint = format!("from {} to {}; the default is {default}", range.0, range.1);
            faults.add(&["limits", name], &message, &hint);
        }
        value
    };
    Limits {
        body_bytes_max: bounded("body_bytes_max", table.body_bytes_max, default.body_bytes_max, BODY_BYTES_RANGE),
        header_bytes_max: bounded(
            "header_bytes_max",
            table.header_bytes_max,
            default.header_bytes_max,
            HEADER_BYTES_RANGE,
        ),
        sessions_max: bounded("sessions_max", table.sessions_max, default.sessions_max, SESSIONS_RANGE),
        initialize_per_minute,
        stateless_requests_per_principal: bounded(
            "stateless_requests_per_principal",
            table.stateless_requests_per_principal,
            default.stateless_requests_per_principal,
            PER_PRINCIPAL_RANGE,
        ),
        listens_per_principal: bounded(
            "listens_per_principal",
            table.listens_per_principal,
            default.listens_per_principal,
            PER_PRINCIPAL_RANGE,
        ),
    }
}

fn serve(table: file::ServeTable, faults: &mut Faults) -> Serve {
    let mut allowed_origins = table.allowed_origins.unwrap_or_default();
    for origin in &mut allowed_origins {
        *origin = origin.trim_end_matches('/').to_ascii_lowercase();
        let whole = origin.parse::<http::Uri>().ok();
        let bare = |uri: &http::Uri| uri.scheme().is_some() && uri.host().is_some() && uri.path() == "/";
        if !whole.as_ref().is_some_and(bare) {
            let message = format!("`{origin}` is no origin");
            faults.add(&["serve", "allowed_origins"], &message, "write `scheme://host` or `scheme://host:port`");
        }
    }
    let mut allowed_hosts = table.allowed_hosts.unwrap_or_default();
    for host in &mut allowed_hosts {
        *host = host.to_ascii_lowercase();
        let authority = host.parse::<http::uri::Authority>().ok();
        if authority.is_none_or(|authority| authority.port().is_some() || authority.as_str().contains('@')) {
            let message = format!("`{host}` is no host name");
            faults.add(&["serve", "allowed_hosts"], &message, "write the name without scheme and port");
        }
    }
    Serve { allowed_origins, allowed_hosts }
}

fn server(name: &str, table: ServerTable, faults: &mut Faults) -> Option<(ServerName, Server)> {
    let parsed = ServerName::parse(name);
    if parsed.is_none() {
        let hint = "1 to 64 letters, digits, `_`, `.` and `-`, not beginning with `.` or `-`";
        faults.add(&["servers", name], &format!("`{name}` is no name for a server"), hint);
    }
    let mut server = Server::new(reach(name, &table, faults)?);
    match table.patience {
        None => {}
        Some(Period::Of(patience)) if patience <= PATIENCE_MAX => server.patience = patience,
        Some(_) => {
            let hint = "the longest is \"50s\": real clients give up at 60";
            faults.add(&["servers", name, "patience"], "`patience` is too long", hint);
        }
    }
    server.safe_tools = table.safe_tools;
    server.suspend_after = table.suspend_after.map(Period::finite);
    server.listen_stream = match table.listen_stream {
        None | Some(file::ListenStream::Auto) => ListenStream::Auto,
        Some(file::ListenStream::Always) => ListenStream::Always,
        Some(file::ListenStream::Never) => ListenStream::Never,
    };
    server.offer = match table.offer {
        None | Some(file::Offer::Auto) => Offer::Auto,
        Some(file::Offer::Legacy) => Offer::Legacy,
        Some(file::Offer::Both) => Offer::Both,
    };
    server.era = match table.era {
        None | Some(file::Era::Auto) => None,
        Some(file::Era::Legacy) => Some(Era::Legacy),
        Some(file::Era::Modern) => Some(Era::Modern),
    };
    eras(name, &server, faults);
    Some((parsed?, server))
}

/// What of the eras contradicts itself.
fn eras(name: &str, server: &Server, faults: &mut Faults) {
    if server.era == Some(Era::Modern) && matches!(server.reach, Reach::Http { transport: Transport::Sse, .. }) {
        let message = "`transport = \"sse\"` is of 2024-11-05, and `era = \"modern\"` is not";
        faults.add(&["servers", name, "era"], message, "leave one of the two out");
    }
}

fn reach(name: &str, table: &ServerTable, faults: &mut Faults) -> Option<Reach> {
    match (&table.command, &table.url) {
        (Some(command), None) => child(name, command, table, faults),
        (None, Some(url)) => endpoint(name, url, table, faults),
        (None, None) => {
            let message = format!("server `{name}` has neither `command` nor `url`");
            faults.add(&["servers", name], &message, "a program has `command`, an HTTP server has `url`");
            None
        }
        (Some(_), Some(_)) => {
            let message = format!("server `{name}` has both `command` and `url`");
            faults.add(&["servers", name, "url"], &message, "keep the one by which it is reached");
            None
        }
    }
}

fn child(name: &str, command: &str, table: &ServerTable, faults: &mut Faults) -> Option<Reach> {
    let before = faults.0.len();
    if command.trim().is_empty() {
        faults.add(&["servers", name, "command"], "the program has no name", "");
    }
    if !table.headers.is_empty() {
        faults.add(&["servers", name, "headers"], "a program has no `headers`", "did you mean `env`?");
    }
    if table.transport.is_some() {
        let message = "a program has no `transport`: it speaks over its standard streams";
        faults.add(&["servers", name, "transport"], message, "leave it out, or give the server's `url`");
    }
    if matches!(table.sharing, Some(file::Sharing::Principal | file::Sharing::All)) {
        faults.add(&["servers", name, "sharing"], "shared children are not in this version", "use \"session\"");
    }
    let bad = |key: &str| key.is_empty() || key.contains(['=', '\0']);
    if let Some(key) = table.env.keys().find(|key| bad(key)) {
        faults.add(&["servers", name, "env"], &format!("`{key}` is no name of a variable"), "");
    }
    let env = templates(&["servers", name, "env"], &table.env, faults);
    let reach = Reach::Child {
        command: command.to_owned(),
        args: table.args.clone(),
        env,
        cwd: table.cwd.clone(),
        sharing: Sharing::Session,
        stateful: table.stateful.unwrap_or(false),
    };
    (faults.0.len() == before).then_some(reach)
}

fn endpoint(name: &str, url: &str, table: &ServerTable, faults: &mut Faults) -> Option<Reach> {
    let before = faults.0.len();
    let stray = [
        ("args", !table.args.is_empty()),
        ("env", !table.env.is_empty()),
        ("cwd", table.cwd.is_some()),
        ("sharing", table.sharing.is_some()),
        ("stateful", table.stateful.is_some()),
    ];
    for (key, _) in stray.into_iter().filter(|(_, given)| *given) {
        let message = format!("`{key}` is for programs, and `{name}` is reached by its `url`");
        faults.add(&["servers", name, key], &message, "");
    }
    let parsed = url.parse::<http::Uri>().ok();
    let web = |uri: &http::Uri| matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some();
    let clean = |uri: &http::Uri| uri.authority().is_some_and(|authority| !authority.as_str().contains('@'));
    let uri = match parsed.filter(web) {
        Some(uri) if clean(&uri) => Some(uri),
        Some(_) => {
            let hint = "send credentials by `headers = { Authorization = \"…\" }`";
            faults.add(&["servers", name, "url"], "credentials don't belong into a `url`", hint);
            None
        }
        None => {
            faults.add(&["servers", name, "url"], "no http or https URL", "such as \"https://example.com/mcp\"");
            None
        }
    };
    for header in table.headers.keys() {
        let lower = header.to_ascii_lowercase();
        if lower.parse::<http::HeaderName>().is_err() {
            faults.add(&["servers", name, "headers"], &format!("`{header}` is no name of a header"), "");
        } else if OWN_HEADERS.contains(&lower.as_str()) {
            let message = format!("the header `{header}` is Mainstay's own to set");
            faults.add(&["servers", name, "headers", header], &message, "leave it out");
        }
    }
    let lower = table.headers.iter().map(|(header, value)| (header.to_ascii_lowercase(), value.clone())).collect();
    let headers = templates(&["servers", name, "headers"], &lower, faults);
    let transport = match table.transport {
        None | Some(file::Transport::Auto) => Transport::Auto,
        Some(file::Transport::Streamable) => Transport::Streamable,
        Some(file::Transport::Sse) => Transport::Sse,
    };
    uri.filter(|_| faults.0.len() == before).map(|url| Reach::Http { url, transport, headers })
}

/// The templates of a table of values, each one checked for its form.
fn templates(path: &[&str], written: &BTreeMap<String, String>, faults: &mut Faults) -> BTreeMap<String, Template> {
    let mut checked = BTreeMap::new();
    for (key, text) in written {
        if let Err(error) = mainstay_upstream::Template::parse(text) {
            let path: Vec<&str> = path.iter().copied().chain([key.as_str()]).collect();
            faults.add(&path, &format!("the value of `{key}` is malformed: {error}"), TEMPLATE_HINT);
        }
        if text.starts_with(MASK) {
            let path: Vec<&str> = path.iter().copied().chain([key.as_str()]).collect();
            faults.add(
                &path,
                &format!("the value of `{key}` was masked by `config show`"),
                "write the value itself, or `${NAME}`",
            );
        }
        checked.insert(key.clone(), Template::new(text));
    }
    checked
}

const IDLE_EXPIRY_MIN: Duration = Duration::from_secs(1);
/// A request is held for at most 50 s (S13a).
const PATIENCE_MAX: Duration = Duration::from_secs(50);
const BODY_BYTES_RANGE: (usize, usize) = (1024, 1024 * 1024 * 1024);
const HEADER_BYTES_RANGE: (usize, usize) = (4096, 1024 * 1024);
const PER_PRINCIPAL_RANGE: (usize, usize) = (1, 1_000_000);
const SESSIONS_RANGE: (usize, usize) = (1, 10_000_000);
const INITIALIZE_PER_MINUTE_MAX: u32 = 1_000_000;
/// What the gateway itself says to a server; a configured one would break the session.
const OWN_HEADERS: &[&str] = &[
    "accept",
    "connection",
    "content-length",
    "content-type",
    "host",
    "last-event-id",
    "mcp-protocol-version",
    "mcp-session-id",
    "transfer-encoding",
];
/// What `config show` writes in place of what may be a secret.
pub(super) const MASK: char = '…';
const TEMPLATE_HINT: &str = "variables are written `${NAME}`, files `${file:PATH}`";
