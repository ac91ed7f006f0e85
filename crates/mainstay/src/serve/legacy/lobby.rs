//! The open event streams of clients of 2024-11-05, by the endpoint that each was told.
//!
//! An endpoint is valid before there is a session: the id in it is drawn when the stream is opened, and a session is
//! opened under it by `initialize`, once. Until then nothing of it exists but this table. A stream may also be bound to a
//! session that its client had before, or to a second one that it opened; the endpoint then means that one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::code::Code;
use mainstay_core::id::{ServerName, SessionKey};
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::engine::live::Live;
use crate::engine::{Caller, Reading, Refused};

/// Every open stream.
#[derive(Default)]
pub struct Lobby {
    streams: Mutex<Streams>,
}

#[derive(Default)]
struct Streams {
    open: BTreeMap<SessionKey, Seated>,
    /// Endpoints whose stream is gone and that meant another session than their own: their clients may go on using them.
    former: BTreeMap<SessionKey, Seated>,
    next_number: u64,
}

struct Seated {
    number: u64,
    server: ServerName,
    caller: Caller,
    standing: Standing,
    words: mpsc::Sender<Word>,
    since: Instant,
}

/// What a stream's endpoint means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Nothing yet: its client has not initialized.
    Fresh,
    /// Its client has sent `initialize`, which is not answered yet.
    Opening,
    /// A session.
    Bound(SessionKey),
}

/// What a stream is told.
pub(super) enum Word {
    /// A message for the client of a stream that has no session.
    Say(Bytes),
    /// The session that the stream is of from now on.
    Session(Arc<Live>, Reading),
}

/// A stream's place in the table, given back when dropped.
pub(super) struct Seat {
    lobby: Arc<Lobby>,
    key: SessionKey,
    number: u64,
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut streams = self.lobby.streams.lock();
        if streams.open.get(&self.key).is_none_or(|seated| seated.number != self.number) {
            return;
        }
        let Some(seated) = streams.open.remove(&self.key) else { return };
        if matches!(seated.standing, Standing::Bound(session) if session != self.key) {
            streams.keep_former(self.key, seated);
        }
    }
}

impl Seat {
    /// The endpoint.
    pub(super) fn key(&self) -> SessionKey {
        self.key
    }

    /// Whether the stream still waits for its client to initialize.
    pub(super) fn is_fresh(&self) -> bool {
        let streams = self.lobby.streams.lock();
        streams
            .open
            .get(&self.key)
            .is_some_and(|seated| seated.number == self.number && seated.standing == Standing::Fresh)
    }
}

impl Lobby {
    /// Takes in the stream of `caller` at `server` whose endpoint is `key`. A stream of the same endpoint is replaced: who
    /// comes last is the one that listens.
    ///
    /// # Errors
    /// [`Code::LimitReached`] if too many wait for `initialize`.
    pub(super) fn seat(
        self: &Arc<Self>,
        key: SessionKey,
        server: ServerName,
        caller: Caller,
        standing: Standing,
    ) -> Result<(Seat, mpsc::Receiver<Word>), Refused> {
        let (words, heard) = mpsc::channel(WORDS_MAX);
        let mut streams = self.streams.lock();
        if standing == Standing::Fresh && streams.open.len() >= FRESH_MAX {
            let fresh = streams.open.values().filter(|seated| seated.standing == Standing::Fresh).count();
            if fresh >= FRESH_MAX {
                return Err(Refused::new(Code::LimitReached, "too many event streams wait for `initialize`; wait"));
            }
        }
        streams.next_number += 1;
        let number = streams.next_number;
        streams.former.remove(&key);
        streams.open.insert(key, Seated { number, server, caller, standing, words, since: Instant::now() });
        Ok((Seat { lobby: Arc::clone(self), key, number }, heard))
    }

    /// What the endpoint `key` means to `caller` at `server`; `None` if only its id can tell.
    pub(super) fn standing(&self, key: SessionKey, server: &ServerName, caller: &Caller) -> Option<Standing> {
        let streams = self.streams.lock();
        let seated = streams.open.get(&key).or_else(|| streams.former.get(&key));
        seated.filter(|seated| seated.is_of(server, caller)).map(|seated| seated.standing)
    }

