//! Upgrade and reload: one worker gives way to the next, and nobody notices more than a pause (T1–T4).

use anyhow::{Context as _, Result, ensure};
use mainstay_tests::{Gateway, Proc, RawClient, SdkClient, SdkKind, Setup, UpH, UpS, wait_until, write_program};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::task::JoinSet;

const VERSION: &str = "2025-11-25";
const BOUND: Duration = Duration::from_secs(30);

struct Stand {
    up_h: UpH,
    up_s: UpS,
    config: String,
}

impl Stand {
    async fn new() -> Result<Stand> {
        let up_h = UpH::start().await?;
        let up_s = UpS::new(&[])?;
        let config = format!("{}{}", up_h.toml("h"), up_s.toml("s")?);
        Ok(Stand { up_h, up_s, config })
    }
}

async fn whoami(client: &RawClient) -> Result<Value> {
    client.call_through("whoami", json!({})).await?.json()
}

async fn ordered(gateway: &Gateway, order: &str) -> Result<String> {
    let output = gateway.cli(&[order]).await?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "`{order}`: {complaint}\n{}", gateway.log());
    Ok(said)
}

/// Clients that call all the time, each on its own kept-alive connection.
struct Load {
    stop: Arc<AtomicBool>,
    calls: Arc<AtomicU64>,
    clients: JoinSet<Result<u64>>,
}

impl Load {
    async fn start(gateway: &Gateway, clients: usize) -> Result<Load> {
        let (stop, calls) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let mut tasks = JoinSet::new();
        for number in 0..clients {
            let client = RawClient::open(&gateway.url(["h", "s"][number % 2])?, VERSION).await?;
            let (stop, calls) = (Arc::clone(&stop), Arc::clone(&calls));
            tasks.spawn(async move {
                let mut made = 0;
                while !stop.load(Ordering::Relaxed) {
                    let text = format!("client {number} call {made}");
                    let (tool, arguments) = match made % 50 {
                        25 => ("slow", json!({"ms": 60})),
                        _ => ("echo", json!({"text": text})),
                    };
                    let outcome = client.call_through(tool, arguments).await.with_context(|| text.clone())?;
                    let answer = outcome.text().with_context(|| format!("{text}: {outcome:?}"))?;
                    ensure!(tool == "slow" || answer.contains(&text), "{text} was answered with {answer}");
                    made += 1;
                    calls.fetch_add(1, Ordering::Relaxed);
                }
                Ok(made)
            });
        }
        Ok(Load { stop, calls, clients: tasks })
    }

    /// Waits until each client has, on the average, made some more calls.
    async fn go_on(&self) -> Result<()> {
        let from = self.calls.load(Ordering::Relaxed);
        let enough = 20 * u64::try_from(self.clients.len())?;
        wait_until("calls go on", BOUND, async || self.calls.load(Ordering::Relaxed) >= from + enough).await
    }

    /// How many calls were made in all, if none failed.
    async fn end(mut self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        let mut calls = 0;
        while let Some(ended) = self.clients.join_next().await {
            calls += ended??;
        }
        Ok(calls)
    }
}

#[tokio::test]
async fn t4_reload_puts_a_new_configuration_in_force_and_no_call_fails() -> Result<()> {
    let stand = Stand::new().await?;
    let mut gateway = Gateway::start(&stand.config, &[]).await?;
    let (h, s) =
        (RawClient::open(&gateway.url("h")?, VERSION).await?, RawClient::open(&gateway.url("s")?, VERSION).await?);
    let (h_before, s_before) = (whoami(&h).await?, whoami(&s).await?);
    let load = Load::start(&gateway, 8).await?;
    load.go_on().await?;
    let first = gateway.worker().await?;
    let mut config = stand.config.clone();
    for round in 0..5 {
        let another = UpH::start().await?;
        config = format!("{}{}[session]\ndrain_grace = \"{round}s\"\n", stand.config, another.toml("later"));
        gateway.rewrite_config(&config)?;
        let said = ordered(&gateway, "reload").await?;
        assert!(said.contains("new configuration"), "{said}");
        load.go_on().await?;
        let later = RawClient::open(&gateway.url("later")?, VERSION).await?;
        assert!(whoami(&later).await?["session"].is_string(), "the new server serves");
    }
    let calls = load.end().await?;
    let last = gateway.worker().await?;
    assert!(last.number >= first.number + 5 && last.pid != first.pid, "{calls} calls");
    let (h_after, s_after) = (whoami(&h).await?, whoami(&s).await?);
    assert_eq!(h_after["session"], h_before["session"], "T2: the same upstream session");
    assert_eq!((&s_after["pid"], &s_after["calls"]), (&s_before["pid"], &json!(2)), "T2: the same child");
    // Whatever is the same once more is not put in force once more.
    assert!(ordered(&gateway, "reload").await?.contains("nothing has changed"));
    gateway.rewrite_config(&config)?;
    assert_eq!(gateway.worker().await?, last);
    gateway.stop().await?;
    gateway.assert_no_orphans().await
}

