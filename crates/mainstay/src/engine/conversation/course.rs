//! One request of a modern client on its way through a conversation, and what comes back for it in the words of its era.
//!
//! Many clients and requests share a conversation, so each request goes under an id of the gateway's making. A client that
//! closes its response cancels its request (2026-07-28, Streamable HTTP, Cancellation): so does dropping a course.

use std::sync::Arc;

use bytes::Bytes;
use mainstay_core::code::Code;
use mainstay_core::wire::envelope::request_message;
use mainstay_core::wire::envelope::{
    Envelope, Kind, error_message, escape, member, notification_message, scan, unescape,
};
use mainstay_core::wire::method::Method;
use mainstay_core::wire::modern::{Meta, crossing};

use mainstay_upstream::Server;

use crate::engine::call::{Reply, Request, refusal_data};
use crate::engine::live::{Entry, Live};
use crate::engine::modern::GATEWAY_ERROR;
use crate::engine::stream::{Message, Reader};
use crate::engine::{Engine, Reading, Refused};
use crate::runtime::spawn;

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
struct Asker {
    /// The client's own raw id.
    id: Bytes,
    method: Box<str>,
    /// The raw progress token that it chose.
    token: Option<Bytes>,
    /// The least severe log messages that it wants.
    severity: Option<usize>,
}

impl Asker {
    fn of(request: &Request, meta: &Meta) -> Self {
        let message = &request.message;
        let level = meta.log_level.clone().and_then(|span| unescape(&message[span]));
        Self {
            id: request.id(),
            method: request.envelope.method_name(message).unwrap_or_default().into(),
            token: meta.progress_token.clone().map(|span| message.slice(span)),
            severity: level.and_then(|level| crossing::severity(&level)),
        }
    }
}

/// A request under way. Dropped before its response has come, it cancels the request at the server.
pub struct Course {
    asker: Asker,
    /// What the server calls itself: raw JSON.
    server_info: Option<Bytes>,
    /// The response, if it came at once.
    whole: Option<Bytes>,
    passage: Passage,
    /// The client waits: that is use of the session.
    _reading: Reading,
}

impl Course {
    /// The next thing that the request brings. Cancel-safe.
    pub async fn next(&mut self) -> Turn {
        loop {
            let Some(message) = self.incoming().await else {
                self.passage.is_open = false;
                return Turn::Response(self.lost());
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
                Kind::Request => self.passage.decline(&message, &envelope),
            }
        }
    }

    /// The server that it is with.
    pub fn server(&self) -> &Server {
        &self.passage.live.server
    }

    /// Gives the request up in the gateway's name: nothing of it is cancelled at the server. What its client is told.
    pub fn leave(&mut self, refused: &Refused) -> Landed {
        self.passage.is_open = false;
        refusal(&self.asker.id, refused)
    }

    async fn incoming(&mut self) -> Option<Bytes> {
        if let Some(whole) = self.whole.take() {
            return Some(whole);
        }
        self.passage.reader.as_mut()?.next_message().await.map(|(_, message)| message)
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
        let (id, method) = (&self.asker.id, &*self.asker.method);
        if let Some((code, message)) = own_refusal(message, envelope, id) {
            return Landed { status: OK, message, refusal: Some(code) };
        }
        let crossed = crossing::response(message, envelope, id, method, self.server_info.as_deref());
        Landed { status: crossed.status, message: crossed.message.into(), refusal: None }
    }

    /// What is said of a request whose stream has ended without a response.
    fn lost(&self) -> Landed {
        let server = &self.passage.live.server.name;
        let text = format!("the call ended without an answer; whether server `{server}` executed it is unknown");
        let refused = Refused { server: Some(server.clone()), ..Refused::new(Code::OutcomeUnknown, text) };
        refusal(&self.asker.id, &refused)
    }
}

/// A call of the conversation, and who sees to it that it ends.
struct Passage {
    engine: Arc<Engine>,
    live: Arc<Live>,
    /// The raw id under which the call runs.
    id: Bytes,
    reader: Option<Reader>,
    /// Whether the response is still to come.
    is_open: bool,
}

impl Passage {
    /// Answers a question of the server that nobody can be asked.
    fn decline(&self, message: &Bytes, envelope: &Envelope) {
        let Some(span) = envelope.id.clone() else { return };
        let text = "this question can't be put to the client";
        let answer = Bytes::from(error_message(Some(&message[span]), Code::Unavailable.json_rpc(), text, None));
        let (engine, live) = (Arc::clone(&self.engine), Arc::clone(&self.live));
        spawn(async move {
            if let Ok(envelope) = scan(&answer) {
                engine.answer(&live, &answer, &envelope).await;
            }
        });
    }
}

impl Drop for Passage {
    fn drop(&mut self) {
        if self.is_open {
            let (engine, live) = (Arc::clone(&self.engine), Arc::clone(&self.live));
            let (id, reader) = (std::mem::take(&mut self.id), self.reader.take());
            spawn(async move { abandon(&engine, &live, &id, reader).await });
        }
    }
}

/// Cancels a call at the server, and reads what still comes of it for nobody.
async fn abandon(engine: &Arc<Engine>, live: &Arc<Live>, id: &[u8], reader: Option<Reader>) {
    let params = [b"{\"requestId\":".as_slice(), id, b"}"].concat();
    let message = Bytes::from(notification_message("notifications/cancelled", Some(&params)));
    if let Ok(envelope) = scan(&message) {
        engine.notification(live, &message, &envelope).await;
    }
    let Some(mut reader) = reader else { return };
    // It ends: with the response, or once the call is given up.
    while reader.next_message().await.is_some() {}
}

impl Engine {
    /// Sends the modern `request` on its way through a conversation.
    ///
    /// Dropping the future cancels the request at the server.
    ///
    /// # Errors
    /// As [`request`](Self::request). Whatever becomes of the call itself comes by the course.
    pub async fn travel(self: &Arc<Self>, entry: &Entry, request: &Request, meta: &Meta) -> Result<Course, Refused> {
        let asker = Asker::of(request, meta);
        let id = self.own_id();
        let message = Bytes::from(crossing::request(&request.message, &request.envelope, &id));
        let scanned = scan(&message).map_err(|_| Refused::new(Code::Internal, "the request can't be passed on"))?;
        let live = Arc::clone(entry);
        if let Some(severity) = asker.severity {
            self.want_level(&live, severity, &level_of(request, meta)).await;
        }
        let mut passage =
            Passage { engine: Arc::clone(self), live: Arc::clone(&live), id, reader: None, is_open: true };
        let sent = Request { message, envelope: scanned, method: request.method };
        let whole = match self.request(&live, sent).await {
            Ok(Reply::Json(whole)) => Some(whole),
            Ok(Reply::Stream(reader)) => {
                passage.reader = Some(reader);
                None
            }
            Err(refused) => {
                passage.is_open = false;
                return Err(refused);
            }
        };
        let info = self.introduced(&live);
        let server_info = info.as_ref().and_then(|said| crossing::server_info(said).map(|info| said.slice_ref(info)));
        Ok(Course { asker, server_info, whole, passage, _reading: self.reading(&live) })
    }

    /// A raw id that no other request of any session has.
    fn own_id(&self) -> Bytes {
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
fn own_refusal(message: &Bytes, envelope: &Envelope, id: &[u8]) -> Option<(Code, Bytes)> {
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