    /// Notes that the client of `key` is opening a session. What the endpoint meant before.
    ///
    /// # Errors
    /// [`Code::SessionMissing`] if its stream is not open, [`Code::RequestInvalid`] if it is opening one already.
    pub(super) fn begin(&self, key: SessionKey, server: &ServerName, caller: &Caller) -> Result<Standing, Refused> {
        let mut streams = self.streams.lock();
        let seated = streams.open.get_mut(&key).filter(|seated| seated.is_of(server, caller));
        let seated = seated.ok_or_else(|| {
            let text = "no event stream is open for this endpoint; GET the event stream first";
            Refused::new(Code::SessionMissing, text)
        })?;
        if seated.standing == Standing::Opening {
            return Err(Refused::new(Code::RequestInvalid, "an earlier `initialize` is not answered yet"));
        }
        Ok(std::mem::replace(&mut seated.standing, Standing::Opening))
    }

    /// Takes back that the client of `key` is opening a session.
    pub(super) fn undo(&self, key: SessionKey, before: Standing) {
        if let Some(seated) = self.streams.lock().open.get_mut(&key) {
            seated.standing = before;
        }
    }

    /// Binds the stream of `key` to a session. `false` if it is not open any more, or takes nothing more.
    pub(super) fn bind(&self, key: SessionKey, live: &Arc<Live>, reading: Reading) -> bool {
        let mut streams = self.streams.lock();
        let Some(seated) = streams.open.get_mut(&key) else { return false };
        let told = seated.words.try_send(Word::Session(Arc::clone(live), reading)).is_ok();
        if told {
            seated.standing = Standing::Bound(live.key);
        }
        told
    }

    /// Tells `caller` something on its stream `key`, which may have no session. A stranger's is left alone.
    pub(super) fn say(&self, key: SessionKey, server: &ServerName, caller: &Caller, message: Bytes) {
        let streams = self.streams.lock();
        if let Some(seated) = streams.open.get(&key).filter(|seated| seated.is_of(server, caller)) {
            // A client that does not read what it is told has the HTTP status.
            let _ = seated.words.try_send(Word::Say(message));
        }
    }

    /// The one stream of `caller` at `server` whose client has not initialized by `now`, though it had the time; `None` if
    /// there are several: nothing is guessed.
    pub(super) fn only_fresh(&self, server: &ServerName, caller: &Caller, now: Instant) -> Option<SessionKey> {
        let streams = self.streams.lock();
        let is_fresh = |seated: &Seated| seated.standing == Standing::Fresh && seated.is_of(server, caller);
        let mut fresh = streams.open.iter().filter(|(_, seated)| is_fresh(seated));
        let (key, seated) = fresh.next()?;
        (fresh.next().is_none() && now.duration_since(seated.since) >= RECONNECT_GRACE).then_some(*key)
    }
}

impl Streams {
    fn keep_former(&mut self, key: SessionKey, seated: Seated) {
        if self.former.len() >= FORMER_MAX {
            let oldest = self.former.iter().min_by_key(|(_, seated)| seated.number).map(|(key, _)| *key);
            oldest.and_then(|oldest| self.former.remove(&oldest));
        }
        self.former.insert(key, seated);
    }
}

impl Seated {
    fn is_of(&self, server: &ServerName, caller: &Caller) -> bool {
        self.server == *server && self.caller == *caller
    }
}

