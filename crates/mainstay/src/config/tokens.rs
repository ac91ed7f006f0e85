//! Clients' tokens in the configuration: how `[auth.tokens]` is spelled, and what fits as a token's value.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};
use serde::{Serialize, Serializer};

/// What one value of a token says, once its variables are filled in. `Debug` hides it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum TokenValue<'a> {
    /// The token itself.
    Plain(&'a str),
    /// Its SHA-256.
    Digest([u8; 32]),
}

impl<'a> TokenValue<'a> {
    /// Reads `text`: `sha256:` and 64 hexadecimal digits, or else the token itself.
    ///
    /// # Errors
    /// The text is no token that a client could send, or one that could be guessed.
    pub fn parse(text: &'a str) -> Result<Self, TokenUnfit> {
        if let Some(digits) = text.strip_prefix(DIGEST_PREFIX) {
            return digest(digits).map(Self::Digest).ok_or(TokenUnfit::Digest);
        }
        if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(TokenUnfit::Characters);
        }
        match text.len() {
            0..TOKEN_CHARS_MIN => Err(TokenUnfit::Short),
            TOKEN_CHARS_MIN..=TOKEN_CHARS_MAX => Ok(Self::Plain(text)),
            _ => Err(TokenUnfit::Long),
        }
    }
}

impl fmt::Debug for TokenValue<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenValue(…)")
    }
}

/// Why a text is no value of a token. It never repeats the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenUnfit {
    /// It could be guessed.
    #[error("it has less than {TOKEN_CHARS_MIN} characters")]
    Short,
    /// No header should be this long.
    #[error("it has more than {TOKEN_CHARS_MAX} characters")]
    Long,
    /// No client could send it.
    #[error("it has blanks, line ends or characters that are not ASCII")]
    Characters,
    /// It begins like a hash and is none.
    #[error("`{DIGEST_PREFIX}` is not followed by 64 hexadecimal digits")]
    Digest,
}

impl TokenUnfit {
    /// What to do about it.
    pub const fn hint(self) -> &'static str {
        match self {
            Self::Short | Self::Long | Self::Characters => {
                "`mainstay tokens new` makes a good one; a file is written `${file:PATH}`, a variable `${NAME}`"
            }
            Self::Digest => "`mainstay tokens new` prints a token and its hash",
        }
    }
}

/// The values of one token as they are written: a string, or a list of strings. `Debug` hides them.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct TokenValues(pub Vec<String>);

impl fmt::Debug for TokenValues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TokenValues({} …)", self.0.len())
    }
}

impl Serialize for TokenValues {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0.as_slice() {
            [only] => serializer.serialize_str(only),
            several => several.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for TokenValues {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValuesVisitor)
    }
}

struct ValuesVisitor;

impl<'de> Visitor<'de> for ValuesVisitor {
    type Value = TokenValues;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(EXPECTED)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<TokenValues, E> {
        Ok(TokenValues(vec![text.to_owned()]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<TokenValues, A::Error> {
        let mut values = Vec::new();
        while let Some(One(value)) = list.next_element()? {
            values.push(value);
            if values.len() > TOKENS_PER_NAME_MAX {
                return Err(A::Error::custom(format!("more than {TOKENS_PER_NAME_MAX} values for one token")));
            }
        }
        Ok(TokenValues(values))
    }

    // A number may be a token that lost its quotes: serde's own words would repeat it.
    fn visit_i64<E: Error>(self, _: i64) -> Result<TokenValues, E> {
        Err(E::custom(format!("invalid type: number, expected {EXPECTED}")))
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<TokenValues, E> {
        self.visit_i64(0)
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<TokenValues, E> {
        self.visit_i64(0)
    }
}

/// One string of a list.
struct One(String);

impl<'de> Deserialize<'de> for One {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let TokenValues(mut values) = TokenValues::deserialize(deserializer)?;
        match (values.pop(), values.is_empty()) {
            (Some(value), true) => Ok(Self(value)),
            _ => Err(D::Error::custom(format!("invalid type: list in a list, expected {EXPECTED}"))),
        }
    }
}

impl JsonSchema for TokenValues {
    fn schema_name() -> Cow<'static, str> {
        "TokenValues".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "A token, a reference to one, or its hash; or a list of these, each of which is valid.",
            "anyOf": [
                { "type": "string" },
                { "type": "array", "items": { "type": "string" }, "minItems": 1, "maxItems": TOKENS_PER_NAME_MAX },
            ],
            "examples": ["${ALICE_TOKEN}", "${file:/run/secrets/alice}", ["sha256:…", "${file:/run/secrets/next}"]],
        })
    }
}

fn digest(digits: &str) -> Option<[u8; 32]> {
    if digits.len() != 64 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    let mut digest = [0; 32];
    for (byte, at) in digest.iter_mut().zip((0..64).step_by(2)) {
        *byte = u8::from_str_radix(&digits[at..at + 2], 16).ok()?;
    }
    Some(digest)
}

/// Begins a value that is a token's SHA-256 and not the token.
pub const DIGEST_PREFIX: &str = "sha256:";
/// The shortest token: what is shorter could be guessed.
const TOKEN_CHARS_MIN: usize = 16;
const TOKEN_CHARS_MAX: usize = 4096;
/// How many values one token may have at a time.
pub(super) const TOKENS_PER_NAME_MAX: usize = 16;
const EXPECTED: &str = "a token, its hash, or a list of these";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i1_a_value_is_a_token_or_its_hash() {
        let hash = format!("sha256:{}", "0aF".repeat(22).split_at(64).0);
        for (text, fits) in [
            ("0123456789abcdef", Ok(false)),
            (hash.as_str(), Ok(true)),
            ("", Err(TokenUnfit::Short)),
            ("0123456789abcde", Err(TokenUnfit::Short)),
            ("0123456789 abcdef", Err(TokenUnfit::Characters)),
            ("0123456789abcdéf", Err(TokenUnfit::Characters)),
            ("sha256:", Err(TokenUnfit::Digest)),
            (&hash[..hash.len() - 1], Err(TokenUnfit::Digest)),
            ("sha256:+f+f+f+f+f+f+f+f+f+f+f+f+f+f+f+f+f+f+f+f+f+f+f+f+f+f+f+f+f+f+f+f", Err(TokenUnfit::Digest)),
        ] {
            let is_digest = |value| matches!(value, TokenValue::Digest(_));
            assert_eq!(TokenValue::parse(text).map(is_digest), fits, "{text}");
        }
        let long = "x".repeat(TOKEN_CHARS_MAX + 1);
        assert_eq!(TokenValue::parse(&long), Err(TokenUnfit::Long));
    }

    #[test]
    fn a_string_and_a_list_are_read_and_written_as_they_were() {
        for text in [r#""a""#, r#"["a","b"]"#, "[]"] {
            let values: TokenValues = serde_json::from_str(text).unwrap();
            assert_eq!(serde_json::to_string(&values).unwrap(), text);
        }
    }

    #[test]
    fn i6_what_is_no_string_is_refused_and_not_repeated() {
        for text in ["424242", "-424242", "42.4242", "[424242]", "[[\"424242\"], []]", "{\"a\": 424242}", "true"] {
            let told = serde_json::from_str::<TokenValues>(text).unwrap_err().to_string();
            assert!(!told.contains("42"), "{told}");
        }
        assert!(!format!("{:?}", TokenValues(vec!["canary".into()])).contains("canary"));
        assert!(!format!("{:?}", TokenValue::Plain("canary")).contains("canary"));
    }
}
