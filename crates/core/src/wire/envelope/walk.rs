//! Walks over the parts of an object or an array in an already scanned message, one span at a time.

use super::scanner::Scanner;
use super::{DEPTH_MAX, Span, is_text};

/// The members of the object at `object` of an already scanned message, in the order in which they stand there: the
/// span of the raw key, quotes included, and that of the value. Empty if `object` is no object.
pub fn members<'a>(message: &'a [u8], object: &Span) -> Members<'a> {
    let bytes = message.get(..object.end).unwrap_or_default();
    let mut scanner = Scanner { bytes, at: object.start };
    let key = scanner.enter_object().ok().flatten();
    Members { scanner, key }
}

/// The elements of the array at `array` of an already scanned message, in order. Empty if `array` is no array.
pub fn elements<'a>(message: &'a [u8], array: &Span) -> Elements<'a> {
    let bytes = message.get(..array.end).unwrap_or_default();
    let mut scanner = Scanner { bytes, at: array.start };
    let mut more = scanner.take(b'[');
    scanner.space();
    more &= scanner.peek() != Some(b']');
    Elements { scanner, more }
}

/// Whether the raw JSON string `raw` says `text`, however it is escaped. Copies nothing.
pub fn says(raw: &[u8], text: &str) -> bool {
    is_text(raw, text)
}

/// See [`members`].
pub struct Members<'a> {
    scanner: Scanner<'a>,
    key: Option<Span>,
}

impl Iterator for Members<'_> {
    type Item = (Span, Span);

    fn next(&mut self) -> Option<(Span, Span)> {
        let key = self.key.take()?;
        let value = self.scanner.value(DEPTH_MAX).ok()?;
        self.key = self.scanner.next_key().ok().flatten();
        Some((key, value))
    }
}

/// See [`elements`].
pub struct Elements<'a> {
    scanner: Scanner<'a>,
    more: bool,
}

impl Iterator for Elements<'_> {
    type Item = Span;

    fn next(&mut self) -> Option<Span> {
        if !self.more {
            return None;
        }
        self.scanner.space();
        let value = self.scanner.value(DEPTH_MAX).ok()?;
        self.scanner.space();
        self.more = self.scanner.take(b',');
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(message: &str, spans: impl Iterator<Item = Span>) -> Vec<&str> {
        spans.map(|span| &message[span]).collect()
    }

    #[test]
    fn members_and_elements_are_walked_in_order() {
        let object = r#"{ "a" : [1, {"b":2}] , "a":null,"c\u0064":"}" }"#;
        let all = members(object.as_bytes(), &(0..object.len()));
        let (keys, values): (Vec<_>, Vec<_>) = all.unzip();
        assert_eq!(texts(object, keys.into_iter()), [r#""a""#, r#""a""#, r#""c\u0064""#]);
        assert_eq!(texts(object, values.into_iter()), [r#"[1, {"b":2}]"#, "null", r#""}""#]);
        let array = r#"[ 1 ,"],", [2],{} ]"#;
        let spans = elements(array.as_bytes(), &(0..array.len()));
        assert_eq!(texts(array, spans), ["1", r#""],""#, "[2]", "{}"]);
        for none in ["{}", "[]", " ", "1", "", "[ ]", "{ }"] {
            assert_eq!(members(none.as_bytes(), &(0..none.len())).count(), 0, "{none:?}");
            assert_eq!(elements(none.as_bytes(), &(0..none.len())).count(), 0, "{none:?}");
        }
    }
}
