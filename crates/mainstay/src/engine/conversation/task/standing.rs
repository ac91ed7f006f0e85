//! What a client does with its task: it looks how that stands, answers what it waits for, and cancels it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use mainstay_core::call::{RoutedId, StreamId};
use mainstay_core::code::Code;
use mainstay_core::time::Timestamp;
use mainstay_core::wire::envelope::{Envelope, Kind, member, notification_message, result_message, scan};
use mainstay_core::wire::method::Method;
use mainstay_core::wire::modern::asking::{self, InputRequest};
use mainstay_core::wire::modern::tasks::{self, Standing};
use mainstay_core::wire::modern::{Meta, crossing};
use mainstay_store::journal::{Content, Ending, Entry};

use super::{Found, TaskFault};
use crate::engine::call::Request;
use crate::engine::conversation::course::{own_refusal, refusal};
use crate::engine::conversation::passage::decline;
use crate::engine::conversation::rounds::{key_of, server_info};
use crate::engine::live::Live;
use crate::engine::stream::Stream;
use crate::engine::{Caller, Engine, Refused, Served};

/// A question of the server on the stream of a task.
struct Open {
    asked: StreamId,
    message: Bytes,
    envelope: Envelope,
}

/// What the stream of a task says.
#[derive(Default)]
struct Heard {
    at: Timestamp,
    /// The newest word of how far it is: a raw JSON string.
    said: Option<Bytes>,
    questions: BTreeMap<StreamId, Open>,
    response: Option<(Bytes, Envelope)>,
}

impl Heard {
    fn of(messages: Vec<(Timestamp, Bytes)>) -> Self {
        let mut heard = Self::default();
        for (at, message) in messages {
            heard.at = heard.at.max(at);
            if let Ok(envelope) = scan(&message) {
                heard.take(message, envelope);
            }
        }
        heard
    }

    fn take(&mut self, message: Bytes, envelope: Envelope) {
        let part = |name: &str| envelope.params.as_ref().and_then(|params| member(&message, params, name));
        match envelope.kind {
            Kind::Result | Kind::Error => self.response = Some((message, envelope)),
            Kind::Request => {
                let id = envelope.id.clone().and_then(|span| RoutedId::decode(&message[span]));
                let Some(asked) = id.map(|id| id.stream) else { return };
                self.questions.insert(asked, Open { asked, message, envelope });
            }
            Kind::Notification => match envelope.method_name(&message).map(|name| Method::of(&name)) {
                Some(Method::Progress) => {
                    let text =
                        part("message").filter(|span| span.len() <= SAID_BYTES_MAX && message[span.start] == b'"');
                    self.said = text.map(|span| message.slice(span)).or_else(|| self.said.take());
                }
                Some(Method::Cancelled) => {
                    let withdrawn = part("requestId").and_then(|span| RoutedId::decode(&message[span]));
                    withdrawn.inspect(|id| drop(self.questions.remove(&id.stream)));
                }
                Some(_) | None => {}
            },
        }
    }
}

impl Engine {
    /// How the task stands that `request` of `caller` names as `id`: the response.
    ///
    /// # Errors
    /// Any [`TaskFault`].
    pub async fn task_state(
        self: &Arc<Self>,
        (caller, served): (&Caller, &Served),
        (request, meta): (&Request, &Meta),
        id: &str,
    ) -> Result<Bytes, TaskFault> {
        let found = self.task(caller, served, id).await?;
        let capabilities = crossing::capabilities(&request.message, meta);
        let (standing, at) = self.standing(&found, &capabilities).await?;
        if standing.is_final() {
            // Kept as long as there is room for it, but no longer waited for.
            found.stream.take_all();
        }
        let info = server_info(self, &found.entry);
        Ok(tasks::state(&request.id(), &found.ticket.task(id, at), &standing, info.as_deref()).into())
    }

    /// Gives the server the answers to its questions that `request` brings for the task that it names as `id`. What nobody
    /// asked, or was answered before, is dropped.
    ///
    /// # Errors
    /// Any [`TaskFault`].
    pub async fn update_task(
        self: &Arc<Self>,
        (caller, served): (&Caller, &Served),
        request: &Request,
        id: &str,
    ) -> Result<Bytes, TaskFault> {
        let found = self.task(caller, served, id).await?;
        let questions = Heard::of(found.stream.survey().messages).questions;
        for open in questions.into_values() {
            let answer = asking::answer_to(&request.message, &request.envelope, &key_of(open.asked));
            let (Some(answer), Some(asked)) = (answer, open.envelope.id) else { continue };
            let answer = Bytes::from(result_message(&open.message[asked], answer));
            if let Ok(envelope) = scan(&answer) {
                self.answer(&found.entry, &answer, &envelope).await;
            }
        }
        let info = server_info(self, &found.entry);
        Ok(tasks::acknowledged(&request.id(), info.as_deref()).into())
    }

