use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use super::*;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;

use crate::identity::BootId;
use crate::types::HandoverOutcome;

fn bytes(max: usize) -> impl Strategy<Value = Bytes> {
    vec(any::<u8>(), 0..max).prop_map(Bytes::from)
}

fn os_text() -> impl Strategy<Value = OsString> {
    vec(any::<u8>(), 0..20).prop_map(OsString::from_vec)
}

fn child() -> impl Strategy<Value = ChildId> {
    any::<u64>().prop_map(ChildId::new)
}

fn identity() -> impl Strategy<Value = ProcessIdentity> {
    (1..4_000_000_u32, any::<u64>(), any::<[u8; 16]>())
        .prop_map(|(pid, ticks, boot)| ProcessIdentity::from_parts(pid, ticks, BootId::from_bytes(boot)).unwrap())
}

fn tag() -> impl Strategy<Value = CallTag> {
    any::<[u8; 16]>().prop_map(CallTag::from_bytes)
}

fn spawn() -> impl Strategy<Value = Spawn> {
    let program = (vec(any::<u8>(), 0..40), ".{0,9}", os_text(), vec(os_text(), 0..4));
    let rest = (vec((os_text(), os_text()), 0..4), option::of(os_text().prop_map(PathBuf::from)), ".{0,9}");
    (program, rest).prop_map(|((label, name, program, args), (env, cwd, marker))| Spawn {
        label,
        name,
        program,
        args,
        env,
        cwd,
        marker,
    })
}

fn exit() -> impl Strategy<Value = Exit> {
    (option::of(any::<i32>()), option::of(any::<i32>()), any::<u64>(), any::<bool>(), bytes(99)).prop_map(
        |(code, signal, frames_written, frame_partly_written, stderr_tail)| Exit {
            code,
            signal,
            frames_written,
            frame_partly_written,
            stderr_tail,
        },
    )
}

fn failure() -> impl Strategy<Value = SpawnFailure> {
    (1..8_u8).prop_map(|code| SpawnFailure::from_code(code).unwrap())
}

fn passing() -> impl Strategy<Value = Passing> {
    (".{0,9}", bytes(9_000)).prop_map(|(listener, read)| Passing { listener, read })
}

fn handover() -> impl Strategy<Value = Handover> {
    let outcome = prop_oneof![Just(HandoverOutcome::Succeeded), Just(HandoverOutcome::NotSucceeded)];
    (outcome, any::<bool>(), any::<u64>(), [".{0,9}", ".{0,9}", ".{0,9}"]).prop_map(
        |(outcome, upgrade, at_unix_ms, [from_version, to_version, reason])| Handover {
            outcome,
            upgrade,
            at_unix_ms,
            from_version,
            to_version,
            reason,
        },
    )
}

fn to_keeper() -> impl Strategy<Value = ToKeeper> {
    prop_oneof![
        (any::<u32>(), any::<u32>()).prop_map(|(version, pid)| ToKeeper::Hello { version, pid }),
        Just(ToKeeper::Ready),
        (any::<u64>(), spawn()).prop_map(|(request, spawn)| ToKeeper::Spawn { request, spawn }),
        (child(), option::of(tag()), bytes(20_000)).prop_map(|(child, tag, frame)| ToKeeper::Write {
            child,
            tag,
            frame
        }),
        (child(), any::<u64>(), any::<u64>()).prop_map(|(child, from, through)| ToKeeper::Acknowledge {
            child,
            from,
            through
        }),
        (child(), vec(tag(), 0..20)).prop_map(|(child, tags)| ToKeeper::Settle { child, tags }),
        (child(), any::<u32>())
            .prop_map(|(child, ms)| ToKeeper::Stop { child, grace: Duration::from_millis(ms.into()) }),
        child().prop_map(|child| ToKeeper::Forget { child }),
        (any::<u64>(), child()).prop_map(|(request, child)| ToKeeper::StderrTail { request, child }),
        any::<bool>().prop_map(|retire| ToKeeper::Shutdown { retire }),
        (any::<u64>(), any::<bool>(), any::<bool>()).prop_map(|(request, upgrade, rehearse_only)| ToKeeper::Succeed {
            request,
            upgrade,
            rehearse_only
        }),
        passing().prop_map(ToKeeper::Connection),
        Just(ToKeeper::HandedOver),
        Just(ToKeeper::Pong),
        Just(ToKeeper::Waiting),
    ]
}

