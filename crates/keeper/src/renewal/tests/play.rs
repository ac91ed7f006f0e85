//! The process that plays the keeper: it does what a test asks for, a line at a time, and has no workers.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use rustix::process::{Resource, child_subreaper, getpgrp, getpid, getrlimit, kill_process, set_child_subreaper};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::runtime::LocalOptions;
use tokio::signal::unix::{SignalKind, signal};

use super::super::*;
use crate::child::start;
use crate::identity::{Signal, raw_pid};
use crate::lock::acquire_lock;
use crate::orphans;
use crate::protocol::ToWorker;
use crate::state::ensure_private_dir;
use crate::types::{CallTag, ChildId, Spawn};

/// Set where this binary plays the keeper.
pub(super) const STATE_DIR_VARIABLE: &str = "RENEWAL_TEST_STATE_DIR";

#[test]
fn play_keeper() {
    #[expect(clippy::disallowed_methods, reason = "how a process of the test is told its part")]
    let Some(state_dir) = std::env::var_os(STATE_DIR_VARIABLE).map(PathBuf::from) else { return };
    let renewed = taken(&state_dir);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build_local(LocalOptions::default());
    runtime.unwrap().block_on(keep(&state_dir, renewed));
}

/// Takes over, unless a file says that this program is to fail once.
fn taken(state_dir: &Path) -> Option<Renewed> {
    let fault = fs::read_to_string(state_dir.join("fault")).unwrap_or_default();
    let _ = fs::remove_file(state_dir.join("fault"));
    match fault.as_str() {
        "" => Renewed::take().unwrap(),
        "signals" => {
            for how in [Signal::TERM, Signal::HUP, Signal::TERM] {
                kill_process(getpid(), how).unwrap();
            }
            Renewed::take().unwrap()
        }
        "refuse" => unreachable_after(Renewed::take().unwrap().unwrap().go_back("the new one says no")),
        fault => {
            // What this program reads is damaged, what it gives back is whole.
            let (mut parcel, fds) = Parcel::receive().unwrap().unwrap();
            let (format, whole) = (parcel.envelope.format, parcel.state.try_clone().unwrap());
            match fault {
                "format" => parcel.envelope.format += 1,
                "state" => parcel.state = damaged(&whole),
                other => panic!("what is {other}?"),
            }
            let error = open(&parcel, &fds).err().unwrap();
            (parcel.envelope.format, parcel.state) = (format, whole);
            let left = Left { parcel, fds, _signals: HeldSignals::hold().unwrap() };
            unreachable_after(Unusable { error, left: Some(Box::new(left)) }.go_back())
        }
    }
}

fn unreachable_after(error: RenewalError) -> Option<Renewed> {
    panic!("{error}: {:?}", std::error::Error::source(&error));
}

fn damaged(whole: &OwnedFd) -> OwnedFd {
    let mut bytes = Vec::new();
    let mut file = File::from(whole.try_clone().unwrap());
    file.rewind().unwrap();
    io::Read::read_to_end(&mut file, &mut bytes).unwrap();
    bytes.truncate(bytes.len() / 2);
    let mut file = File::from(memfd_create("damaged", MemfdFlags::CLOEXEC).unwrap());
    file.write_all(&bytes).unwrap();
    file.into()
}

/// A keeper and what a run loop would know.
struct Desk {
    keeper: Rc<Keeper>,
    lock: OwnedFd,
    /// TERM counts one, HUP a hundred.
    signals: Rc<Cell<u32>>,
    renewals: u64,
    came_back: Option<String>,
    connections: Vec<Passed<OwnedFd>>,
}

async fn keep(state_dir: &Path, renewed: Option<Renewed>) {
    let (desk, held) = match renewed {
        Some(renewed) => go_on(state_dir, renewed),
        None => (begin(state_dir), None),
    };
    let child_signals = signal(SignalKind::child()).unwrap();
    for (kind, weight) in [(SignalKind::terminate(), 1), (SignalKind::hangup(), 100)] {
        let (mut incoming, counted) = (signal(kind).unwrap(), Rc::clone(&desk.signals));
        tokio::task::spawn_local(async move {
            while incoming.recv().await.is_some() {
                counted.set(counted.get() + weight);
            }
        });
    }
    drop(held);
    tokio::task::spawn_local(orphans::reap(Rc::clone(&desk.keeper), child_signals));
    let listener = desk.keeper.listeners[0].1.try_clone().unwrap();
    listener.set_nonblocking(true).unwrap();
    let listener = tokio::net::TcpListener::from_std(listener).unwrap();
    let mut desk = desk;
    loop {
        serve(&mut desk, listener.accept().await.unwrap().0).await;
    }
}

