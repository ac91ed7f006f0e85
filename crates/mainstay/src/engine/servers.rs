//! The operator's view of servers and their children, and the order to restart them (C4, C5, C9).

pub mod log;
pub mod memory;

use std::collections::BTreeMap;
use std::sync::Arc;

use mainstay_core::audit::{Action, Actor};
use mainstay_core::code::Code;
use mainstay_core::id::{ServerName, SessionKey};
use mainstay_core::supervise::Phase;
use mainstay_core::wire::modern::Era;
use mainstay_store::Write;
use mainstay_upstream::{ChildCounts, ChildEnd, ChildSeen, LastFailure, OnDisk, Supervised, Why, parse_label};
use schemars::JsonSchema;
use serde::Serialize;

use crate::engine::{Engine, Refused, Served};

/// A configured server, in a list.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ServerSummary {
    /// Its name.
    pub name: String,
    /// `stdio` or `http`.
    pub transport: &'static str,
    /// Its path on the MCP address.
    pub path: String,
    /// Of a stdio server: `up`, `backing_off`, `quarantined`, `idle` (no child runs, the next call starts one) or
    /// `never_started`. Of an HTTP server: `reachable`, `unreachable` or `unknown` (nothing was asked of it).
    pub state: &'static str,
    /// The newest era of the protocol that it is known to speak, `legacy` or `modern`; null if nothing is known.
    pub era: Option<&'static str>,
    /// Live sessions with it, in memory or not.
    pub sessions: u64,
    /// Calls in flight to it.
    pub calls: u32,
    /// Whether it has answered `initialize` in this epoch.
    pub seen: bool,
    /// Its children that run.
    pub children: usize,
    /// Whether the program on disk is not the one that a child runs; the next start uses it.
    pub newer_on_disk: bool,
    /// How often a child was started in the place of another one, and how often a start failed; over all workers.
    pub restarts: u64,
    /// What it failed with last; for an HTTP server, since the worker started.
    pub last_failure: Option<FailureView>,
    /// When its next child may be started (RFC 3339), if not now.
    pub next_try_at: Option<String>,
}

/// Everything known of a server.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ServerDetail {
    /// As in the list.
    pub summary: ServerSummary,
    /// Failures in a row.
    pub failures_in_a_row: u32,
    /// The children that this worker serves, the oldest first.
    pub children: Vec<ChildView>,
    /// The last ends of children, the newest first.
    pub exits: Vec<ExitView>,
    /// When an HTTP server last answered (RFC 3339).
    pub answered_at: Option<String>,
}

/// What a server failed with.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct FailureView {
    /// When (RFC 3339).
    pub at: String,
    /// What was seen.
    pub text: String,
    /// The end of what its child wrote to standard error; configured values are masked.
    pub stderr_tail: Option<String>,
}

/// A child that runs.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ChildView {
    /// The keeper's number for it, as in the log.
    pub child: u64,
    /// Since when (RFC 3339).
    pub since: String,
    /// How its program compares with the one on disk: `same`, `newer`, `missing`.
    pub on_disk: &'static str,
}

/// How a child ended.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ExitView {
    /// The keeper's number for it, as in the log.
    pub child: u64,
    /// When (RFC 3339).
    pub at: String,
    /// Its exit code, if it exited.
    pub code: Option<i32>,
    /// The signal that ended it, if one did.
    pub signal: Option<i32>,
    /// How long it had lived, in milliseconds.
    pub lived_ms: u64,
    /// Whether the gateway ended it.
    pub ordered: bool,
    /// Why, if it did: `restarted by an operator`, `definition changed`, `server removed`, `session ended`,
    /// `session suspended`, `handshake not finished`, `no session wants it`.
    pub reason: Option<&'static str>,
    /// The end of what it wrote to standard error; configured values are masked.
    pub stderr_tail: String,
}

/// What a restart has done.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct RestartView {
    /// How many children were ended. Their sessions start others with their next use.
    pub ended: usize,
    /// The server afterwards.
    pub server: ServerSummary,
}

