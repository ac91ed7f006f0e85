//! Who waits for what a child writes, and what of it must stay in custody. No waiting and no IO.
//!
//! A call is open from the moment that it is written until it is settled, and so is its answer kept, wherever that is by
//! then. What is open is what a later worker can still be asked for.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use mainstay_core::call::{RoutedId, StreamId};
use mainstay_core::wire::envelope::{self, Envelope};
use mainstay_keeper::{CUSTODY_BYTES_MAX, CUSTODY_FRAMES_MAX, CallTag};

use super::acks::{Acks, Release};
use super::end::End;
use super::oversize::Lost;
use super::parked::Parked;
use super::slot::{Delivery, Slot};
use super::unheard::Unheard;
use crate::dialect;
use crate::pending::{self, Named, Pending, Ticket};
use crate::wire;

/// The calls of one child, and the frames that are not dealt with yet.
#[derive(Default)]
pub(super) struct Table {
    pending: Pending<Arc<Slot>>,
    /// The open calls; with the frame of the answer, once that is here.
    open: BTreeMap<StreamId, Option<u64>>,
    /// Open calls that nobody waits for any more, until the next tick.
    given_up: Vec<StreamId>,
    /// Answers to the child's questions that the keeper has taken for it, as long as it is to be known.
    answers: BTreeSet<StreamId>,
    pub(super) acks: Acks,
    parked: Parked,
    unheard: Unheard,
    pub(super) end: Option<End>,
}

/// A place in the table.
pub(super) struct Place {
    pub(super) slot: Arc<Slot>,
    ticket: Ticket,
    /// The call, if it is one that later workers can be asked for.
    pub(super) call: Option<StreamId>,
}

/// What there is of a call of an earlier worker.
pub(super) enum Rejoined {
    Answered(Bytes),
    Waiting(Place),
}

/// What was let go of for want of room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Relief {
    pub(super) answers: usize,
    /// Progress.
    pub(super) messages: usize,
}

/// Whose a message that is no answer is.
pub(super) type Owner = pending::Owner<Arc<Slot>>;

/// The name of the call with that stream in the keeper's custody.
pub(super) fn tag_of(stream: StreamId) -> CallTag {
    CallTag::from_bytes(((u128::from(stream.epoch) << 64) | u128::from(stream.number)).to_be_bytes())
}

/// The name of the answer to that question in the keeper's custody: no call has such a number.
pub(super) fn answer_tag_of(asked: StreamId) -> CallTag {
    tag_of(StreamId { number: asked.number | ANSWER_BIT, ..asked })
}

/// The stream of the call of that name in the keeper's custody.
pub(super) fn stream_of(tag: CallTag) -> StreamId {
    let [epoch, number] = [0, 8].map(|at| {
        let bytes = tag.to_bytes();
        bytes[at..at + 8].iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
    });
    StreamId { epoch, number }
}

impl Table {
    /// Of a child of which the keeper says that these calls are open.
    pub(super) fn of(open: &[CallTag]) -> Self {
        let (answers, calls): (Vec<_>, Vec<_>) =
            open.iter().map(|tag| stream_of(*tag)).partition(|stream| stream.number & ANSWER_BIT != 0);
        let asked = |answer: StreamId| StreamId { number: answer.number & !ANSWER_BIT, ..answer };
        Self {
            open: calls.into_iter().map(|call| (call, None)).collect(),
            answers: answers.into_iter().map(asked).collect(),
            ..Self::default()
        }
    }

    /// Waits for the answer with the raw id `id`. A call is open from here on. `None` if the child has ended or the id is
    /// taken.
    pub(super) fn register(&mut self, id: Bytes, may_stream: bool) -> Option<Place> {
        if self.end.is_some() {
            return None;
        }
        let (slot, call) = (Arc::new(Slot::default()), RoutedId::decode(&id).map(|routed| routed.stream));
        let ticket = self.pending.register(id, may_stream, Arc::clone(&slot))?;
        if let Some(call) = call {
            self.open.entry(call).or_insert(None);
        }
        Some(Place { slot, ticket, call })
    }

