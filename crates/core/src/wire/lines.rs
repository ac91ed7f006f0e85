//! Newline framing of the stdio transport: chunks in, lines out, memory bounded.
//!
//! It knows bytes and line ends only; whether a line is a message is the scanner's question.

use bytes::{Buf as _, Bytes, BytesMut};
use memchr::memchr;

/// How much of either end of an oversize line is kept for the report, in bytes.
pub const OVERSIZE_EDGE_BYTES: usize = 4096;

/// The largest buffer that is kept for the next lines, in bytes.
pub const BUFFER_KEPT_BYTES_MAX: usize = 64 * 1024;

/// One line, without its line end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Line {
    /// A line within the bound, byte-identical to what was written.
    Whole(Bytes),
    /// A line above the bound. It was dropped; this is what can be said about it.
    Oversize {
        /// Its first bytes, [`OVERSIZE_EDGE_BYTES`] at most.
        head: Bytes,
        /// Its last bytes, [`OVERSIZE_EDGE_BYTES`] at most; they overlap `head` if the line is short.
        tail: Bytes,
        /// How long it was.
        bytes: u64,
    },
}

/// What a splitter holds between two chunks: enough for another to go on with the stream, in another process too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unfinished {
    /// Bytes that belong to no line that was taken out.
    pub pending: Bytes,
    /// The line in progress, if it is above the bound already; `pending` goes on with it.
    pub oversize: Option<UnfinishedOversize>,
}

/// What is kept of an oversize line whose end has not come yet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnfinishedOversize {
    /// Its first bytes.
    pub head: Bytes,
    /// Its last bytes so far, and some before them.
    pub tail: Bytes,
    /// How long it is so far.
    pub bytes: u64,
}

/// Splits a stream of chunks into lines (2025-11-25, Transports, stdio).
///
/// `\n` ends a line, one `\r` before it is dropped, empty lines are skipped. How the stream was cut into chunks makes
/// no difference. Each byte is looked at once. Kept bytes stay below the bound on lines (plus the edges of an oversize
/// one) and whatever was pushed since [`next_line`](Self::next_line) last returned `None`. A buffer that a long line has
/// grown is given back once at most [`BUFFER_KEPT_BYTES_MAX`] are left in it.
#[derive(Debug)]
pub struct LineSplitter {
    line_bytes_max: usize,
    pending: BytesMut,
    /// How many of the pending bytes are known to hold no line end.
    scanned: usize,
    /// Whether the buffer has grown beyond what is kept.
    grown: bool,
    /// The line in progress, once it is above the bound.
    dropped: Option<Dropped>,
}

impl LineSplitter {
    /// A splitter for lines of at most `line_bytes_max` bytes, line end not counted.
    pub fn new(line_bytes_max: usize) -> Self {
        Self { line_bytes_max, pending: BytesMut::new(), scanned: 0, grown: false, dropped: None }
    }

    /// A splitter that goes on where another was.
    pub fn resume(line_bytes_max: usize, unfinished: &Unfinished) -> Self {
        let pending = BytesMut::from(&unfinished.pending[..]);
        let grown = pending.len() > BUFFER_KEPT_BYTES_MAX;
        let dropped = unfinished.oversize.as_ref().map(|line| Dropped {
            head: line.head.to_vec(),
            tail: line.tail.to_vec(),
            bytes: line.bytes,
        });
        Self { line_bytes_max, pending, scanned: 0, grown, dropped }
    }

    /// What [`resume`](Self::resume) needs to go on from here.
    pub fn unfinished(&self) -> Unfinished {
        let oversize = self.dropped.as_ref().map(|line| UnfinishedOversize {
            head: Bytes::copy_from_slice(&line.head),
            tail: Bytes::copy_from_slice(&line.tail),
            bytes: line.bytes,
        });
        Unfinished { pending: Bytes::copy_from_slice(&self.pending), oversize }
    }

