//! A look at a stream that takes nothing from it, for whoever comes by now and then to see how far its call is.

use bytes::Bytes;
use mainstay_core::time::Timestamp;
use mainstay_store::journal::{Content, Ending};

use crate::engine::stream::Stream;

/// What a stream has to say so far.
pub struct Survey {
    /// Its messages in memory that are durable, or can't be, and when they came; the oldest first.
    pub messages: Vec<(Timestamp, Bytes)>,
    /// How it has ended, if it has and that is known.
    pub ending: Option<Ending>,
    /// Whether nothing more comes in this worker.
    pub is_closed: bool,
    /// Whether everything that was appended is among the messages.
    pub is_whole: bool,
}

impl Stream {
    /// How the stream stands. Nothing of it counts as taken.
    pub fn survey(&self) -> Survey {
        let log = self.log.lock();
        let settled = log.events.iter().filter(|event| event.sequence <= log.settled_through);
        Survey {
            messages: settled.map(|event| (event.at, event.message.clone())).collect(),
            ending: log.ending,
            is_closed: log.finished,
            is_whole: log.settled_through + 1 >= log.next_sequence,
        }
    }

    /// Ends the stream in this worker, in a way that the journal does not know yet: what the call still brings is dropped.
    pub fn close_as(&self, ending: Ending) {
        {
            let mut log = self.log.lock();
            log.finished = true;
            log.ending.get_or_insert(ending);
        }
        self.changed.notify_waiters();
    }

    /// Everything counts as untaken again: who read it so far leaves it to be surveyed.
    pub fn untake(&self) {
        self.log.lock().sent_through = 0;
    }

    /// Everything counts as taken, here and in the journal: it may go for want of room. For a finished stream.
    pub fn take_all(&self) {
        let through = {
            let mut log = self.log.lock();
            log.sent_through = log.next_sequence - 1;
            let told = std::mem::replace(&mut log.delivery_told, true);
            (!told).then_some(log.sent_through)
        };
        if let Some(through) = through {
            // Lost, it only takes room for longer.
            self.note(Content::Delivered(through));
        }
        self.changed.notify_waiters();
    }
}
