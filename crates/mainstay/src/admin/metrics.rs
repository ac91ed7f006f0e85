//! `/metrics`: the counted events, and the state of the gateway now.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::header::CONTENT_TYPE;
use http::{HeaderValue, header};
use mainstay_core::id::ServerName;
use mainstay_core::session;
use mainstay_core::wire::modern::Era;
use mainstay_upstream::Supervised;

use super::problem::{Code, Problem};
use crate::engine::servers::STATES;
use crate::engine::{Engine, Served};
use crate::telemetry::metrics::{self, ChildrenScrape, Scrape};

pub(super) async fn read(State(engine): State<Arc<Engine>>) -> Result<Response, Problem> {
    let scrape = scrape(&engine).await;
    let text =
        engine.metrics.render(&scrape).map_err(|_| Problem::new(Code::Unavailable, "the numbers can't be written"))?;
    let mut response = text.into_response();
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(metrics::CONTENT_TYPE));
    response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    Ok(response)
}

async fn scrape(engine: &Engine) -> Scrape {
    let status = engine.status().await;
    let ledger = status.ledger;
    let count = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
    let activity = engine.live.iter().map(|live| live.activity());
    let (calls, streams) = activity.fold((0, 0), |(calls, streams), activity| {
        (calls + u64::from(activity.calls), streams + u64::from(activity.streams))
    });
    // A scrape tells what can be told; a ledger that can't be read is seen by the absence of these.
    let owed = engine.owed().await.unwrap_or_else(|error| {
        tracing::warn!(error = %error, "owed deletes can't be counted");
        Vec::new()
    });
    // One that is being opened has no row yet.
    let mut sessions = vec![(session::State::Initializing.as_str(), count(engine.openings.count()))];
    match engine.store.count_by_state().await {
        Ok(counted) => sessions.extend(counted.into_iter().map(|(state, count)| (state.as_str(), count))),
        Err(error) => tracing::warn!(error = %error, "sessions can't be counted"),
    }
    let tried = owed.iter().filter(|owed| owed.next_at.is_some()).count();
    Scrape {
        sessions,
        sessions_in_memory: count(engine.live.len()),
        owed: vec![("due", count(tried)), ("left", count(owed.len() - tried))],
        commits: vec![
            ("authority", ledger.commits_authority),
            ("obligation", ledger.commits_obligation),
            ("hint", ledger.commits_hint),
        ],
        commit_us: ledger.commit_us,
        rows_refused: ledger.rows_refused,
        hints_dropped: ledger.hints_dropped,
        hint_failures: ledger.hint_failures,
        queue_depth: ledger.queue_depth,
        children: children(engine),
        eras: eras(engine),
        streams_open: streams,
        calls_in_flight: calls + count(engine.stateless_calls()),
        streams_held: engine.live.iter().map(|live| count(live.streams_held())).sum(),
        journal: engine.journal.counters(),
    }
}

fn eras(engine: &Engine) -> Vec<(String, &'static str)> {
    let known = |served: &Served| engine.spoken_by(&served.server).era().map(Era::as_str);
    let servers = engine.servers.iter();
    servers.filter_map(|(name, served)| Some((name.to_string(), known(served)?))).collect()
}

fn children(engine: &Engine) -> Vec<ChildrenScrape> {
    let scrape = |(name, state, seen): (ServerName, &'static str, Supervised)| {
        let counts = seen.counts;
        ChildrenScrape {
            server: name.to_string(),
            spawns: vec![
                ("up", counts.up),
                ("never_up", counts.never_up),
                ("not_started", counts.not_started),
                ("gateway", counts.gateway),
            ],
            exits: vec![
                ("exited", counts.exited),
                ("failed", counts.failed),
                ("upgraded", counts.upgraded),
                ("killed", counts.killed),
                ("stopped", counts.stopped),
            ],
            states: STATES.map(|known| (known, u64::from(known == state))).to_vec(),
        }
    };
    engine.supervised().into_iter().map(scrape).collect()
}
