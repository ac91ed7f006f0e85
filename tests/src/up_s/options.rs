//! The switches of UP-S.

use crate::flags::Flags;
use crate::server::WorldSettings;
use std::path::PathBuf;
use std::time::Duration;

/// How the server is told to be. The default behaves well.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Where pid, group, start time and each line of standard input are written.
    pub trace: Option<PathBuf>,
    /// SIGTERM changes nothing.
    pub ignore_term: bool,
    /// The end of standard input changes nothing.
    pub ignore_eof: bool,
    /// The process ends so long after its start.
    pub exit_after: Option<Duration>,
    /// The process ends when it has answered a request of this method.
    pub exit_after_answer: Option<String>,
    /// The code of both.
    pub exit_code: u8,
    /// The process ends if the first line is not `initialize`.
    pub exit_on_first_noninit: bool,
    /// The process ends at once with this code, after a line on standard error.
    pub exit_before_output: Option<u8>,
    /// So many bytes go to standard error before each answer.
    pub stderr_bytes: usize,
    /// A line that is no JSON goes before each message.
    pub noise: bool,
    /// `initialize` gets progress for ever and no answer.
    pub progress_forever_on_init: bool,
    /// `initialize` gets no answer.
    pub mute_on_init: bool,
    /// A file that is locked exclusively while the process lives.
    pub lock: Option<PathBuf>,
    /// The server runs as a child of a shell that is a child of this process.
    pub grandchild: bool,
    /// The same, and the server leaves its process group by a session of its own.
    pub setsid: bool,
    /// A process that nobody waits for is left behind first: a daemon, forked twice, in a session of its own. `marked` keeps
    /// the environment, `bare` gets none.
    pub daemon: Option<String>,
    /// This is that process: it ignores SIGTERM and does nothing.
    pub as_daemon: bool,
    /// The protocol version that every `initialize` is answered with.
    pub protocol: Option<String>,
    /// Where `incr` adds its lines.
    pub incr_file: Option<PathBuf>,
    /// How many progress events `prog` sends after its response.
    pub late: u64,
    /// The name in `serverInfo`.
    pub name: Option<String>,
    /// The arguments as given, for the process below the shell.
    pub given: Vec<String>,
}

impl Options {
    /// Reads the arguments of a command line.
    ///
    /// # Errors
    /// A sentence that names the mistake.
    pub fn read(args: impl IntoIterator<Item = String>) -> Result<Options, String> {
        let given: Vec<String> = args.into_iter().collect();
        let flags = Flags::read(given.clone(), &SWITCHES, &VALUED)?;
        let path = |name: &str| flags.value(name).map(PathBuf::from);
        Ok(Options {
            trace: path("trace"),
            ignore_term: flags.has("ignore-term"),
            ignore_eof: flags.has("ignore-eof"),
            exit_after: flags.number("exit-after")?.map(Duration::from_millis),
            exit_after_answer: flags.value("exit-after-answer").map(str::to_owned),
            exit_code: flags.number("exit-code")?.unwrap_or(0),
            exit_on_first_noninit: flags.has("exit-on-first-noninit"),
            exit_before_output: flags.number("exit-before-output")?,
            stderr_bytes: flags.number("stderr-bytes")?.unwrap_or(0),
            noise: flags.has("noise"),
            progress_forever_on_init: flags.has("progress-forever-on-init"),
            mute_on_init: flags.has("mute-on-init"),
            lock: path("lock"),
            grandchild: flags.has("grandchild") || flags.has("setsid"),
            setsid: flags.has("setsid"),
            daemon: flags.value("daemon").map(str::to_owned),
            as_daemon: flags.has("as-daemon"),
            protocol: flags.value("protocol").map(str::to_owned),
            incr_file: path("incr-file"),
            late: flags.number("late")?.unwrap_or(0),
            name: flags.value("name").map(str::to_owned),
            given,
        })
    }

    /// What the tools need.
    #[must_use]
    pub fn world(&self) -> WorldSettings {
        WorldSettings {
            name: self.name.clone().unwrap_or_else(|| "up-s".to_owned()),
            incr_file: self.incr_file.clone(),
            protocol: self.protocol.clone(),
            late_events: self.late,
        }
    }
}

const SWITCHES: [&str; 9] = [
    "ignore-term",
    "ignore-eof",
    "exit-on-first-noninit",
    "noise",
    "progress-forever-on-init",
    "mute-on-init",
    "grandchild",
    "setsid",
    "as-daemon",
];
const VALUED: [&str; 12] = [
    "trace",
    "exit-after",
    "exit-after-answer",
    "exit-code",
    "exit-before-output",
    "stderr-bytes",
    "lock",
    "daemon",
    "protocol",
    "incr-file",
    "late",
    "name",
];

/// All arguments, for people.
pub const USAGE: &str = "usage: up-s [--trace FILE] [--ignore-term] [--ignore-eof] [--exit-after MS] [--exit-after-answer METHOD] \
[--exit-code N] [--exit-on-first-noninit] [--exit-before-output CODE] [--stderr-bytes N] [--noise] \
[--progress-forever-on-init] [--mute-on-init] [--lock FILE] [--grandchild] [--setsid] [--daemon marked|bare] [--as-daemon] [--protocol V] [--incr-file FILE] \
[--late N] [--name NAME]";
