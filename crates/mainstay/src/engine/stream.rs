//! One SSE stream of a session: a bounded log of events and the reader that follows it.
//!
//! A stream outlives its connections, and, by the journal, its worker. Whoever reads it last wins (R5); a reader that
//! comes back names the last event it saw and goes on exactly there (R2). An event is sent once it is process-durable
//! (R1), or once it is known that it can't be: the journal is a hint and never holds an answer back for good.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::call::{EventId, StreamId};
use mainstay_core::id::{Epoch, SessionKey};
use mainstay_core::wire::sse;
use mainstay_store::journal::{Accepted, Content, Ending, Entry, Event, Journal, Lost, Question, Witness};
pub use mainstay_store::journal::{Source, Weight};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::runtime::Clock;

/// A stream of one session.
pub struct Stream {
    tag: u32,
    id: StreamId,
    request: Option<Bytes>,
    log: Mutex<Log>,
    changed: Notify,
    journal: Option<Journaled>,
    began_after: u64,
    me: Weak<Self>,
}

/// A message on its way to the client.
pub struct Message {
    /// The message as the client gets it.
    pub bytes: Bytes,
    /// Whether it may go when its stream is full.
    pub weight: Weight,
    /// What of the server it came from.
    pub source: Option<Source>,
    /// What it asks the client, if it is a question of the server.
    pub question: Option<Question>,
}

impl Message {
    /// One that tells how things stand.
    pub fn passing(bytes: impl Into<Bytes>) -> Self {
        Self { bytes: bytes.into(), weight: Weight::Passing, source: None, question: None }
    }

    /// One that somebody waits for.
    pub fn essential(bytes: impl Into<Bytes>) -> Self {
        Self { weight: Weight::Essential, ..Self::passing(bytes) }
    }

    /// The same with what of the server it came from.
    #[must_use]
    pub fn from_source(self, source: Option<Source>) -> Self {
        Self { source, ..self }
    }
}

/// Where the events of a stream are made durable.
#[derive(Clone)]
pub struct Journaled {
    /// The journal.
    pub journal: Journal,
    /// Whose stream it is.
    pub session: SessionKey,
    /// This worker's life.
    pub claim: Epoch,
    /// The clock.
    pub clock: Clock,
}

struct Log {
    events: VecDeque<Logged>,
    bytes: usize,
    next_sequence: u64,
    /// Everything up to here may be sent: it is durable, or can't be.
    settled_through: u64,
    /// What can't be durable, behind events of which that is not known yet.
    refused: VecDeque<u64>,
    sent_through: u64,
    finished: bool,
    reader: u64,
    dropped: u64,
    /// Whether events go to the journal: those of a listening stream do not before somebody listens.
    is_kept: bool,
    /// Whether the journal knows that everything is delivered.
    delivery_told: bool,
    /// Whether another worker goes on with the stream.
    is_taken: bool,
    /// Whether another worker appends to the stream, and what it appends is copied here: nothing goes to the journal.
    is_foreign: bool,
}

struct Logged {
    sequence: u64,
    last: bool,
    weight: Weight,
    message: Bytes,
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

    /// Everything up to `sequence` may be sent, and what was refused right behind it.
    fn settle(&mut self, sequence: u64) {
        self.settled_through = self.settled_through.max(sequence);
        while self.refused.front().is_some_and(|refused| *refused <= self.settled_through + 1) {
            let refused = self.refused.pop_front().unwrap_or_default();
            self.settled_through = self.settled_through.max(refused);
        }
    }

    /// Whether a reader has taken everything that was appended.
    fn is_delivered(&self) -> bool {
        self.events.back().is_none_or(|newest| newest.sequence <= self.sent_through)
    }
}

impl Stream {
    /// An empty stream. `request` is the raw JSON id of the request that it answers; `None` for a listening stream.
    /// Without `journal` its events outlive nothing.
    pub fn new(tag: u32, id: StreamId, request: Option<Bytes>, journal: Option<Journaled>) -> Arc<Self> {
        Self::continued(tag, id, request, 0, journal)
    }

