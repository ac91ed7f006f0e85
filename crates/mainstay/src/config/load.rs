//! From file, environment and flags to one checked configuration.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use super::check::{self, Fault};
use super::diagnostic::Diagnostic;
use super::file::{AdminTable, File, Listen, ServerTable};
use super::{Config, anchored, clients, environment, fault};

/// Where the servers come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A file: TOML, or a client's `mcpServers` JSON as it is.
    File(PathBuf),
    /// One stdio server: the program and its arguments.
    Command(Vec<String>),
    /// One HTTP server.
    Url(String),
    /// None: defaults, environment and flags only.
    Nothing,
}

/// What the command line sets; it outweighs everything.
#[derive(Clone, Debug, Default)]
pub struct Overrides {
    /// `--listen`
    pub listen: Option<SocketAddr>,
    /// `--admin`
    pub admin_listen: Option<SocketAddr>,
    /// `--state-dir`
    pub state_dir: Option<PathBuf>,
}

/// What the process around the configuration says.
pub struct Surroundings<'a> {
    /// Reads an environment variable.
    pub var: &'a dyn Fn(&str) -> Option<String>,
    /// Whether the user is root.
    pub root: bool,
    /// The directory that relative paths of variables and flags start at.
    pub working_dir: PathBuf,
}

/// A configuration, and what is odd about where it came from.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The configuration.
    pub config: Config,
    /// What was tolerated.
    pub warnings: Vec<Diagnostic>,
}

/// Everything that is wrong with a configuration; never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Faults(pub Vec<Diagnostic>);

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, fault) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { "\n" };
            write!(f, "{separator}{fault}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Faults {}

impl From<Diagnostic> for Faults {
    fn from(fault: Diagnostic) -> Self {
        Self(vec![fault])
    }
}

/// Reads `source`, lays the environment and `overrides` over it, and checks the whole.
///
/// # Errors
/// Everything that is wrong, with file, line and column where there is one. No port is bound and nothing is written.
pub fn load(source: &Source, overrides: &Overrides, around: &Surroundings<'_>) -> Result<Loaded, Faults> {
    let mut origins = Origins { var: around.var, flags: overrides, text: None };
    let mut warnings = Vec::new();
    let lowest = match source {
        Source::File(path) => {
            let read = read_file(path, around)?;
            warnings = read.warnings;
            origins.text = Some(read.text);
            read.file
        }
        Source::Command(words) => single(clients::name_of_command(words), command_table(words)?),
        Source::Url(url) => single(name_of_url(url), url_table(url)),
        Source::Nothing => File::default(),
    };
    let variables = environment::layer(around.var)?;
    let file = flags(overrides).over(variables).anchor(&around.working_dir).over(lowest);
    let default_dir = || super::default_state_dir(around.root, around.var);
    match check::config(file, &default_dir) {
        Ok(config) => Ok(Loaded { config, warnings }),
        Err(found) => Err(Faults(found.into_iter().map(|fault| origins.place(fault)).collect())),
    }
}

struct Read {
    file: File,
    text: Text,
    warnings: Vec<Diagnostic>,
}

/// A file's text, kept to find places in it.
struct Text {
    origin: String,
    text: String,
    json: bool,
}

fn read_file(path: &Path, around: &Surroundings<'_>) -> Result<Read, Faults> {
    let origin = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|error| {
        Diagnostic::new(&origin, format!("the configuration file can't be read: {error}"))
            .with_hint("check the path, or start without a file: `mainstay serve -- CMD ARGS…`")
    })?;
    let place = anchored(&around.working_dir, path);
    let base = place.parent().unwrap_or(&around.working_dir);
    if !clients::is_json(path, &text) {
        let parsed: File = toml::from_str(&text).map_err(|error| fault::of_toml(&origin, &text, &error))?;
        let file = parsed.anchor(base);
        return Ok(Read { file, text: Text { origin, text, json: false }, warnings: Vec::new() });
    }
    let client = clients::read(&origin, &text)?;
    let file = File { servers: client.servers, ..File::default() }.anchor(base);
    Ok(Read { file, text: Text { origin, text, json: true }, warnings: client.warnings })
}

fn single(name: String, table: ServerTable) -> File {
    File { servers: BTreeMap::from([(name, table)]), ..File::default() }
}

fn command_table(words: &[String]) -> Result<ServerTable, Diagnostic> {
    let Some((command, args)) = words.split_first() else {
        return Err(Diagnostic::new("command line", "no program after `--`"));
    };
    Ok(ServerTable { command: Some(command.clone()), args: args.to_vec(), ..ServerTable::default() })
}

fn url_table(url: &str) -> ServerTable {
    ServerTable { url: Some(url.to_owned()), ..ServerTable::default() }
}

