//! What one server process knows, over all its sessions.

use super::{Conversation, Outlet, RESOURCE_URI};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// How a server was told to be when it was started.
#[derive(Debug, Clone, Default)]
pub struct WorldSettings {
    /// The name in `serverInfo`.
    pub name: String,
    /// Where `incr` adds its lines.
    pub incr_file: Option<PathBuf>,
    /// The protocol version that every `initialize` is answered with, whatever was asked for.
    pub protocol: Option<String>,
    /// How many progress events `prog` sends after its response.
    pub late_events: u64,
}

/// Counters of what happened, per name.
#[derive(Debug, Clone, Default)]
pub struct Counted {
    /// Times that a tool began to run.
    pub executions: BTreeMap<String, u64>,
    /// Times that a tool ran to its end.
    pub completions: BTreeMap<String, u64>,
    /// Requests received, per method.
    pub requests: BTreeMap<String, u64>,
    /// Notifications received, per method.
    pub notifications: BTreeMap<String, u64>,
    /// Calls that a `notifications/cancelled` stopped while they ran.
    pub cancelled: u64,
    /// Requests other than `initialize` and `ping` that came before `notifications/initialized`.
    pub before_initialized: u64,
}

impl Counted {
    /// The counters as JSON, as `GET /log` shows them.
    #[must_use]
    pub fn to_json(&self) -> Value {
        json!({
            "executions": self.executions,
            "completions": self.completions,
            "requests": self.requests,
            "notifications": self.notifications,
            "cancelled": self.cancelled,
            "before_initialized": self.before_initialized,
        })
    }
}

/// What one server process knows: its settings, its counters, and who listens.
#[derive(Debug)]
pub struct World {
    settings: WorldSettings,
    late_events: AtomicU64,
    extra_tools: AtomicU64,
    list_page: AtomicU64,
    counted: Mutex<Counted>,
    conversations: Mutex<Vec<Weak<Conversation>>>,
}

impl World {
    /// A world in which nothing has happened yet.
    #[must_use]
    pub fn new(settings: WorldSettings) -> Arc<World> {
        Arc::new(World {
            late_events: AtomicU64::new(settings.late_events),
            settings,
            extra_tools: AtomicU64::new(0),
            list_page: AtomicU64::new(0),
            counted: Mutex::default(),
            conversations: Mutex::default(),
        })
    }

    /// How this server was told to be.
    #[must_use]
    pub fn settings(&self) -> &WorldSettings {
        &self.settings
    }

    /// How many progress events `prog` sends after its response.
    #[must_use]
    pub fn late_events(&self) -> u64 {
        self.late_events.load(Ordering::SeqCst)
    }

    /// Changes [`World::late_events`].
    pub fn send_late_events(&self, events: u64) {
        self.late_events.store(events, Ordering::SeqCst);
    }

    /// How many tools were added by [`World::add_tool`].
    #[must_use]
    pub fn extra_tools(&self) -> u64 {
        self.extra_tools.load(Ordering::SeqCst)
    }

    /// Adds a tool `extra_N` and returns its name. Announcing it is the caller's.
    pub fn add_tool(&self) -> String {
        format!("extra_{}", self.extra_tools.fetch_add(1, Ordering::SeqCst) + 1)
    }

    /// How many tools `tools/list` shows on a page; 0 means all on one.
    #[must_use]
    pub fn list_page(&self) -> u64 {
        self.list_page.load(Ordering::SeqCst)
    }

    /// Changes [`World::list_page`].
    pub fn page_lists_by(&self, tools: u64) {
        self.list_page.store(tools, Ordering::SeqCst);
    }

    /// A copy of the counters.
    #[must_use]
    pub fn counted(&self) -> Counted {
        self.counters().clone()
    }

    /// The counters, to be changed.
    pub fn counters(&self) -> MutexGuard<'_, Counted> {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a conversation hear of what happens in other ones.
    pub fn join(&self, conversation: &Arc<Conversation>) {
        let mut conversations = self.conversations.lock().unwrap_or_else(PoisonError::into_inner);
        conversations.retain(|known| known.strong_count() > 0);
        conversations.push(Arc::downgrade(conversation));
    }

    /// Where the living conversations listen that `wanted` picks.
    pub(super) fn listeners(&self, wanted: impl Fn(&Conversation) -> bool) -> Vec<Outlet> {
        let conversations = self.conversations.lock().unwrap_or_else(PoisonError::into_inner);
        conversations
            .iter()
            .filter_map(Weak::upgrade)
            .filter(|conversation| wanted(conversation))
            .map(|conversation| conversation.listening().clone())
            .collect()
    }

    /// Sends a notification to every living conversation, where it listens.
    pub async fn tell_all(&self, method: &str, params: &Value) {
        let mut message = json!({"jsonrpc": "2.0", "method": method});
        if !params.is_null() {
            message["params"] = params.clone();
        }
        for outlet in self.listeners(|_| true) {
            outlet.send(message.clone()).await;
        }
    }

    /// Tells those who subscribed to the resource that it was updated.
    pub(super) async fn tell_updated(&self) {
        let message =
            json!({"jsonrpc": "2.0", "method": "notifications/resources/updated", "params": {"uri": RESOURCE_URI}});
        for outlet in self.listeners(|conversation| conversation.facts().subscriptions.contains(RESOURCE_URI)) {
            outlet.send(message.clone()).await;
        }
    }

    /// Adds a line to the `incr` file, in one write, so that lines of several processes never mix.
    ///
    /// # Errors
    /// If the file cannot be opened or written.
    pub(super) fn add_line(&self, line: &str) -> std::io::Result<()> {
        let Some(path) = &self.settings.incr_file else {
            return Ok(());
        };
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path)?;
        file.write_all(format!("{line}\n").as_bytes())
    }
}
