//! The session machine: the six states of a session and every way from one to another (S1).
//!
//! A [`Session`] is one row. [`Session::decide`] says what an input would change and what has to be done then, and changes
//! nothing; the caller makes the changes durable, gives each to [`Session::apply`], and only then performs the effects.
//! A later life of the gateway takes the row up again through [`Session::restore`], whatever ended the earlier one.
//!
//! Not here: how rows are stored, who has proven to be which principal, and the instance behind the session.

mod drain;
mod end;
mod open;
mod restore;
mod touch;

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use thiserror::Error;

pub use self::end::REMOVED;
pub use self::restore::{Asked, RefusedReason, Restoration};
use crate::id::{Epoch, ServerName, SessionKey};
use crate::principal::Principal;
use crate::time::Timestamp;
use crate::wire::method::Version;

/// Where a session stands. Only a ready one is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum State {
    /// The client's `initialize` is not answered yet. In memory only: no row says this.
    Initializing,
    /// Served.
    Ready,
    /// An operator drains it: calls in flight may finish, new ones are refused.
    Draining,
    /// Ended by the client's DELETE, or drained.
    Deleted,
    /// Ended because nobody used it.
    Expired,
    /// Ended by an operator, or because restoring it was refused.
    Closed,
}

impl State {
    /// Whether the session is over. An ended session never lives again.
    pub const fn is_ended(self) -> bool {
        match self {
            Self::Initializing | Self::Ready | Self::Draining => false,
            Self::Deleted | Self::Expired | Self::Closed => true,
        }
    }

    /// The word for it in lists, logs and errors.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Initializing => "initializing",
            Self::Ready => "ready",
            Self::Draining => "draining",
            Self::Deleted => "deleted",
            Self::Expired => "expired",
            Self::Closed => "closed",
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What a client calls itself in `initialize` (`clientInfo`). A label for people, never an identity.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ClientName {
    /// `clientInfo.name`.
    pub name: Box<str>,
    /// `clientInfo.version`.
    pub version: Box<str>,
}

impl ClientName {
    /// The most characters that are kept of either part.
    pub const CHARS_MAX: usize = 128;

    /// The client's words, each cut after [`CHARS_MAX`](Self::CHARS_MAX) characters.
    pub fn new(name: &str, version: &str) -> Self {
        Self { name: head(name, Self::CHARS_MAX), version: head(version, Self::CHARS_MAX) }
    }
}

/// The fingerprint of the auth contract (mode, issuer, audience) under which a session was opened (S15).
///
/// It says nothing of tokens, keys or secrets, so rotating those changes no fingerprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Contract([u8; 32]);

impl Contract {
    /// The contract whose digest is `digest`; hashing is the caller's.
    pub const fn from_bytes(digest: [u8; 32]) -> Self {
        Self(digest)
    }

    /// The digest.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// All that is kept of a live session: its row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionRecord {
    /// The hash of its id.
    pub key: SessionKey,
    /// The server that it was opened at.
    pub server: ServerName,
    /// Whose it is; fixed at `initialize` (S4).
    pub principal: Principal,
    /// Where it stands.
    pub state: State,
    /// Rises by one with every authority write; 0 as long as there is no row.
    pub generation: u64,
    /// The life of the worker that wrote the row, or that restored the session since.
    pub epoch: Epoch,
    /// When its `initialize` was answered.
    pub opened_at: Timestamp,
    /// When it was last used.
    pub seen_at: Timestamp,
    /// When it is over unless something happens before: idle, never confirmed, or drained.
    pub deadline: Timestamp,
    /// The revision that was negotiated.
    pub version: Version,
    /// What the client calls itself.
    pub client: ClientName,
    /// The agent that the client named itself to be at `initialize` (`X-Agent-Name`); see [`AGENT_CHARS_MAX`].
    pub agent: Option<Box<str>>,
    /// The `params` of the client's `initialize`: its own raw JSON, to be said again to a re-made instance (U4, C5).
    pub initialize_params: Bytes,
    /// Whether `notifications/initialized` or any later request came.
    pub confirmed: bool,
    /// The auth contract that it was opened under.
    pub contract: Contract,
}

/// What is kept of an ended session. As long as it exists, and it outlives the row, its id is blocked (S7).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tombstone {
    /// The hash of the id.
    pub key: SessionKey,
    /// The server that the session was opened at.
    pub server: ServerName,
    /// Whose it was.
    pub principal: Principal,
    /// What the client called itself; nothing in a tombstone of an early version.
    pub client: ClientName,
    /// The agent that its client named itself to be at `initialize`.
    pub agent: Option<Box<str>>,
    /// How it ended: deleted, expired or closed.
    pub state: State,
    /// Why, in words for people; at most [`REASON_CHARS_MAX`](Self::REASON_CHARS_MAX) characters.
    pub reason: Box<str>,
    /// When its `initialize` was answered.
    pub opened_at: Timestamp,
    /// When it ended.
    pub ended_at: Timestamp,
    /// Until when the tombstone stays.
    pub keep_until: Timestamp,
    /// The revision that was negotiated.
    pub version: Version,
    /// One above the generation of the row that it replaces.
    pub generation: u64,
    /// The life of the worker that ended it.
    pub epoch: Epoch,
}

