//! The `mcpServers` files of clients (Claude Desktop, Claude Code, Cursor, VS Code and their kin), read as they are.
//!
//! Client files have no common schema, so this is tolerant: what it doesn't know is left aside with a warning. Comments
//! and trailing commas, which VS Code writes, are allowed.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};

use super::diagnostic::Diagnostic;
use super::expand::{self, Expanded, Words};
use super::fault;
use super::file::{ServerTable, Transport};

mod names;
mod unique;

pub(super) use names::{as_name, name_of_command, name_of_url};

/// The servers of a client's file.
pub(super) struct Client {
    pub servers: BTreeMap<String, ServerTable>,
    pub warnings: Vec<Diagnostic>,
}

/// Whether the file is a client's JSON rather than TOML. No TOML document begins with a brace or a slash.
pub(super) fn is_json(path: &Path, text: &str) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    match extension {
        Some("json" | "jsonc") => true,
        Some("toml") => false,
        _ => text.trim_start_matches('\u{feff}').trim_start().starts_with(['{', '/']),
    }
}

/// Reads a client's file.
///
/// # Errors
/// If it is no JSON, has no table of servers, or an entry can't be understood.
pub(super) fn read(origin: &str, text: &str, words: &Words<'_>) -> Result<Client, Diagnostic> {
    let plain = without_comments(text);
    let root = unique::parse(&plain).map_err(|error| fault::of_json(origin, text, &error))?;
    let reader = Reader { origin, text, words, warnings: Vec::new() };
    reader.root(&root)
}

struct Reader<'a> {
    origin: &'a str,
    text: &'a str,
    words: &'a Words<'a>,
    warnings: Vec<Diagnostic>,
}

