//! Workers that have handed over and stay for their calls on HTTP servers: how their successor knows of them, sees their
//! calls, and reaches these (T2, R4, R8).
//!
//! Nothing is sent between the two. That a leaver lives is a lock, which the system lets go of however it ends
//! (`presence`). Its calls stand in the journal, claimed by its epoch: there its successor reads what it appends. What the
//! leaver must heed stands where it is written anyway: a session that has ended in the ledger, a stream that was taken
//! from it in the journal; the leaver looks there from time to time (`stay`). So whoever is killed, at any
//! instruction, leaves the other with what is true.
//!
//! In its successor a leaver's call counts as one in flight (`oversee`): operators see it, a drain waits for it, its
//! session is not idle, a cancellation finds it.

mod looks;
mod oversee;
mod presence;
mod stay;

use std::collections::BTreeSet;
use std::path::PathBuf;

use mainstay_core::call::StreamId;
use mainstay_core::id::{Epoch, SessionKey};
use parking_lot::Mutex;

use self::looks::Looks;
pub use self::presence::Presence;
pub(crate) use self::stay::Recorded;

/// What a worker knows of earlier ones that have handed over and still live. None is ever added: whoever leaves has done
/// so before its successor begins.
pub struct Leavers {
    /// Where their presence is declared; `None` where nothing outlives a worker.
    folder: Option<PathBuf>,
    living: Mutex<BTreeSet<Epoch>>,
    /// The streams of theirs that somebody sees to.
    overseen: Mutex<BTreeSet<(SessionKey, StreamId)>>,
    looks: Looks,
}

impl Leavers {
    /// There are none, and never will be: the ledger is in memory.
    pub fn none() -> Self {
        Self { folder: None, living: Mutex::default(), overseen: Mutex::default(), looks: Looks::default() }
    }

    /// Those whose presence is declared in `folder`. Of those that are gone nothing is left behind.
    pub fn look(folder: PathBuf) -> Self {
        let living = presence::present(&folder);
        Self { folder: Some(folder), living: Mutex::new(living), overseen: Mutex::default(), looks: Looks::default() }
    }

    /// Declares that the worker of `epoch` lives on while its successor serves, for as long as the process holds what is
    /// returned. `None` if that can't be declared, which is logged: the successor takes it for gone, tells the outcome of
    /// its calls as unknown to clients that come back, and takes their streams.
    pub fn declare(&self, epoch: Epoch) -> Option<Presence> {
        let declared = Presence::declare(self.folder.as_deref()?, epoch);
        declared
            .inspect_err(|error| {
                tracing::warn!(error = %error, "the next worker can't be told of the calls that this one stays for");
            })
            .ok()
    }

    /// Those that are not known to be gone.
    pub(crate) fn living(&self) -> Vec<Epoch> {
        self.living.lock().iter().copied().collect()
    }

    /// Whether all are known to be gone. Costs no look.
    pub(crate) fn are_gone(&self) -> bool {
        self.living.lock().is_empty()
    }

    /// The leaver whose epoch has that number.
    pub(crate) fn of(&self, counter: u64) -> Option<Epoch> {
        self.living.lock().iter().copied().find(|epoch| epoch.counter == counter)
    }

    /// Whether the worker of `epoch` is a leaver and lives. One that does not has appended its last.
    pub(crate) fn is_present(&self, epoch: Epoch) -> bool {
        let Some(folder) = &self.folder else { return false };
        if !self.living.lock().contains(&epoch) {
            return false;
        }
        let present = presence::is_present(folder, epoch);
        if !present {
            self.living.lock().remove(&epoch);
        }
        present
    }

    /// Whether nobody saw to this stream, so that the caller is to do it now.
    fn charge(&self, session: SessionKey, stream: StreamId) -> bool {
        self.overseen.lock().insert((session, stream))
    }

    /// Nobody sees to this stream any more.
    fn discharge(&self, session: SessionKey, stream: StreamId) {
        self.overseen.lock().remove(&(session, stream));
    }
}
