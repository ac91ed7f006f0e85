//! `mainstay tokens`: make a token for a client. Also how `serve` finds out that one is missing.

use std::sync::Arc;

use anyhow::Context as _;
use mainstay_core::id::base64url;
use serde::Serialize;

use super::failure::Failure;
use super::output::Output;
use crate::auth::{self, TokenFault};
use crate::config::{AuthMode, Config};
use crate::runtime::entropy;
use crate::worker::ProcessEnvironment;

/// Makes a token and prints it with its hash. It is kept nowhere.
pub(super) fn new(out: &Output) -> Result<(), Failure> {
    let token = base64url(&entropy::<TOKEN_BYTES>().context("draw a token")?);
    let made = Made { hash: auth::written_hash(&token), token };
    if out.is_json() {
        return out.document(&made);
    }
    out.line(&format!("token  {}\nhash   {}", made.token, made.hash))?;
    out.note(&format!(
        "\nThe client sends the token: `Authorization: Bearer TOKEN`. The gateway needs its hash:\n\n[auth]\nmode = \"token\"\n\n[auth.tokens]\nNAME = \"{}\"",
        made.hash
    ));
    Ok(())
}

/// Checks that every token of the configuration is there, before anything is started.
pub(super) fn check(config: &Config) -> Result<(), Failure> {
    match config.auth.mode {
        AuthMode::None => Ok(()),
        AuthMode::Token => auth::check(&config.auth, Arc::new(ProcessEnvironment)).map_err(|fault| {
            let hint = match &fault {
                TokenFault::Unresolved { .. } => "set the variable or make the file, or change `[auth.tokens]`",
                TokenFault::Unfit { cause, .. } => cause.hint(),
                TokenFault::Shared { .. } => "a token proves one name: `mainstay tokens new` makes another",
            };
            Failure::usage(fault).hint(hint)
        }),
    }
}

/// A token and what the configuration needs of it.
#[derive(Serialize)]
struct Made {
    token: String,
    hash: String,
}

/// Nobody guesses that many random bytes.
const TOKEN_BYTES: usize = 32;
