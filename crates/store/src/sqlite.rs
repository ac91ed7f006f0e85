//! The ledger in a SQLite file: write-ahead log, one writing thread, one reading thread.
//!
//! No async task touches a connection. Writes and reads are handed over through bounded queues and answered through
//! one-shot channels; the threads end when the last handle is dropped.

mod apply;
mod connect;
mod database;
mod reader;
mod writer;

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use mainstay_core::audit::AuditEntry;
use mainstay_core::id::{Epoch, ServerName, SessionKey, SessionRef};
use mainstay_core::principal::Principal;
use mainstay_core::resume::{OwedDelete, ResumeRecord, ServerCard};
use mainstay_core::session::State;
use mainstay_core::time::Timestamp;
use tokio::sync::{mpsc, oneshot};
use tracing::warn;

pub(crate) use self::connect::rehearse;
use self::database::Database;
use self::reader::{Read, Reader};
use self::writer::{Batched, Job, Writer, unavailable};
use crate::counters::{Counters, Meters, count};
use crate::error::{Cause, CommitError, OpenError, RotateError, StoreError};
use crate::keys::Keyring;
use crate::stored::{AuditPage, Label, Listed, Page, Stored};
use crate::write::Write;

/// One writer on a ledger in a file. Clones are the same writer.
#[derive(Clone)]
pub struct SqliteStore {
    shared: Arc<Shared>,
}

struct Shared {
    path: PathBuf,
    /// The keyring in force. Held for moments only.
    ring: Mutex<Arc<Keyring>>,
    meters: Arc<Meters>,
    jobs: mpsc::Sender<Job>,
    reads: mpsc::Sender<Read>,
}

impl SqliteStore {
    pub(crate) fn open(path: PathBuf, ring: Arc<Keyring>) -> Result<Self, OpenError> {
        let meters = Arc::new(Meters::default());
        let database = |connection| Database { connection, ring: Arc::clone(&ring), meters: Arc::clone(&meters) };
        let writer = Writer::new(database(connect::writer(&path, &ring)?));
        let reader = Reader::new(database(connect::reader(&path)?));
        let (jobs, queued_jobs) = mpsc::channel(JOBS_QUEUED_MAX);
        let (reads, queued_reads) = mpsc::channel(READS_QUEUED_MAX);
        let started = start("ledger-writer", move || writer.run(queued_jobs))
            .and_then(|()| start("ledger-reader", move || reader.run(queued_reads)));
        started.map_err(|source| OpenError::Io { attempt: "start a thread for", path: path.clone(), source })?;
        Ok(Self { shared: Arc::new(Shared { path, ring: Mutex::new(ring), meters, jobs, reads }) })
    }

    pub(crate) fn reopen(&self) -> Result<Self, OpenError> {
        Self::open(self.shared.path.clone(), self.ring())
    }

    pub(crate) async fn begin_epoch(&self, now: Timestamp, nonce: u64) -> Result<Epoch, StoreError> {
        self.ask(|reply| Job::Epoch { now, nonce, reply }).await?
    }

    pub(crate) async fn commit(&self, writes: Vec<Write>) -> Result<(), CommitError> {
        let job = |reply| Job::Write(Batched { writes, reply: Some(reply) });
        self.ask(job).await.unwrap_or_else(|_| Err(CommitError::Unavailable(Cause::Stopped)))
    }

    pub(crate) fn hint(&self, write: Write) {
        let word = write.as_str();
        let job = Job::Write(Batched { writes: vec![write], reply: None });
        if self.shared.jobs.try_send(job).is_err() {
            count(&self.shared.meters.hints_dropped);
            warn!(write = word, "hint dropped: the ledger's queue is full, or its thread is gone");
        }
    }

    pub(crate) async fn flush(&self) -> Result<(), StoreError> {
        self.ask(|reply| Job::Flush { reply }).await
    }

