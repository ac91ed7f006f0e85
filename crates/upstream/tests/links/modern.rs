//! A server of 2026-07-28 that does as it is told, and is as strict as the revision wants it to be.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use mainstay_core::wire::modern::Era;
use mainstay_upstream::{Reach, Server, Transport};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::fake::{Chunks, event, lasting_listener, plain};
use crate::support::server;

/// One request as it was seen.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) headers: HeaderMap,
    pub(crate) body: Value,
}

pub(crate) struct State {
    pub(crate) log: Vec<Seen>,
    /// Whether it is a server of the legacy era now.
    pub(crate) legacy: bool,
    /// The streams that are listened to, with the id of the request that opened each.
    listeners: Vec<(Value, mpsc::Sender<Result<Bytes, std::io::Error>>)>,
    /// The streams of slow calls.
    slow: Vec<mpsc::Sender<Result<Bytes, std::io::Error>>>,
}

pub(crate) struct Modern {
    pub(crate) address: SocketAddr,
    state: Arc<Mutex<State>>,
}

impl Modern {
    pub(crate) async fn start() -> Self {
        let listener = lasting_listener().await;
        let address = listener.local_addr().unwrap();
        let state = State { log: Vec::new(), legacy: false, listeners: Vec::new(), slow: Vec::new() };
        let state = Arc::new(Mutex::new(state));
        let shared = Arc::clone(&state);
        tokio::spawn(async move {
            loop {
                let (socket, _) = listener.accept().await.unwrap();
                let state = Arc::clone(&shared);
                tokio::spawn(async move {
                    let service = service_fn(|request| serve(Arc::clone(&state), request));
                    let http = hyper::server::conn::http1::Builder::new();
                    let _ = http.serve_connection(TokioIo::new(socket), service).await;
                });
            }
        });
        Self { address, state }
    }

    pub(crate) fn server(&self, era: Option<Era>) -> Arc<Server> {
        let url = format!("http://{}/mcp", self.address).parse().unwrap();
        let reach = Reach::Http { url, transport: Transport::Auto, headers: Vec::new() };
        Arc::new(Server { era, ..server(reach) })
    }

    pub(crate) fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap());
    }

    /// The requests of that method.
    pub(crate) fn seen(&self, method: &str) -> Vec<Seen> {
        let state = self.state.lock().unwrap();
        state.log.iter().filter(|seen| seen.body["method"] == method).cloned().collect()
    }

    pub(crate) fn count(&self, method: &str) -> usize {
        self.seen(method).len()
    }

    /// Says something on every stream that is listened to.
    pub(crate) fn say(&self, method: &str, params: &Value) {
        for (id, listener) in &self.state.lock().unwrap().listeners {
            let mut params = params.clone();
            params["_meta"] = json!({"io.modelcontextprotocol/subscriptionId": id});
            let message = json!({"jsonrpc": "2.0", "method": method, "params": params});
            let _ = listener.try_send(Ok(event(None, None, &message.to_string())));
        }
    }

    /// Ends every stream that is listened to.
    pub(crate) fn hang_up(&self) {
        self.state.lock().unwrap().listeners.clear();
    }

    pub(crate) fn listeners(&self) -> usize {
        let listeners = &mut self.state.lock().unwrap().listeners;
        listeners.retain(|(_, listener)| !listener.is_closed());
        listeners.len()
    }

    /// How many slow calls wait, whose requests nobody has closed.
    pub(crate) fn slow(&self) -> usize {
        let slow = &mut self.state.lock().unwrap().slow;
        slow.retain(|stream| !stream.is_closed());
        slow.len()
    }
}

async fn serve(state: Arc<Mutex<State>>, request: Request<Incoming>) -> Result<Response<Chunks>, Infallible> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let mut state = state.lock().unwrap();
    if parts.method != Method::POST {
        return Ok(plain(405, "text/plain", ""));
    }
    state.log.push(Seen { headers: parts.headers.clone(), body: body.clone() });
    if state.legacy {
        return Ok(answer_as_legacy(&body));
    }
    Ok(refusal(&parts.headers, &body).unwrap_or_else(|| state.answer(&body)))
}

fn error(status: u16, id: &Value, code: i32, data: &Value) -> Response<Chunks> {
    let error = json!({"code": code, "message": "no", "data": data});
    plain(status, "application/json", json!({"jsonrpc": "2.0", "id": id, "error": error}).to_string())
}

/// What a server with sessions, here always the same one, answers.
fn answer_as_legacy(body: &Value) -> Response<Chunks> {
    let result = match body["method"].as_str().unwrap_or_default() {
        "initialize" => json!({"protocolVersion": "2025-11-25", "capabilities": {"tools": {}},
            "serverInfo": {"name": "legacy", "version": "0"}}),
        "tools/call" => json!({"content": [{"type": "text", "text": "legacy"}]}),
        "server/discover" => return error(400, &Value::Null, -32000, &Value::Null),
        _ => return plain(202, "text/plain", ""),
    };
    if body["params"]["_meta"].get("io.modelcontextprotocol/protocolVersion").is_some() {
        return error(400, &Value::Null, -32000, &Value::Null);
    }
    plain(200, "application/json", json!({"jsonrpc": "2.0", "id": body["id"], "result": result}).to_string())
}

