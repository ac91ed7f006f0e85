use proptest::prelude::*;

use super::*;

fn at(millis: u64) -> Timestamp {
    // Some instant that is not the beginning of time.
    Timestamp::from_unix_millis(1_800_000_000_000 + millis)
}

/// Plays a script of `MILLIS WORD [NUMBER [CODE]]` steps and returns what the machine said to each of them.
///
/// Words: `start`, `up N`, `exit N CODE`, `kill N` (by somebody else), `never N` (never up), `stop N` (by us), `lift`,
/// `stand`. Seed 7 has some jitter; waits are told rounded up to whole seconds, so that it does not show.
fn check(script: &str, expected: &str) {
    let mut machine = Supervisor::new(7);
    let said: Vec<String> = script.split(';').map(|step| play(&mut machine, step)).collect();
    assert_eq!(said.join("; "), expected, "{script}");
}

fn play(machine: &mut Supervisor, step: &str) -> String {
    let words: Vec<&str> = step.split_whitespace().collect();
    let number = |index: usize| words[index].parse::<u64>().unwrap();
    let now = at(number(0));
    let in_seconds = |until: Timestamp| until.since(now).as_millis().div_ceil(1000);
    let end = match words[1] {
        "start" => {
            return match machine.start(now) {
                Verdict::Go(Start(number)) => format!("go {number}"),
                Verdict::Wait { until } => format!("wait {}", in_seconds(until)),
            };
        }
        "up" => {
            machine.up(now, Start(number(2)));
            return "-".to_owned();
        }
        "lift" => {
            machine.lift(now);
            return "-".to_owned();
        }
        "stand" => {
            let Standing { phase, next_at, failures } = machine.standing(now);
            return format!("{phase:?} {} {failures}", next_at.map_or(0, in_seconds));
        }
        "exit" => End::ByItself(Some(i32::try_from(number(3)).unwrap())),
        "kill" => End::ByItself(None),
        "never" => End::NeverUp,
        "stop" => End::Ours,
        other => panic!("{other}"),
    };
    format!("{:?}", machine.end(now, Start(number(2)), end))
}

#[test]
fn c4_the_first_failure_costs_nothing_and_the_next_ones_ever_more() {
    check(
        "0 start; 10 up 1; 20 kill 1; 20 start; 30 kill 2; 30 start; 1030 start; 1040 kill 3; 1040 start; 3040 start; \
         3050 exit 4 0; 3050 start",
        "go 1; -; Failure; go 2; Failure; wait 1; go 3; Failure; wait 2; go 4; Failure; wait 4",
    );
}

#[test]
fn c4_a_server_that_has_never_failed_starts_as_many_children_as_are_asked_for() {
    check("0 start; 0 start; 0 start; 5 stand", "go 1; go 2; go 3; Open 0 0");
}

#[test]
fn ac07_a_child_that_exits_after_its_handshake_is_parked_after_five() {
    check(
        "0 start; 1 up 1; 2 exit 1 0; 2 start; 3 up 2; 4 exit 2 0; 1004 start; 1005 exit 3 0; 3005 start; 3006 exit 4 0; \
         7006 start; 7007 exit 5 0; 7008 stand; 7008 start; 60000 start; 67006 stand; 67007 start; 67008 start",
        "go 1; -; Failure; go 2; -; Failure; go 3; Failure; go 4; Failure; \
         go 5; Failure; Quarantined 60 5; wait 60; wait 8; Quarantined 1 5; go 6; wait 8",
    );
}

#[test]
fn c4_programs_that_cannot_be_started_count() {
    check(
        "0 start; 0 never 1; 0 start; 0 never 2; 1 start; 1 stand",
        "go 1; Failure; go 2; Failure; wait 1; BackingOff 1 2",
    );
}

#[test]
fn c4_children_that_stood_side_by_side_are_one_failure() {
    check(
        "0 start; 0 start; 0 start; 1 up 1; 1 up 2; 1 up 3; 60000 kill 2; 60001 kill 1; 60002 kill 3; 60003 start; \
         60003 start; 60004 stand",
        "go 1; go 2; go 3; -; -; -; Failure; Again; Again; go 4; go 5; Open 0 1",
    );
}

#[test]
fn c4_one_of_many_that_is_killed_now_and_then_is_no_failing_server() {
    check(
        "0 start; 0 up 1; 0 start; 0 up 2; 0 start; 0 up 3; 50000 kill 1; 50000 start; 50100 up 4; \
         100000 kill 2; 100000 start; 100100 up 5; 150000 kill 3; 150001 stand",
        "go 1; -; go 2; -; go 3; -; Failure; go 4; -; Again; go 5; -; Again; Open 0 1",
    );
}

