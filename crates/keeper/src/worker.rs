//! The worker's process.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::time::Duration;

use tokio::task::{JoinError, JoinHandle, spawn_local};
use tokio::time::{Instant, timeout};

use crate::identity::ProcessIdentity;
use crate::keeper::Keeper;
use crate::link::{Link, LinkError, serve};
use crate::pidfd::PidFd;
use crate::record::{RecordFile, Subject};
use crate::socket::Socket;

/// A running worker.
pub(crate) struct Worker {
    process: std::process::Child,
    pub(crate) pidfd: Rc<PidFd>,
    record: Option<RecordFile>,
    pub(crate) link: Rc<Link>,
    serving: JoinHandle<Result<(), LinkError>>,
    serving_is_over: bool,
    pub(crate) started_at: Instant,
}

impl Worker {
    /// Starts worker number `number` with one end of a socket as its standard input.
    pub(crate) fn start(keeper: &Rc<Keeper>, program: &Path, args: &[OsString], number: u64) -> io::Result<Self> {
        let (near, far) = UnixStream::pair()?;
        let link = Rc::new(Link::new(number, Socket::new(near)?));
        let mut command = Command::new(program);
        // A group of its own: what a terminal signals is the keeper, which then tells the worker to drain.
        command.args(args).stdin(Stdio::from(OwnedFd::from(far))).process_group(0);
        for name in SERVICE_VARIABLES {
            command.env_remove(name);
        }
        let mut process = command.spawn()?;
        // The parent's copy of the worker's end goes with the command; only the worker's death may close it last.
        drop(command);
        keeper.own(process.id());
        let held = PidFd::open(process.id()).and_then(|pidfd| Ok((pidfd, ProcessIdentity::of(process.id())?)));
        let (pidfd, identity) = match held {
            Ok((pidfd, Some(identity))) => (Rc::new(pidfd), identity),
            other => {
                process.kill()?;
                process.wait()?;
                keeper.disown(process.id());
                return Err(other.err().unwrap_or_else(|| io::Error::other("the worker has no entry in `/proc`")));
            }
        };
        // Without a record a worker that outlives its keeper is not ended by the next one; it ends by itself then.
        let record = RecordFile::record(keeper.records_dir(), Subject::Worker, identity, "")
            .inspect_err(|error| tracing::warn!(error = error as &dyn std::error::Error, "the worker is not recorded"))
            .ok();
        tracing::info!(worker = number, pid = process.id(), "worker started");
        let serving = spawn_local(serve(Rc::clone(keeper), Rc::clone(&link)));
        Ok(Self { process, pidfd, record, link, serving, serving_is_over: false, started_at: Instant::now() })
    }

    pub(crate) fn number(&self) -> u64 {
        self.link.worker_number
    }

    /// Has it killed.
    pub(crate) fn kill(&mut self) {
        if let Err(error) = self.process.kill() {
            tracing::error!(worker = self.number(), %error, "the worker can't be killed");
        }
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

    /// Reaps the dead worker and does what it had still said. Children are nobody's afterwards. What comes back is the
    /// exit code with which it gave up by itself, if it did.
    pub(crate) async fn bury(mut self, keeper: &Keeper) -> Option<i32> {
        if !self.serving_is_over {
            // Everything it sent is in the socket, and then comes the end, unless a process that it started still
            // holds the other end: nothing more is to be expected of that.
            match timeout(LAST_WORDS_BOUND, &mut self.serving).await {
                Ok(result) => drop(self.report(result)),
                Err(_) => self.serving.abort(),
            }
        }
        keeper.put_in_charge(None);
        let status = self.process.wait();
        keeper.disown(self.process.id());
        if let Some(record) = self.record.take() {
            record.remove();
        }
        let number = self.number();
        match status {
            Ok(status) if status.success() => {
                tracing::info!(worker = number, "worker exited");
                None
            }
            Ok(status) => {
                tracing::warn!(worker = number, code = status.code(), signal = status.signal(), "worker died");
                status.code()
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
