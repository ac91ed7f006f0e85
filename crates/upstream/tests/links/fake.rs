//! A streamable HTTP server that does as it is told.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response};
use http_body_util::BodyExt as _;
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use mainstay_upstream::{Reach, Server, Transport};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};

use crate::support::{server, template};

/// What the next call meets instead of an answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Gap {
    /// The connection is cut without a look at the call.
    CutBefore,
    /// The call is executed, then the connection is cut.
    CutAfter,
    /// This status and body; the call is not executed.
    Status(u16, &'static str),
    /// An event stream that is cut after these messages, the answer never.
    CutEvents(usize),
}

/// How calls are answered.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Style {
    Json,
    Events,
    /// Events with ids: cut after each message, and gone on with at GET.
    Polling,
}

/// What an unknown session id is answered with: status, content type, headers, body.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(crate) status: u16,
    pub(crate) content_type: &'static str,
    pub(crate) challenge: bool,
    pub(crate) body: String,
}

/// One request as it was seen.
#[derive(Clone, Debug)]
pub(crate) struct Logged {
    pub(crate) http: String,
    pub(crate) method: String,
    pub(crate) session: Option<String>,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Value,
}

pub(crate) struct State {
    pub(crate) sessions: BTreeSet<String>,
    pub(crate) log: Vec<Logged>,
    pub(crate) executed: BTreeMap<String, u32>,
    pub(crate) gaps: Vec<Gap>,
    pub(crate) style: Style,
    pub(crate) refusal: Refusal,
    pub(crate) issue_ids: bool,
    pub(crate) version: &'static str,
    /// The status of GET; 200 opens a stream.
    pub(crate) get_status: u16,
    pub(crate) delete_status: u16,
    /// Forgets all sessions right after each `initialized`, that many times.
    pub(crate) forget_after_initialized: u32,
    pub(crate) tools: Vec<Value>,
    /// What `Authorization` must be, if anything.
    pub(crate) authorization: Option<String>,
    pub(crate) hang_initialize: bool,
    /// Takes notifications other than `initialized`, and never says so.
    pub(crate) hang_news: bool,
    next_session: u32,
    listeners: Vec<mpsc::Sender<Bytes>>,
    /// Streams to be gone on with: the events behind each cursor.
    streams: HashMap<String, Vec<Bytes>>,
}

pub(crate) struct Fake {
    pub(crate) address: SocketAddr,
    state: Arc<Mutex<State>>,
    /// Whether connections are accepted, and a number that rises when all are to be cut.
    gate: watch::Sender<(bool, u32)>,
}

impl Fake {
    pub(crate) async fn start() -> Self {
        let listener = lasting_listener().await;
        let address = listener.local_addr().unwrap();
        let state = Arc::new(Mutex::new(State::new()));
        let (gate, opened) = watch::channel((true, 0));
        tokio::spawn(accept(listener, address, Arc::clone(&state), opened));
        Self { address, state, gate }
    }

    pub(crate) fn server(&self) -> Arc<Server> {
        self.server_with(&[])
    }

    pub(crate) fn server_with(&self, headers: &[(&'static str, &str)]) -> Arc<Server> {
        let headers = headers.iter().map(|(name, value)| (http::HeaderName::from_static(name), template(value)));
        let url = format!("http://{}/mcp", self.address).parse().unwrap();
        Arc::new(server(Reach::Http { url, transport: Transport::Auto, headers: headers.collect() }))
    }

    pub(crate) fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap());
    }

    pub(crate) fn look<T>(&self, look: impl FnOnce(&State) -> T) -> T {
        look(&self.state.lock().unwrap())
    }

    pub(crate) fn forget(&self) {
        self.set(|state| state.sessions.clear());
    }

    /// Closes the port and every connection.
    pub(crate) async fn close(&self) {
        self.gate.send_modify(|(open, cuts)| (*open, *cuts) = (false, *cuts + 1));
        while TcpStream::connect(self.address).await.is_ok() {
            tokio::task::yield_now().await;
        }
    }

    pub(crate) async fn reopen(&self) {
        self.gate.send_modify(|(open, _)| *open = true);
        while TcpStream::connect(self.address).await.is_err() {
            tokio::task::yield_now().await;
        }
    }

    /// Cuts every connection; new ones are welcome.
    pub(crate) fn cut(&self) {
        self.set(|state| state.listeners.clear());
        self.gate.send_modify(|(_, cuts)| *cuts += 1);
    }

    /// How many requests of that JSON-RPC or HTTP method came.
    pub(crate) fn count(&self, method: &str) -> usize {
        self.look(|state| state.log.iter().filter(|seen| seen.method == method || seen.http == method).count())
    }

