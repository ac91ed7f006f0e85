//! Conversations: sessions of the gateway's own with servers that need them, for clients that know none (E3).
//!
//! A request of 2026-07-28 says for itself what it is, and a legacy server wants `initialize` first. So the gateway is that
//! server's client: it opens a session for whoever asks, under an id that nobody is ever told, and finds it again by who
//! asks. It is a session like any other, so everything that sessions promise holds: it outlives workers, restarts and the
//! server's own losses, it is suspended, expires and counts.
//!
//! Which conversation a request belongs to is said by its [`Mark`]. The mark stands in the session's row; the register in
//! memory only saves looking it up.

mod course;
mod hearing;
mod left;
mod passage;
mod rounds;
mod task;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use aws_lc_rs::digest::{Context, SHA256};
use bytes::Bytes;
use dashmap::DashMap;
use mainstay_core::code::Code;
use mainstay_core::id::{ServerName, SessionKey, base64url, from_base64url};
use mainstay_core::principal::Principal;
use mainstay_core::session::{SessionRecord, State};
use mainstay_core::time::Timestamp;
use mainstay_core::wire::envelope::{member, unescape};
use mainstay_core::wire::modern::edit::{self, Change};
use mainstay_core::wire::modern::{Meta, crossing};
use mainstay_store::{Filter, Page, Stored};
use parking_lot::Mutex;

pub use self::course::{Course, Landed, Turn};
use self::hearing::Hearing;
pub use self::hearing::Listener;
pub use self::rounds::{Held, Parked};
pub use self::task::TaskFault;
use crate::engine::call::Request;
use crate::engine::listen::shortly;
use crate::engine::live::{Entry, Live};
use crate::engine::{Caller, Engine, HOLD, Refused, Served};
use crate::runtime::spawn;

/// Whose conversation with which server it is: a digest of the server, the principal, the agent, the client's handle and
/// what the client declares that it can do. A legacy server is told that once and for all, so each distinct set of
/// capabilities has a conversation of its own.
///
/// It grants nothing: a session is looked at only by its own principal.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mark([u8; 32]);

impl fmt::Debug for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Mark(…)")
    }
}

/// The conversation that a request belongs to, and how it is opened if there is none.
#[derive(Clone, Debug)]
pub struct Wish {
    mark: Mark,
    params: Bytes,
}

impl Wish {
    /// That of a request of `caller` to `served`. `handle` is what the client calls itself towards the gateway; without one
    /// its own name in `meta` tells it from others of the same principal.
    pub fn of(caller: &Caller, served: &Served, handle: Option<&str>, request: &Request, meta: &Meta) -> Self {
        let message = &request.message;
        let params = crossing::initialize_params(message, meta);
        let (kind, name) = match handle {
            Some(handle) => ("handle", handle.to_owned()),
            None => ("name", client_name(&params)),
        };
        let principal = caller.principal.to_string();
        let capabilities = canonical(&crossing::capabilities(message, meta));
        let mark = Mark(digest(&[
            served.server.name.as_str().as_bytes(),
            principal.as_bytes(),
            caller.agent.as_deref().unwrap_or_default().as_bytes(),
            kind.as_bytes(),
            name.as_bytes(),
            &capabilities,
        ]));
        Self { mark, params: marked(&params, mark) }
    }
}

/// Which conversations are known in this worker. It forgets without harm: the ledger knows them all.
pub(crate) struct Register {
    known: DashMap<Mark, SessionKey>,
    /// Whose rows were looked through: what is not known of these does not exist.
    surveyed: Mutex<BTreeSet<(ServerName, Principal)>>,
    /// What is said in those that are in memory.
    hearings: DashMap<SessionKey, Arc<Hearing>>,
    lanes: Vec<tokio::sync::Mutex<()>>,
}

impl Default for Register {
    fn default() -> Self {
        let lanes = (0..LANES).map(|_| tokio::sync::Mutex::default()).collect();
        Self { known: DashMap::new(), surveyed: Mutex::default(), hearings: DashMap::new(), lanes }
    }
}

impl Register {
    fn key(&self, mark: Mark) -> Option<SessionKey> {
        self.known.get(&mark).map(|key| *key)
    }

    fn note(&self, mark: Mark, key: SessionKey) {
        self.make_room();
        self.known.insert(mark, key);
    }

    fn forget(&self, mark: Mark, key: SessionKey) {
        self.known.remove_if(&mark, |_, known| *known == key);
    }

    fn is_surveyed(&self, whose: &(ServerName, Principal)) -> bool {
        self.surveyed.lock().contains(whose)
    }

    fn take_in(&self, whose: (ServerName, Principal), found: BTreeMap<Mark, SessionKey>) {
        self.make_room();
        for (mark, key) in found {
            self.known.entry(mark).or_insert(key);
        }
        self.surveyed.lock().insert(whose);
    }

