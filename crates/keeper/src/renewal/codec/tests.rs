//! The written form: what goes in comes out, and nothing else does.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::strategy::ValueTree as _;

use super::*;
use crate::identity::{BootId, ProcessIdentity};
use crate::types::{CallTag, ChildId, Exit};

fn written(state: &State<u32>) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode(state, &mut bytes).unwrap();
    bytes
}

fn read(bytes: &[u8]) -> Result<State<u32>, CodecError> {
    decode(&mut &bytes[..])
}

fn bytes(len_max: usize) -> impl Strategy<Value = Bytes> {
    vec(any::<u8>(), 0..len_max).prop_map(Bytes::from)
}

fn duration() -> impl Strategy<Value = Duration> {
    (0..=DURATION_MAX.as_secs() * 1000).prop_map(Duration::from_millis)
}

fn identity() -> impl Strategy<Value = ProcessIdentity> {
    (1..=i32::MAX.unsigned_abs(), any::<u64>(), any::<[u8; 16]>())
        .prop_map(|(pid, ticks, boot)| ProcessIdentity::from_parts(pid, ticks, BootId::from_bytes(boot)).unwrap())
}

fn exit() -> impl Strategy<Value = Exit> {
    (any::<Option<i32>>(), any::<Option<i32>>(), any::<u64>(), any::<bool>(), bytes(30)).prop_map(
        |(code, signal, frames_written, frame_partly_written, stderr_tail)| Exit {
            code,
            signal,
            frames_written,
            frame_partly_written,
            stderr_tail,
        },
    )
}

fn ending() -> impl Strategy<Value = EndingState> {
    let end = (any::<(Option<i32>, Option<i32>)>(), proptest::option::of(exit()));
    let plan = proptest::option::of((duration(), duration()));
    (plan, any::<bool>(), vec(identity(), 0..4), proptest::option::of(end)).prop_map(
        |(plan, was_terminated, known, end)| EndingState {
            plan,
            was_terminated,
            known,
            is_gone: end.is_some(),
            status: end.as_ref().map(|((code, signal), _)| Status { code: *code, signal: *signal }),
            exit: end.and_then(|(_, exit)| exit),
        },
    )
}

fn line() -> impl Strategy<Value = Line> {
    prop_oneof![
        bytes(40).prop_map(Line::Whole),
        (bytes(20), bytes(20), any::<u64>()).prop_map(|(head, tail, bytes)| Line::Oversize { head, tail, bytes }),
    ]
}

fn frames() -> impl Strategy<Value = FramesState> {
    (vec((1..1000_u64, line()), 0..6), any::<bool>()).prop_map(|(lines, is_discarding)| {
        let mut last_number = 0;
        let mut kept = Vec::new();
        for (step, line) in lines {
            last_number += step;
            kept.push((last_number, line));
        }
        FramesState { kept, last_number, is_discarding }
    })
}

fn input() -> impl Strategy<Value = InputState> {
    let current = proptest::option::of((bytes(30), any::<proptest::sample::Index>()));
    (current, vec(bytes(30), 0..4), 0..1000_u64, 0..1000_u64, any::<bool>()).prop_map(
        |(current, queue, written, waiting, is_closing)| InputState {
            current: current.map(|(frame, at)| Begun { written: at.index(frame.len() + 1), frame }),
            queue,
            accepted: written + waiting,
            written,
            is_closing,
        },
    )
}

fn child() -> impl Strategy<Value = ChildState<u32>> {
    let who = (".{0,10}", bytes(30), "[a-z0-9-]{8,20}", identity(), any::<u64>(), any::<[Option<u32>; 3]>());
    let oversize = proptest::option::of((bytes(20), bytes(20), any::<u64>()));
    let calls = (vec(any::<[u8; 16]>().prop_map(CallTag::from_bytes), 0..5), any::<u64>());
    (who, (bytes(60), oversize), frames(), calls, input(), (bytes(50), ending(), any::<bool>())).prop_map(
        |(who, (pending, oversize), frames, (open, forgotten), input, (stderr_tail, ending, is_forgotten))| {
            let (name, label, marker, identity, spawned_at_unix_ms, [stdin, stdout, stderr]) = who;
            let oversize = oversize.map(|(head, tail, bytes)| UnfinishedOversize { head, tail, bytes });
            ChildState {
                id: ChildId::new(0),
                name,
                label,
                marker,
                identity,
                spawned_at_unix_ms,
                stdin,
                stdout,
                stderr,
                output: Unfinished { pending, oversize },
                frames,
                calls: CallsState { open, forgotten },
                input,
                stderr_tail,
                ending,
                is_forgotten,
            }
        },
    )
}

fn leaving() -> impl Strategy<Value = Leaving<u32>> {
    (identity(), any::<u64>(), duration(), any::<Option<u32>>(), bytes(20))
        .prop_map(|(identity, number, kill_in, socket, note)| Leaving { identity, number, kill_in, socket, note })
}

