//! Clients that call on whatever happens, and remember what became of every call.

use crate::load::Shape;
use crate::wire::{Call, Failure, Place, Wire};
use anyhow::{Context as _, Result, anyhow};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What became of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It was answered.
    Answered,
    /// Nobody took the connection.
    Refused,
    /// The connection was cut, or the answer was an error.
    Failed,
}

/// One call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Told {
    pub(crate) sent: Instant,
    pub(crate) ended: Instant,
    pub(crate) fate: Fate,
}

/// Clients at work.
#[derive(Debug)]
pub(crate) struct Storm {
    over: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
    clients: Vec<JoinHandle<Vec<Told>>>,
    /// What the first wrong answer was, for people.
    pub(crate) odd: Arc<std::sync::Mutex<Option<String>>>,
}

impl Storm {
    /// Opens a session for each client and lets them call.
    pub(crate) fn begin(place: &Place, clients: usize) -> Result<Storm> {
        let shape = Shape { sessions: clients, clients, text_bytes: TEXT_BYTES, wait_ms: 0 };
        let mut storm =
            Storm { over: Arc::default(), answered: Arc::default(), clients: Vec::new(), odd: Arc::default() };
        for _ in 0..shape.clients {
            // Closed connections are noticed before they are used, as by every client in the field.
            let mut wire = Wire::new(place.address).checked();
            let session = wire.open(place)?;
            let mut call = Call::new(place, &session, shape.text_bytes, shape.wait_ms)?;
            let (over, answered, odd) = (Arc::clone(&storm.over), Arc::clone(&storm.answered), Arc::clone(&storm.odd));
            storm.clients.push(std::thread::spawn(move || {
                let mut told = Vec::new();
                while !over.load(Ordering::Relaxed) && told.len() < CALLS_MAX {
                    let sent = Instant::now();
                    let outcome = wire.call(call.next());
                    let fate = match &outcome {
                        Ok(_) => Fate::Answered,
                        Err(Failure::Refused(_)) => Fate::Refused,
                        Err(Failure::Cut(_) | Failure::Wrong(_)) => Fate::Failed,
                    };
                    match outcome {
                        Ok(_) => drop(answered.fetch_add(1, Ordering::Relaxed)),
                        Err(failure) => {
                            if let Ok(mut odd) = odd.lock() {
                                odd.get_or_insert(failure.to_string());
                            }
                        }
                    }
                    told.push(Told { sent, ended: Instant::now(), fate });
                    if fate == Fate::Refused {
                        std::thread::sleep(AFTER_REFUSAL);
                    }
                }
                told
            }));
        }
        Ok(storm)
    }

    /// How many calls were answered so far.
    pub(crate) fn answered(&self) -> u64 {
        self.answered.load(Ordering::Relaxed)
    }

    /// Lets the clients finish. Returns the calls of each, in their order.
    pub(crate) fn end(mut self) -> Result<Vec<Vec<Told>>> {
        self.over.store(true, Ordering::Relaxed);
        let clients = std::mem::take(&mut self.clients);
        clients.into_iter().map(|client| client.join().map_err(|_| anyhow!("a client has failed"))).collect()
    }
}

impl Drop for Storm {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}

/// Waits until so many more calls were answered.
pub(crate) async fn more_answers(storm: &Storm, calls: u64) -> Result<()> {
    let wanted = storm.answered() + calls;
    let answered =
        mainstay_tests::wait_until("calls to be answered", ANSWERS_BOUND, async || storm.answered() >= wanted);
    answered.await.with_context(|| storm.odd.lock().ok().and_then(|odd| odd.clone()).unwrap_or_default())
}

const TEXT_BYTES: usize = 1024;
/// About a hundred MiB over all clients of a full run.
const CALLS_MAX: usize = 2_000_000;
const AFTER_REFUSAL: Duration = Duration::from_millis(1);
const ANSWERS_BOUND: Duration = Duration::from_secs(60);
