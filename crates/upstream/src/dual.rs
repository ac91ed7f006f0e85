//! The way of a session to an HTTP server of either era: what it is is found out on the way, and may change (E1, E5).
//!
//! A client of the legacy era is best served by a server of that era, so `initialize` is what is tried first where nothing is
//! known: a server that takes it costs nothing more. Only one that refuses it is asked what it is.

use std::fmt;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use mainstay_core::id::SessionKey;
use mainstay_core::resume::{OwedDelete, ResumeRecord};
use mainstay_core::wire::modern::Era;
use mainstay_keeper::client::Held;
use tokio::sync::mpsc;

use crate::bridge::Bridge;
use crate::call::{Answer, AnswerStream, Call};
use crate::failure::{Failure, Outcome};
use crate::handshake::{Handshake, Opened};
use crate::http::Http;
use crate::kept::Setting;
use crate::notice::Notice;
use crate::server::Server;
use crate::upstreams::Upstreams;
use crate::wire::lock;

/// One client session's way to an HTTP server, whichever era that turns out to be of.
pub(crate) struct Dual {
    upstreams: Arc<Upstreams>,
    server: Arc<Server>,
    notices: (SessionKey, mpsc::Sender<(SessionKey, Notice)>),
    current: Mutex<Current>,
}

struct Current {
    way: Way,
    listeners: u32,
    ended: bool,
}

#[derive(Clone)]
enum Way {
    Legacy(Arc<Http>),
    Modern(Arc<Bridge>),
}

impl Dual {
    pub(crate) fn new(
        upstreams: &Arc<Upstreams>,
        server: &Arc<Server>,
        handshake: Handshake,
        past: Option<(Option<ResumeRecord>, Option<Held>)>,
        notices: mpsc::Sender<(SessionKey, Notice)>,
    ) -> Arc<Self> {
        let key = handshake.key;
        let made_by_bridge = past.as_ref().and_then(|(record, _)| record.as_ref()).map(Bridge::made);
        let modern = match server.fixed_era() {
            Some(era) => era == Era::Modern,
            None => made_by_bridge.unwrap_or(upstreams.spoken(server).legacy == Some(false)),
        };
        let way = match (modern, made_by_bridge) {
            (true, Some(true)) => {
                let record = past.and_then(|(record, _)| record);
                Way::Modern(Bridge::new(upstreams, server, handshake, record, notices.clone()))
            }
            // What a session with another kind of server was is of no use.
            (true, Some(false) | None) => Way::Modern(Bridge::new(upstreams, server, handshake, None, notices.clone())),
            (false, Some(true)) => Way::Legacy(Http::new(upstreams, server, handshake, None, notices.clone())),
            (false, Some(false) | None) => Way::Legacy(Http::new(upstreams, server, handshake, past, notices.clone())),
        };
        Arc::new(Self {
            upstreams: Arc::clone(upstreams),
            server: Arc::clone(server),
            notices: (key, notices),
            current: Mutex::new(Current { way, listeners: 0, ended: false }),
        })
    }

    fn way(&self) -> Way {
        lock(&self.current).way.clone()
    }

    /// See [`Link::reach`](crate::Link::reach).
    pub(crate) async fn reach(&self) -> Result<Opened, Failure> {
        let mut turns = 0;
        loop {
            let way = self.way();
            let outcome = match &way {
                Way::Legacy(http) => http.noted(http.reach().await),
                Way::Modern(bridge) => bridge.noted(bridge.reach().await),
            };
            match outcome {
                Err(failure) if turns < TURNS_MAX && self.turn(&way, &failure).await => turns += 1,
                outcome => return outcome,
            }
        }
    }

    /// See [`Link::call`](crate::Link::call). A call that was refused since the server is of the other era was not carried
    /// out, and is sent once more.
    pub(crate) async fn call(&self, call: Call) -> Result<Answer, Failure> {
        let mut turns = 0;
        loop {
            let way = self.way();
            let outcome = match &way {
                Way::Legacy(http) => http.noted(http.call(call.clone()).await),
                Way::Modern(bridge) => bridge.noted(bridge.call(call.clone()).await),
            };
            match outcome {
                Err(failure) if turns < TURNS_MAX && way.has_not_sent(&failure) && self.turn(&way, &failure).await => {
                    turns += 1;
                }
                outcome => return outcome,
            }
        }
    }

    /// Takes the other way after `failure` on `way`, if the server has shown that it is of the other era. True if another
    /// try makes sense.
    async fn turn(&self, way: &Way, failure: &Failure) -> bool {
        if self.server.fixed_era().is_some() || !speaks_of_era(failure) {
            return false;
        }
        let destination = self.upstreams.destination(&self.server);
        match way {
            Way::Legacy(http) if http.was_refused() => {
                if self.upstreams.is_modern(&destination).await != Some(true) {
                    return false;
                }
                destination.eras.note_refused();
                tracing::info!(server = %self.server.name, "the server speaks 2026-07-28 only; its sessions are bridged");
                self.take(way, http.handshake(), |upstreams, server, handshake, notices| {
                    Way::Modern(Bridge::new(upstreams, server, handshake, None, notices))
                })
            }
            Way::Modern(bridge) if bridge.was_contradicted() => {
                destination.eras.forget();
                tracing::info!(server = %self.server.name, "the server does not speak 2026-07-28 any more");
                self.take(way, bridge.handshake(), |upstreams, server, handshake, notices| {
                    Way::Legacy(Http::new(upstreams, server, handshake, None, notices))
                })
            }
            Way::Legacy(_) | Way::Modern(_) => false,
        }
    }

