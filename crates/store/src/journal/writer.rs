//! The one who writes: transactions on a connection that mends itself.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use tracing::{error, info, warn};

use super::batch::{self, Outcomes};
use super::counters::add;
use super::database::Database;
use super::entry::{Handed, Lost, Witness};
use super::failure::{Failure, is_damage};
use super::place::{self, FileId};
use super::trim::FILE_BYTES_WANTED;

/// A writing connection. In a file it is owned by one thread; in memory it is locked.
pub(super) struct Writer {
    pub(super) database: Database,
    home: Option<Home>,
    failing: bool,
    /// Bytes kept since the file was last measured.
    unmeasured_bytes: u64,
}

/// Where the file is.
pub(super) struct Home {
    pub(super) path: PathBuf,
    pub(super) file: Option<FileId>,
    /// Rises whenever another file has taken the place.
    pub(super) generation: Arc<AtomicU64>,
}

impl Writer {
    /// `home` is none for a journal in memory.
    pub(super) fn new(database: Database, home: Option<Home>) -> Self {
        Self { database, home, failing: false, unmeasured_bytes: u64::MAX }
    }

    /// Does `inside` in a transaction, all of it or nothing. A damaged file is set aside: what follows is kept in a new one.
    pub(super) fn transact<T>(&mut self, inside: impl FnOnce(&Database) -> rusqlite::Result<T>) -> Result<T, Failure> {
        let outcome = transaction(&self.database, inside);
        self.complain(outcome.as_ref().err());
        if outcome.as_ref().is_err_and(is_damage) {
            self.begin_anew();
        }
        outcome.map_err(Failure::from)
    }

    /// Keeps a batch, each entry as far as its stream allows, and tells the witnesses.
    pub(super) fn keep(&mut self, handed: &[Handed]) {
        let outcomes = self.outcomes(handed);
        self.tell(handed, &outcomes);
        self.measure(handed);
    }

    /// What becomes of each entry of a batch. Meters count it.
    pub(super) fn outcomes(&mut self, handed: &[Handed]) -> Outcomes {
        #[expect(clippy::disallowed_methods, reason = "how long a commit took is no decision: it is only counted")]
        let started = Instant::now();
        let entries = || handed.iter().map(|handed| &handed.entry);
        let mut kept = self.transact(|database| batch::keep(database, entries()));
        if matches!(kept, Err(Failure::Full(_))) && self.transact(Database::make_room).is_ok_and(|made| made) {
            kept = self.transact(|database| batch::keep(database, entries()));
        }
        let meters = &self.database.meters;
        meters.took(started.elapsed());
        let outcomes = kept.unwrap_or_else(|failure| vec![Err(failure.lost()); handed.len()]);
        let kept: Vec<_> = handed.iter().zip(&outcomes).filter(|(_, outcome)| outcome.is_ok()).collect();
        add(&meters.commits, u64::from(!kept.is_empty()));
        add(&meters.entries_kept, kept.len() as u64);
        add(
            &meters.events_kept,
            kept.iter().filter(|(handed, _)| handed.entry.content.event().is_some()).count() as u64,
        );
        kept.iter().for_each(|(handed, _)| meters.appended(handed.elapsed()));
        let bytes = kept.iter().map(|(handed, _)| handed.entry.content.message_bytes());
        add(&meters.message_bytes_kept, bytes.sum::<usize>() as u64);
        outcomes.iter().filter_map(|outcome| outcome.err()).for_each(|lost| meters.lost(lost));
        outcomes
    }

    /// Of each stream its witness hears once how far it is durable, after the losses.
    fn tell(&self, handed: &[Handed], outcomes: &[Result<(), Lost>]) {
        let mut durable: Vec<(&Arc<dyn Witness>, u64)> = Vec::new();
        for (handed, outcome) in handed.iter().zip(outcomes) {
            let (Some(witness), Some(event)) = (&handed.witness, handed.entry.content.event()) else { continue };
            match outcome {
                Err(lost) => witness.lost(event.sequence, *lost),
                Ok(()) => {
                    let same = |(other, _): &&mut (&Arc<dyn Witness>, u64)| {
                        std::ptr::addr_eq(Arc::as_ptr(other), Arc::as_ptr(witness))
                    };
                    match durable.iter_mut().rev().find(same) {
                        Some((_, through)) => *through = event.sequence,
                        None => durable.push((witness, event.sequence)),
                    }
                }
            }
        }
        durable.into_iter().for_each(|(witness, through)| witness.durable(through));
    }

    /// Looks from time to time how large the file is, and makes room before it reaches its bound.
    fn measure(&mut self, handed: &[Handed]) {
        let bytes: usize = handed.iter().map(|handed| handed.entry.content.weight_bytes()).sum();
        self.unmeasured_bytes = self.unmeasured_bytes.saturating_add(bytes as u64);
        if self.unmeasured_bytes < MEASURED_EVERY_BYTES {
            return;
        }
        // What can't be measured now is measured after the next batch.
        let Ok(used) = self.database.file_bytes() else { return };
        self.database.meters.file_bytes.store(used, Ordering::Relaxed);
        if used > FILE_BYTES_WANTED {
            // A failure is in the log; the next batch tries again.
            let _ = self.transact(Database::make_room);
        } else {
            self.unmeasured_bytes = 0;
        }
    }

    /// A reader met damage in the file of that generation.
    pub(super) fn suspect(&mut self, generation: u64) {
        let current = self.home.as_ref().map(|home| home.generation.load(Ordering::Acquire));
        if current == Some(generation) {
            self.begin_anew();
        }
    }

    fn begin_anew(&mut self) {
        let Some(home) = &mut self.home else { return };
        match place::open_in_place_of(home.file, &home.path) {
            Ok(opened) => {
                self.database.connection = opened.connection;
                home.file = opened.file;
                home.generation.fetch_add(1, Ordering::AcqRel);
                add(&self.database.meters.set_aside, u64::from(opened.set_aside));
                self.unmeasured_bytes = u64::MAX;
            }
            Err(error) => {
                error!(error = &error as &dyn std::error::Error, "no new journal in place of the damaged one");
            }
        }
    }

    /// Says so when writing begins to fail, and when it works again; not each time.
    fn complain(&mut self, error: Option<&rusqlite::Error>) {
        match error {
            Some(error) if !self.failing => {
                warn!(error = error as &dyn std::error::Error, "the journal can't be written: streams are not kept");
            }
            None if self.failing => info!("the journal is written again"),
            Some(_) | None => {}
        }
        self.failing = error.is_some();
    }
}

fn transaction<T>(database: &Database, inside: impl FnOnce(&Database) -> rusqlite::Result<T>) -> rusqlite::Result<T> {
    // A transaction that could not be rolled back would stand in the way of every later one.
    roll_back(database)?;
    database.execute(BEGIN, [])?;
    let outcome = inside(database).and_then(|value| database.execute("COMMIT", []).map(|_| value));
    if outcome.is_err() {
        // What it failed of is what counts; the next one tries again to roll back.
        let _ = roll_back(database);
    }
    outcome
}

fn roll_back(database: &Database) -> rusqlite::Result<()> {
    if database.connection.is_autocommit() { Ok(()) } else { database.execute("ROLLBACK", []).map(|_| ()) }
}

/// The write lock at once, so that what is read inside is what is written upon.
const BEGIN: &str = "BEGIN IMMEDIATE";
/// How much is kept between two looks at the size of the file: 1 MiB.
const MEASURED_EVERY_BYTES: u64 = 1 << 20;
