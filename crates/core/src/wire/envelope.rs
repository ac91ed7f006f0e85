//! The JSON-RPC envelope: one validating pass over raw bytes that yields spans.
//!
//! It owns what is read from and written to a message as bytes: [`scan`], [`batch`], [`member`], [`splice`], string
//! escapes and the messages that the gateway itself answers with. It does not know what methods mean, and it never
//! builds a tree: what is not asked for is validated, and forwarded as it came.

use std::borrow::Cow;
use std::ops::Range;

use bytes::Bytes;
use memchr::{memchr, memchr2};

use self::scanner::{Scanner, next_special, read_escape};

mod scanner;
pub mod walk;

/// How deep a message may nest; the outermost object is level 1. Deeper ones are refused.
pub const DEPTH_MAX: u32 = 128;

/// How many messages a batch may hold; a longer array is refused.
pub const BATCH_MESSAGES_MAX: usize = 1024;

/// A part of a message: byte offsets into it.
pub type Span = Range<usize>;

/// What kind of JSON-RPC message it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Has `method` and `id`.
    Request,
    /// Has `method`, no `id`.
    Notification,
    /// Has `id` and `result`.
    Result,
    /// Has `error` (its `id` may be `null` or absent).
    Error,
}

/// Where the parts of one JSON-RPC message stand in its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Envelope {
    /// What it is.
    pub kind: Kind,
    /// The raw `id` value, quotes included. `None` for notifications; may span `null` for errors.
    pub id: Option<Span>,
    /// The raw `method` value, quotes included.
    pub method: Option<Span>,
    /// The raw `params` value (an object or an array).
    pub params: Option<Span>,
    /// The raw `result` value.
    pub result: Option<Span>,
    /// The raw `error` value (an object).
    pub error: Option<Span>,
}

impl Envelope {
    /// The method of `message`, which is the one that was scanned; borrowed unless it is spelled with escapes.
    /// `None` for results and errors.
    pub fn method_name<'a>(&self, message: &'a [u8]) -> Option<Cow<'a, str>> {
        unescape(message.get(self.method.clone()?)?)
    }
}

/// Why bytes are no JSON-RPC message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{problem} at byte {offset}")]
pub struct ScanError {
    /// What is wrong.
    pub problem: &'static str,
    /// Where, counted from 0.
    pub offset: usize,
}

/// Scans one message: valid UTF-8, valid JSON (RFC 8259) from the first byte to the last, and a JSON-RPC 2.0 envelope.
///
/// Strings are held to what every peer can decode: no raw control characters, no lone surrogates. Numbers may have any
/// spelling and length. An envelope member that stands twice, however it is spelled, is refused: two readers could
/// see two different messages. Unknown members are ignored. One pass, no allocation unless it fails, depth bounded by
/// [`DEPTH_MAX`] (2025-11-25, Overview, Messages).
pub fn scan(message: &[u8]) -> Result<Envelope, ScanError> {
    check_utf8(message)?;
    let mut scanner = Scanner { bytes: message, at: 0 };
    scanner.space();
    let mut parts = Parts::default();
    let mut key = scanner.enter_object()?;
    while let Some(name) = key {
        let value = scanner.value(DEPTH_MAX - 1)?;
        if let Some(slot) = parts.slot(&message[name.clone()]) {
            if slot.is_some() {
                return Err(ScanError { problem: "repeated envelope member", offset: name.start });
            }
            *slot = Some(value);
        }
        key = scanner.next_key()?;
    }
    let end = scanner.at;
    scanner.end()?;
    parts.envelope(message, end)
}

/// Spans of the elements if `body` is a JSON array (a batch), `None` if it starts as anything else.
///
/// The array is validated as a whole; its elements remain to be [`scan`]ned. It may be empty, and holds
/// [`BATCH_MESSAGES_MAX`] elements at most (2025-03-26, Overview, Batching).
pub fn batch(body: &[u8]) -> Result<Option<Vec<Span>>, ScanError> {
    let mut scanner = Scanner { bytes: body, at: 0 };
    scanner.space();
    if scanner.peek() != Some(b'[') {
        return Ok(None);
    }
    check_utf8(body)?;
    scanner.at += 1;
    scanner.space();
    let mut elements = Vec::new();
    if scanner.take(b']') {
        scanner.end()?;
        return Ok(Some(elements));
    }
    loop {
        if elements.len() == BATCH_MESSAGES_MAX {
            return Err(scanner.error("too many messages in a batch"));
        }
        elements.push(scanner.value(DEPTH_MAX)?);
        scanner.space();
        if scanner.take(b']') {
            scanner.end()?;
            return Ok(Some(elements));
        }
        if !scanner.take(b',') {
            return Err(scanner.error("expected `,` or `]`"));
        }
        scanner.space();
    }
}

