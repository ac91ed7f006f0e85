//! The calls that wait for what comes over one channel that they all share: a child's standard output, or the one event
//! stream of the HTTP+SSE transport. It tells whose each message is. No waiting and no IO.

use std::collections::HashMap;

use bytes::Bytes;
use mainstay_core::call::{RoutedId, StreamId};
use mainstay_core::wire::envelope::{self, Envelope};
use mainstay_core::wire::modern::SUBSCRIPTION_ID;

use crate::wire;

/// The calls that wait, each with the slot `S` that its messages go to.
#[derive(Debug)]
pub(crate) struct Pending<S> {
    entries: HashMap<Box<str>, Entry<S>>,
    registered: u64,
}

/// A call that waits.
#[derive(Debug)]
pub(crate) struct Entry<S> {
    /// Where its messages go.
    pub(crate) slot: S,
    /// The call, unless it is a request of the link's own.
    pub(crate) stream: Option<StreamId>,
    /// The raw id under which its answer comes.
    pub(crate) id: Bytes,
    order: u64,
    /// Whether messages that name no call may go to this one.
    may_stream: bool,
}

/// The proof of a place among the calls that wait.
#[derive(Debug)]
pub(crate) struct Ticket {
    key: Box<str>,
    order: u64,
}

/// Whose a message that is no answer is.
pub(crate) enum Owner<S> {
    Call(S),
    Session,
    Nobody,
}

impl<S: Clone> Pending<S> {
    /// Waits for the answer with the raw id `id`. `None` if somebody waits for that already.
    pub(crate) fn register(&mut self, id: Bytes, may_stream: bool, slot: S) -> Option<Ticket> {
        let key: Box<str> = wire::id_text(&id).into();
        if self.entries.contains_key(&key) {
            return None;
        }
        self.registered += 1;
        let (order, stream) = (self.registered, stream_of(&id));
        self.entries.insert(key.clone(), Entry { slot, stream, id, order, may_stream });
        Some(Ticket { key, order })
    }

    /// Whoever has the ticket waits no longer.
    pub(crate) fn leave(&mut self, ticket: &Ticket) {
        // The key may be another call's by now, in theory.
        if self.entries.get(&ticket.key).is_some_and(|entry| entry.order == ticket.order) {
            self.entries.remove(&ticket.key);
        }
    }

    /// Takes out the call that waits for an answer with this id, by its text.
    pub(crate) fn take(&mut self, id: &str) -> Option<Entry<S>> {
        self.entries.remove(id)
    }

    /// Takes out `call`, under whatever id: the client that came back for it may have spelled its own otherwise.
    pub(crate) fn take_call(&mut self, call: StreamId) -> Option<Entry<S>> {
        let key = self.entries.iter().find(|(_, entry)| entry.stream == Some(call)).map(|(key, _)| key.clone())?;
        self.entries.remove(&key)
    }

    /// Takes out the only call that waits, if there is only one, with what `answer` makes of its id: an error that names
    /// no request is about that.
    pub(crate) fn take_only<T>(&mut self, answer: impl FnOnce(&Bytes) -> Option<T>) -> Option<(Entry<S>, T)> {
        let (key, entry) = self.entries.iter().next().filter(|_| self.entries.len() == 1)?;
        let (key, answer) = (key.clone(), answer(&entry.id)?);
        Some((self.entries.remove(&key)?, answer))
    }

    /// Takes out all of them.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = Entry<S>> {
        self.entries.drain().map(|(_, entry)| entry)
    }

    /// Whether a call waits for an answer with this id, by its text.
    pub(crate) fn awaits(&self, id: &str) -> bool {
        self.entries.contains_key(id)
    }

    /// How many wait.
    pub(crate) fn count(&self) -> usize {
        self.entries.len()
    }

    /// Whose `message` is, if it is no answer.
    pub(crate) fn owner_of(&self, scanned: &Envelope, message: &[u8]) -> Owner<S> {
        match scanned.method_name(message).as_deref() {
            Some("notifications/progress") => {
                let stream = progress_of(scanned, message);
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
            // Over one channel nothing says which call a message is about; the newest one most likely asked for it.
            Some(_) | None => self.newest(|entry| entry.may_stream).map_or(Owner::Session, Owner::Call),
        }
    }

    /// The slot of that call, if it waits.
    pub(crate) fn slot_of(&self, call: StreamId) -> Option<S> {
        self.newest(|entry| entry.stream == Some(call))
    }

    /// The slot of the only call that may get messages which name none, if there is only one.
    pub(crate) fn only_streaming(&self) -> Option<S> {
        let mut streaming = self.entries.values().filter(|entry| entry.may_stream);
        let only = streaming.next()?;
        streaming.next().is_none().then(|| only.slot.clone())
    }

    fn newest(&self, fits: impl Fn(&Entry<S>) -> bool) -> Option<S> {
        let fitting = self.entries.values().filter(|entry| fits(entry));
        fitting.max_by_key(|entry| entry.order).map(|entry| entry.slot.clone())
    }
}

impl<S> Default for Pending<S> {
    fn default() -> Self {
        Self { entries: HashMap::new(), registered: 0 }
    }
}

/// The call whose progress `message` tells, if it does that.
pub(crate) fn progress_of(scanned: &Envelope, message: &[u8]) -> Option<StreamId> {
    if scanned.method_name(message).as_deref() != Some("notifications/progress") {
        return None;
    }
    stream_of(&message[envelope::member(message, scanned.params.as_ref()?, "progressToken")?])
}

