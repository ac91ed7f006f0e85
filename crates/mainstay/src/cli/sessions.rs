//! `mainstay sessions`: find, show, drain, close.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::anyhow;
use clap::{Args, Subcommand};
use comfy_table::Table;
use mainstay_core::id::SessionRef;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Place;
use super::api::{Api, query};
use super::failure::Failure;
use super::output::{Output, lines_of, plain, table};
use super::times::ago;

mod end;
mod ids;
mod show;

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// List them, ended ones included as long as they are kept
    #[command(after_help = LIST_EXAMPLES)]
    List(ListArgs),
    /// Show everything known of one
    #[command(after_help = show::EXAMPLES)]
    Show(ShowArgs),
    /// End some gently: calls in flight may finish, new ones are refused
    #[command(after_help = end::DRAIN_EXAMPLES)]
    Drain(end::DrainArgs),
    /// End some now, whatever goes on in them
    #[command(after_help = end::CLOSE_EXAMPLES)]
    Close(end::CloseArgs),
}

/// Runs one of the commands.
pub(super) fn run(command: &Command, out: &Output) -> Result<(), Failure> {
    match command {
        Command::List(args) => list(args, out),
        Command::Show(args) => show::run(args, out),
        Command::Drain(args) => end::drain(args, out),
        Command::Close(args) => end::close(args, out),
    }
}

#[derive(Debug, Args)]
pub(super) struct ListArgs {
    /// Only those in this state: ready, draining, deleted, expired, closed
    #[arg(long, value_name = "STATE")]
    state: Option<String>,
    #[command(flatten)]
    filter: Filter,
    #[command(flatten)]
    by_id: ids::ById,
    /// How many at most; all of them if absent
    #[arg(long, value_name = "COUNT")]
    limit: Option<NonZeroUsize>,
    /// Begin behind this place: the `next` of an earlier list
    #[arg(long, value_name = "PLACE")]
    after: Option<String>,
    #[command(flatten)]
    place: Place,
}

impl ListArgs {
    fn is_filtered(&self) -> bool {
        self.state.is_some() || !self.filter.is_empty() || self.limit.is_some() || self.after.is_some()
    }
}

/// Which sessions are meant.
#[derive(Clone, Debug, Default, Args)]
pub(super) struct Filter {
    /// Only those with this server
    #[arg(long, value_name = "NAME")]
    server: Option<String>,
    /// Only those of this principal, as listed
    #[arg(long, value_name = "PRINCIPAL")]
    principal: Option<String>,
    /// Only those that this agent opened
    #[arg(long, value_name = "AGENT")]
    agent: Option<String>,
}

impl Filter {
    fn is_empty(&self) -> bool {
        self.server.is_none() && self.principal.is_none() && self.agent.is_none()
    }
}

#[derive(Debug, Args)]
pub(super) struct ShowArgs {
    /// The session: `s-` and ten hexadecimal digits, as listed
    #[arg(value_name = "REF", required_unless_present = "id")]
    session: Option<String>,
    #[command(flatten)]
    by_id: ids::ById,
    #[command(flatten)]
    place: Place,
}

/// Lists sessions.
fn list(args: &ListArgs, out: &Output) -> Result<(), Failure> {
    let wanted =
        Wanted { state: args.state.as_deref(), filter: &args.filter, limit: args.limit.map(NonZeroUsize::get) };
    let api = Api::find(&args.place)?;
    let listed = match (args.by_id.is_given(), args.is_filtered()) {
        (true, true) => {
            return Err(Failure::usage(anyhow!("sessions are named by ids and by a filter"))
                .hint("name them by one of the two"));
        }
        (true, false) => Listed { sessions: args.by_id.sessions(&api, out)?, next: None, note: None },
        (false, _) => find(&api, &wanted, args.after.clone())?,
    };
    if out.is_json() {
        return out.document(&listed);
    }
    out.line(&lines_of(&rows(&listed.sessions)))?;
    if let Some(note) = &listed.note {
        out.note(&format!("note: {}", plain(note)));
    }
    if let Some(next) = listed.next {
        out.note(&format!("more: {}", continued(args, &next)));
    }
    Ok(())
}