/// Span of the value of `key` in the JSON object at `object` of an already scanned message.
///
/// Keys are compared by their text, however they are escaped. If `key` stands there more than once, it is the first;
/// most JSON readers see the last one, so whoever grants or refuses by the value must bear that in mind. `None` as
/// well if `object` is no object.
pub fn member(message: &[u8], object: &Span, key: &str) -> Option<Span> {
    let mut scanner = Scanner { bytes: message.get(..object.end)?, at: object.start };
    let mut found = scanner.enter_object().ok()?;
    while let Some(name) = found {
        let value = scanner.value(DEPTH_MAX).ok()?;
        if is_text(message.get(name)?, key) {
            return Some(value);
        }
        found = scanner.next_key().ok()?;
    }
    None
}

/// `message` with each span replaced by the bytes given; all other bytes stay as they are.
///
/// # Panics
/// If the spans are not ascending, apart and inside `message`: a wrong splice must not lose bytes in silence.
pub fn splice(message: &[u8], edits: &[(Span, &[u8])]) -> Vec<u8> {
    let added: usize = edits.iter().map(|(_, bytes)| bytes.len()).sum();
    let mut spliced = Vec::with_capacity(message.len() + added);
    let mut at = 0;
    for (span, bytes) in edits {
        spliced.extend_from_slice(&message[at..span.start]);
        spliced.extend_from_slice(bytes);
        at = span.end;
    }
    spliced.extend_from_slice(&message[at..]);
    spliced
}

/// The text of the JSON string whose raw bytes, quotes included, are `json`; borrowed if nothing in it is escaped.
/// `None` if `json` is anything but one valid JSON string.
pub fn unescape(json: &[u8]) -> Option<Cow<'_, str>> {
    let mut scanner = Scanner { bytes: json, at: 0 };
    scanner.string().ok()?;
    if scanner.at != json.len() {
        return None;
    }
    let inner = std::str::from_utf8(json.get(1..json.len() - 1)?).ok()?;
    let Some(mut escape) = memchr(b'\\', inner.as_bytes()) else {
        return Some(Cow::Borrowed(inner));
    };
    let mut text = String::with_capacity(inner.len());
    let mut at = 0;
    loop {
        text.push_str(inner.get(at..escape)?);
        let (character, next) = read_escape(inner.as_bytes(), escape)?;
        text.push(character);
        at = next;
        let Some(offset) = memchr(b'\\', &inner.as_bytes()[at..]) else {
            text.push_str(inner.get(at..)?);
            return Some(Cow::Owned(text));
        };
        escape = at + offset;
    }
}

/// The raw JSON string of `text`, quotes included. Only what must be escaped is.
pub fn escape(text: &str) -> Vec<u8> {
    let mut json = Vec::with_capacity(text.len() + 2);
    push_string(&mut json, text);
    json
}

/// `message` without raw line ends, for framing by lines (2025-11-25, Transports, stdio).
///
/// In a valid message they can only be insignificant whitespace, so each becomes a space. Copies nothing if there is
/// none.
pub fn one_line(message: Bytes) -> Bytes {
    let Some(first) = memchr2(b'\n', b'\r', &message) else {
        return message;
    };
    let mut line = Vec::from(message);
    for byte in &mut line[first..] {
        if matches!(byte, b'\n' | b'\r') {
            *byte = b' ';
        }
    }
    Bytes::from(line)
}

/// Whether the raw JSON value `raw` is `null`.
pub fn is_null(raw: &[u8]) -> bool {
    raw == b"null"
}

/// The answer to request `id` with `result`; both are raw JSON and inserted as they are.
pub fn result_message(id: &[u8], result: &[u8]) -> Vec<u8> {
    let mut message = Vec::with_capacity(id.len() + result.len() + 48);
    message.extend_from_slice(HEAD);
    push_raw(&mut message, b",\"id\":", Some(id));
    push_raw(&mut message, b",\"result\":", Some(result));
    message.push(b'}');
    message
}

