//! Which build of the program this process runs: its version, and what tells two builds of one version apart.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::sync::OnceLock;

/// The version of the running program with its build, as in `0.1.0+3f2a9c01d2e4` (Semantic Versioning, section 10). The
/// build is what the linker has drawn from the program's contents; where it has left nothing, a digest of the file. Two
/// programs with other contents have other builds. Without a look at the own file, the version alone.
///
/// The first call reads the program's file, of which a few KiB in general; it may wait for the file system.
pub fn version() -> &'static str {
    static VERSION: OnceLock<String> = OnceLock::new();
    VERSION.get_or_init(|| {
        let number = env!("CARGO_PKG_VERSION");
        // What runs, and not what has taken its name since (C9).
        let file = File::open("/proc/self/exe").or_else(|_| File::open(std::env::current_exe()?));
        match file.and_then(build_of) {
            Ok(build) => format!("{number}+{build}"),
            Err(_) => number.to_owned(),
        }
    })
}

fn build_of(mut file: impl Read + Seek) -> io::Result<String> {
    let id = match note(&mut file)? {
        Some(id) => id,
        None => digest(&mut file)?,
    };
    Ok(id.iter().take(BUILD_BYTES).map(|byte| format!("{byte:02x}")).collect())
}

/// The linker's build id: the note of type 3 of `GNU` in a 64-bit little-endian ELF file (System V ABI, Note Section).
fn note(file: &mut (impl Read + Seek)) -> io::Result<Option<Vec<u8>>> {
    let Some(header) = part(file, 0, ELF_HEADER_BYTES)? else { return Ok(None) };
    if header[..6] != *b"\x7fELF\x02\x01" {
        return Ok(None);
    }
    let (table, size, count) = (u64_at(&header, 32), u16_at(&header, 54), u16_at(&header, 56));
    for index in 0..u64::from(count) {
        let at = index.checked_mul(size.into()).and_then(|behind| table.checked_add(behind));
        let Some(segment) = at.map(|at| part(file, at, PROGRAM_HEADER_BYTES)).transpose()?.flatten() else { break };
        let (offset, length) = (u64_at(&segment, 8), u64_at(&segment, 32));
        if u32_at(&segment, 0) != NOTE_SEGMENT || length > NOTES_BYTES_MAX {
            continue;
        }
        let notes = part(file, offset, usize::try_from(length).unwrap_or(0))?;
        if let Some(id) = notes.and_then(|notes| build_id(&notes)) {
            return Ok(Some(id));
        }
    }
    Ok(None)
}

/// The build id among the notes of a segment.
fn build_id(mut notes: &[u8]) -> Option<Vec<u8>> {
    while notes.len() >= NOTE_HEADER_BYTES {
        let (header, rest) = notes.split_at(NOTE_HEADER_BYTES);
        let [name, described] = [0, 4].map(|at| usize::try_from(u32_at(header, at)).unwrap_or(usize::MAX));
        let padded = |length: usize| length.checked_next_multiple_of(NOTE_ALIGNMENT);
        let (name_bytes, rest) = (rest.get(..name)?, rest.get(padded(name)?..)?);
        let description = rest.get(..described)?;
        if name_bytes == b"GNU\0" && u32_at(header, 8) == BUILD_ID_NOTE && described >= BUILD_BYTES {
            return Some(description.to_vec());
        }
        notes = rest.get(padded(described)?..).unwrap_or_default();
    }
    None
}

fn digest(file: &mut (impl Read + Seek)) -> io::Result<Vec<u8>> {
    file.seek(SeekFrom::Start(0))?;
    let mut context = aws_lc_rs::digest::Context::new(&aws_lc_rs::digest::SHA256);
    let mut buffer = vec![0; DIGEST_CHUNK_BYTES];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(context.finish().as_ref().to_vec()),
            count => context.update(&buffer[..count]),
        }
    }
}

/// `length` bytes from `at`; `None` if the file ends before.
fn part(file: &mut (impl Read + Seek), at: u64, length: usize) -> io::Result<Option<Vec<u8>>> {
    file.seek(SeekFrom::Start(at))?;
    let mut bytes = vec![0; length];
    match file.read_exact(&mut bytes) {
        Ok(()) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Err(error) => Err(error),
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::try_from(number_at(bytes, at, 2)).unwrap_or_default()
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::try_from(number_at(bytes, at, 4)).unwrap_or_default()
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    number_at(bytes, at, 8)
}

fn number_at(bytes: &[u8], at: usize, length: usize) -> u64 {
    bytes[at..at + length].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// How much of a build id is shown: enough for any two builds that somebody has to tell apart.
const BUILD_BYTES: usize = 6;
const ELF_HEADER_BYTES: usize = 64;
const PROGRAM_HEADER_BYTES: usize = 56;
const NOTE_SEGMENT: u32 = 4;
const NOTE_HEADER_BYTES: usize = 12;
const NOTE_ALIGNMENT: usize = 4;
const BUILD_ID_NOTE: u32 = 3;
/// More than any linker writes.
const NOTES_BYTES_MAX: u64 = 64 * 1024;
const DIGEST_CHUNK_BYTES: usize = 256 * 1024;

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    /// An ELF file with one segment of notes.
    fn elf(notes: &[u8]) -> Vec<u8> {
        let mut file = vec![0; ELF_HEADER_BYTES + PROGRAM_HEADER_BYTES];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        file[32] = 64;
        file[54] = 56;
        file[56] = 1;
        file[64] = 4;
        file[64 + 8] = 120;
        file[64 + 32] = u8::try_from(notes.len()).unwrap();
        file.extend_from_slice(notes);
        file
    }

    fn note_of(kind: u8, name: &[u8], description: &[u8]) -> Vec<u8> {
        let length = |bytes: &[u8]| [u8::try_from(bytes.len()).unwrap(), 0, 0, 0];
        let mut note = [length(name), length(description), [kind, 0, 0, 0]].concat();
        for part in [name, description] {
            note.extend_from_slice(part);
            note.resize(note.len().next_multiple_of(4), 0);
        }
        note
    }

    #[test]
    fn t2_builds_are_told_apart_by_the_linkers_note_or_by_all_of_their_contents() {
        let build = |bytes: &[u8]| build_of(Cursor::new(bytes.to_vec())).unwrap();
        let notes = [note_of(1, b"GNU\0", &[9; 16]), note_of(3, b"GNU\0", &[0xab; 20])].concat();
        assert_eq!(build(&elf(&notes)), "abababababab");
        // Without it, in whatever else, and in files that are cut off.
        let whole = elf(&notes);
        for end in 0..whole.len() {
            assert_eq!(build(&whole[..end]).len(), 12, "cut at {end}");
        }
        for other in [elf(&note_of(3, b"GO\0\0", &[1; 20])), elf(&[0xff; 40]), b"#!/bin/sh\n".to_vec()] {
            assert_ne!(build(&other), build(&[other.as_slice(), b"x"].concat()));
        }
    }

    #[test]
    fn t2_the_running_program_has_a_build() {
        let (number, build) = version().split_once('+').unwrap();
        assert_eq!(number, env!("CARGO_PKG_VERSION"));
        assert!(build.len() == 12 && build.bytes().all(|byte| byte.is_ascii_hexdigit()), "{build}");
    }
}
