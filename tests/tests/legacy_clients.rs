//! Clients of 2024-11-05, over HTTP+SSE: the stream is all that they know, and the session outlives it (S18, S2, S4, S13,
//! R4, C8, I6).

use anyhow::{Context as _, Result, ensure};
use mainstay_tests::{Exchange, Gateway, Proc, RawClient, SdkClient, SdkKind, Setup, SseEvent, UpH, UpS, wait_until};
use serde_json::{Value, json};
use std::time::Duration;

const VERSION: &str = "2024-11-05";
const BOUND: Duration = Duration::from_secs(30);

struct Stand {
    up_h: UpH,
    up_s: UpS,
    gateway: Gateway,
}

async fn stand(settings: &str) -> Result<Stand> {
    let up_h = UpH::start().await?;
    let up_s = UpS::new(&[])?;
    let gateway = Gateway::start(&format!("{settings}{}{}", up_h.toml("h"), up_s.toml("s")?), &[]).await?;
    Ok(Stand { up_h, up_s, gateway })
}

impl Stand {
    fn url(&self, server: &str) -> Result<String> {
        Ok(format!("{}/sse", self.gateway.url(server)?))
    }

    async fn open(&self, server: &str) -> Result<OldClient> {
        OldClient::open(RawClient::new(&self.url(server)?)?, &self.url(server)?).await
    }

    async fn fall(&mut self, everything: bool) -> Result<()> {
        if everything {
            self.gateway.kill_all().await?;
            return self.gateway.start_again().await;
        }
        self.gateway.kill_worker().await.map(drop)
    }

    /// Breaks the stream of `client` and waits until that is noticed.
    async fn hang_up(&self, client: &mut OldClient) -> Result<()> {
        let nothing = RawClient::new(&format!("http://{}/healthz", self.gateway.mcp_address()?))?;
        client.stream = nothing.get_stream(None).await?;
        wait_until("the stream is gone", BOUND, async || {
            let (_, listed) = self.gateway.admin_get("/api/v1/sessions").await.unwrap_or_default();
            listed["sessions"].as_array().is_some_and(|all| all.iter().all(|session| session["streams"] == 0))
        })
        .await
    }

    async fn runs(&self, server: &str, tool: &str) -> Result<()> {
        wait_until("the call is at the server", BOUND, async || match server {
            "h" => self.up_h.requests("tools/call").await.is_ok_and(|calls| !calls.is_empty()),
            _ => self.up_s.trace().is_ok_and(|trace| trace.iter().any(|line| line.to_string().contains(tool))),
        })
        .await
    }
}

/// A client of that era, of which every byte is known.
struct OldClient {
    get: RawClient,
    url: String,
    stream: Exchange,
    /// Where it POSTs to.
    post: RawClient,
    endpoint: String,
    /// The last event id that it saw.
    cursor: Option<String>,
}

/// The endpoint that a stream announces first.
async fn endpoint(stream: &mut Exchange) -> Result<SseEvent> {
    ensure!(stream.status == 200 && stream.is_sse(), "no stream but {}", stream.status);
    let event = stream.next_event(BOUND).await?.context("the endpoint")?;
    ensure!(event.event.as_deref() == Some("endpoint"), "the first event is {event:?}");
    Ok(event)
}

fn resolve(url: &str, path: &str) -> Result<String> {
    let origin = url.splitn(4, '/').take(3).collect::<Vec<_>>().join("/");
    ensure!(path.starts_with('/'), "no absolute path: {path}");
    Ok(format!("{origin}{path}"))
}

impl OldClient {
    /// Opens the stream only.
    async fn connect(get: RawClient, url: &str) -> Result<OldClient> {
        let mut stream = get.get_stream(None).await?;
        let told = endpoint(&mut stream).await?;
        assert_eq!(told.retry_ms, Some(4000), "when to come back");
        let endpoint = resolve(url, &told.data)?;
        let post = RawClient::new(&endpoint)?;
        Ok(OldClient { get, url: url.to_owned(), stream, post, endpoint, cursor: told.id })
    }

    async fn open(get: RawClient, url: &str) -> Result<OldClient> {
        let mut client = OldClient::connect(get, url).await?;
        let answer = client.initialize(VERSION).await?;
        ensure!(answer["result"]["protocolVersion"] == VERSION, "{answer}");
        Ok(client)
    }

