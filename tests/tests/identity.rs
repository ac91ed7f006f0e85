//! Who a client is: tokens and agents' names, on every path, over rotations and restarts (I1, I2, S4, S15, AC-13, AC-05).

use anyhow::{Context as _, Result, ensure};
use mainstay_tests::{Gateway, Outcome, RawClient, Setup, UpH, wait_until};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::Duration;
use tempfile::TempDir;

const VERSION: &str = "2025-11-25";
const BOUND: Duration = Duration::from_secs(20);
const ALICE: &str = "alice-first-token-0001";
const ALICE_NEXT: &str = "alice-second-token-0002";
const BOB: &str = "bob-token-000000000003";
const CI: &str = "ci-token-from-a-file-4";
const CI_NEXT: &str = "ci-token-from-a-file-5";
const JUNK: &str = "junk-token-that-is-nobodys";

const TOKENS: &str = r#"
    [auth]
    mode = "token"
    [auth.tokens]
    alice = ["${ALICE_TOKEN}", "${ALICE_NEXT_TOKEN}"]
    bob = "${BOB_TOKEN}"
    ci = "${file:{{CI_FILE}}}"
"#;

/// A gateway that wants tokens, in front of one server.
struct Stand {
    up: UpH,
    gateway: Gateway,
    ci_file: PathBuf,
    _files: TempDir,
}

impl Stand {
    async fn start(auth: &str) -> Result<Stand> {
        let up = UpH::start().await?;
        let files = TempDir::with_prefix("tokens-")?;
        let ci_file = files.path().join("ci");
        std::fs::write(&ci_file, format!("{CI}\n"))?;
        let gateway =
            setup(&format!("{auth}{}", up.toml("h"))).fill("CI_FILE", &ci_file.display().to_string()).start().await?;
        Ok(Stand { up, gateway, ci_file, _files: files })
    }

    fn client(&self, token: &str) -> Result<RawClient> {
        bearing(RawClient::new(&self.gateway.url("h")?)?, token)
    }

    async fn open(&self, token: &str) -> Result<RawClient> {
        let mut client = self.client(token)?;
        client.establish(VERSION).await?;
        Ok(client)
    }

    /// How many requests the server has seen so far.
    async fn traffic(&self) -> Result<usize> {
        Ok(self.up.log().await?.len())
    }
}

fn setup(config: &str) -> Setup {
    Setup::new(config).env("ALICE_TOKEN", ALICE).env("ALICE_NEXT_TOKEN", ALICE_NEXT).env("BOB_TOKEN", BOB)
}

fn bearing(client: RawClient, token: &str) -> Result<RawClient> {
    client.with_header("authorization", &format!("Bearer {token}"))
}

/// A client without a token, in the session of `client`.
fn without_token(stand: &Stand, client: &RawClient) -> Result<RawClient> {
    let session = client.session.clone().context("a session")?;
    Ok(RawClient::new(&stand.gateway.url("h")?)?.with_session(&session, VERSION))
}

async fn tools(client: &RawClient) -> Result<usize> {
    let outcome = client.request("tools/list", Value::Null).await?;
    Ok(outcome.result()?["tools"].as_array().context("tools")?.len())
}

/// Status, and the body but for the request's id, which must be the request's own.
async fn told(client: &RawClient) -> Result<(u16, Value)> {
    let outcome = client.request("tools/list", Value::Null).await?;
    let mut body = outcome.response().context("a body")?.clone();
    ensure!(body["id"].is_number(), "S13a: not the request's own id: {body}");
    body["id"] = Value::Null;
    Ok((outcome.status, body))
}

/// That this is a 401 as RFC 6750 wants it, with this challenge and the request's own id.
fn assert_challenged(outcome: &Outcome, challenge: &str) {
    assert_eq!(outcome.status, 401, "{}", outcome.body_text());
    assert_eq!(outcome.header("www-authenticate"), Some(challenge));
    assert_eq!(outcome.named_outcome(), Some("authentication_required"));
    let id = outcome.response().map(|body| body["id"].is_number());
    assert_eq!(id, Some(true), "S13a: the request's own id: {}", outcome.body_text());
}

