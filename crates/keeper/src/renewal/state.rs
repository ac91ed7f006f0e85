//! What a keeper holds at one moment, as plain values: what is carried over a renewal.
//!
//! `F` stands for a descriptor: borrowed from the living keeper, a number in the written form, owned by the new keeper.

use std::time::Duration;

use bytes::Bytes;
use mainstay_core::wire::lines::{Line, Unfinished};

use crate::child::Begun;
use crate::identity::ProcessIdentity;
use crate::pidfd::Status;
use crate::types::{CallTag, ChildId, Exit};

/// Everything that a keeper holds, but for the program it runs.
#[derive(Clone, PartialEq, Eq)]
#[cfg_attr(test, derive(Debug))]
pub(crate) struct State<F> {
    pub(crate) keeper: ProcessIdentity,
    pub(crate) listeners: Vec<(String, F)>,
    /// In the order of their ids.
    pub(crate) children: Vec<ChildState<F>>,
    pub(crate) last_child: u64,
    /// Markers whose trees are gone, oldest first.
    pub(crate) ended_markers: Vec<String>,
    /// A worker's wish to stop that nobody has looked at: whether to retire.
    pub(crate) shutdown: Option<bool>,
    pub(crate) course: Course<F>,
}

/// The part of it that the run loop knows.
#[derive(Clone, PartialEq, Eq)]
#[cfg_attr(test, derive(Debug))]
pub(crate) struct Course<F> {
    /// The lock on the state directory.
    pub(crate) lock: F,
    /// The number of the worker that was started last.
    pub(crate) last_worker: u64,
    /// How many signals to stop have come.
    pub(crate) signals: u32,
    pub(crate) respawn: RespawnState,
    /// For the next worker.
    pub(crate) settings: Bytes,
    /// For a worker of the program before, should the next one not get ready.
    pub(crate) previous_settings: Bytes,
    /// How the handover stands and how the last one went, as the run loop writes it.
    pub(crate) handover: Bytes,
    pub(crate) leaving: Vec<Leaving<F>>,
    pub(crate) connections: Vec<Passed<F>>,
}

/// The latest starts of workers.
#[derive(Clone, Default, PartialEq, Eq)]
#[cfg_attr(test, derive(Debug))]
pub(crate) struct RespawnState {
    /// How long ago each was, oldest first.
    pub(crate) starts_ago: Vec<Duration>,
    /// How many starts in a row were delayed.
    pub(crate) delayed: u32,
}

/// A worker that has handed over and finishes what it has begun.
#[derive(Clone, PartialEq, Eq)]
#[cfg_attr(test, derive(Debug))]
pub(crate) struct Leaving<F> {
    pub(crate) identity: ProcessIdentity,
    pub(crate) number: u64,
    /// After this time it is killed.
    pub(crate) kill_in: Duration,
    /// The keeper's end of its socket.
    pub(crate) socket: Option<F>,
    /// Anything else, as the run loop writes it.
    pub(crate) note: Bytes,
}

/// A client's connection on its way from one worker to the next.
#[derive(Clone, PartialEq, Eq)]
#[cfg_attr(test, derive(Debug))]
pub(crate) struct Passed<F> {
    pub(crate) listener: String,
    pub(crate) socket: F,
    /// What was read of its next request.
    pub(crate) read: Bytes,
}

/// One child.
#[derive(Clone, PartialEq, Eq)]
#[cfg_attr(test, derive(Debug))]
pub(crate) struct ChildState<F> {
    pub(crate) id: ChildId,
    pub(crate) name: String,
    pub(crate) label: Bytes,
    pub(crate) marker: String,
    pub(crate) identity: ProcessIdentity,
    pub(crate) spawned_at_unix_ms: u64,
    /// Its pipes, as far as they are open.
    pub(crate) stdin: Option<F>,
    pub(crate) stdout: Option<F>,
    pub(crate) stderr: Option<F>,
    pub(crate) output: Unfinished,
    pub(crate) frames: FramesState,
    pub(crate) calls: CallsState,
    pub(crate) input: InputState,
    /// The latest of what it wrote to stderr.
    pub(crate) stderr_tail: Bytes,
    pub(crate) ending: EndingState,
    pub(crate) is_forgotten: bool,
}

/// The frames of a child that are in custody.
#[derive(Clone, Default, PartialEq, Eq)]
#[cfg_attr(test, derive(Debug))]
pub(crate) struct FramesState {
    /// In the order of their numbers.
    pub(crate) kept: Vec<(u64, Line)>,
    pub(crate) last_number: u64,
    pub(crate) is_discarding: bool,
}

