//! The process tree dies with the gateway, always (C1, C6, AC-06); what is chatty or large does not hurt it (AC-08).

use anyhow::{Context as _, Result, ensure};
use mainstay_tests::{
    Gateway, Proc, RawClient, Setup, UpS, Wrapped, children, descendants, wait_until, write_program, zombies,
};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;

const VERSION: &str = "2025-11-25";
const BOUND: Duration = Duration::from_secs(20);
/// Calls in flight get a second, not the default of five.
const SHORT_DRAIN: &str = "[session]\ndrain_grace = \"1s\"\n";
/// A server that asks for two signals, and for more than the end of its input.
const DEAF: [&str; 2] = ["--ignore-term", "--ignore-eof"];

/// Servers as they are met: alone, below a shell, in a session of their own, with daemons.
fn shapes() -> Result<Vec<(&'static str, UpS)>> {
    let deaf = |more: &[&str]| UpS::new(&[&DEAF[..], more].concat());
    Ok(vec![
        ("alone", deaf(&[])?),
        ("below", deaf(&["--grandchild"])?),
        ("apart", deaf(&["--setsid"])?),
        ("daemon", deaf(&["--daemon", "marked"])?),
        ("escaped", deaf(&["--daemon", "bare"])?),
        ("mute", deaf(&["--mute-on-init"])?),
    ])
}

/// A table for a server behind a shell that starts it and waits, as launchers of packages do.
fn behind_a_launcher(name: &str, up: &UpS) -> Result<String> {
    let (program, args) = up.command()?;
    // A process in the background has no standard input of its own.
    let script = "exec 3<&0; \"$0\" \"$@\" <&3 & wait";
    let mut all = vec!["-c".to_owned(), script.to_owned(), program.display().to_string()];
    all.extend(args);
    Ok(format!("[servers.{name}]\ncommand = \"sh\"\nargs = {}\n", json!(all)))
}

async fn open(gateway: &Gateway, server: &str) -> Result<RawClient> {
    let client = RawClient::open(&gateway.url(server)?, VERSION).await?;
    client.call_through("whoami", json!({})).await?.result()?;
    Ok(client)
}

/// Everything that the servers of these traces ever were.
fn traced<'a>(ups: impl IntoIterator<Item = &'a UpS>) -> Result<BTreeSet<Proc>> {
    let mut all = BTreeSet::new();
    for up in ups {
        all.extend(up.starts()?);
        all.extend(up.daemons()?);
    }
    Ok(all)
}

fn alive(processes: &BTreeSet<Proc>) -> Vec<String> {
    let alive = processes.iter().filter(|process| process.is_alive());
    alive.map(|process| format!("{} {}", process.pid, process.arguments().join(" "))).collect()
}

#[tokio::test]
async fn ac06_1_sigterm_leaves_no_process_however_deaf_or_hidden() -> Result<()> {
    let shapes = shapes()?;
    let launched = UpS::new(&DEAF)?;
    let mut config = SHORT_DRAIN.to_owned() + &behind_a_launcher("launched", &launched)?;
    for (name, up) in &shapes {
        config += &up.toml(name)?;
    }
    let mut gateway = Gateway::start(&config, &[]).await?;
    let mut clients = vec![open(&gateway, "launched").await?];
    for (name, _) in shapes.iter().filter(|(name, _)| *name != "mute") {
        clients.push(open(&gateway, name).await?);
    }
    let mut mute = RawClient::new(&gateway.url("mute")?)?;
    let never = tokio::spawn(async move { mute.initialize(VERSION).await });
    // A call in flight as well.
    let slow = clients[0].message("tools/call", json!({"name": "slow", "arguments": {"ms": 60_000}}));
    let in_flight = clients[0].post(&slow).await?;
    let ups = || shapes.iter().map(|(_, up)| up).chain([&launched]);
    wait_until("all of them to run", BOUND, async || traced(ups()).is_ok_and(|all| all.len() == shapes.len() + 1 + 2))
        .await?;
    gateway.look_around();
    let keeper = gateway.keeper_pid()?;
    let mut all = traced(ups())?;
    all.extend(descendants(keeper));
    assert!(all.len() >= shapes.len() + 7, "shells and launchers are among them: {}", all.len());

    assert!(gateway.stop().await?.success());
    assert_eq!(alive(&all), [""; 0], "left when the keeper has exited");
    drop((never, in_flight));
    gateway.assert_no_orphans().await
}

