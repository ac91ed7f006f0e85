//! No orphan, no zombie, and nobody else's process (requirements C1, C6).

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use mainstay_keeper::{ProcessIdentity, Swept, sweep};

use crate::probe::{Probe, eventually, marked, marker, stretched};

/// Ignores TERM and the end of its input, and so do a grandchild in its group and one that left it.
const STUBBORN: &str = "trap '' TERM; s='trap \"\" TERM; while :; do sleep 1; done'; \
                        sh -c \"$s\" & setsid sh -c \"$s\" & echo up; while :; do sleep 1; done";

#[test]
fn c1_a_stubborn_tree_is_ended_to_the_last() {
    let probe = Probe::start();
    let mut talk = probe.connect();
    let child = talk.spawn(STUBBORN);
    assert_eq!(talk.next(&child), "frame 1 up");
    eventually("three shells and their sleeps", || (marked(&child.marker).len() >= 5).then_some(()));
    let asked_at = Instant::now();
    talk.ask(&format!("stop {} 200", child.id));
    let exit = talk.next(&child);
    assert!(exit.contains("signal: Some(9)"), "{exit}");
    assert!(asked_at.elapsed() < stretched(Duration::from_secs(3)));
    assert_eq!(marked(&child.marker), [0_u32; 0]);
    assert_eq!(fs::read_dir(probe.path("children")).unwrap().count(), 1, "the worker alone is recorded");
}

#[test]
fn c1_a_child_that_ends_at_the_end_of_its_input_is_not_signalled() {
    let probe = Probe::start();
    let mut talk = probe.connect();
    let child = talk.spawn("trap 'echo signalled' TERM; cat; exit 5");
    talk.ask(&format!("stop {} 10000", child.id));
    assert!(talk.next(&child).contains("code: Some(5)"));
}

#[test]
fn c1_what_a_leader_leaves_behind_is_ended_with_it() {
    let probe = Probe::start();
    let mut talk = probe.connect();
    let child = talk.spawn("sleep 1000 & setsid sleep 1000 & sleep 0.2; echo bye; exit 3");
    assert_eq!(talk.next(&child), "frame 1 bye");
    assert!(talk.next(&child).contains("code: Some(3)"));
    assert_eq!(marked(&child.marker), [0_u32; 0]);
}

#[test]
fn c1_a_process_that_hides_behind_a_cleaned_environment_is_ended_too() {
    let probe = Probe::start();
    let mut talk = probe.connect();
    // Out of the group, without the marker, and told apart from others by what it says itself.
    let script = "env -i PATH=$PATH setsid sh -c 'echo $$; while :; do sleep 1; done' & cat";
    for grace_ms in [0, 300] {
        let child = talk.spawn(script);
        let reply = talk.next(&child);
        let pid = reply.strip_prefix("frame 1 ").unwrap().parse().unwrap();
        let hidden = ProcessIdentity::of(pid).unwrap().unwrap();
        talk.ask(&format!("stop {} {grace_ms}", child.id));
        assert!(talk.next(&child).starts_with("Exit"));
        assert!(!hidden.is_alive());
    }
}

#[test]
fn c1_no_zombies_after_many_children_and_orphans() {
    let probe = Probe::start();
    let mut talk = probe.connect();
    for _ in 0..20 {
        let child = talk.spawn("(sleep 0.01 & sleep 0.02 &) ; setsid sh -c 'sleep 0.01 & exit' & echo up");
        assert_eq!(talk.next(&child), "frame 1 up");
        assert!(talk.next(&child).contains("code: Some(0)"));
        talk.ask(&format!("forget {}", child.id));
    }
    let keeper = probe.keeper_pid();
    let zombies = || {
        let out = Command::new("ps").args(["-o", "stat=", "--ppid", &keeper.to_string()]).output().unwrap();
        String::from_utf8(out.stdout).unwrap().lines().filter(|line| line.starts_with('Z')).count()
    };
    eventually("the zombies to be reaped", || (zombies() == 0).then_some(()));
}

#[test]
fn c1_the_next_keeper_ends_what_a_killed_one_left() {
    let mut probe = Probe::start();
    let mut talk = probe.connect();
    let child = talk.spawn(STUBBORN);
    assert_eq!(talk.next(&child), "frame 1 up");
    let (worker, _) = talk.worker();
    let worker = ProcessIdentity::of(worker).unwrap().unwrap();
    probe.kill_keeper();
    assert!(!marked(&child.marker).is_empty());
    probe.start_keeper();
    let mut talk = probe.connect();
    assert_eq!(talk.worker().1, 1);
    assert_eq!(marked(&child.marker), [0_u32; 0]);
    assert!(!worker.is_alive());
    assert_eq!(talk.ask("held"), "");
}

#[test]
fn c6_a_recorded_pid_that_is_somebody_elses_is_left_alone() {
    let probe = Probe::idle();
    let records = probe.path("children");
    fs::create_dir(&records).unwrap();
    let mut stranger = Command::new("sleep").arg("1000").spawn().unwrap();
    let identity = ProcessIdentity::of(stranger.id()).unwrap().unwrap();
    let record = |pid: u32, started: u64, boot: &str, marker: &str| {
        format!("mainstay child 1\npid {pid}\nstarted {started}\nboot {boot}\ntext {marker}\n")
    };
    let (pid, started, boot) = (identity.pid(), identity.started_ticks(), identity.boot().to_string());
    let other_boot = "00000000-0000-0000-0000-000000000001";
    fs::write(records.join("1"), record(pid, started - 1, &boot, "some-marker")).unwrap();
    fs::write(records.join("2"), record(pid, started, other_boot, "some-marker")).unwrap();
    fs::write(records.join("3"), "junk").unwrap();
    fs::write(records.join("4"), record(pid, started, &boot, "some-marker").trim_end()).unwrap();

    let swept = sweep(probe.state_dir()).unwrap();
    assert_eq!(swept, Swept { stale: 2, ended: 0, junk: 2, left: 0 });
    assert!(identity.is_alive());
    assert_eq!(fs::read_dir(&records).unwrap().count(), 0);
    stranger.kill().unwrap();
    stranger.wait().unwrap();
}

#[test]
fn c1_a_child_that_was_only_announced_is_found_by_its_marker() {
    let probe = Probe::idle();
    let records = probe.path("children");
    fs::create_dir(&records).unwrap();
    let marker = marker();
    let mut started = Command::new("sleep").arg("1000").env("MAINSTAY_CHILD", &marker).spawn().unwrap();
    let mut stranger = Command::new("sleep").arg("1000").env("MAINSTAY_CHILD", format!("{marker}x")).spawn().unwrap();
    fs::write(records.join("starting-1"), format!("mainstay child 1\ntext {marker}\n")).unwrap();

    let swept = sweep(probe.state_dir()).unwrap();
    assert_eq!(swept, Swept { stale: 0, ended: 1, junk: 0, left: 0 });
    assert!(started.wait().is_ok());
    assert!(stranger.try_wait().unwrap().is_none());
    stranger.kill().unwrap();
    stranger.wait().unwrap();
}
