//! The ledger in memory: the same meaning as on disk, as long as a handle exists.
//!
//! It is what tests and simulations run on. Several writers on one ledger come from [`MemoryStore::reopen`].

mod tables;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mainstay_core::audit::AuditEntry;
use mainstay_core::id::{Epoch, ServerName, SessionKey, SessionRef};
use mainstay_core::principal::Principal;
use mainstay_core::resume::{OwedDelete, ResumeRecord, ServerCard};
use mainstay_core::session::State;
use mainstay_core::time::Timestamp;
use tracing::warn;

use self::tables::Tables;
use crate::codec::STORED_STATES;
use crate::counters::{Counters, Meters, count};
use crate::error::{CommitError, RotateError, StoreError};
use crate::rows::{fence, next_epoch};
use crate::stored::{AuditPage, Label, Listed, Page, REF_MATCHES_MAX, Stored, first_key};
use crate::write::{Write, strongest};

/// One writer on a ledger in memory. Clones are the same writer.
#[derive(Clone, Debug)]
pub struct MemoryStore {
    tables: Arc<Mutex<Tables>>,
    own: Arc<Mutex<Option<Epoch>>>,
    meters: Arc<Meters>,
}

impl MemoryStore {
    pub(crate) fn new() -> Self {
        Self { tables: Arc::default(), own: Arc::default(), meters: Arc::default() }
    }

    pub(crate) fn reopen(&self) -> Self {
        Self { tables: Arc::clone(&self.tables), own: Arc::default(), meters: Arc::default() }
    }

    pub(crate) fn begin_epoch(&self, now: Timestamp, nonce: u64) -> Result<Epoch, StoreError> {
        let mut tables = lock(&self.tables);
        let epoch = next_epoch(tables.epoch, nonce, now, tables.clock);
        tables.epoch = Some(epoch);
        tables.clock = tables.clock.max(now);
        *lock(&self.own) = Some(epoch);
        Ok(epoch)
    }

    pub(crate) fn commit(&self, writes: Vec<Write>) -> Result<(), CommitError> {
        #[cfg(test)]
        crate::mishap::refused()?;
        let own = *lock(&self.own);
        let mut tables = lock(&self.tables);
        fence(own, tables.epoch)?;
        let class = strongest(&writes);
        tables.transact(writes)?;
        self.meters.committed(class);
        Ok(())
    }

    pub(crate) fn hint(&self, write: Write) {
        let word = write.as_str();
        if let Err(error) = self.commit(vec![write]) {
            count(&self.meters.hint_failures);
            warn!(write = word, %error, "hint not written");
        }
    }

    pub(crate) fn find(&self, key: SessionKey) -> Stored {
        self.read().find(key)
    }

    pub(crate) fn ended_of(&self, mut keys: Vec<SessionKey>) -> Vec<SessionKey> {
        let tables = self.read();
        keys.retain(|key| matches!(tables.find(*key), Stored::Ended(_)));
        keys
    }

    pub(crate) fn find_ref(&self, session_ref: SessionRef) -> Vec<(SessionKey, Stored)> {
        let tables = self.read();
        let keys = tables.keys_from(first_key(session_ref)).take_while(|key| key.session_ref() == session_ref);
        keys.take(REF_MATCHES_MAX).map(|key| (key, tables.find(key))).collect()
    }

    pub(crate) fn resume_record(&self, key: SessionKey) -> Option<ResumeRecord> {
        self.read().resumes.get(&key).cloned()
    }

    pub(crate) fn overdue(&self, now: Timestamp, limit: usize) -> Vec<SessionKey> {
        let tables = self.read();
        let due = tables.deadlines.iter().take_while(|(deadline, _)| *deadline <= now);
        due.map(|(_, key)| *key).take(limit).collect()
    }

    pub(crate) fn next_deadline(&self) -> Option<Timestamp> {
        self.read().deadlines.first().map(|(deadline, _)| *deadline)
    }

    pub(crate) fn unfinished(&self) -> Vec<SessionKey> {
        let tables = self.read();
        let draining = tables.sessions.values().filter(|record| record.state == State::Draining);
        draining.map(|record| record.key).collect()
    }

