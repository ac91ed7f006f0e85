//! Calls that their clients come back for: the tasks extension (SEP-2663).
//!
//! What stands in messages is written here. Which calls become tasks, and what becomes of these, is not decided here.

use super::asking::InputRequest;
use super::{Meta, SERVER_INFO, missing_capability_data};
use crate::wire::envelope;

/// The extension's name among the capabilities of a client and of a server.
pub const EXTENSION: &str = "io.modelcontextprotocol/tasks";

/// A task, but for where it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task<'a> {
    /// Its id, as its client knows it.
    pub id: &'a str,
    /// When it was made (RFC 3339).
    pub created_at: String,
    /// When something was last heard of it (RFC 3339).
    pub updated_at: String,
    /// For how long after that it is kept, in milliseconds.
    pub ttl_ms: u64,
    /// How long its client should wait before it asks again, in milliseconds.
    pub poll_interval_ms: u64,
}

/// Where a task stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It goes on. A raw JSON string says for people how far it is, if that is known.
    Working(Option<Vec<u8>>),
    /// It waits for these answers.
    InputRequired(Vec<(String, InputRequest)>),
    /// There is a result, which may well say that the tool has failed: raw JSON.
    Completed(Vec<u8>),
    /// There will be no result: the raw error.
    Failed(Vec<u8>),
    /// Its client did not want it any more.
    Cancelled,
}

impl Standing {
    /// Its name in messages.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Working(_) => "working",
            Self::InputRequired(_) => "input_required",
            Self::Completed(_) => "completed",
            Self::Failed(_) => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    /// Whether it stays like that.
    pub const fn is_final(&self) -> bool {
        match self {
            Self::Working(_) | Self::InputRequired(_) => false,
            Self::Completed(_) | Self::Failed(_) | Self::Cancelled => true,
        }
    }
}

/// Whether the client of the request `message` says there that it can be answered by a task.
pub fn is_declared(message: &[u8], meta: &Meta) -> bool {
    let capabilities = meta.capabilities.as_ref();
    let extensions = capabilities.and_then(|span| envelope::member(message, span, "extensions"));
    let declared = extensions.and_then(|span| envelope::member(message, &span, EXTENSION));
    declared.is_some_and(|span| message.get(span.start) == Some(&b'{'))
}

/// The `error.data` that asks for the extension (2026-07-28, Missing Required Client Capability).
pub fn missing_data() -> Vec<u8> {
    missing_capability_data(&[b"{\"extensions\":".as_slice(), &offered(), b"}"].concat())
}

/// What stands in `capabilities.extensions` of a server that makes tasks: raw JSON.
pub fn offered() -> Vec<u8> {
    [b"{".as_slice(), &envelope::escape(EXTENSION), b":{}}"].concat()
}

/// The response to the request `id` that says that it has become `task`, which is working.
pub fn created(id: &[u8], task: &Task<'_>, server_info: Option<&[u8]>) -> Vec<u8> {
    let mut result = b"{\"resultType\":\"task\"".to_vec();
    task_members(&mut result, task, &Standing::Working(None));
    finished(id, result, server_info)
}

/// The response to the request `id` that says where `task` stands.
pub fn state(id: &[u8], task: &Task<'_>, standing: &Standing, server_info: Option<&[u8]>) -> Vec<u8> {
    let mut result = b"{\"resultType\":\"complete\"".to_vec();
    task_members(&mut result, task, standing);
    match standing {
        Standing::Working(None) | Standing::Cancelled => {}
        Standing::Working(Some(text)) => raw_member(&mut result, "statusMessage", text),
        Standing::InputRequired(requests) => {
            let mut open = b"{".to_vec();
            for (index, (key, asked)) in requests.iter().enumerate() {
                if index > 0 {
                    open.push(b',');
                }
                open.extend_from_slice(&envelope::escape(key));
                open.push(b':');
                open.extend_from_slice(&asked.request);
            }
            open.push(b'}');
            raw_member(&mut result, "inputRequests", &open);
        }
        Standing::Completed(completed) => raw_member(&mut result, "result", completed),
        Standing::Failed(error) => raw_member(&mut result, "error", error),
    }
    finished(id, result, server_info)
}

/// The response to the request `id` to answer or to cancel a task.
pub fn acknowledged(id: &[u8], server_info: Option<&[u8]>) -> Vec<u8> {
    finished(id, b"{\"resultType\":\"complete\"".to_vec(), server_info)
}

