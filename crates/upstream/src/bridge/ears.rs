//! What a modern server says unasked: `subscriptions/listen`, for a legacy client that has a listening stream.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::wire::envelope::{self, Kind};
use mainstay_core::wire::modern::edit::{self, Change};
use mainstay_core::wire::modern::{METHOD_NOT_FOUND, SUBSCRIPTION_ID};
use tokio::time::{Instant, timeout};

use super::Bridge;
use super::post::{self, Posted, Response};
use crate::ears::{Pace, REPROBE};
use crate::era::error_code;
use crate::failure::Failure;
use crate::feed::Feed;
use crate::notice::Notice;
use crate::task::spawn;
use crate::upstreams::Upstreams;
use crate::wire::lock;

/// What is listened to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Filter {
    tools: bool,
    prompts: bool,
    resources: bool,
    uris: BTreeSet<Box<str>>,
}

/// Why there is no stream.
enum NoStream {
    /// Not for now.
    Later,
    /// The server does not have such a thing.
    Never,
}

impl Bridge {
    /// One more listener. The stream is kept open while there is one.
    pub(crate) fn listen(self: &Arc<Self>) {
        lock(&self.ears).listen(|| spawn(Box::pin(Arc::clone(self).keep_listening())).abort_handle());
    }

    /// One listener less.
    pub(crate) fn unlisten(&self) {
        lock(&self.ears).unlisten();
    }

    async fn keep_listening(self: Arc<Self>) {
        let (mut pace, mut was_cut) = (Pace::from(PAUSE_FIRST), false);
        loop {
            if !self.opened()
                && let Err(failure) = self.reach().await
            {
                if let Failure::Ended { .. } = failure {
                    return;
                }
                tokio::time::sleep(pace.pause()).await;
                continue;
            }
            let filter = self.filter();
            if filter == Filter::default() {
                self.retuned.notified().await;
                continue;
            }
            match self.tune(&filter).await {
                Ok(feed) => {
                    if was_cut {
                        self.say_lists_may_have_changed(&filter).await;
                    }
                    let opened_at = Instant::now();
                    self.hear(feed, filter).await;
                    was_cut = true;
                    pace.lasted(opened_at.elapsed());
                    tokio::time::sleep(pace.pause()).await;
                }
                Err(NoStream::Later) => tokio::time::sleep(pace.pause()).await,
                Err(NoStream::Never) => {
                    let _ = timeout(REPROBE, self.retuned.notified()).await;
                }
            }
        }
    }

    /// What there is to listen to: what the server says may change, and what the client has subscribed to.
    fn filter(&self) -> Filter {
        Filter {
            tools: self.declares(&["tools", "listChanged"]),
            prompts: self.declares(&["prompts", "listChanged"]),
            resources: self.declares(&["resources", "listChanged"]),
            uris: lock(&self.state).kept.handshake.subscriptions.clone(),
        }
    }

    /// Opens a stream, up to the server's word that it listens.
    async fn tune(&self, filter: &Filter) -> Result<Feed, NoStream> {
        let id = self.upstreams.own_id();
        let message = envelope::request_message(&id, "subscriptions/listen", Some(&filter.params()));
        let dressed = self.dress(message.into());
        let tuned = timeout(TUNE_BOUND, async {
            let posted = post::request(&self.upstreams, &self.destination, &dressed, true).await;
            let mut feed = match posted.map_err(|_| NoStream::Later)? {
                Posted::Refused(Response { status, body, .. }) => {
                    let code = envelope::scan(&body).ok().and_then(|scanned| error_code(&body, &scanned.error?));
                    let never = code == Some(METHOD_NOT_FOUND) || matches!(status, 404 | 405);
                    return Err(if never { NoStream::Never } else { NoStream::Later });
                }
                Posted::Body(..) => return Err(NoStream::Never),
                Posted::Feed(feed) => feed,
            };
            loop {
                let message = feed.next().await.map_err(|_| NoStream::Later)?;
                let Ok(scanned) = envelope::scan(&message) else { continue };
                match scanned.kind {
                    Kind::Notification if scanned.method_name(&message).as_deref() == Some(ACKNOWLEDGED) => {
                        return Ok(feed);
                    }
                    Kind::Result => return Err(NoStream::Later),
                    Kind::Error => return Err(NoStream::Never),
                    Kind::Notification | Kind::Request => {}
                }
            }
        });
        tuned.await.unwrap_or(Err(NoStream::Later))
    }