    async fn initialize(&mut self, version: &str) -> Result<Value> {
        let info = json!({"name": "old", "version": "1"});
        let params = json!({"protocolVersion": version, "capabilities": {}, "clientInfo": info});
        let answer = self.request("initialize", params).await?;
        ensure!(self.post.notify("notifications/initialized", Value::Null).await? == 202);
        Ok(answer)
    }

    /// The session id in the endpoint.
    fn session(&self) -> &str {
        self.endpoint.split("sessionId=").nth(1).unwrap_or_default()
    }

    /// Sends a request that must be accepted, and returns its id.
    async fn send(&self, method: &str, params: Value) -> Result<Value> {
        let message = self.post.message(method, params);
        let confirmed = self.post.post(&message).await?.finish(BOUND).await?;
        ensure!(confirmed.status == 202, "{}: {}", confirmed.status, confirmed.body_text());
        Ok(message["id"].clone())
    }

    async fn request(&mut self, method: &str, params: Value) -> Result<Value> {
        let id = self.send(method, params).await?;
        Ok(self.answer(&id).await?.pop().unwrap_or_default())
    }

    async fn call(&mut self, tool: &str, arguments: Value) -> Result<Value> {
        self.request("tools/call", json!({"name": tool, "arguments": arguments})).await
    }

    async fn text(&mut self, tool: &str, arguments: Value) -> Result<String> {
        let answer = self.call(tool, arguments).await?;
        let text = answer["result"]["content"][0]["text"].as_str();
        Ok(text.with_context(|| format!("no text: {answer}"))?.to_owned())
    }

    /// The response to `id`, if it is the last word on a stream that breaks: a worker that outlives its keeper for a moment
    /// tells what has become of its calls.
    async fn last_word(&mut self, id: &Value) -> Option<Value> {
        let mut last = None;
        while let Ok(Some(event)) = self.stream.next_event(BOUND).await {
            self.cursor = event.id.or(self.cursor.take());
            last = serde_json::from_str(&event.data).ok().filter(|message: &Value| message["id"] == *id).or(last);
        }
        last
    }

    /// The next progress that is told.
    async fn progress(&mut self) -> Result<u64> {
        loop {
            let event = self.stream.next_event(BOUND).await?.context("the stream ended")?;
            self.cursor = event.id;
            let message: Value = serde_json::from_str(&event.data)?;
            if let Some(progress) = message["params"]["progress"].as_u64() {
                return Ok(progress);
            }
        }
    }

    /// Everything up to the response to `id`, which is the last.
    async fn answer(&mut self, id: &Value) -> Result<Vec<Value>> {
        let mut messages = Vec::new();
        loop {
            let event = self.stream.next_event(BOUND).await?.context("the stream ended")?;
            ensure!(event.event.as_deref() == Some("message"), "{event:?}");
            ensure!(event.id.is_some(), "every event has an id: {event:?}");
            self.cursor = event.id;
            let message: Value = serde_json::from_str(&event.data)?;
            let found = message["id"] == *id && message.get("method").is_none();
            messages.push(message);
            if found {
                return Ok(messages);
            }
        }
    }

    /// Opens the stream anew in some way, with whatever it is told to POST to from then on.
    async fn come_back(&mut self, how: Back) -> Result<()> {
        let mut client = match how {
            Back::ByEndpoint => RawClient::new(&self.endpoint)?,
            Back::ByEvent | Back::ByVersion | Back::WithNothing | Back::ToOldEndpoint => self.get.clone(),
        };
        if how == Back::ByVersion {
            client.version = Some(VERSION.to_owned());
        }
        let cursor = self.cursor.clone().filter(|_| how == Back::ByEvent);
        self.stream = client.get_stream(cursor.as_deref()).await?;
        let told = endpoint(&mut self.stream).await?;
        self.cursor = told.id.or(self.cursor.take());
        if how != Back::ToOldEndpoint {
            self.endpoint = resolve(&self.url, &told.data)?;
            self.post = RawClient::new(&self.endpoint)?;
            // Ids go on.
            for _ in 0..100 {
                let _ = self.post.next_id();
            }
        }
        Ok(())
    }
}

/// How a client comes back to its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Back {
    /// It GETs what it was told to POST to.
    ByEndpoint,
    /// As an event source does that remembers its last event.
    ByEvent,
    /// As the TypeScript SDK does, with the version that was negotiated and nothing else.
    ByVersion,
    /// With nothing, and it uses the new endpoint (bug 13).
    WithNothing,
    /// With nothing, and it uses the old endpoint.
    ToOldEndpoint,
}

