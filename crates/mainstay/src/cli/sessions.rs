//! `mainstay sessions`.

use anyhow::anyhow;
use mainstay_core::id::SessionRef;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::api::Api;
use super::failure::Failure;
use super::output::{Output, lines_of, plain, table};
use super::times::ago;
use super::{SessionArgs, SessionsListArgs};

/// Lists sessions.
pub(super) fn list(args: &SessionsListArgs, out: &Output) -> Result<(), Failure> {
    let api = Api::find(&args.place)?;
    let mut listed = Listed { sessions: Vec::new(), next: args.after.as_deref().map(checked).transpose()? };
    loop {
        let limit = (args.limit - listed.sessions.len()).min(PAGE_SESSIONS_MAX);
        let after = listed.next.take().map(|after| format!("&after={after}")).unwrap_or_default();
        let page: Listed = api.get(&format!("/sessions?limit={limit}{after}"))?;
        listed.sessions.extend(page.sessions);
        listed.next = page.next;
        if listed.next.is_none() || listed.sessions.len() >= args.limit {
            break;
        }
    }
    if out.is_json() {
        return out.document(&listed);
    }
    let mut shown = table(&["REF", "SERVER", "PRINCIPAL", "STATE", "CLIENT", "AGE", "IDLE", "CONTINUITY"]);
    for session in &listed.sessions {
        shown.add_row(row(session));
    }
    out.line(&lines_of(&shown))?;
    if let Some(next) = listed.next {
        out.note(&format!("more: mainstay sessions list --after {next}"));
    }
    Ok(())
}

/// Shows one session.
pub(super) fn show(args: &SessionArgs, out: &Output) -> Result<(), Failure> {
    let session_ref = checked(&args.session)?;
    let session: Value = Api::find(&args.place)?.get(&format!("/sessions/{session_ref}"))?;
    if out.is_json() {
        return out.document(&session);
    }
    let fields = session.as_object().into_iter().flatten();
    let lines = fields.filter(|(_, value)| !value.is_null()).map(|(name, value)| {
        let shown = value.as_str().map_or_else(|| value.to_string(), plain);
        format!("{:14}{shown}", name.replace('_', " "))
    });
    out.line(&lines.collect::<Vec<_>>().join("\n"))
}

fn checked(text: &str) -> Result<String, Failure> {
    let found = SessionRef::parse(text).map(|session_ref| session_ref.to_string());
    found.ok_or_else(|| {
        Failure::usage(anyhow!("`{}` is no session's ref", plain(text)))
            .hint("a ref is `s-` and ten hexadecimal digits; see `mainstay sessions list`")
    })
}

fn row(session: &Value) -> Vec<String> {
    let word = |name: &str| session[name].as_str().map_or_else(|| "-".to_owned(), plain);
    let idle = match session["calls"].as_u64() {
        Some(calls @ 1..) => format!("{calls} in flight"),
        _ => ago(session["seen_at"].as_str().unwrap_or_default()),
    };
    let continuity = match (session["continuity"].as_str(), session["remade_count"].as_u64()) {
        (Some(continuity), Some(times @ 1..)) => format!("{} ({times}x remade)", plain(continuity)),
        (Some(continuity), _) => plain(continuity),
        (None, _) => "-".to_owned(),
    };
    let age = ago(session["opened_at"].as_str().unwrap_or_default());
    vec![word("ref"), word("server"), word("principal"), word("state"), word("client"), age, idle, continuity]
}

#[derive(Serialize, Deserialize)]
struct Listed {
    sessions: Vec<Value>,
    next: Option<String>,
}

/// What the API gives at once.
const PAGE_SESSIONS_MAX: usize = 1000;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_row_tells_activity_and_continuity_and_no_client_drives_the_terminal() {
        let session = json!({"ref": "s-0000000001", "client": "x\u{1b}[2J", "calls": 2, "continuity": "remade", "remade_count": 3});
        let row = row(&session);
        assert_eq!(row[4], "x\\u{1b}[2J");
        assert_eq!((row[6].as_str(), row[7].as_str()), ("2 in flight", "remade (3x remade)"));
        assert_eq!((row[1].as_str(), row[5].as_str()), ("-", "-"));
    }

    #[test]
    fn only_refs_are_asked_for() {
        assert!(checked("s-0123456789").is_ok());
        assert!(checked("../status").is_err());
    }
}
