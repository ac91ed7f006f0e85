//! Programs that tests write.

use anyhow::{Context as _, Result, ensure};
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

/// Makes `path` a program with these contents. Where there was one it stays what it is, under no name any more, as after
/// the work of a package manager.
///
/// Another process writes it. What this one has open for writing is inherited by whatever another thread starts just
/// then, and as long as anybody has a program open for writing it can't be executed (`ETXTBSY`).
///
/// # Errors
/// If it can't be written.
pub fn write_program(path: &Path, contents: &[u8]) -> Result<()> {
    const WRITE: &str = r#"cat > "$0.draft" && chmod 755 "$0.draft" && mv -f "$0.draft" "$0""#;
    let mut writer = Command::new("sh").args(["-c", WRITE]).arg(path).stdin(Stdio::piped()).spawn()?;
    let sent = writer.stdin.take().context("its input")?.write_all(contents);
    let status = writer.wait()?;
    ensure!(status.success(), "`{}` could not be written: {status}", path.display());
    Ok(sent?)
}
