//! Files and directories that nobody else may read or change.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tracing::warn;

/// The mode of every file.
pub(crate) const FILE_MODE: u32 = 0o600;
/// The mode of every directory.
pub(crate) const DIR_MODE: u32 = 0o700;

/// Why a path can't be made private.
pub(crate) enum Fault {
    /// It belongs to somebody else, who could undo it.
    Foreign { path: PathBuf, owner: u32 },
    /// The operating system refused.
    Io { attempt: &'static str, path: PathBuf, source: io::Error },
}

/// Checks that `path` is ours, and takes away every permission beyond `mode`, loudly.
pub(crate) fn enforce(path: &Path, mode: u32) -> Result<(), Fault> {
    let fault = |attempt| move |source| Fault::Io { attempt, path: path.to_owned(), source };
    let metadata = fs::metadata(path).map_err(fault("look at"))?;
    let us = rustix::process::geteuid().as_raw();
    if metadata.uid() != us {
        return Err(Fault::Foreign { path: path.to_owned(), owner: metadata.uid() });
    }
    let found = metadata.permissions().mode() & 0o7777;
    if found & !mode == 0 {
        return Ok(());
    }
    warn!(path = %path.display(), found = format!("{found:04o}"), set = format!("{mode:04o}"), "file was open to others");
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(fault("set the mode of"))
}
