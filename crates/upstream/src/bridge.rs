//! The way of a legacy session to a modern server (2026-07-28), over HTTP or to a program: what the session has, each
//! request says (E1).
//!
//! A modern server keeps nothing between requests, so nothing of it can be lost, and nothing is to be resumed. One
//! [`Bridge`] is one client session. It owns what its client declared and set, answers in the server's place what that has
//! no word for any more, and puts the server's wish for input to the client as the questions that the client knows.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::id::SessionKey;
use mainstay_core::resume::ResumeRecord;
use mainstay_core::wire::envelope::{self, Kind};
use mainstay_core::wire::modern;
use tokio::sync::{Notify, mpsc, oneshot, watch};

use crate::call::{Answer, AnswerStream, Call, Incoming, Way};
use crate::ears::Ears;
use crate::failure::{Blame, Failure};
use crate::flight::Flight;
use crate::handshake::{Handshake, Opened};
use crate::http::Tries;
use crate::kept::{self, Kept, Past, Setting};
use crate::notice::{Notice, Notices};
use crate::server::Server;
use crate::task::spawn;
use crate::upstreams::{Destination, Upstreams};
use crate::wire::{self, lock};

pub(crate) use post::{Dressed, Fault, Response, exchange, post};
pub(crate) use stream::BridgeStream;
pub(crate) use tools::Annotated;

use post::Speaker;

mod dispatch;
mod ears;
mod local;
mod opening;
mod post;
mod rounds;
mod stream;
mod tools;

/// One client session's way to a modern server.
pub(crate) struct Bridge {
    upstreams: Arc<Upstreams>,
    destination: Arc<Destination>,
    notices: Notices,
    /// What the client declared, as raw JSON.
    capabilities: Bytes,
    client_info: Option<Bytes>,
    state: Mutex<State>,
    flight: Flight,
    ears: Mutex<Ears>,
    /// Rung when there is something else to listen to.
    retuned: Notify,
}

struct State {
    kept: Kept,
    /// The calls in flight, by the text of their ids.
    running: HashMap<Box<str>, watch::Sender<Fate>>,
    /// The questions to the client that are open, by the text of their ids.
    questions: HashMap<Box<str>, oneshot::Sender<Bytes>>,
    /// Whether the server has shown that it is not of this era any more.
    contradicted: bool,
}

/// What has become of a call that is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Going,
    /// Its client has cancelled it: it stays without an answer.
    Cancelled,
    /// The link has ended.
    Ended,
}

impl Bridge {
    pub(crate) fn new(
        upstreams: &Arc<Upstreams>,
        server: &Arc<Server>,
        handshake: Handshake,
        record: Option<ResumeRecord>,
        notices: mpsc::Sender<(SessionKey, Notice)>,
    ) -> Arc<Self> {
        let destination = upstreams.destination(server);
        let notices = Notices::new(handshake.key, notices);
        let past = record.map(|record| Past::of((upstreams, &destination), &notices, false, (Some(record), None)));
        let capabilities = upstreams.share(&opening::modern_capabilities(&handshake.params));
        let client_info = opening::client_info(&handshake.params).map(|info| upstreams.share(&info));
        let kept = Kept::new(upstreams, handshake, &past.unwrap_or_default());
        let state = State { kept, running: HashMap::new(), questions: HashMap::new(), contradicted: false };
        Arc::new(Self {
            upstreams: Arc::clone(upstreams),
            destination,
            notices,
            capabilities,
            client_info,
            state: Mutex::new(state),
            flight: Flight::default(),
            ears: Mutex::default(),
            retuned: Notify::new(),
        })
    }

    /// Whether `record` is of a session with a modern server.
    pub(crate) fn made(record: &ResumeRecord) -> bool {
        *record.version == *modern::VERSION
    }

    /// `outcome`, noted as word of whether the server can be reached.
    pub(crate) fn noted<T>(&self, outcome: Result<T, Failure>) -> Result<T, Failure> {
        self.destination.contacts.note(self.upstreams.now(), &outcome);
        outcome
    }

    /// See [`Link::reach`](crate::Link::reach): what the server says of itself is asked once.
    pub(crate) async fn reach(self: &Arc<Self>) -> Result<Opened, Failure> {
        let this = Arc::clone(self);
        // A task of its own, as with every opening: a caller that goes away leaves it running.
        let task = spawn(async move {
            let found = || lock(&this.state).kept.opened.clone();
            this.flight.join(found, Box::pin(this.open())).await
        });
        task.await.unwrap_or_else(|_| Err(self.over()))
    }

    async fn open(self: &Arc<Self>) -> Result<Opened, Failure> {
        let discovered = self.discover().await?;
        let opened = {
            let mut state = lock(&self.state);
            if state.kept.ended {
                return Err(self.over());
            }
            let opened = opening::opened(self.server(), &state.kept.handshake.params, &discovered);
            state.kept.open(&self.upstreams, &opened);
            opened
        };
        self.retuned.notify_one();
        if let Some(record) = self.record() {
            self.notices.tell(Notice::Record(Box::new(record))).await;
        }
        self.notices.tell(Notice::Opened(opened.clone())).await;
        Ok(opened)
    }

    /// See [`Link::call`](crate::Link::call).
    pub(crate) async fn call(self: &Arc<Self>, call: Call) -> Result<Answer, Failure> {
        if !self.opened() {
            self.reach().await?;
        }
        if let Some(answer) = self.answer_here(&call)? {
            return Ok(Answer::Whole(answer));
        }
        let mut stream = BridgeStream::sending(self, call)?;
        match stream.next().await? {
            Incoming::Response(response) => Ok(Answer::Whole(response)),
            incoming @ (Incoming::Message(_) | Incoming::Reached) => {
                stream.put_back(incoming);
                Ok(Answer::Stream(AnswerStream(Way::Bridge(Box::new(stream)))))
            }
        }
    }

