//! Calls that wait for their clients: what the server asks becomes the result of the request, the call stays where it is,
//! and the client comes back with the answers (2026-07-28, Multi Round-Trip Requests).
//!
//! Where a call waits is told to nobody but its client, sealed. The call's stream and its questions are in the journal, so a
//! client that comes back finds them whatever became of the worker; an answer goes the way of all answers, once (R6).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::call::{EventId, RoutedId, StreamId};
use mainstay_core::code::Code;
use mainstay_core::id::{SessionKey, base64url, from_base64url};
use mainstay_core::wire::envelope::{member, result_message, scan, unescape};
use mainstay_core::wire::modern::asking::{self, InputRequest};
use mainstay_core::wire::modern::{Meta, crossing};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::course::{Asker, Course};
use super::passage::{Passage, abandon};
use crate::engine::call::Request;
use crate::engine::live::Live;
use crate::engine::seal::{self, Binding, Kind, Unsealed};
use crate::engine::stream::Reader;
use crate::engine::{Caller, Engine, Refused, Served};
use crate::runtime::spawn;

/// A question that a client is to answer.
pub(super) struct Pending {
    pub(super) id: RoutedId,
    /// Its place in the call's stream.
    pub(super) place: u64,
    pub(super) request: InputRequest,
}

/// Questions that are gathered for one answer.
pub(super) struct Gathered {
    pub(super) questions: Vec<Pending>,
    /// When they are asked at the latest.
    pub(super) until: Instant,
}

impl Gathered {
    pub(super) fn new() -> Self {
        Self { questions: Vec::new(), until: Instant::now() + GATHER_MAX }
    }
}

/// What a client brings back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Held {
    /// A call waits for it.
    Parked(Parked),
    /// No call waits: the request is carried out anew, since the server has refused it until its client has done what it
    /// was asked.
    Anew,
}

/// Where a call waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parked {
    /// The conversation's key.
    session: String,
    /// The stream of the call: epoch and number.
    stream: (u64, u64),
    /// The raw id under which the call runs.
    id: String,
    /// Behind which event of the stream it goes on.
    after: u64,
    questions: Vec<Question>,
}

/// A question that was put to the client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Question {
    /// What it was dressed with: epoch and number.
    asked: (u64, u64),
    /// The server's own raw id.
    original: String,
    /// Its place in the call's stream.
    place: u64,
    answered: bool,
}

impl Question {
    fn of(pending: &Pending) -> Self {
        Self {
            asked: (pending.id.stream.epoch, pending.id.stream.number),
            original: String::from_utf8_lossy(&pending.id.original).into_owned(),
            place: pending.place,
            answered: false,
        }
    }

    fn stream(&self) -> StreamId {
        StreamId { epoch: self.asked.0, number: self.asked.1 }
    }

    fn key(&self) -> String {
        key_of(self.stream())
    }
}

/// The key of a question in `inputRequests`.
pub(super) fn key_of(asked: StreamId) -> String {
    format!("q{asked}")
}

impl Parked {
    pub(super) fn new(session: SessionKey, call: (StreamId, &[u8]), after: u64, pending: &[Pending]) -> Self {
        Self {
            session: base64url(session.as_bytes()),
            stream: (call.0.epoch, call.0.number),
            id: String::from_utf8_lossy(call.1).into_owned(),
            after,
            questions: pending.iter().map(Question::of).collect(),
        }
    }

    fn session(&self) -> Option<SessionKey> {
        Some(SessionKey::from_bytes(from_base64url(&self.session)?.try_into().ok()?))
    }

    fn stream(&self) -> StreamId {
        StreamId { epoch: self.stream.0, number: self.stream.1 }
    }

    /// Behind which event the call's stream is read on: what was not answered is asked again.
    fn resumes_after(&self) -> u64 {
        let open = self.questions.iter().filter(|question| !question.answered).map(|question| question.place - 1);
        open.min().unwrap_or(self.after).min(self.after)
    }
}

/// What seals the state of `request`, whose it is, and for how long.
pub(super) struct Sealer {
    caller: Caller,
    server: mainstay_core::id::ServerName,
    about: [u8; 32],
}

