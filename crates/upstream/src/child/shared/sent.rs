//! One request of many at the same process: under ids and tokens of the gateway's on the way there, and under the caller's
//! own on the way back. No other byte changes.

use bytes::Bytes;
use mainstay_core::call::{RoutedId, StreamId};
use mainstay_core::wire::envelope::{self, Envelope, Kind, Span, walk};
use mainstay_core::wire::modern::edit::{self, Edits};
use mainstay_core::wire::modern::{self, Meta, SUBSCRIPTION_ID};

use super::super::table::LISTENING_BIT;

/// A request as it goes to the process, and what is to be put back into what comes of it.
pub(crate) struct Sent {
    /// Under which the keeper knows it.
    pub(super) stream: StreamId,
    /// The raw id that it goes out under.
    pub(super) id: Bytes,
    pub(super) message: Bytes,
    /// Whether it has asked for log messages.
    pub(super) wants_log: bool,
    pub(super) listens: bool,
    /// Whether it may be carried out twice.
    pub(super) may_repeat: bool,
    original: Bytes,
    token: Option<Bytes>,
}

/// How a request is to be treated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Manner {
    /// Whether its answer is a stream that may last for days (`subscriptions/listen`).
    pub(crate) listens: bool,
    /// Whether it may be carried out twice: it is sent once more if the process ends.
    pub(crate) may_repeat: bool,
}

impl Sent {
    /// `message` under a name of its own, of which the number is `number` in this epoch. `None` if it is no request.
    pub(super) fn new(message: &Bytes, (epoch, number): (u64, u64), manner: Manner) -> Option<Self> {
        let scanned = envelope::scan(message).ok().filter(|scanned| scanned.kind == Kind::Request)?;
        let span = scanned.id.clone()?;
        let meta = Meta::read(message, &scanned);
        let number = if manner.listens { number | LISTENING_BIT } else { number };
        let stream = StreamId { epoch, number };
        let id = Bytes::from(id_of(stream));
        let mut edits: Edits = vec![(span.clone(), id.to_vec())];
        edits.extend(meta.progress_token.clone().map(|span| (span, id.to_vec())));
        Some(Self {
            stream,
            message: edit::apply(message, edits).into(),
            id,
            wants_log: meta.log_level.is_some(),
            listens: manner.listens,
            may_repeat: manner.may_repeat,
            original: message.slice(span),
            token: meta.progress_token.map(|span| message.slice(span)),
        })
    }

    /// What the process said for it, as its caller knows it. `None` if it can be of no use to the caller.
    pub(super) fn restored(&self, message: &Bytes, scanned: &Envelope) -> Option<Bytes> {
        let mut edits = Edits::new();
        match scanned.kind {
            Kind::Result | Kind::Error => {
                edits.extend(scanned.id.clone().map(|span| (span, self.original.to_vec())));
                edits.extend(scanned.result.as_ref().and_then(|result| self.marked(message, result)));
            }
            Kind::Notification => {
                let params = scanned.params.as_ref();
                if scanned.method_name(message).as_deref() == Some("notifications/progress") {
                    let token = params.and_then(|params| envelope::member(message, params, "progressToken"))?;
                    edits.push((token, self.token.as_ref()?.to_vec()));
                }
                edits.extend(params.and_then(|params| self.marked(message, params)));
            }
            Kind::Request => return None,
        }
        Some(if edits.is_empty() { message.clone() } else { edit::apply(message, edits).into() })
    }

    /// The mark of the subscription in the `_meta` of `holder`.
    fn marked(&self, message: &[u8], holder: &Span) -> Option<(Span, Vec<u8>)> {
        let meta = envelope::member(message, holder, "_meta")?;
        Some((envelope::member(message, &meta, SUBSCRIPTION_ID)?, self.original.to_vec()))
    }

    /// What is told to who listens after the process was started anew: `acknowledged` is what it says that it listens to
    /// now, and all of that may have changed.
    pub(super) fn changes(&self, acknowledged: &[u8], scanned: &Envelope) -> Vec<Bytes> {
        let Some(params) = &scanned.params else { return Vec::new() };
        let Some(listened) = envelope::member(acknowledged, params, "notifications") else { return Vec::new() };
        let mut changes = Vec::new();
        for (key, method) in [
            ("toolsListChanged", "notifications/tools/list_changed"),
            ("promptsListChanged", "notifications/prompts/list_changed"),
            ("resourcesListChanged", "notifications/resources/list_changed"),
        ] {
            let says = envelope::member(acknowledged, &listened, key);
            if says.is_some_and(|span| acknowledged[span] == *b"true") {
                changes.push(self.change(method, None));
            }
        }
        if let Some(uris) = envelope::member(acknowledged, &listened, "resourceSubscriptions") {
            let uris = walk::elements(acknowledged, &uris);
            changes.extend(uris.map(|uri| self.change("notifications/resources/updated", Some(&acknowledged[uri]))));
        }
        changes
    }

    fn change(&self, method: &str, uri: Option<&[u8]>) -> Bytes {
        let mut params = b"{".to_vec();
        if let Some(uri) = uri {
            params.extend_from_slice(b"\"uri\":");
            params.extend_from_slice(uri);
            params.push(b',');
        }
        params.extend_from_slice(format!("\"_meta\":{{\"{SUBSCRIPTION_ID}\":").as_bytes());
        params.extend_from_slice(&self.original);
        params.extend_from_slice(b"}}");
        envelope::notification_message(method, Some(&params)).into()
    }

