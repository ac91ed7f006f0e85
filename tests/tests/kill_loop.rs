//! A few rounds of the soak: what a gateway promises while its workers are killed and replaced under load.

use anyhow::Result;
use mainstay_tests::soak::{Event, Fate, Plan, run};
use std::time::Duration;

/// The report's faults are: a refused connection (T1), a failed call in a handover (T2), an answer that is lost, late for
/// ever, of another call or without its progress (R4, R7, C8), a call that ran twice, or ran and was told not to have (U5), a
/// child or a server's session that is another one afterwards (C8, U3), and a process left behind (C1).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t1_t2_c1_c8_r4_u5_no_promise_is_broken_by_kills_reloads_and_upgrades_under_load() -> Result<()> {
    let plan = Plan {
        kills: 8,
        reload_every: 5,
        upgrade_every: 7,
        apart: (Duration::from_millis(300), Duration::from_millis(2500)),
        // With these kills the keeper starts the last workers late, which must cost time and nothing else.
        spare_back_off: false,
        clients: 12,
        seed: u64::from(std::process::id()),
        keep: None,
    };
    let report = run(&plan).await?;
    assert!(report.faults.is_empty(), "seed {}\n{report}", plan.seed);
    assert_eq!(report.pauses.get(&Event::Upgrade).map(|pauses| pauses.count()), Some(1), "{report}");
    assert!(report.pauses.contains_key(&Event::Reload) && report.pauses.contains_key(&Event::KillAgain), "{report}");
    assert!(report.fates.keys().any(|(_, tool, fate)| *tool == "slow" && *fate == Fate::Answered), "{report}");
    Ok(())
}
