//! Connections to HTTP servers, kept for the next request.
//!
//! A connection carries one request at a time and is driven by whoever waits for what comes of it, in that task: nobody else
//! has to be woken, and what nobody waits for any more is closed. One that is idle is driven by nobody, and looked at before
//! it is used again.

use std::fmt;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, TryLockError, Weak};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::Bytes;
use http::header::{HOST, HeaderValue};
use http::uri::{PathAndQuery, Scheme};
use http::{Request, Response, Uri, Version};
use http_body_util::Full;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{self, Connection, SendRequest};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};
use tower_service::Service;

use crate::task::spawn;
use crate::wire::lock;

/// A request on its way out.
pub(crate) type Outgoing = Request<Full<Bytes>>;

/// How sending a request failed.
#[derive(Debug)]
pub(crate) enum SendError {
    /// Not a byte of it went out.
    NeverSent(Box<str>),
    /// It may have gone out.
    Lost(Box<str>),
}

/// How connections are made.
pub(crate) struct Connectors {
    plain: HttpConnector,
    /// Made when the first `https` server is reached: reading the system's certificates takes its time.
    tls: OnceLock<Result<HttpsConnector<HttpConnector>, Box<str>>>,
}

impl Connectors {
    pub(crate) fn new() -> Self {
        Self { plain: connector(), tls: OnceLock::new() }
    }

    /// A new connection to the host of `url`.
    async fn connect(&self, url: Uri) -> Result<Box<Wire>, Box<str>> {
        let stream = if url.scheme() == Some(&Scheme::HTTPS) {
            let mut connector = self.tls.get_or_init(tls_connector).clone()?;
            let connecting = timeout(SECURE_BOUND, connector.call(url));
            let stream = connecting.await.map_err(|_| "it did not finish the TLS handshake in time")?;
            stream.map_err(|error| describe(&*error))?
        } else {
            let stream = self.plain.clone().call(url).await;
            MaybeHttpsStream::Http(stream.map_err(|error| describe(&error))?)
        };
        let (sender, connection) = http1::handshake(stream).await.map_err(|error| describe(&error))?;
        Ok(Box::new(Wire { sender, connection }))
    }
}

/// A host with its connections.
pub(crate) struct Host {
    /// The bound of the calls in flight there.
    pub(crate) calls: Arc<Semaphore>,
    name: Option<HeaderValue>,
    /// Idle connections, on several shelves, so that nobody waits for anybody.
    shelves: [Mutex<Shelf>; SHELVES],
    is_swept: AtomicBool,
}

/// Connections, each with the moment since when it is idle; the one that was used last is the last.
type Shelf = Vec<(Instant, Box<Wire>)>;

impl Host {
    /// That of `url`. Without one there is nothing to connect to.
    pub(crate) fn new(url: Option<&Uri>) -> Self {
        Self {
            calls: Arc::new(Semaphore::new(CALLS_MAX)),
            name: url.and_then(name_of),
            shelves: Default::default(),
            is_swept: AtomicBool::new(false),
        }
    }

    /// Sends a request on a connection to this host, which its url must name.
    ///
    /// If the future is dropped, the connection is closed.
    ///
    /// # Errors
    /// There is no connection, or it ended before the head of a response.
    pub(crate) async fn send(
        self: &Arc<Self>,
        connectors: &Connectors,
        mut request: Outgoing,
    ) -> Result<Response<Body>, SendError> {
        let url = std::mem::take(request.uri_mut());
        // A server wants the path alone, and its own name in a header (RFC 9112, sections 3.2.1 and 3.2).
        let path = url.path_and_query().cloned().unwrap_or(PathAndQuery::from_static("/"));
        *request.uri_mut() = path.into();
        *request.version_mut() = Version::HTTP_11;
        if let Some(name) = &self.name {
            request.headers_mut().insert(HOST, name.clone());
        }
        loop {
            let (mut wire, is_used) = match self.take() {
                Some(wire) => (wire, true),
                // Seldom, and large: it is no part of every call's future.
                None => (Box::pin(connectors.connect(url.clone())).await.map_err(SendError::NeverSent)?, false),
            };
            match wire.exchange(request).await {
                Ok(response) => {
                    let host = Arc::clone(self);
                    return Ok(response.map(|incoming| Body { incoming: Some(incoming), wire: Some(wire), host }));
                }
                Err(Some(mut failed)) => match failed.take_message() {
                    // It was closed while it was idle.
                    Some(unsent) if is_used => request = unsent,
                    Some(_) => return Err(SendError::NeverSent(describe(failed.error()))),
                    None => return Err(SendError::Lost(describe(failed.error()))),
                },
                Err(None) => return Err(SendError::Lost("its connection ended".into())),
            }
        }
    }

