//! UP-L: a server of 2024-11-05 that speaks HTTP+SSE only, and misbehaves exactly as it is told.
//!
//! It is UP-H (see [`up_h`](crate::up_h)) over the other transport: tools, orders and journal are the same.

use crate::UpH;
use anyhow::Result;
use std::ops::{Deref, DerefMut};

/// A running UP-L. It is killed when the handle goes, and ends with the test's process in any case.
#[derive(Debug)]
pub struct UpL(UpH);

impl UpL {
    /// Starts a well-behaved server on free ports.
    ///
    /// # Errors
    /// If it does not start.
    pub async fn start() -> Result<UpL> {
        UpL::start_with(&[]).await
    }

    /// Starts a server with more flags.
    ///
    /// # Errors
    /// If it does not start.
    pub async fn start_with(flags: &[&str]) -> Result<UpL> {
        let flags = [&["--legacy", "--name", "up-l", "--protocol", "2024-11-05"], flags].concat();
        UpH::start_with(&flags).await.map(UpL)
    }

    /// The URL of its event stream.
    #[must_use]
    pub fn url(&self) -> String {
        self.0.url().replace("/mcp", "/sse")
    }

    /// A table of the gateway's configuration that names this server, and leaves its transport to be found out.
    #[must_use]
    pub fn toml(&self, name: &str) -> String {
        format!("[servers.{name}]\nurl = \"{}\"\n", self.url())
    }
}

impl Deref for UpL {
    type Target = UpH;

    fn deref(&self) -> &UpH {
        &self.0
    }
}

impl DerefMut for UpL {
    fn deref_mut(&mut self) -> &mut UpH {
        &mut self.0
    }
}
