//! The line of a file that a diagnostic shows: without secrets, and no longer than a terminal is wide.

use std::ops::Range;

/// A line as it may be shown, and what is marked in it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Excerpt {
    pub text: String,
    /// The first marked character, counted from 1.
    pub mark: usize,
    /// How many are marked, at least 1.
    pub width: usize,
}

/// The excerpt of `line` with its bytes `marked` marked. `inside` says that the line begins within a table of secrets.
///
/// Values of such tables, and URLs with credentials, become [`MASK`], whose length says nothing; a line that can't be read is masked as a whole.
/// Errs on the side of masking.
pub(super) fn excerpt(line: &str, marked: Range<usize>, inside: bool) -> Excerpt {
    let mut shown = Shown { chars: Vec::new(), mark: None, end: 0 };
    let header = inside && is_table_header(line);
    let mut reader = Reader { secret: (inside && !header).then_some(Secret::ToLineEnd), after: None };
    let mut at = 0;
    while at < line.len() {
        let token = token(&line[at..]);
        let (text, rest) = line[at..].split_at(token.length);
        let masked = reader.is_masked(&token, text, rest);
        match (masked, token.quote) {
            (false, _) => shown.push(text, at, &marked),
            (true, None) => shown.push_mask(MASK, at..at + text.len(), &marked),
            (true, Some(quote)) => {
                let whole = format!("{quote}{MASK}{quote}");
                shown.push_mask(&whole, at..at + text.len(), &marked);
            }
        }
        at += token.length;
    }
    shown.finish(marked.start >= line.len())
}

struct Shown {
    chars: Vec<char>,
    mark: Option<usize>,
    end: usize,
}

impl Shown {
    fn push(&mut self, text: &str, at: usize, marked: &Range<usize>) {
        for (offset, symbol) in text.char_indices() {
            if marked.contains(&(at + offset)) {
                self.mark.get_or_insert(self.chars.len());
                self.end = self.chars.len() + 1;
            }
            self.chars.push(if symbol.is_control() { ' ' } else { symbol });
        }
    }

    fn push_mask(&mut self, mask: &str, range: Range<usize>, marked: &Range<usize>) {
        if marked.start < range.end && range.start < marked.end {
            self.mark.get_or_insert(self.chars.len());
            self.end = self.chars.len() + mask.chars().count();
        }
        self.chars.extend(mask.chars());
    }

    /// The excerpt, cut to its longest around the mark.
    fn finish(self, at_end: bool) -> Excerpt {
        let length = self.chars.len();
        let mark = self.mark.unwrap_or(if at_end { length } else { 0 });
        let width = self.end.saturating_sub(mark).max(1);
        if length <= EXCERPT_CHARS_MAX {
            return Excerpt { text: self.chars.into_iter().collect(), mark: mark + 1, width };
        }
        let from = mark.saturating_sub(BEFORE_MARK_CHARS).min(length - EXCERPT_CHARS_MAX);
        let to = from + EXCERPT_CHARS_MAX;
        let mut text: String = self.chars.get(from..to).unwrap_or_default().iter().collect();
        let mut mark = mark - from + 1;
        if from > 0 {
            text.insert(0, CUT);
            mark += 1;
        }
        if to < length {
            text.push(CUT);
        }
        Excerpt { text, mark, width: width.min((EXCERPT_CHARS_MAX + 2).saturating_sub(mark)).max(1) }
    }
}

struct Token {
    length: usize,
    /// The quote that it begins with.
    quote: Option<char>,
    closed: bool,
}

/// The first token of a text that is not empty: a quoted text, a word, or one character of structure.
fn token(text: &str) -> Token {
    let first = text.chars().next().unwrap_or(' ');
    if matches!(first, '"' | '\'') {
        let inside = &text[1..];
        let close = closing_quote(inside, first);
        let closed = close < inside.len();
        return Token { length: 1 + close + usize::from(closed), quote: Some(first), closed };
    }
    let quoted_or_structure = |symbol: char| is_structure(symbol) || matches!(symbol, '"' | '\'');
    let word = text.find(quoted_or_structure).unwrap_or(text.len());
    Token { length: if word == 0 { first.len_utf8() } else { word }, quote: None, closed: true }
}

/// How long a table of secrets goes on.
enum Secret {
    /// Until this many braces are closed; 0 before the first is opened.
    Braces(usize),
    ToLineEnd,
}

