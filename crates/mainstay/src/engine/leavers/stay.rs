//! What a leaver does beside its calls: it puts on record which they are, and heeds what has become of them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::call::{RoutedId, StreamId};
use mainstay_core::id::SessionKey;
use mainstay_core::wire::envelope::notification_message;
use mainstay_store::journal::{self, Content, Ending, Entry};
use mainstay_upstream::Ending as LinkEnding;

use crate::engine::Engine;
use crate::engine::call::take_up::parts_of;
use crate::engine::listen::forward;
use crate::engine::live::{InFlight, Live};

/// The calls that a leaver has put on record and that are not over.
pub(crate) struct Recorded(BTreeSet<(SessionKey, StreamId)>);

impl Engine {
    /// Puts every call on an HTTP server that this worker runs on record, those without a stream among them, so that the
    /// next worker sees them.
    pub(crate) fn record_calls(&self) -> Recorded {
        let mut recorded = BTreeSet::new();
        for live in self.live.iter().filter(|live| live.server.is_http()) {
            // A batch is on record with its stream; which settings it changes is not.
            let streams = live.streams();
            let batched: BTreeSet<_> = streams
                .iter()
                .flat_map(|stream| parts_of(stream.id(), &stream.request().unwrap_or_default()))
                .map(|(number, _)| number)
                .filter(|number| live.stream(*number).is_none())
                .collect();
            let is_apart = |call: &InFlight| call.setting.is_some() || !batched.contains(&call.stream);
            for call in own_calls(&live).into_iter().filter(is_apart) {
                recorded.insert((live.key, call.stream));
                // One with a stream is on record with that, which may say more of it.
                if call.setting.is_none() && live.stream(call.stream).is_some() {
                    continue;
                }
                self.note_call(
                    live.key,
                    call.stream,
                    Content::Call(journal::Call {
                        server: live.server.name.clone(),
                        method: call.method.as_str().into(),
                        name: call.setting.or(call.name),
                        request: call.client_id,
                        started_at: call.since,
                    }),
                );
            }
        }
        Recorded(recorded)
    }

    /// Heeds what becomes of the calls that this worker stays for, as its successor writes it down. Never returns.
    pub(crate) async fn stay(self: &Arc<Self>, recorded: &mut Recorded) {
        loop {
            tokio::time::sleep(LOOK_PAUSE).await;
            self.heed().await;
            self.end_recorded(recorded);
            self.forward_own().await;
        }
    }

    /// Ends what is on record of calls that are over and had no stream: nothing else would.
    pub(crate) fn end_recorded(&self, recorded: &mut Recorded) {
        recorded.0.retain(|(key, stream)| {
            let live = self.live.get(key).map(|live| Arc::clone(&live));
            let runs = live.as_ref().is_some_and(|live| own_calls(live).iter().any(|call| call.stream == *stream));
            let streamless = |live: &Arc<Live>| live.stream(*stream).is_none() && !live.relays();
            if !runs && live.as_ref().is_some_and(streamless) {
                // Of a setting that tells the next worker to remember it.
                let is_agreed = self.agreed.lock().remove(&(*key, *stream));
                let ending = if is_agreed { Ending::Answered } else { Ending::Silent };
                self.note_call(*key, *stream, Content::Ended(ending));
            }
            runs
        });
    }

    /// Looks once for all calls.
    async fn heed(&self) {
        let lives: Vec<Arc<Live>> =
            self.live.iter().filter(|live| live.server.is_http()).map(|live| Arc::clone(&live)).collect();
        let busy = lives.into_iter().map(|live| (own_calls(&live), live)).filter(|(calls, _)| !calls.is_empty());
        let (calls, busy): (Vec<_>, Vec<_>) = busy.unzip();
        if let Ok(ended) = self.store.ended_of(busy.iter().map(|live| live.key).collect()).await {
            for live in busy.iter().filter(|live| ended.contains(&live.key)) {
                self.see_ended(live).await;
            }
        }
        let calls: Vec<_> =
            busy.iter().zip(calls).flat_map(|(live, calls)| calls.into_iter().map(move |call| (live, call))).collect();
        let places = calls.iter().map(|(live, call)| (live.key, call.stream)).collect();
        let Ok(heads) = self.journal.heads(places).await else { return };
        for ((live, call), head) in calls.into_iter().zip(heads) {
            if let Some(head) = head.filter(|head| head.claim != self.epoch) {
                let ending = self.ending_of(live, &call, head.ending).await;
                self.let_be(live, &call, ending).await;
            }
        }
    }

    /// How a call has ended that another worker has taken. A cancelled one is taken first, and ended in the next write: where
    /// it matters, that is waited for.
    async fn ending_of(&self, live: &Live, call: &InFlight, seen: Option<Ending>) -> Option<Ending> {
        let mut ending = seen;
        for _ in 0..ENDING_LOOKS_MAX {
            if ending.is_some() || !live.link.is_connection() {
                break;
            }
            tokio::time::sleep(LOOK_PAUSE).await;
            let heads = self.journal.heads(vec![(live.key, call.stream)]).await.unwrap_or_default();
            ending = heads.into_iter().flatten().next().and_then(|head| head.ending);
        }
        ending
    }

    async fn see_ended(&self, live: &Arc<Live>) {
        tracing::info!(session = %live.key.session_ref(), "the next worker has ended a session; its calls end");
        self.live.remove(&live.key);
        live.shut();
        live.link.end(LinkEnding::KeepForResume).await;
    }

    /// Another worker has taken the call's stream: what comes for it can't be told any more. One that has ended without
    /// an answer was cancelled.
    async fn let_be(&self, live: &Arc<Live>, call: &InFlight, ending: Option<Ending>) {
        tracing::debug!(session = %live.key.session_ref(), "the next worker has taken a call");
        if ending == Some(Ending::Silent) && live.link.is_connection() {
            // Nobody else could tell a server whose session is this worker's connection (R8).
            let id = RoutedId { stream: call.stream, original: call.client_id.clone() };
            let params = [br#"{"requestId":"#.as_slice(), &id.encode(), b"}"].concat();
            let message = Bytes::from(notification_message("notifications/cancelled", Some(&params)));
            // Before the call is given up: this worker goes as soon as none is left.
            forward(live, message).await;
        }
        live.give_up(call.stream);
    }

    fn note_call(&self, session: SessionKey, stream: StreamId, content: Content) {
        let entry = Entry { session, stream, claim: self.epoch, at: self.now(), content };
        // Lost, the next worker does not see the call; its client gets the answer here.
        let _ = self.journal.append(entry, None);
    }
}

/// The calls of `live` that this worker runs itself.
fn own_calls(live: &Live) -> Vec<InFlight> {
    let mut calls = live.calls();
    calls.retain(|call| !call.is_elsewhere);
    calls
}

/// How often a leaver looks what has become of its calls.
const LOOK_PAUSE: Duration = Duration::from_millis(250);
/// How often it looks whether a call that was taken has ended, too.
const ENDING_LOOKS_MAX: usize = 4;
