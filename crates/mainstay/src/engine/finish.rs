//! Ending a session: one transaction, then memory, then the instance (S6).

use std::sync::Arc;

use mainstay_core::audit::{Action, Actor};
use mainstay_core::code::Code;
use mainstay_core::id::SessionKey;
use mainstay_core::resume::OwedDelete;
use mainstay_core::session::{Change, Decision, Input, Refusal, Restoration, Session, State};
use mainstay_core::wire::modern::Era;
use mainstay_store::{CommitError, Stored, Write};
use mainstay_upstream::{Ending, Holder, Why, dismiss, parse_label};

use crate::engine::live::Live;
use crate::engine::{Engine, HOLD, Refused, Served, refused};
use crate::runtime::spawn;

impl Engine {
    /// Ends a live session as `input` says. The first ending wins; if the ledger refuses, the session goes on.
    ///
    /// Once begun it is carried through, whatever becomes of the caller: half an ending would leave an ended id alive.
    ///
    /// # Errors
    /// The machine's refusal, or [`Code::Internal`] if the ending could not be made durable.
    pub async fn end(self: &Arc<Self>, live: &Arc<Live>, input: Input, actor: Actor) -> Result<(), Refused> {
        let (engine, live) = (Arc::clone(self), Arc::clone(live));
        let ending = spawn(async move {
            let (now, terms) = (engine.now(), &engine.settings.terms);
            let decided = live.with_session(|session| session.decide(now, &input, terms));
            match decided {
                Ok(decision) => engine.carry_out(&live, &decision, actor).await,
                Err(refusal) => Err(refused(&refusal)),
            }
        });
        ending.await.unwrap_or_else(|_| Err(Refused::new(Code::Internal, "the ending failed in the gateway")))
    }

    /// Makes a decision about a live session durable, applies it, and, if it ends the session, performs that. To be run
    /// to its end.
    async fn carry_out(&self, live: &Arc<Live>, decision: &Decision, actor: Actor) -> Result<(), Refused> {
        let owed = live.link.record().and_then(|record| record.owed_delete(self.now()));
        match self.commit_ending(&decision.changes, owed, actor).await {
            Ok(()) => {}
            Err(CommitError::Conflict { .. }) => return Err(self.ended_by_another(live.key).await),
            Err(error) => {
                tracing::error!(session = %live.key.session_ref(), error = %error, "a session could not be ended; it goes on");
                return Err(Refused::new(Code::Internal, "the ledger cannot be written now; the session goes on"));
            }
        }
        live.apply(&decision.changes);
        if live.with_session(|session| session.record().state.is_ended()) {
            self.live.remove(&live.key);
            live.shut();
            let ending = if live.server.is_http() { Ending::KeepForResume } else { Ending::Delete };
            live.link.end(ending).await;
            tracing::info!(session = %live.key.session_ref(), "session ended");
        }
        Ok(())
    }

    /// What became of a session that somebody else ended first.
    async fn ended_by_another(&self, key: SessionKey) -> Refused {
        match self.store.find(key).await {
            Ok(Stored::Ended(tombstone)) => refused(&Refusal::Ended(tombstone.state)),
            Ok(Stored::Live(_) | Stored::Unreadable(_) | Stored::Absent) | Err(_) => {
                Refused::new(Code::Internal, "the session changed meanwhile; try again")
            }
        }
    }

    /// Expires the session `key` if it is overdue, wherever it is. Once begun it is carried through. `true` if there is
    /// nothing left of it to be expired now.
    pub(crate) async fn expire(self: &Arc<Self>, key: SessionKey) -> bool {
        let engine = Arc::clone(self);
        let expiring = spawn(async move {
            let _lane = engine.lane(&key).lock().await;
            let live = engine.live.get(&key).map(|live| Arc::clone(&live));
            match live {
                Some(live) => engine.expire_live(&live).await,
                None => engine.expire_stored(key).await,
            }
        });
        expiring.await.unwrap_or(false)
    }

    /// Expires a live session. The caller holds its lane.
    async fn expire_live(&self, live: &Arc<Live>) -> bool {
        let (now, terms) = (self.now(), &self.settings.terms);
        let decision = live.leave(|session, activity| session.decide(now, &Input::Expire { activity }, terms).ok());
        let Some(decision) = decision else {
            // Its deadline has moved, or what goes on in it is use; the ledger must learn of it, or the reaper comes
            // straight back.
            self.hint(live.note_use(now, terms));
            return true;
        };
        let done = self.carry_out(live, &decision, Actor::Gateway).await;
        if let Err(refusal) = &done {
            tracing::warn!(session = %live.key.session_ref(), refusal = %refusal.text, "not expired yet");
            live.stay();
        }
        done.is_ok()
    }

