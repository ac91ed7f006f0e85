//! The bytes of a row's body: a kind, a version, and the fields one after the other.
//!
//! The layout of a version is frozen by the golden bytes below. A new field means a new version, which reads the older
//! ones; an older binary keeps a row of a newer version, and does not serve it.
//!
//! Integers are big-endian. Texts and bytes follow their length in four bytes.

use std::collections::BTreeSet;

use bytes::Bytes;
use mainstay_core::audit::{Action, Actor, AuditEntry};
use mainstay_core::id::{Epoch, ServerName, SessionKey};
use mainstay_core::principal::Principal;
use mainstay_core::resume::{Continuity, OwedDelete, ResumeRecord, ServerCard, UpstreamId};
use mainstay_core::session::{ClientName, Contract, SessionRecord, State, Tombstone};
use mainstay_core::time::Timestamp;
use mainstay_core::wire::method::Version;
use mainstay_core::wire::modern::Spoken;

/// Why a body can't be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Malformed {
    /// It is of a version that only a newer binary reads.
    Future { version: u8 },
    /// It is no body of this kind.
    Damaged,
}

/// What a body holds. Frozen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Kind {
    Session = 1,
    Tombstone = 2,
    Resume = 3,
    Owed = 4,
    Card = 5,
    Audit = 6,
}

impl Kind {
    /// The version that is written; older ones are read.
    const fn version(self) -> u8 {
        match self {
            // 2: `told`.
            Self::Resume => 2,
            // 2: `session`, `last_error`.
            Self::Owed => 2,
            // 2: `client`.
            Self::Tombstone => 2,
            // 2: `spoken`.
            Self::Card => 2,
            Self::Session | Self::Audit => 1,
        }
    }
}

/// The state's number in bodies and columns. Frozen.
pub(crate) const fn state_number(state: State) -> u8 {
    match state {
        State::Initializing => 0,
        State::Ready => 1,
        State::Draining => 2,
        State::Deleted => 3,
        State::Expired => 4,
        State::Closed => 5,
    }
}

/// The states that a row can have: a session that is being opened has none yet.
pub(crate) const STORED_STATES: [State; 5] =
    [State::Ready, State::Draining, State::Deleted, State::Expired, State::Closed];

fn state_of(number: u8) -> Option<State> {
    let all = [State::Initializing, State::Ready, State::Draining, State::Deleted, State::Expired, State::Closed];
    all.into_iter().find(|state| state_number(*state) == number)
}

/// The action's number in bodies and columns. Frozen; 1 and 2 were never written and are not given again.
pub(crate) const fn action_number(action: Action) -> u8 {
    match action {
        Action::Opened => 0,
        Action::Deleted => 3,
        Action::Drained => 4,
        Action::DrainBegun => 5,
        Action::Closed => 6,
        Action::Expired => 7,
        Action::Suspended => 8,
        Action::StrangerRefused => 9,
        Action::AuthenticationRefused => 10,
        Action::KeysRotated => 11,
        Action::OwedPaid => 12,
        Action::OwedGivenUp => 13,
        Action::Remade => 14,
        Action::OwedLeft => 15,
        Action::ServerRestarted => 16,
    }
}

fn action_of(number: u8) -> Option<Action> {
    Action::ALL.into_iter().find(|action| action_number(*action) == number)
}

/// The body of a session's row.
pub(crate) fn encode_session(record: &SessionRecord) -> Vec<u8> {
    let mut body = Writer::new(Kind::Session);
    body.key(&record.key);
    body.text(record.server.as_str());
    body.principal(&record.principal);
    body.byte(state_number(record.state));
    body.number(record.generation);
    body.epoch(record.epoch);
    body.time(record.opened_at);
    body.time(record.seen_at);
    body.time(record.deadline);
    body.text(record.version.as_str());
    body.text(&record.client.name);
    body.text(&record.client.version);
    body.option(record.agent.as_deref());
    body.bytes(&record.initialize_params);
    body.byte(u8::from(record.confirmed));
    body.0.extend_from_slice(record.contract.as_bytes());
    body.0
}

/// The session whose row has this body.
pub(crate) fn decode_session(body: &[u8]) -> Result<SessionRecord, Malformed> {
    let mut body = Reader::new(Kind::Session, body)?;
    body.whole(|body| {
        Some(SessionRecord {
            key: body.key()?,
            server: body.server()?,
            principal: body.principal()?,
            state: state_of(body.byte()?)?,
            generation: body.number()?,
            epoch: body.epoch()?,
            opened_at: body.time()?,
            seen_at: body.time()?,
            deadline: body.time()?,
            version: Version::parse(body.text()?)?,
            client: ClientName { name: body.text()?.into(), version: body.text()?.into() },
            agent: body.option()?.map(Into::into),
            initialize_params: Bytes::copy_from_slice(body.bytes()?),
            confirmed: body.flag()?,
            contract: Contract::from_bytes(body.array()?),
        })
    })
}

