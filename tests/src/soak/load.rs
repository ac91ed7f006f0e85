//! Clients that call without a pause, and what became of each call.

use super::random::Random;
use super::stand::{Client, Server};
use crate::raw::{Outcome, RawClient};
use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// What became of one call, as its client saw it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fate {
    /// Its own right answer came, over as many resumptions as it took.
    Answered,
    /// The same, but progress was missing before it, or out of order.
    Incomplete(String),
    /// The gateway answered with an error and named the outcome.
    Told(String),
    /// The connection broke before any head: nobody could have been told anything.
    CutBeforeHead,
    /// The connection broke after the head and before anything from which to resume.
    CutAfterHead,
    /// The connection was refused.
    Refused,
    /// An answer came that is not the right one.
    Wrong(String),
    /// Nothing came, or the resumption was refused.
    Lost(String),
}

impl Fate {
    /// Whether the tool may have run, and may not have.
    #[must_use]
    pub fn is_undecided(&self) -> bool {
        match self {
            Fate::Told(outcome) => outcome == "outcome_unknown",
            Fate::CutBeforeHead | Fate::CutAfterHead | Fate::Wrong(_) | Fate::Lost(_) => true,
            Fate::Answered | Fate::Incomplete(_) | Fate::Refused => false,
        }
    }

    /// Whether the tool has run, as its client knows.
    #[must_use]
    pub fn is_answered(&self) -> bool {
        matches!(self, Fate::Answered | Fate::Incomplete(_))
    }
}

/// One call.
#[derive(Debug, Clone)]
pub struct Call {
    /// Whose it was.
    pub client: usize,
    /// Where it went.
    pub server: Server,
    /// The tool.
    pub tool: &'static str,
    /// A word that no other call carries.
    pub tag: String,
    /// When it was sent.
    pub sent: Instant,
    /// When its fate was known.
    pub ended: Instant,
    /// Whether its answer came on a stream.
    pub streamed: bool,
    /// What became of it.
    pub fate: Fate,
}

/// All clients at work.
pub(super) struct Load {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
    callers: JoinSet<Vec<Call>>,
}

impl Load {
    /// Lets each client call fast tools, and slow ones beside them, and half of them listen.
    pub(super) fn start(clients: &[Client], seed: u64) -> Load {
        let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let mut callers = JoinSet::new();
        for client in clients {
            for pace in [Pace::Fast, Pace::Slow] {
                let caller = Caller {
                    client: client.clone(),
                    pace,
                    random: Random::new(seed ^ ((client.number as u64) << 8) ^ u64::from(pace == Pace::Slow)),
                    stop: Arc::clone(&stop),
                    answered: Arc::clone(&answered),
                };
                callers.spawn(caller.run());
            }
            if client.number % 8 < 4 {
                callers.spawn(listen(client.clone(), Arc::clone(&stop)));
            }
        }
        Load { stop, answered, callers }
    }

    /// How many calls were answered so far.
    pub(super) fn answered(&self) -> u64 {
        self.answered.load(Ordering::Relaxed)
    }

