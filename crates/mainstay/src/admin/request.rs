//! What comes in with a request to the admin API, checked before anybody acts on it.

use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Query, Request};
use http::StatusCode;
use http::request::Parts;
use mainstay_core::id::SessionRef;
use serde::de::DeserializeOwned;

use super::problem::{Code, Problem};
use crate::runtime::spawn;

/// The body of an order: a JSON object, or nothing for an order without wishes. Its size is bounded by the router.
pub(super) struct Order<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Order<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let bytes = body(request, state).await?;
        let text: &[u8] = if bytes.is_empty() { b"{}" } else { &bytes };
        let order = serde_json::from_slice(text);
        order.map(Self).map_err(|error| Problem::new(Code::RequestInvalid, format!("the body: {error}")))
    }
}

/// A body that holds a secret, and must be there. Whatever is wrong with it, nothing of it is repeated.
pub(super) struct Confided<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Confided<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let bytes = body(request, state).await?;
        let malformed = || Problem::new(Code::RequestInvalid, "the body is not the JSON object that is wanted here");
        serde_json::from_slice(&bytes).map(Self).map_err(|_| malformed())
    }
}

/// The whole body, within the router's bound.
async fn body<S: Send + Sync>(request: Request, state: &S) -> Result<Bytes, Problem> {
    Bytes::from_request(request, state).await.map_err(|rejection| match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => {
            Problem::new(Code::BodyTooLarge, format!("a body has at most {BODY_BYTES_MAX} bytes"))
        }
        _ => Problem::new(Code::RequestInvalid, "the body could not be read"),
    })
}

/// The query of a request, in which nothing may be that is not known: a filter with a typo must not list everything.
pub(super) struct Asked<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Asked<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let asked = Query::<T>::from_request_parts(parts, state).await;
        asked
            .map(|Query(asked)| Self(asked))
            .map_err(|rejection| Problem::new(Code::RequestInvalid, rejection.body_text()))
    }
}

/// A session's ref.
pub(super) fn session_ref(text: &str) -> Result<SessionRef, Problem> {
    let malformed = || Problem::new(Code::RequestInvalid, "a session's ref is `s-` and ten hexadecimal digits");
    SessionRef::parse(text).ok_or_else(malformed)
}

/// A number from a path.
pub(super) fn number(text: &str) -> Result<u64, Problem> {
    text.parse().map_err(|_| Problem::new(Code::RequestInvalid, "the path wants a number there"))
}

/// A grace as people write it: `500ms`, `5s`, `2m`, `1h`, `0`.
pub(super) fn grace(text: &str) -> Result<Duration, Problem> {
    let unit_at = text.find(|symbol: char| !symbol.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(unit_at);
    let count = digits.parse::<u64>().ok();
    let millis = match unit {
        "ms" => count,
        "s" => count.and_then(|count| count.checked_mul(1000)),
        "m" => count.and_then(|count| count.checked_mul(60_000)),
        "h" => count.and_then(|count| count.checked_mul(3_600_000)),
        "" => count.filter(|count| *count == 0),
        _ => None,
    };
    let grace = millis.map(Duration::from_millis).filter(|grace| *grace <= GRACE_MAX);
    grace.ok_or_else(|| {
        Problem::new(Code::RequestInvalid, "`grace` is a duration of at most a day: `500ms`, `5s`, `2m`, `1h`, `0`")
    })
}

/// Carries an order out to its end, also if the client that gave it goes away meanwhile: half an ending is none.
pub(super) async fn carried_out<T, F>(order: F) -> Result<T, Problem>
where
    T: Send + 'static,
    F: Future<Output = Result<T, Problem>> + Send + 'static,
{
    spawn(order).await.unwrap_or_else(|_| Err(Problem::new(Code::Unavailable, "the order failed; see the log")))
}

/// The largest body of an order.
pub(super) const BODY_BYTES_MAX: usize = 64 * 1024;
const GRACE_MAX: Duration = Duration::from_hours(24);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grace_has_a_unit_and_a_bound() {
        for (text, millis) in [("500ms", 500), ("5s", 5000), ("2m", 120_000), ("24h", 86_400_000), ("0", 0)] {
            assert_eq!(grace(text).unwrap(), Duration::from_millis(millis), "{text}");
        }
        for text in ["", "5", "s", "25h", "-1s", "1d", "99999999999999999999s", "18446744073709551615h"] {
            assert!(grace(text).is_err(), "{text}");
        }
    }
}
