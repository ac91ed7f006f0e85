//! Streams of calls that a client comes back to: in memory, in the journal, or still to be answered by whoever runs the
//! call (R2, R4, C8). What nobody can answer any more is told as unknown. Nothing is sent a second time.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use mainstay_core::call::{EventId, RoutedId, StreamId};
use mainstay_core::code::Code;
use mainstay_core::wire::envelope::{Kind, batch, scan};
use mainstay_core::wire::method::Method;
use mainstay_store::journal::{self, Ending, Event, Source, StreamRecord};
use mainstay_upstream::{Answer, Call};

use super::driver::{Driver, Going, Origin, Stage, linger};
use super::relay::HTTP_SSE;
use super::setting::Setting;
use super::{batched, method_of, refusal_message, shown, streams_crowded};
use crate::engine::live::{InFlight, Live};
use crate::engine::stream::{Message, Reader, Stream, named};
use crate::engine::{Engine, HOLD, Refused};
use crate::runtime::spawn;

impl Engine {
    /// A reader of the call's stream that `event` is a cursor of, from just behind it.
    ///
    /// # Errors
    /// [`Code::EventUnknown`] if there is nothing to answer to, [`Code::LimitReached`] if the session keeps too much.
    pub(crate) async fn come_back(
        self: &Arc<Self>,
        live: &Arc<Live>,
        event: EventId,
        cursor: String,
    ) -> Result<Reader, Refused> {
        if let Some(stream) = live.stream(event.stream) {
            return self.reader_of(live, &stream, &event, cursor).await;
        }
        // An id that was too long for the cursor leaves nothing to answer to.
        let Some(request) = event.request.clone() else { return Err(event_unknown()) };
        if let Some(reader) = self.follow_leaver(live, &event, &request, &cursor).await? {
            return Ok(reader);
        }
        let stream = self.open_again(live, event.stream, &request, Some(event.sequence)).await?;
        self.reader_of(live, &stream, &event, cursor).await
    }

    /// The stream of the newest call that a child still runs for an earlier worker, although its client has not come back
    /// yet: what the child says without naming a call belongs there most likely.
    pub(crate) async fn newest_open(self: &Arc<Self>, live: &Arc<Live>) -> Option<Arc<Stream>> {
        let records = self.journal.streams(live.key, OPEN_STREAMS_MAX).await.ok()?;
        let relays = |record: &StreamRecord| record.call.as_ref().is_some_and(|call| &*call.method == HTTP_SSE);
        if records.iter().any(relays) {
            return None;
        }
        let is_open = |record: &StreamRecord| {
            record.ending.is_none() && !record.stream.is_listen() && record.stream.epoch < self.epoch.counter
        };
        let newest = records.into_iter().rev().find(is_open)?;
        match live.stream(newest.stream) {
            Some(stream) => Some(stream),
            None => self.open_again(live, newest.stream, &newest.call?.request, None).await.ok(),
        }
    }

    /// Takes a stream of an earlier worker over, from behind the event `seen`, or else from behind the last that there is,
    /// and goes on with what it is to answer.
    async fn open_again(
        self: &Arc<Self>,
        live: &Arc<Live>,
        id: StreamId,
        request: &Bytes,
        seen: Option<u64>,
    ) -> Result<Arc<Stream>, Refused> {
        let record = self.claim(live, id).await?;
        let last_sequence = record.as_ref().map_or(0, |record| record.last_sequence);
        let seen = seen.unwrap_or(last_sequence);
        let ended = record.as_ref().is_some_and(|record| record.ending.is_some());
        let (events, answered) = match &record {
            Some(_) => self.history(live, id, seen, !ended).await?,
            None => Default::default(),
        };
        let journaled = Some(self.journaled(live.key));
        let stream = Stream::continued(live.key.tag(), id, Some(request.clone()), seen, journaled);
        stream.refill(events, last_sequence);
        if let Some(ending) = record.as_ref().and_then(|record| record.ending) {
            self.settle_parts(live, id, request);
            stream.close_as(ending);
            return Ok(stream);
        }
        let known = live.keep_once(&stream, self.settings.streams_max).map_err(|_| streams_crowded())?;
        if let Some(known) = known {
            return Ok(known);
        }
        self.take_up(live, &stream, request, record, &answered);
        Ok(stream)
    }