    /// Puts another way in the place of `old`, unless somebody has done that. False if the link has ended.
    fn take(
        &self,
        old: &Way,
        handshake: Handshake,
        make: impl FnOnce(&Arc<Upstreams>, &Arc<Server>, Handshake, mpsc::Sender<(SessionKey, Notice)>) -> Way,
    ) -> bool {
        let mut current = lock(&self.current);
        // The record of a worker that has left is final.
        if current.ended || self.upstreams.has_left() {
            return false;
        }
        if !current.way.is(old) {
            return true;
        }
        let (key, notices) = &self.notices;
        let new = make(&self.upstreams, &self.server, Handshake { key: *key, ..handshake }, notices.clone());
        for _ in 0..current.listeners {
            old.unlisten();
            new.listen();
        }
        current.way = new;
        true
    }

    pub(crate) async fn confirm(&self) {
        match self.way() {
            Way::Legacy(http) => http.confirm().await,
            Way::Modern(bridge) => bridge.confirm(),
        }
    }

    pub(crate) async fn send(&self, message: Bytes) -> Result<(), Failure> {
        match self.way() {
            Way::Legacy(http) => http.send(message).await,
            Way::Modern(bridge) => bridge.send(&message),
        }
    }

    pub(crate) async fn resume(&self, call: Call, last_event_id: &str) -> Result<AnswerStream, Failure> {
        match self.way() {
            Way::Legacy(http) => http.resume(call, last_event_id).await,
            // Its streams have no ids to go on behind (2026-07-28, Streamable HTTP).
            Way::Modern(_) => Err(Failure::OutcomeUnknown {
                server: self.server.name.clone(),
                cause: "the server's answers can't be asked for again".into(),
            }),
        }
    }

    pub(crate) fn listen(&self) {
        let mut current = lock(&self.current);
        current.listeners += 1;
        current.way.listen();
    }

    pub(crate) fn unlisten(&self) {
        let mut current = lock(&self.current);
        current.listeners = current.listeners.saturating_sub(1);
        current.way.unlisten();
    }

    pub(crate) async fn end(&self, delete: bool) -> Option<OwedDelete> {
        let way = {
            let mut current = lock(&self.current);
            current.ended = true;
            current.way.clone()
        };
        match way {
            Way::Legacy(http) => http.end(delete).await,
            Way::Modern(bridge) => {
                bridge.end();
                None
            }
        }
    }

    pub(crate) fn record(&self) -> Option<ResumeRecord> {
        match self.way() {
            Way::Legacy(http) => http.record(),
            Way::Modern(bridge) => bridge.record(),
        }
    }

    pub(crate) fn opened(&self) -> bool {
        match self.way() {
            Way::Legacy(http) => http.opened(),
            Way::Modern(bridge) => bridge.opened(),
        }
    }

    pub(crate) fn is_connection(&self) -> bool {
        match self.way() {
            Way::Legacy(http) => http.is_connection(),
            Way::Modern(_) => false,
        }
    }

    pub(crate) fn remember(&self, setting: Setting) {
        match self.way() {
            Way::Legacy(http) => http.remember(setting),
            Way::Modern(bridge) => bridge.remember(setting),
        }
    }
}

impl Way {
    fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Legacy(one), Self::Legacy(other)) => Arc::ptr_eq(one, other),
            (Self::Modern(one), Self::Modern(other)) => Arc::ptr_eq(one, other),
            (Self::Legacy(_), Self::Modern(_)) | (Self::Modern(_), Self::Legacy(_)) => false,
        }
    }

    /// Whether a call that failed so was not carried out.
    fn has_not_sent(&self, failure: &Failure) -> bool {
        let never_open = matches!(self, Self::Legacy(http) if !http.opened());
        never_open || failure.outcome() != Outcome::Unknown
    }

    fn listen(&self) {
        match self {
            Self::Legacy(http) => http.listen(),
            Self::Modern(bridge) => bridge.listen(),
        }
    }

    fn unlisten(&self) {
        match self {
            Self::Legacy(http) => http.unlisten(),
            Self::Modern(bridge) => bridge.unlisten(),
        }
    }
}

/// Whether `failure` can come of asking in the words of the wrong era. Credentials, outages and the gateway's own troubles
/// don't.
fn speaks_of_era(failure: &Failure) -> bool {
    match failure {
        Failure::Rejected { status, .. } => *status < 500 && !matches!(status, 401 | 403 | 429),
        Failure::Protocol { .. } | Failure::Configuration { .. } => true,
        Failure::OutcomeUnknown { .. }
        | Failure::Unreachable { .. }
        | Failure::Parked { .. }
        | Failure::Gateway { .. }
        | Failure::Unauthorized { .. }
        | Failure::LostAgain { .. }
        | Failure::Left { .. }
        | Failure::ChildExited { .. }
        | Failure::Oversize { .. }
        | Failure::Ended { .. } => false,
    }
}

/// How often one request may change its way: a server that contradicts itself must not be asked for ever.
const TURNS_MAX: u32 = 2;

impl fmt::Debug for Dual {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.way() {
            Way::Legacy(http) => fmt::Debug::fmt(&http, f),
            Way::Modern(bridge) => fmt::Debug::fmt(&bridge, f),
        }
    }
}
