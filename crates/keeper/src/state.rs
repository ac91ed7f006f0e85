//! Files and directories that are nobody else's business.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// Why a part of the state directory can't be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// It belongs to another user.
    #[error("`{path}` belongs to user {owner}, not to user {expected}")]
    Owner {
        /// What was looked at.
        path: PathBuf,
        /// Whose it is.
        owner: u32,
        /// Who the calling process is.
        expected: u32,
    },
    /// It is a symbolic link, or not a directory.
    #[error("`{path}` is not a plain directory")]
    Kind {
        /// What was looked at.
        path: PathBuf,
    },
    /// The system refused.
    #[error("could not {act} `{path}`")]
    Io {
        /// What was attempted.
        act: &'static str,
        /// On what.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
}

impl StateError {
    pub(crate) fn io(act: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { act, path, source }
    }
}

/// Makes sure that `path` is a directory of the calling user and of nobody else: mode 0700.
///
/// It is made if it is missing; a mode that lets others in is repaired, and that is logged.
///
/// # Errors
/// A symbolic link, something else than a directory, or another user's directory is refused and left as it is.
pub fn ensure_private_dir(path: &Path) -> Result<(), StateError> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if !metadata.is_dir() => return Err(StateError::Kind { path: path.to_owned() }),
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let made = DirBuilder::new().recursive(true).mode(DIR_MODE).create(path);
            made.map_err(StateError::io("create", path))?;
        }
        Err(error) => return Err(StateError::io("examine", path)(error)),
    }
    // What was opened is what is examined and repaired, whatever happens to the name meanwhile.
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW;
    let mut options = OpenOptions::new();
    let opened = options.read(true).custom_flags(flags_of(flags)).open(path);
    let directory = opened.map_err(StateError::io("open", path))?;
    repair(&directory, path, DIR_MODE)
}

/// Opens a file of the calling user for reading and writing, made with mode 0600 if it is missing.
pub(crate) fn open_private_file(path: &Path) -> Result<File, StateError> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    options.mode(FILE_MODE).custom_flags(flags_of(OFlags::NOFOLLOW));
    let file = options.open(path).map_err(StateError::io("open", path))?;
    repair(&file, path, FILE_MODE)?;
    Ok(file)
}

/// Replaces the file `name` in `dir` by one with these contents: a reader sees the old one or the new one, whole.
///
/// Survives the end of the process, not a loss of power.
pub(crate) fn write_whole_file(dir: &Path, name: &str, contents: &[u8]) -> Result<(), StateError> {
    let (path, unfinished) = (dir.join(name), dir.join(format!("{UNFINISHED_PREFIX}{name}")));
    let mut file = open_private_file(&unfinished)?;
    let written = file.set_len(0).and_then(|()| file.write_all(contents));
    written.map_err(StateError::io("write", &unfinished))?;
    fs::rename(&unfinished, &path).map_err(StateError::io("replace", &path))
}

/// Removes a file; one that is gone already is fine.
pub(crate) fn remove_file(path: &Path) -> Result<(), StateError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(StateError::io("remove", path)(error)),
        _ => Ok(()),
    }
}

fn repair(file: &File, path: &Path, mode: u32) -> Result<(), StateError> {
    let metadata = file.metadata().map_err(StateError::io("examine", path))?;
    let expected = rustix::process::geteuid().as_raw();
    if metadata.uid() != expected {
        return Err(StateError::Owner { path: path.to_owned(), owner: metadata.uid(), expected });
    }
    let found = metadata.mode() & 0o7777;
    if found == mode {
        return Ok(());
    }
    if found & 0o077 != 0 {
        tracing::warn!(path = %path.display(), found = %format_args!("{found:o}"), "closed to other users what was open to them");
    }
    file.set_permissions(Permissions::from_mode(mode)).map_err(StateError::io("close to other users", path))
}

fn flags_of(flags: OFlags) -> i32 {
    i32::try_from(flags.bits()).unwrap_or_default()
}

/// What the name of a file that is being written starts with.
pub(crate) const UNFINISHED_PREFIX: &str = ".unfinished-";

const DIR_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn a_missing_directory_is_made_private() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a/b");
        ensure_private_dir(&path).unwrap();
        assert_eq!(mode(&path), 0o700);
        ensure_private_dir(&path).unwrap();
    }

    #[test]
    fn too_wide_modes_are_repaired() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("wide");
        fs::create_dir(&dir).unwrap();
        fs::set_permissions(&dir, Permissions::from_mode(0o755)).unwrap();
        ensure_private_dir(&dir).unwrap();
        assert_eq!(mode(&dir), 0o700);

        let file = dir.join("file");
        fs::write(&file, "kept").unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
        open_private_file(&file).unwrap();
        assert_eq!(mode(&file), 0o600);
        assert_eq!(fs::read(&file).unwrap(), b"kept");
    }

    #[test]
    fn links_and_files_are_no_directories() {
        let root = tempfile::tempdir().unwrap();
        let (real, link, file) = (root.path().join("real"), root.path().join("link"), root.path().join("file"));
        fs::create_dir(&real).unwrap();
        symlink(&real, &link).unwrap();
        fs::write(&file, "").unwrap();
        for path in [&link, &file] {
            assert!(matches!(ensure_private_dir(path), Err(StateError::Kind { .. })));
        }
        assert!(matches!(open_private_file(&link), Err(StateError::Io { .. })));
    }

    #[test]
    fn a_file_is_replaced_whole() {
        let root = tempfile::tempdir().unwrap();
        for contents in ["first and long", "second"] {
            write_whole_file(root.path(), "name", contents.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(root.path().join("name")).unwrap(), contents);
        }
        assert_eq!(mode(&root.path().join("name")), 0o600);
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
        remove_file(&root.path().join("name")).unwrap();
        remove_file(&root.path().join("name")).unwrap();
    }
}
