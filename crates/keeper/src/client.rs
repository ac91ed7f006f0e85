//! The worker's side: what a worker is given, and what it may ask of the keeper.
//!
//! A worker attaches once, with the socket that is its standard input. It is given the listening sockets, its settings
//! and every child that is held, each with the frames that no worker has acknowledged yet. From then on it reads each
//! child's events from that child's own channel, and tells the keeper what it has dealt with.
//!
//! Delivery is at least once: a frame that was delivered and not acknowledged comes again, with the same number, to the
//! next worker. An acknowledgement travels within [`ACKNOWLEDGE_DELAY_MS`]; a worker that dies before loses it.
//!
//! A frame may be handed over as a call's, under a tag. The keeper names the call to every later worker until one has
//! settled it, so that each of them knows which calls have reached the child's custody and which never did.
//!
//! A worker that is ordered to hand over ([`Order::HandOver`]) stops accepting, passes its idle client connections on and
//! says so. From then on it is *leaving*: its successor is in charge of the children, and it has a bounded time to finish
//! what it is at, and exits.

use std::fmt;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};

use crate::channel::{Inbox, Outbox};
use crate::identity::ProcessIdentity;
use crate::protocol::{
    CONNECTION_READ_BYTES_MAX, FRAME_BYTES_MAX, Holding, PROTOCOL_VERSION, Passing, ProtocolError, ToKeeper, ToWorker,
    Welcoming,
};
use crate::socket::Socket;
use crate::types::{CallTag, ChildId, Exit, Handover, Spawn, SpawnFailure};

use shared::{Reply, Shared};

mod receive;
mod shared;

/// An attached worker's belongings.
#[derive(Debug)]
pub struct Attached {
    /// The way to the keeper.
    pub custody: Custody,
    /// What the keeper handed over.
    pub welcome: Welcome,
    /// What the keeper wants. Its end (`None`) means the same as [`Order::Detached`].
    pub orders: mpsc::Receiver<Order>,
}

/// What the keeper hands to a worker.
pub struct Welcome {
    /// The named listening sockets. They are shared with the keeper, which never accepts on them and never closes them.
    pub listeners: Vec<(String, OwnedFd)>,
    /// The opaque settings of the plan.
    pub settings: Vec<u8>,
    /// The keeper's process.
    pub keeper: ProcessIdentity,
    /// Counts the workers of this keeper, from 1.
    pub worker_number: u64,
    /// The children of earlier workers, those that have ended meanwhile included.
    pub children: Vec<Held>,
    /// Idle connections of clients that the worker before this one has passed on, in its order. Each is this worker's
    /// alone: what it does not go on with is closed by dropping it.
    pub connections: Vec<Connection>,
    /// How the last handover went; `None` if there was none. The successor itself is told that it succeeded, which
    /// becomes true by [`Custody::ready`]: one that does not get there is replaced, and its replacement is told so.
    pub handover: Option<Handover>,
    /// The version of the keeper's program.
    pub keeper_version: String,
}

impl fmt::Debug for Welcome {
    /// Without the settings, which may hold secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.listeners.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("Welcome")
            .field("listeners", &names)
            .field("settings_bytes", &self.settings.len())
            .field("keeper", &self.keeper)
            .field("worker_number", &self.worker_number)
            .field("children", &self.children.len())
            .field("connections", &self.connections.len())
            .field("handover", &self.handover)
            .field("keeper_version", &self.keeper_version)
            .finish()
    }
}

/// A client's connection that goes from one worker to the next between two of its requests.
pub struct Connection {
    /// The listener that it came in by.
    pub listener: String,
    /// Its socket.
    pub socket: OwnedFd,
    /// What was read of its next request already, at most [`CONNECTION_READ_BYTES_MAX`].
    pub read: Bytes,
}

impl fmt::Debug for Connection {
    /// Without what was read, which may hold secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("listener", &self.listener)
            .field("read_bytes", &self.read.len())
            .finish_non_exhaustive()
    }
}

