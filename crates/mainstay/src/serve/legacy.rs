//! Clients of 2024-11-05, `/mcp/{server}/sse`: a GET opens the one stream on which everything comes, and its first event
//! says where messages are POSTed to (HTTP with SSE, 2024-11-05, Transports).
//!
//! That era has no session id: a session is its stream. Here the endpoint carries the id of a session like any other, so
//! it outlives the stream, and a client that comes back without `initialize` gets it again (S18). What comes back with
//! it is told on the next stream: nothing that was confirmed with 202 is lost in silence.
//!
//! The id stands in a URI. It is read from there, and no URI is ever logged (I6).

mod connection;
mod lobby;

use std::net::IpAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{ALLOW, HeaderMap, HeaderValue};
use http::{Method as Verb, Request as HttpRequest, Response, StatusCode, Uri};
use hyper::body::Incoming;
use mainstay_core::call::EventId;
use mainstay_core::code::{Code, TerminalStatus};
use mainstay_core::id::{ServerName, SessionId, SessionKey};
use mainstay_core::wire::envelope::{Kind, escape, member, result_message, splice, unescape};
use mainstay_core::wire::method::{Method, Version};
use tokio::time::Instant;

use self::connection::Connection;
pub use self::lobby::Lobby;
use self::lobby::Standing;
use crate::auth::Denied;
use crate::engine::call::{Request, refusal_message};
use crate::engine::find::Evidence;
use crate::engine::live::Entry;
use crate::engine::open::draw_id;
use crate::engine::stream::Message;
use crate::engine::{Caller, Refused, SESSION_UNKNOWN, Served};
use crate::runtime::spawn;
use crate::serve::mcp::{self, Posted, Unserved};
use crate::serve::reply::{self, Answer};
use crate::serve::{Front, guard};

/// Answers a request of `peer` to the HTTP+SSE endpoint of `server`.
pub async fn serve(front: &Arc<Front>, peer: IpAddr, server: &str, request: HttpRequest<Incoming>) -> Response<Answer> {
    let mut id = Bytes::new();
    let is_post = *request.method() == Verb::POST;
    match answer(front, (peer, server), request, &mut id).await {
        Ok(response) => response,
        Err(Unserved::Denied(denied)) => {
            if denied == Denied::Invalid {
                front.engine.note_unproven(server);
            }
            tracing::debug!(server, reason = ?denied, "request not authenticated");
            reply::denied(denied, (!is_post || !id.is_empty()).then_some(&id))
        }
        Err(Unserved::Refused(refused)) => {
            tracing::debug!(server, code = refused.code.name(), "request refused");
            if let Some(limit) = refused.limit {
                front.engine.metrics.refused(limit);
            }
            let mut response = if is_post && id.is_empty() {
                reply::unaddressed(&refused, front.terminal)
            } else {
                reply::refusal(&refused, &id, front.terminal)
            };
            if refused.code == Code::MethodNotAllowed {
                response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET"));
            }
            response
        }
    }
}

async fn answer(
    front: &Arc<Front>,
    (peer, server): (IpAddr, &str),
    request: HttpRequest<Incoming>,
    id: &mut Bytes,
) -> Result<Response<Answer>, Unserved> {
    let admitted =
        guard::head_fits(&request, front.header_bytes_max).and_then(|()| front.guard.check(request.headers()));
    let proven = match admitted {
        Ok(()) => front.auth.identify(request.headers()).await.map_err(Unserved::Denied),
        Err(refused) => Err(refused.into()),
    };
    let proven = match proven {
        Ok(proven) => proven,
        Err(unserved) => {
            if *request.method() == Verb::POST {
                *id = mcp::strangers_id(request.into_body()).await;
            }
            return Err(unserved);
        }
    };
    let caller = guard::caller(proven, request.headers(), front.require_agent);
    let named = session_id(request.uri());
    match (request.method(), named) {
        (&Verb::POST, Some(named)) => {
            let (head, body) = request.into_parts();
            let body = mcp::read_body(body, front.body_bytes_max).await?;
            let posted = mcp::parse(&body, id);
            let client = Client { caller: caller?, served: front.engine.served(server)? };
            mcp::is_json(&head.headers)?;
            Ok(post(front, peer, &client, named, posted?).await?)
        }
        (&Verb::GET, named) => {
            let client = Client { caller: caller?, served: front.engine.served(server)? };
            Ok(get(front, &client, named, request.headers()).await?)
        }
        // A client of a later era tries this first, and takes 405 for word that it must try the older way.
        _ => Err(Refused::new(Code::MethodNotAllowed, "GET opens the event stream; it says where to POST to").into()),
    }
}

