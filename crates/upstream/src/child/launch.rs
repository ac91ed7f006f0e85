//! One process more: asked of the keeper, and listened to from its first word on.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::id::SessionKey;
use mainstay_keeper::client::{Custody, WriteError};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use super::running::{Audience, Registration, Running};
use super::slot::Delivery;
use super::supervision::Lease;
use super::{Mask, Stamp, spawn};
use crate::failure::{Blame, Failure};
use crate::upstreams::{Destination, Upstreams};

/// Starts a process of the server at `destination` in the name of `key`, as `lease` allows. Whether it comes up remains to
/// be seen.
pub(super) async fn launch(
    (upstreams, destination): (&Arc<Upstreams>, &Arc<Destination>),
    (custody, key): (Custody, SessionKey),
    audience: Audience,
    lease: Lease,
) -> Result<(Arc<Running>, AbortHandle), Failure> {
    let server = &destination.server;
    let _alone = destination.shared.without_sibling().await;
    let program = program(upstreams, destination).await;
    let spawned = match spawn::request(&upstreams.parts, destination, key) {
        Ok(request) => custody.spawn(request).await.map_err(|error| spawn::failure(server, &error)),
        Err(failure) => Err(failure),
    };
    let spawned = spawned.inspect_err(|failure| lease.not_started(failure))?;
    let mask = Mask::of(server, &*upstreams.parts.environment);
    let handed_over = (spawned.child, &[][..], spawned.events);
    let parts = (upstreams, destination);
    let (running, pump) = Running::start(parts, audience, custody, handed_over, (lease, Some(mask)));
    running.lease.attach(running.id, Arc::downgrade(&running), program);
    tracing::info!(server = %server.name, session = ?key, child = %running.id, "child started");
    Ok((running, pump))
}

/// The program on disk, which is the one that is about to be started (C9).
async fn program(upstreams: &Upstreams, destination: &Arc<Destination>) -> Option<Stamp> {
    let (destination, environment) = (Arc::clone(destination), Arc::clone(&upstreams.parts.environment));
    let looked = tokio::task::spawn_blocking(move || Stamp::of(&destination.server, &*environment));
    // It is only for people: a file system that hangs must not hang the start.
    timeout(PROGRAM_BOUND, looked).await.ok()?.ok()?
}

impl Running {
    /// The response to `message`, a request of the gateway's own under the raw id `id`. What the process says before it
    /// does not matter.
    pub(super) async fn ask(self: &Arc<Self>, id: Bytes, message: Bytes) -> Result<Bytes, Failure> {
        let Some(mut waiting) = self.register(Registration { id, may_stream: false }) else {
            return Err(self.exited().await);
        };
        match self.write_call(&mut waiting, message).await {
            Ok(()) => {}
            Err(WriteError::Gone) => return Err(self.exited().await),
            Err(error @ (WriteError::TooLong | WriteError::LineEnd)) => {
                return Err(self.server().protocol(&format!("the request can't be written: {error}")));
            }
        }
        loop {
            match waiting.next().await {
                Delivery::Response { bytes, .. } => return Ok(bytes),
                Delivery::Message { .. } => {}
                Delivery::Question { number, .. } => drop(waiting.receipt(number)),
                Delivery::Oversize => return Err(self.server().oversize()),
                Delivery::Gone => return Err(self.exited().await),
            }
        }
    }

    /// That the process ended during its handshake, once it has.
    pub(super) async fn exited(&self) -> Failure {
        let end = self.ended().await;
        let server = self.server().name.clone();
        match end.exit {
            Some(_) => Failure::ChildExited { server, exit: end.status(), stderr_tail: end.stderr_tail() },
            None => self.server().unreachable(end.describe()),
        }
    }
}

/// How long the program may be looked at.
const PROGRAM_BOUND: Duration = Duration::from_secs(1);
