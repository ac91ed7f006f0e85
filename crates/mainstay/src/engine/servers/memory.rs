//! What is known of the children of servers, beyond the worker that has seen it: how the last ones ended, what was
//! counted, how long nothing is started (C4).
//!
//! It stands in the ledger as a hint, sealed, since it holds last words; those are masked before. A worker that is killed
//! loses what happened in the last fraction of a second before.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use mainstay_core::supervise::Memory;
use mainstay_core::time::Timestamp;
use mainstay_store::Write;
use mainstay_upstream::{ChildCounts, ChildEnd, ExitStatus, LastFailure, ServerMemory, Why};
use serde::{Deserialize, Serialize};

use crate::engine::Engine;

impl Engine {
    /// Goes on from what earlier workers remembered. To be called before any session is in memory.
    pub async fn recall_servers(&self) {
        let read = tokio::time::timeout(RECALL_MAX, self.store.server_memory()).await;
        let bytes = match read {
            Ok(Ok(Some(bytes))) => bytes,
            Ok(Ok(None)) => return,
            Ok(Err(error)) => return tracing::warn!(error = %error, "what was remembered of servers can't be read"),
            Err(_elapsed) => return tracing::warn!("what was remembered of servers is not there in time"),
        };
        let Ok(mut remembered) = serde_json::from_slice::<Remembered>(&bytes) else {
            return tracing::warn!("what was remembered of servers is of another version, and is forgotten");
        };
        for (name, served) in &self.servers {
            if let Some(server) = remembered.servers.remove(name.as_str()) {
                self.upstreams.recall_children(&served.server, server.into());
            }
        }
    }

    /// Hands what a later worker goes on from to the ledger. Servers that have left the configuration are forgotten.
    pub(crate) fn remember_servers(&self) {
        if self.has_left() {
            return;
        }
        let stdio = self.servers.iter().filter(|(_, served)| !served.server.is_http());
        let remembered = stdio.map(|(name, served)| (name.to_string(), self.upstreams.memory(&served.server).into()));
        let remembered = Remembered { servers: remembered.collect() };
        match serde_json::to_vec(&remembered) {
            Ok(bytes) => self.store.hint(Write::Memory(bytes.into())),
            Err(error) => tracing::warn!(error = %error, "what is known of servers can't be written"),
        }
    }

    /// Resolves once there is something new to remember.
    pub(crate) async fn memory_changed(self: &Arc<Self>) {
        self.upstreams.memory_changed().await;
    }
}

/// The form in the ledger. What a later version adds must have a default.
#[derive(Default, Serialize, Deserialize)]
struct Remembered {
    servers: BTreeMap<String, Server>,
}

#[derive(Serialize, Deserialize)]
struct Server {
    definition: [u8; 32],
    failures: u32,
    failed_at: Option<u64>,
    is_sound: bool,
    wait_until: u64,
    quarantined_until: u64,
    recent_failures: Vec<u64>,
    recent_upgrades: Vec<u64>,
    ends: Vec<End>,
    last_failure: Option<Failure>,
    /// In the order of [`counts`].
    totals: [u64; 10],
}

#[derive(Serialize, Deserialize)]
struct End {
    child: u64,
    at: u64,
    code: Option<i32>,
    signal: Option<i32>,
    lived_ms: u64,
    why: Option<String>,
    words: String,
}

#[derive(Serialize, Deserialize)]
struct Failure {
    at: u64,
    cause: String,
    words: String,
}

impl From<ServerMemory> for Server {
    fn from(memory: ServerMemory) -> Self {
        let millis = |instants: &[Timestamp]| instants.iter().map(|at| at.unix_millis()).collect();
        let ServerMemory { definition, machine, ends, last_failure, totals } = memory;
        Self {
            definition,
            failures: machine.failures,
            failed_at: machine.failed_at.map(|at| at.unix_millis()),
            is_sound: machine.is_sound,
            wait_until: machine.wait_until.unix_millis(),
            quarantined_until: machine.quarantined_until.unix_millis(),
            recent_failures: millis(&machine.recent_failures),
            recent_upgrades: millis(&machine.recent_upgrades),
            ends: ends.into_iter().map(End::from).collect(),
            last_failure: last_failure.map(|failure| Failure {
                at: failure.at.unix_millis(),
                cause: failure.cause.into(),
                words: failure.words.into(),
            }),
            totals: counts(totals),
        }
    }
}

