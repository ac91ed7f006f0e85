//! Which calls a child still owes an answer, or has answered to nobody yet, as far as workers have said.

use std::collections::BTreeMap;

use crate::renewal::state::CallsState;
use crate::types::{CallTag, OPEN_CALLS_MAX};

/// The calls of one child whose frame was taken and that no worker has settled.
#[derive(Debug, Default)]
pub(crate) struct OpenCalls {
    by_tag: BTreeMap<CallTag, u64>,
    by_age: BTreeMap<u64, CallTag>,
    last: u64,
    forgotten: u64,
}

impl OpenCalls {
    /// A call's frame was taken. If another had to be forgotten for it, returns how many were so far.
    pub(crate) fn open(&mut self, tag: CallTag) -> Option<u64> {
        self.settle(tag);
        self.last += 1;
        self.by_tag.insert(tag, self.last);
        self.by_age.insert(self.last, tag);
        if self.by_age.len() <= OPEN_CALLS_MAX {
            return None;
        }
        let (_, oldest) = self.by_age.pop_first()?;
        self.by_tag.remove(&oldest);
        self.forgotten += 1;
        Some(self.forgotten)
    }

    /// Nobody will ask for the call any more. One that is not open is fine.
    pub(crate) fn settle(&mut self, tag: CallTag) {
        if let Some(age) = self.by_tag.remove(&tag) {
            self.by_age.remove(&age);
        }
    }

    /// The open calls, oldest first.
    pub(crate) fn list(&self) -> Vec<CallTag> {
        self.by_age.values().copied().collect()
    }

    /// What is known, for a keeper that goes on in this one's place.
    pub(crate) fn carried(&self) -> CallsState {
        CallsState { open: self.list(), forgotten: self.forgotten }
    }

    /// The calls of an earlier keeper.
    pub(crate) fn of_carried(carried: CallsState) -> Self {
        let by_age: BTreeMap<u64, CallTag> = (1..).zip(carried.open).collect();
        Self {
            by_tag: by_age.iter().map(|(age, tag)| (*tag, *age)).collect(),
            last: by_age.len() as u64,
            by_age,
            forgotten: carried.forgotten,
        }
    }

    pub(crate) fn clear(&mut self) {
        self.by_tag.clear();
        self.by_age.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tag(number: u128) -> CallTag {
        CallTag::from_bytes(number.to_be_bytes())
    }

    #[test]
    fn r4_a_call_is_open_until_it_is_settled() {
        let mut calls = OpenCalls::default();
        for number in [3, 1, 2, 1] {
            assert_eq!(calls.open(tag(number)), None);
        }
        assert_eq!(calls.list(), [tag(3), tag(2), tag(1)]);
        calls.settle(tag(2));
        calls.settle(tag(9));
        assert_eq!(calls.list(), [tag(3), tag(1)]);
        calls.clear();
        assert_eq!(calls.list(), []);
    }

    #[test]
    fn beyond_the_bound_the_oldest_call_is_forgotten() {
        let mut calls = OpenCalls::default();
        let bound = OPEN_CALLS_MAX as u128;
        for number in 0..bound {
            assert_eq!(calls.open(tag(number)), None);
        }
        calls.settle(tag(0));
        assert_eq!(calls.open(tag(bound)), None);
        assert_eq!((calls.open(tag(bound + 1)), calls.open(tag(bound + 2))), (Some(1), Some(2)));
        assert_eq!(calls.list().first(), Some(&tag(3)));
        assert_eq!((calls.list().len(), calls.by_tag.len()), (OPEN_CALLS_MAX, OPEN_CALLS_MAX));
    }
}
