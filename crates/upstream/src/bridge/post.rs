//! One exchange with a modern server, over HTTP or at the process that its clients share: a dressed request out, and what
//! comes back.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request};
use http_body_util::Full;
use mainstay_core::wire::envelope::{self, Envelope};
use mainstay_core::wire::modern::edit::{self, Change};
use mainstay_core::wire::modern::{self, header};

use crate::child::{Exchange, Manner, Sharing};
use crate::failure::{Blame, Failure};
use crate::feed::{Feed, FeedEnd};
use crate::http::{Content, Reply, Unread};
use crate::pool::SendError;
use crate::upstreams::{Destination, Upstreams, unusable};
use crate::wire::{self, Sort};

/// A request as the modern era wants it: all that it says for itself in `_meta`, and the headers that repeat it.
#[derive(Clone)]
pub(crate) struct Dressed {
    pub(crate) message: Bytes,
    pub(super) headers: HeaderMap,
}

impl Dressed {
    /// A request of the gateway's own, in no client's name.
    pub(crate) fn own(id: &[u8], method: &str, params: Option<&[u8]>) -> Self {
        let message = envelope::request_message(id, method, params);
        Self::of(message.into(), &Speaker::gateway(), None)
    }

    /// A message of a modern client, which says everything itself; with the headers of its annotated parameters.
    pub(crate) fn as_it_is(message: Bytes, params: &HeaderMap) -> Self {
        let mut headers =
            envelope::scan(&message).map_or_else(|_| HeaderMap::new(), |scanned| headers(&message, &scanned));
        headers.extend(params.clone());
        Self { message, headers }
    }

    /// `message`, as `speaker` says it.
    pub(super) fn of(message: Bytes, speaker: &Speaker<'_>, level: Option<&str>) -> Self {
        let Ok(scanned) = envelope::scan(&message) else { return Self { message, headers: HeaderMap::new() } };
        let version = envelope::escape(modern::VERSION);
        let level = level.map(envelope::escape);
        let info = speaker.info.map_or(Change::Remove, Change::Set);
        let changes = [
            (modern::PROTOCOL_VERSION, Change::Set(&version)),
            (modern::CLIENT_CAPABILITIES, Change::Set(speaker.capabilities)),
            (modern::CLIENT_INFO, info),
            (modern::LOG_LEVEL, level.as_deref().map_or(Change::Remove, Change::Set)),
        ];
        let edits = edit::request_meta(&message, &scanned, &changes);
        let headers = headers(&message, &scanned);
        Self { message: edit::apply(&message, edits).into(), headers }
    }
}

/// Who speaks: raw JSON.
pub(super) struct Speaker<'a> {
    pub(super) capabilities: &'a [u8],
    pub(super) info: Option<&'a [u8]>,
}

impl Speaker<'static> {
    const fn gateway() -> Self {
        Self { capabilities: b"{}", info: Some(GATEWAY) }
    }
}

/// The standard headers of a request.
fn headers(message: &[u8], scanned: &Envelope) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(HEADERS_EXPECTED);
    headers.insert(PROTOCOL_VERSION, HeaderValue::from_static(modern::VERSION));
    if let Some(method) = scanned.method_name(message)
        && let Ok(value) = HeaderValue::from_str(&method)
    {
        headers.insert(METHOD, value);
    }
    // A name that stands there twice has none that all readers agree on; the server refuses such a request.
    if let Ok(Some(name)) = header::name_of(message, scanned)
        && let Ok(value) = HeaderValue::from_str(&header::encode(&name))
    {
        headers.insert(NAME, value);
    }
    headers
}

/// Why there is no response.
pub(crate) enum Fault {
    /// Not a byte went out.
    NeverSent(Box<str>),
    /// The connection ended after the request may have gone out.
    Lost(Box<str>),
    Failed(Failure),
}

/// A whole response.
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(super) challenge: bool,
    pub(crate) body: Bytes,
}

