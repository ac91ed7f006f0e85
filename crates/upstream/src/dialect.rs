//! How servers say that they forgot a session (U4).
//!
//! The specification knows one way: HTTP 404 to a request that carries the id (2025-11-25, Transports, Session
//! Management). Servers in the field know a dozen. They stand in one table, [`DIALECTS`], and one pure function reads
//! it. Nothing counts as a loss unless a session id was sent: a 404 to a request without one is a wrong URL.

use std::borrow::Cow;

use mainstay_core::wire::envelope::{self, Kind};
use mainstay_core::wire::sse::SseDecoder;

/// What was seen of a response that is not plainly the answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen<'a> {
    /// The HTTP status.
    pub(crate) status: u16,
    /// Whether it carried a `WWW-Authenticate` header.
    pub(crate) challenge: bool,
    /// Its body, or the beginning of it.
    pub(crate) body: &'a [u8],
}

/// What a response means for the request and its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// A JSON-RPC answer to the request, whatever the status says.
    Answer,
    /// The server does not know the session. The request was refused before it was executed.
    SessionLost(&'static str),
    /// Perhaps the session, perhaps the request: one `ping` with the session decides.
    Suspect,
    /// Credentials are missing or refused.
    Unauthorized,
    /// No session id was sent and there is no endpoint: a wrong URL.
    NoEndpoint,
    /// The server is not there for now.
    Unavailable,
    /// Refused for another reason.
    Refused,
}

/// One way of saying that a session is unknown.
struct Dialect {
    statuses: &'static [u16],
    codes: Codes,
    speech: Speech,
    reason: &'static str,
}

