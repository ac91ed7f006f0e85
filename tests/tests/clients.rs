//! Real SDK clients over a dying worker and a forgetful server: one session, one `initialize`, no error.

use anyhow::{Context as _, Result, ensure};
use mainstay_tests::{Gateway, SdkClient, SdkKind, UpH, UpS};
use rmcp::ServiceExt as _;
use rmcp::model::CallToolRequestParams;
use rmcp::transport::StreamableHttpClientTransport;
use serde_json::json;

/// Call, kill the worker, three more calls; the same with the server behind it restarted.
async fn outlives(kind: SdkKind) -> Result<()> {
    let (mut up_h, up_s) = (UpH::start().await?, UpS::new(&[])?);
    let mut gateway = Gateway::start(&format!("{}{}", up_h.toml("h"), up_s.toml("s")?), &[]).await?;
    for server in ["h", "s"] {
        let mut client = SdkClient::open(kind, &gateway.url(server)?).await?;
        let before = client.session().await?;
        ensure!(client.text("echo", json!({"text": "before"})).await? == "before");
        gateway.kill_worker().await?;
        for round in ["one", "two", "three"] {
            ensure!(client.text("echo", json!({"text": round})).await? == round, "{server}: {round}");
        }
        if server == "h" {
            up_h.kill().await?;
            up_h.start_again().await?;
            for round in ["four", "five", "six"] {
                ensure!(client.text("echo", json!({"text": round})).await? == round, "{server}: {round}");
            }
        }
        let after = client.session().await?;
        ensure!(after.id == before.id && after.id.is_some(), "{server}: the same session id");
        ensure!(after.initializes == 1 && after.sessions == 1, "{server}: {after:?}");
        client.close().await?;
    }
    Ok(())
}

#[tokio::test]
async fn typescript_1_notices_nothing() -> Result<()> {
    outlives(SdkKind::Ts1).await
}

#[tokio::test]
async fn typescript_2_notices_nothing() -> Result<()> {
    outlives(SdkKind::Ts2).await
}

#[tokio::test]
async fn python_1_notices_nothing() -> Result<()> {
    outlives(SdkKind::Py1).await
}

#[tokio::test]
async fn python_2_notices_nothing() -> Result<()> {
    outlives(SdkKind::Py2).await
}

#[tokio::test]
async fn rmcp_notices_nothing() -> Result<()> {
    let (mut up_h, up_s) = (UpH::start().await?, UpS::new(&[])?);
    let mut gateway = Gateway::start(&format!("{}{}", up_h.toml("h"), up_s.toml("s")?), &[]).await?;
    for server in ["h", "s"] {
        let client = ().serve(StreamableHttpClientTransport::from_uri(gateway.url(server)?)).await?;
        let opened = gateway.status().await?["sessions"]["stored"].clone();
        let echo = async |text: &str| -> Result<()> {
            let arguments = json!({"text": text}).as_object().cloned().context("an object")?;
            let result = client.call_tool(CallToolRequestParams::new("echo").with_arguments(arguments)).await?;
            ensure!(serde_json::to_string(&result.content)?.contains(text), "{server}: {result:?}");
            Ok(())
        };
        echo("before").await?;
        gateway.kill_worker().await?;
        for round in ["one", "two", "three"] {
            echo(round).await.context(round)?;
        }
        if server == "h" {
            up_h.kill().await?;
            up_h.start_again().await?;
            for round in ["four", "five", "six"] {
                echo(round).await.context(round)?;
            }
        }
        // A client that had initialized again would have left a second session.
        ensure!(gateway.status().await?["sessions"]["stored"] == opened, "{server}: no other session was opened");
        client.cancel().await?;
    }
    Ok(())
}

/// A call in flight: the answer stream breaks with the worker, and the SDK resumes it by itself.
async fn resumes(kind: SdkKind) -> Result<()> {
    let up = UpS::new(&[])?;
    let mut gateway = Gateway::start(&up.toml("s")?, &[]).await?;
    let mut client = SdkClient::open(kind, &gateway.url("s")?).await?;
    client.call_start("slow", json!({"ms": 3000}), "long").await?;
    // The call must be on its way when the worker dies: its child has seen it.
    mainstay_tests::wait_until("the call is at the child", std::time::Duration::from_secs(20), async || {
        up.trace().is_ok_and(|trace| trace.iter().any(|line| line.to_string().contains("tools/call")))
    })
    .await?;
    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    gateway.kill_worker().await?;
    let done = client.done("long", std::time::Duration::from_secs(40)).await?;
    ensure!(done["ok"] == true, "{done}");
    let session = client.session().await?;
    ensure!(session.initializes == 1 && session.sessions == 1, "{session:?}");
    let calls = up.trace()?.iter().filter(|line| line.to_string().contains("tools/call")).count();
    ensure!(calls == 1, "the tool ran once, not {calls} times");
    client.close().await?;
    Ok(())
}

#[tokio::test]
async fn c8_typescript_1_gets_the_answer_of_a_call_in_flight() -> Result<()> {
    resumes(SdkKind::Ts1).await
}

#[tokio::test]
async fn c8_python_1_gets_the_answer_of_a_call_in_flight() -> Result<()> {
    resumes(SdkKind::Py1).await
}
