//! Sending a request to a modern server as often as is safe, and telling what comes back.

use std::sync::Arc;

use bytes::Bytes;
use mainstay_core::wire::envelope::{self, Kind};
use mainstay_core::wire::method::Method;
use mainstay_core::wire::modern::{self, Era};

use super::post::{self, Fault, Posted, Response};
use super::{Bridge, Dressed, tools};
use crate::call::Call;
use crate::catalogue::asks_first_page;
use crate::dialect::{self, Seen, Verdict};
use crate::era::{error_code, names_version};
use crate::failure::{Blame, Failure};
use crate::feed::Feed;
use crate::http::{Content, Reply, Tries, Unread};
use crate::kept;
use crate::upstreams::{Upstreams, unusable};
use crate::wire::{self, lock, same_id};

/// A request that got as far as an answer.
pub(super) enum Dispatched {
    /// The response, under the id that it was sent with.
    Whole(Bytes),
    /// What comes, one by one.
    Feed(Feed),
}

/// What one attempt came to.
enum Step {
    Done(Dispatched),
    /// The server misses headers, or reads them otherwise: what it answered.
    HeaderMismatch(Bytes),
    /// The server says that it does not speak the revision, and that it does: what it answered.
    VersionRefused(Bytes),
    /// As a server answers that is not modern: what it said, if that was an answer at all.
    OtherEra(Failure, Option<Bytes>),
    /// There is no answer.
    Not(Trouble),
}

/// Why an attempt has no answer.
enum Trouble {
    /// The server is not there, and has not seen the request.
    NotExecuted(Box<str>),
    /// The server is not there, and may have seen it.
    Unavailable(Box<str>),
    /// The connection ended after it may have gone out.
    Ambiguous(Box<str>),
    Unauthorized,
    Failed(Failure),
}

impl Bridge {
    /// Sends `message`, which is `call` or its next round under another id, until there is an answer.
    pub(super) async fn dispatch(
        self: Arc<Self>,
        call: Arc<Call>,
        message: Bytes,
        mut tries: Tries,
    ) -> Result<(Dispatched, Tries), Failure> {
        let mut refreshed = false;
        loop {
            let readings = self.destination.annotated.readings();
            let dressed = self.dress_call(&call, message.clone());
            match self.attempt(&dressed).await {
                Step::Done(dispatched) => return Ok((dispatched, tries)),
                Step::HeaderMismatch(answer) => {
                    if refreshed || call.method != Method::ToolsCall || !self.refresh_tools(readings).await {
                        return Ok((Dispatched::Whole(answer), tries));
                    }
                    refreshed = true;
                    Upstreams::count(&self.upstreams.counters.repeated);
                }
                Step::VersionRefused(answer) => {
                    if !self.may_insist(&mut tries) {
                        return Ok((Dispatched::Whole(answer), tries));
                    }
                }
                Step::OtherEra(failure, answer) => {
                    return self.doubted(failure, answer).await.map(|answer| (Dispatched::Whole(answer), tries));
                }
                Step::Not(trouble) => self.try_again(trouble, &mut tries, || self.is_safe(&call)).await?,
            }
        }
    }

    /// After an answer that speaks of another era: the answer, if the server is modern all the same.
    async fn doubted(&self, failure: Failure, answer: Option<Bytes>) -> Result<Bytes, Failure> {
        let modern = self.server().fixed_era() == Some(Era::Modern) || {
            self.destination.eras.forget_verdict();
            self.upstreams.is_modern(&self.destination).await != Some(false)
        };
        lock(&self.state).contradicted |= !modern;
        answer.filter(|_| modern).ok_or(failure)
    }

    /// A request of the link's own: its whole response, in the client's name.
    pub(super) async fn ask(&self, method: &str, params: Option<&[u8]>, tries: &mut Tries) -> Result<Bytes, Failure> {
        let id = self.upstreams.own_id();
        let dressed = self.dress(envelope::request_message(&id, method, params).into());
        loop {
            let step = match post::exchange(&self.upstreams, &self.destination, &dressed).await {
                Ok(response) if (200..300).contains(&response.status) => return Ok(response.body),
                Ok(response) => {
                    let seen = Seen { status: response.status, challenge: response.challenge, body: &response.body };
                    self.refused(&seen, &id)
                }
                Err(fault) => fault.into(),
            };
            match step {
                Step::Done(Dispatched::Whole(body)) | Step::HeaderMismatch(body) => return Ok(body),
                Step::VersionRefused(body) => {
                    if !self.may_insist(tries) {
                        return Ok(body);
                    }
                }
                Step::OtherEra(failure, answer) => return self.doubted(failure, answer).await,
                Step::Done(Dispatched::Feed(_)) => return Err(self.protocol("it answered a refusal with events")),
                Step::Not(trouble) => self.try_again(trouble, tries, || true).await?,
            }
        }
    }

