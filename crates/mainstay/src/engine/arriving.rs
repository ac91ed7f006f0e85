//! Sessions on their way into the table: what their servers say meanwhile waits for them.
//!
//! A child speaks as soon as it is there, and the keeper gives what its last worker left as soon as the link is made. The
//! session is in the table only a moment later, and what came before must not be lost for that.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use mainstay_core::id::SessionKey;
use mainstay_upstream::{Frame, Receipt};
use parking_lot::Mutex;

use crate::engine::Engine;
use crate::engine::live::Live;

/// What a server says that belongs to no call.
pub(crate) enum Said {
    /// A message, and the frame that it came in, if a child wrote it.
    Message { message: Bytes, frame: Option<Frame> },
    /// A child's question.
    Question { message: Bytes, receipt: Receipt },
}

/// What waits for sessions that are on their way.
#[derive(Default)]
pub(crate) struct Waiting(Mutex<BTreeMap<SessionKey, Vec<Said>>>);

impl Waiting {
    /// What is said to `key` from here on waits.
    fn begin(&self, key: SessionKey) {
        self.0.lock().entry(key).or_default();
    }

    /// Keeps what was said to `key`, if that is on its way; it comes back otherwise. What finds no room is dropped.
    fn keep(&self, key: SessionKey, said: Said) -> Option<Said> {
        let mut waiting = self.0.lock();
        let Some(kept) = waiting.get_mut(&key) else { return Some(said) };
        if kept.len() < MESSAGES_MAX {
            kept.push(said);
        } else {
            tracing::debug!(session = %key.session_ref(), "too much is said to a session that is not there yet; dropped");
        }
        None
    }

    /// `key` has arrived, or never will. `take` gets what waits, and nothing else is said to it meanwhile.
    fn end(&self, key: SessionKey, take: impl FnOnce(Vec<Said>)) {
        let mut waiting = self.0.lock();
        if let Some(kept) = waiting.remove(&key) {
            take(kept);
        }
    }
}

/// A session on its way. Dropping it before it is [there](Self::complete) drops what waits.
pub(crate) struct Arrival {
    engine: Arc<Engine>,
    key: SessionKey,
}

impl Engine {
    /// What its server says to the session `key` waits from here on. To be called before its link is made.
    pub(crate) fn expect(self: &Arc<Self>, key: SessionKey) -> Arrival {
        self.arriving.begin(key);
        Arrival { engine: Arc::clone(self), key }
    }

    /// Gives what was said to the session `key` to it, now or once it is there. What is said to one that is neither there
    /// nor on its way is nobody's.
    pub(super) fn pass_on(self: &Arc<Self>, key: SessionKey, said: Said) {
        let there = || self.live.get(&key).map(|live| Arc::clone(&live));
        let Some(live) = there() else {
            // It may arrive just now.
            if let Some(said) = self.arriving.keep(key, said)
                && let Some(live) = there()
            {
                self.take_said(&live, said);
            }
            return;
        };
        self.take_said(&live, said);
    }
}

impl Arrival {
    /// Puts the session into the table, behind what was said to it on its way.
    pub(crate) fn complete(self, live: &Arc<Live>) {
        self.engine.arriving.end(self.key, |waiting| {
            waiting.into_iter().for_each(|said| self.engine.take_said(live, said));
            self.engine.live.insert(self.key, Arc::clone(live));
        });
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        self.engine.arriving.end(self.key, drop);
    }
}

/// How much may wait for one session.
const MESSAGES_MAX: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    fn said(text: &'static str) -> Said {
        Said::Message { message: Bytes::from_static(text.as_bytes()), frame: None }
    }

    fn taken(waiting: &Waiting, key: SessionKey) -> Option<Vec<Bytes>> {
        let mut taken = None;
        let message = |said| match said {
            Said::Message { message, .. } | Said::Question { message, .. } => message,
        };
        waiting.end(key, |kept| taken = Some(kept.into_iter().map(message).collect()));
        taken
    }

    #[test]
    fn c8_what_is_said_to_a_session_on_its_way_waits_in_order_and_within_bounds() {
        let (waiting, [key, other]) = (Waiting::default(), [1, 2].map(|byte| SessionKey::from_bytes([byte; 32])));
        assert!(waiting.keep(key, said("nobody's")).is_some());
        waiting.begin(key);
        assert!(waiting.keep(other, said("another's")).is_some());
        assert!(["1", "2"].into_iter().all(|text| waiting.keep(key, said(text)).is_none()));
        assert_eq!(taken(&waiting, other), None);
        assert_eq!(taken(&waiting, key), Some(vec![Bytes::from_static(b"1"), Bytes::from_static(b"2")]));
        assert_eq!(taken(&waiting, key), None, "once");
        waiting.begin(key);
        (0..=MESSAGES_MAX).for_each(|_| assert!(waiting.keep(key, said("much")).is_none()));
        assert_eq!(taken(&waiting, key).map(|kept| kept.len()), Some(MESSAGES_MAX));
    }
}
