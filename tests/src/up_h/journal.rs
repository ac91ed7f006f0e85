//! The journal of every request to `/mcp`.

use http::request::Parts;
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// Every request to `/mcp`, and counters that go on when the oldest entries have gone.
#[derive(Debug, Default)]
pub(super) struct Journal {
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    entries: VecDeque<Value>,
    /// The number of the next entry.
    next: u64,
    paused: bool,
    http: BTreeMap<String, u64>,
    initializes: u64,
    initialized: u64,
}

impl Journal {
    /// Notes a request. The body is shown as JSON if it is JSON, else as text.
    pub(super) fn note(&self, parts: &Parts, raw: &[u8], body: &Value) {
        let mut kept = self.lock();
        *kept.http.entry(parts.method.to_string()).or_default() += 1;
        match crate::server::method(body) {
            "initialize" => kept.initializes += 1,
            "notifications/initialized" => kept.initialized += 1,
            _ => {}
        }
        if kept.paused {
            return;
        }
        let mut headers = serde_json::Map::new();
        for (name, value) in &parts.headers {
            headers.insert(name.to_string(), json!(String::from_utf8_lossy(value.as_bytes())));
        }
        let body = if body.is_null() && !raw.is_empty() { json!(String::from_utf8_lossy(raw)) } else { body.clone() };
        let number = kept.next;
        kept.next += 1;
        kept.entries.push_back(json!({
            "number": number,
            "at_us": unix_us(),
            "method": parts.method.as_str(),
            "path": parts.uri.path(),
            "headers": headers,
            "body": body,
            "raw": String::from_utf8_lossy(raw),
        }));
        if kept.entries.len() > ENTRIES_MAX {
            kept.entries.pop_front();
        }
    }

    /// The entries from `since` on.
    pub(super) fn entries(&self, since: u64) -> Vec<Value> {
        let kept = self.lock();
        kept.entries.iter().filter(|entry| entry["number"].as_u64() >= Some(since)).cloned().collect()
    }

    /// The counters, to be shown beside those of the world.
    pub(super) fn counters(&self) -> Value {
        let kept = self.lock();
        let of = |method: &str| kept.http.get(method).copied().unwrap_or_default();
        json!({
            "initializes": kept.initializes,
            "initialized": kept.initialized,
            "posts": of("POST"),
            "gets": of("GET"),
            "deletes": of("DELETE"),
        })
    }

    /// Stops or resumes keeping entries; counting goes on. For measurements.
    pub(super) fn pause(&self, paused: bool) {
        self.lock().paused = paused;
    }

    /// Forgets all entries. Numbers and counters go on.
    pub(super) fn clear(&self) {
        self.lock().entries.clear();
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The time of day in microseconds, comparable between the processes of one machine.
fn unix_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

const ENTRIES_MAX: usize = 200_000;
