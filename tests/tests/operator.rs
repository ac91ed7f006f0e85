//! Sessions in the operator's hands, by the commands and by the API: found, shown, drained, closed, audited, counted
//! (S8, S14, U7, I5, O1, O3).

use anyhow::{Context as _, Result, ensure};
use mainstay_tests::{Gateway, RawClient, UpH, UpS, wait_until};
use serde_json::{Value, json};
use std::process::Output;
use std::time::Duration;

const VERSION: &str = "2025-11-25";
const BOUND: Duration = Duration::from_secs(20);

async fn stand(extra: &str) -> Result<(UpH, Gateway)> {
    let up = UpH::start().await?;
    let gateway = Gateway::start(&format!("{extra}{}", up.toml("h")), &[]).await?;
    Ok((up, gateway))
}

/// A client with a session that this agent opened.
async fn agent(gateway: &Gateway, name: &str) -> Result<RawClient> {
    let mut client = RawClient::new(&gateway.url("h")?)?.with_header("x-agent-name", name)?;
    client.establish(VERSION).await?;
    Ok(client)
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// What a command says on standard output; it must succeed.
async fn said(gateway: &Gateway, words: &[&str]) -> Result<String> {
    let output = gateway.cli(words).await?;
    ensure!(output.status.success(), "`{}` failed: {}", words.join(" "), text(&output));
    Ok(String::from_utf8(output.stdout)?)
}

async fn told(gateway: &Gateway, words: &[&str]) -> Result<Value> {
    let words: Vec<&str> = ["--json"].into_iter().chain(words.iter().copied()).collect();
    Ok(serde_json::from_str(&said(gateway, &words).await?)?)
}

/// The ref of the one session that this agent opened.
async fn ref_of(gateway: &Gateway, agent: &str) -> Result<String> {
    let listed = told(gateway, &["sessions", "list", "--agent", agent]).await?;
    let sessions = listed["sessions"].as_array().context("a list")?;
    ensure!(sessions.len() == 1, "not one session of `{agent}`: {listed}");
    Ok(sessions[0]["ref"].as_str().context("a ref")?.to_owned())
}

async fn state_of(gateway: &Gateway, session_ref: &str) -> Result<Value> {
    let (status, session) = gateway.admin_get(&format!("/api/v1/sessions/{session_ref}")).await?;
    ensure!(status == 200, "{status}: {session}");
    Ok(session["state"].clone())
}

/// What the trail says of a session, the oldest first.
async fn trail(gateway: &Gateway, session_ref: &str) -> Result<Vec<(String, String)>> {
    let told = told(gateway, &["audit", "--session", session_ref]).await?;
    let word = |entry: &Value, name: &str| entry[name].as_str().unwrap_or_default().to_owned();
    let entries = told["entries"].as_array().context("entries")?;
    Ok(entries.iter().rev().map(|entry| (word(entry, "actor"), word(entry, "action"))).collect())
}

fn pair(actor: &str, action: &str) -> (String, String) {
    (actor.to_owned(), action.to_owned())
}

/// The five commands of the README: find a stuck session, see why, drain it, see that it is gone, prove who opened it.
#[tokio::test]
async fn s8_a_stuck_session_is_found_shown_drained_and_its_story_told() -> Result<()> {
    let (up, gateway) = stand("").await?;
    let alice = agent(&gateway, "alice").await?;
    let bob = agent(&gateway, "bob").await?;
    let message = alice.message("tools/call", json!({"name": "slow", "arguments": {"ms": 4000}}));
    let running = alice.post(&message).await?;
    wait_until("it runs", BOUND, async || up.executions("slow").await.is_ok_and(|count| count == 1)).await?;

    let listed = said(&gateway, &["sessions", "list", "--agent", "alice", "--state", "ready"]).await?;
    assert!(listed.contains("agent:alice") && listed.contains("1 in flight") && !listed.contains("bob"), "{listed}");
    let session_ref = ref_of(&gateway, "alice").await?;
    let shown = said(&gateway, &["sessions", "show", &session_ref]).await?;
    assert!(shown.contains("calls in flight   method tools/call, name slow, since "), "{shown}");
    assert!(shown.contains("client connected  true"), "{shown}");

    let refused = async {
        let draining = async || state_of(&gateway, &session_ref).await.is_ok_and(|state| state == "draining");
        wait_until("it drains", BOUND, draining).await?;
        anyhow::Ok(alice.request("tools/list", Value::Null).await?.status)
    };
    let words = ["sessions", "drain", &session_ref, "--grace", "20s"];
    let (drained, answered, refused) = tokio::join!(gateway.cli(&words), alice.follow(running), refused);
    let drained = drained?;
    assert!(drained.status.success(), "{}", text(&drained));
    let (stdout, stderr) = (String::from_utf8(drained.stdout)?, String::from_utf8(drained.stderr)?);
    assert!(stdout.contains(&session_ref) && stdout.contains("deleted"), "{stdout}");
    let progress =
        format!("waiting for 1 of 1 sessions to end: {session_ref} (1 in flight), the last at the latest in 1");
    assert!(stderr.contains(&progress), "progress after a second: {stderr}");
    assert_eq!(answered?.text()?, "waited 4000 ms", "the call in flight has finished");
    assert_eq!(refused?, 404, "a new call is refused");

    assert_eq!(alice.request("tools/list", Value::Null).await?.status, 404);
    wait_until("its server is told", BOUND, async || up.count("/deletes").await.is_ok_and(|count| count == 1)).await?;
    bob.call_through("echo", json!({"text": "others go on"})).await?.result()?;
    assert_eq!(state_of(&gateway, &session_ref).await?, "deleted");
    let story = trail(&gateway, &session_ref).await?;
    assert_eq!(story.first(), Some(&pair("client agent:alice", "opened")));
    assert!(story.contains(&pair("operator", "drain-begun")), "{story:?}");
    assert_eq!(story.last(), Some(&pair("operator", "drained")), "{story:?}");
    Ok(())
}

#[tokio::test]
async fn s8_a_drain_outlives_the_death_of_everything() -> Result<()> {
    let (up, mut gateway) = stand("").await?;
    let alice = agent(&gateway, "alice").await?;
    let session_ref = ref_of(&gateway, "alice").await?;
    let running =
        alice.post(&alice.message("tools/call", json!({"name": "slow", "arguments": {"ms": 30_000}}))).await?;
    wait_until("it runs", BOUND, async || up.executions("slow").await.is_ok_and(|count| count == 1)).await?;
    let begun = told(&gateway, &["sessions", "drain", &session_ref, "--grace", "1h", "--no-wait"]).await?;
    assert_eq!(begun["sessions"][0]["state"], "draining", "{begun}");
    gateway.kill_all().await?;
    drop(running);
    gateway.start_again().await?;
    assert_eq!(alice.request("tools/list", Value::Null).await?.status, 404, "nothing resurrects it");
    let ended = async || state_of(&gateway, &session_ref).await.is_ok_and(|state| state == "deleted");
    wait_until("it has ended by itself", BOUND, ended).await?;
    let story = trail(&gateway, &session_ref).await?;
    let expected = [pair("client agent:alice", "opened"), pair("operator", "drain-begun"), pair("operator", "drained")];
    assert_eq!(story, expected, "whoever finds that it is over, it is the act of who ordered it");
    Ok(())
}

#[tokio::test]
async fn s8_a_closed_session_is_gone_at_once_and_stays_closed() -> Result<()> {
    let (_up, mut gateway) = stand("[session]\nterminal_status = \"distinct\"\n").await?;
    let alice = agent(&gateway, "alice").await?;
    let session_ref = ref_of(&gateway, "alice").await?;
    let message = alice.message("tools/call", json!({"name": "slow", "arguments": {"ms": 60_000}}));
    let running = alice.post(&message).await?;
    let closed = said(&gateway, &["sessions", "close", &session_ref, "--reason", "stuck since the morning"]).await?;
    assert!(closed.contains("closed"), "{closed}");
    let outcome = running.finish(BOUND).await?;
    assert!(outcome.response().is_none_or(|response| response.get("result").is_none()), "it does not wait");
    for _ in 0..2 {
        let outcome = alice.request("tools/list", Value::Null).await?;
        assert_eq!((outcome.status, outcome.named_outcome()), (410, Some("session_closed")));
        gateway.kill_all().await?;
        gateway.start_again().await?;
    }
    let again = gateway.cli(&["sessions", "close", &session_ref]).await?;
    assert_eq!(again.status.code(), Some(1), "{}", text(&again));
    assert!(text(&again).contains("hint: see how it ended with `mainstay audit"), "{}", text(&again));
    let story = told(&gateway, &["audit", "--session", &session_ref, "--action", "closed"]).await?;
    assert_eq!(story["entries"].as_array().map(Vec::len), Some(1), "{story}");
    assert_eq!(story["entries"][0]["actor"], "operator");
    assert!(story.to_string().contains("stuck since the morning"), "{story}");
    Ok(())
}

/// What is known of a session outlives it: who had it, when it ended and why. While a call runs, it is told what it calls and
/// whether anybody waits for it.
#[tokio::test]
async fn o1_a_session_is_shown_with_what_it_waits_for_and_once_it_has_ended_with_its_end() -> Result<()> {
    let (up, mut gateway) = stand("").await?;
    let alice = agent(&gateway, "alice").await?;
    let session_ref = ref_of(&gateway, "alice").await?;
    let path = format!("/api/v1/sessions/{session_ref}");
    let before = gateway.admin_get(&path).await?.1;
    assert_eq!(
        (&before["ended_at"], &before["reason"], &before["owed"]),
        (&Value::Null, &Value::Null, &json!([])),
        "{before}"
    );
    assert!(before["client"].as_str().is_some_and(|client| !client.is_empty()), "{before}");
    assert_eq!(before["client_connected"], false, "nobody asks: {before}");

    let message = alice.message("tools/call", json!({"name": "slow", "arguments": {"ms": 60_000}}));
    let running = alice.post(&message).await?;
    wait_until("it runs", BOUND, async || up.executions("slow").await.is_ok_and(|count| count == 1)).await?;
    let shown = gateway.admin_get(&path).await?.1;
    let call = &shown["calls_in_flight"][0];
    assert_eq!((&call["method"], &call["name"]), (&json!("tools/call"), &json!("slow")), "{shown}");
    assert!(call["since"].is_string() && shown["client_connected"] == true, "{shown}");
    drop(running);
    let gone = async || {
        let shown = gateway.admin_get(&path).await.map(|(_, shown)| shown).unwrap_or_default();
        shown["client_connected"] == false && shown["calls"] == 1
    };
    wait_until("its client is gone and its call goes on", BOUND, gone).await?;
    let listed = said(&gateway, &["sessions", "list"]).await?;
    assert!(listed.contains("client gone") && !listed.contains("ENDED"), "{listed}");

    said(&gateway, &["sessions", "close", &session_ref, "--reason", "nobody waits for it"]).await?;
    gateway.kill_all().await?;
    gateway.start_again().await?;
    let ended = gateway.admin_get(&path).await?.1;
    for kept in ["client", "principal", "agent", "protocol", "opened_at"] {
        assert_eq!(ended[kept], before[kept], "{kept}: {ended}");
    }
    assert!(ended["ended_at"].is_string() && ended["reason"] == "nobody waits for it", "{ended}");
    for absent in ["seen_at", "deadline", "continuity"] {
        assert!(ended.get(absent).is_some_and(Value::is_null), "{absent}: {ended}");
    }
    let listed = said(&gateway, &["sessions", "list", "--state", "closed"]).await?;
    assert!(listed.contains("ENDED") && listed.contains(" ago") && listed.contains("nobody waits for it"), "{listed}");
    let told = gateway.admin_get(&format!("/api/v1/audit?session={session_ref}&action=opened")).await?.1;
    assert_eq!(told["entries"][0]["detail"], Value::Null, "absent is null: {told}");
    Ok(())
}

#[tokio::test]
async fn o1_lists_are_filtered_paged_and_ended_by_filter_only_with_a_yes() -> Result<()> {
    let (_up, gateway) = stand("").await?;
    for index in 0..25 {
        agent(&gateway, if index % 5 == 0 { "odd" } else { "even" }).await?;
    }
    let (status, page) = gateway.admin_get("/api/v1/sessions?limit=10").await?;
    assert_eq!((status, page["sessions"].as_array().map(Vec::len)), (200, Some(10)));
    let mut refs: Vec<Value> = page["sessions"].as_array().context("a page")?.clone();
    let mut next = page["next"].clone();
    while let Some(after) = next.as_str() {
        let (_, page) = gateway.admin_get(&format!("/api/v1/sessions?limit=10&after={after}")).await?;
        refs.extend(page["sessions"].as_array().context("a page")?.clone());
        next = page["next"].clone();
    }
    let mut names: Vec<_> = refs.iter().filter_map(|view| view["ref"].as_str()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), 25, "each on exactly one page");
    let count = async |words: &[&str]| -> Result<usize> {
        let words: Vec<&str> = ["sessions", "list"].into_iter().chain(words.iter().copied()).collect();
        Ok(told(&gateway, &words).await?["sessions"].as_array().context("a list")?.len())
    };
    assert_eq!(count(&[]).await?, 25);
    assert_eq!(count(&["--limit", "7"]).await?, 7);
    assert_eq!(count(&["--agent", "odd"]).await?, 5);
    assert_eq!(count(&["--principal", "agent:even", "--server", "h"]).await?, 20);

    let unasked = gateway.cli(&["sessions", "drain", "--agent", "odd"]).await?;
    assert_eq!(unasked.status.code(), Some(2), "{}", text(&unasked));
    assert!(text(&unasked).contains("5 sessions match; nothing was done"), "{}", text(&unasked));
    assert_eq!(count(&["--state", "ready"]).await?, 25);
    let drained = told(&gateway, &["sessions", "drain", "--agent", "odd", "--yes"]).await?;
    let ended = drained["sessions"].as_array().context("a list")?;
    assert_eq!(ended.iter().filter(|view| view["state"] == "deleted").count(), 5, "{drained}");
    assert_eq!((count(&["--state", "ready"]).await?, count(&["--state", "deleted"]).await?), (20, 5));
    let nobody = gateway.cli(&["sessions", "close", "--agent", "odd", "--yes"]).await?;
    assert_eq!(nobody.status.code(), Some(4), "{}", text(&nobody));
    let some = gateway.cli(&["sessions", "close", names[0], "s-0000000000"]).await?;
    assert_eq!(some.status.code(), Some(1), "one of two: {}", text(&some));
    Ok(())
}

