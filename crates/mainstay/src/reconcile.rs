//! Repair loops: idempotent, without arguments, run at their time and when rung. There is no second path for the
//! happy case.

pub mod adopt;
pub mod expire;
pub mod owed;

use std::sync::Arc;

use crate::engine::Engine;
use crate::runtime::spawn;

/// Starts every loop; they end with the worker.
pub fn start(engine: &Arc<Engine>) {
    spawn(expire::run(Arc::clone(engine)));
    spawn(owed::run(Arc::clone(engine)));
    spawn(adopt::run(Arc::clone(engine)));
}
