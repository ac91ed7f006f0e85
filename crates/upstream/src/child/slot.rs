//! Where a call's frames wait for it.

use std::collections::VecDeque;
use std::sync::Mutex;

use bytes::Bytes;
use tokio::sync::Notify;

use crate::wire::lock;

/// What comes for a call.
#[derive(Debug)]
pub(super) enum Delivery {
    Message {
        bytes: Bytes,
        number: u64,
    },
    /// A message that asks the client: its frame stays in custody until that is durable.
    Question {
        bytes: Bytes,
        number: u64,
    },
    Response {
        bytes: Bytes,
        /// `None` if the frame stays in custody until the call is settled.
        number: Option<u64>,
    },
    /// The answer was too large.
    Oversize,
    /// The child has ended.
    Gone,
}

impl Delivery {
    /// The frame that it is of, if that is delivered with it or once its reader is done with it.
    pub(super) fn number(&self) -> Option<u64> {
        match self {
            Self::Message { number, .. } | Self::Question { number, .. } => Some(*number),
            Self::Response { number, .. } => *number,
            Self::Oversize | Self::Gone => None,
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Message { bytes, .. } | Self::Question { bytes, .. } | Self::Response { bytes, .. } => bytes.len(),
            Self::Oversize | Self::Gone => 0,
        }
    }
}

/// A queue with one reader. The keeper bounds it: no more frames than it has in custody can be here. What the keeper does
/// not keep is bounded here.
#[derive(Debug, Default)]
pub(super) struct Slot {
    waiting: Mutex<Queue>,
    arrived: Notify,
}

#[derive(Debug, Default)]
struct Queue {
    deliveries: VecDeque<Delivery>,
    bytes: usize,
    /// Whether something was let go of for want of room.
    is_lossy: bool,
}

impl Slot {
    pub(super) fn push(&self, delivery: Delivery) {
        lock(&self.waiting).push(delivery);
        self.arrived.notify_one();
    }

    /// The same with something that nobody else keeps: the oldest goes for it if there is too much.
    pub(super) fn push_within(&self, delivery: Delivery) {
        let mut queue = lock(&self.waiting);
        queue.push(delivery);
        while queue.deliveries.len() > MESSAGES_MAX || (queue.bytes > BYTES_MAX && queue.deliveries.len() > 1) {
            queue.pop();
            queue.is_lossy = true;
        }
        drop(queue);
        self.arrived.notify_one();
    }

    /// Whether something was let go of for want of room.
    pub(super) fn is_lossy(&self) -> bool {
        lock(&self.waiting).is_lossy
    }

    /// The next one. Cancel-safe.
    pub(super) async fn next(&self) -> Delivery {
        loop {
            if let Some(delivery) = lock(&self.waiting).pop() {
                return delivery;
            }
            self.arrived.notified().await;
        }
    }

    /// Empties the queue; the numbers of the frames that were in it.
    pub(super) fn close(&self) -> Vec<u64> {
        let queue = std::mem::take(&mut *lock(&self.waiting));
        queue.deliveries.iter().filter_map(Delivery::number).collect()
    }
}

impl Queue {
    fn push(&mut self, delivery: Delivery) {
        self.bytes += delivery.len();
        self.deliveries.push_back(delivery);
    }

    fn pop(&mut self) -> Option<Delivery> {
        let delivery = self.deliveries.pop_front()?;
        self.bytes -= delivery.len();
        Some(delivery)
    }
}

/// How much waits that nobody else keeps.
const MESSAGES_MAX: usize = 256;
const BYTES_MAX: usize = 1024 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn e1_who_does_not_read_loses_the_oldest_and_is_told_so() {
        let message =
            |number: usize, bytes: usize| Delivery::Message { bytes: vec![0; bytes].into(), number: number as u64 };
        let slot = Slot::default();
        (1..=MESSAGES_MAX).for_each(|number| slot.push_within(message(number, 1)));
        assert!(!slot.is_lossy());
        slot.push_within(message(MESSAGES_MAX + 1, 1));
        assert!(slot.is_lossy());
        assert_eq!(slot.next().await.number(), Some(2));
        slot.push_within(message(0, BYTES_MAX + 1));
        assert_eq!(slot.next().await.number(), Some(0), "the newest one stays, however large it is");
        assert_eq!(slot.close(), [] as [u64; 0]);
    }
}
