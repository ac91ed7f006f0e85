//! Identifiers. None of them draws its own randomness; secret ones never show themselves.

use std::fmt;

/// A client's `Mcp-Session-Id`: 256 random bits as 43 characters of unpadded base64url (S3).
///
/// It is a bearer secret. `Debug` hides it, and there is no `Display`.
#[derive(Clone, PartialEq, Eq)]
pub struct SessionId(Box<str>);

impl SessionId {
    /// The id made of 256 bits of entropy drawn by the caller.
    pub fn from_entropy(entropy: [u8; 32]) -> Self {
        Self(base64url(&entropy).into_boxed_str())
    }

    /// The id that a client presents. `None` unless it is 1 to 128 characters of visible ASCII, as the
    /// transport demands (2025-11-25, Transports, Session Management); whether it exists is another question.
    pub fn parse(text: &str) -> Option<Self> {
        let visible = text.bytes().all(|byte| (0x21..=0x7e).contains(&byte));
        ((1..=SESSION_ID_BYTES_MAX).contains(&text.len()) && visible).then(|| Self(text.into()))
    }

    /// The secret itself, for the one response header that carries it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SessionId(…)")
    }
}

/// SHA-256 of a [`SessionId`]: the key under which a session is stored. Not a secret that opens anything,
/// yet shown only as a [`SessionRef`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionKey([u8; 32]);

impl SessionKey {
    /// The key whose digest is `digest`; hashing is the caller's.
    pub const fn from_bytes(digest: [u8; 32]) -> Self {
        Self(digest)
    }

    /// The digest.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// What people and logs see of the session.
    pub fn session_ref(&self) -> SessionRef {
        let mut head = [0; 5];
        head.copy_from_slice(&self.0[..5]);
        SessionRef(head)
    }

    /// The tag that event ids of this session carry, so that another session's are recognised.
    pub fn tag(&self) -> u32 {
        u32::from_be_bytes([self.0[28], self.0[29], self.0[30], self.0[31]])
    }
}

impl fmt::Debug for SessionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.session_ref(), f)
    }
}

/// The short name of a session in logs, lists and errors (S3): `s-` and ten hexadecimal digits of its key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionRef([u8; 5]);

impl SessionRef {
    /// The ref written as `text`, if it is one.
    pub fn parse(text: &str) -> Option<Self> {
        let digits = text.strip_prefix("s-")?;
        if digits.len() != 10 || !digits.is_ascii() {
            return None;
        }
        let mut head = [0; 5];
        for (byte, pair) in head.iter_mut().zip(digits.as_bytes().chunks_exact(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
        }
        Some(Self(head))
    }

    /// The first five bytes of the session's key.
    pub const fn as_bytes(&self) -> &[u8; 5] {
        &self.0
    }
}

impl fmt::Display for SessionRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("s-")?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for SessionRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// One life of the worker: a durable counter, and a random part that tells two claimants of one number apart.
///
/// Every ledger write names the epoch of its writer; a write of an older one is refused (fencing).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch {
    /// Rises by one at every worker start.
    pub counter: u64,
    /// Drawn at the start.
    pub nonce: u64,
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{:016x}", self.counter, self.nonce)
    }
}

/// The name of a configured server: 1 to 64 characters of `A-Z a-z 0-9 _ . -`, the first one a letter, digit or `_`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServerName(Box<str>);

impl ServerName {
    /// The name written as `text`, if it is one.
    pub fn parse(text: &str) -> Option<Self> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-');
        let first = text.bytes().next()?;
        let fits = text.len() <= SERVER_NAME_BYTES_MAX && text.bytes().all(allowed);
        (fits && (first.is_ascii_alphanumeric() || first == b'_')).then(|| Self(text.into()))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ServerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// `bytes` in unpadded base64url (RFC 4648, section 5).
pub fn base64url(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let padded = [chunk[0], *chunk.get(1).unwrap_or(&0), *chunk.get(2).unwrap_or(&0)];
        let word = u32::from_be_bytes([0, padded[0], padded[1], padded[2]]);
        for sextet in 0..=chunk.len() {
            let index = (word >> (18 - 6 * sextet)) & 0x3f;
            text.push(char::from(BASE64URL[index as usize]));
        }
    }
    text
}

/// The bytes whose unpadded base64url is `text`; `None` if it is none.
pub fn from_base64url(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() * 3 / 4);
    for chunk in text.as_bytes().chunks(4) {
        if chunk.len() == 1 {
            return None;
        }
        let mut word = 0_u32;
        for symbol in chunk {
            let value = BASE64URL.iter().position(|candidate| candidate == symbol)?;
            word = word << 6 | u32::try_from(value).ok()?;
        }
        word <<= 6 * (4 - chunk.len());
        let word = word.to_be_bytes();
        let (used, spare) = word.split_at(chunk.len());
        if spare.iter().any(|bits| *bits != 0) {
            return None;
        }
        bytes.extend_from_slice(&used[1..]);
    }
    Some(bytes)
}

const BASE64URL: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
const SESSION_ID_BYTES_MAX: usize = 128;
const SERVER_NAME_BYTES_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn s3_an_id_is_256_bits_of_visible_ascii_and_hides_itself() {
        let id = SessionId::from_entropy([0xfb; 32]);
        assert_eq!(id.reveal().len(), 43);
        assert_eq!(SessionId::parse(id.reveal()), Some(id.clone()));
        assert!(!format!("{id:?}").contains(id.reveal()));
        for bad in ["", "a b", "a\u{7f}", "é", &"x".repeat(129)] {
            assert_eq!(SessionId::parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn s3_a_ref_shows_ten_digits_of_the_key_only() {
        let key = SessionKey::from_bytes([0xab; 32]);
        assert_eq!(key.session_ref().to_string(), "s-ababababab");
        assert_eq!(format!("{key:?}"), "s-ababababab");
        assert_eq!(SessionRef::parse("s-ababababab"), Some(key.session_ref()));
        for bad in ["", "s-", "s-ababababa", "s-ababababag", "x-ababababab", "s-éééééaa"] {
            assert_eq!(SessionRef::parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn server_names_are_path_and_tool_safe() {
        assert!(ServerName::parse("my_server-2.1").is_some());
        for bad in ["", ".", "-a", "a/b", "a b", "é", &"x".repeat(65)] {
            assert_eq!(ServerName::parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn base64url_has_one_spelling_only() {
        assert_eq!(from_base64url("AA"), Some(vec![0]));
        for other in ["AB", "AAB", "A", "AA=="] {
            assert_eq!(from_base64url(other), None, "{other}");
        }
    }

    proptest! {
        #[test]
        fn base64url_round_trips(bytes: Vec<u8>) {
            prop_assert_eq!(from_base64url(&base64url(&bytes)), Some(bytes));
        }
    }
}
