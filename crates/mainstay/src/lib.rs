//! Mainstay, a durable session gateway for the Model Context Protocol.

pub mod config;
pub mod telemetry;