/// A child that was started for an earlier worker.
#[derive(Debug)]
pub struct Held {
    /// Its number.
    pub child: ChildId,
    /// The label it was spawned with.
    pub label: Vec<u8>,
    /// Its process.
    pub identity: ProcessIdentity,
    /// When it was spawned, in milliseconds of Unix time.
    pub spawned_at_unix_ms: u64,
    /// Whole frames handed to its pipe before this worker attached, counted over all workers.
    pub frames_written: u64,
    /// Whole frames taken over by the keeper before this worker attached: written, or about to be. The next
    /// [`Custody::write`] gets the number after this one.
    pub frames_accepted: u64,
    /// The calls that earlier workers handed over and none has settled, oldest first. Their answers are among the
    /// unacknowledged frames, still to come, or will never come if the child has ended.
    pub open: Vec<CallTag>,
    /// All unacknowledged frames in order, then what follows; ends behind [`ChildEvent::Exited`], or with the keeper.
    pub events: mpsc::Receiver<ChildEvent>,
}

/// A child that was started for this worker.
#[derive(Debug)]
pub struct Spawned {
    /// Its number.
    pub child: ChildId,
    /// Its process.
    pub identity: ProcessIdentity,
    /// What it does; ends behind [`ChildEvent::Exited`], or with the keeper.
    pub events: mpsc::Receiver<ChildEvent>,
}

/// What the keeper wants of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Finish calls in flight and exit.
    Drain {
        /// Whether the gateway goes for good: delete upstream sessions, end children.
        retire: bool,
    },
    /// A successor is about to be started: stop accepting, pass idle connections on with
    /// [`Custody::pass_connection`], then say [`Custody::handed_over`]. A worker that does not say so in time is killed.
    HandOver,
    /// The keeper is gone. Nothing can be kept; exit.
    Detached,
}

/// What happened to a child, in order.
#[derive(Clone, PartialEq, Eq)]
pub enum ChildEvent {
    /// It wrote a line.
    Frame {
        /// Counts what it wrote, from 1, oversize lines included.
        number: u64,
        /// The line without its end.
        bytes: Bytes,
    },
    /// It wrote a line above the bound, which was not kept.
    Oversize {
        /// Counts as a frame's number does.
        number: u64,
        /// The line's beginning.
        head: Bytes,
        /// The line's end.
        tail: Bytes,
        /// The line's length.
        bytes: u64,
    },
    /// Frames went into its stdin. Told late and for several at once; not acknowledged.
    Written {
        /// All frames up to this number.
        through: u64,
    },
    /// It has ended, and with it everything it had started. The last event.
    Exited(Exit),
}

impl fmt::Debug for ChildEvent {
    /// Without what the child wrote.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Frame { number, bytes } => write!(f, "Frame({number}, {} bytes)", bytes.len()),
            Self::Oversize { number, bytes, .. } => write!(f, "Oversize({number}, {bytes} bytes)"),
            Self::Written { through } => write!(f, "Written({through})"),
            Self::Exited(exit) => f.debug_tuple("Exited").field(exit).finish(),
        }
    }
}

/// Why a worker could not attach.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The socket failed, or is no Unix stream.
    #[error("could not talk to the keeper")]
    Socket(#[from] io::Error),
    /// The keeper ended the connection.
    #[error("the keeper ended the connection")]
    Ended,
    /// The keeper speaks another version; it must be renewed before this worker can serve.
    #[error("the keeper speaks protocol version {keeper}, this worker {worker}")]
    Version {
        /// The keeper's version.
        keeper: u32,
        /// This worker's version.
        worker: u32,
    },
    /// The keeper said what it must not say.
    #[error("the keeper's greeting is malformed")]
    Protocol(#[from] ProtocolError),
}

/// Why a child was not started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// The keeper could not start it.
    #[error("{failure}: {detail}")]
    Failed {
        /// The sort of failure.
        failure: SpawnFailure,
        /// The object and the system's word for it.
        detail: String,
    },
    /// The keeper is gone.
    #[error("the keeper is gone")]
    Detached,
}

/// Why a handover was refused. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct HandoverRefused {
    /// What stands against it, for people; of several lines if the program that was asked said so much.
    pub reason: String,
}

/// Why a connection was not passed on. It is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PassError {
    /// More than [`CONNECTION_READ_BYTES_MAX`] of the next request was read.
    #[error("more than {CONNECTION_READ_BYTES_MAX} bytes of the next request were read")]
    TooLong,
    /// The keeper is gone, or everything was handed over already.
    #[error("connections are not taken any more")]
    Gone,
}

