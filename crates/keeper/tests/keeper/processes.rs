//! The processes that play the keeper and the worker.

use std::collections::HashMap;
use std::fs;
use std::io::Write as _;
use std::net::TcpListener;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mainstay_keeper::client::{Attached, ChildEvent, Custody, Order};
use mainstay_keeper::{CallTag, ChildId, Plan, Spawn, acquire_lock, run};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::sync::{Mutex, mpsc};

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

/// The keeper, when it is started as such.
#[test]
fn play_keeper() {
    let Some(state_dir) = state_dir() else { return };
    log_to_stderr();
    let _lock = acquire_lock(&state_dir, "probe").unwrap();
    let (mcp, admin) = (TcpListener::bind("127.0.0.1:0").unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
    publish(&state_dir, "port", &admin.local_addr().unwrap().port().to_string());
    let ended = run(Plan {
        worker: std::env::current_exe().unwrap(),
        worker_args: ["--exact", "processes::play_worker", "--nocapture", "--test-threads=1"].map(Into::into).into(),
        listeners: vec![("mcp".to_owned(), mcp), ("admin".to_owned(), admin)],
        settings: b"settings\0of the test".to_vec(),
        state_dir: state_dir.clone(),
        drain_bound: Duration::from_millis(1500),
        notify: Box::new(|_| ()),
        alive_every: None,
    });
    publish(&state_dir, "ended", &format!("{:?}", ended.unwrap()));
}

/// A worker, when it is started as such.
#[test]
fn play_worker() {
    let Some(state_dir) = state_dir() else { return };
    log_to_stderr();
    let mut starts = fs::OpenOptions::new().append(true).create(true).open(state_dir.join("starts")).unwrap();
    writeln!(starts, "{}", std::process::id()).unwrap();
    let mode = fs::read_to_string(state_dir.join("mode")).unwrap_or_default();
    if mode == "crash" {
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(work(&state_dir, mode == "stubborn"));
    runtime.shutdown_background();
}

async fn work(state_dir: &Path, is_stubborn: bool) {
    let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let Attached { custody, mut welcome, mut orders } = Custody::attach(socket).await.unwrap();
    assert_eq!(welcome.settings, b"settings\0of the test");
    assert_eq!(welcome.keeper.pid(), std::os::unix::process::parent_id());
    let names: Vec<&str> = welcome.listeners.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["mcp", "admin"]);
    let (_, admin) = welcome.listeners.pop().unwrap();
    let admin = TcpListener::from(admin);
    admin.set_nonblocking(true).unwrap();
    let admin = tokio::net::TcpListener::from_std(admin).unwrap();

    let mut held = String::new();
    let (mut events, mut open) = (HashMap::new(), HashMap::new());
    for child in welcome.children {
        let label = String::from_utf8(child.label).unwrap();
        let (id, pid) = (child.child, child.identity.pid());
        held.push_str(&format!("{id} {label} {pid} {} {};", child.frames_accepted, child.frames_written));
        open.insert(child.child, child.open);
        events.insert(child.child, Arc::new(Mutex::new(child.events)));
    }
    let desk = Arc::new(Desk { custody, number: welcome.worker_number, held, open, events: Mutex::new(events) });
    let serving = Arc::clone(&desk);
    tokio::spawn(async move {
        loop {
            let (client, _) = admin.accept().await.unwrap();
            tokio::spawn(answer(Arc::clone(&serving), client));
        }
    });
    desk.custody.ready().await;
    loop {
        let order = orders.recv().await.unwrap_or(Order::Detached);
        publish(state_dir, "order", &format!("{order:?}"));
        if !is_stubborn || order == Order::Detached {
            return;
        }
    }
}

/// Writes a file that a test waits for.
fn publish(state_dir: &Path, name: &str, contents: &str) {
    fs::write(state_dir.join(format!(".{name}")), contents).unwrap();
    fs::rename(state_dir.join(format!(".{name}")), state_dir.join(name)).unwrap();
}

/// Does for a test what it asks for, a line at a time.
struct Desk {
    custody: Custody,
    number: u64,
    held: String,
    open: HashMap<ChildId, Vec<CallTag>>,
    events: Mutex<HashMap<ChildId, Arc<Mutex<mpsc::Receiver<ChildEvent>>>>>,
}

async fn answer(desk: Arc<Desk>, client: TcpStream) {
    let (reader, mut writer) = client.into_split();
    let mut lines = BufReader::new(reader).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let mut reply = desk.obey(&line).await;
        reply.push('\n');
        if writer.write_all(reply.as_bytes()).await.is_err() {
            return;
        }
    }
}

