//! The MCP server behind every target: it answers at once, or after as long as the call says, and does nothing else.

use memchr::memmem;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What becomes of a message.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// It was a notification.
    Nothing,
    /// The answer to `initialize`; over HTTP it opens a session.
    Opened(Vec<u8>),
    /// An answer, and how long it takes.
    After(Duration, Vec<u8>),
}

/// Answers one message. It is scanned and not parsed: only the benchmark and the gateway write these, and both put the
/// members in this order.
pub(crate) fn reply(message: &[u8]) -> Reply {
    let head = message.get(..HEAD_BYTES).unwrap_or(message);
    let Some(id) = value(head, b"\"id\":") else {
        return Reply::Nothing;
    };
    match value(head, b"\"method\":") {
        Some(b"\"initialize\"") => Reply::Opened(answer(id, &[INITIALIZED])),
        Some(b"\"tools/call\"") => {
            let (bytes, wait) = (number(head, b"\"bytes\":"), number(head, b"\"ms\":"));
            let text = vec![b'x'; usize::try_from(bytes).unwrap_or(0).min(TEXT_BYTES_MAX)];
            let result = answer(id, &[br#"{"content":[{"type":"text","text":""#, &text, br#""}],"isError":false}"#]);
            Reply::After(Duration::from_millis(wait.min(WAIT_MS_MAX)), result)
        }
        Some(b"\"tools/list\"") => Reply::After(Duration::ZERO, answer(id, &[br#"{"tools":[]}"#])),
        Some(b"\"ping\"") => Reply::After(Duration::ZERO, answer(id, &[b"{}"])),
        Some(_) => {
            let refused: &[u8] = br#","error":{"code":-32601,"message":"no such method"}}"#;
            Reply::After(Duration::ZERO, [br#"{"jsonrpc":"2.0","id":"#, id, refused].concat())
        }
        None => Reply::Nothing,
    }
}

/// The id of the next session.
pub(crate) fn next_session() -> String {
    static LAST: AtomicU64 = AtomicU64::new(0);
    format!("bench-{:016x}", LAST.fetch_add(1, Ordering::Relaxed) + 1)
}

fn answer(id: &[u8], result: &[&[u8]]) -> Vec<u8> {
    let mut whole = Vec::with_capacity(64 + id.len() + result.iter().map(|part| part.len()).sum::<usize>());
    whole.extend_from_slice(br#"{"jsonrpc":"2.0","id":"#);
    whole.extend_from_slice(id);
    whole.extend_from_slice(br#","result":"#);
    result.iter().for_each(|part| whole.extend_from_slice(part));
    whole.push(b'}');
    whole
}

/// The text of a string or number behind a name.
fn value<'a>(head: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let from = memmem::find(head, name)? + name.len();
    let rest = head.get(from..)?.trim_ascii_start();
    let end = match rest.first()? {
        b'"' => memchr::memchr(b'"', rest.get(1..)?)? + 2,
        _ => memchr::memchr2(b',', b'}', rest)?,
    };
    rest.get(..end).map(<[u8]>::trim_ascii_end)
}

fn number(head: &[u8], name: &[u8]) -> u64 {
    let text = value(head, name).and_then(|text| std::str::from_utf8(text).ok());
    text.and_then(|text| text.parse().ok()).unwrap_or(0)
}

const INITIALIZED: &[u8] =
    br#"{"protocolVersion":"2025-11-25","capabilities":{"tools":{}},"serverInfo":{"name":"bench","version":"1"}}"#;
/// Where a message says what it is; the text of a call comes behind.
const HEAD_BYTES: usize = 1024;
const TEXT_BYTES_MAX: usize = 8 * 1024 * 1024;
const WAIT_MS_MAX: u64 = 10_000;

#[cfg(test)]
mod tests {
    use super::{Reply, reply};
    use std::time::Duration;

    #[test]
    fn calls_are_answered_under_their_id_and_with_as_much_as_they_ask_for() {
        for id in ["7", "\"m:1:7\""] {
            let call = format!(
                r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{"name":"echo","arguments":{{"bytes":3,"ms":20,"text":"abc"}}}}}}"#
            );
            let Reply::After(wait, answer) = reply(call.as_bytes()) else {
                panic!("a call has an answer");
            };
            assert_eq!(wait, Duration::from_millis(20));
            let answer: serde_json::Value = serde_json::from_slice(&answer).unwrap();
            assert_eq!(answer["id"].to_string(), id);
            assert_eq!(answer["result"]["content"][0]["text"], "xxx");
        }
    }

    #[test]
    fn what_is_no_call_is_answered_as_a_server_must() {
        assert_eq!(reply(br#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#), Reply::Nothing);
        let Reply::Opened(answer) = reply(br#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{}}"#) else {
            panic!("it opens a session");
        };
        assert!(serde_json::from_slice::<serde_json::Value>(&answer).unwrap()["result"]["capabilities"].is_object());
        let Reply::After(_, answer) = reply(br#"{"jsonrpc":"2.0","id":1,"method":"server/discover"}"#) else {
            panic!("it is refused");
        };
        assert_eq!(serde_json::from_slice::<serde_json::Value>(&answer).unwrap()["error"]["code"], -32601);
    }
}
