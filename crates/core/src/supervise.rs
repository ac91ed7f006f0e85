//! When another child of a server may be started (C4): one machine for each server, and for every start of it, whatever
//! asks for it.
//!
//! It is decided for the server and not for the session, since it is the server that fails. Children that run are none
//! of its business: only starts wait. These are the rules:
//!
//! - *A failure* is a child that could not be started, one that did not finish its handshake, and one that ended by
//!   itself, whatever its exit status and however much it had answered. An end that the gateway brought about is none.
//! - *One incident counts once.* A failure speaks of the server only if its child was started after the last one that
//!   counted. Fifty children that are killed at once are one failure, and one of fifty is one: what comes after it
//!   counts only if the children that were started since don't live either.
//! - *Waits.* After the first failure in a row the next start is free, so that whoever calls then finds a new child.
//!   After the second it waits 1 s, then 2, 4 … [`WAIT_MAX`], each a little shorter by jitter, and starts come one by one
//!   that far apart. A child that has been up for [`SOUND_AFTER`] opens the way for all others; one that was up for
//!   [`STABLE_AFTER`] ends the row.
//! - *Quarantine.* [`BURST_MAX`] failures within [`BURST_WINDOW`] end all starts for [`QUARANTINE`]. Then they go on with
//!   the waits as they were. An operator lifts both.
//! - *Upgrades.* A child that exits with [`UPGRADE_CODE`] wants to be started again, at once, and is no failure; above
//!   [`UPGRADES_MAX`] within [`UPGRADE_WINDOW`] it is.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::time::Timestamp;

/// A start that was allowed, and the child that came of it. Later ones are greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Start(u64);

/// Whether a child may be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Now.
    Go(Start),
    /// Not before this instant; to be asked again then, or when something has changed.
    Wait {
        /// The instant.
        until: Timestamp,
    },
}

/// What became of a start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The child exited by itself, with this code; without one, a signal ended it that was not the gateway's.
    ByItself(Option<i32>),
    /// The program could not be started, or the child did not finish its handshake.
    NeverUp,
    /// The gateway ended it, or could not do its own part: nothing is said of the server.
    Ours,
}

/// What an end counts as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// Another failure in a row.
    Failure,
    /// Of an incident that was counted before.
    Again,
    /// A restart that the server asked for.
    Upgrade,
    /// Nothing.
    Nothing,
}

/// Where a server stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Whether starts are free.
    pub phase: Phase,
    /// When the next start may be, if not now.
    pub next_at: Option<Timestamp>,
    /// Failures in a row.
    pub failures: u32,
}

/// Whether starts are free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// They are.
    Open,
    /// They wait, because children did not live.
    BackingOff,
    /// There are none for a while, because too many failed in a short time.
    Quarantined,
}

/// The machine of one server. `now` never goes back from call to call.
#[derive(Clone, Debug)]
pub struct Supervisor {
    seed: u64,
    newest: u64,
    /// The newest start at the time of the last failure that counted. Those up to it say nothing of what comes after.
    failed_through: u64,
    /// When that was, or an operator has lifted what was. Children from before it say nothing of what comes after.
    failed_at: Option<Timestamp>,
    /// How many children from before it were taken in.
    older: u64,
    /// The same for upgrades.
    upgraded_through: u64,
    failures: u32,
    /// How many rows of failures there were: each has its own jitter.
    rows: u64,
    /// Whether a child that was started since the last failure has lived for a while.
    is_sound: bool,
    wait_until: Timestamp,
    quarantined_until: Timestamp,
    recent_failures: VecDeque<Timestamp>,
    recent_upgrades: VecDeque<Timestamp>,
    /// The children that have finished their handshake, with the time since when.
    up: BTreeMap<Start, Timestamp>,
}

/// What outlives a worker of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Failures in a row.
    pub failures: u32,
    /// When the last one counted, or an operator has lifted what was.
    pub failed_at: Option<Timestamp>,
    /// Whether a child that was started since has lived for a while.
    pub is_sound: bool,
    /// Until when starts wait.
    pub wait_until: Timestamp,
    /// Until when there are none.
    pub quarantined_until: Timestamp,
    /// The failures that may still make a burst.
    pub recent_failures: Vec<Timestamp>,
    /// The upgrades that may still become too many.
    pub recent_upgrades: Vec<Timestamp>,
}

