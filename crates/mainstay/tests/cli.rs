//! The program as people and scripts meet it: real processes, exit codes, files, the admin port.
#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "a test of real processes: bounded waits, and any failure fails it"
)]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_mainstay");
const BOUND: Duration = Duration::from_secs(30);
/// Orders about the gateway as a whole.
const WHOLE_GATEWAY: [&str; 3] = ["/api/v1/reload", "/api/v1/upgrade", "/api/v1/retire"];

/// A gateway in front of the demo server, in a directory of its own.
struct Gateway {
    dir: TempDir,
    keeper: Child,
}

impl Gateway {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let keeper = serve(&dir.path().join("state"))
            .stdout(std::fs::File::create(dir.path().join("stdout")).unwrap())
            .stderr(std::fs::File::create(dir.path().join("stderr")).unwrap())
            .spawn()
            .unwrap();
        let gateway = Self { dir, keeper };
        wait_until("the gateway is ready", || {
            gateway.published().is_some() && gateway.get("/readyz", None).is_some_and(|answer| answer.status == 200)
        });
        gateway
    }

    fn state_dir(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    fn published(&self) -> Option<Value> {
        serde_json::from_slice(&std::fs::read(self.state_dir().join("gateway.json")).ok()?).ok()
    }

    fn token(&self) -> String {
        std::fs::read_to_string(self.state_dir().join("admin.token")).unwrap().trim().to_owned()
    }

    fn said(&self, stream: &str) -> String {
        std::fs::read_to_string(self.dir.path().join(stream)).unwrap()
    }

    /// A command for this gateway.
    fn command(&self, words: &[&str]) -> Output {
        run(Command::new(PROGRAM).args(words).arg("--state-dir").arg(self.state_dir()))
    }

    fn get(&self, path: &str, authorization: Option<&str>) -> Option<Answer> {
        self.ask("GET", path, authorization)
    }

    fn ask(&self, method: &str, path: &str, authorization: Option<&str>) -> Option<Answer> {
        let published = self.published()?;
        let mut stream = TcpStream::connect(published["admin"].as_str()?).ok()?;
        stream.set_read_timeout(Some(BOUND)).ok()?;
        let authorization = authorization.map(|value| format!("Authorization: {value}\r\n")).unwrap_or_default();
        write!(stream, "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{authorization}\r\n")
            .ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        let (head, body) = text.split_once("\r\n\r\n")?;
        let status = head.split(' ').nth(1)?.parse().ok()?;
        Some(Answer { status, head: head.to_ascii_lowercase(), body: body.to_owned() })
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.command(&["stop"]);
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
    }
}

struct Answer {
    status: u16,
    head: String,
    body: String,
}

fn serve(state_dir: &Path) -> Command {
    let mut command = Command::new(PROGRAM);
    command.args(["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--state-dir"]);
    command.arg(state_dir).args(["--", PROGRAM, "demo-server"]).stdin(Stdio::null());
    command
}

