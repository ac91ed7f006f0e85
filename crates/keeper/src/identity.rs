//! Who a process is, beyond its number.
//!
//! A pid is a number that the kernel hands out again. A process is recognised by its pid, the moment it started
//! and the boot in which that happened; nothing is ever signalled on the strength of a pid alone.

use std::fmt;
use std::fs;
use std::io;
use std::sync::OnceLock;

use rustix::process::{Pid, PidfdFlags, pidfd_open, pidfd_send_signal};

pub use rustix::process::Signal;

/// A process, recognisable after its pid was given to somebody else: pid, start time and boot.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessIdentity {
    pid: u32,
    started_ticks: u64,
    boot: BootId,
}

impl ProcessIdentity {
    /// The identity of the process that has `pid` now, or `None` if there is none.
    ///
    /// A zombie still has its identity: its pid is taken until it is reaped.
    ///
    /// # Errors
    /// When `/proc` can't be read.
    pub fn of(pid: u32) -> io::Result<Option<Self>> {
        let Some(stat) = Stat::read(pid)? else {
            return Ok(None);
        };
        Ok(Some(Self { pid, started_ticks: stat.started_ticks, boot: BootId::current()? }))
    }

    /// The identity of the calling process.
    ///
    /// # Errors
    /// When `/proc` can't be read.
    pub fn of_self() -> io::Result<Self> {
        Self::of(std::process::id())?.ok_or_else(|| io::Error::other("the calling process has no entry in `/proc`"))
    }

    /// The identity made of its recorded parts; `None` if `pid` is no pid.
    #[must_use]
    pub fn from_parts(pid: u32, started_ticks: u64, boot: BootId) -> Option<Self> {
        raw_pid(pid)?;
        Some(Self { pid, started_ticks, boot })
    }

    /// The process number, for people and for looking at `/proc`.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The start time in clock ticks since boot (field 22 of `/proc/PID/stat`).
    #[must_use]
    pub fn started_ticks(&self) -> u64 {
        self.started_ticks
    }

    /// The boot in which the process was started.
    #[must_use]
    pub fn boot(&self) -> BootId {
        self.boot
    }

    /// Whether exactly this process still runs, or some thread of it: until its last thread is gone, it may hold a lock. A
    /// zombie without any doesn't; an unreadable `/proc` counts as not running.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        let Ok(Some(stat)) = Stat::read(self.pid) else {
            return false;
        };
        !stat.is_zombie && self.matches(&stat)
    }

    fn matches(&self, stat: &Stat) -> bool {
        stat.started_ticks == self.started_ticks && BootId::current().is_ok_and(|boot| boot == self.boot)
    }
}

impl fmt::Debug for ProcessIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ProcessIdentity({} since {} in {})", self.pid, self.started_ticks, self.boot)
    }
}

impl fmt::Display for ProcessIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.pid)
    }
}

/// Which boot of the machine a process belongs to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BootId([u8; 16]);

impl BootId {
    /// The boot that is running now.
    ///
    /// # Errors
    /// When `/proc/sys/kernel/random/boot_id` can't be read or isn't a UUID.
    pub fn current() -> io::Result<Self> {
        static CURRENT: OnceLock<BootId> = OnceLock::new();
        if let Some(boot) = CURRENT.get() {
            return Ok(*boot);
        }
        let text = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        let boot = Self::parse(text.trim())
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the boot id is no UUID"))?;
        Ok(*CURRENT.get_or_init(|| boot))
    }

    /// Reads the kernel's spelling: 32 hexadecimal digits with hyphens anywhere between them.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut digits = text.chars().filter(|c| *c != '-');
        let mut bytes = [0; 16];
        for byte in &mut bytes {
            let high = digits.next()?.to_digit(16)?;
            let low = digits.next()?.to_digit(16)?;
            *byte = u8::try_from(high * 16 + low).ok()?;
        }
        digits.next().is_none().then_some(Self(bytes))
    }

    /// The sixteen bytes of the UUID.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 16] {
        self.0
    }

    /// The boot id made of its sixteen bytes.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }
}

