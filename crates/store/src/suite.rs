//! What every backend must do: one suite, run on memory and on SQLite.

mod faults;
mod histories;
mod keys;
mod life;
mod plans;
mod queries;
mod rules;
mod sqlite;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::id::{Epoch, ServerName, SessionKey};
use mainstay_core::principal::Principal;
use mainstay_core::resume::{Continuity, OwedDelete, ResumeRecord, ServerCard, UpstreamId};
use mainstay_core::session::{Change, ClientName, Contract, SessionRecord, State, Tombstone};
use mainstay_core::time::Timestamp;
use mainstay_core::wire::method::Version;
use mainstay_core::wire::modern::Spoken;

use crate::keys::Keyring;
use crate::{Place, Store, Write};

fn at(seconds: u64) -> Timestamp {
    Timestamp::from_unix_millis(1_700_000_000_000 + seconds * 1000)
}

/// The key of the `number`th session. Different ones have different refs.
fn key(number: u32) -> SessionKey {
    let mut bytes = [0; 32];
    bytes[..4].copy_from_slice(&number.to_be_bytes());
    bytes[31] = 1;
    SessionKey::from_bytes(bytes)
}

fn server() -> ServerName {
    ServerName::parse("files").unwrap()
}

fn record(number: u32) -> SessionRecord {
    SessionRecord {
        key: key(number),
        server: server(),
        principal: Principal::Token("alice".into()),
        state: State::Ready,
        generation: 1,
        epoch: Epoch { counter: 1, nonce: 1 },
        opened_at: at(0),
        seen_at: at(0),
        deadline: at(60),
        version: Version::V2025_11_25,
        client: ClientName::new("client", "1.0"),
        agent: Some("scout".into()),
        initialize_params: Bytes::from_static(b"{\"protocolVersion\":\"2025-11-25\"}"),
        confirmed: false,
        contract: Contract::from_bytes([3; 32]),
    }
}

fn stone(number: u32, generation: u64) -> Tombstone {
    let record = record(number);
    Tombstone {
        key: record.key,
        server: record.server,
        principal: record.principal,
        client: record.client,
        agent: record.agent,
        state: State::Deleted,
        reason: "deleted by the client".into(),
        opened_at: at(0),
        ended_at: at(10),
        keep_until: at(100),
        version: record.version,
        generation,
        epoch: record.epoch,
    }
}

fn resume(number: u32) -> ResumeRecord {
    ResumeRecord {
        key: key(number),
        server: server(),
        url: "http://127.0.0.1:1/mcp".into(),
        fingerprint: [5; 32],
        upstream_id: UpstreamId::parse(SECRET),
        version: "2025-11-25".into(),
        initialize_result: Bytes::from_static(b"{}"),
        log_level: None,
        subscriptions: ["file:///a".into()].into(),
        told: true,
        last_event_id: Some("7".into()),
        saved_at: at(0),
        used_at: at(1),
        continuity: Continuity::Fresh,
        remade_count: 0,
        remade_reason: None,
    }
}

fn owed() -> OwedDelete {
    resume(0).owed_delete(at(0)).unwrap()
}

fn card() -> ServerCard {
    ServerCard {
        server: server(),
        fingerprint: [5; 32],
        initialize_result: Bytes::from_static(b"{\"serverInfo\":{}}"),
        spoken: Spoken { legacy: None, modern: Some(false) },
        saved_at: at(0),
    }
}

fn insert(number: u32) -> Write {
    Write::Session(Change::Insert(record(number)))
}

fn end(number: u32, generation: u64) -> Write {
    Write::Session(Change::End(stone(number, generation)))
}

fn touch(number: u32, seen_at: Timestamp, deadline: Timestamp) -> Write {
    Write::Session(Change::Touch { key: key(number), seen_at, deadline })
}

fn ring() -> Arc<Keyring> {
    Arc::new(Keyring::ephemeral(&mut |bytes| bytes.fill(42)))
}

/// One ledger of each kind, without an epoch. The directory lives as long as the test.
fn ledgers() -> (tempfile::TempDir, [Store; 2]) {
    let home = tempfile::tempdir().unwrap();
    let places = [Place::Memory, Place::Sqlite(home.path().join("ledger.db"))];
    (home, places.map(|place| Store::open(place, ring()).unwrap()))
}

/// A directory for what ends processes many times over: in memory, where the machine has such a place, for there an
/// fsync costs nothing. What it shows is of processes, not of power.
fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// Runs `test` on each kind of ledger, in its first epoch.
async fn on_each(test: impl AsyncFn(Store)) {
    let (_home, stores) = ledgers();
    for store in stores {
        store.begin_epoch(at(0), 1).await.unwrap();
        test(store).await;
    }
}

/// The upstream id that no file may show.
const SECRET: &str = "upstream-canary-0123456789";
const DAY: Duration = Duration::from_secs(24 * 3600);