#[tokio::test]
async fn ac06_2_after_sigkill_the_old_tree_is_gone_before_its_replacement_is_started() -> Result<()> {
    for flags in [&[][..], &["--grandchild"], &["--setsid"]] {
        let dir = tempfile::tempdir()?;
        let lock = dir.path().join("exclusive").display().to_string();
        let up = UpS::new(&[&DEAF[..], &["--lock", &lock], flags].concat())?;
        let mut gateway = Gateway::start(&up.toml("s")?, &[]).await?;
        let client = open(&gateway, "s").await?;
        for round in 1..=2 {
            let before = traced([&up])?;
            gateway.kill_all().await?;
            assert!(!alive(&before).is_empty(), "{flags:?}: a deaf server outlives its gateway");
            gateway.start_again().await?;
            // Gone before anything is served, whoever asks first.
            assert_eq!(alive(&before), [""; 0], "{flags:?}, round {round}");
            client.call_through("whoami", json!({})).await?.result()?;
            assert_eq!(up.starts()?.len(), round + 1, "{flags:?}: no start met a lock that was held");
        }
    }
    Ok(())
}

#[tokio::test]
async fn ac06_2_a_keeper_that_is_killed_alone_is_followed_at_once() -> Result<()> {
    let up = UpS::new(&[&DEAF[..], &["--grandchild", "--daemon", "marked"]].concat())?;
    let mut gateway = Gateway::start(&up.toml("s")?, &[]).await?;
    let client = open(&gateway, "s").await?;
    let keeper = gateway.keeper_pid()?;
    let mut before = descendants(keeper);
    before.extend(traced([&up])?);
    gateway.signal(Signal::KILL)?;
    gateway.wait_for_end(BOUND).await?;
    // The worker may still be about to notice.
    gateway.start_again().await?;
    assert_eq!(alive(&before), [""; 0]);
    client.call_through("whoami", json!({})).await?.result()?;
    Ok(())
}

#[tokio::test]
async fn ac06_5_a_hundred_sessions_leave_neither_zombies_nor_children() -> Result<()> {
    let up = UpS::new(&["--daemon", "marked"])?;
    let gateway = Gateway::start(&up.toml("s")?, &[]).await?;
    let keeper = gateway.keeper_pid()?;
    let staying = [open(&gateway, "s").await?, open(&gateway, "s").await?];
    let mut seen_dead = BTreeSet::new();
    for _ in 0..25 {
        let cycle = || async {
            let client = open(&gateway, "s").await?;
            ensure!(client.delete().await? == 204, "the session is deleted");
            anyhow::Ok(())
        };
        let (a, b, c, d) = tokio::join!(cycle(), cycle(), cycle(), cycle());
        a?;
        b?;
        c?;
        d?;
        seen_dead.extend(zombies(keeper));
    }
    assert_eq!(up.starts()?.len(), 102);
    let servers = traced([&up])?;
    wait_until("as many children as sessions that need one", BOUND, async || {
        alive(&servers).len() == 2 * staying.len()
    })
    .await?;
    wait_until("no zombie", BOUND, async || zombies(keeper).is_empty()).await?;
    assert!(seen_dead.iter().all(|process| !process.is_zombie()));
    // The worker and, for each session, its server and the daemon that this one left behind.
    assert_eq!(descendants(keeper).len(), 1 + 2 * staying.len());
    for client in staying {
        client.call_through("whoami", json!({})).await?.result()?;
    }
    Ok(())
}

