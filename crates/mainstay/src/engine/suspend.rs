//! Suspension: memory and instance go, the session stays (S11).

use std::sync::Arc;
use std::time::Duration;

use mainstay_core::audit::{Action, Actor};
use mainstay_core::id::SessionKey;
use mainstay_core::session::State;
use mainstay_store::{Stored, Write};
use mainstay_upstream::{Ending, Why};

use crate::engine::{Engine, Served};

impl Engine {
    /// The shortest time after which any server's unused sessions are suspended; `None` if none ever is.
    pub fn shortest_suspension(&self) -> Option<Duration> {
        self.servers.values().filter_map(|served| served.suspend_after).min()
    }

    /// Suspends every session that has been unused for long enough.
    pub async fn suspend_unused(self: &Arc<Self>) {
        let now = self.now();
        let unused: Vec<SessionKey> = self
            .live
            .iter()
            .filter(|live| {
                let after = self.servers.get(&live.server.name).and_then(may_suspend);
                after.is_some_and(|after| live.with_session(|session| now.since(session.record().seen_at)) >= after)
            })
            .map(|live| live.key)
            .collect();
        for key in unused {
            self.suspend(key).await;
        }
        for (key, open_calls) in self.held_idle() {
            self.suspend_held(key, open_calls).await;
        }
        for served in self.servers.values().filter(|served| !served.server.is_http()) {
            if let Some(after) = may_suspend(served) {
                self.upstreams.suspend_shared(&served.server, after);
            }
        }
    }

    /// Lets a child go that an earlier worker left for a session which nobody has asked for since, once it is unused for
    /// long enough. With calls open, only its session can tell which of them still run: that is woken, and suspended in
    /// its turn.
    async fn suspend_held(self: &Arc<Self>, key: SessionKey, open_calls: usize) {
        let lane = self.lane(&key).lock().await;
        let Ok(Stored::Live(record)) = self.store.find(key).await else { return };
        let after = self.servers.get(&record.server).and_then(may_suspend);
        if after.is_none_or(|after| self.now().since(record.seen_at) < after) {
            return;
        }
        if open_calls == 0 {
            return self.dismiss_held(key, Why::Suspended);
        }
        drop(lane);
        if let Err(refusal) = self.load(key).await {
            tracing::debug!(session = %key.session_ref(), refusal = %refusal.text, "not woken");
        }
    }

    /// Suspends one session unless it is in use. It is refused while state would be lost in silence: with a question
    /// open, an answer not yet taken, a stream being read, or a call in flight.
    async fn suspend(self: &Arc<Self>, key: SessionKey) {
        let _lane = self.lane(&key).lock().await;
        let Some(live) = self.live.get(&key).map(|live| Arc::clone(&live)) else { return };
        let Some(after) = self.servers.get(&live.server.name).and_then(may_suspend) else { return };
        let now = self.now();
        if live.questions() > 0 || live.owes_answers() || live.link.has_running_calls() {
            return;
        }
        let leaving = live.leave(|session, activity| {
            let record = session.record();
            let unused = now.since(record.seen_at) >= after && activity.is_idle() && record.state == State::Ready;
            unused.then_some(())
        });
        if leaving.is_none() {
            return;
        }
        // What the next request goes by must be there before it can look: where the server's session stands.
        let entry = self.audit_entry(Actor::Gateway, Action::Suspended, Some(key), &live.server.name, "");
        let mut writes = vec![Write::Audit(entry)];
        writes.extend(live.link.record().map(Write::Resume));
        if let Err(error) = self.store.commit(writes).await {
            tracing::warn!(session = %key.session_ref(), error = %error, "not suspended yet");
            return live.stay();
        }
        self.live.remove(&key);
        live.shut();
        live.link.end(Ending::Suspend).await;
        tracing::info!(session = %key.session_ref(), server = %live.server.name, "session suspended");
    }
}

/// After how long a server's unused sessions are suspended. State inside a stateful child would be lost with it.
fn may_suspend(served: &Served) -> Option<Duration> {
    served.suspend_after.filter(|_| served.server.is_http() || !served.stateful)
}
