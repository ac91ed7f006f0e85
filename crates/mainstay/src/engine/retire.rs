//! The gateway goes for good: every session is closed, every server's session deleted (T5).
//!
//! A stop keeps all of that for the next start. To retire is an operator's order on every session, followed by a stop: a
//! crash in the middle leaves closed sessions closed and the others as they were.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use mainstay_core::audit::Actor;
use mainstay_core::id::SessionKey;
use mainstay_core::resume::OwedDelete;
use mainstay_core::session::Input;
use mainstay_store::{Page, Store, StoreError, Stored, Write};
use mainstay_upstream::{Settled, settle};
use schemars::JsonSchema;
use serde::Serialize;

use crate::engine::Engine;
use crate::runtime::spawn;

/// What became of sessions when the gateway was retired.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct RetiredView {
    /// How many were closed.
    pub sessions_closed: u64,
    /// How many could not be closed; the next start has them.
    pub sessions_left: u64,
    /// How many deletes servers did not take; the next start pays them. None of a ledger in memory, which is gone.
    pub deletes_owed: u64,
    /// How many sessions of servers nobody will delete: those that were tried in vain for too long, and all that are
    /// owed by a ledger in memory.
    pub deletes_left: u64,
}

impl Engine {
    /// Stops taking new work, lets calls in flight end within the drain's grace, closes every session, deletes their
    /// servers' sessions, and has the keeper end everything. Carried through whatever becomes of the caller.
    pub async fn retire(self: &Arc<Self>) -> RetiredView {
        tracing::info!("retiring: every session is closed");
        self.stopping.set();
        self.quiet(self.settings.drain_grace).await;
        let (sessions_closed, sessions_left) = self.close_all().await;
        let (deletes_owed, deletes_left) = self.pay_all().await;
        let retired = RetiredView { sessions_closed, sessions_left, deletes_owed, deletes_left };
        tracing::info!(sessions_closed, sessions_left, deletes_owed, deletes_left, "retired");
        let engine = Arc::clone(self);
        spawn(async move {
            // The answer is to reach who gave the order before its connection goes.
            tokio::time::sleep(ANSWER_TIME).await;
            engine.custody.shutdown(true).await;
        });
        retired
    }

    /// Closes every session, wherever it is: how many were closed, and how many could not be.
    async fn close_all(self: &Arc<Self>) -> (u64, u64) {
        let (mut closed, mut left, mut after) = (0, 0, None);
        loop {
            let page = match self.page_of_keys(after).await {
                Ok(page) => page,
                Err(error) => {
                    tracing::error!(error = %error, "the sessions cannot be read; those that are left are kept");
                    let stored = self.store.count().await.unwrap_or_default();
                    return (closed, stored.max(left));
                }
            };
            for keys in page.live.chunks(CLOSED_AT_ONCE_MAX) {
                let reason = || Input::Close { reason: REASON.into() };
                let endings = keys.iter().map(|key| self.end_stored(*key, reason(), Actor::Operator));
                for ended in join_all(endings).await {
                    *(if ended.is_ok() { &mut closed } else { &mut left }) += 1;
                }
            }
            left += page.unreadable;
            after = page.last;
            if after.is_none() {
                return (closed, left);
            }
        }
    }

    async fn page_of_keys(&self, after: Option<SessionKey>) -> Result<Keys, StoreError> {
        let page = Page { after, limit: Page::ROWS_MAX, filter: mainstay_store::Filter::default() };
        let listed = self.store.list(&page).await?;
        let last = listed.last().filter(|_| listed.len() == Page::ROWS_MAX).map(|row| row.key);
        let mut keys = Keys { last, ..Keys::default() };
        for row in listed {
            match row.stored {
                Stored::Live(_) => keys.live.push(row.key),
                Stored::Unreadable(_) => keys.unreadable += 1,
                Stored::Ended(_) | Stored::Absent => {}
            }
        }
        Ok(keys)
    }

    /// Pays what is owed, at most for [`PAY_BOUND`]; how much is still owed, and how much nobody will pay any more.
    async fn pay_all(&self) -> (u64, u64) {
        let paying = async {
            // What fails is due again later, so that each is tried once.
            while let Ok(due) = self.store.owed(self.now(), PAID_AT_ONCE_MAX).await {
                if due.is_empty() {
                    return;
                }
                join_all(due.into_iter().map(|owed| self.pay_one(owed))).await;
            }
        };
        if tokio::time::timeout(PAY_BOUND, paying).await.is_err() {
            tracing::warn!("servers are too slow to take every delete that they are owed");
        }
        let owed = self.store.owed_all(OWED_COUNTED_MAX).await.unwrap_or_default();
        let is_kept = matches!(self.store, Store::Sqlite(_));
        let left = owed.iter().filter(|owed| !is_kept || owed.is_left_to_expire()).count();
        ((owed.len() - left) as u64, left as u64)
    }

    async fn pay_one(&self, owed: OwedDelete) {
        let server = self.servers.get(&owed.server).map(|served| &served.server);
        let write = match settle(&self.upstreams, server, &owed).await {
            Settled::Paid => Write::Settle(owed.id),
            Settled::Failed { reason } => {
                tracing::warn!(server = %owed.server, reason = %reason, "a server did not take the delete of a session");
                Write::Postpone(owed.postponed(self.now(), &reason))
            }
        };
        if let Err(error) = self.store.commit(vec![write]).await {
            tracing::warn!(error = %error, "the state of an owed delete cannot be stored");
        }
    }
}

/// The keys of one page of sessions.
#[derive(Default)]
struct Keys {
    live: Vec<SessionKey>,
    unreadable: u64,
    /// The last key, if there may be more behind it.
    last: Option<SessionKey>,
}

/// Why the sessions ended.
const REASON: &str = "retired";
/// How many endings share one write to the disk.
const CLOSED_AT_ONCE_MAX: usize = 64;
/// How many deletes are under way at a time.
const PAID_AT_ONCE_MAX: usize = 64;
/// How long servers are given to take their deletes, all together.
const PAY_BOUND: Duration = Duration::from_secs(20);
/// More deletes than these are not counted.
const OWED_COUNTED_MAX: usize = 10_000;
/// How long the answer has to reach who gave the order.
const ANSWER_TIME: Duration = Duration::from_millis(250);
