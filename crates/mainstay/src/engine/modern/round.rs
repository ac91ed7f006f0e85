//! The state that a modern server hands to a client in one round of a request, to have it back in the next (2026-07-28,
//! Multi Round-Trip Requests, Request State).
//!
//! It comes back from whoever likes to send it, so it is sealed on its way out and opened on its way back: for the same
//! principal, the same server and the same request, and for a while. The server gets the bytes that it gave out, and never
//! sees a state that was changed, or is somebody else's. Nothing is remembered for that, so any worker opens what an
//! earlier one has sealed.

use std::time::Duration;

use bytes::Bytes;
use mainstay_core::id::ServerName;
use mainstay_core::principal::Principal;
use mainstay_core::time::Timestamp;
use mainstay_core::wire::envelope::{self, Envelope};
use mainstay_core::wire::method::Method;
use mainstay_core::wire::modern::ResultType;
use mainstay_core::wire::modern::edit::{self, Change};
use mainstay_store::keys::Keyring;
use thiserror::Error;

use crate::engine::call::Request;
use crate::engine::seal::{self, Binding, Kind, Unsealed};
use crate::engine::{Caller, Served};

/// One round of a request that may take several: whose it is, where it goes, and what it says.
pub struct Round {
    principal: Principal,
    server: ServerName,
    message: Bytes,
    envelope: Envelope,
}

/// Why the state in a request does not reach its server: [`INVALID_PARAMS`](mainstay_core::wire::modern::INVALID_PARAMS),
/// HTTP 400.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum StateFault {
    /// It is no text.
    #[error("`requestState` is not a string")]
    NoText,
    /// It can't be opened.
    #[error("`requestState` is refused: {0}; send the request without it to begin anew")]
    Unsealed(#[source] Unsealed),
}

/// A state of a server that is too large to be handed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("its `requestState` is larger than {STATE_BYTES_MAX} bytes")]
pub struct StateTooLarge;

impl Round {
    /// The round that `request` is; `None` if its method has no rounds (2026-07-28, Multi Round-Trip Requests, Supported
    /// Requests).
    pub fn of(caller: &Caller, served: &Served, request: &Request) -> Option<Self> {
        matches!(request.method, Method::ToolsCall | Method::PromptsGet | Method::ResourcesRead).then(|| Self {
            principal: caller.principal.clone(),
            server: served.server.name.clone(),
            message: request.message.clone(),
            envelope: request.envelope.clone(),
        })
    }

    /// The request for its server: with the state that the server gave out in place of the sealed one that the client
    /// brings; as it is if it brings none.
    ///
    /// # Errors
    /// Any [`StateFault`]. The server must not see the request.
    pub fn opened(&self, ring: &Keyring, now: Timestamp) -> Result<Bytes, StateFault> {
        let Some(params) = &self.envelope.params else { return Ok(self.message.clone()) };
        let Some(span) = envelope::member(&self.message, params, STATE) else { return Ok(self.message.clone()) };
        let brought = &self.message[span];
        let state = match brought {
            b"null" => brought.to_vec(),
            _ => {
                let text = envelope::unescape(brought).ok_or(StateFault::NoText)?;
                if text.len() > SEALED_CHARS_MAX {
                    return Err(StateFault::Unsealed(Unsealed::Foreign));
                }
                self.bound(|binding| seal::unseal(ring, binding, now, &text)).map_err(StateFault::Unsealed)?
            }
        };
        // One that stands there several times stands there once afterwards: the one that was opened.
        let edits = edit::object(&self.message, params, &[(STATE, Change::Set(&state))]);
        Ok(if edits.is_empty() { self.message.clone() } else { edit::apply(&self.message, edits).into() })
    }

