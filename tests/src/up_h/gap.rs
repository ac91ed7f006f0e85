//! Faults that are ordered for some of the next requests.

use super::dialect::Dialect;
use crate::server::{self, Kind};
use serde_json::Value;
use std::time::Duration;

/// What happens to a request.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Fate {
    /// It is served as ever, after the delay of the gap.
    Serve,
    /// It is never answered.
    Hang,
    /// The connection is cut and nothing is executed.
    CutBefore,
    /// It is executed at once, and answered only after this time.
    AnswerLate(Duration),
    /// It is executed to its end, then the connection is cut.
    CutAfter,
    /// It is answered as SSE, and the connection is cut after so many events; the work goes on.
    CutSse(u64),
    /// It is executed to its end, then answered with this JSON-RPC code.
    RpcError(i64),
    /// It is answered with these bytes and not executed.
    Answer(Box<Dialect>),
}

/// Which requests a gap waits for.
#[derive(Debug, Clone, PartialEq)]
enum Target {
    /// Any JSON-RPC request.
    Request,
    /// Anything at all.
    Anything,
    /// A JSON-RPC method, or `GET` or `DELETE`.
    Method(String),
    /// A call of this tool.
    Tool(String),
}

/// A fault, and how often it is to happen.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Gap {
    target: Target,
    delay: Duration,
    fate: Fate,
    /// How many requests are left; none means for ever.
    left: Option<u64>,
}

impl Gap {
    /// Reads `{"kind", "ms", "events", "code", "status", "body", "times", "tool", "method"}`.
    pub(super) fn read(order: &Value) -> Result<Gap, String> {
        let ms = Duration::from_millis(order["ms"].as_u64().unwrap_or(0));
        let fate = match order["kind"].as_str().unwrap_or_default() {
            "delay" => Fate::Serve,
            "answer_late" => Fate::AnswerLate(ms),
            "hang" => Fate::Hang,
            "cut_before" => Fate::CutBefore,
            "cut_after" => Fate::CutAfter,
            "cut_sse" => Fate::CutSse(order["events"].as_u64().unwrap_or(0)),
            "rpc_error" => Fate::RpcError(order["code"].as_i64().unwrap_or(-32602)),
            "status" => Fate::Answer(Box::new(Dialect::read(order)?)),
            other => return Err(format!("no gap of kind `{other}`")),
        };
        let target = match (order["tool"].as_str(), order["method"].as_str()) {
            (Some(tool), _) => Target::Tool(tool.to_owned()),
            (None, Some("*")) => Target::Anything,
            (None, Some(method)) => Target::Method(method.to_owned()),
            (None, None) => Target::Request,
        };
        let left = (order["times"] != "forever").then(|| order["times"].as_u64().unwrap_or(1));
        let delay = if matches!(fate, Fate::AnswerLate(_)) { Duration::ZERO } else { ms };
        Ok(Gap { target, delay, fate, left })
    }

    fn fits(&self, http_method: &str, message: &Value) -> bool {
        match &self.target {
            Target::Anything => true,
            Target::Request => server::kind(message) == Kind::Request,
            Target::Method(method) => method == http_method || method == server::method(message),
            Target::Tool(tool) => server::tool(message) == Some(tool),
        }
    }
}

/// Finds the first gap that fits the request and uses it up once.
pub(super) fn take(gaps: &mut Vec<Gap>, http_method: &str, message: &Value) -> (Duration, Fate) {
    let Some(at) = gaps.iter().position(|gap| gap.fits(http_method, message)) else {
        return (Duration::ZERO, Fate::Serve);
    };
    let gap = &mut gaps[at];
    let (delay, fate) = (gap.delay, gap.fate.clone());
    if let Some(left) = &mut gap.left {
        *left = left.saturating_sub(1);
        if *left == 0 {
            gaps.remove(at);
        }
    }
    (delay, fate)
}

#[cfg(test)]
mod tests {
    use super::{Fate, Gap, take};
    use serde_json::{Value, json};

    fn call(tool: &str) -> Value {
        json!({"id": 1, "method": "tools/call", "params": {"name": tool}})
    }

    #[test]
    fn a_gap_for_a_tool_waits_for_that_tool_and_is_used_up() {
        let mut gaps = vec![Gap::read(&json!({"kind": "cut_after", "tool": "incr", "times": 2})).expect("read")];
        assert_eq!(take(&mut gaps, "POST", &call("read")).1, Fate::Serve);
        assert_eq!(take(&mut gaps, "POST", &call("incr")).1, Fate::CutAfter);
        assert_eq!(take(&mut gaps, "POST", &call("incr")).1, Fate::CutAfter);
        assert_eq!(take(&mut gaps, "POST", &call("incr")).1, Fate::Serve);
    }

    #[test]
    fn a_gap_for_requests_leaves_notifications_and_streams_alone() {
        let mut gaps = vec![Gap::read(&json!({"kind": "hang", "times": "forever"})).expect("read")];
        assert_eq!(take(&mut gaps, "GET", &Value::Null).1, Fate::Serve);
        assert_eq!(take(&mut gaps, "POST", &json!({"method": "notifications/initialized"})).1, Fate::Serve);
        for _ in 0..3 {
            assert_eq!(take(&mut gaps, "POST", &call("echo")).1, Fate::Hang);
        }
    }
}
