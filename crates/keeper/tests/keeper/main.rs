//! The keeper with real processes: it, its workers and their children.
//!
//! This test binary plays all three parts: [`probe`] starts it again as a keeper, which starts it again as a worker.

#![expect(clippy::unwrap_used, clippy::panic, reason = "what fails here fails the test")]
#![expect(clippy::print_stderr, reason = "a failed test shows the keeper's log")]

mod custody;
mod desk;
mod handover;
mod lifecycle;
mod probe;
mod processes;
mod renewals;
mod trees;
mod upgrade;
