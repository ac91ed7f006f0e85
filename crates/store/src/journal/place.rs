//! The file: private, of a known schema, or set aside and begun anew.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, ErrorCode, ffi};
use tracing::{error, warn};

use super::failure::{OpenError, is_damage};
use crate::file::{self, SHM, WAL, beside};
use crate::migrate::{self, Refused};
use crate::private::Fault;

/// Which file stands under a name: what was renamed meanwhile is another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    fn of(path: &Path) -> Option<Self> {
        let metadata = fs::metadata(path).ok()?;
        Some(Self { device: metadata.dev(), inode: metadata.ino() })
    }
}

/// A connection that writes, and whether a damaged file had to be set aside for it.
pub(super) struct Opened {
    pub(super) connection: Connection,
    pub(super) file: Option<FileId>,
    pub(super) set_aside: bool,
}

/// Opens the journal at `path`, whatever state it is in. A disk that fails to read is asked again before that is taken for
/// the truth, and even then the file is left where it is.
pub(super) fn open(path: &Path) -> Result<Opened, OpenError> {
    open_by(path, &attempt)
}

/// The same with another way to make an attempt.
fn open_by(path: &Path, attempt: &dyn Fn(&Path) -> Result<Connection, Trouble>) -> Result<Opened, OpenError> {
    let opened = |connection, set_aside| Opened { connection, file: FileId::of(path), set_aside };
    let mut outcome = attempt(path);
    for _ in 1..TRIES_MAX {
        let Err(Trouble::Passing(error)) = &outcome else { break };
        warn!(path = %path.display(), error = error as &dyn std::error::Error, "the journal can't be read; it is tried again");
        std::thread::sleep(TRY_PAUSE);
        outcome = attempt(path);
    }
    match outcome {
        Ok(connection) => Ok(opened(connection, false)),
        Err(Trouble::Hopeless(error) | Trouble::Passing(error)) => Err(error),
        Err(Trouble::Damaged(why)) => {
            set_aside(path, &why)?;
            match attempt(path) {
                Ok(connection) => Ok(opened(connection, true)),
                Err(Trouble::Hopeless(error) | Trouble::Passing(error)) => Err(error),
                Err(Trouble::Damaged(why)) => {
                    let source = io::Error::other(why);
                    Err(OpenError::Io { attempt: "begin a new", path: path.to_owned(), source })
                }
            }
        }
    }
}

/// Checks that the journal at `path` is of the schema that is written here, without changing anything. One that is not
/// there is made, and a damaged one set aside, by whoever opens it.
pub(super) fn rehearse(path: &Path) -> Result<(), OpenError> {
    let failed = |source| OpenError::Sqlite { attempt: "look at", path: path.to_owned(), source };
    if !path.exists() {
        return Ok(());
    }
    let connection = file::look(path).map_err(failed)?;
    let known = u32::try_from(STEPS.len()).unwrap_or(u32::MAX);
    match connection.pragma_query_value(None, "user_version", |row| row.get::<_, u32>(0)) {
        Ok(found) if found == known => Ok(()),
        Ok(found) => Err(OpenError::OtherSchema { path: path.to_owned(), found, known }),
        Err(error) if is_damage(&error) => Ok(()),
        Err(error) => Err(failed(error)),
    }
}

/// The journal at `path` in place of `file`, which turned out to be damaged. If somebody else has begun a new one
/// meanwhile, it is that.
pub(super) fn open_in_place_of(file: Option<FileId>, path: &Path) -> Result<Opened, OpenError> {
    let damaged = file.is_some() && FileId::of(path) == file;
    if damaged {
        set_aside(path, "its content is damaged")?;
    }
    let opened = open(path)?;
    Ok(Opened { set_aside: opened.set_aside || damaged, ..opened })
}

/// A connection that only reads, of a journal that [`open`] has opened.
pub(super) fn reader(path: &Path) -> rusqlite::Result<Connection> {
    let connection = file::connect(path)?;
    pragmas(&connection)?;
    connection.pragma_update(None, "query_only", true)?;
    Ok(connection)
}