    /// Ends a session from its row, without waking it: its server need not even be configured any more. One that is woken
    /// meanwhile is ended where it is.
    ///
    /// # Errors
    /// As [`end`](Self::end).
    pub(crate) async fn end_stored(
        self: &Arc<Self>,
        key: SessionKey,
        input: Input,
        actor: Actor,
    ) -> Result<(), Refused> {
        let engine = Arc::clone(self);
        let ending = spawn(async move {
            let lane = engine.lane(&key).lock().await;
            if let Some(live) = engine.live.get(&key).map(|live| Arc::clone(&live)) {
                drop(lane);
                return engine.end(&live, input, actor).await;
            }
            let unwritten = |_| Refused::new(Code::Internal, "the ledger cannot be written now; the session goes on");
            let decision = match engine.store.find(key).await {
                Ok(Stored::Live(record)) => match Session::restore(*record, &engine.asked()) {
                    Restoration::Resumed(session) => {
                        session.decide(engine.now(), &input, &engine.settings.terms).map_err(|no| refused(&no))?
                    }
                    Restoration::Refused(_, decision)
                    | Restoration::Overdue(decision)
                    | Restoration::Unfinished(decision) => decision,
                },
                Ok(Stored::Ended(tombstone)) => return Err(refused(&Refusal::Ended(tombstone.state))),
                Ok(Stored::Unreadable(_) | Stored::Absent) => {
                    return Err(Refused::new(Code::SessionUnknown, "there is no such session that could be ended"));
                }
                Err(_) => return Err(Refused::new(Code::Unavailable, "the ledger cannot be read now")),
            };
            engine.commit_ending(&decision.changes, None, actor).await.map_err(unwritten)
        });
        ending.await.unwrap_or_else(|_| Err(Refused::new(Code::Internal, "the ending failed in the gateway")))
    }

    /// Expires a session that is in the ledger only. The caller holds its lane.
    async fn expire_stored(&self, key: SessionKey) -> bool {
        let record = match self.store.find(key).await {
            Ok(Stored::Live(record)) => *record,
            Ok(Stored::Ended(_) | Stored::Unreadable(_) | Stored::Absent) => return true,
            Err(error) => {
                tracing::warn!(session = %key.session_ref(), error = %error, "not expired yet");
                return false;
            }
        };
        let decision = match Session::restore(record, &self.asked()) {
            Restoration::Resumed(_) => return true,
            Restoration::Refused(_, decision) | Restoration::Overdue(decision) | Restoration::Unfinished(decision) => {
                decision
            }
        };
        let done = self.commit_ending(&decision.changes, None, Actor::Gateway).await;
        if let Err(error) = &done {
            tracing::warn!(session = %key.session_ref(), error = %error, "not expired yet");
        }
        done.is_ok()
    }

    /// Makes an ending durable, together with the delete that is owed for it. Without `owed`, the resume record in
    /// the ledger says what is owed.
    pub(crate) async fn commit_ending(
        &self,
        changes: &[Change],
        owed: Option<OwedDelete>,
        actor: Actor,
    ) -> Result<(), CommitError> {
        let mut writes: Vec<_> = changes.iter().cloned().map(Write::Session).collect();
        for change in changes {
            if let Change::Update(record) = change
                && record.state == State::Draining
            {
                writes.push(Write::Audit(self.audit_entry(
                    actor.clone(),
                    Action::DrainBegun,
                    Some(record.key),
                    &record.server,
                    "",
                )));
            }
            let Change::End(tombstone) = change else { continue };
            // A drain is the act of who ordered it, also if its grace or a crash has ended it.
            let actor = if tombstone.was_drained() { Actor::Operator } else { actor.clone() };
            let action = ending_action(tombstone.state, &actor);
            let entry = self.audit_entry(actor, action, Some(tombstone.key), &tombstone.server, &tombstone.reason);
            writes.push(Write::Audit(entry));
            let owed = match owed.clone() {
                Some(owed) => Some(owed),
                None => {
                    // Unreadable for now is not nothing: to forget the record would leak the server's session unseen.
                    let record = self.store.resume_record(tombstone.key).await.map_err(CommitError::from)?;
                    record.and_then(|record| record.owed_delete(self.now()))
                }
            };
            writes.extend(owed.map(Write::Owe));
            writes.push(Write::ForgetResume(tombstone.key));
        }
        self.store.commit(writes).await?;
        for change in changes {
            if let Change::End(tombstone) = change {
                self.census.leave(&tombstone.principal);
                let lived = tombstone.ended_at.since(tombstone.opened_at);
                self.metrics.ended(&tombstone.server, (tombstone.state.as_str(), tombstone.cause()), lived);
                let is_configured = self.servers.contains_key(&tombstone.server);
                self.dismiss_held(tombstone.key, if is_configured { Why::SessionEnded } else { Why::Removed });
                self.forget_streams(tombstone.key);
            }
        }
        self.owed.notify_one();
        Ok(())
    }
}

