//! The bearer token of the admin API.

use std::fmt;
use std::sync::Arc;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use http::HeaderMap;
use http::header::AUTHORIZATION;

/// The admin token. `Debug` hides it.
#[derive(Clone)]
pub struct Token(Arc<str>);

impl Token {
    /// Whether the request's `Authorization` is this token. Takes the same time wherever the two differ.
    pub(super) fn admits(&self, headers: &HeaderMap) -> bool {
        let mut values = headers.get_all(AUTHORIZATION).iter();
        let (Some(value), None) = (values.next(), values.next()) else {
            return false;
        };
        let Some((scheme, presented)) = value.as_bytes().split_at_checked(SCHEME.len()) else {
            return false;
        };
        // An empty token would admit everybody who sends an empty one.
        scheme.eq_ignore_ascii_case(SCHEME)
            && !self.0.is_empty()
            && verify_slices_are_equal(presented, self.0.as_bytes()).is_ok()
    }
}

impl From<&str> for Token {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

const SCHEME: &[u8] = b"bearer ";

#[cfg(test)]
mod tests {
    use super::*;

    fn admits(token: &str, values: &[&str]) -> bool {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(AUTHORIZATION, value.parse().unwrap());
        }
        Token::from(token).admits(&headers)
    }

    #[test]
    fn o1_only_the_one_right_bearer_is_admitted() {
        assert!(admits("secret", &["Bearer secret"]));
        assert!(admits("secret", &["bearer secret"]));
        for values in [
            &[][..],
            &["secret"],
            &["Bearer "],
            &["Bearer"],
            &["Bearer secre"],
            &["Bearer secrett"],
            &["Bearer Secret"],
            &["Basic secret"],
            &["Bearer secret", "Bearer secret"],
        ] {
            assert!(!admits("secret", values), "{values:?}");
        }
        assert!(!admits("", &["Bearer "]));
    }

    #[test]
    fn i6_the_token_hides_itself() {
        assert_eq!(format!("{:?}", Token::from("secret")), "Token(…)");
    }
}
