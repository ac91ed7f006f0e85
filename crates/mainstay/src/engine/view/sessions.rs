//! Sessions as operators see them: listed, shown, found by their id (O1).

use std::sync::Arc;

use mainstay_core::code::Code;
use mainstay_core::id::{ServerName, SessionId, SessionKey, SessionRef};
use mainstay_core::session::{ClientName, SessionRecord, State, Tombstone};
use mainstay_store::{Filter, Label, Page, ResumeSummary, StoreError, Stored};
use schemars::JsonSchema;
use serde::Serialize;

use super::OwedView;
use crate::engine::live::{InFlight, Live};
use crate::engine::{Engine, Refused};

/// A session. Of a row that can't be read little is known: most of it is null then.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct SessionView {
    /// Its short name.
    pub r#ref: String,
    /// Its server.
    pub server: Option<String>,
    /// Whose it is.
    pub principal: Option<String>,
    /// `ready`, `draining`, or `unreadable`, or how it ended.
    pub state: String,
    /// The client's own name and version, if it gave any.
    pub client: Option<String>,
    /// The negotiated protocol version.
    pub protocol: Option<String>,
    /// RFC 3339.
    pub opened_at: Option<String>,
    /// When it was last used (RFC 3339); null once it has ended.
    pub seen_at: Option<String>,
    /// When it expires if nothing happens, or when a drain's grace is over (RFC 3339); null once it has ended.
    pub deadline: Option<String>,
    /// When it ended (RFC 3339).
    pub ended_at: Option<String>,
    /// Whether it is in memory.
    pub in_memory: bool,
    /// Whether its client is there now: a request of it waits for its answer, or a connection reads a stream.
    pub client_connected: bool,
    /// The agent that opened it, if it said so.
    pub agent: Option<String>,
    /// Calls in flight.
    pub calls: u32,
    /// The calls in flight.
    pub calls_in_flight: Vec<CallView>,
    /// Questions of the server that the client has not answered.
    pub questions: usize,
    /// Connections that read its streams.
    pub streams: u32,
    /// How its server's session came to be what it is: `fresh`, `resumed`, `remade`.
    pub continuity: Option<&'static str>,
    /// How often that session was made again.
    pub remade_count: u32,
    /// Why, the last time; or why the session ended or cannot be read.
    pub reason: Option<String>,
    /// The deletes that are still owed to its server. Null in lists, which do not look.
    pub owed: Option<Vec<OwedView>>,
}

/// A call in flight.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct CallView {
    /// What it calls; `other` of one of which that is not known any more.
    pub method: &'static str,
    /// The tool or prompt that it names.
    pub name: Option<String>,
    /// When it began, or this worker took it over (RFC 3339).
    pub since: String,
}

impl CallView {
    fn of(call: &InFlight) -> Self {
        Self {
            method: call.method.as_str(),
            name: call.name.as_deref().map(str::to_owned),
            since: call.since.to_string(),
        }
    }
}

/// Which sessions are asked for. What is absent does not matter.
#[derive(Clone, Debug, Default)]
pub struct SessionsFilter {
    /// A state's word.
    pub state: Option<String>,
    /// A server's name.
    pub server: Option<String>,
    /// A principal as lists show it.
    pub principal: Option<String>,
    /// An agent's name.
    pub agent: Option<String>,
}

impl Engine {
    /// A page of the sessions that the ledger knows, ended ones included, in the order of their keys, after `after`.
    ///
    /// # Errors
    /// [`Code::RequestInvalid`] if the filter names no state or no server; [`Code::Unavailable`] if the ledger cannot be
    /// read.
    pub async fn sessions(
        &self,
        filter: &SessionsFilter,
        after: Option<SessionKey>,
        limit: usize,
    ) -> Result<Vec<SessionView>, Refused> {
        let page = Page { after, limit, filter: store_filter(filter)? };
        let listed = self.store.list(&page).await.map_err(|error| unreadable(&error))?;
        Ok(listed.into_iter().map(|row| self.session_view(row.key, &row.stored, row.resume.as_ref())).collect())
    }

