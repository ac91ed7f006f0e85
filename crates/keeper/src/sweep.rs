//! What a killed keeper left behind is ended before anything new is started.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::identity::BootId;
use crate::record::{Record, Subject, records_dir};
use crate::state::{StateError, ensure_private_dir, remove_file};
use crate::tree::{Census, Tree, signal_all};

/// What was found of an earlier keeper.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Records of processes that had ended already, or whose pid is somebody else's now.
    pub stale: usize,
    /// Records whose processes were ended.
    pub ended: usize,
    /// Files that were no records.
    pub junk: usize,
    /// Records whose processes could not be ended; they are kept.
    pub left: usize,
}

/// Ends every process tree that an earlier keeper of `state_dir` recorded and that still runs: first with TERM, after
/// two seconds with KILL. A recorded pid that is somebody else's now is left alone (requirement C6).
///
/// To be called under the lock; [`run`](crate::run) does it by itself. Whoever binds listening sockets before that may
/// call it first, because a leftover worker still holds the old ones.
///
/// # Errors
/// When the records or `/proc` can't be read.
pub fn sweep(state_dir: &Path) -> Result<Swept, StateError> {
    let dir = records_dir(state_dir);
    ensure_private_dir(state_dir)?;
    ensure_private_dir(&dir)?;
    let mut swept = Swept::default();
    let mut trees = read_records(&dir, &mut swept)?;
    let found = trees.len();
    let census = census()?;
    trees.retain(|(path, tree)| is_there(tree, &census) || !forget(path));
    swept.stale = found - trees.len();
    if trees.is_empty() {
        return Ok(swept);
    }
    tracing::warn!(trees = trees.len(), "ending what an earlier keeper left behind");
    let alive = trees.len();
    for (how, bound) in [(Signal::TERM, TERM_GRACE), (Signal::KILL, KILL_BOUND)] {
        end(&mut trees, how, bound)?;
    }
    swept.left = trees.len();
    swept.ended = alive - trees.len();
    for (path, _) in &trees {
        tracing::error!(record = %path.display(), "processes of an earlier keeper can't be ended");
    }
    Ok(swept)
}

/// Signals what is left of `trees` and waits until it is gone, at most for `bound`. Gone trees are taken out.
fn end(trees: &mut Vec<(PathBuf, Tree)>, how: Signal, bound: Duration) -> Result<(), StateError> {
    let give_up_at = Instant::now() + bound;
    let mut is_first = true;
    loop {
        let census = census()?;
        trees.retain_mut(|(path, tree)| {
            let members: Vec<_> = census.members(tree).iter().map(|seen| seen.identity).collect();
            tree.known.extend(&members);
            // TERM once, so that nobody's tidying up is interrupted by a second one. KILL again and again, for what was
            // started meanwhile.
            if is_first || how == Signal::KILL {
                signal_all(&members, how);
            }
            !members.is_empty() || !forget(path)
        });
        is_first = false;
        if trees.is_empty() || Instant::now() >= give_up_at {
            return Ok(());
        }
        thread::sleep(POLL);
    }
}

fn read_records(dir: &Path, swept: &mut Swept) -> Result<Vec<(PathBuf, Tree)>, StateError> {
    let read = |source: io::Error| StateError::io("read", dir)(source);
    let mut trees = Vec::new();
    for entry in fs::read_dir(dir).map_err(read)? {
        let path = entry.map_err(read)?.path();
        match tree_of(&path) {
            Some(tree) => trees.push((path, tree)),
            None => {
                swept.junk += 1;
                tracing::warn!(path = %path.display(), "removing a file that is no record of a child");
                forget(&path);
            }
        }
    }
    Ok(trees)
}

fn tree_of(path: &Path) -> Option<Tree> {
    let is_small_file = fs::symlink_metadata(path).is_ok_and(|it| it.is_file() && it.len() <= RECORD_BYTES_MAX);
    let record = if is_small_file { Record::decode(&fs::read(path).ok()?)? } else { return None };
    let (has_members, marker) = match record.subject {
        Subject::Child => (true, record.text),
        Subject::Worker => (false, String::new()),
        Subject::Owner => return None,
    };
    Some(Tree { leader: record.identity, has_members, marker, known: BTreeSet::new() })
}

/// Whether anything of the tree runs. Nothing outlives the boot it was started in.
fn is_there(tree: &Tree, census: &Census) -> bool {
    let is_of_this_boot = |boot: BootId| BootId::current().is_ok_and(|current| current == boot);
    tree.leader.is_none_or(|leader| is_of_this_boot(leader.boot())) && !census.members(tree).is_empty()
}

fn census() -> Result<Census, StateError> {
    Census::of_everybody().map_err(StateError::io("read", Path::new("/proc")))
}

/// Removes a record; `false` if it is still there.
fn forget(path: &Path) -> bool {
    match remove_file(path) {
        Ok(()) => true,
        Err(error) => {
            tracing::warn!(error = &error as &dyn std::error::Error, "could not remove a record");
            false
        }
    }
}

/// How long a leftover has to end by itself.
const TERM_GRACE: Duration = Duration::from_secs(2);

/// How long a killed leftover is waited for.
const KILL_BOUND: Duration = Duration::from_secs(5);

/// How often it is looked at meanwhile.
const POLL: Duration = Duration::from_millis(20);

/// The longest record, in bytes.
const RECORD_BYTES_MAX: u64 = 4096;