/// The body of a tombstone's row.
pub(crate) fn encode_tombstone(stone: &Tombstone) -> Vec<u8> {
    let mut body = Writer::new(Kind::Tombstone);
    body.key(&stone.key);
    body.text(stone.server.as_str());
    body.principal(&stone.principal);
    body.option(stone.agent.as_deref());
    body.byte(state_number(stone.state));
    body.text(&stone.reason);
    body.time(stone.opened_at);
    body.time(stone.ended_at);
    body.time(stone.keep_until);
    body.text(stone.version.as_str());
    body.number(stone.generation);
    body.epoch(stone.epoch);
    body.text(&stone.client.name);
    body.text(&stone.client.version);
    body.0
}

/// The tombstone whose row has this body.
pub(crate) fn decode_tombstone(body: &[u8]) -> Result<Tombstone, Malformed> {
    let mut body = Reader::new(Kind::Tombstone, body)?;
    body.whole(|body| {
        let stone = Tombstone {
            key: body.key()?,
            server: body.server()?,
            principal: body.principal()?,
            client: ClientName::default(),
            agent: body.option()?.map(Into::into),
            state: state_of(body.byte()?).filter(|state| state.is_ended())?,
            reason: body.text()?.into(),
            opened_at: body.time()?,
            ended_at: body.time()?,
            keep_until: body.time()?,
            version: Version::parse(body.text()?)?,
            generation: body.number()?,
            epoch: body.epoch()?,
        };
        if body.version < 2 {
            return Some(stone);
        }
        let client = ClientName { name: body.text()?.into(), version: body.text()?.into() };
        Some(Tombstone { client, ..stone })
    })
}

/// The body of a resume record's row. It holds the upstream's id, so it is sealed before it is stored.
pub(crate) fn encode_resume(record: &ResumeRecord) -> Vec<u8> {
    let mut body = Writer::new(Kind::Resume);
    body.key(&record.key);
    body.text(record.server.as_str());
    body.text(&record.url);
    body.0.extend_from_slice(&record.fingerprint);
    body.option(record.upstream_id.as_ref().map(UpstreamId::reveal));
    body.text(&record.version);
    body.bytes(&record.initialize_result);
    body.option(record.log_level.as_deref());
    body.length(record.subscriptions.len());
    record.subscriptions.iter().for_each(|uri| body.text(uri));
    body.byte(u8::from(record.told));
    body.option(record.last_event_id.as_deref());
    body.time(record.saved_at);
    body.time(record.used_at);
    body.byte(match record.continuity {
        Continuity::Fresh => 0,
        Continuity::Resumed => 1,
        Continuity::Remade => 2,
    });
    body.0.extend_from_slice(&record.remade_count.to_be_bytes());
    body.option(record.remade_reason.as_deref());
    body.0
}

/// The resume record whose row has this body.
pub(crate) fn decode_resume(body: &[u8]) -> Result<ResumeRecord, Malformed> {
    let mut body = Reader::new(Kind::Resume, body)?;
    body.whole(|body| {
        Some(ResumeRecord {
            key: body.key()?,
            server: body.server()?,
            url: body.text()?.into(),
            fingerprint: body.array()?,
            upstream_id: match body.option()? {
                Some(text) => Some(UpstreamId::parse(text)?),
                None => None,
            },
            version: body.text()?.into(),
            initialize_result: Bytes::copy_from_slice(body.bytes()?),
            log_level: body.option()?.map(Into::into),
            subscriptions: body.texts()?,
            // What is not known to have been said is said again.
            told: body.version >= 2 && body.flag()?,
            last_event_id: body.option()?.map(Into::into),
            saved_at: body.time()?,
            used_at: body.time()?,
            continuity: match body.byte()? {
                0 => Continuity::Fresh,
                1 => Continuity::Resumed,
                2 => Continuity::Remade,
                _ => return None,
            },
            remade_count: u32::from_be_bytes(body.array()?),
            remade_reason: body.option()?.map(Into::into),
        })
    })
}

/// The body of an owed delete's row, but for its number. To be sealed, too.
pub(crate) fn encode_owed(owed: &OwedDelete) -> Vec<u8> {
    let mut body = Writer::new(Kind::Owed);
    body.text(owed.server.as_str());
    body.text(&owed.url);
    body.text(owed.upstream_id.reveal());
    body.text(&owed.version);
    body.time(owed.owed_at);
    body.0.extend_from_slice(&owed.attempts.to_be_bytes());
    body.time(owed.next_at);
    body.byte(u8::from(owed.session.is_some()));
    owed.session.iter().for_each(|key| body.key(key));
    body.option(owed.last_error.as_deref());
    body.0
}