/// Why a frame was not taken. It has not reached the child and never will.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WriteError {
    /// The child has ended, was forgotten, or the keeper is gone.
    #[error("the child is gone")]
    Gone,
    /// The frame is above [`FRAME_BYTES_MAX`].
    #[error("the frame is longer than {FRAME_BYTES_MAX} bytes")]
    TooLong,
    /// The frame holds a line end, which would make two messages of it (2025-11-25, Transports, stdio).
    #[error("the frame holds a line end")]
    LineEnd,
}

/// The way to the keeper, and through it to the children. Cheap to clone.
#[derive(Clone)]
pub struct Custody {
    shared: Arc<Shared>,
}

impl fmt::Debug for Custody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Custody")
    }
}

impl Custody {
    /// Attaches to the keeper over `socket`, normally a duplicate of standard input, and starts the tasks that serve it.
    ///
    /// # Errors
    /// See [`AttachError`]; all of them are final for this process.
    pub async fn attach(socket: OwnedFd) -> Result<Attached, AttachError> {
        let socket = Socket::new(socket.into())?;
        let mut hello = Outbox::default();
        ToKeeper::Hello { version: PROTOCOL_VERSION, pid: std::process::id() }.encode(&mut hello);
        hello.write_all(&socket).await?;
        let greeting = tokio::time::timeout(GREETING_BOUND, Greeting::read(&socket)).await;
        let greeting = greeting.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        let listeners = greeting.welcome.listeners.into_iter().zip(greeting.listeners).collect();

        let shared = Arc::new(Shared::new(socket));
        let (order_sender, orders) = mpsc::channel(ORDERS_MAX);
        let mut receiver = receive::Receiver::new(Arc::clone(&shared), greeting.inbox, order_sender);
        let children = greeting.children.into_iter().map(|held| receiver.take_over(held)).collect();
        tokio::spawn(receiver.run());
        tokio::spawn(shared::flush(Arc::clone(&shared)));
        let welcome = Welcome {
            listeners,
            settings: greeting.welcome.settings.into(),
            keeper: greeting.welcome.keeper,
            worker_number: greeting.welcome.worker_number,
            children,
            connections: greeting.connections,
            handover: greeting.welcome.handover,
            keeper_version: greeting.welcome.keeper_version,
        };
        Ok(Attached { custody: Self { shared }, welcome, orders })
    }

    /// Says that this worker serves. A worker that doesn't say so in time is replaced.
    pub async fn ready(&self) {
        self.shared.send(&ToKeeper::Ready).await;
    }

    /// Says that this worker can't serve yet for a reason that another could not help either, such as a full disk. Its
    /// time to become ready starts anew, except that of a successor within a handover.
    pub async fn waiting(&self) {
        self.shared.send(&ToKeeper::Waiting).await;
    }

    /// Starts a child.
    ///
    /// If this future is dropped before it resolves, the child is ended again by itself.
    ///
    /// # Errors
    /// [`SpawnError::Failed`] says which file or directory was at fault.
    pub async fn spawn(&self, spawn: Spawn) -> Result<Spawned, SpawnError> {
        if !spawn.is_sendable() {
            let detail = "the command line or the environment is too long".to_owned();
            return Err(SpawnError::Failed { failure: SpawnFailure::Invalid, detail });
        }
        match self.ask(|request| ToKeeper::Spawn { request, spawn }).await {
            Some(Reply::Spawned(spawned)) => Ok(spawned),
            Some(Reply::SpawnFailed(failure, detail)) => Err(SpawnError::Failed { failure, detail }),
            Some(Reply::StderrTail(_) | Reply::Succeeding(_) | Reply::NotSucceeding(_)) | None => {
                Err(SpawnError::Detached)
            }
        }
    }

    /// Hands a frame to the child's stdin and returns its number, counted from 1 over all workers.
    ///
    /// Waits while more than [`STDIN_BYTES_MAX`](crate::STDIN_BYTES_MAX) wait for this child; callers are served in
    /// order. Cancel-safe: a frame is handed over whole or not at all. That the child's pipe has it is told later, by
    /// [`ChildEvent::Written`].
    ///
    /// # Errors
    /// The frame was not taken.
    pub async fn write(&self, child: ChildId, frame: Bytes) -> Result<u64, WriteError> {
        check(&frame)?;
        self.shared.write(child, None, frame).await
    }