    /// An idle connection, the one that was used last.
    fn take(&self) -> Option<Box<Wire>> {
        for mut shelf in self.shelves() {
            while let Some((since, mut wire)) = shelf.pop() {
                if since.elapsed() < IDLE_MAX && wire.is_free() {
                    return Some(wire);
                }
            }
        }
        None
    }

    /// Keeps a connection for the next request, if it can carry one.
    fn keep(self: &Arc<Self>, mut wire: Box<Wire>) {
        if !wire.is_free() {
            return;
        }
        if let Some(mut shelf) = self.shelves().next() {
            shelf.push((Instant::now(), wire));
        }
        // Outside of a runtime the worker is ending, and nothing need be swept.
        if !self.is_swept.load(Ordering::Relaxed)
            && tokio::runtime::Handle::try_current().is_ok()
            && !self.is_swept.swap(true, Ordering::AcqRel)
        {
            spawn(sweep(Arc::downgrade(self)));
        }
    }

    /// The shelves that nobody else has in hand now, this thread's own first.
    fn shelves(&self) -> impl Iterator<Item = MutexGuard<'_, Shelf>> {
        let first = OWN_SHELF.with(|shelf| *shelf);
        let ordered = (0..SHELVES).map(move |place| &self.shelves[(first + place) % SHELVES]);
        ordered.filter_map(|shelf| match shelf.try_lock() {
            Ok(shelf) => Some(shelf),
            Err(TryLockError::Poisoned(shelf)) => Some(shelf.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        })
    }
}

/// Closes the connections that have been idle for too long, until the host has none.
async fn sweep(host: Weak<Host>) {
    loop {
        tokio::time::sleep(IDLE_MAX).await;
        let Some(host) = host.upgrade() else { return };
        let mut left = 0;
        for shelf in &host.shelves {
            let mut shelf = lock(shelf);
            shelf.retain(|(since, _)| since.elapsed() < IDLE_MAX);
            left += shelf.len();
        }
        if left == 0 {
            host.is_swept.store(false, Ordering::Release);
            return;
        }
    }
}

/// One connection.
struct Wire {
    sender: SendRequest<Full<Bytes>>,
    connection: Connection<MaybeHttpsStream<TokioIo<TcpStream>>, Full<Bytes>>,
}

impl Wire {
    /// Whether it can take a request: nothing is on it any more, and as far as is known its server has not closed it.
    fn is_free(&mut self) -> bool {
        self.drive(&mut Context::from_waker(Waker::noop())).is_pending() && self.sender.is_ready()
    }

    fn drive(&mut self, context: &mut Context<'_>) -> Poll<()> {
        // What it ended with is told to whoever waits for a response or for a body.
        Pin::new(&mut self.connection).poll(context).map(drop)
    }

    /// Sends a request, and waits for the head of the response. To be closed if that fails.
    async fn exchange(&mut self, request: Outgoing) -> Result<Response<Incoming>, Option<TrySendError<Outgoing>>> {
        let mut response = pin!(self.sender.try_send_request(request));
        let connection = &mut self.connection;
        std::future::poll_fn(|context| {
            let is_over = Pin::new(&mut *connection).poll(context).is_ready();
            // Only driving brings it on: it has nobody else to wake.
            match response.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(response) => Poll::Ready(response.map_err(Some)),
                Poll::Pending if is_over => Poll::Ready(Err(None)),
                Poll::Pending => Poll::Pending,
            }
        })
        .await
    }
}

/// The body of a response. Once it is read to its end, its connection is free for the next request.
pub(crate) struct Body {
    incoming: Option<Incoming>,
    wire: Option<Box<Wire>>,
    host: Arc<Host>,
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Self { incoming, wire, .. } = self.get_mut();
        let Some(incoming) = incoming else { return Poll::Ready(None) };
        let mut nobody = Context::from_waker(Waker::noop());
        if let Poll::Ready(frame) = Pin::new(&mut *incoming).poll_frame(&mut nobody) {
            return Poll::Ready(frame);
        }
        if wire.as_mut().is_some_and(|wire| wire.drive(context).is_ready()) {
            *wire = None;
        }
        let frame = ready!(Pin::new(incoming).poll_frame(&mut nobody));
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.as_ref().is_none_or(Incoming::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.as_ref().map_or_else(SizeHint::default, Incoming::size_hint)
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        // First: what is left of a body that nobody reads must not keep its connection busy.
        self.incoming = None;
        if let Some(wire) = self.wire.take() {
            self.host.keep(wire);
        }
    }
}

impl fmt::Debug for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Body").finish_non_exhaustive()
    }
}

