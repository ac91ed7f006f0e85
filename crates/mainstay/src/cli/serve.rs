//! `mainstay serve`: check everything, take the state directory and the ports, then be the keeper.

use std::ffi::OsString;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use mainstay_keeper::{Lock, LockError, Plan, Renewed};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::activation::Passed;
use super::announce::announce;
use super::failure::Failure;
use super::gateway::{self, Gateway, TokenFile};
use super::notify::Notifier;
use super::output::Output;
use super::{Global, ServeArgs, config, start_log, state_dir, tokens};
use crate::config::{Config, Loaded, StoreKind, environment};
use crate::runtime::build;
use crate::telemetry;

/// Runs the gateway until it is told to stop.
pub(super) fn run(args: ServeArgs, global: &Global, out: &Output) -> Result<(), Failure> {
    match Renewed::take() {
        Ok(Some(renewed)) => go_on(renewed, &args, global),
        Ok(None) => start(args, global, out),
        Err(unusable) => {
            let fault = unusable.error().to_string();
            Err(anyhow!(unusable.go_back()).context(format!("go on from the program before: {fault}")).into())
        }
    }
}

/// Goes on as the keeper that another program was in this process, with everything that it held.
fn go_on(renewed: Renewed, args: &ServeArgs, global: &Global) -> Result<(), Failure> {
    let prepared = start_log(global).and_then(|()| {
        let config = Config::from_snapshot(renewed.settings()).context("read the settings")?;
        let gateway = Gateway::read(&config.state_dir)?.context("the gateway has not published where it listens")?;
        let lock = renewed.lock().context("keep the state directory")?;
        Ok((plan(&config, &gateway, lock, worker_args(args, global))?, config))
    });
    match prepared {
        Ok((plan, config)) => keep(Plan { renewed: Some(renewed), ..plan }, &config),
        Err(failure) => {
            let error = anyhow!(renewed.go_back("it could not read what it was to go on from"));
            tracing::error!(error = %error, "could not go back to the program before");
            Err(failure)
        }
    }
}

/// Starts in the ordinary way.
fn start(mut args: ServeArgs, global: &Global, out: &Output) -> Result<(), Failure> {
    let passed = Passed::take()?;
    passed.outweigh(&mut args)?;
    let Loaded { mut config, warnings } = config::of_serve(&args)?;
    start_log(global)?;
    config::warn(&warnings, out);
    tokens::check(&config)?;
    if config.store == StoreKind::Memory {
        out.note("warning: `store = \"memory\"`: sessions end with the worker, whatever ends it");
    }
    config.state_dir = state_dir::prepare(&config.state_dir)?;
    let lock = lock(&config)?;
    // A gateway that was killed may have left a worker behind, which still holds the ports.
    mainstay_keeper::sweep(&config.state_dir).context("end what an earlier gateway left behind")?;
    let activated = passed.names();
    let mcp = passed.mcp.map_or_else(|| bind("listen", "--listen", config.listen), lengthen)?;
    let admin = passed.admin.map_or_else(|| bind("admin.listen", "--admin", config.admin.listen), lengthen)?;
    prepare_token(&config)?;
    raise_open_files();
    let keeper = std::process::id();
    let gateway = Gateway {
        mcp: mcp.local_addr()?,
        admin: admin.local_addr()?,
        keeper,
        activated,
        config: args.source.config.as_ref().and_then(|file| std::fs::canonicalize(file).ok()),
        token_file: config.admin.token_file.clone(),
    };
    gateway.write(&config.state_dir)?;
    announce_unless_closed(&config, &gateway, out);
    let listeners = vec![("mcp".to_owned(), mcp), ("admin".to_owned(), admin)];
    keep(Plan { listeners, ..plan(&config, &gateway, lock, worker_args(&args, global))? }, &config)
}

