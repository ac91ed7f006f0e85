//! The modern era (2026-07-28), in which each request says for itself what `initialize` said before.
//!
//! It owns what is read from and written to a message of that era: the `_meta` of a request ([`Meta`]), the headers
//! that repeat parts of the body ([`header`]), the annotations that name further ones ([`annotation`]), the errors that
//! the revision defines, and edits that leave all other bytes alone ([`edit`]). It does not know where a message comes
//! from or goes to. What passes between the eras is in [`crossing`].

use std::borrow::Cow;
use std::fmt;

use super::envelope::{self, Envelope, Span, walk};

pub mod annotation;
pub mod asking;
mod base64;
pub mod crossing;
mod decimal;
pub mod edit;
pub mod header;
pub mod hearing;
pub mod tasks;

/// The revision of the modern era that is spoken here.
pub const VERSION: &str = "2026-07-28";

/// The member of a request's `_meta` that names the revision it is written in. A request that has it is modern.
pub const PROTOCOL_VERSION: &str = "io.modelcontextprotocol/protocolVersion";

/// The member of a request's `_meta` that says what its client can do.
pub const CLIENT_CAPABILITIES: &str = "io.modelcontextprotocol/clientCapabilities";

/// The member of a request's `_meta` that names its client.
pub const CLIENT_INFO: &str = "io.modelcontextprotocol/clientInfo";

/// The member of a request's `_meta` that asks for log messages of that level and above.
pub const LOG_LEVEL: &str = "io.modelcontextprotocol/logLevel";

/// The member of a result's `_meta` that names the server.
pub const SERVER_INFO: &str = "io.modelcontextprotocol/serverInfo";

/// The member of the `_meta` of everything on a `subscriptions/listen` stream: the id of the request that opened it.
pub const SUBSCRIPTION_ID: &str = "io.modelcontextprotocol/subscriptionId";

/// JSON-RPC error: headers that are missing, malformed, or disagree with the body. HTTP 400.
pub const HEADER_MISMATCH: i64 = -32020;

/// JSON-RPC error: the request needs a capability that its client has not declared. HTTP 400.
pub const MISSING_CAPABILITY: i64 = -32021;

/// JSON-RPC error: the revision of the request is not spoken here. HTTP 400.
pub const UNSUPPORTED_VERSION: i64 = -32022;

/// JSON-RPC error: the method does not exist. HTTP 404 in this era, where it says nothing of a session.
pub const METHOD_NOT_FOUND: i64 = -32601;

/// JSON-RPC error: parameters, a required member of `_meta` among them, are missing or wrong. HTTP 400 for `_meta`.
pub const INVALID_PARAMS: i64 = -32602;

/// Whether a JSON-RPC error of this number, in answer to a modern request, proves that its server is modern
/// (2026-07-28, Streamable HTTP, Backward Compatibility). No other number proves anything.
pub const fn is_proof(code: i64) -> bool {
    matches!(code, HEADER_MISMATCH | MISSING_CAPABILITY | UNSUPPORTED_VERSION)
}

/// `error.data` of [`UNSUPPORTED_VERSION`]: raw JSON.
pub fn unsupported_version_data(requested: &str, supported: &[&str]) -> Vec<u8> {
    let mut data = b"{\"supported\":[".to_vec();
    for (index, version) in supported.iter().enumerate() {
        if index > 0 {
            data.push(b',');
        }
        data.extend_from_slice(&envelope::escape(version));
    }
    data.extend_from_slice(b"],\"requested\":");
    data.extend_from_slice(&envelope::escape(requested));
    data.push(b'}');
    data
}

/// `error.data` of [`MISSING_CAPABILITY`]; `required` is the raw object of capabilities that are needed.
pub fn missing_capability_data(required: &[u8]) -> Vec<u8> {
    [b"{\"requiredCapabilities\":", required, b"}"].concat()
}

