//! `mainstay reload` and `mainstay upgrade`: the same act, with the same program or with another.

use std::time::Duration;

use anyhow::anyhow;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::Place;
use super::api::Api;
use super::failure::Failure;
use super::output::{Output, plain};
use crate::runtime::Clock;

#[derive(Debug, clap::Args)]
pub(super) struct ReloadArgs {
    /// Only say what would change, and how many sessions that concerns
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    place: Place,
}

/// Puts the changed configuration in force, or says what that would do.
pub(super) fn reload(args: &ReloadArgs, out: &Output) -> Result<(), Failure> {
    if args.dry_run { rehearse(&args.place, out) } else { hand_over(&args.place, out, "reload") }
}

/// Goes on with the program that is installed now.
pub(super) fn upgrade(place: &Place, out: &Output) -> Result<(), Failure> {
    hand_over(place, out, "upgrade")
}

fn rehearse(place: &Place, out: &Output) -> Result<(), Failure> {
    let rehearsed: Result<Rehearsed, _> = Api::find(place)?.post("/reload/rehearse", &json!({}));
    let rehearsed = rehearsed.map_err(|failure| failure.hint("a reload would be refused for the same reason"))?;
    if out.is_json() {
        return out.document(&rehearsed);
    }
    match rehearsed.changes {
        Some(changes) => out.line(&format!("a reload would do this; nothing was done:{}", listed(&changes))),
        None => out.line("a reload would change nothing"),
    }
}

fn hand_over(place: &Place, out: &Output, order: &str) -> Result<(), Failure> {
    let api = Api::find(place)?;
    let before = Running::of(&api)?;
    let ordered = match api.post(&format!("/{order}"), &json!({})) {
        Ok(ordered) => ordered,
        // The answer was lost on the way, perhaps with the worker that gave it: what has come of it shows.
        Err(failure) if failure.is_not_running() => Ordered { worker: before.worker, begun: true, changes: None },
        Err(failure) => return Err(failure.hint("nothing was changed; the gateway goes on as it was")),
    };
    if !ordered.begun {
        let outcome =
            Outcome { begun: false, changes: Vec::new(), servers: &[], settings: &[], version: &before.version };
        return told(out, &outcome, "nothing has changed");
    }
    let after = wait(&api, &before, ordered.worker, out)?;
    let changes = ordered.changes.unwrap_or_default();
    let text = match order {
        "upgrade" => format!("upgraded from {} to {}", plain(&before.version), plain(&after.version)),
        _ => "the new configuration is in force".to_owned(),
    };
    let outcome = Outcome {
        begun: true,
        changes: sentences(&changes),
        servers: &changes.servers,
        settings: &changes.settings,
        version: &after.version,
    };
    told(out, &outcome, &format!("{text}{}", listed(&changes)))
}

fn told(out: &Output, outcome: &Outcome<'_>, text: &str) -> Result<(), Failure> {
    if out.is_json() { out.document(outcome) } else { out.line(text) }
}

fn listed(changes: &Changes) -> String {
    sentences(changes).into_iter().map(|change| format!("\n  {change}")).collect()
}

/// A sentence for each change.
fn sentences(changes: &Changes) -> Vec<String> {
    let servers = changes.servers.iter().map(|server| {
        let name = plain(&server.name);
        let fields: Vec<_> = server.fields.iter().map(|field| plain(field)).collect();
        let fields = fields.join(", ");
        let sessions = server.sessions.map_or_else(String::new, |sessions| format!("{sessions} "));
        match &*server.change {
            "added" => format!("server `{name}` is new"),
            "removed" => format!("server `{name}` is gone; its {sessions}sessions end"),
            "redefined" => {
                format!(
                    "server `{name}` is defined anew ({fields} changed); it is started anew for its {sessions}sessions"
                )
            }
            _ => format!("server `{name}` has changed ({fields}); its sessions go on as they are"),
        }
    });
    let settings = changes.settings.iter().map(|setting| {
        let name = plain(&setting.name);
        let shown = |value: &Option<String>| value.as_deref().map_or_else(|| "unset".to_owned(), plain);
        let (before, after) = (shown(&setting.before), shown(&setting.after));
        // What may be confidential looks the same.
        if before == after { format!("`{name}` has changed") } else { format!("`{name}`: {before} → {after}") }
    });
    servers.chain(settings).collect()
}

