//! The environment variables that Mainstay reads, each declared once.
//!
//! A variable outweighs the file and is outweighed by a flag. Reading goes through a function, so that tests never
//! touch the process.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::str::FromStr;

use super::diagnostic::Diagnostic;
use super::file::{AuthMode, File, TerminalStatus};
use super::nearest::nearest;

/// One variable.
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// The key of the file that it stands for; none for what only concerns the process.
    pub key: Option<&'static str>,
    /// What it means.
    pub doc: &'static str,
    apply: fn(&mut File, &str) -> Result<(), String>,
}

/// Reads a variable of the process.
#[expect(clippy::disallowed_methods, reason = "this is the home of reading the environment")]
pub fn process(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The names of the process's variables, without those that are no Unicode.
pub fn process_names() -> Vec<String> {
    std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()).collect()
}

/// A warning for each variable that looks like one of Mainstay's and is none: it is mistyped, or of another version.
/// Those of `used` are the configuration's own.
pub(super) fn strangers(names: &[String], used: &BTreeSet<String>) -> Vec<Diagnostic> {
    let known = || VARIABLES.iter().map(|variable| variable.name);
    let stranger = |name: &&String| name.starts_with(PREFIX) && known().all(|known| known != **name) && !is_ours(name);
    let warning = |name: &String| {
        let warning = Diagnostic::new(name, "no such variable is known here; it is left aside");
        match nearest(name, known()) {
            Some(near) => warning.with_hint(format!("did you mean `{near}`?")),
            None => warning.with_hint("variables are `MAINSTAY_` and the key, as `MAINSTAY_SESSION_IDLE_EXPIRY`"),
        }
    };
    names.iter().filter(|name| !used.contains(*name)).filter(stranger).map(warning).collect()
}

/// Whether the variable belongs to another part of the project: children are marked by one, the tests have some.
fn is_ours(name: &str) -> bool {
    [mainstay_keeper::MARKER_VARIABLE, "MAINSTAY_BIN"].contains(&name) || name.starts_with("MAINSTAY_TEST_")
}

/// The layer that the environment makes. Empty variables count as absent.
///
/// # Errors
/// The first variable whose value is not of its kind.
pub(super) fn layer(var: &dyn Fn(&str) -> Option<String>) -> Result<File, Diagnostic> {
    let mut file = File::default();
    for variable in VARIABLES {
        let Some(value) = var(variable.name).filter(|value| !value.is_empty()) else {
            continue;
        };
        (variable.apply)(&mut file, &value)
            .map_err(|message| Diagnostic::new(variable.name, message).with_hint(variable.doc))?;
    }
    Ok(file)
}

const PREFIX: &str = "MAINSTAY_";
/// The file of the configuration, for commands without `--config`.
pub const CONFIG: &str = "MAINSTAY_CONFIG";
/// The log filter, for example `info` or `mainstay=debug`.
pub const LOG: &str = "MAINSTAY_LOG";
/// The log's format: `human` or `json`.
pub const LOG_FORMAT: &str = "MAINSTAY_LOG_FORMAT";