const WAYS: [Back; 5] = [Back::ByEndpoint, Back::ByEvent, Back::ByVersion, Back::WithNothing, Back::ToOldEndpoint];

#[tokio::test]
async fn s18_a_client_of_2024_11_05_lists_calls_and_sees_progress() -> Result<()> {
    let stand = stand("").await?;
    for server in ["h", "s"] {
        let mut client = stand.open(server).await?;
        let tools = client.request("tools/list", Value::Null).await?;
        assert!(tools["result"]["tools"].as_array().is_some_and(|tools| tools.len() >= 8), "{tools}");
        assert_eq!(client.text("echo", json!({"text": "Grüße"})).await?, "Grüße");
        assert_eq!(client.request("ping", Value::Null).await?["result"], json!({}));
        let params = json!({"name": "prog", "arguments": {"n": 3, "delay_ms": 50}, "_meta": {"progressToken": 7}});
        let id = client.send("tools/call", params).await?;
        let messages = client.answer(&id).await?;
        let progress: Vec<_> = messages.iter().filter_map(|message| message["params"]["progress"].as_f64()).collect();
        assert_eq!(progress, [1.0, 2.0, 3.0], "{server}: {messages:?}");
        let unknown = client.call("nothing", json!({})).await?;
        assert!(unknown.get("error").is_some(), "{server}: {unknown}");
        // Several at a time: each answer finds its request, in whatever order they come.
        let slow = client.send("tools/call", json!({"name": "slow", "arguments": {"ms": 300}})).await?;
        let quick = client.send("tools/call", json!({"name": "echo", "arguments": {"text": "q"}})).await?;
        let all = client.answer(&slow).await?;
        assert!(all.iter().any(|message| message["id"] == quick), "{server}: {all:?}");
    }
    stand.gateway.assert_clean_log(&[])
}

#[tokio::test]
async fn s18_a_client_that_comes_back_without_initialize_is_taken_back_in_every_way() -> Result<()> {
    for everything in [None, Some(false), Some(true)] {
        let mut stand = stand("").await?;
        for way in WAYS {
            let mut client = stand.open("h").await?;
            let before = client.text("whoami", json!({})).await?;
            match everything {
                None => stand.hang_up(&mut client).await?,
                Some(everything) => stand.fall(everything).await?,
            }
            let label = format!("{way:?}, everything: {everything:?}");
            client.come_back(way).await.context(label.clone())?;
            let after = client.text("whoami", json!({})).await.context(label.clone())?;
            let id = |text: &str| serde_json::from_str::<Value>(text).map(|whoami| whoami["session"].clone());
            assert_eq!(id(&before)?, id(&after)?, "the same session at the server: {label}");
            // It does not stand in the way of the next round.
            end_all(&stand.gateway).await?;
        }
    }
    Ok(())
}

/// Ends all sessions, so that the next client that comes back has one only.
async fn end_all(gateway: &Gateway) -> Result<()> {
    let (_, listed) = gateway.admin_get("/api/v1/sessions?limit=100").await?;
    for session in listed["sessions"].as_array().into_iter().flatten() {
        let path = format!("/api/v1/sessions/{}/close", session["ref"].as_str().unwrap_or_default());
        gateway.admin_post(&path, &json!({"reason": "the round is over"})).await?;
    }
    Ok(())
}

