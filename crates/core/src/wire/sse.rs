//! Server-sent events: a bounded decoder and an encoder (WHATWG HTML, section 9.2, Server-sent events).
//!
//! Unlike a browser, the decoder also returns events without data: an id or a retry hint alone moves the cursor.

use bytes::{Buf as _, Bytes, BytesMut};
use memchr::{memchr, memchr2};

/// One event, as far as its lines said something.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// The `id:`; empty if the server resets the cursor. One with a NUL in it is ignored.
    pub id: Option<String>,
    /// The `event:`, never empty. `None` means `message`.
    pub name: Option<String>,
    /// The `data:` lines joined by line feeds. `None` if there was none, empty if it said nothing (a priming event).
    pub data: Option<Bytes>,
    /// The `retry:` in milliseconds, if it was a number.
    pub retry_ms: Option<u64>,
}

/// An event or a comment line is above the decoder's bound. The stream can't be read further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("event of more than {event_bytes_max} bytes")]
pub struct Oversize {
    /// The bound.
    pub event_bytes_max: usize,
}

/// Reads events out of a stream of chunks; how it was cut makes no difference.
///
/// Each byte is looked at once. The data of an event with one data line is a slice of the buffer, not another copy.
/// Kept bytes stay below twice the bound, plus whatever was pushed since [`next_event`](Self::next_event) last returned
/// `None`. An event that the end of the stream cuts off is never returned.
#[derive(Debug)]
pub struct SseDecoder {
    event_bytes_max: usize,
    pending: BytesMut,
    /// How many of the pending bytes are known to hold no line end.
    scanned: usize,
    place: Place,
    event: Partial,
}

impl SseDecoder {
    /// A decoder of events whose lines, field names included and line ends not, are `event_bytes_max` bytes at most
    /// in sum. Comments do not count, but none of them may be longer either.
    pub fn new(event_bytes_max: usize) -> Self {
        Self { event_bytes_max, pending: BytesMut::new(), scanned: 0, place: Place::Start, event: Partial::default() }
    }

    /// Bounds the events from here on otherwise.
    pub fn rebound(&mut self, event_bytes_max: usize) {
        self.event_bytes_max = event_bytes_max;
    }

    /// Takes the next bytes of the stream. Take out the events before pushing more.
    pub fn push(&mut self, chunk: &[u8]) {
        if self.place != Place::Failed {
            self.pending.extend_from_slice(chunk);
        }
    }

    /// The next event that is complete, if any. After an error every later call returns the same error.
    pub fn next_event(&mut self) -> Result<Option<Event>, Oversize> {
        while let Some(line) = self.next_line()? {
            if !line.is_empty() {
                self.event.push(line);
            } else if let Some(event) = std::mem::take(&mut self.event).dispatch() {
                return Ok(Some(event));
            }
        }
        Ok(None)
    }

    /// The next complete line without its end.
    fn next_line(&mut self) -> Result<Option<Bytes>, Oversize> {
        match self.place {
            Place::Failed => return Err(self.oversize()),
            Place::Start if self.pending.len() < BOM.len() && BOM.starts_with(&self.pending) => return Ok(None),
            Place::Start if self.pending.starts_with(BOM) => self.pending.advance(BOM.len()),
            Place::AfterCr if self.pending.is_empty() => return Ok(None),
            Place::AfterCr if self.pending.starts_with(b"\n") => self.pending.advance(1),
            Place::Start | Place::AfterCr | Place::Within => {}
        }
        self.place = Place::Within;
        let end = memchr2(b'\r', b'\n', &self.pending[self.scanned..]).map(|offset| self.scanned + offset);
        let line_bytes = end.unwrap_or(self.pending.len());
        let counted = if self.pending.starts_with(b":") { 0 } else { self.event.bytes };
        if counted.saturating_add(line_bytes) > self.event_bytes_max {
            self.place = Place::Failed;
            self.pending = BytesMut::new();
            self.event = Partial::default();
            return Err(self.oversize());
        }
        let Some(end) = end else {
            self.scanned = line_bytes;
            return Ok(None);
        };
        let line = self.pending.split_to(end);
        if self.pending.starts_with(b"\r") {
            self.place = Place::AfterCr;
        }
        self.pending.advance(1);
        self.scanned = 0;
        Ok(Some(line.freeze()))
    }

    fn oversize(&self) -> Oversize {
        Oversize { event_bytes_max: self.event_bytes_max }
    }
}

