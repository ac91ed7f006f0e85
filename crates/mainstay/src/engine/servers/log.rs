//! What the children of a server wrote to standard error, as the keeper keeps it: a bounded file, and the one before it.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mainstay_core::code::Code;
use mainstay_keeper::stderr_logs;
use schemars::JsonSchema;
use serde::Serialize;

use crate::engine::{Engine, Refused};

/// A part of a server's log.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct LogView {
    /// The text, as the children wrote it but for configured values, which are masked, and bytes that are no text.
    pub text: String,
    /// Where it goes on: the `after` of the next question. What is not written yet comes there later.
    pub next: String,
    /// Whether something between `after` and this text is not kept any more.
    pub gap: bool,
}

/// A place in a log: which file, and where in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursor {
    inode: u64,
    offset: u64,
}

impl Cursor {
    /// The place written as `text`, as [`LogView::next`] is.
    pub fn parse(text: &str) -> Option<Self> {
        let (inode, offset) = text.split_once('-')?;
        Some(Self { inode: inode.parse().ok()?, offset: offset.parse().ok()? })
    }
}

impl std::fmt::Display for Cursor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.inode, self.offset)
    }
}

/// Which part of a log is asked for.
#[derive(Clone, Copy, Debug)]
pub enum Part {
    /// The last lines, so many.
    Last(usize),
    /// What comes behind this place.
    After(Cursor),
}

impl Engine {
    /// A part of what the children of `name` wrote to standard error.
    ///
    /// # Errors
    /// [`Code::ServerUnknown`]; [`Code::RequestInvalid`] for a server without children of ours; [`Code::Unavailable`] if
    /// the log can't be read.
    pub async fn server_log(self: &Arc<Self>, name: &str, part: Part) -> Result<LogView, Refused> {
        let server = Arc::clone(&self.served(name)?.server);
        if server.is_http() {
            let text = format!("server `{name}` is reached by HTTP; what it writes is kept where it runs");
            return Err(Refused { server: Some(server.name.clone()), ..Refused::new(Code::RequestInvalid, text) });
        }
        let engine = Arc::clone(self);
        let read = tokio::task::spawn_blocking(move || {
            let chunk = read(&stderr_logs(&engine.state_dir, server.name.as_str()), part)?;
            let text = String::from_utf8_lossy(&chunk.bytes);
            let text = engine.upstreams.masked(&server, &text);
            io::Result::Ok(LogView { text, next: chunk.next.to_string(), gap: chunk.gap })
        });
        match read.await {
            Ok(Ok(view)) => Ok(view),
            Ok(Err(error)) => {
                Err(Refused::new(Code::Unavailable, format!("the log can't be read now: {}", error.kind())))
            }
            Err(_) => Err(Refused::new(Code::Internal, "reading the log failed")),
        }
    }
}

/// What was read.
struct Chunk {
    bytes: Vec<u8>,
    next: Cursor,
    gap: bool,
}

/// An open log file.
struct Open {
    file: File,
    inode: u64,
    bytes: u64,
}

/// Reads a part of the files at `paths`, the older one first. Files that are not there are empty.
fn read(paths: &[PathBuf; 2], part: Part) -> io::Result<Chunk> {
    let mut files = Vec::with_capacity(paths.len());
    for path in paths {
        files.extend(open(path)?);
    }
    // The older one may have been replaced by the other between the two looks.
    files.dedup_by_key(|file| file.inode);
    let Some(newest) = files.last() else {
        return Ok(Chunk { bytes: Vec::new(), next: Cursor { inode: 0, offset: 0 }, gap: false });
    };
    let end = Cursor { inode: newest.inode, offset: newest.bytes };
    match part {
        Part::Last(lines) => Ok(Chunk { bytes: last_lines(&mut files, lines)?, next: end, gap: false }),
        Part::After(cursor) => {
            let known = files.iter().position(|file| file.inode == cursor.inode && cursor.offset <= file.bytes);
            let (first, offset) = known.map_or((0, 0), |first| (first, cursor.offset));
            // A place in no file at all is the beginning of everything.
            let gap = known.is_none() && cursor.inode != 0;
            forward(&mut files[first..], offset, gap)
        }
    }
}

