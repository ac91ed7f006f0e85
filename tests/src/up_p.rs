//! UP-P: a program of 2026-07-28 that speaks over its standard streams, and of nothing before unless it is told to. It keeps
//! nothing of its callers.
//!
//! Each line that it hears is noted in its journal, which all its processes share. What it waits for are files in its
//! directory.

use crate::procs::Proc;
use crate::up_s::start_time;
use crate::{binaries, wait_until};
use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::{BufRead as _, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tempfile::TempDir;

/// How the gateway is to start a UP-P, and what its processes have noted. It is gone with the handle.
#[derive(Debug)]
pub struct UpP {
    dir: TempDir,
    flags: Vec<String>,
}

/// A line that one process has heard.
#[derive(Debug, Clone)]
pub struct Heard {
    /// Which process.
    pub pid: u32,
    /// The message.
    pub message: Value,
}

impl UpP {
    /// A UP-P with these flags: `dual` takes `initialize`, too; `legacy` takes nothing else, and exits at
    /// what is modern; `silent` does not answer it instead; `mute` says nothing, whatever it hears.
    ///
    /// # Errors
    /// If no directory can be made.
    pub fn new(flags: &[&str]) -> Result<UpP> {
        let flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
        Ok(UpP { dir: TempDir::with_prefix("up-p-")?, flags })
    }

    /// A table of the gateway's configuration that names this server, and says nothing of its era.
    ///
    /// # Errors
    /// If the binary is not there.
    pub fn toml(&self, name: &str) -> Result<String> {
        let command = json!(binaries::up_p()?.display().to_string());
        let args: Vec<_> = [self.dir.path().display().to_string()].into_iter().chain(self.flags.clone()).collect();
        Ok(format!("[servers.{name}]\ncommand = {command}\nargs = {}\n", json!(args)))
    }

    /// What was heard of that method, by all processes.
    ///
    /// # Errors
    /// If the journal can't be read.
    pub fn heard(&self, method: &str) -> Result<Vec<Heard>> {
        let entries = self.journal()?.into_iter().filter(|entry| entry["message"]["method"] == method);
        Ok(entries
            .filter_map(|entry| Some(Heard { pid: pid_of(&entry)?, message: entry["message"].clone() }))
            .collect())
    }

    /// How often.
    ///
    /// # Errors
    /// If the journal can't be read.
    pub fn count(&self, method: &str) -> Result<usize> {
        Ok(self.heard(method)?.len())
    }

    /// The processes that were started, in order.
    ///
    /// # Errors
    /// If the journal can't be read.
    pub fn starts(&self) -> Result<Vec<Proc>> {
        let entries = self
            .journal()?
            .into_iter()
            .filter_map(|entry| Some(Proc { pid: pid_of(&entry)?, start: entry["start"].as_u64()? }));
        Ok(entries.collect())
    }

    /// Those of them that run.
    ///
    /// # Errors
    /// If the journal can't be read.
    pub fn alive(&self) -> Result<Vec<Proc>> {
        Ok(self.starts()?.into_iter().filter(|process| process.is_alive()).collect())
    }

    /// Lets the calls of `slow` with that `key` end, now and later.
    ///
    /// # Errors
    /// If the file can't be written.
    pub fn release(&self, key: &str) -> Result<()> {
        Ok(std::fs::write(self.dir.path().join(key), "")?)
    }

    /// Waits until that many messages of that method were heard.
    ///
    /// # Errors
    /// If it does not come to that within `bound`.
    pub async fn wait_heard(&self, method: &str, count: usize, bound: Duration) -> Result<()> {
        wait_until(&format!("{count} of {method}"), bound, async || {
            self.count(method).is_ok_and(|heard| heard >= count)
        })
        .await
    }

    fn journal(&self) -> Result<Vec<Value>> {
        let text = match std::fs::read_to_string(self.dir.path().join(JOURNAL_FILE)) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error.into()),
        };
        text.lines().map(|line| serde_json::from_str(line).context("a line of the journal")).collect()
    }
}

fn pid_of(entry: &Value) -> Option<u32> {
    u32::try_from(entry["pid"].as_u64()?).ok()
}