    /// A stream of which everything up to the event `seen` has been sent, by this worker or an earlier one.
    pub fn continued(
        tag: u32,
        id: StreamId,
        request: Option<Bytes>,
        seen: u64,
        journal: Option<Journaled>,
    ) -> Arc<Self> {
        let log = Log {
            events: VecDeque::new(),
            bytes: 0,
            next_sequence: seen + 1,
            settled_through: seen,
            refused: VecDeque::new(),
            sent_through: seen,
            finished: false,
            reader: 0,
            dropped: 0,
            is_kept: !id.is_listen(),
            delivery_told: false,
            is_taken: false,
            is_foreign: false,
        };
        Arc::new_cyclic(|me| Self {
            tag,
            id,
            request,
            log: Mutex::new(log),
            changed: Notify::new(),
            journal,
            began_after: seen,
            me: me.clone(),
        })
    }

    /// A stream to which another worker appends: what that appends is [copied](Self::copy) here. As
    /// [`continued`](Self::continued) otherwise.
    pub fn foreign(tag: u32, id: StreamId, request: Option<Bytes>, seen: u64, journal: Option<Journaled>) -> Arc<Self> {
        let stream = Self::continued(tag, id, request, seen, journal);
        stream.log.lock().is_foreign = true;
        stream
    }

    /// Whether another worker appends to this stream.
    pub fn is_foreign(&self) -> bool {
        self.log.lock().is_foreign
    }

    /// From now on this worker appends to the stream, which it has claimed.
    pub fn take_over(&self) {
        self.log.lock().is_foreign = false;
    }

    /// Appends what another worker has appended, as it stands in the journal. In order; what is known already must not be
    /// among it.
    pub fn copy(&self, events: Vec<Event>) {
        let last_sequence = events.last().map_or(0, |event| event.sequence);
        self.refill(events, last_sequence);
        self.log.lock().shrink();
        self.changed.notify_waiters();
    }

    /// The highest sequence that was given so far.
    pub fn last_sequence(&self) -> u64 {
        self.log.lock().next_sequence - 1
    }

    /// Puts back what the journal has of this stream beyond the event that its client saw last. For a stream that was just
    /// made, before anything else is appended; `last_sequence` is the highest that was ever given.
    pub fn refill(&self, events: Vec<Event>, last_sequence: u64) {
        let mut log = self.log.lock();
        for Event { sequence, ending, weight, message, .. } in events {
            log.bytes += message.len();
            log.finished |= ending.is_some();
            log.events.push_back(Logged { sequence, last: ending == Some(Ending::Answered), weight, message });
        }
        log.next_sequence = log.next_sequence.max(last_sequence + 1);
        log.settled_through = log.next_sequence - 1;
    }

    /// Hands nothing more to the journal: the session has ended, and what is kept of it is being removed.
    pub fn keep_no_more(&self) {
        self.log.lock().is_kept = false;
    }

    /// Which stream this is.
    pub fn id(&self) -> StreamId {
        self.id
    }

    /// The raw JSON id of the request that it answers, or of those of a batch.
    pub fn request(&self) -> Option<Bytes> {
        self.request.clone()
    }

    /// Appends a message. Past the stream's bounds the oldest passing message goes, which [`dropped`](Self::dropped)
    /// counts: a client that does not read costs its own stream only. Ignored once the stream is finished.
    pub fn push(&self, message: Message) {
        self.append(message, None);
    }

    /// As [`push`](Self::push). The place of the message in the stream; `None` if the stream is finished.
    pub fn place(&self, message: Message) -> Option<u64> {
        self.append(message, None)
    }

    /// Has every event kept from now on, whether somebody reads or not.
    pub fn keep_all(&self) {
        self.log.lock().is_kept = true;
    }

    /// Resolves once the event `sequence` is durable, or can't be, or the stream is closed.
    pub async fn settled_at(&self, sequence: u64) {
        self.until(|log| log.settled_through >= sequence || log.finished).await;
    }

    /// Resolves once a reader has taken the event `sequence`, or the stream is closed; `true` if it was taken.
    pub async fn taken(&self, sequence: u64) -> bool {
        self.until(|log| log.sent_through >= sequence || log.finished).await;
        self.log.lock().sent_through >= sequence
    }

