//! The threads of a journal in a file: one that writes whatever waits in one transaction, one that reads.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::sync::{mpsc, oneshot};
use tracing::warn;

use super::counters::{Meters, add};
use super::database::{Database, Ring};
use super::entry::{Accepted, Handed, Lost};
use super::failure::{Failure, OpenError, is_damage};
use super::place;
use super::writer::{Home, Writer};

/// What the writer is asked for, in order.
enum Job {
    /// An entry, which nobody waits for.
    Keep(Handed),
    /// Anything else. It answers by itself.
    Act(Box<dyn FnOnce(&mut Writer) + Send>),
}

/// Something to read. It answers by itself.
type Read = Box<dyn FnOnce(&Reader) + Send>;

/// The way to both threads. They end when the last handle is dropped.
pub(super) struct Queue {
    jobs: mpsc::Sender<Job>,
    reads: mpsc::Sender<Read>,
    meters: Arc<Meters>,
    /// Whether entries find the queue full just now, and the log has heard of it.
    crowded: Arc<AtomicBool>,
}

impl Queue {
    /// Opens the file, and starts the threads.
    pub(super) fn open(path: PathBuf, ring: Ring, meters: Arc<Meters>) -> Result<Self, OpenError> {
        let opened = place::open(&path)?;
        add(&meters.set_aside, u64::from(opened.set_aside));
        let database = |connection| Database { connection, ring: ring.clone(), meters: Arc::clone(&meters) };
        let failed = |source| OpenError::Sqlite { attempt: "open", path: path.clone(), source };
        let reader = database(place::reader(&path).map_err(failed)?);
        let generation = Arc::new(AtomicU64::new(0));
        let home = Home { path: path.clone(), file: opened.file, generation: Arc::clone(&generation) };
        let writer = Writer::new(database(opened.connection), Some(home));
        meters.file_bytes.store(writer.database.file_bytes().unwrap_or(0), Ordering::Relaxed);
        let (jobs, queued_jobs) = mpsc::channel(JOBS_QUEUED_MAX);
        let (reads, queued_reads) = mpsc::channel(READS_QUEUED_MAX);
        let crowded = Arc::new(AtomicBool::new(false));
        let eased = Arc::clone(&crowded);
        // The reader must not keep the writer alive.
        let suspects = jobs.downgrade();
        let reader = Reader { database: reader, path: path.clone(), generation, seen: 0, suspects };
        let started = start("journal-writer", move || write(writer, queued_jobs, &eased))
            .and_then(|()| start("journal-reader", move || reader.run(queued_reads)));
        started.map_err(|source| OpenError::Io { attempt: "start a thread for", path, source })?;
        Ok(Self { jobs, reads, meters, crowded })
    }

    /// Hands an entry over, if there is room.
    pub(super) fn keep(&self, handed: Handed) -> Result<Accepted, Lost> {
        let bytes = handed.entry.content.weight_bytes() as u64;
        let before = self.meters.queue_bytes.fetch_add(bytes, Ordering::Relaxed);
        let room = before + bytes <= QUEUED_BYTES_MAX;
        let outcome = if room {
            self.jobs.try_send(Job::Keep(handed)).map_err(|error| match error {
                mpsc::error::TrySendError::Full(_) => Lost::Crowded,
                mpsc::error::TrySendError::Closed(_) => Lost::Unavailable,
            })
        } else {
            Err(Lost::Crowded)
        };
        match outcome {
            Ok(()) => {
                add(&self.meters.queue_entries, 1);
                Ok(Accepted::Queued)
            }
            Err(lost) => {
                self.meters.queue_bytes.fetch_sub(bytes, Ordering::Relaxed);
                self.meters.lost(lost);
                if !self.crowded.swap(true, Ordering::Relaxed) {
                    warn!(why = %lost, "entries of the journal are lost");
                }
                Err(lost)
            }
        }
    }