    /// Whether a request is sent once more in the revision that was refused and is said to be spoken: it was refused before
    /// anything was done, and there is no other revision to try (2026-07-28, Versioning).
    fn may_insist(&self, tries: &mut Tries) -> bool {
        let may = tries.spend_repetition();
        if may {
            Upstreams::count(&self.upstreams.counters.repeated);
        }
        may
    }

    /// Waits until the request may be sent once more after `trouble`, or tells what became of it.
    async fn try_again(&self, trouble: Trouble, tries: &mut Tries, is_safe: impl Fn() -> bool) -> Result<(), Failure> {
        match trouble {
            Trouble::NotExecuted(cause) => match tries.wait(self.server().patience).await {
                true => Ok(()),
                false => Err(self.unreachable(cause)),
            },
            Trouble::Unavailable(cause) => {
                if !is_safe() {
                    return Err(self.unknown(cause));
                }
                match tries.wait(self.server().patience).await {
                    true => Ok(()),
                    false => Err(self.unreachable(cause)),
                }
            }
            Trouble::Ambiguous(cause) => match is_safe() && tries.spend_repetition() {
                true => {
                    Upstreams::count(&self.upstreams.counters.repeated);
                    Ok(())
                }
                false => Err(self.unknown(cause)),
            },
            Trouble::Unauthorized => {
                if !tries.spend_refresh() || !self.destination.refresh(&*self.upstreams.parts.environment)? {
                    return Err(self.unauthorized());
                }
                Ok(())
            }
            Trouble::Failed(failure) => Err(failure),
        }
    }

    fn dress_call(&self, call: &Call, message: Bytes) -> Dressed {
        let mut dressed = self.dress(message);
        if call.method == Method::ToolsCall
            && let Ok(scanned) = envelope::scan(&dressed.message)
        {
            dressed.headers.extend(self.destination.annotated.headers(&dressed.message, &scanned));
        }
        dressed
    }

    async fn attempt(&self, dressed: &Dressed) -> Step {
        let posted = match post::request(&self.upstreams, &self.destination, dressed, false).await {
            Ok(posted) => posted,
            Err(fault) => return fault.into(),
        };
        let id = envelope::scan(&dressed.message).ok().and_then(|scanned| scanned.id).unwrap_or_default();
        let id = &dressed.message[id];
        match posted {
            Posted::Refused(Response { status, challenge, body }) => {
                self.refused(&Seen { status, challenge, body: &body }, id)
            }
            Posted::Body(reply, Content::Json) => self.read_answer(reply, id).await,
            Posted::Feed(feed) => Step::Done(Dispatched::Feed(feed)),
            Posted::Body(_, Content::Events | Content::Other) => {
                Step::Not(Trouble::Failed(self.protocol("it answered a request with neither JSON nor an event stream")))
            }
        }
    }

    async fn read_answer(&self, reply: Reply, id: &[u8]) -> Step {
        let body = match reply.collect(self.server().message_bytes_max).await {
            Ok(body) => body,
            Err(Unread::Oversize) => return Step::Not(Trouble::Failed(self.oversize())),
            Err(Unread::Broken(cause)) => return Step::Not(Trouble::Ambiguous(cause)),
        };
        let Ok(scanned) = envelope::scan(&body) else {
            return Step::Not(Trouble::Failed(self.protocol("its answer is no JSON-RPC message")));
        };
        match (scanned.kind, wire::id_of(&scanned, &body).map(|found| same_id(found, id))) {
            (Kind::Result | Kind::Error, Some(true)) => Step::Done(Dispatched::Whole(body)),
            (Kind::Error, Some(false) | None) => match dialect::answer_with_id(&body, id) {
                Some(answer) => Step::Done(Dispatched::Whole(answer.into())),
                None => Step::Not(Trouble::Failed(self.protocol("its answer is no JSON-RPC message"))),
            },
            (Kind::Result | Kind::Request | Kind::Notification, _) => {
                Step::Not(Trouble::Failed(self.protocol("its answer is to another request")))
            }
        }
    }

