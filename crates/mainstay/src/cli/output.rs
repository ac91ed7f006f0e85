//! What commands write: results to standard output, everything else to standard error.

use std::fmt::Write as _;
use std::io::{self, Write as _};

use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;

use super::failure::Failure;

/// Where a command's words go.
#[derive(Clone, Copy, Debug)]
pub(super) struct Output {
    json: bool,
}

impl Output {
    /// Output for people, or with `json` for programs.
    pub(super) fn new(json: bool) -> Self {
        Self { json }
    }

    /// Whether programs read it.
    pub(super) fn is_json(self) -> bool {
        self.json
    }

    /// Writes a line (or several) to standard output, at once.
    ///
    /// # Errors
    /// If the reader is gone; the command then ends quietly.
    pub(super) fn line(self, text: &str) -> Result<(), Failure> {
        let mut stdout = io::stdout().lock();
        stdout.write_all(text.as_bytes())?;
        stdout.write_all(b"\n")?;
        Ok(stdout.flush()?)
    }

    /// Writes a JSON document to standard output.
    ///
    /// # Errors
    /// If the reader is gone.
    pub(super) fn document(self, value: &impl Serialize) -> Result<(), Failure> {
        let text = serde_json::to_string_pretty(value).map_err(|error| Failure::from(anyhow::Error::new(error)))?;
        self.line(&text)
    }

    /// Tells people something on the side. There is nobody to tell if that fails.
    pub(super) fn note(self, text: &str) {
        let _ = writeln!(io::stderr().lock(), "{text}");
    }

    /// Tells programs something on the side, on one line.
    pub(super) fn note_json(self, value: &impl Serialize) {
        self.note(&serde_json::to_string(value).unwrap_or_default());
    }
}

/// A table for people, with these headings.
pub(super) fn table(headings: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(headings);
    table
}

/// The table's text without blanks at the ends of its lines.
pub(super) fn lines_of(table: &Table) -> String {
    let lines: Vec<String> = table.lines().map(|line| line.trim().to_owned()).collect();
    lines.join("\n")
}

/// Text of somebody else's as it may go to a terminal: control characters, which could drive it, are spelled out.
pub(super) fn plain(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for symbol in text.chars() {
        if symbol.is_control() {
            let _ = write!(shown, "{}", symbol.escape_default());
        } else {
            shown.push(symbol);
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peers_text_cannot_drive_the_terminal() {
        assert_eq!(plain("a\u{1b}[2Jé\n"), "a\\u{1b}[2Jé\\n");
    }

    #[test]
    fn a_table_is_aligned_and_bare() {
        let mut shown = table(&["REF", "STATE"]);
        shown.add_row(["s-1", "ready"]);
        let text = lines_of(&shown);
        assert_eq!(text.lines().count(), 2, "{text}");
        assert_eq!(text.find("STATE"), text.lines().nth(1).unwrap().find("ready"));
    }
}
