//! A child's output in the keeper's custody: kept, in order, until a worker has said that it is dealt with.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use bytes::Bytes;
use mainstay_core::wire::lines::Line;

use crate::protocol::ToWorker;
use crate::renewal::state::FramesState;
use crate::types::{CUSTODY_BYTES_MAX, CUSTODY_FRAMES_MAX, ChildId};

/// The frames of one child that are not dealt with. Any of them may be dealt with before those that came earlier: the
/// answer to a call waits for its client, and holds up nothing that comes behind it.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    kept: BTreeMap<u64, Line>,
    bytes: usize,
    last_number: u64,
    /// Up to which number the worker in charge was sent what is kept.
    sent_through: u64,
    /// Whether nobody will ever ask for them.
    is_discarding: bool,
}

impl Frames {
    /// Whether another frame may be taken. If not, the child has to wait: nothing is ever dropped.
    pub(crate) fn has_room(&self) -> bool {
        self.kept.len() < CUSTODY_FRAMES_MAX && self.bytes < CUSTODY_BYTES_MAX
    }

    /// Takes the next frame.
    pub(crate) fn push(&mut self, line: Line) {
        self.last_number += 1;
        if !self.is_discarding {
            self.bytes += cost_of(&line);
            self.kept.insert(self.last_number, unshared(line));
        }
    }

    /// The next frame that the worker in charge has not been sent.
    pub(crate) fn next_to_send(&mut self, child: ChildId) -> Option<ToWorker> {
        let (&number, line) = self.kept.range(self.sent_through + 1..).next()?;
        self.sent_through = number;
        Some(match line.clone() {
            Line::Whole(bytes) => ToWorker::Frame { child, number, bytes },
            Line::Oversize { head, tail, bytes } => ToWorker::Oversize { child, number, bytes, head, tail },
        })
    }

    pub(crate) fn all_sent(&self) -> bool {
        self.kept.range(self.sent_through + 1..).next().is_none()
    }

    /// Drops the frames with these numbers, but none that was never sent.
    pub(crate) fn acknowledge(&mut self, numbers: RangeInclusive<u64>) {
        let (from, through) = (*numbers.start(), self.sent_through.min(*numbers.end()));
        while from <= through
            && let Some((&number, _)) = self.kept.range(from..=through).next()
            && let Some(line) = self.kept.remove(&number)
        {
            self.bytes -= cost_of(&line);
        }
    }

    /// A new worker: it is sent everything that is kept.
    pub(crate) fn rewind(&mut self) {
        self.sent_through = 0;
    }

    /// What is kept, for a keeper that goes on in this one's place.
    pub(crate) fn carried(&self) -> FramesState {
        FramesState {
            kept: self.kept.iter().map(|(number, line)| (*number, line.clone())).collect(),
            last_number: self.last_number,
            is_discarding: self.is_discarding,
        }
    }

    /// The frames of an earlier keeper. The next worker is sent all of them.
    pub(crate) fn of_carried(carried: FramesState) -> Self {
        Self {
            bytes: carried.kept.iter().map(|(_, line)| cost_of(line)).sum(),
            kept: carried.kept.into_iter().collect(),
            last_number: carried.last_number,
            sent_through: 0,
            is_discarding: carried.is_discarding,
        }
    }

    /// Nobody will ask for what is kept, nor for what comes.
    pub(crate) fn discard(&mut self) {
        self.is_discarding = true;
        self.kept.clear();
        self.bytes = 0;
    }
}

/// The line in memory of its own, if it is short: a short answer that waits for its client must not keep the whole buffer
/// that it was read into.
fn unshared(line: Line) -> Line {
    match line {
        Line::Whole(bytes) if bytes.len() <= COPIED_BYTES_MAX => Line::Whole(Bytes::copy_from_slice(&bytes)),
        Line::Whole(_) | Line::Oversize { .. } => line,
    }
}

fn cost_of(line: &Line) -> usize {
    match line {
        Line::Whole(bytes) => bytes.len(),
        Line::Oversize { head, tail, .. } => head.len() + tail.len(),
    }
}

/// The longest line that is copied out of its buffer, in bytes.
const COPIED_BYTES_MAX: usize = 4 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> Line {
        Line::Whole(Bytes::copy_from_slice(text.as_bytes()))
    }

    fn sent(frames: &mut Frames) -> Vec<u64> {
        let mut numbers = Vec::new();
        while let Some(message) = frames.next_to_send(ChildId::new(1)) {
            if let ToWorker::Frame { number, .. } | ToWorker::Oversize { number, .. } = message {
                numbers.push(number);
            }
        }
        numbers
    }

    #[test]
    fn c8_unacknowledged_frames_come_again_and_acknowledged_ones_do_not() {
        let mut frames = Frames::default();
        for text in ["a", "b", "c"] {
            frames.push(line(text));
        }
        assert_eq!(sent(&mut frames), [1, 2, 3]);
        frames.acknowledge(0..=2);
        frames.push(line("d"));
        assert_eq!(sent(&mut frames), [4]);
        frames.rewind();
        assert_eq!(sent(&mut frames), [3, 4]);
        frames.acknowledge(3..=4);
        frames.rewind();
        assert_eq!(sent(&mut frames), [0_u64; 0]);
        assert_eq!((frames.bytes, frames.all_sent()), (0, true));
    }

    #[test]
    fn r4_a_frame_that_waits_holds_up_nothing_behind_it() {
        let mut frames = Frames::default();
        frames.push(line("the answer"));
        for _ in 0..3 * CUSTODY_FRAMES_MAX {
            frames.push(line("news"));
            let number = *sent(&mut frames).last().unwrap();
            frames.acknowledge(number..=number);
            assert!(frames.has_room());
        }
        assert_eq!((frames.kept.len(), frames.bytes), (1, "the answer".len()));
        frames.rewind();
        assert_eq!(sent(&mut frames), [1]);
        #[expect(clippy::reversed_empty_ranges, reason = "a worker may say anything")]
        frames.acknowledge(2..=1);
        assert_eq!(frames.kept.len(), 1);
        frames.acknowledge(1..=1);
        assert_eq!((frames.kept.len(), frames.bytes), (0, 0));
    }

    #[test]
    fn a_frame_that_was_never_sent_can_not_be_acknowledged() {
        let mut frames = Frames::default();
        frames.push(line("a"));
        frames.acknowledge(0..=u64::MAX);
        assert_eq!(sent(&mut frames), [1]);
        frames.acknowledge(0..=u64::MAX);
        frames.push(line("b"));
        assert_eq!(sent(&mut frames), [2]);
    }

    #[test]
    fn both_bounds_hold_and_acknowledging_makes_room() {
        let mut frames = Frames::default();
        while frames.has_room() {
            frames.push(line("x"));
        }
        assert_eq!(frames.kept.len(), CUSTODY_FRAMES_MAX);
        sent(&mut frames);
        frames.acknowledge(1..=1);
        assert!(frames.has_room());

        let mut frames = Frames::default();
        let big = "x".repeat(1024 * 1024);
        while frames.has_room() {
            frames.push(line(&big));
        }
        assert_eq!(frames.bytes, CUSTODY_BYTES_MAX);
    }

    #[test]
    fn what_nobody_waits_for_takes_no_room_but_is_counted() {
        let mut frames = Frames::default();
        frames.push(line("a"));
        frames.discard();
        frames.push(line("b"));
        assert_eq!((frames.bytes, frames.kept.len(), frames.last_number), (0, 0, 2));
    }
}
