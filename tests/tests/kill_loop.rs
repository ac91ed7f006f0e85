//! A few rounds of the soak: what a gateway promises while its workers are killed and replaced under load.
//!
//! The report's faults are: a refused connection (T1), a failed call in a handover (T2, T4), an answer that is lost, never
//! comes, is another call's or comes without its progress (R4, R7, C8), a call that ran twice, or ran and was told not to have
//! (U5), a child or a server's session that is another one afterwards (C8, U3), and a process left behind (C1).

use anyhow::Result;
use mainstay_tests::soak::{Event, Fate, Plan, run};
use std::time::Duration;

fn plan(seed: u64) -> Plan {
    Plan {
        kills: 4,
        reload_every: 0,
        upgrade_every: 0,
        apart: (Duration::from_millis(300), Duration::from_millis(2500)),
        // The keeper may start the last worker late, which must cost time and nothing else.
        spare_back_off: false,
        clients: 12,
        seed: seed << 32 | u64::from(std::process::id()),
        keep: None,
    }
}

/// Carries it out and finds nothing; the order of events is random but for the seed, which a failure tells.
async fn hold(plan: Plan, handover: Event) -> Result<()> {
    let report = run(&plan).await?;
    assert!(report.faults.is_empty(), "seed {}\n{report}", plan.seed);
    for (event, times) in [(Event::Kill, 4), (Event::KillAgain, 1), (handover, 1)] {
        let count = report.pauses.get(&event).map_or(0, |pauses| pauses.count());
        assert_eq!(count, times, "{event:?} in {report}");
    }
    let answered = |wanted: &str| report.fates.keys().any(|(_, tool, fate)| *tool == wanted && *fate == Fate::Answered);
    assert!(["echo", "incr", "slow", "prog"].into_iter().all(answered), "{report}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t1_t4_c1_c8_r4_r7_u3_u5_kills_and_a_reload_under_load_break_no_promise() -> Result<()> {
    hold(Plan { reload_every: 3, ..plan(1) }, Event::Reload).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t1_t2_c1_c8_r4_r7_u3_u5_kills_and_an_upgrade_under_load_break_no_promise() -> Result<()> {
    hold(Plan { upgrade_every: 3, ..plan(2) }, Event::Upgrade).await
}
