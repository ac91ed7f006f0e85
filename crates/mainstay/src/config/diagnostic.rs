//! What is wrong with a configuration, where, and what to do about it.

use std::fmt;
use std::ops::Range;

/// One fault of a configuration (or one thing worth a warning).
///
/// `Display` gives one `origin:line:column: message` line and, where the place is known, the line with a caret below.
/// Values on lines that may hold secrets (`env`, `headers`, `tokens`) are masked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// The file, variable or flag that is at fault.
    pub origin: String,
    /// Where in the file.
    pub location: Option<Location>,
    /// What is wrong.
    pub message: String,
    /// What to do.
    pub hint: Option<String>,
}

/// A place in a text file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// Counted from 1.
    pub line: usize,
    /// Counted from 1, in characters.
    pub column: usize,
    /// The line, as it may be shown.
    pub excerpt: String,
    /// How many characters the fault covers on this line, at least 1.
    pub width: usize,
}

impl Diagnostic {
    /// A fault of `origin` without a place in it.
    pub fn new(origin: impl Into<String>, message: impl Into<String>) -> Self {
        Self { origin: origin.into(), location: None, message: message.into(), hint: None }
    }

    /// The same with a hint.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// The same at the bytes `span` of `text`.
    #[must_use]
    pub fn at(mut self, text: &str, span: Range<usize>) -> Self {
        self.location = Some(Location::of(text, span));
        self
    }
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(Location { line, column, excerpt, width }) = &self.location else {
            return write!(f, "{}: {}", self.origin, self.message);
        };
        writeln!(f, "{}:{line}:{column}: {}", self.origin, self.message)?;
        let number = line.to_string();
        let margin = " ".repeat(number.len());
        writeln!(f, " {margin} |")?;
        writeln!(f, " {number} | {excerpt}")?;
        write!(f, " {margin} | {}{}", " ".repeat(column - 1), "^".repeat(*width))
    }
}

impl std::error::Error for Diagnostic {}

impl Location {
    /// The place of the bytes `span` of `text`, which are cut at the end of their first line.
    pub fn of(text: &str, span: Range<usize>) -> Self {
        let start = floor_char_boundary(text, span.start);
        let line_start = text[..start].rfind('\n').map_or(0, |newline| newline + 1);
        let line_end = text[start..].find('\n').map_or(text.len(), |newline| start + newline);
        let end = floor_char_boundary(text, span.end).clamp(start, line_end);
        let line_text = text[line_start..line_end].trim_end_matches('\r');
        let shown = if may_hold_secrets(text, line_start, line_end) { masked(line_text) } else { line_text.into() };
        Self {
            line: text[..line_start].matches('\n').count() + 1,
            column: text[line_start..start].chars().count() + 1,
            excerpt: shown.replace('\t', " "),
            width: text[start..end].chars().count().max(1),
        }
    }

    /// The place of line and column, both from 1, as `serde_json` gives them (columns in bytes, 0 before the first).
    pub fn of_line(text: &str, line: usize, column: usize) -> Self {
        let mut line_start = 0;
        for _ in 1..line {
            line_start = text[line_start..].find('\n').map_or(text.len(), |newline| line_start + newline + 1);
        }
        let at = (line_start + column.saturating_sub(1)).min(text.len());
        Self::of(text, at..at + 1)
    }
}

fn floor_char_boundary(text: &str, index: usize) -> usize {
    let mut index = index.min(text.len());
    while !text.is_char_boundary(index) {
        index -= 1;
    }
    index
}

/// Whether the line belongs to a table or object of header or environment values: such a word stands on it, or the last
/// one before it has neither been closed by a brace nor followed by another table. Errs on the side of yes.
fn may_hold_secrets(text: &str, line_start: usize, line_end: usize) -> bool {
    if SECRET_TABLES.iter().any(|word| text[line_start..line_end].contains(word)) {
        return true;
    }
    let before = &text[..line_start];
    let opened = SECRET_TABLES.iter().filter_map(|word| before.rfind(word)).max();
    opened.is_some_and(|at| {
        let since = &text[at..line_start];
        // The braces of `${VAR}` open and close nothing.
        let references = since.matches("${").count();
        let opening = since.matches('{').count() - references;
        let closing = since.matches('}').count().saturating_sub(references);
        let inside_braces = opening > closing;
        let inside_table = opening == 0 && closing == 0 && !text[at..line_end].contains("\n[");
        inside_braces || inside_table
    })
}

