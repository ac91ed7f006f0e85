//! I6: what is secret is nowhere but where it belongs. Canaries of every kind go through a whole life of a gateway that
//! logs everything; then every place is searched that somebody could look at, and each search is proven to find what is
//! there.

use anyhow::{Context as _, Result, ensure};
use mainstay_tests::{Gateway, Proc, RawClient, Setup, UpH, UpS, descendants, wait_blocking, wait_until};
use memchr::memmem;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const WATCH_ROUNDS_MIN: u64 = 100;
const VERSION: &str = "2025-11-25";
const BOUND: Duration = Duration::from_secs(20);

/// Secrets that the test plants. Those that the gateway makes itself are added as they become known.
const HEADER: &str = "canary-header-7f1c6a52d0";
const HEADER_VARIABLE: &str = "canary-header-variable-93b8";
const ENV: &str = "canary-env-5e0b7713ac";
const ENV_VARIABLE: &str = "canary-env-variable-c41d";
const CLIENT_TOKEN: &str = "canary-client-token-08d2b5e9c7a31f64";
const STRANGERS_TOKEN: &str = "canary-strangers-token-77c0d1e8f2a9";
const CLIENT_HEADER: &str = "canary-client-header-66fa";
const ARGUMENT: &str = "canary-argument-1b9e44";
const WRONG_TOKEN: &str = "canary-wrong-token-2a";
const GATEWAY_ONLY: &str = "canary-gateway-only-f00d";

const PLANTED: [&str; 10] = [
    HEADER,
    HEADER_VARIABLE,
    ENV,
    ENV_VARIABLE,
    CLIENT_TOKEN,
    STRANGERS_TOKEN,
    CLIENT_HEADER,
    ARGUMENT,
    WRONG_TOKEN,
    GATEWAY_ONLY,
];

/// Something that somebody could look at.
struct Place {
    name: String,
    bytes: Vec<u8>,
    /// What is known to be in it: if the search did not find this, it would prove nothing.
    control: String,
}

impl Place {
    fn new(name: impl Into<String>, bytes: impl Into<Vec<u8>>, control: &str) -> Place {
        Place { name: name.into(), bytes: bytes.into(), control: control.to_owned() }
    }
}

/// The forms in which a secret could have been written.
fn forms(secret: &str) -> Vec<Vec<u8>> {
    let hex: String = secret.bytes().map(|byte| format!("{byte:02x}")).collect();
    let numbers: Vec<String> = secret.bytes().map(|byte| byte.to_string()).collect();
    let percent: String = secret.bytes().map(|byte| format!("%{byte:02X}")).collect();
    let wide: Vec<u8> = secret.bytes().flat_map(|byte| [byte, 0]).collect();
    let written = [secret.to_owned(), hex.to_ascii_uppercase(), hex, numbers.join(", "), percent, base64(secret)];
    written.into_iter().map(String::into_bytes).chain([wide]).collect()
}

/// Standard base64 without the last group, whose form depends on what follows.
fn base64(text: &str) -> String {
    const SYMBOLS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let groups = text.as_bytes().chunks_exact(3).flat_map(|group| {
        let word = u32::from_be_bytes([0, group[0], group[1], group[2]]);
        [18, 12, 6, 0].map(|shift| char::from(SYMBOLS[(word >> shift & 0x3f) as usize]))
    });
    groups.collect()
}

fn holds(bytes: &[u8], wanted: &[u8]) -> bool {
    memmem::find(bytes, wanted).is_some()
}

/// Searches a place for secrets; first, and once more with each secret planted, for what must be found.
fn search(place: &Place, secrets: &BTreeSet<String>) -> Result<()> {
    let shown = || String::from_utf8_lossy(&place.bytes).chars().take(1000).collect::<String>();
    ensure!(holds(&place.bytes, place.control.as_bytes()), "`{}` is not in {}: {}", place.control, place.name, shown());
    for secret in secrets {
        for form in forms(secret) {
            let shown = String::from_utf8_lossy(&form).into_owned();
            if let Some(at) = memmem::find(&place.bytes, &form) {
                let around = &place.bytes[at.saturating_sub(200)..(at + form.len() + 100).min(place.bytes.len())];
                anyhow::bail!("`{shown}` is in {}: …{}…", place.name, String::from_utf8_lossy(around));
            }
            // The haystacks are large: planting in their ends is enough.
            let mut planted = place.bytes[place.bytes.len().saturating_sub(1000)..].to_vec();
            planted.extend_from_slice(&form);
            planted.extend_from_slice(b" and more");
            ensure!(holds(&planted, &form), "the search is blind in {}", place.name);
        }
    }
    Ok(())
}

