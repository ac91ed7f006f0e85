//! The thread that owns the writing connection: group commit, fence, one savepoint a job.
//!
//! Whatever waits in the queue when a transaction begins shares it, and its one fsync. A job that conflicts is rolled
//! back alone; the others don't notice.

use std::sync::Arc;
use std::time::Instant;

use mainstay_core::id::Epoch;
use mainstay_core::time::Timestamp;
use rusqlite::ErrorCode;
use tokio::sync::{mpsc, oneshot};
use tracing::warn;

use super::apply::Refused;
use super::connect;
use super::database::Database;
use crate::counters::count;
use crate::error::{Cause, CommitError, StoreError};
use crate::keys::Keyring;
use crate::rows::{fence, next_epoch};
use crate::write::{Class, Write, strongest};

/// What the writer is asked for.
pub(super) enum Job {
    /// A commit or a hint.
    Write(Batched),
    /// The next epoch.
    Epoch { now: Timestamp, nonce: u64, reply: oneshot::Sender<Result<Epoch, StoreError>> },
    /// Sign with the newest key of this keyring from now on.
    Rotate { ring: Arc<Keyring>, reply: oneshot::Sender<Outcome> },
    /// An answer once everything before is done.
    Flush { reply: oneshot::Sender<()> },
    /// Something that a test does to the connection.
    #[cfg(test)]
    Tamper { act: Box<dyn FnOnce(&rusqlite::Connection) + Send>, reply: oneshot::Sender<()> },
}

/// The writes of one caller. All or none of them are made.
pub(super) struct Batched {
    pub(super) writes: Vec<Write>,
    /// Who waits; nobody waits for a hint.
    pub(super) reply: Option<oneshot::Sender<Outcome>>,
}

type Outcome = Result<(), CommitError>;

/// The writing thread's state.
pub(super) struct Writer {
    database: Database,
    own: Option<Epoch>,
    /// What `PRAGMA synchronous` is set to.
    synchronous: Synchronous,
    /// The ledger's clock as this writer last wrote it.
    clock: Timestamp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Synchronous {
    /// Process-durable.
    Normal,
    /// Power-durable.
    Full,
}

impl Writer {
    /// `database` is set to full synchrony.
    pub(super) fn new(database: Database) -> Self {
        Self { database, own: None, synchronous: Synchronous::Full, clock: Timestamp::default() }
    }

    /// Writes until every handle is gone and the queue is empty.
    pub(super) fn run(mut self, mut jobs: mpsc::Receiver<Job>) {
        while let Some(first) = jobs.blocking_recv() {
            let mut batch = Vec::new();
            let mut next = Some(first);
            while let Some(job) = next {
                if let Job::Write(batched) = job {
                    batch.push(batched);
                    if batch.len() == JOBS_PER_BATCH_MAX {
                        break;
                    }
                } else {
                    self.commit(std::mem::take(&mut batch));
                    self.control(job);
                }
                next = jobs.try_recv().ok();
            }
            self.commit(batch);
        }
    }

    fn control(&mut self, job: Job) {
        // Whoever asked may have stopped waiting: nothing follows from that.
        match job {
            Job::Write(batched) => self.commit(vec![batched]),
            Job::Epoch { now, nonce, reply } => {
                let _ = reply.send(self.begin_epoch(now, nonce));
            }
            Job::Rotate { ring, reply } => {
                let _ = reply.send(self.rotate(ring));
            }
            Job::Flush { reply } => {
                let _ = reply.send(());
            }
            #[cfg(test)]
            Job::Tamper { act, reply } => {
                act(&self.database.connection);
                let _ = reply.send(());
            }
        }
    }

    fn begin_epoch(&mut self, now: Timestamp, nonce: u64) -> Result<Epoch, StoreError> {
        self.begin(Synchronous::Full).map_err(unavailable)?;
        let epoch = match self.next_epoch(now, nonce) {
            Ok(epoch) => epoch,
            Err(error) => {
                self.roll_back();
                return Err(error);
            }
        };
        self.conclude(Ok(())).map_err(unavailable)?;
        self.own = Some(epoch);
        Ok(epoch)
    }

