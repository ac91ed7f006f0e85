//! The `mainstay` program. Everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    mainstay::cli::main()
}

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;
