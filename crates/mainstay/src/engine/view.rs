//! What operators see: plain documents, without any secret.

use std::sync::Arc;

use bytes::Bytes;
use dashmap::DashMap;
use mainstay_core::audit::AuditEntry;
use mainstay_core::code::Code;
use mainstay_core::id::{ServerName, SessionKey, SessionRef};
use mainstay_core::resume::OwedDelete;
use mainstay_core::session::{SessionRecord, State};
use mainstay_store::{Filter, Page, ResumeSummary, StoreError, Stored};
use mainstay_upstream::Reach;
use schemars::JsonSchema;
use serde::Serialize;

use crate::engine::handover::HandoverView;
use crate::engine::live::Live;
use crate::engine::{Engine, Refused};

/// What a worker knows of the processes around it.
#[derive(Default)]
pub struct Facts {
    /// The keeper's process id.
    pub keeper_pid: u32,
    /// Counts the workers of this keeper.
    pub worker_number: u64,
    /// The MCP address.
    pub mcp: String,
    /// The admin address.
    pub admin: String,
    /// The settings in force.
    pub knobs: Vec<KnobView>,
    /// The keeper's version.
    pub keeper_version: String,
    /// How the last handover went.
    pub handover: Option<HandoverView>,
    /// What each server last said of itself.
    pub cards: DashMap<ServerName, Bytes>,
}

/// The gateway as a whole.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct StatusView {
    /// The version of the binary.
    pub version: &'static str,
    /// Whether new work is taken.
    pub ready: bool,
    /// The keeper.
    pub keeper: KeeperView,
    /// The worker.
    pub worker: WorkerView,
    /// The MCP address.
    pub mcp: String,
    /// The admin address.
    pub admin: String,
    /// Configured servers.
    pub servers: usize,
    /// Sessions.
    pub sessions: SessionsView,
    /// The ledger's counters.
    pub ledger: LedgerView,
    /// How the last reload or upgrade went; null if there was none since the gateway was started.
    pub handover: Option<HandoverView>,
}

/// The keeper process.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct KeeperView {
    /// Its process id.
    pub pid: u32,
    /// The version of its program.
    pub version: String,
}

/// The worker process.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct WorkerView {
    /// Its process id.
    pub pid: u32,
    /// How many workers this keeper has started.
    pub number: u64,
    /// The counter of its epoch.
    pub epoch: u64,
    /// When it started (RFC 3339).
    pub started_at: String,
}

/// How many sessions there are.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct SessionsView {
    /// In memory.
    pub live: usize,
    /// In the ledger.
    pub stored: u64,
}

/// What the ledger has done since the worker started.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct LedgerView {
    /// Statements run for writes.
    pub statements: u64,
    /// Reads.
    pub reads: u64,
    /// Commits durable through power loss, for authority.
    pub commits_authority: u64,
    /// Commits for obligations.
    pub commits_obligation: u64,
    /// Commits of hints.
    pub commits_hint: u64,
    /// How long commits took, all together, in microseconds.
    pub commit_us: u64,
    /// Hints that failed.
    pub hint_failures: u64,
    /// Hints dropped because the queue was full.
    pub hints_dropped: u64,
    /// Rows that were refused.
    pub rows_refused: u64,
    /// Jobs waiting.
    pub queue_depth: u64,
}

/// A configured server.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ServerView {
    /// Its name.
    pub name: String,
    /// `stdio` or `http`.
    pub transport: &'static str,
    /// Its path on the MCP address.
    pub path: String,
    /// Live sessions with it.
    pub sessions: usize,
    /// Calls in flight to it.
    pub calls: u32,
    /// Whether it has answered `initialize` in this epoch.
    pub seen: bool,
}

