//! Calls that outlive their clients and this worker as tasks (SEP-2663, E4).
//!
//! A task is a call of a conversation whose stream is in the journal: nothing else is kept of it. Where that is stands in
//! the task's id, sealed, so any worker finds it, for its client alone. A call is given out as a task only once the journal
//! has it as one; from then on nobody's going away cancels it.

mod standing;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::call::{EventId, StreamId};
use mainstay_core::id::{ServerName, SessionKey, base64url, from_base64url};
use mainstay_core::principal::Principal;
use mainstay_core::time::Timestamp;
use mainstay_core::wire::method::Method;
use mainstay_core::wire::modern::{Meta, tasks};
use mainstay_store::journal::{self, Content, Entry};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tokio::time::Instant;

use super::course::{Course, Landed};
use crate::engine::call::{Request, TASK};
use crate::engine::live;
use crate::engine::live::Live;
use crate::engine::seal::{self, Binding, Kind};
use crate::engine::stream::Stream;
use crate::engine::{Caller, Engine, Refused, Served};

/// That a call may be answered by a task, once it is slow.
pub(super) struct Offer {
    /// When it is.
    pub(super) due: Instant,
    principal: Principal,
    server: ServerName,
}

impl Offer {
    /// That for `request`, if it is one that may be a task, and its client knows what that is.
    pub(super) fn of(caller: &Caller, served: &Served, request: &Request, meta: &Meta) -> Option<Self> {
        let may = request.method == Method::ToolsCall && tasks::is_declared(&request.message, meta);
        let (principal, server) = (caller.principal.clone(), served.server.name.clone());
        may.then(|| Self { due: Instant::now() + ANSWER_WITHIN, principal, server })
    }
}

/// What the id of a task says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Ticket {
    /// The conversation's key.
    session: String,
    /// The stream of the call: epoch and number.
    stream: (u64, u64),
    /// The raw id under which the call runs.
    id: String,
    /// When the task was made, in milliseconds of Unix time.
    created_at: u64,
    ttl_ms: u64,
}

impl Ticket {
    fn session(&self) -> Option<SessionKey> {
        Some(SessionKey::from_bytes(from_base64url(&self.session)?.try_into().ok()?))
    }

    fn stream(&self) -> StreamId {
        StreamId { epoch: self.stream.0, number: self.stream.1 }
    }

    fn task<'a>(&self, id: &'a str, updated_at: Timestamp) -> tasks::Task<'a> {
        tasks::Task {
            id,
            created_at: Timestamp::from_unix_millis(self.created_at).to_string(),
            updated_at: updated_at.max(Timestamp::from_unix_millis(self.created_at)).to_string(),
            ttl_ms: self.ttl_ms,
            poll_interval_ms: POLL_INTERVAL_MS,
        }
    }
}

/// Why a request about a task is not served.
#[derive(Debug, Error)]
pub enum TaskFault {
    /// There is no such task, or not for this client.
    #[error("there is no such task: {0}")]
    Unknown(&'static str),
    /// It can't be said now.
    #[error("{}", .0.text)]
    Refused(Refused),
}

impl From<Refused> for TaskFault {
    fn from(refused: Refused) -> Self {
        Self::Refused(refused)
    }
}

/// A task that its client has named.
struct Found {
    ticket: Ticket,
    /// The conversation is in use.
    entry: live::Entry,
    stream: Arc<Stream>,
}

impl Course {
    /// Leaves the call to itself, as a task, and gives out the task; `None` if it may not be one, or is not durable. The
    /// call goes on as it was then.
    ///
    /// Cancel-safe.
    pub(super) async fn become_task(&mut self) -> Option<Landed> {
        let stream = self.passage.reader.as_ref()?.stream_id();
        let engine = Arc::clone(&self.passage.engine);
        let offer = self.asker.offer.as_ref()?;
        if let Err(why) = engine.mark_as_task(self.passage.live.key, stream).await {
            tracing::debug!(server = %offer.server, why, "a call is not answered by a task");
            self.asker.offer = None;
            return None;
        }
        let offer = self.asker.offer.take()?;
        let (now, ttl) = (engine.now(), engine.task_ttl());
        let ticket = Ticket {
            session: base64url(self.passage.live.key.as_bytes()),
            stream: (stream.epoch, stream.number),
            id: String::from_utf8_lossy(self.passage.id()).into_owned(),
            created_at: now.unix_millis(),
            ttl_ms: u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX),
        };
        let binding = binding(&offer.principal, &offer.server);
        let text = serde_json::to_vec(&ticket).unwrap_or_default();
        let id = seal::seal(&engine.keyring, &binding, now.plus(ttl), &text);
        self.gathered = None;
        self.passage.leave_to_itself();
        let message = tasks::created(self.asker.id(), &ticket.task(&id, now), self.server_info.as_deref());
        Some(Landed { status: 200, message: message.into(), refusal: None })
    }
}

