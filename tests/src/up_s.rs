//! UP-S: a stdio MCP server that misbehaves exactly as it is told.
//!
//! Messages are lines of JSON. One thread reads standard input, one writes standard output; requests run beside each other.

mod options;
mod output;
mod process;
mod trace;

pub use options::{Options, USAGE};
pub use process::start_time;

use crate::server::{self, Conversation, Kind, Outgoing, Outlet, World};
use serde_json::{Value, json};
use std::io::{BufRead as _, Read as _};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::Instant;
use trace::Trace;

/// Runs the server until its input ends, it is told to exit, or a switch says so.
///
/// # Errors
/// If the trace or the lock cannot be opened, or the system refuses threads or a signal handler.
pub fn run(options: Options) -> std::io::Result<ExitCode> {
    if options.grandchild {
        return process::run_below_a_shell(&options);
    }
    if options.as_daemon {
        return process::idle(&options);
    }
    let trace = Trace::open(options.trace.as_deref(), "start")?;
    process::leave_daemon(&options)?;
    if let Some(code) = options.exit_before_output {
        output::complain("up-s: exiting before any output");
        return Ok(ExitCode::from(code));
    }
    let Some(_held) = process::hold(options.lock.as_deref())? else {
        output::complain("up-s: the lock is held by another process");
        return Ok(ExitCode::from(LOCK_HELD_EXIT));
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(serve(options, trace))
}

/// Serves until the writer's thread ends the process.
async fn serve(options: Options, trace: Trace) -> std::io::Result<ExitCode> {
    let mut term = signal(SignalKind::terminate())?;
    let (lines, mut heard) = mpsc::channel(QUEUE_MESSAGES_MAX);
    std::thread::spawn(move || read_lines(&lines));
    let exit_at = options.exit_after.map(|time| Instant::now() + time);
    let server = Server::new(options);
    let mut open = true;
    loop {
        tokio::select! {
            line = heard.recv(), if open => match line {
                Some(line) => {
                    trace.line(&line);
                    server.take(&line).await;
                }
                None => {
                    open = false;
                    trace.event("eof");
                    if !server.options.ignore_eof {
                        server.exit(0).await;
                    }
                }
            },
            _ = term.recv() => {
                trace.event("term");
                if !server.options.ignore_term {
                    server.exit(TERM_EXIT).await;
                }
            }
            () = at(exit_at) => server.exit(server.options.exit_code).await,
        }
    }
}

struct Server {
    options: Options,
    conversation: Arc<Conversation>,
    out: mpsc::Sender<Outgoing>,
    spoken_to: std::sync::atomic::AtomicBool,
}

impl Server {
    fn new(options: Options) -> Arc<Server> {
        let out = output::start(&options);
        let world = World::new(options.world());
        let session = format!("stdio-{}", std::process::id());
        let conversation = Conversation::new(&world, session, Outlet::Pipe(out.clone()));
        Arc::new(Server { options, conversation, out, spoken_to: false.into() })
    }

    async fn take(self: &Arc<Server>, line: &[u8]) {
        let Ok(message) = serde_json::from_slice::<Value>(line) else {
            let error = json!({"jsonrpc": "2.0", "id": null, "error": {"code": -32700, "message": "Parse error"}});
            self.send(error).await;
            return;
        };
        let first = !self.spoken_to.swap(true, std::sync::atomic::Ordering::SeqCst);
        if first && self.options.exit_on_first_noninit && server::method(&message) != "initialize" {
            output::complain("up-s: the first line is not initialize");
            self.exit(NOT_INITIALIZE_EXIT).await;
        }
        let Value::Array(messages) = message else {
            return self.dispatch(message).await;
        };
        for message in messages {
            self.dispatch(message).await;
        }
    }

    async fn dispatch(self: &Arc<Server>, message: Value) {
        match server::kind(&message) {
            Kind::Notification => self.conversation.note(&message),
            Kind::Request => {
                let server = Arc::clone(self);
                tokio::spawn(async move { server.serve(&message).await });
            }
            Kind::Response => {
                self.conversation.answered(message);
            }
            Kind::Junk => {
                let error =
                    json!({"jsonrpc": "2.0", "id": null, "error": {"code": -32600, "message": "Invalid Request"}});
                self.send(error).await;
            }
        }
    }

    async fn serve(&self, request: &Value) {
        let method = server::method(request);
        if method == "initialize" {
            if self.options.mute_on_init {
                return;
            }
            if self.options.progress_forever_on_init {
                self.progress_for_ever(request).await;
            }
        }
        self.conversation.serve(request, &Outlet::Pipe(self.out.clone())).await;
        if self.options.exit_after_answer.as_deref() == Some(method) {
            self.exit(self.options.exit_code).await;
        }
    }

    async fn progress_for_ever(&self, request: &Value) {
        // A client that asked for none is bothered all the same.
        let asked = &request["params"]["_meta"]["progressToken"];
        let token = if asked.is_null() { &request["id"] } else { asked };
        for done in 1_u64.. {
            let params = json!({"progressToken": token, "progress": done});
            self.send(json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": params})).await;
            tokio::time::sleep(PROGRESS_EVERY).await;
        }
    }

    async fn send(&self, message: Value) {
        let _nobody_reads = self.out.send(Outgoing::Message(message)).await;
    }

    /// Ends the process when all that was sent before is written.
    async fn exit(&self, code: u8) {
        let _writer_is_gone = self.out.send(Outgoing::Exit(code)).await;
        std::future::pending::<()>().await;
    }
}

fn read_lines(lines: &mpsc::Sender<Vec<u8>>) {
    let mut stdin = std::io::stdin().lock();
    loop {
        let mut line = Vec::new();
        let read = stdin.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line);
        match read {
            Ok(1..) => {
                let line = line.strip_suffix(b"\n").unwrap_or(&line).to_vec();
                if lines.blocking_send(line).is_err() {
                    return;
                }
            }
            Ok(0) | Err(_) => return,
        }
    }
}

async fn at(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}

const QUEUE_MESSAGES_MAX: usize = 1024;
const LINE_BYTES_MAX: u64 = 512 * 1024 * 1024;
const PROGRESS_EVERY: Duration = Duration::from_millis(20);
const NOT_INITIALIZE_EXIT: u8 = 3;
const LOCK_HELD_EXIT: u8 = 4;
const TERM_EXIT: u8 = 143;
