//! AC-07, C4, C5, C9: children that die are noticed, started again with manners, parked in sight, and set free.

use anyhow::{Context as _, Result, ensure};
use mainstay_tests::{Gateway, Outcome, Proc, RawClient, Setup, UpS, stretched, wait_until, write_program};
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

const VERSION: &str = "2025-11-25";
/// Longer than anything here takes, on a machine that has much else to do.
const BOUND: Duration = Duration::from_secs(30);
const NOTICED_WITHIN: Duration = Duration::from_secs(2);
const FAILED_WITHIN: Duration = Duration::from_secs(5);
/// The gateway's bound on a handshake, and some time for the end of its tree.
const HANDSHAKE_BOUND: Duration = Duration::from_secs(45);

async fn gateway(config: &str) -> Result<Gateway> {
    Setup::new(config).start().await
}

async fn shown(gateway: &Gateway, server: &str) -> Result<Value> {
    let (status, view) = gateway.admin_get(&format!("/api/v1/servers/{server}")).await?;
    ensure!(status == 200, "{status} {view}");
    Ok(view)
}

async fn state(gateway: &Gateway, server: &str) -> String {
    let view = shown(gateway, server).await.unwrap_or_default();
    view["summary"]["state"].as_str().unwrap_or_default().to_owned()
}

async fn cli(gateway: &Gateway, words: &[&str]) -> Result<(Option<i32>, String)> {
    let output = gateway.cli(words).await?;
    let said = [output.stdout, output.stderr].concat();
    Ok((output.status.code(), String::from_utf8_lossy(&said).into_owned()))
}

/// The error of an outcome, with the name of its code.
fn error_of(outcome: &Outcome) -> Result<(String, String)> {
    let error = outcome.error()?;
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    Ok((word(&error["data"]["mainstay"]), word(&error["message"])))
}

