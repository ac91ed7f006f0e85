//! The gateway below a service manager: it says what happens to it, and takes the sockets that are held for it (O6, T1).

use anyhow::{Context as _, Result, ensure};
use mainstay_tests::{Gateway, Proc, RawClient, Setup, UpS, Wrapped, children, repository, wait_until};
use rustix::process::Signal;
use serde_json::json;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr as UnixAddress, UnixDatagram};
use std::process::{Command, Stdio};
use std::time::Duration;

const VERSION: &str = "2025-11-25";
const BOUND: Duration = Duration::from_secs(20);
/// What a service manager says to the one process that it starts.
const VARIABLES: [&str; 6] =
    ["NOTIFY_SOCKET=", "WATCHDOG_USEC=", "WATCHDOG_PID=", "LISTEN_FDS=", "LISTEN_PID=", "LISTEN_FDNAMES="];
/// Becomes the gateway, with standard input and output as the sockets that are passed on.
const PASS_ON: &str = "exec 3<&0 4<&1 </dev/null >/dev/null; LISTEN_PID=$$ exec \"$0\" \"$@\"";

/// A service manager that listens.
struct Manager {
    socket: UnixDatagram,
}

impl Manager {
    fn at(address: &UnixAddress) -> Result<Manager> {
        let socket = UnixDatagram::bind_addr(address)?;
        socket.set_nonblocking(true)?;
        Ok(Manager { socket })
    }

    /// Waits for a message with this line. Those before it are passed over.
    async fn hear(&self, line: &str) -> Result<String> {
        let mut heard = None;
        wait_until(&format!("`{line}`"), BOUND, async || {
            let mut bytes = [0; 1024];
            while let Ok(length) = self.socket.recv(&mut bytes) {
                let text = String::from_utf8_lossy(&bytes[..length]).into_owned();
                if text.lines().any(|said| said == line) {
                    heard = Some(text);
                    return true;
                }
            }
            false
        })
        .await?;
        heard.context("heard")
    }
}

fn assert_told_nothing(process: Proc) {
    let told: Vec<String> = process.environment();
    assert!(!told.is_empty(), "its environment can be read");
    let of_manager = |entry: &&String| VARIABLES.iter().any(|name| entry.starts_with(name));
    assert_eq!(told.iter().find(of_manager), None, "{:?}", process.arguments());
}

#[tokio::test]
async fn o6_the_service_manager_hears_of_readiness_life_and_end() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("notify");
    let unique = format!("mainstay-test-{}", std::process::id());
    for (name, address) in [
        (path.display().to_string(), UnixAddress::from_pathname(&path)?),
        (format!("@{unique}"), UnixAddress::from_abstract_name(&unique)?),
    ] {
        let manager = Manager::at(&address)?;
        let up = UpS::new(&[])?;
        let setup = Setup::new(&up.toml("s")?).env("NOTIFY_SOCKET", &name).env("WATCHDOG_USEC", "200000");
        let mut gateway = setup.start().await?;
        let status = manager.hear("READY=1").await?;
        assert!(status.contains("STATUS=serving on 127.0.0.1:"), "{status}");
        for _ in 0..3 {
            manager.hear("WATCHDOG=1").await?;
        }
        gateway.kill_worker().await?;
        manager.hear("READY=1").await?;
        let client = RawClient::open(&gateway.url("s")?, VERSION).await?;
        client.call_through("whoami", json!({})).await?.result()?;
        assert_told_nothing(Proc::of(gateway.worker().await?.pid).context("the worker runs")?);
        assert_told_nothing(up.starts()?[0]);
        gateway.signal(Signal::TERM)?;
        manager.hear("STOPPING=1").await?;
        assert!(gateway.wait_for_end(BOUND).await?.success());
    }
    Ok(())
}

#[tokio::test]
async fn o6_t2_a_handover_is_told_as_a_reload_and_the_sockets_stay() -> Result<()> {
    let unique = format!("mainstay-handover-{}", std::process::id());
    let manager = Manager::at(&UnixAddress::from_abstract_name(&unique)?)?;
    let up = UpS::new(&[])?;
    let mut gateway = Wrapped::new(&up.toml("s")?)?;
    let [mcp, admin] = sockets()?;
    let notify = format!("@{unique}");
    pass_on(&mut gateway, mcp.try_clone()?.into(), admin.try_clone()?.into(), &[("NOTIFY_SOCKET", &notify)])?;
    let url = gateway.ready("s").await?;
    let client = RawClient::open(&url, VERSION).await?;
    let before = client.call_through("whoami", json!({})).await?.json()?;
    manager.hear("READY=1").await?;
    let keeper = Proc::of(gateway.pid()?).context("it runs")?;
    for _ in 0..2 {
        assert!(keeper.signal(Signal::HUP));
        let begun = manager.hear("RELOADING=1").await.with_context(|| gateway.log())?;
        assert!(begun.contains("MONOTONIC_USEC="), "{begun}");
        manager.hear("READY=1").await.with_context(|| gateway.log())?;
        assert!(keeper.is_alive(), "it is the same process");
        let after = client.call_through("whoami", json!({})).await?.json()?;
        assert_eq!(after["pid"], before["pid"], "{}", gateway.log());
    }
    assert!(!gateway.log().contains("a handover is refused"), "{}", gateway.log());
    Ok(())
}

