//! How this worker gives way to the next one, with nothing lost on the way (T1–T4).
//!
//! A handover is a tidy crash. The next worker restores every session from the ledger as it always does; what this one
//! does is to bring each request that it has taken to a point at which it can be left. A call on a child becomes a stream
//! that its client takes up again at the next worker, where the answer arrives (C8). A call on an HTTP server can be
//! answered by nobody else: this worker stays for it, and for nothing else, until it is over or the bound is reached.

pub mod changes;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::id::SessionKey;
use mainstay_core::time::Timestamp;
use mainstay_keeper::client::HandoverRefused;
use mainstay_keeper::{Handover, HandoverOutcome, UNCHANGED};
use mainstay_store::Write;
use schemars::JsonSchema;
use serde::Serialize;

use self::changes::ChangesView;
use crate::engine::leavers::Recorded;
use crate::engine::live::Live;
use crate::engine::{Engine, QUIET_POLL};

/// Whether a handover that was asked for takes place.
#[derive(Clone, Debug)]
pub enum Begun {
    /// The next worker comes, or would come, and this changes; `None` if it is not understood here.
    Yes(Option<ChangesView>),
    /// The settings are what they were.
    Unchanged,
}

/// How the last handover went.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct HandoverView {
    /// `succeeded`, or `not_succeeded`: then everything is as it was before.
    pub outcome: &'static str,
    /// `upgrade`, or `reload` of the settings alone.
    pub kind: &'static str,
    /// When it began (RFC 3339).
    pub at: String,
    /// The version of the gateway before it.
    pub from_version: String,
    /// The version after it, or what it would have been; null if that is not known.
    pub to_version: Option<String>,
    /// Why it did not succeed.
    pub reason: Option<String>,
}

impl HandoverView {
    /// What the keeper knows of it.
    pub fn of(handover: Handover) -> Self {
        let said = |text: String| (!text.is_empty()).then_some(text);
        Self {
            outcome: match handover.outcome {
                HandoverOutcome::Succeeded => "succeeded",
                HandoverOutcome::NotSucceeded => "not_succeeded",
            },
            kind: if handover.upgrade { "upgrade" } else { "reload" },
            at: Timestamp::from_unix_millis(handover.at_unix_ms).to_string(),
            from_version: handover.from_version,
            to_version: said(handover.to_version),
            reason: said(handover.reason),
        }
    }
}

impl Engine {
    /// Asks the keeper for another worker: of the program that is installed now with `upgrade`, else of the same one
    /// with the settings as they are read now. Resolves once the handover has begun.
    ///
    /// # Errors
    /// Why it does not take place; nothing has changed then.
    pub async fn succeed(&self, upgrade: bool) -> Result<Begun, String> {
        let begun = self.begun(self.custody.succeed(upgrade).await).await?;
        if let Begun::Yes(Some(changes)) = &begun {
            changes.log();
        }
        Ok(begun)
    }

    /// Asks the keeper what [`succeed`](Self::succeed) would do to the settings, and changes nothing.
    ///
    /// # Errors
    /// Why it would not take place.
    pub async fn rehearse(&self) -> Result<Begun, String> {
        self.begun(self.custody.rehearse().await).await
    }

    async fn begun(&self, answered: Result<Bytes, HandoverRefused>) -> Result<Begun, String> {
        match answered {
            Ok(settings) => Ok(Begun::Yes(self.changes(&settings).await)),
            Err(refused) if refused.reason == UNCHANGED => Ok(Begun::Unchanged),
            Err(refused) => Err(refused.reason),
        }
    }

    /// What changes with the settings of the next worker, and how many sessions that concerns.
    async fn changes(&self, settings: &[u8]) -> Option<ChangesView> {
        let compare = self.facts.compare.as_ref()?;
        let changes = compare(settings)?;
        let counted = tokio::time::timeout(COUNT_MAX, self.store.count_by_server()).await;
        Some(ChangesView::of(changes, counted.ok().and_then(Result::ok)))
    }

