//! Paying owed deletes (U7).

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderValue, Method, Request, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use mainstay_core::resume::OwedDelete;
use tokio::time::timeout;

use crate::dialect::{self, Seen, Verdict};
use crate::handshake::has_version_header;
use crate::http::{PROTOCOL_VERSION, SESSION_ID};
use crate::pool::{Outgoing, SendError};
use crate::server::Server;
use crate::upstreams::{Upstreams, configured_headers};

/// What became of an owed delete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Settled {
    /// The session is gone, or the server keeps sessions as long as it likes (405).
    Paid,
    /// The server was not there, or answered something else.
    Failed {
        /// What was seen.
        reason: Box<str>,
    },
}

impl Settled {
    /// Whether it is still owed.
    pub fn is_owed(&self) -> bool {
        match self {
            Self::Paid => false,
            Self::Failed { .. } => true,
        }
    }
}

/// Pays one owed delete, in at most [`SETTLE_BOUND`].
///
/// `server` is the server of that name as it is configured now, if there is one. Its headers go along only to the very
/// URL that they are configured for: an earlier address must not be shown today's credentials.
pub async fn settle(upstreams: &Upstreams, server: Option<&Arc<Server>>, owed: &OwedDelete) -> Settled {
    let failed = |cause: &str| Settled::Failed { reason: cause.into() };
    let Ok(url) = owed.url.parse::<Uri>() else { return failed("its url can't be read") };
    let mut headers = HeaderMap::new();
    if let Some(server) = server.filter(|server| server.url() == Some(&url)) {
        match configured_headers(server, &*upstreams.parts.environment) {
            Ok(configured) => headers = configured,
            Err(failure) => return failed(&failure.to_string()),
        }
        headers.remove(CONTENT_TYPE);
    }
    let Ok(mut id) = HeaderValue::from_str(owed.upstream_id.reveal()) else {
        return failed("its id is no header value");
    };
    id.set_sensitive(true);
    headers.insert(SESSION_ID, id);
    if has_version_header(&owed.version)
        && let Ok(version) = HeaderValue::from_str(&owed.version)
    {
        headers.insert(PROTOCOL_VERSION, version);
    }
    let mut request = Request::new(Full::new(Bytes::new()));
    *request.method_mut() = Method::DELETE;
    *request.uri_mut() = url;
    *request.headers_mut() = headers;
    match timeout(SETTLE_BOUND, exchange(upstreams, request)).await {
        Ok(settled) => settled,
        Err(_) => failed("it did not answer in time"),
    }
}

async fn exchange(upstreams: &Upstreams, request: Outgoing) -> Settled {
    let response = match upstreams.send(&upstreams.host(Some(request.uri())), request).await {
        Ok(response) => response,
        Err(SendError::NeverSent(cause) | SendError::Lost(cause)) => return Settled::Failed { reason: cause },
    };
    let status = response.status();
    if status.is_success() || matches!(status.as_u16(), 404 | 405) {
        return Settled::Paid;
    }
    let challenge = response.headers().contains_key(WWW_AUTHENTICATE);
    let body = Limited::new(response.into_body(), BODY_BYTES_MAX).collect().await;
    let body = body.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    match dialect::classify(&Seen { status: status.as_u16(), challenge, body: &body }, true, None) {
        Verdict::SessionLost(_) => Settled::Paid,
        Verdict::Unauthorized => Settled::Failed { reason: "it asks for authentication".into() },
        Verdict::Answer | Verdict::Suspect | Verdict::NoEndpoint | Verdict::Unavailable | Verdict::Refused => {
            Settled::Failed { reason: format!("HTTP status {}", status.as_u16()).into() }
        }
    }
}

/// How long one delete may take.
pub const SETTLE_BOUND: Duration = Duration::from_secs(2);

const BODY_BYTES_MAX: usize = 64 * 1024;
