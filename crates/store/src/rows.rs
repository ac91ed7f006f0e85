//! Between records and rows: signing, sealing, and every check of what comes back (S14).

use mainstay_core::audit::AuditEntry;
use mainstay_core::id::{Epoch, ServerName, SessionKey};
use mainstay_core::principal::Principal;
use mainstay_core::resume::{OwedDelete, ResumeRecord, ServerCard};
use mainstay_core::session::{SessionRecord, Tombstone};
use mainstay_core::time::Timestamp;
use tracing::warn;

use crate::codec::{self, Malformed, action_number, state_number};
use crate::error::CommitError;
use crate::keys::{Keyring, Purpose, Rejection, Sealed, Signature};
use crate::stored::Fault;

/// A signed body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Signed {
    pub(crate) signature: Signature,
    pub(crate) body: Vec<u8>,
}

/// The columns of a session's row beside key and body. Only the last three are not signed for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SessionColumns {
    pub(crate) state: i64,
    pub(crate) server: String,
    pub(crate) principal: String,
    pub(crate) agent: Option<String>,
    pub(crate) generation: i64,
    pub(crate) deadline: i64,
    pub(crate) seen_at: i64,
    pub(crate) confirmed: bool,
}

impl SessionColumns {
    pub(crate) fn of(record: &SessionRecord) -> Self {
        Self {
            state: i64::from(state_number(record.state)),
            server: record.server.as_str().to_owned(),
            principal: record.principal.to_string(),
            agent: record.agent.as_deref().map(str::to_owned),
            generation: column(record.generation),
            deadline: time_column(record.deadline),
            seen_at: time_column(record.seen_at),
            confirmed: record.confirmed,
        }
    }
}

/// The columns of a tombstone's row that repeat what is signed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoneColumns {
    pub(crate) state: i64,
    pub(crate) server: String,
    pub(crate) principal: String,
    pub(crate) agent: Option<String>,
}

impl StoneColumns {
    pub(crate) fn of(stone: &Tombstone) -> Self {
        Self {
            state: i64::from(state_number(stone.state)),
            server: stone.server.as_str().to_owned(),
            principal: stone.principal.to_string(),
            agent: stone.agent.as_deref().map(str::to_owned),
        }
    }
}

/// The columns of an audit entry's row that repeat what is signed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AuditColumns {
    pub(crate) at: i64,
    pub(crate) action: i64,
    pub(crate) session: Option<[u8; 32]>,
}

impl AuditColumns {
    pub(crate) fn of(entry: &AuditEntry) -> Self {
        Self {
            at: time_column(entry.at),
            action: i64::from(action_number(entry.action)),
            session: entry.session.map(|key| *key.as_bytes()),
        }
    }
}

/// What of the row of `record` is signed.
pub(crate) fn sign_session(ring: &Keyring, record: &SessionRecord) -> Signed {
    let body = codec::encode_session(record);
    Signed { signature: ring.sign(Purpose::Session, record.key.as_bytes(), &body), body }
}

/// The session in a row under `key`, as far as both agree.
pub(crate) fn read_session(
    ring: &Keyring,
    key: SessionKey,
    columns: &SessionColumns,
    signed: &Signed,
) -> Result<SessionRecord, Fault> {
    let owner = || codec::decode_session(&signed.body).map(|record| record.key);
    verify(ring, Purpose::Session, key, signed, owner)?;
    let record = codec::decode_session(&signed.body).map_err(fault)?;
    if record.key != key {
        return Err(Fault::Unparsable);
    }
    let SessionColumns { deadline, seen_at, confirmed, .. } = *columns;
    let agree = SessionColumns { deadline, seen_at, confirmed, ..SessionColumns::of(&record) } == *columns;
    let (Some(deadline), Some(seen_at), true) = (time(columns.deadline), time(columns.seen_at), agree) else {
        return Err(Fault::Tampered);
    };
    Ok(SessionRecord { deadline, seen_at, confirmed: record.confirmed || columns.confirmed, ..record })
}

