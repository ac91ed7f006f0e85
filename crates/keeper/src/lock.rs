//! One gateway per state directory: an operating system lock, and who holds it (requirement T6).

use std::fmt;
use std::fs::{self, File, TryLockError};
use std::io::{self, Write as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::identity::ProcessIdentity;
use crate::record::{Record, Subject};
use crate::state::{StateError, ensure_private_dir, open_private_file};

/// The lock on a state directory. Held until it is dropped or the process ends, however that happens.
#[derive(Debug)]
pub struct Lock {
    file: File,
}

/// Who holds the lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// The process.
    pub identity: ProcessIdentity,
    /// What it said about itself, such as the address it listens on.
    pub note: String,
}

impl Owner {
    /// Whether exactly that process still runs.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.identity.is_alive()
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} ({})", self.identity, self.note)
    }
}

/// Why the lock was not got.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another gateway has it.
    #[error("`{}` is in use by {}", .state_dir.display(), .owner.as_ref().map_or_else(|| "an unknown process".to_owned(), Owner::to_string))]
    Held {
        /// The directory asked for.
        state_dir: PathBuf,
        /// Its owner, unless that has left no readable word.
        owner: Option<Owner>,
    },
    /// The directory or the lock file can't be used.
    #[error(transparent)]
    State(#[from] StateError),
}

/// Takes the lock on `state_dir` for the calling process, or says who has it.
///
/// The directory is made if it is missing. `owner_note` is for people: what they see when they start a second gateway.
/// Answers within two seconds.
///
/// # Errors
/// [`LockError::Held`] names the owner.
pub fn acquire_lock(state_dir: &Path, owner_note: &str) -> Result<Lock, LockError> {
    ensure_private_dir(state_dir)?;
    let path = lock_path(state_dir);
    let file = open_private_file(&path)?;
    let give_up_at = Instant::now() + CONTENTION_BOUND;
    loop {
        match file.try_lock() {
            Ok(()) => break,
            Err(TryLockError::Error(source)) => return Err(StateError::io("lock", &path)(source).into()),
            Err(TryLockError::WouldBlock) => {}
        }
        // Without a living owner in the file its holder has only just started or is about to be gone.
        let owner = read_owner(state_dir);
        if owner.as_ref().is_some_and(Owner::is_alive) || Instant::now() >= give_up_at {
            return Err(LockError::Held { state_dir: state_dir.to_owned(), owner });
        }
        thread::sleep(CONTENTION_POLL);
    }
    let mut lock = Lock { file };
    lock.sign(owner_note).map_err(StateError::io("write", &path))?;
    Ok(lock)
}

/// Who holds the lock on `state_dir`, or held it when it was killed: ask [`Owner::is_alive`]. `None` if nobody does.
#[must_use]
pub fn read_owner(state_dir: &Path) -> Option<Owner> {
    let record = Record::decode(&fs::read(lock_path(state_dir)).ok()?)?;
    (record.subject == Subject::Owner).then_some(())?;
    Some(Owner { identity: record.identity?, note: record.text })
}

impl Lock {
    /// The lock that a descriptor of the lock file holds already, because it was carried over an execution.
    pub(crate) fn from_descriptor(descriptor: OwnedFd) -> Self {
        Self { file: descriptor.into() }
    }

    fn sign(&mut self, note: &str) -> io::Result<()> {
        let identity = Some(ProcessIdentity::of_self()?);
        let record = Record { subject: Subject::Owner, identity, text: note.to_owned() };
        self.file.set_len(0)?;
        self.file.write_all(record.encode().as_bytes())
    }
}

impl AsFd for Lock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // The file stays: were it removed, two processes could hold locks on two files of the same name. A note that
        // can't be erased names a process that no longer runs, which readers notice.
        let _ = self.file.set_len(0);
    }
}

fn lock_path(state_dir: &Path) -> PathBuf {
    state_dir.join("lock")
}

/// How long a holder that can't be named is waited for.
const CONTENTION_BOUND: Duration = Duration::from_millis(1000);

/// How often it is looked at meanwhile.
const CONTENTION_POLL: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t6_a_second_holder_is_refused_and_told_the_owner() {
        let root = tempfile::tempdir().unwrap();
        let state_dir = root.path().join("state");
        let lock = acquire_lock(&state_dir, "127.0.0.1:7717").unwrap();
        let asked_at = Instant::now();
        let refused = acquire_lock(&state_dir, "other").unwrap_err();
        assert!(asked_at.elapsed() < Duration::from_secs(2));
        let message = refused.to_string();
        assert!(message.contains(&std::process::id().to_string()), "{message}");
        assert!(message.contains("127.0.0.1:7717"), "{message}");
        assert!(read_owner(&state_dir).unwrap().is_alive());

        drop(lock);
        assert_eq!(read_owner(&state_dir), None);
        acquire_lock(&state_dir, "next").unwrap();
    }

    #[test]
    fn t6_a_stale_note_does_not_keep_anybody_out() {
        let root = tempfile::tempdir().unwrap();
        let boot = crate::identity::BootId::from_bytes([9; 16]);
        let stale = ProcessIdentity::from_parts(std::process::id(), 1, boot);
        let record = Record { subject: Subject::Owner, identity: stale, text: "old".to_owned() };
        fs::write(root.path().join("lock"), record.encode()).unwrap();
        assert!(!read_owner(root.path()).unwrap().is_alive());
        let _lock = acquire_lock(root.path(), "new").unwrap();
        assert_eq!(read_owner(root.path()).unwrap().note, "new");
    }

    #[test]
    fn t6_a_holder_without_a_note_is_refused_within_two_seconds() {
        let root = tempfile::tempdir().unwrap();
        let file = open_private_file(&root.path().join("lock")).unwrap();
        file.try_lock().unwrap();
        let asked_at = Instant::now();
        assert!(matches!(acquire_lock(root.path(), "x"), Err(LockError::Held { owner: None, .. })));
        assert!(asked_at.elapsed() < Duration::from_secs(2));
    }
}