fn passed() -> impl Strategy<Value = Passed<u32>> {
    (".{0,8}", any::<u32>(), bytes(30)).prop_map(|(listener, socket, read)| Passed { listener, socket, read })
}

fn course() -> impl Strategy<Value = Course<u32>> {
    let respawn = (vec(duration(), 0..=RESPAWN_BURST), any::<u32>())
        .prop_map(|(starts_ago, delayed)| RespawnState { starts_ago, delayed });
    let numbers = (any::<u32>(), any::<u64>(), any::<u32>());
    let blobs = (bytes(60), bytes(60), bytes(60));
    (numbers, respawn, blobs, vec(leaving(), 0..3), vec(passed(), 0..3)).prop_map(
        |((lock, last_worker, signals), respawn, blobs, leaving, connections)| Course {
            lock,
            last_worker,
            signals,
            respawn,
            settings: blobs.0,
            previous_settings: blobs.1,
            handover: blobs.2,
            leaving,
            connections,
        },
    )
}

fn state() -> impl Strategy<Value = State<u32>> {
    let children = vec((1..100_u64, child()), 0..4);
    let markers = vec("[a-z0-9-]{0,20}", 0..4);
    (identity(), vec((".{0,10}", any::<u32>()), 0..4), children, markers, any::<Option<bool>>(), course()).prop_map(
        |(keeper, listeners, children, ended_markers, shutdown, course)| {
            let mut last_child = 0;
            let mut numbered = Vec::new();
            for (step, mut child) in children {
                last_child += step;
                child.id = ChildId::new(last_child);
                numbered.push(child);
            }
            State { keeper, listeners, children: numbered, last_child, ended_markers, shutdown, course }
        },
    )
}

/// One that holds something of everything.
fn full_state() -> State<u32> {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let tree = state().prop_filter("everything", |state| {
        state.children.iter().any(|child| {
            child.input.current.is_some() && child.ending.exit.is_some() && child.output.oversize.is_some()
        }) && !state.course.leaving.is_empty()
            && !state.course.connections.is_empty()
    });
    tree.new_tree(&mut runner).unwrap().current()
}

proptest! {
    #[test]
    fn t2_a_state_survives_being_written_and_read(state in state()) {
        prop_assert_eq!(read(&written(&state)).unwrap(), state);
    }

    #[test]
    fn t2_junk_is_refused_and_never_panics(bytes in vec(any::<u8>(), 0..200)) {
        prop_assert!(read(&bytes).is_err());
    }

    #[test]
    fn t2_a_damaged_state_never_panics(
        state in state(),
        damage in vec((any::<proptest::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = written(&state);
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(state) = read(&bytes) {
            prop_assert_eq!(read(&written(&state)).unwrap(), state);
        }
    }
}

#[test]
fn t2_a_state_that_is_cut_off_anywhere_is_refused() {
    let bytes = written(&full_state());
    for end in 0..bytes.len() {
        assert!(read(&bytes[..end]).is_err(), "{end} of {} bytes", bytes.len());
    }
    assert!(read(&[&bytes[..], b"\0"].concat()).is_err());
}

#[test]
fn t2_a_state_without_one_of_its_records_is_refused() {
    let whole = written(&full_state());
    let (mut rest, mut at) = (&whole[..], 0);
    while let Some((prefix, _)) = rest.split_first_chunk() {
        let record_bytes = prefix.len() + u32::from_le_bytes(*prefix) as usize;
        let lacking = [&whole[..at], &whole[at + record_bytes..]].concat();
        assert!(read(&lacking).is_err(), "without the record at {at}");
        (rest, at) = (&rest[record_bytes..], at + record_bytes);
    }
}

#[test]
fn t2_a_state_that_no_keeper_can_be_in_is_refused() {
    fn with(change: impl FnOnce(&mut State<u32>)) -> String {
        let mut state = full_state();
        change(&mut state);
        read(&written(&state)).unwrap_err().to_string()
    }
    assert!(with(|state| state.last_child = 0).contains("child of the future"));
    assert!(with(|state| state.children.push(state.children[0].clone())).contains("children out of order"));
    assert!(
        with(|state| (state.children[0].input.accepted, state.children[0].input.written) = (0, 1))
            .contains("more written than accepted")
    );
    assert!(
        with(|state| {
            let frame = Bytes::from_static(b"frame");
            state.children[0].input.current = Some(Begun { frame, written: 6 });
        })
        .contains("beyond its end")
    );
    assert!(
        with(|state| {
            let line = Line::Whole(Bytes::from_static(b"line"));
            state.children[0].frames.kept = vec![(2, line.clone()), (2, line)];
        })
        .contains("frames out of order")
    );
}

#[test]
fn a_record_longer_than_any_message_is_not_written() {
    let mut state = full_state();
    state.course.settings = vec![0; RECORD_BYTES_MAX].into();
    assert!(encode(&state, &mut Vec::new()).is_err());
}
