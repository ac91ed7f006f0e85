//! Errors of the admin API as problem documents (RFC 9457).

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::header::{CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderValue, StatusCode};
use mainstay_core::code::{self, TerminalStatus};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::engine::Refused;

/// Why a request to the admin API was not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Code {
    /// No token, or a wrong one.
    Unauthorized,
    /// Nothing is there.
    NotFound,
    /// The method is not for this path.
    MethodNotAllowed,
    /// A query parameter, a path's part or the body is malformed.
    RequestInvalid,
    /// The body is larger than any order.
    BodyTooLarge,
    /// More than one session has this ref.
    RefAmbiguous,
    /// A reload or an upgrade can't be done; nothing was changed.
    HandoverRefused,
    /// The worker takes no new work.
    NotReady,
    /// This can't be answered now.
    Unavailable,
    /// The engine refused it.
    Refused(code::Code),
}

/// A problem document.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Problem")]
pub struct Document {
    /// The HTTP status, repeated.
    pub status: u16,
    /// A word for programs; `docs/errors/README.md` explains each.
    pub code: String,
    /// What the code means.
    pub title: String,
    /// What it is here.
    pub detail: String,
    /// The sessions that an ambiguous ref can mean; empty for every other code.
    #[serde(default)]
    pub sessions: Vec<Value>,
}

/// A problem on its way out.
#[derive(Debug)]
pub(super) struct Problem {
    code: Code,
    detail: String,
    sessions: Vec<Value>,
}

impl Problem {
    pub(super) fn new(code: Code, detail: impl Into<String>) -> Self {
        Self { code, detail: detail.into(), sessions: Vec::new() }
    }

    /// More than one session has the ref that was asked for: these.
    pub(super) fn ambiguous(detail: impl Into<String>, candidates: &[impl Serialize]) -> Self {
        let sessions = candidates.iter().filter_map(|view| serde_json::to_value(view).ok()).collect();
        Self { sessions, ..Self::new(Code::RefAmbiguous, detail) }
    }

    /// The ledger can't be read. What failed is the log's; the client learns that it may ask again.
    pub(super) fn unreadable(error: &(dyn std::error::Error + 'static)) -> Self {
        tracing::warn!(error, "the ledger can't be read for the admin API");
        Self::new(Code::Unavailable, "the ledger can't be read now")
    }
}

impl From<Refused> for Problem {
    fn from(refused: Refused) -> Self {
        let detail = match refused.server {
            Some(server) => format!("{server}: {}", refused.text),
            None => refused.text,
        };
        Self::new(Code::Refused(refused.code), detail)
    }
}

impl Code {
    #[cfg(test)]
    const OWN: [Self; 9] = [
        Self::Unauthorized,
        Self::NotFound,
        Self::MethodNotAllowed,
        Self::RequestInvalid,
        Self::BodyTooLarge,
        Self::RefAmbiguous,
        Self::HandoverRefused,
        Self::NotReady,
        Self::Unavailable,
    ];

    fn parts(self) -> (StatusCode, &'static str, &'static str) {
        match self {
            Self::Unauthorized => (StatusCode::UNAUTHORIZED, "unauthorized", "the admin token is needed"),
            Self::NotFound => (StatusCode::NOT_FOUND, "not_found", "nothing is here"),
            Self::MethodNotAllowed => {
                (StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", "the method is not allowed here")
            }
            Self::RequestInvalid => (StatusCode::BAD_REQUEST, "request_invalid", "the request is malformed"),
            Self::BodyTooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", "the body is too large"),
            Self::RefAmbiguous => (StatusCode::CONFLICT, "ref_ambiguous", "more than one session has this ref"),
            Self::HandoverRefused => (StatusCode::CONFLICT, "handover_refused", "the gateway goes on as it was"),
            Self::NotReady => (StatusCode::SERVICE_UNAVAILABLE, "not_ready", "no new work is taken"),
            Self::Unavailable => (StatusCode::SERVICE_UNAVAILABLE, "unavailable", "this can't be answered now"),
            Self::Refused(code) => (status_of(code), code.name(), "the gateway refused it"),
        }
    }
}

/// What a client is told inside HTTP 200 about a server is a failure behind the gateway here.
fn status_of(code: code::Code) -> StatusCode {
    let status = StatusCode::from_u16(code.http_status(TerminalStatus::Distinct));
    match status {
        Ok(status) if !status.is_success() => status,
        Ok(_) | Err(_) => StatusCode::BAD_GATEWAY,
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let (status, code, title) = self.code.parts();
        let document = Document {
            status: status.as_u16(),
            code: code.to_owned(),
            title: title.to_owned(),
            detail: self.detail,
            sessions: self.sessions,
        };
        let mut response = (status, Json(document)).into_response();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(MEDIA_TYPE));
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"mainstay admin\""));
        }
        if matches!(status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS) {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

/// What a problem document is.
pub(super) const MEDIA_TYPE: &str = "application/problem+json";

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn every_code_is_explained() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/errors/README.md");
        let text = std::fs::read_to_string(path).unwrap();
        for code in Code::OWN {
            let (status, name, _) = code.parts();
            assert!(text.contains(&format!("| `{name}` | {} |", status.as_u16())), "`{name}` is not explained");
        }
    }

    #[test]
    fn a_refusal_of_the_engine_keeps_its_word_and_never_looks_like_success() {
        for code in code::Code::ALL {
            let (status, name, _) = Code::Refused(code).parts();
            assert_eq!(name, code.name());
            assert!(status.is_client_error() || status.is_server_error(), "{name}: {status}");
        }
        let parts = Code::Refused(code::Code::SessionDraining).parts();
        assert_eq!((parts.0, parts.1), (StatusCode::CONFLICT, "session_draining"));
    }

    #[test]
    fn an_ambiguous_ref_is_a_conflict_with_its_candidates() {
        let candidates =
            [serde_json::json!({"ref": "s-0123456789", "server": "a"}), serde_json::json!({"server": "b"})];
        let problem = Problem::ambiguous("2 sessions are called s-0123456789", &candidates);
        assert_eq!(problem.sessions, candidates);
        assert_eq!(problem.into_response().status(), StatusCode::CONFLICT);
    }
}
