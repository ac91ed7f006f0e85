//! Which workers have handed over and still live: a file each, named after the worker's epoch, that its process has locked.
//!
//! The lock goes with the process, however that ends. So nobody has to say that a worker is gone, and what `kill -9`
//! leaves is a file without a lock, which the next start removes.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use mainstay_core::id::Epoch;
use mainstay_keeper::ensure_private_dir;

/// The word of a worker that it lives. Dropping it takes the word back; so does the end of the process.
pub struct Presence {
    path: PathBuf,
    /// Holds the lock.
    _file: File,
}

impl Presence {
    /// Declares in `folder` that the worker of `epoch` lives. The file appears locked, so that nobody who looks meanwhile
    /// takes the worker for gone.
    pub(super) fn declare(folder: &Path, epoch: Epoch) -> io::Result<Self> {
        ensure_private_dir(folder).map_err(io::Error::other)?;
        let (unfinished, path) = (folder.join(format!("{UNFINISHED}{epoch}")), folder.join(epoch.to_string()));
        let file = OpenOptions::new().write(true).create_new(true).mode(FILE_MODE).open(&unfinished)?;
        file.try_lock()?;
        fs::rename(&unfinished, &path)?;
        Ok(Self { path, _file: file })
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        // One that stays has no lock any more, and the next start removes it.
        let _ = fs::remove_file(&self.path);
    }
}

/// The workers that live. What others have left is removed.
pub(super) fn present(folder: &Path) -> BTreeSet<Epoch> {
    let mut living = BTreeSet::new();
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return living,
        Err(error) => {
            tracing::warn!(error = %error, "workers that still leave can't be looked up; they are taken for gone");
            return living;
        }
    };
    for entry in entries.flatten().take(FILES_MAX) {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let Some(epoch) = parse(name.strip_prefix(UNFINISHED).unwrap_or(name)) else { continue };
        if !is_locked(&entry.path()) {
            // If it can't be removed it is looked at again by the next start.
            let _ = fs::remove_file(entry.path());
        } else if !name.starts_with(UNFINISHED) {
            living.insert(epoch);
        }
    }
    living
}

/// Whether the worker of `epoch` lives.
pub(super) fn is_present(folder: &Path, epoch: Epoch) -> bool {
    is_locked(&folder.join(epoch.to_string()))
}

/// Whether somebody holds the lock on the file. What can't be told counts as held: to wait for a worker that is gone costs
/// time, to take from one that lives what it is at costs its answer.
fn is_locked(path: &Path) -> bool {
    match File::open(path) {
        Ok(file) => matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)),
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    }
}

/// The epoch that is written as `text`.
fn parse(text: &str) -> Option<Epoch> {
    let (counter, nonce) = text.split_once('-')?;
    let epoch = Epoch { counter: counter.parse().ok()?, nonce: u64::from_str_radix(nonce, 16).ok()? };
    (epoch.to_string() == text).then_some(epoch)
}

/// What the name of a file begins with that is not locked yet.
const UNFINISHED: &str = ".";
const FILE_MODE: u32 = 0o600;
/// The keeper sees to it that far fewer workers leave at a time.
const FILES_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn epoch(counter: u64) -> Epoch {
        Epoch { counter, nonce: 0xfe }
    }

    #[test]
    fn t2_a_worker_is_present_for_as_long_as_it_says_so() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("leaving");
        assert!(present(&folder).is_empty() && !is_present(&folder, epoch(3)));
        let three = Presence::declare(&folder, epoch(3)).unwrap();
        let four = Presence::declare(&folder, epoch(4)).unwrap();
        assert_eq!(present(&folder), BTreeSet::from([epoch(3), epoch(4)]));
        assert!(is_present(&folder, epoch(3)) && !is_present(&folder, Epoch { nonce: 1, ..epoch(3) }));
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode(&folder), mode(&folder.join(epoch(3).to_string()))), (0o700, 0o600));
        drop(three);
        assert!(!is_present(&folder, epoch(3)));
        assert_eq!(present(&folder), BTreeSet::from([epoch(4)]));
        drop(four);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0, "nothing is left behind");
    }

    #[test]
    fn t6_what_a_killed_worker_leaves_is_removed_and_what_is_nobodys_is_left_alone() {
        let root = tempfile::tempdir().unwrap();
        for name in ["3-00000000000000fe", ".4-00000000000000fe", "notes", "5-fe"] {
            fs::write(root.path().join(name), "").unwrap();
        }
        assert!(present(root.path()).is_empty());
        let mut left: Vec<_> = fs::read_dir(root.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["5-fe", "notes"]);
    }

    #[test]
    fn an_epoch_reads_back_and_nothing_else_does() {
        let of = Epoch { counter: u64::MAX, nonce: 7 };
        assert_eq!(parse(&of.to_string()), Some(of));
        for junk in ["", "-", "1-", "1-1", "01-0000000000000001", "1-000000000000000G", "+1-0000000000000001"] {
            assert_eq!(parse(junk), None, "{junk}");
        }
    }
}
