//! The plain hop, the floor of what a gateway on this stack can cost: hyper on both sides, a connection to the server for each
//! client's connection, bodies passed on as they come. It knows no sessions, looks at nothing and keeps nothing.

use super::{accept, listen};
use anyhow::Result;
use hyper::body::Incoming;
use hyper::client::conn::http1::SendRequest;
use hyper::header::{CONNECTION, HeaderName};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio::sync::Mutex;

/// Passes requests on to an address until it is told to end.
pub(super) async fn run(to: SocketAddr) -> Result<()> {
    let listener = listen().await?;
    loop {
        let client = accept(&listener).await?;
        tokio::spawn(async move {
            // A connection that fails concerns its client only, who sees it.
            let _ended = carry(client, to).await;
        });
    }
}

async fn carry(client: TcpStream, to: SocketAddr) -> Result<()> {
    let server = TcpStream::connect(to).await?;
    server.set_nodelay(true)?;
    let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(server)).await?;
    tokio::spawn(connection);
    let sender = Arc::new(Mutex::new(sender));
    let service = service_fn(move |request| {
        let sender = Arc::clone(&sender);
        async move { pass(&mut *sender.lock().await, request).await }
    });
    hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(client), service).await?;
    Ok(())
}

async fn pass(sender: &mut SendRequest<Incoming>, mut request: Request<Incoming>) -> hyper::Result<Response<Incoming>> {
    for name in [CONNECTION, HeaderName::from_static("keep-alive")] {
        request.headers_mut().remove(name);
    }
    sender.ready().await?;
    let mut response = sender.send_request(request).await?;
    response.headers_mut().remove(CONNECTION);
    Ok(response)
}