/// A journal in memory.
pub(super) fn in_memory() -> Result<Connection, OpenError> {
    let failed = |source| OpenError::Sqlite { attempt: "make", path: PathBuf::from(":memory:"), source };
    let mut connection = Connection::open_in_memory().map_err(failed)?;
    file::keep_statements(&connection);
    connection.pragma_update(None, "max_page_count", PAGES_MAX).map_err(failed)?;
    match migrate::migrate(&mut connection, STEPS) {
        Ok(()) => Ok(connection),
        Err(Refused::Sqlite(error)) => Err(failed(error)),
        Err(Refused::Newer { .. } | Refused::Alien) => Err(failed(rusqlite::Error::InvalidQuery)),
    }
}

/// Why a file is not opened as it is.
enum Trouble {
    /// It can be set aside.
    Damaged(String),
    /// The disk could not read it just now.
    Passing(OpenError),
    /// Nothing can be done about it here.
    Hopeless(OpenError),
}

fn attempt(path: &Path) -> Result<Connection, Trouble> {
    let hopeless = |fault| Trouble::Hopeless(refused(fault));
    file::prepare(path).map_err(hopeless)?;
    let failed = |attempt| move |error| trouble(attempt, path, error);
    let mut connection = file::connect(path).map_err(failed("open"))?;
    pragmas(&connection).map_err(failed("configure"))?;
    migrate::migrate(&mut connection, STEPS).map_err(|refused| match refused {
        Refused::Newer { found, known } => {
            Trouble::Damaged(format!("it has schema version {found}, and {known} is the newest known here"))
        }
        Refused::Alien => Trouble::Damaged("it is a database of another program".into()),
        Refused::Sqlite(error) => failed("migrate")(error),
    })?;
    connection.execute_batch(PROBE).map_err(failed("examine"))?;
    file::enforce(path).map_err(hopeless)?;
    Ok(connection)
}

fn trouble(attempt: &'static str, path: &Path, error: rusqlite::Error) -> Trouble {
    // So is a table that is not there, and a file that ends too soon; what merely fails now may work later.
    let extended = error.sqlite_error().map(|found| found.extended_code);
    if is_damage(&error) || matches!(extended, Some(ffi::SQLITE_ERROR | ffi::SQLITE_IOERR_SHORT_READ)) {
        return Trouble::Damaged(error.to_string());
    }
    let passing = error.sqlite_error_code() == Some(ErrorCode::SystemIoFailure);
    let error = OpenError::Sqlite { attempt, path: path.to_owned(), source: error };
    if passing { Trouble::Passing(error) } else { Trouble::Hopeless(error) }
}

/// Renames the file, in place of one that was set aside before. The log of a file goes before the file: a death in
/// between leaves a file without its log, which is set aside by the next start if it is still damaged.
fn set_aside(path: &Path, why: &str) -> Result<(), OpenError> {
    let kept = beside(path, DAMAGED);
    let failed = |source| OpenError::Io { attempt: "set aside", path: path.to_owned(), source };
    let lenient = |outcome: io::Result<()>| match outcome {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        outcome => outcome.map_err(failed),
    };
    lenient(fs::remove_file(beside(&kept, WAL)))?;
    lenient(fs::rename(beside(path, WAL), beside(&kept, WAL)))?;
    lenient(fs::remove_file(beside(path, SHM)))?;
    lenient(fs::rename(path, &kept))?;
    error!(path = %path.display(), kept = %kept.display(), why, "journal set aside and begun anew: streams of calls in flight are no longer kept");
    Ok(())
}

fn pragmas(connection: &Connection) -> rusqlite::Result<()> {
    connection.pragma_update(None, "journal_mode", "WAL")?;
    connection.pragma_update(None, "synchronous", "NORMAL")?;
    connection.pragma_update(None, "wal_autocheckpoint", WAL_AUTOCHECKPOINT_PAGES)?;
    connection.pragma_update(None, "journal_size_limit", WAL_BYTES_KEPT_MAX)?;
    connection.pragma_update(None, "max_page_count", PAGES_MAX)?;
    connection.pragma_update(None, "trusted_schema", false)?;
    connection.pragma_update(None, "temp_store", "MEMORY")
}

