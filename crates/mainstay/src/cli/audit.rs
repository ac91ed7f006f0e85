//! `mainstay audit`: who did what to which session.

use std::num::NonZeroUsize;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Place;
use super::api::{Api, query};
use super::failure::Failure;
use super::output::{Output, lines_of, plain, table};
use super::sessions::checked;

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// Only what was done to this session
    #[arg(long, value_name = "REF")]
    session: Option<String>,
    /// Only this action, such as `opened`, `closed` or `stranger-refused`
    #[arg(long, value_name = "ACTION")]
    action: Option<String>,
    /// How many at most, the newest first
    #[arg(long, default_value = "100", value_name = "COUNT")]
    limit: NonZeroUsize,
    #[command(flatten)]
    place: Place,
}

/// Shows the newest entries of the audit trail.
pub(super) fn run(args: &Args, out: &Output) -> Result<(), Failure> {
    let session = args.session.as_deref().map(checked).transpose()?;
    let api = Api::find(&args.place)?;
    let mut listed = Listed { entries: Vec::new(), next: None };
    while listed.entries.len() < args.limit.get() {
        let limit = (args.limit.get() - listed.entries.len()).min(PAGE_ENTRIES_MAX).to_string();
        let before = listed.next.map(|next| next.to_string());
        let asked = query(&[
            ("limit", Some(&limit)),
            ("before", before.as_deref()),
            ("session", session.as_deref()),
            ("action", args.action.as_deref()),
        ]);
        let page: Listed = api.get(&format!("/audit{asked}"))?;
        listed.entries.extend(page.entries);
        listed.next = page.next;
        if listed.next.is_none() {
            break;
        }
    }
    if out.is_json() {
        return out.document(&listed);
    }
    let mut shown = table(&["AT", "ACTOR", "ACTION", "SESSION", "SERVER", "DETAIL"]);
    for entry in &listed.entries {
        let word = |name: &str| entry[name].as_str().filter(|text| !text.is_empty()).map_or_else(|| "-".into(), plain);
        shown.add_row(["at", "actor", "action", "session", "server", "detail"].map(word));
    }
    out.line(&lines_of(&shown))?;
    if listed.next.is_some() {
        out.note(&format!("there are older ones: `--limit {}`", args.limit.get().saturating_mul(10)));
    }
    Ok(())
}

#[derive(Serialize, Deserialize)]
struct Listed {
    entries: Vec<Value>,
    next: Option<u64>,
}

/// What the API gives at once.
const PAGE_ENTRIES_MAX: usize = 1000;
const EXAMPLES: &str = "\
Examples:
  mainstay audit --session s-292987c592      who opened it, who ended it
  mainstay audit --action stranger-refused   who asked for sessions of others";
