//! Starting the process, and bringing it to where the last one was (C5).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::wire::envelope;
use mainstay_keeper::client::WriteError;
use tokio::time::{Instant, timeout, timeout_at};

use super::end::Why;
use super::launch::launch;
use super::running::{Audience, Running};
use super::{Child, Current, State};
use crate::failure::{Blame, Failure};
use crate::handshake::{self, NotOpened, Opened};
use crate::notice::{ListsChanged, Notice};
use crate::task;
use crate::upstreams::Upstreams;
use crate::wire::{self, lock};

impl Child {
    /// The process, started or made ready first if need be.
    pub(super) async fn running(self: &Arc<Self>) -> Result<Arc<Running>, Failure> {
        {
            let state = lock(&self.state);
            if state.kept.ended {
                return Err(self.over());
            }
            if let Some(running) = ready(&state) {
                return Ok(running);
            }
        }
        self.establish().await
    }

    /// Starts a process, once for all who ask. The work is a task of its own: a caller that goes away in the middle must
    /// not leave a process behind that was told half of its handshake.
    async fn establish(self: &Arc<Self>) -> Result<Arc<Running>, Failure> {
        let this = Arc::clone(self);
        let task = task::spawn(async move {
            let found = || ready(&lock(&this.state));
            this.flight.join(found, Box::pin(this.make())).await
        });
        // The task ends early only with the runtime.
        task.await.unwrap_or_else(|_| Err(self.over()))
    }

    async fn make(self: &Arc<Self>) -> Result<Arc<Running>, Failure> {
        if let Some(running) = self.alive() {
            if running.is_retired() {
                return self.succeed(&running).await;
            }
            // Only `initialized` is missing.
            let said = timeout(self.server().handshake_bound, self.say_initialized(&running)).await;
            let said = said.map_err(|_| self.unreachable("its process does not read what it is told".into()))?;
            said.map_err(|_| self.unreachable("its process has just ended".into()))?;
            self.tell_record().await;
            return Ok(running);
        }
        self.spawn().await
    }

    /// Starts a process in the place of one that is retired. Never beside it: what it holds locked must be
    /// free.
    async fn succeed(self: &Arc<Self>, retired: &Running) -> Result<Arc<Running>, Failure> {
        if !retired.is_gone().await {
            return Err(self.unreachable("its process is about to be replaced and has not ended yet".into()));
        }
        self.spawn().await
    }

    /// Starts a process, as soon as the server's children allow (C4).
    async fn spawn(self: &Arc<Self>) -> Result<Arc<Running>, Failure> {
        let Some(custody) = self.upstreams.parts.custody.clone() else {
            return Err(self.unreachable("there is no keeper".into()));
        };
        let lease = self.destination.supervision.permit(self.server(), self.server().patience).await?;
        let (reason, params, key) = {
            let state = lock(&self.state);
            if state.kept.ended {
                return Err(self.over());
            }
            (lost_by(&state), state.kept.handshake.params.clone(), state.kept.handshake.key)
        };
        let parts = (&self.upstreams, &self.destination);
        let audience = Audience::Session(Arc::clone(&self.notices));
        let (running, pump) = launch(parts, (custody, key), audience, lease).await?;
        // The bound is absolute: whatever the process sends meanwhile does not extend it.
        let deadline = Instant::now() + self.server().handshake_bound;
        let shaken = timeout_at(deadline, self.shake_hands(&running, &params)).await;
        let hung = || self.unreachable("it did not finish its handshake in time".into());
        match shaken.map_err(|_| hung()).and_then(|shaken| shaken) {
            Ok((opened, lists)) => {
                running.lease.up(reason.is_some());
                self.refused.store(false, Ordering::Release);
                self.destination.eras.note_legacy(true);
                self.install((running, pump), opened, (reason, lists)).await
            }
            Err(failure) => {
                let is_refusal = matches!(failure, Failure::Rejected { .. });
                self.refused.store(is_refusal, Ordering::Release);
                // An answer, though a refusal, is no fault of the process; nor does its end need another word.
                let says_enough = is_refusal || running.is_over();
                running.lease.never_up((!says_enough).then(|| failure.cause()).as_deref());
                running.stop(Why::NeverUp).await;
                Err(failure)
            }
        }
    }

    /// The process that is alive, whether it was told `initialized` or not.
    pub(super) fn alive(&self) -> Option<Arc<Running>> {
        let state = lock(&self.state);
        let current = state.current.as_ref().filter(|current| !current.running.is_over())?;
        Some(Arc::clone(&current.running))
    }

