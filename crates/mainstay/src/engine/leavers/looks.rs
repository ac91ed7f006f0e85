//! How far leavers have come with the streams that somebody follows here: looked up for all of them at a time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use mainstay_core::call::StreamId;
use mainstay_core::id::{Epoch, SessionKey};
use mainstay_store::journal::Head;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::engine::Engine;
use crate::runtime::spawn;

/// A stream of a session.
type Place = (SessionKey, StreamId);

/// The streams that are looked at.
#[derive(Default)]
pub(super) struct Looks(Mutex<Looked>);

#[derive(Default)]
struct Looked {
    streams: BTreeMap<Place, Arc<Followed>>,
    /// Whether there is a task that looks.
    is_looking: bool,
}

struct Followed {
    leaver: Epoch,
    seen: watch::Sender<Sight>,
    is_urgent: AtomicBool,
}

/// What was seen of a stream last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sight {
    /// Where it stands; `None` if the journal does not know it.
    pub(crate) head: Option<Head>,
    /// Whether that was looked up yet.
    pub(crate) is_known: bool,
    /// Whether the leaver was gone before that was looked up: nothing follows then.
    pub(crate) is_gone: bool,
}

/// One who follows a stream. Dropped, it is looked at no more, unless by others.
pub(crate) struct Watch {
    engine: Arc<Engine>,
    place: Place,
    followed: Arc<Followed>,
    seen: watch::Receiver<Sight>,
}

impl Watch {
    /// What was seen last.
    pub(crate) fn sight(&mut self) -> Sight {
        *self.seen.borrow_and_update()
    }

    /// Resolves once something else is seen than what [`sight`](Self::sight) has told. Cancel-safe.
    pub(crate) async fn changed(&mut self) {
        if self.seen.changed().await.is_err() {
            // Whoever looks keeps the other end for as long as this lives.
            std::future::pending::<()>().await;
        }
    }

    /// Says whether a client waits for what comes.
    pub(crate) fn urge(&self, is_urgent: bool) {
        self.followed.is_urgent.store(is_urgent, Ordering::Relaxed);
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut looked = self.engine.leavers.looks.0.lock();
        // This one is the last.
        if self.followed.seen.receiver_count() <= 1 {
            looked.streams.remove(&self.place);
        }
    }
}

impl Engine {
    /// Follows a stream that `leaver` appends to.
    pub(crate) fn watch(self: &Arc<Self>, session: SessionKey, stream: StreamId, leaver: Epoch) -> Watch {
        let (place, mut looked) = ((session, stream), self.leavers.looks.0.lock());
        let new = || {
            let (seen, is_urgent) = (watch::channel(Sight::default()).0, AtomicBool::new(false));
            Arc::new(Followed { leaver, seen, is_urgent })
        };
        let followed = Arc::clone(looked.streams.entry(place).or_insert_with(new));
        if !std::mem::replace(&mut looked.is_looking, true) {
            spawn(Arc::clone(self).look());
        }
        let seen = followed.seen.subscribe();
        Watch { engine: Arc::clone(self), place, followed, seen }
    }

    /// Looks until nothing is left to be looked at.
    async fn look(self: Arc<Self>) {
        for round in (0..PAUSES_PER_LOOK).cycle() {
            let wanted: BTreeMap<Place, Arc<Followed>> = {
                let mut looked = self.leavers.looks.0.lock();
                if looked.streams.is_empty() {
                    looked.is_looking = false;
                    return;
                }
                let is_due = |followed: &Followed| {
                    round == 0 || followed.is_urgent.load(Ordering::Relaxed) || !followed.seen.borrow().is_known
                };
                let due = looked.streams.iter().filter(|(_, followed)| is_due(followed));
                due.map(|(place, followed)| (*place, Arc::clone(followed))).collect()
            };
            if !wanted.is_empty() {
                self.look_at(&wanted).await;
            }
            drop(wanted);
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn look_at(&self, wanted: &BTreeMap<Place, Arc<Followed>>) {
        // Looked at first: what a leaver has appended before it went is read below.
        let present: BTreeMap<Epoch, bool> =
            self.leavers.living().into_iter().map(|leaver| (leaver, self.leavers.is_present(leaver))).collect();
        let heads = match self.journal.heads(wanted.keys().copied().collect()).await {
            Ok(heads) => heads,
            Err(error) => return tracing::debug!(error = %error, "the streams of leavers can't be read yet"),
        };
        for (followed, head) in wanted.values().zip(heads) {
            let is_gone = !present.get(&followed.leaver).copied().unwrap_or_default();
            let sight = Sight { head, is_known: true, is_gone };
            followed.seen.send_if_modified(|seen| std::mem::replace(seen, sight) != sight);
        }
    }
}

/// The pause between two looks at streams that clients wait for, and after how many of them the others are looked at.
const PAUSE: Duration = Duration::from_millis(50);
const PAUSES_PER_LOOK: u32 = 5;