    /// Takes the next bytes of the stream. Take out the lines before pushing more.
    pub fn push(&mut self, chunk: &[u8]) {
        self.pending.extend_from_slice(chunk);
        self.grown |= self.pending.len() > BUFFER_KEPT_BYTES_MAX;
    }

    /// The next line that is complete, if any.
    pub fn next_line(&mut self) -> Option<Line> {
        while let Some(offset) = memchr(b'\n', &self.pending[self.scanned..]) {
            let mut line = self.pending.split_to(self.scanned + offset);
            self.pending.advance(1);
            self.scanned = 0;
            if line.len() > BUFFER_KEPT_BYTES_MAX {
                self.shrink();
            }
            let content_bytes = line.strip_suffix(b"\r").map_or(line.len(), <[u8]>::len);
            if self.dropped.is_some() || content_bytes > self.line_bytes_max {
                let mut dropped = self.dropped.take().unwrap_or_default();
                dropped.push(&line);
                return Some(dropped.report());
            }
            if content_bytes > 0 {
                line.truncate(content_bytes);
                return Some(Line::Whole(line.freeze()));
            }
        }
        self.scanned = self.pending.len();
        // One byte above the bound may still turn out to be the `\r` of the line end.
        if self.dropped.is_some() || self.pending.len() > self.line_bytes_max.saturating_add(1) {
            self.dropped.get_or_insert_default().push(&self.pending);
            self.pending.clear();
            self.scanned = 0;
        }
        self.shrink();
        None
    }

    /// Moves what is left to a buffer of its own size. What was taken out, and what comes next, is then not in one with
    /// the long line, which could not be freed before all of it.
    fn shrink(&mut self) {
        if self.grown && self.pending.len() <= BUFFER_KEPT_BYTES_MAX {
            self.pending = BytesMut::from(&self.pending[..]);
            self.grown = false;
        }
    }

    /// At the end of the stream: the line that was never ended, if there is one; of one above the bound, its head.
    /// The complete lines must have been taken out before. It is no message, only good for a report.
    pub fn finish(&mut self) -> Option<Bytes> {
        debug_assert!(memchr(b'\n', &self.pending).is_none(), "complete lines are taken out first");
        let mut rest = self.pending.split();
        self.scanned = 0;
        if let Some(mut dropped) = self.dropped.take() {
            dropped.push(&rest);
            return Some(Bytes::from(dropped.head));
        }
        if rest.last() == Some(&b'\r') {
            rest.truncate(rest.len() - 1);
        }
        (!rest.is_empty()).then(|| rest.freeze())
    }

    /// How many bytes are kept for the line in progress and lines not yet taken out.
    pub fn buffered(&self) -> usize {
        self.pending.len() + self.dropped.as_ref().map_or(0, |dropped| dropped.head.len() + dropped.tail.len())
    }
}

/// A line of which only the edges are kept.
#[derive(Debug, Default)]
struct Dropped {
    head: Vec<u8>,
    /// At least the last bytes; trimmed when it is twice as long as it has to be.
    tail: Vec<u8>,
    bytes: u64,
}

impl Dropped {
    fn push(&mut self, chunk: &[u8]) {
        let wanted = OVERSIZE_EDGE_BYTES.saturating_sub(self.head.len()).min(chunk.len());
        self.head.extend_from_slice(&chunk[..wanted]);
        self.bytes += chunk.len() as u64;
        self.tail.extend_from_slice(&chunk[chunk.len().saturating_sub(TAIL_BYTES)..]);
        if self.tail.len() >= 2 * TAIL_BYTES {
            self.tail.drain(..self.tail.len() - TAIL_BYTES);
        }
    }

    /// The report of the line, now that it is complete but for its `\n`.
    fn report(mut self) -> Line {
        if self.tail.last() == Some(&b'\r') {
            self.tail.truncate(self.tail.len() - 1);
            self.bytes -= 1;
        }
        self.head.truncate(usize::try_from(self.bytes).unwrap_or(usize::MAX));
        let tail = &self.tail[self.tail.len().saturating_sub(OVERSIZE_EDGE_BYTES)..];
        Line::Oversize { tail: Bytes::copy_from_slice(tail), head: Bytes::from(self.head), bytes: self.bytes }
    }
}

