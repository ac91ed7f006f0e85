//! A client of 2026-07-28 of which every byte is known: no session, and each request says for itself what it is.

use crate::raw::{SseItem, SseParser};
use crate::wait::within;
use anyhow::{Context as _, Result, ensure};
use reqwest::Response;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A client of one endpoint.
#[derive(Debug)]
pub struct StatelessClient {
    url: String,
    http: reqwest::Client,
    name: String,
    handle: Option<String>,
    bearer: Option<String>,
    agent: Option<String>,
    capabilities: Value,
    next: AtomicU64,
}

impl StatelessClient {
    /// A client of the endpoint `url` that can do nothing but ask.
    ///
    /// # Errors
    /// If no HTTP client can be made.
    pub fn new(url: &str) -> Result<StatelessClient> {
        let http = reqwest::Client::builder().no_proxy().pool_max_idle_per_host(0).build()?;
        let (url, name) = (url.to_owned(), "stateless".to_owned());
        Ok(StatelessClient {
            url,
            http,
            name,
            handle: None,
            bearer: None,
            agent: None,
            capabilities: json!({}),
            next: AtomicU64::new(1),
        })
    }

    /// The same client under another name of its own.
    #[must_use]
    pub fn named(self, name: &str) -> StatelessClient {
        StatelessClient { name: name.to_owned(), ..self }
    }

    /// The same client, which tells the gateway which one it is.
    #[must_use]
    pub fn with_handle(self, handle: &str) -> StatelessClient {
        StatelessClient { handle: Some(handle.to_owned()), ..self }
    }

    /// The same client with a token.
    #[must_use]
    pub fn with_bearer(self, token: &str) -> StatelessClient {
        StatelessClient { bearer: Some(token.to_owned()), ..self }
    }

    /// The same client of an agent that says its name.
    #[must_use]
    pub fn with_agent(self, agent: &str) -> StatelessClient {
        StatelessClient { agent: Some(agent.to_owned()), ..self }
    }

    /// The same client, which can do that.
    #[must_use]
    pub fn with_capabilities(self, capabilities: Value) -> StatelessClient {
        StatelessClient { capabilities, ..self }
    }

    /// A request as this client writes it. What `params` say in `_meta` is kept.
    pub fn message(&self, method: &str, params: Value) -> Value {
        let mut params = params;
        let meta = &mut params["_meta"];
        meta["io.modelcontextprotocol/protocolVersion"] = json!(VERSION);
        meta["io.modelcontextprotocol/clientCapabilities"] = self.capabilities.clone();
        meta["io.modelcontextprotocol/clientInfo"] = json!({"name": self.name, "version": "1"});
        let id = format!("r\u{e4}{}", self.next.fetch_add(1, Ordering::Relaxed));
        json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params})
    }

    /// Sends a message with the headers that it needs.
    ///
    /// # Errors
    /// If there is no answer.
    pub async fn send(&self, message: &Value) -> Result<Incoming> {
        let method = message["method"].as_str().context("a method")?;
        let params = &message["params"];
        let name = match method {
            "tools/call" | "prompts/get" => params["name"].as_str(),
            "resources/read" => params["uri"].as_str(),
            "tasks/get" | "tasks/update" | "tasks/cancel" => params["taskId"].as_str(),
            _ => None,
        };
        let mut request = self
            .http
            .post(&self.url)
            .header("accept", "application/json, text/event-stream")
            .header("content-type", "application/json")
            .header("mcp-protocol-version", VERSION)
            .header("mcp-method", method);
        if let Some(name) = name {
            request = request.header("mcp-name", name);
        }
        if let Some(handle) = &self.handle {
            request = request.header("x-mainstay-client", handle);
        }
        if let Some(agent) = &self.agent {
            request = request.header("x-agent-name", agent);
        }
        if let Some(token) = &self.bearer {
            request = request.bearer_auth(token);
        }
        let response = request.body(message.to_string()).send().await?;
        Ok(Incoming {
            status: response.status().as_u16(),
            response,
            parser: SseParser::default(),
            ready: VecDeque::new(),
        })
    }

    /// Begins a request.
    ///
    /// # Errors
    /// If there is no answer.
    pub async fn begin(&self, method: &str, params: Value) -> Result<Incoming> {
        self.send(&self.message(method, params)).await
    }

    /// Makes a request and waits for its response: the HTTP status and the message.
    ///
    /// # Errors
    /// If there is none within the bound, or it has another id.
    pub async fn request(&self, method: &str, params: Value) -> Result<(u16, Value)> {
        let message = self.message(method, params);
        within(method, BOUND, async {
            let mut incoming = self.send(&message).await?;
            let response = incoming.response_message().await?;
            ensure!(response["id"] == message["id"], "another id: {response}");
            Ok((incoming.status, response))
        })
        .await
    }

    /// The result of a request that succeeds.
    ///
    /// # Errors
    /// If it does not.
    pub async fn result(&self, method: &str, params: Value) -> Result<Value> {
        let (status, response) = self.request(method, params).await?;
        ensure!(status == 200 && response.get("result").is_some(), "{status}: {response}");
        Ok(response["result"].clone())
    }

    /// The first text of the result of a tool.
    ///
    /// # Errors
    /// If it does not succeed.
    pub async fn call(&self, tool: &str, arguments: Value) -> Result<String> {
        let result = self.result("tools/call", json!({"name": tool, "arguments": arguments})).await?;
        Ok(result["content"][0]["text"].as_str().with_context(|| format!("no text: {result}"))?.to_owned())
    }
}

