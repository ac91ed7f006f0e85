//! The file of a database: private from the first moment on, with its companions, and connections to it.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, OpenFlags, OptionalExtension, Params, Row};

use crate::private::{self, Fault};

/// Makes the file private before SQLite knows it; its companions take its mode.
pub(crate) fn prepare(path: &Path) -> Result<(), Fault> {
    match OpenOptions::new().write(true).create_new(true).mode(private::FILE_MODE).open(path) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => private::enforce(path, private::FILE_MODE),
        Err(source) => Err(Fault::Io { attempt: "create", path: path.to_owned(), source }),
    }
}

/// Sees to it that the file and its companions, as far as they are there, are private.
pub(crate) fn enforce(path: &Path) -> Result<(), Fault> {
    for suffix in ["", WAL, SHM] {
        match private::enforce(&beside(path, suffix), private::FILE_MODE) {
            Err(Fault::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            outcome => outcome?,
        }
    }
    Ok(())
}

/// A connection to a file that is there.
pub(crate) fn connect(path: &Path) -> rusqlite::Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags)?;
    keep_statements(&connection);
    connection.busy_timeout(BUSY_TIMEOUT)?;
    Ok(connection)
}

/// A connection that can't change anything.
pub(crate) fn look(path: &Path) -> rusqlite::Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags)?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    Ok(connection)
}

/// Has the statements of `connection` prepared once.
pub(crate) fn keep_statements(connection: &Connection) {
    connection.set_prepared_statement_cache_capacity(STATEMENTS_CACHED_MAX);
}

/// Executes `sql`. How many rows it changed.
pub(crate) fn execute(connection: &Connection, sql: &str, params: impl Params) -> rusqlite::Result<usize> {
    #[cfg(test)]
    crate::mishap::before(sql, connection)?;
    let changed = connection.prepare_cached(sql)?.execute(params)?;
    #[cfg(test)]
    crate::mishap::after(sql);
    Ok(changed)
}

/// The first row that `sql` gives.
pub(crate) fn first<T>(
    connection: &Connection,
    sql: &str,
    params: impl Params,
    read: impl FnOnce(&Row<'_>) -> rusqlite::Result<T>,
) -> rusqlite::Result<Option<T>> {
    connection.prepare_cached(sql)?.query_row(params, read).optional()
}

/// The file of that suffix beside `path`.
pub(crate) fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// The suffixes of a file's companions.
pub(crate) const WAL: &str = "-wal";
pub(crate) const SHM: &str = "-shm";
/// How long another process may hold the write lock: a batch of the worker before or after this one.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);
const STATEMENTS_CACHED_MAX: usize = 64;