impl Reader<'_> {
    fn root(mut self, root: &Value) -> Result<Client, Diagnostic> {
        let projects = root.get("projects").and_then(Value::as_object).and_then(with_servers);
        let missing = || {
            let fault = Diagnostic::new(self.origin, "the file has no `mcpServers` (or `servers`) object");
            match &projects {
                Some(names) => {
                    fault.with_hint(format!("the servers of projects are not taken ({names}): {PROJECT_HINT}"))
                }
                None => fault.with_hint(
                    "a client's file looks like {\"mcpServers\": {\"files\": {\"command\": \"npx\", \"args\": […]}}}",
                ),
            }
        };
        let object = root.as_object().ok_or_else(missing)?;
        // VS Code's user settings hold the same table one level down.
        let holder = object.get("mcp").and_then(Value::as_object).unwrap_or(object);
        let key =
            SERVER_TABLES.iter().find(|key| holder.get(**key).is_some_and(Value::is_object)).ok_or_else(missing)?;
        let entries = holder.get(*key).and_then(Value::as_object).ok_or_else(missing)?;
        match projects {
            // The file of Claude Code's user holds a great deal besides.
            Some(names) => {
                let message = format!("the servers of projects are not taken: {names}");
                let warning = self.fault(&["projects"], &message).with_hint(PROJECT_HINT);
                self.warnings.push(warning);
            }
            None => {
                if let Some(names) = listed(holder.keys().filter(|name| name != key && *name != "$schema")) {
                    self.warn(&[], &format!("left aside: {names}"));
                }
            }
        }
        let mut servers = BTreeMap::new();
        for (written, entry) in entries {
            let Some(table) = self.entry(&[key, written], entry)? else {
                continue;
            };
            let name = as_name(written);
            if name != *written {
                self.warn(&[key, written], &format!("server `{written}` is served under the name `{name}`"));
            }
            if servers.insert(name.clone(), table).is_some() {
                return Err(self.fault(&[key, written], &format!("two servers would be called `{name}`")));
            }
        }
        Ok(Client { servers, warnings: self.warnings })
    }

    /// One server; `None` if it is switched off or of a kind that can't be reached.
    fn entry(&mut self, path: &[&str], entry: &Value) -> Result<Option<ServerTable>, Diagnostic> {
        let Some(object) = entry.as_object() else {
            return Err(self.fault(path, "a server is an object"));
        };
        if object.get("disabled") == Some(&Value::Bool(true)) || object.get("enabled") == Some(&Value::Bool(false)) {
            self.warn(path, "switched off, and left out");
            return Ok(None);
        }
        let kind = object.get("type").or_else(|| object.get("transport")).and_then(Value::as_str);
        if object.contains_key("envFile") {
            let fault = self.fault(&[path, &["envFile"]].concat(), "`envFile` is not read in this version");
            return Err(fault.with_hint("give the variables by `env`; `${NAME}` and `${file:PATH}` keep secrets out"));
        }
        let mut table = ServerTable {
            command: self.string(path, object, "command")?,
            args: self.strings(path, object, "args")?,
            env: self.pairs(path, object, "env")?,
            cwd: self.string(path, object, "cwd")?.map(Into::into),
            headers: self.pairs(path, object, "headers")?,
            // Any other kind is found out: clients name them in many ways.
            transport: (kind == Some("sse") && !object.contains_key("command")).then_some(Transport::Sse),
            ..ServerTable::default()
        };
        for key in URLS {
            table.url = table.url.or(self.string(path, object, key)?);
        }
        if table.command.is_none() && table.url.is_none() {
            return Err(self.fault(path, "the server has neither `command` nor `url`"));
        }
        if let Some(names) = listed(object.keys().filter(|key| !ENTRY_KEYS.contains(&key.as_str()))) {
            self.warn(path, &format!("left aside: {names}"));
        }
        Ok(Some(table))
    }

    fn string(&mut self, path: &[&str], object: &Map<String, Value>, key: &str) -> Result<Option<String>, Diagnostic> {
        match object.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => self.filled(&[path, &[key]].concat(), text).map(Some),
            Some(_) => Err(self.fault(&[path, &[key]].concat(), &format!("`{key}` is a text"))),
        }
    }

    fn strings(&mut self, path: &[&str], object: &Map<String, Value>, key: &str) -> Result<Vec<String>, Diagnostic> {
        let path = &[path, &[key]].concat();
        let items = match object.get(key) {
            None | Some(Value::Null) => return Ok(Vec::new()),
            Some(Value::Array(items)) => items,
            Some(_) => return Err(self.fault(path, &format!("`{key}` is a list of texts"))),
        };
        let mut texts = Vec::with_capacity(items.len());
        for item in items {
            let text = item.as_str().ok_or_else(|| self.fault(path, &format!("`{key}` is a list of texts")))?;
            texts.push(self.filled(path, text)?);
        }
        Ok(texts)
    }

    /// A text that is no secret, with its variables filled in.
    fn filled(&mut self, path: &[&str], text: &str) -> Result<String, Diagnostic> {
        let Expanded { text, filled, .. } = self.words.fill(text).map_err(|message| self.unexpanded(path, &message))?;
        if let Some(names) = listed(filled.iter().filter(|name| expand::sounds_secret(name))) {
            let message = format!("{names} becomes visible here: in the list of processes, in `config show`");
            let warning = self.fault(path, &message).with_hint("give secrets by `env` or `headers`");
            self.warnings.push(warning);
        }
        Ok(text)
    }

    fn pairs(
        &mut self,
        path: &[&str],
        object: &Map<String, Value>,
        key: &str,
    ) -> Result<BTreeMap<String, String>, Diagnostic> {
        let table_path = [path, &[key]].concat();
        let pairs = match object.get(key) {
            None | Some(Value::Null) => return Ok(BTreeMap::new()),
            Some(Value::Object(pairs)) => pairs,
            Some(_) => return Err(self.fault(&table_path, &format!("`{key}` is an object of texts"))),
        };
        let mut table = BTreeMap::new();
        for (name, value) in pairs {
            let path = [table_path.as_slice(), &[name]].concat();
            let text = match value {
                Value::String(text) => text.clone(),
                // Written by hand without quotes; every client turns them into text.
                Value::Number(_) | Value::Bool(_) => value.to_string(),
                Value::Null | Value::Array(_) | Value::Object(_) => {
                    return Err(self.fault(&path, &format!("`{key}` is an object of texts")));
                }
            };
            let expanded = self.words.template(&text).map_err(|message| self.unexpanded(&path, &message))?;
            for variable in &expanded.defaulted {
                self.warn(&path, &format!("`{variable}` is not set now, so its default holds until the next start"));
            }
            table.insert(name.clone(), expanded.text);
        }
        Ok(table)
    }

    fn warn(&mut self, path: &[&str], message: &str) {
        self.warnings.push(self.fault(path, message));
    }

    fn unexpanded(&self, path: &[&str], message: &str) -> Diagnostic {
        self.fault(path, message).with_hint(expand::HINT)
    }

    fn fault(&self, path: &[&str], message: &str) -> Diagnostic {
        let fault = Diagnostic::new(self.origin, message);
        let path: Vec<String> = path.iter().map(|name| (*name).to_owned()).collect();
        match fault::locate_json(self.text, &path) {
            Some(span) => fault.at(self.text, span),
            None => fault,
        }
    }
}