/// A response as it comes. Dropping it closes its connection.
#[derive(Debug)]
pub struct Incoming {
    /// The HTTP status.
    pub status: u16,
    response: Response,
    parser: SseParser,
    ready: VecDeque<Value>,
}

impl Incoming {
    /// Whether the response is a stream.
    #[must_use]
    pub fn is_stream(&self) -> bool {
        self.response.headers().get("content-type").is_some_and(|value| value == "text/event-stream")
    }

    /// The next message; `None` at the end.
    ///
    /// # Errors
    /// If the connection breaks, the bound is reached, or an event has an id: nothing can be resumed in this era.
    pub async fn next_message(&mut self) -> Result<Option<Value>> {
        if !self.is_stream() {
            let whole = self.response.chunk().await?;
            return whole.map(|_| Err(anyhow::anyhow!("not a stream"))).transpose();
        }
        within("a message", BOUND, async {
            loop {
                while let Some(item) = self.parser.next_item() {
                    if let SseItem::Event(event) = item {
                        ensure!(event.id.is_none() && event.retry_ms.is_none(), "an event to come back to: {event:?}");
                        self.ready.push_back(serde_json::from_str(&event.data)?);
                    }
                }
                if let Some(message) = self.ready.pop_front() {
                    return Ok(Some(message));
                }
                match self.response.chunk().await? {
                    Some(chunk) => self.parser.push(&chunk),
                    None => return Ok(None),
                }
            }
        })
        .await
    }

    /// The next message for which `wanted` holds.
    ///
    /// # Errors
    /// If there is none.
    pub async fn until(&mut self, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
        loop {
            let message = self.next_message().await?.context("the stream goes on")?;
            if wanted(&message) {
                return Ok(message);
            }
        }
    }

    /// The response at the end, whatever carries it.
    ///
    /// # Errors
    /// If there is none.
    pub async fn response_message(&mut self) -> Result<Value> {
        if self.is_stream() {
            return self.until(|message| message.get("method").is_none()).await;
        }
        let mut body = Vec::new();
        while let Some(chunk) = self.response.chunk().await? {
            body.extend_from_slice(&chunk);
        }
        serde_json::from_slice(&body).with_context(|| String::from_utf8_lossy(&body).into_owned())
    }
}

const VERSION: &str = "2026-07-28";
const BOUND: Duration = Duration::from_secs(30);
