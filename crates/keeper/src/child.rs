//! One child in custody: what is known of it, what waits for it, what it has said.

use std::cell::RefCell;
use std::collections::{BTreeSet, VecDeque};
use std::ops::RangeInclusive;
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::wire::lines::{Line, LineSplitter};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::custody::Frames;
use crate::identity::ProcessIdentity;
use crate::open_calls::OpenCalls;
use crate::pidfd::Status;
use crate::protocol::{FRAME_BYTES_MAX, Holding, ProtocolError, ToWorker};
use crate::stderr::Ring;
use crate::tree::Tree;
use crate::types::{CallTag, ChildId, Exit, LINE_BYTES_MAX, OPEN_CALLS_MAX, STDIN_BYTES_MAX};

pub(crate) mod carry;
pub(crate) mod end;
pub(crate) mod pipe;
pub(crate) mod start;
pub(crate) mod stdio;

/// A child, shared by the tasks that serve it. They all run on the keeper's one thread.
pub(crate) struct Child {
    pub(crate) id: ChildId,
    pub(crate) name: String,
    pub(crate) label: Bytes,
    pub(crate) marker: String,
    pub(crate) identity: ProcessIdentity,
    pub(crate) spawned_at_unix_ms: u64,
    state: RefCell<State>,
    pub(crate) pipes: RefCell<stdio::Pipes>,
    /// Frames were acknowledged, or need not be kept: its stdout may be read again.
    pub(crate) room: Notify,
    /// Frames wait for its stdin, or it is to be closed.
    pub(crate) stdin_work: Notify,
    /// Its end was ordered, or ordered sooner.
    pub(crate) end_ordered: Notify,
    /// Its processes are gone: what its pipes still hold is all that will come.
    pub(crate) gone: Notify,
}

struct State {
    /// What came out of stdout and is no frame yet.
    output: LineSplitter,
    frames: Frames,
    calls: OpenCalls,
    stdin: Stdin,
    stderr: Ring,
    end: Option<EndPlan>,
    /// TERM was sent: once, so that nobody's tidying up is interrupted by a second one.
    was_terminated: bool,
    /// Processes that were found to belong to its tree.
    known: BTreeSet<ProcessIdentity>,
    is_gone: bool,
    /// How its leader ended, once it is gone.
    status: Option<Status>,
    exit: Option<Exit>,
    exit_is_told: bool,
    is_forgotten: bool,
}

impl Default for State {
    fn default() -> Self {
        Self {
            output: LineSplitter::new(LINE_BYTES_MAX),
            frames: Frames::default(),
            calls: OpenCalls::default(),
            stdin: Stdin::default(),
            stderr: Ring::default(),
            end: None,
            was_terminated: false,
            known: BTreeSet::new(),
            is_gone: false,
            status: None,
            exit: None,
            exit_is_told: false,
            is_forgotten: false,
        }
    }
}

/// Frames on their way into the child.
#[derive(Default)]
struct Stdin {
    /// The frame that is being written.
    current: Option<Begun>,
    queue: VecDeque<Bytes>,
    /// Of all that waits, the frame that is being written included.
    queued_bytes: usize,
    accepted: u64,
    written: u64,
    told_written: u64,
    /// Bytes written that the worker has not been told of.
    untold_bytes: usize,
    /// Nothing is taken any more; what is queued is still written.
    is_closing: bool,
}

/// A frame on its way into the pipe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Begun {
    pub(crate) frame: Bytes,
    /// How much of it is in the pipe; the line end comes behind it and counts.
    pub(crate) written: usize,
}

impl Stdin {
    fn is_partly_written(&self) -> bool {
        self.current.as_ref().is_some_and(|begun| begun.written > 0)
    }
}

/// When an ending child, whose input has ended already, is pressed harder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EndPlan {
    pub(crate) term_at: Instant,
    pub(crate) kill_at: Instant,
}

/// What a task that writes to a child's stdin does next.
pub(crate) enum StdinWork {
    /// This frame and its line end, but for the first bytes.
    Write {
        frame: Bytes,
        from: usize,
    },
    Wait,
    Close,
}

impl Child {
    pub(crate) fn new(
        id: ChildId,
        spawn: &crate::types::Spawn,
        identity: ProcessIdentity,
        spawned_at_unix_ms: u64,
    ) -> Self {
        Self {
            id,
            name: spawn.name.clone(),
            label: Bytes::copy_from_slice(&spawn.label),
            marker: spawn.marker.clone(),
            identity,
            spawned_at_unix_ms,
            state: RefCell::new(State::default()),
            pipes: RefCell::default(),
            room: Notify::new(),
            stdin_work: Notify::new(),
            end_ordered: Notify::new(),
            gone: Notify::new(),
        }
    }

