//! `mainstay sessions drain` and `close`: one session, several, or all that match.

use std::time::Duration;

use anyhow::anyhow;
use clap::Args;
use serde_json::{Value, json};

use super::{Filter, Wanted, checked, find};
use crate::cli::Place;
use crate::cli::api::Api;
use crate::cli::failure::{Failure, settle_all};
use crate::cli::output::{Output, lines_of, plain, table};
use crate::runtime::Clock;

#[derive(Debug, Args)]
pub(in crate::cli) struct DrainArgs {
    #[command(flatten)]
    which: Which,
    /// How long calls in flight may go on, for example `30s`; the setting `session.drain_grace` if absent
    #[arg(long, value_name = "TIME")]
    grace: Option<String>,
    /// Return once the drain has begun
    #[arg(long)]
    no_wait: bool,
    #[command(flatten)]
    place: Place,
}

#[derive(Debug, Args)]
pub(in crate::cli) struct CloseArgs {
    #[command(flatten)]
    which: Which,
    /// For whoever asks later
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
    #[command(flatten)]
    place: Place,
}

/// Which sessions are to end: those named, or all that match.
#[derive(Debug, Args)]
struct Which {
    /// The sessions: `s-` and ten hexadecimal digits, as listed
    #[arg(value_name = "REF")]
    sessions: Vec<String>,
    #[command(flatten)]
    filter: Filter,
    /// End all that match, without being asked again
    #[arg(long)]
    yes: bool,
}

/// Drains sessions, and waits until they have ended.
pub(super) fn drain(args: &DrainArgs, out: &Output) -> Result<(), Failure> {
    let api = Api::find(&args.place)?;
    let refs = args.which.refs(&api, &["ready", "initializing"])?;
    let order = json!({ "grace": args.grace });
    let mut outcome =
        settle_all(&refs, out, |session_ref| api.post::<Value>(&format!("/sessions/{session_ref}/drain"), &order));
    if !args.no_wait {
        wait(&api, &mut outcome.done, out)?;
    }
    tell(&outcome.done, out)?;
    outcome.ended()
}

/// Closes sessions.
pub(super) fn close(args: &CloseArgs, out: &Output) -> Result<(), Failure> {
    let api = Api::find(&args.place)?;
    let refs = args.which.refs(&api, &["ready", "initializing", "draining"])?;
    let order = json!({ "reason": args.reason });
    let outcome =
        settle_all(&refs, out, |session_ref| api.post::<Value>(&format!("/sessions/{session_ref}/close"), &order));
    tell(&outcome.done, out)?;
    outcome.ended()
}

impl Which {
    /// The refs; of what a filter finds, those in one of `states`.
    fn refs(&self, api: &Api, states: &[&str]) -> Result<Vec<String>, Failure> {
        match (self.sessions.is_empty(), self.filter.is_empty()) {
            (false, true) => return self.sessions.iter().map(|text| checked(text)).collect(),
            (true, true) => {
                return Err(Failure::usage(anyhow!("no session is named"))
                    .hint("name some by their refs, or all that match with `--server`, `--principal` or `--agent`"));
            }
            (false, false) => {
                return Err(Failure::usage(anyhow!("sessions are named by refs and by a filter"))
                    .hint("name them by one of the two"));
            }
            (true, false) => {}
        }
        let found = find(api, &Wanted { state: None, filter: &self.filter, limit: None }, None)?;
        let living = found.sessions.iter().filter(|view| states.iter().any(|state| view["state"] == *state));
        let refs: Vec<String> = living.filter_map(|view| view["ref"].as_str().map(str::to_owned)).collect();
        match refs.len() {
            0 => Err(Failure::not_found(anyhow!("no live session matches"))),
            count if !self.yes => Err(Failure::usage(anyhow!("{count} sessions match; nothing was done"))
                .hint("look at them with `mainstay sessions list`, then add `--yes`")),
            _ => Ok(refs),
        }
    }
}

