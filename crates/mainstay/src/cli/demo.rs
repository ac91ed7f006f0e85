//! `mainstay demo`: the main job in one command.
//!
//! It runs a real gateway with the bundled demo server in a directory of its own, holds one client session over
//! HTTP, kills first the worker and then everything with SIGKILL, and shows that the session goes on.

use std::time::Duration;

use anyhow::{Context as _, anyhow, ensure};
use serde::Serialize;
use serde_json::Value;

use super::api::block_on;
use super::failure::Failure;
use super::output::{Output, plain};
use client::Client;
use subject::Subject;

mod client;
mod subject;

/// Shows it.
pub(super) fn run(out: &Output) -> Result<(), Failure> {
    let mut subject = Subject::prepare()?;
    let mut told = Told { out, steps: Vec::new(), interrupted: false };
    let walked = block_on(async {
        tokio::select! {
            walked = tokio::time::timeout(WALK_BOUND, walk(&mut subject, &mut told)) => {
                walked.map_err(|_| anyhow!("the demo took more than {} s", WALK_BOUND.as_secs()))?
            }
            interrupted = tokio::signal::ctrl_c() => {
                interrupted?;
                told.interrupted = true;
                Err(anyhow!("interrupted").into())
            }
        }
    });
    match walked {
        Ok(()) => {
            subject.clean_up()?;
            told.step("stopped the gateway and removed its directory")?;
            if out.is_json() { out.document(&told.steps) } else { Ok(()) }
        }
        // Whoever stopped it has no use for its log.
        Err(failure) if told.interrupted || failure.is_closed_pipe() => {
            subject.clean_up()?;
            Err(failure)
        }
        Err(failure) => Err(failure.hint(format!("the gateway's log is `{}`", subject.log_file().display()))),
    }
}

async fn walk(subject: &mut Subject, told: &mut Told<'_>) -> Result<(), Failure> {
    subject.start().await?;
    let mut client = Client::new(subject.mcp()?, SERVER);
    let processes = subject.processes().await?;
    told.step(&format!("started a gateway in front of a demo server: {} ({processes})", client.url()))?;

    client.open().await?;
    told.step(&format!("opened a session over HTTP: {}", subject.session_ref().await?))?;
    let (first, _) = count(&mut client).await?;
    told.step(&format!("called the tool `counter`: {first}"))?;

    let killed = subject.kill_worker().await?;
    told.step(&format!("kill -9 of the worker (pid {killed})"))?;
    let (second, _) = count(&mut client).await?;
    ensure(second == first + 1, "the counter did not go on after the death of the worker")?;
    let processes = subject.processes().await?;
    told.step(&format!("called `counter` under the same session id: {second}; nothing was lost ({processes})"))?;

    subject.kill_everything().await?;
    told.step("kill -9 of the keeper and the worker; the demo server dies with them")?;
    subject.start().await?;
    let processes = subject.processes().await?;
    told.step(&format!("started the gateway again ({processes})"))?;
    let (third, notice) = count(&mut client).await?;
    let notice = notice.context("the answer does not say what was lost")?;
    told.step(&format!("called `counter` under the same session id: {third}; the session lives"))?;
    told.step(&format!("what was lost is said in the answer's _meta: {}", plain(&notice.to_string())))
}

/// Calls `counter`; its count, and what the gateway says on the side.
async fn count(client: &mut Client) -> anyhow::Result<(u64, Option<Value>)> {
    let result = client.call("counter").await?;
    let text = result.pointer("/content/0/text").and_then(Value::as_str);
    let count = text.and_then(|text| text.parse().ok());
    let notice = result.pointer("/_meta/mainstay~1notice").cloned();
    Ok((count.with_context(|| format!("`counter` answered {result}"))?, notice))
}

fn ensure(holds: bool, otherwise: &str) -> anyhow::Result<()> {
    ensure!(holds, "{otherwise}");
    Ok(())
}

/// What was done so far.
struct Told<'a> {
    out: &'a Output,
    steps: Vec<Step>,
    interrupted: bool,
}

#[derive(Serialize)]
struct Step {
    step: usize,
    text: String,
}

impl Told<'_> {
    fn step(&mut self, text: &str) -> Result<(), Failure> {
        let step = self.steps.len() + 1;
        if !self.out.is_json() {
            self.out.line(&format!("{step:2}  {text}"))?;
        }
        self.steps.push(Step { step, text: text.to_owned() });
        Ok(())
    }
}

/// What the gateway calls the demo server: `serve -- CMD` names it after the program.
const SERVER: &str = "mainstay";
/// The walk takes a few seconds.
const WALK_BOUND: Duration = Duration::from_secs(60);
