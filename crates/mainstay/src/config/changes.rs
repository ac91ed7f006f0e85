//! What of one configuration is another in the next: servers by name, other settings by theirs.

use std::collections::{BTreeMap, BTreeSet};

use mainstay_core::id::ServerName;
use serde_json::Value;

use super::{Config, convert};

/// What changes from one configuration to another. Values of servers are not in it: they may be confidential.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// The servers that are new.
    pub added: Vec<ServerName>,
    /// Those that are gone.
    pub removed: Vec<ServerName>,
    /// Those that are otherwise now.
    pub changed: Vec<ServerChange>,
    /// The settings that are otherwise now and belong to no server.
    pub settings: Vec<SettingChange>,
}

/// A server that is otherwise now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerChange {
    /// Its name.
    pub server: ServerName,
    /// The names of what is otherwise in its table: `args`, `env.TOKEN`.
    pub fields: Vec<String>,
    /// Whether what is running of it is of no use any more: its processes are ended, its sessions at HTTP servers made
    /// again (U2, T4).
    pub redefined: bool,
}

/// A setting that is otherwise now, as `config show` shows it: what is confidential looks the same before and after.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingChange {
    /// Its dotted name.
    pub name: String,
    /// Before; `None` if it was not set.
    pub before: Option<String>,
    /// After; `None` if it is not set.
    pub after: Option<String>,
}

impl Config {
    /// What changes from this configuration to `next`.
    pub fn changes(&self, next: &Self) -> Changes {
        let of = |config: &Self| config.servers.keys().cloned().collect::<BTreeSet<_>>();
        let (old, new) = (of(self), of(next));
        let changed = old.intersection(&new).filter_map(|name| self.server_change(next, name));
        Changes {
            added: new.difference(&old).cloned().collect(),
            removed: old.difference(&new).cloned().collect(),
            changed: changed.collect(),
            settings: self.setting_changes(next),
        }
    }

    fn server_change(&self, next: &Self, name: &ServerName) -> Option<ServerChange> {
        let fields = |config: &Self| {
            let table = convert::file(config).servers.remove(name.as_str());
            flattened(&serde_json::to_value(table).unwrap_or_default())
        };
        let fields = different(&fields(self), &fields(next));
        // What is known of a server in running processes and stored records.
        let marks = |config: &Self| {
            let servers = config.upstream_servers().unwrap_or_default();
            servers.iter().find(|server| server.name == *name).map(|server| (server.fingerprint(), server.definition()))
        };
        let redefined = marks(self) != marks(next);
        (!fields.is_empty()).then(|| ServerChange { server: name.clone(), fields, redefined })
    }

    fn setting_changes(&self, next: &Self) -> Vec<SettingChange> {
        let raw = |config: &Self| {
            let file = super::file::File { servers: BTreeMap::new(), ..convert::file(config) };
            flattened(&serde_json::to_value(file).unwrap_or_default())
        };
        let (shown, shown_next) = (flattened(&self.to_json()), flattened(&next.to_json()));
        let names = different(&raw(self), &raw(next)).into_iter();
        let change = |name: String| SettingChange {
            before: shown.get(&name).cloned(),
            after: shown_next.get(&name).cloned(),
            name,
        };
        names.map(change).collect()
    }
}

/// The names whose values differ.
fn different(old: &BTreeMap<String, String>, new: &BTreeMap<String, String>) -> Vec<String> {
    let names: BTreeSet<_> = old.keys().chain(new.keys()).collect();
    names.into_iter().filter(|name| old.get(*name) != new.get(*name)).cloned().collect()
}

/// Every setting in `value` by its dotted name. A list is one setting.
pub fn flattened(value: &Value) -> BTreeMap<String, String> {
    let mut settings = BTreeMap::new();
    flatten(value, String::new(), &mut settings);
    settings
}

fn flatten(value: &Value, name: String, settings: &mut BTreeMap<String, String>) {
    match value {
        Value::Object(members) => {
            for (key, value) in members {
                let name = if name.is_empty() { key.clone() } else { format!("{name}.{key}") };
                flatten(value, name, settings);
            }
        }
        Value::String(text) => {
            settings.insert(name, text.clone());
        }
        Value::Null => {}
        Value::Bool(_) | Value::Number(_) | Value::Array(_) => {
            settings.insert(name, value.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Overrides, Source, Surroundings, load};

    fn of(text: &str) -> Config {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.toml");
        std::fs::write(&path, format!("state_dir = \"/s\"\n{text}")).unwrap();
        let around = Surroundings { var: &|_| None, names: &[], root: false, working_dir: "/".into() };
        load(&Source::File(path), &Overrides::default(), &around).unwrap().config
    }

    fn name(text: &str) -> ServerName {
        ServerName::parse(text).unwrap()
    }

    #[test]
    fn t4_servers_are_told_by_what_becomes_of_them_and_values_only_by_their_names() {
        let server = |rest: &str| format!("[servers.a]\ncommand = \"x\"\n{rest}[servers.b]\nurl = \"http://b/\"\n");
        let base = of(&server("env = { KEEP = \"1\", TOKEN = \"CANARY-1\" }\n"));
        let value = base.changes(&of(&server("env = { KEEP = \"1\", TOKEN = \"CANARY-2\" }\n")));
        let expected = ServerChange { server: name("a"), fields: vec!["env.TOKEN".into()], redefined: true };
        assert_eq!(value, Changes { changed: vec![expected], ..Changes::default() });
        assert!(!format!("{value:?}").contains("CANARY"));
        let patience = base.changes(&of(&server("env = { KEEP = \"1\", TOKEN = \"CANARY-1\" }\npatience = \"3s\"\n")));
        assert_eq!((&*patience.changed[0].fields, patience.changed[0].redefined), (&["patience".into()][..], false));
        let header = of("[servers.b]\nurl = \"http://b/\"\nheaders = { X = \"CANARY\" }\n");
        let gone = base.changes(&header);
        assert_eq!((&*gone.removed, &*gone.changed[0].fields), (&[name("a")][..], &["headers.x".into()][..]));
        assert!(gone.changed[0].redefined, "another header, another session");
        assert_eq!(header.changes(&base).added, [name("a")]);
        assert_eq!(base.changes(&base), Changes::default());
    }

    #[test]
    fn t4_settings_are_told_with_their_values_unless_those_are_secret() {
        let tokens = |value: &str, grace: &str| {
            of(&format!(
                "[session]\ndrain_grace = \"{grace}\"\n[auth]\nmode = \"token\"\ntokens = {{ ci = \"{value}\" }}\n"
            ))
        };
        let changes = tokens("CANARY-0123456789-1", "5s").changes(&tokens("CANARY-0123456789-2", "9s")).settings;
        let told: Vec<_> = changes.iter().map(|change| (&*change.name, change.after.as_deref())).collect();
        assert_eq!(told.len(), 2, "{told:?}");
        assert!(told[0].0.starts_with("auth.tokens") && !format!("{changes:?}").contains("CANARY"), "{changes:?}");
        assert_eq!(told[1], ("session.drain_grace", Some("9s")));
    }
}