/// Where the parts of a request's `_meta` stand that the gateway reads (2026-07-28, Overview, `_meta`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    /// The raw `_meta` value, whatever it is.
    pub object: Option<Span>,
    /// The raw value of [`PROTOCOL_VERSION`].
    pub version: Option<Span>,
    /// The raw value of [`CLIENT_CAPABILITIES`].
    pub capabilities: Option<Span>,
    /// The raw value of [`CLIENT_INFO`].
    pub client_info: Option<Span>,
    /// The raw value of [`LOG_LEVEL`].
    pub log_level: Option<Span>,
    /// The raw value of `progressToken`.
    pub progress_token: Option<Span>,
    /// A member that stands there twice: two readers could see two different requests.
    pub repeated: Option<&'static str>,
}

impl Meta {
    /// Reads the `_meta` in the params of `message`, which `envelope` was scanned from. One pass, no allocation.
    pub fn read(message: &[u8], envelope: &Envelope) -> Self {
        let mut meta = Self::default();
        let Some(params) = &envelope.params else { return meta };
        for (key, value) in walk::members(message, params) {
            if !message.get(key).is_some_and(|key| walk::says(key, META)) {
                continue;
            }
            for (key, value) in walk::members(message, &value) {
                meta.take(message.get(key).unwrap_or_default(), value);
            }
            if meta.object.replace(value).is_some() {
                meta.repeated = Some(META);
            }
        }
        meta
    }

    /// Whether the request is of the modern era: it names the revision that it is written in.
    pub const fn is_modern(&self) -> bool {
        self.version.is_some()
    }

    /// The revision that the request is written in, if all that the era requires is there and well formed.
    ///
    /// # Errors
    /// What is missing or malformed: [`INVALID_PARAMS`], HTTP 400. Whether the revision is spoken here is not looked at.
    pub fn require<'a>(&self, message: &'a [u8]) -> Result<Cow<'a, str>, MetaError> {
        if let Some(member) = self.repeated {
            return Err(MetaError::Repeated { member });
        }
        let missing = |member| MetaError::Missing { member };
        let raw = |span: &Span| message.get(span.clone()).unwrap_or_default();
        let version = self.version.as_ref().ok_or(missing(PROTOCOL_VERSION))?;
        let malformed = MetaError::Malformed { member: PROTOCOL_VERSION, expected: "a string" };
        let version = envelope::unescape(raw(version)).ok_or(malformed)?;
        let capabilities = self.capabilities.as_ref().ok_or(missing(CLIENT_CAPABILITIES))?;
        for (member, span) in [(CLIENT_CAPABILITIES, Some(capabilities)), (CLIENT_INFO, self.client_info.as_ref())] {
            if span.is_some_and(|span| !raw(span).starts_with(b"{")) {
                return Err(MetaError::Malformed { member, expected: "an object" });
            }
        }
        if self.log_level.as_ref().is_some_and(|span| !raw(span).starts_with(b"\"")) {
            return Err(MetaError::Malformed { member: LOG_LEVEL, expected: "a string" });
        }
        Ok(version)
    }

    fn take(&mut self, key: &[u8], value: Span) {
        let known = [
            (PROTOCOL_VERSION, &mut self.version),
            (CLIENT_CAPABILITIES, &mut self.capabilities),
            (CLIENT_INFO, &mut self.client_info),
            (LOG_LEVEL, &mut self.log_level),
            (PROGRESS_TOKEN, &mut self.progress_token),
        ];
        for (name, slot) in known {
            if walk::says(key, name) {
                if slot.replace(value).is_some() {
                    self.repeated = Some(name);
                }
                return;
            }
        }
    }
}

/// What is wrong with a request's `_meta`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MetaError {
    /// A required member is absent.
    #[error("`params._meta` lacks `{member}`")]
    Missing {
        /// The member.
        member: &'static str,
    },
    /// A member is not what the revision says.
    #[error("`{member}` in `params._meta` is not {expected}")]
    Malformed {
        /// The member.
        member: &'static str,
        /// What it must be.
        expected: &'static str,
    },
    /// A member stands there twice.
    #[error("`{member}` stands in the request more than once")]
    Repeated {
        /// The member.
        member: &'static str,
    },
}