    /// The call of an earlier worker: its answer, or a place to wait for it. `None` if no answer can come.
    pub(super) fn rejoin(&mut self, id: &RoutedId) -> Option<Rejoined> {
        let Some(number) = *self.open.get(&id.stream)? else {
            let place = self.register(id.encode().into(), true)?;
            self.hand_on_progress(&place);
            return Some(Rejoined::Waiting(place));
        };
        let answer = self.parked.answer(id.stream, number)?;
        if self.unheard.has(id.stream)
            && let Some(place) = self.register(id.encode().into(), true)
        {
            // Everything is here: nothing else is waited for.
            self.pending.leave(&place.ticket);
            self.hand_on_progress(&place);
            place.slot.push(Delivery::Response { bytes: answer, number: None });
            return Some(Rejoined::Waiting(place));
        }
        Some(Rejoined::Answered(answer))
    }

    fn hand_on_progress(&mut self, place: &Place) {
        let Some(call) = place.call else { return };
        for (number, bytes) in self.unheard.take(call) {
            place.slot.push(Delivery::Message { bytes, number });
        }
    }

    /// Keeps progress of a call that is open and that nobody waits for: its client is about to come back. False if it is
    /// no such message.
    pub(super) fn keep_progress(&mut self, number: u64, scanned: &Envelope, message: &Bytes) -> bool {
        let Some(call) = pending::progress_of(scanned, message) else { return false };
        if self.open.get(&call) != Some(&None) {
            return false;
        }
        if let Some(replaced) = self.unheard.keep(call, number, message) {
            self.acks.delivered(replaced);
        }
        true
    }

    fn drop_progress(&mut self, call: StreamId) {
        for (number, _) in self.unheard.take(call) {
            self.acks.delivered(number);
        }
    }

    /// Whoever waited in `place` does so no longer; with `done`, the answer was taken.
    pub(super) fn leave(&mut self, place: &Place, done: bool) {
        self.pending.leave(&place.ticket);
        for number in place.slot.close() {
            self.acks.delivered(number);
        }
        self.given_up.extend(place.call.filter(|_| !done));
    }

    /// Nobody will ask for the call any more.
    pub(super) fn settle(&mut self, call: StreamId) {
        let Some(answer) = self.open.remove(&call) else { return };
        self.acks.settled(tag_of(call));
        self.drop_progress(call);
        if let Some(number) = answer {
            self.parked.remove(call, number);
            self.acks.delivered(number);
        }
    }

    /// Whether the keeper has taken the answer to `asked` for the child.
    pub(super) fn has_answer(&self, asked: StreamId) -> bool {
        self.answers.contains(&asked)
    }

    /// The questions that workers before `epoch` have asked and of which the keeper still knows the answers.
    pub(super) fn answers_before(&self, epoch: u64) -> Vec<StreamId> {
        self.answers.iter().filter(|asked| asked.epoch < epoch).copied().collect()
    }

    /// The keeper has taken the answer to `asked`.
    pub(super) fn note_answer(&mut self, asked: StreamId) {
        self.answers.insert(asked);
    }

    /// Nobody will ask for the answer to `asked` any more.
    pub(super) fn settle_answer(&mut self, asked: StreamId) {
        if self.answers.remove(&asked) {
            self.acks.settled(answer_tag_of(asked));
        }
    }

    /// The same for a call whose client has nothing to come back with: a later worker need not find it.
    pub(super) fn settle_for_good(&mut self, call: StreamId) {
        let mark = self.acks.mark();
        self.settle(call);
        self.acks.free_since(mark);
    }

    /// The calls of earlier workers that are answered, oldest answer first.
    pub(super) fn answered_earlier(&self) -> Vec<StreamId> {
        self.parked.calls()
    }

    /// Whether a call is without an answer. What somebody listens to is none: it would never end.
    pub(super) fn has_running_calls(&self) -> bool {
        self.open.iter().any(|(call, answer)| answer.is_none() && call.number & LISTENING_BIT == 0)
    }