fn run(command: &mut Command) -> Output {
    command.stdin(Stdio::null()).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let give_up_at = Instant::now() + BOUND;
    while !holds() {
        assert!(Instant::now() < give_up_at, "not within {BOUND:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn runs(pid: u64) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim_start().starts_with('Z'))
}

/// A threshold that holds on an idle machine, for this one as busy as it is: where each process has a part of a core only,
/// everything takes longer by that much.
fn stretched(threshold: Duration) -> Duration {
    let told = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    // The mean of the last minute, and how many run at this moment.
    let mean = told.split(' ').next().and_then(|mean| mean.parse::<f64>().ok());
    let running = told.split(' ').nth(3).and_then(|tasks| tasks.split('/').next()?.parse::<f64>().ok());
    let busy = mean.unwrap_or(0.0).max(running.unwrap_or(0.0));
    let cores =
        std::thread::available_parallelism().map_or(1.0, |cores| f64::from(u32::try_from(cores.get()).unwrap_or(1)));
    threshold.mul_f64(1.0 + busy / cores)
}

#[test]
fn o1_every_route_of_the_table_refuses_who_has_not_the_token() {
    let gateway = Gateway::start();
    let token = gateway.token();
    let right = format!("Bearer {token}");
    let wrong = [None, Some("Bearer wrong"), Some("Bearer "), Some(token.as_str()), Some("Basic d3Jvbmc6")];
    let document = gateway.get("/api/v1/openapi.json", Some(&right)).unwrap();
    let document: Value = serde_json::from_str(&document.body).unwrap();
    let kept = include_str!("../../../docs/openapi.json");
    assert_eq!(document, serde_json::from_str::<Value>(kept).unwrap(), "the document in docs/");
    let mut walked = 0;
    for (path, operations) in document["paths"].as_object().unwrap() {
        let path = path.replace("{ref}", "s-0123456789").replace("{id}", "7").replace("{name}", "0123456789");
        for method in operations.as_object().unwrap().keys().map(|method| method.to_ascii_uppercase()) {
            for authorization in wrong {
                let answer = gateway.ask(&method, &path, authorization).unwrap();
                assert_eq!(answer.status, 401, "{method} {path} with {authorization:?}");
                assert!(answer.head.contains("www-authenticate: bearer"), "{path}: {}", answer.head);
                let problem: Value = serde_json::from_str(&answer.body).unwrap();
                assert_eq!(problem["code"], "unauthorized", "{path}");
            }
            walked += 1;
            // What ends or replaces the worker that is being asked has tests of its own.
            if WHOLE_GATEWAY.contains(&path.as_str()) {
                continue;
            }
            let answer = gateway.ask(&method, &path, Some(&right)).unwrap();
            let expected = match path.as_str() {
                // It asks for what stands in its body.
                "/api/v1/sessions/find" => 400,
                path if path.contains("0123456789") || path.contains("/7/") => 404,
                _ => 200,
            };
            assert_eq!(answer.status, expected, "{method} {path}: {}", answer.body);
            assert!(!answer.body.contains(&token), "{path}");
            assert!(answer.head.contains("cache-control: no-store"), "{path}: {}", answer.head);
            let other = if method == "GET" { "POST" } else { "GET" };
            assert_eq!(gateway.ask(other, &path, Some(&right)).unwrap().status, 405, "{other} {path}");
        }
    }
    assert!(walked >= 15, "{walked} routes");
    assert_eq!(gateway.get("/healthz", None).unwrap().status, 200);
    assert_eq!(gateway.get("/readyz", None).unwrap().status, 200);
    assert_eq!(gateway.get("/elsewhere", None).unwrap().status, 401, "who has no token learns of no path");
}

#[test]
fn o1_what_is_malformed_is_said_as_a_problem() {
    let gateway = Gateway::start();
    let right = format!("Bearer {}", gateway.token());
    for (path, status, code) in [
        ("/api/v1/sessions?limit=1&after=s-0000000000", 200, ""),
        ("/api/v1/sessions?state=ready&server=mainstay&principal=anonymous", 200, ""),
        ("/api/v1/sessions?after=x", 400, "request_invalid"),
        ("/api/v1/sessions?limit=x", 400, "request_invalid"),
        ("/api/v1/sessions?sever=files", 400, "request_invalid"),
        ("/api/v1/sessions?state=reddy", 400, "request_invalid"),
        ("/api/v1/sessions/s-0123456789", 404, "not_found"),
        ("/api/v1/sessions/nonsense", 400, "request_invalid"),
        ("/api/v1/audit?action=danced", 400, "request_invalid"),
        ("/api/v1/nothing", 404, "not_found"),
    ] {
        let answer = gateway.get(path, Some(&right)).unwrap();
        assert_eq!(answer.status, status, "{path}: {}", answer.body);
        let problem = answer.head.contains("content-type: application/problem+json");
        assert_eq!(problem, status != 200, "{path}: {}", answer.head);
        if status != 200 {
            let document: Value = serde_json::from_str(&answer.body).unwrap();
            assert_eq!((&document["code"], &document["status"]), (&code.into(), &status.into()), "{path}");
        }
    }
}

#[test]
fn commands_find_the_gateway_and_stop_ends_exactly_it() {
    let mut gateway = Gateway::start();
    for (file, mode) in [("", 0o700), ("gateway.json", 0o600), ("admin.token", 0o600)] {
        let found = std::fs::metadata(gateway.state_dir().join(file)).unwrap().permissions().mode() & 0o777;
        assert_eq!(found, mode, "`{file}` has mode {found:o}");
    }
    let announced = gateway.said("stdout");
    let published = gateway.published().unwrap();
    let url = format!("http://{}/mcp/mainstay", published["mcp"].as_str().unwrap());
    assert!(announced.contains(&url) && announced.contains("\"mcpServers\""), "{announced}");

    let status = gateway.command(&["--json", "status"]);
    let status: Value = serde_json::from_str(&stdout(&status)).unwrap();
    assert_eq!(status["keeper"]["pid"], gateway.keeper.id());
    assert!(stdout(&gateway.command(&["status"])).contains("ready"));
    assert!(stdout(&gateway.command(&["servers", "list"])).contains("/mcp/mainstay"));
    let listed = gateway.command(&["sessions", "list"]);
    assert!(stdout(&listed).starts_with("REF"), "{}", stdout(&listed));
    let listed = gateway.command(&["--json", "sessions", "list"]);
    let listed: Value = serde_json::from_str(&stdout(&listed)).unwrap();
    assert_eq!(listed["sessions"], Value::Array(Vec::new()));
    let absent = gateway.command(&["sessions", "show", "s-0123456789"]);
    assert_eq!(absent.status.code(), Some(4), "{}", stderr(&absent));
    assert_eq!(gateway.command(&["sessions", "show", "x"]).status.code(), Some(2));

    let stopped = gateway.command(&["stop"]);
    assert_eq!(stopped.status.code(), Some(0), "{}", stderr(&stopped));
    assert!(gateway.keeper.wait().unwrap().success(), "{}", gateway.said("stderr"));
    assert!(!runs(status["worker"]["pid"].as_u64().unwrap()));
    assert_eq!(gateway.published(), None);
    for words in [&["stop"][..], &["status"], &["sessions", "list"]] {
        let output = gateway.command(words);
        assert_eq!(output.status.code(), Some(3), "{words:?}: {}", stderr(&output));
        assert!(stderr(&output).contains("hint:"), "{words:?}");
    }
}

#[test]
fn t6_a_second_gateway_on_the_state_directory_names_the_first() {
    let gateway = Gateway::start();
    let began = Instant::now();
    let second = run(&mut serve(&gateway.state_dir()));
    assert!(began.elapsed() < stretched(Duration::from_secs(2)), "{:?}", began.elapsed());
    assert_eq!(second.status.code(), Some(1));
    let told = stderr(&second);
    assert!(told.contains(&gateway.keeper.id().to_string()) && told.contains("hint:"), "{told}");
    assert_eq!(gateway.get("/readyz", None).unwrap().status, 200);
}

#[test]
fn a_taken_port_is_said_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let words = ["serve", "--listen", &address, "--admin", "127.0.0.1:0", "--state-dir"];
    let output = run(Command::new(PROGRAM).args(words).arg(dir.path()).args(["--", PROGRAM, "demo-server"]));
    assert_eq!(output.status.code(), Some(1));
    let told = stderr(&output);
    assert!(told.contains(&address) && told.contains("--listen"), "{told}");
}

#[test]
fn a_wrong_configuration_touches_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("m.toml");
    std::fs::write(&file, "[servers.a]\ncomand = \"x\"\n").unwrap();
    let state_dir = dir.path().join("state");
    for words in [&["serve"][..], &["config", "check"]] {
        let output =
            run(Command::new(PROGRAM).args(words).arg("--config").arg(&file).arg("--state-dir").arg(&state_dir));
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        let told = stderr(&output);
        assert!(
            told.contains("m.toml:2:1: unknown key `comand`") && told.contains("did you mean `command`?"),
            "{told}"
        );
        assert!(!state_dir.exists());
    }
    let output = run(Command::new(PROGRAM).args(["--json", "config", "check", "--config"]).arg(&file));
    let told: Value = serde_json::from_str(&stderr(&output)).unwrap();
    assert_eq!((&told["exit_code"], told["hint"].is_string()), (&Value::from(2), true));
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let mut child =
        Command::new(PROGRAM).args(["config", "schema"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""));
}