    /// [`write`](Self::write) for a frame that is a call: it is open, under `tag`, until it is [settled](Self::settle).
    /// Taken over with the frame or not at all.
    ///
    /// # Errors
    /// The frame was not taken; the call is not open.
    pub async fn write_call(&self, child: ChildId, tag: CallTag, frame: Bytes) -> Result<u64, WriteError> {
        check(&frame)?;
        self.shared.write(child, Some(tag), frame).await
    }

    /// Says that the child's frames with these numbers are dealt with and need not be kept. Others stay, whatever their
    /// number. Never blocks.
    pub fn acknowledge(&self, child: ChildId, frames: RangeInclusive<u64>) {
        self.shared.acknowledge(child, frames);
    }

    /// Says that nobody will ask for these calls any more. Never blocks.
    ///
    /// Travels as acknowledgements do, and ahead of those that were said after it: a later worker never finds a call open
    /// whose answer is gone, if the answer is acknowledged only after the call was settled.
    pub fn settle(&self, child: ChildId, calls: &[CallTag]) {
        self.shared.settle(child, calls);
    }

    /// Ends the child: its stdin is closed; after `grace` it is asked to terminate, after `grace` again it is killed,
    /// each time with everything it has started (requirement C1). [`ChildEvent::Exited`] tells when it is done.
    pub async fn stop(&self, child: ChildId, grace: Duration) {
        self.shared.send(&ToKeeper::Stop { child, grace }).await;
    }

    /// Has the keeper drop what it keeps of the child. Meant for a child that has ended; one that runs is killed.
    pub async fn forget(&self, child: ChildId) {
        self.shared.remove(child);
        self.shared.send(&ToKeeper::Forget { child }).await;
    }

    /// The end of what the child wrote to stderr; empty if it or the keeper is gone.
    pub async fn stderr_tail(&self, child: ChildId) -> Bytes {
        match self.ask(|request| ToKeeper::StderrTail { request, child }).await {
            Some(Reply::StderrTail(bytes)) => bytes,
            Some(Reply::Spawned(_) | Reply::SpawnFailed(..) | Reply::Succeeding(_) | Reply::NotSucceeding(_))
            | None => Bytes::new(),
        }
    }

    /// Asks the keeper to stop the gateway. It answers with [`Order::Drain`].
    pub async fn shutdown(&self, retire: bool) {
        self.shared.send(&ToKeeper::Shutdown { retire }).await;
    }

    /// Asks for a successor: a worker of the program that is installed now with `upgrade`, else of the same one with the
    /// settings as they are read now. Returns with those once it is certain to be tried; [`Order::HandOver`] follows.
    ///
    /// # Errors
    /// It was refused: there is one already, the gateway is about to stop, the program that was asked for can't serve or
    /// does not accept the configuration, or nothing has changed ([`UNCHANGED`](crate::UNCHANGED)). Nothing has changed.
    pub async fn succeed(&self, upgrade: bool) -> Result<Bytes, HandoverRefused> {
        self.ask_for_successor(upgrade, false).await
    }

    /// Asks with which settings a successor of the same program would serve, and no more: nothing changes, and no order
    /// follows.
    ///
    /// # Errors
    /// As [`succeed`](Self::succeed).
    pub async fn rehearse(&self) -> Result<Bytes, HandoverRefused> {
        self.ask_for_successor(false, true).await
    }

    async fn ask_for_successor(&self, upgrade: bool, rehearse_only: bool) -> Result<Bytes, HandoverRefused> {
        match self.ask(|request| ToKeeper::Succeed { request, upgrade, rehearse_only }).await {
            Some(Reply::Succeeding(settings)) => Ok(settings),
            Some(Reply::NotSucceeding(reason)) => Err(HandoverRefused { reason }),
            Some(Reply::Spawned(_) | Reply::SpawnFailed(..) | Reply::StderrTail(_)) | None => {
                Err(HandoverRefused { reason: "the keeper is gone".to_owned() })
            }
        }
    }

