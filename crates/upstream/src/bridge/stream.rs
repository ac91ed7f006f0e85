//! The messages of one call: what comes on its stream, the questions of its rounds, and its answer.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::wire::envelope::{self, Kind};
use mainstay_core::wire::method::Method;
use mainstay_core::wire::modern::ResultType;
use tokio::sync::watch;

use super::dispatch::Dispatched;
use super::rounds::{NoInput, Round, may_ask};
use super::{Bridge, Fate};
use crate::call::{Call, Incoming};
use crate::failure::{Blame, Failure};
use crate::feed::{Feed, FeedEnd};
use crate::http::Tries;
use crate::upstreams::Upstreams;
use crate::wire::{self, lock};

/// The messages of one call, over all its rounds. Dropping it closes the request at the server, which is how a modern one is
/// told that nobody wants the answer.
pub(crate) struct BridgeStream {
    bridge: Arc<Bridge>,
    call: Arc<Call>,
    /// The request as it was sent last: the next round is made of it.
    message: Bytes,
    tries: Tries,
    rounds: u32,
    phase: Phase,
    ready: VecDeque<Incoming>,
    fate: watch::Receiver<Fate>,
}

enum Phase {
    /// On its way. Kept here, so that a caller that looks away does not send it anew.
    Sending(Work),
    Reading(Box<Feed>),
    /// The client is asked.
    Asking(Box<Round>),
    Over,
}

type Work = Pin<Box<dyn Future<Output = Result<(Dispatched, Tries), Failure>> + Send>>;

impl BridgeStream {
    pub(super) fn sending(bridge: &Arc<Bridge>, call: Call) -> Result<Self, Failure> {
        let (sender, fate) = watch::channel(Fate::Going);
        {
            let mut state = lock(&bridge.state);
            if state.kept.ended {
                return Err(bridge.over());
            }
            state.running.insert(wire::id_text(&call.id).into(), sender);
        }
        let (message, call, tries) = (call.message.clone(), Arc::new(call), Tries::default());
        let work = Arc::clone(bridge).dispatch(Arc::clone(&call), message.clone(), tries.clone());
        let phase = Phase::Sending(Box::pin(work));
        Ok(Self { bridge: Arc::clone(bridge), call, message, tries, rounds: 0, phase, ready: VecDeque::new(), fate })
    }

    pub(super) fn put_back(&mut self, incoming: Incoming) {
        self.ready.push_front(incoming);
    }

    /// See [`AnswerStream::next`](crate::AnswerStream::next).
    pub(crate) async fn next(&mut self) -> Result<Incoming, Failure> {
        let mut fate = self.fate.clone();
        loop {
            if let Some(incoming) = self.ready.pop_front() {
                return Ok(incoming);
            }
            tokio::select! {
                biased;
                fate = changed(&mut fate) => {
                    self.over();
                    match fate {
                        Fate::Ended => return Err(self.bridge.over()),
                        // What was cancelled has no answer (2025-11-25, Cancellation); who asked gives up by itself.
                        Fate::Cancelled | Fate::Going => return std::future::pending().await,
                    }
                }
                advanced = self.advance() => advanced?,
            }
        }
    }

    /// One step further. Cancel-safe.
    async fn advance(&mut self) -> Result<(), Failure> {
        match &mut self.phase {
            Phase::Over => Err(self.bridge.over()),
            Phase::Sending(work) => {
                let sent = work.await;
                self.phase = Phase::Over;
                let (dispatched, tries) = sent?;
                self.tries = tries;
                match dispatched {
                    Dispatched::Whole(response) => self.land(&response),
                    Dispatched::Feed(feed) => {
                        self.phase = Phase::Reading(Box::new(feed));
                        Ok(())
                    }
                }
            }
            Phase::Reading(feed) => match feed.next().await {
                Ok(message) => self.take_in(message),
                Err(FeedEnd::Oversize) => {
                    self.phase = Phase::Over;
                    Err(self.bridge.oversize())
                }
                Err(FeedEnd::Broken(cause)) => self.broken(cause),
                Err(FeedEnd::Failed(failure)) => {
                    self.phase = Phase::Over;
                    Err(failure)
                }
            },
            Phase::Asking(round) => match round.answers().await {
                Ok(()) => {
                    self.send_on();
                    Ok(())
                }
                Err(no_input) => {
                    self.over();
                    self.refuse(&no_input)
                }
            },
        }
    }

    fn take_in(&mut self, message: Bytes) -> Result<(), Failure> {
        let server = &self.bridge.server().name;
        let Ok(scanned) = envelope::scan(&message) else {
            tracing::debug!(%server, "an event is no JSON-RPC message; skipped");
            return Ok(());
        };
        match scanned.kind {
            Kind::Notification => self.ready.push_back(Incoming::Message(message)),
            // A modern server must not ask anything on a stream, and nobody could answer it there.
            Kind::Request => tracing::debug!(%server, "a request on the stream of a modern server; skipped"),
            Kind::Result | Kind::Error => {
                if let Phase::Reading(feed) = std::mem::replace(&mut self.phase, Phase::Over) {
                    feed.finish();
                }
                return self.land(&message);
            }
        }
        Ok(())
    }

