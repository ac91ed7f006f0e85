//! The keeper takes another program and goes on with everything it holds, or goes back (requirement T2).

use std::fs;

use mainstay_keeper::{ProcessIdentity, Signal, signal};

use crate::handover::{await_idle, hear, identity, idle_client};
use crate::probe::{Probe, eventually, marked};

/// A keeper with a first worker in `mode`, to which another program is offered together with these settings.
pub(crate) fn offering(mode: &str, version: &str, settings: &str) -> Probe {
    let mut probe = Probe::idle();
    probe.set_mode(mode);
    probe.offer_settings(settings);
    let program = probe.copy_program(version);
    probe.write_program("program", &program);
    probe.start_keeper();
    probe
}

fn program_of(pid: u32) -> String {
    fs::read_link(format!("/proc/{pid}/exe")).unwrap().file_name().unwrap().to_str().unwrap().to_owned()
}

#[test]
fn t2_an_upgrade_changes_the_program_and_loses_nothing() {
    let probe = offering("lingers", "2.0", "two");
    let keeper = identity(probe.keeper_pid());
    let mut talk = probe.connect();
    let (before, _) = talk.worker();
    let child = talk.spawn("for i in $(seq 1 300); do echo line $i; [ $((i % 9)) = 0 ] && sleep 0.01; done; cat");
    let consume = format!("consume {} {}", child.id, probe.path("lines").display());
    talk.ask(&consume);
    assert_eq!(talk.call(&child, 5, "asked before"), "Ok(1)");
    let mut client = idle_client(&probe, "GET /");
    await_idle(&mut talk, 1);
    probe.set_mode("");
    assert_eq!(talk.ask("version"), "1.0");
    assert_eq!(talk.ask("succeed upgrade"), "granted");

    let mut next = probe.connect_beyond(1);
    assert_eq!((next.worker().1, next.ask("version"), next.ask("settings")), (2, "2.0".to_owned(), "two".to_owned()));
    assert_eq!(next.ask("handover"), "Succeeded upgrade=true from=1.0 to=2.0 reason=");
    assert_eq!(program_of(probe.keeper_pid()), "program-2.0");
    assert!(keeper.is_alive() && identity(child.pid).is_alive());
    assert_eq!(next.open(&child), "5");
    next.ask(&consume);
    assert_eq!(next.write(&child, "asked after"), "Ok(2)");
    let lines = || fs::read_to_string(probe.path("lines")).unwrap_or_default();
    eventually("the last line", || lines().contains("asked after\n").then_some(()));
    let expected: String = (1..=300).map(|number| format!("line {number}\n")).collect();
    assert_eq!(lines(), expected + "asked before\nasked after\n");
    next.ask("greet");
    assert_eq!(hear(&mut client), "2 mcp GET /");

    // The worker before is left alone, as long as it may take, and does not think that its keeper is gone.
    assert_eq!(talk.worker(), (before, 1));
    assert_eq!(probe.read("order"), "HandOver");
    probe.await_log("killing a worker that takes too long to leave");
    eventually("its end", || ProcessIdentity::of(before).unwrap().is_none().then_some(()));
    // And once more, asked by a signal.
    let program = probe.copy_program("3.0");
    probe.write_program("program", &program);
    probe.signal_keeper(Signal::HUP);
    let mut next = probe.connect_beyond(2);
    assert_eq!((next.worker().1, next.ask("version")), (3, "3.0".to_owned()));
    assert!(identity(child.pid).is_alive());
}

