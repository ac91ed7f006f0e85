//! Which eras of the protocol a server speaks: found once, kept for a while, looked into again when that is over (E5;
//! 2026-07-28, Streamable HTTP, Backward Compatibility).
//!
//! What an `initialize` comes to is evidence that costs nothing. Only who wants to know more asks `server/discover`, and
//! nobody who can be served without waits for that.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::wire::envelope::{self, Kind, walk};
use mainstay_core::wire::modern::{self, Era, Spoken};
use tokio::time::{Instant, timeout};

use crate::bridge::{Dressed, Response, exchange};
use crate::child::ask_sibling;
use crate::server::Server;
use crate::upstreams::{Destination, Upstreams};
use crate::wire::lock;

/// What is known of the eras that one server speaks.
#[derive(Debug, Default)]
pub(crate) struct Eras {
    known: Mutex<Known>,
    /// One probe at a time, for all who want to know.
    probing: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct Known {
    spoken: Spoken,
    /// Until when it is taken for granted whether the server is modern.
    until: Option<Instant>,
    /// What it last said of itself, and until when that need not be asked again.
    discovered: Option<(Bytes, Instant)>,
}

impl Eras {
    /// What is known, without asking.
    pub(crate) fn spoken(&self) -> Spoken {
        lock(&self.known).spoken
    }

    /// Notes whether the server opens sessions by `initialize`.
    pub(crate) fn note_legacy(&self, speaks: bool) {
        lock(&self.known).spoken.legacy = Some(speaks);
    }

    /// Notes whether the server is modern, for a while.
    pub(crate) fn note_modern(&self, speaks: bool) {
        let mut known = lock(&self.known);
        known.spoken.modern = Some(speaks);
        known.until = Some(Instant::now() + VERDICT_KEPT);
        if !speaks {
            known.discovered = None;
        }
    }

    /// Notes what the server said of itself: a raw `DiscoverResult`.
    pub(crate) fn note_discovered(&self, result: &Bytes) {
        self.note_modern(true);
        let kept = ttl(result).min(DISCOVERED_KEPT_MAX);
        lock(&self.known).discovered = Some((result.clone(), Instant::now() + kept));
    }

    /// Notes what asking the server has shown.
    pub(crate) fn note(&self, evidence: &Evidence) {
        match evidence {
            Evidence::Discovered(result) => self.note_discovered(result),
            Evidence::Modern => self.note_modern(true),
            Evidence::NotModern => self.note_modern(false),
            Evidence::None => {}
        }
    }

    /// What the server said of itself a moment ago.
    pub(crate) fn discovered(&self) -> Option<Bytes> {
        let known = lock(&self.known);
        known.discovered.as_ref().filter(|(_, until)| Instant::now() < *until).map(|(result, _)| result.clone())
    }

    /// The server has refused `initialize`, and is modern. Once may be that request's fault, if it has taken others.
    pub(crate) fn note_refused(&self) {
        let legacy = &mut lock(&self.known).spoken.legacy;
        *legacy = if *legacy == Some(true) { None } else { Some(false) };
    }

    /// The server is to be asked once more whether it is modern.
    pub(crate) fn forget_verdict(&self) {
        let mut known = lock(&self.known);
        (known.until, known.discovered) = (None, None);
    }

    /// The server has shown that what was known of it is not so any more.
    pub(crate) fn forget(&self) {
        *lock(&self.known) = Known::default();
    }

    /// Whether the server is modern, if that is known and not too long ago.
    fn verdict(&self) -> Option<bool> {
        let known = lock(&self.known);
        known.spoken.modern.filter(|_| known.until.is_some_and(|until| Instant::now() < until))
    }
}

impl Upstreams {
    /// The newest era that `server` speaks, found out if need be. `None` if it gives no evidence now: it is away, or wants
    /// credentials. Takes at most [`PROBE_BOUND`].
    ///
    /// A program that has taken `initialize` is not asked for more, and no process of it that somebody uses ever is: some
    /// exit at a request that they don't expect (E5).
    pub async fn era(self: &Arc<Self>, server: &Arc<Server>) -> Option<Era> {
        if let Some(era) = server.fixed_era() {
            return Some(era);
        }
        let destination = self.destination(server);
        let spoken = destination.eras.spoken();
        if !server.is_http() && spoken.legacy == Some(true) && spoken.modern.is_none() {
            return Some(Era::Legacy);
        }
        self.is_modern(&destination).await.map(|modern| if modern { Era::Modern } else { Era::Legacy })
    }

    /// What is known of the eras of `server`, without asking it.
    pub fn spoken(&self, server: &Arc<Server>) -> Spoken {
        match server.fixed_era() {
            Some(era) => Spoken::only(era),
            None => self.destination(server).eras.spoken(),
        }
    }

