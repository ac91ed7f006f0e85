//! What a journal does, counted.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::entry::Lost;

/// What one handle and its clones did since they were opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Counters {
    /// Statements executed, of reads and writes. A fast call executes none.
    pub statements: u64,
    /// Reads answered.
    pub reads: u64,
    /// Transactions of entries.
    pub commits: u64,
    /// How long these took altogether, in microseconds.
    pub commit_us: u64,
    /// Entries kept.
    pub entries_kept: u64,
    /// Events among them.
    pub events_kept: u64,
    /// Bytes of messages among them.
    pub message_bytes_kept: u64,
    /// How many entries were durable within each of [`APPEND_SECONDS`] after they were handed over, each counted once, and
    /// last those that took longer.
    pub appends: [u64; APPEND_SECONDS.len() + 1],
    /// How long all of these took altogether, in microseconds.
    pub append_us: u64,
    /// Pages of events read for clients that came back.
    pub replays: u64,
    /// Entries that found the queue full.
    pub lost_crowded: u64,
    /// Entries that a full disk, or a full journal, refused.
    pub lost_full: u64,
    /// Entries of a stream that another worker has claimed.
    pub lost_claimed: u64,
    /// Entries not kept for any other reason.
    pub lost_otherwise: u64,
    /// Events that retention removed.
    pub events_trimmed: u64,
    /// Rows that were found unreadable; one that is met again counts again.
    pub rows_refused: u64,
    /// How often a damaged file was set aside.
    pub set_aside: u64,
    /// Entries that wait for the writer.
    pub queue_entries: u64,
    /// Their bytes.
    pub queue_bytes: u64,
    /// How much of the file is in use, as of the last write.
    pub file_bytes: u64,
}

/// The counters as they are counted.
#[derive(Debug, Default)]
pub(super) struct Meters {
    pub(super) statements: AtomicU64,
    pub(super) reads: AtomicU64,
    pub(super) commits: AtomicU64,
    commit_us: AtomicU64,
    pub(super) entries_kept: AtomicU64,
    pub(super) events_kept: AtomicU64,
    pub(super) message_bytes_kept: AtomicU64,
    appends: [AtomicU64; APPEND_SECONDS.len() + 1],
    append_us: AtomicU64,
    pub(super) replays: AtomicU64,
    lost_crowded: AtomicU64,
    lost_full: AtomicU64,
    lost_claimed: AtomicU64,
    lost_otherwise: AtomicU64,
    pub(super) events_trimmed: AtomicU64,
    pub(super) rows_refused: AtomicU64,
    pub(super) set_aside: AtomicU64,
    pub(super) queue_entries: AtomicU64,
    pub(super) queue_bytes: AtomicU64,
    pub(super) file_bytes: AtomicU64,
}

impl Meters {
    /// One entry is not kept.
    pub(super) fn lost(&self, why: Lost) {
        let meter = match why {
            Lost::Crowded => &self.lost_crowded,
            Lost::Full => &self.lost_full,
            Lost::Claimed => &self.lost_claimed,
            Lost::TooLarge | Lost::Misplaced | Lost::Overdrawn | Lost::Unavailable => &self.lost_otherwise,
        };
        add(meter, 1);
    }

    /// A transaction took this long.
    pub(super) fn took(&self, elapsed: Duration) {
        add(&self.commit_us, u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX));
    }

    /// An entry was durable so long after it was handed over.
    pub(super) fn appended(&self, elapsed: Duration) {
        let seconds = elapsed.as_secs_f64();
        add(&self.appends[APPEND_SECONDS.partition_point(|bound| *bound < seconds)], 1);
        add(&self.append_us, u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX));
    }

    pub(super) fn snapshot(&self) -> Counters {
        let read = |meter: &AtomicU64| meter.load(Ordering::Relaxed);
        Counters {
            statements: read(&self.statements),
            reads: read(&self.reads),
            commits: read(&self.commits),
            commit_us: read(&self.commit_us),
            entries_kept: read(&self.entries_kept),
            events_kept: read(&self.events_kept),
            message_bytes_kept: read(&self.message_bytes_kept),
            appends: std::array::from_fn(|bucket| read(&self.appends[bucket])),
            append_us: read(&self.append_us),
            replays: read(&self.replays),
            lost_crowded: read(&self.lost_crowded),
            lost_full: read(&self.lost_full),
            lost_claimed: read(&self.lost_claimed),
            lost_otherwise: read(&self.lost_otherwise),
            events_trimmed: read(&self.events_trimmed),
            rows_refused: read(&self.rows_refused),
            set_aside: read(&self.set_aside),
            queue_entries: read(&self.queue_entries),
            queue_bytes: read(&self.queue_bytes),
            file_bytes: read(&self.file_bytes),
        }
    }
}

/// `by` more.
pub(super) fn add(meter: &AtomicU64, by: u64) {
    meter.fetch_add(by, Ordering::Relaxed);
}

/// Up to which times, in seconds, appended entries are counted together.
pub const APPEND_SECONDS: [f64; 12] = [0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0];