impl From<Server> for ServerMemory {
    fn from(server: Server) -> Self {
        let at = Timestamp::from_unix_millis;
        let instants = |millis: Vec<u64>| millis.into_iter().map(at).collect();
        Self {
            definition: server.definition,
            machine: Memory {
                failures: server.failures,
                failed_at: server.failed_at.map(at),
                is_sound: server.is_sound,
                wait_until: at(server.wait_until),
                quarantined_until: at(server.quarantined_until),
                recent_failures: instants(server.recent_failures),
                recent_upgrades: instants(server.recent_upgrades),
            },
            ends: server.ends.into_iter().map(ChildEnd::from).collect(),
            last_failure: server.last_failure.map(|failure| LastFailure {
                at: at(failure.at),
                cause: failure.cause.into(),
                words: failure.words.into(),
            }),
            totals: counted(server.totals),
        }
    }
}

impl From<ChildEnd> for End {
    fn from(end: ChildEnd) -> Self {
        Self {
            child: end.child,
            at: end.at.unix_millis(),
            code: end.status.code,
            signal: end.status.signal,
            lived_ms: u64::try_from(end.lived.as_millis()).unwrap_or(u64::MAX),
            why: end.why.map(|why| why.as_str().to_owned()),
            words: end.words.into(),
        }
    }
}

impl From<End> for ChildEnd {
    fn from(end: End) -> Self {
        // A word of another version says at least that the gateway has ended it.
        let why = |word: String| Why::ALL.into_iter().find(|why| why.as_str() == word).unwrap_or(Why::Unwanted);
        Self {
            child: end.child,
            at: Timestamp::from_unix_millis(end.at),
            status: ExitStatus { code: end.code, signal: end.signal },
            lived: Duration::from_millis(end.lived_ms),
            why: end.why.map(why),
            words: end.words.into(),
        }
    }
}

fn counts(totals: ChildCounts) -> [u64; 10] {
    let ChildCounts { up, never_up, not_started, gateway, restarts, exited, failed, upgraded, killed, stopped } =
        totals;
    [up, never_up, not_started, gateway, restarts, exited, failed, upgraded, killed, stopped]
}

fn counted(totals: [u64; 10]) -> ChildCounts {
    let [up, never_up, not_started, gateway, restarts, exited, failed, upgraded, killed, stopped] = totals;
    ChildCounts { up, never_up, not_started, gateway, restarts, exited, failed, upgraded, killed, stopped }
}

/// How long a start waits for it.
const RECALL_MAX: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c4_what_is_remembered_of_a_server_reads_back_whole() {
        let at = Timestamp::from_unix_millis;
        let end = |child, why| ChildEnd {
            child,
            at: at(5),
            status: ExitStatus { code: Some(1), signal: None },
            lived: Duration::from_millis(7),
            why,
            words: "out of \u{1} memory".into(),
        };
        let ends = Why::ALL.into_iter().map(Some).chain([None]).zip(1..).map(|(why, child)| end(child, why));
        let memory = ServerMemory {
            definition: [9; 32],
            machine: Memory {
                failures: 3,
                failed_at: Some(at(1)),
                is_sound: true,
                wait_until: at(2),
                quarantined_until: at(3),
                recent_failures: vec![at(1)],
                recent_upgrades: vec![at(4)],
            },
            ends: ends.collect(),
            last_failure: Some(LastFailure { at: at(5), cause: "it".into(), words: "***".into() }),
            totals: counted([1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        };
        let bytes = serde_json::to_vec(&Server::from(memory.clone())).unwrap();
        assert_eq!(ServerMemory::from(serde_json::from_slice::<Server>(&bytes).unwrap()), memory);
        for cut in 0..bytes.len() {
            assert!(serde_json::from_slice::<Server>(&bytes[..cut]).is_err());
        }
    }
}
