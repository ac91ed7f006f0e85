//! What can go wrong on the way to a server, and what it means for the call.

use std::time::Duration;

use mainstay_core::id::ServerName;

use crate::server::Server;
use crate::upstreams::Upstreams;

/// What is known of a call's execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It never reached the server: sending it again is safe.
    NotDispatched,
    /// It may have been executed: only the caller can decide to send it again.
    Unknown,
    /// The server refused it, and has not executed it.
    Refused,
}

/// Why a call, a message or a handshake failed. Each names the server; none shows an id, a header or a value.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Failure {
    /// The request went out and its answer was lost. It is not repeated (U5).
    #[error("the connection to server `{server}` was lost before it answered, so the outcome is unknown: {cause}")]
    OutcomeUnknown {
        /// The server.
        server: ServerName,
        /// What was seen.
        cause: Box<str>,
    },
    /// The server can't be reached for now: refused, hung or unavailable. A later try may succeed.
    #[error("server `{server}` can't be reached: {cause}")]
    Unreachable {
        /// The server.
        server: ServerName,
        /// What was seen.
        cause: Box<str>,
    },
    /// Its process does not stay up, or can't be started, and is not started again before anybody would give up (C4).
    #[error("server `{server}` is not started now, since it does not stay up: {cause}{}; {}", last_words(words), next_try(*retry_after))]
    Parked {
        /// The server.
        server: ServerName,
        /// What was seen last. Without any word of the server's own.
        cause: Box<str>,
        /// The last words of its process.
        words: Box<str>,
        /// When the next start may be, from now.
        retry_after: Duration,
    },
    /// The gateway itself can't do its part for now: its disk is full, or it has as many children as it may have. Nothing
    /// is wrong with the server, and nothing was sent to it; a later try may succeed.
    #[error("the gateway can't start server `{server}` for now: {problem}")]
    Gateway {
        /// The server that was to be started.
        server: ServerName,
        /// What was in the way, without a path of the gateway's own.
        problem: Box<str>,
    },
    /// The server wants credentials that it accepts.
    #[error("server `{server}` asks for authentication")]
    Unauthorized {
        /// The server.
        server: ServerName,
    },
    /// The server answered with an HTTP error that is no JSON-RPC answer, or refused the handshake with one.
    #[error("server `{server}` refused the request: {problem}")]
    Rejected {
        /// The server.
        server: ServerName,
        /// The HTTP status; 200 if the refusal is a JSON-RPC error.
        status: u16,
        /// What it said: the status, or the error object.
        problem: Box<str>,
    },
    /// The server forgot its session again right after it was made again; the next call may recover it (U4).
    #[error("server `{server}` lost its session again while the call was repeated")]
    LostAgain {
        /// The server.
        server: ServerName,
    },
    /// The server does not know the session, and this worker makes no other: it has given way to the next one, which
    /// would not know of it (T2). The call was not executed.
    #[error(
        "server `{server}` lost its session, and the worker that the call was left with makes no other; send it again"
    )]
    Left {
        /// The server.
        server: ServerName,
    },
    /// The child ended before it answered `initialize`.
    #[error("server `{server}` {exit} before it answered; its last words: {stderr_tail:?}")]
    ChildExited {
        /// The server.
        server: ServerName,
        /// How it ended.
        exit: ExitStatus,
        /// The end of what it wrote to its standard error.
        stderr_tail: Box<str>,
    },
    /// A message of the server was larger than allowed.
    #[error("server `{server}` sent a message above the limit of {bytes_max} bytes")]
    Oversize {
        /// The server.
        server: ServerName,
        /// The limit.
        bytes_max: usize,
    },
    /// The server does not speak the protocol.
    #[error("server `{server}` broke the protocol: {problem}")]
    Protocol {
        /// The server.
        server: ServerName,
        /// How.
        problem: Box<str>,
    },
    /// The server's definition can't be used: a variable that is not set, a program that is missing.
    #[error("server `{server}` can't be used as configured: {problem}")]
    Configuration {
        /// The server.
        server: ServerName,
        /// Why.
        problem: Box<str>,
    },
    /// The link was ended by its owner.
    #[error("the session with server `{server}` has ended")]
    Ended {
        /// The server.
        server: ServerName,
    },
}

impl Failure {
    /// What is known of the call that failed so.
    pub fn outcome(&self) -> Outcome {
        match self {
            Self::OutcomeUnknown { .. } | Self::Oversize { .. } | Self::Protocol { .. } => Outcome::Unknown,
            // A gateway or a crashed handler may answer 5xx after the work was done.
            Self::Rejected { status, .. } if *status >= 500 => Outcome::Unknown,
            Self::Rejected { .. } | Self::Unauthorized { .. } | Self::LostAgain { .. } | Self::Left { .. } => {
                Outcome::Refused
            }
            Self::Unreachable { .. }
            | Self::Parked { .. }
            | Self::Gateway { .. }
            | Self::ChildExited { .. }
            | Self::Configuration { .. }
            | Self::Ended { .. } => Outcome::NotDispatched,
        }
    }

