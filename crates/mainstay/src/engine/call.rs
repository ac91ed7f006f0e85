//! A client's request on its way: answered at once as JSON, or a little later on a stream that can be resumed.
//!
//! A call never hangs on its client: a connection that goes away leaves it running (R8). It ends with the server's
//! answer, with an error that says what is known of its outcome, or with its session.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::call::RoutedId;
use mainstay_core::code::Code;
use mainstay_core::wire::envelope::{Envelope, Kind, error_message, escape, member, result_message, scan, unescape};
use mainstay_core::wire::method::Method;
use mainstay_upstream::{Answer, AnswerStream, Call, Failure, Incoming, Server};

use crate::engine::live::{Flight, Live};
use crate::engine::stream::{Reader, Stream};
use crate::engine::{EMPTY_OBJECT, Engine, HOLD, Refused, rewrite};
use crate::runtime::spawn;

/// What answers a request.
pub enum Reply {
    /// The JSON-RPC response.
    Json(Bytes),
    /// A stream that carries it.
    Stream(Reader),
}

/// A request as it was read: its bytes and what the scan found in them.
pub struct Request {
    /// The raw message.
    pub message: Bytes,
    /// Where its parts stand.
    pub envelope: Envelope,
    /// Which method it calls.
    pub method: Method,
}

impl Request {
    /// The client's own raw id; empty if there is none.
    pub fn id(&self) -> Bytes {
        self.envelope.id.clone().map(|span| self.message.slice(span)).unwrap_or_default()
    }

    /// The text of the string member `key` of `params`.
    pub fn param(&self, key: &str) -> Option<Box<str>> {
        let span = member(&self.message, self.envelope.params.as_ref()?, key)?;
        unescape(&self.message[span]).map(|text| text.as_ref().into())
    }
}

impl Engine {
    /// Serves one request of a live session.
    ///
    /// # Errors
    /// [`Code::LimitReached`] if the session has too much in hand. Whatever becomes of the call itself is a reply.
    pub async fn request(self: &Arc<Self>, live: &Arc<Live>, request: Request) -> Result<Reply, Refused> {
        if request.method == Method::Ping {
            return Ok(Reply::Json(result_message(&request.id(), &EMPTY_OBJECT).into()));
        }
        let plain = request.method.answered_plain();
        let mut carried = Carried(Some(self.depart(live, request)?));
        let first = if plain {
            tokio::time::timeout(HOLD, carried.plain_response()).await
        } else if self.settings.answer_json_within.is_zero() {
            return self.stream(live, carried, None).map(Reply::Stream);
        } else {
            tokio::time::timeout(self.settings.answer_json_within, carried.step()).await
        };
        match first {
            Ok(Step::Response(answer)) => {
                carried.0 = None;
                Ok(Reply::Json(answer))
            }
            Ok(Step::Message(message)) => self.stream(live, carried, Some(message)).map(Reply::Stream),
            Err(_elapsed) if plain => Ok(Reply::Json(carried.too_slow())),
            Err(_elapsed) => self.stream(live, carried, None).map(Reply::Stream),
        }
    }

    /// Sends the call on its way.
    pub(crate) fn depart(self: &Arc<Self>, live: &Arc<Live>, request: Request) -> Result<Driver, Refused> {
        let original = request.id();
        let stream = self.next_stream();
        let flight = live.take_off(original.clone(), stream, self.settings.calls_in_flight_max).map_err(|_| {
            Refused::new(Code::LimitReached, "the limit `calls_in_flight_max` of this session is reached")
        })?;
        let routed = RoutedId { stream, original: original.clone() };
        let outgoing = rewrite::to_server(&request.message, &request.envelope, &routed);
        let name = (request.method == Method::ToolsCall).then(|| request.param("name")).flatten();
        let call = Call { id: outgoing.id, message: outgoing.message, method: request.method, name };
        let link = Arc::clone(&live.link);
        let going: Going = Box::pin(async move { link.call(call).await });
        Ok(Driver {
            engine: Arc::clone(self),
            live: Arc::clone(live),
            original,
            setting: Setting::of(&request),
            progress: f64::NEG_INFINITY,
            stage: Stage::Going(going),
            flight,
        })
    }