/// Which JSON-RPC error codes the body must have.
enum Codes {
    /// One of these.
    Of(&'static [i64]),
    /// One of these, or the body is no JSON-RPC error at all.
    OfOrNone(&'static [i64]),
    /// Whatever the body is.
    Any,
}

/// What the text (the error's message, or the body) must say.
#[derive(Clone, Copy)]
enum Speech {
    /// Nothing in particular.
    Silent,
    /// It speaks of the session or of a missing handshake.
    OfSession,
    /// It says that the session is unknown or over. Demanded where an ordinary error could mention a session.
    OfLoss,
}

/// The codes that servers use for it: TypeScript -32000 and -32001, Python -32600, others -32004.
const SESSION_CODES: &[i64] = &[-32000, -32001, -32004, -32600];

/// Every dialect, most specific first. A 401 with a challenge never gets here: it is authentication.
const DIALECTS: &[Dialect] = &[
    Dialect { statuses: &[404], codes: Codes::OfOrNone(SESSION_CODES), speech: Speech::Silent, reason: "404" },
    Dialect { statuses: &[404], codes: Codes::Any, speech: Speech::OfLoss, reason: "404" },
    Dialect { statuses: &[410], codes: Codes::Any, speech: Speech::Silent, reason: "410" },
    Dialect { statuses: &[400], codes: Codes::OfOrNone(SESSION_CODES), speech: Speech::OfSession, reason: "400" },
    Dialect { statuses: &[422], codes: Codes::OfOrNone(SESSION_CODES), speech: Speech::OfSession, reason: "422" },
    Dialect { statuses: &[401], codes: Codes::Any, speech: Speech::OfSession, reason: "401 without challenge" },
    Dialect { statuses: &[503], codes: Codes::Of(&[-32001]), speech: Speech::Silent, reason: "503" },
    Dialect { statuses: &[503], codes: Codes::Any, speech: Speech::OfLoss, reason: "503" },
    Dialect { statuses: &[500], codes: Codes::Any, speech: Speech::OfLoss, reason: "500" },
    Dialect {
        statuses: &[200],
        codes: Codes::Of(&[-32600, -32004, -32001]),
        speech: Speech::OfLoss,
        reason: "200 with an error",
    },
];

/// What `seen` means. `sent_id`: whether the request carried a session id. `call_id`: the raw id of the request, if it
/// was one.
pub(crate) fn classify(seen: &Seen<'_>, sent_id: bool, call_id: Option<&[u8]>) -> Verdict {
    if seen.status == 401 && seen.challenge {
        return Verdict::Unauthorized;
    }
    let said = Said::read(seen.body);
    if sent_id && let Some(dialect) = DIALECTS.iter().find(|dialect| dialect.fits(seen.status, &said)) {
        return Verdict::SessionLost(dialect.reason);
    }
    let answers = said.error.as_ref().is_some_and(|error| error.answers(call_id));
    match seen.status {
        401 => Verdict::Unauthorized,
        404 if !sent_id && !answers => Verdict::NoEndpoint,
        429 | 502 | 503 | 504 => Verdict::Unavailable,
        500 if sent_id => Verdict::Suspect,
        _ if answers => Verdict::Answer,
        _ => Verdict::Refused,
    }
}

/// Whether the response to a probing `ping` says that the session is unknown: a recognised dialect, or the same 500 again.
pub(crate) fn probe_lost(seen: &Seen<'_>) -> bool {
    match classify(seen, true, None) {
        Verdict::SessionLost(_) | Verdict::Suspect => true,
        Verdict::Answer | Verdict::Unauthorized | Verdict::NoEndpoint | Verdict::Unavailable | Verdict::Refused => {
            false
        }
    }
}

/// The answer in `body` if it is a JSON-RPC error, with the request's own id in place of a missing one. Error answers
/// with a foreign or null id are not seen by common clients (`clients.md`).
pub(crate) fn answer_with_id(body: &[u8], call_id: &[u8]) -> Option<Vec<u8>> {
    let message = first_message(body)?;
    let envelope = envelope::scan(&message).ok()?;
    if envelope.kind != Kind::Error {
        return None;
    }
    let error = message.get(envelope.error?)?;
    match envelope.id {
        Some(id) => Some(envelope::splice(&message, &[(id, call_id)])),
        None => {
            let mut answer = envelope::result_message(call_id, error);
            // `result` and `error` messages differ in the member's name only, and the id is written first.
            let head = answer.len() - error.len() - b"\"result\":}".len();
            answer.splice(head..head + b"\"result\"".len(), b"\"error\"".iter().copied());
            Some(answer)
        }
    }
}

impl Dialect {
    fn fits(&self, status: u16, said: &Said<'_>) -> bool {
        let code = said.error.as_ref().map(|error| error.code);
        let code_fits = match self.codes {
            Codes::Any => true,
            Codes::Of(codes) => code.is_some_and(|code| codes.contains(&code)),
            Codes::OfOrNone(codes) => code.is_none_or(|code| codes.contains(&code)),
        };
        self.statuses.contains(&status) && code_fits && said.speaks(self.speech)
    }
}

/// What a body says, as far as it matters here.
struct Said<'a> {
    /// In lower case.
    text: String,
    error: Option<RpcError<'a>>,
}

struct RpcError<'a> {
    code: i64,
    /// The raw id; `None` if it is absent or null.
    id: Option<Cow<'a, [u8]>>,
}

impl<'a> Said<'a> {
    fn read(body: &'a [u8]) -> Self {
        let Some(message) = first_message(body) else { return Self::plain(body) };
        let Ok(envelope) = envelope::scan(&message) else { return Self::plain(body) };
        let Some(error) = envelope.error.filter(|_| envelope.kind == Kind::Error) else { return Self::plain(body) };
        let part = |name| envelope::member(&message, &error, name).and_then(|span| message.get(span));
        let code = part("code").and_then(|raw| std::str::from_utf8(raw).ok()).and_then(|text| text.parse().ok());
        let text = part("message").and_then(envelope::unescape).unwrap_or_default();
        let id = envelope.id.and_then(|span| message.get(span)).filter(|id| !envelope::is_null(id));
        let id = id.map(|id| Cow::Owned(id.to_vec()));
        Self { text: lower(text.as_bytes()), error: Some(RpcError { code: code.unwrap_or_default(), id }) }
    }

    fn plain(body: &[u8]) -> Self {
        Self { text: lower(body), error: None }
    }

    fn speaks(&self, speech: Speech) -> bool {
        let says = |words: &[&str]| words.iter().any(|word| self.text.contains(word));
        match speech {
            Speech::Silent => true,
            Speech::OfSession => says(SESSION_WORDS),
            Speech::OfLoss => says(HANDSHAKE_WORDS) || (says(&["session"]) && says(LOSS_WORDS)),
        }
    }
}