/// A session.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct SessionView {
    /// Its short name.
    pub r#ref: String,
    /// Its server.
    pub server: String,
    /// Whose it is.
    pub principal: String,
    /// `ready`, or `unreadable`, or how it ended.
    pub state: String,
    /// The client's own name and version.
    pub client: String,
    /// The negotiated protocol version.
    pub protocol: String,
    /// RFC 3339.
    pub opened_at: String,
    /// RFC 3339.
    pub seen_at: String,
    /// When it expires if nothing happens (RFC 3339).
    pub deadline: String,
    /// Whether it is in memory.
    pub in_memory: bool,
    /// The agent that opened it, if it said so.
    pub agent: Option<String>,
    /// Calls in flight.
    pub calls: u32,
    /// The calls in flight.
    pub calls_in_flight: Vec<CallView>,
    /// Questions of the server that the client has not answered.
    pub questions: usize,
    /// Connections that read its streams.
    pub streams: u32,
    /// How its server's session came to be what it is: `fresh`, `resumed`, `remade`.
    pub continuity: Option<&'static str>,
    /// How often that session was made again.
    pub remade_count: u32,
    /// Why, the last time; or why the session ended or cannot be read.
    pub reason: Option<String>,
    /// The deletes that are still owed to its server. Null in lists, which do not look.
    pub owed: Option<Vec<OwedView>>,
}

impl Engine {
    /// The gateway as a whole.
    pub async fn status(&self) -> StatusView {
        let counters = self.store.counters();
        StatusView {
            version: env!("CARGO_PKG_VERSION"),
            ready: self.is_ready(),
            keeper: KeeperView { pid: self.facts.keeper_pid, version: self.facts.keeper_version.clone() },
            worker: WorkerView {
                pid: std::process::id(),
                number: self.facts.worker_number,
                epoch: self.epoch.counter,
                started_at: self.clock.started_at().to_string(),
            },
            mcp: self.facts.mcp.clone(),
            admin: self.facts.admin.clone(),
            servers: self.servers.len(),
            sessions: SessionsView { live: self.live.len(), stored: self.store.count().await.unwrap_or(0) },
            ledger: LedgerView {
                statements: counters.statements,
                reads: counters.reads,
                commits_authority: counters.commits_authority,
                commits_obligation: counters.commits_obligation,
                commits_hint: counters.commits_hint,
                commit_us: counters.commit_us,
                hint_failures: counters.hint_failures,
                hints_dropped: counters.hints_dropped,
                rows_refused: counters.rows_refused,
                queue_depth: counters.queue_depth,
            },
            handover: self.facts.handover.clone(),
        }
    }

    /// The configured servers.
    pub fn servers(&self) -> Vec<ServerView> {
        let view = |name: &ServerName, reach: &Reach| {
            let mine = self.live.iter().filter(|live| live.server.name == *name);
            let (sessions, calls) =
                mine.fold((0, 0), |(sessions, calls), live| (sessions + 1, calls + live.activity().calls));
            ServerView {
                name: name.to_string(),
                transport: match reach {
                    Reach::Http { .. } => "http",
                    Reach::Child { .. } => "stdio",
                },
                path: format!("/mcp/{name}"),
                sessions,
                calls,
                seen: self.facts.cards.contains_key(name),
            }
        };
        self.servers.iter().map(|(name, served)| view(name, &served.server.reach)).collect()
    }

    /// The live connections to servers, as far as they are in memory.
    pub fn instances(&self) -> Vec<InstanceView> {
        let view = |live: &Live| {
            let record = live.link.record();
            InstanceView {
                session: live.key.session_ref().to_string(),
                server: live.server.name.to_string(),
                kind: if live.server.is_http() { "http" } else { "child" },
                open: live.link.opened(),
                continuity: record.as_ref().map(|record| record.continuity.as_str()),
                remade_count: record.as_ref().map_or(0, |record| record.remade_count),
            }
        };
        self.live.iter().map(|live| view(&live)).collect()
    }

    /// The settings in force, without secrets.
    pub fn knobs(&self) -> &[KnobView] {
        &self.facts.knobs
    }

    /// A page of the sessions that the ledger knows, ended ones included, in the order of their keys, after `after`.
    ///
    /// # Errors
    /// [`Code::RequestInvalid`] if the filter names no state or no server; [`Code::Unavailable`] if the ledger cannot be
    /// read.
    pub async fn sessions(
        &self,
        filter: &SessionsFilter,
        after: Option<SessionKey>,
        limit: usize,
    ) -> Result<Vec<SessionView>, Refused> {
        let page = Page { after, limit, filter: store_filter(filter)? };
        let listed = self
            .store
            .list(&page)
            .await
            .map_err(|error| Refused::new(Code::Unavailable, format!("the ledger cannot be read now: {error}")))?;
        Ok(listed.into_iter().map(|row| self.session_view(row.key, &row.stored, row.resume.as_ref())).collect())
    }

