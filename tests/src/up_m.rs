//! UP-M: a server of 2026-07-28 over HTTP, and of nothing before: it keeps no sessions, and is as strict with `_meta` and
//! headers as the revision wants it to be.
//!
//! It runs in the test's own process, which nothing kills. Its journal has every request as it came.

use crate::ports::lasting_port;
use anyhow::Result;
use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, header};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

/// A running UP-M. It ends with its handle.
#[derive(Debug)]
pub struct UpM {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
    task: AbortHandle,
}

/// One request as it came.
#[derive(Debug, Clone)]
pub struct Seen {
    /// Its headers.
    pub headers: HeaderMap,
    /// Its body.
    pub body: Value,
}

type Body = BoxBody<Bytes, Infallible>;
type Events = mpsc::Sender<Bytes>;

#[derive(Debug, Default)]
struct State {
    journal: Vec<Seen>,
    /// Streams that are listened to, each with the id of the request that opened it.
    listeners: Vec<(Value, Events)>,
    /// Calls that wait for [`UpM::release`], each with its id.
    slow: Vec<(Value, Events)>,
}

impl UpM {
    /// Starts it on a free port.
    ///
    /// # Errors
    /// If there is none.
    pub async fn start() -> Result<UpM> {
        let listener = TcpListener::bind(lasting_port()?).await?;
        let address = listener.local_addr()?;
        let state = Arc::new(Mutex::new(State::default()));
        let task = tokio::spawn(accept(listener, Arc::clone(&state))).abort_handle();
        Ok(UpM { address, state, task })
    }

    /// A table of the gateway's configuration that names this server, and leaves its era to be found out.
    #[must_use]
    pub fn toml(&self, name: &str) -> String {
        format!("[servers.{name}]\nurl = \"http://{}/mcp\"\n", self.address)
    }

    /// The requests of that method so far.
    #[must_use]
    pub fn requests(&self, method: &str) -> Vec<Seen> {
        self.state().journal.iter().filter(|request| request.body["method"] == method).cloned().collect()
    }

    /// How many there were.
    #[must_use]
    pub fn count(&self, method: &str) -> usize {
        self.requests(method).len()
    }

    /// Says something on every stream that is listened to.
    pub fn say(&self, method: &str, params: &Value) {
        for (id, events) in &self.state().listeners {
            let mut params = params.clone();
            params["_meta"] = json!({"io.modelcontextprotocol/subscriptionId": id});
            send(events, &json!({"jsonrpc": "2.0", "method": method, "params": params}));
        }
    }

    /// How many streams are listened to.
    #[must_use]
    pub fn listeners(&self) -> usize {
        let listeners = &mut self.state().listeners;
        listeners.retain(|(_, events)| !events.is_closed());
        listeners.len()
    }

    /// How many calls of `slow` wait whose request is still open.
    #[must_use]
    pub fn waiting(&self) -> usize {
        let slow = &mut self.state().slow;
        slow.retain(|(_, events)| !events.is_closed());
        slow.len()
    }