    pub(crate) fn executed(&self, tool: &str) -> u32 {
        self.look(|state| state.executed.get(tool).copied().unwrap_or_default())
    }

    /// The requests of that method.
    pub(crate) fn seen(&self, method: &str) -> Vec<Logged> {
        let fits = |seen: &&Logged| seen.method == method || seen.http == method;
        self.look(|state| state.log.iter().filter(fits).cloned().collect())
    }

    /// The JSON-RPC methods in the order of their coming.
    pub(crate) fn methods(&self) -> Vec<String> {
        self.look(|state| state.log.iter().map(|seen| seen.method.clone()).filter(|name| !name.is_empty()).collect())
    }

    pub(crate) fn listeners(&self) -> usize {
        self.set(|state| state.listeners.retain(|listener| !listener.is_closed()));
        self.look(|state| state.listeners.len())
    }

    /// Says something on every listening stream.
    pub(crate) fn say(&self, id: Option<&str>, message: &Value) {
        let event = event(id, None, &message.to_string());
        self.look(|state| state.listeners.iter().for_each(|listener| listener.try_send(event.clone()).unwrap()));
    }
}

impl State {
    fn new() -> Self {
        Self {
            sessions: BTreeSet::new(),
            log: Vec::new(),
            executed: BTreeMap::new(),
            gaps: Vec::new(),
            style: Style::Json,
            refusal: Refusal {
                status: 404,
                content_type: "application/json",
                challenge: false,
                body: r#"{"jsonrpc":"2.0","error":{"code":-32001,"message":"Session not found"},"id":null}"#.to_owned(),
            },
            issue_ids: true,
            version: "2025-11-25",
            get_status: 405,
            delete_status: 200,
            forget_after_initialized: 0,
            tools: vec![json!({"name": "read", "annotations": {"readOnlyHint": true}}), json!({"name": "incr"})],
            authorization: None,
            hang_initialize: false,
            hang_news: false,
            next_session: 1,
            listeners: Vec::new(),
            streams: HashMap::new(),
        }
    }
}

/// A listener on a port below the range from which the system takes ports for outgoing connections: nobody is given it
/// while it is closed.
pub(crate) async fn lasting_listener() -> TcpListener {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let width = PORTS.end - PORTS.start;
    let spread = u16::try_from(std::process::id() % u32::from(width)).unwrap();
    loop {
        let step = NEXT.fetch_add(1, Ordering::Relaxed).wrapping_mul(41).wrapping_add(spread);
        if let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, PORTS.start + step % width)).await {
            return listener;
        }
    }
}

/// A process that another test forks holds what was closed just now until it becomes its own program.
async fn bind_again(address: SocketAddr) -> TcpListener {
    let deadline = tokio::time::Instant::now() + BIND_AGAIN_MAX;
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => return listener,
            Err(error) => assert!(tokio::time::Instant::now() < deadline, "{address}: {error}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

const PORTS: std::ops::Range<u16> = 10_240..32_000;
const BIND_AGAIN_MAX: Duration = Duration::from_secs(10);

async fn accept(
    listener: TcpListener,
    address: SocketAddr,
    state: Arc<Mutex<State>>,
    mut gate: watch::Receiver<(bool, u32)>,
) {
    let mut listener = Some(listener);
    loop {
        let (open, _) = *gate.borrow_and_update();
        match (&listener, open) {
            (None, true) => listener = Some(bind_again(address).await),
            (Some(_), false) => listener = None,
            _ => {}
        }
        let accepted = async {
            match &listener {
                Some(listener) => listener.accept().await.unwrap().0,
                None => std::future::pending().await,
            }
        };
        let socket = tokio::select! {
            socket = accepted => socket,
            changed = gate.changed() => match changed {
                Ok(()) => continue,
                Err(_) => return,
            },
        };
        let (state, mut cuts) = (Arc::clone(&state), gate.clone());
        cuts.mark_unchanged();
        tokio::spawn(async move {
            let service = service_fn(|request| serve(Arc::clone(&state), request));
            let connection = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(socket), service);
            let cut_off = cuts.borrow().1;
            tokio::select! {
                _ = connection => {}
                _ = cuts.wait_for(|(_, cuts)| *cuts != cut_off) => {}
            }
        });
    }
}

/// A body that is sent as it comes; an error cuts the connection.
pub(crate) struct Chunks(pub(crate) mpsc::Receiver<Result<Bytes, std::io::Error>>);

impl hyper::body::Body for Chunks {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        self.0.poll_recv(context).map(|chunk| chunk.map(|chunk| chunk.map(Frame::data)))
    }
}

