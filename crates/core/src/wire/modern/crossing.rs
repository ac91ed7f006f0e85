//! What passes between a client of the modern era and a server of the legacy one, in the words of the other (2026-07-28,
//! Versioning).
//!
//! Requests lose what a legacy server does not know, results gain what a modern client must be told. Whose conversation a
//! message belongs to is not decided here.

use std::borrow::Cow;

use super::edit::{self, Change};
use super::tasks;
use super::{CLIENT_CAPABILITIES, CLIENT_INFO, INVALID_PARAMS, LOG_LEVEL, METHOD_NOT_FOUND, Meta, PROTOCOL_VERSION};
use super::{SERVER_INFO, VERSION};
use crate::wire::envelope::{self, Envelope, Kind, Span};
use crate::wire::method::Version;

/// The capabilities that `initialize` declares for the client of the request `message`: those that the request itself
/// declares, without what the legacy era has not, or has in other words. Raw JSON, an object.
pub fn capabilities(message: &[u8], meta: &Meta) -> Vec<u8> {
    let Some(span) = meta.capabilities.as_ref().filter(|span| message.get(span.start) == Some(&b'{')) else {
        return b"{}".to_vec();
    };
    let edits = edit::object(message, span, &MODERN_CAPABILITIES);
    slice_of(message, span, edits)
}

/// The params of the `initialize` by which the gateway opens a session for the client of the request `message`. Raw JSON.
pub fn initialize_params(message: &[u8], meta: &Meta) -> Vec<u8> {
    let info = meta.client_info.as_ref().and_then(|span| message.get(span.clone()));
    let version = envelope::escape(Version::LATEST.as_str());
    [
        b"{\"protocolVersion\":".as_slice(),
        &version,
        b",\"capabilities\":",
        &capabilities(message, meta),
        b",\"clientInfo\":",
        info.unwrap_or(NAMELESS),
        b"}",
    ]
    .concat()
}

/// The request `message` as it goes to a legacy server, under `id`: without what it says of itself.
pub fn request(message: &[u8], envelope: &Envelope, id: &[u8]) -> Vec<u8> {
    let own = [PROTOCOL_VERSION, CLIENT_CAPABILITIES, CLIENT_INFO, LOG_LEVEL].map(|name| (name, Change::Remove));
    let mut edits = edit::request_meta(message, envelope, &own);
    let rounds = ["inputResponses", "requestState"].map(|name| (name, Change::Remove));
    edits.extend(envelope.params.iter().flat_map(|params| edit::object(message, params, &rounds)));
    edits.extend(envelope.id.clone().map(|span| (span, id.to_vec())));
    edit::apply(message, edits)
}

/// A response as it goes to a modern client, and its HTTP status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Landed {
    /// The status, if nothing of the response was sent before.
    pub status: u16,
    /// The response.
    pub message: Vec<u8>,
}

/// The response `message` of a legacy server to a request of `method`, for the modern client that knows it as `id`.
/// `server_info` is raw JSON: what the server calls itself.
pub fn response(message: &[u8], envelope: &Envelope, id: &[u8], method: &str, server_info: Option<&[u8]>) -> Landed {
    let mut edits: edit::Edits = envelope.id.clone().map(|span| (span, id.to_vec())).into_iter().collect();
    let mut status = 200;
    match (envelope.kind, &envelope.result, &envelope.error) {
        (Kind::Result, Some(result), _) => edits.extend(complete(message, result, method, server_info)),
        (Kind::Error, _, Some(error)) => {
            let code = envelope::member(message, error, "code");
            let number = code.clone().and_then(|span| number(&message[span]));
            if number == Some(METHOD_NOT_FOUND) {
                status = 404;
            }
            if let (Some(LEGACY_NOT_FOUND), Some(span)) = (number, code) {
                edits.push((span, INVALID_PARAMS.to_string().into_bytes()));
            }
        }
        _ => {}
    }
    Landed { status, message: edit::apply(message, edits) }
}

/// The result of `server/discover` in the name of the legacy server that answered `initialize` with `initialized`.
pub fn discovery(initialized: &[u8]) -> Vec<u8> {
    let all = 0..initialized.len();
    let part = |name: &str| envelope::member(initialized, &all, name);
    let capabilities = part("capabilities").filter(|span| initialized[span.start] == b'{').map_or_else(
        || b"{}".to_vec(),
        |span| {
            let edits = edit::object(initialized, &span, &MODERN_CAPABILITIES);
            slice_of(initialized, &span, edits)
        },
    );
    // Whatever the server is, the gateway answers for it when a call takes its time.
    let offers = tasks::offered();
    let edits = edit::object(&capabilities, &(0..capabilities.len()), &[("extensions", Change::Set(&offers))]);
    let capabilities = edit::apply(&capabilities, edits);
    let version = envelope::escape(VERSION);
    let mut result = [
        b"{\"resultType\":\"complete\",\"supportedVersions\":[".as_slice(),
        &version,
        b"],\"capabilities\":",
        &capabilities,
        b"}",
    ]
    .concat();
    let instructions = part("instructions").map(|span| &initialized[span]);
    let changes = [("instructions", instructions.map_or(Change::Remove, Change::Set))];
    let span = 0..result.len();
    result = edit::apply(&result, edit::object(&result, &span, &changes));
    let info = part("serverInfo").map(|span| &initialized[span]);
    let span = 0..result.len();
    edit::apply(&result, complete(&result, &span, "server/discover", info))
}

