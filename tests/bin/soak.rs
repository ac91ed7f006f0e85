//! Kills the worker of a real gateway again and again while clients call, and checks what they were promised.
//!
//! `cargo run --release -p mainstay-tests --bin soak -- KILLS [SEED [DIR]]` (build `mainstay`, `up-h` and `up-s` with `--release`
//! first). Between the kills come reloads and upgrades. The kills are so far apart that the keeper starts every worker at
//! once, about seven seconds on the average, for its back-off after five starts in half a minute is not what is measured;
//! now and then there are two within 600 ms. DIR keeps the gateway's log and the calls that were not answered.

use anyhow::Result;
use mainstay_tests::soak::{Plan, run};
use std::io::Write as _;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

#[tokio::main]
async fn main() -> Result<ExitCode> {
    let mut arguments = std::env::args().skip(1);
    let kills = arguments.next().as_deref().unwrap_or("200").parse()?;
    let seed = match arguments.next() {
        Some(seed) => seed.parse()?,
        None => SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs(),
    };
    let plan = Plan {
        kills,
        reload_every: 10,
        upgrade_every: 20,
        apart: (Duration::from_secs(3), Duration::from_secs(8)),
        spare_back_off: true,
        clients: 20,
        seed,
        keep: arguments.next().map(Into::into),
    };
    let mut stdout = std::io::stdout();
    writeln!(stdout, "{kills} kills with seed {seed}")?;
    let report = run(&plan).await?;
    write!(stdout, "{report}")?;
    Ok(if report.faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