    /// Says, of a filter that finds nothing, what it names that there is not: nothing if there is all of it.
    ///
    /// # Errors
    /// [`Code::RequestInvalid`] for a server that is neither configured nor that of any session, naming those that are
    /// configured; [`Code::Unavailable`] if the ledger cannot be read.
    pub async fn remark(&self, filter: &SessionsFilter) -> Result<Option<String>, Refused> {
        let Filter { server, principal, agent, .. } = store_filter(filter)?;
        if let Some(name) = server
            && !self.servers.contains_key(&name)
            && !self.has_any(Filter { server: Some(name.clone()), ..Filter::default() }).await?
        {
            let configured: Vec<_> = self.servers.keys().map(ServerName::as_str).collect();
            let text = format!("no server is called `{name}`; configured are: {}", configured.join(", "));
            return Err(Refused::new(Code::RequestInvalid, text));
        }
        let mut remarks = Vec::new();
        if let Some(wanted) = principal
            && !self.has_any(Filter { principal: Some(wanted.clone()), ..Filter::default() }).await?
        {
            remarks.push(self.unknown("principal", &wanted, Label::Principal).await?);
        }
        if let Some(wanted) = agent
            && !self.has_any(Filter { agent: Some(wanted.clone()), ..Filter::default() }).await?
        {
            remarks.push(self.unknown("agent", &wanted, Label::Agent).await?);
        }
        Ok((!remarks.is_empty()).then(|| remarks.join("; ")))
    }

    /// Whether there is any session that `filter` wants.
    async fn has_any(&self, filter: Filter) -> Result<bool, Refused> {
        let page = Page { after: None, limit: 1, filter };
        let found = self.store.list(&page).await.map_err(|error| unreadable(&error))?;
        Ok(!found.is_empty())
    }

    async fn unknown(&self, what: &str, wanted: &str, label: Label) -> Result<String, Refused> {
        let mut known = self.store.labels(label, LABELS_TOLD_MAX + 1).await.map_err(|error| unreadable(&error))?;
        let more = if known.len() > LABELS_TOLD_MAX { ", …" } else { "" };
        known.truncate(LABELS_TOLD_MAX);
        if known.is_empty() {
            return Ok(format!("no session has the {what} `{wanted}`, nor any other"));
        }
        Ok(format!("no session has the {what} `{wanted}`; there are: {}{more}", known.join(", ")))
    }

    /// The sessions that `session_ref` can mean; more than one only if two keys begin alike.
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub async fn session(&self, session_ref: SessionRef) -> Result<Vec<SessionView>, StoreError> {
        let mut views = Vec::new();
        for (key, stored) in self.store.find_ref(session_ref).await? {
            views.push(self.whole_view(key, &stored).await?);
        }
        Ok(views)
    }

    /// The session whose id is `id`, if there is one.
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub async fn session_of(&self, id: &SessionId) -> Result<Option<SessionView>, StoreError> {
        let key = self.keyring.session_key(id);
        match self.store.find(key).await? {
            Stored::Absent => Ok(None),
            stored @ (Stored::Live(_) | Stored::Ended(_) | Stored::Unreadable(_)) => {
                self.whole_view(key, &stored).await.map(Some)
            }
        }
    }

    /// Everything known of a session.
    async fn whole_view(&self, key: SessionKey, stored: &Stored) -> Result<SessionView, StoreError> {
        let resume = self.store.resume_record(key).await?.map(ResumeSummary::from);
        let owed = self.store.owed_of(key, OWED_SHOWN_MAX).await?;
        let owed = Some(owed.iter().map(OwedView::of).collect());
        Ok(SessionView { owed, ..self.session_view(key, stored, resume.as_ref()) })
    }

    fn session_view(&self, key: SessionKey, stored: &Stored, resume: Option<&ResumeSummary>) -> SessionView {
        let live = self.live.get(&key).map(|live| Arc::clone(&live));
        let memory = live.as_ref().map(|live| live.with_session(|session| session.record().clone()));
        let now_linked = live.as_ref().and_then(|live| live.link.record()).map(ResumeSummary::from);
        let resume = now_linked.as_ref().or(resume);
        let mut view = match (memory, stored) {
            (Some(record), _) => record_view(&record),
            (None, Stored::Live(record)) => record_view(record),
            (None, Stored::Ended(tombstone)) => tombstone_view(tombstone),
            (None, Stored::Unreadable(fault)) => SessionView { reason: Some(fault.to_string()), ..blank(key) },
            (None, Stored::Absent) => blank(key),
        };
        if let Some(live) = &live {
            add_activity(&mut view, live);
        }
        if let Some(resume) = resume {
            view.continuity = Some(resume.continuity.as_str());
            view.remade_count = resume.remade_count;
            view.reason = view.reason.or_else(|| resume.remade_reason.as_deref().map(str::to_owned));
        }
        view
    }
}

