//! What the service manager is told: systemd's notification protocol (`sd_notify(3)`), in datagrams.
//!
//! Who is not started by a service manager has no `NOTIFY_SOCKET`, and tells nobody anything.

use std::cell::Cell;
use std::io;
use std::net::SocketAddr as InternetAddress;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use mainstay_keeper::Stage;
use rustix::time::{ClockId, clock_gettime};

/// The way to the service manager.
pub(super) struct Notifier {
    socket: UnixDatagram,
    manager: SocketAddr,
    /// How often the manager wants to hear that all is well, if it does.
    watchdog: Option<Duration>,
    /// What is said of a gateway that serves.
    serving: String,
    is_ready: Cell<bool>,
    has_failed: Cell<bool>,
}

impl Notifier {
    /// The way to the service manager that `var`, the environment, names; `None` if there is none. A name that leads
    /// nowhere is logged: the gateway serves without it.
    pub(super) fn of(var: &dyn Fn(&str) -> Option<String>, own_pid: u32, mcp: InternetAddress) -> Option<Self> {
        let name = var(NOTIFY_SOCKET).filter(|name| !name.is_empty())?;
        let reached = address_of(&name).and_then(|manager| {
            let socket = UnixDatagram::unbound()?;
            // The keeper waits for nobody; a manager that does not listen misses a line.
            socket.set_nonblocking(true)?;
            Ok((socket, manager))
        });
        match reached {
            Ok((socket, manager)) => Some(Self {
                socket,
                manager,
                watchdog: watchdog(var, own_pid),
                serving: format!("serving on {mcp}"),
                is_ready: Cell::new(false),
                has_failed: Cell::new(false),
            }),
            Err(error) => {
                tracing::warn!(%error, "NOTIFY_SOCKET can't be used; the service manager is told nothing");
                None
            }
        }
    }

    /// How often [`Stage::Alive`] is to be told.
    pub(super) fn alive_every(&self) -> Duration {
        self.watchdog.map_or(ALIVE_EVERY, |wanted| (wanted / 2).clamp(ALIVE_EVERY_MIN, ALIVE_EVERY))
    }

    /// Passes on what happens. Never blocks.
    pub(super) fn tell(&self, stage: Stage) {
        let text = match stage {
            Stage::Ready | Stage::HandoverEnded => {
                self.is_ready.set(true);
                format!("READY=1\nSTATUS={}", self.serving)
            }
            Stage::HandoverBegun => {
                format!("RELOADING=1\nMONOTONIC_USEC={}\nSTATUS=handing over to another worker", monotonic_us())
            }
            Stage::Stopping => "STOPPING=1\nSTATUS=stopping: calls in flight may end".to_owned(),
            Stage::Alive => match self.alive() {
                Some(text) => text,
                None => return,
            },
        };
        if let Err(error) = self.socket.send_to_addr(text.as_bytes(), &self.manager)
            && !self.has_failed.replace(true)
        {
            tracing::warn!(%error, "the service manager can't be told what happens");
        }
    }

    /// What a keeper whose loop runs has to say.
    fn alive(&self) -> Option<String> {
        let mut lines = Vec::new();
        if self.watchdog.is_some() {
            lines.push("WATCHDOG=1".to_owned());
        }
        // A worker that waits for room on the disk is not to be cut short: clients wait in the socket's queue.
        if !self.is_ready.get() {
            lines.push(format!("EXTEND_TIMEOUT_USEC={}", START_EXTENSION.as_micros()));
            lines.push("STATUS=waiting for a worker to be ready".to_owned());
        }
        (!lines.is_empty()).then(|| lines.join("\n"))
    }
}

/// The address that `NOTIFY_SOCKET` spells: a path, or after `@` a name that is no file.
fn address_of(name: &str) -> io::Result<SocketAddr> {
    match name.strip_prefix('@') {
        Some(abstract_name) => SocketAddr::from_abstract_name(abstract_name),
        None if name.starts_with('/') => SocketAddr::from_pathname(name),
        None => Err(io::Error::new(io::ErrorKind::Unsupported, "neither a path nor an abstract name")),
    }
}

/// How often the manager wants to hear of this process, and of no other.
fn watchdog(var: &dyn Fn(&str) -> Option<String>, own_pid: u32) -> Option<Duration> {
    let of_another = var(WATCHDOG_PID).is_some_and(|pid| pid != own_pid.to_string());
    let micros: u64 = var(WATCHDOG_USEC).filter(|_| !of_another)?.parse().ok()?;
    (micros > 0).then_some(Duration::from_micros(micros))
}

