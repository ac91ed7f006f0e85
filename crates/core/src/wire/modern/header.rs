//! The headers that repeat parts of a request, so that whoever stands between may go by them: written, and checked
//! against the body (2026-07-28, Streamable HTTP, Request Metadata).

use std::borrow::Cow;

use super::annotation::Annotation;
use super::base64;
use super::decimal::Decimal;
use super::{Meta, envelope, walk};
use crate::wire::envelope::{Envelope, Span};

/// The header that repeats the revision.
pub const PROTOCOL_VERSION: &str = "mcp-protocol-version";

/// The header that repeats the method.
pub const METHOD: &str = "mcp-method";

/// The header that repeats what [`name_member`] says.
pub const NAME: &str = "mcp-name";

/// What the headers of annotated tool parameters begin with.
pub const PARAM_PREFIX: &str = "mcp-param-";

/// Which member of the params of `method` stands in [`NAME`]; `None` for methods that have no such header.
pub fn name_member(method: &str) -> Option<&'static str> {
    match method {
        "tools/call" | "prompts/get" => Some("name"),
        "resources/read" => Some("uri"),
        "tasks/get" | "tasks/update" | "tasks/cancel" => Some("taskId"),
        _ => None,
    }
}

/// What [`NAME`] must say of the request, before it is [encoded](encode); `None` if it must not be there.
///
/// # Errors
/// The member stands there twice.
pub fn name_of<'a>(message: &'a [u8], envelope: &Envelope) -> Result<Option<Cow<'a, str>>, HeaderError> {
    let method = envelope.method_name(message);
    let Some((member, params)) = method.as_deref().and_then(name_member).zip(envelope.params.as_ref()) else {
        return Ok(None);
    };
    let mut found: Option<Span> = None;
    for (key, value) in walk::members(message, params) {
        if walk::says(&message[key], member) && found.replace(value).is_some() {
            return Err(HeaderError::Ambiguous { member });
        }
    }
    Ok(found.and_then(|span| envelope::unescape(&message[span])))
}

/// `text` as a header value: as it is where that is safe, else its base64 between the markers.
pub fn encode(text: &str) -> Cow<'_, str> {
    let bytes = text.as_bytes();
    let plain = bytes.iter().all(|byte| matches!(byte, b'\t' | 0x20..=0x7e));
    let blank = |byte: Option<&u8>| byte.is_none_or(|byte| matches!(byte, b' ' | b'\t'));
    let padded = blank(bytes.first()) || blank(bytes.last());
    if plain && !padded && !(text.starts_with(MARKER) && text.ends_with(MARKER_END)) {
        return Cow::Borrowed(text);
    }
    Cow::Owned(format!("{MARKER}{}{MARKER_END}", base64::encode(bytes)))
}

/// The text that a header value stands for; `None` if it has characters that none may have, or what stands between the
/// markers is not the base64 of a text.
pub fn decode(value: &[u8]) -> Option<Cow<'_, str>> {
    let plain = value.iter().all(|byte| matches!(byte, b'\t' | 0x20..=0x7e));
    let text = std::str::from_utf8(value).ok().filter(|_| plain)?;
    match text.strip_prefix(MARKER).and_then(|rest| rest.strip_suffix(MARKER_END)) {
        Some(encoded) => String::from_utf8(base64::decode(encoded.as_bytes())?).ok().map(Cow::Owned),
        None => Some(Cow::Borrowed(text)),
    }
}

/// The text of a primitive JSON value for a header, before it is [encoded](encode): a string as it is, a whole number in
/// plain digits, `true` or `false`. `None` for `null`, objects and arrays, which have no header.
pub fn text_of(raw: &[u8]) -> Option<Cow<'_, str>> {
    match raw.first()? {
        b'"' => envelope::unescape(raw),
        b't' | b'f' => std::str::from_utf8(raw).ok().map(Cow::Borrowed),
        b'-' | b'0'..=b'9' => {
            let spelled = std::str::from_utf8(raw).ok()?;
            let plain = Decimal::parse(spelled)?.safe_integer();
            Some(plain.map_or(Cow::Borrowed(spelled), |value| Cow::Owned(value.to_string())))
        }
        _ => None,
    }
}

