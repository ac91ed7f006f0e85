//! The command line. One file per command; this one knows what there is and how a command ends.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, Parser, Subcommand};

use crate::config::{ListenAddress, environment};
use crate::telemetry;
use failure::Failure;
use output::Output;

mod activation;
mod announce;
mod api;
mod audit;
mod config;
mod demo;
mod exit;
mod failure;
mod gateway;
mod handover;
mod instances;
mod keys;
mod notify;
mod output;
mod owed;
mod place;
mod rehearse;
mod serve;
mod servers;
mod sessions;
mod state_dir;
mod status;
mod stop;
mod times;
mod tokens;

/// Parses the command line, runs the command, reports its failure.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return unparsed(&with_tip(error)),
    };
    let out = Output::new(cli.global.json);
    match run(cli, &out) {
        Ok(()) => exit::OK.into(),
        Err(failure) => failure.report(&out),
    }
}

/// Help and version are answers; everything else is a wrong command line.
fn unparsed(error: &clap::Error) -> ExitCode {
    let json = std::env::args_os().take_while(|word| word != "--").any(|word| word == "--json");
    if error.use_stderr() && json {
        return misspelt(&error.to_string()).report(&Output::new(true));
    }
    // A reader that has gone away needs no help.
    let _ = error.print();
    if error.use_stderr() { exit::USAGE.into() } else { exit::OK.into() }
}

/// The same error; where a server's command lacks its dashes, with that tip.
fn with_tip(mut error: clap::Error) -> clap::Error {
    let stray = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(word)) if !word.starts_with('-') => word.clone(),
        _ => return error,
    };
    let of_serve = error.get(ContextKind::Usage).is_some_and(|usage| usage.to_string().contains("mainstay serve"));
    if error.kind() == ErrorKind::UnknownArgument && of_serve {
        let tip = format!("put `--` before the command: `mainstay serve -- {stray} …`");
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    }
    error
}

/// What is wrong with a command line, as a failure: everything that is said of it, its tips as the hint.
fn misspelt(text: &str) -> Failure {
    let (said, _) = text.split_once("\nUsage:").unwrap_or((text, ""));
    let lines = || said.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("For more"));
    let tips: Vec<&str> = lines().filter_map(|line| line.strip_prefix("tip: ")).collect();
    let told: Vec<&str> = lines().filter(|line| !line.starts_with("tip: ")).collect();
    let told = told.join(" ");
    let failure = Failure::usage(anyhow::anyhow!("{}", told.trim_start_matches("error: ")));
    failure.hint(if tips.is_empty() { "see `mainstay --help`".to_owned() } else { tips.join("; ") })
}

fn run(cli: Cli, out: &Output) -> Result<(), Failure> {
    let Cli { global, command } = cli;
    match command {
        Command::Serve(args) => serve::run(args, &global, out),
        Command::Worker { file } => {
            start_log(&global)?;
            crate::worker::run(file).map_err(Failure::from)
        }
        Command::Demo => demo::run(out),
        Command::DemoServer => crate::demo::run().map_err(|error| Failure::from(anyhow::Error::new(error))),
        Command::Status(place) => status::run(&place, out),
        Command::Servers(command) => servers::run(&command, out),
        Command::Sessions(command) => sessions::run(&command, out),
        Command::Instances(place) => instances::list(&place, out),
        Command::Owed(command) => owed::run(&command, out),
        Command::Audit(args) => audit::run(&args, out),
        Command::Keys(keys::Command::Rotate(place)) => keys::rotate(&place, out),
        Command::Reload(args) => handover::reload(&args, out),
        Command::Upgrade(place) => handover::upgrade(&place, out),
        Command::Rehearse(args) => rehearse::run(args, out),
        Command::Stop(args) => stop::run(&args, out),
        Command::Tokens(TokensCommand::New) => tokens::new(out),
        Command::Config(ConfigCommand::Check(args)) => config::check(&args, out),
        Command::Config(ConfigCommand::Show(args)) => config::show(&args, out),
        Command::Config(ConfigCommand::Schema) => config::schema(out),
        Command::Openapi => out.document(&crate::admin::openapi()),
    }
}

