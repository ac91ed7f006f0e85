//! Which frames of a child the keeper need not keep any more, and which calls it need not name.
//!
//! What is dealt with is let go of a little later: whoever got it may need a moment to hand it on, and a worker that is
//! killed in that moment must leave it in custody. So it goes at the second tick. If much is outstanding it goes sooner,
//! since the keeper stops reading a child with too much of it.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use mainstay_keeper::{CUSTODY_BYTES_MAX, CUSTODY_FRAMES_MAX, CallTag, OPEN_CALLS_MAX};

/// The frames that are not acknowledged yet.
#[derive(Debug, Default)]
pub(super) struct Acks {
    /// Frames that are not dealt with.
    frames: BTreeMap<u64, Frame>,
    held_bytes: usize,
    /// Dealt with since the last tick.
    fresh: Release,
    /// Dealt with before the last tick.
    ripe: Release,
    /// What nobody can come back for: it goes at the next tick, or as soon as there is a little of it.
    free: Release,
}

#[derive(Debug)]
struct Frame {
    bytes: usize,
    /// How many of its messages are not dealt with: one, but in a batch.
    parts: usize,
}

/// What the keeper is to let go of.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Release {
    /// Calls that are settled. To be said before the frames are acknowledged.
    pub(super) calls: Vec<CallTag>,
    frames: Vec<u64>,
    bytes: usize,
}

impl Acks {
    /// A frame has come.
    pub(super) fn arrived(&mut self, number: u64, bytes: usize) {
        self.frames.insert(number, Frame { bytes, parts: 1 });
        self.held_bytes += bytes;
    }

    /// The frame turns out to have so many messages, each of which is dealt with by itself.
    pub(super) fn split(&mut self, number: u64, parts: usize) {
        if let Some(frame) = self.frames.get_mut(&number) {
            frame.parts = parts;
        }
    }

    /// A message of the frame is where it belongs, or nowhere.
    pub(super) fn delivered(&mut self, number: u64) {
        let Some(frame) = self.frames.get_mut(&number) else { return };
        frame.parts = frame.parts.saturating_sub(1);
        if frame.parts == 0
            && let Some(frame) = self.frames.remove(&number)
        {
            self.held_bytes -= frame.bytes;
            self.fresh.bytes += frame.bytes;
            self.fresh.frames.push(number);
        }
    }

    /// Nobody will ask for the call any more.
    pub(super) fn settled(&mut self, call: CallTag) {
        self.fresh.calls.push(call);
    }

    /// How much is dealt with since the last tick, for [`free_since`](Self::free_since).
    pub(super) fn mark(&self) -> (usize, usize, usize) {
        (self.fresh.calls.len(), self.fresh.frames.len(), self.fresh.bytes)
    }

    /// Nobody can come back for what was dealt with since `mark`: a worker that is killed now need not leave it.
    pub(super) fn free_since(&mut self, (calls, frames, bytes): (usize, usize, usize)) {
        let (calls, frames) = (self.fresh.calls.split_off(calls), self.fresh.frames.split_off(frames));
        let bytes_since = self.fresh.bytes - bytes;
        self.fresh.bytes = bytes;
        self.free.append(Release { calls, frames, bytes: bytes_since });
    }

    /// Time has passed. Returns what is to be let go now.
    pub(super) fn tick(&mut self) -> Release {
        let mut release = std::mem::replace(&mut self.ripe, std::mem::take(&mut self.fresh));
        release.append(std::mem::take(&mut self.free));
        release
    }

    /// What is to be let go without waiting for a tick, the older first, because there is too much of it.
    pub(super) fn overflow(&mut self) -> Release {
        let mut release = Release::default();
        if self.free.calls.len() > FREE_CALLS || self.free.bytes > FREE_BYTES {
            release.append(std::mem::take(&mut self.free));
        }
        for _ in 0..2 {
            if self.is_much() {
                release.append(self.tick());
            }
        }
        release
    }

    /// Everything that is dealt with, at the end.
    pub(super) fn flush(&mut self) -> Release {
        let mut release = self.tick();
        release.append(self.tick());
        release
    }

    /// Whether anything waits for a tick.
    pub(super) fn is_due(&self) -> bool {
        [&self.fresh, &self.ripe, &self.free].iter().any(|release| !release.is_empty())
    }

    /// Whether every frame is dealt with.
    pub(super) fn is_settled(&self) -> bool {
        self.frames.is_empty()
    }

    /// How many frames and bytes are not dealt with.
    pub(super) fn held(&self) -> (usize, usize) {
        (self.frames.len(), self.held_bytes)
    }

    fn is_much(&self) -> bool {
        self.fresh.bytes + self.ripe.bytes > URGENT_BYTES
            || self.fresh.frames.len() + self.ripe.frames.len() > URGENT_FRAMES
            || self.fresh.calls.len() + self.ripe.calls.len() > URGENT_CALLS
    }
}

impl Release {
    /// Whether there is nothing to say.
    pub(super) fn is_empty(&self) -> bool {
        self.calls.is_empty() && self.frames.is_empty()
    }

