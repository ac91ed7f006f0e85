//! Streams of calls that a worker stays for which has handed over: its successor follows them in the journal, and takes
//! nothing from it (R2, R4).

use std::sync::Arc;

use bytes::Bytes;
use mainstay_core::call::EventId;
use mainstay_store::journal;

use super::streams_crowded;
use crate::engine::live::Live;
use crate::engine::stream::{Reader, Stream};
use crate::engine::{Engine, Refused};

impl Engine {
    /// A reader of the call's stream that `event` is a cursor of, from just behind it, if a worker that has handed over
    /// still sees to that call. `None` if there is no such worker: the stream is anybody's then.
    ///
    /// # Errors
    /// As [`come_back`](Self::come_back).
    pub(super) async fn follow_leaver(
        self: &Arc<Self>,
        live: &Arc<Live>,
        event: &EventId,
        request: &Bytes,
        cursor: &str,
    ) -> Result<Option<Reader>, Refused> {
        if self.leavers.are_gone() || !live.server.is_http() {
            return Ok(None);
        }
        let record = self.held_by_journal(live, || self.journal.find(live.key, event.stream)).await?;
        if record.as_ref().is_some_and(|record| record.ending.is_some()) {
            return Ok(None);
        }
        // One that is not in the journal yet is its worker's who gave it its number.
        let owner = record.as_ref().map(|record| record.claim).or_else(|| self.leavers.of(event.stream.epoch));
        let Some(owner) = owner.filter(|owner| self.leavers.is_present(*owner)) else { return Ok(None) };
        let (events, _) = self.history(live, event.stream, event.sequence, false).await?;
        let (tag, journaled) = (live.key.tag(), Some(self.journaled(live.key)));
        let stream = Stream::foreign(tag, event.stream, Some(request.clone()), event.sequence, journaled);
        stream.copy(events);
        let known = live.keep_once(&stream, self.settings.streams_max).map_err(|_| streams_crowded())?;
        if let Some(known) = known {
            return self.reader_of(live, &known, event, cursor.to_owned()).await.map(Some);
        }
        let reader = stream.read(Some(event.sequence), Some(cursor.to_owned()));
        let call = record.and_then(|record| record.call).unwrap_or_else(|| journal::Call {
            server: live.server.name.clone(),
            method: "".into(),
            name: None,
            request: request.clone(),
            started_at: self.now(),
        });
        // Behind `keep_once`: whoever saw to the call and is about to be done finds the stream, or is replaced.
        self.oversee(live, owner, event.stream, &call);
        Ok(Some(reader))
    }
}
