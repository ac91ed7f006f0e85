//! What a modern server hands to its client in an answer, to have it back in later requests: the state of a round, and the
//! ids of its tasks. Whoever has one may use it, so neither reaches a client as it is, and none is opened for another
//! principal.

use bytes::Bytes;
use mainstay_core::time::Timestamp;
use mainstay_store::keys::Keyring;
use thiserror::Error;

use super::round::{Round, StateFault, StateTooLarge};
use super::task_ids::{IdFault, TaskIds};
use crate::engine::call::Request;
use crate::engine::{Caller, Served};

/// What may be handed out and brought back in one exchange with a server.
pub struct Handed {
    round: Option<Round>,
    tasks: Option<TaskIds>,
}

/// Why what a client brings does not reach its server: [`INVALID_PARAMS`](mainstay_core::wire::modern::INVALID_PARAMS),
/// HTTP 400.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Refusal {
    /// The state of a round.
    #[error(transparent)]
    State(#[from] StateFault),
    /// The id of a task.
    #[error(transparent)]
    TaskId(#[from] IdFault),
}

impl Handed {
    /// What `request` may bring, and its answers hand out.
    pub fn of(caller: &Caller, served: &Served, request: &Request) -> Self {
        Self { round: Round::of(caller, served, request), tasks: TaskIds::of(caller, served, request) }
    }

    /// The request for its server: with what that had handed out in place of what the client brings.
    ///
    /// # Errors
    /// Any [`Refusal`]. The server must not see the request.
    pub fn opened(&mut self, ring: &Keyring, now: Timestamp, message: &Bytes) -> Result<Bytes, Refusal> {
        // No request brings both.
        match (&self.round, &mut self.tasks) {
            (Some(round), _) => Ok(round.opened(ring, now)?),
            (None, Some(tasks)) => Ok(tasks.opened(ring, now, message)?),
            (None, None) => Ok(message.clone()),
        }
    }

    /// A message of the server for the client: its answer, or a notification before that.
    ///
    /// # Errors
    /// [`StateTooLarge`]: the client must not get the answer.
    pub fn sealed(&self, ring: &Keyring, now: Timestamp, message: Bytes) -> Result<Bytes, StateTooLarge> {
        let message = match &self.round {
            Some(round) => round.sealed(ring, now, message)?,
            None => message,
        };
        Ok(match &self.tasks {
            Some(tasks) => tasks.sealed(ring, now, message),
            None => message,
        })
    }
}
