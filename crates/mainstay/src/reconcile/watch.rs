//! Puts a configuration file in force when it has changed (T4), just as `mainstay reload` does: a file that is wrong
//! leaves everything as it is.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::engine::Engine;
use crate::engine::handover::Begun;

/// Runs until the worker ends. The first look is a reload: the file may have changed while no worker lived.
pub async fn run(engine: Arc<Engine>, file: PathBuf) {
    let (mut tried, mut failures) = (None, 0);
    let mut seen = Stamp::of(&file).ok();
    loop {
        tokio::select! {
            () = tokio::time::sleep(PAUSE) => {}
            () = engine.stopped() => return,
        }
        let before = std::mem::replace(&mut seen, Stamp::of(&file).ok());
        // One that is still being written is looked at again; one that is gone for a moment is being replaced.
        if seen.is_none() || seen != before || (seen == tried && failures == 0) {
            continue;
        }
        if tried != seen {
            (tried, failures) = (seen, 0);
        }
        match engine.succeed(false).await {
            Ok(begun) => {
                failures = 0;
                let begun = matches!(begun, Begun::Yes(_));
                tracing::debug!(file = %file.display(), begun, "the configuration file was looked at");
            }
            // The file may be wrong, another handover under way, the machine busy.
            Err(reason) => {
                tracing::warn!(file = %file.display(), reason, "the changed configuration is not put in force");
                failures = (failures + 1) % TRIES_MAX;
                tokio::time::sleep(PAUSE_ON_FAILURE * u32::from(failures > 0)).await;
            }
        }
    }
}

/// What tells one state of a file from another.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    length: u64,
    modified_s: i64,
    modified_ns: i64,
}

impl Stamp {
    fn of(file: &Path) -> io::Result<Self> {
        let known = std::fs::metadata(file)?;
        let (inode, length) = (known.ino(), known.size());
        Ok(Self { inode, length, modified_s: known.mtime(), modified_ns: known.mtime_nsec() })
    }
}

/// How often the file is looked at.
const PAUSE: Duration = Duration::from_secs(1);
/// How often a file that is not put in force is tried, and after which pause.
const TRIES_MAX: u32 = 3;
const PAUSE_ON_FAILURE: Duration = Duration::from_secs(10);
