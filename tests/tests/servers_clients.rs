//! Real SDKs against UP-H without a gateway: what a client does by itself is known before a gateway stands between.
//!
//! Needs the environment that `scripts/test-env` installs.

use anyhow::{Context as _, Result};
use mainstay_tests::{SdkClient, SdkKind, UpH};
use serde_json::{Value, json};
use std::time::Duration;

const BOUND: Duration = Duration::from_secs(30);

#[tokio::test]
async fn every_sdk_speaks_to_up_h_in_one_session() -> Result<()> {
    for kind in SdkKind::ALL {
        let up = UpH::start().await?;
        up.answer("sse-with-ids").await?;
        let mut client = SdkClient::open(kind, &up.url()).await?;
        assert_eq!(client.text("echo", json!({"text": "hello"})).await?, "hello", "{kind:?}");
        let facts: Value = serde_json::from_str(&client.text("whoami", json!({})).await?)?;
        let session = client.session().await?;
        assert_eq!(session.id.as_deref(), facts["session"].as_str(), "{kind:?}");
        assert_eq!((session.initializes, session.sessions), (1, 1), "{kind:?}");
        assert!(client.list().await?.contains(&"touch_resource".to_owned()), "{kind:?}");
        client.elicit(json!({"action": "accept", "content": {"answer": "yes"}})).await?;
        assert!(client.text("ask", json!({"message": "?"})).await?.contains("yes"), "{kind:?}");
        client.close().await?;
    }
    Ok(())
}

#[tokio::test]
async fn ac12_every_sdk_carries_a_numbered_call_over_a_cut() -> Result<()> {
    for kind in SdkKind::ALL {
        let up = UpH::start().await?;
        up.answer("sse-with-ids").await?;
        let mut client = SdkClient::open(kind, &up.url()).await?;
        up.gap(json!({"kind": "cut_sse", "events": 1, "tool": "prog"})).await?;
        client.call_start("prog", json!({"n": 3, "delay_ms": 100}), "long").await?;
        assert_eq!(client.text("echo", json!({"text": "meanwhile"})).await?, "meanwhile", "{kind:?}");
        let answer = client.done("long", BOUND).await.with_context(|| format!("{kind:?}"))?;
        assert_eq!(answer["text"], "3 steps done", "{kind:?}: {answer}");
        assert_eq!(up.executions("prog").await?, 1, "{kind:?}");
        let progress = client.notifications().await?;
        let seen = progress.iter().filter(|event| event["method"] == "notifications/progress").count();
        assert_eq!(seen, 3, "{kind:?}: {progress:?}");
        client.close().await?;
    }
    Ok(())
}

#[tokio::test]
async fn an_sdk_that_is_told_404_keeps_failing() -> Result<()> {
    let up = UpH::start().await?;
    let mut client = SdkClient::open(SdkKind::Ts1, &up.url()).await?;
    up.forget().await?;
    for _ in 0..2 {
        let answer = client.call("echo", json!({"text": "lost"})).await?;
        assert_eq!(answer["ok"], false, "{answer}");
    }
    assert_eq!(client.session().await?.initializes, 1, "it never initializes again");
    Ok(())
}

#[tokio::test]
async fn the_rust_sdk_speaks_to_up_h() -> Result<()> {
    use rmcp::ServiceExt as _;
    use rmcp::model::CallToolRequestParams;
    use rmcp::transport::StreamableHttpClientTransport;

    let up = UpH::start().await?;
    let client = ().serve(StreamableHttpClientTransport::from_uri(up.url())).await?;
    let result = client.call_tool(CallToolRequestParams::new("read")).await?;
    assert_eq!(serde_json::to_value(&result)?["content"][0]["text"], "read");
    client.cancel().await?;
    assert_eq!(up.count("/initializes").await?, 1);
    Ok(())
}