impl Engine {
    /// Ends the child that an earlier worker left for a session that nobody will use again.
    pub(crate) fn dismiss_held(&self, key: SessionKey, why: Why) {
        let Some(held) = self.take_held(&key) else { return };
        let (pid, reason) = (held.identity.pid(), why.as_str());
        tracing::info!(session = %key.session_ref(), pid, reason, "ending a child that no session will use");
        let server = parse_label(&held.label).and_then(|label| self.servers.get(&label.server));
        match server.map(|served| Arc::clone(&served.server)).filter(|server| !server.is_http()) {
            Some(server) => {
                let upstreams = Arc::clone(&self.upstreams);
                spawn(async move { upstreams.dismiss(&server, held, why).await });
            }
            None => {
                let custody = self.custody.clone();
                spawn(async move { dismiss(&custody, held).await });
            }
        }
    }

    /// Gives the children that earlier workers left for all clients of a server to that server, as far as it is still a
    /// program that may be modern. Those, and what was started to be asked for its era, belong to no session.
    pub(crate) fn adopt_shared(&self) {
        for (key, label, _) in self.held_labels() {
            let Some(label) = parse_label(&label) else { continue };
            let served = self.servers.get(&label.server);
            match (label.holder(), served) {
                (Holder::Session, _) => {}
                (Holder::Nobody, _) => self.dismiss_held(key, Why::Unwanted),
                (Holder::Everybody, None) => self.dismiss_held(key, Why::Removed),
                (Holder::Everybody, Some(Served { server, .. }))
                    if server.is_http() || server.fixed_era() == Some(Era::Legacy) =>
                {
                    self.dismiss_held(key, Why::Redefined);
                }
                (Holder::Everybody, Some(Served { server, .. })) => {
                    if let Some(held) = self.take_held(&key) {
                        self.upstreams.adopt_shared(server, held);
                    }
                }
            }
        }
    }

    /// Ends the children that earlier workers left of servers that are no longer defined as they were then: their sessions
    /// get new ones, with the handshake replayed (T4, C5). One that still runs calls is given back to its session first,
    /// which sees to them.
    pub(crate) fn dismiss_redefined(self: &Arc<Self>) {
        for (key, label, open_calls) in self.held_labels() {
            let served = parse_label(&label).map(|label| (self.servers.get(&label.server), label.definition));
            let why = match served {
                Some((Some(served), definition)) if served.server.definition() == definition => continue,
                Some((Some(served), _)) if open_calls > 0 && !served.server.is_http() => {
                    self.wake_redefined(key);
                    continue;
                }
                Some((Some(_), _)) => Why::Redefined,
                Some((None, _)) => Why::Removed,
                None => Why::Unwanted,
            };
            self.dismiss_held(key, why);
        }
    }

    /// Restores a session whose child is of another definition: its link lets the calls that the child runs be answered
    /// within their grace. If the session can't be restored now, the next use of it does the same.
    fn wake_redefined(self: &Arc<Self>, key: SessionKey) {
        let engine = Arc::clone(self);
        spawn(async move {
            match tokio::time::timeout(HOLD, engine.load(key)).await {
                Ok(Ok(_woken)) => {}
                // A session that is gone takes its child with it.
                Ok(Err(refusal)) => {
                    tracing::debug!(session = %key.session_ref(), refusal = %refusal.text, "not woken");
                }
                Err(_elapsed) => tracing::warn!(session = %key.session_ref(), "a child of another definition stays"),
            }
        });
    }

    /// Removes what was kept of an ended session's streams. If this worker dies on the way it goes with its age.
    fn forget_streams(&self, key: SessionKey) {
        let journal = self.journal.clone();
        spawn(async move {
            if let Err(error) = journal.forget(key).await {
                tracing::debug!(session = %key.session_ref(), error = %error, "an ended session's streams are removed later");
            }
        });
    }

    /// Puts on record that a server is owed a delete, and has it paid.
    pub(crate) fn owe(self: &Arc<Self>, owed: OwedDelete) {
        let engine = Arc::clone(self);
        spawn(async move {
            let server = owed.server.clone();
            if let Err(error) = engine.store.commit(vec![Write::Owe(owed)]).await {
                tracing::error!(server = %server, error = %error, "an owed delete could not be stored; the server's session is left to expire there");
            }
            engine.owed.notify_one();
        });
    }
}

/// What the audit trail calls an ending. A client deletes; whoever else ends a session as deleted has drained it.
fn ending_action(state: State, actor: &Actor) -> Action {
    match (state, actor) {
        (State::Expired, _) => Action::Expired,
        (State::Closed, _) => Action::Closed,
        (_, Actor::Client(_)) => Action::Deleted,
        (_, Actor::Operator | Actor::Gateway) => Action::Drained,
    }
}
