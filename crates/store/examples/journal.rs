//! How many events of 1 KiB a journal in a file keeps in a second: one by one, each waited for, and as they come, from many streams at once.
//! For each, how long an event waits until it is durable.
//!
//! `cargo run --release -p mainstay-store --example journal [DIRECTORY]`

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a program that measures, and says what it found")]
#![expect(clippy::disallowed_methods, reason = "a program that measures has no injected clock")]

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use mainstay_core::call::StreamId;
use mainstay_core::id::{Epoch, SessionKey};
use mainstay_core::time::Timestamp;
use mainstay_store::Place;
use mainstay_store::journal::{Content, Entry, Event, Journal, Lost, Weight, Witness};
use mainstay_store::keys::Keyring;
use tokio::sync::Notify;

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    let parent = std::env::args().nth(1).map_or_else(std::env::temp_dir, PathBuf::from);
    let home = tempfile::tempdir_in(parent).unwrap();
    for streams in [1, 10, 100, 1000] {
        let path = home.path().join(format!("{streams}.db"));
        let journal = Journal::open(Place::Sqlite(path), ring()).unwrap();
        runtime.block_on(measure(&journal, streams));
    }
}

/// Every stream appends an event as soon as the one before it is durable.
async fn measure(journal: &Journal, streams: u64) {
    let each = EVENTS / streams;
    let waits = Arc::new(Mutex::new(Vec::new()));
    let started = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for number in 1..=streams {
        let (journal, waits) = (journal.clone(), Arc::clone(&waits));
        tasks.spawn(async move {
            let mut own = Vec::new();
            let heard = Arc::new(Heard::default());
            for sequence in 1..=each {
                let before = Instant::now();
                journal.append(entry(number, sequence), Some(Arc::clone(&heard) as Arc<dyn Witness>)).unwrap();
                heard.wait_for(sequence).await;
                own.push(before.elapsed());
            }
            waits.lock().unwrap().extend(own);
        });
    }
    tasks.join_all().await;
    report(&format!("{streams:>4} streams, each waits"), journal, started.elapsed(), &mut waits.lock().unwrap());
    let before = journal.counters().commits;
    let started = Instant::now();
    for sequence in each + 1..=2 * each {
        for number in 1..=streams {
            journal.append(entry(number, sequence), None).unwrap();
        }
        if (sequence * streams).is_multiple_of(IN_HAND) {
            journal.flush().await.unwrap();
        }
    }
    journal.flush().await.unwrap();
    let took = started.elapsed();
    let batches = journal.counters().commits - before;
    println!("{streams:>4} streams, in batches: {:>8} events/s, {batches} transactions", rate(each * streams, took));
}

fn report(what: &str, journal: &Journal, took: Duration, waits: &mut [Duration]) {
    waits.sort_unstable();
    let at = |percent: usize| waits[(waits.len() - 1) * percent / 100].as_micros();
    let (rate, commits) = (rate(waits.len() as u64, took), journal.counters().commits);
    println!("{what}: {rate:>8} events/s, {commits} transactions, wait p50 {} us, p99 {} us", at(50), at(99));
}

fn rate(events: u64, took: Duration) -> u64 {
    events * 1_000_000 / u64::try_from(took.as_micros()).unwrap().max(1)
}

/// How far a stream is durable.
#[derive(Default)]
struct Heard {
    through: AtomicU64,
    rung: Notify,
}

impl Heard {
    async fn wait_for(&self, sequence: u64) {
        while self.through.load(Ordering::Acquire) < sequence {
            self.rung.notified().await;
        }
    }
}

impl Witness for Heard {
    fn durable(&self, through: u64) {
        self.through.store(through, Ordering::Release);
        self.rung.notify_one();
    }

    fn lost(&self, sequence: u64, why: Lost) {
        println!("event {sequence} is lost: {why}");
        self.durable(sequence);
    }
}

fn entry(number: u64, sequence: u64) -> Entry {
    let mut session = [0; 32];
    session[..8].copy_from_slice(&number.to_be_bytes());
    let at = Timestamp::from_unix_millis(1_700_000_000_000 + sequence);
    let message = Bytes::from_static(&MESSAGE);
    let event = Event { sequence, ending: None, weight: Weight::Passing, message, source: None, at };
    Entry {
        session: SessionKey::from_bytes(session),
        stream: StreamId { epoch: 1, number },
        claim: Epoch { counter: 1, nonce: 1 },
        at,
        content: Content::Event(event),
    }
}

fn ring() -> Arc<Keyring> {
    Arc::new(Keyring::ephemeral(&mut |bytes| bytes.fill(42)))
}

static MESSAGE: [u8; 1024] = [b'x'; 1024];
const EVENTS: u64 = 20_000;
/// How many events are handed over before the program waits for them.
const IN_HAND: u64 = 5000;
