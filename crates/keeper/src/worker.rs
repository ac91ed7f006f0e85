//! The worker's process.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::time::Duration;

use tokio::task::{JoinError, JoinHandle, spawn_local};
use tokio::time::{Instant, timeout};

use crate::identity::ProcessIdentity;
use crate::keeper::Keeper;
use crate::link::{Link, LinkError, see_off, serve};
use crate::pidfd::{PidFd, Status};
use crate::process::Process;
use crate::socket::Socket;

/// A running worker.
pub(crate) struct Worker {
    process: Process,
    pub(crate) link: Rc<Link>,
    serving: JoinHandle<Result<(), LinkError>>,
    serving_is_over: bool,
    pub(crate) started_at: Instant,
}

/// How workers and rehearsals are started.
pub(crate) struct Start {
    /// The worker's executable.
    pub(crate) program: PathBuf,
    /// The name that the process goes by.
    pub(crate) name: OsString,
    pub(crate) args: Vec<OsString>,
}

impl Start {
    /// The command, without what a service manager says to the keeper alone. In a group of its own: what a terminal
    /// signals is the keeper, which then tells the others what to do.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.arg0(&self.name).args(&self.args).process_group(0);
        for name in SERVICE_VARIABLES {
            command.env_remove(name);
        }
        command
    }
}

impl Worker {
    /// Starts worker number `number` with one end of a socket as its standard input.
    pub(crate) fn start(keeper: &Rc<Keeper>, start: &Start, number: u64) -> io::Result<Self> {
        let (near, far) = UnixStream::pair()?;
        let link = Rc::new(Link::new(number, Socket::new(near)?));
        let mut command = start.command();
        command.stdin(Stdio::from(OwnedFd::from(far)));
        let started = command.spawn()?;
        // The parent's copy of the worker's end goes with the command; only the worker's death may close it last.
        drop(command);
        let process = Process::hold(keeper, started)?;
        tracing::info!(worker = number, pid = process.identity.pid(), "worker started");
        let serving = spawn_local(serve(Rc::clone(keeper), Rc::clone(&link)));
        Ok(Self { process, link, serving, serving_is_over: false, started_at: Instant::now() })
    }

    /// A worker that had handed over before the keeper was renewed. What it still says is read and ignored; it is told
    /// nothing any more but to drain, and not even that if the renewal has cut a message to it short.
    pub(crate) fn leaving(
        keeper: &Rc<Keeper>,
        identity: ProcessIdentity,
        number: u64,
        socket: OwnedFd,
        is_mid_message: bool,
    ) -> io::Result<Self> {
        let process = Process::existing(keeper, identity)?;
        let link = Rc::new(Link::leaving(number, Socket::new(socket.into())?));
        let serving = spawn_local(see_off(Rc::clone(keeper), Rc::clone(&link), is_mid_message));
        Ok(Self { process, link, serving, serving_is_over: false, started_at: Instant::now() })
    }

    pub(crate) fn number(&self) -> u64 {
        self.link.worker_number
    }

    pub(crate) fn identity(&self) -> ProcessIdentity {
        self.process.identity
    }

    /// For whoever waits for its end.
    pub(crate) fn pidfd(&self) -> Rc<PidFd> {
        Rc::clone(&self.process.pidfd)
    }

    /// Has it killed.
    pub(crate) fn kill(&self) {
        self.process.kill();
    }

    /// Returns once the socket is served to its end: `true` if the worker may be left to exit. Never again after that.
    pub(crate) async fn link_over(&mut self) -> bool {
        if self.serving_is_over {
            return std::future::pending().await;
        }
        let result = (&mut self.serving).await;
        self.serving_is_over = true;
        self.report(result)
    }

    /// Reaps the dead worker and does what it had still said. Children are nobody's afterwards, if they were its. What
    /// comes back is the exit code with which it gave up by itself, if it did.
    pub(crate) async fn bury(mut self, keeper: &Keeper) -> Option<i32> {
        if !self.serving_is_over {
            // Everything it sent is in the socket, and then comes the end, unless a process that it started still
            // holds the other end: nothing more is to be expected of that.
            match timeout(LAST_WORDS_BOUND, &mut self.serving).await {
                Ok(result) => drop(self.report(result)),
                Err(_) => self.serving.abort(),
            }
        }
        keeper.dismiss(&self.link);
        let number = self.number();
        match self.process.reap(keeper) {
            Ok(Status { code: Some(0), .. }) => {
                tracing::info!(worker = number, "worker exited");
                None
            }
            Ok(Status { code, signal }) => {
                tracing::warn!(worker = number, code, signal, "worker died");
                code
            }
            Err(error) => {
                tracing::error!(worker = number, %error, "worker died, nobody knows how");
                None
            }
        }
    }

    fn report(&self, result: Result<Result<(), LinkError>, JoinError>) -> bool {
        let error: &dyn std::error::Error = match &result {
            Ok(Ok(())) => return true,
            // A worker that is killed while something is on its way to it leaves a reset, which is as good as an end.
            Ok(Err(LinkError::Socket(error))) if error.kind() == io::ErrorKind::ConnectionReset => return true,
            Ok(Err(error)) => error,
            Err(error) => error,
        };
        tracing::warn!(worker = self.number(), error, "lost the worker");
        // A worker that was refused was told so, and has something to say about it before it exits.
        matches!(result, Ok(Err(LinkError::Version { .. })))
    }
}

/// What a service manager says to the keeper, and to no other process.
pub(crate) const SERVICE_VARIABLES: [&str; 6] =
    ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"];

/// How long a dead worker's socket is read for what it had still said.
const LAST_WORDS_BOUND: Duration = Duration::from_millis(100);
