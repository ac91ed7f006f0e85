//! Whose answer it was that was too large to be kept (AC-08).

use mainstay_core::wire::envelope;

/// What a line of which only the ends are known was.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Lost {
    /// The answer to the request with this id, by its text.
    AnswerTo(Box<str>),
    /// A notification or a request.
    Unasked,
    /// Nobody can tell.
    Unknown,
}

/// Reads what it can of the line. `is_pending` tells whether a call with that id waits, which guards against an `id` that
/// is part of the payload.
pub(super) fn identify(head: &[u8], tail: &[u8], is_pending: impl Fn(&str) -> bool) -> Lost {
    let head = head.trim_ascii_start();
    // What stands before the large member is whole, and so found as in a whole message.
    let member = |key| envelope::member(head, &(0..head.len()), key).and_then(|span| head.get(span));
    if member("method").is_some() {
        return Lost::Unasked;
    }
    if let Some(id) = member("id").map(crate::wire::id_text).filter(|id| is_pending(id)) {
        return Lost::AnswerTo(id.into());
    }
    last_id(tail).filter(|id| is_pending(id)).map_or(Lost::Unknown, Lost::AnswerTo)
}

/// The string value of the last `"id":` in `tail`.
fn last_id(tail: &[u8]) -> Option<Box<str>> {
    let at = tail.windows(KEY.len()).rposition(|window| window == KEY)?;
    let rest = tail[at + KEY.len()..].trim_ascii_start().strip_prefix(b":")?.trim_ascii_start();
    // A string ends at the first quote that is not escaped.
    let mut escaped = false;
    let end = rest.iter().skip(1).position(|&byte| {
        let ends = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    })?;
    envelope::unescape(rest.get(..end + 2)?).map(|text| text.as_ref().into())
}

const KEY: &[u8] = b"\"id\"";

#[cfg(test)]
mod tests {
    use super::*;

    fn lost(head: &str, tail: &str) -> Lost {
        identify(head.as_bytes(), tail.as_bytes(), |id| id == "1.2.\"a\"" || id == "1.3.7")
    }

    #[test]
    fn ac_08_the_call_is_found_at_either_end() {
        let answer = Lost::AnswerTo("1.2.\"a\"".into());
        assert_eq!(
            lost(r#" {"jsonrpc":"2.0","id":"1.2.\"a\"","result":{"content":[{"id":"1.3.7","te"#, "xxx\"}]}}"),
            answer
        );
        assert_eq!(
            lost(r#"{"result":{"content":"xxxx"#, r#"xx"},"jsonrpc":"2.0","id" : "1.2.\u0022a\u0022"}"#),
            answer
        );
        assert_eq!(
            lost(r#"{"jsonrpc":"2.0","result":{"xx"#, r#""id":"9"}],"id":"1.3.7"}"#),
            Lost::AnswerTo("1.3.7".into())
        );
    }

    #[test]
    fn ac_08_what_is_no_answer_of_a_pending_call_is_told_apart() {
        assert_eq!(
            lost(r#"{"jsonrpc":"2.0","method":"notifications/message","params":{"id":"1.3.7"#, "}}"),
            Lost::Unasked
        );
        assert_eq!(lost(r#"{"jsonrpc":"2.0","id":"5","result":{"#, "}}"), Lost::Unknown);
        assert_eq!(lost("garbage", r#"garbage"id":"1"#), Lost::Unknown);
    }
}
