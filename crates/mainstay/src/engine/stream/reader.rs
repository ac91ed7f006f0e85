//! One connection's place in a stream, and what it is sent.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::call::{EventId, StreamId};
use mainstay_core::wire::sse;
use mainstay_store::journal::{Content, Ending, Event, Weight};
use memchr::memchr2;
use tokio::time::Instant;

use crate::engine::stream::log::{Log, Logged};
use crate::engine::stream::{Custody, Stream};

/// One connection's place in a stream.
pub struct Reader {
    stream: Arc<Stream>,
    cursor: u64,
    generation: u64,
    prime: Option<Option<String>>,
    /// What comes between the priming event and what the stream has in memory.
    backlog: VecDeque<(String, Bytes)>,
    form: Form,
    /// The rest of an event that was begun.
    rest: VecDeque<Bytes>,
    ended: bool,
    /// What was sent a moment ago, where that is not taken before it is known that the connection lives on.
    handed: VecDeque<(u64, Instant)>,
    /// What only tells how things stand is not sent again up to here.
    seen_through: u64,
}

impl Reader {
    /// This reader, which sends `backlog` first.
    #[must_use]
    pub fn after(self, backlog: VecDeque<(String, Bytes)>) -> Self {
        Self { backlog, ..self }
    }

    /// This reader, in the form of 2024-11-05. `endpoint` is the URI that is announced first, if that is still to be done.
    #[must_use]
    pub fn in_http_sse(self, endpoint: Option<Box<str>>) -> Self {
        let prime = self.prime.filter(|_| endpoint.is_some());
        Self { form: Form::HttpSse(endpoint), prime, ..self }
    }

    /// The next bytes for the connection: the priming event first, then every event in hand, a comment after 15 quiet
    /// seconds. `None` once the stream is finished or another reader took over. Cancel-safe.
    pub async fn next(&mut self) -> Option<Bytes> {
        if let Some(part) = self.rest.pop_front() {
            return Some(part);
        }
        if let Some(resumed) = self.prime.take() {
            let id = resumed.unwrap_or_else(|| self.stream.event_id(self.cursor, false));
            let mut primed = Vec::with_capacity(128);
            self.form.prime(&mut primed, &id);
            return Some(primed.into());
        }
        if let Some((id, message)) = self.backlog.pop_front() {
            let mut chunk = Vec::new();
            self.form.encode(&mut chunk, &id, &message, &mut self.rest);
            return Some(chunk.into());
        }
        while !self.ended {
            self.confirm(HELD_FOR);
            let stream = Arc::clone(&self.stream);
            let changed = stream.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if let Some(chunk) = self.take() {
                return chunk;
            }
            if tokio::time::timeout(self.pause(), changed).await.is_err() && self.handed.is_empty() {
                return Some(STILL_HERE);
            }
        }
        None
    }

    /// The connection ends in order: what it was sent counts as taken.
    pub fn confirm_all(&mut self) {
        self.confirm(Duration::ZERO);
    }

    /// What was sent so long ago counts as taken: the connection has lived on.
    fn confirm(&mut self, age: Duration) {
        let count = self.handed.iter().take_while(|(_, at)| at.elapsed() >= age).count();
        let Some((through, _)) = self.handed.drain(..count).next_back() else { return };
        {
            let mut log = self.stream.log.lock();
            log.held_through = log.held_through.max(through);
        }
        self.stream.changed.notify_waiters();
    }

    /// For how long there is nothing to be done, if nothing comes.
    fn pause(&self) -> Duration {
        match (self.handed.front(), &self.form) {
            (Some((_, at)), _) => HELD_FOR.saturating_sub(at.elapsed()),
            // The rest of the silence has passed before that was taken.
            (None, Form::HttpSse(_)) => KEEP_ALIVE.saturating_sub(HELD_FOR),
            (None, Form::Streamable) => KEEP_ALIVE,
        }
    }

    /// The next message and its place in the stream, for whoever makes something else of it than an event. `None` once the
    /// stream is finished or another reader took over. Cancel-safe.
    pub async fn next_message(&mut self) -> Option<(u64, Bytes)> {
        self.prime = None;
        if let Some((id, message)) = self.backlog.pop_front() {
            return Some((EventId::parse(&id).map_or(0, |event| event.sequence), message));
        }
        while !self.ended {
            let stream = Arc::clone(&self.stream);
            let changed = stream.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if let Some(taken) = self.take_message() {
                return taken;
            }
            changed.await;
        }
        None
    }

