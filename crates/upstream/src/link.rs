//! A client session's way to a server, whichever way it leads.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use mainstay_core::call::{RoutedId, StreamId};
use mainstay_core::id::SessionKey;
use mainstay_core::resume::{OwedDelete, ResumeRecord};
use mainstay_core::time::Timestamp;
use mainstay_keeper::client::Held;
use tokio::sync::mpsc;

use crate::call::{Answer, AnswerStream, Call};
use crate::child::Child;
use crate::dual::{Dual, Way};
use crate::failure::Failure;
use crate::handshake::{Handshake, Opened};
use crate::kept::Setting;
use crate::notice::Notice;
use crate::server::Server;
use crate::upstreams::Upstreams;

/// One client session's way to one server. It owns the instance (upstream session or child), and makes it again when
/// it is lost: one flight for all calls that wait (U4, C5).
///
/// Dropping a link sends nothing and stops nothing: what it held waits for a later worker.
pub struct Link(Arc<Dual>);

/// How a link ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The session is over: the upstream session is deleted, the child ended.
    Delete,
    /// The session is unused for long: the child is ended, an upstream session kept for whoever comes back (S11).
    Suspend,
    /// The worker goes: a later one takes the instance up again.
    KeepForResume,
}

impl Link {
    /// The way of a new session: nothing is sent yet, and nothing is known. [`reach`](Self::reach) or the first use
    /// opens it, whichever comes first.
    pub fn lazy(
        upstreams: &Arc<Upstreams>,
        server: &Arc<Server>,
        handshake: Handshake,
        notices: mpsc::Sender<(SessionKey, Notice)>,
    ) -> Arc<Self> {
        Self::new(upstreams, server, handshake, None, notices)
    }

    fn new(
        upstreams: &Arc<Upstreams>,
        server: &Arc<Server>,
        handshake: Handshake,
        past: Option<(Option<ResumeRecord>, Option<Held>)>,
        notices: mpsc::Sender<(SessionKey, Notice)>,
    ) -> Arc<Self> {
        Arc::new(Self(Dual::new(upstreams, server, handshake, past, notices)))
    }

    /// Opens the link if it is not open, with the client's own `initialize`, and returns what the server answered. One flight with all calls that
    /// come meanwhile; an `initialized` that the client says meanwhile is passed on behind it.
    ///
    /// If the future is dropped the opening goes on, and the link has what comes of it: only [`end`](Self::end) ends the
    /// instance. The first opening is told as [`Notice::Opened`], here as at a first use.
    ///
    /// # Errors
    /// [`Failure::is_unreachable`] if the server is not there for now (refused, hung, 5xx; after `patience` or
    /// `handshake_bound`); a later try, or the next use, may open the link all the same. It is also that if the link was
    /// restored with a child and without a record: what that child said is not known any more. Anything else is
    /// definitive. No upstream session is left behind, and a child that was started is ended with all its tree.
    pub async fn reach(&self) -> Result<Opened, Failure> {
        self.0.reach().await
    }

    /// Takes up the instance of an earlier worker, without any traffic: the first use resumes it.
    ///
    /// If the client had confirmed its session and nothing of the instance is left, the next one is told as
    /// [`Notice::Remade`], never as the first (U6). A record that was made for another definition of the server is
    /// dropped with an owed delete (U2). `held` is the child that the keeper kept for the session, found by
    /// [`parse_label`](crate::parse_label). An instance that is not known to have been told `initialized` is told before
    /// the next use, perhaps for the second time.
    ///
    /// A session whose server is known never to have been reached has nothing to lose: it is [`lazy`](Self::lazy) again.
    ///
    /// Must be called within a tokio runtime.
    pub fn restore(
        upstreams: &Arc<Upstreams>,
        server: &Arc<Server>,
        handshake: Handshake,
        record: Option<ResumeRecord>,
        held: Option<Held>,
        notices: mpsc::Sender<(SessionKey, Notice)>,
    ) -> Arc<Self> {
        Self::new(upstreams, server, handshake, Some((record, held)), notices)
    }

    /// The client has said `initialized`: the server is told so, once per upstream session or child.
    pub async fn confirm(&self) {
        self.0.confirm().await
    }

    /// Sends one request and returns its answer, as far as it has come. The fast case, one JSON answer over HTTP, makes
    /// no channel and no task.
    ///
    /// # Errors
    /// See [`Failure`]; its [`outcome`](Failure::outcome) says what is known of the execution.
    pub async fn call(&self, call: Call) -> Result<Answer, Failure> {
        self.0.call(call).await
    }

    /// Sends a notification, or the answer to a request of the server. Ids in it are the server's own.
    ///
    /// Takes at most `patience` and ten seconds; `handshake_bound` more if a child must be told `initialized` first.
    ///
    /// # Errors
    /// It did not arrive, or ([`Failure::OutcomeUnknown`]) may not have.
    pub async fn send(&self, message: Bytes) -> Result<(), Failure> {
        self.0.send(message).await
    }

    /// Sends the answer to the question that was put to the client as `asked` at that time, under the server's own id, to
    /// the instance that asked. A child gets it once, however often it is sent and whoever does it, until it is
    /// [settled](Self::settle_answer); an HTTP server may get it twice if a worker is killed in the moment of sending.
    /// Takes at most `patience` and ten seconds.
    ///
    /// # Errors
    /// It did not arrive, or ([`Failure::OutcomeUnknown`]) may not have: whoever asked may be gone.
    pub async fn answer(&self, asked: (StreamId, Timestamp), message: Bytes) -> Result<(), Failure> {
        match self.child() {
            Some(child) => child.answer(asked, message).await,
            None => self.0.send(message).await,
        }
    }

