//! One HTTP answer, read as it comes or as a whole.

use super::sse::{SseEvent, SseItem, SseParser};
use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use reqwest::header::HeaderMap;
use serde_json::Value;
use std::time::{Duration, Instant};

/// How a body ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// As HTTP says that a body ends.
    Clean,
    /// The connection broke.
    Cut,
}

/// An answer of which the head is there. Dropping it closes the connection, as a client does that goes away.
pub struct Exchange {
    /// The HTTP status.
    pub status: u16,
    /// The HTTP headers.
    pub headers: HeaderMap,
    /// How long the head took.
    pub took: Duration,
    /// Comment lines seen so far.
    pub comments: u64,
    sent: Instant,
    chunks: BoxStream<'static, reqwest::Result<Bytes>>,
    parser: SseParser,
    whole: Vec<u8>,
    cursor: Option<String>,
    ended: Option<Ended>,
    json_taken: bool,
}

impl Exchange {
    pub(super) fn new(response: reqwest::Response, sent: Instant) -> Exchange {
        Exchange {
            status: response.status().as_u16(),
            headers: response.headers().clone(),
            took: sent.elapsed(),
            comments: 0,
            sent,
            chunks: response.bytes_stream().boxed(),
            parser: SseParser::default(),
            whole: Vec::new(),
            cursor: None,
            ended: None,
            json_taken: false,
        }
    }

    /// Whether the answer is a stream of events.
    #[must_use]
    pub fn is_sse(&self) -> bool {
        header(&self.headers, "content-type").is_some_and(|kind| kind.starts_with("text/event-stream"))
    }

    /// A header's value.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        header(&self.headers, name)
    }

    /// How the body ended, once it has.
    #[must_use]
    pub fn ended(&self) -> Option<Ended> {
        self.ended
    }

    /// The next event of a stream, priming events included; none when the body has ended.
    ///
    /// # Errors
    /// If there was none within the bound, and the body did not end either. Nothing is lost by that.
    pub async fn next_event(&mut self, bound: Duration) -> Result<Option<SseEvent>> {
        let deadline = Instant::now() + bound;
        loop {
            match self.parser.next_item() {
                Some(SseItem::Event(event)) => {
                    self.cursor = event.id.clone().or(self.cursor.take());
                    return Ok(Some(event));
                }
                Some(SseItem::Comment(_)) => self.comments += 1,
                None if self.ended.is_some() => return Ok(None),
                None => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    tokio::time::timeout(left, self.more()).await.with_context(|| format!("no event in {bound:?}"))?;
                }
            }
        }
    }

    /// The next JSON-RPC message, whether the answer is a stream or a document; none when the body has ended.
    ///
    /// # Errors
    /// If there was none within the bound, or it was no JSON.
    pub async fn next_message(&mut self, bound: Duration) -> Result<Option<Value>> {
        if !self.is_sse() {
            return self.document(bound).await;
        }
        while let Some(event) = self.next_event(bound).await? {
            if !event.data.is_empty() {
                return Ok(Some(serde_json::from_str(&event.data).context("an event's data is no JSON")?));
            }
        }
        Ok(None)
    }

    /// Everything up to the end of the body, however it ends.
    ///
    /// # Errors
    /// If the body has not ended within the bound.
    pub async fn finish(mut self, bound: Duration) -> Result<Outcome> {
        let deadline = Instant::now() + bound;
        let mut events = Vec::new();
        if self.is_sse() {
            while let Some(event) = self
                .next_event(deadline.saturating_duration_since(Instant::now()))
                .await
                .context("the stream did not end")?
            {
                events.push(event);
            }
        } else {
            self.read_to_end(bound).await?;
        }
        let messages = if self.is_sse() {
            let data = events.iter().map(|event| event.data.as_str()).filter(|data| !data.is_empty());
            data.filter_map(|data| serde_json::from_str(data).ok()).collect()
        } else {
            messages(&self.whole)
        };
        Ok(Outcome {
            status: self.status,
            headers: self.headers,
            events,
            messages,
            comments: self.comments,
            body: self.whole.into(),
            ended: self.ended.unwrap_or(Ended::Clean),
            took: self.sent.elapsed(),
            cursor: self.cursor,
        })
    }

    async fn document(&mut self, bound: Duration) -> Result<Option<Value>> {
        self.read_to_end(bound).await?;
        if std::mem::replace(&mut self.json_taken, true) || self.whole.is_empty() {
            return Ok(None);
        }
        Ok(Some(serde_json::from_slice(&self.whole).context("the body is no JSON")?))
    }

    async fn read_to_end(&mut self, bound: Duration) -> Result<()> {
        let deadline = Instant::now() + bound;
        while self.ended.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            tokio::time::timeout(left, self.more())
                .await
                .with_context(|| format!("no end of the body in {bound:?}"))?;
        }
        Ok(())
    }

    async fn more(&mut self) {
        match self.chunks.next().await {
            Some(Ok(bytes)) => {
                self.whole.extend_from_slice(&bytes);
                self.parser.push(&bytes);
            }
            Some(Err(_)) => self.ended = Some(Ended::Cut),
            None => self.ended = Some(Ended::Clean),
        }
    }
}

