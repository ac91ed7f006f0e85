//! Making an upstream session: the first time, late, or again (U4, U8).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use mainstay_core::resume::UpstreamId;
use mainstay_core::wire::envelope;
use tokio::time::timeout;

use super::legacy::Connection;
use super::own::Unanswered;
use super::{Http, Session, State, Step, Tries, is_initialized};
use crate::failure::{Blame, Failure};
use crate::handshake::{self, NotOpened, Opened};
use crate::notice::{ListsChanged, Notice};
use crate::server::Transport;
use crate::task::spawn;
use crate::upstreams::Upstreams;
use crate::wire::{self, lock};

/// Why a session is wanted.
pub(super) enum Cause {
    /// Something is to be sent, and there is none yet, or it has not been told `initialized`.
    Use,
    /// The server does not know this one any more.
    Lost(Arc<Session>, &'static str),
}

/// A session that a server has opened.
struct Made {
    opened: Opened,
    id: Option<UpstreamId>,
    /// The connection that it is, over HTTP+SSE.
    connection: Option<Connection>,
}

impl Http {
    /// The session, made or made ready first if need be.
    pub(super) async fn session(self: &Arc<Self>) -> Result<Arc<Session>, Failure> {
        {
            let state = lock(&self.state);
            if state.kept.ended {
                return Err(self.over());
            }
            if let Some(session) = ready(&state) {
                return Ok(session);
            }
        }
        Box::pin(self.establish(Cause::Use)).await
    }

    /// Another session in place of `lost`; one flight for all who ask.
    pub(super) async fn renew(
        self: &Arc<Self>,
        lost: &Arc<Session>,
        reason: &'static str,
    ) -> Result<Arc<Session>, Failure> {
        self.establish(Cause::Lost(Arc::clone(lost), reason)).await
    }

    /// Makes a session for `cause`. The work is a task of its own: a caller that goes away in the middle must not leave
    /// an upstream session behind that nobody knows.
    pub(super) async fn establish(self: &Arc<Self>, cause: Cause) -> Result<Arc<Session>, Failure> {
        let this = Arc::clone(self);
        let task = spawn(async move {
            let found = || {
                let state = lock(&this.state);
                match &cause {
                    Cause::Use => ready(&state),
                    Cause::Lost(lost, _) => ready(&state).filter(|session| !Arc::ptr_eq(session, lost)),
                }
            };
            this.flight.join(found, Box::pin(this.make(&cause))).await
        });
        // The task ends early only with the runtime.
        task.await.unwrap_or_else(|_| Err(self.over()))
    }

    async fn make(self: &Arc<Self>, cause: &Cause) -> Result<Arc<Session>, Failure> {
        let (params, existing) = {
            let state = lock(&self.state);
            if state.kept.ended {
                return Err(self.over());
            }
            (state.kept.handshake.params.clone(), state.session.clone())
        };
        let reason = match (cause, existing) {
            (Cause::Use, Some(session)) if session.is_cut() => Some(session.loss("nothing more")),
            (Cause::Use, Some(session)) => match self.say_initialized_in_time(&session).await {
                Ok(()) => {
                    self.tell_record().await;
                    return Ok(session);
                }
                Err(Step::SessionLost { reason, .. }) => Some(session.loss(reason)),
                Err(step) => return Err(self.failure_of(step)),
            },
            (Cause::Use, None) => lock(&self.state).kept.loss().map(str::to_owned),
            (Cause::Lost(lost, reason), _) => Some(lost.loss(reason)),
        };
        if self.upstreams.has_left() {
            return Err(self.left());
        }
        let bound = self.server().handshake_bound;
        let hung = || self.unreachable("it did not answer `initialize` in time".into());
        let Made { opened, id, connection } = timeout(bound, self.initialize(&params)).await.map_err(|_| hung())??;
        let session = Arc::new(Session::new(id, &opened.version, false).over(connection));
        let confirmed = lock(&self.state).kept.handshake.confirmed;
        if confirmed && let Err(step) = self.say_initialized_in_time(&session).await {
            self.discard(&session).await;
            return Err(self.failure_of(step));
        }
        let lists = match confirmed {
            true => {
                self.replay(&session).await;
                self.compare_lists(&session).await
            }
            false => ListsChanged::Unknown,
        };
        if !self.install(&session, &opened, reason.as_deref()) {
            self.discard(&session).await;
            return Err(if self.upstreams.has_left() { self.left() } else { self.over() });
        }
        self.announce(opened, reason, lists).await;
        Ok(session)
    }