fn to_worker() -> impl Strategy<Value = ToWorker> {
    let welcome = (identity(), any::<u64>(), vec(".{0,9}", 0..4), ".{0,9}", option::of(handover()), bytes(99));
    let welcome = welcome.prop_map(|(keeper, worker_number, listeners, keeper_version, handover, settings)| {
        let said = Welcoming { keeper, worker_number, listeners, keeper_version, handover, settings };
        ToWorker::Welcome(said)
    });
    let held = (child(), identity(), any::<[u64; 4]>(), vec(tag(), 0..20), bytes(99));
    let held = held.prop_map(|(child, identity, numbers, open, label)| {
        let [spawned_at_unix_ms, frames_accepted, frames_written, queued_bytes] = numbers;
        ToWorker::Held(Holding {
            child,
            identity,
            spawned_at_unix_ms,
            frames_accepted,
            frames_written,
            queued_bytes,
            open,
            label,
        })
    });
    let oversize = (child(), any::<[u64; 2]>(), bytes(99), bytes(99))
        .prop_map(|(child, [number, bytes], head, tail)| ToWorker::Oversize { child, number, bytes, head, tail });
    prop_oneof![
        any::<u32>().prop_map(|version| ToWorker::Refused { version }),
        welcome,
        held,
        Just(ToWorker::Begin),
        (any::<u64>(), child(), identity()).prop_map(|(request, child, identity)| ToWorker::Spawned {
            request,
            child,
            identity
        }),
        (any::<u64>(), failure(), ".{0,9}").prop_map(|(request, failure, detail)| ToWorker::SpawnFailed {
            request,
            failure,
            detail
        }),
        (child(), any::<u64>(), bytes(20_000)).prop_map(|(child, number, bytes)| ToWorker::Frame {
            child,
            number,
            bytes
        }),
        oversize,
        (child(), any::<u64>()).prop_map(|(child, through)| ToWorker::Written { child, through }),
        (child(), exit()).prop_map(|(child, exit)| ToWorker::Exited { child, exit }),
        (any::<u64>(), bytes(99)).prop_map(|(request, bytes)| ToWorker::StderrTail { request, bytes }),
        any::<bool>().prop_map(|retire| ToWorker::Drain { retire }),
        Just(ToWorker::HandOver),
        (any::<u64>(), bytes(300)).prop_map(|(request, settings)| ToWorker::Succeeding { request, settings }),
        (any::<u64>(), ".{0,9}").prop_map(|(request, reason)| ToWorker::NotSucceeding { request, reason }),
        passing().prop_map(ToWorker::Connection),
        Just(ToWorker::Ping),
    ]
}

/// What the receiver is given of an encoded message: everything behind the length.
fn body(out: Outbox) -> Bytes {
    out.into_bytes().slice(4..)
}

/// What a mutation does to a message at a place that it takes modulo the length.
#[derive(Clone, Debug)]
enum Mutation {
    Flip(usize, u8),
    /// Lengths, counts and numbers are where most is to be got wrong.
    Number(usize, u32),
    Cut(usize, usize),
    Repeat(usize, usize),
    Insert(usize, Vec<u8>),
}

fn mutation() -> impl Strategy<Value = Mutation> {
    let number = prop_oneof![
        Just(0),
        Just(1),
        Just(u32::MAX),
        Just(u32::MAX >> 1),
        Just(u32::try_from(LIST_LEN_MAX).unwrap() + 1),
        0..300_u32,
        any::<u32>(),
    ];
    let place = 0..20_000_usize;
    prop_oneof![
        (place.clone(), any::<u8>()).prop_map(|(at, bits)| Mutation::Flip(at, bits)),
        (place.clone(), number).prop_map(|(at, number)| Mutation::Number(at, number)),
        (place.clone(), 0..40_usize).prop_map(|(at, len)| Mutation::Cut(at, len)),
        (place.clone(), 0..40_usize).prop_map(|(at, len)| Mutation::Repeat(at, len)),
        (place, vec(any::<u8>(), 0..9)).prop_map(|(at, bytes)| Mutation::Insert(at, bytes)),
    ]
}

