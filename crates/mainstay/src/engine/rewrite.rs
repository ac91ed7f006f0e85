//! What the gateway changes in a message on its way: ids, progress tokens, and a notice in `_meta`. Nothing else.

use bytes::Bytes;
use mainstay_core::call::RoutedId;
use mainstay_core::wire::envelope::{Envelope, Span, member, splice};

/// A client's request as it goes to the server: its id and progress token dressed with their stream (R1a, C10).
pub struct Outgoing {
    /// The raw id in `message`.
    pub id: Bytes,
    /// The request.
    pub message: Bytes,
}

/// Dresses `message`, whose envelope is `envelope`, for the server.
pub fn to_server(message: &Bytes, envelope: &Envelope, id: &RoutedId) -> Outgoing {
    let encoded = Bytes::from(id.encode());
    let token_span = progress_token(message, envelope);
    let token = token_span.clone().map(|span| {
        let original = message.slice(span);
        RoutedId { stream: id.stream, original }.encode()
    });
    let mut edits: Vec<(Span, &[u8])> = Vec::with_capacity(2);
    edits.extend(envelope.id.clone().map(|span| (span, encoded.as_ref())));
    edits.extend(token_span.zip(token.as_deref()));
    edits.sort_by_key(|(span, _)| span.start);
    let message = splice(message, &edits).into();
    Outgoing { id: encoded, message }
}

/// A server's response as it goes to the client: under the client's own id.
pub fn to_client(message: &Bytes, envelope: &Envelope, original: &[u8]) -> Bytes {
    spliced(message, envelope, original, None)
}

/// The same with a notice in its `_meta` (U6); `None` if it has no result that could carry one.
pub fn to_client_with(message: &Bytes, envelope: &Envelope, original: &[u8], notice: &[u8]) -> Option<Bytes> {
    let noticed = place_notice(message, envelope.result.as_ref()?, notice)?;
    Some(spliced(message, envelope, original, Some(noticed)))
}

fn spliced(message: &Bytes, envelope: &Envelope, original: &[u8], noticed: Option<(Span, Vec<u8>)>) -> Bytes {
    let mut edits: Vec<(Span, &[u8])> = Vec::with_capacity(2);
    edits.extend(envelope.id.clone().map(|span| (span, original)));
    edits.extend(noticed.as_ref().map(|(span, text)| (span.clone(), text.as_slice())));
    edits.sort_by_key(|(span, _)| span.start);
    splice(message, &edits).into()
}

/// The raw progress token of a request: `params._meta.progressToken`.
fn progress_token(message: &[u8], envelope: &Envelope) -> Option<Span> {
    let meta = member(message, envelope.params.as_ref()?, "_meta")?;
    member(message, &meta, "progressToken")
}

/// Where in `result`, and as what bytes, the member `"mainstay/notice": notice` goes in.
fn place_notice(message: &[u8], result: &Span, notice: &[u8]) -> Option<(Span, Vec<u8>)> {
    let meta = member(message, result, "_meta");
    // A `_meta` that is no object stays as it is: a second one would make the result ambiguous.
    let object = meta.as_ref().unwrap_or(result);
    let inside = message.get(object.start).filter(|&&byte| byte == b'{').map(|_| object.start + 1)?;
    let rest = message.get(inside..object.end)?;
    let empty = rest.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'}');
    let mut text = Vec::with_capacity(notice.len() + 32);
    if meta.is_none() {
        text.extend_from_slice(b"\"_meta\":{");
    }
    text.extend_from_slice(b"\"mainstay/notice\":");
    text.extend_from_slice(notice);
    if meta.is_none() {
        text.push(b'}');
    }
    if !empty {
        text.push(b',');
    }
    Some((inside..inside, text))
}

#[cfg(test)]
mod tests {
    use mainstay_core::call::StreamId;
    use mainstay_core::wire::envelope::scan;

    use super::*;

    fn answered(message: &str, notice: Option<&str>) -> String {
        let message = Bytes::copy_from_slice(message.as_bytes());
        let envelope = scan(&message).expect("a message");
        let noticed = notice.and_then(|notice| to_client_with(&message, &envelope, b"7", notice.as_bytes()));
        let answer = noticed.unwrap_or_else(|| to_client(&message, &envelope, b"7"));
        String::from_utf8(answer.to_vec()).expect("text")
    }

    #[test]
    fn u6_a_notice_goes_into_meta_and_nothing_else_changes() {
        let id = r#""9.1.7""#;
        for (result, expected) in [
            ("{}", r#"{"_meta":{"mainstay/notice":1}}"#),
            (r#"{ "a" : 1.0 }"#, r#"{"_meta":{"mainstay/notice":1}, "a" : 1.0 }"#),
            (r#"{"_meta":{},"x":[]}"#, r#"{"_meta":{"mainstay/notice":1},"x":[]}"#),
            (r#"{"x":2,"_meta":{"k":1}}"#, r#"{"x":2,"_meta":{"mainstay/notice":1,"k":1}}"#),
            ("[1]", "[1]"),
            (r#"{"_meta":null}"#, r#"{"_meta":null}"#),
        ] {
            let message = format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{result},"z":1e5}}"#);
            let wanted = format!(r#"{{"jsonrpc":"2.0","id":7,"result":{expected},"z":1e5}}"#);
            assert_eq!(answered(&message, Some("1")), wanted);
        }
        assert_eq!(
            answered(r#"{"jsonrpc":"2.0","error":{"code":-1,"message":""},"id":"9.1.7"}"#, Some("1")),
            r#"{"jsonrpc":"2.0","error":{"code":-1,"message":""},"id":7}"#,
        );
    }

    #[test]
    fn r1a_a_request_is_dressed_and_its_payload_kept() {
        let message = Bytes::from_static(
            br#"{"params":{"_meta":{"x":1,"progressToken":"t\"1"},"name":"n","arguments":{"v":1.0}},"id":"a","jsonrpc":"2.0","method":"tools/call"}"#,
        );
        let envelope = scan(&message).expect("a message");
        let id = RoutedId { stream: StreamId { epoch: 3, number: 5 }, original: Bytes::from_static(b"\"a\"") };
        let outgoing = to_server(&message, &envelope, &id);
        assert_eq!(
            outgoing.message,
            br#"{"params":{"_meta":{"x":1,"progressToken":"3.5.\"t\\\"1\""},"name":"n","arguments":{"v":1.0}},"id":"3.5.\"a\"","jsonrpc":"2.0","method":"tools/call"}"#.as_slice(),
        );
        assert_eq!(RoutedId::decode(&outgoing.id), Some(id));
    }
}
