//! What all links of a worker share: connections, custody of the children, and the surroundings.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use bytes::Bytes;
use http::header::{ACCEPT, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Response, Uri};
use mainstay_core::id::ServerName;
use mainstay_core::time::Timestamp;
use mainstay_keeper::client::{Custody, Held};
use tokio::sync::{Notify, OwnedSemaphorePermit};
use tokio::time::{Instant, timeout};

use crate::bridge::Annotated;
use crate::catalogue::Pages;
use crate::child::{Mask, ServerMemory, Shared, Sharing, Stamp, Supervised, Supervision, Why, dismiss_of};
use crate::contact::{Contact, Contacts};
use crate::era::Eras;
use crate::failure::{Blame, Failure};
use crate::http::Detected;
use crate::pool::{Body, Connectors, Host, Outgoing, SendError};
use crate::server::{Reach, Server};
use crate::template::Environment;
use crate::wire::lock;

/// What a worker gives to its links.
pub struct Parts {
    /// The way to the children; `None` where there is no keeper, and then there are no children.
    pub custody: Option<Custody>,
    /// Where variables of headers and environments come from.
    pub environment: Arc<dyn Environment>,
    /// The wall clock.
    pub now: Arc<dyn Fn() -> Timestamp + Send + Sync>,
    /// Random bits, for the markers of children.
    pub entropy: Arc<dyn Fn() -> [u8; 16] + Send + Sync>,
    /// The counter of the worker's epoch: ids of calls with a lower one are an earlier worker's.
    pub epoch: u64,
}

/// The shared part of all links. One per worker.
pub struct Upstreams {
    pub(crate) parts: Parts,
    pub(crate) pages: Pages,
    pub(crate) counters: Counters,
    connectors: Connectors,
    hosts: Mutex<HashMap<Box<str>, Arc<Host>>>,
    destinations: Mutex<HashMap<ServerName, Arc<Destination>>>,
    texts: Mutex<VecDeque<Bytes>>,
    own_requests: AtomicU64,
    left: AtomicBool,
    /// Something of some server has changed that is to outlive this worker.
    changed: Arc<Notify>,
}

/// Running totals since the worker began.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) remade: AtomicU64,
    pub(crate) repeated: AtomicU64,
    pub(crate) unknown: AtomicU64,
    pub(crate) notices_dropped: AtomicU64,
}

/// Running totals since the worker began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Upstream sessions and children that were made again (U6).
    pub remade: u64,
    /// Calls that were sent a second time because they are safe or were refused before execution.
    pub repeated: u64,
    /// Calls whose outcome is unknown.
    pub unknown: u64,
    /// Messages of servers that found no room on their way to a session.
    pub notices_dropped: u64,
}

impl Upstreams {
    /// The shared part, without any connection yet.
    pub fn new(parts: Parts) -> Self {
        Self {
            parts,
            pages: Pages::default(),
            counters: Counters::default(),
            connectors: Connectors::new(),
            hosts: Mutex::default(),
            destinations: Mutex::default(),
            texts: Mutex::default(),
            own_requests: AtomicU64::new(0),
            left: AtomicBool::new(false),
            changed: Arc::default(),
        }
    }

