//! Taking up a stored session (S9, S15).

use std::fmt;

use super::end::{CONTRACT_CHANGED, DRAIN_CUT, NOT_LIVE, ended, expiry};
use super::{Contract, Decision, Session, SessionRecord, State, Terms};
use crate::id::Epoch;
use crate::time::Timestamp;

/// Under which circumstances a stored session is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked<'a> {
    /// The present.
    pub now: Timestamp,
    /// The auth contract in force.
    pub contract: &'a Contract,
    /// The present life of the worker, under which everything further is written.
    pub epoch: Epoch,
    /// The durations in force.
    pub terms: &'a Terms,
}

/// What becomes of a stored session. All but the first end it, by a decision that is to be performed.
#[expect(clippy::large_enum_variant, reason = "made once per restore and taken apart at once")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Restoration {
    /// It lives. Its clients see no difference.
    Resumed(Session),
    /// It is definitively refused, and ends as closed.
    Refused(RefusedReason, Decision),
    /// Nobody used it until its deadline: it ends as expired.
    Overdue(Decision),
    /// A drain was under way: it ends as deleted, for a crash must not resurrect it (S8).
    Unfinished(Decision),
}

/// Why a stored session is refused for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusedReason {
    /// It was opened under another auth contract (S15).
    ContractChanged,
    /// The row is authentic, but not that of a live session.
    NotLive(State),
}

impl fmt::Display for RefusedReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ContractChanged => f.write_str(CONTRACT_CHANGED),
            Self::NotLive(state) => write!(f, "{NOT_LIVE}: {state}"),
        }
    }
}

/// The verdict on `stored`. A row whose times lie ahead of `now` is taken up like any other: a clock that went back
/// ends nothing (S5).
pub(super) fn restored(stored: SessionRecord, asked: &Asked<'_>) -> Restoration {
    let record = SessionRecord { epoch: asked.epoch, ..stored };
    match record.state {
        State::Draining => Restoration::Unfinished(ended(&record, State::Deleted, DRAIN_CUT, asked.now, asked.terms)),
        State::Ready if asked.now >= record.deadline => Restoration::Overdue(expiry(&record, asked.now, asked.terms)),
        State::Ready if record.contract != *asked.contract => {
            let decision = ended(&record, State::Closed, CONTRACT_CHANGED, asked.now, asked.terms);
            Restoration::Refused(RefusedReason::ContractChanged, decision)
        }
        State::Ready => Restoration::Resumed(Session::resume(record)),
        State::Initializing | State::Deleted | State::Expired | State::Closed => {
            let decision = ended(&record, State::Closed, NOT_LIVE, asked.now, asked.terms);
            Restoration::Refused(RefusedReason::NotLive(record.state), decision)
        }
    }
}