/// The owed delete of number `id` whose row has this body.
pub(crate) fn decode_owed(id: u64, body: &[u8]) -> Result<OwedDelete, Malformed> {
    let mut body = Reader::new(Kind::Owed, body)?;
    body.whole(|body| {
        let owed = OwedDelete {
            id,
            session: None,
            server: body.server()?,
            url: body.text()?.into(),
            upstream_id: UpstreamId::parse(body.text()?)?,
            version: body.text()?.into(),
            owed_at: body.time()?,
            attempts: u32::from_be_bytes(body.array()?),
            next_at: body.time()?,
            last_error: None,
        };
        if body.version < 2 {
            return Some(owed);
        }
        let session = if body.flag()? { Some(body.key()?) } else { None };
        Some(OwedDelete { session, last_error: body.option()?.map(Into::into), ..owed })
    })
}

/// The body as the first version wrote it. It kept neither the session nor the last failure.
#[cfg(test)]
pub(crate) fn owed_of_version_1(owed: &OwedDelete) -> Vec<u8> {
    let mut body = encode_owed(&OwedDelete { session: None, last_error: None, ..owed.clone() });
    body.truncate(body.len() - 2);
    body[1] = 1;
    body
}

/// The body of a server card's row.
pub(crate) fn encode_card(card: &ServerCard) -> Vec<u8> {
    let mut body = Writer::new(Kind::Card);
    body.text(card.server.as_str());
    body.0.extend_from_slice(&card.fingerprint);
    body.bytes(&card.initialize_result);
    body.time(card.saved_at);
    body.byte(known_number(card.spoken.legacy));
    body.byte(known_number(card.spoken.modern));
    body.0
}

/// The body as the first version wrote it. It kept nothing of the server's eras.
#[cfg(test)]
pub(crate) fn card_of_version_1(card: &ServerCard) -> Vec<u8> {
    let mut body = encode_card(card);
    body.truncate(body.len() - 2);
    body[1] = 1;
    body
}

/// What is known of something, as a number in bodies. Frozen.
const fn known_number(known: Option<bool>) -> u8 {
    match known {
        None => 0,
        Some(false) => 1,
        Some(true) => 2,
    }
}

fn known_of(number: u8) -> Option<Option<bool>> {
    [None, Some(false), Some(true)].into_iter().find(|known| known_number(*known) == number)
}

/// The server card whose row has this body.
pub(crate) fn decode_card(body: &[u8]) -> Result<ServerCard, Malformed> {
    let mut body = Reader::new(Kind::Card, body)?;
    body.whole(|body| {
        let card = ServerCard {
            server: body.server()?,
            fingerprint: body.array()?,
            initialize_result: Bytes::copy_from_slice(body.bytes()?),
            saved_at: body.time()?,
            spoken: Spoken::default(),
        };
        if body.version < 2 {
            return Some(card);
        }
        let spoken = Spoken { legacy: known_of(body.byte()?)?, modern: known_of(body.byte()?)? };
        Some(ServerCard { spoken, ..card })
    })
}

/// The body of an audit entry's row, but for its number.
pub(crate) fn encode_audit(entry: &AuditEntry) -> Vec<u8> {
    let mut body = Writer::new(Kind::Audit);
    body.time(entry.at);
    match &entry.actor {
        Actor::Client(principal) => {
            body.byte(0);
            body.principal(principal);
        }
        Actor::Operator => body.byte(1),
        Actor::Gateway => body.byte(2),
    }
    body.byte(action_number(entry.action));
    body.byte(u8::from(entry.session.is_some()));
    entry.session.iter().for_each(|key| body.key(key));
    body.option(entry.server.as_ref().map(ServerName::as_str));
    body.text(&entry.detail);
    body.0
}

/// The audit entry whose row has this body.
pub(crate) fn decode_audit(body: &[u8]) -> Result<AuditEntry, Malformed> {
    let mut body = Reader::new(Kind::Audit, body)?;
    body.whole(|body| {
        Some(AuditEntry {
            at: body.time()?,
            actor: match body.byte()? {
                0 => Actor::Client(body.principal()?),
                1 => Actor::Operator,
                2 => Actor::Gateway,
                _ => return None,
            },
            action: action_of(body.byte()?)?,
            session: if body.flag()? { Some(body.key()?) } else { None },
            server: match body.option()? {
                Some(text) => Some(ServerName::parse(text)?),
                None => None,
            },
            detail: body.text()?.into(),
        })
    })
}

