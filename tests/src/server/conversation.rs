//! One session at work: plans are carried out, cancelled and asked back.

use super::plan::{Ending, Facts, Plan, Reply, Step, Tell, plan};
use super::{World, method};
use crate::up_h::EventLog;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, mpsc, oneshot};

/// Where messages of the server go.
#[derive(Debug, Clone)]
pub enum Outlet {
    /// Into the log of an SSE stream.
    Log(Arc<EventLog>),
    /// To the one writer of standard output. A full queue makes the sender wait.
    Pipe(mpsc::Sender<Outgoing>),
}

/// What the writer of standard output is given.
#[derive(Debug, Clone, PartialEq)]
pub enum Outgoing {
    /// A message, to be written as a line.
    Message(Value),
    /// Everything before was to be written; now the process ends with this code.
    Exit(u8),
}

impl Outlet {
    /// Sends a message. One that nobody can receive any more is dropped, as it would be on a broken connection.
    pub async fn send(&self, message: Value) {
        match self {
            Outlet::Log(log) => log.push(&message),
            Outlet::Pipe(pipe) => {
                let _nobody_reads = pipe.send(Outgoing::Message(message)).await;
            }
        }
    }
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Served {
    /// A response was sent.
    Answered,
    /// It was cancelled; no response was sent.
    Cancelled,
}

/// One session at work.
#[derive(Debug)]
pub struct Conversation {
    world: Arc<World>,
    facts: Mutex<Facts>,
    listening: Outlet,
    running: Mutex<Vec<(String, Arc<Notify>)>>,
    asked: Mutex<HashMap<String, oneshot::Sender<Value>>>,
    questions: AtomicU64,
}

impl Conversation {
    /// A conversation that hears of what belongs to no request at `listening`. It joins the world.
    #[must_use]
    pub fn new(world: &Arc<World>, session: String, listening: Outlet) -> Arc<Conversation> {
        let conversation = Arc::new(Conversation {
            world: Arc::clone(world),
            facts: Mutex::new(Facts { session, ..Facts::default() }),
            listening,
            running: Mutex::default(),
            asked: Mutex::default(),
            questions: AtomicU64::new(0),
        });
        world.join(&conversation);
        conversation
    }

    /// Where the conversation hears of what belongs to no request.
    #[must_use]
    pub fn listening(&self) -> &Outlet {
        &self.listening
    }

    /// What the session knows of itself.
    pub fn facts(&self) -> MutexGuard<'_, Facts> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves one request: everything that belongs to it goes to `out`, the response last (but for late events).
    pub async fn serve(&self, request: &Value, out: &Outlet) -> Served {
        let cancel = self.begin(&request["id"]);
        let planned = plan(&self.world, &mut self.facts(), request);
        let served = self.carry_out(request, planned, out, &cancel).await;
        self.end(&cancel);
        if served == Served::Cancelled {
            self.world.counters().cancelled += 1;
        } else if let Some(tool) = super::tool(request) {
            *self.world.counters().completions.entry(tool.to_owned()).or_default() += 1;
        }
        served
    }

    /// Takes a notification of the client.
    pub fn note(&self, notification: &Value) {
        let name = method(notification);
        *self.world.counters().notifications.entry(name.to_owned()).or_default() += 1;
        match name {
            "notifications/initialized" => self.facts().initialized = true,
            "notifications/cancelled" => self.cancel(&notification["params"]["requestId"]),
            _ => {}
        }
    }

    /// Takes the client's answer to a question. Returns whether such a question was open.
    pub fn answered(&self, response: Value) -> bool {
        let key = response["id"].to_string();
        let waiting = self.asked.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
        waiting.is_some_and(|waiting| waiting.send(response).is_ok())
    }

    async fn carry_out(&self, request: &Value, planned: Plan, out: &Outlet, cancel: &Notify) -> Served {
        for step in planned.steps {
            match step {
                Step::Notify(message) => out.send(message).await,
                Step::Wait(time) => {
                    if cancelled_within(time, cancel).await {
                        return Served::Cancelled;
                    }
                }
            }
        }
        if planned.tell == Some(Tell::Updated) {
            self.world.tell_updated().await;
        }
        let reply = match planned.ending {
            Ending::Answer(reply) => reply,
            Ending::Ask { method, params, bound } => {
                tokio::select! {
                    reply = self.ask(method, params, bound, out) => reply,
                    () = cancel.notified() => return Served::Cancelled,
                }
            }
        };
        out.send(reply.into_message(&request["id"])).await;
        for message in planned.late {
            out.send(message).await;
        }
        Served::Answered
    }

    async fn ask(&self, method: &str, params: Value, bound: Duration, out: &Outlet) -> Reply {
        let id = json!(format!("ask-{}", self.questions.fetch_add(1, Ordering::SeqCst) + 1));
        let (answer, answered) = oneshot::channel();
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).insert(id.to_string(), answer);
        out.send(json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params})).await;
        let response = tokio::time::timeout(bound, answered).await;
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).remove(&id.to_string());
        match response {
            Ok(Ok(response)) if response["error"].is_null() => Reply::text(response["result"].to_string()),
            Ok(Ok(response)) => Reply::failed(response["error"].to_string()),
            Ok(Err(_)) | Err(_) => Reply::failed("the client did not answer"),
        }
    }

    fn begin(&self, id: &Value) -> Arc<Notify> {
        let cancel = Arc::new(Notify::new());
        self.running().push((id.to_string(), Arc::clone(&cancel)));
        cancel
    }

    fn end(&self, cancel: &Arc<Notify>) {
        self.running().retain(|(_, running)| !Arc::ptr_eq(running, cancel));
    }

    fn cancel(&self, id: &Value) {
        let id = id.to_string();
        if let Some((_, cancel)) = self.running().iter().find(|(running, _)| *running == id) {
            cancel.notify_one();
        }
    }

    fn running(&self) -> MutexGuard<'_, Vec<(String, Arc<Notify>)>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn cancelled_within(time: Duration, cancel: &Notify) -> bool {
    tokio::select! {
        biased;
        () = cancel.notified() => true,
        () = tokio::time::sleep(time) => false,
    }
}
