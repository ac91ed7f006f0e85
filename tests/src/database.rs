//! What a test does to the databases of a gateway.

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

/// Has the journal in the state directory believe that nothing has become of any call for ten minutes more.
///
/// # Errors
/// If it can't be written.
pub fn age_streams(state_dir: &Path) -> Result<()> {
    let script = "import sqlite3,sys\n\
        db=sqlite3.connect(sys.argv[1], timeout=30)\n\
        db.execute('update streams set changed_at=changed_at-600000'); db.commit()";
    let aged = Command::new("python3").args(["-c", script]).arg(state_dir.join("streams.db")).status()?;
    ensure!(aged.success(), "{aged}");
    Ok(())
}