#[test]
fn u3_the_demo_shows_one_session_through_both_deaths_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let output = run(Command::new(PROGRAM).args(["--json", "demo"]).env("TMPDIR", dir.path()));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let steps: Vec<Value> = serde_json::from_str(&stdout(&output)).unwrap();
    let told: Vec<&str> = steps.iter().filter_map(|step| step["text"].as_str()).collect();
    assert!(
        told.iter().any(|step| step.contains("counter` under the same session id: 2; nothing was lost")),
        "{told:?}"
    );
    assert!(told.iter().any(|step| step.contains("what was lost is said")), "{told:?}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_demo_that_is_interrupted_or_not_read_leaves_nothing() {
    for interrupt in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let mut demo = Command::new(PROGRAM);
        let demo = demo.arg("demo").env("TMPDIR", dir.path()).stdin(Stdio::null());
        let mut demo = demo.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stdout = BufReader::new(demo.stdout.take().unwrap());
        let mut first = String::new();
        stdout.read_line(&mut first).unwrap();
        assert!(first.contains("started a gateway"), "{first}");
        if interrupt {
            let pid = rustix::process::Pid::from_child(&demo);
            rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        } else {
            drop(stdout);
        }
        let output = demo.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(i32::from(interrupt)), "{}", stderr(&output));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}

