//! What a server says unasked in a conversation, and who listens to it (2026-07-28, Subscriptions).
//!
//! Many clients may listen in one conversation, and its server knows of one listener: the gateway reads the session's
//! listening stream once, answers questions there, which no modern client can be asked, and passes everything else on to
//! all who want it. Resources are subscribed to as long as anybody listens for them.

mod past;
mod subscriptions;

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Weak};

use bytes::Bytes;
use dashmap::Entry as Place;
use mainstay_core::code::Code;
use mainstay_core::limit::Limit;
use mainstay_core::wire::envelope::{Kind, scan};
use mainstay_core::wire::modern::hearing::{Change, Wanted, tagged};
use mainstay_upstream::Listening;
use parking_lot::Mutex;
use tokio::sync::broadcast::{self, error::RecvError};

use self::past::Past;
use self::subscriptions::Subscriptions;
use super::passage::decline;
use crate::engine::live::{Entry, Live};
use crate::engine::{Engine, Reading, Refused};
use crate::runtime::spawn;

/// Who listens in one conversation.
pub(crate) struct Hearing {
    live: Weak<Live>,
    said: broadcast::Sender<Said>,
    subscriptions: Subscriptions,
    past: Mutex<Past>,
}

impl Hearing {
    fn new(live: &Arc<Live>, past: Past) -> Self {
        Self {
            live: Arc::downgrade(live),
            said: broadcast::channel(QUEUE_MESSAGES_MAX).0,
            subscriptions: Subscriptions::default(),
            past: Mutex::new(past),
        }
    }

    fn is_of(&self, live: &Arc<Live>) -> bool {
        self.live.ptr_eq(&Arc::downgrade(live))
    }

    fn say(&self, change: Change, message: Bytes) {
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

    /// It will not hear of `resource`.
    fn want_no_more(&mut self, resource: Box<str>) {
        self.wanted.resources.remove(&resource);
        self.hearing.subscriptions.let_go(&BTreeSet::from([resource]));
    }

    /// Tells it of `changes` before anything else.
    fn tell(&mut self, changes: BTreeSet<Change>) {
        self.first.extend(changes.iter().map(|change| Bytes::from(tagged(&change.notification(), &self.id))));
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if self.hearing.subscriptions.let_go(&self.wanted.resources) {
            self.engine.sweep_soon(&self.live, &self.hearing);
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
        // Those who wanted what an earlier life of it was subscribed to may never come back.
        self.sweep_soon(live, &hearing);
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
                Kind::Notification => {
                    if let Some(change) = Change::of(&message, &envelope) {
                        hearing.say(change, message);
                    }
                }
                Kind::Result | Kind::Error => {}
            }
        }
        self.conversations.hearings.remove_if(&live.key, |_, known| Arc::ptr_eq(known, hearing));
    }

    /// Tells who listens in a conversation that the resources there may have changed: its server has lost the session, and
    /// what it would have said of them meanwhile.
    pub(crate) fn tell_of_gap(&self, live: &Live) {
        let Some(hearing) = self.conversations.hearings.get(&live.key).map(|hearing| Arc::clone(&hearing)) else {
            return;
        };
        for change in subscriptions::agreed(live).into_iter().map(Change::Resource) {
            let message = change.notification().into();
            hearing.say(change, message);
        }
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
        let wanted = self.introduced(&live).map_or_else(Wanted::default, |said| wanted.offered_by(&said));
        hearing.subscriptions.want(&wanted.resources);
        let (said, mut past) = hearing.listen(&wanted);
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
        for resource in listener.wanted.resources.clone() {
            match self.subscribe(&listener.live, &listener.hearing, &resource).await {
                Some(missed) => past.extend(missed),
                None => listener.want_no_more(resource),
            }
        }
        past.retain(|change| listener.wanted.hears(change));
        listener.first.push_back(listener.wanted.acknowledgement(&listener.id).into());
        listener.tell(past);
        Ok(listener)
    }
}

/// What may wait for one who listens and does not read.
const QUEUE_MESSAGES_MAX: usize = 256;
/// Resources that one client may listen for at a time.
const RESOURCES_MAX: usize = 256;