    /// How many messages that somebody waits for no reader has taken, and their bytes.
    pub fn unread(&self) -> (usize, usize) {
        let log = self.log.lock();
        let waiting = |event: &&Logged| event.weight == Weight::Essential && event.sequence > log.sent_through;
        log.events.iter().filter(waiting).fold((0, 0), |(count, bytes), event| (count + 1, bytes + event.message.len()))
    }

    async fn until(&self, holds: impl Fn(&Log) -> bool) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if holds(&self.log.lock()) {
                return;
            }
            changed.await;
        }
    }

    /// Appends the last message.
    pub fn finish(&self, message: Message) {
        self.append(message, Some(Ending::Answered));
    }

    /// Hands something about this stream that is no event to the journal. `false` if it can't be kept.
    pub fn note(&self, content: Content) -> bool {
        let is_ours = {
            let log = self.log.lock();
            log.is_kept && !log.is_foreign
        };
        is_ours && self.keep(content).is_ok()
    }

    /// Whether a reader has taken everything that was appended.
    pub fn is_delivered(&self) -> bool {
        self.log.lock().is_delivered()
    }

    /// Resolves once a reader has taken everything. For a finished stream.
    pub async fn delivered(&self) {
        self.until(Log::is_delivered).await;
    }

    /// How many bytes of messages are kept in memory.
    pub fn bytes(&self) -> usize {
        self.log.lock().bytes
    }

    /// Ends the stream without a last message; readers see the end of the body.
    pub fn end(&self, ending: Ending) {
        self.note(Content::Ended(ending));
        self.close();
    }

    /// Ends the stream in this worker; what the journal has of it stays as it is.
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

    /// The sequence of the oldest event in memory, or of the next one.
    pub fn first_in_memory(&self) -> u64 {
        let log = self.log.lock();
        log.events.front().map_or(log.next_sequence, |event| event.sequence)
    }

    /// Whether the event was given a sequence since this stream began in memory: a session that left and came back goes on
    /// with its listening stream at a later place.
    pub fn is_of_this_life(&self, sequence: u64) -> bool {
        sequence >= self.began_after
    }

    /// Whether all events after `after` are in memory.
    pub fn reaches_back_to(&self, after: u64) -> bool {
        self.first_in_memory() <= after + 1
    }

    fn append(&self, message: Message, ending: Option<Ending>) -> Option<u64> {
        let placed = {
            let mut log = self.log.lock();
            if log.finished {
                return None;
            }
            let Message { bytes, weight, source, question } = message;
            let sequence = log.next_sequence;
            log.next_sequence += 1;
            log.bytes += bytes.len();
            log.events.push_back(Logged { sequence, last: ending.is_some(), weight, message: bytes.clone() });
            log.finished = ending.is_some();
            let waits =
                log.is_kept && !log.is_foreign && self.keep_event(sequence, (bytes, weight, source), ending, question);
            if !waits {
                log.refused.push_back(sequence);
            }
            let settled = log.settled_through;
            log.settle(settled);
            log.shrink();
            sequence
        };
        self.changed.notify_waiters();
        Some(placed)
    }

    /// Hands an event to the journal, with the question that it asks. Whether the journal will say when it may be sent.
    fn keep_event(
        &self,
        sequence: u64,
        (message, weight, source): (Bytes, Weight, Option<Source>),
        ending: Option<Ending>,
        question: Option<Question>,
    ) -> bool {
        let Some(journaled) = &self.journal else { return false };
        let event = Event { sequence, ending, weight, message, source, at: journaled.clock.now() };
        let content = match question {
            Some(question) => Content::Question(Box::new(question), event),
            None => Content::Event(event),
        };
        self.keep(content) == Ok(Accepted::Queued)
    }

    /// Hands something to the journal, which takes it in the order in which it is handed over.
    fn keep(&self, content: Content) -> Result<Accepted, Lost> {
        let Some(Journaled { journal, session, claim, clock }) = &self.journal else { return Ok(Accepted::Kept) };
        let witness = self.me.upgrade().map(|me| me as Arc<dyn Witness>);
        let entry = Entry { session: *session, stream: self.id, claim: *claim, at: clock.now(), content };
        journal.append(entry, witness)
    }

    /// Everything up to `sequence` may be sent.
    fn settled(&self, sequence: u64) {
        {
            self.log.lock().settle(sequence);
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
            log.is_kept = true;
            (after.unwrap_or(log.sent_through), log.reader)
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
        }
    }

    fn event_id(&self, sequence: u64, last: bool) -> String {
        let request = self.request.clone();
        EventId { tag: self.tag, stream: self.id, sequence, last, request }.to_string()
    }
}

