//! Every key of a TOML file that the schema does not know. The reader itself stops at the first.

use serde_json::Value;
use toml::de::{DeTable, DeValue};

use super::suggestion;
use crate::config::diagnostic::Diagnostic;
use crate::config::schema;

/// A diagnostic for each unknown key, in the order of the file.
pub(super) fn keys(origin: &str, text: &str) -> Vec<Diagnostic> {
    let Ok(document) = DeTable::parse(text) else {
        return Vec::new();
    };
    let schema = schema::document();
    let mut walk = Walk { origin, text, schema: &schema, found: Vec::new() };
    walk.table(document.get_ref(), &schema);
    walk.found.sort_by_key(|(at, _)| *at);
    walk.found.into_iter().map(|(_, fault)| fault).collect()
}

struct Walk<'a> {
    origin: &'a str,
    text: &'a str,
    schema: &'a Value,
    found: Vec<(usize, Diagnostic)>,
}

impl<'a> Walk<'a> {
    fn table(&mut self, table: &DeTable<'_>, described: &'a Value) {
        let described = self.resolved(described);
        let properties = described["properties"].as_object();
        for (key, value) in table {
            let (name, inner) = (key.get_ref(), value.get_ref());
            let deeper = match (properties, properties.and_then(|known| known.get(name.as_ref()))) {
                (_, Some(property)) => Some(property),
                // A table of anything, such as `servers` and `env`.
                (None, None) => described.get("additionalProperties"),
                (Some(known), None) => {
                    let known: Vec<&str> = known.keys().map(String::as_str).collect();
                    let fault = Diagnostic::new(self.origin, format!("unknown key `{name}`")).at(self.text, key.span());
                    self.found.push((key.span().start, Diagnostic { hint: suggestion(name, &known), ..fault }));
                    None
                }
            };
            if let (Some(deeper), DeValue::Table(inner)) = (deeper, inner) {
                self.table(inner, deeper);
            }
        }
    }

    /// The description that `described` refers to, or itself.
    fn resolved(&self, described: &'a Value) -> &'a Value {
        let Some(reference) = described["$ref"].as_str() else { return described };
        self.schema.pointer(reference.trim_start_matches('#')).unwrap_or(&Value::Null)
    }
}