    /// How its processes are recognised.
    pub(crate) fn tree(&self) -> Tree {
        let known = self.state.borrow().known.clone();
        Tree { leader: Some(self.identity), has_members: true, marker: self.marker.clone(), known }
    }

    /// These were found to belong to it, and do so whatever becomes of their parents.
    fn know(&self, members: impl Iterator<Item = ProcessIdentity>) {
        self.state.borrow_mut().known.extend(members);
    }

    // What it says.

    pub(crate) fn has_room(&self) -> bool {
        let state = self.state.borrow();
        state.is_forgotten || state.frames.has_room()
    }

    fn push_output(&self, bytes: &[u8]) {
        self.state.borrow_mut().output.push(bytes);
    }

    fn has_output_buffered(&self) -> bool {
        self.state.borrow().output.buffered() > 0
    }

    fn next_output_line(&self) -> Option<Line> {
        self.state.borrow_mut().output.next_line()
    }

    /// Nothing more comes out of it. Returns the line that it never ended.
    fn end_output(&self) -> Option<Bytes> {
        self.state.borrow_mut().output.finish()
    }

    pub(crate) fn push_line(&self, line: Line) {
        self.state.borrow_mut().frames.push(line);
    }

    pub(crate) fn push_stderr(&self, bytes: &[u8]) {
        self.state.borrow_mut().stderr.push(bytes);
    }

    pub(crate) fn stderr_tail(&self) -> Bytes {
        self.state.borrow().stderr.tail()
    }

    pub(crate) fn acknowledge(&self, numbers: RangeInclusive<u64>) {
        self.state.borrow_mut().frames.acknowledge(numbers);
        self.room.notify_one();
    }

    // What the worker in charge is told.

    /// What is told of the child to a worker that attaches; everything unacknowledged is sent again after it.
    pub(crate) fn hold_for_next_worker(&self) -> Option<Holding> {
        let mut state = self.state.borrow_mut();
        if state.is_forgotten {
            return None;
        }
        state.frames.rewind();
        state.exit_is_told = false;
        state.stdin.told_written = state.stdin.written;
        state.stdin.untold_bytes = 0;
        Some(Holding {
            child: self.id,
            identity: self.identity,
            spawned_at_unix_ms: self.spawned_at_unix_ms,
            frames_accepted: state.stdin.accepted,
            frames_written: state.stdin.written,
            queued_bytes: state.stdin.queued_bytes as u64,
            open: state.calls.list(),
            label: self.label.clone(),
        })
    }

    /// The next thing to tell of the child's output, and last its exit.
    pub(crate) fn next_to_tell(&self) -> Option<ToWorker> {
        let mut state = self.state.borrow_mut();
        if let Some(frame) = state.frames.next_to_send(self.id) {
            return Some(frame);
        }
        let exit = state.exit.clone().filter(|_| !state.exit_is_told && !state.is_forgotten)?;
        state.exit_is_told = true;
        Some(ToWorker::Exited { child: self.id, exit })
    }

    pub(crate) fn has_more_to_tell(&self) -> bool {
        let state = self.state.borrow();
        !state.frames.all_sent() || (state.exit.is_some() && !state.exit_is_told && !state.is_forgotten)
    }

    /// How far its stdin is, if the worker has not been told.
    pub(crate) fn written_to_tell(&self) -> Option<ToWorker> {
        let stdin = &mut self.state.borrow_mut().stdin;
        if stdin.told_written == stdin.written {
            return None;
        }
        (stdin.told_written, stdin.untold_bytes) = (stdin.written, 0);
        Some(ToWorker::Written { child: self.id, through: stdin.written })
    }

    /// Whether a worker may be waiting for room in the queue.
    pub(crate) fn is_written_urgent(&self) -> bool {
        let state = self.state.borrow();
        state.stdin.untold_bytes >= UNTOLD_BYTES_MAX
    }

    // What it is told.

    /// Takes a frame for its stdin. A child that is ending doesn't get it any more; its exit tells how far it got.
    /// The call of one that is taken is open from then on.
    pub(crate) fn accept_frame(&self, tag: Option<CallTag>, frame: Bytes) -> Result<(), ProtocolError> {
        let State { stdin, calls, .. } = &mut *self.state.borrow_mut();
        if stdin.queued_bytes > STDIN_BYTES_MAX + FRAME_BYTES_MAX {
            return Err(ProtocolError::Field("frame"));
        }
        stdin.accepted += 1;
        if !stdin.is_closing {
            stdin.queued_bytes += frame.len();
            stdin.queue.push_back(frame);
            self.stdin_work.notify_one();
            // Said ever more seldom: one that happens once happens with every call.
            if let Some(forgotten) = tag.and_then(|tag| calls.open(tag)).filter(|count| count.is_power_of_two()) {
                let (child, bound) = (self.id.get(), OPEN_CALLS_MAX);
                tracing::warn!(child, forgotten, bound, "too many calls are open; the oldest are forgotten");
            }
        }
        Ok(())
    }