/// What is owed, once each has been tried in vain.
async fn owed_after_a_try(gateway: &Gateway, count: usize) -> Result<Vec<Value>> {
    let mut owed = Vec::new();
    wait_until("all are owed and were tried", BOUND, async || {
        let Ok((200, listed)) = gateway.admin_get("/api/v1/owed").await else { return false };
        owed = listed["owed"].as_array().cloned().unwrap_or_default();
        owed.len() == count && owed.iter().all(|owed| owed["attempts"].as_u64() >= Some(1))
    })
    .await?;
    Ok(owed)
}

#[tokio::test]
async fn u7_an_owed_delete_is_listed_with_its_session_paid_or_given_up_and_each_is_on_record() -> Result<()> {
    let (up, gateway) = stand("").await?;
    let (alice, bob) = (agent(&gateway, "alice").await?, agent(&gateway, "bob").await?);
    let refs = [ref_of(&gateway, "alice").await?, ref_of(&gateway, "bob").await?];
    up.order("/delete", json!({"status": 503})).await?;
    alice.delete().await?;
    bob.delete().await?;
    let owed = owed_after_a_try(&gateway, 2).await?;
    let of =
        |session_ref: &str| owed.iter().find(|owed| owed["session"] == session_ref).context("it names its session");
    for session_ref in &refs {
        let owed = of(session_ref)?;
        assert_eq!(owed["last_error"], "HTTP status 503", "{owed}");
        let shown = said(&gateway, &["sessions", "show", session_ref]).await?;
        assert!(shown.contains("state             deleted"), "{shown}");
        assert!(shown.lines().any(|line| line.starts_with("owed  ") && line.contains("HTTP status 503")), "{shown}");
    }
    let listed = said(&gateway, &["owed", "list"]).await?;
    let names = |word: &str| listed.lines().filter(|line| line.contains(word)).count();
    assert_eq!((names("s-"), names(" h "), names("HTTP status 503")), (2, 2, 2), "{listed}");

    let id = of(&refs[0])?["id"].to_string();
    let attempts = of(&refs[0])?["attempts"].as_u64().context("a number")?;
    let unpaid = gateway.cli(&["owed", "pay", &id]).await?;
    let told = text(&unpaid);
    assert_eq!(unpaid.status.code(), Some(1), "{told}");
    assert!(told.contains("server `h` did not take the delete: HTTP status 503; it stays owed"), "{told}");
    assert!(!told.contains("the gateway answered"), "{told}");
    let (_, now) = gateway.admin_get("/api/v1/owed").await?;
    let now = now["owed"].as_array().context("a list")?.iter().find(|owed| owed["session"] == refs[0]).cloned();
    assert!(now.is_some_and(|owed| owed["attempts"].as_u64() > Some(attempts)), "the try counts");

    let given_up = of(&refs[1])?["id"].to_string();
    said(&gateway, &["owed", "give-up", &given_up]).await?;
    up.order("/delete", json!({"status": 200})).await?;
    let paid = gateway.cli(&["owed", "pay", &id]).await?;
    // It may have been paid by the gateway itself meanwhile.
    assert!(matches!(paid.status.code(), Some(0 | 4)), "{}", text(&paid));
    let settled = async || gateway.admin_get("/api/v1/owed").await.is_ok_and(|(_, listed)| listed["owed"] == json!([]));
    wait_until("nothing is owed", BOUND, settled).await?;
    for (session_ref, action) in refs.iter().zip(["owed-paid", "owed-given-up"]) {
        let story = trail(&gateway, session_ref).await?;
        assert_eq!(story.last().map(|(_, action)| action.as_str()), Some(action), "{story:?}");
        let (_, shown) = gateway.admin_get(&format!("/api/v1/sessions/{session_ref}")).await?;
        assert_eq!(shown["owed"], json!([]), "{shown}");
    }
    for absent in [["owed", "pay", "999999"], ["owed", "give-up", "999999"]] {
        let absent = gateway.cli(&absent).await?;
        assert_eq!(absent.status.code(), Some(4), "{}", text(&absent));
    }
    Ok(())
}

