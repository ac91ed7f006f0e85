//! A worker hands over to its successor: reload, upgrade, and the way back (requirements T1, T2, T5, C8).

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;

use mainstay_keeper::{ProcessIdentity, Signal, UNCHANGED, signal};

use crate::probe::{BOUND, Probe, Talk, eventually};

/// A keeper whose rehearsals offer these settings.
fn offering(settings: &str) -> Probe {
    let probe = Probe::start();
    probe.offer_settings(settings);
    probe
}

/// A keeper whose rehearsals offer other settings each time, since the same are no reason for a handover.
fn offering_others() -> Probe {
    let probe = Probe::start();
    probe.set_rehearsal("printf 'settings of %s' $$");
    probe
}

/// Asks for a reload and talks to whoever serves after it.
fn reload(probe: &Probe, talk: &mut Talk) -> Talk {
    let (_, number) = talk.worker();
    // The same settings once more are no reload.
    let in_force = talk.ask("settings");
    if probe.offers(&in_force) {
        assert_eq!(talk.ask("succeed reload"), format!("refused {UNCHANGED}"));
        assert_eq!(talk.ask("rehearse"), format!("refused {UNCHANGED}"));
        let offered = format!("{in_force}+");
        probe.offer_settings(&offered);
        assert_eq!(talk.ask("rehearse"), format!("would be {offered}"));
        assert_eq!((talk.worker().1, talk.ask("settings")), (number, in_force), "nothing has changed");
    }
    assert_eq!(talk.ask("succeed reload"), "granted");
    probe.connect_beyond(number)
}

/// A client that has said so much and waits.
pub(crate) fn idle_client(probe: &Probe, said: &str) -> BufReader<TcpStream> {
    let port: u16 = probe.read("mcp-port").parse().unwrap();
    let mut client = TcpStream::connect(("127.0.0.1", port)).unwrap();
    client.set_read_timeout(Some(BOUND)).unwrap();
    client.write_all(said.as_bytes()).unwrap();
    BufReader::new(client)
}

