//! The link's own requests: pings that probe, settings that are replayed, lists that are compared.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::resume::UpstreamId;
use mainstay_core::wire::envelope;
use tokio::time::timeout;

use super::post::NO_ENDPOINT;
use super::reply::{Content, Events, EventsEnd, Unread, message_of};
use super::{Http, Session};
use crate::dialect::{self, Seen, Verdict};
use crate::failure::{Blame, Failure};
use crate::upstreams::unusable;
use crate::wire::{self, Sort};

/// What a `ping` shows of a session.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Probe {
    Known,
    Forgotten,
    /// Nothing: the server is not there.
    Away,
}

/// Why a request of the link's own has no result.
pub(crate) enum Unanswered {
    /// The server is not there for now.
    Away(Box<str>),
    /// The server does not know the session.
    SessionLost,
    Failed(Failure),
    /// Refused, and not by an answer that the protocol knows.
    Refused {
        status: u16,
        failure: Failure,
    },
}

/// A request of the link's own, answered.
pub(super) struct Own {
    /// The id under which it went.
    pub(super) id: Bytes,
    pub(super) response: Bytes,
    /// The HTTP status that it came with; 200 if it came over an event stream.
    pub(super) status: u16,
    /// The session id that the server gave with it.
    pub(super) session_id: Option<UpstreamId>,
}

impl Http {
    /// What the server answers to one `ping` in `session`.
    pub(super) async fn probe(&self, session: &Session) -> Probe {
        if !session.has_id() {
            return Probe::Known;
        }
        let ping = Bytes::from(envelope::request_message(&self.upstreams.own_id(), "ping", None));
        let probed = timeout(PROBE_BOUND, async {
            let Ok(reply) = self.post(Some(session), ping).await else { return Probe::Away };
            if reply.status().is_success() && reply.content() == Content::Events {
                return Probe::Known;
            }
            let (status, challenge, body) = reply.read_refusal().await;
            let forgotten = dialect::probe_lost(&Seen { status, challenge, body: &body });
            // Nothing is wrong with a `ping` but its URL.
            match forgotten || (status == 400 && session.feed().is_some()) {
                true => Probe::Forgotten,
                false => Probe::Known,
            }
        });
        probed.await.unwrap_or(Probe::Away)
    }

    /// A request of the link's own, and its whole response. Waits for nothing that the server sends before it.
    pub(super) async fn ask(
        self: &Arc<Self>,
        session: Option<&Arc<Session>>,
        method: &str,
        params: Option<&[u8]>,
    ) -> Result<Own, Unanswered> {
        let id = self.upstreams.own_id();
        let message = Bytes::from(envelope::request_message(&id, method, params));
        if let Some(feed) = session.and_then(|session| session.feed()) {
            let response = self.ask_over(feed, &id, message).await?;
            return Ok(Own { id, response, status: 200, session_id: None });
        }
        let reply = self.post(session.map(|session| &**session), message).await?;
        let status = reply.status().as_u16();
        let sent_id = session.is_some_and(|session| session.has_id());
        if !reply.status().is_success() {
            let (status, challenge, body) = reply.read_refusal().await;
            let response = self.unanswered(&Seen { status, challenge, body: &body }, sent_id, &id)?;
            return Ok(Own { id, response, status, session_id: None });
        }
        let session_id = reply.session_id();
        let response = match reply.content() {
            Content::Json => reply.collect(self.server().message_bytes_max).await.map_err(|unread| match unread {
                Unread::Broken(cause) => Unanswered::Away(cause),
                Unread::Oversize => Unanswered::Failed(self.oversize()),
            })?,
            Content::Events => self.response_among(reply.events(self.server().message_bytes_max)).await?,
            Content::Other => {
                return Err(Unanswered::Failed(
                    self.protocol("it answered a request with neither JSON nor an event stream"),
                ));
            }
        };
        Ok(Own { id, response, status, session_id })
    }

    pub(super) fn unanswered(&self, seen: &Seen<'_>, sent_id: bool, id: &[u8]) -> Result<Bytes, Unanswered> {
        let status = seen.status;
        Err(match dialect::classify(seen, sent_id, Some(id)) {
            Verdict::Answer => match dialect::answer_with_id(seen.body, id) {
                Some(answer) => return Ok(answer.into()),
                None => Unanswered::Refused { status, failure: self.rejected_with(status) },
            },
            Verdict::SessionLost(_) => Unanswered::SessionLost,
            Verdict::Suspect | Verdict::Unavailable => Unanswered::Away(format!("HTTP status {status}").into()),
            Verdict::Unauthorized => Unanswered::Failed(self.unauthorized()),
            Verdict::NoEndpoint => Unanswered::Refused { status, failure: unusable(self.server(), &NO_ENDPOINT) },
            Verdict::Refused if status >= 500 => Unanswered::Away(format!("HTTP status {status}").into()),
            Verdict::Refused => Unanswered::Refused { status, failure: self.rejected_with(status) },
        })
    }

    async fn response_among(&self, mut events: Box<Events>) -> Result<Bytes, Unanswered> {
        loop {
            let event = events.next().await.map_err(|end| match end {
                EventsEnd::Broken(cause) => Unanswered::Away(cause),
                EventsEnd::Oversize => Unanswered::Failed(self.oversize()),
            })?;
            let Some(data) = message_of(event) else { continue };
            if let Ok(envelope) = envelope::scan(&data)
                && let Sort::Response = wire::sort(&envelope, &data)
            {
                events.finish();
                return Ok(data);
            }
        }
    }
}

/// How long a probing `ping` may take.
const PROBE_BOUND: Duration = Duration::from_secs(2);