    /// The sessions that `session_ref` can mean; more than one only if two keys begin alike.
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub async fn session(&self, session_ref: SessionRef) -> Result<Vec<SessionView>, StoreError> {
        let mut views = Vec::new();
        for (key, stored) in self.store.find_ref(session_ref).await? {
            let resume = self.store.resume_record(key).await?.map(ResumeSummary::from);
            let owed = self.store.owed_of(key, OWED_SHOWN_MAX).await?;
            let owed = Some(owed.iter().map(OwedView::of).collect());
            views.push(SessionView { owed, ..self.session_view(key, &stored, resume.as_ref()) });
        }
        Ok(views)
    }

    fn session_view(&self, key: SessionKey, stored: &Stored, resume: Option<&ResumeSummary>) -> SessionView {
        let live = self.live.get(&key).map(|live| Arc::clone(&live));
        let memory = live.as_ref().map(|live| live.with_session(|session| session.record().clone()));
        let now_linked = live.as_ref().and_then(|live| live.link.record()).map(ResumeSummary::from);
        let resume = now_linked.as_ref().or(resume);
        let mut view = match (memory, stored) {
            (Some(record), _) => record_view(&record),
            (None, Stored::Live(record)) => record_view(record),
            (None, Stored::Ended(tombstone)) => SessionView {
                server: tombstone.server.to_string(),
                principal: tombstone.principal.to_string(),
                agent: tombstone.agent.as_deref().map(str::to_owned),
                state: tombstone.state.as_str().to_owned(),
                protocol: tombstone.version.as_str().to_owned(),
                opened_at: tombstone.opened_at.to_string(),
                seen_at: tombstone.ended_at.to_string(),
                reason: Some(tombstone.reason.to_string()),
                ..blank(key)
            },
            (None, Stored::Unreadable(fault)) => SessionView { reason: Some(fault.to_string()), ..blank(key) },
            (None, Stored::Absent) => blank(key),
        };
        if let Some(live) = &live {
            let calls = live.calls();
            view.in_memory = true;
            view.calls = u32::try_from(calls.len()).unwrap_or(u32::MAX);
            view.calls_in_flight = calls
                .iter()
                .map(|call| CallView { method: call.method.as_str(), since: call.since.to_string() })
                .collect();
            view.questions = live.questions();
            view.streams = live.activity().streams;
        }
        if let Some(resume) = resume {
            view.continuity = Some(resume.continuity.as_str());
            view.remade_count = resume.remade_count;
            view.reason = view.reason.or_else(|| resume.remade_reason.as_deref().map(str::to_owned));
        }
        view
    }
}

/// The filter as the ledger takes it.
fn store_filter(filter: &SessionsFilter) -> Result<Filter, Refused> {
    let state = filter.state.as_deref().map(|word| {
        let states = [State::Ready, State::Draining, State::Deleted, State::Expired, State::Closed];
        states.into_iter().find(|state| state.as_str() == word).ok_or_else(|| {
            let text = format!("`{word}` is no state; there are: ready, draining, deleted, expired, closed");
            Refused::new(Code::RequestInvalid, text)
        })
    });
    let server = filter.server.as_deref().map(|name| {
        ServerName::parse(name)
            .ok_or_else(|| Refused::new(Code::RequestInvalid, format!("`{name}` is no server's name")))
    });
    Ok(Filter {
        state: state.transpose()?,
        server: server.transpose()?,
        principal: filter.principal.as_deref().map(Into::into),
        agent: filter.agent.as_deref().map(Into::into),
        ..Filter::default()
    })
}

fn blank(key: SessionKey) -> SessionView {
    SessionView {
        r#ref: key.session_ref().to_string(),
        server: String::new(),
        principal: String::new(),
        state: "unreadable".to_owned(),
        client: String::new(),
        protocol: String::new(),
        opened_at: String::new(),
        seen_at: String::new(),
        deadline: String::new(),
        in_memory: false,
        agent: None,
        calls: 0,
        calls_in_flight: Vec::new(),
        questions: 0,
        streams: 0,
        continuity: None,
        remade_count: 0,
        reason: None,
        owed: None,
    }
}

