//! What a worker is done with, until the keeper is told.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use crate::channel::Outbox;
use crate::protocol::ToKeeper;
use crate::types::{CallTag, ChildId};

/// Settled calls and acknowledged frames, by child.
#[derive(Default)]
pub(super) struct Dealt {
    children: BTreeMap<ChildId, Parts>,
    count: usize,
}

#[derive(Default)]
struct Parts {
    calls: Vec<CallTag>,
    /// In the order in which they were said; neighbours are one.
    frames: Vec<RangeInclusive<u64>>,
}

impl Dealt {
    pub(super) fn acknowledge(&mut self, child: ChildId, frames: RangeInclusive<u64>) {
        let known = &mut self.children.entry(child).or_default().frames;
        self.count += 1;
        match known.last_mut() {
            Some(last) if last.end().checked_add(1) == Some(*frames.start()) => *last = *last.start()..=*frames.end(),
            Some(_) | None => known.push(frames),
        }
    }

    pub(super) fn settle(&mut self, child: ChildId, calls: &[CallTag]) {
        self.children.entry(child).or_default().calls.extend_from_slice(calls);
        self.count += calls.len();
    }

    pub(super) fn is_empty(&self) -> bool {
        self.children.is_empty()
    }

    /// Whether it is enough to go without waiting for company any longer.
    pub(super) fn is_full(&self) -> bool {
        self.count >= DEALT_MAX
    }

    /// Puts it behind what `out` already holds. Calls go ahead of frames: a call whose answer is gone must not be open.
    pub(super) fn encode(self, out: &mut Outbox) {
        for (child, parts) in self.children {
            for tags in parts.calls.chunks(TAGS_MAX) {
                ToKeeper::Settle { child, tags: tags.to_vec() }.encode(out);
            }
            for frames in parts.frames {
                ToKeeper::Acknowledge { child, from: *frames.start(), through: *frames.end() }.encode(out);
            }
        }
    }
}

/// Calls and acknowledgements that go without waiting for company any longer.
const DEALT_MAX: usize = 64;

/// Calls that are settled by one message.
const TAGS_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    fn said(dealt: Dealt) -> Vec<ToKeeper> {
        let mut out = Outbox::default();
        dealt.encode(&mut out);
        let mut rest = out.into_bytes();
        let mut messages = Vec::new();
        while !rest.is_empty() {
            let len = u32::from_le_bytes(rest.split_to(4)[..].try_into().unwrap());
            messages.push(ToKeeper::decode(rest.split_to(usize::try_from(len).unwrap())).unwrap());
        }
        messages
    }

    #[test]
    fn r4_a_call_is_settled_before_its_answer_is_acknowledged() {
        let (child, tag) = (ChildId::new(1), CallTag::from_bytes([7; 16]));
        let mut dealt = Dealt::default();
        for frames in [1..=1, 2..=4, 6..=6, 7..=7] {
            dealt.acknowledge(child, frames);
        }
        dealt.settle(child, &[tag]);
        let expected = [
            ToKeeper::Settle { child, tags: vec![tag] },
            ToKeeper::Acknowledge { child, from: 1, through: 4 },
            ToKeeper::Acknowledge { child, from: 6, through: 7 },
        ];
        assert_eq!(said(dealt), expected);
    }

    #[test]
    fn many_calls_go_in_messages_of_bounded_size() {
        let mut dealt = Dealt::default();
        dealt.settle(ChildId::new(1), &[CallTag::from_bytes([0; 16]); TAGS_MAX + 1]);
        assert!(dealt.is_full());
        let settle = |len| ToKeeper::Settle { child: ChildId::new(1), tags: vec![CallTag::from_bytes([0; 16]); len] };
        assert_eq!(said(dealt), [settle(TAGS_MAX), settle(1)]);
    }
}
