//! The load: clients that call as fast as they are answered, or at a fixed rate whatever the answers.
//!
//! Each client is a thread with a connection of its own; a timer of the kernel is finer than one of an asynchronous runtime.
//! At a fixed rate a call's latency counts from when it was meant to be sent: what had to wait because an earlier call was
//! slow is as slow as its client saw it (no coordinated omission).

use crate::histogram::Histogram;
use crate::wire::{Call, Place, Wire};
use anyhow::{Context as _, Result, anyhow};
use std::time::{Duration, Instant};

/// What the clients do.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    /// How many sessions are open; the clients take them in turn.
    pub(crate) sessions: usize,
    /// How many clients there are.
    pub(crate) clients: usize,
    /// The text in each call, and in each answer.
    pub(crate) text_bytes: usize,
    /// How long the server takes for an answer.
    pub(crate) wait_ms: u64,
}

/// What one run of a load came to.
#[derive(Debug, Default)]
pub(crate) struct Measured {
    /// From each call's start, or meant start, to its whole answer.
    pub(crate) latency: Histogram,
    /// Calls that were answered as an event stream.
    pub(crate) streamed: u64,
    /// How long it took.
    pub(crate) took: Duration,
}

impl Measured {
    /// Calls a second.
    pub(crate) fn rate(&self) -> f64 {
        self.latency.total() as f64 / self.took.as_secs_f64().max(f64::EPSILON)
    }

    fn merge(&mut self, other: &Measured) {
        self.latency.merge(&other.latency);
        self.streamed += other.streamed;
        self.took = self.took.max(other.took);
    }
}

#[derive(Debug)]
struct Client {
    wire: Wire,
    calls: Vec<Call>,
    next: usize,
}

/// Clients with their sessions, in front of one target.
#[derive(Debug)]
pub(crate) struct Load {
    clients: Vec<Client>,
}

/// When the calls of a client are sent.
#[derive(Debug, Clone, Copy)]
enum Pace {
    Closed,
    /// The first after so long, and then one every so often.
    Fixed(Duration, Duration),
}

impl Load {
    /// Opens the sessions.
    pub(crate) fn open(place: &Place, shape: Shape) -> Result<Load> {
        let mut clients: Vec<Client> =
            (0..shape.clients).map(|_| Client { wire: Wire::new(place.address), calls: Vec::new(), next: 0 }).collect();
        for number in 0..shape.sessions.max(shape.clients) {
            let client = clients.get_mut(number % shape.clients.max(1)).context("no clients")?;
            let session = client.wire.open(place)?;
            client.calls.push(Call::new(place, &session, shape.text_bytes, shape.wait_ms)?);
        }
        Ok(Load { clients })
    }

    /// Each client calls again as soon as it is answered.
    pub(crate) fn closed(&mut self, lasting: Duration) -> Result<Measured> {
        self.run(lasting, |_| Pace::Closed)
    }

    /// So many calls a second are sent, spread evenly over the clients, and each in its time if its client is free.
    pub(crate) fn fixed(&mut self, lasting: Duration, per_second: f64) -> Result<Measured> {
        let gap = Duration::from_secs_f64(1.0 / per_second.max(1.0));
        let clients = u32::try_from(self.clients.len())?;
        self.run(lasting, |number| Pace::Fixed(gap * number, gap * clients))
    }

    fn run(&mut self, lasting: Duration, pace: impl Fn(u32) -> Pace) -> Result<Measured> {
        let started = Instant::now();
        let mut all = Measured::default();
        std::thread::scope(|scope| {
            let running: Vec<_> = (0..)
                .zip(&mut self.clients)
                .map(|(number, client)| {
                    let pace = pace(number);
                    scope.spawn(move || client.run(started, lasting, pace))
                })
                .collect();
            for client in running {
                all.merge(&client.join().map_err(|_| anyhow!("a client has failed"))??);
            }
            Ok(all)
        })
    }
}

impl Client {
    fn run(&mut self, started: Instant, lasting: Duration, pace: Pace) -> Result<Measured> {
        let mut measured = Measured::default();
        let mut due = match pace {
            Pace::Closed => Duration::ZERO,
            Pace::Fixed(first, _) => first,
        };
        loop {
            let now = started.elapsed();
            let from = match pace {
                Pace::Closed => now,
                Pace::Fixed(_, every) => {
                    let meant = due;
                    due += every;
                    meant
                }
            };
            if from >= lasting || now >= lasting * OVERDUE_MAX {
                measured.took = started.elapsed();
                return Ok(measured);
            }
            std::thread::sleep(from.saturating_sub(now));
            let turn = self.next % self.calls.len().max(1);
            self.next = turn + 1;
            let call = self.calls.get_mut(turn).context("a client without a session")?;
            measured.streamed += u64::from(self.wire.call(call.next())?);
            measured.latency.record(started.elapsed().saturating_sub(from));
        }
    }
}

/// A target that can't keep the pace is given up after so many times the time that was meant.
const OVERDUE_MAX: u32 = 4;
