//! Workers come and go; the keeper stops (requirements T1, T5, T6).

use std::fs;
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use mainstay_keeper::{LockError, ProcessIdentity, Signal, acquire_lock, read_owner, signal};

use crate::probe::{Probe, eventually, marked, stretched};

#[test]
fn t1_no_connection_is_refused_while_workers_die() {
    let probe = Probe::start();
    let port: u16 = probe.read("port").parse().unwrap();
    let mut talk = probe.connect();
    for _ in 0..3 {
        let (pid, number) = talk.worker();
        signal(ProcessIdentity::of(pid).unwrap().unwrap(), Signal::KILL).unwrap();
        let mut waiting = Vec::new();
        for _ in 0..20 {
            waiting.push(TcpStream::connect(("127.0.0.1", port)).unwrap());
        }
        talk = probe.connect();
        assert_eq!(talk.worker().1, number + 1);
    }
}

#[test]
fn a_crashing_worker_is_replaced_five_times_at_once_and_then_slowly() {
    let mut probe = Probe::idle();
    probe.set_mode("crash");
    probe.start_keeper();
    eventually("five starts", || (probe.starts() == 5).then_some(()));
    let fifth_at = started_at(&probe);
    probe.set_mode("");
    // The sixth is not before a second later, and serves.
    assert_eq!(probe.connect().worker().1, 6);
    let pause = started_at(&probe).duration_since(fifth_at).unwrap();
    assert!(pause > Duration::from_millis(800), "{pause:?}");
    assert_eq!(probe.starts(), 6);
}

/// When the last worker said that it was started, whenever this test gets to look.
fn started_at(probe: &Probe) -> SystemTime {
    fs::metadata(probe.path("starts")).unwrap().modified().unwrap()
}

#[test]
fn t5_a_signal_drains_the_worker_and_ends_all_children() {
    let mut probe = Probe::start();
    let mut talk = probe.connect();
    let children =
        [talk.spawn("cat"), talk.spawn("trap '' TERM; sleep 1000 & while :; do sleep 1; done"), talk.spawn("true")];
    probe.signal_keeper(Signal::TERM);
    probe.wait_for_keeper();
    assert_eq!(probe.read("order"), "Drain { retire: false }");
    assert_eq!(probe.read("ended"), "Ended { retire: false, was_forced: false }");
    for child in children {
        assert_eq!(marked(&child.marker), [0_u32; 0]);
    }
    assert_eq!(fs::read_dir(probe.path("children")).unwrap().count(), 0);
    assert_eq!(read_owner(probe.state_dir()), None);
}

#[test]
fn t5_a_worker_that_does_not_drain_is_killed_at_the_bound() {
    let mut probe = Probe::idle();
    probe.set_mode("stubborn");
    probe.start_keeper();
    let (worker, _) = probe.connect().worker();
    let worker = ProcessIdentity::of(worker).unwrap().unwrap();
    let asked_at = Instant::now();
    probe.signal_keeper(Signal::INT);
    probe.wait_for_keeper();
    assert!(asked_at.elapsed() > Duration::from_millis(1400));
    assert!(!worker.is_alive());
    assert_eq!(probe.read("ended"), "Ended { retire: false, was_forced: true }");
}

#[test]
fn t5_a_second_signal_ends_everything_at_once() {
    let mut probe = Probe::idle();
    probe.set_mode("stubborn");
    probe.start_keeper();
    let mut talk = probe.connect();
    let child = talk.spawn("trap '' TERM; while :; do sleep 1; done");
    probe.signal_keeper(Signal::TERM);
    probe.read("order");
    let asked_at = Instant::now();
    probe.signal_keeper(Signal::TERM);
    probe.wait_for_keeper();
    assert!(asked_at.elapsed() < stretched(Duration::from_millis(1000)), "{:?}", asked_at.elapsed());
    assert_eq!(marked(&child.marker), [0_u32; 0]);
    assert_eq!(probe.read("ended"), "Ended { retire: false, was_forced: true }");
}

#[test]
fn a_worker_that_waits_for_what_another_would_wait_for_too_is_not_replaced() {
    let mut probe = Probe::idle();
    probe.set_mode("waits");
    probe.start_keeper();
    // Longer than a worker may take that says nothing.
    let over_at = Instant::now() + Duration::from_secs(33);
    while Instant::now() < over_at {
        assert_eq!(probe.starts().max(1), 1);
        std::thread::sleep(Duration::from_millis(200));
    }
    fs::write(probe.path("go"), "").unwrap();
    assert_eq!(probe.connect().worker().1, 1);
}

#[test]
fn a_worker_that_gives_no_sign_of_life_is_replaced() {
    let probe = Probe::start();
    let mut talk = probe.connect();
    let child = talk.spawn("cat");
    let (pid, number) = talk.worker();
    signal(ProcessIdentity::of(pid).unwrap().unwrap(), Signal::STOP).unwrap();
    let mut next = probe.connect_patiently(number);
    assert_eq!(next.worker().1, number + 1);
    assert_eq!(next.write(&child, "lives"), "Ok(1)");
    assert!(fs::read_to_string(probe.path("keeper.log")).unwrap().contains("gives no sign of life"));
}

#[test]
fn a_worker_may_ask_for_the_end_of_the_gateway() {
    let mut probe = Probe::start();
    probe.connect().ask("shutdown retire");
    probe.wait_for_keeper();
    assert_eq!(probe.read("order"), "Drain { retire: true }");
    assert_eq!(probe.read("ended"), "Ended { retire: true, was_forced: false }");
}

#[test]
fn a_worker_learns_that_its_keeper_is_gone() {
    let mut probe = Probe::start();
    let (worker, _) = probe.connect().worker();
    let worker = ProcessIdentity::of(worker).unwrap().unwrap();
    probe.kill_keeper();
    assert_eq!(probe.read("order"), "Detached");
    eventually("the worker's end", || (!worker.is_alive()).then_some(()));
}

#[test]
fn t6_a_second_gateway_is_refused_and_told_the_owner() {
    let mut probe = Probe::start();
    let refused = acquire_lock(probe.state_dir(), "second").unwrap_err();
    assert!(matches!(&refused, LockError::Held { owner: Some(owner), .. }
        if owner.identity.pid() == probe.keeper_pid() && owner.note == "probe" && owner.is_alive()));
    // A killed owner leaves its note behind, and nobody is kept out by it.
    probe.kill_keeper();
    assert!(!read_owner(probe.state_dir()).unwrap().is_alive());
    acquire_lock(probe.state_dir(), "second").unwrap();
}

#[test]
fn files_are_nobody_elses_business() {
    let probe = Probe::start();
    let mut talk = probe.connect();
    let child = talk.spawn("echo secret >&2; echo up; cat");
    assert_eq!(talk.next(&child), "frame 1 up");
    let find = |kind: &str, mode: &str| {
        let names = ["lock", "children", "logs"].map(|name| probe.path(name));
        let out = Command::new("find").args(names).args(["-type", kind, "!", "-perm", mode]).output().unwrap();
        String::from_utf8(out.stdout).unwrap()
    };
    assert_eq!((find("f", "0600"), find("d", "0700")), (String::new(), String::new()));
}