/// What a request to `url` calls its host: without the port, if that is the scheme's own.
fn name_of(url: &Uri) -> Option<HeaderValue> {
    let host = url.host()?;
    let own = if url.scheme() == Some(&Scheme::HTTPS) { 443 } else { 80 };
    let name = match url.port_u16().filter(|port| *port != own) {
        Some(port) => format!("{host}:{port}"),
        None => host.to_owned(),
    };
    HeaderValue::from_str(&name).ok()
}

fn connector() -> HttpConnector {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    connector.enforce_http(false);
    connector.set_connect_timeout(Some(CONNECT_BOUND));
    // A call may rest for hours; a host that vanished must be noticed all the same.
    connector.set_keepalive(Some(KEEPALIVE));
    connector.set_keepalive_interval(Some(KEEPALIVE));
    connector.set_keepalive_retries(Some(KEEPALIVE_TRIES));
    connector
}

fn tls_connector() -> Result<HttpsConnector<HttpConnector>, Box<str>> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = HttpsConnectorBuilder::new().with_provider_and_native_roots(provider);
    let builder =
        builder.map_err(|error| format!("no certificate authorities are installed: {error}").into_boxed_str())?;
    Ok(builder.https_only().enable_http1().wrap_connector(connector()))
}

/// What an error and its causes say, in one line.
pub(crate) fn describe(error: &dyn std::error::Error) -> Box<str> {
    let mut text = error.to_string();
    let mut source = error.source();
    for _ in 0..CAUSES_MAX {
        let Some(cause) = source else { break };
        let said = cause.to_string();
        if !text.ends_with(&said) {
            text.push_str(": ");
            text.push_str(&said);
        }
        source = cause.source();
    }
    text.into_boxed_str()
}

thread_local! {
    static OWN_SHELF: usize = NEXT_SHELF.fetch_add(1, Ordering::Relaxed);
}
static NEXT_SHELF: AtomicUsize = AtomicUsize::new(0);

