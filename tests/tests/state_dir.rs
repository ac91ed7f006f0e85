//! The state directory has one owner and holds no surprise that is not told of (T6).

use anyhow::{Context as _, Result};
use mainstay_tests::{Gateway, Proc, RawClient, UpS, Wrapped, wait_blocking, wait_until};
use rustix::process::Signal;
use serde_json::json;
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const VERSION: &str = "2025-11-25";
const BOUND: Duration = Duration::from_secs(20);
/// A user whom nobody is.
const NOBODY: u32 = 65_534;

/// A start that is to fail.
fn serve(state_dir: &Path, more: &[&str]) -> Result<Output> {
    let mut command = Command::new(mainstay_tests::mainstay()?);
    command.args(["serve", "--state-dir"]).arg(state_dir);
    if !more.contains(&"--listen") {
        command.args(["--listen", "127.0.0.1:0"]);
    }
    command.args(["--admin", "127.0.0.1:0"]).args(more).args(["--", "cat"]);
    ended(&mut command)
}

/// The end of a start that must not succeed. One that does is killed, which no assertion likes.
fn ended(command: &mut Command) -> Result<Output> {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    if !wait_blocking(BOUND, || !matches!(child.try_wait(), Ok(None))) {
        child.kill()?;
    }
    Ok(child.wait_with_output()?)
}

/// A failure with exit code `code` that says each of `words`, and what to do.
fn assert_told(output: &Output, code: i32, words: &[&str]) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said}");
    for word in words {
        assert!(said.contains(word), "`{word}` is not in: {said}");
    }
    assert!(said.contains("error:") && !said.contains("panicked"), "{said}");
}

async fn open(gateway: &Gateway) -> Result<RawClient> {
    let client = RawClient::open(&gateway.url("s")?, VERSION).await?;
    client.call_through("whoami", json!({})).await?.result()?;
    Ok(client)
}

/// Starts the gateway on the state that it was left with, and uses it.
async fn start_and_use(gateway: &mut Gateway, client: &RawClient) -> Result<()> {
    gateway.start_again().await?;
    client.call_through("whoami", json!({})).await?.result()?;
    Ok(())
}

#[tokio::test]
async fn t6_what_a_killed_gateway_left_behind_is_no_trouble() -> Result<()> {
    let up = UpS::new(&[])?;
    let mut gateway = Gateway::start(&up.toml("s")?, &[]).await?;
    let client = open(&gateway).await?;
    gateway.kill_all().await?;
    let published = gateway.state_dir().join("gateway.json");
    assert!(published.exists(), "a killed gateway can't take it back");
    for command in [&["status"][..], &["stop"], &["stop", "--retire"], &["sessions", "list"]] {
        let output = gateway.cli(command).await?;
        assert_told(&output, 3, &["no gateway runs on", "hint:"]);
    }
    start_and_use(&mut gateway, &client).await?;
    assert!(gateway.cli(&["status"]).await?.status.success());
    assert!(gateway.stop().await?.success());
    assert!(!published.exists());
    Ok(())
}

#[tokio::test]
async fn o1_a_file_that_is_wrong_by_now_keeps_nobody_from_the_gateway_that_runs_with_it() -> Result<()> {
    let up = UpS::new(&[])?;
    let right = format!("state_dir = \"state\"\n{}", up.toml("s")?);
    let mut gateway = Gateway::start(&right, &[]).await?;
    let file = gateway.dir().join("mainstay.toml");
    let command = |words: &[&str], state_dir: Option<&Path>| -> Result<std::process::Output> {
        let mut command = std::process::Command::new(mainstay_tests::mainstay()?);
        command.args(words).arg("--config").arg(&file).env_remove("MAINSTAY_STATE_DIR");
        command.envs(state_dir.map(|folder| ("MAINSTAY_STATE_DIR", folder)));
        Ok(command.output()?)
    };
    let state = gateway.state_dir();
    for (wrong, usual) in [("state_dir = \"state\"\ncolour = \"red\"\n", None), ("not toml", Some(&*state))] {
        gateway.rewrite_config(wrong)?;
        for words in [&["status"][..], &["servers", "list"], &["sessions", "list"]] {
            let output = command(words, usual)?;
            assert!(output.status.success(), "{wrong}: {output:?}");
        }
        // What is about the file itself tells of it.
        assert_told(&command(&["config", "check"], usual)?, 2, &["error:"]);
        assert_told(&command(&["reload"], usual)?, 1, &["error:", "nothing was changed"]);
    }
    // Where nothing says which gateway is meant, it says what does.
    let elsewhere = tempfile::tempdir()?;
    assert_told(&command(&["status"], Some(elsewhere.path()))?, 2, &["error:", "hint:", "--state-dir"]);
    assert!(gateway.cli(&["status"]).await?.status.success());
    let output = gateway.cli(&["sessions", "show", "0a1b2c3d-pasted-from-a-client"]).await?;
    assert_told(&output, 2, &["--id -", "Mcp-Session-Id"]);
    assert!(!String::from_utf8_lossy(&output.stderr).contains("pasted"), "it is not repeated");
    assert!(command(&["stop"], Some(&state))?.status.success());
    gateway.wait_for_end(BOUND).await?;
    Ok(())
}