    /// Cancels the task that `request` names as `id`. It stays cancelled once this has returned, whatever its server still
    /// says; one that is over stays as it is.
    ///
    /// # Errors
    /// Any [`TaskFault`]; whether the server has heard of it is unknown then.
    pub async fn cancel_task(
        self: &Arc<Self>,
        (caller, served): (&Caller, &Served),
        request: &Request,
        id: &str,
    ) -> Result<Bytes, TaskFault> {
        let found = self.task(caller, served, id).await?;
        if Heard::of(found.stream.survey().messages).response.is_none() {
            // To its end, even if the client goes away meanwhile.
            let (engine, live, stream) = (Arc::clone(self), Arc::clone(&found.entry), Arc::clone(&found.stream));
            let call = Bytes::from(found.ticket.id.clone());
            let ending = crate::runtime::spawn(async move { engine.end_cancelled(&live, &stream, &call).await });
            ending.await.map_err(|_| Refused::new(Code::Internal, "the cancelling failed in the gateway"))??;
        }
        let info = server_info(self, &found.entry);
        Ok(tasks::acknowledged(&request.id(), info.as_deref()).into())
    }

    /// The server hears of it first: a worker that dies in between leaves a task that its client finds uncancelled, and
    /// cancels again, rather than work that goes on in silence.
    async fn end_cancelled(self: &Arc<Self>, live: &Arc<Live>, stream: &Stream, call: &[u8]) -> Result<(), Refused> {
        let is_foreign = stream.is_foreign();
        stream.close_as(Ending::Silent);
        let params = [b"{\"requestId\":".as_slice(), call, b"}"].concat();
        let message = Bytes::from(notification_message("notifications/cancelled", Some(&params)));
        if let Ok(envelope) = scan(&message) {
            self.notification(live, &message, &envelope).await;
        }
        let failed = |_| Refused::new(Code::Unavailable, "the cancelling can't be kept now; try again");
        let (session, claim, at) = (live.key, self.epoch, self.now());
        if is_foreign {
            self.journal.claim(session, stream.id(), claim, at).await.map_err(failed)?;
        }
        let entry = Entry { session, stream: stream.id(), claim, at, content: Content::Ended(Ending::Silent) };
        // Whether it is kept is seen below.
        let _ = self.journal.append(entry, None);
        self.journal.flush().await.map_err(failed)?;
        let record = self.journal.find(session, stream.id()).await.map_err(failed)?;
        if record.is_none_or(|record| record.ending.is_none()) {
            return Err(Refused::new(Code::Unavailable, "the cancelling can't be kept now; try again"));
        }
        stream.take_all();
        Ok(())
    }

    async fn standing(self: &Arc<Self>, found: &Found, capabilities: &[u8]) -> Result<(Standing, Timestamp), Refused> {
        let (live, stream) = (&*found.entry, &found.stream);
        let survey = stream.survey();
        let heard = Heard::of(survey.messages);
        if let Some((message, envelope)) = &heard.response {
            return Ok((landed(self, live, message, envelope), heard.at));
        }
        let mut ending = survey.ending;
        if survey.is_closed && ending.is_none() {
            let text = "how the task stands can't be said now; try again";
            let unavailable = || Refused::new(Code::Unavailable, text);
            let record = self.journal.find(live.key, stream.id()).await.map_err(|_| unavailable())?;
            ending = record.and_then(|record| record.ending);
            if ending.is_none() {
                return Err(unavailable());
            }
        }
        match ending {
            Some(Ending::Silent) => return Ok((Standing::Cancelled, heard.at)),
            Some(Ending::Answered) if survey.is_whole => {
                return Ok((lost(live, "its answer can't be read any more"), heard.at));
            }
            Some(Ending::Answered) | None => {}
        }
        if !heard.questions.is_empty() {
            let open = self.open_questions(&found.entry, heard.questions, capabilities).await?;
            if !open.is_empty() {
                return Ok((Standing::InputRequired(open), heard.at));
            }
        }
        Ok((Standing::Working(heard.said.map(Into::into)), heard.at))
    }

