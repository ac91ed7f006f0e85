//! A client of which every byte is known: it does what a test says and nothing by itself.

mod exchange;
mod sse;

pub use exchange::{Ended, Exchange, Outcome};
pub use sse::{SseEvent, SseItem, SseParser};

use anyhow::{Context as _, Result, ensure};
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// One client. Clones share connections and the counter of request ids, so that calls can run beside each other.
#[derive(Debug, Clone)]
pub struct RawClient {
    http: reqwest::Client,
    url: String,
    headers: HeaderMap,
    capabilities: Value,
    next_id: Arc<AtomicU64>,
    /// The session id to be sent, if any.
    pub session: Option<String>,
    /// The protocol version to be sent, if any.
    pub version: Option<String>,
    /// How long [`RawClient::request`] and its like wait for a whole answer.
    pub bound: Duration,
}

impl RawClient {
    /// A client without a session.
    ///
    /// # Errors
    /// If the HTTP client cannot be built.
    pub fn new(url: &str) -> Result<RawClient> {
        let http = reqwest::Client::builder().no_proxy().tcp_nodelay(true).build()?;
        Ok(RawClient {
            http,
            url: url.to_owned(),
            headers: HeaderMap::new(),
            capabilities: json!({}),
            next_id: Arc::new(AtomicU64::new(1)),
            session: None,
            version: None,
            bound: ANSWER_BOUND,
        })
    }

    /// A client with a session: `initialize` was answered and `notifications/initialized` accepted.
    ///
    /// # Errors
    /// If either was not.
    pub async fn open(url: &str, version: &str) -> Result<RawClient> {
        let mut client = RawClient::new(url)?;
        client.establish(version).await?;
        Ok(client)
    }

    /// Does what [`RawClient::open`] does, for a client with headers or capabilities of its own.
    ///
    /// # Errors
    /// If the handshake fails.
    pub async fn establish(&mut self, version: &str) -> Result<Outcome> {
        let outcome = self.initialize(version).await?;
        ensure!(outcome.status == 200, "`initialize` was answered with {}: {}", outcome.status, outcome.body_text());
        outcome.result().context("`initialize` failed")?;
        let status = self.notify("notifications/initialized", Value::Null).await?;
        ensure!(status == 202, "`notifications/initialized` was answered with {status}");
        Ok(outcome)
    }

    /// The same client with one more header on every request. A header of the client's own is replaced.
    ///
    /// # Errors
    /// If name or value are no header.
    pub fn with_header(mut self, name: &str, value: &str) -> Result<RawClient> {
        self.headers.insert(HeaderName::try_from(name)?, HeaderValue::try_from(value)?);
        Ok(self)
    }

    /// The same client that declares these capabilities in `initialize`.
    #[must_use]
    pub fn with_capabilities(mut self, capabilities: Value) -> RawClient {
        self.capabilities = capabilities;
        self
    }

    /// The same client in a session that it did not open.
    #[must_use]
    pub fn with_session(mut self, session: &str, version: &str) -> RawClient {
        self.session = Some(session.to_owned());
        self.version = Some(version.to_owned());
        self
    }

    /// The same client with a new connection for every request.
    ///
    /// # Errors
    /// If the HTTP client cannot be built.
    pub fn with_fresh_connections(mut self) -> Result<RawClient> {
        self.http = reqwest::Client::builder().no_proxy().tcp_nodelay(true).pool_max_idle_per_host(0).build()?;
        Ok(self)
    }

