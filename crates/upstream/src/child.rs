//! The way to a server that is a child process, held by the keeper (2025-11-25, Transports, stdio).
//!
//! One [`Child`] is one client session's process, and the next ones if it dies. A new process is told the client's
//! handshake and settings before any call (C5). What was sent to a process that died is not sent again unless that is
//! safe (C3, U5).

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::call::{RoutedId, StreamId};
use mainstay_core::id::SessionKey;
use mainstay_core::resume::ResumeRecord;
use mainstay_core::time::Timestamp;
use mainstay_keeper::client::{Held, WriteError};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::call::{Answer, AnswerStream, Call, Incoming, Way};
use crate::failure::{Blame, Failure};
use crate::flight::Flight;
use crate::handshake::{Handshake, Opened};
use crate::kept::{self, Kept, Past, Setting};
use crate::notice::{Notice, Notices};
use crate::server::Server;
use crate::task::spawn as spawn_task;
use crate::upstreams::{Destination, Upstreams};
use crate::wire::lock;

pub use dismiss::dismiss;
pub(crate) use dismiss::dismiss_of;
pub use label::{Holder, Label, parse_label};
pub(crate) use mask::Mask;
pub use program::OnDisk;
pub(crate) use program::Stamp;
pub use receipt::Receipt;
pub(crate) use shared::{Exchange, Manner, Shared, Sharing};
pub(crate) use sibling::ask as ask_sibling;
pub use spawn::ALLOWED_VARIABLES;
pub(crate) use stream::ChildStream;
pub(crate) use supervision::Supervision;
pub use supervision::{ChildCounts, ChildEnd, ChildSeen, LastFailure, ServerMemory, Supervised};

use end::End;
pub use end::Why;
use running::{Audience, Registration, Running, Waiting};

mod acks;
mod dismiss;
mod end;
mod label;
mod launch;
mod mask;
mod oversize;
mod parked;
mod program;
mod receipt;
mod running;
mod shared;
mod sibling;
mod slot;
mod spawn;
mod start;
mod stream;
mod supervision;
mod table;
mod unheard;

/// One client session's way to a stdio server.
pub(crate) struct Child {
    upstreams: Arc<Upstreams>,
    destination: Arc<Destination>,
    notices: Arc<Notices>,
    state: Mutex<State>,
    flight: Flight,
    /// Whether the last process refused `initialize`.
    refused: AtomicBool,
}

