//! The benchmark: the gateway beside a plain pass-through hop, in the same run, on this machine alone.
//!
//! `scripts/bench` builds everything and runs it. Figures are ratios to a yardstick that took its turns in the same rounds;
//! `README.md` of this package says what each part does and how far its figures carry.

mod fixture;
mod histogram;
mod load;
mod machine;
mod nginx;
mod parts;
mod plan;
mod report;
mod roles;
mod spread;
mod stand;
mod wire;

use crate::parts::{children, creation, fast, outages, stored, streams};
use crate::plan::Plan;
use crate::report::{Report, between_markers, markdown};
use crate::stand::Stand;
use anyhow::{Context as _, Result};
use mainstay_tests::flags::Flags;
use serde_json::json;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let ended = match roles::play(&arguments) {
        Ok(false) => command(&arguments),
        played => played.map(drop),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _nobody_reads = writeln!(std::io::stderr(), "error: {error:#}\n{USAGE}");
            ExitCode::FAILURE
        }
    }
}

fn command(arguments: &[String]) -> Result<()> {
    let flags = Flags::read(arguments.to_vec(), &["quick", "smoke"], &["out", "readme"]).map_err(anyhow::Error::msg)?;
    let plan = match (flags.has("smoke"), flags.has("quick")) {
        (true, _) => Plan::smoke(),
        (false, true) => Plan::quick(),
        (false, false) => Plan::full(),
    };
    let out = flags.value("out").map_or_else(|| PathBuf::from("target/bench"), PathBuf::from);
    // Told before anything is measured if it can't be written afterwards.
    let readme = flags.value("readme").map(PathBuf::from);
    let document = readme.as_ref().map(std::fs::read_to_string).transpose().context("reading the document")?;
    document.as_deref().map(|document| between_markers(document, "")).transpose()?;
    mainstay_tests::mainstay()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let report = runtime.block_on(run(&plan))?;
    report.write(&out)?;
    if let Some((readme, document)) = readme.zip(document) {
        let plot = format!("![Throughput, relative to the pass-through]({}/throughput.svg)", out.display());
        let shown = between_markers(&document, &format!("{}\n{plot}", markdown(&report)))?;
        std::fs::write(readme, shown).context("writing the document")?;
    }
    say(&format!("{}\nwritten to `{}`", markdown(&report), out.display()));
    Ok(())
}

async fn run(plan: &Plan) -> Result<Report> {
    let started = Instant::now();
    let machine = machine::facts();
    let stand = Stand::start().await?;
    say("fast calls");
    let fast = fast::run(plan, &stand).await?;
    say("children");
    let (of_children, children) = children::run(plan, &stand).await?;
    drop(stand);
    say("streamed calls");
    let (of_streams, streams) = streams::run(plan).await?;
    say("durable creations");
    let (of_creation, creation) = creation::run(plan).await?;
    say("many sessions");
    let (of_stored, stored) = stored::run(plan).await?;
    say("kills and upgrades");
    let (of_outages, outages) = outages::run(plan).await?;
    let rows = [fast.rows, of_stored, of_outages, of_creation, of_streams, of_children].concat();
    let parts = json!({"fast_calls": fast.json, "children": children, "streams": streams, "creation": creation,
        "sessions": stored, "outages": outages});
    let took_s = started.elapsed().as_secs_f64();
    Ok(Report { plan: plan.name, machine, rows, bars: fast.bars, parts, took_s })
}

/// Tells a person what goes on.
fn say(line: &str) {
    let _nobody_reads = writeln!(std::io::stdout(), "{line}");
}

const USAGE: &str = "usage: mainstay-bench [--quick | --smoke] [--out DIR] [--readme FILE]";
