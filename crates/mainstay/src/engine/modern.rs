//! Requests of modern clients (2026-07-28): whether they are served, and those that are passed on to modern servers: no
//! session, nothing to remember, and nothing to come back to.

pub mod attendance;
pub mod handed;
pub mod round;
pub mod task_ids;

use bytes::Bytes;
use mainstay_core::wire::modern::Era;
use mainstay_upstream::{Failure, Forwarded, Server, Stateless};

use self::handed::Handed;
use crate::engine::{Engine, Refused, Served, call};

/// Which era of the protocol an endpoint offers (E0).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Offer {
    /// Stateless requests where the server is modern, and sessions in any case.
    #[default]
    Auto,
    /// Sessions only.
    Legacy,
    /// Stateless requests, whatever the server is: where it needs sessions, through [conversations](super::conversation).
    Both,
}

/// How a stateless request is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// Not at all: this endpoint keeps sessions only.
    Not,
    /// It is passed on.
    PassedOn,
    /// It becomes part of a conversation with a server that needs sessions.
    InConversation,
}

impl Engine {
    /// How stateless requests are served at the endpoint of `served`. May ask a server for its era, once in a while.
    pub async fn modern_service(&self, served: &Served) -> Service {
        match served.offer {
            Offer::Legacy => Service::Not,
            Offer::Both | Offer::Auto if self.is_modern(served).await => Service::PassedOn,
            Offer::Both => Service::InConversation,
            Offer::Auto => Service::Not,
        }
    }

    /// Whether the server of `served` is known, or found, to be modern.
    async fn is_modern(&self, served: &Served) -> bool {
        // Of a server that is away now, what was known of it stands.
        let asked = tokio::time::timeout(mainstay_upstream::PROBE_BOUND, self.era_of(served)).await;
        let era = asked.ok().flatten().or_else(|| self.spoken_by(&served.server).era());
        era == Some(Era::Modern)
    }

    /// How many stateless requests are in flight: a drain gives them its grace, and a worker that has handed over stays for
    /// them. Streams that are listened to are none.
    pub fn stateless_calls(&self) -> usize {
        self.servers.values().map(|served| served.stateless.count()).sum()
    }

    /// Sends a stateless request to the server of `served`, and tells the operator if that fails. Dropping the future
    /// cancels it.
    ///
    /// # Errors
    /// What became of it, for its client.
    pub async fn forward(&self, served: &Served, request: &Stateless) -> Result<Forwarded, Refused> {
        let _outstays = self.outstaying.enter();
        let forwarded = tokio::select! {
            biased;
            forwarded = self.upstreams.forward(&served.server, request) => forwarded,
            () = self.closing() => return Err(cut_off(&served.server)),
        };
        forwarded.map_err(|failure| self.not_forwarded(served, &failure))
    }

    /// A `message` of a server for its client, with what it hands out sealed.
    ///
    /// # Errors
    /// The state is too large, and the client is not to have the answer.
    pub fn sealed(&self, served: &Served, handed: &Handed, message: Bytes) -> Result<Bytes, Refused> {
        handed.sealed(&self.keyring, self.now(), message).map_err(|fault| {
            let (server, problem) = (served.server.name.clone(), fault.to_string().into());
            self.not_forwarded(served, &Failure::Protocol { server, problem })
        })
    }

    /// What `failure` is to the client of a stateless request.
    pub fn not_forwarded(&self, served: &Served, failure: &Failure) -> Refused {
        self.note_failure(&served.server.name, failure);
        call::failed(failure, &served.server)
    }
}

/// What a stateless request comes to that is cut at the end of a drain. Nothing is wrong with its server.
pub fn cut_off(server: &Server) -> Refused {
    let cause = "the gateway stops".into();
    call::failed(&Failure::OutcomeUnknown { server: server.name.clone(), cause }, server)
}

/// The number of errors that are the gateway's own: outside what JSON-RPC and MCP reserve. `error.data.mainstay` names the
/// reason.
pub const GATEWAY_ERROR: i64 = -31_000;
