//! The configuration in force, for people and programs to read.

use super::check::MASK;
use super::{Config, convert};

impl Config {
    /// The configuration as TOML, every key set. Values of `env`, `headers` and `auth.tokens` show their references to
    /// variables and files, and `…` for everything else.
    pub fn to_toml(&self) -> String {
        toml::to_string_pretty(&self.shown()).expect("a file of strings, numbers and maps is always TOML")
    }

    /// The same as JSON.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::to_value(self.shown()).expect("a file of strings, numbers and maps is always JSON")
    }

    fn shown(&self) -> super::file::File {
        let mut file = convert::file(self);
        for server in file.servers.values_mut() {
            for value in server.env.values_mut().chain(server.headers.values_mut()) {
                *value = references(value);
            }
        }
        for value in file.auth.tokens.values_mut().flat_map(|values| &mut values.0) {
            *value = references(value);
        }
        file
    }
}

/// The references of a template; everything else of it is `…`.
fn references(template: &str) -> String {
    let sources = mainstay_upstream::Template::parse(template).map(|parsed| parsed.sources()).unwrap_or_default();
    let shown: String = sources.iter().map(|source| format!("${{{source}}}")).collect();
    if shown == template { shown } else { format!("{MASK}{shown}") }
}

#[cfg(test)]
mod tests {
    use mainstay_core::limit::Limit;

    use super::*;

    #[test]
    fn s12_each_limit_has_its_own_place_and_the_name_of_a_setting() {
        let shown = Config::with_defaults("/".into()).to_json();
        for (place, limit) in Limit::ALL.into_iter().enumerate() {
            assert_eq!(limit as usize, place);
            let (table, key) = limit.name().split_once('.').unwrap();
            assert!(shown[table][key].is_number(), "{}", limit.name());
        }
    }

    #[test]
    fn i6_only_references_of_a_value_are_shown() {
        for (template, shown) in [
            ("debug", "…"),
            ("Bearer ${TOKEN}", "…${TOKEN}"),
            ("${A}${file:/run/b}x", "…${A}${file:/run/b}"),
            ("$${OPEN}", "…"),
            ("", ""),
        ] {
            assert_eq!(references(template), shown);
        }
    }
}