/// The error answer to request `id`; without one the member is left out, as MCP's schema allows since 2025-11-25.
/// `id` and `data` are raw JSON, `text` is escaped here.
pub fn error_message(id: Option<&[u8]>, code: i64, text: &str, data: Option<&[u8]>) -> Vec<u8> {
    let parts_len = id.map_or(0, <[u8]>::len) + text.len() + data.map_or(0, <[u8]>::len);
    let mut message = Vec::with_capacity(parts_len + 96);
    message.extend_from_slice(HEAD);
    push_raw(&mut message, b",\"id\":", id);
    push_raw(&mut message, b",\"error\":{\"code\":", Some(code.to_string().as_bytes()));
    message.extend_from_slice(b",\"message\":");
    push_string(&mut message, text);
    push_raw(&mut message, b",\"data\":", data);
    message.extend_from_slice(b"}}");
    message
}

/// The request `id` for `method`. `id` and `params` are raw JSON, `method` is escaped here.
pub fn request_message(id: &[u8], method: &str, params: Option<&[u8]>) -> Vec<u8> {
    call_message(Some(id), method, params)
}

/// The notification `method`. `params` is raw JSON, `method` is escaped here.
pub fn notification_message(method: &str, params: Option<&[u8]>) -> Vec<u8> {
    call_message(None, method, params)
}

fn call_message(id: Option<&[u8]>, method: &str, params: Option<&[u8]>) -> Vec<u8> {
    let parts_len = id.map_or(0, <[u8]>::len) + method.len() + params.map_or(0, <[u8]>::len);
    let mut message = Vec::with_capacity(parts_len + 64);
    message.extend_from_slice(HEAD);
    push_raw(&mut message, b",\"id\":", id);
    message.extend_from_slice(b",\"method\":");
    push_string(&mut message, method);
    push_raw(&mut message, b",\"params\":", params);
    message.push(b'}');
    message
}

fn push_raw(message: &mut Vec<u8>, name: &[u8], value: Option<&[u8]>) {
    if let Some(value) = value {
        message.extend_from_slice(name);
        message.extend_from_slice(value);
    }
}

fn push_string(json: &mut Vec<u8>, text: &str) {
    let bytes = text.as_bytes();
    json.push(b'"');
    let mut at = 0;
    loop {
        let stop = next_special(bytes, at);
        json.extend_from_slice(&bytes[at..stop]);
        let Some(&byte) = bytes.get(stop) else { break };
        match byte {
            b'"' | b'\\' => json.extend_from_slice(&[b'\\', byte]),
            b'\n' => json.extend_from_slice(b"\\n"),
            b'\r' => json.extend_from_slice(b"\\r"),
            b'\t' => json.extend_from_slice(b"\\t"),
            _ => json.extend_from_slice(format!("\\u{byte:04x}").as_bytes()),
        }
        at = stop + 1;
    }
    json.push(b'"');
}

/// Whether the raw JSON string `raw` says `text`, without decoding it into memory.
fn is_text(raw: &[u8], text: &str) -> bool {
    let Some(mut rest) = raw.strip_prefix(b"\"").and_then(|raw| raw.strip_suffix(b"\"")) else {
        return false;
    };
    let mut expected = text.as_bytes();
    while let Some(escape) = memchr(b'\\', rest) {
        let Some((character, next)) = read_escape(rest, escape) else { return false };
        let Some(tail) = expected.strip_prefix(&rest[..escape]) else { return false };
        let mut utf8 = [0; 4];
        let Some(tail) = tail.strip_prefix(character.encode_utf8(&mut utf8).as_bytes()) else { return false };
        (expected, rest) = (tail, &rest[next..]);
    }
    expected == rest
}

fn check_utf8(bytes: &[u8]) -> Result<(), ScanError> {
    match std::str::from_utf8(bytes) {
        Ok(_) => Ok(()),
        Err(error) => Err(ScanError { problem: "invalid UTF-8", offset: error.valid_up_to() }),
    }
}

/// The envelope's members as they are found.
#[derive(Default)]
struct Parts {
    jsonrpc: Option<Span>,
    id: Option<Span>,
    method: Option<Span>,
    params: Option<Span>,
    result: Option<Span>,
    error: Option<Span>,
}

impl Parts {
    /// The place of the member whose raw key is `key`, if it belongs to the envelope.
    fn slot(&mut self, key: &[u8]) -> Option<&mut Option<Span>> {
        match key {
            b"\"jsonrpc\"" => Some(&mut self.jsonrpc),
            b"\"id\"" => Some(&mut self.id),
            b"\"method\"" => Some(&mut self.method),
            b"\"params\"" => Some(&mut self.params),
            b"\"result\"" => Some(&mut self.result),
            b"\"error\"" => Some(&mut self.error),
            _ if !key.contains(&b'\\') => None,
            _ if is_text(key, "jsonrpc") => Some(&mut self.jsonrpc),
            _ if is_text(key, "id") => Some(&mut self.id),
            _ if is_text(key, "method") => Some(&mut self.method),
            _ if is_text(key, "params") => Some(&mut self.params),
            _ if is_text(key, "result") => Some(&mut self.result),
            _ if is_text(key, "error") => Some(&mut self.error),
            _ => None,
        }
    }

