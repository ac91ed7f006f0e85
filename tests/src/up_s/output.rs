//! Standard output and standard error of UP-S.

use super::Options;
use crate::server::Outgoing;
use serde_json::Value;
use std::io::Write as _;
use tokio::sync::mpsc;

/// Starts the one thread that writes standard output. It blocks as the pipes do: a reader who does not read stops it.
pub(super) fn start(options: &Options) -> mpsc::Sender<Outgoing> {
    let (out, mut queue) = mpsc::channel(super::QUEUE_MESSAGES_MAX);
    let (noise, stderr_bytes) = (options.noise, options.stderr_bytes);
    std::thread::spawn(move || {
        while let Some(outgoing) = queue.blocking_recv() {
            match outgoing {
                Outgoing::Exit(code) => std::process::exit(i32::from(code)),
                Outgoing::Message(message) => {
                    if is_response(&message) {
                        chatter(stderr_bytes);
                    }
                    if write(&message, noise).is_err() {
                        // Nobody reads any more; only a signal or the end of the input ends this now.
                        return;
                    }
                }
            }
        }
    });
    out
}

/// Writes a line to standard error.
pub(super) fn complain(line: &str) {
    let _nobody_reads = writeln!(std::io::stderr(), "{line}");
}

fn is_response(message: &Value) -> bool {
    message.get("method").is_none()
}

fn write(message: &Value, noise: bool) -> std::io::Result<()> {
    let mut stdout = std::io::stdout().lock();
    if noise {
        stdout.write_all(NOISE.as_bytes())?;
    }
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    stdout.write_all(&line)?;
    stdout.flush()
}

fn chatter(bytes: usize) {
    let mut stderr = std::io::stderr().lock();
    let mut left = bytes;
    while left > 0 {
        let now = left.min(CHATTER.len());
        if stderr.write_all(&CHATTER.as_bytes()[..now]).is_err() {
            return;
        }
        left -= now;
    }
}

const NOISE: &str = "listening on nothing in particular { not JSON\n";
const CHATTER: &str = "a line of sixty-four bytes that says nothing, again and again..\n";
