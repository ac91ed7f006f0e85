//! The rehearsal: before anything is changed, the program that is to take over is asked whether it could. It is given the
//! settings in force, and answers with its own, or says what stands against it. The keeper understands neither.

use std::fs::File;
use std::io::{self, Seek as _, Write as _};
use std::process::Stdio;
use std::rc::Rc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use std::os::fd::OwnedFd;
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;
use tokio::time::timeout;

use crate::keeper::Keeper;
use crate::pidfd::Status;
use crate::process::Process;
use crate::renewal::nameless_file;
use crate::worker::Start;

/// Runs the rehearsal and returns the settings that it answers with, or why there are none. A rehearsal that is dropped
/// is killed.
pub(super) async fn rehearse(keeper: Rc<Keeper>, start: Start) -> Result<Bytes, String> {
    let failed = |error: io::Error| format!("could not run `{}`: {error}", start.name.display());
    let mut command = start.command();
    let in_force = settings_in_force(&keeper).map_err(failed)?;
    command.stdin(in_force).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(failed)?;
    let pipes = (child.stdout.take().map(OwnedFd::from), child.stderr.take().map(OwnedFd::from));
    let running = Running { process: Some(Process::hold(&keeper, child).map_err(failed)?), keeper };
    let (Some(stdout), Some(stderr)) = pipes else {
        return Err(failed(io::Error::other("it has no pipes")));
    };
    match timeout(REHEARSAL_BOUND, running.listen(stdout, stderr)).await {
        Ok(heard) => heard.map_err(failed)?,
        Err(_) => Err(format!("`{}` did not answer within {} s", start.name.display(), REHEARSAL_BOUND.as_secs())),
    }
}

/// What the rehearsal reads, which it may do or not.
fn settings_in_force(keeper: &Keeper) -> io::Result<File> {
    let mut file = nameless_file(keeper.records_dir())?;
    file.write_all(&keeper.settings())?;
    file.rewind()?;
    Ok(file)
}

/// A rehearsal's process; it does not outlive this.
struct Running {
    keeper: Rc<Keeper>,
    process: Option<Process>,
}

impl Running {
    /// Hears it out and reaps it.
    async fn listen(mut self, stdout: OwnedFd, stderr: OwnedFd) -> io::Result<Result<Bytes, String>> {
        let (settings, said) = tokio::join!(read_settings(stdout), read_words(stderr));
        let Some(process) = self.process.take() else {
            return Err(io::Error::other("it is gone"));
        };
        process.pidfd.ended().await;
        let status = process.reap(&self.keeper)?;
        let said = said?;
        Ok(match (status, settings?) {
            // Then it was not heard out, whatever it made of that.
            (_, None) => Err(format!("its settings are longer than {SETTINGS_BYTES_MAX} bytes")),
            (Status { code: Some(0), .. }, Some(settings)) => Ok(settings),
            (status, Some(_)) => Err(reason(&said, status)),
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(process) = self.process.take() {
            process.kill();
            // Whoever reaps orphans reaps it, too.
            process.abandon(&self.keeper);
        }
    }
}

/// Everything it writes, or `None` if that is too much.
async fn read_settings(stdout: OwnedFd) -> io::Result<Option<Bytes>> {
    let mut pipe = pipe::Receiver::from_owned_fd(stdout)?;
    let mut settings = BytesMut::new();
    while pipe.read_buf(&mut settings).await? > 0 {
        if settings.len() > SETTINGS_BYTES_MAX {
            return Ok(None);
        }
    }
    Ok(Some(settings.freeze()))
}

/// The end of what it says to people.
async fn read_words(stderr: OwnedFd) -> io::Result<Vec<u8>> {
    let mut pipe = pipe::Receiver::from_owned_fd(stderr)?;
    let (mut words, mut buffer) = (Vec::new(), [0; WORDS_BYTES_MAX]);
    loop {
        let count = pipe.read(&mut buffer).await?;
        if count == 0 {
            return Ok(words);
        }
        words.extend_from_slice(&buffer[..count]);
        words.drain(..words.len().saturating_sub(WORDS_BYTES_MAX));
    }
}

/// What it gives as its reason: from the first line that starts with `error:` on, or else the whole end of its words.
fn reason(said: &[u8], status: Status) -> String {
    let said = String::from_utf8_lossy(said);
    let is_error = |line: &str| line.trim_start().starts_with("error:");
    let all: Vec<&str> = said.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    let from = all.iter().position(|line| is_error(line)).unwrap_or_default();
    let text = all[from..].join("\n");
    let text = text.trim_start().strip_prefix("error:").unwrap_or(&text).trim();
    match (text.is_empty(), status) {
        (false, _) => text.chars().take(REASON_CHARS_MAX).filter(|c| *c == '\n' || !c.is_control()).collect(),
        (true, Status { code: Some(code), .. }) => format!("it gave up with exit code {code} and no word"),
        (true, Status { signal: Some(signal), .. }) => format!("it was ended by signal {signal}"),
        (true, _) => "it ended, nobody knows how".to_owned(),
    }
}

/// How long a rehearsal may take.
const REHEARSAL_BOUND: Duration = Duration::from_secs(20);

/// The longest settings that it may answer with, in bytes.
const SETTINGS_BYTES_MAX: usize = 16 * 1024 * 1024;

/// How much of its words is kept, in bytes.
const WORDS_BYTES_MAX: usize = 4 * 1024;

/// The longest reason that is passed on, in characters.
const REASON_CHARS_MAX: usize = 2000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t2_the_reason_of_a_refusal_is_what_the_program_calls_its_error() {
        let ended = Status { code: Some(2), signal: None };
        let killed = Status { code: None, signal: Some(9) };
        for (said, status, expected) in [
            (
                "warning: x\nerror: no such file\n  caused by: y\nhint: z\n",
                ended,
                "no such file\n  caused by: y\nhint: z",
            ),
            ("something went wrong\n", ended, "something went wrong"),
            ("", ended, "it gave up with exit code 2 and no word"),
            ("\n\n", killed, "it was ended by signal 9"),
        ] {
            assert_eq!(reason(said.as_bytes(), status), expected);
        }
        assert_eq!(reason(&[0xff, b'\n', 7], ended), "\u{fffd}\n");
    }
}