    /// Those of `questions` that have no answer yet, by their keys. What the client can't be asked is answered in its place.
    async fn open_questions(
        self: &Arc<Self>,
        live: &Arc<Live>,
        questions: BTreeMap<StreamId, Open>,
        capabilities: &[u8],
    ) -> Result<Vec<(String, InputRequest)>, Refused> {
        let known = self.journal.questions(live.key, QUESTIONS_MAX).await;
        let known = known.map_err(|_| Refused::new(Code::Unavailable, "what is asked can't be looked up now"))?;
        let answered: BTreeSet<_> =
            known.iter().filter(|asked| asked.answered_at.is_some()).map(|asked| asked.question.asked).collect();
        let mut open = Vec::new();
        for question in questions.into_values().filter(|open| !answered.contains(&open.asked)) {
            let request = InputRequest::of(&question.message, &question.envelope);
            match request.filter(|request| request.suits(capabilities)) {
                Some(request) => open.push((key_of(question.asked), request)),
                None => decline(self, live, &question.message, &question.envelope),
            }
        }
        Ok(open)
    }
}

/// What the response of a server is to a task.
fn landed(engine: &Engine, live: &Live, message: &Bytes, envelope: &Envelope) -> Standing {
    if let Some((_, message)) = own_refusal(message, envelope, b"0") {
        return failed(&message);
    }
    if InputRequest::visits(message, envelope).is_some() {
        let text = "the server wants its user to visit addresses first, and a task can't be begun anew";
        let refused = Refused { server: Some(live.server.name.clone()), ..Refused::new(Code::ServerRejected, text) };
        return failed(&refusal(b"0", &refused).message);
    }
    let info = server_info(engine, live);
    let crossed = crossing::response(message, envelope, b"0", Method::ToolsCall.as_str(), info.as_deref());
    match scan(&crossed.message).ok().and_then(|envelope| envelope.result) {
        Some(result) => Standing::Completed(crossed.message[result].to_vec()),
        None => failed(&crossed.message),
    }
}

/// That of a call whose answer nobody will ever have.
fn lost(live: &Live, why: &str) -> Standing {
    let server = live.server.name.clone();
    let text = format!("{why}; whether server `{server}` executed the call is unknown");
    let refused = Refused { server: Some(server), ..Refused::new(Code::OutcomeUnknown, text) };
    failed(&refusal(b"0", &refused).message)
}

fn failed(message: &[u8]) -> Standing {
    let error = scan(message).ok().and_then(|envelope| envelope.error);
    Standing::Failed(error.map_or_else(|| b"{}".to_vec(), |error| message[error].to_vec()))
}

/// The longest word of how far a task is that is passed on.
const SAID_BYTES_MAX: usize = 1024;
/// Among how many questions of a conversation those of a task are looked for.
const QUESTIONS_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(messages: &[&str]) -> Heard {
        let at = |place: usize| Timestamp::from_unix_millis(place as u64);
        Heard::of(
            messages.iter().enumerate().map(|(place, text)| (at(place), Bytes::from((*text).to_owned()))).collect(),
        )
    }

    #[test]
    fn e4_the_newest_word_the_questions_that_stand_and_the_response_are_heard() {
        let told = heard(&[
            r#"{"jsonrpc":"2.0","method":"notifications/progress","params":{"progress":1,"message":"one"}}"#,
            r#"{"jsonrpc":"2.0","id":"3.8.\"a\"","method":"roots/list"}"#,
            r#"{"jsonrpc":"2.0","id":"3.9.\"b\"","method":"roots/list"}"#,
            r#"{"jsonrpc":"2.0","method":"notifications/progress","params":{"progress":2,"message":7}}"#,
            r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"3.8.\"a\""}}"#,
        ]);
        assert_eq!(told.said.as_deref(), Some(br#""one""#.as_slice()));
        assert_eq!(told.questions.into_keys().collect::<Vec<_>>(), [StreamId { epoch: 3, number: 9 }]);
        assert!(told.response.is_none() && told.at == Timestamp::from_unix_millis(4));
        assert!(heard(&[r#"{"jsonrpc":"2.0","id":"c3.1","result":{}}"#]).response.is_some());
    }

    #[test]
    fn e4_a_failure_is_the_error_that_a_client_would_have_been_told() {
        let refused = Refused::new(Code::OutcomeUnknown, "nobody knows");
        let Standing::Failed(error) = failed(&refusal(b"0", &refused).message) else { panic!("a failure") };
        let error: serde_json::Value = serde_json::from_slice(&error).expect("json");
        assert_eq!(
            (&error["message"], &error["data"]["mainstay"]),
            (&"nobody knows".into(), &"outcome_unknown".into())
        );
    }
}