#[tokio::test]
async fn o6_a_manager_that_is_not_there_hinders_nothing() -> Result<()> {
    for name in ["/nowhere/notify", "@mainstay-nobody-listens", "vsock:2:1234", "relative"] {
        let up = UpS::new(&[])?;
        let mut gateway = Setup::new(&up.toml("s")?).env("NOTIFY_SOCKET", name).start().await?;
        assert!(gateway.stop().await?.success(), "{name}");
    }
    Ok(())
}

/// Two sockets as a service manager holds them: it never closes them.
fn sockets() -> Result<[TcpListener; 2]> {
    Ok([TcpListener::bind("127.0.0.1:0")?, TcpListener::bind("127.0.0.1:0")?])
}

fn pass_on(gateway: &mut Wrapped, first: OwnedFd, second: OwnedFd, more: &[(&str, &str)]) -> Result<()> {
    gateway.start(&["sh", "-c", PASS_ON], |command| {
        command.stdin(Stdio::from(first)).stdout(Stdio::from(second)).env("LISTEN_FDS", "2");
        command.envs(more.iter().copied());
    })
}

/// Whether a process has this very socket open.
fn holds(process: Proc, inode: u64) -> bool {
    let open = std::fs::read_dir(format!("/proc/{}/fd", process.pid)).into_iter().flatten().flatten();
    let wanted = format!("socket:[{inode}]");
    open.filter_map(|entry| std::fs::read_link(entry.path()).ok()).any(|target| target.as_os_str() == &*wanted)
}

fn inode(socket: &TcpListener) -> Result<u64> {
    Ok(rustix::fs::fstat(socket)?.st_ino)
}

#[tokio::test]
async fn o6_t1_sockets_of_the_service_manager_outlive_the_gateway_and_no_client_is_refused() -> Result<()> {
    let up = UpS::new(&[])?;
    let mut gateway = Wrapped::new(&up.toml("s")?)?;
    let [mcp, admin] = sockets()?;
    let start = |gateway: &mut Wrapped| pass_on(gateway, mcp.try_clone()?.into(), admin.try_clone()?.into(), &[]);
    start(&mut gateway)?;
    let url = gateway.ready("s").await?;
    let said = gateway.published().context("published")?;
    assert_eq!(said["mcp"], mcp.local_addr()?.to_string(), "they outweigh `--listen`");
    assert_eq!(said["admin"], admin.local_addr()?.to_string());
    let client = RawClient::open(&url, VERSION).await?.with_fresh_connections()?;
    client.call_through("whoami", json!({})).await?.result()?;

    let server = up.starts()?[0];
    let keeper = gateway.pid()?;
    let worker =
        *children(keeper).iter().find(|child| child.arguments().iter().any(|a| a == "worker")).context("one")?;
    assert_told_nothing(worker);
    assert_told_nothing(server);
    for socket in [&mcp, &admin] {
        assert!(holds(worker, inode(socket)?), "handed to the worker");
        assert!(!holds(server, inode(socket)?), "and to no server");
    }

    assert!(Proc::of(keeper).is_some_and(|keeper| keeper.signal(Signal::TERM)));
    assert!(gateway.wait_for_end().await?.success());
    let waiting = tokio::spawn(async move { client.call_through("echo", json!({"text": "patient"})).await });
    start(&mut gateway)?;
    assert_eq!(waiting.await??.text()?, "patient", "the connection waited for the next gateway");
    Ok(())
}

#[tokio::test]
async fn o6_sockets_are_told_apart_by_their_names() -> Result<()> {
    let up = UpS::new(&[])?;
    let mut gateway = Wrapped::new(&up.toml("s")?)?;
    let [mcp, admin] = sockets()?;
    pass_on(&mut gateway, admin.try_clone()?.into(), mcp.try_clone()?.into(), &[("LISTEN_FDNAMES", "admin:mcp")])?;
    let url = gateway.ready("s").await?;
    assert!(url.contains(&mcp.local_addr()?.to_string()), "{url}");
    RawClient::open(&url, VERSION).await?;
    Ok(())
}