/// The line with every value replaced by as many asterisks, so that carets still point right. Keys are kept.
fn masked(line: &str) -> String {
    let mut shown = String::with_capacity(line.len());
    let mut rest = line;
    while let Some(open) = rest.find(['"', '\'']) {
        let quote = rest[open..].chars().next().unwrap_or('"');
        shown.push_str(&bare_masked(&rest[..open]));
        shown.push(quote);
        let inside = &rest[open + 1..];
        let close = closing_quote(inside, quote);
        let after = inside.get(close + 1..).unwrap_or("");
        let key = after.trim_start().starts_with([':', '=']);
        let content = &inside[..close];
        if key {
            shown.push_str(content);
        } else {
            shown.extend(content.chars().map(|_| '*'));
        }
        if close < inside.len() {
            shown.push(quote);
        }
        rest = after;
    }
    shown.push_str(&bare_masked(rest));
    shown
}

/// The same for text without quotes: a value that lost them is a value still.
fn bare_masked(text: &str) -> String {
    if text.starts_with('[') {
        return text.into();
    }
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(word_at) = rest.find(|symbol| !is_structure(symbol)) {
        let (before, word) = rest.split_at(word_at);
        let (word, after) = word.split_at(word.find(is_structure).unwrap_or(word.len()));
        shown.push_str(before);
        // Base64 may end like a key does.
        let is_value = before.trim_end().ends_with([':', '=']) || !after.trim_start().starts_with([':', '=']);
        match is_value {
            true => shown.extend(word.chars().map(|_| '*')),
            false => shown.push_str(word),
        }
        rest = after;
    }
    shown.push_str(rest);
    shown
}

fn is_structure(symbol: char) -> bool {
    symbol.is_whitespace() || matches!(symbol, '=' | ':' | ',' | '{' | '}' | '[' | ']')
}

fn closing_quote(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, symbol) in text.char_indices() {
        if !escaped && symbol == quote {
            return at;
        }
        escaped = !escaped && symbol == '\\' && quote == '"';
    }
    text.len()
}

const SECRET_TABLES: &[&str] = &["headers", "env", "tokens"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_shows_its_line_with_a_caret() {
        let text = "a = 1\nlisen = \"x\"\n";
        let fault = Diagnostic::new("m.toml", "unknown key `lisen`").at(text, 6..11);
        let shown = fault.to_string();
        assert_eq!(shown, "m.toml:2:1: unknown key `lisen`\n   |\n 2 | lisen = \"x\"\n   | ^^^^^");
    }

    #[test]
    fn a_place_at_the_very_end_or_in_a_wide_character_is_still_one() {
        assert_eq!(Location::of("", 0..0).line, 1);
        assert_eq!(Location::of("é = 1\n", 1..2).column, 1);
        assert_eq!(Location::of("a\nb\n", 9..12).line, 3);
        assert_eq!(Location::of_line("{\n  \"a\": x\n}", 2, 8).excerpt, "  \"a\": x");
    }

    #[test]
    fn i6_values_of_headers_and_environment_are_masked_in_excerpts() {
        for text in [
            "headers = { Authorization = \"Bearer CANARY\", X = 3 }",
            "[servers.a.headers]\nAuthorization = \"Bearer CANARY",
            "[servers.a.env]\n# note\nTOKEN = 'CANARY'\n",
            "[auth.tokens]\na = \"${A}\"\nb = [\n  \"CANARY\",\n  'CANARY' ]\nc = CANARY=\n",
            "auth = { tokens = { a = CANARY, b = \"CANARY\" } }",
            "{\"env\": {\n \"A\": \"x\\\" CANARY\",\n \"B\": \"CANARY\"}}",
        ] {
            for (at, _) in text.match_indices("CANARY") {
                let excerpt = Location::of(text, at..at + 6).excerpt;
                assert!(!excerpt.contains("CANARY"), "{excerpt}");
            }
        }
        let bare = Location::of("headers = { X = 31, Y = \"s\" }", 16..18).excerpt;
        assert_eq!(bare, "headers = { X = **, Y = \"*\" }");
        assert_eq!(Location::of("[auth.tokens]", 1..12).excerpt, "[auth.tokens]");
        let plain = "[servers.a.env]\nA = \"${X}\"\n[session]\nidle_expiry = \"soon\"\n";
        let at = plain.find("soon").unwrap();
        assert_eq!(Location::of(plain, at..at + 4).excerpt, "idle_expiry = \"soon\"");
    }
}