/// Which request a message of a modern server is for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Named {
    /// That one.
    Request(StreamId),
    /// The only one that has asked for log messages, which name none, if there is only one.
    OnlyStreaming,
    /// None that was made here.
    Nobody,
}

/// Which request `message` of a modern server is for: by the token of its progress, by the mark of a subscription, or
/// because it takes that request back.
pub(crate) fn request_named(scanned: &Envelope, message: &[u8]) -> Named {
    let Some(params) = &scanned.params else { return Named::Nobody };
    let member = |key: &str| envelope::member(message, params, key);
    let mark = || envelope::member(message, &member("_meta")?, SUBSCRIPTION_ID);
    let method = scanned.method_name(message);
    let name = match method.as_deref() {
        Some("notifications/progress") => member("progressToken"),
        Some("notifications/cancelled") => member("requestId"),
        Some(_) | None => mark(),
    };
    match name {
        Some(span) => stream_of(&message[span]).map_or(Named::Nobody, Named::Request),
        None if method.as_deref() == Some("notifications/message") => Named::OnlyStreaming,
        None => Named::Nobody,
    }
}

fn stream_of(id: &[u8]) -> Option<StreamId> {
    RoutedId::decode(id).map(|routed| routed.stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(number: u64) -> Bytes {
        RoutedId { stream: StreamId { epoch: 1, number }, original: Bytes::from_static(b"7") }.encode().into()
    }

    fn owner(pending: &Pending<u8>, message: &[u8]) -> Option<u8> {
        match pending.owner_of(&envelope::scan(message).expect("a message"), message) {
            Owner::Call(slot) => Some(slot),
            Owner::Session => Some(0),
            Owner::Nobody => None,
        }
    }

    #[test]
    fn r7_progress_goes_to_its_call_and_what_names_none_to_the_newest_that_may_stream() {
        let mut pending = Pending::default();
        let first = pending.register(call(1), true, 1).expect("it is new");
        pending.register(call(2), true, 2).expect("it is new");
        pending.register(call(3), false, 3).expect("it is new");
        let progress = |token: &[u8]| {
            let head = br#"{"jsonrpc":"2.0","method":"notifications/progress","params":{"progress":1,"progressToken":"#;
            [&head[..], token, b"}}"].concat()
        };
        assert_eq!(owner(&pending, &progress(&call(1))), Some(1));
        assert_eq!(owner(&pending, &progress(&call(4))), None);
        assert_eq!(owner(&pending, &progress(b"7")), None);
        assert_eq!(owner(&pending, br#"{"jsonrpc":"2.0","id":1,"method":"elicitation/create"}"#), Some(2));
        assert_eq!(owner(&pending, br#"{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}"#), Some(0));
        pending.leave(&first);
        assert_eq!(owner(&pending, &progress(&call(1))), None, "too late");
    }

    #[test]
    fn e1_a_message_of_a_shared_process_goes_where_it_says_and_to_nobody_else() {
        let mut pending = Pending::default();
        pending.register(call(1), false, 1).expect("it is new");
        let second = pending.register(call(2), true, 2).expect("it is new");
        let text = |raw: Bytes| String::from_utf8(raw.to_vec()).expect("text");
        let (first, strange) = (text(call(1)), r#""1.9.7""#);
        let mark = |id: &str| format!(r#"{{"_meta":{{"io.modelcontextprotocol/subscriptionId":{id}}}}}"#);
        let named = |method: &str, params: &str| {
            let message = format!(r#"{{"jsonrpc":"2.0","method":"notifications/{method}","params":{params}}}"#);
            request_named(&envelope::scan(message.as_bytes()).expect("a message"), message.as_bytes())
        };
        let one = Named::Request(StreamId { epoch: 1, number: 1 });
        assert_eq!(named("progress", &format!(r#"{{"progressToken":{first}}}"#)), one);
        assert_eq!(named("cancelled", &format!(r#"{{"requestId":{first}}}"#)), one);
        assert_eq!(named("tools/list_changed", &mark(&first)), one);
        assert_eq!(named("message", &mark(&first)), one);
        assert_eq!(named("message", "{}"), Named::OnlyStreaming);
        for (method, params) in [("progress", "{}"), ("tools/list_changed", "{}"), ("resources/updated", "[]")] {
            assert_eq!(named(method, params), Named::Nobody, "{method}");
        }
        assert_eq!(named("progress", r#"{"progressToken":7}"#), Named::Nobody);
        assert_eq!(named("tools/list_changed", &mark(strange)), Named::Request(StreamId { epoch: 1, number: 9 }));
        assert_eq!(pending.slot_of(StreamId { epoch: 1, number: 9 }), None);
        assert_eq!((pending.slot_of(StreamId { epoch: 1, number: 1 }), pending.only_streaming()), (Some(1), Some(2)));
        pending.register(call(3), true, 3).expect("it is new");
        assert_eq!(pending.only_streaming(), None, "nobody can tell whose it is");
        pending.leave(&second);
        assert_eq!(pending.only_streaming(), Some(3));
    }

    #[test]
    fn r9_an_id_is_waited_for_once_and_an_old_ticket_takes_no_newer_call_out() {
        let mut pending = Pending::default();
        let old = pending.register(call(1), true, 1).expect("it is new");
        assert!(pending.register(call(1), true, 2).is_none());
        assert_eq!(pending.take_only(|_| Some(())).map(|(entry, ())| entry.slot), Some(1));
        pending.register(call(1), true, 3).expect("it is free again");
        pending.leave(&old);
        assert!(pending.awaits(&wire::id_text(&call(1))));
        assert_eq!(pending.take_call(StreamId { epoch: 1, number: 1 }).map(|entry| entry.slot), Some(3));
    }
}