fn begin(state_dir: &Path) -> Desk {
    ensure_private_dir(state_dir).unwrap();
    let lock = acquire_lock(state_dir, "probe").unwrap();
    for dir in ["children", "logs"] {
        ensure_private_dir(&state_dir.join(dir)).unwrap();
    }
    set_child_subreaper(Some(getpid())).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    fs::write(state_dir.join(".port"), listener.local_addr().unwrap().port().to_string()).unwrap();
    fs::rename(state_dir.join(".port"), state_dir.join("port")).unwrap();
    let listeners = vec![("desk".to_owned(), listener), ("idle".to_owned(), TcpListener::bind("127.0.0.1:0").unwrap())];
    let identity = ProcessIdentity::of_self().unwrap();
    let keeper = Rc::new(Keeper::new(identity, listeners, b"settings".to_vec(), state_dir));
    let held = lock.as_fd().try_clone_to_owned().unwrap();
    // The file's note must stay: it is dropped by the end of the process alone.
    std::mem::forget(lock);
    Desk { keeper, lock: held, signals: Rc::default(), renewals: 0, came_back: None, connections: Vec::new() }
}

fn go_on(state_dir: &Path, renewed: Renewed) -> (Desk, Option<HeldSignals>) {
    assert_eq!(renewed.settings(), b"settings");
    let Restored { keeper, course, came_back, signals, .. } = renewed.restore(state_dir).unwrap();
    assert_eq!(&course.handover[..], b"as the run loop writes it");
    let desk = Desk {
        keeper,
        lock: course.lock,
        signals: Rc::new(Cell::new(course.signals)),
        renewals: course.last_worker,
        came_back,
        connections: course.connections,
    };
    (desk, Some(signals))
}

async fn serve(desk: &mut Desk, client: TcpStream) {
    let (reader, mut writer) = client.into_split();
    let mut lines = BufReader::new(reader).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let reply = desk.obey(&line).await;
        if writer.write_all(&reply).await.is_err() {
            return;
        }
    }
}

impl Desk {
    async fn obey(&mut self, line: &str) -> Vec<u8> {
        let (command, rest) = line.split_once(' ').unwrap_or((line, ""));
        let (first, text) = rest.split_once(' ').unwrap_or((rest, ""));
        let id = ChildId::new(first.parse().unwrap_or_default());
        let child = self.keeper.child(id);
        let mut reply = match command {
            "about" => about(),
            "descriptors" => descriptors(),
            "count" => format!("{} {:?}", self.renewals, self.came_back),
            "signals" => self.signals.get().to_string(),
            "children" => self.children(),
            "spawn" => {
                let child = start::start(&self.keeper, &spawn(first, text)).unwrap();
                format!("{} {}", child.id, child.identity.pid())
            }
            "drain" => return drain(&child.unwrap()),
            "acknowledge" => {
                let number = text.parse().unwrap();
                child.unwrap().acknowledge(number..=number);
                String::new()
            }
            "write" => {
                child.unwrap().accept_frame(None, Bytes::copy_from_slice(text.as_bytes())).unwrap();
                String::new()
            }
            "fill" => {
                child.unwrap().accept_frame(None, vec![b'x'; text.parse().unwrap()].into()).unwrap();
                String::new()
            }
            "call" => {
                let tag = CallTag::from_bytes(text.parse::<u128>().unwrap().to_be_bytes());
                child.unwrap().accept_frame(Some(tag), Bytes::from_static(b"call")).unwrap();
                String::new()
            }
            "stop" => {
                child.unwrap().order_end(Duration::from_millis(text.parse().unwrap()));
                String::new()
            }
            "forget" => {
                child.unwrap().forget();
                String::new()
            }
            "keep-connections" => {
                let socket = TcpStream::connect(self.keeper.listeners[1].1.local_addr().unwrap()).await.unwrap();
                let socket = OwnedFd::from(socket.into_std().unwrap());
                for _ in 0..first.parse().unwrap() {
                    let socket = socket.try_clone().unwrap();
                    self.connections.push(Passed {
                        listener: "idle".to_owned(),
                        socket,
                        read: Bytes::from_static(b"GET"),
                    });
                }
                String::new()
            }
            "connections" => {
                assert!(self.connections.iter().all(|passed| passed.read == "GET" && passed.listener == "idle"));
                self.connections.len().to_string()
            }
            "renew" => self.renew(rest, None),
            "renew-after-kill" => self.renew(text, Some(first.parse().unwrap())),
            other => format!("what is {other}?"),
        };
        reply.push('\n');
        reply.into_bytes()
    }

    /// Comes back only if that failed.
    fn renew(&self, program: &str, victim: Option<u32>) -> String {
        let held = HeldSignals::hold().unwrap();
        if let Some(pid) = victim {
            kill_process(raw_pid(pid).unwrap(), Signal::KILL).unwrap();
            while !Stat::read(pid).unwrap().unwrap().is_zombie {
                std::thread::yield_now();
            }
        }
        let own = own_program().unwrap();
        let program = if program.is_empty() { Program::Open(own.as_fd()) } else { Program::Path(Path::new(program)) };
        let args: Vec<OsString> = std::env::args_os().skip(1).collect();
        let course = self.course();
        let error = match save(&self.keeper, course) {
            Ok(saved) => saved.execute(program, &args, &held),
            Err(error) => error,
        };
        format!("{error}: {}", std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default())
    }

