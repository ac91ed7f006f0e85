//! The endings. Each is one change: the tombstone in, the row out (S6).

use super::{Activity, Change, Decision, Effect, Refusal, SessionRecord, State, Terms, Tombstone, head};
use crate::time::Timestamp;

/// The client's DELETE.
pub(super) fn deleted(record: &SessionRecord, now: Timestamp, terms: &Terms) -> Result<Decision, Refusal> {
    match record.state {
        State::Ready if now >= record.deadline => Err(Refusal::Overdue),
        State::Ready | State::Draining => Ok(ended(record, State::Deleted, DELETED, now, terms)),
        State::Initializing => Err(Refusal::NotReady(record.state)),
        State::Deleted | State::Expired | State::Closed => Err(Refusal::Ended(record.state)),
    }
}

/// The deadline. What goes on in a session keeps it from being idle, but does not prolong a drain.
pub(super) fn expired(
    record: &SessionRecord,
    now: Timestamp,
    activity: Activity,
    terms: &Terms,
) -> Result<Decision, Refusal> {
    let overdue = now >= record.deadline;
    match record.state {
        State::Initializing if overdue => Ok(discarded()),
        State::Ready if overdue && activity.is_idle() => Ok(expiry(record, now, terms)),
        State::Draining if overdue => Ok(ended(record, State::Deleted, GRACE_OVER, now, terms)),
        State::Initializing | State::Ready | State::Draining => Err(Refusal::Busy),
        State::Deleted | State::Expired | State::Closed => Err(Refusal::Ended(record.state)),
    }
}

/// An operator's order: now, whatever goes on.
pub(super) fn closed(record: &SessionRecord, now: Timestamp, reason: &str, terms: &Terms) -> Result<Decision, Refusal> {
    match record.state {
        State::Initializing => Ok(discarded()),
        State::Ready | State::Draining => Ok(ended(record, State::Closed, reason, now, terms)),
        State::Deleted | State::Expired | State::Closed => Err(Refusal::Ended(record.state)),
    }
}

/// The end of a session that nobody used until its deadline.
pub(super) fn expiry(record: &SessionRecord, now: Timestamp, terms: &Terms) -> Decision {
    let reason = if record.confirmed { IDLE } else { UNCONFIRMED };
    ended(record, State::Expired, reason, now, terms)
}

/// The end of a stored session as `state`.
pub(super) fn ended(record: &SessionRecord, state: State, reason: &str, now: Timestamp, terms: &Terms) -> Decision {
    debug_assert!(state.is_ended(), "an ending ends");
    let tombstone = Tombstone {
        key: record.key,
        server: record.server.clone(),
        principal: record.principal.clone(),
        client: record.client.clone(),
        agent: record.agent.clone(),
        state,
        reason: head(reason, Tombstone::REASON_CHARS_MAX),
        opened_at: record.opened_at,
        ended_at: now,
        keep_until: now.plus(terms.tombstone_retention),
        version: record.version,
        generation: record.generation + 1,
        epoch: record.epoch,
    };
    Decision { changes: vec![Change::End(tombstone)], effects: vec![Effect::ReleaseInstance] }
}

/// The end of a session that was never stored and whose id never left: there is nothing to keep.
pub(super) fn discarded() -> Decision {
    Decision { changes: Vec::new(), effects: vec![Effect::ReleaseInstance] }
}

/// The word for a reason among few: what metrics count by. An operator's own words are `order`.
pub(super) fn cause(reason: &str) -> &'static str {
    match reason {
        DELETED => "delete",
        DRAINED | DRAIN_CUT | GRACE_OVER => BY_DRAIN,
        IDLE => "idle",
        UNCONFIRMED => "unconfirmed",
        CONTRACT_CHANGED => "contract",
        NOT_LIVE => "row",
        reason if reason.starts_with(REMOVED) => "removed",
        _ => "order",
    }
}

/// The word for the reasons of a drain.
pub(super) const BY_DRAIN: &str = "drain";
/// How the reason of an ending begins whose server is not configured any more (T4).
pub const REMOVED: &str = "server removed";
pub(super) const DRAINED: &str = "drained";
pub(super) const DRAIN_CUT: &str = "drained, cut short by a restart of the gateway";
pub(super) const CONTRACT_CHANGED: &str = "the auth contract changed";
pub(super) const NOT_LIVE: &str = "its row was not that of a live session";
const DELETED: &str = "deleted by the client";
const GRACE_OVER: &str = "drained, with calls in flight when the grace was over";
const IDLE: &str = "idle";
const UNCONFIRMED: &str = "the client said nothing after its `initialize` was answered";
