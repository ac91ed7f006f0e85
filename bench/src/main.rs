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
use anyhow::{Context as _, Result, bail};
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
    let flags =
        Flags::read(arguments.to_vec(), &["quick", "smoke"], &["only", "out", "readme"]).map_err(anyhow::Error::msg)?;
    let plan = match (flags.has("smoke"), flags.has("quick")) {
        (true, _) => Plan::smoke(),
        (false, true) => Plan::quick(),
        (false, false) => Plan::full(),
    };
    let only = flags.value("only");
    if let Some(unknown) = only.filter(|name| !PARTS.contains(name)) {
        bail!("there is no part `{unknown}`; the parts are {}", PARTS.join(", "));
    }
    let out = flags.value("out").map_or_else(|| PathBuf::from("target/bench"), PathBuf::from);
    // Told before anything is measured if it can't be written afterwards.
    let readme = flags.value("readme").map(PathBuf::from);
    let document = readme.as_ref().map(std::fs::read_to_string).transpose().context("reading the document")?;
    document.as_deref().map(|document| between_markers(document, "")).transpose()?;
    mainstay_tests::mainstay()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let report = runtime.block_on(run(&plan, only))?;
    report.write(&out)?;
    if let Some((readme, document)) = readme.zip(document) {
        let plot = format!("![Throughput, relative to the pass-through]({}/throughput.svg)", out.display());
        let shown = between_markers(&document, &format!("{}\n{plot}", markdown(&report)))?;
        std::fs::write(readme, shown).context("writing the document")?;
    }
    say(&format!("{}\nwritten to `{}`", markdown(&report), out.display()));
    Ok(())
}

/// Measures all parts, or the one named `only`.
async fn run(plan: &Plan, only: Option<&str>) -> Result<Report> {
    let started = Instant::now();
    let machine = machine::facts();
    let wanted = |part: &'static str| {
        let wanted = only.is_none_or(|only| only == part);
        if wanted {
            say(part);
        }
        wanted
    };
    let (mut rows, mut bars, mut parts) = (Vec::new(), Vec::new(), json!({}));
    let mut of_children = Vec::new();
    if only.is_none_or(|only| [FAST, CHILDREN].contains(&only)) {
        let stand = Stand::start().await?;
        if wanted(FAST) {
            let fast = fast::run(plan, &stand).await?;
            (rows, bars, parts[FAST]) = (fast.rows, fast.bars, fast.json);
        }
        if wanted(CHILDREN) {
            (of_children, parts[CHILDREN]) = children::run(plan, &stand).await?;
        }
    }
    let mut of_streams = Vec::new();
    if wanted(STREAMS) {
        (of_streams, parts[STREAMS]) = streams::run(plan).await?;
    }
    let mut of_creation = Vec::new();
    if wanted(CREATION) {
        (of_creation, parts[CREATION]) = creation::run(plan).await?;
    }
    if wanted(SESSIONS) {
        let (of_sessions, figures) = stored::run(plan).await?;
        rows.extend(of_sessions);
        parts[SESSIONS] = figures;
    }
    if wanted(OUTAGES) {
        let (of_outages, figures) = outages::run(plan).await?;
        rows.extend(of_outages);
        parts[OUTAGES] = figures;
    }
    rows.extend([of_creation, of_streams, of_children].concat());
    let took_s = started.elapsed().as_secs_f64();
    Ok(Report { plan: plan.name, machine, rows, bars, parts, took_s })
}

/// Tells a person what goes on.
fn say(line: &str) {
    let _nobody_reads = writeln!(std::io::stdout(), "{line}");
}

const USAGE: &str = "usage: mainstay-bench [--quick | --smoke] [--only PART] [--out DIR] [--readme FILE]";

/// The parts, as `--only` and the results name them.
const PARTS: [&str; 6] = [FAST, CHILDREN, STREAMS, CREATION, SESSIONS, OUTAGES];
const FAST: &str = "fast_calls";
const CHILDREN: &str = "children";
const STREAMS: &str = "streams";
const CREATION: &str = "creation";
const SESSIONS: &str = "sessions";
const OUTAGES: &str = "outages";