#[test]
fn t2_an_upgrade_whose_worker_does_not_get_ready_goes_back_to_the_program_before() {
    let probe = offering("", "2.0", "crash");
    let mut talk = probe.connect();
    let child = talk.spawn("cat");
    assert_eq!(talk.call(&child, 5, "asked"), "Ok(1)");
    assert_eq!(talk.ask("succeed upgrade"), "granted");
    let mut talk = probe.connect_beyond(1);
    assert_eq!((talk.worker().1, talk.ask("version")), (3, "1.0".to_owned()));
    assert_eq!(talk.ask("settings"), "settings of the test");
    let expected =
        "NotSucceeded upgrade=true from=1.0 to=2.0 reason=its worker gave up with exit code 7 before it was ready";
    assert_eq!(talk.ask("handover"), expected);
    assert_ne!(program_of(probe.keeper_pid()), "program-2.0");
    assert_eq!((talk.open(&child), talk.next(&child)), ("5".to_owned(), "frame 1 asked".to_owned()));
    // The next one may do better.
    probe.offer_settings("better");
    assert_eq!(talk.ask("succeed upgrade"), "granted");
    let mut talk = probe.connect_beyond(3);
    assert_eq!(
        (talk.worker().1, talk.ask("version"), talk.ask("settings")),
        (4, "2.0".to_owned(), "better".to_owned())
    );
    assert_eq!((talk.open(&child), talk.next(&child)), ("5".to_owned(), "frame 1 asked".to_owned()));
}

#[test]
fn t2_a_program_that_can_not_be_executed_changes_nothing() {
    let probe = offering("", "2.0", "two");
    // Gone between the rehearsal and the execution.
    probe.set_rehearsal("rm program; printf two");
    let mut talk = probe.connect();
    let child = talk.spawn("cat");
    assert_eq!(talk.ask("succeed upgrade"), "granted");
    let mut talk = probe.connect_beyond(1);
    assert_eq!((talk.worker().1, talk.ask("version")), (2, "1.0".to_owned()));
    assert_eq!(talk.ask("settings"), "settings of the test");
    assert!(talk.ask("handover").contains("could not execute the program"), "{}", talk.ask("handover"));
    assert_eq!(talk.write(&child, "same child"), "Ok(1)");
}

#[test]
fn t5_a_renewed_keeper_stops_like_any_other() {
    let mut probe = offering("lingers", "2.0", "two");
    let mut talk = probe.connect();
    let before = identity(talk.worker().0);
    let child = talk.spawn("trap '' TERM; sleep 1000 & while :; do sleep 1; done");
    probe.set_mode("");
    assert_eq!(talk.ask("succeed upgrade"), "granted");
    probe.connect_beyond(1);
    probe.signal_keeper(Signal::TERM);
    probe.wait_for_keeper();
    assert_eq!(probe.read("ended"), "Ended { retire: false, was_forced: false }");
    assert_eq!(marked(&child.marker), [0_u32; 0]);
    assert!(!before.is_alive());
    assert_eq!(fs::read_dir(probe.path("children")).unwrap().count(), 0);
    assert_eq!(mainstay_keeper::read_owner(probe.state_dir()), None);
}

#[test]
fn t2_a_renewed_keeper_that_is_killed_leaves_what_any_other_leaves() {
    let mut probe = offering("", "2.0", "two");
    let mut talk = probe.connect();
    let child = talk.spawn("cat");
    assert_eq!(talk.ask("succeed upgrade"), "granted");
    let (worker, _) = probe.connect_beyond(1).worker();
    let worker = identity(worker);
    probe.kill_keeper();
    probe.start_keeper();
    assert_eq!(probe.connect().worker().1, 1);
    assert_eq!(marked(&child.marker), [0_u32; 0]);
    assert!(!worker.is_alive());
}

#[test]
fn t2_a_worker_that_was_killed_before_the_renewal_is_no_zombie_after_it() {
    let probe = offering("stubborn", "2.0", "two");
    let mut talk = probe.connect();
    let (pid, _) = talk.worker();
    talk.say("succeed upgrade");
    assert_eq!(probe.read("order"), "HandOver");
    probe.set_mode("");
    signal(identity(pid), Signal::KILL).unwrap();
    assert_eq!(probe.connect_beyond(1).ask("version"), "2.0");
    assert_eq!(ProcessIdentity::of(pid).unwrap(), None);
}
