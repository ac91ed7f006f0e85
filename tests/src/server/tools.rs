//! The tools.

use super::World;
use super::plan::{Ending, Facts, Plan, Reply, Step, Tell};
use serde_json::{Value, json};
use std::time::Duration;

/// The longest text that `big` makes.
pub const BIG_BYTES_MAX: usize = 256 * 1024 * 1024;

/// Answers `tools/list`, in pages if the world says so.
pub(super) fn list(world: &World, params: &Value) -> Value {
    let mut tools = definitions();
    for number in 1..=world.extra_tools() {
        tools.push(tool(&format!("extra_{number}"), "Was added while running", json!({})));
    }
    let page = usize::try_from(world.list_page()).unwrap_or(usize::MAX);
    if page == 0 {
        return json!({"tools": tools});
    }
    let from = params["cursor"].as_str().and_then(|cursor| cursor.parse::<usize>().ok()).unwrap_or(0);
    let shown: Vec<Value> = tools.iter().skip(from).take(page).cloned().collect();
    let next = from.saturating_add(page);
    if next < tools.len() {
        return json!({"tools": shown, "nextCursor": next.to_string()});
    }
    json!({"tools": shown})
}

/// Plans one `tools/call`.
pub(super) fn call(world: &World, facts: &mut Facts, params: &Value) -> Plan {
    let name = params["name"].as_str().unwrap_or_default();
    let args = &params["arguments"];
    if !exists(world, name) {
        return Plan::answer(Reply::error(-32602, format!("Unknown tool: {name}")));
    }
    facts.calls += 1;
    *world.counters().executions.entry(name.to_owned()).or_default() += 1;
    match name {
        "echo" => Plan::answer(match args["text"].as_str() {
            Some(text) => Reply::text(text),
            None => Reply::error(-32602, "missing argument text"),
        }),
        "whoami" => Plan::answer(Reply::text(whoami(facts).to_string())),
        "incr" => Plan::answer(incr(world, facts, args)),
        "read" => Plan::answer(Reply::text("read")),
        "slow" => {
            let ms = number(args, "ms", 0);
            let mut plan = Plan::answer(Reply::text(format!("waited {ms} ms")));
            plan.steps.push(Step::Wait(Duration::from_millis(ms)));
            plan
        }
        "prog" => prog(world, params),
        "ask" => ask(facts, args),
        "big" => Plan::answer(big(args)),
        "touch_resource" => {
            let mut plan = Plan::answer(Reply::text("touched"));
            plan.tell = Some(Tell::Updated);
            plan
        }
        "log" => log(args),
        extra => Plan::answer(Reply::text(extra)),
    }
}

/// The text that `big` answers: `bytes` bytes, always the same; with `multibyte` a character of four bytes lies across
/// every boundary of 1 KiB.
#[must_use]
pub fn big_text(bytes: usize, multibyte: bool) -> String {
    let mut text = String::with_capacity(bytes);
    while text.len() < bytes {
        let at = text.len();
        let straddles = at % KIB == KIB - 2 && at + CRAB.len_utf8() <= bytes;
        if multibyte && straddles {
            text.push(CRAB);
        } else {
            text.push(char::from(ALPHABET[(at * 7 + at / KIB) % ALPHABET.len()]));
        }
    }
    text
}

fn exists(world: &World, name: &str) -> bool {
    let extra = name.strip_prefix("extra_").and_then(|number| number.parse::<u64>().ok());
    NAMES.contains(&name) || extra.is_some_and(|number| (1..=world.extra_tools()).contains(&number))
}

fn tool(name: &str, description: &str, properties: Value) -> Value {
    json!({"name": name, "description": description, "inputSchema": {"type": "object", "properties": properties}})
}

fn definitions() -> Vec<Value> {
    let integer = json!({"type": "integer"});
    let string = json!({"type": "string"});
    let mut read = tool("read", "Reads and changes nothing", json!({}));
    read["annotations"] = json!({"readOnlyHint": true});
    vec![
        tool("echo", "Answers its text", json!({"text": string})),
        tool("whoami", "Tells what the session knows of itself, as JSON", json!({})),
        tool("incr", "Adds a line to a file, then answers", json!({"tag": string})),
        read,
        tool("slow", "Waits, and can be cancelled", json!({"ms": integer})),
        tool("prog", "Reports progress n times", json!({"n": integer, "delay_ms": integer, "bytes": integer})),
        tool(
            "ask",
            "Asks the client and answers with its answer",
            json!({"message": string, "kind": {"enum": ["elicitation", "sampling", "roots"]}, "timeout_ms": integer}),
        ),
        tool("big", "Answers a long text", json!({"bytes": integer, "multibyte": {"type": "boolean"}})),
        tool("touch_resource", "Updates the resource", json!({})),
        tool("log", "Sends one log message", json!({"level": string, "message": string})),
    ]
}

fn number(args: &Value, name: &str, otherwise: u64) -> u64 {
    args[name].as_u64().unwrap_or(otherwise)
}

