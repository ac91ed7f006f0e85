//! `mainstay stop`.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use anyhow::anyhow;
use mainstay_keeper::{Signal, SignalError};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::api::Api;
use super::failure::Failure;
use super::output::Output;
use super::place::config_of;
use super::{Place, gateway};
use crate::runtime::Clock;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    place: Place,
    /// It goes for good: close every session, and delete the servers' sessions
    #[arg(long)]
    retire: bool,
}

/// Stops the gateway that owns the state directory's lock, and waits until it is gone. Sessions are kept, unless it is
/// retired.
pub(super) fn run(args: &Args, out: &Output) -> Result<(), Failure> {
    let state_dir = config_of(&args.place)?.state_dir;
    let owner = mainstay_keeper::read_owner(&state_dir)
        .filter(|owner| owner.is_alive())
        .ok_or_else(|| gateway::absent(&state_dir))?;
    let pid = owner.identity.pid();
    // A memory store has no ledger.
    let sessions_kept = !args.retire && state_dir.join(LEDGER_FILE).exists();
    let retired = if args.retire {
        Some(retire(&args.place, out)?)
    } else {
        match mainstay_keeper::signal(owner.identity, Signal::TERM) {
            Ok(()) => {}
            Err(SignalError::NotRunning { .. }) => return Err(gateway::absent(&state_dir)),
            Err(error) => return Err(Failure::from(anyhow!(error)).hint("stop it as the user who started it")),
        }
        None
    };
    wait(&|| owner.is_alive(), pid, out).map_err(|failure| still_there(failure, &state_dir))?;
    if out.is_json() {
        return out.document(&Stopped { stopped: pid, sessions_kept, retired });
    }
    let sessions = match retired {
        Some(retired) => retired.to_string(),
        None if sessions_kept => "its sessions are kept".to_owned(),
        None => "its sessions are gone: its store was memory".to_owned(),
    };
    out.line(&format!("the gateway (pid {pid}) has stopped; {sessions}"))
}

/// Has the gateway retire. It stops by itself then, whatever becomes of this command.
fn retire(place: &Place, out: &Output) -> Result<Retired, Failure> {
    let api = Api::find(place)?;
    out.note("closing every session; calls in flight may end");
    let retired = api.post("/retire", &json!({}));
    retired.map_err(|failure| failure.hint("an order that was given goes on: see the log, or try again"))
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
    /// What became of the sessions of a gateway that went for good.
    retired: Option<Retired>,
}

#[derive(Serialize, Deserialize)]
struct Retired {
    sessions_closed: u64,
    sessions_left: u64,
    deletes_owed: u64,
    deletes_left: u64,
}

impl fmt::Display for Retired {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} sessions are closed", self.sessions_closed)?;
        if self.sessions_left > 0 {
            write!(f, ", {} could not be and are kept", self.sessions_left)?;
        }
        if self.deletes_owed > 0 {
            let owed = self.deletes_owed;
            write!(f, ", {owed} servers' sessions could not be deleted; ")?;
            f.write_str("those deletes stay owed: another start on this state directory pays them")?;
        }
        if self.deletes_left > 0 {
            write!(f, ", {} servers' sessions are left to expire there", self.deletes_left)?;
        }
        Ok(())
    }
}

const LEDGER_FILE: &str = "ledger.db";
/// Longer than a drain with everything that may follow it.
const STOP_BOUND: Duration = Duration::from_secs(60);
const TELL_AFTER: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_millis(20);