/// What a result says that it is (2026-07-28, Overview, Results).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResultType {
    /// `complete`, or, as older servers have it, nothing.
    Complete,
    /// `input_required`: the request must be sent again with more in it.
    InputRequired,
    /// `task`: the tasks extension.
    Task,
    /// Anything else. Nobody may act upon it.
    Unknown,
}

impl ResultType {
    /// That of the result at `result` of an already scanned message.
    pub fn of(message: &[u8], result: &Span) -> Self {
        let Some(raw) = envelope::member(message, result, "resultType").and_then(|span| message.get(span)) else {
            return Self::Complete;
        };
        match raw {
            _ if walk::says(raw, "complete") => Self::Complete,
            _ if walk::says(raw, "input_required") => Self::InputRequired,
            _ if walk::says(raw, "task") => Self::Task,
            _ => Self::Unknown,
        }
    }
}

/// Which generation of the protocol a server speaks (2026-07-28, Versioning).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Era {
    /// `initialize`, sessions: 2025-11-25 and before.
    Legacy,
    /// `_meta` in each request, no sessions: 2026-07-28 and after.
    Modern,
}

impl Era {
    /// The word for it, in the configuration and for operators.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Legacy => "legacy",
            Self::Modern => "modern",
        }
    }

    /// The era of that word.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Legacy, Self::Modern].into_iter().find(|era| era.as_str() == text)
    }
}

