//! Sessions by their ids. An id is a secret: it is read from standard input, and neither shown nor repeated.

use std::io::{IsTerminal as _, Read as _};

use anyhow::anyhow;
use clap::Args;
use mainstay_core::id::SessionId;
use serde_json::{Value, json};

use crate::cli::Unseen;
use crate::cli::api::Api;
use crate::cli::failure::Failure;
use crate::cli::output::Output;

/// Whether sessions are named by their ids.
#[derive(Clone, Debug, Default, Args)]
pub(super) struct ById {
    /// By their ids, one a line, on standard input: `--id -`. An id is a secret and has no place among arguments
    #[arg(long, value_name = "-")]
    id: Option<Unseen>,
}

impl ById {
    /// Whether they are.
    pub(super) fn is_given(&self) -> bool {
        self.id.is_some()
    }

    /// The sessions whose ids stand on standard input, in that order.
    ///
    /// # Errors
    /// Exit code 2 for what is no id, 4 for an id that no session has. None of them repeats what was read.
    pub(super) fn sessions(&self, api: &Api, out: &Output) -> Result<Vec<Value>, Failure> {
        let ids = self.read(out)?;
        let found = ids.iter().zip(1..).map(|(id, line)| {
            let found = api.post::<Value>("/sessions/find", &json!({ "id": id.reveal() }));
            found.map_err(|failure| if failure.is_not_found() { nobodys(line, ids.len()) } else { failure })
        });
        found.collect()
    }

    /// As [`sessions`](Self::sessions), for a command that wants one.
    ///
    /// # Errors
    /// Also exit code 2 if there is more than one.
    pub(super) fn session(&self, api: &Api, out: &Output) -> Result<Value, Failure> {
        let mut found = self.sessions(api, out)?;
        match found.len() {
            1 => Ok(found.swap_remove(0)),
            _ => Err(Failure::usage(anyhow!("one session is shown at a time; there is more than one id"))),
        }
    }

    fn read(&self, out: &Output) -> Result<Vec<SessionId>, Failure> {
        if self.id.as_ref().is_none_or(|source| source.0 != "-") {
            // What was given instead may be an id: it is not repeated.
            return Err(Failure::usage(anyhow!("ids are taken from standard input only")).hint(
                "say `--id -`, and give the id there; an id that stood among the arguments was visible to others: end \
                 its session",
            ));
        }
        let mut stdin = std::io::stdin().lock();
        if stdin.is_terminal() {
            out.note("ids of sessions, one a line; Ctrl-D ends them:");
        }
        let mut bytes = Vec::new();
        stdin.by_ref().take(INPUT_BYTES_MAX + 1).read_to_end(&mut bytes)?;
        parsed(&bytes)
    }
}

/// The ids in `input`, a line each.
fn parsed(input: &[u8]) -> Result<Vec<SessionId>, Failure> {
    let mut ids = Vec::new();
    for (line, number) in input.split(|byte| *byte == b'\n').zip(1..) {
        let line = line.trim_ascii();
        if line.is_empty() {
            continue;
        }
        let id = std::str::from_utf8(line).ok().and_then(SessionId::parse);
        let id = id.ok_or_else(|| Failure::usage(anyhow!("line {number} of standard input is no session's id")))?;
        ids.push(id);
    }
    let bytes = u64::try_from(input.len()).unwrap_or(u64::MAX);
    if bytes > INPUT_BYTES_MAX || ids.len() > IDS_MAX {
        return Err(Failure::usage(anyhow!("there are more than {IDS_MAX} ids on standard input")));
    }
    if ids.is_empty() {
        return Err(Failure::usage(anyhow!("there is no id on standard input"))
            .hint("an id is what the client sends as `Mcp-Session-Id`"));
    }
    Ok(ids)
}

fn nobodys(line: usize, lines: usize) -> Failure {
    let which = if lines > 1 { format!("number {line} of the ids") } else { "the id".to_owned() };
    Failure::not_found(anyhow!("{which} on standard input is no session's here")).hint(
        "sessions that ended are forgotten after `session.tombstone_retention`; the session may be another gateway's",
    )
}

/// How many ids are taken at once.
const IDS_MAX: usize = 1000;
/// Room for that many of the longest ids.
const INPUT_BYTES_MAX: u64 = 256 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i6_ids_are_read_a_line_each_and_never_repeated() {
        let ids = parsed(b"abc\r\n\n  def  \n").unwrap();
        assert_eq!(ids.iter().map(SessionId::reveal).collect::<Vec<_>>(), ["abc", "def"]);
        let long = format!("CANARY{}", "x".repeat(200));
        for input in ["CANARY with blanks", "CANARY\u{e9}", &long, "ok\nCANARY\u{1}"] {
            let refused = format!("{:?}", parsed(input.as_bytes()).unwrap_err());
            assert!(refused.contains("is no session's id") && !refused.contains("CANARY"), "{refused}");
        }
        assert!(format!("{:?}", parsed(b"\n").unwrap_err()).contains("no id"));
        assert!(parsed("x\n".repeat(IDS_MAX).as_bytes()).is_ok());
        assert!(parsed("x\n".repeat(IDS_MAX + 1).as_bytes()).is_err());
    }

    #[test]
    fn i6_an_id_among_the_arguments_is_refused_and_hidden() {
        let given = ById { id: Some(Unseen("CANARY".into())) };
        let refused = format!("{:?} {given:?}", given.read(&Output::new(false)).unwrap_err());
        assert!(refused.contains("standard input only") && !refused.contains("CANARY"), "{refused}");
    }
}