/// Runs the program with its arguments: its directory, and flags.
///
/// # Errors
/// If its directory is not given, or its input breaks.
pub fn run(args: &[String]) -> std::io::Result<ExitCode> {
    let [dir, flags @ ..] = args else { return Err(std::io::ErrorKind::InvalidInput.into()) };
    let has = |flag: &str| flags.iter().any(|given| given == flag);
    let program = Arc::new(Program {
        dir: PathBuf::from(dir),
        takes_initialize: has("dual") || has("legacy") || has("silent"),
        is_modern: !has("legacy") && !has("silent"),
        exits: has("legacy"),
        state: Mutex::default(),
    });
    program.note(&json!({"start": start_time(std::process::id())}));
    for line in std::io::stdin().lock().lines() {
        let Ok(message) = serde_json::from_str::<Value>(&line?) else { continue };
        program.note(&json!({"message": message}));
        if !has("mute") && !program.hear(&message) {
            return Ok(ExitCode::from(WRONG_ERA_EXIT));
        }
    }
    Ok(ExitCode::SUCCESS)
}

struct Program {
    dir: PathBuf,
    takes_initialize: bool,
    is_modern: bool,
    /// Whether it exits at what is of the wrong era.
    exits: bool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The ids of the requests that are listened by.
    listeners: Vec<Value>,
    /// The ids of requests that were taken back.
    cancelled: BTreeSet<String>,
}

impl Program {
    /// Deals with a message. False if it is of the wrong era, and too much.
    fn hear(self: &Arc<Self>, message: &Value) -> bool {
        let (id, params) = (&message["id"], &message["params"]);
        let method = message["method"].as_str().unwrap_or_default();
        if method == "notifications/cancelled" {
            let mut state = self.state();
            state.listeners.retain(|listener| *listener != params["requestId"]);
            state.cancelled.insert(params["requestId"].to_string());
            return true;
        }
        if id.is_null() {
            return true;
        }
        if method == "initialize" && self.takes_initialize {
            let capabilities = json!({"tools": {"listChanged": true}});
            let info = json!({"name": "up-p", "version": "1"});
            let version = &params["protocolVersion"];
            let result = json!({"protocolVersion": version, "capabilities": capabilities, "serverInfo": info});
            self.say(&json!({"jsonrpc": "2.0", "id": id, "result": result}));
            return true;
        }
        let version = &params["_meta"]["io.modelcontextprotocol/protocolVersion"];
        match (version.as_str(), self.is_modern) {
            (Some(_), false) => return !self.exits,
            // In the words of the era before, where a process of its own serves one session.
            (None, _) if self.takes_initialize => {}
            (Some("2026-07-28"), true) if params["_meta"]["io.modelcontextprotocol/clientCapabilities"].is_object() => {
            }
            (Some("2026-07-28"), true) => {
                self.refuse(id, -32602, &Value::Null);
                return true;
            }
            (Some(_) | None, _) => {
                self.refuse(id, -32022, &json!({"supported": ["2026-07-28"], "requested": version}));
                return true;
            }
        }
        self.serve(id, method, params);
        true
    }

    fn serve(self: &Arc<Self>, id: &Value, method: &str, params: &Value) {
        let result = match method {
            "server/discover" => json!({
                "resultType": "complete", "supportedVersions": ["2026-07-28"], "ttlMs": 0, "cacheScope": "public",
                "capabilities": {"tools": {"listChanged": true}, "resources": {"subscribe": true}, "logging": {}},
                "_meta": {"io.modelcontextprotocol/serverInfo": {"name": "up-p", "version": "1"}}}),
            "tools/list" => {
                let tool = |name: &str| json!({"name": name, "inputSchema": {"type": "object"}});
                let tools = TOOLS.map(tool);
                json!({"resultType": "complete", "ttlMs": 0, "cacheScope": "public", "tools": tools})
            }
            "tools/call" => {
                let (program, id, params) = (Arc::clone(self), id.clone(), params.clone());
                // It need not end by itself: the process does.
                std::thread::spawn(move || program.call(&id, &params));
                return;
            }
            "subscriptions/listen" => {
                self.state().listeners.push(id.clone());
                let params = json!({"notifications": params["notifications"], "_meta": mark(id)});
                return self.notify("notifications/subscriptions/acknowledged", &params);
            }
            _ => return self.refuse(id, -32601, &Value::Null),
        };
        self.say(&json!({"jsonrpc": "2.0", "id": id, "result": result}));
    }