fn refused(fault: Fault) -> OpenError {
    match fault {
        Fault::Foreign { path, owner } => OpenError::Foreign { path, owner },
        Fault::Io { attempt, path, source } => OpenError::Io { attempt, path, source },
    }
}

/// Step `n` leads from schema version `n` to `n + 1`. A step that was released is never changed again.
pub(super) const STEPS: &[&str] = &[include_str!("0001.sql"), include_str!("0002.sql"), include_str!("0003.sql")];
/// Looks at the root of every table.
const PROBE: &str = "SELECT id FROM sessions LIMIT 1; SELECT id FROM streams LIMIT 1; SELECT stream FROM calls LIMIT 1;
    SELECT id FROM events LIMIT 1; SELECT id FROM questions LIMIT 1; SELECT id FROM origin LIMIT 1";
const DAMAGED: &str = ".damaged";
/// The most that the file takes: 512 MiB.
pub const FILE_BYTES_MAX: u64 = 512 << 20;
const PAGE_BYTES: u64 = 4096;
const PAGES_MAX: i64 = (FILE_BYTES_MAX / PAGE_BYTES).cast_signed();
/// 16 MiB of log between checkpoints.
const WAL_AUTOCHECKPOINT_PAGES: u32 = 4000;
const WAL_BYTES_KEPT_MAX: i64 = 64 << 20;
/// How often a disk that fails to read is asked, and the pause between.
const TRIES_MAX: u32 = 10;
const TRY_PAUSE: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn io_error(path: &Path, extended: i32) -> Trouble {
        trouble("open", path, rusqlite::Error::SqliteFailure(ffi::Error::new(extended), None))
    }

    #[test]
    fn a_passing_failure_of_the_disk_sets_nothing_aside() {
        let home = tempfile::tempdir().expect("a directory");
        let path = home.path().join("streams.db");
        drop(open(&path).expect("a new one"));
        let inode = FileId::of(&path);
        let tries = Cell::new(0);
        let opened = open_by(&path, &|path| {
            tries.set(tries.get() + 1);
            if tries.get() <= 2 { Err(io_error(path, ffi::SQLITE_IOERR_READ)) } else { attempt(path) }
        });
        assert!(!opened.expect("the third time").set_aside);
        assert_eq!((tries.get(), FileId::of(&path)), (3, inode));
        let failed = open_by(&path, &|path| Err(io_error(path, ffi::SQLITE_IOERR_READ)));
        assert!(matches!(failed, Err(OpenError::Sqlite { .. })), "one that lasts is told");
        assert_eq!(FileId::of(&path), inode, "and what may be whole stays");
        assert!(matches!(io_error(&path, ffi::SQLITE_IOERR_SHORT_READ), Trouble::Damaged(_)));
    }

    #[test]
    fn t2_a_rehearsal_refuses_another_schema_and_changes_nothing() {
        let home = tempfile::tempdir().expect("a directory");
        let path = home.path().join("streams.db");
        rehearse(&path).expect("one that is not there is made later");
        assert!(!path.exists());
        drop(open(&path).expect("a new one"));
        rehearse(&path).expect("the very schema");
        for version in [1, 9] {
            let connection = Connection::open(&path).expect("it is there");
            connection.pragma_update(None, "user_version", version).expect("it is written");
            drop(connection);
            let refused = rehearse(&path);
            assert!(matches!(refused, Err(OpenError::OtherSchema { found, .. }) if found == version), "{refused:?}");
        }
        fs::write(&path, [1; 8192]).expect("damage");
        rehearse(&path).expect("a damaged one is set aside by whoever opens it");
        assert_eq!(fs::read(&path).expect("it is there"), [1; 8192]);
    }
}
