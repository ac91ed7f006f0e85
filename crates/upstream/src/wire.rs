//! Small readings of messages that both ways to a server need.

use std::borrow::Cow;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use mainstay_core::wire::envelope::{self, Envelope, Kind};

/// The answer to a server's `ping`; the gateway answers each side itself (R7).
pub(crate) fn pong(id: &[u8]) -> Bytes {
    Bytes::from(envelope::result_message(id, b"{}"))
}

/// `notifications/initialized`.
pub(crate) fn initialized() -> Bytes {
    Bytes::from(envelope::notification_message("notifications/initialized", None))
}

/// Whether two raw ids are the same, however their strings are escaped by now.
pub(crate) fn same_id(one: &[u8], other: &[u8]) -> bool {
    one == other
        || matches!((envelope::unescape(one), envelope::unescape(other)), (Some(one), Some(other)) if one == other)
}

/// The text by which an id is looked up: that of the string, or the number as it is spelled.
pub(crate) fn id_text(raw: &[u8]) -> Cow<'_, str> {
    envelope::unescape(raw).unwrap_or_else(|| String::from_utf8_lossy(raw))
}

/// What a message from a server is to its receiver.
pub(crate) enum Sort {
    /// A `ping` request.
    Ping,
    /// Any other request, or a notification.
    Message,
    /// An answer, or an error that names no request.
    Response,
}

/// Tells which it is.
pub(crate) fn sort(envelope: &Envelope, message: &[u8]) -> Sort {
    match envelope.kind {
        Kind::Request if envelope.method_name(message).as_deref() == Some("ping") => Sort::Ping,
        Kind::Request | Kind::Notification => Sort::Message,
        Kind::Result | Kind::Error => Sort::Response,
    }
}

/// Whether `message` is an answer.
pub(crate) fn is_response(message: &[u8]) -> bool {
    envelope::scan(message).is_ok_and(|envelope| matches!(envelope.kind, Kind::Result | Kind::Error))
}

/// The raw id of `message`, unless it is absent or null.
pub(crate) fn id_of<'a>(envelope: &Envelope, message: &'a [u8]) -> Option<&'a [u8]> {
    message.get(envelope.id.clone()?).filter(|id| !envelope::is_null(id))
}

/// The text of string `key` in the object `json`.
pub(crate) fn text_member(json: &[u8], key: &str) -> Option<String> {
    let span = envelope::member(json, &(0..json.len()), key)?;
    envelope::unescape(json.get(span)?).map(Cow::into_owned)
}

/// JSON-RPC's number for a failure that is nobody's fault in particular.
pub(crate) const INTERNAL_ERROR: i64 = -32603;

/// A lock whose holder panicked is still good: nothing here is left half done under one.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r9_ids_are_compared_by_their_text() {
        assert!(same_id(br#""1.2.\"a\"""#, br#""1.2.\u0022a\u0022""#));
        assert!(same_id(b"1", b"1"));
        assert!(!same_id(b"1", br#""1""#));
        assert!(!same_id(br#""a""#, br#""b""#));
        assert_eq!(id_text(br#""1.2.\u0022a\u0022""#), "1.2.\"a\"");
    }
}