/// Appends one event: an `id:` line, a `retry:` line, the `data:` line or lines, a blank line.
///
/// Raw line ends in `data` begin a new data line, so `\r\n` and `\r` come out as `\n` on the other side. An id with a
/// line end or NUL in it can't be written and is left out. Field lines that stand at the end of `out` already, such as
/// `event: endpoint\n`, belong to the same event.
pub fn encode(out: &mut Vec<u8>, id: Option<&str>, retry_ms: Option<u64>, data: &[u8]) {
    out.reserve(data.len() + id.map_or(0, str::len) + 48);
    push_id(out, id);
    if let Some(retry_ms) = retry_ms {
        push_line(out, b"retry: ", retry_ms.to_string().as_bytes());
    }
    push_lines(out, b"data: ", data);
    out.push(b'\n');
}

/// Appends the beginning of an event whose data follow as they are, and then [`END`]: for data that are too large to be
/// copied. They must have no raw line end.
pub fn begin(out: &mut Vec<u8>, id: Option<&str>) {
    push_id(out, id);
    out.extend_from_slice(b"data: ");
}

/// What ends an event that was [begun](begin).
pub const END: &[u8] = b"\n\n";

fn push_id(out: &mut Vec<u8>, id: Option<&str>) {
    if let Some(id) = id.filter(|id| !id.contains(['\r', '\n', '\0'])) {
        push_line(out, b"id: ", id.as_bytes());
    }
}

/// Appends a comment, which clients ignore: it only shows that the stream is alive.
pub fn comment(out: &mut Vec<u8>, text: &str) {
    push_lines(out, b": ", text.as_bytes());
    out.push(b'\n');
}

fn push_lines(out: &mut Vec<u8>, prefix: &[u8], text: &[u8]) {
    let mut rest = text;
    while let Some(end) = memchr2(b'\r', b'\n', rest) {
        push_line(out, prefix, &rest[..end]);
        let end_bytes = if rest[end..].starts_with(b"\r\n") { 2 } else { 1 };
        rest = &rest[end + end_bytes..];
    }
    push_line(out, prefix, rest);
}

fn push_line(out: &mut Vec<u8>, prefix: &[u8], text: &[u8]) {
    out.extend_from_slice(prefix);
    out.extend_from_slice(text);
    out.push(b'\n');
}

/// Where in the stream the decoder stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Before the first byte, where a byte order mark is skipped.
    Start,
    /// Anywhere else.
    Within,
    /// After a line ended by `\r`, whose `\n` may be still to come.
    AfterCr,
    /// Past an event that was too large.
    Failed,
}

/// The event in progress.
#[derive(Debug, Default)]
struct Partial {
    /// The length of its lines so far.
    bytes: usize,
    id: Option<String>,
    name: Option<String>,
    retry_ms: Option<u64>,
    data: Data,
}

#[derive(Debug, Default)]
enum Data {
    #[default]
    None,
    Line(Bytes),
    Lines(Vec<u8>),
}

impl Partial {
    fn push(&mut self, line: Bytes) {
        let colon = memchr(b':', &line).unwrap_or(line.len());
        if colon == 0 {
            return;
        }
        self.bytes += line.len();
        let after = line.get(colon + 1..).unwrap_or_default();
        let value = line.slice_ref(after.strip_prefix(b" ").unwrap_or(after));
        match &line[..colon] {
            b"data" => self.data = std::mem::take(&mut self.data).with(value),
            b"id" if memchr(0, &value).is_none() => self.id = Some(text(&value)),
            b"event" => self.name = Some(text(&value)).filter(|name| !name.is_empty()),
            b"retry" if value.iter().all(u8::is_ascii_digit) => {
                self.retry_ms = text(&value).parse().ok().or(self.retry_ms);
            }
            _ => {}
        }
    }

    /// The event, now that its blank line has come. `None` if it has nothing to say.
    fn dispatch(self) -> Option<Event> {
        let data = match self.data {
            Data::None => None,
            Data::Line(line) => Some(line),
            Data::Lines(lines) => Some(Bytes::from(lines)),
        };
        let says = data.is_some() || self.id.is_some() || self.retry_ms.is_some();
        says.then_some(Event { id: self.id, name: self.name, data, retry_ms: self.retry_ms })
    }
}

impl Data {
    fn with(self, line: Bytes) -> Self {
        let mut lines = match self {
            Self::None => return Self::Line(line),
            Self::Line(first) => Vec::from(first),
            Self::Lines(lines) => lines,
        };
        lines.push(b'\n');
        lines.extend_from_slice(&line);
        Self::Lines(lines)
    }
}

