//! `mainstay servers`.

use serde::{Deserialize, Serialize};

use super::Place;
use super::api::Api;
use super::failure::Failure;
use super::output::{Output, lines_of, table};

/// Lists the servers of a running gateway.
pub(super) fn list(place: &Place, out: &Output) -> Result<(), Failure> {
    let listed: Servers = Api::find(place)?.get("/servers")?;
    if out.is_json() {
        return out.document(&listed);
    }
    let mut shown = table(&["NAME", "TRANSPORT", "PATH", "SESSIONS", "IN FLIGHT"]);
    for server in listed.servers {
        let (sessions, calls) = (server.sessions.to_string(), server.calls.to_string());
        shown.add_row([server.name, server.transport, server.path, sessions, calls]);
    }
    out.line(&lines_of(&shown))
}

#[derive(Serialize, Deserialize)]
struct Servers {
    servers: Vec<Server>,
}

#[derive(Serialize, Deserialize)]
struct Server {
    name: String,
    transport: String,
    path: String,
    sessions: u64,
    calls: u64,
    #[serde(default)]
    seen: bool,
}
