//! Repair loops: idempotent, without arguments, run at their time and when rung. There is no second path for the
//! happy case.

pub mod adopt;
pub mod expire;
pub mod note_use;
pub mod owed;
pub mod questions;
pub mod remember;
pub mod removed;
pub mod suspend;
pub mod trim;
pub mod unclaimed;
pub mod watch;

use std::sync::Arc;

use tokio::task::JoinHandle;

use crate::engine::Engine;
use crate::runtime::spawn;

/// Starts every loop. They end with the worker's drain; one that ends otherwise has panicked, and the worker with it.
pub fn start(engine: &Arc<Engine>) -> Vec<JoinHandle<()>> {
    vec![
        spawn(expire::run(Arc::clone(engine))),
        spawn(owed::run(Arc::clone(engine))),
        spawn(adopt::run(Arc::clone(engine))),
        spawn(removed::run(Arc::clone(engine))),
        spawn(suspend::run(Arc::clone(engine))),
        spawn(note_use::run(Arc::clone(engine))),
        spawn(questions::run(Arc::clone(engine))),
        spawn(trim::run(Arc::clone(engine))),
        spawn(unclaimed::run(Arc::clone(engine))),
        spawn(remember::run(Arc::clone(engine))),
    ]
}
