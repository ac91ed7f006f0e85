//! The ids of a modern server's own tasks (SEP-2663). The server knows the gateway only, and whoever has an id may fetch the
//! task, answer it and cancel it: so a client gets a sealed one, which opens for its principal alone.
//!
//! Nothing is remembered for that. What a client brings in one exchange is what it is answered with there, since each sealing
//! of an id is another text.

use std::time::Duration;

use bytes::Bytes;
use mainstay_core::id::ServerName;
use mainstay_core::principal::Principal;
use mainstay_core::time::Timestamp;
use mainstay_core::wire::envelope::{self, Envelope, Span};
use mainstay_core::wire::modern::ResultType;
use mainstay_core::wire::modern::edit::{self, Change};
use mainstay_store::keys::Keyring;
use thiserror::Error;

use crate::engine::call::Request;
use crate::engine::seal::{self, Binding, Kind, Unsealed};
use crate::engine::{Caller, Served};

/// The ids in one exchange with a server.
pub struct TaskIds {
    principal: Principal,
    server: ServerName,
    brings: Brings,
    /// Those that were brought: as the server has them, and as the client does. Raw JSON.
    brought: Vec<(Vec<u8>, Vec<u8>)>,
}

/// Where the request has ids.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Brings {
    /// A call, which may be answered with a task.
    None,
    /// A request that is about one.
    One,
    /// A request that listens for some.
    Some,
}

/// Why an id that a client brings does not reach its server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum IdFault {
    /// There is none.
    #[error("`taskId` must be a string, and `taskIds` a list of such")]
    NoText,
    /// It can't be opened.
    #[error("`taskId` is refused: {0}")]
    Unsealed(#[source] Unsealed),
}

impl TaskIds {
    /// Those that `request` and its answers may have; `None` for a request that has nothing to do with tasks.
    pub fn of(caller: &Caller, served: &Served, request: &Request) -> Option<Self> {
        let method = request.envelope.method_name(&request.message)?;
        let brings = match &*method {
            "tools/call" => Brings::None,
            "tasks/get" | "tasks/update" | "tasks/cancel" => Brings::One,
            "subscriptions/listen" => Brings::Some,
            _ => return None,
        };
        let (principal, server) = (caller.principal.clone(), served.server.name.clone());
        Some(Self { principal, server, brings, brought: Vec::new() })
    }

    /// The request for its server: with its own ids.
    ///
    /// # Errors
    /// Any [`IdFault`]. The server must not see the request.
    pub fn opened(&mut self, ring: &Keyring, now: Timestamp, message: &Bytes) -> Result<Bytes, IdFault> {
        let envelope = envelope::scan(message).ok();
        let Some(params) = envelope.and_then(|envelope| envelope.params) else { return Ok(message.clone()) };
        let edits = match self.brings {
            Brings::None => return Ok(message.clone()),
            Brings::One => {
                let id = envelope::member(message, &params, TASK_ID).ok_or(IdFault::NoText)?;
                let id = self.open(ring, now, &message[id])?;
                edit::object(message, &params, &[(TASK_ID, Change::Set(&id))])
            }
            Brings::Some => {
                let Some(wanted) = envelope::member(message, &params, WANTED) else { return Ok(message.clone()) };
                // A filter that stands there several times stands there once afterwards: the one that was opened.
                let wanted = self.opened_filter(ring, now, &message[wanted])?;
                edit::object(message, &params, &[(WANTED, Change::Set(&wanted))])
            }
        };
        Ok(edit::apply(message, edits).into())
    }

    fn opened_filter(&mut self, ring: &Keyring, now: Timestamp, wanted: &[u8]) -> Result<Vec<u8>, IdFault> {
        let whole = 0..wanted.len();
        let Some(ids) = envelope::member(wanted, &whole, TASK_IDS) else { return Ok(wanted.to_vec()) };
        let ids = &wanted[ids];
        let shown = envelope::batch(ids).ok().flatten().ok_or(IdFault::NoText)?;
        let own = shown.into_iter().map(|id| self.open(ring, now, &ids[id])).collect::<Result<Vec<_>, _>>()?;
        Ok(edit::apply(wanted, edit::object(wanted, &whole, &[(TASK_IDS, Change::Set(&array(&own)))])))
    }

    /// A message of the server for the client: with the ids that the client knows.
    pub fn sealed(&self, ring: &Keyring, now: Timestamp, message: Bytes) -> Bytes {
        let Ok(envelope) = envelope::scan(&message) else { return message };
        let edits = self.edits(ring, now, &message, &envelope);
        if edits.is_empty() { message } else { edit::apply(&message, edits).into() }
    }