    /// The end of what was listened to, in order: for a process that takes the request back instead.
    pub(super) fn complete(&self) -> Bytes {
        let head = format!("{{\"resultType\":\"complete\",\"_meta\":{{\"{SUBSCRIPTION_ID}\":");
        let result = [head.as_bytes(), &self.original, b"}}"].concat();
        envelope::result_message(&self.original, &result).into()
    }
}

/// The raw id under which the request of that name goes to a process.
fn id_of(stream: StreamId) -> Vec<u8> {
    RoutedId { stream, original: Bytes::from_static(NO_ORIGINAL) }.encode()
}

/// What tells a process that nobody wants the answer of that request any more (2026-07-28, Cancellation). It says of which
/// era it is, for programs that speak both.
pub(super) fn cancellation(stream: StreamId) -> Vec<u8> {
    let (version, capabilities) = (modern::PROTOCOL_VERSION, modern::CLIENT_CAPABILITIES);
    let head = format!("{{\"_meta\":{{\"{version}\":\"{}\",\"{capabilities}\":{{}}}},\"requestId\":", modern::VERSION);
    let params = [head.as_bytes(), &id_of(stream), b"}"].concat();
    envelope::notification_message("notifications/cancelled", Some(&params))
}

/// In the place of the id of a caller, which stays here: what is cancelled must be known by what the keeper knows.
const NO_ORIGINAL: &[u8] = b"0";

#[cfg(test)]
mod tests {
    use super::*;

    const MANNER: Manner = Manner { listens: false, may_repeat: false };

    fn sent(message: &str, manner: Manner) -> Sent {
        Sent::new(&Bytes::copy_from_slice(message.as_bytes()), (3, 5), manner).expect("a request")
    }

    fn restored(sent: &Sent, message: &str) -> Option<String> {
        let message = Bytes::copy_from_slice(message.as_bytes());
        let restored = sent.restored(&message, &envelope::scan(&message).expect("a message"))?;
        Some(String::from_utf8(restored.to_vec()).expect("text"))
    }

    #[test]
    fn e1_only_ids_and_tokens_change_on_the_way_to_a_shared_process_and_back() {
        let request = r#"{ "params":{"a":1.0 ,"_meta":{"progressToken":"t\u00e9","k":1}},"id":"a\u0062","method":"m","jsonrpc":"2.0"}"#;
        let sent = sent(request, MANNER);
        let expected = r#"{ "params":{"a":1.0 ,"_meta":{"progressToken":"3.5.0","k":1}},"id":"3.5.0","method":"m","jsonrpc":"2.0"}"#;
        assert_eq!(sent.message, expected.as_bytes());
        let progress = |token: &str| {
            format!(
                r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{ "progress":1.50,"progressToken":{token}}}}}"#
            )
        };
        assert_eq!(restored(&sent, &progress("\"3.5.0\"")), Some(progress(r#""t\u00e9""#)));
        let answer = |id: &str| format!(r#"{{"result":{{"n":1.0}}, "id":{id},"jsonrpc":"2.0"}}"#);
        assert_eq!(restored(&sent, &answer("\"3.5.0\"")), Some(answer(r#""a\u0062""#)));
        let log = r#"{"jsonrpc":"2.0","method":"notifications/message","params":{"data":1.0}}"#;
        assert_eq!(restored(&sent, log).as_deref(), Some(log));
    }

    #[test]
    fn e1_the_marks_of_a_subscription_are_the_clients_own() {
        let sent =
            sent(r#"{"jsonrpc":"2.0","id":7,"method":"subscriptions/listen"}"#, Manner { listens: true, ..MANNER });
        let id = String::from_utf8(sent.id.to_vec()).expect("text");
        let change = |id: &str| {
            let mark = format!(r#"{{"_meta":{{"{SUBSCRIPTION_ID}":{id}}}}}"#);
            format!(r#"{{"jsonrpc":"2.0","method":"notifications/tools/list_changed","params":{mark}}}"#)
        };
        assert_eq!(restored(&sent, &change(&id)), Some(change("7")));
        let end = |id: &str| {
            let mark = format!(r#"{{"{SUBSCRIPTION_ID}":{id}}}"#);
            format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{{"resultType":"complete","_meta":{mark}}}}}"#)
        };
        assert_eq!(restored(&sent, &end(&id)), Some(end("7")));
        assert_eq!(sent.complete(), end("7").as_bytes());
        let acknowledged = r#"{"jsonrpc":"2.0","method":"notifications/subscriptions/acknowledged","params":
            {"notifications":{"toolsListChanged":true,"promptsListChanged":false,"resourceSubscriptions":["u"]}}}"#;
        let scanned = envelope::scan(acknowledged.as_bytes()).expect("a message");
        let updated = change("7")
            .replace("tools/list_changed", "resources/updated")
            .replace("{\"_meta", "{\"uri\":\"u\",\"_meta");
        assert_eq!(sent.changes(acknowledged.as_bytes(), &scanned), [change("7"), updated]);
    }

    #[test]
    fn r8_what_is_taken_back_is_known_by_what_the_keeper_knows() {
        let message = cancellation(StreamId { epoch: 3, number: 5 });
        let scanned = envelope::scan(&message).expect("a message");
        let id = envelope::member(&message, &scanned.params.expect("params"), "requestId").expect("an id");
        assert_eq!(&message[id], b"\"3.5.0\"");
    }
}