/// Watches the modes of everything below some directories, over and over until told to stop.
struct Watch {
    over: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    thread: std::thread::JoinHandle<BTreeSet<PathBuf>>,
}

impl Watch {
    fn start(directories: Vec<PathBuf>) -> Watch {
        let (over, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (told, counted) = (Arc::clone(&over), Arc::clone(&rounds));
        let thread = std::thread::spawn(move || {
            let mut open = BTreeSet::new();
            while !told.load(Ordering::Acquire) {
                directories.iter().for_each(|directory| look(directory, &mut open));
                counted.fetch_add(1, Ordering::AcqRel);
                std::thread::yield_now();
            }
            open
        });
        Watch { over, rounds, thread }
    }

    /// How often it has looked at everything.
    fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::Acquire)
    }

    /// What others could have read or written at some time.
    fn stop(self) -> Result<BTreeSet<PathBuf>> {
        self.over.store(true, Ordering::Release);
        self.thread.join().map_err(|_| anyhow::anyhow!("the watch has failed"))
    }
}

/// Notes what is below `path` and open to others. What vanishes meanwhile is none of it.
fn look(path: &Path, open: &mut BTreeSet<PathBuf>) {
    let Ok(found) = std::fs::symlink_metadata(path) else { return };
    if found.permissions().mode() & 0o077 != 0 && !found.is_symlink() {
        open.insert(path.to_owned());
    }
    if found.is_dir() {
        std::fs::read_dir(path).into_iter().flatten().flatten().for_each(|entry| look(&entry.path(), open));
    }
}

/// A gateway that logs everything, in front of both kinds of servers, with canaries wherever one can be put.
async fn stand() -> Result<(UpH, UpS, Gateway)> {
    let (up, stdio) = (UpH::start().await?, UpS::new(&[])?);
    let headers = format!("headers = {{ X-Canary = \"{HEADER}\", Authorization = \"Bearer ${{HEADER_VARIABLE}}\" }}\n");
    let env = format!("env = {{ CANARY = \"{ENV}\", CANARY_VARIABLE = \"${{ENV_VARIABLE}}\" }}\n");
    let auth = "[auth]\nmode = \"token\"\n[auth.tokens]\n\
                control-holder = \"${CLIENT_TOKEN}\"\nstranger = \"${STRANGERS_TOKEN}\"\n";
    let config = format!("{auth}{}{headers}{}{env}", up.toml("h"), stdio.toml("s")?);
    let setup = Setup::new(&config)
        .env("CLIENT_TOKEN", CLIENT_TOKEN)
        .env("STRANGERS_TOKEN", STRANGERS_TOKEN)
        .env("HEADER_VARIABLE", HEADER_VARIABLE)
        .env("ENV_VARIABLE", ENV_VARIABLE)
        .env("GATEWAY_ONLY", GATEWAY_ONLY)
        .env("MAINSTAY_LOG", "trace");
    Ok((up, stdio, setup.start().await?))
}

async fn client(gateway: &Gateway, server: &str) -> Result<RawClient> {
    let mut client = RawClient::new(&gateway.url(server)?)?
        .with_header("authorization", &format!("Bearer {CLIENT_TOKEN}"))?
        .with_header("x-canary", CLIENT_HEADER)?
        .with_header("x-agent-name", "control-agent")?;
    client.establish(VERSION).await?;
    Ok(client)
}