fn start_log(global: &Global) -> Result<(), Failure> {
    let filter = global.log.as_deref().unwrap_or(telemetry::FILTER_DEFAULT);
    telemetry::start(global.log_format, filter)
        .map_err(|error| Failure::usage(error).hint("a filter is `info` or `warn,mainstay=debug`"))
}

/// Durable session gateway for the Model Context Protocol.
#[derive(Debug, Parser)]
#[command(name = "mainstay", version, arg_required_else_help = true, after_help = further_help())]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

/// Options of every command.
#[derive(Debug, Args)]
struct Global {
    /// Answer in JSON, errors too
    #[arg(long, global = true, help_heading = GLOBAL_HEADING)]
    json: bool,
    /// Log filter, for example `warn,mainstay=debug` [default: info]
    #[arg(long, global = true, env = environment::LOG, value_name = "FILTER", help_heading = GLOBAL_HEADING)]
    log: Option<String>,
    /// Log format
    #[arg(long, global = true, env = environment::LOG_FORMAT, value_enum, default_value = "human", value_name = "FORMAT",
        help_heading = GLOBAL_HEADING)]
    log_format: telemetry::Format,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the gateway in the foreground
    #[command(after_help = SERVE_EXAMPLES)]
    Serve(ServeArgs),
    /// Show in a minute what the gateway does: sessions that survive kill -9
    Demo,
    /// What a running gateway is doing
    Status(Place),
    /// The servers of a running gateway: their state, their processes, their logs
    #[command(subcommand)]
    Servers(servers::Command),
    /// The sessions of a running gateway: find, show, end them
    #[command(subcommand)]
    Sessions(sessions::Command),
    /// Live connections of a running gateway to its servers
    Instances(Place),
    /// Deletes that a running gateway still owes to its servers
    #[command(subcommand)]
    Owed(owed::Command),
    /// Who did what to which session
    Audit(audit::Args),
    /// The keys that sign and seal what is stored
    #[command(subcommand)]
    Keys(keys::Command),
    /// Put the changed configuration of a running gateway in force; no call fails, and a wrong file changes nothing
    Reload(handover::ReloadArgs),
    /// Go on with the program that now stands where the running gateway's was; no call fails
    Upgrade(Place),
    /// Stop a running gateway; its sessions are kept, unless it is retired
    Stop(stop::Args),
    /// Make tokens for clients
    #[command(subcommand)]
    Tokens(TokensCommand),
    /// Check, show or describe the configuration
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Print the OpenAPI document of the admin API
    #[command(hide = true)]
    Openapi,
    /// The process that does the work; started by `serve`
    #[command(hide = true)]
    Worker {
        /// Where its settings came from
        #[arg(long, value_name = "FILE")]
        file: Option<PathBuf>,
    },
    /// Check what a handover needs; run by the keeper
    #[command(hide = true)]
    Rehearse(rehearse::RehearseArgs),
    /// A small MCP server over stdio, for `demo`
    #[command(hide = true)]
    DemoServer,
}

#[derive(Debug, Subcommand)]
enum TokensCommand {
    /// Print a random token and its hash for `[auth.tokens]`; nothing is stored
    New,
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Say whether a configuration is right, and where it is not
    Check(config::CheckArgs),
    /// Show the configuration in force, with every default
    Show(config::ShowArgs),
    /// Print the JSON Schema of the configuration file
    Schema,
}

/// Where servers come from, and what outweighs the file.
#[derive(Clone, Debug, Args)]
struct SourceArgs {
    /// Configuration: TOML, or a client's mcpServers JSON as it is
    #[arg(long, env = environment::CONFIG, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Directory of everything durable [env: MAINSTAY_STATE_DIR] [default: ~/.local/state/mainstay, root's is /var/lib/mainstay]
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// Where MCP clients connect; port 0 takes a free one [env: MAINSTAY_LISTEN] [default: 127.0.0.1:7717]
    #[arg(long, value_name = "ADDR")]
    listen: Option<ListenAddress>,
    /// Where the admin port listens; port 0 takes a free one [env: MAINSTAY_ADMIN_LISTEN] [default: 127.0.0.1:7718]
    #[arg(long, value_name = "ADDR")]
    admin: Option<ListenAddress>,
}