    fn next_epoch(&mut self, now: Timestamp, nonce: u64) -> Result<Epoch, StoreError> {
        let database = &self.database;
        // The writer before this one may have rotated the keys since the ledger was opened; once this epoch has begun it
        // can't any more.
        if !connect::belongs(&database.connection, &database.ring).map_err(unavailable)? {
            return Err(StoreError::OtherKeys);
        }
        self.clock = database.clock().map_err(unavailable)?;
        let former = database.epoch().map_err(unavailable)?;
        let epoch = next_epoch(former, nonce, now, self.clock);
        database.set_epoch(epoch).map_err(unavailable)?;
        self.advance_clock(now).map_err(unavailable)?;
        Ok(epoch)
    }

    /// The ledger's proof of its keys is of the new one before anything else is. Otherwise a start with the older keys
    /// alone would pass, and take what was signed meanwhile for tampered.
    fn rotate(&mut self, ring: Arc<Keyring>) -> Outcome {
        self.begin(Synchronous::Full).map_err(refused)?;
        let fenced = self.database.epoch().map_err(refused).and_then(|epoch| fence(self.own, epoch));
        let told = fenced.and_then(|()| self.database.prove(&ring).map_err(refused));
        if let Err(error) = told {
            self.roll_back();
            return Err(error);
        }
        self.conclude(Ok(())).map_err(refused)?;
        self.database.ring = ring;
        Ok(())
    }

    fn commit(&mut self, batch: Vec<Batched>) {
        if batch.is_empty() {
            return;
        }
        #[expect(clippy::disallowed_methods, reason = "how long a commit took is no decision: it is only counted")]
        let started = Instant::now();
        let transacted = self.transact(&batch);
        self.database.meters.took(started.elapsed());
        match transacted {
            Ok(outcomes) => {
                let pairs = batch.into_iter().zip(outcomes);
                pairs.for_each(|(batched, outcome)| self.answer(batched, outcome));
            }
            Err(error) => batch.into_iter().for_each(|batched| self.answer(batched, Err(error.clone()))),
        }
    }

    fn answer(&self, batched: Batched, outcome: Outcome) {
        if let Some(reply) = batched.reply {
            // A caller that stopped waiting finds out when it looks.
            let _ = reply.send(outcome);
        } else if let Err(error) = outcome {
            count(&self.database.meters.hint_failures);
            let write = batched.writes.first().map_or("nothing", Write::as_str);
            warn!(write, error = &error as &dyn std::error::Error, "hint not written");
        }
    }

    /// One transaction over the whole batch. An error means that nothing of it was written.
    fn transact(&mut self, batch: &[Batched]) -> Result<Vec<Outcome>, CommitError> {
        let strongest = batch.iter().map(|batched| strongest(&batched.writes)).max().unwrap_or(Class::Hint);
        let synchronous = match strongest {
            Class::Hint => Synchronous::Normal,
            Class::Obligation | Class::Authority => Synchronous::Full,
        };
        self.begin(synchronous).map_err(refused)?;
        let (outcomes, class) = match self.inside(batch) {
            Ok(done) => done,
            Err(error) => {
                self.roll_back();
                return Err(error);
            }
        };
        self.conclude(Ok(())).map_err(refused)?;
        class.into_iter().for_each(|class| self.database.meters.committed(class));
        Ok(outcomes)
    }

    /// What becomes of each job, and the strongest class among those that were written.
    fn inside(&mut self, batch: &[Batched]) -> Result<(Vec<Outcome>, Option<Class>), CommitError> {
        fence(self.own, self.database.epoch().map_err(refused)?)?;
        let mut outcomes = Vec::with_capacity(batch.len());
        let (mut class, mut clock) = (None, Timestamp::default());
        for batched in batch {
            let outcome = self.job(&batched.writes)?;
            if outcome.is_ok() {
                class = class.max(Some(strongest(&batched.writes)));
                clock = batched.writes.iter().filter_map(Write::clock).fold(clock, Timestamp::max);
            }
            outcomes.push(outcome);
        }
        if clock.since(self.clock) >= CLOCK_STEP {
            self.advance_clock(clock).map_err(refused)?;
        }
        Ok((outcomes, class))
    }

