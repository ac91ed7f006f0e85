//! The calls of a session that are in flight.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use mainstay_core::call::StreamId;
use mainstay_core::time::Timestamp;
use mainstay_core::wire::method::Method;

use crate::engine::live::{Crowded, Live};

/// A call in flight.
#[derive(Clone)]
pub struct InFlight {
    /// The client's own raw id. One id may be in flight more than once (R9).
    pub client_id: Bytes,
    /// The number under which the call runs.
    pub stream: StreamId,
    /// What it calls.
    pub method: Method,
    /// The tool or prompt that it names, for people: at most [`CALL_NAME_CHARS_MAX`] characters of it.
    pub name: Option<Box<str>>,
    /// The value of the session's setting that it changes, if it changes one.
    pub setting: Option<Box<str>>,
    /// When it began.
    pub since: Timestamp,
    /// Whether an earlier worker runs it, which has handed over and still lives.
    pub is_elsewhere: bool,
}

impl Live {
    /// The calls in flight.
    pub fn calls(&self) -> Vec<InFlight> {
        self.traffic.lock().calls.clone()
    }

    /// Resolves once no request is being served and no call is in flight.
    pub async fn idle(&self) {
        loop {
            let rung = self.idle.notified();
            tokio::pin!(rung);
            rung.as_mut().enable();
            if self.activity().calls == 0 {
                return;
            }
            rung.await;
        }
    }

    /// Registers a call in flight; it counts until the flight is dropped.
    ///
    /// # Errors
    /// The session's bound of calls in flight is reached.
    pub fn take_off(self: &Arc<Self>, call: InFlight, calls_max: usize) -> Result<Flight, Crowded> {
        let mut traffic = self.traffic.lock();
        if traffic.calls.len() >= calls_max {
            return Err(Crowded);
        }
        let stream = call.stream;
        traffic.calls.push(call);
        self.calls.fetch_add(1, Ordering::AcqRel);
        Ok(Flight { live: Arc::clone(self), stream })
    }

    /// The newest call in flight whose client-side id is `client_id`.
    pub fn in_flight(&self, client_id: &[u8]) -> Option<StreamId> {
        let traffic = self.traffic.lock();
        traffic.calls.iter().rev().find(|call| call.client_id == client_id).map(|call| call.stream)
    }

    /// Gives a call up that the client cancelled and the server does not answer.
    pub fn give_up(&self, stream: StreamId) {
        let mut traffic = self.traffic.lock();
        if traffic.calls.iter().any(|call| call.stream == stream) {
            traffic.given_up.insert(stream);
        }
        drop(traffic);
        self.given_up.notify_waiters();
    }

    /// Whether the call `stream` is given up.
    pub fn is_given_up(&self, stream: StreamId) -> bool {
        self.traffic.lock().given_up.contains(&stream)
    }

    /// Resolves once the call `stream` is given up. Cancel-safe.
    pub async fn given_up(&self, stream: StreamId) {
        loop {
            let rung = self.given_up.notified();
            tokio::pin!(rung);
            rung.as_mut().enable();
            if self.traffic.lock().given_up.contains(&stream) {
                return;
            }
            rung.await;
        }
    }
}

/// A call in flight. Dropping it lands it.
pub struct Flight {
    live: Arc<Live>,
    stream: StreamId,
}

impl Flight {
    /// The number under which the call runs.
    pub fn stream(&self) -> StreamId {
        self.stream
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        let mut traffic = self.live.traffic.lock();
        if let Some(place) = traffic.calls.iter().rposition(|call| call.stream == self.stream) {
            traffic.calls.remove(place);
        }
        traffic.given_up.remove(&self.stream);
        drop(traffic);
        self.live.calls.fetch_sub(1, Ordering::AcqRel);
        self.live.idle.notify_waiters();
    }
}

/// The most characters that are kept of what a call names.
pub const CALL_NAME_CHARS_MAX: usize = 128;
