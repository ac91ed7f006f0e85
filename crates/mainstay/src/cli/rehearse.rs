//! `mainstay rehearse`: what a keeper runs before it hands over. It reads and checks everything that the next worker
//! will need, changes nothing, and prints the settings; a fault here leaves everything as it is (T2, T4).

use std::io::{self, Read as _, Write as _};

use anyhow::{Context as _, anyhow};
use clap::Args;
use mainstay_keeper::RENEWAL_FORMAT;
use mainstay_store::Store;
use mainstay_store::journal::Journal;
use mainstay_store::keys::Keyring;

use super::failure::Failure;
use super::gateway::{Gateway, read_token};
use super::output::Output;
use super::{ServeArgs, activation, config, state_dir, tokens};
use crate::config::{Config, Loaded, StoreKind};

#[derive(Debug, Args)]
pub(super) struct RehearseArgs {
    /// The form in which the running keeper would pass on what it holds; one that this program does not take is refused.
    /// The keeper always says it, also if only the settings are to change
    #[arg(long, value_name = "NUMBER")]
    renewal_format: Option<u32>,
    #[command(flatten)]
    serve: ServeArgs,
}

/// Checks what a handover to this program and its configuration needs. The settings in force come on standard input,
/// the new ones go to standard output.
pub(super) fn run(mut args: RehearseArgs, out: &Output) -> Result<(), Failure> {
    if let Some(format) = args.renewal_format
        && format != RENEWAL_FORMAT
    {
        let cause = anyhow!(
            "the running gateway passes on what it holds in form {format}, this program takes form {}",
            RENEWAL_FORMAT
        );
        return Err(Failure::from(cause).hint(STOP_AND_START));
    }
    let mut in_force = Vec::new();
    io::stdin().take(SETTINGS_BYTES_MAX).read_to_end(&mut in_force).context("read the settings in force")?;
    let in_force = Config::from_snapshot(&in_force).context("understand the settings in force")?;
    if let Some(gateway) = Gateway::read(&in_force.state_dir)? {
        activation::still_outweigh(&gateway, &in_force, &mut args.serve);
    }
    let Loaded { mut config, warnings } = config::of_serve(&args.serve)?;
    config.state_dir = state_dir::resolved(&config.state_dir)?;
    config::warn(&warnings, out);
    tokens::check(&config)?;
    unmoved(&in_force, &config)?;
    read_token(&config)?;
    stores_fit(&config)?;
    io::stdout().write_all(&config.to_snapshot()).context("say what the settings are")?;
    Ok(())
}

/// What the keeper holds can't be changed under it.
fn unmoved(in_force: &Config, next: &Config) -> Result<(), Failure> {
    let fixed = [
        ("listen", in_force.listen != next.listen),
        ("admin.listen", in_force.admin.listen != next.admin.listen),
        ("state_dir", in_force.state_dir != next.state_dir),
        ("store", in_force.store != next.store),
    ];
    let moved: Vec<_> = fixed.into_iter().filter(|(_, moved)| *moved).map(|(key, _)| format!("`{key}`")).collect();
    if moved.is_empty() {
        return Ok(());
    }
    let cause = anyhow!("{} can't change while the gateway runs", moved.join(" and "));
    Err(Failure::usage(cause).hint(STOP_AND_START))
}

/// Ledger and journal must be of the very schemas that this program writes: a worker of the other program may be needed
/// again.
fn stores_fit(config: &Config) -> Result<(), Failure> {
    if config.store == StoreKind::Memory {
        return Ok(());
    }
    let keyring = Keyring::load(&config.state_dir.join("keys")).context("load the keys")?;
    Store::rehearse(&config.state_dir.join("ledger.db"), &keyring)
        .map_err(|error| Failure::from(anyhow!(error).context("look at the ledger")).hint(STOP_AND_START))?;
    Journal::rehearse(&config.state_dir.join("streams.db"))
        .map_err(|error| Failure::from(anyhow!(error).context("look at the journal")).hint(STOP_AND_START))
}

const STOP_AND_START: &str = "`mainstay stop` and start it again: sessions are kept";
/// More than any settings take.
const SETTINGS_BYTES_MAX: u64 = 16 * 1024 * 1024;