impl Engine {
    /// Has the journal know the call on `stream` as a task. What comes back is why it does not.
    async fn mark_as_task(&self, session: SessionKey, stream: StreamId) -> Result<(), &'static str> {
        let unknown = |_| "the journal can't be asked";
        self.journal.flush().await.map_err(unknown)?;
        let record = self.journal.find(session, stream).await.map_err(unknown)?;
        let call = record.and_then(|record| record.call).ok_or("the journal does not have the call")?;
        let marked = journal::Call { method: TASK.into(), ..call };
        let (at, claim) = (self.now(), self.epoch);
        let entry = Entry { session, stream, claim, at, content: Content::Call(marked) };
        self.journal.append(entry, None).map_err(|_| "the journal takes nothing")?;
        self.journal.flush().await.map_err(unknown)?;
        let record = self.journal.find(session, stream).await.map_err(unknown)?;
        let kept = record.filter(|record| record.claim == claim).and_then(|record| record.call);
        kept.filter(|call| &*call.method == TASK).map(|_| ()).ok_or("the journal has lost the call")
    }

    /// For how long a task made now is kept: what the journal and the conversation keep at least.
    fn task_ttl(&self) -> Duration {
        let idle = self.settings.terms.idle_expiry;
        TTL_MAX.min(idle.checked_sub(IDLE_MARGIN).unwrap_or(idle / 2)).max(TTL_MIN)
    }

    /// The task that `caller` names, taken up if no worker sees to it any more.
    async fn task(self: &Arc<Self>, caller: &Caller, served: &Served, id: &str) -> Result<Found, TaskFault> {
        let foreign = || TaskFault::Unknown("it was not given out here, or is over");
        if id.len() > ID_CHARS_MAX {
            return Err(foreign());
        }
        let binding = binding(&caller.principal, &served.server.name);
        let text = seal::unseal(&self.keyring, &binding, self.now(), id).map_err(|_| foreign())?;
        let ticket: Ticket = serde_json::from_slice(&text).map_err(|_| foreign())?;
        let key = ticket.session().ok_or_else(foreign)?;
        let entry = self.find_key(key, caller, served).await.map_err(|refused| match super::is_over(refused.code) {
            true => TaskFault::Unknown("the conversation with the server that it was part of has ended"),
            false => TaskFault::Refused(refused),
        })?;
        let stream = self.task_stream(&entry, &ticket).await?;
        Ok(Found { ticket, entry, stream })
    }

    async fn task_stream(self: &Arc<Self>, live: &Arc<Live>, ticket: &Ticket) -> Result<Arc<Stream>, Refused> {
        let id = ticket.stream();
        if let Some(stream) = live.stream(id) {
            return Ok(stream);
        }
        let request = Some(Bytes::from(ticket.id.clone()));
        let event = EventId { tag: live.key.tag(), stream: id, sequence: 0, last: false, request };
        let cursor = event.to_string();
        Ok(self.come_back(live, event, cursor).await?.into_stream())
    }
}

fn binding<'a>(principal: &'a Principal, server: &'a ServerName) -> Binding<'a> {
    Binding { kind: Kind::Task, principal, server, about: b"" }
}

/// How soon an answer must come to be no task.
const ANSWER_WITHIN: Duration = Duration::from_millis(500);
/// For how long a task is kept: an hour less than the journal keeps what does not change.
const TTL_MAX: Duration = Duration::from_hours(23);
const TTL_MIN: Duration = Duration::from_millis(1);
/// By how much a task goes before its conversation does, whose use is noted now and then only.
const IDLE_MARGIN: Duration = Duration::from_mins(1);
/// How long a client should wait before it asks again, in milliseconds.
const POLL_INTERVAL_MS: u64 = 1000;
/// More than any id of a task has.
const ID_CHARS_MAX: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4_a_ticket_leads_to_its_call_and_is_never_older_than_it_was_made() {
        let (session, id) = (base64url(&[7; 32]), "\"c3.1\"".to_owned());
        let ticket = Ticket { session, stream: (3, 1), id, created_at: 1000, ttl_ms: 5 };
        let read: Ticket = serde_json::from_slice(&serde_json::to_vec(&ticket).expect("json")).expect("a ticket");
        assert_eq!(read, ticket);
        assert_eq!(ticket.session(), Some(SessionKey::from_bytes([7; 32])));
        let task = ticket.task("t", Timestamp::from_unix_millis(0));
        assert_eq!((&*task.created_at, &*task.updated_at), ("1970-01-01T00:00:01.000Z", "1970-01-01T00:00:01.000Z"));
        assert_eq!(Ticket { session: "short".into(), ..ticket }.session(), None);
    }
}
