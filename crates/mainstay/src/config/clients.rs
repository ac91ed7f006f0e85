//! The `mcpServers` files of clients (Claude Desktop, Claude Code, Cursor, VS Code and their kin), read as they are.
//!
//! Client files have no common schema, so this is tolerant: what it doesn't know is left aside with a warning. Comments
//! and trailing commas, which VS Code writes, are allowed.

use std::collections::BTreeMap;
use std::path::Path;

use mainstay_core::id::ServerName;
use serde_json::{Map, Value};

use super::diagnostic::Diagnostic;
use super::fault;
use super::file::ServerTable;

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
pub(super) fn read(origin: &str, text: &str) -> Result<Client, Diagnostic> {
    let plain = without_comments(text);
    let root: Value = serde_json::from_str(&plain).map_err(|error| fault::of_json(origin, text, &error))?;
    let reader = Reader { origin, text, warnings: Vec::new() };
    reader.root(&root)
}

struct Reader<'a> {
    origin: &'a str,
    text: &'a str,
    warnings: Vec<Diagnostic>,
}

impl Reader<'_> {
    fn root(mut self, root: &Value) -> Result<Client, Diagnostic> {
        let missing = || {
            Diagnostic::new(self.origin, "the file has no `mcpServers` (or `servers`) object").with_hint(
                "a client's file looks like {\"mcpServers\": {\"files\": {\"command\": \"npx\", \"args\": […]}}}",
            )
        };
        let object = root.as_object().ok_or_else(missing)?;
        // VS Code's user settings hold the same table one level down.
        let holder = object.get("mcp").and_then(Value::as_object).unwrap_or(object);
        let key =
            SERVER_TABLES.iter().find(|key| holder.get(**key).is_some_and(Value::is_object)).ok_or_else(missing)?;
        let entries = holder.get(*key).and_then(Value::as_object).ok_or_else(missing)?;
        if let Some(names) = listed(holder.keys().filter(|name| name != key && *name != "$schema")) {
            self.warn(&[], &format!("left aside: {names}"));
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
        if kind == Some("sse") {
            self.warn(path, "the old HTTP+SSE transport is not in this version: left out");
            return Ok(None);
        }
        let mut table = ServerTable {
            command: self.string(path, object, "command")?,
            args: self.strings(path, object, "args")?,
            env: self.pairs(path, object, "env")?,
            cwd: self.string(path, object, "cwd")?.map(Into::into),
            headers: self.pairs(path, object, "headers")?,
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
        if table.args.iter().chain(&table.command).any(|text| text.contains("${")) {
            self.warn(path, "`${…}` in `command` and `args` is passed on as it is: only `env` and `headers` know it");
        }
        Ok(Some(table))
    }

    fn string(&self, path: &[&str], object: &Map<String, Value>, key: &str) -> Result<Option<String>, Diagnostic> {
        match object.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(_) => Err(self.fault(&[path, &[key]].concat(), &format!("`{key}` is a string"))),
        }
    }

    fn strings(&self, path: &[&str], object: &Map<String, Value>, key: &str) -> Result<Vec<String>, Diagnostic> {
        let fault = || self.fault(&[path, &[key]].concat(), &format!("`{key}` is a list of strings"));
        match object.get(key) {
            None | Some(Value::Null) => Ok(Vec::new()),
            Some(Value::Array(items)) => {
                items.iter().map(|item| item.as_str().map(str::to_owned).ok_or_else(fault)).collect()
            }
            Some(_) => Err(fault()),
        }
    }

    fn pairs(
        &self,
        path: &[&str],
        object: &Map<String, Value>,
        key: &str,
    ) -> Result<BTreeMap<String, String>, Diagnostic> {
        let fault = || self.fault(&[path, &[key]].concat(), &format!("`{key}` is an object of strings"));
        let pairs = match object.get(key) {
            None | Some(Value::Null) => return Ok(BTreeMap::new()),
            Some(Value::Object(pairs)) => pairs,
            Some(_) => return Err(fault()),
        };
        let mut table = BTreeMap::new();
        for (name, value) in pairs {
            let text = match value {
                Value::String(text) => text.clone(),
                // Written by hand without quotes; every client turns them into text.
                Value::Number(_) | Value::Bool(_) => value.to_string(),
                Value::Null | Value::Array(_) | Value::Object(_) => return Err(fault()),
            };
            let template = as_template(&text).map_err(|message| self.fault(&[path, &[key, name]].concat(), message))?;
            table.insert(name.clone(), template);
        }
        Ok(table)
    }

    fn warn(&mut self, path: &[&str], message: &str) {
        self.warnings.push(self.fault(path, message));
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

/// The name of the server started by `words`: the program's file stem, or for a package runner the package.
pub(super) fn name_of_command(words: &[String]) -> String {
    let stem = |word: &str| {
        let path = Path::new(word);
        path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default().to_owned()
    };
    let program = words.first().map(|word| stem(word)).unwrap_or_default();
    if !PACKAGE_RUNNERS.contains(&program.as_str()) {
        return as_name(&program);
    }
    let mut rest = words.iter().skip(1);
    while let Some(word) = rest.next() {
        if VALUE_FLAGS.contains(&word.as_str()) {
            rest.next();
        } else if !word.starts_with('-') {
            let unscoped = word.rsplit('/').next().unwrap_or(word);
            let unversioned = unscoped.split(['@', '=', '[', '<', '>', '~']).next().unwrap_or(unscoped);
            return as_name(unversioned);
        }
    }
    as_name(&program)
}

/// The nearest name that a server may have.
pub(super) fn as_name(text: &str) -> String {
    let allowed = |symbol: char| symbol.is_ascii_alphanumeric() || matches!(symbol, '_' | '.' | '-');
    let mapped: String = text.chars().map(|symbol| if allowed(symbol) { symbol } else { '-' }).collect();
    let mut name = mapped.trim_matches(['-', '.']).to_owned();
    name.truncate(SERVER_NAME_CHARS_MAX);
    if ServerName::parse(&name).is_some() { name } else { SERVER_NAME_FALLBACK.to_owned() }
}

/// The clients' spellings of variables become ours: `${env:NAME}` is `${NAME}`.
fn as_template(text: &str) -> Result<String, &'static str> {
    if text.contains("${input:") {
        return Err("`${input:…}` asks a person, who is not here: put the value into a variable and write `${NAME}`");
    }
    if text.split("${").skip(1).any(|inner| inner.split('}').next().is_some_and(|name| name.contains(":-"))) {
        return Err("`${NAME:-default}` is not known here: write `${NAME}` and set the variable");
    }
    Ok(text.replace("${env:", "${"))
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
const PACKAGE_RUNNERS: &[&str] = &["npx", "uvx", "bunx", "pnpx", "pipx"];
/// Flags of the runners that take a value as the next word.
const VALUE_FLAGS: &[&str] = &["-p", "--package", "--from", "--with", "--python", "-c", "--call", "run", "--spec"];
const SERVER_NAME_CHARS_MAX: usize = 64;
const SERVER_NAME_FALLBACK: &str = "server";
const LISTED_NAMES_MAX: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn servers(text: &str) -> (BTreeMap<String, ServerTable>, Vec<String>) {
        let client = read("mcp.json", text).unwrap();
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
        assert_eq!(found.keys().collect::<Vec<_>>(), ["My-Files"]);
        assert_eq!(warnings.len(), 3, "{warnings:?}");
    }

    #[test]
    fn a_wrong_file_says_where() {
        for (text, line, column, part) in [
            ("{\n  \"mcpServers\": {\n    \"a\": {\"command\": }\n}}", 3, 22, "expected value"),
            ("{\"mcpServers\": {\n  \"a\": {\"args\": []}}}", 2, 3, "neither"),
            ("{\"mcpServers\": {\n  \"a\": {\"command\": 3}}}", 2, 9, "`command` is a string"),
            (
                "{\"mcpServers\": {\n  \"a\": {\"command\": \"x\", \"env\": {\"T\": \"${input:t}\"}}}}",
                2,
                33,
                "asks a person",
            ),
        ] {
            let fault = read("mcp.json", text).err().unwrap();
            let place = fault.location.clone().unwrap();
            assert_eq!((place.line, place.column), (line, column), "{fault}");
            assert!(fault.message.contains(part), "{fault}");
        }
        assert!(read("mcp.json", "{\"a\": 1}").err().unwrap().message.contains("mcpServers"));
    }

    #[test]
    fn a_command_names_its_server() {
        for (words, name) in [
            ("/usr/bin/my-server.py --x", "my-server"),
            ("npx -y @modelcontextprotocol/server-filesystem@2026.1.0 /srv", "server-filesystem"),
            ("npx --package=x -- tool", "tool"),
            ("uvx --from mcp-git mcp-server-git==1.0", "mcp-server-git"),
            ("npx", "npx"),
            ("./ü", "server"),
        ] {
            let words: Vec<String> = words.split(' ').map(str::to_owned).collect();
            assert_eq!(name_of_command(&words), name);
        }
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
