//! UP-V: a stateless server of 2026-07-28 that is verbatim: it notes every request byte by byte, answers with bytes that a
//! program that reads and writes them anew would change, and knows which requests are still open. It checks nothing.
//!
//! It runs in the test's own process, which nothing kills.

use crate::ports::lasting_port;
use anyhow::Result;
use bytes::Bytes;
use futures_util::stream::unfold;
use http::{HeaderMap, Request, Response};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::net::TcpListener;
use tokio::task::{JoinHandle, JoinSet};

/// A running UP-V. It ends with the handle.
#[derive(Debug)]
pub struct UpV {
    address: SocketAddr,
    shared: Arc<Shared>,
    serving: JoinHandle<()>,
}

/// One request as it came.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Its headers.
    pub headers: HeaderMap,
    /// Its body, every byte.
    pub body: Bytes,
    method: String,
}

#[derive(Debug, Default)]
struct Shared {
    log: Mutex<Vec<Seen>>,
    open: Arc<AtomicUsize>,
}

/// A request that is not over.
struct Open(Arc<AtomicUsize>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl UpV {
    /// Starts it on a port of its own.
    ///
    /// # Errors
    /// If there is no port.
    pub async fn start() -> Result<UpV> {
        let address = lasting_port()?;
        let listener = TcpListener::bind(address).await?;
        let shared = Arc::new(Shared::default());
        let serving = tokio::spawn(serve(listener, Arc::clone(&shared)));
        Ok(UpV { address, shared, serving })
    }

    /// A table of the gateway's configuration that names this server, without any word of its era.
    #[must_use]
    pub fn toml(&self, name: &str) -> String {
        format!("[servers.{name}]\nurl = \"http://{}/mcp\"\n", self.address)
    }

    /// The requests of that method, in their order.
    #[must_use]
    pub fn seen(&self, method: &str) -> Vec<Seen> {
        let log = self.shared.log.lock().unwrap_or_else(PoisonError::into_inner);
        log.iter().filter(|seen| seen.method == method).cloned().collect()
    }

    /// How many requests are neither answered nor given up.
    #[must_use]
    pub fn open(&self) -> usize {
        self.shared.open.load(Ordering::SeqCst)
    }

    /// Ends the server, its connections and its port. What it has seen stays.
    pub async fn stop(&mut self) {
        self.serving.abort();
        // An error says that it was aborted, as it was told.
        let _aborted = (&mut self.serving).await;
    }
}

impl Drop for UpV {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

type Body = BoxBody<Bytes, Infallible>;

async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else { return };
                let shared = Arc::clone(&shared);
                connections.spawn(async move {
                    let service = service_fn(move |request| answer(Arc::clone(&shared), request));
                    let http = hyper::server::conn::http1::Builder::new();
                    // An error is a peer that has left.
                    let _ended = http.serve_connection(TokioIo::new(stream), service).await;
                });
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn answer(shared: Arc<Shared>, request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    let message: Value = serde_json::from_slice(&body).unwrap_or_default();
    let method = message["method"].as_str().unwrap_or_default().to_owned();
    let seen = Seen { headers: parts.headers, body, method: method.clone() };
    shared.log.lock().unwrap_or_else(PoisonError::into_inner).push(seen);
    shared.open.fetch_add(1, Ordering::SeqCst);
    let open = Open(Arc::clone(&shared.open));
    let id = &message["id"];
    let tool = message["params"]["name"].as_str().unwrap_or_default();
    Ok(match (&*method, tool) {
        ("server/discover", _) => whole(200, DISCOVERED.replace("ID", &id.to_string())),
        ("tools/call", "echo") => whole(200, ECHOED.replace("ID", &id.to_string())),
        ("tools/call", "steps") => events(vec![progress(), ECHOED.replace("ID", &id.to_string())], None),
        ("tools/call", "slow") => events(vec![progress()], Some(open)),
        ("tools/call" | "prompts/get", "ask" | "ask_elsewhere") if message["params"]["requestState"].is_null() => {
            whole(200, ASKED.replace("ID", &id.to_string()))
        }
        ("tools/call", "ask_late") if message["params"]["requestState"].is_null() => {
            events(vec![progress(), ASKED.replace("ID", &id.to_string())], None)
        }
        ("tools/call" | "prompts/get", "ask" | "ask_elsewhere" | "ask_late") => {
            whole(200, ECHOED.replace("ID", &id.to_string()))
        }
        ("tools/call", "job") => whole(200, MADE.replace("ID", &id.to_string())),
        ("tasks/get" | "tasks/update" | "tasks/cancel", _) => {
            let state = json!({"resultType": "complete", "taskId": message["params"]["taskId"], "status": "working"});
            whole(200, json!({"jsonrpc": "2.0", "id": id, "result": state}).to_string())
        }
        ("tools/call", "silent") => {
            let _open = open;
            std::future::pending().await
        }
        ("subscriptions/listen", _) => events(vec![acknowledged(id)], Some(open)),
        _ => whole(404, json!({"jsonrpc": "2.0", "id": id, "error": {"code": -32601, "message": "no"}}).to_string()),
    })
}

fn whole(status: u16, body: String) -> Response<Body> {
    let mut response = Response::new(Full::new(Bytes::from(body)).boxed());
    *response.status_mut() = http::StatusCode::from_u16(status).unwrap_or_default();
    response.headers_mut().insert("content-type", http::HeaderValue::from_static("application/json"));
    response
}

/// An event stream that ends, or stays as long as somebody reads it.
fn events(messages: Vec<String>, stays: Option<Open>) -> Response<Body> {
    let chunks = unfold((messages.into_iter(), stays), |(mut messages, stays)| async move {
        match messages.next() {
            Some(message) => {
                let frame = Frame::data(Bytes::from(format!("data: {message}\n\n")));
                Some((Ok::<_, Infallible>(frame), (messages, stays)))
            }
            None if stays.is_some() => std::future::pending().await,
            None => None,
        }
    });
    let body =
        StreamBody::new(Box::pin(chunks) as std::pin::Pin<Box<dyn futures_util::Stream<Item = _> + Send + Sync>>);
    let mut response = Response::new(body.boxed());
    response.headers_mut().insert("content-type", http::HeaderValue::from_static("text/event-stream"));
    response
}

fn progress() -> String {
    json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progressToken": "t", "progress": 1}})
        .to_string()
}

fn acknowledged(id: &Value) -> String {
    json!({"jsonrpc": "2.0", "method": "notifications/subscriptions/acknowledged",
        "params": {"notifications": {}, "_meta": {"io.modelcontextprotocol/subscriptionId": id}}})
    .to_string()
}

const DISCOVERED: &str = r#"{"jsonrpc":"2.0","id":ID,"result":{"resultType":"complete","supportedVersions":["2026-07-28"],
 "capabilities":{"tools":{}},"ttlMs":7,"cacheScope":"private"}}"#;
/// Asks for a name, with a state of its own and with what a program that reads and writes it anew would change.
const ASKED: &str = concat!(
    r#"{"id":ID, "result":{"inputRequests":{"k":{"method":"roots/list","params":{"n":1.0}}},"#,
    r#""requestState":"r\u00e9\/1" ,"resultType":"input_required"},"jsonrpc":"2.0"}"#
);
/// A task of its own, with what a program that reads and writes it anew would change.
const MADE: &str = concat!(
    r#"{"id":ID, "result":{"resultType":"task","ttlMs":1.0e6,"taskId":"t\u00e9\/1" ,"status":"working"},"#,
    r#""jsonrpc":"2.0"}"#
);
/// With blanks, a number and members that a program that reads and writes it anew would change.
const ECHOED: &str = r#"{ "result":{"resultType":"complete","content":[ ],"n":1.0,"n2":12345678901234567890123}, "id":ID,"jsonrpc":"2.0"}"#;
