//! The log of one SSE stream, and bodies that follow it.

use super::Body;
use bytes::Bytes;
use futures_util::stream;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use serde_json::Value;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;

/// The messages of one SSE stream, in order. They stay after they were sent, so that the stream can be resumed.
#[derive(Debug)]
pub struct EventLog {
    stream: u64,
    log: Mutex<Log>,
    changed: watch::Sender<()>,
}

/// One message of a stream.
#[derive(Debug, Clone)]
pub(super) struct Event {
    /// Its number in the stream, from 1.
    pub number: u64,
    /// Whether it is the response, and nothing that comes before one.
    pub response: bool,
    /// The message.
    pub text: Arc<str>,
}

#[derive(Debug, Default)]
struct Log {
    events: VecDeque<Event>,
    next: u64,
    ended: bool,
    /// The follower that came last; older ones end.
    newest: u64,
    followers: u64,
}

/// How a body follows a log.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Follow {
    /// Only events with a greater number are sent.
    pub after: u64,
    /// Whether events carry ids; the priming event then carries the id of `after`.
    pub ids: bool,
    /// The `retry:` of the priming event.
    pub retry_ms: u64,
    /// The connection is cut when so many events were sent.
    pub cut_after: Option<u64>,
}

impl EventLog {
    /// An empty log of the stream with this number.
    #[must_use]
    pub fn new(stream: u64) -> Arc<EventLog> {
        Arc::new(EventLog { stream, log: Mutex::default(), changed: watch::Sender::new(()) })
    }

    /// Adds a message. Past the bound the oldest one goes, and can no longer be resumed from.
    pub fn push(&self, message: &Value) {
        let mut log = self.lock();
        log.next += 1;
        let number = log.next;
        let response = message.get("method").is_none();
        log.events.push_back(Event { number, response, text: message.to_string().into() });
        if log.events.len() > EVENTS_MAX {
            log.events.pop_front();
        }
        drop(log);
        self.changed.send_replace(());
    }

    /// Nothing more will come.
    pub fn end(&self) {
        self.lock().ended = true;
        self.changed.send_replace(());
    }

    /// The number of the newest event; 0 if there is none.
    pub(super) fn last(&self) -> u64 {
        self.lock().next
    }

    /// How many bodies follow.
    pub(super) fn followers(&self) -> u64 {
        self.lock().followers
    }

    /// Ends every body that follows now, without ending the log.
    pub(super) fn dismiss(&self) {
        self.lock().newest += 1;
        self.changed.send_replace(());
    }

    /// Waits until there is an event, and returns the first one; none if the log ended without any.
    pub(super) async fn first(&self) -> Option<Event> {
        let mut changes = self.changed.subscribe();
        loop {
            {
                let log = self.lock();
                if log.ended || !log.events.is_empty() {
                    return log.events.front().cloned();
                }
            }
            // The sender lives as long as `self`.
            let _alive = changes.changed().await;
        }
    }

    /// Waits until the log has ended, and returns all events that it holds.
    pub(super) async fn all(&self) -> Vec<Arc<str>> {
        let mut changes = self.changed.subscribe();
        loop {
            {
                let log = self.lock();
                if log.ended {
                    return log.events.iter().map(|event| Arc::clone(&event.text)).collect();
                }
            }
            let _alive = changes.changed().await;
        }
    }

    /// A body that sends the log as SSE, first what is there, then what comes. It ends when the log ends, or when another
    /// body takes over.
    pub(super) fn body(self: &Arc<EventLog>, follow: Follow) -> Body {
        let follower = Follower::new(self, follow);
        let frames = stream::unfold(Some(follower), |follower| async move {
            let mut follower = follower?;
            match follower.next().await? {
                Ok(bytes) => Some((Ok(Frame::data(bytes)), Some(follower))),
                Err(cut) => Some((Err(cut), None)),
            }
        });
        BodyExt::boxed(StreamBody::new(SyncStream::new(frames)))
    }

