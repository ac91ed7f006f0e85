//! Who a client is, by what its request proves (I1).
//!
//! Proof is asked for on every request (protocol, Authorization): a session id proves nothing. What is proven is a
//! name, which outlives the token that proved it (S15). Not here: which status a refusal has (`serve::reply`), and
//! whose session it is (the engine).

mod tokens;

use http::HeaderMap;
use http::header::AUTHORIZATION;
use mainstay_core::principal::Principal;

pub use tokens::{TokenFault, Tokens, check, written_hash};

/// How clients prove who they are.
pub enum Auth {
    /// Not at all.
    Open,
    /// By a token of the configuration.
    Token(Tokens),
}

/// Why nobody's identity is proven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denied {
    /// The request carries no bearer token.
    Missing,
    /// It carries one that is nobody's.
    Invalid,
    /// Whose token it is can't be told now, since not every token of the configuration can be read.
    Undecided,
}

impl Auth {
    /// Who sends a request with these headers; none where nobody needs to prove it.
    ///
    /// May wait for token files that are unreadable at the moment, for less than clients do (S13a).
    ///
    /// # Errors
    /// [`Denied`], of which only the first two are final.
    pub async fn identify(&self, headers: &HeaderMap) -> Result<Option<Principal>, Denied> {
        match self {
            Self::Open => Ok(None),
            Self::Token(tokens) => tokens.holder(bearer(headers)?).await.map(|name| Some(Principal::Token(name))),
        }
    }

    /// Whether a client must prove who it is.
    pub fn is_open(&self) -> bool {
        matches!(self, Self::Open)
    }
}

/// The token in `Authorization: Bearer` (RFC 6750, section 2.1); nowhere else is looked.
fn bearer(headers: &HeaderMap) -> Result<&str, Denied> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let value = values.next().ok_or(Denied::Missing)?;
    if values.next().is_some() {
        return Err(Denied::Invalid);
    }
    let text = value.to_str().map_err(|_| Denied::Invalid)?;
    let (scheme, token) = text.split_once(' ').unwrap_or((text, ""));
    if !scheme.eq_ignore_ascii_case("bearer") {
        return Err(Denied::Missing);
    }
    let token = token.trim_matches(' ');
    if token.is_empty() || token.contains(|symbol: char| !symbol.is_ascii_graphic()) {
        return Err(Denied::Invalid);
    }
    Ok(token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i1_the_bearer_is_read_from_the_one_header_that_may_carry_it() {
        let read = |values: &[&str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(AUTHORIZATION, value.parse().unwrap());
            }
            bearer(&headers).map(str::to_owned)
        };
        for good in ["Bearer t0ken", "bearer t0ken", "BEARER  t0ken "] {
            assert_eq!(read(&[good]).as_deref(), Ok("t0ken"), "{good}");
        }
        for missing in [&[][..], &["Basic t0ken"], &["t0ken"], &[""]] {
            assert_eq!(read(missing), Err(Denied::Missing), "{missing:?}");
        }
        for invalid in [&["Bearer"][..], &["Bearer "], &["Bearer a b"], &["Bearer t0ken", "Bearer t0ken"]] {
            assert_eq!(read(invalid), Err(Denied::Invalid), "{invalid:?}");
        }
    }
}
