//! A test's view: a keeper of its own, and a conversation with whatever worker it has at the time.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use mainstay_keeper::{ProcessIdentity, Signal, signal};
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use tempfile::TempDir;

use crate::processes::STATE_DIR_VARIABLE;

/// How long anything in these tests may take that is expected to happen.
pub(crate) const BOUND: Duration = Duration::from_secs(20);
/// For what takes long by itself.
const PATIENCE: Duration = Duration::from_secs(120);

/// A state directory and the keeper on it.
pub(crate) struct Probe {
    root: TempDir,
    keeper: Option<Child>,
}

impl Probe {
    /// A keeper whose first worker serves.
    pub(crate) fn start() -> Self {
        let mut probe = Self::idle();
        probe.start_keeper();
        probe
    }

    /// A state directory without a keeper.
    pub(crate) fn idle() -> Self {
        Self { root: tempfile::tempdir().unwrap(), keeper: None }
    }

    /// What the next workers do: "", "crash" or "stubborn".
    pub(crate) fn set_mode(&self, mode: &str) {
        fs::write(self.path("mode"), mode).unwrap();
    }

    pub(crate) fn start_keeper(&mut self) {
        let _ = fs::remove_file(self.path("port"));
        self.write_program("running", &std::env::current_exe().unwrap());
        let log = fs::OpenOptions::new().append(true).create(true).open(self.path("keeper.log")).unwrap();
        let keeper = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "processes::play_keeper", "--nocapture", "--test-threads=1"])
            .env(STATE_DIR_VARIABLE, self.root.path())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        self.keeper = Some(keeper);
        self.read("port");
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    pub(crate) fn state_dir(&self) -> &Path {
        self.root.path()
    }

    /// The contents of a file, once it is there.
    pub(crate) fn read(&self, name: &str) -> String {
        eventually(name, || fs::read_to_string(self.path(name)).ok())
    }

    /// How many workers were started.
    pub(crate) fn starts(&self) -> usize {
        fs::read_to_string(self.path("starts")).unwrap_or_default().lines().count()
    }

    pub(crate) fn keeper_pid(&self) -> u32 {
        self.keeper.as_ref().unwrap().id()
    }

    pub(crate) fn signal_keeper(&self, how: Signal) {
        signal(ProcessIdentity::of(self.keeper_pid()).unwrap().unwrap(), how).unwrap();
    }

    /// Bounds how many descriptors the keeper itself may have.
    pub(crate) fn limit_descriptors(&self, max: u64) {
        let pid = Pid::from_raw(self.keeper_pid().try_into().unwrap());
        let limit = Rlimit { current: Some(max), maximum: getrlimit(Resource::Nofile).maximum };
        prlimit(pid, Resource::Nofile, limit).unwrap();
    }

    /// Waits for the keeper's end.
    pub(crate) fn wait_for_keeper(&mut self) {
        let mut keeper = self.keeper.take().unwrap();
        eventually("the keeper's end", || keeper.try_wait().unwrap());
    }

    pub(crate) fn kill_keeper(&mut self) {
        self.signal_keeper(Signal::KILL);
        self.wait_for_keeper();
    }

    /// A conversation with the worker of the moment; if there is none, it waits in the backlog.
    pub(crate) fn connect(&self) -> Talk {
        let port: u16 = self.read("port").parse().unwrap();
        let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.set_read_timeout(Some(BOUND)).unwrap();
        stream.set_nodelay(true).unwrap();
        Talk { reader: BufReader::new(stream.try_clone().unwrap()), writer: stream }
    }

    /// A conversation with a worker after number `number`.
    pub(crate) fn connect_beyond(&self, number: u64) -> Talk {
        eventually("the next worker", || self.try_connect_beyond(number))
    }

    /// The same, for a worker that takes long to come.
    pub(crate) fn connect_patiently(&self, number: u64) -> Talk {
        let deadline = Instant::now() + PATIENCE;
        loop {
            // One that was only just stopped may answer for a while.
            if let Some(talk) = self.try_connect_beyond(number) {
                return talk;
            }
            assert!(Instant::now() < deadline, "waited in vain for the next worker");
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn try_connect_beyond(&self, number: u64) -> Option<Talk> {
        // One that is leaving, or stuck, may hang up on whoever it has just accepted.
        let mut talk = self.connect();
        let reply = talk.try_ask("worker")?;
        (reply.split_once(' ').unwrap().1 != number.to_string()).then_some(talk)
    }

    /// What a rehearsal answers: these settings.
    pub(crate) fn offer_settings(&self, settings: &str) {
        self.set_rehearsal(&format!("printf '%s' '{settings}'"));
    }

    /// Whether that is what rehearsals offer.
    pub(crate) fn offers(&self, settings: &str) -> bool {
        fs::read_to_string(self.path("rehearsal")).unwrap().ends_with(&format!("'{settings}'"))
    }

    /// What a rehearsal does.
    pub(crate) fn set_rehearsal(&self, script: &str) {
        fs::write(self.path("rehearsal.draft"), script).unwrap();
        fs::rename(self.path("rehearsal.draft"), self.path("rehearsal")).unwrap();
    }

    /// Has the file `name` stand for `program`, which is what a keeper calls a program.
    pub(crate) fn write_program(&self, name: &str, program: &Path) {
        let (dir, program) = (self.root.path().display(), program.display());
        let script = format!(
            "#!/bin/sh\ncase $1 in\nrehearse) cd '{dir}'; . ./rehearsal;;\n*) exec '{program}' \"$@\";;\nesac\n"
        );
        let draft = self.path("program.draft");
        in_another_process("printf %s \"$2\" > \"$1\" && chmod 755 \"$1\"", [draft.as_os_str(), OsStr::new(&script)]);
        fs::rename(draft, self.path(name)).unwrap();
    }

    /// Another file with the same program, of that version.
    pub(crate) fn copy_program(&self, version: &str) -> PathBuf {
        let file = self.path(&format!("program-{version}"));
        let program = std::env::current_exe().unwrap();
        in_another_process("cp \"$1\" \"$2\"", [program.as_os_str(), file.as_os_str()]);
        file
    }

    /// What the keeper has logged so far.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.path("keeper.log")).unwrap_or_default()
    }

    /// Waits until the keeper has logged `text`.
    pub(crate) fn await_log(&self, text: &str) {
        eventually(text, || self.log().contains(text).then_some(()));
    }

    /// Kills the worker and talks to the next one.
    pub(crate) fn kill_worker(&self, talk: &mut Talk) -> Talk {
        let (pid, number) = talk.worker();
        signal(ProcessIdentity::of(pid).unwrap().unwrap(), Signal::KILL).unwrap();
        let mut next = self.connect();
        assert_eq!(next.worker().1, number + 1);
        next
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        if let Some(mut keeper) = self.keeper.take() {
            let identity = ProcessIdentity::of(keeper.id()).unwrap().unwrap();
            for _ in 0..2 {
                let _ = signal(identity, Signal::TERM);
            }
            let deadline = Instant::now() + BOUND;
            while keeper.try_wait().unwrap().is_none() {
                if Instant::now() > deadline {
                    let _ = keeper.kill();
                }
                thread::sleep(Duration::from_millis(10));
            }
        }
        if thread::panicking() {
            eprintln!("{}", fs::read_to_string(self.path("keeper.log")).unwrap_or_default());
        }
    }
}