/// An answer as a whole.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The HTTP status.
    pub status: u16,
    /// The HTTP headers.
    pub headers: HeaderMap,
    /// The events of a stream, priming events included.
    pub events: Vec<SseEvent>,
    /// The JSON-RPC messages.
    pub messages: Vec<Value>,
    /// How many comment lines came.
    pub comments: u64,
    /// The bytes of the body.
    pub body: Bytes,
    /// How the body ended.
    pub ended: Ended,
    /// From the request to the end of the body.
    pub took: Duration,
    /// The last event id, those included that were read one by one before.
    cursor: Option<String>,
}

impl Outcome {
    /// A header's value.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        header(&self.headers, name)
    }

    /// The body as text.
    #[must_use]
    pub fn body_text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The response among the messages.
    #[must_use]
    pub fn response(&self) -> Option<&Value> {
        self.messages.iter().find(|message| message.get("method").is_none())
    }

    /// The methods and params of the messages before the response.
    pub fn notifications(&self) -> impl Iterator<Item = &Value> {
        self.messages.iter().filter(|message| message.get("method").is_some())
    }

    /// The response's result.
    ///
    /// # Errors
    /// If there is none; the error shows what came instead.
    pub fn result(&self) -> Result<&Value> {
        match self.response().and_then(|response| response.get("result")) {
            Some(result) => Ok(result),
            None => bail!("no result but {} ({:?}): {}", self.status, self.ended, self.body_text()),
        }
    }

    /// The response's error.
    ///
    /// # Errors
    /// If there is none; the error shows what came instead.
    pub fn error(&self) -> Result<&Value> {
        match self.response().and_then(|response| response.get("error")) {
            Some(error) => Ok(error),
            None => bail!("no error but {} ({:?}): {}", self.status, self.ended, self.body_text()),
        }
    }

    /// The text of a tool's result.
    ///
    /// # Errors
    /// If there is none, or the tool failed.
    pub fn text(&self) -> Result<&str> {
        let result = self.result()?;
        ensure!(result["isError"] != true, "the tool failed: {result}");
        result["content"][0]["text"].as_str().context("the result has no text")
    }

    /// The JSON in the text of a tool's result, as `whoami` gives it.
    ///
    /// # Errors
    /// If there is none.
    pub fn json(&self) -> Result<Value> {
        serde_json::from_str(self.text()?).context("the text is no JSON")
    }

    /// The outcome that the gateway names in `error.data.mainstay`.
    #[must_use]
    pub fn named_outcome(&self) -> Option<&str> {
        self.response()?["error"]["data"]["mainstay"].as_str()
    }

    /// The ids of the events, in order.
    #[must_use]
    pub fn event_ids(&self) -> Vec<&str> {
        self.events.iter().filter_map(|event| event.id.as_deref()).collect()
    }

    /// The id with which the stream can be resumed.
    #[must_use]
    pub fn last_event_id(&self) -> Option<&str> {
        self.event_ids().last().copied().or(self.cursor.as_deref())
    }

    /// The last `retry:` that was sent.
    #[must_use]
    pub fn retry_ms(&self) -> Option<u64> {
        self.events.iter().rev().find_map(|event| event.retry_ms)
    }

    /// Adds what a resumed stream brought.
    pub fn append(&mut self, resumed: Outcome) {
        self.events.extend(resumed.events);
        self.messages.extend(resumed.messages);
        self.comments += resumed.comments;
        self.ended = resumed.ended;
        self.cursor = resumed.cursor.or(self.cursor.take());
        self.took += resumed.took;
    }
}

fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

fn messages(body: &[u8]) -> Vec<Value> {
    match serde_json::from_slice(body) {
        Ok(Value::Array(messages)) => messages,
        Ok(message) => vec![message],
        Err(_) => Vec::new(),
    }
}
