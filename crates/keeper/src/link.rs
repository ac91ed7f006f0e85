//! The keeper's end of the socket to one worker.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::coop::consume_budget;
use tokio::time::Instant;

use crate::channel::{Inbox, Outbox};
use crate::child::Child;
use crate::keeper::Keeper;
use crate::passed::Held;
use crate::protocol::{PROTOCOL_VERSION, Passing, ProtocolError, ToKeeper, ToWorker, Welcoming};
use crate::socket::Socket;
use crate::types::ChildId;

/// Why a worker can't be talked to any more.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    #[error("the socket failed")]
    Socket(#[from] io::Error),
    #[error("the worker's message is malformed")]
    Protocol(#[from] ProtocolError),
    #[error("the worker speaks protocol version {worker}, the keeper {PROTOCOL_VERSION}")]
    Version { worker: u32 },
}

/// One worker's connection.
pub(crate) struct Link {
    pub(crate) worker_number: u64,
    socket: Socket,
    outgoing: RefCell<Outgoing>,
    /// Something is to be sent.
    work: Notify,
    is_ready: Cell<bool>,
    /// The worker has said that it serves.
    pub(crate) ready_said: Notify,
    /// The worker has said that it waits for something that another would wait for, too.
    pub(crate) waiting_said: Notify,
    /// The worker was ordered to hand over.
    is_handing_over: Cell<bool>,
    /// It has done so.
    is_leaving: Cell<bool>,
    pub(crate) handed_over_said: Notify,
    /// How many times in a row it was asked for a sign of life and gave none.
    unanswered: Cell<u32>,
    /// A message stands in the socket of which a part is still to come.
    is_mid_message: Cell<bool>,
}

/// What is to be sent, beyond what is encoded already.
#[derive(Default)]
struct Outgoing {
    replies: VecDeque<ToWorker>,
    /// Children of which there is something to tell, each once, in turn.
    offered: VecDeque<ChildId>,
    is_offered: BTreeSet<ChildId>,
    /// Children whose stdin got on.
    written: BTreeSet<ChildId>,
    /// When that must be told at the latest. Once set it comes to pass, needed or not: moving a timer with each message
    /// would cost more than looking in vain now and then.
    tell_written_at: Option<Instant>,
}

impl Link {
    pub(crate) fn new(worker_number: u64, socket: Socket) -> Self {
        Self {
            worker_number,
            socket,
            outgoing: RefCell::default(),
            work: Notify::new(),
            is_ready: Cell::new(false),
            ready_said: Notify::new(),
            waiting_said: Notify::new(),
            is_handing_over: Cell::new(false),
            is_leaving: Cell::new(false),
            handed_over_said: Notify::new(),
            unanswered: Cell::new(0),
            is_mid_message: Cell::new(false),
        }
    }

    /// The connection of a worker that had handed over before the keeper was renewed.
    pub(crate) fn leaving(worker_number: u64, socket: Socket) -> Self {
        let link = Self::new(worker_number, socket);
        link.is_leaving.set(true);
        link
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.is_ready.get()
    }

    pub(crate) fn set_ready(&self) {
        self.is_ready.set(true);
        self.ready_said.notify_one();
    }

    /// Orders the worker to finish and exit.
    pub(crate) fn drain(&self, retire: bool) {
        self.say(ToWorker::Drain { retire });
    }

    /// Orders the worker to hand over.
    pub(crate) fn order_handover(&self) {
        self.is_handing_over.set(true);
        self.say(ToWorker::HandOver);
    }

    pub(crate) fn is_handing_over(&self) -> bool {
        self.is_handing_over.get()
    }

    /// The worker has said its last word on children.
    pub(crate) fn leave(&self) {
        self.is_leaving.set(true);
        *self.outgoing.borrow_mut() = Outgoing::default();
        self.handed_over_said.notify_one();
    }

    pub(crate) fn is_leaving(&self) -> bool {
        self.is_leaving.get()
    }

    /// Asks for a sign of life; `false` if that was done in vain too often.
    pub(crate) fn ping(&self) -> bool {
        // Counted, not timed: a keeper that was stopped itself has not listened either.
        if self.unanswered.get() >= PINGS_UNANSWERED_MAX {
            return false;
        }
        self.unanswered.set(self.unanswered.get() + 1);
        self.say(ToWorker::Ping);
        true
    }

    /// The worker lives.
    pub(crate) fn set_answered(&self) {
        self.unanswered.set(0);
    }

    /// Whether a message stands in the socket of which a part is still to come.
    pub(crate) fn is_mid_message(&self) -> bool {
        self.is_mid_message.get()
    }

    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn say(&self, message: ToWorker) {
        self.outgoing.borrow_mut().replies.push_back(message);
        self.work.notify_one();
    }

    /// Answers a request.
    pub(crate) fn reply(&self, reply: ToWorker) -> Result<(), ProtocolError> {
        if self.is_leaving() {
            return Ok(());
        }
        let replies = &mut self.outgoing.borrow_mut().replies;
        // A worker asks for less at a time.
        if replies.len() >= REPLIES_MAX {
            return Err(ProtocolError::Order);
        }
        replies.push_back(reply);
        self.work.notify_one();
        Ok(())
    }

    /// There is something to tell of the child.
    pub(crate) fn offer(&self, child: ChildId) {
        let outgoing = &mut *self.outgoing.borrow_mut();
        if outgoing.is_offered.insert(child) {
            outgoing.offered.push_back(child);
            self.work.notify_one();
        }
    }

    /// The child's stdin got on. That is told along with something else, or after a while, unless it is urgent.
    pub(crate) fn offer_written(&self, child: &Child) {
        let outgoing = &mut *self.outgoing.borrow_mut();
        outgoing.written.insert(child.id);
        let now = Instant::now();
        if child.is_written_urgent() {
            outgoing.tell_written_at = Some(now);
            self.work.notify_one();
        } else if outgoing.tell_written_at.is_none() {
            outgoing.tell_written_at = Some(now + WRITTEN_DELAY);
            self.work.notify_one();
        }
    }

    /// Encodes what is to be sent, up to a bound, so that it goes in few writes.
    fn fill(&self, keeper: &Keeper, outbox: &mut Outbox) {
        let outgoing = &mut *self.outgoing.borrow_mut();
        // Replies go first: a child must be known before it is spoken of.
        for reply in outgoing.replies.drain(..) {
            reply.encode(outbox);
        }
        let now = Instant::now();
        let is_due = outgoing.tell_written_at.is_some_and(|at| at <= now);
        if is_due {
            outgoing.tell_written_at = (!outgoing.written.is_empty()).then(|| now + WRITTEN_DELAY);
        }
        if is_due || !outgoing.offered.is_empty() || !outbox.is_empty() {
            for child in std::mem::take(&mut outgoing.written) {
                if let Some(written) = keeper.child(child).and_then(|child| child.written_to_tell()) {
                    written.encode(outbox);
                }
            }
        }
        while outbox.len() < BATCH_BYTES_MAX
            && let Some(id) = outgoing.offered.pop_front()
        {
            let is_done = keeper.child(id).is_none_or(|child| tell_of(&child, outbox));
            if is_done {
                outgoing.is_offered.remove(&id);
            } else {
                outgoing.offered.push_back(id);
            }
        }
    }
}

/// Encodes one turn's worth of what there is to tell of the child; `true` if that was all.
fn tell_of(child: &Child, outbox: &mut Outbox) -> bool {
    let turn_ends_at = outbox.len() + TURN_BYTES;
    while outbox.len() < turn_ends_at
        && let Some(message) = child.next_to_tell()
    {
        message.encode(outbox);
    }
    !child.has_more_to_tell()
}

/// Greets the worker, hands everything over and serves it until it closes the socket. What it said until then is done.
pub(crate) async fn serve(keeper: Rc<Keeper>, link: Rc<Link>) -> Result<(), LinkError> {
    let mut inbox = Inbox::default();
    let hello = loop {
        if let Some(message) = inbox.next_message()? {
            break ToKeeper::decode(message)?;
        }
        if inbox.fill(&link.socket).await? == 0 {
            return Ok(());
        }
    };
    let ToKeeper::Hello { version, pid } = hello else {
        return Err(ProtocolError::Order.into());
    };
    let mut outbox = Outbox::default();
    if version != PROTOCOL_VERSION {
        ToWorker::Refused { version: PROTOCOL_VERSION }.encode(&mut outbox);
        outbox.write_all(&link.socket).await?;
        return Err(LinkError::Version { worker: version });
    }
    tracing::debug!(worker = link.worker_number, pid, "worker attaches");
    welcome(&keeper, &link, &mut outbox).await?;
    tokio::select! {
        received = receive(&keeper, &link, inbox) => received,
        never = send(&keeper, &link, outbox) => match never {},
    }
}

/// Sends the listening sockets and all children, and puts the worker in charge of them.
async fn welcome(keeper: &Rc<Keeper>, link: &Rc<Link>, outbox: &mut Outbox) -> Result<(), LinkError> {
    let listeners = keeper.listeners.iter().map(|(name, _)| name.clone()).collect();
    let welcome = Welcoming {
        keeper: keeper.identity,
        worker_number: link.worker_number,
        listeners,
        keeper_version: keeper.version(),
        handover: keeper.handover(),
        settings: keeper.settings(),
    };
    ToWorker::Welcome(welcome).encode(outbox);
    let fds: Vec<_> = keeper.listeners.iter().map(|(_, listener)| listener.as_fd()).collect();
    outbox.write_with_fds(&link.socket, &fds).await?;
    // From here to the end nothing awaits: no child gets on between what is said of it and its being offered.
    for child in keeper.children() {
        if let Some(held) = child.hold_for_next_worker() {
            ToWorker::Held(held).encode(outbox);
            link.offer(child.id);
        }
    }
    let passed = keeper.passed().take();
    if !passed.is_empty() {
        tracing::debug!(worker = link.worker_number, connections = passed.len(), "connections go to the next worker");
    }
    for Held { listener, socket, read } in passed {
        outbox.attach(socket);
        ToWorker::Connection(Passing { listener, read }).encode(outbox);
    }
    ToWorker::Begin.encode(outbox);
    keeper.put_in_charge(Rc::clone(link));
    Ok(())
}

async fn receive(keeper: &Rc<Keeper>, link: &Rc<Link>, mut inbox: Inbox) -> Result<(), LinkError> {
    loop {
        while let Some(message) = inbox.next_message()? {
            let message = ToKeeper::decode(message)?;
            if let ToKeeper::Connection(passing) = message {
                let socket = inbox.take_fd()?;
                match (link.is_leaving(), link.is_handing_over()) {
                    (true, _) => {}
                    (false, true) => keeper.passed().hold(passing, socket),
                    (false, false) => return Err(ProtocolError::Order.into()),
                }
            } else {
                keeper.handle(link, message)?;
            }
        }
        if inbox.fill(&link.socket).await? == 0 {
            return Ok(());
        }
        consume_budget().await;
    }
}

/// Listens to a worker that had handed over before the keeper was renewed, until it closes the socket. What it says
/// concerns nobody; unless a message was cut short by the renewal, it can still be told to finish.
pub(crate) async fn see_off(keeper: Rc<Keeper>, link: Rc<Link>, is_mid_message: bool) -> Result<(), LinkError> {
    let listen = async {
        let mut inbox = Inbox::default();
        while inbox.skip(&link.socket).await? > 0 {
            consume_budget().await;
        }
        Ok(())
    };
    link.is_mid_message.set(is_mid_message);
    if is_mid_message {
        return listen.await;
    }
    tokio::select! {
        listened = listen => listened,
        never = send(&keeper, &link, Outbox::default()) => match never {},
    }
}

/// Sends for ever: when the worker no longer reads, it is the receiving side that says so, after reading what is left.
async fn send(keeper: &Keeper, link: &Link, mut outbox: Outbox) -> std::convert::Infallible {
    loop {
        link.fill(keeper, &mut outbox);
        if outbox.is_empty() {
            wait_for_work(link).await;
            continue;
        }
        let tried = outbox.try_write(&link.socket);
        link.is_mid_message.set(!outbox.is_empty());
        let written = match tried {
            Ok(true) => Ok(()),
            Ok(false) => outbox.writable(&link.socket).await,
            Err(error) => Err(error),
        };
        if let Err(error) = written {
            tracing::debug!(worker = link.worker_number, %error, "the worker takes no more");
            return std::future::pending().await;
        }
        consume_budget().await;
    }
}

async fn wait_for_work(link: &Link) {
    let tell_written_at = link.outgoing.borrow().tell_written_at;
    match tell_written_at {
        Some(at) => {
            tokio::select! {
                () = link.work.notified() => {}
                () = tokio::time::sleep_until(at) => {}
            }
        }
        None => link.work.notified().await,
    }
}

/// How much is encoded before it is written, in bytes; a single message may be longer.
const BATCH_BYTES_MAX: usize = 256 * 1024;

/// How much of one child is sent before it is another's turn, in bytes.
const TURN_BYTES: usize = 64 * 1024;

/// How many replies may wait to be sent.
const REPLIES_MAX: usize = 1024;

/// How often a worker is asked in vain for a sign of life before it is given up.
pub(crate) const PINGS_UNANSWERED_MAX: u32 = 4;

/// How long news of a child's stdin may wait for company.
const WRITTEN_DELAY: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests;
