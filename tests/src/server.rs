//! What the scriptable servers serve: tools, resources and prompts, the same over HTTP and over stdio.
//!
//! A [`World`] is what a server process knows, [`Facts`] what one session knows. [`plan`] turns one request into a [`Plan`],
//! the messages to be sent and the waits between them; [`Conversation`] carries plans out. Transports own framing, sessions
//! and every kind of misbehaviour; nothing of that is here.

mod conversation;
mod plan;
mod tools;
mod world;

pub use conversation::{Conversation, Outgoing, Outlet, Served};
pub use plan::{Ending, Facts, Plan, Reply, Step, Tell, plan};
pub use tools::{BIG_BYTES_MAX, big_text};
pub use world::{Counted, World, WorldSettings};

use serde_json::Value;

/// The revisions that the servers negotiate, newest first. A client that asks for another one is offered the first.
pub const VERSIONS: [&str; 4] = ["2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"];

/// The one resource, which can be subscribed to.
pub const RESOURCE_URI: &str = "test://static";

/// Kinds of JSON-RPC messages that a server receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Has a method and an id, and must be answered.
    Request,
    /// Has a method and no id.
    Notification,
    /// Has an id and no method: the answer to one of the server's own requests.
    Response,
    /// Nothing that JSON-RPC knows.
    Junk,
}

/// Tells what a message is. An id of `null` counts as none.
#[must_use]
pub fn kind(message: &Value) -> Kind {
    let identified = message.get("id").is_some_and(|id| !id.is_null());
    match (message.get("method").is_some_and(Value::is_string), identified) {
        (true, true) => Kind::Request,
        (true, false) => Kind::Notification,
        (false, true) => Kind::Response,
        (false, false) => Kind::Junk,
    }
}

/// The method of a message, or the empty string.
#[must_use]
pub fn method(message: &Value) -> &str {
    message["method"].as_str().unwrap_or_default()
}

/// The tool that a `tools/call` names, if the message is one.
#[must_use]
pub fn tool(message: &Value) -> Option<&str> {
    if method(message) != "tools/call" {
        return None;
    }
    message["params"]["name"].as_str()
}

#[cfg(test)]
mod tests {
    use super::{Kind, kind, tool};
    use serde_json::json;

    #[test]
    fn messages_are_told_apart_by_method_and_id() {
        assert_eq!(kind(&json!({"id": 0, "method": "ping"})), Kind::Request);
        assert_eq!(kind(&json!({"method": "ping"})), Kind::Notification);
        assert_eq!(kind(&json!({"id": "a", "result": {}})), Kind::Response);
        assert_eq!(kind(&json!({"id": null, "error": {}})), Kind::Junk);
        assert_eq!(kind(&json!([])), Kind::Junk);
    }

    #[test]
    fn only_tool_calls_name_a_tool() {
        assert_eq!(tool(&json!({"method": "tools/call", "params": {"name": "echo"}})), Some("echo"));
        assert_eq!(tool(&json!({"method": "prompts/get", "params": {"name": "greet"}})), None);
    }
}