/// Who asks, and which server for.
struct Client<'a> {
    caller: Caller,
    served: &'a Served,
}

impl Client<'_> {
    fn server(&self) -> &ServerName {
        &self.served.server.name
    }
}

/// Opens the event stream: of the session that is named, of the one that its client has come back to, or of none yet.
async fn get(
    front: &Arc<Front>,
    client: &Client<'_>,
    named: Option<SessionId>,
    headers: &HeaderMap,
) -> Result<Response<Answer>, Refused> {
    if headers.contains_key(http::header::ACCEPT) && !mcp::accepts(headers, "text/event-stream") {
        return Err(Refused::new(Code::NotAcceptable, "a GET must accept `text/event-stream`"));
    }
    let cursor = match headers.get("last-event-id") {
        None => None,
        Some(value) => {
            let event = value.to_str().ok().and_then(EventId::parse);
            Some(
                event
                    .ok_or_else(|| Refused::new(Code::EventUnknown, "the `Last-Event-ID` is none of this server's"))?,
            )
        }
    };
    let found = match (&named, &cursor) {
        (Some(id), cursor) => Some(resumed(front, client, id, cursor.as_ref()).await?),
        (None, Some(event)) => Some(come_back(front, client, Evidence { tag: Some(event.tag), version: None }).await?),
        (None, None) => returning(front, client, headers).await,
    };
    let id = named.map_or_else(draw_id, Ok)?;
    let endpoint = endpoint(client.server(), &id, headers);
    let standing = found.as_ref().map_or(Standing::Fresh, |live| Standing::Bound(live.key));
    let key = front.engine.keyring.session_key(&id);
    let seat = front.lobby.seat(key, client.server().clone(), client.caller.clone(), standing)?;
    let whose = (client.caller.clone(), client.server().as_str().to_owned());
    let mut connection = Connection::fresh(front, whose, seat, endpoint);
    if let Some(live) = &found {
        connection = connection.of_session(live, cursor).await?;
    }
    let chunks = futures_util::stream::unfold(connection, |mut connection| async move {
        let chunk = connection.next().await?;
        Some((chunk, connection))
    });
    Ok(reply::streaming(chunks))
}

/// The session of a client that names it. One that was taken back before was told another endpoint than the session's own,
/// which nobody may know any more; an event of the session leads there then.
async fn resumed(
    front: &Arc<Front>,
    client: &Client<'_>,
    id: &SessionId,
    cursor: Option<&EventId>,
) -> Result<Entry, Refused> {
    let key = front.engine.keyring.session_key(id);
    if let Some(Standing::Bound(session)) = front.lobby.standing(key, client.server(), &client.caller) {
        return front.engine.find_key(session, &client.caller, client.served).await;
    }
    match (front.engine.find(id, &client.caller, client.served).await, cursor) {
        (Err(refused), Some(event)) if refused.code == Code::SessionUnknown => {
            come_back(front, client, Evidence { tag: Some(event.tag), version: None }).await
        }
        (found, _) => found,
    }
}

/// The session of a client that shows an event of it.
async fn come_back(front: &Arc<Front>, client: &Client<'_>, evidence: Evidence) -> Result<Entry, Refused> {
    let back = front.engine.taken_back(&client.caller, client.served, evidence).await;
    back.ok_or_else(|| Refused::new(Code::SessionUnknown, SESSION_UNKNOWN))
}

/// The session of a client that opens a stream and has negotiated a version before: it must have lost a stream.
async fn returning(front: &Arc<Front>, client: &Client<'_>, headers: &HeaderMap) -> Option<Entry> {
    let version = headers.get("mcp-protocol-version")?.to_str().ok().and_then(Version::parse)?;
    let evidence = Evidence { tag: None, version: Some(version) };
    front.engine.taken_back(&client.caller, client.served, evidence).await
}