    pub(crate) async fn find(&self, key: SessionKey) -> Result<Stored, StoreError> {
        self.read(move |reader| reader.find(key)).await
    }

    pub(crate) async fn ended_of(&self, keys: Vec<SessionKey>) -> Result<Vec<SessionKey>, StoreError> {
        self.read(move |reader| reader.ended_of(&keys)).await
    }

    pub(crate) async fn find_ref(&self, session_ref: SessionRef) -> Result<Vec<(SessionKey, Stored)>, StoreError> {
        self.read(move |reader| reader.find_ref(session_ref)).await
    }

    pub(crate) async fn resume_record(&self, key: SessionKey) -> Result<Option<ResumeRecord>, StoreError> {
        self.read(move |reader| reader.resume_record(key)).await
    }

    pub(crate) async fn overdue(&self, now: Timestamp, limit: usize) -> Result<Vec<SessionKey>, StoreError> {
        self.read(move |reader| reader.overdue(now, limit)).await
    }

    pub(crate) async fn next_deadline(&self) -> Result<Option<Timestamp>, StoreError> {
        self.read(Reader::next_deadline).await
    }

    pub(crate) async fn unfinished(&self) -> Result<Vec<SessionKey>, StoreError> {
        self.read(Reader::unfinished).await
    }

    pub(crate) async fn list(&self, page: &Page) -> Result<Vec<Listed>, StoreError> {
        let (rows, mut listed) = (page.rows(), Vec::new());
        let mut next = Some(page.clone());
        while let Some(page) = next.filter(|page| page.limit > 0) {
            let asked = page.clone();
            let chunk = self.read(move |reader| reader.list(&asked)).await?;
            listed.extend(chunk.rows);
            next = chunk.reached.map(|key| Page { after: Some(key), limit: rows - listed.len(), ..page });
        }
        Ok(listed)
    }

    pub(crate) async fn labels(&self, label: Label, limit: usize) -> Result<Vec<Box<str>>, StoreError> {
        let (mut found, mut next) = (BTreeSet::new(), Some(None));
        while let Some(after) = next
            && found.len() < limit
        {
            let (labels, reached) = self.read(move |reader| reader.labels(label, after)).await?;
            found.extend(labels);
            next = reached.map(Some);
        }
        Ok(found.into_iter().take(limit).collect())
    }

    pub(crate) async fn owed_one(&self, id: u64) -> Result<Option<OwedDelete>, StoreError> {
        self.read(move |reader| reader.owed_one(id)).await
    }

    pub(crate) async fn owed_of(&self, key: SessionKey, limit: usize) -> Result<Vec<OwedDelete>, StoreError> {
        self.read(move |reader| reader.owed_of(key, limit)).await
    }

    pub(crate) async fn count_by_principal(&self) -> Result<Vec<(Principal, u64)>, StoreError> {
        self.read(Reader::count_by_principal).await
    }

    pub(crate) async fn count_by_server(&self) -> Result<Vec<(ServerName, u64)>, StoreError> {
        self.read(Reader::count_by_server).await
    }

    pub(crate) async fn count_by_state(&self) -> Result<Vec<(State, u64)>, StoreError> {
        self.read(Reader::count_by_state).await
    }

    pub(crate) async fn audit(&self, page: &AuditPage) -> Result<Vec<(u64, AuditEntry)>, StoreError> {
        let page = *page;
        self.read(move |reader| reader.audit(&page)).await
    }

    pub(crate) async fn keys_in_use(&self) -> Result<BTreeSet<u32>, StoreError> {
        self.read(Reader::keys_in_use).await
    }