/// Calls of every kind, good and bad. What the gateway itself says of the bad ones is returned.
async fn live(client: &RawClient) -> Result<Vec<String>> {
    let canary = json!({"text": ARGUMENT, ARGUMENT: ARGUMENT});
    client.request("tools/list", Value::Null).await?.result()?;
    client.call_through("echo", canary.clone()).await?.result()?;
    client.call_through("slow", json!({"ms": 100, "text": ARGUMENT})).await?.result()?;
    client.call_through("prog", json!({"n": 2, "text": ARGUMENT})).await?.result()?;
    client.call_through("no-such-tool", canary.clone()).await?.error()?;
    let mut said = Vec::new();
    let session = client.session.clone().context("an id")?;
    let stranger = client.clone().with_header("authorization", &format!("Bearer {STRANGERS_TOKEN}"))?;
    let nobody = client.clone().with_header("authorization", &format!("Bearer {WRONG_TOKEN}"))?;
    let unknown = client.clone().with_session(&format!("{session}x"), VERSION);
    let malformed = client.clone().with_header("mcp-protocol-version", "2099-01-01")?;
    for wrong in [&stranger, &nobody, &unknown, &malformed] {
        let outcome = wrong.call("echo", canary.clone()).await?;
        ensure!(outcome.status >= 400, "{}", outcome.body_text());
        said.push(outcome.body_text());
    }
    for body in [format!("{{\"jsonrpc\":\"2.0\",\"id\":1,\"{ARGUMENT}"), format!("[\"{ARGUMENT}\"]"), ARGUMENT.into()] {
        said.push(client.post_bytes(body).await?.finish(BOUND).await?.body_text());
    }
    let cursor = client.get_stream(Some(&format!("{ARGUMENT}-1"))).await?;
    said.push(cursor.finish(BOUND).await?.body_text());
    Ok(said)
}

/// The ids under which the gateway knows its sessions at the HTTP server.
async fn upstream_ids(up: &UpH) -> Result<BTreeSet<String>> {
    let log = up.log().await?;
    let ids = log.iter().filter_map(|entry| entry["headers"]["mcp-session-id"].as_str().map(str::to_owned));
    Ok(ids.collect())
}

/// Every path that a template of the document stands for, by what this test knows. A parameter that it does not know is a
/// fault of this test: what is behind it would never be searched.
fn paths(template: &str, refs: &[&str]) -> Result<Vec<String>> {
    let known: [(&str, &[&str]); 2] = [("{ref}", refs), ("{name}", &["h", "s"])];
    let mut paths = vec![template.to_owned()];
    for (parameter, values) in known.iter().filter(|(parameter, _)| template.contains(parameter)) {
        paths = values.iter().flat_map(|value| paths.iter().map(|path| path.replace(parameter, value))).collect();
    }
    ensure!(!paths.is_empty(), "there is nothing to ask `{template}` for");
    ensure!(!paths.iter().any(|path| path.contains('{')), "`{template}` has a parameter that this test must learn");
    Ok(paths)
}

/// Everything that the admin port and the commands say.
async fn admin(gateway: &Gateway) -> Result<Vec<Place>> {
    let http = reqwest::Client::builder().no_proxy().build()?;
    let token = gateway.admin_token()?;
    let read = async |path: &str, token: &str| {
        let answer = http.get(gateway.admin_url(path)?).bearer_auth(token).send().await?;
        anyhow::Ok(format!("{}\n{:?}\n{}", answer.status(), answer.headers().clone(), answer.text().await?))
    };
    let (_, document) = gateway.admin_get("/api/v1/openapi.json").await?;
    let (_, listed) = gateway.admin_get("/api/v1/sessions").await?;
    let refs = listed["sessions"].as_array().context("a list")?.iter().filter_map(|view| view["ref"].as_str());
    let refs: Vec<_> = refs.collect();
    let mut places = Vec::new();
    for (template, operations) in document["paths"].as_object().context("paths")? {
        if operations.get("get").is_none() {
            continue;
        }
        let mut answered = false;
        for path in paths(template, &refs)? {
            // Not each of them has something to say of each: a server that is no child has no logs.
            let answer = read(&path, &token).await?;
            answered |= answer.starts_with("200 OK");
            places.push(Place::new(&path, answer, "cache-control"));
            places.push(Place::new(format!("{path} refused"), read(&path, WRONG_TOKEN).await?, "unauthorized"));
        }
        ensure!(answered, "nothing that `{template}` stands for was answered");
    }
    ensure!(["/metrics", "/api/v1/audit", "/api/v1/owed"].iter().all(|path| places.iter().any(|at| at.name == *path)));
    let malformed = format!("/api/v1/sessions?after={ARGUMENT}&state={ARGUMENT}");
    places.push(Place::new("a malformed question", read(&malformed, &token).await?, "request_invalid"));
    let commands: [(&[&str], &str); 8] = [
        (&["sessions", "list"], "control-agent"),
        (&["--json", "sessions", "list"], "control-agent"),
        (&["audit", "--limit", "1000"], "opened"),
        (&["instances"], "CONTINUITY"),
        (&["status"], "ready"),
        (&["owed", "list"], "SERVER"),
        (&["config", "show", "--running"], "session."),
        (&["servers", "list"], "stdio"),
    ];
    for (words, control) in commands {
        let output = gateway.cli(words).await?;
        let said = [output.stdout, output.stderr].concat();
        places.push(Place::new(format!("`mainstay {}`", words.join(" ")), said, control));
    }
    Ok(places)
}