#[tokio::test]
async fn t6_junk_in_the_state_directory_is_survived_and_foreign_files_are_left_alone() -> Result<()> {
    let up = UpS::new(&[])?;
    let mut gateway = Gateway::start(&up.toml("s")?, &[]).await?;
    let client = open(&gateway).await?;
    let state = gateway.state_dir();
    gateway.kill_all().await?;
    let elsewhere = gateway.dir().join("elsewhere");
    std::fs::write(&elsewhere, "mine")?;
    for (name, contents) in [
        ("gateway.json", &b"{\"mcp\": 12"[..]),
        ("gateway.json.draft", b"half"),
        ("lock", b"\xff\xfe not a record \0"),
        ("keeper.sock", b"no socket"),
        ("notes.txt", b"an operator's own"),
        ("children/empty", b""),
        ("children/junk", b"mainstay child 1\npid minus one\n"),
        ("children/4294967296", b"mainstay child 1\npid 4294967296\nstarted 1\n"),
        ("children/.unfinished-77", b"mainstay chi"),
        ("children/1", b"mainstay child 1\npid 1\nstarted 0\nboot 00000000-0000-4000-8000-000000000000\ntext m\n"),
    ] {
        std::fs::write(state.join(name), contents)?;
    }
    std::fs::create_dir(state.join("children/folder"))?;
    symlink(&elsewhere, state.join("children/link"))?;
    start_and_use(&mut gateway, &client).await?;
    assert_eq!(std::fs::read(&elsewhere)?, b"mine", "a link is removed, not what it leads to");
    assert_eq!(std::fs::read(state.join("notes.txt"))?, b"an operator's own");
    assert_eq!(std::fs::read(state.join("keeper.sock"))?, b"no socket");
    assert!(gateway.log().contains("removing a file that is no record of a child"));
    assert!(gateway.cli(&["status"]).await?.status.success(), "`gateway.json` is whole again");
    Ok(())
}