/// Everything but what differs between a start and going on.
fn plan(config: &Config, gateway: &Gateway, lock: Lock, worker_args: Vec<OsString>) -> Result<Plan, Failure> {
    let own_file = std::env::current_exe().context("find the program's own file")?;
    let running = Path::new("/proc/self/exe");
    let serve_args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let notifier = Notifier::of(&environment::process, std::process::id(), gateway.mcp);
    let drain_bound = DRAIN_BOUND.max(config.session.drain_grace + DRAIN_RESERVE);
    Ok(Plan {
        // Whatever has taken the place of the own file since is not adopted by the way (C9).
        worker: if running.exists() { running.to_owned() } else { own_file.clone() },
        worker_args,
        program: program(own_file),
        rehearse_args: rehearse_args(&serve_args),
        serve_args,
        version: build::version().to_owned(),
        listeners: Vec::new(),
        settings: config.to_snapshot(),
        state_dir: config.state_dir.clone(),
        lock: Arc::new(lock),
        drain_bound,
        handover_bound: HANDOVER_BOUND,
        leave_bound: crate::worker::STAY_MAX + LEAVE_RESERVE,
        renewed: None,
        alive_every: notifier.as_ref().map(Notifier::alive_every),
        notify: Box::new(move |stage| {
            if let Some(notifier) = &notifier {
                notifier.tell(stage);
            }
        }),
    })
}

/// Is the keeper, to its end.
fn keep(plan: Plan, config: &Config) -> Result<(), Failure> {
    let lock = Arc::clone(&plan.lock);
    let ended = mainstay_keeper::run(plan).context("run the gateway");
    // Under the lock: the next gateway may publish its own as soon as it has that.
    let withdrawn = Gateway::withdraw(&config.state_dir);
    drop(lock);
    ended?;
    Ok(withdrawn?)
}

/// The program that an upgrade takes: what goes by the name that this one was started by. Links are not resolved, since
/// another program may be put there by turning one.
fn program(own_file: PathBuf) -> PathBuf {
    let Some(name) = std::env::args_os().next().map(PathBuf::from) else {
        return own_file;
    };
    if name.components().count() > 1 {
        return std::path::absolute(name).unwrap_or(own_file);
    }
    let path = environment::process("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|folder| folder.join(&name)).find(|file| file.is_file()).unwrap_or(own_file)
}

/// The arguments of a rehearsal: those of `serve`, under another word.
fn rehearse_args(serve_args: &[OsString]) -> Vec<OsString> {
    let others = match serve_args.iter().position(|word| word == "serve") {
        Some(index) => serve_args[..index].iter().chain(&serve_args[index + 1..]),
        None => serve_args.iter().chain(&[]),
    };
    [OsString::from("rehearse")].iter().chain(others).cloned().collect()
}

fn lock(config: &Config) -> Result<Lock, Failure> {
    let shown = config.state_dir.display();
    mainstay_keeper::acquire_lock(&config.state_dir, &config.listen.to_string()).map_err(|error| {
        let held = matches!(error, LockError::Held { .. });
        let failure = Failure::from(anyhow!(error).context(format!("take the state directory `{shown}`")));
        match held {
            true => {
                failure.hint(format!("stop the other one with `mainstay stop --state-dir {shown}`, or choose another"))
            }
            false => failure,
        }
    })
}

/// Binds a listener whose queue is long enough for all clients to wait in while a worker is replaced.
fn bind(key: &str, flag: &str, address: SocketAddr) -> Result<TcpListener, Failure> {
    let mut bound = bind_once(address);
    for _ in 0..BIND_RETRIES_MAX {
        match &bound {
            // Given a moment: a gateway that was just stopped, or a connection that happens to use the port, lets go.
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => std::thread::sleep(BIND_PAUSE),
            Ok(_) | Err(_) => break,
        }
        bound = bind_once(address);
    }
    bound.map_err(|error| {
        let advice = [
            (io::ErrorKind::AddrInUse, "something listens there already: choose another port (0 takes a free one)"),
            (io::ErrorKind::PermissionDenied, "choose a port above 1023"),
            (io::ErrorKind::AddrNotAvailable, "choose an address of this machine"),
        ];
        let hint = advice.into_iter().find(|(kind, _)| *kind == error.kind());
        let failure = Failure::from(anyhow!(error).context(format!("listen on {address} (`{key}`)")));
        match hint {
            Some((_, hint)) => failure.hint(format!("{hint} with `{flag}`")),
            None => failure,
        }
    })
}

/// A socket of the service manager, with a queue as long as that of our own.
fn lengthen(listener: TcpListener) -> Result<TcpListener, Failure> {
    rustix::net::listen(&listener, LISTEN_BACKLOG).context("lengthen the queue of a socket of the service manager")?;
    Ok(listener)
}

fn bind_once(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    rustix::net::listen(&listener, LISTEN_BACKLOG)?;
    Ok(listener)
}

fn prepare_token(config: &Config) -> Result<(), Failure> {
    let file = config.admin_token_file();
    match gateway::ensure_token(config)? {
        TokenFile::Kept => {}
        TokenFile::Made => tracing::info!(file = %file.display(), "made an admin token"),
        TokenFile::Mended => {
            tracing::warn!(file = %file.display(), "others could read the admin token; made it private")
        }
        TokenFile::Open => tracing::warn!(file = %file.display(), "others can read the admin token"),
    }
    Ok(())
}

/// Each session may hold several descriptors, so the soft limit goes up to the hard one. Not being allowed to is no
/// reason not to serve.
fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    let raised = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    match raised {
        Ok(()) => tracing::debug!(limit = limit.maximum, "raised the limit of open files"),
        Err(error) => tracing::warn!(%error, limit = limit.current, "the limit of open files could not be raised"),
    }
}