    /// The stream broke before the answer. With it the request is gone, and may have been carried out.
    fn broken(&mut self, cause: Box<str>) -> Result<(), Failure> {
        self.phase = Phase::Over;
        if !self.bridge.is_safe(&self.call) || !self.tries.spend_repetition() {
            return Err(self.bridge.unknown(cause));
        }
        Upstreams::count(&self.bridge.upstreams.counters.repeated);
        self.send(self.message.clone(), Duration::ZERO);
        Ok(())
    }

    /// Takes the response of a round: the answer, or a wish for more.
    fn land(&mut self, response: &Bytes) -> Result<(), Failure> {
        let scanned =
            envelope::scan(response).map_err(|_| self.bridge.protocol("its answer is no JSON-RPC message"))?;
        let kind = scanned.result.as_ref().map(|result| ResultType::of(response, result));
        match (kind, &scanned.result) {
            (None | Some(ResultType::Complete), _) | (_, None) => {
                let answer = self.bridge.translated(&self.call, response, &scanned);
                self.ready.push_back(Incoming::Response(answer));
                Ok(())
            }
            (Some(ResultType::InputRequired), Some(result)) if may_ask(self.call.method) => {
                self.rounds += 1;
                if self.rounds > ROUNDS_MAX {
                    let text = format!("the server asked for input more than {ROUNDS_MAX} times");
                    return self.refuse(&NoInput(text));
                }
                match self.bridge.begin_round(response, result) {
                    Ok((round, questions)) => {
                        self.ready.extend(questions.into_iter().map(Incoming::Message));
                        self.phase = Phase::Asking(Box::new(round));
                        Ok(())
                    }
                    Err(no_input) => self.refuse(&no_input),
                }
            }
            (Some(ResultType::InputRequired), Some(_)) => {
                Err(self.bridge.protocol("it asks for input where it must not"))
            }
            (Some(ResultType::Task | ResultType::Unknown), Some(_)) => {
                Err(self.bridge.protocol("its result is of a type that was not agreed on"))
            }
        }
    }

    /// Sends the next round, with what the client has answered.
    fn send_on(&mut self) {
        let Phase::Asking(round) = std::mem::replace(&mut self.phase, Phase::Over) else { return };
        let id = self.bridge.upstreams.own_id();
        let message = round.next_message(&self.message, &id);
        let pause = if round.is_pause() { PAUSE } else { Duration::ZERO };
        // Each round is a request of its own.
        self.tries = Tries::default();
        self.send(message, pause);
    }

    fn send(&mut self, message: Bytes, pause: Duration) {
        self.message = message.clone();
        let (bridge, call, tries) = (Arc::clone(&self.bridge), Arc::clone(&self.call), self.tries.clone());
        self.phase = Phase::Sending(Box::pin(async move {
            tokio::time::sleep(pause).await;
            bridge.dispatch(call, message, tries).await
        }));
    }

    /// The call ends, since what the server asks for can't be had: a tool has failed then, anything else is refused.
    fn refuse(&mut self, no_input: &NoInput) -> Result<(), Failure> {
        self.phase = Phase::Over;
        if self.call.method != Method::ToolsCall {
            return Err(self.bridge.rejected(200, &no_input.0));
        }
        let mut result = b"{\"content\":[{\"type\":\"text\",\"text\":".to_vec();
        result.extend_from_slice(&envelope::escape(&no_input.0));
        result.extend_from_slice(b"}],\"isError\":true}");
        let answer = envelope::result_message(&self.call.id, &result);
        self.ready.push_back(Incoming::Response(answer.into()));
        Ok(())
    }

    fn over(&mut self) {
        if let Phase::Asking(round) = std::mem::replace(&mut self.phase, Phase::Over) {
            self.bridge.abandon(&round);
        }
    }
}

impl Drop for BridgeStream {
    fn drop(&mut self) {
        self.over();
        lock(&self.bridge.state).running.remove(&*wire::id_text(&self.call.id));
    }
}

/// Resolves once the call is not to go on.
async fn changed(fate: &mut watch::Receiver<Fate>) -> Fate {
    let changed = fate.wait_for(|fate| *fate != Fate::Going).await.map(|fate| *fate);
    match changed {
        Ok(fate) => fate,
        // The sender goes with the stream itself.
        Err(_) => std::future::pending().await,
    }
}

/// How often a server may ask for more before a call fails.
const ROUNDS_MAX: u32 = 10;

/// How long a server that asks for nothing but to be asked again is left alone.
const PAUSE: Duration = Duration::from_millis(250);
