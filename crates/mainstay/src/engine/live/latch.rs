//! Something that happens once.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

/// Something that happens once, and that any number of tasks can wait for.
#[derive(Default)]
pub struct Latch {
    set: AtomicBool,
    changed: Notify,
}

impl Latch {
    /// Makes it happen.
    pub fn set(&self) {
        self.set.store(true, Ordering::Release);
        self.changed.notify_waiters();
    }

    /// Whether it has happened.
    pub fn is_set(&self) -> bool {
        self.set.load(Ordering::Acquire)
    }

    /// Returns once it has happened. Cancel-safe.
    pub async fn wait(&self) {
        let changed = self.changed.notified();
        tokio::pin!(changed);
        changed.as_mut().enable();
        if !self.is_set() {
            changed.await;
        }
    }
}
