//! Signals that wait while a program takes another's place.
//!
//! Handlers do not survive an execution, so a signal that comes in between would end the process and take the children's
//! keeper away. Signals that are blocked survive it: they wait until the new program has its handlers.

use std::io;
use std::marker::PhantomData;

use nix::sys::signal::{SigSet, Signal};

/// The signals that a keeper acts on wait for as long as this lives, over an execution too.
///
/// Nothing must be started meanwhile: it would inherit that.
#[derive(Debug)]
pub(crate) struct HeldSignals {
    /// It is about the thread that made it.
    of_thread: PhantomData<*const ()>,
}

impl HeldSignals {
    /// Has them wait from now on.
    pub(crate) fn hold() -> io::Result<Self> {
        held().thread_block()?;
        Ok(Self { of_thread: PhantomData })
    }
}

impl Drop for HeldSignals {
    fn drop(&mut self) {
        if let Err(error) = held().thread_unblock() {
            tracing::error!(%error, "signals can't reach the keeper");
        }
    }
}

fn held() -> SigSet {
    HELD.into_iter().collect()
}

/// What ends an unprepared process, or is missed by it.
const HELD: [Signal; 4] = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGTERM, Signal::SIGCHLD];