const CHALLENGE: &str = "Bearer realm=\"mainstay\"";
const CHALLENGE_INVALID: &str = "Bearer realm=\"mainstay\", error=\"invalid_token\"";

/// AC-13 (2): a stranger with a good token of its own is answered like for an id that never was, on every path.
async fn assert_bob_learns_nothing(stand: &Stand, alice: &RawClient) -> Result<()> {
    let session = alice.session.clone().context("a session")?;
    let bob = stand.client(BOB)?.with_session(&session, VERSION);
    let unknown = stand.client(BOB)?.with_session("an-id-that-never-was", VERSION);
    let traffic = stand.traffic().await?;
    assert_eq!(told(&bob).await?, told(&unknown).await?, "POST");
    assert_eq!(told(&bob).await?.0, 404);
    assert_eq!(bob.get_stream(None).await?.status, 404, "GET");
    assert_eq!(bob.delete().await?, 404, "DELETE");
    assert_eq!(stand.traffic().await?, traffic, "no upstream traffic for a stranger");
    Ok(())
}

/// AC-13 (3), (4): without a token, or with a bad one, nothing happens, and the session is kept.
async fn assert_nobody_gets_in(stand: &Stand, alice: &RawClient) -> Result<()> {
    let traffic = stand.traffic().await?;
    let nobody = without_token(stand, alice)?;
    let junk = bearing(nobody.clone(), JUNK)?;
    assert_challenged(&nobody.request("tools/list", Value::Null).await?, CHALLENGE);
    assert_challenged(&junk.request("tools/list", Value::Null).await?, CHALLENGE_INVALID);
    let other_scheme = nobody.clone().with_header("authorization", "Basic YTpi")?;
    assert_challenged(&other_scheme.request("tools/list", Value::Null).await?, CHALLENGE);
    for client in [&nobody, &junk] {
        let stream = client.get_stream(None).await?;
        assert_eq!(stream.status, 401, "GET");
        assert!(stream.header("www-authenticate").is_some_and(|challenge| challenge.starts_with(CHALLENGE)));
        assert_eq!(client.delete().await?, 401, "DELETE");
    }
    assert_eq!(stand.traffic().await?, traffic, "no upstream traffic for nobody");
    alice.request("tools/list", Value::Null).await?.result().context("the session was kept")?;
    Ok(())
}

#[tokio::test]
async fn ac13_who_you_are_beats_what_you_hold_before_and_after_every_restart() -> Result<()> {
    let mut stand = Stand::start(TOKENS).await?;
    let alice = stand.open(ALICE).await?;
    let count = tools(&alice).await?;
    for stage in ["running", "worker killed", "everything killed"] {
        match stage {
            "worker killed" => stand.gateway.kill_worker().await.map(drop)?,
            "everything killed" => {
                stand.gateway.kill_all().await?;
                stand.gateway.start_again().await?;
            }
            _ => {}
        }
        // (6): the first request after a restart is the stranger's.
        assert_bob_learns_nothing(&stand, &alice).await.context(stage)?;
        assert_nobody_gets_in(&stand, &alice).await.context(stage)?;
        // (1): the session goes on under either of its principal's tokens.
        for token in [ALICE, ALICE_NEXT] {
            let rotated = bearing(alice.clone(), token)?;
            assert_eq!(tools(&rotated).await.context(stage)?, count, "{stage}: as many tools as before");
            rotated.call("echo", json!({"text": stage})).await?.result()?;
        }
    }
    assert_eq!(stand.up.count("/initializes").await?, 1, "one upstream session throughout");
    let log = stand.gateway.log();
    for secret in [ALICE, ALICE_NEXT, BOB, CI, JUNK] {
        assert!(!log.contains(secret), "I6: a token in the log");
    }
    Ok(())
}

