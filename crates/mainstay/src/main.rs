//! The `mainstay` program. Everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    mainstay::cli::main()
}
