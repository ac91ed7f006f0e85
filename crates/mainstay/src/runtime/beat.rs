//! A timer that is never far away while there is work.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

/// Beats while it is [kept](Beat::keep).
///
/// The runtime interrupts its own wait, by a system call and a second turn, for every timer that is set before all others.
/// Every call sets one, some milliseconds ahead, and would be that each time it is the only one. While something beats more
/// often than that, none is.
#[derive(Debug, Default)]
pub struct Beat {
    is_kept: AtomicBool,
    kept: Notify,
}

impl Beat {
    /// A timer of some milliseconds is about to be set. Costs a load while it beats.
    pub fn keep(&self) {
        if !self.is_kept.load(Ordering::Relaxed) && !self.is_kept.swap(true, Ordering::Relaxed) {
            self.kept.notify_one();
        }
    }

    /// Beats. Never resolves.
    pub async fn run(&self) {
        loop {
            while self.is_kept.swap(false, Ordering::Relaxed) {
                tokio::time::sleep(BEAT).await;
            }
            self.kept.notified().await;
        }
    }
}

/// How often it beats: below what a call is waited for by default before it becomes a stream.
const BEAT: Duration = Duration::from_millis(10);