#[tokio::test]
async fn ac06_5_orphans_of_a_living_child_are_reaped() -> Result<()> {
    let up = UpS::new(&[])?;
    let (program, args) = up.command()?;
    // Leaves a process behind every now and then, each of which ends on its own.
    let script = "exec 3<&0; i=0; while [ $i -lt 20 ]; do (sleep 0.05 &) ; i=$((i+1)); done; exec \"$0\" \"$@\" <&3";
    let mut all = vec!["-c".to_owned(), script.to_owned(), program.display().to_string()];
    all.extend(args);
    let gateway = Gateway::start(&format!("[servers.s]\ncommand = \"sh\"\nargs = {}\n", json!(all)), &[]).await?;
    let _client = open(&gateway, "s").await?;
    let keeper = gateway.keeper_pid()?;
    wait_until("the orphans to be reaped", BOUND, async || zombies(keeper).is_empty() && children(keeper).len() == 2)
        .await
}

/// How to be the first process of a namespace of pids on this machine, if that is permitted.
fn namespace() -> Option<&'static [&'static str]> {
    const WAYS: [&[&str]; 2] = [
        &["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"],
        &["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"],
    ];
    let works = |way: &&&[&str]| {
        let tried = std::process::Command::new(way[0]).args(&way[1..]).arg("true").output();
        tried.is_ok_and(|output| output.status.success())
    };
    WAYS.iter().find(works).copied()
}

#[tokio::test]
async fn ac06_as_the_first_process_of_a_namespace_it_reaps_and_obeys() -> Result<()> {
    let Some(way) = namespace() else {
        eprintln!("not run: this machine permits no namespace of pids");
        return Ok(());
    };
    let up = UpS::new(&[&DEAF[..], &["--grandchild", "--daemon", "bare"]].concat())?;
    let mut gateway = Wrapped::new(&(SHORT_DRAIN.to_owned() + &up.toml("s")?))?;
    let mut client = None;
    for life in 1..=2 {
        gateway.start(way, |_| ())?;
        let url = gateway.ready("s").await?;
        assert_eq!(gateway.published().context("published")?["keeper"], 1, "it is the first process");
        let unshare = gateway.pid()?;
        for _ in 0..10 {
            let passing = RawClient::open(&url, VERSION).await?;
            passing.call_through("whoami", json!({})).await?.result()?;
            assert_eq!(passing.delete().await?, 204);
        }
        let client = match &client {
            Some(client) => client,
            None => client.insert(RawClient::open(&url, VERSION).await?),
        };
        client.call_through("whoami", json!({})).await?.result()?;
        wait_until("no zombie", BOUND, async || zombies(unshare).is_empty()).await?;
        // A bare daemon is nobody's as long as the gateway lives; all of them go with it.
        gateway.look_around();
        let keeper = *children(unshare).first().context("the keeper is there")?;
        if life == 1 {
            assert!(keeper.signal(Signal::TERM));
            assert!(gateway.wait_for_end().await?.success(), "{}", gateway.log());
        } else {
            assert!(keeper.kill());
            assert!(!gateway.wait_for_end().await?.success());
        }
        wait_until("all of them to be gone", BOUND, async || gateway.left().is_empty()).await?;
    }
    Ok(())
}

#[tokio::test]
async fn c6_a_recorded_pid_that_is_somebody_elses_is_never_signalled() -> Result<()> {
    let up = UpS::new(&[])?;
    let mut gateway = Gateway::start(&up.toml("s")?, &[]).await?;
    let _client = open(&gateway, "s").await?;
    let records = gateway.state_dir().join("children");
    gateway.kill_all().await?;
    let mut bystander = std::process::Command::new("sleep").arg("120").spawn()?;
    let process = Proc::of(bystander.id()).context("it runs")?;
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let (pid, start, boot) = (process.pid, process.start, boot.trim());
    let other_boot = "00000000-0000-4000-8000-000000000000";
    for (name, started, boot) in [("a", start - 1, boot), ("b", start + 1, boot), ("c", start, other_boot)] {
        for kind in ["child", "worker"] {
            let record = format!("mainstay {kind} 1\npid {pid}\nstarted {started}\nboot {boot}\ntext not-its-marker\n");
            std::fs::write(records.join(format!("{name}-{kind}")), record)?;
        }
    }
    gateway.start_again().await?;
    assert!(process.is_alive(), "a recorded pid alone is nobody");
    assert!(gateway.stop().await?.success());
    assert!(process.is_alive());
    bystander.kill()?;
    bystander.wait()?;
    Ok(())
}

