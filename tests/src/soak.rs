//! The soak: clients call without a pause while workers are killed and replaced, and everything is counted afterwards.
//!
//! A [`Plan`] says how long and how hard; [`run`] carries it out on a real gateway in front of HTTP and stdio servers and
//! returns a [`Report`], which holds the figures and every breach of a promise. The program `soak` runs hundreds of kills, the
//! test `kill_loop` a few.

mod course;
mod growth;
mod load;
mod random;
mod report;
mod stand;

pub use course::{Event, Mark};
pub use growth::{Growth, Thirds};
pub use load::{Call, Fate};
pub use random::Random;
pub use report::{Pauses, Report};
pub use stand::Server;

use anyhow::{Context as _, Result};
use std::path::PathBuf;
use std::time::Duration;

/// What is to be done to a gateway.
#[derive(Debug, Clone)]
pub struct Plan {
    /// How often the worker is killed with SIGKILL.
    pub kills: usize,
    /// After how many kills each the configuration is reloaded; 0 for never.
    pub reload_every: usize,
    /// After how many kills each the gateway is upgraded; 0 for never.
    pub upgrade_every: usize,
    /// The shortest and the longest time between two kills, but for bursts of two.
    pub apart: (Duration, Duration),
    /// Whether kills are spaced so that the keeper starts every worker at once.
    pub spare_back_off: bool,
    /// How many clients call, a quarter of them on each server.
    pub clients: usize,
    /// What all random choices come from.
    pub seed: u64,
    /// Where the gateway's log and the list of calls that were not answered are left, if anywhere.
    pub keep: Option<PathBuf>,
}

/// Carries a plan out, from the start of the servers to the search for what is left behind.
///
/// # Errors
/// If the gateway or a server does not start, does not get ready again, or does not stop. What goes wrong with calls is no
/// error but in the report.
pub async fn run(plan: &Plan) -> Result<Report> {
    let mut stand = stand::Stand::start(plan.clients).await?;
    let outcome = measure(plan, &mut stand).await;
    if let Some(dir) = &plan.keep {
        std::fs::create_dir_all(dir)?;
        std::fs::write(dir.join("gateway.log"), stand.gateway.log())?;
    }
    let report = outcome?;
    if let Some(dir) = &plan.keep {
        std::fs::write(dir.join("calls.txt"), report.unanswered.join("\n"))?;
    }
    Ok(report)
}

async fn measure(plan: &Plan, stand: &mut stand::Stand) -> Result<Report> {
    let before = stand.identities().await?;
    let watch = growth::Watch::start(stand.gateway.keeper_pid()?);
    let load = load::Load::start(&stand.clients, plan.seed);
    let marks = course::Course::new(plan, stand).run(&load).await;
    let calls = load.end().await?;
    let marks = marks?;
    let growth = watch.end().await?;
    let after = stand.identities().await.context("every session goes on after the last kill")?;
    let mut report = Report::of(&calls, &marks, growth);
    report.identities(&before, &after);
    stand.executions(&calls, &mut report).await?;
    stand.stop(&mut report).await?;
    Ok(report)
}
