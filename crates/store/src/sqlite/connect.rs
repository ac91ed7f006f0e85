//! Opening the file: private, whole, of a known schema, and written with our keys.

use std::cmp::Ordering;
use std::path::{Path, PathBuf};

use rusqlite::{Connection, ErrorCode, OptionalExtension};

use crate::error::OpenError;
use crate::file;
use crate::keys::{Keyring, Purpose, Signature};
use crate::migrate::{self, Refused, STEPS};
use crate::private::Fault;

/// The connection that writes, of a ledger that has passed every check.
pub(super) fn writer(path: &Path, ring: &Keyring) -> Result<Connection, OpenError> {
    file::prepare(path).map_err(refused)?;
    let attempt = |attempt| failed(attempt, path);
    let mut connection = file::connect(path).map_err(attempt("open"))?;
    pragmas(&connection).map_err(attempt("configure"))?;
    migrate::migrate(&mut connection, STEPS).map_err(|refused| unusable(refused, path))?;
    examine(&connection, path)?;
    agree(&connection, path, ring)?;
    file::enforce(path).map_err(refused)?;
    Ok(connection)
}

/// A connection that only reads, of a ledger that [`writer`] has opened.
pub(super) fn reader(path: &Path) -> Result<Connection, OpenError> {
    let connection = file::connect(path).map_err(failed("open", path))?;
    let configured = pragmas(&connection).and_then(|()| connection.pragma_update(None, "query_only", true));
    configured.map_err(failed("configure", path))?;
    Ok(connection)
}

/// Checks that the ledger is of the newest schema and belongs to `ring`, without changing anything.
pub(crate) fn rehearse(path: &Path, ring: &Keyring) -> Result<(), OpenError> {
    let connection = file::look(path).map_err(failed("open", path))?;
    let (found, known) = migrate::versions(&connection).map_err(|refused| unusable(refused, path))?;
    match found.cmp(&known) {
        Ordering::Greater => return Err(OpenError::Newer { path: path.to_owned(), found, known }),
        Ordering::Less => return Err(OpenError::Older { path: path.to_owned(), found, known }),
        Ordering::Equal => {}
    }
    match belongs(&connection, ring).map_err(failed("examine", path))? {
        true => Ok(()),
        false => Err(OpenError::OtherKeys { path: path.to_owned() }),
    }
}

fn unusable(refused: Refused, path: &Path) -> OpenError {
    match refused {
        Refused::Newer { found, known } => OpenError::Newer { path: path.to_owned(), found, known },
        Refused::Alien => OpenError::Alien { path: path.to_owned() },
        Refused::Sqlite(error) => failed("migrate", path)(error),
    }
}

fn pragmas(connection: &Connection) -> rusqlite::Result<()> {
    connection.pragma_update(None, "journal_mode", "WAL")?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.pragma_update(None, "wal_autocheckpoint", WAL_AUTOCHECKPOINT_PAGES)?;
    connection.pragma_update(None, "foreign_keys", true)?;
    connection.pragma_update(None, "trusted_schema", false)?;
    connection.pragma_update(None, "temp_store", "MEMORY")
}

/// Looks for damage, once after each boot: the end of a process damages nothing, and every worker starts here. Where
/// boots can't be told apart it is done every time.
fn examine(connection: &Connection, path: &Path) -> Result<(), OpenError> {
    let boot = std::fs::read_to_string(BOOT_ID_PATH).ok();
    let failed = |error| failed("examine", path)(error);
    let examined: Option<String> = meta(connection, BOOT).map_err(failed)?;
    if boot.is_some() && boot == examined {
        return Ok(());
    }
    let verdict: String = connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0)).map_err(failed)?;
    if verdict != "ok" {
        return Err(OpenError::Damaged { path: path.to_owned(), detail: verdict });
    }
    let noted = boot.map_or(Ok(()), |boot| set_meta(connection, BOOT, &boot));
    noted.map_err(failed)
}

/// Checks that the ledger and the keyring belong together. Otherwise every row would look tampered with.
fn agree(connection: &Connection, path: &Path, ring: &Keyring) -> Result<(), OpenError> {
    let failed = |error| failed("examine", path)(error);
    if !belongs(connection, ring).map_err(failed)? {
        return Err(OpenError::OtherKeys { path: path.to_owned() });
    }
    let (stored, current) = (meta::<Vec<u8>>(connection, KEYS).map_err(failed)?, proof(ring));
    if stored.as_ref() == Some(&current) {
        return Ok(());
    }
    set_meta(connection, KEYS, &current).map_err(failed)
}

/// Whether the ledger's newest key is in `ring`. One that was never written to belongs to everybody.
pub(super) fn belongs(connection: &Connection, ring: &Keyring) -> rusqlite::Result<bool> {
    let verifies = |signature| ring.verify(Purpose::Ledger, b"", LEDGER_PROOF, &signature).is_ok();
    let stored: Option<Vec<u8>> = meta(connection, KEYS)?;
    Ok(stored.is_none_or(|stored| signature(&stored).is_some_and(verifies)))
}

/// What shows that a ledger belongs to `ring`.
pub(super) fn proof(ring: &Keyring) -> Vec<u8> {
    let signature = ring.sign(Purpose::Ledger, b"", LEDGER_PROOF);
    [signature.key_id.to_be_bytes().as_slice(), &signature.mac].concat()
}

fn signature(stored: &[u8]) -> Option<Signature> {
    let (key_id, mac) = stored.split_first_chunk()?;
    Some(Signature { key_id: u32::from_be_bytes(*key_id), mac: mac.try_into().ok()? })
}

fn meta<T: rusqlite::types::FromSql>(connection: &Connection, name: &str) -> rusqlite::Result<Option<T>> {
    connection.query_row("SELECT value FROM meta WHERE name = ?1", [name], |row| row.get(0)).optional()
}

fn set_meta(connection: &Connection, name: &str, value: &dyn rusqlite::ToSql) -> rusqlite::Result<()> {
    let sql = "INSERT INTO meta (name, value) VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET value = excluded.value";
    connection.execute(sql, rusqlite::params![name, value]).map(|_| ())
}

fn failed(attempt: &'static str, path: &Path) -> impl FnOnce(rusqlite::Error) -> OpenError {
    let path: PathBuf = path.to_owned();
    move |source| match source.sqlite_error_code() {
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => {
            OpenError::Damaged { path, detail: source.to_string() }
        }
        _ => OpenError::Sqlite { attempt, path, source },
    }
}

fn refused(fault: Fault) -> OpenError {
    match fault {
        Fault::Foreign { path, owner } => OpenError::Foreign { path, owner },
        Fault::Io { attempt, path, source } => OpenError::Io { attempt, path, source },
    }
}

const BOOT_ID_PATH: &str = "/proc/sys/kernel/random/boot_id";
const BOOT: &str = "boot";
/// Where in the facts about the ledger its proof is.
pub(super) const KEYS: &str = "keys";
const LEDGER_PROOF: &[u8] = b"mainstay ledger";
/// 16 MiB of log between checkpoints.
const WAL_AUTOCHECKPOINT_PAGES: u32 = 4000;