impl Desk {
    async fn obey(&self, line: &str) -> String {
        let (command, rest) = line.split_once(' ').unwrap_or((line, ""));
        let (first, text) = rest.split_once(' ').unwrap_or((rest, ""));
        let child = ChildId::new(first.parse().unwrap_or_default());
        let number = text.parse().unwrap_or_default();
        match command {
            "worker" => format!("{} {}", std::process::id(), self.number),
            "held" => self.held.clone(),
            "spawn" => self.spawn(first, text).await,
            "abandon" => {
                let spawning = self.spawn(first, text);
                tokio::pin!(spawning);
                let polled = futures_poll_once(spawning.as_mut()).await;
                format!("{}", polled.is_none())
            }
            "write" => format!("{:?}", self.custody.write(child, Bytes::copy_from_slice(text.as_bytes())).await),
            "fill" => format!("{:?}", self.custody.write(child, Bytes::from(vec![b'x'; number])).await),
            "next" => self.next(child).await,
            "acknowledge" => {
                self.custody.acknowledge(child, 0..=number as u64);
                String::new()
            }
            "acknowledge-only" => {
                self.custody.acknowledge(child, number as u64..=number as u64);
                String::new()
            }
            "call" => {
                let (tag, text) = text.split_once(' ').unwrap();
                let frame = Bytes::copy_from_slice(text.as_bytes());
                format!("{:?}", self.custody.write_call(child, tag_of(tag), frame).await)
            }
            "calls" => {
                for tag in 0..number {
                    self.custody.write_call(child, tag_of(&tag.to_string()), Bytes::from_static(b"x")).await.unwrap();
                }
                String::new()
            }
            "settle" => {
                self.custody.settle(child, &[tag_of(text)]);
                String::new()
            }
            "open" => {
                let open = self.open.get(&child).map(Vec::as_slice).unwrap_or_default();
                open.iter().map(|tag| u128::from_be_bytes(tag.to_bytes()).to_string()).collect::<Vec<_>>().join(" ")
            }
            "stop" => {
                self.custody.stop(child, Duration::from_millis(number as u64)).await;
                String::new()
            }
            "forget" => {
                self.custody.forget(child).await;
                String::new()
            }
            "stderr" => String::from_utf8_lossy(&self.custody.stderr_tail(child).await).replace('\n', "|"),
            "shutdown" => {
                self.custody.shutdown(first == "retire").await;
                String::new()
            }
            other => format!("what is {other}?"),
        }
    }

    /// `spawn MARKER SCRIPT`, or `spawn MARKER !PROGRAM CWD`.
    async fn spawn(&self, marker: &str, script: &str) -> String {
        let (program, args, cwd) = match script.strip_prefix('!') {
            Some(rest) => {
                let (program, cwd) = rest.split_once(' ').unwrap();
                (program, vec![], Some(PathBuf::from(cwd)))
            }
            None => ("sh", vec!["-c".into(), script.into()], None),
        };
        let env = vec![("PATH".into(), "/usr/local/bin:/usr/bin:/bin".into()), ("GIVEN".into(), "yes".into())];
        let spawn = Spawn {
            label: format!("label-{marker}").into_bytes(),
            name: "probe".to_owned(),
            program: program.into(),
            args,
            env,
            cwd,
            marker: marker.to_owned(),
        };
        match self.custody.spawn(spawn).await {
            Ok(spawned) => {
                let reply = format!("{} {}", spawned.child, spawned.identity.pid());
                self.events.lock().await.insert(spawned.child, Arc::new(Mutex::new(spawned.events)));
                reply
            }
            Err(error) => format!("error {error}"),
        }
    }

    async fn next(&self, child: ChildId) -> String {
        let Some(events) = self.events.lock().await.get(&child).cloned() else {
            return "no such child".to_owned();
        };
        let mut events = events.lock().await;
        loop {
            match events.recv().await {
                Some(ChildEvent::Frame { number, bytes }) => {
                    return format!("frame {number} {}", String::from_utf8_lossy(&bytes));
                }
                Some(ChildEvent::Oversize { number, head, tail, bytes }) => {
                    return format!("oversize {number} {bytes} {} {}", head.len(), tail.len());
                }
                Some(ChildEvent::Written { .. }) => {}
                Some(ChildEvent::Exited(exit)) => return format!("{exit:?}"),
                None => return "end".to_owned(),
            }
        }
    }
}

fn tag_of(text: &str) -> CallTag {
    CallTag::from_bytes(text.parse::<u128>().unwrap().to_be_bytes())
}

/// Polls a future once and leaves it at that.
async fn futures_poll_once<F: Future + Unpin>(mut future: F) -> Option<F::Output> {
    std::future::poll_fn(|context| {
        std::task::Poll::Ready(match std::pin::Pin::new(&mut future).poll(context) {
            std::task::Poll::Ready(output) => Some(output),
            std::task::Poll::Pending => None,
        })
    })
    .await
}