/// The projects of Claude Code's `~/.claude.json` that have servers, with their names.
fn with_servers(projects: &Map<String, Value>) -> Option<String> {
    let named: Vec<String> = projects
        .iter()
        .filter_map(|(folder, project)| {
            let servers = project.get("mcpServers")?.as_object()?;
            listed(servers.keys()).map(|names| format!("{names} of `{folder}`"))
        })
        .collect();
    let more = named.len().saturating_sub(LISTED_NAMES_MAX);
    let shown = named[..named.len() - more].join(", ");
    match (named.is_empty(), more) {
        (true, _) => None,
        (false, 0) => Some(shown),
        (false, more) => Some(format!("{shown}, and those of {more} more")),
    }
}

/// At most a handful of names, for one line.
fn listed<'a>(names: impl Iterator<Item = &'a String>) -> Option<String> {
    let names: Vec<String> = names.map(|name| format!("`{name}`")).collect();
    let more = names.len().saturating_sub(LISTED_NAMES_MAX);
    let shown = names.get(..names.len() - more)?.join(", ");
    match (names.is_empty(), more) {
        (true, _) => None,
        (false, 0) => Some(shown),
        (false, more) => Some(format!("{shown} and {more} more")),
    }
}

/// The text with comments and trailing commas blanked out, every other byte in its place.
fn without_comments(text: &str) -> String {
    let mut bytes = text.as_bytes().to_vec();
    if text.starts_with('\u{feff}') {
        blank(&mut bytes, 0..'\u{feff}'.len_utf8());
    }
    let mut comma = None;
    let mut at = 0;
    while at < bytes.len() {
        let next = match (bytes[at], bytes.get(at + 1)) {
            (b'"', _) => string_end(&bytes, at),
            (b'/', Some(b'/')) => bytes[at..].iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |n| at + n),
            (b'/', Some(b'*')) => text[at + 2..].find("*/").map_or(bytes.len(), |length| at + 2 + length + 2),
            _ => at + 1,
        };
        match bytes[at] {
            b'/' => blank(&mut bytes, at..next),
            b',' => comma = Some(at),
            b']' | b'}' => {
                if let Some(trailing) = comma.take() {
                    bytes[trailing] = b' ';
                }
            }
            byte if byte.is_ascii_whitespace() => {}
            _ => comma = None,
        }
        at = next;
    }
    String::from_utf8(bytes).unwrap_or_else(|_| text.to_owned())
}

