//! Turns what the TOML and JSON readers say into diagnostics for people.

use std::ops::Range;

use toml::de::{DeTable, DeValue};

use super::diagnostic::{Diagnostic, Location};
use super::nearest::nearest;

mod unknown;

/// The diagnostics of a TOML reader's error: where it does not know a key, one for every such key.
pub(super) fn of_toml(origin: &str, text: &str, error: &toml::de::Error) -> Vec<Diagnostic> {
    let unknown = unknown::keys(origin, text);
    if unknown.is_empty() { vec![one_of_toml(origin, text, error)] } else { unknown }
}

fn one_of_toml(origin: &str, text: &str, error: &toml::de::Error) -> Diagnostic {
    let (message, hint) = reworded(error.message());
    let hint = hint.or_else(|| looks_like_yaml(text).then(|| YAML_HINT.to_owned()));
    let fault = Diagnostic { origin: origin.into(), location: None, message, hint };
    match error.span() {
        Some(span) => fault.at(text, span),
        None => fault,
    }
}

/// The diagnostic of a JSON reader's error. `text` is what was read, with lines and columns as in the file.
pub(super) fn of_json(origin: &str, text: &str, error: &serde_json::Error) -> Diagnostic {
    let said = error.to_string();
    let said = said.rsplit_once(" at line ").map_or(said.as_str(), |(message, _)| message);
    let (message, hint) = reworded(said);
    let location = Some(Location::of_line(text, error.line(), error.column()));
    Diagnostic { origin: origin.into(), location, message, hint }
}

/// Where the key at `path` stands in the TOML `text`: the key of a table, else the value. Falls back to the nearest
/// table above that exists.
pub(super) fn locate_toml(text: &str, path: &[String]) -> Option<Range<usize>> {
    let document = DeTable::parse(text).ok()?;
    let mut table = document.get_ref();
    let mut found = None;
    for (depth, name) in path.iter().enumerate() {
        // Names of headers are compared without regard to case, and kept in lower case.
        let alike = || table.iter().find(|(key, _)| key.get_ref().eq_ignore_ascii_case(name));
        let Some((key, value)) = table.iter().find(|(key, _)| key.get_ref() == name).or_else(alike) else {
            break;
        };
        found = Some(if depth + 1 == path.len() && !value.get_ref().is_table() { value.span() } else { key.span() });
        let DeValue::Table(inner) = value.get_ref() else {
            break;
        };
        table = inner;
    }
    found
}

/// Where the last of the names of `path` stands as a key in the JSON `text`, each one looked for after the one before.
pub(super) fn locate_json(text: &str, path: &[String]) -> Option<Range<usize>> {
    let mut found = None;
    let mut from = 0;
    for name in path {
        let quoted = serde_json::to_string(name).ok()?;
        let is_key = |at: &usize| text[*at + quoted.len()..].trim_start().starts_with(':');
        let exact = text[from..].match_indices(&quoted).map(|(at, _)| from + at).find(is_key);
        let alike = || {
            let (rest, quoted) = (text[from..].to_ascii_lowercase(), quoted.to_ascii_lowercase());
            rest.match_indices(&quoted).map(|(at, _)| from + at).find(is_key)
        };
        let Some(at) = exact.or_else(alike) else {
            break;
        };
        from = at + quoted.len();
        found = Some(at..from);
    }
    found
}

/// Serde's words for unknown keys and values become ours, with a suggestion; string values, which may be secrets,
/// are taken out of the rest.
fn reworded(message: &str) -> (String, Option<String>) {
    let message = message.lines().next().unwrap_or(message);
    for (theirs, ours) in [("unknown field", "unknown key"), ("unknown variant", "unknown value")] {
        let mut names = message.split('`').skip(1).step_by(2);
        if let (true, Some(word)) = (message.starts_with(theirs), names.next()) {
            let known: Vec<&str> = names.collect();
            let known: Vec<&str> = known.into_iter().filter(|value| !LATER_VALUES.contains(value)).collect();
            return (format!("{ours} `{word}`"), suggestion(word, &known));
        }
    }
    if message == "wanted string or table" {
        return ("a text is expected here".into(), None);
    }
    match in_plain_words(message) {
        Some(told) => told,
        None => (without_strings(message), None),
    }
}

/// `invalid type: integer `3`, expected a string` in the words of people who write files.
fn in_plain_words(message: &str) -> Option<(String, Option<String>)> {
    let rest = message.strip_prefix("invalid type: ").or_else(|| message.strip_prefix("invalid value: "))?;
    // The value may be a secret that has an `expected` in it: the last one is the reader's.
    let (found, expected) = rest.rsplit_once(", expected ")?;
    let found = FOUND.iter().find(|(theirs, _)| found.starts_with(theirs)).map_or("another value", |(_, ours)| ours);
    if let Some(table) = expected.strip_prefix("struct ") {
        let name = table.trim_end_matches("Table").to_ascii_lowercase();
        let hint = match name.as_str() {
            "server" => "write `[servers.NAME]`, and below it `command = …` or `url = …`".to_owned(),
            name => format!("write `[{name}]`, and its keys below it"),
        };
        return Some((format!("a table is expected here, not {found}"), Some(hint)));
    }
    let ours = EXPECTED.iter().find(|(theirs, _)| *theirs == expected).map_or(expected, |(_, ours)| ours);
    Some((format!("{ours} is expected here, not {found}"), None))
}