/// What of the row of `stone` is signed.
pub(crate) fn sign_tombstone(ring: &Keyring, stone: &Tombstone) -> Signed {
    let body = codec::encode_tombstone(stone);
    Signed { signature: ring.sign(Purpose::Tombstone, stone.key.as_bytes(), &body), body }
}

/// The tombstone in a row under `key`, as far as both agree.
pub(crate) fn read_tombstone(
    ring: &Keyring,
    key: SessionKey,
    columns: &StoneColumns,
    signed: &Signed,
) -> Result<Tombstone, Fault> {
    let owner = || codec::decode_tombstone(&signed.body).map(|stone| stone.key);
    verify(ring, Purpose::Tombstone, key, signed, owner)?;
    let stone = codec::decode_tombstone(&signed.body).map_err(fault)?;
    if stone.key != key {
        return Err(Fault::Unparsable);
    }
    if StoneColumns::of(&stone) == *columns { Ok(stone) } else { Err(Fault::Tampered) }
}

/// What of the row of `entry` is signed, under its number.
pub(crate) fn sign_audit(ring: &Keyring, id: i64, entry: &AuditEntry) -> Signed {
    let body = codec::encode_audit(entry);
    Signed { signature: ring.sign(Purpose::Audit, &id.to_be_bytes(), &body), body }
}

/// The audit entry in the row of number `id`, as far as both agree.
pub(crate) fn read_audit(
    ring: &Keyring,
    id: i64,
    columns: &AuditColumns,
    signed: &Signed,
) -> Result<(u64, AuditEntry), Fault> {
    ring.verify(Purpose::Audit, &id.to_be_bytes(), &signed.body, &signed.signature).map_err(rejected)?;
    let entry = codec::decode_audit(&signed.body).map_err(fault)?;
    let number = u64::try_from(id).map_err(|_| Fault::Tampered)?;
    if AuditColumns::of(&entry) == *columns { Ok((number, entry)) } else { Err(Fault::Tampered) }
}

/// The principal that is displayed as `text`. An issuer is a URL without a fragment (OpenID Connect Discovery, section
/// 3), so the first `#` ends it.
pub(crate) fn principal_of(text: &str) -> Option<Principal> {
    if text == Principal::Anonymous.to_string() {
        return Some(Principal::Anonymous);
    }
    let (kind, name) = text.split_once(':')?;
    match kind {
        "agent" => Some(Principal::Agent(name.into())),
        "token" => Some(Principal::Token(name.into())),
        "subject" => {
            let (issuer, subject) = name.split_once('#')?;
            Some(Principal::Subject { issuer: issuer.into(), subject: subject.into() })
        }
        _ => None,
    }
}

/// The sealed row of `record`.
pub(crate) fn seal_resume(ring: &Keyring, record: &ResumeRecord) -> Sealed {
    ring.seal(Purpose::Resume, record.key.as_bytes(), &codec::encode_resume(record))
}

/// The resume record in a row under `key`.
pub(crate) fn read_resume(ring: &Keyring, key: SessionKey, sealed: &Sealed) -> Result<ResumeRecord, Fault> {
    let body = ring.open(Purpose::Resume, key.as_bytes(), sealed).map_err(rejected)?;
    let record = codec::decode_resume(&body).map_err(fault)?;
    if record.key == key { Ok(record) } else { Err(Fault::Unparsable) }
}

/// The sealed row of `owed`.
pub(crate) fn seal_owed(ring: &Keyring, owed: &OwedDelete) -> Sealed {
    ring.seal(Purpose::Owed, owed.server.as_str().as_bytes(), &codec::encode_owed(owed))
}

/// The columns of an owed delete's row that repeat what is sealed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OwedColumns {
    pub(crate) server: String,
    pub(crate) session: Option<[u8; 32]>,
}

impl OwedColumns {
    pub(crate) fn of(owed: &OwedDelete) -> Self {
        Self { server: owed.server.as_str().to_owned(), session: owed.session.map(|key| *key.as_bytes()) }
    }
}

