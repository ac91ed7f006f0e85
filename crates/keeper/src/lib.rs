//! Mainstay's keeper: the small, long-lived parent process, and the worker's way to it.
//!
//! The keeper holds what must outlive a worker: listening sockets, stdio children with their pipes, and the lock on the
//! state directory. It starts workers one after the other and parses nothing but line ends. [`client`] is the other
//! side, used inside the worker. `PROTOCOL.md` describes what they say to each other.

pub use identity::{BootId, ProcessIdentity, Signal, SignalError, signal};
pub use lock::{Lock, LockError, Owner, acquire_lock, read_owner};
pub use protocol::{CONNECTION_READ_BYTES_MAX, FRAME_BYTES_MAX, PROTOCOL_VERSION, ProtocolError};
pub use renewal::{FORMAT as RENEWAL_FORMAT, RenewalError, Renewed, Unusable};
pub use run::{Ended, KeeperError, Plan, Stage, run};
pub use state::{StateError, ensure_private_dir};
pub use stderr::stderr_logs;
pub use sweep::{Swept, sweep};
pub use types::{
    CALL_TAG_BYTES, CHILDREN_MAX, CUSTODY_BYTES_MAX, CUSTODY_FRAMES_MAX, CallTag, ChildId, Exit, Handover,
    HandoverOutcome, LABEL_BYTES_MAX, LINE_BYTES_MAX, MARKER_VARIABLE, OPEN_CALLS_MAX, STDERR_TAIL_BYTES_MAX,
    STDIN_BYTES_MAX, Spawn, SpawnFailure, UNCHANGED,
};

pub mod client;

mod channel;
mod child;
mod custody;
mod identity;
mod keeper;
mod leaving;
mod link;
mod lock;
mod open_calls;
mod orphans;
mod passed;
mod pidfd;
mod process;
mod protocol;
mod record;
mod renewal;
mod respawn;
mod run;
mod socket;
mod state;
mod stderr;
mod sweep;
mod tree;
mod types;
mod worker;
