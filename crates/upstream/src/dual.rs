//! The way of a session to a server of either era: what it is is found out on the way, and may change (E1, E5).
//!
//! A client of the legacy era is best served by a server of that era, so `initialize` is what is tried first where nothing is
//! known: a server that takes it costs nothing more. Only one that refuses it is asked what it is; a program that is known to
//! be modern is not tried, since that would cost a process.

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
use crate::child::{Child, Why, dismiss_of};
use crate::failure::{Blame, Failure, Outcome};
use crate::handshake::{Handshake, Opened};
use crate::http::Http;
use crate::kept::Setting;
use crate::link::Ending;
use crate::notice::Notice;
use crate::server::Server;
use crate::task::spawn;
use crate::upstreams::Upstreams;
use crate::wire::lock;

/// One client session's way to a server, whichever era that turns out to be of.
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

/// Where it leads.
#[derive(Clone)]
pub(crate) enum Way {
    /// To a legacy server over HTTP.
    Http(Arc<Http>),
    /// To a process of the session's own.
    Child(Arc<Child>),
    /// To a modern server.
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
        let was_bridged = past.as_ref().and_then(|(record, _)| record.as_ref()).map(Bridge::made);
        let modern = match server.fixed_era() {
            Some(era) => era == Era::Modern,
            None => was_bridged.unwrap_or_else(|| upstreams.prefers_modern(server)),
        };
        // What a session with the other kind of server was is of no use.
        let way = if !modern && was_bridged != Some(true) {
            Way::legacy(upstreams, server, handshake, past, notices.clone())
        } else {
            let (record, held) = past.unwrap_or_default();
            if let Some(held) = held {
                let destination = upstreams.destination(server);
                spawn(dismiss_of(Arc::clone(upstreams), destination, held, Why::Unwanted));
            }
            match modern {
                true => {
                    let record = record.filter(|_| was_bridged == Some(true));
                    Way::Modern(Bridge::new(upstreams, server, handshake, record, notices.clone()))
                }
                false => Way::legacy(upstreams, server, handshake, None, notices.clone()),
            }
        };
        Arc::new(Self {
            upstreams: Arc::clone(upstreams),
            server: Arc::clone(server),
            notices: (key, notices),
            current: Mutex::new(Current { way, listeners: 0, ended: false }),
        })
    }

    /// Where it leads now.
    pub(crate) fn way(&self) -> Way {
        lock(&self.current).way.clone()
    }

    /// See [`Link::reach`](crate::Link::reach).
    pub(crate) async fn reach(&self) -> Result<Opened, Failure> {
        let mut turns = 0;
        loop {
            let way = self.way();
            let outcome = match &way {
                Way::Http(http) => http.noted(http.reach().await),
                Way::Child(child) => child.reach().await,
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
                Way::Http(http) => http.noted(http.call(call.clone()).await),
                Way::Child(child) => child.call(call.clone()).await,
                Way::Modern(bridge) => bridge.noted(Box::pin(bridge.call(call.clone())).await),
            };
            match outcome {
                Err(failure)
                    if turns < TURNS_MAX && way.has_not_sent(&failure) && Box::pin(self.turn(&way, &failure)).await =>
                {
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
        if way.was_refused() {
            if self.upstreams.is_modern(&destination).await != Some(true) {
                return false;
            }
            destination.eras.note_refused();
            tracing::info!(server = %self.server.name, "the server speaks 2026-07-28 only; its sessions are bridged");
            return self.take(way, |upstreams, server, handshake, notices| {
                Way::Modern(Bridge::new(upstreams, server, handshake, None, notices))
            });
        }
        if let Way::Modern(bridge) = way
            && bridge.was_contradicted()
        {
            destination.eras.forget();
            tracing::info!(server = %self.server.name, "the server does not speak 2026-07-28 any more");
            return self.take(way, |upstreams, server, handshake, notices| {
                Way::legacy(upstreams, server, handshake, None, notices)
            });
        }
        false
    }

    /// Puts another way in the place of `old`, unless somebody has done that. False if the link has ended.
    fn take(
        &self,
        old: &Way,
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
        let new = make(&self.upstreams, &self.server, Handshake { key: *key, ..old.handshake() }, notices.clone());
        for _ in 0..current.listeners {
            old.unlisten();
            new.listen();
        }
        current.way = new;
        true
    }

    pub(crate) async fn confirm(&self) {
        match self.way() {
            Way::Http(http) => http.confirm().await,
            Way::Child(child) => child.confirm().await,
            Way::Modern(bridge) => bridge.confirm(),
        }
    }

    pub(crate) async fn send(&self, message: Bytes) -> Result<(), Failure> {
        match self.way() {
            Way::Http(http) => http.send(message).await,
            Way::Child(child) => child.send(message).await,
            Way::Modern(bridge) => bridge.send(&message),
        }
    }

    pub(crate) async fn resume(&self, call: Call, last_event_id: &str) -> Result<AnswerStream, Failure> {
        match self.way() {
            Way::Http(http) => http.resume(call, last_event_id).await,
            Way::Child(child) => Err(child.over()),
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

    pub(crate) async fn end(&self, ending: Ending) -> Option<OwedDelete> {
        let way = {
            let mut current = lock(&self.current);
            current.ended = true;
            current.way.clone()
        };
        match way {
            Way::Http(http) => http.end(ending == Ending::Delete).await,
            Way::Child(child) => {
                let why = match ending {
                    Ending::Delete => Some(Why::SessionEnded),
                    Ending::Suspend => Some(Why::Suspended),
                    Ending::KeepForResume => None,
                };
                child.end(why).await;
                None
            }
            Way::Modern(bridge) => {
                bridge.end();
                None
            }
        }
    }

    pub(crate) fn record(&self) -> Option<ResumeRecord> {
        match self.way() {
            Way::Http(http) => http.record(),
            Way::Child(child) => child.record(),
            Way::Modern(bridge) => bridge.record(),
        }
    }

    pub(crate) fn opened(&self) -> bool {
        match self.way() {
            Way::Http(http) => http.opened(),
            Way::Child(child) => child.opened(),
            Way::Modern(bridge) => bridge.opened(),
        }
    }

    pub(crate) fn is_connection(&self) -> bool {
        match self.way() {
            Way::Http(http) => http.is_connection(),
            Way::Child(_) | Way::Modern(_) => false,
        }
    }

    pub(crate) fn remember(&self, setting: Setting) {
        match self.way() {
            Way::Http(http) => http.remember(setting),
            Way::Child(child) => child.remember(setting),
            Way::Modern(bridge) => bridge.remember(setting),
        }
    }
}

impl Way {
    /// That to a legacy server.
    fn legacy(
        upstreams: &Arc<Upstreams>,
        server: &Arc<Server>,
        handshake: Handshake,
        past: Option<(Option<ResumeRecord>, Option<Held>)>,
        notices: mpsc::Sender<(SessionKey, Notice)>,
    ) -> Self {
        if server.is_http() {
            Self::Http(Http::new(upstreams, server, handshake, past, notices))
        } else {
            Self::Child(Child::new(upstreams, server, handshake, past, notices))
        }
    }

    fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Http(one), Self::Http(other)) => Arc::ptr_eq(one, other),
            (Self::Child(one), Self::Child(other)) => Arc::ptr_eq(one, other),
            (Self::Modern(one), Self::Modern(other)) => Arc::ptr_eq(one, other),
            (Self::Http(_) | Self::Child(_) | Self::Modern(_), _) => false,
        }
    }

    /// Whether a legacy server answered the last `initialize` with a refusal, as one of the modern era does.
    fn was_refused(&self) -> bool {
        match self {
            Self::Http(http) => http.was_refused(),
            Self::Child(child) => child.was_refused(),
            Self::Modern(_) => false,
        }
    }

    /// What the session's client said, and has set since.
    fn handshake(&self) -> Handshake {
        match self {
            Self::Http(http) => http.handshake(),
            Self::Child(child) => child.handshake(),
            Self::Modern(bridge) => bridge.handshake(),
        }
    }

    /// Whether a call that failed so was not carried out.
    fn has_not_sent(&self, failure: &Failure) -> bool {
        let never_open = match self {
            Self::Http(http) => !http.opened(),
            Self::Child(child) => !child.opened(),
            Self::Modern(_) => false,
        };
        never_open || failure.outcome() != Outcome::Unknown
    }

    /// A child needs no stream to be heard.
    fn listen(&self) {
        match self {
            Self::Http(http) => http.listen(),
            Self::Child(_) => {}
            Self::Modern(bridge) => bridge.listen(),
        }
    }

    fn unlisten(&self) {
        match self {
            Self::Http(http) => http.unlisten(),
            Self::Child(_) => {}
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
            Way::Http(http) => fmt::Debug::fmt(&http, f),
            Way::Child(child) => fmt::Debug::fmt(&child, f),
            Way::Modern(bridge) => fmt::Debug::fmt(&bridge, f),
        }
    }
}