#[tokio::test]
async fn t4_a_wrong_file_changes_nothing_and_says_why() -> Result<()> {
    let stand = Stand::new().await?;
    let mut gateway = Gateway::start(&stand.config, &[]).await?;
    let client = RawClient::open(&gateway.url("s")?, VERSION).await?;
    let before = (whoami(&client).await?["pid"].clone(), gateway.worker().await?);
    let wrong = [
        ("[servers.s]\ncomand = \"x\"\n".to_owned(), "command"),
        (format!("{}\n[session]\nidle_expiry = \"soon\"\n", stand.config), "idle_expiry"),
        (format!("state_dir = \"/nowhere\"\nstore = \"memory\"\n{}", stand.config), "store"),
        ("not toml at all".to_owned(), "error"),
    ];
    for (config, named) in wrong {
        gateway.rewrite_config(&config)?;
        let output = gateway.cli(&["reload"]).await?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(named), "{config}: {said}");
        assert_eq!((whoami(&client).await?["pid"].clone(), gateway.worker().await?), before, "{config}");
    }
    gateway.rewrite_config(&stand.config)?;
    assert!(ordered(&gateway, "reload").await?.contains("nothing has changed"));
    Ok(())
}

/// A table of `server` with a variable of that value.
fn with_setting(server: &UpS, name: &str, value: &str) -> Result<String> {
    let head = format!("[servers.{name}]\n");
    Ok(server.toml(name)?.replace(&head, &format!("{head}env = {{ SETTING = \"{value}\" }}\n")))
}