fn name_of_url(url: &str) -> String {
    let host = url.parse::<http::Uri>().ok().and_then(|uri| uri.host().map(str::to_owned));
    clients::as_name(&host.unwrap_or_default())
}

fn flags(overrides: &Overrides) -> File {
    File {
        listen: overrides.listen.map(Listen),
        state_dir: overrides.state_dir.clone(),
        admin: AdminTable { listen: overrides.admin_listen.map(Listen), token_file: None },
        ..File::default()
    }
}

impl File {
    /// The same with relative paths starting at `base`.
    fn anchor(mut self, base: &Path) -> Self {
        let paths = [&mut self.state_dir, &mut self.admin.token_file];
        let cwds = self.servers.values_mut().map(|server| &mut server.cwd);
        for path in paths.into_iter().chain(cwds).flatten() {
            *path = anchored(base, path);
        }
        self
    }
}

/// Finds out who set a key.
struct Origins<'a> {
    var: &'a dyn Fn(&str) -> Option<String>,
    flags: &'a Overrides,
    text: Option<Text>,
}

impl Origins<'_> {
    fn place(&self, fault: Fault) -> Diagnostic {
        let key = fault.path.join(".");
        let flag = match key.as_str() {
            "listen" => self.flags.listen.map(|_| "--listen"),
            "admin.listen" => self.flags.admin_listen.map(|_| "--admin"),
            "state_dir" => self.flags.state_dir.as_ref().map(|_| "--state-dir"),
            _ => None,
        };
        let set = |name: &&str| (self.var)(name).is_some_and(|value| !value.is_empty());
        let variable = environment::VARIABLES.iter().find(|variable| variable.key == Some(&key));
        let above = flag.or_else(|| variable.map(|variable| variable.name).filter(set));
        let Diagnostic { location, message, .. } = Diagnostic::new("", fault.message);
        let found = |origin: &str| Diagnostic { origin: origin.into(), location, message, hint: fault.hint };
        match (above, &self.text) {
            (Some(origin), _) => found(origin),
            (None, None) => found("command line"),
            (None, Some(text)) => {
                let span = match text.json {
                    true => fault::locate_json(&text.text, &fault.path[1.min(fault.path.len())..]),
                    false => fault::locate_toml(&text.text, &fault.path),
                };
                let found = found(&text.origin);
                span.map_or(found.clone(), |span| found.at(&text.text, span))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use mainstay_core::id::ServerName;

    use super::*;
    use crate::config::{Reach, StoreKind, TerminalStatus};

    fn around(var: &dyn Fn(&str) -> Option<String>) -> Surroundings<'_> {
        Surroundings { var, root: false, working_dir: PathBuf::from("/work dir") }
    }

    fn home(name: &str) -> Option<String> {
        (name == "HOME").then(|| "/home/u".to_owned())
    }

    fn from_text(name: &str, text: &str) -> Result<Loaded, Faults> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        load(&Source::File(path), &Overrides::default(), &around(&home))
    }

    /// (line, column, message, hint) of the only fault.
    fn fault(text: &str) -> (usize, usize, String, String) {
        let Faults(faults) = from_text("m.toml", text).unwrap_err();
        assert_eq!(faults.len(), 1, "{faults:?}");
        let place = faults[0].location.clone().unwrap();
        (place.line, place.column, faults[0].message.clone(), faults[0].hint.clone().unwrap_or_default())
    }

    const WHOLE: &str = r#"
        listen = "127.0.0.1:7000"
        state_dir = "state"
        store = "memory"
        [admin]
        listen = "localhost:7001"
        token_file = "/run/token"
        [session]
        idle_expiry = "never"
        answer_json_within = "0"
        terminal_status = "distinct"
        [servers.files]
        command = "npx"
        args = ["-y", "server"]
        env = { LOG = "debug", TOKEN = "${TOKEN}" }
        cwd = "sub"
        sharing = "session"
        [servers.tickets]
        url = "https://example.com/mcp"
        headers = { Authorization = "Bearer ${TICKETS_TOKEN}" }
        patience = "5s"
        listen_stream = "never"
        offer = "legacy"
    "#;

    #[test]
    fn the_file_of_the_design_is_read() {
        let config = from_text("m.toml", WHOLE).unwrap().config;
        assert_eq!(config.listen.port(), 7000);
        assert_eq!(config.admin.listen.to_string(), "127.0.0.1:7001");
        assert!(config.state_dir.is_absolute() && config.state_dir.ends_with("state"));
        assert_eq!((config.store, config.session.terminal_status), (StoreKind::Memory, TerminalStatus::Distinct));
        assert_eq!((config.session.idle_expiry, config.session.answer_json_within), (None, Duration::ZERO));
        let tickets = &config.servers[&ServerName::parse("tickets").unwrap()];
        assert_eq!(tickets.patience, Duration::from_secs(5));
        let Reach::Http { headers, .. } = &tickets.reach else { unreachable!() };
        assert_eq!(headers["authorization"].reveal(), "Bearer ${TICKETS_TOKEN}");
        assert_eq!(config.upstream_servers().unwrap().len(), 2);
    }

    #[test]
    fn a_snapshot_and_the_shown_form_say_the_same_again() {
        let config = from_text("m.toml", WHOLE).unwrap().config;
        assert_eq!(Config::from_snapshot(&config.to_snapshot()).unwrap(), config);
        let shown = from_text("m.toml", &config.to_toml()).unwrap().config;
        assert_eq!(shown.session, config.session);
        assert!(config.to_toml().contains("…${TICKETS_TOKEN}"));
        assert!(Config::from_snapshot(b"{}").is_err());
    }

    #[test]
    fn i6_plain_secrets_of_a_file_are_in_no_debug_output_and_not_shown() {
        let text = "[servers.a]\nurl = \"http://a/\"\nheaders = { X = \"CANARY\" }\n[servers.b]\ncommand = \"x\"\nenv = { Y = \"CANARY\" }\n";
        let loaded = from_text("m.toml", text).unwrap();
        assert!(!format!("{loaded:?}").contains("CANARY"));
        assert!(!loaded.config.to_toml().contains("CANARY"));
        assert!(!loaded.config.to_json().to_string().contains("CANARY"));
    }

    #[test]
    fn i1_mode_token_may_listen_anywhere_and_travels_to_the_worker() {
        let text = "listen = \"0.0.0.0:7717\"\n[auth]\nmode = \"token\"\n[auth.tokens]\nci = \"${file:/run/ci}\"\nalice = [\"${A}\", \"CANARY-0123456789\"]\n";
        let config = from_text("m.toml", text).unwrap().config;
        assert_eq!((config.auth.tokens["alice"].len(), config.auth.tokens["ci"].len()), (2, 1));
        assert_eq!(Config::from_snapshot(&config.to_snapshot()).unwrap(), config);
        let shown = config.to_toml();
        assert!(
            shown.contains("ci = \"${file:/run/ci}\"") && shown.contains("\"${A}\",") && shown.contains("\"…\""),
            "{shown}"
        );
        assert!(!format!("{config:?}").contains("CANARY"));
    }

    #[test]
    fn flags_outweigh_variables_and_variables_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.toml");
        std::fs::write(
            &path,
            "listen = \"127.0.0.1:1\"\n[admin]\nlisten = \"127.0.0.1:2\"\n[limits]\nsessions_max = 3\n",
        )
        .unwrap();
        let var = |name: &str| match name {
            "MAINSTAY_LISTEN" => Some("127.0.0.1:11".to_owned()),
            "MAINSTAY_ADMIN_LISTEN" => Some("127.0.0.1:12".to_owned()),
            "MAINSTAY_STATE_DIR" => Some("rel".to_owned()),
            _ => None,
        };
        let flags = Overrides { listen: Some(([127, 0, 0, 1], 21).into()), ..Overrides::default() };
        let config = load(&Source::File(path), &flags, &around(&var)).unwrap().config;
        let ports = (config.listen.port(), config.admin.listen.port(), config.limits.sessions_max);
        assert_eq!(ports, (21, 12, 3));
        assert_eq!(config.state_dir, Path::new("/work dir/rel"));
    }

    #[test]
    fn wrong_files_give_line_column_and_hint() {
        for (text, line, column, message, hint) in [
            ("lisen = 1\n", 1, 1, "unknown key `lisen`", "did you mean `listen`?"),
            ("[session]\nidle_expiry = \"soon\"\n", 2, 15, "`soon` is no duration", ""),
            ("[session]\nkeep_alive = \"30m\"\n", 2, 1, "unknown key `keep_alive`", "not in this version"),
            ("[session]\nterminal_status = \"specc\"\n", 2, 19, "unknown value `specc`", "did you mean `spec`?"),
            ("listen = \"0.0.0.0:7717\"\n", 1, 10, "lets everybody in", "127.0.0.1"),
            ("store = \"postgres://u:p@h/d\"\n", 1, 9, "PostgreSQL store is not in this version", "sqlite"),
            ("[auth]\nmode = \"jwt\"\n", 2, 8, "not in this version", "none"),
            ("[auth]\nmode = \"token\"\n", 2, 8, "no tokens", "tokens new"),
            ("[auth]\ntokens = { a = \"${A}\" }\n", 2, 1, "lets everybody in", "mode"),
            ("[auth]\nmode = \"token\"\n[auth.tokens]\na = \"short\"\n", 4, 5, "less than 16", "tokens new"),
            ("[auth]\nmode = \"token\"\n[auth.tokens]\na = [\"sha256:1\"]\n", 4, 5, "64 hexadecimal", "its hash"),
            ("[auth]\nmode = \"token\"\n[auth.tokens]\na = []\n", 4, 5, "1 to 16 values", ""),
            ("[auth]\nmode = \"token\"\n[auth.tokens]\na = \"${A\"\n", 4, 5, "malformed", "${NAME}"),
            ("[auth]\nmode = \"token\"\n[auth.tokens]\n\"a b\" = \"${A}\"\n", 4, 9, "no name", "letters"),
            ("[servers.a]\n", 1, 10, "neither `command` nor `url`", "HTTP server"),
            ("[servers.a]\ncommand = \"x\"\nurl = \"http://x/\"\n", 3, 7, "both `command` and `url`", ""),
            ("[servers.a]\ncommand = \"x\"\nsharing = \"all\"\n", 3, 11, "not in this version", "session"),
            ("[servers.a]\nurl = \"http://u:p@h/\"\n", 2, 7, "credentials", "headers"),
            ("[servers.a]\nurl = \"x\"\n", 2, 7, "no http or https URL", ""),
            ("[servers.a]\nurl = \"http://x/\"\nargs = [\"a\"]\n", 3, 8, "for programs", ""),
            ("[servers.a]\ncommand = \"x\"\nenv = { T = \"${T\" }\n", 3, 13, "malformed", "${NAME}"),
            ("[servers.\"a b\"]\ncommand = \"x\"\n", 1, 10, "no name for a server", ""),
            ("[servers.a]\ncommand = \"x\"\npatience = \"2m\"\n", 3, 12, "too long", "50s"),
            ("[limits]\nbody_bytes_max = 1\n", 2, 18, "out of range", "default"),
            ("[session]\nmax_per_principal = 0\n", 2, 21, "nothing through", "1000"),
            ("listen = \n", 1, 10, "", ""),
        ] {
            let (at_line, at_column, said, hinted) = fault(text);
            assert_eq!((at_line, at_column), (line, column), "{text}: {said}");
            assert!(said.contains(message) && hinted.contains(hint), "{text}: {said} / {hinted}");
        }
    }

    #[test]
    fn every_broken_rule_is_named_at_once() {
        let Faults(faults) = from_text("m.toml", "store = \"x\"\n[auth]\nmode = \"jwt\"\n[servers.a]\n").unwrap_err();
        assert_eq!(faults.len(), 3, "{faults:?}");
    }

    #[test]
    fn i1_mode_none_refuses_what_is_not_loopback_whoever_asked_for_it() {
        let flags = Overrides { listen: Some(([0, 0, 0, 0], 1).into()), ..Overrides::default() };
        let Faults(faults) = load(&Source::Nothing, &flags, &around(&home)).unwrap_err();
        assert_eq!(faults[0].origin, "--listen");
        let var = |name: &str| if name == "MAINSTAY_LISTEN" { Some("[::]:1".to_owned()) } else { home(name) };
        let Faults(faults) = load(&Source::Nothing, &Overrides::default(), &around(&var)).unwrap_err();
        assert_eq!(faults[0].origin, "MAINSTAY_LISTEN");
    }

    #[test]
    fn a_command_and_a_url_need_no_file() {
        let words = ["npx", "-y", "@scope/my-server"].map(str::to_owned).to_vec();
        let loaded = load(&Source::Command(words), &Overrides::default(), &around(&home)).unwrap();
        assert_eq!(loaded.config.servers.keys().next().unwrap().as_str(), "my-server");
        assert_eq!(loaded.config.state_dir, Path::new("/home/u/.local/state/mainstay"));
        let url = Source::Url("https://mcp.example.com/x".into());
        let loaded = load(&url, &Overrides::default(), &around(&home)).unwrap();
        assert_eq!(loaded.config.servers.keys().next().unwrap().as_str(), "mcp.example.com");
        let url = Source::Url("example.com".into());
        assert!(load(&url, &Overrides::default(), &around(&home)).is_err());
    }

    #[test]
    fn a_client_file_is_one_and_its_faults_have_places() {
        let good = "{\"mcpServers\": {\"a\": {\"command\": \"x\", \"future\": 1}}}";
        let loaded = from_text("mcp.json", good).unwrap();
        assert_eq!((loaded.config.servers.len(), loaded.warnings.len()), (1, 1));
        let bad = "{\"mcpServers\": {\n \"a\": {\"url\": \"ftp://x\"}}}";
        let Faults(faults) = from_text("mcp.json", bad).unwrap_err();
        assert_eq!(faults[0].location.as_ref().unwrap().line, 2);
        assert!(from_text("any", "{").is_err());
    }
}
