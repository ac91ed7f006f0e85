//! The state of a keeper as bytes. `RENEWAL.md` is the description for people.
//!
//! A record is a little-endian `u32` length, a kind byte and the kind's fields, as in the messages to workers; the
//! payload, where there is one, is the last field. Descriptors are numbers within the parcel that they travel in.

use std::io::{self, Read, Write};
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use mainstay_core::wire::lines::{Line, Unfinished, UnfinishedOversize};

use super::state::{
    CallsState, ChildState, Course, EndingState, FramesState, InputState, Leaving, Passed, RespawnState, State,
};
use crate::child::Begun;
use crate::pidfd::Status;
use crate::protocol::fields::{Fields, put_blob, put_identity, put_list, put_number, put_tag};
use crate::protocol::{LIST_LEN_MAX, LISTENERS_MAX, MESSAGE_BYTES_MAX, ProtocolError};
use crate::respawn::RESPAWN_BURST;
use crate::types::{CHILDREN_MAX, CUSTODY_FRAMES_MAX, LABEL_BYTES_MAX, LINE_BYTES_MAX, OPEN_CALLS_MAX};

/// Why bytes are no state.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CodecError {
    #[error("the state can't be read")]
    Read(#[source] io::Error),
    #[error("the state is cut off")]
    CutOff,
    #[error(transparent)]
    Malformed(#[from] ProtocolError),
    #[error("the state contradicts itself: {0}")]
    Contradiction(&'static str),
}

mod kind {
    pub(super) const KEEPER: u8 = 1;
    pub(super) const LISTENER: u8 = 2;
    pub(super) const SETTINGS: u8 = 3;
    pub(super) const PREVIOUS_SETTINGS: u8 = 4;
    pub(super) const HANDOVER: u8 = 5;
    pub(super) const LEAVING: u8 = 6;
    pub(super) const CONNECTION: u8 = 7;
    pub(super) const ENDED_MARKER: u8 = 8;
    pub(super) const CHILD: u8 = 16;
    pub(super) const OUTPUT: u8 = 17;
    pub(super) const OUTPUT_OVERSIZE: u8 = 18;
    pub(super) const FRAME: u8 = 19;
    pub(super) const FRAME_OVERSIZE: u8 = 20;
    pub(super) const CALLS: u8 = 21;
    pub(super) const INPUT_BEGUN: u8 = 22;
    pub(super) const INPUT: u8 = 23;
    pub(super) const STDERR: u8 = 24;
    pub(super) const KNOWN: u8 = 25;
    pub(super) const EXIT: u8 = 26;
    pub(super) const END: u8 = 255;
}

/// Writes the state.
pub(crate) fn encode(state: &State<u32>, out: &mut impl Write) -> io::Result<()> {
    let mut out = Records { out, fields: BytesMut::new(), written: 0 };
    let course = &state.course;
    out.put(kind::KEEPER, b"", |body| {
        put_identity(body, state.keeper);
        body.put_u64_le(state.last_child);
        put_optional(body, state.shutdown, |body, retire| body.put_u8(u8::from(retire)));
        body.put_u32_le(course.lock);
        body.put_u64_le(course.last_worker);
        body.put_u32_le(course.signals);
        body.put_u32_le(course.respawn.delayed);
        put_list(body, &course.respawn.starts_ago, |body, ago| put_duration(body, *ago));
    })?;
    for (name, listener) in &state.listeners {
        out.put(kind::LISTENER, name.as_bytes(), |body| body.put_u32_le(*listener))?;
    }
    out.put(kind::SETTINGS, &course.settings, |_| ())?;
    out.put(kind::PREVIOUS_SETTINGS, &course.previous_settings, |_| ())?;
    out.put(kind::HANDOVER, &course.handover, |_| ())?;
    for worker in &course.leaving {
        out.put(kind::LEAVING, &worker.note, |body| {
            put_identity(body, worker.identity);
            body.put_u64_le(worker.number);
            put_duration(body, worker.kill_in);
            put_optional(body, worker.socket, BytesMut::put_u32_le);
        })?;
    }
    for passed in &course.connections {
        out.put(kind::CONNECTION, &passed.read, |body| {
            put_blob(body, passed.listener.as_bytes());
            body.put_u32_le(passed.socket);
        })?;
    }
    for marker in &state.ended_markers {
        out.put(kind::ENDED_MARKER, marker.as_bytes(), |_| ())?;
    }
    for child in &state.children {
        encode_child(child, &mut out)?;
    }
    let records = out.written;
    out.put(kind::END, b"", |body| body.put_u64_le(records))
}

fn encode_child(child: &ChildState<u32>, out: &mut Records<'_, impl Write>) -> io::Result<()> {
    let (input, ending) = (&child.input, &child.ending);
    out.put(kind::CHILD, &child.label, |body| {
        body.put_u64_le(child.id.get());
        put_identity(body, child.identity);
        body.put_u64_le(child.spawned_at_unix_ms);
        put_blob(body, child.name.as_bytes());
        put_blob(body, child.marker.as_bytes());
        for pipe in [child.stdin, child.stdout, child.stderr] {
            put_optional(body, pipe, BytesMut::put_u32_le);
        }
        body.put_u64_le(child.frames.last_number);
        body.put_u64_le(child.calls.forgotten);
        body.put_u64_le(input.accepted);
        body.put_u64_le(input.written);
        let is_discarding = child.frames.is_discarding;
        for flag in [child.is_forgotten, is_discarding, input.is_closing, ending.was_terminated, ending.is_gone] {
            body.put_u8(u8::from(flag));
        }
        put_optional(body, ending.plan, |body, (term_in, kill_in)| {
            put_duration(body, term_in);
            put_duration(body, kill_in);
        });
        put_optional(body, ending.status, |body, status| {
            put_number(body, status.code);
            put_number(body, status.signal);
        });
    })?;
    out.put(kind::OUTPUT, &child.output.pending, |_| ())?;
    if let Some(line) = &child.output.oversize {
        out.put(kind::OUTPUT_OVERSIZE, &line.tail, |body| {
            body.put_u64_le(line.bytes);
            put_blob(body, &line.head);
        })?;
    }
    for (number, line) in &child.frames.kept {
        match line {
            Line::Whole(bytes) => out.put(kind::FRAME, bytes, |body| body.put_u64_le(*number))?,
            Line::Oversize { head, tail, bytes } => out.put(kind::FRAME_OVERSIZE, tail, |body| {
                body.put_u64_le(*number);
                body.put_u64_le(*bytes);
                put_blob(body, head);
            })?,
        }
    }
    out.put(kind::CALLS, b"", |body| put_list(body, &child.calls.open, put_tag))?;
    if let Some(begun) = &input.current {
        let written = u64::try_from(begun.written).unwrap_or(u64::MAX);
        out.put(kind::INPUT_BEGUN, &begun.frame, |body| body.put_u64_le(written))?;
    }
    for frame in &input.queue {
        out.put(kind::INPUT, frame, |_| ())?;
    }
    out.put(kind::STDERR, &child.stderr_tail, |_| ())?;
    // A list has a bound; these have none.
    for known in ending.known.chunks(LIST_LEN_MAX) {
        out.put(kind::KNOWN, b"", |body| put_list(body, known, |body, identity| put_identity(body, *identity)))?;
    }
    match &ending.exit {
        Some(exit) => out.put(kind::EXIT, &exit.stderr_tail, |body| {
            put_number(body, exit.code);
            put_number(body, exit.signal);
            body.put_u64_le(exit.frames_written);
            body.put_u8(u8::from(exit.frame_partly_written));
        }),
        None => Ok(()),
    }
}

/// Records on their way out.
struct Records<'a, W> {
    out: &'a mut W,
    /// The fields of one record; empty in between.
    fields: BytesMut,
    written: u64,
}

impl<W: Write> Records<'_, W> {
    fn put(&mut self, kind: u8, payload: &[u8], fill: impl FnOnce(&mut BytesMut)) -> io::Result<()> {
        self.fields.put_u8(kind);
        fill(&mut self.fields);
        let record_bytes = self.fields.len() + payload.len();
        if record_bytes > RECORD_BYTES_MAX {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "a part of the state is too long"));
        }
        let length = u32::try_from(record_bytes).map_err(io::Error::other)?;
        self.out.write_all(&length.to_le_bytes())?;
        self.out.write_all(&self.fields)?;
        self.out.write_all(payload)?;
        self.fields.clear();
        self.written += 1;
        Ok(())
    }
}