#[tokio::test]
async fn t4_what_has_changed_is_started_anew_and_what_is_gone_ends_with_its_reason() -> Result<()> {
    let stand = Stand::new().await?;
    let (kept, changed) = (UpS::new(&[])?, UpS::new(&[])?);
    // The value of a variable is all that will be another.
    let config = |value: &str| -> Result<String> {
        Ok(format!("{}{}", kept.toml("kept")?, with_setting(&changed, "changed", value)?))
    };
    let first = format!("{}{}", config("canary-one")?, stand.up_h.toml("gone"));
    let mut gateway = Gateway::start(&first, &[]).await?;
    let open = async |server: &str| RawClient::open(&gateway.url(server)?, VERSION).await;
    let (kept_client, changed_client, gone) = (open("kept").await?, open("changed").await?, open("gone").await?);
    let (kept_before, changed_before) = (whoami(&kept_client).await?, whoami(&changed_client).await?);
    whoami(&gone).await?;
    let old = u32::try_from(changed_before["pid"].as_u64().context("a pid")?)?;
    let old = Proc::of(old).context("the old child lives")?;
    gateway.rewrite_config(&config("canary-two")?)?;
    let worker = gateway.worker().await?;
    let announced = String::from_utf8(gateway.cli(&["reload", "--dry-run"]).await?.stdout)?;
    assert_eq!(gateway.worker().await?, worker, "nothing was done");
    assert!(gateway.status().await?["handover"].is_null(), "nor tried");
    let said = ordered(&gateway, "reload").await?;
    for told in [announced, said] {
        assert!(told.contains("`changed` is defined anew (env.SETTING changed)"), "{told}");
        assert!(
            told.contains("anew for its 1 sessions") && told.contains("`gone` is gone; its 1 sessions end"),
            "{told}"
        );
        assert!(!told.contains("kept") && !told.contains("canary"), "{told}");
    }
    // AC-06 (3): the old tree is gone within 10 s, whether anybody asks for the session or not.
    wait_until("the old child is gone", Duration::from_secs(10), async || !old.is_alive()).await?;
    let after = whoami(&changed_client).await?;
    assert_ne!(after["pid"], changed_before["pid"]);
    assert_eq!(changed.starts()?.len(), 2, "exactly one new");
    let mut view = Value::Null;
    wait_until("its end is told with its reason", BOUND, async || {
        view = gateway.admin_get("/api/v1/servers/changed").await.map(|(_, view)| view).unwrap_or_default();
        view["exits"][0]["reason"] == "definition changed"
    })
    .await
    .with_context(|| view.to_string())?;
    assert_eq!(whoami(&kept_client).await?["pid"], kept_before["pid"], "who has not changed has not noticed");
    // U7: nothing is left at the server that is gone, and its session has ended with a reason.
    wait_until("the upstream session is deleted", BOUND, async || {
        stand.up_h.count("/deletes").await.is_ok_and(|count| count == 1)
    })
    .await?;
    let (_, listed) = gateway.admin_get("/api/v1/sessions?state=closed").await?;
    let reason = &listed["sessions"][0]["reason"];
    assert_eq!(*reason, "server removed: `gone` is no longer configured", "{listed}");
    assert!(!gateway.log().contains("canary"), "I6: no value is in the log");
    let again = String::from_utf8(gateway.cli(&["reload", "--dry-run"]).await?.stdout)?;
    assert!(again.contains("would change nothing"), "{again}");
    Ok(())
}

#[tokio::test]
async fn t4_a_call_in_flight_on_a_server_that_is_defined_anew_is_answered_before_its_process_ends() -> Result<()> {
    let up = UpS::new(&[])?;
    let config = |value: &str| -> Result<String> {
        Ok(format!("{}[session]\ndrain_grace = \"20s\"\n", with_setting(&up, "s", value)?))
    };
    let mut gateway = Gateway::start(&config("one")?, &[]).await?;
    let client = RawClient::open(&gateway.url("s")?, VERSION).await?;
    let before = whoami(&client).await?;
    let slow = client.message("tools/call", json!({"name": "slow", "arguments": {"ms": 3000}}));
    let exchange = client.post(&slow).await?;
    assert!(exchange.is_sse(), "it has a stream to come back to");
    gateway.rewrite_config(&config("two")?)?;
    ordered(&gateway, "reload").await?;
    // A worker that is killed meanwhile leaves that to the next.
    gateway.kill_worker().await?;
    let answered = client.follow(exchange).await?;
    assert!(answered.result().is_ok(), "by the process that it was sent to: {answered:?}");
    let after = whoami(&client).await?;
    assert_ne!(after["pid"], before["pid"], "new calls go to the new definition");
    assert_eq!(up.starts()?.len(), 2);
    gateway.stop().await?;
    gateway.assert_no_orphans().await
}

#[tokio::test]
async fn t4_a_watched_file_is_put_in_force_and_a_wrong_one_is_not() -> Result<()> {
    let stand = Stand::new().await?;
    let watched = format!("watch = true\n{}", stand.config);
    let mut gateway = Gateway::start(&watched, &[]).await?;
    let client = RawClient::open(&gateway.url("s")?, VERSION).await?;
    let before = whoami(&client).await?;
    gateway.rewrite_config("nonsense")?;
    wait_until("the wrong file is told of", BOUND, async || gateway.log().contains("is not put in force")).await?;
    let first = gateway.worker().await?;
    let another = UpH::start().await?;
    gateway.rewrite_config(&format!("{watched}{}", another.toml("later")))?;
    let later = gateway.url("later")?;
    wait_until("the new server is served", BOUND, async || RawClient::open(&later, VERSION).await.is_ok()).await?;
    assert!(gateway.worker().await?.number > first.number);
    assert_eq!(whoami(&client).await?["pid"], before["pid"]);
    Ok(())
}

