//! What operators see: plain documents, without any secret.

use std::sync::Arc;

use bytes::Bytes;
use dashmap::DashMap;
use mainstay_core::id::{ServerName, SessionKey, SessionRef};
use mainstay_core::session::SessionRecord;
use mainstay_store::{Page, ResumeSummary, StoreError, Stored};
use mainstay_upstream::Reach;
use serde::Serialize;

use crate::engine::Engine;

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
    /// What each server last said of itself.
    pub cards: DashMap<ServerName, Bytes>,
}

/// The gateway as a whole.
#[derive(Clone, Debug, Serialize)]
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
}

/// The keeper process.
#[derive(Clone, Debug, Serialize)]
pub struct KeeperView {
    /// Its process id.
    pub pid: u32,
}

/// The worker process.
#[derive(Clone, Debug, Serialize)]
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
#[derive(Clone, Debug, Serialize)]
pub struct SessionsView {
    /// In memory.
    pub live: usize,
    /// In the ledger.
    pub stored: u64,
}

/// What the ledger has done since the worker started.
#[derive(Clone, Debug, Serialize)]
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
#[derive(Clone, Debug, Serialize)]
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
#[derive(Clone, Debug, Serialize)]
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
    /// Calls in flight.
    pub calls: u32,
    /// Connections that read its streams.
    pub streams: u32,
    /// How its server's session came to be what it is: `fresh`, `resumed`, `remade`.
    pub continuity: Option<&'static str>,
    /// How often that session was made again.
    pub remade_count: u32,
    /// Why, the last time; or why the session ended or cannot be read.
    pub reason: Option<String>,
}

impl Engine {
    /// The gateway as a whole.
    pub async fn status(&self) -> StatusView {
        let counters = self.store.counters();
        StatusView {
            version: env!("CARGO_PKG_VERSION"),
            ready: self.is_ready(),
            keeper: KeeperView { pid: self.facts.keeper_pid },
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
                hint_failures: counters.hint_failures,
                hints_dropped: counters.hints_dropped,
                rows_refused: counters.rows_refused,
                queue_depth: counters.queue_depth,
            },
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

    /// A page of the stored sessions, in the order of their keys, after `after`.
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub async fn sessions(&self, after: Option<SessionKey>, limit: usize) -> Result<Vec<SessionView>, StoreError> {
        let listed = self.store.list(&Page { after, limit }).await?;
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
            views.push(self.session_view(key, &stored, resume.as_ref()));
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
        let activity = live.as_ref().map(|live| live.activity()).unwrap_or_default();
        view.in_memory = live.is_some();
        view.calls = activity.calls;
        view.streams = activity.streams;
        if let Some(resume) = resume {
            view.continuity = Some(resume.continuity.as_str());
            view.remade_count = resume.remade_count;
            view.reason = view.reason.or_else(|| resume.remade_reason.as_deref().map(str::to_owned));
        }
        view
    }
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
        calls: 0,
        streams: 0,
        continuity: None,
        remade_count: 0,
        reason: None,
    }
}

fn record_view(record: &SessionRecord) -> SessionView {
    SessionView {
        server: record.server.to_string(),
        principal: record.principal.to_string(),
        state: record.state.as_str().to_owned(),
        client: format!("{} {}", record.client.name, record.client.version).trim().to_owned(),
        protocol: record.version.as_str().to_owned(),
        opened_at: record.opened_at.to_string(),
        seen_at: record.seen_at.to_string(),
        deadline: record.deadline.to_string(),
        ..blank(record.key)
    }
}
