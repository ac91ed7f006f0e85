//! The admin API as commands use it, and the one HTTP request that all of it is made of.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use bytes::Bytes;
use http::header::{AUTHORIZATION, HOST};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Empty, Full, Limited};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::net::TcpStream;

use super::failure::Failure;
use super::gateway::{self, Gateway};
use super::{Place, config};
use crate::runtime;

/// A running gateway's admin API.
pub(super) struct Api {
    gateway: Gateway,
    token: String,
}

impl Api {
    /// The API of the gateway that `place` means.
    ///
    /// # Errors
    /// Exit code 3 if none has published itself there.
    pub(super) fn find(place: &Place) -> Result<Self, Failure> {
        let config = config::of_place(place)?;
        let gateway = Gateway::read(&config.state_dir)?.ok_or_else(|| gateway::absent(&config.state_dir))?;
        let owner = mainstay_keeper::read_owner(&config.state_dir);
        if !owner.is_some_and(|owner| owner.is_alive()) {
            return Err(gateway::absent(&config.state_dir));
        }
        let token = gateway::read_token(&config)?;
        Ok(Self { gateway, token })
    }

    /// The API of a gateway that is known already.
    pub(super) fn of(gateway: Gateway, token: String) -> Self {
        Self { gateway, token }
    }

    /// Reads the document at `path`, on a runtime of its own.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub(super) fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Failure> {
        block_on(self.read(path))
    }

    /// Reads the document at `path`, which is below `/api/v1`.
    ///
    /// # Errors
    /// Exit code 3 if nobody listens, 4 if there is no such thing, 1 for what the gateway refuses.
    pub(super) async fn read<T: DeserializeOwned>(&self, path: &str) -> Result<T, Failure> {
        let admin = self.gateway.admin;
        let request = Request::get(format!("/api/v1{path}"))
            .header(HOST, admin.to_string())
            .header(AUTHORIZATION, format!("Bearer {}", self.token))
            .body(Empty::<Bytes>::new())
            .context("make the request")?;
        let (status, body) = tokio::time::timeout(ANSWER_WITHIN, async {
            let response = send(admin, request).await?;
            let status = response.status();
            anyhow::Ok((status, whole(response).await?))
        })
        .await
        .map_err(|_| anyhow!("the admin API on {admin} does not answer"))?
        .map_err(|error| unreachable_api(error, admin))?;
        match status {
            StatusCode::OK => Ok(serde_json::from_slice(&body).context("read the gateway's answer")?),
            StatusCode::NOT_FOUND => Err(Failure::not_found(anyhow!("{}", detail(&body)))),
            StatusCode::UNAUTHORIZED => Err(Failure::from(anyhow!("the gateway on {admin} has another admin token"))
                .hint("another gateway may listen there; compare `--state-dir`")),
            status => Err(Failure::from(anyhow!("the gateway answered {status}: {}", detail(&body)))),
        }
    }
}

/// Runs `future` on a small runtime of its own.
pub(super) fn block_on<T>(future: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(future)
}

/// Sends one request over a connection of its own. The caller bounds the time.
pub(super) async fn send<B>(to: SocketAddr, request: Request<B>) -> anyhow::Result<Response<Incoming>>
where
    B: hyper::body::Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + Send + 'static,
{
    let stream = TcpStream::connect(to).await.with_context(|| format!("connect to {to}"))?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    // It ends with the response or its sender; what went wrong reaches the caller through them.
    runtime::spawn(async move {
        let _ = connection.await;
    });
    sender.send_request(request).await.with_context(|| format!("ask {to}"))
}

/// The whole body, bounded.
pub(super) async fn whole(response: Response<Incoming>) -> anyhow::Result<Bytes> {
    let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
    Ok(body.map_err(|error| anyhow!(error).context("read the answer"))?.to_bytes())
}

/// A request body that is in hand.
pub(super) fn full(body: Vec<u8>) -> Full<Bytes> {
    Full::new(body.into())
}

fn unreachable_api(error: anyhow::Error, admin: SocketAddr) -> Failure {
    Failure::not_running(error.context(format!("the admin API on {admin} can't be reached")))
        .hint("the gateway may be starting or stopping; try again, or see its log")
}

/// The detail of a problem document.
fn detail(body: &[u8]) -> String {
    let document: Option<crate::admin::Document> = serde_json::from_slice(body).ok();
    document.map_or_else(|| "no explanation".to_owned(), |document| super::output::plain(&document.detail))
}

const ANSWER_WITHIN: Duration = Duration::from_secs(10);
const ANSWER_BYTES_MAX: usize = 16 * 1024 * 1024;
