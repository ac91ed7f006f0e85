//! What is found.

use std::fmt;

use mainstay_core::audit::Action;
use mainstay_core::id::{ServerName, SessionKey, SessionRef};
use mainstay_core::principal::Principal;
use mainstay_core::resume::{Continuity, ResumeRecord};
use mainstay_core::session::{SessionRecord, State, Tombstone};
use mainstay_core::time::Timestamp;

/// What is known of an id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stored {
    /// A live session. Who may use it, and whether it is overdue, is for the core to say.
    Live(Box<SessionRecord>),
    /// An ended one. Its id is blocked.
    Ended(Tombstone),
    /// A row that is kept, but neither served nor removed: whether the session lives is not known for certain.
    Unreadable(RowFault),
    /// Nothing.
    Absent,
}

/// Which row can't be read, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowFault {
    /// The key that it is stored under.
    pub key: SessionKey,
    /// What it should be.
    pub kind: RowKind,
    /// Why.
    pub fault: Fault,
}

impl fmt::Display for RowFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the {} row of {} can't be read: {}", self.kind, self.key.session_ref(), self.fault)
    }
}

/// What a row is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RowKind {
    /// A live session.
    Session,
    /// An ended session.
    Tombstone,
    /// A resume record.
    Resume,
    /// An owed delete.
    Owed,
    /// What is known of a server.
    Card,
    /// An entry of the audit trail.
    Audit,
}

impl fmt::Display for RowKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Session => "session",
            Self::Tombstone => "tombstone",
            Self::Resume => "resume",
            Self::Owed => "owed delete",
            Self::Card => "card",
            Self::Audit => "audit",
        })
    }
}

/// Why a row can't be read (S14).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// Its signature does not verify, or a column disagrees with what is signed.
    Tampered,
    /// It is the genuine row of another key.
    Misfiled,
    /// It is signed with a key that the keyring does not have.
    UnknownKey {
        /// The key's number.
        key_id: u32,
    },
    /// It is genuine and of a version that only a newer binary reads.
    Future {
        /// The version.
        version: u8,
    },
    /// It is genuine, and makes no sense.
    Unparsable,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tampered => f.write_str("its signature does not verify"),
            Self::Misfiled => f.write_str("it is the row of another session"),
            Self::UnknownKey { key_id } => write!(f, "it is signed with key {key_id}, which is not in the keyring"),
            Self::Future { version } => write!(f, "it is of version {version}, written by a newer mainstay"),
            Self::Unparsable => f.write_str("its body makes no sense"),
        }
    }
}

/// Which part of a list is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// The last key of the page before; none for the first page.
    pub after: Option<SessionKey>,
    /// How many rows; at most [`ROWS_MAX`](Self::ROWS_MAX) are given.
    pub limit: usize,
    /// Which rows at all.
    pub filter: Filter,
}

impl Page {
    /// The longest page.
    pub const ROWS_MAX: usize = 1000;

    /// The limit in force.
    pub(crate) fn rows(&self) -> usize {
        self.limit.min(Self::ROWS_MAX)
    }
}

/// Which rows of a list are wanted: those that everything named here is true of. The default wants all.
///
/// Of a row that can't be read, what its columns say counts.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Filter {
    /// In this state.
    pub state: Option<State>,
    /// Opened at this server.
    pub server: Option<ServerName>,
    /// Whose principal is displayed as this text.
    pub principal: Option<Box<str>>,
    /// Whose client named itself to be this agent.
    pub agent: Option<Box<str>>,
    /// Whether it can be read.
    pub legibility: Legibility,
}

impl Filter {
    /// Whether what was found is wanted. A row that can't be read was asked for by its columns.
    pub(crate) fn wants(&self, stored: &Stored) -> bool {
        match stored {
            Stored::Live(record) => {
                self.legibility != Legibility::Unreadable
                    && self.names(record.state, &record.server, &record.principal, record.agent.as_deref())
            }
            Stored::Ended(stone) => {
                self.legibility != Legibility::Unreadable
                    && self.names(stone.state, &stone.server, &stone.principal, stone.agent.as_deref())
            }
            Stored::Unreadable(_) => self.legibility != Legibility::Readable,
            Stored::Absent => false,
        }
    }

    fn names(&self, state: State, server: &ServerName, principal: &Principal, agent: Option<&str>) -> bool {
        self.state.is_none_or(|wanted| wanted == state)
            && self.server.as_ref().is_none_or(|wanted| wanted == server)
            && self.principal.as_ref().is_none_or(|wanted| **wanted == *principal.to_string())
            && self.agent.as_deref().is_none_or(|wanted| Some(wanted) == agent)
    }
}

/// Whether the rows that can be read are wanted, or those that can't.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Legibility {
    /// Both.
    #[default]
    Any,
    /// Those that can be read.
    Readable,
    /// Those that can't, and so are neither served nor removed.
    Unreadable,
}

/// What sessions are told apart by, beside their states and servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Label {
    /// Whose they are, as displayed.
    Principal,
    /// The agents that opened them.
    Agent,
}

/// Which part of the audit trail is asked for, the newest entries first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuditPage {
    /// Only entries of a lower number: the last one's of the page before. None for the newest.
    pub before: Option<u64>,
    /// How many entries; at most [`Page::ROWS_MAX`] are given.
    pub limit: usize,
    /// Only entries that name this session.
    pub session: Option<SessionKey>,
    /// Only entries of this action.
    pub action: Option<Action>,
}

impl AuditPage {
    /// The limit in force.
    pub(crate) fn rows(&self) -> usize {
        self.limit.min(Page::ROWS_MAX)
    }
}

/// One id in a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its hash.
    pub key: SessionKey,
    /// What is known of it; never [`Stored::Absent`].
    pub stored: Stored,
    /// What its resume record says, if it has one.
    pub resume: Option<ResumeSummary>,
}

/// What people want to know of a resume record (U6).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResumeSummary {
    /// How the session came to its instance.
    pub continuity: Continuity,
    /// How often the instance was made again.
    pub remade_count: u32,
    /// Why it was the last time.
    pub remade_reason: Option<Box<str>>,
    /// When the record was written.
    pub saved_at: Timestamp,
    /// When the instance was last used.
    pub used_at: Timestamp,
}

impl From<ResumeRecord> for ResumeSummary {
    fn from(record: ResumeRecord) -> Self {
        Self {
            continuity: record.continuity,
            remade_count: record.remade_count,
            remade_reason: record.remade_reason,
            saved_at: record.saved_at,
            used_at: record.used_at,
        }
    }
}

/// How many ids of one ref are given.
pub(crate) const REF_MATCHES_MAX: usize = 16;

/// The first key that has this ref.
pub(crate) fn first_key(session_ref: SessionRef) -> SessionKey {
    let mut first = [0; 32];
    let head = session_ref.as_bytes();
    first[..head.len()].copy_from_slice(head);
    SessionKey::from_bytes(first)
}