    /// The handshake's first half, with the client's own parameters and without any session id.
    async fn initialize(self: &Arc<Self>, params: &[u8]) -> Result<Made, Failure> {
        let mut tries = Tries::default();
        loop {
            match self.shake_hands(params).await {
                Ok(made) => {
                    self.refused.store(false, Ordering::Release);
                    self.destination.eras.note_legacy(true);
                    return Ok(made);
                }
                Err(Unanswered::Away(cause)) => {
                    if !tries.wait(self.server().patience).await {
                        return Err(self.unreachable(cause));
                    }
                }
                Err(Unanswered::Failed(Failure::Unauthorized { server })) => {
                    if tries.refreshed || !self.destination.refresh(&*self.upstreams.parts.environment)? {
                        return Err(Failure::Unauthorized { server });
                    }
                    tries.refreshed = true;
                }
                Err(Unanswered::Failed(failure) | Unanswered::Refused { failure, .. }) => {
                    self.refused.store(true, Ordering::Release);
                    return Err(failure);
                }
                Err(Unanswered::SessionLost) => {
                    return Err(self.protocol("it lost a session that it was not asked for"));
                }
            }
        }
    }

    /// `initialize` over the transport that the server speaks.
    async fn shake_hands(self: &Arc<Self>, params: &[u8]) -> Result<Made, Unanswered> {
        match self.server().transport() {
            Transport::Streamable => self.shake_hands_streamable(params).await.map_err(|(unanswered, _)| unanswered),
            Transport::Sse => self.shake_hands_legacy(params).await,
            Transport::Auto if self.destination.detected.is_legacy() => match self.shake_hands_legacy(params).await {
                // It may have been upgraded.
                Err(Unanswered::Refused { .. } | Unanswered::Failed(Failure::Configuration { .. })) => {
                    self.destination.detected.forget();
                    self.detect(params).await
                }
                other => other,
            },
            Transport::Auto => self.detect(params).await,
        }
    }

    /// Finds out which transport the server speaks: one that refuses the POST of an `initialize` may be of 2024-11-05, and
    /// then says so when its event stream is opened (2025-11-25, Transports, Backwards Compatibility). If it is not, the
    /// refusal stands.
    async fn detect(self: &Arc<Self>, params: &[u8]) -> Result<Made, Unanswered> {
        let refusal = match self.shake_hands_streamable(params).await {
            Err((refusal, 400 | 404 | 405)) => refusal,
            other => return other.map_err(|(unanswered, _)| unanswered),
        };
        match timeout(DETECT_BOUND, self.connect()).await {
            Ok(Ok(connection)) => {
                tracing::info!(server = %self.server().name, "the server speaks HTTP+SSE (2024-11-05)");
                self.destination.detected.note();
                self.greet(connection, params).await
            }
            Ok(Err(_)) | Err(_) => Err(refusal),
        }
    }

    /// The handshake by POST; if it fails, with the HTTP status that said so, or 0.
    async fn shake_hands_streamable(self: &Arc<Self>, params: &[u8]) -> Result<Made, (Unanswered, u16)> {
        let own = self.ask(None, "initialize", Some(params)).await.map_err(|unanswered| match unanswered {
            Unanswered::Refused { status, .. } => (unanswered, status),
            Unanswered::Away(_) | Unanswered::SessionLost | Unanswered::Failed(_) => (unanswered, 0),
        })?;
        let opened = self.read_opened(&own.id, &own.response);
        let opened = opened.map_err(|failure| (Unanswered::Failed(failure), own.status))?;
        Ok(Made { opened, id: own.session_id, connection: None })
    }

    async fn shake_hands_legacy(self: &Arc<Self>, params: &[u8]) -> Result<Made, Unanswered> {
        let slow = |_| Unanswered::Away("it did not say in time where messages go".into());
        let bound = ENDPOINT_BOUND.min(self.server().patience);
        let connection = timeout(bound, self.connect()).await.map_err(slow)??;
        self.greet(connection, params).await
    }

    /// The handshake over an event stream that was just opened.
    async fn greet(self: &Arc<Self>, connection: Connection, params: &[u8]) -> Result<Made, Unanswered> {
        let id = self.upstreams.own_id();
        let message = envelope::request_message(&id, "initialize", Some(params)).into();
        let asked = self.ask_over(connection.feed(), &id, message).await;
        let response = asked.map_err(|unanswered| match unanswered {
            // It was restarted in between.
            Unanswered::SessionLost => Unanswered::Away("it does not know where it said that messages go".into()),
            Unanswered::Away(_) | Unanswered::Failed(_) | Unanswered::Refused { .. } => unanswered,
        })?;
        let opened = self.read_opened(&id, &response).map_err(Unanswered::Failed)?;
        connection.feed().speak(&opened.version);
        Ok(Made { opened, id: None, connection: Some(connection) })
    }

    fn read_opened(&self, id: &[u8], response: &bytes::Bytes) -> Result<Opened, Failure> {
        handshake::opened(id, response).map_err(|not| match not {
            NotOpened::Refused(error) => handshake::refusal(self.server(), &error),
            NotOpened::Malformed(problem) => self.protocol(problem),
        })
    }

    async fn say_initialized_in_time(self: &Arc<Self>, session: &Arc<Session>) -> Result<(), Step> {
        let said = timeout(self.server().handshake_bound, self.say_initialized(session)).await;
        said.unwrap_or_else(|_| Err(Step::NotExecuted("it did not take `initialized` in time".into())))
    }

