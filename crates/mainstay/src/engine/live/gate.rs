//! The way into a session: its machine, who is let in, and whether it is leaving memory.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use mainstay_core::principal::Principal;
use mainstay_core::session::{Activity, Change, Refusal, Session, Terms};
use mainstay_core::time::Timestamp;

use crate::engine::live::Live;

/// The machine, and whether its session is on its way out of memory. Whoever finds it leaving waits in the session's
/// lane and looks again.
pub(super) struct Gate {
    pub(super) session: Session,
    pub(super) leaving: bool,
}

/// Why a request is not let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Barred {
    /// The machine refuses it.
    Refused(Refusal),
    /// The session is on its way out of memory: look again.
    Leaving,
}

impl Live {
    /// Reads the machine.
    pub fn with_session<T>(&self, read: impl FnOnce(&Session) -> T) -> T {
        read(&self.gate.lock().session)
    }

    /// Applies changes that are durable.
    pub fn apply(&self, changes: &[Change]) {
        let mut gate = self.gate.lock();
        for change in changes {
            gate.session.apply(change);
        }
    }

    /// Lets a request of `principal` in and moves the idle deadline. With the entry comes a hint for the store, at most
    /// one every few seconds (S5).
    ///
    /// # Errors
    /// [`Barred`]: the machine's refusal (S4), or the session is leaving memory.
    pub fn admit(
        self: &Arc<Self>,
        now: Timestamp,
        principal: &Principal,
        terms: &Terms,
    ) -> Result<(Entry, Option<Change>), Barred> {
        let mut gate = self.gate.lock();
        match gate.session.admit(now, principal) {
            // A call in flight or an open stream is use: the session is not idle, only long unasked.
            Err(Refusal::Overdue) if !self.activity().is_idle() => {}
            admitted => admitted.map_err(Barred::Refused)?,
        }
        if gate.leaving {
            return Err(Barred::Leaving);
        }
        self.entries.fetch_add(1, Ordering::AcqRel);
        Ok((Entry(Arc::clone(self)), gate.session.touch(now, terms)))
    }

    /// Lets an operator's order in: it counts as use until the entry is dropped, so that the session stays in memory.
    /// `None` if it is leaving.
    pub fn enter(self: &Arc<Self>) -> Option<Entry> {
        let gate = self.gate.lock();
        if gate.leaving {
            return None;
        }
        self.entries.fetch_add(1, Ordering::AcqRel);
        Some(Entry(Arc::clone(self)))
    }

    /// Moves the idle deadline on behalf of the end of a call or stream.
    pub fn touch(&self, now: Timestamp, terms: &Terms) -> Option<Change> {
        self.gate.lock().session.touch(now, terms)
    }

    /// Notes what goes on in the session as use of it, and what the ledger should learn: `None` if it knows.
    pub fn note_use(&self, now: Timestamp, terms: &Terms) -> Option<Change> {
        let mut gate = self.gate.lock();
        if !self.activity().is_idle() {
            return gate.session.touch(now, terms);
        }
        let record = gate.session.record();
        Some(Change::Touch { key: record.key, seen_at: record.seen_at, deadline: record.deadline })
    }

    /// Bars the way in if `may` agrees, under the gate's lock; from then on nobody is admitted. The caller holds the
    /// session's lane, and either takes the session out of the table or [opens](Self::stay) the gate again.
    pub fn leave<T>(&self, may: impl FnOnce(&Session, Activity) -> Option<T>) -> Option<T> {
        let mut gate = self.gate.lock();
        let agreed = may(&gate.session, self.activity())?;
        gate.leaving = true;
        Some(agreed)
    }

    /// Opens the gate again: the session stays.
    pub fn stay(&self) {
        self.gate.lock().leaving = false;
    }
}

/// A request that was let in. Dropping it ends its claim on the session's attention.
pub struct Entry(Arc<Live>);

impl Deref for Entry {
    type Target = Arc<Live>;

    fn deref(&self) -> &Arc<Live> {
        &self.0
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.0.entries.fetch_sub(1, Ordering::AcqRel);
        self.0.idle.notify_waiters();
    }
}
