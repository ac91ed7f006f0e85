//! How many of something are under way.

use std::sync::atomic::{AtomicUsize, Ordering};

/// A count that falls by itself when what was counted is over.
#[derive(Default)]
pub struct Tally(AtomicUsize);

impl Tally {
    /// Counts one more, until dropped.
    pub fn enter(&self) -> Counted<'_> {
        self.0.fetch_add(1, Ordering::AcqRel);
        Counted(self)
    }

    /// How many are under way.
    pub fn count(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }
}

/// One of those that are counted.
pub struct Counted<'a>(&'a Tally);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::AcqRel);
    }
}
