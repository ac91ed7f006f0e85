//! From file, environment and flags to one checked configuration.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use super::check::{self, Fault};
use super::diagnostic::Diagnostic;
use super::expand::{Words, at_home};
use super::file::{AdminTable, File, Listen, ServerTable};
use super::{Config, Template, anchored, clients, environment, fault, survey};
use origins::{Origins, Text};

mod origins;

/// Where the servers come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A file: TOML, or a client's `mcpServers` JSON as it is.
    File(PathBuf),
    /// One stdio server: the program and its arguments; [`Single::values`] are its environment.
    Command(Vec<String>, Single),
    /// One HTTP server; [`Single::values`] are its headers.
    Url(String, Single),
    /// None: defaults, environment and flags only.
    Nothing,
}

/// What the command line says of its one server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Single {
    /// Its name; derived if absent.
    pub name: Option<String>,
    /// Variables or headers, by name.
    pub values: Vec<(String, Template)>,
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
    /// The names of all environment variables.
    pub names: &'a [String],
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
        Source::Command(words, single) => {
            one_server(single, clients::name_of_command(words), command_table(words, single)?)
        }
        Source::Url(url, single) => one_server(single, clients::name_of_url(url), url_table(url, single)),
        Source::Nothing => File::default(),
    };
    let variables = environment::layer(around.var)?;
    let above = flags(overrides).over(variables);
    let above = above.anchor(&around.working_dir, around.var).map_err(|fault| origins.place(fault))?;
    let default_dir = || super::default_state_dir(around.root, around.var);
    let config = check::config(above.over(lowest), &default_dir)
        .map_err(|found| Faults(found.into_iter().map(|fault| origins.place(fault)).collect()))?;
    warnings.extend(environment::strangers(around.names, &survey::references(&config)));
    if *source != Source::Nothing {
        warnings.extend(survey::survey(&config, around).into_iter().map(|fault| origins.place(fault)));
    }
    Ok(Loaded { config, warnings })
}

struct Read {
    file: File,
    text: Text,
    warnings: Vec<Diagnostic>,
}

fn read_file(path: &Path, around: &Surroundings<'_>) -> Result<Read, Faults> {
    let origin = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|error| {
        Diagnostic::new(&origin, format!("the configuration file can't be read: {error}"))
            .with_hint("check the path, or start without a file: `mainstay serve -- CMD ARGS…`")
    })?;
    if text.trim_start_matches('\u{feff}').trim().is_empty() {
        let hint = "write TOML, such as `[servers.files]` and `command = \"…\"`, or give a client's mcpServers JSON";
        return Err(Diagnostic::new(&origin, "the configuration file is empty").with_hint(hint).into());
    }
    let place = anchored(&around.working_dir, path);
    let base = place.parent().unwrap_or(&around.working_dir);
    let json = clients::is_json(path, &text);
    let (file, warnings) = if json {
        let client = clients::read(&origin, &text, &Words { var: around.var, folder: base })?;
        (File { servers: client.servers, ..File::default() }, client.warnings)
    } else {
        (toml::from_str(&text).map_err(|error| Faults(fault::of_toml(&origin, &text, &error)))?, Vec::new())
    };
    let text = Text { origin, text, json };
    match file.anchor(base, around.var) {
        Ok(file) => Ok(Read { file, text, warnings }),
        Err(fault) => Err(text.place(fault).into()),
    }
}

fn one_server(single: &Single, derived: String, table: ServerTable) -> File {
    let name = single.name.clone().unwrap_or(derived);
    File { servers: BTreeMap::from([(name, table)]), ..File::default() }
}

fn command_table(words: &[String], single: &Single) -> Result<ServerTable, Diagnostic> {
    let Some((command, args)) = words.split_first() else {
        return Err(Diagnostic::new("command line", "no program after `--`"));
    };
    let env = revealed(&single.values);
    Ok(ServerTable { command: Some(command.clone()), args: args.to_vec(), env, ..ServerTable::default() })
}

fn url_table(url: &str, single: &Single) -> ServerTable {
    ServerTable { url: Some(url.to_owned()), headers: revealed(&single.values), ..ServerTable::default() }
}

