//! The streams of a session that its client may come back to.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use mainstay_core::call::StreamId;

use crate::engine::live::{Crowded, Live, Traffic};
use crate::engine::stream::Stream;

impl Live {
    /// Keeps the stream of a call so that its client can come back to it.
    ///
    /// # Errors
    /// The session's bound of streams is reached.
    pub fn keep(&self, stream: &Arc<Stream>, streams_max: usize) -> Result<(), Crowded> {
        self.traffic.lock().keep(stream, streams_max)
    }

    /// A kept stream.
    pub fn stream(&self, id: StreamId) -> Option<Arc<Stream>> {
        self.traffic.lock().streams.get(&id).cloned()
    }

    /// The newest kept stream from before `epoch` that is not finished.
    pub fn unfinished_before(&self, epoch: u64) -> Option<Arc<Stream>> {
        let traffic = self.traffic.lock();
        let newest = traffic.streams.values().rev().find(|kept| kept.id().epoch < epoch && !kept.is_finished());
        newest.cloned()
    }

    /// The kept streams.
    pub fn streams(&self) -> Vec<Arc<Stream>> {
        self.traffic.lock().streams.values().cloned().collect()
    }

    /// How many streams of calls are kept.
    pub fn streams_held(&self) -> usize {
        self.traffic.lock().streams.len()
    }

    /// Keeps what finished streams hold within its bound: what was delivered goes first, then the oldest.
    pub fn trim(&self) {
        let mut traffic = self.traffic.lock();
        loop {
            let finished = traffic.streams.values().filter(|stream| stream.is_finished());
            let bytes: usize = finished.clone().map(|stream| stream.bytes()).sum();
            if bytes <= KEPT_BYTES_MAX {
                return;
            }
            let delivered = finished.clone().find(|stream| stream.is_delivered());
            let Some(goes) = delivered.or_else(|| finished.clone().next()).map(|stream| stream.id()) else { return };
            if traffic.streams.len() == 1 {
                return;
            }
            traffic.streams.remove(&goes);
        }
    }

    /// Whether an answer is kept that its client has not taken.
    pub fn owes_answers(&self) -> bool {
        self.traffic.lock().streams.values().any(|stream| !stream.is_delivered())
            || self.relays() && self.listen.unread().0 > 0
    }

    /// Notes that answers, too, go on the listening stream, and has everything on that kept from now on.
    pub fn relay(&self) {
        if !self.relays.swap(true, Ordering::AcqRel) {
            self.listen.keep_all();
        }
    }

    /// Whether answers, too, go on the listening stream.
    pub fn relays(&self) -> bool {
        self.relays.load(Ordering::Acquire)
    }

    /// Keeps `stream` unless one with its id is kept already, which comes back then: two resumptions of one call at a
    /// time must meet on one stream.
    ///
    /// # Errors
    /// The session's bound of streams is reached.
    pub fn keep_once(&self, stream: &Arc<Stream>, streams_max: usize) -> Result<Option<Arc<Stream>>, Crowded> {
        let mut traffic = self.traffic.lock();
        if let Some(known) = traffic.streams.get(&stream.id()) {
            return Ok(Some(Arc::clone(known)));
        }
        traffic.keep(stream, streams_max)?;
        Ok(None)
    }

    /// Lets a kept stream go.
    pub fn let_go(&self, id: StreamId) {
        self.traffic.lock().streams.remove(&id);
    }
}

impl Traffic {
    fn keep(&mut self, stream: &Arc<Stream>, streams_max: usize) -> Result<(), Crowded> {
        if self.streams.len() >= streams_max {
            let stale = self.streams.iter().find(|(_, kept)| kept.is_finished()).map(|(id, _)| *id);
            self.streams.remove(&stale.ok_or(Crowded)?);
        }
        self.streams.insert(stream.id(), Arc::clone(stream));
        Ok(())
    }
}

/// The most bytes of finished streams that are kept for one session; the newest answer is kept whatever its size.
const KEPT_BYTES_MAX: usize = 32 << 20;