/// The filter as the ledger takes it.
fn store_filter(filter: &SessionsFilter) -> Result<Filter, Refused> {
    let state = filter.state.as_deref().map(|word| {
        STATES.into_iter().find(|state| state.as_str() == word).ok_or_else(|| {
            let text = format!("`{word}` is no state; there are: {}", STATES.map(State::as_str).join(", "));
            Refused::new(Code::RequestInvalid, text)
        })
    });
    let server = filter.server.as_deref().map(|name| {
        ServerName::parse(name)
            .ok_or_else(|| Refused::new(Code::RequestInvalid, format!("`{name}` is no server's name")))
    });
    Ok(Filter {
        state: state.transpose()?,
        server: server.transpose()?,
        principal: filter.principal.as_deref().map(Into::into),
        agent: filter.agent.as_deref().map(Into::into),
        ..Filter::default()
    })
}

fn blank(key: SessionKey) -> SessionView {
    SessionView {
        r#ref: key.session_ref().to_string(),
        server: None,
        principal: None,
        state: "unreadable".to_owned(),
        client: None,
        protocol: None,
        opened_at: None,
        seen_at: None,
        deadline: None,
        ended_at: None,
        in_memory: false,
        client_connected: false,
        agent: None,
        calls: 0,
        calls_in_flight: Vec::new(),
        questions: 0,
        streams: 0,
        continuity: None,
        remade_count: 0,
        reason: None,
        owed: None,
    }
}

fn record_view(record: &SessionRecord) -> SessionView {
    SessionView {
        server: Some(record.server.to_string()),
        principal: Some(record.principal.to_string()),
        agent: record.agent.as_deref().map(str::to_owned),
        state: record.state.as_str().to_owned(),
        client: client(&record.client),
        protocol: Some(record.version.as_str().to_owned()),
        opened_at: Some(record.opened_at.to_string()),
        seen_at: Some(record.seen_at.to_string()),
        deadline: Some(record.deadline.to_string()),
        ..blank(record.key)
    }
}

fn tombstone_view(tombstone: &Tombstone) -> SessionView {
    SessionView {
        server: Some(tombstone.server.to_string()),
        principal: Some(tombstone.principal.to_string()),
        agent: tombstone.agent.as_deref().map(str::to_owned),
        state: tombstone.state.as_str().to_owned(),
        client: client(&tombstone.client),
        protocol: Some(tombstone.version.as_str().to_owned()),
        opened_at: Some(tombstone.opened_at.to_string()),
        ended_at: Some(tombstone.ended_at.to_string()),
        reason: Some(tombstone.reason.to_string()),
        ..blank(tombstone.key)
    }
}

fn add_activity(view: &mut SessionView, live: &Live) {
    let calls = live.calls();
    view.in_memory = true;
    view.client_connected = live.is_connected();
    view.calls = u32::try_from(calls.len()).unwrap_or(u32::MAX);
    view.calls_in_flight = calls.iter().map(CallView::of).collect();
    view.questions = live.questions();
    view.streams = live.activity().streams;
}

/// The client's name and version, as far as it gave them.
fn client(name: &ClientName) -> Option<String> {
    let text = format!("{} {}", name.name, name.version).trim().to_owned();
    (!text.is_empty()).then_some(text)
}

fn unreadable(error: &StoreError) -> Refused {
    Refused::new(Code::Unavailable, format!("the ledger cannot be read now: {error}"))
}

/// The states that a list can be asked for.
const STATES: [State; 6] =
    [State::Initializing, State::Ready, State::Draining, State::Deleted, State::Expired, State::Closed];
/// The most principals or agents that a remark names.
const LABELS_TOLD_MAX: usize = 20;
/// The most owed deletes that are shown of one session.
const OWED_SHOWN_MAX: usize = 100;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn o1_what_is_absent_is_null_and_never_missing() {
        let view = blank(SessionKey::from_bytes([7; 32]));
        let told = serde_json::to_value(&view).unwrap();
        let told = told.as_object().unwrap();
        for name in ["server", "client", "seen_at", "deadline", "ended_at", "agent", "continuity", "reason", "owed"] {
            assert_eq!(told.get(name), Some(&serde_json::Value::Null), "{name}");
        }
        assert_eq!(client(&ClientName::new("", "")), None);
        assert_eq!(client(&ClientName::new("a", "")).as_deref(), Some("a"));
        assert_eq!(client(&ClientName::new("a", "1.0")).as_deref(), Some("a 1.0"));
    }
}
