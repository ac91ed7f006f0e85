//! The file: private, of a known schema, or set aside and begun anew.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, ErrorCode, OpenFlags, ffi};
use tracing::error;

use super::failure::{OpenError, is_damage};
use crate::migrate::{self, Refused};
use crate::private::{self, Fault};

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

/// Opens the journal at `path`, whatever state it is in.
pub(super) fn open(path: &Path) -> Result<Opened, OpenError> {
    let opened = |connection, set_aside| Opened { connection, file: FileId::of(path), set_aside };
    match attempt(path) {
        Ok(connection) => Ok(opened(connection, false)),
        Err(Trouble::Hopeless(error)) => Err(error),
        Err(Trouble::Damaged(why)) => {
            set_aside(path, &why)?;
            match attempt(path) {
                Ok(connection) => Ok(opened(connection, true)),
                Err(Trouble::Hopeless(error)) => Err(error),
                Err(Trouble::Damaged(why)) => {
                    let source = io::Error::other(why);
                    Err(OpenError::Io { attempt: "begin a new", path: path.to_owned(), source })
                }
            }
        }
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
    let connection = connection(path)?;
    pragmas(&connection)?;
    connection.pragma_update(None, "query_only", true)?;
    Ok(connection)
}

/// A journal in memory.
pub(super) fn in_memory() -> Result<Connection, OpenError> {
    let failed = |source| OpenError::Sqlite { attempt: "make", path: PathBuf::from(":memory:"), source };
    let mut connection = Connection::open_in_memory().map_err(failed)?;
    connection.set_prepared_statement_cache_capacity(STATEMENTS_CACHED_MAX);
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
    /// Nothing can be done about it here.
    Hopeless(OpenError),
}

fn attempt(path: &Path) -> Result<Connection, Trouble> {
    prepare(path).map_err(Trouble::Hopeless)?;
    let failed = |attempt| move |error| trouble(attempt, path, error);
    let mut connection = connection(path).map_err(failed("open"))?;
    pragmas(&connection).map_err(failed("configure"))?;
    migrate::migrate(&mut connection, STEPS).map_err(|refused| match refused {
        Refused::Newer { found, known } => {
            Trouble::Damaged(format!("it has schema version {found}, and {known} is the newest known here"))
        }
        Refused::Alien => Trouble::Damaged("it is a database of another program".into()),
        Refused::Sqlite(error) => failed("migrate")(error),
    })?;
    connection.execute_batch(PROBE).map_err(failed("examine"))?;
    for suffix in COMPANIONS {
        match private::enforce(&beside(path, suffix), private::FILE_MODE) {
            Err(Fault::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            outcome => outcome.map_err(|fault| Trouble::Hopeless(refused(fault)))?,
        }
    }
    Ok(connection)
}

fn trouble(attempt: &'static str, path: &Path, error: rusqlite::Error) -> Trouble {
    // So is a table that is not there, and what can't be read at all; what merely fails now may work later.
    let misses = error.sqlite_error().is_some_and(|found| found.extended_code == ffi::SQLITE_ERROR);
    let unreadable = error.sqlite_error_code() == Some(ErrorCode::SystemIoFailure);
    if is_damage(&error) || misses || unreadable {
        return Trouble::Damaged(error.to_string());
    }
    Trouble::Hopeless(OpenError::Sqlite { attempt, path: path.to_owned(), source: error })
}

/// Makes the file private before SQLite knows it; its companions take its mode.
fn prepare(path: &Path) -> Result<(), OpenError> {
    let made = OpenOptions::new().write(true).create_new(true).mode(private::FILE_MODE).open(path);
    match made {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            private::enforce(path, private::FILE_MODE).map_err(refused)
        }
        Err(source) => Err(OpenError::Io { attempt: "create", path: path.to_owned(), source }),
    }
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

fn connection(path: &Path) -> rusqlite::Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags)?;
    connection.set_prepared_statement_cache_capacity(STATEMENTS_CACHED_MAX);
    Ok(connection)
}

fn pragmas(connection: &Connection) -> rusqlite::Result<()> {
    connection.busy_timeout(Duration::from_millis(BUSY_TIMEOUT_MS))?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    connection.pragma_update(None, "synchronous", "NORMAL")?;
    connection.pragma_update(None, "wal_autocheckpoint", WAL_AUTOCHECKPOINT_PAGES)?;
    connection.pragma_update(None, "journal_size_limit", WAL_BYTES_KEPT_MAX)?;
    connection.pragma_update(None, "max_page_count", PAGES_MAX)?;
    connection.pragma_update(None, "trusted_schema", false)?;
    connection.pragma_update(None, "temp_store", "MEMORY")
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

fn refused(fault: Fault) -> OpenError {
    match fault {
        Fault::Foreign { path, owner } => OpenError::Foreign { path, owner },
        Fault::Io { attempt, path, source } => OpenError::Io { attempt, path, source },
    }
}

/// Step `n` leads from schema version `n` to `n + 1`. A step that was released is never changed again.
pub(super) const STEPS: &[&str] = &[include_str!("0001.sql"), include_str!("0002.sql")];
/// Looks at the root of every table.
const PROBE: &str = "SELECT id FROM sessions LIMIT 1; SELECT id FROM streams LIMIT 1; SELECT stream FROM calls LIMIT 1;
    SELECT id FROM events LIMIT 1; SELECT id FROM questions LIMIT 1";
const DAMAGED: &str = ".damaged";
const WAL: &str = "-wal";
const SHM: &str = "-shm";
const COMPANIONS: [&str; 3] = ["", WAL, SHM];
/// The most that the file takes: 512 MiB.
pub(super) const FILE_BYTES_MAX: u64 = 512 << 20;
const PAGE_BYTES: u64 = 4096;
const PAGES_MAX: i64 = (FILE_BYTES_MAX / PAGE_BYTES).cast_signed();
/// How long another process may hold the write lock: a batch of the worker before or after this one.
const BUSY_TIMEOUT_MS: u64 = 5000;
/// 16 MiB of log between checkpoints.
const WAL_AUTOCHECKPOINT_PAGES: u32 = 4000;
const WAL_BYTES_KEPT_MAX: i64 = 64 << 20;
const STATEMENTS_CACHED_MAX: usize = 64;
