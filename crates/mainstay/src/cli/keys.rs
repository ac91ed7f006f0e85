//! `mainstay keys`.

use anyhow::{Context as _, anyhow};
use clap::Subcommand;
use mainstay_store::keys::{KeyError, Keyring};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::api::Api;
use super::failure::Failure;
use super::output::Output;
use super::{Place, config};
use crate::runtime::fill_with_entropy;

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
    let config = config::of_place(place)?;
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
    Ok(Rotated { keys: keyring.key_count() })
}

fn unrotated(error: KeyError) -> Failure {
    Failure::from(anyhow!(error).context("rotate the keys")).hint("nothing was changed; the old keys stay in force")
}

#[derive(Serialize, Deserialize)]
struct Rotated {
    keys: usize,
}
