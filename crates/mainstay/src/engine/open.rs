//! Opening a session: the server's answer first, then the durable row, then the client's answer (S2).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::code::Code;
use mainstay_core::id::SessionId;
use mainstay_core::principal::Principal;
use mainstay_core::resume::ServerCard;
use mainstay_core::session::{ClientName, Input, Opening, Session};
use mainstay_core::wire::envelope::{escape, member, splice, unescape};
use mainstay_core::wire::method::Version;
use mainstay_store::Write;
use mainstay_upstream::{Ending, Handshake, Link, Opened, Server};

use crate::engine::call::failed;
use crate::engine::live::{Live, Parts};
use crate::engine::{Engine, Refused, Served, refused};
use crate::runtime::{entropy, spawn};

/// A session that was opened: the id for the response header, and the `InitializeResult` as raw JSON.
pub struct Welcome {
    /// The new id, revealed to nobody but its client.
    pub id: SessionId,
    /// The raw result.
    pub result: Bytes,
}

impl Engine {
    /// Opens a session of `principal` with `served` from the raw `params` of its `initialize`.
    ///
    /// When this returns the session's row is durable through power loss. If it fails, no row, no child and no
    /// upstream session is left, or an owed delete is. A server that is down does not fail it (U8).
    ///
    /// # Errors
    /// What the client is to be told; [`Code::http_status`] says whether inside HTTP 200.
    pub async fn open(
        self: &Arc<Self>,
        principal: &Principal,
        served: &Served,
        params: Bytes,
    ) -> Result<Welcome, Refused> {
        if self.live.len() >= self.settings.sessions_max {
            return Err(Refused::new(Code::LimitReached, "the limit `sessions_max` of live sessions is reached"));
        }
        let id = SessionId::from_entropy(entropy().map_err(|error| Refused::new(Code::Internal, error.to_string()))?);
        let key = self.keyring.session_key(&id);
        let handshake = Handshake {
            key,
            params: params.clone(),
            confirmed: false,
            log_level: None,
            subscriptions: BTreeSet::new(),
        };
        let (link, opened) = self.reach(served, &handshake, &params).await?;
        let version = opened.version.parse_version(&served.server)?;
        let opening = Opening {
            key,
            server: served.server.name.clone(),
            principal: principal.clone(),
            client: client_name(&params),
            initialize_params: params,
            contract: self.settings.contract,
            epoch: self.epoch,
        };
        match self.admit_new(opening, version, &link).await {
            Ok(session) => {
                let server = Arc::clone(&served.server);
                let live = Live::new(Parts { session, server, link, listen: self.listen_stream() });
                self.live.insert(key, live);
                self.deadlines.notify_one();
                Ok(Welcome { id, result: opened.result })
            }
            Err(refusal) => {
                self.undo(link).await;
                Err(refusal)
            }
        }
    }

    /// Makes the new session's row durable.
    async fn admit_new(&self, opening: Opening, version: Version, link: &Arc<Link>) -> Result<Session, Refused> {
        let (now, terms) = (self.now(), &self.settings.terms);
        let session_ref = opening.key.session_ref();
        let mut session = Session::open(opening, version, now, terms);
        let decision = session.decide(now, &Input::Answered { version }, terms).map_err(|refusal| refused(&refusal))?;
        let mut writes: Vec<_> = decision.changes.iter().cloned().map(Write::Session).collect();
        writes.extend(link.record().map(Write::Resume));
        self.store.commit(writes).await.map_err(|error| {
            tracing::error!(session = %session_ref, error = %error, "a new session could not be made durable and was refused");
            Refused::new(Code::Unavailable, "the ledger cannot be written now; try again later")
        })?;
        for change in &decision.changes {
            session.apply(change);
        }
        tracing::info!(session = %session_ref, server = %session.record().server, "session opened");
        Ok(session)
    }

    /// Ends what was opened for a session that came to nothing.
    async fn undo(&self, link: Arc<Link>) {
        if let Some(owed) = link.end(Ending::Delete).await {
            self.store.hint(Write::Owe(owed));
            self.owed.notify_one();
        }
    }

