//! One SSE stream of a session: a bounded log of events and the reader that follows it.
//!
//! A stream outlives its connections, and, by the journal, its worker. Whoever reads it last wins (R5); a reader that
//! comes back names the last event it saw and goes on exactly there (R2). An event is sent once it is process-durable
//! (R1), or once it is known that it can't be: the journal is a hint and never holds an answer back for good.

mod log;
mod message;
mod reader;
mod survey;

use std::sync::{Arc, Weak};

use bytes::Bytes;
use mainstay_core::call::StreamId;
use mainstay_core::id::{Epoch, SessionKey};
use mainstay_core::time::Timestamp;
use mainstay_store::journal::{Accepted, Content, Ending, Entry, Event, Journal, Lost, Witness};
pub use mainstay_store::journal::{Source, Weight};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::engine::stream::log::{Log, Logged, Unkept, own};
pub use crate::engine::stream::message::{Custody, Message};
pub use crate::engine::stream::reader::{KEEP_ALIVE, RETRY_MS, Reader, STILL_HERE, announce, named};
pub use crate::engine::stream::survey::Survey;
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
        let log = Log::after(seen, !id.is_listen());
        Arc::new_cyclic(|me| Self {
            tag,
            id,
            request: request.map(own),
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
        for Event { sequence, ending, weight, message, at, .. } in events {
            log.bytes += message.len();
            log.finished |= ending.is_some();
            log.ending = log.ending.or(ending);
            let last = ending == Some(Ending::Answered);
            log.events.push_back(Logged { sequence, last, weight, at, message, unkept: None });
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

    /// Has every event kept from now on, whether somebody reads or not, for a client that has no cursor to ask for one
    /// again: what was sent to a connection that dies in the next moment is sent again.
    pub fn keep_all(&self) {
        let durable = {
            let mut log = self.log.lock();
            log.is_held = true;
            log.held_through = log.sent_through;
            self.begin_to_keep(&mut log)
        };
        durable.iter().for_each(Custody::let_go);
    }

    /// Resolves once the event `sequence` is durable, or can't be, or the stream is closed.
    pub async fn settled_at(&self, sequence: u64) {
        self.until(|log| log.settled_through >= sequence || log.finished).await;
    }

    /// Resolves once a reader has taken the event `sequence`, or the stream is closed; `true` if it was taken.
    pub async fn taken(&self, sequence: u64) -> bool {
        self.until(|log| log.taken_through() >= sequence || log.finished).await;
        self.log.lock().taken_through() >= sequence
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

    /// Whether anybody has ever read it in this worker.
    pub fn was_read(&self) -> bool {
        self.log.lock().reader > 0
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
        self.close_as(ending);
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
        let (placed, durable) = {
            let mut log = self.log.lock();
            if log.finished {
                return None;
            }
            let Message { bytes, weight, source, question, custody } = message;
            let (bytes, sequence, last) = (own(bytes), log.next_sequence, ending.is_some());
            log.next_sequence += 1;
            log.bytes += bytes.len();
            log.finished = last;
            log.ending = ending;
            let at = self.journal.as_ref().map_or(Timestamp::from_unix_millis(0), |journaled| journaled.clock.now());
            let unkept = Unkept { source, question, custody };
            let mut logged = Logged { sequence, last, weight, at, message: bytes, unkept: None };
            let durable = if log.is_kept && !log.is_foreign {
                self.keep_event(&mut log, &logged, ending, unkept)
            } else {
                log.refused.push_back(sequence);
                // A listening stream is kept from its first reader on, and with what that finds there.
                logged.unkept = (!log.is_foreign).then(|| Box::new(unkept));
                None
            };
            log.events.push_back(logged);
            let settled = log.settled_through;
            log.settle(settled);
            log.shrink();
            (sequence, durable)
        };
        durable.inspect(Custody::let_go);
        self.changed.notify_waiters();
        Some(placed)
    }

    /// Hands an event to the journal, with the question that it asks. One that is queued may be sent once the journal says
    /// so. What comes back need not be held any more.
    fn keep_event(&self, log: &mut Log, event: &Logged, ending: Option<Ending>, unkept: Unkept) -> Option<Custody> {
        let Logged { sequence, weight, at, ref message, .. } = *event;
        let event = Event { sequence, ending, weight, message: message.clone(), source: unkept.source, at };
        let content = match unkept.question {
            Some(question) => Content::Question(Box::new(question), event),
            None => Content::Event(event),
        };
        match self.keep(content) {
            Ok(Accepted::Queued) => {
                log.in_custody.extend(unkept.custody.map(|custody| (sequence, custody)));
                None
            }
            Ok(Accepted::Kept) => {
                log.refused.push_back(sequence);
                unkept.custody
            }
            // What can't be kept here stays where it came from until it is answered.
            Err(_) => {
                log.refused.push_back(sequence);
                None
            }
        }
    }

    /// Has events kept from now on, and those that nobody has taken yet: a reader that is about to get them may come back
    /// to another worker, which must know what it has. What comes back need not be held any more.
    fn begin_to_keep(&self, log: &mut Log) -> Vec<Custody> {
        let mut durable = Vec::new();
        if std::mem::replace(&mut log.is_kept, true) || log.is_foreign || log.finished {
            return durable;
        }
        let mut events = std::mem::take(&mut log.events);
        // What somebody has overheard is nobody's to come back for.
        let (sent, is_new) =
            (log.sent_through, |event: &&Logged| event.unkept.is_some() && event.sequence > log.sent_through);
        let mut next = events.iter().find(is_new).map_or(log.next_sequence, |event| event.sequence);
        log.settled_through = log.settled_through.min(next.saturating_sub(1));
        log.refused.clear();
        for event in &mut events {
            if let Some(unkept) = event.unkept.take()
                && event.sequence > sent
            {
                // What was dropped meanwhile holds nothing up.
                log.refused.extend(next..event.sequence);
                next = event.sequence + 1;
                durable.extend(self.keep_event(log, event, None, *unkept));
            }
        }
        log.refused.extend(next..log.next_sequence);
        log.events = events;
        let settled = log.settled_through;
        log.settle(settled);
        durable
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
}

impl Witness for Stream {
    fn durable(&self, through: u64) {
        let durable = self.log.lock().durable(through);
        durable.iter().for_each(Custody::let_go);
        self.settled(through);
    }

    fn lost(&self, sequence: u64, why: Lost) {
        // It is not durable, and stays with whoever asks.
        self.log.lock().in_custody.retain(|(place, _)| *place != sequence);
        // Somebody else goes on with the stream: this worker must not send what he may send otherwise.
        if why == Lost::Claimed {
            self.log.lock().is_taken = true;
            return self.close();
        }
        self.settled(sequence);
    }
}

#[cfg(test)]
mod tests;
