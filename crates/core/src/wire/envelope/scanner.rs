//! The cursor that validates JSON text as it passes over it, and the byte search under it.

use memchr::memchr2;

use super::{ScanError, Span};

/// A cursor over JSON text. Each step validates what it passes.
pub(super) struct Scanner<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) at: usize,
}

impl Scanner<'_> {
    pub(super) fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    /// Passes `byte` if it is next.
    pub(super) fn take(&mut self, byte: u8) -> bool {
        let next = self.peek() == Some(byte);
        self.at += usize::from(next);
        next
    }

    pub(super) fn error(&self, problem: &'static str) -> ScanError {
        ScanError { problem, offset: self.at.min(self.bytes.len()) }
    }

    pub(super) fn space(&mut self) {
        while let Some(b' ' | b'\n' | b'\r' | b'\t') = self.peek() {
            self.at += 1;
        }
    }

    /// Passes what may follow the outermost value: whitespace, up to the last byte.
    pub(super) fn end(&mut self) -> Result<(), ScanError> {
        self.space();
        if self.at == self.bytes.len() { Ok(()) } else { Err(self.error("something follows the message")) }
    }

    /// Passes the `{` and the first key with its colon. `None` if the object is empty and thereby passed.
    pub(super) fn enter_object(&mut self) -> Result<Option<Span>, ScanError> {
        if !self.take(b'{') {
            return Err(self.error("expected an object"));
        }
        self.space();
        if self.take(b'}') { Ok(None) } else { self.key().map(Some) }
    }

    /// After a value of an object: passes the comma and the next key with its colon. `None` if the object ended.
    pub(super) fn next_key(&mut self) -> Result<Option<Span>, ScanError> {
        self.space();
        if self.take(b'}') {
            return Ok(None);
        }
        if !self.take(b',') {
            return Err(self.error("expected `,` or `}`"));
        }
        self.space();
        self.key().map(Some)
    }

    /// Passes a key, its colon and the whitespace around it.
    fn key(&mut self) -> Result<Span, ScanError> {
        let key = self.string()?;
        self.space();
        if !self.take(b':') {
            return Err(self.error("expected `:`"));
        }
        self.space();
        Ok(key)
    }

    /// Passes one value that nests at most `depth_max` levels deep; a bit for each open level says what it is.
    pub(super) fn value(&mut self, depth_max: u32) -> Result<Span, ScanError> {
        debug_assert!(depth_max <= u128::BITS, "the open levels are one word");
        let start = self.at;
        let mut objects = 0_u128;
        let mut depth = 0;
        loop {
            if let Some(open @ (b'{' | b'[')) = self.peek() {
                if depth == depth_max {
                    return Err(self.error("nested too deeply"));
                }
                depth += 1;
                objects = objects << 1 | u128::from(open == b'{');
                self.at += 1;
                self.space();
                // The closing bracket of an empty one is passed below.
                match self.peek() {
                    Some(b'}') if open == b'{' => {}
                    Some(b']') if open == b'[' => {}
                    _ if open == b'{' => {
                        self.key()?;
                        continue;
                    }
                    _ => continue,
                }
            } else {
                self.scalar()?;
            }
            loop {
                if depth == 0 {
                    return Ok(start..self.at);
                }
                self.space();
                let in_object = objects & 1 == 1;
                if self.take(if in_object { b'}' } else { b']' }) {
                    depth -= 1;
                    objects >>= 1;
                } else if self.take(b',') {
                    self.space();
                    if in_object {
                        self.key()?;
                    }
                    break;
                } else {
                    return Err(self.error("expected `,` or the closing bracket"));
                }
            }
        }
    }

    fn scalar(&mut self) -> Result<(), ScanError> {
        match self.peek() {
            Some(b'"') => self.string().map(|_| ()),
            Some(b'-' | b'0'..=b'9') => self.number(),
            Some(b't') => self.literal(b"true"),
            Some(b'f') => self.literal(b"false"),
            Some(b'n') => self.literal(b"null"),
            _ => Err(self.error("expected a value")),
        }
    }

    fn literal(&mut self, literal: &[u8]) -> Result<(), ScanError> {
        if !self.bytes[self.at..].starts_with(literal) {
            return Err(self.error("expected a value"));
        }
        self.at += literal.len();
        Ok(())
    }

    fn number(&mut self) -> Result<(), ScanError> {
        self.take(b'-');
        if !self.take(b'0') {
            self.digits()?;
        }
        if self.take(b'.') {
            self.digits()?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            self.at += 1;
            if !self.take(b'-') {
                self.take(b'+');
            }
            self.digits()?;
        }
        Ok(())
    }

    fn digits(&mut self) -> Result<(), ScanError> {
        let start = self.at;
        while let Some(b'0'..=b'9') = self.peek() {
            self.at += 1;
        }
        if self.at == start { Err(self.error("expected a digit")) } else { Ok(()) }
    }

    pub(super) fn string(&mut self) -> Result<Span, ScanError> {
        let start = self.at;
        if !self.take(b'"') {
            return Err(self.error("expected a string"));
        }
        loop {
            self.at = next_special(self.bytes, self.at);
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(start..self.at);
                }
                Some(b'\\') => {
                    let Some((_, next)) = read_escape(self.bytes, self.at) else {
                        return Err(self.error("invalid escape"));
                    };
                    self.at = next;
                }
                Some(_) => return Err(self.error("control character in a string")),
                None => return Err(self.error("unterminated string")),
            }
        }
    }
}

