//! One request of a modern client on its way through a conversation, and what comes back for it in the words of its era.
//!
//! Many clients and requests share a conversation, so each request goes under an id of the gateway's making. A client that
//! closes its response cancels its request (2026-07-28, Streamable HTTP, Cancellation): so does dropping a course.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;
use mainstay_core::call::RoutedId;
use mainstay_core::code::Code;
use mainstay_core::wire::envelope::request_message;
use mainstay_core::wire::envelope::{Envelope, Kind, error_message, escape, member, scan, unescape};
use mainstay_core::wire::method::Method;
use mainstay_core::wire::modern::asking::{self, InputRequest};
use mainstay_core::wire::modern::{Meta, crossing};

use super::passage::Passage;
use super::rounds::{Gathered, Held, Pending, Sealer, key_of, server_info};
use super::task::Offer;
use crate::engine::call::{Reply, Request, refusal_data};
use crate::engine::live::{Entry, Live};
use crate::engine::modern::GATEWAY_ERROR;
use crate::engine::stream::Message;
use crate::engine::{Caller, Engine, Reading, Refused, Served};

/// What a request brings.
#[derive(Debug, PartialEq, Eq)]
pub enum Turn {
    /// A notification that belongs to it.
    Notification(Bytes),
    /// Its response. Nothing follows.
    Response(Landed),
}

/// The response to a request, as its client gets it.
#[derive(Debug, PartialEq, Eq)]
pub struct Landed {
    /// The HTTP status that the revision wants, if nothing was sent before.
    pub status: u16,
    /// The message.
    pub message: Bytes,
    /// Why there is no answer of the server, if that is what the message says.
    pub refusal: Option<Code>,
}

/// What is known of a request and its client.
pub(super) struct Asker {
    /// The client's own raw id.
    id: Bytes,
    method: Method,
    /// The method as the client wrote it.
    called: Box<str>,
    /// The raw progress token that it chose.
    token: Option<Bytes>,
    /// The least severe log messages that it wants.
    severity: Option<usize>,
    /// What the client declares that it can do: raw JSON.
    capabilities: Bytes,
    sealer: Sealer,
    /// Whether the request may be answered by a task, and when.
    pub(super) offer: Option<Offer>,
}

impl Asker {
    pub(super) fn of(caller: &Caller, served: &Served, request: &Request, meta: &Meta) -> Self {
        let message = &request.message;
        let level = meta.log_level.clone().and_then(|span| unescape(&message[span]));
        Self {
            id: request.id(),
            method: request.method,
            called: request.envelope.method_name(message).unwrap_or_default().into(),
            token: meta.progress_token.clone().map(|span| message.slice(span)),
            severity: level.and_then(|level| crossing::severity(&level)),
            capabilities: crossing::capabilities(message, meta).into(),
            sealer: Sealer::of(caller, served, request),
            offer: Offer::of(caller, served, request, meta),
        }
    }

    /// The client's own raw id.
    pub(super) fn id(&self) -> &Bytes {
        &self.id
    }
}

/// A request under way. Dropped before its response has come, it cancels the request at the server.
pub struct Course {
    pub(super) asker: Asker,
    /// What the server calls itself: raw JSON.
    pub(super) server_info: Option<Bytes>,
    /// The response, if it came at once.
    whole: Option<Bytes>,
    pub(super) passage: Passage,
    pub(super) gathered: Option<Gathered>,
    /// The client waits: that is use of the session.
    _reading: Reading,
}

/// What comes by a call.
enum Came {
    Message(u64, Bytes),
    /// Nothing more that would be asked in the same breath, or nothing for too long.
    Nothing,
    End,
}

impl Course {
    pub(super) fn new(engine: &Arc<Engine>, asker: Asker, passage: Passage, whole: Option<Bytes>) -> Self {
        let server_info = server_info(engine, &passage.live);
        let reading = engine.reading(&passage.live);
        Self { asker, server_info, whole, passage, gathered: None, _reading: reading }
    }

    /// The next thing that the request brings. Cancel-safe.
    pub async fn next(&mut self) -> Turn {
        loop {
            let (place, message) = match self.incoming().await {
                Came::Message(place, message) => (place, message),
                Came::Nothing => {
                    if let Some(task) = self.become_task().await {
                        return Turn::Response(task);
                    }
                    if self.gathered.is_some() {
                        return Turn::Response(self.come_back_later());
                    }
                    continue;
                }
                Came::End => {
                    self.passage.is_open = false;
                    return Turn::Response(self.lost());
                }
            };
            let Ok(envelope) = scan(&message) else { continue };
            match envelope.kind {
                Kind::Result | Kind::Error => {
                    self.passage.is_open = false;
                    return Turn::Response(self.land(&message, &envelope));
                }
                Kind::Notification => {
                    if let Some(message) = self.notification(&message, &envelope) {
                        return Turn::Notification(message);
                    }
                }
                Kind::Request => self.question(place, &message, &envelope),
            }
        }
    }

