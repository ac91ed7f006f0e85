//! Progress of calls of earlier workers, until their clients come back.
//!
//! It stays in the keeper's custody as long as it is here, and would come again to the next worker.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use mainstay_core::call::StreamId;

/// The messages by their calls, each with the number of its frame, oldest first.
#[derive(Debug, Default)]
pub(super) struct Unheard {
    calls: BTreeMap<StreamId, VecDeque<(u64, Bytes)>>,
    count: usize,
    bytes: usize,
}

impl Unheard {
    /// Keeps a message of `call`. Returns the frame of an older one that goes for it, if there would be too many:
    /// progress is replaced by what comes later.
    pub(super) fn keep(&mut self, call: StreamId, number: u64, message: &Bytes) -> Option<u64> {
        let messages = self.calls.entry(call).or_default();
        // In memory of its own: it may wait long, and must not keep what was read along with it.
        messages.push_back((number, Bytes::copy_from_slice(message)));
        let replaced = if messages.len() > CALL_MESSAGES_MAX { messages.pop_front() } else { None };
        (self.count, self.bytes) = (self.count + 1, self.bytes + message.len());
        replaced.map(|replaced| self.gone(&replaced))
    }

    /// A message is not here any more. Its frame.
    fn gone(&mut self, (number, message): &(u64, Bytes)) -> u64 {
        (self.count, self.bytes) = (self.count - 1, self.bytes - message.len());
        *number
    }

    /// All messages of `call`, which are not here any more.
    pub(super) fn take(&mut self, call: StreamId) -> VecDeque<(u64, Bytes)> {
        let messages = self.calls.remove(&call).unwrap_or_default();
        for message in &messages {
            self.gone(message);
        }
        messages
    }

    /// Lets go of the older half of what there is of the call of which there is most: its client sees the progress rise
    /// all the same. The frames; none if there is nothing.
    pub(super) fn thin(&mut self) -> Vec<u64> {
        let Some((&call, messages)) = self.calls.iter_mut().max_by_key(|(_, messages)| messages.len()) else {
            return Vec::new();
        };
        let gone: Vec<_> = messages.drain(..messages.len().div_ceil(2)).collect();
        if messages.is_empty() {
            self.calls.remove(&call);
        }
        gone.iter().map(|message| self.gone(message)).collect()
    }

    /// How many messages there are, and their bytes.
    pub(super) fn held(&self) -> (usize, usize) {
        (self.count, self.bytes)
    }

    /// Whether there are any of `call`.
    pub(super) fn has(&self, call: StreamId) -> bool {
        self.calls.contains_key(&call)
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
        assert_eq!(unheard.held().0, CALL_MESSAGES_MAX);
        assert!(unheard.take(call).into_iter().map(|(number, _)| number).eq(1..=most));
        assert!(!unheard.has(call) && unheard.thin().is_empty());
    }

    #[test]
    fn r7_where_there_is_most_the_older_half_goes_first() {
        let (mut unheard, [one, other]) = (Unheard::default(), [1, 2].map(|number| StreamId { epoch: 1, number }));
        for number in 1..=5 {
            unheard.keep(one, number, &Bytes::new());
        }
        unheard.keep(other, 6, &Bytes::new());
        assert_eq!(unheard.thin(), [1, 2, 3]);
        assert_eq!(unheard.thin(), [4]);
        assert_eq!([unheard.thin(), unheard.thin(), unheard.thin()].map(|gone| gone.len()), [1, 1, 0]);
        assert!(!unheard.has(one) && !unheard.has(other));
        assert_eq!(unheard.held(), (0, 0));
    }
}
