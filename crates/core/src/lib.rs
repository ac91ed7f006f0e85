//! Mainstay's rules, and nothing else.
//!
//! This crate decides. It performs no IO, reads no clock, draws no random number, runs no task and keeps no
//! hash-ordered collection: time and entropy come in as arguments, and what must happen goes out as values.
//! Recovery and live traffic use the same functions.

pub mod audit;
pub mod call;
pub mod code;
pub mod id;
pub mod limit;
pub mod principal;
pub mod resume;
pub mod session;
pub mod supervise;
pub mod time;
pub mod wire;