pub(crate) fn plain(status: u16, content_type: &str, body: impl Into<Bytes>) -> Response<Chunks> {
    let (sender, receiver) = mpsc::channel(1);
    sender.try_send(Ok(body.into())).unwrap();
    let response = Response::builder().status(status).header("content-type", content_type);
    response.body(Chunks(receiver)).unwrap()
}

fn stream(chunks: Vec<Bytes>, cut: bool) -> Response<Chunks> {
    let (sender, receiver) = mpsc::channel(chunks.len() + 1);
    chunks.into_iter().for_each(|chunk| sender.try_send(Ok(chunk)).unwrap());
    if cut {
        tokio::spawn(async move {
            // What was written must be on its way before the cut.
            tokio::time::sleep(Duration::from_millis(100)).await;
            let _ = sender.send(Err(std::io::Error::other("cut"))).await;
        });
    }
    Response::builder().header("content-type", "text/event-stream").body(Chunks(receiver)).unwrap()
}

pub(crate) fn event(id: Option<&str>, retry_ms: Option<u64>, data: &str) -> Bytes {
    let mut out = Vec::new();
    mainstay_core::wire::sse::encode(&mut out, id, retry_ms, data.as_bytes());
    out.into()
}

async fn serve(
    state: Arc<Mutex<State>>,
    request: Request<Incoming>,
) -> Result<Response<Chunks>, Box<dyn std::error::Error + Send + Sync>> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let text = |name: &str| parts.headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let session = text("mcp-session-id");
    let method = body["method"].as_str().unwrap_or_default().to_owned();
    let hang = {
        let mut state = state.lock().unwrap();
        let (http, headers) = (parts.method.to_string(), parts.headers.clone());
        state.log.push(Logged { http, method: method.clone(), session: session.clone(), headers, body: body.clone() });
        if state.authorization.is_some() && state.authorization != text("authorization") {
            let mut response = plain(401, "text/plain", "no");
            response.headers_mut().insert("www-authenticate", "Bearer error=\"invalid_token\"".parse().unwrap());
            return Ok(response);
        }
        let news = method.starts_with("notifications/") && method != "notifications/initialized";
        (method == "initialize" && state.hang_initialize) || (news && state.hang_news)
    };
    if hang {
        std::future::pending::<Infallible>().await;
    }
    let delay = Duration::from_millis(body["params"]["arguments"]["ms"].as_u64().unwrap_or_default());
    tokio::time::sleep(delay).await;
    let mut state = state.lock().unwrap();
    let known = session.as_ref().is_some_and(|session| state.sessions.contains(session)) || !state.issue_ids;
    if method != "initialize" && !known {
        return Ok(refuse(&state.refusal));
    }
    match parts.method {
        Method::POST => state.post(&method, &body).map_err(Into::into),
        Method::GET => Ok(state.get(text("last-event-id").as_deref())),
        Method::DELETE => {
            let status = state.delete_status;
            if let Some(session) = session.filter(|_| status == 200) {
                state.sessions.remove(&session);
            }
            Ok(plain(status, "text/plain", ""))
        }
        _ => Ok(plain(405, "text/plain", "")),
    }
}

fn refuse(refusal: &Refusal) -> Response<Chunks> {
    let mut response = plain(refusal.status, refusal.content_type, refusal.body.clone());
    if refusal.challenge {
        response.headers_mut().insert("www-authenticate", "Bearer".parse().unwrap());
    }
    response
}