/// What is wrong with a request (2026-07-28, Streamable HTTP, Server Validation).
fn refusal(headers: &HeaderMap, body: &Value) -> Option<Response<Chunks>> {
    let (id, params) = (&body["id"], &body["params"]);
    let text = |name: &str| headers.get(name).map(|value| value.to_str().unwrap());
    let version = &params["_meta"]["io.modelcontextprotocol/protocolVersion"];
    if version != "2026-07-28" || !params["_meta"]["io.modelcontextprotocol/clientCapabilities"].is_object() {
        let data = json!({"supported": ["2026-07-28"], "requested": version});
        return Some(error(400, id, -32022, &data));
    }
    let named = match body["method"].as_str().unwrap() {
        "tools/call" | "prompts/get" => params["name"].as_str(),
        "resources/read" => params["uri"].as_str(),
        _ => None,
    };
    let fits = text("mcp-protocol-version") == version.as_str()
        && text("mcp-method") == body["method"].as_str()
        && text("mcp-name") == named;
    let region = params["arguments"]["region"].as_str().filter(|_| named == Some("route"));
    (!fits || text("mcp-param-region") != region).then(|| error(400, id, -32020, &Value::Null))
}

impl State {
    fn answer(&mut self, body: &Value) -> Response<Chunks> {
        let id = &body["id"];
        let result = match body["method"].as_str().unwrap() {
            "server/discover" => json!({"resultType": "complete", "supportedVersions": ["2026-07-28"],
                "capabilities": {"tools": {"listChanged": true}, "resources": {"subscribe": true}, "logging": {}},
                "ttlMs": 0, "cacheScope": "public",
                "_meta": {"io.modelcontextprotocol/serverInfo": {"name": "modern", "version": "1"}}}),
            "tools/list" => json!({"resultType": "complete", "ttlMs": 5, "cacheScope": "private", "tools": [
                {"name": "read", "annotations": {"readOnlyHint": true}},
                {"name": "route", "inputSchema": {"type": "object", "properties": {
                    "region": {"type": "string", "x-mcp-header": "Region"}}}},
                {"name": "wrong", "inputSchema": {"properties": {"n": {"type": "number", "x-mcp-header": "N"}}}}]}),
            "tools/call" | "prompts/get" => match self.call(body) {
                Ok(result) => result,
                Err(response) => return response,
            },
            "subscriptions/listen" => {
                let (sender, receiver) = mpsc::channel(64);
                let params = json!({"notifications": body["params"]["notifications"],
                    "_meta": {"io.modelcontextprotocol/subscriptionId": id}});
                let method = "notifications/subscriptions/acknowledged";
                let message = json!({"jsonrpc": "2.0", "method": method, "params": params}).to_string();
                sender.try_send(Ok(event(None, None, &message))).unwrap();
                self.listeners.push((id.clone(), sender));
                return events(receiver);
            }
            _ => return error(404, id, -32601, &Value::Null),
        };
        plain(200, "application/json", json!({"jsonrpc": "2.0", "id": id, "result": result}).to_string())
    }

    fn call(&mut self, body: &Value) -> Result<Value, Response<Chunks>> {
        let params = &body["params"];
        let text = |text: &str| json!({"resultType": "complete", "content": [{"type": "text", "text": text}]});
        let wish = |requests: &Value| json!({"resultType": "input_required", "requestState": "s\"1", "inputRequests": requests});
        let form = json!({"who": {"method": "elicitation/create", "params": {"message": "who?", "mode": "form"}}});
        Ok(match params["name"].as_str().unwrap() {
            "ask" => match (&params["inputResponses"]["who"]["content"]["name"], &params["requestState"]) {
                (Value::String(name), Value::String(state)) => text(&format!("{name} {state}")),
                _ => wish(&form),
            },
            "roots" => match params["inputResponses"]["r"]["roots"].as_array() {
                Some(roots) => text(&roots.len().to_string()),
                None => wish(&json!({"r": {"method": "roots/list"}})),
            },
            "again" => wish(&json!({"r": {"method": "roots/list"}})),
            "slow" => {
                let (sender, receiver) = mpsc::channel(64);
                let params = json!({"progressToken": params["_meta"]["progressToken"], "progress": 1});
                let message = json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": params});
                sender.try_send(Ok(event(None, None, &message.to_string()))).unwrap();
                self.slow.push(sender);
                return Err(events(receiver));
            }
            _ => text("done"),
        })
    }
}

fn events(receiver: mpsc::Receiver<Result<Bytes, std::io::Error>>) -> Response<Chunks> {
    Response::builder().header("content-type", "text/event-stream").body(Chunks(receiver)).unwrap()
}
