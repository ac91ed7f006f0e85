//! What a link knows of its session, whichever way it leads.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::resume::{Continuity, ResumeRecord, UpstreamId};
use mainstay_core::wire::envelope;
use mainstay_core::wire::method::Method;
use mainstay_keeper::client::Held;

use crate::call::Call;
use crate::catalogue::{Catalogue, Page, asks_first_page};
use crate::child::{self, Why, parse_label};
use crate::handshake::{self, Handshake, Opened};
use crate::notice::{Notice, Notices};
use crate::server::{Reach, Server};
use crate::task::spawn;
use crate::upstreams::{Destination, Upstreams};
use crate::wire::text_member;

/// The client's handshake, the server's answer, and what has happened to the instance since.
pub(crate) struct Kept {
    pub(crate) handshake: Handshake,
    pub(crate) opened: Option<Opened>,
    pub(crate) catalogue: Catalogue,
    pub(crate) last_event_id: Option<Box<str>>,
    pub(crate) ended: bool,
    /// What an earlier worker's instance was lost by, until that is told.
    loss: Option<&'static str>,
    continuity: Continuity,
    remade_count: u32,
    remade_reason: Option<Box<str>>,
}

impl Kept {
    /// Of a new session, or of one that an earlier worker had.
    pub(crate) fn new(upstreams: &Upstreams, mut handshake: Handshake, past: &Past) -> Self {
        handshake.params = upstreams.share(&handshake::adapted(&handshake.params));
        let mut kept = Self {
            handshake,
            opened: None,
            catalogue: Catalogue::default(),
            last_event_id: None,
            ended: false,
            loss: past.loss,
            continuity: Continuity::Fresh,
            remade_count: 0,
            remade_reason: None,
        };
        if let Some(record) = &past.record {
            kept.continuity = Continuity::Resumed;
            kept.remade_count = record.remade_count;
            kept.remade_reason = record.remade_reason.clone();
            kept.last_event_id = record.last_event_id.clone();
            // What the client has set since is known from both sides; the record is the later word on what was done.
            kept.handshake.log_level = record.log_level.clone().or(kept.handshake.log_level);
            kept.handshake.subscriptions.extend(record.subscriptions.iter().cloned());
            let result = upstreams.share(&record.initialize_result);
            // That of a modern server is not what the client was told.
            let version = text_member(&result, "protocolVersion").map_or(record.version.clone(), Into::into);
            kept.opened = Some(Opened { result, version });
        }
        kept
    }

    /// Takes in what the server answered to `initialize`.
    pub(crate) fn open(&mut self, upstreams: &Upstreams, opened: &Opened) {
        self.opened = Some(Opened { result: upstreams.share(&opened.result), version: opened.version.clone() });
        self.last_event_id = None;
        self.loss = None;
    }

    /// What the earlier instance was lost by, if it was and no other has been opened since.
    pub(crate) fn loss(&self) -> Option<&'static str> {
        self.loss
    }

    /// Notes that the instance was made again.
    pub(crate) fn remake(&mut self, reason: &str) {
        self.continuity = Continuity::Remade;
        self.remade_count = self.remade_count.saturating_add(1);
        self.remade_reason = Some(reason.into());
    }

    /// The record for a later worker; `None` before the server has answered. `told` is whether the instance has taken
    /// `initialized`.
    pub(crate) fn record(
        &self,
        upstreams: &Upstreams,
        destination: &Destination,
        upstream_id: Option<&UpstreamId>,
        told: bool,
    ) -> Option<ResumeRecord> {
        let opened = self.opened.as_ref()?;
        let now = upstreams.now();
        Some(ResumeRecord {
            key: self.handshake.key,
            server: destination.server.name.clone(),
            url: destination.server.url().map(ToString::to_string).unwrap_or_default().into(),
            fingerprint: destination.fingerprint,
            upstream_id: upstream_id.cloned(),
            version: opened.version.clone(),
            initialize_result: opened.result.clone(),
            log_level: self.handshake.log_level.clone(),
            subscriptions: self.handshake.subscriptions.clone(),
            told,
            last_event_id: self.last_event_id.clone(),
            saved_at: now,
            used_at: now,
            continuity: self.continuity,
            remade_count: self.remade_count,
            remade_reason: self.remade_reason.clone(),
        })
    }

    /// Remembers what the server has accepted, to set it again after a loss (U4).
    pub(crate) fn remember(&mut self, server: &Server, setting: Setting) {
        let subscriptions = &mut self.handshake.subscriptions;
        match setting {
            Setting::Level(level) => self.handshake.log_level = Some(level),
            Setting::Subscribed(uri) if subscriptions.len() >= SUBSCRIPTIONS_MAX && !subscriptions.contains(&uri) => {
                tracing::warn!(server = %server.name, "too many subscriptions; one will not survive a loss");
            }
            Setting::Subscribed(uri) => {
                subscriptions.insert(uri);
            }
            Setting::Unsubscribed(uri) => {
                subscriptions.remove(&uri);
            }
        }
    }

    /// Whether `call` may be carried out twice (U5).
    pub(crate) fn is_safe(&self, server: &Server, call: &Call) -> bool {
        call.method.is_safe()
            || (call.method == Method::ToolsCall
                && call.name.as_deref().is_some_and(|tool| {
                    server.safe_tools.iter().any(|safe| **safe == *tool) || self.catalogue.says_safe(tool)
                }))
    }
}

