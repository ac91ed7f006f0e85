//! What the users of [`Custody`](super::Custody) share: the way out, replies awaited, credit per child.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::mem;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::Instant;

use super::{ACKNOWLEDGE_DELAY_MS, Spawned, WriteError, lock};
use dealt::Dealt;

use crate::channel::Outbox;
use crate::protocol::{FRAME_BYTES_MAX, ToKeeper};
use crate::socket::Socket;
use crate::types::{CallTag, ChildId, STDIN_BYTES_MAX, SpawnFailure};

mod dealt;

/// What a request is answered with.
pub(super) enum Reply {
    Spawned(Spawned),
    SpawnFailed(SpawnFailure, String),
    StderrTail(Bytes),
    Succeeding(Bytes),
    NotSucceeding(String),
}

/// One per attached worker.
pub(super) struct Shared {
    socket: Socket,
    outgoing: Mutex<Outgoing>,
    /// Wakes the flushing task: it has the turn, something dealt with waits to be said, or it is over.
    flush: Notify,
    stdins: Mutex<HashMap<ChildId, Arc<Stdin>>>,
    replies: Mutex<BTreeMap<u64, oneshot::Sender<Reply>>>,
    next_request: AtomicU64,
    requests: Semaphore,
    control: Arc<Semaphore>,
    is_detached: AtomicBool,
    /// Everything was handed over: nothing is said any more. Changed under the lock of `outgoing`.
    is_leaving: AtomicBool,
    /// The receiving task is to know that.
    left: Notify,
    /// The last word is out, or nothing gets out any more.
    said: Notify,
}

/// Messages on their way out. Whoever adds one and finds no writer becomes the writer; others only add. So a lone
/// message is one system call in the caller's own task, and a crowd shares the calls.
#[derive(Default)]
struct Outgoing {
    pending: Outbox,
    dealt: Dealt,
    /// When waiting acknowledgements must go at the latest. Once set it comes to pass, needed or not: waking the flushing
    /// task with each of them would cost more than looking in vain now and then.
    flush_at: Option<Instant>,
    has_writer: bool,
    /// What the socket did not take; the flushing task is the writer then.
    stalled: Option<Outbox>,
    /// Room that control messages hold until they are written.
    permits: Vec<OwnedSemaphorePermit>,
}

/// The sender's view of one child's stdin.
pub(super) struct Stdin {
    credit: Arc<Semaphore>,
    sent: Mutex<Sent>,
}

struct Sent {
    next_number: u64,
    /// What each frame that is not known to be written holds of the credit.
    charges: VecDeque<(u64, u32)>,
}

impl Stdin {
    /// The stdin of a child of which `accepted` frames and, among them, `queued_bytes` unwritten bytes are with the keeper.
    pub(super) fn new(accepted: u64, queued_bytes: u64) -> Self {
        let queued = usize::try_from(queued_bytes).unwrap_or(usize::MAX).min(STDIN_BYTES_MAX);
        let mut charges = VecDeque::new();
        if queued > 0 {
            charges.push_back((accepted, u32::try_from(queued).unwrap_or(u32::MAX)));
        }
        Self {
            credit: Arc::new(Semaphore::new(STDIN_BYTES_MAX - queued)),
            sent: Mutex::new(Sent { next_number: accepted + 1, charges }),
        }
    }

    /// All frames up to `through` are in the pipe.
    pub(super) fn written(&self, through: u64) {
        let mut sent = lock(&self.sent);
        while let Some(&(number, charge)) = sent.charges.front() {
            if number > through {
                break;
            }
            sent.charges.pop_front();
            self.credit.add_permits(charge as usize);
        }
    }

    /// Nothing can be written any more.
    pub(super) fn close(&self) {
        self.credit.close();
    }
}

