//! One call in flight, driven by whoever waits for it: the request's own task first, a task of its own later.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::call::RoutedId;
use mainstay_core::code::Code;
use mainstay_core::time::Timestamp;
use mainstay_core::wire::envelope::{Envelope, Kind, member, scan};
use mainstay_core::wire::method::Method;
use mainstay_store::journal::{self, Content, Ending};
use mainstay_upstream::{Answer, AnswerStream, Failure, Incoming, Position, Receipt};

use super::setting::Setting;
use super::{failed, refusal_message, unknown};
use crate::engine::live::{Flight, Live};
use crate::engine::stream::{Message, Source, Stream, Weight};
use crate::engine::{Engine, Refused, rewrite};
use crate::runtime::spawn;

/// A call that is being sent.
pub(super) type Going = Pin<Box<dyn Future<Output = Result<Answer, Failure>> + Send>>;

/// How far a call has come.
pub(super) enum Stage {
    /// Not answered yet in any way.
    Going(Going),
    /// Answered whole.
    Whole(Bytes),
    /// Messages come one by one, the response last.
    Coming(AnswerStream),
    /// The response is out.
    Landed,
}

impl Stage {
    /// Where the server's own stream stands.
    fn position(&self) -> Option<Source> {
        let Self::Coming(stream) = self else { return None };
        Some(match stream.position()? {
            Position::Frame(number) => Source::Frame(number),
            Position::EventId(id) => Source::EventId(id.into()),
        })
    }

    /// The receipt of the question that came last.
    fn take_receipt(&mut self) -> Option<Receipt> {
        let Self::Coming(stream) = self else { return None };
        stream.take_receipt()
    }

    pub(super) fn of(answer: Answer) -> Self {
        match answer {
            Answer::Whole(bytes) => Self::Whole(bytes),
            Answer::Stream(stream) => Self::Coming(stream),
        }
    }
}

/// One call in flight.
pub(crate) struct Driver {
    pub(super) engine: Arc<Engine>,
    pub(super) live: Arc<Live>,
    pub(super) original: Bytes,
    pub(super) method: Method,
    pub(super) since: Timestamp,
    pub(super) setting: Option<Setting>,
    /// What the request names: a tool, a prompt, or the value of a setting.
    pub(super) named: Option<Box<str>>,
    pub(super) progress: f64,
    /// Where the server's own stream stands.
    pub(super) position: Option<Source>,
    pub(super) origin: Origin,
    pub(super) stage: Stage,
    pub(super) flight: Flight,
}

/// Who sent a call.
pub(super) enum Origin {
    /// This worker.
    Here,
    /// An earlier worker, which had dealt with the server's stream up to `known`.
    Earlier {
        /// Nothing, if it is not known.
        known: Option<Source>,
    },
}

/// What a call brings.
pub(super) enum Step {
    /// A notification or question of the server, as the client is to see it.
    Message(Message),
    /// Nothing for the client, but the server's own stream has got on.
    Reached(Source),
    /// The response as the server gave it. Nothing follows.
    Response(Landing),
}

/// A response, before it is addressed to anybody.
pub(super) enum Landing {
    /// The server's.
    Answer(Bytes),
    /// The gateway's own, in the server's place.
    Refusal(Refused),
}

impl Driver {
    /// The next thing that the call brings. Cancel-safe.
    pub(super) async fn step(&mut self) -> Step {
        loop {
            let incoming = match &mut self.stage {
                Stage::Going(going) => match going.await {
                    Ok(answer) => {
                        self.stage = Stage::of(answer);
                        continue;
                    }
                    Err(failure) => Err(failure),
                },
                Stage::Whole(bytes) => Ok(Incoming::Response(std::mem::take(bytes))),
                Stage::Coming(stream) => stream.next().await,
                Stage::Landed => std::future::pending().await,
            };
            match incoming {
                Ok(Incoming::Message(message)) => {
                    self.position = self.stage.position();
                    let receipt = self.stage.take_receipt();
                    if !self.is_known()
                        && let Some(message) = self.message(&message, receipt)
                    {
                        return Step::Message(message.from_source(self.position.clone()));
                    }
                }
                Ok(Incoming::Reached) => {
                    self.position = self.stage.position();
                    if let Some(position) = self.position.clone() {
                        return Step::Reached(position);
                    }
                }
                Ok(Incoming::Response(answer)) => {
                    self.stage = Stage::Landed;
                    self.measure(None);
                    return Step::Response(Landing::Answer(answer));
                }
                // The children are another worker's by now, and so is what becomes of the call.
                Err(_) if self.engine.has_left() && !self.live.server.is_http() => return std::future::pending().await,
                Err(failure) => {
                    self.stage = Stage::Landed;
                    let refusal = match self.origin {
                        Origin::Here => failed(&failure, &self.live.server),
                        // It was sent, whatever became of the way to its answer.
                        Origin::Earlier { .. } => unknown(&failure, &self.live.server),
                    };
                    self.measure(Some(refusal.code));
                    self.engine.note_failure(&self.live.server.name, &failure);
                    return Step::Response(Landing::Refusal(refusal));
                }
            }
        }
    }