    /// The reader knows the new key before the writer signs with it, so that no row is met that can't be read.
    pub(crate) async fn rotate(&self, ring: Arc<Keyring>) -> Result<(), RotateError> {
        if let Some(key_id) = ring.lost_of(&self.ring()) {
            return Err(RotateError::KeyLost { key_id });
        }
        let stopped = |_| RotateError::Refused(CommitError::Unavailable(Cause::Stopped));
        let known = Arc::clone(&ring);
        self.read(move |reader| reader.accept(known)).await.map_err(stopped)?;
        let signing = Arc::clone(&ring);
        let told = self.ask(|reply| Job::Rotate { ring: signing, reply }).await.map_err(stopped)?;
        told.map_err(RotateError::Refused)?;
        *self.shared.ring.lock().unwrap_or_else(PoisonError::into_inner) = ring;
        Ok(())
    }

    fn ring(&self) -> Arc<Keyring> {
        Arc::clone(&self.shared.ring.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) async fn count(&self) -> Result<u64, StoreError> {
        self.read(Reader::count).await
    }

    pub(crate) async fn owed(&self, now: Timestamp, limit: usize) -> Result<Vec<OwedDelete>, StoreError> {
        self.read(move |reader| reader.owed(now, limit)).await
    }

    pub(crate) async fn server_memory(&self) -> Result<Option<Box<[u8]>>, StoreError> {
        self.read(Reader::server_memory).await
    }

    pub(crate) async fn configured(&self) -> Result<Option<Vec<ServerName>>, StoreError> {
        self.read(|reader| reader.configured()).await
    }

    pub(crate) async fn card(&self, server: &ServerName, fingerprint: [u8; 32]) -> Option<ServerCard> {
        let name = server.clone();
        let found = self.read(move |reader| reader.card(&name, fingerprint)).await;
        let logged = found.inspect_err(|error| {
            warn!(%server, error = error as &dyn std::error::Error, "server card not read");
        });
        logged.ok().flatten()
    }

    pub(crate) fn counters(&self) -> Counters {
        let jobs = &self.shared.jobs;
        self.shared.meters.snapshot((jobs.max_capacity() - jobs.capacity()) as u64)
    }

    /// Does something to the writing connection that only a fault would do.
    #[cfg(test)]
    pub(crate) async fn tamper(&self, act: impl FnOnce(&rusqlite::Connection) + Send + 'static) {
        self.ask(|reply| Job::Tamper { act: Box::new(act), reply }).await.unwrap();
    }

    async fn ask<T>(&self, job: impl FnOnce(oneshot::Sender<T>) -> Job) -> Result<T, StoreError> {
        let (reply, answer) = oneshot::channel();
        let sent = self.shared.jobs.send(job(reply)).await.is_ok();
        let answer = if sent { answer.await.ok() } else { None };
        answer.ok_or(StoreError::Unavailable(Cause::Stopped))
    }

    async fn read<T, F>(&self, read: F) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: FnOnce(&mut Reader) -> rusqlite::Result<T> + Send + 'static,
    {
        let (reply, answer) = oneshot::channel();
        let job: Read = Box::new(move |reader| {
            // Whoever asked may have stopped waiting.
            let _ = reply.send(read(reader));
        });
        let sent = self.shared.reads.send(job).await.is_ok();
        let answer = if sent { answer.await.ok() } else { None };
        answer.ok_or(StoreError::Unavailable(Cause::Stopped))?.map_err(unavailable)
    }
}

impl fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteStore").field("path", &self.shared.path).finish_non_exhaustive()
    }
}

fn start(name: &str, body: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    std::thread::Builder::new().name(name.into()).spawn(body).map(|_| ())
}

/// How many jobs wait for the writer. A commit that finds more waits; a hint is dropped.
pub(crate) const JOBS_QUEUED_MAX: usize = 8192;
const READS_QUEUED_MAX: usize = 8192;

/// The statements whose plans a test looks at.
#[cfg(test)]
pub(crate) mod statements {
    pub(crate) use super::apply::PURGE_AUDIT;
    pub(crate) use super::reader::{
        AUDIT, BY_DEADLINE, BY_PRINCIPAL, BY_STATE, DRAINING, OWED, OWED_OF, candidates_sql,
    };
}
