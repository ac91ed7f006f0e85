//! A child's output in the keeper's custody: kept, in order, until a worker has said that it is dealt with.

use std::collections::VecDeque;

use mainstay_core::wire::lines::Line;

use crate::protocol::ToWorker;
use crate::types::{CUSTODY_BYTES_MAX, CUSTODY_FRAMES_MAX, ChildId};

/// The unacknowledged frames of one child.
#[derive(Debug)]
pub(crate) struct Frames {
    kept: VecDeque<Line>,
    bytes: usize,
    /// The number of the first kept frame, or of the next one to come.
    first_number: u64,
    /// How many of the kept frames were sent to the worker in charge.
    sent: usize,
    /// Whether nobody will ever ask for them.
    is_discarding: bool,
}

impl Frames {
    pub(crate) fn new() -> Self {
        Self { kept: VecDeque::new(), bytes: 0, first_number: 1, sent: 0, is_discarding: false }
    }

    /// Whether another frame may be taken. If not, the child has to wait: nothing is ever dropped.
    pub(crate) fn has_room(&self) -> bool {
        self.kept.len() < CUSTODY_FRAMES_MAX && self.bytes < CUSTODY_BYTES_MAX
    }

    /// Takes the next frame.
    pub(crate) fn push(&mut self, line: Line) {
        if self.is_discarding {
            self.first_number += 1;
            return;
        }
        self.bytes += cost_of(&line);
        self.kept.push_back(line);
    }

    /// The next frame that the worker in charge has not been sent.
    pub(crate) fn next_to_send(&mut self, child: ChildId) -> Option<ToWorker> {
        let line = self.kept.get(self.sent)?.clone();
        let number = self.first_number + self.sent as u64;
        self.sent += 1;
        Some(match line {
            Line::Whole(bytes) => ToWorker::Frame { child, number, bytes },
            Line::Oversize { head, tail, bytes } => ToWorker::Oversize { child, number, bytes, head, tail },
        })
    }

    pub(crate) fn all_sent(&self) -> bool {
        self.sent == self.kept.len()
    }

    /// Drops all frames up to number `through`, but none that was never sent.
    pub(crate) fn acknowledge(&mut self, through: u64) {
        while self.sent > 0 && self.first_number <= through {
            self.drop_first();
            self.sent -= 1;
        }
    }

    /// A new worker: it is sent everything that is kept.
    pub(crate) fn rewind(&mut self) {
        self.sent = 0;
    }

    /// Nobody will ask for what is kept, nor for what comes.
    pub(crate) fn discard(&mut self) {
        self.is_discarding = true;
        while !self.kept.is_empty() {
            self.drop_first();
        }
        self.sent = 0;
    }

    fn drop_first(&mut self) {
        if let Some(line) = self.kept.pop_front() {
            self.bytes -= cost_of(&line);
            self.first_number += 1;
        }
    }
}

fn cost_of(line: &Line) -> usize {
    match line {
        Line::Whole(bytes) => bytes.len(),
        Line::Oversize { head, tail, .. } => head.len() + tail.len(),
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

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
        let mut frames = Frames::new();
        for text in ["a", "b", "c"] {
            frames.push(line(text));
        }
        assert_eq!(sent(&mut frames), [1, 2, 3]);
        frames.acknowledge(2);
        frames.push(line("d"));
        assert_eq!(sent(&mut frames), [4]);
        frames.rewind();
        assert_eq!(sent(&mut frames), [3, 4]);
        frames.acknowledge(4);
        frames.rewind();
        assert_eq!(sent(&mut frames), [0_u64; 0]);
        assert_eq!((frames.bytes, frames.all_sent()), (0, true));
    }

    #[test]
    fn a_frame_that_was_never_sent_can_not_be_acknowledged() {
        let mut frames = Frames::new();
        frames.push(line("a"));
        frames.acknowledge(u64::MAX);
        assert_eq!(sent(&mut frames), [1]);
        frames.acknowledge(u64::MAX);
        frames.push(line("b"));
        assert_eq!(sent(&mut frames), [2]);
    }

    #[test]
    fn both_bounds_hold_and_acknowledging_makes_room() {
        let mut frames = Frames::new();
        while frames.has_room() {
            frames.push(line("x"));
        }
        assert_eq!(frames.kept.len(), CUSTODY_FRAMES_MAX);
        sent(&mut frames);
        frames.acknowledge(1);
        assert!(frames.has_room());

        let mut frames = Frames::new();
        let big = "x".repeat(1024 * 1024);
        while frames.has_room() {
            frames.push(line(&big));
        }
        assert_eq!(frames.bytes, CUSTODY_BYTES_MAX);
    }

    #[test]
    fn what_nobody_waits_for_takes_no_room_but_is_counted() {
        let mut frames = Frames::new();
        frames.push(line("a"));
        frames.discard();
        frames.push(line("b"));
        assert_eq!((frames.bytes, frames.kept.len(), frames.first_number), (0, 0, 3));
    }
}
