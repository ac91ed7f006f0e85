//! Requests of a legacy client that a modern server has no word for: they are answered in its place.

use bytes::Bytes;
use mainstay_core::wire::envelope;
use mainstay_core::wire::method::Method;
use mainstay_core::wire::modern::{INVALID_PARAMS, METHOD_NOT_FOUND};

use super::Bridge;
use crate::call::Call;
use crate::failure::{Blame, Failure};
use crate::wire::lock;

impl Bridge {
    /// The answer to `call` if it is one of those; what it sets is remembered by who called.
    pub(super) fn answer_here(&self, call: &Call) -> Result<Option<Bytes>, Failure> {
        let (key, needs) = match call.method {
            Method::SetLevel => ("level", ["logging"].as_slice()),
            Method::Subscribe | Method::Unsubscribe => ("uri", ["resources", "subscribe"].as_slice()),
            Method::Initialize
            | Method::Initialized
            | Method::Ping
            | Method::Cancelled
            | Method::Progress
            | Method::ToolsList
            | Method::ToolsCall
            | Method::PromptsList
            | Method::PromptsGet
            | Method::ResourcesList
            | Method::ResourceTemplatesList
            | Method::ResourcesRead
            | Method::Complete
            | Method::Discover
            | Method::Other => return Ok(None),
        };
        if !self.declares(needs) {
            let text = "the server does not have this method";
            return Ok(Some(envelope::error_message(Some(&call.id), METHOD_NOT_FOUND, text, None).into()));
        }
        let scanned = envelope::scan(&call.message).map_err(|_| self.protocol("the request is no message"))?;
        let value = scanned.params.and_then(|params| envelope::member(&call.message, &params, key));
        let value = value.and_then(|span| envelope::unescape(&call.message[span]));
        let valid = value.is_some_and(|text| call.method != Method::SetLevel || LEVELS.contains(&&*text));
        let answer = match valid {
            true => envelope::result_message(&call.id, b"{}"),
            false => {
                let text = format!("`params.{key}` is missing or not valid");
                envelope::error_message(Some(&call.id), INVALID_PARAMS, &text, None)
            }
        };
        Ok(Some(answer.into()))
    }

    /// Whether the server has the capability at `path`; a flag at its end must be true.
    pub(super) fn declares(&self, path: &[&str]) -> bool {
        let state = lock(&self.state);
        let Some(opened) = &state.kept.opened else { return false };
        let result = &opened.result;
        let capabilities = envelope::member(result, &(0..result.len()), "capabilities");
        let found = path.iter().try_fold(capabilities, |at, name| Some(envelope::member(result, &at?, name)));
        found.flatten().is_some_and(|span| result[span.clone()] != *b"false" && !envelope::is_null(&result[span]))
    }
}

/// The levels of log messages (2025-11-25, Logging).
const LEVELS: [&str; 8] = ["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"];