/// Whether a header that says `text`, decoded, says the same as the JSON value `raw`. Numbers are compared by value.
pub fn is_same(text: &str, raw: &[u8]) -> bool {
    match raw.first() {
        Some(b'"') => walk::says(raw, text),
        Some(b'-' | b'0'..=b'9') => {
            let spelled = std::str::from_utf8(raw).ok();
            spelled == Some(text)
                || spelled.and_then(Decimal::parse).is_some_and(|value| Decimal::parse(text) == Some(value))
        }
        Some(_) | None => raw == text.as_bytes(),
    }
}

/// A header as a request has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field<'a> {
    /// It is not there.
    Absent,
    /// Its one value, without the blanks around it.
    Once(&'a [u8]),
    /// It is there several times: two readers could see two different requests.
    Repeated,
}

impl<'a> Field<'a> {
    /// The field of which these are all values.
    pub fn of(values: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut values = values.into_iter();
        match (values.next(), values.next()) {
            (None, _) => Self::Absent,
            (Some(value), None) => Self::Once(value),
            (Some(_), Some(_)) => Self::Repeated,
        }
    }

    fn value(self, header: &str) -> Result<Option<&'a [u8]>, HeaderError> {
        match self {
            Self::Absent => Ok(None),
            Self::Once(value) => Ok(Some(value)),
            Self::Repeated => Err(HeaderError::Repeated { header: header.into() }),
        }
    }
}

/// The standard headers of a request.
#[derive(Clone, Copy, Debug)]
pub struct Received<'a> {
    /// [`PROTOCOL_VERSION`].
    pub version: Field<'a>,
    /// [`METHOD`].
    pub method: Field<'a>,
    /// [`NAME`].
    pub name: Field<'a>,
}

/// Checks the standard headers of the modern request `message` against its body. `meta` was read from it.
///
/// A [`NAME`] is not looked at where the method has none. What the body itself lacks is no fault of the headers.
///
/// # Errors
/// The first header that is missing, malformed, repeated or says something else:
/// [`HEADER_MISMATCH`](super::HEADER_MISMATCH), HTTP 400.
pub fn check(message: &[u8], envelope: &Envelope, meta: &Meta, received: &Received<'_>) -> Result<(), HeaderError> {
    let plain = |field: Field<'_>, header: &str, raw: Option<&Span>| {
        let value = field.value(header)?.ok_or(HeaderError::Missing { header: header.into() })?;
        let text = std::str::from_utf8(value).map_err(|_| HeaderError::Malformed { header: header.into() })?;
        match raw.is_some_and(|span| walk::says(&message[span.clone()], text)) {
            true => Ok(()),
            false => Err(HeaderError::Mismatch { header: header.into() }),
        }
    };
    plain(received.version, PROTOCOL_VERSION, meta.version.as_ref())?;
    plain(received.method, METHOD, envelope.method.as_ref())?;
    let method = envelope.method_name(message);
    if method.as_deref().and_then(name_member).is_none() {
        return Ok(());
    }
    match (received.name.value(NAME)?, name_of(message, envelope)?) {
        (None, None) => Ok(()),
        (None, Some(_)) => Err(HeaderError::Missing { header: NAME.into() }),
        (Some(value), said) => {
            let text = decode(value).ok_or(HeaderError::Malformed { header: NAME.into() })?;
            match said.is_some_and(|said| said == text) {
                true => Ok(()),
                false => Err(HeaderError::Mismatch { header: NAME.into() }),
            }
        }
    }
}

