//! `mainstay keys`.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, anyhow};
use clap::Subcommand;
use mainstay_core::audit::{Action, Actor, AuditEntry};
use mainstay_store::keys::{KeyError, Keyring};
use mainstay_store::{Place as StoredAt, Store, Write};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::Place;
use super::api::{Api, block_on};
use super::failure::Failure;
use super::output::Output;
use super::place::config_of;
use crate::engine::operate::unrecorded_rotation;
use crate::runtime::{Clock, entropy, fill_with_entropy};

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Make a new key that signs and seals from now on. Older ones stay valid: no session ends
    #[command(after_help = "It works on a running gateway, and on the key files of one that is stopped.")]
    Rotate(Place),
}

/// Rotates the keys of the gateway: through its API if it runs, else on its files, under its lock.
pub(super) fn rotate(place: &Place, out: &Output) -> Result<(), Failure> {
    let rotated = match Api::find(place) {
        Ok(api) => api.post("/keys/rotate", &json!({}))?,
        Err(failure) if failure.is_not_running() => rotate_files(place)?,
        Err(failure) => return Err(failure),
    };
    if out.is_json() {
        return out.document(&rotated);
    }
    out.line(&format!("a new key signs from now on; {} keys are accepted, no session has ended", rotated.keys))
}

fn rotate_files(place: &Place) -> Result<Rotated, Failure> {
    let config = config_of(place)?;
    let shown = config.state_dir.display();
    let keys = config.state_dir.join("keys");
    if !keys.is_dir() {
        return Err(Failure::not_found(anyhow!("there are no keys in `{shown}`"))
            .hint("the first start makes them; name the state directory with `--state-dir` or `--config`"));
    }
    // A gateway that starts at this moment and the rotation must not meet.
    let _lock = mainstay_keeper::acquire_lock(&config.state_dir, "keys rotate")
        .with_context(|| format!("take the state directory `{shown}`"))?;
    let keyring = Keyring::rotate(&keys, &mut fill_with_entropy).map_err(unrotated)?;
    let count = keyring.key_count();
    // Killed before this, it leaves a key that nobody has signed with yet: no harm, and the next rotation is on record.
    record(config.state_dir.join("ledger.db"), keyring).map_err(|failure| {
        failure.about(&unrecorded_rotation(count)).hint("no session has ended; see why the ledger can't be written")
    })?;
    Ok(Rotated { keys: count })
}

/// Puts the rotation on record in the ledger of the stopped gateway, if there is one yet. The caller holds its lock.
fn record(ledger: PathBuf, keyring: Keyring) -> Result<(), Failure> {
    if !ledger.exists() {
        return Ok(());
    }
    let (now, nonce) = (Clock::system().now(), u64::from_be_bytes(entropy().context("draw a number")?));
    let store = Store::open(StoredAt::Sqlite(ledger), Arc::new(keyring)).context("open the ledger")?;
    block_on(async {
        // Whatever is left of the gateway that ran before is fenced from here on, as by a start.
        store.begin_epoch(now, nonce).await.context("begin an epoch")?;
        let entry =
            AuditEntry::new(now, Actor::Operator, Action::KeysRotated).with_detail("while the gateway was stopped");
        store.commit(vec![Write::Audit(entry)]).await.context("write the entry")?;
        Ok(())
    })
}

fn unrotated(error: KeyError) -> Failure {
    Failure::from(anyhow!(error).context("rotate the keys")).hint("nothing was changed; the old keys stay in force")
}

#[derive(Serialize, Deserialize)]
struct Rotated {
    keys: usize,
}