/// The open calls of a child.
#[derive(Clone, Default, PartialEq, Eq)]
#[cfg_attr(test, derive(Debug))]
pub(crate) struct CallsState {
    /// Oldest first.
    pub(crate) open: Vec<CallTag>,
    /// How many were forgotten because there were too many.
    pub(crate) forgotten: u64,
}

/// What is on its way into a child.
#[derive(Clone, Default, PartialEq, Eq)]
#[cfg_attr(test, derive(Debug))]
pub(crate) struct InputState {
    pub(crate) current: Option<Begun>,
    pub(crate) queue: Vec<Bytes>,
    pub(crate) accepted: u64,
    pub(crate) written: u64,
    pub(crate) is_closing: bool,
}

/// How far the end of a child is.
#[derive(Clone, Default, PartialEq, Eq)]
#[cfg_attr(test, derive(Debug))]
pub(crate) struct EndingState {
    /// After which times TERM and KILL are due, once its end was ordered.
    pub(crate) plan: Option<(Duration, Duration)>,
    pub(crate) was_terminated: bool,
    /// Processes that were found to belong to it.
    pub(crate) known: Vec<ProcessIdentity>,
    pub(crate) is_gone: bool,
    pub(crate) status: Option<Status>,
    pub(crate) exit: Option<Exit>,
}

/// What a descriptor must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A plain file.
    File,
    /// A socket that listens.
    Listener,
    /// A connected socket.
    Connection,
    /// The end of a pipe that is read.
    PipeReader,
    /// The end of a pipe that is written.
    PipeWriter,
}

impl<F> State<F> {
    /// The same with each descriptor replaced by what `with` makes of it, always in the same order.
    pub(crate) fn map<G, E>(self, with: &mut impl FnMut(F, Kind) -> Result<G, E>) -> Result<State<G>, E> {
        let named = |(name, listener)| Ok((name, with(listener, Kind::Listener)?));
        let listeners = self.listeners.into_iter().map(named).collect::<Result<_, E>>()?;
        let children = self.children.into_iter().map(|child| child.map(with)).collect::<Result<_, E>>()?;
        let course = self.course.map(with)?;
        let Self { keeper, last_child, ended_markers, shutdown, .. } = self;
        Ok(State { keeper, listeners, children, last_child, ended_markers, shutdown, course })
    }
}

impl<F> Course<F> {
    pub(crate) fn map<G, E>(self, with: &mut impl FnMut(F, Kind) -> Result<G, E>) -> Result<Course<G>, E> {
        Ok(Course {
            lock: with(self.lock, Kind::File)?,
            last_worker: self.last_worker,
            signals: self.signals,
            respawn: self.respawn,
            settings: self.settings,
            previous_settings: self.previous_settings,
            handover: self.handover,
            leaving: self.leaving.into_iter().map(|worker| worker.map(with)).collect::<Result<_, E>>()?,
            connections: self.connections.into_iter().map(|passed| passed.map(with)).collect::<Result<_, E>>()?,
        })
    }
}

impl<F> Leaving<F> {
    fn map<G, E>(self, with: &mut impl FnMut(F, Kind) -> Result<G, E>) -> Result<Leaving<G>, E> {
        let socket = self.socket.map(|socket| with(socket, Kind::Connection)).transpose()?;
        let Self { identity, number, kill_in, note, .. } = self;
        Ok(Leaving { identity, number, kill_in, socket, note })
    }
}

impl<F> Passed<F> {
    fn map<G, E>(self, with: &mut impl FnMut(F, Kind) -> Result<G, E>) -> Result<Passed<G>, E> {
        Ok(Passed { listener: self.listener, socket: with(self.socket, Kind::Connection)?, read: self.read })
    }
}

impl<F> ChildState<F> {
    pub(crate) fn map<G, E>(self, with: &mut impl FnMut(F, Kind) -> Result<G, E>) -> Result<ChildState<G>, E> {
        Ok(ChildState {
            id: self.id,
            name: self.name,
            label: self.label,
            marker: self.marker,
            identity: self.identity,
            spawned_at_unix_ms: self.spawned_at_unix_ms,
            stdin: self.stdin.map(|pipe| with(pipe, Kind::PipeWriter)).transpose()?,
            stdout: self.stdout.map(|pipe| with(pipe, Kind::PipeReader)).transpose()?,
            stderr: self.stderr.map(|pipe| with(pipe, Kind::PipeReader)).transpose()?,
            output: self.output,
            frames: self.frames,
            calls: self.calls,
            input: self.input,
            stderr_tail: self.stderr_tail,
            ending: self.ending,
            is_forgotten: self.is_forgotten,
        })
    }
}