/// Waits for a later worker than `former`.
fn wait(api: &Api, before: &Running, former: u64, out: &Output) -> Result<Running, Failure> {
    let clock = Clock::system();
    let mut noted = false;
    loop {
        let waited = clock.now().since(clock.started_at());
        // While no worker serves, the question waits in the listener's queue; it may also meet the one that leaves.
        if let Ok(running) = Running::of(api)
            && running.worker > former
        {
            return match running.handover.as_ref() {
                Some(handover) if handover.outcome == "not_succeeded" => {
                    let reason = handover.reason.as_deref().unwrap_or("nobody knows why");
                    let cause = anyhow!("the next worker failed: {}", plain(reason));
                    Err(Failure::from(cause).hint("the gateway went back to what it was; its log says more"))
                }
                _ => Ok(running),
            };
        }
        if waited > HANDOVER_BOUND {
            let cause = anyhow!("no new worker has come after {} s", HANDOVER_BOUND.as_secs());
            return Err(Failure::from(cause).hint("see the gateway's log and `mainstay status`"));
        }
        if waited > TELL_AFTER && !noted {
            out.note(&format!("waiting for worker {former} of mainstay {} to hand over", plain(&before.version)));
            noted = true;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// What a gateway is before and after.
struct Running {
    version: String,
    worker: u64,
    handover: Option<Handover>,
}

impl Running {
    fn of(api: &Api) -> Result<Self, Failure> {
        let status: Status = api.get("/status")?;
        let Status { version, worker, handover } = status;
        Ok(Self { version, worker: worker.number, handover })
    }
}

#[derive(Deserialize)]
struct Status {
    version: String,
    worker: Worker,
    #[serde(default)]
    handover: Option<Handover>,
}

#[derive(Deserialize)]
struct Worker {
    number: u64,
}

#[derive(Deserialize)]
struct Handover {
    outcome: String,
    reason: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct Rehearsed {
    changes: Option<Changes>,
}

#[derive(Default, Serialize, Deserialize)]
struct Changes {
    servers: Vec<ServerChange>,
    settings: Vec<SettingChange>,
}

#[derive(Serialize, Deserialize)]
struct ServerChange {
    name: String,
    change: String,
    fields: Vec<String>,
    sessions: Option<u64>,
}

#[derive(Serialize, Deserialize)]
struct SettingChange {
    name: String,
    before: Option<String>,
    after: Option<String>,
}

#[derive(Deserialize)]
struct Ordered {
    worker: u64,
    begun: bool,
    #[serde(default)]
    changes: Option<Changes>,
}

#[derive(Serialize)]
struct Outcome<'a> {
    begun: bool,
    /// A sentence for each.
    changes: Vec<String>,
    servers: &'a [ServerChange],
    settings: &'a [SettingChange],
    version: &'a str,
}

/// Longer than a handover with everything that may go wrong in it.
const HANDOVER_BOUND: Duration = Duration::from_secs(90);
const TELL_AFTER: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t4_what_changes_is_told_by_server_with_its_sessions_and_without_its_values() {
        let changes = json!({
            "servers": [
                {"name": "c", "change": "added", "fields": [], "sessions": 0},
                {"name": "a", "change": "removed", "fields": [], "sessions": 3},
                {"name": "b", "change": "redefined", "fields": ["args", "env.TOKEN"], "sessions": 2},
                {"name": "d", "change": "adjusted", "fields": ["patience"], "sessions": null},
            ],
            "settings": [
                {"name": "session.drain_grace", "before": "5s", "after": "9s"},
                {"name": "auth.tokens.ci", "before": "…", "after": "…"},
                {"name": "admin.token_file", "before": null, "after": "/t"},
            ],
        });
        assert_eq!(
            sentences(&serde_json::from_value(changes).unwrap()),
            [
                "server `c` is new",
                "server `a` is gone; its 3 sessions end",
                "server `b` is defined anew (args, env.TOKEN changed); it is started anew for its 2 sessions",
                "server `d` has changed (patience); its sessions go on as they are",
                "`session.drain_grace`: 5s → 9s",
                "`auth.tokens.ci` has changed",
                "`admin.token_file`: unset → /t",
            ]
        );
    }
}