    fn course(&self) -> Course<BorrowedFd<'_>> {
        let connections = self.connections.iter().map(|passed| Passed {
            listener: passed.listener.clone(),
            socket: passed.socket.as_fd(),
            read: passed.read.clone(),
        });
        Course {
            lock: self.lock.as_fd(),
            last_worker: self.renewals + 1,
            signals: self.signals.get(),
            respawn: state::RespawnState::default(),
            settings: Bytes::from_static(b"settings"),
            previous_settings: Bytes::new(),
            handover: Bytes::from_static(b"as the run loop writes it"),
            leaving: Vec::new(),
            connections: connections.collect(),
        }
    }

    fn children(&self) -> String {
        let mut told = String::new();
        for child in self.keeper.children() {
            let Some(held) = child.hold_for_next_worker() else { continue };
            let tags = held.open.iter().map(|tag| u128::from_be_bytes(tag.to_bytes()).to_string());
            let tags: Vec<String> = tags.collect();
            let (id, pid, label) = (held.child, held.identity.pid(), String::from_utf8_lossy(&held.label).into_owned());
            let (accepted, written, queued) = (held.frames_accepted, held.frames_written, held.queued_bytes);
            let stderr = String::from_utf8_lossy(&child.stderr_tail()).replace('\n', "|");
            let tags = tags.join(",");
            write!(told, "{id} {pid} {label} {accepted} {written} {queued} [{tags}] [{stderr}];").unwrap();
        }
        told
    }
}

/// Everything that the child has said and was not drained yet: each as a line that tells number and length, and the bytes.
fn drain(child: &crate::child::Child) -> Vec<u8> {
    let mut frames: BTreeMap<u64, Bytes> = BTreeMap::new();
    let mut exit = String::new();
    while let Some(message) = child.next_to_tell() {
        if let ToWorker::Frame { number, bytes, .. } = message {
            frames.insert(number, bytes);
        } else if let ToWorker::Oversize { number, bytes, .. } = message {
            frames.insert(number, format!("oversize {bytes}").into());
        } else if let ToWorker::Exited { exit: how, .. } = message {
            exit = format!("{how:?}");
        }
    }
    let mut reply = format!("{} {exit}\n", frames.len()).into_bytes();
    for (number, bytes) in frames {
        reply.extend_from_slice(format!("{number} {}\n", bytes.len()).as_bytes());
        reply.extend_from_slice(&bytes);
    }
    reply
}

/// What must be the same in every program of this process.
fn about() -> String {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let shown = ["Umask", "Pid", "PPid", "Uid", "Gid"];
    let status = status.lines().filter(|line| shown.iter().any(|name| line.starts_with(&format!("{name}:"))));
    let status: Vec<&str> = status.collect();
    let name = fs::read_to_string("/proc/self/comm").unwrap();
    let args = fs::read_to_string("/proc/self/cmdline").unwrap();
    let variables: Vec<_> = std::env::vars_os().collect();
    let (subreaper, files) = (child_subreaper().unwrap().is_some(), getrlimit(Resource::Nofile));
    let (cwd, stdin) = (std::env::current_dir().unwrap(), fs::read_link("/proc/self/fd/0").unwrap());
    let (group, name) = (getpgrp(), name.trim());
    format!("{name} {status:?} {group:?} {subreaper} {files:?} {cwd:?} {stdin:?} {args:?} {variables:?}")
}

/// The sorts of all open descriptors, and which of them a started program would inherit.
fn descriptors() -> String {
    let mut sorts: BTreeMap<String, usize> = BTreeMap::new();
    let mut inherited = Vec::new();
    for entry in fs::read_dir("/proc/self/fd").unwrap() {
        let entry = entry.unwrap();
        let number: u32 = entry.file_name().to_str().unwrap().parse().unwrap();
        // The one that lists is gone when it is looked at.
        let Ok(link) = fs::read_link(entry.path()) else { continue };
        let sort = link.to_str().unwrap().split(['[', '(']).next().unwrap().to_owned();
        let Ok(details) = fs::read_to_string(format!("/proc/self/fdinfo/{number}")) else { continue };
        let flags = details.lines().find_map(|line| line.strip_prefix("flags:")).unwrap().trim();
        if u32::from_str_radix(flags, 8).unwrap() & OFlags::CLOEXEC.bits() == 0 {
            inherited.push(number);
        }
        *sorts.entry(sort).or_default() += 1;
    }
    inherited.sort_unstable();
    format!("{inherited:?} {sorts:?}")
}

fn spawn(marker: &str, script: &str) -> Spawn {
    Spawn {
        label: format!("label-{marker}").into_bytes(),
        name: "probe".to_owned(),
        program: "sh".into(),
        args: vec!["-c".into(), script.into()],
        env: vec![("PATH".into(), "/usr/local/bin:/usr/bin:/bin".into())],
        cwd: None,
        marker: marker.to_owned(),
    }
}