    fn lock(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Follower {
    log: Arc<EventLog>,
    changes: watch::Receiver<()>,
    number: u64,
    follow: Follow,
    sent: u64,
    primed: bool,
}

impl Follower {
    fn new(log: &Arc<EventLog>, follow: Follow) -> Follower {
        let number = {
            let mut inner = log.lock();
            inner.newest += 1;
            inner.followers += 1;
            inner.newest
        };
        let changes = log.changed.subscribe();
        log.changed.send_replace(());
        Follower { log: Arc::clone(log), changes, number, follow, sent: 0, primed: !follow.ids }
    }

    async fn next(&mut self) -> Option<Result<Bytes, std::io::Error>> {
        if !self.primed {
            self.primed = true;
            let id = event_id(self.log.stream, self.follow.after);
            return Some(Ok(format!("id: {id}\nretry: {}\ndata: \n\n", self.follow.retry_ms).into()));
        }
        if self.follow.cut_after == Some(self.sent) {
            // Whatever was sent so far must leave first: a body that is not ready makes the connection flush.
            tokio::task::yield_now().await;
            return Some(Err(std::io::Error::other(super::Cut)));
        }
        loop {
            match self.look() {
                Seen::Event(event) => {
                    self.follow.after = event.number;
                    self.sent += 1;
                    return Some(Ok(self.render(&event)));
                }
                Seen::End => return None,
                Seen::Nothing => {
                    let _alive = self.changes.changed().await;
                }
            }
        }
    }

    fn look(&mut self) -> Seen {
        self.changes.borrow_and_update();
        let log = self.log.lock();
        if log.newest != self.number {
            return Seen::End;
        }
        // Numbers have no holes, so the wanted event's place follows from the oldest one's number.
        let oldest = log.events.front().map_or(0, |event| event.number);
        let place = usize::try_from((self.follow.after + 1).saturating_sub(oldest)).unwrap_or(usize::MAX);
        match log.events.get(place) {
            Some(event) => Seen::Event(event.clone()),
            None if log.ended => Seen::End,
            None => Seen::Nothing,
        }
    }

    fn render(&self, event: &Event) -> Bytes {
        let data = &event.text;
        if self.follow.ids {
            let id = event_id(self.log.stream, event.number);
            return format!("id: {id}\nevent: message\ndata: {data}\n\n").into();
        }
        format!("event: message\ndata: {data}\n\n").into()
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.log.lock().followers -= 1;
    }
}

enum Seen {
    Event(Event),
    End,
    Nothing,
}

/// The id of an event on the wire.
fn event_id(stream: u64, number: u64) -> String {
    format!("{stream}-{number}")
}

/// Reads an id made by [`event_id`] back: stream and number.
pub(super) fn parse_event_id(id: &str) -> Option<(u64, u64)> {
    let (stream, number) = id.split_once('-')?;
    Some((stream.parse().ok()?, number.parse().ok()?))
}

/// Makes a stream that is only `Send` usable as a boxed body, which must be `Sync` as well. A lock that is never contended:
/// polling needs exclusive access anyway.
pub(super) struct SyncStream<S>(Mutex<std::pin::Pin<Box<S>>>);

impl<S> SyncStream<S> {
    pub(super) fn new(stream: S) -> SyncStream<S> {
        SyncStream(Mutex::new(Box::pin(stream)))
    }
}

impl<S: futures_util::Stream> futures_util::Stream for SyncStream<S> {
    type Item = S::Item;

    fn poll_next(
        self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<S::Item>> {
        let stream = self.get_mut().0.get_mut().unwrap_or_else(PoisonError::into_inner);
        stream.as_mut().poll_next(context)
    }
}

/// The most events that a log keeps.
const EVENTS_MAX: usize = 20_000;

#[cfg(test)]
mod tests {
    use super::{EventLog, Follow, parse_event_id};
    use http_body_util::BodyExt as _;
    use serde_json::json;

    #[test]
    fn ids_are_read_back_and_junk_is_not() {
        assert_eq!(parse_event_id("3-14"), Some((3, 14)));
        for junk in ["", "3", "3-", "-1", "a-b", "3-1-2"] {
            assert_eq!(parse_event_id(junk), None, "{junk}");
        }
    }

    #[tokio::test]
    async fn r2_a_body_goes_on_after_the_event_that_it_was_told() {
        let log = EventLog::new(7);
        for n in 1..=3 {
            log.push(&json!({"n": n}));
        }
        log.end();
        let body = log.body(Follow { after: 2, ids: true, retry_ms: 5, cut_after: None });
        let text = body.collect().await.expect("the body ends").to_bytes();
        assert_eq!(text, "id: 7-2\nretry: 5\ndata: \n\nid: 7-3\nevent: message\ndata: {\"n\":3}\n\n");
        assert_eq!(log.followers(), 0);
    }

    #[tokio::test]
    async fn a_newer_body_ends_the_older_one() {
        let log = EventLog::new(0);
        let older = log.body(Follow::default());
        let newer = log.body(Follow::default());
        assert!(older.collect().await.expect("ends").to_bytes().is_empty());
        log.push(&json!(1));
        log.end();
        assert_eq!(newer.collect().await.expect("ends").to_bytes(), "event: message\ndata: 1\n\n");
    }
}