/// Checks the headers of annotated parameters against the arguments at `arguments` of a `tools/call`. `field` tells what
/// the request has under a name, which is given in lower case.
///
/// # Errors
/// As [`check`].
pub fn check_params<'a>(
    message: &[u8],
    arguments: Option<&Span>,
    annotations: &[Annotation],
    field: impl Fn(&str) -> Field<'a>,
) -> Result<(), HeaderError> {
    for annotation in annotations {
        let header = annotation.header();
        let said = field(&header).value(&header)?;
        let meant = arguments.and_then(|arguments| annotation.value(message, arguments));
        let meant = meant.map(|span| &message[span]);
        match (said, meant) {
            (None, None) => {}
            (None, Some(raw)) if text_of(raw).is_none() => {}
            (None, Some(_)) => return Err(HeaderError::Missing { header: header.into() }),
            (Some(_), None) => return Err(HeaderError::Mismatch { header: header.into() }),
            (Some(value), Some(raw)) => {
                let Some(text) = decode(value) else { return Err(HeaderError::Malformed { header: header.into() }) };
                if !is_same(&text, raw) {
                    return Err(HeaderError::Mismatch { header: header.into() });
                }
            }
        }
    }
    Ok(())
}

/// What is wrong with the headers of a request. Says names, never values.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// A required header is absent.
    #[error("the header `{header}` is missing")]
    Missing {
        /// Its name.
        header: Box<str>,
    },
    /// Its value has characters that none may have, or is wrongly encoded.
    #[error("the header `{header}` is malformed")]
    Malformed {
        /// Its name.
        header: Box<str>,
    },
    /// It is there several times.
    #[error("the header `{header}` stands in the request more than once")]
    Repeated {
        /// Its name.
        header: Box<str>,
    },
    /// It says something else than the body.
    #[error("the header `{header}` disagrees with the body")]
    Mismatch {
        /// Its name.
        header: Box<str>,
    },
    /// The body says twice what the header must repeat.
    #[error("`params.{member}` stands in the request more than once")]
    Ambiguous {
        /// The member of the params.
        member: &'static str,
    },
}

