//! `mainstay sessions show`.

use anyhow::anyhow;
use serde_json::Value;

use super::{ShowArgs, checked};
use crate::cli::api::Api;
use crate::cli::failure::Failure;
use crate::cli::output::{Output, plain};
use crate::cli::times::{ago, until};

/// Shows one session.
pub(super) fn run(args: &ShowArgs, out: &Output) -> Result<(), Failure> {
    let session: Value = match (&args.session, args.by_id.is_given()) {
        (Some(_), true) => {
            return Err(
                Failure::usage(anyhow!("a session is named by a ref and by an id")).hint("name it by one of the two")
            );
        }
        (Some(text), false) => {
            let session_ref = checked(text)?;
            Api::find(&args.place)?.get(&format!("/sessions/{session_ref}"))?
        }
        (None, _) => args.by_id.session(&Api::find(&args.place)?, out)?,
    };
    if out.is_json() {
        return out.document(&session);
    }
    out.line(&text(&session))
}

/// Every field that says something, a line each; what is a list has a line for each of its members.
fn text(session: &Value) -> String {
    let mut lines = Vec::new();
    for (name, value) in session.as_object().into_iter().flatten() {
        match value {
            Value::Null => {}
            Value::String(text) if text.is_empty() => {}
            Value::Array(members) => {
                let told = members.iter().map(|member| line(name, &told(member)));
                lines.extend(told);
            }
            Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Object(_) => {
                lines.push(line(name, &shown(name, value)));
            }
        }
    }
    lines.join("\n")
}

fn line(name: &str, text: &str) -> String {
    format!("{:18}{text}", name.replace('_', " "))
}

fn shown(name: &str, value: &Value) -> String {
    match value.as_str() {
        Some(text) if name.ends_with("_at") || name == "since" => format!("{} ({} ago)", plain(text), ago(text)),
        Some(text) if name == "deadline" => format!("{} ({})", plain(text), until(text)),
        Some(text) => plain(text),
        None => value.to_string(),
    }
}

/// A member of a list on one line.
fn told(member: &Value) -> String {
    match member.as_object() {
        Some(fields) => {
            let told = fields.iter().filter(|(_, value)| !value.is_null());
            told.map(|(name, value)| format!("{name} {}", shown(name, value))).collect::<Vec<_>>().join(", ")
        }
        None => shown("", member),
    }
}

pub(super) const EXAMPLES: &str = "\
Examples:
  mainstay sessions show s-292987c592
  mainstay sessions show --id - < id.txt      the id that the client sends as Mcp-Session-Id";

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_a_session_waits_for_is_told_and_what_says_nothing_is_left_out() {
        let session = json!({
            "ref": "s-0123456789", "agent": null, "client": "", "calls": 1, "opened_at": "1970-01-01T00:00:00.000Z",
            "calls_in_flight": [{"method": "tools/call", "since": "1970-01-01T00:00:00.000Z"}],
        });
        let text = text(&session);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "ref               s-0123456789");
        assert!(lines[2].starts_with("opened at         1970-01-01T00:00:00.000Z ("), "{text}");
        assert!(lines[3].starts_with("calls in flight   method tools/call, since 1970-"), "{text}");
        assert_eq!(lines.len(), 4, "{text}");
    }
}
