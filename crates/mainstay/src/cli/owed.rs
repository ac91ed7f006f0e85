//! `mainstay owed`: deletes of sessions of servers that nobody will use again, and that could not be made yet.

use clap::Subcommand;
use serde_json::{Value, json};

use super::Place;
use super::api::Api;
use super::failure::{Failure, settle_all};
use super::output::{Output, lines_of, plain, table};
use super::times::{ago, until};

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// List them
    List(Place),
    /// Try to pay some now; what fails stays owed
    Pay(OwedArgs),
    /// Give some up: the server's session is left to expire there
    GiveUp(OwedArgs),
}

#[derive(Debug, clap::Args)]
pub(super) struct OwedArgs {
    /// Their numbers, as listed
    #[arg(required = true, value_name = "ID")]
    ids: Vec<u64>,
    #[command(flatten)]
    place: Place,
}

/// Runs one of the commands.
pub(super) fn run(command: &Command, out: &Output) -> Result<(), Failure> {
    match command {
        Command::List(place) => list(place, out),
        Command::Pay(args) => each(args, "pay", "paid", out),
        Command::GiveUp(args) => each(args, "give-up", "given up", out),
    }
}

fn list(place: &Place, out: &Output) -> Result<(), Failure> {
    let listed: Value = Api::find(place)?.get("/owed")?;
    if out.is_json() {
        return out.document(&listed);
    }
    let mut shown = table(&["ID", "SESSION", "SERVER", "OWED FOR", "TRIED", "NEXT", "LAST ERROR"]);
    for owed in listed["owed"].as_array().into_iter().flatten() {
        let word = |name: &str| owed[name].as_str().map_or_else(|| "-".to_owned(), plain);
        let next = owed["next_at"].as_str().map_or_else(|| "left to expire".to_owned(), until);
        shown.add_row([
            owed["id"].to_string(),
            word("session"),
            word("server"),
            ago(owed["owed_at"].as_str().unwrap_or_default()),
            format!("{}x", owed["attempts"]),
            next,
            word("last_error"),
        ]);
    }
    out.line(&lines_of(&shown))
}

fn each(args: &OwedArgs, order: &str, done: &str, out: &Output) -> Result<(), Failure> {
    let api = Api::find(&args.place)?;
    let outcome = settle_all(&args.ids, out, |id| api.order(&format!("/owed/{id}/{order}")).map(|()| *id));
    if out.is_json() {
        out.document(&json!({ "done": outcome.done }))?;
    } else {
        for id in &outcome.done {
            out.line(&format!("{id} {done}"))?;
        }
    }
    outcome.ended()
}