fn revealed(values: &[(String, Template)]) -> BTreeMap<String, String> {
    values.iter().map(|(name, value)| (name.clone(), value.reveal().to_owned())).collect()
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
    /// The same with relative paths starting at `base`, and those under `~/` at home.
    fn anchor(mut self, base: &Path, var: &dyn Fn(&str) -> Option<String>) -> Result<Self, Fault> {
        let homeless = |path: &[&str], message: String| Fault::new(path, message, Some("write the whole path"));
        let anchor = |key: &[&str], path: &mut Option<PathBuf>| -> Result<(), Fault> {
            let Some(written) = path else { return Ok(()) };
            let at_home = written.to_str().map(|text| at_home(text, var)).transpose();
            let at_home = at_home.map_err(|message| homeless(key, message))?.map(PathBuf::from);
            *path = Some(anchored(base, at_home.as_ref().unwrap_or(written)));
            Ok(())
        };
        anchor(&["state_dir"], &mut self.state_dir)?;
        anchor(&["admin", "token_file"], &mut self.admin.token_file)?;
        for (name, server) in &mut self.servers {
            anchor(&["servers", name, "cwd"], &mut server.cwd)?;
            if let Some(command) = &mut server.command {
                let key = ["servers", name, "command"];
                *command = at_home(command, var).map_err(|message| homeless(&key, message))?;
            }
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use mainstay_core::id::ServerName;
    use mainstay_core::wire::modern::Era;

    use super::*;
    use crate::config::{Offer, Reach, StoreKind, TerminalStatus};

    fn around(var: &dyn Fn(&str) -> Option<String>) -> Surroundings<'_> {
        Surroundings { var, names: &[], root: false, working_dir: PathBuf::from("/srv dir") }
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
        transport = "sse"
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
        let Reach::Http { headers, transport, .. } = &tickets.reach else { unreachable!() };
        assert_eq!(headers["authorization"].reveal(), "Bearer ${TICKETS_TOKEN}");
        assert_eq!(*transport, mainstay_upstream::Transport::Sse);
        assert_eq!(config.upstream_servers().unwrap().len(), 2);
    }

    #[test]
    fn only_what_has_a_url_has_a_transport() {
        let (line, column, message, hint) = fault("[servers.a]\ncommand = \"x\"\ntransport = \"sse\"\n");
        assert_eq!((line, column), (3, 13), "{message}");
        assert!(message.contains("no `transport`") && hint.contains("`url`"), "{message} {hint}");
        let auto = from_text("m.toml", "[servers.a]\nurl = \"http://h/\"\n").unwrap().config;
        assert!(auto.to_toml().contains("transport = \"auto\""));
    }

    #[test]
    fn e5_the_era_of_a_server_can_be_said() {
        let era_of = |reach: &str, said: &str| {
            let text = format!("[servers.a]\n{reach}\n{said}");
            let config = from_text("m.toml", &text).unwrap().config;
            assert_eq!(Config::from_snapshot(&config.to_snapshot()).unwrap(), config);
            let server = &config.servers[&ServerName::parse("a").unwrap()];
            assert_eq!(config.upstream_servers().unwrap()[0].era, server.era);
            (server.era, server.offer)
        };
        let era = |said: &str| era_of("url = \"http://h/\"", said);
        assert_eq!(era(""), (None, Offer::Auto));
        assert_eq!(era("era = \"legacy\"\n"), (Some(Era::Legacy), Offer::Auto));
        assert_eq!(era("offer = \"both\"\n"), (None, Offer::Both));
        assert_eq!(era("era = \"modern\"\noffer = \"both\"\n"), (Some(Era::Modern), Offer::Both));
        assert_eq!(era("era = \"modern\"\noffer = \"legacy\"\n"), (Some(Era::Modern), Offer::Legacy));
        assert_eq!(era_of("command = \"x\"", "era = \"modern\"\n"), (Some(Era::Modern), Offer::Auto));
    }

    #[test]
    fn a_snapshot_and_the_shown_form_say_the_same_again() {
        let config = from_text("m.toml", WHOLE).unwrap().config;
        assert_eq!(Config::from_snapshot(&config.to_snapshot()).unwrap(), config);
        let Faults(masked) = from_text("m.toml", &config.to_toml()).unwrap_err();
        assert!(masked.iter().all(|fault| fault.message.contains("masked by `config show`")), "{masked:?}");
        let shown = from_text("m.toml", &config.to_toml().replace('…', "")).unwrap().config;
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
        assert_eq!(config.state_dir, Path::new("/srv dir/rel"));
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
            ("[servers.a]\nurl = \"http://localhost:7717/mcp/a\"\n", 2, 7, "is this gateway itself", "own command"),
            ("listen = \"[::1]:9\"\n[servers.a]\nurl = \"http://[::1]:9/mcp\"\n", 3, 7, "`a` is this gateway", ""),
            ("[servers.a]\nurl = \"http://h/\"\nheaders = { X = \"…\" }\n", 3, 17, "masked", "${NAME}"),
            ("[servers.a]\ncommand = \"x\"\nurl = \"http://x/\"\n", 3, 7, "both `command` and `url`", ""),
            ("[servers.a]\ncommand = \"x\"\nsharing = \"all\"\n", 3, 11, "not in this version", "session"),
            (
                "[servers.a]\nurl = \"http://h/\"\ntransport = \"sse\"\nera = \"modern\"\n",
                4,
                7,
                "2024-11-05",
                "one of the two",
            ),
            ("[servers.a]\nurl = \"http://u:p@h/\"\n", 2, 7, "credentials", "headers"),
            ("[servers.a]\nurl = \"x\"\n", 2, 7, "no http or https URL", ""),
            ("[servers.a]\nurl = \"http://x/\"\nargs = [\"a\"]\n", 3, 8, "for programs", ""),
            ("[servers.a]\ncommand = \"x\"\nenv = { T = \"${T\" }\n", 3, 13, "malformed", "${NAME}"),
            ("[servers.\"a b\"]\ncommand = \"x\"\n", 1, 10, "no name for a server", ""),
            ("[servers.a]\ncommand = \"x\"\npatience = \"2m\"\n", 3, 12, "too long", "50s"),
            ("[limits]\nbody_bytes_max = 1\n", 2, 18, "out of range", "default"),
            ("[session]\nmax_per_principal = 0\n", 2, 21, "nothing through", "1000"),
            ("[limits]\ninitialize_per_minute = 1000001\n", 2, 25, "out of range", "0 does not limit"),
            ("listen = \n", 1, 10, "", ""),
        ] {
            let (at_line, at_column, said, hinted) = fault(text);
            assert_eq!((at_line, at_column), (line, column), "{text}: {said}");
            assert!(said.contains(message) && hinted.contains(hint), "{text}: {said} / {hinted}");
        }
    }

    #[test]
    fn wrong_types_are_told_in_plain_words() {
        for (text, message, hint) in [
            ("admin = \"127.0.0.1:1\"\n", "a table is expected here, not a text", "`[admin]`"),
            ("[limits]\nbody_bytes_max = \"1\"\n", "a whole number is expected here, not a text", ""),
            ("[limits]\nbody_bytes_max = -1\n", "a whole number is expected here, not a number", ""),
            ("[servers.a]\nargs = \"x\"\n", "a list of texts is expected here, not a text", ""),
            ("[servers]\na = \"x\"\n", "a table is expected here, not a text", "`[servers.NAME]`"),
            ("[servers.a]\ncommand = 3\n", "a text is expected here, not a number", ""),
            ("listen = 3\n", "a text is expected here, not a number", ""),
            ("[auth]\nmode = 3\n", "a text is expected here", ""),
            ("[auth]\nrequire_agent = \"x\"\n", "true or false is expected here, not a text", ""),
            ("[server.a]\ncommand = \"x\"\n", "unknown key `server`", "did you mean `servers`?"),
            ("servers:\n  a:\n    command: x\n", "", "YAML"),
        ] {
            let (_, _, said, hinted) = fault(text);
            assert!(said.contains(message) && hinted.contains(hint), "{text}: {said} / {hinted}");
        }
        let Faults(faults) = from_text("m.toml", " \n").unwrap_err();
        assert!(faults[0].message.contains("empty") && faults[0].hint.is_some());
    }

    #[test]
    fn every_unknown_key_is_told_at_once() {
        let text = "lisen = 1\n[server.a]\nx = 1\n[servers.b]\ncomand = \"x\"\nenv = { any = \"x\" }\n[auth.tokens]\nany = 3\n[session]\nkeep_alive = 1\n";
        let Faults(faults) = from_text("m.toml", text).unwrap_err();
        let told: Vec<_> =
            faults.iter().map(|fault| (fault.location.as_ref().unwrap().line, fault.message.as_str())).collect();
        let keys = [
            (1, "unknown key `lisen`"),
            (2, "unknown key `server`"),
            (5, "unknown key `comand`"),
            (10, "unknown key `keep_alive`"),
        ];
        assert_eq!(told, keys);
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
        let loaded = load(&Source::Command(words, Single::default()), &Overrides::default(), &around(&home)).unwrap();
        assert_eq!(loaded.config.servers.keys().next().unwrap().as_str(), "my-server");
        assert_eq!(loaded.config.state_dir, Path::new("/home/u/.local/state/mainstay"));
        let url = Source::Url("https://mcp.example.com/x".into(), Single::default());
        let loaded = load(&url, &Overrides::default(), &around(&home)).unwrap();
        assert_eq!(loaded.config.servers.keys().next().unwrap().as_str(), "mcp-example-com");
        let url = Source::Url("example.com".into(), Single::default());
        assert!(load(&url, &Overrides::default(), &around(&home)).is_err());
    }

    #[test]
    fn only_the_gateways_own_listener_is_itself() {
        for url in ["http://127.0.0.1:7716/mcp", "http://10.0.0.1:7717/mcp/a", "http://127.0.0.1:7717/other"] {
            assert!(from_text("m.toml", &format!("[servers.a]\nurl = \"{url}\"\n")).is_ok(), "{url}");
        }
        let flags = Overrides { listen: Some(([127, 0, 0, 1], 9).into()), ..Overrides::default() };
        let url = Source::Url("http://127.0.0.1:9/mcp/a".into(), Single::default());
        assert!(load(&url, &flags, &around(&home)).is_err());
    }

    #[test]
    fn a_tilde_in_a_file_is_the_home_directory() {
        let text = "state_dir = \"~/s\"\n[servers.a]\ncommand = \"~/bin/x\"\ncwd = \"~\"\n";
        let config = from_text("m.toml", text).unwrap().config;
        assert_eq!(config.state_dir, Path::new("/home/u/s"));
        let Reach::Child { command, cwd, .. } = &config.servers.values().next().unwrap().reach else { unreachable!() };
        assert_eq!((command.as_str(), cwd.as_deref()), ("/home/u/bin/x", Some(Path::new("/home/u"))));
    }

    #[test]
    fn the_command_line_names_its_server_and_gives_it_values() {
        let values = vec![("Authorization".to_owned(), Template::new("Bearer ${T}"))];
        let single = Single { name: Some("mine".into()), values };
        let loaded =
            load(&Source::Url("https://e.com/mcp".into(), single), &Overrides::default(), &around(&home)).unwrap();
        let server = &loaded.config.servers[&ServerName::parse("mine").unwrap()];
        let Reach::Http { headers, .. } = &server.reach else { unreachable!() };
        assert_eq!(headers["authorization"].reveal(), "Bearer ${T}");
        assert!(loaded.warnings[0].message.contains("`T` is not set"), "{:?}", loaded.warnings);
    }

    #[test]
    fn a_client_file_is_one_and_its_faults_have_places() {
        let good = "{\"mcpServers\": {\"a\": {\"command\": \"x\", \"future\": 1}}}";
        let loaded = from_text("mcp.json", good).unwrap();
        assert_eq!((loaded.config.servers.len(), loaded.warnings.len()), (1, 2), "{:?}", loaded.warnings);
        let bad = "{\"mcpServers\": {\n \"a\": {\"url\": \"ftp://x\"}}}";
        let Faults(faults) = from_text("mcp.json", bad).unwrap_err();
        assert_eq!(faults[0].location.as_ref().unwrap().line, 2);
        assert!(from_text("any", "{").is_err());
    }
}