    /// Turns the response of a call into a stream that its client can come back to.
    fn stream(
        self: &Arc<Self>,
        live: &Arc<Live>,
        mut carried: Carried,
        first: Option<Bytes>,
    ) -> Result<Reader, Refused> {
        let Some(driver) = carried.0.take() else {
            return Err(Refused::new(Code::Internal, "the call is already answered"));
        };
        let stream = Stream::new(live.key.tag(), driver.flight.stream(), Some(driver.original.clone()));
        if live.keep(&stream, self.settings.streams_max).is_err() {
            spawn(driver.run_out());
            return Err(streams_crowded());
        }
        if let Some(first) = first {
            stream.push(first);
        }
        let reader = stream.read(Some(0), None);
        spawn(driver.pump(stream));
        Ok(reader)
    }

    /// Serves the requests of a batch on one stream, which ends with the last response (2025-03-26).
    ///
    /// # Errors
    /// [`Code::LimitReached`] if the session has too much in hand; then none of them was sent.
    pub fn batch(self: &Arc<Self>, live: &Arc<Live>, requests: Vec<Request>) -> Result<Reply, Refused> {
        let stream = Stream::new(live.key.tag(), self.next_stream(), None);
        live.keep(&stream, self.settings.streams_max).map_err(|_| streams_crowded())?;
        let (pings, calls): (Vec<_>, Vec<_>) = requests.into_iter().partition(|request| request.method == Method::Ping);
        for ping in pings {
            stream.push(result_message(&ping.id(), &EMPTY_OBJECT).into());
        }
        let drivers: Result<Vec<_>, _> = calls.into_iter().map(|request| self.depart(live, request)).collect();
        let drivers = drivers.inspect_err(|_| live.let_go(stream.id()))?;
        let reader = stream.read(Some(0), None);
        let live = Arc::clone(live);
        spawn(async move {
            let parts = drivers.into_iter().map(|driver| {
                let stream = Arc::clone(&stream);
                spawn(async move { stream.push(driver.deliver(&stream).await) })
            });
            futures_util::future::join_all(parts).await;
            stream.close();
            linger(&live, &stream).await;
        });
        Ok(Reply::Stream(reader))
    }

    /// Goes on with a call of an earlier worker on a child that still runs it: its answer will reach `stream` (C8).
    /// `false` if that cannot be.
    pub(crate) fn rejoin(self: &Arc<Self>, live: &Arc<Live>, id: RoutedId, stream: &Arc<Stream>) -> bool {
        let Some(answer) = live.link.rejoin(&id) else { return false };
        let Ok(flight) = live.take_off(id.original.clone(), id.stream, self.settings.calls_in_flight_max) else {
            return false;
        };
        let driver = Driver {
            engine: Arc::clone(self),
            live: Arc::clone(live),
            original: id.original,
            setting: None,
            progress: f64::NEG_INFINITY,
            stage: Stage::of(answer),
            flight,
        };
        spawn(driver.pump(Arc::clone(stream)));
        true
    }
}

type Going = Pin<Box<dyn Future<Output = Result<Answer, Failure>> + Send>>;

enum Stage {
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
    fn of(answer: Answer) -> Self {
        match answer {
            Answer::Whole(bytes) => Self::Whole(bytes),
            Answer::Stream(stream) => Self::Coming(stream),
        }
    }
}

/// A session setting that a request changes, to be remembered once the server agreed to it (C5, U4).
enum Setting {
    Level(Box<str>),
    Subscribe(Box<str>),
    Unsubscribe(Box<str>),
}

impl Setting {
    fn of(request: &Request) -> Option<Self> {
        let (name, make): (_, fn(Box<str>) -> Self) = if request.method == Method::SetLevel {
            ("level", Self::Level)
        } else if request.method == Method::Subscribe {
            ("uri", Self::Subscribe)
        } else if request.method == Method::Unsubscribe {
            ("uri", Self::Unsubscribe)
        } else {
            return None;
        };
        request.param(name).map(make)
    }
}