    /// It is on record that the answer was [sent](Self::answer): the keeper need not know of it any more. Never blocks.
    pub fn settle_answer(&self, asked: StreamId) {
        if let Some(child) = self.child() {
            child.settle_answer(asked);
        }
    }

    /// The questions of earlier workers whose answers a child has, as far as the keeper still knows that: they are neither
    /// [settled](Self::settle_answer) here nor were by then.
    pub fn answers_earlier(&self) -> Vec<StreamId> {
        self.child().map(|child| child.answers_earlier()).unwrap_or_default()
    }

    /// The answer to a call that an earlier worker handed to a child: one that has come, or one still to come (R1a, C8).
    ///
    /// `None` at once if there can be none: the call never reached the keeper, was [settled](Self::settle), or its answer
    /// had to be let go. The answer, or the end of the child, ends the wait for any other. An answer that was given out
    /// whole is given out again until the call is settled.
    pub fn rejoin(&self, id: &RoutedId) -> Option<Answer> {
        self.child()?.rejoin(id)
    }

    /// Whether a child still runs calls of this session, those of earlier workers included. HTTP servers run none that
    /// would be known of here.
    pub fn has_running_calls(&self) -> bool {
        self.child().is_some_and(|child| child.has_running_calls())
    }

    /// Whether a child still runs calls of earlier workers.
    pub fn runs_earlier_calls(&self) -> bool {
        self.child().is_some_and(|child| child.runs_earlier_calls())
    }

    /// The client has taken the answer of this call, or never can: nothing of the call need be kept any more. The keeper
    /// lets go of it a second or two later, so that a worker that is killed in the moment of handing over leaves the
    /// answer in custody; sooner only if a child has so much of it that it might have to wait. Never blocks. Does nothing for a call that is not known, nor for HTTP servers.
    ///
    /// Must follow every answer that was received, or an error in its place. A call whose [`AnswerStream`] (or pending
    /// [`call`](Self::call)) is dropped before that is settled by the link.
    pub fn settle(&self, id: &RoutedId) {
        if let Some(child) = self.child() {
            child.settle(id.stream);
        }
    }

    /// The calls of earlier workers whose answers have come from a child and are neither [settled](Self::settle) nor taken
    /// by a waiter of this worker; oldest answer first. Most were answered without a stream just before their worker died:
    /// nobody can come back for these.
    pub fn answered_earlier(&self) -> Vec<StreamId> {
        self.child().map(|child| child.answered_earlier()).unwrap_or_default()
    }

    /// As [`settle`](Self::settle), but for a call whose client has nothing to come back with: the keeper lets go of it
    /// sooner, since a later worker would find it for nobody.
    pub fn settle_for_good(&self, call: StreamId) {
        if let Some(child) = self.child() {
            child.settle_for_good(call);
        }
    }

    /// Goes on with a call that an earlier worker sent to an HTTP server, behind the event that
    /// [`AnswerStream::position`] named then (R4). Children have no such thing: their calls are [rejoined](Self::rejoin). Nor have modern servers.
    /// `call` must be the one that was sent: it may be repeated if that is safe.
    ///
    /// # Errors
    /// There is no session to go on in. Later failures come from the stream.
    pub async fn resume(&self, call: Call, last_event_id: &str) -> Result<AnswerStream, Failure> {
        self.0.resume(call, last_event_id).await
    }

    /// Keeps the server's listening stream open as long as the guard lives (U9). A child needs none.
    pub fn listen(self: &Arc<Self>) -> Listening {
        self.0.listen();
        Listening(Arc::clone(self))
    }

    /// Ends the link; calls in flight fail, later ones are [`Failure::Ended`]. Takes at most
    /// [`SETTLE_BOUND`](crate::SETTLE_BOUND).
    ///
    /// With [`Ending::Delete`], returns the DELETE that is still owed. With the others nothing is sent
    /// to the server; [`record`](Self::record) is what the next worker needs.
    pub async fn end(&self, ending: Ending) -> Option<OwedDelete> {
        self.0.end(ending).await
    }

    /// What a later worker needs to go on; `None` before the server has answered.
    pub fn record(&self) -> Option<ResumeRecord> {
        self.0.record()
    }

    /// Whether the server's session is a connection of this worker's own (HTTP+SSE, 2024-11-05): nobody else can speak in
    /// it.
    pub fn is_connection(&self) -> bool {
        self.0.is_connection()
    }

    /// Whether the server has answered `initialize` for this session.
    pub fn opened(&self) -> bool {
        self.0.opened()
    }

    /// Remembers the log level that the server has accepted, to set it again after a loss.
    pub fn remember_level(&self, level: Box<str>) {
        self.remember(Setting::Level(level));
    }

    /// Remembers that the server has accepted a subscription to `uri`.
    pub fn remember_subscription(&self, uri: Box<str>) {
        self.remember(Setting::Subscribed(uri));
    }

    /// Forgets a subscription that the server has accepted the end of.
    pub fn forget_subscription(&self, uri: &str) {
        self.remember(Setting::Unsubscribed(uri.into()));
    }

    /// The process of the session's own, if its server is a program that has such.
    fn child(&self) -> Option<Arc<Child>> {
        match self.0.way() {
            Way::Child(child) => Some(child),
            Way::Http(_) | Way::Modern(_) => None,
        }
    }

    fn remember(&self, setting: Setting) {
        self.0.remember(setting)
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// Somebody who wants what the server says unasked. Dropping it closes the listening stream if it was the last one.
#[derive(Debug)]
pub struct Listening(Arc<Link>);

impl Drop for Listening {
    fn drop(&mut self) {
        self.0.0.unlisten();
    }
}
