//! Links against servers that misbehave as told: over HTTP in this process, and as children of a real keeper.
//!
//! For the children this test binary plays all parts: [`play`] starts it again as a keeper, which starts it again as a
//! worker, which has it started again as a server.

#![expect(clippy::unwrap_used, clippy::panic, reason = "what fails here fails the test")]
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a server speaks on stdout, and a failed test shows its log"
)]
#![expect(clippy::wildcard_enum_match_arm, reason = "a test picks what it looks for")]
#![expect(clippy::disallowed_methods, reason = "tests are their own home of tasks, time and variables")]

mod bridging;
mod children;
mod dialects;
mod fake;
mod listening;
mod modern;
mod once;
mod play;
mod sessions;
mod streams;
mod support;