impl fmt::Display for BootId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for BootId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BootId({self})")
    }
}

/// Why a process could not be signalled.
#[derive(Debug, thiserror::Error)]
pub enum SignalError {
    /// That process is gone; whoever has its pid now was left alone.
    #[error("process {pid} does not run any more")]
    NotRunning {
        /// The recorded pid.
        pid: u32,
    },
    /// The process belongs to somebody else.
    #[error("no permission to signal process {pid}")]
    NotPermitted {
        /// The recorded pid.
        pid: u32,
    },
    /// The kernel refused for another reason.
    #[error("could not signal process {pid}")]
    Refused {
        /// The recorded pid.
        pid: u32,
        /// The reason.
        #[source]
        source: io::Error,
    },
}

/// Sends `signal` to exactly the process that `identity` names.
///
/// The process is pinned by a pidfd before its identity is compared, so that no other process can slip in under
/// the same pid between the comparison and the signal (requirement C6).
///
/// # Errors
/// [`SignalError::NotRunning`] if it has ended, even if its pid lives on as another process.
pub fn signal(identity: ProcessIdentity, signal: Signal) -> Result<(), SignalError> {
    let pid = identity.pid;
    let refused = |errno: rustix::io::Errno| match errno {
        rustix::io::Errno::SRCH => SignalError::NotRunning { pid },
        rustix::io::Errno::PERM => SignalError::NotPermitted { pid },
        other => SignalError::Refused { pid, source: other.into() },
    };
    let raw = raw_pid(pid).ok_or(SignalError::NotRunning { pid })?;
    let pidfd = pidfd_open(raw, PidfdFlags::empty()).map_err(refused)?;
    let stat = Stat::read(pid).map_err(|source| SignalError::Refused { pid, source })?;
    if !stat.is_some_and(|stat| identity.matches(&stat)) {
        return Err(SignalError::NotRunning { pid });
    }
    pidfd_send_signal(&pidfd, signal).map_err(refused)
}

/// `pid` in the form that system calls take; `None` for 0 and for what doesn't fit.
pub(crate) fn raw_pid(pid: u32) -> Option<Pid> {
    Pid::from_raw(i32::try_from(pid).ok()?)
}

/// What is used of `/proc/PID/stat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stat {
    /// Whether it has ended to its last thread, and nobody has asked how. A leader that has ended before its other threads
    /// looks the same by its state alone.
    pub(crate) is_zombie: bool,
    pub(crate) parent: u32,
    pub(crate) group: u32,
    pub(crate) started_ticks: u64,
}

impl Stat {
    /// Reads the entry of `pid`; `None` if there is no such process.
    pub(crate) fn read(pid: u32) -> io::Result<Option<Self>> {
        match fs::read(format!("/proc/{pid}/stat")) {
            Ok(bytes) => Self::parse(&bytes)
                .map(Some)
                .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "odd `/proc/PID/stat`")),
            Err(error) if is_gone(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        // The program's name stands in brackets and may itself hold brackets, spaces and line ends: only what
        // follows the last bracket has a fixed form. Its first field is number 3, the state.
        let after_name = bytes.iter().rposition(|byte| *byte == b')')? + 1;
        let text = std::str::from_utf8(bytes.get(after_name..)?).ok()?;
        let fields: Vec<&str> = text.split_ascii_whitespace().collect();
        let state = *fields.first()?;
        let threads: u64 = fields.get(17)?.parse().ok()?;
        Some(Self {
            is_zombie: matches!(state, "Z" | "X" | "x") && threads <= 1,
            parent: fields.get(1)?.parse().ok()?,
            group: fields.get(2)?.parse().ok()?,
            started_ticks: fields.get(19)?.parse().ok()?,
        })
    }
}

