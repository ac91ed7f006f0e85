//! Answers to calls of earlier workers, until somebody asks for them.
//!
//! Each is still in the keeper's custody, and holds there everything that came behind it. So there are few of them, and
//! not for long.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

/// The answers, oldest first.
#[derive(Debug, Default)]
pub(super) struct Parked {
    answers: VecDeque<Answer>,
    bytes: usize,
}

#[derive(Debug)]
struct Answer {
    id: Box<str>,
    number: u64,
    bytes: Bytes,
    at: Instant,
}

impl Parked {
    /// Keeps an answer. Returns the frames that had to go for it.
    pub(super) fn park(&mut self, id: Box<str>, number: u64, bytes: Bytes, at: Instant) -> Vec<u64> {
        let mut dropped: Vec<u64> = self.take(&id).map(|(number, _)| number).into_iter().collect();
        self.bytes += bytes.len();
        self.answers.push_back(Answer { id, number, bytes, at });
        while self.answers.len() > PARKED_MAX || self.bytes > PARKED_BYTES_MAX {
            let Some(oldest) = self.answers.pop_front() else { break };
            self.bytes -= oldest.bytes.len();
            dropped.push(oldest.number);
        }
        dropped
    }

    /// The answer with that id and its frame.
    pub(super) fn take(&mut self, id: &str) -> Option<(u64, Bytes)> {
        let index = self.answers.iter().position(|answer| *answer.id == *id)?;
        let answer = self.answers.remove(index)?;
        self.bytes -= answer.bytes.len();
        Some((answer.number, answer.bytes))
    }

    /// Drops what is too old at `now`; their frames.
    pub(super) fn expire(&mut self, now: Instant) -> Vec<u64> {
        let mut dropped = Vec::new();
        while let Some(oldest) = self.answers.pop_front_if(|answer| now.duration_since(answer.at) >= PARKED_FOR) {
            self.bytes -= oldest.bytes.len();
            dropped.push(oldest.number);
        }
        dropped
    }

    /// Drops everything; their frames.
    pub(super) fn clear(&mut self) -> Vec<u64> {
        self.bytes = 0;
        self.answers.drain(..).map(|answer| answer.number).collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.answers.is_empty()
    }
}

const PARKED_MAX: usize = 256;
const PARKED_BYTES_MAX: usize = 24 * 1024 * 1024;
const PARKED_FOR: Duration = Duration::from_secs(300);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn r1a_answers_wait_within_bounds() {
        let mut parked = Parked::default();
        let park = |parked: &mut Parked, id: &str, number, bytes: &'static [u8]| {
            parked.park(id.into(), number, Bytes::from_static(bytes), Instant::now())
        };
        assert!(park(&mut parked, "a", 1, b"x").is_empty());
        assert_eq!(park(&mut parked, "a", 2, b"y"), [1]);
        assert_eq!(parked.take("a"), Some((2, Bytes::from_static(b"y"))));
        assert_eq!(parked.take("a"), None);
        for number in 0..=PARKED_MAX as u64 {
            let dropped = park(&mut parked, &number.to_string(), number, b"z");
            assert_eq!(dropped, if number == PARKED_MAX as u64 { vec![0] } else { vec![] });
        }
        tokio::time::advance(PARKED_FOR).await;
        assert_eq!(parked.expire(Instant::now()).len(), PARKED_MAX);
        assert!(parked.is_empty() && parked.bytes == 0);
    }
}