impl Shared {
    pub(super) fn new(socket: Socket) -> Self {
        Self {
            socket,
            outgoing: Mutex::default(),
            flush: Notify::new(),
            stdins: Mutex::default(),
            replies: Mutex::default(),
            next_request: AtomicU64::new(1),
            requests: Semaphore::new(REQUESTS_MAX),
            control: Arc::new(Semaphore::new(CONTROL_MAX)),
            is_detached: AtomicBool::new(false),
            is_leaving: AtomicBool::new(false),
            left: Notify::new(),
            said: Notify::new(),
        }
    }

    pub(super) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Makes the child known to writers.
    pub(super) fn add(&self, child: ChildId, stdin: Arc<Stdin>) {
        lock(&self.stdins).insert(child, stdin);
    }

    /// Ends what writers can do with the child.
    pub(super) fn remove(&self, child: ChildId) {
        if let Some(stdin) = lock(&self.stdins).remove(&child) {
            stdin.close();
        }
    }

    /// See [`Custody::write`](super::Custody::write).
    pub(super) async fn write(&self, child: ChildId, tag: Option<CallTag>, frame: Bytes) -> Result<u64, WriteError> {
        let stdin = lock(&self.stdins).get(&child).cloned().ok_or(WriteError::Gone)?;
        let charge = charge_of(&frame);
        let permit = stdin.credit.acquire_many(charge).await.map_err(|_| WriteError::Gone)?;
        // From here on nothing waits: the frame gets its number and its place in the queue together.
        let mut outgoing = lock(&self.outgoing);
        if self.is_mute() {
            return Err(WriteError::Gone);
        }
        permit.forget();
        let number = {
            let mut sent = lock(&stdin.sent);
            let number = sent.next_number;
            sent.next_number += 1;
            sent.charges.push_back((number, charge));
            number
        };
        outgoing.put(&ToKeeper::Write { child, tag, frame });
        self.write_out(outgoing);
        Ok(number)
    }

    /// See [`Custody::acknowledge`](super::Custody::acknowledge).
    pub(super) fn acknowledge(&self, child: ChildId, frames: RangeInclusive<u64>) {
        self.deal(|dealt| dealt.acknowledge(child, frames));
    }

    /// See [`Custody::settle`](super::Custody::settle).
    pub(super) fn settle(&self, child: ChildId, calls: &[CallTag]) {
        self.deal(|dealt| dealt.settle(child, calls));
    }

    fn deal(&self, note: impl FnOnce(&mut Dealt)) {
        let mut outgoing = lock(&self.outgoing);
        if self.is_mute() {
            return;
        }
        note(&mut outgoing.dealt);
        if outgoing.dealt.is_full() {
            outgoing.add_dealt();
            self.write_out(outgoing);
        } else if outgoing.flush_at.is_none() {
            outgoing.flush_at = Some(Instant::now() + ACKNOWLEDGE_DELAY);
            self.flush.notify_one();
        }
    }

    /// Sends a control message; waits while too many of them are not out yet.
    pub(super) async fn send(&self, message: &ToKeeper) {
        let Ok(permit) = Arc::clone(&self.control).acquire_owned().await else {
            return;
        };
        let mut outgoing = lock(&self.outgoing);
        if !self.is_mute() {
            outgoing.permits.push(permit);
            outgoing.put(message);
            self.write_out(outgoing);
        }
    }

    /// Sends a control message and a descriptor with it; `false` if neither is sent. Waits as [`send`](Self::send) does.
    pub(super) async fn send_with_fd(&self, message: &ToKeeper, fd: OwnedFd) -> bool {
        let Ok(permit) = Arc::clone(&self.control).acquire_owned().await else {
            return false;
        };
        let mut outgoing = lock(&self.outgoing);
        if self.is_mute() {
            return false;
        }
        outgoing.permits.push(permit);
        outgoing.add_dealt();
        outgoing.pending.attach(fd);
        outgoing.put(message);
        self.write_out(outgoing);
        true
    }