async fn pid(client: &RawClient) -> Result<u32> {
    let facts = client.call_through("whoami", json!({})).await?.json()?;
    facts["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()).context("no pid")
}

/// Asks once what makes the server exit; whatever comes of it.
async fn provoke(client: &RawClient, method: &str) {
    let _whatever = client.request(method, json!({})).await;
}

#[tokio::test]
async fn ac07_a_killed_child_is_noticed_and_the_next_call_finds_another_one_in_order() -> Result<()> {
    let up = UpS::new(&[])?;
    let gateway = gateway(&up.toml("s")?).await?;
    let client = RawClient::open(&gateway.url("s")?, VERSION).await?;
    let first = pid(&client).await?;
    let slow = client.clone();
    let call = tokio::spawn(async move { slow.call_through("slow", json!({"ms": 60_000})).await });
    let running =
        async || up.methods(first).is_ok_and(|methods| methods.iter().filter(|m| *m == "tools/call").count() == 2);
    wait_until("the slow call to run", BOUND, running).await?;
    let began = Instant::now();
    ensure!(Proc::of(first).is_some_and(Proc::kill), "it could not be killed");
    let (code, text) = error_of(&call.await??)?;
    assert!(began.elapsed() <= stretched(NOTICED_WITHIN), "{:?}", began.elapsed());
    assert_eq!(code, "outcome_unknown", "{text}");
    assert!(text.contains("signal 9"), "{text}");

    let second = pid(&client).await?;
    assert_ne!(second, first);
    assert_eq!(up.methods(second)?[..3], ["initialize", "notifications/initialized", "tools/call"]);
    let view = shown(&gateway, "s").await?;
    assert_eq!((&view["summary"]["state"], &view["summary"]["restarts"]), (&json!("up"), &json!(1)), "{view}");
    assert_eq!(view["exits"][0]["signal"], 9, "{view}");
    assert!(view["summary"]["last_failure"]["text"].as_str().is_some_and(|text| text.contains("signal 9")), "{view}");
    Ok(())
}

#[tokio::test]
async fn ac07_a_child_that_exits_after_each_list_is_parked_in_sight_and_a_restart_lifts_it() -> Result<()> {
    let (bad, good) = (UpS::new(&["--exit-after-answer", "tools/list"])?, UpS::new(&[])?);
    let config = format!("{}patience = \"3s\"\n{}", bad.toml("bad")?, good.toml("good")?);
    let gateway = gateway(&config).await?;
    let healthy = RawClient::open(&gateway.url("good")?, VERSION).await?;
    let client = RawClient::open(&gateway.url("bad")?, VERSION).await?;
    let first_of_good = pid(&healthy).await?;
    // Somebody asks all the time, and a healthy server serves all the time.
    let parked = async || {
        provoke(&client, "tools/list").await;
        let echoed =
            healthy.call_through("echo", json!({"text": "x"})).await.and_then(|outcome| Ok(outcome.text()?.to_owned()));
        assert_eq!(echoed.unwrap_or_default(), "x", "a healthy server is untouched");
        state(&gateway, "bad").await == "quarantined"
    };
    wait_until("the server to be parked", BOUND, parked).await?;
    let spawns = bad.starts()?.len();
    assert!(spawns <= 10, "{spawns}");

    // Whoever asks now hears at once what is the matter, and nothing is started for it.
    let began = Instant::now();
    let outcome = client.call_through("echo", json!({})).await?;
    let (code, text) = error_of(&outcome)?;
    assert!(began.elapsed() < stretched(NOTICED_WITHIN), "{:?}", began.elapsed());
    assert_eq!(code, "server_unreachable");
    assert!(text.contains("`bad`") && text.contains("status 0") && text.contains("next try"), "{text}");
    let retry_after = outcome.error()?["data"]["retry_after_ms"].as_u64().context("no `retry_after_ms`")?;
    assert!((1..=60_000).contains(&retry_after), "{retry_after}");
    assert_eq!(bad.starts()?.len(), spawns);
    let (code, listed) = cli(&gateway, &["servers", "list"]).await?;
    assert_eq!(code, Some(0));
    let line = listed.lines().find(|line| line.starts_with("bad")).context("no line")?;
    assert!(line.contains("quarantined") && line.contains("next try in") && line.contains("status 0"), "{listed}");
    let metrics = metrics(&gateway).await?;
    for line in [
        "mainstay_server_state{server=\"bad\",state=\"quarantined\"} 1".to_owned(),
        "mainstay_server_state{server=\"good\",state=\"up\"} 1".to_owned(),
        format!("mainstay_child_exits_total{{server=\"bad\",how=\"exited\"}} {spawns}"),
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line} is not in\n{metrics}");
    }

    let (code, said) = cli(&gateway, &["servers", "restart", "bad"]).await?;
    assert_eq!(code, Some(0), "{said}");
    // The old session's lists are compared with those of its next child, which does not survive that.
    let fresh = RawClient::open(&gateway.url("bad")?, VERSION).await?;
    assert_eq!(fresh.call_through("echo", json!({"text": "again"})).await?.text()?, "again");
    assert_eq!(state(&gateway, "bad").await, "up");
    let audit = gateway.admin_get("/api/v1/audit?action=server-restarted").await?.1;
    assert_eq!(audit["entries"][0]["server"], "bad", "{audit}");
    assert_eq!(pid(&healthy).await?, first_of_good, "the healthy one was never touched");
    Ok(())
}

async fn metrics(gateway: &Gateway) -> Result<String> {
    let http = reqwest::Client::builder().no_proxy().build()?;
    let asked = http.get(gateway.admin_url("/metrics")?).bearer_auth(gateway.admin_token()?).send();
    Ok(asked.await?.text().await?)
}

