//! The suite's client scenarios, whose servers a client reaches through a gateway.

use super::{BOUND, RUNS_MAX, node};
use crate::binaries::repository;
use anyhow::{Context as _, Result, bail};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;
use tokio::task::{JoinHandle, JoinSet};

/// Where a gateway finds the server of a scenario: a port that is there before the suite has started that server, and
/// leads to it once the client has noted where it is.
#[derive(Debug)]
pub struct Forwarder {
    /// Where it listens.
    pub address: SocketAddr,
    note: PathBuf,
    task: JoinHandle<()>,
}

impl Forwarder {
    /// Starts one that reads where to go in the file `note`.
    ///
    /// # Errors
    /// If no port is free.
    pub async fn start(note: &Path) -> Result<Forwarder> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let task = tokio::spawn(accept(listener, note.to_owned()));
        Ok(Forwarder { address, note: note.to_owned(), task })
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(listener: TcpListener, note: PathBuf) {
    // Dropped with this task, and with them every connection.
    let mut connections = JoinSet::new();
    while let Ok((from, _)) = listener.accept().await {
        while connections.try_join_next().is_some() {}
        let note = note.clone();
        connections.spawn(async move {
            // What can't be carried is a server that is not there, which its client sees by the end of the connection.
            let _ended = carry(from, &note).await;
        });
    }
}

async fn carry(mut from: TcpStream, note: &Path) -> Result<()> {
    let port: u16 = tokio::fs::read_to_string(note).await?.trim().parse()?;
    let mut to = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
    tokio::io::copy_bidirectional(&mut from, &mut to).await?;
    Ok(())
}

/// A client of the TypeScript SDK that goes to a server of the suite through a gateway.
#[derive(Debug, Clone, Copy)]
pub struct ClientRun<'a> {
    /// The revision that the suite's server speaks.
    pub revision: &'a str,
    /// What it tests.
    pub scenario: &'a str,
    /// How the client speaks to the gateway: `legacy` or `modern`.
    pub era: &'a str,
    /// The gateway's endpoint.
    pub url: &'a str,
    /// The way from the gateway to the suite's server.
    pub forwarder: &'a Forwarder,
}

impl ClientRun<'_> {
    /// Runs it. As with [`run_suite`](super::run_suite), what fails is run again.
    ///
    /// # Errors
    /// If it does not run, or does not pass.
    pub async fn pass(&self) -> Result<()> {
        let mut said = String::new();
        for _ in 0..RUNS_MAX {
            let (passed, summary) = self.once().await?;
            if passed {
                return Ok(());
            }
            said = summary;
        }
        bail!("`{}` of a {} client: {said}", self.scenario, self.era)
    }

    async fn once(&self) -> Result<(bool, String)> {
        let (node, modules) = node()?;
        let client = repository().join("tests/clients/conformance-client.mjs");
        let out = tempfile::tempdir()?;
        let output = Command::new(&node)
            .arg(modules.join("@modelcontextprotocol/conformance/dist/index.js"))
            .args(["client", "--scenario", self.scenario, "--spec-version", self.revision, "--command"])
            .arg(format!("{} {}", node.display(), client.display()))
            .arg("-o")
            .arg(out.path())
            .env("GATEWAY_URL", self.url)
            .env("TARGET_NOTE", &self.forwarder.note)
            .env("CLIENT_ERA", self.era)
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output();
        let output = tokio::time::timeout(BOUND, output).await.context("the suite does not end")??;
        let said = [output.stdout, output.stderr].concat();
        Ok((output.status.success(), String::from_utf8_lossy(&said).into_owned()))
    }
}