/// Calls in flight to one host; each has a connection.
const CALLS_MAX: usize = 4096;
/// Where idle connections lie. More than a few threads never meet at one.
const SHELVES: usize = 8;
/// How long an idle connection is kept. Node and uvicorn close theirs after five seconds, and a request that crosses
/// with the close is lost.
const IDLE_MAX: Duration = Duration::from_secs(3);
/// How long making a connection may take, and one with TLS.
const CONNECT_BOUND: Duration = Duration::from_secs(5);
const SECURE_BOUND: Duration = Duration::from_secs(10);
/// When, how often and how many times a silent connection is probed.
const KEEPALIVE: Duration = Duration::from_secs(20);
const KEEPALIVE_TRIES: u32 = 3;
const CAUSES_MAX: usize = 4;

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tokio::sync::mpsc;

    use super::*;

    /// A server that tells of each connection and of each end of one, and answers each request with what `answer` makes
    /// of the connection's number and the request's; `None` closes the connection.
    async fn server(
        answer: fn(u32, u32) -> Option<&'static str>,
    ) -> (Arc<Host>, impl Fn() -> Outgoing, mpsc::Receiver<&'static str>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url: Uri =
            format!("http://{}/mcp?x=1", listener.local_addr().expect("its address")).parse().expect("a url");
        let (told, heard) = mpsc::channel(16);
        spawn(async move {
            for number in 1.. {
                let Ok((mut stream, _)) = listener.accept().await else { return };
                let told = told.clone();
                let _ = told.send("connected").await;
                spawn(async move {
                    let (mut seen, mut requests) = (Vec::new(), 0);
                    while stream.read_buf(&mut seen).await.is_ok_and(|read| read > 0) {
                        if seen.ends_with(b"\r\n\r\nhello") {
                            let text = String::from_utf8_lossy(&seen).to_lowercase();
                            assert!(
                                text.starts_with("post /mcp?x=1 http/1.1\r\n") && text.contains("\r\nhost: 127.0.0.1:")
                            );
                            seen.clear();
                            requests += 1;
                            let Some(answer) = answer(number, requests) else { break };
                            let _ = stream.write_all(answer.as_bytes()).await;
                        }
                    }
                    drop(stream);
                    let _ = told.send("ended").await;
                });
            }
        });
        let host = Arc::new(Host::new(Some(&url)));
        let request = move || {
            let mut request = Request::new(Full::new(Bytes::from_static(b"hello")));
            *request.method_mut() = http::Method::POST;
            *request.uri_mut() = url.clone();
            request
        };
        (host, request, heard)
    }

    async fn read(response: Result<Response<Body>, SendError>) -> Bytes {
        response.expect("a response").into_body().collect().await.expect("a body").to_bytes()
    }

    const WHOLE: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
    const CHUNKED: &str = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n";
    const BEGUN: &str = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n";

    #[tokio::test]
    async fn a_connection_serves_one_request_after_the_other() {
        let (host, request, mut heard) = server(|_, nth| Some(if nth == 2 { CHUNKED } else { WHOLE })).await;
        let connectors = Connectors::new();
        for _ in 0..3 {
            assert_eq!(read(host.send(&connectors, request()).await).await, "ok");
        }
        // What came of a response that nobody reads does not keep its connection busy.
        drop(host.send(&connectors, request()).await.expect("a response"));
        assert_eq!(read(host.send(&connectors, request()).await).await, "ok");
        assert_eq!(heard.recv().await, Some("connected"));
        assert!(heard.try_recv().is_err(), "one connection, which still is open");
    }

    #[tokio::test]
    async fn u5_a_connection_that_was_closed_while_idle_has_not_seen_the_request() {
        let (host, request, mut heard) = server(|number, nth| (number > 1 || nth == 1).then_some(WHOLE)).await;
        let connectors = Connectors::new();
        assert_eq!(read(host.send(&connectors, request()).await).await, "ok");
        assert_eq!(heard.recv().await, Some("connected"));
        // Its server reads the next request and closes: that may have been carried out.
        assert!(matches!(host.send(&connectors, request()).await, Err(SendError::Lost(_))));
        assert_eq!(heard.recv().await, Some("ended"));
        assert_eq!(read(host.send(&connectors, request()).await).await, "ok");
        let closed = host.take().expect("an idle connection");
        drop(closed);
        assert_eq!((heard.recv().await, heard.recv().await), (Some("connected"), Some("ended")));
        assert_eq!(read(host.send(&connectors, request()).await).await, "ok");
    }

    #[tokio::test]
    async fn a_request_that_nobody_waits_for_any_more_closes_its_connection() {
        let (host, request, mut heard) = server(|number, _| if number == 1 { Some("") } else { Some(BEGUN) }).await;
        let connectors = Connectors::new();
        let waited = timeout(Duration::from_millis(50), host.send(&connectors, request())).await;
        assert!(waited.is_err(), "no answer comes");
        assert_eq!((heard.recv().await, heard.recv().await), (Some("connected"), Some("ended")));
        let mut body = host.send(&connectors, request()).await.expect("a response").into_body();
        assert!(body.frame().await.is_some_and(|frame| frame.is_ok()));
        drop(body);
        assert_eq!((heard.recv().await, heard.recv().await), (Some("connected"), Some("ended")));
    }

    #[tokio::test]
    async fn an_answer_is_seen_however_much_the_task_has_done_in_its_turn() {
        let (host, request, _heard) = server(|_, nth| Some(if nth % 2 == 0 { CHUNKED } else { WHOLE })).await;
        let connectors = Connectors::new();
        // The runtime gives a task 128 looks at its resources before others have their turn.
        for spent in 100..127 {
            let mut reading = pin!(async { read(host.send(&connectors, request()).await).await });
            let answered = std::future::poll_fn(|context| {
                for _ in 0..spent {
                    let _spent = pin!(tokio::task::consume_budget()).poll(context);
                }
                reading.as_mut().poll(context)
            });
            assert_eq!(timeout(Duration::from_secs(20), answered).await.as_deref(), Ok(&b"ok"[..]), "{spent}");
        }
    }

    #[tokio::test]
    async fn idle_connections_are_closed_after_a_while() {
        let (host, request, mut heard) = server(|_, _| Some(WHOLE)).await;
        assert_eq!(read(host.send(&Connectors::new(), request()).await).await, "ok");
        assert_eq!((heard.recv().await, heard.recv().await), (Some("connected"), Some("ended")));
        assert!(host.take().is_none());
    }

    #[tokio::test]
    async fn without_a_connection_nothing_was_sent() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url: Uri = format!("http://{}/", listener.local_addr().expect("its address")).parse().expect("a url");
        drop(listener);
        let mut request = Request::new(Full::new(Bytes::new()));
        *request.uri_mut() = url.clone();
        let refused = Arc::new(Host::new(Some(&url))).send(&Connectors::new(), request).await;
        assert!(matches!(refused, Err(SendError::NeverSent(cause)) if cause.contains("refused")));
    }

    #[test]
    fn a_host_is_called_without_the_port_of_its_scheme() {
        for (url, name) in [
            ("http://a.example/x", "a.example"),
            ("http://a.example:80/x", "a.example"),
            ("https://a.example:443/x", "a.example"),
            ("https://user@a.example:80/x", "a.example:80"),
            ("http://[::1]:7717/", "[::1]:7717"),
        ] {
            assert_eq!(name_of(&url.parse().expect("a url")).expect("a name"), name, "{url}");
        }
    }
}
