//! Processes, as the kernel shows them under `/proc`.

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::collections::BTreeSet;

/// One process for certain: a later one with the same pid is another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Proc {
    /// The process id.
    pub pid: u32,
    /// When it started, in clock ticks since boot.
    pub start: u64,
}

impl Proc {
    /// The process that has this pid now.
    #[must_use]
    pub fn of(pid: u32) -> Option<Proc> {
        Some(Proc { pid, start: Stat::read(pid)?.start })
    }

    /// Whether it still runs, or some thread of it. A zombie without any has let go of all that it held.
    #[must_use]
    pub fn is_alive(self) -> bool {
        Stat::read(self.pid)
            .is_some_and(|stat| stat.start == self.start && (stat.threads > 1 || !matches!(stat.state, 'Z' | 'X')))
    }

    /// Whether it has ended and nobody has asked how.
    #[must_use]
    pub fn is_zombie(self) -> bool {
        Stat::read(self.pid).is_some_and(|stat| stat.start == self.start && stat.state == 'Z')
    }

    /// Sends a signal to exactly this process. Returns whether it was there to get it.
    pub fn signal(self, signal: Signal) -> bool {
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else {
            return false;
        };
        // The descriptor holds on to the process; only then is its identity looked at.
        let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else {
            return false;
        };
        self.is_alive() && pidfd_send_signal(&process, signal).is_ok()
    }

    /// Kills it with SIGKILL.
    pub fn kill(self) -> bool {
        self.signal(Signal::KILL)
    }

    /// Its arguments, the program first; empty if it is gone.
    #[must_use]
    pub fn arguments(self) -> Vec<String> {
        let raw = std::fs::read(format!("/proc/{}/cmdline", self.pid)).unwrap_or_default();
        raw.split(|byte| *byte == 0)
            .map(|argument| String::from_utf8_lossy(argument).into_owned())
            .filter(|argument| !argument.is_empty())
            .collect()
    }

    /// The environment with which it was started, as `NAME=value`; empty if it is gone.
    #[must_use]
    pub fn environment(self) -> Vec<String> {
        let raw = std::fs::read(format!("/proc/{}/environ", self.pid)).unwrap_or_default();
        raw.split(|byte| *byte == 0)
            .map(|entry| String::from_utf8_lossy(entry).into_owned())
            .filter(|entry| !entry.is_empty())
            .collect()
    }

    /// Resident memory in bytes; 0 if it is gone.
    #[must_use]
    pub fn resident_bytes(self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.split_whitespace().next()).and_then(|kib| kib.parse::<u64>().ok());
        kib.unwrap_or(0) * 1024
    }

    /// How many descriptors it has open; 0 if it is gone.
    #[must_use]
    pub fn open_files(self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid)).map_or(0, Iterator::count)
    }
}

/// The children of a process, zombies included.
#[must_use]
pub fn children(pid: u32) -> BTreeSet<Proc> {
    everybody()
        .into_iter()
        .filter(|(_, stat)| stat.parent == pid)
        .map(|(pid, stat)| Proc { pid, start: stat.start })
        .collect()
}

/// All living processes below a process.
#[must_use]
pub fn descendants(pid: u32) -> BTreeSet<Proc> {
    let mut found = everybody_below(pid);
    found.retain(|process| process.is_alive());
    found
}

/// All zombies below a process.
#[must_use]
pub fn zombies(pid: u32) -> BTreeSet<Proc> {
    let mut found = everybody_below(pid);
    found.retain(|process| process.is_zombie());
    found
}

fn everybody_below(pid: u32) -> BTreeSet<Proc> {
    let everybody = everybody();
    let mut found = BTreeSet::new();
    let mut parents = vec![pid];
    while let Some(parent) = parents.pop() {
        for (pid, stat) in everybody.iter().filter(|(_, stat)| stat.parent == parent) {
            if found.insert(Proc { pid: *pid, start: stat.start }) {
                parents.push(*pid);
            }
        }
    }
    found
}

struct Stat {
    state: char,
    parent: u32,
    threads: u64,
    start: u64,
}

impl Stat {
    fn read(pid: u32) -> Option<Stat> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name, in parentheses, may hold spaces and parentheses itself.
        let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
        let state = fields.next()?.chars().next()?;
        let parent = fields.next()?.parse().ok()?;
        // State and parent are fields 3 and 4, the number of threads is field 20, the start time field 22.
        let threads = fields.nth(15)?.parse().ok()?;
        let start = fields.nth(1)?.parse().ok()?;
        Some(Stat { state, parent, threads, start })
    }
}

fn everybody() -> Vec<(u32, Stat)> {
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter_map(|pid| Some((pid, Stat::read(pid)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::{Proc, descendants};
    use crate::up_s::start_time;
    use std::process::{Command, Stdio};

    #[test]
    fn c6_a_process_is_its_pid_and_its_start_time() {
        let me = Proc::of(std::process::id()).expect("this process is there");
        assert!(me.is_alive());
        assert_eq!(Some(me.start), start_time(me.pid));
        let another = Proc { start: me.start + 1, ..me };
        assert!(!another.is_alive());
        assert!(!another.kill(), "a recycled pid is never signalled");
    }

    #[test]
    fn a_child_is_found_below_and_a_zombie_is_not_alive() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().expect("cat starts");
        let process = Proc::of(child.id()).expect("it is there");
        assert!(descendants(std::process::id()).contains(&process));
        assert!(process.kill());
        assert!(crate::wait::wait_blocking(std::time::Duration::from_secs(5), || process.is_zombie()));
        assert!(!process.is_alive());
        child.wait().expect("it has ended");
    }
}
