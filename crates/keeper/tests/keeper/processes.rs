//! The processes that play the keeper and the worker.

use std::ffi::OsString;
use std::fs;
use std::io::Write as _;
use std::net::TcpListener;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use mainstay_keeper::client::{Attached, Custody, Order};
use mainstay_keeper::{Plan, Renewed, acquire_lock, run};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::desk::Desk;

/// Set where this binary plays a part.
pub(crate) const STATE_DIR_VARIABLE: &str = "KEEPER_TEST_STATE_DIR";

fn state_dir() -> Option<PathBuf> {
    #[expect(clippy::disallowed_methods, reason = "how a process of the test is told its part")]
    std::env::var_os(STATE_DIR_VARIABLE).map(PathBuf::from)
}

fn log_to_stderr() {
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::DEBUG)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
}

/// The keeper, when it is started as such, or executed in the place of another.
#[test]
fn play_keeper() {
    let Some(state_dir) = state_dir() else { return };
    log_to_stderr();
    let renewed = Renewed::take().unwrap();
    let (lock, listeners) = match &renewed {
        Some(renewed) => (renewed.lock().unwrap(), Vec::new()),
        None => {
            let (mcp, admin) = (TcpListener::bind("127.0.0.1:0").unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
            publish(&state_dir, "mcp-port", &mcp.local_addr().unwrap().port().to_string());
            publish(&state_dir, "port", &admin.local_addr().unwrap().port().to_string());
            let lock = acquire_lock(&state_dir, "probe").unwrap();
            (lock, vec![("mcp".to_owned(), mcp), ("admin".to_owned(), admin)])
        }
    };
    let ended = run(Plan {
        worker: state_dir.join("running"),
        worker_args: part("processes::play_worker"),
        program: state_dir.join("program"),
        rehearse_args: vec!["rehearse".into()],
        serve_args: part("processes::play_keeper"),
        version: version(),
        listeners,
        settings: b"settings\0of the test".to_vec(),
        state_dir: state_dir.clone(),
        lock: Arc::new(lock),
        drain_bound: Duration::from_millis(1500),
        handover_bound: Duration::from_millis(1500),
        leave_bound: Duration::from_millis(3000),
        renewed,
        notify: Box::new(|_| ()),
        alive_every: None,
    });
    publish(&state_dir, "ended", &format!("{:?}", ended.unwrap()));
}

fn part(name: &str) -> Vec<OsString> {
    ["--exact", name, "--nocapture", "--test-threads=1"].map(Into::into).into()
}

/// What stands behind the hyphen in the name of the program's file, or `1.0`.
fn version() -> String {
    let file = fs::read_link("/proc/self/exe").unwrap();
    let name = file.file_name().unwrap().to_str().unwrap();
    name.strip_prefix("program-").unwrap_or("1.0").to_owned()
}

/// A worker, when it is started as such.
#[test]
fn play_worker() {
    let Some(state_dir) = state_dir() else { return };
    log_to_stderr();
    // The keeper's own limit may be what is tested.
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
    let mut starts = fs::OpenOptions::new().append(true).create(true).open(state_dir.join("starts")).unwrap();
    writeln!(starts, "{}", std::process::id()).unwrap();
    let mode = fs::read_to_string(state_dir.join("mode")).unwrap_or_default();
    if mode == "crash" {
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(work(&state_dir, &mode));
    runtime.shutdown_background();
}

async fn work(state_dir: &Path, mode: &str) {
    let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let Attached { custody, mut welcome, mut orders } = Custody::attach(socket).await.unwrap();
    assert_eq!(welcome.keeper.pid(), std::os::unix::process::parent_id());
    let names: Vec<&str> = welcome.listeners.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["mcp", "admin"]);
    match welcome.settings.split(|byte| *byte == b' ').next().unwrap() {
        b"crash" => std::process::exit(7),
        b"late" => std::future::pending().await,
        b"wait" => wait(&custody, None).await,
        _ => {}
    }
    if mode == "waits" {
        wait(&custody, Some(&state_dir.join("go"))).await;
    }
    let admin = listener(welcome.listeners.pop().unwrap().1);
    let mcp = listener(welcome.listeners.pop().unwrap().1);
    let desk = Arc::new(Desk::new(custody, welcome));
    // Whoever talks to this worker talks to one that is ready.
    desk.custody.ready().await;
    let accepting = [tokio::spawn(Arc::clone(&desk).accept(admin)), tokio::spawn(Arc::clone(&desk).hold_idle(mcp))];
    loop {
        let order = orders.recv().await.unwrap_or(Order::Detached);
        publish(state_dir, "order", &format!("{order:?}"));
        match (order, mode) {
            (Order::HandOver, "dies") => std::process::abort(),
            (Order::HandOver, "stubborn") => {}
            (Order::HandOver, _) => {
                accepting.iter().for_each(tokio::task::JoinHandle::abort);
                desk.hand_over().await;
                match mode {
                    "dies while handing over" => std::process::abort(),
                    "lingers" => {}
                    _ => return desk.finish().await,
                }
            }
            (Order::Drain { .. }, "stubborn") => {}
            (Order::Drain { .. } | Order::Detached, _) => return,
        }
    }
}

/// Says again and again that there is something to wait for, until that file is there.
async fn wait(custody: &Custody, file: Option<&Path>) {
    while !file.is_some_and(Path::exists) {
        custody.waiting().await;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn listener(socket: OwnedFd) -> tokio::net::TcpListener {
    let listener = TcpListener::from(socket);
    listener.set_nonblocking(true).unwrap();
    tokio::net::TcpListener::from_std(listener).unwrap()
}

/// Writes a file that a test waits for.
fn publish(state_dir: &Path, name: &str, contents: &str) {
    fs::write(state_dir.join(format!(".{name}")), contents).unwrap();
    fs::rename(state_dir.join(format!(".{name}")), state_dir.join(name)).unwrap();
}