    /// Says the last word and makes this end mute.
    pub(super) fn hand_over(&self) {
        let mut outgoing = lock(&self.outgoing);
        if self.is_mute() {
            return;
        }
        outgoing.put(&ToKeeper::HandedOver);
        self.is_leaving.store(true, Ordering::Release);
        self.write_out(outgoing);
        self.end_waits();
        self.left.notify_one();
    }

    /// Waits until everything that was said is in the keeper's socket, or the keeper is gone.
    pub(super) async fn said(&self) {
        loop {
            let out = self.said.notified();
            tokio::pin!(out);
            out.as_mut().enable();
            if self.is_detached() || lock(&self.outgoing).is_out() {
                return;
            }
            out.await;
        }
    }

    /// Waits until everything was handed over.
    pub(super) async fn left(&self) {
        while !self.is_leaving() {
            self.left.notified().await;
        }
    }

    pub(super) fn is_leaving(&self) -> bool {
        self.is_leaving.load(Ordering::Acquire)
    }

    /// Whether what is said now would be said to nobody.
    fn is_mute(&self) -> bool {
        self.is_detached() || self.is_leaving()
    }

    /// Sends a control message from the receiving task, which must not wait. Its callers send one per child at most.
    pub(super) fn send_now(&self, message: &ToKeeper) {
        let mut outgoing = lock(&self.outgoing);
        if !self.is_mute() {
            outgoing.put(message);
            self.write_out(outgoing);
        }
    }

    /// Room for one more request; `None` once the keeper is gone.
    pub(super) async fn request_permit(&self) -> Option<tokio::sync::SemaphorePermit<'_>> {
        self.requests.acquire().await.ok()
    }

    /// Registers who waits for a reply and returns the request's number; `None` once the keeper is gone.
    pub(super) fn expect_reply(&self, sender: oneshot::Sender<Reply>) -> Option<u64> {
        let mut replies = lock(&self.replies);
        if self.is_mute() {
            return None;
        }
        let request = self.next_request.fetch_add(1, Ordering::Relaxed);
        replies.insert(request, sender);
        Some(request)
    }

    /// Who waits for the reply to `request`.
    pub(super) fn take_reply(&self, request: u64) -> Option<oneshot::Sender<Reply>> {
        lock(&self.replies).remove(&request)
    }

    /// The keeper is gone: whoever waits is told.
    pub(super) fn detach(&self) {
        {
            let mut outgoing = lock(&self.outgoing);
            self.is_detached.store(true, Ordering::Release);
            *outgoing = Outgoing { has_writer: true, ..Outgoing::default() };
        }
        self.end_waits();
        self.flush.notify_one();
        self.said.notify_waiters();
    }

    /// Whoever waits for something from the keeper gets nothing any more.
    fn end_waits(&self) {
        for (_, stdin) in lock(&self.stdins).drain() {
            stdin.close();
        }
        lock(&self.replies).clear();
        self.requests.close();
        self.control.close();
    }

    fn is_detached(&self) -> bool {
        self.is_detached.load(Ordering::Acquire)
    }

    /// Writes what is pending if nobody else does. Never waits.
    fn write_out<'a>(&'a self, mut outgoing: MutexGuard<'a, Outgoing>) {
        if outgoing.has_writer {
            return;
        }
        outgoing.has_writer = true;
        for _ in 0..TURNS_MAX {
            let Some((mut batch, permits)) = outgoing.take_batch() else {
                outgoing.has_writer = false;
                self.said.notify_waiters();
                return;
            };
            drop(outgoing);
            let is_out = batch.try_write(&self.socket);
            drop(permits);
            outgoing = lock(&self.outgoing);
            match is_out {
                Ok(true) => {}
                Ok(false) => {
                    outgoing.stalled = Some(batch);
                    break;
                }
                // The receiving task sees the same socket end and tells everybody.
                Err(_) => break,
            }
        }
        if !self.is_detached() {
            outgoing.stalled.get_or_insert_default();
            self.flush.notify_one();
        }
    }
}

