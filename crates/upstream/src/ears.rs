//! Who listens to what a server says unasked, and how often a stream of it is tried.

use std::time::Duration;

use tokio::task::AbortHandle;

/// The listeners of one session, and the task that listens for them.
#[derive(Debug, Default)]
pub(crate) struct Ears {
    count: u32,
    task: Option<AbortHandle>,
    closed: bool,
}

impl Ears {
    /// One more listener; for the first one `start` starts the task.
    pub(crate) fn listen(&mut self, start: impl FnOnce() -> AbortHandle) {
        self.count += 1;
        if self.count == 1 && !self.closed {
            self.task = Some(start());
        }
    }

    /// One listener less. With the last one the task ends.
    pub(crate) fn unlisten(&mut self) {
        self.count = self.count.saturating_sub(1);
        if self.count == 0 {
            self.stop();
        }
    }

    /// Nobody listens any more, whatever guards there are.
    pub(crate) fn close(&mut self) {
        self.closed = true;
        self.stop();
    }

    fn stop(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
    }
}

/// Waits between two tries at a stream that was cut or a server that is away.
#[derive(Debug)]
pub(crate) struct Pace {
    first: Duration,
    failures: u32,
    /// What the server asked for.
    retry: Duration,
}

impl Pace {
    /// From a first pause on.
    pub(crate) fn from(first: Duration) -> Self {
        Self { first, failures: 0, retry: Duration::ZERO }
    }

    /// The next pause: longer each time.
    pub(crate) fn pause(&mut self) -> Duration {
        let doubled = (self.first * (1 << self.failures.min(PAUSE_DOUBLINGS_MAX))).min(PAUSE_MAX);
        self.failures = self.failures.saturating_add(1);
        doubled.max(self.retry)
    }

    /// A stream was open for so long.
    pub(crate) fn lasted(&mut self, open: Duration) {
        if open > STEADY {
            self.failures = 0;
        }
    }

    /// The server asks for such pauses.
    pub(crate) fn ask(&mut self, retry: Duration) {
        self.retry = retry.min(PAUSE_MAX);
    }
}

/// When a server that has no such stream is asked again.
pub(crate) const REPROBE: Duration = Duration::from_mins(5);

const PAUSE_MAX: Duration = Duration::from_mins(1);
const PAUSE_DOUBLINGS_MAX: u32 = 8;

/// A stream that lasted this long was no failure.
const STEADY: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn u9_pauses_grow_to_a_bound_and_begin_anew_behind_a_steady_stream() {
        let mut pace = Pace::from(Duration::from_millis(250));
        let pauses: Vec<u128> = (0..10).map(|_| pace.pause().as_millis()).collect();
        assert_eq!(pauses, [250, 500, 1000, 2000, 4000, 8000, 16_000, 32_000, 60_000, 60_000]);
        pace.lasted(STEADY);
        assert_eq!(pace.pause(), PAUSE_MAX);
        pace.lasted(2 * STEADY);
        assert_eq!(pace.pause(), Duration::from_millis(250));
        pace.ask(Duration::from_hours(1));
        assert_eq!(pace.pause(), PAUSE_MAX, "a server asks for no more than that");
    }

    #[tokio::test]
    async fn u9_one_task_listens_for_all_until_the_last_has_gone_or_the_link_is_closed() {
        let mut ears = Ears::default();
        let start = || crate::task::spawn(std::future::pending::<()>()).abort_handle();
        ears.listen(start);
        ears.listen(|| panic!("there is one already"));
        ears.unlisten();
        assert!(ears.task.is_some());
        ears.unlisten();
        assert!(ears.task.is_none());
        ears.unlisten();
        ears.listen(start);
        ears.close();
        assert!(ears.task.is_none());
        ears.unlisten();
        ears.listen(|| panic!("it is closed"));
    }
}