    /// Whether a new session with `server` is bridged without trying whether it takes `initialize`, which costs a program a
    /// process. It is tried in any case where it was taken before.
    pub(crate) fn prefers_modern(&self, server: &Arc<Server>) -> bool {
        let spoken = self.destination(server).eras.spoken();
        match spoken.legacy {
            Some(takes_it) => !takes_it,
            None => spoken.modern == Some(true) && !server.is_http(),
        }
    }

    /// Takes over what an earlier worker knew of the eras of `server`, `age` ago. What this worker has seen stands.
    pub fn recall(&self, server: &Arc<Server>, spoken: Spoken, age: Duration) {
        let destination = self.destination(server);
        let mut known = lock(&destination.eras.known);
        known.spoken.legacy = known.spoken.legacy.or(spoken.legacy);
        if known.spoken.modern.is_none() {
            known.spoken.modern = spoken.modern;
            known.until = Instant::now().checked_add(VERDICT_KEPT.saturating_sub(age));
        }
    }

    /// Whether the server at `destination` is modern: as it was found, or else asked. `None` without evidence.
    pub(crate) async fn is_modern(self: &Arc<Self>, destination: &Arc<Destination>) -> Option<bool> {
        if let Some(modern) = destination.eras.verdict() {
            return Some(modern);
        }
        let _turn = destination.eras.probing.lock().await;
        if let Some(modern) = destination.eras.verdict() {
            return Some(modern);
        }
        let evidence = timeout(PROBE_BOUND, self.probe(destination)).await.unwrap_or(Evidence::None);
        destination.eras.note(&evidence);
        tracing::debug!(server = %destination.server.name, evidence = evidence.as_str(), "asked a server for its era");
        match evidence {
            Evidence::Discovered(_) | Evidence::Modern => Some(true),
            Evidence::NotModern => Some(false),
            Evidence::None => None,
        }
    }

    async fn probe(self: &Arc<Self>, destination: &Arc<Destination>) -> Evidence {
        if !destination.server.is_http() {
            return match destination.shared.is_proven() {
                true => Evidence::Modern,
                false => ask_sibling(self, destination).await,
            };
        }
        let id = self.own_id();
        let dressed = Dressed::own(&id, "server/discover", None);
        match exchange(self, destination, &dressed).await {
            Ok(Response { status: 200..=299, body, .. }) => read_answer(&body),
            Ok(Response { status, body, .. }) => read_refusal(status, &body),
            Err(_) => Evidence::None,
        }
    }
}

/// What a probe has shown.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Evidence {
    /// The server is modern, and said this of itself.
    Discovered(Bytes),
    /// It is modern.
    Modern,
    /// It does not speak the revision that is spoken here.
    NotModern,
    /// Nothing.
    None,
}

impl Evidence {
    pub(crate) const fn as_str(&self) -> &'static str {
        match self {
            Self::Discovered(_) => "discovered",
            Self::Modern => "modern",
            Self::NotModern => "not modern",
            Self::None => "none",
        }
    }
}

/// Reads a response that says success.
pub(crate) fn read_answer(body: &Bytes) -> Evidence {
    let Ok(scanned) = envelope::scan(body) else { return Evidence::NotModern };
    match (scanned.kind, &scanned.result) {
        (Kind::Result, Some(result)) => match names_version(body, result, "supportedVersions") {
            true => Evidence::Discovered(Bytes::copy_from_slice(&body[result.clone()])),
            false => Evidence::NotModern,
        },
        (Kind::Error, _) => read_error(body, &scanned).unwrap_or(Evidence::NotModern),
        (Kind::Result | Kind::Request | Kind::Notification, _) => Evidence::NotModern,
    }
}

/// Reads a response that says otherwise.
fn read_refusal(status: u16, body: &[u8]) -> Evidence {
    let shown = envelope::scan(body).ok().and_then(|scanned| read_error(body, &scanned));
    match status {
        // Who it is, how often and whether anybody is there: nothing of that tells the era.
        401 | 403 | 407 | 408 | 425 | 429 => Evidence::None,
        400..=499 => shown.unwrap_or(Evidence::NotModern),
        _ => Evidence::None,
    }
}

/// What an error of the modern era shows; `None` if it is none.
fn read_error(body: &[u8], scanned: &envelope::Envelope) -> Option<Evidence> {
    let error = scanned.error.as_ref()?;
    match error_code(body, error)? {
        modern::UNSUPPORTED_VERSION => {
            let data = envelope::member(body, error, "data");
            let ours = data.is_some_and(|data| names_version(body, &data, "supported"));
            Some(if ours { Evidence::Modern } else { Evidence::NotModern })
        }
        code if modern::is_proof(code) => Some(Evidence::Modern),
        _ => None,
    }
}

