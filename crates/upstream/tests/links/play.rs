//! The processes of the tests with children: keeper, worker and server, all of them this binary.

use std::collections::HashMap;
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use mainstay_keeper::client::{Attached, Custody, Held};
use mainstay_keeper::{Plan, ProcessIdentity, Signal, acquire_lock, run, signal};
use mainstay_upstream::{Reach, Server};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{BOUND, server, template};

const STAGE: &str = "UPSTREAM_TEST_STAGE";
const SCENARIO: &str = "UPSTREAM_TEST_SCENARIO";
const SWITCHES: &str = "UPSTREAM_TEST_SWITCHES";

/// What a scenario has: a worker's custody, and a directory that all its processes know.
pub(crate) struct Stage {
    pub(crate) custody: Custody,
    pub(crate) held: Vec<Held>,
    /// Which worker of the scenario this is, from 1.
    pub(crate) number: u64,
    pub(crate) dir: PathBuf,
}

impl Stage {
    /// This binary as a server with `switches`.
    pub(crate) fn server(&self, switches: &str) -> Server {
        let variables = [(STAGE, self.dir.to_str().unwrap()), (SWITCHES, switches)];
        server(Reach::Child {
            program: std::env::current_exe().unwrap().into(),
            args: part("play::play_server"),
            env: variables.map(|(name, value)| (name.to_owned(), template(value))).into(),
            cwd: None,
        })
    }

    /// What the servers were told, oldest first: pid and method.
    pub(crate) fn trace(&self) -> Vec<(u32, String)> {
        let text = std::fs::read_to_string(self.dir.join("trace")).unwrap_or_default();
        let line = |line: &str| line.split_once(' ').map(|(pid, what)| (pid.parse().unwrap(), what.to_owned()));
        text.lines().filter_map(line).collect()
    }

    /// What the last server was told.
    pub(crate) fn last_told(&self) -> Vec<String> {
        let trace = self.trace();
        let Some(&(last, _)) = trace.last() else { return Vec::new() };
        let told = trace.into_iter().filter(|(pid, what)| *pid == last && !what.starts_with("answered"));
        told.map(|(_, what)| what).collect()
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        std::fs::write(self.dir.join(name), text).unwrap();
    }
}

fn part(name: &str) -> Vec<std::ffi::OsString> {
    ["--exact", name, "--nocapture", "--test-threads=1"].map(Into::into).into()
}

/// Runs a scenario in workers of a keeper of its own, and fails as it fails.
pub(crate) fn perform(scenario: &str) {
    let dir = TempDir::new().unwrap();
    let log = std::fs::File::create(dir.path().join("log")).unwrap();
    let mut keeper = Command::new(std::env::current_exe().unwrap())
        .args(part("play::play_keeper"))
        .env(STAGE, dir.path())
        .env(SCENARIO, scenario)
        .env("CANARY", "must not be inherited")
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn()
        .unwrap();
    let deadline = Instant::now() + 3 * BOUND;
    let outcome = loop {
        if let Ok(outcome) = std::fs::read_to_string(dir.path().join("outcome")) {
            break outcome;
        }
        if Instant::now() > deadline || keeper.try_wait().unwrap().is_some() {
            break "the scenario never ended".to_owned();
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    if let Ok(Some(identity)) = ProcessIdentity::of(keeper.id()) {
        for _ in 0..2 {
            let _ = signal(identity, Signal::TERM);
        }
    }
    keeper.wait().unwrap();
    if outcome != "ok" {
        eprintln!("{}", std::fs::read_to_string(dir.path().join("log")).unwrap_or_default());
        panic!("{outcome}");
    }
}

fn stage_dir() -> Option<PathBuf> {
    std::env::var_os(STAGE).map(PathBuf::from)
}

/// The keeper, when it is started as such.
#[test]
fn play_keeper() {
    let Some(dir) = stage_dir() else { return };
    let state_dir = dir.join("state");
    let lock = acquire_lock(&state_dir, "test").unwrap();
    let plan = Plan {
        worker: std::env::current_exe().unwrap(),
        worker_args: part("play::play_worker"),
        listeners: Vec::new(),
        settings: Vec::new(),
        state_dir,
        lock: Arc::new(lock),
        program: std::env::current_exe().unwrap(),
        rehearse_args: Vec::new(),
        serve_args: Vec::new(),
        version: String::new(),
        handover_bound: Duration::from_millis(500),
        leave_bound: Duration::from_millis(500),
        renewed: None,
        drain_bound: Duration::from_millis(500),
        notify: Box::new(|_| ()),
        alive_every: None,
    };
    run(plan).unwrap();
}

/// A worker, when it is started as such.
#[test]
fn play_worker() {
    let Some(dir) = stage_dir() else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
        let Attached { custody, welcome, mut orders } = Custody::attach(socket).await.unwrap();
        custody.ready().await;
        let stage = Stage { custody, held: welcome.children, number: welcome.worker_number, dir: dir.clone() };
        let scenario = std::env::var(SCENARIO).unwrap();
        let played = tokio::spawn(async move { crate::children::play(&scenario, stage).await });
        let outcome = match played.await {
            Ok(()) => "ok".to_owned(),
            Err(error) => format!("{error}"),
        };
        publish(&dir, &outcome);
        // The keeper's end is this worker's.
        let _ = orders.recv().await;
    });
    runtime.shutdown_background();
}

fn publish(dir: &Path, outcome: &str) {
    std::fs::write(dir.join("outcome.new"), outcome).unwrap();
    std::fs::rename(dir.join("outcome.new"), dir.join("outcome")).unwrap();
}

