//! The Rust SDK (`rmcp`) as a client, in the test's own process.
#![expect(deprecated, reason = "sampling is deprecated in the SDK, and servers of the sessionful revisions use it")]

use crate::wait::within;
use anyhow::{Context as _, Result, bail};
use rmcp::model::{
    CallToolRequestParams, ClientInfo, CreateMessageRequestParams, CreateMessageResult, ElicitRequestParams,
    ElicitResult, Implementation,
};
use rmcp::service::{Peer, RequestContext, RoleClient, RunningService, ServiceError};
use rmcp::transport::StreamableHttpClientTransport;
use rmcp::{ClientHandler, ErrorData, ServiceExt as _};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// A client on the Rust SDK, connected with the SDK's own defaults.
pub struct RustClient {
    service: RunningService<RoleClient, User>,
    answers: Answers,
    asked: Arc<AtomicU64>,
    calls: HashMap<String, JoinHandle<Value>>,
}

/// The person at the client, who may still be thinking.
#[derive(Debug)]
struct User {
    elicitation: watch::Receiver<Option<Value>>,
    sampling: watch::Receiver<Option<Value>>,
    asked: Arc<AtomicU64>,
}

#[derive(Debug)]
struct Answers {
    elicitation: watch::Sender<Option<Value>>,
    sampling: watch::Sender<Option<Value>>,
}

impl ClientHandler for User {
    fn get_info(&self) -> ClientInfo {
        let capabilities = serde_json::from_value(json!({"elicitation": {}, "sampling": {}})).unwrap_or_default();
        ClientInfo::new(capabilities, Implementation::new("rmcp", "1.0.0"))
    }

    async fn create_message(
        &self,
        _params: CreateMessageRequestParams,
        _context: RequestContext<RoleClient>,
    ) -> Result<CreateMessageResult, ErrorData> {
        serde_json::from_value(self.decision(&self.sampling).await?).map_err(unlike)
    }

    async fn create_elicitation(
        &self,
        _request: ElicitRequestParams,
        _context: RequestContext<RoleClient>,
    ) -> Result<ElicitResult, ErrorData> {
        serde_json::from_value(self.decision(&self.elicitation).await?).map_err(unlike)
    }
}

impl User {
    async fn decision(&self, decided: &watch::Receiver<Option<Value>>) -> Result<Value, ErrorData> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let mut decided = decided.clone();
        let answer = decided.wait_for(Option::is_some).await.map(|answer| answer.clone());
        answer.ok().flatten().ok_or_else(|| ErrorData::internal_error("the user has gone", None))
    }
}

fn unlike(error: serde_json::Error) -> ErrorData {
    ErrorData::internal_error(error.to_string(), None)
}

impl RustClient {
    /// Connects a client whose user is undecided about everything.
    ///
    /// # Errors
    /// If it cannot connect.
    pub async fn open(url: &str) -> Result<RustClient> {
        let (elicitation, sampling) = (watch::Sender::new(None), watch::Sender::new(None));
        let asked = Arc::new(AtomicU64::new(0));
        let user =
            User { elicitation: elicitation.subscribe(), sampling: sampling.subscribe(), asked: Arc::clone(&asked) };
        let service = user.serve(StreamableHttpClientTransport::from_uri(url)).await?;
        Ok(RustClient { service, answers: Answers { elicitation, sampling }, asked, calls: HashMap::new() })
    }

    /// Calls a tool that must succeed, and returns its text.
    ///
    /// # Errors
    /// If it does not succeed.
    pub async fn text(&self, tool: &str, args: Value) -> Result<String> {
        let answer = call(self.service.peer().clone(), tool.to_owned(), args).await;
        match answer["text"].as_str() {
            Some(text) if answer["ok"] == true && answer["isError"] != true => Ok(text.to_owned()),
            _ => bail!("rmcp: `{tool}` failed: {answer}"),
        }
    }

    /// Begins a call and does not wait for its end; [`RustClient::done`] does.
    pub fn call_start(&mut self, tool: &str, args: Value, tag: &str) {
        let call = tokio::spawn(call(self.service.peer().clone(), tool.to_owned(), args));
        self.calls.insert(tag.to_owned(), call);
    }

    /// Waits for the end of a call that was begun: `{"ok": true, "text", "isError"}` or
    /// `{"ok": false, "error", "code", "data"}`, as the other clients say it.
    ///
    /// # Errors
    /// If it does not end within the bound.
    pub async fn done(&mut self, tag: &str, bound: Duration) -> Result<Value> {
        let call = self.calls.remove(tag).with_context(|| format!("no call `{tag}`"))?;
        within(&format!("the end of the call `{tag}`"), bound, async { Ok(call.await?) }).await
    }

    /// How many questions of the server have come.
    #[must_use]
    pub fn asked(&self) -> u64 {
        self.asked.load(Ordering::SeqCst)
    }

    /// Lets the user answer forms and requests for samples.
    pub fn answer(&self, elicitation: Value, sampling: Value) {
        self.answers.elicitation.send_replace(Some(elicitation));
        self.answers.sampling.send_replace(Some(sampling));
    }

    /// Closes as the SDK does, with a DELETE.
    ///
    /// # Errors
    /// If the client's task failed.
    pub async fn close(self) -> Result<()> {
        self.service.cancel().await?;
        Ok(())
    }
}

async fn call(peer: Peer<RoleClient>, tool: String, args: Value) -> Value {
    let params = CallToolRequestParams::new(tool).with_arguments(args.as_object().cloned().unwrap_or_default());
    match peer.call_tool(params).await {
        Ok(result) => {
            let result = serde_json::to_value(result).unwrap_or_default();
            let text = result["content"][0]["text"].clone();
            json!({"ok": true, "text": text, "isError": result["isError"] == true, "meta": result["_meta"]})
        }
        Err(ServiceError::McpError(error)) => {
            json!({"ok": false, "error": error.message, "code": error.code.0, "data": error.data})
        }
        Err(error) => json!({"ok": false, "error": error.to_string(), "code": null, "data": null}),
    }
}
