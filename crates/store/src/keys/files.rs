//! Key files: one a key, named by its number, private, replaced never.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use aws_lc_rs::digest::{SHA256, digest};

use super::{KeyError, SECRET_BYTES, Secret};
use crate::private::{self, Fault};

/// Makes the directory if there is none.
pub(super) fn prepare_dir(dir: &Path) -> Result<(), KeyError> {
    DirBuilder::new().recursive(true).mode(private::DIR_MODE).create(dir).map_err(io("create", dir))
}

/// Every key in `dir`.
pub(super) fn read(dir: &Path) -> Result<BTreeMap<u32, Secret>, KeyError> {
    match private::enforce(dir, private::DIR_MODE) {
        Err(Fault::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            return Err(KeyError::Missing { dir: dir.to_owned() });
        }
        outcome => outcome?,
    }
    let mut secrets = BTreeMap::new();
    for entry in fs::read_dir(dir).map_err(io("list", dir))?.take(DIR_ENTRIES_MAX) {
        let entry = entry.map_err(io("list", dir))?;
        if let Some(id) = entry.file_name().to_str().and_then(key_id) {
            secrets.insert(id, read_one(&entry.path())?);
        }
    }
    Ok(secrets)
}

/// Stores a new key so that it is there whole or not at all, also after a power cut.
pub(super) fn write(dir: &Path, id: u32, secret: &Secret) -> Result<(), KeyError> {
    let path = dir.join(file_name(id));
    let draft = dir.join(format!("{}.new", file_name(id)));
    reached("key: begun");
    // A draft can only be what an earlier attempt left when it was cut short.
    match fs::remove_file(&draft) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(io("remove", &draft)(error)),
        Ok(()) | Err(_) => {}
    }
    reached("key: no draft");
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(private::FILE_MODE)
        .open(&draft)
        .map_err(io("create", &draft))?;
    reached("key: draft made");
    file.write_all(&framed(secret)).map_err(io("write", &draft))?;
    reached("key: draft written");
    file.sync_all().map_err(io("sync", &draft))?;
    reached("key: draft durable");
    // A key is never replaced. Only the owner of the state directory's lock comes here, so there is no race.
    if path.try_exists().map_err(io("look at", &path))? {
        return Err(io("create", &path)(std::io::ErrorKind::AlreadyExists.into()));
    }
    fs::rename(&draft, &path).map_err(io("rename", &draft))?;
    reached("key: named");
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(io("sync", dir))?;
    reached("key: name durable");
    Ok(())
}

/// Removes a key, also beyond a power cut.
pub(super) fn remove(dir: &Path, id: u32) -> Result<(), KeyError> {
    let path = dir.join(file_name(id));
    fs::remove_file(&path).map_err(io("remove", &path))?;
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(io("sync", dir))
}

/// A step of writing a key, between any two of which the process may end.
fn reached(step: &str) {
    #[cfg(test)]
    crate::mishap::reached(step);
    let _ = step;
}

fn read_one(path: &Path) -> Result<Secret, KeyError> {
    private::enforce(path, private::FILE_MODE)?;
    let mut bytes = Vec::with_capacity(FILE_BYTES + 1);
    let file = File::open(path).map_err(io("open", path))?;
    file.take(FILE_BYTES as u64 + 1).read_to_end(&mut bytes).map_err(io("read", path))?;
    unframed(&bytes).ok_or_else(|| KeyError::Damaged { path: path.to_owned() })
}

/// Magic, secret, the first bytes of the digest of both.
fn framed(secret: &Secret) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(FILE_BYTES);
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(secret);
    let check = digest(&SHA256, &bytes);
    bytes.extend_from_slice(&check.as_ref()[..CHECK_BYTES]);
    bytes
}

fn unframed(bytes: &[u8]) -> Option<Secret> {
    let secret: Secret = bytes.get(MAGIC.len()..MAGIC.len() + SECRET_BYTES)?.try_into().ok()?;
    (bytes == framed(&secret)).then_some(secret)
}

fn file_name(id: u32) -> String {
    format!("{id:04}.key")
}

fn key_id(name: &str) -> Option<u32> {
    let id = name.strip_suffix(".key")?.parse().ok()?;
    (file_name(id) == name).then_some(id)
}

fn io(attempt: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> KeyError {
    let path: PathBuf = path.to_owned();
    move |source| KeyError::Io { attempt, path, source }
}

impl From<Fault> for KeyError {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Foreign { path, owner } => Self::Foreign { path, owner },
            Fault::Io { attempt, path, source } => Self::Io { attempt, path, source },
        }
    }
}

const MAGIC: &[u8; 8] = b"MSTKEY1\n";
const CHECK_BYTES: usize = 8;
const FILE_BYTES: usize = MAGIC.len() + SECRET_BYTES + CHECK_BYTES;
const DIR_ENTRIES_MAX: usize = 4096;
