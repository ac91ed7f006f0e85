//! What a child writes to stderr: the latest part in memory, more of it in a bounded log file.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use bytes::Bytes;

use crate::state::{StateError, open_private_file};
use crate::types::STDERR_TAIL_BYTES_MAX;

/// The latest bytes of one child's stderr.
#[derive(Debug, Default)]
pub(crate) struct Ring(VecDeque<u8>);

impl Ring {
    /// One that holds these bytes.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        let mut ring = Self::default();
        ring.push(bytes);
        ring
    }

    /// All that is kept.
    pub(crate) fn all(&self) -> Bytes {
        self.0.iter().copied().collect()
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        let kept = &bytes[bytes.len().saturating_sub(RING_BYTES_MAX)..];
        let excess = (self.0.len() + kept.len()).saturating_sub(RING_BYTES_MAX);
        self.0.drain(..excess);
        self.0.extend(kept);
    }

    /// The part that travels in notices.
    pub(crate) fn tail(&self) -> Bytes {
        self.0.iter().skip(self.0.len().saturating_sub(STDERR_TAIL_BYTES_MAX)).copied().collect()
    }
}

/// The log file of all children of one name.
#[derive(Debug)]
pub(crate) struct Log {
    path: PathBuf,
    /// `None` once writing has failed: that is said once, and the child goes on.
    file: Option<File>,
    bytes: u64,
}

impl Log {
    /// Opens the log of `name` in `dir` and goes on at its end.
    pub(crate) fn open(dir: &Path, name: &str) -> Self {
        let path = dir.join(format!("{}.stderr.log", file_name(name)));
        let (file, bytes) = match open_at_end(&path) {
            Ok((file, bytes)) => (Some(file), bytes),
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "a child's stderr is not logged");
                (None, 0)
            }
        };
        Self { path, file, bytes }
    }

    pub(crate) fn push(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() && self.file.is_some() {
            let room = usize::try_from(LOG_BYTES_MAX.saturating_sub(self.bytes)).unwrap_or(usize::MAX);
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            let written = if now.is_empty() { self.rotate() } else { self.append(now) };
            if let Err(error) = written {
                tracing::warn!(path = %self.path.display(), %error, "a child's stderr is not logged any more");
                self.file = None;
            }
            bytes = later;
        }
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        if let Some(file) = &mut self.file {
            file.write_all(bytes)?;
            self.bytes += bytes.len() as u64;
        }
        Ok(())
    }

    fn rotate(&mut self) -> io::Result<()> {
        let mut older = self.path.clone().into_os_string();
        older.push(".1");
        fs::rename(&self.path, older)?;
        let (file, bytes) = open_at_end(&self.path).map_err(io::Error::other)?;
        (self.file, self.bytes) = (Some(file), bytes);
        Ok(())
    }
}

fn open_at_end(path: &Path) -> Result<(File, u64), StateError> {
    let mut file = open_private_file(path)?;
    let bytes = file.seek(SeekFrom::End(0)).map_err(StateError::io("append to", path))?;
    Ok((file, bytes))
}

/// `name` as a file name: nothing that could lead elsewhere or hide.
pub(crate) fn file_name(name: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let mut safe: String = name.chars().take(NAME_CHARS_MAX).map(|c| if is_plain(c) { c } else { '_' }).collect();
    if safe.is_empty() || safe.starts_with('.') {
        safe.insert(0, '_');
    }
    safe
}

/// The files that hold what the children of `name` wrote to stderr, within a state directory: the older one, which need not
/// be there, and the one that is written. Once that is full it takes the older one's place.
pub fn stderr_logs(state_dir: &Path, name: &str) -> [PathBuf; 2] {
    let file = format!("{}.stderr.log", file_name(name));
    let dir = logs_dir(state_dir);
    [dir.join(format!("{file}.1")), dir.join(file)]
}

/// The directory of logs within a state directory.
pub(crate) fn logs_dir(state_dir: &Path) -> PathBuf {
    state_dir.join("logs")
}

/// How much of a child's stderr is kept in memory, in bytes.
pub(crate) const RING_BYTES_MAX: usize = 64 * 1024;

/// How long a log file gets before it becomes the older one, in bytes.
const LOG_BYTES_MAX: u64 = 1024 * 1024;

/// The longest name of a log file, without its extension, in characters.
const NAME_CHARS_MAX: usize = 100;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c2_the_ring_keeps_the_latest() {
        let mut ring = Ring::default();
        ring.push(b"old");
        ring.push(&vec![b'x'; RING_BYTES_MAX - 1]);
        ring.push(b"end");
        assert_eq!(ring.0.len(), RING_BYTES_MAX);
        assert!(ring.tail().ends_with(b"xend"));
        assert_eq!(ring.tail().len(), STDERR_TAIL_BYTES_MAX);
        ring.push(&vec![b'y'; 3 * RING_BYTES_MAX]);
        assert_eq!(ring.0.len(), RING_BYTES_MAX);
    }

    #[test]
    fn c2_the_log_is_bounded_and_rotated_once() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = Log::open(dir.path(), "files");
        for round in 0..5 {
            log.push(&vec![b'0' + round; 700_000]);
        }
        drop(log);
        let mut log = Log::open(dir.path(), "files");
        log.push(b"again");
        let (path, older) = (dir.path().join("files.stderr.log"), dir.path().join("files.stderr.log.1"));
        let newest = fs::read(path).unwrap();
        assert!(newest.ends_with(b"4again"));
        assert!(newest.len() as u64 <= LOG_BYTES_MAX);
        assert_eq!(fs::metadata(older).unwrap().len(), LOG_BYTES_MAX);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_name_leads_nowhere_else() {
        for (name, expected) in [("files", "files"), ("../x", "_.._x"), ("", "_"), ("a/b c", "a_b_c"), (".h", "_.h")] {
            assert_eq!(file_name(name), expected);
        }
    }
}
