//! One SSE stream of a session: a bounded log of events and the reader that follows it.
//!
//! A stream outlives its connections. Whoever reads it last wins (R5); a reader that comes back names the last
//! event it saw and goes on exactly there (R2). The log does not outlive the worker.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::call::{EventId, StreamId};
use mainstay_core::wire::sse;
use parking_lot::Mutex;
use tokio::sync::Notify;

/// A stream of one session.
pub struct Stream {
    tag: u32,
    id: StreamId,
    request: Option<Bytes>,
    log: Mutex<Log>,
    changed: Notify,
}

struct Log {
    events: VecDeque<Logged>,
    bytes: usize,
    next_sequence: u64,
    sent_through: u64,
    finished: bool,
    reader: u64,
    dropped: u64,
}

struct Logged {
    sequence: u64,
    last: bool,
    weight: Weight,
    message: Bytes,
}

/// Whether a message may go when its stream is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weight {
    /// It tells how things stand; a later one tells more.
    Passing,
    /// Somebody waits for it: a response, or a question of the server.
    Essential,
}

impl Log {
    /// Keeps the log within its bounds, as far as passing messages and those already read allow.
    fn shrink(&mut self) {
        while self.events.len() > LOG_EVENTS_MAX || self.bytes > LOG_BYTES_MAX {
            let sent = self.sent_through;
            let goes = |event: &Logged| event.weight == Weight::Passing || event.sequence <= sent && !event.last;
            let Some(place) = self.events.iter().position(goes) else { return };
            let Some(gone) = self.events.remove(place) else { return };
            self.bytes -= gone.message.len();
            self.dropped += u64::from(gone.sequence > sent);
        }
    }
}

impl Stream {
    /// An empty stream. `request` is the raw JSON id of the request that it answers; `None` for a listening stream.
    pub fn new(tag: u32, id: StreamId, request: Option<Bytes>) -> Arc<Self> {
        Self::continued(tag, id, request, 0)
    }

    /// A stream of an earlier worker, of which the client has seen everything up to the event `seen`.
    pub fn continued(tag: u32, id: StreamId, request: Option<Bytes>, seen: u64) -> Arc<Self> {
        let log = Log {
            events: VecDeque::new(),
            bytes: 0,
            next_sequence: seen + 1,
            sent_through: seen,
            finished: false,
            reader: 0,
            dropped: 0,
        };
        Arc::new(Self { tag, id, request, log: Mutex::new(log), changed: Notify::new() })
    }

    /// Which stream this is.
    pub fn id(&self) -> StreamId {
        self.id
    }

    /// Appends a message. Past the stream's bounds the oldest passing message goes, which [`dropped`](Self::dropped)
    /// counts: a client that does not read costs its own stream only. Ignored once the stream is finished.
    pub fn push(&self, message: Bytes, weight: Weight) {
        self.append(message, weight, false);
    }

    /// Appends the last message.
    pub fn finish(&self, message: Bytes) {
        self.append(message, Weight::Essential, true);
    }

    /// Whether a reader has taken everything that was appended.
    pub fn is_delivered(&self) -> bool {
        let log = self.log.lock();
        log.events.back().is_none_or(|newest| newest.sequence <= log.sent_through)
    }

    /// Resolves once a reader has taken everything. For a finished stream.
    pub async fn delivered(&self) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.is_delivered() {
                return;
            }
            changed.await;
        }
    }

    /// How many bytes of messages are kept.
    pub fn bytes(&self) -> usize {
        self.log.lock().bytes
    }

    /// Ends the stream without a last message; readers see the end of the body.
    pub fn close(&self) {
        self.log.lock().finished = true;
        self.changed.notify_waiters();
    }

    /// How many messages were dropped for want of a reader.
    pub fn dropped(&self) -> u64 {
        self.log.lock().dropped
    }

    /// Whether nothing more will be appended.
    pub fn is_finished(&self) -> bool {
        self.log.lock().finished
    }

    fn append(&self, message: Bytes, weight: Weight, last: bool) {
        {
            let mut log = self.log.lock();
            if log.finished {
                return;
            }
            let sequence = log.next_sequence;
            log.next_sequence += 1;
            log.bytes += message.len();
            log.events.push_back(Logged { sequence, last, weight, message });
            log.finished = last;
            log.shrink();
        }
        self.changed.notify_waiters();
    }

    /// Attaches a reader and detaches the one before it.
    ///
    /// It goes on after the event `after`, or, if that is `None`, after the last event that any reader took.
    /// `resumed` is the cursor to be primed with, which keeps clients from forgetting it.
    pub fn read(self: &Arc<Self>, after: Option<u64>, resumed: Option<String>) -> Reader {
        let (cursor, generation) = {
            let mut log = self.log.lock();
            log.reader += 1;
            (after.unwrap_or(log.sent_through), log.reader)
        };
        self.changed.notify_waiters();
        Reader { stream: Arc::clone(self), cursor, generation, prime: Some(resumed), ended: false }
    }

    fn event_id(&self, sequence: u64, last: bool) -> String {
        let request = self.request.clone();
        EventId { tag: self.tag, stream: self.id, sequence, last, request }.to_string()
    }
}

/// One connection's place in a stream.
pub struct Reader {
    stream: Arc<Stream>,
    cursor: u64,
    generation: u64,
    prime: Option<Option<String>>,
    ended: bool,
}

