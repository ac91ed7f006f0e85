//! The tables, and how a commit changes all of them or none.

use std::collections::{BTreeMap, BTreeSet};

use mainstay_core::audit::AuditEntry;
use mainstay_core::id::{Epoch, ServerName, SessionKey};
use mainstay_core::resume::{OwedDelete, ResumeRecord, ServerCard};
use mainstay_core::session::{Change, SessionRecord, State, Tombstone};
use mainstay_core::time::Timestamp;

use crate::error::{CommitError, Found};
use crate::stored::Stored;
use crate::write::{PURGED_ROWS_MAX, Write};

/// Everything that is stored.
#[derive(Debug, Default)]
pub(super) struct Tables {
    pub(super) epoch: Option<Epoch>,
    /// The latest time that a write spoke of.
    pub(super) clock: Timestamp,
    pub(super) sessions: BTreeMap<SessionKey, SessionRecord>,
    /// The sessions by deadline.
    pub(super) deadlines: BTreeSet<(Timestamp, SessionKey)>,
    pub(super) stones: BTreeMap<SessionKey, Tombstone>,
    pub(super) resumes: BTreeMap<SessionKey, ResumeRecord>,
    pub(super) owed: BTreeMap<u64, OwedDelete>,
    pub(super) cards: BTreeMap<ServerName, ServerCard>,
    pub(super) configured: Option<Vec<ServerName>>,
    pub(super) memory: Option<Box<[u8]>>,
    pub(super) audit: BTreeMap<u64, AuditEntry>,
    /// The last number given to an owed delete. Numbers are not used twice.
    owed_last: u64,
    /// The last number given to an audit entry.
    audit_last: u64,
    /// What undoes the commit under way, in the order in which it was done.
    undo: Vec<Former>,
}

/// What was before.
#[derive(Debug)]
enum Former {
    Session(SessionKey, Option<SessionRecord>),
    Stone(SessionKey, Option<Tombstone>),
    Resume(SessionKey, Option<ResumeRecord>),
    Owed(u64, Option<OwedDelete>),
    Card(ServerName, Option<ServerCard>),
    Configured(Option<Vec<ServerName>>),
    Memory(Option<Box<[u8]>>),
    Audit(u64, Option<AuditEntry>),
    /// The last numbers given to owed deletes and audit entries.
    Last(u64, u64),
}

impl Tables {
    /// All of `writes`, or none.
    pub(super) fn transact(&mut self, writes: Vec<Write>) -> Result<(), CommitError> {
        self.undo.clear();
        self.undo.push(Former::Last(self.owed_last, self.audit_last));
        let clock = writes.iter().filter_map(Write::clock).max();
        for write in writes {
            if let Err(error) = self.write(write) {
                while let Some(former) = self.undo.pop() {
                    self.put(former);
                }
                return Err(error);
            }
        }
        self.undo.clear();
        self.clock = self.clock.max(clock.unwrap_or_default());
        Ok(())
    }

    /// The tombstone wins over a row.
    pub(super) fn find(&self, key: SessionKey) -> Stored {
        match (self.stones.get(&key), self.sessions.get(&key)) {
            (Some(stone), _) => Stored::Ended(stone.clone()),
            (None, Some(record)) => Stored::Live(Box::new(record.clone())),
            (None, None) => Stored::Absent,
        }
    }

    /// Every key from `first` on, in order.
    pub(super) fn keys_from(&self, first: SessionKey) -> impl Iterator<Item = SessionKey> + use<> {
        let live = self.sessions.range(first..).map(|(key, _)| *key);
        let ended = self.stones.range(first..).map(|(key, _)| *key);
        live.chain(ended).collect::<BTreeSet<_>>().into_iter()
    }

    fn write(&mut self, write: Write) -> Result<(), CommitError> {
        match write {
            Write::Session(change) => return self.change(change),
            Write::Resume(record) => self.resume(record),
            Write::ForgetResume(key) => self.set(Former::Resume(key, None)),
            Write::Owe(owed) => self.owe(owed),
            Write::Settle(id) | Write::GiveUp(id) => self.set(Former::Owed(id, None)),
            Write::Postpone(owed) if self.owed.contains_key(&owed.id) => self.set(Former::Owed(owed.id, Some(owed))),
            Write::Postpone(_) => {}
            Write::Card(card) => self.set(Former::Card(card.server.clone(), Some(card))),
            Write::Configured(servers) => self.set(Former::Configured(Some(servers))),
            Write::Memory(bytes) => self.set(Former::Memory(Some(bytes))),
            Write::Audit(entry) => {
                self.audit_last += 1;
                self.set(Former::Audit(self.audit_last, Some(entry)));
            }
            Write::Purge { now } => self.purge(now),
        }
        Ok(())
    }