    /// The envelope that these parts of `message`, whose object ends at `end`, make.
    fn envelope(self, message: &[u8], end: usize) -> Result<Envelope, ScanError> {
        let refuse = |problem, part: &Span| Err(ScanError { problem, offset: part.start });
        let first = |part: &Span| message.get(part.start).copied();
        let whole = 0..end;
        match &self.jsonrpc {
            None => return refuse("`jsonrpc` is missing", &whole),
            Some(version) if !is_text(&message[version.clone()], "2.0") => {
                return refuse("`jsonrpc` is not \"2.0\"", version);
            }
            Some(_) => {}
        }
        let no_id = |id: &Span| !matches!(first(id), Some(b'"' | b'-' | b'0'..=b'9' | b'n'));
        if let Some(id) = self.id.as_ref().filter(|id| no_id(id)) {
            return refuse("`id` is neither a string nor a number", id);
        }
        if let Some(method) = self.method.as_ref().filter(|method| first(method) != Some(b'"')) {
            return refuse("`method` is not a string", method);
        }
        if let Some(params) = self.params.as_ref().filter(|params| !matches!(first(params), Some(b'{' | b'['))) {
            return refuse("`params` is neither an object nor an array", params);
        }
        if let Some(error) = self.error.as_ref().filter(|error| first(error) != Some(b'{')) {
            return refuse("`error` is not an object", error);
        }
        let null_id = self.id.as_ref().is_some_and(|id| first(id) == Some(b'n'));
        let kind = match (&self.method, &self.result, &self.error, &self.id) {
            (Some(_), None, None, None) => Kind::Notification,
            (Some(_), None, None, Some(id)) if null_id => return refuse("a request's `id` is null", id),
            (Some(_), None, None, Some(_)) => Kind::Request,
            (None, Some(_), None, Some(id)) if null_id => return refuse("a result's `id` is null", id),
            (None, Some(_), None, Some(_)) => Kind::Result,
            (None, Some(result), None, None) => return refuse("a result has no `id`", result),
            (None, None, Some(_), _) => Kind::Error,
            _ => return refuse("not exactly one of `method`, `result` and `error`", &whole),
        };
        let Self { jsonrpc: _, id, method, params, result, error } = self;
        Ok(Envelope { kind, id, method, params, result, error })
    }
}