    /// A notification of the client, or its answer to a question. A modern server takes neither: what they mean is done
    /// here, and what means nothing to it is dropped.
    pub(crate) fn send(&self, message: &Bytes) -> Result<(), Failure> {
        let Ok(scanned) = envelope::scan(message) else { return Ok(()) };
        match scanned.kind {
            Kind::Result | Kind::Error => {
                let id = wire::id_of(&scanned, message).map(wire::id_text).unwrap_or_default();
                let asked = lock(&self.state).questions.remove(&*id);
                // Nobody waits for it any more: the call that it was for has ended, with its worker or before.
                let lost = || self.lost_again();
                asked.and_then(|asked| asked.send(message.clone()).ok()).ok_or_else(lost)
            }
            Kind::Notification if scanned.method_name(message).as_deref() == Some("notifications/cancelled") => {
                let params = scanned.params.as_ref();
                let id = params.and_then(|params| envelope::member(message, params, "requestId"));
                if let Some(id) = id.map(|span| wire::id_text(&message[span]).into_owned())
                    && let Some(fate) = lock(&self.state).running.get(&*id)
                {
                    fate.send_replace(Fate::Cancelled);
                }
                Ok(())
            }
            Kind::Notification | Kind::Request => {
                let method = scanned.method_name(message).unwrap_or_default();
                tracing::debug!(server = %self.server().name, %method, "a message that means nothing to a modern server; dropped");
                Ok(())
            }
        }
    }

    /// The client said `initialized`. The server need not know.
    pub(crate) fn confirm(&self) {
        lock(&self.state).kept.handshake.confirmed = true;
    }

    /// Ends the link. There is nothing at the server to be deleted.
    pub(crate) fn end(&self) {
        {
            let mut state = lock(&self.state);
            state.kept.ended = true;
            state.questions.clear();
            for fate in state.running.values() {
                fate.send_replace(Fate::Ended);
            }
        }
        lock(&self.ears).close();
    }

    pub(crate) fn opened(&self) -> bool {
        lock(&self.state).kept.opened.is_some()
    }

    pub(crate) fn record(&self) -> Option<ResumeRecord> {
        let record = lock(&self.state).kept.record(&self.upstreams, &self.destination, None, true)?;
        Some(ResumeRecord { version: modern::VERSION.into(), ..record })
    }

    pub(crate) fn remember(&self, setting: Setting) {
        let tunes = !matches!(setting, Setting::Level(_));
        lock(&self.state).kept.remember(self.server(), setting);
        if tunes {
            self.retuned.notify_one();
        }
        kept::offer(&self.upstreams, &self.notices, self.record());
    }

    /// What the session's client said, and has set since.
    pub(crate) fn handshake(&self) -> Handshake {
        lock(&self.state).kept.handshake.clone()
    }

    /// Whether the server has answered as only one that is not modern does.
    pub(crate) fn was_contradicted(&self) -> bool {
        lock(&self.state).contradicted
    }

    /// `message` as it goes to the server.
    fn dress(&self, message: Bytes) -> Dressed {
        let level = lock(&self.state).kept.handshake.log_level.clone();
        let speaker = Speaker { capabilities: &self.capabilities, info: self.client_info.as_deref() };
        Dressed::of(message, &speaker, level.as_deref())
    }

    /// What the server says of itself: as it said a moment ago, or asked now.
    async fn discover(self: &Arc<Self>) -> Result<Bytes, Failure> {
        if let Some(known) = self.destination.eras.discovered() {
            return Ok(known);
        }
        let bound = self.server().handshake_bound;
        let hung = || self.unreachable("it did not answer `server/discover` in time".into());
        let mut tries = Tries::default();
        let asked = self.ask("server/discover", None, &mut tries);
        let response = tokio::time::timeout(bound, asked).await.map_err(|_| hung())?;
        let response = response.inspect_err(|_| {
            // A program has said so when it was started.
            lock(&self.state).contradicted |= self.destination.eras.spoken().modern == Some(false);
        })?;
        let scanned = envelope::scan(&response).map_err(|_| self.protocol("its answer is no JSON-RPC message"))?;
        match scanned.result.filter(|result| crate::era::names_version(&response, result, "supportedVersions")) {
            Some(result) => {
                let result = response.slice(result);
                self.destination.eras.note_discovered(&result);
                Ok(result)
            }
            None => {
                lock(&self.state).contradicted = true;
                Err(self.rejected(200, "it does not say that it speaks 2026-07-28"))
            }
        }
    }

    fn server(&self) -> &Server {
        &self.destination.server
    }

    fn is_safe(&self, call: &Call) -> bool {
        lock(&self.state).kept.is_safe(self.server(), call)
    }

    fn unknown(&self, cause: Box<str>) -> Failure {
        self.unknown_in(&self.upstreams, cause)
    }
}

impl Blame for Bridge {
    fn blamed(&self) -> &Server {
        self.server()
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        lock(&self.ears).close();
    }
}

impl fmt::Debug for Bridge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bridge").field("server", &self.server().name).finish_non_exhaustive()
    }
}

/// How long a client may take over a question: longer than the gateway waits before it answers in the client's place.
const QUESTION_BOUND: Duration = Duration::from_mins(11);