    pub(crate) fn list(&self, page: &Page) -> Vec<Listed> {
        let tables = self.read();
        let first = page.after.unwrap_or(SessionKey::from_bytes([0; 32]));
        let keys = tables.keys_from(first).filter(|key| Some(*key) != page.after);
        let found = keys.map(|key| (key, tables.find(key))).filter(|(_, stored)| page.filter.wants(stored));
        let resume = |key| tables.resumes.get(&key).cloned().map(Into::into);
        found.take(page.rows()).map(|(key, stored)| Listed { key, stored, resume: resume(key) }).collect()
    }

    pub(crate) fn labels(&self, label: Label, limit: usize) -> Vec<Box<str>> {
        let tables = self.read();
        let live = tables.sessions.values().map(|record| (&record.principal, &record.agent));
        let ended = tables.stones.values().map(|stone| (&stone.principal, &stone.agent));
        let labels = live.chain(ended).filter_map(|(principal, agent)| match label {
            Label::Principal => Some(principal.to_string().into()),
            Label::Agent => agent.clone(),
        });
        labels.collect::<BTreeSet<_>>().into_iter().take(limit).collect()
    }

    pub(crate) fn owed_one(&self, id: u64) -> Option<OwedDelete> {
        self.read().owed.get(&id).cloned()
    }

    pub(crate) fn owed_of(&self, key: SessionKey, limit: usize) -> Vec<OwedDelete> {
        self.read().owed.values().filter(|owed| owed.session == Some(key)).take(limit).cloned().collect()
    }

    pub(crate) fn count_by_principal(&self) -> Vec<(Principal, u64)> {
        let mut counts = BTreeMap::new();
        for record in self.read().sessions.values() {
            *counts.entry(record.principal.clone()).or_insert(0) += 1;
        }
        counts.into_iter().collect()
    }

    pub(crate) fn count_by_server(&self) -> Vec<(ServerName, u64)> {
        let mut counts = BTreeMap::new();
        for record in self.read().sessions.values() {
            *counts.entry(record.server.clone()).or_insert(0) += 1;
        }
        counts.into_iter().collect()
    }

    pub(crate) fn count_by_state(&self) -> Vec<(State, u64)> {
        let tables = self.read();
        let live = tables.sessions.values().map(|record| record.state);
        let states: Vec<_> = live.chain(tables.stones.values().map(|stone| stone.state)).collect();
        let count = |wanted| states.iter().filter(|state| **state == wanted).count() as u64;
        STORED_STATES.map(|state| (state, count(state))).into()
    }

    pub(crate) fn audit(&self, page: &AuditPage) -> Vec<(u64, AuditEntry)> {
        let tables = self.read();
        let entries = tables.audit.range(..page.before.unwrap_or(u64::MAX)).rev();
        let wanted = entries.filter(|(_, entry)| {
            page.session.is_none_or(|key| entry.session == Some(key))
                && page.action.is_none_or(|action| entry.action == action)
        });
        wanted.take(page.rows()).map(|(number, entry)| (*number, entry.clone())).collect()
    }

    pub(crate) fn rotate(&self) -> Result<(), RotateError> {
        fence(*lock(&self.own), lock(&self.tables).epoch).map_err(RotateError::Refused)
    }

    pub(crate) fn count(&self) -> u64 {
        self.read().sessions.len() as u64
    }

    pub(crate) fn owed(&self, now: Timestamp, limit: usize) -> Vec<OwedDelete> {
        let tables = self.read();
        let mut due: Vec<_> = tables.owed.values().filter(|owed| owed.next_at <= now).cloned().collect();
        due.sort_by_key(|owed| (owed.next_at, owed.id));
        due.truncate(limit);
        due
    }

    pub(crate) fn configured(&self) -> Option<Vec<ServerName>> {
        self.read().configured.clone()
    }

    pub(crate) fn server_memory(&self) -> Option<Box<[u8]>> {
        self.read().memory.clone()
    }

    pub(crate) fn card(&self, server: &ServerName, fingerprint: [u8; 32]) -> Option<ServerCard> {
        self.read().cards.get(server).filter(|card| card.fingerprint == fingerprint).cloned()
    }

    pub(crate) fn counters(&self) -> Counters {
        self.meters.snapshot(0)
    }

    fn read(&self) -> MutexGuard<'_, Tables> {
        count(&self.meters.reads);
        lock(&self.tables)
    }
}

/// A panic elsewhere leaves the tables whole: they change in one place, which does not panic half-way.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