fn put_optional<T>(body: &mut BytesMut, value: Option<T>, put: impl FnOnce(&mut BytesMut, T)) {
    body.put_u8(u8::from(value.is_some()));
    if let Some(value) = value {
        put(body, value);
    }
}

fn put_duration(body: &mut BytesMut, duration: Duration) {
    body.put_u64_le(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX));
}

/// Reads a state to its end and checks it.
pub(crate) fn decode(input: &mut impl Read) -> Result<State<u32>, CodecError> {
    let (record_kind, mut fields) = next_record(input)?;
    if record_kind != kind::KEEPER {
        return Err(ProtocolError::Order.into());
    }
    let mut state = keeper(&mut fields)?;
    fields.end()?;
    for records in 1_u64.. {
        let (record_kind, mut fields) = next_record(input)?;
        if record_kind == kind::END {
            let is_complete = fields.u64("records")? == records;
            fields.end()?;
            let is_last = input.read(&mut [0]).map_err(CodecError::Read)? == 0;
            if !(is_complete && is_last) {
                return Err(ProtocolError::Order.into());
            }
            break;
        }
        if record_kind < kind::CHILD {
            part_of_keeper(&mut state, record_kind, &mut fields)?;
        } else if record_kind == kind::CHILD {
            state.children.push(child(&mut fields)?);
        } else {
            let child = state.children.last_mut().ok_or(ProtocolError::Order)?;
            part_of_child(child, record_kind, &mut fields)?;
        }
        fields.end()?;
    }
    check(&state).map_err(CodecError::Contradiction)?;
    Ok(state)
}