impl Supervisor {
    /// The machine of a server that nothing is known of. `seed` makes its jitter its own: equal seeds, equal waits.
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            newest: 0,
            failed_through: 0,
            failed_at: None,
            older: 0,
            upgraded_through: 0,
            failures: 0,
            rows: 0,
            is_sound: false,
            wait_until: Timestamp::default(),
            quarantined_until: Timestamp::default(),
            recent_failures: VecDeque::new(),
            recent_upgrades: VecDeque::new(),
            up: BTreeMap::new(),
        }
    }

    /// The machine that an earlier worker had, as far as it was remembered: it stands where that one stood. What lies
    /// further ahead of `now` than it ever could, since the clock was set back, is brought into bounds.
    pub fn recalled(seed: u64, memory: &Memory, now: Timestamp) -> Self {
        let is_past = |at: &&Timestamp| **at <= now;
        let newest = if memory.failed_at.is_some() { RECALLED_STARTS } else { 0 };
        Self {
            newest,
            failed_through: newest,
            failed_at: memory.failed_at.map(|at| at.min(now)),
            failures: memory.failures,
            rows: u64::from(memory.failures > 0),
            is_sound: memory.is_sound,
            wait_until: memory.wait_until.min(now.plus(WAIT_MAX)),
            quarantined_until: memory.quarantined_until.min(now.plus(QUARANTINE)),
            recent_failures: memory.recent_failures.iter().filter(is_past).take(BURST_MAX).copied().collect(),
            recent_upgrades: memory.recent_upgrades.iter().filter(is_past).take(UPGRADES_MAX).copied().collect(),
            ..Self::new(seed)
        }
    }

    /// [`recalled`](Self::recalled) with this machine's own jitter.
    #[must_use]
    pub fn recalled_from(&self, memory: &Memory, now: Timestamp) -> Self {
        Self::recalled(self.seed, memory, now)
    }

    /// What a later worker needs to go on from here. Children that run are taken in by [`adopt`](Self::adopt).
    pub fn memory(&self) -> Memory {
        Memory {
            failures: self.failures,
            failed_at: self.failed_at,
            is_sound: self.is_sound,
            wait_until: self.wait_until,
            quarantined_until: self.quarantined_until,
            recent_failures: self.recent_failures.iter().copied().collect(),
            recent_upgrades: self.recent_upgrades.iter().copied().collect(),
        }
    }

    /// Asks for a start. One that is allowed must be followed by [`end`](Self::end), sooner or later.
    pub fn start(&mut self, now: Timestamp) -> Verdict {
        self.look(now);
        if let Some(until) = self.held_until(now) {
            return Verdict::Wait { until };
        }
        self.newest += 1;
        if self.failures > FREE_FAILURES && !self.is_sound {
            self.wait_until = now.plus(self.wait());
        }
        Verdict::Go(Start(self.newest))
    }

    /// Takes in a child of an earlier worker, which has been up since `since`.
    pub fn adopt(&mut self, since: Timestamp) -> Start {
        let start = if self.failed_at.is_some_and(|at| since <= at) && self.older < self.failed_through {
            self.older += 1;
            Start(self.older)
        } else {
            self.newest += 1;
            Start(self.newest)
        };
        self.up.insert(start, since);
        start
    }

    /// The child has finished its handshake.
    pub fn up(&mut self, now: Timestamp, start: Start) {
        self.look(now);
        self.up.insert(start, now);
    }

    /// The start has come to its end; only the first word on it counts.
    pub fn end(&mut self, now: Timestamp, start: Start, end: End) -> Counted {
        self.look(now);
        self.up.remove(&start);
        match end {
            End::Ours => Counted::Nothing,
            End::ByItself(Some(UPGRADE_CODE)) if self.upgrade(now, start) => Counted::Upgrade,
            End::ByItself(_) | End::NeverUp => self.fail(now, start),
        }
    }

    /// Whether the server may ask for a restart once more.
    fn upgrade(&mut self, now: Timestamp, start: Start) -> bool {
        if start.0 <= self.upgraded_through {
            return true;
        }
        keep_recent(&mut self.recent_upgrades, now, UPGRADE_WINDOW);
        if self.recent_upgrades.len() >= UPGRADES_MAX {
            return false;
        }
        self.recent_upgrades.push_back(now);
        self.upgraded_through = self.newest;
        self.wait_until = now;
        true
    }

    fn fail(&mut self, now: Timestamp, start: Start) -> Counted {
        if start.0 <= self.failed_through {
            return Counted::Again;
        }
        self.failed_through = self.newest;
        self.failed_at = Some(now);
        self.is_sound = false;
        self.rows += u64::from(self.failures == 0);
        self.failures = self.failures.saturating_add(1);
        self.wait_until = now.plus(self.wait());
        keep_recent(&mut self.recent_failures, now, BURST_WINDOW);
        self.recent_failures.push_back(now);
        if self.recent_failures.len() >= BURST_MAX {
            self.recent_failures.clear();
            self.quarantined_until = now.plus(QUARANTINE);
        }
        Counted::Failure
    }

    /// An operator wants it tried again: nothing that was is held against it.
    pub fn lift(&mut self, now: Timestamp) {
        self.failures = 0;
        self.failed_through = self.newest;
        self.failed_at = Some(now);
        self.is_sound = false;
        (self.wait_until, self.quarantined_until) = (now, now);
        self.recent_failures.clear();
        self.recent_upgrades.clear();
    }

    /// Where the server stands now.
    pub fn standing(&self, now: Timestamp) -> Standing {
        let mut seen = self.clone();
        seen.look(now);
        let next_at = seen.held_until(now);
        let phase = match next_at {
            None => Phase::Open,
            Some(_) if seen.quarantined_until > now => Phase::Quarantined,
            Some(_) => Phase::BackingOff,
        };
        Standing { phase, next_at, failures: seen.failures }
    }

    /// Until when there is no start; `None` if there may be one now.
    fn held_until(&self, now: Timestamp) -> Option<Timestamp> {
        let waits_until = match self.first_since_failure() {
            // It may be sound before the wait is over.
            Some(since) => self.wait_until.min(since.plus(SOUND_AFTER)),
            None => self.wait_until,
        };
        Some(waits_until.max(self.quarantined_until)).filter(|until| *until > now)
    }

    /// Takes into account how long the children have lived.
    fn look(&mut self, now: Timestamp) {
        let Some(since) = self.first_since_failure() else { return };
        let age = now.since(since);
        if age >= SOUND_AFTER {
            self.is_sound = true;
            self.wait_until = self.wait_until.min(now);
        }
        if age >= STABLE_AFTER {
            self.failures = 0;
            self.recent_failures.clear();
        }
    }

    /// Since when the oldest of the children is up that were started after the last failure.
    fn first_since_failure(&self) -> Option<Timestamp> {
        self.up.range(Start(self.failed_through + 1)..).map(|(_, since)| *since).min()
    }

    /// How long a start waits after the failures so far.
    fn wait(&self) -> Duration {
        let Some(doublings) = self.failures.checked_sub(FREE_FAILURES + 1) else { return Duration::ZERO };
        let full = (WAIT_MIN * (1 << doublings.min(WAIT_DOUBLINGS_MAX))).min(WAIT_MAX);
        // One share for the whole row: with another one each time, a later wait could be the shorter one.
        let share = mix(self.seed ^ self.rows) % (JITTER_SHARES_MAX + 1);
        full - full / JITTER_DIVISOR * u32::try_from(share).unwrap_or_default()
    }
}

