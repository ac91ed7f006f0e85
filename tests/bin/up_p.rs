//! UP-P, the scriptable stateless program: see `mainstay_tests::up_p`.

use std::io::Write as _;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    mainstay_tests::up_p::run(&args).unwrap_or_else(|error| {
        let _nobody_reads =
            writeln!(std::io::stderr(), "up-p: {error}\nusage: up-p DIRECTORY [dual | legacy | silent | mute]");
        ExitCode::from(USAGE_EXIT)
    })
}

const USAGE_EXIT: u8 = 2;