/// A table of sessions. Ends and reasons have their columns where there are any.
fn rows(sessions: &[Value]) -> Table {
    let told = |name: &str| sessions.iter().any(|session| session[name].is_string());
    let further: Vec<(&str, &str)> =
        [("ended_at", "ENDED"), ("reason", "REASON")].into_iter().filter(|(name, _)| told(name)).collect();
    let mut headings = vec!["REF", "SERVER", "PRINCIPAL", "STATE", "CLIENT", "AGE", "IDLE", "CONTINUITY"];
    headings.extend(further.iter().map(|(_, heading)| *heading));
    let mut shown = table(&headings);
    for session in sessions {
        let mut cells = row(session);
        cells.extend(further.iter().map(|(name, _)| match session[*name].as_str() {
            Some(at) if *name == "ended_at" => format!("{} ago", ago(at)),
            Some(text) => plain(text),
            None => "-".to_owned(),
        }));
        shown.add_row(cells);
    }
    shown
}

/// The command that lists what comes behind `next`.
fn continued(args: &ListArgs, next: &str) -> String {
    let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string());
    let options = [
        ("--state-dir", path(&args.place.state_dir)),
        ("--config", path(&args.place.config)),
        ("--state", args.state.clone()),
        ("--server", args.filter.server.clone()),
        ("--principal", args.filter.principal.clone()),
        ("--agent", args.filter.agent.clone()),
        ("--limit", args.limit.map(|limit| limit.to_string())),
        ("--after", Some(next.to_owned())),
    ];
    let given = options.into_iter().filter_map(|(name, value)| Some(format!("{name} {}", quoted(&plain(&value?)))));
    given.fold("mainstay sessions list".to_owned(), |command, option| format!("{command} {option}"))
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let bare = |symbol: char| symbol.is_ascii_alphanumeric() || "/._-:@+=".contains(symbol);
    if !word.is_empty() && word.chars().all(bare) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

/// Which sessions are asked for.
struct Wanted<'a> {
    state: Option<&'a str>,
    filter: &'a Filter,
    limit: Option<usize>,
}

/// The sessions wanted, over as many pages as it takes.
fn find(api: &Api, wanted: &Wanted<'_>, after: Option<String>) -> Result<Listed, Failure> {
    let mut listed = Listed { sessions: Vec::new(), next: after, note: None };
    let most = wanted.limit.unwrap_or(SESSIONS_MAX);
    while listed.sessions.len() < most {
        let limit = (most - listed.sessions.len()).min(PAGE_SESSIONS_MAX).to_string();
        let after = listed.next.take();
        let asked = query(&[
            ("limit", Some(&limit)),
            ("after", after.as_deref()),
            ("state", wanted.state),
            ("server", wanted.filter.server.as_deref()),
            ("principal", wanted.filter.principal.as_deref()),
            ("agent", wanted.filter.agent.as_deref()),
        ]);
        let page: Listed = api.get(&format!("/sessions{asked}"))?;
        listed.sessions.extend(page.sessions);
        listed.next = page.next;
        listed.note = page.note;
        if listed.next.is_none() {
            break;
        }
    }
    Ok(listed)
}

/// A ref, checked before it becomes part of a path.
pub(super) fn checked(text: &str) -> Result<String, Failure> {
    let found = SessionRef::parse(text).map(|session_ref| session_ref.to_string());
    found.ok_or_else(|| {
        // It may be a session's id, which is a secret: it is not repeated.
        Failure::usage(anyhow!("this is no session's ref")).hint(
            "a ref is `s-` and ten hexadecimal digits, see `mainstay sessions list`; what a client sends as \
             `Mcp-Session-Id` is an id, which is secret: say `--id -` and give it on standard input",
        )
    })
}

