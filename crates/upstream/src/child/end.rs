//! How a child ended, and what that says of the calls that it had.

use mainstay_keeper::Exit;

use crate::failure::ExitStatus;

/// How the child ended.
#[derive(Clone)]
pub(super) struct End {
    /// `None` if the keeper is gone, and the child with it.
    pub(super) exit: Option<Exit>,
    /// Why the gateway has ended it; `None` if it did not.
    pub(super) why: Option<Why>,
}

/// Why the gateway ends a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// An operator wants others in the place of those that run.
    Restart,
    /// Its server is defined otherwise now (T4).
    Redefined,
    /// Its server is not configured any more (T4, U7).
    Removed,
    /// Its session is over.
    SessionEnded,
    /// Its session is unused, and goes on without it (S11).
    Suspended,
    /// It did not finish its handshake, or was never told a word.
    NeverUp,
    /// Another child of its session has taken its place, or nobody can say whose it is.
    Unwanted,
}

impl Why {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Restart,
        Self::Redefined,
        Self::Removed,
        Self::SessionEnded,
        Self::Suspended,
        Self::NeverUp,
        Self::Unwanted,
    ];

    /// For people.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Restart => "restarted by an operator",
            Self::Redefined => "definition changed",
            Self::Removed => "server removed",
            Self::SessionEnded => "session ended",
            Self::Suspended => "session suspended",
            Self::NeverUp => "handshake not finished",
            Self::Unwanted => "no session wants it",
        }
    }
}

impl End {
    /// Whether frame `number` may have reached the child. Of frames of earlier workers only that they were taken is known.
    pub(super) fn has_frame(&self, number: Option<u64>) -> bool {
        match (&self.exit, number) {
            (Some(exit), Some(number)) => number <= exit.frames_written,
            (None, _) | (_, None) => true,
        }
    }

    pub(super) fn status(&self) -> ExitStatus {
        let exit = self.exit.as_ref();
        ExitStatus { code: exit.and_then(|exit| exit.code), signal: exit.and_then(|exit| exit.signal) }
    }

    /// What a session lost its state by.
    pub(super) fn reason(&self) -> String {
        match self.why {
            Some(Why::Restart) => RESTARTED.to_owned(),
            Some(Why::Redefined) => REDEFINED.to_owned(),
            Some(Why::Removed | Why::SessionEnded | Why::Suspended | Why::NeverUp | Why::Unwanted) | None => {
                format!("its process {}", self.status())
            }
        }
    }

    /// What the child wrote last, masked by whoever has taken it in.
    pub(super) fn stderr_tail(&self) -> Box<str> {
        let tail = self.exit.as_ref().map(|exit| String::from_utf8_lossy(&exit.stderr_tail).trim().to_owned());
        tail.unwrap_or_default().into()
    }

    /// For the one who lost a call by it.
    pub(super) fn describe(&self) -> Box<str> {
        let tail = self.stderr_tail();
        match self.exit {
            None => "its keeper is gone".into(),
            Some(_) if tail.is_empty() || matches!(self.why, Some(Why::Restart | Why::Redefined)) => {
                self.reason().into()
            }
            Some(_) => format!("its process {}; its last words: {tail:?}", self.status()).into(),
        }
    }
}

const RESTARTED: &str = "its process was restarted by an operator";
const REDEFINED: &str = "its process was ended because the definition of the server has changed";