impl Sealer {
    pub(super) fn of(caller: &Caller, served: &Served, request: &Request) -> Self {
        let about = seal::about(&request.message, &request.envelope);
        Self { caller: caller.clone(), server: served.server.name.clone(), about }
    }

    fn binding(&self) -> Binding<'_> {
        Binding { kind: Kind::Parked, principal: &self.caller.principal, server: &self.server, about: &self.about }
    }

    pub(super) fn seal(&self, engine: &Engine, held: &Held) -> String {
        let state = serde_json::to_vec(held).unwrap_or_default();
        seal::seal(&engine.keyring, &self.binding(), engine.now().plus(PARKED_MAX), &state)
    }

    fn unseal(&self, engine: &Engine, text: &str) -> Result<Held, Unsealed> {
        if text.len() > STATE_CHARS_MAX {
            return Err(Unsealed::Foreign);
        }
        let state = seal::unseal(&engine.keyring, &self.binding(), engine.now(), text)?;
        serde_json::from_slice(&state).map_err(|_| Unsealed::Foreign)
    }
}

impl Engine {
    /// What the client of `request` brings back; `None` if it brings nothing.
    ///
    /// # Errors
    /// Why it is not taken, for people: [`INVALID_PARAMS`](mainstay_core::wire::modern::INVALID_PARAMS), HTTP 400.
    pub fn brought(&self, caller: &Caller, served: &Served, request: &Request) -> Result<Option<Held>, String> {
        let Some(params) = request.envelope.params.as_ref().filter(|_| asking::may_ask(request.method)) else {
            return Ok(None);
        };
        let Some(span) = member(&request.message, params, "requestState") else { return Ok(None) };
        let text = unescape(&request.message[span]).ok_or("`requestState` is not a string")?;
        let held = Sealer::of(caller, served, request).unseal(self, &text);
        held.map(Some)
            .map_err(|error| format!("`requestState` is refused: {error}; send the request without it to begin anew"))
    }

    /// Goes on with a call that waits, under another request of its client, with the answers that this brings.
    ///
    /// Dropping the future, once it has found the call, cancels that at the server.
    ///
    /// # Errors
    /// The conversation is over, or can't be restored now; [`Code::OutcomeUnknown`] if nobody knows of the call any more.
    pub async fn travel_on(
        self: &Arc<Self>,
        caller: &Caller,
        served: &Served,
        (request, meta): (&Request, &Meta),
        mut parked: Parked,
    ) -> Result<Course, Refused> {
        let key = parked.session().ok_or_else(gone)?;
        let entry = self.find_key(key, caller, served).await.map_err(|refused| match super::is_over(refused.code) {
            true => gone(),
            false => refused,
        })?;
        let live = Arc::clone(&entry);
        let answers: Vec<_> =
            parked.questions.iter_mut().filter_map(|question| take_answer(question, request)).collect();
        let after = parked.resumes_after();
        let answered = parked.questions.iter().filter(|asked| asked.answered).map(Question::stream).collect();
        let passage = self.unpark(&live, (parked.stream(), parked.id.clone().into()), after, answered).await?;
        for answer in answers {
            if let Ok(envelope) = scan(&answer) {
                self.answer(&live, &answer, &envelope).await;
            }
        }
        let asker = Asker::of(caller, served, request, meta);
        Ok(Course::new(self, asker, passage, None))
    }

    /// A call that waits, to be read on behind the event `after`; `answered` are its questions that need no answer any more.
    ///
    /// Cancel-safe: once begun it goes on, and a call that is found for nobody is cancelled. In between nobody would see to
    /// it.
    pub(super) async fn unpark(
        self: &Arc<Self>,
        live: &Arc<Live>,
        (stream, id): (StreamId, Bytes),
        after: u64,
        answered: BTreeSet<StreamId>,
    ) -> Result<Passage, Refused> {
        let (engine, live) = (Arc::clone(self), Arc::clone(live));
        let coming = spawn(async move {
            let event =
                EventId { tag: live.key.tag(), stream, sequence: after, last: false, request: Some(id.clone()) };
            let cursor = event.to_string();
            match engine.come_back(&live, event, cursor).await {
                Ok(reader) => Ok(Passage::new(&engine, &live, id).reading(reader, after, answered)),
                Err(refused) if refused.code == Code::EventUnknown => Err(gone()),
                Err(refused) => {
                    if let Some(stream) = live.stream(stream) {
                        park(&engine, &live, id, stream.read(Some(after), None));
                    }
                    Err(refused)
                }
            }
        });
        coming.await.map_err(|_| Refused::new(Code::Internal, "the call could not be gone on with in the gateway"))?
    }
}

