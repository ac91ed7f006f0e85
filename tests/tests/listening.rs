//! Who listens in conversations of the gateway's own with servers that keep sessions (2026-07-28, `subscriptions/listen`; E3,
//! E4).

use anyhow::{Context as _, Result, ensure};
use mainstay_tests::{Gateway, Incoming, StatelessClient, UpH, UpS, wait_until, within};
use serde_json::{Value, json};
use std::time::Duration;

const BOUND: Duration = Duration::from_secs(30);

struct Stand {
    up_h: UpH,
    up_s: UpS,
    gateway: Gateway,
}

impl Stand {
    async fn new() -> Result<Stand> {
        let up_h = UpH::start().await?;
        up_h.answer("sse-with-ids").await?;
        let up_s = UpS::new(&[])?;
        let offer = "offer = \"both\"\n";
        let config = format!("{}{offer}{}{offer}", up_h.toml("h"), up_s.toml("s")?);
        let gateway = Gateway::start(&config, &[]).await?;
        Ok(Stand { up_h, up_s, gateway })
    }

    fn client(&self, server: &str) -> Result<StatelessClient> {
        StatelessClient::new(&self.gateway.url(server)?)
    }
}

async fn whoami(client: &StatelessClient) -> Result<Value> {
    Ok(serde_json::from_str(&client.call("whoami", json!({})).await?)?)
}

/// Has the server say that its tools have changed until that is heard: it may not be listened to yet.
async fn hear_a_change(up_h: &UpH, listening: &mut Incoming) -> Result<Value> {
    let mut heard = None;
    wait_until("a change to be heard", BOUND, async || {
        if up_h.order("/list_changed", json!({})).await.is_ok()
            && let Ok(Ok(Some(message))) = tokio::time::timeout(PATIENCE, listening.next_message()).await
        {
            heard = Some(message);
        }
        heard.is_some()
    })
    .await?;
    heard.context("a change")
}

#[tokio::test]
async fn e3_several_listen_on_one_stream_of_the_server_and_each_hears_what_it_wants_once() -> Result<()> {
    let stand = Stand::new().await?;
    for server in ["h", "s"] {
        let client = stand.client(server)?;
        let all = json!({"notifications": {"toolsListChanged": true, "resourceSubscriptions": [RESOURCE]}});
        let message = client.message("subscriptions/listen", all);
        let mut first = client.send(&message).await?;
        let acknowledged = first.next_message().await?.context("an acknowledgement")?;
        assert_eq!(acknowledged["method"], "notifications/subscriptions/acknowledged");
        assert_eq!(
            acknowledged["params"]["notifications"]["resourceSubscriptions"],
            json!([RESOURCE]),
            "{acknowledged}"
        );
        assert_eq!(acknowledged["params"]["notifications"]["toolsListChanged"], true, "{acknowledged}");
        assert_eq!(acknowledged["params"]["_meta"][SUBSCRIPTION], message["id"]);
        let some = json!({"notifications": {"resourceSubscriptions": [RESOURCE]}});
        let mut second = client.begin("subscriptions/listen", some).await?;
        second.next_message().await?.context("an acknowledgement")?;

        if server == "h" {
            let heard = hear_a_change(&stand.up_h, &mut first).await?;
            assert_eq!(heard["method"], "notifications/tools/list_changed");
            assert_eq!(heard["params"]["_meta"][SUBSCRIPTION], message["id"]);
            assert_eq!(stand.up_h.requests("GET").await?.len(), 1, "one stream for both");
        }
        client.call("touch_resource", json!({})).await?;
        for listening in [&mut first, &mut second] {
            let heard = listening.until(|message| message["method"] == UPDATED).await?;
            assert_eq!(heard["params"]["uri"], RESOURCE);
        }
        // It is subscribed to until the last has gone, and then no longer.
        drop(first);
        client.call("touch_resource", json!({})).await?;
        assert_eq!(second.next_message().await?.context("an update")?["method"], UPDATED);
        drop(second);
        wait_until("the subscription to end", BOUND, async || {
            whoami(&client).await.is_ok_and(|me| me["subscriptions"].as_array().is_some_and(Vec::is_empty))
        })
        .await?;
    }
    Ok(())
}