    /// Runs the call to its end on `stream`, and keeps that for a while for a client that comes back.
    pub(super) async fn pump(mut self, stream: Arc<Stream>) {
        let (live, id) = (Arc::clone(&self.live), self.routed());
        match self.carry(&stream, &stream).await {
            Some(answer) => stream.finish(answer),
            None => stream.end(Ending::Silent),
        }
        // It lands behind its answer: a worker that leaves goes once no call is in flight.
        drop(self);
        linger(&live, &stream, &[id]).await;
    }

    /// The id under which the server knows the call.
    pub(super) fn routed(&self) -> RoutedId {
        RoutedId { stream: self.flight.stream(), original: self.original.clone() }
    }

    /// What the journal keeps of the call.
    pub(super) fn journal_entry(&self) -> journal::Call {
        journal::Call {
            server: self.live.server.name.clone(),
            method: self.method.as_str().into(),
            name: self.named.clone(),
            request: self.original.clone(),
            started_at: self.since,
        }
    }

    /// Lets the answer go out of custody: its client has it, or never will.
    pub(super) fn settle(&self) {
        self.live.link.settle(&self.routed());
    }

    /// Runs the call to its end, its messages going to `stream`. What comes back is its response as the client sees it;
    /// `None` for a call that was cancelled and stays without one. The call is over once this driver is dropped, which is to
    /// follow the response's being on its stream. How far the server's own stream was read is noted in `record`, where that
    /// is another stream than the one that the messages go on.
    pub(super) async fn carry(&mut self, stream: &Stream, record: &Stream) -> Option<Message> {
        let live = Arc::clone(&self.live);
        let number = self.flight.stream();
        let bounded = tokio::time::timeout(CALL_MAX, async {
            loop {
                tokio::select! {
                    step = self.step() => match step {
                        Step::Message(message) if record.id() != stream.id() => place_apart(message, stream, record),
                        Step::Message(message) => stream.push(message),
                        // Lost, a later worker does not go on with the server's stream.
                        Step::Reached(source) => drop(record.note(Content::Reached(source))),
                        Step::Response(landing) => return Some(self.address(&landing)),
                    },
                    () = live.given_up(number) => return None,
                    () = live.ended.wait() => {
                        let text = "the session ended before the call did; whether it was executed is unknown";
                        let refusal = Refused::new(Code::OutcomeUnknown, text);
                        return Some(refusal_message(&self.original, &refusal));
                    }
                }
            }
        });
        let answer = bounded.await.unwrap_or_else(|_| Some(self.too_slow()));
        self.engine.hint(live.touch(self.engine.now(), &self.engine.settings.terms));
        answer.map(Message::essential)
    }

    /// Runs the call to its end for nobody: its client went away before it had a stream to come back to. Questions of
    /// the server go to the listening stream.
    async fn run_out(mut self) {
        let live = Arc::clone(&self.live);
        let number = self.flight.stream();
        let _ = tokio::time::timeout(CALL_MAX, async {
            loop {
                tokio::select! {
                    step = self.step() => match step {
                        Step::Message(message) if message.weight == Weight::Essential => live.listen.push(message),
                        Step::Message(_) | Step::Reached(_) => {}
                        Step::Response(landing) => {
                            self.remember(&landing);
                            return self.settle();
                        }
                    },
                    () = live.given_up(number) => return,
                    () = live.ended.wait() => return,
                }
            }
        })
        .await;
    }

    /// The response as the client sees it: under its own id, with the notice that waits for it (U6).
    pub(super) fn address(&mut self, landing: &Landing) -> Bytes {
        let answer = match landing {
            Landing::Answer(answer) => answer,
            Landing::Refusal(refusal) => return refusal_message(&self.original, refusal),
        };
        let Ok(envelope) = scan(answer) else {
            let name = &self.live.server.name;
            let text = format!("server `{name}` answered with something that is no JSON-RPC response");
            return refusal_message(&self.original, &Refused::new(Code::OutcomeUnknown, text));
        };
        self.remember_setting(&envelope);
        let noticed =
            self.live.with_notice(|notice| rewrite::to_client_with(answer, &envelope, &self.original, notice));
        noticed.unwrap_or_else(|| rewrite::to_client(answer, &envelope, &self.original))
    }

    /// What remains of a response that nobody hears: the setting that it agreed to.
    fn remember(&mut self, landing: &Landing) {
        if let Landing::Answer(answer) = landing
            && let Ok(envelope) = scan(answer)
        {
            self.remember_setting(&envelope);
        }
    }

