//! How a child ended, and what that says of the calls that it had.

use mainstay_keeper::Exit;

use crate::failure::ExitStatus;

/// How the child ended.
#[derive(Clone)]
pub(super) struct End {
    /// `None` if the keeper is gone, and the child with it.
    pub(super) exit: Option<Exit>,
    /// Whether an operator wanted it to be restarted.
    pub(super) restarted: bool,
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
        if self.restarted { RESTARTED.to_owned() } else { format!("its process {}", self.status()) }
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
            Some(_) if tail.is_empty() || self.restarted => self.reason().into(),
            Some(_) => format!("its process {}; its last words: {tail:?}", self.status()).into(),
        }
    }
}

const RESTARTED: &str = "its process was restarted by an operator";
