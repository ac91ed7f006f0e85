//! A server's wish for input, as the questions that a legacy client knows (2026-07-28, Multi Round-Trip Requests).

use bytes::Bytes;
use mainstay_core::wire::envelope::{self, Span, walk};
use mainstay_core::wire::method::Method;
use mainstay_core::wire::modern::edit::{self, Change};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::{Bridge, QUESTION_BOUND, State};
use crate::wire::lock;

/// A question, and where its answer goes.
pub(super) struct Asked {
    /// The raw key of the server's own.
    key: Bytes,
    /// The text of the id that the client is asked under.
    id: Box<str>,
    answer: oneshot::Receiver<Bytes>,
}

/// One round: the questions that are open, and what is to be sent back.
pub(super) struct Round {
    asked: Vec<Asked>,
    /// Key and raw result of those that were answered.
    answered: Vec<(Bytes, Bytes)>,
    /// The raw state that the server wants back.
    state: Option<Bytes>,
    deadline: Instant,
}

/// Why there can be no next round: told to the client as the server's inability.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NoInput(pub(super) String);

impl Bridge {
    /// The round that the result at `result` of `response` asks for, and the questions as they go to the client.
    pub(super) fn begin_round(&self, response: &Bytes, result: &Span) -> Result<(Round, Vec<Bytes>), NoInput> {
        let state = envelope::member(response, result, "requestState").map(|span| response.slice(span));
        let requests = envelope::member(response, result, "inputRequests");
        if state.is_none() && requests.is_none() {
            return Err(NoInput("the server asks for input and does not say which".to_owned()));
        }
        let mut round =
            Round { asked: Vec::new(), answered: Vec::new(), state, deadline: Instant::now() + QUESTION_BOUND };
        let mut questions = Vec::new();
        for (key, request) in requests.into_iter().flat_map(|span| walk::members(response, &span).collect::<Vec<_>>()) {
            if questions.len() == QUESTIONS_MAX {
                return Err(NoInput(format!("the server asks more than {QUESTIONS_MAX} questions at once")));
            }
            let id = self.upstreams.own_id();
            questions.push(self.question(response, &request, &id)?);
            round.asked.push(self.expect(response.slice(key), &id));
        }
        Ok((round, questions))
    }

    /// Waits for the answer to the question `id`.
    fn expect(&self, key: Bytes, id: &[u8]) -> Asked {
        let (sender, answer) = oneshot::channel();
        let id: Box<str> = crate::wire::id_text(id).into();
        lock(&self.state).questions.insert(id.clone(), sender);
        Asked { key, id, answer }
    }

    /// The request at `request` of `response` as a question under `id`, if the client has said that it takes such.
    fn question(&self, response: &[u8], request: &Span, id: &[u8]) -> Result<Bytes, NoInput> {
        let part = |key: &str| envelope::member(response, request, key);
        let method = part("method").and_then(|span| envelope::unescape(&response[span])).unwrap_or_default();
        let params = part("params").filter(|span| response[span.start] == b'{').map(|span| &response[span]);
        let mode = params.and_then(|params| {
            let span = envelope::member(params, &(0..params.len()), "mode")?;
            envelope::unescape(&params[span])
        });
        let by_url = mode.as_deref() == Some("url");
        let needs = match &*method {
            "elicitation/create" if by_url => ["elicitation", "url"].as_slice(),
            "elicitation/create" => ["elicitation"].as_slice(),
            "sampling/createMessage" => ["sampling"].as_slice(),
            "roots/list" => ["roots"].as_slice(),
            _ => return Err(NoInput(format!("the server asks for `{method}`, which no client knows"))),
        };
        if !self.client_has(needs) {
            let what = needs.join(".");
            return Err(NoInput(format!("the server asks for input that this client can't give: {what}")));
        }
        let params = match params {
            // The client's era names such a question by an id of its own, the server's does not any more.
            Some(params) if by_url => {
                let edits = edit::object(params, &(0..params.len()), &[("elicitationId", Change::Set(id))]);
                Some(edit::apply(params, edits))
            }
            Some(params) => Some(params.to_vec()),
            None => None,
        };
        Ok(envelope::request_message(id, &method, params.as_deref()).into())
    }

    /// Whether the client has declared the capability at `path`.
    fn client_has(&self, path: &[&str]) -> bool {
        let all = &self.capabilities;
        let found = path.iter().try_fold(0..all.len(), |at, name| envelope::member(all, &at, name));
        found.is_some_and(|span| all[span.start] == b'{' || all[span] == *b"true")
    }

    /// Nobody waits for the answers of `round` any more.
    pub(super) fn abandon(&self, round: &Round) {
        let State { questions, .. } = &mut *lock(&self.state);
        for asked in &round.asked {
            questions.remove(&asked.id);
        }
    }
}

impl Round {
    /// Whether there is nothing to wait for: the server wants to be asked again, no more.
    pub(super) fn is_pause(&self) -> bool {
        self.asked.is_empty() && self.answered.is_empty()
    }

    /// Waits for all answers. Cancel-safe.
    pub(super) async fn answers(&mut self) -> Result<(), NoInput> {
        while let Some(asked) = self.asked.first_mut() {
            let waited = tokio::time::timeout_at(self.deadline, &mut asked.answer).await;
            let answer = match waited {
                Ok(Ok(answer)) => answer,
                Ok(Err(_)) => return Err(NoInput("the session ended before its client answered".to_owned())),
                Err(_) => return Err(NoInput("the client did not answer in time".to_owned())),
            };
            let key = self.asked.remove(0).key;
            self.answered.push((key, result_of(&answer)?));
        }
        Ok(())
    }

    /// `message` as it is sent again, under `id`, with the answers and the server's state in it.
    pub(super) fn next_message(&self, message: &[u8], id: &[u8]) -> Bytes {
        let Ok(scanned) = envelope::scan(message) else { return Bytes::copy_from_slice(message) };
        let mut responses = vec![b'{'];
        for (index, (key, result)) in self.answered.iter().enumerate() {
            if index > 0 {
                responses.push(b',');
            }
            responses.extend_from_slice(key);
            responses.push(b':');
            responses.extend_from_slice(result);
        }
        responses.push(b'}');
        let changes = [
            ("inputResponses", if self.is_pause() { Change::Remove } else { Change::Set(&responses) }),
            ("requestState", self.state.as_deref().map_or(Change::Remove, Change::Set)),
        ];
        let mut edits = scanned.params.map(|params| edit::object(message, &params, &changes)).unwrap_or_default();
        edits.extend(scanned.id.map(|span| (span, id.to_vec())));
        edit::apply(message, edits).into()
    }
}

/// Whether the server may ask for input in answer to a request of `method`.
pub(super) const fn may_ask(method: Method) -> bool {
    matches!(method, Method::ToolsCall | Method::PromptsGet | Method::ResourcesRead)
}

/// The raw result in a client's answer. An error has no form in which a modern server takes it.
fn result_of(answer: &Bytes) -> Result<Bytes, NoInput> {
    let scanned = envelope::scan(answer).map_err(|_| NoInput("the client's answer is no message".to_owned()))?;
    if let Some(result) = scanned.result {
        return Ok(answer.slice(result));
    }
    let text = scanned.error.and_then(|error| envelope::member(answer, &error, "message"));
    let text = text.and_then(|span| envelope::unescape(&answer[span]));
    Err(NoInput(format!("the client could not give the input that the server asks for: {}", text.unwrap_or_default())))
}

/// Questions of one round.
const QUESTIONS_MAX: usize = 16;