#[tokio::test]
async fn c8_t3_a_call_in_flight_and_a_listening_stream_go_on_over_a_reload() -> Result<()> {
    let stand = Stand::new().await?;
    let mut gateway = Gateway::start(&stand.config, &[]).await?;
    let (h, s) =
        (RawClient::open(&gateway.url("h")?, VERSION).await?, RawClient::open(&gateway.url("s")?, VERSION).await?);
    let mut listening = s.get_stream(None).await?;
    let primed = listening.next_event(BOUND).await?.context("primed")?;
    assert!(primed.retry_ms.is_some_and(|retry| retry > 0), "{primed:?}");
    let calls = [(&h, "slow"), (&s, "slow")]
        .map(|(client, tool)| client.message("tools/call", json!({"name": tool, "arguments": {"ms": 4000}})));
    let (on_h, on_s) = (h.post(&calls[0]).await?, s.post(&calls[1]).await?);
    assert!(on_h.is_sse() && on_s.is_sse(), "both have a stream to come back to");
    gateway.rewrite_config(&format!("{}[session]\ndrain_grace = \"1s\"\n", stand.config))?;
    ordered(&gateway, "reload").await?;
    let on_s = s.follow(on_s).await?;
    assert!(on_s.result().is_ok(), "the child's answer, taken up at the next worker: {on_s:?}");
    let on_h = on_h.finish(BOUND).await?;
    assert!(on_h.result().is_ok(), "the worker that gave way stayed for it: {on_h:?}");
    assert_eq!(stand.up_h.executions("slow").await?, 1);
    let ended = listening.next_event(BOUND).await?;
    assert!(ended.is_none(), "T3: it ends, {ended:?}");
    let again = s.get_stream(primed.id.as_deref()).await?;
    assert_eq!(again.status, 200, "T3: and goes on under the next worker");
    gateway.stop().await?;
    gateway.assert_no_orphans().await
}

#[tokio::test]
async fn t2_a_call_on_an_http_server_whose_client_is_away_is_not_given_up_by_a_reload() -> Result<()> {
    let stand = Stand::new().await?;
    let mut gateway = Gateway::start(&stand.config, &[]).await?;
    let client = RawClient::open(&gateway.url("h")?, VERSION).await?;
    let call = client.message("tools/call", json!({"name": "slow", "arguments": {"ms": 3000}}));
    let mut exchange = client.post(&call).await?;
    let primed = exchange.next_event(BOUND).await?.context("primed")?;
    drop(exchange);
    let leaving = gateway.worker().await?;
    gateway.rewrite_config(&format!("{}[session]\ndrain_grace = \"1s\"\n", stand.config))?;
    ordered(&gateway, "reload").await?;
    let leaving = Proc::of(leaving.pid);
    wait_until("the former worker has seen the call to its end", BOUND, async || {
        leaving.is_none_or(|leaving| !leaving.is_alive())
    })
    .await?;
    let outcome = client.get_stream(primed.id.as_deref()).await?.finish(BOUND).await?;
    assert!(outcome.result().is_ok(), "{outcome:?}");
    assert_eq!(stand.up_h.executions("slow").await?, 1);
    Ok(())
}

#[tokio::test]
async fn t2_the_unmodified_sdk_clients_carry_a_slow_call_through_a_reload() -> Result<()> {
    let stand = Stand::new().await?;
    let mut gateway = Gateway::start(&stand.config, &[]).await?;
    let mut clients = Vec::new();
    for (kind, server) in [(SdkKind::Ts1, "s"), (SdkKind::Ts1, "h"), (SdkKind::Py1, "s"), (SdkKind::Py1, "h")] {
        let mut client = SdkClient::open(kind, &gateway.url(server)?).await?;
        client.call_start("slow", json!({"ms": 3000}), "slow").await?;
        clients.push((kind, server, client));
    }
    wait_until("the calls run", BOUND, async || {
        stand.up_h.executions("slow").await.is_ok_and(|executions| executions == 2)
    })
    .await?;
    gateway.rewrite_config(&format!("{}[session]\ndrain_grace = \"1s\"\n", stand.config))?;
    ordered(&gateway, "reload").await?;
    for (kind, server, mut client) in clients {
        let done = client.done("slow", BOUND).await?;
        assert!(!done.to_string().contains("error"), "{} on {server}: {done}", kind.name());
        let text = client.text("echo", json!({"text": "afterwards"})).await?;
        assert!(text.contains("afterwards"), "{} on {server}", kind.name());
    }
    assert_eq!(stand.up_h.executions("slow").await?, 2, "each ran once");
    assert_eq!(stand.up_s.starts()?.len(), 2, "a child for each session, and no other");
    Ok(())
}