#[tokio::test]
async fn c8_r4_a_call_in_flight_is_answered_on_the_next_stream_or_told_as_unknown() -> Result<()> {
    for (server, everything) in [("s", false), ("s", true), ("h", false), ("h", true)] {
        for way in WAYS {
            let mut stand = stand("").await?;
            let mut client = stand.open(server).await?;
            let id = client.send("tools/call", json!({"name": "slow", "arguments": {"ms": 2500}})).await?;
            stand.runs(server, "slow").await?;
            stand.fall(everything).await?;
            let told = client.last_word(&id).await;
            client.come_back(way).await?;
            let answer = match told {
                Some(answer) => answer,
                None => client.answer(&id).await?.pop().unwrap_or_default(),
            };
            let label = format!("{server}, everything: {everything}, {way:?}: {answer}");
            if server == "s" && !everything {
                assert!(answer.get("result").is_some(), "C8: the child's own answer, {label}");
            } else {
                assert_eq!(answer["error"]["data"]["mainstay"], "outcome_unknown", "{label}");
            }
            if server == "h" {
                assert_eq!(stand.up_h.executions("slow").await?, 1, "never twice, {label}");
            } else {
                let calls = stand.up_s.trace()?.iter().filter(|line| line.to_string().contains("tools/call")).count();
                assert_eq!(calls, 1, "never twice, {label}");
            }
            assert_eq!(client.text("echo", json!({"text": "on"})).await?, "on", "{label}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn r4_a_server_that_gives_event_ids_is_asked_for_the_rest() -> Result<()> {
    let mut stand = stand("").await?;
    stand.up_h.answer("sse-with-ids").await?;
    let mut client = stand.open("h").await?;
    let params = json!({"name": "prog", "arguments": {"n": 12, "delay_ms": 300}, "_meta": {"progressToken": "p"}});
    let id = client.send("tools/call", params).await?;
    // Once this is here, it is on record how far the server's own stream was read.
    client.stream.next_event(BOUND).await?.context("progress")?;
    stand.fall(false).await?;
    client.come_back(Back::ByEndpoint).await?;
    let answer = client.answer(&id).await?.pop().unwrap_or_default();
    assert!(answer.get("result").is_some(), "{answer}");
    assert_eq!(stand.up_h.executions("prog").await?, 1);
    Ok(())
}

#[tokio::test]
async fn t2_an_upgrade_costs_no_call_in_flight() -> Result<()> {
    let stand = stand("").await?;
    for server in ["h", "s"] {
        let mut client = stand.open(server).await?;
        // The connection of a stream that has ended is closed; one who writes on it just then has to write again.
        client.get = client.get.clone().with_fresh_connections()?;
        let slow = client.send("tools/call", json!({"name": "slow", "arguments": {"ms": 3000}})).await?;
        let output = stand.gateway.cli(&["upgrade"]).await?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        // An HTTP server's answer still comes on the stream that is open, a child's on the next.
        let answer = match server {
            "h" => client.answer(&slow).await?.pop().unwrap_or_default(),
            _ => {
                while client.stream.next_event(BOUND).await?.is_some() {}
                client.come_back(Back::ByVersion).await?;
                client.answer(&slow).await?.pop().unwrap_or_default()
            }
        };
        ensure!(answer.get("result").is_some(), "{server}: {answer}");
        if server == "h" {
            while client.stream.next_event(BOUND).await?.is_some() {}
            client.come_back(Back::ByEvent).await?;
        }
        assert_eq!(client.text("echo", json!({"text": "on"})).await?, "on", "{server}");
    }
    assert_eq!(stand.up_h.executions("slow").await?, 1);
    Ok(())
}

#[tokio::test]
async fn r4_what_the_former_worker_has_read_of_a_servers_stream_is_not_told_again_once_it_is_gone() -> Result<()> {
    let stand = stand("").await?;
    stand.up_h.answer("sse-with-ids").await?;
    let mut client = stand.open("h").await?;
    let params = json!({"name": "prog", "arguments": {"n": 10_000, "delay_ms": 50}, "_meta": {"progressToken": "p"}});
    client.send("tools/call", params).await?;
    client.progress().await?;
    let leaver = Proc::of(stand.gateway.worker().await?.pid).context("the worker in charge")?;
    let output = stand.gateway.cli(&["upgrade"]).await?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    stand.hang_up(&mut client).await?;
    client.come_back(Back::ByEndpoint).await?;
    let mut told = vec![client.progress().await?];
    // Far beyond where it was when the next worker looked at it first.
    while told.last().is_none_or(|last| *last < 200) {
        told.push(client.progress().await?);
    }
    assert!(leaver.kill(), "it stays for the call");
    for _ in 0..60 {
        told.push(client.progress().await?);
    }
    assert!(told.is_sorted(), "what was told in the moment of the kill may come twice, and nothing else: {told:?}");
    assert_eq!(stand.up_h.executions("prog").await?, 1);
    Ok(())
}

#[tokio::test]
async fn t2_r4_a_client_that_comes_back_to_the_next_worker_gets_the_answer_of_the_former_one() -> Result<()> {
    let stand = stand("").await?;
    let (keeping, mut client) = (stand.open("h").await?, stand.open("h").await?);
    keeping.send("tools/call", json!({"name": "slow", "arguments": {"ms": 600_000}})).await?;
    // Not answered before the client is gone from the former worker: what is written to it there counts as told.
    let answered = client.send("tools/call", json!({"name": "slow", "arguments": {"ms": 20_000}})).await?;
    let lost = client.send("tools/call", json!({"name": "slow", "arguments": {"ms": 600_000}})).await?;
    wait_until("all run", BOUND, async || stand.up_h.executions("slow").await.is_ok_and(|count| count == 3)).await?;
    let leaver = Proc::of(stand.gateway.worker().await?.pid).context("the worker in charge")?;
    let output = stand.gateway.cli(&["upgrade"]).await?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    stand.hang_up(&mut client).await?;
    client.come_back(Back::ByEndpoint).await?;
    let answer = client.answer(&answered).await?.pop().unwrap_or_default();
    assert!(answer.get("result").is_some(), "{answer}");
    assert_eq!(client.text("echo", json!({"text": "on"})).await?, "on");
    assert!(leaver.kill(), "it stayed for the others");
    let answer = client.answer(&lost).await?.pop().unwrap_or_default();
    assert_eq!(answer["error"]["data"]["mainstay"], "outcome_unknown", "{answer}");
    assert_eq!(stand.up_h.executions("slow").await?, 3, "never twice");
    assert_eq!(client.text("echo", json!({"text": "on"})).await?, "on");
    Ok(())
}

#[tokio::test]
async fn r2_answers_wait_for_the_next_stream_and_a_last_event_id_is_honoured() -> Result<()> {
    for everything in [None, Some(false), Some(true)] {
        let mut stand = stand("").await?;
        let mut client = stand.open("s").await?;
        client.text("echo", json!({"text": "seen"})).await?;
        let cursor = client.cursor.clone();
        let first = client.send("tools/call", json!({"name": "echo", "arguments": {"text": "one"}})).await?;
        client.answer(&first).await?;
        // Nobody listens: the answers wait.
        stand.hang_up(&mut client).await?;
        let second = client.send("tools/call", json!({"name": "echo", "arguments": {"text": "two"}})).await?;
        if let Some(everything) = everything {
            stand.fall(everything).await?;
        }
        // It says that it has not seen the first.
        client.cursor = cursor;
        client.come_back(Back::ByEvent).await.with_context(|| format!("everything: {everything:?}"))?;
        let messages = client.answer(&second).await?;
        let texts: Vec<_> = messages.iter().filter_map(|all| all["result"]["content"][0]["text"].as_str()).collect();
        assert_eq!(texts, ["one", "two"], "everything: {everything:?}");
        // And then nothing comes again but what was sent a moment ago to a connection that ends without a word: whether it
        // arrived can't be known.
        client.come_back(Back::ByEndpoint).await?;
        let third = client.send("tools/call", json!({"name": "echo", "arguments": {"text": "three"}})).await?;
        // A child that was started anew may have told that its lists changed.
        let messages = client.answer(&third).await?;
        let answers = messages.iter().filter(|message| message.get("method").is_none());
        let mut ids: Vec<_> = answers.map(|answer| answer["id"].clone()).collect();
        assert_eq!(ids.pop(), Some(third), "everything: {everything:?}: {messages:?}");
        let sent_just_now = [first, second];
        assert!(ids.iter().all(|id| sent_just_now.contains(id)), "everything: {everything:?}: {messages:?}");
        assert!(ids.is_sorted_by_key(|id| id.as_u64()), "in their order, each once: {messages:?}");
    }
    Ok(())
}

#[tokio::test]
async fn s4_a_stranger_gets_nothing_and_does_not_learn_that_there_is_something() -> Result<()> {
    let tokens = "[auth]\nmode = \"token\"\n[auth.tokens]\nalice = \"${ALICE}\"\nbob = \"${BOB}\"\n";
    let up = UpH::start().await?;
    let config = format!("{tokens}{}", up.toml("h"));
    let setup = Setup::new(&config).env("ALICE", "alice-first-token-0001").env("BOB", "bob-first-token-000002");
    let mut gateway = setup.start().await?;
    let url = format!("{}/sse", gateway.url("h")?);
    let bearing =
        |url: &str, token: &str| RawClient::new(url)?.with_header("authorization", &format!("Bearer {token}"));
    let mut alice = OldClient::connect(bearing(&url, "alice-first-token-0001")?, &url).await?;
    alice.post = bearing(&alice.endpoint, "alice-first-token-0001")?;
    // Not even before there is a session.
    let bob = bearing(&alice.endpoint, "bob-first-token-000002")?;
    let stolen = bob.post(&bob.message("initialize", json!({"protocolVersion": VERSION, "capabilities": {}}))).await?;
    assert!(stolen.status >= 400, "{}", stolen.status);
    alice.initialize(VERSION).await?;
    alice.text("echo", json!({"text": "mine"})).await?;
    for fall in [false, true] {
        if fall {
            gateway.kill_worker().await?;
        }
        let list = bob.message("tools/list", Value::Null);
        assert_eq!(bob.post(&list).await?.status, 404, "POST, after a fall: {fall}");
        assert_eq!(bob.get_stream(None).await?.status, 404, "GET, after a fall: {fall}");
        let by_event = bearing(&url, "bob-first-token-000002")?.get_stream(alice.cursor.as_deref()).await?;
        assert_eq!(by_event.status, 404, "by an event of hers, after a fall: {fall}");
        let nobody = RawClient::new(&alice.endpoint)?;
        let challenged = nobody.post(&list).await?;
        assert_eq!(challenged.status, 401);
        assert!(challenged.header("www-authenticate").is_some());
        assert_eq!(nobody.get_stream(None).await?.status, 401);
        // Bob opens a stream and does not initialize: he is not taken for her.
        let mut fresh = OldClient::connect(bearing(&url, "bob-first-token-000002")?, &url).await?;
        fresh.post = bearing(&fresh.endpoint, "bob-first-token-000002")?;
        assert_eq!(fresh.post.post(&list).await?.status, 400, "send `initialize` first");
    }
    alice.stream = bearing(&alice.endpoint, "alice-first-token-0001")?.get_stream(None).await?;
    endpoint(&mut alice.stream).await?;
    assert_eq!(alice.text("echo", json!({"text": "still mine"})).await?, "still mine");
    Ok(())
}

#[tokio::test]
async fn s18_of_two_sessions_that_a_client_could_mean_none_is_guessed() -> Result<()> {
    let mut stand = stand("").await?;
    let mut one = stand.open("h").await?;
    let mut other = stand.open("h").await?;
    stand.fall(false).await?;
    one.come_back(Back::ByVersion).await?;
    let list = one.post.message("tools/list", Value::Null);
    let refused = one.post.post(&list).await?.finish(BOUND).await?;
    assert_eq!(refused.status, 400, "{}", refused.body_text());
    assert_eq!(refused.named_outcome(), Some("session_missing"));
    let told = one.stream.next_message(BOUND).await?.context("the refusal as an event")?;
    assert_eq!((&told["id"], &told["error"]["data"]["mainstay"]), (&list["id"], &json!("session_missing")));
    // Who names its session gets it, and then the other can only mean its own.
    other.come_back(Back::ByEvent).await?;
    assert_eq!(other.text("echo", json!({"text": "other"})).await?, "other");
    Ok(())
}

#[tokio::test]
async fn s13_a_second_initialize_opens_a_second_session_and_the_first_stays() -> Result<()> {
    let stand = stand("").await?;
    let mut client = stand.open("h").await?;
    let first = client.text("whoami", json!({})).await?;
    client.initialize(VERSION).await?;
    let second = client.text("whoami", json!({})).await?;
    assert_ne!(first, second);
    assert_eq!(stand.gateway.status().await?["sessions"]["stored"], 2);
    Ok(())
}

#[tokio::test]
async fn s2_a_stream_that_never_initializes_leaves_nothing() -> Result<()> {
    let stand = stand("").await?;
    let client = OldClient::connect(RawClient::new(&stand.url("s")?)?, &stand.url("s")?).await?;
    let list = client.post.message("tools/list", Value::Null);
    assert_eq!(client.post.post(&list).await?.status, 400, "not before `initialize`");
    let endpoint = client.endpoint.clone();
    drop(client);
    assert_eq!(stand.gateway.status().await?["sessions"]["stored"], 0);
    assert!(stand.up_s.starts()?.is_empty(), "no child");
    let late = RawClient::new(&endpoint)?;
    wait_until("the endpoint is gone with its stream", BOUND, async || {
        let message = late.message("initialize", json!({"protocolVersion": VERSION, "capabilities": {}}));
        late.post(&message).await.is_ok_and(|answer| answer.status == 400)
    })
    .await?;
    // An id that a client made up opens nothing.
    let made_up = RawClient::new(&format!("{}?sessionId=made-up", stand.url("s")?))?;
    let message = made_up.message("initialize", json!({"protocolVersion": VERSION, "capabilities": {}}));
    assert_eq!(made_up.post(&message).await?.status, 400);
    assert_eq!(stand.gateway.status().await?["sessions"]["stored"], 0);
    Ok(())
}

#[tokio::test]
async fn s17_guards_and_versions_are_those_of_the_other_endpoints() -> Result<()> {
    let stand = stand("").await?;
    let url = stand.url("h")?;
    let foreign = RawClient::new(&url)?.with_header("origin", "http://evil.example.com")?;
    assert_eq!(foreign.get_stream(None).await?.status, 403);
    assert_eq!(foreign.post(&json!({"jsonrpc": "2.0", "method": "x"})).await?.status, 403);
    let late = RawClient::new(&url)?;
    let tried = late.post(&late.message("initialize", json!({}))).await?;
    assert_eq!((tried.status, tried.header("allow")), (405, Some("GET")), "sends later clients the older way");
    assert_eq!(late.delete().await?, 405);
    assert_eq!(late.get_stream(Some("no-event-id")).await?.status, 400);
    // A newer version may be spoken, one without sessions is not.
    for (asked, spoken) in [("2025-06-18", "2025-06-18"), ("2026-07-28", "2024-11-05")] {
        let mut client = OldClient::connect(RawClient::new(&url)?, &url).await?;
        assert_eq!(client.initialize(asked).await?["result"]["protocolVersion"], spoken);
    }
    let client = stand.open("h").await?;
    let batch = json!([client.post.message("ping", Value::Null)]);
    assert_eq!(client.post.post(&batch).await?.status, 400, "there are no batches in 2024-11-05");
    Ok(())
}

#[tokio::test]
async fn s12_a_client_that_does_not_read_is_refused_at_last() -> Result<()> {
    let stand = stand("[session]\ncalls_in_flight_max = 8\n").await?;
    let mut client = stand.open("h").await?;
    stand.hang_up(&mut client).await?;
    let echo = |text: &str| json!({"name": "echo", "arguments": {"text": text}});
    let mut taken = 0;
    let refused = loop {
        let message = client.post.message("tools/call", echo("x"));
        let answer = client.post.post(&message).await?.finish(BOUND).await?;
        if answer.status != 202 {
            break answer;
        }
        taken += 1;
        ensure!(taken <= 8, "it is never refused");
    };
    assert_eq!(refused.status, 429, "{}", refused.body_text());
    assert!(refused.body_text().contains("session.calls_in_flight_max"));
    client.come_back(Back::ByEndpoint).await?;
    for _ in 0..taken {
        client.stream.next_message(BOUND).await?.context("an answer")?;
    }
    Ok(())
}

#[tokio::test]
async fn s5_a_session_without_its_stream_expires_and_one_with_it_does_not() -> Result<()> {
    let mut stand = stand("[session]\nidle_expiry = \"2s\"\n").await?;
    let mut client = stand.open("s").await?;
    client.text("echo", json!({"text": "x"})).await?;
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(client.text("echo", json!({"text": "still here"})).await?, "still here", "an open stream is use");
    let endpoint = client.endpoint.clone();
    drop(client);
    wait_until("it has expired", BOUND, async || {
        stand.gateway.status().await.is_ok_and(|status| status["sessions"]["stored"] == 0)
    })
    .await?;
    let gone = RawClient::new(&endpoint)?;
    assert_eq!(gone.get_stream(None).await?.status, 404);
    assert_eq!(gone.post(&gone.message("tools/list", Value::Null)).await?.status, 404);
    stand.gateway.stop().await?;
    stand.gateway.assert_no_orphans().await
}

#[tokio::test]
async fn i6_the_session_id_in_the_endpoint_is_in_no_log_list_or_file() -> Result<()> {
    let (up_h, up_s) = (UpH::start().await?, UpS::new(&[])?);
    let gateway =
        Setup::new(&format!("{}{}", up_h.toml("h"), up_s.toml("s")?)).env("MAINSTAY_LOG", "trace").start().await?;
    let mut stand = Stand { up_h, up_s, gateway };
    let mut client = stand.open("s").await?;
    let secret = client.session().to_owned();
    ensure!(secret.len() == 43, "256 bits: {}", secret.len());
    client.text("echo", json!({"text": "x"})).await?;
    client.post.post_bytes("{").await?;
    stand.fall(false).await?;
    client.come_back(Back::ByEndpoint).await?;
    client.text("echo", json!({"text": "y"})).await?;
    let mut shown = vec![stand.gateway.log()];
    ensure!(shown[0].contains("DEBUG"), "the log is not at its most talkative");
    for path in ["/api/v1/sessions", "/api/v1/status", "/api/v1/audit", "/metrics"] {
        let text = reqwest::Client::builder().no_proxy().build()?.get(stand.gateway.admin_url(path)?);
        shown.push(text.bearer_auth(stand.gateway.admin_token()?).send().await?.text().await?);
    }
    ensure!(shown.iter().all(|text| !text.contains(&secret)), "it is shown somewhere");
    let mut files = 0;
    for entry in walk(&stand.gateway.state_dir())? {
        let bytes = std::fs::read(&entry).unwrap_or_default();
        files += 1;
        ensure!(!bytes.windows(secret.len()).any(|window| window == secret.as_bytes()), "{}", entry.display());
    }
    ensure!(files > 2, "the search looked at nothing");
    // What the search would find.
    shown.push(format!("GET {}", client.endpoint));
    ensure!(shown.iter().any(|text| text.contains(&secret)));
    Ok(())
}

fn walk(folder: &std::path::Path) -> Result<Vec<std::path::PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(walk(&path)?);
        } else if path.is_file() {
            found.push(path);
        }
    }
    Ok(found)
}