    /// A reader of a stream in memory. What that does not hold any more comes from the journal.
    ///
    /// # Errors
    /// As [`history`](Self::history).
    pub(crate) async fn reader_of(
        &self,
        live: &Live,
        stream: &Arc<Stream>,
        event: &EventId,
        cursor: String,
    ) -> Result<Reader, Refused> {
        let reader = stream.read(Some(event.sequence), Some(cursor));
        if stream.reaches_back_to(event.sequence) {
            return Ok(reader);
        }
        let before = stream.first_in_memory();
        let (mut events, _) = self.history(live, event.stream, event.sequence, false).await?;
        events.retain(|kept| kept.sequence < before);
        Ok(reader.after(named(live.key.tag(), event.stream, event.request.as_ref(), &events)))
    }

    /// Takes a stream over from whoever had it. `None` if nothing is known of it.
    ///
    /// # Errors
    /// [`Code::Unavailable`] if that can't be told now: nothing is said of the call then.
    pub(super) async fn claim(&self, live: &Live, stream: StreamId) -> Result<Option<StreamRecord>, Refused> {
        self.held_by_journal(live, || self.journal.claim(live.key, stream, self.epoch, self.now())).await
    }

    /// Asks the journal, for as long as a client may be held for it (S13a).
    pub(super) async fn held_by_journal<T, F>(&self, live: &Live, ask: impl Fn() -> F) -> Result<T, Refused>
    where
        F: Future<Output = Result<T, journal::Failure>>,
    {
        let asking = async {
            loop {
                match ask().await {
                    Ok(told) => return told,
                    Err(error) => {
                        tracing::warn!(session = %live.key.session_ref(), error = %error, "what was sent of a call can't be looked up yet");
                    }
                }
                tokio::time::sleep(JOURNAL_RETRY).await;
            }
        };
        let text = "what was sent of this call can't be looked up now; come back later";
        tokio::time::timeout(HOLD, asking).await.map_err(|_| Refused::new(Code::Unavailable, text))
    }

    /// What the journal has of `stream` after the event `after`, as far as it can be read, and the ids of the requests that
    /// are answered in it; with `whole` those in earlier events, too.
    ///
    /// # Errors
    /// [`Code::Unavailable`] if it can't be read now.
    pub(crate) async fn history(
        &self,
        live: &Live,
        stream: StreamId,
        after: u64,
        whole: bool,
    ) -> Result<(Vec<Event>, BTreeSet<Bytes>), Refused> {
        let (mut events, mut answered) = (Vec::new(), BTreeSet::new());
        let mut from = if whole { 0 } else { after };
        while events.len() < HISTORY_EVENTS_MAX {
            let replay = || self.journal.replay(live.key, stream, from, HISTORY_PAGE_EVENTS);
            let page = self.held_by_journal(live, replay).await?;
            let Some(last) = page.last() else { break };
            from = last.sequence;
            answered.extend(page.iter().filter_map(|event| answered_id(&event.message)));
            events.extend(page.into_iter().filter(|event| event.sequence > after));
        }
        Ok((events, answered))
    }