    /// Puts on record that the stream is waited for from now on.
    pub fn note_wait(&self) {
        // Which says nothing but when.
        self.stream.note(Content::Delivered(0));
    }

    /// The stream that is read.
    pub fn stream_id(&self) -> StreamId {
        self.stream.id
    }

    /// The same, for whoever looks at it without reading on.
    pub fn into_stream(self) -> Arc<Stream> {
        self.stream
    }

    /// Resolves once another reader has taken over. Cancel-safe.
    pub async fn displaced(&self) {
        self.stream.until(|log| log.reader != self.generation).await;
    }

    /// What is in hand: `None` to wait, `Some(None)` for the end.
    fn take(&mut self) -> Option<Option<Bytes>> {
        let stream = Arc::clone(&self.stream);
        let mut log = stream.log.lock();
        if self.is_displaced(&log) {
            return Some(None);
        }
        let mut chunk = Vec::new();
        let (seen, settled) = (self.cursor, log.settled_through);
        let seen_before = self.seen_through;
        let is_new = |event: &&Logged| event.sequence > seen_before || event.weight == Weight::Essential;
        let ready = log.events.iter().filter(|event| event.sequence > seen && event.sequence <= settled);
        for event in ready.filter(is_new) {
            let id = self.stream.event_id(event.sequence, event.last);
            self.form.encode(&mut chunk, &id, &event.message, &mut self.rest);
            self.cursor = event.sequence;
            if chunk.len() >= CHUNK_BYTES || !self.rest.is_empty() {
                break;
            }
        }
        let taken = (!chunk.is_empty()).then(|| chunk.into());
        self.settle(&mut log, taken)
    }

    /// As [`take`](Self::take), of one message.
    fn take_message(&mut self) -> Option<Option<(u64, Bytes)>> {
        let stream = Arc::clone(&self.stream);
        let mut log = stream.log.lock();
        if self.is_displaced(&log) {
            return Some(None);
        }
        let (seen, settled) = (self.cursor, log.settled_through);
        let next = log.events.iter().find(|event| event.sequence > seen && event.sequence <= settled);
        let taken = next.map(|event| (event.sequence, event.message.clone()));
        self.cursor = taken.as_ref().map_or(seen, |(sequence, _)| *sequence);
        self.settle(&mut log, taken)
    }

    /// Whether another reader took over.
    fn is_displaced(&mut self, log: &Log) -> bool {
        self.ended |= log.reader != self.generation;
        log.reader != self.generation
    }

    /// Notes how far this reader has got with what it has `taken`, and passes that on.
    fn settle<T>(&mut self, log: &mut Log, taken: Option<T>) -> Option<Option<T>> {
        log.sent_through = log.sent_through.max(self.cursor);
        let delivered = log.finished && log.is_delivered();
        if delivered && log.is_kept && !log.is_foreign && !std::mem::replace(&mut log.delivery_told, true) {
            // Lost, it only takes room for longer.
            let _ = self.stream.keep(Content::Delivered(log.sent_through));
        }
        if taken.is_some() && log.is_held {
            if self.handed.len() >= HANDED_MAX {
                let (through, _) = self.handed.pop_front().unwrap_or((0, Instant::now()));
                log.held_through = log.held_through.max(through);
            }
            self.handed.push_back((self.cursor, Instant::now()));
        }
        if taken.is_some() || delivered {
            self.stream.changed.notify_waiters();
        }
        if taken.is_some() {
            return Some(taken);
        }
        // A stream that another worker goes on with has no more to say, whatever it has not sent.
        self.ended = log.finished && (log.is_taken || log.settled_through + 1 >= log.next_sequence);
        self.ended.then_some(None)
    }
}

impl Stream {
    /// Attaches a reader and detaches the one before it.
    ///
    /// It goes on after the event `after`, or, if that is `None`, after the last event that any reader took. What a reader
    /// was sent and has not lived to take comes again then, if somebody waits for it.
    /// `resumed` is the cursor to be primed with, which keeps clients from forgetting it.
    pub fn read(self: &Arc<Self>, after: Option<u64>, resumed: Option<String>) -> Reader {
        let durable = self.begin_to_keep(&mut self.log.lock());
        durable.iter().for_each(Custody::let_go);
        self.attach(after, resumed)
    }

