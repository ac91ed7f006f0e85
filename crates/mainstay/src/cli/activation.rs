//! Listening sockets that the service manager has bound and passes on (`sd_listen_fds(3)`).
//!
//! It holds them while the gateway is away: clients that connect meanwhile wait instead of being refused.

use std::net::TcpListener;

use anyhow::{Context as _, anyhow};
use listenfd::ListenFd;
use rustix::net::sockopt::socket_acceptconn;

use super::ServeArgs;
use super::failure::Failure;
use super::gateway::Gateway;
use crate::config::{Config, ListenAddress, environment};

/// The sockets that were passed on.
#[derive(Debug, Default)]
pub(super) struct Passed {
    /// Where MCP clients connect.
    pub(super) mcp: Option<TcpListener>,
    /// The admin port.
    pub(super) admin: Option<TcpListener>,
}

impl Passed {
    /// Takes what the service manager passes to this process, if it does; once, before anything else opens a file. No
    /// process that is started later inherits them.
    ///
    /// # Errors
    /// Exit code 2: more sockets than Mainstay has use for, or something that is no listening TCP socket.
    pub(super) fn take() -> Result<Self, Failure> {
        if environment::process(LISTEN_PID) != Some(std::process::id().to_string()) {
            return Ok(Self::default());
        }
        let count = environment::process(LISTEN_FDS).unwrap_or_default();
        let count: usize = count.parse().map_err(|_| unusable(anyhow!("`{LISTEN_FDS}` is no number: `{count}`")))?;
        let roles = roles(environment::process(LISTEN_FDNAMES).as_deref(), count).map_err(unusable)?;
        let mut given = ListenFd::from_env();
        let mut passed = Self::default();
        for (index, role) in roles.iter().enumerate() {
            let listener = listener(&mut given, index).map_err(unusable)?;
            match role {
                Role::Mcp => passed.mcp = Some(listener),
                Role::Admin => passed.admin = Some(listener),
            }
        }
        Ok(passed)
    }

    /// What the sockets are for: `mcp`, `admin`.
    pub(super) fn names(&self) -> Vec<String> {
        let sockets = [(MCP, &self.mcp), (ADMIN, &self.admin)];
        sockets.into_iter().filter(|(_, socket)| socket.is_some()).map(|(name, _)| name.to_owned()).collect()
    }

    /// Lets the addresses of the sockets outweigh whatever else says where to listen, so that every rule about addresses
    /// is applied to where the gateway can really be reached.
    ///
    /// # Errors
    /// The system does not tell an address.
    pub(super) fn outweigh(&self, args: &mut ServeArgs) -> Result<(), Failure> {
        for (socket, address) in [(&self.mcp, &mut args.source.listen), (&self.admin, &mut args.source.admin)] {
            if let Some(socket) = socket {
                *address = Some(ListenAddress(socket.local_addr()?));
            }
        }
        Ok(())
    }
}

/// Lets the addresses of the sockets that `gateway` was given, which are those of the settings in force, outweigh what
/// else says where to listen: as [`Passed::outweigh`] did at its start.
pub(super) fn still_outweigh(gateway: &Gateway, in_force: &Config, args: &mut ServeArgs) {
    for (name, address, arg) in
        [(MCP, in_force.listen, &mut args.source.listen), (ADMIN, in_force.admin.listen, &mut args.source.admin)]
    {
        if gateway.activated.iter().any(|activated| activated == name) {
            *arg = Some(ListenAddress(address));
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Mcp,
    Admin,
}

/// What each of `count` sockets is for: by its name if names are `mcp` and `admin`, else by its place. A unit's sockets
/// that were given no name all bear that of the unit.
fn roles(names: Option<&str>, count: usize) -> anyhow::Result<Vec<Role>> {
    let in_order = [Role::Mcp, Role::Admin];
    let Some(by_place) = in_order.get(..count) else {
        anyhow::bail!("{count} sockets are passed, and there is use for `mcp` and `admin` only");
    };
    let names: Vec<&str> = names.unwrap_or_default().split(':').collect();
    let role = |name: &str| match name {
        MCP => Some(Role::Mcp),
        ADMIN => Some(Role::Admin),
        _ => None,
    };
    if !names.iter().any(|name| role(name).is_some()) {
        return Ok(by_place.to_vec());
    }
    let by_name: Option<Vec<Role>> = names.iter().map(|name| role(name)).collect();
    match by_name {
        Some(roles) if roles.len() == count && (count < 2 || roles[0] != roles[1]) => Ok(roles),
        _ => anyhow::bail!("the names of {count} sockets are `{}`, not `mcp` and `admin`", names.join(":")),
    }
}

fn listener(given: &mut ListenFd, index: usize) -> anyhow::Result<TcpListener> {
    let place = index + 1;
    let listener = given.take_tcp_listener(index).with_context(|| format!("take socket {place}"))?;
    let listener = listener.ok_or_else(|| anyhow!("socket {place} is not there"))?;
    if !socket_acceptconn(&listener).with_context(|| format!("examine socket {place}"))? {
        anyhow::bail!("socket {place} does not listen (a socket unit needs `Accept=no`)");
    }
    Ok(listener)
}

fn unusable(cause: anyhow::Error) -> Failure {
    Failure::usage(cause.context("use the sockets of the service manager"))
        .hint("a socket unit has one or two `ListenStream=` with TCP addresses: MCP first, admin second")
}

const MCP: &str = "mcp";
const ADMIN: &str = "admin";
const LISTEN_PID: &str = "LISTEN_PID";
const LISTEN_FDS: &str = "LISTEN_FDS";
const LISTEN_FDNAMES: &str = "LISTEN_FDNAMES";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn o6_sockets_are_told_apart_by_name_else_by_place() {
        let known = |names, count| roles(names, count).unwrap();
        assert_eq!(known(None, 0), []);
        assert_eq!(known(None, 1), [Role::Mcp]);
        assert_eq!(known(Some("mainstay.socket:mainstay.socket"), 2), [Role::Mcp, Role::Admin]);
        assert_eq!(known(Some("admin:mcp"), 2), [Role::Admin, Role::Mcp]);
        assert_eq!(known(Some("admin"), 1), [Role::Admin]);
    }

    #[test]
    fn o6_what_can_not_be_told_apart_is_refused() {
        for (names, count) in [
            (None, 3),
            (Some("mcp:mcp"), 2),
            (Some("mcp:other"), 2),
            (Some("mcp"), 2),
            (Some("mcp:admin"), 1),
            (None, usize::MAX),
        ] {
            assert!(roles(names, count).is_err(), "{names:?} {count}");
        }
    }
}