#[test]
fn c4_a_new_child_that_lives_opens_the_way_for_all() {
    // Two failures in a row; the third start lives: others come one by one until it is sound, then freely.
    check(
        "0 start; 0 never 1; 0 start; 0 never 2; 1000 start; 1001 up 3; 1001 start; 2001 start; 11001 start; 11001 start; \
         11001 stand",
        "go 1; Failure; go 2; Failure; go 3; -; wait 1; go 4; go 5; go 6; Open 0 2",
    );
}

#[test]
fn c4_five_stable_minutes_are_a_new_beginning_and_less_are_not() {
    check(
        "0 start; 0 never 1; 0 start; 0 never 2; 1000 start; 1000 up 3; 300999 exit 3 1; 300999 start",
        "go 1; Failure; go 2; Failure; go 3; -; Failure; wait 2",
    );
    check(
        "0 start; 0 never 1; 0 start; 0 never 2; 1000 start; 1000 up 3; 301000 exit 3 1; 301000 start; 301000 stand",
        "go 1; Failure; go 2; Failure; go 3; -; Failure; go 4; Open 0 1",
    );
}

#[test]
fn c4_our_own_stops_are_no_failures() {
    check(
        "0 start; 1 up 1; 2 stop 1; 3 start; 4 stop 2; 5 start; 6 stop 3; 7 stand",
        "go 1; -; Nothing; go 2; Nothing; go 3; Nothing; Open 0 0",
    );
}

#[test]
fn c4_a_child_that_was_counted_is_not_counted_again() {
    check("0 start; 9 never 1; 10 kill 1; 11 stand", "go 1; Failure; Again; Open 0 1");
}

#[test]
fn c4_exit_75_waits_for_nothing_until_it_comes_too_often() {
    check(
        "0 start; 1 exit 1 75; 1 start; 2 exit 2 75; 2 start; 3 exit 3 75; 3 start; 4 exit 4 75; 4 start; 5 exit 5 75; \
         5 start; 6 exit 6 75; 6 start; 7 exit 7 75; 7 start",
        "go 1; Upgrade; go 2; Upgrade; go 3; Upgrade; go 4; Upgrade; go 5; Upgrade; go 6; Failure; go 7; Failure; wait 1",
    );
    check("0 start; 0 start; 1 exit 1 75; 2 exit 2 75; 2 stand", "go 1; go 2; Upgrade; Upgrade; Open 0 0");
}

#[test]
fn c4_an_operator_lifts_what_was() {
    let failing = "0 start; 0 never 1; 0 start; 0 never 2; 1000 start; 1000 never 3; 3000 start; 3000 never 4; \
                   7000 start; 7000 never 5; 7001 stand; 7002 lift; 7002 stand; 7002 start; 7003 never 6; 7003 start";
    check(
        failing,
        "go 1; Failure; go 2; Failure; go 3; Failure; go 4; Failure; go 5; Failure; Quarantined 60 5; -; Open 0 0; \
         go 6; Failure; go 7",
    );
}

#[test]
fn c4_a_child_of_an_earlier_worker_counts_as_any_other() {
    let mut machine = Supervisor::new(1);
    let start = machine.adopt(at(0));
    assert_eq!(machine.end(at(400_000), start, End::ByItself(None)), Counted::Failure);
    assert_eq!(machine.standing(at(400_000)), Standing { phase: Phase::Open, next_at: None, failures: 1 });
}

/// Starts at each moment that is allowed and fails `lived` later, and returns the moments.
fn starts_of(seed: u64, lived_ms: u64, within: Duration) -> Vec<Timestamp> {
    let (mut machine, mut now, mut starts) = (Supervisor::new(seed), at(0), Vec::new());
    while now.since(at(0)) <= within {
        match machine.start(now) {
            Verdict::Go(start) => {
                starts.push(now);
                machine.up(now, start);
                now = now.plus(Duration::from_millis(lived_ms));
                machine.end(now, start, End::ByItself(Some(0)));
            }
            Verdict::Wait { until } => now = until,
        }
    }
    starts
}

