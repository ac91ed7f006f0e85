//! What a child's custody holds for nobody any more: answers of earlier workers' calls for which no client can come back,
//! and word of answers to the child's questions that are on record as forwarded.
//!
//! Of a call that a child has answered only its streams in the journal tell whether its client could have something to come
//! back with. Without one it was answered as JSON, or never; with one that has ended, the journal has the answer, too.
//! What is concluded from the journal's silence holds for workers since it was begun only: a damaged one was set aside with
//! all that it knew, and clients whose streams it had are given the child's answers all the same.

use std::collections::BTreeSet;
use std::sync::Arc;

use mainstay_core::call::StreamId;
use mainstay_core::id::SessionKey;
use mainstay_store::journal::{Failure, StreamRecord};

use super::take_up::parts_of;
use crate::engine::Engine;
use crate::engine::live::Live;

impl Engine {
    /// Settles what could have been settled when this was done last, and can be still. Returns what can be the next time:
    /// the journal may come to know a stream a little after its client.
    pub(crate) async fn let_go_unclaimed(
        &self,
        found_before: &BTreeSet<(SessionKey, StreamId)>,
    ) -> BTreeSet<(SessionKey, StreamId)> {
        let lives: Vec<Arc<Live>> =
            self.live.iter().filter(|live| !live.server.is_http()).map(|live| Arc::clone(&live)).collect();
        let mut found = BTreeSet::new();
        for live in lives {
            let unclaimed = self.unclaimed(&live).await.unwrap_or_else(|error| {
                tracing::debug!(session = %live.key.session_ref(), error = %error, "streams can't be looked up");
                Unclaimed::default()
            });
            let mut again = |numbers: Vec<StreamId>| -> Vec<StreamId> {
                let is_found = |number: &StreamId| found_before.contains(&(live.key, *number));
                let (again, new): (Vec<_>, Vec<_>) = numbers.into_iter().partition(is_found);
                found.extend(new.into_iter().map(|number| (live.key, number)));
                again
            };
            let (calls, answers) = (again(unclaimed.calls), again(unclaimed.answers));
            calls.iter().for_each(|call| live.link.settle_for_good(*call));
            answers.iter().for_each(|asked| live.link.settle_answer(*asked));
            if !calls.is_empty() || !answers.is_empty() {
                let (session, calls, answers) = (live.key.session_ref(), calls.len(), answers.len());
                tracing::debug!(session = %session, calls, answers, "let go of what nobody can come back for");
            }
        }
        found
    }

    /// What custody has of a session for nobody. None, if that can't be told.
    async fn unclaimed(&self, live: &Live) -> Result<Unclaimed, Failure> {
        let unclaimed = Unclaimed { calls: live.link.answered_earlier(), answers: live.link.answers_earlier() };
        if unclaimed.calls.is_empty() && unclaimed.answers.is_empty() {
            return Ok(unclaimed);
        }
        let streams = self.journal.streams(live.key, STREAMS_MAX).await?;
        let owed = self.journal.owed_answers(live.key).await?;
        // Asked last: if the journal is begun anew meanwhile, what it said before that is not concluded from.
        let known_from = self.journal.known_from().await?;
        // In memory a stream may be that the journal has lost.
        Ok(unclaimed.told_by(&streams, &owed, known_from, |call| live.stream(call).is_some()))
    }
}

/// What of a child's custody is nobody's.
#[derive(Debug, Default, PartialEq, Eq)]
struct Unclaimed {
    /// Answered calls of earlier workers.
    calls: Vec<StreamId>,
    /// Questions of earlier workers whose answers the child has.
    answers: Vec<StreamId>,
}

impl Unclaimed {
    /// What is left of this if the journal knows of these streams, owes these answers and is to be believed for workers
    /// from the epoch `known_from` on.
    fn told_by(
        mut self,
        streams: &[StreamRecord],
        owed: &BTreeSet<StreamId>,
        known_from: Option<u64>,
        is_here: impl Fn(StreamId) -> bool,
    ) -> Self {
        let Some(known_from) = known_from else { return Self::default() };
        let awaited = if streams.len() < STREAMS_MAX { awaited(streams) } else { None };
        match awaited {
            Some(awaited) => {
                self.calls.retain(|call| call.epoch >= known_from && !awaited.contains(call) && !is_here(*call))
            }
            None => self.calls.clear(),
        }
        self.answers.retain(|asked| asked.epoch >= known_from && !owed.contains(asked));
        self
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
            changed_at: Timestamp::from_unix_millis(0),
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

    #[test]
    fn c8_a_journal_that_was_begun_anew_lets_nothing_go_that_was_before() {
        let at = |epoch, number| StreamId { epoch, number };
        let unclaimed = || Unclaimed { calls: vec![at(1, 1), at(2, 2)], answers: vec![at(1, 5), at(2, 6)] };
        let told = |known_from| unclaimed().told_by(&[], &BTreeSet::new(), known_from, |_| false);
        assert_eq!(told(None), Unclaimed::default(), "it was begun while this worker lives");
        assert_eq!(told(Some(3)), Unclaimed::default(), "it was begun behind both");
        assert_eq!(told(Some(2)), Unclaimed { calls: vec![at(2, 2)], answers: vec![at(2, 6)] });
        assert_eq!(told(Some(1)), unclaimed());
        let is_here = |call| call == at(2, 2);
        let of_memory = unclaimed().told_by(&[], &[at(1, 5)].into(), Some(0), is_here);
        assert_eq!(of_memory, Unclaimed { calls: vec![at(1, 1)], answers: vec![at(2, 6)] }, "an answer is owed");
        let many = vec![record(1, "7", None); STREAMS_MAX];
        let among_many = unclaimed().told_by(&many, &BTreeSet::new(), Some(0), |_| false);
        assert_eq!(among_many.calls, [], "which calls have streams is not known");
    }
}
