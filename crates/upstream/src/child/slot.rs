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
}

/// A queue with one reader. The keeper bounds it: no more frames than it has in custody can be here.
#[derive(Debug, Default)]
pub(super) struct Slot {
    waiting: Mutex<VecDeque<Delivery>>,
    arrived: Notify,
}

impl Slot {
    pub(super) fn push(&self, delivery: Delivery) {
        lock(&self.waiting).push_back(delivery);
        self.arrived.notify_one();
    }

    /// The next one. Cancel-safe.
    pub(super) async fn next(&self) -> Delivery {
        loop {
            if let Some(delivery) = lock(&self.waiting).pop_front() {
                return delivery;
            }
            self.arrived.notified().await;
        }
    }

    /// Empties the queue; the numbers of the frames that were in it.
    pub(super) fn close(&self) -> Vec<u64> {
        lock(&self.waiting).drain(..).filter_map(|delivery| delivery.number()).collect()
    }
}