/// POSTs `dressed` with the headers that are configured.
pub(crate) async fn post(upstreams: &Upstreams, destination: &Destination, dressed: &Dressed) -> Result<Reply, Fault> {
    let server = &*destination.server;
    let url = server.url().ok_or_else(|| Fault::Failed(unusable(server, &"it has no url")))?;
    let place = destination.place().await.map_err(Fault::Failed)?;
    let mut headers = destination.headers(&*upstreams.parts.environment).map_err(Fault::Failed)?;
    for (name, value) in &dressed.headers {
        headers.insert(name, value.clone());
    }
    let mut request = Request::new(Full::new(dressed.message.clone()));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = url.clone();
    *request.headers_mut() = headers;
    match upstreams.send(&destination.host, request).await {
        Ok(response) => Ok(Reply::new(response, Some(place))),
        Err(SendError::NeverSent(cause)) => Err(Fault::NeverSent(cause)),
        Err(SendError::Lost(cause)) => Err(Fault::Lost(cause)),
    }
}

/// What a server makes of a request.
pub(crate) enum Posted {
    /// It refuses it, by a status other than 2xx.
    Refused(Response),
    /// It answers with one body: JSON, or something that is neither that nor events.
    Body(Reply, Content),
    /// It answers message by message.
    Feed(Feed),
}

/// Sends `dressed` to a server, by whichever of the two ways leads there: a POST, or the process that its clients share.
/// `listens` is whether the answer may last for days (`subscriptions/listen`).
pub(crate) async fn request(
    upstreams: &Arc<Upstreams>,
    destination: &Arc<Destination>,
    dressed: &Dressed,
    listens: bool,
) -> Result<Posted, Fault> {
    if !destination.server.is_http() {
        // Whether it may be sent twice is for who sends it.
        let manner = Manner { listens, may_repeat: false };
        let exchange = Exchange::begin(Sharing::new(upstreams, destination), &dressed.message, manner).await;
        return exchange.map(|exchange| Posted::Feed(Feed::Child(Box::new(exchange)))).map_err(Fault::Failed);
    }
    let reply = post(upstreams, destination, dressed).await?;
    if !reply.status().is_success() {
        let (status, challenge, body) = reply.read_refusal().await;
        return Ok(Posted::Refused(Response { status, challenge, body }));
    }
    Ok(match reply.content() {
        Content::Events => {
            // A place among the calls would be held for as long as the stream is open.
            let reply = if listens { reply.without_place() } else { reply };
            Posted::Feed(Feed::Http(reply.events(destination.server.message_bytes_max)))
        }
        content @ (Content::Json | Content::Other) => Posted::Body(reply, content),
    })
}

/// Sends a request of the gateway's own and reads its whole response. What comes before that on a stream is passed over.
pub(crate) async fn exchange(
    upstreams: &Arc<Upstreams>,
    destination: &Arc<Destination>,
    dressed: &Dressed,
) -> Result<Response, Fault> {
    let bytes_max = destination.server.message_bytes_max;
    let oversize = || Fault::Failed(destination.server.oversize());
    let whole = |status: u16, body: Bytes| Response { status, challenge: false, body };
    let mut feed = match request(upstreams, destination, dressed, false).await? {
        Posted::Refused(response) => return Ok(response),
        Posted::Body(reply, _) => {
            let status = reply.status().as_u16();
            return match reply.collect(bytes_max).await {
                Ok(body) => Ok(whole(status, body)),
                Err(Unread::Oversize) => Err(oversize()),
                Err(Unread::Broken(cause)) => Err(Fault::Lost(cause)),
            };
        }
        Posted::Feed(feed) => feed,
    };
    loop {
        let body = feed.next().await.map_err(|end| match end {
            FeedEnd::Broken(cause) => Fault::Lost(cause),
            FeedEnd::Oversize => oversize(),
            FeedEnd::Failed(failure) => Fault::Failed(failure),
        })?;
        if let Ok(scanned) = envelope::scan(&body)
            && let Sort::Response = wire::sort(&scanned, &body)
        {
            feed.finish();
            return Ok(whole(200, body));
        }
    }
}

const PROTOCOL_VERSION: HeaderName = HeaderName::from_static(header::PROTOCOL_VERSION);
const METHOD: HeaderName = HeaderName::from_static(header::METHOD);
const NAME: HeaderName = HeaderName::from_static(header::NAME);
const GATEWAY: &[u8] = concat!(r#"{"name":"mainstay","version":""#, env!("CARGO_PKG_VERSION"), r#""}"#).as_bytes();
const HEADERS_EXPECTED: usize = 8;