proptest! {
    #[test]
    fn c4_waits_are_bounded_and_never_get_shorter_in_a_row(seed: u64, lived_ms in 0_u64..5_000) {
        let starts = starts_of(seed, lived_ms, Duration::from_mins(30));
        let lived = Duration::from_millis(lived_ms);
        let waits: Vec<Duration> = starts.windows(2).map(|pair| pair[1].since(pair[0]).saturating_sub(lived)).collect();
        prop_assert!(waits.iter().all(|wait| *wait <= WAIT_MAX), "{waits:?}");
        // The quarantine is longer than the wait that it takes the place of.
        let grown: Vec<&Duration> = waits.iter().filter(|wait| **wait != QUARANTINE).collect();
        prop_assert!(grown.windows(2).all(|pair| pair[0] <= pair[1]), "{waits:?}");
        prop_assert!(waits.len() > 20, "quarantine and waits end");
    }

    #[test]
    fn ac07_no_server_is_started_more_than_ten_times_in_a_minute(seed: u64, lived_ms in 0_u64..9_000) {
        let starts = starts_of(seed, lived_ms, Duration::from_mins(10));
        for (index, first) in starts.iter().enumerate() {
            let minute = starts[index..].iter().filter(|start| start.since(*first) < Duration::from_mins(1)).count();
            prop_assert!(minute <= 10, "{minute}");
        }
    }

    #[test]
    fn c4_whatever_happens_a_start_comes_within_a_minute(seed: u64, steps in prop::collection::vec((0_u64..20_000, 0_u8..6), 0..80)) {
        let (mut machine, mut now, mut open) = (Supervisor::new(seed), at(0), Vec::new());
        for (later, what) in steps {
            now = now.plus(Duration::from_millis(later));
            match (what, open.pop()) {
                (0 | 1, last) => {
                    open.extend(last);
                    if let Verdict::Go(start) = machine.start(now) {
                        open.push(start);
                    }
                }
                (2, Some(start)) => {
                    machine.up(now, start);
                    open.push(start);
                }
                (3, Some(start)) => {
                    machine.end(now, start, End::ByItself(Some(UPGRADE_CODE)));
                }
                (4, Some(start)) => {
                    machine.end(now, start, End::NeverUp);
                }
                (_, Some(start)) => {
                    machine.end(now, start, End::Ours);
                }
                (_, None) => {}
            }
            let standing = machine.standing(now);
            let held = standing.next_at.map_or(Duration::ZERO, |next| next.since(now));
            prop_assert!(held <= WAIT_MAX.max(QUARANTINE));
            // What is told is what is done.
            let mut later = machine.clone();
            prop_assert!(matches!(later.start(standing.next_at.unwrap_or(now)), Verdict::Go(_)));
        }
    }

    #[test]
    fn c4_equal_seeds_wait_alike(seed: u64) {
        prop_assert_eq!(starts_of(seed, 5, Duration::from_mins(5)), starts_of(seed, 5, Duration::from_mins(5)));
    }
}

/// Plays the same steps to a machine, and to one that is recalled before each of them: no worker's death changes anything.
#[test]
fn c4_a_machine_that_is_recalled_stands_where_it_stood() {
    for script in [
        "0 start; 10 up 1; 20 kill 1; 20 start; 30 never 2; 40 stand; 40 start; 900 stand; 1100 start; 1200 stand",
        "0 start; 1 never 1; 2 start; 3 never 2; 1100 start; 1101 never 3; 3200 start; 3201 never 4; 7300 start; \
         7301 never 5; 7302 stand; 7303 start; 70000 stand; 70000 start",
        "0 start; 1 never 1; 2 start; 3 never 2; 4 lift; 5 stand; 5 start; 6 stand",
        "0 start; 1 exit 1 75; 2 start; 3 exit 2 75; 4 start; 5 exit 3 75; 6 start; 7 exit 4 75; 8 stand",
    ] {
        let mut machine = Supervisor::new(7);
        for step in script.split(';') {
            let now = at(step.split_whitespace().next().unwrap().parse().unwrap());
            play(&mut machine, step);
            let recalled = Supervisor::recalled(7, &machine.memory(), now);
            for later in [0, 500, 1500, 30_000, 61_000, 400_000].map(Duration::from_millis) {
                assert_eq!(recalled.standing(now.plus(later)), machine.standing(now.plus(later)), "{script} at {step}");
            }
            assert_eq!(recalled.memory(), machine.memory(), "{script} at {step}");
        }
    }
}

#[test]
fn c4_children_from_before_a_failure_say_nothing_of_it_after_a_recall_either() {
    let mut machine = Supervisor::new(7);
    play(&mut machine, "0 start");
    for step in ["1 never 1", "2 start", "3 never 2"] {
        play(&mut machine, step);
    }
    let mut recalled = Supervisor::recalled(7, &machine.memory(), at(4));
    let (older, newer) = (recalled.adopt(at(1)), recalled.adopt(at(10)));
    assert_eq!(recalled.end(at(20), older, End::ByItself(None)), Counted::Again);
    assert_eq!(recalled.end(at(30), newer, End::ByItself(None)), Counted::Failure);
    // Whatever the clock did meanwhile, nothing waits for longer than it ever could.
    let ahead = Memory { wait_until: at(1 << 40), quarantined_until: at(1 << 40), ..machine.memory() };
    let standing = Supervisor::recalled(7, &ahead, at(0)).standing(at(0));
    assert_eq!(standing.next_at, Some(at(0).plus(QUARANTINE)));
}
