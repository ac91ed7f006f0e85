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

/// Puts the changed configuration in force.
pub(super) fn reload(place: &Place, out: &Output) -> Result<(), Failure> {
    hand_over(place, out, "reload")
}

/// Goes on with the program that is installed now.
pub(super) fn upgrade(place: &Place, out: &Output) -> Result<(), Failure> {
    hand_over(place, out, "upgrade")
}

fn hand_over(place: &Place, out: &Output, order: &str) -> Result<(), Failure> {
    let api = Api::find(place)?;
    let before = Running::of(&api)?;
    let ordered = match api.post(&format!("/{order}"), &json!({})) {
        Ok(ordered) => ordered,
        // The answer was lost on the way, perhaps with the worker that gave it: what has come of it shows.
        Err(failure) if failure.is_not_running() => Ordered { worker: before.worker, begun: true },
        Err(failure) => return Err(failure.hint("nothing was changed; the gateway goes on as it was")),
    };
    if !ordered.begun {
        return told(
            out,
            &Outcome { begun: false, changes: Vec::new(), version: &before.version },
            "nothing has changed",
        );
    }
    let after = wait(&api, &before, ordered.worker, out)?;
    let changes = differences(&before.knobs, &after.knobs);
    let mut text = match order {
        "upgrade" => format!("upgraded from {} to {}", plain(&before.version), plain(&after.version)),
        _ => "the new configuration is in force".to_owned(),
    };
    for change in &changes {
        text.push_str("\n  ");
        text.push_str(change);
    }
    told(out, &Outcome { begun: true, changes, version: &after.version }, &text)
}

fn told(out: &Output, outcome: &Outcome<'_>, text: &str) -> Result<(), Failure> {
    if out.is_json() { out.document(outcome) } else { out.line(text) }
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

/// What of the settings is another now, without values of servers: they may be confidential.
fn differences(before: &[Knob], after: &[Knob]) -> Vec<String> {
    let server_of =
        |knob: &Knob| knob.name.strip_prefix("servers.").and_then(|rest| rest.split('.').next().map(str::to_owned));
    let servers = |knobs: &[Knob]| knobs.iter().filter_map(server_of).collect::<std::collections::BTreeSet<_>>();
    let (old, new) = (servers(before), servers(after));
    let of = |knobs: &[Knob], server: &str| -> Vec<(String, String)> {
        knobs
            .iter()
            .filter(|knob| server_of(knob).as_deref() == Some(server))
            .map(|knob| (knob.name.clone(), knob.value.clone()))
            .collect()
    };
    let mut changes = Vec::new();
    changes.extend(new.difference(&old).map(|name| format!("server `{}` is new", plain(name))));
    changes.extend(old.difference(&new).map(|name| format!("server `{}` is gone; its sessions end", plain(name))));
    let changed = old.intersection(&new).filter(|name| of(before, name) != of(after, name));
    changes.extend(
        changed.map(|name| format!("server `{}` has changed; it is started anew for its sessions", plain(name))),
    );
    for knob in after.iter().filter(|knob| server_of(knob).is_none()) {
        let former = before.iter().find(|other| other.name == knob.name);
        if former.is_none_or(|former| former.value != knob.value) {
            let former = former.map_or("unset", |former| former.value.as_str());
            changes.push(format!("`{}`: {} → {}", plain(&knob.name), plain(former), plain(&knob.value)));
        }
    }
    changes
}

/// What a gateway is before and after.
struct Running {
    version: String,
    worker: u64,
    handover: Option<Handover>,
    knobs: Vec<Knob>,
}

impl Running {
    fn of(api: &Api) -> Result<Self, Failure> {
        let status: Status = api.get("/status")?;
        let knobs: Knobs = api.get("/config")?;
        let Status { version, worker, handover } = status;
        Ok(Self { version, worker: worker.number, handover, knobs: knobs.knobs })
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

#[derive(Deserialize)]
struct Knobs {
    knobs: Vec<Knob>,
}

#[derive(Deserialize)]
struct Knob {
    name: String,
    value: String,
}

#[derive(Deserialize)]
struct Ordered {
    worker: u64,
    begun: bool,
}

#[derive(Serialize)]
struct Outcome<'a> {
    begun: bool,
    changes: Vec<String>,
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
    fn t4_what_has_changed_is_told_by_server_and_without_its_values() {
        let knobs = |pairs: &[(&str, &str)]| -> Vec<Knob> {
            pairs.iter().map(|(name, value)| Knob { name: (*name).to_owned(), value: (*value).to_owned() }).collect()
        };
        let before = knobs(&[("servers.a.url", "x"), ("servers.b.args", "1"), ("session.drain_grace", "5s")]);
        let after = knobs(&[("servers.b.args", "secret"), ("servers.c.url", "y"), ("session.drain_grace", "9s")]);
        assert_eq!(
            differences(&before, &after),
            [
                "server `c` is new",
                "server `a` is gone; its sessions end",
                "server `b` has changed; it is started anew for its sessions",
                "`session.drain_grace`: 5s → 9s",
            ]
        );
    }
}