/// What a legacy server calls itself in its answer to `initialize`: raw JSON.
pub fn server_info(initialized: &[u8]) -> Option<&[u8]> {
    let span = envelope::member(initialized, &(0..initialized.len()), "serverInfo")?;
    initialized.get(span)
}

/// The progress notification `message` under the token that its client chose. `None` if it is none.
pub fn progress(message: &[u8], envelope: &Envelope, token: &[u8]) -> Option<Vec<u8>> {
    let span = envelope::member(message, envelope.params.as_ref()?, "progressToken")?;
    Some(envelope::splice(message, &[(span, token)]))
}

/// The text of the level of a log message.
pub fn level<'a>(message: &'a [u8], envelope: &Envelope) -> Option<Cow<'a, str>> {
    let span = envelope::member(message, envelope.params.as_ref()?, "level")?;
    envelope::unescape(&message[span])
}

/// How severe a log level is, 0 the least; `None` if there is no such level (2026-07-28, Logging).
pub fn severity(level: &str) -> Option<usize> {
    LEVELS.iter().position(|known| *known == level)
}

/// Whether a method is of the legacy era only: a modern client has none of these.
pub fn is_legacy_only(method: &str) -> bool {
    matches!(method, "initialize" | "ping" | "logging/setLevel" | "resources/subscribe" | "resources/unsubscribe")
}

/// The edits that make the result at `result` one of the modern era.
fn complete(message: &[u8], result: &Span, method: &str, server_info: Option<&[u8]>) -> edit::Edits {
    let mut changes = vec![("resultType", Change::Set(b"\"complete\""))];
    if is_cacheable(method) {
        changes.extend([("ttlMs", Change::Set(TTL_MS)), ("cacheScope", Change::Set(b"\"private\""))]);
    }
    let own = server_info.map(|info| [(SERVER_INFO, Change::Set(info))]);
    let Some(own) = &own else { return edit::object(message, result, &changes) };
    if envelope::member(message, result, "_meta").is_some_and(|span| message[span.start] == b'{') {
        let mut edits = edit::meta(message, result, own);
        edits.extend(edit::object(message, result, &changes));
        return edits;
    }
    let empty = b"{}";
    let made = edit::apply(empty, edit::object(empty, &(0..empty.len()), own));
    changes.push(("_meta", Change::Set(&made)));
    edit::object(message, result, &changes)
}

/// Whether a complete result of `method` must say for how long it may be kept (2026-07-28, Caching).
fn is_cacheable(method: &str) -> bool {
    matches!(
        method,
        "server/discover"
            | "tools/list"
            | "prompts/list"
            | "resources/list"
            | "resources/templates/list"
            | "resources/read"
    )
}

fn number(raw: &[u8]) -> Option<i64> {
    std::str::from_utf8(raw).ok()?.parse().ok()
}

/// The part of `message` at `span` after `edits` inside of it.
pub(super) fn slice_of(message: &[u8], span: &Span, edits: edit::Edits) -> Vec<u8> {
    let apart = edits.into_iter().map(|(at, bytes)| (at.start - span.start..at.end - span.start, bytes));
    edit::apply(&message[span.clone()], apart.collect())
}

