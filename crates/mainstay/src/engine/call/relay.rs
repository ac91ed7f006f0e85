//! Calls of clients that have one stream for everything (2024-11-05): a request is confirmed, its answer is an event.
//!
//! A request is confirmed once nothing of it can be lost in silence: its answer is durable on the stream, or it is on
//! record that it was sent. The record is a journaled stream without events, under the number of the call; it stays
//! open until a reader has taken the answer. So a later worker finds every call whose answer may not have arrived.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::call::{EventId, RoutedId, StreamId};
use mainstay_core::code::Code;
use mainstay_core::id::Epoch;
use mainstay_core::limit::Limit;
use mainstay_core::wire::envelope::result_message;
use mainstay_core::wire::method::Method;
use mainstay_store::journal::{self, Content, Ending, Entry, Event, StreamRecord};

use super::Request;
use super::driver::{Driver, Step, UNDELIVERED_MAX, place_apart};
use super::take_up::event_unknown;
use crate::engine::live::Live;
use crate::engine::stream::{Message, Reader, Stream};
use crate::engine::{EMPTY_OBJECT, Engine, Refused};
use crate::runtime::spawn;

impl Engine {
    /// Serves one request of a live session whose answers go on its one stream. Once this returns the request may be
    /// confirmed. To be run to its end, whatever becomes of the client's connection.
    ///
    /// # Errors
    /// [`Code::LimitReached`] if the session has too much in hand, or does not read; then nothing was sent. Whatever
    /// becomes of the call itself is an event.
    pub async fn relay(self: &Arc<Self>, live: &Arc<Live>, request: Request) -> Result<(), Refused> {
        live.relay();
        if request.method == Method::Ping {
            self.say(live, result_message(&request.id(), &EMPTY_OBJECT).into()).await;
            return Ok(());
        }
        self.has_room(live)?;
        let mut driver = self.depart(live, request, self.next_streams(1))?;
        let _outstays = live.server.is_http().then(|| self.outstaying.enter());
        let first = tokio::time::timeout(self.settings.answer_json_within, driver.step()).await;
        if let Ok(Step::Response(landing)) = first {
            let (id, answer) = (driver.routed(), driver.address(&landing));
            if let Some(sequence) = self.say(live, answer).await {
                spawn(put_away(Arc::clone(self), Arc::clone(live), id, sequence));
            }
            return Ok(());
        }
        let record = self.record_of(live, &driver);
        record.note(Content::Call(driver.journal_entry()));
        match first {
            Ok(Step::Message(message)) => place_apart(message, &live.listen, &record),
            Ok(Step::Reached(source)) => drop(record.note(Content::Reached(source))),
            Ok(Step::Response(_)) | Err(_) => {}
        }
        // Lost, the call is in the custody of the keeper, or its server is asked no more after a crash.
        let _ = tokio::time::timeout(JOURNAL_WAIT_MAX, self.journal.flush()).await;
        spawn(driver.relayed(record));
        Ok(())
    }

    /// Puts an answer on the one stream of a session, and waits until it is durable there. Its place; `None` if the
    /// session has ended.
    pub async fn say(&self, live: &Live, answer: Bytes) -> Option<u64> {
        live.relay();
        let sequence = live.listen.place(Message::essential(answer))?;
        let _ = tokio::time::timeout(JOURNAL_WAIT_MAX, live.listen.settled_at(sequence)).await;
        Some(sequence)
    }

    /// A reader of the one stream of a session, from behind the event `after`, or, without that, from the first that no
    /// reader has taken. What earlier lives of the session left for it is on it: what was not taken, and what becomes of
    /// the calls that were in flight (R4, C8).
    ///
    /// # Errors
    /// [`Code::EventUnknown`] if the event is none of this session's one stream.
    pub async fn attach(self: &Arc<Self>, live: &Arc<Live>, after: Option<EventId>) -> Result<Reader, Refused> {
        live.relay();
        if after.as_ref().is_some_and(|event| event.tag != live.key.tag() || !event.stream.is_listen()) {
            return Err(event_unknown());
        }
        self.recall(live, after.as_ref()).await;
        Ok(match after {
            Some(event) if event.stream == live.listen.id() && live.listen.is_of_this_life(event.sequence) => {
                let cursor = event.to_string();
                self.reader_of(live, &live.listen, &event, cursor).await?
            }
            // What came after it in an earlier life begins this one.
            Some(_) => live.listen.read(Some(0), None),
            None => live.listen.read(None, None),
        })
    }

    fn has_room(&self, live: &Live) -> Result<(), Refused> {
        let (answers, bytes) = live.listen.unread();
        if answers < self.settings.calls_in_flight_max && bytes < UNREAD_BYTES_MAX {
            return Ok(());
        }
        let text =
            "the limit `session.calls_in_flight_max` is reached by answers that wait to be read; open the event stream";
        Err(Refused::at_limit(Code::LimitReached, Limit::CallsInFlight, text))
    }