    /// Goes on with a stream that another worker has left behind, and of which its events so far were copied: as if its
    /// client came back to it now.
    pub(crate) async fn take_over(self: &Arc<Self>, live: &Arc<Live>, stream: &Arc<Stream>, request: &Bytes) {
        let taking = async {
            let record = self.claim(live, stream.id()).await?;
            let open = record.as_ref().is_some_and(|record| record.ending.is_none());
            let known = match &record {
                Some(_) => self.history(live, stream.id(), stream.last_sequence(), open).await?,
                None => Default::default(),
            };
            Ok::<_, Refused>((record, known))
        };
        let Ok((record, (events, answered))) = taking.await else {
            // Its client comes back once more, and is told what is known then.
            stream.close();
            return live.let_go(stream.id());
        };
        stream.copy(events);
        stream.refill(Vec::new(), record.as_ref().map_or(0, |record| record.last_sequence));
        stream.take_over();
        if let Some(ending) = record.as_ref().and_then(|record| record.ending) {
            stream.close_as(ending);
            return linger(live, stream, &[]).await;
        }
        self.take_up(live, stream, request, record, &answered);
    }

    /// Goes on with what an earlier worker's stream was to answer: the answer of a child that still runs the call (C8), the
    /// server's own stream where it can be resumed, or the truth, that its outcome is unknown (R4).
    fn take_up(
        self: &Arc<Self>,
        live: &Arc<Live>,
        stream: &Arc<Stream>,
        request: &Bytes,
        record: Option<StreamRecord>,
        answered: &BTreeSet<Bytes>,
    ) {
        let (known, call) = record.map(|record| (record.source, record.call)).unwrap_or_default();
        let (done, parts): (Vec<_>, Vec<_>) =
            parts_of(stream.id(), request).into_iter().partition(|(_, original)| answered.contains(original));
        let done_count = done.len();
        for (number, original) in done {
            live.link.settle(&RoutedId { stream: number, original });
        }
        // A batch has one place in one server's stream only, and nobody knows whose it is.
        let known = known.filter(|known| parts.len() + done_count == 1 || matches!(known, Source::Frame(_)));
        let mut last = None;
        let mut waiting = Vec::new();
        for (number, original) in parts {
            match self.rejoin(live, number, original, (call.as_ref(), known.clone())) {
                Ok(driver) => waiting.push(driver),
                // The last answer of a stream says that it is the last; others go before it.
                Err(lost) => {
                    if let Some(earlier) = last.replace(lost) {
                        stream.push(Message::essential(earlier));
                    }
                }
            }
        }
        if waiting.is_empty() {
            match last {
                Some(last) => stream.finish(Message::essential(last)),
                None => stream.end(Ending::Answered),
            }
            live.let_go(stream.id());
            return;
        }
        if let Some(lost) = last {
            stream.push(Message::essential(lost));
        }
        spawn(carry_on(waiting, Arc::clone(live), Arc::clone(stream)));
    }

    /// A call of an earlier worker that somebody still runs, or the answer that its outcome is unknown.
    pub(super) fn rejoin(
        self: &Arc<Self>,
        live: &Arc<Live>,
        number: StreamId,
        original: Bytes,
        (kept, known): (Option<&journal::Call>, Option<Source>),
    ) -> Result<Driver, Bytes> {
        let since = kept.map_or_else(|| self.now(), |kept| kept.started_at);
        let method = kept.map_or(Method::Other, |kept| method_of(&kept.method));
        let named = kept.and_then(|kept| kept.name.clone());
        let lost = || {
            let why = if number.epoch == self.epoch.counter {
                "the answer to this call is no longer kept"
            } else {
                "the gateway was restarted while this call ran"
            };
            let text = format!("{why}; whether server `{}` executed it is unknown", live.server.name);
            let refusal =
                Refused { server: Some(live.server.name.clone()), ..Refused::new(Code::OutcomeUnknown, text) };
            refusal_message(&original, &refusal)
        };
        let id = RoutedId { stream: number, original: original.clone() };
        let stage = match (live.link.rejoin(&id), &known) {
            (Some(answer), _) => Stage::of(answer),
            (None, Some(Source::EventId(cursor))) => Stage::Going(resume(live, &id, cursor)),
            (None, Some(Source::Frame(_)) | None) => return Err(lost()),
        };
        let name = shown(method, named.as_deref());
        let call = InFlight {
            client_id: original.clone(),
            stream: number,
            method,
            name,
            setting: None,
            since,
            is_elsewhere: false,
        };
        let flight = live.take_off(call, self.settings.calls_in_flight_max).map_err(|_| lost())?;
        Ok(Driver {
            engine: Arc::clone(self),
            live: Arc::clone(live),
            original,
            method,
            since,
            setting: Setting::of(method, named.as_deref()),
            named,
            progress: f64::NEG_INFINITY,
            position: known.clone(),
            origin: Origin::Earlier { known },
            stage,
            flight,
        })
    }

