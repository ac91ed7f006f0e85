//! What a server says unasked in a conversation, and who listens to it (2026-07-28, Subscriptions).
//!
//! Many clients may listen in one conversation, and its server knows of one listener: the gateway reads the session's
//! listening stream once, answers questions there, which no modern client can be asked, and passes everything else on to
//! all who want it. Resources are subscribed to as long as anybody listens for them.

mod past;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Weak};

use bytes::Bytes;
use dashmap::Entry as Place;
use mainstay_core::code::Code;
use mainstay_core::limit::Limit;
use mainstay_core::wire::envelope::{Envelope, Kind, escape, request_message, scan};
use mainstay_core::wire::method::Method;
use mainstay_core::wire::modern::hearing::{Change, Wanted, tagged};
use mainstay_upstream::Listening;
use parking_lot::Mutex;
use tokio::sync::broadcast::{self, error::RecvError};

use self::past::Past;
use super::passage::decline;
use crate::engine::call::{Reply, Request};
use crate::engine::live::{Entry, Live};
use crate::engine::{Engine, Reading, Refused};
use crate::runtime::spawn;

/// Who listens in one conversation.
pub(crate) struct Hearing {
    live: Weak<Live>,
    said: broadcast::Sender<Said>,
    /// How many listen for each resource. Locked while the server is told.
    subscribed: tokio::sync::Mutex<BTreeMap<Box<str>, usize>>,
    past: Mutex<Past>,
}

impl Hearing {
    fn new(live: &Arc<Live>, past: Past) -> Self {
        Self {
            live: Arc::downgrade(live),
            said: broadcast::channel(QUEUE_MESSAGES_MAX).0,
            subscribed: tokio::sync::Mutex::default(),
            past: Mutex::new(past),
        }
    }

    fn is_of(&self, live: &Arc<Live>) -> bool {
        self.live.ptr_eq(&Arc::downgrade(live))
    }

    fn say(&self, message: Bytes, envelope: &Envelope) {
        let Some(change) = Change::of(&message, envelope) else { return };
        let mut past = self.past.lock();
        past.note(change.clone());
        // Nobody may be there.
        let _ = self.said.send((change, message));
    }

    /// A place to listen at, and what has changed before of what is `wanted`.
    fn listen(&self, wanted: &Wanted) -> (broadcast::Receiver<Said>, BTreeSet<Change>) {
        let past = self.past.lock();
        (self.said.subscribe(), past.of(wanted))
    }
}

/// A change, and the words in which its server has told of it.
type Said = (Change, Bytes);

/// One client that listens. Dropped, it is not there any more.
pub struct Listener {
    engine: Arc<Engine>,
    live: Arc<Live>,
    hearing: Arc<Hearing>,
    /// The raw id of its request.
    id: Bytes,
    wanted: Wanted,
    /// What is to be said first.
    first: VecDeque<Bytes>,
    said: broadcast::Receiver<Said>,
    _listening: Listening,
    _reading: Reading,
}

impl Listener {
    /// The next message of its stream; `None` once the conversation is over. Cancel-safe.
    pub async fn next(&mut self) -> Option<Bytes> {
        if let Some(first) = self.first.pop_front() {
            return Some(first);
        }
        loop {
            let said = tokio::select! {
                biased;
                said = self.said.recv() => said,
                () = self.live.ended.wait() => return None,
            };
            match said {
                Ok((change, message)) if self.wanted.hears(&change) => return Some(tagged(&message, &self.id).into()),
                Ok(_) => {}
                // It did not read for so long that something is lost: it is told that all may have changed.
                Err(RecvError::Lagged(_)) => {
                    self.tell(self.wanted.everything());
                    if let Some(first) = self.first.pop_front() {
                        return Some(first);
                    }
                }
                Err(RecvError::Closed) => return None,
            }
        }
    }

    /// Tells it of `changes` before anything else.
    fn tell(&mut self, changes: BTreeSet<Change>) {
        self.first.extend(changes.iter().map(|change| Bytes::from(tagged(&change.notification(), &self.id))));
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let (engine, live, hearing) = (Arc::clone(&self.engine), Arc::clone(&self.live), Arc::clone(&self.hearing));
        let resources = std::mem::take(&mut self.wanted.resources);
        if !resources.is_empty() {
            spawn(async move {
                for resource in resources {
                    engine.unsubscribe(&live, &hearing, &resource).await;
                }
            });
        }
    }
}

impl Engine {
    /// Sees to it that somebody reads what the server says unasked in a conversation, for as long as it is in memory.
    pub(super) fn attend(self: &Arc<Self>, live: &Arc<Live>) -> Arc<Hearing> {
        // It was there before, and somebody may have listened.
        self.attend_after(live, Past::Unknown)
    }

    /// As [`attend`](Self::attend), for a conversation that begins now.
    pub(super) fn attend_first(self: &Arc<Self>, live: &Arc<Live>) {
        self.attend_after(live, Past::none());
    }

