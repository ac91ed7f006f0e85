//! What a link knows of its session, whichever way it leads.

use std::sync::Arc;

use bytes::Bytes;
use mainstay_core::resume::{Continuity, ResumeRecord, UpstreamId};
use mainstay_core::wire::envelope;
use mainstay_core::wire::method::Method;

use crate::call::Call;
use crate::catalogue::{Catalogue, Page, asks_first_page};
use crate::handshake::{self, Handshake, Opened};
use crate::server::{Reach, Server};
use crate::upstreams::{Destination, Upstreams};

/// The client's handshake, the server's answer, and what has happened to the instance since.
pub(crate) struct Kept {
    pub(crate) handshake: Handshake,
    pub(crate) opened: Option<Opened>,
    pub(crate) catalogue: Catalogue,
    pub(crate) last_event_id: Option<Box<str>>,
    pub(crate) ended: bool,
    stale: bool,
    continuity: Continuity,
    remade_count: u32,
    remade_reason: Option<Box<str>>,
}

impl Kept {
    /// Of a new session, or of one whose record was kept.
    pub(crate) fn new(upstreams: &Upstreams, mut handshake: Handshake, record: Option<&ResumeRecord>) -> Self {
        handshake.params = upstreams.share(&handshake::adapted(&handshake.params));
        let mut kept = Self {
            handshake,
            opened: None,
            catalogue: Catalogue::default(),
            last_event_id: None,
            ended: false,
            stale: false,
            continuity: Continuity::Fresh,
            remade_count: 0,
            remade_reason: None,
        };
        if let Some(record) = record {
            kept.continuity = Continuity::Resumed;
            kept.remade_count = record.remade_count;
            kept.remade_reason = record.remade_reason.clone();
            kept.last_event_id = record.last_event_id.clone();
            // What the client has set since is known from both sides; the record is the later word on what was done.
            kept.handshake.log_level = record.log_level.clone().or(kept.handshake.log_level);
            kept.handshake.subscriptions.extend(record.subscriptions.iter().cloned());
            let result = upstreams.share(&record.initialize_result);
            kept.opened = Some(Opened { result, version: record.version.clone() });
        }
        kept
    }

    /// Takes in what the server answered to `initialize`.
    pub(crate) fn open(&mut self, upstreams: &Upstreams, opened: &Opened) {
        self.opened = Some(Opened { result: upstreams.share(&opened.result), version: opened.version.clone() });
        self.last_event_id = None;
    }

    /// Notes that the record of the instance was for another definition of the server.
    pub(crate) fn mark_stale(&mut self) {
        self.stale = true;
    }

    /// Whether an instance was dropped because the definition changed. Told once.
    pub(crate) fn take_stale(&mut self) -> bool {
        std::mem::take(&mut self.stale)
    }

    /// Notes that the instance was made again.
    pub(crate) fn remake(&mut self, reason: &str) {
        self.continuity = Continuity::Remade;
        self.remade_count = self.remade_count.saturating_add(1);
        self.remade_reason = Some(reason.into());
    }

    /// The record for a later worker; `None` before the server has answered.
    pub(crate) fn record(
        &self,
        upstreams: &Upstreams,
        destination: &Destination,
        upstream_id: Option<&UpstreamId>,
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
            last_event_id: self.last_event_id.clone(),
            saved_at: now,
            used_at: now,
            continuity: self.continuity,
            remade_count: self.remade_count,
            remade_reason: self.remade_reason.clone(),
        })
    }

    /// Remembers a subscription that the server has accepted. False if there are too many.
    pub(crate) fn remember_subscription(&mut self, uri: Box<str>) -> bool {
        let subscriptions = &mut self.handshake.subscriptions;
        let room = subscriptions.len() < SUBSCRIPTIONS_MAX || subscriptions.contains(&uri);
        if room {
            subscriptions.insert(uri);
        }
        room
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

/// What the answer to `call` says of the server's tools, if it lists them: the page, and whether it is the first.
pub(crate) fn page_of(upstreams: &Upstreams, call: &Call, response: &Bytes) -> Option<(Arc<Page>, bool)> {
    if call.method != Method::ToolsList {
        return None;
    }
    let result = envelope::scan(response).ok()?.result?;
    Some((upstreams.pages.page(&response[result]), asks_first_page(&call.message)))
}

/// Whether `record` was made for this very definition of the server.
pub(crate) fn fits(record: &ResumeRecord, destination: &Destination) -> bool {
    let url_fits = match &destination.server.reach {
        Reach::Http { url, .. } => *record.url == *url.to_string(),
        Reach::Child { .. } => record.url.is_empty(),
    };
    url_fits && record.fingerprint == destination.fingerprint
}

/// Subscriptions of one session that are remembered.
const SUBSCRIPTIONS_MAX: usize = 1024;