impl RpcError<'_> {
    /// Whether it answers the request `call_id`. An error without an id answers whatever it is the response to.
    fn answers(&self, call_id: Option<&[u8]>) -> bool {
        match (&self.id, call_id) {
            (None, Some(_)) => true,
            (Some(id), Some(call_id)) => crate::wire::same_id(id, call_id),
            (_, None) => false,
        }
    }
}

/// The JSON-RPC message in `body`: the body itself, or the first data of an event stream.
fn first_message(body: &[u8]) -> Option<Cow<'_, [u8]>> {
    match body.iter().find(|byte| !byte.is_ascii_whitespace())? {
        b'{' => Some(Cow::Borrowed(body)),
        b'e' | b'd' | b'i' | b':' | 0xef => {
            let mut decoder = SseDecoder::new(body.len());
            decoder.push(body);
            // A server that dies at once may not have sent the blank line that ends the event.
            decoder.push(b"\n\n");
            for _ in 0..EVENTS_READ_MAX {
                let event = decoder.next_event().ok()??;
                if let Some(data) = event.data.filter(|data| !data.is_empty()) {
                    return Some(Cow::Owned(data.to_vec()));
                }
            }
            None
        }
        _ => None,
    }
}

fn lower(text: &[u8]) -> String {
    String::from_utf8_lossy(&text[..text.len().min(TEXT_BYTES_MAX)]).to_lowercase()
}