impl Witness for Stream {
    fn durable(&self, through: u64) {
        self.settled(through);
    }

    fn lost(&self, sequence: u64, why: Lost) {
        // Somebody else goes on with the stream: this worker must not send what he may send otherwise.
        if why == Lost::Claimed {
            self.log.lock().is_taken = true;
            return self.close();
        }
        self.settled(sequence);
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

    fn encode(&self, out: &mut Vec<u8>, id: &str, message: &[u8]) {
        if matches!(self, Self::HttpSse(_)) {
            out.extend_from_slice(b"event: message\n");
        }
        sse::encode(out, Some(id), None, message);
    }
}

/// Appends the event that tells a client of 2024-11-05 where to POST its messages.
pub fn announce(out: &mut Vec<u8>, id: Option<&str>, endpoint: &str) {
    out.extend_from_slice(b"event: endpoint\n");
    sse::encode(out, id, Some(RETRY_MS), endpoint.as_bytes());
}

/// One connection's place in a stream.
pub struct Reader {
    stream: Arc<Stream>,
    cursor: u64,
    generation: u64,
    prime: Option<Option<String>>,
    /// What comes between the priming event and what the stream has in memory.
    backlog: VecDeque<(String, Bytes)>,
    form: Form,
    ended: bool,
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
        if let Some(resumed) = self.prime.take() {
            let id = resumed.unwrap_or_else(|| self.stream.event_id(self.cursor, false));
            let mut primed = Vec::with_capacity(128);
            self.form.prime(&mut primed, &id);
            return Some(primed.into());
        }
        if let Some((id, message)) = self.backlog.pop_front() {
            let mut chunk = Vec::with_capacity(message.len() + 64);
            self.form.encode(&mut chunk, &id, &message);
            return Some(chunk.into());
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
                return Some(STILL_HERE);
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
        let (seen, settled) = (self.cursor, log.settled_through);
        for event in log.events.iter().filter(|event| event.sequence > seen && event.sequence <= settled) {
            let id = self.stream.event_id(event.sequence, event.last);
            self.form.encode(&mut chunk, &id, &event.message);
            self.cursor = event.sequence;
            if chunk.len() >= CHUNK_BYTES {
                break;
            }
        }
        log.sent_through = log.sent_through.max(self.cursor);
        let delivered = log.finished && log.is_delivered();
        if delivered && log.is_kept && !log.is_foreign && !std::mem::replace(&mut log.delivery_told, true) {
            // Lost, it only takes room for longer.
            let _ = self.stream.keep(Content::Delivered(log.sent_through));
        }
        if !chunk.is_empty() || delivered {
            self.stream.changed.notify_waiters();
        }
        if !chunk.is_empty() {
            return Some(Some(chunk.into()));
        }
        // A stream that another worker goes on with has no more to say, whatever it has not sent.
        self.ended = log.finished && (log.is_taken || log.settled_through + 1 >= log.next_sequence);
        self.ended.then_some(None)
    }
}

/// How long a client waits before it reconnects: longer than any restart takes (`clients.md`).
pub const RETRY_MS: u64 = 4000;
/// How long a stream may be silent: proxies cut what is silent for longer.
pub const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// The comment that breaks a silence.
pub const STILL_HERE: Bytes = Bytes::from_static(b": still here\n\n");
const LOG_EVENTS_MAX: usize = 1024;
const LOG_BYTES_MAX: usize = 4 << 20;
const CHUNK_BYTES: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    fn stream() -> Arc<Stream> {
        Stream::new(7, StreamId { epoch: 3, number: 9 }, Some(Bytes::from_static(b"42")), None)
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
        stream.finish(Message::essential(Bytes::from_static(b"{}")));
        let text = rest(stream.read(None, None)).await;
        assert_eq!(text, "id: 00000007-3-9-0-NDI\nretry: 4000\ndata: \n\nid: 00000007-3-9-1f-NDI\ndata: {}\n\n",);
    }