/// What both eras have under the same name and in other words.
const MODERN_CAPABILITIES: [(&str, Change<'_>); 2] = [("extensions", Change::Remove), ("tasks", Change::Remove)];
/// A client that does not say who it is.
const NAMELESS: &[u8] = br#"{"name":"unknown","version":"0"}"#;
/// A resource does not exist, as the legacy era has it.
const LEGACY_NOT_FOUND: i64 = -32002;
/// For how long a legacy server's result may be kept: nothing says that it would not be another one the next time.
const TTL_MS: &[u8] = b"0";
/// All log levels, the least severe first (RFC 5424).
const LEVELS: [&str; 8] = ["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"];

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn scanned(text: &str) -> (Envelope, Meta) {
        let envelope = envelope::scan(text.as_bytes()).expect("a message");
        let meta = Meta::read(text.as_bytes(), &envelope);
        (envelope, meta)
    }

    fn text(bytes: Vec<u8>) -> String {
        String::from_utf8(bytes).expect("text")
    }

    #[test]
    fn e3_a_request_loses_what_it_says_of_itself_and_nothing_else() {
        let message = r#"{"jsonrpc":"2.0","id":"a","method":"tools/call","params":{"inputResponses":{"q":{}},"name":"t","requestState":"s","arguments":{"requestState":1.0},"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","progressToken":7,"io.modelcontextprotocol/clientCapabilities":{},"traceparent":"x","io.modelcontextprotocol/logLevel":"info"}}}"#;
        let (envelope, _) = scanned(message);
        let sent = text(request(message.as_bytes(), &envelope, b"\"9\""));
        assert_eq!(
            sent,
            r#"{"jsonrpc":"2.0","id":"9","method":"tools/call","params":{"name":"t","arguments":{"requestState":1.0},"_meta":{"progressToken":7,"traceparent":"x"}}}"#
        );
    }

    #[test]
    fn e3_initialize_says_what_the_request_says() {
        let message = r#"{"jsonrpc":"2.0","id":1,"method":"m","params":{"_meta":{"io.modelcontextprotocol/clientCapabilities":{"extensions":{"x":1},"roots":{}, "tasks":{},"elicitation":{"form":{}}},"io.modelcontextprotocol/clientInfo":{"name":"c","version":"1.0"}}}}"#;
        let (_, meta) = scanned(message);
        assert_eq!(
            text(initialize_params(message.as_bytes(), &meta)),
            r#"{"protocolVersion":"2025-11-25","capabilities":{"roots":{},"elicitation":{"form":{}}},"clientInfo":{"name":"c","version":"1.0"}}"#
        );
        let bare = r#"{"jsonrpc":"2.0","id":1,"method":"m"}"#;
        let (_, meta) = scanned(bare);
        assert_eq!(
            text(initialize_params(bare.as_bytes(), &meta)),
            r#"{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"unknown","version":"0"}}"#
        );
    }

    #[test]
    fn e3_a_result_says_that_it_is_complete_and_whose_it_is() {
        for (method, result, expected) in [
            (
                "tools/call",
                r#"{"content":[ ]}"#,
                json!({"content": [], "resultType": "complete", "_meta": {SERVER_INFO: {"name": "s"}}}),
            ),
            (
                "tools/list",
                r#"{"_meta":{"k":1},"tools":[]}"#,
                json!({"_meta": {"k": 1, SERVER_INFO: {"name": "s"}}, "tools": [], "resultType": "complete", "ttlMs": 0, "cacheScope": "private"}),
            ),
            (
                "prompts/get",
                r#"{"resultType":"odd","_meta":null}"#,
                json!({"resultType": "complete", "_meta": {SERVER_INFO: {"name": "s"}}}),
            ),
        ] {
            let message = format!(r#"{{"jsonrpc":"2.0","result":{result},"id":"1.2.3"}}"#);
            let (envelope, _) = scanned(&message);
            let landed = response(message.as_bytes(), &envelope, b"7", method, Some(br#"{"name":"s"}"#));
            let read: Value = serde_json::from_slice(&landed.message).expect("json");
            assert_eq!((landed.status, &read["id"], &read["result"]), (200, &json!(7), &expected), "{method}");
        }
    }

    #[test]
    fn e3_errors_have_the_numbers_and_statuses_of_the_clients_era() {
        for (code, status, expected) in [(-32002, 200, -32602), (-32601, 404, -32601), (-1, 200, -1)] {
            let message = format!(r#"{{"jsonrpc":"2.0","id":1,"error":{{"message":"m","code":{code},"data":[1.0]}}}}"#);
            let (envelope, _) = scanned(&message);
            let landed = response(message.as_bytes(), &envelope, b"\"x\"", "resources/read", None);
            let wanted =
                format!(r#"{{"jsonrpc":"2.0","id":"x","error":{{"message":"m","code":{expected},"data":[1.0]}}}}"#);
            assert_eq!((landed.status, text(landed.message)), (status, wanted));
        }
    }

    #[test]
    fn e3_discovery_says_what_initialize_said() {
        let initialized = br#"{"protocolVersion":"2025-11-25","capabilities":{"tools":{"listChanged":true},"tasks":{}},"serverInfo":{"name":"s","version":"1"},"instructions":"do \"x\""}"#;
        let read: Value = serde_json::from_slice(&discovery(initialized)).expect("json");
        assert_eq!(
            read,
            json!({"resultType": "complete", "supportedVersions": [VERSION], "capabilities": {
                "tools": {"listChanged": true}, "extensions": {tasks::EXTENSION: {}}}, "instructions": "do \"x\"", "ttlMs": 0, "cacheScope": "private",
                "_meta": {SERVER_INFO: {"name": "s", "version": "1"}}})
        );
        let read: Value = serde_json::from_slice(&discovery(b"{}")).expect("json");
        assert_eq!((&read["capabilities"], read.get("_meta")), (&json!({"extensions": {tasks::EXTENSION: {}}}), None));
    }

    #[test]
    fn e3_levels_are_ordered_and_methods_of_the_legacy_era_are_known() {
        assert!(severity("debug") < severity("emergency"));
        assert_eq!(severity("loud"), None);
        assert!(is_legacy_only("ping") && !is_legacy_only("tools/call"));
        let message =
            br#"{"jsonrpc":"2.0","method":"notifications/progress","params":{"progress":1,"progressToken":"3.4.1"}}"#;
        let envelope = envelope::scan(message).expect("a message");
        assert_eq!(
            progress(message, &envelope, b"\"t\"").map(text).as_deref(),
            Some(r#"{"jsonrpc":"2.0","method":"notifications/progress","params":{"progress":1,"progressToken":"t"}}"#)
        );
    }
}