    /// Lets the clients finish what they are at, and returns all their calls in the order of their ends.
    pub(super) async fn end(mut self) -> Result<Vec<Call>> {
        self.stop.store(true, Ordering::Relaxed);
        let mut calls = Vec::new();
        while let Some(ended) = self.callers.join_next().await {
            calls.extend(ended.context("a client failed in itself")?);
        }
        calls.sort_by_key(|call| call.ended);
        Ok(calls)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pace {
    Fast,
    Slow,
}

struct Caller {
    client: Client,
    pace: Pace,
    random: Random,
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
}

impl Caller {
    async fn run(mut self) -> Vec<Call> {
        let mut calls = Vec::new();
        while !self.stop.load(Ordering::Relaxed) {
            let tag =
                format!("c{}-{}{}", self.client.number, if self.pace == Pace::Fast { 'f' } else { 's' }, calls.len());
            let (tool, arguments, wanted) = self.choose(&tag);
            let params = json!({"name": tool, "arguments": arguments, "_meta": {"progressToken": tag}});
            let message = self.client.raw.message("tools/call", params);
            let sent = Instant::now();
            let (streamed, fate) = perform(&self.client.raw, &message, &wanted).await;
            if fate == Fate::Answered {
                self.answered.fetch_add(1, Ordering::Relaxed);
            }
            let (client, server) = (self.client.number, self.client.server);
            calls.push(Call { client, server, tool, tag, sent, ended: Instant::now(), streamed, fate });
            tokio::time::sleep(self.random.millis(PAUSE_MS)).await;
        }
        calls
    }

    fn choose(&mut self, tag: &str) -> (&'static str, Value, Wanted) {
        match (self.pace, self.random.within(0..2)) {
            (Pace::Fast, 0) => ("echo", json!({"text": tag}), Wanted::text(tag)),
            (Pace::Fast, _) => ("incr", json!({"tag": tag}), Wanted::default()),
            (Pace::Slow, 0) => {
                let ms = self.random.within(SLOW_MS);
                ("slow", json!({"ms": ms, "tag": tag}), Wanted::text(&format!("waited {ms} ms")))
            }
            (Pace::Slow, _) => {
                let (steps, delay) = (self.random.within(PROGRESS_STEPS), self.random.within(PROGRESS_DELAY_MS));
                let wanted = Wanted { text: Some(format!("{steps} steps done")), steps: Some((steps, tag.to_owned())) };
                ("prog", json!({"n": steps, "delay_ms": delay, "tag": tag}), wanted)
            }
        }
    }
}

/// What the right answer has in it.
#[derive(Debug, Default)]
struct Wanted {
    text: Option<String>,
    /// How many steps of progress, under which token.
    steps: Option<(u64, String)>,
}

impl Wanted {
    fn text(text: &str) -> Wanted {
        Wanted { text: Some(text.to_owned()), steps: None }
    }

    fn judge(&self, outcome: &Outcome, id: &Value) -> Fate {
        if let Some(named) = outcome.named_outcome() {
            return Fate::Told(named.to_owned());
        }
        let Ok(text) = outcome.text() else {
            return Fate::Lost(format!("{} {:?}: {:?}", outcome.status, outcome.ended, outcome.response()));
        };
        if self.text.as_ref().is_some_and(|wanted| wanted != text) {
            return Fate::Wrong(format!("{text:?} instead of {:?}", self.text));
        }
        if outcome.response().is_none_or(|response| response["id"] != *id) {
            return Fate::Wrong("another id".to_owned());
        }
        let notice = outcome.result().map_or(&Value::Null, |result| &result["_meta"]["mainstay/notice"]);
        if !notice.is_null() {
            return Fate::Wrong(format!("with word of a loss: {notice}"));
        }
        self.progress(outcome)
    }

    /// Progress comes whole and in order, under the client's own token (R7).
    fn progress(&self, outcome: &Outcome) -> Fate {
        let Some((steps, token)) = &self.steps else {
            return Fate::Answered;
        };
        let seen: Vec<u64> = outcome
            .notifications()
            .filter(|notification| notification["params"]["progressToken"] == **token)
            .filter_map(|notification| notification["params"]["progress"].as_u64())
            .collect();
        if seen.iter().copied().eq(1..=*steps) {
            return Fate::Answered;
        }
        Fate::Incomplete(format!("progress {seen:?} instead of 1 to {steps}"))
    }
}

async fn perform(raw: &RawClient, message: &Value, wanted: &Wanted) -> (bool, Fate) {
    let exchange = match raw.post(message).await {
        Ok(exchange) => exchange,
        Err(error) => return (false, without_head(&error)),
    };
    let streamed = exchange.is_sse();
    let fate = match raw.follow(exchange).await {
        Ok(outcome) => wanted.judge(&outcome, &message["id"]),
        Err(error) if format!("{error:#}").contains("before any event id") => Fate::CutAfterHead,
        Err(error) => Fate::Lost(format!("{error:#}")),
    };
    (streamed, fate)
}

fn without_head(error: &anyhow::Error) -> Fate {
    match error.downcast_ref::<reqwest::Error>() {
        Some(sent) if sent.is_connect() => Fate::Refused,
        Some(_) => Fate::CutBeforeHead,
        None => Fate::Lost(format!("{error:#}")),
    }
}

/// Keeps a listening stream open, and takes it up again as clients do. A refusal is a call that was lost.
async fn listen(client: Client, stop: Arc<AtomicBool>) -> Vec<Call> {
    let mut refused = Vec::new();
    let mut cursor: Option<String> = None;
    while !stop.load(Ordering::Relaxed) {
        let sent = Instant::now();
        let mut note = |fate| {
            let (tag, ended) = (format!("c{}-listening", client.number), Instant::now());
            let call = Call {
                client: client.number,
                server: client.server,
                tool: "GET",
                tag,
                sent,
                ended,
                streamed: true,
                fate,
            };
            refused.push(call);
        };
        match client.raw.get_stream(cursor.as_deref()).await {
            Ok(mut exchange) if exchange.status == 200 => {
                while !stop.load(Ordering::Relaxed) && exchange.ended().is_none() {
                    if let Ok(Some(event)) = exchange.next_event(LISTEN_STEP).await {
                        cursor = event.id.or(cursor);
                    }
                }
            }
            Ok(exchange) => note(Fate::Lost(format!("listening was answered with {}", exchange.status))),
            Err(error) => note(without_head(&error)),
        }
        tokio::time::sleep(LISTEN_PAUSE).await;
    }
    refused
}

const PAUSE_MS: std::ops::Range<u64> = 10..110;
const SLOW_MS: std::ops::Range<u64> = 200..3001;
const PROGRESS_STEPS: std::ops::Range<u64> = 2..11;
const PROGRESS_DELAY_MS: std::ops::Range<u64> = 40..200;
const LISTEN_STEP: Duration = Duration::from_millis(500);
const LISTEN_PAUSE: Duration = Duration::from_secs(1);
