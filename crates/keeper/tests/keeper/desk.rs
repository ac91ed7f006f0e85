//! What a worker does for a test.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use mainstay_keeper::client::{ChildEvent, Connection, Custody, Welcome};
use mainstay_keeper::{CallTag, ChildId, Handover, Spawn};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, RwLock, mpsc};

/// Does for a test what it asks for, a line at a time.
pub(crate) struct Desk {
    pub(crate) custody: Custody,
    number: u64,
    settings: String,
    version: String,
    handover: String,
    held: String,
    open: HashMap<ChildId, Vec<CallTag>>,
    events: Mutex<HashMap<ChildId, Arc<Mutex<mpsc::Receiver<ChildEvent>>>>>,
    /// Connections between two requests.
    idle: Mutex<Vec<Connection>>,
    /// Held to write down and acknowledge a frame, or for good.
    consuming: Mutex<()>,
    /// Held while a test's wish is fulfilled.
    busy: RwLock<()>,
}

async fn answer(desk: Arc<Desk>, client: TcpStream) {
    let (reader, mut writer) = client.into_split();
    let mut lines = BufReader::new(reader).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let _busy = desk.busy.read().await;
        let mut reply = desk.obey(&line).await;
        reply.push('\n');
        if writer.write_all(reply.as_bytes()).await.is_err() {
            return;
        }
    }
}

impl Desk {
    pub(crate) fn new(custody: Custody, welcome: Welcome) -> Self {
        let mut held = String::new();
        let (mut events, mut open) = (HashMap::new(), HashMap::new());
        for child in welcome.children {
            let label = String::from_utf8(child.label).unwrap();
            let (id, pid) = (child.child, child.identity.pid());
            held.push_str(&format!("{id} {label} {pid} {} {};", child.frames_accepted, child.frames_written));
            open.insert(child.child, child.open);
            events.insert(child.child, Arc::new(Mutex::new(child.events)));
        }
        Self {
            custody,
            number: welcome.worker_number,
            settings: String::from_utf8_lossy(&welcome.settings).into_owned(),
            version: welcome.keeper_version,
            handover: welcome.handover.map_or_else(String::new, |handover| {
                let Handover { outcome, upgrade, from_version, to_version, reason, .. } = handover;
                format!("{outcome:?} upgrade={upgrade} from={from_version} to={to_version} reason={reason}")
            }),
            held,
            open,
            events: Mutex::new(events),
            idle: Mutex::new(welcome.connections),
            consuming: Mutex::new(()),
            busy: RwLock::new(()),
        }
    }

    /// Talks to tests.
    pub(crate) async fn accept(self: Arc<Self>, admin: TcpListener) {
        loop {
            let (client, _) = admin.accept().await.unwrap();
            tokio::spawn(answer(Arc::clone(&self), client));
        }
    }

    /// Takes clients' connections and what they say first, and leaves it at that.
    pub(crate) async fn hold_idle(self: Arc<Self>, mcp: TcpListener) {
        loop {
            let (mut client, _) = mcp.accept().await.unwrap();
            let mut read = BytesMut::new();
            client.read_buf(&mut read).await.unwrap();
            let socket = client.into_std().unwrap().into();
            self.idle.lock().await.push(Connection { listener: "mcp".to_owned(), socket, read: read.freeze() });
        }
    }

    /// Passes on what can be passed on, and says so.
    pub(crate) async fn hand_over(&self) {
        // What was written down is acknowledged, and nothing is written down any more.
        std::mem::forget(self.consuming.lock().await);
        for connection in self.idle.lock().await.drain(..) {
            self.custody.pass_connection(connection).await.unwrap();
        }
        self.custody.handed_over().await;
    }

    /// Returns once all wishes are fulfilled.
    pub(crate) async fn finish(&self) {
        let _nobody = self.busy.write().await;
    }

    /// Writes the child's lines down, one by one, as long as this worker is in charge.
    async fn consume(self: Arc<Self>, child: ChildId, file: PathBuf) {
        let events = self.events.lock().await.get(&child).cloned().unwrap();
        let mut events = events.lock().await;
        while let Some(event) = events.recv().await {
            let ChildEvent::Frame { number, bytes } = event else { continue };
            let _turn = self.consuming.lock().await;
            let mut file = std::fs::OpenOptions::new().append(true).create(true).open(&file).unwrap();
            std::io::Write::write_all(&mut file, &[&bytes[..], b"\n"].concat()).unwrap();
            self.custody.acknowledge(child, number..=number);
        }
    }

    async fn ask_for_successor(&self, command: &str, upgrade: bool) -> String {
        let is_rehearsal = command == "rehearse";
        let asked = if is_rehearsal { self.custody.rehearse().await } else { self.custody.succeed(upgrade).await };
        match asked {
            Ok(settings) if is_rehearsal => format!("would be {}", String::from_utf8_lossy(&settings)),
            Ok(_settings) => "granted".to_owned(),
            Err(refused) => format!("refused {}", refused.reason.replace('\n', "|")),
        }
    }

    async fn obey(self: &Arc<Self>, line: &str) -> String {
        let (command, rest) = line.split_once(' ').unwrap_or((line, ""));
        let (first, text) = rest.split_once(' ').unwrap_or((rest, ""));
        let child = ChildId::new(first.parse().unwrap_or_default());
        let number = text.parse().unwrap_or_default();
        match command {
            "succeed" | "rehearse" => self.ask_for_successor(command, first == "upgrade").await,
            "idle" => self.idle.lock().await.len().to_string(),
            "greet" => self.greet().await,
            "consume" => {
                tokio::spawn(Arc::clone(self).consume(child, PathBuf::from(text)));
                String::new()
            }
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
            other => self.tell(other),
        }
    }

    /// What this worker was told itself.
    fn tell(&self, what: &str) -> String {
        match what {
            "worker" => format!("{} {}", std::process::id(), self.number),
            "held" => self.held.clone(),
            "settings" => self.settings.replace('\0', " "),
            "version" => self.version.clone(),
            "handover" => self.handover.replace('\n', "|"),
            other => format!("what is {other}?"),
        }
    }

    /// Answers all idle connections with what was read of them.
    async fn greet(&self) -> String {
        let mut idle = self.idle.lock().await;
        for connection in idle.drain(..) {
            let mut stream = TcpStream::from_std(connection.socket.into()).unwrap();
            let hello =
                format!("{} {} {}\n", self.number, connection.listener, String::from_utf8_lossy(&connection.read));
            stream.write_all(hello.as_bytes()).await.unwrap();
        }
        String::new()
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
