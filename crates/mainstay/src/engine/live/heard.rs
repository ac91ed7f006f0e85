//! What a session's streams have of the words of its child already.
//!
//! The keeper gives every frame again to the next worker that this one has not acknowledged, and it does that a second or
//! two after the words are on their stream. If it is killed before, the client has them, or finds them in the journal:
//! from the next worker it would get them for the second time.

use std::collections::BTreeMap;

use mainstay_core::wire::envelope::{Kind, scan};
use mainstay_keeper::ChildId;
use mainstay_store::journal::{Event, Source};
use mainstay_upstream::Frame;

use crate::engine::live::Live;

/// How many notifications of each frame of a child are on the session's streams: a batch is one frame.
#[derive(Debug)]
pub struct Heard {
    child: ChildId,
    frames: BTreeMap<u64, u32>,
}

impl Heard {
    /// What `events` tell of `child`, as they came in its frames. `None` if there is nothing of it.
    pub fn of(child: ChildId, events: &[Event]) -> Option<Self> {
        let mut frames = BTreeMap::new();
        for event in events {
            let is_notification = || scan(&event.message).is_ok_and(|envelope| envelope.kind == Kind::Notification);
            if let Some(Source::Frame(number)) = event.source
                && is_notification()
            {
                *frames.entry(number).or_insert(0) += 1;
            }
        }
        (!frames.is_empty()).then_some(Self { child, frames })
    }

    /// Whether the next notification in `frame` is known. Frames come in order, and so do the messages in each.
    fn take(&mut self, frame: Frame) -> bool {
        if frame.child != self.child {
            return false;
        }
        self.frames = self.frames.split_off(&frame.number);
        match self.frames.get_mut(&frame.number) {
            Some(count) if *count > 0 => {
                *count -= 1;
                true
            }
            Some(_) | None => false,
        }
    }
}

impl Live {
    /// Whether a notification that a child wrote in `frame` is on a stream of an earlier worker. To be asked once for each,
    /// in order.
    pub fn has_heard(&self, frame: Frame) -> bool {
        let mut heard = self.heard.lock();
        let is_known = heard.as_mut().is_some_and(|heard| heard.take(frame));
        if heard.as_ref().is_some_and(|heard| heard.frames.is_empty()) {
            *heard = None;
        }
        is_known
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use mainstay_core::time::Timestamp;
    use mainstay_store::journal::Weight;

    use super::*;

    fn event(message: &'static str, source: Option<Source>) -> Event {
        let (weight, at) = (Weight::Passing, Timestamp::from_unix_millis(0));
        Event { sequence: 1, ending: None, weight, message: Bytes::from_static(message.as_bytes()), source, at }
    }

    #[test]
    fn c8_as_many_notifications_of_a_frame_are_known_as_are_on_the_streams_and_of_this_child_only() {
        let note = r#"{"jsonrpc":"2.0","method":"notifications/message","params":{}}"#;
        let answer = r#"{"jsonrpc":"2.0","id":1,"result":{}}"#;
        let frame = |number| Some(Source::Frame(number));
        let child = ChildId::new(7);
        assert!(Heard::of(child, &[event(note, None), event(answer, frame(1))]).is_none());
        let events = [(note, 4), (note, 2), (note, 4), (answer, 4), (note, 9)];
        let mut heard = Heard::of(child, &events.map(|(message, number)| event(message, frame(number)))).expect("some");
        let mut take = |number| heard.take(Frame { child, number });
        assert_eq!([1, 2, 2, 3].map(&mut take), [false, true, false, false]);
        assert_eq!([4, 4, 4].map(&mut take), [true, true, false], "what was not on a stream yet comes");
        let other = Frame { child: ChildId::new(8), number: 9 };
        assert!(!heard.take(other), "another child counts from one");
        assert!(heard.take(Frame { child, number: 9 }));
        assert!(!heard.take(Frame { child, number: 10 }) && heard.frames.is_empty(), "nothing is kept for later");
    }
}
