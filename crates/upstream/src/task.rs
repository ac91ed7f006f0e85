//! The one place where this crate starts tasks. Each of them is bounded in time, or ends with the link that owns it.

use tokio::task::JoinHandle;

/// Starts `future` beside its caller.
#[expect(clippy::disallowed_methods, reason = "this is the crate's task helper")]
pub(crate) fn spawn<F>(future: F) -> JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    tokio::spawn(future)
}
