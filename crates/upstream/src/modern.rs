//! The way of a modern client's request to a modern server (2026-07-28): as it is.
//!
//! Neither side keeps anything between requests, so there is no link and nothing to recover. Over HTTP one [`Stateless`]
//! request goes out with the headers that its body asks for and those that are configured; what comes back is passed on byte
//! by byte, with its status. A program gets it at the process that all clients share, where ids and progress tokens are the
//! gateway's. Dropping what is under way closes the request at the server, which is how that is cancelled.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use http::HeaderMap;
use mainstay_core::wire::envelope::{self, Kind};
use mainstay_core::wire::method::Method;
use mainstay_core::wire::modern;

use crate::bridge::{Dressed, Fault, post};
use crate::child::{Exchange, Manner, Sharing};
use crate::dialect;
use crate::era::error_code;
use crate::failure::{Blame, Failure};
use crate::feed::{Feed, FeedEnd};
use crate::http::{Content, Reply, Tries, Unread};
use crate::server::Server;
use crate::upstreams::{Destination, Upstreams};
use crate::wire::{self, same_id};

/// A request, or a notification, that says for itself all that the server must know.
pub struct Stateless {
    /// The message. It goes out as it is.
    pub message: Bytes,
    /// What it asks for.
    pub method: Method,
    /// Headers of annotated tool parameters, as the client has them: the server checks them against the body.
    pub params: HeaderMap,
    /// Whether the answer is a stream that may last for days (`subscriptions/listen`).
    pub listens: bool,
}

/// What a server answered.
#[derive(Debug)]
pub enum Forwarded {
    /// It took the message, and has nothing to say to it.
    Accepted,
    /// The JSON-RPC answer, and the HTTP status that it came with.
    Whole(u16, Bytes),
    /// Messages as they come, the answer last.
    Events(Relay),
}

/// A message of an answer's stream.
#[derive(Debug, PartialEq, Eq)]
pub enum Relayed {
    /// A notification that belongs to the request.
    Notification(Bytes),
    /// The answer. Nothing comes after it.
    Answer(Bytes),
}

impl Upstreams {
    /// Sends `request` to `server` until there is an answer: once, and again only where nothing can have been carried out
    /// twice. Waits for a server that is down as long as its patience lasts. Dropping the future cancels the request.
    ///
    /// # Errors
    /// Why there is no answer. A JSON-RPC error of the server, whatever its HTTP status, is one.
    pub async fn forward(self: &Arc<Self>, server: &Arc<Server>, request: &Stateless) -> Result<Forwarded, Failure> {
        let destination = self.destination(server);
        if !server.is_http() {
            return self.forward_to_child(&destination, request).await;
        }
        let outcome = Sending { upstreams: self, destination: &destination, request }.send().await;
        destination.contacts.note(self.now(), &outcome);
        outcome
    }

    /// The same at the process that all clients of a program share.
    async fn forward_to_child(
        self: &Arc<Self>,
        destination: &Arc<Destination>,
        request: &Stateless,
    ) -> Result<Forwarded, Failure> {
        let scanned = envelope::scan(&request.message).ok();
        let Some(id) = scanned.and_then(|scanned| scanned.id).map(|span| request.message.slice(span)) else {
            tracing::debug!(server = %destination.server.name, "a notification that no modern server knows; dropped");
            return Ok(Forwarded::Accepted);
        };
        let manner = Manner { listens: request.listens, may_repeat: is_safe(request, &destination.server) };
        let sharing = Sharing::new(self, destination);
        let exchange = Exchange::begin(sharing, &request.message, manner).await?;
        let mut relay = Relay::new(self, &destination.server, (id, Feed::Child(Box::new(exchange))));
        match relay.next().await? {
            Relayed::Answer(answer) => Ok(Forwarded::Whole(status_of(&answer), answer)),
            first @ Relayed::Notification(_) => Ok(Forwarded::Events(Relay { first: Some(first), ..relay })),
        }
    }
}

/// The HTTP status of an answer that came without one (2026-07-28, Streamable HTTP, Error Codes).
fn status_of(answer: &[u8]) -> u16 {
    match envelope::scan(answer).ok().and_then(|scanned| error_code(answer, &scanned.error?)) {
        Some(modern::METHOD_NOT_FOUND) => 404,
        Some(code) if modern::is_proof(code) => 400,
        Some(_) | None => 200,
    }
}

/// Whether `request` may be carried out twice by `server` (U5).
fn is_safe(request: &Stateless, server: &Server) -> bool {
    if request.method.is_safe() || request.listens {
        return true;
    }
    if request.method != Method::ToolsCall {
        return false;
    }
    let message = &*request.message;
    let name = envelope::scan(message).ok().and_then(|scanned| {
        let params = scanned.params?;
        let name = envelope::member(message, &params, "name")?;
        envelope::unescape(&message[name])
    });
    name.is_some_and(|name| server.safe_tools.iter().any(|safe| **safe == *name))
}