/// Takes what a client POSTed to its endpoint. Whatever it asks is answered on its stream; that it was refused is said
/// there, too, since some clients look at nothing else.
async fn post(
    front: &Arc<Front>,
    peer: IpAddr,
    client: &Client<'_>,
    named: SessionId,
    posted: Posted,
) -> Result<Response<Answer>, Refused> {
    let key = front.engine.keyring.session_key(&named);
    let Posted { messages, batched } = posted;
    if let [only] = messages.as_slice()
        && only.envelope.kind == Kind::Request
        && only.method == Method::Initialize
        && !batched
    {
        mcp::take_opening(front, peer)?;
        let opened = initialize(front, client, (named, key), only).await;
        let say = |message| front.lobby.say(key, client.server(), &client.caller, message);
        return opened.or_else(|refused| confirm_refusal(refused, say, &only.id()));
    }
    let live = match session(front, client, &named, key).await {
        Ok(live) => live,
        Err(refused) => {
            for request in messages.iter().filter(|message| message.envelope.kind == Kind::Request) {
                let message = refusal_message(&request.id(), &refused);
                front.lobby.say(key, client.server(), &client.caller, message);
            }
            return Err(refused);
        }
    };
    if batched && !live.version.allows_batches() {
        let text = format!("batches exist in protocol version 2025-03-26 only; this session speaks {}", live.version);
        return Err(Refused::new(Code::BatchUnsupported, text));
    }
    for message in messages {
        if message.envelope.kind != Kind::Request {
            mcp::one_way(front, &live, &message).await;
            continue;
        }
        let id = message.id();
        let refused = relay(front, &live, message).await;
        if let Err(refused) = refused {
            let listen = Arc::clone(&live.listen);
            return confirm_refusal(refused, |message| listen.push(Message::passing(message)), &id);
        }
    }
    Ok(reply::empty(StatusCode::ACCEPTED))
}

/// Tells a refusal as an event. What has its place in an answer is confirmed like one, the rest is an HTTP status, too.
fn confirm_refusal(refused: Refused, say: impl FnOnce(Bytes), id: &[u8]) -> Result<Response<Answer>, Refused> {
    say(refusal_message(id, &refused));
    if refused.code.http_status(TerminalStatus::Spec) == StatusCode::OK.as_u16() {
        return Ok(reply::empty(StatusCode::ACCEPTED));
    }
    Err(refused)
}

/// Serves a request to its end, whatever becomes of the connection that it came by.
async fn relay(front: &Arc<Front>, live: &Entry, request: Request) -> Result<(), Refused> {
    let (engine, live) = (Arc::clone(&front.engine), Arc::clone(live));
    let relaying = spawn(async move { engine.relay(&live, request).await });
    relaying.await.unwrap_or_else(|_| Err(Refused::new(Code::Internal, "the request failed in the gateway")))
}

/// The live session that an endpoint means. Its client may have lost the stream and opened another, under another
/// endpoint: one without a session is taken for that if it is the only one.
async fn session(
    front: &Arc<Front>,
    client: &Client<'_>,
    named: &SessionId,
    key: SessionKey,
) -> Result<Entry, Refused> {
    let live = match front.lobby.standing(key, client.server(), &client.caller) {
        Some(Standing::Bound(bound)) => front.engine.find_key(bound, &client.caller, client.served).await?,
        Some(Standing::Opening) => {
            return Err(Refused::new(Code::SessionMissing, "`initialize` is not answered yet"));
        }
        Some(Standing::Fresh) => {
            let back = front.engine.taken_back(&client.caller, client.served, Evidence::default()).await;
            let live = back.ok_or_else(|| Refused::new(Code::SessionMissing, "send `initialize` first"))?;
            front.lobby.bind(key, &live, front.engine.reading(&live));
            return Ok(live);
        }
        None => front.engine.find(named, &client.caller, client.served).await?,
    };
    if !live.is_read()
        && let Some(fresh) = front.lobby.only_fresh(client.server(), &client.caller, Instant::now())
    {
        front.lobby.bind(fresh, &live, front.engine.reading(&live));
    }
    Ok(live)
}

/// Opens a session: the first under the id in the endpoint, any later one under an id of its own, which the endpoint then
/// stands for (S13). The opening goes on if the client hangs up.
async fn initialize(
    front: &Arc<Front>,
    client: &Client<'_>,
    (named, key): (SessionId, SessionKey),
    request: &Request,
) -> Result<Response<Answer>, Refused> {
    let params = request.envelope.params.clone().map(|span| request.message.slice(span));
    let params = params.ok_or_else(|| Refused::new(Code::RequestInvalid, "`initialize` needs `params`"))?;
    let before = front.lobby.begin(key, client.server(), &client.caller)?;
    let id = if before == Standing::Fresh { Ok(named) } else { draw_id() };
    let (front, caller) = (Arc::clone(front), client.caller.clone());
    let (name, asked) = (client.server().as_str().to_owned(), request.id());
    let opening = spawn(async move {
        let opened = open(&front, (&caller, &name), id?, in_this_era(params), &asked, key).await;
        if opened.is_err() {
            front.lobby.undo(key, before);
        }
        opened
    });
    opening.await.unwrap_or_else(|_| Err(Refused::new(Code::Internal, "the opening failed in the gateway")))?;
    Ok(reply::empty(StatusCode::ACCEPTED))
}

