//! The process of UP-S: its place in the tree, its lock, its identity.

use super::Options;
use super::trace::Trace;
use std::fs::{File, TryLockError};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

/// Runs the server below a shell, so that it is a grandchild of this process, and ends as it ends.
///
/// With `--ignore-term` the shell ignores SIGTERM as well; this process does not, so that a stop that asks only the leader
/// leaves the rest behind.
pub(super) fn run_below_a_shell(options: &Options) -> std::io::Result<ExitCode> {
    let server = std::env::current_exe()?;
    let trap = if options.ignore_term { "trap '' TERM; " } else { "" };
    let apart = if options.setsid { "setsid " } else { "" };
    // The exit afterwards keeps the shell from becoming the server itself.
    let script = format!("{trap}{apart}\"$0\" \"$@\"; exit $?");
    let given = options.given.iter().filter(|arg| *arg != "--grandchild" && *arg != "--setsid");
    let status = Command::new("sh").arg("-c").arg(script).arg(server).args(given).status()?;
    let code = status.code().or_else(|| status.signal().map(|signal| SIGNALLED + signal)).unwrap_or(1);
    Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)))
}

/// Leaves a daemon behind, if that was ordered: the shell between is gone when this returns.
pub(super) fn leave_daemon(options: &Options) -> std::io::Result<()> {
    let Some(kind) = options.daemon.as_deref() else {
        return Ok(());
    };
    let clean = if kind == "bare" { "env -i " } else { "" };
    let script = format!("{clean}setsid \"$0\" \"$@\" >/dev/null 2>&1 &");
    let mut command = Command::new("sh");
    command.arg("-c").arg(script).arg(std::env::current_exe()?).arg("--as-daemon").stdin(Stdio::null());
    if let Some(trace) = &options.trace {
        command.arg("--trace").arg(trace);
    }
    command.status().map(drop)
}

/// Is the daemon. It ends by itself some time, lest a failed test leave it for ever.
pub(super) fn idle(options: &Options) -> std::io::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let _ignored = signal(SignalKind::terminate())?;
        let _written = Trace::open(options.trace.as_deref(), "daemon")?;
        tokio::time::sleep(DAEMON_LIFE).await;
        Ok(ExitCode::SUCCESS)
    })
}

/// What keeps the lock while it lives.
#[derive(Debug)]
pub(super) struct Held {
    _file: Option<File>,
}

/// Locks the file exclusively, if one is named; none if another process holds it.
pub(super) fn hold(path: Option<&Path>) -> std::io::Result<Option<Held>> {
    let Some(path) = path else {
        return Ok(Some(Held { _file: None }));
    };
    let file = File::options().create(true).append(true).open(path)?;
    match file.try_lock() {
        Ok(()) => Ok(Some(Held { _file: Some(file) })),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// The start time of a process in clock ticks since boot, as the kernel counts it; none if there is no such process.
/// With the pid it tells a process from a later one that was given the same pid.
#[must_use]
pub fn start_time(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may hold spaces and parentheses itself.
    let after_name = stat.rsplit_once(')')?.1;
    after_name.split_whitespace().nth(START_TIME_AFTER_NAME)?.parse().ok()
}

const SIGNALLED: i32 = 128;
const DAEMON_LIFE: Duration = Duration::from_secs(180);
/// `starttime` is field 22; the fields after the name begin with field 3.
const START_TIME_AFTER_NAME: usize = 19;