/// The owed delete of number `id` in a row with these columns, as far as both agree.
pub(crate) fn read_owed(ring: &Keyring, id: i64, columns: &OwedColumns, sealed: &Sealed) -> Result<OwedDelete, Fault> {
    let body = ring.open(Purpose::Owed, columns.server.as_bytes(), sealed).map_err(rejected)?;
    let id = u64::try_from(id).map_err(|_| Fault::Tampered)?;
    let owed = codec::decode_owed(id, &body).map_err(fault)?;
    if OwedColumns::of(&owed) == *columns { Ok(owed) } else { Err(Fault::Tampered) }
}

/// The sealed row of `card`.
pub(crate) fn seal_card(ring: &Keyring, card: &ServerCard) -> Sealed {
    ring.seal(Purpose::Card, card.server.as_str().as_bytes(), &codec::encode_card(card))
}

/// The card in a row for `server`.
pub(crate) fn read_card(ring: &Keyring, server: &ServerName, sealed: &Sealed) -> Result<ServerCard, Fault> {
    let body = ring.open(Purpose::Card, server.as_str().as_bytes(), sealed).map_err(rejected)?;
    let card = codec::decode_card(&body).map_err(fault)?;
    if card.server == *server { Ok(card) } else { Err(Fault::Unparsable) }
}

/// Whether a writer of epoch `own` may write to a ledger of epoch `current`.
pub(crate) fn fence(own: Option<Epoch>, current: Option<Epoch>) -> Result<(), CommitError> {
    if own.is_some() && own == current { Ok(()) } else { Err(CommitError::Fenced { own, current }) }
}

/// The epoch after `former`. `clock` is the latest time that the ledger has heard of.
pub(crate) fn next_epoch(former: Option<Epoch>, nonce: u64, now: Timestamp, clock: Timestamp) -> Epoch {
    if now < clock {
        let ahead_ms = u64::try_from(clock.since(now).as_millis()).unwrap_or(u64::MAX);
        warn!(ahead_ms, %now, ledger = %clock, "the clock went back: sessions are kept, and some expire later");
    }
    Epoch { counter: former.map_or(0, |epoch| epoch.counter) + 1, nonce }
}

/// `number` as SQLite keeps it.
pub(crate) fn column(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// `at` as SQLite keeps it.
pub(crate) fn time_column(at: Timestamp) -> i64 {
    column(at.unix_millis())
}

/// The time in a column.
pub(crate) fn time(column: i64) -> Option<Timestamp> {
    u64::try_from(column).ok().map(Timestamp::from_unix_millis)
}

/// Verifies a signature. A body that belongs to another key, and is genuine there, was put in the wrong place.
fn verify(
    ring: &Keyring,
    purpose: Purpose,
    key: SessionKey,
    signed: &Signed,
    owner: impl FnOnce() -> Result<SessionKey, Malformed>,
) -> Result<(), Fault> {
    match ring.verify(purpose, key.as_bytes(), &signed.body, &signed.signature) {
        Ok(()) => Ok(()),
        Err(Rejection::UnknownKey { key_id }) => Err(Fault::UnknownKey { key_id }),
        Err(Rejection::Forged) => {
            let elsewhere = |key: SessionKey| ring.verify(purpose, key.as_bytes(), &signed.body, &signed.signature);
            let misfiled = owner().is_ok_and(|owner| elsewhere(owner).is_ok());
            Err(if misfiled { Fault::Misfiled } else { Fault::Tampered })
        }
    }
}

fn rejected(rejection: Rejection) -> Fault {
    match rejection {
        Rejection::UnknownKey { key_id } => Fault::UnknownKey { key_id },
        Rejection::Forged => Fault::Tampered,
    }
}

fn fault(malformed: Malformed) -> Fault {
    match malformed {
        Malformed::Future { version } => Fault::Future { version },
        Malformed::Damaged => Fault::Unparsable,
    }
}
