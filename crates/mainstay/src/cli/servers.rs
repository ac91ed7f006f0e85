//! `mainstay servers`: list, show, restart, logs.

use std::time::Duration;

use clap::{Args, Subcommand};
use serde_json::Value;

use super::Place;
use super::api::{Api, block_on, query};
use super::failure::Failure;
use super::output::{Output, lines_of, plain, table};
use super::times::{ago, until};

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// List them, with the state of each
    List(Place),
    /// Show everything known of one: its children, how the last ones ended, when it is tried again
    Show(NamedArgs),
    /// End its processes and lift what keeps new ones from being started; sessions go on
    Restart(NamedArgs),
    /// What its processes wrote to standard error
    #[command(after_help = LOGS_EXAMPLES)]
    Logs(LogsArgs),
}

#[derive(Debug, Args)]
pub(super) struct NamedArgs {
    /// The server's name
    #[arg(value_name = "NAME")]
    name: String,
    #[command(flatten)]
    place: Place,
}

#[derive(Debug, Args)]
pub(super) struct LogsArgs {
    #[command(flatten)]
    named: NamedArgs,
    /// How many of the last lines
    #[arg(long, default_value = "100", value_name = "COUNT")]
    lines: usize,
    /// Go on with what comes, until interrupted
    #[arg(short, long)]
    follow: bool,
}

/// Runs one of the commands.
pub(super) fn run(command: &Command, out: &Output) -> Result<(), Failure> {
    match command {
        Command::List(place) => list(place, out),
        Command::Show(args) => show(args, out),
        Command::Restart(args) => restart(args, out),
        Command::Logs(args) => logs(args, out),
    }
}

fn list(place: &Place, out: &Output) -> Result<(), Failure> {
    let listed: Value = Api::find(place)?.get("/servers")?;
    if out.is_json() {
        return out.document(&listed);
    }
    let headings =
        ["NAME", "TRANSPORT", "PATH", "STATE", "ERA", "CHILDREN", "SESSIONS", "IN FLIGHT", "RESTARTS", "NOTE"];
    let mut shown = table(&headings);
    for server in listed["servers"].as_array().into_iter().flatten() {
        let word = |name: &str| server[name].as_str().map_or_else(|| "-".to_owned(), plain);
        let number = |name: &str| server[name].to_string();
        let of_children = |name: &str| if server["transport"] == "http" { "-".to_owned() } else { number(name) };
        shown.add_row([
            word("name"),
            word("transport"),
            word("path"),
            word("state").replace('_', " "),
            word("era"),
            of_children("children"),
            number("sessions"),
            number("calls"),
            of_children("restarts"),
            note_of(server),
        ]);
    }
    out.line(&lines_of(&shown))
}

/// What an operator should know of a server in a list.
fn note_of(server: &Value) -> String {
    let mut notes = Vec::new();
    if let Some(next) = server["next_try_at"].as_str() {
        notes.push(format!("next try {}", until(next)));
    }
    if server["newer_on_disk"] == true {
        notes.push("newer on disk".to_owned());
    }
    if let Some(text) = server["last_failure"]["text"].as_str() {
        let at = server["last_failure"]["at"].as_str().unwrap_or_default();
        notes.push(format!("{} ({} ago)", plain(text), ago(at)));
    }
    if notes.is_empty() { "-".to_owned() } else { notes.join("; ") }
}

fn show(args: &NamedArgs, out: &Output) -> Result<(), Failure> {
    let detail: Value = Api::find(&args.place)?.get(&path_of(&args.name, ""))?;
    if out.is_json() {
        return out.document(&detail);
    }
    let summary = &detail["summary"];
    let mut shown = table(&[]);
    let word = |value: &Value| value.as_str().map_or_else(|| "-".to_owned(), plain);
    let mut row = |name: &str, text: String| {
        shown.add_row([name.to_owned(), text]);
    };
    for name in ["name", "transport", "path"] {
        row(name, word(&summary[name]));
    }
    row("state", word(&summary["state"]).replace('_', " "));
    row("era", word(&summary["era"]));
    row("sessions", summary["sessions"].to_string());
    row("in flight", summary["calls"].to_string());
    let failure = &summary["last_failure"];
    if let Some(text) = failure["text"].as_str() {
        let at = failure["at"].as_str().unwrap_or_default();
        row("last failure", format!("{} ({} ago)", plain(text), ago(at)));
        if let Some(words) = failure["stderr_tail"].as_str() {
            row("its last words", plain(words));
        }
    }
    if summary["transport"] == "http" {
        row("answered", detail["answered_at"].as_str().map_or_else(|| "-".to_owned(), |at| format!("{} ago", ago(at))));
        return out.line(&lines_of(&shown));
    }
    row("failures in a row", detail["failures_in_a_row"].to_string());
    row("next try", summary["next_try_at"].as_str().map_or_else(|| "at the next call".to_owned(), until));
    row("restarts", summary["restarts"].to_string());
    row("children", summary["children"].to_string());
    for child in detail["children"].as_array().into_iter().flatten() {
        let since = ago(child["since"].as_str().unwrap_or_default());
        row("", format!("child {}, for {since}, program on disk: {}", child["child"], word(&child["on_disk"])));
    }
    for exit in detail["exits"].as_array().into_iter().flatten() {
        row("exit", exit_line(exit));
    }
    out.line(&lines_of(&shown))
}