    /// Forgets everything if that is too much. What was surveyed goes first: nobody may take what is not known any more for
    /// what does not exist.
    fn make_room(&self) {
        let mut surveyed = self.surveyed.lock();
        if surveyed.len() >= SURVEYED_MAX || self.known.len() >= KNOWN_MAX {
            surveyed.clear();
            self.known.clear();
        }
    }

    /// One opening of a conversation at a time.
    fn lane(&self, mark: Mark) -> &tokio::sync::Mutex<()> {
        &self.lanes[usize::from(mark.0[0]) % LANES]
    }
}

impl Engine {
    /// The conversation that `wish` is about, opened if there is none. An ended one is never gone on with: another is opened
    /// in its place. `may_open` is asked before that, and may refuse it.
    ///
    /// Cancel-safe: an opening that has begun goes on, and the next request finds what it came to.
    ///
    /// # Errors
    /// What the client is to be told: of the opening, or that the session cannot be restored now.
    pub async fn converse(
        self: &Arc<Self>,
        caller: &Caller,
        served: &Served,
        wish: &Wish,
        may_open: impl Fn() -> Result<(), Refused> + Clone + Send + 'static,
    ) -> Result<Entry, Refused> {
        for _ in 0..LOOKS_MAX {
            if let Some(key) = self.conversations.key(wish.mark) {
                match self.find_key(key, caller, served).await {
                    Ok(entry) => return Ok(entry),
                    Err(refused) if is_over(refused.code) => self.conversations.forget(wish.mark, key),
                    Err(refused) => return Err(refused),
                }
            }
            let (engine, caller, wish) = (Arc::clone(self), caller.clone(), wish.clone());
            let (server, may_open) = (served.server.name.clone(), may_open.clone());
            let settling = spawn(async move { engine.settle_conversation(&caller, &server, &wish, may_open).await });
            settling.await.map_err(|_| Refused::new(Code::Internal, "the opening failed in the gateway"))??;
        }
        Err(Refused::new(Code::Unavailable, "the conversation with the server keeps ending; try again"))
    }

    /// Sees to it that the register knows a conversation for `wish`. To be run to its end: half an opening would leave
    /// something behind.
    async fn settle_conversation(
        self: &Arc<Self>,
        caller: &Caller,
        server: &ServerName,
        wish: &Wish,
        may_open: impl Fn() -> Result<(), Refused>,
    ) -> Result<(), Refused> {
        let _lane = self.conversations.lane(wish.mark).lock().await;
        let served = self.served(server.as_str())?;
        let whose = (server.clone(), caller.principal.clone());
        if !self.conversations.is_surveyed(&whose) {
            let text = "the ledger cannot be read now; try again later";
            let surveying = tokio::time::timeout(HOLD, self.survey(&whose));
            let found = surveying.await.map_err(|_| Refused::new(Code::Unavailable, text))?;
            self.conversations.take_in(whose, found);
        }
        if self.conversations.key(wish.mark).is_some() {
            return Ok(());
        }
        may_open()?;
        let key = self.open_own(caller, served, wish.params.clone()).await?;
        let opened = self.live.get(&key).map(|live| Arc::clone(&live));
        opened.iter().for_each(|live| self.attend_first(live));
        self.conversations.note(wish.mark, key);
        if let Some(live) = opened {
            let link = Arc::clone(&live.link);
            shortly(async move { link.confirm().await }).await;
        }
        Ok(())
    }

    /// The conversations that the ledger has of a principal at a server; of several with one mark the one used last.
    async fn survey(&self, (server, principal): &(ServerName, Principal)) -> BTreeMap<Mark, SessionKey> {
        let filter = Filter {
            state: Some(State::Ready),
            server: Some(server.clone()),
            principal: Some(principal.to_string().into()),
            ..Filter::default()
        };
        let mut page = Page { after: None, limit: Page::ROWS_MAX, filter };
        let mut found = BTreeMap::<Mark, (Timestamp, SessionKey)>::new();
        for _ in 0..PAGES_MAX {
            let rows = self.held("conversations", || self.store.list(&page)).await;
            page.after = rows.last().map(|row| row.key);
            let full = rows.len() >= Page::ROWS_MAX;
            for row in rows {
                let Stored::Live(record) = row.stored else { continue };
                let Some(mark) = mark_of(&record.initialize_params).filter(|_| record.principal == *principal) else {
                    continue;
                };
                let used = (record.seen_at, record.key);
                found.entry(mark).and_modify(|known| *known = used.max(*known)).or_insert(used);
            }
            if !full {
                break;
            }
        }
        found.into_iter().map(|(mark, (_, key))| (mark, key)).collect()
    }

    /// Goes on with a conversation that has just come back into memory.
    pub(crate) fn take_conversation_up(self: &Arc<Self>, live: &Arc<Live>) {
        self.attend(live);
        let (engine, live) = (Arc::clone(self), Arc::clone(live));
        spawn(async move { engine.see_to_left(&live).await });
    }

