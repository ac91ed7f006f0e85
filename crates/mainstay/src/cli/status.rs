//! `mainstay status`.

use serde_json::Value;

use super::Place;
use super::api::Api;
use super::failure::Failure;
use super::output::{Output, plain};
use super::times::ago;

/// Tells what a running gateway is doing.
pub(super) fn run(place: &Place, out: &Output) -> Result<(), Failure> {
    let status: Value = Api::find(place)?.get("/status")?;
    if out.is_json() {
        return out.document(&status);
    }
    out.line(&text(&status))
}

/// How the last reload or upgrade went.
fn handover(status: &Value) -> String {
    let word = |name: &str| status["handover"][name].as_str().map(plain).unwrap_or_default();
    match status["handover"]["outcome"].as_str() {
        None => "none since the start".to_owned(),
        Some("succeeded") if word("kind") == "upgrade" => {
            format!("upgraded from {} to {}, {} ago", word("from_version"), word("to_version"), ago(&word("at")))
        }
        Some("succeeded") => format!("reloaded {} ago", ago(&word("at"))),
        Some(_) => format!("{} failed {} ago: {}", word("kind"), ago(&word("at")), word("reason")),
    }
}

fn text(status: &Value) -> String {
    let word = |path: &str| match status.pointer(path) {
        Some(Value::String(text)) => plain(text),
        Some(value) => value.to_string(),
        None => "?".to_owned(),
    };
    let ready = if status["ready"] == true { "ready" } else { "draining" };
    let started = status.pointer("/worker/started_at").and_then(Value::as_str).unwrap_or_default();
    [
        format!("mainstay {}, {ready}", word("/version")),
        format!("mcp       http://{}", word("/mcp")),
        format!("admin     http://{}", word("/admin")),
        format!("keeper    pid {}, mainstay {}", word("/keeper/pid"), word("/keeper/version")),
        format!(
            "worker    pid {}, number {}, epoch {}, up {}",
            word("/worker/pid"),
            word("/worker/number"),
            word("/worker/epoch"),
            ago(started),
        ),
        format!("handover  {}", handover(status)),
        format!("servers   {}", word("/servers")),
        format!("sessions  {} stored, {} in memory", word("/sessions/stored"), word("/sessions/live")),
    ]
    .join("\n")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_status_fits_on_a_screen_and_survives_missing_fields() {
        let status = json!({"version": "1", "ready": true, "worker": {"pid": 7}, "sessions": {"stored": 2, "live": 1}});
        let text = text(&status);
        assert!(text.starts_with("mainstay 1, ready"), "{text}");
        assert!(text.contains("worker    pid 7, number ?"), "{text}");
        assert!(text.ends_with("2 stored, 1 in memory"), "{text}");
    }
}