fn task_members(result: &mut Vec<u8>, task: &Task<'_>, standing: &Standing) {
    for (name, text) in [
        ("taskId", task.id),
        ("status", standing.name()),
        ("createdAt", &task.created_at),
        ("lastUpdatedAt", &task.updated_at),
    ] {
        raw_member(result, name, &envelope::escape(text));
    }
    raw_member(result, "ttlMs", task.ttl_ms.to_string().as_bytes());
    raw_member(result, "pollIntervalMs", task.poll_interval_ms.to_string().as_bytes());
}

fn raw_member(result: &mut Vec<u8>, name: &str, raw: &[u8]) {
    result.push(b',');
    result.extend_from_slice(&envelope::escape(name));
    result.push(b':');
    result.extend_from_slice(raw);
}

fn finished(id: &[u8], mut result: Vec<u8>, server_info: Option<&[u8]>) -> Vec<u8> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn task() -> Task<'static> {
        let (created_at, updated_at) = ("2026-07-28T00:00:00.000Z".to_owned(), "2026-07-28T00:00:01.000Z".to_owned());
        Task { id: "t\"1", created_at, updated_at, ttl_ms: 7, poll_interval_ms: 5 }
    }

    fn result(message: &[u8]) -> Value {
        serde_json::from_slice::<Value>(message).expect("json")["result"].take()
    }

    #[test]
    fn e4_what_a_request_becomes_is_a_task_that_works() {
        let made = created(b"7", &task(), Some(br#"{"name":"s"}"#));
        let expected = json!({"resultType": "task", "taskId": "t\"1", "status": "working", "ttlMs": 7,
            "createdAt": "2026-07-28T00:00:00.000Z", "lastUpdatedAt": "2026-07-28T00:00:01.000Z", "pollIntervalMs": 5,
            "_meta": {SERVER_INFO: {"name": "s"}}});
        assert_eq!(result(&made), expected);
    }

    #[test]
    fn e4_each_standing_brings_what_belongs_to_it_and_nothing_else() {
        let ask =
            |method: &str| InputRequest { needs: &["roots"], request: format!(r#"{{"method":"{method}"}}"#).into() };
        let asked = vec![("a".to_owned(), ask("x")), ("b".to_owned(), ask("y"))];
        for (standing, status, member, expected, is_final) in [
            (Standing::Working(None), "working", "statusMessage", Value::Null, false),
            (Standing::Working(Some(br#""half""#.to_vec())), "working", "statusMessage", json!("half"), false),
            (
                Standing::InputRequired(asked),
                "input_required",
                "inputRequests",
                json!({"a": {"method": "x"}, "b": {"method": "y"}}),
                false,
            ),
            (Standing::Completed(b"{\"n\":1}".to_vec()), "completed", "result", json!({"n": 1}), true),
            (Standing::Failed(b"{\"code\":1}".to_vec()), "failed", "error", json!({"code": 1}), true),
            (Standing::Cancelled, "cancelled", "result", Value::Null, true),
        ] {
            let read = result(&state(b"7", &task(), &standing, None));
            assert_eq!((&read["status"], &read["resultType"]), (&json!(status), &json!("complete")));
            assert_eq!((&read[member], standing.is_final()), (&expected, is_final), "{read}");
            let members = read.as_object().expect("an object").len();
            assert_eq!(members, 7 + usize::from(!expected.is_null()), "{read}");
        }
        assert_eq!(result(&acknowledged(b"7", None)), json!({"resultType": "complete"}));
    }

    #[test]
    fn e4_the_extension_is_declared_by_an_object_of_its_name_among_the_extensions() {
        for (capabilities, declared) in [
            (r#"{"extensions":{"io.modelcontextprotocol/tasks":{}}}"#, true),
            (r#"{"extensions":{"io.modelcontextprotocol/tasks":null}}"#, false),
            (r#"{"extensions":{"other":{}},"io.modelcontextprotocol/tasks":{}}"#, false),
            (r#"{"tasks":{}}"#, false),
        ] {
            let message = format!(
                r#"{{"jsonrpc":"2.0","id":1,"method":"m","params":{{"_meta":{{"io.modelcontextprotocol/clientCapabilities":{capabilities}}}}}}}"#
            );
            let envelope = envelope::scan(message.as_bytes()).expect("a message");
            let meta = Meta::read(message.as_bytes(), &envelope);
            assert_eq!(is_declared(message.as_bytes(), &meta), declared, "{capabilities}");
        }
        let data: Value = serde_json::from_slice(&missing_data()).expect("json");
        assert_eq!(data, json!({"requiredCapabilities": {"extensions": {EXTENSION: {}}}}));
    }
}
