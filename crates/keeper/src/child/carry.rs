//! A child over a renewal of the keeper: its state as plain values, and a child made of them again.

use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;

use mainstay_core::wire::lines::LineSplitter;
use tokio::sync::Notify;
use tokio::task::spawn_local;
use tokio::time::Instant;

use super::pipe::Pipe;
use super::{Child, EndPlan, State, Stdin, end, stdio};
use crate::custody::Frames;
use crate::keeper::Keeper;
use crate::open_calls::OpenCalls;
use crate::pidfd::PidFd;
use crate::record::RecordFile;
use crate::renewal::state::{ChildState, EndingState, InputState};
use crate::stderr::Ring;
use crate::types::LINE_BYTES_MAX;

impl Child {
    /// All that is known of it and everything in its custody.
    pub(crate) fn carried(&self) -> ChildState<Rc<Pipe>> {
        let (state, pipes, now) = (self.state.borrow(), self.pipes.borrow(), Instant::now());
        ChildState {
            id: self.id,
            name: self.name.clone(),
            label: self.label.clone(),
            marker: self.marker.clone(),
            identity: self.identity,
            spawned_at_unix_ms: self.spawned_at_unix_ms,
            stdin: pipes.stdin.clone(),
            stdout: pipes.stdout.clone(),
            stderr: pipes.stderr.clone(),
            output: state.output.unfinished(),
            frames: state.frames.carried(),
            calls: state.calls.carried(),
            input: state.stdin.carried(),
            stderr_tail: state.stderr.all(),
            ending: EndingState {
                plan: state.end.map(|plan| (remaining(plan.term_at, now), remaining(plan.kill_at, now))),
                was_terminated: state.was_terminated,
                known: state.known.iter().copied().collect(),
                is_gone: state.is_gone,
                status: state.status,
                exit: state.exit.clone(),
            },
            is_forgotten: state.is_forgotten,
        }
    }
}

/// A child that goes on, but for the tasks that serve it.
pub(crate) struct Arrived {
    child: Rc<Child>,
    /// `None` once its processes are gone.
    leader: Option<end::Leader>,
}

impl Arrived {
    /// The child that `carried` tells of. Nothing of it has been served yet; what is not there is an error, and then
    /// nothing has happened to it.
    pub(crate) fn of(keeper: &Keeper, carried: ChildState<OwnedFd>) -> io::Result<Self> {
        let pipes = stdio::Pipes::watch(carried.stdin, carried.stdout, carried.stderr)?;
        let leader = if carried.ending.is_gone {
            None
        } else {
            let record = RecordFile::existing(keeper.records_dir(), carried.identity);
            Some(end::Leader { pidfd: PidFd::open(carried.identity.pid())?, record })
        };
        let (ending, now) = (carried.ending, Instant::now());
        let state = State {
            output: LineSplitter::resume(LINE_BYTES_MAX, &carried.output),
            frames: Frames::of_carried(carried.frames),
            calls: OpenCalls::of_carried(carried.calls),
            stdin: Stdin::of_carried(carried.input),
            stderr: Ring::of(&carried.stderr_tail),
            end: ending.plan.map(|(term_in, kill_in)| EndPlan { term_at: now + term_in, kill_at: now + kill_in }),
            was_terminated: ending.was_terminated,
            known: ending.known.into_iter().collect(),
            is_gone: ending.is_gone,
            status: ending.status,
            exit: ending.exit,
            exit_is_told: false,
            is_forgotten: carried.is_forgotten,
        };
        let child = Child {
            id: carried.id,
            name: carried.name,
            label: carried.label,
            marker: carried.marker,
            identity: carried.identity,
            spawned_at_unix_ms: carried.spawned_at_unix_ms,
            state: RefCell::new(state),
            pipes: RefCell::new(pipes),
            room: Notify::new(),
            stdin_work: Notify::new(),
            end_ordered: Notify::new(),
            gone: Notify::new(),
        };
        Ok(Self { child: Rc::new(child), leader })
    }

    /// Has the child served again, as far as it had not ended.
    pub(crate) fn go_on(self, keeper: &Rc<Keeper>) {
        let Self { child, leader } = self;
        keeper.add_child(&child);
        if leader.is_some() {
            keeper.own(child.identity.pid());
        }
        let has_ended = child.state.borrow().exit.is_some();
        if !has_ended {
            let streams = stdio::Streams::start(keeper, &child);
            spawn_local(end::supervise(Rc::clone(keeper), child, leader, streams));
        }
    }
}

impl Stdin {
    fn carried(&self) -> InputState {
        InputState {
            current: self.current.clone(),
            queue: self.queue.iter().cloned().collect(),
            accepted: self.accepted,
            written: self.written,
            is_closing: self.is_closing,
        }
    }

    fn of_carried(carried: InputState) -> Self {
        let current_bytes = carried.current.as_ref().map_or(0, |begun| begun.frame.len());
        Self {
            queued_bytes: carried.queue.iter().map(|frame| frame.len()).sum::<usize>() + current_bytes,
            current: carried.current,
            queue: carried.queue.into(),
            accepted: carried.accepted,
            written: carried.written,
            // The next worker is told how far it is when it attaches.
            told_written: carried.written,
            untold_bytes: 0,
            is_closing: carried.is_closing,
        }
    }
}

fn remaining(at: Instant, now: Instant) -> Duration {
    at.saturating_duration_since(now)
}