const MARKER: &str = "=?base64?";
const MARKER_END: &str = "?=";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::modern::annotation;
    use proptest::prelude::*;

    const CALL: &str = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"g\u00fcn","arguments":{
        "n":42,"b":true,"o":{"t":" x "},"z":null,"u":{}},"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28"}}}"#;

    fn once(text: &str) -> Field<'_> {
        Field::Once(text.as_bytes())
    }

    fn checked(message: &str, version: Field<'_>, method: Field<'_>, name: Field<'_>) -> Result<(), HeaderError> {
        let envelope = envelope::scan(message.as_bytes()).unwrap();
        let meta = Meta::read(message.as_bytes(), &envelope);
        check(message.as_bytes(), &envelope, &meta, &Received { version, method, name })
    }

    #[test]
    fn e2_headers_must_say_what_the_body_says() {
        let (version, method, name) = (once("2026-07-28"), once("tools/call"), once("=?base64?Z8O8bg==?="));
        assert_eq!(checked(CALL, version, method, name), Ok(()));
        let missing = |header: &str| Err(HeaderError::Missing { header: header.into() });
        let mismatch = |header: &str| Err(HeaderError::Mismatch { header: header.into() });
        assert_eq!(checked(CALL, Field::Absent, method, name), missing(PROTOCOL_VERSION));
        assert_eq!(checked(CALL, once("2025-11-25"), method, name), mismatch(PROTOCOL_VERSION));
        assert_eq!(checked(CALL, version, Field::Absent, name), missing(METHOD));
        assert_eq!(checked(CALL, version, once("Tools/Call"), name), mismatch(METHOD));
        assert_eq!(checked(CALL, version, method, Field::Absent), missing(NAME));
        assert_eq!(checked(CALL, version, method, once("gun")), mismatch(NAME));
        let malformed = Err(HeaderError::Malformed { header: NAME.into() });
        assert_eq!(checked(CALL, version, method, once("=?base64?Z8O8bg?=")), malformed);
        assert_eq!(checked(CALL, version, method, Field::Once("g\u{fc}n".as_bytes())), malformed);
        let repeated = Err(HeaderError::Repeated { header: METHOD.into() });
        assert_eq!(checked(CALL, version, Field::Repeated, name), repeated);
        let twice = CALL.replace(r#""arguments""#, r#""name":"a","arguments""#);
        assert_eq!(checked(&twice, version, method, name), Err(HeaderError::Ambiguous { member: "name" }));
        let list = CALL.replace("tools/call", "tools/list");
        assert_eq!(checked(&list, version, once("tools/list"), Field::Repeated), Ok(()));
    }

    #[test]
    fn e2_which_member_a_method_is_named_by() {
        for (method, member) in [
            ("tools/call", Some("name")),
            ("prompts/get", Some("name")),
            ("resources/read", Some("uri")),
            ("tasks/get", Some("taskId")),
            ("tasks/update", Some("taskId")),
            ("tasks/cancel", Some("taskId")),
            ("tools/list", None),
            ("", None),
        ] {
            assert_eq!(name_member(method), member, "{method}");
        }
    }

    #[test]
    fn e2_headers_of_parameters_are_compared_by_value() {
        let schema = r#"{"type":"object","properties":{"n":{"type":"integer","x-mcp-header":"N"},
            "b":{"type":"boolean","x-mcp-header":"B"},"z":{"type":"string","x-mcp-header":"Z"},
            "u":{"type":"string","x-mcp-header":"U"},
            "o":{"type":"object","properties":{"t":{"type":"string","x-mcp-header":"T"}}}}}"#;
        let annotations = annotation::read(schema.as_bytes()).unwrap();
        let envelope = envelope::scan(CALL.as_bytes()).unwrap();
        let arguments = envelope::member(CALL.as_bytes(), &envelope.params.unwrap(), "arguments");
        let checked = |n: Field<'static>, t: Field<'static>, z: Field<'static>| {
            check_params(CALL.as_bytes(), arguments.as_ref(), &annotations, |header| match header {
                "mcp-param-n" => n,
                "mcp-param-b" => once("true"),
                "mcp-param-t" => t,
                "mcp-param-z" => z,
                _ => Field::Absent,
            })
        };
        let t = once("=?base64?IHgg?=");
        assert_eq!(checked(once("42.0"), t, Field::Absent), Ok(()));
        let fault = |found: Result<(), HeaderError>| found.unwrap_err().to_string();
        assert_eq!(fault(checked(once("43"), t, Field::Absent)), "the header `mcp-param-n` disagrees with the body");
        assert_eq!(fault(checked(Field::Absent, t, Field::Absent)), "the header `mcp-param-n` is missing");
        assert_eq!(
            fault(checked(once("42"), once("=?base64?!?="), Field::Absent)),
            "the header `mcp-param-t` is malformed"
        );
        assert_eq!(fault(checked(once("42"), t, once(""))), "the header `mcp-param-z` disagrees with the body");
    }

    #[test]
    fn e2_values_that_are_not_safe_are_encoded() {
        for (text, encoded) in [
            ("us-west1", "us-west1"),
            ("a\tb c", "a\tb c"),
            (" padded ", "=?base64?IHBhZGRlZCA=?="),
            ("=?base64?literal?=", "=?base64?PT9iYXNlNjQ/bGl0ZXJhbD89?="),
            ("=?BASE64?literal?=", "=?BASE64?literal?="),
            ("", "=?base64??="),
        ] {
            assert_eq!(encode(text), encoded);
        }
    }

    proptest! {
        #[test]
        fn e2_every_text_comes_through_a_header(text in prop_oneof![any::<String>(), "(=\\?base64\\?)?[ -~\t]{0,9}(\\?=)?"]) {
            let value = encode(&text);
            prop_assert!(value.bytes().all(|byte| matches!(byte, b'\t' | 0x20..=0x7e)));
            prop_assert_eq!(value.trim_matches([' ', '\t']), &*value);
            let decoded = decode(value.as_bytes());
            prop_assert_eq!(decoded.as_deref(), Some(&*text));
        }

        #[test]
        fn e2_a_header_of_ours_is_the_same_as_the_value(value in prop_oneof![
            any::<String>().prop_map(serde_json::Value::from), any::<i64>().prop_map(serde_json::Value::from),
            any::<bool>().prop_map(serde_json::Value::from), any::<f64>().prop_map(serde_json::Value::from),
        ]) {
            let raw = value.to_string();
            if let Some(text) = text_of(raw.as_bytes()) {
                prop_assert!(is_same(&text, raw.as_bytes()), "{} {}", text, raw);
            } else {
                prop_assert_eq!(raw, "null");
            }
        }
    }
}