/// The character that the escape at the backslash at `at` stands for, and where the text goes on.
pub(super) fn read_escape(bytes: &[u8], at: usize) -> Option<(char, usize)> {
    let character = match bytes.get(at + 1)? {
        b'"' => '"',
        b'\\' => '\\',
        b'/' => '/',
        b'b' => '\u{8}',
        b'f' => '\u{c}',
        b'n' => '\n',
        b'r' => '\r',
        b't' => '\t',
        b'u' => return read_unicode_escape(bytes, at),
        _ => return None,
    };
    Some((character, at + 2))
}

fn read_unicode_escape(bytes: &[u8], at: usize) -> Option<(char, usize)> {
    let unit = hex4(bytes, at + 2)?;
    if !(0xd800..0xdc00).contains(&unit) {
        // A low surrogate without its high one is no character, so it ends here.
        return Some((char::from_u32(unit)?, at + 6));
    }
    if bytes.get(at + 6..at + 8) != Some(b"\\u") {
        return None;
    }
    let low = hex4(bytes, at + 8).filter(|low| (0xdc00..0xe000).contains(low))?;
    let character = char::from_u32(0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00))?;
    Some((character, at + 12))
}

fn hex4(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.iter().try_fold(0, |unit, &digit| Some(unit << 4 | char::from(digit).to_digit(16)?))
}

/// Where, from `from` on, the first quote, backslash or control character stands; the end if there is none.
///
/// The beginning is looked at a word at a time, since most strings are short; the rest of a long one is left to vector code.
pub(super) fn next_special(bytes: &[u8], from: usize) -> usize {
    let mut at = from;
    while at - from < SHORT_BYTES {
        let Some(word) = word_at(bytes, at) else { break };
        let marks = special_marks(word);
        if marks != 0 {
            return at + first_mark(marks);
        }
        at += WORD_BYTES;
    }
    let rest = bytes.get(at..).unwrap_or_default();
    let plain = &rest[..memchr2(b'"', b'\\', rest).unwrap_or(rest.len())];
    at + first_control(plain)
}

/// Where the first control character stands; the end if there is none.
fn first_control(bytes: &[u8]) -> usize {
    let mut at = 0;
    while bytes.get(at..).and_then(<[u8]>::first_chunk::<BLOCK_BYTES>).is_some_and(is_plain) {
        at += BLOCK_BYTES;
    }
    while let Some(word) = word_at(bytes, at) {
        let marks = below(word, 0x20) & HIGH_BITS;
        if marks != 0 {
            return at + first_mark(marks);
        }
        at += WORD_BYTES;
    }
    let tail = bytes.get(at..).unwrap_or_default();
    at + tail.iter().position(|&byte| byte < 0x20).unwrap_or(tail.len())
}

fn word_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk::<WORD_BYTES>().map(|word| u64::from_le_bytes(*word))
}

/// Which byte of a word the lowest mark is on. Above it others may be false, by borrowing.
fn first_mark(marks: u64) -> usize {
    marks.trailing_zeros() as usize / 8
}

/// The high bit of each byte of `word` that is special.
fn special_marks(word: u64) -> u64 {
    let quote = below(word ^ (ONES * 0x22), 1);
    let backslash = below(word ^ (ONES * 0x5c), 1);
    (below(word, 0x20) | quote | backslash) & HIGH_BITS
}

/// Has the high bit of each byte of `word` that is below `bound`, which is at most 0x80.
fn below(word: u64, bound: u64) -> u64 {
    word.wrapping_sub(ONES * bound) & !word
}

fn is_plain(block: &[u8; BLOCK_BYTES]) -> bool {
    block.iter().fold(0, |found, &byte| found | u8::from(byte < 0x20)) == 0
}

const ONES: u64 = u64::MAX / 0xff;
const HIGH_BITS: u64 = ONES * 0x80;
const WORD_BYTES: usize = 8;
const SHORT_BYTES: usize = 2 * WORD_BYTES;
const BLOCK_BYTES: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_next_special_byte_is_found_wherever_it_stands(
            bytes in vec(prop_oneof![30 => 0x20..=0xff_u8, 1 => any::<u8>()], 0..200),
            from in 0..20_usize,
        ) {
            let from = from.min(bytes.len());
            let is_special = |&byte: &u8| byte < 0x20 || byte == b'"' || byte == b'\\';
            let expected = bytes[from..].iter().position(is_special);
            prop_assert_eq!(next_special(&bytes, from), expected.map_or(bytes.len(), |at| from + at));
        }
    }
}
