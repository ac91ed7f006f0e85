//! The tools of a modern server, as far as they bear on the way there: which of their arguments stand in headers, and
//! which of them may not be offered over HTTP at all (2026-07-28, Streamable HTTP, Custom Headers from Tool Parameters).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use http::{HeaderMap, HeaderName, HeaderValue};
use mainstay_core::wire::envelope::{self, Envelope, Span, walk};
use mainstay_core::wire::modern::annotation::{self, Annotation};
use mainstay_core::wire::modern::edit::Edits;
use mainstay_core::wire::modern::header;

use crate::server::Server;
use crate::wire::lock;

/// The tools of one server that have annotations. Lists don't vary by connection, so all sessions share it.
#[derive(Debug, Default)]
pub(crate) struct Annotated {
    tools: Mutex<Tools>,
    /// One look at the server's list at a time, for all whose headers were refused.
    pub(super) refreshing: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct Tools {
    by_name: BTreeMap<Box<str>, Arc<[Annotation]>>,
    /// How often the list was read from its beginning.
    readings: u64,
}

impl Annotated {
    /// Takes in a page of the list; the first one replaces what was known.
    pub(super) fn observe(&self, page: Vec<Tool>, first: bool) {
        let mut tools = lock(&self.tools);
        if first {
            tools.by_name.clear();
            tools.readings += 1;
        }
        for tool in page {
            if tools.by_name.len() < TOOLS_MAX {
                tools.by_name.insert(tool.name, tool.annotations);
            }
        }
    }

    /// How often the list was read: who was refused before it was read again need not read it for that.
    pub(super) fn readings(&self) -> u64 {
        lock(&self.tools).readings
    }

    /// The headers of the annotated arguments of the `tools/call` `message`.
    pub(super) fn headers(&self, message: &[u8], scanned: &Envelope) -> HeaderMap {
        let mut headers = HeaderMap::new();
        let Some(params) = &scanned.params else { return headers };
        let Some(arguments) = envelope::member(message, params, "arguments") else { return headers };
        let name = envelope::member(message, params, "name").and_then(|span| envelope::unescape(&message[span]));
        let annotations = name.and_then(|name| lock(&self.tools).by_name.get(&*name).cloned());
        for annotation in annotations.as_deref().unwrap_or_default() {
            let text = annotation.value(message, &arguments).and_then(|span| header::text_of(&message[span]));
            let Some(text) = text else { continue };
            let pair = HeaderName::from_bytes(annotation.header().as_bytes())
                .ok()
                .zip(HeaderValue::from_str(&header::encode(&text)).ok());
            if let Some((name, mut value)) = pair {
                value.set_sensitive(true);
                headers.insert(name, value);
            }
        }
        headers
    }
}

/// A tool with annotations.
pub(super) struct Tool {
    name: Box<str>,
    annotations: Arc<[Annotation]>,
}

/// What a `tools/list` result has.
pub(super) struct Page {
    pub(super) annotated: Vec<Tool>,
    /// Edits that take out the tools that may not be offered.
    pub(super) edits: Edits,
    /// The raw cursor of the next page.
    pub(super) next: Option<Span>,
}

/// Reads the result at `result` of `message`. Tools whose annotations are not valid are taken out, and the operator is
/// told.
pub(super) fn read(server: &Server, message: &[u8], result: &Span) -> Page {
    let next =
        envelope::member(message, result, "nextCursor").filter(|span| !envelope::is_null(&message[span.clone()]));
    let mut page = Page { annotated: Vec::new(), edits: Vec::new(), next };
    let Some(tools) = envelope::member(message, result, "tools") else { return page };
    let (mut last, mut kept) = (None, false);
    let mut elements = walk::elements(message, &tools).peekable();
    while let Some(tool) = elements.next() {
        let name = envelope::member(message, &tool, "name").and_then(|span| envelope::unescape(&message[span]));
        let schema = envelope::member(message, &tool, "inputSchema");
        let read = schema.map_or(Ok(Vec::new()), |schema| annotation::read(&message[schema]));
        match read {
            Ok(annotations) => {
                kept = true;
                if let Some(name) = name.filter(|_| !annotations.is_empty()) {
                    page.annotated.push(Tool { name: name.into(), annotations: annotations.into() });
                }
            }
            Err(error) => {
                let tool_name = name.as_deref().unwrap_or_default();
                tracing::warn!(server = %server.name, tool = tool_name, %error, "a tool is not offered: its annotations are not valid");
                // As with members of an object: the comma before it goes with it, or the one behind it.
                let start = last.filter(|_| kept).unwrap_or(tool.start);
                let end = if kept { tool.end } else { elements.peek().map_or(tool.end, |next| next.start) };
                page.edits.push((start..end, Vec::new()));
            }
        }
        last = Some(tool.end);
    }
    page
}

/// Annotated tools of one server that are remembered.
const TOOLS_MAX: usize = 4096;

#[cfg(test)]
mod tests {
    use mainstay_core::id::ServerName;
    use mainstay_core::wire::modern::edit;

