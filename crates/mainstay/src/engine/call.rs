//! A client's request on its way: answered at once as JSON, or a little later on a stream that can be resumed.
//!
//! A call never hangs on its client: a connection that goes away leaves it running (R8). It ends with the server's
//! answer, with an error that says what is known of its outcome, or with its session.

mod driver;
mod follow;
pub(crate) mod relay;
mod setting;
pub(crate) mod take_up;
mod unclaimed;

use std::sync::Arc;

use bytes::Bytes;
use mainstay_core::call::{RoutedId, StreamId};
use mainstay_core::code::Code;
use mainstay_core::limit::Limit;
use mainstay_core::wire::envelope::{Envelope, error_message, escape, member, result_message, unescape};
use mainstay_core::wire::method::Method;
use mainstay_store::journal::{self, Content, Ending};
use mainstay_upstream::{Call, Failure, Outcome, Server};

pub(crate) use self::driver::linger;
use self::driver::{Carried, Driver, Going, Origin, Stage, Step};
pub(crate) use self::setting::Setting;
use crate::engine::live::{CALL_NAME_CHARS_MAX, InFlight, Live};
use crate::engine::stream::{Message, Reader, Stream};
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
        self.beat.keep();
        let plain = request.method.answered_plain();
        let stream = self.next_streams(1);
        let mut carried = Carried(Some(self.depart(live, request, stream)?));
        let _outstays = live.server.is_http().then(|| self.outstaying.enter());
        let first = if plain {
            tokio::time::timeout(HOLD, carried.plain_response()).await
        } else if self.settings.answer_json_within.is_zero() {
            return self.stream(live, carried, None).map(Reply::Stream);
        } else {
            tokio::time::timeout(self.settings.answer_json_within, carried.first()).await
        };
        match first {
            Ok(Step::Response(landing)) => {
                let answer = carried.0.take().map(|mut driver| {
                    // There was no stream: its client has nothing to come back with.
                    driver.live.link.settle_for_good(stream);
                    driver.address(&landing)
                });
                Ok(Reply::Json(answer.unwrap_or_default()))
            }
            Ok(Step::Message(message)) => self.stream(live, carried, Some(message)).map(Reply::Stream),
            Ok(Step::Reached(_)) => self.stream(live, carried, None).map(Reply::Stream),
            // What is answered plain is safe to give up: it changes nothing, and may be asked again.
            Err(_elapsed) if plain => {
                let answer = carried.0.take().map(|driver| driver.too_slow());
                Ok(Reply::Json(answer.unwrap_or_default()))
            }
            Err(_elapsed) => self.stream(live, carried, None).map(Reply::Stream),
        }
    }

    /// Sends the call on its way, under `stream`.
    fn depart(self: &Arc<Self>, live: &Arc<Live>, request: Request, stream: StreamId) -> Result<Driver, Refused> {
        let (original, since) = (request.id(), self.now());
        let method = request.method;
        let named = Setting::named_by(&request);
        let name = shown(method, named.as_deref());
        let setting = named.clone().filter(|_| Setting::is_changed_by(method));
        let call = InFlight { client_id: original.clone(), stream, method, name, setting, since, is_elsewhere: false };
        let flight = live.take_off(call, self.settings.calls_in_flight_max).map_err(|_| {
            let text = "the limit `session.calls_in_flight_max` is reached; wait until a call of this session ends";
            Refused::at_limit(Code::LimitReached, Limit::CallsInFlight, text)
        })?;
        let routed = RoutedId { stream, original: original.clone() };
        let outgoing = rewrite::to_server(&request.message, &request.envelope, &routed);
        let name = named.clone().filter(|_| method == Method::ToolsCall);
        let call = Call { id: outgoing.id, message: outgoing.message, method, name };
        let link = Arc::clone(&live.link);
        let going: Going = Box::pin(async move { link.call(call).await });
        Ok(Driver {
            engine: Arc::clone(self),
            live: Arc::clone(live),
            original,
            method,
            since,
            setting: Setting::of(method, named.as_deref()),
            named,
            progress: f64::NEG_INFINITY,
            position: None,
            origin: Origin::Here,
            stage: Stage::Going(going),
            flight,
        })
    }

    /// Turns the response of a call into a stream that its client can come back to.
    fn stream(
        self: &Arc<Self>,
        live: &Arc<Live>,
        mut carried: Carried,
        first: Option<Message>,
    ) -> Result<Reader, Refused> {
        let Some(driver) = carried.0.take() else {
            return Err(Refused::new(Code::Internal, "the call is already answered"));
        };
        let journaled = Some(self.journaled(live.key));
        let stream = Stream::new(live.key.tag(), driver.flight.stream(), Some(driver.original.clone()), journaled);
        // There is always room: a session has at least as many places for streams as for calls in flight.
        let _ = live.keep(&stream, self.settings.streams_max);
        stream.note(Content::Call(driver.journal_entry()));
        match (first, &driver.position) {
            (Some(message), _) => stream.push(message),
            (None, Some(position)) => drop(stream.note(Content::Reached(position.clone()))),
            (None, None) => {}
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
        let base = self.next_streams(requests.len() as u64 + 1);
        let ids = batch_ids(&requests);
        let stream = Stream::new(live.key.tag(), base, Some(ids.clone()), Some(self.journaled(live.key)));
        live.keep(&stream, self.settings.streams_max).map_err(|_| streams_crowded())?;
        let server = live.server.name.clone();
        stream.note(Content::Call(journal::Call {
            server,
            method: BATCH.into(),
            name: None,
            request: ids,
            started_at: self.now(),
        }));
        let mut drivers = Vec::with_capacity(requests.len());
        for (request, place) in requests.into_iter().zip(0_u64..) {
            if request.method == Method::Ping {
                stream.push(Message::essential(result_message(&request.id(), &EMPTY_OBJECT)));
                continue;
            }
            let driver = self.depart(live, request, batched(base, place));
            drivers.push(driver.inspect_err(|_| live.let_go(stream.id()))?);
        }
        let reader = stream.read(Some(0), None);
        let live = Arc::clone(live);
        let ids: Vec<_> = drivers.iter().map(Driver::routed).collect();
        spawn(async move {
            let parts = drivers.into_iter().map(|mut driver| {
                let stream = Arc::clone(&stream);
                spawn(async move {
                    if let Some(answer) = driver.carry(&stream, &stream).await {
                        stream.push(answer);
                    }
                    // Over only behind its answer: a worker that gives way goes as soon as no call is left.
                    drop(driver);
                })
            });
            futures_util::future::join_all(parts).await;
            stream.end(Ending::Answered);
            linger(&live, &stream, &ids).await;
        });
        Ok(Reply::Stream(reader))
    }
}