#[tokio::test]
async fn ac07_a_child_that_exits_before_any_output_is_told_with_its_last_words() -> Result<()> {
    let up = UpS::new(&["--exit-before-output", "9"])?;
    let gateway = gateway(&up.toml("s")?).await?;
    let began = Instant::now();
    let refused = RawClient::new(&gateway.url("s")?)?.initialize(VERSION).await?;
    assert!(began.elapsed() <= stretched(FAILED_WITHIN), "{:?}", began.elapsed());
    let (code, text) = error_of(&refused)?;
    assert_eq!(code, "child_exited");
    assert!(text.contains("status 9") && text.contains("up-s:"), "{text}");
    let view = shown(&gateway, "s").await?;
    assert_eq!((&view["exits"][0]["code"], &view["failures_in_a_row"]), (&json!(9), &json!(1)), "{view}");
    assert!(view["exits"][0]["stderr_tail"].as_str().is_some_and(|tail| tail.contains("up-s:")), "{view}");
    let (_, shown) = cli(&gateway, &["servers", "show", "s"]).await?;
    assert!(shown.contains("status 9") && shown.contains("up-s:"), "{shown}");
    Ok(())
}

#[tokio::test]
async fn ac07_progress_for_ever_meets_the_absolute_bound_of_a_handshake() -> Result<()> {
    let (endless, good) = (UpS::new(&["--progress-forever-on-init", "--grandchild"])?, UpS::new(&[])?);
    let gateway = gateway(&format!("{}{}", endless.toml("endless")?, good.toml("good")?)).await?;
    let mut client = RawClient::new(&gateway.url("endless")?)?;
    client.bound = HANDSHAKE_BOUND;
    let opening = tokio::spawn(async move { client.initialize(VERSION).await });
    wait_until("its start", BOUND, async || endless.starts().is_ok_and(|starts| !starts.is_empty())).await?;
    let server = endless.starts()?[0];
    // Meanwhile another one serves.
    let healthy = RawClient::open(&gateway.url("good")?, VERSION).await?;
    while !opening.is_finished() {
        assert_eq!(healthy.call_through("echo", json!({"text": "x"})).await?.text()?, "x");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let (code, text) = error_of(&opening.await??)?;
    assert!(code == "server_unreachable" && text.contains("handshake in time"), "{code} {text}");
    wait_until("its tree to be gone", BOUND, async || !server.is_alive()).await?;
    assert_eq!(shown(&gateway, "endless").await?["failures_in_a_row"], 1);
    Ok(())
}

#[tokio::test]
async fn c4_a_program_that_is_missing_is_named_and_waits_too() -> Result<()> {
    let gateway = gateway("[servers.s]\ncommand = \"/no/such/program\"\npatience = \"0s\"\n").await?;
    let mut client = RawClient::new(&gateway.url("s")?)?;
    for _ in 0..2 {
        let (code, text) = error_of(&client.initialize(VERSION).await?)?;
        assert!(code == "server_rejected" && text.contains("/no/such/program"), "{code} {text}");
    }
    let (code, text) = error_of(&client.initialize(VERSION).await?)?;
    assert!(code == "server_unreachable" && text.contains("/no/such/program"), "{code} {text}");
    let (_, listed) = cli(&gateway, &["servers", "list"]).await?;
    assert!(listed.contains("/no/such/program"), "{listed}");
    let view = shown(&gateway, "s").await?;
    assert_eq!((&view["summary"]["restarts"], &view["summary"]["sessions"]), (&json!(2), &json!(0)), "{view}");
    Ok(())
}

#[tokio::test]
async fn c4_exit_75_is_a_restart_that_waits_for_nothing() -> Result<()> {
    let up = UpS::new(&["--exit-after-answer", "resources/list", "--exit-code", "75"])?;
    let gateway = gateway(&up.toml("s")?).await?;
    let client = RawClient::open(&gateway.url("s")?, VERSION).await?;
    for restarts in 1..=4_u64 {
        provoke(&client, "resources/list").await;
        let gone = async || {
            shown(&gateway, "s").await.is_ok_and(|view| {
                view["exits"][0]["code"] == 75
                    && view["exits"].as_array().is_some_and(|exits| exits.len() as u64 == restarts)
            })
        };
        wait_until("its exit to be seen", BOUND, gone).await?;
        assert_eq!(client.call_through("echo", json!({"text": "x"})).await?.text()?, "x");
    }
    let view = shown(&gateway, "s").await?;
    assert_eq!((&view["failures_in_a_row"], &view["summary"]["restarts"]), (&json!(0), &json!(4)), "{view}");
    assert_eq!(view["summary"]["last_failure"], Value::Null);
    Ok(())
}

#[tokio::test]
async fn c4_what_is_known_of_a_server_outlives_its_workers_and_a_stop() -> Result<()> {
    let up = UpS::new(&["--exit-after-answer", "tools/list"])?;
    let config = format!("{}patience = \"1s\"\nenv = {{ TOKEN = \"canary-5e0b7713ac\" }}\n", up.toml("s")?);
    let mut gateway = gateway(&config).await?;
    assert_eq!(state(&gateway, "s").await, "never_started");
    let client = RawClient::open(&gateway.url("s")?, VERSION).await?;
    let parked = async || {
        provoke(&client, "tools/list").await;
        state(&gateway, "s").await == "quarantined"
    };
    wait_until("the server to be parked", BOUND, parked).await?;
    let facts = async |gateway: &Gateway| -> Result<Value> {
        let view = shown(gateway, "s").await?;
        let summary = &view["summary"];
        let of_summary = [&summary["restarts"], &summary["last_failure"], &summary["sessions"]];
        Ok(json!([of_summary, view["exits"], view["failures_in_a_row"]]))
    };
    let (before, spawns) = (facts(&gateway).await?, up.starts()?.len());
    assert_eq!((before[0][0].as_u64(), &before[0][2]), (Some(spawns as u64 - 1), &json!(1)), "{before}");
    // A handover, a death, and a stop with the next start.
    gateway.rewrite_config(&format!("{config}[session]\ndrain_grace = \"1s\"\n"))?;
    assert_eq!(cli(&gateway, &["reload"]).await?.0, Some(0));
    assert_eq!(facts(&gateway).await?, before);
    gateway.kill_worker().await?;
    assert_eq!(facts(&gateway).await?, before);
    gateway.stop().await?;
    gateway.start_again().await?;
    let after = facts(&gateway).await?;
    assert_eq!((&after[0], &after[2]), (&before[0], &before[2]), "no session is in memory");
    // It may have been parked for long enough by now; it is told as parked or as used, never as new.
    let stands = state(&gateway, "s").await;
    assert!(["quarantined", "backing_off", "idle"].contains(&stands.as_str()), "{stands}");
    for file in ["ledger.db", "ledger.db-wal"] {
        let bytes = std::fs::read(gateway.state_dir().join(file)).unwrap_or_default();
        assert!(!bytes.windows(8).any(|window| window == b"is_sound"), "{file}: what is remembered is sealed");
    }
    // Another definition is given its own chance, and the past is still told.
    gateway.rewrite_config(&config.replace("canary-5e0b7713ac", "another-0b7713ac"))?;
    assert_eq!(cli(&gateway, &["reload"]).await?.0, Some(0));
    assert_eq!(state(&gateway, "s").await, "idle");
    assert_eq!(facts(&gateway).await?[0], before[0]);
    Ok(())
}

#[tokio::test]
async fn c5_a_restart_keeps_sessions_and_tells_them() -> Result<()> {
    let up = UpS::new(&[])?;
    let gateway = gateway(&up.toml("s")?).await?;
    let (one, two) =
        (RawClient::open(&gateway.url("s")?, VERSION).await?, RawClient::open(&gateway.url("s")?, VERSION).await?);
    let before = [pid(&one).await?, pid(&two).await?];
    let (code, said) = cli(&gateway, &["--json", "servers", "restart", "s"]).await?;
    assert_eq!(code, Some(0), "{said}");
    let said: Value = serde_json::from_str(&said)?;
    assert_eq!((&said["ended"], &said["server"]["children"]), (&json!(2), &json!(0)), "{said}");
    assert!(before.iter().all(|pid| Proc::of(*pid).is_none_or(|process| !process.is_alive())));
    for (client, before) in [(&one, before[0]), (&two, before[1])] {
        let outcome = client.call_through("whoami", json!({})).await?;
        let told = outcome.body_text();
        assert!(told.contains("remade") && told.contains("restarted by an operator"), "{told}");
        assert_ne!(outcome.json()?["pid"], before);
    }
    let view = shown(&gateway, "s").await?;
    assert_eq!((&view["failures_in_a_row"], &view["exits"][0]["ordered"]), (&json!(0), &json!(true)), "{view}");
    Ok(())
}

#[tokio::test]
async fn c5_a_restart_reaches_children_that_no_session_has_asked_for_since_the_worker_died() -> Result<()> {
    let up = UpS::new(&[])?;
    let mut gateway = gateway(&up.toml("s")?).await?;
    let client = RawClient::open(&gateway.url("s")?, VERSION).await?;
    let before = pid(&client).await?;
    gateway.kill_worker().await?;
    assert_eq!(shown(&gateway, "s").await?["summary"]["children"], 1);
    let (code, said) = cli(&gateway, &["servers", "restart", "s"]).await?;
    assert!(code == Some(0) && said.contains("1 processes ended"), "{said}");
    wait_until("its end", BOUND, async || Proc::of(before).is_none_or(|process| !process.is_alive())).await?;
    assert_ne!(pid(&client).await?, before);
    Ok(())
}

#[tokio::test]
async fn c9_a_program_replaced_on_disk_is_shown_and_used_at_the_next_start() -> Result<()> {
    replaced_on_disk(|program| (program.to_owned(), None)).await
}

#[tokio::test]
async fn c9_a_script_replaced_on_disk_is_shown_as_a_program_is() -> Result<()> {
    replaced_on_disk(|script| ("sh".to_owned(), Some(script.to_owned()))).await
}

/// `started_by` says how a file is run: by which program, and as which argument of it.
async fn replaced_on_disk(started_by: fn(&str) -> (String, Option<String>)) -> Result<()> {
    let up = UpS::new(&[])?;
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("server");
    let (real, args) = up.command()?;
    let write = |name: &str, label: &str| -> Result<()> {
        let path = folder.path().join(name);
        let script = format!("#!/bin/sh\nexec '{}' \"$@\" --name {label}\n", real.display());
        write_program(&path, script.as_bytes())
    };
    write("server", "old")?;
    let (command, script) = started_by(&file.display().to_string());
    let args: Vec<String> = script.into_iter().chain(args).collect();
    let gateway = gateway(&format!("[servers.s]\ncommand = {}\nargs = {}\n", json!(command), json!(args))).await?;
    let client = RawClient::open(&gateway.url("s")?, VERSION).await?;
    let first = pid(&client).await?;
    assert_eq!(shown(&gateway, "s").await?["children"][0]["on_disk"], "same");
    write("server", "new")?;
    let view = shown(&gateway, "s").await?;
    assert_eq!((&view["children"][0]["on_disk"], &view["summary"]["newer_on_disk"]), (&json!("newer"), &json!(true)));
    let (_, listed) = cli(&gateway, &["servers", "list"]).await?;
    assert!(listed.contains("newer on disk"), "{listed}");
    assert_eq!(pid(&client).await?, first, "it is not adopted by itself");
    cli(&gateway, &["servers", "restart", "s"]).await?;
    let second = pid(&client).await?;
    assert!(Proc::of(second).context("it runs")?.arguments().contains(&"new".to_owned()));
    assert_eq!(shown(&gateway, "s").await?["children"][0]["on_disk"], "same");
    Ok(())
}

#[tokio::test]
async fn i6_what_a_child_says_of_its_environment_reaches_nobody_unmasked() -> Result<()> {
    const SECRET: &str = "canary-env-5e0b7713ac";
    let script = "echo \\\"first line\\\" >&2; env >&2; exit 3";
    let config = format!(
        "[servers.s]\ncommand = \"sh\"\nargs = [\"-c\", \"{script}\"]\nenv = {{ TOKEN = \"Bearer ${{SECRET}}\", OTHER = \"{SECRET}-2\" }}\n"
    );
    let gateway = Setup::new(&config).env("SECRET", SECRET).start().await?;
    let mut client = RawClient::new(&gateway.url("s")?)?;
    let refused = client.initialize(VERSION).await?.body_text();
    assert!(refused.contains("TOKEN=***") && refused.contains("OTHER=***"), "{refused}");
    let (_, logs) = cli(&gateway, &["servers", "logs", "s"]).await?;
    assert!(logs.contains("first line") && logs.contains("TOKEN=***"), "{logs}");
    let views = [
        refused,
        logs,
        shown(&gateway, "s").await?.to_string(),
        cli(&gateway, &["servers", "show", "s"]).await?.1,
        cli(&gateway, &["--json", "servers", "list"]).await?.1,
        gateway.log(),
    ];
    for view in views {
        assert!(!view.contains(SECRET), "{view}");
    }
    Ok(())
}

#[tokio::test]
async fn c2_logs_are_read_and_followed() -> Result<()> {
    let script = "i=0; while read line; do i=$((i+1)); echo \\\"line $i\\\" >&2; done";
    let config = format!("[servers.s]\ncommand = \"sh\"\nargs = [\"-c\", \"{script}\"]\npatience = \"0s\"\n");
    let gateway = gateway(&config).await?;
    let (status, empty) = gateway.admin_get("/api/v1/servers/s/logs").await?;
    assert_eq!((status, &empty["text"]), (200, &json!("")), "{empty}");
    let mut client = RawClient::new(&gateway.url("s")?)?;
    client.bound = Duration::from_millis(100);
    // It reads its `initialize`, says so, and answers nothing.
    let _unanswered = client.initialize(VERSION).await;
    let after = empty["next"].as_str().context("no `next`")?.to_owned();
    let mut part = Value::Null;
    let followed = async || {
        let asked = gateway.admin_get(&format!("/api/v1/servers/s/logs?after={after}")).await;
        part = asked.map(|(_, part)| part).unwrap_or_default();
        part["text"] == "line 1\n"
    };
    wait_until("its line", BOUND, followed).await?;
    assert_eq!(part["gap"], false);
    let (code, text) = cli(&gateway, &["servers", "logs", "s", "--lines", "5"]).await?;
    assert_eq!((code, text.trim()), (Some(0), "line 1"));
    let (status, _) = gateway.admin_get("/api/v1/servers/s/logs?after=nonsense").await?;
    assert_eq!(status, 400);
    assert!(Path::new(&gateway.state_dir()).join("logs/s.stderr.log").exists());
    Ok(())
}

#[tokio::test]
async fn ac04_an_http_server_that_is_away_is_shown_and_unknown_names_say_which_there_are() -> Result<()> {
    let mut up = mainstay_tests::UpH::start().await?;
    let gateway = gateway(&format!("{}patience = \"1s\"\n", up.toml("h"))).await?;
    assert_eq!(state(&gateway, "h").await, "unknown");
    let client = RawClient::open(&gateway.url("h")?, VERSION).await?;
    client.call_through("read", json!({})).await?.text()?;
    assert_eq!(state(&gateway, "h").await, "reachable");
    up.kill().await?;
    assert!(client.call_through("read", json!({})).await?.error().is_ok());
    let view = shown(&gateway, "h").await?;
    assert_eq!(view["summary"]["state"], "unreachable", "{view}");
    assert!(view["answered_at"].is_string() && view["summary"]["last_failure"]["text"].is_string(), "{view}");
    up.start_again().await?;
    client.call_through("read", json!({})).await?.text()?;
    assert_eq!(state(&gateway, "h").await, "reachable");

    for words in [["servers", "restart", "nobody"], ["servers", "show", "nobody"], ["servers", "logs", "nobody"]] {
        let (code, said) = cli(&gateway, &words).await?;
        assert!(code == Some(4) && said.contains("there are: h"), "{code:?} {said}");
    }
    let (code, said) = cli(&gateway, &["servers", "restart", "h"]).await?;
    assert!(code == Some(2) && said.contains("by HTTP"), "{code:?} {said}");
    Ok(())
}