fn next_record(input: &mut impl Read) -> Result<(u8, Fields), CodecError> {
    let mut prefix = [0; 4];
    read_exact(input, &mut prefix)?;
    let length = u32::from_le_bytes(prefix);
    let record_bytes = usize::try_from(length).unwrap_or(usize::MAX);
    if !(1..=RECORD_BYTES_MAX).contains(&record_bytes) {
        return Err(ProtocolError::Length(record_bytes).into());
    }
    // No memory is taken on the writer's word.
    let mut record = Vec::with_capacity(record_bytes.min(PREPARED_BYTES_MAX));
    input.take(u64::from(length)).read_to_end(&mut record).map_err(CodecError::Read)?;
    if record.len() < record_bytes {
        return Err(CodecError::CutOff);
    }
    let mut fields = Fields(Bytes::from(record));
    Ok((fields.byte("kind")?, fields))
}

fn read_exact(input: &mut impl Read, buffer: &mut [u8]) -> Result<(), CodecError> {
    input.read_exact(buffer).map_err(|error| {
        let is_cut_off = error.kind() == io::ErrorKind::UnexpectedEof;
        if is_cut_off { CodecError::CutOff } else { CodecError::Read(error) }
    })
}

fn keeper(fields: &mut Fields) -> Result<State<u32>, ProtocolError> {
    let (keeper, last_child) = (fields.identity()?, fields.u64("last_child")?);
    let shutdown = optional(fields, "shutdown", |fields| fields.flag("shutdown"))?;
    let (lock, last_worker) = (fields.u32("lock")?, fields.u64("last_worker")?);
    let (signals, delayed) = (fields.u32("signals")?, fields.u32("delayed")?);
    let starts_ago = fields.list("starts", |fields| duration(fields, "starts"))?;
    let course = Course {
        lock,
        last_worker,
        signals,
        respawn: RespawnState { starts_ago, delayed },
        settings: Bytes::new(),
        previous_settings: Bytes::new(),
        handover: Bytes::new(),
        leaving: Vec::new(),
        connections: Vec::new(),
    };
    let (listeners, children, ended_markers) = (Vec::new(), Vec::new(), Vec::new());
    Ok(State { keeper, listeners, children, last_child, ended_markers, shutdown, course })
}