const SESSION_WORDS: &[&str] = &["session", "not initialized", "uninitialized", "initialize request"];
const HANDSHAKE_WORDS: &[&str] = &["server not initialized", "expect initialize request"];
const LOSS_WORDS: &[&str] = &[
    "not found",
    "unknown",
    "no such",
    "expired",
    "invalid",
    "no valid",
    "not valid",
    "terminated",
    "closed",
    "lost",
    "does not exist",
    "doesn't exist",
    "no longer",
    "missing",
    "gone",
    "unrecognized",
    "not exist",
];
const TEXT_BYTES_MAX: usize = 4096;
const EVENTS_READ_MAX: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    const CALL: &[u8] = br#""7.3.1""#;

    fn verdict(status: u16, body: &str) -> Verdict {
        classify(&Seen { status, challenge: false, body: body.as_bytes() }, true, Some(CALL))
    }

    /// Bodies of real servers: (status, body).
    const LOSSES: &[(u16, &str)] = &[
        // TypeScript SDK 1.x, and 2.x with its own id.
        (404, r#"{"jsonrpc":"2.0","error":{"code":-32001,"message":"Session not found"},"id":null}"#),
        // Python SDK.
        (404, r#"{"jsonrpc":"2.0","id":"server-error","error":{"code":-32600,"message":"Session not found"}}"#),
        (
            404,
            r#"{"jsonrpc":"2.0","id":"server-error","error":{"code":-32600,"message":"Not Found: Session has been terminated"}}"#,
        ),
        // rmcp.
        (404, "Not Found: Session not found"),
        (404, ""),
        (404, "<html><body>404</body></html>"),
        (410, ""),
        (410, r#"{"jsonrpc":"2.0","error":{"code":-32000,"message":"Gone"},"id":null}"#),
        // server-everything.
        (
            400,
            r#"{"jsonrpc":"2.0","error":{"code":-32000,"message":"Bad Request: No valid session ID provided"},"id":null}"#,
        ),
        (400, r#"{"jsonrpc":"2.0","error":{"code":-32000,"message":"Bad Request: Server not initialized"},"id":null}"#),
        (
            400,
            "event: message\ndata: {\"jsonrpc\":\"2.0\",\"error\":{\"code\":-32000,\"message\":\"Bad Request: No valid session ID provided\"},\"id\":null}\n\n",
        ),
        (400, "data: {\"jsonrpc\":\"2.0\",\"error\":{\"code\":-32000,\"message\":\"No valid session\"},\"id\":null}"),
        (400, "Invalid session ID"),
        // rmcp before 3.6.
        (401, "Unauthorized: Session not found"),
        (422, "Unexpected message, expect initialize request"),
        (503, r#"{"jsonrpc":"2.0","error":{"code":-32001,"message":"Service unavailable"},"id":null}"#),
        (500, r#"{"jsonrpc":"2.0","error":{"code":-32603,"message":"session does not exist"},"id":null}"#),
        (200, r#"{"jsonrpc":"2.0","error":{"code":-32600,"message":"Session terminated"},"id":"7.3.1"}"#),
        (200, r#"{"jsonrpc":"2.0","id":"7.3.1","error":{"code":-32004,"message":"Unknown session"}}"#),
    ];

    #[test]
    fn u4_every_dialect_of_a_lost_session_is_recognised() {
        for (status, body) in LOSSES {
            assert!(matches!(verdict(*status, body), Verdict::SessionLost(_)), "{status} {body}");
        }
    }

    #[test]
    fn u4_nothing_is_a_loss_unless_an_id_was_sent() {
        for (status, body) in LOSSES {
            let seen = Seen { status: *status, challenge: false, body: body.as_bytes() };
            assert!(!matches!(classify(&seen, false, Some(CALL)), Verdict::SessionLost(_)), "{status} {body}");
        }
        let wrong_url = Seen { status: 404, challenge: false, body: b"nothing here" };
        assert_eq!(classify(&wrong_url, false, Some(CALL)), Verdict::NoEndpoint);
    }

    #[test]
    fn u4_a_challenge_is_authentication_whatever_the_body_says() {
        let seen = Seen { status: 401, challenge: true, body: b"Session not found" };
        assert_eq!(classify(&seen, true, Some(CALL)), Verdict::Unauthorized);
        assert_eq!(verdict(401, "no"), Verdict::Unauthorized);
    }

    #[test]
    fn ac_03_errors_that_answer_the_call_are_passed_on() {
        for (status, body) in [
            (200, r#"{"jsonrpc":"2.0","id":"7.3.1","error":{"code":-32602,"message":"Invalid session_name"}}"#),
            (200, r#"{"jsonrpc":"2.0","id":"7.3.1","error":{"code":-32000,"message":"browser session not found"}}"#),
            (200, r#"{"jsonrpc":"2.0","id":"7.3.1","error":{"code":-32600,"message":"Invalid Request"}}"#),
            (400, r#"{"jsonrpc":"2.0","id":"7.3.1","error":{"code":-32602,"message":"unknown tool"}}"#),
            (400, r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"Parse error"}}"#),
            (404, r#"{"jsonrpc":"2.0","id":"7.3.1","error":{"code":-32601,"message":"Method not found"}}"#),
        ] {
            assert_eq!(verdict(status, body), Verdict::Answer, "{status} {body}");
        }
    }

    #[test]
    fn other_statuses_keep_their_meaning() {
        for (status, body, expected) in [
            (500, "Internal Server Error", Verdict::Suspect),
            (502, "<html>", Verdict::Unavailable),
            (503, "try later", Verdict::Unavailable),
            (504, "", Verdict::Unavailable),
            (429, "", Verdict::Unavailable),
            (400, "bad request", Verdict::Refused),
            (403, "", Verdict::Refused),
            (405, "", Verdict::Refused),
            (413, "", Verdict::Refused),
            (307, "", Verdict::Refused),
        ] {
            assert_eq!(verdict(status, body), expected, "{status} {body}");
        }
    }

    #[test]
    fn s13a_an_error_gets_the_id_of_its_request() {
        for body in [
            r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"x"}}"#,
            r#"{"jsonrpc":"2.0","error":{"code":-32700,"message":"x"}}"#,
            r#"{"jsonrpc":"2.0","id":"server-error","error":{"code":-32700,"message":"x"}}"#,
        ] {
            let answer = answer_with_id(body.as_bytes(), CALL).expect("it is an error");
            let envelope = envelope::scan(&answer).expect("it is a message");
            assert_eq!(envelope.kind, Kind::Error);
            assert_eq!(&answer[envelope.id.expect("it has an id")], CALL);
            assert_eq!(&answer[envelope.error.expect("an error")], br#"{"code":-32700,"message":"x"}"#);
        }
        assert_eq!(answer_with_id(br#"{"jsonrpc":"2.0","id":1,"result":{}}"#, CALL), None);
    }
}
