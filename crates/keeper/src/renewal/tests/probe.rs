//! A test's view of a keeper of its own.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::play::STATE_DIR_VARIABLE;
use crate::identity::Stat;

/// How long anything may take that is expected to happen.
const BOUND: Duration = Duration::from_secs(60);

/// A keeper and a conversation with it.
pub(super) struct Probe {
    root: TempDir,
    keeper: Child,
    talk: BufReader<TcpStream>,
    /// Everything that children have said, by child and number. The same number never says two different things.
    said: BTreeMap<u64, BTreeMap<u64, Vec<u8>>>,
}

/// A child of a test.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spawned {
    pub(super) id: u64,
    pub(super) pid: u32,
}

impl Probe {
    pub(super) fn start() -> Self {
        let root = tempfile::tempdir().unwrap();
        let log = fs::File::create(root.path().join("log")).unwrap();
        let keeper = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "renewal::tests::play::play_keeper", "--nocapture", "--test-threads=1"])
            .env(STATE_DIR_VARIABLE, root.path())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .process_group(0)
            .spawn()
            .unwrap();
        let port: u16 = eventually("the keeper", || fs::read_to_string(root.path().join("port")).ok()?.parse().ok());
        let talk = connect(port);
        Self { root, keeper, talk, said: BTreeMap::new() }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    pub(super) fn pid(&self) -> u32 {
        self.keeper.id()
    }

    pub(super) fn say(&mut self, line: &str) {
        self.talk.get_mut().write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    pub(super) fn ask(&mut self, line: &str) -> String {
        self.say(line);
        let mut reply = String::new();
        self.talk.read_line(&mut reply).unwrap();
        assert!(reply.ends_with('\n'), "the keeper hung up at `{line}`");
        reply.pop();
        reply
    }

    /// Has the keeper executed anew in this manner, and talks to it again.
    pub(super) fn renew(&mut self, how: &str) {
        self.say(how);
        let mut reply = String::new();
        // The conversation ends with the execution, unless that failed.
        self.talk.read_line(&mut reply).unwrap();
        assert_eq!(reply, "");
        self.talk = connect(fs::read_to_string(self.path("port")).unwrap().parse().unwrap());
        self.ask("count");
    }

    pub(super) fn spawn(&mut self, script: &str) -> Spawned {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let marker = format!("renewal-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let reply = self.ask(&format!("spawn {marker} {script}"));
        let (id, pid) = reply.split_once(' ').unwrap();
        Spawned { id: id.parse().unwrap(), pid: pid.parse().unwrap() }
    }

    /// Takes what the child has said by now. Returns how it ended, if it has and that was not told yet.
    pub(super) fn drain(&mut self, child: Spawned) -> Option<String> {
        let head = self.ask(&format!("drain {}", child.id));
        let (count, exit) = head.split_once(' ').unwrap();
        for _ in 0..count.parse().unwrap() {
            let mut frame = String::new();
            self.talk.read_line(&mut frame).unwrap();
            let (number, len) = frame.trim_end().split_once(' ').unwrap();
            let mut bytes = vec![0; len.parse().unwrap()];
            self.talk.read_exact(&mut bytes).unwrap();
            let said = self.said.entry(child.id).or_default();
            let earlier = said.insert(number.parse().unwrap(), bytes.clone());
            assert!(earlier.is_none_or(|earlier| earlier == bytes), "frame {number} came again as another");
        }
        (!exit.is_empty()).then(|| exit.to_owned())
    }

    /// What the child has said so far, in the order of numbers, which have no gaps.
    pub(super) fn said(&self, child: Spawned) -> Vec<&[u8]> {
        let Some(said) = self.said.get(&child.id) else { return Vec::new() };
        assert_eq!(said.keys().next_back(), Some(&(said.len() as u64)), "numbers have gaps");
        said.values().map(Vec::as_slice).collect()
    }

    /// Waits until the child has said so many lines.
    pub(super) fn hear(&mut self, child: Spawned, lines: usize) -> Vec<&[u8]> {
        let deadline = Instant::now() + BOUND;
        while self.said.get(&child.id).map_or(0, BTreeMap::len) < lines {
            assert!(Instant::now() < deadline, "waited in vain for {lines} lines");
            self.drain(child);
            thread::sleep(Duration::from_millis(5));
        }
        self.said(child)
    }

    /// Waits for the child's end.
    pub(super) fn hear_exit(&mut self, child: Spawned) -> String {
        let deadline = Instant::now() + BOUND;
        loop {
            if let Some(exit) = self.drain(child) {
                return exit;
            }
            assert!(Instant::now() < deadline, "waited in vain for the end of a child");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// The children of the keeper, living ones and zombies. None once it is gone.
    pub(super) fn descendants(&self) -> Vec<u32> {
        let pids = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        pids.filter(|pid| matches!(Stat::read(*pid), Ok(Some(stat)) if stat.parent == self.pid())).collect()
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("{}", fs::read_to_string(self.path("log")).unwrap_or_default());
        }
        // Children lead groups of their own.
        let groups = self.descendants();
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
        for group in groups {
            if let Some(group) = crate::identity::raw_pid(group) {
                let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
            }
        }
    }
}

fn connect(port: u16) -> BufReader<TcpStream> {
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(BOUND)).unwrap();
    stream.set_nodelay(true).unwrap();
    BufReader::new(stream)
}

/// Waits, within a bound, until `look` finds what it looks for.
pub(super) fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + BOUND;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        thread::sleep(Duration::from_millis(5));
    }
}