/// The bodies being written.
struct Writer(Vec<u8>);

impl Writer {
    fn new(kind: Kind) -> Self {
        let mut bytes = Vec::with_capacity(BODY_BYTES_TYPICAL);
        bytes.extend_from_slice(&[kind as u8, kind.version()]);
        Self(bytes)
    }

    fn byte(&mut self, byte: u8) {
        self.0.push(byte);
    }

    fn number(&mut self, number: u64) {
        self.0.extend_from_slice(&number.to_be_bytes());
    }

    fn time(&mut self, at: Timestamp) {
        self.number(at.unix_millis());
    }

    fn key(&mut self, key: &SessionKey) {
        self.0.extend_from_slice(key.as_bytes());
    }

    fn epoch(&mut self, epoch: Epoch) {
        self.number(epoch.counter);
        self.number(epoch.nonce);
    }

    fn length(&mut self, length: usize) {
        let length = u32::try_from(length).expect("messages, and so their parts, are far below 4 GiB");
        self.0.extend_from_slice(&length.to_be_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.length(bytes.len());
        self.0.extend_from_slice(bytes);
    }

    fn text(&mut self, text: &str) {
        self.bytes(text.as_bytes());
    }

    fn option(&mut self, text: Option<&str>) {
        self.byte(u8::from(text.is_some()));
        text.into_iter().for_each(|text| self.text(text));
    }

    fn principal(&mut self, principal: &Principal) {
        match principal {
            Principal::Anonymous => self.byte(0),
            Principal::Agent(name) => {
                self.byte(1);
                self.text(name);
            }
            Principal::Token(name) => {
                self.byte(2);
                self.text(name);
            }
            Principal::Subject { issuer, subject } => {
                self.byte(3);
                self.text(issuer);
                self.text(subject);
            }
        }
    }
}

/// The rest of a body being read. Every read checks the length first, so a length that lies allocates nothing.
struct Reader<'a> {
    rest: &'a [u8],
    version: u8,
}

impl<'a> Reader<'a> {
    fn new(kind: Kind, body: &'a [u8]) -> Result<Self, Malformed> {
        match body {
            [found, version, ..] if *found == kind as u8 && *version > kind.version() => {
                Err(Malformed::Future { version: *version })
            }
            [found, version, rest @ ..] if *found == kind as u8 && *version > 0 => Ok(Self { rest, version: *version }),
            _ => Err(Malformed::Damaged),
        }
    }

    /// What `read` makes of the body, if that is all of it.
    fn whole<T>(&mut self, read: impl FnOnce(&mut Self) -> Option<T>) -> Result<T, Malformed> {
        read(self).filter(|_| self.rest.is_empty()).ok_or(Malformed::Damaged)
    }

    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(length)?;
        self.rest = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn byte(&mut self) -> Option<u8> {
        self.array().map(|[byte]| byte)
    }

    fn flag(&mut self) -> Option<bool> {
        match self.byte()? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    fn number(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    fn time(&mut self) -> Option<Timestamp> {
        self.number().map(Timestamp::from_unix_millis)
    }

    fn key(&mut self) -> Option<SessionKey> {
        self.array().map(SessionKey::from_bytes)
    }

    fn epoch(&mut self) -> Option<Epoch> {
        Some(Epoch { counter: self.number()?, nonce: self.number()? })
    }

    fn length(&mut self) -> Option<usize> {
        usize::try_from(u32::from_be_bytes(self.array()?)).ok()
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = self.length()?;
        self.take(length)
    }

    fn text(&mut self) -> Option<&'a str> {
        std::str::from_utf8(self.bytes()?).ok()
    }

    fn option(&mut self) -> Option<Option<&'a str>> {
        if self.flag()? { self.text().map(Some) } else { Some(None) }
    }

    fn texts(&mut self) -> Option<BTreeSet<Box<str>>> {
        (0..self.length()?).map(|_| self.text().map(Into::into)).collect()
    }

    fn server(&mut self) -> Option<ServerName> {
        ServerName::parse(self.text()?)
    }

    fn principal(&mut self) -> Option<Principal> {
        match self.byte()? {
            0 => Some(Principal::Anonymous),
            1 => Some(Principal::Agent(self.text()?.into())),
            2 => Some(Principal::Token(self.text()?.into())),
            3 => Some(Principal::Subject { issuer: self.text()?.into(), subject: self.text()?.into() }),
            _ => None,
        }
    }
}

/// Room for most bodies without growing.
const BODY_BYTES_TYPICAL: usize = 512;

#[cfg(test)]
mod tests;