struct State {
    kept: Kept,
    current: Option<Current>,
    /// The process before it, which may have answered calls of earlier workers.
    previous: Option<Arc<Running>>,
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
        past: Option<(Option<ResumeRecord>, Option<Held>)>,
        notices: mpsc::Sender<(SessionKey, Notice)>,
    ) -> Arc<Self> {
        let destination = upstreams.destination(server);
        let notices = Arc::new(Notices::new(handshake.key, notices));
        let past = past.map(|left| Past::of((upstreams, &destination), &notices, handshake.confirmed, left));
        let past = past.unwrap_or_default();
        let kept = Kept::new(upstreams, handshake, &past);
        let custody = upstreams.parts.custody.clone();
        let current = custody.zip(past.held).map(|(custody, held)| {
            // A record from before this process was started speaks of the one before it.
            let spawned_at = Timestamp::from_unix_millis(held.spawned_at_unix_ms);
            let told = past.record.is_some_and(|record| record.told && record.saved_at >= spawned_at);
            let parts = (upstreams, &destination);
            let handed_over = (held.child, &held.open[..], held.events);
            let lease = destination.supervision.adopt(spawned_at);
            // What a child of another definition was given in confidence is not known any more.
            let mask = past.is_redefined.then(Mask::of_everything);
            let audience = Audience::Session(Arc::clone(&notices));
            let (running, pump) = Running::start(parts, audience, custody, handed_over, (lease, mask));
            running.lease.attach(running.id, Arc::downgrade(&running), None);
            if told {
                running.mark_initialized();
                destination.eras.note_legacy(true);
            }
            if past.is_redefined {
                running.mark_retired(destination.server.calls_grace);
                spawn_task(Arc::clone(&running).retire(Why::Redefined));
            }
            Current { running, pump }
        });
        let state = Mutex::new(State { kept, current, previous: None });
        Arc::new(Self {
            upstreams: Arc::clone(upstreams),
            destination,
            notices,
            state,
            flight: Flight::default(),
            refused: AtomicBool::new(false),
        })
    }

    /// See [`Link::reach`](crate::Link::reach).
    pub(crate) async fn reach(self: &Arc<Self>) -> Result<Opened, Failure> {
        self.running().await?;
        self.catch_up().await;
        let unknown = || self.unreachable("what its process said of itself is not known any more".into());
        lock(&self.state).kept.opened.clone().ok_or_else(unknown)
    }

    pub(crate) async fn call(self: &Arc<Self>, call: Call) -> Result<Answer, Failure> {
        let waiting = self.place(&call).await?;
        let mut stream = ChildStream::new(Arc::clone(self), call, waiting);
        match stream.next().await? {
            Incoming::Response(response) => Ok(Answer::Whole(response)),
            incoming @ (Incoming::Message(_) | Incoming::Reached) => {
                stream.put_back(incoming);
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
            match running.write_call(&mut waiting, call.message.clone()).await {
                Ok(()) => return Ok(waiting),
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
            return Err(self.unknown(end.describe()));
        }
        tries.repeated = true;
        Upstreams::count(&self.upstreams.counters.repeated);
        Ok(())
    }

    /// Sends to the process that is there. None is started for it: answers and news are for the one they were meant for.
    pub(crate) async fn send(self: &Arc<Self>, message: Bytes) -> Result<(), Failure> {
        let gone = || self.unreachable("its process has ended".into());
        self.catch_up().await;
        let running = self.alive().ok_or_else(gone)?;
        // The keeper takes a message whole or, if nobody waits for it any more, not at all.
        match timeout(self.server().patience + kept::SEND_BEYOND_PATIENCE, running.write(message)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(WriteError::Gone)) => Err(gone()),
            Err(_) => Err(self.unreachable("its process does not read what it is told".into())),
            Ok(Err(error @ (WriteError::TooLong | WriteError::LineEnd))) => {
                Err(self.protocol(&format!("the message can't be written: {error}")))
            }
        }
    }

    /// See [`Link::answer`](crate::Link::answer).
    pub(crate) async fn answer(&self, asked: (StreamId, Timestamp), message: Bytes) -> Result<(), Failure> {
        let gone = || self.unreachable("the process that asked has ended".into());
        let running = self.alive().filter(|running| running.since <= asked.1).ok_or_else(gone)?;
        let writing = running.write_answer(asked.0, message);
        match timeout(self.server().patience + kept::SEND_BEYOND_PATIENCE, writing).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(WriteError::Gone)) => Err(gone()),
            Err(_) => Err(self.unreachable("its process does not read what it is told".into())),
            Ok(Err(error @ (WriteError::TooLong | WriteError::LineEnd))) => {
                Err(self.protocol(&format!("the answer can't be written: {error}")))
            }
        }
    }

    /// See [`Link::settle_answer`](crate::Link::settle_answer).
    pub(crate) fn settle_answer(&self, asked: StreamId) {
        self.each_running(|running| running.settle_answer(asked));
    }

    pub(crate) fn rejoin(self: &Arc<Self>, id: &RoutedId) -> Option<Answer> {
        if id.stream.epoch >= self.upstreams.parts.epoch {
            return None;
        }
        let (running, previous) = {
            let state = lock(&self.state);
            (state.current.as_ref().map(|current| Arc::clone(&current.running))?, state.previous.clone())
        };
        Some(match running.rejoin(id).or_else(|| previous?.rejoin(id))? {
            Ok(answer) => Answer::Whole(answer),
            Err(waiting) => {
                let stream = ChildStream::rejoined(Arc::clone(self), waiting);
                Answer::Stream(AnswerStream(Way::Child(Box::new(stream))))
            }
        })
    }

    /// See [`Link::settle`](crate::Link::settle).
    pub(crate) fn settle(&self, call: StreamId) {
        self.each_running(|running| running.settle(call));
    }

    /// See [`Link::settle_for_good`](crate::Link::settle_for_good).
    pub(crate) fn settle_for_good(&self, call: StreamId) {
        self.each_running(|running| running.settle_for_good(call));
    }

    fn each_running(&self, act: impl Fn(&Running)) {
        let state = lock(&self.state);
        let current = state.current.as_ref().map(|current| &current.running);
        current.into_iter().chain(state.previous.as_ref()).for_each(|running| act(running));
    }

    /// See [`Link::answers_earlier`](crate::Link::answers_earlier).
    pub(crate) fn answers_earlier(&self) -> Vec<StreamId> {
        let state = lock(&self.state);
        state.current.as_ref().map_or_else(Vec::new, |current| current.running.answers_earlier())
    }

    /// See [`Link::answered_earlier`](crate::Link::answered_earlier).
    pub(crate) fn answered_earlier(&self) -> Vec<StreamId> {
        let state = lock(&self.state);
        let current = state.current.as_ref().map(|current| &current.running);
        current.into_iter().chain(state.previous.as_ref()).flat_map(|running| running.answered_earlier()).collect()
    }

    /// Whether a call is open and not answered yet.
    pub(crate) fn has_running_calls(&self) -> bool {
        let state = lock(&self.state);
        let current = state.current.as_ref().map(|current| &current.running);
        current.into_iter().chain(state.previous.as_ref()).any(|running| running.has_running_calls())
    }

    /// See [`Link::runs_earlier_calls`](crate::Link::runs_earlier_calls).
    pub(crate) fn runs_earlier_calls(&self) -> bool {
        let state = lock(&self.state);
        state.current.as_ref().is_some_and(|current| current.running.runs_earlier_calls())
    }

    /// The client said `initialized`: so does the link, once per process.
    pub(crate) async fn confirm(self: &Arc<Self>) {
        lock(&self.state).kept.handshake.confirmed = true;
        self.catch_up().await;
    }

    /// Passes on an `initialized` that the client said while the process was being started. Whichever of the two is
    /// through last finds what the other has left.
    async fn catch_up(self: &Arc<Self>) {
        if self.alive().is_some_and(|running| !running.is_retired())
            && let Err(error) = self.running().await
        {
            // The next call tries again before it is sent.
            tracing::debug!(server = %self.server().name, %error, "`initialized` could not be sent yet");
        }
    }

    /// Ends the link, and for a reason the process too.
    pub(crate) async fn end(&self, why: Option<Why>) {
        let (current, previous) = {
            let mut state = lock(&self.state);
            state.kept.ended = true;
            (state.current.take_if(|_| why.is_some()), state.previous.take_if(|_| why.is_some()))
        };
        // Nobody comes back to a session that is over.
        previous.inspect(|previous| previous.settle_all());
        if let Some((current, why)) = current.zip(why) {
            current.running.settle_all();
            current.running.stop(why).await;
        } else if let Some(current) = &lock(&self.state).current {
            current.release();
        }
    }

    pub(crate) fn record(&self) -> Option<ResumeRecord> {
        let state = lock(&self.state);
        let current = state.current.as_ref().map(|current| &current.running);
        let told = current.is_some_and(|running| running.is_initialized() && !running.is_over());
        state.kept.record(&self.upstreams, &self.destination, None, told)
    }

    pub(crate) fn opened(&self) -> bool {
        let state = lock(&self.state);
        state.kept.opened.is_some() || state.current.is_some()
    }

    pub(crate) fn remember(&self, setting: Setting) {
        lock(&self.state).kept.remember(self.server(), setting);
        kept::offer(&self.upstreams, &self.notices, self.record());
    }

    /// What the session's client said, and has set since.
    pub(crate) fn handshake(&self) -> Handshake {
        lock(&self.state).kept.handshake.clone()
    }

    /// Whether the process answered the last `initialize` with a refusal, as one of the modern era does.
    pub(crate) fn was_refused(&self) -> bool {
        self.refused.load(Ordering::Acquire)
    }

    fn server(&self) -> &Server {
        &self.destination.server
    }

    fn observe(&self, call: &Call, response: &Bytes) {
        if let Some((page, first)) = kept::page_of(&self.upstreams, call, response) {
            lock(&self.state).kept.catalogue.observe(page, first);
        }
    }

    fn unknown(&self, cause: Box<str>) -> Failure {
        self.unknown_in(&self.upstreams, cause)
    }
}

impl Current {
    /// Leaves the process in custody, with all that nobody got.
    fn release(&self) {
        self.pump.abort();
        self.running.flush();
    }
}

impl Blame for Child {
    fn blamed(&self) -> &Server {
        self.server()
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
