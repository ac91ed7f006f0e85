//! Reading the gateway's log.

use std::path::Path;

/// The lines of level WARN or ERROR, and panics, that hold none of the allowed texts.
pub(super) fn complaints(log: &str, allowed: &[&str]) -> Vec<String> {
    log.lines()
        .map(without_colours)
        .filter(|line| is_complaint(line) && !allowed.iter().any(|text| line.contains(text)))
        .collect()
}

/// The end of a log file, to be shown with a failure.
pub(super) fn tail(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let from = lines.len().saturating_sub(TAIL_LINES_MAX);
    format!("the end of the gateway's log:\n{}", lines[from..].join("\n"))
}

/// The level stands among the first words of a line for people, and in a field of a line for machines.
fn is_complaint(line: &str) -> bool {
    if line.contains("panicked at") {
        return true;
    }
    if let Ok(entry) = serde_json::from_str::<serde_json::Value>(line) {
        return matches!(entry["level"].as_str(), Some("WARN" | "ERROR"));
    }
    line.split_whitespace().take(LEVEL_WORDS).any(|word| matches!(word.trim_end_matches(':'), "WARN" | "ERROR"))
}

fn without_colours(line: &str) -> String {
    let mut plain = String::with_capacity(line.len());
    let mut coloured = false;
    for character in line.chars() {
        match (coloured, character) {
            (false, '\u{1b}') => coloured = true,
            (false, _) => plain.push(character),
            (true, 'm') => coloured = false,
            (true, _) => {}
        }
    }
    plain
}

const TAIL_LINES_MAX: usize = 60;
/// The time may be one word or two.
const LEVEL_WORDS: usize = 3;

#[cfg(test)]
mod tests {
    use super::complaints;

    #[test]
    fn warnings_errors_and_panics_are_found_in_every_format() {
        let log = "2026-11-30T10:00:00Z  INFO listening: ERROR is only a word of this message\n\
                   \u{1b}[2m2026-11-30T10:00:00Z\u{1b}[0m \u{1b}[33m WARN\u{1b}[0m child: noisy\n\
                   {\"timestamp\":\"…\",\"level\":\"ERROR\",\"message\":\"down\"}\n\
                   thread 'main' panicked at src/main.rs:1:1\n";
        assert_eq!(complaints(log, &[]).len(), 3);
        assert_eq!(complaints(log, &["noisy", "panicked"]).len(), 1);
    }
}
