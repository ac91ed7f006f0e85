//! `mainstay instances`.

use serde_json::Value;

use super::Place;
use super::api::Api;
use super::failure::Failure;
use super::output::{Output, lines_of, plain, table};

/// Lists the live connections of a running gateway to its servers.
pub(super) fn list(place: &Place, out: &Output) -> Result<(), Failure> {
    let listed: Value = Api::find(place)?.get("/instances")?;
    if out.is_json() {
        return out.document(&listed);
    }
    let mut shown = table(&["SESSION", "SERVER", "KIND", "OPEN", "CONTINUITY", "REMADE"]);
    for instance in listed["instances"].as_array().into_iter().flatten() {
        let word = |name: &str| instance[name].as_str().map_or_else(|| "-".to_owned(), plain);
        let open = if instance["open"] == true { "yes" } else { "no" }.to_owned();
        let remade = instance["remade_count"].as_u64().unwrap_or_default().to_string();
        shown.add_row([word("session"), word("server"), word("kind"), open, word("continuity"), remade]);
    }
    out.line(&lines_of(&shown))
}
