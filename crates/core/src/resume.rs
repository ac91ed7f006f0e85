//! What is kept of the far side: upstream sessions, the DELETEs that are owed to them, and what a server last said of itself.
//!
//! All of it serves continuity and none of it grants anything. A resume record or a card that is lost costs a
//! handshake; an owed delete must be settled, or shown as unsettled (U7).

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use bytes::Bytes;

use crate::id::{ServerName, SessionKey};
use crate::session::head;
use crate::time::Timestamp;
use crate::wire::modern::Spoken;

/// The id of an upstream session: a bearer secret of the far side. `Debug` hides it, and there is no `Display`.
#[derive(Clone, PartialEq, Eq)]
pub struct UpstreamId(Box<str>);

impl UpstreamId {
    /// The largest id that is accepted, in bytes.
    pub const BYTES_MAX: usize = 1024;

    /// The id that an upstream gave. `None` unless it is visible ASCII (2025-11-25, Transports, Session Management) of
    /// at most [`BYTES_MAX`](Self::BYTES_MAX).
    pub fn parse(text: &str) -> Option<Self> {
        let visible = text.bytes().all(|byte| (0x21..=0x7e).contains(&byte));
        ((1..=Self::BYTES_MAX).contains(&text.len()) && visible).then(|| Self(text.into()))
    }

    /// The secret itself, for the header that carries it and for the sealed row that keeps it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for UpstreamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UpstreamId(…)")
    }
}

/// How an instance came to a session (U6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Continuity {
    /// Opened for the session, and never lost.
    Fresh,
    /// Taken up again by a later life of the worker; nothing was lost.
    Resumed,
    /// Made again because the earlier one was lost, and its state with it.
    Remade,
}

impl Continuity {
    /// The word for it in lists and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Fresh => "fresh",
            Self::Resumed => "resumed",
            Self::Remade => "remade",
        }
    }
}

impl fmt::Display for Continuity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What a later worker needs to go on with an instance as if nothing had happened (U1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResumeRecord {
    /// The key of the instance: the session's, or a digest that stands for a shared instance.
    pub key: SessionKey,
    /// The server.
    pub server: ServerName,
    /// Where the upstream session lives; empty for stdio, and for a session that is a connection (HTTP+SSE).
    pub url: Box<str>,
    /// Digest of the fields that define the upstream session and of the names of its headers and credentials, never of
    /// their values. Another one now → the record is dropped with an owed delete (U2).
    pub fingerprint: [u8; 32],
    /// The upstream's own session id, if it gave one.
    pub upstream_id: Option<UpstreamId>,
    /// The revision negotiated with the server.
    pub version: Box<str>,
    /// The server's whole `initialize` result: raw JSON with capabilities, server info, instructions.
    pub initialize_result: Bytes,
    /// The level that the client set, to be set again.
    pub log_level: Option<Box<str>>,
    /// The resources that the client subscribed to, to be subscribed to again.
    pub subscriptions: BTreeSet<Box<str>>,
    /// Whether the server has taken our `notifications/initialized` in this very instance. False, where it was not seen
    /// to: it is told again then.
    pub told: bool,
    /// Where the listening stream stood.
    pub last_event_id: Option<Box<str>>,
    /// When the record was last written.
    pub saved_at: Timestamp,
    /// When the instance was last used, as far as the record knows.
    pub used_at: Timestamp,
    /// How the session came to the instance.
    pub continuity: Continuity,
    /// How often the instance was made again.
    pub remade_count: u32,
    /// Why it was the last time.
    pub remade_reason: Option<Box<str>>,
}

impl ResumeRecord {
    /// How long a record without use is kept (U10).
    pub const TTL: Duration = Duration::from_secs(30 * 24 * 3600);

    /// Whether the record has outlived its use at `now`.
    pub fn is_stale(&self, now: Timestamp) -> bool {
        now.since(self.used_at.max(self.saved_at)) >= Self::TTL
    }

    /// The DELETE that is owed when the record is dropped at `now`; `None` if the upstream gave no id.
    pub fn owed_delete(&self, now: Timestamp) -> Option<OwedDelete> {
        let upstream_id = self.upstream_id.clone()?;
        Some(OwedDelete {
            id: 0,
            session: Some(self.key),
            server: self.server.clone(),
            url: self.url.clone(),
            upstream_id,
            version: self.version.clone(),
            owed_at: now,
            attempts: 0,
            next_at: now,
            last_error: None,
        })
    }
}

/// A DELETE still owed to an upstream, for a session that nobody will use again (U7).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwedDelete {
    /// The store's number for it; 0 until it is stored.
    pub id: u64,
    /// The session that it is owed for; unknown of one that an early version has stored.
    pub session: Option<SessionKey>,
    /// The server.
    pub server: ServerName,
    /// Where the upstream session lives.
    pub url: Box<str>,
    /// Which one it is.
    pub upstream_id: UpstreamId,
    /// The revision that was negotiated with it.
    pub version: Box<str>,
    /// Since when it is owed.
    pub owed_at: Timestamp,
    /// How often it was tried.
    pub attempts: u32,
    /// When to try again; [`NEVER`](Self::NEVER) once it is left to expire.
    pub next_at: Timestamp,
    /// Why the last try failed; at most [`ERROR_CHARS_MAX`](Self::ERROR_CHARS_MAX) characters, never a secret.
    pub last_error: Option<Box<str>>,
}