fn keep_recent(instants: &mut VecDeque<Timestamp>, now: Timestamp, window: Duration) {
    instants.retain(|at| now.since(*at) <= window);
}

/// Spreads the bits of a number over all of it (SplitMix64's finisher).
fn mix(number: u64) -> u64 {
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

/// Where the starts of a recalled machine begin to count: below is room for children from before the last failure.
const RECALLED_STARTS: u64 = 1 << 32;
/// How many failures in a row cost nothing.
const FREE_FAILURES: u32 = 1;
const WAIT_MIN: Duration = Duration::from_secs(1);
/// The longest wait between two starts.
pub const WAIT_MAX: Duration = Duration::from_secs(60);
const WAIT_DOUBLINGS_MAX: u32 = 6;
/// Jitter takes up to a quarter off a wait: less than doubling adds, so waits only grow.
const JITTER_SHARES_MAX: u64 = 256;
const JITTER_DIVISOR: u32 = 1024;
/// After this time a child says that its server can be started.
pub const SOUND_AFTER: Duration = Duration::from_secs(10);
/// After this time what was before it is forgotten.
pub const STABLE_AFTER: Duration = Duration::from_mins(5);
/// So many failures within [`BURST_WINDOW`] are too many.
pub const BURST_MAX: usize = 5;
/// See [`BURST_MAX`].
pub const BURST_WINDOW: Duration = Duration::from_secs(30);
/// How long nothing is started then.
pub const QUARANTINE: Duration = Duration::from_secs(60);
/// The exit code by which a child asks to be started again.
pub const UPGRADE_CODE: i32 = 75;
/// So many of these requests are granted within [`UPGRADE_WINDOW`].
pub const UPGRADES_MAX: usize = 5;
/// See [`UPGRADES_MAX`].
pub const UPGRADE_WINDOW: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests;