/// Arguments of all processes, and the environment of those that the gateway started for others.
fn processes(gateway: &Gateway) -> Result<(Vec<Place>, Vec<Place>)> {
    let keeper = gateway.keeper_pid()?;
    let all: Vec<Proc> = [Proc::of(keeper)].into_iter().flatten().chain(descendants(keeper)).collect();
    let arguments = all.iter().map(|process| (process, process.arguments().join("\0")));
    let arguments: Vec<Place> =
        arguments.map(|(process, text)| Place::new(format!("the arguments of {}", process.pid), text, "")).collect();
    ensure!(arguments.iter().any(|place| holds(&place.bytes, b"serve")), "the keeper is among them");
    ensure!(arguments.iter().any(|place| holds(&place.bytes, b"worker")), "the worker is among them");
    let children = all.iter().filter(|process| process.arguments().iter().any(|word| word == "--trace"));
    let environments = children
        .map(|child| Place::new(format!("the environment of {}", child.pid), child.environment().join("\0"), ENV));
    let environments: Vec<_> = environments.collect();
    ensure!(!environments.is_empty(), "a child is among them");
    Ok((arguments, environments))
}

/// Every file of the state directory but those that are the secrets.
fn files(gateway: &Gateway) -> Result<Vec<Place>> {
    let (mut found, mut folders) = (Vec::new(), vec![gateway.state_dir()]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder)? {
            let entry = entry?;
            let (kind, name) = (entry.file_type()?, entry.file_name().to_string_lossy().into_owned());
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_file() && name != "admin.token" && !name.ends_with(".key") {
                let control = match name.as_str() {
                    "ledger.db" => "SQLite format 3",
                    "ledger.db-wal" => "control-agent",
                    "gateway.json" => "\"admin\"",
                    _ => "",
                };
                found.push(Place::new(entry.path().display().to_string(), std::fs::read(entry.path())?, control));
            }
        }
    }
    for name in ["ledger.db", "gateway.json"] {
        ensure!(found.iter().any(|place| place.name.ends_with(name)), "`{name}` is among the files");
    }
    Ok(found)
}

#[tokio::test]
async fn i6_no_canary_is_anywhere_but_where_it_belongs() -> Result<()> {
    let (up, stdio, mut gateway) = stand().await?;
    let watch = Watch::start(vec![gateway.state_dir()]);
    let (h, s, doomed) = (client(&gateway, "h").await?, client(&gateway, "s").await?, client(&gateway, "h").await?);
    let mut secrets: BTreeSet<String> = PLANTED.map(str::to_owned).into();
    secrets.insert(gateway.admin_token()?);
    for client in [&h, &s, &doomed] {
        secrets.insert(client.session.clone().context("an id")?);
    }

    let mut places = Vec::new();
    for stage in ["new", "forgotten by the server", "another worker", "another gateway"] {
        match stage {
            "forgotten by the server" => up.forget().await?,
            "another worker" => drop(gateway.kill_worker().await?),
            "another gateway" => {
                places.extend(files(&gateway)?);
                gateway.kill_all().await?;
                places.extend(files_of_the_dead(&gateway)?);
                gateway.start_again().await?;
            }
            _ => {}
        }
        for client in [&h, &s] {
            let said = live(client).await.with_context(|| stage.to_owned())?;
            places.extend(said.into_iter().map(|text| Place::new(format!("an error body, {stage}"), text, "_")));
        }
        places.extend(admin(&gateway).await.with_context(|| stage.to_owned())?);
        secrets.extend(upstream_ids(&up).await?);
    }
    let (arguments, environments) = processes(&gateway)?;
    let listed = gateway.admin_get("/api/v1/sessions?state=ready&server=h").await?.1;
    let session_ref = listed["sessions"][0]["ref"].as_str().context("a ref")?.to_owned();
    let drained = gateway.cli(&["sessions", "drain", &session_ref]).await?;
    assert!(drained.status.success(), "{}", String::from_utf8_lossy(&drained.stderr));
    doomed.delete().await?;
    s.delete().await?;
    let paid = async || gateway.admin_get("/api/v1/owed").await.is_ok_and(|(_, told)| told["owed"] == json!([]));
    wait_until("nothing is owed", BOUND, paid).await?;
    places.extend(admin(&gateway).await?);
    places.extend(files(&gateway)?);
    ensure!(watch.rounds() > WATCH_ROUNDS_MIN, "it looked {} times only", watch.rounds());
    let open = watch.stop()?;
    gateway.stop().await?;
    places.extend(files_of_the_dead(&gateway)?);

    ensure!(secrets.len() >= 14, "session ids of both sides are among the secrets: {}", secrets.len());
    let log = gateway.log();
    ensure!(log.contains("TRACE"), "everything is logged");
    places.push(Place::new("the log", log, &session_ref));
    for place in places.iter().chain(&arguments) {
        search(place, &secrets)?;
    }
    // What the configuration gives to a child is in its environment, and nothing else that is secret (C7).
    let own: BTreeSet<String> = [ENV, ENV_VARIABLE].map(str::to_owned).into();
    for place in &environments {
        search(place, &secrets.difference(&own).cloned().collect())?;
        assert!(search(place, &own).is_err(), "the search finds what is in an environment");
    }
    assert_eq!(open, BTreeSet::new(), "private at every moment");
    let calls = stdio.trace()?.iter().filter(|entry| entry.to_string().contains(ARGUMENT)).count();
    assert!(
        calls > 0 && up.log().await?.iter().any(|entry| entry.to_string().contains(HEADER_VARIABLE)),
        "all arrived"
    );
    Ok(())
}