#[tokio::test]
async fn t1_t2_a_connection_on_which_nothing_was_said_yet_is_answered_after_the_handover() -> Result<()> {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let stand = Stand::new().await?;
    let gateway = &mut Gateway::start(&stand.config, &[]).await?;
    let client = RawClient::open(&gateway.url("s")?, VERSION).await?;
    let address = gateway.mcp_address()?;
    let (mut silent, mut begun) =
        (tokio::net::TcpStream::connect(address).await?, tokio::net::TcpStream::connect(address).await?);
    let (session, body) =
        (client.session.as_deref().context("a session")?, client.message("ping", Value::Null).to_string());
    let (head, rest) = (
        "POST /mcp/s HTTP/1.1\r\nHo",
        format!(
            "st: 127.0.0.1\r\nContent-Type: application/json\r\nAccept: application/json, text/event-stream\r\n\
             Mcp-Session-Id: {session}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        ),
    );
    begun.write_all(head.as_bytes()).await?;
    // Whoever is answered was accepted later than these two.
    whoami(&client.with_fresh_connections()?).await?;
    gateway.rewrite_config(&format!("{}[session]\ndrain_grace = \"1s\"\n", stand.config))?;
    ordered(gateway, "reload").await?;
    silent.write_all(head.as_bytes()).await?;
    for (name, mut stream) in [("silent", silent), ("begun", begun)] {
        stream.write_all(rest.as_bytes()).await?;
        let mut answer = String::new();
        tokio::time::timeout(BOUND, stream.read_to_string(&mut answer)).await?.context(name)?;
        assert!(answer.starts_with("HTTP/1.1 200"), "{name}: {answer:?}");
    }
    Ok(())
}

/// A copy of the gateway's binary that an upgrade replaces.
fn install(dir: &Path) -> Result<PathBuf> {
    let program = dir.join("mainstay");
    write_program(&program, &std::fs::read(mainstay_tests::mainstay()?)?)?;
    Ok(program)
}

/// The program as another build of its version: the linker's id of it is all that differs.
fn another_build(number: u8) -> Result<Vec<u8>> {
    let mut program = std::fs::read(mainstay_tests::mainstay()?)?;
    let note = b"\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0";
    let at = program.windows(note.len()).position(|window| window == note).context("no build id")? + note.len();
    program[at] = program[at].wrapping_add(number + 1);
    Ok(program)
}

fn inode(path: impl AsRef<Path>) -> Result<u64> {
    use std::os::unix::fs::MetadataExt as _;
    Ok(std::fs::metadata(path)?.ino())
}

#[tokio::test]
async fn t1_t2_an_upgrade_under_load_fails_no_call_and_keeps_children_and_upstream_sessions() -> Result<()> {
    let stand = Stand::new().await?;
    let dir = tempfile::tempdir()?;
    let program = install(dir.path())?;
    let mut gateway = Setup::new(&stand.config).binary(&program).start().await?;
    let (h, s) =
        (RawClient::open(&gateway.url("h")?, VERSION).await?, RawClient::open(&gateway.url("s")?, VERSION).await?);
    let (h_before, s_before) = (whoami(&h).await?, whoami(&s).await?);
    let keeper = gateway.keeper_pid()?;
    let load = Load::start(&gateway, 8).await?;
    for round in 0..3 {
        load.go_on().await?;
        let open_before = Proc::of(keeper).context("the keeper")?.open_files();
        let (next, build) = (another_build(round)?, gateway.status().await?["version"].clone());
        write_program(&program, &next)?;
        let installed = inode(&program)?;
        assert_ne!(inode(format!("/proc/{keeper}/exe"))?, installed);
        let said = ordered(&gateway, "upgrade").await?;
        let status = gateway.status().await?;
        let builds = [&build, &status["version"]].map(|build| build.as_str().unwrap_or_default());
        assert_ne!(builds[0], builds[1], "two builds of one version");
        assert!(said.contains(&format!("upgraded from {} to {}", builds[0], builds[1])), "{said}");
        assert_eq!(status["keeper"]["version"], status["version"], "{status}");
        let worker = gateway.worker().await?;
        assert_eq!(
            inode(format!("/proc/{keeper}/exe"))?,
            installed,
            "the keeper runs the new program under its old pid"
        );
        assert_eq!(inode(format!("/proc/{}/exe", worker.pid))?, installed);
        load.go_on().await?;
        let open_after = Proc::of(keeper).context("the keeper")?.open_files();
        assert!(open_after <= open_before + 16, "descriptors of the keeper: {open_before}, then {open_after}");
    }
    let calls = load.end().await?;
    let (h_after, s_after) = (whoami(&h).await?, whoami(&s).await?);
    assert_eq!(h_after["session"], h_before["session"], "{calls} calls");
    assert_eq!((&s_after["pid"], &s_after["calls"]), (&s_before["pid"], &json!(2)));
    let status = gateway.status().await?;
    assert_eq!(status["handover"]["outcome"], "succeeded", "{status}");
    assert!(status["keeper"]["version"].is_string() && status["version"].is_string());
    gateway.stop().await?;
    gateway.assert_no_orphans().await
}

#[tokio::test]
async fn t2_a_program_that_cannot_go_on_with_what_is_there_leaves_the_old_one_serving() -> Result<()> {
    let stand = Stand::new().await?;
    let dir = tempfile::tempdir()?;
    let program = install(dir.path())?;
    let gateway = Setup::new(&stand.config).binary(&program).start().await?;
    let client = RawClient::open(&gateway.url("s")?, VERSION).await?;
    let before = (whoami(&client).await?["pid"].clone(), gateway.worker().await?);
    let real = mainstay_tests::mainstay()?;
    let of_another_form = format!(
        "#!/bin/sh\n[ \"$1\" = rehearse ] && shift 3 && set -- rehearse --renewal-format 4242 \"$@\"\nexec {} \"$@\"\n",
        real.display()
    );
    let broken: [(&[u8], &str); 4] = [
        (b"#!/bin/sh\necho 'error: of another world' >&2\nexit 1\n", "of another world"),
        (b"no program at all", ""),
        (b"#!/bin/sh\nexec sleep 600\n", ""),
        (of_another_form.as_bytes(), "4242"),
    ];
    for (bytes, named) in broken {
        write_program(&program, bytes)?;
        let output = tokio::time::timeout(2 * BOUND, gateway_order(&gateway)).await??;
        assert_eq!(output.0, 409, "{output:?}");
        assert!(output.1.to_string().contains(named), "{output:?}");
        assert_eq!((whoami(&client).await?["pid"].clone(), gateway.worker().await?), before);
    }
    std::fs::remove_file(&program)?;
    assert_eq!(gateway_order(&gateway).await?.0, 409, "a program that is gone");
    assert_eq!((whoami(&client).await?["pid"].clone(), gateway.worker().await?), before);
    Ok(())
}

/// Orders an upgrade over the API: the program under test is broken and can't be its own command line.
async fn gateway_order(gateway: &Gateway) -> Result<(u16, Value)> {
    let http = reqwest::Client::builder().no_proxy().timeout(2 * BOUND).build()?;
    let url = gateway.admin_url("/api/v1/upgrade")?;
    let answer = http.post(url).bearer_auth(gateway.admin_token()?).send().await?;
    let status = answer.status().as_u16();
    Ok((status, serde_json::from_slice(&answer.bytes().await?).unwrap_or(Value::Null)))
}