/// One request on its way.
struct Sending<'a> {
    upstreams: &'a Arc<Upstreams>,
    destination: &'a Arc<Destination>,
    request: &'a Stateless,
}

/// Why an attempt has no answer.
enum Trouble {
    /// The server has not seen the request, or has not begun with it.
    NotExecuted(Box<str>),
    /// It may have been carried out.
    Ambiguous(Box<str>),
    Unauthorized,
    Failed(Failure),
}

impl Sending<'_> {
    async fn send(&self) -> Result<Forwarded, Failure> {
        let dressed = Dressed::as_it_is(self.request.message.clone(), &self.request.params);
        let mut tries = Tries::default();
        loop {
            match self.attempt(&dressed).await {
                Ok(forwarded) => return Ok(forwarded),
                Err(trouble) => self.try_again(trouble, &mut tries).await?,
            }
        }
    }

    /// Waits until the request may be sent once more after `trouble`, or tells what became of it.
    async fn try_again(&self, trouble: Trouble, tries: &mut Tries) -> Result<(), Failure> {
        let server = &self.destination.server;
        match trouble {
            Trouble::NotExecuted(cause) => match tries.wait(server.patience).await {
                true => Ok(()),
                false => Err(server.unreachable(cause)),
            },
            Trouble::Ambiguous(cause) => match is_safe(self.request, server) && tries.spend_repetition() {
                true => {
                    Upstreams::count(&self.upstreams.counters.repeated);
                    Ok(())
                }
                false => Err(server.unknown_in(self.upstreams, cause)),
            },
            Trouble::Unauthorized => {
                if !tries.spend_refresh() || !self.destination.refresh(&*self.upstreams.parts.environment)? {
                    return Err(server.unauthorized());
                }
                Ok(())
            }
            Trouble::Failed(failure) => Err(failure),
        }
    }

    async fn attempt(&self, dressed: &Dressed) -> Result<Forwarded, Trouble> {
        let reply = post(self.upstreams, self.destination, dressed).await.map_err(|fault| match fault {
            Fault::NeverSent(cause) => Trouble::NotExecuted(cause),
            Fault::Lost(cause) => Trouble::Ambiguous(cause),
            Fault::Failed(failure) => Trouble::Failed(failure),
        })?;
        let id = envelope::scan(&self.request.message).ok().and_then(|scanned| scanned.id);
        let id = id.map(|span| self.request.message.slice(span));
        if !reply.status().is_success() {
            return self.refused(reply, id.as_deref()).await;
        }
        let Some(id) = id else { return Ok(Forwarded::Accepted) };
        let bytes_max = self.destination.server.message_bytes_max;
        match reply.content() {
            Content::Events => {
                let reply = if self.request.listens { reply.without_place() } else { reply };
                let feed = Feed::Http(reply.events(bytes_max));
                Ok(Forwarded::Events(Relay::new(self.upstreams, &self.destination.server, (id, feed))))
            }
            Content::Json => self.read_answer(reply, &id).await,
            Content::Other => Err(self.protocol("it answered a request with neither JSON nor an event stream")),
        }
    }

    async fn read_answer(&self, reply: Reply, id: &[u8]) -> Result<Forwarded, Trouble> {
        let server = &self.destination.server;
        let (status, bytes_max) = (reply.status().as_u16(), server.message_bytes_max);
        let body = reply.collect(bytes_max).await.map_err(|unread| match unread {
            Unread::Oversize => Trouble::Failed(server.oversize()),
            Unread::Broken(cause) => Trouble::Ambiguous(cause),
        })?;
        match answer_to(&body, id) {
            Some(answer) => Ok(Forwarded::Whole(status, answer)),
            None => Err(self.protocol("its answer is no JSON-RPC answer to the request")),
        }
    }

    /// What a response with another status than 2xx comes to. Credentials are the gateway's own affair, so nothing of a
    /// challenge is passed on.
    async fn refused(&self, reply: Reply, id: Option<&[u8]>) -> Result<Forwarded, Trouble> {
        let (status, _, body) = reply.read_refusal().await;
        let cause = || format!("HTTP status {status}").into_boxed_str();
        if status == 401 {
            return Err(Trouble::Unauthorized);
        }
        if matches!(status, 429 | 503) {
            // Whoever limits rates, or is not there, has not begun with the request.
            return Err(Trouble::NotExecuted(cause()));
        }
        if !is_modern(status, &body) {
            self.destination.eras.forget_verdict();
        }
        match id.and_then(|id| answer_to(&body, id)) {
            Some(answer) => Ok(Forwarded::Whole(status, answer)),
            None if status >= 500 => Err(Trouble::Ambiguous(cause())),
            None => Err(Trouble::Failed(self.destination.server.rejected_with(status))),
        }
    }

    fn protocol(&self, problem: &str) -> Trouble {
        Trouble::Failed(self.destination.server.protocol(problem))
    }
}