impl Outgoing {
    /// Adds a message. What is dealt with goes ahead of it: the keeper never learns of something later first.
    fn put(&mut self, message: &ToKeeper) {
        self.add_dealt();
        message.encode(&mut self.pending);
    }

    /// Everything that may be written now.
    fn take_batch(&mut self) -> Option<(Outbox, Vec<OwnedSemaphorePermit>)> {
        if self.pending.is_empty() {
            return None;
        }
        Some((mem::take(&mut self.pending), mem::take(&mut self.permits)))
    }

    /// Whether everything that was put is written.
    fn is_out(&self) -> bool {
        self.pending.is_empty() && !self.has_writer
    }

    fn add_dealt(&mut self) {
        mem::take(&mut self.dealt).encode(&mut self.pending);
    }
}

/// The background half of the way out: goes on where the socket was full, and sends acknowledgements that found no
/// company. Ends when the keeper is gone.
pub(super) async fn flush(shared: Arc<Shared>) {
    while !shared.is_detached() {
        let (stalled, flush_at) = {
            let mut outgoing = lock(&shared.outgoing);
            (outgoing.stalled.take(), outgoing.flush_at)
        };
        if let Some(mut batch) = stalled {
            if write_stalled(&shared, &mut batch).await.is_err() {
                return;
            }
            continue;
        }
        match flush_at {
            Some(at) if at <= Instant::now() => {
                let mut outgoing = lock(&shared.outgoing);
                outgoing.flush_at = (!outgoing.dealt.is_empty()).then(|| Instant::now() + ACKNOWLEDGE_DELAY);
                outgoing.add_dealt();
                shared.write_out(outgoing);
            }
            Some(at) => {
                tokio::select! {
                    () = shared.flush.notified() => {}
                    () = tokio::time::sleep_until(at) => {}
                }
            }
            None => shared.flush.notified().await,
        }
    }
}

/// Writes `batch` and all that came behind it, then gives the turn back.
async fn write_stalled(shared: &Shared, batch: &mut Outbox) -> io::Result<()> {
    loop {
        tokio::select! {
            written = batch.write_all(&shared.socket) => written?,
            // Only `detach` matters here; any other wake-up is looked at when the turn is given back.
            () = detached(shared) => return Err(io::ErrorKind::BrokenPipe.into()),
        }
        let mut outgoing = lock(&shared.outgoing);
        let Some((next, permits)) = outgoing.take_batch() else {
            outgoing.has_writer = false;
            shared.said.notify_waiters();
            return Ok(());
        };
        drop(outgoing);
        drop(permits);
        *batch = next;
    }
}

async fn detached(shared: &Shared) {
    while !shared.is_detached() {
        shared.flush.notified().await;
    }
}

/// What a frame costs of the credit. A frame longer than the whole credit takes all of it: it goes alone.
fn charge_of(frame: &Bytes) -> u32 {
    let charge = frame.len().saturating_add(FRAME_OVERHEAD_BYTES).min(STDIN_BYTES_MAX);
    u32::try_from(charge).unwrap_or(u32::MAX)
}

const _: () = assert!(STDIN_BYTES_MAX <= FRAME_BYTES_MAX && FRAME_BYTES_MAX < u32::MAX as usize);

/// What a queued frame costs beyond its bytes, so that many small ones are bounded too.
const FRAME_OVERHEAD_BYTES: usize = 64;

const ACKNOWLEDGE_DELAY: Duration = Duration::from_millis(ACKNOWLEDGE_DELAY_MS);

/// Requests that may wait for their reply.
const REQUESTS_MAX: usize = 256;

/// Control messages that may wait to be written.
const CONTROL_MAX: usize = 1024;

/// How often a caller writes for others before it leaves that to the background task.
const TURNS_MAX: usize = 8;