/// A conversation with one worker.
pub(crate) struct Talk {
    reader: BufReader<TcpStream>,
    writer: TcpStream,
}

impl Talk {
    pub(crate) fn ask(&mut self, line: &str) -> String {
        self.say(line);
        self.listen()
    }

    /// The same; `None` if the worker hangs up.
    fn try_ask(&mut self, line: &str) -> Option<String> {
        self.writer.write_all(format!("{line}\n").as_bytes()).ok()?;
        let mut reply = String::new();
        self.reader.read_line(&mut reply).ok()?;
        reply.pop().map(|_| reply)
    }

    pub(crate) fn say(&mut self, line: &str) {
        self.writer.write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    pub(crate) fn listen(&mut self) -> String {
        let mut reply = String::new();
        self.reader.read_line(&mut reply).unwrap();
        assert!(reply.ends_with('\n'), "the worker hung up");
        reply.pop();
        reply
    }

    /// The worker's pid and number.
    pub(crate) fn worker(&mut self) -> (u32, u64) {
        let reply = self.ask("worker");
        let (pid, number) = reply.split_once(' ').unwrap();
        (pid.parse().unwrap(), number.parse().unwrap())
    }

    /// Starts a shell script as a child.
    pub(crate) fn spawn(&mut self, script: &str) -> Spawned {
        let marker = marker();
        let reply = self.ask(&format!("spawn {marker} {script}"));
        let (id, pid) = reply.split_once(' ').unwrap();
        Spawned {
            id: id.parse().unwrap_or_else(|_| panic!("{reply}")),
            pid: pid.parse().unwrap_or_else(|_| panic!("{reply}")),
            marker,
        }
    }

    pub(crate) fn write(&mut self, child: &Spawned, text: &str) -> String {
        self.ask(&format!("write {} {text}", child.id))
    }

    pub(crate) fn next(&mut self, child: &Spawned) -> String {
        self.ask(&format!("next {}", child.id))
    }

    pub(crate) fn acknowledge(&mut self, child: &Spawned, through: u64) {
        self.ask(&format!("acknowledge {} {through}", child.id));
        // Whatever is asked later is answered after the acknowledgement has arrived.
        self.stderr(child);
    }

    /// Deals with one frame, whatever came before it.
    pub(crate) fn acknowledge_only(&mut self, child: &Spawned, number: u64) {
        self.ask(&format!("acknowledge-only {} {number}", child.id));
        self.stderr(child);
    }

    /// Hands a call over.
    pub(crate) fn call(&mut self, child: &Spawned, tag: u64, text: &str) -> String {
        self.ask(&format!("call {} {tag} {text}", child.id))
    }

    pub(crate) fn settle(&mut self, child: &Spawned, tag: u64) {
        self.ask(&format!("settle {} {tag}", child.id));
        // Whatever is asked later is answered after the settlement has arrived.
        self.stderr(child);
    }

    /// The calls of the child that were open when the worker attached.
    pub(crate) fn open(&mut self, child: &Spawned) -> String {
        self.ask(&format!("open {}", child.id))
    }

    pub(crate) fn stderr(&mut self, child: &Spawned) -> String {
        self.ask(&format!("stderr {}", child.id))
    }
}

/// A child of a test.
pub(crate) struct Spawned {
    pub(crate) id: u64,
    pub(crate) pid: u32,
    pub(crate) marker: String,
}

/// A marker that no other child has.
pub(crate) fn marker() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("probe-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// The living processes that have the marker in their environment.
pub(crate) fn marked(marker: &str) -> Vec<u32> {
    let entry = format!("MAINSTAY_CHILD={marker}");
    let mut pids = Vec::new();
    for process in fs::read_dir("/proc").unwrap() {
        let path = process.unwrap().path();
        let Some(pid) = path.file_name().and_then(|name| name.to_str()?.parse().ok()) else { continue };
        let environment = fs::read(path.join("environ")).unwrap_or_default();
        if environment.split(|byte| *byte == 0).any(|found| found == entry.as_bytes()) {
            pids.push(pid);
        }
    }
    pids
}

/// Waits, within a bound, until `look` finds what it looks for.
pub(crate) fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + BOUND;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// A threshold that holds on an idle machine, for this one as busy as it is: where each process has a part of a core only,
/// everything takes longer by that much.
pub(crate) fn stretched(threshold: Duration) -> Duration {
    let told = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    // The mean of the last minute, and how many run at this moment.
    let mean = told.split(' ').next().and_then(|mean| mean.parse::<f64>().ok());
    let running = told.split(' ').nth(3).and_then(|tasks| tasks.split('/').next()?.parse::<f64>().ok());
    let busy = mean.unwrap_or(0.0).max(running.unwrap_or(0.0));
    let cores =
        std::thread::available_parallelism().map_or(1.0, |cores| f64::from(u32::try_from(cores.get()).unwrap_or(1)));
    threshold.mul_f64(1.0 + busy / cores)
}

/// Has a shell write a program. What this process has open for writing is inherited by whatever another thread starts
/// just then, and as long as anybody has a program open for writing it can't be executed.
fn in_another_process(script: &str, arguments: [&OsStr; 2]) {
    assert!(Command::new("sh").args(["-c", script, "sh"]).args(arguments).status().unwrap().success());
}