    /// Where it is on record that `driver`'s call was sent.
    fn record_of(&self, live: &Live, driver: &Driver) -> Arc<Stream> {
        let journaled = Some(self.journaled(live.key));
        Stream::new(live.key.tag(), driver.flight.stream(), Some(driver.original.clone()), journaled)
    }

    /// Puts on the session's one stream what its earlier lives left, once in this life.
    async fn recall(self: &Arc<Self>, live: &Arc<Live>, after: Option<&EventId>) {
        let mut recalled = live.recalled.lock().await;
        if *recalled {
            return;
        }
        let reading = self.journal.streams(live.key, RECALLED_STREAMS_MAX);
        let records = match tokio::time::timeout(JOURNAL_WAIT_MAX, reading).await {
            Ok(Ok(records)) => records,
            Ok(Err(error)) => {
                tracing::warn!(session = %live.key.session_ref(), error = %error, "what was left of a session's stream can't be read");
                return;
            }
            Err(_elapsed) => return,
        };
        live.listen.note(Content::Call(mark(live, self.now())));
        let (left, records): (Vec<_>, Vec<_>) = records.into_iter().partition(|record| self.is_left(live, record));
        let leavers: BTreeSet<Epoch> = left.iter().map(|record| record.claim).collect();
        for leaver in leavers {
            let records = left.iter().filter(|record| record.claim == leaver).cloned().collect();
            spawn(Arc::clone(self).recall_of(leaver, Arc::clone(live), records, after.cloned()));
        }
        let (streams, calls): (Vec<_>, Vec<_>) = records.into_iter().partition(|record| record.stream.is_listen());
        let mut answered = BTreeSet::new();
        for record in streams {
            answered.append(&mut self.repeat(live, &record, after).await);
        }
        for record in calls {
            // One that has events of its own is answered on them, and one of this worker by this worker.
            let is_earlier = record.stream.epoch != self.epoch.counter;
            if record.ending.is_none() && record.last_sequence == 0 && is_earlier {
                self.retake(live, record, &answered).await;
            }
        }
        *recalled = true;
    }

    /// Whether a worker that has handed over still appends to a stream of this session.
    fn is_left(&self, live: &Live, record: &StreamRecord) -> bool {
        live.server.is_http() && record.ending.is_none() && self.leavers.is_present(record.claim)
    }

    /// Puts on the session's one stream what a worker that has handed over appends to its own, for as long as that lives;
    /// then what is left of it.
    async fn recall_of(
        self: Arc<Self>,
        leaver: Epoch,
        live: Arc<Live>,
        records: Vec<StreamRecord>,
        after: Option<EventId>,
    ) {
        let (streams, mut calls): (Vec<_>, Vec<_>) = records.into_iter().partition(|record| record.stream.is_listen());
        let mut places: Vec<_> = streams.iter().map(|record| (record.stream, from(record, after.as_ref()))).collect();
        // The newest is the one that it appends to; any tells whether it is still there.
        let followed = places.last().map(|(stream, _)| *stream).or_else(|| calls.last().map(|record| record.stream));
        let Some(mut watch) = followed.map(|stream| self.watch(live.key, stream, leaver)) else { return };
        watch.urge(true);
        let (mut answered, mut is_first) = (BTreeSet::new(), true);
        loop {
            let sight = watch.sight();
            for (stream, place) in &mut places {
                let Ok((events, mut found)) = self.history(&live, *stream, *place, is_first).await else { continue };
                *place = events.last().map_or(*place, |event| event.sequence);
                push_all(&live, events);
                answered.append(&mut found);
            }
            is_first = false;
            let is_answered =
                |record: &StreamRecord| record.call.as_ref().is_some_and(|call| answered.contains(&call.request));
            let (told, open): (Vec<_>, Vec<_>) = calls.into_iter().partition(is_answered);
            calls = open;
            if self.has_left() && sight.is_gone || live.ended.is_set() {
                // Another worker's, or nobody's any more.
                return;
            }
            for record in told {
                self.retake(&live, record, &answered).await;
            }
            if sight.is_gone {
                break;
            }
            tokio::select! {
                () = watch.changed() => {}
                // What was to be read may have failed.
                () = tokio::time::sleep(LOOK_AGAIN) => {}
                () = live.ended.wait() => {}
            }
        }
        for (stream, place) in places {
            if matches!(self.claim(&live, stream).await, Ok(Some(_))) {
                self.note_taken(&live, stream, place);
            }
        }
        for record in calls {
            self.retake(&live, record, &answered).await;
        }
    }

