//! Use: what moves the idle deadline, and when the store learns of it (S5).

use super::{Change, Decision, Input, Mark, Refusal, Session, State, Terms};
use crate::time::Timestamp;

/// Where a use leads.
pub(super) struct Touched {
    pub(super) mark: Mark,
    /// Whether the store should learn of it.
    pub(super) due: bool,
}

/// A request, or the client's `initialized`.
pub(super) fn used(session: &Session, now: Timestamp, input: &Input, terms: &Terms) -> Result<Decision, Refusal> {
    let record = &session.record;
    debug_assert!(matches!(input, Input::Initialized | Input::Touch), "only these are uses");
    match record.state {
        State::Ready if now >= record.deadline => Err(Refusal::Overdue),
        State::Ready => {
            let Touched { mark: Mark { seen_at, deadline }, due } = next(session, now, terms);
            let changes = if due { vec![Change::Touch { key: record.key, seen_at, deadline }] } else { Vec::new() };
            Ok(Decision { changes, effects: Vec::new() })
        }
        State::Initializing | State::Draining => Err(Refusal::NotReady(record.state)),
        State::Deleted | State::Expired | State::Closed => Err(Refusal::Ended(record.state)),
    }
}

/// The mark that a use at `now` sets in a ready session.
///
/// The store learns of it if it has not heard of the session for the touch interval; and at once if it believes in a
/// deadline that is too late (the clock or the terms changed) or in the short one of an unconfirmed session.
pub(super) fn next(session: &Session, now: Timestamp, terms: &Terms) -> Touched {
    let seen_at = advanced(session.record.seen_at, now, terms);
    let mark = Mark { seen_at, deadline: seen_at.plus(terms.idle_expiry) };
    let stored = session.stored;
    let due = !session.record.confirmed
        || mark.deadline < stored.deadline
        || mark.seen_at.since(stored.seen_at) >= terms.touch_interval;
    Touched { mark, due }
}

/// Two requests may arrive in one order and get here in the other: the later one counts. A last use that lies further
/// ahead than that was noted under a clock that has since been put right: the present counts.
fn advanced(seen_at: Timestamp, now: Timestamp, terms: &Terms) -> Timestamp {
    if seen_at.since(now) <= terms.touch_interval { seen_at.max(now) } else { now }
}