fn record_view(record: &SessionRecord) -> SessionView {
    SessionView {
        server: record.server.to_string(),
        principal: record.principal.to_string(),
        agent: record.agent.as_deref().map(str::to_owned),
        state: record.state.as_str().to_owned(),
        client: format!("{} {}", record.client.name, record.client.version).trim().to_owned(),
        protocol: record.version.as_str().to_owned(),
        opened_at: record.opened_at.to_string(),
        seen_at: record.seen_at.to_string(),
        deadline: record.deadline.to_string(),
        ..blank(record.key)
    }
}

/// Which sessions are asked for. What is absent does not matter.
#[derive(Clone, Debug, Default)]
pub struct SessionsFilter {
    /// A state's word.
    pub state: Option<String>,
    /// A server's name.
    pub server: Option<String>,
    /// A principal as lists show it.
    pub principal: Option<String>,
    /// An agent's name.
    pub agent: Option<String>,
}

/// A call in flight.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct CallView {
    /// What it calls.
    pub method: &'static str,
    /// When it began (RFC 3339).
    pub since: String,
}

/// A live connection to a server.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct InstanceView {
    /// The session that it belongs to.
    pub session: String,
    /// The server.
    pub server: String,
    /// `child` or `http`.
    pub kind: &'static str,
    /// Whether it is open, or will be with the next call.
    pub open: bool,
    /// `fresh`, `resumed` or `remade`.
    pub continuity: Option<&'static str>,
    /// How often it was made again.
    pub remade_count: u32,
}

/// A setting in force.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct KnobView {
    /// Its name as in the configuration file.
    pub name: String,
    /// Its value.
    pub value: String,
}

/// A delete that is owed to a server.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct OwedView {
    /// Its number.
    pub id: u64,
    /// The session that it is owed for; null if that is not known any more.
    pub session: Option<String>,
    /// The server.
    pub server: String,
    /// Since when (RFC 3339).
    pub owed_at: String,
    /// How often it was tried.
    pub attempts: u32,
    /// Why the last try failed; null if there was none.
    pub last_error: Option<String>,
    /// When it is tried next (RFC 3339); null if it is left to expire.
    pub next_at: Option<String>,
}

impl OwedView {
    pub(crate) fn of(owed: &OwedDelete) -> Self {
        Self {
            id: owed.id,
            session: owed.session.map(|key| key.session_ref().to_string()),
            server: owed.server.to_string(),
            owed_at: owed.owed_at.to_string(),
            attempts: owed.attempts,
            last_error: owed.last_error.as_deref().map(str::to_owned),
            next_at: (!owed.is_left_to_expire()).then(|| owed.next_at.to_string()),
        }
    }
}

/// Which part of the audit trail is asked for.
#[derive(Clone, Debug, Default)]
pub struct AuditQuery {
    /// Only entries before this number.
    pub before: Option<u64>,
    /// How many at most.
    pub limit: usize,
    /// Only entries about this session.
    pub session: Option<SessionRef>,
    /// Only entries of this action.
    pub action: Option<String>,
}

/// An entry of the audit trail.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct AuditView {
    /// Its number; later entries have higher ones.
    pub id: u64,
    /// RFC 3339.
    pub at: String,
    /// Who did it.
    pub actor: String,
    /// What was done.
    pub action: &'static str,
    /// To which session.
    pub session: Option<String>,
    /// With which server.
    pub server: Option<String>,
    /// More about it.
    pub detail: String,
}

impl AuditView {
    pub(crate) fn of(id: u64, entry: &AuditEntry) -> Self {
        Self {
            id,
            at: entry.at.to_string(),
            actor: entry.actor.to_string(),
            action: entry.action.as_str(),
            session: entry.session.map(|key| key.session_ref().to_string()),
            server: entry.server.as_ref().map(ToString::to_string),
            detail: entry.detail.to_string(),
        }
    }
}

/// The keyring after a rotation.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct KeysView {
    /// How many keys are accepted.
    pub keys: usize,
}

/// The most owed deletes that are shown of one session.
const OWED_SHOWN_MAX: usize = 100;