/// What a gateway owed when it was killed is still of its session afterwards, and the last of its tries is on record.
#[tokio::test]
async fn u7_what_is_left_to_expire_is_on_record_with_its_session_and_outlives_kill_9() -> Result<()> {
    let (up, mut gateway) = stand("").await?;
    let alice = agent(&gateway, "alice").await?;
    let session_ref = ref_of(&gateway, "alice").await?;
    up.order("/delete", json!({"status": 503})).await?;
    alice.delete().await?;
    owed_after_a_try(&gateway, 1).await?;
    gateway.kill_all().await?;
    gateway.start_again().await?;
    for _ in 0..12 {
        let (_, listed) = gateway.admin_get("/api/v1/owed").await?;
        let owed = &listed["owed"][0];
        assert_eq!(
            (&owed["session"], &owed["last_error"]),
            (&json!(session_ref), &json!("HTTP status 503")),
            "{listed}"
        );
        if owed["next_at"].is_null() {
            break;
        }
        let tried = gateway.cli(&["owed", "pay", &owed["id"].to_string()]).await?;
        assert_eq!(tried.status.code(), Some(1), "{}", text(&tried));
    }
    let (_, shown) = gateway.admin_get(&format!("/api/v1/sessions/{session_ref}")).await?;
    assert_eq!(shown["owed"][0]["next_at"], Value::Null, "left to expire, and shown: {shown}");
    let story = trail(&gateway, &session_ref).await?;
    let left = story.iter().filter(|(_, action)| action == "owed-left").count();
    assert_eq!((left, story.last()), (1, Some(&pair("gateway", "owed-left"))), "{story:?}");
    Ok(())
}

