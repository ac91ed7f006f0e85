//! An operator's drain: durable first, then no new calls, then the end (S8).

use std::time::Duration;

use super::end::{DRAINED, ended};
use super::{Change, Decision, Effect, Refusal, SessionRecord, State, Terms};
use crate::time::Timestamp;

/// The drain starts with its row, so that a crash can't resurrect the session. Its deadline is the end of the grace.
pub(super) fn begun(record: &SessionRecord, now: Timestamp, grace: Duration) -> Result<Decision, Refusal> {
    match record.state {
        State::Ready => {
            let row = SessionRecord {
                state: State::Draining,
                generation: record.generation + 1,
                deadline: now.plus(grace),
                ..record.clone()
            };
            Ok(Decision { changes: vec![Change::Update(row)], effects: vec![Effect::RefuseNewCalls] })
        }
        State::Initializing | State::Draining => Err(Refusal::NotReady(record.state)),
        State::Deleted | State::Expired | State::Closed => Err(Refusal::Ended(record.state)),
    }
}

/// The last call in flight is answered.
pub(super) fn finished(record: &SessionRecord, now: Timestamp, terms: &Terms) -> Result<Decision, Refusal> {
    match record.state {
        State::Draining => Ok(ended(record, State::Deleted, DRAINED, now, terms)),
        State::Initializing | State::Ready => Err(Refusal::Illegal { state: record.state, input: "drained" }),
        State::Deleted | State::Expired | State::Closed => Err(Refusal::Ended(record.state)),
    }
}
