//! From a session id to a live session: memory first, the ledger once, never a wrong answer in between.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use mainstay_core::audit::{Action, Actor};
use mainstay_core::code::Code;
use mainstay_core::id::{ServerName, SessionId, SessionKey};
use mainstay_core::principal::Principal;
use mainstay_core::session::{Asked, Decision, Refusal, Restoration, Session, SessionRecord, Tombstone};
use mainstay_store::journal::Failure;
use mainstay_store::{Fault, RowFault, StoreError, Stored, Write};
use mainstay_upstream::{Handshake, Link};

use crate::engine::conversation;
use crate::engine::live::{AskedEarlier, Barred, Entry, Heard, Live, Parts};
use crate::engine::{Caller, Engine, HOLD, Refused, SESSION_UNKNOWN, Served, refused};
use crate::runtime::spawn;

mod taken_back;

pub use self::taken_back::Evidence;

impl Engine {
    /// The live session that `id` names, for a request of `caller` to `served`. The request counts as use of it
    /// until the entry is dropped.
    ///
    /// The order of checks is S4's: principal, then state. A session that the table does not hold is restored from
    /// the ledger; while the ledger or the restore fails for now, the request is held, then refused as
    /// [`Code::Unavailable`], and nothing is lost.
    ///
    /// # Errors
    /// What the client is to be told.
    pub async fn find(self: &Arc<Self>, id: &SessionId, caller: &Caller, served: &Served) -> Result<Entry, Refused> {
        let key = self.keyring.session_key(id);
        if let Some(live) = self.live.get(&key).map(|live| Arc::clone(&live))
            && let Some(entry) = self.admit(&live, caller, served)?
        {
            return Ok(entry);
        }
        // Seldom, and large: it is no part of every call's future.
        Box::pin(self.find_key(key, caller, served)).await
    }

    /// Looks until the session is there and stays, or is known to be gone.
    async fn find_at_last(
        self: &Arc<Self>,
        key: SessionKey,
        caller: &Caller,
        served: &Served,
    ) -> Result<Entry, Refused> {
        for _ in 0..LOOKS_MAX {
            let live = match self.live.get(&key).map(|live| Arc::clone(&live)) {
                Some(live) => live,
                None => self.restore(key, Some(&caller.principal)).await?,
            };
            if let Some(entry) = self.admit(&live, caller, served)? {
                return Ok(entry);
            }
            // It is overdue, or leaving memory: what has become of it is known once its lane is free.
            self.expire(key).await;
        }
        Err(Refused::new(Code::Unavailable, "the session keeps leaving memory; try again"))
    }

    /// Lets a request into a live session; `None` if that is about to leave memory.
    fn admit(&self, live: &Arc<Live>, caller: &Caller, served: &Served) -> Result<Option<Entry>, Refused> {
        if live.server.name != served.server.name {
            return Err(Refused::new(Code::SessionUnknown, SESSION_UNKNOWN));
        }
        match live.admit(self.now(), &caller.principal, &self.settings.terms) {
            Ok((entry, hint)) => {
                agrees(caller, &entry)?;
                self.hint(hint);
                Ok(Some(entry))
            }
            Err(Barred::Leaving | Barred::Refused(Refusal::Overdue)) => Ok(None),
            Err(Barred::Refused(refusal)) => {
                self.note_stranger(&refusal, live.key, &live.server.name, &caller.principal);
                Err(refused(&refusal))
            }
        }
    }

    /// As [`find`](Self::find), by the key of a session that the caller has shown to know.
    ///
    /// # Errors
    /// As [`find`](Self::find).
    pub async fn find_key(
        self: &Arc<Self>,
        key: SessionKey,
        caller: &Caller,
        served: &Served,
    ) -> Result<Entry, Refused> {
        tokio::time::timeout(HOLD, self.find_at_last(key, caller, served))
            .await
            .map_err(|_| Refused::new(Code::Unavailable, "the session cannot be restored now; try again later"))?
    }

    /// The live session `key`, for an operator: whose it is does not matter.
    ///
    /// # Errors
    /// As [`find`](Self::find).
    pub(crate) async fn load(self: &Arc<Self>, key: SessionKey) -> Result<Entry, Refused> {
        for _ in 0..LOOKS_MAX {
            let live = match self.live.get(&key).map(|live| Arc::clone(&live)) {
                Some(live) => live,
                None => self.restore(key, None).await?,
            };
            if let Some(entry) = live.enter() {
                return Ok(entry);
            }
            drop(self.lane(&key).lock().await);
        }
        Err(Refused::new(Code::Unavailable, "the session keeps leaving memory; try again"))
    }