    /// Whether this worker is giving way to the next one.
    pub fn hands_over(&self) -> bool {
        self.handing.is_set()
    }

    /// Stops taking new work, once no session is being opened and no child that its clients share has a call in flight, or
    /// `patience` is at its end. Connections, listening streams
    /// and the streams of calls on children see it by themselves.
    pub(crate) async fn begin_handover(&self, patience: Duration) {
        self.until(patience, || self.openings.count() == 0 && self.shared_calls() == 0).await;
        self.handing.set();
        self.stopping.set();
    }

    /// Waits until `settled`, for `patience` at most; `true` if it came to that.
    pub(crate) async fn until(&self, patience: Duration, settled: impl Fn() -> bool) -> bool {
        let waiting = async {
            while !settled() {
                tokio::time::sleep(QUIET_POLL).await;
            }
        };
        tokio::time::timeout(patience, waiting).await.is_ok()
    }

    /// How many calls on HTTP servers this worker still runs, whether their clients are connected or not.
    pub(crate) fn http_calls(&self) -> usize {
        let own = |live: &Live| live.calls().iter().filter(|call| !call.is_elsewhere).count();
        let of_sessions: usize = self.live.iter().filter(|live| live.server.is_http()).map(|live| own(&live)).sum();
        of_sessions + self.stateless_calls()
    }

    /// Whether something runs that only this worker can bring to its end.
    pub(crate) fn outlasts(&self) -> bool {
        self.http_calls() > 0 || self.forwarding.to_http() > 0
    }

    /// How many calls are in flight to children that all clients of their servers share.
    pub(crate) fn shared_calls(&self) -> usize {
        let programs = self.servers.values().filter(|served| !served.server.is_http());
        programs.map(|served| self.upstreams.shared_calls(&served.server)).sum()
    }

    /// How many requests wait for the answer of an HTTP server: those stay with this worker.
    pub(crate) fn outstaying(&self) -> usize {
        self.outstaying.count()
    }

    /// Makes everything that is known durable, and puts on record which calls this worker stays for. From here on it
    /// writes nothing but their answers, and opens no session at a server.
    pub(crate) async fn leave_ledger(&self) -> Recorded {
        self.upstreams.leave();
        // What the links have said of their sessions is this worker's to write until here.
        self.until(NOTICES_PATIENCE, || self.notices.capacity() == self.notices.max_capacity()).await;
        for live in self.live.iter().filter(|live| live.server.is_http() && !live.activity().is_idle()) {
            if let Some(record) = live.link.record() {
                self.store.hint(Write::Resume(record));
            }
        }
        self.note_use();
        self.remember_servers();
        self.left.set();
        let recorded = self.record_calls();
        // What was agreed to since those were written, by calls that are over by now.
        let agreed: BTreeSet<SessionKey> = self.agreed.lock().iter().map(|(session, _)| *session).collect();
        let lives = agreed.into_iter().filter_map(|session| self.live.get(&session).map(|live| Arc::clone(&live)));
        lives.filter_map(|live| live.link.record()).for_each(|record| self.store.hint(Write::Resume(record)));
        self.flush().await;
        recorded
    }

    /// Whether everything but calls on HTTP servers is another worker's.
    pub(crate) fn has_left(&self) -> bool {
        self.left.is_set()
    }

    /// Closes what is still open: clients come back to the next worker.
    pub(crate) fn close(&self) {
        self.closing.set();
    }

    /// Resolves once the next worker is to be asked, or nobody.
    pub async fn given_way(&self) {
        tokio::select! {
            () = self.closing() => {}
            () = self.handing.wait() => {}
        }
    }

    /// Resolves once the response that carries a stream of `live` is to end although the stream goes on.
    pub async fn cut(self: Arc<Self>, live: Arc<Live>) {
        if live.server.is_http() { self.closing().await } else { self.given_way().await }
    }
}

/// How long a handover waits for what links have told and nobody has written yet.
const NOTICES_PATIENCE: Duration = Duration::from_secs(1);
/// How long counting sessions may hold up a handover that has begun.
const COUNT_MAX: Duration = Duration::from_secs(2);
