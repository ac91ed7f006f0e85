//! Where tests let a statement fail or the process die. It is compiled for tests only.
//!
//! Steps are counted on the thread that makes them, between [`arm`] and [`disarm`].

use std::cell::RefCell;

use rusqlite::{Connection, ffi};

use crate::error::{Cause, CommitError};

/// What happens at a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mishap {
    /// The process is killed.
    Death,
    /// SQLite says that the disk is full, and does nothing.
    Full,
    /// SQLite says that the disk is full, and has rolled back the transaction, as it does at times.
    FullRolledBack,
    /// The file may not grow any more, from this step on.
    NoGrowth,
    /// Nothing may be written any more, from this step on.
    ReadOnly,
}

#[derive(Default)]
struct Script {
    /// The steps that were reached.
    reached: Vec<String>,
    /// What happens at which of them.
    at: Option<(usize, Mishap)>,
}

thread_local! {
    static SCRIPT: RefCell<Option<Script>> = const { RefCell::new(None) };
}

/// Counts the steps of this thread from now on, and lets the mishap happen at the step of that number.
pub(crate) fn arm(at: Option<(usize, Mishap)>) {
    SCRIPT.set(Some(Script { reached: Vec::new(), at }));
}

/// The steps that were reached. Nothing happens any more.
pub(crate) fn disarm() -> Vec<String> {
    SCRIPT.take().unwrap_or_default().reached
}

/// A step that can only be the last.
pub(crate) fn reached(step: &str) {
    if due(step) == Some(Mishap::Death) {
        die();
    }
}

/// The step before `sql` is executed. An error is what it comes to.
pub(crate) fn before(sql: &str, connection: &Connection) -> rusqlite::Result<()> {
    match due(&format!("before {}", first_words(sql))) {
        None => Ok(()),
        Some(Mishap::Death) => die(),
        Some(Mishap::Full) => Err(full()),
        Some(Mishap::FullRolledBack) => {
            if !connection.is_autocommit() {
                connection.execute_batch("ROLLBACK").unwrap();
            }
            Err(full())
        }
        // The page count is not set below what there is.
        Some(Mishap::NoGrowth) => connection.pragma_update(None, "max_page_count", 1).or(Ok(())),
        Some(Mishap::ReadOnly) => connection.pragma_update(None, "query_only", true),
    }
}

/// The step before a ledger in memory is written. An error is what it comes to.
pub(crate) fn refused() -> Result<(), CommitError> {
    match due("commit") {
        None => Ok(()),
        Some(_) => Err(CommitError::Full(Cause::Sqlite(std::sync::Arc::new(full())))),
    }
}

/// The step after `sql` was executed.
pub(crate) fn after(sql: &str) {
    reached(&format!("after {}", first_words(sql)));
}

fn due(step: &str) -> Option<Mishap> {
    SCRIPT.with_borrow_mut(|script| {
        let script = script.as_mut()?;
        script.reached.push(step.to_owned());
        let (at, mishap) = script.at?;
        (script.reached.len() == at + 1).then_some(mishap)
    })
}

fn die() -> ! {
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    unreachable!("nobody outlives SIGKILL")
}

fn full() -> rusqlite::Error {
    rusqlite::Error::SqliteFailure(ffi::Error::new(ffi::SQLITE_FULL), None)
}

fn first_words(sql: &str) -> String {
    sql.split_whitespace().take(3).collect::<Vec<_>>().join(" ")
}
