//! How far a handover is, and what is remembered of it.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::{BufMut as _, Bytes, BytesMut};
use tokio::task::JoinHandle;

use crate::identity::ProcessIdentity;
use crate::keeper::Asked;
use crate::protocol::ProtocolError;
use crate::protocol::fields::{Fields, put_blob, put_handover, put_identity, put_list};
use crate::types::{Handover, HandoverOutcome};

/// The steps of a handover, one at a time.
pub(super) enum Step {
    /// There is none.
    None,
    /// The program that is to take over is asked whether it could. Nothing has changed.
    Rehearsing { rehearsal: JoinHandle<Result<Bytes, String>>, asked: Option<Asked>, upgrade: bool },
    /// The worker in charge was told to hand over.
    Ordered { settings: Bytes, terms: Terms },
    /// The successor was started.
    Succeeding { previous_settings: Bytes, terms: Terms },
}

/// What a handover is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Terms {
    /// Another program, rather than other settings alone.
    pub(super) upgrade: bool,
    /// When the worker in charge was told, in milliseconds of Unix time: from then on nobody accepts.
    pub(super) begun_at_unix_ms: u64,
    /// The version of the keeper's program then.
    pub(super) from_version: String,
}

impl Terms {
    pub(super) fn begin(upgrade: bool, from_version: String) -> Self {
        Self { upgrade, begun_at_unix_ms: unix_ms(), from_version }
    }

    /// How it went, if it went well.
    pub(super) fn succeeded(&self, to_version: String) -> Handover {
        self.outcome(HandoverOutcome::Succeeded, to_version, String::new())
    }

    /// How it went, if it did not.
    pub(super) fn not_succeeded(&self, to_version: String, reason: String) -> Handover {
        self.outcome(HandoverOutcome::NotSucceeded, to_version, reason)
    }

    /// How long nobody has accepted by now.
    pub(super) fn lasted(&self) -> Duration {
        Duration::from_millis(unix_ms().saturating_sub(self.begun_at_unix_ms))
    }

    fn outcome(&self, outcome: HandoverOutcome, to_version: String, reason: String) -> Handover {
        Handover {
            outcome,
            upgrade: self.upgrade,
            at_unix_ms: self.begun_at_unix_ms,
            from_version: self.from_version.clone(),
            to_version,
            reason,
        }
    }
}

/// What is carried over a renewal of the keeper.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Carried {
    /// The handover within which the keeper is renewed; none if it has gone back to the program before.
    pub(super) terms: Option<Terms>,
    /// How the last one went.
    pub(super) last: Option<Handover>,
    /// Processes below the keeper that it did not start.
    pub(super) strangers: BTreeSet<ProcessIdentity>,
}

impl Carried {
    pub(super) fn encode(&self) -> Bytes {
        let mut body = BytesMut::new();
        body.put_u8(u8::from(self.terms.is_some()));
        if let Some(terms) = &self.terms {
            body.put_u8(u8::from(terms.upgrade));
            body.put_u64_le(terms.begun_at_unix_ms);
            put_blob(&mut body, terms.from_version.as_bytes());
        }
        put_handover(&mut body, self.last.as_ref());
        let strangers: Vec<_> = self.strangers.iter().copied().take(STRANGERS_MAX).collect();
        put_list(&mut body, &strangers, |body, stranger| put_identity(body, *stranger));
        body.freeze()
    }

    pub(super) fn decode(bytes: Bytes) -> Result<Self, ProtocolError> {
        let mut fields = Fields(bytes);
        let terms = match fields.flag("terms")? {
            true => Some(Terms {
                upgrade: fields.flag("upgrade")?,
                begun_at_unix_ms: fields.u64("begun_at")?,
                from_version: fields.text("from_version")?,
            }),
            false => None,
        };
        let last = fields.handover()?;
        let strangers = fields.list("strangers", Fields::identity)?.into_iter().collect();
        fields.end()?;
        Ok(Self { terms, last, strangers })
    }
}

fn unix_ms() -> u64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX)
}

/// How many strangers are carried over a renewal: more than anybody starts a gateway from.
const STRANGERS_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t2_what_is_known_of_a_handover_survives_a_renewal() {
        let terms = Terms::begin(true, "1.0".to_owned());
        let last = terms.not_succeeded("2.0".to_owned(), "it died".to_owned());
        let strangers = BTreeSet::from([ProcessIdentity::of_self().unwrap()]);
        let succeeded = terms.succeeded("2.0".to_owned());
        for carried in [
            Carried { terms: Some(terms), last: Some(succeeded), strangers: strangers.clone() },
            Carried { terms: None, last: Some(last), strangers },
            Carried { terms: None, last: None, strangers: BTreeSet::new() },
        ] {
            let bytes = carried.encode();
            for cut in 0..bytes.len() {
                assert!(Carried::decode(bytes.slice(..cut)).is_err());
            }
            assert_eq!(Carried::decode(bytes), Ok(carried));
        }
    }
}