    fn edits(&self, ring: &Keyring, now: Timestamp, message: &Bytes, envelope: &Envelope) -> edit::Edits {
        let Some(holder) = envelope.result.as_ref().or(envelope.params.as_ref()) else { return Vec::new() };
        if let Some((wanted, ids)) = listened(message, holder).filter(|_| self.brings == Brings::Some) {
            let known: Vec<_> = ids.into_iter().filter_map(|id| self.known(&message[id])).collect();
            return edit::object(message, &wanted, &[(TASK_IDS, Change::Set(&array(&known)))]);
        }
        let Some(id) = envelope::member(message, holder, TASK_ID).map(|id| &message[id]) else { return Vec::new() };
        let is_made = || envelope.result.is_some() && ResultType::of(message, holder) == ResultType::Task;
        let shown = match self.known(id) {
            Some(known) => known,
            None if self.brings == Brings::None && is_made() => {
                let text = self.bound(|binding| seal::seal(ring, binding, now.plus(ID_LIFE), id));
                format!("\"{text}\"").into_bytes()
            }
            None => return Vec::new(),
        };
        edit::object(message, holder, &[(TASK_ID, Change::Set(&shown))])
    }

    /// As the client has it.
    fn known(&self, own: &[u8]) -> Option<Vec<u8>> {
        let text = envelope::unescape(own)?;
        let is_it = |known: &[u8]| envelope::unescape(known).is_some_and(|known| known == text);
        self.brought.iter().find(|(known, _)| is_it(known)).map(|(_, shown)| shown.clone())
    }

    /// As the server has it.
    fn open(&mut self, ring: &Keyring, now: Timestamp, shown: &[u8]) -> Result<Vec<u8>, IdFault> {
        let text = envelope::unescape(shown).ok_or(IdFault::NoText)?;
        if text.len() > SEALED_CHARS_MAX || self.brought.len() == IDS_MAX {
            return Err(IdFault::Unsealed(Unsealed::Foreign));
        }
        let own = self.bound(|binding| seal::unseal(ring, binding, now, &text)).map_err(IdFault::Unsealed)?;
        self.brought.push((own.clone(), shown.to_vec()));
        Ok(own)
    }

    fn bound<T>(&self, act: impl FnOnce(&Binding<'_>) -> T) -> T {
        act(&Binding { kind: Kind::ServerTask, principal: &self.principal, server: &self.server, about: b"" })
    }
}

/// What the filter of a stream that is listened to, in `holder`, has of tasks: the filter, and each id.
fn listened(message: &[u8], holder: &Span) -> Option<(Span, Vec<Span>)> {
    let wanted = envelope::member(message, holder, WANTED)?;
    let ids = envelope::member(message, &wanted, TASK_IDS)?;
    let elements = envelope::batch(&message[ids.clone()]).ok()??;
    let ids = elements.into_iter().map(|id| ids.start + id.start..ids.start + id.end).collect();
    Some((wanted, ids))
}

fn array(elements: &[Vec<u8>]) -> Vec<u8> {
    [b"[".as_slice(), &elements.join(&b","[..]), b"]"].concat()
}

const TASK_ID: &str = "taskId";
const TASK_IDS: &str = "taskIds";
const WANTED: &str = "notifications";
/// How many ids one request may bring.
const IDS_MAX: usize = 1024;
/// What a sealed one can't be longer than.
const SEALED_CHARS_MAX: usize = 4096;
/// How long an id is good: longer than servers keep tasks.
const ID_LIFE: Duration = Duration::from_hours(24 * 30);

#[cfg(test)]
mod tests {
    use super::*;

    const MADE: &str =
        r#"{"jsonrpc":"2.0","id":1,"result":{"n":1.0,"resultType":"task","taskId":"t\u00fc-1","status":"working"}}"#;

    fn ring() -> Keyring {
        Keyring::ephemeral(&mut |bytes: &mut [u8]| bytes.fill(7))
    }

    fn at(hours: u64) -> Timestamp {
        Timestamp::from_unix_millis(0).plus(Duration::from_hours(hours))
    }

    fn ids(name: &str, server: &str, brings: Brings) -> TaskIds {
        let server = ServerName::parse(server).expect("a name");
        TaskIds { principal: Principal::Token(name.into()), server, brings, brought: Vec::new() }
    }

    fn text(bytes: &Bytes) -> &str {
        std::str::from_utf8(bytes).expect("text")
    }