impl fmt::Display for Era {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What is known of the eras that a server speaks; it may be both (E5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spoken {
    /// Whether it opens sessions by `initialize`.
    pub legacy: Option<bool>,
    /// Whether it answers requests that say for themselves what they are.
    pub modern: Option<bool>,
}

impl Spoken {
    /// Of a server that speaks this era, and not the other.
    pub const fn only(era: Era) -> Self {
        match era {
            Era::Legacy => Self { legacy: Some(true), modern: Some(false) },
            Era::Modern => Self { legacy: Some(false), modern: Some(true) },
        }
    }

    /// The newest era that it is known to speak; `None` if nothing is known.
    pub const fn era(self) -> Option<Era> {
        match self {
            Self { modern: Some(true), .. } => Some(Era::Modern),
            Self { legacy: Some(true), .. } | Self { modern: Some(false), .. } => Some(Era::Legacy),
            Self { legacy: Some(false) | None, modern: None } => None,
        }
    }
}

const META: &str = "_meta";
const PROGRESS_TOKEN: &str = "progressToken";

#[cfg(test)]
mod tests {
    use super::*;

    fn read(message: &str) -> (Meta, Result<String, MetaError>) {
        let envelope = envelope::scan(message.as_bytes()).expect("it is a message");
        let meta = Meta::read(message.as_bytes(), &envelope);
        let version = meta.require(message.as_bytes()).map(Cow::into_owned);
        (meta, version)
    }

    fn with_meta(members: &str) -> String {
        format!(r#"{{"jsonrpc":"2.0","id":1,"method":"m","params":{{"a":1,"_meta":{members}}}}}"#)
    }

    #[test]
    fn e2_a_request_says_for_itself_what_it_is() {
        let message = with_meta(
            r#"{"progressToken":7,"io.modelcontextprotocol\/protocolVersion":"2026-07-28",
            "io.modelcontextprotocol/clientCapabilities":{"roots":{}},
            "io.modelcontextprotocol/clientInfo":{"name":"c"},"io.modelcontextprotocol/logLevel":"info"}"#,
        );
        let (meta, version) = read(&message);
        assert!(meta.is_modern());
        assert_eq!(version.as_deref(), Ok(VERSION));
        let text = |span: Option<Span>| span.map(|span| &message[span]);
        assert_eq!(text(meta.capabilities), Some(r#"{"roots":{}}"#));
        assert_eq!(text(meta.client_info), Some(r#"{"name":"c"}"#));
        assert_eq!(text(meta.log_level), Some(r#""info""#));
        assert_eq!(text(meta.progress_token), Some("7"));
    }

    #[test]
    fn e2_what_is_missing_or_wrong_in_meta_is_named() {
        let version = r#""io.modelcontextprotocol/protocolVersion":"2026-07-28""#;
        let capabilities = r#""io.modelcontextprotocol/clientCapabilities""#;
        for (members, modern, problem) in [
            ("{}".to_owned(), false, "`params._meta` lacks `io.modelcontextprotocol/protocolVersion`"),
            ("null".to_owned(), false, "`params._meta` lacks `io.modelcontextprotocol/protocolVersion`"),
            (format!("{{{version}}}"), true, "`params._meta` lacks `io.modelcontextprotocol/clientCapabilities`"),
            (
                format!("{{{version},{capabilities}:[]}}"),
                true,
                "`io.modelcontextprotocol/clientCapabilities` in `params._meta` is not an object",
            ),
            (
                r#"{"io.modelcontextprotocol/protocolVersion":1}"#.to_owned(),
                true,
                "`io.modelcontextprotocol/protocolVersion` in `params._meta` is not a string",
            ),
            (
                format!("{{{version},{version},{capabilities}:{{}}}}"),
                true,
                "`io.modelcontextprotocol/protocolVersion` stands in the request more than once",
            ),
            (
                format!(r#"{{{version},{capabilities}:{{}}}},"_meta":{{}}"#),
                true,
                "`_meta` stands in the request more than once",
            ),
        ] {
            let (meta, found) = read(&with_meta(&members));
            assert_eq!(meta.is_modern(), modern, "{members}");
            assert_eq!(found.map_err(|error| error.to_string()), Err(problem.to_owned()), "{members}");
        }
        let none = r#"{"jsonrpc":"2.0","id":1,"method":"m"}"#;
        assert_eq!(read(none).0, Meta::default());
    }

    #[test]
    fn e2_errors_of_the_revision_carry_their_data() {
        let data = unsupported_version_data("1900-\"", &[VERSION, "2025-11-25"]);
        assert_eq!(data, br#"{"supported":["2026-07-28","2025-11-25"],"requested":"1900-\""}"#);
        assert_eq!(missing_capability_data(br#"{"roots":{}}"#), br#"{"requiredCapabilities":{"roots":{}}}"#);
        for (code, proof) in [(-32020, true), (-32021, true), (-32022, true), (-32601, false), (-32000, false)] {
            assert_eq!(is_proof(code), proof, "{code}");
        }
    }

    #[test]
    fn e1_a_result_says_what_it_is() {
        for (result, expected) in [
            (r#"{"resultType":"complete"}"#, ResultType::Complete),
            ("{}", ResultType::Complete),
            (r#"{"resultType":"input\u005frequired"}"#, ResultType::InputRequired),
            (r#"{"resultType":"task"}"#, ResultType::Task),
            (r#"{"resultType":"later"}"#, ResultType::Unknown),
            (r#"{"resultType":7}"#, ResultType::Unknown),
        ] {
            assert_eq!(ResultType::of(result.as_bytes(), &(0..result.len())), expected, "{result}");
        }
    }

    #[test]
    fn e5_eras_read_back() {
        for era in [Era::Legacy, Era::Modern] {
            assert_eq!(Era::parse(era.as_str()), Some(era));
        }
        assert_eq!(Era::parse("auto"), None);
        for era in [Era::Legacy, Era::Modern] {
            assert_eq!(Spoken::only(era).era(), Some(era));
        }
        let known = |legacy, modern| Spoken { legacy, modern }.era();
        assert_eq!(known(Some(true), Some(true)), Some(Era::Modern));
        assert_eq!(known(None, Some(false)), Some(Era::Legacy));
        assert_eq!(known(Some(true), None), Some(Era::Legacy));
        assert_eq!((known(None, None), known(Some(false), None)), (None, None));
    }
}