/// A stdio server, when it is started as such.
#[test]
fn play_server() {
    let Some(dir) = stage_dir() else { return };
    let Ok(switches) = std::env::var(SWITCHES) else { return };
    // The test harness has left a line unfinished.
    println!();
    let server = Arc::new(StdioServer { dir, asked: Mutex::default(), settings: Mutex::default() });
    if switches.contains("exit-before-output") {
        eprintln!("cannot open the database");
        std::process::exit(3);
    }
    let first = !server.dir.join("trace").exists();
    for line in std::io::stdin().lines() {
        let message: Value = serde_json::from_str(&line.unwrap()).unwrap();
        let method = message["method"].as_str().unwrap_or("response").to_owned();
        server.note(&method);
        if method == "initialize" && switches.contains("progress-forever") {
            loop {
                let params = json!({"progressToken": "x", "progress": 1});
                server.say(&json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": params}));
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        server.hear(method, message);
        if switches.contains("deaf") && first && server.told("notifications/initialized") {
            std::thread::sleep(3 * BOUND);
        }
    }
    server.note("ended by itself");
}

/// A server over standard streams.
struct StdioServer {
    dir: PathBuf,
    asked: Mutex<HashMap<String, mpsc::Sender<Value>>>,
    settings: Mutex<Vec<String>>,
}

impl StdioServer {
    fn note(&self, what: &str) {
        let mut trace = std::fs::OpenOptions::new().append(true).create(true).open(self.dir.join("trace")).unwrap();
        trace.write_all(format!("{} {what}\n", std::process::id()).as_bytes()).unwrap();
    }

    fn told(&self, what: &str) -> bool {
        let line = format!("{} {what}", std::process::id());
        std::fs::read_to_string(self.dir.join("trace")).unwrap().lines().any(|seen| seen == line)
    }

    fn say(&self, message: &Value) {
        let mut stdout = std::io::stdout().lock();
        stdout.write_all(format!("{message}\n").as_bytes()).unwrap();
        stdout.flush().unwrap();
    }

    /// Sends a request and waits for its answer.
    fn ask(&self, id: &str, method: &str) -> Value {
        let (sender, receiver) = mpsc::channel();
        self.asked.lock().unwrap().insert(id.to_owned(), sender);
        self.say(&json!({"jsonrpc": "2.0", "id": id, "method": method, "params": {}}));
        receiver.recv_timeout(BOUND).unwrap()
    }

    fn hear(self: &Arc<Self>, method: String, message: Value) {
        let answer = |result: Value| json!({"jsonrpc": "2.0", "id": message["id"], "result": result});
        match method.as_str() {
            "response" => {
                let id = message["id"].as_str().unwrap_or_default();
                let waiting = self.asked.lock().unwrap().remove(id);
                waiting.unwrap().send(message.clone()).unwrap();
            }
            "initialize" => self.say(&answer(json!({
                "protocolVersion": message["params"]["protocolVersion"],
                "capabilities": {"tools": {"listChanged": true}},
                "serverInfo": {"name": "child", "version": "0"},
            }))),
            "ping" => self.say(&answer(json!({}))),
            "tools/list" => {
                let tools = json!([{"name": "wait", "annotations": {"readOnlyHint": true}}, {"name": "hold"}]);
                self.say(&answer(json!({"tools": tools})));
            }
            "logging/setLevel" | "resources/subscribe" => {
                let mut settings = self.settings.lock().unwrap();
                settings.extend(
                    message["params"].as_object().unwrap().values().map(|value| value.as_str().unwrap().to_owned()),
                );
                self.say(&answer(json!({})));
            }
            "tools/call" => {
                let server = Arc::clone(self);
                std::thread::spawn(move || server.run(&message));
            }
            _ => {}
        }
    }

    fn run(&self, call: &Value) {
        let (tool, arguments) = (call["params"]["name"].as_str().unwrap(), &call["params"]["arguments"]);
        let notify =
            |method: &str, params: Value| self.say(&json!({"jsonrpc": "2.0", "method": method, "params": params}));
        let text = match tool {
            "echo" => arguments["text"].as_str().unwrap_or("ok").to_owned(),
            "whoami" => format!("{} {}", std::process::id(), self.settings.lock().unwrap().join(",")),
            "wait" | "hold" => {
                let (go, deadline) = (self.dir.join(arguments["file"].as_str().unwrap()), Instant::now() + 2 * BOUND);
                while !go.exists() && Instant::now() < deadline {
                    std::thread::sleep(Duration::from_millis(5));
                }
                "waited".to_owned()
            }
            "prog" => {
                for step in 1..=arguments["n"].as_u64().unwrap() {
                    let token = &call["params"]["_meta"]["progressToken"];
                    notify("notifications/progress", json!({"progressToken": token, "progress": step}));
                }
                "done".to_owned()
            }
            "log" => {
                notify("notifications/message", json!({"level": "info", "data": "hello"}));
                notify("notifications/tools/list_changed", json!({}));
                "done".to_owned()
            }
            "ask" => self.ask("srv-ask", "sampling/createMessage")["result"]["text"].as_str().unwrap().to_owned(),
            "pinged" => self.ask("srv-ping", "ping")["result"].to_string(),
            "big" => crate::fake::big(usize::try_from(arguments["bytes"].as_u64().unwrap()).unwrap()),
            "noise" => {
                println!("this is no JSON\n\n{{\"nor\": \"JSON-RPC\"}}");
                "done".to_owned()
            }
            "env" => std::env::vars().map(|(name, _)| name).collect::<Vec<_>>().join(" "),
            "die" => {
                eprintln!("out of memory");
                std::process::exit(5);
            }
            _ => panic!("there is no tool {tool}"),
        };
        let result = json!({"content": [{"type": "text", "text": text}]});
        self.say(&json!({"jsonrpc": "2.0", "id": call["id"], "result": result}));
        self.note(&format!("answered {tool}"));
    }
}
