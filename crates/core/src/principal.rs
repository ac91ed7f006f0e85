//! Who a client is.

use std::fmt;

/// The client's identity, fixed at `initialize` and compared on every later path (S4).
///
/// It names a person or program, never a credential, so refreshing a token changes nothing.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Principal {
    /// Nobody in particular (mode `none` without an agent name).
    Anonymous,
    /// A named agent (mode `none` with `X-Agent-Name`).
    Agent(Box<str>),
    /// The holder of a named token (mode `token`).
    Token(Box<str>),
    /// A subject vouched for by an issuer (mode `jwt`).
    Subject {
        /// The `iss` claim.
        issuer: Box<str>,
        /// The `sub` claim.
        subject: Box<str>,
    },
}

impl fmt::Display for Principal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Anonymous => f.write_str("anonymous"),
            Self::Agent(name) => write!(f, "agent:{name}"),
            Self::Token(name) => write!(f, "token:{name}"),
            Self::Subject { issuer, subject } => write!(f, "subject:{issuer}#{subject}"),
        }
    }
}
