//! What the keeper is told by signals, and by a worker that asks for the gateway's end.

use std::io;
use std::rc::Rc;

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::keeper::Keeper;

/// Where the wish to stop, and the wish for another program, come from.
pub(super) struct Signals {
    keeper: Rc<Keeper>,
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
    /// How many have told the keeper to stop.
    pub(super) stops: u32,
}

/// What somebody wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    /// Drain, then end. The first signal, or a worker's wish.
    Stop { retire: bool },
    /// Nobody wants to wait any more.
    StopAtOnce,
    /// The program as it is on disk.
    Upgrade,
}

impl Signals {
    pub(super) fn new(keeper: Rc<Keeper>, stops: u32) -> io::Result<Self> {
        Ok(Self {
            keeper,
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
            stops,
        })
    }

    /// Waits for the next wish. Cancel-safe.
    pub(super) async fn next(&mut self) -> Wish {
        loop {
            tokio::select! {
                Some(()) = self.terminate.recv() => return self.stop(),
                Some(()) = self.interrupt.recv() => return self.stop(),
                Some(()) = self.hang_up.recv() => return Wish::Upgrade,
                () = self.keeper.shutdown_asked.notified() => {
                    if let Some(retire) = self.keeper.take_shutdown() {
                        tracing::info!(retire, "the worker asks to stop");
                        return Wish::Stop { retire };
                    }
                }
            }
        }
    }

    fn stop(&mut self) -> Wish {
        self.stops += 1;
        tracing::info!(count = self.stops, "told to stop by a signal");
        if self.stops == 1 { Wish::Stop { retire: false } } else { Wish::StopAtOnce }
    }
}