    /// The server's `answer` for the client: with its state sealed, if it asks for another round and gives one; as it is in
    /// any other case.
    ///
    /// # Errors
    /// [`StateTooLarge`]: the client must not get the answer.
    pub fn sealed(&self, ring: &Keyring, now: Timestamp, answer: Bytes) -> Result<Bytes, StateTooLarge> {
        let result = envelope::scan(&answer).ok().and_then(|scanned| scanned.result);
        let Some(result) = result.filter(|result| ResultType::of(&answer, result) == ResultType::InputRequired) else {
            return Ok(answer);
        };
        let state = envelope::member(&answer, &result, STATE).map(|span| &answer[span]);
        let Some(state) = state.filter(|state| state.starts_with(b"\"")) else { return Ok(answer) };
        if state.len() > STATE_BYTES_MAX {
            return Err(StateTooLarge);
        }
        // As the server wrote it, escapes and all, so that it gets the same bytes back.
        let text = self.bound(|binding| seal::seal(ring, binding, now.plus(STATE_LIFE), state));
        let edits = edit::object(&answer, &result, &[(STATE, Change::Set(format!("\"{text}\"").as_bytes()))]);
        Ok(edit::apply(&answer, edits).into())
    }

    fn bound<T>(&self, act: impl FnOnce(&Binding<'_>) -> T) -> T {
        let about = seal::about(&self.message, &self.envelope);
        let (principal, server) = (&self.principal, &self.server);
        act(&Binding { kind: Kind::ServerState, principal, server, about: &about })
    }
}

const STATE: &str = "requestState";
/// How large a server's state may be, with its quotes. It comes back with each request.
const STATE_BYTES_MAX: usize = 256 * 1024;
/// What a sealed one can't be longer than: base64 and what the seal adds.
const SEALED_CHARS_MAX: usize = STATE_BYTES_MAX / 3 * 4 + 128;
/// How long a state can be brought back: long enough for a person who is asked in the evening. A server that wants it
/// shorter says so in its own state.
const STATE_LIFE: Duration = Duration::from_hours(24);

#[cfg(test)]
mod tests {
    use mainstay_core::wire::envelope::scan;

    use super::*;

    const CALL: &str = r#"{"jsonrpc":"2.0", "id":1,"method":"tools/call","params":{"name":"t","arguments":{"n":1.0}}}"#;
    const ASKS: &str =
        r#"{"jsonrpc":"2.0","id":1,"result":{"n":1.0,"resultType":"input_required" ,"requestState":"a\u00fc\/1"}}"#;

    fn ring() -> Keyring {
        Keyring::ephemeral(&mut |bytes: &mut [u8]| bytes.fill(7))
    }

    fn at(hours: u64) -> Timestamp {
        Timestamp::from_unix_millis(0).plus(Duration::from_hours(hours))
    }

    fn round(name: &str, server: &str, message: &str) -> Round {
        let message = Bytes::copy_from_slice(message.as_bytes());
        let envelope = scan(&message).expect("a message");
        let server = ServerName::parse(server).expect("a name");
        Round { principal: Principal::Token(name.into()), server, message, envelope }
    }

    fn text(bytes: &Bytes) -> &str {
        std::str::from_utf8(bytes).expect("text")
    }

    /// The next round of a message, with this raw state.
    fn with_state(message: &str, state: &str) -> String {
        let params = format!("\"params\":{{\"requestState\":{state},\"inputResponses\":{{\"k\":{{}}}},");
        message.replace("\"params\":{", &params)
    }

    fn given_out(ring: &Keyring) -> String {
        let sealed = round("amy", "files", CALL).sealed(ring, at(0), Bytes::from_static(ASKS.as_bytes()));
        let sealed = sealed.expect("it is small");
        let (before, rest) = text(&sealed).split_once("\"requestState\":").expect("a state");
        assert_eq!(before, ASKS.split_once("\"requestState\":").expect("a state").0, "nothing else is changed");
        rest.strip_suffix("}}").expect("the end").to_owned()
    }

