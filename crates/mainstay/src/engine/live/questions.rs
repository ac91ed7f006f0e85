//! Questions of the server that its client is to answer.

use std::collections::BTreeMap;

use bytes::Bytes;
use mainstay_core::call::StreamId;
use mainstay_core::time::Timestamp;
use mainstay_store::journal::Question;

use crate::engine::live::{Crowded, Live};
use crate::engine::stream::Custody;

/// What a child has asked its client through earlier workers, by the numbers that it was dressed with; `None` if that is
/// not known.
pub type AskedEarlier = Option<BTreeMap<StreamId, Question>>;

/// A question that awaits its answer.
pub struct Open {
    /// The question.
    pub question: Question,
    /// Holds it where it came from, if it is not durable yet.
    pub custody: Option<Custody>,
}

impl Live {
    /// How many questions of the server are open.
    pub fn questions(&self) -> usize {
        self.traffic.lock().asked.len()
    }

    /// Notes that the server asks the client something.
    ///
    /// # Errors
    /// Too many questions are open.
    pub fn ask(&self, question: Question, custody: Option<Custody>) -> Result<(), Crowded> {
        let mut traffic = self.traffic.lock();
        if traffic.asked.len() >= ASKED_MAX {
            return Err(Crowded);
        }
        traffic.asked.insert(question.asked, Open { question, custody });
        Ok(())
    }

    /// Takes an open question back: `Some` for the first answer only (R6).
    pub fn answered(&self, asked: StreamId) -> Option<Open> {
        self.traffic.lock().asked.remove(&asked)
    }

    /// Notes the answer to a question of an earlier worker: `true` for the first one only (R6).
    pub fn answered_before(&self, asked: StreamId) -> bool {
        let mut traffic = self.traffic.lock();
        if traffic.answered_before.len() >= ASKED_MAX {
            traffic.answered_before.pop_first();
        }
        traffic.answered_before.insert(asked)
    }

    /// Whether the server's question `original` was put to the client by an earlier worker: the keeper gives again what a
    /// child said shortly before that worker's death.
    pub fn was_asked_earlier(&self, original: &Bytes) -> bool {
        self.asked_earlier.iter().flat_map(BTreeMap::values).any(|question| question.original == *original)
    }

    /// When an earlier worker put the question `asked` to the client. The epoch of all time if none did so for the child
    /// that is there, `None` if that is not known.
    pub fn asked_earlier_at(&self, asked: StreamId) -> Option<Timestamp> {
        let known = self.asked_earlier.as_ref()?;
        Some(known.get(&asked).map_or(Timestamp::from_unix_millis(0), |question| question.asked_at))
    }

    /// The dressed id of the open question that the server knows as `original`.
    pub fn asked_as(&self, original: &[u8]) -> Option<StreamId> {
        let traffic = self.traffic.lock();
        let mut open = traffic.asked.values().map(|open| &open.question);
        open.find(|question| question.original == original).map(|question| question.asked)
    }
}

const ASKED_MAX: usize = 64;
