//! What goes on over renewals: children, and what they say and are told; descriptors, signals, and the process itself.

use std::fs;
use std::time::{Duration, Instant};

use super::probe::{Probe, eventually};
use crate::identity::Stat;
use crate::lock::{LockError, acquire_lock};

/// A different sequence of numbers below `below` for each seed; the same for the same.
struct Dice(u64);

impl Dice {
    fn throw(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below
    }
}

#[test]
fn t2_lines_and_frames_are_neither_lost_nor_doubled_by_twenty_renewals() {
    const LINES: usize = 2000;
    let mut probe = Probe::start();
    let child = probe.spawn(&format!(
        "(i=0; while [ $i -lt {LINES} ]; do i=$((i+1)); echo n $i; [ $((i%100)) = 0 ] && sleep 0.05; done) & \
         while read line; do echo r $line; done; wait"
    ));
    let (mut dice, mut frames) = (Dice(7), 0);
    for renewal in 1..=20 {
        for _ in 0..dice.throw(12) {
            frames += 1;
            probe.ask(&format!("write {} frame {frames}", child.id));
            if dice.throw(3) == 0 {
                probe.drain(child);
            }
        }
        let said = probe.said(child).len() as u64;
        if said > 0 {
            let number = 1 + dice.throw(said);
            probe.ask(&format!("acknowledge {} {number}", child.id));
        }
        probe.renew("renew");
        assert_eq!(probe.ask("count"), format!("{renewal} None"));
    }
    let said: Vec<String> =
        probe.hear(child, LINES + frames).iter().map(|line| String::from_utf8(line.to_vec()).unwrap()).collect();
    let of = |letter: &str| said.iter().filter(|line| line.starts_with(letter)).cloned().collect::<Vec<_>>();
    assert_eq!(of("n"), (1..=LINES).map(|number| format!("n {number}")).collect::<Vec<_>>());
    assert_eq!(of("r"), (1..=frames).map(|number| format!("r frame {number}")).collect::<Vec<_>>());
    let told = probe.ask("children");
    assert!(told.starts_with(&format!("{} {} label-renewal-", child.id, child.pid)), "{told}");
    assert!(told.contains(&format!(" {frames} {frames} 0 []")), "{told}");
}

#[test]
fn t2_a_line_that_is_half_said_comes_out_whole() {
    let mut probe = Probe::start();
    let child = probe.spawn("printf par; read line; printf tial; read line; printf '\\r\\n'; cat");
    probe.renew("renew");
    probe.ask(&format!("write {} go", child.id));
    probe.renew("renew");
    probe.ask(&format!("write {} go", child.id));
    assert_eq!(probe.hear(child, 1), [b"partial"]);
}

#[test]
fn t2_long_lines_in_both_directions_are_identical_however_often_the_keeper_is_renewed() {
    const LONG: usize = 6_000_000;
    let mut probe = Probe::start();
    // One that talks slowly, and one that listens slowly.
    let talker = probe.spawn(&format!(
        "i=0; while [ $i -lt 60 ]; do i=$((i+1)); head -c {} /dev/zero | tr '\\0' y; sleep 0.02; done; echo; cat",
        LONG / 60
    ));
    let listener = probe.spawn(
        "dd bs=100000 count=1 iflag=fullblock 2>/dev/null | wc -c; sleep 1; \
         head -c 5900000 | tr -d x | wc -c; cat",
    );
    probe.ask(&format!("fill {} {LONG}", listener.id));
    for _ in 0..10 {
        probe.renew("renew");
    }
    assert!(probe.hear(talker, 1)[0].iter().eq(std::iter::repeat_n(&b'y', LONG)));
    let counted: Vec<String> =
        probe.hear(listener, 2).iter().map(|line| String::from_utf8(line.to_vec()).unwrap()).collect();
    assert_eq!(counted, ["100000", "0"]);
    probe.ask(&format!("write {} after", listener.id));
    assert_eq!(probe.hear(listener, 3)[2], b"after");
}

#[test]
fn t2_an_oversize_line_is_reported_although_the_keeper_was_renewed_within_it() {
    let mut probe = Probe::start();
    let child = probe.spawn("head -c 17000000 /dev/zero | tr '\\0' x; read line; printf yy; echo; echo after; cat");
    for _ in 0..5 {
        probe.renew("renew");
    }
    probe.ask(&format!("write {} go", child.id));
    let said = probe.hear(child, 2);
    assert_eq!(said, [&b"oversize 17000002"[..], b"after"]);
}