/// Spaces for everything but line ends, so that places stay.
fn blank(bytes: &mut [u8], range: std::ops::Range<usize>) {
    for byte in &mut bytes[range] {
        if *byte != b'\n' {
            *byte = b' ';
        }
    }
}

fn string_end(bytes: &[u8], open: usize) -> usize {
    let mut at = open + 1;
    while at < bytes.len() && bytes[at] != b'"' {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(bytes.len())
}

const SERVER_TABLES: &[&str] = &["mcpServers", "servers"];
/// Spellings of the endpoint: most clients, Gemini CLI, Windsurf.
const URLS: &[&str] = &["url", "httpUrl", "serverUrl"];
const ENTRY_KEYS: &[&str] = &[
    "type",
    "transport",
    "command",
    "args",
    "env",
    "cwd",
    "url",
    "httpUrl",
    "serverUrl",
    "headers",
    "disabled",
    "enabled",
];
const LISTED_NAMES_MAX: usize = 8;
const PROJECT_HINT: &str = "copy the `mcpServers` object of the project that you mean into a file of its own, for example \
                            by `jq '{mcpServers: .projects[\"DIR\"].mcpServers}' ~/.claude.json > servers.json`";

#[cfg(test)]
mod tests {
    use super::*;

    fn words() -> Words<'static> {
        Words { var: &|name| (name == "SET_TOKEN").then(|| "v".to_owned()), folder: Path::new("/srv") }
    }

    fn servers(text: &str) -> (BTreeMap<String, ServerTable>, Vec<String>) {
        let client = read("mcp.json", text, &words()).unwrap();
        (client.servers, client.warnings.iter().map(|warning| warning.message.clone()).collect())
    }

    #[test]
    fn the_files_of_claude_cursor_and_vs_code_are_read_as_they_are() {
        let claude = r#"{"mcpServers": {"files": {"command": "npx", "args": ["-y", "x"], "env": {"LOG": "debug", "N": 3}},
            "tickets": {"type": "http", "url": "https://e.com/mcp", "headers": {"Authorization": "Bearer ${T}"}}}}"#;
        let (found, warnings) = servers(claude);
        assert_eq!(found["files"].args, ["-y", "x"]);
        assert_eq!(found["files"].env["N"], "3");
        assert_eq!(found["tickets"].url.as_deref(), Some("https://e.com/mcp"));
        assert!(warnings.is_empty(), "{warnings:?}");

        let cursor = r#"{"mcpServers": {"a": {"command": "x", "env": {"K": "${env:KEY}"}}}}"#;
        assert_eq!(servers(cursor).0["a"].env["K"], "${KEY}");

        let code = "{\n  // mine\n  \"inputs\": [],\n  \"servers\": {\"a\": {\"type\": \"stdio\", \"command\": \"x\", \"dev\": {},},},\n}";
        let (found, warnings) = servers(code);
        assert_eq!(found["a"].command.as_deref(), Some("x"));
        assert_eq!(warnings, ["left aside: `inputs`", "left aside: `dev`"]);
    }

    #[test]
    fn what_cannot_be_served_is_left_out_with_a_warning() {
        let text = r#"{"mcpServers": {"My Files": {"command": "x"}, "off": {"command": "x", "disabled": true},
            "old": {"type": "sse", "url": "http://e.com/sse"}}}"#;
        let (found, warnings) = servers(text);
        assert_eq!(found.keys().collect::<Vec<_>>(), ["My-Files", "old"]);
        assert_eq!(found["old"].transport, Some(Transport::Sse));
        assert_eq!(warnings.len(), 2, "{warnings:?}");
    }

    #[test]
    fn a_wrong_file_says_where() {
        for (text, line, column, part) in [
            ("{\n  \"mcpServers\": {\n    \"a\": {\"command\": }\n}}", 3, 22, "expected value"),
            ("{\"mcpServers\": {\n  \"a\": {\"args\": []}}}", 2, 3, "neither"),
            ("{\"mcpServers\": {\n  \"a\": {\"command\": 3}}}", 2, 9, "`command` is a text"),
            (
                "{\"mcpServers\": {\n  \"a\": {\"command\": \"x\", \"env\": {\"T\": \"${input:t}\"}}}}",
                2,
                33,
                "asks a person",
            ),
        ] {
            let fault = read("mcp.json", text, &words()).err().unwrap();
            let place = fault.location.clone().unwrap();
            assert_eq!((place.line, place.column), (line, column), "{fault}");
            assert!(fault.message.contains(part), "{fault}");
        }
        assert!(read("mcp.json", "{\"a\": 1}", &words()).err().unwrap().message.contains("mcpServers"));
    }

    #[test]
    fn variables_are_filled_in_or_kept_and_nothing_raw_reaches_a_server() {
        let text = r#"{"mcpServers": {"a": {"command": "${workspaceFolder}/x", "args": ["--t=${SET_TOKEN}", "${NO:-d}"],
            "env": {"A": "${SET_TOKEN}", "B": "${NO:-d}", "C": "${env:NO}"}}}}"#;
        let (found, warnings) = servers(text);
        let table = &found["a"];
        assert_eq!((table.command.as_deref(), table.args.join(" ")), (Some("/srv/x"), "--t=v d".into()));
        assert_eq!(table.env.values().collect::<Vec<_>>(), ["${SET_TOKEN}", "d", "${NO}"]);
        assert_eq!(warnings.len(), 2, "{warnings:?}");
        for bad in
            ["\"args\": [\"${NO}\"]", "\"args\": [\"${x y}\"]", "\"env\": {\"A\": \"${x:y}\"}", "\"envFile\": \".env\""]
        {
            let fault =
                read("mcp.json", &format!("{{\"mcpServers\": {{\"a\": {{\"command\": \"x\", {bad}}}}}}}"), &words());
            let fault = fault.err().unwrap();
            assert!(fault.location.is_some() && fault.hint.is_some(), "{fault}");
        }
    }

    #[test]
    fn servers_of_projects_are_told_of_with_the_way_to_them() {
        let text = r#"{"numStartups": 3, "mcpServers": {"a": {"command": "x"}},
            "projects": {"/w": {"mcpServers": {"b": {"command": "y"}}}, "/v": {"mcpServers": {}}}}"#;
        let client = read(".claude.json", text, &words()).unwrap();
        assert_eq!((client.servers.len(), client.warnings.len()), (1, 1));
        let warning = &client.warnings[0];
        assert!(warning.message.contains("`b` of `/w`"), "{warning}");
        assert!(warning.hint.as_ref().unwrap().contains("jq"), "{warning}");
        let only = read(".claude.json", &text.replace("\"mcpServers\": {\"a\"", "\"other\": {\"a\""), &words());
        assert!(only.err().unwrap().hint.unwrap().contains("`b` of `/w`"));
    }

    #[test]
    fn a_key_that_stands_twice_is_a_fault_with_its_place() {
        let text = "{\"mcpServers\": {\n \"a\": {\"command\": \"x\"},\n \"a\": {\"command\": \"y\"}}}";
        let fault = read("mcp.json", text, &words()).err().unwrap();
        assert!(fault.message.contains("`a` stands twice"), "{fault}");
        assert_eq!(fault.location.unwrap().line, 3);
    }

    #[test]
    fn comments_and_trailing_commas_vanish_and_places_stay() {
        let text = "{ // ü\n \"a//b\": \"/* x\\\" */\", /* é\n */ \"c\": [1, 2, ],\n}";
        let plain = without_comments(text);
        assert_eq!(plain.len(), text.len());
        let value: Value = serde_json::from_str(&plain).unwrap();
        assert_eq!(value["a//b"], "/* x\" */");
        assert_eq!(plain.matches('\n').count(), text.matches('\n').count());
    }
}