#[tokio::test]
async fn s14_rotating_keys_ends_no_session_whether_the_gateway_runs_or_not() -> Result<()> {
    let (up, mut gateway) = stand("").await?;
    let alice = agent(&gateway, "alice").await?;
    let keys = async |gateway: &Gateway| anyhow::Ok(std::fs::read_dir(gateway.state_dir().join("keys"))?.count());
    assert_eq!(keys(&gateway).await?, 1);
    let rotated = told(&gateway, &["keys", "rotate"]).await?;
    assert_eq!((rotated["keys"].as_u64(), keys(&gateway).await?), (Some(2), 2));
    alice.call_through("echo", json!({"text": "old key"})).await?.result()?;
    let bob = agent(&gateway, "bob").await?;
    gateway.kill_worker().await?;
    for client in [&alice, &bob] {
        client.call_through("echo", json!({"text": "another worker"})).await?.result()?;
    }
    gateway.stop().await?;
    let rotated = told(&gateway, &["keys", "rotate"]).await?;
    assert_eq!(rotated["keys"], 3, "on the files");
    gateway.start_again().await?;
    for client in [&alice, &bob] {
        client.call_through("echo", json!({"text": "another start"})).await?.result()?;
    }
    assert_eq!(up.count("/initializes").await?, 2, "no session of the server was lost");
    let (_, listed) = gateway.admin_get("/api/v1/sessions").await?;
    assert!(!listed.to_string().contains("unreadable"), "{listed}");
    let record = told(&gateway, &["audit", "--action", "keys-rotated"]).await?;
    let entries = record["entries"].as_array().context("entries")?;
    let said: Vec<_> = entries.iter().map(|entry| (&entry["actor"], &entry["detail"])).collect();
    let (operator, stopped) = (json!("operator"), json!("while the gateway was stopped"));
    assert_eq!(said, [(&operator, &stopped), (&operator, &Value::Null)], "both are on record: {record}");
    Ok(())
}

