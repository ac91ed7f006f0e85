//! Errors of the admin API as problem documents (RFC 9457).

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::header::{CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderValue, StatusCode};
use serde::{Deserialize, Serialize};

/// Why a request to the admin API was not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Code {
    /// No token, or a wrong one.
    Unauthorized,
    /// Nothing is there.
    NotFound,
    /// The method is not for this path.
    MethodNotAllowed,
    /// A query parameter is malformed.
    RequestInvalid,
    /// The worker takes no new work.
    NotReady,
    /// The ledger can't be read now.
    Unavailable,
}

/// The document.
#[derive(Debug, Serialize, Deserialize)]
pub struct Document {
    /// The HTTP status, repeated.
    pub status: u16,
    /// A word for programs; `docs/errors/README.md` explains each.
    pub code: String,
    /// What the code means.
    pub title: String,
    /// What it is here.
    pub detail: String,
}

/// A problem on its way out.
pub(super) struct Problem {
    code: Code,
    detail: String,
}

impl Problem {
    pub(super) fn new(code: Code, detail: impl Into<String>) -> Self {
        Self { code, detail: detail.into() }
    }
}

impl Code {
    #[cfg(test)]
    const ALL: [Self; 6] = [
        Self::Unauthorized,
        Self::NotFound,
        Self::MethodNotAllowed,
        Self::RequestInvalid,
        Self::NotReady,
        Self::Unavailable,
    ];

    const fn parts(self) -> (StatusCode, &'static str, &'static str) {
        match self {
            Self::Unauthorized => (StatusCode::UNAUTHORIZED, "unauthorized", "the admin token is needed"),
            Self::NotFound => (StatusCode::NOT_FOUND, "not_found", "nothing is here"),
            Self::MethodNotAllowed => {
                (StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", "the method is not allowed here")
            }
            Self::RequestInvalid => (StatusCode::BAD_REQUEST, "request_invalid", "the request is malformed"),
            Self::NotReady => (StatusCode::SERVICE_UNAVAILABLE, "not_ready", "no new work is taken"),
            Self::Unavailable => (StatusCode::SERVICE_UNAVAILABLE, "unavailable", "this can't be answered now"),
        }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let (status, code, title) = self.code.parts();
        let document =
            Document { status: status.as_u16(), code: code.to_owned(), title: title.to_owned(), detail: self.detail };
        let mut response = (status, Json(document)).into_response();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"mainstay admin\""));
        }
        if status == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn every_code_is_explained() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/errors/README.md");
        let text = std::fs::read_to_string(path).unwrap();
        for code in Code::ALL {
            let (status, name, _) = code.parts();
            assert!(text.contains(&format!("| `{name}` | {} |", status.as_u16())), "`{name}` is not explained");
        }
    }
}