/// How a child ended, in one line.
fn exit_line(exit: &Value) -> String {
    let how = match (exit["code"].as_i64(), exit["signal"].as_i64()) {
        (Some(code), _) => format!("status {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "unknown".to_owned(),
    };
    let by = exit["reason"].as_str().map(|reason| format!(", {}", plain(reason))).unwrap_or_default();
    let lived = Duration::from_millis(exit["lived_ms"].as_u64().unwrap_or_default());
    let at = exit["at"].as_str().map(plain).unwrap_or_default();
    let words = exit["stderr_tail"].as_str().and_then(|tail| tail.lines().last()).map(plain).unwrap_or_default();
    let words = if words.is_empty() { words } else { format!(": {words}") };
    format!("{at}  {how}{by}, after {:.1} s{words}", lived.as_secs_f64())
}

fn restart(args: &NamedArgs, out: &Output) -> Result<(), Failure> {
    let api = Api::find(&args.place)?;
    let done: Value = api.post(&path_of(&args.name, "/restart"), &serde_json::json!({}))?;
    if out.is_json() {
        return out.document(&done);
    }
    let ended = done["ended"].as_u64().unwrap_or_default();
    out.line(&format!("{} restarted: {ended} processes ended; sessions start others with their next call", args.name))
}

fn logs(args: &LogsArgs, out: &Output) -> Result<(), Failure> {
    let api = Api::find(&args.named.place)?;
    block_on(async {
        let mut asked = query(&[("lines", Some(&args.lines.to_string()))]);
        loop {
            let part: Value = api.read(&path_of(&args.named.name, &format!("/logs{asked}"))).await?;
            let text = part["text"].as_str().unwrap_or_default();
            tell(&part, text, out)?;
            if !args.follow {
                return Ok(());
            }
            asked = query(&[("after", part["next"].as_str())]);
            if text.is_empty() {
                tokio::time::sleep(FOLLOW_PAUSE).await;
            }
        }
    })
}

/// A part of a log: for programs one document a part, for people line by line.
fn tell(part: &Value, text: &str, out: &Output) -> Result<(), Failure> {
    if part["gap"] == true {
        out.note("some of the log between is not kept any more");
    }
    if out.is_json() {
        return if text.is_empty() { Ok(()) } else { out.document(part) };
    }
    text.lines().try_for_each(|line| out.line(&plain(line)))
}

/// The path of the server `name`, which may be any text, in the API.
fn path_of(name: &str, rest: &str) -> String {
    // Escaped as in a query; a `/` must not lead elsewhere.
    let escaped = query(&[("", Some(name))]);
    format!("/servers/{}{rest}", escaped.trim_start_matches("?="))
}

/// Between two looks at a log that has not grown.
const FOLLOW_PAUSE: Duration = Duration::from_millis(500);
const LOGS_EXAMPLES: &str = "\
Examples:
  mainstay servers logs files --lines 20
  mainstay servers logs files -f";

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_name_leads_nowhere_else() {
        assert_eq!(path_of("files", "/restart"), "/servers/files/restart");
        assert_eq!(path_of("../x y", ""), "/servers/..%2Fx%20y");
    }

    #[test]
    fn an_exit_is_told_in_one_line() {
        let exit = json!({"at": "2026-11-30T00:00:00.000Z", "code": 1, "signal": null, "lived_ms": 1500, "ordered": false,
                          "stderr_tail": "a\nout of memory"});
        assert_eq!(exit_line(&exit), "2026-11-30T00:00:00.000Z  status 1, after 1.5 s: out of memory");
    }
}