    /// Ends the response at the end of this worker, although its call goes on: a client whose request may take several
    /// rounds comes back for it to the next one, any other is told `refused`. Nothing is cancelled at the server.
    pub fn leave(&mut self, refused: &Refused) -> Landed {
        if asking::may_ask(self.asker.method) && self.passage.reader.is_some() {
            return self.come_back_later();
        }
        self.passage.is_open = false;
        refusal(&self.asker.id, refused)
    }

    /// The conversation that it is part of.
    pub fn live(&self) -> &Arc<Live> {
        &self.passage.live
    }

    async fn incoming(&mut self) -> Came {
        if let Some(whole) = self.whole.take() {
            return Came::Message(0, whole);
        }
        let Some(reader) = self.passage.reader.as_mut() else { return Came::End };
        let gathered = self.gathered.as_ref().map(|gathered| gathered.until);
        let due = self.asker.offer.as_ref().map(|offer| offer.due);
        let next = match gathered.into_iter().chain(due).min() {
            None => reader.next_message().await,
            Some(until) => match tokio::time::timeout_at(until, reader.next_message()).await {
                Ok(next) => next,
                Err(_elapsed) => return Came::Nothing,
            },
        };
        let Some((place, message)) = next else { return Came::End };
        self.passage.after = place;
        Came::Message(place, message)
    }

    /// A question of the server: what its client is asked, or, if it can't be, is answered in its place.
    fn question(&mut self, place: u64, message: &Bytes, envelope: &Envelope) {
        let id = envelope.id.clone().and_then(|span| RoutedId::decode(&message[span]));
        let Some(id) = id.filter(|id| !self.passage.answered.contains(&id.stream)) else { return };
        let gathered = self.gathered.get_or_insert_with(Gathered::new);
        let request = InputRequest::of(message, envelope).filter(|request| {
            asking::may_ask(self.asker.method)
                && request.suits(&self.asker.capabilities)
                && gathered.questions.len() < QUESTIONS_MAX
        });
        match request {
            Some(request) => gathered.questions.push(Pending { id, place, request }),
            None => {
                self.passage.decline(message, envelope);
                self.gathered = self.gathered.take().filter(|gathered| !gathered.questions.is_empty());
            }
        }
    }

    /// The response that sends the client back with answers to what was gathered, or with nothing but the state. The call
    /// waits.
    fn come_back_later(&mut self) -> Landed {
        let questions = self.gathered.take().map(|gathered| gathered.questions).unwrap_or_default();
        let held = Held::Parked(self.passage.park(&questions));
        let requests: Vec<_> = questions.into_iter().map(|asked| (key_of(asked.id.stream), asked.request)).collect();
        self.input_required(&requests, &held)
    }

    fn input_required(&self, requests: &[(String, InputRequest)], held: &Held) -> Landed {
        let state = self.asker.sealer.seal(&self.passage.engine, held);
        let message = asking::response(&self.asker.id, requests, &state, self.server_info.as_deref());
        Landed { status: OK, message: message.into(), refusal: None }
    }

    /// A notification on the request's own stream, as its client sees it; `None` if it does not belong there.
    fn notification(&self, message: &Bytes, envelope: &Envelope) -> Option<Bytes> {
        let method = envelope.method_name(message)?;
        if &*method == LOG_MESSAGE {
            let severity = crossing::severity(&crossing::level(message, envelope)?)?;
            return self.asker.severity.filter(|wanted| severity >= *wanted).map(|_| message.clone());
        }
        let method = Method::of(&method);
        if method == Method::Progress {
            return Some(crossing::progress(message, envelope, self.asker.token.as_ref()?)?.into());
        }
        if method != Method::Cancelled {
            // It is about the server and not about this request (R7).
            self.passage.live.listen.push(Message::passing(message.clone()));
        }
        None
    }

    fn land(&self, message: &Bytes, envelope: &Envelope) -> Landed {
        let (id, method) = (&self.asker.id, &*self.asker.called);
        if let Some((code, message)) = own_refusal(message, envelope, id) {
            return Landed { status: OK, message, refusal: Some(code) };
        }
        if let Some(visits) = InputRequest::visits(message, envelope) {
            return self.visit_first(visits);
        }
        let crossed = crossing::response(message, envelope, id, method, self.server_info.as_deref());
        Landed { status: crossed.status, message: crossed.message.into(), refusal: None }
    }

    /// The server has refused the request until its client has visited addresses: it is asked to, and sends it again.
    fn visit_first(&self, visits: Vec<InputRequest>) -> Landed {
        let able = visits.iter().all(|visit| visit.suits(&self.asker.capabilities));
        if !able || !asking::may_ask(self.asker.method) || visits.len() > QUESTIONS_MAX {
            let text = "the server wants its user to visit addresses first, and this client can't be asked to";
            let server = Some(self.passage.live.server.name.clone());
            return refusal(&self.asker.id, &Refused { server, ..Refused::new(Code::ServerRejected, text) });
        }
        let requests: Vec<_> =
            visits.into_iter().enumerate().map(|(place, visit)| (format!("v{place}"), visit)).collect();
        self.input_required(&requests, &Held::Anew)
    }

