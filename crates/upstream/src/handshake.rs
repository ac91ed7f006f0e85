//! The handshake of the legacy era, as the client made it and as it is repeated (U4, C5).

use std::collections::BTreeSet;
use std::fmt;

use bytes::Bytes;
use mainstay_core::id::SessionKey;
use mainstay_core::wire::envelope::{self, Kind};
use mainstay_core::wire::method::Version;

use crate::failure::{Blame, Failure};
use crate::server::Server;
use crate::wire::{same_id, text_member};

/// What a client said when its session began, and what it has set since.
#[derive(Clone)]
pub struct Handshake {
    /// The session.
    pub key: SessionKey,
    /// The params of the client's own `initialize`: raw JSON. A `protocolVersion` that is not one of the legacy
    /// revisions is replaced by the newest of them on the way to the server.
    pub params: Bytes,
    /// Whether the client has said `notifications/initialized`.
    pub confirmed: bool,
    /// The log level that it set.
    pub log_level: Option<Box<str>>,
    /// The resources that it subscribed to.
    pub subscriptions: BTreeSet<Box<str>>,
}

impl fmt::Debug for Handshake {
    /// Without the params.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handshake")
            .field("key", &self.key)
            .field("confirmed", &self.confirmed)
            .field("log_level", &self.log_level)
            .field("subscriptions", &self.subscriptions.len())
            .finish_non_exhaustive()
    }
}

/// What a server answered to `initialize`.
#[derive(Clone, PartialEq, Eq)]
pub struct Opened {
    /// The raw `InitializeResult`.
    pub result: Bytes,
    /// The revision that it chose.
    pub version: Box<str>,
}

impl fmt::Debug for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opened").field("version", &self.version).finish_non_exhaustive()
    }
}

/// What an answer to `initialize` was instead.
#[derive(Debug)]
pub(crate) enum NotOpened {
    /// A JSON-RPC error: its raw object.
    Refused(Bytes),
    /// Nothing that the protocol knows.
    Malformed(&'static str),
}

/// The params as they go to a server.
pub(crate) fn adapted(params: &Bytes) -> Bytes {
    let known = |span: &envelope::Span| {
        params.get(span.clone()).and_then(envelope::unescape).is_some_and(|text| Version::parse(&text).is_some())
    };
    match envelope::member(params, &(0..params.len()), "protocolVersion") {
        Some(span) if !known(&span) => {
            let latest = envelope::escape(Version::LATEST.as_str());
            Bytes::from(envelope::splice(params, &[(span, &latest)]))
        }
        Some(_) | None => params.clone(),
    }
}

/// Reads the response to the `initialize` request `id`.
pub(crate) fn opened(id: &[u8], response: &Bytes) -> Result<Opened, NotOpened> {
    let envelope = envelope::scan(response)
        .map_err(|_| NotOpened::Malformed("its answer to `initialize` is no JSON-RPC message"))?;
    if let Some(error) = envelope.error {
        return Err(NotOpened::Refused(Bytes::copy_from_slice(&response[error])));
    }
    let answers = envelope.id.is_some_and(|span| same_id(&response[span], id));
    let Some(result) = envelope.result.filter(|_| envelope.kind == Kind::Result && answers) else {
        return Err(NotOpened::Malformed("it did not answer `initialize`"));
    };
    let result = &response[result];
    match text_member(result, "protocolVersion") {
        // It becomes a header value, so it must be able to be one.
        Some(version) if !version.is_empty() && version.bytes().all(|byte| (0x21..=0x7e).contains(&byte)) => {
            Ok(Opened { result: Bytes::copy_from_slice(result), version: version.into() })
        }
        Some(_) | None => Err(NotOpened::Malformed("its answer to `initialize` names no protocol version")),
    }
}

/// The requests that bring a new upstream session to the state of the old one, after `initialized`: method and params.
pub(crate) fn replay(log_level: Option<&str>, subscriptions: &BTreeSet<Box<str>>) -> Vec<(&'static str, Vec<u8>)> {
    let params = |key: &str, text: &str| {
        let mut json = format!("{{\"{key}\":").into_bytes();
        json.extend_from_slice(&envelope::escape(text));
        json.push(b'}');
        json
    };
    let level = log_level.map(|level| ("logging/setLevel", params("level", level)));
    let subscriptions = subscriptions.iter().map(|uri| ("resources/subscribe", params("uri", uri)));
    level.into_iter().chain(subscriptions).collect()
}

/// The failure that a JSON-RPC error in answer to `initialize` is.
pub(crate) fn refusal(server: &Server, error: &[u8]) -> Failure {
    let problem = String::from_utf8_lossy(&error[..error.len().min(REFUSAL_BYTES_MAX)]);
    server.rejected(200, &problem)
}

/// Whether requests under revision `version` carry `MCP-Protocol-Version` (since 2025-06-18). Revisions are dates, so
/// that unknown newer ones sort behind.
pub(crate) fn has_version_header(version: &str) -> bool {
    version >= Version::V2025_06_18.as_str()
}

/// How much of a refusal is told.
const REFUSAL_BYTES_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn u4_the_clients_own_params_are_sent_but_for_a_version_that_no_legacy_server_knows() {
        let own = Bytes::from_static(br#"{"capabilities":{"x":1.0},"protocolVersion":"2025-03-26"}"#);
        assert_eq!(adapted(&own), own);
        let modern = Bytes::from_static(br#"{ "protocolVersion":"2026-07-28","clientInfo":{"name":"c"} }"#);
        assert_eq!(adapted(&modern), &br#"{ "protocolVersion":"2025-11-25","clientInfo":{"name":"c"} }"#[..]);
        let none = Bytes::from_static(b"{}");
        assert_eq!(adapted(&none), none);
    }

    #[test]
    fn an_answer_to_initialize_is_a_result_a_refusal_or_nonsense() {
        let read = |text: &'static str| opened(br#""i""#, &Bytes::from_static(text.as_bytes()));
        let good = read(r#"{"jsonrpc":"2.0","id":"i","result":{"protocolVersion":"2025-06-18","capabilities":{}}}"#);
        let good = good.expect("it is well formed");
        assert_eq!((&*good.version, &good.result[..2]), ("2025-06-18", &b"{\""[..]));
        let refused = read(r#"{"jsonrpc":"2.0","id":"i","error":{"code":-32602,"message":"no"}}"#);
        assert!(matches!(refused, Err(NotOpened::Refused(error)) if error.starts_with(b"{\"code\"")));
        for bad in [
            "",
            r#"{"jsonrpc":"2.0","id":"j","result":{"protocolVersion":"2025-06-18"}}"#,
            r#"{"jsonrpc":"2.0","id":"i","result":{"protocolVersion":"a\nb"}}"#,
            r#"{"jsonrpc":"2.0","id":"i","result":{}}"#,
        ] {
            assert!(matches!(read(bad), Err(NotOpened::Malformed(_))), "{bad}");
        }
    }

    #[test]
    fn u4_level_and_subscriptions_are_replayed_in_order() {
        let uris: BTreeSet<Box<str>> = ["b\"".into(), "a".into()].into();
        let replayed = replay(Some("debug"), &uris);
        let shown: Vec<_> =
            replayed.iter().map(|(method, params)| (*method, String::from_utf8_lossy(params).into_owned())).collect();
        assert_eq!(
            shown,
            [
                ("logging/setLevel", r#"{"level":"debug"}"#.to_owned()),
                ("resources/subscribe", r#"{"uri":"a"}"#.to_owned()),
                ("resources/subscribe", r#"{"uri":"b\""}"#.to_owned()),
            ]
        );
    }
}