/// The answer to `question` that `request` brings, as the client of a session would send it.
fn take_answer(question: &mut Question, request: &Request) -> Option<Bytes> {
    let answer =
        asking::answer_to(&request.message, &request.envelope, &question.key()).filter(|_| !question.answered)?;
    question.answered = true;
    let original = Bytes::from(question.original.clone());
    let id = RoutedId { stream: question.stream(), original }.encode();
    Some(result_message(&id, answer).into())
}

/// Waits beside a call that waits for its client, and cancels it if that does not come back in time.
pub(super) fn park(engine: &Arc<Engine>, live: &Arc<Live>, id: Bytes, reader: Reader) {
    let (engine, live) = (Arc::clone(engine), Arc::clone(live));
    // A worker that comes after this one waits for the rest of the time.
    reader.note_wait();
    spawn(async move {
        tokio::select! {
            () = reader.displaced() => return,
            () = live.ended.wait() => return,
            () = tokio::time::sleep(PARKED_MAX) => {}
        }
        abandon(&engine, &live, &id, Some(reader)).await;
    });
}

fn gone() -> Refused {
    Refused::new(Code::OutcomeUnknown, "the call that waited is not there any more; whether it was executed is unknown")
}

/// What the server calls itself: raw JSON.
pub(super) fn server_info(engine: &Engine, live: &Live) -> Option<Bytes> {
    let said = engine.introduced(live)?;
    crossing::server_info(&said).map(|info| said.slice_ref(info))
}

/// How long a call waits for its client to come back: long enough for a person, not for ever.
pub(super) const PARKED_MAX: Duration = Duration::from_mins(10);
/// How long a question waits for others that the server asks in the same breath.
const GATHER_MAX: Duration = Duration::from_millis(10);
/// More than any state of the gateway's own has.
const STATE_CHARS_MAX: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    fn parked() -> Parked {
        let question = |number, place, answered| Question {
            asked: (3, number),
            original: "\"ask-1\"".to_owned(),
            place,
            answered,
        };
        let questions = vec![question(8, 2, true), question(9, 4, false), question(10, 5, false)];
        Parked { session: base64url(&[7; 32]), stream: (3, 1), id: "\"c3.1\"".to_owned(), after: 5, questions }
    }

    #[test]
    fn e3_a_call_is_read_on_where_the_first_open_question_stands() {
        let mut parked = parked();
        assert_eq!(parked.resumes_after(), 3);
        parked.questions.iter_mut().for_each(|question| question.answered = true);
        assert_eq!(parked.resumes_after(), 5);
        assert_eq!(parked.session(), Some(SessionKey::from_bytes([7; 32])));
        let read: Held = serde_json::from_slice(&serde_json::to_vec(&Held::Parked(parked.clone())).unwrap()).unwrap();
        assert_eq!(read, Held::Parked(parked));
    }

    #[test]
    fn e3_each_answer_leads_to_its_question_and_none_is_taken_twice() {
        let message = Bytes::from_static(
            br#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"inputResponses":{"q3.8":{"a":1},"q3.9":{"b":1.0},"q3.10":7}}}"#,
        );
        let envelope = scan(&message).expect("a message");
        let request = Request { message, envelope, method: mainstay_core::wire::method::Method::ToolsCall };
        let mut parked = parked();
        let answers: Vec<_> = parked.questions.iter_mut().filter_map(|asked| take_answer(asked, &request)).collect();
        assert_eq!(answers, [br#"{"jsonrpc":"2.0","id":"3.9.\"ask-1\"","result":{"b":1.0}}"#.as_slice()]);
        assert_eq!(parked.resumes_after(), 4, "the third is asked again");
    }
}