    /// Lets go of answers in custody that the journal holds as well.
    fn settle_parts(&self, live: &Live, stream: StreamId, request: &Bytes) {
        for (number, original) in parts_of(stream, request) {
            live.link.settle(&RoutedId { stream: number, original });
        }
    }
}

/// Sees the calls of one stream to their ends.
async fn carry_on(waiting: Vec<Driver>, live: Arc<Live>, stream: Arc<Stream>) {
    let ids: Vec<_> = waiting.iter().map(Driver::routed).collect();
    let count = waiting.len();
    let delivering = waiting.into_iter().map(|mut driver| {
        let stream = &stream;
        async move { (driver.carry(stream, stream).await, driver) }
    });
    let mut delivering: FuturesUnordered<_> = delivering.collect();
    let mut place = 0;
    // A call is over only behind its answer: a worker that gives way goes as soon as no call is left.
    while let Some((answer, _driver)) = delivering.next().await {
        place += 1;
        match answer {
            Some(answer) if place == count => stream.finish(answer),
            Some(answer) => stream.push(answer),
            None => {}
        }
    }
    drop(delivering);
    if !stream.is_finished() {
        stream.end(Ending::Silent);
    }
    linger(&live, &stream, &ids).await;
}

/// Goes on with the server's own stream of a call, behind its event `cursor`.
fn resume(live: &Arc<Live>, id: &RoutedId, cursor: &str) -> Going {
    // Nothing of the request is known any more, so whatever happens it is not sent again.
    let call = Call { id: id.encode().into(), message: Bytes::new(), method: Method::Other, name: None };
    let (live, cursor) = (Arc::clone(live), cursor.to_owned());
    Box::pin(async move { live.link.resume(call, &cursor).await.map(Answer::Stream) })
}

/// The calls that a stream answers: one, or those of a batch.
pub(crate) fn parts_of(stream: StreamId, request: &Bytes) -> Vec<(StreamId, Bytes)> {
    match batch(request) {
        Ok(Some(spans)) => {
            let ids = spans.into_iter().zip(0_u64..);
            ids.map(|(span, place)| (batched(stream, place), request.slice(span))).collect()
        }
        Ok(None) | Err(_) => vec![(stream, request.clone())],
    }
}

/// The raw id of the request that `message` is the response to, if it is one.
pub(crate) fn answered_id(message: &Bytes) -> Option<Bytes> {
    let envelope = scan(message).ok()?;
    match envelope.kind {
        Kind::Result | Kind::Error => envelope.id.map(|span| message.slice(span)),
        Kind::Request | Kind::Notification => None,
    }
}

/// What a cursor that leads nowhere is told.
pub(crate) fn event_unknown() -> Refused {
    Refused::new(Code::EventUnknown, "the `Last-Event-ID` is none of this session's")
}

/// Among how many streams of a session the newest open one is looked for.
const OPEN_STREAMS_MAX: usize = 4096;
/// The pause between two tries to look something up.
const JOURNAL_RETRY: Duration = Duration::from_millis(200);
/// How many events a client that comes back gets at most from the journal, and how many are read at a time.
const HISTORY_EVENTS_MAX: usize = 4096;
const HISTORY_PAGE_EVENTS: usize = 256;
