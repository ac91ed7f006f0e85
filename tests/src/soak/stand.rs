//! The servers, the gateway in front of them, and the clients.

use super::load::{Call, Fate};
use super::report::Report;
use crate::gateway::{Gateway, Setup};
use crate::procs::zombies;
use crate::raw::RawClient;
use crate::upstreams::{UpH, UpS};
use anyhow::{Result, ensure};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;
use tempfile::TempDir;

/// A server behind the gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Server {
    /// HTTP, answering with JSON: nothing of a call can be taken up again.
    Json,
    /// HTTP, answering with events that have ids: streams can be taken up again.
    Ids,
    /// Standard input and output, a child for each session.
    Own,
    /// The same below a shell, with noise on standard output.
    Below,
}

impl Server {
    /// All of them.
    pub const ALL: [Server; 4] = [Server::Json, Server::Ids, Server::Own, Server::Below];

    /// Its name in the configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Server::Json => "json",
            Server::Ids => "ids",
            Server::Own => "own",
            Server::Below => "below",
        }
    }
}

/// One client in its session.
#[derive(Debug, Clone)]
pub(super) struct Client {
    pub(super) number: usize,
    pub(super) server: Server,
    pub(super) raw: RawClient,
}

/// Everything that runs.
pub(super) struct Stand {
    pub(super) gateway: Gateway,
    pub(super) clients: Vec<Client>,
    program: PathBuf,
    config: String,
    reloads: usize,
    json: UpH,
    ids: UpH,
    own: UpS,
    below: UpS,
    // The program that upgrades replace lies here.
    _dir: TempDir,
}

impl Stand {
    /// Starts servers and gateway, and opens a session for each client. Every second client uses each connection once.
    pub(super) async fn start(clients: usize) -> Result<Stand> {
        let (json, ids) = (UpH::start().await?, UpH::start().await?);
        ids.order("/answer", json!({"mode": "sse-with-ids"})).await?;
        for up in [&json, &ids] {
            up.order("/log", json!({"pause": true})).await?;
        }
        let (own, below) = (UpS::new(&[])?, UpS::new(&["--grandchild", "--noise"])?);
        let config = format!(
            "{}{}{}{}",
            json.toml(Server::Json.name()),
            ids.toml(Server::Ids.name()),
            own.toml(Server::Own.name())?,
            below.toml(Server::Below.name())?
        );
        let dir = TempDir::with_prefix("soak-")?;
        let program = dir.path().join("mainstay");
        install(&program)?;
        let gateway = Setup::new(&config).binary(&program).start().await?;
        let mut opened = Vec::new();
        for number in 0..clients {
            let server = Server::ALL[number % Server::ALL.len()];
            let mut raw = RawClient::open(&gateway.url(server.name())?, VERSION).await?;
            if number / Server::ALL.len() % 2 == 1 {
                raw = raw.with_fresh_connections()?;
            }
            opened.push(Client { number, server, raw });
        }
        let (clients, reloads) = (opened, 0);
        Ok(Stand { gateway, clients, program, config, reloads, json, ids, own, below, _dir: dir })
    }

    /// Changes a setting that concerns no call, and puts it in force.
    pub(super) async fn reload(&mut self) -> Result<()> {
        self.reloads += 1;
        let retention = format!("[session]\ntombstone_retention = \"{}h\"\n", 24 + self.reloads);
        self.gateway.rewrite_config(&format!("{}{retention}", self.config))?;
        self.order("reload").await
    }

    /// Replaces the program by another file under the same name, and puts it in force.
    pub(super) async fn upgrade(&mut self) -> Result<()> {
        install(&self.program)?;
        self.order("upgrade").await
    }

