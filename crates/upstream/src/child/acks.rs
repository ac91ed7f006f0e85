//! Which frames of a child the keeper need not keep any more.
//!
//! A frame is released when it was delivered and a little more: whoever got it may need a moment to hand it on, and a
//! worker that is killed in that moment must leave it in custody. So a frame goes at the second tick after its delivery.
//! If much is outstanding it goes at once, since the keeper stops reading a child with too much of it.

use std::collections::VecDeque;

/// The frames that are not acknowledged yet.
#[derive(Debug, Default)]
pub(super) struct Acks {
    /// In order of their numbers: undelivered ones, and delivered ones behind them.
    frames: VecDeque<Frame>,
    /// Everything up to here is delivered.
    delivered_through: u64,
    /// What `delivered_through` was at the last tick.
    ripe_through: u64,
    acknowledged: u64,
    /// Bytes delivered and not acknowledged.
    delivered_bytes: usize,
    /// Bytes arrived and not delivered, those behind an undelivered frame included.
    held_bytes: usize,
}

#[derive(Debug)]
struct Frame {
    number: u64,
    bytes: usize,
    delivered: bool,
}

impl Acks {
    /// A frame has come. Numbers rise.
    pub(super) fn arrived(&mut self, number: u64, bytes: usize) {
        self.frames.push_back(Frame { number, bytes, delivered: false });
        self.held_bytes += bytes;
    }

    /// A frame is where it belongs, or nowhere. Returns what is to be acknowledged at once, if much is outstanding.
    pub(super) fn delivered(&mut self, number: u64) -> Option<u64> {
        if let Ok(index) = self.frames.binary_search_by_key(&number, |frame| frame.number) {
            self.frames[index].delivered = true;
        }
        while let Some(frame) = self.frames.pop_front_if(|frame| frame.delivered) {
            self.delivered_through = frame.number;
            self.delivered_bytes += frame.bytes;
            self.held_bytes -= frame.bytes;
        }
        let urgent = self.delivered_bytes > URGENT_BYTES;
        if urgent { self.acknowledge(self.delivered_through) } else { None }
    }

    /// Time has passed. Returns what is to be acknowledged now.
    pub(super) fn tick(&mut self) -> Option<u64> {
        let ripe = self.ripe_through;
        self.ripe_through = self.delivered_through;
        self.acknowledge(ripe)
    }

    /// Everything delivered, at the end.
    pub(super) fn flush(&mut self) -> Option<u64> {
        self.acknowledge(self.delivered_through)
    }

    /// Whether anything waits for a tick.
    pub(super) fn is_due(&self) -> bool {
        self.acknowledged < self.delivered_through
    }

    /// Whether nothing is kept any more.
    pub(super) fn is_settled(&self) -> bool {
        self.frames.is_empty()
    }

    /// How many frames and bytes an undelivered frame holds up.
    pub(super) fn held(&self) -> (usize, usize) {
        (self.frames.len(), self.held_bytes)
    }

    fn acknowledge(&mut self, through: u64) -> Option<u64> {
        if through <= self.acknowledged {
            return None;
        }
        self.acknowledged = through;
        if through == self.delivered_through {
            self.delivered_bytes = 0;
        }
        Some(through)
    }
}

/// Delivered bytes above which there is no waiting.
const URGENT_BYTES: usize = 1024 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c8_a_frame_is_acknowledged_at_the_second_tick_after_its_delivery() {
        let mut acks = Acks::default();
        acks.arrived(1, 10);
        assert_eq!((acks.tick(), acks.is_due()), (None, false));
        assert_eq!((acks.delivered(1), acks.is_due()), (None, true));
        assert_eq!((acks.tick(), acks.is_due()), (None, true));
        assert_eq!((acks.tick(), acks.is_due()), (Some(1), false));
        assert_eq!(acks.tick(), None);
    }

    #[test]
    fn c8_nothing_behind_an_undelivered_frame_is_acknowledged() {
        let mut acks = Acks::default();
        (4..=6).for_each(|number| acks.arrived(number, 1));
        assert_eq!((acks.delivered(6), acks.delivered(4)), (None, None));
        assert_eq!((acks.tick(), acks.tick(), acks.tick()), (None, Some(4), None));
        assert_eq!(acks.held(), (2, 2));
        assert_eq!(acks.delivered(5), None);
        assert_eq!((acks.flush(), acks.is_settled(), acks.held()), (Some(6), true, (0, 0)));
    }

    #[test]
    fn much_is_acknowledged_at_once() {
        let mut acks = Acks::default();
        acks.arrived(1, URGENT_BYTES);
        acks.arrived(2, 1);
        assert_eq!((acks.delivered(1), acks.delivered(2)), (None, Some(2)));
        assert_eq!((acks.tick(), acks.is_due()), (None, false));
    }
}