    /// Puts what nobody has taken of an earlier listening stream on this one. The ids of the requests answered there.
    async fn repeat(&self, live: &Live, record: &StreamRecord, after: Option<&EventId>) -> BTreeSet<Bytes> {
        let is_this_one = record.stream == live.listen.id();
        if !is_this_one && !matches!(self.claim(live, record.stream).await, Ok(Some(_))) {
            return BTreeSet::new();
        }
        let Ok((mut events, answered)) = self.history(live, record.stream, from(record, after), true).await else {
            return BTreeSet::new();
        };
        events.retain(|event| !is_this_one || !live.listen.is_of_this_life(event.sequence));
        let Some(through) = events.last().map(|event| event.sequence) else { return answered };
        push_all(live, events);
        // Behind them: after a crash they may come twice, and none is missing.
        self.note_taken(live, record.stream, through);
        answered
    }

    /// Goes on with a call of an earlier life, or says what is known of it.
    async fn retake(self: &Arc<Self>, live: &Arc<Live>, record: StreamRecord, answered: &BTreeSet<Bytes>) {
        // As it is now: a worker that stayed for it may have gone on with it, or ended it, since it was looked at.
        let Ok(Some(record)) = self.claim(live, record.stream).await else { return };
        let Some(call) = record.call.filter(|_| record.ending.is_none()) else { return };
        let original = call.request.clone();
        let journaled = Some(self.journaled(live.key));
        let stream = Stream::new(live.key.tag(), record.stream, Some(original.clone()), journaled);
        let id = RoutedId { stream: record.stream, original: original.clone() };
        if answered.contains(&original) {
            live.link.settle(&id);
            // On another stream; whether the server agreed to a setting is not known here.
            return stream.end(Ending::Silent);
        }
        match self.rejoin(live, record.stream, original, (Some(&call), record.source)) {
            Ok(driver) => drop(spawn(driver.relayed(stream))),
            Err(lost) => {
                live.listen.push(Message::essential(lost));
                stream.end(Ending::Silent);
            }
        }
    }

    /// Notes that the events of a listening stream up to `through` were taken. Lost, they come twice after a crash.
    fn note_taken(&self, live: &Live, stream: StreamId, through: u64) {
        let entry = Entry {
            session: live.key,
            stream,
            claim: self.epoch,
            at: self.now(),
            content: Content::Delivered(through),
        };
        let _ = self.journal.append(entry, None);
    }
}

impl Driver {
    /// Runs the call to its end on the session's one stream, and keeps its record until a reader has taken the answer.
    async fn relayed(mut self, record: Arc<Stream>) {
        let (engine, live) = (Arc::clone(&self.engine), Arc::clone(&self.live));
        let (id, listen) = (self.routed(), Arc::clone(&self.live.listen));
        match self.carry(&listen, &record).await {
            // A stream that is closed took nothing: the session has ended, or another worker goes on with it.
            Some(answer) => {
                // Of a setting that tells the next worker to remember it.
                let ending = if self.is_disagreed() { Ending::Silent } else { Ending::Answered };
                if let Some(sequence) = listen.place(answer) {
                    drop(self);
                    if put_away(engine, live, id, sequence).await {
                        record.end(ending);
                    }
                }
            }
            None => {
                self.settle();
                record.end(Ending::Silent);
            }
        }
    }
}

/// Waits until a reader has taken the answer to `id`, for a day at most; then that is noted, and custody ends. Whether it
/// came to that.
async fn put_away(engine: Arc<Engine>, live: Arc<Live>, id: RoutedId, sequence: u64) -> bool {
    tokio::select! {
        taken = live.listen.taken(sequence) => if !taken { return false },
        () = tokio::time::sleep(UNDELIVERED_MAX) => {}
        () = live.ended.wait() => {}
    }
    engine.note_taken(&live, live.listen.id(), sequence);
    live.link.settle(&id);
    true
}

/// From where on nobody has taken the events of an earlier listening stream, as its client says, or else the journal.
fn from(record: &StreamRecord, after: Option<&EventId>) -> u64 {
    let cursor = after.filter(|event| event.stream == record.stream).map(|event| event.sequence);
    cursor.unwrap_or(record.delivered)
}

/// Puts events of an earlier stream on the session's one stream.
fn push_all(live: &Live, events: Vec<Event>) {
    for event in events {
        live.listen.push(Message { weight: event.weight, ..Message::passing(event.message) });
    }
}

/// What tells a listening stream that carries answers from others.
fn mark(live: &Live, now: mainstay_core::time::Timestamp) -> journal::Call {
    journal::Call {
        server: live.server.name.clone(),
        method: HTTP_SSE.into(),
        name: None,
        request: Bytes::new(),
        started_at: now,
    }
}

/// Says in the journal that a session has one stream for everything.
pub(crate) const HTTP_SSE: &str = "http+sse";
/// The most bytes of answers that wait for a reader.
const UNREAD_BYTES_MAX: usize = 32 << 20;
/// How many streams of earlier lives are looked at.
const RECALLED_STREAMS_MAX: usize = 1024;
/// How long the journal is waited for before something is done without it.
const JOURNAL_WAIT_MAX: Duration = Duration::from_secs(2);
/// How soon the journal is asked again for what it did not give.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