    /// Sends `initialized`, once per session. Sent again if it may not have arrived: it changes nothing twice.
    async fn say_initialized(self: &Arc<Self>, session: &Arc<Session>) -> Result<(), Step> {
        let mut tries = Tries::default();
        while !is_initialized(session) {
            match self.deliver(session, wire::initialized()).await {
                Ok(()) => session.initialized.store(true, Ordering::Release),
                Err(Step::NotExecuted(cause) | Step::Unavailable(cause) | Step::Ambiguous(cause)) => {
                    if !tries.wait(self.server().patience).await {
                        return Err(Step::NotExecuted(cause));
                    }
                }
                Err(step) => return Err(step),
            }
        }
        Ok(())
    }

    /// Brings a new session to where the old one was: log level and subscriptions. A refusal is the server's choice.
    async fn replay(self: &Arc<Self>, session: &Arc<Session>) {
        let requests = {
            let state = lock(&self.state);
            handshake::replay(state.kept.handshake.log_level.as_deref(), &state.kept.handshake.subscriptions)
        };
        let replayed = timeout(REPLAY_BOUND, async {
            for (method, params) in requests {
                if self.ask(Some(session), method, Some(&params)).await.is_err() {
                    tracing::debug!(server = %self.server().name, method, "replaying a setting failed");
                }
            }
        });
        if replayed.await.is_err() {
            tracing::warn!(server = %self.server().name, "settings could not be replayed in time");
        }
    }

    /// Whether the server still lists what the client was told. Asks only if the client ever asked.
    async fn compare_lists(self: &Arc<Self>, session: &Arc<Session>) -> ListsChanged {
        if !lock(&self.state).kept.catalogue.is_known() {
            return ListsChanged::Unknown;
        }
        let asked = timeout(LISTS_BOUND, self.ask(Some(session), "tools/list", None)).await;
        let Ok(Ok(own)) = asked else { return ListsChanged::Unknown };
        let result = envelope::scan(&own.response).ok().and_then(|envelope| envelope.result);
        let Some(page) = result.map(|span| self.upstreams.pages.page(&own.response[span])) else {
            return ListsChanged::Unknown;
        };
        let catalogue = &mut lock(&self.state).kept.catalogue;
        let lists = catalogue.compare(&page);
        catalogue.observe(page, true);
        lists
    }

    /// Puts the session in its place. False if the link has ended meanwhile, or its worker has given way to another.
    fn install(&self, session: &Arc<Session>, opened: &Opened, reason: Option<&str>) -> bool {
        let mut state = lock(&self.state);
        // Looked at under the lock: whoever reads the record after the worker has left reads the last one.
        if state.kept.ended || self.upstreams.has_left() {
            return false;
        }
        state.kept.open(&self.upstreams, opened);
        if let Some(reason) = reason {
            state.kept.remake(reason);
        }
        if let Some(replaced) = state.session.replace(Arc::clone(session)) {
            replaced.close();
        }
        true
    }

    async fn announce(&self, opened: Opened, reason: Option<String>, lists: ListsChanged) {
        self.renewed.notify_waiters();
        self.tell_record().await;
        let Some(reason) = reason else {
            self.notices.tell(Notice::Opened(opened)).await;
            return;
        };
        Upstreams::count(&self.upstreams.counters.remade);
        let key = lock(&self.state).kept.handshake.key;
        tracing::info!(server = %self.server().name, session = ?key, reason, "upstream session made again");
        self.notices.tell_remade(reason.into(), lists).await;
    }

    async fn tell_record(&self) {
        if let Some(record) = self.record() {
            self.notices.tell(Notice::Record(Box::new(record))).await;
        }
    }

    /// Gives up a session that will not be used.
    async fn discard(&self, session: &Session) {
        if let Some(owed) = self.delete(session).await
            && !self.notices.tell(Notice::Owed(owed)).await
        {
            tracing::warn!(server = %self.server().name, "owed delete of an unused session could not be handed over");
        }
    }

    fn failure_of(&self, step: Step) -> Failure {
        match step {
            Step::NotExecuted(cause) | Step::Unavailable(cause) | Step::Ambiguous(cause) => self.unreachable(cause),
            Step::SessionLost { .. } => self.lost_again(),
            Step::Unauthorized => self.unauthorized(),
            Step::Failed(failure) => failure,
            Step::Done(_) => self.protocol("it answered a notification"),
        }
    }
}

fn ready(state: &State) -> Option<Arc<Session>> {
    let session = state.session.as_ref()?;
    let told = is_initialized(session) || !state.kept.handshake.confirmed;
    (told && !session.is_cut()).then(|| Arc::clone(session))
}

/// How long the settings of a session may take to be made again.
const REPLAY_BOUND: Duration = Duration::from_secs(5);

/// How long a re-made server may take to list its tools before nobody waits for the comparison.
const LISTS_BOUND: Duration = Duration::from_secs(1);

/// How long an event stream may take to say where messages go.
const ENDPOINT_BOUND: Duration = Duration::from_secs(10);

/// The same where it is not known whether there is one: others open a stream and say nothing.
const DETECT_BOUND: Duration = Duration::from_secs(3);
