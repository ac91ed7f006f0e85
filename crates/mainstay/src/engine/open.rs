//! Opening a session: the server's answer first, then the durable row, then the client's answer (S2).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::audit::{Action, Actor};
use mainstay_core::code::Code;
use mainstay_core::id::{SessionId, SessionKey};
use mainstay_core::session::{ClientName, Input, Opening, Session};
use mainstay_core::wire::envelope::{escape, member, splice, unescape};
use mainstay_core::wire::method::{Method, Version};
use mainstay_store::Write;
use mainstay_upstream::{Ending, Handshake, Link, Opened, Server};

use crate::engine::call::failed;
use crate::engine::conversation;
use crate::engine::live::{Live, Parts};
use crate::engine::{Caller, Engine, HOLD, Refused, Served, refused};
use crate::runtime::{entropy, spawn};

/// A session that was opened: the id for the response header, and the `InitializeResult` as raw JSON.
pub struct Welcome {
    /// The new id, revealed to nobody but its client.
    pub id: SessionId,
    /// The raw result.
    pub result: Bytes,
}

impl Engine {
    /// Opens a session of `caller` with `served` from the raw `params` of its `initialize`.
    ///
    /// When this returns the session's row is durable through power loss. If it fails, no row, no child and no
    /// upstream session is left, or an owed delete is. A server that is down does not fail it (U8).
    ///
    /// # Errors
    /// What the client is to be told; [`Code::http_status`] says whether inside HTTP 200.
    pub async fn open(self: &Arc<Self>, caller: &Caller, served: &Served, params: Bytes) -> Result<Welcome, Refused> {
        self.open_under(draw_id()?, caller, served, params).await
    }