/// What people are shown of what a call names.
fn shown(method: Method, named: Option<&str>) -> Option<Box<str>> {
    let named = named.filter(|_| matches!(method, Method::ToolsCall | Method::PromptsGet))?;
    Some(named.chars().take(CALL_NAME_CHARS_MAX).collect())
}

pub(crate) fn streams_crowded() -> Refused {
    let text = "the limit `session.streams_max` is reached; wait until a call of this session ends";
    Refused::at_limit(Code::LimitReached, Limit::Streams, text)
}

/// The number of the call at `place` in a batch whose stream is `base`.
fn batched(base: StreamId, place: u64) -> StreamId {
    StreamId { number: base.number + 1 + place, ..base }
}

/// The ids of a batch as one raw JSON array, in its order: what the event ids of its stream carry.
fn batch_ids(requests: &[Request]) -> Bytes {
    let ids: Vec<_> = requests.iter().map(Request::id).collect();
    let mut array = vec![b'['];
    array.extend_from_slice(&ids.join(&b","[..]));
    array.push(b']');
    array.into()
}

/// What is said of a call that was sent once, if its answer can't be had.
pub(crate) fn unknown(failure: &Failure, server: &Server) -> Refused {
    let text = format!("{failure}; whether server `{}` executed the call is unknown", server.name);
    Refused { server: Some(server.name.clone()), ..Refused::new(Code::OutcomeUnknown, text) }
}

/// What a failure to reach the server is to the client.
pub(crate) fn failed(failure: &Failure, server: &Server) -> Refused {
    let code = match failure {
        // A handler that crashed answers 5xx, too: it may have done its work before.
        Failure::Rejected { .. } if failure.outcome() == Outcome::Unknown => Code::OutcomeUnknown,
        Failure::OutcomeUnknown { .. } => Code::OutcomeUnknown,
        Failure::Unreachable { .. } | Failure::Parked { .. } => Code::ServerUnreachable,
        // The fault is the gateway's own: nothing is said against the server, and a later try may succeed.
        Failure::Gateway { .. } => Code::Unavailable,
        Failure::Unauthorized { .. } => Code::AuthenticationNeeded,
        Failure::Rejected { .. } | Failure::Configuration { .. } => Code::ServerRejected,
        Failure::LostAgain { .. } | Failure::Left { .. } => Code::UpstreamLostAgain,
        Failure::ChildExited { .. } => Code::ChildExited,
        Failure::Oversize { .. } => Code::AnswerTooLarge,
        Failure::Protocol { .. } => Code::OutcomeUnknown,
        Failure::Ended { .. } => Code::SessionClosed,
    };
    let retry_after = failure.retry_after();
    Refused { server: Some(server.name.clone()), retry_after, ..Refused::new(code, failure.to_string()) }
}

/// A refusal as a JSON-RPC error under the request's own id (S13a); `error.data.mainstay` names the code,
/// `error.data.limit` the setting that is in the way (S12), `error.data.retry_after_ms` when another try makes sense, if
/// that is known.
pub fn refusal_message(id: &[u8], refusal: &Refused) -> Bytes {
    let id = (!id.is_empty()).then_some(id);
    error_message(id, refusal.code.json_rpc(), &refusal.text, Some(&refusal_data(refusal))).into()
}

/// What stands in the `data` of a refusal: raw JSON.
pub(crate) fn refusal_data(refusal: &Refused) -> Vec<u8> {
    let mut data = format!("{{\"mainstay\":\"{}\"", refusal.code.name()).into_bytes();
    if let Some(server) = &refusal.server {
        data.extend_from_slice(b",\"server\":");
        data.extend_from_slice(&escape(server.as_str()));
    }
    if let Some(limit) = refusal.limit {
        data.extend_from_slice(b",\"limit\":");
        data.extend_from_slice(&escape(limit.name()));
    }
    if let Some(after) = refusal.retry_after {
        data.extend_from_slice(format!(",\"retry_after_ms\":{}", after.as_millis()).as_bytes());
    }
    data.push(b'}');
    data
}

/// The method of a call that the journal has under this name.
pub(crate) fn method_of(kept: &str) -> Method {
    if kept == TASK { Method::ToolsCall } else { Method::of(kept) }
}

/// What the journal calls a batch's method.
const BATCH: &str = "batch";
/// What the journal calls the method of a tool's call that was given out as a task.
pub(crate) const TASK: &str = "tools/call, a task";
