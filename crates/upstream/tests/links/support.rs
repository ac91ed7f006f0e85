//! What every test needs: a worker's surroundings, a handshake, calls and notices.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::call::{RoutedId, StreamId};
use mainstay_core::id::{ServerName, SessionKey};
use mainstay_core::resume::{Continuity, ResumeRecord};
use mainstay_core::time::Timestamp;
use mainstay_core::wire::method::Method;
use mainstay_keeper::client::Custody;
use mainstay_upstream::{
    Answer, Call, Environment, Failure, Handshake, Incoming, Link, Notice, Opened, Parts, Reach, Server, Template,
    Upstreams,
};
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};

/// How long anything may take that is expected to happen.
pub(crate) const BOUND: Duration = Duration::from_secs(20);

/// The epoch of the worker that runs the test.
pub(crate) const EPOCH: u64 = 7;

/// Variables that a test sets.
#[derive(Default)]
pub(crate) struct Variables(pub(crate) Mutex<HashMap<String, String>>);

impl Environment for Variables {
    fn var(&self, name: &str) -> Option<String> {
        self.0.lock().unwrap().get(name).cloned().or_else(|| std::env::var(name).ok())
    }

    fn file(&self, path: &Path) -> io::Result<String> {
        std::fs::read_to_string(path)
    }
}

impl Variables {
    pub(crate) fn set(&self, name: &str, value: &str) {
        self.0.lock().unwrap().insert(name.to_owned(), value.to_owned());
    }
}

/// One worker's way to its servers, and what it is told.
pub(crate) struct Bench {
    pub(crate) upstreams: Arc<Upstreams>,
    pub(crate) variables: Arc<Variables>,
    pub(crate) sender: mpsc::Sender<(SessionKey, Notice)>,
    pub(crate) notices: mpsc::Receiver<(SessionKey, Notice)>,
}

impl Bench {
    pub(crate) fn new() -> Self {
        Self::with(None, EPOCH)
    }

    pub(crate) fn with(custody: Option<Custody>, epoch: u64) -> Self {
        let variables = Arc::new(Variables::default());
        let parts = Parts {
            custody,
            environment: Arc::<Variables>::clone(&variables),
            now: Arc::new(|| Timestamp::from_unix_millis(1_800_000_000_000)),
            entropy: Arc::new(entropy),
            epoch,
        };
        let (sender, told) = mpsc::channel(256);
        let (forwarded, notices) = mpsc::channel(256);
        tokio::spawn(note(told, forwarded));
        Self { upstreams: Arc::new(Upstreams::new(parts)), variables, sender, notices }
    }

    pub(crate) async fn open(&self, server: &Arc<Server>) -> Result<(Arc<Link>, Opened), Failure> {
        let link = self.lazy(server);
        let opened = link.reach().await?;
        Ok((link, opened))
    }

    /// The link of a new session.
    pub(crate) fn lazy(&self, server: &Arc<Server>) -> Arc<Link> {
        Link::lazy(&self.upstreams, server, handshake(), self.sender.clone())
    }

    /// The link of a confirmed session that an earlier worker had.
    pub(crate) fn restore(&self, server: &Arc<Server>, record: Option<ResumeRecord>) -> Arc<Link> {
        let handshake = Handshake { confirmed: true, ..handshake() };
        Link::restore(&self.upstreams, server, handshake, record, None, self.sender.clone())
    }

    /// A link whose client has said `initialized`.
    pub(crate) async fn ready(&self, server: &Arc<Server>) -> Arc<Link> {
        let (link, _) = self.open(server).await.unwrap();
        link.confirm().await;
        link
    }

    /// The next notice that `pick` picks; others are passed over.
    pub(crate) async fn notice<T>(&mut self, mut pick: impl FnMut(Notice) -> Option<T>) -> T {
        let picked = tokio::time::timeout(BOUND, async {
            loop {
                let (key, notice) = self.notices.recv().await.unwrap();
                assert_eq!(key, handshake().key);
                if let Some(picked) = pick(notice) {
                    return picked;
                }
            }
        });
        picked.await.unwrap()
    }

    /// The next message that the server says unasked.
    pub(crate) async fn message(&mut self) -> Value {
        let message = self.notice(|notice| match notice {
            Notice::Message { message, .. } | Notice::Question { message, .. } => Some(message),
            _ => None,
        });
        serde_json::from_slice(&message.await).unwrap()
    }

    /// Why the server was made again, and whether its lists changed.
    pub(crate) async fn remade(&mut self) -> (Box<str>, mainstay_upstream::ListsChanged) {
        let remade = self.notice(|notice| match notice {
            Notice::Remade { reason, lists, .. } => Some((reason, lists)),
            _ => None,
        });
        remade.await
    }

    /// The notices that are there by now.
    pub(crate) fn waiting(&mut self) -> Vec<Notice> {
        std::iter::from_fn(|| self.notices.try_recv().ok().map(|(_, notice)| notice)).collect()
    }
}

/// Takes note of each notice at once, as a worker does, and keeps it for the test.
async fn note(mut told: mpsc::Receiver<(SessionKey, Notice)>, forwarded: mpsc::Sender<(SessionKey, Notice)>) {
    while let Some((key, notice)) = told.recv().await {
        let (notice, noted) = match notice {
            Notice::Remade { reason, lists, noted } => {
                (Notice::Remade { reason, lists, noted: oneshot::channel().0 }, Some(noted))
            }
            other => (other, None),
        };
        if forwarded.send((key, notice)).await.is_err() {
            return;
        }
        drop(noted);
    }
}