/// Every variable. Those without a key are read by the command line.
pub const VARIABLES: &[Variable] = &[
    Variable { name: CONFIG, key: None, doc: "the configuration file", apply: |_, _| Ok(()) },
    Variable { name: LOG, key: None, doc: "the log filter, such as `mainstay=debug`", apply: |_, _| Ok(()) },
    Variable { name: LOG_FORMAT, key: None, doc: "`human` or `json`", apply: |_, _| Ok(()) },
    Variable {
        name: "MAINSTAY_LISTEN",
        key: Some("listen"),
        doc: "where MCP clients connect",
        apply: |file, text| set(&mut file.listen, text),
    },
    Variable {
        name: "MAINSTAY_STATE_DIR",
        key: Some("state_dir"),
        doc: "the directory of everything durable",
        apply: |file, text| set(&mut file.state_dir, text),
    },
    Variable {
        name: "MAINSTAY_STORE",
        key: Some("store"),
        doc: "`sqlite` or `memory`",
        apply: |file, text| set(&mut file.store, text),
    },
    Variable {
        name: "MAINSTAY_WATCH",
        key: Some("watch"),
        doc: "`true` puts a changed file in force by itself",
        apply: |file, text| set(&mut file.watch, text),
    },
    Variable {
        name: "MAINSTAY_ADMIN_LISTEN",
        key: Some("admin.listen"),
        doc: "where the admin port listens",
        apply: |file, text| set(&mut file.admin.listen, text),
    },
    Variable {
        name: "MAINSTAY_ADMIN_TOKEN_FILE",
        key: Some("admin.token_file"),
        doc: "the file with the admin token",
        apply: |file, text| set(&mut file.admin.token_file, text),
    },
    Variable {
        name: "MAINSTAY_SESSION_IDLE_EXPIRY",
        key: Some("session.idle_expiry"),
        doc: "idle time after which a session expires",
        apply: |file, text| set(&mut file.session.idle_expiry, text),
    },
    Variable {
        name: "MAINSTAY_SESSION_SUSPEND_AFTER",
        key: Some("session.suspend_after"),
        doc: "after how long the instance of an unused session is let go",
        apply: |file, text| set(&mut file.session.suspend_after, text),
    },
    Variable {
        name: "MAINSTAY_SESSION_ANSWER_JSON_WITHIN",
        key: Some("session.answer_json_within"),
        doc: "how long an answer may take and still go out as plain JSON",
        apply: |file, text| set(&mut file.session.answer_json_within, text),
    },
    Variable {
        name: "MAINSTAY_SESSION_DRAIN_GRACE",
        key: Some("session.drain_grace"),
        doc: "how long a drained session's calls in flight may go on",
        apply: |file, text| set(&mut file.session.drain_grace, text),
    },
    Variable {
        name: "MAINSTAY_SESSION_TOMBSTONE_RETENTION",
        key: Some("session.tombstone_retention"),
        doc: "how long the tombstone of an ended session is kept",
        apply: |file, text| set(&mut file.session.tombstone_retention, text),
    },
    Variable {
        name: "MAINSTAY_SESSION_TERMINAL_STATUS",
        key: Some("session.terminal_status"),
        doc: "`spec` or `distinct`",
        apply: |file, text| {
            let known = [("spec", TerminalStatus::Spec), ("distinct", TerminalStatus::Distinct)];
            choose(&mut file.session.terminal_status, text, &known)
        },
    },
    Variable {
        name: "MAINSTAY_SESSION_MAX_PER_PRINCIPAL",
        key: Some("session.max_per_principal"),
        doc: "live sessions of one principal",
        apply: |file, text| set(&mut file.session.max_per_principal, text),
    },
    Variable {
        name: "MAINSTAY_SESSION_CALLS_IN_FLIGHT_MAX",
        key: Some("session.calls_in_flight_max"),
        doc: "calls in flight in one session",
        apply: |file, text| set(&mut file.session.calls_in_flight_max, text),
    },
    Variable {
        name: "MAINSTAY_SESSION_STREAMS_MAX",
        key: Some("session.streams_max"),
        doc: "streams of one session that are open or can still be resumed",
        apply: |file, text| set(&mut file.session.streams_max, text),
    },
    Variable {
        name: "MAINSTAY_LIMITS_BODY_BYTES_MAX",
        key: Some("limits.body_bytes_max"),
        doc: "the longest request body, in bytes",
        apply: |file, text| set(&mut file.limits.body_bytes_max, text),
    },
    Variable {
        name: "MAINSTAY_LIMITS_HEADER_BYTES_MAX",
        key: Some("limits.header_bytes_max"),
        doc: "the longest head of a request, in bytes",
        apply: |file, text| set(&mut file.limits.header_bytes_max, text),
    },
    Variable {
        name: "MAINSTAY_LIMITS_SESSIONS_MAX",
        key: Some("limits.sessions_max"),
        doc: "live sessions in all",
        apply: |file, text| set(&mut file.limits.sessions_max, text),
    },
    Variable {
        name: "MAINSTAY_LIMITS_INITIALIZE_PER_MINUTE",
        key: Some("limits.initialize_per_minute"),
        doc: "sessions that one peer may open within a minute; 0 does not limit them",
        apply: |file, text| set(&mut file.limits.initialize_per_minute, text),
    },
    Variable {
        name: "MAINSTAY_LIMITS_STATELESS_REQUESTS_PER_PRINCIPAL",
        key: Some("limits.stateless_requests_per_principal"),
        doc: "requests without a session that one principal may have in flight",
        apply: |file, text| set(&mut file.limits.stateless_requests_per_principal, text),
    },
    Variable {
        name: "MAINSTAY_LIMITS_LISTENS_PER_PRINCIPAL",
        key: Some("limits.listens_per_principal"),
        doc: "streams that one principal may listen to without a session",
        apply: |file, text| set(&mut file.limits.listens_per_principal, text),
    },
    Variable {
        name: "MAINSTAY_AUTH_MODE",
        key: Some("auth.mode"),
        doc: "`none` or `token`",
        apply: |file, text| {
            let known = [("none", AuthMode::None), ("token", AuthMode::Token), ("jwt", AuthMode::Jwt)];
            choose(&mut file.auth.mode, text, &known)
        },
    },
    Variable {
        name: "MAINSTAY_AUTH_REQUIRE_AGENT",
        key: Some("auth.require_agent"),
        doc: "`true` or `false`: whether every request must name its agent",
        apply: |file, text| set(&mut file.auth.require_agent, text),
    },
];

