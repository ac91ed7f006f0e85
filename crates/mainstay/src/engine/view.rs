//! What operators see: plain documents, without any secret. What is absent in one is null, never missing nor empty.

pub mod sessions;

use std::collections::BTreeMap;

use bytes::Bytes;
use dashmap::DashMap;
use mainstay_core::audit::AuditEntry;
use mainstay_core::id::{ServerName, SessionRef};
use mainstay_core::resume::OwedDelete;
use mainstay_core::wire::modern::Spoken;
use mainstay_store::journal::{Counters, FILE_BYTES_MAX};
use mainstay_upstream::Reach;
use schemars::JsonSchema;
use serde::Serialize;

use crate::engine::handover::HandoverView;
use crate::engine::handover::changes::Compare;
use crate::engine::live::Live;
use crate::engine::{Engine, Served};
use crate::runtime::build;

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
    /// Says what changes from the settings in force to those in the bytes of a rehearsal.
    pub compare: Option<Box<Compare>>,
    /// What each server last said of itself.
    pub cards: DashMap<ServerName, Bytes>,
    /// What was last written down of the eras of each.
    pub eras: DashMap<ServerName, Spoken>,
}

/// The gateway as a whole.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct StatusView {
    /// The version of the worker's program, with its build: `0.1.0+3f2a9c01d2e4`.
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
    /// What is kept of streams.
    pub journal: JournalView,
    /// How the last reload or upgrade went; null if there was none since the gateway was started.
    pub handover: Option<HandoverView>,
}

/// The keeper process.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct KeeperView {
    /// Its process id.
    pub pid: u32,
    /// The version of its program, with its build.
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

/// What is kept of streams, so that clients can come back to them.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct JournalView {
    /// How much of its file is in use.
    pub file_bytes: u64,
    /// How much it may take at the most.
    pub file_bytes_max: u64,
    /// Entries that wait to be written.
    pub queue_entries: u64,
    /// Events that were kept since the worker started.
    pub events: u64,
    /// Entries that could not be kept.
    pub lost: u64,
    /// Whether a damaged file had to be set aside.
    pub set_aside: bool,
}

impl JournalView {
    fn of(counters: &Counters) -> Self {
        Self {
            file_bytes: counters.file_bytes,
            file_bytes_max: FILE_BYTES_MAX,
            queue_entries: counters.queue_entries,
            events: counters.events_kept,
            lost: counters.lost_crowded + counters.lost_full + counters.lost_otherwise,
            set_aside: counters.set_aside > 0,
        }
    }
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
    /// Live sessions with it, in memory or not.
    pub sessions: u64,
    /// Calls in flight to it.
    pub calls: u32,
    /// Whether it has answered `initialize` in this epoch.
    pub seen: bool,
}

impl Engine {
    /// The gateway as a whole.
    pub async fn status(&self) -> StatusView {
        let counters = self.store.counters();
        StatusView {
            version: build::version(),
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
            journal: JournalView::of(&self.journal.counters()),
            handover: self.facts.handover.clone(),
        }
    }

    /// The configured servers. `stored` is how many sessions each has in the ledger, which is all of them; where it says
    /// nothing, those in memory count.
    pub fn servers(&self, stored: &BTreeMap<ServerName, u64>) -> Vec<ServerView> {
        let view = |name: &ServerName, served: &Served| {
            let mine = self.live.iter().filter(|live| live.server.name == *name);
            let (sessions, calls) =
                mine.fold((0, 0), |(sessions, calls), live| (sessions + 1, calls + live.activity().calls));
            let sessions = stored.get(name).copied().unwrap_or(0).max(sessions);
            let stateless = u32::try_from(served.stateless.count()).unwrap_or(u32::MAX);
            ServerView {
                name: name.to_string(),
                transport: match &served.server.reach {
                    Reach::Http { .. } => "http",
                    Reach::Child { .. } => "stdio",
                },
                path: format!("/mcp/{name}"),
                sessions,
                calls: stateless.saturating_add(calls),
                seen: self.facts.cards.contains_key(name),
            }
        };
        self.servers.iter().map(|(name, served)| view(name, served)).collect()
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
    /// `fresh`, `resumed` or `remade`; null before the server has answered.
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
    /// To which session, if to one.
    pub session: Option<String>,
    /// With which server, if with one.
    pub server: Option<String>,
    /// More about it.
    pub detail: Option<String>,
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
            detail: Some(entry.detail.to_string()).filter(|detail| !detail.is_empty()),
        }
    }
}

/// The keyring after a rotation.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct KeysView {
    /// How many keys are accepted.
    pub keys: usize,
}