    /// What the server of `live` said of itself when its session was opened, or, while it is down, what is known of it. An
    /// `InitializeResult` as raw JSON.
    pub fn introduced(&self, live: &Live) -> Option<Bytes> {
        let said = live.link.record().map(|record| record.initialize_result).filter(|said| !said.is_empty());
        said.or_else(|| self.facts.cards.get(&live.server.name).map(|card| card.clone()))
    }
}

/// Whether a session is a conversation of the gateway's own.
pub fn is_conversation(record: &SessionRecord) -> bool {
    mark_of(&record.initialize_params).is_some()
}

/// The params of `initialize` as its server is told them: without the gateway's own mark.
pub(crate) fn as_said(params: &Bytes) -> Bytes {
    if mark_of(params).is_none() {
        return params.clone();
    }
    let edits = edit::object(params, &(0..params.len()), &[("_meta", Change::Remove)]);
    edit::apply(params, edits).into()
}

/// `params`, an object without `_meta`, with the mark in it.
fn marked(params: &[u8], mark: Mark) -> Bytes {
    let value = format!("\"{}\"", base64url(&mark.0));
    let edits = edit::meta(params, &(0..params.len()), &[(MARK, Change::Set(value.as_bytes()))]);
    edit::apply(params, edits).into()
}

fn mark_of(params: &[u8]) -> Option<Mark> {
    let meta = member(params, &(0..params.len()), "_meta")?;
    let text = unescape(&params[member(params, &meta, MARK)?])?;
    from_base64url(&text)?.try_into().ok().map(Mark)
}

/// Whether a session that is refused for this reason will never serve again.
fn is_over(code: Code) -> bool {
    matches!(
        code,
        Code::SessionUnknown
            | Code::SessionDraining
            | Code::SessionDeleted
            | Code::SessionExpired
            | Code::SessionClosed
            | Code::OtherPrincipal
    )
}

fn client_name(params: &[u8]) -> String {
    let name = member(params, &(0..params.len()), "clientInfo").and_then(|info| member(params, &info, "name"));
    name.and_then(|span| unescape(&params[span])).unwrap_or_default().into_owned()
}

/// The same capabilities are the same however they are written.
fn canonical(capabilities: &[u8]) -> Vec<u8> {
    let Ok(mut value) = serde_json::from_slice::<serde_json::Value>(capabilities) else { return capabilities.to_vec() };
    value.sort_all_objects();
    serde_json::to_vec(&value).unwrap_or_else(|_| capabilities.to_vec())
}

/// SHA-256 of `parts`, each behind its length, and behind something that no session id begins with. Without a key, so that
/// no rotation of keys parts anybody from a conversation.
fn digest(parts: &[&[u8]]) -> [u8; 32] {
    let mut context = Context::new(&SHA256);
    context.update(b"mainstay conversation\n");
    for part in parts {
        context.update(&(part.len() as u64).to_be_bytes());
        context.update(part);
    }
    let mut digest = [0; 32];
    digest.copy_from_slice(context.finish().as_ref());
    digest
}

/// Where the mark stands in the `_meta` of the params that are kept.
const MARK: &str = "mainstay/conversation";
/// How often a conversation is looked up anew because it has just ended.
const LOOKS_MAX: usize = 4;
/// How many conversations are looked through for one principal.
const PAGES_MAX: usize = 64;
/// How many conversations, and of how many principals all of them, are known at a time.
const KNOWN_MAX: usize = 100_000;
const SURVEYED_MAX: usize = 10_000;
const LANES: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e3_the_mark_is_kept_with_the_session_and_not_told_to_its_server() {
        let params =
            Bytes::from_static(br#"{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"c"}}"#);
        let mark = Mark([7; 32]);
        let kept = marked(&params, mark);
        assert_eq!(mark_of(&kept), Some(mark));
        assert_eq!(as_said(&kept), params);
        let own = Bytes::from_static(br#"{"_meta":{"x":1},"capabilities":{}}"#);
        assert_eq!((mark_of(&own), as_said(&own)), (None, own.clone()));
    }

    #[test]
    fn e3_parts_of_a_mark_do_not_run_into_each_other() {
        assert_ne!(digest(&[b"ab", b"c"]), digest(&[b"a", b"bc"]));
        assert_eq!(canonical(br#"{ "b":{"y":1,"x":2}, "a":{} }"#), br#"{"a":{},"b":{"x":2,"y":1}}"#);
    }

    #[test]
    fn e3_the_register_forgets_only_what_it_is_told_to() {
        let register = Register::default();
        let (mark, one, other) = (Mark([1; 32]), SessionKey::from_bytes([1; 32]), SessionKey::from_bytes([2; 32]));
        register.note(mark, one);
        register.forget(mark, other);
        assert_eq!(register.key(mark), Some(one));
        let whose = (ServerName::parse("s").expect("a name"), Principal::Anonymous);
        register.take_in(whose.clone(), BTreeMap::from([(mark, other)]));
        assert_eq!(register.key(mark), Some(one), "what was opened here is newer");
        register.forget(mark, one);
        assert_eq!((register.key(mark), register.is_surveyed(&whose)), (None, true));
    }
}