    async fn restore(self: &Arc<Self>, key: SessionKey, asker: Option<&Principal>) -> Result<Arc<Live>, Refused> {
        let _lane = self.lane(&key).lock().await;
        if let Some(live) = self.live.get(&key) {
            return Ok(Arc::clone(&live));
        }
        let is_theirs = |owner: &Principal| asker.is_none_or(|asker| asker == owner);
        match self.held("a session", || self.store.find(key)).await {
            Stored::Absent => Err(Refused::new(Code::SessionUnknown, SESSION_UNKNOWN)),
            Stored::Unreadable(fault) => Err(unreadable(&fault)),
            Stored::Ended(tombstone) if is_theirs(&tombstone.principal) => {
                Err(refused(&Refusal::Ended(tombstone.state)))
            }
            Stored::Live(record) if is_theirs(&record.principal) => self.wake(*record).await,
            Stored::Ended(Tombstone { server, .. }) => Err(self.stranger(key, &server, asker)),
            Stored::Live(record) if record.contract != self.settings.contract => {
                // Nobody can prove any more to be its principal: it ends, and whoever asks learns nothing (S4, S15).
                let _ended = self.wake(*record).await;
                Err(refused(&Refusal::OtherPrincipal))
            }
            Stored::Live(record) => Err(self.stranger(key, &record.server, asker)),
        }
    }