/// The messages of an answer's stream. Dropping it closes the request at the server.
pub struct Relay {
    upstreams: Arc<Upstreams>,
    server: Arc<Server>,
    id: Bytes,
    first: Option<Relayed>,
    feed: Option<Feed>,
}

impl Relay {
    fn new(upstreams: &Arc<Upstreams>, server: &Arc<Server>, (id, feed): (Bytes, Feed)) -> Self {
        let (upstreams, server) = (Arc::clone(upstreams), Arc::clone(server));
        Self { upstreams, server, id, first: None, feed: Some(feed) }
    }

    /// The next message. Cancel-safe. Requests of the server are passed over: a modern one must not send any here
    /// (2026-07-28, Streamable HTTP, Receiving Messages).
    ///
    /// # Errors
    /// [`Failure::OutcomeUnknown`] if the stream ended before the answer, [`Failure::Oversize`] if a message is too large.
    pub async fn next(&mut self) -> Result<Relayed, Failure> {
        if let Some(first) = self.first.take() {
            return Ok(first);
        }
        loop {
            let Some(feed) = &mut self.feed else { return Err(self.server.over()) };
            let message = match feed.next().await {
                Ok(message) => message,
                Err(end) => {
                    self.feed = None;
                    return Err(match end {
                        FeedEnd::Broken(cause) => self.server.unknown_in(&self.upstreams, cause),
                        FeedEnd::Oversize => self.server.oversize(),
                        FeedEnd::Failed(failure) => failure,
                    });
                }
            };
            match envelope::scan(&message).map(|scanned| scanned.kind) {
                Ok(Kind::Notification) => return Ok(Relayed::Notification(message)),
                Ok(Kind::Result | Kind::Error) => {
                    let Some(answer) = answer_to(&message, &self.id) else { continue };
                    if let Some(feed) = self.feed.take() {
                        feed.finish();
                    }
                    return Ok(Relayed::Answer(answer));
                }
                Ok(Kind::Request) | Err(_) => {
                    tracing::debug!(server = %self.server.name, "an event of a modern server has no business there; skipped");
                }
            }
        }
    }
}

impl fmt::Debug for Relay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relay").field("server", &self.server.name).finish_non_exhaustive()
    }
}

/// `body` as the answer to the request `id`: as it is, or an error that names no request under that id. `None` if it is no
/// such answer.
fn answer_to(body: &Bytes, id: &[u8]) -> Option<Bytes> {
    let scanned = envelope::scan(body).ok()?;
    match (scanned.kind, wire::id_of(&scanned, body)) {
        (Kind::Result | Kind::Error, Some(found)) if same_id(found, id) => Some(body.clone()),
        (Kind::Error, None) => dialect::answer_with_id(body, id).map(Bytes::from),
        (Kind::Result | Kind::Error | Kind::Request | Kind::Notification, _) => None,
    }
}

/// Whether a refusal is what a modern server may say. Others say that the server is not modern any more, perhaps.
fn is_modern(status: u16, body: &[u8]) -> bool {
    let code = envelope::scan(body).ok().and_then(|scanned| error_code(body, &scanned.error?));
    match (status, code) {
        (400..=499, Some(code)) => modern::is_proof(code) || !matches!(code, -32019..=-32000 | -32600),
        (400 | 404..=406 | 410 | 415 | 422, None) => false,
        (_, _) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e2_an_answer_is_passed_on_as_it_is_and_only_under_its_own_id() {
        let answer = |body: &'static str| answer_to(&Bytes::from_static(body.as_bytes()), b"7");
        let result = r#"{ "jsonrpc":"2.0", "result":{"n":1.0}, "id":7 }"#;
        assert_eq!(answer(result).as_deref(), Some(result.as_bytes()));
        assert_eq!(answer(r#"{"jsonrpc":"2.0","result":{},"id":8}"#), None);
        assert_eq!(answer(r#"{"jsonrpc":"2.0","method":"m","id":7}"#), None);
        let error = answer(r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32020,"message":""}}"#);
        let error = error.expect("an error that names no request is an answer");
        assert_eq!(envelope::scan(&error).expect("a message").id.map(|id| &error[id]), Some(&b"7"[..]));
        assert_eq!(answer("<html>"), None);
    }

    #[test]
    fn e5_refusals_that_no_modern_server_gives_make_it_be_asked_again() {
        let error = |code: i32| format!(r#"{{"jsonrpc":"2.0","id":1,"error":{{"code":{code},"message":""}}}}"#);
        for (status, body, expected) in [
            (400, error(-32020), true),
            (404, error(-32601), true),
            (400, error(-32602), true),
            (400, error(-32000), false),
            (400, String::new(), false),
            (405, String::new(), false),
            (403, String::new(), true),
            (500, error(-32603), true),
        ] {
            assert_eq!(is_modern(status, body.as_bytes()), expected, "{status} {body}");
        }
    }
}