fn part_of_keeper(state: &mut State<u32>, record_kind: u8, fields: &mut Fields) -> Result<(), ProtocolError> {
    let course = &mut state.course;
    match record_kind {
        kind::LISTENER => {
            let listener = fields.u32("listener")?;
            state.listeners.push((text(fields, "name")?, listener));
        }
        kind::SETTINGS => course.settings = fields.rest(),
        kind::PREVIOUS_SETTINGS => course.previous_settings = fields.rest(),
        kind::HANDOVER => course.handover = fields.rest(),
        kind::LEAVING => course.leaving.push(Leaving {
            identity: fields.identity()?,
            number: fields.u64("number")?,
            kill_in: duration(fields, "kill_in")?,
            socket: optional(fields, "socket", |fields| fields.u32("socket"))?,
            note: fields.rest(),
        }),
        kind::CONNECTION => course.connections.push(Passed {
            listener: fields.text("listener")?,
            socket: fields.u32("socket")?,
            read: fields.rest(),
        }),
        kind::ENDED_MARKER => state.ended_markers.push(text(fields, "marker")?),
        other => return Err(ProtocolError::Kind(other)),
    }
    Ok(())
}

fn child(fields: &mut Fields) -> Result<ChildState<u32>, ProtocolError> {
    let (id, identity, spawned_at_unix_ms) = (fields.child()?, fields.identity()?, fields.u64("spawned_at")?);
    let (name, marker) = (fields.text("name")?, fields.text("marker")?);
    let mut pipe = || optional(fields, "pipe", |fields| fields.u32("pipe"));
    let (stdin, stdout, stderr) = (pipe()?, pipe()?, pipe()?);
    let (last_number, forgotten) = (fields.u64("last_number")?, fields.u64("forgotten")?);
    let (accepted, written) = (fields.u64("accepted")?, fields.u64("written")?);
    let (is_forgotten, is_discarding) = (fields.flag("is_forgotten")?, fields.flag("is_discarding")?);
    let is_closing = fields.flag("is_closing")?;
    let (was_terminated, is_gone) = (fields.flag("was_terminated")?, fields.flag("is_gone")?);
    let plan = optional(fields, "plan", |fields| Ok((duration(fields, "term_in")?, duration(fields, "kill_in")?)))?;
    let status = optional(fields, "status", |fields| {
        Ok(Status { code: fields.number("code")?, signal: fields.number("signal")? })
    })?;
    Ok(ChildState {
        id,
        name,
        label: fields.rest(),
        marker,
        identity,
        spawned_at_unix_ms,
        stdin,
        stdout,
        stderr,
        output: Unfinished::default(),
        frames: FramesState { kept: Vec::new(), last_number, is_discarding },
        calls: CallsState { open: Vec::new(), forgotten },
        input: InputState { current: None, queue: Vec::new(), accepted, written, is_closing },
        stderr_tail: Bytes::new(),
        ending: EndingState { plan, was_terminated, known: Vec::new(), is_gone, status, exit: None },
        is_forgotten,
    })
}

fn part_of_child(child: &mut ChildState<u32>, record_kind: u8, fields: &mut Fields) -> Result<(), ProtocolError> {
    match record_kind {
        kind::OUTPUT => child.output.pending = fields.rest(),
        kind::OUTPUT_OVERSIZE => {
            let (bytes, head) = (fields.u64("bytes")?, fields.blob("head")?);
            child.output.oversize = Some(UnfinishedOversize { head, tail: fields.rest(), bytes });
        }
        kind::FRAME => {
            let number = fields.u64("number")?;
            child.frames.kept.push((number, Line::Whole(fields.rest())));
        }
        kind::FRAME_OVERSIZE => {
            let (number, bytes, head) = (fields.u64("number")?, fields.u64("bytes")?, fields.blob("head")?);
            child.frames.kept.push((number, Line::Oversize { head, tail: fields.rest(), bytes }));
        }
        kind::CALLS => child.calls.open = fields.list("calls", Fields::tag)?,
        kind::INPUT_BEGUN => {
            let written = usize::try_from(fields.u64("written")?).map_err(|_| ProtocolError::Field("written"))?;
            child.input.current = Some(Begun { frame: fields.rest(), written });
        }
        kind::INPUT => child.input.queue.push(fields.rest()),
        kind::STDERR => child.stderr_tail = fields.rest(),
        kind::KNOWN => child.ending.known.extend(fields.list("known", Fields::identity)?),
        kind::EXIT => child.ending.exit = Some(fields.exit()?),
        other => return Err(ProtocolError::Kind(other)),
    }
    Ok(())
}