    /// As [`read`](Self::read), for somebody who comes back to nothing: what is read is not kept for that.
    pub fn overhear(self: &Arc<Self>) -> Reader {
        self.attach(None, None)
    }

    fn attach(self: &Arc<Self>, after: Option<u64>, resumed: Option<String>) -> Reader {
        let (cursor, generation, sent_through) = {
            let mut log = self.log.lock();
            log.reader += 1;
            // Whoever names an event has it, and what came before it.
            log.held_through = log.held_through.max(after.unwrap_or(0).min(log.sent_through));
            (after.unwrap_or(log.taken_through()), log.reader, log.sent_through)
        };
        self.changed.notify_waiters();
        Reader {
            stream: Arc::clone(self),
            cursor,
            generation,
            prime: Some(resumed),
            backlog: VecDeque::new(),
            form: Form::Streamable,
            ended: false,
            rest: VecDeque::new(),
            handed: VecDeque::new(),
            seen_through: if after.is_none() { sent_through } else { 0 },
        }
    }

    fn event_id(&self, sequence: u64, last: bool) -> String {
        let request = self.request.clone();
        EventId { tag: self.tag, stream: self.id, sequence, last, request }.to_string()
    }
}

/// What the events of a stream look like.
enum Form {
    /// As those of streamable HTTP: primed by an empty event.
    Streamable,
    /// As 2024-11-05 has them: primed by the event that says where messages are POSTed to, unless that was said already.
    HttpSse(Option<Box<str>>),
}

impl Form {
    fn prime(&mut self, out: &mut Vec<u8>, id: &str) {
        match self {
            Self::Streamable => sse::encode(out, Some(id), Some(RETRY_MS), b""),
            Self::HttpSse(endpoint) => {
                if let Some(endpoint) = endpoint.take() {
                    announce(out, Some(id), &endpoint);
                }
            }
        }
    }

    /// Appends an event. What of it follows `out` is left in `rest`: a large message is not copied.
    fn encode(&self, out: &mut Vec<u8>, id: &str, message: &Bytes, rest: &mut VecDeque<Bytes>) {
        if matches!(self, Self::HttpSse(_)) {
            out.extend_from_slice(b"event: message\n");
        }
        if message.len() < CHUNK_BYTES || memchr2(b'\n', b'\r', message).is_some() {
            return sse::encode(out, Some(id), None, message);
        }
        sse::begin(out, Some(id));
        rest.extend([message.clone(), Bytes::from_static(sse::END)]);
    }
}

/// Events of the journal under the ids that they have, for [`Reader::after`].
pub fn named(tag: u32, stream: StreamId, request: Option<&Bytes>, events: &[Event]) -> VecDeque<(String, Bytes)> {
    let name = |event: &Event| {
        let last = event.ending == Some(Ending::Answered);
        let id = EventId { tag, stream, sequence: event.sequence, last, request: request.cloned() }.to_string();
        (id, event.message.clone())
    };
    events.iter().map(name).collect()
}

/// Appends the event that tells a client of 2024-11-05 where to POST its messages.
pub fn announce(out: &mut Vec<u8>, id: Option<&str>, endpoint: &str) {
    out.extend_from_slice(b"event: endpoint\n");
    sse::encode(out, id, Some(RETRY_MS), endpoint.as_bytes());
}

/// How long a client waits before it reconnects: longer than any restart takes (`clients.md`).
pub const RETRY_MS: u64 = 4000;
/// How long a connection must have lived on for what it was sent to be taken: a peer that is gone is known sooner.
const HELD_FOR: Duration = Duration::from_secs(1);
/// How many chunks may be that young; of more the oldest counts as taken.
const HANDED_MAX: usize = 1024;
/// How long a stream may be silent: proxies cut what is silent for longer.
pub const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// The comment that breaks a silence.
pub const STILL_HERE: Bytes = Bytes::from_static(b": still here\n\n");
const CHUNK_BYTES: usize = 64 << 10;
