//! What a modern server says of itself, in the words of `initialize`.

use bytes::Bytes;
use mainstay_core::wire::envelope::{self, Span};
use mainstay_core::wire::method::Version;
use mainstay_core::wire::modern::SERVER_INFO;
use mainstay_core::wire::modern::edit::{self, Change};

use crate::handshake::Opened;
use crate::server::Server;

/// The `InitializeResult` that the raw `DiscoverResult` `discovered` is for a client whose `initialize` had `params`.
pub(super) fn opened(server: &Server, params: &[u8], discovered: &[u8]) -> Opened {
    let version = offered(params);
    let whole = 0..discovered.len();
    let part = |span: Option<Span>| span.and_then(|span| discovered.get(span));
    let capabilities = envelope::member(discovered, &whole, "capabilities");
    let info = envelope::member(discovered, &whole, "_meta")
        .and_then(|meta| envelope::member(discovered, &meta, SERVER_INFO))
        .filter(|span| discovered[span.start] == b'{');
    let mut result = b"{\"protocolVersion\":".to_vec();
    result.extend_from_slice(&envelope::escape(version.as_str()));
    result.extend_from_slice(b",\"capabilities\":");
    result.extend_from_slice(&capabilities.map_or_else(|| b"{}".to_vec(), |span| without(&discovered[span])));
    result.extend_from_slice(b",\"serverInfo\":");
    match part(info) {
        Some(info) => result.extend_from_slice(info),
        None => {
            result.extend_from_slice(b"{\"name\":");
            result.extend_from_slice(&envelope::escape(server.name.as_str()));
            result.extend_from_slice(b",\"version\":\"unknown\"}");
        }
    }
    if let Some(instructions) = part(envelope::member(discovered, &whole, "instructions")) {
        result.extend_from_slice(b",\"instructions\":");
        result.extend_from_slice(instructions);
    }
    result.push(b'}');
    Opened { result: Bytes::from(result), version: version.as_str().into() }
}

/// The capabilities of a legacy client as a modern server may know them: what the gateway can't translate is left out.
pub(super) fn modern_capabilities(params: &[u8]) -> Bytes {
    let capabilities = envelope::member(params, &(0..params.len()), "capabilities");
    match capabilities.filter(|span| params[span.start] == b'{') {
        Some(span) => Bytes::from(without(&params[span])),
        None => Bytes::from_static(b"{}"),
    }
}

/// The raw `clientInfo` of a client whose `initialize` had `params`.
pub(super) fn client_info(params: &[u8]) -> Option<Bytes> {
    let span = envelope::member(params, &(0..params.len()), "clientInfo")?;
    (params[span.start] == b'{').then(|| Bytes::copy_from_slice(&params[span]))
}

/// Tasks have two dialects, which are not translated, and extensions are agreed on between peers of one era.
fn without(capabilities: &[u8]) -> Vec<u8> {
    let changes = [("tasks", Change::Remove), ("extensions", Change::Remove)];
    let edits = edit::object(capabilities, &(0..capabilities.len()), &changes);
    edit::apply(capabilities, edits)
}

/// The revision that the client offered; the newest legacy one if that is not one of them.
fn offered(params: &[u8]) -> Version {
    let span = envelope::member(params, &(0..params.len()), "protocolVersion");
    let text = span.and_then(|span| envelope::unescape(&params[span]));
    text.and_then(|text| Version::parse(&text)).unwrap_or(Version::LATEST)
}

#[cfg(test)]
mod tests {
    use mainstay_core::id::ServerName;

    use super::*;
    use crate::server::{Reach, Transport};

    #[test]
    fn e1_initialize_is_answered_from_what_a_modern_server_says_of_itself() {
        let reach = Reach::Http {
            url: http::Uri::from_static("http://a/mcp"),
            transport: Transport::Auto,
            headers: Vec::new(),
        };
        let server = Server::new(ServerName::parse("srv").expect("a name"), reach);
        let shown = |params: &str, discovered: &str| {
            let opened = opened(&server, params.as_bytes(), discovered.as_bytes());
            (String::from_utf8_lossy(&opened.result).into_owned(), opened.version)
        };
        let discovered = r#"{"resultType":"complete","supportedVersions":["2026-07-28"],"instructions":"do \u0061",
            "capabilities":{"extensions":{"io.modelcontextprotocol/tasks":{}},"tools":{"listChanged":true}, "x":1.0},
            "ttlMs":1,"cacheScope":"public","_meta":{"io.modelcontextprotocol/serverInfo":{"name":"m","version":"2"}}}"#;
        assert_eq!(
            shown(r#"{"protocolVersion":"2025-06-18"}"#, discovered),
            (
                r#"{"protocolVersion":"2025-06-18","capabilities":{"tools":{"listChanged":true}, "x":1.0},"serverInfo":{"name":"m","version":"2"},"instructions":"do \u0061"}"#.to_owned(),
                "2025-06-18".into()
            )
        );
        assert_eq!(
            shown(r#"{"protocolVersion":"2026-07-28"}"#, "{}"),
            (
                r#"{"protocolVersion":"2025-11-25","capabilities":{},"serverInfo":{"name":"srv","version":"unknown"}}"#
                    .to_owned(),
                "2025-11-25".into()
            )
        );
    }

    #[test]
    fn e1_what_is_not_translated_is_not_declared_for_a_client() {
        let params = br#"{"capabilities":{"roots":{},"tasks":{"list":{}},"extensions":{"x":{}},"sampling":{"tools":{}}},"clientInfo":{"name":"c"}}"#;
        assert_eq!(modern_capabilities(params), r#"{"roots":{},"sampling":{"tools":{}}}"#);
        assert_eq!(client_info(params).as_deref(), Some(&br#"{"name":"c"}"#[..]));
        assert_eq!((modern_capabilities(b"{}"), client_info(b"{}")), (Bytes::from_static(b"{}"), None));
    }
}
