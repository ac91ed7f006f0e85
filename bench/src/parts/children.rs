//! Calls to children over their pipes, in turn with calls to the HTTP server through the plain hop: what a client of a stdio
//! server pays for reaching it over HTTP, in a session that outlives the gateway.

use crate::load::{Load, Shape};
use crate::plan::Plan;
use crate::report::{Row, Target};
use crate::spread::Spread;
use crate::stand::{Stand, Way};
use anyhow::{Context as _, Result};
use serde_json::{Value, json};

/// Takes turns.
pub(crate) async fn run(plan: &Plan, stand: &Stand) -> Result<(Vec<Row>, Value)> {
    let shape = Shape { sessions: plan.clients, clients: plan.clients, text_bytes: TEXT_BYTES, wait_ms: 0 };
    let places = [stand.place(Way::Hop, "json")?, stand.place(Way::Mainstay, "child")?];
    let mut loads = Vec::new();
    for place in &places {
        let mut load = tokio::task::block_in_place(|| Load::open(place, shape)).context("opening sessions")?;
        tokio::task::block_in_place(|| load.closed(plan.turn / WARM_PART))?;
        loads.push(load);
    }
    let mut rates = [Vec::new(), Vec::new()];
    let mut medians = [Vec::new(), Vec::new()];
    for round in 0..plan.rounds {
        for turn in 0..loads.len() {
            let side = (round + turn) % loads.len();
            let measured = tokio::task::block_in_place(|| loads[side].closed(plan.turn))?;
            rates[side].push(measured.rate());
            medians[side].push(measured.latency.micros_at(500));
        }
    }
    let [hop, child] = [Spread::of(&rates[0]), Spread::of(&rates[1])];
    let row =
        Row::new("children", "throughput of calls to children, of HTTP calls through the pass-through", Target::None)
            .ratio(Spread::of_ratios(&rates[1], &rates[0]))
            .note(format!("{} children: {:.0} calls/s, the hop {:.0}", plan.clients, child.median, hop.median));
    let shown = json!({"children": plan.clients, "calls_per_second": child.json(), "hop_calls_per_second": hop.json(),
        "latency_p50_us": Spread::of(&medians[1]).json(), "hop_latency_p50_us": Spread::of(&medians[0]).json()});
    Ok((vec![row], shown))
}

const TEXT_BYTES: usize = 1024;
const WARM_PART: u32 = 4;