/// Waits until each of the sessions has ended, and keeps how it did. Tells of it from the second second on.
fn wait(api: &Api, views: &mut [Value], out: &Output) -> Result<(), Failure> {
    let clock = Clock::system();
    let (mut told_at, mut failed) = (clock.started_at().plus(TELL_FIRST), 0);
    loop {
        match look(api, views) {
            Ok(0) => return Ok(()),
            Ok(_) => failed = 0,
            // A worker that is replaced in the meantime is no reason to stop waiting.
            Err(failure) if failed >= LOOKS_FAILED_MAX => return Err(failure),
            Err(_) => failed += 1,
        }
        let now = clock.now();
        if now.since(clock.started_at()) > WAIT_MAX {
            return Err(anyhow!("some sessions have not ended within {} h", WAIT_MAX.as_secs() / 3600).into());
        }
        if now >= told_at {
            progress(views, out);
            told_at = now.plus(TELL_EVERY);
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Looks at those that have not ended yet; how many they are.
fn look(api: &Api, views: &mut [Value]) -> Result<usize, Failure> {
    let mut living = 0;
    for view in views.iter_mut().filter(|view| lives(view)) {
        let session_ref = view["ref"].as_str().unwrap_or_default().to_owned();
        match api.get::<Value>(&format!("/sessions/{session_ref}")) {
            Ok(now) => *view = now,
            // Ended, and already forgotten.
            Err(failure) if failure.is_not_found() => view["state"] = json!("gone"),
            Err(failure) => return Err(failure),
        }
        living += usize::from(lives(view));
    }
    Ok(living)
}

fn lives(view: &Value) -> bool {
    ["initializing", "ready", "draining"].iter().any(|state| view["state"] == *state)
}

fn progress(views: &[Value], out: &Output) {
    let living: Vec<_> = views.iter().filter(|view| lives(view)).collect();
    if out.is_json() {
        return out.note_json(&json!({ "waiting": living.len(), "ended": views.len() - living.len() }));
    }
    let shown = living.iter().take(TOLD_MAX).map(|view| {
        let calls = view["calls"].as_u64().unwrap_or_default();
        format!("{} ({calls} in flight)", plain(view["ref"].as_str().unwrap_or_default()))
    });
    let shown = shown.collect::<Vec<_>>().join(", ");
    let more = if living.len() > TOLD_MAX { ", …" } else { "" };
    out.note(&format!("waiting for {} of {} sessions to end: {shown}{more}", living.len(), views.len()));
}

fn tell(views: &[Value], out: &Output) -> Result<(), Failure> {
    if out.is_json() {
        return out.document(&json!({ "sessions": views }));
    }
    if views.is_empty() {
        return Ok(());
    }
    let mut shown = table(&["REF", "SERVER", "STATE", "REASON"]);
    for view in views {
        let word = |name: &str| view[name].as_str().map_or_else(|| "-".to_owned(), plain);
        shown.add_row(["ref", "server", "state", "reason"].map(word));
    }
    out.line(&lines_of(&shown))
}

const TELL_FIRST: Duration = Duration::from_secs(1);
const TELL_EVERY: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Longer than the longest grace.
const WAIT_MAX: Duration = Duration::from_hours(25);
const LOOKS_FAILED_MAX: u32 = 100;
/// How many sessions a line of progress names.
const TOLD_MAX: usize = 3;
pub(super) const DRAIN_EXAMPLES: &str = "\
It waits until the sessions have ended, and tells of it if that takes longer than a second.

Examples:
  mainstay sessions drain s-292987c592
  mainstay sessions drain s-292987c592 --grace 2m --no-wait
  mainstay sessions drain --server files --yes

Exit code 1 if any of them could not be drained.";
pub(super) const CLOSE_EXAMPLES: &str = "\
Examples:
  mainstay sessions close s-292987c592 --reason \"stuck since the morning\"
  mainstay sessions close --agent nightly --yes

Exit code 1 if any of them could not be closed.";
