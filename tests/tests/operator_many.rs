//! Sessions found and ended by what is known of them: by their id, by filters, a thousand of them at once (O1, I6, S8).

use anyhow::{Context as _, Result, ensure};
use mainstay_tests::{Gateway, RawClient, UpH, wait_until};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::process::Output;
use std::time::Duration;

const VERSION: &str = "2025-11-25";
const BOUND: Duration = Duration::from_secs(20);
/// More than the ledger gives at once.
const MANY: usize = 1100;
/// How many clients open them at the same time.
const LANES: usize = 11;

async fn stand(extra: &str) -> Result<(UpH, Gateway)> {
    let up = UpH::start().await?;
    let gateway = Gateway::start(&format!("{extra}{}", up.toml("h")), &[]).await?;
    Ok((up, gateway))
}

fn client(gateway: &Gateway, agent: &str) -> Result<RawClient> {
    RawClient::new(&gateway.url("h")?)?.with_header("x-agent-name", agent)
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// What a command says on standard output in JSON; it must succeed.
async fn told(gateway: &Gateway, words: &[&str], input: &str) -> Result<Value> {
    let words: Vec<&str> = ["--json"].into_iter().chain(words.iter().copied()).collect();
    let output = gateway.cli_with(&words, input).await?;
    ensure!(output.status.success(), "`{}` failed: {}", words.join(" "), text(&output));
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn refs(listed: &Value) -> BTreeSet<String> {
    let views = listed["sessions"].as_array().into_iter().flatten();
    views.filter_map(|view| view["ref"].as_str().map(str::to_owned)).collect()
}

#[tokio::test]
async fn i6_a_session_is_found_by_its_id_which_is_never_repeated() -> Result<()> {
    let (_up, gateway) = stand("").await?;
    let (mut alice, mut bob) = (client(&gateway, "alice")?, client(&gateway, "bob")?);
    alice.establish(VERSION).await?;
    bob.establish(VERSION).await?;
    let id = |client: &RawClient| client.session.clone().context("an id");
    let (alices, bobs) = (id(&alice)?, id(&bob)?);

    let shown = told(&gateway, &["sessions", "show", "--id", "-"], &format!("{alices}\n")).await?;
    assert_eq!((&shown["agent"], &shown["state"]), (&json!("alice"), &json!("ready")), "{shown}");
    let session_ref = shown["ref"].as_str().context("a ref")?.to_owned();
    let both = told(&gateway, &["sessions", "list", "--id", "-"], &format!("{alices}\n\n  {bobs}\r\n")).await?;
    assert_eq!((refs(&both).len(), refs(&both).contains(&session_ref)), (2, true), "{both}");

    let (status, found) = gateway.admin_post("/api/v1/sessions/find", &json!({"id": alices})).await?;
    assert_eq!((status, &found["ref"]), (200, &shown["ref"]), "{found}");
    for (body, expected) in [
        (json!({"id": "nobodys-id"}), 404),
        (json!({"id": "with blanks"}), 400),
        (json!({"id": "x".repeat(129)}), 400),
        (json!({"id": alices, "and": 1}), 400),
        (json!({"name": alices}), 400),
        (json!(alices), 400),
        (json!({}), 400),
    ] {
        let (status, problem) = gateway.admin_post("/api/v1/sessions/find", &body).await?;
        assert_eq!(status, expected, "{problem}");
        assert!(!problem.to_string().contains(&alices) && !problem.to_string().contains("nobodys"), "{problem}");
    }

    for (words, input, code) in [
        (vec!["sessions", "show", "--id", "-"], "nobodys-id\n".to_owned(), 4),
        (vec!["sessions", "show", "--id", "-"], format!("{alices} {bobs}\n"), 2),
        (vec!["sessions", "show", "--id", "-"], format!("{alices}\n{bobs}\n"), 2),
        (vec!["sessions", "show", "--id", "-"], String::new(), 2),
        (vec!["sessions", "show", "--id", &alices], String::new(), 2),
        (vec!["sessions", "show", &session_ref, "--id", "-"], format!("{alices}\n"), 2),
        (vec!["sessions", "close", "--id", "-", "--agent", "alice"], format!("{alices}\n"), 2),
        (vec!["sessions", "list", "--id", "-", "--state", "ready"], format!("{alices}\n"), 2),
    ] {
        let output = gateway.cli_with(&words, &input).await?;
        assert_eq!(output.status.code(), Some(code), "{}", text(&output));
        let said = text(&output);
        assert!(!said.contains(&alices) && !said.contains(&bobs) && !said.contains("nobodys"), "{said}");
    }

    let drained = told(&gateway, &["sessions", "drain", "--id", "-"], &format!("{alices}\n")).await?;
    assert_eq!((&drained["sessions"][0]["ref"], &drained["sessions"][0]["state"]), (&shown["ref"], &json!("deleted")));
    let closed = told(&gateway, &["sessions", "close", "--id", "-"], &format!("{bobs}\n")).await?;
    assert_eq!(closed["sessions"][0]["state"], "closed", "{closed}");
    let shown = told(&gateway, &["sessions", "show", "--id", "-"], &alices).await?;
    assert_eq!(shown["state"], "deleted", "an ended one is found, too: {shown}");
    for log in [gateway.log(), gateway.admin_get("/api/v1/audit").await?.1.to_string()] {
        assert!(!log.contains(&alices) && !log.contains(&bobs));
    }
    Ok(())
}

#[tokio::test]
async fn o1_a_filter_that_names_nothing_says_so_and_names_what_there_is() -> Result<()> {
    let (up, mut gateway) = stand("").await?;
    let mut alice = client(&gateway, "alice")?;
    alice.establish(VERSION).await?;
    for (filter, named) in [("--server", "configured are: h"), ("--state", "ready, draining, deleted, expired, closed")]
    {
        for words in [vec!["sessions", "list", filter, "tpyo"], vec!["--json", "sessions", "list", filter, "tpyo"]] {
            let output = gateway.cli(&words).await?;
            let said = text(&output);
            assert_eq!(output.status.code(), Some(2), "{said}");
            assert!(said.contains("tpyo") && said.contains(named), "{said}");
        }
        let (status, problem) =
            gateway.admin_get(&format!("/api/v1/sessions?{}=tpyo", filter.trim_start_matches('-'))).await?;
        assert_eq!((status, &problem["code"]), (400, &json!("request_invalid")), "{problem}");
    }
    let unended = gateway.cli(&["sessions", "close", "--server", "tpyo", "--yes"]).await?;
    assert_eq!(unended.status.code(), Some(2), "{}", text(&unended));

    for (filter, value, named) in [("principal", "agent:bob", "agent:alice"), ("agent", "bob", "alice")] {
        let (status, page) = gateway.admin_get(&format!("/api/v1/sessions?{filter}={value}")).await?;
        let note = page["note"].as_str().context("a note")?;
        assert_eq!((status, &page["sessions"], &page["next"]), (200, &json!([]), &Value::Null), "{page}");
        assert!(note.contains(&format!("no session has the {filter} `{value}`; there are: {named}")), "{page}");
        let output = gateway.cli(&["sessions", "list", &format!("--{filter}"), value]).await?;
        assert!(output.status.success() && String::from_utf8_lossy(&output.stderr).contains(note), "{}", text(&output));
        let unended = gateway.cli(&["sessions", "drain", &format!("--{filter}"), value, "--yes"]).await?;
        assert!(unended.status.code() == Some(4) && text(&unended).contains(note), "{}", text(&unended));
    }
    // All that is named is there, only not together; and a server that was configured once still names its sessions.
    let (_, page) = gateway.admin_get("/api/v1/sessions?agent=alice&state=closed&server=h").await?;
    assert_eq!((&page["sessions"], &page["note"]), (&json!([]), &Value::Null), "{page}");
    gateway.stop().await?;
    gateway.rewrite_config(&up.toml("other"))?;
    gateway.start_again().await?;
    for (query, count) in [("server=h", 1), ("server=h&state=draining", 0), ("server=other", 0)] {
        let (status, page) = gateway.admin_get(&format!("/api/v1/sessions?{query}")).await?;
        assert_eq!((status, refs(&page).len(), &page["note"]), (200, count, &Value::Null), "{query}: {page}");
    }
    Ok(())
}

/// Opens sessions of one agent, several at a time.
async fn open_many(gateway: &Gateway, agent: &str, count: usize) -> Result<()> {
    let lanes = (0..LANES).map(async |_| {
        let mut client = client(gateway, agent)?;
        for _ in 0..count / LANES {
            client.establish(VERSION).await?;
        }
        anyhow::Ok(())
    });
    futures_util::future::try_join_all(lanes).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o1_more_than_a_thousand_sessions_are_listed_and_ended_by_one_filter() -> Result<()> {
    let (_up, gateway) = stand("[session]\nmax_per_principal = 5000\n").await?;
    let mut bystander = client(&gateway, "bystander")?;
    bystander.establish(VERSION).await?;
    open_many(&gateway, "many", MANY).await?;

    let (mut seen, mut after) = (BTreeSet::new(), String::new());
    for _ in 0..3 {
        let (status, page) = gateway.admin_get(&format!("/api/v1/sessions?limit=5000{after}")).await?;
        assert_eq!(status, 200, "{page}");
        let found = refs(&page);
        assert!(found.len() <= 1000 && seen.is_disjoint(&found), "a page is bounded, and each is on one page only");
        seen.extend(found);
        let Some(next) = page["next"].as_str() else { break };
        after = format!("&after={next}");
    }
    assert_eq!(seen.len(), MANY + 1, "each is on a page");
    let listed = told(&gateway, &["sessions", "list", "--agent", "many"], "").await?;
    assert_eq!((refs(&listed).len(), &listed["next"]), (MANY, &Value::Null));

    let unasked = gateway.cli(&["sessions", "close", "--agent", "many"]).await?;
    assert!(text(&unasked).contains(&format!("{MANY} sessions match; nothing was done")), "{}", text(&unasked));
    let closed = told(&gateway, &["sessions", "close", "--agent", "many", "--yes"], "").await?;
    let ended = closed["sessions"].as_array().context("a list")?;
    assert_eq!(ended.iter().filter(|view| view["state"] == "closed").count(), MANY);
    let left = told(&gateway, &["sessions", "list", "--state", "ready"], "").await?;
    assert_eq!((refs(&left).len(), &left["sessions"][0]["agent"]), (1, &json!("bystander")), "{left}");
    bystander.call_through("echo", json!({"text": "others go on"})).await?.result()?;
    Ok(())
}

/// More sessions than are looked at one by one, each with a call in flight.
#[tokio::test]
async fn s8_a_drain_of_many_waits_for_all_of_them_and_says_how_far_it_is() -> Result<()> {
    let (up, gateway) = stand("").await?;
    let mut clients = Vec::new();
    for _ in 0..20 {
        let mut client = client(&gateway, "many")?;
        client.establish(VERSION).await?;
        clients.push(client);
    }
    let mut running = Vec::new();
    for client in &clients {
        let message = client.message("tools/call", json!({"name": "slow", "arguments": {"ms": 6000}}));
        running.push(client.post(&message).await?);
    }
    let all = clients.len() as u64;
    wait_until("all run", BOUND, async || up.executions("slow").await.is_ok_and(|count| count == all)).await?;
    let words = ["sessions", "drain", "--agent", "many", "--yes", "--grace", "1m"];
    let follow = async {
        for (client, running) in clients.iter().zip(running) {
            ensure!(client.follow(running).await?.text()? == "waited 6000 ms", "a call in flight finishes");
        }
        anyhow::Ok(())
    };
    let (drained, followed) = tokio::join!(gateway.cli(&words), follow);
    followed?;
    let drained = drained?;
    let said = text(&drained);
    assert!(drained.status.success(), "{said}");
    assert_eq!(said.lines().filter(|line| line.ends_with("deleted  drained")).count(), clients.len(), "{said}");
    assert!(
        said.contains("of 20 sessions to end: ") && said.contains("(1 in flight), …, the last at the latest in "),
        "{said}"
    );
    Ok(())
}
