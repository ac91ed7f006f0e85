//! `mainstay stop`.

use std::path::Path;
use std::time::Duration;

use anyhow::anyhow;
use mainstay_keeper::{Signal, SignalError};
use serde::Serialize;

use super::failure::Failure;
use super::output::Output;
use super::{Place, config, gateway};
use crate::runtime::Clock;

/// Stops the gateway that owns the state directory's lock, and waits until it is gone. Sessions are kept.
pub(super) fn run(place: &Place, out: &Output) -> Result<(), Failure> {
    let state_dir = config::of_place(place)?.state_dir;
    let owner = mainstay_keeper::read_owner(&state_dir)
        .filter(|owner| owner.is_alive())
        .ok_or_else(|| gateway::absent(&state_dir))?;
    let pid = owner.identity.pid();
    // A memory store has no ledger.
    let sessions_kept = state_dir.join(LEDGER_FILE).exists();
    match mainstay_keeper::signal(owner.identity, Signal::TERM) {
        Ok(()) => {}
        Err(SignalError::NotRunning { .. }) => return Err(gateway::absent(&state_dir)),
        Err(error) => return Err(Failure::from(anyhow!(error)).hint("stop it as the user who started it")),
    }
    wait(&|| owner.is_alive(), pid, out).map_err(|failure| still_there(failure, &state_dir))?;
    if out.is_json() {
        return out.document(&Stopped { stopped: pid, sessions_kept });
    }
    let sessions = if sessions_kept { "kept" } else { "gone: its store was memory" };
    out.line(&format!("the gateway (pid {pid}) has stopped; its sessions are {sessions}"))
}

/// Waits while `alive`, telling of it from the second second on.
fn wait(alive: &dyn Fn() -> bool, pid: u32, out: &Output) -> Result<(), Failure> {
    let clock = Clock::system();
    let mut told = false;
    while alive() {
        let waited = clock.now().since(clock.started_at());
        if waited > STOP_BOUND {
            return Err(anyhow!("the gateway (pid {pid}) still runs after {} s", STOP_BOUND.as_secs()).into());
        }
        if waited > TELL_AFTER && !told {
            out.note(&format!("waiting for the gateway (pid {pid}) to finish calls in flight"));
            told = true;
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

fn still_there(failure: Failure, state_dir: &Path) -> Failure {
    failure.hint(format!("see its log; a second SIGTERM ends it at once (state in `{}`)", state_dir.display()))
}

#[derive(Serialize)]
struct Stopped {
    stopped: u32,
    sessions_kept: bool,
}

const LEDGER_FILE: &str = "ledger.db";
/// Longer than a drain with everything that may follow it.
const STOP_BOUND: Duration = Duration::from_secs(60);
const TELL_AFTER: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_millis(20);