    /// Whether the server is not there for now.
    pub fn is_unreachable(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Parked { .. })
    }

    /// After what time another try makes sense, if that is known.
    pub fn retry_after(&self) -> Option<Duration> {
        if let Self::Parked { retry_after, .. } = self { Some(*retry_after) } else { None }
    }

    /// What was seen, without the server's name where that is a part of its own.
    pub(crate) fn cause(&self) -> String {
        match self {
            Self::Unreachable { cause, .. } | Self::OutcomeUnknown { cause, .. } => cause.to_string(),
            Self::Configuration { problem, .. } | Self::Protocol { problem, .. } => problem.to_string(),
            Self::Parked { .. }
            | Self::Gateway { .. }
            | Self::Unauthorized { .. }
            | Self::Rejected { .. }
            | Self::LostAgain { .. }
            | Self::Left { .. }
            | Self::ChildExited { .. }
            | Self::Oversize { .. }
            | Self::Ended { .. } => self.to_string(),
        }
    }

    /// The server that it is about.
    pub fn server(&self) -> &ServerName {
        match self {
            Self::OutcomeUnknown { server, .. }
            | Self::Unreachable { server, .. }
            | Self::Parked { server, .. }
            | Self::Gateway { server, .. }
            | Self::Unauthorized { server }
            | Self::Rejected { server, .. }
            | Self::LostAgain { server }
            | Self::Left { server }
            | Self::ChildExited { server, .. }
            | Self::Oversize { server, .. }
            | Self::Protocol { server, .. }
            | Self::Configuration { server, .. }
            | Self::Ended { server } => server,
        }
    }
}

/// Whoever makes failures of one server.
pub(crate) trait Blame {
    /// The server that they name.
    fn blamed(&self) -> &Server;

    fn name(&self) -> ServerName {
        self.blamed().name.clone()
    }

    /// [`Failure::OutcomeUnknown`], counted in `upstreams`.
    fn unknown_in(&self, upstreams: &Upstreams, cause: Box<str>) -> Failure {
        Upstreams::count(&upstreams.counters.unknown);
        Failure::OutcomeUnknown { server: self.name(), cause }
    }

    /// [`Failure::Unreachable`].
    fn unreachable(&self, cause: Box<str>) -> Failure {
        Failure::Unreachable { server: self.name(), cause }
    }

    /// [`Failure::Protocol`].
    fn protocol(&self, problem: &str) -> Failure {
        Failure::Protocol { server: self.name(), problem: problem.into() }
    }

    /// [`Failure::Rejected`].
    fn rejected(&self, status: u16, problem: &str) -> Failure {
        Failure::Rejected { server: self.name(), status, problem: problem.into() }
    }

    /// [`Failure::Rejected`] with nothing more to say than the status.
    fn rejected_with(&self, status: u16) -> Failure {
        self.rejected(status, &format!("HTTP status {status}"))
    }

    /// [`Failure::Unauthorized`].
    fn unauthorized(&self) -> Failure {
        Failure::Unauthorized { server: self.name() }
    }

    /// [`Failure::LostAgain`].
    fn lost_again(&self) -> Failure {
        Failure::LostAgain { server: self.name() }
    }

    /// [`Failure::Left`].
    fn left(&self) -> Failure {
        Failure::Left { server: self.name() }
    }

    /// [`Failure::Oversize`].
    fn oversize(&self) -> Failure {
        Failure::Oversize { server: self.name(), bytes_max: self.blamed().message_bytes_max }
    }

    /// [`Failure::Ended`].
    fn over(&self) -> Failure {
        Failure::Ended { server: self.name() }
    }
}

impl Blame for Server {
    fn blamed(&self) -> &Server {
        self
    }
}

fn last_words(words: &str) -> String {
    if words.is_empty() { String::new() } else { format!("; its last words: {words:?}") }
}

/// Rounded up: whoever comes back then is not too early.
fn next_try(after: Duration) -> String {
    format!("the next try is in {} s", after.as_millis().div_ceil(1000))
}

/// How a child ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExitStatus {
    /// Its exit code, if it exited.
    pub code: Option<i32>,
    /// The signal that ended it, if one did.
    pub signal: Option<i32>,
}

impl std::fmt::Display for ExitStatus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.code, self.signal) {
            (Some(code), _) => write!(f, "exited with status {code}"),
            (None, Some(signal)) => write!(f, "was ended by signal {signal}"),
            (None, None) => f.write_str("ended"),
        }
    }
}
