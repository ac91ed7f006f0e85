//! The way to a server that is a child process, held by the keeper (2025-11-25, Transports, stdio).
//!
//! One [`Child`] is one client session's process, and the next ones if it dies. A new process is told the client's
//! handshake and settings before any call (C5). What was sent to a process that died is not sent again unless that is
//! safe (C3, U5).

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::call::RoutedId;
use mainstay_core::id::SessionKey;
use mainstay_core::resume::ResumeRecord;
use mainstay_keeper::client::{Held, WriteError};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::call::{Answer, AnswerStream, Call, Incoming, Way};
use crate::failure::Failure;
use crate::flight::Flight;
use crate::handshake::{Handshake, Opened};
use crate::kept::{self, Kept};
use crate::notice::{Notice, Notices};
use crate::server::Server;
use crate::task::spawn;
use crate::upstreams::{Destination, Upstreams};
use crate::wire::lock;

pub use label::{Label, parse_label};
pub use spawn::ALLOWED_VARIABLES;
pub(crate) use stream::ChildStream;

use end::End;
use running::{Registration, Running, Waiting};
use start::Beginning;

mod acks;
mod end;
mod label;
mod oversize;
mod parked;
mod running;
mod slot;
mod spawn;
mod start;
mod stream;
mod table;

/// One client session's way to a stdio server.
pub(crate) struct Child {
    upstreams: Arc<Upstreams>,
    destination: Arc<Destination>,
    notices: Arc<Notices>,
    state: Mutex<State>,
    flight: Flight,
}

struct State {
    kept: Kept,
    current: Option<Current>,
    /// The process before it, which may have answered calls of earlier workers.
    previous: Option<Arc<Running>>,
    /// Processes in a row that did not stay up.
    failures: u32,
}

/// The process, dead or alive, and the task that reads it.
struct Current {
    running: Arc<Running>,
    pump: AbortHandle,
}

/// What is left of a call's second chances.
#[derive(Clone, Debug, Default)]
pub(super) struct Tries {
    /// Sent to the next child because this one never had it.
    resent: bool,
    /// Sent twice although it may have been executed.
    repeated: bool,
}

impl Child {
    pub(crate) fn new(
        upstreams: &Arc<Upstreams>,
        server: &Arc<Server>,
        handshake: Handshake,
        (record, held): (Option<ResumeRecord>, Option<Held>),
        notices: mpsc::Sender<(SessionKey, Notice)>,
    ) -> Arc<Self> {
        let destination = upstreams.destination(server);
        let notices = Arc::new(Notices::new(handshake.key, notices));
        let recorded = record.is_some();
        let fitting = record.filter(|record| kept::fits(record, &destination));
        let mut kept = Kept::new(upstreams, handshake, fitting.as_ref());
        let custody = upstreams.parts.custody.clone();
        let current = custody.zip(held).and_then(|(custody, held)| {
            let own = parse_label(&held.label).is_some_and(|label| label.fingerprint == destination.fingerprint);
            if !own {
                // Another definition's process can't serve this one (C9, T4).
                kept.mark_stale();
                spawn(running::dismiss(custody, held, server.stop_grace));
                return None;
            }
            let parts = (upstreams, &destination);
            let (running, pump) = Running::start(parts, &notices, custody, (held.child, held.events), true);
            // The earlier worker told it the handshake right after it was started.
            if kept.handshake.confirmed {
                running.mark_initialized();
            }
            Some(Current { running, pump })
        });
        if recorded && fitting.is_none() {
            kept.mark_stale();
        }
        let state = Mutex::new(State { kept, current, previous: None, failures: 0 });
        Arc::new(Self { upstreams: Arc::clone(upstreams), destination, notices, state, flight: Flight::default() })
    }

    /// Starts the process for the first time. Must run to its end once begun.
    pub(crate) async fn open(self: &Arc<Self>) -> Result<Opened, Failure> {
        self.establish(Beginning::Asked).await?;
        lock(&self.state).kept.opened.clone().ok_or_else(|| self.over())
    }

    pub(crate) async fn call(self: &Arc<Self>, call: Call) -> Result<Answer, Failure> {
        let waiting = self.place(&call).await?;
        let mut stream = ChildStream::new(Arc::clone(self), Some(call), waiting);
        match stream.next().await? {
            Incoming::Response(response) => Ok(Answer::Whole(response)),
            Incoming::Message(message) => {
                stream.put_back(message);
                Ok(Answer::Stream(AnswerStream(Way::Child(Box::new(stream)))))
            }
        }
    }

    /// Hands a call to the process, a new one if need be. Sent at most once: a frame is taken whole or not at all.
    async fn place(self: &Arc<Self>, call: &Call) -> Result<Waiting, Failure> {
        for _ in 0..PLACE_TRIES_MAX {
            let running = self.running().await?;
            let may_stream = !call.method.answered_plain();
            let Some(mut waiting) = running.register(Registration { id: call.id.clone(), may_stream }) else {
                if running.is_over() {
                    continue;
                }
                return Err(self.protocol("two calls have the same id"));
            };
            match running.write(call.message.clone()).await {
                Ok(number) => {
                    waiting.frame = Some(number);
                    return Ok(waiting);
                }
                Err(WriteError::Gone) => self.settle_end(&running).await?,
                Err(error @ (WriteError::TooLong | WriteError::LineEnd)) => {
                    return Err(self.protocol(&format!("the request can't be written: {error}")));
                }
            }
        }
        Err(self.unreachable("its process ends as soon as it is started".into()))
    }

    /// A write found nobody: the end of the process must be known here as well before there can be another one.
    async fn settle_end(&self, running: &Running) -> Result<(), Failure> {
        let end = timeout(END_KNOWN_BOUND, running.ended()).await;
        end.map(|_| ()).map_err(|_| self.unreachable("the keeper does not hold its process any more".into()))
    }