impl Engine {
    /// The configured servers, with what is known of each.
    pub async fn server_summaries(self: &Arc<Self>) -> Vec<ServerSummary> {
        let engine = Arc::clone(self);
        let stored = self.stored_sessions().await;
        // It looks at programs on disk.
        let looked = tokio::task::spawn_blocking(move || {
            let (views, held) = (engine.servers(&stored), engine.held_per_server());
            let served = engine.servers.values().zip(views);
            served.map(|(served, view)| engine.summary(served, view, &held).0).collect()
        });
        looked.await.unwrap_or_default()
    }

    /// Everything known of the server `name`.
    ///
    /// # Errors
    /// [`Code::ServerUnknown`], naming those that there are.
    pub async fn server_detail(self: &Arc<Self>, name: &str) -> Result<ServerDetail, Refused> {
        let name = self.served(name)?.server.name.clone();
        let engine = Arc::clone(self);
        let stored = self.stored_sessions().await;
        let looked = tokio::task::spawn_blocking(move || engine.detail(&name, &stored));
        looked.await.ok().flatten().ok_or_else(|| Refused::new(Code::Internal, "the server could not be looked at"))
    }

    /// How many sessions each server has in the ledger; nothing if that can't be counted now.
    async fn stored_sessions(&self) -> BTreeMap<ServerName, u64> {
        match self.store.count_by_server().await {
            Ok(counted) => counted.into_iter().collect(),
            Err(error) => {
                tracing::warn!(error = %error, "stored sessions can't be counted; those in memory are");
                BTreeMap::new()
            }
        }
    }

    fn detail(&self, name: &ServerName, stored: &BTreeMap<ServerName, u64>) -> Option<ServerDetail> {
        let served = self.servers.get(name)?;
        let view = self.servers(stored).into_iter().find(|view| view.name == name.as_str())?;
        let (summary, seen) = self.summary(served, view, &self.held_per_server());
        let answered_at = self.upstreams.contact(&served.server).answered_at;
        Some(ServerDetail {
            summary,
            failures_in_a_row: seen.failures,
            children: seen.children.iter().map(ChildView::of).collect(),
            exits: seen.ends.iter().map(ExitView::of).collect(),
            answered_at: answered_at.filter(|_| served.server.is_http()).map(|at| at.to_string()),
        })
    }

    fn summary(
        &self,
        served: &Served,
        view: crate::engine::view::ServerView,
        held: &[(ServerName, SessionKey, usize)],
    ) -> (ServerSummary, Supervised) {
        let server = &served.server;
        let seen = self.upstreams.supervised(server);
        let held = held.iter().filter(|(name, ..)| *name == server.name).count();
        let children = seen.children.len() + held;
        let (state, last_failure) = if server.is_http() {
            let contact = self.upstreams.contact(server);
            let state = match contact.reachable {
                Some(true) => "reachable",
                Some(false) => "unreachable",
                None => "unknown",
            };
            (state, contact.last_failure)
        } else {
            (state_of(&seen, children, view.sessions > 0), seen.last_failure.clone())
        };
        let summary = ServerSummary {
            name: view.name,
            transport: view.transport,
            path: view.path,
            state,
            era: self.spoken_by(server).era().map(Era::as_str),
            sessions: view.sessions,
            calls: view.calls,
            seen: view.seen,
            children,
            newer_on_disk: seen.children.iter().any(|child| child.on_disk == OnDisk::Newer),
            restarts: seen.totals.restarts + seen.totals.never_up + seen.totals.not_started,
            last_failure: last_failure.as_ref().map(FailureView::of),
            next_try_at: seen.next_at.map(|at| at.to_string()),
        };
        (summary, seen)
    }

    /// Children that an earlier worker left and no session has asked for yet: server, session, open calls.
    fn held_per_server(&self) -> Vec<(ServerName, SessionKey, usize)> {
        let held = self.held.lock();
        let of = held.iter().filter_map(|(key, held)| {
            let label = parse_label(&held.label)?;
            Some((label.server, *key, held.open.len()))
        });
        of.collect()
    }

