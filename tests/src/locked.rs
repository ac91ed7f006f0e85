//! A database that nobody else may write to.

use anyhow::{Context as _, Result, ensure};
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Whoever has this lets nobody write to a database of SQLite.
#[derive(Debug)]
pub struct Locked(Child);

impl Locked {
    /// Locks the database `file`.
    ///
    /// # Errors
    /// If that can't be done.
    pub fn new(file: &Path) -> Result<Locked> {
        let script = "import sqlite3,sys\n\
            db=sqlite3.connect(sys.argv[1], timeout=30, isolation_level=None)\n\
            db.execute('BEGIN IMMEDIATE')\n\
            print('locked', flush=True)\n\
            sys.stdin.read()";
        let mut holder = Command::new("python3");
        holder.args(["-c", script]).arg(file).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut locked = Locked(holder.spawn()?);
        let mut said = String::new();
        BufReader::new(locked.0.stdout.take().context("its output")?).read_line(&mut said)?;
        ensure!(said.trim() == "locked", "{said}");
        Ok(locked)
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
