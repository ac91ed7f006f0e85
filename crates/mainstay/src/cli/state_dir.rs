//! The state directory before anybody trusts it: whose it is, and whose is what lies in it (T6).

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};

use super::failure::Failure;

/// Makes sure that the directory is there, private, and that nobody else has put anything into it. What comes back is the
/// directory itself, if `named` was a link to it.
///
/// # Errors
/// Exit code 2 if the directory is in use for something else, 1 if it or a part of it is somebody else's or can't be
/// used. Nothing in it was changed then.
pub(super) fn prepare(named: &Path) -> Result<PathBuf, Failure> {
    let state_dir = resolved(named)?;
    refuse_foreign(&state_dir)?;
    mainstay_keeper::ensure_private_dir(&state_dir)
        .with_context(|| format!("prepare the state directory `{}`", state_dir.display()))
        .map_err(|error| Failure::from(error).hint("choose another with `--state-dir DIR`"))?;
    refuse_planted(&state_dir)?;
    for folder in OWN_FOLDERS {
        refuse_planted(&state_dir.join(folder))?;
    }
    Ok(state_dir)
}

/// The state directory that `named` is, or leads to by a link that the user, or root, has made: to a disk of its own, say.
///
/// # Errors
/// Exit code 1 if the link is somebody else's, or leads to nothing.
pub(super) fn resolved(named: &Path) -> Result<PathBuf, Failure> {
    let is_link = fs::symlink_metadata(named).is_ok_and(|found| found.is_symlink());
    if !is_link {
        return Ok(named.to_owned());
    }
    refuse_of_another(named)?;
    fs::canonicalize(named)
        .with_context(|| format!("follow the link `{}` to the state directory", named.display()))
        .map_err(|error| Failure::from(error).hint("make the directory that it leads to, or remove the link"))
}

/// Refuses a directory with somebody else's files in it: making it private would shut their owner's other users out.
fn refuse_foreign(state_dir: &Path) -> Result<(), Failure> {
    let names = match fs::read_dir(state_dir) {
        Ok(entries) => entries.take(ENTRIES_LOOKED_AT_MAX).filter_map(|entry| Some(entry.ok()?.file_name())),
        // Not there, or not to be read: preparing it says so.
        Err(_) => return Ok(()),
    };
    let mut empty = true;
    for name in names {
        if OWN_FILES.iter().any(|own| name == *own) {
            return Ok(());
        }
        empty = false;
    }
    if empty {
        return Ok(());
    }
    let cause = anyhow!("`{}` is not empty and no state directory of Mainstay", state_dir.display());
    Err(Failure::usage(cause).hint("name an empty or a new one with `--state-dir DIR`; nothing was changed"))
}

/// Refuses what another user has put into a directory while that was open to others, links to elsewhere above all: it is
/// neither read nor written through.
fn refuse_planted(folder: &Path) -> Result<(), Failure> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(anyhow!(error).context(format!("read `{}`", folder.display())).into()),
    };
    for entry in entries.take(ENTRIES_LOOKED_AT_MAX) {
        refuse_of_another(&entry.with_context(|| format!("read `{}`", folder.display()))?.path())?;
    }
    Ok(())
}

/// Refuses an entry that neither the user nor root has made, and a link to what is not theirs.
fn refuse_of_another(path: &Path) -> Result<(), Failure> {
    let user = rustix::process::geteuid().as_raw();
    let Ok(found) = fs::symlink_metadata(path) else {
        // Gone meanwhile.
        return Ok(());
    };
    let owner = [fs::metadata(path).ok(), Some(found)]
        .into_iter()
        .flatten()
        .map(|of| of.uid())
        .find(|owner| *owner != user && *owner != ROOT);
    let Some(owner) = owner else { return Ok(()) };
    let cause = anyhow!("`{}` is of user {owner}, not of user {user}, or leads there", path.display());
    Err(Failure::from(cause).hint("see who has put it there, and remove it; nothing was changed"))
}

/// Any of these makes a directory one of Mainstay's.
const OWN_FILES: &[&str] = &["lock", "gateway.json", "ledger.db", "admin.token", "keys"];
/// Where else files of Mainstay's are.
const OWN_FOLDERS: &[&str] = &["children", "keys", "leaving", "logs"];
/// More than any state directory holds.
const ENTRIES_LOOKED_AT_MAX: usize = 10_000;
/// The user who may do anything anyway.
const ROOT: u32 = 0;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_directory_of_somebody_else_is_never_taken() {
        let dir = tempfile::tempdir().unwrap();
        assert!(refuse_foreign(dir.path()).is_ok() && refuse_foreign(&dir.path().join("new")).is_ok());
        fs::write(dir.path().join("mine.txt"), "").unwrap();
        assert!(refuse_foreign(dir.path()).is_err());
        fs::write(dir.path().join("ledger.db"), "").unwrap();
        assert!(refuse_foreign(dir.path()).is_ok());
    }

    #[test]
    fn t6_a_link_of_ones_own_leads_to_the_directory_itself() {
        let dir = tempfile::tempdir().unwrap();
        let (real, link) = (dir.path().join("real"), dir.path().join("link"));
        symlink(&real, &link).unwrap();
        assert!(prepare(&link).is_err(), "it leads to nothing");
        fs::create_dir(&real).unwrap();
        assert_eq!(prepare(&link).unwrap(), fs::canonicalize(&real).unwrap());
        symlink("/nowhere/at/all", real.join("lock")).unwrap();
        assert!(prepare(&link).is_ok(), "one's own link is one's own affair");
    }
}