    /// Reads the ledger, for as long as that takes: the caller's request is held meanwhile.
    pub(crate) async fn held<T, F>(&self, what: &'static str, read: impl Fn() -> F) -> T
    where
        F: Future<Output = Result<T, StoreError>>,
    {
        let mut pause = RETRY_FIRST;
        loop {
            match read().await {
                Ok(found) => return found,
                Err(error) => {
                    self.metrics.restored("deferred");
                    tracing::warn!(what, error = %error, "not readable yet; the request is held");
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RETRY_MAX);
        }
    }

    fn stranger(&self, key: SessionKey, server: &ServerName, asker: Option<&Principal>) -> Refused {
        if let Some(asker) = asker {
            self.note_stranger(&Refusal::OtherPrincipal, key, server, asker);
        }
        refused(&Refusal::OtherPrincipal)
    }

    /// Puts on record that somebody asked for a session that is not his (S4, I5).
    fn note_stranger(&self, refusal: &Refusal, key: SessionKey, server: &ServerName, asker: &Principal) {
        if *refusal == Refusal::OtherPrincipal && self.is_news(key) {
            let actor = Actor::Client(asker.clone());
            let entry = self.audit_entry(actor, Action::StrangerRefused, Some(key), server, "");
            self.store.hint(Write::Audit(entry));
        }
    }

    /// Under which circumstances a stored session is asked for now.
    pub(crate) fn asked(&self) -> Asked<'_> {
        Asked { now: self.now(), contract: &self.settings.contract, epoch: self.epoch, terms: &self.settings.terms }
    }

    /// Brings a stored session back into memory. Everything else about it comes back with its first use.
    async fn wake(self: &Arc<Self>, mut record: SessionRecord) -> Result<Arc<Live>, Refused> {
        let session_ref = record.key.session_ref();
        record.initialize_params = self.upstreams.share(&record.initialize_params);
        let asked = self.asked();
        let session = match Session::restore(record, &asked) {
            Restoration::Resumed(session) => session,
            Restoration::Refused(reason, decision) => {
                tracing::warn!(session = %session_ref, reason = %reason, "restore refused");
                self.metrics.restored("refused");
                return self.bury(decision, Code::SessionClosed).await;
            }
            Restoration::Overdue(decision) => return self.bury(decision, Code::SessionExpired).await,
            Restoration::Unfinished(decision) => return self.bury(decision, Code::SessionDeleted).await,
        };
        let stored = session.record();
        let Some(served) = self.servers.get(&stored.server) else {
            return Err(Refused::new(Code::SessionUnknown, SESSION_UNKNOWN));
        };
        let remembered = self.held("a resume record", || self.store.resume_record(stored.key)).await;
        let handshake = Handshake {
            key: stored.key,
            params: conversation::as_said(&stored.initialize_params),
            confirmed: stored.confirmed,
            log_level: remembered.as_ref().and_then(|record| record.log_level.clone()),
            subscriptions: remembered.as_ref().map(|record| record.subscriptions.clone()).unwrap_or_default(),
        };
        if remembered.is_some() {
            self.metrics.resumed(&served.server.name);
        }
        let (asked_earlier, heard) = self.said_earlier(stored.key).await;
        let arrival = self.expect(stored.key);
        let held = self.take_held(&stored.key);
        let link = Link::restore(&self.upstreams, &served.server, handshake, remembered, held, self.notices.clone());
        let (key, is_conversation) = (stored.key, conversation::is_conversation(stored));
        let live = Live::new(Parts {
            session,
            server: Arc::clone(&served.server),
            link,
            listen: self.listen_stream(),
            life: self.next_streams(1).number,
            journaled: self.journaled(key),
            asked_earlier,
            heard,
        });
        arrival.complete(&live);
        if is_conversation {
            self.take_conversation_up(&live);
        }
        self.metrics.restored("resumed");
        tracing::info!(session = %session_ref, server = %served.server.name, "session restored");
        Ok(live)
    }

    /// What the session's child, if an earlier worker left one, has asked its client so far, and what of it is on the
    /// session's streams. Another child of the session may have used the same ids and numbers.
    async fn said_earlier(&self, key: SessionKey) -> (AskedEarlier, Option<Heard>) {
        let Some((child, spawned_at)) = self.held_child(&key) else { return (Some(BTreeMap::new()), None) };
        let reading = async {
            let asked = self.journal.questions(key, QUESTIONS_MAX).await?;
            Ok::<_, Failure>((asked, self.journal.child_events(key, spawned_at, HEARD_EVENTS_MAX).await?))
        };
        match tokio::time::timeout(EARLIER_READ_MAX, reading).await {
            Ok(Ok((asked, events))) => {
                let of_this_child = asked.into_iter().filter(|asked| asked.question.asked_at >= spawned_at);
                let asked = of_this_child.map(|asked| (asked.question.asked, asked.question)).collect();
                (Some(asked), Heard::of(child, &events))
            }
            Ok(Err(error)) => {
                tracing::warn!(session = %key.session_ref(), error = %error, "what its child said earlier can't be read; some of it may come again");
                (None, None)
            }
            Err(_elapsed) => (None, None),
        }
    }

    /// Makes an ending found at restore durable, and says it. If the ledger cannot take it the id is still not served.
    /// Once begun it is carried through, whatever becomes of the request.
    async fn bury(self: &Arc<Self>, decision: Decision, code: Code) -> Result<Arc<Live>, Refused> {
        let engine = Arc::clone(self);
        let burying = spawn(async move { engine.commit_ending(&decision.changes, None, Actor::Gateway).await });
        match burying.await {
            Ok(Ok(())) if code == Code::SessionExpired => Err(refused(&Refusal::Overdue)),
            Ok(Ok(())) => Err(Refused::new(code, "the session was closed; open a new one")),
            Ok(Err(_)) | Err(_) => {
                Err(Refused::new(Code::Unavailable, "the ledger cannot be written now; try again later"))
            }
        }
    }
}

/// What is told of a row that cannot be read. Under a key or of a version that may come back, it is only deferred.
fn unreadable(fault: &RowFault) -> Refused {
    match fault.fault {
        Fault::UnknownKey { .. } | Fault::Future { .. } => {
            Refused::new(Code::Unavailable, "the session's row cannot be read by this gateway now; try again later")
        }
        Fault::Tampered | Fault::Misfiled | Fault::Unparsable => Refused::new(Code::SessionUnknown, SESSION_UNKNOWN),
    }
}

/// An agent name that disagrees with the one its session was opened under is refused (I2).
fn agrees(caller: &Caller, live: &Live) -> Result<(), Refused> {
    let Some(named) = &caller.agent else { return Ok(()) };
    let opened_by = live.with_session(|session| session.record().agent.clone());
    if opened_by.is_some_and(|opened_by| opened_by != *named) {
        let text = "`X-Agent-Name` names another agent than the one that opened this session";
        return Err(Refused::new(Code::AgentRefused, text));
    }
    Ok(())
}

/// How much of what a child said through earlier workers is looked at, and how long that may take. More events than that
/// are not kept of a session.
const QUESTIONS_MAX: usize = 4096;
const HEARD_EVENTS_MAX: usize = 2048;
const EARLIER_READ_MAX: Duration = Duration::from_secs(2);
/// How often a session is looked up anew because it was just leaving memory.
const LOOKS_MAX: usize = 8;
/// The first pause between two tries of the ledger.
const RETRY_FIRST: Duration = Duration::from_millis(50);
/// The longest.
const RETRY_MAX: Duration = Duration::from_secs(2);
