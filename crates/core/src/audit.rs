//! Who did what to which session: one entry an act (I5).
//!
//! An entry is for people. It names principals, servers and refs, and never a secret: whoever makes one puts no id,
//! token, header value or upstream id into its detail. Not here: when an entry is made, and how it is stored.

use std::fmt;

use crate::id::{ServerName, SessionKey};
use crate::principal::Principal;
use crate::session::head;
use crate::time::Timestamp;

/// Who acted.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Actor {
    /// A client that has proven to be this principal, or, of a refused stranger, that claimed nothing else.
    Client(Principal),
    /// Whoever holds the admin token.
    Operator,
    /// The gateway by itself: a deadline, a start, a reconciler.
    Gateway,
}

impl Actor {
    /// The word for the kind of actor.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Client(_) => "client",
            Self::Operator => "operator",
            Self::Gateway => "gateway",
        }
    }

    /// The client's principal; none of the others.
    pub const fn principal(&self) -> Option<&Principal> {
        match self {
            Self::Client(principal) => Some(principal),
            Self::Operator | Self::Gateway => None,
        }
    }
}

impl fmt::Display for Actor {
    /// The word, and whose client it is: `client token:alice`, `operator`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())?;
        self.principal().map_or(Ok(()), |principal| write!(f, " {principal}"))
    }
}

/// What was done, or refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    /// A session was opened.
    Opened,
    /// A session was deleted by its client.
    Deleted,
    /// A drain has ended its session.
    Drained,
    /// A drain was ordered, and is durable.
    DrainBegun,
    /// A session was closed by an operator.
    Closed,
    /// A session was idle for too long.
    Expired,
    /// A session's instance was let go, and the session kept.
    Suspended,
    /// Somebody else than its owner asked for a session.
    StrangerRefused,
    /// A request proved no identity, or a wrong one.
    AuthenticationRefused,
    /// A new key signs from now on.
    KeysRotated,
    /// An owed delete was paid, by an operator's order or after a try that had failed.
    OwedPaid,
    /// An owed delete was given up by an operator.
    OwedGivenUp,
    /// An upstream session was lost and made again.
    Remade,
    /// An owed delete was tried for the last time: the server's session is left to expire there.
    OwedLeft,
    /// The children of a server were ended by an operator, and starts set free.
    ServerRestarted,
}

impl Action {
    /// Every action.
    pub const ALL: [Self; 15] = [
        Self::Opened,
        Self::Deleted,
        Self::Drained,
        Self::DrainBegun,
        Self::Closed,
        Self::Expired,
        Self::Suspended,
        Self::StrangerRefused,
        Self::AuthenticationRefused,
        Self::KeysRotated,
        Self::OwedPaid,
        Self::OwedGivenUp,
        Self::Remade,
        Self::OwedLeft,
        Self::ServerRestarted,
    ];

    /// The word for it in lists, filters and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Opened => "opened",
            Self::Deleted => "deleted",
            Self::Drained => "drained",
            Self::DrainBegun => "drain-begun",
            Self::Closed => "closed",
            Self::Expired => "expired",
            Self::Suspended => "suspended",
            Self::StrangerRefused => "stranger-refused",
            Self::AuthenticationRefused => "authentication-refused",
            Self::KeysRotated => "keys-rotated",
            Self::OwedPaid => "owed-paid",
            Self::OwedGivenUp => "owed-given-up",
            Self::Remade => "remade",
            Self::OwedLeft => "owed-left",
            Self::ServerRestarted => "server-restarted",
        }
    }

    /// The action whose word is `text`, if it is one.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|action| action.as_str() == text)
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One line of the audit trail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditEntry {
    /// When.
    pub at: Timestamp,
    /// Who.
    pub actor: Actor,
    /// What.
    pub action: Action,
    /// To which session, if to one.
    pub session: Option<SessionKey>,
    /// At which server, if at one.
    pub server: Option<ServerName>,
    /// What else people should know; at most [`DETAIL_CHARS_MAX`](Self::DETAIL_CHARS_MAX) characters, never a secret.
    pub detail: Box<str>,
}

impl AuditEntry {
    /// The most characters that are kept of a detail.
    pub const DETAIL_CHARS_MAX: usize = 256;
    /// How many entries are kept; the oldest go first.
    pub const ENTRIES_MAX: u64 = 100_000;
    /// How long an entry is kept.
    pub const RETENTION: std::time::Duration = std::time::Duration::from_secs(30 * 24 * 3600);

    /// An entry that names no session and no server and has no detail.
    pub fn new(at: Timestamp, actor: Actor, action: Action) -> Self {
        Self { at, actor, action, session: None, server: None, detail: Box::default() }
    }

    /// The entry, naming the session whose key is `key`.
    #[must_use]
    pub fn of_session(self, key: SessionKey) -> Self {
        Self { session: Some(key), ..self }
    }

    /// The entry, naming `server`.
    #[must_use]
    pub fn at_server(self, server: ServerName) -> Self {
        Self { server: Some(server), ..self }
    }

    /// The entry with `text` as its detail, cut after [`DETAIL_CHARS_MAX`](Self::DETAIL_CHARS_MAX) characters.
    #[must_use]
    pub fn with_detail(self, text: &str) -> Self {
        Self { detail: head(text, Self::DETAIL_CHARS_MAX), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i5_every_action_has_one_word_that_reads_back() {
        for (index, action) in Action::ALL.into_iter().enumerate() {
            assert_eq!(Action::parse(action.as_str()), Some(action));
            let first = Action::ALL.iter().position(|other| other.as_str() == action.as_str());
            assert_eq!(first, Some(index), "{action}");
        }
        assert_eq!(Action::parse("opened "), None);
    }

    #[test]
    fn i5_an_entry_names_whom_and_bounds_what_it_says() {
        let client = Actor::Client(Principal::Token("alice".into()));
        assert_eq!(client.to_string(), "client token:alice");
        assert_eq!((Actor::Operator.to_string(), Actor::Gateway.to_string()), ("operator".into(), "gateway".into()));
        let key = SessionKey::from_bytes([7; 32]);
        let entry = AuditEntry::new(Timestamp::default(), client, Action::Closed)
            .of_session(key)
            .at_server(ServerName::parse("files").expect("a name"))
            .with_detail(&"é".repeat(1000));
        assert_eq!((entry.session, entry.detail.chars().count()), (Some(key), AuditEntry::DETAIL_CHARS_MAX));
    }
}
