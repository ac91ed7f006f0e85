//! What can be written, and how durable it must be.

use mainstay_core::audit::AuditEntry;
use mainstay_core::id::{ServerName, SessionKey};
use mainstay_core::resume::{OwedDelete, ResumeRecord, ServerCard};
use mainstay_core::session::Change;
use mainstay_core::time::Timestamp;

/// How durable a write is, the weakest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Survives the end of the process. If it is lost, comfort is lost.
    Hint,
    /// Survives a power cut. Must be settled, or be shown as unsettled.
    Obligation,
    /// Survives a power cut. What it says is in force.
    Authority,
}

/// One write of a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    /// A session's change. A row is replaced only by its direct successor, and no id is used twice.
    Session(Change),
    /// A resume record in place of the one under its key. If its session has ended meanwhile nobody will resume it:
    /// the DELETE of its upstream session is owed instead.
    Resume(ResumeRecord),
    /// The resume record under this key out.
    ForgetResume(SessionKey),
    /// A DELETE that is owed from now on; its number is given by the store.
    Owe(OwedDelete),
    /// The owed delete of this number is done.
    Settle(u64),
    /// The owed delete of this number, as it stands after a failed try.
    Postpone(OwedDelete),
    /// The owed delete of this number is given up: nobody tries it again, and it is not listed any more.
    GiveUp(u64),
    /// What is known of a server in place of what was.
    Card(ServerCard),
    /// The servers that are configured, whose sessions have been looked after; in place of those that were.
    Configured(Vec<ServerName>),
    /// What is remembered of servers beyond their worker, in bytes that mean nothing here; in place of what was.
    Memory(Box<[u8]>),
    /// A line of the audit trail; its number is given by the store. It is as durable as what it rides with, and alone
    /// it is a hint.
    Audit(AuditEntry),
    /// What has outlived its use at this time out: tombstones whose time is over and which no row needs, resume records
    /// past their TTL without a live session (their upstream is owed a DELETE), owed deletes that were left to expire, audit entries that are too old or too many.
    /// At most a thousand of each.
    Purge {
        /// The present.
        now: Timestamp,
    },
}

impl Write {
    /// How durable it is before a commit returns.
    pub const fn class(&self) -> Class {
        match self {
            Self::Session(Change::Insert(_) | Change::Update(_) | Change::End(_)) => Class::Authority,
            Self::Owe(_) | Self::Settle(_) | Self::Postpone(_) | Self::GiveUp(_) => Class::Obligation,
            Self::Session(Change::Touch { .. })
            | Self::Resume(_)
            | Self::ForgetResume(_)
            | Self::Card(_)
            | Self::Configured(_)
            | Self::Memory(_)
            | Self::Audit(_)
            | Self::Purge { .. } => Class::Hint,
        }
    }

    /// The word for it in logs.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Session(Change::Insert(_)) => "insert",
            Self::Session(Change::Update(_)) => "update",
            Self::Session(Change::Touch { .. }) => "touch",
            Self::Session(Change::End(_)) => "end",
            Self::Resume(_) => "resume",
            Self::ForgetResume(_) => "forget-resume",
            Self::Owe(_) => "owe",
            Self::Settle(_) => "settle",
            Self::Postpone(_) => "postpone",
            Self::GiveUp(_) => "give-up",
            Self::Card(_) => "card",
            Self::Configured(_) => "configured",
            Self::Memory(_) => "memory",
            Self::Audit(_) => "audit",
            Self::Purge { .. } => "purge",
        }
    }

    /// Whether it is a single statement, which SQLite makes or undoes as a whole by itself.
    pub(crate) const fn is_one_statement(&self) -> bool {
        match self {
            Self::Session(Change::Insert(_) | Change::Update(_) | Change::Touch { .. })
            | Self::ForgetResume(_)
            | Self::Owe(_)
            | Self::Settle(_)
            | Self::Postpone(_)
            | Self::GiveUp(_)
            | Self::Card(_)
            | Self::Configured(_)
            | Self::Memory(_)
            | Self::Audit(_) => true,
            Self::Session(Change::End(_)) | Self::Resume(_) | Self::Purge { .. } => false,
        }
    }

    /// The latest time that it speaks of as past.
    pub(crate) fn clock(&self) -> Option<Timestamp> {
        match self {
            Self::Session(Change::Insert(record) | Change::Update(record)) => Some(record.seen_at),
            Self::Session(Change::Touch { seen_at, .. }) => Some(*seen_at),
            Self::Session(Change::End(tombstone)) => Some(tombstone.ended_at),
            Self::Audit(entry) => Some(entry.at),
            Self::Resume(_)
            | Self::ForgetResume(_)
            | Self::Owe(_)
            | Self::Settle(_)
            | Self::Postpone(_)
            | Self::GiveUp(_)
            | Self::Card(_)
            | Self::Configured(_)
            | Self::Memory(_)
            | Self::Purge { .. } => None,
        }
    }
}

/// The strongest class among `writes`.
pub(crate) fn strongest(writes: &[Write]) -> Class {
    writes.iter().map(Write::class).max().unwrap_or(Class::Hint)
}

/// How many rows of each kind one purge takes out, so that it never holds up other writers for long.
pub(crate) const PURGED_ROWS_MAX: usize = 1000;