pub(crate) fn hear(client: &mut BufReader<TcpStream>) -> String {
    let mut line = String::new();
    client.read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

pub(crate) fn await_idle(talk: &mut Talk, count: usize) {
    eventually("idle connections", || (talk.ask("idle") == count.to_string()).then_some(()));
}

pub(crate) fn identity(pid: u32) -> ProcessIdentity {
    ProcessIdentity::of(pid).unwrap().unwrap()
}

#[test]
fn t4_a_reload_gives_the_successor_other_settings_and_the_same_children() {
    let probe = offering("settings two");
    let mut talk = probe.connect();
    let child = talk.spawn("cat");
    assert_eq!(talk.call(&child, 7, "kept open"), "Ok(1)");
    assert_eq!(talk.next(&child), "frame 1 kept open");
    assert_eq!((talk.ask("handover"), talk.ask("version")), (String::new(), "1.0".to_owned()));

    let mut talk = reload(&probe, &mut talk);
    assert_eq!(talk.worker().1, 2);
    assert_eq!(talk.ask("settings"), "settings two");
    assert_eq!(talk.ask("handover"), "Succeeded upgrade=false from=1.0 to=1.0 reason=");
    assert_eq!(talk.open(&child), "7");
    // What was not acknowledged comes again.
    assert_eq!(talk.next(&child), "frame 1 kept open");
    assert_eq!(talk.write(&child, "same child"), "Ok(2)");
    assert_eq!(talk.next(&child), "frame 2 same child");
    // A crash afterwards changes neither the settings nor what is known of the handover.
    let mut talk = probe.kill_worker(&mut talk);
    assert_eq!(talk.ask("settings"), "settings two");
    assert!(talk.ask("handover").starts_with("Succeeded"));
}

#[test]
fn c8_lines_that_a_child_writes_over_many_handovers_reach_exactly_one_worker() {
    let probe = offering_others();
    let mut talk = probe.connect();
    let child = talk.spawn("for i in $(seq 1 600); do echo line $i; [ $((i % 7)) = 0 ] && sleep 0.01; done; cat");
    let file = probe.path("lines");
    let consume = format!("consume {} {}", child.id, file.display());
    talk.ask(&consume);
    for _ in 0..4 {
        talk = reload(&probe, &mut talk);
        talk.ask(&consume);
    }
    let lines = || fs::read_to_string(&file).unwrap_or_default();
    eventually("the last line", || lines().contains("line 600\n").then_some(()));
    let expected: String = (1..=600).map(|number| format!("line {number}\n")).collect();
    assert_eq!(lines(), expected);
}

#[test]
fn t1_idle_connections_go_to_the_successor_with_what_was_read_of_them() {
    const CLIENTS: usize = 700;
    let probe = offering_others();
    let mut talk = probe.connect();
    let mut clients: Vec<_> = (0..CLIENTS).map(|number| idle_client(&probe, &format!("GET /{number}"))).collect();
    await_idle(&mut talk, CLIENTS);
    let mut talk = reload(&probe, &mut talk);
    assert_eq!(talk.ask("idle"), CLIENTS.to_string());
    // And once more.
    let mut talk = reload(&probe, &mut talk);
    talk.ask("greet");
    for (number, client) in clients.iter_mut().enumerate() {
        assert_eq!(hear(client), format!("3 mcp GET /{number}"));
    }
    let descriptors = fs::read_dir(format!("/proc/{}/fd", probe.keeper_pid())).unwrap().count();
    assert!(descriptors < 100, "the keeper still holds {descriptors} descriptors");
}

#[test]
fn t1_a_keeper_that_runs_out_of_descriptors_closes_idle_connections_and_serves() {
    const CLIENTS: usize = 60;
    let probe = offering_others();
    let mut talk = probe.connect();
    let mut clients: Vec<_> = (0..CLIENTS).map(|number| idle_client(&probe, &format!("GET /{number}"))).collect();
    await_idle(&mut talk, CLIENTS);
    let used = fs::read_dir(format!("/proc/{}/fd", probe.keeper_pid())).unwrap().count() as u64;
    for (spare, at_least) in [(12, 0), (60, 20)] {
        // By number, so what is used counts up to its highest.
        probe.limit_descriptors(used + spare);
        talk = reload(&probe, &mut talk);
        let kept: usize = talk.ask("idle").parse().unwrap();
        assert!((at_least..CLIENTS).contains(&kept), "{kept} were kept");
        talk.ask("greet");
        let heard = clients.iter_mut().map(hear).filter(|line| !line.is_empty()).count();
        assert_eq!(heard, kept);
        probe.limit_descriptors(4096);
        clients = (0..CLIENTS).map(|number| idle_client(&probe, &format!("GET /{number}"))).collect();
        await_idle(&mut talk, CLIENTS);
    }
}

#[test]
fn t2_a_successor_that_does_not_pass_the_rehearsal_leaves_the_old_one_serving() {
    let probe = Probe::start();
    let mut talk = probe.connect();
    let before = talk.worker();
    for (rehearsal, expected) in [
        (
            "echo 'warning: odd' >&2; echo 'error: line 3 is wrong' >&2; echo 'hint: x' >&2; exit 2",
            "refused line 3 is wrong|hint: x",
        ),
        ("printf settings; exit 1", "refused it gave up with exit code 1 and no word"),
        ("kill -9 $$", "refused it was ended by signal 9"),
        ("head -c 17000000 /dev/zero", "refused its settings are longer than 16777216 bytes"),
    ] {
        probe.set_rehearsal(rehearsal);
        assert_eq!(talk.ask("succeed reload"), expected);
    }
    let refused = talk.ask("succeed upgrade");
    assert!(refused.starts_with("refused could not run") && refused.contains("No such file"), "{refused}");
    assert_eq!(talk.worker(), before);
    let mut talk = probe.kill_worker(&mut talk);
    let handover = talk.ask("handover");
    assert!(handover.starts_with("NotSucceeded upgrade=true from=1.0 to= reason=could not run"), "{handover}");
    assert_eq!(talk.ask("settings"), "settings of the test");
}

#[test]
fn t2_a_successor_that_dies_before_it_is_ready_is_followed_by_a_worker_with_the_settings_before() {
    let probe = offering("crash");
    let mut talk = probe.connect();
    let child = talk.spawn("cat");
    let mut talk = reload(&probe, &mut talk);
    // Number 2 was the successor.
    assert_eq!(talk.worker().1, 3);
    assert_eq!(talk.ask("settings"), "settings of the test");
    let expected =
        "NotSucceeded upgrade=false from=1.0 to=1.0 reason=its worker gave up with exit code 7 before it was ready";
    assert_eq!(talk.ask("handover"), expected);
    assert_eq!(talk.write(&child, "same child"), "Ok(1)");
    // The next one may do better.
    probe.offer_settings("better");
    let mut talk = reload(&probe, &mut talk);
    assert_eq!((talk.worker().1, talk.ask("settings")), (4, "better".to_owned()));
}

#[test]
fn t2_a_successor_that_is_late_or_waits_is_followed_by_a_worker_with_the_settings_before() {
    for settings in ["late", "wait"] {
        let probe = offering(settings);
        assert_eq!(probe.connect().ask("succeed reload"), "granted");
        let mut talk = probe.connect_beyond(1);
        assert_eq!(talk.worker().1, 3);
        assert!(talk.ask("handover").contains("was not ready within 10 s"));
    }
}

#[test]
fn t2_a_successor_that_is_killed_before_it_is_ready_is_rolled_back() {
    let probe = offering("late");
    let mut talk = probe.connect();
    assert_eq!(talk.ask("succeed reload"), "granted");
    eventually("the successor", || (probe.starts() == 2).then_some(()));
    probe.await_log("worker attaches worker=2");
    let starts = fs::read_to_string(probe.path("starts")).unwrap();
    let successor = starts.lines().last().unwrap().parse().unwrap();
    signal(identity(successor), Signal::KILL).unwrap();
    let mut talk = probe.connect_beyond(1);
    assert_eq!(talk.worker().1, 3);
    assert!(talk.ask("handover").contains("its worker ended before it was ready"));
}

#[test]
fn t2_a_second_handover_at_the_same_time_is_refused() {
    let probe = Probe::start();
    probe.set_rehearsal("while [ -e hold ]; do sleep 0.02; done; printf two");
    fs::write(probe.path("hold"), "").unwrap();
    let (mut talk, mut other) = (probe.connect(), probe.connect());
    talk.say("succeed reload");
    probe.await_log("a handover is rehearsed");
    assert_eq!(other.ask("succeed upgrade"), "refused another handover is under way");
    probe.signal_keeper(Signal::HUP);
    eventually("the second refusal", || (probe.log().matches("a handover is refused").count() == 2).then_some(()));
    fs::remove_file(probe.path("hold")).unwrap();
    assert_eq!(talk.listen(), "granted");
    let mut talk = probe.connect_beyond(1);
    assert_eq!((talk.worker().1, talk.ask("settings")), (2, "two".to_owned()));
}

#[test]
fn t2_a_worker_that_dies_within_the_rehearsal_is_replaced_and_the_handover_goes_on() {
    let probe = Probe::start();
    probe.set_rehearsal("while [ -e hold ]; do sleep 0.02; done; printf two");
    fs::write(probe.path("hold"), "").unwrap();
    let mut talk = probe.connect();
    talk.say("succeed reload");
    probe.await_log("a handover is rehearsed");
    let mut talk = probe.connect();
    let (pid, _) = talk.worker();
    signal(identity(pid), Signal::KILL).unwrap();
    let mut talk = probe.connect();
    assert_eq!((talk.worker().1, talk.ask("settings")), (2, "settings of the test".to_owned()));
    fs::remove_file(probe.path("hold")).unwrap();
    let mut talk = probe.connect_beyond(2);
    assert_eq!((talk.worker().1, talk.ask("settings")), (3, "two".to_owned()));
}

#[test]
fn t2_a_worker_that_dies_or_hangs_when_it_is_to_hand_over_holds_nothing_up() {
    for mode in ["dies", "dies while handing over", "stubborn"] {
        let mut probe = Probe::idle();
        probe.set_mode(mode);
        probe.offer_settings("two");
        probe.start_keeper();
        let mut talk = probe.connect();
        let child = talk.spawn("cat");
        let mut client = idle_client(&probe, "GET /");
        await_idle(&mut talk, 1);
        let (pid, _) = talk.worker();
        assert_eq!(talk.call(&child, 1, "asked"), "Ok(1)");
        talk.say("succeed reload");
        probe.set_mode("");
        let mut talk = probe.connect_beyond(1);
        assert_eq!((talk.worker().1, talk.ask("settings")), (2, "two".to_owned()), "{mode}");
        assert_eq!((talk.open(&child), talk.next(&child)), ("1".to_owned(), "frame 1 asked".to_owned()));
        if mode == "dies while handing over" {
            talk.ask("greet");
            assert_eq!(hear(&mut client), "2 mcp GET /");
        }
        eventually("the end of the worker before", || {
            (!ProcessIdentity::of(pid).unwrap().is_some_and(|it| it.is_alive())).then_some(())
        });
    }
}

#[test]
fn t2_a_leaving_worker_that_overstays_is_killed() {
    let mut probe = Probe::idle();
    probe.set_mode("lingers");
    probe.offer_settings("two");
    probe.start_keeper();
    let mut talk = probe.connect();
    let child = talk.spawn("cat");
    let worker = identity(talk.worker().0);
    let mut next = reload(&probe, &mut talk);
    assert_eq!(next.worker().1, 2);
    // The one before still talks to whom it was talking, but children are none of its business any more.
    assert_eq!(talk.worker().1, 1);
    assert_eq!(talk.write(&child, "too late"), "Err(Gone)");
    assert_eq!(talk.next(&child), "end");
    assert_eq!(talk.stderr(&child), "");
    assert_eq!(talk.ask("succeed reload"), "refused the keeper is gone");
    assert_eq!(next.write(&child, "in time"), "Ok(1)");
    probe.await_log("killing a worker that takes too long to leave");
    eventually("its end", || (!worker.is_alive()).then_some(()));
    assert_eq!(next.next(&child), "frame 1 in time");
}

#[test]
fn t5_a_stop_within_a_handover_wins() {
    // Within the rehearsal, and after it with a worker that does not hand over.
    for (mode, rehearsal) in [("", "while :; do sleep 0.05; done"), ("stubborn", "printf two")] {
        let mut probe = Probe::idle();
        probe.set_mode(mode);
        probe.set_rehearsal(rehearsal);
        probe.start_keeper();
        let mut talk = probe.connect();
        talk.say("succeed reload");
        probe.await_log("a handover is rehearsed");
        if mode == "stubborn" {
            assert_eq!(probe.read("order"), "HandOver");
        }
        probe.signal_keeper(Signal::TERM);
        if mode == "stubborn" {
            eventually("the drain", || (probe.read("order") == "Drain { retire: false }").then_some(()));
            probe.signal_keeper(Signal::TERM);
        }
        probe.wait_for_keeper();
        assert_eq!(probe.read("ended"), format!("Ended {{ retire: false, was_forced: {} }}", mode == "stubborn"));
        assert_eq!(fs::read_dir(probe.path("children")).unwrap().count(), 0);
    }
}

#[test]
fn t5_a_stop_drains_a_leaving_worker_too() {
    let mut probe = Probe::idle();
    probe.set_mode("lingers");
    probe.offer_settings("two");
    probe.start_keeper();
    let mut talk = probe.connect();
    let (worker, _) = talk.worker();
    let worker = identity(worker);
    probe.set_mode("");
    let mut next = reload(&probe, &mut talk);
    assert_eq!(next.worker().1, 2);
    probe.signal_keeper(Signal::TERM);
    probe.wait_for_keeper();
    assert!(!worker.is_alive());
    assert_eq!(probe.read("ended"), "Ended { retire: false, was_forced: false }");
    assert!(!probe.log().contains("takes too long to leave"));
}

#[test]
fn t2_a_keeper_that_is_killed_within_a_rehearsal_leaves_nothing_behind() {
    let mut probe = Probe::idle();
    probe.set_rehearsal("echo $$ > rehearsing.draft; mv rehearsing.draft rehearsing; while :; do sleep 0.05; done");
    probe.start_keeper();
    probe.connect().say("succeed reload");
    let rehearsal = identity(probe.read("rehearsing").trim().parse().unwrap());
    probe.kill_keeper();
    probe.start_keeper();
    assert_eq!(probe.connect().worker().1, 1);
    assert!(!rehearsal.is_alive());
}
