//! Calls that take longer than an answer as JSON may: as resumable streams with their events in the journal, in turn with
//! the same calls as plain JSON.

use crate::load::{Load, Shape};
use crate::machine::written_bytes;
use crate::plan::Plan;
use crate::report::{Row, Target};
use crate::roles::Role;
use crate::spread::Spread;
use crate::stand::{place, start_gateway};
use anyhow::{Context as _, Result};
use mainstay_tests::Gateway;
use serde_json::{Value, json};

#[derive(Debug, Default)]
struct Figures {
    rate: Vec<f64>,
    p50_us: Vec<f64>,
    p99_us: Vec<f64>,
    written_kib: Vec<f64>,
    calls: u64,
    streamed: u64,
}

struct Side {
    gateway: Gateway,
    load: Load,
    figures: Figures,
}

/// Takes turns.
pub(crate) async fn run(plan: &Plan) -> Result<(Vec<Row>, Value)> {
    let upstream = Role::upstream()?;
    let mut sides = [side(plan, &upstream, "2s").await?, side(plan, &upstream, "20ms").await?];
    for round in 0..plan.rounds {
        for turn in 0..sides.len() {
            let side = &mut sides[(round + turn) % 2];
            let worker = side.gateway.worker().await?.pid;
            let before = written_bytes(worker);
            let measured = tokio::task::block_in_place(|| side.load.closed(plan.turn.max(SHORTEST)))?;
            let written = written_bytes(worker).zip(before).map(|(after, before)| after.saturating_sub(before));
            let (calls, figures) = (measured.latency.total(), &mut side.figures);
            figures.rate.push(measured.rate());
            figures.p50_us.push(measured.latency.micros_at(500));
            figures.p99_us.push(measured.latency.micros_at(990));
            figures.written_kib.extend(written.map(|bytes| bytes as f64 / 1024.0 / calls.max(1) as f64));
            figures.calls += calls;
            figures.streamed += measured.streamed;
        }
    }
    let [plain, streams] = &sides;
    let (plain, streams) = (&plain.figures, &streams.figures);
    let written = Spread::of(&streams.written_kib).median;
    let rows = vec![
        Row::new(
            "streamed_p50",
            "streamed call with its events in the journal, p50, of the same as plain JSON",
            Target::None,
        )
        .ratio(Spread::of_ratios(&streams.p50_us, &plain.p50_us))
        .note(format!(
            "{} of {} calls of {WAIT_MS} ms on streams; {written:.0} KiB written a call",
            streams.streamed, streams.calls
        )),
        Row::new("streamed_p99", "the same, p99", Target::None)
            .ratio(Spread::of_ratios(&streams.p99_us, &plain.p99_us)),
        Row::new("streamed_rate", "the same, throughput", Target::None)
            .ratio(Spread::of_ratios(&streams.rate, &plain.rate)),
    ];
    let shown = json!({"wait_ms": WAIT_MS, "plain": shown(plain), "streams": shown(streams)});
    for mut side in sides {
        side.gateway.stop().await?;
    }
    Ok((rows, shown))
}

async fn side(plan: &Plan, upstream: &Role, answer_json_within: &str) -> Result<Side> {
    let gateway = start_gateway(upstream, &format!("answer_json_within = \"{answer_json_within}\"\n")).await?;
    let shape =
        Shape { sessions: plan.clients * 2, clients: plan.clients * 2, text_bytes: TEXT_BYTES, wait_ms: WAIT_MS };
    let endpoint = place(&gateway, "json")?;
    let load = tokio::task::block_in_place(|| Load::open(&endpoint, shape)).context("opening sessions")?;
    Ok(Side { gateway, load, figures: Figures::default() })
}

fn shown(figures: &Figures) -> Value {
    json!({"calls_per_second": Spread::of(&figures.rate).json(), "latency_p50_us": Spread::of(&figures.p50_us).json(),
        "latency_p99_us": Spread::of(&figures.p99_us).json(),
        "written_kib_per_call": Spread::of(&figures.written_kib).json(), "calls": figures.calls,
        "answered_as_streams": figures.streamed})
}

const WAIT_MS: u64 = 30;
const TEXT_BYTES: usize = 1024;
/// Each client must get a few calls through.
const SHORTEST: std::time::Duration = std::time::Duration::from_millis(200);