    /// Opens the way to the server, or, if that is down, answers for it from what is known.
    async fn reach(
        self: &Arc<Self>,
        served: &Served,
        handshake: &Handshake,
        params: &Bytes,
    ) -> Result<(Arc<Link>, Answered), Refused> {
        let (engine, server, ours) = (Arc::clone(self), Arc::clone(&served.server), handshake.clone());
        let mut opening =
            spawn(async move { Link::open(&engine.upstreams, &server, ours, engine.notices.clone()).await });
        let patience = if served.server.is_http() { ANSWER_FOR_IT_AFTER } else { crate::engine::HOLD };
        match tokio::time::timeout(patience, &mut opening).await {
            Ok(Ok(Ok((link, opened)))) => {
                self.note_card(&served.server, &opened);
                Ok((link, Answered { result: opened.result, version: Spoken(opened.version) }))
            }
            Ok(Ok(Err(failure))) if !failure.is_unreachable() || !served.server.is_http() => {
                Err(failed(&failure, &served.server))
            }
            Ok(Ok(Err(failure))) => {
                tracing::warn!(server = %served.server.name, error = %failure, "server is down; answering `initialize` for it");
                self.answer_for(served, handshake, params).await
            }
            Ok(Err(_panicked)) => Err(Refused::new(Code::Internal, "opening the server's session failed")),
            Err(_elapsed) if served.server.is_http() => {
                tracing::warn!(server = %served.server.name, "server is slow; answering `initialize` for it");
                let engine = Arc::clone(self);
                spawn(async move {
                    if let Ok(Ok((late, _))) = opening.await {
                        engine.undo(late).await;
                    }
                });
                self.answer_for(served, handshake, params).await
            }
            Err(_elapsed) => {
                opening.abort();
                let mut refusal =
                    Refused::new(Code::ServerUnreachable, "the server did not answer `initialize` in time");
                refusal.server = Some(served.server.name.clone());
                Err(refusal)
            }
        }
    }

    /// Answers `initialize` in the name of a server that is down. The way to it is opened with the first call.
    async fn answer_for(
        self: &Arc<Self>,
        served: &Served,
        handshake: &Handshake,
        params: &Bytes,
    ) -> Result<(Arc<Link>, Answered), Refused> {
        let server = &served.server;
        let link = Link::restore(&self.upstreams, server, handshake.clone(), None, None, self.notices.clone());
        let wanted = offered_version(params);
        let card = self.store.card(&server.name, server.fingerprint()).await;
        let result = card.map_or_else(|| minimal_result(server), |card| card.initialize_result);
        let result = with_version(&result, wanted);
        Ok((link, Answered { result, version: Spoken(wanted.as_str().into()) }))
    }

    /// Remembers what the server said of itself, if that is news.
    fn note_card(&self, server: &Arc<Server>, opened: &Opened) {
        let known = self.facts.cards.get(&server.name).is_some_and(|known| *known == opened.result);
        if !known {
            self.facts.cards.insert(server.name.clone(), opened.result.clone());
            self.store.hint(Write::Card(ServerCard {
                server: server.name.clone(),
                fingerprint: server.fingerprint(),
                initialize_result: opened.result.clone(),
                saved_at: self.now(),
            }));
        }
    }
}

/// An `InitializeResult` and the version in it.
struct Answered {
    result: Bytes,
    version: Spoken,
}

/// The version that a server answered.
struct Spoken(Box<str>);

impl Spoken {
    fn parse_version(&self, server: &Server) -> Result<Version, Refused> {
        Version::parse(&self.0).ok_or_else(|| {
            let text = format!("server `{}` answered with a protocol version that has no sessions", server.name);
            Refused { code: Code::ServerRejected, text, server: Some(server.name.clone()) }
        })
    }
}

/// The version that a client offers in its `initialize`, or the newest legacy one.
fn offered_version(params: &[u8]) -> Version {
    let offered = member(params, &(0..params.len()), "protocolVersion");
    let offered = offered.and_then(|span| unescape(&params[span]).and_then(|text| Version::parse(&text)));
    offered.unwrap_or(Version::LATEST)
}

/// `clientInfo` as lists show it.
fn client_name(params: &[u8]) -> ClientName {
    let all = 0..params.len();
    let text = |key: &str| {
        let info = member(params, &all, "clientInfo")?;
        let span = member(params, &info, key)?;
        unescape(&params[span]).map(|text| text.into_owned())
    };
    ClientName::new(&text("name").unwrap_or_default(), &text("version").unwrap_or_default())
}

/// The least that can be said for a server of which nothing is known.
fn minimal_result(server: &Server) -> Bytes {
    let mut result = br#"{"protocolVersion":"","capabilities":{"tools":{"listChanged":true},"prompts":{"listChanged":true},"resources":{"listChanged":true}},"serverInfo":{"name":"#.to_vec();
    result.extend_from_slice(&escape(server.name.as_str()));
    result.extend_from_slice(br#","version":"unknown"}}"#);
    result.into()
}

/// `result` with `protocolVersion` set to `version`.
fn with_version(result: &Bytes, version: Version) -> Bytes {
    let Some(span) = member(result, &(0..result.len()), "protocolVersion") else { return result.clone() };
    splice(result, &[(span, &escape(version.as_str()))]).into()
}

/// How long an HTTP server may take to answer `initialize` before it is answered for: a client's start must not hang
/// on one bad server (U8, AC-04).
const ANSWER_FOR_IT_AFTER: Duration = Duration::from_millis(800);