fn text(value: &[u8]) -> String {
    String::from_utf8_lossy(value).into_owned()
}

const BOM: &[u8] = b"\xef\xbb\xbf";

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    /// All events of `stream`, cut into chunks of the sizes given, up to the error if there is one.
    fn decode(stream: &[u8], sizes: &[usize], event_bytes_max: usize) -> (Vec<Event>, Option<Oversize>) {
        let mut decoder = SseDecoder::new(event_bytes_max);
        let (mut events, mut rest) = (Vec::new(), stream);
        for &size in sizes.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (chunk, after) = rest.split_at(size.min(rest.len()));
            decoder.push(chunk);
            loop {
                match decoder.next_event() {
                    Ok(Some(event)) => events.push(event),
                    Ok(None) => break,
                    Err(error) => {
                        assert_eq!(decoder.next_event(), Err(error));
                        return (events, Some(error));
                    }
                }
            }
            rest = after;
        }
        (events, None)
    }

    fn events(stream: &str) -> Vec<Event> {
        decode(stream.as_bytes(), &[usize::MAX], 1000).0
    }

    /// The same by the plain words of the rule, over text that is whole.
    fn reference(stream: &str) -> Vec<Event> {
        let stream = stream.strip_prefix('\u{feff}').unwrap_or(stream);
        let unified = stream.replace("\r\n", "\n").replace('\r', "\n");
        let mut lines: Vec<_> = unified.split('\n').collect();
        lines.pop();
        let (mut events, mut event, mut data) = (Vec::new(), Event::default(), Vec::new());
        for line in lines {
            let (name, value) = line.split_once(':').unwrap_or((line, ""));
            let value = value.strip_prefix(' ').unwrap_or(value);
            match name {
                "" if line.is_empty() => {
                    let data = std::mem::take(&mut data);
                    let mut done = std::mem::take(&mut event);
                    done.data = (!data.is_empty()).then(|| Bytes::from(data.join("\n")));
                    if done.data.is_some() || done.id.is_some() || done.retry_ms.is_some() {
                        events.push(done);
                    }
                }
                "data" => data.push(value),
                "id" if !value.contains('\0') => event.id = Some(value.to_owned()),
                "event" => event.name = (!value.is_empty()).then(|| value.to_owned()),
                "retry" if value.bytes().all(|byte| byte.is_ascii_digit()) => {
                    event.retry_ms = value.parse().ok().or(event.retry_ms);
                }
                _ => {}
            }
        }
        events
    }

    fn stream() -> impl Strategy<Value = String> {
        let line = prop_oneof![
            8 => "(data|id|event|retry|x|)(:| :|: |:  )[a-z0-9é:\u{1f600} \\x00]{0,8}",
            2 => "data|id|event|retry|:.{0,3}",
            2 => "(retry: ?[0-9]{1,22})",
            6 => Just(String::new()),
        ];
        let end = prop_oneof![Just("\n"), Just("\r"), Just("\r\n")];
        (prop::bool::ANY, vec((line, end), 0..30)).prop_map(|(bom, lines)| {
            let text: String = lines.into_iter().map(|(line, end)| line + end).collect();
            if bom { format!("\u{feff}{text}") } else { text }
        })
    }

    proptest! {
        #[test]
        fn r1_any_chunking_gives_the_events_of_the_rule(stream in stream(), sizes in vec(1..9_usize, 1..20)) {
            prop_assert_eq!(decode(stream.as_bytes(), &sizes, 10_000), (reference(&stream), None));
        }

        #[test]
        fn r1_the_bound_strikes_at_the_same_event_for_any_chunking(
            stream in stream(),
            sizes in vec(1..9_usize, 1..20),
            event_bytes_max in 0..40_usize,
        ) {
            let whole = decode(stream.as_bytes(), &[usize::MAX], event_bytes_max);
            prop_assert_eq!(decode(stream.as_bytes(), &sizes, event_bytes_max), whole);
        }

        #[test]
        fn r1_what_is_encoded_decodes(
            id in proptest::option::of("[ -~]{0,12}"),
            retry_ms: Option<u64>,
            data in prop_oneof![vec(any::<u8>(), 0..40), "[a\r\n ]{0,9}".prop_map(String::into_bytes)],
            sizes in vec(1..9_usize, 1..20),
        ) {
            let mut out = Vec::new();
            comment(&mut out, "alive\nand well");
            encode(&mut out, id.as_deref(), retry_ms, &data);
            encode(&mut out, None, None, b"");
            let mut lines = Vec::new();
            for (at, &byte) in data.iter().enumerate() {
                match byte {
                    b'\n' if at > 0 && data[at - 1] == b'\r' => {}
                    b'\r' => lines.push(b'\n'),
                    _ => lines.push(byte),
                }
            }
            let first = Event { id, name: None, data: Some(Bytes::from(lines)), retry_ms };
            let second = Event { data: Some(Bytes::new()), ..Event::default() };
            prop_assert_eq!(decode(&out, &sizes, 1000), (vec![first, second], None));
        }

        #[test]
        fn r1_junk_never_panics(stream: Vec<u8>, sizes in vec(1..9_usize, 1..20), event_bytes_max in 0..40_usize) {
            let whole = decode(&stream, &[usize::MAX], event_bytes_max);
            prop_assert_eq!(decode(&stream, &sizes, event_bytes_max), whole);
        }
    }

    #[test]
    fn r1_a_priming_event_has_empty_data_and_a_cursor_has_none() {
        let priming = Event { id: Some("a-0".into()), retry_ms: Some(4000), data: Some(Bytes::new()), name: None };
        let mut out = Vec::new();
        encode(&mut out, Some("a-0"), Some(4000), b"");
        assert_eq!(out, b"id: a-0\nretry: 4000\ndata: \n\n");
        assert_eq!(decode(&out, &[1], 100).0, vec![priming.clone()]);
        assert_eq!(events("id: a-0\nretry: 4000\ndata\n\n"), vec![priming.clone()]);
        assert_eq!(events("id: a-0\nretry: 4000\n\n"), [Event { data: None, ..priming }]);
    }

    #[test]
    fn r1_field_rules() {
        let data = |text: &'static str| Event { data: Some(Bytes::from(text)), ..Event::default() };
        assert_eq!(events("data:  x\n\n"), [data(" x")]);
        assert_eq!(events("data:a\ndata\ndata: b\n\n"), [data("a\n\nb")]);
        assert_eq!(events(": c\n\n\n\ndata: x\r\rdata: y\r\n\r\n"), [data("x"), data("y")]);
        assert_eq!(events("retry: 1x\nretry: -1\nretry:\nid: a\0b\ndata: x\n\n"), [data("x")]);
        assert_eq!(events("retry: 99999999999999999999\ndata: x\n\n"), [data("x")]);
        assert_eq!(events("event: ping\n\ndata: x\n\n"), [data("x")], "a name alone says nothing");
        assert_eq!(events("id\n\n"), [Event { id: Some(String::new()), ..Event::default() }]);
        assert_eq!(events("DATA: x\n data: x\n\n"), []);
        assert_eq!(events("data: cut off\n"), []);
        let mut named = b"event: endpoint\n".to_vec();
        encode(&mut named, None, None, b"/x");
        let event = Event { name: Some("endpoint".into()), ..data("/x") };
        assert_eq!(decode(&named, &[3], 100).0, [event]);
    }

    #[test]
    fn r1_an_id_that_would_break_the_stream_is_left_out() {
        let mut out = Vec::new();
        encode(&mut out, Some("a\n\ndata: forged"), None, b"x");
        assert_eq!(out, b"data: x\n\n");
    }

    #[test]
    fn c2_an_event_above_the_bound_is_an_error_and_memory_is_let_go() {
        let error = Oversize { event_bytes_max: 10 };
        assert_eq!(decode(b"data: 1234\n\n", &[1], 10).1, None);
        assert_eq!(decode(b"data: 12345", &[1], 10).1, Some(error));
        assert_eq!(decode(b"data:1\ndata:2\n", &[1], 10).1, Some(error));
        assert_eq!(decode(b":1234567890", &[1], 10).1, Some(error));
        assert_eq!(decode(&b": alive\n".repeat(100), &[1], 10).1, None);
        let mut decoder = SseDecoder::new(10);
        decoder.push(&[b'x'; 100]);
        assert_eq!(decoder.next_event(), Err(error));
        decoder.push(&[b'x'; 100]);
        assert_eq!(decoder.pending.capacity(), 0);
    }

    #[test]
    fn a_line_of_data_is_copied_once() {
        let mut decoder = SseDecoder::new(1000);
        decoder.push(b"data: 0123456789012345678901234567890123456789\n\n");
        let range = decoder.pending.as_ptr_range();
        let event = decoder.next_event().expect("small").expect("complete");
        assert!(range.contains(&event.data.expect("present").as_ptr()));
    }
}
