//! An MCP client just large enough for the demo: streamable HTTP, 2025-11-25, one session, one call at a time.

use std::net::SocketAddr;

use anyhow::{Context as _, anyhow, bail};
use bytes::Bytes;
use http::header::{ACCEPT, CONTENT_TYPE, HOST};
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use mainstay_core::wire::sse::SseDecoder;
use serde_json::{Value, json};

use crate::cli::api::{full, send, whole};

/// A session in the making.
pub(super) struct Client {
    address: SocketAddr,
    path: String,
    session: Option<String>,
    last_id: u64,
}

impl Client {
    /// A client of the server `name` on the gateway's `address`.
    pub(super) fn new(address: SocketAddr, name: &str) -> Self {
        Self { address, path: format!("/mcp/{name}"), session: None, last_id: 0 }
    }

    /// The endpoint.
    pub(super) fn url(&self) -> String {
        format!("http://{}{}", self.address, self.path)
    }

    /// Opens the session: `initialize`, then `initialized`.
    pub(super) async fn open(&mut self) -> anyhow::Result<()> {
        let params = json!({
            "protocolVersion": VERSION,
            "capabilities": {},
            "clientInfo": { "name": "mainstay demo", "version": env!("CARGO_PKG_VERSION") },
        });
        self.request("initialize", &params).await?;
        let response = self.post(&json!({ "jsonrpc": "2.0", "method": "notifications/initialized" })).await?;
        match response.status() {
            StatusCode::ACCEPTED => Ok(()),
            status => bail!("`initialized` was answered {status}"),
        }
    }

    /// Calls a tool without arguments.
    pub(super) async fn call(&mut self, tool: &str) -> anyhow::Result<Value> {
        self.request("tools/call", &json!({ "name": tool, "arguments": {} })).await
    }

    async fn request(&mut self, method: &str, params: &Value) -> anyhow::Result<Value> {
        self.last_id += 1;
        let message = json!({ "jsonrpc": "2.0", "id": self.last_id, "method": method, "params": params });
        let response = self.post(&message).await?;
        if let Some(session) = response.headers().get(SESSION_HEADER) {
            self.session = Some(session.to_str().context("read the session id")?.to_owned());
        }
        let status = response.status();
        let kind = response.headers().get(CONTENT_TYPE).map(|kind| kind.as_bytes().to_vec()).unwrap_or_default();
        let answer = if kind.starts_with(b"text/event-stream") {
            streamed(response, self.last_id).await?
        } else {
            serde_json::from_slice(&whole(response).await?)
                .with_context(|| format!("`{method}` was answered {status}"))?
        };
        match (answer.get("result"), answer.get("error")) {
            (Some(result), _) => Ok(result.clone()),
            (None, error) => Err(anyhow!("`{method}` failed: {}", error.unwrap_or(&answer))),
        }
    }

    async fn post(&self, message: &Value) -> anyhow::Result<Response<Incoming>> {
        let mut request = Request::post(self.path.as_str())
            .header(HOST, self.address.to_string())
            .header(CONTENT_TYPE, "application/json")
            .header(ACCEPT, "application/json, text/event-stream");
        if let Some(session) = &self.session {
            request = request.header(SESSION_HEADER, session).header("mcp-protocol-version", VERSION);
        }
        let body = full(serde_json::to_vec(message)?);
        send(self.address, request.body(body)?).await
    }
}

/// The response to the request `id` out of a stream of events.
async fn streamed(response: Response<Incoming>, id: u64) -> anyhow::Result<Value> {
    let mut body = response.into_body();
    let mut events = SseDecoder::new(EVENT_BYTES_MAX);
    loop {
        let frame = body.frame().await.ok_or_else(|| anyhow!("the stream ended without the answer"))??;
        let chunk: Bytes = frame.into_data().unwrap_or_default();
        events.push(&chunk);
        while let Some(event) = events.next_event()? {
            let data = event.data.unwrap_or_default();
            let message: Option<Value> = serde_json::from_slice(&data).ok();
            if let Some(message) = message.filter(|message| message["id"] == id && message.get("method").is_none()) {
                return Ok(message);
            }
        }
    }
}

const VERSION: &str = "2025-11-25";
const SESSION_HEADER: &str = "mcp-session-id";
const EVENT_BYTES_MAX: usize = 16 * 1024 * 1024;