#[tokio::test]
async fn e4_a_listened_stream_ends_in_order_and_who_comes_back_hears_that_all_may_have_changed() -> Result<()> {
    let mut stand = Stand::new().await?;
    let client = stand.client("s")?;
    let wishes = json!({"notifications": {"toolsListChanged": true, "resourceSubscriptions": [RESOURCE]}});
    let mut listening = client.begin("subscriptions/listen", wishes.clone()).await?;
    listening.next_message().await?.context("an acknowledgement")?;
    let before = stand.gateway.worker().await?;
    let config = format!("{}offer = \"both\"\npatience = \"9s\"\n", stand.up_s.toml("s")?);
    stand.gateway.rewrite_config(&config)?;
    let output = stand.gateway.cli(&["reload"]).await?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let last = listening.until(|message| message.get("method").is_none()).await?;
    assert_eq!(last["result"]["resultType"], "complete", "{last}");
    assert!(last["result"]["_meta"][SUBSCRIPTION].is_string(), "{last}");
    stand.gateway.next_worker(before).await?;
    // So does every other client of the conversation, which was not heard of before.
    let (mut listening, mut other) = (
        client.begin("subscriptions/listen", wishes.clone()).await?,
        client.begin("subscriptions/listen", wishes).await?,
    );
    for listening in [&mut listening, &mut other] {
        assert_eq!(heard(listening, 3).await?, [ACKNOWLEDGED, TOOLS_CHANGED, UPDATED]);
    }
    let (status, refused) = client.request("subscriptions/listen", json!({})).await?;
    assert_eq!((status, &refused["error"]["code"]), (400, &json!(-32602)), "{refused}");
    Ok(())
}

/// The methods of the next messages.
async fn heard(listening: &mut Incoming, count: usize) -> Result<Vec<String>> {
    let mut methods = Vec::new();
    for _ in 0..count {
        let message = within("a message", BOUND, listening.next_message()).await?.context("a message")?;
        methods.push(message["method"].as_str().context("a method")?.to_owned());
    }
    Ok(methods)
}

#[tokio::test]
async fn e4_who_comes_to_listen_is_told_once_what_others_have_heard() -> Result<()> {
    let stand = Stand::new().await?;
    let client = stand.client("h")?;
    let wishes = json!({"notifications": {"toolsListChanged": true, "promptsListChanged": true}});
    let mut first = client.begin("subscriptions/listen", wishes.clone()).await?;
    first.next_message().await?.context("an acknowledgement")?;
    hear_a_change(&stand.up_h, &mut first).await?;
    let prompts = "notifications/prompts/list_changed";
    let mut second = client.begin("subscriptions/listen", wishes.clone()).await?;
    assert_eq!(heard(&mut second, 2).await?, [ACKNOWLEDGED, TOOLS_CHANGED]);
    // What is no change is nothing to be told later.
    for (method, params) in [("notifications/message", json!({"level": "error"})), (prompts, json!({}))] {
        stand.up_h.order("/notify", json!({"method": method, "params": params})).await?;
    }
    assert_eq!(heard(&mut second, 1).await?, [prompts]);
    let mut third = client.begin("subscriptions/listen", wishes).await?;
    assert_eq!(heard(&mut third, 3).await?, [ACKNOWLEDGED, TOOLS_CHANGED, prompts]);
    Ok(())
}

#[tokio::test]
async fn e4_who_comes_back_after_a_suspension_hears_that_all_may_have_changed() -> Result<()> {
    let up_h = UpH::start().await?;
    let config = format!("[session]\nsuspend_after = \"1s\"\n{}offer = \"both\"\n", up_h.toml("h"));
    let gateway = Gateway::start(&config, &[]).await?;
    let client = StatelessClient::new(&gateway.url("h")?)?;
    let wishes = json!({"notifications": {"toolsListChanged": true}});
    let mut listening = client.begin("subscriptions/listen", wishes.clone()).await?;
    assert_eq!(heard(&mut listening, 1).await?, [ACKNOWLEDGED]);
    drop(listening);
    wait_until("it is suspended", BOUND, async || {
        gateway.status().await.is_ok_and(|status| status["sessions"]["live"] == 0)
    })
    .await?;
    let mut listening = client.begin("subscriptions/listen", wishes).await?;
    assert_eq!(heard(&mut listening, 2).await?, [ACKNOWLEDGED, TOOLS_CHANGED]);
    Ok(())
}

