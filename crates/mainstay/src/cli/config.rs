//! `mainstay config`: check, show, schema. Also how every command reads its configuration.

use std::path::PathBuf;

use clap::Args;
use serde::{Deserialize, Serialize};

use super::api::Api;
use super::failure::{Failure, Fault};
use super::output::{Output, plain};
use super::{Place, ServeArgs, SourceArgs, Unseen};
use crate::config::{
    self, Diagnostic, ListenAddress, Loaded, Overrides, Single, Source, Surroundings, Template, environment, schema,
};

#[derive(Debug, Args)]
pub(super) struct CheckArgs {
    /// The same as `--config FILE`
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    #[command(flatten)]
    source: SourceArgs,
}

/// Says whether the configuration is right. What is missing on this machine is no fault of it, and told of.
pub(super) fn check(args: &CheckArgs, out: &Output) -> Result<(), Failure> {
    let source = match &args.file {
        Some(file) => Source::File(file.clone()),
        None => named_source(&args.source)?,
    };
    let Loaded { config, warnings } = load(&source, &args.source)?;
    if out.is_json() {
        return out.document(&Checked {
            valid: true,
            servers: config.servers.keys().map(ToString::to_string).collect(),
            warnings: warnings.iter().map(Fault::of).collect(),
        });
    }
    warn(&warnings, out);
    let names: Vec<_> = config.servers.keys().map(|name| name.as_str()).collect();
    let servers = if names.is_empty() { "no servers".to_owned() } else { names.join(", ") };
    out.line(&format!("the configuration is right ({servers})"))
}

#[derive(Debug, Args)]
pub(super) struct ShowArgs {
    #[command(flatten)]
    source: SourceArgs,
    /// Ask the running gateway, whatever the file says by now
    #[arg(long, conflicts_with_all = ["listen", "admin"])]
    running: bool,
}

/// Shows the configuration in force.
pub(super) fn show(args: &ShowArgs, out: &Output) -> Result<(), Failure> {
    if args.running {
        let SourceArgs { state_dir, config, .. } = &args.source;
        return show_running(&Place { state_dir: state_dir.clone(), config: config.clone() }, out);
    }
    let args = &args.source;
    let source = args.config.clone().map_or(Source::Nothing, Source::File);
    let Loaded { config, warnings } = load(&source, args)?;
    if out.is_json() {
        return out.document(&config.to_json());
    }
    warn(&warnings, out);
    out.line(config.to_toml().trim_end())
}

/// Shows every setting as the running gateway has it.
fn show_running(place: &Place, out: &Output) -> Result<(), Failure> {
    let running: Running = Api::find(place)?.get("/config")?;
    if out.is_json() {
        return out.document(&running);
    }
    let width = running.knobs.iter().map(|knob| knob.name.len()).max().unwrap_or(0);
    let lines = running.knobs.iter().map(|knob| format!("{:width$}  {}", plain(&knob.name), plain(&knob.value)));
    out.line(&lines.collect::<Vec<_>>().join("\n"))
}

/// Prints the schema of the file.
pub(super) fn schema(out: &Output) -> Result<(), Failure> {
    out.document(&schema::document())
}

/// The configuration of `serve`, from one of its three forms.
pub(super) fn of_serve(args: &ServeArgs) -> Result<Loaded, Failure> {
    let source = match (&args.url, args.command.as_slice(), &args.source.config) {
        (Some(url), _, None) => Source::Url(url.clone(), single(args)?),
        (None, [_, ..], None) => Source::Command(args.command.clone(), single(args)?),
        (None, [], _) if args.name.is_some() => {
            let cause = anyhow::anyhow!("`--name` is for the one server of `--url` or `-- CMD`");
            return Err(Failure::usage(cause).hint("in a file, the key under `servers` is the name"));
        }
        (None, [], _) => named_source(&args.source)?,
        (_, _, Some(file)) => {
            let cause = anyhow::anyhow!("servers are given twice: by `{}` and on the command line", file.display());
            return Err(Failure::usage(cause).hint("drop `--config` (or unset MAINSTAY_CONFIG), or the rest"));
        }
    };
    load(&source, &args.source)
}

/// What the command line says of its one server. What can't be read is not repeated: it may be a secret.
fn single(args: &ServeArgs) -> Result<Single, Failure> {
    let mut values = Vec::new();
    for Unseen(text) in &args.headers {
        let (name, value) = text.split_once(':').filter(|(name, _)| !name.trim().is_empty()).ok_or_else(|| {
            Failure::usage(anyhow::anyhow!("a `--header` has no name"))
                .hint("write `--header 'Authorization: Bearer ${TOKEN}'`")
        })?;
        values.push((name.trim().to_owned(), Template::new(value.trim())));
    }
    for Unseen(text) in &args.env {
        let (name, value) = match text.split_once('=') {
            Some((name, value)) => (name, Template::new(value)),
            None => (text.as_str(), Template::new(&format!("${{{text}}}"))),
        };
        values.push((name.to_owned(), value));
    }
    Ok(Single { name: args.name.clone(), values })
}

/// Tells what was tolerated.
pub(super) fn warn(warnings: &[Diagnostic], out: &Output) {
    for warning in warnings {
        let hint = warning.hint.as_ref().map(|hint| format!("\nhint: {hint}")).unwrap_or_default();
        out.note(&format!("warning: {warning}{hint}"));
    }
}

fn named_source(args: &SourceArgs) -> Result<Source, Failure> {
    let missing = || {
        Failure::usage(anyhow::anyhow!("no configuration is given"))
            .hint("one of: `--config FILE` (TOML or a client's mcpServers JSON), `--url URL`, `-- CMD ARGS…`")
    };
    args.config.clone().map(Source::File).ok_or_else(missing)
}

fn load(source: &Source, args: &SourceArgs) -> Result<Loaded, Failure> {
    let address = |given: Option<ListenAddress>| given.map(|ListenAddress(address)| address);
    let overrides = Overrides {
        listen: address(args.listen),
        admin_listen: address(args.admin),
        state_dir: args.state_dir.clone(),
    };
    with_surroundings(source, &overrides)
}

pub(super) fn with_surroundings(source: &Source, overrides: &Overrides) -> Result<Loaded, Failure> {
    let around = Surroundings {
        var: &environment::process,
        names: &environment::process_names(),
        root: rustix::process::geteuid().is_root(),
        working_dir: std::env::current_dir()?,
    };
    Ok(config::load(source, overrides, &around)?)
}

#[derive(Serialize)]
struct Checked<'a> {
    valid: bool,
    servers: Vec<String>,
    warnings: Vec<Fault<'a>>,
}

#[derive(Serialize, Deserialize)]
struct Running {
    knobs: Vec<Knob>,
}

#[derive(Serialize, Deserialize)]
struct Knob {
    name: String,
    value: String,
}
