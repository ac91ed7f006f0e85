//! When an HTTP server was last heard of, for people.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use mainstay_core::time::Timestamp;

use crate::child::LastFailure;
use crate::failure::Failure;
use crate::wire::lock;

/// What is known of the way to an HTTP server. What this worker has seen; it asks nothing by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contact {
    /// Whether the last that was asked of it reached it; `None` if nothing was.
    pub reachable: Option<bool>,
    /// When it last answered what it was asked.
    pub answered_at: Option<Timestamp>,
    /// What it failed with last.
    pub last_failure: Option<LastFailure>,
}

/// Notes successes and failures. A success costs one store and no lock: it is on the way of every call.
#[derive(Debug, Default)]
pub(crate) struct Contacts {
    answered_ms: AtomicU64,
    failed: Mutex<Option<Failed>>,
}

#[derive(Clone, Debug)]
struct Failed {
    failure: LastFailure,
    /// Whether it was not there, rather than unwilling.
    away: bool,
}

impl Contacts {
    /// Notes what became of something that was asked.
    pub(crate) fn note<T>(&self, now: Timestamp, outcome: &Result<T, Failure>) {
        match outcome {
            Ok(_) => self.answered_ms.store(now.unix_millis(), Ordering::Relaxed),
            // These are the gateway's own.
            Err(Failure::Ended { .. } | Failure::Gateway { .. }) => {}
            Err(failure) => {
                let away = matches!(failure, Failure::Unreachable { .. } | Failure::OutcomeUnknown { .. });
                let failure = LastFailure { at: now, cause: failure.cause().into(), words: Box::default() };
                *lock(&self.failed) = Some(Failed { failure, away });
            }
        }
    }

    /// What is known.
    pub(crate) fn view(&self) -> Contact {
        let answered = self.answered_ms.load(Ordering::Relaxed);
        let answered_at = (answered > 0).then(|| Timestamp::from_unix_millis(answered));
        let failed = lock(&self.failed).clone();
        let reachable = match (&failed, answered_at) {
            (Some(failed), answered_at) if answered_at.is_none_or(|at| at < failed.failure.at) => Some(!failed.away),
            (_, Some(_)) => Some(true),
            (_, None) => None,
        };
        Contact { reachable, answered_at, last_failure: failed.map(|failed| failed.failure) }
    }
}

#[cfg(test)]
mod tests {
    use mainstay_core::id::ServerName;

    use super::*;

    #[test]
    fn ac04_a_server_is_reachable_as_it_was_last_seen() {
        let (contacts, at) = (Contacts::default(), Timestamp::from_unix_millis);
        let failure =
            |cause: &str| Failure::Unreachable { server: ServerName::parse("s").expect("a name"), cause: cause.into() };
        assert_eq!(contacts.view(), Contact { reachable: None, answered_at: None, last_failure: None });
        contacts.note::<()>(at(5), &Err(failure("refused")));
        assert_eq!(contacts.view().reachable, Some(false));
        contacts.note(at(6), &Ok(()));
        let view = contacts.view();
        assert_eq!((view.reachable, view.answered_at), (Some(true), Some(at(6))));
        assert_eq!(view.last_failure.map(|failure| failure.cause), Some("refused".into()));
        let server = ServerName::parse("s").expect("a name");
        contacts.note::<()>(at(7), &Err(Failure::Unauthorized { server }));
        assert_eq!(contacts.view().reachable, Some(true));
    }
}
