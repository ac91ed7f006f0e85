//! Ends the sessions of servers that have left the configuration (T4, U7). Which were configured before stands in the
//! ledger, and is replaced only when nothing is left to be done: a worker that dies on the way leaves it to the next.

use std::sync::Arc;
use std::time::Duration;

use mainstay_core::audit::Actor;
use mainstay_core::id::ServerName;
use mainstay_core::session::{Input, REMOVED, State};
use mainstay_store::{Filter, Legibility, Page, StoreError, Stored, Write};

use crate::engine::Engine;

/// Runs until it is done, or the worker ends.
pub async fn run(engine: Arc<Engine>) {
    loop {
        match pass(&engine).await {
            Ok(true) => return,
            Ok(false) => {}
            Err(error) => tracing::warn!(error = %error, "the sessions of removed servers cannot be read"),
        }
        tokio::select! {
            () = tokio::time::sleep(PAUSE_ON_FAILURE) => {}
            () = engine.stopped() => return,
        }
    }
}

/// Ends every session of a removed server; `true` once there is none.
async fn pass(engine: &Arc<Engine>) -> Result<bool, StoreError> {
    let now: Vec<_> = engine.servers.keys().cloned().collect();
    let before = engine.store.configured().await?;
    if before.as_ref() == Some(&now) {
        return Ok(true);
    }
    for server in before.unwrap_or_default().into_iter().filter(|server| !now.contains(server)) {
        for state in [State::Initializing, State::Ready, State::Draining] {
            if !end_all(engine, &server, state).await? {
                return Ok(false);
            }
        }
    }
    Ok(engine.store.commit(vec![Write::Configured(now)]).await.is_ok())
}

/// Ends the sessions of `server` in `state`; `false` if one could not be ended.
async fn end_all(engine: &Arc<Engine>, server: &ServerName, state: State) -> Result<bool, StoreError> {
    let reason = format!("{REMOVED}: `{server}` is no longer configured");
    let filter = Filter {
        state: Some(state),
        server: Some(server.clone()),
        legibility: Legibility::Readable,
        ..Filter::default()
    };
    let mut after = None;
    let mut ended = 0_usize;
    let mut complete = true;
    loop {
        let rows = engine.store.list(&Page { after, limit: Page::ROWS_MAX, filter: filter.clone() }).await?;
        let Some(last) = rows.last() else { break };
        after = Some(last.key);
        for row in rows {
            if matches!(row.stored, Stored::Live(_)) {
                let input = Input::Close { reason: reason.as_str().into() };
                let gone = engine.end_stored(row.key, input, Actor::Gateway).await;
                complete &= gone.is_ok();
                ended += usize::from(gone.is_ok());
            }
        }
    }
    if ended > 0 {
        tracing::info!(server = %server, sessions = ended, "ended the sessions of a server that is no longer configured");
    }
    Ok(complete)
}

const PAUSE_ON_FAILURE: Duration = Duration::from_secs(5);