/// After how long without `initialize` a client is taken for one that has a session already.
pub(super) const RECONNECT_GRACE: Duration = Duration::from_secs(2);
/// The most streams that wait for `initialize`.
const FRESH_MAX: usize = 4096;
/// How many endpoints are remembered that meant another session than their own.
const FORMER_MAX: usize = 1024;
/// How many words may wait for a stream.
const WORDS_MAX: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use mainstay_core::principal::Principal;

    fn key(byte: u8) -> SessionKey {
        SessionKey::from_bytes([byte; 32])
    }

    fn server() -> ServerName {
        ServerName::parse("files").expect("a name")
    }

    fn caller(name: &str) -> Caller {
        Caller { principal: Principal::Token(name.into()), agent: None }
    }

    #[test]
    fn s4_an_endpoint_means_nothing_to_a_stranger() {
        let lobby = Arc::new(Lobby::default());
        let seat = lobby.seat(key(1), server(), caller("alice"), Standing::Fresh).expect("a seat");
        assert_eq!(lobby.standing(key(1), &server(), &caller("alice")), Some(Standing::Fresh));
        assert_eq!(lobby.standing(key(1), &server(), &caller("bob")), None);
        assert!(lobby.begin(key(1), &server(), &caller("bob")).is_err());
        assert_eq!(lobby.only_fresh(&server(), &caller("bob"), Instant::now() + RECONNECT_GRACE), None);
        drop(seat);
        assert_eq!(lobby.standing(key(1), &server(), &caller("alice")), None, "a stream that is gone leaves nothing");
    }

    #[test]
    fn s18_an_endpoint_opens_one_session_at_a_time() {
        let lobby = Arc::new(Lobby::default());
        let alice = caller("alice");
        let _seat = lobby.seat(key(1), server(), alice.clone(), Standing::Fresh).expect("a seat");
        assert_eq!(lobby.begin(key(1), &server(), &alice), Ok(Standing::Fresh));
        let again = lobby.begin(key(1), &server(), &alice).map_err(|refused| refused.code);
        assert_eq!(again, Err(Code::RequestInvalid));
        lobby.undo(key(1), Standing::Fresh);
        assert_eq!(lobby.begin(key(1), &server(), &alice), Ok(Standing::Fresh));
    }

    #[test]
    fn s18_of_two_streams_without_a_session_none_is_guessed() {
        let lobby = Arc::new(Lobby::default());
        let alice = caller("alice");
        let _one = lobby.seat(key(1), server(), alice.clone(), Standing::Fresh).expect("a seat");
        assert_eq!(lobby.only_fresh(&server(), &alice, Instant::now()), None, "it may be about to initialize");
        let later = Instant::now() + RECONNECT_GRACE;
        assert_eq!(lobby.only_fresh(&server(), &alice, later), Some(key(1)));
        let other = lobby.seat(key(2), server(), alice.clone(), Standing::Fresh).expect("a seat");
        assert_eq!(lobby.only_fresh(&server(), &alice, later), None);
        drop(other);
        assert_eq!(lobby.only_fresh(&server(), &alice, later), Some(key(1)));
    }

    #[test]
    fn s18_an_endpoint_goes_on_meaning_what_it_was_bound_to() {
        let lobby = Arc::new(Lobby::default());
        let (alice, bound) = (caller("alice"), Standing::Bound(key(9)));
        for number in 0..=FORMER_MAX {
            let mut digest = [1; 32];
            digest[..8].copy_from_slice(&number.to_be_bytes());
            let place = SessionKey::from_bytes(digest);
            drop(lobby.seat(place, server(), alice.clone(), bound).expect("a seat"));
            assert_eq!(lobby.standing(place, &server(), &alice), Some(bound));
            assert_eq!(lobby.standing(place, &server(), &caller("bob")), None);
        }
        assert_eq!(lobby.streams.lock().former.len(), FORMER_MAX);
        drop(lobby.seat(key(9), server(), alice.clone(), bound).expect("a seat"));
        assert_eq!(lobby.standing(key(9), &server(), &alice), None, "its own id tells");
    }

    #[test]
    fn r5_a_second_stream_of_an_endpoint_outlives_the_end_of_the_first() {
        let lobby = Arc::new(Lobby::default());
        let alice = caller("alice");
        let first = lobby.seat(key(1), server(), alice.clone(), Standing::Bound(key(1))).expect("a seat");
        let _second = lobby.seat(key(1), server(), alice.clone(), Standing::Bound(key(1))).expect("a seat");
        drop(first);
        assert_eq!(lobby.standing(key(1), &server(), &alice), Some(Standing::Bound(key(1))));
    }
}