    /// Hands on what comes until the stream ends. When there is something else to listen to, another stream takes over; the
    /// old one is read until that is there.
    async fn hear(self: &Arc<Self>, mut feed: Feed, mut filter: Filter) {
        loop {
            let retune = async {
                loop {
                    self.retuned.notified().await;
                    let wanted = self.filter();
                    if wanted != filter {
                        return wanted;
                    }
                }
            };
            let wanted = tokio::select! {
                () = self.hand_on(&mut feed) => return,
                wanted = retune => wanted,
            };
            if wanted == Filter::default() {
                return;
            }
            let next = tokio::select! {
                next = self.tune(&wanted) => next,
                () = self.hand_on(&mut feed) => return,
            };
            match next {
                Ok(next) => (feed, filter) = (next, wanted),
                Err(_) => return,
            }
        }
    }

    /// Hands on what comes. Returns when the stream has ended. Cancel-safe but for the message that is being handed on,
    /// which waits for room only.
    async fn hand_on(&self, feed: &mut Feed) {
        while let Ok(message) = feed.next().await {
            let Ok(scanned) = envelope::scan(&message) else { continue };
            match scanned.kind {
                Kind::Notification => self.deliver(untagged(&message, &scanned)).await,
                Kind::Request => {}
                Kind::Result | Kind::Error => return,
            }
        }
    }

    async fn deliver(&self, message: Bytes) {
        if !self.notices.tell(Notice::message(message)).await {
            Upstreams::count(&self.upstreams.counters.notices_dropped);
        }
    }

    /// A modern server does not say again what it said while nobody listened, so the client is told to look (E4).
    async fn say_lists_may_have_changed(&self, filter: &Filter) {
        for (listened, list) in [(filter.tools, "tools"), (filter.prompts, "prompts"), (filter.resources, "resources")]
        {
            if listened {
                let method = format!("notifications/{list}/list_changed");
                self.deliver(envelope::notification_message(&method, None).into()).await;
            }
        }
        for uri in &filter.uris {
            let params = [b"{\"uri\":", &*envelope::escape(uri), b"}"].concat();
            self.deliver(envelope::notification_message("notifications/resources/updated", Some(&params)).into()).await;
        }
    }
}

impl Filter {
    fn params(&self) -> Vec<u8> {
        let mut wanted: Vec<Vec<u8>> = Vec::new();
        for (listened, name) in [
            (self.tools, "toolsListChanged"),
            (self.prompts, "promptsListChanged"),
            (self.resources, "resourcesListChanged"),
        ] {
            if listened {
                wanted.push(format!("\"{name}\":true").into_bytes());
            }
        }
        if !self.uris.is_empty() {
            let uris: Vec<_> = self.uris.iter().map(|uri| envelope::escape(uri)).collect();
            wanted.push([b"\"resourceSubscriptions\":[", &*uris.join(&b","[..]), b"]"].concat());
        }
        [b"{\"notifications\":{", &*wanted.join(&b","[..]), b"}}"].concat()
    }
}

/// `message` without the mark of the request that it came for, which is none of the client's.
fn untagged(message: &Bytes, scanned: &envelope::Envelope) -> Bytes {
    let edits = edit::request_meta(message, scanned, &[(SUBSCRIPTION_ID, Change::Remove)]);
    if edits.is_empty() { message.clone() } else { edit::apply(message, edits).into() }
}

const ACKNOWLEDGED: &str = "notifications/subscriptions/acknowledged";

/// The first wait before a stream that was cut, or a server that is away, is tried again.
const PAUSE_FIRST: Duration = Duration::from_millis(250);

/// How long a server may take to say that it listens.
const TUNE_BOUND: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e1_what_is_listened_to_is_the_union_of_lists_and_subscriptions() {
        let filter = Filter { tools: true, uris: ["a\"".into(), "b".into()].into(), ..Filter::default() };
        let expected = r#"{"notifications":{"toolsListChanged":true,"resourceSubscriptions":["a\"","b"]}}"#;
        assert_eq!(filter.params(), expected.as_bytes());
        assert_eq!(Filter::default().params(), br#"{"notifications":{}}"#);
    }

    #[test]
    fn e1_what_comes_of_a_subscription_is_delivered_untagged() {
        let message = Bytes::from_static(
            br#"{"jsonrpc":"2.0","method":"notifications/resources/updated","params":{"uri":"a","_meta":{"io.modelcontextprotocol/subscriptionId":"m.1","k":1}}}"#,
        );
        let scanned = envelope::scan(&message).expect("a message");
        let expected =
            br#"{"jsonrpc":"2.0","method":"notifications/resources/updated","params":{"uri":"a","_meta":{"k":1}}}"#;
        assert_eq!(untagged(&message, &scanned), &expected[..]);
    }
}
