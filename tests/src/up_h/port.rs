//! The port of `/mcp`, which can be closed and opened again.

use super::{Cut, UpH, mcp};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;

/// The handle by which orders reach the port.
#[derive(Debug)]
pub(super) struct Port {
    address: SocketAddr,
    listening: AtomicBool,
    commands: mpsc::Sender<Command>,
}

/// An order to the port; `done` hears when it is in force.
#[derive(Debug)]
pub(super) struct Command {
    /// What to do.
    order: PortOrder,
    done: oneshot::Sender<()>,
}

/// What the port can be told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PortOrder {
    /// Close the listener and every connection; open again after the time, or when told.
    Refuse(Option<Duration>),
    /// Open the listener again.
    Accept,
    /// Cut every connection, and go on listening.
    CutAll,
}

impl Port {
    /// The handle, and the orders for [`serve`].
    pub(super) fn new(address: SocketAddr) -> (Port, mpsc::Receiver<Command>) {
        let (commands, orders) = mpsc::channel(COMMANDS_MAX);
        (Port { address, listening: AtomicBool::new(true), commands }, orders)
    }

    /// Whether connections are accepted at this moment.
    pub(super) fn listening(&self) -> bool {
        self.listening.load(Ordering::SeqCst)
    }

    /// Gives an order and waits until it is in force.
    pub(super) async fn order(&self, order: PortOrder) {
        let (done, heard) = oneshot::channel();
        if self.commands.send(Command { order, done }).await.is_ok() {
            // An error would mean that serving has ended, and with it the process.
            let _ended = heard.await;
        }
    }
}

/// Binds an address that may have been in use a moment ago.
pub(super) async fn bind(address: SocketAddr) -> std::io::Result<TcpListener> {
    let deadline = Instant::now() + BIND_BOUND;
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => return Ok(listener),
            Err(error) if Instant::now() >= deadline => return Err(error),
            Err(_) => tokio::time::sleep(BIND_RETRY).await,
        }
    }
}

/// Serves `/mcp` and carries out orders. Ends the process's serving if the port cannot be bound again.
pub(super) async fn serve(up: Arc<UpH>, listener: TcpListener, mut commands: mpsc::Receiver<Command>) {
    let mut listener = Some(listener);
    let mut connections = JoinSet::new();
    let mut reopen_at: Option<Instant> = None;
    loop {
        tokio::select! {
            accepted = accept(listener.as_ref()) => {
                if let Ok((stream, _)) = accepted {
                    connections.spawn(connection(Arc::clone(&up), stream));
                }
            }
            Some(_) = connections.join_next() => {}
            () = at(reopen_at) => {
                reopen_at = None;
                listener = bind(up.port.address).await.ok();
            }
            command = commands.recv() => {
                let Some(command) = command else { return };
                match command.order {
                    PortOrder::Refuse(time) => {
                        listener = None;
                        connections.shutdown().await;
                        reopen_at = time.map(|time| Instant::now() + time);
                    }
                    PortOrder::Accept => {
                        reopen_at = None;
                        if listener.is_none() {
                            listener = bind(up.port.address).await.ok();
                        }
                    }
                    PortOrder::CutAll => connections.shutdown().await,
                }
                up.port.listening.store(listener.is_some(), Ordering::SeqCst);
                let _asker_left = command.done.send(());
            }
        }
        up.port.listening.store(listener.is_some(), Ordering::SeqCst);
    }
}

async fn accept(listener: Option<&TcpListener>) -> std::io::Result<(TcpStream, SocketAddr)> {
    match listener {
        Some(listener) => listener.accept().await,
        None => std::future::pending().await,
    }
}

async fn at(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}

async fn connection(up: Arc<UpH>, stream: TcpStream) {
    let _best_effort = stream.set_nodelay(true);
    // Each request runs on by itself: one that has arrived is executed, whatever becomes of its connection.
    let service = service_fn(move |request| {
        let running = tokio::spawn(mcp::handle(Arc::clone(&up), request));
        async move { running.await.unwrap_or(Err(Cut)) }
    });
    // A connection ends with an error whenever a cut was ordered or the peer left; both are normal here.
    let _ended = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(None)
        .serve_connection(TokioIo::new(stream), service)
        .await;
}

const COMMANDS_MAX: usize = 16;
const BIND_BOUND: Duration = Duration::from_secs(10);
const BIND_RETRY: Duration = Duration::from_millis(5);
