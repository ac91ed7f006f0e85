//! From a session id to a live session: memory first, the ledger once, never a wrong answer in between.

use std::sync::Arc;
use std::time::Duration;

use mainstay_core::code::Code;
use mainstay_core::id::{SessionId, SessionKey};
use mainstay_core::principal::Principal;
use mainstay_core::session::{Asked, Decision, Refusal, Restoration, Session, SessionRecord};
use mainstay_store::{StoreError, Stored};
use mainstay_upstream::{Handshake, Link};

use crate::engine::live::{Live, Parts};
use crate::engine::{Engine, HOLD, Refused, SESSION_UNKNOWN, Served, refused};

impl Engine {
    /// The live session that `id` names, for a request of `principal` to `served`.
    ///
    /// The order of checks is S4's: principal, then state. A session that the table does not hold is restored from
    /// the ledger; while the ledger or the restore fails for now, the request is held, then refused as
    /// [`Code::Unavailable`], and nothing is lost.
    ///
    /// # Errors
    /// What the client is to be told.
    pub async fn find(
        self: &Arc<Self>,
        id: &SessionId,
        principal: &Principal,
        served: &Served,
    ) -> Result<Arc<Live>, Refused> {
        let key = self.keyring.session_key(id);
        let live = match self.live.get(&key) {
            Some(live) => Arc::clone(&live),
            None => self.restore(key, principal).await?,
        };
        if live.server.name != served.server.name {
            return Err(Refused::new(Code::SessionUnknown, SESSION_UNKNOWN));
        }
        match live.admit(self.now(), principal, &self.settings.terms) {
            Ok(hint) => {
                self.hint(hint);
                Ok(live)
            }
            Err(refusal) => {
                if refusal == Refusal::Overdue {
                    self.expire(key).await;
                }
                Err(refused(&refusal))
            }
        }
    }

    async fn restore(self: &Arc<Self>, key: SessionKey, principal: &Principal) -> Result<Arc<Live>, Refused> {
        let _lane = self.lane(&key).lock().await;
        if let Some(live) = self.live.get(&key) {
            return Ok(Arc::clone(&live));
        }
        match self.stored(key).await? {
            Stored::Absent | Stored::Unreadable(_) => Err(Refused::new(Code::SessionUnknown, SESSION_UNKNOWN)),
            Stored::Ended(tombstone) if tombstone.principal == *principal => {
                Err(refused(&Refusal::Ended(tombstone.state)))
            }
            Stored::Ended(_) => Err(Refused::new(Code::OtherPrincipal, SESSION_UNKNOWN)),
            Stored::Live(record) if record.principal != *principal => {
                Err(Refused::new(Code::OtherPrincipal, SESSION_UNKNOWN))
            }
            Stored::Live(record) => self.wake(*record).await,
        }
    }

    /// Reads a row, holding the request while the ledger cannot be read.
    async fn stored(&self, key: SessionKey) -> Result<Stored, Refused> {
        let mut pause = RETRY_FIRST;
        let held = tokio::time::timeout(HOLD, async {
            loop {
                match self.store.find(key).await {
                    Ok(stored) => return stored,
                    Err(error) => self.note_deferred(&error),
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(RETRY_MAX);
            }
        });
        held.await.map_err(|_| Refused::new(Code::Unavailable, "the ledger cannot be read now; try again later"))
    }

    fn note_deferred(&self, error: &StoreError) {
        tracing::warn!(error = %error, "a session cannot be restored yet; its request is held");
    }

    /// Under which circumstances a stored session is asked for now.
    pub(crate) fn asked(&self) -> Asked<'_> {
        Asked { now: self.now(), contract: &self.settings.contract, epoch: self.epoch, terms: &self.settings.terms }
    }

    /// Brings a stored session back into memory. Everything else about it comes back with its first use.
    async fn wake(self: &Arc<Self>, record: SessionRecord) -> Result<Arc<Live>, Refused> {
        let session_ref = record.key.session_ref();
        let asked = self.asked();
        let session = match Session::restore(record, &asked) {
            Restoration::Resumed(session) => session,
            Restoration::Refused(reason, decision) => {
                tracing::warn!(session = %session_ref, reason = %reason, "restore refused");
                return self.bury(&decision, Code::SessionClosed).await;
            }
            Restoration::Overdue(decision) => return self.bury(&decision, Code::SessionExpired).await,
            Restoration::Unfinished(decision) => return self.bury(&decision, Code::SessionDeleted).await,
        };
        let stored = session.record();
        let Some(served) = self.servers.get(&stored.server) else {
            return Err(Refused::new(Code::SessionUnknown, SESSION_UNKNOWN));
        };
        let remembered = self.store.resume_record(stored.key).await.unwrap_or_else(|error| {
            tracing::warn!(session = %session_ref, error = %error, "resume record not readable; the upstream session is made again");
            None
        });
        let handshake = Handshake {
            key: stored.key,
            params: stored.initialize_params.clone(),
            confirmed: stored.confirmed,
            log_level: remembered.as_ref().and_then(|record| record.log_level.clone()),
            subscriptions: remembered.as_ref().map(|record| record.subscriptions.clone()).unwrap_or_default(),
        };
        let held = self.take_held(&stored.key);
        let link = Link::restore(&self.upstreams, &served.server, handshake, remembered, held, self.notices.clone());
        let key = stored.key;
        let live = Live::new(Parts { session, server: Arc::clone(&served.server), link, listen: self.listen_stream() });
        self.live.insert(key, Arc::clone(&live));
        tracing::info!(session = %session_ref, server = %served.server.name, "session restored");
        Ok(live)
    }

    /// Makes an ending found at restore durable, and says it. If the ledger cannot take it the id is still not served.
    async fn bury(&self, decision: &Decision, code: Code) -> Result<Arc<Live>, Refused> {
        match self.commit_ending(&decision.changes, None).await {
            Ok(()) if code == Code::SessionExpired => Err(refused(&Refusal::Overdue)),
            Ok(()) => Err(Refused::new(code, "the session was closed; open a new one")),
            Err(_) => Err(Refused::new(Code::Unavailable, "the ledger cannot be written now; try again later")),
        }
    }
}

/// The first pause between two tries of the ledger.
const RETRY_FIRST: Duration = Duration::from_millis(50);
/// The longest.
const RETRY_MAX: Duration = Duration::from_secs(2);