fn row(session: &Value) -> Vec<String> {
    let word = |name: &str| session[name].as_str().map_or_else(|| "-".to_owned(), plain);
    let idle = match session["calls"].as_u64() {
        Some(calls @ 1..) => {
            let begun = session["calls_in_flight"].as_array().into_iter().flatten();
            // RFC 3339 sorts as text does: the first is the one that has been in flight for the longest.
            let oldest = begun.filter_map(|call| call["since"].as_str()).min();
            let oldest = oldest.map(|since| format!(", {}", ago(since))).unwrap_or_default();
            let gone = if session["client_connected"] == false { ", client gone" } else { "" };
            format!("{calls} in flight{oldest}{gone}")
        }
        _ => ago(session["seen_at"].as_str().unwrap_or_default()),
    };
    let continuity = match (session["continuity"].as_str(), session["remade_count"].as_u64()) {
        (Some("remade"), Some(times @ 1..)) => format!("remade {times}x"),
        (Some(continuity), Some(times @ 1..)) => format!("{}, remade {times}x", plain(continuity)),
        (Some(continuity), _) => plain(continuity),
        (None, _) => "-".to_owned(),
    };
    let age = ago(session["opened_at"].as_str().unwrap_or_default());
    let principal = match (word("principal"), session["agent"].as_str().map(plain)) {
        (principal, Some(agent)) if principal != format!("agent:{agent}") => format!("{principal} ({agent})"),
        (principal, _) => principal,
    };
    vec![word("ref"), word("server"), principal, word("state"), word("client"), age, idle, continuity]
}

#[derive(Serialize, Deserialize)]
struct Listed {
    sessions: Vec<Value>,
    next: Option<String>,
    note: Option<String>,
}

/// What the API gives at once.
const PAGE_SESSIONS_MAX: usize = 1000;
/// More than any gateway holds, and how many of them are listed, or ended by a filter, at once.
const SESSIONS_MAX: usize = 1_000_000;
const LIST_EXAMPLES: &str = "\
Examples:
  mainstay sessions list --server files --state ready
  mainstay sessions list --principal agent:nightly
  mainstay sessions list --id - < ids.txt
  mainstay --json sessions list --limit 100";

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_row_tells_activity_and_continuity_and_no_client_drives_the_terminal() {
        let session = json!({"ref": "s-0000000001", "client": "x\u{1b}[2J", "calls": 2, "continuity": "remade", "remade_count": 3});
        let row = row(&session);
        assert_eq!(row[4], "x\\u{1b}[2J");
        assert_eq!((row[6].as_str(), row[7].as_str()), ("2 in flight", "remade 3x"));
        assert_eq!((row[1].as_str(), row[5].as_str()), ("-", "-"));
    }

    #[test]
    fn o1_a_list_with_ended_sessions_tells_when_and_why_and_one_without_is_as_narrow_as_before() {
        let ready = json!({"ref": "s-0000000001", "state": "ready", "ended_at": null, "reason": null});
        let ended = json!({"ref": "s-0000000002", "state": "closed", "ended_at": "1970-01-01T00:00:00.000Z", "reason": "stuck"});
        let text = lines_of(&rows(&[ready.clone(), ended]));
        assert!(text.lines().next().is_some_and(|line| line.contains("ENDED") && line.ends_with("REASON")), "{text}");
        assert!(text.lines().nth(1).is_some_and(|line| line.ends_with('-')), "{text}");
        assert!(text.lines().nth(2).is_some_and(|line| line.contains("d ago") && line.ends_with("stuck")), "{text}");
        assert!(!lines_of(&rows(&[ready])).contains("ENDED"));
    }

    #[test]
    fn a_call_whose_client_is_gone_is_told_as_that() {
        let of = |connected: bool| row(&json!({"calls": 1, "client_connected": connected})).swap_remove(6);
        assert_eq!((of(true), of(false)), ("1 in flight".into(), "1 in flight, client gone".into()));
    }

    #[test]
    fn i2_the_agent_is_told_unless_it_is_the_principal_itself() {
        let shown = |principal: &str| row(&json!({"principal": principal, "agent": "nightly"})).swap_remove(2);
        assert_eq!((shown("agent:nightly"), shown("token:ci")), ("agent:nightly".into(), "token:ci (nightly)".into()));
    }

    #[test]
    fn only_refs_are_asked_for() {
        assert!(checked("s-0123456789").is_ok());
        assert!(!format!("{:?}", checked("CANARY").unwrap_err()).contains("CANARY"));
    }

    #[test]
    fn the_command_for_more_keeps_what_was_asked() {
        let args = ListArgs {
            state: Some("ready".into()),
            filter: Filter::default(),
            by_id: ids::ById::default(),
            limit: NonZeroUsize::new(2),
            after: None,
            place: Place { state_dir: Some("/a b".into()), config: None },
        };
        let told = continued(&args, "s-0123456789");
        assert_eq!(told, "mainstay sessions list --state-dir '/a b' --state ready --limit 2 --after s-0123456789");
    }
}
