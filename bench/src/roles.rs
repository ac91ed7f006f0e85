//! The processes beside the benchmark's own: the same program in another role. Each says on its standard output where it
//! listens, and ends when its standard input does, however the benchmark ends.

mod child;
mod proxy;
mod upstream;

use anyhow::{Context as _, Result, bail};
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Child, Command, Stdio};
use tokio::io::AsyncReadExt as _;
use tokio::net::{TcpListener, TcpStream};

/// Plays a role, if these arguments name one. Returns whether they did.
///
/// # Errors
/// What keeps it from playing on.
pub(crate) fn play(arguments: &[String]) -> Result<bool> {
    match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        [CHILD] => child::run().map(|()| true),
        [UPSTREAM] => block_on(upstream::run()),
        [PROXY, to] => {
            let to = to.parse().context("where to")?;
            block_on(proxy::run(to))
        }
        _ => Ok(false),
    }
}

/// With the settings of the gateway's worker, so that no target has more threads than another.
fn block_on(role: impl Future<Output = Result<()>>) -> Result<bool> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        tokio::select! {
            ended = role => ended.map(|()| true),
            () = until_stdin_closes() => Ok(true),
        }
    })
}

async fn until_stdin_closes() {
    let mut stdin = tokio::io::stdin();
    let mut said = [0; 64];
    while let Ok(1..) = stdin.read(&mut said).await {}
}

/// Listens on a free port and says which.
async fn listen() -> Result<TcpListener> {
    let listener = TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).await?;
    let mut stdout = std::io::stdout();
    writeln!(stdout, "{}", listener.local_addr()?)?;
    stdout.flush()?;
    Ok(listener)
}

/// The next connection, without Nagle's delay.
async fn accept(listener: &TcpListener) -> Result<TcpStream> {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            // The connection was gone before it was taken.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionAborted => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// A process in a role. It is ended when the handle goes.
#[derive(Debug)]
pub(crate) struct Role {
    child: Child,
    /// Where it listens.
    pub(crate) address: SocketAddr,
}

impl Role {
    /// Starts the server behind every target.
    pub(crate) fn upstream() -> Result<Role> {
        Role::start(&[UPSTREAM])
    }

    /// Starts the plain hop to an address.
    pub(crate) fn proxy(to: SocketAddr) -> Result<Role> {
        Role::start(&[PROXY, &to.to_string()])
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    fn start(arguments: &[&str]) -> Result<Role> {
        let mut command = Command::new(std::env::current_exe()?);
        let mut child = command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut said = String::new();
        let stdout = child.stdout.take().context("its output")?;
        BufReader::new(stdout).read_line(&mut said)?;
        let Ok(address) = said.trim().parse() else {
            let _already_gone = child.kill();
            let _reaped = child.wait();
            bail!("`{}` did not say where it listens: {said}", arguments.join(" "));
        };
        Ok(Role { child, address })
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        let _already_gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// The stdio server that the gateway starts.
pub(crate) const CHILD: &str = "child";
const UPSTREAM: &str = "upstream";
const PROXY: &str = "proxy";