    #[test]
    fn e2_a_server_gets_the_state_back_that_it_gave_out_byte_by_byte_and_the_client_can_not_read_it() {
        let ring = ring();
        let state = given_out(&ring);
        assert!(!state.contains("00fc") && state.starts_with('"'), "{state}");
        let opened = round("amy", "files", &with_state(CALL, &state)).opened(&ring, at(24)).expect("its own");
        assert_eq!(text(&opened), with_state(CALL, r#""a\u00fc\/1""#));
    }

    #[test]
    fn e2_a_state_is_refused_that_was_changed_or_is_old_or_is_somebody_elses_or_for_something_else() {
        let ring = ring();
        let state = given_out(&ring);
        let next = with_state(CALL, &state);
        let foreign = Err(StateFault::Unsealed(Unsealed::Foreign));
        let opened = |name: &str, server: &str, message: &str| round(name, server, message).opened(&ring, at(1));
        assert_eq!(opened("bob", "files", &next), foreign, "another principal");
        assert_eq!(opened("amy", "mail", &next), foreign, "another server");
        assert_eq!(opened("amy", "files", &next.replace("\"t\"", "\"u\"")), foreign, "another tool");
        assert_eq!(opened("amy", "files", &next.replace("1.0", "2.0")), foreign, "other arguments");
        assert_eq!(opened("amy", "files", &next.replace("tools/call", "prompts/get")), foreign, "another method");
        assert_eq!(opened("amy", "files", &with_state(CALL, "\"plain\"")), foreign, "the server's own");
        let long = format!("\"{}\"", "A".repeat(SEALED_CHARS_MAX + 1));
        assert_eq!(opened("amy", "files", &with_state(CALL, &long)), foreign, "too long");
        assert_eq!(opened("amy", "files", &with_state(CALL, "7")), Err(StateFault::NoText));
        let late = round("amy", "files", &next).opened(&ring, at(25));
        assert_eq!(late, Err(StateFault::Unsealed(Unsealed::Expired)));
    }

    #[test]
    fn e2_no_state_gets_by_that_was_not_opened() {
        let ring = ring();
        let state = given_out(&ring);
        for (first, second, passed) in [("null", "\"forged\"", "null"), (&*state, "\"forged\"", r#""a\u00fc\/1""#)] {
            let twice = format!("{first},\"request\\u0053tate\":{second}");
            let opened = round("amy", "files", &with_state(CALL, &twice)).opened(&ring, at(1)).expect("it opens");
            assert_eq!(text(&opened), with_state(CALL, passed));
        }
    }

    #[test]
    fn e2_what_has_no_state_and_what_is_no_question_is_left_alone() {
        let ring = ring();
        let first = round("amy", "files", CALL);
        assert_eq!(text(&first.opened(&ring, at(0)).expect("nothing is brought")), CALL);
        for answer in [
            r#"{"jsonrpc":"2.0","id":1,"result":{"resultType":"complete","requestState":"s"}}"#,
            r#"{"jsonrpc":"2.0","id":1,"result":{"resultType":"input_required","inputRequests":{}}}"#,
            r#"{"jsonrpc":"2.0","id":1,"error":{"code":1,"message":"requestState"}}"#,
        ] {
            let sealed = first.sealed(&ring, at(0), Bytes::from_static(answer.as_bytes()));
            assert_eq!(sealed.as_deref(), Ok(answer.as_bytes()));
        }
    }

    #[test]
    fn e2_a_state_grows_by_its_seal_alone_and_only_so_far() {
        let (ring, first) = (ring(), round("amy", "files", CALL));
        let asks = |bytes: usize| Bytes::from(ASKS.replace(r"a\u00fc\/1", &"s".repeat(bytes)));
        let most = first.sealed(&ring, at(0), asks(STATE_BYTES_MAX - 2)).expect("as large as may be");
        let state = text(&most).split_once("\"requestState\":").expect("a state").1.len();
        assert!(state <= SEALED_CHARS_MAX + 4, "{state}");
        assert_eq!(first.sealed(&ring, at(0), asks(STATE_BYTES_MAX - 1)), Err(StateTooLarge));
    }
}