#[tokio::test]
async fn ac05_6_junk_bearers_open_nothing_and_reach_nobody() -> Result<()> {
    let stand = Stand::start(TOKENS).await?;
    let traffic = stand.traffic().await?;
    for _ in 0..200 {
        let mut client = stand.client(JUNK)?;
        let outcome = client.initialize(VERSION).await?;
        assert_challenged(&outcome, CHALLENGE_INVALID);
        assert!(client.session.is_none(), "no id was given");
    }
    assert_eq!(stand.gateway.status().await?["sessions"]["stored"], 0);
    assert_eq!(stand.traffic().await?, traffic);
    stand.open(ALICE).await?;
    let (_, audit) = stand.gateway.admin_get("/api/v1/audit?action=authentication-refused").await?;
    let entries = audit["entries"].as_array().map_or(0, Vec::len);
    assert_eq!(entries, 1, "I5: on record, and no flood of it: {audit}");
    assert!(!audit.to_string().contains(JUNK));
    Ok(())
}

#[tokio::test]
async fn s15_a_token_rotated_in_its_file_is_picked_up_without_a_restart_and_ends_nothing() -> Result<()> {
    let mut stand = Stand::start(TOKENS).await?;
    let ci = stand.open(CI).await?;
    let next = bearing(ci.clone(), CI_NEXT)?;
    assert_eq!(next.request("tools/list", Value::Null).await?.status, 401, "not yet");
    // As a careful operator does it, in one step.
    let staged = stand.ci_file.with_extension("next");
    std::fs::write(&staged, format!("{CI_NEXT}\n"))?;
    std::fs::rename(&staged, &stand.ci_file)?;
    wait_until("the new token is taken", BOUND, async || tools(&next).await.is_ok()).await?;
    assert_eq!(ci.request("tools/list", Value::Null).await?.status, 401, "the old one is not");
    stand.gateway.kill_worker().await?;
    tools(&next).await?;
    assert_eq!(stand.up.count("/initializes").await?, 1, "it is the same session");
    Ok(())
}

#[tokio::test]
async fn s13a_a_token_file_that_is_away_ends_no_session_and_is_not_401() -> Result<()> {
    let mut stand = Stand::start(TOKENS).await?;
    let ci = stand.open(CI).await?;
    std::fs::remove_file(&stand.ci_file)?;
    stand.gateway.kill_worker().await?;
    stand.open(ALICE).await.context("others are served")?;
    let message = ci.message("tools/list", Value::Null);
    let mut waiting = std::pin::pin!(ci.post(&message));
    let early = tokio::time::timeout(Duration::from_millis(500), &mut waiting).await;
    ensure!(early.is_err(), "neither served nor refused while nobody can tell");
    std::fs::write(&stand.ci_file, format!("{CI}\n"))?;
    waiting.await?.finish(BOUND).await?.result().context("held, then served")?;
    Ok(())
}

#[tokio::test]
async fn i1_a_token_in_the_query_string_is_never_accepted() -> Result<()> {
    let stand = Stand::start(TOKENS).await?;
    let url = stand.gateway.url("h")?;
    for query in [format!("access_token={ALICE}"), format!("token={ALICE}"), format!("authorization=Bearer%20{ALICE}")]
    {
        let mut client = RawClient::new(&format!("{url}?{query}"))?;
        assert_challenged(&client.initialize(VERSION).await?, CHALLENGE);
    }
    assert!(!stand.gateway.log().contains(ALICE));
    Ok(())
}

