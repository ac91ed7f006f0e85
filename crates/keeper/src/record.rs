//! Small text files that name a process: who holds the lock, which children were started.

use std::path::{Path, PathBuf};

use crate::identity::{BootId, ProcessIdentity};
use crate::state::{StateError, remove_file, write_whole_file};

/// What a record file says: what it is about, a process (if it was started already) and one line of text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) subject: Subject,
    pub(crate) identity: Option<ProcessIdentity>,
    /// The owner's note, or the child's marker.
    pub(crate) text: String,
}

/// What a record is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Subject {
    /// The holder of the lock.
    Owner,
    /// A child; its text is its marker.
    Child,
    /// A worker.
    Worker,
}

impl Record {
    pub(crate) fn encode(&self) -> String {
        let mut lines = format!("mainstay {} {FORMAT}\n", self.subject.word());
        if let Some(identity) = self.identity {
            let (pid, started, boot) = (identity.pid(), identity.started_ticks(), identity.boot());
            lines.push_str(&format!("pid {pid}\nstarted {started}\nboot {boot}\n"));
        }
        // A line end in a note would be read as the next entry.
        lines.push_str("text ");
        lines.extend(self.text.chars().map(|c| if c.is_control() { ' ' } else { c }));
        lines.push('\n');
        lines
    }

    /// `None` for what is no record, or was not written to its end.
    pub(crate) fn decode(contents: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(contents).ok()?;
        let mut lines = text.strip_suffix('\n')?.split('\n');
        let mut title = lines.next()?.split(' ');
        let (name, subject, format) = (title.next()?, title.next()?, title.next()?);
        if name != "mainstay" || format != FORMAT || title.next().is_some() {
            return None;
        }
        let mut entry = lines.next()?;
        let mut identity = None;
        if let Some(pid) = entry.strip_prefix("pid ") {
            let pid = pid.parse().ok()?;
            let started = lines.next()?.strip_prefix("started ")?.parse().ok()?;
            let boot = BootId::parse(lines.next()?.strip_prefix("boot ")?)?;
            identity = Some(ProcessIdentity::from_parts(pid, started, boot)?);
            entry = lines.next()?;
        }
        let text = entry.strip_prefix("text ")?.to_owned();
        lines.next().is_none().then_some(Self { subject: Subject::from_word(subject)?, identity, text })
    }
}

impl Subject {
    fn word(self) -> &'static str {
        match self {
            Self::Owner => "owner",
            Self::Child => "child",
            Self::Worker => "worker",
        }
    }

    fn from_word(word: &str) -> Option<Self> {
        [Self::Owner, Self::Child, Self::Worker].into_iter().find(|subject| subject.word() == word)
    }
}

/// The record file of a process that the keeper started, for the keeper after this one.
#[derive(Debug)]
pub(crate) struct RecordFile {
    path: PathBuf,
}

impl RecordFile {
    /// Records that something with this marker is about to be started.
    pub(crate) fn announce(dir: &Path, number: u64, marker: &str) -> Result<Self, StateError> {
        let record = Record { subject: Subject::Child, identity: None, text: marker.to_owned() };
        Self::write(dir, &format!("starting-{number}"), &record)
    }

    /// Records the process, under its pid.
    pub(crate) fn record(
        dir: &Path,
        subject: Subject,
        identity: ProcessIdentity,
        marker: &str,
    ) -> Result<Self, StateError> {
        let record = Record { subject, identity: Some(identity), text: marker.to_owned() };
        Self::write(dir, &identity.pid().to_string(), &record)
    }

    /// The record of `identity` that an earlier keeper in this process has made.
    pub(crate) fn existing(dir: &Path, identity: ProcessIdentity) -> Self {
        Self { path: dir.join(identity.pid().to_string()) }
    }

    fn write(dir: &Path, name: &str, record: &Record) -> Result<Self, StateError> {
        write_whole_file(dir, name, record.encode().as_bytes())?;
        Ok(Self { path: dir.join(name) })
    }

    /// Removes the file: what it named is gone.
    pub(crate) fn remove(self) {
        if let Err(error) = remove_file(&self.path) {
            tracing::warn!(error = &error as &dyn std::error::Error, "could not remove the record of an ended process");
        }
    }
}

/// The directory of record files within a state directory.
pub(crate) fn records_dir(state_dir: &Path) -> PathBuf {
    state_dir.join("children")
}

const FORMAT: &str = "1";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_survives_being_written_and_read() {
        let identity = Some(ProcessIdentity::of_self().unwrap());
        for subject in [Subject::Owner, Subject::Child, Subject::Worker] {
            for identity in [identity, None] {
                for text in ["", "127.0.0.1:7717 and more"] {
                    let record = Record { subject, identity, text: text.to_owned() };
                    assert_eq!(Record::decode(record.encode().as_bytes()), Some(record));
                }
            }
        }
    }

    #[test]
    fn the_form_on_disk_is_fixed() {
        let boot = BootId::parse("01020304-0506-0708-090a-0b0c0d0e0f10").unwrap();
        let identity = ProcessIdentity::from_parts(42, 777, boot);
        let record = Record { subject: Subject::Child, identity, text: "marker\nx".to_owned() };
        let expected =
            "mainstay child 1\npid 42\nstarted 777\nboot 01020304-0506-0708-090a-0b0c0d0e0f10\ntext marker x\n";
        assert_eq!(record.encode(), expected);
    }

    #[test]
    fn junk_and_halves_are_no_records() {
        let whole = Record { subject: Subject::Owner, identity: ProcessIdentity::of_self().ok(), text: "n".into() };
        let whole = whole.encode();
        for cut in 0..whole.len() {
            assert_eq!(Record::decode(&whole.as_bytes()[..cut]), None, "{cut} bytes");
        }
        let pid_zero = "mainstay child 1\npid 0\nstarted 1\nboot 01020304-0506-0708-090a-0b0c0d0e0f10\ntext m\n";
        for junk in [&b""[..], b"\xff\n", b"1234\n", pid_zero.as_bytes(), format!("{whole}x\n").as_bytes()] {
            assert_eq!(Record::decode(junk), None);
        }
    }
}
