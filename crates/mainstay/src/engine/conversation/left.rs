//! Calls of a conversation that an earlier worker has left, and that their clients may never come back for.
//!
//! A client of this era comes back for a call only where it was told to, and for [`PARKED_MAX`] at most. A task is left to
//! itself for good.

use std::sync::Arc;
use std::time::Duration;

use mainstay_core::id::SessionKey;
use mainstay_store::journal::StreamRecord;

use super::rounds::PARKED_MAX;
use crate::engine::Engine;
use crate::engine::call::TASK;
use crate::engine::live::Live;

impl Engine {
    /// Brings a conversation back into memory for the calls that its child still runs.
    pub(crate) async fn wake_for_left(self: &Arc<Self>, key: SessionKey) {
        if let Err(refusal) = self.load(key).await {
            tracing::debug!(session = %key.session_ref(), refusal = %refusal.text, "not woken for a call");
        }
    }

    /// Cancels those that nobody has come back for in time. Resolves once none is left.
    pub(super) async fn see_to_left(self: &Arc<Self>, live: &Arc<Live>) {
        while !self.has_left() {
            match self.journal.streams(live.key, STREAMS_MAX).await {
                Ok(records) => {
                    let left: Vec<_> = records.into_iter().filter(|record| self.was_left(live, record)).collect();
                    if left.is_empty() {
                        return;
                    }
                    for record in left {
                        self.end_if_overdue(live, record).await;
                    }
                }
                Err(error) => {
                    tracing::debug!(session = %live.key.session_ref(), error = %error, "calls that were left can't be read yet");
                }
            }
            tokio::select! {
                () = live.ended.wait() => return,
                () = tokio::time::sleep(PAUSE) => {}
            }
        }
    }

    fn was_left(&self, live: &Live, record: &StreamRecord) -> bool {
        let is_call = record.call.as_ref().is_some_and(|call| &*call.method != TASK);
        let is_open = record.ending.is_none() && record.stream.epoch < self.epoch.counter;
        is_call && is_open && live.stream(record.stream).is_none_or(|stream| !stream.was_read())
    }

    async fn end_if_overdue(self: &Arc<Self>, live: &Arc<Live>, record: StreamRecord) {
        let is_anothers = live.server.is_http() && self.leavers.is_present(record.claim);
        let Some(call) = record.call.filter(|_| !is_anothers) else { return };
        if self.now().since(record.changed_at) < PARKED_MAX {
            return;
        }
        tracing::info!(session = %live.key.session_ref(), server = %live.server.name, "a call that nobody came back for is cancelled");
        // Dropped, it is cancelled.
        drop(self.unpark(live, (record.stream, call.request), record.last_sequence, Default::default()).await);
    }
}

/// Among how many streams of a conversation they are looked for.
const STREAMS_MAX: usize = 4096;
/// How often it is looked whether somebody has come back.
const PAUSE: Duration = Duration::from_secs(30);
