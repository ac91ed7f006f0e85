//! The admin API as commands use it, and the one HTTP request that all of it is made of.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::net::TcpStream;

use super::Place;
use super::failure::Failure;
use super::gateway::{self, Gateway};
use super::output::plain;
use super::place::config_of;
use crate::admin::Document;
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
        let config = config_of(place)?;
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
    /// Exit code 3 if nobody listens, 4 if there is no such thing, 2 if the question is malformed, 1 for what the
    /// gateway refuses.
    pub(super) async fn read<T: DeserializeOwned>(&self, path: &str) -> Result<T, Failure> {
        document(&self.ask(Method::GET, path, Vec::new()).await?)
    }

    /// Gives an order at `path`, which is below `/api/v1`, on a runtime of its own; answers with the document.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub(super) fn post<T: DeserializeOwned>(&self, path: &str, order: &Value) -> Result<T, Failure> {
        document(&block_on(self.ask(Method::POST, path, order.to_string().into_bytes()))?)
    }

    /// Gives an order that is answered with nothing but success.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub(super) fn order(&self, path: &str) -> Result<(), Failure> {
        block_on(self.ask(Method::POST, path, Vec::new())).map(drop)
    }

    async fn ask(&self, method: Method, path: &str, body: Vec<u8>) -> Result<Bytes, Failure> {
        let admin = self.gateway.admin;
        let request = Request::builder()
            .method(method)
            .uri(format!("/api/v1{path}"))
            .header(HOST, admin.to_string())
            .header(AUTHORIZATION, format!("Bearer {}", self.token))
            .header(CONTENT_TYPE, "application/json")
            .body(full(body))
            .context("make the request")?;
        let (status, body) = tokio::time::timeout(ANSWER_WITHIN, async {
            let response = send(admin, request).await?;
            let status = response.status();
            anyhow::Ok((status, whole(response).await?))
        })
        .await
        .map_err(|_| anyhow!("the admin API on {admin} does not answer"))?
        .map_err(|error| unreachable_api(error, admin))?;
        if status.is_success() { Ok(body) } else { Err(refused(status, &body, admin)) }
    }
}

/// A query of these parameters; what is absent is left out. Empty if all are.
pub(super) fn query(parameters: &[(&str, Option<&str>)]) -> String {
    let mut text = String::new();
    for (name, value) in parameters {
        let Some(value) = value else { continue };
        text.push(if text.is_empty() { '?' } else { '&' });
        text.push_str(name);
        text.push('=');
        for byte in value.bytes() {
            // RFC 3986, section 2.3: what need not be escaped.
            if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~') {
                text.push(char::from(byte));
            } else {
                text.push_str(&format!("%{byte:02X}"));
            }
        }
    }
    text
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

fn document<T: DeserializeOwned>(body: &[u8]) -> Result<T, Failure> {
    Ok(serde_json::from_slice(body).context("read the gateway's answer")?)
}

/// What a problem document is to whoever gave the command.
fn refused(status: StatusCode, body: &[u8], admin: SocketAddr) -> Failure {
    let problem: Option<Document> = serde_json::from_slice(body).ok();
    let detail = problem.as_ref().map_or_else(|| "no explanation".to_owned(), |problem| plain_lines(&problem.detail));
    let cause = anyhow!("{detail}");
    match status {
        StatusCode::NOT_FOUND => Failure::not_found(cause),
        StatusCode::BAD_REQUEST => Failure::usage(cause),
        StatusCode::UNAUTHORIZED => Failure::from(anyhow!("the gateway on {admin} has another admin token"))
            .hint("another gateway may listen there; compare `--state-dir`"),
        StatusCode::CONFLICT if problem.as_ref().is_some_and(|problem| !problem.sessions.is_empty()) => {
            let sessions = problem.map(|problem| problem.sessions).unwrap_or_default();
            Failure::from(cause).hint(format!("it can be: {}", candidates(&sessions)))
        }
        StatusCode::CONFLICT if problem.as_ref().is_some_and(|problem| problem.code == "handover_refused") => {
            Failure::from(cause)
        }
        StatusCode::GONE => Failure::from(cause).hint("see how it ended with `mainstay audit --session REF`"),
        // The trouble is a server's behind the gateway: it is told as that, and not as the gateway's.
        StatusCode::BAD_GATEWAY => Failure::from(cause),
        _ => Failure::from(cause.context(format!("the gateway answered {status}"))),
    }
}

/// Text of several lines as it may go to a terminal.
fn plain_lines(text: &str) -> String {
    text.lines().map(plain).collect::<Vec<_>>().join("\n")
}

fn candidates(sessions: &[Value]) -> String {
    let word = |session: &Value, name: &str| plain(session[name].as_str().unwrap_or("-"));
    let told = sessions.iter().map(|session| {
        let (server, principal) = (word(session, "server"), word(session, "principal"));
        format!("{} of {principal} with {server}, opened {}", word(session, "ref"), word(session, "opened_at"))
    });
    told.collect::<Vec<_>>().join("; ")
}

/// Longer than the gateway lets anybody wait.
const ANSWER_WITHIN: Duration = Duration::from_secs(70);
const ANSWER_BYTES_MAX: usize = 16 * 1024 * 1024;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_query_says_what_is_asked_and_nothing_else() {
        assert_eq!(query(&[("a", None)]), "");
        let text = query(&[("a", Some("x y")), ("b", None), ("c", Some("é&=#+%"))]);
        assert_eq!(text, "?a=x%20y&c=%C3%A9%26%3D%23%2B%25");
    }

    #[test]
    fn an_ambiguous_ref_is_told_with_what_it_can_mean() {
        let sessions = [json!({"ref": "s-0123456789", "server": "files", "principal": "agent:a", "opened_at": "t"})];
        assert_eq!(candidates(&sessions), "s-0123456789 of agent:a with files, opened t");
    }
}