/// Whether the first line that says something is `key:`, as in YAML.
fn looks_like_yaml(text: &str) -> bool {
    let first = text.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with('#')).unwrap_or_default();
    let key = first.split(':').next().filter(|_| first.contains(':')).unwrap_or_default();
    first == "---" || (!key.is_empty() && key.chars().all(|symbol| symbol.is_alphanumeric() || "_-".contains(symbol)))
}

/// What could stand in place of `word`.
fn suggestion(word: &str, known: &[&str]) -> Option<String> {
    if LATER_KEYS.contains(&word) {
        return Some(format!("`{word}` is not in this version; leave it out"));
    }
    if let Some(near) = nearest(word, known.iter().copied()) {
        return Some(format!("did you mean `{near}`?"));
    }
    (!known.is_empty()).then(|| format!("known here: {}", known.join(", ")))
}

/// `invalid type: string "…", expected a map` without the string.
fn without_strings(message: &str) -> String {
    let Some((head, rest)) = message.split_once("string \"") else {
        return message.into();
    };
    match rest.rsplit_once('"') {
        Some((_, tail)) => format!("{head}string{tail}"),
        None => format!("{head}string"),
    }
}

const YAML_HINT: &str =
    "this looks like YAML; a configuration is TOML (`[servers.files]`), or a client's mcpServers JSON";
/// Values that are read for the sake of a better message, and are not in this version.
const LATER_VALUES: &[&str] = &["jwt", "both", "principal", "all"];
const FOUND: &[(&str, &str)] = &[
    ("string", "a text"),
    ("integer", "a number"),
    ("floating point", "a number"),
    ("boolean", "true or false"),
    ("sequence", "a list"),
    ("map", "a table"),
    ("number", "a number"),
    ("list in a list", "a list in a list"),
];
const EXPECTED: &[(&str, &str)] = &[
    ("usize", "a whole number"),
    ("a string", "a text"),
    ("path string", "a path, as a text,"),
    ("a sequence", "a list of texts"),
    ("a map", "a table"),
    ("a boolean", "true or false"),
];
/// Keys of the design that this version does not have yet.
const LATER_KEYS: &[&str] = &["keep_alive", "watch", "issuer", "audience"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_keys_get_a_suggestion_or_the_list() {
        let near = reworded("unknown field `lisen`, expected one of `listen`, `store`");
        assert_eq!(near, ("unknown key `lisen`".into(), Some("did you mean `listen`?".into())));
        let far = reworded("unknown field `colour`, expected `listen` or `store`");
        assert_eq!(far.1.as_deref(), Some("known here: listen, store"));
        let later = reworded("unknown field `keep_alive`, expected `idle_expiry`");
        assert!(later.1.unwrap().contains("not in this version"));
        let value = reworded("unknown variant `sesion`, expected one of `session`, `all`");
        assert_eq!(value, ("unknown value `sesion`".into(), Some("did you mean `session`?".into())));
        let value = reworded("unknown variant `oidc`, expected one of `none`, `token`, `jwt`");
        assert_eq!(value.1.as_deref(), Some("known here: none, token"));
    }

    #[test]
    fn i6_a_string_of_the_wrong_type_is_not_repeated() {
        let (message, _) = reworded("invalid type: string \"Bearer CAN\"ARY\", expected a map");
        assert_eq!(message, "a table is expected here, not a text");
        let (message, _) = reworded("invalid type: integer `424242`, expected a string");
        assert_eq!(message, "a text is expected here, not a number");
    }

    #[test]
    fn keys_are_found_by_their_path() {
        let text = "[servers.a]\nurl = \"x\"\n[servers.b]\npatience = \"1s\"\n";
        let path = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let at = |names: &[&str]| &text[locate_toml(text, &path(names)).unwrap()];
        assert_eq!(at(&["servers", "b", "patience"]), "\"1s\"");
        assert_eq!(at(&["servers", "b", "absent"]), "b");
        assert_eq!(locate_toml(text, &path(&["nowhere"])), None);
        let json = "{\"mcpServers\": {\"a\": {\"url\": \"a\"}, \"b\": {\"url\" : 1}}}";
        let range = locate_json(json, &path(&["mcpServers", "b", "url"])).unwrap();
        assert_eq!((&json[range.clone()], range.start), ("\"url\"", json.rfind("\"url\"").unwrap()));
    }
}
