//! The harness against a stand-in for the gateway: it must see what it is there to see.

use anyhow::{Context as _, Result};
use mainstay_tests::{Proc, Setup, UpS, descendants};
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::time::Duration;

fn stand_in() -> Setup {
    Setup::new("state = \"{{DIR}}\" # {{NAME}}").fill("NAME", "x").binary(Path::new(env!("CARGO_BIN_EXE_stand-in")))
}

#[tokio::test]
async fn a_killed_worker_is_followed_by_the_next_one_on_the_same_ports() -> Result<()> {
    let mut gateway = stand_in().start().await?;
    let ports = (gateway.url("x")?, gateway.admin_url("")?);
    let first = gateway.worker().await?;
    let second = gateway.kill_worker().await?;
    assert!(second.number > first.number && second.pid != first.pid);
    let keeper = gateway.keeper_pid()?;
    gateway.kill_all().await?;
    for pid in [keeper, second.pid] {
        assert!(Proc::of(pid).is_none_or(|process| !process.is_alive()), "{pid} is gone");
    }
    gateway.start_again().await?;
    assert_eq!((gateway.url("x")?, gateway.admin_url("")?), ports);
    assert_ne!(gateway.keeper_pid()?, keeper, "the old keeper's file is not taken for the new one's");
    gateway.stop().await?;
    gateway.assert_no_orphans().await
}

#[tokio::test]
async fn placeholders_are_filled_and_none_is_forgotten() -> Result<()> {
    let gateway = stand_in().start().await?;
    let config = std::fs::read_to_string(gateway.dir().join("mainstay.toml"))?;
    assert_eq!(config, format!("state = \"{}\" # x", gateway.dir().display()));
    assert!(Setup::new("{{NOBODY}}").start().await.is_err_and(|error| error.to_string().contains("NOBODY")));
    let up = UpS::new(&["--noise"])?;
    let toml = up.toml("files")?;
    assert!(toml.starts_with("[servers.files]\ncommand = \"/") && toml.contains("\"--noise\""), "{toml}");
    Ok(())
}

#[tokio::test]
async fn warnings_fail_a_test_unless_they_are_listed() -> Result<()> {
    let gateway = stand_in().start().await?;
    assert!(gateway.assert_clean_log(&[]).is_err_and(|error| error.to_string().contains("serves nothing")));
    gateway.assert_clean_log(&["serves nothing"])
}

#[tokio::test]
async fn c1_an_orphan_fails_the_test_and_is_killed() -> Result<()> {
    let gateway = stand_in().arg("--orphan").gone_within(Duration::from_millis(200)).start().await?;
    let sleeps = |process: &Proc| process.arguments().first().is_some_and(|program| program == "sleep");
    let orphan = descendants(gateway.keeper_pid()?).into_iter().find(sleeps).context("no orphan to be")?;
    let dropped = std::panic::catch_unwind(AssertUnwindSafe(|| drop(gateway)));
    let complaint = dropped.expect_err("the orphan must be noticed");
    let complaint = complaint.downcast_ref::<String>().context("no text")?;
    assert!(complaint.contains(&format!("{} sleep", orphan.pid)), "{complaint}");
    mainstay_tests::wait_until("the orphan to be gone", Duration::from_secs(5), async || !orphan.is_alive()).await
}

#[tokio::test]
async fn a_gateway_that_cannot_start_says_why() -> Result<()> {
    let error = Setup::new("").binary(Path::new("/bin/false")).start().await.err().context("it cannot start")?;
    assert!(format!("{error:?}").contains("the gateway has ended"), "{error:?}");
    Ok(())
}
