//! Who set a key: a flag, a variable, or a place in the file.

use super::Overrides;
use crate::config::check::Fault;
use crate::config::diagnostic::Diagnostic;
use crate::config::{environment, fault};

/// A file's text, kept to find places in it.
pub(super) struct Text {
    pub origin: String,
    pub text: String,
    pub json: bool,
}

impl Text {
    /// The fault with its place in the file.
    pub(super) fn place(&self, fault: Fault) -> Diagnostic {
        let span = match self.json {
            true => fault::locate_json(&self.text, &fault.path[1.min(fault.path.len())..]),
            false => fault::locate_toml(&self.text, &fault.path),
        };
        let found = told(&self.origin, fault);
        match span {
            Some(span) => found.at(&self.text, span),
            None => found,
        }
    }
}

/// Finds out who set a key.
pub(super) struct Origins<'a> {
    pub var: &'a dyn Fn(&str) -> Option<String>,
    pub flags: &'a Overrides,
    pub text: Option<Text>,
}

impl Origins<'_> {
    /// The fault with the name, and perhaps the place, of what set its key.
    pub(super) fn place(&self, fault: Fault) -> Diagnostic {
        let key = fault.path.join(".");
        let flag = match key.as_str() {
            "listen" => self.flags.listen.map(|_| "--listen"),
            "admin.listen" => self.flags.admin_listen.map(|_| "--admin"),
            "state_dir" => self.flags.state_dir.as_ref().map(|_| "--state-dir"),
            _ => None,
        };
        let set = |name: &&str| (self.var)(name).is_some_and(|value| !value.is_empty());
        let variable = environment::VARIABLES.iter().find(|variable| variable.key == Some(&key));
        let above = flag.or_else(|| variable.map(|variable| variable.name).filter(set));
        match (above, &self.text) {
            (Some(origin), _) => told(origin, fault),
            (None, None) => told("command line", fault),
            (None, Some(text)) => text.place(fault),
        }
    }
}

fn told(origin: &str, fault: Fault) -> Diagnostic {
    Diagnostic { origin: origin.into(), location: None, message: fault.message, hint: fault.hint }
}
