//! Answers to calls of earlier workers, until somebody has taken them.
//!
//! Each is in the keeper's custody as long as its call is open, and would come again to the next worker. How many there
//! may be is for [`Table`](super::table::Table) to say.

use std::collections::BTreeMap;

use bytes::Bytes;
use mainstay_core::call::StreamId;

/// The answers, by their frames: oldest first.
#[derive(Debug, Default)]
pub(super) struct Parked(BTreeMap<(u64, StreamId), Bytes>);

impl Parked {
    /// Keeps the answer to `call` that came in the frame of that number.
    pub(super) fn park(&mut self, call: StreamId, number: u64, answer: &Bytes) {
        // In memory of its own: it may wait long, and must not keep what was read along with it.
        self.0.insert((number, call), Bytes::copy_from_slice(answer));
    }

    /// The answer to `call`. It stays: whoever asked may go away before it is handed on.
    pub(super) fn answer(&self, call: StreamId, number: u64) -> Option<Bytes> {
        self.0.get(&(number, call)).cloned()
    }

    pub(super) fn remove(&mut self, call: StreamId, number: u64) {
        self.0.remove(&(number, call));
    }

    /// The calls whose answers are here.
    pub(super) fn calls(&self) -> Vec<StreamId> {
        self.0.keys().map(|(_, call)| *call).collect()
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.0.len()
    }

    /// The call whose answer is the oldest.
    pub(super) fn oldest(&self) -> Option<StreamId> {
        self.0.first_key_value().map(|((_, call), _)| *call)
    }
}