#[tokio::test]
async fn o3_metrics_count_what_happened_and_hold_no_id() -> Result<()> {
    let (up, mut gateway) = stand("").await?;
    let alice = agent(&gateway, "alice").await?;
    let bob = agent(&gateway, "bob").await?;
    gateway.kill_worker().await?;
    alice.call_through("echo", json!({"text": "restored"})).await?.result()?;
    alice.call_through("nowhere-to-be-found", json!({})).await?.error()?;
    up.forget().await?;
    alice.call_through("echo", json!({"text": "remade"})).await?.result()?;
    bob.delete().await?;
    let metrics = metrics(&gateway).await?;
    let value = |name: &str| -> Option<f64> {
        let line = metrics.lines().find(|line| line.starts_with(name))?;
        line.rsplit(' ').next()?.parse().ok()
    };
    let calls =
        "mcp_server_operation_duration_seconds_count{mcp_method_name=\"tools/call\",server=\"h\",outcome=\"ok\"}";
    assert!(value(calls) >= Some(2.0), "{metrics}");
    assert_eq!(value("mainstay_restores_total{result=\"resumed\"}"), Some(2.0), "{metrics}");
    assert_eq!(value("mainstay_upstream_remade_total{server=\"h\"}"), Some(1.0), "{metrics}");
    assert_eq!(
        value("mainstay_sessions_ended_total{server=\"h\",state=\"deleted\",reason=\"delete\"}"),
        Some(1.0),
        "{metrics}"
    );
    assert_eq!(value("mainstay_sessions{state=\"ready\"}"), Some(1.0), "{metrics}");
    assert_eq!(value("mainstay_calls_in_flight"), Some(0.0), "{metrics}");
    assert!(value("mainstay_ledger_commits_total{class=\"authority\"}") >= Some(1.0), "{metrics}");
    assert!(metrics.ends_with("# EOF\n") && metrics.contains("mainstay_build_info{version="));
    for client in [&alice, &bob] {
        assert!(!metrics.contains(client.session.as_deref().context("an id")?));
    }
    for hidden in ["alice", "bob", "s-", "nowhere-to-be-found", "echo"] {
        assert!(!metrics.contains(hidden), "`{hidden}` is in\n{metrics}");
    }
    Ok(())
}