const HEAD: &[u8] = b"{\"jsonrpc\":\"2.0\"";

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    /// Any JSON value, some levels deep, with numbers and text of every sort.
    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            any::<String>().prop_map(Value::from),
            "[a-z\"\\\\\n\t ]{0,80}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 24, 6, |inner| {
            prop_oneof![
                vec(inner.clone(), 0..6).prop_map(Value::from),
                vec((".{0,6}", inner), 0..6).prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    /// An object that is often, but not always, a valid envelope.
    fn envelope_value() -> impl Strategy<Value = Value> {
        let names = prop_oneof![
            Just("id"),
            Just("method"),
            Just("params"),
            Just("result"),
            Just("error"),
            Just("jsonrpc"),
            Just("_x")
        ];
        let shaped = prop_oneof![
            Just(json!("tools/call")),
            Just(json!({"name": "é\u{1f600}\n", "_meta": {"progressToken": 7}})),
            Just(json!([1, "2"])),
            Just(Value::Null),
            Just(json!(1.5)),
            value()
        ];
        let head = prop_oneof![9 => Just(json!("2.0")), 1 => value()];
        (head, vec((names, shaped), 0..5)).prop_map(|(version, members)| {
            let mut object: serde_json::Map<String, Value> =
                members.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
            object.insert("jsonrpc".into(), version);
            Value::Object(object)
        })
    }

    /// A well-formed message of each kind.
    fn valid_message() -> impl Strategy<Value = Value> {
        let id = prop_oneof![any::<i64>().prop_map(Value::from), any::<String>().prop_map(Value::from)];
        let object = vec(("[a-z]{1,5}", value()), 0..4)
            .prop_map(|members| Value::Object(members.into_iter().collect::<serde_json::Map<_, _>>()))
            .boxed();
        prop_oneof![
            (id.clone(), object.clone())
                .prop_map(|(id, params)| json!({"jsonrpc": "2.0", "id": id, "method": "a/b", "params": params})),
            object.clone().prop_map(|params| json!({"method": "n", "params": params, "jsonrpc": "2.0"})),
            (id.clone(), value())
                .prop_map(|(id, result)| json!({"result": result, "jsonrpc": "2.0", "id": id, "x": [{}]})),
            (id, object).prop_map(|(id, error)| json!({"jsonrpc": "2.0", "id": id, "error": error})),
        ]
    }

    /// `value` with whitespace from `spaces` wherever it may stand.
    fn spaced(value: &Value, spaces: &[u8]) -> Vec<u8> {
        let mut spaces = spaces.iter().cycle();
        let mut space = |out: &mut Vec<u8>| {
            if let Some(choice @ 0..=3) = spaces.next() {
                out.push(b" \n\r\t"[usize::from(*choice)]);
            }
        };
        let (mut out, mut in_string, mut escaped) = (Vec::new(), false, false);
        for byte in value.to_string().into_bytes() {
            let structural = !in_string && b"{}[]:,".contains(&byte);
            if structural {
                space(&mut out);
            }
            out.push(byte);
            if structural {
                space(&mut out);
            }
            if byte == b'"' && !escaped {
                in_string = !in_string;
            }
            escaped = byte == b'\\' && !escaped;
        }
        space(&mut out);
        out
    }

    /// The envelope rules as they read over a tree.
    fn is_envelope(value: &Value) -> bool {
        let Value::Object(object) = value else { return false };
        let part = |name: &str| object.get(name);
        let shapes = part("jsonrpc") == Some(&json!("2.0"))
            && part("id").is_none_or(|id| id.is_string() || id.is_number() || id.is_null())
            && part("method").is_none_or(Value::is_string)
            && part("params").is_none_or(|params| params.is_object() || params.is_array())
            && part("error").is_none_or(Value::is_object);
        let id = part("id").is_some_and(|id| !id.is_null());
        let kinds = match (part("method"), part("result"), part("error")) {
            (Some(_), None, None) => id || part("id").is_none(),
            (None, Some(_), None) => id,
            (None, None, Some(_)) => true,
            _ => false,
        };
        shapes && kinds
    }

    /// Whether `serde_json` takes `bytes` and the tree is an envelope. `None` where the two may differ: numbers beyond
    /// `f64`, repeated keys, which a tree forgets.
    fn oracle(bytes: &[u8]) -> Option<bool> {
        match serde_json::from_slice::<Value>(bytes) {
            Ok(value) => Some(is_envelope(&value)),
            Err(error) if error.to_string().starts_with("number out of range") => None,
            Err(_) => Some(false),
        }
    }

    fn assert_agrees(bytes: &[u8]) -> Result<(), TestCaseError> {
        let scanned = scan(bytes);
        let repeated = matches!(&scanned, Err(error) if error.problem == "repeated envelope member");
        if let (Some(expected), false) = (oracle(bytes), repeated) {
            prop_assert_eq!(scanned.is_ok(), expected, "{:?} {:?}", String::from_utf8_lossy(bytes), scanned);
        }
        Ok(())
    }

    fn part(message: &[u8], span: &Option<Span>) -> Option<Value> {
        span.clone().map(|span| serde_json::from_slice(&message[span]).expect("a span is a JSON value"))
    }

    proptest! {
        #[test]
        fn s17_scan_accepts_what_serde_accepts(value in envelope_value(), spaces in vec(0..9_u8, 1..20)) {
            assert_agrees(&spaced(&value, &spaces))?;
        }

        #[test]
        fn s17_scan_agrees_on_damaged_messages(
            value in valid_message(),
            spaces in vec(0..9_u8, 1..20),
            damage in vec((any::<prop::sample::Index>(), 0..4_u8, damage_byte()), 1..4),
        ) {
            let mut bytes = spaced(&value, &spaces);
            for (index, how, byte) in damage {
                if bytes.is_empty() {
                    break;
                }
                let at = index.index(bytes.len());
                match how {
                    0 => bytes[at] = byte,
                    1 => bytes.insert(at, byte),
                    2 => drop(bytes.remove(at)),
                    _ => bytes.truncate(at),
                }
            }
            assert_agrees(&bytes)?;
        }

        #[test]
        fn s17_spans_are_the_parts(value in valid_message(), spaces in vec(0..9_u8, 1..20)) {
            let bytes = spaced(&value, &spaces);
            let envelope = scan(&bytes).expect("the message is valid");
            let reread: Value = serde_json::from_slice(&bytes).expect("the message is valid");
            assert_eq!(part(&bytes, &envelope.id).as_ref(), reread.get("id"));
            assert_eq!(part(&bytes, &envelope.method).as_ref(), reread.get("method"));
            assert_eq!(part(&bytes, &envelope.params).as_ref(), reread.get("params"));
            assert_eq!(part(&bytes, &envelope.result).as_ref(), reread.get("result"));
            assert_eq!(part(&bytes, &envelope.error).as_ref(), reread.get("error"));
            assert_eq!(envelope.method_name(&bytes).as_deref(), reread.get("method").and_then(Value::as_str));
            let whole = bytes.iter().position(|&byte| byte == b'{').expect("it is an object")..bytes.len();
            for (key, member_value) in reread.as_object().expect("it is an object") {
                assert_eq!(part(&bytes, &member(&bytes, &whole, key)).as_ref(), Some(member_value));
            }
            prop_assert_eq!(member(&bytes, &whole, "absent"), None);
        }

        #[test]
        fn s17_a_batch_is_its_elements(values in vec(value(), 0..6), spaces in vec(0..9_u8, 1..20)) {
            let bytes = spaced(&Value::from(values), &spaces);
            let spans = batch(&bytes).expect("valid").expect("an array");
            let elements: Vec<_> = spans.into_iter().filter_map(|span| part(&bytes, &Some(span))).collect();
            prop_assert_eq!(Value::from(elements), serde_json::from_slice::<Value>(&bytes).expect("valid"));
        }

        #[test]
        fn s17_splicing_the_id_keeps_every_other_byte(value in valid_message(), spaces in vec(0..9_u8, 1..20)) {
            let bytes = spaced(&value, &spaces);
            if let Some(id) = scan(&bytes).expect("valid").id {
                let spliced = splice(&bytes, &[(id.clone(), b"\"9.1.x\"")]);
                prop_assert_eq!(&spliced[..id.start], &bytes[..id.start]);
                prop_assert!(spliced.ends_with(&bytes[id.end..]));
                prop_assert_eq!(spliced.len(), bytes.len() - id.len() + 7);
                let new_id = scan(&spliced).expect("still valid").id.expect("still has an id");
                prop_assert_eq!(splice(&spliced, &[(new_id, &bytes[id])]), bytes);
            }
        }

        #[test]
        fn s17_text_round_trips_and_all_escapes_decode(text: String) {
            let json = escape(&text);
            prop_assert_eq!(serde_json::from_slice::<String>(&json).expect("valid"), text.as_str());
            assert_eq!(unescape(&json).as_deref(), Some(text.as_str()));
            let escaped: String = text.encode_utf16().map(|unit| format!("\\u{unit:04x}")).collect();
            let escaped = format!("\"{escaped}\"");
            assert_eq!(unescape(escaped.as_bytes()).as_deref(), Some(text.as_str()));
            prop_assert!(is_text(escaped.as_bytes(), &text));
            let longer = format!("{text}x");
            prop_assert!(!is_text(escaped.as_bytes(), &longer));
        }

        #[test]
        fn s17_unescape_agrees_with_serde(
            json in "\"(\\\\u[dD][89a-fA-F][0-9a-f]{2}|\\\\.|[a\"é\n]|\\\\u00..){0,6}\"?",
        ) {
            let expected = serde_json::from_str::<String>(&json).ok().filter(|_| json.trim() == json);
            assert_eq!(unescape(json.as_bytes()).as_deref(), expected.as_deref());
        }

        #[test]
        fn s17_junk_never_panics(bytes: Vec<u8>, at in 0..99_usize, len in 0..99_usize) {
            let _ = scan(&bytes);
            let _ = batch(&bytes);
            let _ = unescape(&bytes);
            let _ = member(&bytes, &(at..at + len), "id");
        }

        #[test]
        fn s17_json_like_junk_never_panics(text in "[\\[\\]{}\",:\\\\u0-9eE.+\\- a-f]{0,60}", at in 0..60_usize) {
            assert_agrees(text.as_bytes())?;
            let _ = batch(text.as_bytes());
            let _ = member(text.as_bytes(), &(at..text.len()), "id");
        }

        #[test]
        fn c2_one_line_keeps_the_meaning(value in valid_message(), spaces in vec(0..9_u8, 1..20)) {
            let bytes = spaced(&value, &spaces);
            let line = one_line(Bytes::from(bytes.clone()));
            prop_assert!(!line.contains(&b'\n') && !line.contains(&b'\r'));
            prop_assert_eq!(line.len(), bytes.len());
            let read = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).expect("valid");
            prop_assert_eq!(read(&line), read(&bytes));
        }
    }

    fn damage_byte() -> impl Strategy<Value = u8> {
        prop_oneof![any::<u8>(), prop::sample::select(b"{}[]:,\"\\ue0-.1 \n\x00\x1f\xc3".to_vec())]
    }

    fn nested(levels: usize, open: &str, close: &str) -> String {
        let params = format!("{}{}", open.repeat(levels - 1), close.repeat(levels - 1));
        format!(r#"{{"jsonrpc":"2.0","id":1,"result":{params}}}"#)
    }

    #[test]
    fn s17_depth_128_is_taken_and_129_refused() {
        let objects = |levels: usize| nested(levels, "{\"a\":", "}").replacen(":}", ":{}}", 1);
        assert!(scan(nested(128, "[", "]").as_bytes()).is_ok());
        assert_eq!(scan(nested(129, "[", "]").as_bytes()).expect_err("too deep").problem, "nested too deeply");
        assert!(scan(objects(127).as_bytes()).is_ok());
        assert_eq!(scan(objects(128).as_bytes()).expect_err("too deep").problem, "nested too deeply");
        assert!(scan(nested(1_000_000, "[", "]").as_bytes()).is_err());
        assert!(batch(nested(128, "[", "]").replacen('{', "[{", 1).as_bytes()).is_err());
    }

    #[test]
    fn s17_an_envelope_member_stands_once_however_it_is_spelled() {
        for (first, second) in [
            (r#""id":1"#, r#""id":2"#),
            (r#""id":1"#, r#""\u0069d":2"#),
            (r#""method":"a""#, r#""meth\u006fd":"b""#),
            (r#""params":{}"#, r#""params":{}"#),
            (r#""jsonrpc":"2.0""#, r#""\u006asonrpc":"2.0""#),
        ] {
            for message in [format!("{{{first},{second}}}"), format!("{{{second},\"x\":0,{first}}}")] {
                let error = scan(message.as_bytes()).expect_err("it is repeated");
                assert_eq!(error.problem, "repeated envelope member", "{message}");
            }
        }
    }

    #[test]
    fn s17_escaped_keys_and_values_are_read() {
        let message = br#"{"\u006asonrpc":"2\u002e0","i\u0064":"\u0031","meth\u006fd":"tools\/call",
            "param\u0073":{"n\u0061me":"x","name":"y"}}"#;
        let envelope = scan(message).expect("valid");
        assert_eq!(envelope.kind, Kind::Request);
        assert_eq!(envelope.method_name(message).as_deref(), Some("tools/call"));
        let params = envelope.params.expect("present");
        assert_eq!(member(message, &params, "name").map(|span| &message[span]), Some(&b"\"x\""[..]));
    }

    #[test]
    fn s17_kinds_and_refusals() {
        let check = |message: &str| scan(message.as_bytes()).map(|envelope| envelope.kind).map_err(|e| e.problem);
        for (rest, expected) in [
            (r#""id":1,"method":"m""#, Ok(Kind::Request)),
            (r#""id":-1.5e3,"method":"m","params":[]"#, Ok(Kind::Request)),
            (r#""method":"m""#, Ok(Kind::Notification)),
            (r#""id":"","result":null"#, Ok(Kind::Result)),
            (r#""id":null,"error":{}"#, Ok(Kind::Error)),
            (r#""error":{}"#, Ok(Kind::Error)),
            (r#""id":null,"method":"m""#, Err("a request's `id` is null")),
            (r#""id":null,"result":1"#, Err("a result's `id` is null")),
            (r#""result":1"#, Err("a result has no `id`")),
            (r#""id":[],"method":"m""#, Err("`id` is neither a string nor a number")),
            (r#""id":true,"error":{}"#, Err("`id` is neither a string nor a number")),
            (r#""id":1,"method":1"#, Err("`method` is not a string")),
            (r#""id":1,"method":"m","params":null"#, Err("`params` is neither an object nor an array")),
            (r#""id":1,"error":[]"#, Err("`error` is not an object")),
            (r#""id":1"#, Err("not exactly one of `method`, `result` and `error`")),
            (r#""id":1,"method":"m","result":1"#, Err("not exactly one of `method`, `result` and `error`")),
            (r#""id":1,"result":1,"error":{}"#, Err("not exactly one of `method`, `result` and `error`")),
        ] {
            assert_eq!(check(&format!(r#" {{"jsonrpc":"2.0",{rest}}} "#)), expected, "{rest}");
        }
        assert_eq!(check(r#"{"id":1,"method":"m"}"#), Err("`jsonrpc` is missing"));
        assert_eq!(check(r#"{"jsonrpc":"1.0","id":1,"method":"m"}"#), Err("`jsonrpc` is not \"2.0\""));
        assert_eq!(check(r#"{"jsonrpc":2.0,"id":1,"method":"m"}"#), Err("`jsonrpc` is not \"2.0\""));
        assert_eq!(check(r#"[{"jsonrpc":"2.0","method":"m"}]"#), Err("expected an object"));
        assert_eq!(check(r#"{"jsonrpc":"2.0","method":"m"}{}"#), Err("something follows the message"));
        assert_eq!(check("\u{feff}{\"jsonrpc\":\"2.0\",\"method\":\"m\"}"), Err("expected an object"));
    }

    #[test]
    fn s17_number_spelling_and_unknown_members_are_untouched() {
        for number in ["1.0", "1e5", "-0", "18446744073709551617", "12345678901234567890123", "1E+400", "0.10"] {
            let message = format!(r#"{{"id":{number},"x":{{"y":{number}}},"jsonrpc":"2.0","method":"m"}}"#);
            let id = scan(message.as_bytes()).expect("valid").id.expect("present");
            assert_eq!(&message[id.clone()], number);
            let spliced = splice(message.as_bytes(), &[(id, b"7")]);
            assert_eq!(spliced, message.replacen(number, "7", 1).as_bytes());
        }
        for number in ["01", "-", "1.", ".5", "1e", "+1", "1e+", "0x1", "NaN", "--1"] {
            assert!(scan(format!(r#"{{"jsonrpc":"2.0","id":{number},"method":"m"}}"#).as_bytes()).is_err(), "{number}");
        }
    }

    #[test]
    fn s17_batches_are_bounded_and_validated() {
        assert_eq!(batch(b" {}"), Ok(None));
        assert_eq!(batch(b""), Ok(None));
        assert_eq!(batch(b" [ ] "), Ok(Some(vec![])));
        assert_eq!(batch(b"[1, {}]"), Ok(Some(vec![1..2, 4..6])));
        for bad in ["[", "[1", "[1,", "[1,]", "[,1]", "[1 2]", "[1]]", "[1]x", "[{]}"] {
            assert!(batch(bad.as_bytes()).is_err(), "{bad}");
        }
        let many = |count: usize| format!("[{}]", vec!["0"; count].join(","));
        assert!(batch(many(BATCH_MESSAGES_MAX).as_bytes()).is_ok());
        assert!(batch(many(BATCH_MESSAGES_MAX + 1).as_bytes()).is_err());
    }

    #[test]
    fn several_edits_are_spliced_at_once() {
        assert_eq!(splice(b"0123456789", &[(0..1, b"a"), (1..1, b"b"), (4..6, b""), (9..10, b"zz")]), b"ab123678zz");
        assert_eq!(splice(b"01", &[]), b"01");
    }

    #[test]
    fn what_the_gateway_answers_is_valid() {
        let kind = |message: &[u8]| scan(message).expect("valid").kind;
        assert_eq!(result_message(b"\"a\"", b"{}"), br#"{"jsonrpc":"2.0","id":"a","result":{}}"#);
        let error = error_message(Some(b"1.0"), -32600, "no \"x\"\n\u{1}", Some(b"[1]"));
        assert_eq!(
            error,
            br#"{"jsonrpc":"2.0","id":1.0,"error":{"code":-32600,"message":"no \"x\"\n\u0001","data":[1]}}"#
        );
        assert_eq!(kind(&error), Kind::Error);
        assert_eq!(error_message(None, 1, "", None), br#"{"jsonrpc":"2.0","error":{"code":1,"message":""}}"#);
        let request = request_message(b"1", "ping", None);
        assert_eq!(request, br#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#);
        assert_eq!(kind(&request), Kind::Request);
        let notification = notification_message("notifications/cancelled", Some(b"{}"));
        assert_eq!(notification, br#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{}}"#);
        assert_eq!(kind(&notification), Kind::Notification);
    }

    #[test]
    fn c2_a_message_without_line_ends_is_not_copied() {
        let message = Bytes::from_static(b"{}");
        assert_eq!(one_line(message.clone()).as_ptr(), message.as_ptr());
        assert!(is_null(b"null") && !is_null(b"\"null\""));
    }
}