#[derive(Clone, Debug, Args)]
struct ServeArgs {
    #[command(flatten)]
    source: SourceArgs,
    /// One HTTP server, named after its host
    #[arg(long, value_name = "URL", conflicts_with = "command")]
    url: Option<String>,
    /// A header for the server of `--url`: `Name: value`; `${VAR}` and `${file:PATH}` keep secrets out of sight
    #[arg(long = "header", value_name = "HEADER", requires = "url")]
    headers: Vec<Unseen>,
    /// A variable for the server of `-- CMD`: `NAME=VALUE` as for `--header`, or `NAME` to pass Mainstay's own on
    #[arg(long = "env", value_name = "NAME[=VALUE]", requires = "command")]
    env: Vec<Unseen>,
    /// What the server of `--url` or `-- CMD` is called
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// One stdio server, named after its program
    #[arg(last = true, value_name = "CMD ARGS")]
    command: Vec<String>,
}

/// Text of the command line that may be a secret: `Debug` hides it, and no error repeats it.
#[derive(Clone)]
struct Unseen(String);

impl std::str::FromStr for Unseen {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self(text.to_owned()))
    }
}

impl std::fmt::Debug for Unseen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Unseen(…)")
    }
}

/// Which running gateway is meant.
#[derive(Debug, Args)]
struct Place {
    /// The gateway's state directory [env: MAINSTAY_STATE_DIR]
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// The gateway's configuration, which names the state directory. A gateway that runs with this file is found even if
    /// the file is wrong by now
    #[arg(long, env = environment::CONFIG, value_name = "FILE")]
    config: Option<PathBuf>,
}

fn further_help() -> String {
    format!("{EXAMPLES}\n\n{}", exit::HELP)
}

const GLOBAL_HEADING: &str = "Options of every command";
const EXAMPLES: &str = "\
Examples:
  mainstay demo
  mainstay serve -- npx -y @modelcontextprotocol/server-filesystem /srv
  mainstay sessions list --state ready";
const SERVE_EXAMPLES: &str = "\
Examples:
  mainstay serve --config servers.json
  mainstay serve --name files --env LOG=debug -- npx -y @modelcontextprotocol/server-filesystem /srv
  mainstay serve --url https://example.com/mcp --header 'Authorization: Bearer ${TOKEN}'

The log goes to standard error.";

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_wrong_command_line_is_told_whole_with_its_tips() {
        let told = |words: &[&str]| {
            let failure = misspelt(&with_tip(Cli::try_parse_from(words).unwrap_err()).to_string());
            format!("{failure:?}")
        };
        let forgotten = told(&["mainstay", "serve", "npx", "-y", "x"]);
        assert!(forgotten.contains("'npx'") && forgotten.contains("-- npx"), "{forgotten}");
        let missing = told(&["mainstay", "sessions", "show"]);
        assert!(missing.contains("required") && missing.contains("REF"), "{missing}");
        assert!(Cli::try_parse_from(["mainstay", "sessions", "list", "--limit", "0"]).is_err());
        assert!(Cli::try_parse_from(["mainstay", "config", "check", "m.toml"]).is_ok());
    }

    #[test]
    fn everything_after_the_dashes_is_the_servers() {
        let parsed = Cli::try_parse_from(["mainstay", "serve", "--", "npx", "-y", "--json", "x"]).unwrap();
        let Command::Serve(args) = parsed.command else { unreachable!() };
        assert_eq!(args.command, ["npx", "-y", "--json", "x"]);
        assert!(!parsed.global.json);
        assert!(Cli::try_parse_from(["mainstay", "serve", "--url", "http://x/", "--", "y"]).is_err());
    }
}