/// Something that a client has set at its server.
pub(crate) enum Setting {
    /// The log level.
    Level(Box<str>),
    /// A resource is subscribed to.
    Subscribed(Box<str>),
    /// A resource is not subscribed to any more.
    Unsubscribed(Box<str>),
}

/// What an earlier worker left of a session, as far as it is of use for the definition of its server.
#[derive(Default)]
pub(crate) struct Past {
    pub(crate) record: Option<ResumeRecord>,
    pub(crate) held: Option<Held>,
    /// Whether `held` is of another definition, and stays for the calls that it runs only.
    pub(crate) is_redefined: bool,
    /// Why nothing is left of an instance that the client has used.
    loss: Option<&'static str>,
}

impl Past {
    /// Sorts what is left. The record of another definition is dropped with an owed delete (U2), its child is ended (C9,
    /// T4) once the calls that it runs are answered or their grace is over, and so is one that was never told a word, at
    /// once.
    pub(crate) fn of(
        (upstreams, destination): (&Arc<Upstreams>, &Arc<Destination>),
        notices: &Notices,
        confirmed: bool,
        (record, held): (Option<ResumeRecord>, Option<Held>),
    ) -> Self {
        let server = &destination.server;
        let mut loss = None;
        let record = record.filter(|record| {
            let fits = fits(record, destination);
            if !fits {
                loss = Some(DEFINITION_CHANGED);
                if let Some(owed) = record.owed_delete(upstreams.now())
                    && !notices.offer(Notice::Owed(owed))
                {
                    tracing::warn!(server = %server.name, "owed delete of a changed server could not be handed over");
                }
            }
            fits
        });
        if loss.is_none() && record.as_ref().is_some_and(was_connection) && server.is_http() {
            loss = Some(CONNECTION_ENDED);
        }
        let mut is_redefined = false;
        let held = held.and_then(|held| {
            let own = parse_label(&held.label).is_some_and(|label| label.definition == server.definition());
            if own && held.frames_accepted > 0 {
                return Some(held);
            }
            if !own {
                loss = Some(DEFINITION_CHANGED);
            }
            if !own && !held.open.is_empty() && !server.is_http() {
                is_redefined = true;
                return Some(held);
            }
            let why = if own { Why::NeverUp } else { Why::Redefined };
            spawn(child::dismiss_of(Arc::clone(upstreams), Arc::clone(destination), held, why));
            None
        });
        // The client has used the session, so there was an instance, and nobody can say what was in it (U6).
        if confirmed && record.is_none() && held.is_none() {
            loss = loss.or(Some(RECORD_LOST));
        }
        Self { record, held, is_redefined, loss }
    }
}

/// Hands over what a later worker needs. A hint: it may be lost.
pub(crate) fn offer(upstreams: &Upstreams, notices: &Notices, record: Option<ResumeRecord>) {
    if let Some(record) = record
        && !notices.offer(Notice::Record(Box::new(record)))
    {
        Upstreams::count(&upstreams.counters.notices_dropped);
    }
}

/// What the answer to `call` says of the server's tools, if it lists them: the page, and whether it is the first.
pub(crate) fn page_of(upstreams: &Upstreams, call: &Call, response: &Bytes) -> Option<(Arc<Page>, bool)> {
    if call.method != Method::ToolsList {
        return None;
    }
    let result = envelope::scan(response).ok()?.result?;
    Some((upstreams.pages.page(&response[result]), asks_first_page(&call.message)))
}

/// Notes in `record` that the session is a connection (2024-11-05): it lives nowhere that a later worker could go to.
pub(crate) fn mark_connection(record: &mut ResumeRecord) {
    record.url = "".into();
}

/// Whether `record` is of such a session, or of a child.
pub(crate) fn was_connection(record: &ResumeRecord) -> bool {
    record.url.is_empty()
}

/// Whether `record` was made for this very definition of the server.
fn fits(record: &ResumeRecord, destination: &Destination) -> bool {
    let url_fits = match &destination.server.reach {
        Reach::Http { url, .. } => was_connection(record) || *record.url == *url.to_string(),
        Reach::Child { .. } => record.url.is_empty(),
    };
    url_fits && record.fingerprint == destination.fingerprint
}

/// Why the instance of an earlier worker is lost.
const DEFINITION_CHANGED: &str = "the definition of the server has changed";
const CONNECTION_ENDED: &str = "its connection ended while its session was unused or the gateway away";
const RECORD_LOST: &str = "what was known of its session is lost";

/// How much longer than its patience with a server that is down a message without an answer may be on its way.
pub(crate) const SEND_BEYOND_PATIENCE: Duration = Duration::from_secs(10);

/// Subscriptions of one session that are remembered.
const SUBSCRIPTIONS_MAX: usize = 1024;