    /// Whether a call from before `epoch` is without an answer.
    pub(super) fn runs_calls_before(&self, epoch: u64) -> bool {
        self.open.iter().any(|(call, answer)| answer.is_none() && call.epoch < epoch)
    }

    /// Nobody will ask for any call any more.
    pub(super) fn settle_all(&mut self) {
        let open: Vec<StreamId> = self.open.keys().copied().collect();
        open.into_iter().for_each(|call| self.settle(call));
    }

    pub(super) fn is_due(&self) -> bool {
        self.acks.is_due() || !self.given_up.is_empty()
    }

    /// Time has passed. Returns what the keeper is to let go of now.
    pub(super) fn tick(&mut self) -> Release {
        let release = self.acks.tick();
        // Only now: the process may be about to end, and everybody gives up then. That must not settle anything.
        for call in std::mem::take(&mut self.given_up) {
            self.settle(call);
        }
        release
    }

    /// The child has ended.
    pub(super) fn finish(&mut self, end: End) {
        self.end = Some(end);
        self.pending.drain().for_each(|entry| entry.slot.push(Delivery::Gone));
        // Whoever comes back for these hears that their outcome is unknown, and nothing before it.
        self.unanswered().into_iter().for_each(|call| self.drop_progress(call));
    }

    /// Gives an answer to its call, or parks it for one of an earlier worker. False if it is nobody's.
    pub(super) fn place_response(&mut self, number: u64, scanned: &Envelope, bytes: &Bytes, epoch: u64) -> bool {
        let Some(id) = wire::id_of(scanned, bytes) else { return self.place_nameless(number, bytes) };
        let earlier = RoutedId::decode(id).map(|routed| routed.stream).filter(|stream| stream.epoch < epoch);
        let entry = self.pending.take(&wire::id_text(id));
        if let Some(entry) = entry.or_else(|| self.pending.take_call(earlier?)) {
            let number = (!self.answered(entry.stream, number)).then_some(number);
            entry.slot.push(Delivery::Response { bytes: bytes.clone(), number });
            return true;
        }
        let Some(call) = earlier.filter(|_| self.answered(earlier, number)) else { return false };
        self.parked.park(call, number, bytes);
        true
    }

    /// Keeps the frame as long as the call is open. False if the call is not open, or is answered already.
    fn answered(&mut self, call: Option<StreamId>, number: u64) -> bool {
        match call.and_then(|call| self.open.get_mut(&call)) {
            Some(answer @ None) => {
                *answer = Some(number);
                true
            }
            Some(Some(_)) | None => false,
        }
    }

    /// An error without an id answers the only call there is, if there is only one.
    fn place_nameless(&mut self, number: u64, bytes: &Bytes) -> bool {
        if self.pending.count() == 0 {
            // Of a call that nobody has come back for only that much is known: nothing else will come of it.
            if let [call] = self.unanswered()[..] {
                self.settle(call);
            }
            return false;
        }
        let Some((entry, bytes)) = self.pending.take_only(|id| dialect::answer_with_id(bytes, id)) else {
            return false;
        };
        let number = (!self.answered(entry.stream, number)).then_some(number);
        entry.slot.push(Delivery::Response { bytes: bytes.into(), number });
        true
    }

    /// An answer was too large to be kept, so nothing else will come for its call.
    pub(super) fn place_lost(&mut self, lost: &Lost) {
        match lost {
            Lost::Unasked => {}
            Lost::AnswerTo(id) => {
                let call = stream_in(id);
                if let Some(entry) = self.pending.take(id).or_else(|| self.pending.take_call(call?)) {
                    entry.slot.push(Delivery::Oversize);
                }
                call.into_iter().for_each(|call| self.settle(call));
            }
            // Whose answer it was can't be told, and nobody may wait for it for ever.
            Lost::Unknown => {
                self.pending.drain().for_each(|entry| entry.slot.push(Delivery::Oversize));
                self.unanswered().into_iter().for_each(|call| self.settle(call));
            }
        }
    }