/// One call in flight, driven by whoever waits for it.
pub(crate) struct Driver {
    engine: Arc<Engine>,
    live: Arc<Live>,
    original: Bytes,
    setting: Option<Setting>,
    progress: f64,
    stage: Stage,
    flight: Flight,
}

/// What a call brings.
pub(crate) enum Step {
    /// A notification or request of the server, as the client is to see it.
    Message(Bytes),
    /// The response, as the client is to see it. Nothing follows.
    Response(Bytes),
}

impl Driver {
    /// The next thing that the call brings. Cancel-safe.
    pub(crate) async fn step(&mut self) -> Step {
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
                    if let Some(message) = self.message(&message) {
                        return Step::Message(message);
                    }
                }
                Ok(Incoming::Response(answer)) => return Step::Response(self.land(&answer)),
                Err(failure) => {
                    self.stage = Stage::Landed;
                    tracing::debug!(session = %self.live.key.session_ref(), failure = %failure, "call failed");
                    let refusal = failed(&failure, &self.live.server);
                    return Step::Response(refusal_message(&self.original, &refusal));
                }
            }
        }
    }

    /// Runs the call to its end on `stream`, and keeps that for a while for a client that comes back.
    async fn pump(self, stream: Arc<Stream>) {
        let live = Arc::clone(&self.live);
        let answer = self.deliver(&stream).await;
        stream.finish(answer);
        linger(&live, &stream).await;
    }

    /// Runs the call to its end, its messages going to `stream`. What comes back is its response.
    async fn deliver(mut self, stream: &Stream) -> Bytes {
        let live = Arc::clone(&self.live);
        let bounded = tokio::time::timeout(CALL_MAX, async {
            loop {
                tokio::select! {
                    step = self.step() => match step {
                        Step::Message(message) => stream.push(message),
                        Step::Response(answer) => return answer,
                    },
                    () = live.ended.wait() => {
                        let refusal = Refused::new(Code::SessionClosed, "the session ended before the call did");
                        return refusal_message(&self.original, &refusal);
                    }
                }
            }
        });
        let answer = bounded.await.unwrap_or_else(|_| self.too_slow());
        self.engine.hint(live.touch(self.engine.now(), &self.engine.settings.terms));
        answer
    }

    /// Runs the call to its end for nobody: its client went away before it had a stream to come back to.
    pub(crate) async fn run_out(mut self) {
        let live = Arc::clone(&self.live);
        let _ = tokio::time::timeout(CALL_MAX, async {
            loop {
                tokio::select! {
                    step = self.step() => if matches!(step, Step::Response(_)) { return },
                    () = live.ended.wait() => return,
                }
            }
        })
        .await;
    }

    /// The response as the client sees it.
    fn land(&mut self, answer: &Bytes) -> Bytes {
        self.stage = Stage::Landed;
        let Ok(envelope) = scan(answer) else {
            let text =
                format!("server `{}` answered with something that is no JSON-RPC response", self.live.server.name);
            return refusal_message(&self.original, &Refused::new(Code::OutcomeUnknown, text));
        };
        if envelope.kind == Kind::Result {
            match self.setting.take() {
                None => {}
                Some(Setting::Level(level)) => self.live.link.remember_level(level),
                Some(Setting::Subscribe(uri)) => self.live.link.remember_subscription(uri),
                Some(Setting::Unsubscribe(uri)) => self.live.link.forget_subscription(&uri),
            }
        }
        let notice = self.live.take_notice();
        rewrite::to_client(answer, &envelope, &self.original, notice.as_deref())
    }

    /// A message of the server that belongs to this call, as the client sees it; `None` if it is not for the client.
    fn message(&mut self, message: &Bytes) -> Option<Bytes> {
        let envelope = scan(message).ok()?;
        let method = envelope.method_name(message).map(|name| Method::of(&name))?;
        if method == Method::Progress && envelope.kind == Kind::Notification {
            let progress = progress_value(message, &envelope);
            if progress.is_some_and(|progress| progress <= self.progress) {
                return None;
            }
            self.progress = progress.unwrap_or(self.progress);
        }
        self.engine.server_message(&self.live, message, &envelope)
    }

    fn too_slow(&self) -> Bytes {
        let mut refusal = Refused::new(Code::OutcomeUnknown, "the server did not answer in time");
        refusal.server = Some(self.live.server.name.clone());
        refusal_message(&self.original, &refusal)
    }
}