#[tokio::test]
async fn c6_processes_of_whoever_became_the_keeper_are_left_alone() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (wrapper, pid_file) = (dir.path().join("mainstay"), dir.path().join("pid"));
    let script = format!(
        "#!/bin/sh\nsleep 120 & echo $! > {}\nexec {} \"$@\"\n",
        pid_file.display(),
        mainstay_tests::mainstay()?.display()
    );
    write_program(&wrapper, script.as_bytes())?;
    let up = UpS::new(&["--daemon", "bare"])?;
    let mut gateway = Setup::new(&up.toml("s")?).binary(&wrapper).start().await?;
    let _client = open(&gateway, "s").await?;
    let pid: u32 = std::fs::read_to_string(&pid_file)?.trim().parse()?;
    let bystander = Proc::of(pid).context("it runs")?;
    let all = traced([&up])?;
    let ended = gateway.stop().await?;
    let spared = bystander.is_alive();
    bystander.kill();
    assert!(ended.success() && spared, "a process of the shell before is none of ours");
    assert_eq!(alive(&all), [""; 0]);
    Ok(())
}

#[tokio::test]
async fn ac08_3_an_answer_above_the_limit_fails_its_own_call_only() -> Result<()> {
    let up = UpS::new(&["--noise", "--stderr-bytes", "65536"])?;
    let setup = Setup::new(&up.toml("s")?).arg("--log").arg("info,mainstay_upstream=debug");
    let gateway = setup.start().await?;
    let client = open(&gateway, "s").await?;
    let pid = client.call_through("whoami", json!({})).await?.json()?["pid"].clone();
    let worker = Proc::of(gateway.worker().await?.pid).context("the worker runs")?;
    let (large, small) = tokio::join!(
        client.call_through("big", json!({"bytes": ANSWER_BYTES_MAX + 1})),
        client.call_through("echo", json!({"text": "beside it"})),
    );
    let large = large?;
    assert_eq!(large.named_outcome(), Some("answer_too_large"));
    assert!(large.error()?["message"].is_string());
    assert_eq!(small?.text()?, "beside it");
    assert_eq!(client.call_through("echo", json!({"text": "after it"})).await?.text()?, "after it");
    assert_eq!(client.call_through("whoami", json!({})).await?.json()?["pid"], pid, "the same child goes on");
    assert_eq!(worker, Proc::of(gateway.worker().await?.pid).context("the worker runs")?);
    assert_eq!(up.starts()?.len(), 1);
    assert!(gateway.log().contains("listening on nothing in particular"), "the line that is no JSON is logged");
    Ok(())
}

/// What the keeper keeps of one line.
const ANSWER_BYTES_MAX: usize = 16 * 1024 * 1024;

#[tokio::test]
async fn ac08_2_a_large_answer_costs_a_few_times_its_size() -> Result<()> {
    const BYTES: u64 = 8 << 20;
    let up = UpS::new(&[])?;
    let gateway = Gateway::start(&up.toml("s")?, &[]).await?;
    let client = open(&gateway, "s").await?;
    let pids = [gateway.keeper_pid()?, gateway.worker().await?.pid];
    let before: Vec<u64> = pids.iter().map(|pid| peak_bytes(*pid)).collect();
    let answer: Value = client.call_through("big", json!({"bytes": BYTES, "multibyte": true})).await?.result()?.clone();
    let text = answer["content"][0]["text"].as_str().context("a text")?;
    assert!(text == mainstay_tests::server::big_text(usize::try_from(BYTES)?, true), "byte-identical");
    for (pid, before) in pids.iter().zip(before) {
        let grown = peak_bytes(*pid).saturating_sub(before);
        assert!(grown < 6 * BYTES, "process {pid} grew by {grown} bytes for an answer of {BYTES}");
    }
    Ok(())
}

/// The most memory that a process ever had resident.
fn peak_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 1024
}