/// The number of the error at `error` of `message`.
pub(crate) fn error_code(message: &[u8], error: &envelope::Span) -> Option<i64> {
    let span = envelope::member(message, error, "code")?;
    std::str::from_utf8(message.get(span)?).ok()?.parse().ok()
}

/// Whether the array `key` in the object at `object` of `message` names the revision that is spoken here.
pub(crate) fn names_version(message: &[u8], object: &envelope::Span, key: &str) -> bool {
    let Some(array) = envelope::member(message, object, key) else { return false };
    walk::elements(message, &array).any(|span| walk::says(&message[span], modern::VERSION))
}

/// For how long the result `result` may be used again.
fn ttl(result: &[u8]) -> Duration {
    let span = envelope::member(result, &(0..result.len()), "ttlMs");
    let text = span.and_then(|span| std::str::from_utf8(result.get(span)?).ok());
    Duration::from_millis(text.and_then(|text| text.parse().ok()).unwrap_or_default())
}

/// How long a probe may take.
pub const PROBE_BOUND: Duration = Duration::from_secs(5);

/// How long it is taken for granted whether a server is modern: one that was upgraded never says so by itself.
const VERDICT_KEPT: Duration = Duration::from_hours(1);

/// The longest that what a server said of itself is used again: a new session must see what has changed since.
const DISCOVERED_KEPT_MAX: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    fn answered(body: &str) -> Evidence {
        read_answer(&Bytes::copy_from_slice(body.as_bytes()))
    }

    #[test]
    fn e5_a_result_of_discover_proves_the_modern_era_and_only_with_our_revision() {
        let result = r#"{"supportedVersions":["2027-01-01","2026-07-28"],"ttlMs":9}"#;
        let body = format!(r#"{{"jsonrpc":"2.0","id":1,"result":{result}}}"#);
        assert_eq!(answered(&body), Evidence::Discovered(Bytes::copy_from_slice(result.as_bytes())));
        assert_eq!(
            answered(r#"{"jsonrpc":"2.0","id":1,"result":{"supportedVersions":["2025-11-25"]}}"#),
            Evidence::NotModern
        );
        assert_eq!(answered(r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32601,"message":""}}"#), Evidence::NotModern);
        assert_eq!(answered(r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32020,"message":""}}"#), Evidence::Modern);
        assert_eq!(answered("<html>"), Evidence::NotModern);
    }

    #[test]
    fn e5_other_4xx_are_legacy_and_what_tells_nothing_is_no_evidence() {
        let error = |code: i32, data: &str| {
            format!(r#"{{"jsonrpc":"2.0","id":null,"error":{{"code":{code},"message":"","data":{data}}}}}"#)
        };
        for (status, body, evidence) in [
            (400, error(-32022, r#"{"supported":["2026-07-28"]}"#), Evidence::Modern),
            (400, error(-32022, r#"{"supported":["2025-11-25"]}"#), Evidence::NotModern),
            (400, error(-32020, "0"), Evidence::Modern),
            (400, error(-32021, "0"), Evidence::Modern),
            (400, error(-32000, "0"), Evidence::NotModern),
            (400, String::new(), Evidence::NotModern),
            (404, error(-32601, "0"), Evidence::NotModern),
            (405, String::new(), Evidence::NotModern),
            (422, "expect initialize".to_owned(), Evidence::NotModern),
            (401, error(-32020, "0"), Evidence::None),
            (403, String::new(), Evidence::None),
            (429, String::new(), Evidence::None),
            (500, String::new(), Evidence::None),
            (503, error(-32001, "0"), Evidence::None),
            (302, String::new(), Evidence::None),
        ] {
            assert_eq!(read_refusal(status, body.as_bytes()), evidence, "{status} {body}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn e5_a_verdict_expires_and_what_a_server_said_even_sooner() {
        let eras = Eras::default();
        eras.note_legacy(true);
        eras.note_discovered(&Bytes::from_static(br#"{"ttlMs":3600000}"#));
        assert_eq!((eras.verdict(), eras.discovered().is_some()), (Some(true), true));
        tokio::time::advance(DISCOVERED_KEPT_MAX).await;
        assert_eq!((eras.verdict(), eras.discovered()), (Some(true), None));
        tokio::time::advance(VERDICT_KEPT).await;
        assert_eq!((eras.verdict(), eras.spoken().era()), (None, Some(Era::Modern)));
        eras.forget();
        assert_eq!(eras.spoken(), Spoken::default());
    }
}
