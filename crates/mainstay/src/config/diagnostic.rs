//! What is wrong with a configuration, where, and what to do about it.

use std::fmt;
use std::ops::Range;

use excerpt::{Excerpt, excerpt, is_inside};

mod excerpt;

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
    /// The line, as it may be shown: masked, and cut if it is long.
    pub excerpt: Box<str>,
    /// Where in the excerpt the fault begins, counted from 1, in characters.
    pub mark: usize,
    /// How many characters of the excerpt the fault covers, at least 1.
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
        let Some(Location { line, column, excerpt, mark, width }) = &self.location else {
            return write!(f, "{}: {}", self.origin, self.message);
        };
        writeln!(f, "{}:{line}:{column}: {}", self.origin, self.message)?;
        let number = line.to_string();
        let margin = " ".repeat(number.len());
        writeln!(f, " {margin} |")?;
        writeln!(f, " {number} | {excerpt}")?;
        write!(f, " {margin} | {}{}", " ".repeat(mark - 1), "^".repeat(*width))
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
        let inside = is_inside(text, line_start, line_end);
        let Excerpt { text: excerpt, mark, width } = excerpt(line_text, start - line_start..end - line_start, inside);
        Self {
            line: text[..line_start].matches('\n').count() + 1,
            column: text[line_start..start].chars().count() + 1,
            excerpt: excerpt.into(),
            mark,
            width,
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
        assert_eq!(Location::of_line("{\n  \"a\": x\n}", 2, 8).excerpt.as_ref(), "  \"a\": x");
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
        assert_eq!(bare.as_ref(), "headers = { X = …, Y = \"…\" }");
        assert_eq!(Location::of("[auth.tokens]", 1..12).excerpt.as_ref(), "[auth.tokens]");
        let plain = "[servers.a.env]\nA = \"${X}\"\n[session]\nidle_expiry = \"soon\"\n";
        let at = plain.find("soon").unwrap();
        assert_eq!(Location::of(plain, at..at + 4).excerpt.as_ref(), "idle_expiry = \"soon\"");
    }
}