    /// What a response with another status than 2xx comes to. An HTTP status means nothing to a legacy client, 404 even
    /// something else: a JSON-RPC error is an answer like any other.
    fn refused(&self, seen: &Seen<'_>, id: &[u8]) -> Step {
        let status = seen.status;
        let refusal = || self.rejected_with(status);
        let answer = || dialect::answer_with_id(seen.body, id).map(Bytes::from);
        match dialect::classify(seen, false, Some(id)) {
            Verdict::Unauthorized => Step::Not(Trouble::Unauthorized),
            Verdict::Unavailable => {
                let cause = format!("HTTP status {status}").into();
                // Whoever limits rates, or keeps no sessions and says 503, has not begun with the request.
                if matches!(status, 429 | 503) {
                    Step::Not(Trouble::NotExecuted(cause))
                } else {
                    Step::Not(Trouble::Unavailable(cause))
                }
            }
            Verdict::Answer => match (answer(), self.spoken_by(seen)) {
                (Some(answer), Spoken::Modern) => Step::Done(Dispatched::Whole(answer)),
                (Some(answer), Spoken::Headers) => Step::HeaderMismatch(answer),
                (Some(answer), Spoken::Version) => Step::VersionRefused(answer),
                (Some(answer), Spoken::Other) => Step::OtherEra(refusal(), Some(answer)),
                (None, _) => Step::Not(Trouble::Failed(refusal())),
            },
            Verdict::NoEndpoint => {
                let problem = "there is nothing at its url: HTTP status 404";
                Step::OtherEra(unusable(self.server(), &problem), None)
            }
            Verdict::Refused if matches!(status, 400 | 404..=406 | 410 | 415 | 422) => Step::OtherEra(refusal(), None),
            Verdict::Refused | Verdict::Suspect | Verdict::SessionLost(_) => Step::Not(Trouble::Failed(refusal())),
        }
    }

    /// Which kind of server answers with such an error.
    fn spoken_by(&self, seen: &Seen<'_>) -> Spoken {
        let Ok(scanned) = envelope::scan(seen.body) else { return Spoken::Modern };
        let Some(error) = &scanned.error else { return Spoken::Modern };
        match error_code(seen.body, error) {
            Some(modern::HEADER_MISMATCH) => Spoken::Headers,
            Some(modern::UNSUPPORTED_VERSION) => {
                let data = envelope::member(seen.body, error, "data");
                let ours = data.is_some_and(|data| names_version(seen.body, &data, "supported"));
                if ours { Spoken::Version } else { Spoken::Other }
            }
            // What servers say that look for a session: the rest of the numbers stands for the request itself.
            Some(-32019..=-32000 | -32600) if seen.status < 500 => Spoken::Other,
            Some(_) | None => Spoken::Modern,
        }
    }

    /// Reads the server's list of tools again, for a call whose headers it refused; nothing else is done if somebody has
    /// done that since `readings`. False if it could not be read.
    async fn refresh_tools(&self, readings: u64) -> bool {
        let _turn = self.destination.annotated.refreshing.lock().await;
        if self.destination.annotated.readings() > readings {
            return true;
        }
        let mut cursor: Option<Vec<u8>> = None;
        for _ in 0..PAGES_MAX {
            let params = cursor.as_ref().map(|cursor| [b"{\"cursor\":", &**cursor, b"}"].concat());
            let Ok(response) = self.ask("tools/list", params.as_deref(), &mut Tries::default()).await else {
                return false;
            };
            let Some(result) = envelope::scan(&response).ok().and_then(|scanned| scanned.result) else { return false };
            let page = tools::read(self.server(), &response, &result);
            self.destination.annotated.observe(page.annotated, cursor.is_none());
            cursor = page.next.map(|span| response[span].to_vec());
            if cursor.is_none() {
                break;
            }
        }
        true
    }

    /// `response` to `call` as a legacy client knows it: under the call's own id, without what only modern results have,
    /// and without tools that may not be offered. What it says of the tools is noted.
    pub(super) fn translated(&self, call: &Call, response: &Bytes, scanned: &envelope::Envelope) -> Bytes {
        let mut edits: modern::edit::Edits = Vec::new();
        edits.extend(scanned.id.clone().map(|span| (span, call.id.to_vec())));
        if let Some(result) = &scanned.result {
            edits.extend(modern::edit::object(response, result, &modern::edit::RESULT_MEMBERS));
            if call.method == Method::ToolsList {
                let page = tools::read(self.server(), response, result);
                self.destination.annotated.observe(page.annotated, asks_first_page(&call.message));
                // Where there are no headers, their annotations mean nothing.
                edits.extend(page.edits.into_iter().filter(|_| self.server().is_http()));
            }
        }
        let response = Bytes::from(modern::edit::apply(response, edits));
        if let Some((page, first)) = kept::page_of(&self.upstreams, call, &response) {
            lock(&self.state).kept.catalogue.observe(page, first);
        }
        response
    }
}

/// Whose word an error is.
enum Spoken {
    /// A modern server's, about the request.
    Modern,
    /// A modern server's, about the headers.
    Headers,
    /// A modern server's, about the revision, which it speaks all the same.
    Version,
    /// A server's that is not modern.
    Other,
}

impl From<Fault> for Step {
    fn from(fault: Fault) -> Self {
        Self::Not(match fault {
            Fault::NeverSent(cause) => Trouble::NotExecuted(cause),
            Fault::Lost(cause) => Trouble::Ambiguous(cause),
            Fault::Failed(failure) => Trouble::Failed(failure),
        })
    }
}

/// Pages of a server's list of tools that are read for its annotations.
const PAGES_MAX: usize = 32;
