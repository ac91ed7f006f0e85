//! When the next worker may be started.

use std::time::Duration;

use tokio::time::Instant;

/// Starts at once, unless starts come in a burst: then after a delay of 1, 2, 4 … 60 seconds, which grows from start to
/// start as long as workers hardly live.
#[derive(Debug, Default)]
pub(crate) struct Respawn {
    /// The latest starts, oldest first.
    starts: Vec<Instant>,
    /// How many starts in a row were delayed.
    delayed: u32,
}

impl Respawn {
    /// What another keeper remembers, as ages of the latest starts, oldest first.
    pub(crate) fn from_parts(starts_ago: &[Duration], delayed: u32, now: Instant) -> Self {
        let latest = &starts_ago[starts_ago.len().saturating_sub(RESPAWN_BURST)..];
        // One before the clock began is as good as none.
        Self { starts: latest.iter().filter_map(|ago| now.checked_sub(*ago)).collect(), delayed }
    }

    /// What there is to remember: the ages of the latest starts, oldest first, and how many in a row were delayed.
    pub(crate) fn parts(&self, now: Instant) -> (Vec<Duration>, u32) {
        (self.starts.iter().map(|start| now.duration_since(*start)).collect(), self.delayed)
    }

    /// A worker was started.
    pub(crate) fn started(&mut self, now: Instant) {
        if self.starts.len() == RESPAWN_BURST {
            self.starts.remove(0);
        }
        self.starts.push(now);
    }

    /// How long to wait now that the worker started last is dead.
    pub(crate) fn delay_after_death(&mut self, now: Instant) -> Duration {
        if self.starts.last().is_some_and(|last| now.duration_since(*last) >= RESPAWN_STABLE) {
            self.delayed = 0;
        }
        let is_burst = self.starts.len() == RESPAWN_BURST
            && self.starts.first().is_some_and(|first| now.duration_since(*first) < RESPAWN_WINDOW);
        if self.delayed == 0 && !is_burst {
            return Duration::ZERO;
        }
        let delay = RESPAWN_DELAY_MAX.min(Duration::from_secs(1) * 2_u32.saturating_pow(self.delayed));
        self.delayed = self.delayed.saturating_add(1);
        delay
    }
}

/// How many starts within [`RESPAWN_WINDOW`] are made without delay.
pub(crate) const RESPAWN_BURST: usize = 5;

/// The time in which they make a burst.
pub(crate) const RESPAWN_WINDOW: Duration = Duration::from_secs(30);

/// How long a worker must live for the delay to start anew.
pub(crate) const RESPAWN_STABLE: Duration = Duration::from_secs(5);

/// The longest delay.
pub(crate) const RESPAWN_DELAY_MAX: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    /// Lets workers live for the given times, one after the other, and returns the delays in between.
    fn delays(lives_ms: &[u64]) -> Vec<u64> {
        let (mut respawn, mut now) = (Respawn::default(), Instant::now());
        let mut delays = Vec::new();
        for life_ms in lives_ms {
            respawn.started(now);
            now += Duration::from_millis(*life_ms);
            let delay = respawn.delay_after_death(now);
            now += delay;
            delays.push(delay.as_secs());
        }
        delays
    }

    #[test]
    fn a_crash_loop_backs_off_up_to_a_minute() {
        assert_eq!(delays(&[10; 13]), [0, 0, 0, 0, 1, 2, 4, 8, 16, 32, 60, 60, 60]);
    }

    #[test]
    fn t2_a_renewed_keeper_goes_on_backing_off() {
        let (mut respawn, mut now) = (Respawn::default(), Instant::now() + Duration::from_secs(100));
        for _ in 0..6 {
            respawn.started(now);
            now += respawn.delay_after_death(now);
        }
        let (starts_ago, delayed) = respawn.parts(now);
        let mut renewed = Respawn::from_parts(&starts_ago, delayed, now);
        renewed.started(now);
        respawn.started(now);
        assert_eq!(renewed.delay_after_death(now), respawn.delay_after_death(now));
    }

    #[test]
    fn a_worker_that_lived_long_is_followed_at_once() {
        assert_eq!(delays(&[10, 10, 10, 10, 10, 10, 30_000, 10, 10, 10, 10, 10]), [0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 1]);
    }

    #[test]
    fn deaths_far_apart_are_no_burst() {
        assert_eq!(delays(&[8_000; 12]), [0; 12]);
    }

    #[test]
    fn frequent_deaths_of_workers_that_served_are_slowed_down_only_so_far() {
        assert_eq!(delays(&[5_000; 10]), [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]);
    }

    #[test]
    fn a_worker_that_hardly_lives_keeps_the_delay_growing() {
        assert_eq!(delays(&[10, 10, 10, 10, 10, 4_000, 4_000, 4_000]), [0, 0, 0, 0, 1, 2, 4, 8]);
    }
}