#[test]
fn what_is_missing_is_a_warning_and_no_fault() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("mcp.json");
    std::fs::write(&file, r#"{"mcpServers": {"a": {"command": "no-such-program-here"}}}"#).unwrap();
    let output = run(Command::new(PROGRAM).args(["--json", "config", "check"]).arg(&file).env("MAINSTAY_LISTE", "x"));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let told: Value = serde_json::from_str(&stdout(&output)).unwrap();
    let warnings = told["warnings"].as_array().unwrap();
    assert_eq!(warnings.len(), 2, "{told}");
    assert_eq!(warnings[0]["hint"], "did you mean `MAINSTAY_LISTEN`?");
    assert_eq!((&warnings[1]["line"], &warnings[1]["file"]), (&1.into(), &file.to_str().unwrap().into()));
    std::fs::write(&file, "{\"mcpServers\": {\"a\": {\"url\": \"ftp://x\"}}}").unwrap();
    let output = run(Command::new(PROGRAM).args(["--json", "config", "check"]).arg(&file));
    let told: Value = serde_json::from_str(&stderr(&output)).unwrap();
    assert_eq!((output.status.code(), &told["faults"][0]["line"]), (Some(2), &1.into()), "{told}");
}

#[test]
fn a_wrong_command_line_is_exit_code_2_in_json_too() {
    let output = run(Command::new(PROGRAM).args(["--json", "stauts"]));
    assert_eq!(output.status.code(), Some(2));
    let told: Value = serde_json::from_str(&stderr(&output)).unwrap();
    assert!(told["error"].as_str().unwrap().contains("stauts"), "{told}");
    let twice = run(Command::new(PROGRAM).args(["serve", "--config", "x.toml", "--", "x"]));
    assert_eq!(twice.status.code(), Some(2));
    assert!(stderr(&twice).contains("twice"), "{}", stderr(&twice));
}

#[test]
fn a_directory_that_is_somebody_elses_is_refused_and_stays_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("thesis.txt"), "").unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let output = run(&mut serve(dir.path()));
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("no state directory of Mainstay"), "{}", stderr(&output));
    assert_eq!(std::fs::metadata(dir.path()).unwrap().permissions().mode() & 0o777, 0o755);
}

#[test]
fn a_server_that_is_the_gateway_itself_is_refused() {
    let url = "http://localhost:9/mcp/files";
    let output = run(Command::new(PROGRAM).args(["serve", "--listen", "localhost:9", "--name", "files", "--url", url]));
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("server `files` is this gateway itself"), "{}", stderr(&output));
}

#[test]
fn i6_a_header_of_the_command_line_that_cannot_be_read_is_not_repeated() {
    let output = run(Command::new(PROGRAM).args(["serve", "--url", "http://h/", "--header", "CANARY"]));
    assert_eq!(output.status.code(), Some(2));
    let told = stderr(&output);
    assert!(told.contains("--header") && !told.contains("CANARY"), "{told}");
}