/// Whether reading in `/proc` failed because the process is gone.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_program_name_with_brackets_and_spaces_does_not_shift_the_fields() {
        let line = b"42 (a) b) (c\n) S 7 8 9 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 123456 9 9 9";
        let expected = Stat { is_zombie: false, parent: 7, group: 8, started_ticks: 123_456 };
        assert_eq!(Stat::parse(line), Some(expected));
        let ended = b"42 (a) Z 7 8 9 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 123456 9 9 9";
        assert_eq!(Stat::parse(ended), Some(Stat { is_zombie: true, ..expected }));
        let led_on = b"42 (a) Z 7 8 9 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 2 0 123456 9 9 9";
        assert_eq!(Stat::parse(led_on), Some(expected), "another thread lives");
    }

    #[test]
    fn junk_in_stat_is_no_process() {
        for junk in [&b""[..], b"1 (x", b"1 (x) S", b"1 (x) S a b c", b"\xff\xff)\xff"] {
            assert_eq!(Stat::parse(junk), None);
        }
    }

    #[test]
    fn a_boot_id_survives_being_written_and_read() {
        let boot = BootId::current().unwrap();
        assert_eq!(BootId::parse(&boot.to_string()), Some(boot));
        assert_eq!(BootId::parse("zz"), None);
        assert_eq!(BootId::parse(&format!("{boot}0")), None);
    }

    #[test]
    fn c6_a_recycled_pid_is_never_signalled() {
        let mut child = Command::new("sleep").arg("30").spawn().unwrap();
        let real = ProcessIdentity::of(child.id()).unwrap().unwrap();
        let older = ProcessIdentity { started_ticks: real.started_ticks - 1, ..real };
        let other_boot = ProcessIdentity { boot: BootId([7; 16]), ..real };
        for stale in [older, other_boot] {
            assert!(!stale.is_alive());
            assert!(matches!(signal(stale, Signal::KILL), Err(SignalError::NotRunning { .. })));
        }
        assert!(real.is_alive());
        signal(real, Signal::KILL).unwrap();
        child.wait().unwrap();
        assert!(!real.is_alive());
        assert!(matches!(signal(real, Signal::KILL), Err(SignalError::NotRunning { .. })));
    }

    #[test]
    fn a_zombie_is_not_alive_but_keeps_its_identity() {
        let mut child = Command::new("true").spawn().unwrap();
        let identity = ProcessIdentity::of(child.id()).unwrap().unwrap();
        let deadline = Instant::now() + BOUND;
        while identity.is_alive() {
            assert!(Instant::now() < deadline, "the child did not end");
            std::thread::yield_now();
        }
        assert_eq!(ProcessIdentity::of(child.id()).unwrap(), Some(identity));
        child.wait().unwrap();
    }

    #[test]
    fn c6_a_process_whose_leader_has_ended_is_alive_until_its_last_thread_is_gone() {
        let mut child = Command::new("python3").args(["-c", LED_ON]).stdin(Stdio::piped()).spawn().unwrap();
        let identity = ProcessIdentity::of(child.id()).unwrap().unwrap();
        let deadline = Instant::now() + BOUND;
        let state = || fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        while !state().contains(") Z ") {
            assert!(identity.is_alive());
            assert!(Instant::now() < deadline, "the leader did not end");
            std::thread::yield_now();
        }
        assert!(identity.is_alive(), "a thread is left");
        assert!(!Stat::read(child.id()).unwrap().unwrap().is_zombie);
        signal(identity, Signal::KILL).unwrap();
        child.wait().unwrap();
        assert!(!identity.is_alive());
    }

    /// Ends its first thread, and goes on in another one until its input ends.
    const LED_ON: &str = "import ctypes, os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0))).start()
ctypes.CDLL(None).pthread_exit(None)";
    const BOUND: Duration = Duration::from_secs(60);
}
