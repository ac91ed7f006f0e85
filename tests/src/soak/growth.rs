//! Memory, descriptors and zombies of keeper and worker over time.

use super::course::workers;
use crate::procs::{Proc, zombies};
use anyhow::{Context as _, Result};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::task::JoinHandle;

/// Means over the first, the second and the last third of the time.
#[derive(Debug, Clone, Copy, Default)]
pub struct Thirds(pub [f64; 3]);

/// What was seen.
#[derive(Debug, Clone, Default)]
pub struct Growth {
    /// Resident memory of the keeper in MiB.
    pub keeper_mib: Thirds,
    /// Descriptors of the keeper.
    pub keeper_files: Thirds,
    /// Resident memory of each worker when it was seen last, in MiB.
    pub worker_mib: Thirds,
    /// Descriptors of each worker when it was seen last.
    pub worker_files: Thirds,
    /// Workers that were seen.
    pub workers: usize,
    /// Zombies that were still there when they were looked for again.
    pub zombies: usize,
}

/// Looks at the processes from time to time.
pub(super) struct Watch {
    stop: Arc<AtomicBool>,
    watching: JoinHandle<Growth>,
}

impl Watch {
    pub(super) fn start(keeper: u32) -> Watch {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let watching = tokio::spawn(async move {
            let mut seen = Seen::default();
            while !stopped.load(Ordering::Relaxed) {
                seen.look(keeper);
                tokio::time::sleep(LOOK_EVERY).await;
            }
            seen.growth()
        });
        Watch { stop, watching }
    }

    pub(super) async fn end(self) -> Result<Growth> {
        self.stop.store(true, Ordering::Relaxed);
        self.watching.await.context("the watch failed in itself")
    }
}

#[derive(Default)]
struct Seen {
    keeper: Vec<(f64, f64)>,
    /// The last sight of each worker.
    workers: Vec<(Proc, (f64, f64))>,
    zombies: BTreeSet<Proc>,
    lasting_zombies: BTreeSet<Proc>,
}

impl Seen {
    fn look(&mut self, keeper: u32) {
        if let Some(process) = Proc::of(keeper) {
            self.keeper.push(sight(process));
        }
        if let Some(worker) = workers(keeper).into_iter().max_by_key(|worker| (worker.start, worker.pid)) {
            let (sight, last) = (sight(worker), self.workers.last_mut());
            // One that was killed meanwhile has nothing any more.
            if worker.is_alive() {
                match last {
                    Some((known, latest)) if *known == worker => *latest = sight,
                    _ => self.workers.push((worker, sight)),
                }
            }
        }
        let now = zombies(keeper);
        self.lasting_zombies.extend(now.intersection(&self.zombies));
        self.zombies = now;
    }

    fn growth(&self) -> Growth {
        let workers: Vec<_> = self.workers.iter().map(|(_, sight)| *sight).collect();
        let of =
            |sights: &[(f64, f64)], part: fn(&(f64, f64)) -> f64| thirds(&sights.iter().map(part).collect::<Vec<_>>());
        Growth {
            keeper_mib: of(&self.keeper, |sight| sight.0),
            keeper_files: of(&self.keeper, |sight| sight.1),
            worker_mib: of(&workers, |sight| sight.0),
            worker_files: of(&workers, |sight| sight.1),
            workers: workers.len(),
            zombies: self.lasting_zombies.len(),
        }
    }
}

fn sight(process: Proc) -> (f64, f64) {
    (process.resident_bytes() as f64 / MIB, process.open_files() as f64)
}

fn thirds(values: &[f64]) -> Thirds {
    let third = values.len() / 3;
    let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len().max(1) as f64;
    Thirds([mean(&values[..third]), mean(&values[third..2 * third]), mean(&values[2 * third..])])
}

impl std::fmt::Display for Thirds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [first, second, last] = self.0;
        write!(f, "{first:.1}, {second:.1}, {last:.1} ({:+.1})", last - first)
    }
}

const LOOK_EVERY: Duration = Duration::from_millis(500);
const MIB: f64 = 1024.0 * 1024.0;

#[cfg(test)]
mod tests {
    use super::thirds;

    #[test]
    fn thirds_are_means_and_the_rest_belongs_to_the_last() {
        assert_eq!(thirds(&[1.0, 3.0, 4.0, 4.0, 7.0, 9.0, 8.0]).0, [2.0, 4.0, 8.0]);
        assert_eq!(thirds(&[]).0, [0.0; 3]);
    }
}
