//! What a legacy server asks its client, as the input that a modern client is asked for (2026-07-28, Multi Round-Trip
//! Requests).

use super::edit::{self, Change};
use super::{SERVER_INFO, crossing};
use crate::wire::envelope::{self, Envelope, Kind, Span, walk};
use crate::wire::method::Method;

/// A question of a server, as it stands in `inputRequests`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputRequest {
    /// The path of the capability that a client needs for it.
    pub needs: &'static [&'static str],
    /// Raw JSON: method and params.
    pub request: Vec<u8>,
}

impl InputRequest {
    /// That of the server's request `message`; `None` if it asks what no modern client is asked.
    pub fn of(message: &[u8], envelope: &Envelope) -> Option<Self> {
        let method = envelope.method_name(message).filter(|_| envelope.kind == Kind::Request)?;
        Self::made(&method, message, envelope.params.as_ref().filter(|span| message.get(span.start) == Some(&b'{')))
    }

    /// Those of the error `message` by which a server says that its client must visit addresses first (2025-11-25,
    /// Elicitation, URL Elicitation Required Error); `None` if it is another message.
    pub fn visits(message: &[u8], envelope: &Envelope) -> Option<Vec<Self>> {
        let error = envelope.error.as_ref()?;
        let part = |object: &Span, name| envelope::member(message, object, name);
        if message.get(part(error, "code")?)? != VISIT_FIRST {
            return None;
        }
        let asked = part(&part(error, "data")?, "elicitations")?;
        let elements = walk::elements(message, &asked).filter(|span| message.get(span.start) == Some(&b'{'));
        let visits: Vec<_> = elements.filter_map(|params| Self::made(ELICIT, message, Some(&params))).collect();
        (!visits.is_empty()).then_some(visits)
    }

    fn made(method: &str, message: &[u8], params: Option<&Span>) -> Option<Self> {
        let mode = params.and_then(|params| envelope::member(message, params, "mode"));
        let by_url = mode.is_some_and(|span| walk::says(&message[span], "url"));
        let needs = match method {
            ELICIT if by_url => ["elicitation", "url"].as_slice(),
            ELICIT => &["elicitation"],
            "sampling/createMessage" => &["sampling"],
            "roots/list" => &["roots"],
            _ => return None,
        };
        let mut request = [b"{\"method\":".as_slice(), &envelope::escape(method)].concat();
        if let Some(params) = params {
            // The legacy era names such a question by an id of its own, this one does not any more.
            let edits = edit::object(message, params, &[("elicitationId", Change::Remove)]);
            request.extend_from_slice(b",\"params\":");
            request.extend_from_slice(&crossing::slice_of(message, params, edits));
        }
        request.push(b'}');
        Some(Self { needs, request })
    }

    /// Whether a client that declares the raw `capabilities` can be asked. One that can be elicited at all can by a form.
    pub fn suits(&self, capabilities: &[u8]) -> bool {
        let found = self.needs.iter().try_fold(0..capabilities.len(), |at, name| {
            envelope::member(capabilities, &at, name).filter(|span| capabilities.get(span.start) == Some(&b'{'))
        });
        found.is_some()
    }
}

/// Whether a request of `method` may be answered by a wish for input (2026-07-28, Multi Round-Trip Requests).
pub const fn may_ask(method: Method) -> bool {
    matches!(method, Method::ToolsCall | Method::PromptsGet | Method::ResourcesRead)
}

/// The response to the request `id` that asks for input: `requests` by their keys, and the `state` that is to come back.
/// Without requests the client is only asked to come back.
pub fn response(id: &[u8], requests: &[(String, InputRequest)], state: &str, server_info: Option<&[u8]>) -> Vec<u8> {
    let mut result = b"{\"resultType\":\"input_required\"".to_vec();
    for (index, (key, asked)) in requests.iter().enumerate() {
        result.extend_from_slice(if index == 0 { b",\"inputRequests\":{" } else { b"," });
        result.extend_from_slice(&envelope::escape(key));
        result.push(b':');
        result.extend_from_slice(&asked.request);
    }
    if !requests.is_empty() {
        result.push(b'}');
    }
    result.extend_from_slice(b",\"requestState\":");
    result.extend_from_slice(&envelope::escape(state));
    if let Some(info) = server_info {
        result.extend_from_slice(b",\"_meta\":{");
        result.extend_from_slice(&envelope::escape(SERVER_INFO));
        result.push(b':');
        result.extend_from_slice(info);
        result.push(b'}');
    }
    result.push(b'}');
    envelope::result_message(id, &result)
}

