//! One client's connection: served request by request, and given to the next worker when this one hands over.
//!
//! A connection that is closed at the wrong moment costs its client a request: a client may be writing on it. So an
//! idle one is not closed on a handover but goes over, together with what was already read of a request (T1, T2).

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use mainstay_keeper::client::Connection as Passed;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::TcpStream;

use crate::engine::tally::Counted;
use crate::serve::turn::Turns;
use crate::serve::{Front, LISTENER, answer};

/// A client's socket, and what an earlier worker had already read from it.
pub(super) struct Wire {
    read: Bytes,
    stream: TcpStream,
}

impl Wire {
    /// A connection that was just accepted.
    pub(super) fn new(stream: TcpStream) -> Self {
        Self { read: Bytes::new(), stream }
    }

    /// A connection of the worker before.
    ///
    /// # Errors
    /// The socket can't be used.
    pub(super) fn taken_over(passed: Passed) -> io::Result<Self> {
        let stream = std::net::TcpStream::from(passed.socket);
        stream.set_nonblocking(true)?;
        Ok(Self { read: passed.read, stream: TcpStream::from_std(stream)? })
    }

    /// What the next worker is given; `read` is what has been read beyond the last request.
    fn pass(self, read: Bytes) -> io::Result<Passed> {
        let mut all = BytesMut::from(read);
        all.extend_from_slice(&self.read);
        Ok(Passed { listener: LISTENER.to_owned(), socket: self.stream.into_std()?.into(), read: all.freeze() })
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.read.is_empty() {
            return Pin::new(&mut self.stream).poll_read(context, buffer);
        }
        let length = self.read.len().min(buffer.remaining());
        buffer.put_slice(&self.read[..length]);
        self.read.advance(length);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Wire {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }
}

/// Serves a connection until its client leaves or the worker stops. `undecided` counts until it is settled what becomes
/// of the connection then: an idle one is passed on or closed, a busy one answers its request first.
pub(super) async fn serve(front: &Arc<Front>, wire: Wire, undecided: Counted) {
    // Small answers must not wait for an acknowledgement; a socket that refuses the option still works.
    let _ = wire.stream.set_nodelay(true);
    // A client that is gone already is nobody in particular.
    let peer = wire.stream.peer_addr().map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |peer| peer.ip());
    let serving = Arc::clone(front);
    let asked = Arc::new(AtomicBool::new(false));
    let first = Arc::clone(&asked);
    let service = service_fn(move |request: http::Request<Incoming>| {
        first.store(true, Ordering::Relaxed);
        answer(&serving, peer, request)
    });
    let mut connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_READ_MAX)
        .max_buf_size(front.header_bytes_max + HEAD_SLACK_BYTES)
        .serve_connection(TokioIo::new(wire), service);
    let turns = Turns::new();
    tokio::select! {
        ended = turns.until(|context| Pin::new(&mut connection).poll(context)) => return report(ended),
        () = front.engine.stopped() => {}
    }
    Pin::new(&mut connection).graceful_shutdown();
    // An idle connection is done at once, a busy one when its request is answered. One on which only part of a first head
    // has come is not done, but nothing of it is used up either.
    let settled = std::future::poll_fn(|context| Poll::Ready(connection.poll_without_shutdown(context))).await;
    let was_idle = settled.is_ready() || !asked.load(Ordering::Relaxed);
    if was_idle && front.engine.hands_over() {
        let parts = connection.into_parts();
        pass(front, parts.io.into_inner(), parts.read_buf).await;
        return;
    }
    drop(undecided);
    let ended = match settled {
        Poll::Ready(ended) => ended,
        Poll::Pending => turns.until(|context| connection.poll_without_shutdown(context)).await,
    };
    report(ended);
    let mut wire = connection.into_parts().io.into_inner();
    // The client may have left first.
    let _ = wire.shutdown().await;
}

async fn pass(front: &Front, wire: Wire, read: Bytes) {
    let passed = match wire.pass(read) {
        Ok(passed) => passed,
        Err(error) => return tracing::warn!(error = %error, "a connection could not be taken out of this worker"),
    };
    if let Err(error) = front.engine.custody.pass_connection(passed).await {
        tracing::debug!(error = %error, "a connection could not be passed on and is closed");
    }
}

fn report(ended: hyper::Result<()>) {
    if let Err(error) = ended {
        tracing::debug!(error = %error, "connection ended");
    }
}

/// How long a client may take to send the head of a request.
const HEADER_READ_MAX: Duration = Duration::from_mins(5);
/// How much more than a head may have is read of one, so that its refusal can name the limit. What is longer still is
/// refused without a word.
const HEAD_SLACK_BYTES: usize = 64 * 1024;