/// The files once nobody writes them; the log of the ledger may be gone then.
fn files_of_the_dead(gateway: &Gateway) -> Result<Vec<Place>> {
    let mut found = Vec::new();
    for name in ["ledger.db", "ledger.db-wal"] {
        let path = gateway.state_dir().join(name);
        if path.exists() {
            found.push(Place::new(format!("{} of a dead gateway", path.display()), std::fs::read(&path)?, ""));
        }
    }
    ensure!(!found.is_empty(), "there is a ledger");
    ensure!(found.iter().any(|place| holds(&place.bytes, b"control-agent")), "what is stored is found");
    Ok(found)
}

#[test]
fn i6_a_route_whose_parameter_is_not_known_is_a_fault() -> Result<()> {
    assert_eq!(paths("/api/v1/status", &[])?, ["/api/v1/status"]);
    assert_eq!(paths("/api/v1/sessions/{ref}", &["a", "b"])?, ["/api/v1/sessions/a", "/api/v1/sessions/b"]);
    assert!(paths("/api/v1/sessions/{ref}", &[]).is_err());
    assert!(paths("/api/v1/sessions/{ref}/{other}", &["a"]).is_err());
    Ok(())
}

/// Each search finds what somebody plants in the very place.
#[test]
fn i6_the_searches_find_what_is_planted() -> Result<()> {
    let secrets = BTreeSet::from([ARGUMENT.to_owned()]);
    for form in forms(ARGUMENT) {
        let text = [b"before ".as_slice(), &form, b" behind"].concat();
        assert!(search(&Place::new("a text", text, "before"), &secrets).is_err());
    }
    assert!(search(&Place::new("a text", "before", "before"), &secrets).is_ok());
    assert!(search(&Place::new("an empty text", "", "before"), &secrets).is_err(), "what should be there is not");

    let dir = tempfile::tempdir()?;
    let (state, file) = (dir.path().join("state"), dir.path().join("state/file"));
    std::fs::create_dir(&state)?;
    std::fs::set_permissions(&state, std::fs::Permissions::from_mode(0o700))?;
    let watch = Watch::start(vec![state]);
    std::fs::write(&file, "")?;
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644))?;
    let planted_at = watch.rounds();
    assert!(wait_blocking(BOUND, || watch.rounds() > planted_at + 1), "it looks again and again");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600))?;
    assert_eq!(watch.stop()?, BTreeSet::from([file]), "a file that was open for a moment");

    let mut child = std::process::Command::new("sleep").arg("60").env("PLANTED", ARGUMENT).arg0(ARGUMENT).spawn()?;
    let process = Proc::of(child.id()).context("it runs")?;
    // It may still be on its way from this program to the other.
    let replaced = || process.arguments().first().is_some_and(|word| word == ARGUMENT);
    assert!(wait_blocking(BOUND, replaced), "{:?}", process.arguments());
    let seen = [process.arguments().join("\0"), process.environment().join("\0")];
    child.kill()?;
    child.wait()?;
    for text in seen {
        assert!(search(&Place::new("a process", text, ""), &secrets).is_err(), "a canary of a process");
    }
    Ok(())
}
