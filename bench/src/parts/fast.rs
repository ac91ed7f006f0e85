//! Fast calls: all ways to the server in turn, in rounds, so that each round's ratio is of one moment of the machine.

use crate::load::{Load, Measured};
use crate::machine::{cpu_micros, written_bytes};
use crate::plan::{Case, Plan};
use crate::report::{Bar, Row, Target};
use crate::spread::{Spread, round};
use crate::stand::{Stand, Way};
use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;

/// What came of all cases.
#[derive(Debug)]
pub(crate) struct Fast {
    pub(crate) rows: Vec<Row>,
    pub(crate) bars: Vec<Bar>,
    pub(crate) json: Value,
}

/// What a way gave, a figure a round.
#[derive(Debug, Default)]
struct Figures {
    rate: Vec<f64>,
    cpu_us: Vec<f64>,
    p50_us: Vec<f64>,
    p99_us: Vec<f64>,
    streamed: u64,
}

type Results = BTreeMap<Way, Figures>;

/// One of the figures, of all rounds.
type Quantile = fn(&Figures) -> &[f64];

/// Measures all cases.
pub(crate) async fn run(plan: &Plan, stand: &Stand) -> Result<Fast> {
    let mut fast = Fast { rows: Vec::new(), bars: Vec::new(), json: json!({}) };
    for (number, case) in plan.cases.iter().enumerate() {
        let (results, per_second) = measure(plan, stand, case).await?;
        fast.json[case.name] = shown(&results, per_second);
        fast.bars.extend(bars(case, &results)?);
        if number == 0 {
            fast.rows = rows(case, &results, stand.without_nginx())?;
        }
    }
    fast.rows.extend(writes(plan, stand).await?);
    Ok(fast)
}

async fn measure(plan: &Plan, stand: &Stand, case: &Case) -> Result<(Results, f64)> {
    let ways = stand.ways();
    let mut loads = BTreeMap::new();
    for way in &ways {
        let place = stand.place(*way, case.server)?;
        let mut load = tokio::task::block_in_place(|| Load::open(&place, case.shape))
            .with_context(|| format!("opening sessions: {}", way.name()))?;
        tokio::task::block_in_place(|| load.closed(plan.turn / WARM_PART))?;
        loads.insert(*way, load);
    }
    let mut results = Results::new();
    for round in 0..plan.rounds {
        for turn in 0..ways.len() {
            let way = ways[(round + turn) % ways.len()];
            let load = loads.get_mut(&way).context("a load for each way")?;
            let pids = stand.pids(way).await?;
            let before = cpu_micros(&pids);
            let measured = turn_of(case, way, || load.closed(plan.turn))?;
            let used = cpu_micros(&pids).zip(before).map(|(after, before)| after - before);
            let figures = results.entry(way).or_default();
            figures.rate.push(measured.rate());
            figures.cpu_us.extend(used.map(|used| used / measured.latency.total().max(1) as f64));
            figures.streamed += measured.streamed;
            if !case.fixed {
                figures.p50_us.push(measured.latency.micros_at(500));
                figures.p99_us.push(measured.latency.micros_at(990));
            }
        }
    }
    if !case.fixed {
        return Ok((results, 0.0));
    }
    // Half of what the slowest can do: all ways are asked the same, and none is at its limit.
    let slowest = results.values().map(|figures| Spread::of(&figures.rate).median).fold(f64::INFINITY, f64::min);
    let per_second = slowest * FIXED_PART;
    for round in 0..plan.rounds {
        for turn in 0..ways.len() {
            let way = ways[(round + turn) % ways.len()];
            let load = loads.get_mut(&way).context("a load for each way")?;
            let measured = turn_of(case, way, || load.fixed(plan.turn, per_second))?;
            let figures = results.entry(way).or_default();
            figures.p50_us.push(measured.latency.micros_at(500));
            figures.p99_us.push(measured.latency.micros_at(990));
        }
    }
    Ok((results, per_second))
}

fn turn_of(case: &Case, way: Way, turn: impl FnOnce() -> Result<Measured>) -> Result<Measured> {
    let measured = tokio::task::block_in_place(turn).with_context(|| format!("{}: {}", case.name, way.name()))?;
    ensure!(measured.latency.total() > 0, "{}: {}: no call was answered", case.name, way.name());
    Ok(measured)
}

fn of(results: &Results, way: Way) -> Result<&Figures> {
    results.get(&way).with_context(|| format!("nothing of {}", way.name()))
}

/// What a way adds to the latency of none, round by round. Less than a microsecond is no measurement.
fn added(of: &[f64], direct: &[f64]) -> Vec<f64> {
    of.iter().zip(direct).map(|(through, direct)| (through - direct).max(LATENCY_US_MIN)).collect()
}

