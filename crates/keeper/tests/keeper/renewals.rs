//! Many renewals of the keeper, one after the other, under a child that never stops talking (requirements T2, C8).

use std::fs;

use crate::handover::identity;
use crate::probe::{Probe, Talk, eventually};
use crate::upgrade::offering;

/// Has the keeper renewed and talks to the next worker.
fn renew(probe: &Probe, talk: &mut Talk) -> Talk {
    let (_, number) = talk.worker();
    assert_eq!(talk.ask("succeed upgrade"), "granted");
    let mut next = probe.connect_beyond(number);
    assert_eq!(next.worker().1, number + 1);
    assert!(next.ask("handover").starts_with("Succeeded upgrade=true"));
    next
}

fn descriptors(probe: &Probe) -> usize {
    fs::read_dir(format!("/proc/{}/fd", probe.keeper_pid())).unwrap().count()
}

/// How many ended children the keeper has not reaped.
fn zombies(probe: &Probe) -> usize {
    let of_keeper = |stat: &String| {
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        fields.first() == Some(&"Z") && fields.get(1) == Some(&probe.keeper_pid().to_string().as_str())
    };
    let stats =
        fs::read_dir("/proc").unwrap().filter_map(|entry| fs::read_to_string(entry.ok()?.path().join("stat")).ok());
    stats.filter(of_keeper).count()
}

#[test]
fn t2_two_thousand_lines_reach_workers_exactly_once_over_twenty_renewals() {
    const LINES: usize = 2000;
    const RENEWALS: usize = 20;
    let probe = offering("", "2.0", "two");
    let keeper = identity(probe.keeper_pid());
    let mut talk = probe.connect();
    // It talks as long as the renewals take, and goes on where it is interrupted by an answer.
    let child = talk.spawn(&format!(
        "(i=0; while [ $i -lt {LINES} ]; do i=$((i+1)); echo n $i; [ $((i%20)) = 0 ] && sleep 0.1; done) & \
         while read line; do echo r $line; done; wait"
    ));
    let consume = format!("consume {} {}", child.id, probe.path("lines").display());
    talk.ask(&consume);
    let mut settled = None;
    for number in 1..=RENEWALS {
        assert_eq!(talk.call(&child, number as u64, &format!("call {number}")), format!("Ok({number})"));
        if number % 2 == 0 {
            talk.settle(&child, number as u64);
        }
        talk = renew(&probe, &mut talk);
        talk.ask(&consume);
        let descriptors = eventually("leaving workers' descriptors to be closed", || {
            let now = descriptors(&probe);
            settled.is_none_or(|before| now == before).then_some(now)
        });
        settled = Some(descriptors);
    }
    let open: Vec<String> = (1..=RENEWALS).filter(|number| number % 2 == 1).map(|number| number.to_string()).collect();
    assert_eq!(talk.open(&child), open.join(" "));
    let lines = || fs::read_to_string(probe.path("lines")).unwrap_or_default();
    eventually("the last line", || lines().contains(&format!("n {LINES}\n")).then_some(()));
    eventually("the last answer", || lines().contains(&format!("r call {RENEWALS}\n")).then_some(()));
    let lines = lines();
    let of =
        |letter: &str| lines.lines().filter(|line| line.starts_with(letter)).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(of("n "), (1..=LINES).map(|number| format!("n {number}")).collect::<Vec<_>>());
    assert_eq!(of("r "), (1..=RENEWALS).map(|number| format!("r call {number}")).collect::<Vec<_>>());
    assert!(keeper.is_alive() && identity(child.pid).is_alive());
    eventually("everything that ended to be reaped", || (zombies(&probe) == 0).then_some(()));
}
