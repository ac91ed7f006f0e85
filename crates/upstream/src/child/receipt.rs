//! That a question of a child is dealt with.

use std::fmt;
use std::sync::Arc;

use super::running::Running;

/// Leaves a question of a child in the keeper's custody until it is dropped: a worker that dies before that leaves it to
/// the next one, which is given it again. To be dropped once the question is durable, or answered.
pub struct Receipt {
    running: Arc<Running>,
    frame: u64,
}

impl Receipt {
    /// For the message of that frame, which counts as not dealt with from here on.
    pub(super) fn new(running: Arc<Running>, frame: u64) -> Self {
        Self { running, frame }
    }
}

impl Drop for Receipt {
    fn drop(&mut self) {
        self.running.delivered(self.frame);
    }
}

impl fmt::Debug for Receipt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receipt").field("frame", &self.frame).finish_non_exhaustive()
    }
}