    /// `initialize`, and if the client has confirmed its own already, `initialized` and the settings too.
    async fn shake_hands(&self, running: &Arc<Running>, params: &[u8]) -> Result<(Opened, ListsChanged), Failure> {
        let (id, response) = self.ask(running, "initialize", Some(params)).await?;
        let opened = handshake::opened(&id, &response).map_err(|not| match not {
            NotOpened::Refused(error) => handshake::refusal(self.server(), &error),
            NotOpened::Malformed(problem) => self.protocol(problem),
        })?;
        if !lock(&self.state).kept.handshake.confirmed {
            return Ok((opened, ListsChanged::Unknown));
        }
        if self.say_initialized(running).await.is_err() {
            return Err(running.exited().await);
        }
        let requests = {
            let state = lock(&self.state);
            handshake::replay(state.kept.handshake.log_level.as_deref(), &state.kept.handshake.subscriptions)
        };
        for (method, params) in requests {
            let replayed = timeout(REPLAY_BOUND, self.ask(running, method, Some(&params))).await;
            if !matches!(replayed, Ok(Ok(_))) {
                tracing::debug!(server = %self.server().name, method, "replaying a setting failed");
            }
        }
        Ok((opened, self.compare_lists(running).await))
    }

    /// Tells the process `initialized`, once.
    async fn say_initialized(&self, running: &Running) -> Result<(), WriteError> {
        if !running.is_initialized() {
            running.write(wire::initialized()).await?;
            running.mark_initialized();
        }
        Ok(())
    }

    async fn compare_lists(&self, running: &Arc<Running>) -> ListsChanged {
        if !lock(&self.state).kept.catalogue.is_known() {
            return ListsChanged::Unknown;
        }
        let Ok(Ok((_, response))) = timeout(LISTS_BOUND, self.ask(running, "tools/list", None)).await else {
            return ListsChanged::Unknown;
        };
        let result = envelope::scan(&response).ok().and_then(|envelope| envelope.result);
        let Some(page) = result.map(|span| self.upstreams.pages.page(&response[span])) else {
            return ListsChanged::Unknown;
        };
        let catalogue = &mut lock(&self.state).kept.catalogue;
        let lists = catalogue.compare(&page);
        catalogue.observe(page, true);
        lists
    }

    /// A request of the link's own: its id and its response.
    async fn ask(
        &self,
        running: &Arc<Running>,
        method: &str,
        params: Option<&[u8]>,
    ) -> Result<(Bytes, Bytes), Failure> {
        let id = self.upstreams.own_id();
        let message = Bytes::from(envelope::request_message(&id, method, params));
        Ok((id.clone(), running.ask(id, message).await?))
    }

    async fn install(
        &self,
        (running, pump): (Arc<Running>, tokio::task::AbortHandle),
        opened: Opened,
        (reason, lists): (Option<String>, ListsChanged),
    ) -> Result<Arc<Running>, Failure> {
        let ended = {
            let mut state = lock(&self.state);
            if !state.kept.ended {
                state.kept.open(&self.upstreams, &opened);
                if let Some(reason) = &reason {
                    state.kept.remake(reason);
                }
                let current = Current { running: Arc::clone(&running), pump };
                state.previous = state.current.replace(current).map(|previous| previous.running);
            }
            state.kept.ended
        };
        if ended {
            running.stop(Why::SessionEnded).await;
            return Err(self.over());
        }
        self.announce(opened, reason, lists).await;
        Ok(running)
    }

    async fn announce(&self, opened: Opened, reason: Option<String>, lists: ListsChanged) {
        self.tell_record().await;
        let Some(reason) = reason else {
            self.notices.tell(Notice::Opened(opened)).await;
            return;
        };
        Upstreams::count(&self.upstreams.counters.remade);
        let key = lock(&self.state).kept.handshake.key;
        tracing::info!(server = %self.server().name, session = ?key, reason, "child made again");
        self.notices.tell_remade(reason.into(), lists).await;
    }

    async fn tell_record(&self) {
        if let Some(record) = self.record() {
            self.notices.tell(Notice::Record(Box::new(record))).await;
        }
    }
}

fn ready(state: &State) -> Option<Arc<Running>> {
    let running = &state.current.as_ref()?.running;
    let told = running.is_initialized() || !state.kept.handshake.confirmed;
    (told && !running.is_over() && !running.is_retired()).then(|| Arc::clone(running))
}

/// Why the state of the session is lost with the process that is not there any more, if there was any.
fn lost_by(state: &State) -> Option<String> {
    let ended = state.current.as_ref().and_then(|current| current.running.end());
    if let Some(end) = ended {
        return Some(end.reason());
    }
    // The record of a process that nobody holds any more.
    let recorded =
        state.kept.opened.is_some().then_some("its process was ended while its session was unused or the gateway away");
    state.kept.loss().or(recorded).map(str::to_owned)
}

/// How long one setting may take to be made again.
const REPLAY_BOUND: Duration = Duration::from_secs(5);

/// How long a new process may take to list its tools before nobody waits for the comparison.
const LISTS_BOUND: Duration = Duration::from_secs(1);
