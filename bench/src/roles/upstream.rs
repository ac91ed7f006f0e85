//! The fixture over HTTP: `/json` answers with a document, `/sse` with an event stream of one event.

use super::{accept, listen};
use crate::fixture::{Reply, next_session, reply};
use anyhow::Result;
use bytes::Bytes;
use futures_util::stream;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use std::convert::Infallible;

type Answer = Response<BoxBody<Bytes, Infallible>>;

/// Serves until it is told to end.
pub(super) async fn run() -> Result<()> {
    let listener = listen().await?;
    loop {
        let stream = accept(&listener).await?;
        tokio::spawn(async move {
            let connection =
                hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service_fn(serve));
            // A connection that fails concerns its client only, who sees it.
            let _ended = connection.await;
        });
    }
}

async fn serve(request: Request<Incoming>) -> Result<Answer, hyper::http::Error> {
    let whole = |body: Vec<u8>| Full::new(Bytes::from(body)).boxed();
    if request.method() != Method::POST {
        let status = if request.method() == Method::DELETE { 200 } else { 405 };
        return Response::builder().status(status).body(whole(Vec::new()));
    }
    let streams = request.uri().path() == "/sse";
    let Ok(body) = request.into_body().collect().await else {
        return Response::builder().status(400).body(whole(Vec::new()));
    };
    let response = Response::builder().header("content-type", "application/json");
    match reply(&body.to_bytes()) {
        Reply::Nothing => Response::builder().status(202).body(whole(Vec::new())),
        Reply::Opened(answer) => response.header("mcp-session-id", next_session()).body(whole(answer)),
        Reply::After(wait, answer) => {
            if !wait.is_zero() {
                tokio::time::sleep(wait).await;
            }
            if !streams {
                return response.body(whole(answer));
            }
            let event = [b"event: message\ndata: ", answer.as_slice(), b"\n\n"].concat();
            let events = stream::iter([Ok(Frame::data(Bytes::from(event)))]);
            Response::builder().header("content-type", "text/event-stream").body(StreamBody::new(events).boxed())
        }
    }
}
