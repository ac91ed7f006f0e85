//! Starting a child.

use std::error::Error as _;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::io::Errno;

use super::{Child, end, stdio};
use crate::identity::ProcessIdentity;
use crate::keeper::Keeper;
use crate::pidfd::PidFd;
use crate::record::{RecordFile, Subject};
use crate::state::StateError;
use crate::types::{CHILDREN_MAX, ChildId, LABEL_BYTES_MAX, MARKER_VARIABLE, Spawn, SpawnFailure};

/// A failure and what it was about.
pub(crate) type Failed = (SpawnFailure, String);

/// Starts the child and the tasks that serve it.
pub(crate) fn start(keeper: &Rc<Keeper>, spawn: &Spawn) -> Result<Rc<Child>, Failed> {
    check(spawn)?;
    if keeper.children_len() >= CHILDREN_MAX {
        return Err((SpawnFailure::TooMany, format!("{CHILDREN_MAX} are held")));
    }
    let id = keeper.next_child_id();
    // Should the keeper be killed between the start and its record, the marker is known at least.
    let announced = RecordFile::announce(keeper.records_dir(), id.get(), &spawn.marker).map_err(unrecorded)?;
    let started = launch(keeper, id, spawn);
    announced.remove();
    let (child, leader) = started?;
    let streams = stdio::Streams::start(keeper, &child);
    keeper.add_child(&child);
    tracing::info!(child = id.get(), name = child.name, pid = child.identity.pid(), "child started");
    tokio::task::spawn_local(end::supervise(Rc::clone(keeper), Rc::clone(&child), Some(leader), streams));
    Ok(child)
}

type Started = (Rc<Child>, end::Leader);

fn launch(keeper: &Keeper, id: ChildId, spawn: &Spawn) -> Result<Started, Failed> {
    let mut child = command_of(spawn).spawn().map_err(|error| failure_of(spawn, &error))?;
    // Nobody but this thread reaps, so the pid stays this child's whatever it does, and the entry in `/proc` stays.
    keeper.own(child.id());
    let held = hold(keeper, id, spawn, &mut child);
    if held.is_err() {
        // Not recorded, not watched: it must not live.
        let killed = child.kill().and_then(|()| child.wait());
        keeper.disown(child.id());
        if let Err(error) = killed {
            tracing::error!(%error, "a child that can't be watched can't be killed either");
        }
    }
    held
}

/// Takes hold of what was just started. It is known by its identity alone from then on.
fn hold(keeper: &Keeper, id: ChildId, spawn: &Spawn, child: &mut std::process::Child) -> Result<Started, Failed> {
    let pidfd = PidFd::open(child.id()).map_err(own)?;
    let identity = ProcessIdentity::of(child.id()).map_err(own)?;
    let identity = identity.ok_or_else(|| own(io::Error::other("the child has no entry in `/proc`")))?;
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let pipes = stdio::Pipes::watch(stdin.map(OwnedFd::from), stdout.map(OwnedFd::from), stderr.map(OwnedFd::from))
        .map_err(own)?;
    let record =
        RecordFile::record(keeper.records_dir(), Subject::Child, identity, &spawn.marker).map_err(unrecorded)?;
    let held = Child::new(id, spawn, identity, unix_ms());
    *held.pipes.borrow_mut() = pipes;
    Ok((Rc::new(held), end::Leader { pidfd, record }))
}

fn command_of(spawn: &Spawn) -> Command {
    let mut command = Command::new(&spawn.program);
    command.args(&spawn.args).env_clear();
    command.envs(spawn.env.iter().map(|(name, value)| (name, value))).env(MARKER_VARIABLE, &spawn.marker);
    if let Some(cwd) = &spawn.cwd {
        command.current_dir(cwd);
    }
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    command
}

fn check(spawn: &Spawn) -> Result<(), Failed> {
    let invalid = |what: &str| Err((SpawnFailure::Invalid, what.to_owned()));
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    if !(MARKER_BYTES_MIN..=MARKER_BYTES_MAX).contains(&spawn.marker.len()) || !spawn.marker.bytes().all(is_plain) {
        return invalid("marker");
    }
    if spawn.label.len() > LABEL_BYTES_MAX {
        return invalid("label");
    }
    // A name with `=` or an empty one would make another variable of it, or none.
    let is_variable = |name: &[u8]| !name.is_empty() && !name.contains(&b'=');
    if !spawn.env.iter().all(|(name, _)| is_variable(name.as_bytes())) {
        return invalid("environment variable name");
    }
    match &spawn.cwd {
        Some(cwd) if !cwd.is_dir() => Err((SpawnFailure::CwdMissing, quoted(cwd))),
        _ => Ok(()),
    }
}

fn failure_of(spawn: &Spawn, error: &io::Error) -> Failed {
    if Errno::from_io_error(error).is_some_and(|errno| EXHAUSTED.contains(&errno)) {
        return own(error);
    }
    let program = Path::new(&spawn.program);
    let known = [
        (io::ErrorKind::NotFound, SpawnFailure::ProgramNotFound),
        (io::ErrorKind::PermissionDenied, SpawnFailure::NotPermitted),
        (io::ErrorKind::InvalidInput, SpawnFailure::Invalid),
    ];
    match known.into_iter().find(|(kind, _)| *kind == error.kind()) {
        Some((_, failure)) => (failure, quoted(program)),
        None => (SpawnFailure::System, format!("{}: {error}", quoted(program))),
    }
}

/// What the keeper can't do for any child: it says nothing of this one.
fn own(error: impl std::error::Error) -> Failed {
    (SpawnFailure::Keeper, error.to_string())
}

/// Without a record a child might outlive its keeper, so it is not started. Where the record is to be is nobody's
/// business but the operator's, who finds it in the log.
fn unrecorded(error: StateError) -> Failed {
    tracing::error!(error = &error as &dyn std::error::Error, cause = error.source(), "a child can't be recorded");
    let detail = match error {
        StateError::Io { act, source, .. } => format!("could not {act} its record of the child: {source}"),
        StateError::Owner { .. } | StateError::Kind { .. } => "its records are not its own any more".to_owned(),
    };
    (SpawnFailure::Keeper, detail)
}

fn quoted(path: &Path) -> String {
    format!("`{}`", path.display())
}

fn unix_ms() -> u64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX)
}

/// What the system says when the machine, or this process, has no more to give.
const EXHAUSTED: [Errno; 4] = [Errno::AGAIN, Errno::MFILE, Errno::NFILE, Errno::NOMEM];

/// The shortest and the longest marker, in bytes. A short one might be met by chance.
const MARKER_BYTES_MIN: usize = 8;
const MARKER_BYTES_MAX: usize = 128;
