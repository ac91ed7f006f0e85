//! Who waits for what a child writes. No waiting and no IO: only who gets which frame.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use mainstay_core::call::{RoutedId, StreamId};
use mainstay_core::wire::envelope::{self, Envelope};
use tokio::time::Instant;

use super::acks::Acks;
use super::end::End;
use super::parked::Parked;
use super::slot::{Delivery, Slot};
use crate::dialect;
use crate::wire;

/// The calls of one child, and the frames that are not dealt with yet.
#[derive(Default)]
pub(super) struct Table {
    pub(super) pending: HashMap<Box<str>, Entry>,
    pub(super) registered: u64,
    pub(super) acks: Acks,
    pub(super) parked: Parked,
    pub(super) end: Option<End>,
}

/// A call that waits.
pub(super) struct Entry {
    pub(super) slot: Arc<Slot>,
    pub(super) order: u64,
    /// Whether messages that name no call may go to this one.
    pub(super) may_stream: bool,
    pub(super) stream: Option<StreamId>,
    pub(super) id: Bytes,
}

/// Whose a message that is no answer is.
pub(super) enum Owner {
    Call(Arc<Slot>),
    Session,
    Nobody,
}

impl Table {
    pub(super) fn is_due(&self) -> bool {
        self.acks.is_due() || !self.parked.is_empty()
    }

    /// Gives an answer to its call, or parks it for one of an earlier worker. False if it is nobody's.
    pub(super) fn place_response(&mut self, number: u64, scanned: &Envelope, bytes: &Bytes, epoch: u64) -> bool {
        let Some(id) = wire::id_of(scanned, bytes) else { return self.place_nameless(number, bytes) };
        let text = wire::id_text(id);
        if let Some(entry) = self.pending.remove(&*text) {
            entry.slot.push(Delivery::Response { bytes: bytes.clone(), number });
            return true;
        }
        if RoutedId::decode(id).is_none_or(|routed| routed.stream.epoch >= epoch) {
            return false;
        }
        // What an equal id displaces, and what there is no room for, is delivered nowhere.
        for dropped in self.parked.park(text.into(), number, bytes.clone(), Instant::now()) {
            self.acks.delivered(dropped);
        }
        true
    }

    /// An error without an id answers the only call there is, if there is only one.
    fn place_nameless(&mut self, number: u64, bytes: &Bytes) -> bool {
        let mut waiting = self.pending.values();
        let (Some(entry), None) = (waiting.next(), waiting.next()) else { return false };
        let Some(bytes) = dialect::answer_with_id(bytes, &entry.id) else { return false };
        entry.slot.push(Delivery::Response { bytes: bytes.into(), number });
        self.pending.clear();
        true
    }

    pub(super) fn owner_of(&self, scanned: &Envelope, message: &[u8]) -> Owner {
        match scanned.method_name(message).as_deref() {
            Some("notifications/progress") => {
                let token =
                    scanned.params.as_ref().and_then(|params| envelope::member(message, params, "progressToken"));
                let stream = token.and_then(|span| RoutedId::decode(&message[span])).map(|routed| routed.stream);
                let newest = self.newest(|entry| stream.is_some() && entry.stream == stream);
                // Progress of a call that is answered is too late for anybody (R7).
                newest.map_or(Owner::Nobody, Owner::Call)
            }
            // These are the session's, whatever is in flight.
            Some(
                "notifications/tools/list_changed"
                | "notifications/prompts/list_changed"
                | "notifications/resources/list_changed"
                | "notifications/resources/updated",
            ) => Owner::Session,
            // Over one pipe nothing says which call a message is about; the newest one most likely asked for it.
            Some(_) | None => self.newest(|entry| entry.may_stream).map_or(Owner::Session, Owner::Call),
        }
    }

    fn newest(&self, fits: impl Fn(&Entry) -> bool) -> Option<Arc<Slot>> {
        let fitting = self.pending.values().filter(|entry| fits(entry));
        fitting.max_by_key(|entry| entry.order).map(|entry| Arc::clone(&entry.slot))
    }

    /// Gives up parked answers that are too old, or that hold up too much of what came behind them.
    pub(super) fn drop_parked(&mut self, now: Instant) {
        let (frames, bytes) = self.acks.held();
        let crowded = frames > HELD_FRAMES_MAX || bytes > HELD_BYTES_MAX;
        for dropped in if crowded { self.parked.clear() } else { self.parked.expire(now) } {
            self.acks.delivered(dropped);
        }
    }
}

/// What a parked answer may hold up: half of what the keeper holds before it stops reading.
const HELD_FRAMES_MAX: usize = mainstay_keeper::CUSTODY_FRAMES_MAX / 2;
const HELD_BYTES_MAX: usize = mainstay_keeper::CUSTODY_BYTES_MAX / 2;