    /// What is said of a request whose stream has ended without a response.
    fn lost(&self) -> Landed {
        let server = &self.passage.live.server.name;
        let text = format!("the call ended without an answer; whether server `{server}` executed it is unknown");
        let refused = Refused { server: Some(server.clone()), ..Refused::new(Code::OutcomeUnknown, text) };
        refusal(&self.asker.id, &refused)
    }
}

impl Engine {
    /// Sends the modern `request` on its way through a conversation.
    ///
    /// Dropping the future cancels the request at the server.
    ///
    /// # Errors
    /// As [`request`](Self::request). Whatever becomes of the call itself comes by the course.
    pub async fn travel(
        self: &Arc<Self>,
        (caller, served): (&Caller, &Served),
        entry: &Entry,
        (request, meta): (&Request, &Meta),
    ) -> Result<Course, Refused> {
        let asker = Asker::of(caller, served, request, meta);
        let id = self.own_id();
        let message = Bytes::from(crossing::request(&request.message, &request.envelope, &id));
        let scanned = scan(&message).map_err(|_| Refused::new(Code::Internal, "the request can't be passed on"))?;
        if let Some(severity) = asker.severity {
            self.want_level(entry, severity, &level_of(request, meta)).await;
        }
        let mut passage = Passage::new(self, entry, id);
        let sent = Request { message, envelope: scanned, method: request.method };
        let whole = match self.request(entry, sent).await {
            Ok(Reply::Json(whole)) => Some(whole),
            Ok(Reply::Stream(reader)) => {
                passage = passage.reading(reader, 0, BTreeSet::new());
                None
            }
            Err(refused) => {
                passage.is_open = false;
                return Err(refused);
            }
        };
        Ok(Course::new(self, asker, passage, whole))
    }

    /// A raw id that no other request of any session has.
    pub(super) fn own_id(&self) -> Bytes {
        format!("\"c{}\"", self.next_streams(1)).into()
    }

    /// Sees to it that the server tells what is as severe as that, if it has a log at all.
    async fn want_level(self: &Arc<Self>, live: &Arc<Live>, severity: usize, level: &str) {
        let Some(record) = live.link.record() else { return };
        let said = &record.initialize_result;
        let has_log = member(said, &(0..said.len()), "capabilities").and_then(|all| member(said, &all, "logging"));
        let told = record.log_level.as_deref().and_then(crossing::severity);
        if has_log.is_none() || told.is_some_and(|told| told <= severity) {
            return;
        }
        let params = [b"{\"level\":".as_slice(), &escape(level), b"}"].concat();
        let message = Bytes::from(request_message(&self.own_id(), Method::SetLevel.as_str(), Some(&params)));
        let Ok(envelope) = scan(&message) else { return };
        // Without it the server says what it says.
        let _ = self.request(live, Request { message, envelope, method: Method::SetLevel }).await;
    }
}

/// What a client is told whose request is refused: under an own number, since those of the revision are not the gateway's
/// to use.
pub(crate) fn refusal(id: &[u8], refused: &Refused) -> Landed {
    let id = (!id.is_empty()).then_some(id);
    let message = error_message(id, GATEWAY_ERROR, &refused.text, Some(&refusal_data(refused)));
    Landed { status: OK, message: message.into(), refusal: Some(refused.code) }
}

/// The gateway's own refusal of a call, as a modern client is told it under `id`; `None` if it is the server's answer.
pub(super) fn own_refusal(message: &Bytes, envelope: &Envelope, id: &[u8]) -> Option<(Code, Bytes)> {
    let error = envelope.error.as_ref()?;
    let data = member(message, error, "data")?;
    let name = member(message, &data, "mainstay").and_then(|span| unescape(&message[span]))?;
    let code = Code::ALL.into_iter().find(|code| code.name() == name)?;
    let text = member(message, error, "message").and_then(|span| unescape(&message[span])).unwrap_or_default();
    Some((code, error_message(Some(id), GATEWAY_ERROR, &text, Some(&message[data])).into()))
}

fn level_of(request: &Request, meta: &Meta) -> Box<str> {
    let level = meta.log_level.clone().and_then(|span| unescape(&request.message[span]));
    level.unwrap_or_default().into()
}

const LOG_MESSAGE: &str = "notifications/message";
const OK: u16 = 200;
/// Questions in one response.
const QUESTIONS_MAX: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::call::refusal_message;

    #[test]
    fn e3_a_refusal_of_the_gateway_is_told_under_its_own_number() {
        let refused = Refused::new(Code::ChildExited, "it is \"gone\"");
        let told = refusal_message(b"\"c1.2\"", &refused);
        let envelope = scan(&told).expect("a message");
        let (code, message) = own_refusal(&told, &envelope, b"7").expect("a refusal");
        assert_eq!(code, Code::ChildExited);
        assert_eq!(message, refusal(b"7", &refused).message);
        let of_server = Bytes::from_static(br#"{"jsonrpc":"2.0","id":1,"error":{"code":-1,"message":"","data":{}}}"#);
        assert_eq!(own_refusal(&of_server, &scan(&of_server).expect("a message"), b"7"), None);
    }
}
