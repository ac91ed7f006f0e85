//! A leaver's call, as its successor sees it: in flight until its stream ends in the journal, or the leaver is gone.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::call::StreamId;
use mainstay_core::code::Code;
use mainstay_core::id::{Epoch, SessionKey};
use mainstay_core::wire::method::Method;
use mainstay_store::journal::{self, Content, Ending, Entry, Head, StreamRecord};

use crate::engine::call::take_up::{answered_id, parts_of};
use crate::engine::call::{Setting, method_of, refusal_message};
use crate::engine::live::{Flight, InFlight, Live};
use crate::engine::stream::{Message, Stream};
use crate::engine::{Engine, Refused};
use crate::runtime::spawn;

impl Engine {
    /// Finds the calls that leavers stay for. What takes longer than a start has time for goes on beside it: a client that
    /// comes back to such a call finds it by itself.
    pub async fn adopt_calls(self: Arc<Self>) {
        if self.leavers.are_gone() {
            return;
        }
        let engine = Arc::clone(&self);
        let mut adopting = spawn(async move {
            for leaver in engine.leavers.living() {
                engine.adopt_calls_of(leaver).await;
            }
        });
        if tokio::time::timeout(ADOPT_MAX, &mut adopting).await.is_err() {
            tracing::info!(
                "more calls are left with earlier workers than a start has time for; they are found meanwhile"
            );
        }
    }

    async fn adopt_calls_of(self: &Arc<Self>, leaver: Epoch) {
        let calls = match self.journal.open_calls(leaver, CALLS_MAX).await {
            Ok(calls) => calls,
            Err(error) => {
                return tracing::warn!(error = %error, "the calls that an earlier worker stays for can't be read");
            }
        };
        tracing::info!(epoch = leaver.counter, streams = calls.len(), "an earlier worker stays for its calls");
        for (session, record) in calls {
            self.adopt_call(leaver, session, record).await;
        }
    }

    /// Counts one as in flight. Those on children are not a leaver's any more: their clients take them up here (C8).
    async fn adopt_call(self: &Arc<Self>, leaver: Epoch, session: SessionKey, record: StreamRecord) {
        let Some(call) = record.call else { return };
        if self.servers.get(&call.server).is_none_or(|served| !served.server.is_http()) {
            return;
        }
        match self.load(session).await {
            Ok(live) => self.oversee(&live, leaver, record.stream, &call),
            Err(refusal) => {
                tracing::debug!(session = %session.session_ref(), refusal = %refusal.text, "not woken for a call");
            }
        }
    }

    /// Sees to the calls of `stream`, which `leaver` stays for, until they are over. Once at a time for each stream.
    pub(crate) fn oversee(self: &Arc<Self>, live: &Arc<Live>, leaver: Epoch, stream: StreamId, call: &journal::Call) {
        if !self.leavers.charge(live.key, stream) {
            return;
        }
        let mut flights = BTreeMap::new();
        let setting = Setting::of(Method::of(&call.method), call.name.as_deref());
        let known: Vec<_> = live.calls().iter().map(|call| call.stream).collect();
        for (number, original) in parts_of(stream, &call.request) {
            // A batch and those of its calls that change a setting are on record both.
            if known.contains(&number) {
                continue;
            }
            let shown = InFlight {
                client_id: original.clone(),
                stream: number,
                method: method_of(&call.method),
                name: call.name.clone().filter(|_| setting.is_none()),
                setting: None,
                since: call.started_at,
                is_elsewhere: true,
            };
            // One that finds no room is only not seen.
            flights.insert(original, live.take_off(shown, self.settings.calls_in_flight_max).ok());
        }
        let (engine, live, request) = (Arc::clone(self), Arc::clone(live), call.request.clone());
        spawn(Charge { engine, live, leaver, stream, request, setting, flights, seen_through: 0 }.see_to_it());
    }
}

/// The calls of one stream.
struct Charge {
    engine: Arc<Engine>,
    live: Arc<Live>,
    leaver: Epoch,
    stream: StreamId,
    /// The client's raw id, or those of a batch.
    request: Bytes,
    /// What the call changes in its session, if the server agrees.
    setting: Option<Setting>,
    /// Those that are not known to be answered, by the clients' ids.
    flights: BTreeMap<Bytes, Option<Flight>>,
    /// Up to which event it is known what of a batch is answered.
    seen_through: u64,
}

impl Charge {
    async fn see_to_it(mut self) {
        loop {
            self.attend().await;
            self.flights.clear();
            self.engine.leavers.discharge(self.live.key, self.stream);
            // A client that came back in the last moment relied on this task, or has begun another.
            let is_left = self.followed().is_some_and(|stream| !stream.is_finished());
            if !is_left || !self.engine.leavers.charge(self.live.key, self.stream) {
                return;
            }
        }
    }

    /// Copies what the leaver appends for whoever follows it here, until there is no more.
    async fn attend(&mut self) {
        let mut watch = self.engine.watch(self.live.key, self.stream, self.leaver);
        let began_at = self.engine.now();
        loop {
            let sight = watch.sight();
            if let Some(head) = sight.head
                && self.see(head).await
            {
                return;
            }
            // What is not on record by then never will be: nobody could tell when its call is over.
            let is_missing = sight.is_known && sight.head.is_none();
            if sight.is_gone || is_missing && self.engine.now().since(began_at) >= RECORD_WAIT_MAX {
                return self.succeed().await;
            }
            if self.is_given_up() && self.end_silently().await {
                return;
            }
            let is_followed = self.followed().is_some();
            if !is_followed && self.engine.has_left() {
                // The next worker sees to it.
                return;
            }
            watch.urge(is_followed);
            tokio::select! {
                () = watch.changed() => {}
                // What is read of the stream may have failed, or been given up.
                () = tokio::time::sleep(LOOK_PAUSE) => {}
                () = self.live.ended.wait() => return self.say_ended(),
            }
        }
    }

