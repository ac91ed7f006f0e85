//! Everything that is measured: the server, and the ways to it.

use crate::nginx::Nginx;
use crate::roles::{CHILD, Role};
use crate::wire::Place;
use anyhow::{Result, anyhow};
use mainstay_tests::{Gateway, Setup};
use std::path::Path;

/// A way to the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Way {
    /// None between: what the hops add is counted from here.
    Direct,
    /// The plain hop on hyper: the yardstick.
    Hop,
    /// nginx as the same hop.
    Nginx,
    /// The gateway.
    Mainstay,
}

impl Way {
    /// Its name in the results.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Way::Direct => "direct",
            Way::Hop => "pass-through",
            Way::Nginx => "nginx",
            Way::Mainstay => "mainstay",
        }
    }
}

/// The server and the hops, running.
#[derive(Debug)]
pub(crate) struct Stand {
    /// The gateway with the servers `json`, `sse` and `child`.
    pub(crate) gateway: Gateway,
    upstream: Role,
    hop: Role,
    nginx: Result<Nginx>,
}

impl Stand {
    /// Starts everything.
    pub(crate) async fn start() -> Result<Stand> {
        let upstream = Role::upstream()?;
        let hop = Role::proxy(upstream.address)?;
        let nginx = Nginx::start(upstream.address);
        let gateway = start_gateway(&upstream, "").await?;
        Ok(Stand { gateway, upstream, hop, nginx })
    }

    /// The ways that there are.
    pub(crate) fn ways(&self) -> Vec<Way> {
        let all = [Way::Direct, Way::Hop, Way::Nginx, Way::Mainstay];
        all.into_iter().filter(|way| *way != Way::Nginx || self.nginx.is_ok()).collect()
    }

    /// The server's endpoint of this name on a way.
    pub(crate) fn place(&self, way: Way, server: &str) -> Result<Place> {
        let path = format!("/{server}");
        Ok(match way {
            Way::Direct => Place::new(self.upstream.address, &path),
            Way::Hop => Place::new(self.hop.address, &path),
            Way::Nginx => Place::new(self.nginx()?.address, &path),
            Way::Mainstay => place(&self.gateway, server)?,
        })
    }

    /// Why nginx is not among the ways.
    pub(crate) fn without_nginx(&self) -> String {
        self.nginx.as_ref().err().map(|error| format!("{error:#}")).unwrap_or_default()
    }

    fn nginx(&self) -> Result<&Nginx> {
        self.nginx.as_ref().map_err(|error| anyhow!("{error:#}"))
    }

    /// The processes of a hop.
    pub(crate) async fn pids(&self, way: Way) -> Result<Vec<u32>> {
        Ok(match way {
            Way::Direct => Vec::new(),
            Way::Hop => vec![self.hop.pid()],
            Way::Nginx => self.nginx()?.pids(),
            Way::Mainstay => vec![self.gateway.keeper_pid()?, self.gateway.worker().await?.pid],
        })
    }
}

/// A gateway of its own in front of a server, with more settings.
pub(crate) async fn start_gateway(upstream: &Role, session: &str) -> Result<Gateway> {
    Setup::new(&config(upstream, session)?).quiet().start().await
}

/// The same with a program that lies elsewhere.
pub(crate) async fn start_program(program: &Path, upstream: &Role) -> Result<Gateway> {
    Setup::new(&config(upstream, "")?).quiet().binary(program).start().await
}

/// One endpoint of a gateway.
pub(crate) fn place(gateway: &Gateway, server: &str) -> Result<Place> {
    Ok(Place::new(gateway.mcp_address()?, &format!("/mcp/{server}")))
}

/// Nothing is set that is not needed to open many sessions from one peer.
fn config(upstream: &Role, session: &str) -> Result<String> {
    let program = std::env::current_exe()?;
    let address = upstream.address;
    Ok(format!(
        "[limits]\ninitialize_per_minute = 0\n[session]\nmax_per_principal = 1000000\n{session}\
         [servers.json]\nurl = \"http://{address}/json\"\n[servers.sse]\nurl = \"http://{address}/sse\"\n\
         [servers.child]\ncommand = {program:?}\nargs = [\"{CHILD}\"]\n"
    ))
}