    fn call(&self, id: &Value, params: &Value) {
        let progress = |step: u64| {
            let token = &params["_meta"]["progressToken"];
            self.notify("notifications/progress", &json!({"progressToken": token, "progress": step}));
        };
        let arguments = &params["arguments"];
        let result = match params["name"].as_str().unwrap_or_default() {
            "echo" => text(arguments["text"].as_str().unwrap_or("ok")),
            "whoami" => text(&std::process::id().to_string()),
            "ask" => match (&params["inputResponses"]["q"]["content"]["answer"], &params["requestState"]) {
                (Value::String(answer), Value::String(state)) => text(&format!("{answer} in {state}")),
                _ => {
                    let schema = json!({"type": "object", "properties": {"answer": {"type": "string"}}});
                    let params = json!({"mode": "form", "message": "?", "requestedSchema": schema});
                    let asked = json!({"q": {"method": "elicitation/create", "params": params}});
                    json!({"resultType": "input_required", "requestState": "s-1", "inputRequests": asked})
                }
            },
            "steps" => {
                (1..=3).for_each(progress);
                text("3 steps")
            }
            "log" => {
                self.notify("notifications/message", &json!({"level": "info", "data": arguments["text"]}));
                text("logged")
            }
            // What no modern server may do.
            "demand" => {
                self.say(&json!({"jsonrpc": "2.0", "id": "d", "method": "sampling/createMessage", "params": {}}));
                text("demanded")
            }
            "change" => {
                for listener in self.state().listeners.clone() {
                    self.notify("notifications/tools/list_changed", &json!({"_meta": mark(&listener)}));
                }
                text("changed")
            }
            "slow" => {
                progress(1);
                if !self.waited_for(id, arguments["key"].as_str().unwrap_or("release")) {
                    return;
                }
                text(&format!("released {}", arguments["key"]))
            }
            "die" => std::process::exit(DEATH_EXIT),
            _ => return self.refuse(id, -32602, &Value::Null),
        };
        self.say(&json!({"jsonrpc": "2.0", "id": id, "result": result}));
    }

    /// Waits for a file, or until the request is taken back; then there is nothing to answer.
    fn waited_for(&self, id: &Value, file: &str) -> bool {
        let path = self.dir.join(file);
        while !path.exists() {
            if self.state().cancelled.contains(&id.to_string()) {
                self.note(&json!({"cancelled": id}));
                return false;
            }
            std::thread::sleep(LOOK_PAUSE);
        }
        true
    }

    fn refuse(&self, id: &Value, code: i32, data: &Value) {
        let error = json!({"code": code, "message": "refused by up-p", "data": data});
        self.say(&json!({"jsonrpc": "2.0", "id": id, "error": error}));
    }

    fn notify(&self, method: &str, params: &Value) {
        self.say(&json!({"jsonrpc": "2.0", "method": method, "params": params}));
    }

    fn say(&self, message: &Value) {
        let mut stdout = std::io::stdout().lock();
        // Nobody may read any more; the end of the input is near then.
        let _nobody_reads = stdout.write_all(format!("{message}\n").as_bytes()).and_then(|()| stdout.flush());
    }

    fn note(&self, entry: &Value) {
        let mut entry = entry.clone();
        entry["pid"] = json!(std::process::id());
        let file = std::fs::File::options().create(true).append(true).open(self.dir.join(JOURNAL_FILE));
        // One write, so that lines of several processes never mix.
        let _best_effort = file.and_then(|mut file| file.write_all(format!("{entry}\n").as_bytes()));
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn mark(id: &Value) -> Value {
    json!({"io.modelcontextprotocol/subscriptionId": id})
}

fn text(text: &str) -> Value {
    json!({"resultType": "complete", "content": [{"type": "text", "text": text}]})
}

/// The tools that a UP-P lists.
const TOOLS: [&str; 9] = ["echo", "whoami", "ask", "steps", "log", "demand", "change", "slow", "die"];
const JOURNAL_FILE: &str = "journal";
const LOOK_PAUSE: Duration = Duration::from_millis(5);
const WRONG_ERA_EXIT: u8 = 3;
const DEATH_EXIT: i32 = 5;