/// A real SDK's client: list, call, progress; then what becomes of it when the worker dies.
async fn sdk(kind: SdkKind, server: &str) -> Result<(Stand, SdkClient)> {
    let stand = stand("").await?;
    let mut client = SdkClient::open(kind, &stand.url(server)?).await?;
    ensure!(client.list().await?.len() >= 8);
    ensure!(client.text("echo", json!({"text": "Grüße"})).await? == "Grüße");
    client.call_start("prog", json!({"n": 3, "delay_ms": 50}), "steps").await?;
    let done = client.done("steps", BOUND).await?;
    ensure!(done["ok"] == true, "{done}");
    let seen = client.notifications().await?;
    let progress = seen.iter().filter(|one| one["method"] == "notifications/progress").count();
    ensure!(progress == 3 || kind == SdkKind::Py1, "{seen:?}");
    Ok((stand, client))
}

#[tokio::test]
async fn s18_typescript_comes_back_by_itself_and_gets_the_answer_of_a_call_in_flight() -> Result<()> {
    for server in ["s", "h"] {
        let (mut stand, mut client) = sdk(SdkKind::Ts1, server).await?;
        client.call_start("slow", json!({"ms": 3000}), "long").await?;
        stand.runs(server, "slow").await?;
        // The answer to a later call: the first is confirmed by now, so that only its answer is owed.
        client.text("slow", json!({"ms": 400})).await?;
        stand.gateway.kill_worker().await?;
        let done = client.done("long", 2 * BOUND).await?;
        if server == "s" {
            ensure!(done["ok"] == true, "{done}\n{}", stand.gateway.log());
        } else {
            ensure!(done.to_string().contains("outcome_unknown"), "{done}");
        }
        ensure!(client.text("echo", json!({"text": "on"})).await? == "on", "{server}");
        let session = client.session().await?;
        ensure!(session.initializes == 1, "{server}: {session:?}");
        ensure!(stand.gateway.status().await?["sessions"]["stored"] == 1, "{server}");
        client.close().await?;
    }
    Ok(())
}

#[tokio::test]
async fn s18_python_is_served_and_told_when_its_stream_breaks() -> Result<()> {
    let (mut stand, mut client) = sdk(SdkKind::Py1, "s").await?;
    client.call_start("slow", json!({"ms": 60_000}), "long").await?;
    stand.runs("s", "slow").await?;
    stand.gateway.kill_worker().await?;
    // That client never opens its stream again: it fails its calls at once, and the program opens a new session.
    let done = client.done("long", BOUND).await?;
    ensure!(done["ok"] == false, "{done}");
    drop(client);
    let mut next = SdkClient::open(SdkKind::Py1, &stand.url("s")?).await?;
    ensure!(next.text("echo", json!({"text": "new"})).await? == "new");
    next.close().await?;
    Ok(())
}