impl Tombstone {
    /// The most characters that are kept of a reason.
    pub const REASON_CHARS_MAX: usize = 256;

    /// Whether a drain has ended the session, whoever found that it was over. Only an operator orders one (S8).
    pub fn was_drained(&self) -> bool {
        self.state == State::Deleted && self.cause() == end::BY_DRAIN
    }

    /// The reason as one of few words: `delete`, `drain`, `idle`, `unconfirmed`, `contract`, `row`, `removed`, or `order` for an
    /// operator's own.
    pub fn cause(&self) -> &'static str {
        end::cause(&self.reason)
    }
}

/// The durations that the rules depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// How long a session may be idle.
    pub idle_expiry: Duration,
    /// How long after the answer to `initialize` the client's next word may take (60 s by default).
    pub confirm_within: Duration,
    /// How rarely the store learns that a session was used (5 s by default).
    pub touch_interval: Duration,
    /// How long a tombstone stays.
    pub tombstone_retention: Duration,
}

/// What is known of a session when its client asks for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opening {
    /// The hash of the id that it will have.
    pub key: SessionKey,
    /// The server that it is opened at.
    pub server: ServerName,
    /// Whose it is.
    pub principal: Principal,
    /// What the client calls itself.
    pub client: ClientName,
    /// The agent that it names itself to be (`X-Agent-Name`); cut after [`AGENT_CHARS_MAX`] characters.
    pub agent: Option<Box<str>>,
    /// The `params` of its `initialize`, raw.
    pub initialize_params: Bytes,
    /// The auth contract in force.
    pub contract: Contract,
    /// The present life of the worker.
    pub epoch: Epoch,
}

/// What may happen to a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// There is an answer to the client's `initialize`, with this revision.
    Answered {
        /// The negotiated revision.
        version: Version,
    },
    /// There will be no answer to the client's `initialize`.
    Failed,
    /// `notifications/initialized` came.
    Initialized,
    /// A request came and was admitted.
    Touch,
    /// The client sent DELETE.
    Delete,
    /// The deadline is thought to be over.
    Expire {
        /// What is going on in the session.
        activity: Activity,
    },
    /// An operator wants it to end once its calls in flight are answered.
    Drain {
        /// How long they may take.
        grace: Duration,
    },
    /// The last call in flight of a draining session is answered.
    Drained,
    /// An operator ends it now.
    Close {
        /// Why, in the operator's words.
        reason: Box<str>,
    },
}

impl Input {
    /// The word for it in errors.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Answered { .. } => "answered",
            Self::Failed => "failed",
            Self::Initialized => "initialized",
            Self::Touch => "touch",
            Self::Delete => "delete",
            Self::Expire { .. } => "expire",
            Self::Drain { .. } => "drain",
            Self::Drained => "drained",
            Self::Close { .. } => "close",
        }
    }
}

/// What keeps a session from being idle (S5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Activity {
    /// Calls in flight.
    pub calls: u32,
    /// Open streams.
    pub streams: u32,
}

impl Activity {
    /// Whether nothing is going on.
    pub const fn is_idle(self) -> bool {
        self.calls == 0 && self.streams == 0
    }
}

/// What follows from an input. An empty one is no refusal: nothing needs to be done.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Decision {
    /// What to make durable in one transaction, and then to apply.
    pub changes: Vec<Change>,
    /// What to do once the changes are durable and applied.
    pub effects: Vec<Effect>,
}