fn optional<T>(
    fields: &mut Fields,
    field: &'static str,
    read: impl FnOnce(&mut Fields) -> Result<T, ProtocolError>,
) -> Result<Option<T>, ProtocolError> {
    if fields.flag(field)? { read(fields).map(Some) } else { Ok(None) }
}

fn duration(fields: &mut Fields, field: &'static str) -> Result<Duration, ProtocolError> {
    // Added to a moment it must not overflow.
    Ok(Duration::from_millis(fields.u64(field)?).min(DURATION_MAX))
}

fn text(fields: &mut Fields, field: &'static str) -> Result<String, ProtocolError> {
    String::from_utf8(fields.rest().into()).map_err(|_| ProtocolError::Field(field))
}

/// Whether a keeper could be in this state, as far as going on from it relies on that.
fn check(state: &State<u32>) -> Result<(), &'static str> {
    let course = &state.course;
    let rules = [
        (state.listeners.len() <= LISTENERS_MAX, "too many listeners"),
        (state.children.len() <= CHILDREN_MAX, "too many children"),
        (course.respawn.starts_ago.len() <= RESPAWN_BURST, "too many starts of workers"),
        (state.children.is_sorted_by(|child, next| child.id < next.id), "children out of order"),
        (state.children.last().is_none_or(|child| child.id.get() <= state.last_child), "child of the future"),
    ];
    broken(&rules).map_or(Ok(()), Err)?;
    state.children.iter().try_for_each(check_child)
}

fn check_child(child: &ChildState<u32>) -> Result<(), &'static str> {
    let (kept, input, ending) = (&child.frames.kept, &child.input, &child.ending);
    let is_long = |line: &Line| matches!(line, Line::Whole(bytes) if bytes.len() > LINE_BYTES_MAX);
    let rules = [
        (child.label.len() <= LABEL_BYTES_MAX, "long label"),
        (kept.len() <= CUSTODY_FRAMES_MAX, "too many frames"),
        (kept.is_sorted_by(|(number, _), (next, _)| number < next), "frames out of order"),
        (kept.first().is_none_or(|(number, _)| *number > 0), "frame without a number"),
        (kept.last().is_none_or(|(number, _)| *number <= child.frames.last_number), "frame of the future"),
        (!kept.iter().any(|(_, line)| is_long(line)), "long frame"),
        (child.calls.open.len() <= OPEN_CALLS_MAX, "too many calls"),
        (input.written <= input.accepted, "more written than accepted"),
        (input.current.as_ref().is_none_or(|begun| begun.written <= begun.frame.len()), "frame written beyond its end"),
        (ending.is_gone || (ending.exit.is_none() && ending.status.is_none()), "exit of a child that runs"),
    ];
    broken(&rules).map_or(Ok(()), Err)
}

fn broken(rules: &[(bool, &'static str)]) -> Option<&'static str> {
    rules.iter().find(|(holds, _)| !holds).map(|(_, rule)| *rule)
}

/// The longest record, in bytes: as long as the longest message, for a frame must fit.
const RECORD_BYTES_MAX: usize = MESSAGE_BYTES_MAX;

/// How much memory is prepared for a record before any of it was read, in bytes.
const PREPARED_BYTES_MAX: usize = 64 * 1024;

/// The longest time that is carried. Longer than any deadline.
const DURATION_MAX: Duration = Duration::from_secs(30 * 24 * 60 * 60);

#[cfg(test)]
mod tests;
