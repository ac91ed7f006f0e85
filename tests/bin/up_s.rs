//! UP-S, the scriptable stdio upstream: see `mainstay_tests::up_s`.

use mainstay_tests::up_s::{Options, USAGE, run};
use std::io::Write as _;
use std::process::ExitCode;

fn main() -> ExitCode {
    let outcome = Options::read(std::env::args().skip(1)).and_then(|options| run(options).map_err(|e| e.to_string()));
    outcome.unwrap_or_else(|error| {
        let _nobody_reads = writeln!(std::io::stderr(), "up-s: {error}\n{USAGE}");
        ExitCode::from(USAGE_EXIT)
    })
}

const USAGE_EXIT: u8 = 2;