#[tokio::test]
async fn s4_who_it_is_comes_before_what_it_asks_for() -> Result<()> {
    let stand = Stand::start(TOKENS).await?;
    let nobody = RawClient::new(&stand.gateway.url("nowhere")?)?;
    assert_challenged(&nobody.request("tools/list", Value::Null).await?, CHALLENGE);
    let picky = RawClient::new(&stand.gateway.url("h")?)?.with_header("accept", "text/html")?;
    assert_eq!(picky.post(&json!({"jsonrpc": "2.0", "id": 1, "method": "ping"})).await?.status, 401);
    let foreign = stand.client(JUNK)?.with_header("origin", "http://evil.example.com")?;
    assert_eq!(foreign.request("ping", Value::Null).await?.status, 403, "origin comes first");
    let large = format!("{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\",\"params\":\"{}\"}}", "x".repeat(1 << 20));
    // It is refused before it is read; the connection may break under a client that goes on writing.
    if let Ok(refused) = RawClient::new(&stand.gateway.url("h")?)?.post_bytes(large).await {
        assert_eq!(refused.status, 401);
    }
    let http = reqwest::Client::builder().no_proxy().build()?;
    let outside = format!("http://{}/elsewhere", stand.gateway.mcp_address()?);
    let stranger = http.get(&outside).send().await?;
    assert_eq!(stranger.status(), 404);
    assert!(!stranger.text().await?.contains("/mcp/h"), "a stranger does not learn the servers' names");
    assert!(http.get(&outside).bearer_auth(ALICE).send().await?.text().await?.contains("/mcp/h"));
    let known = stand.client(ALICE)?.with_session("an-id-that-never-was", "1999-01-01");
    assert_eq!(known.request("ping", Value::Null).await?.status, 404, "the session comes before the version");
    Ok(())
}

#[tokio::test]
async fn i2_a_required_agent_must_be_named_on_every_request_and_stay_the_same() -> Result<()> {
    let auth = TOKENS.replace("mode = \"token\"", "mode = \"token\"\nrequire_agent = true");
    let mut stand = Stand::start(&auth).await?;
    let refused = |outcome: &Outcome| {
        assert_eq!(outcome.status, 400, "{}", outcome.body_text());
        assert_eq!(outcome.named_outcome(), Some("agent_refused"));
    };
    refused(&stand.client(ALICE)?.initialize(VERSION).await?);
    refused(&stand.client(ALICE)?.with_header("x-agent-name", " ")?.initialize(VERSION).await?);
    assert_eq!(stand.client(JUNK)?.initialize(VERSION).await?.status, 401, "who it is comes first");
    assert_eq!(stand.gateway.status().await?["sessions"]["stored"], 0);
    let traffic = stand.traffic().await?;
    assert_eq!(traffic, 0, "nothing went to the server");

    let mut builder = stand.client(ALICE)?.with_header("x-agent-name", "builder-canary")?;
    builder.establish(VERSION).await?;
    let count = tools(&builder).await?;
    let session = builder.session.clone().context("a session")?;
    let unnamed = stand.client(ALICE)?.with_session(&session, VERSION);
    let other = unnamed.clone().with_header("x-agent-name", "other-canary")?;
    let strange = stand.client(BOB)?.with_session(&session, VERSION).with_header("x-agent-name", "other-canary")?;
    for restart in [false, true] {
        if restart {
            stand.gateway.kill_worker().await?;
        }
        refused(&other.request("tools/list", Value::Null).await?);
        refused(&unnamed.request("tools/list", Value::Null).await?);
        assert_eq!(other.get_stream(None).await?.status, 400, "GET");
        assert_eq!(other.delete().await?, 400, "DELETE");
        assert_eq!(told(&strange).await?.0, 404, "a stranger learns nothing of the agent");
        assert_eq!(tools(&builder).await?, count, "the session was kept");
    }
    let log = stand.gateway.log();
    let lines: Vec<_> = log.lines().filter(|line| line.contains("agent refused")).collect();
    assert!(lines.len() >= 4, "I2: each refusal is logged: {lines:?}");
    assert!(!lines.iter().any(|line| line.contains("canary")), "without values: {lines:?}");
    Ok(())
}

#[tokio::test]
async fn i2_where_no_agent_is_required_its_absence_is_fine_and_another_one_is_not() -> Result<()> {
    let stand = Stand::start(TOKENS).await?;
    let mut builder = stand.client(ALICE)?.with_header("x-agent-name", "builder")?;
    builder.establish(VERSION).await?;
    let session = builder.session.clone().context("a session")?;
    let unnamed = stand.client(ALICE)?.with_session(&session, VERSION);
    tools(&unnamed).await?;
    let other = unnamed.with_header("x-agent-name", "other")?.request("tools/list", Value::Null).await?;
    assert_eq!((other.status, other.named_outcome()), (400, Some("agent_refused")));
    Ok(())
}