fn mutated(message: Bytes, mutations: &[Mutation]) -> Bytes {
    let mut bytes = message.to_vec();
    for mutation in mutations {
        let part = |at: usize, len: usize, bytes: &[u8]| {
            let at = at % (bytes.len() + 1);
            at..(at + len).min(bytes.len())
        };
        match mutation {
            Mutation::Flip(at, bits) if !bytes.is_empty() => {
                let at = at % bytes.len();
                bytes[at] ^= bits;
            }
            Mutation::Flip(..) => {}
            Mutation::Number(at, number) => {
                let place = part(*at, 4, &bytes);
                bytes.splice(place, number.to_le_bytes());
            }
            Mutation::Cut(at, len) => drop(bytes.drain(part(*at, *len, &bytes))),
            Mutation::Repeat(at, len) => {
                let place = part(*at, *len, &bytes);
                let again = bytes[place.clone()].to_vec();
                bytes.splice(place.end..place.end, again);
            }
            Mutation::Insert(at, more) => {
                let place = part(*at, 0, &bytes);
                bytes.splice(place, more.iter().copied());
            }
        }
    }
    bytes.into()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// No coverage guides it: it mutates messages that are whole, so that what is wrong stands deep in them. What is
    /// understood all the same says the same again.
    #[test]
    fn a_message_that_was_tampered_with_is_refused_or_understood_and_never_panics(
        to_keeper in to_keeper(),
        to_worker in to_worker(),
        mutations in vec(mutation(), 1..6),
    ) {
        let (mut to_keeper_out, mut to_worker_out) = (Outbox::default(), Outbox::default());
        to_keeper.encode(&mut to_keeper_out);
        to_worker.encode(&mut to_worker_out);
        if let Ok(understood) = ToKeeper::decode(mutated(body(to_keeper_out), &mutations)) {
            let mut again = Outbox::default();
            understood.encode(&mut again);
            prop_assert_eq!(ToKeeper::decode(body(again)), Ok(understood));
        }
        if let Ok(understood) = ToWorker::decode(mutated(body(to_worker_out), &mutations)) {
            let mut again = Outbox::default();
            understood.encode(&mut again);
            prop_assert_eq!(ToWorker::decode(body(again)), Ok(understood));
        }
    }
}

proptest! {
    #[test]
    fn a_message_to_the_keeper_survives_the_wire(message in to_keeper()) {
        let mut out = Outbox::default();
        message.encode(&mut out);
        prop_assert_eq!(ToKeeper::decode(body(out)), Ok(message));
    }

    #[test]
    fn a_message_to_the_worker_survives_the_wire(message in to_worker()) {
        let mut out = Outbox::default();
        message.encode(&mut out);
        prop_assert_eq!(ToWorker::decode(body(out)), Ok(message));
    }

    #[test]
    fn junk_is_refused_or_read_but_never_panics(kind in any::<u8>(), junk in vec(any::<u8>(), 0..200)) {
        let mut message = vec![kind];
        message.extend(junk);
        let message = Bytes::from(message);
        let _ = ToKeeper::decode(message.clone());
        let _ = ToWorker::decode(message);
    }

    #[test]
    fn a_truncated_message_never_panics(
        to_worker in to_worker(),
        to_keeper in to_keeper(),
        keep in 0..400_usize,
    ) {
        let (mut to_worker_out, mut to_keeper_out) = (Outbox::default(), Outbox::default());
        to_worker.encode(&mut to_worker_out);
        to_keeper.encode(&mut to_keeper_out);
        let whole = body(to_worker_out);
        let _ = ToWorker::decode(whole.slice(..keep.min(whole.len())));
        let whole = body(to_keeper_out);
        let _ = ToKeeper::decode(whole.slice(..keep.min(whole.len())));
    }
}

#[test]
fn the_first_message_never_changes_its_form() {
    // A worker of any version must be able to tell, and a keeper of any version to read, which version it speaks.
    let mut out = Outbox::default();
    ToKeeper::Hello { version: 1, pid: 0x0102 }.encode(&mut out);
    assert_eq!(&out.into_bytes()[..], [9, 0, 0, 0, 1, 1, 0, 0, 0, 2, 1, 0, 0]);
    let mut out = Outbox::default();
    ToWorker::Refused { version: 1 }.encode(&mut out);
    assert_eq!(&out.into_bytes()[..], [5, 0, 0, 0, 65, 1, 0, 0, 0]);
    // A leaving worker may be older than the keeper that tells it to finish.
    let mut out = Outbox::default();
    ToWorker::Drain { retire: true }.encode(&mut out);
    assert_eq!(&out.into_bytes()[..], [2, 0, 0, 0, 76, 1]);
}

#[test]
fn more_of_a_request_than_is_passed_on_is_refused() {
    for (len, is_taken) in [(CONNECTION_READ_BYTES_MAX, true), (CONNECTION_READ_BYTES_MAX + 1, false)] {
        let passing = Passing { listener: "mcp".to_owned(), read: Bytes::from(vec![b'x'; len]) };
        let mut out = Outbox::default();
        ToKeeper::Connection(passing).encode(&mut out);
        assert_eq!(ToKeeper::decode(body(out)).is_ok(), is_taken);
    }
}
