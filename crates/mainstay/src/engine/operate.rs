//! The operator's hand on sessions, owed deletes and keys. Everything here is audited.

mod owed;

use std::sync::Arc;
use std::time::Duration;

use mainstay_core::audit::{Action, Actor, AuditEntry};
use mainstay_core::code::Code;
use mainstay_core::id::{ServerName, SessionKey, SessionRef};
use mainstay_core::session::Input;
use mainstay_store::keys::Keyring;
use mainstay_store::{AuditPage, StoreError, Write};

use crate::engine::live::Live;
use crate::engine::view::sessions::SessionView;
use crate::engine::view::{AuditQuery, AuditView, KeysView};
use crate::engine::{Engine, Refused};
use crate::runtime::{fill_with_entropy, spawn};

impl Engine {
    /// Drains a session: no new calls, those in flight may end within `grace`, then it is deleted (S8).
    ///
    /// It returns once the drain is durable: from then on no crash resurrects the session. An error means that it has
    /// not started.
    ///
    /// # Errors
    /// The ref names no live session or more than one, or the ledger cannot be written.
    pub async fn drain(
        self: &Arc<Self>,
        session_ref: SessionRef,
        grace: Option<Duration>,
    ) -> Result<SessionView, Refused> {
        let key = self.key_of(session_ref).await?;
        let live = self.load(key).await?;
        let grace = grace.unwrap_or(self.settings.drain_grace);
        self.end(&live, Input::Drain { grace }, Actor::Operator).await?;
        tracing::info!(session = %session_ref, "draining");
        self.deadlines.notify_one();
        let engine = Arc::clone(self);
        let draining = Arc::clone(&live);
        // The order itself is no use of the session any more: what is waited for is its calls.
        drop(live);
        spawn(async move { engine.finish_drain(&draining, grace).await });
        self.one_view(key).await
    }

    /// Ends a drained session once it is quiet or its grace is over. A failure is left to the reaper, which finds its
    /// deadline over.
    async fn finish_drain(self: &Arc<Self>, live: &Arc<Live>, grace: Duration) {
        let quiet = tokio::time::timeout(grace, live.idle()).await.is_ok();
        let input = if quiet { Input::Drained } else { Input::Expire { activity: live.activity() } };
        if let Err(refusal) = self.end(live, input, Actor::Operator).await {
            if live.ended.is_set() {
                return;
            }
            tracing::warn!(session = %live.key.session_ref(), refusal = %refusal.text, "drain not finished yet");
            self.deadlines.notify_one();
        }
    }

    /// Ends a session now, whatever goes on in it.
    ///
    /// # Errors
    /// The ref names no live session or more than one, or the ledger cannot be written; then it goes on.
    pub async fn close_session(
        self: &Arc<Self>,
        session_ref: SessionRef,
        reason: &str,
    ) -> Result<SessionView, Refused> {
        let key = self.key_of(session_ref).await?;
        let input = Input::Close { reason: reason.into() };
        if let Some(live) = self.live.get(&key).map(|live| Arc::clone(&live)) {
            self.end(&live, input, Actor::Operator).await?;
        } else {
            self.end_stored(key, input, Actor::Operator).await?;
        }
        self.one_view(key).await
    }

    /// The audit trail, newest first.
    ///
    /// # Errors
    /// The query names no action or no session, or the ledger cannot be read.
    pub async fn audit(&self, query: &AuditQuery) -> Result<Vec<AuditView>, Refused> {
        let session = match query.session {
            Some(session_ref) => match self.key_of(session_ref).await {
                Ok(key) => Some(key),
                // The trail outlives the tombstone, by which a ref is resolved.
                Err(_) => return self.audit_of_gone(session_ref, query).await,
            },
            None => None,
        };
        let action = match &query.action {
            None => None,
            Some(word) => Some(Action::parse(word).ok_or_else(|| {
                let known: Vec<_> = Action::ALL.iter().map(|action| action.as_str()).collect();
                let text = format!("the audit trail knows no action `{word}`; there are: {}", known.join(", "));
                Refused::new(Code::RequestInvalid, text)
            })?),
        };
        let page = AuditPage { before: query.before, limit: query.limit, session, action };
        let entries = self.store.audit(&page).await.map_err(|error| unreadable(&error))?;
        Ok(entries.into_iter().map(|(id, entry)| AuditView::of(id, &entry)).collect())
    }

