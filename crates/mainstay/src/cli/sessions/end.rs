//! `mainstay sessions drain` and `close`: one session, several, or all that match.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::anyhow;
use clap::Args;
use serde_json::{Value, json};

use super::ids::ById;
use super::{Filter, SESSIONS_MAX, Wanted, checked, find};
use crate::cli::Place;
use crate::cli::api::Api;
use crate::cli::failure::{Failure, Pace, settle_all};
use crate::cli::output::{Output, lines_of, plain, table};
use crate::cli::times::until;

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
    by_id: ById,
    #[command(flatten)]
    filter: Filter,
    /// End all that match, without being asked again
    #[arg(long)]
    yes: bool,
}

/// Drains sessions, and waits until they have ended.
pub(super) fn drain(args: &DrainArgs, out: &Output) -> Result<(), Failure> {
    let api = Api::find(&args.place)?;
    let refs = args.which.refs(&api, &["ready", "initializing"], out)?;
    let order = json!({ "grace": args.grace });
    let mut outcome = settle_all(&refs, out, |session_ref| args.which.ended(&api, session_ref, ("drain", &order)));
    if !args.no_wait {
        wait(&api, &mut outcome.done, out)?;
    }
    tell(&outcome.done, out)?;
    outcome.ended()
}

/// Closes sessions.
pub(super) fn close(args: &CloseArgs, out: &Output) -> Result<(), Failure> {
    let api = Api::find(&args.place)?;
    let refs = args.which.refs(&api, &["ready", "initializing", "draining"], out)?;
    let order = json!({ "reason": args.reason });
    let outcome = settle_all(&refs, out, |session_ref| args.which.ended(&api, session_ref, ("close", &order)));
    tell(&outcome.done, out)?;
    outcome.ended()
}

impl Which {
    /// The refs; of what a filter finds, those in one of `states`.
    fn refs(&self, api: &Api, states: &[&str], out: &Output) -> Result<Vec<String>, Failure> {
        let ways = [!self.sessions.is_empty(), self.by_id.is_given(), !self.filter.is_empty()];
        match ways {
            [false, false, false] => {
                return Err(Failure::usage(anyhow!("no session is named"))
                    .hint("name some by their refs, or all that match with `--server`, `--principal` or `--agent`"));
            }
            [true, false, false] => return self.sessions.iter().map(|text| checked(text)).collect(),
            [false, true, false] => {
                let found = self.by_id.sessions(api, out)?;
                return Ok(found.iter().filter_map(ref_of).collect());
            }
            [false, false, true] => {}
            _ => {
                return Err(Failure::usage(anyhow!("sessions are named by more than one of refs, ids and a filter"))
                    .hint("name them by one of the three"));
            }
        }
        let found = find(api, &Wanted { state: None, filter: &self.filter, limit: None }, None)?;
        if found.next.is_some() {
            return Err(Failure::usage(anyhow!("more than {SESSIONS_MAX} sessions match; nothing was done"))
                .hint("end some of them first, by a narrower filter"));
        }
        let living = found.sessions.iter().filter(|view| states.iter().any(|state| view["state"] == *state));
        let refs: Vec<String> = living.filter_map(ref_of).collect();
        match refs.len() {
            0 => Err(match found.note {
                Some(note) => Failure::not_found(anyhow!("no live session matches: {}", plain(&note))),
                None => Failure::not_found(anyhow!("no live session matches")),
            }),
            count if !self.yes => Err(Failure::usage(anyhow!("{count} sessions match; nothing was done"))
                .hint("look at them with `mainstay sessions list`, then add `--yes`")),
            _ => Ok(refs),
        }
    }
}

impl Which {
    /// Gives an order to end a session. One that was only found by a filter may have ended by itself meanwhile, which is
    /// what was wanted; of one that was named, that is told.
    fn ended(&self, api: &Api, session_ref: &str, (word, order): (&str, &Value)) -> Result<Value, Failure> {
        let ordered = api.post(&format!("/sessions/{session_ref}/{word}"), order);
        match ordered {
            Err(failure) if !self.filter.is_empty() => {
                let view = now(api, session_ref)?;
                let is_done = !lives(&view) || (word == "drain" && view["state"] == "draining");
                if is_done { Ok(view) } else { Err(failure) }
            }
            ordered => ordered,
        }
    }
}

