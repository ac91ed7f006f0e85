//! One request becomes a plan: what is sent, and when.

use super::{RESOURCE_URI, VERSIONS, World, method, tools};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;

/// What a session knows of itself. `whoami` shows it, so that a test can see what a re-made session was told again.
#[derive(Debug, Clone, Default)]
pub struct Facts {
    /// The session's id; for stdio a name made of the process id.
    pub session: String,
    /// Tool calls so far.
    pub calls: u64,
    /// What `logging/setLevel` said last.
    pub level: Option<String>,
    /// What `resources/subscribe` named and `resources/unsubscribe` did not take back.
    pub subscriptions: BTreeSet<String>,
    /// The negotiated protocol version.
    pub protocol: String,
    /// `clientInfo` as given.
    pub client: Value,
    /// The client's capabilities as given.
    pub capabilities: Value,
    /// Whether `notifications/initialized` has come.
    pub initialized: bool,
}

/// One thing done before the answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// Wait, unless cancelled.
    Wait(Duration),
    /// Send a notification on the request's own stream.
    Notify(Value),
}

/// The body of a response.
#[derive(Debug, Clone, PartialEq)]
pub enum Reply {
    /// A result.
    Result(Value),
    /// A JSON-RPC error.
    Error {
        /// The JSON-RPC code.
        code: i64,
        /// The message.
        message: String,
    },
}

impl Reply {
    /// A tool's result of one text.
    #[must_use]
    pub fn text(text: impl Into<String>) -> Reply {
        Reply::Result(json!({"content": [{"type": "text", "text": text.into()}]}))
    }

    /// A tool's result that says that the tool failed.
    #[must_use]
    pub fn failed(text: impl Into<String>) -> Reply {
        Reply::Result(json!({"content": [{"type": "text", "text": text.into()}], "isError": true}))
    }

    /// A JSON-RPC error.
    #[must_use]
    pub fn error(code: i64, message: impl Into<String>) -> Reply {
        Reply::Error { code, message: message.into() }
    }

    /// The whole message, for the request with this id.
    #[must_use]
    pub fn into_message(self, id: &Value) -> Value {
        match self {
            Reply::Result(result) => json!({"jsonrpc": "2.0", "id": id, "result": result}),
            Reply::Error { code, message } => {
                json!({"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": message}})
            }
        }
    }
}

/// How a plan ends.
#[derive(Debug, Clone, PartialEq)]
pub enum Ending {
    /// With this answer.
    Answer(Reply),
    /// With a question to the client; its answer becomes the text of the result.
    Ask {
        /// `elicitation/create`, `sampling/createMessage` or `roots/list`.
        method: &'static str,
        /// The question's params.
        params: Value,
        /// How long the client has for its answer.
        bound: Duration,
    },
}

/// Something that other streams are told as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tell {
    /// The resource was updated; for those who subscribed.
    Updated,
}

/// What is to be done for one request.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Before the answer, in order.
    pub steps: Vec<Step>,
    /// The answer.
    pub ending: Ending,
    /// Sent on the request's stream after the answer, as only a faulty server does.
    pub late: Vec<Value>,
    /// Told on listening streams, before the answer.
    pub tell: Option<Tell>,
}

impl Plan {
    /// A plan of an answer alone.
    #[must_use]
    pub fn answer(reply: Reply) -> Plan {
        Plan { steps: Vec::new(), ending: Ending::Answer(reply), late: Vec::new(), tell: None }
    }

    fn result(result: Value) -> Plan {
        Plan::answer(Reply::Result(result))
    }
}

/// Plans the answer to one request, and notes in `facts` and `world` what the request changes there.
pub fn plan(world: &World, facts: &mut Facts, request: &Value) -> Plan {
    let params = &request["params"];
    let name = method(request);
    *world.counters().requests.entry(name.to_owned()).or_default() += 1;
    if !facts.initialized && !matches!(name, "initialize" | "ping") {
        world.counters().before_initialized += 1;
    }
    match name {
        "initialize" => Plan::result(initialize(world, facts, params)),
        "ping" => Plan::result(json!({})),
        "tools/list" => Plan::result(tools::list(world, params)),
        "tools/call" => tools::call(world, facts, params),
        "resources/list" => Plan::result(json!({"resources": [resource()]})),
        "resources/templates/list" => Plan::result(json!({"resourceTemplates": [
            {"uriTemplate": "test://item/{n}", "name": "item", "mimeType": "text/plain"}
        ]})),
        "resources/read" => Plan::answer(read_resource(params)),
        "resources/subscribe" => Plan::answer(subscribe(facts, params)),
        "resources/unsubscribe" => {
            facts.subscriptions.remove(params["uri"].as_str().unwrap_or_default());
            Plan::result(json!({}))
        }
        "prompts/list" => Plan::result(json!({"prompts": [{
            "name": "greet", "description": "Greets somebody", "arguments": [{"name": "name", "required": true}]
        }]})),
        "prompts/get" => Plan::answer(prompt(params)),
        "completion/complete" => Plan::result(complete(params)),
        "logging/setLevel" => Plan::answer(set_level(facts, params)),
        unknown => Plan::answer(Reply::error(-32601, format!("Method not found: {unknown}"))),
    }
}