#[tokio::test]
async fn t6_of_gateways_that_start_together_one_serves_and_the_others_name_it() -> Result<()> {
    let up = UpS::new(&[])?;
    let mut gateway = Gateway::start(&up.toml("s")?, &[]).await?;
    let state = gateway.state_dir();
    gateway.stop().await?;
    let program = mainstay_tests::mainstay()?;
    let mut racing = Vec::new();
    for _ in 0..6 {
        let mut command = Command::new(&program);
        command.args(["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--state-dir"]).arg(&state);
        command.args(["--", "cat"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        racing.push(command.spawn()?);
    }
    wait_until("all but one to give up", BOUND, async || {
        racing.iter_mut().filter_map(|child| child.try_wait().ok().flatten()).count() == 5
    })
    .await?;
    let (mut winner, mut refused) = (None, Vec::new());
    for mut child in racing {
        match child.try_wait()? {
            None => winner = Some(child),
            Some(_) => refused.push(child.wait_with_output()?),
        }
    }
    let mut winner = winner.context("one of them serves")?;
    for output in &refused {
        assert_told(output, 1, &["is in use by", &format!("process {}", winner.id()), "hint: stop the other one"]);
    }
    // Whoever comes later hears it at once.
    let asked = Instant::now();
    assert_told(&serve(&state, &[])?, 1, &[&format!("process {}", winner.id())]);
    assert!(asked.elapsed() < BOUND);
    assert!(Proc::of(winner.id()).is_some_and(|winner| winner.signal(Signal::TERM)));
    winner.wait()?;
    Ok(())
}

#[test]
fn t6_a_port_of_somebody_else_is_named_and_nothing_is_done_to_it() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let foreign = TcpListener::bind("127.0.0.1:0")?;
    let address = foreign.local_addr()?.to_string();
    let mcp = serve(&dir.path().join("a"), &["--listen", &address])?;
    assert_told(&mcp, 1, &[&address, "`listen`", "something listens there already", "`--listen`"]);
    let mut command = Command::new(mainstay_tests::mainstay()?);
    command.args(["serve", "--listen", "127.0.0.1:0", "--admin", &address, "--state-dir"]).arg(dir.path().join("b"));
    let admin = ended(command.args(["--", "cat"]))?;
    assert_told(&admin, 1, &[&address, "`admin.listen`", "`--admin`"]);
    foreign.set_nonblocking(true)?;
    assert!(foreign.accept().is_err(), "nobody even knocked");
    Ok(())
}

#[tokio::test]
async fn t6_a_state_directory_behind_a_link_of_ones_own_is_the_same_directory() -> Result<()> {
    let up = UpS::new(&[])?;
    let mut gateway = Wrapped::new(&up.toml("s")?)?;
    let real = gateway.dir().join("disk");
    std::fs::rename(gateway.state_dir(), &real)?;
    symlink(&real, gateway.state_dir())?;
    gateway.start(&[], |_| ())?;
    let url = gateway.ready("s").await?;
    RawClient::open(&url, VERSION).await?;
    assert!(real.join("ledger.db").exists());
    for path in [real.as_path(), gateway.state_dir().as_path()] {
        assert_told(&serve(path, &[])?, 1, &["is in use by", &gateway.pid()?.to_string()]);
        let status = Command::new(mainstay_tests::mainstay()?).args(["status", "--state-dir"]).arg(path).output()?;
        assert!(status.status.success(), "{status:?}");
    }
    Ok(())
}

#[test]
fn t6_what_is_no_usable_state_directory_is_refused_with_the_reason() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let path = |name: &str| dir.path().join(name);
    std::fs::write(path("file"), "mine")?;
    symlink(path("nothing"), path("dangling"))?;
    symlink(path("loop"), path("loop"))?;
    for (name, word) in
        [("file", "not a plain directory"), ("dangling", "follow the link"), ("loop", "follow the link")]
    {
        assert_told(&serve(&path(name), &[])?, 1, &[word, "hint:"]);
    }
    assert_eq!(std::fs::read(path("file"))?, b"mine");
    assert!(!path("nothing").exists(), "nothing is made through a link");
    Ok(())
}

#[tokio::test]
async fn t6_what_others_have_put_into_the_state_directory_is_never_written_through() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("not run: only root can give files to somebody else");
        return Ok(());
    }
    let up = UpS::new(&[])?;
    let mut gateway = Gateway::start(&up.toml("s")?, &[]).await?;
    let client = open(&gateway).await?;
    gateway.stop().await?;
    let (state, foreign) = (gateway.state_dir(), gateway.dir().join("foreign"));
    std::fs::write(&foreign, "of nobody")?;
    std::fs::set_permissions(&foreign, std::fs::Permissions::from_mode(0o666))?;
    chown(&foreign, Some(NOBODY), Some(NOBODY))?;
    for name in ["lock", "gateway.json", "gateway.json.draft", "admin.token", "ledger.db", "keys/planted", "logs/s.log"]
    {
        let (planted, kept) = (state.join(name), gateway.dir().join("kept"));
        let had = std::fs::rename(&planted, &kept).is_ok();
        symlink(&foreign, &planted)?;
        assert_told(&serve(&state, &[])?, 1, &[name, "65534", "hint:"]);
        std::fs::remove_file(&planted)?;
        std::fs::copy(&foreign, &planted)?;
        chown(&planted, Some(NOBODY), Some(NOBODY))?;
        assert_told(&serve(&state, &[])?, 1, &[name, "65534", "hint:"]);
        std::fs::remove_file(&planted)?;
        if had {
            std::fs::rename(&kept, &planted)?;
        }
    }
    assert_eq!(std::fs::read(&foreign)?, b"of nobody");
    assert_eq!(std::fs::metadata(&foreign)?.permissions().mode() & 0o777, 0o666);
    chown(&state, Some(NOBODY), Some(NOBODY))?;
    assert_told(&serve(&state, &[])?, 1, &["belongs to user 65534", "hint:"]);
    chown(&state, Some(0), Some(0))?;
    start_and_use(&mut gateway, &client).await
}