/// The numbers as a scraper gets them, which sends the token.
async fn metrics(gateway: &Gateway) -> Result<String> {
    let http = reqwest::Client::builder().no_proxy().build()?;
    let answer = http.get(gateway.admin_url("/metrics")?).bearer_auth(gateway.admin_token()?).send().await?;
    let kind = answer.headers().get("content-type").context("a media type")?.to_str()?.to_owned();
    ensure!(kind.starts_with("application/openmetrics-text"), "{kind}");
    Ok(answer.text().await?)
}

#[tokio::test]
async fn o1_settings_and_instances_are_shown_as_they_are() -> Result<()> {
    let (up, stdio) = (UpH::start().await?, UpS::new(&[])?);
    let settings = "[session]\ndrain_grace = \"7s\"\n";
    let gateway = Gateway::start(&format!("{settings}{}{}", up.toml("h"), stdio.toml("s")?), &[]).await?;
    for server in ["h", "s"] {
        let client = RawClient::open(&gateway.url(server)?, VERSION).await?;
        client.call_through("echo", json!({"text": "here"})).await?.result()?;
    }
    let shown = said(&gateway, &["config", "show", "--running"]).await?;
    let line = shown.lines().find(|line| line.starts_with("session.drain_grace"));
    assert!(line.is_some_and(|line| line.ends_with(" 7s")), "{shown}");
    let (_, told) = gateway.admin_get("/api/v1/config").await?;
    assert!(told["knobs"].as_array().is_some_and(|knobs| knobs.len() > 10), "{told}");
    let instances = said(&gateway, &["instances"]).await?;
    assert!(instances.contains("child") && instances.contains("http"), "{instances}");
    Ok(())
}