    /// The frames, neighbours together.
    pub(super) fn frames(mut self) -> Vec<RangeInclusive<u64>> {
        self.frames.sort_unstable();
        let mut ranges: Vec<RangeInclusive<u64>> = Vec::new();
        for number in self.frames {
            match ranges.last_mut() {
                Some(last) if *last.end() + 1 == number => *last = *last.start()..=number,
                Some(_) | None => ranges.push(number..=number),
            }
        }
        ranges
    }

    fn append(&mut self, mut later: Self) {
        self.calls.append(&mut later.calls);
        self.frames.append(&mut later.frames);
        self.bytes += later.bytes;
    }
}

/// What may wait for a tick. With it, and with what [`Table`](super::table::Table) lets stand, the keeper's bounds are
/// not reached.
const URGENT_BYTES: usize = CUSTODY_BYTES_MAX / 4;
const URGENT_FRAMES: usize = CUSTODY_FRAMES_MAX / 4;
const URGENT_CALLS: usize = OPEN_CALLS_MAX / 4;

/// So many calls that nobody can come back for may wait for a tick. A worker that dies leaves no more of them, for the
/// next one to find out that they are nobody's.
const FREE_CALLS: usize = 64;
const FREE_BYTES: usize = URGENT_BYTES / 16;

#[cfg(test)]
mod tests {
    use super::*;

    fn release(calls: &[CallTag], frames: &[u64], bytes: usize) -> Release {
        Release { calls: calls.to_vec(), frames: frames.to_vec(), bytes }
    }

    #[test]
    fn c8_a_frame_is_let_go_at_the_second_tick_after_its_delivery() {
        let mut acks = Acks::default();
        acks.arrived(1, 10);
        assert_eq!((acks.tick(), acks.is_due()), (Release::default(), false));
        acks.delivered(1);
        assert!(acks.is_due() && acks.is_settled());
        assert_eq!((acks.tick(), acks.is_due()), (Release::default(), true));
        assert_eq!((acks.tick(), acks.is_due()), (release(&[], &[1], 10), false));
        assert_eq!(acks.tick(), Release::default());
    }

    #[test]
    fn c8_what_nobody_can_come_back_for_goes_at_the_next_tick_and_takes_nothing_else_along() {
        let (mut acks, tag) = (Acks::default(), CallTag::from_bytes([1; 16]));
        (1..=2).for_each(|number| acks.arrived(number, 10));
        acks.delivered(1);
        let mark = acks.mark();
        acks.settled(tag);
        acks.delivered(2);
        acks.free_since(mark);
        assert!(acks.is_due());
        assert_eq!(acks.tick(), release(&[tag], &[2], 10));
        assert_eq!(acks.tick(), release(&[], &[1], 10));
    }

    #[test]
    fn c8_a_worker_that_dies_leaves_few_answers_that_nobody_can_come_back_for() {
        let (mut acks, tag) = (Acks::default(), CallTag::from_bytes([1; 16]));
        acks.arrived(0, 10);
        acks.delivered(0);
        let (mut kept, mut kept_max) = (0, 0);
        for number in 1..=URGENT_CALLS as u64 {
            acks.arrived(number, 10);
            let mark = acks.mark();
            acks.settled(tag);
            acks.delivered(number);
            acks.free_since(mark);
            let release = acks.overflow();
            assert!(!release.frames.contains(&0), "somebody may come back for what that carried");
            kept = kept + 1 - release.calls.len();
            kept_max = kept_max.max(kept);
        }
        assert_eq!(kept_max, FREE_CALLS);
    }

    #[test]
    fn r4_a_frame_that_is_not_dealt_with_holds_up_no_other() {
        let mut acks = Acks::default();
        (4..=7).for_each(|number| acks.arrived(number, 1));
        [7, 4, 6].into_iter().for_each(|number| acks.delivered(number));
        assert_eq!(acks.held(), (1, 1));
        assert_eq!(acks.flush().frames(), [4..=4, 6..=7]);
        acks.delivered(5);
        acks.delivered(5);
        assert_eq!((acks.flush().frames(), acks.is_settled()), (vec![5..=5], true));
    }

    #[test]
    fn r4_the_frame_of_a_batch_stays_until_each_of_its_messages_is_dealt_with() {
        let mut acks = Acks::default();
        acks.arrived(1, 9);
        acks.split(1, 2);
        acks.delivered(1);
        assert_eq!((acks.flush(), acks.held()), (Release::default(), (1, 9)));
        acks.delivered(1);
        assert_eq!(acks.flush(), release(&[], &[1], 9));
    }

    #[test]
    fn much_is_let_go_at_once_and_the_older_first() {
        let mut acks = Acks::default();
        for number in 1..=3 {
            acks.arrived(number, URGENT_BYTES / 2 + 1);
        }
        acks.delivered(1);
        assert_eq!((acks.overflow(), acks.tick()), (Release::default(), Release::default()));
        acks.delivered(2);
        assert_eq!(acks.overflow(), release(&[], &[1], URGENT_BYTES / 2 + 1));
        acks.delivered(3);
        assert_eq!(acks.overflow(), release(&[], &[2], URGENT_BYTES / 2 + 1));
        let tag = CallTag::from_bytes([1; 16]);
        (0..=URGENT_CALLS).for_each(|_| acks.settled(tag));
        assert_eq!((acks.overflow().calls.len(), acks.is_due()), (URGENT_CALLS + 1, false));
    }
}
