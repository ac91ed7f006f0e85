//! The trace of UP-S: one JSON document a line, appended, so that successive processes can share a file.

use super::process::start_time;
use serde_json::{Value, json};
use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Where it is written what happened to this process; nowhere, if no file was named.
#[derive(Debug)]
pub(super) struct Trace {
    file: Option<File>,
}

impl Trace {
    /// Opens the trace and writes who this is, as an event of this name.
    pub(super) fn open(path: Option<&Path>, event: &str) -> std::io::Result<Trace> {
        let file = path.map(|path| File::options().create(true).append(true).open(path)).transpose()?;
        let trace = Trace { file };
        let pid = std::process::id();
        let pgid = rustix::process::getpgrp().as_raw_nonzero().get();
        trace.write(json!({"event": event, "pgid": pgid, "ppid": std::os::unix::process::parent_id(),
                           "start": start_time(pid)}));
        Ok(trace)
    }

    /// Writes a line of standard input, as JSON if it is JSON.
    pub(super) fn line(&self, line: &[u8]) {
        if self.file.is_none() {
            return;
        }
        let text = || json!(String::from_utf8_lossy(line));
        let shown = serde_json::from_slice::<Value>(line).unwrap_or_else(|_| text());
        self.write(json!({"event": "line", "line": shown}));
    }

    /// Writes that something happened.
    pub(super) fn event(&self, name: &str) {
        self.write(json!({"event": name}));
    }

    fn write(&self, mut entry: Value) {
        let Some(mut file) = self.file.as_ref() else {
            return;
        };
        let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
        entry["pid"] = json!(std::process::id());
        entry["at_us"] = json!(u64::try_from(at).unwrap_or(u64::MAX));
        // One write, so that lines of several processes never mix. A full disk must not change how the server behaves.
        let _best_effort = file.write_all(format!("{entry}\n").as_bytes());
    }
}
