//! What comes back: a response's head, and its body as a whole or as events.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{CONTENT_TYPE, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use http_body_util::BodyExt as _;
use hyper::body::Body as _;
use mainstay_core::resume::UpstreamId;
use mainstay_core::wire::sse::{Event, SseDecoder};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

use super::post::SESSION_ID;
use crate::dialect::{self, Seen, Verdict};
use crate::pool::{Body, describe};
use crate::task::spawn;

/// The beginning of a response.
pub(crate) struct Reply {
    pub(crate) response: Response<Body>,
    /// Held until the body is read: it is a place among the calls to that host.
    pub(crate) permit: Option<OwnedSemaphorePermit>,
}

/// Why a body could not be read.
pub(crate) enum Unread {
    Broken(Box<str>),
    Oversize,
}

/// What kind of body a response has.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Content {
    Json,
    Events,
    Other,
}

impl Reply {
    /// That of `response`. It holds `permit`, its place among the calls, until it is read.
    pub(crate) fn new(response: Response<Body>, permit: Option<OwnedSemaphorePermit>) -> Self {
        Self { response, permit }
    }

    /// Gives up its place among the calls: it is no call, and may last for days.
    pub(crate) fn without_place(self) -> Self {
        Self { permit: None, ..self }
    }

    pub(crate) fn status(&self) -> StatusCode {
        self.response.status()
    }

    pub(crate) fn content(&self) -> Content {
        content_type(self.response.headers())
    }

    /// The session id that the server gave.
    pub(crate) fn session_id(&self) -> Option<UpstreamId> {
        self.response.headers().get(SESSION_ID).and_then(|value| value.to_str().ok()).and_then(UpstreamId::parse)
    }

    /// Its events, as they come.
    pub(crate) fn events(self, event_bytes_max: usize) -> Box<Events> {
        Box::new(Events {
            body: self.response.into_body(),
            decoder: SseDecoder::new(event_bytes_max + EVENT_FIELDS_BYTES),
            _permit: self.permit,
        })
    }

    /// The whole body, if it is not above `bytes_max`.
    pub(crate) async fn collect(self, bytes_max: usize) -> Result<Bytes, Unread> {
        let mut body = self.response.into_body();
        let Some(first) = next_data(&mut body).await.map_err(Unread::Broken)? else { return Ok(Bytes::new()) };
        if first.len() > bytes_max || body.size_hint().lower() > bytes_max as u64 {
            return Err(Unread::Oversize);
        }
        if body.is_end_stream() {
            return Ok(first);
        }
        let expected = usize::try_from(body.size_hint().lower()).unwrap_or_default();
        let mut whole = BytesMut::with_capacity(first.len() + expected.min(bytes_max));
        whole.extend_from_slice(&first);
        while let Some(chunk) = next_data(&mut body).await.map_err(Unread::Broken)? {
            if whole.len() + chunk.len() > bytes_max {
                return Err(Unread::Oversize);
            }
            whole.extend_from_slice(&chunk);
        }
        Ok(whole.freeze())
    }

    /// The beginning of the body of a refusal; what can't be read in time does not matter.
    pub(crate) async fn read_refusal(self) -> (u16, bool, Bytes) {
        let status = self.status().as_u16();
        let challenge = self.response.headers().contains_key(WWW_AUTHENTICATE);
        let collected = timeout(REFUSAL_BOUND, self.collect(REFUSAL_BYTES_MAX)).await;
        let body = collected.ok().and_then(Result::ok).unwrap_or_default();
        (status, challenge, body)
    }
}

/// The events of a response body.
pub(crate) struct Events {
    body: Body,
    decoder: SseDecoder,
    _permit: Option<OwnedSemaphorePermit>,
}

/// Why there are no more events.
pub(crate) enum EventsEnd {
    /// The body ended or broke.
    Broken(Box<str>),
    /// An event was larger than allowed.
    Oversize,
}