async fn open(
    front: &Arc<Front>,
    (caller, server): (&Caller, &str),
    id: SessionId,
    params: Bytes,
    asked: &[u8],
    endpoint: SessionKey,
) -> Result<(), Refused> {
    let served = front.engine.served(server)?;
    let welcome = front.engine.open_under(id, caller, served, params).await?;
    let live = front.engine.find(&welcome.id, caller, served).await?;
    live.relay();
    front.lobby.bind(endpoint, &live, front.engine.reading(&live));
    front.engine.say(&live, result_message(asked, &welcome.result).into()).await;
    Ok(())
}

/// The params of `initialize` as they go on: a version that has no sessions is not asked for over this transport.
fn in_this_era(params: Bytes) -> Bytes {
    let Some(span) = member(&params, &(0..params.len()), "protocolVersion") else { return params };
    let offered = unescape(&params[span.clone()]).and_then(|text| Version::parse(&text));
    if offered.is_some() {
        return params;
    }
    splice(&params, &[(span, &escape(Version::V2024_11_05.as_str()))]).into()
}

/// The session id in the query of an endpoint.
fn session_id(uri: &Uri) -> Option<SessionId> {
    let pairs = uri.query()?.split('&').filter_map(|pair| pair.split_once('='));
    let mut named = pairs.filter(|(name, _)| *name == SESSION_PARAM).map(|(_, value)| value);
    SessionId::parse(named.next()?)
}

/// Where the client POSTs to: an absolute path, which every client understands. A proxy that put a prefix before it says
/// so, and none is made up.
fn endpoint(server: &ServerName, id: &SessionId, headers: &HeaderMap) -> Box<str> {
    let prefix = headers.get("x-forwarded-prefix").and_then(|value| value.to_str().ok()).unwrap_or_default();
    let prefix = prefix.strip_suffix('/').unwrap_or(prefix);
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-._~%".contains(&byte);
    let usable = prefix.starts_with('/')
        && !prefix.starts_with("//")
        && prefix.len() <= PREFIX_BYTES_MAX
        && prefix.bytes().all(is_plain);
    let prefix = if usable { prefix } else { "" };
    format!("{prefix}/mcp/{}/sse?{SESSION_PARAM}={}", server.as_str(), id.reveal()).into()
}

/// The parameter of an endpoint that carries the session's id.
const SESSION_PARAM: &str = "sessionId";
const PREFIX_BYTES_MAX: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    fn at(prefix: &str) -> String {
        let mut headers = HeaderMap::new();
        headers.insert("x-forwarded-prefix", prefix.parse().expect("a value"));
        let server = ServerName::parse("files").expect("a name");
        endpoint(&server, &SessionId::parse("abc").expect("an id"), &headers).into()
    }

    #[test]
    fn s18_an_endpoint_is_valid_from_the_clients_side_of_a_proxy() {
        for (prefix, before) in [("/tools", "/tools"), ("/a/b/", "/a/b"), ("", ""), ("/", "")] {
            assert_eq!(at(prefix), format!("{before}/mcp/files/sse?sessionId=abc"), "{prefix:?}");
        }
        for bad in ["//evil.example.com", "https://evil.example.com", "tools", "/a b", "/a?b", "/a#b"] {
            assert_eq!(at(bad), "/mcp/files/sse?sessionId=abc", "{bad:?}");
        }
    }

    #[test]
    fn s18_the_session_is_read_from_the_endpoint() {
        let named = |uri: &str| session_id(&uri.parse().expect("a URI")).map(|id| id.reveal().to_owned());
        assert_eq!(named("/mcp/files/sse?sessionId=abc").as_deref(), Some("abc"));
        assert_eq!(named("/mcp/files/sse?x=1&sessionId=abc&y=2").as_deref(), Some("abc"));
        for none in ["/mcp/files/sse", "/mcp/files/sse?sessionId=", "/mcp/files/sse?session=abc"] {
            assert_eq!(named(none), None, "{none}");
        }
    }

    #[test]
    fn s17_a_version_without_sessions_is_not_asked_for() {
        let asked = |version: &str| Bytes::from(format!(r#"{{"protocolVersion":"{version}","capabilities":{{}}}}"#));
        for legacy in ["2024-11-05", "2025-03-26", "2025-11-25"] {
            assert_eq!(in_this_era(asked(legacy)), asked(legacy));
        }
        assert_eq!(in_this_era(asked("2026-07-28")), asked("2024-11-05"));
        assert_eq!(in_this_era(Bytes::from_static(b"{}")), "{}");
    }
}