    /// One caller's writes. An outer error is the end of the whole transaction.
    fn job(&self, writes: &[Write]) -> Result<Outcome, CommitError> {
        let database = &self.database;
        // Most jobs are a lone insert or touch, and need no savepoint to be made or undone as a whole.
        let guarded = !matches!(writes, [write] if write.is_one_statement());
        if guarded {
            database.execute("SAVEPOINT job", []).map_err(refused)?;
        }
        let made = writes.iter().try_for_each(|write| database.apply(write));
        let outcome = match made {
            Ok(()) => Ok(()),
            Err(Refused::Conflict { key, found }) => Err(CommitError::Conflict { key, found }),
            Err(Refused::Sqlite(error)) => Err(refused(error)),
        };
        if let Err(error) = &outcome {
            // Some errors (a full disk among them) have rolled back the whole transaction already.
            if database.connection.is_autocommit() {
                return Err(error.clone());
            }
            if guarded {
                database.execute("ROLLBACK TO job", []).map_err(refused)?;
            }
        }
        if guarded {
            database.execute("RELEASE job", []).map_err(refused)?;
        }
        Ok(outcome)
    }

    fn advance_clock(&mut self, now: Timestamp) -> rusqlite::Result<()> {
        if now > self.clock {
            self.database.set_clock(now)?;
            self.clock = now;
        }
        Ok(())
    }

    /// Commits what went well. Afterwards no transaction is open.
    fn conclude<T>(&mut self, inside: rusqlite::Result<T>) -> rusqlite::Result<T> {
        let concluded = inside.and_then(|value| self.database.execute("COMMIT", []).map(|_| value));
        if concluded.is_err() {
            self.roll_back();
        }
        concluded
    }

    fn roll_back(&mut self) {
        // What this writer believes to have written of the clock may be gone.
        self.clock = Timestamp::default();
        if self.database.connection.is_autocommit() {
            return;
        }
        if let Err(error) = self.database.execute("ROLLBACK", []) {
            warn!(error = &error as &dyn std::error::Error, "transaction not rolled back");
        }
    }

    fn begin(&mut self, synchronous: Synchronous) -> rusqlite::Result<()> {
        // A transaction that could not be rolled back would stand in the way of every later one.
        if !self.database.connection.is_autocommit() {
            self.roll_back();
        }
        self.set_synchronous(synchronous)?;
        self.database.execute(BEGIN, []).map(|_| ())
    }

    fn set_synchronous(&mut self, wanted: Synchronous) -> rusqlite::Result<()> {
        if self.synchronous != wanted {
            let sql = match wanted {
                Synchronous::Normal => "PRAGMA synchronous = NORMAL",
                Synchronous::Full => "PRAGMA synchronous = FULL",
            };
            self.database.execute(sql, [])?;
            self.synchronous = wanted;
        }
        Ok(())
    }
}

/// What a caller learns of an error of SQLite's.
fn refused(error: rusqlite::Error) -> CommitError {
    let (full, cause) = causal(error);
    if full { CommitError::Full(cause) } else { CommitError::Unavailable(cause) }
}

/// As [`refused`], for what is no commit.
pub(super) fn unavailable(error: rusqlite::Error) -> StoreError {
    let (full, cause) = causal(error);
    if full { StoreError::Full(cause) } else { StoreError::Unavailable(cause) }
}

/// The cause in `error`, and whether it is a full disk.
fn causal(error: rusqlite::Error) -> (bool, Cause) {
    let full = error.sqlite_error_code() == Some(ErrorCode::DiskFull);
    (full, Cause::Sqlite(Arc::new(error)))
}

/// The write lock at once, so that what is read inside is what is written upon.
const BEGIN: &str = "BEGIN IMMEDIATE";
const JOBS_PER_BATCH_MAX: usize = 512;
/// How far the ledger's clock may lag behind the times that are written.
const CLOCK_STEP: std::time::Duration = std::time::Duration::from_secs(5);