fn initialize(world: &World, facts: &mut Facts, params: &Value) -> Value {
    let asked = params["protocolVersion"].as_str().unwrap_or_default();
    let known = VERSIONS.iter().find(|version| **version == asked).unwrap_or(&VERSIONS[0]);
    facts.protocol = world.settings().protocol.clone().unwrap_or_else(|| (*known).to_owned());
    facts.client = params["clientInfo"].clone();
    facts.capabilities = params["capabilities"].clone();
    json!({
        "protocolVersion": facts.protocol,
        "capabilities": {
            "tools": {"listChanged": true},
            "resources": {"subscribe": true, "listChanged": true},
            "prompts": {"listChanged": true},
            "logging": {},
            "completions": {},
        },
        "serverInfo": {"name": world.settings().name, "title": "Scriptable server", "version": "1.0.0"},
        "instructions": "Every tool says in its description what it does.",
    })
}

fn resource() -> Value {
    json!({"uri": RESOURCE_URI, "name": "static", "mimeType": "text/plain"})
}

fn read_resource(params: &Value) -> Reply {
    match params["uri"].as_str() {
        Some(uri) if uri == RESOURCE_URI || uri.starts_with("test://item/") => Reply::Result(json!({
            "contents": [{"uri": uri, "mimeType": "text/plain", "text": format!("text of {uri}")}]
        })),
        Some(uri) => Reply::error(-32002, format!("Resource not found: {uri}")),
        None => Reply::error(-32602, "missing uri"),
    }
}

fn subscribe(facts: &mut Facts, params: &Value) -> Reply {
    let Some(uri) = params["uri"].as_str() else {
        return Reply::error(-32602, "missing uri");
    };
    if facts.subscriptions.len() >= SUBSCRIPTIONS_MAX {
        return Reply::error(-32602, "too many subscriptions");
    }
    facts.subscriptions.insert(uri.to_owned());
    Reply::Result(json!({}))
}

fn prompt(params: &Value) -> Reply {
    if params["name"] != "greet" {
        return Reply::error(-32602, format!("Unknown prompt: {}", params["name"]));
    }
    let Some(name) = params["arguments"]["name"].as_str() else {
        return Reply::error(-32602, "missing argument name");
    };
    Reply::Result(json!({
        "description": "Greets somebody",
        "messages": [{"role": "user", "content": {"type": "text", "text": format!("Greet {name}.")}}],
    }))
}

fn complete(params: &Value) -> Value {
    let begun = params["argument"]["value"].as_str().unwrap_or_default();
    let values: Vec<&str> = ["alice", "albert", "bob"].into_iter().filter(|value| value.starts_with(begun)).collect();
    json!({"completion": {"total": values.len(), "hasMore": false, "values": values}})
}

fn set_level(facts: &mut Facts, params: &Value) -> Reply {
    match params["level"].as_str() {
        Some(level) if LEVELS.contains(&level) => {
            facts.level = Some(level.to_owned());
            Reply::Result(json!({}))
        }
        _ => Reply::error(-32602, format!("Unknown level: {}", params["level"])),
    }
}

const LEVELS: [&str; 8] = ["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"];
const SUBSCRIPTIONS_MAX: usize = 1000;

#[cfg(test)]
mod tests {
    use super::{Ending, Facts, Reply, plan};
    use crate::server::{World, WorldSettings};
    use serde_json::{Value, json};

    fn result(plan: super::Plan) -> Value {
        match plan.ending {
            Ending::Answer(Reply::Result(result)) => result,
            Ending::Answer(Reply::Error { .. }) | Ending::Ask { .. } => Value::Null,
        }
    }

    #[test]
    fn initialize_takes_a_known_version_and_answers_an_unknown_one_with_the_newest() {
        let world = World::new(WorldSettings::default());
        for (asked, given) in [("2025-03-26", "2025-03-26"), ("2026-07-28", "2025-11-25")] {
            let request = json!({"id": 1, "method": "initialize", "params": {"protocolVersion": asked}});
            let answer = result(plan(&world, &mut Facts::default(), &request));
            assert_eq!(answer["protocolVersion"], given);
        }
    }

    #[test]
    fn level_and_subscriptions_are_kept() {
        let world = World::new(WorldSettings::default());
        let mut facts = Facts::default();
        let level = json!({"id": 1, "method": "logging/setLevel", "params": {"level": "error"}});
        plan(&world, &mut facts, &level);
        let subscribe = json!({"id": 2, "method": "resources/subscribe", "params": {"uri": "test://static"}});
        plan(&world, &mut facts, &subscribe);
        assert_eq!(facts.level.as_deref(), Some("error"));
        assert!(facts.subscriptions.contains("test://static"));
        assert_eq!(world.counted().before_initialized, 2);
    }
}