impl OwedDelete {
    /// How often a DELETE is tried.
    pub const ATTEMPTS_MAX: u32 = 10;
    /// How long after the first failure it is tried again; each later wait is twice as long.
    pub const WAIT_MIN: Duration = Duration::from_secs(10);
    /// The longest wait between two tries.
    pub const WAIT_MAX: Duration = Duration::from_secs(3600);
    /// How long one that is left to expire stays listed.
    pub const LISTED: Duration = Duration::from_secs(7 * 24 * 3600);
    /// The most characters that are kept of why a try failed.
    pub const ERROR_CHARS_MAX: usize = 256;
    /// The time that never comes.
    pub const NEVER: Timestamp = Timestamp::from_unix_millis(i64::MAX as u64);

    /// What follows from a try that failed at `now` because of `error`.
    #[must_use]
    pub fn postponed(&self, now: Timestamp, error: &str) -> Self {
        let attempts = self.attempts.saturating_add(1);
        let next_at = if attempts < Self::ATTEMPTS_MAX {
            let wait = Self::WAIT_MIN.saturating_mul(1 << (attempts - 1));
            now.plus(wait.min(Self::WAIT_MAX))
        } else {
            Self::NEVER
        };
        let last_error = Some(head(error, Self::ERROR_CHARS_MAX));
        Self { attempts, next_at, last_error, ..self.clone() }
    }

    /// Whether it is not tried any more: the upstream will forget the session by itself.
    pub const fn is_left_to_expire(&self) -> bool {
        self.attempts >= Self::ATTEMPTS_MAX
    }
}

/// What is known of a server, so that `initialize` can be answered while it is down (U8).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerCard {
    /// The server.
    pub server: ServerName,
    /// As in [`ResumeRecord::fingerprint`]: of another definition of the server nothing is known.
    pub fingerprint: [u8; 32],
    /// Its last `initialize` result, or what that would be: raw JSON. Empty if only its eras are known.
    pub initialize_result: Bytes,
    /// Which eras of the protocol it was found to speak (E5).
    pub spoken: Spoken,
    /// When it said so.
    pub saved_at: Timestamp,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owed() -> OwedDelete {
        OwedDelete {
            id: 7,
            session: Some(SessionKey::from_bytes([7; 32])),
            server: ServerName::parse("files").expect("a name"),
            url: "http://127.0.0.1:1/mcp".into(),
            upstream_id: UpstreamId::parse("secret").expect("an id"),
            version: "2025-11-25".into(),
            owed_at: Timestamp::default(),
            attempts: 0,
            next_at: Timestamp::default(),
            last_error: None,
        }
    }

    #[test]
    fn u7_tries_are_bounded_and_ever_further_apart() {
        let (mut owed, mut waits) = (owed(), Vec::new());
        while !owed.is_left_to_expire() {
            let now = owed.next_at;
            owed = owed.postponed(now, "down");
            waits.push(owed.next_at.since(now).as_secs());
        }
        assert_eq!(waits[..9], [10, 20, 40, 80, 160, 320, 640, 1280, 2560]);
        assert_eq!((waits.len(), owed.next_at), (10, OwedDelete::NEVER));
        assert_eq!(owed.postponed(Timestamp::default(), "down").next_at, OwedDelete::NEVER);
    }

    #[test]
    fn u7_the_last_failure_is_kept_and_bounded() {
        let failed = owed().postponed(Timestamp::default(), &"é".repeat(OwedDelete::ERROR_CHARS_MAX + 1));
        assert_eq!(failed.last_error.as_deref(), Some(&*"é".repeat(OwedDelete::ERROR_CHARS_MAX)));
        assert_eq!(
            failed.postponed(Timestamp::default(), "HTTP status 503").last_error.as_deref(),
            Some("HTTP status 503")
        );
    }

    #[test]
    fn i6_an_upstream_id_hides_itself() {
        let shown = format!("{:?}", owed());
        assert!(!shown.contains("secret") && shown.contains("UpstreamId(…)"), "{shown}");
        for bad in ["", "a b", "é", &"x".repeat(UpstreamId::BYTES_MAX + 1)] {
            assert_eq!(UpstreamId::parse(bad), None, "{bad:?}");
        }
    }
}