    /// Has the writer do something, after everything that was handed over before.
    pub(super) async fn act<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Writer) -> T + Send + 'static,
    ) -> Result<T, Failure> {
        let (reply, answer) = oneshot::channel();
        let job = Job::Act(Box::new(move |writer| {
            // Whoever asked may have stopped waiting: it was done all the same.
            let _ = reply.send(act(writer));
        }));
        let sent = self.jobs.send(job).await.is_ok();
        let answer = if sent { answer.await.ok() } else { None };
        answer.ok_or(Failure::Stopped)
    }

    /// Reads what is committed.
    pub(super) async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Database) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, Failure> {
        let (reply, answer) = oneshot::channel();
        let job: Read = Box::new(move |reader| {
            let outcome = read(&reader.database);
            if outcome.as_ref().is_err_and(is_damage) {
                reader.report();
            }
            // Whoever asked may have stopped waiting.
            let _ = reply.send(outcome);
        });
        let sent = self.reads.send(job).await.is_ok();
        let answer = if sent { answer.await.ok() } else { None };
        answer.ok_or(Failure::Stopped)?.map_err(Failure::from)
    }
}

/// Writes until every handle is gone and the queue is empty. Whatever waits when a transaction begins shares it.
fn write(mut writer: Writer, mut jobs: mpsc::Receiver<Job>, crowded: &AtomicBool) {
    while let Some(first) = jobs.blocking_recv() {
        let mut batch = Vec::new();
        let mut bytes = 0;
        let mut next = Some(first);
        while let Some(job) = next {
            match job {
                Job::Keep(handed) => {
                    bytes += handed.entry.content.weight_bytes();
                    batch.push(handed);
                }
                Job::Act(act) => {
                    keep(&mut writer, &mut batch);
                    act(&mut writer);
                }
            }
            if batch.len() >= ENTRIES_PER_BATCH_MAX || bytes >= BYTES_PER_BATCH_MAX {
                break;
            }
            next = jobs.try_recv().ok();
        }
        keep(&mut writer, &mut batch);
        if jobs.is_empty() {
            crowded.store(false, Ordering::Relaxed);
        }
    }
}

/// Keeps a batch, and lets go of its room in the queue.
fn keep(writer: &mut Writer, batch: &mut Vec<Handed>) {
    if batch.is_empty() {
        return;
    }
    let bytes: usize = batch.iter().map(|handed| handed.entry.content.weight_bytes()).sum();
    writer.keep(batch);
    let meters = &writer.database.meters;
    meters.queue_entries.fetch_sub(batch.len() as u64, Ordering::Relaxed);
    meters.queue_bytes.fetch_sub(bytes as u64, Ordering::Relaxed);
    batch.clear();
}

/// The reading thread's state.
struct Reader {
    database: Database,
    path: PathBuf,
    generation: Arc<AtomicU64>,
    /// The generation of the file that is open.
    seen: u64,
    suspects: mpsc::WeakSender<Job>,
}

impl Reader {
    fn run(mut self, mut reads: mpsc::Receiver<Read>) {
        while let Some(read) = reads.blocking_recv() {
            add(&self.database.meters.reads, 1);
            self.follow();
            read(&self);
        }
    }

    /// Opens the file that has taken the place of a damaged one.
    fn follow(&mut self) {
        let current = self.generation.load(Ordering::Acquire);
        if current == self.seen {
            return;
        }
        match place::reader(&self.path) {
            Ok(connection) => {
                self.database.connection = connection;
                self.seen = current;
            }
            Err(error) => {
                warn!(error = &error as &dyn std::error::Error, "the new journal can't be read");
            }
        }
    }

    /// The writer sets aside what is damaged. If it has no time for that now, the next read reports it again.
    fn report(&self) {
        let seen = self.seen;
        let job = Job::Act(Box::new(move |writer| writer.suspect(seen)));
        let Some(jobs) = self.suspects.upgrade() else { return };
        let _ = jobs.try_send(job);
    }
}

fn start(name: &str, body: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    std::thread::Builder::new().name(name.into()).spawn(body).map(|_| ())
}

/// How many entries and acts wait for the writer. An entry that finds more is lost.
pub(super) const JOBS_QUEUED_MAX: usize = 16_384;
/// How much wait for the writer: 64 MiB.
pub(super) const QUEUED_BYTES_MAX: u64 = 64 << 20;
const READS_QUEUED_MAX: usize = 4096;
const ENTRIES_PER_BATCH_MAX: usize = 1024;
/// How much one transaction writes: 4 MiB, and one message more.
const BYTES_PER_BATCH_MAX: usize = 4 << 20;