    /// The id that a client of this name got of the task that was made, as raw JSON.
    fn shown(ring: &Keyring, name: &str) -> String {
        let sealed = ids(name, "files", Brings::None).sealed(ring, at(0), Bytes::from_static(MADE.as_bytes()));
        let (before, rest) = text(&sealed).split_once("\"taskId\":").expect("an id");
        let (id, after) = rest.split_once(',').expect("more");
        assert_eq!(
            (before, after),
            (r#"{"jsonrpc":"2.0","id":1,"result":{"n":1.0,"resultType":"task","#, "\"status\":\"working\"}}")
        );
        id.to_owned()
    }

    fn get(id: &str) -> Bytes {
        Bytes::from(format!(r#"{{"jsonrpc":"2.0","id":2,"method":"tasks/get","params":{{"taskId":{id}}}}}"#))
    }

    #[test]
    fn i_a_server_gets_the_id_back_that_it_gave_out_and_the_client_is_answered_with_its_own() {
        let ring = ring();
        let id = shown(&ring, "amy");
        let mut exchange = ids("amy", "files", Brings::One);
        assert_eq!(text(&exchange.opened(&ring, at(24), &get(&id)).expect("its own")), text(&get(r#""t\u00fc-1""#)));
        let state = "{\"jsonrpc\":\"2.0\",\"id\":2,\"result\":{\"taskId\":\"t\u{fc}-1\",\"status\":\"working\"}}";
        let answer = exchange.sealed(&ring, at(24), Bytes::from_static(state.as_bytes()));
        assert_eq!(text(&answer), state.replace("\"t\u{fc}-1\"", &id));
    }

    #[test]
    fn i_an_id_is_refused_that_is_somebody_elses_or_another_servers_or_the_servers_own() {
        let ring = ring();
        let id = shown(&ring, "amy");
        let opened = |name: &str, server: &str, id: &str| ids(name, server, Brings::One).opened(&ring, at(1), &get(id));
        let foreign = Err(IdFault::Unsealed(Unsealed::Foreign));
        assert_eq!(opened("bob", "files", &id), foreign);
        assert_eq!(opened("amy", "mail", &id), foreign);
        assert_eq!(opened("amy", "files", r#""t\u00fc-1""#), foreign);
        assert_eq!(opened("amy", "files", "7"), Err(IdFault::NoText));
        let late = ids("amy", "files", Brings::One).opened(&ring, at(24 * 30 + 1), &get(&id));
        assert_eq!(late, Err(IdFault::Unsealed(Unsealed::Expired)));
    }

    #[test]
    fn i_who_listens_for_tasks_hears_of_them_under_the_ids_that_it_knows() {
        let ring = ring();
        let id = shown(&ring, "amy");
        let listen = |id: &str| {
            let wanted = format!(r#"{{"toolsListChanged":true,"taskIds":[{id}]}}"#);
            format!(
                r#"{{"jsonrpc":"2.0","id":3,"method":"subscriptions/listen","params":{{"notifications":{wanted}}}}}"#
            )
        };
        let own = r#""t\u00fc-1""#;
        let mut exchange = ids("amy", "files", Brings::Some);
        let opened = exchange.opened(&ring, at(1), &Bytes::from(listen(&id))).expect("its own");
        assert_eq!(text(&opened), listen(own));
        let said = |id: &str| {
            let params = format!(r#"{{"notifications":{{"taskIds":[{id}]}}}}"#);
            format!(r#"{{"jsonrpc":"2.0","method":"notifications/subscriptions/acknowledged","params":{params}}}"#)
        };
        assert_eq!(text(&exchange.sealed(&ring, at(1), Bytes::from(said(own)))), said(&id));
        let status = |id: &str| {
            format!(
                r#"{{"jsonrpc":"2.0","method":"notifications/tasks","params":{{"taskId":{id},"status":"completed"}}}}"#
            )
        };
        assert_eq!(text(&exchange.sealed(&ring, at(1), Bytes::from(status(own)))), status(&id));
        let opened =
            |name: &str, message: String| ids(name, "files", Brings::Some).opened(&ring, at(1), &Bytes::from(message));
        assert_eq!(opened("bob", listen(&id)), Err(IdFault::Unsealed(Unsealed::Foreign)));
        assert_eq!(opened("amy", listen(&id).replace(&format!("[{id}]"), own)), Err(IdFault::NoText), "no list");
        let twice = listen(&id).replace("}}}", &format!("}},\"notifications\":{{\"taskIds\":[{own}]}}}}}}"));
        assert_eq!(text(&opened("amy", twice).expect("its own")), listen(own), "none gets by that was not opened");
    }

    #[test]
    fn i_what_is_no_task_is_left_alone() {
        for answer in [
            r#"{"jsonrpc":"2.0","id":1,"result":{"resultType":"complete","taskId":"x"}}"#,
            r#"{"jsonrpc":"2.0","id":1,"error":{"code":1,"message":"taskId"}}"#,
            r#"{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":1,"progress":1}}"#,
        ] {
            let sealed =
                ids("amy", "files", Brings::None).sealed(&ring(), at(0), Bytes::from_static(answer.as_bytes()));
            assert_eq!(text(&sealed), answer);
        }
    }
}