    fn attend_after(self: &Arc<Self>, live: &Arc<Live>, past: Past) -> Arc<Hearing> {
        let hearings = &self.conversations.hearings;
        if let Some(known) = hearings.get(&live.key)
            && known.is_of(live)
        {
            return Arc::clone(&known);
        }
        let hearing = Arc::new(Hearing::new(live, past));
        match hearings.entry(live.key) {
            Place::Occupied(known) if known.get().is_of(live) => return Arc::clone(known.get()),
            Place::Occupied(mut of_earlier_life) => drop(of_earlier_life.insert(Arc::clone(&hearing))),
            Place::Vacant(place) => drop(place.insert(Arc::clone(&hearing))),
        }
        let (engine, live, heard) = (Arc::clone(self), Arc::clone(live), Arc::clone(&hearing));
        spawn(async move { engine.hear(&live, &heard).await });
        hearing
    }

    /// Reads the listening stream of a conversation to its end.
    async fn hear(self: &Arc<Self>, live: &Arc<Live>, hearing: &Arc<Hearing>) {
        let mut reader = live.listen.overhear();
        while let Some((_, message)) = reader.next_message().await {
            let Ok(envelope) = scan(&message) else { continue };
            match envelope.kind {
                Kind::Request => decline(self, live, &message, &envelope),
                Kind::Notification => hearing.say(message, &envelope),
                Kind::Result | Kind::Error => {}
            }
        }
        self.conversations.hearings.remove_if(&live.key, |_, known| Arc::ptr_eq(known, hearing));
    }

    /// Listens in a conversation for what the request `id` wants: the first message says what of it will be heard.
    ///
    /// # Errors
    /// [`Code::LimitReached`] if it wants too much.
    pub async fn listen_in(self: &Arc<Self>, entry: &Entry, id: Bytes, wanted: Wanted) -> Result<Listener, Refused> {
        if wanted.resources.len() > RESOURCES_MAX {
            let text = format!("one stream can listen for at most {RESOURCES_MAX} resources");
            return Err(Refused::at_limit(Code::LimitReached, Limit::Listens, text));
        }
        let live = Arc::clone(entry);
        let hearing = self.attend(&live);
        let mut wanted = self.introduced(&live).map_or_else(Wanted::default, |said| wanted.offered_by(&said));
        let resources = std::mem::take(&mut wanted.resources);
        let (said, past) = hearing.listen(&Wanted { resources: resources.clone(), ..wanted.clone() });
        let mut listener = Listener {
            engine: Arc::clone(self),
            _listening: live.link.listen(),
            _reading: self.reading(&live),
            live,
            hearing,
            id,
            wanted,
            first: VecDeque::new(),
            said,
        };
        for resource in resources {
            if self.subscribe(&listener.live, &listener.hearing, &resource).await {
                listener.wanted.resources.insert(resource);
            }
        }
        let past = past.into_iter().filter(|change| listener.wanted.hears(change)).collect();
        listener.first.push_back(listener.wanted.acknowledgement(&listener.id).into());
        listener.tell(past);
        Ok(listener)
    }

    /// Counts one who listens for `resource`, and subscribes to it for the first one. `false` if the server refuses.
    async fn subscribe(self: &Arc<Self>, live: &Arc<Live>, hearing: &Arc<Hearing>, resource: &str) -> bool {
        let (engine, live, hearing) = (Arc::clone(self), Arc::clone(live), Arc::clone(hearing));
        let resource: Box<str> = resource.into();
        // Once begun it goes on: what the server agrees to must be counted.
        let subscribing = spawn(async move {
            let mut subscribed = hearing.subscribed.lock().await;
            if let Some(count) = subscribed.get_mut(&resource) {
                *count += 1;
                return true;
            }
            let agreed = engine.settle_with_server(&live, Method::Subscribe, &resource).await;
            if agreed {
                subscribed.insert(resource, 1);
            }
            agreed
        });
        subscribing.await.unwrap_or(false)
    }

    async fn unsubscribe(self: &Arc<Self>, live: &Arc<Live>, hearing: &Hearing, resource: &str) {
        let mut subscribed = hearing.subscribed.lock().await;
        match subscribed.get_mut(resource) {
            Some(count) if *count > 1 => *count -= 1,
            Some(_) => {
                subscribed.remove(resource);
                if !live.ended.is_set() && !self.has_left() {
                    self.settle_with_server(live, Method::Unsubscribe, resource).await;
                }
            }
            None => {}
        }
    }

    /// Makes a request of the gateway's own about `resource`. Whether the server agrees.
    async fn settle_with_server(self: &Arc<Self>, live: &Arc<Live>, method: Method, resource: &str) -> bool {
        let params = [b"{\"uri\":".as_slice(), &escape(resource), b"}"].concat();
        let message = Bytes::from(request_message(&self.own_id(), method.as_str(), Some(&params)));
        let Ok(envelope) = scan(&message) else { return false };
        match self.request(live, Request { message, envelope, method }).await {
            Ok(Reply::Json(answer)) => scan(&answer).is_ok_and(|answer| answer.kind == Kind::Result),
            Ok(Reply::Stream(_)) | Err(_) => false,
        }
    }
}

/// What may wait for one who listens and does not read.
const QUEUE_MESSAGES_MAX: usize = 256;
/// Resources that one client may listen for at a time.
const RESOURCES_MAX: usize = 256;