    #[tokio::test]
    async fn r2_a_resumed_reader_goes_on_exactly_after_its_event() {
        let stream = stream();
        for message in ["1", "2", "3"] {
            stream.push(Message::passing(Bytes::from(message)));
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
        stream.push(Message::passing(Bytes::from_static(b"1")));
        assert!(first.next().await.is_some());
        let mut second = stream.read(None, None);
        assert_eq!(first.next().await, None);
        stream.push(Message::passing(Bytes::from_static(b"2")));
        assert!(second.next().await.is_some(), "primed");
        assert_eq!(second.next().await.expect("an event"), "id: 00000007-3-9-2-NDI\ndata: 2\n\n");
    }

    #[tokio::test]
    async fn s18_a_client_of_2024_11_05_is_told_its_endpoint_first_and_everything_is_a_message_event() {
        let stream = Stream::new(7, StreamId { epoch: 3, number: 0 }, None, None);
        let first = stream.place(Message::essential(Bytes::from_static(b"{}")));
        assert_eq!((first, stream.unread()), (Some(1), (1, 2)));
        let mut reader = stream.read(None, None).in_http_sse(Some("/mcp/x/sse?a=b".into()));
        let told = reader.next().await.expect("the endpoint");
        assert_eq!(told, "event: endpoint\nid: 00000007-3-0-0\nretry: 4000\ndata: /mcp/x/sse?a=b\n\n");
        let event = reader.next().await.expect("the message");
        assert_eq!(event, "event: message\nid: 00000007-3-0-1\ndata: {}\n\n");
        assert!(stream.taken(1).await);
        assert_eq!(stream.unread(), (0, 0));
        let mut again = stream.read(Some(0), None).in_http_sse(None);
        assert_eq!(again.next().await.expect("no second endpoint"), event);
        stream.close();
        assert_eq!(stream.place(Message::essential(Bytes::new())), None);
        assert!(!stream.taken(2).await, "nothing was lost in silence");
    }

    #[tokio::test]
    async fn r1_the_log_is_bounded_and_never_drops_the_last_message() {
        let stream = stream();
        for _ in 0..LOG_EVENTS_MAX + 10 {
            stream.push(Message::passing(Bytes::from_static(b"progress")));
        }
        stream.finish(Message::essential(Bytes::from(vec![b'x'; LOG_BYTES_MAX + 1])));
        assert_eq!(stream.dropped(), LOG_EVENTS_MAX as u64 + 10);
        assert!(rest(stream.read(None, None)).await.len() > LOG_BYTES_MAX);
    }

    #[test]
    fn r4_what_the_journal_refuses_waits_for_what_it_has_taken_and_no_longer() {
        let stream = stream();
        let mut log = stream.log.lock();
        // Events 1 and 4 are taken, 2, 3 and 5 refused at once.
        log.refused.extend([2, 3, 5]);
        log.settle(0);
        assert_eq!(log.settled_through, 0, "nothing overtakes");
        log.settle(1);
        assert_eq!(log.settled_through, 3);
        log.settle(4);
        assert_eq!((log.settled_through, log.refused.len()), (5, 0), "the response goes out");
    }

    #[tokio::test]
    async fn r4_no_response_is_ever_dropped_for_want_of_room() {
        let stream = stream();
        for _ in 0..5 {
            stream.push(Message::essential(Bytes::from(vec![b'x'; LOG_BYTES_MAX / 2])));
            stream.push(Message::passing(Bytes::from_static(b"progress")));
        }
        stream.close();
        assert!(!stream.is_delivered());
        let text = rest(stream.read(None, None)).await;
        assert!(text.len() > 5 * (LOG_BYTES_MAX / 2), "all five are there");
        assert!(stream.is_delivered());
    }
}