#[tokio::test]
async fn o6_i1_sockets_that_can_not_be_used_are_refused_with_the_reason() -> Result<()> {
    let [mcp, _] = sockets()?;
    let anywhere: OwnedFd = TcpListener::bind("0.0.0.0:0")?.into();
    let datagrams: OwnedFd = UdpSocket::bind("127.0.0.1:0")?.into();
    let client: OwnedFd = std::net::TcpStream::connect(mcp.local_addr()?)?.into();
    let one = || anyhow::Ok(OwnedFd::from(TcpListener::bind("127.0.0.1:0")?));
    for (first, second, more, reason) in [
        (one()?, one()?, &[("LISTEN_FDS", "3")][..], "3 sockets are passed"),
        (one()?, one()?, &[("LISTEN_FDS", "many")], "is no number"),
        (one()?, one()?, &[("LISTEN_FDNAMES", "mcp:other")], "the names of 2 sockets"),
        (datagrams, one()?, &[], "socket 1"),
        (one()?, client, &[], "does not listen"),
        (anywhere, one()?, &[], "can be reached from elsewhere"),
    ] {
        let up = UpS::new(&[])?;
        let mut gateway = Wrapped::new(&up.toml("s")?)?;
        pass_on(&mut gateway, first, second, more)?;
        assert_eq!(gateway.wait_for_end().await?.code(), Some(2), "{reason}: {}", gateway.log());
        let log = gateway.log();
        assert!(log.contains(reason) && log.contains("hint:"), "{reason}: {log}");
    }
    Ok(())
}

#[tokio::test]
async fn o6_sockets_for_another_process_are_left_alone() -> Result<()> {
    let up = UpS::new(&[])?;
    let setup = Setup::new(&up.toml("s")?).env("LISTEN_FDS", "2").env("LISTEN_PID", "1");
    let gateway: Gateway = setup.start().await?;
    let client = RawClient::open(&gateway.url("s")?, VERSION).await?;
    client.call_through("whoami", json!({})).await?.result()?;
    assert_told_nothing(Proc::of(gateway.worker().await?.pid).context("the worker runs")?);
    assert_told_nothing(up.starts()?[0]);
    Ok(())
}

/// Whether a program can be started at all.
fn has(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
}

#[tokio::test]
async fn o6_systemds_own_activation_starts_the_gateway_at_the_first_connection() -> Result<()> {
    if !has("systemd-socket-activate") {
        eprintln!("not run: there is no `systemd-socket-activate` here");
        return Ok(());
    }
    let up = UpS::new(&[])?;
    let mut gateway = Wrapped::new(&up.toml("s")?)?;
    let ports = [mainstay_tests::lasting_port()?, mainstay_tests::lasting_port()?];
    let [mcp, admin] = ports.map(|port: SocketAddr| port.to_string());
    let wrapper = ["systemd-socket-activate", "-l", &mcp, "-l", &admin, "--fdname=mcp:admin"];
    gateway.start(&wrapper, |_| ())?;
    wait_until("systemd to listen", BOUND, async || tokio::net::TcpStream::connect(ports[1]).await.is_ok()).await?;
    let mut client = RawClient::new(&format!("http://{mcp}/mcp/s"))?;
    client.establish(VERSION).await?.result()?;
    client.call_through("whoami", json!({})).await?.result()?;
    assert_eq!(gateway.published().context("published")?["keeper"], gateway.pid()?);
    Ok(())
}

#[test]
fn o6_the_units_are_right() -> Result<()> {
    let folder = repository().join("packaging/systemd");
    let service = std::fs::read_to_string(folder.join("mainstay.service"))?;
    let socket = std::fs::read_to_string(folder.join("mainstay.socket"))?;
    // What the gateway relies on.
    for line in ["Type=notify", "KillMode=mixed", "Restart=always", "RestartPreventExitStatus=2", "OOMPolicy=continue"]
    {
        assert!(service.lines().any(|written| written == line), "{line}");
    }
    // A reload is no upgrade, and says why it is refused.
    assert!(service.lines().any(|written| written == "ExecReload=/usr/bin/mainstay reload"));
    // What stdio servers would break of.
    for word in ["MemoryDenyWriteExecute", "RestrictNamespaces", "PrivateNetwork", "ProtectSystem=strict", "ProcSubset"]
    {
        assert!(!service.contains(word), "{word}");
    }
    assert_eq!(socket.matches("ListenStream=").count(), 2);
    if !has("systemd-analyze") {
        eprintln!("not run: there is no `systemd-analyze` here");
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    let program = mainstay_tests::mainstay()?.display().to_string();
    std::fs::write(dir.path().join("mainstay.service"), service.replace("/usr/bin/mainstay", &program))?;
    std::fs::write(dir.path().join("mainstay.socket"), socket)?;
    let verified = Command::new("systemd-analyze")
        .args(["verify", "--man=no"])
        .args(["mainstay.service", "mainstay.socket"].map(|name| dir.path().join(name)))
        .output()?;
    let said = String::from_utf8_lossy(&verified.stderr);
    ensure!(verified.status.success() && said.is_empty(), "{said}");
    Ok(())
}