/// The edge, and a `\r` that does not belong to it.
const TAIL_BYTES: usize = OVERSIZE_EDGE_BYTES + 1;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    /// All lines of `stream`, cut into chunks of the sizes given, and the rest.
    fn split(stream: &[u8], sizes: &[usize], line_bytes_max: usize) -> (Vec<Line>, Option<Bytes>) {
        let mut splitter = LineSplitter::new(line_bytes_max);
        let (mut lines, mut rest) = (Vec::new(), stream);
        for &size in sizes.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (chunk, after) = rest.split_at(size.min(rest.len()));
            splitter.push(chunk);
            while let Some(line) = splitter.next_line() {
                lines.push(line);
            }
            assert!(splitter.buffered() <= line_bytes_max + 1 + 3 * TAIL_BYTES);
            rest = after;
        }
        (lines, splitter.finish())
    }

    /// The same by the plain words of the rule.
    fn reference(stream: &[u8], line_bytes_max: usize) -> Vec<Line> {
        let mut parts: Vec<_> = stream.split(|&byte| byte == b'\n').collect();
        parts.pop();
        let trimmed = parts.into_iter().map(|line| line.strip_suffix(b"\r").unwrap_or(line));
        let lines = trimmed.filter(|line| !line.is_empty()).map(|line| {
            if line.len() <= line_bytes_max {
                return Line::Whole(Bytes::copy_from_slice(line));
            }
            let edge = line.len().min(OVERSIZE_EDGE_BYTES);
            Line::Oversize {
                head: Bytes::copy_from_slice(&line[..edge]),
                tail: Bytes::copy_from_slice(&line[line.len() - edge..]),
                bytes: line.len() as u64,
            }
        });
        lines.collect()
    }

    proptest! {
        #[test]
        fn c2_any_chunking_gives_the_same_lines(
            stream in vec(prop_oneof![3 => Just(b'\n'), 3 => Just(b'\r'), 10 => any::<u8>()], 0..300),
            sizes in vec(1..40_usize, 1..20),
            line_bytes_max in 0..20_usize,
        ) {
            let (lines, rest) = split(&stream, &sizes, line_bytes_max);
            prop_assert_eq!(lines, reference(&stream, line_bytes_max));
            prop_assert_eq!(rest, split(&stream, &[usize::MAX], line_bytes_max).1);
        }

        #[test]
        fn t2_a_splitter_that_goes_on_for_another_gives_the_same_lines(
            stream in vec(prop_oneof![3 => Just(b'\n'), 3 => Just(b'\r'), 10 => any::<u8>()], 0..300),
            sizes in vec(1..40_usize, 1..20),
            line_bytes_max in 0..20_usize,
            lens in vec(0..10_000_usize, 0..3),
        ) {
            let long = lens.iter().flat_map(|len| std::iter::repeat_n(b'x', *len).chain([b'\n']));
            let stream: Vec<u8> = stream.into_iter().chain(long).collect();
            let (mut splitter, mut lines, mut rest) = (LineSplitter::new(line_bytes_max), Vec::new(), &stream[..]);
            for size in sizes.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (chunk, after) = rest.split_at((*size * 50).min(rest.len()));
                splitter.push(chunk);
                // One line at most is taken out before the next takes over.
                lines.extend(splitter.next_line());
                splitter = LineSplitter::resume(line_bytes_max, &splitter.unfinished());
                rest = after;
            }
            while let Some(line) = splitter.next_line() {
                lines.push(line);
            }
            prop_assert_eq!(lines, reference(&stream, line_bytes_max));
        }

        #[test]
        fn c2_long_lines_are_reported_by_their_edges(
            lens in vec(0..20_000_usize, 1..4),
            sizes in vec(1..9000_usize, 1..6),
            line_bytes_max in 4000..9000_usize,
            ends in vec(any::<bool>(), 4),
        ) {
            let mut stream = Vec::new();
            for (len, crlf) in lens.iter().zip(ends) {
                stream.extend((0..*len).map(|at| b'a' + u8::try_from(at % 23).expect("small")));
                stream.extend_from_slice(if crlf { b"\r\n" } else { b"\n" });
            }
            prop_assert_eq!(split(&stream, &sizes, line_bytes_max).0, reference(&stream, line_bytes_max));
        }
    }

    #[test]
    fn c2_multi_byte_text_split_anywhere_is_identical() {
        let text = "{\"é\":\"日本\u{1f600}\"}";
        let stream = format!("{text}\n{text}\r\n");
        for size in 1..stream.len() {
            let lines = split(stream.as_bytes(), &[size], 1000).0;
            assert_eq!(lines, vec![Line::Whole(Bytes::from(text)); 2]);
        }
    }

    #[test]
    fn c2_the_bound_counts_neither_end() {
        assert_eq!(split(b"1234\r\n", &[1], 4).0, [Line::Whole(Bytes::from_static(b"1234"))]);
        assert!(matches!(split(b"12345\n", &[1], 4).0[..], [Line::Oversize { bytes: 5, .. }]));
        assert!(matches!(split(b"1234\r\r\n", &[1], 4).0[..], [Line::Oversize { bytes: 5, .. }]));
    }

    #[test]
    fn c2_a_partial_line_comes_out_at_the_end() {
        assert_eq!(split(b"a\n\r\n{\"b", &[2], 9).1, Some(Bytes::from_static(b"{\"b")));
        assert_eq!(split(b"a\n", &[2], 9).1, None);
        assert_eq!(split(b"a\nbcdefgh", &[1], 3).1, Some(Bytes::from_static(b"bcdefgh")));
    }

    #[test]
    fn c2_a_long_line_leaves_no_large_buffer_behind() {
        const LONG: usize = 1024 * 1024;
        for (line_bytes_max, is_whole) in [(LONG, true), (LONG / 2, false)] {
            let mut splitter = LineSplitter::new(line_bytes_max);
            let stream = [&[b'x'; LONG][..], b"\nnext\npart"].concat();
            let mut lines = Vec::new();
            for chunk in stream.chunks(BUFFER_KEPT_BYTES_MAX) {
                splitter.push(chunk);
                while let Some(line) = splitter.next_line() {
                    lines.push(line);
                }
            }
            assert_eq!((lines.len(), matches!(lines[0], Line::Whole(_))), (2, is_whole));
            assert_eq!(lines[1], Line::Whole(Bytes::from_static(b"next")));
            drop(lines);
            // More than is there would be taken from the old buffer, if that were still held.
            splitter.pending.reserve(BUFFER_KEPT_BYTES_MAX);
            assert!(splitter.pending.capacity() < 4 * BUFFER_KEPT_BYTES_MAX, "{}", splitter.pending.capacity());
            assert_eq!(splitter.finish(), Some(Bytes::from_static(b"part")));
        }
    }

    #[test]
    fn c2_memory_stays_bounded_under_an_endless_line() {
        let mut splitter = LineSplitter::new(10_000);
        for _ in 0..1000 {
            splitter.push(&[b'x'; 1000]);
            assert_eq!(splitter.next_line(), None);
            assert!(splitter.buffered() <= 10_001 + 3 * TAIL_BYTES);
        }
        assert!(splitter.pending.capacity() <= 64 * 1024);
        splitter.push(b"\nok\n");
        assert!(matches!(splitter.next_line(), Some(Line::Oversize { bytes: 1_000_000, .. })));
        assert_eq!(splitter.next_line(), Some(Line::Whole(Bytes::from_static(b"ok"))));
    }
}
