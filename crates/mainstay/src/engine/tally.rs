//! How many of something are under way.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A count that falls by itself when what was counted is over.
#[derive(Default)]
pub struct Tally(Arc<AtomicUsize>);

impl Tally {
    /// Counts one more, until dropped.
    pub fn enter(&self) -> Counted {
        self.0.fetch_add(1, Ordering::AcqRel);
        Counted(Arc::clone(&self.0))
    }

    /// How many are under way.
    pub fn count(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }
}

/// One of those that are counted.
pub struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}
