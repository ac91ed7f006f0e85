//! Deletes that are owed to servers: tried, paid, given up (U7).

use mainstay_core::audit::{Action, Actor, AuditEntry};
use mainstay_core::code::Code;
use mainstay_core::resume::OwedDelete;
use mainstay_store::{StoreError, Write};
use mainstay_upstream::{Settled, settle};

use super::unreadable;
use crate::engine::view::OwedView;
use crate::engine::{Engine, Refused};

impl Engine {
    /// Deletes that are owed to servers, those left to expire included.
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub async fn owed(&self) -> Result<Vec<OwedView>, StoreError> {
        let owed = self.store.owed_all(OWED_LISTED_MAX).await?;
        Ok(owed.iter().map(OwedView::of).collect())
    }

    /// Tries to pay an owed delete now. A try that fails counts like the gateway's own, and the delete stays owed.
    ///
    /// # Errors
    /// There is none of that number; the server did not take it, [`Code::ServerUnreachable`] with its words; or it did,
    /// and the ledger could not be told.
    pub async fn pay_owed(&self, id: u64) -> Result<(), Refused> {
        let owed = self.owed_delete(id).await?;
        let (settled, writes) = self.try_owed(&owed, Actor::Operator).await;
        let next = writes
            .iter()
            .find_map(|write| if let Write::Postpone(failed) = write { Some(failed.clone()) } else { None });
        let recorded = self.store.commit(writes).await;
        if let Err(error) = &recorded {
            tracing::error!(server = %owed.server, error = %error, "what became of an owed delete could not be stored");
        }
        match settled {
            Settled::Paid if recorded.is_ok() => Ok(()),
            Settled::Paid => Err(Refused::new(Code::Internal, unrecorded_payment(&owed))),
            Settled::Failed { reason } => {
                let text = unpaid(&reason, next.as_ref().unwrap_or(&owed), recorded.is_ok());
                Err(Refused::new(Code::ServerUnreachable, text))
            }
        }
    }

    /// Gives an owed delete up: the server's session is left to expire there.
    ///
    /// # Errors
    /// There is none of that number, or the ledger cannot be written.
    pub async fn give_up_owed(&self, id: u64) -> Result<(), Refused> {
        let owed = self.owed_delete(id).await?;
        let entry = self.owed_entry(Actor::Operator, Action::OwedGivenUp, &owed, "");
        self.commit(vec![Write::GiveUp(id), Write::Audit(entry)]).await
    }

    /// One try at an owed delete, and what is to be written of it.
    ///
    /// That it was paid is an entry of the audit trail where an operator ordered it, or where it had failed before: the
    /// ordinary end of a session is no news.
    pub(crate) async fn try_owed(&self, owed: &OwedDelete, actor: Actor) -> (Settled, Vec<Write>) {
        let server = self.servers.get(&owed.server).map(|served| &served.server);
        let settled = settle(&self.upstreams, server, owed).await;
        let mut writes = Vec::new();
        match &settled {
            Settled::Paid => {
                writes.push(Write::Settle(owed.id));
                if actor != Actor::Gateway || owed.attempts > 0 {
                    let detail = match owed.attempts {
                        0 => String::new(),
                        failed => format!("after failed tries: {failed}"),
                    };
                    writes.push(Write::Audit(self.owed_entry(actor, Action::OwedPaid, owed, &detail)));
                }
            }
            Settled::Failed { reason } => {
                tracing::debug!(server = %owed.server, attempts = owed.attempts, reason = %reason, "owed delete not paid yet");
                let failed = owed.postponed(self.now(), reason);
                if failed.is_left_to_expire() && !owed.is_left_to_expire() {
                    tracing::warn!(server = %owed.server, reason = %reason, "a server's session is left to expire there");
                    writes.push(Write::Audit(self.owed_entry(Actor::Gateway, Action::OwedLeft, owed, reason)));
                }
                writes.push(Write::Postpone(failed));
            }
        }
        (settled, writes)
    }

    fn owed_entry(&self, actor: Actor, action: Action, owed: &OwedDelete, detail: &str) -> AuditEntry {
        self.audit_entry(actor, action, owed.session, &owed.server, detail)
    }

    async fn owed_delete(&self, id: u64) -> Result<OwedDelete, Refused> {
        let found = self.store.owed_one(id).await.map_err(|error| unreadable(&error))?;
        found.ok_or_else(|| Refused::new(Code::SessionUnknown, format!("no delete with number {id} is owed")))
    }
}

/// Why a delete is still owed: the server's trouble, and what comes next. `owed` is as it stands after the try.
fn unpaid(reason: &str, owed: &OwedDelete, recorded: bool) -> String {
    let next = match (recorded, owed.is_left_to_expire()) {
        (false, _) => "it stays owed, and the try could not be recorded".to_owned(),
        (true, true) => "that was the last try of its own: the server's session is left to expire there".to_owned(),
        (true, false) => format!("it stays owed; the next try is at {}", owed.next_at),
    };
    format!("server `{}` did not take the delete: {reason}; {next}", owed.server)
}

/// What is told of a delete that a server has taken, when the ledger could not be told so.
fn unrecorded_payment(owed: &OwedDelete) -> String {
    format!(
        "server `{}` has taken the delete, but the ledger cannot be written now, so it is still listed; the gateway tries \
         it again, which does no harm",
        owed.server
    )
}

/// The most owed deletes that are listed.
const OWED_LISTED_MAX: usize = 10_000;

#[cfg(test)]
mod tests {
    use mainstay_core::id::ServerName;
    use mainstay_core::resume::UpstreamId;
    use mainstay_core::time::Timestamp;

    use super::*;

    #[test]
    fn u7_what_failed_is_told_as_the_servers_trouble_with_what_comes_next() {
        let mut owed = OwedDelete {
            id: 7,
            session: None,
            server: ServerName::parse("files").unwrap(),
            url: "http://127.0.0.1:1/mcp".into(),
            upstream_id: UpstreamId::parse("canary").unwrap(),
            version: "2025-11-25".into(),
            owed_at: Timestamp::default(),
            attempts: 0,
            next_at: Timestamp::default(),
            last_error: None,
        };
        owed = owed.postponed(Timestamp::default(), "HTTP status 503");
        let told = unpaid("HTTP status 503", &owed, true);
        assert_eq!(
            told,
            "server `files` did not take the delete: HTTP status 503; it stays owed; the next try is at \
             1970-01-01T00:00:10.000Z"
        );
        while !owed.is_left_to_expire() {
            owed = owed.postponed(Timestamp::default(), "HTTP status 503");
        }
        assert!(unpaid("HTTP status 503", &owed, true).contains("left to expire"));
        assert!(unpaid("HTTP status 503", &owed, false).contains("could not be recorded"));
        let told = unrecorded_payment(&owed);
        assert!(told.contains("has taken the delete") && !told.contains("nothing was changed"), "{told}");
    }
}
