//! Ending a session: one transaction, then memory, then the instance (S6).

use std::sync::Arc;

use mainstay_core::code::Code;
use mainstay_core::id::SessionKey;
use mainstay_core::resume::OwedDelete;
use mainstay_core::session::{Change, Input, Refusal, Restoration, Session};
use mainstay_store::{CommitError, Stored, Write};
use mainstay_upstream::Ending;

use crate::engine::live::Live;
use crate::engine::{Engine, Refused, refused};

impl Engine {
    /// Ends a live session as `input` says. The first ending wins; if the ledger refuses, the session goes on.
    ///
    /// # Errors
    /// The machine's refusal, or [`Code::Internal`] if the ending could not be made durable.
    pub async fn end(&self, live: &Arc<Live>, input: &Input) -> Result<(), Refused> {
        let (now, terms) = (self.now(), &self.settings.terms);
        let decision = live.with_session(|session| session.decide(now, input, terms)).map_err(|no| refused(&no))?;
        let owed = live.link.record().and_then(|record| record.owed_delete(self.now()));
        match self.commit_ending(&decision.changes, owed).await {
            Ok(()) => {}
            Err(CommitError::Conflict { .. }) => {
                return Err(refused(&Refusal::Illegal {
                    state: live.with_session(|session| session.record().state),
                    input: "ending",
                }));
            }
            Err(error) => {
                tracing::error!(session = %live.key.session_ref(), error = %error, "a session could not be ended; it goes on");
                return Err(Refused::new(Code::Internal, "the ledger cannot be written now; the session goes on"));
            }
        }
        live.apply(&decision.changes);
        self.live.remove(&live.key);
        live.shut();
        let ending = if live.server.is_http() { Ending::KeepForResume } else { Ending::Delete };
        live.link.end(ending).await;
        self.owed.notify_one();
        tracing::info!(session = %live.key.session_ref(), "session ended");
        Ok(())
    }

    /// Expires the session `key` if it is overdue, wherever it is.
    pub(crate) async fn expire(&self, key: SessionKey) {
        let live = self.live.get(&key).map(|live| Arc::clone(&live));
        if let Some(live) = live {
            let input = Input::Expire { activity: live.activity() };
            if let Err(refusal) = self.end(&live, &input).await {
                tracing::debug!(session = %key.session_ref(), refusal = %refusal.text, "not expired");
                // What goes on in it is use, of which the ledger must learn, or the reaper comes straight back.
                self.hint(live.touch(self.now(), &self.settings.terms));
            }
            return;
        }
        let _lane = self.lane(&key).lock().await;
        if self.live.contains_key(&key) {
            return;
        }
        match self.store.find(key).await {
            Ok(Stored::Live(record)) => match Session::restore(*record, &self.asked()) {
                Restoration::Resumed(_) => {}
                Restoration::Refused(_, decision)
                | Restoration::Overdue(decision)
                | Restoration::Unfinished(decision) => {
                    if let Err(error) = self.commit_ending(&decision.changes, None).await {
                        tracing::warn!(session = %key.session_ref(), error = %error, "not expired yet");
                    }
                }
            },
            Ok(Stored::Ended(_) | Stored::Unreadable(_) | Stored::Absent) => {}
            Err(error) => tracing::warn!(session = %key.session_ref(), error = %error, "not expired yet"),
        }
    }

    /// Makes an ending durable, together with the delete that is owed for it. Without `owed`, the resume record in
    /// the ledger says what is owed.
    pub(crate) async fn commit_ending(&self, changes: &[Change], owed: Option<OwedDelete>) -> Result<(), CommitError> {
        let mut writes: Vec<_> = changes.iter().cloned().map(Write::Session).collect();
        for change in changes {
            let Change::End(tombstone) = change else { continue };
            let owed = match owed.clone() {
                Some(owed) => Some(owed),
                None => {
                    let record = self.store.resume_record(tombstone.key).await.ok().flatten();
                    record.and_then(|record| record.owed_delete(self.now()))
                }
            };
            writes.extend(owed.map(Write::Owe));
            writes.push(Write::ForgetResume(tombstone.key));
        }
        self.store.commit(writes).await?;
        self.owed.notify_one();
        Ok(())
    }
}