    /// Whether a call with that id, by its text, is without an answer.
    pub(super) fn awaits(&self, id: &str) -> bool {
        self.pending.awaits(id) || stream_in(id).is_some_and(|call| self.open.get(&call) == Some(&None))
    }

    fn unanswered(&self) -> Vec<StreamId> {
        self.open.iter().filter(|(_, answer)| answer.is_none()).map(|(call, _)| *call).collect()
    }

    pub(super) fn owner_of(&self, scanned: &Envelope, message: &[u8]) -> Owner {
        self.pending.owner_of(scanned, message)
    }

    /// Where a message goes that is no answer, of a process that many share.
    pub(super) fn named_by(&self, scanned: &Envelope, message: &[u8]) -> Option<Arc<Slot>> {
        match pending::request_named(scanned, message) {
            Named::Request(call) => self.pending.slot_of(call),
            Named::OnlyStreaming => self.pending.only_streaming(),
            Named::Nobody => None,
        }
    }

    /// Lets go of answers that nobody has taken and of progress, if there is so much that the child might have to wait for
    /// it. First go the answers that nobody has asked for, oldest first: those that are more than clients wait for were
    /// left behind when a worker died that had handed them on. Then goes progress, if it is much, and then what else there
    /// is of answers.
    pub(super) fn relieve(&mut self) -> Relief {
        let mut relief = Relief::default();
        let (frames, bytes) = self.acks.held();
        if frames <= HELD_FRAMES_MAX && bytes <= HELD_BYTES_MAX {
            return relief;
        }
        relief.answers += self.settle_parked_beyond(PARKED_SPARED);
        while self.is_crowded() && self.is_mostly_progress() {
            relief.messages += self.thin_progress();
        }
        relief.answers += self.settle_parked_beyond(0);
        let mut handed_on: Vec<_> = self.open.iter().filter_map(|(call, answer)| Some(((*answer)?, *call))).collect();
        handed_on.sort_unstable();
        for (_, call) in handed_on {
            if !self.is_crowded() {
                break;
            }
            self.settle(call);
            relief.answers += 1;
        }
        relief
    }

    /// Lets go of the oldest answers that nobody has asked for, but for so many. Returns how many.
    fn settle_parked_beyond(&mut self, spared: usize) -> usize {
        let mut count = 0;
        while self.is_crowded()
            && self.parked.count() > spared
            && let Some(call) = self.parked.oldest()
        {
            self.settle(call);
            count += 1;
        }
        count
    }

    /// Whether progress is what takes the room.
    fn is_mostly_progress(&self) -> bool {
        let (count, bytes) = self.unheard.held();
        count > HELD_FRAMES_MAX / 2 || bytes > HELD_BYTES_MAX / 2
    }

    fn thin_progress(&mut self) -> usize {
        let gone = self.unheard.thin();
        gone.iter().for_each(|number| self.acks.delivered(*number));
        gone.len()
    }

    /// Whether so much is held that there would soon be too much again.
    fn is_crowded(&self) -> bool {
        let (frames, bytes) = self.acks.held();
        frames > HELD_FRAMES_MAX / 4 * 3 || bytes > HELD_BYTES_MAX / 4 * 3
    }
}

fn stream_in(id: &str) -> Option<StreamId> {
    RoutedId::decode(&envelope::escape(id)).map(|routed| routed.stream)
}

/// Set in the number by which the keeper knows an answer. Numbers are counted, and never come that far.
const ANSWER_BIT: u64 = 1 << 63;

/// Set in the number of a request that somebody listens by, for as long as he wants.
pub(super) const LISTENING_BIT: u64 = 1 << 62;

/// What may be held: half of what the keeper holds before it stops reading.
const HELD_FRAMES_MAX: usize = CUSTODY_FRAMES_MAX / 2;
const HELD_BYTES_MAX: usize = CUSTODY_BYTES_MAX / 2;

/// As many answers may well have a client that comes back for them.
const PARKED_SPARED: usize = HELD_FRAMES_MAX / 4;

#[cfg(test)]
mod tests;