/// The clock by which the manager tells this reload from an earlier one.
fn monotonic_us() -> u128 {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::try_from(now).unwrap_or_default().as_micros()
}

const NOTIFY_SOCKET: &str = "NOTIFY_SOCKET";
const WATCHDOG_USEC: &str = "WATCHDOG_USEC";
const WATCHDOG_PID: &str = "WATCHDOG_PID";
/// How often the keeper's loop is shown to run, unless the manager wants more.
const ALIVE_EVERY: Duration = Duration::from_secs(10);
/// However much the manager wants.
const ALIVE_EVERY_MIN: Duration = Duration::from_millis(50);
/// How much longer a start may take than it was granted, counted anew each time: some missed ones do no harm.
const START_EXTENSION: Duration = Duration::from_secs(45);

#[cfg(test)]
mod tests {
    use super::*;

    /// A service manager with its socket at `name`.
    fn manager(name: &str) -> UnixDatagram {
        let socket = UnixDatagram::bind_addr(&address_of(name).unwrap()).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        socket
    }

    fn heard(manager: &UnixDatagram) -> String {
        let mut bytes = [0; 1024];
        let length = manager.recv(&mut bytes).unwrap();
        String::from_utf8(bytes[..length].to_vec()).unwrap()
    }

    fn notifier(name: &str, watchdog_us: Option<&str>, watched: &str) -> Option<Notifier> {
        let (name, watched, watchdog_us) = (name.to_owned(), watched.to_owned(), watchdog_us.map(str::to_owned));
        let var = move |wanted: &str| match wanted {
            NOTIFY_SOCKET => Some(name.clone()),
            WATCHDOG_USEC => watchdog_us.clone(),
            WATCHDOG_PID => Some(watched.clone()),
            _ => None,
        };
        Notifier::of(&var, 42, ([127, 0, 0, 1], 7717).into())
    }

    #[test]
    fn o6_every_stage_is_told_at_a_path_and_at_an_abstract_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify").display().to_string();
        for name in [path, format!("@mainstay-notify-{}", std::process::id())] {
            let manager = manager(&name);
            let notifier = notifier(&name, Some("4000000"), "42").unwrap();
            assert_eq!(notifier.alive_every(), Duration::from_secs(2));
            notifier.tell(Stage::Alive);
            let waiting = heard(&manager);
            assert!(waiting.contains("WATCHDOG=1") && waiting.contains("EXTEND_TIMEOUT_USEC="), "{waiting}");
            notifier.tell(Stage::Ready);
            assert_eq!(heard(&manager), "READY=1\nSTATUS=serving on 127.0.0.1:7717");
            notifier.tell(Stage::Alive);
            assert_eq!(heard(&manager), "WATCHDOG=1");
            notifier.tell(Stage::HandoverBegun);
            assert!(heard(&manager).starts_with("RELOADING=1\nMONOTONIC_USEC="));
            notifier.tell(Stage::HandoverEnded);
            assert!(heard(&manager).starts_with("READY=1\n"));
            notifier.tell(Stage::Stopping);
            assert!(heard(&manager).starts_with("STOPPING=1\n"));
        }
    }

    #[test]
    fn o6_a_watchdog_of_another_process_is_not_fed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify").display().to_string();
        let manager = manager(&path);
        for (micros, watched) in [(Some("4000000"), "43"), (None, "42"), (Some("soon"), "42"), (Some("0"), "42")] {
            let notifier = notifier(&path, micros, watched).unwrap();
            assert_eq!(notifier.alive_every(), ALIVE_EVERY);
            notifier.tell(Stage::Ready);
            notifier.tell(Stage::Alive);
            notifier.tell(Stage::Stopping);
            assert!(heard(&manager).starts_with("READY=1"));
            assert!(heard(&manager).starts_with("STOPPING=1"), "{micros:?}, {watched}");
        }
    }

    #[test]
    fn o6_without_a_manager_nothing_is_said_and_one_that_went_away_is_no_trouble() {
        assert!(notifier("", None, "42").is_none());
        assert!(notifier("vsock:2:9", None, "42").is_none());
        let gone = notifier("/nowhere/at/all", Some("1"), "42").unwrap();
        assert_eq!(gone.alive_every(), ALIVE_EVERY_MIN);
        gone.tell(Stage::Ready);
        gone.tell(Stage::Stopping);
    }
}
