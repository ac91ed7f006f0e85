//! The only two injected sources, time and chance, the one place that starts tasks, and which [`build`] this is.
//!
//! Everything else in the crate takes instants and random bytes as arguments, or asks these types for them.

pub mod beat;
pub mod build;

use std::future::Future;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use mainstay_core::time::Timestamp;
use tokio::task::JoinHandle;

/// A wall clock that never goes back: the wall time at its making, carried on by the monotonic clock (S5).
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    wall_at_start: Timestamp,
    started: Instant,
}

impl Clock {
    /// A clock that starts from the system's wall time.
    #[expect(clippy::disallowed_methods, reason = "this is the one home of the clock")]
    pub fn system() -> Self {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let millis = u64::try_from(wall.as_millis()).unwrap_or(u64::MAX);
        Self { wall_at_start: Timestamp::from_unix_millis(millis), started: Instant::now() }
    }

    /// The present instant.
    pub fn now(&self) -> Timestamp {
        self.wall_at_start.plus(self.started.elapsed())
    }

    /// When this clock was made.
    pub fn started_at(&self) -> Timestamp {
        self.wall_at_start
    }
}

/// `N` bytes from the system's generator.
///
/// # Errors
/// The generator failed, which a supported kernel never does.
pub fn entropy<const N: usize>() -> Result<[u8; N], EntropyError> {
    let mut bytes = [0; N];
    aws_lc_rs::rand::fill(&mut bytes).map_err(|_| EntropyError)?;
    Ok(bytes)
}

/// Fills `bytes` from the system's generator. If that fails they stay as they are; a keyring refuses keys of zeros.
pub fn fill_with_entropy(bytes: &mut [u8]) {
    let _ = aws_lc_rs::rand::fill(bytes);
}

/// The system's random generator failed.
#[derive(Debug, thiserror::Error)]
#[error("the system's random number generator failed")]
pub struct EntropyError;

/// Starts a task. A panic in it ends that task alone.
#[expect(clippy::disallowed_methods, reason = "this is the one home of tasks")]
pub fn spawn<F>(task: F) -> JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    tokio::spawn(task)
}
