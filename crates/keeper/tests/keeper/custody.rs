//! What children say and are told survives workers.

use std::fs;
use std::time::{Duration, Instant};

use mainstay_keeper::OPEN_CALLS_MAX;

use crate::probe::{Probe, eventually, marker, stretched};

#[test]
fn c8_the_answer_of_a_child_outlives_the_worker_that_asked() {
    let probe = Probe::start();
    let mut talk = probe.connect();
    let child = talk.spawn("read line; read go < $0; echo answer to $line; cat".replace("$0", &fifo(&probe)).as_str());
    assert_eq!(talk.write(&child, "a question"), "Ok(1)");

    // The worker dies while the child is at it.
    let mut talk = probe.kill_worker(&mut talk);
    let held = talk.ask("held");
    assert!(held.starts_with(&format!("{} label-{} {} 1 1;", child.id, child.marker, child.pid)), "{held}");
    fs::write(probe.path("fifo"), "go\n").unwrap();
    assert_eq!(talk.next(&child), "frame 1 answer to a question");

    // Delivered and not acknowledged: it comes again.
    let mut talk = probe.kill_worker(&mut talk);
    assert_eq!(talk.next(&child), "frame 1 answer to a question");
    talk.acknowledge(&child, 1);

    // Acknowledged: it does not.
    let mut talk = probe.kill_worker(&mut talk);
    assert_eq!(talk.write(&child, "another"), "Ok(2)");
    assert_eq!(talk.next(&child), "frame 2 another");
    assert_eq!(crate::probe::marked(&child.marker).len(), 2);
}

#[test]
fn r4_calls_stay_open_over_workers_until_one_has_settled_them() {
    let probe = Probe::start();
    let mut talk = probe.connect();
    let child = talk.spawn("cat");
    assert_eq!(talk.call(&child, 5, "first"), "Ok(1)");
    assert_eq!(talk.write(&child, "no call"), "Ok(2)");
    assert_eq!(talk.call(&child, 3, "second"), "Ok(3)");
    assert_eq!(talk.call(&child, 4, "third"), "Ok(4)");
    talk.settle(&child, 3);
    let mut talk = probe.kill_worker(&mut talk);
    assert_eq!(talk.open(&child), "5 4");

    // Answered or not, acknowledged or not: only settling ends it.
    assert_eq!(talk.next(&child), "frame 1 first");
    talk.acknowledge(&child, 1);
    talk.settle(&child, 4);
    talk.settle(&child, 99);
    let mut talk = probe.kill_worker(&mut talk);
    assert_eq!(talk.open(&child), "5");

    // The end of the child does not end it either; nobody else can say what became of it.
    talk.ask(&format!("stop {} 0", child.id));
    let mut talk = probe.kill_worker(&mut talk);
    assert_eq!(talk.open(&child), "5");
    talk.settle(&child, 5);
    let mut talk = probe.kill_worker(&mut talk);
    assert_eq!(talk.open(&child), "");
}

#[test]
fn r4_an_answer_that_waits_holds_up_nothing_that_comes_behind_it() {
    let probe = Probe::start();
    let mut talk = probe.connect();
    let child = talk.spawn("echo answer; seq 2 5; cat");
    for number in 1..=5 {
        assert!(talk.next(&child).starts_with(&format!("frame {number} ")));
    }
    for number in [2, 3, 5] {
        talk.acknowledge_only(&child, number);
    }
    let mut talk = probe.kill_worker(&mut talk);
    assert_eq!(talk.next(&child), "frame 1 answer");
    assert_eq!(talk.next(&child), "frame 4 4");
    assert_eq!(talk.write(&child, "more"), "Ok(1)");
    assert_eq!(talk.next(&child), "frame 6 more");
}

#[test]
fn the_oldest_of_too_many_open_calls_are_forgotten() {
    let probe = Probe::start();
    let mut talk = probe.connect();
    let child = talk.spawn("cat > /dev/null");
    talk.ask(&format!("calls {} {}", child.id, OPEN_CALLS_MAX + 2));
    // All of them have arrived once anything later is answered.
    talk.stderr(&child);
    let mut talk = probe.kill_worker(&mut talk);
    let open = talk.open(&child);
    let open: Vec<usize> = open.split(' ').map(|tag| tag.parse().unwrap()).collect();
    assert_eq!((open.len(), open.first()), (OPEN_CALLS_MAX, Some(&2)));
    let log = fs::read_to_string(probe.path("keeper.log")).unwrap();
    assert!(log.contains("too many calls are open"));
}

