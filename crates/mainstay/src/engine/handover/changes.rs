//! What a reload changes: which servers come, go or are defined anew, and how many sessions that concerns.

use std::collections::BTreeMap;

use mainstay_core::id::ServerName;
use schemars::JsonSchema;
use serde::Serialize;

/// What changes with the next settings, as far as the configuration alone says it.
#[derive(Clone, Debug, Default)]
pub struct Changes {
    /// The servers that change.
    pub servers: Vec<ServerChange>,
    /// The settings that change and belong to no server.
    pub settings: Vec<SettingChangeView>,
}

/// A server that changes.
#[derive(Clone, Debug)]
pub struct ServerChange {
    /// Its name.
    pub server: ServerName,
    /// What becomes of it.
    pub change: ServerFate,
    /// The names of what is otherwise in its table.
    pub fields: Vec<String>,
}

/// What becomes of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerFate {
    /// It is new.
    Added,
    /// It is gone; its sessions end.
    Removed,
    /// What runs of it is of no use any more.
    Redefined,
    /// It is treated otherwise; what runs of it goes on.
    Adjusted,
}

/// Compares the settings in force with those in the given bytes; `None` if these are not understood.
pub type Compare = dyn Fn(&[u8]) -> Option<Changes> + Send + Sync;

/// What a reload changes.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ChangesView {
    /// The servers that change.
    pub servers: Vec<ServerChangeView>,
    /// The settings that change and belong to no server.
    pub settings: Vec<SettingChangeView>,
}

/// A server that a reload changes.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ServerChangeView {
    /// Its name.
    pub name: String,
    /// `added`; `removed`, and its sessions end; `redefined`, and its processes, or its sessions at an HTTP server, are
    /// made anew; `adjusted`, and what runs of it goes on.
    pub change: &'static str,
    /// The names of what is otherwise in its table, never a value: `args`, `env.TOKEN`.
    pub fields: Vec<String>,
    /// How many sessions it has; null if they could not be counted in time.
    pub sessions: Option<u64>,
}

/// A setting that a reload changes.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct SettingChangeView {
    /// Its name as in the configuration file.
    pub name: String,
    /// Its value before, as `config show` shows it: what is confidential looks the same before and after. Null if it was
    /// not set.
    pub before: Option<String>,
    /// Its value after; null if it is not set.
    pub after: Option<String>,
}

impl ServerFate {
    /// The word for it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Added => "added",
            Self::Removed => "removed",
            Self::Redefined => "redefined",
            Self::Adjusted => "adjusted",
        }
    }
}

impl ChangesView {
    /// `changes`, with how many sessions each server has, if that is `counted`.
    pub(crate) fn of(changes: Changes, counted: Option<Vec<(ServerName, u64)>>) -> Self {
        let counted: Option<BTreeMap<_, _>> = counted.map(|counted| counted.into_iter().collect());
        let servers = changes.servers.into_iter().map(|change| ServerChangeView {
            sessions: counted.as_ref().map(|counted| counted.get(&change.server).copied().unwrap_or(0)),
            name: change.server.to_string(),
            change: change.change.as_str(),
            fields: change.fields,
        });
        Self { servers: servers.collect(), settings: changes.settings }
    }

    /// Tells the log of each server that changes.
    pub(crate) fn log(&self) {
        for server in &self.servers {
            let fields = server.fields.join(", ");
            tracing::info!(
                server = server.name,
                change = server.change,
                fields,
                sessions = server.sessions,
                "the configuration of a server changes"
            );
        }
    }
}