#[test]
fn t2_custody_that_is_full_stays_full_and_nothing_is_lost() {
    const LINES: usize = 10_000;
    let mut probe = Probe::start();
    let child = probe.spawn(&format!("seq 1 {LINES}; echo through >&2; cat"));
    probe.hear(child, 4096);
    probe.renew("renew");
    // What was not dealt with comes again, and nothing more before some of it is.
    probe.drain(child);
    assert_eq!(probe.said(child).len(), 4096);
    for number in 1..=LINES {
        if number + 4096 > LINES {
            break;
        }
        probe.ask(&format!("acknowledge {} {number}", child.id));
        if number % 2000 == 0 {
            probe.renew("renew");
        }
        probe.drain(child);
    }
    let said = probe.hear(child, LINES);
    assert!(said.iter().zip(1..).all(|(line, number)| *line == number.to_string().as_bytes()));
}

#[test]
fn r4_open_calls_stay_open_in_their_order() {
    let mut probe = Probe::start();
    let child = probe.spawn("cat");
    for tag in [5, 3, 9] {
        probe.ask(&format!("call {} {tag}", child.id));
    }
    probe.renew("renew");
    assert!(probe.ask("children").contains("[5,3,9]"));
}

#[test]
fn c1_a_child_that_dies_while_the_keeper_is_executed_is_found_and_reaped() {
    let mut probe = Probe::start();
    let child = probe.spawn("echo why >&2; read line; exit 7");
    let other = probe.spawn("cat");
    eventually("its last words", || probe.ask("children").contains("[why|]").then_some(()));
    probe.renew(&format!("renew-after-kill {}", child.pid));
    let exit = probe.hear_exit(child);
    assert!(exit.contains("signal: Some(9)") && exit.contains("code: None"), "{exit}");
    eventually("the end of all but one", || (probe.descendants() == [other.pid]).then_some(()));
    // What is over stays over, and is told to every worker until it is forgotten.
    probe.renew("renew");
    assert_eq!(probe.hear_exit(child), exit);
    probe.ask(&format!("forget {}", child.id));
    probe.renew("renew");
    assert!(probe.ask("children").starts_with(&format!("{} {}", other.id, other.pid)));
}

#[test]
fn c1_an_orphan_that_ends_while_the_keeper_is_executed_is_reaped() {
    let mut probe = Probe::start();
    let child = probe.spawn("sh -c 'sleep 1000 & echo $!'; cat");
    let orphan: u32 = String::from_utf8(probe.hear(child, 1)[0].to_vec()).unwrap().parse().unwrap();
    assert_eq!(Stat::read(orphan).unwrap().unwrap().parent, probe.pid());
    probe.renew(&format!("renew-after-kill {orphan}"));
    eventually("the orphan's end", || Stat::read(orphan).unwrap().is_none().then_some(()));
    assert_eq!(probe.descendants(), [child.pid]);
}

#[test]
fn c1_an_end_that_was_ordered_is_carried_through() {
    let mut probe = Probe::start();
    let stubborn = probe.spawn("trap 'echo term' TERM; while :; do sleep 0.1; done");
    let escaped = probe.spawn("setsid env -u MAINSTAY_CHILD sleep 1000 & read line");
    probe.ask(&format!("stop {} 1000", stubborn.id));
    probe.renew("renew");
    // TERM is not said again.
    probe.hear(stubborn, 1);
    for _ in 0..5 {
        probe.renew("renew");
    }
    assert!(probe.hear_exit(stubborn).contains("signal: Some(9)"));
    assert_eq!(probe.said(stubborn), [b"term"]);
    probe.ask(&format!("stop {} 100", escaped.id));
    probe.renew("renew");
    probe.hear_exit(escaped);
    eventually("the end of all", || probe.descendants().is_empty().then_some(()));
}