    fn remember_setting(&mut self, envelope: &Envelope) {
        if envelope.kind == Kind::Result
            && let Some(setting) = self.setting.take()
        {
            setting.remember(&self.live);
            self.engine.note_agreed(self.live.key, self.flight.stream());
        }
    }

    /// Whether the call was to change a setting that the server has not agreed to.
    pub(super) fn is_disagreed(&self) -> bool {
        self.setting.is_some()
    }

    /// A message of the server that belongs to this call, as the client sees it; `None` if it is not for the client.
    fn message(&mut self, message: &Bytes, receipt: Option<Receipt>) -> Option<Message> {
        let envelope = scan(message).ok()?;
        let method = envelope.method_name(message).map(|name| Method::of(&name))?;
        if method == Method::Progress && envelope.kind == Kind::Notification {
            let progress = progress_value(message, &envelope);
            if progress.is_some_and(|progress| progress <= self.progress) {
                return None;
            }
            self.progress = progress.unwrap_or(self.progress);
        }
        self.engine.server_message(&self.live, message, &envelope, receipt)
    }

    /// Whether an earlier worker has dealt with what just came: the keeper gives again what was not acknowledged.
    fn is_known(&self) -> bool {
        match (&self.origin, &self.position) {
            (Origin::Earlier { known: Some(Source::Frame(known)) }, Some(Source::Frame(frame))) => frame <= known,
            _ => false,
        }
    }

    fn measure(&self, outcome: Option<Code>) {
        let took = self.engine.now().since(self.since);
        self.engine.metrics.call(&self.live.server.name, self.method, took, outcome);
    }

    pub(super) fn too_slow(&self) -> Bytes {
        let mut refusal = Refused::new(Code::OutcomeUnknown, "the server did not answer in time");
        refusal.server = Some(self.live.server.name.clone());
        refusal_message(&self.original, &refusal)
    }
}

/// Appends a message to a stream that is not the call's own, whose `record` says as well where the message came from. In
/// this order: a message may come twice after a crash, and none is missing.
pub(super) fn place_apart(message: Message, stream: &Stream, record: &Stream) {
    let source = message.source.clone();
    stream.push(message);
    if let Some(source) = source {
        record.note(Content::Reached(source));
    }
}

/// A call whose client waits for it. If the client goes away the call runs on by itself (R8).
pub(super) struct Carried(pub(super) Option<Driver>);

impl Carried {
    pub(super) async fn step(&mut self) -> Step {
        match &mut self.0 {
            Some(driver) => driver.step().await,
            None => std::future::pending().await,
        }
    }

    /// The first thing that the call brings for its client.
    pub(super) async fn first(&mut self) -> Step {
        loop {
            match self.step().await {
                Step::Reached(_) => {}
                step @ (Step::Message(_) | Step::Response(_)) => return step,
            }
        }
    }

    /// The response of a call that is never a stream; what comes before it goes to the listening stream (R1).
    pub(super) async fn plain_response(&mut self) -> Step {
        loop {
            match self.step().await {
                Step::Message(message) => {
                    if let Some(driver) = &self.0 {
                        driver.live.listen.push(message);
                    }
                }
                Step::Reached(_) => {}
                Step::Response(landing) => return Step::Response(landing),
            }
        }
    }
}

impl Drop for Carried {
    fn drop(&mut self) {
        if let Some(driver) = self.0.take() {
            spawn(driver.run_out());
        }
    }
}

/// Keeps a finished stream for a client that comes back: for a day until it is delivered, shortly after it was. Until
/// then the answers to `ids` stay in custody, so that they outlive this worker.
pub(crate) async fn linger(live: &Live, stream: &Stream, ids: &[RoutedId]) {
    live.trim();
    tokio::select! {
        () = stream.delivered() => {}
        () = tokio::time::sleep(UNDELIVERED_MAX) => {}
        () = live.ended.wait() => {}
    }
    for id in ids {
        live.link.settle(id);
    }
    tokio::time::sleep(LINGER).await;
    live.let_go(stream.id());
}

/// The number in a progress notification.
fn progress_value(message: &[u8], envelope: &Envelope) -> Option<f64> {
    let span = member(message, envelope.params.as_ref()?, "progress")?;
    std::str::from_utf8(&message[span]).ok()?.parse().ok()
}

/// The longest that a call may take.
const CALL_MAX: Duration = Duration::from_hours(24);
/// How long an answer is kept that nobody has taken: for a machine that sleeps over night.
pub(super) const UNDELIVERED_MAX: Duration = Duration::from_hours(24);
/// How long a finished stream is kept in memory after it was handed to a connection. A client that comes back later,
/// since its machine fell asleep before it read that, finds it in the journal.
const LINGER: Duration = Duration::from_mins(1);