    async fn order(&self, order: &str) -> Result<()> {
        let output = self.gateway.cli(&[order]).await?;
        ensure!(output.status.success(), "`{order}`: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    /// What each session is at its server: its process, and its name there.
    pub(super) async fn identities(&self) -> Result<Vec<(Value, Value)>> {
        let mut found = Vec::new();
        for client in &self.clients {
            let who = client.raw.call_through("whoami", json!({})).await?.json()?;
            found.push((who["pid"].clone(), who["session"].clone()));
        }
        Ok(found)
    }

    /// Compares what the servers executed with what the clients were told.
    pub(super) async fn executions(&self, calls: &[Call], report: &mut Report) -> Result<()> {
        for server in Server::ALL {
            let of = |tool: Option<&str>| -> Vec<&Call> {
                calls
                    .iter()
                    .filter(|call| {
                        call.server == server && call.tool != "GET" && tool.is_none_or(|tool| tool == call.tool)
                    })
                    .collect()
            };
            report.ran(server, "incr", &of(Some("incr")), &tags(&self.incr_lines(server)?));
            match server {
                Server::Own => report.ran(server, "any tool", &of(None), &self.traced(&self.own)?),
                Server::Below => report.ran(server, "any tool", &of(None), &self.traced(&self.below)?),
                Server::Json | Server::Ids => {
                    let up = if server == Server::Json { &self.json } else { &self.ids };
                    for tool in ["echo", "slow", "prog"] {
                        report.ran_in_all(server, tool, &of(Some(tool)), up.executions(tool).await?);
                    }
                    let (opened, sessions) = (up.count("/initializes").await?, self.sessions(server));
                    report.same(&format!("{} sessions were made at `{}`", sessions, server.name()), sessions, opened);
                }
            }
        }
        let children = |up: &UpS| anyhow::Ok(up.starts()?.len() as u64);
        report.same("children of `own`", self.sessions(Server::Own), children(&self.own)?);
        report.same("children of `below`", self.sessions(Server::Below), children(&self.below)?);
        Ok(())
    }

    /// Stops the gateway and looks for what is left.
    pub(super) async fn stop(&mut self, report: &mut Report) -> Result<()> {
        let left = zombies(self.gateway.keeper_pid()?);
        report.same("zombies at the end", 0, left.len() as u64);
        report.log(&self.gateway.log());
        let status = self.gateway.stop().await?;
        ensure!(status.success(), "the gateway ended with {status}");
        if let Err(error) = self.gateway.assert_no_orphans().await {
            report.fault(format!("{error:#}"));
        }
        Ok(())
    }

    fn sessions(&self, server: Server) -> u64 {
        self.clients.iter().filter(|client| client.server == server).count() as u64
    }

    fn incr_lines(&self, server: Server) -> Result<Vec<String>> {
        match server {
            Server::Json => self.json.incr_lines(),
            Server::Ids => self.ids.incr_lines(),
            Server::Own => self.own.incr_lines(),
            Server::Below => self.below.incr_lines(),
        }
    }

    /// How often each tag reached a child.
    fn traced(&self, up: &UpS) -> Result<BTreeMap<String, u64>> {
        let mut counted = BTreeMap::new();
        for entry in up.trace()? {
            let params = &entry["line"]["params"];
            let arguments = &params["arguments"];
            let word = if params["name"] == "echo" { &arguments["text"] } else { &arguments["tag"] };
            if let Some(tag) = word.as_str() {
                *counted.entry(tag.to_owned()).or_default() += 1;
            }
        }
        Ok(counted)
    }
}

/// Puts the gateway's program there, as a package manager does: under the same name, never into the same file.
fn install(program: &std::path::Path) -> Result<()> {
    crate::write_program(program, &std::fs::read(crate::binaries::mainstay()?)?)
}

/// The tag is the last word of a line of `incr`.
fn tags(lines: &[String]) -> BTreeMap<String, u64> {
    let mut counted = BTreeMap::new();
    for tag in lines.iter().filter_map(|line| line.split(' ').nth(TAG_WORD)) {
        *counted.entry(tag.to_owned()).or_default() += 1;
    }
    counted
}

/// Whether the answer of a call that was `age` old when its worker died can be given by nobody: nothing was said to its
/// client, or its server has no streams to take up, or might not have said yet where the call's stream is.
pub(super) fn is_excused(call: &Call, age: Duration) -> bool {
    match &call.fate {
        Fate::CutBeforeHead => true,
        Fate::Told(outcome) if outcome == "outcome_unknown" => match call.server {
            Server::Json => true,
            Server::Ids => age < STREAM_KNOWN_AFTER,
            Server::Own | Server::Below => false,
        },
        Fate::Answered | Fate::Incomplete(_) | Fate::Told(_) => false,
        Fate::CutAfterHead | Fate::Refused | Fate::Wrong(_) | Fate::Lost(_) => false,
    }
}

const VERSION: &str = "2025-11-25";
const TAG_WORD: usize = 3;
/// How long a busy machine may take for the head of a server's answer.
const STREAM_KNOWN_AFTER: Duration = Duration::from_secs(1);
