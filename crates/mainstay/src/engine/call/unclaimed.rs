//! Answers of earlier workers' calls for which no client can come back.
//!
//! Of a call that a child has answered only its streams in the journal tell whether its client could have something to come
//! back with. Without one it was answered as JSON, or never; with one that has ended, the journal has the answer, too.

use std::collections::BTreeSet;
use std::sync::Arc;

use mainstay_core::call::StreamId;
use mainstay_core::id::SessionKey;
use mainstay_store::journal::StreamRecord;

use super::take_up::parts_of;
use crate::engine::Engine;
use crate::engine::live::Live;

impl Engine {
    /// Settles the calls that could have been settled when this was done last, and can be still. Returns those that
    /// can be the next time: the journal may come to know a stream a little after its client.
    pub(crate) async fn let_go_unclaimed(
        &self,
        found_before: &BTreeSet<(SessionKey, StreamId)>,
    ) -> BTreeSet<(SessionKey, StreamId)> {
        let lives: Vec<Arc<Live>> =
            self.live.iter().filter(|live| !live.server.is_http()).map(|live| Arc::clone(&live)).collect();
        let mut found = BTreeSet::new();
        for live in lives {
            let unclaimed = self.unclaimed(&live).await.into_iter().map(|call| (live.key, call));
            let (again, new): (Vec<_>, Vec<_>) = unclaimed.partition(|call| found_before.contains(call));
            again.iter().for_each(|(_, call)| live.link.settle_for_good(*call));
            if !again.is_empty() {
                let (session, count) = (live.key.session_ref(), again.len());
                tracing::debug!(session = %session, count, "let go of answers that nobody can come back for");
            }
            found.extend(new);
        }
        found
    }

    /// The answered calls of earlier workers that nobody comes back for. None, if the journal can't be asked.
    async fn unclaimed(&self, live: &Live) -> Vec<StreamId> {
        let answered = live.link.answered_earlier();
        if answered.is_empty() {
            return answered;
        }
        match self.journal.streams(live.key, STREAMS_MAX).await {
            Ok(streams) if streams.len() < STREAMS_MAX => {
                let Some(awaited) = awaited(&streams) else { return Vec::new() };
                let is_unclaimed = |call: &StreamId| !awaited.contains(call) && live.stream(*call).is_none();
                answered.into_iter().filter(is_unclaimed).collect()
            }
            Ok(_) => Vec::new(),
            Err(error) => {
                tracing::debug!(session = %live.key.session_ref(), error = %error, "streams can't be looked up");
                Vec::new()
            }
        }
    }
}

/// The calls whose clients can come back and be given the child's answer; `None` if that can't be told.
fn awaited(streams: &[StreamRecord]) -> Option<BTreeSet<StreamId>> {
    let mut awaited = BTreeSet::new();
    for record in streams.iter().filter(|record| record.ending.is_none() && !record.stream.is_listen()) {
        // Of a batch each call has a number of its own.
        let parts = parts_of(record.stream, &record.call.as_ref()?.request);
        awaited.extend(parts.into_iter().map(|(call, _)| call));
    }
    Some(awaited)
}

/// With more streams than this it isn't known of a call whether it has one.
const STREAMS_MAX: usize = 4096;

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use mainstay_core::id::{Epoch, ServerName};
    use mainstay_core::time::Timestamp;
    use mainstay_store::journal::{Call, Ending};

    use super::*;

    fn record(number: u64, request: &'static str, ending: Option<Ending>) -> StreamRecord {
        let call = Call {
            server: ServerName::parse("files").expect("a name"),
            method: "tools/call".into(),
            name: None,
            request: Bytes::from_static(request.as_bytes()),
            started_at: Timestamp::from_unix_millis(0),
        };
        StreamRecord {
            stream: StreamId { epoch: 1, number },
            call: Some(call),
            claim: Epoch { counter: 1, nonce: 0 },
            last_sequence: 0,
            delivered: 0,
            ending,
            source: None,
        }
    }

    #[test]
    fn r4_c8_calls_of_open_streams_are_awaited_and_those_of_ended_ones_are_not() {
        let streams = [record(1, "7", None), record(2, "8", Some(Ending::Answered)), record(10, "[1,\"2\"]", None)];
        let numbers = |streams: &[StreamRecord]| -> Option<Vec<u64>> {
            Some(awaited(streams)?.into_iter().map(|call| call.number).collect())
        };
        assert_eq!(numbers(&streams), Some(vec![1, 11, 12]));
        let unreadable = |ending| StreamRecord { call: None, ..record(30, "", ending) };
        assert_eq!(numbers(&[unreadable(Some(Ending::Answered))]), Some(Vec::new()));
        assert_eq!(numbers(&[record(1, "7", None), unreadable(None)]), None, "which calls are its own is not known");
    }
}