fn ref_of(view: &Value) -> Option<String> {
    view["ref"].as_str().map(str::to_owned)
}

/// Waits until each of the sessions has ended, and keeps how it did. Tells of it from the second second on.
fn wait(api: &Api, views: &mut [Value], out: &Output) -> Result<(), Failure> {
    let (mut pace, mut failed) = (Pace::new(), 0);
    loop {
        match look(api, views, &mut pace, out) {
            Ok(0) => return Ok(()),
            Ok(_) => failed = 0,
            // A worker that is replaced in the meantime is no reason to stop waiting.
            Err(failure) if failed >= LOOKS_FAILED_MAX => return Err(failure),
            Err(_) => failed += 1,
        }
        if pace.elapsed() > WAIT_MAX {
            return Err(anyhow!("some sessions have not ended within {} h", WAIT_MAX.as_secs() / 3600).into());
        }
        tell_if_due(views, &mut pace, out);
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Looks at those that have not ended yet; how many they are. Many of them are looked at by the page.
fn look(api: &Api, views: &mut [Value], pace: &mut Pace, out: &Output) -> Result<usize, Failure> {
    let living: Vec<usize> = (0..views.len()).filter(|place| lives(&views[*place])).collect();
    let listed = if living.len() > ASKED_SINGLY_MAX { draining(api)? } else { BTreeMap::new() };
    let mut left = 0;
    for place in living {
        let session_ref = ref_of(&views[place]).unwrap_or_default();
        views[place] = match listed.get(&session_ref) {
            Some(view) => view.clone(),
            None => now(api, &session_ref)?,
        };
        left += usize::from(lives(&views[place]));
        tell_if_due(views, pace, out);
    }
    Ok(left)
}

/// All sessions that are being drained, by their refs.
fn draining(api: &Api) -> Result<BTreeMap<String, Value>, Failure> {
    let found = find(api, &Wanted { state: Some("draining"), filter: &Filter::default(), limit: None }, None)?;
    Ok(found.sessions.into_iter().filter_map(|view| Some((ref_of(&view)?, view))).collect())
}

/// A session as it is now; one that has ended and is forgotten already is `gone`.
fn now(api: &Api, session_ref: &str) -> Result<Value, Failure> {
    match api.get(&format!("/sessions/{session_ref}")) {
        Err(failure) if failure.is_not_found() => Ok(json!({ "ref": session_ref, "state": "gone" })),
        answered => answered,
    }
}

fn lives(view: &Value) -> bool {
    ["initializing", "ready", "draining"].iter().any(|state| view["state"] == *state)
}

fn tell_if_due(views: &[Value], pace: &mut Pace, out: &Output) {
    if views.iter().any(lives) && pace.is_due() {
        progress(views, out);
    }
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
    // RFC 3339 sorts as text does. Whatever goes on in them, they end when their grace is over.
    let last = living.iter().filter_map(|view| view["deadline"].as_str()).max();
    let latest = last.map(|at| format!(", the last at the latest {}", until(at))).unwrap_or_default();
    out.note(&format!("waiting for {} of {} sessions to end: {shown}{more}{latest}", living.len(), views.len()));
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

/// More sessions than that are looked at by the page.
const ASKED_SINGLY_MAX: usize = 16;
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Longer than the longest grace.
const WAIT_MAX: Duration = Duration::from_hours(25);
const LOOKS_FAILED_MAX: u32 = 100;
/// How many sessions a line of progress names.
const TOLD_MAX: usize = 3;
pub(super) const DRAIN_EXAMPLES: &str = "\
It waits until the sessions have ended, and tells of it if that takes longer than a second: each ends with its last call in
flight, or when the grace is over. Whatever becomes of this command, a drain that has begun goes on.

Examples:
  mainstay sessions drain s-292987c592
  mainstay sessions drain s-292987c592 --grace 2m --no-wait
  mainstay sessions drain --server files --yes
  mainstay sessions drain --id - < ids.txt

Exit code 1 if any of them could not be drained.";
pub(super) const CLOSE_EXAMPLES: &str = "\
Examples:
  mainstay sessions close s-292987c592 --reason \"stuck since the morning\"
  mainstay sessions close --agent nightly --yes

Exit code 1 if any of them could not be closed.";