    /// Passes a client's connection to the worker after this one, between two requests and after
    /// [`Order::HandOver`] alone. Waits for room. The keeper closes what is more than it can hold.
    ///
    /// # Errors
    /// The connection was not passed on, and is closed.
    pub async fn pass_connection(&self, connection: Connection) -> Result<(), PassError> {
        if connection.read.len() > CONNECTION_READ_BYTES_MAX {
            return Err(PassError::TooLong);
        }
        let passing = Passing { listener: connection.listener, read: connection.read };
        let is_sent = self.shared.send_with_fd(&ToKeeper::Connection(passing), connection.socket).await;
        if is_sent { Ok(()) } else { Err(PassError::Gone) }
    }

    /// Says that everything is handed over: everything that was said before goes ahead of it, acknowledgements and
    /// settled calls included, and what is said afterwards is dropped. The worker is leaving from then on.
    ///
    /// Children are its successor's: their events end as if the keeper were gone, behind what their channels hold, and
    /// whatever waits for an answer gets none. Orders still come. Returns once the word is in the keeper's socket.
    pub async fn handed_over(&self) {
        self.shared.hand_over();
        self.shared.said().await;
    }

    async fn ask(&self, message: impl FnOnce(u64) -> ToKeeper) -> Option<Reply> {
        let (sender, receiver) = oneshot::channel();
        let permit = self.shared.request_permit().await?;
        let request = self.shared.expect_reply(sender)?;
        self.shared.send(&message(request)).await;
        let reply = receiver.await.ok();
        drop(permit);
        reply
    }
}

fn check(frame: &Bytes) -> Result<(), WriteError> {
    if frame.len() > FRAME_BYTES_MAX {
        return Err(WriteError::TooLong);
    }
    if frame.contains(&b'\n') {
        return Err(WriteError::LineEnd);
    }
    Ok(())
}

/// What the keeper sends before it goes live.
struct Greeting {
    welcome: Welcoming,
    listeners: Vec<OwnedFd>,
    children: Vec<Holding>,
    connections: Vec<Connection>,
    inbox: Inbox,
}

impl Greeting {
    async fn read(socket: &Socket) -> Result<Self, AttachError> {
        let mut inbox = Inbox::default();
        let first = next(socket, &mut inbox).await?;
        if let ToWorker::Refused { version } = first {
            return Err(AttachError::Version { keeper: version, worker: PROTOCOL_VERSION });
        }
        let ToWorker::Welcome(welcome) = first else {
            return Err(ProtocolError::Order.into());
        };
        let mut listeners = Vec::new();
        for _ in &welcome.listeners {
            listeners.push(inbox.take_fd()?.ok_or(ProtocolError::Field("listeners"))?);
        }
        let (mut children, mut connections) = (Vec::new(), Vec::new());
        loop {
            let message = next(socket, &mut inbox).await?;
            if let ToWorker::Held(held) = message {
                children.push(held);
            } else if let ToWorker::Connection(Passing { listener, read }) = message {
                match inbox.take_fd()? {
                    Some(socket) => connections.push(Connection { listener, socket, read }),
                    None => tracing::warn!(listener, "no descriptor is left for a connection that was passed on"),
                }
            } else if message == ToWorker::Begin {
                return Ok(Self { welcome, listeners, children, connections, inbox });
            } else {
                return Err(ProtocolError::Order.into());
            }
        }
    }
}

/// The keeper's next message.
async fn next(socket: &Socket, inbox: &mut Inbox) -> Result<ToWorker, AttachError> {
    loop {
        if let Some(message) = inbox.next_message()? {
            return Ok(ToWorker::decode(message)?);
        }
        if inbox.fill(socket).await? == 0 {
            return Err(AttachError::Ended);
        }
    }
}

/// How long an acknowledgement may wait for company on its way, in milliseconds.
pub const ACKNOWLEDGE_DELAY_MS: u64 = 5;

/// How long the keeper may take to greet.
const GREETING_BOUND: Duration = Duration::from_secs(30);

/// Orders that may wait to be read. The keeper gives fewer in its life.
const ORDERS_MAX: usize = 8;

/// A lock whose holder panicked is still good: nothing is left half done under it.
fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
