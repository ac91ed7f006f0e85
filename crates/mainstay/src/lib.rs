//! Mainstay, a durable session gateway for the Model Context Protocol.
//!
//! Imports point one way: `cli` → {`admin`, `serve`, `reconcile`} → `engine` → {`runtime`, `telemetry`}; `config` is a
//! leaf, as is `auth` but for it, and `worker` puts the parts together.

pub mod admin;
pub mod auth;
pub mod cli;
pub mod config;
pub mod demo;
pub mod engine;
pub mod reconcile;
pub mod runtime;
pub mod serve;
pub mod telemetry;
pub mod worker;
