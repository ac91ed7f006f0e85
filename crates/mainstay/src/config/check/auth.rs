//! The rules of `[auth]` (I1, I2).

use std::collections::BTreeMap;
use std::net::SocketAddr;

use super::{Faults, MASK, TEMPLATE_HINT};
use crate::config::file::{self, AuthTable};
use crate::config::tokens::{TOKENS_PER_NAME_MAX, TokenValue, TokenValues};
use crate::config::{Auth, AuthMode, Template};

/// Who clients are, as `table` says.
pub(super) fn auth(table: &AuthTable, listen: SocketAddr, faults: &mut Faults) -> Auth {
    let mode = match table.mode.unwrap_or(file::AuthMode::None) {
        file::AuthMode::None => {
            open(table, listen, faults);
            AuthMode::None
        }
        file::AuthMode::Token => {
            if table.tokens.is_empty() {
                let hint = "make one with `mainstay tokens new` and name it under `[auth.tokens]`";
                faults.add(&["auth", "mode"], "there are no tokens, so nobody could connect", hint);
            }
            AuthMode::Token
        }
        file::AuthMode::Jwt => {
            let hint = "use \"token\", or \"none\" on loopback";
            faults.add(&["auth", "mode"], "this mode of `auth` is not in this version", hint);
            AuthMode::None
        }
    };
    Auth { mode, require_agent: table.require_agent.unwrap_or(false), tokens: tokens(&table.tokens, faults) }
}

/// The rules of mode `none`.
fn open(table: &AuthTable, listen: SocketAddr, faults: &mut Faults) {
    if !listen.ip().is_loopback() {
        let message = format!("`{listen}` can be reached from elsewhere, and `auth.mode = \"none\"` lets everybody in");
        let hint = "listen on 127.0.0.1 or [::1], or set `auth.mode = \"token\"`";
        faults.add(&["listen"], &message, hint);
    }
    if !table.tokens.is_empty() {
        let message = "`auth.mode = \"none\"` lets everybody in, and there are tokens";
        faults.add(&["auth", "tokens"], message, "set `auth.mode = \"token\"`, or remove the tokens");
    }
}

fn tokens(written: &BTreeMap<String, TokenValues>, faults: &mut Faults) -> BTreeMap<Box<str>, Vec<Template>> {
    if written.len() > TOKEN_NAMES_MAX {
        faults.add(&["auth", "tokens"], &format!("more than {TOKEN_NAMES_MAX} names"), "");
    }
    for (name, TokenValues(values)) in written {
        let path = ["auth", "tokens", name.as_str()];
        if !is_name(name) {
            let hint = "1 to 64 letters, digits, `_`, `.`, `-`, `+` and `@`";
            faults.add(&path, &format!("`{name}` is no name for a token's holder"), hint);
        }
        if values.is_empty() || values.len() > TOKENS_PER_NAME_MAX {
            faults.add(&path, &format!("`{name}` needs 1 to {TOKENS_PER_NAME_MAX} values"), "");
        }
        for value in values {
            fits(&path, name, value, faults);
        }
    }
    let templates = |values: &TokenValues| values.0.iter().map(|value| Template::new(value)).collect();
    written.iter().map(|(name, values)| (name.as_str().into(), templates(values))).collect()
}

/// Checks the form of a value, and the value itself unless it depends on variables, which are filled in at the start.
fn fits(path: &[&str], name: &str, value: &str, faults: &mut Faults) {
    let template = match mainstay_upstream::Template::parse(value) {
        Ok(template) => template,
        Err(error) => {
            return faults.add(path, &format!("a value of `{name}` is malformed: {error}"), TEMPLATE_HINT);
        }
    };
    if value.starts_with(MASK) {
        return faults.add(
            path,
            &format!("a value of `{name}` was masked by `config show`"),
            "write the value itself, or `${NAME}`",
        );
    }
    if !template.sources().is_empty() {
        return;
    }
    if let Err(unfit) = TokenValue::parse(&value.replace("$${", "${")) {
        faults.add(path, &format!("a token of `{name}` does not fit: {unfit}"), unfit.hint());
    }
}

fn is_name(name: &str) -> bool {
    let known = |symbol: u8| symbol.is_ascii_alphanumeric() || b"_.-+@".contains(&symbol);
    (1..=TOKEN_NAME_CHARS_MAX).contains(&name.len()) && name.bytes().all(known)
}

/// Every lookup compares with all values of all of them.
const TOKEN_NAMES_MAX: usize = 256;
const TOKEN_NAME_CHARS_MAX: usize = 64;
