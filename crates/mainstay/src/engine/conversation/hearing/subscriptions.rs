//! Which resources are listened for in a conversation, and what its server has been told of that.
//!
//! What the server has agreed to stands in the session's record, whichever worker has asked for it and whatever became of
//! who wanted it. It is taken back once nobody wants it for a while.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::wire::envelope::{Kind, escape, request_message, scan};
use mainstay_core::wire::method::Method;
use mainstay_core::wire::modern::hearing::{Change, Wanted};
use parking_lot::Mutex;

use super::Hearing;
use crate::engine::Engine;
use crate::engine::call::{Reply, Request};
use crate::engine::conversation::course::own_refusal;
use crate::engine::live::Live;
use crate::runtime::spawn;

/// The resources that are listened for.
#[derive(Default)]
pub(super) struct Subscriptions {
    /// How many listen for each.
    wanted: Mutex<BTreeMap<Box<str>, usize>>,
    /// Held while the server is told something.
    telling: tokio::sync::Mutex<()>,
    is_sweep_due: AtomicBool,
}

/// What became of a request to the server.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Told {
    Agreed,
    Refused,
    Unknown,
}

impl Subscriptions {
    /// Counts one more who wants `resources`.
    pub(super) fn want(&self, resources: &BTreeSet<Box<str>>) {
        let mut wanted = self.wanted.lock();
        for resource in resources {
            *wanted.entry(resource.clone()).or_default() += 1;
        }
    }

    /// Counts one less who wants `resources`. Whether it was the last for any of them.
    pub(super) fn let_go(&self, resources: &BTreeSet<Box<str>>) -> bool {
        let mut wanted = self.wanted.lock();
        for resource in resources {
            if let Some(count) = wanted.get_mut(resource) {
                *count -= 1;
            }
        }
        let before = wanted.len();
        wanted.retain(|_, count| *count > 0);
        wanted.len() < before
    }

    fn is_wanted(&self, resource: &str) -> bool {
        self.wanted.lock().contains_key(resource)
    }
}

impl Engine {
    /// Sees to it that the server tells of `resource`, for somebody who is counted as wanting it. What comes back is what
    /// it has not told of since that was so before; `None` if it does not agree.
    ///
    /// Cancel-safe: once begun it goes on, and what the server agrees to in vain is taken back.
    pub(super) async fn subscribe(
        self: &Arc<Self>,
        live: &Arc<Live>,
        hearing: &Arc<Hearing>,
        resource: &str,
    ) -> Option<BTreeSet<Change>> {
        let (engine, live, hearing) = (Arc::clone(self), Arc::clone(live), Arc::clone(hearing));
        let resource: Box<str> = resource.into();
        let subscribing = spawn(async move {
            let _telling = hearing.subscriptions.telling.lock().await;
            let agreed = agreed(&live);
            if agreed.contains(&resource) {
                return Some(BTreeSet::new());
            }
            if agreed.len() >= AGREED_MAX {
                return None;
            }
            let wanted = Wanted { resources: BTreeSet::from([resource.clone()]), ..Wanted::default() };
            let missed = hearing.past.lock().of(&wanted);
            (engine.tell(&live, Method::Subscribe, &resource).await == Told::Agreed).then_some(missed)
        });
        subscribing.await.ok().flatten()
    }

    /// Takes back, in a while, what nobody wants then.
    pub(super) fn sweep_soon(self: &Arc<Self>, live: &Arc<Live>, hearing: &Arc<Hearing>) {
        if hearing.subscriptions.is_sweep_due.swap(true, Ordering::AcqRel) {
            return;
        }
        let (engine, live, hearing) = (Arc::clone(self), Arc::clone(live), Arc::clone(hearing));
        spawn(async move {
            for _ in 0..SWEEPS_MAX {
                tokio::select! {
                    () = live.ended.wait() => return,
                    () = tokio::time::sleep(UNWANTED_FOR) => {}
                }
                // What is let go from now on needs another.
                hearing.subscriptions.is_sweep_due.store(false, Ordering::Release);
                if engine.has_left() || engine.sweep(&live, &hearing).await {
                    return;
                }
                if hearing.subscriptions.is_sweep_due.swap(true, Ordering::AcqRel) {
                    return;
                }
            }
            hearing.subscriptions.is_sweep_due.store(false, Ordering::Release);
        });
    }

    /// Takes back what nobody wants. Whether the server knows of all of it.
    async fn sweep(self: &Arc<Self>, live: &Arc<Live>, hearing: &Hearing) -> bool {
        let _telling = hearing.subscriptions.telling.lock().await;
        for resource in agreed(live) {
            if hearing.subscriptions.is_wanted(&resource) {
                continue;
            }
            // Nobody hears of its updates from now on, which those who want it again have missed.
            hearing.past.lock().note(Change::Resource(resource.clone()));
            if self.tell(live, Method::Unsubscribe, &resource).await == Told::Unknown {
                return false;
            }
        }
        true
    }

    /// Makes a request of the gateway's own about `resource`.
    async fn tell(self: &Arc<Self>, live: &Arc<Live>, method: Method, resource: &str) -> Told {
        let params = [b"{\"uri\":".as_slice(), &escape(resource), b"}"].concat();
        let message = Bytes::from(request_message(&self.own_id(), method.as_str(), Some(&params)));
        let Ok(envelope) = scan(&message) else { return Told::Refused };
        let Ok(Reply::Json(answer)) = self.request(live, Request { message, envelope, method }).await else {
            return Told::Unknown;
        };
        match scan(&answer) {
            Ok(envelope) if envelope.kind == Kind::Result => Told::Agreed,
            Ok(envelope) if own_refusal(&answer, &envelope, b"0").is_none() => Told::Refused,
            Ok(_) | Err(_) => Told::Unknown,
        }
    }
}

/// What the server has agreed to tell of.
pub(super) fn agreed(live: &Live) -> BTreeSet<Box<str>> {
    live.link.record().map(|record| record.subscriptions).unwrap_or_default()
}

/// How long a resource is subscribed to that nobody listens for any more: whoever comes back sooner misses nothing.
const UNWANTED_FOR: Duration = Duration::from_secs(5);
/// How often it is tried in a row to take something back. After that it is tried with the next that nobody wants.
const SWEEPS_MAX: usize = 12;
/// To how many resources a conversation is subscribed: as many as a session's record keeps.
const AGREED_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e3_a_resource_is_wanted_until_the_last_who_listens_for_it_lets_go() {
        let (one, both) = (BTreeSet::from(["a:".into()]), BTreeSet::from(["a:".into(), "b:".into()]));
        let subscriptions = Subscriptions::default();
        subscriptions.want(&one);
        subscriptions.want(&both);
        assert!(!subscriptions.let_go(&one));
        assert!(subscriptions.is_wanted("a:") && subscriptions.is_wanted("b:"));
        assert!(subscriptions.let_go(&both));
        assert!(!subscriptions.is_wanted("a:") && !subscriptions.is_wanted("b:"));
        assert!(!subscriptions.let_go(&both), "nothing is left to let go");
    }
}
