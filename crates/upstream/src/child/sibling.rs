//! Asking a program for its era: a process of its own, which serves nobody, is asked and ended (E5).
//!
//! Some programs exit at a request that they don't expect, so no process is asked that somebody uses. And some hold locks: a
//! process that is to serve somebody is not started beside one that is only asked, which gives way.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::wire::envelope;
use mainstay_keeper::ChildId;
use mainstay_keeper::client::{ChildEvent, Custody};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::{dismiss, label, spawn};
use crate::bridge::Dressed;
use crate::era::{Evidence, read_answer};
use crate::task;
use crate::upstreams::{Destination, Upstreams};
use crate::wire::{self, same_id};

/// What a process of the server at `destination` shows of its era that was started for no other purpose. One at a time;
/// nothing is shown while another one is asked, where none may be started now (C4), and if it has to give way. One that exits, or does not answer
/// within the bound of its handshake, is none of the modern era (2026-07-28, Versioning).
///
/// What comes of it is noted, and the process ended, also if the caller goes away.
pub(crate) async fn ask(upstreams: &Arc<Upstreams>, destination: &Arc<Destination>) -> Evidence {
    let Ok(turn) = Arc::clone(&destination.shared.siblings).try_acquire_owned() else { return Evidence::None };
    let (upstreams, destination) = (Arc::clone(upstreams), Arc::clone(destination));
    let (sender, found) = oneshot::channel();
    task::spawn(async move {
        let _turn = turn;
        start_and_ask(&upstreams, &destination, sender).await;
    });
    found.await.unwrap_or(Evidence::None)
}

async fn start_and_ask(
    upstreams: &Upstreams,
    destination: &Arc<Destination>,
    found: oneshot::Sender<Evidence>,
) -> Option<()> {
    let server = &destination.server;
    let wanted = destination.shared.wanted.notified();
    tokio::pin!(wanted);
    wanted.as_mut().enable();
    let custody = upstreams.parts.custody.clone().filter(|_| !upstreams.has_left())?;
    // It is no fault of the server's, whatever becomes of it.
    let lease = destination.supervision.permit(server, Duration::ZERO).await.ok()?;
    let request = spawn::request(&upstreams.parts, destination, label::sibling_key(&server.name)).ok()?;
    let mut spawned = custody.spawn(request).await.ok()?;
    tracing::info!(server = %server.name, child = %spawned.child, "child started to be asked for its era");
    let id = upstreams.own_id();
    let message = Dressed::own(&id, "server/discover", None).message;
    let answered = timeout(server.handshake_bound, async {
        custody.write(spawned.child, envelope::one_line(message)).await.ok()?;
        response(&custody, spawned.child, &mut spawned.events, &id).await
    });
    let evidence = tokio::select! {
        answered = answered => match answered {
            Ok(Some(response)) => read_answer(&response),
            Ok(None) | Err(_) => Evidence::NotModern,
        },
        () = wanted => Evidence::None,
    };
    destination.eras.note(&evidence);
    tracing::info!(server = %server.name, child = %spawned.child, evidence = evidence.as_str(), "era asked for");
    // Who has asked may be gone.
    let _gone = found.send(evidence);
    dismiss::end(&custody, (spawned.child, spawned.events), server.stop_grace).await;
    drop(lease);
    Some(())
}

/// The response under the raw id `id`; `None` if the process ends without one.
async fn response(
    custody: &Custody,
    child: ChildId,
    events: &mut mpsc::Receiver<ChildEvent>,
    id: &[u8],
) -> Option<Bytes> {
    loop {
        match events.recv().await? {
            ChildEvent::Frame { number, bytes } => {
                custody.acknowledge(child, number..=number);
                let scanned = envelope::scan(&bytes).ok();
                let found = scanned.as_ref().filter(|_| wire::is_response(&bytes));
                if found.and_then(|scanned| wire::id_of(scanned, &bytes)).is_some_and(|found| same_id(found, id)) {
                    return Some(bytes);
                }
            }
            ChildEvent::Oversize { number, .. } => custody.acknowledge(child, number..=number),
            ChildEvent::Written { .. } => {}
            ChildEvent::Exited(_) => return None,
        }
    }
}