struct Reader {
    secret: Option<Secret>,
    /// The last character of structure that is no blank.
    after: Option<char>,
}

impl Reader {
    /// Whether the token `text`, which `rest` follows, is to be masked.
    fn is_masked(&mut self, token: &Token, text: &str, rest: &str) -> bool {
        let structure =
            token.quote.is_none().then(|| text.chars().next()).flatten().filter(|first| is_structure(*first));
        if let Some(symbol) = structure {
            self.pass(symbol);
            return false;
        }
        let before = self.after.take();
        if self.secret.is_none() {
            if SECRET_TABLES.iter().any(|word| text.contains(word)) {
                self.secret = Some(if token.closed { Secret::Braces(0) } else { Secret::ToLineEnd });
            }
            // Where quotes are missing, one token may reach from within one text into the next.
            let wild = token.quote.is_some() && text[1..].contains(['=', ':', '{']);
            let credentials = text.split_once("://").is_some_and(|(_, rest)| rest.contains('@'));
            return credentials || (self.secret.is_some() && (!token.closed || wild));
        }
        let names_something = rest.trim_start().starts_with([':', '=']);
        let is_key = match token.quote {
            Some(_) => token.closed && names_something,
            // Base64 may end like a key does.
            None => names_something && !matches!(before, Some(':' | '=')),
        };
        !is_key
    }

    fn pass(&mut self, symbol: char) {
        if !symbol.is_whitespace() {
            self.after = Some(symbol);
        }
        if let Some(Secret::Braces(depth)) = &mut self.secret {
            match symbol {
                '{' => *depth += 1,
                '}' if *depth == 1 => self.secret = None,
                '}' => *depth = depth.saturating_sub(1),
                _ => {}
            }
        }
    }
}

/// Whether the line belongs to a table or object of secrets that was opened on a line before.
pub(super) fn is_inside(text: &str, line_start: usize, line_end: usize) -> bool {
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

fn is_table_header(line: &str) -> bool {
    let line = line.trim();
    line.starts_with('[') && line.ends_with(']') && !line.contains(['"', '\'', ','])
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
const MASK: &str = "…";
const CUT: char = '…';
const EXCERPT_CHARS_MAX: usize = 78;
const BEFORE_MARK_CHARS: usize = 36;

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(line: &str, marked: &str) -> (String, String) {
        let at = line.find(marked).unwrap();
        let Excerpt { text, mark, width } = excerpt(line, at..at + marked.len(), false);
        let under: String = text.chars().skip(mark - 1).take(width).collect();
        (text, under)
    }

    #[test]
    fn i6_only_values_of_secret_tables_are_masked_and_the_mark_stays_right() {
        for (line, marked, text, under) in [
            ("a = 1", "1", "a = 1", "1"),
            ("store = \"postgres://u:p@h/d\"", "\"postgres://u:p@h/d\"", "store = \"…\"", "\"…\""),
            ("headers = { X = \"Bearer s\", Y = 31 } # c", "31", "headers = { X = \"…\", Y = … } # c", "…"),
            ("{\"env\": {\"A\": \"é\"}, \"url\": 5}", "5", "{\"env\": {\"A\": \"…\"}, \"url\": 5}", "5"),
            ("{\"command\": 5, \"env\": {}}", "5", "{\"command\": 5, \"env\": {}}", "5"),
            ("{'x\": \"env\": {\"A\": \"it's\"}}", "{", "{'…'…\"…\"", "{"),
            ("\"args\": [\"--env-file\", \"x\"]", "\"args\"", "\"args\": [\"--env-file\", \"…\"]", "\"args\""),
        ] {
            assert_eq!(shown(line, marked), (text.into(), under.into()));
        }
        assert_eq!(shown("env = { A = \"short\" }", "A").0, shown("env = { A = \"very much longer\" }", "A").0);
    }

    #[test]
    fn a_long_line_is_cut_around_its_mark() {
        let line = format!("{}HERE{}", "a".repeat(500), "b".repeat(500));
        let (text, under) = shown(&line, "HERE");
        assert_eq!((text.chars().count(), under.as_str()), (EXCERPT_CHARS_MAX + 2, "HERE"));
        let Excerpt { text, mark, width } = excerpt(&line, 400..900, false);
        assert!(mark + width - 1 <= text.chars().count());
        assert_eq!(excerpt(&line, 1004..1004, false).mark, EXCERPT_CHARS_MAX + 2);
    }
}