#[tokio::test]
async fn t6_a_part_that_can_not_be_read_stops_the_start_with_its_name() -> Result<()> {
    let up = UpS::new(&[])?;
    let mut gateway = Gateway::start(&up.toml("s")?, &[]).await?;
    let client = open(&gateway).await?;
    gateway.stop().await?;
    let state = gateway.state_dir();
    for (name, words) in [
        ("lock", &["lock"][..]),
        ("admin.token", &["admin.token"]),
        ("gateway.json", &["gateway.json"]),
        ("ledger.db", &["ledger"]),
        ("keys", &["keys"]),
    ] {
        let (part, kept) = (state.join(name), gateway.dir().join("kept"));
        let had = std::fs::rename(&part, &kept).is_ok();
        // Even root can't read a directory as a file, nor the other way round.
        if name == "keys" {
            std::fs::write(&part, "no folder")?
        } else {
            std::fs::create_dir(&part)?
        }
        assert_told(&serve(&state, &[])?, 1, words);
        if name == "keys" {
            std::fs::remove_file(&part)?
        } else {
            std::fs::remove_dir_all(&part)?
        }
        if had {
            std::fs::rename(&kept, &part)?;
        }
    }
    start_and_use(&mut gateway, &client).await
}

#[tokio::test]
async fn t6_a_ledger_that_is_none_is_refused_and_kept() -> Result<()> {
    let up = UpS::new(&[])?;
    let mut gateway = Gateway::start(&up.toml("s")?, &[]).await?;
    gateway.stop().await?;
    let (state, kept) = (gateway.state_dir(), gateway.dir().join("kept"));
    let ledger = state.join("ledger.db");
    // All three files are the ledger.
    std::fs::create_dir(&kept)?;
    for name in ["ledger.db", "ledger.db-wal", "ledger.db-shm"] {
        if state.join(name).exists() {
            std::fs::rename(state.join(name), kept.join(name))?;
        }
    }
    std::fs::write(&ledger, "this is no database, but longer than its head would be ".repeat(50))?;
    assert_told(&serve(&state, &[])?, 1, &["gave up", "ledger.db"]);
    assert!(std::fs::read_to_string(&ledger)?.starts_with("this is no database"));
    for entry in std::fs::read_dir(&kept)? {
        let entry = entry?;
        std::fs::rename(entry.path(), state.join(entry.file_name()))?;
    }
    gateway.start_again().await
}

/// Becomes the gateway on a disk of this size, mounted over its state directory in a namespace of its own.
const ON_A_SMALL_DISK: &str = "mount -t tmpfs -o mode=700,size=\"$1\" tmpfs \"$2\" || exit 99; shift 2; exec \"$@\"";

#[tokio::test]
async fn t6_a_full_disk_at_the_start_is_said() -> Result<()> {
    let permitted = Command::new("unshare").args(["--mount", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]).output();
    if !permitted.is_ok_and(|output| output.status.success()) {
        eprintln!("not run: this machine permits no mounts");
        return Ok(());
    }
    let up = UpS::new(&[])?;
    for size in ["4k", "8k", "12k", "16k", "24k"] {
        let mut gateway = Wrapped::new(&up.toml("s")?)?;
        let state = gateway.state_dir().display().to_string();
        gateway.start(&["unshare", "--mount", "sh", "-c", ON_A_SMALL_DISK, "sh", size, &state], |_| ())?;
        wait_until("the reason", BOUND, async || {
            let log = gateway.log();
            log.contains("No space left") || log.contains("is full") || log.contains("disk full")
        })
        .await
        .with_context(|| format!("{size}: {}", gateway.log()))?;
    }
    Ok(())
}