/// A call whose client waits for it. If the client goes away the call runs on by itself.
struct Carried(Option<Driver>);

impl Carried {
    async fn step(&mut self) -> Step {
        match &mut self.0 {
            Some(driver) => driver.step().await,
            None => std::future::pending().await,
        }
    }

    /// The response of a call that is never a stream; what comes before it goes to the listening stream (R1).
    async fn plain_response(&mut self) -> Step {
        loop {
            match self.step().await {
                Step::Message(message) => {
                    if let Some(driver) = &self.0 {
                        driver.live.listen.push(message);
                    }
                }
                Step::Response(answer) => return Step::Response(answer),
            }
        }
    }

    fn too_slow(&mut self) -> Bytes {
        self.0.as_ref().map(Driver::too_slow).unwrap_or_default()
    }
}

impl Drop for Carried {
    fn drop(&mut self) {
        if let Some(driver) = self.0.take() {
            spawn(driver.run_out());
        }
    }
}

/// Keeps a finished stream for a while for a client that comes back.
async fn linger(live: &Live, stream: &Stream) {
    tokio::time::sleep(STREAM_LINGER).await;
    live.let_go(stream.id());
}

fn streams_crowded() -> Refused {
    Refused::new(Code::LimitReached, "the limit `streams_max` of this session is reached")
}

/// The number in a progress notification.
fn progress_value(message: &[u8], envelope: &Envelope) -> Option<f64> {
    let span = member(message, envelope.params.as_ref()?, "progress")?;
    std::str::from_utf8(&message[span]).ok()?.parse().ok()
}

/// What a failure to reach the server is to the client.
pub(crate) fn failed(failure: &Failure, server: &Server) -> Refused {
    let code = match failure {
        Failure::OutcomeUnknown { .. } => Code::OutcomeUnknown,
        Failure::Unreachable { .. } => Code::ServerUnreachable,
        Failure::Unauthorized { .. } => Code::AuthenticationNeeded,
        Failure::Rejected { .. } | Failure::Configuration { .. } => Code::ServerRejected,
        Failure::LostAgain { .. } => Code::UpstreamLostAgain,
        Failure::ChildExited { .. } => Code::ChildExited,
        Failure::Oversize { .. } => Code::AnswerTooLarge,
        Failure::Protocol { .. } => Code::OutcomeUnknown,
        Failure::Ended { .. } => Code::SessionClosed,
    };
    Refused { code, text: failure.to_string(), server: Some(server.name.clone()) }
}

/// A refusal as a JSON-RPC error under the request's own id (S13a); `error.data.mainstay` names the code.
pub fn refusal_message(id: &[u8], refusal: &Refused) -> Bytes {
    let mut data = format!("{{\"mainstay\":\"{}\"", refusal.code.name()).into_bytes();
    if let Some(server) = &refusal.server {
        data.extend_from_slice(b",\"server\":");
        data.extend_from_slice(&escape(server.as_str()));
    }
    data.push(b'}');
    let id = (!id.is_empty()).then_some(id);
    error_message(id, refusal.code.json_rpc(), &refusal.text, Some(&data)).into()
}

/// The longest that a call may take.
const CALL_MAX: Duration = Duration::from_hours(24);
/// How long a finished stream is kept for a client that comes back.
const STREAM_LINGER: Duration = Duration::from_mins(1);