    /// The next request id.
    #[must_use]
    pub fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::SeqCst)
    }

    /// Sends `initialize` and keeps the session id and the version that come back. A session that the client had stays in
    /// the request.
    ///
    /// # Errors
    /// If there was no whole answer.
    pub async fn initialize(&mut self, version: &str) -> Result<Outcome> {
        let params = json!({
            "protocolVersion": version,
            "capabilities": self.capabilities,
            "clientInfo": {"name": "raw", "version": "1.0.0"},
        });
        let outcome = self.request("initialize", params).await?;
        if let Some(session) = outcome.header("mcp-session-id") {
            self.session = Some(session.to_owned());
        }
        if let Some(version) = outcome.response().and_then(|response| response["result"]["protocolVersion"].as_str()) {
            self.version = Some(version.to_owned());
        }
        Ok(outcome)
    }

    /// Sends a request and waits for everything that comes back on its stream.
    ///
    /// # Errors
    /// If there was no HTTP answer, or it was not whole within the bound.
    pub async fn request(&self, method: &str, params: Value) -> Result<Outcome> {
        self.post(&self.message(method, params)).await?.finish(self.bound).await
    }

    /// Calls a tool, as [`RawClient::request`] does.
    ///
    /// # Errors
    /// If there was no HTTP answer, or it was not whole within the bound.
    pub async fn call(&self, tool: &str, arguments: Value) -> Result<Outcome> {
        self.request("tools/call", json!({"name": tool, "arguments": arguments})).await
    }

    /// Calls a tool and does what SDK clients do when the answer breaks off after an event id: it goes on with GET and
    /// `Last-Event-ID` until the response is there.
    ///
    /// # Errors
    /// If the answer broke off without an id, or was not whole within the bound.
    pub async fn call_through(&self, tool: &str, arguments: Value) -> Result<Outcome> {
        let message = self.message("tools/call", json!({"name": tool, "arguments": arguments}));
        let exchange = self.post(&message).await?;
        self.follow(exchange).await
    }

    /// Reads an answer to its response, over as many resumptions as it takes.
    ///
    /// # Errors
    /// If the answer broke off without an id, or was not whole within the bound.
    pub async fn follow(&self, exchange: Exchange) -> Result<Outcome> {
        let deadline = Instant::now() + self.bound;
        let mut outcome = exchange.finish(self.bound).await?;
        while outcome.response().is_none() {
            ensure!(Instant::now() < deadline, "no response within {:?}", self.bound);
            let cursor = outcome.last_event_id().context("the answer broke off before any event id")?.to_owned();
            let pause = outcome.retry_ms().unwrap_or(RETRY_MS);
            tokio::time::sleep(Duration::from_millis(pause)).await;
            let Ok(resumed) = self.get_stream(Some(&cursor)).await else {
                continue;
            };
            ensure!(resumed.status == 200, "resumption was answered with {}", resumed.status);
            outcome.append(resumed.finish(deadline.saturating_duration_since(Instant::now())).await?);
        }
        Ok(outcome)
    }

    /// A request with the next id.
    #[must_use]
    pub fn message(&self, method: &str, params: Value) -> Value {
        let mut message = json!({"jsonrpc": "2.0", "id": self.next_id(), "method": method});
        if !params.is_null() {
            message["params"] = params;
        }
        message
    }

    /// Posts any JSON and returns when the head of the answer is there.
    ///
    /// # Errors
    /// If there was no HTTP answer within the bound.
    pub async fn post(&self, body: &Value) -> Result<Exchange> {
        self.post_bytes(body.to_string()).await
    }

    /// Posts any bytes.
    ///
    /// # Errors
    /// If there was no HTTP answer within the bound.
    pub async fn post_bytes(&self, body: impl Into<reqwest::Body>) -> Result<Exchange> {
        let request = self.http.post(&self.url).headers(self.head("application/json, text/event-stream")?).body(body);
        self.send(request).await
    }

    /// Sends a notification and returns the status.
    ///
    /// # Errors
    /// If there was no HTTP answer within the bound.
    pub async fn notify(&self, method: &str, params: Value) -> Result<u16> {
        let mut message = json!({"jsonrpc": "2.0", "method": method});
        if !params.is_null() {
            message["params"] = params;
        }
        Ok(self.post(&message).await?.status)
    }

    /// Answers a request of the server and returns the status.
    ///
    /// # Errors
    /// If there was no HTTP answer within the bound.
    pub async fn respond(&self, id: &Value, result: Value) -> Result<u16> {
        Ok(self.post(&json!({"jsonrpc": "2.0", "id": id, "result": result})).await?.status)
    }

    /// Opens a listening stream, or resumes any stream after an event.
    ///
    /// # Errors
    /// If there was no HTTP answer within the bound.
    pub async fn get_stream(&self, last_event_id: Option<&str>) -> Result<Exchange> {
        let mut request = self.http.get(&self.url).headers(self.head("text/event-stream")?);
        if let Some(id) = last_event_id {
            request = request.header("last-event-id", id);
        }
        self.send(request).await
    }

    /// Ends the session and returns the status. The client keeps the id, to be used in vain.
    ///
    /// # Errors
    /// If there was no HTTP answer within the bound.
    pub async fn delete(&self) -> Result<u16> {
        let request = self.http.delete(&self.url).headers(self.head("application/json, text/event-stream")?);
        Ok(self.send(request).await?.status)
    }

    fn head(&self, accept: &'static str) -> Result<HeaderMap> {
        let mut headers = HeaderMap::new();
        headers.insert("accept", HeaderValue::from_static(accept));
        headers.insert("content-type", HeaderValue::from_static("application/json"));
        if let Some(session) = &self.session {
            headers.insert("mcp-session-id", HeaderValue::try_from(session)?);
        }
        if let Some(version) = &self.version {
            headers.insert("mcp-protocol-version", HeaderValue::try_from(version)?);
        }
        headers.extend(self.headers.clone());
        Ok(headers)
    }

    async fn send(&self, request: reqwest::RequestBuilder) -> Result<Exchange> {
        let sent = Instant::now();
        let response =
            tokio::time::timeout(self.bound, request.send()).await.context("no answer within the bound")??;
        Ok(Exchange::new(response, sent))
    }
}

const ANSWER_BOUND: Duration = Duration::from_secs(60);
const RETRY_MS: u64 = 50;