    /// Totals so far.
    pub fn counts(&self) -> Counts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            remade: read(&self.counters.remade),
            repeated: read(&self.counters.repeated),
            unknown: read(&self.counters.unknown),
            notices_dropped: read(&self.counters.notices_dropped),
        }
    }

    /// This worker gives way to the next one: no link opens an upstream session any more, since nobody would know of it
    /// later (T2). Calls go on in the sessions that there are; one whose session is lost is [`Failure::Left`]. What
    /// [`record`](crate::Link::record) says from here on is final.
    pub fn leave(&self) {
        self.left.store(true, Ordering::SeqCst);
    }

    /// Whether no upstream session is to be opened any more.
    pub(crate) fn has_left(&self) -> bool {
        self.left.load(Ordering::SeqCst)
    }

    pub(crate) fn now(&self) -> Timestamp {
        (self.parts.now)()
    }

    /// The raw id of the next request that is a link's own. No routed id looks like it, and none comes twice.
    pub(crate) fn own_id(&self) -> Bytes {
        let number = self.own_requests.fetch_add(1, Ordering::Relaxed);
        Bytes::from(format!("\"mainstay.{}.{number}\"", self.parts.epoch))
    }

    /// The name of the next request that goes to a process which many share: this epoch, and a number that comes once.
    pub(crate) fn own_name(&self) -> (u64, u64) {
        (self.parts.epoch, self.own_requests.fetch_add(1, Ordering::Relaxed))
    }

    pub(crate) fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// Sends one request to `host`, which its url must name.
    pub(crate) async fn send(&self, host: &Arc<Host>, request: Outgoing) -> Result<Response<Body>, SendError> {
        host.send(&self.connectors, request).await
    }

    /// Where `server` is, made once per definition.
    pub(crate) fn destination(&self, server: &Arc<Server>) -> Arc<Destination> {
        let mut destinations = lock(&self.destinations);
        match destinations.get(&server.name) {
            Some(known) if Arc::ptr_eq(&known.server, server) => Arc::clone(known),
            Some(_) | None => {
                let host = self.host(server.url());
                let destination = Arc::new(Destination::new(Arc::clone(server), host, (&self.parts, &self.changed)));
                destinations.insert(server.name.clone(), Arc::clone(&destination));
                destination
            }
        }
    }

    /// Goes on from what earlier workers remembered of the children of `server`. To be called before any link is made.
    pub fn recall_children(&self, server: &Arc<Server>, memory: ServerMemory) {
        self.destination(server).supervision.recall(server, memory);
    }

    /// What a later worker goes on from.
    pub fn memory(&self, server: &Arc<Server>) -> ServerMemory {
        self.destination(server).supervision.memory(server)
    }

    /// Resolves once what [`memory`](Self::memory) says of some server has changed since this resolved last. For one
    /// waiter.
    pub async fn memory_changed(&self) {
        self.changed.notified().await;
    }

    /// What is known of the children of `server`; nothing, if it is reached by HTTP. Asks the file system for its program,
    /// and may wait for that.
    pub fn supervised(&self, server: &Arc<Server>) -> Supervised {
        let program = Stamp::of(server, &*self.parts.environment);
        self.destination(server).supervision.view(program)
    }

    /// The same for a look at the numbers: does not look at the program, and says nothing of that.
    pub fn children(&self, server: &Arc<Server>) -> Supervised {
        self.destination(server).supervision.view(None)
    }

    /// When `server` was last heard of, if it is reached by HTTP.
    pub fn contact(&self, server: &Arc<Server>) -> Contact {
        self.destination(server).contacts.view()
    }

    /// Starts of `server` are free from now on, and the children that run are ended: their calls in flight get a while,
    /// new ones wait for the next child. Returns how many have ended, once that is known of all.
    ///
    /// If the future is dropped, all of them are ended all the same.
    pub async fn restart(&self, server: &Arc<Server>) -> usize {
        let destination = self.destination(server);
        destination.supervision.lift();
        destination.supervision.retire().await
    }

    /// Ends a child of `server` in custody that no session wants, as [`dismiss`](crate::dismiss) does, and remembers its
    /// end. Words for `why` are what operators see.
    pub async fn dismiss(self: &Arc<Self>, server: &Arc<Server>, held: Held, why: Why) {
        dismiss_of(Arc::clone(self), self.destination(server), held, why).await;
    }

    /// Takes over the child in custody that everybody shares, if `server` still is what it was started for: what its
    /// callers had asked of it is taken back, since none of them can come back for it. Otherwise it is ended.
    ///
    /// Must be called within a tokio runtime, and before anything is asked of `server`.
    pub fn adopt_shared(self: &Arc<Self>, server: &Arc<Server>, held: Held) {
        Sharing::new(self, &self.destination(server)).adopt(held);
    }

    /// Lets the child of `server` that everybody shares go if nobody has used it for `after` (S11).
    pub fn suspend_shared(self: &Arc<Self>, server: &Arc<Server>, after: Duration) {
        Sharing::new(self, &self.destination(server)).suspend(after);
    }

    /// How many calls are in flight to the child of `server` that everybody shares.
    pub fn shared_calls(&self, server: &Arc<Server>) -> usize {
        self.destination(server).shared.calls()
    }

    /// `text`, a part of what `server` wrote, without what it is given in confidence. May read files.
    pub fn masked(&self, server: &Server, text: &str) -> String {
        Mask::of(server, &*self.parts.environment).apply_to_part(text)
    }

    /// The host of `url`, with its connections.
    pub(crate) fn host(&self, url: Option<&Uri>) -> Arc<Host> {
        let name = url.map_or_else(String::new, |url| {
            let scheme = url.scheme_str().unwrap_or_default();
            format!("{scheme}://{}", url.authority().map_or("", |authority| authority.as_str()))
        });
        let mut hosts = lock(&self.hosts);
        if let Some(host) = hosts.get(&*name) {
            return Arc::clone(host);
        }
        // Hosts that no server is on any more must not pile up over many reloads.
        hosts.retain(|_, host| Arc::strong_count(host) > 1);
        let host = Arc::new(Host::new(url));
        hosts.insert(name.into(), Arc::clone(&host));
        host
    }

    /// `bytes` in memory of their own, or an equal text that another session keeps already: sessions of one server differ
    /// little in what their clients said and are told. For what is kept as long as a session lives.
    pub fn share(&self, bytes: &Bytes) -> Bytes {
        let mut texts = lock(&self.texts);
        if let Some(known) = texts.iter().find(|known| *known == bytes) {
            return known.clone();
        }
        // A copy, since a slice would keep the whole buffer alive that it was read into.
        let text = Bytes::copy_from_slice(bytes);
        texts.push_back(text.clone());
        if texts.len() > TEXTS_SHARED_MAX {
            texts.pop_front();
        }
        text
    }
}