    use super::*;
    use crate::server::{Reach, Transport};

    fn server() -> Server {
        let reach = Reach::Http {
            url: http::Uri::from_static("http://a/mcp"),
            transport: Transport::Auto,
            headers: Vec::new(),
        };
        Server::new(ServerName::parse("s").expect("a name"), reach)
    }

    #[test]
    fn e1_tools_that_may_not_be_offered_are_taken_out_of_a_list() {
        let bad = r#"{"name":"bad","inputSchema":{"properties":{"a":{"type":"number","x-mcp-header":"A"}}}}"#;
        let good = r#"{"name":"good","inputSchema":{"properties":{"a":{"type":"string","x-mcp-header":"A"}}}}"#;
        let plain = r#"{ "name" : "plain" }"#;
        for (tools, expected, names) in [
            (format!("[{bad},{good}, {plain}]"), format!("[{good}, {plain}]"), vec!["good"]),
            (format!("[{plain}, {bad} ,{good}]"), format!("[{plain} ,{good}]"), vec!["good"]),
            (format!("[{plain},{bad},{bad}]"), format!("[{plain}]"), vec![]),
            (format!("[ {bad} , {bad} ]"), "[  ]".to_owned(), vec![]),
            ("[]".to_owned(), "[]".to_owned(), vec![]),
        ] {
            let result = format!(r#"{{"tools":{tools},"nextCursor":"c"}}"#);
            let page = read(&server(), result.as_bytes(), &(0..result.len()));
            let found: Vec<_> = page.annotated.iter().map(|tool| &*tool.name).collect();
            assert_eq!(found, names);
            assert_eq!(page.next.map(|span| &result[span]), Some(r#""c""#));
            let edited = String::from_utf8(edit::apply(result.as_bytes(), page.edits)).expect("text");
            assert_eq!(edited, format!(r#"{{"tools":{expected},"nextCursor":"c"}}"#));
        }
    }

    #[test]
    fn e1_annotated_arguments_stand_in_headers_as_soon_as_the_list_was_seen() {
        let list = r#"{"tools":[{"name":"t","inputSchema":{"properties":{"n":{"type":"integer","x-mcp-header":"N"},
            "s":{"type":"string","x-mcp-header":"S"},"z":{"type":"string","x-mcp-header":"Z"}}}}]}"#;
        let call = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"t","arguments":{"n":4.0,"s":" x","z":null}}}"#;
        let scanned = envelope::scan(call.as_bytes()).expect("a message");
        let annotated = Annotated::default();
        assert!(annotated.headers(call.as_bytes(), &scanned).is_empty());
        annotated.observe(read(&server(), list.as_bytes(), &(0..list.len())).annotated, true);
        let headers = annotated.headers(call.as_bytes(), &scanned);
        assert_eq!((headers.len(), annotated.readings()), (2, 1));
        assert_eq!(headers["mcp-param-n"], "4");
        assert_eq!(headers["mcp-param-s"], "=?base64?IHg=?=");
        annotated.observe(Vec::new(), true);
        assert!(annotated.headers(call.as_bytes(), &scanned).is_empty());
    }
}