#[test]
fn t2_descriptors_neither_leak_nor_get_lost_nor_are_inherited() {
    let mut probe = Probe::start();
    // Whoever runs the tests may have open what everybody inherits.
    let inherited = probe.ask("descriptors").split_once(']').unwrap().0.to_owned();
    let given = given(&mut probe);
    let children = [probe.spawn("cat"), probe.spawn("exec >&-; sleep 1000"), probe.spawn("exec <&-; sleep 1000")];
    probe.ask("keep-connections 600");
    probe.renew("renew");
    let before = probe.ask("descriptors");
    assert!(before.starts_with(&format!("{inherited}] ")), "{before}, not {inherited}");
    for _ in 0..20 {
        probe.renew("renew");
    }
    assert_eq!(probe.ask("connections"), "600");
    let after = eventually("the same descriptors", || Some(probe.ask("descriptors")).filter(|after| *after == before));
    assert!(!after.contains("memfd"), "{after}");
    for child in children {
        assert!(Stat::read(child.pid).unwrap().is_some());
    }
    // What is started after it inherits nothing but its pipes.
    assert_eq!(self::given(&mut probe), given);
}

/// The descriptors that a child is given.
fn given(probe: &mut Probe) -> Vec<Vec<u8>> {
    let child = probe.spawn("exec ls /proc/self/fd");
    probe.hear_exit(child);
    probe.said(child).into_iter().map(<[u8]>::to_vec).collect()
}

#[test]
fn t2_more_connections_than_one_message_or_one_socket_takes_are_carried() {
    let mut probe = Probe::start();
    probe.ask("keep-connections 12000");
    probe.renew("renew");
    assert_eq!(probe.ask("connections"), "12000");
}

#[test]
fn t5_a_signal_that_comes_while_the_keeper_is_executed_is_not_lost_and_ends_nothing() {
    let mut probe = Probe::start();
    let child = probe.spawn("cat");
    fs::write(probe.path("fault"), "signals").unwrap();
    probe.renew("renew");
    // Of the same signal one waits.
    eventually("both signals", || (probe.ask("signals") == "101").then_some(()));
    // Nothing is held any more, neither from the keeper nor from what it starts.
    let started = probe.spawn("grep SigBlk /proc/self/status; cat");
    assert_eq!(probe.hear(started, 1), [b"SigBlk:\t0000000000000000"]);
    probe.ask(&format!("write {} still there", child.id));
    assert_eq!(probe.hear(child, 1), [b"still there"]);
}

#[test]
fn t2_the_process_is_the_same_but_for_its_program() {
    let mut probe = Probe::start();
    let before = probe.ask("about");
    assert!(before.contains("play_keeper") && before.contains(" true "), "{before}");
    probe.renew("renew");
    let after = probe.ask("about");
    // The name was that of the file; now it is that of the first argument. They are the same here.
    assert_eq!(after, before);
}

#[test]
fn t6_the_lock_stays_held_over_renewals() {
    let mut probe = Probe::start();
    for _ in 0..3 {
        probe.renew("renew");
        let state_dir = probe.path("");
        let refused = acquire_lock(&state_dir, "other").unwrap_err();
        assert!(matches!(&refused, LockError::Held { owner: Some(owner), .. } if owner.identity.pid() == probe.pid()));
    }
}

#[test]
fn t1_no_connection_is_refused_while_the_keeper_is_renewed() {
    let mut probe = Probe::start();
    let port: u16 = fs::read_to_string(probe.path("port")).unwrap().parse().unwrap();
    probe.renew("renew");
    let (stop, stopped) = std::sync::mpsc::sync_channel::<()>(0);
    let connecting = std::thread::spawn(move || {
        let mut connected = 0;
        while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
            drop(std::net::TcpStream::connect(("127.0.0.1", port)).unwrap());
            connected += 1;
            std::thread::sleep(Duration::from_millis(1));
        }
        connected
    });
    for _ in 0..5 {
        probe.renew("renew");
    }
    drop(stop);
    assert!(connecting.join().unwrap() > 0);
}

#[test]
fn c1_children_of_a_keeper_that_is_killed_after_a_renewal_are_found_by_the_next() {
    let mut probe = Probe::start();
    let child = probe.spawn("trap '' HUP TERM; while :; do sleep 0.1; done");
    probe.renew("renew");
    let keeper = crate::identity::ProcessIdentity::of(probe.pid()).unwrap().unwrap();
    crate::identity::signal(keeper, crate::identity::Signal::KILL).unwrap();
    eventually("the keeper's end", || (!keeper.is_alive()).then_some(()));
    let asked_at = Instant::now();
    let swept = crate::sweep::sweep(&probe.path("")).unwrap();
    assert_eq!(swept.ended, 1, "{swept:?} after {:?}", asked_at.elapsed());
    assert!(Stat::read(child.pid).unwrap().is_none_or(|stat| stat.is_zombie));
}