    /// Lifts what keeps the children of `name` from being started, and ends those that run: calls in flight get a few
    /// seconds, sessions go on with new children at their next use and are told (C5, U6). Answers once all have ended.
    ///
    /// It can be ordered again at any time. If this worker is killed in the middle, children that were not told to end
    /// yet go on under the next one.
    ///
    /// # Errors
    /// [`Code::ServerUnknown`]; [`Code::RequestInvalid`] for a server without children of ours.
    pub async fn restart_server(self: &Arc<Self>, name: &str) -> Result<RestartView, Refused> {
        let served = self.served(name)?;
        let server = &served.server;
        if server.is_http() {
            let text = format!("server `{name}` is reached by HTTP; there is no process of the gateway's to restart");
            return Err(Refused { server: Some(server.name.clone()), ..Refused::new(Code::RequestInvalid, text) });
        }
        tracing::info!(server = %server.name, "an operator restarts the server");
        let entry = self.audit_entry(Actor::Operator, Action::ServerRestarted, None, &server.name, "");
        self.store.hint(Write::Audit(entry));
        let mut ended = 0;
        let held = self.held_per_server();
        for (_, key, open_calls) in held.into_iter().filter(|(name, ..)| *name == server.name) {
            if open_calls > 0 && self.load(key).await.is_ok() {
                // Its session has it now, and sees to its calls.
                continue;
            }
            let _lane = self.lane(&key).lock().await;
            ended += usize::from(self.held.lock().contains_key(&key));
            self.dismiss_held(key, Why::Restart);
        }
        ended += self.upstreams.restart(server).await;
        let server = self.server_detail(name).await?.summary;
        Ok(RestartView { ended, server })
    }

    /// For the numbers: where each stdio server stands, and what was counted of its children.
    pub fn supervised(&self) -> Vec<(ServerName, &'static str, Supervised)> {
        let held = self.held_per_server();
        let stdio = self.servers.values().filter(|served| !served.server.is_http());
        stdio
            .map(|served| {
                let name = served.server.name.clone();
                let seen = self.upstreams.children(&served.server);
                let held = held.iter().filter(|(of, ..)| *of == name).count();
                let state = state_of(&seen, seen.children.len() + held, false);
                (name, state, seen)
            })
            .collect()
    }
}

/// The word for where the children of a server stand, which has been used if it has a session or anything was counted.
fn state_of(seen: &Supervised, children: usize, has_sessions: bool) -> &'static str {
    match seen.phase {
        Phase::Quarantined => "quarantined",
        Phase::BackingOff => "backing_off",
        Phase::Open if children > 0 => "up",
        Phase::Open if seen.totals == ChildCounts::default() && !has_sessions => "never_started",
        Phase::Open => "idle",
    }
}

/// The words for where a stdio server can stand.
pub const STATES: [&str; 5] = ["up", "backing_off", "quarantined", "idle", "never_started"];

impl FailureView {
    fn of(failure: &LastFailure) -> Self {
        let words = Some(failure.words.to_string()).filter(|words| !words.is_empty());
        Self { at: failure.at.to_string(), text: failure.cause.to_string(), stderr_tail: words }
    }
}

impl ChildView {
    fn of(child: &ChildSeen) -> Self {
        let on_disk = match child.on_disk {
            OnDisk::Same => "same",
            OnDisk::Newer => "newer",
            OnDisk::Missing => "missing",
        };
        Self { child: child.child, since: child.since.to_string(), on_disk }
    }
}

impl ExitView {
    fn of(end: &ChildEnd) -> Self {
        Self {
            child: end.child,
            at: end.at.to_string(),
            code: end.status.code,
            signal: end.status.signal,
            lived_ms: u64::try_from(end.lived.as_millis()).unwrap_or(u64::MAX),
            ordered: end.why.is_some(),
            reason: end.why.map(Why::as_str),
            stderr_tail: end.words.to_string(),
        }
    }
}