    fn change(&mut self, change: Change) -> Result<(), CommitError> {
        match change {
            Change::Insert(record) => {
                self.expect(record.key, None)?;
                self.set(Former::Session(record.key, Some(record)));
            }
            Change::Update(record) => {
                self.expect(record.key, Some(record.generation.wrapping_sub(1)))?;
                self.set(Former::Session(record.key, Some(record)));
            }
            Change::Touch { key, seen_at, deadline } => {
                let row = self.sessions.get(&key).filter(|row| row.state == State::Ready).cloned();
                if let Some(row) = row {
                    let touched = SessionRecord { seen_at, deadline, confirmed: true, ..row };
                    self.set(Former::Session(key, Some(touched)));
                }
            }
            Change::End(stone) => {
                self.expect(stone.key, Some(stone.generation.wrapping_sub(1)))?;
                self.set(Former::Session(stone.key, None));
                self.set(Former::Stone(stone.key, Some(stone)));
            }
        }
        Ok(())
    }

    /// Checks that the session is live with that generation, or, if it is none, that the id was never used.
    fn expect(&self, key: SessionKey, generation: Option<u64>) -> Result<(), CommitError> {
        let found = match (self.stones.contains_key(&key), self.sessions.get(&key)) {
            (true, _) => Found::Ended,
            (false, row) if row.map(|row| row.generation) == generation => return Ok(()),
            (false, Some(row)) => Found::Generation(row.generation),
            (false, None) => Found::Absent,
        };
        Err(CommitError::Conflict { key, found })
    }

    fn resume(&mut self, record: ResumeRecord) {
        if let Some(stone) = self.stones.get(&record.key) {
            let owed = record.owed_delete(stone.ended_at);
            owed.into_iter().for_each(|owed| self.owe(owed));
        } else {
            self.set(Former::Resume(record.key, Some(record)));
        }
    }

    fn owe(&mut self, owed: OwedDelete) {
        self.owed_last += 1;
        self.set(Former::Owed(self.owed_last, Some(OwedDelete { id: self.owed_last, ..owed })));
    }

    fn purge(&mut self, now: Timestamp) {
        let over = |stone: &&Tombstone| stone.keep_until <= now && !self.sessions.contains_key(&stone.key);
        let stones: Vec<_> = self.stones.values().filter(over).map(|stone| stone.key).take(PURGED_ROWS_MAX).collect();
        stones.into_iter().for_each(|key| self.set(Former::Stone(key, None)));
        let stale = |record: &&ResumeRecord| record.is_stale(now) && !self.sessions.contains_key(&record.key);
        let resumes: Vec<_> = self.resumes.values().filter(stale).take(PURGED_ROWS_MAX).cloned().collect();
        for record in resumes {
            self.set(Former::Resume(record.key, None));
            record.owed_delete(now).into_iter().for_each(|owed| self.owe(owed));
        }
        let left = |owed: &&OwedDelete| owed.is_left_to_expire() && now.since(owed.owed_at) >= OwedDelete::LISTED;
        let owed: Vec<_> = self.owed.values().filter(left).map(|owed| owed.id).take(PURGED_ROWS_MAX).collect();
        owed.into_iter().for_each(|id| self.set(Former::Owed(id, None)));
        self.purge_audit(now);
    }

    fn purge_audit(&mut self, now: Timestamp) {
        let oldest = now.minus(AuditEntry::RETENTION);
        let surplus = self.audit_last.saturating_sub(AuditEntry::ENTRIES_MAX);
        let over = |(number, entry): &(&u64, &AuditEntry)| entry.at <= oldest || **number <= surplus;
        let numbers: Vec<_> = self.audit.iter().take(PURGED_ROWS_MAX).filter(over).map(|(number, _)| *number).collect();
        numbers.into_iter().for_each(|number| self.set(Former::Audit(number, None)));
    }

    /// Puts what `new` says in its place, and remembers what was there.
    fn set(&mut self, new: Former) {
        let former = self.put(new);
        self.undo.push(former);
    }

    fn put(&mut self, new: Former) -> Former {
        match new {
            Former::Session(key, row) => {
                if let Some(row) = &row {
                    self.deadlines.insert((row.deadline, key));
                }
                let deadline = row.as_ref().map(|row| row.deadline);
                let former = replace(&mut self.sessions, key, row);
                if let Some(former) = former.as_ref().filter(|former| Some(former.deadline) != deadline) {
                    self.deadlines.remove(&(former.deadline, key));
                }
                Former::Session(key, former)
            }
            Former::Stone(key, row) => Former::Stone(key, replace(&mut self.stones, key, row)),
            Former::Resume(key, row) => Former::Resume(key, replace(&mut self.resumes, key, row)),
            Former::Owed(id, row) => Former::Owed(id, replace(&mut self.owed, id, row)),
            Former::Card(server, row) => {
                let former = replace(&mut self.cards, server.clone(), row);
                Former::Card(server, former)
            }
            Former::Configured(servers) => Former::Configured(std::mem::replace(&mut self.configured, servers)),
            Former::Memory(bytes) => Former::Memory(std::mem::replace(&mut self.memory, bytes)),
            Former::Audit(number, row) => Former::Audit(number, replace(&mut self.audit, number, row)),
            Former::Last(owed, audit) => {
                let former = Former::Last(self.owed_last, self.audit_last);
                (self.owed_last, self.audit_last) = (owed, audit);
                former
            }
        }
    }
}

fn replace<K: Ord, V>(table: &mut BTreeMap<K, V>, key: K, row: Option<V>) -> Option<V> {
    match row {
        Some(row) => table.insert(key, row),
        None => table.remove(&key),
    }
}
