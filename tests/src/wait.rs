//! Waiting for a condition, with a bound.

use anyhow::{Result, bail};
use std::time::{Duration, Instant};

/// Waits until the condition holds. It is level-triggered: what happened before the wait counts as well.
///
/// # Errors
/// If it does not hold within the bound; the error says what was waited for.
pub async fn wait_until(what: &str, bound: Duration, mut holds: impl AsyncFnMut() -> bool) -> Result<()> {
    let deadline = Instant::now() + bound;
    loop {
        if holds().await {
            return Ok(());
        }
        if Instant::now() >= deadline {
            bail!("waited {bound:?} in vain for: {what}");
        }
        tokio::time::sleep(WAIT_STEP).await;
    }
}

/// The same for code that cannot await, such as `Drop`. Returns whether the condition came to hold.
pub fn wait_blocking(bound: Duration, mut holds: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + bound;
    loop {
        if holds() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(WAIT_STEP);
    }
}

/// Makes a future fail that takes longer than the bound.
///
/// # Errors
/// The future's own error, or one that says what took too long.
pub async fn within<T>(what: &str, bound: Duration, future: impl Future<Output = Result<T>>) -> Result<T> {
    match tokio::time::timeout(bound, future).await {
        Ok(done) => done,
        Err(_) => bail!("waited {bound:?} in vain for: {what}"),
    }
}

/// A threshold that holds on an idle machine, for this one as busy as it is: where each process has a part of a core only,
/// everything takes longer by that much.
#[must_use]
pub fn stretched(threshold: Duration) -> Duration {
    let told = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    // The mean of the last minute, and how many run at this moment.
    let mean = told.split(' ').next().and_then(|mean| mean.parse::<f64>().ok());
    let running = told.split(' ').nth(3).and_then(|tasks| tasks.split('/').next()?.parse::<f64>().ok());
    let busy = mean.unwrap_or(0.0).max(running.unwrap_or(0.0));
    let cores =
        std::thread::available_parallelism().map_or(1.0, |cores| f64::from(u32::try_from(cores.get()).unwrap_or(1)));
    threshold.mul_f64(1.0 + busy / cores)
}

const WAIT_STEP: Duration = Duration::from_millis(5);