/// Listens for the resource, until that is acknowledged.
async fn listen_for_it(client: &StatelessClient) -> Result<Incoming> {
    let wishes = json!({"notifications": {"resourceSubscriptions": [RESOURCE]}});
    let mut listening = client.begin("subscriptions/listen", wishes).await?;
    let first = within("an acknowledgement", BOUND, listening.next_message()).await?.context("an acknowledgement")?;
    ensure!(first["params"]["notifications"]["resourceSubscriptions"] == json!([RESOURCE]), "{first}");
    Ok(listening)
}

/// What the server knows to be subscribed to in this conversation.
async fn subscriptions(client: &StatelessClient) -> Result<Value> {
    Ok(whoami(client).await?["subscriptions"].clone())
}

async fn until_nothing_is_subscribed_to(client: &StatelessClient) -> Result<()> {
    wait_until("the subscription to end", BOUND, async || {
        subscriptions(client).await.is_ok_and(|subscriptions| subscriptions == json!([]))
    })
    .await
}

#[tokio::test]
async fn e3_who_hangs_up_while_it_is_being_subscribed_leaves_no_subscription_behind() -> Result<()> {
    let stand = Stand::new().await?;
    let client = std::sync::Arc::new(stand.client("h")?);
    whoami(&client).await?;
    stand.up_h.gap(json!({"kind": "answer_late", "ms": 1000, "method": "resources/subscribe"})).await?;
    let listening = std::sync::Arc::clone(&client);
    let listening = tokio::spawn(async move { listen_for_it(&listening).await });
    wait_until("the server to be asked", BOUND, async || {
        stand.up_h.requests("resources/subscribe").await.is_ok_and(|asked| asked.len() == 1)
    })
    .await?;
    listening.abort();
    wait_until("the subscription to be taken back", BOUND, async || {
        stand.up_h.requests("resources/unsubscribe").await.is_ok_and(|asked| asked.len() == 1)
    })
    .await?;
    until_nothing_is_subscribed_to(&client).await
}

#[tokio::test]
async fn e3_what_an_earlier_worker_has_subscribed_to_is_taken_back_unless_somebody_listens() -> Result<()> {
    let mut stand = Stand::new().await?;
    let (program, http) = (stand.client("s")?, stand.client("h")?);
    let _gone = (listen_for_it(&program).await?, listen_for_it(&http).await?);
    stand.gateway.kill_worker().await?;
    let mut again = listen_for_it(&http).await?;
    assert_eq!(heard(&mut again, 1).await?, [UPDATED], "nobody knows what it has missed");
    assert_eq!(subscriptions(&program).await?, json!([RESOURCE]), "it outlives the worker");
    until_nothing_is_subscribed_to(&program).await?;
    assert_eq!(stand.up_h.requests("resources/unsubscribe").await?.len(), 0, "somebody listens");
    drop(again);
    until_nothing_is_subscribed_to(&http).await
}

#[tokio::test]
async fn u4_who_listens_hears_that_resources_may_have_changed_once_their_servers_session_was_lost() -> Result<()> {
    let stand = Stand::new().await?;
    let client = stand.client("h")?;
    let mut listening = listen_for_it(&client).await?;
    stand.up_h.forget().await?;
    whoami(&client).await?;
    assert_eq!(heard(&mut listening, 1).await?, [UPDATED]);
    assert_eq!(subscriptions(&client).await?, json!([RESOURCE]));
    Ok(())
}

#[tokio::test]
async fn e4_who_listens_for_what_nobody_listened_for_meanwhile_hears_that_it_may_have_changed() -> Result<()> {
    let stand = Stand::new().await?;
    let client = stand.client("h")?;
    drop(listen_for_it(&client).await?);
    until_nothing_is_subscribed_to(&client).await?;
    let mut again = listen_for_it(&client).await?;
    assert_eq!(heard(&mut again, 1).await?, [UPDATED]);
    Ok(())
}

const SUBSCRIPTION: &str = "io.modelcontextprotocol/subscriptionId";
const ACKNOWLEDGED: &str = "notifications/subscriptions/acknowledged";
const TOOLS_CHANGED: &str = "notifications/tools/list_changed";
const UPDATED: &str = "notifications/resources/updated";
const RESOURCE: &str = "test://static";
/// How long a change that was said may take before it is said again.
const PATIENCE: Duration = Duration::from_secs(1);