/// One definition of a server, with what was worked out from it.
pub(crate) struct Destination {
    pub(crate) server: Arc<Server>,
    pub(crate) fingerprint: [u8; 32],
    pub(crate) host: Arc<Host>,
    /// Its children, if it has any.
    pub(crate) supervision: Arc<Supervision>,
    /// When it was last heard of, if it is reached by HTTP.
    pub(crate) contacts: Contacts,
    /// Whether it was found to speak HTTP+SSE.
    pub(crate) detected: Detected,
    /// Which eras it was found to speak.
    pub(crate) eras: Eras,
    /// Which arguments of its tools stand in headers, too.
    pub(crate) annotated: Annotated,
    /// The process that everybody shares, if it is a modern program.
    pub(crate) shared: Shared,
    resolved: ArcSwapOption<Resolved>,
}

/// The headers of every request to a server, secrets included, for a while.
pub(crate) struct Resolved {
    headers: HeaderMap,
    at: Instant,
}

impl Destination {
    fn new(server: Arc<Server>, host: Arc<Host>, (parts, changed): (&Parts, &Arc<Notify>)) -> Self {
        Self {
            fingerprint: server.fingerprint(),
            server,
            host,
            supervision: Supervision::new(parts, changed),
            contacts: Contacts::default(),
            detected: Detected::default(),
            eras: Eras::default(),
            annotated: Annotated::default(),
            shared: Shared::default(),
            resolved: ArcSwapOption::empty(),
        }
    }

    /// A place among the calls in flight to its host. Waits for one as long as its patience lasts.
    pub(crate) async fn place(&self) -> Result<OwnedSemaphorePermit, Failure> {
        if let Ok(place) = Arc::clone(&self.host.calls).try_acquire_owned() {
            return Ok(place);
        }
        let waited = timeout(self.server.patience, Arc::clone(&self.host.calls).acquire_owned()).await;
        waited
            .ok()
            .and_then(Result::ok)
            .ok_or_else(|| self.server.unreachable("too many calls to its host are in flight".into()))
    }

    /// The headers of a POST. Resolved at most [`RESOLVED_FOR`] ago.
    pub(crate) fn headers(&self, environment: &dyn Environment) -> Result<HeaderMap, Failure> {
        if let Some(resolved) = &*self.resolved.load()
            && resolved.at.elapsed() < RESOLVED_FOR
        {
            return Ok(resolved.headers.clone());
        }
        Ok(self.resolve(environment)?.0)
    }

    /// Resolves the headers anew after the server refused them. Whether they are others now.
    pub(crate) fn refresh(&self, environment: &dyn Environment) -> Result<bool, Failure> {
        Ok(self.resolve(environment)?.1)
    }

    fn resolve(&self, environment: &dyn Environment) -> Result<(HeaderMap, bool), Failure> {
        let headers = configured_headers(&self.server, environment)?;
        let changed = self.resolved.load().as_ref().is_none_or(|known| known.headers != headers);
        self.resolved.store(Some(Arc::new(Resolved { headers: headers.clone(), at: Instant::now() })));
        Ok((headers, changed))
    }
}

/// The headers of a POST to `server`, resolved now.
pub(crate) fn configured_headers(server: &Server, environment: &dyn Environment) -> Result<HeaderMap, Failure> {
    let mut headers = HeaderMap::with_capacity(HEADERS_EXPECTED);
    headers.insert(ACCEPT, HeaderValue::from_static("application/json, text/event-stream"));
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    let configured = match &server.reach {
        Reach::Http { headers, .. } => headers.as_slice(),
        Reach::Child { .. } => &[],
    };
    for (name, template) in configured {
        let value = template.resolve(environment).map_err(|error| unusable(server, &error))?;
        let value = HeaderValue::from_str(value.reveal());
        let mut value =
            value.map_err(|_| unusable(server, &format!("the value of header `{name}` is not allowed in one")))?;
        value.set_sensitive(true);
        headers.append(name, value);
    }
    Ok(headers)
}

/// That the definition of `server` can't be used, and why.
pub(crate) fn unusable(server: &Server, problem: &dyn std::fmt::Display) -> Failure {
    Failure::Configuration { server: server.name.clone(), problem: problem.to_string().into() }
}

/// How long resolved headers are used before they are resolved again.
const RESOLVED_FOR: Duration = Duration::from_secs(60);

const HEADERS_EXPECTED: usize = 8;

/// Texts that are kept once for all sessions.
const TEXTS_SHARED_MAX: usize = 64;
