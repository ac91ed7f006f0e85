//! A stand-in for the gateway, by which the harness itself is tested: it has a keeper, a worker and an admin port, and
//! serves nothing. `--orphan` makes it leave a process behind, which the gateway never may.

use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The worker that runs now, and its number.
type Worker = Arc<Mutex<(u32, u64)>>;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let done = match args.first().map(String::as_str) {
        Some("serve") => keep(&args),
        // A worker lives as long as its keeper's end of the pipe.
        Some("worker") => std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).map(drop),
        _ => Err(std::io::Error::other("usage: stand-in serve --state-dir DIR --listen ADDR --admin ADDR")),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _nobody_reads = writeln!(std::io::stderr(), "ERROR stand-in: {error}");
            ExitCode::FAILURE
        }
    }
}

fn keep(args: &[String]) -> std::io::Result<()> {
    let value = |name: &str| args.iter().skip_while(|arg| *arg != name).nth(1).map_or("", String::as_str);
    let state = Path::new(value("--state-dir"));
    let (mcp, admin) = (bind(value("--listen"))?, bind(value("--admin"))?);
    if args.iter().any(|arg| arg == "--orphan") {
        Command::new("sleep").arg(ORPHAN_S).spawn()?;
    }
    std::fs::write(state.join("admin.token"), TOKEN)?;
    let said = json!({"mcp": mcp.local_addr()?, "admin": admin.local_addr()?, "keeper": std::process::id()});
    std::fs::write(state.join("gateway.json"), said.to_string())?;
    writeln!(std::io::stderr(), "2026-11-30T00:00:00Z  WARN stand-in: serves nothing")?;
    let worker = Worker::default();
    let shown = Arc::clone(&worker);
    std::thread::spawn(move || admin.incoming().flatten().for_each(|stream| drop(answer(stream, &shown))));
    for number in 1..=WORKERS_MAX {
        let mut child = spawn_worker()?;
        *worker.lock().unwrap_or_else(PoisonError::into_inner) = (child.id(), number);
        // Waiting would close the pipe, and with it the worker's life.
        let _life = child.stdin.take();
        child.wait()?;
    }
    Err(std::io::Error::other("too many workers"))
}

/// Binds an address that may have been in use a moment ago, as the gateway does.
fn bind(address: &str) -> std::io::Result<TcpListener> {
    for _ in 1..BIND_TRIES_MAX {
        match TcpListener::bind(address) {
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => std::thread::sleep(BIND_PAUSE),
            bound => return bound,
        }
    }
    TcpListener::bind(address)
}

fn spawn_worker() -> std::io::Result<Child> {
    Command::new(std::env::current_exe()?).arg("worker").stdin(Stdio::piped()).spawn()
}

/// `/readyz` is for everybody, everything else needs the token.
fn answer(stream: TcpStream, worker: &Worker) -> std::io::Result<()> {
    stream.set_read_timeout(Some(READ_BOUND))?;
    let mut head = Vec::new();
    for line in BufReader::new((&stream).take(HEAD_BYTES_MAX)).lines() {
        let line = line?;
        if line.is_empty() {
            break;
        }
        head.push(line);
    }
    let (pid, number) = *worker.lock().unwrap_or_else(PoisonError::into_inner);
    let known = head.iter().any(|line| line.to_ascii_lowercase() == format!("authorization: bearer {TOKEN}"));
    let asked = head.first().map_or("", String::as_str);
    let (status, body) = match (asked.starts_with("GET /readyz "), known) {
        (true, _) => ("200 OK", Value::Null),
        (false, true) => ("200 OK", json!({"worker": {"pid": pid, "number": number}})),
        (false, false) => ("401 Unauthorized", Value::Null),
    };
    let body = body.to_string();
    write!(&stream, "HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len())
}

const TOKEN: &str = "of-the-stand-in";
const ORPHAN_S: &str = "120";
const WORKERS_MAX: u64 = 100;
const BIND_TRIES_MAX: u32 = 50;
const BIND_PAUSE: Duration = Duration::from_millis(20);
const HEAD_BYTES_MAX: u64 = 64 * 1024;
const READ_BOUND: Duration = Duration::from_secs(5);