fn open(path: &Path) -> io::Result<Option<Open>> {
    match File::open(path) {
        Ok(file) => {
            let found = file.metadata()?;
            Ok(Some(Open { file, inode: found.ino(), bytes: found.len() }))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The last `lines` lines of all files together, as far as they fit.
fn last_lines(files: &mut [Open], lines: usize) -> io::Result<Vec<u8>> {
    let (mut room, mut tail) = (CHUNK_BYTES_MAX, Vec::new());
    for file in files.iter_mut().rev() {
        let wanted = file.bytes.min(room);
        let mut part = read_at(file, file.bytes - wanted, wanted)?;
        room -= wanted;
        part.append(&mut tail);
        tail = part;
    }
    let body = tail.strip_suffix(b"\n").unwrap_or(&tail);
    let from = if lines == 0 {
        tail.len()
    } else {
        let mut ends = body.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n');
        // Without so many lines, all of it; but not the rest of a line whose beginning did not fit.
        let first_whole =
            if room == 0 { body.iter().position(|byte| *byte == b'\n').map_or(0, |at| at + 1) } else { 0 };
        ends.nth(lines - 1).map_or(first_whole, |(at, _)| at + 1)
    };
    tail.drain(..from);
    Ok(tail)
}

/// What follows from `offset` in the first of `files`, as far as it fits. Ends behind a whole line if it does not end
/// with the log: a value that is masked is not to be cut.
fn forward(files: &mut [Open], offset: u64, gap: bool) -> io::Result<Chunk> {
    let (mut from, mut room, mut bytes) = (offset, CHUNK_BYTES_MAX, Vec::new());
    let mut next = Cursor { inode: 0, offset: 0 };
    for file in files {
        let wanted = (file.bytes - from).min(room);
        let mut part = read_at(file, from, wanted)?;
        let is_cut = from + wanted < file.bytes;
        if is_cut && let Some(end) = part.iter().rposition(|byte| *byte == b'\n') {
            part.truncate(end + 1);
        }
        next = Cursor { inode: file.inode, offset: from + part.len() as u64 };
        bytes.append(&mut part);
        if is_cut {
            break;
        }
        (from, room) = (0, room - wanted);
    }
    Ok(Chunk { bytes, next, gap })
}

fn read_at(file: &mut Open, offset: u64, bytes: u64) -> io::Result<Vec<u8>> {
    let mut read = Vec::new();
    file.file.seek(SeekFrom::Start(offset))?;
    (&file.file).take(bytes).read_to_end(&mut read)?;
    Ok(read)
}

/// The longest part of a log in one answer.
const CHUNK_BYTES_MAX: u64 = 256 * 1024;
/// How many lines may be asked for.
pub const LINES_MAX: usize = 10_000;
/// How many lines there are if nobody says.
pub const LINES_DEFAULT: usize = 100;

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn paths(folder: &Path) -> [PathBuf; 2] {
        [folder.join("log.1"), folder.join("log")]
    }

    fn text(chunk: &Chunk) -> &str {
        std::str::from_utf8(&chunk.bytes).unwrap()
    }

    #[test]
    fn c2_the_last_lines_are_found_over_both_files() {
        let folder = tempfile::tempdir().unwrap();
        let paths = paths(folder.path());
        assert_eq!(text(&read(&paths, Part::Last(3)).unwrap()), "");
        fs::write(&paths[1], "c\nd\n").unwrap();
        assert_eq!(text(&read(&paths, Part::Last(3)).unwrap()), "c\nd\n");
        fs::write(&paths[0], "a\nb\n").unwrap();
        for (lines, expected) in [(0, ""), (1, "d\n"), (2, "c\nd\n"), (3, "b\nc\nd\n"), (9, "a\nb\nc\nd\n")] {
            assert_eq!(text(&read(&paths, Part::Last(lines)).unwrap()), expected);
        }
        fs::write(&paths[1], "c\nno end").unwrap();
        assert_eq!(text(&read(&paths, Part::Last(1)).unwrap()), "no end");
    }

    #[test]
    fn c2_a_reader_that_follows_misses_nothing_over_a_rotation_and_is_told_if_it_does() {
        let folder = tempfile::tempdir().unwrap();
        let paths = paths(folder.path());
        let follow = |after: Cursor| {
            let chunk = read(&paths, Part::After(after)).unwrap();
            (text(&chunk).to_owned(), chunk.next, chunk.gap)
        };
        let (_, start, _) = follow(Cursor { inode: 0, offset: 0 });
        fs::write(&paths[1], "one\n").unwrap();
        let (said, first, gap) = follow(start);
        assert_eq!((&*said, gap), ("one\n", false));
        assert_eq!(follow(first), (String::new(), first, false));
        assert_eq!(Cursor::parse(&first.to_string()), Some(first));
        fs::write(&paths[1], "one\ntwo\n").unwrap();
        fs::rename(&paths[1], &paths[0]).unwrap();
        fs::write(&paths[1], "three\n").unwrap();
        let (said, second, gap) = follow(first);
        assert_eq!((&*said, gap), ("two\nthree\n", false));
        assert_eq!(follow(second).0, "");
        assert!(follow(Cursor { inode: u64::MAX, offset: 5 }).2);
        assert_eq!(Cursor::parse("1"), None);
    }

    #[test]
    fn c2_a_long_log_comes_in_parts_of_whole_lines() {
        let folder = tempfile::tempdir().unwrap();
        let paths = paths(folder.path());
        let log = "a line of some length\n".repeat(30_000);
        fs::write(&paths[1], &log).unwrap();
        let (mut all, mut after, mut parts) = (String::new(), Cursor { inode: 0, offset: 0 }, 0);
        while all.len() < log.len() {
            let chunk = read(&paths, Part::After(after)).unwrap();
            assert!(text(&chunk).ends_with('\n') && chunk.bytes.len() as u64 <= CHUNK_BYTES_MAX);
            all.push_str(text(&chunk));
            (after, parts) = (chunk.next, parts + 1);
        }
        assert!(all == log && parts == 3, "{parts}");
        let tail = read(&paths, Part::Last(LINES_MAX * 10)).unwrap();
        assert!(text(&tail).starts_with("a line") && tail.bytes.len() as u64 <= CHUNK_BYTES_MAX);
    }
}