    /// As [`open`](Self::open), for the gateway itself: its key, since nobody is told the id.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub(crate) async fn open_own(
        self: &Arc<Self>,
        caller: &Caller,
        served: &Served,
        params: Bytes,
    ) -> Result<SessionKey, Refused> {
        let id = draw_id()?;
        let key = self.keyring.session_key(&id);
        self.enter_under(id, caller, served, params).await.map(|_welcome| key)
    }

    /// As [`open`](Self::open), under an id that [`draw_id`] gave and that was never used: where the client has to know
    /// it before its session is opened (2024-11-05).
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub async fn open_under(
        self: &Arc<Self>,
        id: SessionId,
        caller: &Caller,
        served: &Served,
        params: Bytes,
    ) -> Result<Welcome, Refused> {
        // What marks the gateway's own sessions is nobody else's to say.
        self.enter_under(id, caller, served, conversation::as_said(&params)).await
    }

    async fn enter_under(
        self: &Arc<Self>,
        id: SessionId,
        caller: &Caller,
        served: &Served,
        params: Bytes,
    ) -> Result<Welcome, Refused> {
        let _opening = self.openings.enter();
        self.census.enter(&caller.principal)?;
        let started = self.now();
        let opened = self.open_counted(id, caller, served, params).await;
        let outcome = opened.as_ref().err().map(|refusal| refusal.code);
        self.metrics.call(&served.server.name, Method::Initialize, self.now().since(started), outcome);
        if opened.is_err() {
            self.census.leave(&caller.principal);
        }
        opened
    }

    async fn open_counted(
        self: &Arc<Self>,
        id: SessionId,
        caller: &Caller,
        served: &Served,
        params: Bytes,
    ) -> Result<Welcome, Refused> {
        let (key, params) = (self.keyring.session_key(&id), self.upstreams.share(&params));
        let handshake = Handshake {
            key,
            params: conversation::as_said(&params),
            confirmed: false,
            log_level: None,
            subscriptions: BTreeSet::new(),
        };
        let arrival = self.expect(key);
        let (link, opened) = self.reach(served, handshake, &params).await?;
        let version = match opened.version.parse_version(&served.server) {
            Ok(version) => version,
            Err(refusal) => {
                self.undo(link).await;
                return Err(refusal);
            }
        };
        let opening = Opening {
            key,
            server: served.server.name.clone(),
            principal: caller.principal.clone(),
            agent: caller.agent.clone(),
            client: client_name(&params),
            initialize_params: params,
            contract: self.settings.contract,
            epoch: self.epoch,
        };
        match self.admit_new(opening, version, &link).await {
            Ok(session) => {
                let server = Arc::clone(&served.server);
                let live = Live::new(Parts {
                    session,
                    server,
                    link,
                    listen: self.listen_stream(),
                    life: self.next_streams(1).number,
                    journaled: self.journaled(key),
                    asked_earlier: Some(BTreeMap::new()),
                    heard: None,
                });
                if opened.for_it {
                    live.note_answered_for();
                }
                arrival.complete(&live);
                self.expect_deadline();
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
        let record = session.record();
        let actor = Actor::Client(record.principal.clone());
        writes.push(Write::Audit(self.audit_entry(actor, Action::Opened, Some(record.key), &record.server, "")));
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
    async fn undo(self: &Arc<Self>, link: Arc<Link>) {
        if let Some(owed) = link.end(Ending::Delete).await {
            self.owe(owed);
        }
    }

    /// Opens the way to the server, or, if that is down, answers for it from what is known (U8). The way is then opened
    /// by the attempt that goes on, or by the first call.
    async fn reach(
        self: &Arc<Self>,
        served: &Served,
        handshake: Handshake,
        params: &Bytes,
    ) -> Result<(Arc<Link>, Answered), Refused> {
        let server = &served.server;
        let link = Link::lazy(&self.upstreams, server, handshake, self.notices.clone());
        let reaching = Arc::clone(&link);
        let mut opening = spawn(async move { reaching.reach().await });
        let patience = if server.is_http() { ANSWER_FOR_IT_AFTER } else { HOLD };
        match tokio::time::timeout(patience, &mut opening).await {
            Ok(Ok(Ok(opened))) => {
                self.note_card(server, &opened);
                Ok((link, Answered { result: opened.result, version: Spoken(opened.version), for_it: false }))
            }
            Ok(Ok(Err(failure))) if !(failure.is_unreachable() && server.is_http()) => {
                self.undo(link).await;
                Err(failed(&failure, server))
            }
            Ok(Ok(Err(failure))) => {
                tracing::warn!(server = %server.name, error = %failure, "server is down; answering `initialize` for it");
                Ok((link, self.answer_for(served, params).await))
            }
            Ok(Err(_panicked)) => Err(Refused::new(Code::Internal, "opening the server's session failed")),
            Err(_elapsed) if server.is_http() => {
                tracing::warn!(server = %server.name, "server has not answered yet; answering `initialize` for it");
                let engine = Arc::clone(self);
                let name = server.name.clone();
                spawn(async move {
                    if let Ok(Err(failure)) = opening.await {
                        engine.note_failure(&name, &failure);
                    }
                });
                Ok((link, self.answer_for(served, params).await))
            }
            Err(_elapsed) => {
                opening.abort();
                self.undo(link).await;
                let refusal = Refused::new(Code::ServerUnreachable, "the server did not answer `initialize` in time");
                Err(Refused { server: Some(server.name.clone()), ..refusal })
            }
        }
    }

    /// The answer to `initialize` in the name of a server that is down.
    async fn answer_for(&self, served: &Served, params: &Bytes) -> Answered {
        let server = &served.server;
        let wanted = offered_version(params);
        let card = self.store.card(&server.name, server.fingerprint()).await;
        let said = card.map(|card| card.initialize_result).filter(|said| !said.is_empty());
        let result = said.unwrap_or_else(|| minimal_result(server));
        Answered { result: with_version(&result, wanted), version: Spoken(wanted.as_str().into()), for_it: true }
    }

    /// Remembers what the server said of itself, if that is news.
    pub(crate) fn note_card(&self, server: &Arc<Server>, opened: &Opened) {
        let spoken = self.upstreams.spoken(server);
        let known = self.facts.cards.get(&server.name).is_some_and(|known| *known == opened.result)
            && self.facts.eras.get(&server.name).is_some_and(|known| *known == spoken);
        if !known {
            self.facts.cards.insert(server.name.clone(), opened.result.clone());
            self.write_card(server, opened.result.clone());
        }
    }
}

/// An id that no session has or had.
///
/// # Errors
/// [`Code::Internal`] if the system gives no entropy.
pub fn draw_id() -> Result<SessionId, Refused> {
    let entropy = entropy().map_err(|error| Refused::new(Code::Internal, error.to_string()))?;
    Ok(SessionId::from_entropy(entropy))
}

/// An `InitializeResult` and the version in it.
struct Answered {
    result: Bytes,
    version: Spoken,
    /// Whether the gateway answered in the server's place.
    for_it: bool,
}

/// The version that a server answered.
struct Spoken(Box<str>);

impl Spoken {
    fn parse_version(&self, server: &Server) -> Result<Version, Refused> {
        Version::parse(&self.0).ok_or_else(|| {
            let text = format!("server `{}` answered with a protocol version that has no sessions", server.name);
            Refused { server: Some(server.name.clone()), ..Refused::new(Code::ServerRejected, text) }
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
