//! Both generations in all four pairs, over HTTP and stdio, by clients on the newest SDKs: each finds every server as one of
//! its own (E1, E3).

use anyhow::{Context as _, Result, ensure};
use mainstay_tests::{Gateway, SdkClient, SdkKind, UpH, UpM, UpP, UpS, wait_until};
use serde_json::{Value, json};
use std::time::Duration;

/// A server of each kind behind one gateway.
struct Stand {
    modern_http: UpM,
    gateway: Gateway,
    _others: (UpH, UpS, UpP),
}

/// One of the servers, and how its tools are called.
struct Server {
    name: &'static str,
    progress: (&'static str, Value),
    ask: Value,
    /// The tool by whose call it says that something has changed; `None` for the one that is told to by the test.
    change: Option<&'static str>,
    changed: &'static str,
}

impl Stand {
    async fn new() -> Result<Stand> {
        let legacy_http = UpH::start().await?;
        legacy_http.answer("sse-with-ids").await?;
        let (legacy_program, modern_http, modern_program) = (UpS::new(&[])?, UpM::start().await?, UpP::new(&[])?);
        let both = "offer = \"both\"\n";
        let config = format!(
            "{}{both}{}{both}{}{both}{}{both}",
            legacy_http.toml("legacy-http"),
            legacy_program.toml("legacy-program")?,
            modern_http.toml("modern-http"),
            modern_program.toml("modern-program")?
        );
        let gateway = Gateway::start(&config, &[]).await?;
        Ok(Stand { modern_http, gateway, _others: (legacy_http, legacy_program, modern_program) })
    }

    fn servers() -> [Server; 4] {
        let legacy = |name| Server {
            name,
            progress: ("prog", json!({"n": 3, "delay_ms": 20})),
            ask: json!({"message": "sure?", "timeout_ms": 600_000}),
            change: Some("touch_resource"),
            changed: UPDATED,
        };
        let modern =
            |name, change, changed| Server { name, progress: ("steps", json!({})), ask: json!({}), change, changed };
        [
            legacy("legacy-http"),
            legacy("legacy-program"),
            modern("modern-http", None, UPDATED),
            modern("modern-program", Some("change"), "notifications/tools/list_changed"),
        ]
    }

    /// Everything that a program does with a server, by a client on one of the SDKs.
    async fn run(&self, kind: SdkKind, server: &Server) -> Result<()> {
        let mut client = SdkClient::open(kind, &self.gateway.url(server.name)?).await?;
        let is_modern = matches!(kind, SdkKind::Ts2Modern | SdkKind::Py2Modern);
        let (initializes, session) = client.session().await.map(|seen| (seen.initializes, seen.id))?;
        ensure!((initializes, session.is_none()) == if is_modern { (0, true) } else { (1, false) }, "another era");

        ensure!(client.list().await?.contains(&"echo".to_owned()), "no tool is listed");
        ensure!(client.text("echo", json!({"text": "a\u{fc}"})).await? == "a\u{fc}");

        let (tool, arguments) = &server.progress;
        client.call_start(tool, arguments.clone(), "p").await?;
        let done = client.done("p", BOUND).await?;
        ensure!(done["text"].as_str().is_some_and(|text| text.starts_with("3 steps")), "{done}");
        let told = client.progress().await?;
        ensure!(told == [1.0, 2.0, 3.0], "progress: {told:?}");

        client.elicit(json!({"action": "accept", "content": {"answer": "forty-two"}})).await?;
        let text = client.text("ask", server.ask.clone()).await?;
        ensure!(text.contains("forty-two"), "the answer did not arrive: {text}");

        client.listen(RESOURCE).await?;
        let mut heard = Vec::new();
        // It may be said before the gateway listens, and is said again then.
        wait_until("a change to be heard", BOUND, async || {
            let said = match server.change {
                Some(tool) => client.text(tool, json!({})).await.is_ok(),
                None => {
                    self.modern_http.say(UPDATED, &json!({"uri": RESOURCE}));
                    true
                }
            };
            tokio::time::sleep(PAUSE).await;
            heard = client.notifications().await.unwrap_or_default();
            said && heard.iter().any(|notification| notification["method"] == server.changed)
        })
        .await
        .with_context(|| format!("{heard:?}"))?;
        client.close().await?;
        Ok(())
    }
}

#[tokio::test]
async fn e1_e3_sdk_clients_of_both_eras_find_every_server_as_one_of_their_own() -> Result<()> {
    let stand = Stand::new().await?;
    let stand = &stand;
    let mut failed = Vec::new();
    for kind in [SdkKind::Ts2, SdkKind::Ts2Modern, SdkKind::Py2, SdkKind::Py2Modern] {
        let cells = Stand::servers().map(|server| async move {
            let ended = stand.run(kind, &server).await;
            ended.err().map(|error| format!("{kind:?} at {}: {error:#}", server.name))
        });
        failed.extend(futures_util::future::join_all(cells).await.into_iter().flatten());
    }
    ensure!(failed.is_empty(), "{}", failed.join("\n"));
    let unheard = ["resources/subscribe", "notifications/initialized", "notifications/cancelled"];
    assert_eq!(
        unheard.map(|method| stand.modern_http.count(method)),
        [0; 3],
        "a server of 2026-07-28 hears its own era"
    );
    Ok(())
}

const RESOURCE: &str = "test://static";
const UPDATED: &str = "notifications/resources/updated";
const BOUND: Duration = Duration::from_secs(30);
/// Between a change that is said and the look for it.
const PAUSE: Duration = Duration::from_millis(50);