fn set<T: FromStr<Err: Display>>(field: &mut Option<T>, text: &str) -> Result<(), String> {
    *field = Some(text.parse().map_err(|error| format!("the value does not fit: {error}"))?);
    Ok(())
}

fn choose<T: Copy>(field: &mut Option<T>, text: &str, known: &[(&str, T)]) -> Result<(), String> {
    let found = known.iter().find(|(name, _)| *name == text).map(|(_, value)| *value);
    *field = Some(found.ok_or_else(|| format!("`{text}` is none of its values"))?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variable_is_declared_once_under_the_name_of_its_key() {
        for (index, variable) in VARIABLES.iter().enumerate() {
            assert!(VARIABLES[..index].iter().all(|other| other.name != variable.name), "{}", variable.name);
            if let Some(key) = variable.key {
                let expected = format!("MAINSTAY_{}", key.replace('.', "_").to_uppercase());
                assert_eq!(variable.name, expected);
            }
        }
    }

    #[test]
    fn a_value_that_does_not_fit_names_its_variable() {
        let var = |name: &str| (name == "MAINSTAY_SESSION_IDLE_EXPIRY").then(|| "soon".to_owned());
        let fault = layer(&var).unwrap_err();
        assert_eq!(fault.origin, "MAINSTAY_SESSION_IDLE_EXPIRY");
        assert!(fault.message.contains("`soon`"), "{fault}");
    }

    #[test]
    fn a_mistyped_variable_is_told_of_with_the_nearest() {
        let names =
            ["MAINSTAY_LISTE", "MAINSTAY_LISTEN", "MAINSTAY_X", "MAINSTAY_USED", "HOME", "MAINSTAY_TEST_THREADS"]
                .map(str::to_owned);
        let warnings = strangers(&names, &BTreeSet::from(["MAINSTAY_USED".to_owned()]));
        assert_eq!(
            warnings.iter().map(|warning| warning.origin.as_str()).collect::<Vec<_>>(),
            ["MAINSTAY_LISTE", "MAINSTAY_X"]
        );
        assert_eq!(warnings[0].hint.as_deref(), Some("did you mean `MAINSTAY_LISTEN`?"));
    }

    #[test]
    fn an_empty_variable_counts_as_absent() {
        assert!(layer(&|_| Some(String::new())).unwrap().listen.is_none());
    }
}