#[test]
fn what_the_keeper_itself_can_not_do_is_said_without_its_paths() {
    let probe = Probe::start();
    let mut talk = probe.connect();
    // The directory is there once a worker answers.
    talk.worker();
    let records = probe.path("children");
    fs::rename(&records, probe.path("elsewhere")).unwrap();
    let said = talk.ask(&format!("spawn {} cat", marker()));
    assert!(said.starts_with("error the gateway could not do its part: could not open its record"), "{said}");
    assert!(!said.contains('/'), "{said}");
    fs::rename(probe.path("elsewhere"), &records).unwrap();
    talk.spawn("cat");
}

/// Something that a script can wait for.
fn fifo(probe: &Probe) -> String {
    let path = probe.path("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    path.to_str().unwrap().to_owned()
}

#[test]
fn c8_the_exit_of_a_child_is_kept_for_the_next_worker() {
    let probe = Probe::start();
    let mut talk = probe.connect();
    let child = talk.spawn("read line; echo last words; echo why >&2; exit 7");
    let (pid, _) = talk.worker();
    talk.write(&child, "go");
    let mut talk = probe.kill_worker(&mut talk);
    assert_ne!(talk.worker().0, pid);
    assert_eq!(talk.next(&child), "frame 1 last words");
    let exit = talk.next(&child);
    assert!(exit.contains("code: Some(7)") && exit.contains("frames_written: 1"), "{exit}");
    assert_eq!(talk.next(&child), "end");
    assert_eq!(talk.stderr(&child), "why|");
    talk.ask(&format!("forget {}", child.id));
    let mut talk = probe.kill_worker(&mut talk);
    assert_eq!(talk.ask("held"), "");
}

#[test]
fn c2_a_child_that_is_not_listened_to_waits_and_loses_nothing() {
    const LINES: u64 = 40_000;
    let probe = Probe::start();
    let mut talk = probe.connect();
    let child = talk.spawn(&format!("seq 1 {LINES}; echo through >&2; cat"));
    // Others are not held up meanwhile.
    let other = talk.spawn("cat");
    talk.write(&other, "hello");
    assert_eq!(talk.next(&other), "frame 1 hello");
    for number in 1..=LINES {
        assert_eq!(talk.next(&child), format!("frame {number} {number}"));
        if number == 3000 {
            // It can't be through: that many lines fit neither into custody nor into the pipe.
            assert_eq!(talk.stderr(&child), "");
        }
        if number % 1000 == 0 {
            talk.acknowledge(&child, number);
        }
    }
    eventually("the child's last word", || (talk.stderr(&child) == "through|").then_some(()));
}

#[test]
fn c2_lines_are_lines_however_they_are_written() {
    let probe = Probe::start();
    let mut talk = probe.connect();
    let child = talk.spawn("printf par; sleep 0.1; printf 'tial\\r\\n\\nnext\\n'; printf unended");
    assert_eq!(talk.next(&child), "frame 1 partial");
    assert_eq!(talk.next(&child), "frame 2 next");
    assert!(talk.next(&child).contains("code: Some(0)"));
}

#[test]
fn c2_an_oversize_line_is_reported_and_the_child_goes_on() {
    let probe = Probe::start();
    let mut talk = probe.connect();
    let child = talk.spawn("head -c 17000000 /dev/zero | tr '\\0' x; echo; echo after; cat");
    assert_eq!(talk.next(&child), "oversize 1 17000000 4096 4096");
    assert_eq!(talk.next(&child), "frame 2 after");
    talk.write(&child, "same child");
    assert_eq!(talk.next(&child), "frame 3 same child");
}

#[test]
fn c2_a_chatty_stderr_holds_up_nothing_and_is_bounded() {
    let probe = Probe::start();
    let mut talk = probe.connect();
    let child = talk.spawn("read line; head -c 4194304 /dev/zero | tr '\\0' e >&2; echo got $line; cat");
    let asked_at = Instant::now();
    talk.write(&child, "it");
    assert_eq!(talk.next(&child), "frame 1 got it");
    assert!(asked_at.elapsed() < stretched(Duration::from_secs(2)));
    assert_eq!(talk.stderr(&child).len(), 4096);
    for name in ["probe.stderr.log", "probe.stderr.log.1"] {
        assert!(fs::metadata(probe.path("logs").join(name)).unwrap().len() <= 1024 * 1024);
    }
}

#[test]
fn c2_a_large_frame_of_multibyte_text_comes_back_identical() {
    let probe = Probe::start();
    let mut talk = probe.connect();
    let child = talk.spawn("cat");
    let text = "ab\u{1F980}c".repeat(8 * 1024 * 1024 / 7);
    assert_eq!(talk.write(&child, &text), "Ok(1)");
    assert!(talk.next(&child) == format!("frame 1 {text}"));
}

#[test]
fn a_writer_waits_for_a_child_that_does_not_read() {
    let probe = Probe::start();
    let (mut talk, mut writer) = (probe.connect(), probe.connect());
    let child = talk.spawn("sleep 1000");
    assert_eq!(talk.ask(&format!("fill {} 12000000", child.id)), "Ok(1)");
    writer.say(&format!("fill {} 12000000", child.id));
    // The credit of the child is used up: the second frame is not taken, and ends as never sent.
    talk.ask(&format!("stop {} 0", child.id));
    let exit = talk.next(&child);
    assert!(exit.contains("frames_written: 0, frame_partly_written: true"), "{exit}");
    assert_eq!(writer.listen(), "Err(Gone)");
}

#[test]
fn a_frame_longer_than_all_credit_goes_alone() {
    let probe = Probe::start();
    let mut talk = probe.connect();
    let child = talk.spawn("while read line; do echo ${#line}; done");
    assert_eq!(talk.ask(&format!("fill {} 17000000", child.id)), "Ok(1)");
    assert_eq!(talk.ask(&format!("fill {} 17", child.id)), "Ok(2)");
    assert_eq!(talk.next(&child), "frame 1 17000000");
    assert_eq!(talk.next(&child), "frame 2 17");
    assert_eq!(talk.ask(&format!("fill {} 70000000", child.id)), "Err(TooLong)");
}

#[test]
fn a_frame_that_is_queued_before_a_stop_is_still_written() {
    let probe = Probe::start();
    let mut talk = probe.connect();
    let child = talk.spawn("sleep 0.2; cat");
    talk.write(&child, "first");
    talk.ask(&format!("stop {} 5000", child.id));
    assert_eq!(talk.next(&child), "frame 1 first");
    assert!(talk.next(&child).contains("code: Some(0)"));
}

#[test]
fn c7_a_child_gets_exactly_the_environment_it_was_given() {
    let probe = Probe::start();
    let mut talk = probe.connect();
    let child = talk.spawn("env | grep -v -e ^PWD= -e ^_= -e ^SHLVL= -e ^OLDPWD= | sort | tr '\\n' ' '; echo");
    let expected = format!("frame 1 GIVEN=yes MAINSTAY_CHILD={} PATH=/usr/local/bin:/usr/bin:/bin ", child.marker);
    assert_eq!(talk.next(&child), expected);
}

#[test]
fn what_can_not_be_started_is_said() {
    let probe = Probe::start();
    let mut talk = probe.connect();
    for (asked, expected) in [
        (format!("spawn {} !/no/such/program /tmp", marker()), "error program not found: `/no/such/program`"),
        (format!("spawn {} !cat /no/such/dir", marker()), "error working directory is missing: `/no/such/dir`"),
        (format!("spawn {} !/dev/null /tmp", marker()), "error permission denied: `/dev/null`"),
        ("spawn short true".to_owned(), "error invalid request: marker"),
        ("spawn mark/ed-somehow true".to_owned(), "error invalid request: marker"),
    ] {
        assert_eq!(talk.ask(&asked), expected);
    }
    assert_eq!(fs::read_dir(probe.path("children")).unwrap().count(), 1, "the worker alone is recorded");
}

#[test]
fn a_child_whose_starter_went_away_is_ended() {
    let probe = Probe::start();
    let mut talk = probe.connect();
    let marker = marker();
    assert_eq!(talk.ask(&format!("abandon {marker} cat")), "true");
    let log = || fs::read_to_string(probe.path("keeper.log")).unwrap();
    eventually("the end", || log().contains("the worker forgets a child").then_some(()));
    eventually("that nothing of it is left", || crate::probe::marked(&marker).is_empty().then_some(()));
    let mut talk = probe.kill_worker(&mut talk);
    assert_eq!(talk.ask("held"), "");
}