#[tokio::test]
async fn s15_another_mode_closes_the_old_sessions_with_a_reason_and_rotating_closes_none() -> Result<()> {
    let mut stand = Stand::start("").await?;
    let mut open = RawClient::new(&stand.gateway.url("h")?)?;
    open.establish(VERSION).await?;
    let server = stand.up.toml("h");
    stand.gateway.stop().await?;
    stand.gateway.rewrite_config(&format!("{TOKENS}{server}"))?;
    stand.gateway.start_again().await?;
    assert_eq!(open.request("tools/list", Value::Null).await?.status, 401, "nobody is anybody any more");
    let session = open.session.clone().context("a session")?;
    let alice = stand.client(ALICE)?.with_session(&session, VERSION);
    let unknown = stand.client(ALICE)?.with_session("an-id-that-never-was", VERSION);
    assert_eq!(told(&alice).await?, told(&unknown).await?, "it is nobody's, and learnt by nobody");
    let status = stand.gateway.status().await?;
    assert_eq!(status["sessions"]["stored"], 0, "it is closed: {status}");
    let log = stand.gateway.log();
    assert!(log.contains("restore refused") && log.contains("the auth contract changed"), "with its reason");
    wait_until("its server is told", BOUND, async || stand.up.count("/deletes").await.is_ok_and(|count| count == 1))
        .await?;

    let kept = stand.open(ALICE).await?;
    stand.gateway.stop().await?;
    let fewer = TOKENS.replace("\"${ALICE_TOKEN}\", ", "");
    stand.gateway.rewrite_config(&format!("{fewer}{server}"))?;
    stand.gateway.start_again().await?;
    assert_eq!(kept.request("tools/list", Value::Null).await?.status, 401, "the old token is gone");
    tools(&bearing(kept.clone(), ALICE_NEXT)?).await.context("the session is not")?;
    Ok(())
}

#[tokio::test]
async fn i1_a_start_fails_by_name_and_never_by_value() -> Result<()> {
    let dir = TempDir::with_prefix("tokens-")?;
    let file = dir.path().join("mainstay.toml");
    for (value, named) in [
        ("${NOT_SET_ANYWHERE}", "NOT_SET_ANYWHERE"),
        ("${file:/not/there}", "/not/there"),
        ("${SHORT_TOKEN}", "SHORT_TOKEN"),
        ("canary", "alice"),
    ] {
        let text = format!("[auth]\nmode = \"token\"\n[auth.tokens]\nalice = \"{value}\"\n");
        std::fs::write(&file, text)?;
        let mut command = tokio::process::Command::new(mainstay_tests::mainstay()?);
        command.args(["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--config"]).arg(&file);
        command.arg("--state-dir").arg(dir.path().join("state")).env("SHORT_TOKEN", "canary").kill_on_drop(true);
        let ended = tokio::time::timeout(BOUND, command.output()).await.context("it started")??;
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert_eq!(ended.status.code(), Some(2), "{said}");
        assert!(said.contains(named) && said.contains("hint:"), "{said}");
        assert!(!said.contains("canary"), "{said}");
        assert!(!dir.path().join("state").exists(), "nothing was done");
    }
    Ok(())
}

#[tokio::test]
async fn a_made_token_works_and_its_hash_alone_does_not() -> Result<()> {
    let made = std::process::Command::new(mainstay_tests::mainstay()?).args(["tokens", "new", "--json"]).output()?;
    let made: Value = serde_json::from_slice(&made.stdout)?;
    let (token, hash) = (made["token"].as_str().context("a token")?, made["hash"].as_str().context("a hash")?);
    let up = UpH::start().await?;
    let config = format!("[auth]\nmode = \"token\"\n[auth.tokens]\nalice = \"{hash}\"\n{}", up.toml("h"));
    let gateway = Gateway::start(&config, &[]).await?;
    let mut client = bearing(RawClient::new(&gateway.url("h")?)?, token)?;
    client.establish(VERSION).await?;
    let mut thief = bearing(RawClient::new(&gateway.url("h")?)?, hash)?;
    assert_challenged(&thief.initialize(VERSION).await?, CHALLENGE_INVALID);
    Ok(())
}
