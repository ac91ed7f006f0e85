//! The demo server: a small MCP server over stdio, so that the gateway can be tried without anything else.
//!
//! Three tools: `echo`; `counter`, whose state lives in this process and so shows whether the same one lives on; and
//! `slow`, which reports progress and can be cancelled.

use std::collections::BTreeMap;
use std::io::{self, Read as _, Write as _};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::wire::envelope::{self, Kind};
use mainstay_core::wire::lines::{Line, LineSplitter};
use serde_json::{Value, json};

/// Serves standard input and output until the input ends.
///
/// # Errors
/// If either breaks.
pub fn run() -> io::Result<()> {
    let server = Arc::new(Server::default());
    let mut lines = LineSplitter::new(LINE_BYTES_MAX);
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut stdin = io::stdin().lock();
    loop {
        let length = stdin.read(&mut chunk)?;
        if length == 0 {
            return Ok(());
        }
        lines.push(&chunk[..length]);
        while let Some(line) = lines.next_line() {
            match line {
                Line::Whole(message) => serve(&server, message)?,
                Line::Oversize { .. } => send(&failed(b"null", -32600, "the message is too long"))?,
            }
        }
    }
}

#[derive(Default)]
struct Server {
    count: AtomicU64,
    /// Slow calls by their raw id, each with its cancellation.
    running: Mutex<BTreeMap<Bytes, Arc<AtomicBool>>>,
}

impl Server {
    fn running(&self) -> MutexGuard<'_, BTreeMap<Bytes, Arc<AtomicBool>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn serve(server: &Arc<Server>, message: Bytes) -> io::Result<()> {
    let Ok(scanned) = envelope::scan(&message) else {
        return send(&failed(b"null", -32700, "not a JSON-RPC message"));
    };
    let method = scanned.method_name(&message).unwrap_or_default();
    let params = scanned.params.as_ref().and_then(|span| message.get(span.clone()));
    let params: Value = params.and_then(|raw| serde_json::from_slice(raw).ok()).unwrap_or_default();
    let id = scanned.id.as_ref().map(|span| message.slice(span.clone()));
    match (scanned.kind, id) {
        (Kind::Request, Some(id)) => answer(server, id, &method, &params),
        (Kind::Notification, _) if method == "notifications/cancelled" => {
            let named = params["requestId"].to_string();
            if let Some(cancelled) = server.running().get(named.as_bytes()) {
                cancelled.store(true, Ordering::Relaxed);
            }
            Ok(())
        }
        (Kind::Request | Kind::Notification | Kind::Result | Kind::Error, _) => Ok(()),
    }
}

fn answer(server: &Arc<Server>, id: Bytes, method: &str, params: &Value) -> io::Result<()> {
    match method {
        "initialize" => send(&done(&id, &initialized(params))),
        "ping" => send(&done(&id, &json!({}))),
        "tools/list" => send(&done(&id, &json!({ "tools": tools() }))),
        "tools/call" => call(server, id, params),
        _ => send(&failed(&id, -32601, "method not found")),
    }
}

fn initialized(params: &Value) -> Value {
    let wanted = params["protocolVersion"].as_str().unwrap_or_default();
    let version = VERSIONS.iter().find(|version| **version == wanted).unwrap_or(&VERSIONS[0]);
    json!({
        "protocolVersion": version,
        "capabilities": { "tools": {} },
        "serverInfo": { "name": "mainstay-demo", "version": env!("CARGO_PKG_VERSION") },
        "instructions": "Call `counter` a few times, kill the gateway in between, and call it again.",
    })
}

fn tools() -> Value {
    let schema = |properties: Value| json!({ "type": "object", "properties": properties });
    json!([
        {
            "name": "echo",
            "description": "Says the text again.",
            "inputSchema": schema(json!({ "text": { "type": "string" } })),
            "annotations": { "readOnlyHint": true },
        },
        {
            "name": "counter",
            "description": "Counts its calls in this server process.",
            "inputSchema": schema(json!({})),
        },
        {
            "name": "slow",
            "description": "Answers after some seconds and reports its progress.",
            "inputSchema": schema(json!({ "seconds": { "type": "integer", "minimum": 0, "maximum": SLOW_SECONDS_MAX } })),
            "annotations": { "readOnlyHint": true },
        },
    ])
}

fn call(server: &Arc<Server>, id: Bytes, params: &Value) -> io::Result<()> {
    match params["name"].as_str() {
        Some("echo") => send(&done(&id, &text(params["arguments"]["text"].as_str().unwrap_or_default()))),
        Some("counter") => {
            let count = server.count.fetch_add(1, Ordering::Relaxed) + 1;
            send(&done(&id, &text(&count.to_string())))
        }
        Some("slow") => start_slow(server, id, params),
        _ => send(&failed(&id, -32602, "no such tool")),
    }
}

/// A slow call has a thread of its own, so that others are answered meanwhile.
fn start_slow(server: &Arc<Server>, id: Bytes, params: &Value) -> io::Result<()> {
    let seconds = params["arguments"]["seconds"].as_u64().unwrap_or(SLOW_SECONDS_DEFAULT).min(SLOW_SECONDS_MAX);
    let token = params["_meta"].get("progressToken").cloned();
    let cancelled = Arc::new(AtomicBool::new(false));
    {
        let mut running = server.running();
        if running.len() >= SLOW_CALLS_MAX {
            return send(&failed(&id, -32000, "too many slow calls at once"));
        }
        running.insert(id.clone(), Arc::clone(&cancelled));
    }
    let server = Arc::clone(server);
    std::thread::spawn(move || {
        // Output that breaks ends the reading loop as well, and with it the process.
        let _ = slow(&id, seconds, token.as_ref(), &cancelled);
        server.running().remove(&id);
    });
    Ok(())
}

fn slow(id: &[u8], seconds: u64, token: Option<&Value>, cancelled: &AtomicBool) -> io::Result<()> {
    for step in 1..=seconds * STEPS_PER_SECOND {
        std::thread::sleep(Duration::from_millis(1000 / STEPS_PER_SECOND));
        if cancelled.load(Ordering::Relaxed) {
            return Ok(());
        }
        if let Some(token) = token {
            let progress = json!({ "progressToken": token, "progress": step, "total": seconds * STEPS_PER_SECOND });
            let params = progress.to_string();
            send(&envelope::notification_message("notifications/progress", Some(params.as_bytes())))?;
        }
    }
    send(&done(id, &text(&format!("waited {seconds} s"))))
}

fn text(text: &str) -> Value {
    json!({ "content": [{ "type": "text", "text": text }] })
}

fn done(id: &[u8], result: &Value) -> Vec<u8> {
    envelope::result_message(id, result.to_string().as_bytes())
}

fn failed(id: &[u8], code: i64, message: &str) -> Vec<u8> {
    envelope::error_message(Some(id), code, message, None)
}

fn send(message: &[u8]) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(message)?;
    stdout.write_all(b"\n")?;
    stdout.flush()
}

const VERSIONS: &[&str] = &["2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"];
const LINE_BYTES_MAX: usize = 16 * 1024 * 1024;
const CHUNK_BYTES: usize = 64 * 1024;
const SLOW_CALLS_MAX: usize = 32;
const SLOW_SECONDS_DEFAULT: u64 = 3;
const SLOW_SECONDS_MAX: u64 = 600;
const STEPS_PER_SECOND: u64 = 2;