/// A change of what is stored of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A first row. Authority: power-durable before `initialize` is answered (S2).
    Insert(SessionRecord),
    /// A row in place of its predecessor, whose generation is one less. Authority.
    Update(SessionRecord),
    /// The session was used. A hint, outside generation and authentication; it also says that the client confirmed.
    Touch {
        /// Which session.
        key: SessionKey,
        /// When it was used.
        seen_at: Timestamp,
        /// The deadline that follows.
        deadline: Timestamp,
    },
    /// The tombstone in, the row out, in one transaction (S6). Authority.
    End(Tombstone),
}

impl Change {
    /// The session that it is about.
    pub const fn key(&self) -> SessionKey {
        match self {
            Self::Insert(record) | Self::Update(record) => record.key,
            Self::Touch { key, .. } => *key,
            Self::End(tombstone) => tombstone.key,
        }
    }
}

/// What is to be done once a decision's changes are durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Answer the client's `initialize`; the id may leave now.
    AnswerInitialize,
    /// Refuse new calls; end the session with [`Input::Drained`] once those in flight are answered.
    RefuseNewCalls,
    /// Forget the session, end its streams and calls, and let its instance go. An upstream session of its own is owed a
    /// DELETE: nobody will use it again (U7).
    ReleaseInstance,
}

/// Why an input changes nothing, or a request is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Refusal {
    /// The session is another principal's. To be told like an id that nobody has (S4).
    #[error("the session belongs to another principal")]
    OtherPrincipal,
    /// It is not served yet, or not any more.
    #[error("the session is {0}, not ready")]
    NotReady(State),
    /// It ended before. The first ending stands.
    #[error("the session has ended: {0}")]
    Ended(State),
    /// Its deadline is over, though nobody expired it so far.
    #[error("the session's deadline is over")]
    Overdue,
    /// It can't expire: a call is in flight, a stream is open, or its deadline has moved meanwhile.
    #[error("the session is in use")]
    Busy,
    /// The input makes no sense in this state.
    #[error("`{input}` can't happen to a session that is {state}")]
    Illegal {
        /// Where the session stands.
        state: State,
        /// [`Input::as_str`] of the input.
        input: &'static str,
    },
}

/// A session in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    record: SessionRecord,
    /// What the store was last told of the session's use.
    stored: Mark,
}

/// A point in the use of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mark {
    seen_at: Timestamp,
    deadline: Timestamp,
}

impl Mark {
    const fn of(record: &SessionRecord) -> Self {
        Self { seen_at: record.seen_at, deadline: record.deadline }
    }
}

impl Session {
    /// A session whose `initialize` is on its way. It exists in memory only, under an id that nobody knows yet.
    ///
    /// `version` is the revision that the client asks for; [`Input::Answered`] replaces it by the negotiated one.
    pub fn open(opening: Opening, version: Version, now: Timestamp, terms: &Terms) -> Self {
        let record = open::initializing(opening, version, now, terms);
        let stored = Mark::of(&record);
        Self { record, stored }
    }

    /// What `input` changes and entails at `now`. It changes nothing by itself: the caller makes the decision's changes
    /// durable, [applies](Self::apply) them and performs its effects, in this order. If the first step fails the
    /// session stays what it is (S6).
    ///
    /// # Errors
    ///
    /// A [`Refusal`] if the input can't happen to the session as it is; of two endings the second is always refused.
    pub fn decide(&self, now: Timestamp, input: &Input, terms: &Terms) -> Result<Decision, Refusal> {
        let record = &self.record;
        if record.state.is_ended() {
            return Err(Refusal::Ended(record.state));
        }
        match input {
            Input::Answered { version } => open::answered(record, now, *version, terms),
            Input::Failed => open::failed(record),
            Input::Initialized | Input::Touch => touch::used(self, now, input, terms),
            Input::Delete => end::deleted(record, now, terms),
            Input::Expire { activity } => end::expired(record, now, *activity, terms),
            Input::Drain { grace } => drain::begun(record, now, *grace),
            Input::Drained => drain::finished(record, now, terms),
            Input::Close { reason } => end::closed(record, now, reason, terms),
        }
    }