/// The raw answer to the question `key` that a request brings; `None` if it brings none that is an object.
pub fn answer_to<'a>(message: &'a [u8], envelope: &Envelope, key: &str) -> Option<&'a [u8]> {
    let answers = envelope::member(message, envelope.params.as_ref()?, "inputResponses")?;
    message.get(envelope::member(message, &answers, key)?).filter(|answer| answer.starts_with(b"{"))
}

const ELICIT: &str = "elicitation/create";
/// The code of an error that no modern server gives any more.
const VISIT_FIRST: &[u8] = b"-32042";

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn asked(text: &str) -> Option<InputRequest> {
        InputRequest::of(text.as_bytes(), &envelope::scan(text.as_bytes()).expect("a message"))
    }

    #[test]
    fn e3_a_question_becomes_a_wish_for_input_that_suits_its_client_or_not() {
        for (method, params, needs, able, unable) in [
            (
                "elicitation/create",
                r#","params":{"message":"m","requestedSchema":{"n":1.0}}"#,
                "elicitation",
                r#"{"elicitation":{}}"#,
                "{}",
            ),
            (
                "elicitation/create",
                r#","params":{"mode":"url","url":"u","elicitationId":"e"}"#,
                "elicitation.url",
                r#"{"elicitation":{"url":{}}}"#,
                r#"{"elicitation":{}}"#,
            ),
            (
                "sampling/createMessage",
                r#","params":{"maxTokens":1}"#,
                "sampling",
                r#"{"sampling":{}}"#,
                r#"{"sampling":null}"#,
            ),
            ("roots/list", "", "roots", r#"{"roots":{}}"#, r#"{"x":{"roots":{}}}"#),
        ] {
            let question = format!(r#"{{"jsonrpc":"2.0","id":7,"method":"{method}"{params}}}"#);
            let asked = asked(&question).expect("it can be asked");
            assert_eq!(asked.needs.join("."), needs);
            assert!(asked.suits(able.as_bytes()) && !asked.suits(unable.as_bytes()), "{method}");
            let request = String::from_utf8(asked.request).expect("text");
            let params = params.replace(r#","elicitationId":"e""#, "");
            assert_eq!(request, format!(r#"{{"method":"{method}"{params}}}"#));
        }
        assert_eq!(asked(r#"{"jsonrpc":"2.0","id":7,"method":"ping"}"#), None);
        assert_eq!(asked(r#"{"jsonrpc":"2.0","method":"roots/list"}"#), None);
    }

    #[test]
    fn e3_addresses_to_visit_first_are_asked_for_as_input() {
        let refused = br#"{"jsonrpc":"2.0","id":7,"error":{"code":-32042,"message":"m","data":{"elicitations":[{"mode":"url","elicitationId":"e","url":"u"},1]}}}"#;
        let envelope = envelope::scan(refused).expect("a message");
        let visits = InputRequest::visits(refused, &envelope).expect("addresses");
        assert_eq!(visits.len(), 1);
        assert_eq!(visits[0].request, br#"{"method":"elicitation/create","params":{"mode":"url","url":"u"}}"#);
        let other = br#"{"jsonrpc":"2.0","id":7,"error":{"code":-32041,"message":"m","data":{"elicitations":[{}]}}}"#;
        assert_eq!(InputRequest::visits(other, &envelope::scan(other).expect("a message")), None);
    }

    #[test]
    fn e3_a_wish_for_input_is_a_result_and_its_answers_are_found() {
        let question = asked(r#"{"jsonrpc":"2.0","id":7,"method":"roots/list"}"#).expect("it can be asked");
        let wish = response(b"\"x\"", &[("k\"".to_owned(), question)], "s", Some(br#"{"name":"n"}"#));
        let read: Value = serde_json::from_slice(&wish).expect("json");
        let expected = json!({"resultType": "input_required", "inputRequests": {"k\"": {"method": "roots/list"}},
            "requestState": "s", "_meta": {SERVER_INFO: {"name": "n"}}});
        assert_eq!((&read["id"], &read["result"]), (&json!("x"), &expected));
        let read: Value = serde_json::from_slice(&response(b"1", &[], "s", None)).expect("json");
        assert_eq!(read["result"], json!({"resultType": "input_required", "requestState": "s"}));

        let again = br#"{"jsonrpc":"2.0","id":8,"method":"m","params":{"inputResponses":{"a":{"x":1.0},"b":[]}}}"#;
        let envelope = envelope::scan(again).expect("a message");
        assert_eq!(answer_to(again, &envelope, "a"), Some(br#"{"x":1.0}"#.as_slice()));
        assert_eq!(answer_to(again, &envelope, "b"), None);
        assert!(may_ask(Method::ToolsCall) && !may_ask(Method::Complete));
    }
}
