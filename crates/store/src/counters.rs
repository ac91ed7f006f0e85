//! What a store does, counted.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::write::Class;

/// What one writer did since it was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Counters {
    /// Statements executed, of reads and writes. A fast call executes none.
    pub statements: u64,
    /// Reads answered.
    pub reads: u64,
    /// Transactions with an fsync because of authority.
    pub commits_authority: u64,
    /// Transactions with an fsync because of an obligation.
    pub commits_obligation: u64,
    /// Transactions of hints only, without an fsync.
    pub commits_hint: u64,
    /// How long transactions took from their first statement to their durability, all together, in microseconds.
    pub commit_us: u64,
    /// Hints that could not be written.
    pub hint_failures: u64,
    /// Hints that found the queue full.
    pub hints_dropped: u64,
    /// Rows that were found unreadable; one that is met again counts again.
    pub rows_refused: u64,
    /// Jobs that wait for the writer.
    pub queue_depth: u64,
}

/// The counters as they are counted.
#[derive(Debug, Default)]
pub(crate) struct Meters {
    pub(crate) statements: AtomicU64,
    pub(crate) reads: AtomicU64,
    commits_authority: AtomicU64,
    commits_obligation: AtomicU64,
    commits_hint: AtomicU64,
    commit_us: AtomicU64,
    pub(crate) hint_failures: AtomicU64,
    pub(crate) hints_dropped: AtomicU64,
    pub(crate) rows_refused: AtomicU64,
}

impl Meters {
    /// One transaction whose strongest write is of `class`.
    pub(crate) fn committed(&self, class: Class) {
        let meter = match class {
            Class::Authority => &self.commits_authority,
            Class::Obligation => &self.commits_obligation,
            Class::Hint => &self.commits_hint,
        };
        count(meter);
    }

    /// A transaction took this long.
    pub(crate) fn took(&self, elapsed: Duration) {
        self.commit_us.fetch_add(u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    pub(crate) fn snapshot(&self, queue_depth: u64) -> Counters {
        let read = |meter: &AtomicU64| meter.load(Ordering::Relaxed);
        Counters {
            statements: read(&self.statements),
            reads: read(&self.reads),
            commits_authority: read(&self.commits_authority),
            commits_obligation: read(&self.commits_obligation),
            commits_hint: read(&self.commits_hint),
            commit_us: read(&self.commit_us),
            hint_failures: read(&self.hint_failures),
            hints_dropped: read(&self.hints_dropped),
            rows_refused: read(&self.rows_refused),
            queue_depth,
        }
    }
}

/// One more.
pub(crate) fn count(meter: &AtomicU64) {
    meter.fetch_add(1, Ordering::Relaxed);
}
