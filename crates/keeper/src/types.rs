//! What both ends speak of: children, what is asked of them and how they end.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

use bytes::Bytes;

use crate::protocol::{FRAME_BYTES_MAX, LIST_LEN_MAX};

/// A child's number, never used again within the keeper's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChildId(u64);

impl ChildId {
    /// The id with this number.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for ChildId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A call's name in the keeper's custody: bytes that mean nothing to the keeper and everything to workers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallTag([u8; CALL_TAG_BYTES]);

impl CallTag {
    /// The tag with these bytes.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; CALL_TAG_BYTES]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    #[must_use]
    pub const fn to_bytes(self) -> [u8; CALL_TAG_BYTES] {
        self.0
    }
}

impl fmt::Debug for CallTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CallTag({:032x})", u128::from_be_bytes(self.0))
    }
}

/// What a child is to be started as (requirement C7: it gets this environment and no other).
#[derive(Clone, PartialEq, Eq)]
pub struct Spawn {
    /// Opaque to the keeper, given back to every later worker; at most [`LABEL_BYTES_MAX`].
    pub label: Vec<u8>,
    /// Names the log file of the child's stderr; characters that don't suit a file name are replaced.
    pub name: String,
    /// The program: a path, or a name that is looked up in the `PATH` of `env`.
    pub program: OsString,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// Its whole environment, [`MARKER_VARIABLE`] excepted.
    pub env: Vec<(OsString, OsString)>,
    /// Its working directory; without one the keeper's.
    pub cwd: Option<PathBuf>,
    /// The value of [`MARKER_VARIABLE`] by which everything the child starts is found again. Must be unique in the
    /// machine's life: 8 to 128 of `A-Z a-z 0-9 - _`.
    pub marker: String,
}

impl Spawn {
    /// Whether it fits into a message. What doesn't could not be started either: the kernel's bounds are lower.
    pub(crate) fn is_sendable(&self) -> bool {
        let texts = self.args.iter().chain(self.env.iter().flat_map(|(name, value)| [name, value]));
        let text_bytes: usize = texts.map(|text| text.len() + size_of::<u32>()).sum();
        let path_bytes = self.program.len() + self.cwd.as_ref().map_or(0, |cwd| cwd.as_os_str().len());
        let bytes = text_bytes + path_bytes + self.label.len() + self.name.len() + self.marker.len();
        bytes <= FRAME_BYTES_MAX && self.args.len() <= LIST_LEN_MAX && self.env.len() <= LIST_LEN_MAX
    }
}

impl fmt::Debug for Spawn {
    /// Without arguments and environment values: they may be secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spawn")
            .field("name", &self.name)
            .field("program", &self.program)
            .field("args", &self.args.len())
            .field("env", &self.env.len())
            .field("cwd", &self.cwd)
            .finish_non_exhaustive()
    }
}

/// How a child ended.
#[derive(Clone, PartialEq, Eq)]
pub struct Exit {
    /// The exit code, if it ended by itself.
    pub code: Option<i32>,
    /// The signal that ended it, if one did.
    pub signal: Option<i32>,
    /// Whole frames handed to the pipe, counted over all workers.
    pub frames_written: u64,
    /// Whether the next frame was begun, so that the child may have seen a part of it.
    pub frame_partly_written: bool,
    /// The end of what it wrote to stderr, at most [`STDERR_TAIL_BYTES_MAX`].
    pub stderr_tail: Bytes,
}

impl fmt::Debug for Exit {
    /// Without what the child wrote.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exit")
            .field("code", &self.code)
            .field("signal", &self.signal)
            .field("frames_written", &self.frames_written)
            .field("frame_partly_written", &self.frame_partly_written)
            .field("stderr_tail_bytes", &self.stderr_tail.len())
            .finish()
    }
}

