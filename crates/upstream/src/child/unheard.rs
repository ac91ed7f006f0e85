//! Progress of calls of earlier workers, until their clients come back.
//!
//! It stays in the keeper's custody as long as it is here, and would come again to the next worker.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use mainstay_core::call::StreamId;

/// The messages by their calls, each with the number of its frame, oldest first.
#[derive(Debug, Default)]
pub(super) struct Unheard(BTreeMap<StreamId, VecDeque<(u64, Bytes)>>);

impl Unheard {
    /// Keeps a message of `call`. Returns the frame of an older one that goes for it, if there would be too many:
    /// progress is replaced by what comes later.
    pub(super) fn keep(&mut self, call: StreamId, number: u64, message: &Bytes) -> Option<u64> {
        let messages = self.0.entry(call).or_default();
        // In memory of its own: it may wait long, and must not keep what was read along with it.
        messages.push_back((number, Bytes::copy_from_slice(message)));
        if messages.len() <= CALL_MESSAGES_MAX {
            return None;
        }
        messages.pop_front().map(|(oldest, _)| oldest)
    }

    /// All messages of `call`, which are not here any more.
    pub(super) fn take(&mut self, call: StreamId) -> impl Iterator<Item = (u64, Bytes)> + use<> {
        self.0.remove(&call).unwrap_or_default().into_iter()
    }

    /// The oldest call of which there are any.
    pub(super) fn oldest(&self) -> Option<StreamId> {
        self.0.first_key_value().map(|(call, _)| *call)
    }

    /// Whether there are any of `call`.
    pub(super) fn has(&self, call: StreamId) -> bool {
        self.0.contains_key(&call)
    }
}

/// So many messages of one call are kept.
const CALL_MESSAGES_MAX: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r7_the_oldest_progress_of_a_call_goes_for_the_newest() {
        let (mut unheard, call) = (Unheard::default(), StreamId { epoch: 1, number: 2 });
        let most = CALL_MESSAGES_MAX as u64;
        assert!((0..most).all(|number| unheard.keep(call, number, &Bytes::new()).is_none()));
        assert_eq!(unheard.keep(call, most, &Bytes::new()), Some(0));
        assert_eq!(unheard.oldest(), Some(call));
        assert!(unheard.take(call).map(|(number, _)| number).eq(1..=most));
        assert!(!unheard.has(call) && unheard.oldest().is_none());
    }
}
