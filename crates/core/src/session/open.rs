//! From `initialize` to the first row.

use super::end::discarded;
use super::{AGENT_CHARS_MAX, Change, Decision, Effect, Opening, Refusal, SessionRecord, State, Terms, head};
use crate::time::Timestamp;
use crate::wire::method::Version;

/// The record of a session that is being opened.
pub(super) fn initializing(opening: Opening, version: Version, now: Timestamp, terms: &Terms) -> SessionRecord {
    SessionRecord {
        key: opening.key,
        server: opening.server,
        principal: opening.principal,
        state: State::Initializing,
        generation: 0,
        epoch: opening.epoch,
        opened_at: now,
        seen_at: now,
        deadline: unconfirmed_deadline(now, terms),
        version,
        client: opening.client,
        agent: opening.agent.map(|name| head(&name, AGENT_CHARS_MAX)),
        initialize_params: opening.initialize_params,
        confirmed: false,
        contract: opening.contract,
    }
}

/// The row goes in before the answer goes out (S2). The session counts as opened now: `initialize` may have been held
/// for long, and its client has not had a word until now.
pub(super) fn answered(
    record: &SessionRecord,
    now: Timestamp,
    version: Version,
    terms: &Terms,
) -> Result<Decision, Refusal> {
    match record.state {
        State::Initializing => {
            let row = SessionRecord {
                state: State::Ready,
                generation: record.generation + 1,
                opened_at: now,
                seen_at: now,
                deadline: unconfirmed_deadline(now, terms),
                version,
                ..record.clone()
            };
            Ok(Decision { changes: vec![Change::Insert(row)], effects: vec![Effect::AnswerInitialize] })
        }
        State::Ready | State::Draining => Err(Refusal::Illegal { state: record.state, input: "answered" }),
        State::Deleted | State::Expired | State::Closed => Err(Refusal::Ended(record.state)),
    }
}

/// Nothing of the session is left, for nothing of it was stored: no row, no tombstone, no instance (S2).
pub(super) fn failed(record: &SessionRecord) -> Result<Decision, Refusal> {
    match record.state {
        State::Initializing => Ok(discarded()),
        State::Ready | State::Draining => Err(Refusal::Illegal { state: record.state, input: "failed" }),
        State::Deleted | State::Expired | State::Closed => Err(Refusal::Ended(record.state)),
    }
}

/// A client that never says another word loses the session soon. Where sessions expire even sooner, so does this one.
fn unconfirmed_deadline(opened_at: Timestamp, terms: &Terms) -> Timestamp {
    opened_at.plus(terms.confirm_within.min(terms.idle_expiry))
}
