//! How long a call of an earlier worker is waited for.
//!
//! A worker that was killed may or may not have handed its last call to the keeper, and nothing in the keeper's count of
//! frames tells which: the frames have no names there. A child that has the call answers it sooner or later; one that
//! has not never will. So it is sent a `ping` behind whatever it was sent before. While that is not answered, the child
//! is at work, perhaps on this very call, and there is no bound but its end. A child that does one thing at a time
//! answers the call first. One that answers the `ping` first works on calls side by side, or never had this one: from
//! then on it may be silent about the call for [`SILENCE_MAX`], and the outcome is unknown after that (U5).

use std::pin::pin;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::slot::Delivery;

/// The wait for one call.
#[derive(Debug, Default)]
pub(super) struct Vigil {
    /// Set once the child has answered the `ping`.
    silent_until: Option<Instant>,
}

impl Vigil {
    /// What comes next for the call; `None` if the child was silent about it for too long. `pong` resolves once the `ping`
    /// is answered. Cancel-safe, if both are.
    pub(super) async fn next(
        &mut self,
        delivery: impl Future<Output = Delivery>,
        pong: impl Future<Output = ()>,
    ) -> Option<Delivery> {
        let (mut delivery, mut pong) = (pin!(delivery), pin!(pong));
        loop {
            let silent_until = self.silent_until;
            let silence = async {
                match silent_until {
                    Some(until) => sleep_until(until).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                delivery = &mut delivery => {
                    self.silent_until = silent_until.map(|_| Instant::now() + SILENCE_MAX);
                    return Some(delivery);
                }
                () = &mut pong, if silent_until.is_none() => self.silent_until = Some(Instant::now() + SILENCE_MAX),
                () = silence => return None,
            }
        }
    }
}

/// How long a child that answers a `ping` may be silent about a call of an earlier worker: no answer, no progress, no
/// other message that goes to it.
pub(super) const SILENCE_MAX: Duration = Duration::from_mins(10);

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;
    use tokio::time::{sleep, timeout};

    use super::*;
    use crate::child::slot::Slot;
    use crate::task::spawn;

    fn message() -> Delivery {
        Delivery::Message { bytes: Bytes::new(), number: 1 }
    }

    #[tokio::test(start_paused = true)]
    async fn r1a_a_child_that_answers_a_ping_and_never_the_call_is_given_up() {
        let (slot, mut vigil) = (Arc::new(Slot::default()), Vigil::default());
        let began = Instant::now();
        let pong = || sleep_until(began + Duration::from_secs(5));
        assert!(vigil.next(slot.next(), pong()).await.is_none());
        assert_eq!(began.elapsed(), Duration::from_secs(5) + SILENCE_MAX);
    }

    #[tokio::test(start_paused = true)]
    async fn r1a_every_sign_of_the_call_begins_the_wait_anew() {
        let (slot, mut vigil) = (Arc::new(Slot::default()), Vigil::default());
        let progressing = Arc::clone(&slot);
        spawn(async move {
            for _ in 0..3 {
                sleep(SILENCE_MAX - Duration::from_secs(1)).await;
                progressing.push(message());
            }
        });
        let began = Instant::now();
        for _ in 0..3 {
            assert!(vigil.next(slot.next(), std::future::ready(())).await.is_some());
        }
        assert!(vigil.next(slot.next(), std::future::ready(())).await.is_none());
        assert_eq!(began.elapsed(), 4 * SILENCE_MAX - Duration::from_secs(3));
    }

    #[tokio::test(start_paused = true)]
    async fn r1a_a_child_that_is_too_busy_for_a_ping_is_waited_for_and_looking_away_loses_nothing() {
        let (slot, mut vigil) = (Arc::new(Slot::default()), Vigil::default());
        for _ in 0..100 {
            let waited = timeout(SILENCE_MAX, vigil.next(slot.next(), std::future::pending())).await;
            assert!(waited.is_err());
        }
        slot.push(message());
        assert!(vigil.next(slot.next(), std::future::pending()).await.is_some());
        // The answered ping is remembered by who looks away.
        assert!(timeout(SILENCE_MAX / 2, vigil.next(slot.next(), std::future::ready(()))).await.is_err());
        let began = Instant::now();
        assert!(vigil.next(slot.next(), std::future::pending()).await.is_none());
        assert_eq!(began.elapsed(), SILENCE_MAX / 2);
    }
}