impl Reader {
    /// The next bytes for the connection: the priming event first, then every event in hand, a comment after 15 quiet
    /// seconds. `None` once the stream is finished or another reader took over. Cancel-safe.
    pub async fn next(&mut self) -> Option<Bytes> {
        if let Some(resumed) = self.prime.take() {
            let id = resumed.unwrap_or_else(|| self.stream.event_id(self.cursor, false));
            let mut primed = Vec::with_capacity(128);
            sse::encode(&mut primed, Some(&id), Some(RETRY_MS), b"");
            return Some(primed.into());
        }
        while !self.ended {
            let stream = Arc::clone(&self.stream);
            let changed = stream.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if let Some(chunk) = self.take() {
                return chunk;
            }
            if tokio::time::timeout(KEEP_ALIVE, changed).await.is_err() {
                return Some(Bytes::from_static(b": still here\n\n"));
            }
        }
        None
    }

    /// What is in hand: `None` to wait, `Some(None)` for the end.
    fn take(&mut self) -> Option<Option<Bytes>> {
        let mut log = self.stream.log.lock();
        if log.reader != self.generation {
            self.ended = true;
            return Some(None);
        }
        let mut chunk = Vec::new();
        let seen = self.cursor;
        for event in log.events.iter().filter(|event| event.sequence > seen) {
            let id = self.stream.event_id(event.sequence, event.last);
            sse::encode(&mut chunk, Some(&id), None, &event.message);
            self.cursor = event.sequence;
            if chunk.len() >= CHUNK_BYTES {
                break;
            }
        }
        log.sent_through = log.sent_through.max(self.cursor);
        if log.finished {
            self.stream.changed.notify_waiters();
        }
        if !chunk.is_empty() {
            return Some(Some(chunk.into()));
        }
        self.ended = log.finished;
        self.ended.then_some(None)
    }
}

/// How long a client waits before it reconnects: longer than any restart takes (`clients.md`).
pub const RETRY_MS: u64 = 4000;
const KEEP_ALIVE: Duration = Duration::from_secs(15);
const LOG_EVENTS_MAX: usize = 1024;
const LOG_BYTES_MAX: usize = 4 << 20;
const CHUNK_BYTES: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    fn stream() -> Arc<Stream> {
        Stream::new(7, StreamId { epoch: 3, number: 9 }, Some(Bytes::from_static(b"42")))
    }

    async fn rest(mut reader: Reader) -> String {
        let mut text = String::new();
        while let Some(chunk) = reader.next().await {
            text.push_str(std::str::from_utf8(&chunk).expect("ascii"));
        }
        text
    }

    #[tokio::test]
    async fn r1_a_stream_is_primed_with_an_id_and_a_retry() {
        let stream = stream();
        stream.finish(Bytes::from_static(b"{}"));
        let text = rest(stream.read(None, None)).await;
        assert_eq!(text, "id: 00000007-3-9-0-NDI\nretry: 4000\ndata: \n\nid: 00000007-3-9-1f-NDI\ndata: {}\n\n",);
    }

    #[tokio::test]
    async fn r2_a_resumed_reader_goes_on_exactly_after_its_event() {
        let stream = stream();
        for message in ["1", "2", "3"] {
            stream.push(Bytes::from(message), Weight::Passing);
        }
        stream.close();
        let text = rest(stream.read(Some(2), Some("00000007-3-9-2-NDI".into()))).await;
        assert_eq!(text, "id: 00000007-3-9-2-NDI\nretry: 4000\ndata: \n\nid: 00000007-3-9-3-NDI\ndata: 3\n\n");
    }

    #[tokio::test]
    async fn r5_a_second_reader_takes_over_and_the_first_ends() {
        let stream = stream();
        let mut first = stream.read(None, None);
        assert!(first.next().await.is_some(), "primed");
        stream.push(Bytes::from_static(b"1"), Weight::Passing);
        assert!(first.next().await.is_some());
        let mut second = stream.read(None, None);
        assert_eq!(first.next().await, None);
        stream.push(Bytes::from_static(b"2"), Weight::Passing);
        assert!(second.next().await.is_some(), "primed");
        assert_eq!(second.next().await.expect("an event"), "id: 00000007-3-9-2-NDI\ndata: 2\n\n");
    }

    #[tokio::test]
    async fn r1_the_log_is_bounded_and_never_drops_the_last_message() {
        let stream = stream();
        for _ in 0..LOG_EVENTS_MAX + 10 {
            stream.push(Bytes::from_static(b"progress"), Weight::Passing);
        }
        stream.finish(Bytes::from(vec![b'x'; LOG_BYTES_MAX + 1]));
        assert_eq!(stream.dropped(), LOG_EVENTS_MAX as u64 + 10);
        assert!(rest(stream.read(None, None)).await.len() > LOG_BYTES_MAX);
    }

    #[tokio::test]
    async fn r4_no_response_is_ever_dropped_for_want_of_room() {
        let stream = stream();
        for _ in 0..5 {
            stream.push(Bytes::from(vec![b'x'; LOG_BYTES_MAX / 2]), Weight::Essential);
            stream.push(Bytes::from_static(b"progress"), Weight::Passing);
        }
        stream.close();
        assert!(!stream.is_delivered());
        let text = rest(stream.read(None, None)).await;
        assert!(text.len() > 5 * (LOG_BYTES_MAX / 2), "all five are there");
        assert!(stream.is_delivered());
    }
}