fn rows(case: &Case, results: &Results, without_nginx: String) -> Result<Vec<Row>> {
    let (direct, hop, own) = (of(results, Way::Direct)?, of(results, Way::Hop)?, of(results, Way::Mainstay)?);
    let against = |figures: Quantile| {
        Spread::of_ratios(&added(figures(own), figures(direct)), &added(figures(hop), figures(direct)))
    };
    let micros = |figures: Quantile| {
        let shown = |way: &Figures| Spread::of(&added(figures(way), figures(direct))).median;
        format!("{:.0} µs added, the hop adds {:.0} µs", shown(own), shown(hop))
    };
    let rates = |way: &Figures| Spread::of(&way.rate).median;
    let mut rows = vec![
        Row::new("throughput", "throughput of fast calls, of the pass-through's", Target::AtLeast(0.8))
            .ratio(Spread::of_ratios(&own.rate, &hop.rate))
            .note(format!("{}: {:.0} calls/s, the hop {:.0}", case.name, rates(own), rates(hop))),
    ];
    let nginx = Row::new("throughput_nginx", "the same, of nginx's", Target::AtLeast(1.0));
    rows.push(match results.get(&Way::Nginx) {
        Some(nginx_gave) => nginx
            .ratio(Spread::of_ratios(&own.rate, &nginx_gave.rate))
            .note(format!("nginx {:.0} calls/s", rates(nginx_gave))),
        None => nginx.note(without_nginx),
    });
    let (p50, p99): (Quantile, Quantile) = (|way| &way.p50_us, |way| &way.p99_us);
    rows.push(
        Row::new("latency_p50", "added latency of a fast call, p50, of the pass-through's", Target::AtMost(1.3))
            .ratio(against(p50))
            .note(micros(p50)),
    );
    rows.push(Row::new("latency_p99", "the same, p99", Target::AtMost(1.5)).ratio(against(p99)).note(micros(p99)));
    rows.push(
        Row::new("cpu", "processor time of a fast call, of the pass-through's", Target::None)
            .ratio(Spread::of_ratios(&own.cpu_us, &hop.cpu_us))
            .note(format!(
                "{:.0} µs, the hop {:.0} µs",
                Spread::of(&own.cpu_us).median,
                Spread::of(&hop.cpu_us).median
            )),
    );
    Ok(rows)
}

fn bars(case: &Case, results: &Results) -> Result<Vec<Bar>> {
    let hop = of(results, Way::Hop)?;
    let shown = results.iter().filter(|(way, _)| matches!(way, Way::Nginx | Way::Mainstay));
    Ok(shown
        .map(|(way, figures)| Bar { case: case.name, way: *way, ratio: Spread::of_ratios(&figures.rate, &hop.rate) })
        .collect())
}

fn shown(results: &Results, per_second: f64) -> Value {
    let mut shown = json!({"latencies_at_calls_per_second": round(per_second)});
    for (way, figures) in results {
        shown[way.name()] = json!({
            "calls_per_second": Spread::of(&figures.rate).json(),
            "cpu_us_per_call": Spread::of(&figures.cpu_us).json(),
            "latency_p50_us": Spread::of(&figures.p50_us).json(),
            "latency_p99_us": Spread::of(&figures.p99_us).json(),
            "answered_as_streams": figures.streamed,
        });
    }
    shown
}

/// What fast calls write: the ledger's own counters, and the kernel's.
async fn writes(plan: &Plan, stand: &Stand) -> Result<Vec<Row>> {
    let case = plan.cases.first().context("a case")?;
    let place = stand.place(Way::Mainstay, case.server)?;
    let worker = stand.gateway.worker().await?.pid;
    let mut load = tokio::task::block_in_place(|| Load::open(&place, case.shape))?;
    tokio::task::block_in_place(|| load.closed(plan.turn))?;
    let before = (stand.gateway.status().await?["ledger"].clone(), written_bytes(worker));
    let measured = turn_of(case, Way::Mainstay, || load.closed(plan.turn * WRITES_TURNS))?;
    let after = (stand.gateway.status().await?["ledger"].clone(), written_bytes(worker));
    let grown = |name: &str| {
        let counted = after.0[name].as_u64().zip(before.0[name].as_u64());
        counted.map(|(after, before)| after.saturating_sub(before) as f64).context("the ledger counts it")
    };
    let calls = measured.latency.total() as f64;
    // Sessions' use and handshakes are noted as hints, all at once, every five seconds whatever the calls.
    let hints_meant = measured.took.as_secs_f64() / HINTS_EVERY.as_secs_f64() + 2.0;
    let commits = grown("commits_authority")? + grown("commits_obligation")?;
    let beyond = (grown("commits_hint")? - hints_meant).max(0.0);
    let bytes = after.1.zip(before.1).map(|(after, before)| after.saturating_sub(before) as f64);
    let written = bytes.map_or("the kernel does not say what was written".to_owned(), |bytes| {
        format!("{:.1} bytes a call written to disk", bytes / calls)
    });
    Ok(vec![
        Row::new("fast_commits", "fast call: commits of the ledger, beside hints every 5 s", Target::AtMost(0.0))
            .plain((commits + beyond) / calls, "a call")
            .note(format!("{calls:.0} calls, {:.0} commits of hints; {written}", grown("commits_hint")?)),
    ])
}

const WARM_PART: u32 = 4;
const FIXED_PART: f64 = 0.5;
const LATENCY_US_MIN: f64 = 1.0;
const WRITES_TURNS: u32 = 2;
const HINTS_EVERY: Duration = Duration::from_secs(5);
