//! Clients of 2024-11-05 that come back without a session id: their era has none. They open a new stream and go on
//! without `initialize`, so all that leads to their session is who they are, and what they happen to remember (S18).

use std::sync::Arc;

use mainstay_core::id::SessionKey;
use mainstay_core::session::{SessionRecord, State};
use mainstay_core::wire::method::Version;
use mainstay_store::{Filter, Page, Stored};

use crate::engine::call::relay::HTTP_SSE;
use crate::engine::live::Entry;
use crate::engine::{Caller, Engine, Served};

/// What a client that comes back remembers of its session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Evidence {
    /// The tag of the events that it has seen.
    pub tag: Option<u32>,
    /// The version that was negotiated.
    pub version: Option<Version>,
}

/// A session that a client may have come back to.
struct Candidate {
    key: SessionKey,
    seen_at: mainstay_core::time::Timestamp,
}

impl Engine {
    /// The session over HTTP+SSE that `caller` comes back to: its own, at this server, with nobody reading its stream, and
    /// fitting the evidence. `None` if there is none, or more than one that it could be: nothing is guessed.
    pub async fn taken_back(self: &Arc<Self>, caller: &Caller, served: &Served, evidence: Evidence) -> Option<Entry> {
        let mut candidates = self.candidates(caller, served, evidence).await;
        candidates.sort_by(|one, other| other.seen_at.cmp(&one.seen_at).then_with(|| one.key.cmp(&other.key)));
        let mut relaying = Vec::new();
        for candidate in candidates.into_iter().take(LOOKS_MAX) {
            if self.had_one_stream(candidate.key).await {
                relaying.push(candidate);
            }
            if relaying.len() == 2 {
                break;
            }
        }
        let [newest, rest @ ..] = relaying.as_slice() else { return None };
        let is_alone = rest.iter().all(|next| newest.seen_at.since(next.seen_at) >= LEAD);
        if !is_alone && evidence.tag.is_none() {
            tracing::info!(server = %served.server.name, "a client came back to one of several sessions, nobody knows which");
            return None;
        }
        let live = self.load(newest.key).await.ok()?;
        let entry = self.admit(&live, caller, served).ok()??;
        let session_ref = newest.key.session_ref();
        tracing::info!(session = %session_ref, server = %served.server.name, "a client came back without `initialize`");
        Some(entry)
    }

    async fn candidates(&self, caller: &Caller, served: &Served, evidence: Evidence) -> Vec<Candidate> {
        let mut candidates = Vec::new();
        let filter = Filter {
            state: Some(State::Ready),
            server: Some(served.server.name.clone()),
            principal: Some(caller.principal.to_string().into()),
            ..Filter::default()
        };
        let mut page = Page { after: None, limit: Page::ROWS_MAX, filter };
        for _ in 0..PAGES_MAX {
            let rows = match self.store.list(&page).await {
                Ok(rows) => rows,
                Err(error) => {
                    tracing::warn!(error = %error, "sessions to come back to can't be looked up");
                    break;
                }
            };
            let full = rows.len() >= Page::ROWS_MAX;
            page.after = rows.last().map(|row| row.key);
            candidates.extend(rows.into_iter().filter_map(|row| match row.stored {
                Stored::Live(record) => self.candidate(&record, caller, evidence),
                Stored::Ended(_) | Stored::Unreadable(_) | Stored::Absent => None,
            }));
            if !full {
                break;
            }
        }
        candidates
    }

    fn candidate(&self, record: &SessionRecord, caller: &Caller, evidence: Evidence) -> Option<Candidate> {
        let fits = record.principal == caller.principal
            && (caller.agent.is_none() || record.agent.is_none() || record.agent == caller.agent)
            && evidence.tag.is_none_or(|tag| tag == record.key.tag())
            && evidence.version.is_none_or(|version| version == record.version);
        let live = self.live.get(&record.key).map(|live| Arc::clone(&live));
        // Whoever shows an event of a session may take its stream over.
        let is_free = evidence.tag.is_some() || live.as_ref().is_none_or(|live| !live.is_read());
        let seen_at = live.map_or(record.seen_at, |live| live.with_session(|session| session.record().seen_at));
        (fits && is_free).then_some(Candidate { key: record.key, seen_at: seen_at.max(record.seen_at) })
    }

    /// Whether a session has ever had a stream that carries answers, as far as that is still known.
    async fn had_one_stream(&self, key: SessionKey) -> bool {
        if self.live.get(&key).is_some_and(|live| live.relays()) {
            return true;
        }
        let streams = self.journal.streams(key, STREAMS_LOOKED_AT_MAX).await.unwrap_or_default();
        let is_marked = |call: &mainstay_store::journal::Call| &*call.method == HTTP_SSE;
        streams.iter().any(|stream| stream.stream.is_listen() && stream.call.as_ref().is_some_and(is_marked))
    }
}

/// By how much the session that was used last must have been used later than any other to be the one. An open stream
/// counts as use every few seconds.
const LEAD: std::time::Duration = std::time::Duration::from_secs(15);
/// Of how many sessions it is looked up whether they are over HTTP+SSE: those used last.
const LOOKS_MAX: usize = 32;
const STREAMS_LOOKED_AT_MAX: usize = 64;
const PAGES_MAX: usize = 4;
