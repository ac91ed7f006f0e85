//! A connection's turns: what is woken while it is being polled is polled again at once, by the same thread.
//!
//! The runtime takes a task that is woken in its own turn for one that gives way to others: it goes to the end of the queue,
//! and another thread is woken to take it from there. The two ends of a body that are polled in one turn do that to each other
//! with every message.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;

/// The turns of one task.
pub(super) struct Turns {
    relay: Arc<Relay>,
    waker: Waker,
}

/// Wakes the task, unless it is awake.
#[derive(Default)]
struct Relay {
    state: AtomicU8,
    task: AtomicWaker,
}

impl Turns {
    pub(super) fn new() -> Self {
        let relay = Arc::new(Relay::default());
        Self { waker: Waker::from(Arc::clone(&relay)), relay }
    }

    /// Waits until `poll` is ready.
    pub(super) async fn until<T>(&self, mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>) -> T {
        poll_fn(|context| self.poll(context, &mut poll)).await
    }

    fn poll<T>(&self, context: &Context<'_>, poll: &mut impl FnMut(&mut Context<'_>) -> Poll<T>) -> Poll<T> {
        self.relay.task.register(context.waker());
        for _ in 0..POLLS_MAX {
            self.relay.state.store(POLLED, Ordering::SeqCst);
            let polled = poll(&mut Context::from_waker(&self.waker));
            let woken = self.relay.state.swap(ASLEEP, Ordering::SeqCst) == WOKEN;
            if polled.is_ready() || !woken {
                return polled;
            }
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }
}

impl Wake for Relay {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.state.compare_exchange(POLLED, WOKEN, Ordering::SeqCst, Ordering::SeqCst) == Err(ASLEEP) {
            self.task.wake();
        }
    }
}

/// Not in a turn: whoever has news wakes the task.
const ASLEEP: u8 = 0;
/// In a turn.
const POLLED: u8 = 1;
/// In a turn, and there has been news meanwhile.
const WOKEN: u8 = 2;
/// How often a turn is prolonged before others have theirs.
const POLLS_MAX: usize = 4;

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[derive(Default)]
    struct Task(AtomicUsize);

    impl Wake for Task {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Polls once; how often `poll` was called then, and the task woken.
    fn one_turn(turns: &Turns, mut poll: impl FnMut(&mut Context<'_>, usize) -> Poll<()>) -> (Poll<()>, usize, usize) {
        let (task, mut polls) = (Arc::new(Task::default()), 0);
        let waker = Waker::from(Arc::clone(&task));
        let polled = turns.poll(&Context::from_waker(&waker), &mut |context: &mut Context<'_>| {
            polls += 1;
            poll(context, polls)
        });
        (polled, polls, task.0.load(Ordering::Relaxed))
    }

    #[test]
    fn what_is_woken_in_its_turn_is_polled_again_in_it() {
        let polled = one_turn(&Turns::new(), |context, polls| {
            context.waker().wake_by_ref();
            if polls == 2 { Poll::Ready(()) } else { Poll::Pending }
        });
        assert_eq!(polled, (Poll::Ready(()), 2, 0));
    }

    #[test]
    fn what_wakes_itself_for_ever_gives_way() {
        let polled = one_turn(&Turns::new(), |context, _| {
            context.waker().wake_by_ref();
            Poll::Pending
        });
        assert_eq!(polled, (Poll::Pending, POLLS_MAX, 1));
    }

    #[test]
    fn what_is_woken_between_turns_wakes_its_task() {
        let (turns, task) = (Turns::new(), Arc::new(Task::default()));
        let waker = Waker::from(Arc::clone(&task));
        let mut inner = None;
        assert!(
            turns
                .poll(&Context::from_waker(&waker), &mut |context: &mut Context<'_>| {
                    inner = Some(context.waker().clone());
                    Poll::<()>::Pending
                })
                .is_pending()
        );
        assert_eq!(task.0.load(Ordering::Relaxed), 0);
        inner.expect("a waker").wake();
        assert_eq!(task.0.load(Ordering::Relaxed), 1);
    }
}