fn announce_unless_closed(config: &Config, gateway: &Gateway, out: &Output) {
    if announce(config, gateway, out).is_err() {
        tracing::debug!("nobody reads the announcement");
    }
}

/// The worker logs as this process does, and knows where its settings came from.
fn worker_args(args: &ServeArgs, global: &Global) -> Vec<OsString> {
    let format = match global.log_format {
        telemetry::Format::Human => "human",
        telemetry::Format::Json => "json",
    };
    let filter = global.log.as_deref().unwrap_or(telemetry::FILTER_DEFAULT);
    let mut words: Vec<_> =
        ["worker", "--log-format", format, "--log", filter].into_iter().map(OsString::from).collect();
    if let Some(file) = args.source.config.as_ref().and_then(|file| std::path::absolute(file).ok()) {
        words.extend([OsString::from("--file"), file.into()]);
    }
    words
}

/// How often a port that is in use is tried again, and after which pause: a second in all.
const BIND_RETRIES_MAX: u32 = 10;
const BIND_PAUSE: Duration = Duration::from_millis(100);

/// How many connects wait while no worker accepts; the kernel caps it at `net.core.somaxconn`.
const LISTEN_BACKLOG: i32 = 4096;
/// How long a worker may take to drain before it is killed.
const DRAIN_BOUND: Duration = Duration::from_secs(10);
/// How long a worker may take to hand over before it is killed: longer than it waits for what it must not leave behind.
const HANDOVER_BOUND: Duration = Duration::from_secs(20);
/// What a worker that has handed over needs besides the time that its last calls may take.
const LEAVE_RESERVE: Duration = Duration::from_secs(10);
/// What a drain needs besides the grace of its calls.
const DRAIN_RESERVE: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t2_a_rehearsal_gets_what_serve_got() {
        let words = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
        for (serve, rehearse) in [
            (&["serve"][..], &["rehearse"][..]),
            (&["--log", "warn", "serve", "--", "serve", "x"], &["rehearse", "--log", "warn", "--", "serve", "x"]),
        ] {
            assert_eq!(rehearse_args(&words(serve)), words(rehearse));
        }
    }
}