    /// The stream, if a client has come back to it here.
    fn followed(&self) -> Option<Arc<Stream>> {
        self.live.stream(self.stream).filter(|stream| stream.is_foreign())
    }

    /// Takes over what the leaver has appended. Whether it is done with the stream.
    async fn see(&mut self, head: Head) -> bool {
        self.note_answered(head.last_sequence).await;
        let followed = self.followed();
        if let Some(stream) = &followed {
            self.copy(stream, head.last_sequence).await;
        }
        // A later worker may go on with it as well: its client comes back to that.
        let is_over = head.ending.is_some() || head.claim != self.leaver;
        if is_over {
            self.note_agreed(head);
        }
        if let (true, Some(stream)) = (is_over, followed) {
            stream.close();
            let live = Arc::clone(&self.live);
            spawn(async move { crate::engine::call::linger(&live, &stream, &[]).await });
        }
        is_over
    }

    /// Remembers the setting that the server agreed to: after a loss of its session it is this worker that brings the next
    /// one there (U4). Nothing but the record's end tells of that: such calls are answered without a stream.
    fn note_agreed(&mut self, head: Head) {
        let agreed = head.claim == self.leaver && head.ending == Some(Ending::Answered) && head.last_sequence == 0;
        if let Some(setting) = self.setting.take().filter(|_| agreed) {
            self.engine.adopt_setting(&self.live, setting);
        }
    }

    /// Lands what of a batch is answered. A call that is alone lands with its stream.
    async fn note_answered(&mut self, last_sequence: u64) {
        if self.flights.len() < 2 {
            return;
        }
        while self.seen_through < last_sequence {
            let (key, after) = (self.live.key, self.seen_through);
            let Ok(events) = self.engine.journal.replay(key, self.stream, after, COPY_EVENTS_MAX).await else { return };
            // Those that are missing were trimmed.
            self.seen_through = events.last().map_or(last_sequence, |event| event.sequence);
            for answered in events.iter().filter_map(|event| answered_id(&event.message)) {
                self.flights.remove(&answered);
            }
        }
    }

    async fn copy(&self, stream: &Stream, last_sequence: u64) {
        while stream.last_sequence() < last_sequence {
            let after = stream.last_sequence();
            let page = self.engine.journal.replay(self.live.key, self.stream, after, COPY_EVENTS_MAX).await;
            let Ok(events) = page else { return };
            if events.is_empty() {
                return;
            }
            stream.copy(events);
        }
    }

    /// The leaver is gone. Whoever follows the stream is told what this worker can find out; whoever does not may still
    /// come back.
    async fn succeed(&mut self) {
        self.flights.clear();
        let Some(stream) = self.followed() else { return };
        if self.engine.has_left() {
            return stream.close();
        }
        self.engine.take_over(&self.live, &stream, &self.request).await;
    }

    /// Whether the client has cancelled the call, and the server has not answered it in time.
    fn is_given_up(&mut self) -> bool {
        let live = &self.live;
        let is_part_given_up = |flight: &Flight| flight.stream() != self.stream && live.is_given_up(flight.stream());
        self.flights.retain(|_, flight| !flight.as_ref().is_some_and(is_part_given_up));
        live.is_given_up(self.stream)
    }

    /// Takes the stream from the leaver and ends it, which the leaver sees. Whether that could be done.
    async fn end_silently(&mut self) -> bool {
        let (engine, live) = (&self.engine, &self.live);
        if let Err(error) = engine.journal.claim(live.key, self.stream, engine.epoch, engine.now()).await {
            tracing::debug!(session = %live.key.session_ref(), error = %error, "a cancelled call can't be ended yet");
            return false;
        }
        let content = Content::Ended(Ending::Silent);
        let entry = Entry { session: live.key, stream: self.stream, claim: engine.epoch, at: engine.now(), content };
        // Lost, a client that comes back is told that the outcome is unknown.
        let _ = engine.journal.append(entry, None);
        if let Some(stream) = self.followed() {
            stream.close();
            live.let_go(self.stream);
        }
        true
    }

    /// The session has ended before the call did.
    fn say_ended(&self) {
        let Some(stream) = self.followed() else { return };
        for original in self.flights.keys() {
            let text = "the session ended before the call did; whether it was executed is unknown";
            let refusal = Refused::new(Code::OutcomeUnknown, text);
            stream.push(Message::essential(refusal_message(original, &refusal)));
        }
        stream.close();
    }
}

/// How long the start of a worker waits for the calls of leavers to be found.
const ADOPT_MAX: Duration = Duration::from_secs(5);
/// How many calls of one leaver are seen.
const CALLS_MAX: usize = 65_536;
/// The longest pause between two looks at what this worker knows of a call itself.
const LOOK_PAUSE: Duration = Duration::from_millis(250);
/// How long a leaver's stream may be unknown: what it has begun to send is in the journal sooner, or never.
const RECORD_WAIT_MAX: Duration = Duration::from_secs(10);
/// How many events are copied at a time.
const COPY_EVENTS_MAX: usize = 256;