    /// The trail of a session of which nothing else is left: its entries are looked for in the whole of it.
    async fn audit_of_gone(&self, session_ref: SessionRef, query: &AuditQuery) -> Result<Vec<AuditView>, Refused> {
        let (mut before, mut found) = (query.before, Vec::new());
        loop {
            let page = AuditPage { before, limit: AUDIT_PAGE, session: None, action: None };
            let entries = self.store.audit(&page).await.map_err(|error| unreadable(&error))?;
            before = entries.last().map(|(id, _)| *id);
            let full = entries.len() == AUDIT_PAGE;
            let named = entries.iter().filter(|(_, entry)| {
                let wanted = query.action.as_deref().is_none_or(|word| entry.action.as_str() == word);
                wanted && entry.session.is_some_and(|key| key.session_ref() == session_ref)
            });
            found.extend(named.map(|(id, entry)| AuditView::of(*id, entry)));
            if found.len() >= query.limit || !full {
                found.truncate(query.limit);
                return Ok(found);
            }
        }
    }

    /// Makes a new key the one that signs and seals. Everything written before stays valid; no session ends (S14).
    ///
    /// # Errors
    /// The key files cannot be written, and the old keys stay in force; or it is done, and the audit trail could not be told,
    /// which the text says.
    pub async fn rotate_keys(&self) -> Result<KeysView, Refused> {
        let Some(folder) = self.key_folder.clone() else {
            return Err(Refused::new(Code::RequestInvalid, "a ledger in memory has no keys to rotate"));
        };
        let _one_at_a_time = self.rotating.lock().await;
        let rotated = tokio::task::spawn_blocking(move || Keyring::rotate(&folder, &mut fill_with_entropy)).await;
        let keyring = match rotated {
            Ok(Ok(keyring)) => keyring,
            Ok(Err(error)) => return Err(Refused::new(Code::Internal, format!("the keys were not rotated: {error}"))),
            Err(_) => return Err(Refused::new(Code::Internal, "the keys were not rotated: the rotation panicked")),
        };
        let keys = keyring.key_count();
        let keyring = Arc::new(keyring);
        self.store.rotate(Arc::clone(&keyring)).await.map_err(|error| {
            Refused::new(Code::Internal, format!("the new key signs from the next start on, not yet: {error}"))
        })?;
        if let Err(error) = self.journal.rotate(keyring) {
            tracing::warn!(error = %error, "the journal seals with the former key until the next start");
        }
        let entry = AuditEntry::new(self.now(), Actor::Operator, Action::KeysRotated);
        if let Err(error) = self.store.commit(vec![Write::Audit(entry)]).await {
            tracing::error!(keys, error = %error, "the keys are rotated, and the audit trail could not be told");
            return Err(Refused::new(Code::Internal, format!("{}: {error}", unrecorded_rotation(keys))));
        }
        tracing::info!(keys, "keys rotated");
        Ok(KeysView { keys })
    }

    /// The one session that `session_ref` means.
    async fn key_of(&self, session_ref: SessionRef) -> Result<SessionKey, Refused> {
        let found = self.store.find_ref(session_ref).await.map_err(|error| unreadable(&error))?;
        match found.as_slice() {
            [(key, _)] => Ok(*key),
            [] => Err(Refused::new(Code::SessionUnknown, format!("no session has the ref `{session_ref}`"))),
            _ => Err(Refused::new(Code::Internal, format!("more than one session has the ref `{session_ref}`"))),
        }
    }

    async fn one_view(&self, key: SessionKey) -> Result<SessionView, Refused> {
        let mut views = self.session(key.session_ref()).await.map_err(|error| unreadable(&error))?;
        views.pop().ok_or_else(|| Refused::new(Code::SessionUnknown, "the session is gone"))
    }

    async fn commit(&self, writes: Vec<Write>) -> Result<(), Refused> {
        self.store.commit(writes).await.map_err(|error| {
            tracing::error!(error = %error, "an operator's order could not be stored and was not carried out");
            Refused::new(Code::Internal, "the ledger cannot be written now; nothing was changed")
        })
    }

    /// An entry of the audit trail.
    pub(crate) fn audit_entry(
        &self,
        actor: Actor,
        action: Action,
        session: Option<SessionKey>,
        server: &ServerName,
        detail: &str,
    ) -> AuditEntry {
        let entry = AuditEntry::new(self.now(), actor, action).at_server(server.clone()).with_detail(detail);
        match session {
            Some(key) => entry.of_session(key),
            None => entry,
        }
    }
}

/// What is told of a rotation of which the audit trail could not be told.
pub(crate) fn unrecorded_rotation(keys: usize) -> String {
    format!("the keys are rotated, a new one signs and {keys} are accepted, but the audit trail has no entry of it")
}

fn unreadable(error: &StoreError) -> Refused {
    Refused::new(Code::Unavailable, format!("the ledger cannot be read now: {error}"))
}

/// Entries of the audit trail that are read at a time; the trail itself is bounded.
const AUDIT_PAGE: usize = 1000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s14_a_rotation_without_its_record_is_told_as_done() {
        let told = unrecorded_rotation(3);
        assert!(told.starts_with("the keys are rotated") && told.ends_with("no entry of it"), "{told}");
    }
}