    /// Makes a durable change the session's present. The only way to move it from one state to another.
    ///
    /// A change that is not the direct successor of the present (applied before, or overtaken) leaves it as it is,
    /// and so does every change of an ended session.
    pub fn apply(&mut self, change: &Change) {
        if self.record.state.is_ended() || change.key() != self.record.key {
            return;
        }
        let successor = self.record.generation + 1;
        match change {
            Change::Insert(record) | Change::Update(record) if record.generation == successor => {
                self.stored = Mark::of(record);
                // Touches may have come between decision and now; they count.
                let seen_at = record.seen_at.max(self.record.seen_at);
                let confirmed = record.confirmed || self.record.confirmed;
                self.record = SessionRecord { seen_at, confirmed, ..record.clone() };
            }
            Change::Touch { seen_at, deadline, .. } if self.record.state == State::Ready => {
                let mark = Mark { seen_at: *seen_at, deadline: *deadline };
                self.note(mark);
                self.stored = mark;
            }
            Change::End(tombstone) if tombstone.generation == successor => {
                self.record.state = tombstone.state;
                self.record.generation = tombstone.generation;
            }
            Change::Insert(_) | Change::Update(_) | Change::Touch { .. } | Change::End(_) => {}
        }
    }

    /// Whether a request of `principal` may be served at `now`. What is checked first is what a stranger learns:
    /// principal, then state, then deadline (S4).
    ///
    /// After [`Refusal::Overdue`] the caller decides [`Input::Expire`] with what is going on in the session. If that
    /// is refused with [`Refusal::Busy`], its activity counts as use: [`touch`](Self::touch) it, and admit again.
    ///
    /// # Errors
    ///
    /// The [`Refusal`] to be told to the client.
    pub fn admit(&self, now: Timestamp, principal: &Principal) -> Result<(), Refusal> {
        if self.record.principal != *principal {
            return Err(Refusal::OtherPrincipal);
        }
        match self.record.state {
            State::Ready if now < self.record.deadline => Ok(()),
            State::Ready => Err(Refusal::Overdue),
            State::Initializing | State::Draining => Err(Refusal::NotReady(self.record.state)),
            State::Deleted | State::Expired | State::Closed => Err(Refusal::Ended(self.record.state)),
        }
    }

    /// Notes that the session is used at `now`: by a request that was [admitted](Self::admit), by a call that was
    /// answered, or by a stream that is open. `Some` if the store should learn of it, which is a hint (S5).
    ///
    /// This is [`decide`](Self::decide) and [`apply`](Self::apply) of [`Input::Touch`] for the path of every request:
    /// it allocates nothing. A session that is not ready stays as it is.
    pub fn touch(&mut self, now: Timestamp, terms: &Terms) -> Option<Change> {
        if self.record.state != State::Ready {
            return None;
        }
        let touch::Touched { mark, due } = touch::next(self, now, terms);
        self.note(mark);
        if !due {
            return None;
        }
        self.stored = mark;
        Some(Change::Touch { key: self.record.key, seen_at: mark.seen_at, deadline: mark.deadline })
    }

    /// When the session is over unless it is used before (a ready one), or even if it is (a draining one).
    pub const fn deadline(&self) -> Timestamp {
        self.record.deadline
    }

    /// The session's row as memory has it.
    pub const fn record(&self) -> &SessionRecord {
        &self.record
    }

    /// What becomes of a stored session in this life of the worker: the one restore path, after a crash, a restart, a
    /// reload and an upgrade alike. A decision that comes with it is performed like any other.
    pub fn restore(stored: SessionRecord, asked: &Asked<'_>) -> Restoration {
        restore::restored(stored, asked)
    }

    /// Takes up the stored `record` as it is.
    const fn resume(record: SessionRecord) -> Self {
        let stored = Mark::of(&record);
        Self { record, stored }
    }

    const fn note(&mut self, mark: Mark) {
        self.record.seen_at = mark.seen_at;
        self.record.deadline = mark.deadline;
        self.record.confirmed = true;
    }
}

/// The most characters that are kept of an agent's name.
pub const AGENT_CHARS_MAX: usize = 128;

/// The first `chars_max` characters of `text`.
pub(crate) fn head(text: &str, chars_max: usize) -> Box<str> {
    text.char_indices().nth(chars_max).map_or(text, |(end, _)| &text[..end]).into()
}

#[cfg(test)]
mod tests;
