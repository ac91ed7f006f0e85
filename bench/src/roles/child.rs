//! The fixture as a stdio server: one message a line.

use crate::fixture::{Reply, reply};
use anyhow::Result;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};

/// Serves until standard input ends. Blocking and one after the other: nothing is cheaper.
pub(super) fn run() -> Result<()> {
    let mut stdin = BufReader::with_capacity(BUFFER_BYTES, std::io::stdin());
    let mut stdout = std::io::stdout().lock();
    let mut line = Vec::new();
    loop {
        line.clear();
        if stdin.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line)? == 0 {
            return Ok(());
        }
        let (wait, mut answer) = match reply(&line) {
            Reply::Nothing => continue,
            Reply::Opened(answer) => (std::time::Duration::ZERO, answer),
            Reply::After(wait, answer) => (wait, answer),
        };
        std::thread::sleep(wait);
        answer.push(b'\n');
        stdout.write_all(&answer)?;
        stdout.flush()?;
    }
}

const BUFFER_BYTES: usize = 64 * 1024;
const LINE_BYTES_MAX: u64 = 16 * 1024 * 1024;