/// The sort of failure that kept a child from being started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpawnFailure {
    /// There is no such program.
    ProgramNotFound,
    /// The working directory is missing or no directory.
    CwdMissing,
    /// The program or the working directory may not be used.
    NotPermitted,
    /// The request itself is not acceptable (marker, label, a NUL byte).
    Invalid,
    /// The keeper holds as many children as it may.
    TooMany,
    /// The keeper's own side failed: its record can't be written (a full disk), or the system gives it no more
    /// processes or descriptors. Nothing is wrong with the program.
    Keeper,
    /// Anything else that the system said.
    System,
}

impl SpawnFailure {
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::ProgramNotFound => 1,
            Self::CwdMissing => 2,
            Self::NotPermitted => 3,
            Self::Invalid => 4,
            Self::TooMany => 5,
            Self::System => 6,
            Self::Keeper => 7,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        const ALL: [SpawnFailure; 7] = [
            SpawnFailure::ProgramNotFound,
            SpawnFailure::CwdMissing,
            SpawnFailure::NotPermitted,
            SpawnFailure::Invalid,
            SpawnFailure::TooMany,
            SpawnFailure::System,
            SpawnFailure::Keeper,
        ];
        ALL.into_iter().find(|failure| failure.code() == code)
    }
}

impl fmt::Display for SpawnFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ProgramNotFound => "program not found",
            Self::CwdMissing => "working directory is missing",
            Self::NotPermitted => "permission denied",
            Self::Invalid => "invalid request",
            Self::TooMany => "too many children",
            Self::System => "the system refused",
            Self::Keeper => "the gateway could not do its part",
        })
    }
}

/// How the last handover from one worker to another went: a reload (the same program with new settings) or an upgrade
/// (another program). Requirements T2 and T4.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handover {
    /// Whether the successor serves.
    pub outcome: HandoverOutcome,
    /// Whether another program was asked for, rather than other settings alone.
    pub upgrade: bool,
    /// When it began, in milliseconds of Unix time.
    pub at_unix_ms: u64,
    /// The keeper's version before it.
    pub from_version: String,
    /// The keeper's version after it, or what it would have been; empty if it did not get so far as to be known.
    pub to_version: String,
    /// Why it did not succeed; empty if it did.
    pub reason: String,
}

/// Why a reload does not take place if the settings are what they were: there is nothing to be done.
pub const UNCHANGED: &str = "the settings are what they were";

/// Whether a handover succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandoverOutcome {
    /// The successor serves.
    Succeeded,
    /// Everything is, or is again, as it was before.
    NotSucceeded,
}

impl HandoverOutcome {
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Succeeded => 1,
            Self::NotSucceeded => 2,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        [Self::Succeeded, Self::NotSucceeded].into_iter().find(|outcome| outcome.code() == code)
    }
}

/// The environment variable by which everything that a child starts is found again.
pub const MARKER_VARIABLE: &str = "MAINSTAY_CHILD";

/// The longest label of a child, in bytes.
pub const LABEL_BYTES_MAX: usize = 1024;

/// How many children a keeper holds at most, ended ones that were not forgotten included.
pub const CHILDREN_MAX: usize = 4096;

/// How much of a child's stderr travels in a notice, in bytes.
pub const STDERR_TAIL_BYTES_MAX: usize = 4 * 1024;

/// How many bytes of stdout a child may have unacknowledged before its stdout is no longer read.
pub const CUSTODY_BYTES_MAX: usize = 64 * 1024 * 1024;

/// How many frames a child may have unacknowledged before its stdout is no longer read.
pub const CUSTODY_FRAMES_MAX: usize = 4096;

/// The length of a [`CallTag`], in bytes.
pub const CALL_TAG_BYTES: usize = 16;

/// How many calls of a child may be open: handed over and not settled. Beyond that the oldest is forgotten.
pub const OPEN_CALLS_MAX: usize = 4096;

/// The longest line of a child's stdout that is kept whole, in bytes.
pub const LINE_BYTES_MAX: usize = 16 * 1024 * 1024;

/// How many bytes may wait for a child's stdin. A single longer frame is taken when nothing else waits.
pub const STDIN_BYTES_MAX: usize = 16 * 1024 * 1024;