impl State {
    fn post(&mut self, method: &str, body: &Value) -> Result<Response<Chunks>, &'static str> {
        if body.get("id").is_none() || body.get("method").is_none() {
            if method == "notifications/initialized" && self.forget_after_initialized > 0 {
                self.forget_after_initialized -= 1;
                self.sessions.clear();
            }
            return Ok(plain(202, "text/plain", ""));
        }
        let gap = if method == "tools/call" && !self.gaps.is_empty() { Some(self.gaps.remove(0)) } else { None };
        match gap {
            Some(Gap::CutBefore) => return Err("cut before"),
            Some(Gap::Status(status, said)) => return Ok(plain(status, "application/json", said)),
            Some(Gap::CutAfter | Gap::CutEvents(_)) | None => {}
        }
        let (before, response) = self.answer(method, body);
        if gap == Some(Gap::CutAfter) {
            return Err("cut after");
        }
        if let Some(Gap::CutEvents(count)) = gap {
            let messages = before.iter().take(count).map(|message| event(None, None, &message.to_string()));
            return Ok(stream(messages.collect(), true));
        }
        let mut reply = match self.style {
            _ if method == "initialize" => plain(200, "application/json; charset=utf-8", response.to_string()),
            Style::Json => plain(200, "application/json", response.to_string()),
            Style::Events => {
                let all = before.iter().chain([&response]).map(|message| event(None, None, &message.to_string()));
                stream(all.collect(), false)
            }
            Style::Polling => self.poll(&before, &response),
        };
        if method == "initialize" && self.issue_ids {
            let session = format!("upstream-{}", self.next_session);
            self.next_session += 1;
            reply.headers_mut().insert("mcp-session-id", session.parse().unwrap());
            self.sessions.insert(session);
        }
        Ok(reply)
    }

    /// Begins a stream with a priming event only; each message and the answer come one by one at GET.
    fn poll(&mut self, before: &[Value], response: &Value) -> Response<Chunks> {
        let name = format!("s{}", self.log.len());
        let messages: Vec<String> = before.iter().chain([response]).map(ToString::to_string).collect();
        for (index, message) in messages.iter().enumerate() {
            let next = event(Some(&format!("{name}-{}", index + 1)), None, message);
            self.streams.insert(format!("{name}-{index}"), vec![next]);
        }
        stream(vec![event(Some(&format!("{name}-0")), Some(20), "")], false)
    }

    fn get(&mut self, last_event_id: Option<&str>) -> Response<Chunks> {
        if let Some(events) = last_event_id.and_then(|id| self.streams.get(id)) {
            return stream(events.clone(), false);
        }
        if self.get_status != 200 {
            return plain(self.get_status, "text/html", "<pre>Cannot GET /mcp</pre>");
        }
        let (sender, mut listener) = mpsc::channel(64);
        let (body, receiver) = mpsc::channel(64);
        body.try_send(Ok(Bytes::from_static(b": welcome\n\n"))).unwrap();
        self.listeners.push(sender);
        tokio::spawn(async move {
            loop {
                let chunk = tokio::select! {
                    chunk = listener.recv() => chunk,
                    () = body.closed() => return,
                };
                let Some(chunk) = chunk else { return };
                if body.send(Ok(chunk)).await.is_err() {
                    return;
                }
            }
        });
        Response::builder().header("content-type", "text/event-stream").body(Chunks(receiver)).unwrap()
    }

    fn answer(&mut self, method: &str, body: &Value) -> (Vec<Value>, Value) {
        let (id, params) = (&body["id"], &body["params"]);
        let result = |result: Value| json!({"jsonrpc": "2.0", "id": id, "result": result});
        let text = |text: String| result(json!({"content": [{"type": "text", "text": text}]}));
        match method {
            "initialize" => (
                Vec::new(),
                result(json!({
                    "protocolVersion": self.version,
                    "capabilities": {"tools": {"listChanged": true}},
                    "serverInfo": {"name": "fake", "version": "0"},
                })),
            ),
            "tools/list" => (Vec::new(), result(json!({"tools": self.tools}))),
            "tools/call" => {
                let tool = params["name"].as_str().unwrap_or_default();
                let arguments = &params["arguments"];
                *self.executed.entry(tool.to_owned()).or_default() += 1;
                let token = &params["_meta"]["progressToken"];
                let progress = |step: u64| {
                    let params = json!({"progressToken": token, "progress": step});
                    json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": params})
                };
                match tool {
                    "fail" => {
                        let error = json!({"code": -32602, "message": "Invalid params: session"});
                        (Vec::new(), json!({"jsonrpc": "2.0", "id": id, "error": error}))
                    }
                    "big" => {
                        let bytes = usize::try_from(arguments["bytes"].as_u64().unwrap_or_default()).unwrap();
                        (Vec::new(), text(big(bytes)))
                    }
                    "prog" => {
                        let steps = 1..=arguments["n"].as_u64().unwrap_or_default();
                        (steps.map(progress).collect(), text("done".to_owned()))
                    }
                    "pinged" => {
                        let ping = json!({"jsonrpc": "2.0", "id": "srv-ping", "method": "ping"});
                        (vec![ping], text("done".to_owned()))
                    }
                    _ => (Vec::new(), text(arguments["text"].as_str().unwrap_or("ok").to_owned())),
                }
            }
            _ => (Vec::new(), result(json!({}))),
        }
    }
}

/// Text of about `bytes` bytes with characters of four bytes across every kibibyte.
pub(crate) fn big(bytes: usize) -> String {
    let mut text = String::with_capacity(bytes + 1024);
    while text.len() < bytes {
        text.push_str(&"x".repeat(1022));
        text.push('\u{1f980}');
    }
    text
}