    /// After the end of a child: allows the call to be sent to the next one, or says what is known of it.
    fn spend(&self, call: &Call, tries: &mut Tries, end: &End, frame: Option<u64>) -> Result<(), Failure> {
        if !end.has_frame(frame) && !tries.resent {
            tries.resent = true;
            return Ok(());
        }
        if tries.repeated || !lock(&self.state).kept.is_safe(self.server(), call) {
            return Err(self.unknown(end));
        }
        tries.repeated = true;
        Upstreams::count(&self.upstreams.counters.repeated);
        Ok(())
    }

    /// Sends to the process that is there. None is started for it: answers and news are for the one they were meant for.
    pub(crate) async fn send(&self, message: Bytes) -> Result<(), Failure> {
        let gone = || self.unreachable("its process has ended".into());
        let running = self.alive().ok_or_else(gone)?;
        match running.write(message).await {
            Ok(_) => Ok(()),
            Err(WriteError::Gone) => Err(gone()),
            Err(error @ (WriteError::TooLong | WriteError::LineEnd)) => {
                Err(self.protocol(&format!("the message can't be written: {error}")))
            }
        }
    }

    pub(crate) fn rejoin(self: &Arc<Self>, id: &RoutedId) -> Option<Answer> {
        let raw = Bytes::from(id.encode());
        let (running, previous) = {
            let state = lock(&self.state);
            (state.current.as_ref().map(|current| Arc::clone(&current.running))?, state.previous.clone())
        };
        let parked = running.take_parked(&raw).or_else(|| previous?.take_parked(&raw));
        if let Some(answer) = parked {
            return Some(Answer::Whole(answer));
        }
        if !running.adopted || id.stream.epoch >= self.upstreams.parts.epoch {
            return None;
        }
        let waiting = running.register(Registration { id: raw, may_stream: true })?;
        let stream = ChildStream::new(Arc::clone(self), None, waiting);
        Some(Answer::Stream(AnswerStream(Way::Child(Box::new(stream)))))
    }

    pub(crate) async fn confirm(self: &Arc<Self>) {
        let started = {
            let mut state = lock(&self.state);
            state.kept.handshake.confirmed = true;
            state.current.is_some()
        };
        if started && let Err(error) = self.running().await {
            // The next call tries again before it is sent.
            tracing::debug!(server = %self.server().name, %error, "`initialized` could not be sent yet");
        }
    }

    /// Ends the link; with `delete`, the process too.
    pub(crate) async fn end(&self, delete: bool) {
        let current = {
            let mut state = lock(&self.state);
            state.kept.ended = true;
            state.current.take_if(|_| delete)
        };
        if let Some(current) = current {
            current.running.custody.stop(current.running.id, self.server().stop_grace).await;
        } else if let Some(current) = &lock(&self.state).current {
            current.release();
        }
    }

    pub(crate) fn record(&self) -> Option<ResumeRecord> {
        lock(&self.state).kept.record(&self.upstreams, &self.destination, None)
    }

    pub(crate) fn opened(&self) -> bool {
        let state = lock(&self.state);
        state.kept.opened.is_some() || state.current.is_some()
    }

    pub(crate) fn remember_level(&self, level: Box<str>) {
        lock(&self.state).kept.handshake.log_level = Some(level);
        self.offer_record();
    }

    pub(crate) fn remember_subscription(&self, uri: Box<str>) {
        if !lock(&self.state).kept.remember_subscription(uri) {
            tracing::warn!(server = %self.server().name, "too many subscriptions; one will not survive a loss");
        }
        self.offer_record();
    }

    pub(crate) fn forget_subscription(&self, uri: &str) {
        lock(&self.state).kept.handshake.subscriptions.remove(uri);
        self.offer_record();
    }

    fn offer_record(&self) {
        if let Some(record) = self.record()
            && !self.notices.offer(Notice::Record(Box::new(record)))
        {
            Upstreams::count(&self.upstreams.counters.notices_dropped);
        }
    }

    fn server(&self) -> &Server {
        &self.destination.server
    }

    fn observe(&self, call: &Call, response: &Bytes) {
        if let Some((page, first)) = kept::page_of(&self.upstreams, call, response) {
            lock(&self.state).kept.catalogue.observe(page, first);
        }
    }

    fn unknown(&self, end: &End) -> Failure {
        Upstreams::count(&self.upstreams.counters.unknown);
        Failure::OutcomeUnknown { server: self.server().name.clone(), cause: end.describe() }
    }

    fn unreachable(&self, cause: Box<str>) -> Failure {
        Failure::Unreachable { server: self.server().name.clone(), cause }
    }

    fn protocol(&self, problem: &str) -> Failure {
        Failure::Protocol { server: self.server().name.clone(), problem: problem.into() }
    }

    fn oversize(&self) -> Failure {
        Failure::Oversize { server: self.server().name.clone(), bytes_max: self.server().message_bytes_max }
    }

    fn over(&self) -> Failure {
        Failure::Ended { server: self.server().name.clone() }
    }
}

impl Current {
    /// Leaves the process in custody, with all that nobody got.
    fn release(&self) {
        self.pump.abort();
        self.running.flush();
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if let Some(current) = &lock(&self.state).current {
            current.release();
        }
    }
}

impl fmt::Debug for Child {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Child").field("server", &self.server().name).finish_non_exhaustive()
    }
}

/// How many processes one message may be offered to.
const PLACE_TRIES_MAX: u32 = 3;

/// How long the news of an end may lag behind a write that found nobody.
const END_KNOWN_BOUND: Duration = Duration::from_secs(2);
