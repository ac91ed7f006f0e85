//! The keeper's own renewal within an upgrade: the way to the next program, and the way back.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, timeout};

use super::dispatch::Dispatcher;
use super::handover::{Carried, Terms};
use super::signals::Wish;
use crate::keeper::{Keeper, UNDER_WAY};
use crate::leaving::{Leaver, Leaving};
use crate::passed::Held;
use crate::renewal::state::RespawnState;
use crate::renewal::{self, Course, HeldSignals, Program, RenewalError, save};
use crate::worker::Worker;

/// Why the keeper still runs the program that it ran.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotRenewed {
    /// A stop is wanted instead, and begun.
    #[error("the gateway is about to stop")]
    Stopping,
    /// It can't be done.
    #[error(transparent)]
    Failed(#[from] RenewalError),
}

impl Dispatcher {
    /// Executes the program that is on disk now, which goes on from here with `settings`. Comes back only with the
    /// reason why not, and then nothing has changed.
    pub(super) async fn renew(&mut self, settings: Bytes, terms: &Terms) -> NotRenewed {
        let carried = self.carried(Some(terms.clone()));
        let previous_settings = self.keeper.settings();
        let signals = match self.prepare().await {
            Ok(signals) => signals,
            Err(not_renewed) => return not_renewed,
        };
        let program = Program::Path(&self.programs.program);
        self.execute(program, settings, previous_settings, &carried, &signals).into()
    }

    /// Executes the program that was before this one. Comes back only with the reason why not.
    pub(super) async fn go_back(&mut self) -> NotRenewed {
        let carried = self.carried(None);
        let settings = self.keeper.settings();
        let signals = match self.prepare().await {
            Ok(signals) => signals,
            Err(not_renewed) => return not_renewed,
        };
        let Some(previous) = &self.programs.previous else {
            return RenewalError::State("the program before is not known".to_owned()).into();
        };
        self.execute(Program::Open(previous.as_fd()), settings.clone(), settings, &carried, &signals).into()
    }

    fn carried(&self, terms: Option<Terms>) -> Carried {
        Carried { terms, last: self.keeper.handover(), strangers: self.strangers.clone() }
    }

    /// Has signals wait for the next program, and does what those want that came before.
    async fn prepare(&mut self) -> Result<HeldSignals, NotRenewed> {
        let act = "have signals wait";
        let signals = HeldSignals::hold().map_err(|source| RenewalError::System { act, source })?;
        for _ in 0..WISHES_MAX {
            match timeout(SIGNALS_BOUND, self.signals.next()).await {
                Err(_) => return Ok(signals),
                Ok(Wish::Upgrade) => tracing::warn!(reason = UNDER_WAY, "a handover is refused"),
                Ok(stop) => {
                    drop(signals);
                    self.stop(stop);
                    return Err(NotRenewed::Stopping);
                }
            }
        }
        Ok(signals)
    }

    fn execute(
        &self,
        program: Program<'_>,
        settings: Bytes,
        previous_settings: Bytes,
        carried: &Carried,
        signals: &HeldSignals,
    ) -> RenewalError {
        let (starts_ago, delayed) = self.respawn.parts(Instant::now());
        let leavers = self.leaving.leavers();
        let passed = self.keeper.passed();
        let course = Course {
            lock: self.lock.as_fd(),
            last_worker: self.last_worker,
            signals: self.signals.stops,
            respawn: RespawnState { starts_ago, delayed },
            settings,
            previous_settings,
            handover: carried.encode(),
            leaving: leavers.iter().map(|leaver| leaving_state(leaver)).collect(),
            connections: passed.connections().iter().map(passed_state).collect(),
        };
        match save(&self.keeper, course) {
            Ok(saved) => saved.execute(program, &self.programs.serve_args, signals),
            Err(error) => error,
        }
    }
}

fn leaving_state(leaver: &Leaver) -> renewal::Leaving<BorrowedFd<'_>> {
    renewal::Leaving {
        identity: leaver.identity,
        number: leaver.link.worker_number,
        kill_in: leaver.kill_in(),
        // Without it the worker would think its keeper gone, and drop what it is at.
        socket: Some(leaver.link.socket()),
        note: Bytes::copy_from_slice(&[u8::from(leaver.link.is_mid_message())]),
    }
}

fn passed_state(held: &Held) -> renewal::Passed<BorrowedFd<'_>> {
    renewal::Passed { listener: held.listener.clone(), socket: held.socket.as_fd(), read: held.read.clone() }
}

/// Goes on seeing off a worker that was leaving when the keeper was renewed.
pub(super) fn see_off(keeper: &Rc<Keeper>, leaving: &Rc<Leaving>, left: renewal::Leaving<std::os::fd::OwnedFd>) {
    let Some(socket) = left.socket else {
        tracing::error!(worker = left.number, "a leaving worker has lost its socket");
        return;
    };
    let is_mid_message = left.note.first() != Some(&0);
    match Worker::leaving(keeper, left.identity, left.number, socket, is_mid_message) {
        Ok(worker) => leaving.add(worker, left.kill_in),
        Err(error) => tracing::error!(worker = left.number, %error, "a leaving worker can't be watched any more"),
    }
}

/// How long a signal may take to be noticed that came before signals were held back.
const SIGNALS_BOUND: Duration = Duration::from_millis(2);

/// How many wishes are looked at before the program is executed.
const WISHES_MAX: u32 = 8;