fn entropy() -> [u8; 16] {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&std::process::id().to_be_bytes());
    bytes[8..].copy_from_slice(&number.to_be_bytes());
    bytes
}

/// What a worker wrote down of a child of `server` after all that ever happened to it.
pub(crate) fn record_of(server: &Server, told: bool) -> ResumeRecord {
    let at = Timestamp::from_unix_millis(u64::from(u32::MAX) * 1000);
    ResumeRecord {
        key: handshake().key,
        server: server.name.clone(),
        url: "".into(),
        fingerprint: server.fingerprint(),
        upstream_id: None,
        version: "2025-11-25".into(),
        initialize_result: Bytes::from_static(br#"{"protocolVersion":"2025-11-25"}"#),
        log_level: None,
        subscriptions: BTreeSet::new(),
        told,
        last_event_id: None,
        saved_at: at,
        used_at: at,
        continuity: Continuity::Fresh,
        remade_count: 0,
        remade_reason: None,
    }
}

pub(crate) fn server(reach: Reach) -> Server {
    Server { patience: Duration::from_secs(3), ..Server::new(ServerName::parse("srv").unwrap(), reach) }
}

pub(crate) fn template(text: &str) -> Template {
    Template::parse(text).unwrap()
}

pub(crate) fn handshake() -> Handshake {
    let params = json!({
        "protocolVersion": "2025-11-25",
        "capabilities": {"roots": {}},
        "clientInfo": {"name": "tester", "version": "1.0"},
    });
    Handshake {
        key: SessionKey::from_bytes([3; 32]),
        params: Bytes::from(params.to_string()),
        confirmed: false,
        log_level: None,
        subscriptions: BTreeSet::new(),
    }
}

/// The id of the `number`th call of this worker.
pub(crate) fn routed(number: u64) -> RoutedId {
    routed_of(EPOCH, number)
}

pub(crate) fn routed_of(epoch: u64, number: u64) -> RoutedId {
    RoutedId { stream: StreamId { epoch, number }, original: Bytes::from(format!("\"c-{number}\"")) }
}

pub(crate) fn request(id: &RoutedId, method: &str, params: &Value) -> Call {
    let raw = Bytes::from(id.encode());
    let id: Value = serde_json::from_slice(&raw).unwrap();
    let message = json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params});
    let name = params.get("name").and_then(Value::as_str).map(Box::from);
    Call { id: raw, message: Bytes::from(message.to_string()), method: Method::of(method), name }
}

/// A `tools/call`; its progress token leads back to it.
pub(crate) fn tool(number: u64, name: &str, arguments: Value) -> Call {
    tool_of(EPOCH, number, name, arguments)
}

pub(crate) fn tool_of(epoch: u64, number: u64, name: &str, arguments: Value) -> Call {
    let id = routed_of(epoch, number);
    let token = RoutedId { stream: id.stream, original: Bytes::from_static(b"7") };
    let token: Value = serde_json::from_slice(&token.encode()).unwrap();
    let params = json!({"name": name, "arguments": arguments, "_meta": {"progressToken": token}});
    request(&id, "tools/call", &params)
}

/// The whole answer: the messages before the response, and the response.
pub(crate) async fn whole(answer: Result<Answer, Failure>) -> Result<(Vec<Value>, Value), Failure> {
    let parse = |bytes: &Bytes| serde_json::from_slice::<Value>(bytes).unwrap();
    let mut stream = match answer? {
        Answer::Whole(response) => return Ok((Vec::new(), parse(&response))),
        Answer::Stream(stream) => stream,
    };
    let mut before = Vec::new();
    loop {
        match stream.next().await? {
            Incoming::Message(message) => before.push(parse(&message)),
            Incoming::Reached => {}
            Incoming::Response(response) => return Ok((before, parse(&response))),
        }
    }
}

/// Calls a tool and returns the text of its result.
pub(crate) async fn text(link: &Link, call: Call) -> Result<String, Failure> {
    let id = call.id.clone();
    let answer = tokio::time::timeout(BOUND, async { whole(link.call(call).await).await });
    let (_, response) = answer.await.unwrap()?;
    assert_eq!(response["id"], serde_json::from_slice::<Value>(&id).unwrap());
    let text = response["result"]["content"][0]["text"].as_str();
    Ok(text.unwrap_or_else(|| panic!("no text in {response}")).to_owned())
}

/// Waits, within a bound, until `look` finds what it looks for.
pub(crate) async fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    for _ in 0..BOUND.as_millis() / 10 {
        if let Some(found) = look() {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("waited in vain for {what}");
}

/// A threshold that holds on an idle machine, for this one as busy as it is: where each process has a part of a core only,
/// everything takes longer by that much.
pub(crate) fn stretched(threshold: Duration) -> Duration {
    let told = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    // The mean of the last minute, and how many run at this moment.
    let mean = told.split(' ').next().and_then(|mean| mean.parse::<f64>().ok());
    let running = told.split(' ').nth(3).and_then(|tasks| tasks.split('/').next()?.parse::<f64>().ok());
    let busy = mean.unwrap_or(0.0).max(running.unwrap_or(0.0));
    let cores =
        std::thread::available_parallelism().map_or(1.0, |cores| f64::from(u32::try_from(cores.get()).unwrap_or(1)));
    threshold.mul_f64(1.0 + busy / cores)
}
