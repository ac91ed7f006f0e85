//! One at a time: what many callers need at once is done by one of them for all (U4).

use std::sync::Mutex;

use crate::failure::Failure;
use crate::wire::lock;

/// Makes something for all who want it at the same time.
///
/// Callers that waited while an attempt failed share its failure instead of trying one after the other; a caller that
/// comes later tries anew.
#[derive(Debug, Default)]
pub(crate) struct Flight {
    turn: tokio::sync::Mutex<()>,
    landed: Mutex<Landed>,
}

#[derive(Debug, Default)]
struct Landed {
    count: u64,
    failure: Option<Box<Failure>>,
}

impl Flight {
    /// What `ready` finds, once it finds something; else what `fly` makes. Must not be cancelled halfway if `fly` must
    /// not: run it in a task of its own.
    pub(crate) async fn join<T>(
        &self,
        ready: impl Fn() -> Option<T>,
        fly: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let seen = lock(&self.landed).count;
        let _turn = self.turn.lock().await;
        if let Some(found) = ready() {
            return Ok(found);
        }
        {
            let landed = lock(&self.landed);
            if landed.count != seen
                && let Some(failure) = &landed.failure
            {
                return Err(failure.as_ref().clone());
            }
        }
        let outcome = fly.await;
        let mut landed = lock(&self.landed);
        landed.count += 1;
        landed.failure = outcome.as_ref().err().map(|failure| Box::new(failure.clone()));
        outcome
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use mainstay_core::id::ServerName;

    use super::*;
    use crate::task::spawn;

    fn failure() -> Failure {
        Failure::LostAgain { server: ServerName::parse("s").expect("a name") }
    }

    #[tokio::test(start_paused = true)]
    async fn u4_those_who_waited_share_what_was_made_or_why_it_was_not() {
        for succeeds in [true, false] {
            let (flight, made, flights) =
                (Arc::new(Flight::default()), Arc::new(Mutex::new(None)), Arc::new(AtomicU32::new(0)));
            let callers = (0..50).map(|_| {
                let (flight, made, flights) = (Arc::clone(&flight), Arc::clone(&made), Arc::clone(&flights));
                spawn(async move {
                    let ready = || *lock(&made);
                    let fly = async {
                        flights.fetch_add(1, Ordering::Relaxed);
                        tokio::time::sleep(Duration::from_secs(1)).await;
                        if succeeds {
                            *lock(&made) = Some(7);
                        }
                        if succeeds { Ok(7) } else { Err(failure()) }
                    };
                    flight.join(ready, fly).await
                })
            });
            for caller in callers.collect::<Vec<_>>() {
                let outcome = caller.await.expect("no panic");
                assert_eq!(outcome.ok(), succeeds.then_some(7));
            }
            assert_eq!(flights.load(Ordering::Relaxed), 1);
        }
    }
}