    /// Nobody will ask for these calls any more.
    pub(crate) fn settle(&self, tags: &[CallTag]) {
        let calls = &mut self.state.borrow_mut().calls;
        tags.iter().for_each(|tag| calls.settle(*tag));
    }

    fn next_stdin_work(&self) -> StdinWork {
        let stdin = &mut self.state.borrow_mut().stdin;
        if stdin.current.is_none() {
            stdin.current = stdin.queue.pop_front().map(|frame| Begun { frame, written: 0 });
        }
        match &stdin.current {
            Some(begun) => StdinWork::Write { frame: begun.frame.clone(), from: begun.written },
            None if stdin.is_closing => StdinWork::Close,
            None => StdinWork::Wait,
        }
    }

    /// So many more bytes went into the pipe; `true` if the frame is in it, whole.
    fn input_written(&self, bytes: usize) -> bool {
        let stdin = &mut self.state.borrow_mut().stdin;
        let Some(begun) = &mut stdin.current else {
            return false;
        };
        begun.written += bytes;
        let frame_bytes = begun.frame.len();
        if begun.written <= frame_bytes {
            return false;
        }
        stdin.current = None;
        stdin.written += 1;
        stdin.queued_bytes = stdin.queued_bytes.saturating_sub(frame_bytes);
        stdin.untold_bytes += frame_bytes;
        true
    }

    /// Nothing more is taken for its input, which ends behind what is queued already.
    fn end_stdin(&self) {
        self.state.borrow_mut().stdin.is_closing = true;
        self.stdin_work.notify_one();
    }

    // Its end.

    /// Ends its input now and presses harder after `grace`, and again after `grace`. An order never delays an earlier one.
    pub(crate) fn order_end(&self, grace: Duration) {
        let now = Instant::now();
        let grace = grace.min(END_GRACE_MAX);
        self.tighten(EndPlan { term_at: now + grace, kill_at: now + grace + grace });
    }

    /// Has it killed at once.
    pub(crate) fn order_kill(&self) {
        let now = Instant::now();
        self.tighten(EndPlan { term_at: now, kill_at: now });
    }

    /// Its leader has ended: what is left of it is ended too, without waiting for its end of input.
    pub(crate) fn order_end_of_rest(&self) {
        let now = Instant::now();
        self.tighten(EndPlan { term_at: now, kill_at: now + REST_GRACE });
    }

    fn tighten(&self, plan: EndPlan) {
        {
            let mut state = self.state.borrow_mut();
            let old = state.end.unwrap_or(plan);
            state.end =
                Some(EndPlan { term_at: old.term_at.min(plan.term_at), kill_at: old.kill_at.min(plan.kill_at) });
        }
        self.end_ordered.notify_one();
    }

    pub(crate) fn end_plan(&self) -> Option<EndPlan> {
        self.state.borrow().end
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.state.borrow().is_gone
    }

    fn was_terminated(&self) -> bool {
        self.state.borrow().was_terminated
    }

    fn set_terminated(&self) {
        self.state.borrow_mut().was_terminated = true;
    }

    fn set_gone(&self, status: Option<Status>) {
        {
            let mut state = self.state.borrow_mut();
            (state.is_gone, state.status) = (true, status);
            // What it was not given it will never get.
            state.stdin.queue.clear();
            state.stdin.queued_bytes = 0;
        }
        self.end_stdin();
        self.gone.notify_waiters();
    }

    /// All that it wrote is in custody. Returns how it ended, if that is known.
    fn set_exit(&self) -> Option<Status> {
        let mut state = self.state.borrow_mut();
        let Status { code, signal } = state.status.unwrap_or_default();
        state.exit = Some(Exit {
            code,
            signal,
            frames_written: state.stdin.written,
            frame_partly_written: state.stdin.is_partly_written(),
            stderr_tail: state.stderr.tail(),
        });
        state.status
    }

    /// Nobody will ask for it again: it is ended if it runs, and its output is not kept. `true` once it has ended.
    pub(crate) fn forget(&self) -> bool {
        let has_ended = {
            let mut state = self.state.borrow_mut();
            state.is_forgotten = true;
            state.frames.discard();
            state.calls.clear();
            state.exit.is_some()
        };
        self.room.notify_one();
        if !has_ended {
            self.order_kill();
        }
        has_ended
    }

    pub(crate) fn is_forgotten(&self) -> bool {
        self.state.borrow().is_forgotten
    }
}

/// Progress that is told at once, because a writer may be waiting for it, in bytes.
const UNTOLD_BYTES_MAX: usize = STDIN_BYTES_MAX / 4;

/// The longest grace that is granted.
const END_GRACE_MAX: Duration = Duration::from_secs(300);

/// How long what a leader left behind has to end by itself.
const REST_GRACE: Duration = Duration::from_secs(1);