fn whoami(facts: &Facts) -> Value {
    json!({
        "session": facts.session,
        "calls": facts.calls,
        "pid": std::process::id(),
        "level": facts.level,
        "subscriptions": facts.subscriptions,
        "protocol": facts.protocol,
        "client": facts.client,
        "capabilities": facts.capabilities,
        "initialized": facts.initialized,
    })
}

fn incr(world: &World, facts: &Facts, args: &Value) -> Reply {
    let count = world.counters().executions.get("incr").copied().unwrap_or_default();
    let tag = args["tag"].as_str().map_or_else(String::new, |tag| format!(" {tag}"));
    match world.add_line(&format!("{} {} {count}{tag}", std::process::id(), facts.session)) {
        Ok(()) => Reply::text(count.to_string()),
        Err(error) => Reply::failed(format!("the line was not written: {error}")),
    }
}

fn prog(world: &World, params: &Value) -> Plan {
    let args = &params["arguments"];
    let n = number(args, "n", 1).min(PROGRESS_EVENTS_MAX);
    let wait = Duration::from_millis(number(args, "delay_ms", 0));
    let mut plan = Plan::answer(Reply::text(format!("{n} steps done")));
    let token = &params["_meta"]["progressToken"];
    let padding = big_text(usize::try_from(number(args, "bytes", 0)).unwrap_or(0).min(PROGRESS_BYTES_MAX), false);
    let event = |done: u64| {
        json!({"jsonrpc": "2.0", "method": "notifications/progress",
               "params": {"progressToken": token, "progress": done, "total": n, "message": format!("step {done}{padding}")}})
    };
    for done in 1..=n {
        plan.steps.push(Step::Wait(wait));
        if !token.is_null() {
            plan.steps.push(Step::Notify(event(done)));
        }
    }
    if !token.is_null() {
        plan.late.extend((n + 1..=n + world.late_events()).map(event));
    }
    plan
}

fn ask(facts: &Facts, args: &Value) -> Plan {
    let message = args["message"].as_str().unwrap_or("a question");
    let (capability, method, params) = match args["kind"].as_str() {
        Some("sampling") => (
            "sampling",
            "sampling/createMessage",
            json!({"messages": [{"role": "user", "content": {"type": "text", "text": message}}], "maxTokens": 100}),
        ),
        Some("roots") => ("roots", "roots/list", json!({})),
        _ => (
            "elicitation",
            "elicitation/create",
            json!({"message": message, "requestedSchema": {"type": "object", "properties": {"answer": {"type": "string"}}}}),
        ),
    };
    if facts.capabilities[capability].is_null() {
        return Plan::answer(Reply::failed(format!("the client does not support {capability}")));
    }
    let bound = Duration::from_millis(number(args, "timeout_ms", ASK_BOUND_MS));
    let mut plan = Plan::answer(Reply::text(""));
    plan.ending = Ending::Ask { method, params, bound };
    plan
}

fn big(args: &Value) -> Reply {
    let bytes = usize::try_from(number(args, "bytes", 0)).unwrap_or(usize::MAX);
    if bytes > BIG_BYTES_MAX {
        return Reply::error(-32602, format!("at most {BIG_BYTES_MAX} bytes"));
    }
    Reply::text(big_text(bytes, args["multibyte"].as_bool().unwrap_or(false)))
}

fn log(args: &Value) -> Plan {
    let mut plan = Plan::answer(Reply::text("logged"));
    plan.steps.push(Step::Notify(json!({
        "jsonrpc": "2.0",
        "method": "notifications/message",
        "params": {"level": args["level"].as_str().unwrap_or("info"), "logger": "scriptable", "data": args["message"]},
    })));
    plan
}

const NAMES: [&str; 10] = ["echo", "whoami", "incr", "read", "slow", "prog", "ask", "big", "touch_resource", "log"];
const PROGRESS_EVENTS_MAX: u64 = 10_000;
const PROGRESS_BYTES_MAX: usize = 64 * 1024;
const ASK_BOUND_MS: u64 = 30_000;
const KIB: usize = 1024;
const CRAB: char = '\u{1F980}';
const ALPHABET: &[u8; 26] = b"abcdefghijklmnopqrstuvwxyz";

#[cfg(test)]
mod tests {
    use super::{KIB, NAMES, big_text, definitions};

    #[test]
    fn ac08_big_text_has_its_length_and_a_character_across_every_kib() {
        let text = big_text(8 * KIB + 5, true);
        assert_eq!(text.len(), 8 * KIB + 5);
        for boundary in 1..=8 {
            assert!(!text.is_char_boundary(boundary * KIB), "at {boundary} KiB");
        }
        assert!(big_text(4096, false).is_ascii());
    }

    #[test]
    fn every_listed_tool_can_be_called() {
        let listed: Vec<String> =
            definitions().iter().map(|tool| tool["name"].as_str().unwrap_or_default().to_owned()).collect();
        assert_eq!(listed, NAMES);
    }
}