    /// Answers the calls of `slow`.
    pub fn release(&self) {
        for (id, events) in self.state().slow.drain(..) {
            send(&events, &json!({"jsonrpc": "2.0", "id": id, "result": text("released")}));
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for UpM {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(listener: TcpListener, state: Arc<Mutex<State>>) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                if let Ok((stream, _)) = accepted {
                    connections.spawn(connection(stream, Arc::clone(&state)));
                }
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn connection(stream: TcpStream, state: Arc<Mutex<State>>) {
    let service = service_fn(move |request| serve(Arc::clone(&state), request));
    // It ends with an error whenever the peer leaves, which is how a request is cancelled.
    let _ended = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

async fn serve(state: Arc<Mutex<State>>, request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
    let (parts, body) = request.into_parts();
    if parts.method != Method::POST {
        return Ok(respond(405, "text/plain", Bytes::new()));
    }
    let body = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    state.journal.push(Seen { headers: parts.headers.clone(), body: body.clone() });
    Ok(refusal(&parts.headers, &body).unwrap_or_else(|| state.answer(&body)))
}

/// What is wrong with a request (2026-07-28, Streamable HTTP, Server Validation).
fn refusal(headers: &HeaderMap, body: &Value) -> Option<Response<Body>> {
    let (id, params) = (&body["id"], &body["params"]);
    let said = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let version = &params["_meta"]["io.modelcontextprotocol/protocolVersion"];
    if version != "2026-07-28" {
        return Some(error(400, id, -32022, &json!({"supported": ["2026-07-28"], "requested": version})));
    }
    if !params["_meta"]["io.modelcontextprotocol/clientCapabilities"].is_object() {
        return Some(error(400, id, -32602, &Value::Null));
    }
    let tool = params["name"].as_str().filter(|_| body["method"] == "tools/call");
    let region = params["arguments"]["region"].as_str().filter(|_| tool == Some("route"));
    let fits = said("mcp-protocol-version") == version.as_str()
        && said("mcp-method") == body["method"].as_str()
        && said("mcp-name") == tool
        && said("mcp-param-region") == region;
    (!fits).then(|| error(400, id, -32020, &Value::Null))
}

impl State {
    fn answer(&mut self, body: &Value) -> Response<Body> {
        let id = &body["id"];
        let result = match body["method"].as_str().unwrap_or_default() {
            "server/discover" => json!({
                "resultType": "complete", "supportedVersions": ["2026-07-28"], "ttlMs": 0, "cacheScope": "public",
                "capabilities": {"tools": {"listChanged": true}, "resources": {"subscribe": true}, "logging": {}},
                "_meta": {"io.modelcontextprotocol/serverInfo": {"name": "up-m", "version": "1"}}}),
            "tools/list" => {
                let tool = |name: &str| json!({"name": name, "inputSchema": {"type": "object"}});
                let region = json!({"region": {"type": "string", "x-mcp-header": "Region"}});
                let route = json!({"name": "route", "inputSchema": {"type": "object", "properties": region}});
                let tools = [tool("echo"), tool("ask"), tool("slow"), tool("steps"), route];
                json!({"resultType": "complete", "ttlMs": 0, "cacheScope": "public", "tools": tools})
            }
            "tools/call" => match self.call(body) {
                Ok(result) => result,
                Err(stream) => return *stream,
            },
            "subscriptions/listen" => {
                let (events, response) = stream();
                let params = json!({"notifications": body["params"]["notifications"],
                    "_meta": {"io.modelcontextprotocol/subscriptionId": id}});
                let method = "notifications/subscriptions/acknowledged";
                send(&events, &json!({"jsonrpc": "2.0", "method": method, "params": params}));
                self.listeners.push((id.clone(), events));
                return response;
            }
            _ => return error(404, id, -32601, &Value::Null),
        };
        respond(200, "application/json", json!({"jsonrpc": "2.0", "id": id, "result": result}).to_string())
    }

    /// The result of a tool, or a stream that it comes on.
    fn call(&mut self, body: &Value) -> Result<Value, Box<Response<Body>>> {
        let (id, params) = (&body["id"], &body["params"]);
        let progress = |step: u64| {
            let params = json!({"progressToken": params["_meta"]["progressToken"], "progress": step});
            json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": params})
        };
        match params["name"].as_str().unwrap_or_default() {
            "echo" | "route" => Ok(text(params["arguments"]["text"].as_str().unwrap_or("routed"))),
            "ask" => match (&params["inputResponses"]["q"]["content"]["answer"], &params["requestState"]) {
                (Value::String(answer), Value::String(state)) => Ok(text(&format!("{answer} in {state}"))),
                _ => {
                    let schema = json!({"type": "object", "properties": {"answer": {"type": "string"}}});
                    let params = json!({"mode": "form", "message": "?", "requestedSchema": schema});
                    let asked = json!({"q": {"method": "elicitation/create", "params": params}});
                    Ok(json!({"resultType": "input_required", "requestState": "s-1", "inputRequests": asked}))
                }
            },
            "steps" => {
                let (events, response) = stream();
                (1..=3).for_each(|step| send(&events, &progress(step)));
                send(&events, &json!({"jsonrpc": "2.0", "id": id, "result": text("3 steps")}));
                Err(Box::new(response))
            }
            "slow" => {
                let (events, response) = stream();
                send(&events, &progress(1));
                self.slow.push((id.clone(), events));
                Err(Box::new(response))
            }
            _ => Err(Box::new(error(200, id, -32602, &Value::Null))),
        }
    }
}

fn text(text: &str) -> Value {
    json!({"resultType": "complete", "content": [{"type": "text", "text": text}]})
}

fn error(status: u16, id: &Value, code: i32, data: &Value) -> Response<Body> {
    let error = json!({"code": code, "message": "refused by up-m", "data": data});
    respond(status, "application/json", json!({"jsonrpc": "2.0", "id": id, "error": error}).to_string())
}

fn respond(status: u16, content_type: &'static str, body: impl Into<Bytes>) -> Response<Body> {
    let mut response = Response::new(Full::new(body.into()).boxed());
    *response.status_mut() = http::StatusCode::from_u16(status).unwrap_or_default();
    response.headers_mut().insert(header::CONTENT_TYPE, http::HeaderValue::from_static(content_type));
    response
}

fn stream() -> (Events, Response<Body>) {
    let (events, body) = mpsc::channel(EVENTS_MAX);
    let mut response = Response::new(Frames(body).boxed());
    response.headers_mut().insert(header::CONTENT_TYPE, http::HeaderValue::from_static("text/event-stream"));
    (events, response)
}

fn send(events: &Events, message: &Value) {
    // A reader that has left is what some tests are about.
    let _left = events.try_send(format!("event: message\ndata: {message}\n\n").into());
}

/// A body that is sent as it comes.
struct Frames(mpsc::Receiver<Bytes>);

impl hyper::body::Body for Frames {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|chunk| chunk.map(|chunk| Ok(Frame::data(chunk))))
    }
}

const EVENTS_MAX: usize = 64;
