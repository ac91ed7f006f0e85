//! One event stream of a client of 2024-11-05, from the endpoint that it is told to its end.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::call::EventId;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::lobby::{RECONNECT_GRACE, Seat, Word};
use crate::engine::find::Evidence;
use crate::engine::live::Live;
use crate::engine::stream::{KEEP_ALIVE, Reader, STILL_HERE, announce};
use crate::engine::{Caller, Engine, Reading, Refused};
use crate::serve::Front;

/// An open stream.
pub(super) struct Connection {
    front: Arc<Front>,
    caller: Caller,
    server: String,
    seat: Seat,
    heard: mpsc::Receiver<Word>,
    stage: Stage,
}

enum Stage {
    /// The endpoint is to be told.
    New(Box<str>),
    /// There is no session yet.
    Waiting {
        since: Instant,
        asked: bool,
    },
    /// Events come.
    Reading(Box<Attached>),
    Over,
}

/// A session's stream that is being read.
struct Attached {
    reader: Reader,
    /// Counts as use of the session.
    _reading: Reading,
    /// Keeps the server's own listening stream open.
    _listening: Box<dyn Send>,
    until: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl Connection {
    /// A stream without a session, which tells `endpoint` first.
    pub(super) fn fresh(
        front: &Arc<Front>,
        (caller, server): (Caller, String),
        (seat, heard): (Seat, mpsc::Receiver<Word>),
        endpoint: Box<str>,
    ) -> Self {
        Self { front: Arc::clone(front), caller, server, seat, heard, stage: Stage::New(endpoint) }
    }

    /// This stream, as one of the session `live`, from behind the event `after`.
    ///
    /// # Errors
    /// As [`Engine::attach`].
    pub(super) async fn of_session(self, live: &Arc<Live>, after: Option<EventId>) -> Result<Self, Refused> {
        let Stage::New(endpoint) = self.stage else { return Ok(self) };
        let reading = self.front.engine.reading(live);
        let attached = attach(&self.front.engine, live, reading, after, Some(endpoint)).await?;
        Ok(Self { stage: Stage::Reading(attached), ..self })
    }

    /// The next bytes for the client; `None` at the end. What is lost of a call of this is lost with the connection.
    pub(super) async fn next(&mut self) -> Option<Bytes> {
        loop {
            match &mut self.stage {
                Stage::New(endpoint) => {
                    let mut told = Vec::with_capacity(256);
                    announce(&mut told, None, endpoint);
                    self.stage = Stage::Waiting { since: Instant::now(), asked: false };
                    return Some(told.into());
                }
                Stage::Waiting { .. } => {
                    if let Some(bytes) = self.wait().await {
                        return Some(bytes);
                    }
                }
                Stage::Reading(attached) => {
                    let word = tokio::select! {
                        biased;
                        chunk = attached.reader.next() => return chunk,
                        Some(word) = self.heard.recv() => word,
                        () = attached.until.as_mut() => {
                            attached.reader.confirm_all();
                            return None;
                        }
                    };
                    if let Some(bytes) = self.hear(word).await {
                        return Some(bytes);
                    }
                }
                Stage::Over => return None,
            }
        }
    }

    /// Waits for a session. Bytes for the client, or nothing if the stage is another now.
    async fn wait(&mut self) -> Option<Bytes> {
        let Stage::Waiting { since, asked } = self.stage else { return None };
        let (over, due) = (since + INITIALIZE_WAIT_MAX, since + RECONNECT_GRACE);
        let word = tokio::select! {
            word = self.heard.recv() => word,
            () = self.front.engine.stopped() => None,
            () = tokio::time::sleep_until(over) => None,
            () = tokio::time::sleep_until(due), if !asked => {
                self.stage = Stage::Waiting { since, asked: true };
                self.look_back().await;
                return None;
            }
            () = tokio::time::sleep(KEEP_ALIVE) => return Some(STILL_HERE),
        };
        match word {
            Some(word) => self.hear(word).await,
            None => {
                self.stage = Stage::Over;
                None
            }
        }
    }

    async fn hear(&mut self, word: Word) -> Option<Bytes> {
        match word {
            Word::Say(message) => {
                let mut event = b"event: message\n".to_vec();
                mainstay_core::wire::sse::encode(&mut event, None, None, &message);
                Some(event.into())
            }
            Word::Session(live, reading) => {
                let attached = attach(&self.front.engine, &live, reading, None, None).await;
                self.stage = attached.map_or(Stage::Over, Stage::Reading);
                None
            }
        }
    }

    /// A client that opened a stream and does not initialize may have lost the stream of a session that it still has, and
    /// wait for an answer on the new one (S18).
    async fn look_back(&mut self) {
        let Ok(served) = self.front.engine.served(&self.server) else { return };
        let back = self.front.engine.taken_back(&self.caller, served, Evidence::default()).await;
        if let Some(live) = back
            && self.seat.is_fresh()
        {
            self.front.lobby.bind(self.seat.key(), &live, self.front.engine.reading(&live));
        }
    }
}

async fn attach(
    engine: &Arc<Engine>,
    live: &Arc<Live>,
    reading: Reading,
    after: Option<EventId>,
    endpoint: Option<Box<str>>,
) -> Result<Box<Attached>, Refused> {
    let reader = engine.attach(live, after).await?.in_http_sse(endpoint);
    Ok(Box::new(Attached {
        reader,
        _reading: reading,
        _listening: Box::new(live.link.listen()),
        until: Box::pin(parted(Arc::clone(engine), Arc::clone(live))),
    }))
}

/// Resolves once the stream is to end although its client is there. What calls in flight are told at the end of their
/// session still goes out, and, when the worker leaves, the answers of HTTP servers, which its successor can't give.
async fn parted(engine: Arc<Engine>, live: Arc<Live>) {
    let last = async {
        live.idle().await;
        live.listen.delivered().await;
    };
    tokio::select! {
        () = engine.stopped() => {}
        () = live.ended.wait() => {
            let _ = tokio::time::timeout(LAST_WORDS_MAX, last).await;
            return;
        }
    }
    if live.server.is_http() {
        tokio::select! {
            () = last => {}
            () = engine.closing() => {}
        }
    }
}

/// How long a stream may be open before its client initializes.
const INITIALIZE_WAIT_MAX: Duration = Duration::from_mins(5);
/// How long the last events of an ended session may take to go out.
const LAST_WORDS_MAX: Duration = Duration::from_secs(2);