impl Events {
    /// Allows messages of another size from here on.
    pub(crate) fn widen(&mut self, event_bytes_max: usize) {
        self.decoder.rebound(event_bytes_max + EVENT_FIELDS_BYTES);
    }

    /// The next event. Cancel-safe.
    pub(crate) async fn next(&mut self) -> Result<Event, EventsEnd> {
        loop {
            if let Some(event) = self.decoder.next_event().map_err(|_| EventsEnd::Oversize)? {
                return Ok(event);
            }
            match next_data(&mut self.body).await.map_err(EventsEnd::Broken)? {
                Some(chunk) => self.decoder.push(&chunk),
                None => return Err(EventsEnd::Broken("its answer's stream ended without the answer".into())),
            }
        }
    }

    /// Reads on to the end, so that the connection can be used again. Bounded.
    pub(crate) fn finish(mut self: Box<Self>) {
        if self.body.is_end_stream() {
            return;
        }
        spawn(timeout(FINISH_BOUND, async move { while let Ok(Some(_)) = next_data(&mut self.body).await {} }));
    }
}

/// Why a GET gave no event stream.
pub(crate) enum NoStream {
    /// 405, or whatever else says that there is none.
    Never(u16),
    /// Perhaps there is none, perhaps the server does not know the session: many servers say 404 to both.
    Unclear(u16),
    /// Not for now.
    Later(u16),
}

impl Reply {
    /// The events, if that is what it is; else why not.
    pub(crate) async fn into_stream(self, event_bytes_max: usize, sent_id: bool) -> Result<Box<Events>, NoStream> {
        if self.status() == StatusCode::OK && self.content() == Content::Events {
            return Ok(self.events(event_bytes_max));
        }
        let (status, challenge, body) = self.read_refusal().await;
        Err(match dialect::classify(&Seen { status, challenge, body: &body }, sent_id, None) {
            Verdict::SessionLost(_) | Verdict::Suspect => NoStream::Unclear(status),
            Verdict::Unavailable => NoStream::Later(status),
            // Somebody else's stream, or the rest of an earlier one of ours.
            Verdict::Refused if status == 409 => NoStream::Later(status),
            Verdict::Answer | Verdict::Unauthorized | Verdict::NoEndpoint | Verdict::Refused => NoStream::Never(status),
        })
    }
}

/// The JSON-RPC message of an event, if it has one.
pub(crate) fn message_of(event: Event) -> Option<Bytes> {
    let named = event.name.as_deref().is_none_or(|name| name == "message");
    event.data.filter(|data| named && !data.is_empty())
}

async fn next_data(body: &mut Body) -> Result<Option<Bytes>, Box<str>> {
    while let Some(frame) = body.frame().await {
        match frame {
            Ok(frame) => {
                // Trailers say nothing here.
                if let Ok(data) = frame.into_data() {
                    return Ok(Some(data));
                }
            }
            Err(error) => return Err(describe(&error)),
        }
    }
    Ok(None)
}

fn content_type(headers: &HeaderMap) -> Content {
    // A body without a type can only be the one that needs no more to be read.
    let value = headers.get(CONTENT_TYPE).map_or(&b"application/json"[..], HeaderValue::as_bytes);
    let media = value.split(|&byte| byte == b';').next().unwrap_or_default().trim_ascii();
    if media.eq_ignore_ascii_case(b"application/json") {
        Content::Json
    } else if media.eq_ignore_ascii_case(b"text/event-stream") {
        Content::Events
    } else {
        Content::Other
    }
}

/// How much of a refusal is read, and for how long.
const REFUSAL_BYTES_MAX: usize = 64 * 1024;
const REFUSAL_BOUND: Duration = Duration::from_secs(2);

/// How long the rest of an answered stream is read.
const FINISH_BOUND: Duration = Duration::from_secs(1);

/// What an event may have besides its message.
const EVENT_FIELDS_BYTES: usize = 4096;
